"""Grouped-query attention in plain torch: gather the rows, and then products or torch's own SDPA.

Rows are gathered head by head, so that everything behind is contiguous; queries, indices and masks
are laid out beforehand and not timed. Keys are padded to a multiple of 16, as in
`cuverify.peers.torch_bmm`, which says why.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cuverify.gqa_shapes import HEAD_DIM
from cuverify.peers import Peer, Prepared

if TYPE_CHECKING:
    from cuverify.gqa_problem import GqaProblem

_ALIGNED = 16  # keys


def prepare_bmm(problem: GqaProblem) -> Prepared:
    """Return gather, product, softmax and product, with bf16 scores."""
    import torch

    parts = _Parts(problem)
    hidden = parts.hidden.expand(-1, parts.kv_heads, -1, -1)
    hidden = hidden[..., parts.prefix :].reshape(len(parts.queries), parts.rows, -1)
    nothing = torch.zeros((), dtype=torch.bfloat16, device=problem.q.device)

    def attend(keys: Any, values: Any) -> Any:
        scores = torch.baddbmm(nothing, parts.queries, keys.mT, beta=0, alpha=problem.sm_scale)
        scores[:, :, parts.prefix :] += hidden
        return torch.bmm(torch.softmax(scores, dim=2), values)

    return parts.prepared(attend)


def prepare_sdpa(problem: GqaProblem) -> Prepared:
    """Return gather and `scaled_dot_product_attention` with a mask, whatever torch chooses."""
    import torch

    parts = _Parts(problem)

    def attend(keys: Any, values: Any) -> Any:
        q, k, v = (
            rows.unflatten(0, (parts.batch, parts.kv_heads))
            for rows in (parts.queries, keys, values)
        )
        return torch.nn.functional.scaled_dot_product_attention(
            q, k, v, attn_mask=parts.hidden, scale=problem.sm_scale
        )

    return parts.prepared(attend)


NAMES = ("torch, gather + bmm", "torch, gather + SDPA")


def load(folder: Path | None) -> list[Peer]:
    """Return both: torch is always here. They take requests of one length only."""
    return [Peer(NAMES[0], prepare_bmm), Peer(NAMES[1], prepare_sdpa)]


class _Parts:
    """What both forms need of a problem."""

    def __init__(self, problem: GqaProblem) -> None:
        import torch

        shape, device = problem.shape, problem.q.device
        self.batch, self.prefix, self.kv_heads = shape.batch, shape.prefixes[0], shape.kv_heads
        drafts = -(-(self.prefix + shape.tree) // _ALIGNED) * _ALIGNED - self.prefix
        keys = self.prefix + drafts
        self.rows = shape.tree * shape.group
        by_head = (self.batch, shape.tree, self.kv_heads, shape.group, HEAD_DIM)
        queries = problem.q.view(by_head).transpose(1, 2)
        self.queries = queries.reshape(self.batch * self.kv_heads, self.rows, HEAD_DIM)
        sees = torch.from_numpy(np.stack(problem.sees)).to(device)
        hidden = torch.zeros((self.batch, shape.tree, keys), dtype=torch.bfloat16, device=device)
        hidden[..., self.prefix :] = -torch.inf
        hidden[..., self.prefix : self.prefix + shape.tree].masked_fill_(sees, 0.0)
        self.hidden = hidden.repeat_interleave(shape.group, dim=1)[:, None]
        self.pools = [pool.view(-1, HEAD_DIM) for pool in problem.pools]
        self.out = problem.new_output()
        # the same memory, in the order in which the heads were attended to
        self.result = self.out.view(by_head).transpose(1, 2)
        heads = torch.arange(self.kv_heads, device=device)[:, None]
        self.indices = []
        for prefix, fresh in zip(problem.prefix_slots, problem.draft_slots, strict=True):
            slots = fresh.new_zeros((self.batch, 1, keys))
            slots[:] = fresh[0]  # what is padded is hidden, and must be finite
            slots[..., : self.prefix] = prefix.view(self.batch, 1, self.prefix)
            slots[..., self.prefix : self.prefix + shape.tree] = fresh.view(self.batch, 1, -1)
            self.indices.append((slots * self.kv_heads + heads).reshape(-1))

    def prepared(self, attend: Callable[[Any, Any], Any]) -> Prepared:
        def step(rows: Any) -> None:
            keys, values = (
                pool.index_select(0, rows).view(len(self.queries), -1, HEAD_DIM)
                for pool in self.pools
            )
            self.result.copy_(attend(keys, values).view(self.result.shape))

        return Prepared([functools.partial(step, rows) for rows in self.indices], self.out)
