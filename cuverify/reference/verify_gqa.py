"""Oracle of grouped-query verify attention, in numpy float64: one KV head after the other.

The heads that share a KV head are attended to by the core of `cuverify.reference.verify_attention`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuverify.errors import ArgumentError
from cuverify.reference.verify_attention import Attention, attend

Attend = Callable[..., Attention]
"""Attends with the heads of one KV head, as `cuverify.reference.verify_attention.attend` does."""


def verify_gqa(
    q: Any,
    k_buffer: Any,
    v_buffer: Any,
    *,
    sm_scale: float,
    qo_indptr: NDArray[Any],
    kv_indptr: NDArray[Any],
    kv_indices: Any,
    visible: Any,
    k_extend: Any = None,
    v_extend: Any = None,
    draft_slots: Any = None,
    attend: Attend = attend,
) -> Attention:
    """Attend from every tree token to its request's prefix and to the draft nodes that it sees.

    Parameters
    ----------
    q : ndarray of uint16 (the bits of bf16) or of floats, shape (N, H, D)
        Query head i has KV head ``i // (H / kv_heads)``.
    k_buffer, v_buffer : ndarray of uint16 or of floats, shape (slots, kv_heads, D)
    k_extend, v_extend : ndarray of uint16 or of floats, shape (N, kv_heads, D), optional
        Rows of the tree tokens, instead of `draft_slots`.
    sm_scale, qo_indptr, kv_indptr, kv_indices, visible, draft_slots
        As for `cuverify.reference.verify_attention.verify_attention`.
    attend : callable
        What attends with the heads of one KV head; arrays are handed to it as they are given.

    Returns
    -------
    Attention
        `out` of shape (N, H, D), `lse` and `spread` of shape (N, H).

    Raises
    ------
    ArgumentError
        H is no multiple of the KV heads, or as `attend` raises it.
    """
    heads, kv_heads = q.shape[1], k_buffer.shape[1]
    if heads % kv_heads:
        raise ArgumentError("q", tuple(q.shape), f"heads are no multiple of {kv_heads} KV heads")
    group = heads // kv_heads
    parts = [
        attend(
            q[:, head * group : (head + 1) * group],
            k_buffer[:, head],
            v_buffer[:, head],
            sm_scale=sm_scale,
            qo_indptr=qo_indptr,
            kv_indptr=kv_indptr,
            kv_indices=kv_indices,
            visible=visible,
            draft_keys=None if k_extend is None else k_extend[:, head],
            draft_values=None if v_extend is None else v_extend[:, head],
            draft_slots=draft_slots,
        )
        for head in range(kv_heads)
    ]
    out, lse, spread = (np.concatenate(arrays, axis=1) for arrays in zip(*parts, strict=True))
    return Attention(out, lse, spread)
