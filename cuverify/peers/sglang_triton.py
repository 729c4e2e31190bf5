"""What SGLang runs for a tree over MLA: its Triton kernel `extend_attention_fwd` with a mask.

It goes through a prefix with one block a head and row tile, so one step in a graph is enough: a
second copy of the rows would change nothing but the run's length.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuverify.peers import Peer, Prepared
from cuverify.peers.laid_out import sglang_module
from cuverify.verify_shapes import LATENT, WIDTH

if TYPE_CHECKING:
    from cuverify.verify_problem import Problem

NAMES = ("SGLang, Triton",)
_MODULE = "sglang.kernels.ops.attention.extend_attention"


def load(folder: Path | None) -> list[Peer]:
    """Return the kernel of an installed SGLang, or of the folder."""
    extend = sglang_module(_MODULE, folder).extend_attention_fwd
    return [Peer(NAMES[0], lambda problem: prepare(problem, extend), ragged=True, slow=True)]


def prepare(problem: Problem, extend: Any) -> Prepared:
    """Return one step over the first copy of the rows."""
    import numpy as np
    import torch

    shape, device = problem.shape, problem.pool.device
    pool = problem.pool.view(-1, 1, WIDTH)
    fresh = problem.pool[problem.draft_slots[0]].view(-1, 1, WIDTH)
    values = fresh[..., :LATENT].contiguous()
    masks = []
    for rows, sees in zip(shape.prefixes, problem.sees, strict=True):
        whole = torch.ones((shape.tree, rows + shape.tree), dtype=torch.uint8, device=device)
        whole[:, rows:] = torch.from_numpy(sees).to(device)
        masks.append(whole.reshape(-1))
    bounds = np.cumsum([0, *(len(mask) for mask in masks)])
    mask = torch.cat(masks)
    mask_indptr = torch.from_numpy(bounds).to(device)
    qo_indptr = problem.qo_indptr.long()
    kv_indices = problem.prefix_slots[0].long()
    out = problem.new_output()

    def step() -> None:
        extend(
            problem.q, fresh, values, out, pool, pool[..., :LATENT], qo_indptr, problem.kv_indptr,
            kv_indices, mask, True, mask_indptr, shape.tree, 1.0, 1.0, sm_scale=problem.sm_scale,
        )  # fmt: skip

    return Prepared([step], out)
