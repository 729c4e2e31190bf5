"""Oracle of a step's lists: bounds, slots and visibility words, one request after another."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cuverify.tree import MaskMode, sglang_mask_row_bytes

LISTED, BAD_LENGTH, BAD_POOL_ROW, BAD_POOL_WIDTH, BAD_CAPACITY = range(5)

_MAX_LENGTH = 2**31 - 1


def verify_lists(
    seq_lens: ArrayLike,
    *,
    num_tokens: int,
    kv_capacity: int,
    req_to_token: NDArray[np.int32] | None = None,
    req_pool_indices: ArrayLike | None = None,
    drafts: Literal["none", "given", "table"] = "none",
    out_cache_loc: ArrayLike | None = None,
) -> dict[str, NDArray[Any]]:
    """Return bounds, slots and status of a step.

    Parameters
    ----------
    seq_lens : array_like of int, shape (B,)
    num_tokens : int
        Drafts of a request.
    kv_capacity : int
        Most slots.
    req_to_token, req_pool_indices : array_like of int, optional
        Without them no slots are listed.
    drafts : {"none", "given", "table"}
        What stands behind each prefix.
    out_cache_loc : array_like of int, shape (B * num_tokens,), optional

    Returns
    -------
    dict of str to ndarray
        ``kv_indptr``, ``qo_indptr``, ``mask_indptr`` and ``kv_indices`` (int64), ``status``
        (int32).
    """
    lengths = np.asarray(seq_lens, np.int64).tolist()
    n, batch = num_tokens, len(lengths)
    rows = None if req_pool_indices is None else np.asarray(req_pool_indices, np.int64).tolist()
    extra = 0 if drafts == "none" else n
    kv, mask, slots = [0], [0], [np.zeros(0, np.int64)]
    fault = LISTED, -1, 0
    valid = [length if _fault(at, length, rows, req_to_token, drafts, n) == LISTED else 0
             for at, length in enumerate(lengths)]  # fmt: skip
    for at, (length, used) in enumerate(zip(lengths, valid, strict=True)):
        kv.append(kv[-1] + used + extra)
        mask.append(mask[-1] + n * (used + n))
        code = _fault(at, length, rows, req_to_token, drafts, n)
        if code == LISTED and kv[-1] > kv_capacity:
            code = BAD_CAPACITY
        if code != LISTED and fault[0] == LISTED:
            value = rows[at] if code == BAD_POOL_ROW and rows is not None else length
            fault = code, at, value
    if fault[0] == LISTED and req_to_token is not None and rows is not None:
        for at, (length, row) in enumerate(zip(lengths, rows, strict=True)):
            end = length + (n if drafts == "table" else 0)
            slots.append(req_to_token[row, :end].astype(np.int64))
            if drafts == "given":
                slots.append(np.asarray(out_cache_loc, np.int64)[at * n : (at + 1) * n])
    if fault[0] != LISTED:
        kv, mask = [0] * (batch + 1), [0] * (batch + 1)
    words = np.array([fault[2]], np.int64).view(np.int32)
    return {
        "kv_indptr": np.array(kv, np.int64),
        "qo_indptr": np.arange(batch + 1, dtype=np.int64) * n,
        "mask_indptr": np.array(mask, np.int64),
        "kv_indices": np.concatenate(slots),
        "status": np.array([fault[0], fault[1], *words], np.int32),
    }


def _fault(
    at: int,
    length: int,
    rows: list[int] | None,
    table: NDArray[np.int32] | None,
    drafts: str,
    n: int,
) -> int:
    if not 0 <= length <= _MAX_LENGTH:
        return BAD_LENGTH
    if rows is None or table is None:
        return LISTED
    if not 0 <= rows[at] < table.shape[0]:
        return BAD_POOL_ROW
    return BAD_POOL_WIDTH if length + (n if drafts == "table" else 0) > table.shape[1] else LISTED


def verify_words(
    mask: NDArray[Any],
    seq_lens: ArrayLike,
    *,
    num_tokens: int,
    words: int,
    mode: MaskMode,
    mask_indptr: ArrayLike | None = None,
) -> NDArray[np.uint64]:
    """Return the visibility words that a tree mask means.

    Parameters
    ----------
    mask : ndarray of bool or uint8, one dimension
    seq_lens : array_like of int, shape (B,)
    num_tokens : int
        Drafts of a request.
    words : int
    mode : {"full", "query_only", "bit_packed"}
    mask_indptr : array_like of int, shape (B + 1,), optional
        Goes with a full mask.

    Returns
    -------
    ndarray of uint64, shape (B * num_tokens, words)
        Nodes of a part that is not inside of the mask see themselves.
    """
    n, lengths = num_tokens, np.asarray(seq_lens, np.int64).tolist()
    seen = np.zeros((len(lengths), n, 64 * words), np.uint8)
    for at, length in enumerate(lengths):
        columns = sglang_mask_row_bytes(n) if mode == "bit_packed" else n
        prefix = length if mode == "full" else 0
        size = n * (prefix + columns)
        first, inside = at * size, 0 <= prefix <= _MAX_LENGTH
        if mode == "full":
            first, end = np.asarray(mask_indptr)[[at, at + 1]].tolist()
            inside = inside and end - first == size
        if not inside or first < 0 or first + size > len(mask):
            seen[at, :, :n] = np.eye(n)
            continue
        rows = mask[first : first + size].reshape(n, -1)[:, prefix:].view(np.uint8)
        if mode == "bit_packed":
            rows = np.unpackbits(np.ascontiguousarray(rows), axis=1, bitorder="little")
        seen[at, :, :n] = rows[:, :n] != 0
    packed = np.packbits(seen, axis=2, bitorder="little")
    return packed.view("<u8").astype(np.uint64).reshape(-1, words)
