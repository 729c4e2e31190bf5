"""A step of grouped-query verify attention on a GPU, as every kernel that is compared gets it.

As in `cuverify.verify_problem`: several copies of the step's rows at random slots that no two
copies share, NaN in all others, drafts that weigh about as much as their prefix. Keys and values
are the halves of one tensor, so that reading both is one launch.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from cuverify.gqa_batch import SM_SCALE
from cuverify.gqa_shapes import HEAD_DIM, GqaShape
from cuverify.own_attention import judge_copies
from cuverify.reference.verify_gqa import verify_gqa
from cuverify.verify_problem import HANDLE, DeviceBounds, draft_masks, mask_words, score_lift

if TYPE_CHECKING:
    from cuverify.ops.verify_gqa import VerifyGqa
    from cuverify.ops.verify_plan import VerifyPlan
    from cuverify.reference.verify_attention import Attention
    from cuverify.verify_variants import VariantName

_POOL_BYTES = 2 << 30


class GqaProblem:
    """One shape's tensors, all on one device.

    Parameters
    ----------
    shape : GqaShape
    seed : int
        Of values, slots and trees.
    slots : int, optional
        Slots of the pools; those of 2 GB, or as many as the shape needs, if absent.
    copies : int, optional
        As many as find slots of their own, up to 16, if absent.
    device : str
        As torch names it.

    Attributes
    ----------
    q : tensor of bfloat16, shape (N, H, 128)
    pools : tensor of bfloat16, shape (2, slots, kv_heads, 128)
        Keys, then values; NaN outside the rows of the step.
    prefix_slots : list of int32 tensors, shape (prefix rows,)
        Slots of all prefixes, one request behind the other, for each copy.
    draft_slots : list of int64 tensors, shape (N,)
    sees : list of ndarrays of bool, shape (T, T)
        Which draft token sees which, for each request.
    visible : tensor of int64, shape (N, W)
    seq_lens, qo_indptr, kv_indptr : tensors of int32
    sm_scale : float
    """

    def __init__(
        self,
        shape: GqaShape,
        *,
        seed: int = 0,
        slots: int | None = None,
        copies: int | None = None,
        device: str = "cuda",
    ) -> None:
        import torch

        self.shape, self.sm_scale = shape, float(SM_SCALE)
        if slots is None:
            slots = max(shape.rows, _POOL_BYTES // shape.row_bytes)
        self.copies = shape.copies(slots) if copies is None else copies
        generator = torch.Generator(device=device).manual_seed(seed + shape.rows)

        def noise(*size: int) -> Any:
            return torch.randn(size, generator=generator, device=device)

        queries = noise(shape.tokens, shape.heads, HEAD_DIM)
        queries /= self.sm_scale * (HEAD_DIM - 1) ** 0.5
        queries[..., -1] = HANDLE
        self.q = queries.bfloat16()
        rows = noise(2, shape.rows, shape.kv_heads, HEAD_DIM).bfloat16()
        lift = torch.from_numpy(score_lift(shape, seed)).to(device) / (HANDLE * self.sm_scale)
        rows[0, :, :, -1] = lift.bfloat16()[:, None]
        self.pools = torch.full(
            (2, slots, shape.kv_heads, HEAD_DIM), float("nan"), dtype=torch.bfloat16, device=device
        )
        order = torch.randperm(slots, generator=generator, device=device)
        taken = order[: self.copies * shape.rows].view(self.copies, shape.rows)
        for copy in taken:
            self.pools[:, copy] = rows
        self.prefix_slots = [copy[: shape.prefix_rows].int() for copy in taken]
        self.draft_slots = [copy[shape.prefix_rows :].contiguous() for copy in taken]

        self.sees = draft_masks(shape, seed)
        self.visible = torch.from_numpy(mask_words(self.sees).view(np.int64)).to(device)
        self._qo_indptr = np.arange(shape.batch + 1) * shape.tree
        self._kv_indptr = np.cumsum((0, *shape.prefixes))
        self.seq_lens, self.qo_indptr, self.kv_indptr = (
            torch.from_numpy(np.asarray(values, np.int32)).to(device)
            for values in (shape.prefixes, self._qo_indptr, self._kv_indptr)
        )

    @functools.cached_property
    def exact(self) -> Attention:
        """Right outputs and log-sum-exps, in float64 on the host."""
        return self._attention(exact=True)

    @functools.cached_property
    def baseline(self) -> Attention:
        """What plain torch makes of it in the outputs' own dtype, whose error is the measure."""
        return self._attention(exact=False)

    @functools.cached_property
    def bounds(self) -> DeviceBounds:
        """The right outputs and log-sum-exps, and what each may be off by."""
        return DeviceBounds.of(self.exact, self.baseline, self.q.device)

    def new_output(self) -> Any:
        """Return an output [N, H, 128] of bfloat16 that holds NaN."""
        import torch

        return torch.full_like(self.q, float("nan"))

    def _attention(self, *, exact: bool) -> Attention:
        from cuverify import torch_oracle

        return verify_gqa(
            self.q,
            *self.pools,
            sm_scale=self.sm_scale,
            qo_indptr=self._qo_indptr,
            kv_indptr=self._kv_indptr,
            kv_indices=self.prefix_slots[0],
            visible=self.visible,
            draft_slots=self.draft_slots[0],
            attend=functools.partial(torch_oracle.attend, exact=exact, device=self.q.device.type),
        )


@dataclass(frozen=True, eq=False)
class OwnGqa:
    """Our attention over all copies of a problem's rows, planned and ready.

    Attributes
    ----------
    problem : GqaProblem
    layers : list of VerifyGqa
        One for each copy; all write the same outputs by the same plan.
    out, lse : tensor
    plan : VerifyPlan
    splits : int
        Pieces of the row tile that is cut most.
    """

    problem: GqaProblem
    layers: list[VerifyGqa]
    out: Any
    lse: Any
    plan: VerifyPlan
    splits: int

    @classmethod
    def of(
        cls,
        problem: GqaProblem,
        *,
        rows: int | None = None,
        num_ctas: int | None = None,
        variant: VariantName | None = None,
        values: Mapping[str, int] | None = None,
        plan_values: Mapping[str, int] | None = None,
    ) -> OwnGqa:
        """Plan a problem and bind a layer for each of its copies; parameters as for the ops."""
        import torch

        from cuverify.ops.verify_gqa import GqaWorkspace, VerifyGqa, plan_verify_gqa

        shape, out = problem.shape, problem.new_output()
        lse = torch.empty(out.shape[:2], device=out.device)
        layers: list[VerifyGqa] = []
        scratch: GqaWorkspace | None = None
        workspace = None
        # The plan knows lengths alone: copies share its buffers and differ in their index lists.
        for prefix, drafts in zip(problem.prefix_slots, problem.draft_slots, strict=True):
            plan = plan_verify_gqa(
                problem.seq_lens,
                problem.qo_indptr,
                group=shape.group,
                kv_heads=shape.kv_heads,
                max_tokens=shape.tokens,
                max_tree_tokens=shape.tree,
                rows=rows,
                num_ctas=num_ctas,
                workspace=workspace,
                variant=variant,
                values=plan_values,
                kv_indices=prefix,
                kv_indptr=problem.kv_indptr,
            )
            workspace = plan.workspace
            scratch = scratch or GqaWorkspace.allocate(
                out, plan=plan, group=shape.group, kv_heads=shape.kv_heads
            )
            layers.append(
                VerifyGqa(
                    problem.q,
                    problem.pools[0],
                    problem.pools[1],
                    out,
                    lse,
                    plan=plan,
                    visible=problem.visible,
                    sm_scale=problem.sm_scale,
                    out_cache_loc=drafts,
                    workspace=scratch,
                    variant=variant,
                    values=values,
                )
            )
        plan()
        plan.read_status()
        return cls(problem, layers, out, lse, plan, int(plan.workspace.work[:, 5].max()))

    def judge(self) -> str | None:
        """Return what is wrong, None if nothing is; see `cuverify.own_attention.judge_copies`."""
        return judge_copies(self.layers, self.out, self.lse, self.problem)
