"""Inputs of tree building: a drafter's log-probabilities, or parents of any origin."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from cuverify.errors import ArgumentError
from cuverify.tree import DraftTree

DraftKind = Literal["free", "ties", "flat", "peaked", "sure", "holes", "spoiled"]
DRAFT_KINDS: tuple[DraftKind, ...] = get_args(DraftKind)

IndexType = Literal["int32", "int64"]

_LONGEST = 200_000


@dataclass(frozen=True, eq=False)
class DraftBatch:
    """What `tree_build` reads.

    Attributes
    ----------
    logprobs : ndarray of float32, shape (B, depth, k)
        Descending in each row.
    token_ids : ndarray of int64, shape (B, depth, k)
    root_tokens : ndarray of int64, shape (B,)
    seq_lens : ndarray of int64, shape (B,)
    num_tokens : int
        Nodes of a request, the root included.
    index : {"int32", "int64"}
        Type of tokens and lengths on the device.
    kind : str
        Where it comes from.
    """

    logprobs: NDArray[np.float32]
    token_ids: NDArray[np.int64]
    root_tokens: NDArray[np.int64]
    seq_lens: NDArray[np.int64]
    num_tokens: int
    index: IndexType = "int64"
    kind: str = "free"

    @classmethod
    def draw(
        cls,
        rng: np.random.Generator,
        *,
        batch: int,
        depth: int,
        k: int,
        num_tokens: int,
        kind: DraftKind = "free",
        index: IndexType = "int64",
        longest: int = _LONGEST,
    ) -> DraftBatch:
        """Draw a batch.

        Parameters
        ----------
        rng : numpy.random.Generator
        batch, depth, k, num_tokens : int
            Sizes.
        kind : str
            ``free``: as a drafter gives them. ``ties``: rounded to eighths, so that sums are exact
            and many are equal. ``flat``: all equal. ``peaked``: the first token has nearly all.
            ``sure``: all but 1e-9 of it, and the others are tied, so that sums differ by their
            rounding alone.
            ``holes``: tokens that cannot come. ``spoiled``: NaN and infinities of both signs.
        index : {"int32", "int64"}
        longest : int
            Largest length of a prefix.
        """
        if kind not in DRAFT_KINDS:
            raise ArgumentError("kind", kind, f"must be one of {DRAFT_KINDS}")
        vocabulary = 4 * k
        sharp = rng.choice([0.3, 1.0, 3.0], (batch, depth, 1)) * (4.0 if kind == "peaked" else 1.0)
        logits = rng.normal(0, 1, (batch, depth, vocabulary)) * sharp
        order = np.argsort(-logits, axis=2, kind="stable")[:, :, :k]
        norm = np.log(np.exp(logits).sum(axis=2, keepdims=True))
        table = (np.take_along_axis(logits, order, axis=2) - norm).astype(np.float32)
        if kind == "ties":
            table = (np.round(table * 8) / 8).astype(np.float32)
        elif kind == "flat":
            table[:] = -np.float32(rng.integers(0, 3))
        elif kind == "sure":
            table = (np.round(table * 2) / 2 - 3).astype(np.float32)
            table[:, :, 0] = -rng.random(table.shape[:2]) * 1e-9
        elif kind == "holes":
            table[np.arange(k) >= rng.integers(0, k + 1, (batch, depth, 1))] = -np.inf
        elif kind == "spoiled":
            odd = rng.random(table.shape) < 0.1
            table[odd] = rng.choice([np.nan, np.inf, -np.inf], int(odd.sum()))
        ids = order.astype(np.int64) + 100_000
        ids[rng.random(ids.shape) < 0.05] = 7  # a token that comes again
        lens = rng.integers(0, longest + 1, batch)
        lens[rng.random(batch) < 0.2] = 1  # as a padded request has
        roots = rng.integers(0, 160_000, batch)
        return cls(table, ids, roots, lens, num_tokens, index, kind)

    def __repr__(self) -> str:
        batch, depth, k = self.logprobs.shape
        return (
            f"DraftBatch({self.kind}: {batch} requests, {depth} depths of {k} tokens, "
            f"{self.num_tokens} nodes, {self.index})"
        )


@dataclass(frozen=True, eq=False)
class ParentsBatch:
    """What `tree_links` reads.

    Attributes
    ----------
    parents : ndarray of int64, shape (B, n)
    sizes : ndarray of int64, shape (B,), or None
        Nodes of each tree.
    seq_lens : ndarray of int64, shape (B,)
    index : {"int32", "int64"}
        Type of lengths on the device.
    """

    parents: NDArray[np.int64]
    seq_lens: NDArray[np.int64]
    sizes: NDArray[np.int64] | None = None
    index: IndexType = "int64"

    @property
    def num_tokens(self) -> int:
        """Nodes of a request."""
        return int(self.parents.shape[1])

    @classmethod
    def draw(
        cls,
        rng: np.random.Generator,
        *,
        batch: int,
        num_tokens: int,
        faulty: float = 0.0,
        sized: bool = False,
        index: IndexType = "int64",
        longest: int = _LONGEST,
    ) -> ParentsBatch:
        """Draw trees of all shapes; a share `faulty` of them has something wrong with it."""
        reaches = (None, 1, 2, 4, 8)
        parents = np.stack(
            [
                DraftTree.random(num_tokens, rng, reach=reaches[rng.integers(len(reaches))]).parents
                for _ in range(batch)
            ]
        ).astype(np.int64)
        sizes = rng.integers(1, num_tokens + 1, batch) if sized else None
        for request in np.flatnonzero(rng.random(batch) < faulty):
            _spoil(parents[request], rng)
            if sizes is not None and rng.random() < 0.3:
                sizes[request] = rng.choice([0, -1, num_tokens + 1, 2**31 - 1])
        return cls(parents, rng.integers(0, longest + 1, batch), sizes, index)

    def __repr__(self) -> str:
        batch, n = self.parents.shape
        sized = ", sized" if self.sizes is not None else ""
        return f"ParentsBatch({batch} requests, {n} nodes{sized}, {self.index})"


def _spoil(parents: NDArray[Any], rng: np.random.Generator) -> None:
    """Put a cycle, a forward parent, a second root or something out of range into a tree."""
    n = len(parents)
    node = int(rng.integers(n))
    parents[node] = rng.choice([-1, -2, node, n - 1, n, 1023, 1024, 2**31 - 1, -(2**31)])
    if n > 2 and rng.random() < 0.3:
        a, b = sorted(rng.choice(np.arange(1, n), 2, replace=False).tolist())
        parents[a], parents[b] = b, a
    if rng.random() < 0.2:
        parents[0] = 0
