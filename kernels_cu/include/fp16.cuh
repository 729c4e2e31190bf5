// Half precision in plain words: two in 32 bits, the first in the low half. No header of CUDA's is
// needed.
#pragma once

#ifdef CUVERIFY_HOST
#include "cuverify_host_half.h"
#endif

namespace fp16 {

// Both rounded to nearest even.
#ifdef CUVERIFY_HOST
inline unsigned pack(float first, float second) {
    return ::cuverify_host::float_to_half(first) |
           static_cast<unsigned>(::cuverify_host::float_to_half(second)) << 16;
}
inline float first(unsigned pair) {
    return ::cuverify_host::half_to_float(static_cast<unsigned short>(pair & 0xffffu));
}
inline float second(unsigned pair) {
    return ::cuverify_host::half_to_float(static_cast<unsigned short>(pair >> 16));
}
#else
__device__ __forceinline__ unsigned pack(float first, float second) {
    unsigned pair;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
    return pair;
}

__device__ __forceinline__ float first(unsigned pair) {
    float value;
    asm("{\n.reg .f16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, low;\n}"
        : "=f"(value)
        : "r"(pair));
    return value;
}

__device__ __forceinline__ float second(unsigned pair) {
    float value;
    asm("{\n.reg .f16 low, high;\nmov.b32 {low, high}, %1;\ncvt.f32.f16 %0, high;\n}"
        : "=f"(value)
        : "r"(pair));
    return value;
}
#endif

}  // namespace fp16
