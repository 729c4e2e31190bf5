"""Oracle of the commit of accepted paths: by rows, as a list of moves, and by table."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

COMMITTED = 0
BAD_WINDOW = 1
BAD_ACCEPTED = 2
BAD_NODE = 3
BAD_POOL_ROW = 4
BAD_POOL_WIDTH = 5

MAX_TREE = 1024


@dataclass(frozen=True, eq=False)
class Commit:
    """What a commit leaves behind.

    Attributes
    ----------
    status : ndarray of int32, shape (4,)
        Code, first request at fault, low and high word of the value at fault.
    src, dst : ndarray of int64
        The moves of a commit by rows.
    seq_lens : ndarray of int64, shape (B,)
        Tokens of each request afterwards.
    req_to_token : ndarray of int32
        The table after a commit by table.
    out_cache_loc : ndarray of int64, shape (N,)
        The windows' slots after one.
    """

    status: NDArray[np.int32]
    src: NDArray[np.int64]
    dst: NDArray[np.int64]
    seq_lens: NDArray[np.int64]
    req_to_token: NDArray[np.int32]
    out_cache_loc: NDArray[np.int64]


def commit(
    accept_index: NDArray[Any],
    accept_token_num: NDArray[Any],
    qo_indptr: NDArray[Any],
    out_cache_loc: NDArray[np.int64],
    seq_lens: NDArray[Any],
    req_pool_indices: NDArray[Any],
    req_to_token: NDArray[np.int32],
) -> Commit:
    """Commit accepted paths, both ways at once.

    Parameters
    ----------
    accept_index : ndarray of int, shape (B, S)
        Global node indices of each accepted path, the root first.
    accept_token_num : ndarray of int, shape (B,)
        Accepted nodes without the root.
    qo_indptr : ndarray of int, shape (B + 1,)
        Bounds of each request's window.
    out_cache_loc : ndarray of int64, shape (N,)
        Slots of the windows.
    seq_lens, req_pool_indices : ndarray of int, shape (B,)
        Tokens in front of the window, and the request's row of the table; row 0 is padding.
    req_to_token : ndarray of int32, shape (rows, width)

    Returns
    -------
    Commit
        Nothing is listed and nothing changed where a request is at fault.
    """
    table, slots = req_to_token.copy(), out_cache_loc.copy()
    lens = seq_lens.astype(np.int64)
    src: list[int] = []
    dst: list[int] = []
    for b in range(len(lens)):
        begin, end = int(qo_indptr[b]), int(qo_indptr[b + 1])
        length, row = int(lens[b]), int(req_pool_indices[b])
        code, value = _fault(
            accept_index[b], int(accept_token_num[b]), begin, end, len(slots), length, row,
            req_to_token.shape,
        )  # fmt: skip
        if code:
            low, high = np.array([value], np.int64).astype("<i8").view("<i4")
            status = np.array([code, b, low, high], np.int32)
            none = np.zeros(0, np.int64)
            kept = seq_lens.astype(np.int64)
            return Commit(status, none, none, kept, req_to_token.copy(), out_cache_loc.copy())
        if row == 0:
            continue
        path = accept_index[b, : int(accept_token_num[b]) + 1].astype(np.int64)
        front = out_cache_loc[begin : begin + len(path)]
        moving = out_cache_loc[path] != front
        src += out_cache_loc[path][moving].tolist()
        dst += front[moving].tolist()
        others = np.setdiff1d(np.arange(begin, end), path)
        order = np.concatenate([path, others])
        slots[begin:end] = out_cache_loc[order]
        table[row, length : length + end - begin] = req_to_token[row, length + order - begin]
        lens[b] += len(path)
    status = np.array([COMMITTED, -1, 0, 0], np.int32)
    return Commit(status, np.array(src, np.int64), np.array(dst, np.int64), lens, table, slots)


def _fault(
    path: NDArray[Any],
    accepted: int,
    begin: int,
    end: int,
    tokens: int,
    length: int,
    row: int,
    table: tuple[int, ...],
) -> tuple[int, int]:
    """Return what is wrong with one request, and the value."""
    if begin < 0 or end > tokens or not 1 <= end - begin <= MAX_TREE:
        return BAD_WINDOW, end
    if row == 0:
        return COMMITTED, 0
    if not 0 <= accepted < len(path):
        return BAD_ACCEPTED, accepted
    nodes = [int(node) for node in path[: accepted + 1]]
    for at, node in enumerate(nodes):
        least = nodes[at - 1] + 1 if at else begin
        if not least <= node < end or (at == 0 and node != begin):
            return BAD_NODE, node
    if not 0 <= row < table[0]:
        return BAD_POOL_ROW, row
    if not 0 <= length <= table[1] - (end - begin):
        return BAD_POOL_WIDTH, length
    return COMMITTED, 0
