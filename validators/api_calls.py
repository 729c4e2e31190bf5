"""Which CUDA calls are of interest, what kind each is, and where its arguments lie.

CUPTI hands over a structure of the arguments, as the public headers declare it. Offsets hold for
64-bit systems. A name stands for all its versions: ``cudaMalloc`` for ``cudaMalloc_v3020``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

_VERSION = re.compile(r"(_v\d+)?(_ptsz|_ptds)?(_v\d+)?$")


@dataclass(frozen=True)
class Call:
    """What is known of a call by its name.

    Parameters
    ----------
    kind : str
        As `CallSeen` has it.
    stream : int, optional
        Offset of the stream. ``through`` says that it lies behind a pointer, at 32.
    address, size, source : int, optional
        Offsets of the memory, its bytes and the source of a copy.
    returned : bool
        `address` is where the call writes the address to.
    through : bool
        The first argument points to a launch configuration.
    """

    kind: str
    stream: int | None = None
    address: int | None = None
    size: int | None = None
    source: int | None = None
    returned: bool = False
    through: bool = False


def _copies(*names: str, stream: int | None = None) -> dict[str, Call]:
    return {name: Call("copy", stream, 0, 16, 8) for name in names}


def _allocations(kind: str, *names: str, stream: int | None = None) -> dict[str, Call]:
    return {name: Call(kind, stream, 0, 8, returned=True) for name in names}


def _plain(kind: str, *names: str, stream: int | None = None) -> dict[str, Call]:
    return {name: Call(kind, stream) for name in names}


CALLS: Mapping[str, Call] = {
    # launches
    "cudaLaunchKernel": Call("launch", 48),
    "cudaLaunchCooperativeKernel": Call("launch", 48),
    "cudaLaunchKernelExC": Call("launch", 32, through=True),
    "cuLaunchKernel": Call("launch", 40),
    "cuLaunchCooperativeKernel": Call("launch", 40),
    "cuLaunchKernelEx": Call("launch", 32, through=True),
    **_plain("graph_launch", "cudaGraphLaunch", "cuGraphLaunch", stream=8),
    # waiting
    **_plain("sync", "cudaStreamSynchronize", "cuStreamSynchronize", stream=0),
    **_plain("sync", "cudaDeviceSynchronize", "cudaThreadSynchronize", "cuCtxSynchronize"),
    **_plain("sync", "cudaEventSynchronize", "cuEventSynchronize"),
    **_plain("query", "cudaEventQuery", "cuEventQuery"),
    **_plain("query", "cudaStreamQuery", "cuStreamQuery", stream=0),
    # device memory
    **_allocations("alloc", "cudaMalloc", "cuMemAlloc", "cudaMallocManaged", "cuMemAllocManaged"),
    **_allocations("alloc", "cudaMallocAsync", "cuMemAllocAsync", stream=16),
    **_allocations("alloc", "cudaMallocFromPoolAsync", "cuMemAllocFromPoolAsync", stream=24),
    "cudaMallocPitch": Call("alloc", None, 0, 16, returned=True),
    "cuMemCreate": Call("alloc", None, None, 8),
    "cudaFree": Call("free", None, 0),
    "cuMemFree": Call("free", None, 0),
    "cudaFreeAsync": Call("free", 8, 0),
    "cuMemFreeAsync": Call("free", 8, 0),
    # host memory
    **_allocations("host_alloc", "cudaMallocHost", "cudaHostAlloc", "cuMemAllocHost"),
    **_allocations("host_alloc", "cuMemHostAlloc"),
    "cudaHostRegister": Call("host_alloc", None, 0, 8),
    "cuMemHostRegister": Call("host_alloc", None, 0, 8),
    "cudaFreeHost": Call("host_free", None, 0),
    "cuMemFreeHost": Call("host_free", None, 0),
    # copies that return when they are done, and those on a stream
    **_copies("cudaMemcpy", "cuMemcpy", "cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemcpyDtoD"),
    **_copies("cudaMemcpyAsync", stream=32),
    **_copies("cuMemcpyAsync", "cuMemcpyHtoDAsync", "cuMemcpyDtoHAsync", stream=24),
    **_copies("cuMemcpyDtoDAsync", stream=24),
    "cudaMemcpy2D": Call("copy", None, 0, None, 16),
    "cudaMemcpy2DAsync": Call("copy", 56, 0, None, 16),
    "cudaMemset": Call("memset", None, 0, 16),
    "cudaMemsetAsync": Call("memset", 24, 0, 16),
    "cuMemsetD8": Call("memset", None, 0, 16),
    "cuMemsetD32": Call("memset", None, 0, 16),
    "cuMemsetD8Async": Call("memset", 24, 0, 16),
    "cuMemsetD32Async": Call("memset", 24, 0, 16),
    # code
    **_plain("load", "cuModuleLoad", "cuModuleLoadData", "cuModuleLoadDataEx"),
    **_plain("load", "cuModuleLoadFatBinary", "cuLibraryLoadData", "cuLibraryLoadFromFile"),
    **_plain("unload", "cuModuleUnload", "cuLibraryUnload"),
    # order
    **_plain("record", "cudaEventRecord", "cuEventRecord", stream=8),
    **_plain("record", "cudaEventRecordWithFlags", "cuEventRecordWithFlags", stream=8),
    **_plain("wait", "cudaStreamWaitEvent", "cuStreamWaitEvent", stream=0),
    **_plain("host_func", "cudaLaunchHostFunc", "cuLaunchHostFunc", stream=0),
    **_plain("host_func", "cudaStreamAddCallback", "cuStreamAddCallback", stream=0),
    # ends
    **_plain("destroy", "cudaGraphExecDestroy", "cuGraphExecDestroy"),
    **_plain("destroy", "cudaGraphDestroy", "cuGraphDestroy"),
    **_plain("device", "cudaSetDevice"),
}

WAITING_COPIES = frozenset(
    {"cudaMemcpy", "cuMemcpy", "cuMemcpyHtoD", "cuMemcpyDtoH", "cuMemcpyDtoD", "cudaMemcpy2D"}
)
"""Copies that return when they are done."""


def base_name(name: str) -> str:
    """Return the name of a call without its versions: ``cuMemAlloc`` for ``cuMemAlloc_v2``."""
    return _VERSION.sub("", name)
