"""The allocator models: SGLang's rules, one by one, and the switch that keeps a list sorted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cuverify.allocator import PagedAllocator, SortedFreeList, TokenAllocator, held_slots
from cuverify.errors import ArgumentError
from cuverify.strategies import examples
from cuverify.workload import FreeList


def test_released_slots_go_to_the_tail() -> None:
    pool = TokenAllocator(6)
    assert pool.alloc(4).tolist() == [1, 2, 3, 4]
    pool.free([3, 1])
    assert pool.free_pages.tolist() == [5, 6, 3, 1]
    assert pool.alloc(3).tolist() == [5, 6, 3]
    assert (pool.alloc(2), pool.available_size()) == (None, 1)


def test_released_slots_wait_for_the_head_to_run_out() -> None:
    pool = TokenAllocator(6, need_sort=True)
    pool.alloc(5)
    pool.free([4, 1])
    assert (pool.free_pages.tolist(), pool.release_pages.tolist()) == ([6], [4, 1])
    assert pool.alloc(1).tolist() == [6]
    assert pool.available_size() == 2
    pool.free([2])
    assert pool.alloc(2).tolist() == [1, 2]
    assert (pool.free_pages.tolist(), pool.release_pages.tolist()) == ([4], [])


def test_need_sort_does_not_keep_the_list_sorted() -> None:
    pool = TokenAllocator(8, need_sort=True)
    pool.alloc(4)
    pool.free([1, 2])
    assert pool.alloc(2).tolist() == [5, 6]  # 1 and 2 are free, and lower
    kept = SortedFreeList(pool)
    kept.between_steps()
    assert pool.alloc(2).tolist() == [1, 2]


def test_groups_are_freed_together() -> None:
    for pool in (TokenAllocator(8), PagedAllocator(8, 2)):
        taken = pool.alloc(6)
        pool.free_group_begin()
        pool.free(taken[:2])
        pool.free(taken[4:])
        assert pool.available_size() == 2
        assert held_slots(pool).tolist() == sorted([*taken[:2], *taken[4:], *held_slots(pool)[-2:]])
        with pytest.raises(ArgumentError, match="no nesting"):
            pool.free_group_begin()
        pool.free_group_end()
        assert pool.available_size() == 6
        with pytest.raises(ArgumentError, match="no group is open"):
            pool.free_group_end()


def test_states_are_restored() -> None:
    pool = TokenAllocator(8, need_sort=True)
    pool.alloc(3)
    pool.free([2])
    state = pool.backup_state()
    pool.alloc(4)
    pool.free([1])
    pool.restore_state(state)
    assert (pool.free_pages.tolist(), pool.release_pages.tolist()) == ([4, 5, 6, 7, 8], [2])
    pool.clear()
    assert pool.available_size() == 8


def test_pages_extend_the_last_one_first() -> None:
    # SGLang's own vector: prefix 2, seq 11, last slot 1, pages of 4
    pool = PagedAllocator(16, 4)
    assert pool.alloc_extend([2], [11], [1]).tolist() == list(range(2, 11))
    assert pool.free_pages.tolist() == [3, 4]
    assert pool.alloc_decode([12, 1], [10, -1]).tolist() == [11, 12]
    assert pool.alloc_decode([13], [11]).tolist() == [16]
    assert pool.alloc_decode([17], [19]) is None
    assert pool.alloc_extend([0], [1], [-1]) is None


def test_released_pages_go_to_the_front() -> None:
    pool = PagedAllocator(16, 4)
    assert pool.alloc(8).tolist() == list(range(4, 12))
    pool.free([9, 8, 5])  # any slot of a page
    assert pool.free_pages.tolist() == [1, 2, 3, 4]
    pool.alloc(4)
    pool.free([6])
    assert pool.free_pages.tolist() == [1, 2, 3, 4]
    sorting = PagedAllocator(16, 4, need_sort=True)
    sorting.alloc(16)
    sorting.free([8])
    sorting.free([4, 13])
    assert sorting.release_pages.tolist() == [1, 3, 2]
    assert sorting.alloc(8).tolist() == list(range(4, 12))


@st.composite
def histories(draw: st.DrawFn) -> list[tuple[str, int]]:
    kinds = st.sampled_from(["take", "take", "give", "give", "sort"])
    return draw(st.lists(st.tuples(kinds, st.integers(0, 9)), max_size=40))


@examples(80)
@given(history=histories(), need_sort=st.booleans())
def test_the_churned_pool_hands_out_the_same_slots(
    history: list[tuple[str, int]], need_sort: bool
) -> None:
    model = TokenAllocator(24, need_sort=need_sort)
    other = FreeList(25, "sorted" if need_sort else "fifo")
    out: list[Any] = []
    for kind, number in history:
        if kind == "take" and number <= model.available_size():
            taken = model.alloc(number)
            assert taken is not None
            assert taken.tolist() == other.allocate(number).tolist()
            out.append(taken)
        elif kind == "give" and out:
            slots = out.pop(number % len(out))
            model.free(slots)
            other.release(slots)
        assert model.available_size() == len(other)


@examples(60)
@given(
    history=histories(), page_size=st.sampled_from([1, 4, 16]), need_sort=st.booleans(),
    every=st.integers(0, 3),
)  # fmt: skip
def test_no_slot_is_held_twice(
    history: list[tuple[str, int]], page_size: int, need_sort: bool, every: int
) -> None:
    size = 12 * page_size
    pool: Any = PagedAllocator(size, page_size, need_sort=need_sort)
    if page_size == 1:
        pool = TokenAllocator(size, need_sort=need_sort)
    switch = SortedFreeList(pool, every=every)
    out: list[Any] = []
    for kind, number in history:
        if kind == "take":
            taken = pool.alloc(number * page_size)
            assert (taken is None) == (number * page_size > size - sum(map(len, out)))
            out += [] if taken is None else [taken]
        elif kind == "give" and out:
            pool.free(out.pop(number % len(out)))
        else:
            switch.between_steps()
            assert not every or switch.steps % every or (np.diff(pool.free_pages) > 0).all()
        everything = np.concatenate([held_slots(pool), *out])
        assert sorted(everything.tolist()) == list(range(page_size, size + page_size))
    switch.switch_off()
    assert pool.need_sort == need_sort and not len(pool.release_pages)


def test_the_switch_works_on_whatever_can_sort() -> None:
    calls: list[int] = []
    real = SimpleNamespace(need_sort=False, merge_and_sort_free=lambda: calls.append(1))
    switch = SortedFreeList(real, every=2)
    for _ in range(4):
        switch.between_steps()
    assert real.need_sort and len(calls) == 2
    switch.switch_off()
    assert not real.need_sort
    with pytest.raises(ArgumentError, match="has no need_sort"):
        SortedFreeList(object())
    with pytest.raises(ArgumentError, match="every=-1"):
        SortedFreeList(real, every=-1)


def test_misuse_is_named() -> None:
    for wrong in (lambda: TokenAllocator(0), lambda: PagedAllocator(10, 4)):
        with pytest.raises(ArgumentError, match="size"):
            wrong()
    with pytest.raises(ArgumentError, match="need_size=3"):
        PagedAllocator(8, 4).alloc(3)
    for pool in (TokenAllocator(8), PagedAllocator(8, 4)):
        with pytest.raises(ArgumentError, match="need_size=-4"):
            pool.alloc(-4)
    with pytest.raises(ArgumentError, match=r"seq_lens=\[3\]: must not be below \[5\]"):
        PagedAllocator(8, 4).alloc_extend([5], [3], [7])
    with pytest.raises(ArgumentError, match=r"prefix_lens=\[-1\]: must be at least 0"):
        PagedAllocator(8, 4).alloc_extend([-1], [3], [7])
