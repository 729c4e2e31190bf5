"""The published table says what is done, and its bounds tell right results from wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuverify.validators import Bounded
from cuverify.validators.compare import HostArray, compare, compare_all, differing, host_array
from cuverify.validators.runs import run_record
from hypothesis import given

from cuverify import tolerances
from cuverify.errors import ArgumentError
from cuverify.kv_layout import KvLayout
from cuverify.reference.verify_attention import Attention
from cuverify.reference.verify_attention import verify_attention as oracle
from cuverify.strategies import examples, verify_batches
from cuverify.tolerances import attention_bounds, row_size
from cuverify.torch_oracle import baseline_attention
from cuverify.tree import DraftTree
from cuverify.verify_batch import VerifyBatch

ROOT = Path(__file__).resolve().parent.parent


def bf16(values: Any) -> np.ndarray[Any, Any]:
    """Round to bf16, to the nearest, and return the bits."""
    import torch

    return torch.tensor(values).bfloat16().view(torch.int16).numpy().view(np.uint16)  # type: ignore[no-any-return]


def bounds_of(arguments: dict[str, Any]) -> tuple[Attention, dict[str, Bounded]]:
    exact = oracle(**arguments)
    return exact, attention_bounds(exact, baseline_attention(**arguments, device="cpu"))


def wrong(out: Any, lse: Any, bounds: dict[str, Bounded]) -> set[str]:
    found = {"out": HostArray(bf16(out), "bf16"), "lse": host_array(lse.astype(np.float32))}
    return {mismatch.output for mismatch in compare_all(found, bounds)}


def long_batch(prefix: int = 20_000, nodes: int = 33, **more: Any) -> VerifyBatch:
    layout = KvLayout.build(seq_lens=[prefix], tree_tokens=[nodes], placement="scattered", rng=3)
    return VerifyBatch(layout, [DraftTree.random(nodes, 4)], latent=64, rope=16, **more)


def test_the_published_page_is_the_table() -> None:
    page = (ROOT / "docs" / "tolerances.md").read_text(encoding="utf-8")
    assert page == tolerances.to_markdown()


@examples(40)
@given(verify_batches(max_requests=2, widths=((64, 16), (16, 16), (512, 64))))
def test_rounding_alone_is_within_bounds_and_the_baseline_is_as_modelled(
    batch: VerifyBatch,
) -> None:
    arguments = batch.oracle_arguments()
    exact, bounds = bounds_of(arguments)
    assert wrong(exact.out, exact.lse, bounds) == set()
    baseline = baseline_attention(**arguments, device="cpu")
    assert wrong(baseline.out, baseline.lse, bounds) == set()
    # no row of the baseline is far from what the size says
    rms = np.sqrt(np.mean((baseline.out - exact.out) ** 2, axis=2))
    assert (rms <= 1.2 * tolerances.UNIT * row_size(exact) + 1e-30).all()


@pytest.mark.parametrize("spread", [0.0, 1.0, 2.0])
def test_a_single_mask_bit_shows_behind_a_long_prefix(spread: float) -> None:
    batch = long_batch(spread=spread)
    arguments = batch.oracle_arguments()
    _, bounds = bounds_of(arguments)
    node, tree = 20, batch.trees[0]
    for other in (0, *tree.ancestors(node)[1:-1], node, 19, 32):
        visible = arguments["visible"].copy()
        visible[node] ^= np.uint64(1) << np.uint64(other)
        found = oracle(**{**arguments, "visible": visible})
        assert "out" in wrong(found.out, found.lse, bounds), other
        rows = compare("out", HostArray(bf16(found.out), "bf16"), bounds["out"])
        assert rows is not None
        assert rows.index[0] == node


def test_a_lost_row_at_an_end_of_the_prefix_shows() -> None:
    batch = long_batch(spread=0.0)
    arguments = batch.oracle_arguments()
    _, bounds = bounds_of(arguments)
    slots = arguments["kv_indices"]
    for lost in (slots[1:], slots[:-1], np.delete(slots, 1), np.delete(slots, -2)):
        shorter = {"kv_indices": lost, "kv_indptr": np.array([0, len(lost)])}
        found = oracle(**{**arguments, **shorter})
        assert wrong(found.out, found.lse, bounds) == {"out", "lse"}


def test_other_mistakes_show() -> None:
    batch = long_batch(500)
    arguments = batch.oracle_arguments()
    exact, bounds = bounds_of(arguments)
    scaled = oracle(**{**arguments, "sm_scale": arguments["sm_scale"] * 1.02})
    assert wrong(scaled.out, scaled.lse, bounds) == {"out", "lse"}
    assert wrong(exact.out, exact.lse / np.log(2), bounds) == {"lse"}
    assert wrong(exact.out, exact.lse + 1e-3, bounds) == {"lse"}
    assert wrong(exact.out[:, ::-1].copy(), exact.lse, bounds) == {"out"}
    assert wrong(exact.out * 1.01, exact.lse, bounds) == {"out"}
    off = exact.out.copy()
    off[7, 3, 9] += 0.05 * row_size(exact)[7, 3]
    assert wrong(off, exact.lse, bounds) == {"out"}
    off[7, 3, 9] = np.nan
    assert wrong(off, exact.lse, bounds) == {"out"}


def test_a_row_that_sees_nothing_must_be_zero() -> None:
    batch = long_batch(0, 3)
    arguments = batch.oracle_arguments()
    arguments["visible"] = np.array([[0], [2], [4]], np.uint64)
    exact, bounds = bounds_of(arguments)
    assert wrong(exact.out, exact.lse, bounds) == set()
    assert wrong(np.where(exact.out == 0, 1e-30, exact.out), exact.lse, bounds) == {"out"}
    assert wrong(exact.out, np.maximum(exact.lse, -1e30), bounds) == {"lse"}


def test_bounds_of_elements_and_of_rows() -> None:
    values = np.zeros((2, 4))
    reference = Bounded(values, np.array([[1.0], [2.0]]), np.array([0.6, np.inf]))

    def off(*elements: float) -> list[list[int]]:
        actual = np.array(elements, np.float32).reshape(2, 4)
        return np.argwhere(differing(host_array(actual), reference)).tolist()  # type: ignore[no-any-return]

    assert off(0, 0, 0, 0, 0, 0, 0, 0) == []
    assert off(1, 0, 0, 0, 2, 2, 2, 2) == []
    assert off(1.1, 0, 0, 0, 2.1, 0, 0, 0) == [[0, 0], [1, 0]]
    # the row is too far off as a whole: the elements that are to blame
    assert off(0.1, 0.9, 0.9, 0.2, 0, 0, 0, 0) == [[0, 1], [0, 2]]
    assert off(np.nan, 0, 0, np.inf, 0, 0, 0, 0) == [[0, 0], [0, 3]]
    same = Bounded(np.array([[np.nan, np.inf, -np.inf]]), 0.5, np.array([0.1]))
    assert not differing(host_array(same.values.copy()), same).any()
    assert differing(host_array(-same.values), same).tolist() == [[False, True, True]]


def test_a_mismatch_says_what_was_allowed() -> None:
    reference = Bounded(np.array([[1.0, 2.0]]), 0.25, np.array([0.125]))
    found = compare("out", host_array(np.array([[1.0, 2.5]])), reference)
    assert found is not None
    text = str(found)
    assert text.startswith("out[0, 1] is 2.5, expected 2.0; 1 of 2 elements differ")
    assert text.endswith("allowed 0.125 there")
    assert found.evidence()["allowed"] == 0.125
    shape = compare("out", host_array(np.zeros(3)), reference)
    assert shape is not None
    assert shape.reason == "has shape [3], the reference [1, 2]"
    # a bf16 output on the host is held as bits
    assert compare("out", host_array(bf16([[1.0, 2.0]])), reference) is None


def test_a_run_is_judged_by_bounds() -> None:
    reference = {"x": Bounded(np.ones((2, 3)), 0.1)}
    before = {"x": host_array(np.full((2, 3), np.nan, np.float32))}
    after = {"x": host_array(np.full((2, 3), 1.05, np.float32))}
    (seen,) = run_record("inputs", before, after, reference, None).outputs
    assert seen.mismatch is None
    assert seen.must_change == 6
    (seen,) = run_record("inputs", before, before, reference, None).outputs
    assert seen.mismatch is not None
    assert seen.unchanged == 6


def test_bounds_that_do_not_fit_are_refused() -> None:
    with pytest.raises(ArgumentError, match="atol"):
        Bounded(np.zeros((2, 3)), np.zeros(2))
    with pytest.raises(ArgumentError, match="rms"):
        Bounded(np.zeros((2, 3)), 0.0, np.zeros(3))
