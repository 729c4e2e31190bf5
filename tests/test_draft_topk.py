"""Log-softmax and top-k against the reference in float64, in both lanes."""

from __future__ import annotations

import math
from typing import Any, Literal

import numpy as np
import pytest
from cuverify.validators.compare import compare_all, host_array
from hypothesis import example, given
from hypothesis import strategies as st

import cuverify
from cuverify.buffers import read
from cuverify.cases import Target
from cuverify.cases.draft_topk import CASE, LOGITS_KINDS, DraftTopkStep, LogitsBatch
from cuverify.errors import ArgumentError
from cuverify.ops.draft_topk import DraftTopk, draft_topk_kernels
from cuverify.ops.tree_build import TreeBuffers, TreeBuild, TreeCode
from cuverify.reference.draft_topk import draft_topk
from cuverify.static_buffers import static_buffer
from cuverify.strategies import examples

INF = math.inf
Schedule = Literal["ascending", "descending", "random"]
gpu = pytest.mark.gpu
both_lanes = pytest.mark.parametrize("xp", ["numpy", pytest.param("torch-cuda", marks=gpu)])

# tiles of 128 logits: several in a piece
SMALL = {"TOPK_THREADS": 64, "TOPK_EACH": 2}


def assert_right(step: DraftTopkStep, note: str) -> None:
    step.poison()
    step()
    outputs = {name: host_array(tensor) for name, tensor in step.outputs.items()}
    wrong = compare_all(outputs, step.expected(), CASE.tolerances)
    assert [str(each) for each in wrong] == [], note


def check_rows(
    seed: int, vocabulary: int, k: int, xp: Target, *, pieces: int | None = None, depth: int = 3,
    values: dict[str, int] | None = None,
) -> None:  # fmt: skip
    rng = np.random.default_rng(seed)
    for number, kind in enumerate(LOGITS_KINDS):
        batch = LogitsBatch.draw(
            rng, (2, depth, vocabulary), min(k, vocabulary), kind=kind, bf16=number % 2 == seed % 2
        )
        step = DraftTopkStep(batch, xp, pieces=pieces, values=values)
        assert_right(step, f"{kind}, {batch}, seed {seed}, {pieces} pieces")


drawn = {
    "seed": st.integers(0, 2**32 - 1),
    "vocabulary": st.sampled_from([1, 2, 64, 65, 127, 128, 129, 700]),
    "k": st.sampled_from([1, 2, 3, 16, 64]),
    "pieces": st.sampled_from([None, 1, 2, 3, 9]),
}


@examples(25)
@given(**drawn)
@example(seed=0, vocabulary=9000, k=16, pieces=None)
@example(seed=1, vocabulary=5000, k=64, pieces=200)
def test_drawn_rows(seed: int, vocabulary: int, k: int, pieces: int | None) -> None:
    check_rows(seed, vocabulary, k, "numpy", pieces=pieces, values=SMALL)


@examples(6)
@given(**drawn, schedule=st.sampled_from(["ascending", "descending", "random"]))
@example(seed=3, vocabulary=700, k=3, pieces=1, schedule="random")
def test_drawn_rows_under_the_checkers(
    seed: int, vocabulary: int, k: int, pieces: int | None, schedule: Schedule
) -> None:
    with cuverify.checked(schedule=schedule, seed=seed):
        check_rows(seed, vocabulary, k, "numpy", pieces=pieces, depth=1, values=SMALL)


@gpu
@pytest.mark.parametrize(
    ("vocabulary", "k", "pieces"),
    [(1, 1, None), (129, 64, 3), (20_011, 16, None), (20_011, 5, 1), (163_840, 64, 100)],
)
def test_rows_on_a_gpu(vocabulary: int, k: int, pieces: int | None) -> None:
    check_rows(k, vocabulary, k, "torch-cuda", pieces=pieces, depth=5)


@both_lanes
def test_rows_that_make_no_sense_are_flagged_by_the_tree(xp: Target) -> None:
    logits = np.zeros((2, 2, 9), np.float32)
    logits[0, 1, 3] = np.nan
    logits[1, 0] = -np.inf
    step = DraftTopkStep(LogitsBatch(logits, 4), xp)
    step()
    lens = static_buffer(xp, (2,), "int64")
    trees = TreeBuffers.allocate(lens, batch=2, num_tokens=9)
    TreeBuild(step.logprobs, step.token_ids, lens, lens, trees)()
    assert read(trees.status)[:, 0].tolist() == [TreeCode.NOT_FINITE] * 2
    assert read(trees.sizes).tolist() == [5, 1]


# The reference


def test_topk_is_a_log_softmax() -> None:
    logits = np.array([[1.0, 3.0, 2.0, -INF], [700.0, -700.0, 700.0, 0.0]], np.float32)
    logprobs, tokens = draft_topk(logits, 3)
    assert tokens.tolist() == [[1, 2, 0], [0, 2, 3]]
    assert logprobs.dtype == np.float32
    norm = math.log(math.exp(1) + math.exp(2) + math.exp(3))
    np.testing.assert_allclose(logprobs[0], [3 - norm, 2 - norm, 1 - norm], rtol=1e-6)
    np.testing.assert_allclose(logprobs[1], [-math.log(2)] * 2 + [-700 - math.log(2)], rtol=1e-6)
    large = draft_topk(np.array([[3e30, 3e30, 1e30]]), 3)[0]
    np.testing.assert_allclose(large, [[-math.log(2), -math.log(2), -2e30]], rtol=1e-6)
    assert draft_topk(np.zeros((0, 4)), 2)[0].shape == (0, 2)
    everything = draft_topk(np.random.default_rng(0).normal(size=(3, 50)), 50)[0]
    np.testing.assert_allclose(np.exp(everything.astype(np.float64)).sum(axis=1), 1, rtol=1e-6)


def test_rows_that_are_no_distribution_have_no_log_probabilities() -> None:
    rows = [[1.0, math.nan, 2.0], [1.0, INF, 1.0], [-INF] * 3, [math.nan] * 3, [-INF, 0.0, -INF]]
    logprobs, tokens = draft_topk(rows, 2)
    assert np.isnan(logprobs[:4]).all()
    assert logprobs[4].tolist() == [0, -INF]
    assert tokens.tolist() == [[2, 0], [1, 0], [0, 1], [0, 0], [1, 0]]


@pytest.mark.parametrize(
    ("logits", "k", "said"),
    [
        ([1.0], 1, "logits=.*must be a table"),
        ([["a"]], 1, "logits=.*must be a table of numbers"),
        ([[1.0, 2.0]], 3, "k=3: must lie in 1 to 2"),
        ([[1.0, 2.0]], 0, "k=0"),
        (np.zeros((2, 0)), 1, "the vocabulary is empty"),
    ],
)
def test_logits_that_are_refused(logits: Any, k: int, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        draft_topk(logits, k)


# Resources and misuse


@pytest.mark.parametrize("arch", ["sm_80", "sm_90", "sm_100", "sm_120"])
def test_the_kernels_need_no_local_memory(arch: str) -> None:
    for kernel in CASE.kernels():
        resources = kernel.compile(arch).resources[kernel.name]
        assert (resources.spill_store_bytes, resources.stack_bytes) == (0, 0), resources
    assert set(draft_topk_kernels()) == {"draft_topk_partials", "draft_topk_merge"}


def test_misuse_names_the_argument() -> None:
    logits = np.zeros((2, 3, 9), np.float32)
    values, ids = np.zeros((2, 3, 4), np.float32), np.zeros((2, 3, 4), np.int64)
    wide, many = np.zeros((1, 1, 99), np.float32), np.zeros((1, 1, 65))
    shared = np.zeros((2, 3, 4), np.float32)
    for arguments, says in (
        ((logits[0], values, ids), "logits=.*batch, depth, vocabulary"),
        ((logits.astype(np.float64), values, ids), "logits=.*float64"),
        ((logits, values[:1], ids), "logprobs="),
        ((logits, values, ids.astype(np.int32)), "token_ids=.*int32"),
        ((logits, values, ids[:, :, :3].copy()), "token_ids="),
        ((logits[:, :, :3].copy(), values, ids), "token_ids=.*1 to 3"),
        ((wide, many.astype(np.float32), many.astype(np.int64)), "token_ids=.*1 to 64"),
        ((logits[:, :, ::2], values, ids), "logits=.*contiguous"),
        ((shared, shared, ids), "logprobs=.*shares memory with logits"),
    ):
        with pytest.raises(ArgumentError, match=f"(?s){says}"):
            DraftTopk(*arguments)
    with pytest.raises(ArgumentError, match="pieces=0"):
        DraftTopk(logits, values, ids, pieces=0)
