"""The host lane: a kernel as a C++ library, run on fibers, under checkers if asked."""

from __future__ import annotations

import ctypes
import threading
from collections.abc import Iterator
from pathlib import Path

from cuverify import launches
from cuverify.arguments import Tensor, packed
from cuverify.compile import max_shared_bytes
from cuverify.contract import Contract, Parameter
from cuverify.errors import CheckerError, ContractError
from cuverify.geometry import Dim3, check_shared
from cuverify.host.build import build_library
from cuverify.host.lines import line_table
from cuverify.host.options import MMA_MODELS, SCHEDULES, HostOptions, current_options
from cuverify.host.reports import Actor, HostReport
from cuverify.host.toolchain import find_compiler
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


class _LaunchConfig(ctypes.Structure):
    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
    ]


class _ParameterInfo(ctypes.Structure):
    _fields_ = [
        ("size", ctypes.c_uint),
        ("pointee_size", ctypes.c_uint),
        ("kind", ctypes.c_char),
        ("is_pointer", ctypes.c_bool),
        ("is_const", ctypes.c_bool),
    ]


class _Place(ctypes.Structure):
    _fields_ = [
        ("file", ctypes.c_char * 256),
        ("line", ctypes.c_int32),
        ("pc", ctypes.c_uint64),
        ("block", ctypes.c_uint32),
        ("thread", ctypes.c_uint32),
    ]


class _Fault(ctypes.Structure):
    _fields_ = [
        ("kind", ctypes.c_char * 32),
        ("message", ctypes.c_char * 512),
        ("actor", _Place),
        ("other", _Place),
        ("has_other", ctypes.c_int32),
        ("has_region", ctypes.c_int32),
        ("region_shared", ctypes.c_int32),
        ("region", ctypes.c_char * 64),
        ("region_bytes", ctypes.c_uint64),
        ("offset", ctypes.c_int64),
        ("bytes", ctypes.c_uint32),
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
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.c_uint64,
            ctypes.c_int,
            ctypes.c_int,
            ctypes.c_char_p,
        ]
        self.launch = getattr(self.api, f"cuverify_launch_{contract.kernel}")
        self.launch.argtypes = [ctypes.POINTER(_LaunchConfig), ctypes.c_void_p]
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
            raw = _Fault()
            self.api.cuverify_fault(index, ctypes.byref(raw))
            named = bool(raw.has_region)
            yield HostReport(
                kind=raw.kind.decode(),
                message=raw.message.decode(errors="replace"),
                actor=self._actor(raw.actor, grid, block),
                argument=raw.region.decode() if named else None,
                is_shared=bool(raw.region_shared),
                byte=raw.offset if named else 0,
                bytes=raw.region_bytes if named else 0,
                width=raw.bytes,
                other=self._actor(raw.other, grid, block) if raw.has_other else None,
            )

    def _actor(self, place: _Place, grid: Dim3, block: Dim3) -> Actor:
        file, line = place.file.decode(errors="replace"), place.line
        if not file:
            file, line = line_table(self.path).find(place.pc)
        return Actor(file, line, _unravel(place.block, grid), _unravel(place.thread, block))


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


def _unravel(index: int, extents: Dim3) -> Dim3:
    x, y, _ = extents
    return index % x, index // x % y, index // (x * y)


_loaded: dict[tuple[Path, str], _Library] = {}


def _load(path: Path, contract: Contract) -> _Library:
    """Return the loaded library; its signature is checked once for each wording of the contract."""
    key = (path, repr(contract))
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
        self._config = _LaunchConfig(
            (ctypes.c_uint * 3)(*launch.grid), (ctypes.c_uint * 3)(*launch.block), launch.shared
        )
        self._cells, self._pointers = packed(launch.arguments.values())
        self._library(current_options())

    def _library(self, options: HostOptions) -> _Library:
        launch = self._launch
        compiler = find_compiler(options.compiler)
        path = build_library(launch.source, compiler, checked=options.checked)
        return _load(path, launch.contract)

    def __call__(self) -> None:
        launch, options = self._launch, current_options()
        library = self._library(options)
        with library.lock:
            if launches.recording():
                launches.note(launch, "host", 0)
            library.api.cuverify_configure(
                options.checked,
                SCHEDULES.index(options.schedule),
                options.seed,
                MMA_MODELS[options.mma],
                options.max_accesses,
            )
            if options.checked:
                self._register(library)
            status = library.launch(ctypes.byref(self._config), self._pointers.ctypes.data)
            reports = tuple(library.faults(launch.grid, launch.block)) if status else ()
        if status == _INTERRUPTED:
            raise KeyboardInterrupt
        if reports:
            raise CheckerError(launch.contract.kernel, reports)

    def _register(self, library: _Library) -> None:
        library.api.cuverify_forget_regions()
        for region in _regions(self._launch):
            library.api.cuverify_add_region(*region)


def _regions(launch: Launch) -> list[tuple[int, int, int, int, bool, bool, bytes]]:
    """Return (base, bytes, period, used, initialised, writable, name) of each piece of memory.

    Arguments that share memory become one region with both names.
    """
    access = {p.name: p.access for p in launch.contract.parameters}
    access |= {t.name: launch.contract.reach[t.name.split("[")[0]] for t in launch.reach.values()}
    pieces = sorted((t for t in launch.tensors if t.span_bytes), key=lambda t: t.address)
    regions: list[tuple[int, int, int, int, bool, bool, bytes]] = []
    for tensor in pieces:
        kind = access[tensor.name]
        period, used = _rows(tensor)
        entry = (
            tensor.address,
            tensor.span_bytes,
            period,
            used,
            kind in ("read", "update"),
            kind != "read",
            tensor.name.encode()[:63],
        )
        if regions and tensor.address < regions[-1][0] + regions[-1][1]:
            base, size, _, _, initialised, writable, name = regions.pop()
            end = max(base + size, tensor.address + tensor.span_bytes)
            joined = name + b"+" + entry[6]
            entry = (
                base,
                end - base,
                0,
                0,
                initialised or entry[4],
                writable or entry[5],
                joined[:63],
            )
        regions.append(entry)
    return regions


def _rows(tensor: Tensor) -> tuple[int, int]:
    """Return (period, used) in bytes where a tensor is rows with gaps between, else (0, 0)."""
    if tensor.is_contiguous or not tensor.shape:
        return 0, 0
    used = 1
    outer = len(tensor.shape)
    while outer and (tensor.shape[outer - 1] == 1 or tensor.strides[outer - 1] == used):
        used *= tensor.shape[outer - 1]
        outer -= 1
    period = min(
        (s for s, n in zip(tensor.strides[:outer], tensor.shape, strict=False) if n > 1), default=0
    )
    if period <= used or any(s % period for s in tensor.strides[:outer]):
        return 0, 0  # no simple rows: the whole span counts as the tensor's
    return period * tensor.itemsize, used * tensor.itemsize
