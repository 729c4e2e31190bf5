"""What a launch costs on the host: bound, checked, and CuPy's own call of the same kernel."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

import cuverify
from cuverify.bench import Timing, gated, time_calls

ELEMENTS = 256
CALLS = 200  # in a row, less than a stream queues
REPEATS = 50
TARGET_US = 5  # of a bound launch over CuPy's call

SIGNATURE = """\
extern "C" __global__ void twelve(float* out, const float* a, const float* b, const float* c,
                                  const int* d, const int* e, int n, long long shift, float s,
                                  float t, int low, int high) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) out[i] = a[i] * s + b[i] * t + c[i] + d[i] * low + e[i] * high + shift;
}
"""
TEXT = f"""\
// @kernel twelve
// @param out   write fp32 [n]
// @param a     read  fp32 [n]
// @param b     read  fp32 [n]
// @param c     read  fp32 [n]
// @param d     read  int32 [n]
// @param e     read  int32 [n]
// @param n     value int32
// @param shift value int64
// @param s     value fp32
// @param t     value fp32
// @param low   value int32
// @param high  value int32
{SIGNATURE}"""
SCALARS = (7, 2.0, 3.0, 5, 11)  # shift, s, t, low, high: every result is a whole number


class _TorchStream:
    """Torch's current stream by the CUDA stream protocol, which not every torch's own class has."""

    def __cuda_stream__(self) -> tuple[int, int]:
        """Return the protocol's version and the stream's handle."""
        import torch

        return 0, torch.cuda.current_stream().cuda_stream


def run(device: str) -> list[dict[str, Any]]:
    """Time launches of a kernel with twelve arguments on a GPU; nothing on a CPU."""
    if device != "cuda":
        return []
    import cupy
    import torch

    floats = [torch.arange(ELEMENTS, device="cuda").float() + k for k in range(3)]
    whole = [torch.arange(ELEMENTS, device="cuda", dtype=torch.int32) + k for k in range(2)]
    out = torch.empty(ELEMENTS, device="cuda")
    arguments: tuple[Any, ...] = (out, *floats, *whole, ELEMENTS, *SCALARS)
    kernel = cuverify.load_kernel(TEXT, name="launch_overhead.cu")
    bound = kernel.bind(1, ELEMENTS, *arguments)
    raw = cupy.RawKernel(SIGNATURE, "twelve")
    kinds = (np.int32, np.int64, np.float32, np.float32, np.int32, np.int32)
    raw_arguments = (
        *(cupy.asarray(tensor) for tensor in arguments[:6]),
        *(kind(value) for kind, value in zip(kinds, arguments[6:], strict=True)),
    )
    shift, s, t, low, high = SCALARS
    a, b, c, d, e = (tensor.cpu().numpy().astype(np.float64) for tensor in arguments[1:6])
    expected = a * s + b * t + c + d * low + e * high + shift

    def check(call: Callable[[], object]) -> Callable[[], str | None]:
        def judge() -> str | None:
            out.fill_(float("nan"))
            call()
            wrong = int(np.count_nonzero(out.cpu().numpy() != expected))
            return f"{wrong} of {ELEMENTS} elements are wrong" if wrong else None

        return judge

    def timing(call: Callable[[], object]) -> Callable[[], Timing]:
        return lambda: time_calls(call, calls=CALLS, repeats=REPEATS, settle=torch.cuda.synchronize)

    def record(
        name: str, call: Callable[[], object], peer: str | None = None, **shape: int
    ) -> dict[str, Any]:
        return gated(
            "launch_overhead",
            {"arguments": len(arguments), "call": name, **shape},
            check=check(call),
            timing=timing(call),
            peer=peer,
        )

    # CuPy's own stream is the null stream; it must launch where the others do
    with cupy.cuda.Stream.from_external(_TorchStream()):
        peer = record(
            "raw",
            lambda: raw((1,), (ELEMENTS,), raw_arguments),
            f"CuPy {cupy.__version__} RawKernel",
        )
        ours = record("bound", bound, target_over_raw_us=TARGET_US)
        checked = record("checked", lambda: kernel(1, ELEMENTS, *arguments))
    return [peer, ours, checked]
