"""A second opinion: one launch in a program of its own, under the compiler's sanitizers.

The access checker of the host lane is our own. Here the same kernel text and the same runtime are
built with ``-fsanitize=address,undefined`` into a program that runs one launch in a child process.
Every argument lies in a heap block of exactly its size. What the address sanitizer (ASan) and the
undefined-behaviour sanitizer (UBSan) say becomes the same kind of report. They know nothing of
races, uninitialised bytes or pending copies, but they see what our checker cannot: stray accesses
to a thread's own arrays, shifts too far, overflows of signed numbers.
"""

from __future__ import annotations

import ctypes
import functools
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from cuverify.arguments import Tensor
from cuverify.cache import cache_directory
from cuverify.errors import ArgumentError, ToolchainError
from cuverify.geometry import Dim3
from cuverify.host import faults
from cuverify.host.build import build_program
from cuverify.host.lines import is_shim, line_table
from cuverify.host.options import MMA_MODELS, SCHEDULES, HostOptions, current_options
from cuverify.host.regions import Region, regions_of
from cuverify.host.reports import Actor, HostReport
from cuverify.host.toolchain import SANITIZERS, Compiler, find_compiler
from cuverify.launches import Launch

_ALIGNMENT = 256  # arguments keep the remainder of their address by it
_GRACE_S = 20.0  # beyond the time limit, for starting and for reading and writing files
_DEPTH = 16
_OPTIONS = {
    "ASAN_OPTIONS": "detect_leaks=0:detect_stack_use_after_return=0:symbolize=0:halt_on_error=1:"
    "detect_odr_violation=0:allocator_may_return_null=1:abort_on_error=0:exitcode=1",
    "UBSAN_OPTIONS": "halt_on_error=0:print_stacktrace=0:symbolize=0",
}
_PLANTS = """\
#include <cstdlib>
int main(int count, char** words) {
    if (atoi(words[1])) return 1 << (count + 40) ? 0 : 1;
    char* few = static_cast<char*>(malloc(5));
    few[count + 3] = 1;
    return few[0];
}
"""


class _Header(ctypes.Structure):
    _fields_ = [
        ("kernel", ctypes.c_char * 128),
        ("config", faults.LaunchConfig),
        ("schedule", ctypes.c_uint32),
        ("mma_model", ctypes.c_uint32),
        ("seconds", ctypes.c_uint32),
        ("seed", ctypes.c_uint64),
        ("blocks", ctypes.c_uint32),
        ("cells", ctypes.c_uint32),
        ("moves", ctypes.c_uint32),
    ]


class _Block(ctypes.Structure):
    _fields_ = [
        ("bytes", ctypes.c_uint64),
        ("misalignment", ctypes.c_uint64),
        ("period", ctypes.c_uint64),
        ("used", ctypes.c_uint64),
        ("writable", ctypes.c_uint32),
        ("name", ctypes.c_char * 64),
    ]


class _Cell(ctypes.Structure):
    _fields_ = [("block1", ctypes.c_uint32), ("value", ctypes.c_uint64)]


class _Move(ctypes.Structure):
    _fields_ = [
        ("block", ctypes.c_uint32),
        ("target", ctypes.c_uint32),
        ("at", ctypes.c_uint64),
        ("offset", ctypes.c_uint64),
    ]


class _Framed(ctypes.Structure):
    _fields_ = [("fault", faults.FaultView), ("pcs", ctypes.c_uint64 * _DEPTH)]


@dataclass(frozen=True)
class Ending:
    """What one launch in a program of its own came to.

    Attributes
    ----------
    reports : tuple of HostReport
        What the sanitizers and the barrier checker found.
    completed : bool
        Whether the launch ran to its end, so that the arguments hold its results.
    """

    reports: tuple[HostReport, ...]
    completed: bool


def why_not(compiler: str | None = None) -> str | None:
    """Return why a compiler's sanitizers are of no use here, None where they work.

    Parameters
    ----------
    compiler : str, optional
        As `toolchain.find_compiler` takes it; that of the options in force where it is not given.

    Notes
    -----
    They are tried once a process with a planted overflow and a planted shift.
    """
    return _why_not(find_compiler(compiler or current_options().compiler))


@functools.cache
def _why_not(compiler: Compiler) -> str | None:
    if compiler.name == "zig":  # to find that out takes it minutes where its own cache is cold
        return "zig ships no sanitizer runtime"
    with tempfile.TemporaryDirectory(prefix="build-", dir=cache_directory()) as scratch:
        text, program = Path(scratch) / "plants.cpp", Path(scratch) / "plants"
        text.write_text(_PLANTS)
        command = [*compiler.command, *SANITIZERS, "-O1", "-w", str(text), "-o", str(program)]
        try:
            built = _call(command, scratch, 120)
        except subprocess.TimeoutExpired:
            return f"{compiler.name} does not finish linking its sanitizers here"
        if built.returncode:
            last = (built.stderr.strip().splitlines() or ["no message"])[-1]
            return f"{compiler.name} cannot link its sanitizers here: {last}"
        for number, sign in ((0, "AddressSanitizer"), (1, "runtime error")):
            try:
                ran = _call([str(program), str(number)], scratch, 60)
            except subprocess.TimeoutExpired:
                return f"{compiler.name}'s sanitizers do not come to an end here"
            if sign not in ran.stderr:
                return f"{compiler.name} ships no sanitizer runtime that works here"
    return None


def run(bound: object, *, time_limit_s: float = 60.0) -> tuple[HostReport, ...]:
    """Run a bound launch on the CPU in a program of its own, under ASan and UBSan.

    Parameters
    ----------
    bound : BoundLaunch or Launch
        What `Kernel.bind` returned, on CPU tensors.
    time_limit_s : float
        Seconds after which a launch that has not ended is reported as ``time-limit``.

    Returns
    -------
    tuple of HostReport
        Empty where nothing was found; then the tensors hold the launch's results. They hold what
        they held before where the launch did not come to its end.

    Raises
    ------
    ToolchainError
        The compiler's sanitizers do not work here; `why_not` says it without raising.
    CompileError, CacheError
        As for any build of the host lane.

    Examples
    --------
    >>> bound = kernel.bind(1, 64, out, x)     # doctest: +SKIP
    >>> cuverify.host.standalone.run(bound)    # doctest: +SKIP
    ()
    """
    launch = getattr(bound, "launch", bound)
    if not isinstance(launch, Launch) or launch.device != "cpu":
        raise ArgumentError("bound", bound, "wants a launch that was bound on CPU tensors")
    return run_launch(launch, current_options(), time_limit_s).reports


def run_launch(launch: Launch, options: HostOptions, time_limit_s: float) -> Ending:
    """Run a launch on the CPU in a program of its own; see `run`."""
    compiler = find_compiler(options.compiler)
    if reason := _why_not(compiler):
        raise ToolchainError(f"{reason}; install g++ or clang++ with its sanitizer libraries")
    program = build_program(launch.source, compiler)
    memory = _Memory(launch)
    with tempfile.TemporaryDirectory(prefix="cuverify-launch-") as scratch:
        request, answer = Path(scratch) / "launch", Path(scratch) / "result"
        with request.open("wb") as file:
            file.writelines(memory.request(launch, options, time_limit_s))
        try:
            ran = _call([str(program), str(request), str(answer)], scratch, time_limit_s + _GRACE_S)
        except subprocess.TimeoutExpired:
            return _crash("time-limit", f"the program was ended after {time_limit_s:g} s")
        if not answer.exists():
            last = (ran.stderr.strip().splitlines() or ["no message"])[-1]
            return _crash("crash", f"the program ended with status {ran.returncode}: {last}")
        return memory.take(answer.read_bytes(), program, launch)


def _call(
    command: Sequence[str], folder: str, timeout_s: float
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        command,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        check=False,
        env={**os.environ, **_OPTIONS},
        cwd=folder,
        timeout=timeout_s,
    )


def _crash(kind: str, message: str) -> Ending:
    return Ending((HostReport(kind, message, Actor("?", 0, (0, 0, 0), (0, 0, 0))),), False)


class _Memory:
    """A launch's memory on its way to the program and back."""

    def __init__(self, launch: Launch) -> None:
        self.regions = regions_of(launch)
        self.moves = list(self._moves(launch))

    def _find(self, address: int) -> tuple[int, int] | None:
        """Return the number of the region that holds an address, and the offset in it."""
        for number, region in enumerate(self.regions):
            if region.base <= address < region.end:
                return number, address - region.base
        return None

    def _moves(self, launch: Launch) -> Iterator[_Move]:
        """Yield the addresses that pointer tables hold: the program has its memory elsewhere."""
        for name in launch.contract.reach:
            table = launch.arguments[name]
            if not isinstance(table, Tensor) or not table.span_bytes or table.itemsize != 8:
                continue
            found = self._find(table.address)
            assert found is not None
            number, start = found
            words = _bytes(table.address, table.span_bytes).view(np.uint64)
            for index, word in enumerate(words):
                if target := self._find(int(word)):
                    yield _Move(number, target[0], start + 8 * index, target[1])

    def request(
        self, launch: Launch, options: HostOptions, time_limit_s: float
    ) -> Iterator[bytes | memoryview]:
        cells = []
        for argument in launch.arguments.values():
            if isinstance(argument, Tensor):
                found = self._find(argument.address)
                cells.append(_Cell(found[0] + 1, found[1]) if found else _Cell(0, argument.address))
            else:
                raw = b"" if argument is None else argument.tobytes()
                cells.append(_Cell(0, int.from_bytes(raw, "little")))
        yield bytes(
            _Header(
                launch.contract.kernel.encode(),
                faults.config(launch.grid, launch.block, launch.shared),
                SCHEDULES.index(options.schedule),
                MMA_MODELS[options.mma],
                max(1, round(time_limit_s)),
                options.seed,
                len(self.regions),
                len(cells),
                len(self.moves),
            )
        )
        for region in self.regions:
            yield bytes(
                _Block(
                    region.bytes,
                    region.base % _ALIGNMENT,
                    region.period,
                    region.used,
                    region.writable,
                    region.name.encode()[:63],
                )
            )
        yield from map(bytes, cells)
        yield from map(bytes, self.moves)
        for region in self.regions:
            yield _bytes(region.base, region.bytes).data

    def take(self, content: bytes, program: Path, launch: Launch) -> Ending:
        """Read what the program left; copy results into the caller's tensors if it ended well."""
        completed, count = np.frombuffer(content, np.uint32, 2)
        at = 8
        reports = []
        for _ in range(int(count)):
            reports.append(
                _report(_Framed.from_buffer_copy(content, at), program, launch.grid, launch.block)
            )
            at += ctypes.sizeof(_Framed)
        if completed:
            for number, region in enumerate(self.regions):
                if region.writable:
                    self._copy_back(number, region, content, at)
                    at += region.bytes
        return Ending(tuple(reports), bool(completed))

    def _copy_back(self, number: int, region: Region, content: bytes, at: int) -> None:
        new = np.frombuffer(content, np.uint8, region.bytes, at).copy()
        memory = _bytes(region.base, region.bytes)
        for move in self.moves:  # addresses of the program's memory mean nothing here
            if move.block == number:
                new[move.at : move.at + 8] = memory[move.at : move.at + 8]
        memory[:] = new


def _bytes(address: int, size: int) -> NDArray[np.uint8]:
    return np.ctypeslib.as_array((ctypes.c_uint8 * size).from_address(address))


def _report(framed: _Framed, program: Path, grid: Dim3, block: Dim3) -> HostReport:
    raw = framed.fault
    views: Sequence[faults.PlaceView] = (raw.actor, raw.other)[: 1 + bool(raw.has_other)]
    actors = [faults.actor(view, faults.place(view, program), grid, block) for view in views]
    if not _is_kernels(actors[0].file):
        # a frame further out is the kernel's
        table = line_table(program)
        for pc in framed.pcs:
            file, line = table.find(pc) if pc else ("?", 0)
            if _is_kernels(file):
                actors[0] = faults.actor(raw.actor, (file, line), grid, block)
                break
    return faults.report(raw, actors[0], actors[1] if raw.has_other else None)


def _is_kernels(file: str) -> bool:
    """Return whether a file is the kernel's text or one of its headers."""
    folders = Path(file).parent.parts[-2:]
    return file != "?" and not is_shim(file) and folders not in _OURS


_OURS = (("host", "runtime"), ("host", "program"))
