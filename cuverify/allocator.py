"""KV allocators as SGLang's behave, in numpy: token and paged, with and without ``need_sort``.

What an allocator hands out decides how contiguous a request's slots are. These models make the same
choices as SGLang's, slot by slot, so that contiguity can be measured without a server.

Slot 0, or page 0, is the dummy and is never handed out.
"""

from __future__ import annotations

import abc
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cuverify.errors import ArgumentError

Slots = NDArray[np.int64]

_NONE: Slots = np.zeros(0, np.int64)


class _Allocator(abc.ABC):
    """What both kinds have in common: free pages, released pages, groups, and saved states."""

    def __init__(self, pages: int, page_size: int, need_sort: bool) -> None:
        if pages < 1:
            raise ArgumentError("size", pages * page_size, "a pool has at least one page")
        self.pages = pages
        self.page_size = page_size
        self.need_sort = need_sort
        self.clear()

    def clear(self) -> None:
        """Free everything, in ascending order."""
        self.free_pages: Slots = np.arange(1, self.pages + 1, dtype=np.int64)
        self.release_pages: Slots = _NONE
        self.free_group: list[Slots] | None = None

    def available_size(self) -> int:
        """Return how many slots are free, released ones included and open groups not."""
        return (len(self.free_pages) + len(self.release_pages)) * self.page_size

    def backup_state(self) -> tuple[Slots, Slots]:
        """Return what is free now, for `restore_state`."""
        return self.free_pages.copy(), self.release_pages.copy()

    def restore_state(self, state: tuple[Slots, Slots]) -> None:
        """Free exactly what was free when the state was saved."""
        self.free_pages, self.release_pages = (pages.copy() for pages in state)

    def free_group_begin(self) -> None:
        """Collect what is freed from now on, and free it together at the end of the group."""
        if self.free_group is not None:
            raise ArgumentError("free_group", len(self.free_group), "a group is open: no nesting")
        self.free_group = []

    def free_group_end(self) -> None:
        """Free what the group has collected."""
        if self.free_group is None:
            raise ArgumentError("free_group", None, "no group is open")
        group, self.free_group = self.free_group, None
        if group:
            self.free(np.concatenate(group))

    def merge_and_sort_free(self) -> None:
        """Sort everything that is free."""
        self.free_pages = np.sort(np.concatenate([self.free_pages, self.release_pages]))
        self.release_pages = _NONE

    @abc.abstractmethod
    def free(self, slots: ArrayLike) -> None:
        """Give slots back."""

    def _make_room(self, pages: int) -> bool:
        """Return whether so many pages are ready, after a sort where that helps."""
        if pages < 0:
            raise ArgumentError("need_size", pages * self.page_size, "must be at least 0")
        if self.need_sort and pages > len(self.free_pages):
            self.merge_and_sort_free()
        return pages <= len(self.free_pages)

    def _take(self, pages: int) -> Slots:
        taken: Slots = self.free_pages[:pages].copy()
        self.free_pages = self.free_pages[pages:]
        return taken


class TokenAllocator(_Allocator):
    """Pages of one slot.

    Parameters
    ----------
    size : int
        Slots, without the dummy: 1 to `size`.
    need_sort : bool
        Whether released slots wait until the rest runs out, and all are sorted then. Otherwise they
        go to the tail at once.

    Attributes
    ----------
    free_pages, release_pages : ndarray of int64
        What is handed out next, from the front, and what waits for a sort.
    free_group : list of ndarray, or None
        What an open group has collected.
    """

    def __init__(self, size: int, *, need_sort: bool = False) -> None:
        super().__init__(size, 1, need_sort)

    def alloc(self, need_size: int) -> Slots | None:
        """Return slots, or None where there are too few."""
        return self._take(need_size) if self._make_room(need_size) else None

    def free(self, slots: ArrayLike) -> None:
        """Give slots back, in this order."""
        given = np.array(slots, np.int64)
        if not given.size:
            return
        if self.free_group is not None:
            self.free_group.append(given)
        elif self.need_sort:
            self.release_pages = np.concatenate([self.release_pages, given])
        else:
            self.free_pages = np.concatenate([self.free_pages, given])


class PagedAllocator(_Allocator):
    """Pages of several slots; a request extends its last page before it takes another.

    Parameters
    ----------
    size : int
        Slots, without the dummy page; whole pages.
    page_size : int
        Slots of a page.
    need_sort : bool
        Whether released pages wait, as in `TokenAllocator`. Otherwise they go to the front at once.
    """

    def __init__(self, size: int, page_size: int, *, need_sort: bool = False) -> None:
        if page_size < 1 or size % page_size:
            raise ArgumentError("size", size, f"wants whole pages of {page_size} slots")
        super().__init__(size // page_size, page_size, need_sort)

    def alloc(self, need_size: int) -> Slots | None:
        """Return the slots of whole pages, or None where there are too few."""
        if need_size % self.page_size:
            raise ArgumentError("need_size", need_size, f"wants whole pages of {self.page_size}")
        pages = need_size // self.page_size
        if not self._make_room(pages):
            return None
        starts = self._take(pages)[:, None] * self.page_size
        slots: Slots = (starts + np.arange(self.page_size)).reshape(-1)
        return slots

    def alloc_extend(
        self, prefix_lens: ArrayLike, seq_lens: ArrayLike, last_loc: ArrayLike
    ) -> Slots | None:
        """Return slots for the tokens from `prefix_lens` to `seq_lens` of each request.

        Parameters
        ----------
        prefix_lens, seq_lens : array_like of int, shape (B,)
            Tokens before and after.
        last_loc : array_like of int, shape (B,)
            Slot of each request's last token; anything where it has none.

        Returns
        -------
        ndarray of int64, or None
            Request by request; None where there are too few pages, and then nothing is taken.
        """
        before, after, last = (np.asarray(x, np.int64) for x in (prefix_lens, seq_lens, last_loc))
        size = self.page_size
        if (before < 0).any():
            raise ArgumentError("prefix_lens", before.tolist(), "must be at least 0")
        if (after < before).any():
            raise ArgumentError("seq_lens", after.tolist(), f"must not be below {before.tolist()}")
        # as SGLang bounds the pages of an extension when it decides whether to sort
        bound = int((after - before).sum()) // size + len(before) + 1
        if self.need_sort and bound > len(self.free_pages):
            self.merge_and_sort_free()
        fresh = -(-after // size) - -(-before // size)
        if int(fresh.sum()) > len(self.free_pages):
            return None
        parts = []
        for start, end, place, pages in zip(before, after, last, fresh, strict=True):
            own = int(min(end, -(-start // size) * size) - start)
            parts.append(place + 1 + np.arange(own))
            new = (self._take(int(pages))[:, None] * size + np.arange(size)).reshape(-1)
            parts.append(new[: int(end - start) - own])
        return np.concatenate([_NONE, *parts])

    def alloc_decode(self, seq_lens: ArrayLike, last_loc: ArrayLike) -> Slots | None:
        """Return one slot a request for the last token of `seq_lens`, or None."""
        after, last = np.asarray(seq_lens, np.int64), np.asarray(last_loc, np.int64)
        if self.need_sort and len(after) > len(self.free_pages):
            self.merge_and_sort_free()
        fresh = (after - 1) % self.page_size == 0
        if int(fresh.sum()) > len(self.free_pages):
            return None
        slots: Slots = last + 1
        slots[fresh] = self._take(int(fresh.sum())) * self.page_size
        return slots

    def free(self, slots: ArrayLike) -> None:
        """Give back the pages that these slots lie in."""
        given = np.array(slots, np.int64)
        if not given.size:
            return
        if self.free_group is not None:
            self.free_group.append(given)
            return
        pages = np.unique(given // self.page_size)
        if self.need_sort:
            self.release_pages = np.concatenate([pages, self.release_pages])
        else:
            self.free_pages = np.concatenate([pages, self.free_pages])


class SortsFreePages(Protocol):
    """What the switch needs of an allocator: SGLang's have it, and so have the models."""

    need_sort: bool

    def merge_and_sort_free(self) -> None:
        """Sort everything that is free."""


@dataclass
class SortedFreeList:
    """The switch that keeps a free list sorted (Tier 0), for a model or for SGLang's own allocator.

    ``need_sort`` alone sorts only when the head of the list runs out. `between_steps` sorts before
    that, so that the lowest free slots are handed out first.

    Parameters
    ----------
    allocator : SortsFreePages
        Changed in place: `need_sort` is on from now on.
    every : int
        Sort at each so many calls of `between_steps`; 0 leaves it to the allocator.

    Raises
    ------
    ArgumentError
        The allocator cannot sort, or `every` is negative.
    """

    allocator: Any
    every: int = 1
    steps: int = 0

    def __post_init__(self) -> None:
        for name in ("need_sort", "merge_and_sort_free"):
            if not hasattr(self.allocator, name):
                raise ArgumentError("allocator", type(self.allocator).__name__, f"has no {name}")
        if self.every < 0:
            raise ArgumentError("every", self.every, "must be at least 0")
        self._before = self.allocator.need_sort
        self.allocator.need_sort = True

    def between_steps(self) -> None:
        """Sort if it is time to. No step may be in flight that allocates."""
        self.steps += 1
        if self.every and self.steps % self.every == 0:
            self.allocator.merge_and_sort_free()

    def switch_off(self) -> None:
        """Put `need_sort` back to what it was; what waits for a sort is merged first."""
        self.allocator.merge_and_sort_free()
        self.allocator.need_sort = self._before


def held_slots(allocator: _Allocator, extra: Sequence[Slots] = ()) -> Slots:
    """Return all slots that an allocator holds as free, in an open group too, ascending.

    Parameters
    ----------
    allocator : TokenAllocator or PagedAllocator
    extra : sequence of ndarray
        Further lists of slots, such as those of a saved state.
    """
    pages = np.concatenate([allocator.free_pages, allocator.release_pages])
    slots = (pages[:, None] * allocator.page_size + np.arange(allocator.page_size)).reshape(-1)
    return np.unique(np.concatenate([slots, *(allocator.free_group or []), *extra]))
