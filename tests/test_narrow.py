"""Numbers of 16 and 8 bits: rounded as torch does, and widened by kernels as by numpy."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import cuverify
from cuverify.cases import Target
from cuverify.narrow import LARGEST_E4M3, NAN, Narrow, narrow, widen

gpu = pytest.mark.gpu
both_lanes = pytest.mark.parametrize("xp", ["numpy", pytest.param("torch-cuda", marks=gpu)])

WIDEN = """
#include "fp8_e4m3.cuh"
#include "vector.cuh"
// @kernel widen
// @param wide  write uint16 [n, 16] align=16
// @param codes read  uint8 [n, 16] align=16
// @param n     value int32
extern "C" __global__ void widen(unsigned short* wide, const unsigned char* codes, int n) {
    const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) {
        uint4 first, second;
        fp8_e4m3::widen(load128(codes + i * 16), first, second);
        store128(wide + i * 16, first);
        store128(wide + i * 16 + 8, second);
    }
}
"""


def of_torch(values: NDArray[np.float32], kind: Narrow) -> NDArray[Any]:
    given = torch.from_numpy(values)
    if kind == "fp16":
        return given.half().numpy()
    if kind == "bf16":
        return given.bfloat16().view(torch.int16).numpy().view(np.uint16)
    limited = given.clamp(-LARGEST_E4M3, LARGEST_E4M3)
    return limited.to(torch.float8_e4m3fn).view(torch.uint8).numpy()


@pytest.mark.parametrize("kind", ["bf16", "fp16", "fp8_e4m3"])
def test_numbers_are_rounded_as_torch_does(kind: Narrow) -> None:
    rng = np.random.default_rng(1)
    drawn = rng.standard_normal(50_000) * np.logspace(-9, 4, 50_000, base=10)
    codes = widen(np.arange(127, dtype=np.uint8))
    middles = (codes[1:] + codes[:-1]) / 2  # ties
    values = np.concatenate([drawn, codes, middles, -middles, [0.0, -0.0, 449.0]])
    values = values.astype(np.float32)
    np.testing.assert_array_equal(narrow(values, kind), of_torch(values, kind))
    known = widen(narrow(values, kind)).astype(np.float32)
    np.testing.assert_array_equal(narrow(known, kind), narrow(values, kind))


def test_every_code_is_the_number_that_torch_says() -> None:
    codes = np.arange(256, dtype=np.uint8)
    right = torch.from_numpy(codes).view(torch.float8_e4m3fn).double().numpy()
    np.testing.assert_array_equal(widen(codes), right)


def test_nan_is_nan_in_every_type() -> None:
    for kind, value in NAN.items():
        assert np.isnan(widen(np.array([value]))).all(), kind


@both_lanes
def test_kernels_widen_every_code_exactly(xp: Target) -> None:
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    given = np.concatenate([codes, codes[:, ::-1], np.random.default_rng(2).permuted(codes)])
    given = np.ascontiguousarray(given)
    kernel = cuverify.load_kernel(WIDEN, name="widen.cu")
    if xp == "numpy":
        wide = np.zeros((len(given), 16), np.uint16)
        kernel(1, 64, wide, given, len(given))
    else:
        found = torch.zeros((len(given), 16), dtype=torch.int16, device="cuda")
        kernel(1, 64, found, torch.from_numpy(given).cuda(), len(given))
        wide = found.cpu().numpy().view(np.uint16)
    numbers = widen(given)
    np.testing.assert_array_equal(widen(wide), numbers)
    np.testing.assert_array_equal(wide[~np.isnan(numbers)], of_torch(
        numbers[~np.isnan(numbers)].astype(np.float32), "bf16"))  # fmt: skip
