"""Who holds slots: accepted paths to commit, holders of a pool to compact, chains of live slots."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

import numpy as np
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument
from numpy.typing import NDArray

from cuverify.cases.commit import CommitBatch
from cuverify.cases.defrag import DefragBatch
from cuverify.strategies.draws import chosen, draw_edged, pair
from cuverify.strategies.verify import kv_layouts
from cuverify.workload import CommitWay

COMMIT_WAYS: tuple[CommitWay, ...] = get_args(CommitWay)

_SEEDS = st.integers(0, 2**32 - 1)
_INDEX = st.sampled_from(["int32", "int64"])


@st.composite
def commit_batches(
    draw: st.DrawFn,
    /,
    *,
    min_depth: int = 1,
    max_depth: int = 9,
    ways: Sequence[CommitWay] = COMMIT_WAYS,
    faulty: bool = False,
    **bounds: Any,
) -> CommitBatch:
    """Return a strategy for accepted paths, with the windows and tables they are committed in.

    Paths ascend from the root. Drawn often: nothing accepted, as much as the depth allows, the
    first nodes of the window. Commits by table have pages of one slot.

    Parameters
    ----------
    min_depth, max_depth : int
        Most nodes of a path, the root counted.
    ways : sequence of str
        To choose from: ``rows``, ``table``.
    faulty : bool
        Whether something is wrong with one request: its window, its number of nodes, its path, its
        row of the table or its length.
    **bounds
        Bounds of `kv_layouts`.

    Returns
    -------
    SearchStrategy of CommitBatch
    """
    pair("depth", min_depth, max_depth, 1)
    chosen("ways", ways, COMMIT_WAYS)
    way = draw(st.sampled_from(list(ways)))
    if way == "table":
        bounds = {**bounds, "page_sizes": [1]}
    layout = draw(kv_layouts(**bounds))
    rng = np.random.default_rng(draw(_SEEDS))
    depth = draw_edged(draw, min_depth, max_depth)
    batch = CommitBatch.of_layout(layout, rng, depth=depth, way=way, index=draw(_INDEX))
    return batch.spoiled(rng) if faulty else batch


@st.composite
def defrag_batches(
    draw: st.DrawFn,
    /,
    *,
    min_budget: int = 1,
    max_budget: int | None = None,
    faulty: bool = False,
    **bounds: Any,
) -> DefragBatch:
    """Return a strategy for holders of a pool of single slots: request rows, windows, and a list.

    Parameters
    ----------
    min_budget, max_budget : int
        Most rows to move; all slots of the pool if there is no maximum.
    faulty : bool
        Whether something is wrong with one holder: a slot, a length, a row.
    **bounds
        Bounds of `kv_layouts`.

    Returns
    -------
    SearchStrategy of DefragBatch
    """
    pair("budget", min_budget, min_budget if max_budget is None else max_budget, 1)
    layout = draw(kv_layouts(**{**bounds, "page_sizes": [1]}))
    rng = np.random.default_rng(draw(_SEEDS))
    most = max(min_budget, layout.num_slots) if max_budget is None else max_budget
    budget = draw_edged(draw, min_budget, most)
    batch = DefragBatch.of_layout(layout, rng, budget=budget, index=draw(_INDEX))
    return batch.spoiled(rng) if faulty else batch


@st.composite
def slot_chains(
    draw: st.DrawFn, /, *, min_slots: int = 2, max_slots: int = 40, max_chains: int = 5
) -> tuple[int, list[NDArray[np.int64]], NDArray[np.int64]]:
    """Return a strategy for what a planner sees: a pool, chains of live slots, and pinned slots.

    Slot 0 is in no chain. Drawn often: chains that lie in order, a pool without a free slot,
    nothing pinned. Pinned slots may be free.

    Parameters
    ----------
    min_slots, max_slots : int
        Slots of the pool.
    max_chains : int
        Chains, empty ones among them.

    Returns
    -------
    SearchStrategy of (int, list of ndarray, ndarray)
        Slots of the pool, chains, pinned slots.
    """
    pair("slots", min_slots, max_slots, 2)
    if max_chains < 1:
        raise InvalidArgument(f"max_chains={max_chains!r} must be at least 1")
    slots = draw_edged(draw, min_slots, max_slots)
    order = np.arange(1, slots)
    if draw(st.booleans()):
        order = np.random.default_rng(draw(_SEEDS)).permutation(order)
    live = order[: draw_edged(draw, 0, len(order))]
    cuts = sorted(draw(st.lists(st.integers(0, len(live)), max_size=max_chains - 1)))
    pinned = order[:: draw(st.integers(2, 9))] if draw(st.booleans()) else order[:0]
    return slots, np.split(live, cuts), pinned
