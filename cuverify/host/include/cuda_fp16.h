// The part of NVIDIA's cuda_fp16.h that kernels use, with its roundings.
#pragma once

#include "cuverify_host_half.h"

struct __half {
    unsigned short x;
    __half() = default;
    __half(float v) : x(cuverify_host::float_to_half(v)) {}
    __half(double v) : x(cuverify_host::double_to_half(v)) {}
    __half(int v) : __half(static_cast<double>(v)) {}
    operator float() const { return cuverify_host::half_to_float(x); }
};
struct __align__(4) __half2 {
    __half x, y;
};
typedef __half half;
typedef __half2 half2;

CUVERIFY_HALF_FUNCTIONS(__half, __half2, half, half2, half)
