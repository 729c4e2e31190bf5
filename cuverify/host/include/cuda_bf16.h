// The part of NVIDIA's cuda_bf16.h that kernels use, with its roundings.
#pragma once

#include "cuverify_host_half.h"

struct __nv_bfloat16 {
    unsigned short x;
    __nv_bfloat16() = default;
    __nv_bfloat16(float v) : x(cuverify_host::float_to_bfloat16(v)) {}
    __nv_bfloat16(double v) : x(cuverify_host::double_to_bfloat16(v)) {}
    __nv_bfloat16(int v) : __nv_bfloat16(static_cast<double>(v)) {}
    operator float() const { return cuverify_host::bfloat16_to_float(x); }
};
struct __align__(4) __nv_bfloat162 {
    __nv_bfloat16 x, y;
};
typedef __nv_bfloat16 nv_bfloat16;
typedef __nv_bfloat162 nv_bfloat162;

CUVERIFY_HALF_FUNCTIONS(__nv_bfloat16, __nv_bfloat162, bfloat16, bfloat162, bfloat16)
