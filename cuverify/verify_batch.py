"""A batch of requests whose draft trees are to be verified: everything that attention reads.

A `VerifyBatch` says what the inputs are like (layout, trees, sizes, a seed); its methods make the
arrays, the same ones at every call. The arrays are made so that a wrong kernel shows:

- Slots that nobody may read hold NaN, and so do the drafts' slots where the drafts come apart.
- Drafts weigh about as much as the whole prefix, and so do a few rows of the prefix, its ends among
  them. Without that, a wrong mask bit or a lost row would drown in a long prefix. (Where scores
  spread by much more than 1, some rows drown all the same.)
- Visibility words hold garbage where a request has no nodes, and everywhere where it is padding.
"""

from __future__ import annotations

import functools
import statistics
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from cuverify.errors import ArgumentError
from cuverify.kv_layout import KvLayout
from cuverify.narrow import NAN, Narrow, narrow
from cuverify.tree import DraftTree

DraftSource = Literal["slots", "separate"]
IndexType = Literal["int32", "int64"]
Masks = Literal["trees", "any"]
ElementType = Literal["bf16", "fp16"]

MAX_TREE_TOKENS = 256
"""Most nodes of a tree that attention takes, several row tiles wide."""

SM_SCALE = 192**-0.5 * (0.1 * np.log(32.0) + 1.0) ** 2
"""Of Kimi K2: heads of 192 before absorption, and YaRN's factor for 32 times the context."""

_LEVELS = 4096  # of the normal distribution that values are drawn from
_PIECE = 1 << 15
_PIECE_ROWS = 4096
_LANDMARKS = 16  # rows of a prefix that together weigh as much as all others
# What the last column of every query holds; the keys' last column then moves scores at will.
_HANDLE = 8.0


@dataclass(frozen=True, eq=False, repr=False)
class VerifyBatch:
    """One batch for verify attention: absorbed MLA, one KV head that all query heads share.

    Parameters
    ----------
    layout : KvLayout
        Slots, lengths and padding.
    trees : sequence of DraftTree, B of them
        A tree for each request, padded ones included, of as many nodes as the layout says, up to
        256.
    heads : int
        Query heads of one rank, H: a multiple of 8.
    latent, rope : int
        Columns of a KV row: the first `latent` are also its value. Multiples of 16.
    sm_scale : float
        Factor of the scores. Positive.
    seed : int
        Of all values.
    spread : float
        Standard deviation of the scores that noise gives, from 0 (all rows weigh the same).
    draft_source : {"slots", "separate"}
        Where the drafts' KV rows are: in the pool, or in a tensor of their own.
    index_dtype : {"int32", "int64"}
        Of `kv_indices`.
    masks : {"trees", "any"}
        Nodes see themselves and their ancestors, or any nodes at all, themselves perhaps not
        among them.
    row_gap : int
        Unused elements behind each row of the pool and of the drafts, a multiple of 8 (of 16 beside
        codes).
    dtype : {"bf16", "fp16"}
        Of the queries, of drafts that come apart, and of the pool if `kv_scale` is absent.
    kv_scale : float, optional
        The pool holds codes of e4m3, and this is what a code of 1 means. From 0.03 on the values
        that are drawn have codes. With bf16 queries only.
    kind : str
        Where the batch comes from.

    Raises
    ------
    ArgumentError
        Something does not fit together.

    Examples
    --------
    >>> layout = KvLayout.build(seq_lens=[5], tree_tokens=[2])
    >>> batch = VerifyBatch(layout, [DraftTree.chain(2)], latent=64, rope=16)
    >>> batch.q().shape, batch.pool().shape, (batch.visible() & 3).tolist()
    ((2, 8, 80), (8, 80), [[1], [3]])
    """

    layout: KvLayout
    trees: tuple[DraftTree, ...]
    heads: int = 8
    latent: int = 512
    rope: int = 64
    sm_scale: float = SM_SCALE
    seed: int = 0
    spread: float = 1.0
    draft_source: DraftSource = "slots"
    index_dtype: IndexType = "int32"
    masks: Masks = "trees"
    row_gap: int = 0
    dtype: ElementType = "bf16"
    kv_scale: float | None = None
    kind: str = "drawn"

    def __post_init__(self) -> None:
        object.__setattr__(self, "trees", tuple(self.trees))
        requests = self.layout.num_requests
        if len(self.trees) != requests:
            raise ArgumentError("trees", len(self.trees), f"the layout has {requests} requests")
        for request, tree in enumerate(self.trees):
            wanted = int(self.layout.tree_tokens[request])
            if tree.num_tokens != wanted:
                raise ArgumentError(
                    "trees", tree, f"the layout has {wanted} drafts for request {request}"
                )
            if wanted > MAX_TREE_TOKENS:
                raise ArgumentError(
                    "trees", tree, f"attention takes trees of up to {MAX_TREE_TOKENS} nodes"
                )
        if self.heads < 8 or self.heads % 8:
            raise ArgumentError("heads", self.heads, "must be a multiple of 8")
        for name, columns in (("latent", self.latent), ("rope", self.rope)):
            if columns < 16 or columns % 16:
                raise ArgumentError(name, columns, "must be a multiple of 16")
        if not 0 < self.sm_scale < np.inf:
            raise ArgumentError("sm_scale", self.sm_scale, "must be positive")
        if not 0 <= self.spread < np.inf:
            raise ArgumentError("spread", self.spread, "must be at least 0")
        if self.row_gap < 0 or self.row_gap % 8:
            raise ArgumentError("row_gap", self.row_gap, "must be a multiple of 8, at least 0")
        if self.kv_scale is not None:
            if not 0 < self.kv_scale < np.inf:
                raise ArgumentError("kv_scale", self.kv_scale, "must be positive")
            if self.dtype != "bf16":
                raise ArgumentError("kv_scale", self.kv_scale, "pools of codes go with bf16")
            if self.row_gap % 16:
                raise ArgumentError("row_gap", self.row_gap, "must be a multiple of 16 bytes")
        for name, value, known in (
            ("dtype", self.dtype, get_args(ElementType)),
            ("draft_source", self.draft_source, get_args(DraftSource)),
            ("index_dtype", self.index_dtype, get_args(IndexType)),
            ("masks", self.masks, get_args(Masks)),
        ):
            if value not in known:
                raise ArgumentError(name, value, f"must be one of {known}")

    # Sizes

    @property
    def num_requests(self) -> int:
        """B, padded requests included."""
        return self.layout.num_requests

    @property
    def num_tokens(self) -> int:
        """N, the tree tokens of all requests."""
        return self.layout.num_tokens

    @property
    def width(self) -> int:
        """D, the columns of a KV row."""
        return self.latent + self.rope

    @property
    def max_tree_tokens(self) -> int:
        """T of the widest tree; 0 where there is no request."""
        return int(self.layout.tree_tokens.max(initial=0))

    @property
    def num_words(self) -> int:
        """W, the visibility words of a row."""
        return max(1, -(-self.max_tree_tokens // 64))

    @property
    def pairs(self) -> int:
        """Query rows times KV rows, over all requests and heads."""
        trees, lens = self.layout.tree_tokens, self.layout.seq_lens
        return int(self.heads * (trees * (lens + trees)).sum())

    @property
    def flops(self) -> int:
        """Floating-point operations of both products, hidden pairs included."""
        return 2 * self.pairs * (self.width + self.latent)

    @property
    def pool_dtype(self) -> Narrow:
        """What the pool's rows are made of."""
        return self.dtype if self.kv_scale is None else "fp8_e4m3"

    # Arrays: bf16 as bits (uint16), fp16 as float16, codes of e4m3 as uint8

    def q(self) -> NDArray[Any]:
        """Return the queries: shape (N, H, D), the latent part first."""
        # the handle's column is no noise
        scale = self.spread / (self.sm_scale * np.sqrt(self.width - 1))
        shape = (self.num_tokens, self.heads, self.width)
        q = _noise(self._rng(0), shape, scale, self.dtype)
        q[..., -1] = narrow(_HANDLE, self.dtype)
        return q

    def pool(self) -> NDArray[Any]:
        """Return the pool's rows: shape (slots, D), NaN where nobody may read.

        Drafts of real requests are in it where they come from their slots.
        """
        layout, in_slots = self.layout, self.draft_source == "slots"
        lift = np.zeros(layout.num_slots, np.float32)
        read = np.zeros(layout.num_slots, np.bool_)
        read[0] = layout.padded > 0
        for request in range(layout.num_real):
            slots = layout.prefix_slots(request)
            read[slots] = True
            if len(slots):
                marks = self._landmarks(request)
                lift[slots[marks]] = max(0.0, np.log(len(slots) / len(marks)))
        if in_slots:
            real = layout.out_cache_loc[: self._real_tokens]
            read[real] = True
            lift[real] = self._draft_lift()[: self._real_tokens]
        kind, unit = self.pool_dtype, self.kv_scale or 1.0
        pool = np.full((layout.num_slots, self.width), NAN[kind])
        rows = np.flatnonzero(read)
        rng = self._rng(1)
        for begin in range(0, len(rows), _PIECE_ROWS):  # a large pool is written once, not twice
            some = rows[begin : begin + _PIECE_ROWS]
            content = _noise(rng, (len(some), self.width), 1.0 / unit, kind)
            content[:, -1] = narrow(self._handle_of(lift[some]) / np.float32(unit), kind)
            pool[some] = content
        return pool

    def draft_kv(self) -> NDArray[Any]:
        """Return the KV rows of the drafts: shape (N, D).

        With ``draft_source="slots"`` what the pool holds for them: the dummy row where padded.
        """
        if self.draft_source == "slots":
            return self.pool()[self.layout.out_cache_loc]
        rows = _noise(self._rng(2), (self.num_tokens, self.width), 1.0, self.dtype)
        rows[:, -1] = narrow(self._handle_of(self._draft_lift()), self.dtype)
        return rows

    def visible(self, words: int | None = None) -> NDArray[np.uint64]:
        """Return who sees whom: uint64, shape (N, W), bit k of word w for node 64 w + k.

        Bits of nodes that a request does not have are noise, and all bits of padded requests.

        Parameters
        ----------
        words : int, optional
            W, at least `num_words`, which it is if absent.
        """
        words = self.num_words if words is None else words
        if words < self.num_words:
            raise ArgumentError("words", words, f"the widest tree needs {self.num_words}")
        noise = self._rng(3).integers(0, 2**64, (self.num_tokens, words), np.uint64)
        if self.masks == "any":
            return noise
        first = 0
        for tree in self.trees[: self.layout.num_real]:
            nodes = tree.num_tokens
            rows = noise[first : first + nodes]
            full, rest = divmod(nodes, 64)
            rows[:, :full] = 0
            if rest:
                rows[:, full] &= ~np.uint64((1 << rest) - 1)
            rows[:, : tree.num_words] |= tree.visibility()
            first += nodes
        return noise

    def oracle_arguments(self) -> dict[str, Any]:
        """Return the keywords of `cuverify.reference.verify_attention.verify_attention`."""
        drafts: dict[str, Any] = (
            {"draft_slots": self.layout.out_cache_loc}
            if self.draft_source == "slots"
            else {"draft_kv": self.draft_kv()}
        )
        return {
            "q": self.q(),
            "pool": self.pool(),
            "latent": self.latent,
            "sm_scale": self.sm_scale,
            "qo_indptr": self.layout.qo_indptr(),
            "kv_indptr": self.layout.kv_indptr(),
            "kv_indices": self.layout.kv_indices(self.index_dtype),
            "visible": self.visible(),
            **({} if self.kv_scale is None else {"kv_scale": self.kv_scale}),
            **drafts,
        }

    # Others like it

    def with_requests(self, requests: int, *, tree_tokens: int = 1) -> VerifyBatch:
        """Return the batch with padded requests behind it, as a captured batch size has them.

        Parameters
        ----------
        requests : int
            B of the result, at least the present one.
        tree_tokens : int
            Drafts of each request that is added.

        Returns
        -------
        VerifyBatch

        Raises
        ------
        ArgumentError
            There are more requests already.
        """
        more = requests - self.num_requests
        if more < 0:
            raise ArgumentError("requests", requests, f"the batch has {self.num_requests}")
        if not more:
            return self
        old = self.layout
        layout = replace(
            old,
            req_pool_indices=np.concatenate([old.req_pool_indices, np.zeros(more, np.int64)]),
            seq_lens=np.concatenate([old.seq_lens, np.ones(more, np.int64)]),
            tree_tokens=np.concatenate([old.tree_tokens, np.full(more, tree_tokens)]),
            out_cache_loc=np.concatenate([old.out_cache_loc, np.zeros(more * tree_tokens, int)]),
            padded=old.padded + more,
        )
        trees = (*self.trees, *[DraftTree.chain(tree_tokens)] * more)
        return replace(self, layout=layout, trees=trees)

    def __repr__(self) -> str:
        layout = self.layout

        def short(values: NDArray[np.int64]) -> str:
            shown = ", ".join(map(str, values[:6].tolist()))
            return f"[{shown}{', ...' if len(values) > 6 else ''}]"

        paddings = f", {layout.padded} of them padded" if layout.padded else ""
        trees = ", ".join(repr(tree) for tree in self.trees[:2])
        more = ", ..." if len(self.trees) > 2 else ""
        return (
            f"VerifyBatch({self.kind}: {self.num_requests} requests{paddings}, "
            f"seq_lens={short(layout.seq_lens)}, trees=[{trees}{more}], heads={self.heads}, "
            f"latent={self.latent}, rope={self.rope}, num_slots={layout.num_slots}, "
            f"page_size={layout.page_size}, spread={self.spread:g}, seed={self.seed}, "
            f"drafts from {self.draft_source}, masks of {self.masks}, {self.index_dtype}"
            f"{f', row_gap={self.row_gap}' if self.row_gap else ''}"
            f"{f', {self.dtype}' if self.dtype != 'bf16' else ''}"
            f"{f', kv_scale={self.kv_scale:g}' if self.kv_scale is not None else ''})"
        )

    @property
    def _real_tokens(self) -> int:
        return int(self.layout.tree_tokens[: self.layout.num_real].sum())

    def _rng(self, what: int) -> np.random.Generator:
        return np.random.default_rng([self.seed, what])

    def _landmarks(self, request: int) -> NDArray[np.int64]:
        """Return the tokens of a prefix that weigh more: both ends, and neighbours of rounds."""
        length = int(self.layout.seq_lens[request])
        if length <= _LANDMARKS:
            return np.arange(length)
        inside = self._rng(4 + request).integers(1, (length - 1) // 16 + 1, 6) * 16
        return np.unique(np.concatenate([[0, 1, length - 2, length - 1], inside, inside - 1]))

    def _draft_lift(self) -> NDArray[np.float32]:
        """Return what is added to the scores of each draft: they weigh like their prefix."""
        lens, trees = self.layout.seq_lens, self.layout.tree_tokens
        lift = np.log(np.maximum(lens / trees, 1.0)).astype(np.float32)
        return np.repeat(lift, trees)

    def _handle_of(self, lift: NDArray[np.float32]) -> NDArray[np.float32]:
        """Return what a key's last column holds so that its scores grow by `lift`."""
        return np.asarray(lift / np.float32(_HANDLE * self.sm_scale), np.float32)


def _noise(
    rng: np.random.Generator, shape: tuple[int, ...], scale: float, kind: Narrow
) -> NDArray[Any]:
    """Return normal noise of a type: random bits look their value up in a table."""
    table = _levels(float(scale), kind)
    values = np.empty(shape, table.dtype)
    flat = values.reshape(-1)
    bits = rng.integers(0, 2**64, -(-flat.size // 4), np.uint64).view(np.uint16)
    # in pieces: numpy widens the indices to 64 bits first, which should not leave the cache
    for begin in range(0, flat.size, _PIECE):
        piece = flat[begin : begin + _PIECE]
        level = bits[begin : begin + len(piece)] % np.uint16(_LEVELS)
        np.take(table, level, out=piece, mode="clip")
    return values


@functools.lru_cache(maxsize=256)
def _levels(scale: float, kind: Narrow) -> NDArray[Any]:
    return narrow(_quantiles() * np.float32(scale), kind)


@functools.cache
def _quantiles() -> NDArray[np.float32]:
    normal = statistics.NormalDist()
    middle = [(level + 0.5) / _LEVELS for level in range(_LEVELS)]
    return np.array([normal.inv_cdf(share) for share in middle], np.float32)
