"""Our verify attention made ready for a problem: planned, judged, and free to be timed or tuned."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Protocol

from cuverify.verify_shapes import LATENT, ROPE
from cuverify.verify_variants import VARIANTS, choose_variant

if TYPE_CHECKING:
    from cuverify.narrow import Narrow
    from cuverify.ops.verify_attention import VerifyAttention
    from cuverify.ops.verify_plan import VerifyPlan
    from cuverify.ops.verify_starts import VerifyStarts
    from cuverify.reference.verify_attention import Attention
    from cuverify.verify_problem import DeviceBounds, Problem
    from cuverify.verify_variants import VariantName


@dataclass(frozen=True, eq=False)
class OwnAttention:
    """Our attention over all copies of a problem's rows.

    Attributes
    ----------
    problem : Problem
    layers : sequence of VerifyAttention
        One for each copy; all write the same outputs by the same plan.
    out : tensor of bfloat16 or float16, shape (N, H, 512)
    lse : tensor of float32, shape (N, H)
    plan : VerifyPlan
        Makes the same plan again, and the index list from a request-to-token table.
    starts : VerifyStarts or None
        Of that plan, where the text reads them.
    splits : int
        Pieces of the row tile that is cut most.
    """

    problem: Problem
    layers: Sequence[VerifyAttention]
    out: Any
    lse: Any
    plan: VerifyPlan
    starts: VerifyStarts | None
    splits: int

    @property
    def variant(self) -> VariantName:
        """The text that attends."""
        return self.layers[0].variant

    @classmethod
    def of(
        cls,
        problem: Problem,
        *,
        variant: VariantName | None = None,
        values: Mapping[str, int] | None = None,
        plan_values: Mapping[str, int] | None = None,
        num_ctas: int | None = None,
    ) -> OwnAttention:
        """Plan a problem and bind a layer for each of its copies.

        Parameters
        ----------
        problem : Problem
        variant : str, optional
            The text; the rule's choice if absent.
        values, plan_values : mapping of str to int, optional
            `-D` values of the attention's text and of the plan.
        num_ctas : int, optional
            Blocks that attend; the op's own choice if absent.

        Raises
        ------
        ArgumentError
            As the ops raise it.
        """
        import torch

        from cuverify.launching import capability
        from cuverify.ops.verify_attention import AttentionWorkspace, VerifyAttention
        from cuverify.ops.verify_plan import PlanWorkspace, VerifyPlan
        from cuverify.ops.verify_starts import StartsWorkspace, VerifyStarts

        shape, device = problem.shape, problem.pool.device
        pool: Narrow = "fp8_e4m3" if shape.stored == "fp8" else shape.stored
        if variant is None:
            # the plan is to be cut for the text that attends
            variant = choose_variant(
                capability(str(device)),
                latent=LATENT,
                rope=ROPE,
                sm_scale=problem.sm_scale,
                pool=pool,
            )
        workspace = PlanWorkspace.allocate(
            problem.seq_lens,
            max_batch=shape.batch,
            max_tokens=shape.tokens,
            heads=shape.heads,
            num_ctas=num_ctas,
        )

        def plan_of(**lists: Any) -> VerifyPlan:
            return VerifyPlan(
                problem.seq_lens,
                problem.qo_indptr,
                heads=shape.heads,
                max_tokens=shape.tokens,
                max_tree_tokens=shape.tree,
                workspace=workspace,
                variant=variant,
                values=plan_values,
                **lists,
            )

        out = problem.new_output()
        lse = torch.empty((shape.tokens, shape.heads), device=device)
        scratch: AttentionWorkspace | None = None
        layers: list[VerifyAttention] = []
        all_starts: list[VerifyStarts] = []
        # The plan knows lengths alone: copies share its buffers and differ in their index lists.
        for prefix, drafts in zip(problem.prefix_slots, problem.draft_slots, strict=True):
            plan = plan_of(kv_indices=prefix, kv_indptr=problem.kv_indptr)
            scratch = scratch or AttentionWorkspace.allocate(out, plan=plan)
            starts = None
            if VARIANTS[variant].starts:
                held = StartsWorkspace.allocate(out, num_ctas=plan.num_ctas)
                if all_starts:  # bounds are the same, too; slots are not
                    held = replace(held, cta_starts=all_starts[0].workspace.cta_starts)
                starts = VerifyStarts(plan, out_cache_loc=drafts, workspace=held)
                all_starts.append(starts)
            layers.append(
                VerifyAttention(
                    problem.q,
                    problem.pool,
                    out,
                    lse,
                    plan=plan,
                    visible=problem.visible,
                    sm_scale=problem.sm_scale,
                    out_cache_loc=drafts,
                    kv_scale=problem.kv_scale,
                    starts=starts,
                    workspace=scratch,
                    variant=variant,
                    values=values,
                )
            )
        whole = plan_of(
            kv_indices=torch.zeros_like(problem.prefix_slots[0]),
            req_to_token=problem.slot_table(),
            req_pool_indices=torch.arange(shape.batch, dtype=torch.int32, device=device),
        )
        first = None
        if VARIANTS[variant].starts:
            first = VerifyStarts(whole, out_cache_loc=problem.draft_slots[0])
        whole()
        whole.read_status()
        for starts in all_starts:
            starts()
        return cls(problem, layers, out, lse, whole, first, int(workspace.work[:, 5].max()))

    def make_plan(self) -> None:
        """Do what a step does once for all layers: plan, gather the list, lay out the starts."""
        self.plan()
        if self.starts is not None:
            self.starts()

    def in_order(self) -> list[Callable[[], None]]:
        """Return the layers as they are behind any kernel: none starts before it has ended."""

        def after(first: Callable[[], None], second: Callable[[], None]) -> Callable[[], None]:
            def both() -> None:
                first()
                second()

            return both

        return [after(layer.partials.in_order(), layer.combine) for layer in self.layers]

    def judge(self) -> str | None:
        """Return what is wrong, None if nothing is; see `judge_copies`."""
        return judge_copies(self.layers, self.out, self.lse, self.problem)

    def judge_plan(self) -> str | None:
        """Make the plan anew over poisoned buffers, and return what is wrong, None if nothing is.

        It must be the plan that was judged with the layers, and its list the slots of the table.
        """
        import torch

        held = {**vars(self.plan.workspace)}
        if self.starts is not None:
            self.starts()
            held |= vars(self.starts.workspace)
        before = {name: buffer.clone() for name, buffer in held.items()}
        for buffer in (*held.values(), self.plan.kv_indices):
            buffer.fill_(-7)
        self.make_plan()
        for name, buffer in held.items():
            if not torch.equal(buffer, before[name]):
                return f"a second plan of the same lengths has another {name}"
        if not torch.equal(self.plan.kv_indices, self.problem.prefix_slots[0]):
            return "kv_indices are not the slots of the table"
        return None


class Judged(Protocol):
    """A problem whose right results are known."""

    @property
    def exact(self) -> Attention:
        """In float64."""

    @property
    def baseline(self) -> Attention:
        """Plain torch's, in the outputs' dtype."""

    @property
    def bounds(self) -> DeviceBounds:
        """What each result may be off by."""


def judge_copies(
    layers: Sequence[Callable[[], None]], out: Any, lse: Any, problem: Judged
) -> str | None:
    """Run copies of a step, all with the same outputs; return what is wrong, None if nothing is.

    The first copy is held against the float64 reference within the published bounds. All others
    hold the same rows elsewhere: they must give the same bits.
    """
    import torch

    first: tuple[Any, Any] | None = None
    for number, layer in enumerate(layers):
        out.fill_(float("nan"))
        lse.fill_(float("nan"))
        layer()
        if first is None:
            if not problem.bounds.hold(out, lse):
                return _mismatch(out, lse, problem)
            first = out.clone(), lse.clone()
        elif not (torch.equal(out, first[0]) and torch.equal(lse, first[1])):
            return f"the same rows at other slots (copy {number}) give other bits"
    return None


def _mismatch(out: Any, lse: Any, problem: Judged) -> str:
    import torch

    from cuverify.tolerances import attention_bounds
    from cuverify.validators.compare import compare_all, host_array

    found = {"out": host_array(out), "lse": host_array(lse)}
    dtype = "fp16" if out.dtype == torch.float16 else "bf16"
    wrong = compare_all(found, attention_bounds(problem.exact, problem.baseline, dtype=dtype))
    return str(wrong[0]) if wrong else "out or lse is just beyond its bound"
