"""Mutants of CV4xx: memory that the graph keeps pointing at.

Each factory makes the mutant, and with ``faulty=False`` its clean twin.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
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
    host,
    launch,
    zeros,
)

LARGE = 6 << 20  # floats: a segment of torch's allocator of its own
SHARED = 1 << 20  # floats: a block that shares a segment, and that no small tensor is put into


def freed_input(*, faulty: bool = True) -> CallableCase:
    """Keep the address of a weight and let the tensor go."""
    v = Vectors.make()
    # two blocks of one segment: the one that lives keeps torch from giving the segment back
    v.y = zeros(SHARED)[:N]
    weight: Any = zeros(SHARED)
    weight[:N].copy_(drawn(N, 99))
    expected = host(weight[:N])
    if faulty:
        weight = np.uint64(weight.data_ptr())

    def step() -> None:
        launch("affine", v.x, weight, v.y, N)

    return v.case(step, inputs={"x": v.x}, reference=lambda: {"y": 2 * host(v.x) + expected})


def workspace_resized(*, faulty: bool = True) -> CallableCase:
    """Let a workspace grow in the eager run of a larger batch, after a graph has its address."""
    v = Vectors.make()
    workspace = zeros(N if faulty else 64 * N)
    batch = SimpleNamespace(need=N)

    def refill(seed: int) -> None:
        v.refill(seed)
        batch.need = N * (1 + 16 * (seed % 3))

    def step() -> None:
        if workspace.numel() < batch.need and not torch.cuda.is_current_stream_capturing():
            workspace.resize_(batch.need)
        launch("affine", v.x, v.b, workspace, N)
        launch("copy", workspace, v.y, N)

    return v.case(step, refill=refill, scratch={"workspace": workspace})


def library_workspace(*, faulty: bool = True) -> CallableCase:
    """Multiply on a stream whose cuBLAS workspace was made inside another graph's capture."""
    n, k = 64, 16384  # few results of long sums: cuBLAS splits the sums, and needs a workspace
    a, b, y = zeros(n, k), zeros(k, n), zeros(n, n)
    side = torch.cuda.Stream()
    other = torch.cuda.CUDAGraph()
    torch.mm(a, b)  # makes the handle, which no capture survives
    if not faulty:
        with torch.cuda.stream(side):
            torch.mm(a, b)
    with torch.cuda.graph(other, stream=side):
        torch.mm(a, b, out=y)

    def refill(seed: int) -> None:
        a.copy_(drawn(n * k, 2 * seed, low=-2, high=3).view(n, k))
        b.copy_(drawn(n * k, 2 * seed + 1, low=-2, high=3).view(k, n))
        other.replay()

    def step() -> None:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            torch.mm(a, b, out=y)
        main.wait_stream(side)

    refill(0)
    return CallableCase(
        step=step,
        inputs={"a": a, "b": b},
        outputs={"y": y},
        refill=refill,
        reference=lambda: {"y": host(a) @ host(b)},
    )


def scratch_kept(*, faulty: bool = True) -> CallableCase:
    """Keep a temporary of the capture in an attribute, for use outside the graph."""
    v = Vectors.make()
    kept = SimpleNamespace(between=None)

    def step() -> None:
        between = torch.empty(N, device="cuda")
        if faulty:
            kept.between = between
        launch("affine", v.x, v.b, between, N)
        launch("copy", between, v.y, N)

    return v.case(step)


class _Present(Mapping[str, Any]):
    """Outputs of an object that may bind them anew."""

    def __init__(self, owner: Any, *names: str) -> None:
        self.owner = owner
        self.names = names

    def __getitem__(self, name: str) -> Any:
        if name not in self.names:
            raise KeyError(name)
        return getattr(self.owner, name)

    def __iter__(self) -> Iterator[str]:
        return iter(self.names)

    def __len__(self) -> int:
        return len(self.names)


def output_in_pool(*, faulty: bool = True) -> CallableCase:
    """Hand out the tensor that the captured call returned: the next replay overwrites it."""
    v = Vectors.make()

    def step() -> None:
        if faulty:
            v.y = torch.add(v.b, v.x, alpha=2)
        else:
            torch.add(v.b, v.x, alpha=2, out=v.y)

    return v.case(step, outputs=_Present(v, "y"))


def shared_pool(*, faulty: bool = True) -> CallableCase:
    """Read what another graph left in a pool that a third graph shares and overwrites."""
    v = Vectors.make()
    pool = torch.cuda.graph_pool_handle()
    first, second = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    other = zeros(LARGE)
    static = zeros(N)
    seeded = zeros(LARGE)
    with torch.cuda.graph(first, pool=pool):
        torch.add(other, 1).add_(1)  # a temporary, free again at the end of the capture
    with torch.cuda.graph(second, pool=pool):
        doubled = seeded * 2  # in the temporary's place

    def refill(seed: int) -> None:
        v.b.copy_(drawn(N, 2 * seed + 1))
        seeded[:N].copy_(drawn(N, 2 * seed))
        v.x.copy_(seeded[:N])
        second.replay()
        static.copy_(doubled[:N])
        other.zero_()
        first.replay()

    def step() -> None:
        torch.add(doubled[:N] if faulty else static, v.b, out=v.y)

    refill(0)
    return v.case(step, inputs={"b": v.b}, refill=refill)


def borrowed_pool(*, faulty: bool = True) -> CallableCase:
    """Refill a buffer inside the graph's pool whose tensor is gone: the pool may lend it."""
    v = Vectors.make()
    kept = SimpleNamespace(address=0)

    def refill(seed: int) -> None:
        v.refill(seed)
        if kept.address:
            cupy.cuda.runtime.memcpy(
                kept.address, v.x.data_ptr(), 4 * N, cupy.cuda.runtime.memcpyDeviceToDevice
            )

    def step() -> None:
        buffer = torch.empty(LARGE, device="cuda")
        if faulty and torch.cuda.is_current_stream_capturing():
            kept.address = kept.address or buffer.data_ptr()
        else:
            buffer[:N].copy_(v.x)
        launch("affine", buffer, v.b, v.y, N)

    return v.case(step, refill=refill, alone=("b",))


def module_unloaded(*, faulty: bool = True) -> CallableCase:
    """Load the kernel anew between steps and unload the module that the graph runs."""
    v = Vectors.make()
    cubin = _cubin()
    kept = SimpleNamespace(module=cupy.cuda.driver.moduleLoadData(cubin))

    def refill(seed: int) -> None:
        v.refill(seed)
        if faulty:
            torch.cuda.synchronize()
            old, kept.module = kept.module, cupy.cuda.driver.moduleLoadData(cubin)
            cupy.cuda.driver.moduleUnload(old)

    def step() -> None:
        function = cupy.cuda.driver.moduleGetFunction(kept.module, "affine")
        values = [np.array(value) for value in arguments(v.x, v.b, v.y, N)]
        pointers = np.array([value.ctypes.data for value in values], np.uint64)
        stream = torch.cuda.current_stream().cuda_stream
        cupy.cuda.driver.launchKernel(
            function, blocks(), 1, 1, THREADS, 1, 1, 0, stream, pointers.ctypes.data, 0
        )

    return v.case(step, refill=refill)


def _cubin() -> bytes:
    from cuverify.validators.zoo.kernels import TEXT

    program = cupy.cuda.nvrtc.createProgram(TEXT, "zoo.cu", [], [])
    try:
        architecture = cupy.cuda.Device().compute_capability
        cupy.cuda.nvrtc.compileProgram(program, [f"-arch=sm_{architecture}"])
        return bytes(cupy.cuda.nvrtc.getCUBIN(program))
    finally:
        cupy.cuda.nvrtc.destroyProgram(program)


def pinned_recycled(*, faulty: bool = True) -> CallableCase:
    """Upload from a block of CuPy's pinned pool that goes back to it when the call ends."""
    v = Vectors.make()
    values = drawn(N, 77)
    kept = [_pinned(values)]
    table = zeros(N)

    def step() -> None:
        staged = _pinned(values) if faulty else kept[0]
        cupy.cuda.runtime.memcpyAsync(
            table.data_ptr(),
            staged.ptr,
            4 * N,
            cupy.cuda.runtime.memcpyHostToDevice,
            torch.cuda.current_stream().cuda_stream,
        )
        launch("affine", v.x, table, v.y, N)

    return v.case(
        step,
        inputs={"x": v.x},
        reference=lambda: {"y": 2 * host(v.x) + values.numpy()},
    )


def _pinned(values: torch.Tensor) -> Any:
    """Return pinned memory of CuPy's pool that holds the values."""
    memory = cupy.cuda.alloc_pinned_memory(4 * len(values))
    np.frombuffer(memory, np.float32, len(values))[:] = values.numpy()
    return memory


def cupy_pool_hit(*, faulty: bool = True) -> CallableCase:
    """Take a temporary from CuPy's pool and give it back: others get it, the graph writes it."""
    v = Vectors.make()
    kept = cupy.empty(N, np.float32)

    def step() -> None:
        with current_stream():
            between = cupy.empty(N, np.float32) if faulty else kept
        launch("affine", v.x, v.b, np.uint64(between.data.ptr), N)
        launch("copy", np.uint64(between.data.ptr), v.y, N)

    return v.case(step)


def host_pointer(*, faulty: bool = True) -> CallableCase:
    """Pass a host array for an optional argument that this step does not use."""
    v = Vectors.make()
    array = np.zeros(N, np.float32)
    extra = zeros(N)

    def step() -> None:
        pointer = np.uint64(array.ctypes.data) if faulty else extra
        launch("affine_optional", v.x, v.b, pointer, v.y, N, 0)

    return v.case(step)


def early_refill(*, faulty: bool = True) -> CallableCase:
    """Upload the next inputs on a stream of its own, without waiting for the step to read them."""
    v = Vectors.make()
    staged_x, staged_b = torch.zeros(N).pin_memory(), torch.zeros(N).pin_memory()
    side = torch.cuda.Stream()

    def refill(seed: int) -> None:
        staged_x.copy_(drawn(N, 2 * seed))
        staged_b.copy_(drawn(N, 2 * seed + 1))
        main = torch.cuda.current_stream()
        if not faulty:
            side.wait_stream(main)
        with torch.cuda.stream(side):
            v.x.copy_(staged_x, non_blocking=True)
            v.b.copy_(staged_b, non_blocking=True)
        side.synchronize()

    def step() -> None:
        launch("affine_late", v.x, v.b, v.y, N, np.int64(4_000_000))

    return v.case(step, refill=refill)
