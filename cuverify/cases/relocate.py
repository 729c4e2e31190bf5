"""The check case of `relocate`: lists drawn and real, legal and not, on pools with guard bands."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cuverify.errors import CaseError
from cuverify.launching import number_of
from cuverify.ops.relocate import (
    LIST_ROWS,
    LONGER_LISTS,
    SCRATCH_BYTES,
    RelocatePlan,
    RelocateWorkspace,
    relocate_kernels,
)
from cuverify.reference import relocate as oracle
from cuverify.validators.compare import host_array
from cuverify.workload import RelocationBatch, real_batches

if TYPE_CHECKING:
    from cuverify.cases import Target
    from cuverify.kernel import Kernel

_GUARD_SLOTS = 1  # in front of and behind every pool; no list may reach them
_POISON = -0x5A5A5A5B
_HOST_TAIL = 5


class RelocateStep:
    """`relocate` with buffers of its own, on the host lane or on the current CUDA device.

    The list is judged a second time, after the move, as long lists in huge pools are, whose marks
    are taken back one by one: all ways must come to the same verdict.

    Parameters
    ----------
    batch : RelocationBatch
        Its pools' shape is the step's for good; its list is only a measure of the capacity.
    xp : {"numpy", "torch-cuda"}
        Where the buffers are.
    capacity : int
        Least length of the lists.
    num_ctas : int, optional
        Blocks that judge a long list and move rows.
    list_rows : int, optional
        Longest list that takes one launch, as for `RelocatePlan`.
    scratch_bytes : int, optional
        Scratch of a longer one.
    values : mapping of str to int, optional
        `-D` values of the kernels.
    """

    def __init__(
        self,
        batch: RelocationBatch,
        xp: Target,
        *,
        capacity: int = 1,
        num_ctas: int | None = None,
        list_rows: int = LIST_ROWS,
        scratch_bytes: int = SCRATCH_BYTES,
        values: Mapping[str, int] | None = None,
    ) -> None:
        self.shape = _pool_shape(batch)
        self.capacity = max(batch.capacity, capacity)
        self._batch = batch.padded(self.capacity)
        content = pool_content(*self.shape)
        self.storage = _buffer(xp, content.shape, np.uint8)
        self.pools = list(pool_views(self.storage, batch.row_bytes))
        self.src = _buffer(xp, (self.capacity,), np.int64)
        self.dst = _buffer(xp, (self.capacity,), np.int64)
        self.count = _buffer(xp, (1,), np.int32)
        lists = self.src, self.dst, self.count
        ways: dict[str, Any] = {"list_rows": list_rows, "values": values}
        self.workspace = RelocateWorkspace.allocate(
            self.pools, self.capacity, scratch_bytes=scratch_bytes, **ways
        )
        self.plan = RelocatePlan(
            self.pools, *lists, workspace=self.workspace, num_ctas=num_ctas, **ways
        )
        self.second_status = _buffer(xp, (4,), np.int32)
        self.marks = _buffer(xp, (4 * -(-batch.num_slots // 32),), np.int32)
        self.votes = _buffer(xp, (1,), np.int64)
        check = relocate_kernels(SWEPT_WORDS=0)["relocate_check"]
        self.second_check = check.bind(
            1, number_of(check, "CHECK_THREADS"), *lists, self.capacity, batch.num_slots,
            self.marks, self.votes, self.second_status,
        )  # fmt: skip
        self.refill(batch)

    @property
    def outputs(self) -> Mapping[str, Any]:
        """The pools with gaps and guards, the verdicts, and the marks, which end all zero."""
        return {
            "pools": self.storage,
            "status": self.workspace.status,
            "second status": self.second_status,
            "marks": self.marks,
            "votes": self.votes,
            **self._of_the_plan(),
        }

    def _of_the_plan(self) -> dict[str, Any]:
        """Return what a long list's plan leaves all zero."""
        held = {"plan's marks": self.workspace.marks, "plan's votes": self.workspace.votes}
        return {name: tensor for name, tensor in held.items() if tensor is not None}

    def refill(self, batch: RelocationBatch) -> None:
        """Write a list, and the pools' content as it was at the start."""
        if _pool_shape(batch) != self.shape:
            raise CaseError(f"pools {_pool_shape(batch)} do not fit buffers for {self.shape}")
        if batch.capacity > self.capacity:
            raise CaseError(f"{batch.capacity} rows do not fit lists of {self.capacity}")
        self._batch = batch.padded(self.capacity)
        _write(self.storage, pool_content(*self.shape))
        _write(self.src, self._batch.src)
        _write(self.dst, self._batch.dst)
        _write(self.count, np.array([batch.count], np.int32))

    def __call__(self) -> None:
        """Judge the list, move its rows, and judge it the other way."""
        self.plan()
        self.second_check()

    def poison(self) -> None:
        """Fill the verdicts with a pattern; everything else is updated in place."""
        self.workspace.status[:] = _POISON
        self.second_status[:] = _POISON

    def expected(self) -> dict[str, NDArray[Any]]:
        """Return what the oracle makes of the present list."""
        batch = self._batch
        storage = pool_content(*self.shape).copy()
        pools = list(pool_views(storage, batch.row_bytes))
        status = oracle.relocate(pools, batch.src, batch.dst, batch.count)
        zero = {"marks": self.marks, "votes": self.votes, **self._of_the_plan()}
        return {
            "pools": storage,
            "status": status,
            "second status": status,
            **{name: np.zeros_like(host_array(tensor).data) for name, tensor in zero.items()},
        }


class RelocateCase:
    """See `cuverify.cases.CheckCase`."""

    name = "relocate"

    def kernels(self) -> Sequence[Kernel]:
        """Return all kernels, and the one for the longest short lists."""
        longest = relocate_kernels(**LONGER_LISTS)["relocate_list"]
        return [*relocate_kernels().values(), longest]

    def batches(
        self, *, seed: int = 0, examples: int = 16
    ) -> Iterator[tuple[str, RelocationBatch]]:
        """Yield small lists: `examples` drawn legal ones, half as many illegal, and real ones."""
        from cuverify.strategies import drawn, faulty_relocation_batches, relocation_batches

        bounds: dict[str, Any] = {"max_slots": 40, "max_layers": 3}
        legal = drawn(relocation_batches(**bounds), examples, seed=seed)
        illegal = drawn(faulty_relocation_batches(**bounds), examples // 2, seed=seed)
        yield from _labelled("drawn", legal)
        yield from _labelled("illegal", illegal)
        real = real_batches(512, steps=2, max_rows=24, tree_tokens=8, seed=seed)
        for batch in real:
            batch = replace(batch, layers=2, row_stride=1168)
            yield f"real: {batch.kind}", batch.padded(batch.capacity + _HOST_TAIL)
        longest = relocation_batches(
            min_slots=LIST_ROWS + 40, max_slots=LIST_ROWS + 40, min_rows=LIST_ROWS + 1,
            row_bytes=(16,), max_layers=1,
        )  # fmt: skip
        yield from _labelled("long", drawn(longest, 2, seed=seed))

    def device_batches(
        self, *, seed: int = 0, examples: int = 12
    ) -> Iterator[tuple[str, RelocationBatch]]:
        """Yield lists in two groups of one pool shape each, so that a graph can be replayed."""
        from cuverify.strategies import drawn, faulty_relocation_batches, relocation_batches

        shape: dict[str, Any] = {
            "min_slots": 1024,
            "max_slots": 1024,
            "min_layers": 61,
            "max_layers": 61,
            "row_bytes": (1152,),
            "max_row_gap": 0,
        }
        legal = drawn(relocation_batches(**shape), examples, seed=seed)
        illegal = drawn(faulty_relocation_batches(**shape), examples // 3, seed=seed)
        mixed = [*_labelled("drawn", legal), *_labelled("illegal", illegal)]
        # Legal and illegal lists take turns: a graph must recover from a list that it refused.
        order = np.random.default_rng(seed).permutation(len(mixed))
        yield from (mixed[at] for at in order)
        real = real_batches(16_384, steps=2, max_rows=2048, seed=seed)
        for batch in islice(real, examples):
            yield f"real: {batch.kind}", replace(batch, layers=3)

    def step(self, batch: RelocationBatch, xp: Target) -> RelocateStep:
        """Return a step for pools of the batch's shape and lists of up to their slots."""
        on_host = xp == "numpy"
        capacity = 1 if on_host else batch.num_slots
        return RelocateStep(batch, xp, capacity=capacity, scratch_bytes=64 << 20)


CASE = RelocateCase()


@functools.lru_cache(maxsize=2)
def pool_content(layers: int, num_slots: int, row_bytes: int, row_stride: int) -> NDArray[np.uint8]:
    """Return what all pools of this shape hold at the start, guard slots included.

    Returns
    -------
    ndarray of uint8, shape (layers, guard + slots + guard, row_stride)
        Read-only noise: no two rows are alike, in one layer or in two.
    """
    rng = np.random.default_rng([layers, num_slots, row_bytes, row_stride])
    shape = (layers, num_slots + 2 * _GUARD_SLOTS, row_stride)
    content = rng.integers(0, 256, shape, np.uint8)
    content.setflags(write=False)
    return content


def pool_views(storage: Any, row_bytes: int) -> Iterator[Any]:
    """Yield each layer's pool [slots, row_bytes] in a storage of `pool_content`'s shape."""
    for layer in range(len(storage)):
        yield storage[layer][_GUARD_SLOTS:-_GUARD_SLOTS, :row_bytes]


def _pool_shape(batch: RelocationBatch) -> tuple[int, int, int, int]:
    return batch.layers, batch.num_slots, batch.row_bytes, batch.row_stride


def _labelled(
    kind: str, batches: Sequence[RelocationBatch]
) -> Iterator[tuple[str, RelocationBatch]]:
    for number, batch in enumerate(batches):
        yield f"{kind} {number}: {batch.count} rows", batch


def _buffer(xp: Target, shape: tuple[int, ...], dtype: type[np.generic]) -> Any:
    if xp == "numpy":
        return np.zeros(shape, dtype)
    import torch

    return torch.zeros(shape, dtype=getattr(torch, np.dtype(dtype).name), device="cuda")


def _write(buffer: Any, values: NDArray[Any]) -> None:
    if isinstance(buffer, np.ndarray):
        buffer[...] = values
        return
    import torch

    # torch warns about read-only arrays, though it only reads here
    writable = values if values.flags.writeable else values.copy()
    buffer.copy_(torch.from_numpy(writable))
