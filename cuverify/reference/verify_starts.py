"""Oracle of what each block of attention reads first: entry by entry, row by row."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

WORDS = 16
ROWS = 64


def verify_starts(
    work: NDArray[np.int32],
    cta_work: NDArray[np.int32],
    kv_indptr: NDArray[Any],
    qo_indptr: NDArray[Any],
    kv_indices: NDArray[Any],
    out_cache_loc: NDArray[np.int64] | None = None,
) -> dict[str, NDArray[Any]]:
    """Return the starts of a plan's blocks.

    Parameters
    ----------
    work : ndarray of int32, shape (max_work, 6)
    cta_work : ndarray of int32, shape (num_ctas, 4)
        The plan.
    kv_indptr : ndarray of int, shape (B + 1,)
        Bounds of each prefix in `kv_indices`.
    qo_indptr : ndarray of int, shape (B + 1,)
        Bounds of each request's tree tokens.
    kv_indices : ndarray of int
        Slots of the prefixes.
    out_cache_loc : ndarray of int64, shape (N,), optional
        Slots of the tree tokens; not known if absent.

    Returns
    -------
    dict of str to ndarray
        ``cta_starts``, int32 of shape (num_ctas, 16), and ``cta_slots``, int64 of (num_ctas, 64).
    """
    starts = np.zeros((len(cta_work), WORDS), np.int32)
    slots = np.full((len(cta_work), ROWS), -1, np.int64)
    starts[:, :4] = cta_work
    for block, (number, end_number, _, _) in enumerate(cta_work.tolist()):
        if number >= end_number:
            continue
        request, _, begin, end, _, _ = work[number].tolist()
        first_index, end_index = (int(kv_indptr[request + side]) for side in (0, 1))
        first_token, end_token = (int(qo_indptr[request + side]) for side in (0, 1))
        starts[block, 4:10] = work[number]
        starts[block, 10:14] = first_index, end_index, first_token, end_token
        known = kv_indices[first_index + begin : first_index + end].tolist()
        if end == end_index - first_index and out_cache_loc is not None:
            known += out_cache_loc[first_token:end_token].tolist()
        known = known[:ROWS]
        slots[block, : len(known)] = known
    return {"cta_starts": starts, "cta_slots": slots}
