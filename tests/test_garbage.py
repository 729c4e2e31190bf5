"""Numbers at the ends of 64 bits, as stale buffers hold them: flagged, and no arithmetic overflows.

The kernels run as programs of their own under UBSan; what they say of such numbers is compared with
their oracles in the tests of each op.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

import cuverify
from cuverify.host import standalone
from cuverify.ops.accept import AcceptBuffers, AcceptCode, AcceptGreedy, AcceptSampled
from cuverify.ops.commit import CommitCode, CommitPlan
from cuverify.ops.defrag import DefragPlan
from cuverify.ops.relocate import RelocateCode, RelocatePlan
from cuverify.ops.tree_build import (
    EagleParents,
    TreeBuffers,
    TreeBuild,
    TreeCode,
    TreeLinks,
    TreeMask,
)
from cuverify.ops.verify_lists import ListCode, VerifyLists, VerifyWords
from cuverify.ops.verify_plan import PlanCode, VerifyPlan

needs_sanitizers = pytest.mark.skipif(
    (why := standalone.why_not("g++")) is not None, reason=str(why)
)


def zeros32(*shape: int) -> Any:
    return np.zeros(shape, np.int32)


def zeros64(*shape: int) -> Any:
    return np.zeros(shape, np.int64)


def plans(number: int) -> None:
    table = {"req_to_token": zeros32(3, 9), "kv_indices": zeros32(30)}
    for lens, bounds, rows in (
        ([number, 3], [0, 2, 4], [1, 2]),
        ([1, 3], [0, number, 4], [1, 2]),
        ([1, 3], [number, -1 - number, 4], [1, 2]),
        ([1, 3], [0, 2, 4], [1, number]),
    ):
        plan = VerifyPlan(
            np.array(lens), np.array(bounds), heads=8, max_tokens=9,
            req_pool_indices=np.array(rows), **table,
        )  # fmt: skip
        plan()
        assert plan.peek_status().code != PlanCode.PLANNED


def commits(number: int) -> None:
    for bounds, lens, rows in (
        ([0, number, 10], [1, 2], [1, 2]),
        ([number, -1 - number, 10], [1, 2], [1, 2]),
        ([0, 5, 10], [number, 2], [1, 2]),
        ([0, 5, 10], [1, 2], [1, number]),
    ):
        for pools in (None, [np.zeros((40, 16), np.uint8)]):
            plan = CommitPlan(
                np.array([[0, 1], [5, 6]], np.int32), np.array([1, 1], np.int32), np.array(bounds),
                np.arange(10), np.array(lens), np.array(rows), zeros32(3, 9), pools=pools,
                new_lens=zeros64(2),
            )  # fmt: skip
            plan()
            assert plan.peek_status().code != CommitCode.COMMITTED


def compactions(number: int) -> None:
    for lens, rows in (([number, 2], [1, 2]), ([1, 2], [1, number])):
        plan = DefragPlan(
            [np.zeros((40, 16), np.uint8)], zeros32(3, 9), np.array(rows), np.array(lens),
            held=np.full(4, number), held_count=np.array([2], np.int32), budget=3,
        )  # fmt: skip
        plan()
        assert plan.workspace.status[0] == 1


def moves(number: int) -> None:
    ways: list[dict[str, Any]] = [{}, {"list_rows": 0}, {"values": {"FEW_ROWS": 0}}]
    for way in ways:
        plan = RelocatePlan(
            [np.zeros((40, 16), np.uint8)], np.array([1, number, 3, 4]), np.array([2, 5, 6, 7]),
            np.array([3], np.int32), **way,
        )  # fmt: skip
        plan()
        assert plan.peek_status().code == RelocateCode.BAD_SOURCE


def acceptances(number: int) -> None:
    tokens = np.full((2, 3), number)
    links = np.array([[1, number, -1]] * 2), np.array([[-1, 2, number]] * 2)
    index = np.array([[0, 1, number], [number, 4, 5]])
    into = AcceptBuffers.allocate(tokens, batch=2, num_tokens=3, max_path=3)
    AcceptGreedy(tokens, *links, np.full(6, number), into, retrieve_index=index)()
    assert into.status[:, 0].tolist() == [AcceptCode.BAD_LINK, AcceptCode.BAD_INDEX]
    coins = np.zeros((2, 3), np.float32), np.zeros(2, np.float32)
    probs = np.full((2, 3, 8), 0.125, np.float32)
    AcceptSampled(tokens, *links, *coins, probs, into, retrieve_index=index)()
    assert into.status[1, 0] == AcceptCode.BAD_INDEX


def trees(number: int) -> None:
    trees = TreeBuffers.allocate(zeros64(1), batch=2, num_tokens=5)
    TreeBuild(
        np.full((2, 3, 4), -1, np.float32), np.full((2, 3, 4), number), np.full(2, number),
        np.full(2, number), trees,
    )()  # fmt: skip
    assert trees.positions[0, 0] == number
    EagleParents(np.full((2, 4), number), np.full((2, 4), number), 3, trees)()
    TreeLinks(np.full(2, number), trees)()
    assert (trees.status[:, 0] == TreeCode.BAD_PARENT).all()
    status = zeros32(2)
    TreeMask(np.array([number, 3]), trees, np.zeros(500, np.uint8), status, mode="full")()
    assert status.tolist() == [1, 0]


def lists(number: int) -> None:
    status, bounds = zeros32(4), zeros64(3)
    for lens, rows in (([number, 3], [1, 2]), ([1, 3], [1, number])):
        VerifyLists(
            np.array(lens), num_tokens=5, kv_indptr=zeros64(3), qo_indptr=zeros64(3),
            mask_indptr=bounds, status=status, kv_indices=zeros64(30), req_to_token=zeros32(3, 9),
            req_pool_indices=np.array(rows), drafts="given", out_cache_loc=zeros64(10),
        )()  # fmt: skip
        assert status[0] != ListCode.LISTED
    visible = np.zeros((10, 1), np.uint64)
    # the second bounds begin where a mask may: only what follows is garbage
    for lens, given in (([number, 3], [number, -1 - number, number]), ([0, 3], [5, number, 7])):
        bounds[:] = given
        mask = np.ones(99, np.uint8)
        VerifyWords(mask, np.array(lens), visible, mode="full", mask_indptr=bounds)()
        assert visible[:, 0].tolist() == [1 << node for node in range(5)] * 2


@needs_sanitizers
@pytest.mark.parametrize("number", [-(2**63), 2**63 - 1], ids=["lowest", "highest"])
@pytest.mark.parametrize("run", [plans, commits, compactions, moves, acceptances, trees, lists])
def test_no_arithmetic_on_garbage_overflows(run: Callable[[int], None], number: int) -> None:
    with cuverify.sanitized(compiler="g++"):
        run(number)
