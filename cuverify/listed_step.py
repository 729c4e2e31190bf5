"""What the check steps of all verify attentions have in common: lists, masks, guarded outputs.

A step has buffers of its own for what does not depend on how KV rows are laid out: lengths, bounds,
the request-to-token table, the index list that the plan makes, visibility words, and outputs with
guard columns between their rows.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cuverify.errors import CaseError
from cuverify.static_buffers import fill, static_buffer, write
from cuverify.validators.compare import Bounded

if TYPE_CHECKING:
    from cuverify.cases import Target
    from cuverify.kv_layout import KvLayout
    from cuverify.verify_batch import VerifyBatch

NAN = float("nan")
GUARD = 8
"""Columns behind each token's outputs; nobody may write them."""

NO_SLOT = -1


@dataclass(frozen=True)
class Capacity:
    """Sizes of the buffers that several batches share.

    Attributes
    ----------
    requests, tokens, slots, listed, words : int
        B, N, slots of the pool, length of the index list, visibility words of a token.
    tree : int
        Tokens of the widest tree.
    table : tuple of int
        Rows and width of the request-to-token table.
    """

    requests: int
    tokens: int
    slots: int
    listed: int
    words: int
    tree: int
    table: tuple[int, int]

    @classmethod
    def of(cls, batches: Iterable[VerifyBatch]) -> Capacity:
        """Return what holds the largest of some batches, each filled up with padded requests."""
        batches = list(batches)
        requests = max(batch.num_requests for batch in batches)
        tables = [batch.layout.req_to_token.shape for batch in batches]
        return cls(
            requests,
            max(batch.num_tokens + requests - batch.num_requests for batch in batches),
            max(batch.layout.num_slots for batch in batches),
            max(
                int(batch.layout.seq_lens.sum()) + requests - batch.num_requests
                for batch in batches
            ),
            max(batch.num_words for batch in batches),
            max(1, *(batch.max_tree_tokens for batch in batches)),
            (max(rows for rows, _ in tables), max(width for _, width in tables)),
        )

    def check(self, need: Capacity) -> None:
        """Raise unless a batch that needs so much fits, filled up with padded requests.

        Raises
        ------
        CaseError
            Naming both.
        """
        padded = self.requests - need.requests
        fits = (
            padded >= 0
            and need.tokens + padded <= self.tokens
            and need.listed + padded <= self.listed
            and need.slots <= self.slots
            and need.words <= self.words
            and need.tree <= self.tree
            and all(n <= m for n, m in zip(need.table, self.table, strict=True))
        )
        if not fits:
            raise CaseError(f"a batch of {need} does not fit buffers of {self}")


class ListedStep:
    """Buffers of a verify step, on the host lane or on the current CUDA device.

    Parameters
    ----------
    size : Capacity
    xp : {"numpy", "torch-cuda"}
        Where the buffers are.
    index_dtype : {"int32", "int64"}
        Of `kv_indices`.
    heads, columns : int
        Of the outputs.
    element : str
        Their dtype, as `cuverify.static_buffers.static_buffer` takes it.
    """

    def __init__(
        self,
        size: Capacity,
        xp: Target,
        index_dtype: str,
        heads: int,
        columns: int,
        element: str = "bf16",
    ) -> None:
        self.size, self.xp = size, xp
        self.seq_lens = static_buffer(xp, (size.requests,), "int64")
        self.qo_indptr = static_buffer(xp, (size.requests + 1,), "int32")
        self.req_pool_indices = static_buffer(xp, (size.requests,), "int64")
        self.req_to_token = static_buffer(xp, size.table, "int32")
        self.kv_indices = static_buffer(xp, (size.listed,), index_dtype)
        self.visible = static_buffer(xp, (size.tokens, size.words), "uint64")
        self._storage = static_buffer(xp, (size.tokens, heads * columns + GUARD), element)
        self.out = self._storage[:, :-GUARD].reshape(size.tokens, heads, columns)
        self.lse = static_buffer(xp, (size.tokens, heads), "float32")

    @property
    def outputs(self) -> Mapping[str, Any]:
        """Outputs, log-sum-exps, and the guards between the outputs' rows."""
        return {"out": self.out, "lse": self.lse, "guards": self._storage[:, -GUARD:]}

    @property
    def lists(self) -> dict[str, Any]:
        """What a plan makes its index list of, and the list."""
        return {
            "kv_indices": self.kv_indices,
            "req_to_token": self.req_to_token,
            "req_pool_indices": self.req_pool_indices,
        }

    def write_lists(self, layout: KvLayout, visible: NDArray[np.uint64]) -> None:
        """Write a batch's lists and masks; what is behind them becomes stale."""
        write(self.seq_lens, layout.seq_lens)
        write(self.qo_indptr, layout.qo_indptr())
        write(self.req_pool_indices, layout.req_pool_indices)
        fill(self.req_to_token, NO_SLOT)
        write(self.req_to_token, layout.req_to_token)
        fill(self.kv_indices, NO_SLOT)
        fill(self.visible, -1 if self.visible.dtype != np.uint64 else 2**64 - 1)
        write(self.visible, visible)

    def poison_outputs(self) -> None:
        """Fill outputs and guards with NaN."""
        for buffer in (self._storage, self.lse):
            fill(buffer, NAN)

    def bounded(self, right: Mapping[str, Any]) -> dict[str, Bounded]:
        """Return what the outputs must be when the first tokens are `right`: the rest is poison."""
        out = np.full(tuple(self.out.shape), np.nan)
        lse = np.full(tuple(self.lse.shape), np.nan)
        atol, rms, lse_atol = np.zeros((*lse.shape, 1)), np.zeros(lse.shape), np.zeros(lse.shape)
        tokens = slice(len(right["out"].values))
        out[tokens], atol[tokens] = right["out"].values, right["out"].atol
        rms[tokens] = right["out"].rms
        lse[tokens], lse_atol[tokens] = right["lse"].values, right["lse"].atol
        return {
            "out": Bounded(out, atol, rms),
            "lse": Bounded(lse, lse_atol),
            "guards": Bounded(np.full((len(out), GUARD), np.nan), 0.0),
        }
