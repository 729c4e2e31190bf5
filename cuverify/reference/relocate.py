"""Oracle of the move of KV rows: the meaning of a list, and the verdict on it, in numpy.

The kernels leave four marks at each slot, or enter slots in a hash table. Here a list is judged
through the first row at which each slot plays each of its parts, which shares no step with them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

LEGAL = 0
BAD_COUNT = 1
BAD_SOURCE = 2
BAD_DESTINATION = 3
DUPLICATE_DESTINATION = 4

_NEVER = np.iinfo(np.int64).max


def judge(
    src: NDArray[np.int64], dst: NDArray[np.int64], count: int, num_slots: int
) -> NDArray[np.int32]:
    """Judge a list of moves.

    Parameters
    ----------
    src, dst : ndarray of int64, shape (capacity,)
        Source and destination slots; what stands from `count` on is not looked at.
    count : int
        Rows of the list. Any int32.
    num_slots : int
        Slots of every pool.

    Returns
    -------
    ndarray of int32, shape (4,)
        Code, row, and the low and high word of the slot at fault: the first row that is illegal
        together with the rows in front of it, and of two faults of one row the lower code. The row
        is -1 where the list is legal, and the slot is 1 where a row writes what another one
        reads, else 0; the row is -1, and the slot is `count`, where `count` does not fit.
    """
    if not 0 <= count <= len(src):
        return _status(BAD_COUNT, -1, count)
    src, dst = src[:count], dst[:count]

    source_out = (src < 0) | (src >= num_slots)
    out = source_out | (dst < 0) | (dst >= num_slots)
    end = int(np.argmax(out)) if out.any() else count  # rows behind `end` cannot come first

    row = np.arange(end)
    s, d = src[:end], dst[:end]
    stays = s == d
    moves = ~stays
    first_destination = _first_rows(d, np.ones(end, bool))
    first_moved_into = _first_rows(d, moves)

    # A slot that stays and a slot that is moved into exclude each other, two stays do not.
    earlier = np.where(moves, first_destination(d), first_moved_into(d))
    duplicate = earlier < row
    if duplicate.any():
        at = int(np.argmax(duplicate))
        return _status(DUPLICATE_DESTINATION, at, int(d[at]))
    if end < count:
        if source_out[end]:
            return _status(BAD_SOURCE, end, int(src[end]))
        return _status(BAD_DESTINATION, end, int(dst[end]))
    overlaps = bool((moves & (first_moved_into(s) != _NEVER)).any())
    return _status(LEGAL, -1, int(overlaps))


def move(
    pools: Sequence[NDArray[Any]], src: NDArray[np.int64], dst: NDArray[np.int64], count: int
) -> None:
    """Move rows as if every source were read before any destination is written.

    Parameters
    ----------
    pools : sequence of ndarray, shape (slots, ...)
        One a layer; written in place.
    src, dst : ndarray of int64, shape (capacity,)
        A legal list; only the first `count` rows are used.
    count : int
        Rows of the list.
    """
    for pool in pools:
        pool[dst[:count]] = pool[src[:count]].copy()


def relocate(
    pools: Sequence[NDArray[Any]],
    src: NDArray[np.int64],
    dst: NDArray[np.int64],
    count: int,
    num_slots: int | None = None,
) -> NDArray[np.int32]:
    """Judge a list and, where it is legal, carry it out.

    Parameters
    ----------
    pools : sequence of ndarray, shape (slots, ...)
        One a layer; written in place where the list is legal, else untouched.
    src, dst : ndarray of int64, shape (capacity,)
        Source and destination slots.
    count : int
        Rows of the list.
    num_slots : int, optional
        Slots that the list may name; those of the pools if absent.

    Returns
    -------
    ndarray of int32, shape (4,)
        The verdict, as `judge` gives it.
    """
    slots = len(pools[0]) if num_slots is None else num_slots
    status = judge(src, dst, count, slots)
    if status[0] == LEGAL:
        move(pools, src, dst, count)
    return status


def _first_rows(slots: NDArray[np.int64], where: NDArray[np.bool_]) -> Any:
    """Return a function from slots to the first row that names them among the rows of `where`."""
    rows = np.flatnonzero(where)
    known, at = np.unique(slots[rows], return_index=True)
    first = rows[at]

    def look_up(wanted: NDArray[np.int64]) -> NDArray[np.int64]:
        if not len(known):
            return np.full(len(wanted), _NEVER)
        place = np.searchsorted(known, wanted).clip(max=len(known) - 1)
        return np.where(known[place] == wanted, first[place], _NEVER)

    return look_up


def _status(code: int, row: int, slot: int) -> NDArray[np.int32]:
    low, high = np.array([slot], np.int64).astype("<i8").view("<i4")
    return np.array([code, row, low, high], np.int32)
