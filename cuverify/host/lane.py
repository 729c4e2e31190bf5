"""The host lane: a kernel as a C++ library, run on fibers, under checkers if asked."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path

from cuverify import launches
from cuverify.arguments import packed
from cuverify.compile import max_shared_bytes
from cuverify.contract import Contract, Parameter
from cuverify.errors import CheckerError, ContractError
from cuverify.geometry import Dim3, check_shared
from cuverify.host import faults
from cuverify.host.build import build_library
from cuverify.host.counts import CountView
from cuverify.host.lines import line_table
from cuverify.host.options import MMA_MODELS, SCHEDULES, HostOptions, current_options
from cuverify.host.regions import regions_of
from cuverify.host.reports import HostReport
from cuverify.host.toolchain import Compiler, find_compiler
from cuverify.launches import Launch, Prepared

_LARGEST_ARCH = "sm_90"  # no architecture gives a block more shared memory
_INTERRUPTED = 2
_KIND_NAMES = {
    "i": "signed integer",
    "u": "unsigned integer",
    "b": "bool",
    "f": "float",
    "h": "half",
    "B": "bfloat16",
    "v": "void",
    "p": "pointer",
    "s": "struct",
}


class _ParameterInfo(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_uint),
        ("pointee_size", ctypes.c_uint),
        ("kind", ctypes.c_char),
        ("is_pointer", ctypes.c_bool),
        ("is_const", ctypes.c_bool),
    ]


class _Library:
    """One built text. All libraries share one set of stacks, so launches take turns."""

    lock = threading.Lock()
    stacks: int | None = None

    def __init__(self, path: Path, contract: Contract) -> None:
        self.path = path
        self.api = ctypes.CDLL(str(path))
        self.api.cuverify_configure.argtypes = [
            ctypes.c_int,
            ctypes.c_uint,
            ctypes.c_uint64,
            ctypes.c_uint,
            ctypes.c_uint64,
        ]
        self.api.cuverify_add_region.argtypes = [
            ctypes.c_void_p,
            ctypes.c_void_p,
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_char_p,
        ]
        self.api.cuverify_start_counting.argtypes = [
            ctypes.POINTER(ctypes.c_uint64),
            ctypes.POINTER(ctypes.c_uint32),
            ctypes.c_uint64,
        ]
        self.launch = getattr(self.api, f"cuverify_launch_{contract.kernel}")
        self.launch.argtypes = [ctypes.POINTER(faults.LaunchConfig), ctypes.c_void_p]
        self._check_signature(contract)
        self.api.cuverify_use_stacks.restype = ctypes.c_void_p
        self.api.cuverify_use_stacks.argtypes = [ctypes.c_void_p]
        _Library.stacks = self.api.cuverify_use_stacks(_Library.stacks)
        if _Library.stacks is None:
            raise MemoryError(
                "the host lane cannot reserve 256 MiB of address space for its fibers' stacks"
            )

    def _check_signature(self, contract: Contract) -> None:
        describe = getattr(self.api, f"cuverify_describe_{contract.kernel}")
        count = describe(None)
        if count != len(contract.parameters):
            raise ContractError(
                f"{contract.kernel}: the contract declares {len(contract.parameters)} parameters "
                f"({contract.signature()}), the C++ signature has {count}"
            )
        infos = (_ParameterInfo * max(count, 1))()
        describe(infos)
        for position, (parameter, info) in enumerate(zip(contract.parameters, infos, strict=False)):
            if problem := _disagreement(parameter, info):
                raise ContractError(
                    f"{contract.kernel}: parameter {position}, `{parameter.name}`: {problem}"
                )

    def faults(self, grid: Dim3, block: Dim3) -> Iterator[HostReport]:
        for index in range(self.api.cuverify_fault_count()):
            raw = faults.FaultView()
            self.api.cuverify_fault(index, ctypes.byref(raw))
            actors = [
                faults.actor(view, faults.place(view, self.path), grid, block)
                for view in (raw.actor, raw.other)[: 1 + bool(raw.has_other)]
            ]
            yield faults.report(raw, actors[0], actors[1] if raw.has_other else None)

    def start_counting(self) -> None:
        starts, numbers = line_table(self.path).statements
        self.api.cuverify_start_counting(
            (ctypes.c_uint64 * len(starts))(*starts),
            (ctypes.c_uint32 * len(numbers))(*numbers),
            len(starts),
        )

    def counts(self) -> Iterator[tuple[tuple[str, int], CountView]]:
        for index in range(self.api.cuverify_count_count()):
            raw = CountView()
            self.api.cuverify_count(index, ctypes.byref(raw))
            if raw.requests:
                yield faults.place(raw.place, self.path), raw


def _disagreement(parameter: Parameter, info: _ParameterInfo) -> str | None:
    kind, dtype = info.kind.decode(), parameter.dtype
    if bool(info.is_pointer) == parameter.is_value:
        found = "a pointer" if info.is_pointer else "a value"
        return f"declared `{parameter.access}`, but C++ takes {found}"
    width = info.pointee_size if info.is_pointer else info.size
    if kind != "v" and (width != dtype.bytes or kind not in dtype.kinds):
        return f"declared {dtype.name}, but C++ has a {width}-byte {_KIND_NAMES[kind]}"
    if info.is_pointer and bool(info.is_const) != (parameter.access == "read"):
        found = "const" if info.is_const else "not const"
        return f"declared `{parameter.access}`, but the C++ pointer is {found}"
    return None


_loaded: dict[tuple[Path, str], _Library] = {}


def _load(path: Path, contract: Contract) -> _Library:
    """Return the loaded library; its signature is checked once for each wording of the contract."""
    key = (path, contract.wording)
    if key not in _loaded:
        _loaded[key] = _Library(path, contract)
    return _loaded[key]


class HostLane:
    """The CPU as a lane; see `launches.Lane`."""

    def prepare(self, launch: Launch) -> Prepared:
        """Build the plain library, which also checks the contract against the C++ signature."""
        check_shared(
            launch.contract.kernel,
            f"the largest device ({_LARGEST_ARCH})",
            0,
            launch.shared,
            max_shared_bytes(_LARGEST_ARCH),
        )
        return _HostLaunch(launch)


class _HostLaunch:
    def __init__(self, launch: Launch) -> None:
        self._launch = launch
        self._config = faults.config(launch.grid, launch.block, launch.shared)
        self._cells, self._pointers = packed(launch.arguments.values())
        self._built: dict[tuple[Compiler, bool], _Library] = {}
        self._library(current_options())

    def _library(self, options: HostOptions) -> _Library:
        """Return the library, of the text and headers as they were when it was first asked for."""
        compiler = find_compiler(options.compiler)
        key = compiler, options.checked
        if key not in self._built:
            path = build_library(self._launch.source, compiler, checked=options.checked)
            self._built[key] = _load(path, self._launch.contract)
        return self._built[key]

    def __call__(self) -> None:
        options = current_options()
        if options.sanitized:
            self._in_a_program(options)
        else:
            self._in_this_process(options)

    def _in_this_process(self, options: HostOptions) -> None:
        launch, library = self._launch, self._library(options)
        with library.lock:
            if launches.recording():
                launches.note(launch, "host", 0, self)
            library.api.cuverify_configure(
                options.checked,
                SCHEDULES.index(options.schedule),
                options.seed,
                MMA_MODELS[options.mma],
                options.max_accesses,
            )
            if options.checked:
                self._register(library)
            if options.counts is not None:
                library.start_counting()
            status = library.launch(ctypes.byref(self._config), self._pointers.ctypes.data)
            library.api.cuverify_stop_counting()
            reports = tuple(library.faults(launch.grid, launch.block)) if status else ()
            if options.counts is not None and not status:
                kernel, text = launch.contract.kernel, launch.source
                options.counts.add(kernel, library.counts(), text.source_line)
        if status == _INTERRUPTED:
            raise KeyboardInterrupt
        if reports:
            raise CheckerError(launch.contract.kernel, reports)

    def _in_a_program(self, options: HostOptions) -> None:
        from cuverify.host.standalone import run_launch

        if launches.recording():
            launches.note(self._launch, "host", 0, self)
        ending = run_launch(self._launch, options, options.time_limit_s)
        if ending.reports:
            raise CheckerError(self._launch.contract.kernel, ending.reports)

    def _register(self, library: _Library) -> None:
        library.api.cuverify_forget_regions()
        for region in regions_of(self._launch):
            library.api.cuverify_add_region(
                region.base,
                region.allocation,
                region.bytes,
                region.period,
                region.used,
                region.initialised,
                region.writable,
                region.name.encode()[:63],
            )
