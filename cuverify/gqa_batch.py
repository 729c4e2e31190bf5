"""A batch for grouped-query verify attention: keys and values apart, several KV heads.

Layout, lengths, trees, masks and landmarks are those of a `VerifyBatch`; each KV head has values of
its own, made as that batch makes them, so that a wrong kernel shows there and here alike.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, get_args

import numpy as np
from numpy.typing import NDArray

from cuverify.errors import ArgumentError
from cuverify.verify_batch import VerifyBatch
from cuverify.verify_shapes import Drafts

HEAD_DIM = 128
SM_SCALE = HEAD_DIM**-0.5

KEY_WIDTH = (HEAD_DIM - 16, 16)
"""Columns of the batch below: its rows are the keys."""

_SEEDS_APART = 1_000_003  # of KV heads, and of keys and values
_ALL_BITS = np.uint64(2**64 - 1)


@dataclass(frozen=True, eq=False, repr=False)
class GqaBatch:
    """One batch, all query heads and KV heads of a rank.

    Parameters
    ----------
    base : VerifyBatch
        With rows of 128 columns and at least `group` heads.
    group : int
        Query heads of a KV head.
    kv_heads : int
    drafts : {"tree", "block"}
        Whether draft tokens see what the base says, or all of them each other.

    Raises
    ------
    ArgumentError
        Something does not fit together.
    """

    base: VerifyBatch
    group: int
    kv_heads: int = 1
    drafts: Drafts = "tree"

    def __post_init__(self) -> None:
        if self.base.width != HEAD_DIM:
            raise ArgumentError("base", self.base, f"wants rows of {HEAD_DIM} columns")
        if not 1 <= self.group <= self.base.heads:
            raise ArgumentError("group", self.group, f"the base has {self.base.heads} heads")
        if self.kv_heads < 1:
            raise ArgumentError("kv_heads", self.kv_heads, "wants at least one")
        if self.drafts not in get_args(Drafts):
            raise ArgumentError("drafts", self.drafts, f"must be one of {get_args(Drafts)}")

    @property
    def heads(self) -> int:
        """H, the query heads of the rank."""
        return self.group * self.kv_heads

    @property
    def pairs(self) -> int:
        """Query rows times KV rows, over all requests and heads."""
        return self.base.pairs // self.base.heads * self.heads

    @property
    def flops(self) -> int:
        """Floating-point operations of both products, hidden pairs included."""
        return 4 * self.pairs * HEAD_DIM

    def q(self) -> NDArray[np.uint16]:
        """Return the queries: bits of bf16, shape (N, H, 128)."""
        parts = [self._keys(head).q()[:, : self.group] for head in range(self.kv_heads)]
        return np.concatenate(parts, axis=1)

    def k_buffer(self) -> NDArray[np.uint16]:
        """Return the keys: bits of bf16, shape (slots, kv_heads, 128), NaN where nobody reads."""
        return self._stacked(self._keys, VerifyBatch.pool)

    def v_buffer(self) -> NDArray[np.uint16]:
        """Return the values, in the shape of the keys."""
        return self._stacked(self._values, VerifyBatch.pool)

    def k_extend(self) -> NDArray[np.uint16]:
        """Return the keys of the drafts: bits of bf16, shape (N, kv_heads, 128)."""
        return self._stacked(self._keys, VerifyBatch.draft_kv)

    def v_extend(self) -> NDArray[np.uint16]:
        """Return the values of the drafts, in the shape of their keys."""
        return self._stacked(self._values, VerifyBatch.draft_kv)

    def visible(self, words: int | None = None) -> NDArray[np.uint64]:
        """Return who sees whom, as `VerifyBatch.visible` does; everybody in a block."""
        seen = self.base.visible(words)
        return np.full_like(seen, _ALL_BITS) if self.drafts == "block" else seen

    def oracle_arguments(self) -> dict[str, Any]:
        """Return the keywords of `cuverify.reference.verify_gqa.verify_gqa`."""
        layout = self.base.layout
        drafts: dict[str, Any] = (
            {"draft_slots": layout.out_cache_loc}
            if self.base.draft_source == "slots"
            else {"k_extend": self.k_extend(), "v_extend": self.v_extend()}
        )
        return {
            "q": self.q(),
            "k_buffer": self.k_buffer(),
            "v_buffer": self.v_buffer(),
            "sm_scale": self.base.sm_scale,
            "qo_indptr": layout.qo_indptr(),
            "kv_indptr": layout.kv_indptr(),
            "kv_indices": layout.kv_indices(self.base.index_dtype),
            "visible": self.visible(),
            **drafts,
        }

    def with_requests(self, requests: int) -> GqaBatch:
        """Return the batch with padded requests behind it, as `VerifyBatch.with_requests`."""
        return replace(self, base=self.base.with_requests(requests))

    def __repr__(self) -> str:
        return (
            f"GqaBatch({self.base!r}, group={self.group}, kv_heads={self.kv_heads}, "
            f"drafts={self.drafts!r})"
        )

    def _keys(self, head: int) -> VerifyBatch:
        return replace(self.base, seed=self.base.seed + 2 * head * _SEEDS_APART)

    def _values(self, head: int) -> VerifyBatch:
        # the last column of a row moves its scores and is no noise: values go without it
        seed = self.base.seed + (2 * head + 1) * _SEEDS_APART
        return replace(self.base, seed=seed, latent=HEAD_DIM, rope=16)

    def _stacked(
        self,
        of_head: Callable[[int], VerifyBatch],
        rows_of: Callable[[VerifyBatch], NDArray[np.uint16]],
    ) -> NDArray[np.uint16]:
        parts = [rows_of(of_head(head))[:, :HEAD_DIM] for head in range(self.kv_heads)]
        return np.stack(parts, axis=1)
