"""The check case of `commit`: paths drawn and real, right and wrong, by rows and by table."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cuverify.errors import CaseError
from cuverify.kv_layout import KvLayout
from cuverify.reference import commit as oracle
from cuverify.reference import relocate as moves
from cuverify.static_buffers import fill, static_buffer, write
from cuverify.workload import ChurnedPool

if TYPE_CHECKING:
    from cuverify.cases import Target
    from cuverify.kernel import Kernel
    from cuverify.ops.commit import Way

_POISON = -0x5A5A5A5B
_ROW = 32  # bytes of a row of the case's own pool: two pieces
_LAYERS = 2


@dataclass(frozen=True, eq=False)
class CommitBatch:
    """What a step committed, as the device sees it.

    Attributes
    ----------
    accept_index : ndarray of int64, shape (B, S)
    accept_token_num, seq_lens, req_pool_indices : ndarray of int64, shape (B,)
    qo_indptr : ndarray of int64, shape (B + 1,)
    out_cache_loc : ndarray of int64, shape (N,)
    req_to_token : ndarray of int32, shape (rows, width)
    num_slots : int
    way : {"rows", "table"}
    index : str
        Type of lengths, bounds and rows.
    """

    accept_index: NDArray[np.int64]
    accept_token_num: NDArray[np.int64]
    qo_indptr: NDArray[np.int64]
    out_cache_loc: NDArray[np.int64]
    seq_lens: NDArray[np.int64]
    req_pool_indices: NDArray[np.int64]
    req_to_token: NDArray[np.int32]
    num_slots: int
    way: Way = "rows"
    index: str = "int32"

    @classmethod
    def of_layout(
        cls,
        layout: KvLayout,
        rng: np.random.Generator,
        *,
        depth: int,
        way: Way = "rows",
        index: str = "int32",
    ) -> CommitBatch:
        """Draw a path for each request: any ascending nodes, often none, all, or the first ones."""
        bounds = layout.qo_indptr("int64").astype(np.int64)
        nodes = np.full((layout.num_requests, depth), -1, np.int64)
        number = np.zeros(layout.num_requests, np.int64)
        for b, tree in enumerate(layout.tree_tokens.tolist()):
            most = min(depth, tree) - 1
            taken = int(rng.choice([0, most, rng.integers(0, most + 1)]))
            below = (
                1 + rng.permutation(tree - 1)[:taken]
                if rng.random() < 0.8
                else 1 + np.arange(taken)
            )
            number[b] = taken
            nodes[b, : taken + 1] = bounds[b] + np.concatenate([[0], np.sort(below)])
        return cls(
            nodes, number, bounds, layout.out_cache_loc, layout.seq_lens, layout.req_pool_indices,
            layout.req_to_token, layout.num_slots, way, index,
        )  # fmt: skip

    def spoiled(self, rng: np.random.Generator) -> CommitBatch:
        """Return the batch with something wrong with one of its requests."""
        at = int(rng.integers(len(self.seq_lens)))
        index, number = self.accept_index.copy(), self.accept_token_num.copy()
        bounds, lens, rows = (
            self.qo_indptr.copy(),
            self.seq_lens.copy(),
            self.req_pool_indices.copy(),
        )
        rows[at] = max(1, int(rows[at]))
        fault = int(rng.integers(7))
        if fault == 0:
            bounds[at + 1] = bounds[at]
        elif fault == 1:
            bounds[at + 1 :] += len(self.out_cache_loc) + 1025
        elif fault == 2:
            number[at] = rng.choice([-1, index.shape[1], 2**31 - 1])
        elif fault == 3:
            index[at, 0] += rng.choice([-1, 1, 2**30])
        elif fault == 4:
            number[at] = min(index.shape[1] - 1, max(1, int(number[at])))
            index[at, number[at]] = rng.choice([bounds[at] - 1, bounds[at + 1], -1, 2**31 - 1])
        elif fault == 5:
            rows[at] = rng.choice([-1, len(self.req_to_token), 2**31 - 1])
        else:
            lens[at] = rng.choice([-1, self.req_to_token.shape[1], 2**31 - 1])
        return replace(
            self, accept_index=index, accept_token_num=number, qo_indptr=bounds, seq_lens=lens,
            req_pool_indices=rows,
        )  # fmt: skip

    @property
    def shape(self) -> tuple[Any, ...]:
        """What buffers of a step depend on."""
        return (
            self.accept_index.shape, len(self.out_cache_loc), self.req_to_token.shape,
            self.num_slots, self.way, self.index,
        )  # fmt: skip


class CommitStep:
    """`commit` with buffers of its own, on the host lane or on the current CUDA device.

    Parameters
    ----------
    batch : CommitBatch
        Its shape, way and types are the step's for good.
    xp : {"numpy", "torch-cuda"}
        Where the buffers are.
    num_ctas : int, optional
        Blocks of the move and of the permutation.
    """

    def __init__(self, batch: CommitBatch, xp: Target, *, num_ctas: int | None = None) -> None:
        from cuverify.ops.commit import CommitPlan

        self.shape = batch.shape
        self.way = batch.way
        self._batch = batch
        self.inputs: dict[str, Any] = {}
        for name, dtype in (
            ("accept_index", "int32"), ("accept_token_num", "int32"), ("qo_indptr", batch.index),
            ("out_cache_loc", "int64"), ("seq_lens", batch.index),
            ("req_pool_indices", batch.index), ("req_to_token", "int32"),
        ):  # fmt: skip
            self.inputs[name] = static_buffer(xp, getattr(batch, name).shape, dtype)
        self.new_lens = static_buffer(xp, batch.seq_lens.shape, batch.index)
        self.storage = static_buffer(xp, (_LAYERS, batch.num_slots, _ROW), "uint8")
        self.plan = CommitPlan(
            **self.inputs,
            pools=list(self.storage) if batch.way == "rows" else None,
            new_lens=self.new_lens,
            num_ctas=num_ctas,
        )
        self.refill(batch)

    @property
    def outputs(self) -> Mapping[str, Any]:
        """Everything that a commit may write, the table and the pools whole."""
        made = {
            "status": self.plan.workspace.status,
            "new_lens": self.new_lens,
            "req_to_token": self.inputs["req_to_token"],
            "out_cache_loc": self.inputs["out_cache_loc"],
            "pools": self.storage,
        }
        if self.way == "rows":
            work = self.plan.workspace
            made.update(count=work.count, src=work.src, dst=work.dst)
        return made

    @property
    def state(self) -> Mapping[str, Any]:
        """What a commit changes in place: a second one behind it moves on from there."""
        made = self.outputs
        return {name: made[name] for name in ("req_to_token", "out_cache_loc", "pools")}

    def refill(self, batch: CommitBatch) -> None:
        """Write another batch of the same shape, and the pools as they were at the start."""
        if batch.shape != self.shape:
            raise CaseError(f"a batch of shape {batch.shape} does not fit a step for {self.shape}")
        self._batch = batch
        for name, buffer in self.inputs.items():
            write(buffer, getattr(batch, name).astype(str(buffer.dtype).removeprefix("torch.")))
        fill(self.new_lens, -7)
        write(self.storage, self._content())
        if self.way == "rows":
            fill(self.plan.workspace.src, -9)
            fill(self.plan.workspace.dst, -9)

    def __call__(self) -> None:
        """Commit."""
        self.plan()

    def poison(self) -> None:
        """Fill what is written completely."""
        fill(self.plan.workspace.status, _POISON)
        if self.way == "rows":
            fill(self.plan.workspace.count, _POISON)

    def expected(self) -> dict[str, NDArray[Any]]:
        """Return what the oracle makes of the present batch."""
        batch = self._batch
        done = oracle.commit(
            batch.accept_index, batch.accept_token_num, batch.qo_indptr, batch.out_cache_loc,
            batch.seq_lens, batch.req_pool_indices, batch.req_to_token,
        )  # fmt: skip
        fine = done.status[0] == oracle.COMMITTED
        lens = done.seq_lens if fine else np.full(len(done.seq_lens), -7)
        made: dict[str, NDArray[Any]] = {
            "status": done.status, "new_lens": lens.astype(batch.index), "pools": self._content(),
            "req_to_token": batch.req_to_token, "out_cache_loc": batch.out_cache_loc,
        }  # fmt: skip
        if self.way == "table":
            return {**made, "req_to_token": done.req_to_token, "out_cache_loc": done.out_cache_loc}
        rows = len(done.src)
        lists = np.full((2, batch.accept_index.size), -9, np.int64)
        lists[:, :rows] = done.src, done.dst
        made.update(count=np.array([rows], np.int32), src=lists[0], dst=lists[1])
        moves.relocate(list(made["pools"]), lists[0], lists[1], rows)
        return made

    def _content(self) -> NDArray[np.uint8]:
        slots = self.shape[3]
        return np.random.default_rng(slots).integers(0, 256, (_LAYERS, slots, _ROW), np.uint8)


class CommitCase:
    """See `cuverify.cases.CheckCase`."""

    name = "commit"

    def kernels(self) -> Sequence[Kernel]:
        """Return both kernels, with the types that differ most."""
        from cuverify.ops.commit import commit_kernels

        wide = {"SEQ_INDEX": "long long", "QO_INDEX": "long long", "POOL_INDEX": "long long"}
        return [*commit_kernels().values(), *commit_kernels(**wide).values()]

    def batches(self, *, seed: int = 0, examples: int = 16) -> Iterator[tuple[str, CommitBatch]]:
        """Yield small batches, drawn and real, one in four of the drawn ones with a fault."""
        from cuverify.strategies import drawn, kv_layouts

        rng = np.random.default_rng([seed, 0xC033])
        for number, layout in enumerate(drawn(kv_layouts(), examples, seed=seed)):
            batch = self._of(layout, rng, number)
            if number % 4 == 3:
                batch = batch.spoiled(rng)
            yield f"drawn {number}: {batch.way}", batch
        pool = ChurnedPool(600, tree_tokens=8, seed=seed)
        pool.churn(2.0)
        for number in range(2):
            layout = KvLayout.from_pool(pool, padded=2, rng=rng)
            yield f"real {number}", self._of(layout, rng, number)
            pool.step()

    def device_batches(
        self, *, seed: int = 0, examples: int = 12
    ) -> Iterator[tuple[str, CommitBatch]]:
        """Yield batches in four groups of one shape each, so that a graph can be replayed."""
        rng = np.random.default_rng([seed, 0xC034])
        for number in range(4):
            for at in range(max(2, examples // 4)):
                # all lengths but one from the seed; the width of the table is that of the longest
                lens = np.append(rng.integers(0, 2000, 14), 2000)
                layout = KvLayout.build(
                    seq_lens=rng.permutation(lens), tree_tokens=(33, 64)[number // 2], padded=3,
                    num_slots=50_000, placement="scattered", stale_tail=False, rng=rng,
                )  # fmt: skip
                batch = self._of(layout, rng, number)
                yield f"group {number}, {at}", batch.spoiled(rng) if at == 1 else batch

    def step(self, batch: CommitBatch, xp: Target) -> CommitStep:
        """Return a step for batches of this shape."""
        return CommitStep(batch, xp)

    @staticmethod
    def _of(layout: KvLayout, rng: np.random.Generator, number: int) -> CommitBatch:
        way: Way = "rows" if number % 2 or layout.page_size > 1 else "table"
        index = ("int32", "int64")[number // 2 % 2]
        return CommitBatch.of_layout(layout, rng, depth=8, way=way, index=index)


CASE = CommitCase()
