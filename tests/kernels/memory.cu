// One access pattern a kernel, of which it is known what it asks of memory. A warp unless said.
#include "ptx.cuh"
#include "shared.cuh"
#include "vector.cuh"

#ifndef PITCH
#define PITCH 32
#endif

namespace {
__device__ __forceinline__ int lane() { return static_cast<int>(threadIdx.x) % 32; }

// The lane's number without its bit `bit`, so that lanes want the same in pairs; 5: the number itself,
// 6: 0. Of n, `bit` is n % 8 for the lower half warp and n / 8 for the upper.
__device__ __forceinline__ int paired(int n) {
    const int bit = lane() < 16 ? n % 8 : n / 8;
    return bit == 6 ? 0 : lane() >> (bit + 1) << bit | (lane() & ((1 << bit) - 1));
}
}  // namespace

// @kernel coalesced
// @param out write  fp32  [*]
// @param x   read   fp32  [*]
// @param n   value  int32
extern "C" __global__ void coalesced(float* out, const float* x, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        out[i] = x[i];  // [row]
    }
}

// @kernel strided
// @param out write  fp32  [*]
// @param x   read   fp32  [*]
// @param n   value  int32
extern "C" __global__ void strided(float* out, const float* x, int n) {
    out[lane()] = x[n * lane()];  // [row]
}

// @kernel shifted
// @param out write  fp32  [*]
// @param x   read   fp32  [*]
// @param n   value  int32
extern "C" __global__ void shifted(float* out, const float* x, int n) {
    out[lane()] = x[lane() + n];  // [row]
}

// Lanes that are off come back in the same turn of the loop.
// @kernel predicated
// @param out write  fp32  [*]
// @param x   read   fp32  [*]
// @param n   value  int32
extern "C" __global__ void predicated(float* out, const float* x, int n) {
    float sum = 0.0f;
#pragma unroll 1
    for (int turn = 0; turn < n; ++turn) {
        if (lane() % 2 == 0) {
            sum += x[turn * 32 + lane()];  // [row]
        }
    }
    out[lane()] = sum;
}

// Which lanes load changes from turn to turn, but they meet in each.
// @kernel alternating
// @param out write  fp32  [*]
// @param x   read   fp32  [*]
// @param n   value  int32
extern "C" __global__ void alternating(float* out, const float* x, int n) {
    float sum = 0.0f;
#pragma unroll 1
    for (int turn = 0; turn < n; ++turn) {
        if (lane() % 2 == turn % 2) {
            sum += x[turn * 32 + lane()];  // [row]
        }
        __syncwarp();
    }
    out[lane()] = sum;
}

// @kernel column
// @param out write  fp32  [*]
// @param x   read   fp32  [*]
// @param n   value  int32
extern "C" __global__ void column(float* out, const float* x, int n) {
    SHARED_ARRAY(float, tile, [32][PITCH]);
#pragma unroll 1
    for (int row = 0; row < 32; ++row) {
        tile[row][lane()] = x[row * 32 + lane()];  // [fill]
    }
    __syncthreads();
    out[lane()] = tile[lane()][n];  // [row]
}

// @kernel broadcast
// @param out write  fp32  [*]
// @param x   read   fp32  [*]
// @param n   value  int32
extern "C" __global__ void broadcast(float* out, const float* x, int n) {
    SHARED_ARRAY(float, tile, [32]);
    tile[lane()] = x[lane()];
    __syncthreads();
    out[lane()] = tile[n];  // [row]
}

// @kernel pairs
// @param out write  fp32  [*]
// @param x   read   fp32  [*]
// @param n   value  int32
extern "C" __global__ void pairs(float* out, const float* x, int n) {
    SHARED_ARRAY(float2, tile, [32]);
    tile[lane()] = reinterpret_cast<const float2*>(x)[lane()];  // [fill]
    __syncthreads();
    const float2 pair = tile[paired(n)];  // [row]
    out[lane()] = pair.x + pair.y;
}

// As above, 16 bytes each.
// @kernel quads
// @param out write  fp32  [*]
// @param x   read   fp32  [*]
// @param n   value  int32
extern "C" __global__ void quads(float* out, const float* x, int n) {
    SHARED_ARRAY(uint4, tile, [32]);
    store128(tile + lane(), load128(x + lane() * 4));  // [fill]
    __syncthreads();
    store128(out + lane() * 4, load128(tile + paired(n)));  // [row]
}

// Rows of 16 bytes, PITCH floats apart.
// @kernel quad_rows
// @param out write  fp32  [*]
// @param x   read   fp32  [*]
// @param n   value  int32
extern "C" __global__ void quad_rows(float* out, const float* x, int n) {
    SHARED_ARRAY(float, tile, [32 * PITCH]);
#pragma unroll 1
    for (int i = lane(); i < 32 * PITCH; i += 32) {
        tile[i] = x[i];
    }
    __syncthreads();
    store128(out + lane() * 4, load128(tile + lane() * PITCH + n));  // [row]
}

// Eight rows of 16 bytes are one matrix; pieces of 16 bytes change places by `n` if it is 7.
// @kernel matrices
// @param out write  fp32  [*]
// @param x   read   fp32  [*]
// @param n   value  int32
extern "C" __global__ void matrices(float* out, const float* x, int n) {
    SHARED_ARRAY(float, tile, [32 * PITCH]);
#pragma unroll 1
    for (int i = lane(); i < 32 * PITCH; i += 32) {
        tile[i] = x[i];
    }
    __syncthreads();
    unsigned to[4];
    const int row = lane();
    ptx::ldmatrix_x4(to, tile + row * PITCH + (row & n) * 4);  // [row]
    store128(out + lane() * 4, make_uint4(to[0], to[1], to[2], to[3]));
}

// Rows from n on become zeros and are not read.
// @kernel async_rows
// @param out write  fp32  [*]
// @param x   read   fp32  [*]
// @param n   value  int32
extern "C" __global__ void async_rows(float* out, const float* x, int n) {
    SHARED_ARRAY(float, tile, [32 * PITCH]);
    ptx::cp_async16(tile + lane() * PITCH, x + lane() * 4, lane() < n ? 16 : 0);  // [row]
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncthreads();
    out[lane()] = tile[lane() * PITCH];
}

// n = 0: all lanes add to one word; 1: each to its own.
// @kernel shared_atomics
// @param out write  fp32  [*]
// @param x   read   fp32  [*]
// @param n   value  int32
extern "C" __global__ void shared_atomics(float* out, const float* x, int n) {
    SHARED_ARRAY(int, tile, [32]);
    tile[lane()] = 0;
    __syncthreads();
    const int value = __float_as_int(x[lane()]);
    out[lane()] = static_cast<float>(atomicAdd(tile + lane() * n, value));  // [row]
}

// As above, in global memory.
// @kernel global_atomics
// @param out update int32 [*]
// @param x   read   fp32  [*]
// @param n   value  int32
extern "C" __global__ void global_atomics(int* out, const float* x, int n) {
    out[32 + lane()] = atomicAdd(out + lane() * n, __float_as_int(x[lane()]));  // [row]
}
