"""The check case of `verify_plan`: layouts drawn and real, lengths of all sizes, and bad ones."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cuverify.errors import CaseError
from cuverify.kv_layout import KvLayout
from cuverify.reference import verify_plan as oracle
from cuverify.static_buffers import fill, static_buffer, write

if TYPE_CHECKING:
    from cuverify.cases import Target
    from cuverify.kernel import Kernel

_POISON = -0x5A5A5A5B
HOST_CTAS = 6
_MAX_TREE = 256
# what the index list holds where no prefix is: left as it is
_UNLISTED = -77
_LENGTHS = (0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 255, 256, 257, 1000, 4096, 20_000, 200_000)
_TREES = (1, 2, 7, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 256)


@dataclass(frozen=True, eq=False)
class PlanBatch:
    """What a plan is made of.

    Attributes
    ----------
    seq_lens : ndarray of int64, shape (B,)
    qo_indptr : ndarray of int64, shape (B + 1,)
    heads : int
    req_to_token, req_pool_indices : ndarray, optional
        The request-to-token table and each request's row of it, where the index list is made.
    index : str
        Type of lengths, bounds and rows, and of the index list.
    capacity : Capacity, optional
        Sizes of the buffers; those of this batch if absent.
    """

    seq_lens: NDArray[np.int64]
    qo_indptr: NDArray[np.int64]
    heads: int
    req_to_token: NDArray[np.int32] | None = None
    req_pool_indices: NDArray[np.int64] | None = None
    index: str = "int32"
    capacity: Capacity | None = None

    @classmethod
    def of_layout(cls, layout: KvLayout, heads: int, index: str) -> PlanBatch:
        """Return the batch that a layout describes, with an index list to be made."""
        return cls(
            layout.seq_lens, layout.qo_indptr(np.int64), heads,
            layout.req_to_token, layout.req_pool_indices, index,
        )  # fmt: skip

    @property
    def tokens(self) -> int:
        """Tree tokens of all requests."""
        return int(self.qo_indptr[-1])

    @property
    def listed(self) -> int:
        """Length of the index list."""
        return int(self.seq_lens.sum())


@dataclass(frozen=True)
class Capacity:
    """Sizes of the buffers that several batches share."""

    requests: int
    tokens: int
    listed: int
    table: tuple[int, int] | None

    @classmethod
    def of(cls, batches: Iterable[PlanBatch]) -> Capacity:
        """Return what holds the largest of some batches."""
        batches = list(batches)
        tables = [b.req_to_token.shape for b in batches if b.req_to_token is not None]
        return cls(
            max(len(b.seq_lens) for b in batches),
            max(max(b.tokens for b in batches), 1),
            max(max(b.listed for b in batches), 1),
            (max(t[0] for t in tables), max(t[1] for t in tables)) if tables else None,
        )


class VerifyPlanStep:
    """`verify_plan` with buffers of its own, on the host lane or on the current CUDA device.

    Parameters
    ----------
    batch : PlanBatch
        Its capacity, number of heads and types are the step's for good.
    xp : {"numpy", "torch-cuda"}
        Where the buffers are.
    num_ctas : int, optional
        Blocks that would run the plan.
    values : mapping of str to int, optional
        `-D` values of the kernels.
    """

    def __init__(
        self,
        batch: PlanBatch,
        xp: Target,
        *,
        num_ctas: int | None = None,
        values: Mapping[str, int] | None = None,
    ) -> None:
        from cuverify.ops.verify_plan import PlanWorkspace, VerifyPlan

        size = self.size = batch.capacity or Capacity.of([batch])
        self.heads, self.index = batch.heads, batch.index
        self._batch = batch
        self.seq_lens = static_buffer(xp, (size.requests,), batch.index)
        self.qo_indptr = static_buffer(xp, (size.requests + 1,), batch.index)
        given: dict[str, Any] = {}
        if size.table is not None:
            self.req_to_token = static_buffer(xp, size.table, "int32")
            self.req_pool_indices = static_buffer(xp, (size.requests,), batch.index)
            self.kv_indices = static_buffer(xp, (size.listed,), batch.index)
            given = {
                "req_to_token": self.req_to_token,
                "req_pool_indices": self.req_pool_indices,
                "kv_indices": self.kv_indices,
            }
        self.workspace = PlanWorkspace.allocate(
            self.seq_lens,
            max_batch=size.requests,
            max_tokens=size.tokens,
            heads=batch.heads,
            num_ctas=num_ctas,
        )
        self.plan = VerifyPlan(
            self.seq_lens,
            self.qo_indptr,
            heads=batch.heads,
            max_tokens=size.tokens,
            workspace=self.workspace,
            values=values,
            **given,
        )
        self.values = self.plan.values  # those of the text that attends, where none are given
        self.refill(batch)

    @property
    def outputs(self) -> Mapping[str, Any]:
        """All that the plan writes, and the index list where it is made."""
        made = {name: getattr(self.workspace, name) for name in vars(self.workspace)}
        if self.size.table is not None:
            made["kv_indices"] = self.kv_indices
        return made

    def refill(self, batch: PlanBatch) -> None:
        """Write another batch. Requests that the buffers have room for have no tree and no rows."""
        size = self.size
        more = size.requests - len(batch.seq_lens)
        same = (batch.heads, batch.index) == (self.heads, self.index)
        if not same or (batch.req_to_token is None) != (size.table is None) or more < 0:
            raise CaseError(f"{batch} does not fit a step for {size}")
        # a plan that is refused may have more tokens than there is room for
        self._batch = replace(
            batch,
            seq_lens=np.concatenate([batch.seq_lens, np.zeros(more, np.int64)]),
            qo_indptr=np.concatenate([batch.qo_indptr, np.full(more, batch.qo_indptr[-1])]),
        )
        if size.table is not None:
            assert batch.req_to_token is not None
            assert batch.req_pool_indices is not None
            if any(n > m for n, m in zip(batch.req_to_token.shape, size.table, strict=True)):
                raise CaseError(f"a table of {batch.req_to_token.shape} for {size.table}")
            rows = np.concatenate([batch.req_pool_indices, np.zeros(more, np.int64)])
            self._batch = replace(self._batch, req_pool_indices=rows)
            fill(self.req_to_token, _UNLISTED)
            write(self.req_to_token, batch.req_to_token)
            write(self.req_pool_indices, rows)
            fill(self.kv_indices, _UNLISTED)
        write(self.seq_lens, self._batch.seq_lens)
        write(self.qo_indptr, self._batch.qo_indptr)

    def __call__(self) -> None:
        """Plan, and make the index list."""
        self.plan()

    def poison(self) -> None:
        """Fill everything that is written completely; the index list is refilled."""
        for name in vars(self.workspace):
            fill(getattr(self.workspace, name), _POISON)

    def expected(self) -> dict[str, NDArray[Any]]:
        """Return the oracle's plan, of which the general judge must think well too."""
        batch, size = self._batch, self.size
        table: dict[str, Any] = {name.lower(): value for name, value in self.values.items()}
        if size.table is not None:
            table |= {
                "req_pool_indices": batch.req_pool_indices,
                "pool_rows": size.table[0],
                "pool_width": size.table[1],
                "kv_capacity": size.listed,
            }
        plan = oracle.verify_plan(
            batch.seq_lens,
            batch.qo_indptr,
            heads=self.heads,
            num_ctas=len(self.workspace.cta_work),
            max_work=len(self.workspace.work),
            max_tokens=size.tokens,
            **table,
        )
        if plan.status[0] == oracle.PLANNED:
            owed = oracle.faults(plan, batch.seq_lens, batch.qo_indptr, heads=self.heads)
            if owed:
                raise CaseError(f"the oracle's own plan is wrong: {owed[0]}")
        found: dict[str, NDArray[Any]] = {
            name: getattr(plan, name) for name in vars(self.workspace)
        }
        if size.table is not None:
            assert batch.req_pool_indices is not None
            assert batch.req_to_token is not None
            listed = np.full(size.listed, _UNLISTED, batch.index)
            slots = oracle.kv_list(plan.kv_indptr, batch.req_pool_indices, batch.req_to_token)
            listed[: len(slots)] = slots
            found["kv_indices"] = listed
        return found


class VerifyPlanCase:
    """See `cuverify.cases.CheckCase`."""

    name = "verify_plan"

    def kernels(self) -> Sequence[Kernel]:
        """Return the kernel for 8 heads and indices of 32 bits, and for 16 and 64."""
        from cuverify.ops.verify_plan import verify_plan_kernel

        wide = {f"{name}_INDEX": "long long" for name in ("SEQ", "QO", "POOL", "KV")}
        return [verify_plan_kernel(), verify_plan_kernel(HEADS=16, **wide)]

    def batches(self, *, seed: int = 0, examples: int = 16) -> Iterator[tuple[str, PlanBatch]]:
        """Yield layouts drawn and real, bare lengths up to 200,000, and faulty steps."""
        from cuverify.strategies import drawn, kv_layouts
        from cuverify.verify_workload import real_verify_batches

        rng = np.random.default_rng([seed, 0x91A2])
        layouts = drawn(kv_layouts(max_seq_len=700, max_tree_tokens=129), examples, seed=seed)
        for number, layout in enumerate(layouts):
            planned = PlanBatch.of_layout(layout, *_kind(number))
            yield f"drawn {number}: {layout.num_requests} requests", planned
            if number % 4 == 0:
                yield f"faulty {number}", _spoiled(planned, rng)
        for number in range(examples):
            planned = _bare(rng, int(rng.integers(1, 24)), *_kind(number))
            yield f"lengths {number}: {len(planned.seq_lens)} requests", planned
        real = real_verify_batches(4096, requests=3, tree_tokens=17, padded=1, seed=seed)
        for number, batch in enumerate(real):
            yield f"real {number}: {batch.kind}", PlanBatch.of_layout(batch.layout, 8, "int32")

    def device_batches(
        self, *, seed: int = 0, examples: int = 48
    ) -> Iterator[tuple[str, PlanBatch]]:
        """Yield the same in groups that share buffers, so that a graph can be replayed."""
        from cuverify.strategies import drawn, kv_layouts
        from cuverify.verify_workload import real_verify_batches

        rng = np.random.default_rng([seed, 0x91A3])
        strategy = kv_layouts(
            max_requests=12, max_seq_len=3000, max_tree_tokens=256, num_slots=65_536
        )
        layouts = drawn(strategy, examples // 2, seed=seed)
        for kind in range(2):
            own = [PlanBatch.of_layout(layout, *_kind(kind)) for layout in layouts[kind::2]]
            own += [_spoiled(batch, rng) for batch in own[: -(-len(own) // 3)]]
            yield from _sized(f"drawn, H {_kind(kind)[0]}", own)
        for kind, requests in enumerate((1, 16, 64, 256)):
            number = max(2, examples // 8)
            own = [_bare(rng, requests, *_kind(kind)) for _ in range(number)]
            yield from _sized(f"lengths of {requests}", own)
        for free_list in ("fifo", "lifo"):
            real = real_verify_batches(
                100_000, requests=48, tree_tokens=33, padded=16, free_list=free_list, seed=seed
            )
            own = [PlanBatch.of_layout(batch.layout, 8, "int32") for batch in real]
            yield from _sized(f"real, {free_list}", own)

    def step(self, batch: PlanBatch, xp: Target) -> VerifyPlanStep:
        """Return a step whose buffers have the batch's capacity."""
        return VerifyPlanStep(batch, xp, num_ctas=HOST_CTAS if xp == "numpy" else None)


CASE = VerifyPlanCase()


def _kind(number: int) -> tuple[int, str]:
    return ((8, "int32"), (16, "int64"))[number % 2]


def _bare(rng: np.random.Generator, requests: int, heads: int, index: str) -> PlanBatch:
    """Return lengths and trees without a table: trees of one size, or one for each request."""
    lens = rng.choice(_LENGTHS, requests) if rng.random() < 0.7 else rng.integers(0, 5000, requests)
    trees = rng.choice(_TREES, 1 if rng.random() < 0.5 else requests)
    bounds = np.concatenate([[0], np.cumsum(np.broadcast_to(trees, requests))])
    return PlanBatch(lens.astype(np.int64), bounds.astype(np.int64), heads, index=index)


def _spoiled(batch: PlanBatch, rng: np.random.Generator) -> PlanBatch:
    """Return the batch with something wrong with one of its requests."""
    lens, bounds, rows = batch.seq_lens.copy(), batch.qo_indptr.copy(), batch.req_pool_indices
    assert rows is not None
    rows = rows.copy()
    at = int(rng.integers(len(lens)))
    fault = int(rng.integers(6))
    if fault == 0:
        lens[at] = -1 - int(rng.integers(5))
    elif fault == 1:
        lens[at] = 2**31 - 1 - int(rng.integers(256))
    elif fault == 2:
        bounds[at + 1 :] -= bounds[at + 1] - bounds[at] + 1
    elif fault == 3:
        bounds[at + 1 :] += _MAX_TREE
    elif fault == 4:
        rows[at] = int(rng.choice([-1, 2**31 - 1]))
    else:
        lens[at] = 2**30
    # the buffers are those of the right step
    size = batch.capacity or Capacity.of([batch])
    return replace(batch, seq_lens=lens, qo_indptr=bounds, req_pool_indices=rows, capacity=size)


def _sized(kind: str, batches: Sequence[PlanBatch]) -> Iterator[tuple[str, PlanBatch]]:
    size = Capacity.of(batch for batch in batches if batch.capacity is None)
    for number, batch in enumerate(batches):
        yield f"{kind} {number}", replace(batch, capacity=size)
