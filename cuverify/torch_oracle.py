"""Verify attention in torch, on any device: the float64 oracle of large batches, and the baseline.

The oracle of `cuverify.reference` is numpy and runs where nothing else does; beyond 10 GFLOP a
batch it is too slow, and this one takes over on a GPU. It keeps no running maximum: a row chunk
sees all its keys at once. The baseline is what a user of torch would write for the same tensors, in
their own dtype; the tolerances of `cuverify.tolerances` are multiples of its error.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuverify.errors import ArgumentError
from cuverify.reference.verify_attention import Attention

# Scores that are held at a time, by where they are.
_CHUNK_SCORES = {"cpu": 1 << 22, "cuda": 1 << 27}


def verify_attention(
    q: Any,
    pool: Any,
    *,
    latent: int,
    sm_scale: float,
    qo_indptr: NDArray[Any],
    kv_indptr: NDArray[Any],
    kv_indices: Any,
    visible: Any,
    draft_kv: Any = None,
    draft_slots: Any = None,
    kv_scale: float = 1.0,
    device: str = "cuda",
    exact: bool = True,
) -> Attention:
    """Compute what `cuverify.reference.verify_attention.verify_attention` does, in torch.

    Parameters
    ----------
    q, pool, kv_indices, visible, draft_kv, draft_slots
        As there; numpy arrays, or torch tensors of which those on `device` are not copied.
    latent, sm_scale, qo_indptr, kv_indptr, kv_scale
        As there, on the host.
    device : str
        Where to compute. Waits for it.
    exact : bool
        In float64, or else as `baseline_attention` does.

    Returns
    -------
    Attention
        On the host.
    """
    rows = _stored(pool, device)
    rows = rows.reshape(len(rows), rows.shape[-1])
    drafts = None if draft_kv is None else _stored(draft_kv, device)
    return attend(
        q,
        rows,
        rows[:, :latent],
        sm_scale=sm_scale,
        qo_indptr=qo_indptr,
        kv_indptr=kv_indptr,
        kv_indices=kv_indices,
        visible=visible,
        draft_keys=drafts,
        draft_values=None if drafts is None else drafts[:, :latent],
        draft_slots=draft_slots,
        kv_scale=kv_scale,
        device=device,
        exact=exact,
    )


def baseline_attention(q: Any, pool: Any, **arguments: Any) -> Attention:
    """Attend as torch would in 16 bits: gather, matrix product, softmax, matrix product.

    Products are accumulated in float32, the softmax is float32, its weights are rounded to the type
    of the queries for the second product, and so is the result; a pool of codes is made float32
    first, which rounds nothing.

    Parameters
    ----------
    q, pool, **arguments
        As for `verify_attention`.

    Returns
    -------
    Attention
        The rounded output and the float32 log-sum-exp, held in float64; `spread` as in the oracle.
    """
    return verify_attention(q, pool, exact=False, **arguments)


def attend(
    q: Any,
    keys: Any,
    values: Any,
    *,
    sm_scale: float,
    qo_indptr: NDArray[Any],
    kv_indptr: NDArray[Any],
    kv_indices: Any,
    visible: Any,
    draft_keys: Any = None,
    draft_values: Any = None,
    draft_slots: Any = None,
    kv_scale: float = 1.0,
    device: str = "cuda",
    exact: bool = True,
) -> Attention:
    """Compute what `cuverify.reference.verify_attention.attend` does, in torch.

    Parameters
    ----------
    q, keys, values, kv_indices, visible, draft_keys, draft_values, draft_slots
        As there; numpy arrays, or torch tensors of which those on `device` are not copied.
    sm_scale, qo_indptr, kv_indptr, kv_scale
        As there, on the host.
    device : str
        Where to compute. Waits for it.
    exact : bool
        In float64, or else as `baseline_attention` does.

    Returns
    -------
    Attention
        On the host.
    """
    import torch

    if (draft_keys is None) == (draft_slots is None):
        raise ArgumentError("draft_kv", draft_keys, "give either it or draft_slots")
    queries = _stored(q, device)
    pools = [_stored(keys, device), _stored(values, device)]
    slots, words = _integers(kv_indices, device), _integers(visible, device)
    wide = torch.float64 if exact else torch.float32
    tokens, heads = queries.shape[:2]
    # not zeros on the device in one piece and copied later: a large batch's output is large
    out = np.zeros((tokens, heads, pools[1].shape[1]))
    lse = np.full((tokens, heads), -np.inf)
    spread = np.zeros((tokens, heads))
    for request in range(len(qo_indptr) - 1):
        first, end = int(qo_indptr[request]), int(qo_indptr[request + 1])
        if first == end:
            continue
        prefix = slots[int(kv_indptr[request]) : int(kv_indptr[request + 1])].long()
        if draft_keys is None:
            fresh = _integers(draft_slots, device)[first:end].long()
            drafts = [_numbers(pool[fresh], wide, kv_scale) for pool in pools]
        else:
            drafts = [
                _stored(rows, device)[first:end].to(wide) for rows in (draft_keys, draft_values)
            ]
        seen_keys, seen_values = (
            torch.cat([_numbers(pool[prefix], wide, kv_scale), rows])
            for pool, rows in zip(pools, drafts, strict=True)
        )
        sees = torch.ones((end - first, len(seen_keys)), dtype=torch.bool, device=device)
        node = torch.arange(end - first, device=device)
        # node 63 is the sign bit: an arithmetic shift smears it, and the mask drops the smear
        sees[:, len(prefix) :] = (words[first:end, node >> 6] >> (node & 63)) & 1 == 1
        for at, chunk in _chunks(first, end, heads * len(seen_keys), device):
            part = _rows(queries[at], seen_keys, seen_values, sees[chunk], sm_scale, exact=exact)
            out[at], lse[at], spread[at] = (x.double().cpu().numpy() for x in part)
    return Attention(out, lse, spread)


def _rows(
    queries: Any, keys: Any, values: Any, sees: Any, sm_scale: float, *, exact: bool
) -> tuple[Any, Any, Any]:
    """Return output, log-sum-exp and spread of some tokens [n, H, D], all keys at once."""
    import torch

    rounded, queries = queries.dtype, queries.to(keys.dtype)
    nodes, heads, width = queries.shape
    scores = (queries.reshape(nodes * heads, width) @ keys.T).view(nodes, heads, -1) * sm_scale
    scores.masked_fill_(~sees[:, None, :], -torch.inf)
    lse = torch.logsumexp(scores, dim=2)
    none = torch.isneginf(lse)
    weights = torch.exp(scores - lse.masked_fill(none, 0.0)[:, :, None])
    spread = (weights.square() @ values.square().mean(dim=1)).sqrt()
    if not exact:
        weights = weights.to(rounded).to(keys.dtype)
    out = (weights.view(nodes * heads, -1) @ values).view(nodes, heads, -1)
    return out if exact else out.to(rounded), lse, spread


def _chunks(
    first: int, end: int, scores_a_token: int, device: str
) -> Iterator[tuple[slice, slice]]:
    """Yield ranges of a request's tokens, of the whole batch and within the request."""
    step = max(1, _CHUNK_SCORES[device.partition(":")[0]] // scores_a_token)
    for begin in range(first, end, step):
        stop = min(end, begin + step)
        yield slice(begin, stop), slice(begin - first, stop - first)


def _stored(values: Any, device: str) -> Any:
    """Return a tensor on the device: bf16 for the bits of bf16, uint8 for codes of e4m3."""
    import torch

    if isinstance(values, np.ndarray):
        raw = values.view(np.int16) if values.dtype == np.uint16 else values
        values = torch.from_numpy(_writable(raw))
    if values.dtype in (torch.int16, torch.uint16):
        values = values.view(torch.bfloat16)
    if values.dtype == torch.float8_e4m3fn:  # which hardly anything is written for
        values = values.view(torch.uint8)
    return values.to(device)


def _numbers(rows: Any, wide: Any, kv_scale: float) -> Any:
    """Return what rows of the pool mean."""
    import torch

    if rows.dtype == torch.uint8:
        rows = rows.view(torch.float8_e4m3fn).to(torch.float32)
    return rows.to(wide) * kv_scale


def _integers(values: Any, device: str) -> Any:
    import torch

    if isinstance(values, np.ndarray):
        values = torch.from_numpy(
            _writable(values.view(np.int64) if values.dtype == np.uint64 else values)
        )
    return values.to(device)


def _writable(array: NDArray[Any]) -> NDArray[Any]:
    # torch warns about read-only arrays, though they are only read here
    return array if array.flags.writeable else array.copy()
