"""Plans: what they move, that budgets reach the same end, and that nothing live is lost."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cuverify.errors import ArgumentError
from cuverify.planner import MovePlan, plan_compact, plan_contiguous
from cuverify.strategies import examples, slot_chains
from cuverify.workload import ChurnedPool

budgets = st.none() | st.integers(1, 12)


def carried_out(plan: MovePlan, content: Any) -> Any:
    """Return the pool after a plan, which must be a list of moves as the kernels take it."""
    assert len(np.unique(plan.src)) == len(plan.src)
    assert len(np.unique(plan.dst)) == len(plan.dst)
    assert not (plan.src == plan.dst).any()
    after = content.copy()
    after[plan.dst] = content[plan.src]
    return after


def test_compaction_written_out() -> None:
    live = np.array([0, 1, 0, 0, 1, 0, 1, 1], bool)
    plan = plan_compact(live)
    assert (plan.src.tolist(), plan.dst.tolist()) == ([7, 6], [2, 3])
    assert (plan.gain, plan.complete, plan.overlaps) == (3, True, False)
    one = plan_compact(live, budget=1)
    assert (one.src.tolist(), one.dst.tolist(), one.gain, one.complete) == ([7], [2], 1, False)
    pinned = plan_compact(live, pinned=[7])
    assert (pinned.src.tolist(), pinned.dst.tolist(), pinned.gain) == ([6, 4], [2, 3], 0)
    # a free slot can be pinned too: somebody still reads what was there
    assert plan_compact(live, pinned=[2]).dst.tolist() == [3, 5]
    assert len(plan_compact(np.zeros(5, bool))) == 0


def test_contiguity_written_out() -> None:
    plan = plan_contiguous([[4, 2], [1]], 6)
    assert (plan.src.tolist(), plan.dst.tolist()) == ([4, 1], [1, 3])
    assert (plan.gain, plan.complete) == (1, True)
    swap = plan_contiguous([[2, 1]], 3)
    assert (sorted(swap.src.tolist()), swap.gain, swap.overlaps) == ([1, 2], 1, True)
    no_room = plan_contiguous([[2, 1]], 3, budget=1)
    assert (len(no_room), no_room.complete) == (0, False)  # a cycle, and no free slot
    aside = plan_contiguous([[2, 1]], 4, budget=1)
    assert (aside.dst.tolist(), aside.complete) == ([3], False)


def test_a_plan_brings_most_neighbours_together_first() -> None:
    # chain a needs one row to lie in order, chain b two swaps of four
    chains = [[1, 2, 9], [5, 4, 7, 6]]
    plan = plan_contiguous(chains, 12, budget=1)
    assert (plan.src.tolist(), plan.dst.tolist(), plan.gain) == ([9], [3], 1)


@examples(150)
@given(pool=slot_chains(), budget=budgets)
def test_compaction_in_budgets_reaches_the_same_end(pool: Any, budget: int | None) -> None:
    slots, chains, pinned = pool
    live = np.zeros(slots, bool)
    live[np.concatenate(chains)] = True
    content = np.where(live, np.arange(slots), -1)
    whole = plan_compact(live, pinned=pinned)
    expected = carried_out(whole, content)
    expected[whole.src] = -1
    calls = 0
    while True:
        plan = plan_compact(live, budget=budget, pinned=pinned)
        assert not plan.overlaps and not np.isin([plan.src, plan.dst], pinned).any()
        assert budget is None or len(plan) <= budget
        assert not live[plan.dst].any() and live[plan.src].all()
        content = carried_out(plan, content)
        content[plan.src] = -1
        live[plan.src], live[plan.dst] = False, True
        calls += 1
        if plan.complete:
            break
    assert calls == max(1, -(-len(whole) // (budget or slots)))
    np.testing.assert_array_equal(content, expected)
    if not len(pinned):
        assert live[1 : 1 + live.sum()].all()


@examples(150)
@given(pool=slot_chains(), budget=budgets)
# a cycle was broken open into the only free slot, which another move of the plan had taken
@example(
    pool=(14, [np.array([2, 3, 1, 7, 6, 8, 5, 11, 4, 12, 10, 13])], np.zeros(0, np.int64)),
    budget=2,
)
def test_contiguity_in_budgets_reaches_the_same_end(pool: Any, budget: int | None) -> None:
    slots, chains, pinned = pool
    names = [chain.copy() for chain in chains]
    content = np.full(slots, -1)
    content[np.concatenate(chains)] = np.concatenate(chains)
    whole = plan_contiguous(chains, slots, pinned=pinned)
    where = whole.permutation(slots)
    assert whole.complete and sorted(where.tolist()) == list(range(slots))
    expected = [where[chain] for chain in chains]
    free_slots = (
        slots - 1 - len(np.concatenate(chains)) - len(np.setdiff1d(pinned, np.concatenate(chains)))
    )
    for _ in range(4 * slots):
        plan = plan_contiguous(chains, slots, budget=budget, pinned=pinned)
        assert budget is None or len(plan) <= budget
        assert not np.isin([plan.src, plan.dst], pinned).any()
        live = np.zeros(slots, bool)
        live[np.concatenate(chains)] = True
        assert not live[np.setdiff1d(plan.dst, plan.src)].any()  # nobody is overwritten
        runs = sum(int((np.diff(chain) == 1).sum()) for chain in chains)
        content = carried_out(plan, content)
        chains = [plan.permutation(slots)[chain] for chain in chains]
        assert sum(int((np.diff(chain) == 1).sum()) for chain in chains) - runs == plan.gain
        for chain, name in zip(chains, names, strict=True):
            np.testing.assert_array_equal(content[chain], name)
        if plan.complete or not len(plan):
            break
    assert plan.complete or not free_slots
    if plan.complete:
        for chain, right in zip(chains, expected, strict=True):
            np.testing.assert_array_equal(chain, right)
        if not len(pinned):
            assert np.concatenate(chains).tolist() == list(
                range(1, 1 + len(np.concatenate(chains)))
            )


def test_the_churned_pool_compacts_as_planned() -> None:
    pool = ChurnedPool(2000, tree_tokens=8, seed=3)
    pool.churn(2.0)
    live = np.zeros(2000, bool)
    live[pool.live_slots()] = True
    plan = plan_compact(live)
    batch = pool.compact()
    assert plan.src.tolist() == batch.src.tolist()
    assert plan.dst.tolist() == batch.dst.tolist()


def test_misuse_is_named() -> None:
    for wrong, message in (
        (lambda: plan_compact(np.zeros(4)), "live"),
        (lambda: plan_compact(np.zeros(4, bool), budget=-1), "budget=-1"),
        (lambda: plan_contiguous([[1, 1]], 4), "each slot of .1, 4. once"),
        (lambda: plan_contiguous([[0]], 4), "each slot"),
        (lambda: plan_contiguous([[4]], 4), "each slot"),
        (lambda: plan_compact([True], pinned=[1]), "pinned=1: is none of 1 slots"),
        (lambda: plan_compact([True] * 9, pinned=[3, -1]), "pinned=-1"),
        (lambda: plan_compact([True], first=-1), "first=-1"),
        (lambda: plan_contiguous([[1]], 4, pinned=[-3]), "pinned=-3: is none of 4 slots"),
        (lambda: plan_contiguous([[1]], 4, first=-1), "first=-1"),
    ):
        with pytest.raises(ArgumentError, match=message):
            wrong()
