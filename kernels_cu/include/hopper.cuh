// Instructions of sm_90a: asynchronous matrix products of a warpgroup (wgmma), barriers in shared
// memory, copies that arrive on them, registers that change hands. They have no host twins: a text
// that includes this runs on a GPU only, and its kernels say so by `@arch sm_90a`. It defines
// WGMMA_TYPES before, the types of the operands: "bf16.bf16" or "f16.f16".
//
// Shared memory is named by its 32-bit address. A matrix lies there in blocks of 64 columns with
// the 128-byte swizzle: row r of a block is 128 bytes from row r - 1, and its 16-byte piece p stands
// at place p ^ (r % 8). Blocks begin at multiples of 1,024 bytes.
#pragma once

#ifdef CUVERIFY_HOST
#error "hopper.cuh is for sm_90a: wgmma and mbarrier have no twin on the host lane"
#endif

#include "early.cuh"

namespace hopper {

__device__ __forceinline__ unsigned shared_address(const void* pointer) {
    return static_cast<unsigned>(__cvta_generic_to_shared(pointer));
}

// ---- barriers in shared memory: 8 bytes, a phase ends with the last of its arrivals -------------

__device__ __forceinline__ void barrier_init(unsigned barrier, int arrivals) {
    asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes the barriers that this thread has made visible to all proxies; a block barrier follows.
__device__ __forceinline__ void barrier_init_done() {
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void arrive(unsigned barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0];\n}" ::"r"(barrier)
                 : "memory");
}

__device__ __forceinline__ void arrive(unsigned barrier, int times) {
    asm volatile(
        "{\n.reg .b64 state;\nmbarrier.arrive.shared.b64 state, [%0], %1;\n}" ::"r"(barrier),
        "r"(times)
        : "memory");
}

// Arrives when all copies that this thread has started are complete.
__device__ __forceinline__ void arrive_after_copies(unsigned barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(barrier) : "memory");
}

// Until the phase of this parity has ended. Before the first phase, parity 1 counts as ended.
__device__ __forceinline__ void wait(unsigned barrier, int parity) {
    asm volatile(
        "{\n.reg .pred done;\n"
        "WAIT:\nmbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
        "@done bra DONE;\nbra WAIT;\nDONE:\n}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

// Whether it has, as all threads of the warp see it.
__device__ __forceinline__ bool has_ended(unsigned barrier, int parity) {
    int done;
    asm volatile(
        "{\n.reg .pred done;\n"
        "mbarrier.test_wait.parity.shared.b64 done, [%1], %2;\n"
        "selp.b32 %0, 1, 0, done;\n}"
        : "=r"(done)
        : "r"(barrier), "r"(parity)
        : "memory");
    return __all_sync(0xffffffffu, done);
}

// A barrier of 128 threads; numbers from 1.
__device__ __forceinline__ void sync_warpgroup(int number) {
    asm volatile("bar.sync %0, 128;" ::"r"(number) : "memory");
}

// ---- copies -------------------------------------------------------------------------------------

// 16 bytes from global to shared memory, zeros where `bytes` is 0.
__device__ __forceinline__ void copy16(unsigned to, const void* from, int bytes) {
    asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(bytes)
                 : "memory");
}

__device__ __forceinline__ void wait_for_copies() {
    asm volatile("cp.async.wait_all;" ::: "memory");
}

__device__ __forceinline__ void store16(unsigned to, uint4 value) {
    asm volatile("st.shared.v4.u32 [%0], {%1, %2, %3, %4};" ::"r"(to), "r"(value.x), "r"(value.y),
                 "r"(value.z), "r"(value.w)
                 : "memory");
}

__device__ __forceinline__ uint4 load16(unsigned from) {
    uint4 value;
    asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "r"(from)
                 : "memory");
    return value;
}

__device__ __forceinline__ void store8(unsigned to, float2 value) {
    asm volatile("st.shared.v2.f32 [%0], {%1, %2};" ::"r"(to), "f"(value.x), "f"(value.y)
                 : "memory");
}

__device__ __forceinline__ float2 load8(unsigned from) {
    float2 value;
    asm volatile("ld.shared.v2.f32 {%0, %1}, [%2];"
                 : "=f"(value.x), "=f"(value.y)
                 : "r"(from)
                 : "memory");
    return value;
}

// Four 8x8 matrices of 16-bit elements; lane l gives the address of row l % 8 of matrix l / 8.
__device__ __forceinline__ void load_matrices(unsigned (&to)[4], unsigned row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(row)
                 : "memory");
}

// ---- loads that stay where they stand -----------------------------------------------------------

// The compiler moves a load behind the branch that decides whether it is needed, and then one waits for
// the other. These start where they are written.

__device__ __forceinline__ int load_here(const int* from) {
    int value;
    asm volatile("ld.global.b32 %0, [%1];" : "=r"(value) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ long long load_here(const long long* from) {
    long long value;
    asm volatile("ld.global.b64 %0, [%1];" : "=l"(value) : "l"(from) : "memory");
    return value;
}

__device__ __forceinline__ int2 load_here(const int2* from) {
    int2 value;
    asm volatile("ld.global.v2.b32 {%0, %1}, [%2];"
                 : "=r"(value.x), "=r"(value.y)
                 : "l"(from)
                 : "memory");
    return value;
}

__device__ __forceinline__ int4 load_here(const int4* from) {
    int4 value;
    asm volatile("ld.global.v4.b32 {%0, %1, %2, %3}, [%4];"
                 : "=r"(value.x), "=r"(value.y), "=r"(value.z), "=r"(value.w)
                 : "l"(from)
                 : "memory");
    return value;
}

// ---- kernels that follow one another ------------------------------------------------------------

using early::launch_dependents;
using early::wait_for_dependency;

// ---- warpgroups ---------------------------------------------------------------------------------

template <int Registers>
__device__ __forceinline__ void take_registers() {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(Registers));
}

template <int Registers>
__device__ __forceinline__ void give_registers() {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(Registers));
}

// What this thread knows to be in shared memory, wgmma sees too.
__device__ __forceinline__ void proxy_fence() {
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

__device__ __forceinline__ void wgmma_fence() {
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
}

__device__ __forceinline__ void wgmma_commit() {
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
}

template <int Left>
__device__ __forceinline__ void wgmma_wait() {
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(Left) : "memory");
}

// Describes a matrix in shared memory: `next_block` bytes from one block of 64 columns to the next
// (for wgmma_transposed; else any multiple of 16), and 1,024 from 8 rows to the next 8.
__device__ __forceinline__ unsigned long long matrix(unsigned address, unsigned next_block) {
    return static_cast<unsigned long long>((address & 0x3ffff) >> 4) |
           static_cast<unsigned long long>(next_block >> 4) << 16 | 64ull << 32 | 1ull << 62;
}

// d[64 x N] += a[64 x 16] b, 16-bit floats in, float32 accumulated, of four consecutive warps; `d` and an `a`
// in registers as mma.m16n8k16 has them, warp w with rows 16 w to 16 w + 15. With `accumulate` false
// the products replace `d`. wgmma takes N rows of `b` by 16 columns, wgmma_transposed 16 rows by N.
#define ACC4(d, i) "+f"(d[i]), "+f"(d[(i) + 1]), "+f"(d[(i) + 2]), "+f"(d[(i) + 3])
#define ACC8(d, i) ACC4(d, i), ACC4(d, (i) + 4)

__device__ __forceinline__ void wgmma(float (&d)[16], const unsigned (&a)[4], unsigned long long b,
                                      bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %21, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32." WGMMA_TYPES
        " "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15},"
        " {%16, %17, %18, %19}, %20, p, 1, 1, 0;\n}"
        : ACC8(d, 0), ACC8(d, 8)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}

__device__ __forceinline__ void wgmma(float (&d)[16], unsigned long long a, unsigned long long b,
                                      bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %18, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n32k16.f32." WGMMA_TYPES
        " "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15},"
        " %16, %17, p, 1, 1, 0, 0;\n}"
        : ACC8(d, 0), ACC8(d, 8)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

__device__ __forceinline__ void wgmma(float (&d)[24], const unsigned (&a)[4], unsigned long long b,
                                      bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %29, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32." WGMMA_TYPES
        " "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
        "%17, %18, %19, %20, %21, %22, %23},"
        " {%24, %25, %26, %27}, %28, p, 1, 1, 0;\n}"
        : ACC8(d, 0), ACC8(d, 8), ACC8(d, 16)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}

__device__ __forceinline__ void wgmma(float (&d)[24], unsigned long long a, unsigned long long b,
                                      bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %26, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n48k16.f32." WGMMA_TYPES
        " "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
        "%17, %18, %19, %20, %21, %22, %23},"
        " %24, %25, p, 1, 1, 0, 0;\n}"
        : ACC8(d, 0), ACC8(d, 8), ACC8(d, 16)
        : "l"(a), "l"(b), "r"(static_cast<int>(accumulate)));
}

__device__ __forceinline__ void wgmma(float (&d)[32], const unsigned (&a)[4], unsigned long long b,
                                      bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %37, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n64k16.f32." WGMMA_TYPES
        " "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
        "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31},"
        " {%32, %33, %34, %35}, %36, p, 1, 1, 0;\n}"
        : ACC8(d, 0), ACC8(d, 8), ACC8(d, 16), ACC8(d, 24)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}

__device__ __forceinline__ void wgmma_transposed(float (&d)[64], const unsigned (&a)[4],
                                                 unsigned long long b, bool accumulate) {
    asm volatile(
        "{\n.reg .pred p;\nsetp.ne.b32 p, %69, 0;\n"
        "wgmma.mma_async.sync.aligned.m64n128k16.f32." WGMMA_TYPES
        " "
        "{%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, %16, "
        "%17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31, "
        "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, "
        "%47, %48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, "
        "%62, %63},"
        " {%64, %65, %66, %67}, %68, p, 1, 1, 1;\n}"
        : ACC8(d, 0), ACC8(d, 8), ACC8(d, 16), ACC8(d, 24), ACC8(d, 32), ACC8(d, 40), ACC8(d, 48),
          ACC8(d, 56)
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(static_cast<int>(accumulate)));
}

#undef ACC8
#undef ACC4

}  // namespace hopper
