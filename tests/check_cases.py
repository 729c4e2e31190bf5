"""Small cases for the tests of `cuverify check`: a right one, and ones that are wrong in one way.

A child process imports this file by its path, as it would a case of somebody else.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

import cuverify

BLOCK = 64

SAXPY = """\
// @kernel saxpy
// @param out write fp32 [n]
// @param x   read  fp32 [n]
// @param y   read  fp32 [n]
// @param a   value fp32
// @param n   value int32
// @block 64
extern "C" __global__ void saxpy(float* out, const float* x, const float* y, float a, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = a * x[i] + y[i];
}
"""

# the last block's threads all write the last element
RACE = SAXPY.replace(
    "if (i < n) out[i] = a * x[i] + y[i];",
    "if (i < n) out[i] = a * x[i] + y[i];\n    if (i >= n) out[n - 1] = a * x[n - 1] + y[n - 1];",
)

PAST_THE_END = SAXPY.replace("if (i < n) ", "if (i <= n) ")

NOT_CPP = SAXPY.replace("a * x[i] + y[i];", "a * x[i] + z[i];")

# 64 accumulators alive at once, and a register budget of 32
SPILLS = """\
// @kernel saxpy
// @param out write fp32 [n]
// @param x   read  fp32 [n]
// @param y   read  fp32 [n]
// @param a   value fp32
// @param n   value int32
extern "C" __global__ void __launch_bounds__(1024, 2) saxpy(float* out, const float* x,
                                                            const float* y, float a, int n) {
    float held[64];
#pragma unroll
    for (int k = 0; k < 64; ++k) held[k] = x[(threadIdx.x + k) % n];
#pragma unroll
    for (int round = 0; round < 2; ++round) {
#pragma unroll
        for (int k = 0; k < 64; ++k) held[k] = held[k] * held[(k * 7 + 1) % 64] + held[(k * 5) %
        64];
    }
    float sum = 0;
#pragma unroll
    for (int k = 0; k < 64; ++k) sum += held[k];
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = a * x[i] + y[i] + 0 * sum;
}
"""

# about a minute: long past every time limit here, and over by itself when nobody ends it
SPINS = SAXPY.replace(
    "if (i < n) out",
    "const long long start = clock64();\n"
    "    while (clock64() - start < 100000000000LL) {}\n"
    "    if (i < n) out",
)

FAR_AWAY = SAXPY.replace("out[i] = a", "out[i + (1LL << 42)] = a")


@dataclass(frozen=True)
class Batch:
    x: np.ndarray
    y: np.ndarray
    a: float


class Step:
    """`saxpy` on buffers of its own. `a` is a host scalar: it is the same in all batches."""

    def __init__(self, case: Case, batch: Batch, xp: str) -> None:
        self.case = case
        self.a = batch.a
        self.n = len(batch.x)
        self.x, self.y, self.out = (self._buffer(xp) for _ in range(3))
        self.kernel = cuverify.load_kernel(case.text, name=f"{case.name}.cu")

    def _buffer(self, xp: str) -> Any:
        if xp == "numpy":
            return np.zeros(self.n, np.float32)
        import torch

        return torch.zeros(self.n, device="cuda")

    @property
    def outputs(self) -> Mapping[str, Any]:
        return {"out": self.out}

    def refill(self, batch: Batch) -> None:
        if len(batch.x) != self.n:
            raise cuverify.errors.CaseError(f"{len(batch.x)} elements for buffers of {self.n}")
        for buffer, values in ((self.x, batch.x), (self.y, batch.y)):
            buffer[:] = values if isinstance(buffer, np.ndarray) else buffer.new_tensor(values)

    def poison(self) -> None:
        self.out[:] = float("nan")

    def __call__(self) -> None:
        grid = -(-self.n // BLOCK)
        launch = [grid, BLOCK, self.out, self.x, self.y, self.a, self.n]
        self.case.launch(self.kernel, launch)

    def expected(self) -> Mapping[str, np.ndarray]:
        x, y = (
            part if isinstance(part, np.ndarray) else part.cpu().numpy()
            for part in (self.x, self.y)
        )
        return {"out": np.float32(self.a) * x + y + np.float32(self.case.error)}


@dataclass(frozen=True)
class Case:
    """A case of `saxpy`; `error` is added to the oracle, `launch` replaces the plain launch."""

    name: str
    text: str = SAXPY
    error: float = 0.0
    launch: Callable[[Any, list[Any]], None] = lambda kernel, launch: kernel(*launch)
    only_recorded: bool = True

    def kernels(self) -> Sequence[Any]:
        return [cuverify.load_kernel(self.text, name=f"{self.name}.cu")]

    def batches(self, *, seed: int = 0, examples: int = 2) -> list[tuple[str, Batch]]:
        return self._drawn(seed, examples, 100)

    def device_batches(self, *, seed: int = 0, examples: int = 3) -> list[tuple[str, Batch]]:
        return self._drawn(seed, examples, 1000)

    def _drawn(self, seed: int, examples: int, n: int) -> list[tuple[str, Batch]]:
        random = np.random.default_rng(seed)
        # whole numbers: the GPU contracts a * x + y, and that is exact for them
        numbers = [random.integers(-99, 99, (2, n)).astype(np.float32) for _ in range(examples)]
        return [(f"drawn {at}", Batch(x, y, 3.0)) for at, (x, y) in enumerate(numbers)]

    def step(self, batch: Batch, xp: str) -> Step:
        return Step(self, batch, xp)


def on_null_stream(kernel: Any, launch: list[Any]) -> None:
    import torch

    with torch.cuda.stream(torch.cuda.default_stream()):
        kernel(*launch)


def not_while_capturing(kernel: Any, launch: list[Any]) -> None:
    import torch

    if not torch.cuda.is_current_stream_capturing():
        kernel(*launch)


def and_reads_back(kernel: Any, launch: list[Any]) -> None:
    kernel(*launch)
    launch[2].sum().item()


def on_a_forked_stream(kernel: Any, launch: list[Any]) -> None:
    import torch

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        kernel(*launch)
    torch.cuda.current_stream().wait_stream(side)


def and_a_torch_operation(kernel: Any, launch: list[Any]) -> None:
    kernel(*launch)
    launch[2].mul_(1.0)


def ends_the_process(kernel: Any, launch: list[Any]) -> None:
    os.abort()


def first_half_only(kernel: Any, launch: list[Any]) -> None:
    import torch

    if torch.cuda.is_current_stream_capturing():
        launch = [launch[0] // 2, *launch[1:]]
    kernel(*launch)


class BrokenCase(Case):
    def batches(self, *, seed: int = 0, examples: int = 2) -> list[tuple[str, Batch]]:
        raise ZeroDivisionError("no batches today")


class SleepyCase(Case):
    def batches(self, *, seed: int = 0, examples: int = 2) -> list[tuple[str, Batch]]:
        time.sleep(60)
        return []


class BrokenRefill(Case):
    def step(self, batch: Batch, xp: str) -> Step:
        step = Step(self, batch, xp)
        step.refill = lambda batch: 1 // 0  # type: ignore[method-assign]
        return step


CLEAN = Case("clean")
WRONG = Case("wrong", error=1.0)
RACES = Case("races", text=RACE)
OVERRUNS = Case("overruns", text=PAST_THE_END)
DOES_NOT_COMPILE = Case("does_not_compile", text=NOT_CPP)
SPILLING = Case("spilling", text=SPILLS)
NO_BATCHES = BrokenCase("no_batches")
SLEEPS = SleepyCase("sleeps")
NO_REFILL = BrokenRefill("no_refill")

HANGS = Case("hangs", text=SPINS)
ILLEGAL = Case("illegal", text=FAR_AWAY)
NULL_STREAM = Case("null_stream", launch=on_null_stream)
LEFT_OUT = Case("left_out", launch=not_while_capturing)
READS_BACK = Case("reads_back", launch=and_reads_back)
FORKED = Case("forked", launch=on_a_forked_stream)
EXTRA = Case("extra", launch=and_a_torch_operation)
EXTRA_DECLARED = Case("extra_declared", launch=and_a_torch_operation, only_recorded=False)
HALF = Case("half", launch=first_half_only)
DIES = Case("dies", launch=ends_the_process)
NOT_A_CASE = object()
