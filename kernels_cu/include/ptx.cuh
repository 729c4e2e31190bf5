// The instructions that CUDA C++ has no words for. Kernels contain no asm of their own; each wrapper
// here has a host twin. Fragment layouts are those of the PTX ISA.
#pragma once

namespace ptx {

#ifdef CUVERIFY_HOST

}  // namespace ptx
#include "cuverify_host_ptx.h"
namespace ptx {

// d[16x8] += a[16x16] b[16x8], bf16 in, float32 accumulated; all 32 lanes.
inline void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                              CUVERIFY_SITE) {
    ::cuverify_host::mma_m16n8k16<::cuverify_host::Narrow::bf16>(d, a, b, CUVERIFY_GIVEN);
}
// Likewise of half precision.
inline void mma_m16n8k16_fp16(float (&d)[4], const unsigned (&a)[4], const unsigned (&b)[2],
                              CUVERIFY_SITE) {
    ::cuverify_host::mma_m16n8k16<::cuverify_host::Narrow::fp16>(d, a, b, CUVERIFY_GIVEN);
}
// Two products of bfloat16, rounded to nearest even; nothing is flushed to zero.
inline unsigned mul_bf16x2(unsigned a, unsigned b) {
    return ::cuverify_host::multiply_bfloat16(a, b) |
           ::cuverify_host::multiply_bfloat16(a >> 16, b >> 16) << 16;
}
// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
inline void ldmatrix_x4(unsigned (&to)[4], const void* row, CUVERIFY_SITE) {
    ::cuverify_host::load_matrices<4, false>(to, row, CUVERIFY_GIVEN);
}
inline void ldmatrix_x4_trans(unsigned (&to)[4], const void* row, CUVERIFY_SITE) {
    ::cuverify_host::load_matrices<4, true>(to, row, CUVERIFY_GIVEN);
}
// The transpose of one 8x8 matrix of 16-bit elements held across the warp.
inline unsigned movmatrix_trans(unsigned value, CUVERIFY_SITE) {
    return ::cuverify_host::transpose_matrix(value, CUVERIFY_GIVEN);
}
// 16 bytes from global to shared memory, of which the last `16 - source_bytes` become zero.
inline void cp_async16(void* to, const void* from, int source_bytes = 16, CUVERIFY_SITE) {
    ::cuverify_host::async_copy(to, from, 16, source_bytes, CUVERIFY_GIVEN);
}
inline void cp_async_commit() { ::cuverify_host::async_commit(); }
// Until at most `Left` of this thread's committed groups are in flight.
template <int Left>
inline void cp_async_wait() {
    ::cuverify_host::async_wait(Left);
}
// Within 2 ulp on the device; a result below the normal numbers is 0 there, and so it is here.
inline float exp2_approx(float value) {
    float power = exp2f(value);
    return power < 0x1p-126f ? 0.0f : power;
}

#else

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

__device__ __forceinline__ void mma_m16n8k16_bf16(float (&d)[4], const unsigned (&a)[4],
                                                  const unsigned (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ void mma_m16n8k16_fp16(float (&d)[4], const unsigned (&a)[4],
                                                  const unsigned (&b)[2]) {
    asm volatile(
        "mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, "
        "{%8, %9}, {%0, %1, %2, %3};"
        : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

__device__ __forceinline__ unsigned mul_bf16x2(unsigned a, unsigned b) {
    unsigned product;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
    return product;
}

__device__ __forceinline__ void ldmatrix_x4(unsigned (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

__device__ __forceinline__ void ldmatrix_x4_trans(unsigned (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(shared_address(row))
                 : "memory");
}

__device__ __forceinline__ unsigned movmatrix_trans(unsigned value) {
    unsigned transposed;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(value));
    return transposed;
}

__device__ __forceinline__ void cp_async16(void* to, const void* from, int source_bytes = 16) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared_address(to)),
                 "l"(from), "r"(source_bytes)
                 : "memory");
}

__device__ __forceinline__ void cp_async_commit() {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

template <int Left>
__device__ __forceinline__ void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(Left) : "memory");
}

__device__ __forceinline__ float exp2_approx(float value) {
    float power;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(power) : "f"(value));
    return power;
}

#endif

}  // namespace ptx
