"""Move KV rows between the slots of a pool, in all layers, by lists that live on the device.

The lists and their length may be written by the step itself: nothing is read back. A list that is
not legal (see `RelocateCode`) moves nothing; the step goes on, and `RelocatePlan.read_status` says
later what was wrong.
"""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any

import numpy as np

from cuverify.arguments import Tensor, device_of
from cuverify.buffers import Buffer, read, tensor_of, wrong
from cuverify.compile import max_shared_bytes
from cuverify.errors import ArgumentError, LaunchError
from cuverify.kernel import Kernel
from cuverify.sources import KernelSource

LANES = 8
"""Threads that share one row of one layer in `relocate_rows`."""
_PIECE = 16  # bytes of one access
_HOST_CTAS = 2
_HOST_SHARED_ARCH = "sm_90"  # whose blocks have the most shared memory; so has the host lane's
# Several times what is resident, so that no multiprocessor waits for the slowest block's last row.
_CTAS_PER_MULTIPROCESSOR = 32


class RelocateCode(enum.IntEnum):
    """Verdict of `relocate_check` on a list.

    A row with ``src == dst`` says that a slot stays; it moves nothing and may be repeated.
    """

    LEGAL = 0
    BAD_COUNT = 1
    """The count is negative or larger than the lists."""
    BAD_SOURCE = 2
    """A source is no slot of the pools."""
    BAD_DESTINATION = 3
    """A destination is no slot of the pools."""
    DUPLICATE_DESTINATION = 4
    """A slot is moved into by one row and is the destination of another."""
    OVERLAP = 5
    """A slot is the source of one move and the destination of another."""


_FAULTS = {
    RelocateCode.BAD_COUNT: ("count", "must lie in [0, {capacity}], the length of the lists"),
    RelocateCode.BAD_SOURCE: ("src[{row}]", "is no slot of the pools, which have {num_slots}"),
    RelocateCode.BAD_DESTINATION: ("dst[{row}]", "is no slot of the pools, which have {num_slots}"),
    RelocateCode.DUPLICATE_DESTINATION: ("dst[{row}]", "is an earlier row's destination, too"),
    RelocateCode.OVERLAP: (
        "row {row}, slot",
        "is read by one row and written by another: a list that overlaps or chains is not moved",
    ),
}


@dataclass(frozen=True)
class RelocateStatus:
    """What `relocate_check` found.

    Attributes
    ----------
    code : RelocateCode
    row : int
        The first row that is illegal together with the rows in front of it; -1 where there is none.
    slot : int
        The slot at fault, the count at ``BAD_COUNT``, else 0.
    """

    code: RelocateCode
    row: int
    slot: int

    @classmethod
    def from_words(cls, words: Sequence[int]) -> RelocateStatus:
        """Return the meaning of the four int32 that the kernel writes."""
        code, row, low, high = (int(word) for word in words)
        return cls(RelocateCode(code), row, (low & 0xFFFFFFFF) | high << 32)

    def raise_for_fault(self, *, num_slots: int, capacity: int) -> None:
        """Raise if the list was not legal.

        Raises
        ------
        ArgumentError
            Naming the list, the row and the slot.
        """
        if self.code == RelocateCode.LEGAL:
            return
        where, reason = _FAULTS[self.code]
        numbers = {"row": self.row, "num_slots": num_slots, "capacity": capacity}
        raise ArgumentError(
            where.format(**numbers), self.slot, reason.format(**numbers) + "; nothing was moved"
        )


def relocate_workspace(
    num_slots: int, layers: int, *, shared_bytes: int | None = None
) -> dict[str, Buffer]:
    """Return the buffers that `relocate` needs besides its inputs.

    A list is judged in shared memory, with one bit a slot. Only pools with more slots than a block
    has bits need a bitmap besides: above 1.8 million slots on sm_90 and sm_100, 1.3 million on
    sm_80, 0.8 million on the others.

    Parameters
    ----------
    num_slots : int
        Slots of every pool.
    layers : int
        Number of pools.
    shared_bytes : int, optional
        Shared memory that a block can have on the device, as `cuverify.compile.max_shared_bytes`
        says; that of sm_90 if absent.

    Returns
    -------
    dict of str to Buffer
        The fields of `RelocateWorkspace`; without ``"bitmap"`` where none is needed.
    """
    if num_slots < 1:
        raise ArgumentError("num_slots", num_slots, "a pool has at least one slot")
    if layers < 1:
        raise ArgumentError("layers", layers, "there is at least one pool")
    if shared_bytes is None:
        shared_bytes = max_shared_bytes(_HOST_SHARED_ARCH)
    buffers = {"status": Buffer((4,), "int32"), "layer_ptrs": Buffer((layers,), "uint64")}
    if _check_shared_bytes(num_slots) > shared_bytes:
        buffers["bitmap"] = _bitmap(num_slots)
    return buffers


def _bitmap(num_slots: int) -> Buffer:
    return Buffer((-(-num_slots // 32),), "uint32")


def _check_shared_bytes(num_slots: int) -> int:
    """Return the shared memory of `relocate_check` without a bitmap; with one it is that of 0."""
    expression = relocate_kernels()[0].contract.shared
    return 0 if expression is None else expression({"num_slots": num_slots})


@dataclass(frozen=True, eq=False)
class RelocateWorkspace:
    """The caller's buffers, sized by `relocate_workspace`, on the pools' device.

    Two plans may share one as long as they run on one stream and have the same pools.

    Attributes
    ----------
    status : tensor of int32, shape (4,)
        Written completely by every launch.
    layer_ptrs : tensor of uint64, shape (layers,)
        Written when a plan is made, read by every launch.
    bitmap : tensor of uint32, shape (ceil(num_slots / 32),), or None
        Where lists are judged; zero before the first launch and after every launch. With None they
        are judged in shared memory, which is faster and possible where `relocate_workspace` has no
        ``"bitmap"``.
    """

    status: Any
    layer_ptrs: Any
    bitmap: Any = None

    @classmethod
    def allocate(cls, pools: Sequence[Any], *, bitmap: bool | None = None) -> RelocateWorkspace:
        """Return new buffers for these pools, of the library and on the device of the first.

        Parameters
        ----------
        pools : sequence of tensor
            As for `RelocatePlan`.
        bitmap : bool, optional
            Whether lists are judged in a bitmap in global memory. Where there is need if absent.
        """
        layout = _PoolLayout.of(pools)
        shared = _shared_bytes(layout.first.device)
        sizes = relocate_workspace(layout.num_slots, layout.layers, shared_bytes=shared)
        if bitmap:
            sizes["bitmap"] = _bitmap(layout.num_slots)
        elif bitmap is not None:
            sizes.pop("bitmap", None)
        return cls(**{name: buffer.zeros(pools[0]) for name, buffer in sizes.items()})


class RelocatePlan:
    """A relocation whose checks are done and whose pointer table is filled; calling it launches.

    Make it before a capture. The list and its length may change in place between calls.

    Parameters
    ----------
    pools : sequence of tensor, each [slots, D] or [slots, 1, D]
        One a layer, of one shape, dtype and row stride; any row stride, rows contiguous, row bytes,
        row stride and base addresses multiples of 16. Moved in place.
    src, dst : tensor of int64, shape (capacity,), contiguous
        Row i moves slot ``src[i]`` to slot ``dst[i]``. Read only.
    count : tensor of int32, shape (1,)
        Rows of the list; what stands behind them is a dead tail of any content. Read only.
    workspace : RelocateWorkspace, optional
        The caller's buffers; of the plan's own if absent.
    num_ctas : int, optional
        Blocks that move rows. Enough to fill the GPU if absent, and 2 on the host lane.
    values : mapping of str to int, optional
        `-D` values of kernels_cu/relocate.cu, such as ``{"UNROLL": 6}``.

    Attributes
    ----------
    num_slots, layers, row_bytes, row_stride, capacity : int
        What was read from the tensors; sizes in bytes.
    grid : int
        Blocks that move rows.
    check, move : BoundLaunch
        The two launches of a call. `move` writes nothing where the last `check` found a fault.

    Raises
    ------
    ArgumentError
        Naming the argument and its value.
    LaunchError
        Inside a capture: filling the pointer table copies from the host.

    Examples
    --------
    >>> plan = RelocatePlan(pools, src, dst, count)     # doctest: +SKIP
    >>> with torch.cuda.graph(graph):                   # doctest: +SKIP
    ...     plan()
    """

    def __init__(
        self,
        pools: Sequence[Any],
        src: Any,
        dst: Any,
        count: Any,
        *,
        workspace: RelocateWorkspace | None = None,
        num_ctas: int | None = None,
        values: Mapping[str, int] | None = None,
    ) -> None:
        layout = _PoolLayout.of(pools)
        _refuse_capture(layout.first.device)
        if workspace is None:
            workspace = RelocateWorkspace.allocate(pools)
        lists = {"src": src, "dst": dst, "count": count}
        held = {f"workspace.{f.name}": getattr(workspace, f.name) for f in fields(workspace)}
        if workspace.bitmap is None:
            del held["workspace.bitmap"]
        tensors = {name: tensor_of(name, value) for name, value in {**lists, **held}.items()}
        device = device_of([layout.first, *tensors.values()])
        capacity = _length(tensors["src"])
        if _length(tensors["dst"]) != capacity:
            raise ArgumentError("dst", dst, f"src has {capacity} rows; both lists have one length")
        if not 1 <= capacity < 2**31:
            raise ArgumentError("src", src, "a list has 1 to 2**31 - 1 rows, a dead tail included")
        need = f"{layout.num_slots} slots and {layout.layers} pools"
        shared = _shared_bytes(layout.first.device)
        sizes = relocate_workspace(layout.num_slots, layout.layers, shared_bytes=shared)
        if workspace.bitmap is not None:
            sizes["bitmap"] = _bitmap(layout.num_slots)
        elif "bitmap" in sizes:
            reason = f"{need} need shape {list(sizes['bitmap'].shape)}: a block of this device"
            raise ArgumentError("workspace.bitmap", None, f"{reason} has {shared} bytes for marks")
        for name, buffer in sizes.items():
            tensor = tensors[f"workspace.{name}"]
            if tensor.shape != buffer.shape:
                raise wrong(tensor, f"{need} need shape {list(buffer.shape)}")

        self.pools = tuple(pools)
        self.workspace = workspace
        self.num_slots = layout.num_slots
        self.layers = layout.layers
        self.row_bytes = layout.row_bytes
        self.row_stride = layout.row_stride
        self.capacity = capacity
        check, rows = relocate_kernels(**(values or {}))
        threads = _threads(rows, "ROWS_THREADS")
        self.grid = _grid(num_ctas, device, -(-capacity * self.layers * LANES // threads))
        self.check = check.bind(
            1, _threads(check, "CHECK_THREADS"),
            src, dst, count, capacity, self.num_slots, workspace.bitmap, workspace.status,
            shared=_check_shared_bytes(0 if "bitmap" in sizes else self.num_slots),
        )  # fmt: skip
        self.move = rows.bind(
            self.grid, threads,
            workspace.layer_ptrs, self.layers, self.row_bytes, self.row_stride,
            src, dst, count, capacity, workspace.status,
            reach={"layer_ptrs": list(pools)},
        )  # fmt: skip
        _write(workspace.layer_ptrs, layout.addresses)

    def __call__(self) -> None:
        """Judge the list and move its rows: two launches on torch's current stream."""
        self.check()
        self.move()

    def read_status(self) -> RelocateStatus:
        """Return the verdict of the last call. Waits for the device: not for use inside a capture.

        Raises
        ------
        ArgumentError
            If the list was not legal, naming the list, the row and the slot.
        """
        status = self.peek_status()
        status.raise_for_fault(num_slots=self.num_slots, capacity=self.capacity)
        return status

    def peek_status(self) -> RelocateStatus:
        """Return the verdict of the last call, whatever it is. Waits for the device."""
        return RelocateStatus.from_words(read(self.workspace.status).tolist())


def relocate(
    pools: Sequence[Any],
    src: Any,
    dst: Any,
    count: Any,
    *,
    workspace: RelocateWorkspace | None = None,
    num_ctas: int | None = None,
    values: Mapping[str, int] | None = None,
) -> RelocatePlan:
    """Move rows once: make a `RelocatePlan` and call it.

    A step that runs often, or is captured, makes the plan itself, before, and calls it. Parameters
    and errors are those of `RelocatePlan`; an illegal list is no error here (nothing is read back).

    Returns
    -------
    RelocatePlan
        To be called again, or asked for its status.
    """
    plan = RelocatePlan(
        pools, src, dst, count, workspace=workspace, num_ctas=num_ctas, values=values
    )
    plan()
    return plan


def relocate_kernels(**values: int) -> tuple[Kernel, Kernel]:
    """Return `relocate_check` and `relocate_rows` with these `-D` values."""
    return _kernels(tuple(sorted(values.items())))


@functools.cache
def _kernels(values: tuple[tuple[str, int], ...]) -> tuple[Kernel, Kernel]:
    source = KernelSource.from_package("relocate", values=dict(values))
    return Kernel(source, "relocate_check"), Kernel(source, "relocate_rows")


@dataclass(frozen=True)
class _PoolLayout:
    """What all pools have in common, sizes in bytes, and where they are."""

    num_slots: int
    row_bytes: int
    row_stride: int
    addresses: tuple[int, ...]
    first: Tensor

    @property
    def layers(self) -> int:
        return len(self.addresses)

    @classmethod
    def of(cls, pools: Sequence[Any]) -> _PoolLayout:
        if not isinstance(pools, Sequence) or not len(pools):
            raise ArgumentError("pools", pools, "wants a list with one tensor a layer")
        tensors = [tensor_of(f"pools[{at}]", pool) for at, pool in enumerate(pools)]
        first = tensors[0]
        device_of(tensors)
        num_slots, row_bytes, row_stride = _rows_of(first)
        for tensor in tensors:
            if tensor.dtype != first.dtype:
                raise wrong(tensor, f"is {tensor.dtype}, but pools[0] is {first.dtype}")
            if _rows_of(tensor) != (num_slots, row_bytes, row_stride):
                layouts = "{} slots of {} bytes {} bytes apart, but pools[0] has {}, {} and {}"
                raise wrong(tensor, "has " + layouts.format(*_rows_of(tensor), *_rows_of(first)))
            if tensor.address % _PIECE:
                off = f"{tensor.address % _PIECE} bytes off a multiple of {_PIECE}"
                raise wrong(tensor, f"its address is {off}")
            if not tensor.writable:
                raise wrong(tensor, "is read-only; rows are moved in place")
        addresses = tuple(tensor.address for tensor in tensors)
        _refuse_shared_rows(tensors, num_slots, row_bytes, row_stride)
        return cls(num_slots, row_bytes, row_stride, addresses, first)


def _rows_of(pool: Tensor) -> tuple[int, int, int]:
    """Return slots, bytes of a row and bytes between slots, if the kernel can move such rows."""
    shape, strides = pool.shape, pool.strides
    if len(shape) == 3 and shape[1] == 1:
        shape, strides = (shape[0], shape[2]), (strides[0], strides[2])
    if len(shape) != 2 or 0 in shape:
        raise wrong(pool, f"has shape {list(pool.shape)}; wants [slots, D] or [slots, 1, D]")
    if shape[1] > 1 and strides[1] != 1:
        raise wrong(pool, f"elements of a row are {strides[1]} apart; rows must be contiguous")
    row_bytes = shape[1] * pool.itemsize
    row_stride = strides[0] * pool.itemsize if shape[0] > 1 else row_bytes
    if row_bytes % _PIECE:
        raise wrong(pool, f"a row has {row_bytes} bytes, which is no multiple of {_PIECE}")
    if row_stride % _PIECE or row_stride < row_bytes:
        wanted = f"wants a multiple of {_PIECE}, at least the row's {row_bytes}"
        raise wrong(pool, f"slots are {row_stride} bytes apart; {wanted}")
    return shape[0], row_bytes, row_stride


def _refuse_shared_rows(
    pools: Sequence[Tensor], num_slots: int, row_bytes: int, row_stride: int
) -> None:
    """Raise if two pools share a byte; they may be interleaved, as layers of one tensor are."""
    order = sorted(range(len(pools)), key=lambda at: pools[at].address)
    sorted_at = np.array([pools[at].address for at in order], np.int64)
    delta = sorted_at[None, :] - sorted_at[:, None]
    rows, into = np.divmod(delta, row_stride)
    shares = (rows < num_slots) & (into < row_bytes)
    shares |= (rows + 1 < num_slots) & (into > row_stride - row_bytes)
    shares &= np.triu(np.ones_like(shares), 1)
    if shares.any():
        low, high = (order[int(at)] for at in np.argwhere(shares)[0])
        raise wrong(pools[high], f"shares memory with {pools[low].name}")


def _length(tensor: Tensor) -> int:
    if len(tensor.shape) != 1:
        raise wrong(tensor, f"has {len(tensor.shape)} dimensions, wants one")
    return tensor.shape[0]


def _threads(kernel: Kernel, name: str) -> int:
    source = kernel.source
    return int(source.values.get(name, source.known_values()[name]))


def _grid(num_ctas: int | None, device: str | None, useful: int) -> int:
    """Return the number of blocks: what the caller says, else no more than `useful` ones."""
    if num_ctas is not None:
        if num_ctas < 1:
            raise ArgumentError("num_ctas", num_ctas, "wants at least one block")
        return num_ctas
    if device is None or device == "cpu":
        return min(useful, _HOST_CTAS)
    import torch

    properties = torch.cuda.get_device_properties(device)
    return max(1, min(useful, _CTAS_PER_MULTIPROCESSOR * properties.multi_processor_count))


def _shared_bytes(device: str | None) -> int:
    """Return the shared memory that a block can have on a device."""
    if device is None or device == "cpu":
        return max_shared_bytes(_HOST_SHARED_ARCH)
    import cupy

    attributes = cupy.cuda.Device(int(device.removeprefix("cuda:"))).attributes
    return int(attributes["MaxSharedMemoryPerBlockOptin"])


def _refuse_capture(device: str | None) -> None:
    if device is None or device == "cpu":
        return
    import torch

    if torch.cuda.is_current_stream_capturing():
        raise LaunchError(
            "a RelocatePlan copies addresses from the host, which a graph would not repeat: "
            "make it outside torch.cuda.graph and call it inside"
        )


def _write(table: Any, addresses: Sequence[int]) -> None:
    """Write addresses into a table of 64-bit words, wherever it is."""
    words = np.array(addresses, np.uint64)
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(table, torch.Tensor):
        table.copy_(torch.from_numpy(words.view(np.int64)).view(table.dtype))
    elif isinstance(table, np.ndarray):
        table[:] = words.view(table.dtype)
    else:
        table.set(words.view(table.dtype))
