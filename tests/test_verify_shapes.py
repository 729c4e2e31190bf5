"""The shapes that attention is measured on, and the tensors of each."""

from __future__ import annotations

import re

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from cuverify.errors import ArgumentError
from cuverify.tolerances import PEER_ROW_ERROR
from cuverify.tree import DraftTree
from cuverify.verify_problem import Problem, draft_masks, mask_words, new_pool, score_lift
from cuverify.verify_shapes import (
    ALL,
    BLOCK,
    GRID,
    HEADED,
    LEVEL,
    RAGGED,
    STORED,
    TARGETS_US,
    WIDE,
    Shape,
    select,
    short,
)

# --- names and numbers ---------------------------------------------------------------------------


def test_the_grid_is_the_published_one() -> None:
    assert len(set(GRID)) == 60
    assert {shape.tree for shape in GRID} == {1, 8, 16, 32, 64}
    assert {shape.tree for shape in WIDE} == {17, 33, 65, 129}
    assert {(shape.batch, short(shape.prefixes[0])) for shape in WIDE} == {
        (shape.batch, short(shape.prefixes[0])) for shape in GRID
    }
    assert max(shape.prefix_rows for shape in (*GRID, *WIDE)) == 262_144
    assert RAGGED.prefix_rows == LEVEL.prefix_rows
    assert not RAGGED.equal
    assert LEVEL.equal


@given(
    st.lists(st.integers(1, 300_000), min_size=1, max_size=5),
    st.integers(1, 256),
    st.sampled_from(["tree", "block"]),
    st.sampled_from([8, 16, 64, 128]),
    st.sampled_from(["bf16", "fp16", "fp8"]),
)
def test_a_name_is_read_back(
    prefixes: list[int], tree: int, drafts: str, heads: int, stored: str
) -> None:
    shape = Shape(tuple(prefixes), tree, drafts, heads, stored)  # type: ignore[arg-type]
    assert Shape.parse(shape.name) == shape


def test_names_are_short() -> None:
    assert [shape.name for shape in (RAGGED, LEVEL, *BLOCK)] == [
        "1x180k+15x1k:8", "16x12480:8", "1x4k:block16", "1x64k:block16",
    ]  # fmt: skip
    assert [HEADED[0].name, STORED[0].name, STORED[-1].name] == [
        "1x4k:1/h64", "1x4k:8/fp16", "1x64k:8/h128/fp8",
    ]  # fmt: skip
    assert set(TARGETS_US) <= {shape.name for shape in ALL}


@pytest.mark.parametrize(
    "name",
    [
        "",
        "16x1k",
        "1k:8",
        "0x1k:8",
        "1x1k:0",
        "1x1k:8:8",
        "1x1m:8",
        "1x1k:8/h0",
        "1x1k:8/fp4",
        "1x1k:8/fp8/h64",
    ],
)
def test_what_is_no_name_is_refused(name: str) -> None:
    with pytest.raises(ArgumentError, match=re.escape(f"shapes={name!r}")):
        Shape.parse(name)


def test_shapes_are_selected_once_and_in_order() -> None:
    assert select(["16x1k:33", "block", "1x4k:block16"]) == (Shape.parse("16x1k:33"), *BLOCK)
    assert [shape.name for shape in select(["16x*:64"])] == ["16x1k:64", "16x4k:64", "16x16k:64"]
    assert select(["all"]) == ALL
    with pytest.raises(ArgumentError, match=r"shapes='2x\*:8': no shape's name is like it"):
        select(["2x*:8"])


def test_bytes_operations_and_the_roofline() -> None:
    shape = Shape.parse("1x64k:8")
    rows = 65_536 + 8
    assert shape.bytes == rows * 1152 + 8 * 8 * 2 * (576 + 512)
    assert shape.flops == 2 * 8 * 8 * rows * (576 + 512)
    codes = Shape.parse("1x64k:8/fp8")
    assert (codes.bytes, codes.flops) == (shape.bytes - rows * 576, shape.flops)
    # the figures of the published comparison
    assert shape.roofline_us(4.6e12, 790e12) == pytest.approx(16.44, abs=0.01)
    assert shape.memory_bound(4.6e12, 790e12)
    tall = Shape.parse("1x64k:64")
    assert tall.roofline_us(4.6e12, 790e12) == pytest.approx(92.5, abs=0.1)
    assert not tall.memory_bound(4.6e12, 790e12)
    assert Shape.parse("16x16k:64").roofline_us(4.6e12, 790e12) == pytest.approx(371, abs=0.5)


def test_copies_need_slots_of_their_own() -> None:
    assert Shape.parse("1x1k:8").copies(1_000_000) == 16
    assert Shape.parse("1x180k:8").copies(1_000_000) == 5
    assert Shape.parse("1x180k:8").copies(100_000) == 1


def test_a_shape_must_make_sense() -> None:
    for arguments in (((), 8), ((0,), 8), ((5,), 0)):
        with pytest.raises(ArgumentError):
            Shape(*arguments)
    with pytest.raises(ArgumentError, match="heads=12"):
        Shape((5,), 8, heads=12)
    with pytest.raises(ArgumentError, match="stored='fp4'"):
        Shape((5,), 8, stored="fp4")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="drafts='chain'"):
        Shape((5,), 8, "chain")  # type: ignore[arg-type]


# --- tensors -------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem(Shape((70, 33), 5), new_pool(600, "cpu"), seed=3)


def test_copies_hold_the_same_rows_and_share_no_slot(problem: Problem) -> None:
    slots = torch.cat([*problem.prefix_slots, *(s.int() for s in problem.draft_slots)])
    assert problem.copies == 5
    assert len(set(slots.tolist())) == len(slots) == 5 * problem.shape.rows
    for prefix, drafts in zip(problem.prefix_slots, problem.draft_slots, strict=True):
        assert torch.equal(problem.pool[prefix], problem.pool[problem.prefix_slots[0]])
        assert torch.equal(problem.pool[drafts], problem.pool[problem.draft_slots[0]])
    rest = np.setdiff1d(np.arange(600), slots.numpy())
    assert torch.isnan(problem.pool[rest]).all()
    table = problem.slot_table(1)
    assert torch.equal(table[0], problem.prefix_slots[1][:70])
    assert table[1].tolist() == [*problem.prefix_slots[1][70:].tolist(), *[0] * 37]


def test_masks_are_trees_or_whole_blocks(problem: Problem) -> None:
    for mask in problem.sees:
        DraftTree.from_mask(mask)
    assert all(mask.all() for mask in draft_masks(Shape((9, 9), 16, "block"), 0))


@pytest.mark.parametrize("tokens", [1, 8, 63, 64, 65, 129])
def test_words_are_the_mask(tokens: int) -> None:
    shape = Shape((9, 9), tokens)
    masks = draft_masks(shape, 5)
    trees = [DraftTree.from_mask(mask).visibility() for mask in masks]
    assert np.array_equal(mask_words(masks), np.concatenate(trees))


@pytest.mark.parametrize("name", ["1x2k:8", "1x500:64", "1x500:block16", "1x200:129"])
def test_the_gate_for_peers_sees_each_wrong_bit_and_each_lost_end(name: str) -> None:
    shape = Shape.parse(name)
    lost = Problem(shape, new_pool(shape.rows, "cpu"), copies=1)
    right = lost.expected
    rng = np.random.default_rng(0)
    mask = lost.sees[0]
    for _ in range(4):
        token, other = rng.integers(0, shape.tree, 2)
        flipped = mask.copy()
        flipped[token, other] ^= True
        assert _worst(_with(lost, visible=flipped), right, int(token)) > PEER_ROW_ERROR
    for gone in (0, 1, shape.prefix_rows - 1):
        slots = np.delete(lost.prefix_slots[0].numpy(), gone)
        found = _with(lost, slots=slots)
        assert _worst(found, right, 0) > PEER_ROW_ERROR, gone


def _with(problem: Problem, visible: object = None, slots: object = None) -> torch.Tensor:
    from cuverify.torch_oracle import verify_attention

    arguments = problem._oracle_arguments()
    if visible is not None:
        arguments["visible"] = mask_words([visible]).view(np.int64)  # type: ignore[list-item]
    if slots is not None:
        arguments["kv_indices"] = slots
        arguments["kv_indptr"] = np.array([0, len(slots)])  # type: ignore[arg-type]
    return torch.from_numpy(verify_attention(**arguments).out)


def _worst(out: torch.Tensor, right: torch.Tensor, token: int) -> float:
    from cuverify.benches.verify_attention import row_errors

    return float(row_errors(out, right)[token].max())


def test_drafts_weigh_as_much_as_their_prefix() -> None:
    shape = Shape((4000, 100), 8)
    lift = score_lift(shape, 0)
    weights = np.exp(lift.astype(np.float64))
    for first, rows, drafts in ((0, 4000, 4100), (4000, 100, 4108)):
        assert weights[drafts : drafts + 8].sum() == pytest.approx(rows, rel=1e-3)
        marks = np.flatnonzero(lift[first : first + rows])
        assert {0, 1, rows - 2, rows - 1} <= set(marks.tolist())
        assert len(marks) <= 16
