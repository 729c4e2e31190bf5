// Faults that the compilers' sanitizers must find, each with a clean twin: BUG is 1 or 0.
#include "shared.cuh"
#include "vector.cuh"

#ifndef BUG
#define BUG 0
#endif

// @kernel heap_overflow
// @param out update fp32 [64]
// @block 64
extern "C" __global__ void heap_overflow(float* out) {
    out[threadIdx.x + BUG] = 1;  // [address-sanitizer]
}

// @kernel read_before_the_start
// @param out update fp32 [64]
// @param x   read   fp32 [64]
// @block 64
extern "C" __global__ void read_before_the_start(float* out, const float* x) {
    out[threadIdx.x] = x[static_cast<int>(threadIdx.x) - BUG];  // [address-sanitizer]
}

// @kernel shared_overflow
// @param out update fp32 [64]
// @block 64
extern "C" __global__ void shared_overflow(float* out) {
    SHARED_ARRAY(float, mine, [64]);
    SHARED_ARRAY(float, other, [64]);
    other[threadIdx.x] = 2;
    float* at = mine;
    at[threadIdx.x + BUG] = 1;  // [address-sanitizer]
    __syncthreads();
    out[threadIdx.x] = mine[63 - threadIdx.x] + other[threadIdx.x];
}

// @kernel own_array_overflow
// @param out update fp32 [64]
// @param x   read   fp32 [64]
// @block 64
extern "C" __global__ void own_array_overflow(float* out, const float* x) {
    float few[4] = {};
    float* at = few;
    int count = x[threadIdx.x] < 1e6f ? 4 + BUG : 0;
    for (int i = 0; i < count; ++i) at[i] = x[i];  // [address-sanitizer]
    out[threadIdx.x] = few[threadIdx.x % 4];
}

// @kernel wide_store_overflow
// @param out update fp32 [64] align=16
// @block 64
extern "C" __global__ void wide_store_overflow(float* out) {
    if (threadIdx.x < 16 + BUG)
        store128(out + 4 * threadIdx.x, make_uint4(1, 2, 3, 4));  // [address-sanitizer]
}

// @kernel atomic_overflow
// @param out update fp32 [64]
// @block 64
extern "C" __global__ void atomic_overflow(float* out) {
    atomicAdd(out + threadIdx.x + BUG, 1.0f);  // [address-sanitizer]
}

// @kernel read_in_a_gap
// @param out update fp32 [64]
// @param x   read   fp32 [8, 6] stride=(8, 1)
// @block 64
extern "C" __global__ void read_in_a_gap(float* out, const float* x) {
    unsigned at = threadIdx.x % 8 * 8 + 5;
    if (threadIdx.x < 8 && threadIdx.x % 8 < 7)
        out[threadIdx.x] = x[at + BUG];  // [address-sanitizer]
}

// @kernel null_pointer
// @param out update fp32 [64]
// @param x?  read   fp32 [64]
// @block 64
extern "C" __global__ void null_pointer(float* out, const float* x) {
    if (BUG || x != nullptr)
        out[threadIdx.x] = *static_cast<const volatile float*>(x);  // [address-sanitizer]
}

// @kernel shift_too_far
// @param out update int32 [64]
// @block 64
extern "C" __global__ void shift_too_far(int* out) {
    int distance = static_cast<int>(threadIdx.x) / 3 + (BUG ? 20 : 9);
    out[threadIdx.x] = 1 << distance;  // [undefined-behaviour]
}

// @kernel signed_overflow
// @param out update int32 [64]
// @block 64
extern "C" __global__ void signed_overflow(int* out) {
    int large = BUG ? 2147483600 : 2147483000;
    out[threadIdx.x] = large + static_cast<int>(threadIdx.x);  // [undefined-behaviour]
}

// @kernel misaligned
// @param out update fp32 [64]
// @param x   read   fp32 [64]
// @block 64
extern "C" __global__ void misaligned(float* out, const float* x) {
    if (threadIdx.x < 60) {
        const char* at = reinterpret_cast<const char*>(x + threadIdx.x) + 2 * BUG;
        out[threadIdx.x] = *reinterpret_cast<const float*>(at);  // [undefined-behaviour]
    }
}

// @kernel row_overflow
// @param out update fp32 [64]
// @block 64
extern "C" __global__ void row_overflow(float* out) {
    SHARED_ARRAY(float, tile, [4][16]);
    int t = threadIdx.x;
    tile[t / 16][t % 16] = 1;
    __syncthreads();
    out[t] = tile[t / 17][t % (16 + BUG)];  // [undefined-behaviour]
}

// @kernel number_too_large
// @param out update int32 [64]
// @block 64
extern "C" __global__ void number_too_large(int* out) {
    float large = BUG ? 3e9f : 2e9f;
    out[threadIdx.x] =
        static_cast<int>(large + static_cast<float>(threadIdx.x));  // [undefined-behaviour]
}

// @kernel deadlock
// @param out update fp32 [64]
// @block 64
extern "C" __global__ void deadlock(float* out) {
    if (threadIdx.x < 40)
        __syncthreads();  // [deadlock]
    else if (BUG)
        __syncwarp();
    out[threadIdx.x] = 1;
    if (!BUG && threadIdx.x < 40) return;
}

// @kernel busy
// @param out    write int32 [blocks, 256]
// @param rounds value int32
// @param blocks value int32
// @block 256
// Frames come and go on every thread's stack, and threads end inside them, block after block.
__device__ int deeper(int* from, int depth) {
    int here[8];
    for (int i = 0; i < 8; ++i) here[i] = from[i] + depth;
    if (depth == 0) {
        __syncthreads();
        return here[threadIdx.x % 8];
    }
    return deeper(here, depth - 1);
}
extern "C" __global__ void busy(int* out, int rounds, int blocks) {
    SHARED_ARRAY(int, sums, [256]);
    int start[8] = {1, 2, 3, 4, 5, 6, 7, 8};
    int sum = 0;
    for (int round = 0; round < rounds; ++round) {
        sum += deeper(start, round % 4);
        sums[threadIdx.x] = sum;
        __syncthreads();
        sum += sums[255 - threadIdx.x];
        __syncthreads();
        sum += __shfl_xor_sync(0xffffffffu, sum & 7, 5);
    }
    out[blockIdx.x * 256 + threadIdx.x] = sum;
}

// @kernel through_a_table
// @param tables read uint64 [2]
// @param out    update fp32 [64]
// @reach tables update
// @block 64
extern "C" __global__ void through_a_table(float* const* tables, float* out) {
    int t = threadIdx.x;
    out[t] = tables[0][t] + tables[1][t + BUG];  // [address-sanitizer]
    tables[0][t] = 7;
}

// @kernel endless
// @param go update int32 [1]
extern "C" __global__ void endless(int* go) {
    while (*static_cast<volatile int*>(go) == 0) {  // [time-limit]
    }
}
