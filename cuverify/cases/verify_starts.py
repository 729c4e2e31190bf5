"""The check case of `verify_starts`: the plans of `verify_plan`, with the lists that they make."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cuverify.buffers import read
from cuverify.cases import verify_plan as plans
from cuverify.errors import CaseError
from cuverify.reference import verify_starts as oracle
from cuverify.static_buffers import fill, static_buffer, write

if TYPE_CHECKING:
    from cuverify.cases import Target
    from cuverify.kernel import Kernel

_POISON = -0x5A5A5A5B
_MAX_SLOT = 2**31 - 1


@dataclass(frozen=True, eq=False)
class StartsBatch:
    """What starts are made of.

    Attributes
    ----------
    planned : PlanBatch
        With a table: the index list is made with the plan.
    seed : int
        Of the tree tokens' slots.
    located : bool
        Whether the slots of tree tokens are known.
    """

    planned: plans.PlanBatch
    seed: int
    located: bool


class VerifyStartsStep:
    """A plan and its starts with buffers of their own, in either lane.

    Parameters
    ----------
    batch : StartsBatch
        Its capacity, types and whether slots of trees are known are the step's for good.
    xp : {"numpy", "torch-cuda"}
        Where the buffers are.
    num_ctas : int, optional
        Blocks that would run the plan.
    """

    def __init__(self, batch: StartsBatch, xp: Target, *, num_ctas: int | None = None) -> None:
        from cuverify.ops.verify_starts import VerifyStarts

        self.located = batch.located
        self.planned = plans.VerifyPlanStep(batch.planned, xp, num_ctas=num_ctas)
        tokens = self.planned.size.tokens
        self.out_cache_loc = static_buffer(xp, (tokens,), "int64") if batch.located else None
        self.starts = VerifyStarts(self.planned.plan, out_cache_loc=self.out_cache_loc)
        self._fill(batch)

    @property
    def outputs(self) -> Mapping[str, Any]:
        """All that is written, the plan's among them."""
        return {**self.planned.outputs, **vars(self.starts.workspace)}

    def refill(self, batch: StartsBatch) -> None:
        """Write another batch."""
        if batch.located != self.located:
            raise CaseError(f"{batch} does not fit a step whose trees' slots are known or not")
        self.planned.refill(batch.planned)
        self._fill(batch)

    def _fill(self, batch: StartsBatch) -> None:
        if self.out_cache_loc is not None:
            rng = np.random.default_rng(batch.seed)
            write(self.out_cache_loc, rng.integers(0, _MAX_SLOT, len(self.out_cache_loc)))

    def __call__(self) -> None:
        """Plan, make the index list, and lay out the starts."""
        self.planned()
        self.starts()

    def poison(self) -> None:
        """Fill everything that is written completely."""
        self.planned.poison()
        for buffer in vars(self.starts.workspace).values():
            fill(buffer, _POISON)

    def expected(self) -> dict[str, NDArray[Any]]:
        """Return the oracle's plan, and the oracle's starts of that plan."""
        plan = self.planned.expected()
        given = None if self.out_cache_loc is None else read(self.out_cache_loc)
        return plan | oracle.verify_starts(
            plan["work"],
            plan["cta_work"],
            plan["kv_indptr"],
            read(self.planned.qo_indptr),
            plan["kv_indices"],
            given,
        )


class VerifyStartsCase:
    """See `cuverify.cases.CheckCase`."""

    name = "verify_starts"

    def kernels(self) -> Sequence[Kernel]:
        """Return the kernel for indices of 32 bits, and of 64."""
        from cuverify.ops.verify_starts import verify_starts_kernel

        wide = {f"{name}_INDEX": "long long" for name in ("QO", "KV")}
        return [verify_starts_kernel(), verify_starts_kernel(**wide)]

    def batches(self, *, seed: int = 0, examples: int = 12) -> Iterator[tuple[str, StartsBatch]]:
        """Yield the steps with a table that `verify_plan` is checked with, faulty ones too."""
        yield from _listed(plans.CASE.batches(seed=seed, examples=examples))

    def device_batches(
        self, *, seed: int = 0, examples: int = 24
    ) -> Iterator[tuple[str, StartsBatch]]:
        """Yield the same of the larger steps."""
        yield from _listed(plans.CASE.device_batches(seed=seed, examples=examples))

    def step(self, batch: StartsBatch, xp: Target) -> VerifyStartsStep:
        """Return a step whose buffers have the batch's capacity."""
        return VerifyStartsStep(batch, xp, num_ctas=plans.HOST_CTAS if xp == "numpy" else None)


CASE = VerifyStartsCase()


def _listed(
    batches: Iterator[tuple[str, plans.PlanBatch]],
) -> Iterator[tuple[str, StartsBatch]]:
    for number, (label, batch) in enumerate(batches):
        if batch.req_to_token is not None:
            # groups of steps that share buffers have a label in common
            located = len(label.rsplit(" ", 1)[0]) % 2 == 0
            yield label, StartsBatch(batch, number, located)
