"""Real input for kernels that move KV: request lengths, a pool that they churn, and move lists.

`request_lengths` reads a production trace where it is at hand and draws from its quantiles where it
is not. `ChurnedPool` serves such requests from a KV pool of page size 1 as a speculative decoder
does, and hands out the lists that a server would have to move: accepted paths, and compaction.
Everything is numpy, and the same for the same seed.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cuverify.datasets import VARIABLE, find_data
from cuverify.errors import ArgumentError, CaseError
from cuverify.planner import plan_contiguous

Slots = NDArray[np.int64]
Trace = Literal["code", "conv"]
FreeOrder = Literal["fifo", "lifo", "sorted", "kept"]
CommitWay = Literal["rows", "table"]

# Azure LLM inference traces of 2023: quantiles of 8,819 `code` and 19,366 `conv` requests, computed
# from AzureLLMInferenceTrace_{code,conv}.csv of Azure/AzurePublicDataset, licence CC-BY 4.0; see
# Patel et al., "Splitwise: Efficient generative LLM inference using phase splitting", ISCA 2024.
_LEVELS = (0.0, 0.01, 0.05, 0.1, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99, 0.999, 1.0)
_QUANTILES: dict[str, dict[str, tuple[int, ...]]] = {
    "code": {
        "prompt": (3, 17, 75, 147, 578, 1469, 2744, 5186, 7302, 7436, 7437, 7437),
        "generated": (6, 6, 6, 7, 9, 13, 24, 55, 90, 249, 824, 1899),
    },
    "conv": {
        "prompt": (2, 29, 181, 207, 396, 1020, 1189, 2734, 4083, 4142, 6122, 14050),
        "generated": (7, 16, 41, 54, 85, 129, 395, 424, 451, 601, 954, 1000),
    },
}
_FOLDER = "azure-llm-2023"


@dataclass(frozen=True, eq=False)
class RequestLengths:
    """Lengths of requests, in the order of their arrival.

    Attributes
    ----------
    prompt, generated : ndarray of int64, shape (requests,)
        Tokens of the prompt and of the answer, both at least 1.
    source : str
        The file they were read from, or that they were drawn from quantiles.
    """

    prompt: NDArray[np.int64]
    generated: NDArray[np.int64]
    source: str


def request_lengths(
    trace: Trace = "conv", *, count: int | None = None, seed: int = 0
) -> RequestLengths:
    """Return the request lengths of a production trace.

    The trace is looked for in the folder that the environment variable ``CUVERIFY_DATA`` names,
    then in ``.data/azure-llm-2023`` in a checkout. Where it is in neither, lengths are drawn from
    its quantiles: prompt and answer independently (their rank correlation in the trace is below
    0.08), and without the order of arrivals.

    Parameters
    ----------
    trace : {"conv", "code"}
        Conversations (answers of 129 tokens in the median) or code completion (13).
    count : int, optional
        Number of requests; a trace is repeated when it is shorter. All of it if absent, and
        20,000 where it has to be drawn.
    seed : int
        Where in the trace to start (0: at its beginning), or what to draw.

    Returns
    -------
    RequestLengths

    Raises
    ------
    ArgumentError
        The trace is unknown or the count negative.
    CaseError
        ``CUVERIFY_DATA`` names a folder without the trace, or the file is not a trace.
    """
    if trace not in _QUANTILES:
        raise ArgumentError("trace", trace, f"unknown; there are {sorted(_QUANTILES)}")
    if count is not None and count < 0:
        raise ArgumentError("count", count, "the number of requests cannot be negative")
    rng = np.random.default_rng([seed, 0x1E46])
    file = _trace_file(trace)
    if file is None:
        number = 20_000 if count is None else count
        drawn = [_draw(_QUANTILES[trace][part], number, rng) for part in ("prompt", "generated")]
        return RequestLengths(drawn[0], drawn[1], f"drawn from the quantiles of {trace}")
    both = _read_trace(file)
    start = int(rng.integers(len(both))) if seed else 0
    picked = (start + np.arange(len(both) if count is None else count)) % len(both)
    return RequestLengths(both[picked, 0], both[picked, 1], str(file))


@dataclass(frozen=True, eq=False, repr=False)
class RelocationBatch:
    """One list of moves and the pools it is for: row i moves slot ``src[i]`` to slot ``dst[i]``.

    Attributes
    ----------
    num_slots : int
        Slots of every pool.
    src, dst : ndarray of int64, shape (capacity,)
        The list. What stands from `count` on is a dead tail of any content.
    count : int
        Rows of the list.
    layers : int
        Number of pools.
    row_bytes, row_stride : int
        Bytes of a row, and from one slot to the next. Multiples of 16.
    kind : str
        Where the list comes from.
    chained_rows, chained_requests : int
        Rows of requests in which a source of one accepted-path move is the destination of another,
        and those requests. See `accepted_path_moves`.
    """

    num_slots: int
    src: Slots
    dst: Slots
    count: int
    layers: int = 1
    row_bytes: int = 1152
    row_stride: int = 1152
    kind: str = "drawn"
    chained_rows: int = 0
    chained_requests: int = 0

    @property
    def capacity(self) -> int:
        """Length of the lists, dead tail included."""
        return len(self.src)

    def padded(self, capacity: int, *, seed: int = 0) -> RelocationBatch:
        """Return the same list in longer buffers, with more garbage behind it.

        Parameters
        ----------
        capacity : int
            Length of the lists, at least the present one.
        seed : int
            What the tail holds: slots in and out of range.

        Returns
        -------
        RelocationBatch

        Raises
        ------
        ArgumentError
            The list does not fit.
        """
        tail = capacity - self.capacity
        if tail < 0:
            raise ArgumentError("capacity", capacity, f"the lists have {self.capacity} rows")
        rng = np.random.default_rng([seed, 0x7A11])
        garbage = rng.integers(-2, self.num_slots + 2, (2, tail))
        garbage[rng.random((2, tail)) < 0.2] = np.iinfo(np.int64).min
        return replace(
            self,
            src=np.concatenate([self.src, garbage[0]]),
            dst=np.concatenate([self.dst, garbage[1]]),
        )

    def __repr__(self) -> str:
        shown = max(0, min(self.count, 12, self.capacity))
        rows = [f"{s}->{d}" for s, d in zip(self.src[:shown], self.dst[:shown], strict=True)]
        more = "" if shown >= self.count else ", ..."
        return (
            f"RelocationBatch({self.kind}: {self.count} of {self.capacity} rows "
            f"[{', '.join(rows)}{more}], num_slots={self.num_slots}, layers={self.layers}, "
            f"row_bytes={self.row_bytes}, row_stride={self.row_stride})"
        )


@dataclass(frozen=True, eq=False)
class AcceptedMoves:
    """The moves that commit accepted paths by rows.

    Attributes
    ----------
    src, dst : ndarray of int64, shape (rows,)
        All moves, without rows that already stand where they belong, request by request.
    chained : ndarray of bool, shape (rows,)
        Rows of a request in which a slot is the source of one row and the destination of another.
    request : ndarray of int64, shape (rows,)
        The request of each row.
    """

    src: Slots
    dst: Slots
    chained: NDArray[np.bool_]
    request: NDArray[np.int64]


def accepted_path_moves(
    out_cache_loc: Slots,
    accept_index: NDArray[Any],
    accept_token_num: NDArray[Any],
    tree_tokens: int,
) -> AcceptedMoves:
    """Return the moves that bring accepted rows to the front of each request's window.

    An accepted path has ascending window indices ``p[0] = 0 < p[1] < ... < p[m]``, so that
    ``p[k] >= k``, and row ``p[k]`` goes to window slot ``k``. A source ``p[j] <= m`` with
    ``p[j] > j`` is also the destination of row ``p[p[j]]``: such a request's moves are chained.
    They are right only when all sources are read first.

    Parameters
    ----------
    out_cache_loc : ndarray of int64, shape (requests * tree_tokens,)
        Slots of the windows.
    accept_index : ndarray of int, shape (requests, S)
        Global node indices into `out_cache_loc` of each accepted path, the root first.
    accept_token_num : ndarray of int, shape (requests,)
        Accepted nodes without the root, below S; entries of `accept_index` behind are ignored.
    tree_tokens : int
        Window slots of a request.

    Returns
    -------
    AcceptedMoves
    """
    accepted = np.asarray(accept_token_num, np.int64)
    nodes = np.asarray(accept_index, np.int64)
    requests, width = nodes.shape
    place = np.arange(width)
    base = np.arange(requests)[:, None] * tree_tokens
    window = nodes - base
    moving = (place <= accepted[:, None]) & (window != place)
    chained = (moving & (window <= accepted[:, None])).any(axis=1)
    request, at = np.nonzero(moving)
    return AcceptedMoves(
        src=out_cache_loc[nodes[request, at]],
        dst=out_cache_loc[request * tree_tokens + at],
        chained=chained[request],
        request=request,
    )


class FreeList:
    """The free slots of a pool of page size 1. Slot 0 is never handed out.

    Parameters
    ----------
    num_slots : int
        Slots of the pool, slot 0 included.
    order : {"fifo", "lifo", "sorted", "kept"}
        ``fifo``: released slots go to the tail, as in SGLang's token allocator. ``lifo``: to the
        front, as in its paged one. ``sorted``: they wait until the rest runs out, then all are
        sorted, as in its token allocator with ``need_sort``. ``kept``: sorted before every
        allocation, as `cuverify.allocator.SortedFreeList` keeps it.
    """

    def __init__(self, num_slots: int, order: FreeOrder = "fifo") -> None:
        if order not in ("fifo", "lifo", "sorted", "kept"):
            raise ArgumentError("free_list", order, "must be 'fifo', 'lifo', 'sorted' or 'kept'")
        self.order = order
        self._ready: Slots = np.arange(1, num_slots, dtype=np.int64)
        self._next = 0
        self._released: list[Slots] = []
        self._waiting = 0

    def __len__(self) -> int:
        return len(self._ready) - self._next + self._waiting

    def allocate(self, number: int) -> Slots:
        """Take `number` slots from the front; the caller has made sure that there are so many."""
        if number > len(self):
            raise ArgumentError("number", number, f"only {len(self)} slots are free")
        if number > len(self._ready) - self._next or (self.order == "kept" and self._waiting):
            self._merge()
        taken: Slots = self._ready[self._next : self._next + number].copy()
        self._next += number
        return taken

    def peek(self, number: int) -> Slots:
        """Return the slots that `allocate` would hand out, and leave them free."""
        if number > len(self):
            raise ArgumentError("number", number, f"only {len(self)} slots are free")
        ready = self._ready[self._next :]
        if number > len(ready) or self.order == "kept":
            ready = self.slots()
            if self.order != "fifo":
                ready.sort()
        slots: Slots = ready[:number].copy()
        return slots

    def release(self, slots: Slots) -> None:
        """Give slots back."""
        if self.order == "lifo":
            # Every slot that is out came from in front of the next one: there is room.
            self._ready[self._next - len(slots) : self._next] = slots
            self._next -= len(slots)
        elif len(slots):
            self._released.append(slots)
            self._waiting += len(slots)

    def slots(self) -> Slots:
        """Return all free slots, in the order in which they would be handed out without a sort."""
        return np.concatenate([self._ready[self._next :], *self._released])

    def replace(self, slots: Slots) -> None:
        """Start again with exactly these free slots."""
        if self.order == "lifo":
            self._next = len(self._ready) - len(slots)
            self._ready[self._next :] = slots
        else:
            self._ready, self._next = slots.copy(), 0
        self._released, self._waiting = [], 0

    def _merge(self) -> None:
        self._ready, self._next = self.slots(), 0
        if self.order != "fifo":
            self._ready.sort()
        self._released, self._waiting = [], 0


class ChurnedPool:
    """A KV pool of page size 1 that serves requests by speculative decoding, and ages.

    In every step requests are admitted while their prompts fit, each running request gets a window
    of `tree_tokens` slots, a path of it is accepted and committed, the rest of the window is
    released, and finished requests release all. Prefixes are not shared between requests. Where
    windows do not fit any more, requests are retracted, the youngest first.

    Parameters
    ----------
    num_slots : int
        Slots of the pool, the dummy slot 0 included.
    lengths : RequestLengths, optional
        The requests; they start again from the first when they run out. ``request_lengths("conv",
        seed=seed)`` if absent. Prompts are cut to a quarter of the pool.
    tree_tokens : int
        Nodes of a draft tree, at least 1.
    max_accepted : int
        Most nodes that a step accepts below the root.
    acceptance : float
        Probability that the path goes on by one more node.
    skip : float
        Probability that the next accepted node is not the next of the window; applied again for
        each node that is skipped.
    free_list : {"fifo", "lifo", "sorted", "kept"}
        See `FreeList`.
    commit : {"rows", "table"}
        Whether accepted tokens keep the first slots of their window, or their own.
    occupancy : float
        Share of the pool up to which prompts are admitted.
    max_running : int
        Most requests that run at a time.
    seed : int
        Seed of acceptance.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        lengths: RequestLengths | None = None,
        tree_tokens: int = 16,
        max_accepted: int = 7,
        acceptance: float = 0.7,
        skip: float = 0.4,
        free_list: FreeOrder = "fifo",
        commit: CommitWay = "rows",
        occupancy: float = 0.9,
        max_running: int = 256,
        seed: int = 0,
    ) -> None:
        if tree_tokens < 1:
            raise ArgumentError("tree_tokens", tree_tokens, "a tree has at least its root")
        if num_slots < 8 * tree_tokens:
            raise ArgumentError(
                "num_slots", num_slots, f"need at least 8 windows of {tree_tokens} slots"
            )
        if not 0 < occupancy <= 1:
            raise ArgumentError("occupancy", occupancy, "must lie in (0, 1]")
        if not (0 <= acceptance <= 1 and 0 <= skip < 1):
            raise ArgumentError(
                "acceptance, skip", (acceptance, skip), "must lie in [0, 1] and in [0, 1)"
            )
        if commit not in ("rows", "table"):
            raise ArgumentError("commit", commit, "must be 'rows' or 'table'")
        if max_running < 1:
            raise ArgumentError("max_running", max_running, "at least one request must run")
        lengths = request_lengths("conv", seed=seed) if lengths is None else lengths
        if not len(lengths.prompt):
            raise ArgumentError("lengths", lengths.source, "holds no request")
        self.num_slots = num_slots
        self.tree_tokens = tree_tokens
        self.commit = commit
        self.free = FreeList(num_slots, free_list)
        self.retracted = 0
        self.allocated = 0  # slots handed out so far, windows included
        self._max_accepted = min(max_accepted, tree_tokens - 1)
        self._acceptance = acceptance
        self._skip = skip
        self._limit = int(occupancy * (num_slots - 1))
        self._prompt = np.minimum(lengths.prompt, num_slots // 4)
        self._generated = lengths.generated
        self._arrivals = 0
        self._rng = np.random.default_rng([seed, 0xC4A2])
        widest = int(self._prompt.max() + self._generated.max()) + tree_tokens
        # One line of slots a request, as a request-to-token table; `_running` lists lines by age.
        self._table = np.zeros((max_running, widest), np.int32)
        self._length = np.zeros(max_running, np.int64)
        self._left = np.zeros(max_running, np.int64)
        self._running: list[int] = []
        self._idle = list(range(max_running - 1, -1, -1))

    @property
    def running(self) -> int:
        """Requests that run now."""
        return len(self._running)

    @property
    def live(self) -> int:
        """Slots that hold a live row now."""
        return self.num_slots - 1 - len(self.free)

    def live_slots(self) -> Slots:
        """Return the slots of all running requests, request by request, in token order."""
        rows = np.asarray(self._running, np.int64)
        mask = np.arange(self._table.shape[1]) < self._length[rows, None]
        slots: Slots = self._table[rows][mask].astype(np.int64)
        return slots

    def requests(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return the rows of `table` of all running requests, the oldest first, and lengths."""
        rows = np.asarray(self._running, np.int64)
        return rows, self._length[rows]

    def table(self) -> NDArray[np.int32]:
        """Return a copy of the table of slots; behind a request's length stands what is stale."""
        table: NDArray[np.int32] = self._table.copy()
        return table

    def churn(self, turnover: float = 3.0) -> None:
        """Run until `turnover` times the pool's slots have been handed out."""
        goal = self.allocated + turnover * self.num_slots
        while self.allocated < goal:
            self.step()

    def step(self) -> RelocationBatch:
        """Run one decode step.

        Returns
        -------
        RelocationBatch
            The accepted-path moves of all requests; how many of them chain is counted.
        """
        self._admit()
        while self._running and len(self.free) < len(self._running) * self.tree_tokens:
            self._finish(self._running[-1])
            self.retracted += 1
        rows = np.asarray(self._running, np.int64)
        requests = len(rows)
        window = self._allocate(requests * self.tree_tokens)
        index, accepted = self._accept(requests)
        moves = accepted_path_moves(window, index, accepted, self.tree_tokens)

        taken = np.arange(index.shape[1]) <= accepted[:, None]
        request, at = np.nonzero(taken)
        kept = np.zeros((requests, self.tree_tokens), bool)
        nodes = index[taken] - request * self.tree_tokens if self.commit == "table" else at
        kept[request, nodes] = True
        windows = window.reshape(requests, self.tree_tokens)
        self._table[rows[request], self._length[rows[request]] + at] = windows[request, nodes]
        self.free.release(windows[~kept])
        self._length[rows] += accepted + 1
        self._left[rows] -= accepted + 1
        for row in rows[self._left[rows] <= 0].tolist():
            self._finish(row)

        return RelocationBatch(
            num_slots=self.num_slots,
            src=moves.src,
            dst=moves.dst,
            count=len(moves.src),
            kind=f"accepted paths, {self.free.order}",
            chained_rows=int(moves.chained.sum()),
            chained_requests=len(np.unique(moves.request[moves.chained])),
        )

    def compact(self, max_rows: int | None = None) -> RelocationBatch:
        """Move live rows from the highest slots into the lowest holes, and rewrite the tables.

        Parameters
        ----------
        max_rows : int, optional
            Budget of rows; without one the live rows end up in slots 1 to `live`.

        Returns
        -------
        RelocationBatch
            Sources are live and destinations are not, so the list is disjoint.
        """
        live = np.sort(self.live_slots())
        holes = np.sort(self.free.slots())
        pairs = min(len(live), len(holes))
        src, dst = live[::-1][:pairs], holes[:pairs]
        # Sources fall and holes rise; once they meet, nothing is left to gain.
        rows = int(np.count_nonzero(src > dst))
        if max_rows is not None:
            rows = min(rows, max_rows)
        src, dst = src[:rows], dst[:rows]
        at = np.arange(self.num_slots)
        at[src] = dst
        self._table[:] = at[self._table]
        self.free.replace(np.sort(np.concatenate([holes[rows:], src])))
        return RelocationBatch(
            num_slots=self.num_slots,
            src=src.copy(),
            dst=dst.copy(),
            count=rows,
            kind=f"compaction, {self.free.order}",
        )

    def make_contiguous(self, max_rows: int | None = None) -> RelocationBatch:
        """Lay the requests out one behind the other, the oldest first, and rewrite the tables.

        Parameters
        ----------
        max_rows : int, optional
            Budget of rows.

        Returns
        -------
        RelocationBatch
            A list that overlaps.
        """
        chains = [self._table[row, : self._length[row]] for row in self._running]
        plan = plan_contiguous(chains, self.num_slots, budget=max_rows)
        where = plan.permutation(self.num_slots)
        self._table[:] = where[self._table]
        self.free.replace(np.sort(where[self.free.slots()]))
        return RelocationBatch(
            num_slots=self.num_slots,
            src=plan.src,
            dst=plan.dst,
            count=len(plan),
            kind=f"made contiguous, {self.free.order}",
        )

    def _admit(self) -> None:
        while self._idle:
            request = self._arrivals % len(self._prompt)
            prompt = int(self._prompt[request])
            windows = (len(self._running) + 1) * self.tree_tokens
            full = self.live + prompt > self._limit and self._running
            if full or prompt + windows > len(self.free):
                return
            row = self._idle.pop()
            self._table[row, :prompt] = self._allocate(prompt)
            self._length[row] = prompt
            self._left[row] = self._generated[request]
            self._running.append(row)
            self._arrivals += 1

    def _allocate(self, number: int) -> Slots:
        self.allocated += number
        return self.free.allocate(number)

    def _accept(self, requests: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Draw one accepted path a request: global node indices, and nodes below the root.

        Any ascending list of nodes that starts with the root is a path of some tree.
        """
        depth = self._max_accepted
        ahead = self._rng.geometric(1.0 - self._skip, (requests, depth))
        nodes = np.concatenate(
            [np.zeros((requests, 1), np.int64), np.cumsum(ahead, axis=1)], axis=1
        )
        goes_on = (self._rng.random((requests, depth)) < self._acceptance) & (
            nodes[:, 1:] < self.tree_tokens
        )
        accepted = np.logical_and.accumulate(goes_on, axis=1).sum(axis=1)
        base = np.arange(requests)[:, None] * self.tree_tokens
        path = np.where(np.arange(depth + 1) <= accepted[:, None], nodes + base, -1)
        return path, accepted

    def _finish(self, row: int) -> None:
        self.free.release(self._table[row, : self._length[row]].astype(np.int64))
        self._length[row] = 0
        self._running.remove(row)
        self._idle.append(row)


def real_batches(
    num_slots: int,
    *,
    steps: int = 4,
    max_rows: int | None = None,
    turnover: float = 3.0,
    seed: int = 0,
    tree_tokens: int = 16,
) -> Iterator[RelocationBatch]:
    """Yield lists from churned pools: for each free-list order decode steps, then a compaction.

    Parameters
    ----------
    num_slots : int
        Slots of the pools.
    steps : int
        Decode steps whose accepted paths are taken from each pool.
    max_rows : int, optional
        Budget of a compaction.
    turnover : float
        How often each pool's slots are handed out before the first list.
    seed : int
        Seed of the requests and of acceptance.
    tree_tokens : int
        Nodes of a draft tree.

    Yields
    ------
    RelocationBatch
    """
    orders: tuple[FreeOrder, ...] = ("fifo", "lifo", "sorted")
    for order in orders:
        pool = ChurnedPool(num_slots, free_list=order, seed=seed, tree_tokens=tree_tokens)
        pool.churn(turnover)
        for _ in range(steps):
            yield pool.step()
        yield pool.compact(max_rows)


def _trace_file(trace: str) -> Path | None:
    file = find_data(_FOLDER, f"{trace}.csv")
    named = os.environ.get(VARIABLE)
    if file is None and named:
        raise CaseError(
            f"{VARIABLE}={named!r} holds neither {trace}.csv nor {_FOLDER}/{trace}.csv; "
            "name the folder of the Azure LLM trace, or unset the variable to draw from quantiles"
        )
    return file


def _read_trace(file: Path) -> NDArray[np.int64]:
    header = "TIMESTAMP,ContextTokens,GeneratedTokens"
    with open(file, encoding="utf-8") as lines:
        first = lines.readline().strip()
        if first != header:
            raise CaseError(f"{file}: the first line is {first!r}, not {header!r}")
        try:
            both = np.loadtxt(lines, np.int64, delimiter=",", usecols=(1, 2), ndmin=2)
        except ValueError as error:
            raise CaseError(f"{file}: not a table of request lengths: {error}") from error
    if not len(both) or both.min() < 1:
        raise CaseError(f"{file}: holds no requests, or lengths below 1")
    return both


def _draw(quantiles: tuple[int, ...], number: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Draw from the distribution with these quantiles, log-linear between them."""
    drawn = np.exp(np.interp(rng.random(number), _LEVELS, np.log(quantiles)))
    return np.rint(drawn).astype(np.int64)
