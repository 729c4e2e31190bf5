"""What kernels ask of memory, line by line: sectors, wavefronts, bank conflicts; without a GPU."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Literal

from cuverify.host.faults import PlaceView

if TYPE_CHECKING:
    from cuverify.report import Table

Memory = Literal["global", "shared"]
Operation = Literal["load", "store", "atomic", "async copy", "matrix load"]

OPERATIONS: tuple[Operation, ...] = ("load", "store", "atomic", "async copy", "matrix load")
_COLUMNS = ("place", "access", "requests", "sectors", "ideal", "wavefronts", "conflicts", "text")
_TEXT_WIDTH = 26


class CountView(ctypes.Structure):
    """`cuverify_host::CountView`."""

    _fields_ = [
        ("place", PlaceView),
        ("operation", ctypes.c_uint32),
        ("shared", ctypes.c_uint32),
        ("requests", ctypes.c_uint64),
        ("bytes", ctypes.c_uint64),
        ("sectors", ctypes.c_uint64),
        ("ideal_sectors", ctypes.c_uint64),
        ("wavefronts", ctypes.c_uint64),
        ("ideal_wavefronts", ctypes.c_uint64),
    ]


@dataclass(frozen=True)
class Traffic:
    """What some requests moved, and what it took.

    Attributes
    ----------
    requests : int
        Instructions of a warp in which at least one lane took part.
    bytes : int
        Of all lanes together, as often as each asked.
    sectors : int
        32-byte sectors of global memory that the requests touched, each once a request.
    ideal_sectors : int
        As many as the same bytes would fill if they stood side by side.
    wavefronts : int
        Passes through shared memory: 32 banks of 4 bytes give or take one word each in a pass.
    ideal_wavefronts : int
        The same without conflicts: one for each warp, half warp (8 bytes a lane) or quarter warp
        (16 bytes a lane) with a lane in it.
    """

    requests: int = 0
    bytes: int = 0
    sectors: int = 0
    ideal_sectors: int = 0
    wavefronts: int = 0
    ideal_wavefronts: int = 0

    def __add__(self, other: Traffic) -> Traffic:
        return Traffic(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(Traffic)))

    @property
    def conflicts(self) -> int:
        """Bank conflicts: wavefronts beyond the ideal."""
        return self.wavefronts - self.ideal_wavefronts

    @property
    def excess_sectors(self) -> int:
        """Sectors beyond the ideal."""
        return self.sectors - self.ideal_sectors


@dataclass(frozen=True)
class LineCount:
    """The accesses of one kind that one line of a kernel made.

    Attributes
    ----------
    kernel : str
    file, line : str, int
        As in the kernel's own file.
    memory : {"global", "shared"}
    operation : {"load", "store", "atomic", "async copy", "matrix load"}
        A cp.async counts once in global and once in shared memory.
    traffic : Traffic
    text : str
        The line, without the space around it; empty where it is not known.
    """

    kernel: str
    file: str
    line: int
    memory: Memory
    operation: Operation
    traffic: Traffic
    text: str = ""

    @property
    def waste(self) -> int:
        """Bytes' worth of passes that a better layout would save, to sort by."""
        return 32 * self.traffic.excess_sectors + 128 * self.traffic.conflicts


_Key = tuple[str, str, int, Memory, Operation]  # kernel, file, line, ...


@dataclass(eq=False)
class MemoryCounts:
    """The counts of all launches since a `cuverify.counted` was opened; its text is a table.

    Attributes
    ----------
    launches : int
        Launches that were counted: those that ended without a fault.
    """

    launches: int = 0
    _traffic: dict[_Key, Traffic] = field(default_factory=dict, repr=False)
    _texts: dict[tuple[str, int], str] = field(default_factory=dict, repr=False)

    @property
    def lines(self) -> list[LineCount]:
        """All lines that touched memory, those that waste most first."""
        found = [
            LineCount(*key, traffic, self._texts.get((key[1], key[2]), ""))
            for key, traffic in self._traffic.items()
        ]
        return sorted(found, key=lambda one: (-one.waste, -one.traffic.bytes, one.file, one.line))

    def total(
        self,
        memory: Memory,
        operation: Operation | None = None,
        *,
        kernel: str | None = None,
        line: int | None = None,
    ) -> Traffic:
        """Return the sum over the lines that match.

        Parameters
        ----------
        memory : {"global", "shared"}
        operation : {"load", "store", "atomic", "async copy", "matrix load"}, optional
        kernel : str, optional
        line : int, optional
        """
        chosen = (
            one.traffic
            for one in self.lines
            if one.memory == memory
            and operation in (None, one.operation)
            and kernel in (None, one.kernel)
            and line in (None, one.line)
        )
        return sum(chosen, Traffic())

    def tables(self, most: int | None = None) -> list[Table]:
        """Return a table for each kernel, its most wasteful lines first.

        Parameters
        ----------
        most : int, optional
            Rows of a table at most; all by default.
        """
        from cuverify.report import Table

        lines = self.lines
        return [
            Table(kernel, _COLUMNS, [_row(one) for one in lines if one.kernel == kernel][:most])
            for kernel in dict.fromkeys(one.kernel for one in lines)
        ]

    def __str__(self) -> str:
        from cuverify.report import Report

        return Report(
            f"memory requests of {self.launches} launches", tables=self.tables()
        ).to_text()

    def add(
        self,
        kernel: str,
        counts: Iterable[tuple[tuple[str, int], CountView]],
        source_line: Callable[[str, int], str | None],
    ) -> None:
        """Add a launch: file and line of each place that made accesses, with its counts."""
        self.launches += 1
        for (file, line), view in counts:
            memory: Memory = "shared" if view.shared else "global"
            key = (kernel, file, line, memory, OPERATIONS[view.operation])
            traffic = Traffic(*(getattr(view, f.name) for f in fields(Traffic)))
            self._traffic[key] = self._traffic.get(key, Traffic()) + traffic
            if (file, line) not in self._texts:
                self._texts[file, line] = (source_line(file, line) or "").strip()


def _row(one: LineCount) -> list[str | int | None]:
    traffic, is_global = one.traffic, one.memory == "global"
    return [
        f"{one.file.rpartition('/')[2]}:{one.line}",
        f"{one.memory} {one.operation}",
        traffic.requests,
        traffic.sectors if is_global else None,
        traffic.ideal_sectors if is_global else None,
        None if is_global else traffic.wavefronts,
        None if is_global else traffic.conflicts,
        one.text if len(one.text) <= _TEXT_WIDTH else f"{one.text[: _TEXT_WIDTH - 3]}...",
    ]
