"""The check case of `defrag`: pools drawn and churned, compacted within budgets, and bad tables."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cuverify.errors import CaseError
from cuverify.kv_layout import KvLayout
from cuverify.reference import defrag as oracle
from cuverify.reference import relocate as moves
from cuverify.static_buffers import fill, static_buffer, write
from cuverify.workload import ChurnedPool

if TYPE_CHECKING:
    from cuverify.cases import Target
    from cuverify.kernel import Kernel

_POISON = -0x5A5A5A5B
_ROW = 32
_LAYERS = 2


@dataclass(frozen=True, eq=False)
class DefragBatch:
    """A pool's holders.

    Attributes
    ----------
    req_to_token : ndarray of int32, shape (rows, width)
    req_pool_indices, held_lens : ndarray of int64, shape (B,)
    held : ndarray of int64, shape (capacity,)
        Further live slots.
    held_count : int
    num_slots, budget : int
    index : str
        Type of lengths and rows.
    """

    req_to_token: NDArray[np.int32]
    req_pool_indices: NDArray[np.int64]
    held_lens: NDArray[np.int64]
    held: NDArray[np.int64]
    held_count: int
    num_slots: int
    budget: int
    index: str = "int32"

    @classmethod
    def of_layout(
        cls, layout: KvLayout, rng: np.random.Generator, *, budget: int, index: str = "int32"
    ) -> DefragBatch:
        """Return the holders of a layout: prefixes and windows, and some slots besides."""
        owner, _ = layout.owners()
        free = np.flatnonzero(owner == -1)
        more = rng.permutation(free)[: int(rng.integers(0, 1 + len(free) // 2))]
        capacity = 8 + layout.num_slots // 2
        held = rng.integers(-5, 2 * layout.num_slots, capacity)  # a dead tail of any content
        held[: len(more)] = more
        lens = layout.seq_lens + layout.tree_tokens
        return cls(
            layout.req_to_token, layout.req_pool_indices, lens, held, len(more), layout.num_slots,
            budget, index,
        )  # fmt: skip

    def spoiled(self, rng: np.random.Generator) -> DefragBatch:
        """Return the batch with something wrong with one holder."""
        table, held, rows = self.req_to_token.copy(), self.held.copy(), self.req_pool_indices.copy()
        lens, count = self.held_lens.copy(), self.held_count
        at = int(rng.integers(len(rows)))
        rows[at] = max(1, int(rows[at]))
        fault = int(rng.integers(5))
        if fault == 0:
            lens[at] = max(1, int(lens[at]))
            table[rows[at], int(rng.integers(lens[at]))] = rng.choice(
                [-1, self.num_slots, 2**31 - 1]
            )
        elif fault == 1:
            lens[at] = rng.choice([-1, table.shape[1] + 1, 2**31 - 1])
        elif fault == 2:
            rows[at] = rng.choice([-1, len(table), 2**31 - 1])
        elif fault == 3:
            count = int(rng.choice([-1, len(held) + 1]))
        else:
            count = max(1, count)
            held[int(rng.integers(count))] = rng.choice([-1, self.num_slots, 2**62])
        return replace(
            self, req_to_token=table, held=held, req_pool_indices=rows, held_lens=lens,
            held_count=count,
        )  # fmt: skip

    @property
    def shape(self) -> tuple[Any, ...]:
        """What buffers of a step depend on."""
        return (
            self.req_to_token.shape, len(self.held_lens), len(self.held), self.num_slots,
            self.budget, self.index,
        )  # fmt: skip


class DefragStep:
    """`defrag` with buffers of its own, on the host lane or on the current CUDA device.

    Parameters
    ----------
    batch : DefragBatch
        Its shape and types are the step's for good.
    xp : {"numpy", "torch-cuda"}
        Where the buffers are.
    num_ctas : int, optional
    """

    def __init__(self, batch: DefragBatch, xp: Target, *, num_ctas: int | None = None) -> None:
        from cuverify.ops.defrag import DefragPlan

        self.shape = batch.shape
        self._batch = batch
        self.table = static_buffer(xp, batch.req_to_token.shape, "int32")
        self.rows = static_buffer(xp, batch.held_lens.shape, batch.index)
        self.lens = static_buffer(xp, batch.held_lens.shape, batch.index)
        self.held = static_buffer(xp, batch.held.shape, "int64")
        self.held_count = static_buffer(xp, (1,), "int32")
        self.storage = static_buffer(xp, (_LAYERS, batch.num_slots, _ROW), "uint8")
        self.plan = DefragPlan(
            list(self.storage), self.table, self.rows, self.lens, held=self.held,
            held_count=self.held_count, budget=batch.budget, num_ctas=num_ctas,
        )  # fmt: skip
        self.refill(batch)

    @property
    def outputs(self) -> Mapping[str, Any]:
        """Everything that a compaction may write."""
        work = self.plan.workspace
        return {
            "status": work.status, "count": work.count, "src": work.src, "dst": work.dst,
            "live": work.live, "fault": work.fault, "req_to_token": self.table, "held": self.held,
            "pools": self.storage,
        }  # fmt: skip

    def refill(self, batch: DefragBatch) -> None:
        """Write other holders of the same shape, and the pools as they were at the start."""
        if batch.shape != self.shape:
            raise CaseError(f"a batch of shape {batch.shape} does not fit a step for {self.shape}")
        self._batch = batch
        write(self.table, batch.req_to_token)
        write(self.rows, batch.req_pool_indices.astype(batch.index))
        write(self.lens, batch.held_lens.astype(batch.index))
        write(self.held, batch.held)
        write(self.held_count, np.array([batch.held_count], np.int32))
        write(self.storage, self._content())
        for name in ("src", "dst"):
            fill(getattr(self.plan.workspace, name), -9)

    def __call__(self) -> None:
        """Compact."""
        self.plan()

    def poison(self) -> None:
        """Fill what is written completely."""
        fill(self.plan.workspace.status, _POISON)
        fill(self.plan.workspace.count, _POISON)

    def expected(self) -> dict[str, NDArray[Any]]:
        """Return what the oracle makes of the present holders."""
        batch = self._batch
        done = oracle.compact(
            batch.req_to_token, batch.req_pool_indices, batch.held_lens, batch.held,
            batch.held_count, batch.num_slots, batch.budget,
        )  # fmt: skip
        rows = len(done.src)
        lists = np.full((2, batch.budget), -9, np.int64)
        lists[:, :rows] = done.src, done.dst
        pools = self._content()
        moves.relocate(list(pools), lists[0], lists[1], rows)
        return {
            "status": done.status, "count": np.array([rows], np.int32), "src": lists[0],
            "dst": lists[1], "live": np.zeros(-(-batch.num_slots // 32), np.int32),
            "fault": np.zeros(1, np.int32), "req_to_token": done.req_to_token, "held": done.held,
            "pools": pools,
        }  # fmt: skip

    def _content(self) -> NDArray[np.uint8]:
        slots = self._batch.num_slots
        return np.random.default_rng(slots).integers(0, 256, (_LAYERS, slots, _ROW), np.uint8)


class DefragCase:
    """See `cuverify.cases.CheckCase`."""

    name = "defrag"

    def kernels(self) -> Sequence[Kernel]:
        """Return all kernels, with the types that differ most."""
        from cuverify.ops.defrag import defrag_kernels

        wide = {"SEQ_INDEX": "long long", "POOL_INDEX": "long long"}
        return [*defrag_kernels().values(), *defrag_kernels(**wide).values()]

    def batches(self, *, seed: int = 0, examples: int = 16) -> Iterator[tuple[str, DefragBatch]]:
        """Yield small pools, drawn and churned, one in four of the drawn ones with a fault."""
        from cuverify.strategies import drawn, kv_layouts

        rng = np.random.default_rng([seed, 0xDEF6])
        layouts = drawn(kv_layouts(page_sizes=[1], max_seq_len=60), examples, seed=seed)
        for number, layout in enumerate(layouts):
            index = ("int32", "int64")[number % 2]
            budget = int(rng.choice([1, 7, layout.num_slots]))
            batch = DefragBatch.of_layout(layout, rng, budget=budget, index=index)
            yield f"drawn {number}", batch.spoiled(rng) if number % 4 == 3 else batch
        pool = ChurnedPool(600, tree_tokens=8, seed=seed)
        pool.churn(2.0)
        for budget in (40, 600):
            layout = KvLayout.from_pool(pool, padded=1, rng=rng)
            yield f"churned, budget {budget}", DefragBatch.of_layout(layout, rng, budget=budget)
            pool.step()

    def device_batches(
        self, *, seed: int = 0, examples: int = 12
    ) -> Iterator[tuple[str, DefragBatch]]:
        """Yield pools in two groups of one shape each, so that a graph can be replayed."""
        rng = np.random.default_rng([seed, 0xDEF7])
        for budget, index in ((500, "int32"), (20_000, "int64")):
            for at in range(max(2, examples // 2)):
                lens = np.append(rng.integers(0, 2000, 14), 2000)
                layout = KvLayout.build(
                    seq_lens=rng.permutation(lens), tree_tokens=16, padded=1, num_slots=60_000,
                    placement="holes" if at % 2 else "scattered", stale_tail=False, rng=rng,
                )  # fmt: skip
                batch = DefragBatch.of_layout(layout, rng, budget=budget, index=index)
                yield f"budget {budget}, {at}", batch.spoiled(rng) if at == 1 else batch

    def step(self, batch: DefragBatch, xp: Target) -> DefragStep:
        """Return a step for batches of this shape."""
        return DefragStep(batch, xp)


CASE = DefragCase()
