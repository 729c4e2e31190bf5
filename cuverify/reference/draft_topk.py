"""Oracle of a drafter's top-k: log-softmax and the likeliest tokens of each depth, in float64."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cuverify.errors import ArgumentError


def draft_topk(logits: ArrayLike, k: int) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Return the log-probabilities of the k likeliest tokens of each row, and the tokens.

    Parameters
    ----------
    logits : array_like of float, shape (..., vocabulary)
        What the drafter gives; -inf marks a token that cannot come.
    k : int
        Tokens of each row, at most the vocabulary.

    Returns
    -------
    logprobs : ndarray of float32, shape (..., k)
        Descending in each row. The sum over the vocabulary is taken in float64 and rounded once.
        NaN in a row that has a NaN or +inf, or -inf only.
    tokens : ndarray of int64, shape (..., k)
        Where logits are equal, the lower token stands first. A NaN is not among them: token 0
        stands where fewer than k logits are numbers.

    Raises
    ------
    ArgumentError
        The logits are no table, or `k` is out of range.
    """
    rows: NDArray[Any] = np.asarray(logits)
    if rows.ndim < 2 or rows.dtype.kind not in "fiu":
        raise ArgumentError("logits", rows, "must be a table of numbers, vocabulary last")
    rows = rows.astype(np.float64)
    if not rows.shape[-1]:
        raise ArgumentError("logits", list(rows.shape), "the vocabulary is empty")
    if not 1 <= k <= rows.shape[-1]:
        raise ArgumentError("k", k, f"must lie in 1 to {rows.shape[-1]}, the vocabulary")
    holes = np.isnan(rows)
    top = np.where(holes, -np.inf, rows).max(axis=-1, keepdims=True)
    with np.errstate(invalid="ignore", divide="ignore"):
        # not added to `top`, beside which it vanishes where logits are large
        norm = np.log(np.exp(rows - top).sum(axis=-1, keepdims=True))
        # behind all numbers, -inf among them
        order = np.lexsort((-np.where(holes, -np.inf, rows), holes), axis=-1)
        tokens = order[..., :k].astype(np.int64)
        best = np.take_along_axis(rows, tokens, axis=-1)
        logprobs = (best - top - norm).astype(np.float32)
    logprobs[np.isnan(norm)[..., 0]] = np.nan
    return logprobs, np.where(np.take_along_axis(holes, tokens, axis=-1), 0, tokens)
