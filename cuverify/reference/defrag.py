"""Oracle of a compaction: which rows move where, and what the tables hold afterwards."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray


@dataclass(frozen=True, eq=False)
class Compaction:
    """What a compaction does.

    Attributes
    ----------
    src, dst : ndarray of int64
        The moves, the highest row first.
    status : ndarray of int32, shape (4,)
        Code, first entry at fault, rows listed, live slots.
    req_to_token : ndarray of int32
    held : ndarray of int64
        The holders afterwards.
    """

    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    status: NDArray[np.int32]
    req_to_token: NDArray[np.int32]
    held: NDArray[np.int64]


def compact(
    req_to_token: NDArray[np.int32],
    req_pool_indices: NDArray[Any],
    held_lens: NDArray[Any],
    held: NDArray[np.int64],
    held_count: int,
    num_slots: int,
    budget: int,
) -> Compaction:
    """Compact the slots of some requests and of a list.

    Parameters
    ----------
    req_to_token : ndarray of int32, shape (rows, width)
    req_pool_indices, held_lens : ndarray of int, shape (B,)
        Row of each request, 0 where there is none, and how many slots it holds.
    held : ndarray of int64
        Further live slots, of which the first `held_count` count.
    held_count : int
    num_slots : int
    budget : int
        Most rows to move.

    Returns
    -------
    Compaction
    """
    places: list[tuple[int, Any]] = []
    wrong = -1
    live: set[int] = set()
    for b, (row, length) in enumerate(zip(req_pool_indices, held_lens, strict=True)):
        if row == 0:
            continue
        slots: Any = np.zeros(0, np.int64)
        fits = 0 <= row < len(req_to_token) and 0 <= length <= req_to_token.shape[1]
        if fits:
            slots = req_to_token[row, :length]
            places.append((b, (row, slice(0, int(length)))))
        bad = (slots < 0) | (slots >= num_slots)
        if wrong < 0 and (not fits or bad.any()):
            wrong = b
        live.update(slots[~bad].tolist())
    listed = held[: max(0, held_count)] if held_count <= len(held) else held[:0]
    bad = (listed < 0) | (listed >= num_slots)
    if wrong < 0 and (not 0 <= held_count <= len(held) or bad.any()):
        wrong = len(held_lens)
    live.update(listed[~bad].tolist())
    live.discard(0)

    table, kept = req_to_token.copy(), held.copy()
    if wrong >= 0:
        none = np.zeros(0, np.int64)
        status = np.array([1, wrong, 0, len(live)], np.int32)
        return Compaction(none, none, status, table, kept)
    rows = sorted((slot for slot in live if slot > len(live)), reverse=True)[:budget]
    holes = sorted(set(range(1, len(live) + 1)) - live)[: len(rows)]
    goes = np.arange(num_slots)
    goes[rows] = holes
    for _, place in places:
        table[place] = goes[req_to_token[place]]
    kept[:held_count] = goes[held[:held_count]]
    status = np.array([0, -1, len(rows), len(live)], np.int32)
    return Compaction(np.array(rows, np.int64), np.array(holes, np.int64), status, table, kept)
