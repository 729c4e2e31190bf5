"""Mutants of CV6xx: state inside kernels, determinism, drift.

Each factory makes the mutant, and with ``faulty=False`` its clean twin.
"""

from __future__ import annotations

import functools
from types import SimpleNamespace
from typing import Any

import cupy
import numpy as np
import torch
from cuverify.validators.callable_case import CallableCase
from cuverify.validators.compare import Tolerance
from cuverify.validators.zoo.kernels import DEPENDENT_TEXT, kernel
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

PARTS = 32  # blocks of a sum
LARGE = 6 << 20  # floats: a segment of torch's allocator of its own


def frozen_fill(*, faulty: bool = True) -> CallableCase:
    """Set memory to a byte that varies from step to step: the graph holds the byte."""
    y = zeros(N, dtype=torch.uint8)
    t = SimpleNamespace(byte=0, on_device=zeros(1, dtype=torch.uint8))

    def refill(seed: int) -> None:
        t.byte = 1 + seed % 100
        t.on_device.fill_(t.byte)

    def step() -> None:
        if faulty:
            stream = torch.cuda.current_stream().cuda_stream
            cupy.cuda.runtime.memsetAsync(y.data_ptr(), t.byte, N, stream)
        else:
            y.copy_(t.on_device.expand(N))

    refill(0)
    return CallableCase(
        step=step,
        inputs={"byte": t.on_device},
        outputs={"y": y},
        refill=refill,
        reference=lambda: {"y": np.full(N, t.byte, np.uint8)},
    )


def tail_not_written(*, faulty: bool = True) -> CallableCase:
    """Round the grid down, so that the last elements are never written."""
    v = Vectors.make()
    grid = N // THREADS if faulty else blocks()
    return v.case(lambda: launch("affine", v.x, v.b, v.y, N, grid=grid))


def wrong_kernel(*, faulty: bool = True) -> CallableCase:
    """Compute something else than the reference says."""
    v = Vectors.make()
    return v.case(lambda: launch("affine_three" if faulty else "affine", v.x, v.b, v.y, N))


def _sum(step: Any, refill: Any = None, **changes: Any) -> CallableCase:
    """Return a case of ``y[0] = sum of x``."""
    t = SimpleNamespace(x=zeros(N), y=zeros(1))

    def fill(seed: int) -> None:
        t.x.copy_(drawn(N, seed))
        if refill is not None:
            refill()

    fill(0)
    fields = {"reference": lambda: {"y": host(t.x).sum(keepdims=True)}}
    return CallableCase(
        step=lambda: step(t),
        inputs={"x": t.x},
        outputs={"y": t.y},
        refill=fill,
        **{**fields, **changes},
    )


def counter_not_reset(*, faulty: bool = True) -> CallableCase:
    """Find the last block by a counter that the preparation clears and the kernel does not."""
    parts, counter = zeros(PARTS), zeros(1, dtype=torch.int32)

    def step(t: SimpleNamespace) -> None:
        launch("sum_by_last", t.x, parts, counter, t.y, N, 0 if faulty else 1, grid=PARTS)

    return _sum(step, refill=counter.zero_)


def uninitialised_scratch(*, faulty: bool = True) -> CallableCase:
    """Add up a scratch buffer of which one half is expected to be zero."""
    v = Vectors.make()
    table = zeros(2 * N)

    def step() -> None:
        launch("fill_table", v.x, table, N, 0 if faulty else 1)
        launch("read_table", table, v.b, v.y, N)

    return v.case(step, scratch={"table": table})


def uninitialised_temporary(*, faulty: bool = True) -> CallableCase:
    """Read the half of a temporary that nobody wrote: it was zero in fresh memory."""
    v = Vectors.make()

    def step() -> None:
        table = torch.empty(LARGE, device="cuda")
        launch("fill_table", v.x, table, N, 0 if faulty else 1)
        launch("read_table", table, v.b, v.y, N)

    return v.case(step)


def atomic_order(*, faulty: bool = True) -> CallableCase:
    """Add floats of very different size atomically: the order of the blocks is in the result."""
    n = 1 << 18
    x, y = zeros(n), zeros(1)

    def refill(seed: int) -> None:
        random = np.random.default_rng(seed)
        values = random.standard_normal(n) * 10.0 ** random.integers(-3, 4, n)
        x.copy_(torch.from_numpy(values.astype(np.float32)))

    def step() -> None:
        if faulty:
            launch("clear_one", y, grid=1, block=1)
            launch("sum_atomic", x, y, n, grid=blocks(n))
        else:
            torch.sum(x, 0, keepdim=True, out=y)

    refill(0)
    return CallableCase(
        step=step,
        inputs={"x": x},
        outputs={"y": y},
        refill=refill,
        reference=lambda: {"y": host(x).astype(np.float64).sum(keepdims=True)},
        tolerance=Tolerance(rtol=1e-3, atol=100.0),
    )


def float_width(*, faulty: bool = True) -> CallableCase:
    """Hand CuPy a Python float for a `float` parameter: eight bytes where four are read."""
    v = Vectors.make()
    factor = 3.0 if faulty else np.float32(3.0)

    def step() -> None:
        x, y = arguments(v.x, v.y)
        with current_stream():
            kernel("scale")((blocks(),), (THREADS,), (x, y, factor, np.int32(N)))

    return v.case(step, inputs={"x": v.x}, reference=lambda: {"y": 3 * host(v.x)})


def dependent_launch(*, faulty: bool = True) -> CallableCase:
    """Launch a kernel early beside the one before it, and not wait for what that one writes."""
    v = Vectors.make()
    between = zeros(N)
    produce, consume = (_dependent().get_function(name) for name in ("produce", "consume"))

    def step() -> None:
        cycles = np.int64(200_000)
        with current_stream() as stream:
            produce((blocks(),), (THREADS,), (*arguments(v.x, between, N), cycles))
            _launch_early(consume, stream.ptr, arguments(between, v.b, v.y, N, 0 if faulty else 1))

    return v.case(step)


@functools.cache
def _dependent() -> Any:
    return cupy.RawModule(code=DEPENDENT_TEXT)


def _launch_early(function: Any, stream: int, values: tuple[Any, ...]) -> None:
    """Launch with programmatic stream serialization allowed, which CuPy has no word for."""
    from cuda.bindings import driver

    attribute = driver.CUlaunchAttribute()
    attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION
    attribute.value.programmaticStreamSerializationAllowed = 1
    config = driver.CUlaunchConfig()
    config.gridDimX, config.gridDimY, config.gridDimZ = blocks(), 1, 1
    config.blockDimX, config.blockDimY, config.blockDimZ = THREADS, 1, 1
    config.hStream = stream
    config.attrs = [attribute]
    config.numAttrs = 1
    held = [np.array(value) for value in values]
    pointers = np.array([value.ctypes.data for value in held], np.uint64)
    (code,) = driver.cuLaunchKernelEx(
        config, driver.CUfunction(function.kernel.ptr), pointers.ctypes.data, 0
    )
    if int(code) != 0:
        raise RuntimeError(f"cuLaunchKernelEx: {code.name}")


def other_order(*, faulty: bool = True) -> CallableCase:
    """Sum in another number of chains while a capture runs: other rounding, same tolerance."""
    x, y = zeros(N), zeros(1)

    def refill(seed: int) -> None:
        x.copy_(torch.from_numpy(np.random.default_rng(seed).standard_normal(N)))

    def step() -> None:
        capturing = torch.cuda.is_current_stream_capturing()
        launch("sum_chains", x, y, N, grid=7 if faulty and capturing else 16, block=1)

    refill(0)
    return CallableCase(
        step=step,
        inputs={"x": x},
        outputs={"y": y},
        refill=refill,
        reference=lambda: {"y": host(x).astype(np.float64).sum(keepdims=True)},
        tolerance=Tolerance(rtol=1e-3, atol=1e-2),
    )


def memory_grows(*, faulty: bool = True) -> CallableCase:
    """Keep a copy of every batch that was ever prepared."""
    v = Vectors.make()
    history: list[torch.Tensor] = []

    def refill(seed: int) -> None:
        v.refill(seed)
        if not faulty:
            history.clear()
        history.append(v.x.repeat(1000))

    return v.case(v.launch, refill=refill)
