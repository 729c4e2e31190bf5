"""The batches of a contract run: which graph, how many requests, how long, padded with what.

Largest graph first; then every smaller batch in every graph, shrinking and growing again, the
graphs in turn; then prefixes at the maximum; then one batch behind other paddings; the first batch
again at the end. Lengths, slots and trees are others each time.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from cuverify.errors import ArgumentError
from cuverify.gqa_batch import HEAD_DIM, KEY_WIDTH, GqaBatch
from cuverify.gqa_batch import SM_SCALE as GQA_SM_SCALE
from cuverify.kv_layout import KvLayout
from cuverify.narrow import NAN, Narrow, narrow
from cuverify.tree import DraftTree
from cuverify.verify_batch import SM_SCALE, ElementType, VerifyBatch

Lengths = Literal["mixed", "maximum"]
Padding = Literal["numbers", "nan"]

CAPTURED = (1, 2, 4, 8, 16, 32)
"""Batch sizes that are captured unless said otherwise."""

_SPARE_ROWS = 4  # of the table: row 0, and rows of no request
_SPARE_COLUMNS = 17
_VOCABULARY = 129_280
# lengths where kernels change their ways
_EDGES = (1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129)


@dataclass(frozen=True)
class Shape:
    """The sizes of a contract run.

    Parameters
    ----------
    captured : tuple of int
        Batch sizes that get a graph.
    draft_tokens : int
        n, nodes of every tree.
    max_context_len : int
        Most tokens of a prefix.
    heads, latent, rope : int
        See `cuverify.verify_batch.VerifyBatch`.
    pool : {"bf16", "fp16", "fp8_e4m3"}
        What the pool holds; all else is of that type, too, but bf16 beside codes.
    kv_heads : int, optional
        KV heads whose keys and values are apart, bf16, 128 columns each; `latent` and `rope` do not
        matter then. Latent rows if absent.

    Raises
    ------
    ArgumentError
        No size, or one below 1.
    """

    captured: tuple[int, ...] = CAPTURED
    draft_tokens: int = 9
    max_context_len: int = 200
    heads: int = 8
    latent: int = 512
    rope: int = 64
    pool: Narrow = "bf16"
    kv_heads: int | None = None

    def __post_init__(self) -> None:
        if not self.captured or min(self.captured) < 1:
            raise ArgumentError("captured", self.captured, "wants batch sizes of at least 1")
        for name in ("draft_tokens", "max_context_len"):
            if getattr(self, name) < 1:
                raise ArgumentError(name, getattr(self, name), "must be at least 1")
        if self.kv_heads is not None:
            if self.kv_heads < 1 or self.heads % self.kv_heads:
                raise ArgumentError("kv_heads", self.kv_heads, f"do not divide {self.heads} heads")
            if self.pool != "bf16":
                raise ArgumentError("pool", self.pool, "keys and values that are apart are bf16")

    @property
    def sm_scale(self) -> float:
        """Factor of the scores."""
        return float(SM_SCALE if self.kv_heads is None else GQA_SM_SCALE)

    @property
    def row(self) -> tuple[int, int]:
        """Heads and columns of a row of the pool: of a key, where values are apart."""
        return (1, self.latent + self.rope) if self.kv_heads is None else (self.kv_heads, HEAD_DIM)

    @property
    def columns(self) -> int:
        """Columns of an output."""
        return self.latent if self.kv_heads is None else HEAD_DIM

    @property
    def pools(self) -> tuple[str, ...]:
        """Names of what a layer keeps of its tokens."""
        return ("kv_buffer",) if self.kv_heads is None else ("k_buffer", "v_buffer")

    @property
    def fresh(self) -> tuple[str, ...]:
        """Names of the drafts' rows, which are not in a pool yet, in the order of `pools`."""
        return ("k",) if self.kv_heads is None else ("k", "v")

    @property
    def element(self) -> ElementType:
        """What queries, drafts' rows and outputs are made of."""
        return "fp16" if self.pool == "fp16" else "bf16"

    @property
    def max_bs(self) -> int:
        """Requests of the largest graph."""
        return max(self.captured)

    @property
    def max_tokens(self) -> int:
        """Draft tokens of the largest graph."""
        return self.max_bs * self.draft_tokens

    @property
    def num_slots(self) -> int:
        """Slots of the pool: the dummy, and a quarter more than the largest batch takes."""
        return 1 + self.max_bs * (self.max_context_len + self.draft_tokens) * 5 // 4

    @property
    def table(self) -> tuple[int, int]:
        """Rows and columns of the request-to-token table."""
        width = self.max_context_len + self.draft_tokens + _SPARE_COLUMNS
        return self.max_bs + _SPARE_ROWS, width


@dataclass(frozen=True)
class Play:
    """One replay to be made.

    Parameters
    ----------
    captured : int
        The graph's batch size.
    requests : int
        Real requests, at most `captured`.
    seed : int
        Of lengths, slots, trees and values.
    lengths : {"mixed", "maximum"}
    padding : {"numbers", "nan"}
        What the queries and keys of padding hold.
    padding_seed : int
        Which numbers.
    """

    captured: int
    requests: int
    seed: int
    lengths: Lengths = "mixed"
    padding: Padding = "numbers"
    padding_seed: int = 0

    @property
    def padded(self) -> bool:
        """Whether the graph has more requests than the batch."""
        return self.requests < self.captured

    @property
    def label(self) -> str:
        """The play in words."""
        longest = ", prefixes at the maximum" if self.lengths == "maximum" else ""
        filling = ""
        if self.padded:
            filling = f", padded with {'NaN' if self.padding == 'nan' else 'numbers'}"
            filling += f" {self.padding_seed}" if self.padding_seed else ""
        requests = f"{self.requests} request{'s' * (self.requests > 1)}"
        return f"{requests} in the graph of {self.captured}{longest}{filling}, batch {self.seed}"


def schedule(captured: Sequence[int], *, seed: int = 0) -> list[Play]:
    """Return the replays of a run, in order.

    Every number of requests up to each captured size comes at least once.

    Parameters
    ----------
    captured : sequence of int
    seed : int
        Seeds of batches are this and what follows; no two batches share one but where a play is
        to be compared with another.

    Returns
    -------
    list of Play
    """
    seeds = itertools.count(seed)
    sizes = sorted(set(captured), reverse=True)
    first = [Play(size, size, next(seeds)) for size in sizes]
    walks = [_walk(size, seeds) for size in sizes]
    turns = [play for turn in itertools.zip_longest(*walks) for play in turn if play is not None]
    longest = [
        Play(size, requests, next(seeds), "maximum", padding)
        for size in sizes
        for requests, padding in _longest(size)
    ]
    compared = [play for size in sizes if size > 1 for play in _paddings(size, next(seeds))]
    return [*first, *turns, *longest, *compared, *first]


def _walk(size: int, seeds: Iterator[int]) -> Iterator[Play]:
    """Yield every smaller batch, one less each time, then a few larger ones up to the full one."""
    shrinking = range(size - 1, 0, -1)
    growing = sorted({(size + 1) // 2, size - 1, size} - {0})
    for number, requests in enumerate([*shrinking, *growing]):
        yield Play(size, requests, next(seeds), "mixed", ("numbers", "nan")[number % 2])


def _longest(size: int) -> Iterator[tuple[int, Padding]]:
    yield size, "numbers"
    if size > 1:
        yield size // 2, "nan"


def _paddings(size: int, seed: int) -> Iterator[Play]:
    """Yield one batch behind three paddings: what comes out for it may not differ by a bit."""
    requests = max(1, size - 1 - size // 4)
    yield Play(size, requests, seed, "mixed", "numbers", 1)
    yield Play(size, requests, seed, "mixed", "numbers", 2)
    yield Play(size, requests, seed, "mixed", "nan", 3)


@dataclass(frozen=True, eq=False)
class PlayInputs:
    """What a play writes, as numpy arrays: real requests only, but for the pools.

    Attributes
    ----------
    batch : VerifyBatch
        Layout, trees and masks; where rows are latent, also the values of all that follows.
    fields : mapping of str to ndarray of int64
        The runner's inputs by SGLang's names; what `GraphInputs.write` takes.
    links : tuple of ndarray of int64, shape (requests, n)
        retrieve_index, retrieve_next_token, retrieve_next_sibling.
    req_to_token : ndarray of int32
        The whole table, stale numbers in it.
    q : ndarray, shape (T, H, columns)
        Numbers here and below as `cuverify.narrow` has them.
    pools : mapping of str to ndarray, shape (slots, *Shape.row)
        By `Shape.pools`, NaN where nobody may read.
    fresh : mapping of str to ndarray, shape (T, *Shape.row)
        The drafts' rows by `Shape.fresh`.
    """

    batch: VerifyBatch
    fields: Mapping[str, NDArray[np.int64]]
    links: tuple[NDArray[np.int64], NDArray[np.int64], NDArray[np.int64]]
    req_to_token: NDArray[np.int32]
    q: NDArray[Any]
    pools: Mapping[str, NDArray[Any]]
    fresh: Mapping[str, NDArray[Any]]

    @property
    def trees(self) -> tuple[DraftTree, ...]:
        """The requests' trees."""
        return self.batch.trees

    def full_mask(self) -> NDArray[np.bool_]:
        """Return SGLang's full mask, flat: n rows of ``seq_len + n`` for each request."""
        lens = self.batch.layout.seq_lens.tolist()
        parts = [
            tree.sglang_mask("full", length).reshape(-1)
            for tree, length in zip(self.trees, lens, strict=True)
        ]
        return np.concatenate(parts)

    def query_mask(self) -> NDArray[np.bool_]:
        """Return SGLang's query-only mask, flat: n x n for each request."""
        return np.concatenate([tree.sglang_mask("query_only").reshape(-1) for tree in self.trees])


@functools.lru_cache(maxsize=4)
def inputs_of(shape: Shape, requests: int, seed: int, lengths: Lengths, fill: int) -> PlayInputs:
    """Return the inputs of a play, the same ones for the same numbers.

    Parameters
    ----------
    shape : Shape
    requests, seed, lengths
        See `Play`.
    fill : int
        The backend's length of a padded request: what a padded request may read is legal.
    """
    rng = np.random.default_rng([seed, requests])
    n, most = shape.draft_tokens, shape.max_context_len
    # what only the longest prefixes break shows in those batches alone
    mixed = _lengths(requests, max(1, most - n), rng)
    lens = np.full(requests, most) if lengths == "maximum" else mixed
    layout = KvLayout.build(
        seq_lens=lens,
        tree_tokens=n,
        num_slots=shape.num_slots,
        placement="scattered",
        rng=rng,
    )
    separate = shape.kv_heads is not None
    latent, rope = KEY_WIDTH if separate else (shape.latent, shape.rope)
    batch = VerifyBatch(
        layout,
        tuple(_tree(n, rng) for _ in range(requests)),
        # of grouped queries the batch has layout and trees alone: its heads are nobody's
        heads=-(-shape.heads // 8) * 8 if separate else shape.heads,
        latent=latent,
        rope=rope,
        sm_scale=shape.sm_scale,
        seed=seed,
        draft_source="separate",
        index_dtype="int64",
        dtype=shape.element,
        kv_scale=1.0 if shape.pool == "fp8_e4m3" else None,
        kind="contract",
    )
    positions = [
        tree.positions(int(length)) for tree, length in zip(batch.trees, lens, strict=True)
    ]
    fields = {
        "input_ids": rng.integers(0, _VOCABULARY, requests * n),
        "positions": np.concatenate(positions),
        "out_cache_loc": layout.out_cache_loc,
        "req_pool_indices": layout.req_pool_indices,
        "seq_lens": layout.seq_lens,
        "seq_lens_cpu": layout.seq_lens,
    }
    pairs = [tree.links() for tree in batch.trees]
    links = (
        np.arange(requests * n).reshape(requests, n),
        np.stack([pair[0] for pair in pairs]),
        np.stack([pair[1] for pair in pairs]),
    )
    table = _table(shape, layout, fill, rng)
    q, pools, fresh = _rows(shape, batch)
    return PlayInputs(batch, fields, links, table, q, pools, fresh)


def _rows(shape: Shape, batch: VerifyBatch) -> tuple[NDArray[Any], dict[str, Any], dict[str, Any]]:
    """Return queries, pools and drafts' rows of a batch."""
    if shape.kv_heads is None:
        pool, drafts = batch.pool()[:, None], batch.draft_kv()[:, None]
        return batch.q(), {"kv_buffer": pool}, {"k": drafts}
    grouped = GqaBatch(batch, shape.heads // shape.kv_heads, shape.kv_heads)
    pools = {"k_buffer": grouped.k_buffer(), "v_buffer": grouped.v_buffer()}
    return grouped.q(), pools, {"k": grouped.k_extend(), "v": grouped.v_extend()}


def stale_fields(shape: Shape, play: Play, rows: int) -> dict[str, NDArray[np.int64]]:
    """Return what earlier batches may have left in the runner's buffers: any legal numbers.

    Parameters
    ----------
    shape : Shape
    play : Play
        Its padding seed chooses.
    rows : int
        Rows of the request-to-token table that a stale index may name.
    """
    rng = np.random.default_rng([play.seed, play.padding_seed, 1])
    tokens = play.captured * shape.draft_tokens
    return {
        "input_ids": rng.integers(0, _VOCABULARY, tokens),
        "positions": rng.integers(0, shape.max_context_len + shape.draft_tokens, tokens),
        "req_pool_indices": rng.integers(0, rows, play.captured),
    }


def padding_rows(play: Play, rows: int, columns: int, kind: Narrow = "bf16") -> NDArray[Any]:
    """Return queries or keys of padding: numbers of a type, shape (rows, columns)."""
    if play.padding == "nan":
        return np.full((rows, columns), NAN[kind])
    rng = np.random.default_rng([play.seed, play.padding_seed, 2])
    values = rng.standard_normal((rows, columns), np.float32) * np.float32(8.0)
    return narrow(values, kind)


def _lengths(requests: int, most: int, rng: np.random.Generator) -> NDArray[np.int64]:
    drawn = rng.integers(1, most + 1, requests)
    edges = [edge for edge in _EDGES if edge <= most]
    at_edge = rng.random(requests) < 0.3
    return np.where(at_edge, rng.choice(edges, requests), drawn)


def _tree(n: int, rng: np.random.Generator) -> DraftTree:
    makers = (DraftTree.chain, DraftTree.star, DraftTree.comb)
    kind = int(rng.integers(0, 6))
    return makers[kind](n) if kind < len(makers) else DraftTree.random(n, rng)


def _table(
    shape: Shape, layout: KvLayout, fill: int, rng: np.random.Generator
) -> NDArray[np.int32]:
    """Return the layout's table in the size of the run, with legal slots where padding reads."""
    given = layout.req_to_token
    rows, columns = shape.table
    table = rng.integers(-1, 2**31, (rows, columns)).astype(np.int32)
    table[: given.shape[0], : given.shape[1]] = given
    others = np.setdiff1d(np.arange(rows), layout.req_pool_indices)
    reach = fill + shape.draft_tokens
    table[others, :reach] = rng.integers(0, shape.num_slots, (len(others), reach))
    table[0, :reach] = 0
    return table
