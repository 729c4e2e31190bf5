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
from cuverify.cases import Target
from cuverify.cases.relocate import CASE, RelocateStep
from cuverify.compile import max_shared_bytes
from cuverify.errors import ArgumentError, CaseError, CheckerError, LaunchError
from cuverify.ops.relocate import (
    RelocateCode,
    RelocatePlan,
    RelocateWorkspace,
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

gpu = pytest.mark.gpu
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
        if s != d and any(s == d2 and s2 != d2 for s2, d2 in before):
            return status(5, at, s)
        if s != d and any(d == s2 and s2 != d2 for s2, d2 in before):
            return status(5, at, d)
    return status(0, -1, 0)


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


def assert_right_when_checked(batch: RelocationBatch, schedule: Schedule, seed: int = 0) -> None:
    with cuverify.checked(schedule=schedule, seed=seed):
        assert_right(batch, num_ctas=3)


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
    ("chain", moves((1, 2), (2, 3)), [5, 1, 2, 0]),
    ("chain backwards", moves((2, 3), (1, 2)), [5, 1, 2, 0]),
    ("swap", moves((1, 2), (2, 1)), [5, 1, 2, 0]),
    ("duplicate before overlap", moves((1, 2), (2, 3), (4, 2)), [5, 1, 2, 0]),
    ("duplicate and overlap of one row", moves((1, 2), (3, 4), (4, 2)), [4, 2, 2, 0]),
    ("both ends overlap", moves((1, 2), (3, 4), (2, 3)), [5, 2, 2, 0]),
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
    status = oracle.relocate([pool], np.array([0, 1]), np.array([1, 2]), 2)
    assert status[0] == oracle.OVERLAP
    assert pool[:, 0].tolist() == [0, 1, 2, 3, 4]


def test_kernel_op_and_oracle_number_the_verdicts_alike() -> None:
    text = KernelSource.from_package("relocate").text
    in_kernel = dict(re.findall(r"constexpr int ([A-Z_]+) = (\d);", text))
    for code in RelocateCode:
        assert in_kernel[code.name] == str(int(code))
        assert getattr(oracle, code.name) == code


# --- kernels against the oracle ------------------------------------------------------------------


@both_lanes
@pytest.mark.parametrize("batch", [case[1] for case in LISTS], ids=[case[0] for case in LISTS])
def test_written_lists(batch: RelocationBatch, xp: Target) -> None:
    assert_right(batch, xp)


@examples(100)
@given(batch=relocation_batches(max_slots=200), num_ctas=st.integers(1, 5))
@example(batch=moves((0, 0), (0, 0), (3, 4), (0, 0)), num_ctas=1)  # a zero tail that is counted
def test_drawn_lists_on_the_host_lane(batch: RelocationBatch, num_ctas: int) -> None:
    assert_right(batch, num_ctas=num_ctas)


@examples(100)
@given(batch=faulty_relocation_batches(max_slots=200, max_faults=4))
def test_illegal_lists_on_the_host_lane(batch: RelocationBatch) -> None:
    step = assert_right(batch)
    before = step.expected()["pools"]
    np.testing.assert_array_equal(step.storage, before)
    with pytest.raises(ArgumentError, match="nothing was moved"):
        step.plan.read_status()


@examples(60)
@given(
    batch=relocation_batches() | faulty_relocation_batches(max_faults=3),
    schedule=st.sampled_from(SCHEDULES),
    seed=st.integers(0, 99),
)
def test_drawn_lists_under_the_checkers(
    batch: RelocationBatch, schedule: Schedule, seed: int
) -> None:
    assert_right_when_checked(batch, schedule, seed)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_real_lists_under_the_checkers(schedule: Schedule) -> None:
    for batch in real_batches(600, steps=2, max_rows=40, tree_tokens=8):
        assert_right_when_checked(batch, schedule)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("ahead", [0, 1, 2])
def test_a_dead_tail_is_loaded_and_not_used(ahead: int, schedule: Schedule) -> None:
    batch = moves((1, 2), (3, 4), (5, 6), num_slots=200)
    ends = np.array([(1, 2), (3, -9), (2, 1), (10**12, 4)] * 40).T
    src, dst = (np.concatenate([a, b]) for a, b in ((batch.src, ends[0]), (batch.dst, ends[1])))
    values = {"CHECK_THREADS": 32, "CHECK_UNROLL": 2, "CHECK_AHEAD": ahead}
    for count in (0, 1, 3, 4, 5):
        with cuverify.checked(schedule=schedule):
            assert_right(RelocationBatch(200, src, dst, count), values=values)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_lists_longer_than_the_block_under_the_checkers(schedule: Schedule) -> None:
    (batch,) = drawn(
        relocation_batches(
            min_slots=9000, max_slots=9000, min_rows=4400, max_rows=4400, row_bytes=(16,),
            max_layers=1, max_row_gap=0, allow_stays=False,
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
@pytest.mark.parametrize("row_bytes", [*ROW_BYTES, 2304])
def test_every_row_size_with_every_batch_of_loads(row_bytes: int, unroll: int, xp: Target) -> None:
    batch = moves((1, 0), (5, 11), (7, 7), layers=3, row_bytes=row_bytes, row_stride=row_bytes + 32)
    assert_right(batch.padded(6), xp, values={"UNROLL": unroll})


@both_lanes
@pytest.mark.parametrize("layers", [1, 2, 3, 61])
def test_every_number_of_layers(layers: int, xp: Target) -> None:
    batch = moves(
        (1, 0), (5, 11), (6, 2), (8, 3), (9, 4), layers=layers, row_bytes=48, row_stride=48
    )
    for num_ctas in (1, 2, 7):
        assert_right(batch, xp, num_ctas=num_ctas)


@both_lanes
def test_grids_that_rows_and_layers_do_not_divide(xp: Target) -> None:
    values = {"ROWS_THREADS": 32}
    rows = [(2 * row, 2 * row + 1) for row in range(9)] + [(30, 30)]
    for count in (0, 1, 5, 10):
        for layers in (1, 3, 7):
            shape: dict[str, Any] = {"layers": layers, "row_bytes": 16, "row_stride": 16}
            batch = moves(*rows[:count], num_slots=32, **shape).padded(12)
            for num_ctas in (1, 3, 20):
                assert_right(batch, xp, num_ctas=num_ctas, values=values)


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
    whole = RelocationBatch(36, g1.src, g1.dst, 5)
    step = assert_right(whole, xp)
    assert step.plan.peek_status().code == RelocateCode.OVERLAP
    with pytest.raises(ArgumentError, match=r"row 2, slot=6: is read by one row and written by an"):
        step.plan.read_status()
    rest = RelocationBatch(36, g1.src[~g1.chained], g1.dst[~g1.chained], 2)
    step = assert_right(rest, xp)
    assert step.plan.read_status().code == RelocateCode.LEGAL


def test_verdict_does_not_depend_on_the_number_of_threads() -> None:
    batches = drawn(faulty_relocation_batches(max_slots=300, max_faults=5), 20, seed=1)
    for batch in batches:
        for values in ({"CHECK_THREADS": 32}, {"CHECK_THREADS": 256, "CHECK_UNROLL": 1}):
            assert_right(batch, values=values)


def test_rows_without_a_verdict_are_not_moved() -> None:
    step = RelocateStep(moves((1, 2), (3, 4)), "numpy")
    for code in range(1, 6):
        step.workspace.status[:] = [code, 0, 0, 0]
        step.plan.move()
    for count in (-1, 3, 2**31 - 1):
        step.workspace.status[:] = 0
        step.count[0] = count
        step.plan.move()
    np.testing.assert_array_equal(step.storage, RelocateStep(moves(), "numpy").storage)


BARRIER = "__syncthreads();"
BARRIERS = KernelSource.from_package("relocate").text.count(BARRIER)


@pytest.mark.parametrize("number", range(BARRIERS))
@pytest.mark.parametrize("in_global_memory", [False, True])
def test_no_barrier_is_superfluous(number: int, in_global_memory: bool) -> None:
    """Without any one barrier a checker objects, or a verdict is wrong, on some short list."""
    parts = KernelSource.from_package("relocate").text.split(BARRIER)
    text = (
        BARRIER.join(parts[: number + 1]) + BARRIER.join(["", *parts[number + 1 :]])[len(BARRIER) :]
    )
    assert text.count(BARRIER) == BARRIERS - 1
    source = KernelSource.from_text(text, name="mutant.cu", values={"CHECK_THREADS": 64})
    kernel = cuverify.Kernel(source, "relocate_check")
    # Conflicts and faults of rows that different warps hold.
    rows = [(row, 200 + row) for row in range(100)]
    lists = [
        rows,
        [*rows[:80], (150, 205), *rows[81:]],
        [*rows[:80], (205, 180), *rows[81:]],
        [*rows[:70], (150, 205), (400, 1), *rows[72:]],
    ]
    assert any(
        fails_under_the_checkers(kernel, moves(*rows, num_slots=400), schedule, in_global_memory)
        for rows in lists
        for schedule in SCHEDULES
    )


def fails_under_the_checkers(
    kernel: cuverify.Kernel, batch: RelocationBatch, schedule: Any, in_global_memory: bool
) -> bool:
    bitmap = np.zeros(13, np.uint32) if in_global_memory else None
    status, count = np.zeros(4, np.int32), np.array([batch.count], np.int32)
    arguments = (batch.src, batch.dst, count, batch.capacity, batch.num_slots, bitmap, status)
    try:
        with cuverify.checked(schedule=schedule):
            kernel(1, 64, *arguments, shared=16 if in_global_memory else None)
    except CheckerError:
        return True
    expected = oracle.judge(batch.src, batch.dst, batch.count, batch.num_slots)
    dirty = bitmap is not None and bool(bitmap.any())
    return dirty or status.tolist() != expected.tolist()


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


def test_a_huge_pool_needs_a_bitmap_and_a_plan_brings_it() -> None:
    pools = huge_pools()
    lists = np.array([7]), np.array([HUGE - 1]), np.array([1], np.int32)
    pools[0][7] = 5
    plan = RelocatePlan(pools, *lists)
    assert plan.workspace.bitmap.shape == (HUGE // 32,)
    plan()
    assert plan.read_status().code == RelocateCode.LEGAL
    assert (pools[0][HUGE - 1] == 5).all()
    assert not plan.workspace.bitmap.any()
    without = RelocateWorkspace.allocate(pools, bitmap=False)
    with pytest.raises(ArgumentError, match=r"workspace.bitmap=None: 2000000 slots .*\[62500\]"):
        RelocatePlan(pools, *lists, workspace=without)


def test_most_pools_need_no_bitmap() -> None:
    pools = [np.zeros((40, 64), np.uint8)]
    plan = RelocatePlan(pools, np.array([7]), np.array([9]), np.array([1], np.int32))
    assert plan.workspace.bitmap is None
    assert RelocateWorkspace.allocate(pools, bitmap=True).bitmap.shape == (2,)


def good_arguments(**changes: Any) -> dict[str, Any]:
    pools = changes.pop("pools", [np.zeros((40, 64), np.uint8) for _ in range(3)])
    arguments = {
        "pools": pools,
        "src": np.zeros(8, np.int64),
        "dst": np.zeros(8, np.int64),
        "count": np.zeros(1, np.int32),
    }
    workspace = {
        name: np.zeros(buffer.shape, buffer.dtype)
        for name, buffer in relocate_workspace(40, 3).items()
    }
    for name, value in changes.items():
        if name in workspace or name == "bitmap":
            workspace[name] = value
        else:
            arguments[name] = value
    return {**arguments, "workspace": RelocateWorkspace(**workspace)}


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
MISUSE = {
    "no pools": ({"pools": []}, "pools"),
    "one tensor for all": ({"pools": SHARED}, "pools"),
    "no tensor": ({"pools": pools_like("kv")}, r"pools\[1\]"),
    "dtypes differ": ({"pools": pools_like(np.zeros((40, 64), np.int8))}, r"pools\[1\].*int8"),
    "slots differ": ({"pools": pools_like(np.zeros((41, 64), np.uint8))}, r"pools\[1\].*41 slots"),
    "rows differ": ({"pools": pools_like(np.zeros((40, 80), np.uint8))}, r"pools\[1\].*80 bytes"),
    "strides differ": (
        {"pools": pools_like(np.zeros((40, 96), np.uint8)[:, :64])}, r"pools\[1\].*96 bytes apart",
    ),
    "one pool twice": ({"pools": [SHARED, SHARED]}, r"pools\[1\].*shares memory with pools\[0\]"),
    "pools overlap": (
        {"pools": [INTERLEAVED[:40, 0], INTERLEAVED[1:, 0]]}, r"pools\[1\].*shares memory",
    ),
    "pools overlap by a row's tail": (
        {"pools": [INTERLEAVED.reshape(41, 192)[:40, :64], INTERLEAVED.reshape(-1)[48:48 + 40 * 192]
                   .reshape(40, 192)[:, :64]]}, r"pools\[1\].*shares memory",
    ),
    "rows of 24 bytes": ({"pools": [np.zeros((40, 24), np.uint8)]}, r"pools\[0\].*24 bytes"),
    "slots 72 bytes apart": (
        {"pools": [np.zeros((40, 72), np.uint8)[:, :64]]}, r"pools\[0\].*72 bytes apart",
    ),
    "rows backwards": ({"pools": [SHARED[::-1]]}, r"pools\[0\].*-64 bytes apart"),
    "expanded": ({"pools": [np.broadcast_to(SHARED[0], (40, 64))]}, r"pools\[0\].*0 bytes apart"),
    "columns apart": ({"pools": [np.zeros((40, 128), np.uint8)[:, ::2]]}, r"pools\[0\].*2 apart"),
    "two heads": ({"pools": [np.zeros((40, 2, 64), np.uint8)]}, r"pools\[0\].*\[slots, 1, D\]"),
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
    "bitmap too short": ({"bitmap": np.zeros(1, np.uint32)}, r"workspace.bitmap.*\[2\]"),
    "status too short": ({"status": np.zeros(2, np.int32)}, r"workspace.status.*\[4\]"),
    "table too long": ({"layer_ptrs": np.zeros(4, np.uint64)}, r"workspace.layer_ptrs.*\[3\]"),
    "table of 32 bits": ({"layer_ptrs": np.zeros(3, np.uint32)}, "layer_ptrs.*uint32"),
    "empty grid": ({"num_ctas": 0}, "num_ctas=0"),
}  # fmt: skip


@pytest.mark.parametrize(("changes", "named"), MISUSE.values(), ids=MISUSE)
def test_misuse_is_named(changes: Mapping[str, Any], named: str) -> None:
    RelocatePlan(**good_arguments())
    arguments = good_arguments(**changes)
    if "pools" in changes and isinstance(changes["pools"], list) and changes["pools"]:
        sizes = relocate_workspace(40, len(changes["pools"]))
        arguments["workspace"] = RelocateWorkspace(
            **{name: np.zeros(buffer.shape, buffer.dtype) for name, buffer in sizes.items()}
        )
    with pytest.raises(ArgumentError, match=named):
        RelocatePlan(**arguments)


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
    workspace = RelocateWorkspace.allocate(pools)
    plan = relocate(pools, src, dst, count, workspace=workspace)
    assert plan.read_status().code == RelocateCode.LEGAL
    for pool, right in zip(pools, expected, strict=True):
        assert torch.equal(pool.view(torch.int16), right.view(torch.int16))
    count.zero_()
    plan()
    assert plan.read_status().code == RelocateCode.LEGAL
    assert (plan.row_bytes, plan.layers, plan.num_slots, plan.capacity) == (1152, 4, 64, 4)


def test_status_errors_name_the_row_and_the_slot() -> None:
    said = {
        ((1, 2), (-3, 4)): r"src\[1\]=-3: is no slot of the pools, which have 12",
        ((1, 2), (3, 77)): r"dst\[1\]=77: is no slot",
        ((1, 2), (3, 2)): r"dst\[1\]=2: is an earlier row's destination",
        ((1, 2), (2, 3)): r"row 1, slot=2: is read by one row and written by another",
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


def test_workspace_is_small_and_sized_by_slots() -> None:
    small = {"status": 16, "layer_ptrs": 488}
    most = {"sm_120": 810_000, "sm_80": 1_335_000, "sm_90": 1_859_000}
    for arch, slots in most.items():
        shared = max_shared_bytes(arch)
        fits = relocate_workspace(slots, 61, shared_bytes=shared)
        assert {name: buffer.bytes for name, buffer in fits.items()} == small, arch
        over = relocate_workspace(slots + 2000, 61, shared_bytes=shared)
        assert set(over) == {*small, "bitmap"}, arch
    assert relocate_workspace(2_000_000, 61)["bitmap"].bytes == 250_000
    for wrong in ((0, 1), (1, 0)):
        with pytest.raises(ArgumentError):
            relocate_workspace(*wrong)


def test_a_plan_launches_two_kernels_and_reaches_its_pools() -> None:
    step = RelocateStep(moves((1, 2), layers=3), "numpy", num_ctas=2)
    with cuverify.record_launches() as records:
        step.plan()
    assert [record.kernel for record in records] == ["relocate_check", "relocate_rows"]
    assert [record.grid for record in records] == [(1, 1, 1), (2, 1, 1)]
    owners = [id(owner) for owner in records[1].owners]
    assert all(id(pool) in owners for pool in step.plan.pools)


def test_kernels_need_no_local_memory_anywhere() -> None:
    pytest.importorskip("cupy")
    from cuverify.compile import ARCHITECTURES

    for arch in ARCHITECTURES:
        for name, resources in relocate_kernels()[0].compile(arch).resources.items():
            assert resources.spill_store_bytes == resources.spill_load_bytes == 0, (arch, name)
            assert resources.stack_bytes == 0, (arch, name)
            assert resources.registers <= 85, (arch, name)


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
