"""Mutants of CV2xx: calls that a capture forbids or does not survive.

Each factory makes the mutant, and with ``faulty=False`` its clean twin.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import threading
from types import SimpleNamespace
from typing import Any

import cupy
import numpy as np
import torch
from cuverify.validators.callable_case import CallableCase
from cuverify.validators.zoo.parts import (
    THREADS,
    N,
    Vectors,
    arguments,
    blocks,
    current_stream,
    drawn,
    launch,
    zeros,
)

BYTES = 4 * N


def refused(*, faulty: bool = True) -> CallableCase:
    """Raise while a capture runs, as an operator does that has no support for graphs."""
    v = Vectors.make()

    def step() -> None:
        if faulty and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("affine has no support for CUDA graphs")  # fault
        v.launch()

    return v.case(step)


def item(*, faulty: bool = True) -> CallableCase:
    """Read a length back to the host with `.item()`."""
    v = Vectors.make()
    length = torch.full((1,), N, device="cuda")

    def step() -> None:
        n = int(length.item()) if faulty else N  # fault
        launch("affine", v.x, v.b, v.y, n)

    return v.case(step)


def nonzero(*, faulty: bool = True) -> CallableCase:
    """Pick rows with a boolean mask: the shape of the result is read back."""
    v = Vectors.make()
    every = torch.ones(N, dtype=torch.bool, device="cuda")

    def step() -> None:
        x = v.x[every] if faulty else torch.where(every, v.x, 0)  # fault
        launch("affine", x, v.b, v.y, N)

    return v.case(step)


def device_synchronize(*, faulty: bool = True) -> CallableCase:
    """Wait for the device after the launch."""
    v = Vectors.make()

    def step() -> None:
        v.launch()
        if faulty:
            torch.cuda.synchronize()  # fault

    return v.case(step)


def cupy_get(*, faulty: bool = True) -> CallableCase:
    """Read a length back through CuPy, which torch's sync debugging does not see."""
    v = Vectors.make()
    length = cupy.full(1, N, np.int32)

    def step() -> None:
        n = N
        if faulty:
            with current_stream():
                n = int(length.get()[0])  # fault
        launch("affine", v.x, v.b, v.y, n)

    return v.case(step)


def raw_synchronize(*, faulty: bool = True) -> CallableCase:
    """Wait for the stream through the runtime itself."""
    v = Vectors.make()

    def step() -> None:
        v.launch()
        if faulty:
            cupy.cuda.runtime.streamSynchronize(torch.cuda.current_stream().cuda_stream)  # fault

    return v.case(step)


def raw_malloc(*, faulty: bool = True) -> CallableCase:
    """Allocate a temporary with cudaMalloc at each call."""
    v = Vectors.make()
    kept = [cupy.cuda.runtime.malloc(BYTES)]

    def step() -> None:
        if faulty:
            kept.append(cupy.cuda.runtime.malloc(BYTES))  # fault
        between = np.uint64(kept[-1])
        launch("affine", v.x, v.b, between, N)
        launch("copy", between, v.y, N)

    return v.case(step)


def cupy_pool_miss(*, faulty: bool = True) -> CallableCase:
    """Allocate a temporary from CuPy's pool, which has no free block of that size."""
    v = Vectors.make()
    kept = [cupy.empty(N, np.float32)]

    def step() -> None:
        with current_stream():
            if faulty:
                kept.append(cupy.empty(N, np.float32))  # fault
        between = np.uint64(kept[-1].data.ptr)
        launch("affine", v.x, v.b, between, N)
        launch("copy", between, v.y, N)

    return v.case(step)


def dlpack_handshake(*, faulty: bool = True) -> CallableCase:
    """Take a tensor through DLPack while the null stream is CuPy's current one."""
    v = Vectors.make()
    x = cupy.asarray(v.x)

    def step() -> None:
        taken = cupy.from_dlpack(v.x) if faulty else x  # fault
        launch("affine", np.uint64(taken.data.ptr), v.b, v.y, N)

    return v.case(step)


def legacy_wait(*, faulty: bool = True) -> CallableCase:
    """Let the legacy default stream wait for the captured one."""
    v = Vectors.make()

    def step() -> None:
        v.launch()
        if faulty:
            torch.cuda.default_stream().wait_stream(torch.cuda.current_stream())  # fault

    return v.case(step)


def gc_collect(*, faulty: bool = True) -> CallableCase:
    """Collect garbage inside the step, with tensors in a cycle."""
    v = Vectors.make()

    def step() -> None:
        cycle: list[Any] = [torch.empty(N, device="cuda")]
        cycle.append(cycle)
        v.launch()
        if faulty:
            del cycle
            gc.collect()  # fault
        else:
            cycle.clear()

    return v.case(step)


def graph_destroyed(*, faulty: bool = True) -> CallableCase:
    """Drop the last reference to another CUDA graph inside the step."""
    v = Vectors.make()
    old = [_small_graph(v) for _ in range(40)]

    def step() -> None:
        v.launch()
        if faulty and old:
            old.pop()  # fault

    return v.case(step)


def _small_graph(v: Vectors) -> torch.cuda.CUDAGraph:
    graph = torch.cuda.CUDAGraph()
    other = zeros(N)
    with torch.cuda.graph(graph):
        launch("copy", v.x, other, N)
    return graph


def event_query(*, faulty: bool = True) -> CallableCase:
    """Ask whether an event that was recorded in the capture has happened."""
    v = Vectors.make()
    event = torch.cuda.Event()

    def step() -> None:
        v.launch()
        event.record()
        if faulty:
            event.query()  # fault

    return v.case(step)


def other_thread(*, faulty: bool = True) -> CallableCase:
    """Let a second thread allocate device memory while the first one captures."""
    v = Vectors.make()
    kept: list[int] = []

    def load() -> None:
        if faulty:
            kept.append(cupy.cuda.runtime.malloc(BYTES))  # fault

    def step() -> None:
        worker = threading.Thread(target=_quietly, args=(load,))
        worker.start()
        worker.join()
        v.launch()

    return v.case(step)


def _quietly(call: Any) -> None:
    # a data loader's thread swallows the refusal; only the capture suffers
    with contextlib.suppress(cupy.cuda.runtime.CUDARuntimeError):
        call()


def pinned_allocation(*, faulty: bool = True) -> CallableCase:
    """Allocate pinned memory for an upload at each call."""
    v = Vectors.make()
    staged = [torch.ones(N).pin_memory()]
    ones = zeros(N)

    def step() -> None:
        if faulty:
            staged.append(torch.empty(N, pin_memory=True).fill_(1))  # fault
        ones.copy_(staged[-1], non_blocking=True)
        launch("affine", v.x, v.b, v.y, N)
        v.y.mul_(ones)

    return v.case(step)


def cold_kernel(*, faulty: bool = True) -> CallableCase:
    """Write a number that changes at each call into the text of a kernel: it always compiles."""
    v = Vectors.make()
    kept = SimpleNamespace(calls=0, kernel=_compiled(0))

    def step() -> None:
        if faulty:
            kept.calls += 1
            kept.kernel = _compiled(kept.calls)
        with current_stream():
            kept.kernel((blocks(),), (THREADS,), arguments(v.x, v.b, v.y, N))  # fault

    return v.case(step)


def _compiled(number: int) -> Any:
    text = (
        'extern "C" __global__ void affine_%d(const float* x, const float* b, float* y, int n) {\n'
        "    const int i = blockIdx.x * blockDim.x + threadIdx.x;\n"
        "    if (i < n) y[i] = 2.0f * x[i] + b[i];\n}\n"
    )
    return cupy.RawKernel(text % number, f"affine_{number}")


def library_handle(*, faulty: bool = True) -> CallableCase:
    """Create a cuBLAS handle inside the step."""
    v = Vectors.make()
    cublas = _loaded("cublas")
    handles = [ctypes.c_void_p()]

    def step() -> None:
        if faulty:
            handles.append(ctypes.c_void_p())
            cublas.cublasCreate_v2(ctypes.byref(handles[-1]))  # fault
        v.launch()

    return v.case(step)


def _loaded(library: str) -> ctypes.CDLL:
    """Return a CUDA library that torch has loaded: by its name the loader finds that one."""
    major = (torch.version.cuda or "13").partition(".")[0]
    return ctypes.CDLL(f"lib{library}.so.{major}")


def unjoined_stream(*, faulty: bool = True) -> CallableCase:
    """Fork to a side stream and never come back from it."""
    v = Vectors.make()
    side = torch.cuda.Stream()
    other = zeros(N)

    def step() -> None:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            launch("copy", v.x, other, N)
        v.launch()
        if not faulty:
            main.wait_stream(side)

    return v.case(step)


def host_callback(*, faulty: bool = True) -> CallableCase:
    """Put a Python function into the stream."""
    v = Vectors.make()
    cudart = _loaded("cudart")
    calls: list[int] = []
    callback = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda _: calls.append(1))

    def step() -> None:
        v.launch()
        if faulty:
            stream = ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
            cudart.cudaLaunchHostFunc(stream, callback, None)

    return v.case(step)


def memory_node(*, faulty: bool = True) -> CallableCase:
    """Allocate and free a temporary in stream order: nodes that allocate at each replay."""
    v = Vectors.make()
    kept = cupy.cuda.runtime.malloc(BYTES)

    def step() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        pointer = cupy.cuda.runtime.mallocAsync(BYTES, stream) if faulty else kept
        launch("affine", v.x, v.b, np.uint64(pointer), N)
        launch("copy", np.uint64(pointer), v.y, N)
        if faulty:
            cupy.cuda.runtime.freeAsync(pointer, stream)

    return v.case(step)


def pageable_copy(*, faulty: bool = True) -> CallableCase:
    """Upload from pageable memory through the runtime, which records it silently."""
    v = Vectors.make()
    values = drawn(N, 77)
    source = values if faulty else values.pin_memory()
    table = zeros(N)

    def step() -> None:
        cupy.cuda.runtime.memcpyAsync(
            table.data_ptr(),
            source.data_ptr(),
            BYTES,
            cupy.cuda.runtime.memcpyHostToDevice,
            torch.cuda.current_stream().cuda_stream,
        )
        launch("affine", v.x, table, v.y, N)

    return v.case(
        step,
        inputs={"x": v.x},
        reference=lambda: {"y": 2 * v.x.cpu().numpy() + values.numpy()},
    )


def torch_pageable_copy(*, faulty: bool = True) -> CallableCase:
    """Upload from a pageable tensor with `copy_(..., non_blocking=True)`."""
    v = Vectors.make()
    values = drawn(N, 77)
    source = values if faulty else values.pin_memory()
    table = zeros(N)

    def step() -> None:
        table.copy_(source, non_blocking=True)  # fault
        launch("affine", v.x, table, v.y, N)

    return v.case(
        step,
        inputs={"x": v.x},
        reference=lambda: {"y": 2 * v.x.cpu().numpy() + values.numpy()},
    )


def failed_capture(*, faulty: bool = True) -> CallableCase:
    """Raise inside the capture while the step keeps what it allocated there."""
    v = Vectors.make()
    kept: list[torch.Tensor] = []

    def step() -> None:
        workspace = torch.empty(1 << 24, device="cuda")
        launch("affine", v.x, v.b, workspace, N)
        launch("copy", workspace, v.y, N)
        if faulty and torch.cuda.is_current_stream_capturing():
            kept.append(workspace)
            raise RuntimeError("the batch does not fit the captured bucket")

    return v.case(step)


def sync_debug_left(*, faulty: bool = True) -> CallableCase:
    """Arm torch's synchronisation debugging and leave it so."""
    v = Vectors.make()

    def step() -> None:
        before = torch.cuda.get_sync_debug_mode()
        torch.cuda.set_sync_debug_mode("warn")
        v.launch()
        if not faulty:
            torch.cuda.set_sync_debug_mode(before)

    return v.case(step)


def autograd_in_capture(*, faulty: bool = True) -> CallableCase:
    """Compute a gradient inside the step; the engine's own thread launches it."""
    v = Vectors.make()

    def step() -> None:
        if faulty:
            x = v.x.detach().requires_grad_()
            (gradient,) = torch.autograd.grad((x * x).sum(), x)  # fault
            torch.add(gradient, v.b, out=v.y)
        else:
            launch("affine", v.x, v.b, v.y, N)

    return v.case(step)
