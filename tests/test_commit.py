"""The commit of accepted paths against its oracle, in both lanes and both ways."""

from __future__ import annotations

import re
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from cuverify.validators import validate
from cuverify.validators.compare import compare_all, host_array
from hypothesis import given
from hypothesis import strategies as st

import cuverify
from cuverify.buffers import read
from cuverify.cases import Target
from cuverify.cases.commit import CASE, CommitBatch, CommitStep
from cuverify.errors import ArgumentError, CaseError, CheckerError
from cuverify.kv_layout import KvLayout
from cuverify.ops.commit import (
    CommitCode,
    CommitPlan,
    CommitWorkspace,
    commit_kernels,
    commit_workspace,
)
from cuverify.ops.relocate import RelocateWorkspace
from cuverify.reference import commit as oracle
from cuverify.sources import KernelSource
from cuverify.strategies import commit_batches, examples
from cuverify.workload import accepted_path_moves

SCHEDULES = ("ascending", "descending", "random")

gpu = pytest.mark.gpu
both_lanes = pytest.mark.parametrize("xp", ["numpy", pytest.param("torch-cuda", marks=gpu)])
both_ways = pytest.mark.parametrize("way", ["rows", "table"])


def wrong_in(step: CommitStep) -> list[str]:
    step.poison()
    expected = step.expected()
    step()
    outputs = {name: host_array(tensor) for name, tensor in step.outputs.items()}
    return [str(mismatch) for mismatch in compare_all(outputs, expected)]


def golden(way: Literal["rows", "table"] = "rows", **changes: Any) -> CommitBatch:
    """Return two windows of six nodes; accepted are nodes 0, 3, 4, 5 and 0, 4, 5."""
    table = np.zeros((3, 16), np.int32)
    windows = np.array([3, 4, 5, 6, 7, 8, 31, 33, 35, 30, 32, 34])
    table[1, 2:8], table[2, 5:11] = windows[:6], windows[6:]
    table[1, :2], table[2, :5] = [20, 21], [22, 23, 24, 25, 26]
    given: dict[str, Any] = {
        "accept_index": np.array([[0, 3, 4, 5], [6, 10, 11, -1]]),
        "accept_token_num": np.array([3, 2]),
        "qo_indptr": np.array([0, 6, 12]),
        "out_cache_loc": windows,
        "seq_lens": np.array([2, 5]),
        "req_pool_indices": np.array([1, 2]),
        "req_to_token": table,
        "num_slots": 40,
        "way": way,
    }
    return CommitBatch(**{**given, **changes})


@both_lanes
def test_golden_paths_by_rows(xp: Target) -> None:
    step = CommitStep(golden(), xp)
    assert wrong_in(step) == []
    work = step.plan.workspace
    listed = int(work.count[0])
    assert list(zip(work.src[:listed].tolist(), work.dst[:listed].tolist(), strict=True)) == [
        (6, 4), (7, 5), (8, 6), (32, 33), (34, 35),
    ]  # fmt: skip
    assert step.new_lens.tolist() == [6, 8]
    assert step.plan.read_status().code == CommitCode.COMMITTED


@both_lanes
def test_golden_paths_by_table(xp: Target) -> None:
    step = CommitStep(golden("table"), xp)
    assert wrong_in(step) == []
    table = read(step.inputs["req_to_token"])
    assert table[1, :8].tolist() == [20, 21, 3, 6, 7, 8, 4, 5]
    assert table[2, 5:11].tolist() == [31, 32, 34, 33, 35, 30]
    slots = read(step.inputs["out_cache_loc"]).tolist()
    assert slots == [3, 6, 7, 8, 4, 5, 31, 32, 34, 33, 35, 30]


def test_the_list_is_that_of_the_churned_pool() -> None:
    batch = golden()
    right = accepted_path_moves(
        batch.out_cache_loc, batch.accept_index, batch.accept_token_num, tree_tokens=6
    )
    done = oracle.commit(
        batch.accept_index, batch.accept_token_num, batch.qo_indptr, batch.out_cache_loc,
        batch.seq_lens, batch.req_pool_indices, batch.req_to_token,
    )  # fmt: skip
    assert (done.src.tolist(), done.dst.tolist()) == (right.src.tolist(), right.dst.tolist())


@examples(120)
@given(batch=commit_batches() | commit_batches(faulty=True), num_ctas=st.integers(1, 3))
def test_drawn_paths_on_the_host_lane(batch: CommitBatch, num_ctas: int) -> None:
    assert wrong_in(CommitStep(batch, "numpy", num_ctas=num_ctas)) == []


@examples(60)
@given(
    batch=commit_batches(max_seq_len=40) | commit_batches(faulty=True, max_seq_len=40),
    schedule=st.sampled_from(SCHEDULES),
)
def test_drawn_paths_under_the_checkers(batch: CommitBatch, schedule: Any) -> None:
    with cuverify.checked(schedule=schedule):
        assert wrong_in(CommitStep(batch, "numpy", num_ctas=2)) == []


@both_lanes
@pytest.mark.parametrize("tree", [1, 2, 127, 128, 129, 256, 1024])
@both_ways
def test_every_width_of_trees(tree: int, way: Any, xp: Target) -> None:
    layout = KvLayout.build(seq_lens=[5, 0, 9], tree_tokens=tree, padded=1, placement="holes")
    rng = np.random.default_rng(tree)
    batch = CommitBatch.of_layout(layout, rng, depth=17, way=way)
    assert wrong_in(CommitStep(batch, xp)) == []


@both_lanes
def test_more_requests_than_threads(xp: Target) -> None:
    layout = KvLayout.build(seq_lens=[1] * 600, tree_tokens=3, placement="scattered")
    for way in ("rows", "table"):
        batch = CommitBatch.of_layout(layout, np.random.default_rng(1), depth=3, way=way)  # type: ignore[arg-type]
        assert wrong_in(CommitStep(batch, xp)) == []


def test_a_request_commits_what_it_decoded_both_ways() -> None:
    """Whatever the way: behind the prefix the table leads to the rows of the accepted nodes."""
    layout = KvLayout.build(seq_lens=[4, 7], tree_tokens=9, placement="scattered", rng=4)
    for way in ("rows", "table"):
        batch = CommitBatch.of_layout(layout, np.random.default_rng(3), depth=6, way=way)  # type: ignore[arg-type]
        step = CommitStep(batch, "numpy")
        before = step.storage.copy()
        step()
        for b, (row, length) in enumerate(
            zip(layout.req_pool_indices, layout.seq_lens, strict=True)
        ):
            path = batch.accept_index[b, : batch.accept_token_num[b] + 1]
            slots = step.inputs["req_to_token"][row, : step.new_lens[b]]
            rows = before[:, np.concatenate([layout.prefix_slots(b), batch.out_cache_loc[path]])]
            assert len(slots) == length + len(path)
            np.testing.assert_array_equal(step.storage[:, slots], rows)


def test_faults_are_named_and_nothing_is_committed() -> None:
    said = {
        r"qo_indptr\[1 \+ 1\]=6: wants ascending bounds up to 12": {
            "qo_indptr": np.array([0, 6, 6])
        },
        r"accept_token_num\[1\]=4: must lie in \[0, 4\)": {"accept_token_num": np.array([3, 4])},
        r"accept_index\[0\]=1: a path starts": {
            "accept_index": np.array([[1, 3, 4, 5], [6, 10, 11, -1]])
        },
        r"accept_index\[1\]=12: a path starts": {
            "accept_index": np.array([[0, 3, 4, 5], [6, 10, 12, -1]])
        },
        r"req_pool_indices\[0\]=3: is no row": {"req_pool_indices": np.array([3, 2])},
        r"seq_lens\[1\]=11: the window does not fit": {"seq_lens": np.array([2, 11])},
    }
    for message, change in said.items():
        for way in ("rows", "table"):
            step = CommitStep(golden(way, **change), "numpy")  # type: ignore[arg-type]
            assert wrong_in(step) == []
            with pytest.raises(ArgumentError, match=message + ".*; nothing was committed"):
                step.plan.read_status()


def test_windows_that_share_a_slot_are_not_moved() -> None:
    windows = golden().out_cache_loc.copy()
    windows[7] = windows[1]  # the second place of both windows
    step = CommitStep(golden(out_cache_loc=windows), "numpy")
    before = step.storage.copy()
    step()
    with pytest.raises(ArgumentError, match=r"workspace\.dst\[3\]=4: is an earlier row's"):
        step.plan.read_status()
    np.testing.assert_array_equal(step.storage, before)
    assert step.new_lens.tolist() == [6, 8]  # as said of new_lens: the move is judged later


def test_kernel_op_and_oracle_number_the_verdicts_alike() -> None:
    text = KernelSource.from_package("commit").text
    in_kernel = dict(re.findall(r"constexpr int ([A-Z_]+) = (\d);", text))
    for code in CommitCode:
        assert in_kernel[code.name] == str(int(code))
        assert getattr(oracle, code.name) == code


BARRIER = "__syncthreads();"
TEXT = KernelSource.from_package("commit").text


@pytest.mark.parametrize("number", range(TEXT.count(BARRIER)))
def test_no_barrier_is_superfluous(number: int, monkeypatch: pytest.MonkeyPatch) -> None:
    parts = TEXT.split(BARRIER)
    text = (
        BARRIER.join(parts[: number + 1]) + BARRIER.join(["", *parts[number + 1 :]])[len(BARRIER) :]
    )
    values: dict[str, Any] = {"PLAN_THREADS": 64, "TABLE_THREADS": 64}
    source = KernelSource.from_text(text, name="mutant.cu", values=values)
    known = commit_kernels(SEQ_INDEX="int", QO_INDEX="int", POOL_INDEX="int")
    for name in known:
        monkeypatch.setitem(known, name, cuverify.Kernel(source, name))
    layout = KvLayout.build(seq_lens=[3] * 100, tree_tokens=80, placement="scattered")

    def fails(way: Any, schedule: Any) -> bool:
        batch = CommitBatch.of_layout(layout, np.random.default_rng(0), depth=20, way=way)
        wrong = batch.spoiled(np.random.default_rng(5))
        try:
            with cuverify.checked(schedule=schedule):
                return bool(
                    wrong_in(CommitStep(batch, "numpy", num_ctas=2))
                    or wrong_in(CommitStep(wrong, "numpy", num_ctas=2))
                )
        except CheckerError:
            return True

    assert any(fails(way, schedule) for way in ("table", "rows") for schedule in SCHEDULES)


def test_misuse_is_named() -> None:
    step = CommitStep(golden("table"), "numpy")
    good = dict(step.inputs)
    CommitPlan(**good)
    for changes, message in (
        ({"accept_index": np.zeros(4, np.int32)}, "accept_index.*two extents"),
        ({"accept_token_num": np.zeros(3, np.int32)}, r"accept_token_num.*\[2\] for 2 requests"),
        ({"qo_indptr": np.zeros(2, np.int32)}, r"qo_indptr.*\[3\]"),
        ({"seq_lens": np.zeros(2, np.float32)}, "seq_lens.*float32"),
        ({"new_lens": np.zeros(2, np.int64)}, "new_lens.*seq_lens are int32"),
        ({"page_size": 16}, "page_size=16"),
        ({"num_ctas": 0}, "num_ctas=0"),
        ({"num_ctas": "2"}, "num_ctas='2': wants at least one block"),
        ({"out_cache_loc": np.array(3)}, "out_cache_loc.*one dimension"),
        ({"out_cache_loc": np.zeros(12, np.int32)}, "out_cache_loc.*int32.*int64"),
    ):
        with pytest.raises(ArgumentError, match=message):
            CommitPlan(**{**good, **changes})
    with pytest.raises(ArgumentError, match="batch=0"):
        commit_workspace(0, 1)
    with pytest.raises(CaseError, match="does not fit"):
        step.refill(golden("rows"))


@pytest.mark.parametrize("view", [False, True])
def test_new_lengths_may_replace_the_old_ones_in_a_commit_by_rows(view: bool) -> None:
    step = CommitStep(golden(), "numpy")
    lens = step.inputs["seq_lens"]
    pools = list(step.storage)
    CommitPlan(**step.inputs, pools=pools, new_lens=lens[:] if view else lens)()
    assert step.inputs["seq_lens"].tolist() == [6, 8]


def test_what_is_written_shares_no_memory_with_anything_else() -> None:
    step = CommitStep(golden("table"), "numpy")
    good = dict(step.inputs)
    work = CommitWorkspace.allocate(good["accept_index"], 2, 4)
    lens = np.zeros(3, np.int32)
    pools = list(CommitStep(golden(), "numpy").storage)
    mixed = np.zeros((40, 32), np.uint8)
    words = mixed.reshape(-1).view(np.int32)
    tables = RelocateWorkspace.allocate(pools, 8)
    indices = good["accept_index"][0]
    for changes, message in (
        ({"new_lens": good["seq_lens"]}, "new_lens.*with seq_lens"),
        ({"new_lens": good["seq_lens"][:]}, "new_lens.*with seq_lens"),
        ({"new_lens": good["accept_token_num"]}, "new_lens.*with accept_token_num"),
        ({"new_lens": work.status[:2], "workspace": work}, r"new_lens.*with workspace\.status"),
        (
            {"workspace": replace(work, status=good["accept_index"][0])},
            r"workspace\.status.*with accept_index",
        ),
        ({"accept_index": good["req_to_token"][:2, :4]}, "req_to_token.*with accept_index"),
        ({"seq_lens": good["out_cache_loc"][:2]}, "out_cache_loc.*with seq_lens"),
        ({"pools": pools, "seq_lens": lens[:2], "new_lens": lens[1:]}, "new_lens.*with seq_lens"),
        ({"pools": pools, "new_lens": good["qo_indptr"][:2]}, "new_lens.*with qo_indptr"),
        (
            {"pools": pools, "workspace": replace(work, src=good["out_cache_loc"][:8])},
            r"workspace\.src.*with out_cache_loc",
        ),
        ({"pools": pools, "workspace": replace(work, src=work.dst)}, r"workspace\.dst.*\.src"),
        ({"pools": [mixed], "seq_lens": words[:2]}, r"pools\[0\].*with seq_lens"),
        (
            {
                "pools": pools,
                "relocate_workspace": replace(tables, status=work.status),
                "workspace": work,
            },
            r"relocate_workspace\.status.*with workspace\.status",
        ),
        (
            {"pools": pools, "relocate_workspace": replace(tables, status=indices)},
            r"relocate_workspace\.status.*with accept_index",
        ),
        (
            {
                "pools": pools,
                "relocate_workspace": replace(tables, status=work.src[:2].view(np.int32)),
                "workspace": work,
            },
            r"relocate_workspace\.status.*with workspace\.src",
        ),
        (
            {
                "pools": [mixed],
                "workspace": replace(work, src=mixed.reshape(-1)[:64].view(np.int64)),
            },
            r"pools\[0\].*with workspace\.src",
        ),
    ):
        with pytest.raises(ArgumentError, match=f"{message}; the kernel writes it"):
            CommitPlan(**{**good, **changes})


def test_the_case_gives_batches_of_every_kind() -> None:
    batches = [batch for _, batch in CASE.batches(examples=24)]
    assert {batch.way for batch in batches} == {"rows", "table"}
    codes = {int(CommitStep(batch, "numpy").expected()["status"][0]) for batch in batches}
    assert 0 in codes and len(codes) > 2
    shapes = [batch.shape for _, batch in CASE.device_batches(examples=8)]
    assert len(set(shapes)) == 4


@gpu
def test_the_validator_finds_nothing() -> None:
    report = validate(CASE, examples=8)
    assert report.findings == [], report.to_text()
    inspected = {line.subject for line in report.coverage if line.status == "inspected"}
    assert {"capture", "graph nodes", "pointers of the graph", "replay"} <= inspected


@gpu
def test_replays_follow_other_paths() -> None:
    import torch

    steps: dict[Any, Any] = {}
    for _, batch in CASE.device_batches(examples=40):
        if batch.shape not in steps:
            step = CommitStep(batch, "torch-cuda")
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
    assert len(steps) == 4
