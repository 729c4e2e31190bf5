"""Oracle of tree building: the best-first tree of DDTree, in plain Python and float64.

A drafter gives, for each depth, log-probabilities of its k best tokens, whatever stands in front of
them. The mass of a node is the sum along its path, and the tree holds the nodes of most mass.
Ringel and Romano, arXiv 2604.12989.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cuverify.errors import ArgumentError


@dataclass(frozen=True, eq=False)
class BestFirstTree:
    """A best-first tree in the order in which its nodes were taken, the root in front.

    Attributes
    ----------
    parents : ndarray of int32, shape (T,)
        Parent of each node, -1 for the root. A parent stands before its children.
    tokens : ndarray of int64, shape (T,)
        Token of each node; that of the root was given.
    ranks : ndarray of int32, shape (T,)
        Which of its depth's tokens a node has, 0 for the likeliest; -1 for the root.
    depths : ndarray of int32, shape (T,)
        Edges from the root.
    mass : ndarray of float64, shape (T,)
        Log-probability of the path to each node, 0 for the root; it never rises, but for rounding.
    """

    parents: NDArray[np.int32]
    tokens: NDArray[np.int64]
    ranks: NDArray[np.int32]
    depths: NDArray[np.int32]
    mass: NDArray[np.float64]


def draft_topk(logits: ArrayLike, k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the log-probabilities of the k likeliest tokens of each depth, and the tokens.

    Parameters
    ----------
    logits : array_like of float, shape (depth, vocabulary)
        What the drafter gives; -inf marks a token that cannot come.
    k : int
        Tokens of each depth, at most the vocabulary.

    Returns
    -------
    logprobs : ndarray of float32, shape (depth, k)
        Descending in each row. The sum over the vocabulary is taken in float64 and rounded once.
    tokens : ndarray of int64, shape (depth, k)
        Where logits are equal, the lower token stands first.

    Raises
    ------
    ArgumentError
        The logits are no table, hold a NaN or +inf, or a row of -inf only; `k` is out of range.
    """
    rows = _table("logits", logits).astype(np.float64)
    if not rows.shape[1]:
        raise ArgumentError("logits", list(rows.shape), "the vocabulary is empty")
    if not 1 <= k <= rows.shape[1]:
        raise ArgumentError("k", k, f"must lie in 1 to {rows.shape[1]}, the vocabulary")
    for depth in np.flatnonzero(np.isnan(rows).any(axis=1) | (rows == np.inf).any(axis=1)):
        raise ArgumentError("logits", rows, f"row {depth} holds a NaN or +inf")
    top = rows.max(axis=1, keepdims=True) if rows.size else np.zeros((0, 1))
    for depth in np.flatnonzero(top[:, 0] == -np.inf):
        raise ArgumentError("logits", rows, f"row {depth} is -inf everywhere")
    norm = top + np.log(np.exp(rows - top).sum(axis=1, keepdims=True))
    tokens = np.argsort(-rows, axis=1, kind="stable")[:, :k].astype(np.int64)
    best = np.take_along_axis(rows, tokens, axis=1)
    return (best - norm).astype(np.float32), tokens


def best_first_tree(
    logprobs: ArrayLike, tokens: ArrayLike, budget: int, *, root_token: int = 0
) -> BestFirstTree:
    """Build the tree of the `budget` likeliest prefixes.

    The likeliest node that is not in the tree is always the next sibling of one that is, or its
    first child: a heap holds one candidate of either kind for each node taken. Where masses are
    equal, the path whose ranks come first in lexicographic order is taken first; with exact sums
    that makes the whole order that of (-mass, ranks) over all prefixes.

    A mass is summed in float64 from float32 log-probabilities as the published program does it: a
    child adds its own, a sibling subtracts that of the sibling in front and adds its own. Masses
    that are equal on paper can so differ in the last bit. Unlike the published program, which would
    compute -inf minus -inf there, this never takes a token of log-probability -inf.

    Parameters
    ----------
    logprobs : array_like of float, shape (depth, k)
        Log-probabilities of the k best tokens of each depth, descending in each row. Rounded to
        float32.
    tokens : array_like of int, shape (depth, k)
        The tokens, distinct in each row.
    budget : int
        Nodes to take, the root not counted. Fewer are taken where there are no more prefixes.
    root_token : int
        Token of the root.

    Returns
    -------
    BestFirstTree
        Up to ``budget + 1`` nodes.

    Raises
    ------
    ArgumentError
        The tables do not fit together, a row is not descending or repeats a token, a
        log-probability is NaN or +inf, or the budget is negative.

    Examples
    --------
    >>> tree = best_first_tree([[-0.5, -1.0], [-0.25, -2.0]], [[7, 3], [1, 9]], budget=3)
    >>> tree.parents.tolist(), tree.tokens.tolist(), tree.mass.tolist()
    ([-1, 0, 1, 0], [0, 7, 1, 3], [0.0, -0.5, -0.75, -1.0])
    """
    table, ids = _checked(logprobs, tokens)
    if budget < 0:
        raise ArgumentError("budget", budget, "the number of nodes cannot be negative")
    depth, k = table.shape
    # Sums are wanted in float64, of values that are float32.
    score: list[list[float]] = table.tolist()

    parents, token, rank, level, mass = [-1], [int(root_token)], [-1], [0], [0.0]
    # (-mass, ranks of the path, parent): paths are distinct, so that the parent never decides
    heap: list[tuple[float, tuple[int, ...], int]] = []
    if depth and k and score[0][0] > -np.inf:
        heap.append((-score[0][0], (0,), 0))
    while heap and len(parents) <= budget:
        lost, path, parent = heapq.heappop(heap)
        at, r = len(path), path[-1]
        node = len(parents)
        parents.append(parent)
        token.append(int(ids[at - 1, r]))
        rank.append(r)
        level.append(at)
        mass.append(-lost)
        row = score[at - 1]
        if r + 1 < k and row[r + 1] > -np.inf:
            sibling = -lost - row[r] + row[r + 1]
            heapq.heappush(heap, (-sibling, (*path[:-1], r + 1), parent))
        if at < depth and score[at][0] > -np.inf:
            heapq.heappush(heap, (-(-lost + score[at][0]), (*path, 0), node))
    return BestFirstTree(
        parents=np.array(parents, np.int32),
        tokens=np.array(token, np.int64),
        ranks=np.array(rank, np.int32),
        depths=np.array(level, np.int32),
        mass=np.array(mass, np.float64),
    )


def _checked(
    logprobs: ArrayLike, tokens: ArrayLike
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    table = _table("logprobs", logprobs).astype(np.float32)
    ids = np.asarray(tokens)
    if ids.shape != table.shape:
        raise ArgumentError("tokens", ids, f"must have the shape of logprobs, {list(table.shape)}")
    if ids.size and ids.dtype.kind not in "iu":
        raise ArgumentError("tokens", str(ids.dtype), "must hold integers")
    ids = ids.astype(np.int64)
    for depth in np.flatnonzero(np.isnan(table).any(axis=1) | (table == np.inf).any(axis=1)):
        raise ArgumentError("logprobs", table, f"row {depth} holds a NaN or +inf")
    for depth in np.flatnonzero((table[:, 1:] > table[:, :-1]).any(axis=1)):
        raise ArgumentError("logprobs", table, f"row {depth} is not descending")
    ordered = np.sort(ids, axis=1)
    for depth in np.flatnonzero((ordered[:, 1:] == ordered[:, :-1]).any(axis=1)):
        raise ArgumentError("tokens", ids, f"row {depth} holds a token twice")
    return table, ids


def _table(name: str, values: ArrayLike) -> NDArray[Any]:
    table = np.asarray(values)
    if table.ndim != 2 or (table.size and table.dtype.kind not in "fiu"):
        raise ArgumentError(name, table, "must be a table of numbers, one row a depth")
    return table
