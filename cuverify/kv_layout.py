"""KV layouts: where the tokens of a batch lie in the pool, and how broken up they are.

A layout is what a server hands to attention: the request-to-token table with its stale tails, the
lengths, the slots of the drafts, and the padded requests of a captured batch size behind the real
ones. Slot 0 and row 0 are the dummies that padding reads and writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, DTypeLike, NDArray

from cuverify import drawing
from cuverify.errors import ArgumentError

if TYPE_CHECKING:
    from cuverify.workload import ChurnedPool

Placement = Literal["contiguous", "scattered", "sorted", "holes"]

PAGE_SIZES = (1, 16, 64)

FREE, SHARED, DUMMY, MIXED = -1, -2, -3, -4
"""What `KvLayout.owners` says of slots that are not one request's; `MIXED` is for pictures only."""

_INT32 = int(np.iinfo(np.int32).max)


@dataclass(frozen=True, eq=False)
class Fragmentation:
    """How broken up the slots of each request are. A run is a stretch of consecutive slots.

    Attributes
    ----------
    tokens : ndarray of int64, shape (B,)
        Tokens that were looked at.
    runs : ndarray of int64, shape (B,)
        Runs of each request, in token order; 0 where it has no tokens.
    gap_edges : ndarray of int64, shape (K + 1,)
        Powers of two from 1. Gap k lies in ``[gap_edges[k], gap_edges[k + 1])``.
    run_edges : ndarray of int64, shape (R + 1,)
        Likewise, for run lengths in tokens.
    run_lengths : ndarray of int64, shape (R,)
        How many runs of all requests are so long.
    gaps_forward, gaps_backward : ndarray of int64, shape (K,)
        Where a run ends and the next one starts at a higher or a lower slot: how many slots lie
        between, in bins. A step back by one slot has none between and counts as 1.
    """

    tokens: NDArray[np.int64]
    runs: NDArray[np.int64]
    gap_edges: NDArray[np.int64]
    gaps_forward: NDArray[np.int64]
    gaps_backward: NDArray[np.int64]
    run_edges: NDArray[np.int64]
    run_lengths: NDArray[np.int64]

    def bytes_per_run(self, row_bytes: int) -> NDArray[np.float64]:
        """Return the mean bytes that lie together, per request.

        Parameters
        ----------
        row_bytes : int
            Bytes of a slot's row.

        Returns
        -------
        ndarray of float64, shape (B,)
            0 where a request has no tokens.
        """
        if row_bytes < 1:
            raise ArgumentError("row_bytes", row_bytes, "a row has at least one byte")
        return self.tokens * float(row_bytes) / np.maximum(self.runs, 1)


@dataclass(frozen=True, eq=False, repr=False)
class KvLayout:
    """Slots of a batch of requests, each with a prefix and the drafts of a tree behind it.

    The first ``B - padded`` requests are real. Request b's tokens lie in the slots
    ``req_to_token[req_pool_indices[b], :seq_lens[b] + tree_tokens[b]]``, the drafts last; what
    stands behind them in the row is stale: any numbers, also ones that are no slots. A page holds
    `page_size` consecutive tokens of one request in consecutive slots, from a multiple of
    `page_size` on. The first page of the pool, with slot 0 in it, belongs to padding.

    Parameters
    ----------
    num_slots : int
        Slots of the pool, a multiple of the page size.
    page_size : int
        1, 16 or 64.
    req_to_token : array_like of int32, shape (rows, width)
        The table. Row 0 is that of padded requests and starts with slot 0.
    req_pool_indices : array_like of int64, shape (B,)
        Row of each request. Real requests have rows of their own, from 1 on.
    seq_lens : array_like of int64, shape (B,)
        Tokens of each prefix, without the drafts; 0 is allowed. 1 for padded requests.
    tree_tokens : array_like of int64, shape (B,)
        Drafts of each request, at least 1.
    out_cache_loc : array_like of int64, shape (N,)
        Slots of the drafts, request by request; N is the sum of `tree_tokens`. 0 where padded.
    padded : int
        How many requests at the end are padding.

    Attributes
    ----------
    num_slots, page_size, padded : int
    req_to_token : ndarray of int32, shape (rows, width), read-only
    req_pool_indices, seq_lens, tree_tokens, out_cache_loc : ndarray of int64, read-only
        As given, copied.

    Raises
    ------
    ArgumentError
        Something does not fit together; the message names the request and the value.

    Examples
    --------
    >>> layout = KvLayout.build(seq_lens=[3, 2], tree_tokens=[2, 1], padded=1)
    >>> layout.kv_indices().tolist(), layout.out_cache_loc.tolist()
    ([1, 2, 3, 6, 7, 0], [4, 5, 8, 0, 0])
    """

    num_slots: int
    page_size: int
    req_to_token: NDArray[np.int32]
    req_pool_indices: NDArray[np.int64]
    seq_lens: NDArray[np.int64]
    tree_tokens: NDArray[np.int64]
    out_cache_loc: NDArray[np.int64]
    padded: int = 0

    def __post_init__(self) -> None:
        table = np.asarray(self.req_to_token)
        if table.ndim != 2 or not table.size:
            raise ArgumentError(
                "req_to_token", list(table.shape), "must be a table of rows, with row 0 for padding"
            )
        if table.dtype.kind not in "iu":
            raise ArgumentError("req_to_token", str(table.dtype), "must hold integers")
        object.__setattr__(self, "req_to_token", _frozen(table, np.int32))
        for name in ("req_pool_indices", "seq_lens", "tree_tokens", "out_cache_loc"):
            values = _integers(name, getattr(self, name))
            object.__setattr__(self, name, _frozen(values, np.int64))
        _check_numbers(self)
        _check_slots(self)

    # Makers

    @classmethod
    def build(
        cls,
        *,
        seq_lens: ArrayLike,
        tree_tokens: ArrayLike,
        num_slots: int | None = None,
        page_size: int = 1,
        placement: Placement = "contiguous",
        shared_prefix: int = 0,
        padded: int = 0,
        stale_tail: bool = True,
        rng: np.random.Generator | int = 0,
    ) -> KvLayout:
        """Place a batch of requests in a pool.

        Parameters
        ----------
        seq_lens : array_like of int, shape (B,)
            Tokens of each real request's prefix.
        tree_tokens : array_like of int, shape (B,) or (B + padded,), or int
            Drafts of each request. Padded requests get those of the first request, or 1, where
            nothing is said about them.
        num_slots : int, optional
            Slots of the pool. Just enough if `placement` is ``contiguous``, twice as many
            otherwise, if absent.
        page_size : int
            1, 16 or 64.
        placement : {"contiguous", "scattered", "sorted", "holes"}
            ``contiguous``: request behind request from the first page on, which with one request
            is the identity but for the dummy page. ``scattered``: pages drawn from the pool in any
            order. ``sorted``: drawn, but ascending within each request. ``holes``: runs of 1 to 32
            pages in any order, with holes between them.
        shared_prefix : int
            First tokens that all real requests have in common, in the same slots. Whole pages, and
            no more than the shortest prefix.
        padded : int
            Padded requests behind the real ones.
        stale_tail : bool
            Fill the table behind each request, and rows of no request, with numbers that are slots
            of others, and with numbers that are no slots. Zeros otherwise, and no such rows.
        rng : numpy.random.Generator or int
            Where to draw from, or a seed.

        Returns
        -------
        KvLayout

        Raises
        ------
        ArgumentError
            A length is negative, a tree has no node, the pool is too small, or what is shared is
            longer than a prefix or no whole number of pages.
        """
        rng = np.random.default_rng(rng)
        lens = _integers("seq_lens", seq_lens)
        _at_least("padded", padded, 0)
        trees = _tree_tokens(tree_tokens, len(lens), padded)
        real = len(lens)
        if page_size not in PAGE_SIZES:
            raise ArgumentError("page_size", page_size, f"must be one of {PAGE_SIZES}")
        if placement not in get_args(Placement):
            known = list(get_args(Placement))
            raise ArgumentError("placement", placement, f"unknown; there are {known}")
        if real and lens.min() < 0:
            at = int(np.argmin(lens))
            raise ArgumentError(
                "seq_lens", int(lens[at]), f"request {at}: a prefix cannot have a negative length"
            )
        _at_least("shared_prefix", shared_prefix, 0)
        if shared_prefix and (not real or shared_prefix > lens.min()):
            shortest = int(lens.min()) if real else 0
            raise ArgumentError(
                "shared_prefix", shared_prefix, f"the shortest prefix has {shortest} tokens"
            )
        if shared_prefix % page_size:
            raise ArgumentError(
                "shared_prefix", shared_prefix, f"pages of {page_size} are shared as a whole"
            )

        totals = lens + trees[:real]
        own = -(-totals // page_size) - shared_prefix // page_size
        shared = shared_prefix // page_size
        needed = shared + int(own.sum())
        if num_slots is None:
            free = needed if placement == "contiguous" else 2 * needed
            num_slots = (1 + max(free, 1)) * page_size
        if num_slots < 1 or num_slots % page_size:
            raise ArgumentError("num_slots", num_slots, f"must be whole pages of {page_size} slots")
        pages = num_slots // page_size
        if needed + 1 > pages:
            raise ArgumentError(
                "num_slots",
                num_slots,
                f"{needed} pages of {page_size} and the dummy page take "
                f"{(needed + 1) * page_size} slots",
            )
        bounds = shared + np.concatenate([[0], np.cumsum(own)])
        picked = _pages(placement, needed, pages, [0, *bounds.tolist()], rng)

        spare = int(rng.integers(0, 3)) if stale_tail else 0
        longest = int(totals.max()) if real else 0
        longest = max(longest, 1 + int(trees[real:].max()) if padded else 1)
        width = longest + (int(rng.integers(1, 17)) if stale_tail else 0)
        rows = 1 + real + spare
        table = _stale(rows, width, num_slots, rng) if stale_tail else np.zeros((rows, width), "i4")
        order = np.arange(1, rows)
        if placement != "contiguous":
            rng.shuffle(order)
        within = np.arange(page_size)
        common = (picked[:shared, None] * page_size + within).reshape(-1)
        for b in range(real):
            mine = picked[bounds[b] : bounds[b + 1], None] * page_size + within
            row = table[order[b]]
            row[:shared_prefix] = common
            row[shared_prefix : totals[b]] = mine.reshape(-1)[: totals[b] - shared_prefix]
        return cls._of_table(table, num_slots, page_size, order[:real], lens, trees, padded)

    @classmethod
    def from_pool(
        cls,
        pool: ChurnedPool,
        *,
        tree_tokens: ArrayLike | None = None,
        max_requests: int | None = None,
        padded: int = 0,
        stale_tail: bool = True,
        rng: np.random.Generator | int = 0,
    ) -> KvLayout:
        """Take the requests that run in a churned pool, as they lie; the pool stays as it is.

        Parameters
        ----------
        pool : ChurnedPool
            A pool of page size 1. Its free slots are handed out to the drafts in its own order.
        tree_tokens : array_like of int, shape (B,) or (B + padded,), or int, optional
            Drafts of each request; those of the pool's windows if absent.
        max_requests : int, optional
            Take no more requests than so many, the oldest first.
        padded : int
            Padded requests behind the real ones.
        stale_tail : bool
            Keep what earlier requests left in the table, and put numbers behind it that are no
            slots. Zeros otherwise.
        rng : numpy.random.Generator or int
            Where to draw the rest of the stale numbers from, or a seed.

        Returns
        -------
        KvLayout

        Raises
        ------
        ArgumentError
            The pool has no room for the drafts, or an argument is out of range.
        """
        rng = np.random.default_rng(rng)
        _at_least("padded", padded, 0)
        rows, lens = pool.requests()
        if max_requests is not None:
            _at_least("max_requests", max_requests, 0)
            rows, lens = rows[:max_requests], lens[:max_requests]
        real = len(lens)
        trees = _tree_tokens(pool.tree_tokens if tree_tokens is None else tree_tokens, real, padded)
        drafts = int(trees[:real].sum())
        if drafts > len(pool.free):
            raise ArgumentError(
                "tree_tokens", drafts, f"the pool has {len(pool.free)} free slots for all drafts"
            )
        window = pool.free.peek(drafts)
        totals = lens + trees[:real]
        longest = int(totals.max()) if real else 0
        width = max(longest, 1 + int(trees[real:].max()) if padded else 1) + (
            8 if stale_tail else 0
        )
        old = pool.table()
        table = np.zeros((1 + len(old), width), np.int32)
        if stale_tail:
            table = _stale(1 + len(old), width, pool.num_slots, rng)
            both = min(width, old.shape[1])
            table[1:, :both] = np.where(old[:, :both] > 0, old[:, :both], table[1:, :both])
        ends = np.cumsum(trees[:real])
        for b in range(real):
            row = table[1 + rows[b]]
            row[: lens[b]] = old[rows[b], : lens[b]]
            row[lens[b] : totals[b]] = window[ends[b] - trees[b] : ends[b]]
        return cls._of_table(table, pool.num_slots, 1, 1 + rows, lens, trees, padded)

    @classmethod
    def _of_table(
        cls,
        table: NDArray[np.int32],
        num_slots: int,
        page_size: int,
        rows: NDArray[np.int64],
        lens: NDArray[np.int64],
        trees: NDArray[np.int64],
        padded: int,
    ) -> KvLayout:
        """Add the padding and the list of draft slots to a table."""
        real = len(lens)
        widest = 1 + (int(trees[real:].max()) if padded else 0)
        table[0, :widest] = 0
        drafts = [
            table[row, start : start + count]
            for row, start, count in zip(rows, lens, trees[:real], strict=True)
        ]
        drafts.append(np.zeros(int(trees[real:].sum()), np.int32))
        return cls(
            num_slots=num_slots,
            page_size=page_size,
            req_to_token=table,
            req_pool_indices=np.concatenate([rows, np.zeros(padded, np.int64)]),
            seq_lens=np.concatenate([lens, np.ones(padded, np.int64)]),
            tree_tokens=trees,
            out_cache_loc=np.concatenate(drafts),
            padded=padded,
        )

    # Questions

    @property
    def num_requests(self) -> int:
        """B, padded requests included."""
        return len(self.seq_lens)

    @property
    def num_real(self) -> int:
        """Requests that are not padding."""
        return len(self.seq_lens) - self.padded

    @property
    def num_tokens(self) -> int:
        """N, the drafts of all requests."""
        return len(self.out_cache_loc)

    def prefix_slots(self, request: int) -> NDArray[np.int32]:
        """Return the slots of a request's prefix, in token order: a read-only view."""
        at = self._request(request)
        return self.req_to_token[self.req_pool_indices[at], : self.seq_lens[at]]

    def draft_slots(self, request: int) -> NDArray[np.int64]:
        """Return the slots of a request's drafts, in node order: a read-only view."""
        at = self._request(request)
        return self.out_cache_loc[self._ends[at] : self._ends[at + 1]]

    def kv_indptr(self) -> NDArray[np.int32]:
        """Return where each prefix starts in `kv_indices`: int32, shape (B + 1,), drafts apart."""
        return self._indptr(self.seq_lens, np.int32, "seq_lens")

    def kv_indices(self, dtype: DTypeLike = np.int32) -> NDArray[Any]:
        """Return the slots of all prefixes, request by request.

        Parameters
        ----------
        dtype : dtype
            int32 or int64.

        Returns
        -------
        ndarray, shape (sum of seq_lens,)
        """
        _index_type(dtype)
        slots = [self.prefix_slots(b) for b in range(self.num_requests)]
        return np.concatenate([np.zeros(0, np.int32), *slots]).astype(dtype, copy=False)

    def qo_indptr(self, dtype: DTypeLike = np.int32) -> NDArray[Any]:
        """Return where each request's drafts start: shape (B + 1,), int32 or int64."""
        return self._indptr(self.tree_tokens, dtype, "tree_tokens")

    def owners(self) -> tuple[NDArray[np.int64], NDArray[np.bool_]]:
        """Return who holds each slot.

        Returns
        -------
        owner : ndarray of int64, shape (num_slots,)
            The real request that holds a slot, `FREE`, `SHARED` by several, or `DUMMY`.
        draft : ndarray of bool, shape (num_slots,)
            Whether a slot holds a draft of a real request.
        """
        owner = np.full(self.num_slots, FREE, np.int64)
        draft = np.zeros(self.num_slots, np.bool_)
        for b in range(self.num_real):
            slots = self.prefix_slots(b)
            owner[slots] = np.where(owner[slots] == FREE, b, SHARED)
            owner[self.draft_slots(b)] = b
            draft[self.draft_slots(b)] = True
        owner[0] = DUMMY
        return owner, draft

    def fragmentation(self, *, drafts: bool = False) -> Fragmentation:
        """Measure how broken up each request's slots are.

        Parameters
        ----------
        drafts : bool
            Look at the drafts too, as the tokens behind the prefix.

        Returns
        -------
        Fragmentation
            Padded requests have one slot and one run.
        """
        parts: list[NDArray[Any]] = []
        for b in range(self.num_requests):
            parts.append(self.prefix_slots(b))
            if drafts and b < self.num_real:
                parts.append(self.draft_slots(b))
        slots = np.concatenate([np.zeros(0, np.int64), *parts])
        tokens = self.seq_lens.copy()
        if drafts:
            tokens[: self.num_real] += self.tree_tokens[: self.num_real]
        owner = np.repeat(np.arange(self.num_requests), tokens)
        step = np.diff(slots)
        inside = owner[1:] == owner[:-1]
        breaks = inside & (step != 1)
        runs = np.bincount(owner[1:][breaks], minlength=self.num_requests) + (tokens > 0)
        # Slots between the end of a run and the start of the next; at least 1, for a power of two.
        gap = np.maximum(np.abs(step[breaks]) - 1, 1)
        size = np.frexp(gap)[1].astype(np.int64) - 1
        bins = int(size.max()) + 1 if len(size) else 0
        back = step[breaks] < 0
        ends = np.flatnonzero(np.concatenate([breaks | ~inside, [True] * (len(slots) > 0)])) + 1
        long = np.frexp(np.diff(ends, prepend=0))[1].astype(np.int64) - 1
        run_bins = int(long.max()) + 1 if len(long) else 0
        return Fragmentation(
            tokens=tokens,
            runs=runs.astype(np.int64),
            gap_edges=2 ** np.arange(bins + 1, dtype=np.int64),
            gaps_forward=np.bincount(size[~back], minlength=bins).astype(np.int64),
            gaps_backward=np.bincount(size[back], minlength=bins).astype(np.int64),
            run_edges=2 ** np.arange(run_bins + 1, dtype=np.int64),
            run_lengths=np.bincount(long, minlength=run_bins).astype(np.int64),
        )

    def units_per_tile(self, row_bytes: int, unit: int, *, tile: int = 64) -> float:
        """Count the memory units that a tile of prefix rows touches, whole tiles only.

        Parameters
        ----------
        row_bytes : int
            Bytes of a slot's row; rows lie one behind the other.
        unit : int
            Bytes of a unit: 32 for a sector, 2,048 for a DRAM page.
        tile : int
            Consecutive tokens of one request.

        Returns
        -------
        float
            The mean over all tiles of all requests; 0 where there is none.
        """
        for name, value in (("row_bytes", row_bytes), ("unit", unit), ("tile", tile)):
            _at_least(name, value, 1)
        counts = []
        for b in range(self.num_real):
            slots = self.prefix_slots(b).astype(np.int64)
            tiles = np.sort(slots[: len(slots) // tile * tile].reshape(-1, tile), axis=1)
            first = tiles * row_bytes // unit
            last = ((tiles + 1) * row_bytes - 1) // unit
            # a row's first unit is its neighbour's last one, or a new one
            shared = first[:, 1:] == last[:, :-1]
            counts.append((last - first + 1).sum(axis=1) - shared.sum(axis=1))
        found = np.concatenate([np.zeros(0, np.int64), *counts])
        return float(found.mean()) if len(found) else 0.0

    # Pictures

    def to_text(self, *, columns: int = 64, max_rows: int = 16) -> str:
        """Draw the pool as text, one character for a slot or for several neighbours.

        ``0`` is the dummy slot, ``.`` free, ``a`` to ``z`` the prefix of a request and ``A`` to
        ``Z`` its drafts, ``#`` a shared prefix, ``*`` slots of several kinds.

        Parameters
        ----------
        columns, max_rows : int
            Size of the map; slots are put together until it fits.

        Returns
        -------
        str
        """
        cells, each = self._cells(columns * max_rows)
        signs = "".join(_sign(owner, draft) for owner, draft, _ in cells)
        lines = [repr(self)]
        if each > 1:
            lines.append(f"{each} slots a character")
        for start in range(0, len(signs), columns):
            lines.append(f"{start * each:>9}  {signs[start : start + columns]}")
        found = self.fragmentation()
        for b in range(min(self.num_real, 26)):
            lines.append(
                f"{_sign(b, False):>9}  prefix {self.seq_lens[b]}, runs {found.runs[b]}, "
                f"drafts {self.tree_tokens[b]}"
            )
        if self.num_real > 26:
            lines.append(f"{'...':>9}  and {self.num_real - 26} more requests")
        return "\n".join(lines)

    def to_svg(self, *, columns: int = 64, max_rows: int = 32) -> str:
        """Draw the pool as SVG: a colour for each request, drafts framed, shared prefixes dark.

        Parameters
        ----------
        columns, max_rows : int
            Size of the map; slots are put together until it fits.

        Returns
        -------
        str
            A complete `svg` element.
        """
        cells, each = self._cells(columns * max_rows)
        size, left, top = 11.0, 72.0, 26.0
        rows = -(-len(cells) // columns)
        named = min(self.num_real, len(drawing.SERIES))
        width = left + columns * size + 8
        picture = drawing.Svg(width, top + rows * size + 34, title=repr(self))
        note = f"{self.num_slots} slots, page size {self.page_size}"
        if each > 1:
            note += f", {each} slots a cell"
        picture.text((8, 16), note, anchor="start")
        for at, (owner, draft, first) in enumerate(cells):
            corner = (left + at % columns * size, top + at // columns * size)
            if at % columns == 0:
                picture.text((left - 6, corner[1] + 9), str(first), size=9, anchor="end")
            picture.rect(
                corner,
                size - 1,
                size - 1,
                fill=_colour(owner),
                stroke=drawing.INK if draft else "none",
                title=_said(owner, draft, first, min(each, self.num_slots - first)),
            )
        below = top + rows * size + 10
        legend: list[tuple[int, str]] = [(b, f"request {b}") for b in range(named)]
        legend += [(SHARED, "shared"), (MIXED, "mixed"), (FREE, "free")]
        for at, (owner, name) in enumerate(legend):
            x = left + at * 62
            if x + 62 > width:
                break
            picture.rect((x, below), size - 1, size - 1, fill=_colour(owner))
            picture.text(
                (x + size + 2, below + 9), name.replace("request ", "r"), size=9, anchor="start"
            )
        return picture.to_string()

    def _repr_svg_(self) -> str:
        return self.to_svg()

    def __repr__(self) -> str:
        def short(values: NDArray[np.int64]) -> str:
            shown = ", ".join(str(value) for value in values[:8].tolist())
            return f"[{shown}{', ...' if len(values) > 8 else ''}]"

        return (
            f"KvLayout({self.num_requests} requests, {self.padded} of them padded, "
            f"seq_lens={short(self.seq_lens)}, tree_tokens={short(self.tree_tokens)}, "
            f"num_slots={self.num_slots}, page_size={self.page_size})"
        )

    @cached_property
    def _ends(self) -> NDArray[np.int64]:
        return np.concatenate([[0], np.cumsum(self.tree_tokens)])

    def _request(self, request: int) -> int:
        if not 0 <= request < self.num_requests:
            raise ArgumentError(
                "request", request, f"the batch has requests 0 to {self.num_requests - 1}"
            )
        return int(request)

    def _indptr(self, counts: NDArray[np.int64], dtype: DTypeLike, name: str) -> NDArray[Any]:
        _index_type(dtype)
        ends = np.concatenate([[0], np.cumsum(counts)])
        if ends[-1] > np.iinfo(dtype).max:
            raise ArgumentError(name, int(ends[-1]), f"the sum does not fit into {np.dtype(dtype)}")
        return ends.astype(dtype)

    def _cells(self, most: int) -> tuple[list[tuple[int, bool, int]], int]:
        """Return (owner, whether all are drafts, first slot) of each cell, and slots a cell."""
        if most < 1:
            raise ArgumentError("columns, max_rows", most, "the map must have a cell")
        owner, draft = self.owners()
        each = -(-self.num_slots // most)
        starts = np.arange(0, self.num_slots, each)
        same = np.minimum.reduceat(owner, starts) == np.maximum.reduceat(owner, starts)
        kinds = np.minimum.reduceat(draft, starts) == np.maximum.reduceat(draft, starts)
        who = np.where(same & kinds, owner[starts], MIXED)
        return (
            list(
                zip(
                    who.tolist(),
                    (draft[starts] & (who != MIXED)).tolist(),
                    starts.tolist(),
                    strict=True,
                )
            ),
            each,
        )


def before_and_after_svg(
    before: KvLayout, after: KvLayout, *, columns: int = 64, max_rows: int = 32
) -> str:
    """Draw one pool twice, such as before and after a relocation.

    Parameters
    ----------
    before, after : KvLayout
    columns, max_rows : int
        Size of each map.

    Returns
    -------
    str
        A complete `svg` element, with `before` above `after`.
    """
    pictures = [layout.to_svg(columns=columns, max_rows=max_rows) for layout in (before, after)]
    return drawing.stacked(pictures, ["before", "after"])


def _frozen(values: Any, dtype: Any) -> NDArray[Any]:
    copy = np.array(values, dtype, order="C")
    copy.flags.writeable = False
    return copy


def _integers(name: str, values: ArrayLike) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1:
        raise ArgumentError(
            name, list(array.shape), f"must be a flat list, not {array.ndim}-dimensional"
        )
    if array.size and array.dtype.kind not in "iu":
        raise ArgumentError(name, str(array.dtype), "must hold integers")
    return array.astype(np.int64)


def _at_least(name: str, value: int, least: int) -> None:
    if value < least:
        raise ArgumentError(name, value, f"must be at least {least}")


def _index_type(dtype: DTypeLike) -> None:
    if np.dtype(dtype) not in (np.dtype(np.int32), np.dtype(np.int64)):
        raise ArgumentError("dtype", str(np.dtype(dtype)), "indices are int32 or int64")


def _tree_tokens(given: ArrayLike, real: int, padded: int) -> NDArray[np.int64]:
    """Return the drafts of each request, padded ones included."""
    values = np.asarray(given)
    if values.ndim == 0:
        trees = _integers("tree_tokens", np.full(real + padded, values))
    else:
        trees = _integers("tree_tokens", values)
        if len(trees) == real:
            trees = np.concatenate([trees, np.full(padded, trees[0] if real else 1)])
    if len(trees) != real + padded:
        raise ArgumentError(
            "tree_tokens",
            trees.tolist(),
            f"need one number for each of {real} requests and {padded} padded ones",
        )
    if len(trees) and trees.min() < 1:
        at = int(np.argmin(trees))
        raise ArgumentError(
            "tree_tokens", int(trees[at]), f"request {at}: a tree has at least its root"
        )
    return trees


def _pages(
    placement: Placement,
    needed: int,
    pages: int,
    bounds: Sequence[int],
    rng: np.random.Generator,
) -> NDArray[np.int64]:
    """Return the pages of all parts, one part behind the other; page 0 is never among them."""
    if placement == "contiguous":
        return np.arange(1, 1 + needed)
    if placement == "holes":
        return _with_holes(needed, pages - 1, rng)
    picked = 1 + rng.permutation(pages - 1)[:needed]
    if placement == "sorted":
        for start, end in itertools.pairwise(bounds):
            picked[start:end].sort()
    return picked


def _with_holes(needed: int, pages: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Return runs of 1 to 32 pages, in any order, with the free pages between them."""
    # Lengths are log-uniform: many short runs and a few long ones, as churn leaves them.
    lengths = np.exp2(rng.uniform(0, 5, max(needed, 1))).astype(np.int64)
    ends = np.minimum(np.cumsum(lengths), needed)
    ends = ends[: int(np.searchsorted(ends, needed)) + 1]
    lengths = np.diff(ends, prepend=0)
    gaps = rng.multinomial(pages - needed, np.full(len(lengths) + 1, 1 / (len(lengths) + 1)))
    order = rng.permutation(len(lengths))
    starts = np.empty_like(lengths)
    in_pool = lengths[order]
    starts[order] = 1 + np.cumsum(gaps[:-1]) + np.cumsum(in_pool) - in_pool
    offset = np.arange(needed) - np.repeat(ends - lengths, lengths)
    picked: NDArray[np.int64] = np.repeat(starts, lengths) + offset
    return picked


def _stale(rows: int, width: int, num_slots: int, rng: np.random.Generator) -> NDArray[np.int32]:
    """Return a table of stale numbers: mostly slots of others, one in four no slot at all."""
    # One draw for both: what lies above the pool picks one of the numbers that are no slots.
    top = min(num_slots + num_slots // 3 + 4, _INT32)
    stale = rng.integers(0, top, (rows, width), np.int32)
    wild = stale >= num_slots
    edges = np.array([-1, min(num_slots, _INT32), _INT32, -_INT32 - 1], np.int32)
    stale[wild] = edges[stale[wild] % 4]
    return stale


def _check_numbers(layout: KvLayout) -> None:
    """Refuse what does not fit together before any slot is looked at."""
    # Batches are small: plain lists are several times faster here than arrays.
    lens: list[int] = layout.seq_lens.tolist()
    trees: list[int] = layout.tree_tokens.tolist()
    index: list[int] = layout.req_pool_indices.tolist()
    requests = len(lens)
    if layout.page_size not in PAGE_SIZES:
        raise ArgumentError("page_size", layout.page_size, f"must be one of {PAGE_SIZES}")
    if not 0 < layout.num_slots <= _INT32 or layout.num_slots % layout.page_size:
        raise ArgumentError(
            "num_slots",
            layout.num_slots,
            f"must be whole pages of {layout.page_size} slots, at least one, below 2**31 slots",
        )
    for name, values in (("req_pool_indices", index), ("tree_tokens", trees)):
        if len(values) != requests:
            raise ArgumentError(name, values, f"need one for each of {requests} requests")
    if not 0 <= layout.padded <= requests:
        raise ArgumentError("padded", layout.padded, f"must lie in 0 to {requests}, the requests")
    real = requests - layout.padded
    rows, width = layout.req_to_token.shape
    owner: dict[int, int] = {}
    for b, (length, tree, row) in enumerate(zip(lens, trees, index, strict=True)):
        if tree < 1:
            raise ArgumentError("tree_tokens", tree, f"request {b}: a tree has at least its root")
        if b >= real:
            if length != 1:
                raise ArgumentError("seq_lens", length, f"request {b} is padded: it must be 1")
            if row != 0:
                raise ArgumentError("req_pool_indices", row, f"request {b} is padded: it has row 0")
            continue
        if length < 0:
            raise ArgumentError(
                "seq_lens", length, f"request {b}: a prefix cannot have a negative length"
            )
        if not 1 <= row < rows:
            raise ArgumentError(
                "req_pool_indices", row, f"request {b}: real requests have rows 1 to {rows - 1}"
            )
        if row in owner:
            raise ArgumentError(
                "req_pool_indices", row, f"requests {owner[row]} and {b} have the same row"
            )
        owner[row] = b
        if length + tree > width:
            raise ArgumentError(
                "req_to_token",
                [rows, width],
                f"request {b} has {length + tree} tokens, a row has room for {width}",
            )
    if len(layout.out_cache_loc) != sum(trees):
        raise ArgumentError(
            "out_cache_loc", len(layout.out_cache_loc), f"need {sum(trees)} slots, one a draft"
        )


def _check_slots(layout: KvLayout) -> None:
    """Refuse slots out of range, in use twice, off their page, or not those of the table."""
    size, real = layout.page_size, layout.num_real
    if layout.padded and layout.req_to_token[0, 0] != 0:
        raise ArgumentError(
            "req_to_token", int(layout.req_to_token[0, 0]), "row 0 is for padding: it has slot 0"
        )
    stamp = np.full(layout.num_slots, -1, np.int32)
    ends = layout._ends
    for at in _wrong(layout.out_cache_loc[ends[real] :] != 0):
        where = int(ends[real]) + at
        raise ArgumentError(
            "out_cache_loc", int(layout.out_cache_loc[where]), f"draft {where} is padded: slot 0"
        )
    for b in range(real):
        length = int(layout.seq_lens[b])
        row = layout.req_to_token[layout.req_pool_indices[b]]
        slots = row[: length + int(layout.tree_tokens[b])]
        for at in _wrong((slots < size) | (slots >= layout.num_slots)):
            raise ArgumentError(
                "req_to_token",
                int(slots[at]),
                f"request {b}, token {at}: slots out of range; the pool has {layout.num_slots}, "
                f"of which the first {size} are padding's",
            )
        for at in _wrong(slots[length:] != layout.draft_slots(b)):
            raise ArgumentError(
                "out_cache_loc",
                int(layout.draft_slots(b)[at]),
                f"request {b}, draft {at}: the table has slot {slots[length + at]}",
            )
        token = np.arange(len(slots), dtype=np.int32)
        if size > 1:
            head = slots[token - token % size]
            for at in _wrong((head % size != 0) | (slots != head + token % size)):
                raise ArgumentError(
                    "req_to_token",
                    int(slots[at]),
                    f"request {b}, token {at}: off its page of {size} slots",
                )
        stamp[slots] = token
        for at in _wrong(stamp[slots] != token):
            raise ArgumentError(
                "req_to_token",
                int(slots[at]),
                f"request {b}: tokens {at} and {stamp[slots[at]]} have the same slot",
            )
    _check_drafts(layout, stamp)


def _check_drafts(layout: KvLayout, stamp: NDArray[np.int32]) -> None:
    """Refuse a draft whose slot anybody else has: the row written there would be lost."""
    stamp[:] = -1
    for b in range(layout.num_real):
        slots = layout.draft_slots(b)
        for at in _wrong(stamp[slots] >= 0):
            raise ArgumentError(
                "out_cache_loc",
                int(slots[at]),
                f"request {b}, draft {at}: a draft of request {stamp[slots[at]]} has the same slot",
            )
        stamp[slots] = b
    for b in range(layout.num_real):
        prefix = layout.prefix_slots(b)
        for at in _wrong(stamp[prefix] >= 0):
            raise ArgumentError(
                "out_cache_loc",
                int(prefix[at]),
                f"a draft of request {stamp[prefix[at]]} has the slot of token {at} of request {b}",
            )


def _wrong(bad: NDArray[np.bool_]) -> Iterator[int]:
    """Yield the first index that is true, if any."""
    if bad.any():
        yield int(np.argmax(bad))


def _sign(owner: int, draft: bool) -> str:
    signs = {FREE: ".", SHARED: "#", DUMMY: "0", MIXED: "*"}
    return signs.get(owner) or chr((65 if draft else 97) + owner % 26)


def _colour(owner: int) -> str:
    colours = {
        FREE: drawing.PALE,
        SHARED: drawing.INK,
        DUMMY: drawing.ACCENT,
        MIXED: drawing.GREY,
    }
    return colours.get(owner) or drawing.SERIES[owner % len(drawing.SERIES)]


def _said(owner: int, draft: bool, first: int, count: int) -> str:
    kinds = {FREE: "free", SHARED: "shared prefix", DUMMY: "dummy", MIXED: "several kinds"}
    kind = kinds.get(owner) or f"request {owner}, {'drafts' if draft else 'prefix'}"
    return (
        f"slot {first}: {kind}" if count == 1 else f"slots {first} to {first + count - 1}: {kind}"
    )
