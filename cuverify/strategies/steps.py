"""Drafts of a batch, and whole decode steps of sizes that the host lane runs in a moment."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from hypothesis import strategies as st

from cuverify.draft_batch import DRAFT_KINDS, DraftBatch, DraftKind
from cuverify.step import StepSizes
from cuverify.step_workload import StepBatch, small_sizes
from cuverify.strategies.draws import chosen, draw_edged, pair, pick, whole
from cuverify.strategies.trees import TREE_EDGES

_SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def draft_batches(
    draw: st.DrawFn,
    /,
    *,
    max_requests: int = 4,
    max_depth: int = 15,
    max_ranks: int = 16,
    min_tokens: int = 1,
    max_tokens: int = 65,
    kinds: Sequence[DraftKind] = DRAFT_KINDS,
) -> DraftBatch:
    """Return a strategy for what `tree_build` reads.

    Shrinks to one request, few depths, ranks and nodes, and the kind that is named first; the
    numbers come from a seed.

    Parameters
    ----------
    max_requests, max_depth, max_ranks : int
        At least 1; depths up to 32 and ranks up to 64 are taken by the kernel.
    min_tokens, max_tokens : int
        Nodes of a request, the root included; up to 1024.
    kinds : sequence of str
        See `DraftBatch.draw`.

    Returns
    -------
    SearchStrategy of DraftBatch
    """
    for name, most in (
        ("requests", max_requests), ("depth", max_depth), ("ranks", max_ranks)
    ):  # fmt: skip
        pair(name, 1, most, 1)
    pair("tokens", min_tokens, max_tokens, 1)
    chosen("kinds", kinds, DRAFT_KINDS)
    return DraftBatch.draw(
        np.random.default_rng(draw(_SEEDS)),
        batch=1 + draw(whole(max_requests - 1)),
        depth=draw_edged(draw, 1, max_depth),
        k=draw_edged(draw, 1, max_ranks),
        num_tokens=draw_edged(draw, min_tokens, max_tokens, TREE_EDGES),
        kind=pick(draw, kinds),
        index=pick(draw, ("int64", "int32")),
        longest=300,
    )


@st.composite
def decode_steps(
    draw: st.DrawFn,
    /,
    *,
    max_requests: int = 3,
    max_tokens: int = 17,
    max_layers: int = 2,
    max_seq_len: int = 80,
    steps: int = 1,
    kinds: Sequence[DraftKind] = DRAFT_KINDS,
) -> tuple[StepSizes, list[StepBatch]]:
    """Return a strategy for decode steps of one size, with padded requests among them.

    Parameters
    ----------
    max_requests, max_tokens, max_layers : int
        Requests, nodes of each tree, layers of attention.
    max_seq_len : int
        Longest prefix, up to 100.
    steps : int
        Batches for the same buffers.
    kinds : sequence of str
        Of the drafts; see `DraftBatch.draw`.

    Returns
    -------
    SearchStrategy of (StepSizes, list of StepBatch)
    """
    for name, most in (
        ("requests", max_requests), ("tokens", max_tokens), ("layers", max_layers)
    ):  # fmt: skip
        pair(name, 1, most, 1)
    pair("steps", 1, steps, 1)
    chosen("kinds", kinds, DRAFT_KINDS)
    sizes = small_sizes(
        requests=1 + draw(whole(max_requests - 1)),
        nodes=draw_edged(draw, 1, max_tokens, TREE_EDGES),
        layers=1 + draw(whole(max_layers - 1)),
    )
    rng = np.random.default_rng(draw(_SEEDS))
    batches = [
        StepBatch.draw(
            rng,
            sizes,
            longest=max_seq_len,
            padded=draw(whole(sizes.requests - 1)),
            kind=pick(draw, kinds),
        )
        for _ in range(steps)
    ]
    return sizes, batches
