"""The planner in plain numbers keeps its own rules, and the judge of plans sees every fault."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuverify.errors import ArgumentError
from cuverify.reference import verify_plan as oracle
from cuverify.reference.verify_plan import Plan, faults, kv_list, verify_plan
from cuverify.strategies import examples


def plan_of(lens: Any, trees: Any, *, num_ctas: int = 8, heads: int = 8, **more: Any) -> Plan:
    bounds = np.concatenate([[0], np.cumsum(trees)])
    row_tiles = sum(-(-tree * heads // 64) for tree in trees)
    more.setdefault("max_work", row_tiles + num_ctas)
    return verify_plan(np.array(lens), bounds, heads=heads, num_ctas=num_ctas, **more)


def wrong(plan: Plan, lens: Any, trees: Any, heads: int = 8) -> list[str]:
    return faults(plan, np.array(lens), np.concatenate([[0], np.cumsum(trees)]), heads=heads)


def entries(plan: Plan) -> list[list[int]]:
    return plan.work[plan.work[:, 0] >= 0].tolist()  # type: ignore[no-any-return]


@st.composite
def steps(draw: st.DrawFn) -> tuple[list[int], list[int], int, int]:
    length = st.one_of(
        st.integers(0, 100), st.sampled_from([15, 16, 17, 31, 32, 33, 500, 4000, 70_000])
    )
    tree = st.one_of(st.integers(0, 20), st.sampled_from([8, 16, 33, 64, 65, 129, 256]))
    lens = draw(st.lists(length, min_size=1, max_size=5))
    trees = [draw(tree)] * len(lens) if draw(st.booleans()) else [draw(tree) for _ in lens]
    heads = draw(st.sampled_from([8, 16]))
    return lens, trees, heads, draw(st.sampled_from([1, 2, 3, 7, 8, 16, 132]))


@examples(300)
@given(steps())
def test_plans_owe_nothing(step: tuple[list[int], list[int], int, int]) -> None:
    lens, trees, heads, num_ctas = step
    plan = plan_of(lens, trees, heads=heads, num_ctas=num_ctas)
    assert wrong(plan, lens, trees, heads) == []
    row_tiles = sum(-(-tree * heads // 64) for tree in trees)
    assert len(entries(plan)) <= max(0, row_tiles + num_ctas - 1)
    assert np.count_nonzero(plan.combine_tiles[:, 0] >= 0) < num_ctas
    assert plan.combine_indptr[-1] < 2 * num_ctas
    assert plan.status.tolist() == [0, -1, 0, 0]


@examples(100)
@given(steps())
def test_long_work_is_spread_evenly(step: tuple[list[int], list[int], int, int]) -> None:
    lens, trees, heads, num_ctas = step
    lens = [length + 20_000 for length in lens]
    trees = [tree or 1 for tree in trees]
    plan = plan_of(lens, trees, heads=heads, num_ctas=num_ctas)
    cost = np.array(
        [48 + end - begin + trees[request] * (end == lens[request])
         for request, _, begin, end, _, _ in entries(plan)]
    )  # fmt: skip
    load = np.array([cost[first:end:by].sum() for first, end, by, _ in plan.cta_work.tolist()])
    busy = num_ctas - num_ctas % int(plan.cta_work[0, 2])
    # a cut is rounded by a tile, pays for a start, and may be dropped beside the tree
    assert load.max() <= load.sum() / busy + 2 * 48 + 3 * 16 + 256 + 32


def test_one_request_is_cut_evenly() -> None:
    # 4000 + 8 rows for 4 blocks, each of which starts once: a cut every 1002, rounded up to 1008
    plan = plan_of([4000], [8], num_ctas=4)
    assert entries(plan) == [
        [0, 0, 0, 1008, 0, 4],
        [0, 0, 1008, 2016, 1, 4],
        [0, 0, 2016, 3024, 2, 4],
        [0, 0, 3024, 4000, 3, 4],
    ]
    assert plan.cta_work.tolist() == [[0, 1, 1, 0], [1, 2, 1, 0], [2, 3, 1, 0], [3, 4, 1, 0]]
    assert plan.combine_tiles.tolist() == [[0, 0, 0, 8], *[[-1] * 4] * 3]
    assert plan.combine_indptr.tolist() == [0, 4, 4, 4, 4]
    assert plan.kv_indptr.tolist() == [0, 4000]


def test_row_tiles_go_side_by_side() -> None:
    plan = plan_of([2000], [16], num_ctas=4)  # two row tiles: teams of two
    assert plan.cta_work[:, 2].tolist() == [2, 2, 2, 2]
    ranges = {(begin, end) for _, _, begin, end, _, _ in entries(plan)}
    assert len(ranges) == 2
    assert [tile for _, tile, *_ in entries(plan)] == [0, 1, 0, 1]
    assert plan.cta_work.tolist() == [[0, 2, 2, 0], [1, 2, 2, 0], [2, 4, 2, 0], [3, 4, 2, 0]]


@pytest.mark.parametrize(
    ("tree", "num_ctas", "width"),
    [
        (64, 132, 8),
        (65, 132, 9),
        (33, 132, 5),
        (16, 132, 2),
        (16, 7, 1),  # one of seven is more than one in eight
        (16, 9, 2),
        (129, 132, 17),
        (129, 64, 1),  # 17 would leave thirteen out of 64
    ],
)
def test_teams_leave_few_blocks_out(tree: int, num_ctas: int, width: int) -> None:
    plan = plan_of([20_000], [tree], num_ctas=num_ctas)
    in_teams = num_ctas - num_ctas % width
    assert set(plan.cta_work[:in_teams, 2].tolist()) == {width}
    assert wrong(plan, [20_000], [tree]) == []


def test_blocks_that_are_left_over_take_row_tiles_one_after_the_other() -> None:
    plan = plan_of([65_536], [33], num_ctas=132)  # 26 teams of five blocks, and two
    assert [list(range(*taken[:3])) for taken in plan.cta_work[130:].tolist()] == [
        [130, 132, 134],
        [131, 133],
    ]
    rows = plan.work[:, 3] - plan.work[:, 2]
    load = [rows[first:end:step].sum() for first, end, step, _ in plan.cta_work]
    assert max(load) < 65_536 / 26 - 16
    assert 0 < load[131] < load[130] < max(load)


@pytest.mark.parametrize(
    ("lens", "tree", "heads"),
    [
        ([20_000] * 14 + [600, 50, 50, 50], 33, 8),
        ([4000] * 13 + [1000] + [16] * 6, 5, 128),
        ([32_768] * 32, 7, 128),
        ([100, 8000, 900, 4000, 250, 6000] * 20, 5, 128),
    ],
)
def test_blocks_that_are_left_over_take_no_more_than_others(
    lens: list[int], tree: int, heads: int
) -> None:
    width = -(-tree * heads // 64)
    most = {}
    for num_ctas in (132, 132 - 132 % width):
        plan = plan_of(lens, [tree] * len(lens), num_ctas=num_ctas, heads=heads)
        assert wrong(plan, lens, [tree] * len(lens), heads) == []
        cost = plan.work[:, 3] - plan.work[:, 2] + 48
        most[num_ctas] = max(cost[first:end:step].sum() for first, end, step, _ in plan.cta_work)
    assert most[132] < most[132 - 132 % width]


@pytest.mark.parametrize("length", [1024, 4096, 16_384])
def test_blocks_are_left_over_where_nobody_is_cut_without_them(length: int) -> None:
    plan = plan_of([length] * 16, [64] * 16, num_ctas=132)  # 16 teams of eight blocks, and four
    assert (plan.combine_tiles == -1).all()
    assert (plan.cta_work[128:, 1] == 0).all()


def test_a_short_prefix_is_left_whole() -> None:
    for length in (0, 1, 15, 31):
        plan = plan_of([length], [8], num_ctas=8)
        assert entries(plan) == [[0, 0, 0, length, -1, 1]]
        assert plan.combine_indptr.tolist() == [0] * 9


def test_a_request_without_a_tree_has_no_work() -> None:
    plan = plan_of([100, 100], [0, 3])
    assert {request for request, *_ in entries(plan)} == {1}
    assert plan.kv_indptr.tolist() == [0, 100, 200]
    assert wrong(plan, [100, 100], [0, 3]) == []
    assert entries(plan_of([5], [0])) == []


def test_a_plan_that_does_not_fit_is_refused() -> None:
    with pytest.raises(ArgumentError, match="max_work"):
        plan_of([4000], [8], num_ctas=4, max_work=3)


@pytest.mark.parametrize(
    ("lens", "bounds", "more", "status"),
    [
        ([5, -1], [0, 1, 2], {}, (oracle.BAD_LENGTH, 1, -1)),
        ([2**31 - 200, 1], [0, 1, 2], {}, (oracle.BAD_LENGTH, 0, 2**31 - 200)),
        ([5, 5], [0, 3, 2], {}, (oracle.BAD_TREE, 1, -1)),
        ([5, 5], [0, 257, 258], {}, (oracle.BAD_TREE, 0, 257)),
        ([5, 5], [0, 9, 18], {"max_tree_tokens": 8}, (oracle.BAD_TREE, 0, 9)),
        ([5, 5], [1, 2, 3], {}, (oracle.BAD_TOKENS, 0, 1)),
        ([5, 5], [0, 2, 5], {"max_tokens": 4}, (oracle.BAD_TOKENS, 1, 5)),
        ([5, 5], [0, 1, 2], {"req_pool_indices": [0, 3], "pool_rows": 3, "pool_width": 9},
         (oracle.BAD_POOL_ROW, 1, 3)),
        ([5, 10], [0, 1, 2], {"req_pool_indices": [0, 2], "pool_rows": 3, "pool_width": 9},
         (oracle.BAD_POOL_WIDTH, 1, 10)),
        ([5, 4], [0, 1, 2], {"kv_capacity": 8}, (oracle.BAD_CAPACITY, 1, 4)),
        # the first request comes first, and of its faults the lowest code
        ([9, -1], [0, 1, 300], {"kv_capacity": 8}, (oracle.BAD_CAPACITY, 0, 9)),
        ([5, -1], [0, 1, 300], {}, (oracle.BAD_LENGTH, 1, -1)),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_and_nothing_is_planned(
    lens: list[int], bounds: list[int], more: dict[str, Any], status: tuple[int, int, int]
) -> None:
    plan = verify_plan(np.array(lens), np.array(bounds), heads=8, num_ctas=4, max_work=9, **more)
    code, request, value = status
    low, high = value & 0xFFFFFFFF, value >> 32
    assert plan.status.tolist() == [code, request, low - (low >> 31 << 32), high]
    assert entries(plan) == []
    assert not plan.kv_indptr.any()
    assert (plan.cta_work[:, 0] >= plan.cta_work[:, 1]).all()
    assert not plan.combine_indptr.any()


def test_slots_are_gathered_by_request() -> None:
    table = np.array([[0, 0, 0], [7, 8, 9], [-1, -1, -1], [4, 5, 6]])
    listed = kv_list(np.array([0, 2, 2, 5]), np.array([3, 0, 1]), table)
    assert listed.tolist() == [4, 5, 7, 8, 9]
    # a request without a prefix, as in an empty plan: its row may be anything
    listed = kv_list(np.array([0, 0, 1]), np.array([2**31 - 1, 1]), table)
    assert listed.tolist() == [7]


def broken(plan: Plan, name: str, change: Any) -> Plan:
    array = getattr(plan, name).copy()
    change(array)
    return replace(plan, **{name: array})


def assign(at: Any, value: Any) -> Any:
    return lambda array: array.__setitem__(at, value)


@pytest.mark.parametrize(
    ("name", "change", "said"),
    [
        ("work", assign((1, 2), 960), "is cut into"),
        ("work", assign((0, 3), 976), "is cut into"),
        ("work", assign((3, 3), 3999), "is cut into"),
        ("work", assign((slice(0, 2), slice(2, 4)), [[0, 984], [984, 2000]]), "multiples of 16"),
        ("work", assign((0, 5), 3), "says something else"),
        ("work", assign((0, 0), 2), "there is no row tile 0 of request 2"),
        ("work", assign((0, 1), 1), "there is no row tile 1 of request 0"),
        ("work", assign((4, 4), 0), "has slot 0"),
        ("work", assign(4, -1), "row tile 0 of request 1 is not planned"),
        ("work", assign((6, 5), 0), "not all -1"),
        ("work", assign((0, 4), 1), "partial slot 1 is given twice"),
        ("work", assign((slice(0, 2), 4), [1, 0]), "has slots [1, 0, 2, 3]"),
        ("work", assign((3, 4), 99), "partial slots go from 0 to 99"),
        ("combine_tiles", assign((0, 1), 1), "are combined"),
        ("combine_tiles", assign((0, 0), -1), "are combined"),
        ("combine_tiles", assign((2, 1), 0), "behind the last that is combined"),
        ("combine_tiles", assign((0, 2), 1), "combines 8 tokens from 1 on"),
        ("combine_tiles", assign((0, 3), 7), "combines 7 tokens from 0 on"),
        ("combine_indptr", assign(1, 3), "combines 0 to 3"),
        ("cta_work", assign((0, 1), 0), "entry 0 is run 0 times"),
        ("cta_work", assign((1, 0), 0), "entry 0 is run 2 times"),
        ("cta_work", assign((-1, 1), 6), "entry 5 is run, there are 5"),
        ("cta_work", assign((0, 2), 0), "the step of block 0 is 0"),
        ("cta_work", assign((slice(1, 4), 2), 2), "the step of block 1 is 2, of its team's 1"),
    ],
)
def test_the_judge_sees_every_fault(name: str, change: Any, said: str) -> None:
    lens, trees = [4000, 20], [8, 2]
    plan = plan_of(lens, trees, num_ctas=4, max_work=8)
    assert wrong(plan, lens, trees) == []
    assert len(entries(plan)) == 5
    found = wrong(broken(plan, name, change), lens, trees)
    assert any(said in fault for fault in found), found
