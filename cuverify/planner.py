"""Plans that move live KV rows: compaction, and requests made contiguous, within a budget.

A plan is a list of moves of live slots to slots that are free, or become free in the same list. It
says nothing of who holds a slot; `cuverify.holders` does.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cuverify.errors import ArgumentError

Slots = NDArray[np.int64]


@dataclass(frozen=True, eq=False)
class MovePlan:
    """A list of moves: what lies in ``src[i]`` goes to ``dst[i]``, all sources read first.

    Attributes
    ----------
    src, dst : ndarray of int64
        All sources differ, and so do all destinations.
    gain : int
        What the plan is for, and how much of it: slots by which the pool's end comes down
        (`plan_compact`), or pairs of neighbouring tokens that come to lie side by side
        (`plan_contiguous`).
    complete : bool
        Whether nothing is left to do afterwards.
    """

    src: Slots
    dst: Slots
    gain: int
    complete: bool

    def __len__(self) -> int:
        return len(self.src)

    @property
    def overlaps(self) -> bool:
        """Whether a row writes a slot that another one reads."""
        return bool(np.isin(self.src, self.dst).any())

    def permutation(self, num_slots: int) -> Slots:
        """Return where every slot of the pool goes, as a permutation of all slots.

        Slots that are filled without being emptied change places with those that are emptied
        without being filled, in ascending order: what was free stays free, under another number.
        """
        where = np.arange(num_slots)
        where[self.src] = self.dst
        where[np.setdiff1d(self.dst, self.src)] = np.setdiff1d(self.src, self.dst)
        return where


def plan_compact(
    live: ArrayLike, *, budget: int | None = None, pinned: ArrayLike = (), first: int = 1
) -> MovePlan:
    """Plan to move live rows from the highest slots into the lowest holes.

    Sources are live and destinations are not, so that the list is disjoint. Several calls with a
    budget reach the same end as one without.

    Parameters
    ----------
    live : array_like of bool, shape (num_slots,)
        Which slots hold a live row.
    budget : int, optional
        Most rows to move.
    pinned : array_like of int
        Slots that must stay as they are, live or not. Holes below them are filled all the same.
    first : int
        The lowest slot that may be used; those below belong to padding.

    Returns
    -------
    MovePlan
        The highest row first.
    """
    alive = _flags(live)
    most = _budget(budget)
    may = _usable(len(alive), pinned, first)
    holes = np.flatnonzero(~alive & may)
    rows = np.flatnonzero(alive & may)[::-1]
    pairs = min(len(rows), len(holes))
    # sources fall and destinations rise: once they meet nothing is left to gain
    wanted = int(np.count_nonzero(rows[:pairs] > holes[:pairs]))
    taken = min(wanted, most)
    src, dst = rows[:taken].copy(), holes[:taken].copy()
    before = _end(alive)
    alive[src], alive[dst] = False, True
    return MovePlan(src, dst, before - _end(alive), taken == wanted)


def plan_contiguous(
    chains: Sequence[ArrayLike],
    num_slots: int,
    *,
    budget: int | None = None,
    pinned: ArrayLike = (),
    first: int = 1,
) -> MovePlan:
    """Plan to lay each chain of slots out in order, chain behind chain from the lowest slot on.

    What is to go where depends on the chains and their order alone, so that calls with a budget
    come to the same end. The moves fall apart into cycles and open ends; those that bring most
    neighbours together a row come first. One that exceeds what is left of the budget is begun at
    its free end, or, where it is a cycle, broken open by a row that steps aside.

    Parameters
    ----------
    chains : sequence of array_like of int
        Slots in token order: a request's own, or those of a shared prefix. No slot twice.
    num_slots : int
        Slots of the pool.
    budget : int, optional
        Most rows to move.
    pinned : array_like of int
        Slots that must stay, live or not. Targets skip them.
    first : int
        The lowest slot that may be used.

    Returns
    -------
    MovePlan
        May overlap. Empty and complete where all chains lie as they should.
    """
    most = _budget(budget)
    may = _usable(num_slots, pinned, first)
    parts = [np.asarray(chain, np.int64) for chain in chains]
    slots = np.concatenate([np.zeros(0, np.int64), *parts])
    if len(np.unique(slots)) != len(slots) or (
        len(slots) and not first <= slots.min() <= slots.max() < num_slots
    ):
        raise ArgumentError(
            "chains", len(parts), f"want each slot of [{first}, {num_slots}) once at most"
        )
    moving = may[slots]
    target = slots.copy()
    target[moving] = np.flatnonzero(may)[: int(moving.sum())]

    into = np.full(num_slots, -1, np.int64)  # where a slot's row is to go
    into[slots] = target
    live = np.zeros(num_slots, bool)
    live[slots] = True
    components = _components(into, live)
    if not components:
        none = np.zeros(0, np.int64)
        return MovePlan(none, none, 0, True)
    gains = _gains(parts, into, components, num_slots)
    order = sorted(range(len(components)), key=lambda at: (-gains[at] / len(components[at][0]), at))
    src: list[int] = []
    moved = 0
    for at in order:
        path, _ = components[at]
        if len(path) <= most - moved:
            src += path
            moved += len(path)
    complete = moved == sum(len(path) for path, _ in components)
    dst = into[np.array(src, np.int64)].tolist() if src else []
    if not complete and moved < most:
        # something is left of the budget, and all that is left to do exceeds it
        done = set(src)
        path, is_cycle = next(c for c in (components[at] for at in order) if c[0][0] not in done)
        rest = path[len(path) - (most - moved) :]
        left = live.copy()  # as the pool is behind the moves that are planned
        left[src], left[dst] = False, True
        end = _free_slot(left, into, may) if is_cycle else int(into[rest[-1]])
        if end is not None:
            # the last row goes out of the way, and those in front of it follow
            src += rest
            dst += [*rest[1:], end]
    sources, targets = np.array(src, np.int64), np.array(dst, np.int64)
    where = np.arange(num_slots)
    where[sources] = targets
    gain = sum(_adjacent(where[part]) - _adjacent(part) for part in parts)
    return MovePlan(sources, targets, gain, complete)


def _components(into: Slots, live: NDArray[np.bool_]) -> list[tuple[list[int], bool]]:
    """Return paths of rows that move, each row to the next one's slot, and whether they close.

    The last row of an open path goes to a free slot.
    """
    moving = live & (into != np.arange(len(into)))
    came_from = np.full(len(into), -1, np.int64)
    sources = np.flatnonzero(moving)
    came_from[into[sources]] = sources
    seen = np.zeros(len(into), bool)
    next_of, back_of, is_moving = into.tolist(), came_from.tolist(), moving.tolist()
    found = []
    ends = [slot for slot in sources.tolist() if not is_moving[next_of[slot]]]
    for end in ends:
        path = [end]
        while back_of[path[-1]] >= 0:
            path.append(back_of[path[-1]])
        seen[path] = True
        found.append((path[::-1], False))
    for start in sources.tolist():
        if not seen[start]:
            path = [start]
            while next_of[path[-1]] != start:
                path.append(next_of[path[-1]])
            seen[path] = True
            found.append((path, True))
    return found


def _gains(
    parts: Sequence[Slots],
    into: Slots,
    components: Sequence[tuple[list[int], bool]],
    num_slots: int,
) -> list[int]:
    """Return how many pairs of neighbours each component brings together when it moves alone."""
    of = np.full(num_slots, len(components), np.int64)  # the last one: rows that stay
    for number, (path, _) in enumerate(components):
        of[path] = number
    gain = np.zeros(len(components) + 1, np.int64)
    for part in parts:
        left, right = part[:-1], part[1:]
        now = right - left == 1
        for mine, other, sign in ((left, right, 1), (right, left, -1)):
            together = of[mine] == of[other]
            there = np.where(together, into[other], other)
            after = sign * (there - into[mine]) == 1
            change = after.astype(np.int64) - now
            if sign < 0:
                change[together] = 0  # such a pair has been counted
            np.add.at(gain, of[mine], change)
    return [int(value) for value in gain[:-1]]


def _free_slot(live: NDArray[np.bool_], into: Slots, may: NDArray[np.bool_]) -> int | None:
    """Return the highest free slot that nobody is to move into, or else the highest free one."""
    free = ~live & may
    unwanted = free.copy()
    unwanted[into[into >= 0]] = False
    for flags in (unwanted, free):
        if flags.any():
            return int(np.flatnonzero(flags)[-1])
    return None


def _adjacent(slots: Slots) -> int:
    return int(np.count_nonzero(np.diff(slots) == 1))


def _flags(live: ArrayLike) -> NDArray[np.bool_]:
    flags = np.array(live)
    if flags.ndim != 1 or flags.dtype != np.bool_:
        raise ArgumentError("live", list(flags.shape), "wants one flag a slot")
    return flags


def _usable(num_slots: int, pinned: ArrayLike, first: int) -> NDArray[np.bool_]:
    """Return which slots may be moved or filled."""
    if first < 0:
        raise ArgumentError("first", first, "must be at least 0")
    stay = np.asarray(pinned, np.int64)
    wrong = stay[(stay < 0) | (stay >= num_slots)]
    if len(wrong):
        raise ArgumentError("pinned", int(wrong[0]), f"is none of {num_slots} slots")
    may = np.ones(num_slots, bool)
    may[:first] = False
    may[stay] = False
    return may


def _budget(budget: int | None) -> int:
    if budget is None:
        return int(np.iinfo(np.int64).max)
    if budget < 0:
        raise ArgumentError("budget", budget, "must be at least 0")
    return budget


def _end(alive: NDArray[np.bool_]) -> int:
    return int(np.flatnonzero(alive)[-1]) + 1 if alive.any() else 0
