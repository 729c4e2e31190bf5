"""Compact a pool on the device: plan, move all layers, rewrite the table. No read-back.

Who else holds slots on the host (an allocator, tree nodes) is told afterwards: `DefragPlan.read`
gives the moves as a `cuverify.planner.MovePlan` for `cuverify.holders.SlotHolders`. Where anything
of it is pinned, plan on the host instead.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuverify.arguments import device_of
from cuverify.buffers import Buffer, read, refuse_overlap, tensor_of, tensors_of, wrong
from cuverify.errors import ArgumentError
from cuverify.kernel import Kernel
from cuverify.launching import Launched, check_int, grid, index_ctype, number_of
from cuverify.ops.relocate import RelocatePlan, RelocateWorkspace, pool_slots
from cuverify.planner import MovePlan
from cuverify.sources import KernelSource

_CTAS_PER_MULTIPROCESSOR = 4


def defrag_workspace(num_slots: int, budget: int) -> dict[str, Buffer]:
    """Return the buffers that a `DefragPlan` needs besides its inputs.

    Parameters
    ----------
    num_slots : int
        Slots of the pools; fewer than 2**31, as `budget`.
    budget : int
        Most rows that a call moves.

    Returns
    -------
    dict of str to Buffer
        The fields of `DefragWorkspace`.

    Raises
    ------
    ArgumentError
        Naming the argument.
    """
    num_slots = check_int("num_slots", num_slots, 1, 2**31 - 1, "slots")
    budget = check_int("budget", budget, 1, 2**31 - 1, "rows of a call")
    return {
        "live": Buffer((-(-num_slots // 32),), "uint32"),
        "fault": Buffer((1,), "int32"),
        "src": Buffer((budget,), "int64"),
        "dst": Buffer((budget,), "int64"),
        "count": Buffer((1,), "int32"),
        "status": Buffer((4,), "int32"),
        "moved_by": Buffer((num_slots,), "int32"),
    }


@dataclass(frozen=True, eq=False)
class DefragWorkspace:
    """The caller's buffers, sized by `defrag_workspace`.

    Attributes
    ----------
    live : tensor of uint32, shape (ceil(num_slots / 32),)
    fault : tensor of int32, shape (1,)
        Both zero before the first call, and after every call.
    src, dst : tensor of int64, shape (budget,)
    count : tensor of int32, shape (1,)
        The moves of the last call.
    status : tensor of int32, shape (4,)
        Code, entry at fault, rows, live slots.
    moved_by : tensor of int32, shape (num_slots,)
        Any content.
    """

    live: Any
    fault: Any
    src: Any
    dst: Any
    count: Any
    status: Any
    moved_by: Any

    @classmethod
    def allocate(cls, like: Any, num_slots: int, budget: int) -> DefragWorkspace:
        """Return new buffers of the library and on the device of `like`."""
        sizes = defrag_workspace(num_slots, budget)
        return cls(**{name: buffer.zeros(like) for name, buffer in sizes.items()})


class DefragPlan:
    """A compaction whose checks are done; calling it launches.

    Make it before a capture. Tables, lengths and lists may change in place between calls.

    Parameters
    ----------
    pools : sequence of tensor
        As for `RelocatePlan`, pages of one slot.
    req_to_token : tensor of int32, shape (rows, width)
        Rewritten in place. Any row stride.
    req_pool_indices : tensor of int32 or int64, shape (B,)
        Rows of the requests, each once; 0 where there is none.
    held_lens : tensor of int32 or int64, shape (B,)
        Slots that each request holds: its tokens and its window.
    held : tensor of int64, optional
        Slots that live rows have beside those of requests; rewritten in place.
    held_count : tensor of int32, shape (1,), optional
        How many of them.
    budget : int
        Most rows that a call moves.
    workspace : DefragWorkspace, optional
        The caller's buffers; of the plan's own if absent.
    relocate_workspace : RelocateWorkspace, optional
        Those of the move, for lists of `budget` rows. No scratch is needed: the lists are disjoint.
    num_ctas : int, optional
        Blocks of each launch but the planner's.

    Raises
    ------
    ArgumentError
        Naming the argument and its value.
    LaunchError
        Inside a capture.
    """

    def __init__(
        self,
        pools: Sequence[Any],
        req_to_token: Any,
        req_pool_indices: Any,
        held_lens: Any,
        *,
        held: Any = None,
        held_count: Any = None,
        budget: int,
        workspace: DefragWorkspace | None = None,
        relocate_workspace: RelocateWorkspace | None = None,
        num_ctas: int | None = None,
    ) -> None:
        given = {
            "req_to_token": req_to_token,
            "req_pool_indices": req_pool_indices,
            "held_lens": held_lens,
        }
        if (held is None) != (held_count is None):
            raise ArgumentError("held_count", held_count, "comes with held, or neither does")
        if held is not None:
            given |= {"held": held, "held_count": held_count}
        inputs = {name: tensor_of(name, value) for name, value in given.items()}
        budget = check_int("budget", budget, 1, 2**31 - 1, "rows of a call")
        num_slots = pool_slots(pools)
        device = device_of([tensor_of("pools[0]", pools[0]), *inputs.values()])
        if len(inputs["req_to_token"].shape) != 2 or 0 in inputs["req_to_token"].shape:
            raise wrong(inputs["req_to_token"], "wants shape [rows, width]")
        if len(inputs["held_lens"].shape) != 1:
            raise wrong(inputs["held_lens"], "wants one length for each request")
        if held is not None and len(inputs["held"].shape) != 1:
            raise wrong(inputs["held"], "wants one dimension")
        (batch,) = inputs["held_lens"].shape
        if inputs["req_pool_indices"].shape != (batch,):
            raise wrong(inputs["req_pool_indices"], f"wants one row for each of {batch} requests")
        if workspace is None:
            workspace = DefragWorkspace.allocate(req_to_token, num_slots, budget)
        if relocate_workspace is None:
            relocate_workspace = RelocateWorkspace.allocate(pools, budget, scratch_bytes=None)
        self.workspace = workspace
        self.num_slots = num_slots
        self.move = RelocatePlan(
            pools, workspace.src, workspace.dst, workspace.count, workspace=relocate_workspace,
            num_ctas=num_ctas, list_prefix="workspace.", workspace_prefix="relocate_workspace.",
        )  # fmt: skip
        own = [*tensors_of("workspace", workspace).values()]
        rewritten = [inputs[name] for name in ("req_to_token", "held") if name in inputs]
        only_read = [tensor for tensor in inputs.values() if tensor not in rewritten]
        refuse_overlap([*own, *rewritten], only_read)
        self.move.refuse_overlap([*own, *inputs.values()])
        kernels = defrag_kernels(
            SEQ_INDEX=index_ctype(inputs["held_lens"]),
            POOL_INDEX=index_ctype(inputs["req_pool_indices"]),
        )
        rows, width = inputs["req_to_token"].shape
        capacity = inputs["held"].shape[0] if held is not None else 0
        holders = (
            req_to_token, inputs["req_to_token"].strides[0], rows, width, req_pool_indices,
            held_lens, batch, held, held_count, capacity,
        )  # fmt: skip
        threads = number_of(kernels["defrag_mark"], "HOLD_THREADS")
        by_entry = grid(num_ctas, device, batch + 1, _CTAS_PER_MULTIPROCESSOR)
        by_row = grid(num_ctas, device, -(-budget // threads), _CTAS_PER_MULTIPROCESSOR)
        self.plan = (
            kernels["defrag_mark"].bind(
                by_entry, threads, *holders, num_slots, workspace.live, workspace.fault
            ),
            kernels["defrag_compact"].bind(
                1, number_of(kernels["defrag_compact"], "COMPACT_THREADS"),
                num_slots, batch, budget, workspace.live, workspace.fault, workspace.src,
                workspace.dst, workspace.count, workspace.status,
            ),
        )  # fmt: skip
        lists = (workspace.src, workspace.dst, workspace.count, budget, num_slots)
        self.rewrite = (
            kernels["defrag_index"].bind(
                by_row, threads,
                workspace.src, workspace.count, budget, num_slots, workspace.moved_by,
            ),
            kernels["defrag_rewrite"].bind(by_entry, threads, *holders, *lists, workspace.moved_by),
        )  # fmt: skip

    def __call__(self) -> None:
        """Plan, move and rewrite, on torch's current stream."""
        for launch in self.plan:
            launch()
        self.move()
        for launch in self.rewrite:
            launch()

    def read(self) -> MovePlan:
        """Return what the last call moved. Waits for the device: not for use inside a capture.

        Returns
        -------
        MovePlan
            Where `complete` is False there may be more to move. It may also be that the call moved
            exactly `budget` rows and none is left: the next call says so.

        Raises
        ------
        ArgumentError
            A request or `held` names a slot that the pools do not have, or has a length that does
            not fit; nothing was moved.
        """
        code, entry, rows, live = (int(word) for word in read(self.workspace.status).tolist())
        if code:
            raise ArgumentError(
                f"req_to_token or held_lens, request {entry}", code,
                f"a slot out of {self.num_slots}, or a length that does not fit (the last entry is "
                "held); nothing was moved",
            )  # fmt: skip
        self.move.read_status()
        src = np.array(read(self.workspace.src)[:rows], np.int64)
        dst = np.array(read(self.workspace.dst)[:rows], np.int64)
        # the end of the pool comes down to what is highest now
        end = int(src[0]) + 1 if rows else live + 1
        left = int(src[-1]) if rows else live
        complete = rows < len(read(self.workspace.src)) or left == live + 1
        return MovePlan(src, dst, end - (live + 1) if complete else 0, complete)


def launched(arch: str) -> Iterator[Launched]:
    """Yield the `-D` values that this op launches with; see `cuverify.launched`."""
    yield Launched("defrag", ("SEQ_INDEX", "POOL_INDEX"))


def defrag_kernels(**values: str | int) -> dict[str, Kernel]:
    """Return the kernels of kernels_cu/defrag.cu with these `-D` values, by name."""
    return _kernels(tuple(sorted(values.items())))


@functools.cache
def _kernels(values: tuple[tuple[str, str | int], ...]) -> dict[str, Kernel]:
    source = KernelSource.from_package("defrag", values=dict(values))
    names = ("defrag_mark", "defrag_compact", "defrag_index", "defrag_rewrite")
    return {name: Kernel(source, name) for name in names}
