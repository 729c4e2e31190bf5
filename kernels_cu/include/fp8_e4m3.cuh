// Numbers of 8 bits: a sign, 4 bits of exponent, 3 of fraction, up to 448; 0x7f and 0xff are NaN.
#pragma once

#include "ptx.cuh"

namespace fp8_e4m3 {

// The bfloat16 of two codes that stand in the upper bytes of the halves of a word; NaN is 480 here.
// Exponent and fraction, moved to where bfloat16 has them, are 2^-120 of the value: a product that
// is exact brings them back, numbers below the normal ones included.
__device__ __forceinline__ unsigned widen_finite(unsigned codes) {
    constexpr unsigned POWER_120 = 0x7b807b80u;
    return ptx::mul_bf16x2((codes & 0x80008000u) | (codes >> 4 & 0x07f007f0u), POWER_120);
}

// All ones in the halves whose code is NaN, but for the sign.
__device__ __forceinline__ unsigned nan_bits(unsigned codes) {
    const unsigned carries = ((codes & 0x7f007f00u) + 0x01000100u) & 0x80008000u;
    return carries - (carries >> 15);
}

// Not 0 where one of four codes is NaN.
__device__ __forceinline__ unsigned any_nan(unsigned codes) {
    return ((codes & 0x7f7f7f7fu) + 0x01010101u) & 0x80808080u;
}

// The bfloat16 of 16 codes, in their order.
__device__ __forceinline__ void widen(uint4 codes, uint4& first, uint4& second) {
    const unsigned words[4] = {codes.x, codes.y, codes.z, codes.w};
    unsigned pairs[8];
    unsigned nan = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        pairs[2 * i] = widen_finite(__byte_perm(words[i], 0, 0x1404));
        pairs[2 * i + 1] = widen_finite(__byte_perm(words[i], 0, 0x3424));
        nan |= any_nan(words[i]);
    }
    if (nan != 0) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            pairs[2 * i] |= nan_bits(__byte_perm(words[i], 0, 0x1404));
            pairs[2 * i + 1] |= nan_bits(__byte_perm(words[i], 0, 0x3424));
        }
    }
    first = make_uint4(pairs[0], pairs[1], pairs[2], pairs[3]);
    second = make_uint4(pairs[4], pairs[5], pairs[6], pairs[7]);
}

}  // namespace fp8_e4m3
