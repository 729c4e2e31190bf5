"""Batches to verify: where their tokens lie in the pool, and what attention reads of them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, get_args

from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from cuverify.kv_layout import PAGE_SIZES, KvLayout, Placement
from cuverify.strategies.draws import chosen, draw_edged, pair, pick, whole
from cuverify.strategies.trees import TREE_EDGES, TREE_SHAPES, TreeShape, draw_tree
from cuverify.verify_batch import (
    MAX_TREE_TOKENS,
    SM_SCALE,
    DraftSource,
    ElementType,
    IndexType,
    Masks,
    VerifyBatch,
)

PLACEMENTS: tuple[Placement, ...] = get_args(Placement)

SEQ_LEN_EDGES = tuple(
    sorted(
        {
            0,
            1,
            *(tile * by + off for tile in (16, 64, 256) for by in (1, 2, 4) for off in (-1, 0, 1)),
        }
    )
)
"""Prefix lengths around tiles of KV rows, and around where a plan may split."""

ELEMENTS: tuple[tuple[ElementType, float | None], ...] = (
    ("bf16", None),
    ("fp16", None),
    ("bf16", 1.0),
    ("bf16", 0.07),
)
"""The type of queries, and the scale where the pool holds codes of e4m3."""

_SEEDS = st.integers(0, 2**32 - 1)
_BOOLEANS = st.booleans()


@st.composite
def kv_layouts(
    draw: st.DrawFn,
    /,
    *,
    min_requests: int = 1,
    max_requests: int = 4,
    min_seq_len: int = 0,
    max_seq_len: int = 160,
    min_tree_tokens: int = 1,
    max_tree_tokens: int = 16,
    max_padded: int = 2,
    num_slots: int | None = None,
    page_sizes: Sequence[int] = PAGE_SIZES,
    placements: Sequence[Placement] = PLACEMENTS,
    allow_shared_prefix: bool = True,
    allow_stale_tail: bool = True,
    seq_len_edges: Sequence[int] = SEQ_LEN_EDGES,
) -> KvLayout:
    """Return a strategy for layouts: requests with prefixes and drafts, placed in a pool.

    Drawn often: the shortest and the longest prefix, 0, 1, and lengths around multiples of 16, 64
    and 256; the fewest and the most drafts, and the sizes at which `draft_trees` has edges;
    requests of one size; a pool without a free slot. Shrinks to one request whose tokens lie in
    order in a pool that just holds them, pages of one slot, nothing stale, shared or padded.

    Parameters
    ----------
    min_requests, max_requests : int
        Real requests.
    min_seq_len, max_seq_len : int
        Tokens of each prefix, the drafts not among them.
    min_tree_tokens, max_tree_tokens : int
        Drafts of each request.
    max_padded : int
        Most padded requests behind the real ones.
    num_slots : int, optional
        Slots of every pool; it must hold the largest batch. Drawn if absent.
    page_sizes : sequence of int
        To choose from: 1, 16, 64.
    placements : sequence of str
        To choose from: ``contiguous``, ``scattered``, ``sorted``, ``holes``.
    allow_shared_prefix, allow_stale_tail : bool
        Whether prefixes begin with common slots, and tables hold stale numbers.
    seq_len_edges : sequence of int
        Prefix lengths that are drawn often.

    Returns
    -------
    SearchStrategy of KvLayout

    Examples
    --------
    >>> from hypothesis import find
    >>> layout = find(kv_layouts(), lambda layout: layout.seq_lens[0] > 1)
    >>> layout.kv_indices().tolist(), layout.out_cache_loc.tolist(), layout.num_slots
    ([1, 2], [3], 4)
    """
    return _draw_layout(
        draw,
        min_requests=min_requests,
        max_requests=max_requests,
        min_seq_len=min_seq_len,
        max_seq_len=max_seq_len,
        min_tree_tokens=min_tree_tokens,
        max_tree_tokens=max_tree_tokens,
        max_padded=max_padded,
        num_slots=num_slots,
        page_sizes=page_sizes,
        placements=placements,
        allow_shared_prefix=allow_shared_prefix,
        allow_stale_tail=allow_stale_tail,
        seq_len_edges=seq_len_edges,
    )


@st.composite
def verify_batches(
    draw: st.DrawFn,
    /,
    *,
    min_requests: int = 1,
    max_requests: int = 4,
    min_seq_len: int = 0,
    max_seq_len: int = 160,
    min_tree_tokens: int = 1,
    max_tree_tokens: int = 16,
    max_padded: int = 2,
    num_slots: int | None = None,
    page_sizes: Sequence[int] = (1,),
    placements: Sequence[Placement] = PLACEMENTS,
    shapes: Sequence[TreeShape] = TREE_SHAPES,
    heads: Sequence[int] = (8, 16),
    widths: Sequence[tuple[int, int]] = ((64, 16), (16, 16), (128, 32)),
    spreads: Sequence[float] = (1.0, 0.0, 3.0, 8.0),
    draft_sources: Sequence[DraftSource] = get_args(DraftSource),
    index_dtypes: Sequence[IndexType] = get_args(IndexType),
    masks: Sequence[Masks] = get_args(Masks),
    row_gaps: Sequence[int] = (0, 8, 56),
    elements: Sequence[tuple[ElementType, float | None]] = ELEMENTS[:1],
    seq_len_edges: Sequence[int] = SEQ_LEN_EDGES,
) -> VerifyBatch:
    """Return a strategy for batches whose draft trees are to be verified.

    Layouts and trees are drawn as `kv_layouts` and `draft_trees` draw them. Shrinks to one request
    with a tree of one node in the simplest layout, and of every sequence to what is named first.

    Parameters
    ----------
    min_requests, max_requests, min_seq_len, max_seq_len, min_tree_tokens, max_tree_tokens : int
        As in `kv_layouts`; trees up to 256.
    max_padded, num_slots, page_sizes, placements, seq_len_edges
        As in `kv_layouts`.
    shapes : sequence of str
        As in `draft_trees`.
    heads, widths, spreads, draft_sources, index_dtypes, masks, row_gaps : sequence
        To choose from, each as `cuverify.verify_batch.VerifyBatch` has it; a width is the pair
        (latent, rope).
    elements : sequence of tuple
        Pairs (dtype, kv_scale) to choose from, such as those of `ELEMENTS`; bf16 alone if absent.
        Gaps become multiples of 16 beside codes.

    Returns
    -------
    SearchStrategy of VerifyBatch

    Examples
    --------
    >>> from hypothesis import find
    >>> batch = find(verify_batches(), lambda batch: True)
    >>> batch.num_requests, batch.trees[0].num_tokens, batch.layout.seq_lens.tolist()
    (1, 1, [0])
    """
    pair("tree_tokens", max_tree_tokens, MAX_TREE_TOKENS, 1)
    chosen("shapes", shapes, TREE_SHAPES)
    chosen("draft_sources", draft_sources, get_args(DraftSource))
    chosen("index_dtypes", index_dtypes, get_args(IndexType))
    chosen("masks", masks, get_args(Masks))
    for name, values in (
        ("heads", heads),
        ("spreads", spreads),
        ("row_gaps", row_gaps),
        ("elements", elements),
    ):
        if not values:
            raise InvalidArgument(f"{name}={values!r} must hold something to choose from")
    if not widths or any(columns <= 0 or columns % 16 for width in widths for columns in width):
        raise InvalidArgument(f"widths={widths!r} must be pairs of positive multiples of 16")
    layout = _draw_layout(
        draw,
        min_requests=min_requests,
        max_requests=max_requests,
        min_seq_len=min_seq_len,
        max_seq_len=max_seq_len,
        min_tree_tokens=min_tree_tokens,
        max_tree_tokens=max_tree_tokens,
        max_padded=max_padded,
        num_slots=num_slots,
        page_sizes=page_sizes,
        placements=placements,
        allow_shared_prefix=True,
        allow_stale_tail=True,
        seq_len_edges=seq_len_edges,
    )
    latent, rope = pick(draw, widths)
    trees = tuple(draw_tree(draw, nodes, shapes) for nodes in layout.tree_tokens.tolist())
    drawn: dict[str, Any] = {
        "heads": pick(draw, heads),
        "seed": draw(_SEEDS),
        "spread": pick(draw, spreads),
        "draft_source": pick(draw, draft_sources),
        "index_dtype": pick(draw, index_dtypes),
        "masks": pick(draw, masks),
    }
    row_gap, (dtype, kv_scale) = pick(draw, row_gaps), pick(draw, elements)
    return VerifyBatch(
        layout,
        trees,
        latent=latent,
        rope=rope,
        sm_scale=SM_SCALE,
        row_gap=row_gap if kv_scale is None else -(-row_gap // 16) * 16,
        dtype=dtype,
        kv_scale=kv_scale,
        **drawn,
    )


def _draw_layout(
    draw: st.DrawFn,
    *,
    min_requests: int,
    max_requests: int,
    min_seq_len: int,
    max_seq_len: int,
    min_tree_tokens: int,
    max_tree_tokens: int,
    max_padded: int,
    num_slots: int | None,
    page_sizes: Sequence[int],
    placements: Sequence[Placement],
    allow_shared_prefix: bool,
    allow_stale_tail: bool,
    seq_len_edges: Sequence[int],
) -> KvLayout:
    pair("requests", min_requests, max_requests, 1)
    pair("seq_len", min_seq_len, max_seq_len, 0)
    pair("tree_tokens", min_tree_tokens, max_tree_tokens, 1)
    if max_padded < 0:
        raise InvalidArgument(f"max_padded={max_padded!r} must be at least 0")
    chosen("page_sizes", page_sizes, PAGE_SIZES)
    chosen("placements", placements, PLACEMENTS)
    if num_slots is not None:
        _fits(num_slots, max_requests, max_seq_len + max_tree_tokens, page_sizes)

    def nodes() -> int:
        return draw_edged(draw, min_tree_tokens, max_tree_tokens, TREE_EDGES)

    requests = draw_edged(draw, min_requests, max_requests) if max_requests > 1 else 1
    padded = draw(whole(max_padded)) if max_padded else 0
    edges = tuple(seq_len_edges)
    seq_lens = [draw_edged(draw, min_seq_len, max_seq_len, edges) for _ in range(requests)]
    # a step has trees of one size, or one for each request
    trees = [nodes()]
    others = requests + padded - 1
    trees += [nodes() for _ in range(others)] if others and draw(_BOOLEANS) else trees * others
    page_size = pick(draw, page_sizes)
    shared = 0
    if allow_shared_prefix and requests > 1 and min(seq_lens) >= page_size:
        shared = page_size * draw_edged(draw, 0, min(seq_lens) // page_size)
    more: dict[str, Any] = {}
    spare = 0
    if num_slots is not None:
        more["num_slots"] = num_slots
    else:
        spare = draw(whole(3))
    if spare:
        totals = [length + tree for length, tree in zip(seq_lens, trees, strict=False)]
        own = sum(-(-total // page_size) - shared // page_size for total in totals)
        more["num_slots"] = page_size * (1 + own + shared // page_size + spare - 1)
    return KvLayout.build(
        seq_lens=seq_lens,
        tree_tokens=trees,
        page_size=page_size,
        placement=pick(draw, placements),
        shared_prefix=shared,
        padded=padded,
        stale_tail=allow_stale_tail and draw(_BOOLEANS),
        rng=draw(_SEEDS),
        **more,
    )


def _fits(num_slots: int, requests: int, tokens: int, page_sizes: Sequence[int]) -> None:
    """Refuse a pool that the largest batch may not fit into."""
    for size in page_sizes:
        needed = size * (1 + requests * -(-tokens // size))
        if num_slots % size or num_slots < needed:
            raise InvalidArgument(
                f"num_slots={num_slots!r} must be a multiple of {size}, at least {needed}: "
                f"{requests} requests of {tokens} tokens in pages of {size}"
            )
