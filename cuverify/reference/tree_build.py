"""Oracle of tree building: the best-first tree of DDTree, in plain Python and float64.

A drafter gives, for each depth, log-probabilities of its k best tokens, whatever stands in front of
them. The mass of a node is the sum along its path, and the tree holds the nodes of most mass.
Ringel and Romano, arXiv 2604.12989.

`best_first_tree` refuses what makes no sense. The kernel cannot: `tree_build`, `tree_links`,
`tree_mask`, `eagle_parents` and `visible_parents` say what it writes for any input.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cuverify.errors import ArgumentError
from cuverify.tree import MaskMode, sglang_mask_row_bytes

BUILT, NOT_FINITE, NO_ROOT, SECOND_ROOT, BAD_PARENT, PARENT_BEHIND, BAD_SIZE = range(7)

NOT_FOUND = -2
"""Parent of a node whose parent is not to be found."""

_MAX_LENGTH = 2**31 - 1


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
    return _grow(table, ids, budget, root_token)


def _grow(
    table: NDArray[np.float32], ids: NDArray[Any], budget: int, root_token: int
) -> BestFirstTree:
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


def tree_build(
    logprobs: ArrayLike,
    token_ids: ArrayLike,
    root_tokens: ArrayLike,
    seq_lens: ArrayLike,
    *,
    num_tokens: int,
    words: int,
) -> dict[str, NDArray[Any]]:
    """Return all that the kernel writes for a batch: see kernels_cu/tree_build.cu.

    Parameters
    ----------
    logprobs : array_like of float32, shape (B, depth, k)
        A row ends in front of its first NaN or infinity; what is above 0 counts as 0.
    token_ids : array_like of int, shape (B, depth, k)
    root_tokens, seq_lens : array_like of int, shape (B,)
    num_tokens : int
        Nodes of a request, the root included.
    words : int
        Visibility words of a node.

    Returns
    -------
    dict of str to ndarray
        Named as the kernel's outputs.
    """
    table = np.asarray(logprobs, np.float32)
    ids, roots = np.asarray(token_ids), np.asarray(root_tokens, np.int64)
    batch = len(table)
    made: dict[str, NDArray[Any]] = {
        "tokens": np.repeat(roots[:, None], num_tokens, axis=1),
        "parents": np.full((batch, num_tokens), -1, np.int32),
        "ranks": np.full((batch, num_tokens), -1, np.int32),
        "sizes": np.zeros(batch, np.int32),
        "status": np.tile(np.array([BUILT, -1], np.int32), (batch, 1)),
    }
    for request, rows in enumerate(table):
        ended = np.logical_or.accumulate(~np.isfinite(rows), axis=1)
        usable = np.minimum(np.where(ended, -np.inf, rows), 0)
        tree = _grow(usable, ids[request], num_tokens - 1, 0)
        size = made["sizes"][request] = len(tree.parents)
        made["parents"][request, :size] = tree.parents
        made["ranks"][request, :size] = tree.ranks
        made["tokens"][request, 1:size] = tree.tokens[1:]
        odd = np.flatnonzero(np.isnan(rows) | (rows == np.inf))
        if len(odd):
            made["status"][request] = NOT_FINITE, odd[0]
    return made | _views(made["parents"], made["sizes"], seq_lens, words)


def tree_links(
    parents: ArrayLike, seq_lens: ArrayLike, *, words: int, sizes: ArrayLike | None = None
) -> dict[str, NDArray[Any]]:
    """Return all that the kernel writes for trees that are given by their parents.

    Parameters
    ----------
    parents : array_like of int, shape (B, n)
    seq_lens : array_like of int, shape (B,)
    words : int
        Visibility words of a node.
    sizes : array_like of int, shape (B,), optional
        Nodes of each tree; n if absent.

    Returns
    -------
    dict of str to ndarray
        Named as the kernel's outputs.
    """
    given = np.asarray(parents, np.int64)
    batch, n = given.shape
    counts = np.full(batch, n) if sizes is None else np.asarray(sizes, np.int64).copy()
    status = np.tile(np.array([BUILT, -1], np.int32), (batch, 1))
    for request, row in enumerate(given.tolist()):
        size = int(counts[request])
        if not 1 <= size <= n:
            status[request] = BAD_SIZE, 0
        else:
            faults = [(node, _fault(node, parent, size)) for node, parent in enumerate(row[:size])]
            node, code = next((fault for fault in faults if fault[1] != BUILT), (-1, BUILT))
            status[request] = code, node
        if status[request, 0] != BUILT:
            counts[request] = 1
    return {"status": status} | _views(given, counts, seq_lens, words)


def _fault(node: int, parent: int, size: int) -> int:
    if node == 0:
        return BUILT if parent == -1 else NO_ROOT
    if parent == -1:
        return SECOND_ROOT
    if not 0 <= parent < size:
        return BAD_PARENT
    return BUILT if parent < node else PARENT_BEHIND


def _views(
    parents: NDArray[Any], sizes: NDArray[Any], seq_lens: ArrayLike, words: int
) -> dict[str, NDArray[Any]]:
    """Return depths, positions, links and visibility of trees without fault."""
    batch, n = parents.shape
    every = np.arange(batch)
    depths = np.zeros((batch, n), np.int32)
    visible = np.zeros((batch, n, words), np.uint64)
    next_token = np.full((batch, n), -1, np.int64)
    next_sibling = np.full((batch, n), -1, np.int64)
    for node in range(n):
        used = (node < sizes) & (node > 0)
        parent = np.where(used, parents[:, node], 0)
        depths[:, node] = np.where(used, depths[every, parent] + 1, 0)
        # What belongs to no path sees the root, as the root does.
        visible[:, node] = visible[every, parent]
        visible[:, node, node // 64] |= np.uint64(1 << node % 64)
    for node in range(n - 1, 0, -1):  # children are pushed in front: they ascend
        having = np.flatnonzero(node < sizes)
        parent = parents[having, node]
        next_sibling[having, node] = next_token[having, parent]
        next_token[having, parent] = node
    lengths = np.asarray(seq_lens, np.int64)
    return {
        "depths": depths,
        "positions": lengths[:, None] + depths,
        "retrieve_index": np.arange(batch * n, dtype=np.int64).reshape(batch, n),
        "next_token": next_token,
        "next_sibling": next_sibling,
        "visible": visible.reshape(batch * n, words),
    }


def tree_mask(
    visible: NDArray[np.uint64],
    seq_lens: ArrayLike,
    mask: NDArray[np.uint8],
    *,
    mode: MaskMode,
    fill_prefix: bool = False,
) -> dict[str, NDArray[Any]]:
    """Return SGLang's tree mask as the kernel leaves it, and its status.

    Parameters
    ----------
    visible : ndarray of uint64, shape (B * n, words)
    seq_lens : array_like of int, shape (B,)
    mask : ndarray of uint8
        What the buffer holds before.
    mode : {"full", "query_only", "bit_packed"}
    fill_prefix : bool
        Whether columns of the prefix become 1.

    Returns
    -------
    dict of str to ndarray
        ``mask`` and ``status``.
    """
    lengths = np.asarray(seq_lens, np.int64)
    n = len(visible) // len(lengths)
    raw = np.ascontiguousarray(visible).view(np.uint8)
    bits = np.unpackbits(raw, axis=1, bitorder="little")[:, :n]
    rows = raw[:, : sglang_mask_row_bytes(n)] if mode == "bit_packed" else bits
    made, at = mask.copy(), 0
    status = np.zeros(len(lengths), np.int32)
    for request, length in enumerate(lengths.tolist()):
        prefix = length if mode == "full" else 0
        counts = 0 <= prefix <= _MAX_LENGTH
        width = (prefix if counts else 0) + rows.shape[1]
        end = at + n * width
        if not counts:
            status[request] = 1
        elif end > len(mask):
            status[request] = 2
        else:
            part = made[at:end].reshape(n, width)
            part[:, prefix:] = rows[request * n : (request + 1) * n]
            if fill_prefix:
                part[:, :prefix] = 1
        at = end
    return {"mask": made, "status": status}


def eagle_parents(
    selected_index: ArrayLike, parent_list: ArrayLike, topk: int
) -> NDArray[np.int32]:
    """Return the parents that EAGLE's lists mean, `NOT_FOUND` where they mean none.

    Parameters
    ----------
    selected_index : array_like of int, shape (B, n - 1)
    parent_list : array_like of int, shape (B, width)
    topk : int

    Returns
    -------
    ndarray of int32, shape (B, n)
    """
    selected, listed = np.asarray(selected_index, np.int64), np.asarray(parent_list, np.int64)
    parents = np.full((len(selected), selected.shape[1] + 1), NOT_FOUND, np.int32)
    parents[:, 0] = -1
    for request, row in enumerate(selected.tolist()):
        for node, draft in enumerate(row, 1):
            place = draft // topk
            if place == 0:
                parents[request, node] = 0
            elif 0 < place < listed.shape[1] and listed[request, place] in row:
                parents[request, node] = row.index(int(listed[request, place])) + 1
    return parents


def visible_parents(visible: NDArray[np.uint64], batch: int) -> NDArray[np.int32]:
    """Return the parents that visibility words mean, `NOT_FOUND` where they are not a tree's.

    Parameters
    ----------
    visible : ndarray of uint64, shape (B * n, words)
    batch : int

    Returns
    -------
    ndarray of int32, shape (B, n)
    """
    n = len(visible) // batch
    raw = np.ascontiguousarray(visible).view(np.uint8)
    seen = np.unpackbits(raw, axis=1, bitorder="little")[:, :n].reshape(batch, n, n)
    parents = np.full((batch, n), NOT_FOUND, np.int32)
    for request in range(batch):
        for node in range(n):
            in_front = np.flatnonzero(seen[request, node, :node])
            wanted = np.zeros(n, np.uint8)
            if len(in_front):
                wanted = seen[request, in_front[-1]].copy()
            wanted[node] = 1
            same = (seen[request, node] == wanted).all()
            if same and (len(in_front) or node == 0):
                parents[request, node] = in_front[-1] if len(in_front) else -1
    return parents


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
