"""Lay out what each block of attention reads first: once a step, for all of its layers.

A block goes from its share of the plan to an entry, to the bounds of that entry's request, to an
index and to the row, and would wait for memory each time, in every layer. `VerifyStarts` goes most
of that way once, behind the plan and the index lists.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from cuverify.arguments import device_of
from cuverify.buffers import Buffer, check_workspace, refuse_overlap, tensor_of, tensors_of, wrong
from cuverify.errors import ArgumentError
from cuverify.kernel import Kernel
from cuverify.launching import Launched, index_ctype
from cuverify.ops.verify_plan import VerifyPlan
from cuverify.sources import KernelSource

START_WORDS = 16
"""int32 words of a block's start."""

START_ROWS = 64
"""KV rows of a block's first entry whose slots are looked up."""


def starts_workspace(num_ctas: int) -> dict[str, Buffer]:
    """Return the buffers that starts are written into: the fields of `StartsWorkspace`."""
    return {
        "cta_starts": Buffer((num_ctas, START_WORDS), "int32"),
        "cta_slots": Buffer((num_ctas, START_ROWS), "int64"),
    }


@dataclass(frozen=True, eq=False)
class StartsWorkspace:
    """The buffers that starts are written into, all of them by every call.

    Attributes
    ----------
    cta_starts : tensor of int32, shape (num_ctas, 16)
        Of each block: its row of the plan's `cta_work`; request, row tile, begin, end, partial slot
        and pieces of the first entry that it takes; bounds of that request's prefix in `kv_indices`
        and of its tokens; 0 behind that.
    cta_slots : tensor of int64, shape (num_ctas, 64)
        Slots of the first KV rows of that entry, the prefix's and then the tree's. -1 behind the
        last one, and for the tree's where there is no `out_cache_loc`.
    """

    cta_starts: Any
    cta_slots: Any

    @classmethod
    def allocate(cls, like: Any, *, num_ctas: int) -> StartsWorkspace:
        """Return new buffers of the library and on the device of the tensor `like`."""
        sizes = starts_workspace(num_ctas)
        return cls(**{name: buffer.zeros(like) for name, buffer in sizes.items()})


class VerifyStarts:
    """The starts of a plan's blocks, all checks done; calling it lays out those of the step.

    Make it before a capture. Call it behind the plan, and when `kv_indices` and `out_cache_loc` are
    written; they must stay as they are until the last layer has attended. All tensors may change in
    place between calls.

    Parameters
    ----------
    plan : VerifyPlan
        Whose last call describes the step. It must have `kv_indices`.
    out_cache_loc : tensor of int64, shape (N,), optional
        Slots of the tree tokens, where they are known by then: layers look them up where not. Read
        only.
    workspace : StartsWorkspace, optional
        The caller's buffers, for the plan's number of blocks; of the op's own if absent.

    Attributes
    ----------
    plan : VerifyPlan
    out_cache_loc : tensor or None
    workspace : StartsWorkspace
    launch : BoundLaunch
        A block for each of the plan's.

    Raises
    ------
    ArgumentError
        Naming the argument and its value.

    Examples
    --------
    >>> starts = VerifyStarts(plan, out_cache_loc=slots)                    # doctest: +SKIP
    >>> plan(); starts()                                                    # doctest: +SKIP
    """

    def __init__(
        self,
        plan: VerifyPlan,
        *,
        out_cache_loc: Any = None,
        workspace: StartsWorkspace | None = None,
    ) -> None:
        if plan.kv_indices is None:
            raise ArgumentError("plan", plan, "has no kv_indices: give them to VerifyPlan")
        lists = {
            name: tensor_of(f"plan.{name}", getattr(plan, name))
            for name in ("kv_indptr", "kv_indices", "qo_indptr")
        }
        # layers read all of the plan's buffers
        inputs = [*tensors_of("plan", plan.workspace).values(), *lists.values()]
        if out_cache_loc is not None:
            given = tensor_of("out_cache_loc", out_cache_loc)
            if len(given.shape) != 1 or given.shape[0] < plan.max_tokens:
                reason = f"has shape {list(given.shape)}; the plan is for {plan.max_tokens} tokens"
                raise wrong(given, reason)
            inputs.append(given)
        if workspace is None:
            workspace = StartsWorkspace.allocate(plan.workspace.work, num_ctas=plan.num_ctas)
        held = tensors_of("workspace", workspace)
        check_workspace(held, starts_workspace(plan.num_ctas), f"{plan.num_ctas} blocks")
        device_of([*inputs, *held.values()])
        refuse_overlap([*held.values()], inputs)

        self.plan = plan
        self.out_cache_loc = out_cache_loc
        self.workspace = workspace
        kernel = verify_starts_kernel(
            KV_INDEX=index_ctype(lists["kv_indices"]), QO_INDEX=index_ctype(lists["qo_indptr"])
        )
        self.launch = kernel.bind(
            plan.num_ctas, START_ROWS,
            plan.workspace.work, plan.workspace.cta_work, plan.kv_indptr, plan.qo_indptr,
            plan.kv_indices, out_cache_loc,
            workspace.cta_starts[: plan.num_ctas], workspace.cta_slots[: plan.num_ctas],
        )  # fmt: skip

    def __call__(self) -> None:
        """Lay out the starts: one launch on torch's current stream, after the plan's."""
        self.launch()


def launched(arch: str) -> Iterator[Launched]:
    """Yield the `-D` values that starts launch with; see `cuverify.launched`."""
    yield Launched("verify_starts", ("KV_INDEX", "QO_INDEX"))


def verify_starts_kernel(**values: int | str) -> Kernel:
    """Return `verify_starts` with these `-D` values."""
    return _kernel(tuple(sorted(values.items())))


@functools.cache
def _kernel(values: tuple[tuple[str, int | str], ...]) -> Kernel:
    return Kernel(KernelSource.from_package("verify_starts", values=dict(values)), "verify_starts")
