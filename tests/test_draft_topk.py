"""Log-softmax and top-k in torch against the reference in float64, in both lanes."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from cuverify.buffers import read
from cuverify.cases import Target
from cuverify.draft_topk import DraftTopk
from cuverify.errors import ArgumentError
from cuverify.ops.tree_build import TreeBuffers, TreeBuild, TreeCode
from cuverify.reference.tree_build import draft_topk
from cuverify.static_buffers import static_buffer, write

gpu = pytest.mark.gpu
both_lanes = pytest.mark.parametrize("xp", ["numpy", pytest.param("torch-cuda", marks=gpu)])


def topk(logits: Any, k: int, xp: Target, dtype: str = "float32") -> tuple[Any, Any]:
    given = static_buffer(xp, logits.shape, dtype)
    write(given, logits)
    values = static_buffer(xp, (*logits.shape[:2], k), "float32")
    ids = static_buffer(xp, values.shape, "int64")
    DraftTopk(given, values, ids)()
    return values, ids


@both_lanes
@pytest.mark.parametrize("dtype", ["float32", "bf16"])
def test_topk_is_the_reference_s(dtype: str, xp: Target) -> None:
    rng = np.random.default_rng(0)
    # all different, in bf16 too
    logits = rng.permuted(np.tile(np.arange(200), (2, 3, 1)), axis=2).astype(np.float32) / 8
    logits[0, 0, ::2] = -np.inf
    bits = (logits.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
    values, ids = topk(bits if dtype == "bf16" else logits, 16, xp, dtype)
    for request in range(2):
        wanted, tokens = draft_topk(logits[request], 16)
        np.testing.assert_array_equal(read(ids)[request], tokens)
        np.testing.assert_allclose(read(values)[request], wanted, rtol=2e-6, atol=2e-6)


@both_lanes
def test_rows_that_make_no_sense_are_flagged_by_the_tree(xp: Target) -> None:
    logits = np.zeros((2, 2, 9), np.float32)
    logits[0, 1, 3] = np.nan
    logits[1, 0] = -np.inf
    values, ids = topk(logits, 4, xp)
    lens = static_buffer(xp, (2,), "int64")
    trees = TreeBuffers.allocate(lens, batch=2, num_tokens=9)
    TreeBuild(values, ids, lens, lens, trees)()
    assert read(trees.status)[:, 0].tolist() == [TreeCode.NOT_FINITE] * 2
    assert read(trees.sizes).tolist() == [5, 1]


def test_misuse_names_the_argument() -> None:
    logits = np.zeros((2, 3, 9), np.float32)
    values, ids = np.zeros((2, 3, 4), np.float32), np.zeros((2, 3, 4), np.int64)
    for arguments, says in (
        ((logits[0], values, ids), "logits=.*batch, depth, vocabulary"),
        ((logits.astype(np.float64), values, ids), "logits=.*float64"),
        ((logits, values[:1], ids), "logprobs="),
        ((logits, values, ids.astype(np.int32)), "token_ids=.*int32"),
        ((logits, values, ids[:, :, :3].copy()), "token_ids="),
        ((logits[:, :, :3].copy(), values, ids), "token_ids=.*1 to 3"),
    ):
        with pytest.raises(ArgumentError, match=f"(?s){says}"):
            DraftTopk(*arguments)
