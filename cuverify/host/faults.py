"""Faults as the C++ runtime hands them out, and as reports."""

from __future__ import annotations

import ctypes
from pathlib import Path

from cuverify.geometry import Dim3
from cuverify.host.lines import line_table
from cuverify.host.reports import Actor, HostReport


class LaunchConfig(ctypes.Structure):
    """`cuverify_host::LaunchConfig`."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
    ]


class PlaceView(ctypes.Structure):
    """`cuverify_host::PlaceView`."""

    _fields_ = [
        ("file", ctypes.c_char * 256),
        ("line", ctypes.c_int32),
        ("pc", ctypes.c_uint64),
        ("block", ctypes.c_uint32),
        ("thread", ctypes.c_uint32),
    ]


class FaultView(ctypes.Structure):
    """`cuverify_host::FaultView`."""

    _fields_ = [
        ("kind", ctypes.c_char * 32),
        ("message", ctypes.c_char * 512),
        ("actor", PlaceView),
        ("other", PlaceView),
        ("has_other", ctypes.c_int32),
        ("has_region", ctypes.c_int32),
        ("region_shared", ctypes.c_int32),
        ("region", ctypes.c_char * 64),
        ("region_bytes", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("bytes", ctypes.c_uint32),
    ]


def config(grid: Dim3, block: Dim3, shared: int) -> LaunchConfig:
    """Return a launch's extents as C++ takes them."""
    return LaunchConfig((ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block), shared)


def report(fault: FaultView, actor: Actor, other: Actor | None) -> HostReport:
    """Return a fault as a report, once its actors are known."""
    named = bool(fault.has_region)
    return HostReport(
        kind=fault.kind.decode(),
        message=fault.message.decode(errors="replace"),
        actor=actor,
        argument=fault.region.decode() if named else None,
        is_shared=bool(fault.region_shared),
        byte=fault.offset if named else 0,
        bytes=fault.region_bytes if named else 0,
        width=fault.bytes,
        other=other,
    )


def place(view: PlaceView, library: Path) -> tuple[str, int]:
    """Return file and line: the kernel's own, or those of an address in the library."""
    file = view.file.decode(errors="replace")
    return (file, view.line) if file else line_table(library).find(view.pc)


def actor(view: PlaceView, where: tuple[str, int], grid: Dim3, block: Dim3) -> Actor:
    """Return who it was."""
    return Actor(*where, _unravel(view.block, grid), _unravel(view.thread, block))


def _unravel(index: int, extents: Dim3) -> Dim3:
    x, y, _ = extents
    return index % x, index // x % y, index // (x * y)
