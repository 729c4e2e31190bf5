// Numbers of partials: half precision, in units of a bound of their group that stands beside them in
// float32.
//
// Of bfloat16 they would have a rounding as large as that of the result, and of half precision alone not
// every number that a result can be. A number x of a group with bound b is kept as x UNITS / b: its 11
// bits are whole down to b / 2^29. Where a group has a number that is not finite, the bound is not, and
// the whole group becomes NaN.
#pragma once

#include "fp16.cuh"

namespace partial {

constexpr float UNITS = 32768.0f;
// Bounds are not below this, so that the quotient is finite.
constexpr float LEAST = 1e-33f;

// Bounds are compared as integers: as floats they are ordered alike, and NaN is the
// largest.
__device__ __forceinline__ int least() { return __float_as_int(LEAST); }

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

// The bound of numbers that are yet to be scaled, by at least 0.
__device__ __forceinline__ float scaled(int bound, float scale) {
    return __int_as_float(max(least(), __float_as_int(__int_as_float(bound) * scale)));
}

// Keeps pairs of numbers of a group with a bound, once they are scaled.
struct Pack {
    float factor;

    __device__ __forceinline__ Pack(float bound, float scale)
        : factor(__fdividef(UNITS, bound) * scale) {}

    __device__ __forceinline__ unsigned operator()(float first, float second) const {
        return fp16::pack(first * factor, second * factor);
    }
};

// What was kept, in units of its bound over UNITS.
__device__ __forceinline__ float first(unsigned pair) { return fp16::first(pair); }
__device__ __forceinline__ float second(unsigned pair) { return fp16::second(pair); }

}  // namespace partial
