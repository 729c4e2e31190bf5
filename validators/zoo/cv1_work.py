"""Mutants of CV1xx: work that is not in the graph.

Each factory makes the mutant, and with ``faulty=False`` its clean twin.
"""

from __future__ import annotations

from types import SimpleNamespace

import cupy
import numpy as np
import torch
from cuverify.validators.callable_case import CallableCase
from cuverify.validators.zoo.kernels import kernel
from cuverify.validators.zoo.parts import (
    THREADS,
    N,
    Vectors,
    arguments,
    blocks,
    launch,
    zeros,
)


def null_stream(*, faulty: bool = True) -> CallableCase:
    """Launch a CuPy kernel without saying on which stream: it goes to the null stream."""
    v = Vectors.make()

    def step() -> None:
        if faulty:
            kernel("affine")((blocks(),), (THREADS,), arguments(v.x, v.b, v.y, N))  # fault
        else:
            v.launch()

    return v.case(step)


def cupy_recipe(*, faulty: bool = True) -> CallableCase:
    """Follow CuPy's documented recipe for a custom kernel in PyTorch, inside a capture.

    It takes the tensors through DLPack, allocates the output from CuPy's pool, launches on CuPy's
    current stream and hands the output back through DLPack. Each of the four is fine in eager mode.
    """
    v = Vectors.make()

    class Affine(torch.autograd.Function):
        @staticmethod
        def forward(ctx: object, x: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
            cupy_x = cupy.ascontiguousarray(cupy.from_dlpack(x.detach()))  # fault
            cupy_b = cupy.ascontiguousarray(cupy.from_dlpack(b.detach()))
            cupy_y = cupy.empty(cupy_x.shape, dtype=cupy_x.dtype)
            kernel("affine")(
                (blocks(cupy_x.size),), (THREADS,), (cupy_x, cupy_b, cupy_y, np.int32(cupy_x.size))
            )
            result: torch.Tensor = torch.utils.dlpack.from_dlpack(cupy_y)
            return result

    def step() -> None:
        if faulty:
            v.y.copy_(Affine.apply(v.x, v.b))
        else:
            v.launch()

    return v.case(step)


def cached_stream(*, faulty: bool = True) -> CallableCase:
    """Take torch's current stream at the first launch and keep it for all others."""
    v = Vectors.make()
    kept = SimpleNamespace(stream=None)

    def step() -> None:
        if not faulty or kept.stream is None:
            kept.stream = cupy.cuda.Stream.from_external(torch.cuda.current_stream())
        with kept.stream:
            kernel("affine")((blocks(),), (THREADS,), arguments(v.x, v.b, v.y, N))  # fault

    return v.case(step)


def empty_graph(*, faulty: bool = True) -> CallableCase:
    """Remember by address what was computed, and compute nothing the second time."""
    v = Vectors.make()
    done: set[int] = set()

    def step() -> None:
        if faulty and v.x.data_ptr() in done:
            return
        done.add(v.x.data_ptr())
        v.launch()

    return v.case(step)


def cold_stream(*, faulty: bool = True) -> CallableCase:
    """Make a workspace at the first use of each stream: a capture on another stream makes one."""
    v = Vectors.make()
    workspaces: dict[int, int] = {}

    def step() -> None:
        stream = torch.cuda.current_stream().cuda_stream if faulty else 0
        if stream not in workspaces:
            workspaces[stream] = cupy.cuda.runtime.malloc(4 * N)
        between = np.uint64(workspaces[stream])
        launch("affine", v.x, v.b, between, N)
        launch("copy", between, v.y, N)

    return v.case(step)


def input_left_out(*, faulty: bool = True) -> CallableCase:
    """Copy an input into the buffer that the kernel reads at the first call only."""
    v = Vectors.make()
    static = SimpleNamespace(b=zeros(N), filled=False)

    def step() -> None:
        if not faulty or not static.filled:
            static.b.copy_(v.b)
            static.filled = True
        launch("affine", v.x, static.b, v.y, N)

    return v.case(step)


def rebound_tensor(*, faulty: bool = True) -> CallableCase:
    """Assign a new tensor to an attribute where the old one should be written."""
    v = Vectors.make()

    def step() -> None:
        if faulty:
            v.y = torch.add(v.b, v.x, alpha=2)
        else:
            torch.add(v.b, v.x, alpha=2, out=v.y)

    return v.case(step)


def capture_only_branch(*, faulty: bool = True) -> CallableCase:
    """Take another kernel while a capture runs than in the warm-up."""
    v = Vectors.make()
    launch("affine_wide", v.x, v.b, v.y, N, grid=blocks(each=2 * THREADS))

    def step() -> None:
        if faulty and torch.cuda.is_current_stream_capturing():
            launch("affine_wide", v.x, v.b, v.y, N, grid=blocks(each=2 * THREADS))
        else:
            v.launch()

    return v.case(step)
