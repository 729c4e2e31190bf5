"""Oracle of verify attention: what every tree token sees, in numpy float64.

It takes the kernels' own inputs (bits, index lists, visibility words), so that one set of buffers
serves both. Scores of a request are made block by block of its prefix and merged with a running
maximum, which keeps 180,000 rows of prefix in a few megabytes.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cuverify.errors import ArgumentError
from cuverify.narrow import widen

Floats = NDArray[np.float64]

# Scores that are held at a time: 32 MB as float64.
_BLOCK_SCORES = 1 << 22


class Attention(NamedTuple):
    """What verify attention gives, in float64.

    Attributes
    ----------
    out : ndarray of float64, shape (N, H, latent)
        Zero where a row sees nothing.
    lse : ndarray of float64, shape (N, H)
        Natural logarithm of the sum of exponentials; -inf where a row sees nothing.
    spread : ndarray of float64, shape (N, H)
        ``sqrt(sum_j p_j^2 mean_c v_jc^2)``: how large the terms of `out` are, added as if their
        signs were random. Rounding every weight by one part in n moves `out` by about an nth of it.
    """

    out: Floats
    lse: Floats
    spread: Floats


def verify_attention(
    q: NDArray[Any],
    pool: NDArray[Any],
    *,
    latent: int,
    sm_scale: float,
    qo_indptr: NDArray[Any],
    kv_indptr: NDArray[Any],
    kv_indices: NDArray[Any],
    visible: NDArray[Any],
    draft_kv: NDArray[Any] | None = None,
    draft_slots: NDArray[Any] | None = None,
    kv_scale: float = 1.0,
) -> Attention:
    """Attend from every tree token to its request's prefix and to the draft nodes that it sees.

    Parameters
    ----------
    q : ndarray of uint16 (the bits of bf16) or of floats, shape (N, H, D)
        Queries of the tree tokens of all requests, the latent part first.
    pool : ndarray of uint16, of uint8 or of floats, shape (slots, D) or (slots, 1, D)
        KV rows, uint8 being codes of e4m3; the values are the first `latent` columns.
    latent : int
        Columns of the output.
    sm_scale : float
        Scores are multiplied by it.
    qo_indptr : ndarray of int, shape (B + 1,)
        Tree tokens of request b are rows ``qo_indptr[b]`` to ``qo_indptr[b + 1]`` of `q`; rows
        behind the last one see nothing.
    kv_indptr : ndarray of int, shape (B + 1,)
        The prefix of request b is ``kv_indices[kv_indptr[b]:kv_indptr[b + 1]]``, drafts excluded.
    kv_indices : ndarray of int, shape (at least kv_indptr[B],)
        Slots; what stands behind the last prefix is ignored.
    visible : ndarray of uint64 or int64, shape (N, W)
        Bit k of word w of row i: node i sees node 64 w + k of its request. Bits of nodes that the
        request does not have are ignored.
    draft_kv : ndarray of uint16 or of floats, shape (N, D), optional
        KV rows of the tree tokens.
    draft_slots : ndarray of int, shape (N,), optional
        The slots of `pool` that hold them. Exactly one of the two is given.
    kv_scale : float
        What is in `pool` is multiplied by it; `draft_kv` is not.

    Returns
    -------
    Attention

    Raises
    ------
    ArgumentError
        A slot of a prefix or of a draft is none of the pool's, both or neither of `draft_kv` and
        `draft_slots` are given, or `visible` has too few words for a tree.
    """
    rows = pool.reshape(len(pool), pool.shape[-1])
    return attend(
        q,
        rows,
        rows[:, :latent],
        sm_scale=sm_scale,
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        visible=visible,
        draft_keys=draft_kv,
        draft_values=None if draft_kv is None else draft_kv[:, :latent],
        draft_slots=draft_slots,
        kv_scale=kv_scale,
    )


def attend(
    q: NDArray[Any],
    keys: NDArray[Any],
    values: NDArray[Any],
    *,
    sm_scale: float,
    qo_indptr: NDArray[Any],
    kv_indptr: NDArray[Any],
    kv_indices: NDArray[Any],
    visible: NDArray[Any],
    draft_keys: NDArray[Any] | None = None,
    draft_values: NDArray[Any] | None = None,
    draft_slots: NDArray[Any] | None = None,
    kv_scale: float = 1.0,
) -> Attention:
    """Attend from every tree token with heads that share one KV head.

    Parameters
    ----------
    q : ndarray, shape (N, H, D)
        Numbers here and below are floats, uint16 (the bits of bf16) or uint8 (codes of e4m3).
    keys, values : ndarray, shape (slots, D) and (slots, C)
        The pools; values may be columns of the keys.
    draft_keys, draft_values : ndarray, shape (N, D) and (N, C), optional
        Rows of the tree tokens, instead of `draft_slots`.
    sm_scale, qo_indptr, kv_indptr, kv_indices, visible, draft_slots, kv_scale
        As for `verify_attention`.

    Returns
    -------
    Attention
        `out` has C columns.

    Raises
    ------
    ArgumentError
        As `verify_attention`.
    """
    if (draft_keys is None) == (draft_slots is None):
        raise ArgumentError("draft_kv", draft_keys, "give either it or draft_slots")
    tokens, heads = q.shape[:2]
    columns = values.shape[1]
    words = np.ascontiguousarray(visible).view(np.uint64)
    out = np.zeros((tokens, heads, columns))
    lse = np.full((tokens, heads), -np.inf)
    spread = np.zeros((tokens, heads))
    for request in range(len(qo_indptr) - 1):
        first, end = int(qo_indptr[request]), int(qo_indptr[request + 1])
        nodes = end - first
        if not nodes:
            continue
        if nodes > 64 * words.shape[1]:
            raise ArgumentError(
                "visible", words.shape, f"request {request} has {nodes} nodes, more than its bits"
            )
        slots = kv_indices[int(kv_indptr[request]) : int(kv_indptr[request + 1])]
        running = _Running(widen(q[first:end]).reshape(nodes * heads, -1) * sm_scale, columns)
        block = max(16, _BLOCK_SCORES // (nodes * heads))
        for part in _blocks(slots, block):
            rows = _in_pool("kv_indices", part, len(keys))
            running.add(kv_scale * widen(keys[rows]), kv_scale * widen(values[rows]))
        if draft_slots is None:
            assert draft_keys is not None
            assert draft_values is not None
            fresh = widen(draft_keys[first:end]), widen(draft_values[first:end])
        else:
            rows = _in_pool("draft_slots", draft_slots[first:end], len(keys))
            fresh = kv_scale * widen(keys[rows]), kv_scale * widen(values[rows])
        node = np.arange(nodes, dtype=np.uint64)
        bits = words[first:end, node >> np.uint64(6)] >> (node & np.uint64(63))
        hidden = (bits & np.uint64(1)) == 0
        running.add(*fresh, hidden=np.repeat(hidden, heads, axis=0))
        at = slice(first, end)
        out[at], lse[at], spread[at] = running.result(nodes, heads)
    return Attention(out, lse, spread)


class _Running:
    """A softmax over keys that come block by block, for some queries at once."""

    def __init__(self, queries: Floats, columns: int) -> None:
        self._queries = queries
        self._columns = columns
        count = len(queries)
        self._top = np.full((count, 1), -np.inf)
        self._total = np.zeros((count, 1))
        self._out = np.zeros((count, columns))
        self._squares = np.zeros((count, 1))

    def add(self, keys: Floats, values: Floats, hidden: NDArray[np.bool_] | None = None) -> None:
        """Add keys and their values; some are hidden from some queries."""
        scores = self._queries @ keys.T
        if hidden is not None:
            scores[hidden] = -np.inf
        top = np.maximum(self._top, scores.max(axis=1, keepdims=True))
        # a query that has seen nothing has no maximum to subtract
        shift = np.where(np.isneginf(top), 0.0, top)
        weights = np.exp(np.subtract(scores, shift, out=scores), out=scores)
        decay = np.exp(self._top - shift)
        self._top = top
        self._total = self._total * decay + weights.sum(axis=1, keepdims=True)
        self._out = self._out * decay + weights @ values
        mean_square = np.einsum("kc,kc->k", values, values)[:, None] / self._columns
        np.multiply(weights, weights, out=weights)
        self._squares = self._squares * decay**2 + weights @ mean_square

    def result(self, nodes: int, heads: int) -> tuple[Floats, Floats, Floats]:
        """Return output, log-sum-exp and spread, in the shapes of `Attention`."""
        total = np.where(self._total > 0, self._total, 1.0)
        with np.errstate(divide="ignore"):
            lse = np.where(self._total > 0, self._top + np.log(total), -np.inf)
        out = (self._out / total).reshape(nodes, heads, self._columns)
        spread = np.sqrt(self._squares) / total
        return out, lse.reshape(nodes, heads), spread.reshape(nodes, heads)


def _blocks(slots: NDArray[Any], block: int) -> Iterator[NDArray[Any]]:
    for begin in range(0, len(slots), block):
        yield slots[begin : begin + block]


def _in_pool(name: str, slots: NDArray[Any], num_slots: int) -> NDArray[Any]:
    if slots.min() < 0 or slots.max() >= num_slots:
        wrong = slots[(slots < 0) | (slots >= num_slots)][0]
        raise ArgumentError(name, int(wrong), f"is no slot of the pool, which has {num_slots}")
    return slots
