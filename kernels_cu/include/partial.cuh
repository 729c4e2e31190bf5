// Numbers of partials: half precision, in units that stand beside them.
//
// Of bfloat16 they would have a rounding as large as that of the result, and of half precision alone not
// every number that a result can be. Numbers that share a unit have a bound, the largest sum of a few of
// their magnitudes, and it is 32,768 units: each keeps 11 bits down to a 2^29th of the bound. A unit
// may be rounded to bfloat16: its numbers are still below 65,504. It may also be larger than needed, so
// that its inverse is finite: numbers below 2^-125 are lost. Where a number is not finite, or a sum, the
// unit is not, and all numbers that share it become NaN.
#pragma once

#include "fp16.cuh"

namespace partial {

constexpr float LEAST_BOUND = 1.262177448e-29f;  // 2^-96
constexpr float UNIT_OF_BOUND = 1.0f / 32768.0f;

// Bounds are compared as integers: as floats they are ordered alike, and NaN is the largest.
__device__ __forceinline__ int raised(int bound, float a, float b) {
    return max(bound, __float_as_int(fabsf(a) + fabsf(b)));
}
__device__ __forceinline__ int raised(int bound, float a, float b, float c, float d) {
    return max(bound, __float_as_int(fabsf(a) + fabsf(b) + (fabsf(c) + fabsf(d))));
}

// The bound of the four lanes of a quad. All lanes of the warp take part.
__device__ __forceinline__ int of_quad(int bound) {
    bound = max(bound, __shfl_xor_sync(0xffffffffu, bound, 1));
    return max(bound, __shfl_xor_sync(0xffffffffu, bound, 2));
}

// The unit of numbers that are yet to be scaled, by at least 0.
__device__ __forceinline__ float unit(int bound, float scale) {
    const int scaled = __float_as_int(__int_as_float(bound) * scale);
    return __int_as_float(max(scaled, __float_as_int(LEAST_BOUND))) * UNIT_OF_BOUND;
}

// Scales pairs of numbers and keeps them in units between 2^-111 and 2^113, for which __fdividef is right.
struct Pack {
    float factor;

    // A scale of codes may be large where all numbers are 0; they must stay it.
    __device__ __forceinline__ Pack(float unit, float scale)
        : factor(fminf(__fdividef(1.0f, unit) * scale, 3.402823466e38f)) {}

    __device__ __forceinline__ unsigned operator()(float first, float second) const {
        return fp16::pack(first * factor, second * factor);
    }
};

// What was kept, in units.
__device__ __forceinline__ float first(unsigned pair) { return fp16::first(pair); }
__device__ __forceinline__ float second(unsigned pair) { return fp16::second(pair); }

}  // namespace partial
