"""What SGLang runs for a tree: its Triton kernel `extend_attention_fwd` with a mask.

It goes through a prefix with one block a head and row tile, so one step in a graph is enough: a
second copy of the rows would change nothing but the run's length.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from cuverify.peers import Peer, Prepared
from cuverify.peers.laid_out import sglang_module
from cuverify.verify_shapes import LATENT, WIDTH

if TYPE_CHECKING:
    from cuverify.gqa_problem import GqaProblem
    from cuverify.verify_problem import Problem

NAMES = ("SGLang, Triton",)
_MODULE = "sglang.kernels.ops.attention.extend_attention"


def load(folder: Path | None) -> list[Peer]:
    """Return the kernel of an installed SGLang, or of the folder."""
    return [peer_of(folder, latent_rows)]


def peer_of(folder: Path | None, rows_of: Callable[[Any], Rows]) -> Peer:
    """Return the kernel as a peer.

    Parameters
    ----------
    folder : Path or None
        With SGLang's modules, where it is not installed.
    rows_of : callable
        Returns the rows of a problem.
    """
    extend = sglang_module(_MODULE, folder).extend_attention_fwd

    def prepared(problem: Any) -> Prepared:
        return prepare(problem, rows_of(problem), extend)

    return Peer(NAMES[0], prepared, ragged=True, slow=True)


class Rows(NamedTuple):
    """What the kernel reads: [tokens or slots, KV heads, columns].

    Attributes
    ----------
    k_extend, v_extend : tensor
        Of the drafts of the first copy, contiguous.
    k_buffer, v_buffer : tensor
        The pools.
    """

    k_extend: Any
    v_extend: Any
    k_buffer: Any
    v_buffer: Any


def latent_rows(problem: Problem) -> Rows:
    """Return latent rows, whose first columns are the values."""
    pool = problem.pool.view(-1, 1, WIDTH)
    fresh = problem.pool[problem.draft_slots[0]].view(-1, 1, WIDTH)
    return Rows(fresh, fresh[..., :LATENT].contiguous(), pool, pool[..., :LATENT])


def prepare(problem: Problem | GqaProblem, rows: Rows, extend: Any) -> Prepared:
    """Return one step over the first copy of the rows."""
    import numpy as np
    import torch

    shape, device = problem.shape, problem.q.device
    masks = []
    for prefix, sees in zip(shape.prefixes, problem.sees, strict=True):
        whole = torch.ones((shape.tree, prefix + shape.tree), dtype=torch.uint8, device=device)
        whole[:, prefix:] = torch.from_numpy(sees).to(device)
        masks.append(whole.reshape(-1))
    bounds = np.cumsum([0, *(len(mask) for mask in masks)])
    mask = torch.cat(masks)
    mask_indptr = torch.from_numpy(bounds).to(device)
    qo_indptr = problem.qo_indptr.long()
    kv_indices = problem.prefix_slots[0].long()
    out = problem.new_output()

    def step() -> None:
        extend(
            problem.q, rows.k_extend, rows.v_extend, out, rows.k_buffer, rows.v_buffer, qo_indptr,
            problem.kv_indptr, kv_indices, mask, True, mask_indptr, shape.tree, 1.0, 1.0,
            sm_scale=problem.sm_scale,
        )  # fmt: skip

    return Prepared([step], out)
