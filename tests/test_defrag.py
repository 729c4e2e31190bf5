"""Compaction planned on the device against its oracle, in both lanes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuverify.validators import validate
from cuverify.validators.compare import compare_all, host_array
from hypothesis import given
from hypothesis import strategies as st

import cuverify
from cuverify.allocator import TokenAllocator
from cuverify.cases import Target
from cuverify.cases.defrag import CASE, DefragBatch, DefragStep
from cuverify.errors import ArgumentError, CaseError, CheckerError
from cuverify.holders import AllocatorHolder, SlotHolders
from cuverify.kv_layout import KvLayout
from cuverify.ops.defrag import (
    DefragPlan,
    DefragWorkspace,
    defrag_kernels,
    defrag_workspace,
)
from cuverify.ops.relocate import RelocateWorkspace
from cuverify.planner import plan_compact
from cuverify.sources import KernelSource
from cuverify.strategies import defrag_batches, examples

SCHEDULES = ("ascending", "descending", "random")

gpu = pytest.mark.gpu
both_lanes = pytest.mark.parametrize("xp", ["numpy", pytest.param("torch-cuda", marks=gpu)])


def wrong_in(step: DefragStep) -> list[str]:
    step.poison()
    expected = step.expected()
    step()
    outputs = {name: host_array(tensor) for name, tensor in step.outputs.items()}
    return [str(mismatch) for mismatch in compare_all(outputs, expected)]


def written(budget: int = 9, **changes: Any) -> DefragBatch:
    """Return two requests that share slot 9, a window, and a tree node of slots 3 and 12."""
    table = np.full((3, 6), 77, np.int32)
    table[1, :4], table[2, :3] = [9, 14, 2, 7], [9, 5, 13]
    given: dict[str, Any] = {
        "req_to_token": table, "req_pool_indices": np.array([1, 0, 2]),
        "held_lens": np.array([4, 5, 3]), "held": np.array([3, 12, 99]), "held_count": 2,
        "num_slots": 16, "budget": budget,
    }  # fmt: skip
    return DefragBatch(**{**given, **changes})


@both_lanes
def test_a_compaction_written_out(xp: Target) -> None:
    step = DefragStep(written(), xp)
    assert wrong_in(step) == []
    # live: 2 3 5 7 9 12 13 14, so that 9 and above move to 8, 6, 4, 1
    plan = step.plan.read()
    assert (plan.src.tolist(), plan.dst.tolist()) == ([14, 13, 12, 9], [1, 4, 6, 8])
    assert (plan.complete, plan.gain) == (True, 6)
    assert step.table[1].tolist() == [8, 1, 2, 7, 77, 77]
    assert step.table[2].tolist() == [8, 5, 4, 77, 77, 77]
    assert step.held.tolist() == [3, 6, 99]


@examples(100)
@given(
    batch=defrag_batches(max_seq_len=70) | defrag_batches(faulty=True, max_seq_len=70),
    num_ctas=st.integers(1, 3),
)
def test_drawn_pools_on_the_host_lane(batch: DefragBatch, num_ctas: int) -> None:
    assert wrong_in(DefragStep(batch, "numpy", num_ctas=num_ctas)) == []


@examples(30)
@given(
    batch=defrag_batches(max_seq_len=70) | defrag_batches(faulty=True, max_seq_len=70),
    schedule=st.sampled_from(SCHEDULES),
)
def test_drawn_pools_under_the_checkers(batch: DefragBatch, schedule: Any) -> None:
    with cuverify.checked(schedule=schedule):
        assert wrong_in(DefragStep(batch, "numpy", num_ctas=2)) == []


@examples(40)
@given(batch=defrag_batches(max_seq_len=70))
def test_the_host_plans_the_same(batch: DefragBatch) -> None:
    step = DefragStep(batch, "numpy")
    live = np.zeros(batch.num_slots, bool)
    for row, length in zip(batch.req_pool_indices, batch.held_lens, strict=True):
        live[batch.req_to_token[row, :length] if row else []] = True
    live[batch.held[: batch.held_count]] = True
    live[0] = False
    step()
    plan, right = step.plan.read(), plan_compact(live, budget=batch.budget)
    assert (plan.src.tolist(), plan.dst.tolist()) == (right.src.tolist(), right.dst.tolist())
    assert plan.complete or not right.complete or len(right) == batch.budget


def test_budgets_reach_the_same_end() -> None:
    whole = DefragStep(written(), "numpy")
    whole()
    step = DefragStep(written(1), "numpy")
    for _ in range(4):
        step()
        assert len(step.plan.read()) == 1
    step()
    assert len(step.plan.read()) == 0
    np.testing.assert_array_equal(step.table, whole.table)
    np.testing.assert_array_equal(step.storage[:, 1:9], whole.storage[:, 1:9])


def test_the_free_list_follows_what_the_device_has_moved() -> None:
    allocator = TokenAllocator(15)
    allocator.free_pages = np.array([1, 15, 4, 11, 6, 8, 10])
    holders = SlotHolders(16)
    holders.register(AllocatorHolder(allocator))
    step = DefragStep(written(), "numpy")
    step()
    plan = step.plan.read()
    holders.refuse(plan)
    holders.rewrite("allocator", plan.permutation(16), epoch=1)
    assert sorted(allocator.free_pages.tolist()) == list(range(9, 16))


def test_faults_move_nothing() -> None:
    table = written().req_to_token
    bad = table.copy()
    bad[2, 1] = 16
    for change, entry in (
        ({"req_to_token": bad}, 2),
        ({"held_lens": np.array([4, 5, 7])}, 2),
        ({"req_pool_indices": np.array([3, 0, 2])}, 0),
        ({"held_count": 3}, 3),
        ({"held_count": 4}, 3),
    ):
        step = DefragStep(written(**change), "numpy")  # type: ignore[arg-type]
        assert wrong_in(step) == []
        with pytest.raises(
            ArgumentError, match=f"request {entry}=1: a slot out of 16.*nothing was"
        ):
            step.plan.read()
        step.refill(written())
        assert wrong_in(step) == []  # and the next call is one as any other


TEXT = KernelSource.from_package("defrag").text


@both_lanes
@pytest.mark.parametrize("slots", [2, 31, 32, 33, 64, 1023, 1025, 40_000])
def test_pools_of_every_size(slots: int, xp: Target) -> None:
    live = np.random.default_rng(slots).permutation(np.arange(1, slots))[: slots // 2]
    table = np.zeros((2, max(1, len(live))), np.int32)
    table[1, : len(live)] = live
    batch = DefragBatch(
        table, np.array([1]), np.array([len(live)]), np.zeros(1, np.int64), 0, slots, slots
    )
    assert wrong_in(DefragStep(batch, xp)) == []


def test_a_race_in_the_marks_is_found() -> None:
    """The tester tested: without the atomic two requests race for one word of marks."""
    text = TEXT.replace(
        "atomicOr(&live[slot >> 5], 1u << (slot & 31));", "live[slot >> 5] |= 1u << (slot & 31);"
    )
    assert text != TEXT
    kernel = cuverify.Kernel(KernelSource.from_text(text, name="mutant.cu"), "defrag_mark")
    batch = written()
    live, fault = np.zeros(1, np.uint32), np.zeros(1, np.int32)
    with pytest.raises(CheckerError), cuverify.checked():
        kernel(
            2, 256, batch.req_to_token, 6, 3, 6, batch.req_pool_indices.astype(np.int32),
            batch.held_lens.astype(np.int32), 3, None, None, 0, 16, live, fault,
        )  # fmt: skip


def test_misuse_is_named() -> None:
    step = DefragStep(written(), "numpy")
    good: dict[str, Any] = {
        "pools": list(step.storage), "req_to_token": step.table, "req_pool_indices": step.rows,
        "held_lens": step.lens, "budget": 4,
    }  # fmt: skip
    DefragPlan(**good)
    for changes, message in (
        ({"held": step.held}, "held_count=None: comes with held"),
        (
            {"held": np.array(3), "held_count": np.zeros(1, np.int32)},
            "held=array.*wants one dimension",
        ),
        ({"pools": []}, "pools="),
        ({"req_to_token": step.held}, "req_to_token.*rows, width"),
        ({"req_pool_indices": np.zeros(2, np.int32)}, "req_pool_indices.*3 requests"),
        ({"held_lens": np.zeros((3, 1), np.int32)}, "held_lens.*one length"),
        ({"budget": 0}, "budget=0"),
        ({"budget": 0, "workspace": DefragWorkspace.allocate(step.table, 16, 3)}, "budget=0"),
        ({"num_ctas": 0}, "num_ctas=0"),
    ):
        with pytest.raises(ArgumentError, match=message):
            DefragPlan(**{**good, **changes})
    assert defrag_workspace(40, 3)["live"].shape == (2,)
    assert defrag_workspace(2**31 - 1, 3)["moved_by"].shape == (2**31 - 1,)
    for named, sizes in (
        ("num_slots", ((0, 3), (2**31, 3), ("40", 3))),
        ("budget", ((40, 0), (40, 2**31), (40, 2.5), (40, True))),
    ):
        for pair in sizes:
            with pytest.raises(ArgumentError, match=f"{named}=.*: wants 1 to 2147483647 "):
                defrag_workspace(*pair)
    with pytest.raises(CaseError, match="does not fit"):
        step.refill(written(3))


def test_what_is_written_shares_no_memory_with_anything_else() -> None:
    step = DefragStep(written(), "numpy")
    pools = list(step.storage)
    good: dict[str, Any] = {
        "pools": pools, "req_to_token": step.table, "req_pool_indices": step.rows,
        "held_lens": step.lens, "held": step.held, "held_count": step.held_count, "budget": 3,
    }  # fmt: skip
    work = DefragWorkspace.allocate(step.table, 16, 3)
    tables = RelocateWorkspace.allocate(pools, 3)
    mixed = np.zeros((16, 64), np.uint8)
    words = mixed.reshape(-1)[:72].view(np.int32).reshape(3, 6)
    for changes, message in (
        ({"workspace": replace(work, src=work.dst)}, r"workspace\.dst.*with workspace\.src"),
        ({"workspace": replace(work, src=step.held)}, r"held.*with workspace\.src"),
        (
            {"workspace": replace(work, count=step.held_count)},
            r"workspace\.count.*with held_count",
        ),
        (
            {"workspace": replace(work, moved_by=step.table.reshape(-1)[:16])},
            r"req_to_token.*with workspace\.moved_by",
        ),
        ({"held_lens": step.table[0, :3]}, "req_to_token.*with held_lens"),
        ({"held_count": step.table[0, :1]}, "req_to_token.*with held_count"),
        ({"req_to_token": words, "pools": [mixed]}, r"pools\[0\].*with req_to_token"),
        (
            {"relocate_workspace": replace(tables, status=work.status), "workspace": work},
            r"relocate_workspace\.status.*with workspace\.status",
        ),
        (
            {
                "relocate_workspace": replace(tables, status=work.src[:2].view(np.int32)),
                "workspace": work,
            },
            r"relocate_workspace\.status.*with workspace\.src",
        ),
        (
            {
                "workspace": replace(work, src=mixed.reshape(-1)[:24].view(np.int64)),
                "pools": [mixed],
            },
            r"pools\[0\].*with workspace\.src",
        ),
    ):
        with pytest.raises(ArgumentError, match=f"{message}; the kernel writes it"):
            DefragPlan(**{**good, **changes})
    # what is only read may be one tensor, and a row of the table may leave gaps
    DefragPlan(**{**good, "held_lens": step.rows})
    wide = np.zeros((3, 8), np.int32)
    DefragPlan(**{**good, "req_to_token": wide[:, :6], "held_lens": wide[0, 6:8]} | {
        "req_pool_indices": wide[1, 6:8]})  # fmt: skip


def test_the_case_gives_pools_of_every_kind() -> None:
    batches = [batch for _, batch in CASE.batches(examples=16)]
    codes = [int(DefragStep(batch, "numpy").expected()["status"][0]) for batch in batches]
    assert set(codes) == {0, 1}
    assert len({batch.shape for _, batch in CASE.device_batches(examples=4)}) == 2
    assert set(defrag_kernels()) == {
        "defrag_mark", "defrag_compact", "defrag_index", "defrag_rewrite",
    }  # fmt: skip


@gpu
def test_the_validator_finds_nothing() -> None:
    report = validate(CASE, examples=4)
    assert report.findings == [], report.to_text()
    inspected = {line.subject for line in report.coverage if line.status == "inspected"}
    assert {"capture", "graph nodes", "pointers of the graph", "replay"} <= inspected


@gpu
def test_replays_follow_other_tables() -> None:
    import torch

    steps: dict[Any, Any] = {}
    for _, batch in CASE.device_batches(examples=8):
        if batch.shape not in steps:
            step = DefragStep(batch, "torch-cuda")
            step()
            torch.cuda.synchronize()
            graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(graph):
                step()
            steps[batch.shape] = step, graph
        step, graph = steps[batch.shape]
        step.refill(batch)
        step.poison()
        expected = step.expected()
        graph.replay()
        outputs = {name: host_array(tensor) for name, tensor in step.outputs.items()}
        assert [str(m) for m in compare_all(outputs, expected)] == []
    assert len(steps) == 2


def test_a_layout_of_shared_prefixes_stays_readable() -> None:
    layout = KvLayout.build(
        seq_lens=[9, 12, 7], tree_tokens=2, shared_prefix=5, placement="scattered", num_slots=64
    )
    batch = DefragBatch.of_layout(layout, np.random.default_rng(0), budget=64)
    step = DefragStep(batch, "numpy")
    before = step.storage.copy()
    step()
    for b in range(3):
        row, length = layout.req_pool_indices[b], batch.held_lens[b]
        was, now = batch.req_to_token[row, :length], step.table[row, :length]
        np.testing.assert_array_equal(step.storage[:, now], before[:, was])
    live = np.concatenate(
        [
            step.table[row, :n]
            for row, n in zip(layout.req_pool_indices, batch.held_lens, strict=True)
        ]
        + [step.held[: batch.held_count]]
    )
    assert np.unique(live).tolist() == list(range(1, len(np.unique(live)) + 1))
