"""The kernels that move KV rows against their oracle, in both lanes."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from cuverify.validators.compare import compare_all, host_array
from hypothesis import example, given
from hypothesis import strategies as st

import cuverify
from cuverify import kernels_cu
from cuverify.benches.relocate import move_list
from cuverify.buffers import read
from cuverify.cases import Target
from cuverify.cases.relocate import CASE, RelocateStep
from cuverify.errors import ArgumentError, CaseError, CheckerError, LaunchError
from cuverify.ops.relocate import (
    LONGER_LISTS,
    RelocateCode,
    RelocatePlan,
    RelocateWorkspace,
    _balanced,
    relocate,
    relocate_kernels,
    relocate_workspace,
)
from cuverify.reference import relocate as oracle
from cuverify.sources import KernelSource
from cuverify.strategies import (
    ROW_BYTES,
    drawn,
    examples,
    faulty_relocation_batches,
    relocation_batches,
)
from cuverify.workload import RelocationBatch, accepted_path_moves, real_batches

Schedule = Literal["ascending", "descending", "random"]
SCHEDULES: tuple[Schedule, ...] = ("ascending", "descending", "random")

FEW: dict[str, Any] = {}  # short lists, and by warps where they have up to 32 rows
ONE_LAUNCH: dict[str, Any] = {"values": {"FEW_ROWS": 0}}  # short lists, column by column
BY_ROWS: dict[str, Any] = {  # short lists as those of more than 128 rows are moved, in small blocks
    "values": {
        "FEW_ROWS": 0, "LIST_AHEAD": 0, "LIST_THREADS": 64, "LIST_RESIDENT": 1, "LIST_PIECES": 16,
        "LIST_UNROLL": 3, "LIST_PREFETCH": 2,
    }
}  # fmt: skip
LONG: dict[str, Any] = {"list_rows": 0}  # the way of long lists, for lists of any length
SCARCE: dict[str, Any] = {"list_rows": 0, "scratch_bytes": 0}  # with scratch for one column
WAYS = {
    "one launch, by warps": FEW,
    "one launch, by columns": ONE_LAUNCH,
    "one launch, by rows": BY_ROWS,
    "long": LONG,
    "long, little scratch": SCARCE,
}

gpu = pytest.mark.gpu
both_ways = pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
both_lanes = pytest.mark.parametrize("xp", ["numpy", pytest.param("torch-cuda", marks=gpu)])


def moves(*rows: tuple[int, int], num_slots: int = 12, **more: Any) -> RelocationBatch:
    """Return a list of (source, destination) rows."""
    src, dst = np.array(rows, np.int64).reshape(-1, 2).T
    return RelocationBatch(num_slots, src.copy(), dst.copy(), len(rows), **more)


def judge_by_hand(src: Any, dst: Any, count: int, num_slots: int) -> list[int]:
    """Judge a list as its contract is worded: row by row, each with the rows in front of it."""

    def status(code: int, row: int, slot: int) -> list[int]:
        words = slot & (2**64 - 1)
        halves = (words & 0xFFFFFFFF, words >> 32)
        return [code, row, *(half - (half >> 31 << 32) for half in halves)]

    if not 0 <= count <= len(src):
        return status(1, -1, count)
    rows = [(int(s), int(d)) for s, d in zip(src[:count], dst[:count], strict=True)]
    for at, (s, d) in enumerate(rows):
        before = rows[:at]
        if not 0 <= s < num_slots:
            return status(2, at, s)
        if not 0 <= d < num_slots:
            return status(3, at, d)
        if any(d == d2 and not (s == d and s2 == d2) for s2, d2 in before):
            return status(4, at, d)
    written = {d for s, d in rows if s != d}
    return status(0, -1, int(any(s in written for s, d in rows if s != d)))


def wrong_in(step: RelocateStep) -> list[str]:
    """Run a step on poisoned outputs; return what differs from the oracle in any byte."""
    step.poison()
    expected = step.expected()
    step()
    outputs = {name: host_array(tensor) for name, tensor in step.outputs.items()}
    return [str(mismatch) for mismatch in compare_all(outputs, expected)]


def assert_right(batch: RelocationBatch, xp: Target = "numpy", **how: Any) -> RelocateStep:
    """Run one list on pools of its own."""
    step = RelocateStep(batch, xp, **how)
    assert wrong_in(step) == []
    return step


def assert_right_when_checked(
    batch: RelocationBatch, schedule: Schedule, seed: int = 0, **way: Any
) -> None:
    with cuverify.checked(schedule=schedule, seed=seed):
        assert_right(batch, num_ctas=3, **way)


class Replays:
    """Steps that are kept: the next list of the same pools goes through the same buffers.

    On a GPU every step is a captured graph, so that each list is a replay with changed inputs.
    """

    def __init__(self, xp: Target) -> None:
        self.xp = xp
        self.steps: dict[tuple[int, ...], tuple[RelocateStep, Any]] = {}

    def assert_right(self, batch: RelocationBatch) -> None:
        step, run = self.step_for(batch)
        step.refill(batch)
        step.poison()
        expected = step.expected()
        run()
        outputs = {name: host_array(tensor) for name, tensor in step.outputs.items()}
        assert [str(mismatch) for mismatch in compare_all(outputs, expected)] == [], batch

    def step_for(self, batch: RelocationBatch) -> tuple[RelocateStep, Any]:
        shape = (batch.layers, batch.num_slots, batch.row_bytes, batch.row_stride)
        if shape not in self.steps:
            step = RelocateStep(batch, self.xp, capacity=batch.num_slots + 8)
            self.steps[shape] = step, self.captured(step)
        return self.steps[shape]

    def captured(self, step: RelocateStep) -> Any:
        if self.xp == "numpy":
            return step
        import torch

        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            step()
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        return graph.replay


# --- the oracle ----------------------------------------------------------------------------------

LISTS = [
    ("legal", moves((1, 2), (3, 4), (1, 5)), [0, -1, 0, 0]),
    ("empty", moves((1, 2)).padded(4), [0, -1, 0, 0]),
    ("stays repeat", moves((0, 0), (3, 4), (0, 0)), [0, -1, 0, 0]),
    ("a slot that stays is read", moves((3, 3), (3, 4)), [0, -1, 0, 0]),
    ("a slot that stays is written", moves((3, 3), (4, 3)), [4, 1, 3, 0]),
    ("a slot that is written stays", moves((4, 3), (1, 1), (3, 3)), [4, 2, 3, 0]),
    ("duplicate", moves((1, 2), (3, 4), (5, 2)), [4, 2, 2, 0]),
    ("chain", moves((1, 2), (2, 3)), [0, -1, 1, 0]),
    ("chain backwards", moves((2, 3), (1, 2)), [0, -1, 1, 0]),
    ("swap", moves((1, 2), (2, 1)), [0, -1, 1, 0]),
    ("cycle of three", moves((1, 2), (2, 3), (3, 1)), [0, -1, 1, 0]),
    ("all rotate", moves(*((i, (i + 5) % 12) for i in range(12))), [0, -1, 1, 0]),
    ("one source of many, overwritten", moves((1, 2), (1, 3), (4, 1), (1, 5)), [0, -1, 1, 0]),
    ("a cycle with a branch", moves((1, 2), (2, 1), (1, 7), (2, 8), (7, 9)), [0, -1, 1, 0]),
    ("duplicate behind a chain", moves((1, 2), (2, 3), (4, 2)), [4, 2, 2, 0]),
    ("duplicate and overlap of one row", moves((1, 2), (3, 4), (4, 2)), [4, 2, 2, 0]),
    ("both ends overlap", moves((1, 2), (3, 4), (2, 3)), [0, -1, 1, 0]),
    ("source below", moves((1, 2), (-1, 3)), [2, 1, -1, -1]),
    ("source above", moves((12, 2)), [2, 0, 12, 0]),
    ("destination above", moves((1, 2**40)), [3, 0, 0, 256]),
    ("both outside", moves((99, -7)), [2, 0, 99, 0]),
    ("conflict before out of range", moves((1, 2), (3, 2), (1, -1)), [4, 1, 2, 0]),
    ("conflict behind out of range", moves((1, 2), (1, -1), (3, 2)), [3, 1, -1, -1]),
    ("first row out of range", moves((-5, 2), (3, 2)), [2, 0, -5, -1]),
    ("slot 0 and the last", moves((0, 11)), [0, -1, 0, 0]),
]


@pytest.mark.parametrize(
    ("batch", "status"), [case[1:] for case in LISTS], ids=[c[0] for c in LISTS]
)
def test_verdicts_written_out(batch: RelocationBatch, status: list[int]) -> None:
    assert judge_by_hand(batch.src, batch.dst, batch.count, batch.num_slots) == status
    found = oracle.judge(batch.src, batch.dst, batch.count, batch.num_slots)
    assert (found.tolist(), found.dtype) == (status, np.int32)


@examples(150)
@given(relocation_batches() | faulty_relocation_batches(max_faults=4))
def test_oracle_judges_as_by_hand(batch: RelocationBatch) -> None:
    found = oracle.judge(batch.src, batch.dst, batch.count, batch.num_slots)
    assert found.tolist() == judge_by_hand(batch.src, batch.dst, batch.count, batch.num_slots)


def test_oracle_reads_every_source_before_it_writes() -> None:
    pool = np.arange(5)[:, None]
    oracle.move([pool], np.array([0, 1, 2, 9]), np.array([1, 2, 0, 9]), 3)
    assert pool[:, 0].tolist() == [2, 0, 1, 3, 4]


def test_oracle_leaves_pools_alone_where_the_list_is_illegal() -> None:
    pool = np.arange(5)[:, None]
    status = oracle.relocate([pool], np.array([0, 1]), np.array([2, 2]), 2)
    assert status[0] == oracle.DUPLICATE_DESTINATION
    assert pool[:, 0].tolist() == [0, 1, 2, 3, 4]


def test_kernel_op_and_oracle_number_the_verdicts_alike() -> None:
    text = KernelSource.from_package("relocate").text
    in_kernel = dict(re.findall(r"constexpr int ([A-Z_]+) = (\d);", text))
    for code in RelocateCode:
        assert in_kernel[code.name] == str(int(code))
        assert getattr(oracle, code.name) == code


# --- kernels against the oracle ------------------------------------------------------------------


@both_lanes
@both_ways
@pytest.mark.parametrize("batch", [case[1] for case in LISTS], ids=[case[0] for case in LISTS])
def test_written_lists(batch: RelocationBatch, xp: Target, way: Any) -> None:
    assert_right(batch, xp, **way)


@examples(40)
@given(
    batch=relocation_batches(max_slots=200),
    num_ctas=st.integers(1, 5),
    way=st.sampled_from([*WAYS.values()]),
)
# a zero tail that is counted
@example(batch=moves((0, 0), (0, 0), (3, 4), (0, 0)), num_ctas=1, way=ONE_LAUNCH)
def test_drawn_lists_on_the_host_lane(batch: RelocationBatch, num_ctas: int, way: Any) -> None:
    assert_right(batch, num_ctas=num_ctas, **way)


@examples(40)
@given(
    batch=faulty_relocation_batches(max_slots=200, max_faults=4),
    way=st.sampled_from([FEW, ONE_LAUNCH, BY_ROWS, LONG]),
)
def test_illegal_lists_on_the_host_lane(batch: RelocationBatch, way: Any) -> None:
    step = assert_right(batch, **way)
    before = step.expected()["pools"]
    np.testing.assert_array_equal(step.storage, before)
    with pytest.raises(ArgumentError, match="nothing was moved"):
        step.plan.read_status()


@examples(30)
@given(
    batch=relocation_batches() | faulty_relocation_batches(max_faults=3),
    schedule=st.sampled_from(SCHEDULES),
    seed=st.integers(0, 99),
    way=st.sampled_from([*WAYS.values()]),
)
def test_drawn_lists_under_the_checkers(
    batch: RelocationBatch, schedule: Schedule, seed: int, way: Any
) -> None:
    assert_right_when_checked(batch, schedule, seed, **way)


POOLS = ((1, 9, 16, 16), (2, 24, 20, 32), (1, 70, 144, 160))  # layers, slots, row bytes, stride


class KeptSteps:
    """Steps whose buffers and launches stay, so that a list costs little more than its launches."""

    def __init__(self) -> None:
        self.steps: dict[Any, RelocateStep] = {}

    def of(self, shape: tuple[int, ...], way: str) -> RelocateStep:
        if (shape, way) not in self.steps:
            layers, slots, row_bytes, row_stride = shape
            empty = moves(
                num_slots=slots, layers=layers, row_bytes=row_bytes, row_stride=row_stride
            )
            step = RelocateStep(empty, "numpy", capacity=slots + 8, num_ctas=2, **WAYS[way])
            self.steps[shape, way] = step
        return self.steps[shape, way]


KEPT = KeptSteps()


@st.composite
def lists_for_kept_steps(draw: st.DrawFn) -> tuple[tuple[int, ...], RelocationBatch]:
    shape = draw(st.sampled_from(POOLS))
    layers, slots, row_bytes, row_stride = shape
    bounds: dict[str, Any] = {
        "min_slots": slots, "max_slots": slots, "min_layers": layers, "max_layers": layers,
        "row_bytes": (row_bytes,), "max_row_gap": 0,
    }  # fmt: skip
    strategy = relocation_batches(**bounds)
    if draw(st.integers(0, 4)) == 4:
        strategy = faulty_relocation_batches(**bounds)
    batch = draw(strategy)
    return shape, RelocationBatch(
        slots, batch.src, batch.dst, batch.count, layers, row_bytes, row_stride
    )


@examples(2000)
@given(
    drawn=lists_for_kept_steps(),
    schedule=st.sampled_from(SCHEDULES),
    way=st.sampled_from([*WAYS]),
)
def test_two_thousand_lists_under_the_checkers(drawn: Any, schedule: Schedule, way: str) -> None:
    shape, batch = drawn
    step = KEPT.of(shape, way)
    step.refill(batch)
    with cuverify.checked(schedule=schedule):
        assert wrong_in(step) == []


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_real_lists_under_the_checkers(schedule: Schedule) -> None:
    for batch in real_batches(600, steps=2, max_rows=40, tree_tokens=8):
        assert_right_when_checked(batch, schedule)


# --- pools of all kinds, one list ----------------------------------------------------------------


def pools_of_all_kinds(pages: int, page_size: int) -> list[Any]:
    """Return pools as views [pages, page_size, ...], or [slots, ...], full of noise."""
    rng = np.random.default_rng([pages, page_size])

    def noise(*shape: int) -> Any:
        return rng.integers(0, 256, shape, np.uint8)

    latent = noise(2, pages, page_size, 1152)  # two layers of MLA rows
    grouped = noise(pages, 2, page_size, 96)  # heads outside of the page
    packed = noise(pages, page_size, 128 + 16)  # keys, and scales behind them in the same row
    scales = noise(pages, page_size, 3, 4)  # rows that are no multiple of 16 bytes
    views = [latent[0], latent[1], grouped[:, 0], grouped[:, 1]]
    views += [packed[:, :, :128], packed[:, :, 128:], scales]
    return [view[:, 0] for view in views] if page_size == 1 else views


@examples(30)
@given(
    page_size=st.sampled_from([1, 16, 64]),
    data=st.data(),
    way=st.sampled_from([*WAYS]),
    checked=st.booleans(),
)
def test_pools_of_all_kinds_and_page_sizes(
    page_size: int, data: Any, way: str, checked: bool
) -> None:
    slots = max(2 * page_size, 24)
    batch = data.draw(relocation_batches(min_slots=slots, max_slots=slots, row_bytes=(16,)))
    views = pools_of_all_kinds(slots // page_size, page_size)
    src, dst = batch.src[: batch.count], batch.dst[: batch.count]
    before = [view.copy() for view in views]
    count = np.array([batch.count], np.int32)
    more = {"page_size": page_size, "list_rows": WAYS[way].get("list_rows", 1024)}
    more["values"] = WAYS[way].get("values")
    workspace = RelocateWorkspace.allocate(
        views, batch.capacity, scratch_bytes=WAYS[way].get("scratch_bytes", 1 << 20), **more
    )
    plan = RelocatePlan(views, batch.src, batch.dst, count, workspace=workspace, **more)
    assert plan.row_bytes == 2 * 1152 + 2 * 96 + 144 + 12
    if checked:
        with cuverify.checked():
            plan()
    else:
        plan()
    assert plan.read_status().code == RelocateCode.LEGAL
    for view, old in zip(views, before, strict=True):
        flat = old.reshape(slots, -1)
        right = flat.copy()
        right[dst] = flat[src]
        np.testing.assert_array_equal(view.reshape(slots, -1), right)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_a_dead_tail_is_loaded_and_not_used(schedule: Schedule) -> None:
    batch = moves((1, 2), (3, 4), (5, 6), num_slots=200)
    ends = np.array([(1, 2), (3, -9), (2, 1), (10**12, 4)] * 40).T
    src, dst = (np.concatenate([a, b]) for a, b in ((batch.src, ends[0]), (batch.dst, ends[1])))
    for count in (0, 1, 3, 4, 5):
        for way in (LONG, BY_ROWS, FEW):
            with cuverify.checked(schedule=schedule):
                assert_right(RelocationBatch(200, src, dst, count), **way)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lists_longer_than_the_block_under_the_checkers(schedule: Schedule) -> None:
    (batch,) = drawn(
        relocation_batches(
            min_slots=9000, max_slots=9000, min_rows=4400, max_rows=4400, row_bytes=(16,),
            max_layers=1, max_row_gap=0, allow_stays=False, shapes=["cycles"],
        ), 1,
    )  # fmt: skip
    assert_right_when_checked(batch, schedule)
    late = batch.dst.copy()
    late[4321] = late[17]
    assert_right_when_checked(
        RelocationBatch(batch.num_slots, batch.src, late, batch.count, row_bytes=16, row_stride=16),
        schedule,
    )


@both_lanes
@pytest.mark.parametrize("unroll", [1, 2, 9])
@pytest.mark.parametrize("row_bytes", [*ROW_BYTES, 4, 2304, 8192])
def test_every_row_size_with_every_batch_of_loads(row_bytes: int, unroll: int, xp: Target) -> None:
    batch = moves(
        (1, 0), (5, 11), (7, 7), (0, 5), layers=3, row_bytes=row_bytes, row_stride=row_bytes + 32
    )
    for way in WAYS.values():
        values = {"UNROLL": unroll, "LIST_UNROLL": unroll, **way.get("values", {})}
        assert_right(batch.padded(6), xp, **{**way, "values": values})


@both_lanes
def test_a_third_of_a_long_cycle_is_staged_and_half_of_a_swap(xp: Target) -> None:
    shape: dict[str, Any] = {"row_bytes": 16, "row_stride": 16}
    rows = np.arange(2500)
    slots = np.random.default_rng(2).permutation(5000)[: len(rows)]
    order = np.random.default_rng(3).permutation(len(rows))  # of the list, not of the cycle
    for source, least, most in ((np.roll(rows, 1), 0.3, 0.45), (rows ^ 1, 0.5, 0.5)):
        batch = RelocationBatch(5000, slots[source][order], slots[order], len(rows), **shape)
        step = assert_right(batch, xp, **LONG)
        counts = read(step.workspace.counts).tolist()
        assert sum(counts[:-1]) == batch.count  # each row moves in one phase
        assert least <= counts[-1] / batch.count <= most


@both_lanes
@pytest.mark.parametrize("way", ["long", "long, little scratch"])
@pytest.mark.parametrize("closed", [False, True])
@pytest.mark.parametrize("rising", [False, True])
def test_chains_that_nothing_cuts(rising: bool, closed: bool, way: str, xp: Target) -> None:
    """Rows whose keys only rise along the chain: no neighbourhood has a least one."""
    rows = 300  # far more than the phases count
    by_key = np.argsort(np.arange(rows, dtype=np.uint32) * np.uint32(2654435769))
    place = np.empty(rows, np.int64)
    place[by_key if rising else by_key[::-1]] = np.arange(rows)
    dst = place + 2
    if closed:
        dst[place == rows - 1] = 1
    batch = RelocationBatch(rows + 3, place + 1, dst, rows, row_bytes=48, row_stride=48)
    if xp == "numpy":
        assert_right_when_checked(batch, "random", **WAYS[way])
    else:
        assert_right(batch, xp, **WAYS[way])


@pytest.mark.parametrize("blocks", [1, (1 << 21) - 1, 1 << 21, 1 << 30])
def test_more_blocks_than_can_vote_are_not_launched(blocks: int) -> None:
    rows = np.arange(4)
    pool, count = np.zeros((8, 16), np.uint8), np.ones(1, np.int32)
    plan = RelocatePlan([pool], rows, rows + 4, count, list_rows=0, num_ctas=blocks)
    assert plan.launches[0].launch.grid == (min(blocks, (1 << 21) - 1), 1, 1)


@both_lanes
@pytest.mark.parametrize("layers", [1, 2, 3, 61])
def test_every_number_of_layers(layers: int, xp: Target) -> None:
    batch = moves(
        (1, 0), (5, 11), (6, 2), (8, 3), (9, 4), layers=layers, row_bytes=48, row_stride=48
    )
    for num_ctas in (1, 2, 7):
        assert_right(batch, xp, num_ctas=num_ctas)
        assert_right(batch, xp, num_ctas=num_ctas, **LONG)


@both_lanes
def test_grids_that_rows_and_layers_do_not_divide(xp: Target) -> None:
    values = {"ROWS_THREADS": 32, "LIST_THREADS": 32, "FEW_THREADS": 32}
    by_columns = {"FEW_ROWS": 0}
    by_rows = {**BY_ROWS["values"], "LIST_THREADS": 32}
    rows = [(2 * row, 2 * row + 1) for row in range(9)] + [(30, 30)]
    for count in (0, 1, 5, 10):
        for layers in (1, 3, 7):
            shape: dict[str, Any] = {"layers": layers, "row_bytes": 16, "row_stride": 16}
            batch = moves(*rows[:count], num_slots=32, **shape).padded(12)
            for num_ctas in (1, 3, 20):
                assert_right(batch, xp, num_ctas=num_ctas, values=values)
                assert_right(batch, xp, num_ctas=num_ctas, values={**values, **by_columns})
                assert_right(batch, xp, num_ctas=num_ctas, values={**values, **by_rows})
                assert_right(batch, xp, num_ctas=num_ctas, values=values, **LONG)


# What a plan chooses on a GPU, for rows of whole pieces and for the length of the lists.
ON_A_GPU: tuple[dict[str, int], ...] = (
    {"NARROW_ROWS": 0, "FEW_PIECES": 2},
    {"NARROW_ROWS": 0, "FEW_PIECES": 8},
    {"NARROW_ROWS": 0, "FEW_ROWS": 0, "LIST_PIECES": 4},
    {"NARROW_ROWS": 0, "FEW_ROWS": 0, **LONGER_LISTS},
)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_text_as_a_gpu_gets_it(schedule: Schedule) -> None:
    bounds: dict[str, Any] = {"max_slots": 40, "row_bytes": (16, 144, 1152)}
    lists = drawn(relocation_batches(**bounds), 10, seed=5)
    lists += drawn(faulty_relocation_batches(**bounds), 3, seed=5)
    for batch in lists:
        for values in ON_A_GPU:
            # two pieces a lane are for lists of up to 8 rows of 8 pieces
            if batch.capacity <= 4 * values.get("FEW_PIECES", 10):
                assert_right_when_checked(batch, schedule, values=values)
        assert_right_when_checked(batch, schedule, values={"NARROW_ROWS": 0}, **LONG)


@both_lanes
@pytest.mark.parametrize("capacity", [1, 15, 16, 17, 32, 33, 64, 127, 128, 129, 1023, 1024, 1025])
@pytest.mark.parametrize("shape", ["disjoint", "cycles"])
def test_every_length_of_lists(shape: Any, capacity: int, xp: Target) -> None:
    rows = max(1, capacity - 1)
    (batch,) = drawn(
        relocation_batches(
            min_slots=2200, max_slots=2200, min_rows=rows, max_rows=rows, row_bytes=(48,),
            max_layers=1, max_row_gap=0, max_tail=0, allow_stays=False, shapes=[shape],
        ), 1, seed=capacity,
    )  # fmt: skip
    assert_right(batch.padded(capacity), xp)


@both_lanes
def test_one_list_after_another_in_one_step(xp: Target) -> None:
    replays = Replays(xp)
    for batch in (
        moves((1, 2), (3, 4)),
        moves((5, 6)),
        moves((1, 2), (2, 3)),
        moves(),
        moves((6, 5), (1, 0), (11, 10)),
        moves((1, 99)),
        moves((1, 2), (3, 4)),
    ):
        replays.assert_right(batch)


@both_lanes
def test_golden_paths(xp: Target) -> None:
    windows = np.array([3, 4, 5, 6, 7, 8, 31, 33, 35, 30, 32, 34])
    g1 = accepted_path_moves(
        windows, np.array([[0, 3, 4, 5], [6, 10, 11, -1]]), np.array([3, 2]), 6
    )
    # Windows 3..8 and 31, 33, ...: nodes 3, 4, 5 -> 1, 2, 3 and 4, 5 -> 1, 2. The first chains.
    assert list(zip(g1.src.tolist(), g1.dst.tolist(), strict=True)) == [
        (6, 4), (7, 5), (8, 6), (32, 33), (34, 35),
    ]  # fmt: skip
    for way in WAYS.values():
        step = assert_right(RelocationBatch(36, g1.src, g1.dst, 5), xp, **way)
        status = step.plan.read_status()
        assert (status.code, status.overlaps) == (RelocateCode.LEGAL, True)
        rest = RelocationBatch(36, g1.src[~g1.chained], g1.dst[~g1.chained], 2)
        step = assert_right(rest, xp, **way)
        assert not step.plan.read_status().overlaps


def test_verdict_does_not_depend_on_the_number_of_threads() -> None:
    batches = drawn(faulty_relocation_batches(max_slots=300, max_faults=5), 20, seed=1)
    for batch in batches:
        small = {"CHECK_THREADS": 32, "LIST_THREADS": 64, "LIST_PIECES": 16}
        for values in (small, {}):
            for num_ctas in (1, 5):
                assert_right(batch, values=values, num_ctas=num_ctas, **LONG)
            assert_right(batch, values=values)


def test_rows_without_a_verdict_are_not_moved() -> None:
    step = RelocateStep(moves((1, 2), (2, 4)), "numpy", **LONG)
    step()
    step.refill(moves((1, 2), (2, 4)))
    for overlaps in (0, 1):
        for code in range(1, 5):
            step.workspace.status[:] = [code, 0, overlaps, 0]
            for launch in step.plan.launches[1:]:
                launch()
        for count in (-1, 3, 2**31 - 1):
            step.workspace.status[:] = [0, -1, overlaps, 0]
            step.count[0] = count
            for launch in step.plan.launches[1:]:
                launch()
    np.testing.assert_array_equal(step.storage, RelocateStep(moves(), "numpy").storage)


BARRIER = re.compile(r"__syncthreads\(\);|__syncthreads_or\(([^;{]*)\) != 0")
TEXT = KernelSource.from_package("relocate").text
BARRIERS = list(BARRIER.finditer(TEXT))
CHECKING = [at for at, found in enumerate(BARRIERS) if found.start() < TEXT.index("report_short(")]
LISTING = [at for at in range(len(BARRIERS)) if at not in CHECKING]


def without_barrier(number: int) -> str:
    """Return the text with one barrier taken out: each thread goes by what it found itself."""
    found = BARRIERS[number]
    alone = f"({found[1]}) != 0" if found[1] else ""
    return TEXT[: found.start()] + alone + TEXT[found.end() :]


CHECK_MUTANTS = {
    **{f"barrier {number}": without_barrier(number) for number in CHECKING},
    **{
        name: TEXT.replace(right, wrong)
        for name, (right, wrong) in {
            "votes before marks": ("__threadfence();  // the marks", "// the marks"),
            "marks before the vote": ("__threadfence();  // and", "// and"),
            "the first block decides": ("!= gridDim.x) {", "!= 1) {"),
            "votes stay": ("votes[0] = 0;", ""),
            "marks stay": ("clear(list, marks, rows);", ""),
            "marks of a front stay": ("clear(list, marks, middle);", ""),
            "a slot may be written twice": ("(WRITTEN | STAYS)) != 0", "STAYS) != 0"),
            "a slot that stays may be written": ("(WRITTEN | STAYS)) != 0", "WRITTEN) != 0"),
            "a slot that is written may stay": ("(marks.add(to, STAYS) & WRITTEN) != 0", "(marks.add(to, STAYS) & 0) != 0"),
            "readers are not seen": ("(at_target & READ) != 0 ||", ""),
            "writers are not seen": ("|| (at_source & WRITTEN) != 0", ""),
        }.items()
    },
}  # fmt: skip


@pytest.mark.parametrize("swept_words", [0, 1 << 20])
@pytest.mark.parametrize("name", CHECK_MUTANTS)
def test_nothing_of_the_check_is_superfluous(name: str, swept_words: int) -> None:
    """Without any one thing a checker objects, or a verdict is wrong, on some short list."""
    text = CHECK_MUTANTS[name]
    assert text != TEXT
    values = {"CHECK_THREADS": 64, "SWEPT_WORDS": swept_words}
    source = KernelSource.from_text(text, name="mutant.cu", values=values)
    kernel = cuverify.Kernel(source, "relocate_check")
    # Conflicts and faults of rows that different warps and blocks hold.
    rows = [(row, 200 + row) for row in range(100)]
    lists = [
        rows,
        [*rows[:80], (150, 205), *rows[81:]],
        [*rows[:80], (205, 180), *rows[81:]],
        [*rows[:5], (150, 285), *rows[6:85], (285, 181), *rows[86:]],
        [*rows[:80], (205, 205), *rows[81:]],
        [(285, 285), *rows],
        [*rows[:70], (150, 205), (400, 1), *rows[72:]],
        [*rows[:70], (400, 1), (150, 205), *rows[72:]],
    ]
    assert any(
        fails_under_the_checkers(kernel, moves(*rows, num_slots=num_slots), schedule, blocks)
        for rows in lists
        for schedule in SCHEDULES
        for blocks in (1, 2)
        for num_slots in (400, 40_000)  # swept, and taken back row by row
    )


def fails_under_the_checkers(
    kernel: cuverify.Kernel, batch: RelocationBatch, schedule: Any, blocks: int
) -> bool:
    marks = np.zeros(4 * -(-batch.num_slots // 32), np.uint32)
    status, count = np.zeros(4, np.int32), np.array([batch.count], np.int32)
    votes = np.zeros(1, np.uint64)
    lists = batch.src, batch.dst, count, batch.capacity, batch.num_slots
    try:
        with cuverify.checked(schedule=schedule):
            kernel(blocks, 64, *lists, marks, votes, status)
    except CheckerError:
        return True
    expected = oracle.judge(batch.src, batch.dst, batch.count, batch.num_slots)
    return marks.any() or votes.any() or status.tolist() != expected.tolist()


@pytest.mark.parametrize("number", LISTING)
def test_no_barrier_of_a_short_list_is_superfluous(
    number: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    values = {**BY_ROWS["values"], "LIST_AHEAD": 8}
    mutant = KernelSource.from_text(without_barrier(number), name="mutant.cu", values=values)
    kernel = cuverify.Kernel(mutant, "relocate_list")
    monkeypatch.setitem(relocate_kernels(**values), "relocate_list", kernel)
    shape: dict[str, Any] = {"num_slots": 400, "layers": 5, "row_bytes": 32, "row_stride": 32}
    rows = [(row, row + 1) for row in range(100)]
    pairs = [(200 + row + row // 2, 201 + row + row // 2) for row in range(80)]  # chains of two
    lists = [
        rows,
        [*rows[:80], (150, 5), *rows[81:]],
        [(row, 200 + row) for row in range(100)],
        [*rows[:98], (300, 300), (1, 300)],
        [(1, 2), (2, 3), (3, 4)],
        [*pairs, (390, 391)],
        [*pairs, (390, 391), (391, 390)],
        [*pairs[:41], *rows[60:95], *pairs[41:60]],
    ]

    def fails(rows: Any, schedule: Any) -> bool:
        try:
            with cuverify.checked(schedule=schedule):
                return bool(wrong_in(RelocateStep(moves(*rows, **shape), "numpy", values=values)))
        except CheckerError:
            return True

    assert any(fails(rows, schedule) for rows in lists for schedule in SCHEDULES)


FEW_MUTANTS = {
    "lanes write before all have read": ("__syncwarp();  //", "//"),
    "a row that stays may be written": ("(moving ? alike : alike & movers)", "(alike & movers)"),
    "no slot may stay twice": ("(moving ? alike : alike & movers)", "alike"),
    "a row conflicts with itself": ("((1u << lane) - 1)", "((2u << lane) - 1)"),
    "sources may be out of range": ("list.holds(judged.from) && list", "list"),
    "destinations may be out of range": ("list.holds(judged.from) && list.holds(judged.to)", "list.holds(judged.from)"),
    "the dead tail is judged": ("const bool listed = lane < rows;", "const bool listed = lane < room;"),
    "the last illegal row is named": ("__ffs(illegal) - 1", "31 - __clz(illegal)"),
    "the dead tail overlaps": ("overlaps |= written && moving &&", "overlaps |= written &&"),
    "what stays is read by nobody": (" && (movers >> row & 1) != 0;", ";"),
    "only the first columns move": ("number += gridDim.x * (FEW_THREADS / 32);", "number = num_columns;"),
}  # fmt: skip


@pytest.mark.parametrize("name", FEW_MUTANTS)
def test_nothing_of_a_list_judged_by_warps_is_superfluous(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    right, wrong = FEW_MUTANTS[name]
    assert TEXT.count(right) == 1
    values = {"FEW_THREADS": 32}
    mutant = KernelSource.from_text(TEXT.replace(right, wrong), name="mutant.cu", values=values)
    monkeypatch.setitem(
        relocate_kernels(**values), "relocate_few", cuverify.Kernel(mutant, "relocate_few")
    )
    lists = [
        [(row, row + 1) for row in range(20)],
        [(5, 5), (7, 7), (5, 5), (5, 6)],
        [(5, 5), (1, 5)],
        [(1, 2), (99, 3), (4, 2)],
        [(1, 2), (3, 99)],
        [(1, 2), (3, 2), (4, 2)],
        [(1, 0)],
    ]

    def fails(rows: Any, schedule: Any) -> bool:
        batch = moves(*rows, num_slots=40, layers=3, row_bytes=144, row_stride=144).padded(24)
        try:
            with cuverify.checked(schedule=schedule):
                step = RelocateStep(batch, "numpy", num_ctas=2, values=values)
                return bool(wrong_in(step))
        except CheckerError:
            return True

    assert any(fails(rows, schedule) for rows in lists for schedule in SCHEDULES)


# --- large pools ---------------------------------------------------------------------------------


@both_lanes
def test_addresses_beyond_four_gigabytes(xp: Target, tmp_path: Path) -> None:
    slots, row = (
        4_000_000,
        1152,
    )  # 4.6 GB; on the host a sparse file
    rows = [(3, slots - 2), (slots - 1, 7), (1_900_000, 3_900_000)]
    src, dst = (np.array(part) for part in zip(*rows, strict=True))
    count = np.array([3], np.int32)
    file = tmp_path / "pool"
    if xp == "numpy":
        pool: Any = np.memmap(file, np.uint8, "w+", shape=(slots, row))
    else:
        import torch

        pool = torch.zeros((slots, row), dtype=torch.uint8, device="cuda")
        src, dst, count = (torch.from_numpy(part).cuda() for part in (src, dst, count))
    for mark, (source, _) in enumerate(rows, 1):
        pool[source] = mark
    plan = relocate([pool], src, dst, count)
    assert plan.read_status().code == RelocateCode.LEGAL
    for mark, (_, destination) in enumerate(rows, 1):
        assert (pool[destination] == mark).all()
        # what a product of 32 bits would have hit
        assert not (pool[destination * row % 2**32 // row] > 0).any() or destination < 2**32 // row
    file.unlink(missing_ok=True)


# --- the op --------------------------------------------------------------------------------------


HUGE = 2_000_000  # slots: more than a block has bits of shared memory


def huge_pools() -> list[Any]:
    """Return a pool of which hardly a page is in memory."""
    return [np.zeros((HUGE, 16), np.uint8)]


def test_a_long_list_needs_marks_and_a_short_one_none() -> None:
    pools = huge_pools()
    lists = np.array([7, 8]), np.array([HUGE - 1, 7]), np.array([2], np.int32)
    pools[0][7] = 5
    plan = RelocatePlan(pools, *lists, list_rows=0)
    assert plan.workspace.marks.shape == (HUGE // 8,) and plan.workspace.votes.shape == (1,)
    plan()
    assert plan.read_status().code == RelocateCode.LEGAL
    assert (pools[0][HUGE - 1] == 5).all()
    assert not plan.workspace.marks.any() and not plan.workspace.votes.any()
    short = RelocatePlan(huge_pools(), *lists).workspace
    assert short.marks is None and short.votes is None


def good_arguments(**changes: Any) -> dict[str, Any]:
    pools = changes.pop("pools", [np.zeros((40, 64), np.uint8) for _ in range(3)])
    way = {"list_rows": changes.pop("list_rows", 0)}
    arguments = {
        "pools": pools,
        "src": np.zeros(8, np.int64),
        "dst": np.zeros(8, np.int64),
        "count": np.zeros(1, np.int32),
    }
    given = {name: value for name, value in changes.items() if name in arguments}
    rest = {name: value for name, value in changes.items() if name not in arguments}
    plan_only = {name: rest.pop(name) for name in ("num_ctas", "page_size") if name in rest}
    usual = [np.zeros((40, 64), np.uint8) for _ in range(3)]
    sizes = relocate_workspace(usual, 8, list_rows=min(way["list_rows"], 8))
    workspace = {name: np.zeros(buffer.shape, buffer.dtype) for name, buffer in sizes.items()}
    workspace.update(rest)
    whole = {**arguments, **given, **way, **plan_only}
    return {**whole, "workspace": RelocateWorkspace(**workspace)}


def unaligned(shape: tuple[int, int]) -> Any:
    storage = np.zeros(shape[0] * shape[1] + 32, np.uint8)
    off = -storage.ctypes.data % 16 + 8
    return storage[off : off + shape[0] * shape[1]].reshape(shape)


def read_only(array: Any) -> Any:
    array.setflags(write=False)
    return array


def pools_like(*others: Any) -> list[Any]:
    return [np.zeros((40, 64), np.uint8), *others]


SHARED = np.zeros((40, 64), np.uint8)
INTERLEAVED = np.zeros((41, 3, 64), np.uint8)
WIDE = np.zeros((40, 128), np.uint8)
MIXED = np.zeros((40, 128), np.uint8)
OTHER = np.zeros((40, 64), np.uint8)
WORDS = np.zeros(4, np.int32)
SLOT_WORDS = np.zeros(40, np.int32)
MISUSE = {
    "no pools": ({"pools": []}, "pools"),
    "one tensor for all": ({"pools": SHARED}, "pools"),
    "no tensor": ({"pools": pools_like("kv")}, r"pools\[1\]"),
    "slots differ": ({"pools": pools_like(np.zeros((41, 64), np.uint8))}, r"pools\[1\].*41 slots"),
    "one pool within another": (
        {"pools": [WIDE[:, :64], WIDE.reshape(-1, 64)[:40]]}, r"pools\[1\].*shares memory",
    ),
    "a row's parts overlap": (
        {"pools": [WIDE[:, :64], WIDE[:, 48:96]]}, r"pools\[1\].*shares memory with pools\[0\]",
    ),
    "one pool twice": ({"pools": [SHARED, SHARED]}, r"pools\[1\].*shares memory with pools\[0\]"),
    "pools overlap": (
        {"pools": [INTERLEAVED[:40, 0], INTERLEAVED[1:, 0]]}, r"pools\[1\].*shares memory",
    ),
    "pools overlap by a row's tail": (
        {"pools": [INTERLEAVED.reshape(41, 192)[:40, :64], INTERLEAVED.reshape(-1)[48:48 + 40 * 192]
                   .reshape(40, 192)[:, :64]]}, r"pools\[1\].*shares memory",
    ),
    "rows of 18 bytes": ({"pools": [np.zeros((40, 18), np.uint8)]}, r"pools\[0\].*18 bytes"),
    "rows of 20 bytes 22 apart": (
        {"pools": [np.zeros((40, 22), np.uint8)[:, :20]]}, r"pools\[0\].*22 bytes apart",
    ),
    "slots 72 bytes apart": (
        {"pools": [np.zeros((40, 72), np.uint8)[:, :64]]}, r"pools\[0\].*72 bytes apart",
    ),
    "rows backwards": ({"pools": [SHARED[::-1]]}, r"pools\[0\].*-64 bytes apart"),
    "expanded": ({"pools": [np.broadcast_to(SHARED[0], (40, 64))]}, r"pools\[0\].*0 bytes apart"),
    "columns apart": ({"pools": [np.zeros((40, 128), np.uint8)[:, ::2]]}, r"pools\[0\].*2 apart"),
    "heads apart": (
        {"pools": [np.zeros((40, 2, 128), np.uint8)[:, :, :64]]}, r"pools\[0\].*128 apart",
    ),
    "no rows": ({"pools": [np.zeros(40, np.uint8)]}, r"pools\[0\].*\[slots, ...\]"),
    "pages of another size": (
        {"pools": [np.zeros((5, 8, 64), np.uint8)], "page_size": 16},
        r"pools\[0\].*\[pages, 16, ...\]",
    ),
    "pages of three slots": ({"page_size": 3}, "page_size=3: wants a power of two"),
    "pages of half a slot": ({"page_size": 0.5}, "page_size=0.5: wants a power of two"),
    "pages too large": ({"page_size": 1 << 17}, "page_size=131072: wants a power of two"),
    "part of a launch": ({"num_ctas": 1.5}, "num_ctas=1.5: wants at least one block"),
    "too long for one launch": ({"list_rows": 1025}, "list_rows=1025: wants 0 to 1024 rows"),
    "no slots": ({"pools": [np.zeros((0, 64), np.uint8)]}, r"pools\[0\].*shape \[0, 64\]"),
    "unaligned pool": ({"pools": [unaligned((40, 64))]}, r"pools\[0\].*8 bytes off"),
    "read-only pool": (
        {"pools": [read_only(np.zeros((40, 64), np.uint8))]}, r"pools\[0\].*read-only",
    ),
    "src too narrow": ({"src": np.zeros(8, np.int32)}, "src.*int32.*int64"),
    "lists of two lengths": ({"dst": np.zeros(9, np.int64)}, "dst.*src has 8 rows"),
    "lists of two dimensions": ({"src": np.zeros((8, 1), np.int64)}, "src.*2 dimensions"),
    "no room in the lists": (
        {"src": np.zeros(0, np.int64), "dst": np.zeros(0, np.int64)}, "src.*1 to",
    ),
    "every other row": ({"src": np.zeros(16, np.int64)[::2]}, "src.*contiguous"),
    "count too wide": ({"count": np.zeros(1, np.int64)}, "count.*int64.*int32"),
    "count by value": ({"count": 3}, "count=3"),
    "two counts": ({"count": np.zeros(2, np.int32)}, "count"),
    "marks too short": ({"marks": np.zeros(5, np.uint32)}, r"workspace.marks.*\[8\]"),
    "marks unaligned": (
        {"marks": np.zeros(12, np.uint32)[1:9]}, r"marks.*off",
    ),
    "no votes": ({"votes": None}, r"workspace.votes=None.*\[1\]"),
    "status too short": ({"status": np.zeros(2, np.int32)}, r"workspace.status.*\[4\]"),
    "table too long": ({"places": np.zeros((4, 4), np.uint64)}, r"workspace.places.*\[3, 4\]"),
    "table of 32 bits": ({"places": np.zeros((3, 4), np.uint32)}, "places.*uint32"),
    "no order": ({"order": None}, r"workspace.order=None: 40 slots, 3 pools.*\[8, 2\]"),
    "little scratch": ({"scratch": np.zeros(511, np.uint8)}, r"workspace.scratch.*\[512\]"),
    "few columns": (
        {"list_rows": 8, "columns": np.zeros((2, 4), np.uint64)}, r"workspace.columns.*\[3, 4\]",
    ),
    "empty grid": ({"num_ctas": 0}, "num_ctas=0"),
    "a list in a pool": (
        {"pools": pools_like(OTHER, MIXED[:, :64]), "src": MIXED.reshape(-1)[:64].view(np.int64)},
        r"pools\[2\].*shares memory with src; the kernel writes it",
    ),
    "the verdict in a pool": (
        {"pools": pools_like(OTHER, MIXED[:, :64]), "status": MIXED.reshape(-1)[:16].view(np.int32)},
        r"pools\[2\].*shares memory with workspace\.status; the kernel writes it",
    ),
    "the verdict in the count": (
        {"count": WORDS[1:2], "status": WORDS[:4]},
        r"workspace\.status.*shares memory with count; the kernel writes it",
    ),
    "one table for two": (
        {"writers": SLOT_WORDS, "readers": SLOT_WORDS},
        r"workspace\.readers.*shares memory with workspace\.writers; the kernel writes it",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "named"), MISUSE.values(), ids=MISUSE)
def test_misuse_is_named(changes: Mapping[str, Any], named: str) -> None:
    RelocatePlan(**good_arguments())
    arguments = good_arguments(**changes)
    with pytest.raises(ArgumentError, match=named):
        RelocatePlan(**arguments)


def test_lists_may_stand_in_the_gaps_between_rows() -> None:
    storage = np.zeros((40, 128), np.uint8)
    src = storage[0, 64:72].view(np.int64)
    dst, count = np.array([5]), np.array([1], np.int32)
    src[0] = 9
    storage[9, :64] = 3
    relocate([storage[:, :64]], src, dst, count).read_status()
    assert (storage[5, :64] == 3).all()


def test_layers_of_one_tensor_may_be_interleaved() -> None:
    storage = np.random.default_rng(0).integers(0, 256, (40, 3, 64), np.uint8)
    expected = storage.copy()
    expected[5] = expected[9]
    pools = [storage[:, layer] for layer in range(3)]
    src, dst, count = np.array([9]), np.array([5]), np.array([1], np.int32)
    relocate(pools, src, dst, count).read_status()
    np.testing.assert_array_equal(storage, expected)


@pytest.mark.parametrize("device", ["cpu", pytest.param("cuda", marks=gpu)])
@pytest.mark.parametrize("one_head", [False, True])
def test_torch_pools_in_bf16(device: str, one_head: bool) -> None:
    torch = pytest.importorskip("torch")
    shape = (64, 1, 576) if one_head else (64, 576)
    pools = [torch.randn(shape, device=device).to(torch.bfloat16) for _ in range(4)]
    src = torch.tensor([60, 61, 62, 7], device=device)
    dst = torch.tensor([1, 2, 3, 7], device=device)
    expected = [pool.clone() for pool in pools]
    for pool in expected:
        pool[dst] = pool[src]
    count = torch.tensor([4], dtype=torch.int32, device=device)
    workspace = RelocateWorkspace.allocate(pools, 4)
    plan = relocate(pools, src, dst, count, workspace=workspace)
    assert plan.read_status().code == RelocateCode.LEGAL
    for pool, right in zip(pools, expected, strict=True):
        assert torch.equal(pool.view(torch.int16), right.view(torch.int16))
    count.zero_()
    plan()
    assert plan.read_status().code == RelocateCode.LEGAL
    assert (plan.row_bytes, plan.num_slots, plan.capacity) == (4 * 1152, 64, 4)


def test_status_errors_name_the_row_and_the_slot() -> None:
    said = {
        ((1, 2), (-3, 4)): r"src\[1\]=-3: is no slot of the pools, which have 12",
        ((1, 2), (3, 77)): r"dst\[1\]=77: is no slot",
        ((1, 2), (3, 2)): r"dst\[1\]=2: is an earlier row's destination",
    }
    for rows, message in said.items():
        step = RelocateStep(moves(*rows), "numpy")
        step()
        with pytest.raises(ArgumentError, match=message + ".*; nothing was moved"):
            step.plan.read_status()
    step.count[0] = 5
    step()
    with pytest.raises(ArgumentError, match=r"count=5: must lie in \[0, 2\]"):
        step.plan.read_status()


def test_workspace_of_a_short_list_is_tables() -> None:
    pools = [np.zeros((64, 1152), np.uint8) for _ in range(61)]
    sizes = relocate_workspace(pools, 1024)
    # 72 pieces a row, in columns of 4, since 1,024 threads hold 4 each
    assert {name: buffer.shape for name, buffer in sizes.items()} == {
        "status": (4,), "places": (61 * 3, 4), "columns": (61 * 18, 4),
    }  # fmt: skip
    few = relocate_workspace(pools, 8)
    assert few.keys() == {"status", "columns"} and few["columns"].shape == (61 * 9, 4)


@pytest.mark.parametrize("blocks", [1, 2, 5, 9, 12, 40, 100])
@pytest.mark.parametrize("pieces", [1, 3, 8])
def test_columns_of_the_last_turn_are_split(pieces: int, blocks: int) -> None:
    columns = np.array([(1000 * n, 64, 0, pieces | 16 << 32) for n in range(37)], np.uint64)
    split = _balanced(columns, blocks)
    assert len(split) <= -(-37 // blocks) * blocks  # not a turn more
    if pieces == 8 and 37 // blocks and 37 % blocks * 2 <= blocks and 37 % blocks:
        assert len(split) > 37

    def covered(table: Any) -> list[int]:
        return [
            start + at
            for start, _, _, size in table.tolist()
            for at in range(0, 16 * (size & 0xFFFFFFFF), 16)
        ]

    assert covered(split) == covered(columns)


def test_workspace_of_a_long_list_is_bounded_by_the_scratch() -> None:
    pools = [np.zeros((64, 1152), np.uint8) for _ in range(61)]
    column = 65_536 * 1152
    for most, columns in ((0, 1), (column, 1), (3 * column + 5, 3), (1 << 40, 61)):
        sizes = relocate_workspace(pools, 65_536, scratch_bytes=most)
        assert sizes["scratch"].bytes == columns * column
        assert sizes["order"].shape == (65_536, 2)
        assert sizes["writers"].shape == sizes["readers"].shape == (64,)
    with pytest.raises(ArgumentError, match="src=0"):
        relocate_workspace(pools, 0)


def test_without_scratch_a_long_list_that_overlaps_is_not_moved() -> None:
    pool = np.arange(32, dtype=np.int64).repeat(2).reshape(16, 4)
    before = pool.copy()
    src, dst, count = np.array([1, 2]), np.array([2, 3]), np.array([2], np.int32)
    workspace = RelocateWorkspace.allocate([pool], 2, scratch_bytes=None, list_rows=0)
    plan = RelocatePlan([pool], src, dst, count, workspace=workspace, list_rows=0)
    assert len(plan.launches) == 2
    plan()
    with pytest.raises(ArgumentError, match="workspace.scratch=None: a long list that overlaps"):
        plan.read_status()
    np.testing.assert_array_equal(pool, before)
    dst[0] = 5
    plan()
    assert not plan.read_status().overlaps
    np.testing.assert_array_equal(pool[[5, 3]], before[[1, 2]])
    one = relocate([pool], np.array([1, 2]), np.array([2, 3]), count)
    assert one.read_status().overlaps  # a short list needs none
    np.testing.assert_array_equal(pool[[2, 3]], before[[1, 2]])


JUDGED = ["check", "rows", "index", "order", "phases"]


def test_a_plan_launches_kernels_that_reach_its_pools() -> None:
    named = {
        "one launch, by warps": ["few"],
        "one launch, by columns": ["list"],
        "one launch, by rows": ["list"],
        "long": [*JUDGED, "stage", *["phase"] * 3],
        "long, little scratch": [*JUDGED, *["stage", *["phase"] * 3] * 3],
    }
    for way, names in named.items():
        step = RelocateStep(moves((1, 2), layers=3), "numpy", num_ctas=2, **WAYS[way])
        with cuverify.record_launches() as records:
            step.plan()
        assert [record.kernel for record in records] == [f"relocate_{name}" for name in names]
        for record in records:
            assert record.grid == (2, 1, 1)
            if record.kernel.rpartition("_")[2] in ("few", "list", "rows", "stage", "phase"):
                owners = [id(owner) for owner in record.owners]
                assert all(id(pool) in owners for pool in step.plan.pools)


def test_kernels_need_no_local_memory_anywhere() -> None:
    pytest.importorskip("cupy")
    for arch in ("sm_80", "sm_90", "sm_120"):
        for values in ({}, LONGER_LISTS) if arch == "sm_90" else ({},):
            kernel = relocate_kernels(**values)["relocate_list"]
            for name, resources in kernel.compile(arch).resources.items():
                assert resources.spill_store_bytes == resources.spill_load_bytes == 0, (arch, name)
                assert resources.stack_bytes == 0, (arch, name)
                # a warp's lane holds eight rows of its list, and there are few warps
                most = 190 if name == "relocate_few" else 100
                assert resources.registers <= most, (arch, name)


def test_a_step_refuses_lists_for_other_buffers() -> None:
    step = RelocateStep(moves((1, 2)), "numpy")
    with pytest.raises(CaseError, match="pools"):
        step.refill(moves((1, 2), num_slots=13))
    with pytest.raises(CaseError, match="2 rows do not fit"):
        step.refill(moves((1, 2), (3, 4)))


def test_the_case_gives_lists_of_every_kind() -> None:
    host = list(CASE.batches(examples=8))
    verdicts = [oracle.judge(b.src, b.dst, b.count, b.num_slots)[0] for _, b in host]
    assert verdicts.count(0) > len(verdicts) / 2
    assert len(set(verdicts)) > 2
    assert any(label.startswith("real") and batch.count for label, batch in host)
    assert [label for label, _ in host] == [label for label, _ in CASE.batches(examples=8)]
    shapes = {(b.layers, b.num_slots) for _, b in CASE.device_batches(examples=3)}
    assert shapes == {(61, 1024), (3, 16_384)}


@pytest.mark.parametrize("kind", ["disjoint", "accepted", "cycle"])
def test_lists_that_are_timed_together_share_no_slot(kind: str) -> None:
    lists = [move_list(kind, 64, 20_000, copy=at) for at in range(8)]
    touched = [np.unique(np.concatenate(ends)) for ends in lists]
    assert len(np.unique(np.concatenate(touched))) == sum(len(slots) for slots in touched)
    for src, dst in lists:
        status = oracle.judge(src, dst, len(src), 20_000).tolist()
        assert status == [0, -1, int(kind != "disjoint"), 0]


# --- on a GPU ------------------------------------------------------------------------------------

# Few pool shapes, so that lists change in buffers that stay.
GPU_SHAPES: Sequence[tuple[int, int, int, int]] = (
    # layers, slots, row bytes, gap
    (61, 512, 1152, 0),
    (3, 4096, 112, 16),
    (2, 100, 16, 0),
    (1, 64, 144, 48),
    (7, 300, 656, 0),
)


@gpu
@pytest.mark.parametrize("shape", GPU_SHAPES, ids=str)
def test_a_hundred_drawn_lists_replayed_in_one_graph(shape: tuple[int, int, int, int]) -> None:
    layers, slots, row_bytes, gap = shape
    bounds: dict[str, Any] = {
        "min_slots": slots, "max_slots": slots, "min_layers": layers, "max_layers": layers,
        "row_bytes": (row_bytes,), "max_row_gap": 0,
    }  # fmt: skip
    legal = drawn(relocation_batches(**bounds), 80, seed=slots)
    illegal = drawn(faulty_relocation_batches(**bounds), 20, seed=slots)
    replays = Replays("torch-cuda")
    order = np.random.default_rng(slots).permutation(100)
    assert len(legal) + len(illegal) == 100
    for at in order:
        batch = (legal + illegal)[at]
        replays.assert_right(
            RelocationBatch(
                slots, batch.src, batch.dst, batch.count, layers, row_bytes, row_bytes + gap
            )
        )
    assert len(replays.steps) == 1


@gpu
def test_real_lists_replayed_in_one_graph() -> None:
    replays = Replays("torch-cuda")
    for batch in real_batches(20_000, steps=4):
        replays.assert_right(batch)


@gpu
def test_a_plan_cannot_be_made_inside_a_capture() -> None:
    import torch

    step = RelocateStep(moves((1, 2)), "torch-cuda")
    step()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
        with pytest.raises(LaunchError, match=r"make it outside torch.cuda.graph"):
            RelocatePlan(step.pools, step.src, step.dst, step.count, workspace=step.workspace)
    step.refill(moves((3, 4)))
    expected = step.expected()["pools"]
    graph.replay()
    np.testing.assert_array_equal(step.storage.cpu().numpy(), expected)


def test_package_holds_the_kernel() -> None:
    assert KernelSource.from_package("relocate").name == "kernels_cu/relocate.cu"
    assert kernels_cu.__doc__
