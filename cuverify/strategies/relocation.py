"""Lists of moves between the slots of KV pools, legal ones and others."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import hypothesis
import numpy as np
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from numpy.typing import NDArray

from cuverify.reference.relocate import LEGAL, judge
from cuverify.strategies.draws import chosen, draw_edged, often, pair, whole
from cuverify.workload import RelocationBatch

Fault = Literal["count", "source", "destination", "duplicate"]
MoveShape = Literal["disjoint", "anything", "shift", "cycles"]

FAULTS: tuple[Fault, ...] = ("count", "source", "destination", "duplicate")
MOVE_SHAPES: tuple[MoveShape, ...] = ("disjoint", "anything", "shift", "cycles")
ROW_BYTES = (16, 20, 112, 128, 144, 656, 1152)
"""A piece, a row of scales (20), around a cache line, an fp8 row with its scales (656), a bf16
latent row (1,152)."""

# Rows that are drawn one by one and shrink one by one; the rest of a longer list comes from a seed.
_FINE_ROWS = 16


@st.composite
def relocation_batches(
    draw: st.DrawFn,
    /,
    *,
    min_slots: int = 1,
    max_slots: int = 64,
    min_rows: int = 0,
    max_rows: int | None = None,
    min_layers: int = 1,
    max_layers: int = 3,
    row_bytes: Sequence[int] = ROW_BYTES,
    max_row_gap: int = 64,
    max_tail: int = 8,
    shapes: Sequence[MoveShape] = MOVE_SHAPES,
    allow_stays: bool = True,
    allow_shared_sources: bool = True,
) -> RelocationBatch:
    """Return a strategy for legal lists of moves, with the pools they are for.

    Drawn often: the empty list, one row, all slots in the list, slot 0 and the last slot, no dead
    tail, the fewest and the most layers, no gap between rows. A dead tail holds slots in and out of
    range.

    Parameters
    ----------
    min_slots, max_slots : int
        Slots of every pool.
    min_rows, max_rows : int
        Rows of the list. At most as many as the slots allow, which is also the default maximum.
    min_layers, max_layers : int
        Number of pools.
    row_bytes : sequence of int
        Row sizes to choose from, multiples of 4.
    max_row_gap : int
        Most bytes between two rows, a multiple of 16.
    max_tail : int
        Longest dead tail.
    shapes : sequence of str
        What lists look like, to choose from: ``disjoint`` (nobody reads what another row writes),
        ``anything`` (sources and destinations drawn apart), ``shift`` (runs that move by a few
        slots, up or down), ``cycles`` (slots that change places, short and long cycles).
    allow_stays : bool
        Whether rows with ``src == dst`` occur.
    allow_shared_sources : bool
        Whether several rows may have the same source.

    Returns
    -------
    SearchStrategy of RelocationBatch
    """
    pair("slots", min_slots, max_slots, 1)
    pair("layers", min_layers, max_layers, 1)
    pair("rows", min_rows, max_slots if max_rows is None else max_rows, 0)
    chosen("shapes", shapes, MOVE_SHAPES)
    if not row_bytes or any(size <= 0 or size % 4 for size in row_bytes):
        raise InvalidArgument(f"row_bytes={row_bytes!r} must be positive multiples of 4")
    if max_row_gap < 0 or max_row_gap % 16:
        raise InvalidArgument(f"max_row_gap={max_row_gap!r} must be a multiple of 16, at least 0")
    if max_tail < 0:
        raise InvalidArgument(f"max_tail={max_tail!r} must be at least 0")
    # A slot that stays is one slot a row, a move takes two.
    needed = min_rows if allow_stays else 2 * min_rows
    if needed > max_slots:
        raise InvalidArgument(f"min_rows={min_rows!r} does not fit into max_slots={max_slots!r}")

    num_slots = draw_edged(draw, max(min_slots, needed), max_slots)
    most = num_slots if allow_stays else num_slots // 2
    rows = draw_edged(
        draw, min_rows, most if max_rows is None else max(min_rows, min(max_rows, most))
    )
    shape = draw(st.sampled_from(list(shapes))) if rows > 1 else "disjoint"
    drawn_list = (
        _disjoint(draw, rows, num_slots, allow_stays, allow_shared_sources)
        if shape == "disjoint"
        else _overlapping(draw, shape, rows, num_slots, allow_stays, allow_shared_sources)
    )
    size = draw(st.sampled_from(list(row_bytes)))
    gap = 16 * draw(often(0, max_row_gap // 16))
    batch = RelocationBatch(
        num_slots=num_slots,
        src=drawn_list[0],
        dst=drawn_list[1],
        count=rows,
        layers=draw(often(min_layers, max_layers)),
        row_bytes=size,
        row_stride=size + gap,
    )
    tail = draw(often(0, max_tail))
    # A list of length 0 has no address; a captured step always has room for a row.
    return batch.padded(max(1, rows + tail), seed=draw(st.integers(0, 3)))


@st.composite
def faulty_relocation_batches(
    draw: st.DrawFn,
    /,
    *,
    faults: Sequence[Fault] = FAULTS,
    min_faults: int = 1,
    max_faults: int = 2,
    **bounds: Any,
) -> RelocationBatch:
    """Return a strategy for lists of moves that must be refused.

    Faults are planted into a legal list. Which of several comes first, and what a planted slot
    collides with by chance, is for an oracle to say; that the list is illegal is certain.

    Parameters
    ----------
    faults : sequence of str
        Kinds to choose from: ``count`` (negative or above the capacity), ``source`` and
        ``destination`` (out of range), ``duplicate`` (two rows with one destination).
    min_faults, max_faults : int
        Number of faults planted.
    **bounds
        Bounds of `relocation_batches`. Room for two rows and three slots is taken.

    Returns
    -------
    SearchStrategy of RelocationBatch
    """
    pair("faults", min_faults, max_faults, 1)
    unknown = sorted(set(faults) - set(FAULTS))
    if unknown or not faults:
        raise InvalidArgument(f"faults={faults!r} must be chosen from {FAULTS!r}")
    bounds = {**bounds, "min_rows": max(2, bounds.get("min_rows", 0)), "allow_stays": False}
    bounds["max_slots"] = max(4, bounds.get("max_slots", 64))
    batch = draw(relocation_batches(**bounds))
    src, dst, count = batch.src.copy(), batch.dst.copy(), batch.count
    for _ in range(draw(st.integers(min_faults, max_faults))):
        row = draw(often(0, batch.count - 1))
        other = (row + draw(often(1, batch.count - 1))) % batch.count
        fault = draw(st.sampled_from(list(faults)))
        if fault == "count":
            count = draw(
                st.one_of(often(1, 2**31).map(int.__neg__), often(batch.capacity + 1, 2**31 - 1))
            )
        elif fault == "source":
            src[row] = draw(_outside(batch.num_slots))
        elif fault == "destination":
            dst[row] = draw(_outside(batch.num_slots))
        else:
            dst[row] = dst[other]
    # Several faults can undo each other: two rows that became the same row that stays.
    hypothesis.assume(judge(src, dst, count, batch.num_slots)[0] != LEGAL)
    return replace(batch, src=src, dst=dst, count=count, kind="faulty")


def _disjoint(
    draw: st.DrawFn,
    rows: int,
    num_slots: int,
    allow_stays: bool,
    allow_shared_sources: bool,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return a legal list in which nobody reads what another row writes."""
    fine = min(rows, _FINE_ROWS)
    stays = [draw(st.booleans()) for _ in range(fine)] if allow_stays else [False] * fine
    if rows + stays.count(False) + (rows - fine) > num_slots:
        # Too few slots for so many moves: the first rows move, the others stay.
        moves = num_slots - rows
        stays = [row >= moves for row in range(fine)]
        bulk_stays = np.arange(fine, rows) >= moves
    else:
        bulk_stays = np.zeros(rows - fine, bool)
    slots = _Slots(draw, num_slots)
    src, dst = [], []
    for stay in stays:
        source = slots.take()
        src.append(source)
        dst.append(source if stay else slots.take())
    more = slots.take_many(2 * (rows - fine) - int(bulk_stays.sum()))
    src_more = more[: rows - fine]
    dst_more = src_more.copy()
    dst_more[~bulk_stays] = more[rows - fine :]
    if allow_shared_sources and src and draw(st.booleans()):
        giver = draw(st.integers(0, fine - 1))
        for row in range(fine):
            if not stays[row] and draw(st.booleans()):
                src[row] = src[giver]
    staying = [row for row in range(fine) if stays[row]]
    if len(staying) > 1 and draw(st.booleans()):
        # As a padded list does: the same row that moves nothing, again and again.
        for row in staying[1:]:
            src[row] = dst[row] = src[staying[0]]
    return np.concatenate([np.array(src, np.int64), src_more]), np.concatenate(
        [np.array(dst, np.int64), dst_more]
    )


def _overlapping(
    draw: st.DrawFn,
    shape: MoveShape,
    rows: int,
    num_slots: int,
    allow_stays: bool,
    allow_shared_sources: bool,
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return a legal list of two rows or more in which rows may read what others write."""
    if shape == "shift":
        low = np.arange(rows)
        order = draw(st.integers(0, 99))
        if order:
            low = np.random.default_rng(order).permutation(low)
        high = (low + draw(often(1, num_slots - 1))) % num_slots
        return (high, low) if draw(st.booleans()) else (low, high)
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    dst = rng.permutation(num_slots)[:rows]
    if shape == "cycles":
        ends = np.arange(0, rows, draw(often(2, rows)))
        ends = np.append(ends[: len(ends) - (rows - ends[-1] == 1)], rows)  # no cycle of one row
        src = np.concatenate([np.roll(dst[a:b], 1) for a, b in itertools.pairwise(ends.tolist())])
        mixed = rng.permutation(rows)
        return src[mixed], dst[mixed]
    if allow_shared_sources and draw(st.booleans()):
        # few sources, so that many rows read what one of them writes
        src = rng.choice(dst[: draw(often(1, min(rows, 8)))], rows)
        return (
            (src, dst) if allow_stays else (np.where(src == dst, (src + 1) % num_slots, src), dst)
        )
    src = rng.permutation(num_slots)[:rows]
    if not allow_stays:
        for row in np.flatnonzero(src == dst).tolist():
            if src[row] == dst[row]:
                other = (row + 1) % rows
                src[row], src[other] = src[other], src[row]
    return src, dst


class _Slots:
    """Draws slots without replacement; the first and the last one are often drawn first."""

    def __init__(self, draw: st.DrawFn, num_slots: int) -> None:
        self._draw = draw
        self._left = list(range(num_slots))
        self._first = list(draw(_ENDS))

    def take(self) -> int:
        if self._first:
            return self._left.pop(self._first.pop(0) and len(self._left) - 1)
        return self._left.pop(self._draw(whole(len(self._left) - 1)))

    def take_many(self, number: int) -> np.ndarray[Any, np.dtype[np.int64]]:
        if not number:
            return np.zeros(0, np.int64)
        rng = np.random.default_rng(self._draw(st.integers(0, 2**32 - 1)))
        return rng.permutation(np.array(self._left, np.int64))[:number]


# Which ends of the pool the first slots are: 0 is the lowest that is left, 1 the highest.
_ENDS: st.SearchStrategy[Sequence[int]] = st.sampled_from([(), (0, 1), (1, 0), (1, 1)])


def _outside(num_slots: int) -> st.SearchStrategy[int]:
    """Return slots that a pool does not have, just beside it or far away."""
    edges = [-1, num_slots, num_slots + 31, 2**31, -(2**31), 2**32, 2**63 - 1, -(2**63)]
    return st.sampled_from([edge for edge in edges if not 0 <= edge < num_slots])
