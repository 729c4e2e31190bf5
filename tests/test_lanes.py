"""Both lanes run one text: every collective, instruction wrapper and scalar type against numpy.

The same functions run on the host lane everywhere and, marked `gpu`, on a device.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuverify
from cuverify.host.toolchain import find_compilers

FILE = Path(__file__).parent / "kernels" / "warp.cu"
COMPILERS = [compiler.name for compiler in find_compilers()]


class HostRunner:
    """Runs kernels on the host lane, under the checkers."""

    def __init__(self, compiler: str) -> None:
        self.compiler = compiler

    def __call__(self, kernel: str, grid: Any, block: Any, *arguments: Any, **values: Any) -> None:
        loaded = cuverify.load_kernel(FILE, kernel=kernel, **values)
        with cuverify.checked(schedule="random", seed=3, compiler=self.compiler):
            loaded(grid, block, *arguments)


class DeviceRunner:
    """Runs kernels on the GPU; arrays travel there and back."""

    def __call__(self, kernel: str, grid: Any, block: Any, *arguments: Any, **values: Any) -> None:
        import torch

        loaded = cuverify.load_kernel(FILE, kernel=kernel, **values)
        there = [
            torch.from_numpy(a.view(np.int16) if a.dtype == np.uint16 else a).cuda()
            if isinstance(a, np.ndarray)
            else a
            for a in arguments
        ]
        there = [
            t.view(torch.bfloat16) if p.dtype.name == "bf16" else t
            for p, t in zip(loaded.contract.parameters, there, strict=True)
        ]
        loaded(grid, block, *there)
        for array, tensor in zip(arguments, there, strict=True):
            if isinstance(array, np.ndarray):
                raw = tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor
                array[...] = raw.cpu().numpy().view(array.dtype)


RUNNERS = [pytest.param(HostRunner(name), id=name) for name in COMPILERS]
RUNNERS.append(pytest.param(DeviceRunner(), id="gpu", marks=pytest.mark.gpu))
Run = Callable[..., None]


def aligned(shape: tuple[int, ...], dtype: Any) -> np.ndarray:
    """Return an uninitialised array whose base is a multiple of 16."""
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    room = np.empty(size + 16, np.uint8)
    start = -room.ctypes.data % 16
    return room[start : start + size].view(dtype).reshape(shape)


def to_bf16(x: np.ndarray) -> np.ndarray:
    """Round float32 to bfloat16 bits, to nearest even; finite values only."""
    bits = x.astype(np.float32).view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def from_bf16(bits: np.ndarray) -> np.ndarray:
    return (bits.astype(np.uint32) << 16).view(np.float32)


@pytest.mark.parametrize("run", RUNNERS)
def test_collectives(run: Run) -> None:
    x = np.random.default_rng(1).integers(0, 1000, 32).astype(np.int32)
    out = np.zeros((16, 32), np.int32)
    run("collectives", 1, 32, out, x)
    lane = np.arange(32)
    seg = lane & ~7
    assert (out[0] == x[7]).all()
    assert (out[1] == x[seg + (lane + 3) % 8]).all()
    assert (out[2] == x[lane ^ 5]).all()
    # xor by 12 in segments of 8: a later segment is out of reach, an earlier one is not
    assert (out[3] == np.where((lane ^ 12) < seg + 8, x[lane ^ 12], x)).all()
    assert (out[4] == np.where(lane >= 3, x[np.maximum(lane - 3, 0)], x)).all()
    assert (out[5] == np.where(lane % 4 >= 2, x[np.maximum(lane - 2, 0)], x)).all()
    assert (out[6] == np.where(lane + 9 < 32, x[np.minimum(lane + 9, 31)], x)).all()
    assert (out[7] == np.where(lane % 16 < 15, x[np.minimum(lane + 1, 31)], x)).all()
    assert (out[8].view(np.uint32) == sum(int(v & 1) << i for i, v in enumerate(x))).all()
    assert (out[9] != 0).all() and (out[10] != 0).all()
    groups = [sum(1 << j for j in range(32) if x[j] % 5 == x[i] % 5) for i in range(32)]
    assert (out[11].view(np.uint32) == np.array(groups, np.uint32)).all()
    assert (out[12] == x[lane ^ 3]).all()
    for i, v in enumerate(int(v) for v in x):
        bits = format(v, "032b")
        ffs = 32 - bits.rindex("1") if v else 0
        clz = bits.index("1") if v else 32
        assert out[13][i] == bits.count("1") + 100 * clz + 10000 * ffs
        flipped = ~v & 0xFFFFFFFF
        permuted = v & 0xFFFF | (flipped & 0xFFFF) << 16
        assert out[14].view(np.uint32)[i] == int(bits[::-1], 2) ^ permuted
        high = (v * 2654435761 & 0xFFFFFFFF) * 40503 >> 32
        funnel = ((flipped << 32 | v) << (i & 31)) >> 32 & 0xFFFFFFFF
        assert out[15].view(np.uint32)[i] == (high + funnel) & 0xFFFFFFFF


@pytest.mark.parametrize("run", RUNNERS)
def test_block_votes(run: Run) -> None:
    for threads in (1, 40, 64, 1024):
        x = np.arange(threads, dtype=np.int32)
        out = np.full((3, threads), -7, np.int32)
        run("block_votes", 1, threads, out, x, threads)
        assert (out[0] == (x & 1).sum()).all()
        assert (out[1] != 0).all()
        assert ((out[2] != 0) == (threads > 3)).all()


@pytest.mark.parametrize("run", RUNNERS)
def test_atomics(run: Run) -> None:
    threads = 100
    out = np.array([5, 0, 50, 50, -1, 0, 0, 0, 0], np.int32)
    old = np.zeros(threads, np.int32)
    run("atomics", 1, threads, out, old, threads)
    t = np.arange(threads)
    assert sorted(old) == list(range(5, 5 + threads))
    assert out[0] == 5 + threads and out[1] == -t.sum()
    assert out[2] == 0 and out[3] == threads - 1
    assert out[4] == np.int32(-(2**31)) and out[5] == 2**31 - 1
    assert out[6] == np.bitwise_xor.reduce(t) and out[7] == threads % 10
    assert 1 <= out[8] <= threads


@pytest.mark.parametrize("run", RUNNERS)
def test_halves_round_as_the_device_does(run: Run) -> None:
    rng = np.random.default_rng(2)
    special = [
        0.0,
        -0.0,
        np.inf,
        -np.inf,
        65504.0,
        65519.9,
        65520.0,
        2.0**-24,
        2.0**-25,
        6e-8,
        1e-45,
        3.3e38,
    ]
    x = np.concatenate(
        [np.array(special, np.float32), rng.standard_normal(500).astype(np.float32),
         rng.integers(0, 2**31 - 2**23, 2000).astype(np.uint32).view(np.float32)]
    )  # fmt: skip
    n = len(x)
    bf, half, back = np.zeros(n, np.uint16), np.zeros(n, np.uint16), np.zeros((2, n), np.float32)
    run("round_halves", 1, 64, bf, half, back, x, n)
    import torch

    expected = torch.from_numpy(x).to(torch.bfloat16)
    with np.errstate(over="ignore"):
        wanted_half = x.astype(np.float16)
    assert (bf == expected.view(torch.int16).numpy().view(np.uint16)).all()
    assert (half == wanted_half.view(np.uint16)).all()
    assert (back[0] == expected.float().numpy()).all()
    assert (back[1] == wanted_half.astype(np.float32)).all()


@pytest.mark.parametrize("run", RUNNERS)
def test_multiply_tiles(run: Run) -> None:
    rng = np.random.default_rng(4)
    for k in (16, 64):
        a, b = aligned((16, k), np.uint16), aligned((8, k), np.uint16)
        a[:], b[:] = to_bf16(rng.standard_normal((16, k))), to_bf16(rng.standard_normal((8, k)))
        d = np.full((16, 8), np.nan, np.float32)
        run("multiply_tiles", 1, 32, d, a, b, K=k)
        exact = from_bf16(a).astype(np.float64) @ from_bf16(b).astype(np.float64).T
        bound = np.abs(from_bf16(a)).astype(np.float64) @ np.abs(from_bf16(b)).astype(np.float64).T
        assert (np.abs(d - exact) <= 2.0**-21 * bound).all()


@pytest.mark.parametrize("run", RUNNERS)
def test_transpose_tiles(run: Run) -> None:
    x = aligned((32, 8), np.uint16)
    x[:] = np.arange(256).reshape(32, 8)
    moved, loaded = np.zeros(32, np.uint32), np.zeros((4, 32), np.uint32)
    run("transpose_tiles", 1, 32, moved, loaded, x)
    for tile in range(4):
        turned = x[tile * 8 : tile * 8 + 8].T.reshape(32, 2).astype(np.uint32)
        assert (loaded[tile] == (turned[:, 0] | turned[:, 1] << 16)).all()
    assert (moved == loaded[0]).all()


@pytest.mark.parametrize("run", RUNNERS)
def test_copy_fills_with_zeros(run: Run) -> None:
    x, out = aligned((17, 4), np.uint32), aligned((17, 4), np.uint32)
    x[:] = 0x01020304
    run("copy_with_fill", 1, 32, out, x)
    for length, row in enumerate(out.view(np.uint8).reshape(17, 16)):
        assert (row[:length] == x.view(np.uint8).reshape(17, 16)[length, :length]).all()
        assert (row[length:] == 0).all()


@pytest.mark.parametrize("run", RUNNERS)
def test_indices_in_three_dimensions(run: Run) -> None:
    out = np.zeros(2 * 3 * 2 * 3 * 4 * 2, np.int32)
    run("where_am_i", (2, 3, 2), (3, 4, 2), out)
    expected = [
        z * 100 + y * 10 + x + 1000 * block
        for block in range(12) for z in range(2) for y in range(4) for x in range(3)
    ]  # fmt: skip
    assert out.tolist() == expected


@pytest.mark.parametrize("run", RUNNERS)
def test_scalars_arrive_in_their_width(run: Run) -> None:
    out = np.zeros(9, np.float64)
    run("all_scalars", 1, 1, out, True, -5, 65535, -(2**31), 2**32 - 1, -(2**52), 2**63, 1.0, 0.1)
    assert out.tolist() == [1, -5, 65535, -(2**31), 2**32 - 1, -(2**52), 2**63, 1.0, 0.1]
