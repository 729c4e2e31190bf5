"""Move KV rows between the slots of pools, in all layers, by lists that live on the device.

Rows move as if every source were read before any destination is written: lists may overlap, chain
and cycle. The lists and their length may be written by the step itself: nothing is read back. A
list that is not legal (see `RelocateCode`) moves nothing; the step goes on, and
`RelocatePlan.read_status` says later what was wrong.

A list with room for at most 1,024 rows takes one launch. A longer one is judged first; where it
overlaps, its chains are cut into stretches, and a bounded scratch holds what the cuts would
overwrite.
"""

from __future__ import annotations

import enum
import functools
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuverify.arguments import Tensor, device_of
from cuverify.buffers import Buffer, read, refuse_overlap, tensor_of, wrong
from cuverify.compile import capability_of
from cuverify.errors import ArgumentError, LaunchError
from cuverify.kernel import BoundLaunch, Kernel
from cuverify.launching import Launched, capability, check_int, grid, number_of
from cuverify.sources import KernelSource

LANES = 8
"""Threads that share one column of one row in `relocate_rows`."""
LIST_ROWS = 1024
"""Most rows that a list may have room for to be moved in one launch."""
SCRATCH_BYTES = 1 << 31
"""Most scratch of a long list, unless the caller says otherwise; one column needs more at times."""
_PIECE = 16  # bytes of one access
_NARROW = 4  # and of one where a row is no multiple of that
_WIDE_ROWS = {"NARROW_ROWS": 0}  # where all rows are whole 16-byte pieces
LONGER_LISTS = {
    "LIST_THREADS": 1024, "LIST_RESIDENT": 1, "LIST_PIECES": 4, "LIST_UNROLL": 3,
    "LIST_PREFETCH": 2,
}  # fmt: skip
"""Values for lists of more than LIST_AHEAD rows: those are bandwidth, shorter ones all latency."""
_WHOLE_ROWS = {**LONGER_LISTS, "LIST_UNROLL": 9, "LIST_PREFETCH": 1}
"""The same for Hopper GPUs: elsewhere the registers do not suffice."""
_COLUMN_PIECES = 8  # a cache line of each row
# Few blocks that fill the GPU: where a launch has nothing to do, its blocks are what it costs.
_BLOCKS_ON_A_GPU = {"ROWS_THREADS": 512, "ROWS_RESIDENT": 1}
_PAGE_SIZES = [1 << bits for bits in range(17)]
_WARP = 32
_MOST_VOTERS = (1 << 21) - 1  # blocks of `relocate_check`, whose votes are counted in 21 bits


class RelocateCode(enum.IntEnum):
    """Verdict of a kernel that judges, on a list.

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


_FAULTS = {
    RelocateCode.BAD_COUNT: ("count", "must lie in [0, {capacity}], the length of the lists"),
    RelocateCode.BAD_SOURCE: ("src[{row}]", "is no slot of the pools, which have {num_slots}"),
    RelocateCode.BAD_DESTINATION: ("dst[{row}]", "is no slot of the pools, which have {num_slots}"),
    RelocateCode.DUPLICATE_DESTINATION: ("dst[{row}]", "is an earlier row's destination, too"),
}


@dataclass(frozen=True)
class RelocateStatus:
    """What a move found out about its list.

    Attributes
    ----------
    code : RelocateCode
    row : int
        The first row that is illegal together with the rows in front of it; -1 where there is none.
    slot : int
        The slot at fault, the count at ``BAD_COUNT``, else 0.
    overlaps : bool
        Whether a row of a legal list writes a slot that another one reads.
    """

    code: RelocateCode
    row: int
    slot: int
    overlaps: bool = False

    @classmethod
    def from_words(cls, words: Sequence[int]) -> RelocateStatus:
        """Return the meaning of the four int32 that the kernel writes."""
        code, row, low, high = (int(word) for word in words)
        if code == RelocateCode.LEGAL:
            return cls(RelocateCode.LEGAL, row, 0, low != 0)
        return cls(RelocateCode(code), row, (low & 0xFFFFFFFF) | high << 32)

    def raise_for_fault(self, *, num_slots: int, capacity: int, prefix: str = "") -> None:
        """Raise if the list was not legal; errors put `prefix` in front of its tensors' names.

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
            prefix + where.format(**numbers),
            self.slot,
            reason.format(**numbers) + "; nothing was moved",
        )


def relocate_workspace(
    pools: Sequence[Any],
    capacity: int,
    *,
    page_size: int = 1,
    scratch_bytes: int | None = SCRATCH_BYTES,
    list_rows: int = LIST_ROWS,
    values: Mapping[str, int] | None = None,
) -> dict[str, Buffer]:
    """Return the buffers that a `RelocatePlan` needs besides its inputs.

    Parameters
    ----------
    pools, page_size, list_rows, values
        As for `RelocatePlan`.
    capacity : int
        Rows that the lists have room for.
    scratch_bytes : int
        Most scratch of a long list. With less of it a list that overlaps takes more launches; one
        column of all rows is the least. None: no scratch, for long lists that never overlap.

    Returns
    -------
    dict of str to Buffer
        The fields of `RelocateWorkspace` that are needed.

    Raises
    ------
    ArgumentError
        The pools cannot be moved, or the lists have no room.
    """
    layout = _PoolLayout.of(pools, page_size)
    return _workspace(layout, capacity, scratch_bytes, list_rows, dict(values or {}))


def _workspace(
    layout: _PoolLayout,
    capacity: int,
    scratch_bytes: int | None,
    list_rows: int,
    values: dict[str, int],
) -> dict[str, Buffer]:
    capacity = check_int("src", capacity, 1, 2**31 - 1, "rows of a list, a dead tail included")
    shape = _Shape.of(layout, capacity, list_rows, values)
    buffers = {"status": Buffer((4,), "int32")}
    if not shape.by_warp:
        buffers["places"] = Buffer(shape.places.shape, "uint64")
    if shape.one_launch:
        buffers["columns"] = Buffer(shape.columns.shape, "uint64")
        return buffers
    buffers["marks"] = Buffer((4 * -(-layout.num_slots // 32),), "uint32")
    buffers["votes"] = Buffer((1,), "uint64")
    if scratch_bytes is None:
        return buffers
    column = capacity * shape.column_bytes
    rounds = max(1, min(len(shape.places), scratch_bytes // column))
    return {
        **buffers,
        "writers": Buffer((layout.num_slots,), "int32"),
        "readers": Buffer((layout.num_slots,), "int32"),
        "order": Buffer((capacity, 2), "int32"),
        "counts": Buffer((shape.phases + 1,), "int32"),
        "phases": Buffer((shape.phases, capacity, 2), "int32"),
        "staged": Buffer((capacity,), "int32"),
        "scratch": Buffer((rounds * column,), "uint8"),
    }


def pool_slots(pools: Sequence[Any], page_size: int = 1) -> int:
    """Return the slots of each of these pools.

    Raises
    ------
    ArgumentError
        The pools cannot be moved; see `RelocatePlan`.
    """
    return _PoolLayout.of(pools, page_size).num_slots


@dataclass(frozen=True, eq=False)
class RelocateWorkspace:
    """The caller's buffers, sized by `relocate_workspace`, on the pools' device.

    Two plans may share one as long as they run on one stream and have the same pools, page size and
    capacity.

    Attributes
    ----------
    status : tensor of int32, shape (4,)
        Written completely by every launch.
    places : tensor of uint64, shape (P, 4), or None
        The columns of the pools; written when a plan is made, read by every launch. Not for lists
        of up to 32 rows.
    columns : tensor of uint64, shape (C, 4), or None
        Likewise, narrower ones, for lists that take one launch.
    marks : tensor of uint32, shape (4 * ceil(num_slots / 32),), or None
        Where long lists are judged, four bits a slot; 16-byte aligned. Zero before the first launch
        and after every launch.
    votes : tensor of uint64, shape (1,), or None
        Likewise. After a launch that was cut short, zero both: what they hold counts.
    writers, readers : tensor of int32, shape (num_slots,), or None
        Of long lists that overlap: who writes and who reads a slot. Any content.
    order : tensor of int32, shape (capacity, 2), or None
        Which rows cut their chain. Any content.
    counts, phases, staged : tensor of int32, or None
        Shapes (P + 1,), (P, capacity, 2) and (capacity,) for P phases: which rows move in each, and
        which of them are staged. Any content.
    scratch : tensor of uint8, or None
        16-byte aligned. What the cuts of chains would overwrite; nothing before or after a call.
        Without it a long list that overlaps is not moved, and fewer kernels are launched.
    """

    status: Any
    places: Any = None
    columns: Any = None
    marks: Any = None
    votes: Any = None
    writers: Any = None
    readers: Any = None
    order: Any = None
    counts: Any = None
    phases: Any = None
    staged: Any = None
    scratch: Any = None

    @classmethod
    def allocate(
        cls,
        pools: Sequence[Any],
        capacity: int,
        *,
        page_size: int = 1,
        scratch_bytes: int | None = SCRATCH_BYTES,
        list_rows: int = LIST_ROWS,
        values: Mapping[str, int] | None = None,
    ) -> RelocateWorkspace:
        """Return new buffers for these pools, of the library and on the device of the first.

        Parameters
        ----------
        pools, capacity, page_size, scratch_bytes, list_rows, values
            As for `relocate_workspace`.
        """
        layout = _PoolLayout.of(pools, page_size)
        sizes = _workspace(layout, capacity, scratch_bytes, list_rows, dict(values or {}))
        return cls(**{name: buffer.zeros(pools[0]) for name, buffer in sizes.items()})


class RelocatePlan:
    """A relocation whose checks are done and whose address tables are filled; calling it launches.

    Make it before a capture. The list and its length may change in place between calls.

    Parameters
    ----------
    pools : sequence of tensor, each [slots, ...], or [pages, page_size, ...]
        All pools that share the slots: of every layer, keys and values, scales, the draft model's.
        They may differ in row size and dtype. What is behind the slot is a row, and contiguous; its
        bytes, the strides and the address are multiples of 16, or, where a row's bytes are none,
        of 4. Strides of pages and slots may be any. Moved in place. Where heads lie outside of the
        page, each head is a pool: ``pool[:, head]``.
    src, dst : tensor of int64, shape (capacity,), contiguous
        Row i moves slot ``src[i]`` to slot ``dst[i]``. Read only.
    count : tensor of int32, shape (1,)
        Rows of the list; what stands behind them is a dead tail of any content. Read only.
    page_size : int
        Slots of a page, a power of two.
    workspace : RelocateWorkspace, optional
        The caller's buffers; of the plan's own if absent.
    num_ctas : int, optional
        Blocks that judge a long list and move rows. Enough to fill the GPU if absent, and 2 on the
        host lane.
    list_rows : int
        Longest capacity that takes one launch, at most `LIST_ROWS`.
    values : mapping of str to int, optional
        `-D` values of kernels_cu/relocate.cu, such as ``{"UNROLL": 6}``.
    list_prefix, workspace_prefix : str
        What errors put in front of the names of the lists and of the workspace's buffers, where a
        larger op has other names for them.

    Attributes
    ----------
    num_slots, capacity : int
        What was read from the tensors.
    row_bytes : int
        Bytes that one row of the list moves, over all pools.
    launches : tuple of BoundLaunch
        The launches of a call, the one that judges first.

    Raises
    ------
    ArgumentError
        Naming the argument and its value.
    LaunchError
        Inside a capture: filling the address tables copies from the host.

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
        page_size: int = 1,
        workspace: RelocateWorkspace | None = None,
        num_ctas: int | None = None,
        list_rows: int = LIST_ROWS,
        values: Mapping[str, int] | None = None,
        list_prefix: str = "",
        workspace_prefix: str = "workspace.",
    ) -> None:
        layout = _PoolLayout.of(pools, page_size)
        _refuse_capture(layout.first.device)
        lists = [
            tensor_of(list_prefix + name, value)
            for name, value in (("src", src), ("dst", dst), ("count", count))
        ]
        capacity = _length(lists[0])
        if _length(lists[1]) != capacity:
            raise wrong(lists[1], f"{lists[0].name} has {capacity} rows; both have one length")
        given = dict(values or {})
        if workspace is None:
            workspace = RelocateWorkspace.allocate(
                pools, capacity, page_size=page_size, list_rows=list_rows, values=values
            )
        least = None if workspace.scratch is None else 0
        sizes = _workspace(layout, capacity, least, list_rows, given)
        need = f"{layout.num_slots} slots, {len(layout.parts)} pools and lists of {capacity} rows"
        for name in sizes:
            if getattr(workspace, name) is None:
                reason = f"{need} need shape {list(sizes[name].shape)}"
                raise ArgumentError(workspace_prefix + name, None, reason)
        held = {
            name: tensor_of(workspace_prefix + name, getattr(workspace, name)) for name in sizes
        }
        device = device_of([layout.first, *lists, *held.values()])
        for name, buffer in sizes.items():
            tensor = held[name]
            fits = tensor.shape == buffer.shape
            if name == "scratch":
                fits = len(tensor.shape) == 1 and tensor.shape[0] >= buffer.shape[0]
            if not fits:
                raise wrong(tensor, f"{need} need shape {list(buffer.shape)}")
        refuse_overlap(list(held.values()), lists, apart=layout.tensors)
        self._written = [*layout.tensors, *held.values()]
        self._list_prefix, self._workspace_prefix = list_prefix, workspace_prefix

        shape = _Shape.of(layout, capacity, list_rows, given)
        self.pools = tuple(pools)
        self.workspace = workspace
        self.num_slots = layout.num_slots
        self.row_bytes = layout.row_bytes
        self.capacity = capacity
        self._list = (src, dst, count, capacity)
        self._disjoint_only = not shape.one_launch and workspace.scratch is None
        kernels = relocate_kernels(**shape.values)
        if shape.one_launch:
            self.launches: tuple[BoundLaunch, ...] = (
                self._one_launch(kernels, shape, page_size, num_ctas, device),
            )
        else:
            self.launches = tuple(self._long(kernels, shape, page_size, num_ctas, device))
        if shape.one_launch:
            _write(workspace.columns, shape.columns)
        if not shape.by_warp:
            _write(workspace.places, shape.places)

    def _one_launch(
        self,
        kernels: Mapping[str, Kernel],
        shape: _Shape,
        page_size: int,
        num_ctas: int | None,
        device: str | None,
    ) -> BoundLaunch:
        held = self.workspace
        src, dst, count, capacity = self._list
        columns = held.columns, len(shape.columns), shape.column_pieces
        lists = page_size, src, dst, count, capacity, self.num_slots
        pools = list(self.pools)
        if shape.by_warp:
            few = kernels["relocate_few"]
            threads = number_of(few, "FEW_THREADS")
            blocks = -(-len(shape.columns) * _WARP // threads)
            return few.bind(
                grid(num_ctas, device, blocks, blocks), threads, *columns, *lists, held.status,
                reach={"columns": pools},
            )  # fmt: skip
        kernel = kernels["relocate_list"]
        threads, resident = number_of(kernel, "LIST_THREADS"), number_of(kernel, "LIST_RESIDENT")
        useful = len(shape.columns)
        if shape.by_row:
            useful = max(useful, -(-capacity * len(shape.places) * LANES // threads))
        return kernel.bind(
            grid(num_ctas, device, useful, resident), threads,
            *columns, held.places, len(shape.places), *lists, _buckets(capacity), held.status,
            reach={"columns": pools, "places": pools},
        )  # fmt: skip

    def _long(
        self,
        kernels: Mapping[str, Kernel],
        shape: _Shape,
        page_size: int,
        num_ctas: int | None,
        device: str | None,
    ) -> Iterator[BoundLaunch]:
        held, slots = self.workspace, self.num_slots
        src, dst, count, capacity = self._list
        reach = {"places": list(self.pools)}
        places = len(shape.places)
        check, rows = kernels["relocate_check"], kernels["relocate_rows"]
        threads = number_of(check, "CHECK_THREADS")
        voters = min(grid(num_ctas, device, -(-capacity // threads), 1), _MOST_VOTERS)
        yield check.bind(
            voters, threads, src, dst, count, capacity, slots, held.marks, held.votes, held.status,
        )  # fmt: skip
        threads = number_of(rows, "ROWS_THREADS")
        pieces = -(-capacity * places * LANES // threads)
        resident = number_of(rows, "ROWS_RESIDENT")
        by_piece = grid(num_ctas, device, pieces, resident)
        yield rows.bind(
            by_piece, threads,
            held.places, places, page_size, src, dst, count, capacity, held.status, reach=reach,
        )  # fmt: skip
        by_row = grid(num_ctas, device, -(-capacity // threads), resident)
        if self._disjoint_only:
            return
        yield kernels["relocate_index"].bind(
            by_row, threads,
            src, dst, count, capacity, slots, held.status, held.writers, held.readers, held.counts,
        )  # fmt: skip
        yield kernels["relocate_order"].bind(
            by_row, threads, src, dst, count, capacity, slots, held.status, held.writers,
            held.readers, held.order,
        )  # fmt: skip
        yield kernels["relocate_phases"].bind(
            by_row, threads, src, dst, count, capacity, held.status, held.order, held.counts,
            held.phases, held.staged,
        )  # fmt: skip
        scratch_rows = int(held.scratch.shape[0]) // shape.column_bytes
        scratch = held.scratch[: scratch_rows * shape.column_bytes]
        rounds = -(-places // min(places, scratch_rows // capacity))
        for number in range(rounds):
            yield kernels["relocate_stage"].bind(
                by_piece, threads,
                held.places, places, number, page_size, src, count, capacity, held.status,
                held.counts, held.staged, shape.column_bytes, scratch_rows, scratch, reach=reach,
            )  # fmt: skip
            for phase in range(shape.phases):
                yield kernels["relocate_phase"].bind(
                    by_piece, threads,
                    held.places, places, number, phase, page_size, src, dst, count, capacity,
                    held.status, held.counts, held.phases, shape.column_bytes, scratch_rows,
                    scratch, reach=reach,
                )  # fmt: skip

    def __call__(self) -> None:
        """Judge the list and move its rows, on torch's current stream."""
        for launch in self.launches:
            launch()

    def refuse_overlap(self, others: Sequence[Tensor]) -> None:
        """Raise if a call writes what else a larger op, of which it is a part, is given.

        Raises
        ------
        ArgumentError
            Naming both.
        """
        refuse_overlap([], others, apart=self._written)

    def read_status(self) -> RelocateStatus:
        """Return the verdict of the last call. Waits for the device: not for use inside a capture.

        Raises
        ------
        ArgumentError
            If the list was not legal, naming the list, the row and the slot; or if it overlaps, is
            a long one, and there is no scratch.
        """
        status = self.peek_status()
        status.raise_for_fault(
            num_slots=self.num_slots, capacity=self.capacity, prefix=self._list_prefix
        )
        if status.overlaps and self._disjoint_only:
            raise ArgumentError(
                f"{self._workspace_prefix}scratch",
                None,
                "a long list that overlaps needs it; nothing was moved",
            )
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
    page_size: int = 1,
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
        pools,
        src,
        dst,
        count,
        page_size=page_size,
        workspace=workspace,
        num_ctas=num_ctas,
        values=values,
    )
    plan()
    return plan


def launched(arch: str) -> Iterator[Launched]:
    """Yield the `-D` values that this op launches with; see `cuverify.launched`."""
    defaults = relocate_kernels()["relocate_list"].source.known_values()
    known = {name: int(value) for name, value in defaults.items()}
    architecture = capability_of(arch)
    on_a_gpu = [
        _gpu_values(capacity, known, architecture, one_launch=capacity <= LIST_ROWS)
        for capacity in (*range(1, known["LIST_AHEAD"] + 2), LIST_ROWS + 1)
    ]
    sets = [{**more, **values} for values in on_a_gpu for more in ({}, _WIDE_ROWS)]
    yield Launched("relocate", sets=sets)
    # a verdict without a move, which `cuverify check` asks for
    yield Launched("relocate", sets=[{"SWEPT_WORDS": 0}])


def relocate_kernels(**values: int) -> dict[str, Kernel]:
    """Return the kernels of kernels_cu/relocate.cu with these `-D` values, by name."""
    return _kernels(tuple(sorted(values.items())))


@functools.cache
def _kernels(values: tuple[tuple[str, int], ...]) -> dict[str, Kernel]:
    source = KernelSource.from_package("relocate", values=dict(values))
    names = ("few", "list", "check", "rows", "index", "order", "phases", "stage", "phase")
    return {f"relocate_{name}": Kernel(source, f"relocate_{name}") for name in names}


@dataclass(frozen=True)
class _Part:
    """Rows of one pool: where they are and how far apart, in bytes."""

    address: int
    page_stride: int
    row_stride: int
    row_bytes: int

    @property
    def width(self) -> int:
        """Bytes of a piece."""
        return _PIECE if self.row_bytes % _PIECE == 0 else _NARROW


@dataclass(frozen=True)
class _PoolLayout:
    """Where the rows of all pools are."""

    num_slots: int
    parts: tuple[_Part, ...]
    tensors: tuple[Tensor, ...]

    @property
    def first(self) -> Tensor:
        return self.tensors[0]

    @property
    def row_bytes(self) -> int:
        return sum(part.row_bytes for part in self.parts)

    @classmethod
    def of(cls, pools: Sequence[Any], page_size: int) -> _PoolLayout:
        if not isinstance(pools, Sequence) or not len(pools):
            raise ArgumentError("pools", pools, "wants a list with one tensor a layer")
        if page_size not in _PAGE_SIZES:
            raise ArgumentError("page_size", page_size, "wants a power of two, at most 65,536")
        tensors = [tensor_of(f"pools[{at}]", pool) for at, pool in enumerate(pools)]
        device_of(tensors)
        slots = _rows_of(tensors[0], page_size)[0]
        parts = []
        for tensor in tensors:
            num_slots, part = _rows_of(tensor, page_size)
            if num_slots != slots:
                raise wrong(tensor, f"has {num_slots} slots, but pools[0] has {slots}")
            if not tensor.writable:
                raise wrong(tensor, "is read-only; rows are moved in place")
            parts.append(part)
        _refuse_shared_rows(tensors, parts, slots // page_size, page_size)
        return cls(slots, tuple(parts), tuple(tensors))


def _rows_of(pool: Tensor, page_size: int) -> tuple[int, _Part]:
    """Return the slots of a pool and where its rows are, if the kernels can move them."""
    shape, strides = pool.shape, pool.strides
    slot_axis = 0 if page_size == 1 else 1
    if len(shape) < slot_axis + 2 or 0 in shape or (slot_axis and shape[1] != page_size):
        wanted = "[slots, ...]" if page_size == 1 else f"[pages, {page_size}, ...]"
        raise wrong(pool, f"has shape {list(shape)}; wants {wanted}")
    elements = 1
    for extent, stride in zip(shape[:slot_axis:-1], strides[:slot_axis:-1], strict=True):
        if extent > 1 and stride != elements:
            raise wrong(pool, f"elements of a row are {stride} apart; rows must be contiguous")
        elements *= extent
    row_bytes = elements * pool.itemsize
    pages = shape[0]
    row_stride = strides[slot_axis] * pool.itemsize if shape[slot_axis] > 1 else row_bytes
    page_bytes = row_bytes + (page_size - 1) * row_stride
    page_stride = strides[0] * pool.itemsize if pages > 1 else page_bytes
    part = _Part(pool.address, page_stride, row_stride if page_size > 1 else 0, row_bytes)
    width = part.width
    if row_bytes % width:
        raise wrong(pool, f"a row has {row_bytes} bytes, which is no multiple of {width}")
    for what, stride, least in (
        ("slots", row_stride, row_bytes),
        ("slots" if page_size == 1 else "pages", page_stride, page_bytes),
    ):
        if stride % width or stride < least:
            wanted = f"wants a multiple of {width}, at least the row's {least}"
            raise wrong(pool, f"{what} are {stride} bytes apart; {wanted}")
    if pool.address % width:
        off = f"{pool.address % width} bytes off a multiple of {width}"
        raise wrong(pool, f"its address is {off}")
    return pages * page_size, part


def _refuse_shared_rows(
    pools: Sequence[Tensor], parts: Sequence[_Part], pages: int, page_size: int
) -> None:
    """Raise if two pools share a byte; they may be interleaved, as layers of one tensor are."""
    order = sorted(range(len(parts)), key=lambda at: parts[at].address)
    # bytes are counted from the lowest pool: addresses are too large for 64 signed bits at times
    lowest = parts[order[0]].address
    at = np.array([parts[n].address - lowest for n in order], np.int64)
    row = np.array([parts[n].row_bytes for n in order], np.int64)
    strides = np.array([(parts[n].page_stride, parts[n].row_stride) for n in order], np.int64)
    reach = (pages - 1) * strides[:, 0] + (page_size - 1) * strides[:, 1] + row
    meet = np.triu(at[None, :] < (at + reach)[:, None], 1)
    alike = (strides[:, None] == strides[None, :]).all(axis=2)
    shares = meet & ~alike
    delta = at[None, :] - at[:, None]
    for slots in range(1 - page_size, page_size):
        rest = delta - slots * strides[:, None, 1]
        page, into = np.divmod(rest, strides[:, None, 0])
        shares |= meet & (abs(page) < pages) & (into < row[:, None])
        behind = strides[:, None, 0] - into
        shares |= meet & (abs(page + 1) < pages) & (behind < row[None, :])
    if shares.any():
        low, high = (order[int(n)] for n in np.argwhere(shares)[0])
        raise wrong(pools[high], f"shares memory with {pools[low].name}")


@dataclass(frozen=True)
class _Shape:
    """How lists of one capacity are moved: the way, the tables and the kernels' values."""

    one_launch: bool
    by_warp: bool
    by_row: bool
    places: NDArray[np.uint64]
    columns: NDArray[np.uint64]
    column_pieces: int
    column_bytes: int
    phases: int
    values: dict[str, int]

    @classmethod
    def of(
        cls, layout: _PoolLayout, capacity: int, list_rows: int, values: dict[str, int]
    ) -> _Shape:
        list_rows = check_int("list_rows", list_rows, 0, LIST_ROWS, "rows")
        defaults = relocate_kernels()["relocate_list"].source.known_values()
        known = {name: int(value) for name, value in defaults.items()} | values
        one_launch = capacity <= list_rows
        by_row = one_launch and capacity > known["LIST_AHEAD"]
        by_warp = one_launch and capacity <= known["FEW_ROWS"]
        if layout.first.device not in (None, "cpu"):
            # The host lane runs the general text; on a GPU each instruction is fetched, too.
            if all(part.width == _PIECE for part in layout.parts):
                values = {**_WIDE_ROWS, **values}
            architecture = capability(layout.first.device)
            given = _gpu_values(capacity, known, architecture, one_launch=one_launch)
            values = {**given, **values}
        elif by_row:
            values = {**LONGER_LISTS, **values}
        known.update(values)
        held = (
            _WARP * known["FEW_PIECES"] if by_warp else known["LIST_THREADS"] * known["LIST_PIECES"]
        )
        room = held // capacity
        column_pieces = min(_COLUMN_PIECES, 1 << max(room, 1).bit_length() - 1)
        if one_launch and not room:
            raise ArgumentError(
                "values", values, f"{held} pieces are held at once, of lists of {capacity} rows"
            )
        unroll = known["LIST_UNROLL" if one_launch else "UNROLL"]
        places = _table(layout.parts, unroll * LANES, even=True)
        columns = _table(layout.parts, column_pieces, even=False)
        if one_launch and not by_warp:
            device, resident = layout.first.device, known["LIST_RESIDENT"]
            columns = _balanced(columns, grid(None, device, len(columns), resident))
        bytes_of = (places[:, 3] & np.uint64(0xFFFFFFFF)) * (places[:, 3] >> np.uint64(32))
        column_bytes = -(-int(bytes_of.max()) // _PIECE) * _PIECE
        return cls(
            one_launch, by_warp, by_row, places, columns, column_pieces, column_bytes,
            known["PHASES"], values,
        )  # fmt: skip


def _gpu_values(
    capacity: int,
    known: Mapping[str, int],
    architecture: tuple[int, int] | None,
    *,
    one_launch: bool,
) -> dict[str, int]:
    """Return the `-D` values for lists of a capacity on a GPU; `known` are those of the text."""
    if not one_launch:
        return _BLOCKS_ON_A_GPU
    if capacity > known["LIST_AHEAD"]:
        return _WHOLE_ROWS if architecture == (9, 0) else LONGER_LISTS
    by_warp = capacity <= known["FEW_ROWS"]
    name, threads = ("FEW_PIECES", _WARP) if by_warp else ("LIST_PIECES", known["LIST_THREADS"])
    pieces = -(-capacity * _COLUMN_PIECES // threads)
    return {name: 1 << (pieces - 1).bit_length()}


def _table(parts: Sequence[_Part], most: int, *, even: bool) -> NDArray[np.uint64]:
    """Return the columns of all pools, of at most `most` pieces, or of as many as `even` allows."""
    lines = []
    for part in parts:
        pieces = part.row_bytes // part.width
        size = -(-pieces // -(-pieces // most)) if even else most
        for first in range(0, pieces, size):
            number = min(size, pieces - first)
            start = part.address + first * part.width
            lines.append((start, part.page_stride, part.row_stride, number | part.width << 32))
    return np.array(lines, np.uint64)


def _balanced(columns: NDArray[np.uint64], blocks: int) -> NDArray[np.uint64]:
    """Split the columns of the last turn, if it leaves more than half of the blocks without one."""
    last = len(columns) % blocks
    splits = blocks // last if last else 1
    if splits == 1 or len(columns) < blocks:
        return columns
    lines = []
    for start, page_stride, row_stride, size in columns[len(columns) - last :].tolist():
        pieces, width = size & 0xFFFFFFFF, size >> 32
        each = -(-pieces // splits)
        for first in range(0, pieces, each):
            number = min(each, pieces - first)
            lines.append((start + first * width, page_stride, row_stride, number | width << 32))
    return np.concatenate([columns[: len(columns) - last], np.array(lines, np.uint64)])


def _buckets(capacity: int) -> int:
    """Return the size of the hash table: a power of two, at least four times the rows.

    A block waits for its longest search. Of 1,024 rows it takes 5 to 7 places then, and 14 to 20
    in a table of half the size.
    """
    return max(4, 1 << (4 * capacity - 1).bit_length())


def _length(tensor: Tensor) -> int:
    if len(tensor.shape) != 1:
        raise wrong(tensor, f"has {len(tensor.shape)} dimensions, wants one")
    return tensor.shape[0]


def _refuse_capture(device: str | None) -> None:
    if device is None or device == "cpu":
        return
    import torch

    if torch.cuda.is_current_stream_capturing():
        raise LaunchError(
            "a RelocatePlan copies addresses from the host, which a graph would not repeat: "
            "make it outside torch.cuda.graph and call it inside"
        )


def _write(table: Any, words: NDArray[np.uint64]) -> None:
    """Write 64-bit words into a table, wherever it is."""
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(table, torch.Tensor):
        table.copy_(torch.from_numpy(words.view(np.int64)).view(table.dtype))
    elif isinstance(table, np.ndarray):
        table[:] = words.view(table.dtype)
    else:
        table.set(words.view(table.dtype))
