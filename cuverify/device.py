"""The GPU lane: kernels compiled and loaded by CuPy, launched on torch's current stream.

Nothing between `prepare` and the driver's launch allocates, synchronises or reads a tensor, so a
prepared launch can be captured in a CUDA graph.
"""

from __future__ import annotations

import contextlib
import contextvars
import ctypes
import functools
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cuverify import launches
from cuverify.arguments import packed
from cuverify.contract import Contract
from cuverify.errors import (
    CompileError,
    ContractError,
    DeviceError,
    LaunchError,
    SourceError,
    ToolchainError,
)
from cuverify.geometry import STATIC_SHARED_BYTES, check_shared
from cuverify.launches import Launch, Prepared
from cuverify.sources import KernelSource

_prebuilt: contextvars.ContextVar[Path | None] = contextvars.ContextVar("prebuilt", default=None)


def _cubin_directory() -> Path | None:
    chosen = os.environ.get("CUVERIFY_CUBINS")
    return _prebuilt.get() or (Path(chosen) if chosen else None)


@contextlib.contextmanager
def prebuilt(directory: str | Path) -> Iterator[Path]:
    """Load kernels from cubins that `write_cubin` wrote, wherever they were compiled.

    While the context is open, kernels come from `directory` and nowhere else. `CUVERIFY_CUBINS` of
    the environment does the same for a whole process and its children.

    Parameters
    ----------
    directory : path
        Holds ``<digest>.<arch>.cubin`` files.
    """
    token = _prebuilt.set(Path(directory))
    try:
        yield Path(directory)
    finally:
        _prebuilt.reset(token)


def write_cubin(source: KernelSource, arch: str, directory: str | Path) -> Path:
    """Compile a kernel text and write it where `prebuilt` finds it; returns the file.

    Raises
    ------
    CompileError, ToolchainError
        As `compile_cubin`.
    """
    from cuverify.compile import compile_cubin

    file = Path(directory) / f"{source.digest()}.{arch}.cubin"
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_bytes(compile_cubin(source, arch).image)
    return file


class DeviceLane:
    """One GPU as a lane; see `launches.Lane`.

    Parameters
    ----------
    index : int
        Of the CUDA device.

    Raises
    ------
    ToolchainError
        If CuPy is missing.
    DeviceError
        If there is no such device.
    """

    def __init__(self, index: int) -> None:
        try:
            import cupy
        except ImportError as error:
            raise ToolchainError(
                f"launching on a GPU needs CuPy ({error}); "
                "pip install 'cuverify[cuda12]' or 'cuverify[cuda13]'"
            ) from None
        import torch

        if not torch.cuda.is_available() or index >= torch.cuda.device_count():
            raise DeviceError(f"cuda:{index}: there is no such CUDA device")
        self.index = index
        self._cupy = cupy
        self._functions: dict[tuple[str, str, Path | None], Any] = {}
        with torch.cuda.device(index):
            torch.cuda.current_stream(index)  # makes the context that CuPy will share
            attributes = cupy.cuda.Device(index).attributes
        self.max_shared_bytes = int(attributes["MaxSharedMemoryPerBlockOptin"])
        self.name = torch.cuda.get_device_name(index)
        major, minor = torch.cuda.get_device_capability(index)
        # A variant for one architecture only (90a) comes before the general one.
        self.architectures = (f"sm_{major}{minor}a", f"sm_{major}{minor}")
        self._starts_early = major >= 9 and hasattr(_driver(), "cuLaunchKernelEx")

    def prepare(self, launch: Launch) -> Prepared:
        """Load the kernel, check it against the contract and this device, and fix its arguments."""
        import torch

        only = launch.contract.architectures
        if only and not set(only) & set(self.architectures):
            raise LaunchError(
                f"{launch.contract.kernel} of {launch.source.name} is for {', '.join(only)} only; "
                f"{self.name} is {self.architectures[-1]}"
            )
        with torch.cuda.device(self.index):
            function = self._function(launch.source, launch.contract)
            self._check_limits(launch, function)
        if launch.contract.early and self._starts_early:
            return _EarlyLaunch(self, launch, function)
        return _DeviceLaunch(self, launch, function)

    def _function(self, source: KernelSource, contract: Contract) -> Any:
        # The digest covers the headers as they are now: an edited one is a new kernel.
        key = (source.digest(), contract.kernel, _cubin_directory())
        if key not in self._functions:
            function = self._load(source, key[0], contract)
            _check_signature(contract, function.kernel.ptr)
            self._functions[key] = function
        return self._functions[key]

    def _load(self, source: KernelSource, digest: str, contract: Contract) -> Any:
        from cuverify.compile import compile_cubin, nvrtc_options
        from cuverify.diagnostics import parse_nvrtc, with_excerpts

        name = contract.kernel
        directory = _cubin_directory()
        if directory is not None:
            files = [directory / f"{digest}.{arch}.cubin" for arch in self.architectures]
            for file in files:
                if file.exists():
                    return self._cupy.RawModule(path=str(file)).get_function(name)
            raise SourceError(
                f"{source.name}: {directory} holds no cubin of this text for "
                f"{' or '.join(self.architectures)}"
            )
        if contract.architectures:
            # CuPy compiles for the general architecture of a device only.
            arch = next(arch for arch in self.architectures if arch in contract.architectures)
            with tempfile.TemporaryDirectory() as folder:
                file = Path(folder) / f"{digest}.cubin"
                file.write_bytes(compile_cubin(source, arch).image)
                function = self._cupy.RawModule(path=str(file)).get_function(name)
                _ = function.kernel  # loads it, while the file is there
            return function
        # CuPy's cache does not look into headers; the text that it sees begins with their digest.
        text = source.translation_unit()
        module = self._cupy.RawModule(code=text, options=nvrtc_options(source), backend="nvrtc")
        try:
            return module.get_function(name)
        except self._cupy.cuda.compiler.CompileException as error:
            log = str(error)
            raise CompileError(
                f"{source.name}: kernel `{name}` does not compile for {self.name}",
                with_excerpts(parse_nvrtc(log), source.source_line),
                log,
            ) from None

    def _check_limits(self, launch: Launch, function: Any) -> None:
        kernel = launch.contract.kernel
        threads = launch.block[0] * launch.block[1] * launch.block[2]
        if threads > function.max_threads_per_block:
            raise LaunchError(
                f"block={launch.block}: {threads} threads, but {kernel} was compiled for at most "
                f"{function.max_threads_per_block} (registers or __launch_bounds__)"
            )
        static = int(function.shared_size_bytes)
        check_shared(
            kernel, f"cuda:{self.index} ({self.name})", static, launch.shared, self.max_shared_bytes
        )
        # Only ever raised: launches bound earlier with more keep what they were given.
        if launch.shared > max(
            function.max_dynamic_shared_size_bytes, STATIC_SHARED_BYTES - static
        ):
            function.max_dynamic_shared_size_bytes = launch.shared


class _DeviceLaunch:
    """A launch whose arguments lie ready in the form that the driver reads."""

    __slots__ = (
        "_addresses",
        "_cells",
        "_fixed",
        "_function",
        "_index",
        "_launch",
        "_launch_kernel",
        "_parameters",
        "_torch",
    )

    def __init__(self, lane: DeviceLane, launch: Launch, function: Any) -> None:
        import torch

        self._torch = torch.cuda
        self._index = lane.index
        self._launch = launch
        self._function = function  # keeps the module loaded
        self._cells, self._addresses = packed(launch.arguments.values())
        self._parameters = self._addresses.ctypes.data
        self._fixed = (function.kernel.ptr, *launch.grid, *launch.block, launch.shared)
        self._launch_kernel = lane._cupy.cuda.driver.launchKernel

    def __call__(self) -> None:
        cuda = self._torch
        if cuda.current_device() != self._index:
            with cuda.device(self._index):
                self()
            return
        stream = cuda.current_stream(self._index).cuda_stream
        if launches.recording():
            launches.note(self._launch, "device", stream)
        self._launch_kernel(*self._fixed, stream, self._parameters, 0)


class _LaunchAttribute(ctypes.Structure):
    """CUlaunchAttribute of the driver: 4 bytes of kind, a gap, a value of 64 bytes."""

    _fields_ = [
        ("kind", ctypes.c_int),
        ("_gap", ctypes.c_char * 4),
        ("value", ctypes.c_uint * 16),
    ]


class _LaunchConfig(ctypes.Structure):
    """CUlaunchConfig of the driver."""

    _fields_ = [
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared", ctypes.c_uint),
        ("stream", ctypes.c_void_p),
        ("attributes", ctypes.POINTER(_LaunchAttribute)),
        ("count", ctypes.c_uint),
    ]


_PROGRAMMATIC_STREAM_SERIALIZATION = 6  # CUlaunchAttributeID


class _EarlyLaunch(_DeviceLaunch):
    """A launch that may start before the kernel in front of it has ended."""

    __slots__ = ("_attribute", "_config", "_launch_ex")

    def __init__(self, lane: DeviceLane, launch: Launch, function: Any) -> None:
        super().__init__(lane, launch, function)
        self._attribute = _LaunchAttribute(kind=_PROGRAMMATIC_STREAM_SERIALIZATION)
        self._attribute.value[0] = 1
        self._config = _LaunchConfig(
            grid=launch.grid,
            block=launch.block,
            shared=launch.shared,
            attributes=ctypes.pointer(self._attribute),
            count=1,
        )
        self._launch_ex = _driver().cuLaunchKernelEx
        self._launch_kernel = self._start

    def _start(self, *fixed_and_stream: int) -> None:
        self._config.stream = fixed_and_stream[-3]
        status = self._launch_ex(
            ctypes.byref(self._config),
            ctypes.c_void_p(self._fixed[0]),
            ctypes.c_void_p(self._parameters),
            None,
        )
        if status != 0:
            raise LaunchError(
                f"{self._launch.contract.kernel}: cuLaunchKernelEx failed with CUresult {status}"
            )


@functools.cache
def _driver() -> ctypes.CDLL:
    return ctypes.CDLL("libcuda.so.1")


def _check_signature(contract: Contract, function: int) -> None:
    """Compare the contract with what the driver says of the compiled kernel's parameters.

    Raises
    ------
    ContractError
        If their number or a width differs.
    """
    driver = _driver()
    if not hasattr(driver, "cuFuncGetParamInfo"):
        return  # drivers before 12.4; the host lane checks the same against the C++ signature
    offset, size = ctypes.c_size_t(), ctypes.c_size_t()
    sizes: list[int] = []
    while True:
        status = driver.cuFuncGetParamInfo(
            ctypes.c_void_p(function),
            ctypes.c_size_t(len(sizes)),
            ctypes.byref(offset),
            ctypes.byref(size),
        )
        if status != 0:
            break
        sizes.append(size.value)
    if len(sizes) != len(contract.parameters):
        raise ContractError(
            f"{contract.kernel}: the contract declares {len(contract.parameters)} parameters "
            f"({contract.signature()}), the compiled kernel has {len(sizes)}"
        )
    for position, (parameter, found) in enumerate(zip(contract.parameters, sizes, strict=True)):
        if parameter.bytes != found:
            raise ContractError(
                f"{contract.kernel}: parameter {position}, `{parameter.name}`: the contract gives "
                f"it {parameter.bytes} bytes, the compiled kernel {found}"
            )
