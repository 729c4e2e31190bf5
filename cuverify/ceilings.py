"""What a GPU gives at most, measured in the run that is compared with it: reading, and products."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import cuverify
from cuverify.bench import time_graph
from cuverify.errors import ArgumentError

TENSOR_FLOPS = {"H200": 790e12, "H100": 790e12}
"""bf16 products a second that wgmma was seen to give, by a part of the GPU's name."""

_ROWS = 1 << 20
_ROW_BYTES = 1152
_THREADS = 256
_BLOCKS_PER_MULTIPROCESSOR = 8
_REPEATS = 10
_SIDE = 8192  # of the matrices whose product is timed

READ_ROWS = """\
// Reads rows of a pool and keeps their exclusive or, so that nothing is read in vain.
//
// @kernel read_rows
// @param pool   read  bf16   [slots, 8 * pieces] stride=(stride, 1) align=16
// @param stride value int64               elements from slot to slot
// @param pieces value int32               16-byte pieces of a row
// @param rows   read  int32  [count]      slots to read
// @param count  value int32
// @param found  write uint32 [*]          one word for each warp
// @block 256
#include "vector.cuh"
extern "C" __global__ void __launch_bounds__(256)
    read_rows(const unsigned short* pool, long long stride, int pieces, const int* rows, int count,
              unsigned* found) {
    const int threads = static_cast<int>(gridDim.x * blockDim.x);
    const int thread = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    const int total = count * pieces;
    unsigned mixed = 0;
#pragma unroll 8
    for (int at = thread; at < total; at += threads) {
        const long long slot = rows[at / pieces];
        const uint4 piece = load128_nc(pool + slot * stride + at % pieces * 8);
        mixed ^= piece.x ^ piece.y ^ piece.z ^ piece.w;
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        mixed ^= __shfl_xor_sync(0xffffffffu, mixed, distance);
    }
    if (threadIdx.x % 32 == 0) {
        found[thread / 32] = mixed;
    }
}
"""


def read_step(pool: Any, rows: Any, *, blocks: int | None = None) -> tuple[Callable[[], None], Any]:
    """Return a step that reads some rows of a pool and does nothing else.

    Parameters
    ----------
    pool : tensor of bf16, shape (slots, width)
        Rows of whole 16-byte pieces, any row stride of whole pieces.
    rows : tensor of int32, shape (count,)
        Slots, in the order in which they are read.
    blocks : int, optional
        As many as fill the GPU if absent, and 2 on the host lane.

    Returns
    -------
    step : callable
        Launches on torch's current stream.
    found : tensor of uint32 or int32
        Exclusive ors of the words that each warp has read.
    """
    import numpy as np

    width = pool.shape[1]
    if width % 8 or rows.shape[0] * (width // 8) >= 2**31:
        raise ArgumentError("pool", tuple(pool.shape), "wants whole pieces, below 2**31 in all")
    if isinstance(pool, np.ndarray):
        blocks = blocks or 2
        stride = pool.strides[0] // pool.itemsize
        found: Any = np.zeros(blocks * _THREADS // 32, np.uint32)
    else:
        import torch

        blocks = blocks or _blocks(pool.device)
        stride = pool.stride(0)
        found = torch.zeros(blocks * _THREADS // 32, dtype=torch.int32, device=pool.device)
    kernel = cuverify.load_kernel(READ_ROWS, name="read_rows.cu")
    bound = kernel.bind(
        blocks, _THREADS, pool, stride, width // 8, rows, rows.shape[0], found
    )  # fmt: skip
    return bound, found


def _blocks(device: Any) -> int:
    import torch

    if device.type != "cuda":
        return 2
    count = int(torch.cuda.get_device_properties(device).multi_processor_count)
    return _BLOCKS_PER_MULTIPROCESSOR * count


@dataclass(frozen=True)
class Ceilings:
    """What one GPU was seen to give.

    Attributes
    ----------
    read, scattered : float
        Bytes a second of reading rows of 1,152 bytes in their order, and in random order.
    tensor : float
        bf16 operations a second.
    """

    read: float
    scattered: float
    tensor: float


def measure_ceilings() -> Ceilings:
    """Measure all of them.

    Raises
    ------
    DeviceError
        There is no CUDA device.
    """
    return Ceilings(read_bandwidth(), read_bandwidth(scattered=True), tensor_rate())


def read_bandwidth(*, scattered: bool = False) -> float:
    """Return the bytes a second that a GPU reads from rows, 1.2 GB of them.

    Parameters
    ----------
    scattered : bool
        Read the rows in random order, not in theirs.

    Raises
    ------
    DeviceError
        There is no CUDA device.
    """
    import torch

    pool = torch.empty((_ROWS, _ROW_BYTES // 2), dtype=torch.int16, device="cuda")
    pool.random_()
    order = torch.randperm if scattered else torch.arange
    rows = order(_ROWS, dtype=torch.int32, device="cuda")
    step, _ = read_step(pool.view(torch.bfloat16), rows)
    return _ROWS * _ROW_BYTES / (1e-6 * time_graph(step, _REPEATS, cold=False).us)


def tensor_rate() -> float:
    """Return the bf16 operations a second of a large matrix product, or a known better rate.

    Raises
    ------
    DeviceError
        There is no CUDA device.
    """
    import torch

    a = torch.randn((_SIDE, _SIDE), device="cuda").bfloat16()
    b = torch.randn((_SIDE, _SIDE), device="cuda").bfloat16()
    out = torch.empty_like(a)
    us = time_graph(lambda: torch.mm(a, b, out=out), _REPEATS, cold=False).us  # type: ignore[arg-type]
    name = torch.cuda.get_device_name()
    known = [rate for part, rate in TENSOR_FLOPS.items() if part in name]
    return max([2 * _SIDE**3 / (1e-6 * us), *known])
