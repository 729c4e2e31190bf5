"""Bare steps for the tests of the capture validator: right ones, and ones that are wrong somehow.

Each function is a factory as `validate_factory` takes it. All but the raw runtime calls launch one
kernel through CuPy on torch's current stream, as somebody without cuverify would.

``python tests/capture_steps.py FOLDER NAME...`` writes what the protocol sees of them on this GPU:
that is how `recorded/` is made. One name a process is best: some of them cost the CUDA context.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from cuverify.validators import CallableCase, Tolerance

N = 1000
SOURCE = """
extern "C" __global__ void axpy(float* y, const float* x, float a, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i] + 1.0f;
}
extern "C" __global__ void gather(float* y, const float* x, const int* index, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = 2.0f * x[index[i]] + 1.0f;
}
extern "C" __global__ void total(float* y, const float* x, float* sum, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) { sum[i] += x[i]; y[i] = 2.0f * sum[i] + 1.0f; }
}
"""


class Axpy:
    """`y = 2 x + 1` with static tensors and a reference; `case` wraps a step on them."""

    def __init__(self) -> None:
        import cupy
        import torch

        module = cupy.RawModule(code=SOURCE)
        self.kernels = {name: module.get_function(name) for name in ("axpy", "gather", "total")}
        self.module = module
        self.x = torch.zeros(N, device="cuda")
        self.y = torch.zeros(N, device="cuda")

    def launch(self, name: str = "axpy", *more: Any, stream: Any = None, n: int = N) -> None:
        tail = more if more else (np.float32(2),)
        with current_stream(stream):
            self.kernels[name](
                (-(-n // 256),),
                (256,),
                (self.y.data_ptr(), self.x.data_ptr(), *tail, np.int32(n)),
            )

    def refill(self, seed: int) -> None:
        import torch

        source = torch.Generator().manual_seed(seed)
        self.x.copy_(torch.randn(N, generator=source))

    def reference(self) -> dict[str, Any]:
        return {"y": 2.0 * self.x.double().cpu().numpy() + 1.0}

    def case(self, step: Callable[[], Any], **changes: Any) -> CallableCase:
        fields: dict[str, Any] = {
            "inputs": {"x": self.x},
            "outputs": {"y": self.y},
            "refill": self.refill,
            "reference": self.reference,
            "tolerance": Tolerance(rtol=1e-5, atol=1e-6),
            **changes,
        }
        return CallableCase(step, **fields)


@contextlib.contextmanager
def current_stream(stream: Any = None) -> Iterator[None]:
    """Make torch's current stream, or another one, CuPy's."""
    import cupy
    import torch

    with cupy.cuda.Stream.from_external(stream or torch.cuda.current_stream()):
        yield


def clean() -> CallableCase:
    axpy = Axpy()
    return axpy.case(axpy.launch, make_step=lambda: axpy.launch)


def matmul() -> CallableCase:
    """A step of torch alone, with a temporary of its own and no reference."""
    import torch

    a, b, c = (torch.zeros(128, 128, device="cuda") for _ in range(3))

    def step() -> None:
        held = torch.empty(128, 128, device="cuda")
        torch.mm(a, b, out=held)
        c.copy_(torch.relu(held))

    return CallableCase(step, {"a": a, "b": b}, {"c": c}, make_step=lambda: step)


def fork_and_join() -> CallableCase:
    import torch

    axpy, side = Axpy(), torch.cuda.Stream()

    def step() -> None:
        main = torch.cuda.current_stream()
        side.wait_stream(main)
        with torch.cuda.stream(side):
            axpy.launch()
        main.wait_stream(side)

    return axpy.case(step)


def pinned_upload() -> CallableCase:
    """An upload from pinned memory; the refill waits for the replay that reads it."""
    import torch

    axpy = Axpy()
    staged = torch.zeros(N).pin_memory()

    def refill(seed: int) -> None:
        torch.cuda.synchronize()
        staged.copy_(torch.randn(N, generator=torch.Generator().manual_seed(seed)))

    def step() -> None:
        axpy.x.copy_(staged, non_blocking=True)
        axpy.launch()

    return axpy.case(
        step,
        inputs={"staged": staged},
        refill=refill,
        reference=lambda: {"y": 2.0 * staged.double().numpy() + 1.0},
    )


def null_stream() -> CallableCase:
    """CuPy as its documentation shows it: on its own current stream."""
    axpy = Axpy()

    def step() -> None:
        axpy.kernels["axpy"](
            (4,), (256,), (axpy.y.data_ptr(), axpy.x.data_ptr(), np.float32(2), np.int32(N))
        )

    return axpy.case(step)


def cached_stream() -> CallableCase:
    import torch

    axpy, cache = Axpy(), {}

    def step() -> None:
        axpy.launch(stream=cache.setdefault("stream", torch.cuda.current_stream()))

    return axpy.case(step)


def waits() -> CallableCase:
    """Waits in four ways: of torch, of CuPy, and of the runtime itself."""
    import cupy
    import torch

    axpy = Axpy()

    def step() -> None:
        axpy.launch()
        axpy.x[0].item()  # torch reads a value
        cupy.asarray(axpy.y)[:1].get()  # CuPy reads a value
        cupy.cuda.runtime.deviceSynchronize()  # the runtime
        torch.cuda.current_stream().synchronize()  # torch waits

    return axpy.case(step)


def allocates() -> CallableCase:
    """Allocates with the runtime and with CuPy; torch's own allocation is legal."""
    import cupy
    import torch

    axpy, held = Axpy(), []

    def step() -> None:
        torch.empty(3_000_000, device="cuda").zero_()  # legal
        held.append(cupy.cuda.runtime.malloc(1 << 20))  # the runtime
        held.append(cupy.cuda.Memory(1 << 20))  # CuPy past its pool
        axpy.launch()

    return axpy.case(step)


def several() -> CallableCase:
    """Five faults: a query ends the capture, and hides what comes after it from the driver."""
    import cupy
    import torch

    axpy = Axpy()

    def step() -> None:
        borrowed = cupy.empty(1000, dtype=cupy.float32)
        event = torch.cuda.Event()
        event.record()
        event.query()
        axpy.x[0].item()
        axpy.kernels["axpy"](
            (4,), (256,), (axpy.y.data_ptr(), axpy.x.data_ptr(), np.float32(2), np.int32(N))
        )
        del borrowed
        cupy.cuda.runtime.free(cupy.cuda.runtime.malloc(1 << 20))

    return axpy.case(step)


def raises() -> CallableCase:
    """Raises inside the capture, with memory in the graph's pool."""
    import torch

    axpy = Axpy()

    def step() -> None:
        held = torch.empty(1 << 22, device="cuda").zero_()
        axpy.launch()
        if torch.cuda.is_current_stream_capturing():
            raise LookupError(f"no plan for {held.numel()} elements")

    return axpy.case(step)


def frozen_length() -> CallableCase:
    axpy, length = Axpy(), [N]

    def refill(seed: int) -> None:
        axpy.refill(seed)
        length[0] = N - 300 * seed

    def reference() -> dict[str, Any]:
        right = axpy.reference()["y"]
        right[length[0] :] = np.nan  # poison: not written
        return {"y": right}

    return axpy.case(lambda: axpy.launch(n=length[0]), refill=refill, reference=reference)


def freed_input() -> CallableCase:
    """The captured step adds a tensor that is gone right after the capture."""
    import torch

    axpy = Axpy()

    def step() -> None:
        offset.append(torch.zeros(N, device="cuda")) if not offset else None
        axpy.launch()
        torch.add(axpy.y, offset[0], out=axpy.y)
        if torch.cuda.is_current_stream_capturing():
            offset.clear()

    offset: list[Any] = []
    return axpy.case(step)


def pageable_copy() -> CallableCase:
    import cupy
    import torch

    axpy, array = Axpy(), np.zeros(N, np.float32)

    def refill(seed: int) -> None:
        array[:] = np.random.default_rng(seed).normal(size=N)

    def step() -> None:
        stream = torch.cuda.current_stream().cuda_stream
        cupy.cuda.runtime.memcpyAsync(axpy.x.data_ptr(), array.ctypes.data, 4 * N, 1, stream)
        axpy.launch()

    return axpy.case(
        step, inputs={}, refill=refill,
        reference=lambda: {"y": 2.0 * array.astype(np.float64) + 1.0},
    )  # fmt: skip


def accumulates() -> CallableCase:
    """Adds to a sum that nobody resets."""
    import torch

    axpy = Axpy()
    sums = torch.zeros(N, device="cuda")
    return axpy.case(lambda: axpy.launch("total", sums.data_ptr()))


def unwritten() -> CallableCase:
    """Adds to a temporary that nobody zeroes."""
    import torch

    axpy = Axpy()

    def step() -> None:
        sums = torch.empty(N, device="cuda")
        axpy.launch("total", sums.data_ptr())

    return axpy.case(step)


def stale_plan() -> CallableCase:
    """The index list is made by the step's Python, which no replay runs."""
    import torch

    axpy = Axpy()
    index = torch.zeros(N, dtype=torch.int32, device="cuda")
    order = {"roll": 0}

    def refill(seed: int) -> None:
        axpy.refill(seed)
        order["roll"] = seed

    def step() -> None:
        if not torch.cuda.is_current_stream_capturing():
            index.copy_(torch.arange(N, dtype=torch.int32).roll(order["roll"]))
        axpy.launch("gather", index.data_ptr())

    def reference() -> dict[str, Any]:
        return {"y": np.roll(axpy.reference()["y"], order["roll"])}

    return axpy.case(step, refill=refill, reference=reference)


def side_thread() -> CallableCase:
    import threading

    import cupy

    axpy = Axpy()

    def step() -> None:
        axpy.launch()
        thread = threading.Thread(
            target=lambda: cupy.cuda.runtime.free(cupy.cuda.runtime.malloc(1 << 20))
        )
        thread.start()
        thread.join()

    return axpy.case(step)


def python_float() -> CallableCase:
    """CuPy passes a Python float as 8 bytes; the kernel reads 4 of them."""
    axpy = Axpy()
    return axpy.case(lambda: axpy.launch("axpy", 2.0))


def record(folder: str, *names: str) -> None:
    """Write the records of some steps to ``folder/NAME.json``."""
    import json
    from pathlib import Path

    from cuverify.validators.capture import observe
    from cuverify.validators.records import to_plain
    from cuverify.validators.subject import CallableStep

    for name in names:
        case = globals()[name]()
        seen = observe(
            CallableStep(case),
            [(f"seed {seed}", seed) for seed in case.seeds],
            tolerances=case.tolerance,
            only_recorded=False,
        )
        Path(folder, f"{name}.json").write_text(json.dumps(to_plain(seen)) + "\n")


if __name__ == "__main__":
    import sys

    record(*sys.argv[1:])
