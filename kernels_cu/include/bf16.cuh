// bfloat16 in plain words: two in 32 bits, the first in the low half. No header of CUDA's is
// needed.
#pragma once

#ifdef CUVERIFY_HOST
#include "cuverify_host_half.h"
#endif

namespace bf16 {

// Both rounded to nearest even.
#ifdef CUVERIFY_HOST
inline unsigned pack(float first, float second) {
    return ::cuverify_host::float_to_bfloat16(first) |
           static_cast<unsigned>(::cuverify_host::float_to_bfloat16(second)) << 16;
}
#else
__device__ __forceinline__ unsigned pack(float first, float second) {
    unsigned pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}
#endif

__device__ __forceinline__ float first(unsigned pair) { return __uint_as_float(pair << 16); }
__device__ __forceinline__ float second(unsigned pair) {
    return __uint_as_float(pair & 0xffff0000u);
}

}  // namespace bf16
