"""What one writes in plain torch: gather the rows, a product, softmax, a second product.

Both forms are strong ones: scaling is part of the first product, the mask is one small addition,
one request alone is a plain matrix product, and keys are padded to a multiple of 16. With an odd
number of keys the products take four times as long; with 65,544 of them, and other numbers above
65,536 that are 8 more than a multiple of 16, the second product of torch 2.11 with CUDA 13.0 on an
H200 leaves the last eight out. With bf16 scores less is moved and more is lost.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuverify.peers import Peer, Prepared
from cuverify.verify_shapes import LATENT, WIDTH

if TYPE_CHECKING:
    from cuverify.verify_problem import Problem

_ALIGNED = 16  # keys

NAMES = ("torch, bf16 scores", "torch, fp32 scores")


def load(folder: Path | None) -> list[Peer]:
    """Return both forms; torch is always here."""
    return [Peer(NAMES[0], _prepare_bf16), Peer(NAMES[1], _prepare_fp32)]


def _prepare_bf16(problem: Problem) -> Prepared:
    import torch

    parts = _Parts(problem)

    def step(slots: Any) -> None:
        rows = problem.pool.index_select(0, slots).view(parts.batch, parts.keys, WIDTH)
        if parts.batch == 1:  # a matrix product is chosen better than a batch of one
            scores = torch.addmm(
                parts.nothing, parts.queries[0], rows[0].T, beta=0, alpha=problem.sm_scale
            )[None]
        else:
            scores = torch.baddbmm(
                parts.nothing, parts.queries, rows.mT, beta=0, alpha=problem.sm_scale
            )
        scores[:, :, parts.prefix :] += parts.hidden
        weights = torch.softmax(scores, dim=2)
        if parts.batch == 1:
            torch.mm(weights[0], rows[0, :, :LATENT], out=parts.result[0])
        else:
            torch.bmm(weights, rows[:, :, :LATENT], out=parts.result)

    return parts.prepared(step)


def _prepare_fp32(problem: Problem) -> Prepared:
    import torch

    parts = _Parts(problem)

    def step(slots: Any) -> None:
        rows = problem.pool.index_select(0, slots).view(parts.batch, parts.keys, WIDTH)
        scores = torch.bmm(parts.scaled, rows.mT, out_dtype=torch.float32)
        scores[:, :, parts.prefix :] += parts.hidden
        weights = torch.softmax(scores, dim=2).bfloat16()
        torch.bmm(weights, rows[:, :, :LATENT], out=parts.result)

    return parts.prepared(step)


class _Parts:
    """What both forms need of a problem."""

    def __init__(self, problem: Problem) -> None:
        import numpy as np
        import torch

        shape, device = problem.shape, problem.pool.device
        self.batch, self.prefix = shape.batch, shape.prefixes[0]
        drafts = -(-(self.prefix + shape.tree) // _ALIGNED) * _ALIGNED - self.prefix
        self.keys = self.prefix + drafts
        rows = shape.tree * shape.heads
        self.queries = problem.q.view(self.batch, rows, WIDTH)
        # rounded once more: the price of scores that no kernel scales
        self.scaled = (self.queries * problem.sm_scale).bfloat16()
        self.nothing = torch.zeros((), dtype=torch.bfloat16, device=device)
        sees = torch.from_numpy(np.stack(problem.sees)).to(device)
        hidden = torch.full((self.batch, shape.tree, drafts), -torch.inf, device=device)
        hidden[..., : shape.tree].masked_fill_(sees, 0.0)
        self.hidden = hidden.bfloat16().repeat_interleave(shape.heads, dim=1)
        self.out = problem.new_output()
        self.result = self.out.view(self.batch, rows, LATENT)
        self.slots = []
        for prefix, fresh in zip(problem.prefix_slots, problem.draft_slots, strict=True):
            slots = fresh.new_zeros((self.batch, self.keys))
            slots[:] = fresh[0]  # what is padded is hidden, and must be finite
            slots[:, : self.prefix] = prefix.view(self.batch, self.prefix)
            slots[:, self.prefix : self.prefix + shape.tree] = fresh.view(self.batch, shape.tree)
            self.slots.append(slots.reshape(-1))

    def prepared(self, step: Callable[[Any], None]) -> Prepared:
        steps = [lambda slots=slots: step(slots) for slots in self.slots]
        return Prepared(steps, self.out)
