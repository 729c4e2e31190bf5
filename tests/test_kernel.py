"""Kernel objects: how they are found, bound and launched."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import cuverify
from cuverify.errors import ArgumentError, ContractError, LaunchError

SAXPY = """
#ifndef SCALE
#define SCALE 2
#endif
// @kernel saxpy
// @param y    update fp32 [n]
// @param x    read   fp32 [n]
// @param bias? read  fp32 [1]
// @param a    value  fp32
// @param n    value  int32
extern "C" __global__ void saxpy(float* y, const float* x, const float* bias, float a, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] += SCALE * a * x[i] + (bias ? bias[0] : 0.0f);
}
"""


def test_from_a_string_a_path_a_file_name_and_the_package(tmp_path: Path) -> None:
    file = tmp_path / "saxpy.cu"
    file.write_text(SAXPY)
    for text in (SAXPY, file, str(file)):
        kernel = cuverify.load_kernel(text)
        assert kernel.name == "saxpy" and "saxpy(y, x, bias, a, n)" in repr(kernel)
    assert (
        cuverify.load_kernel("relocate", kernel="relocate_rows").source.name
        == "kernels_cu/relocate.cu"
    )


def test_values_reach_the_text() -> None:
    y, x = np.zeros(3, np.float32), np.ones(3, np.float32)
    cuverify.load_kernel(SAXPY, SCALE=10)(1, 32, y, x, None, 0.5, 3)
    assert y.tolist() == [5, 5, 5]


@pytest.mark.parametrize("make", [lambda a: a, torch.from_numpy], ids=["numpy", "torch"])
def test_numpy_and_torch_on_the_host(make) -> None:  # type: ignore[no-untyped-def]
    y, x = np.zeros(100, np.float32), np.arange(100, dtype=np.float32)
    with cuverify.checked():
        cuverify.load_kernel(SAXPY)(4, 32, make(y), make(x), make(np.ones(1, np.float32)), 1, 100)
    assert (y == 2 * x + 1).all()


def test_a_bound_launch_keeps_its_tensors_and_can_run_again() -> None:
    y = np.zeros(3, np.float32)
    bound = cuverify.load_kernel(SAXPY).bind(1, 32, y, np.ones(3, np.float32), None, 1.0, 3)
    bound()
    bound()
    assert y.tolist() == [4, 4, 4]
    with cuverify.checked("random"):
        bound()
    assert y.tolist() == [6, 6, 6]
    assert "grid=(1, 1, 1)" in repr(bound)


def test_a_launch_in_order_is_the_same_but_for_its_start() -> None:
    y = np.zeros(3, np.float32)
    early = SAXPY.replace("// @param y ", "// @early\n// @param y ", 1)
    bound = cuverify.load_kernel(early).bind(1, 32, y, np.ones(3, np.float32), None, 1.0, 3)
    in_order = bound.in_order()
    bound()
    in_order()
    assert y.tolist() == [4, 4, 4]
    assert (bound.launch.contract.early, in_order.launch.contract.early) == (True, False)


def test_bfloat16_as_torch_and_as_uint16() -> None:
    text = """
    #include <cuda_bf16.h>
    // @kernel twice
    // @param x update bf16 [n]
    // @param n value int32
    extern "C" __global__ void twice(__nv_bfloat16* x, int n) {
        if (threadIdx.x < n) x[threadIdx.x] = __float2bfloat16(2.0f * __bfloat162float(x[threadIdx.x]));
    }
    """
    kernel = cuverify.load_kernel(text)
    x = torch.tensor([1.5, -3.0], dtype=torch.bfloat16)
    kernel(1, 2, x, 2)
    assert x.tolist() == [3, -6]
    bits = x.view(torch.int16).numpy().view(np.uint16)
    kernel(1, 2, bits, 2)
    assert x.tolist() == [6, -12]
    with pytest.raises(ArgumentError, match="x=.*float16, but the kernel reads bf16"):
        kernel(1, 2, np.zeros(2, np.float16), 2)


def test_several_kernels_need_a_choice() -> None:
    text = SAXPY + SAXPY.replace("saxpy", "other")
    with pytest.raises(ContractError, match="holds saxpy, other: say which"):
        cuverify.load_kernel(text)
    assert cuverify.load_kernel(text, kernel="other").name == "other"


def test_block_and_shared_of_the_contract() -> None:
    text = """
    #include "shared.cuh"
    // @kernel k
    // @param out write int32 [n]
    // @param n value int32
    // @block 64
    // @shared 4 * n
    extern "C" __global__ void k(int* out, int n) {
        DYNAMIC_SHARED(cursor);
        CARVE(cursor, int, s, n);
        if (threadIdx.x < n) { s[threadIdx.x] = n; out[threadIdx.x] = s[threadIdx.x]; }
    }
    """
    kernel, out = cuverify.load_kernel(text), np.zeros(9, np.int32)
    kernel(1, 64, out, 9)
    assert (out == 9).all()
    assert kernel.bind(1, (8, 8), out, 9).launch.shared == 36
    with pytest.raises(LaunchError, match="32 threads, but k is written for 64"):
        kernel(1, 32, out, 9)


def test_extents_bind_each_other() -> None:
    text = """
    // @kernel k
    // @param a read int32 [rows, width]
    // @param b read int32 [width, rows + 1]
    // @param c write int32 [2 * width]
    extern "C" __global__ void k(const int* a, const int* b, int* c) { c[0] = a[0] + b[0]; }
    """
    kernel = cuverify.load_kernel(text)

    def run(a: tuple[int, int], b: tuple[int, int], c: int) -> None:
        kernel(1, 1, np.zeros(a, np.int32), np.zeros(b, np.int32), np.zeros(c, np.int32))

    run((2, 3), (3, 3), 6)
    with pytest.raises(ArgumentError, match="b=.*width is 4 here, but 3 in a"):
        run((2, 3), (4, 3), 6)
    with pytest.raises(ArgumentError, match=r"b=.*dimension 1 has 4 elements, wants rows \+ 1 = 3"):
        run((2, 3), (3, 4), 6)
    with pytest.raises(ArgumentError, match=r"c=.*wants 2 \* width = 6"):
        run((2, 3), (3, 3), 5)


def test_compile_for_an_architecture_without_a_gpu() -> None:
    cubin = cuverify.load_kernel(SAXPY).compile("sm_120")
    assert (
        cubin.resources["saxpy"].registers > 0 and cubin.resources["saxpy"].spill_store_bytes == 0
    )
