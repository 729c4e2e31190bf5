// Every collective, conversion and instruction wrapper once, for both lanes to agree on.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "ptx.cuh"
#include "shared.cuh"
#include "vector.cuh"

// @kernel collectives
// @param out write int32 [16, 32]
// @param x   read  int32 [32]
extern "C" __global__ void collectives(int* out, const int* x) {
    constexpr unsigned all = 0xffffffffu;
    int lane = threadIdx.x, v = x[lane];
    out[0 * 32 + lane] = __shfl_sync(all, v, 7);
    out[1 * 32 + lane] = __shfl_sync(all, v, lane + 3, 8);
    out[2 * 32 + lane] = __shfl_xor_sync(all, v, 5);
    out[3 * 32 + lane] = __shfl_xor_sync(all, v, 12, 8);
    out[4 * 32 + lane] = __shfl_up_sync(all, v, 3);
    out[5 * 32 + lane] = __shfl_up_sync(all, v, 2, 4);
    out[6 * 32 + lane] = __shfl_down_sync(all, v, 9);
    out[7 * 32 + lane] = __shfl_down_sync(all, v, 1, 16);
    out[8 * 32 + lane] = static_cast<int>(__ballot_sync(all, v & 1));
    out[9 * 32 + lane] = __any_sync(all, v == x[31]);
    out[10 * 32 + lane] = __all_sync(all, v >= 0);
    out[11 * 32 + lane] = static_cast<int>(__match_any_sync(all, v % 5));
    out[12 * 32 + lane] = __shfl_sync(0x0000ffffu << (lane & 16), v, lane ^ 3);
    out[13 * 32 + lane] = __popc(v) + 100 * __clz(v) + 10000 * __ffs(v);
    out[14 * 32 + lane] = static_cast<int>(__brev(v) ^ __byte_perm(v, ~v, 0x5410));
    out[15 * 32 + lane] =
        static_cast<int>(__umulhi(v * 2654435761u, 40503u) + __funnelshift_l(v, ~v, lane));
}

// @kernel block_votes
// @param out write int32 [3, threads]
// @param x   read  int32 [threads]
// @param threads value int32
extern "C" __global__ void block_votes(int* out, const int* x, int threads) {
    int t = threadIdx.x;
    out[t] = __syncthreads_count(x[t] & 1);
    out[threads + t] = __syncthreads_and(x[t] >= 0);
    out[2 * threads + t] = __syncthreads_or(x[t] == 3);
}

// @kernel atomics
// @param out update int32 [9]
// @param old write  int32 [threads]
// @param threads value int32
extern "C" __global__ void atomics(int* out, int* old, int threads) {
    int t = threadIdx.x;
    old[t] = atomicAdd(&out[0], 1);
    atomicSub(&out[1], t);
    atomicMin(&out[2], t);
    atomicMax(&out[3], t);
    atomicAnd(&out[4], ~(1 << t % 31));
    atomicOr(&out[5], 1 << t % 31);
    atomicXor(&out[6], t);
    atomicInc(reinterpret_cast<unsigned*>(&out[7]), 9u);
    atomicCAS(&out[8], t, t + 1);
}

// @kernel round_halves
// @param bf16_bits write uint16 [n]
// @param fp16_bits write uint16 [n]
// @param back      write fp32 [2, n]
// @param x         read  fp32 [n]
// @param n value int32
extern "C" __global__ void round_halves(unsigned short* bf16_bits, unsigned short* fp16_bits,
                                        float* back, const float* x, int n) {
    for (int i = threadIdx.x; i < n; i += blockDim.x) {
        __nv_bfloat16 b = __float2bfloat16(x[i]);
        __half h = __float2half(x[i]);
        bf16_bits[i] = __bfloat16_as_ushort(b);
        fp16_bits[i] = __half_as_ushort(h);
        back[i] = __bfloat162float(b);
        back[n + i] = __half2float(h);
    }
}

// @kernel multiply_tiles
// @param d write fp32 [16, 8]
// @param a read  bf16 [16, K] align=16
// @param b read  bf16 [8, K]  align=16     columns of B, each contiguous
// One warp; K a multiple of 16.
#ifndef K
#define K 16
#endif
extern "C"
    __global__ void multiply_tiles(float* d, const __nv_bfloat16* a, const __nv_bfloat16* b) {
    constexpr int pitch = K + 8;
    SHARED_ARRAY(__nv_bfloat16, left, [16 * (K + 8)]);
    SHARED_ARRAY(__nv_bfloat16, right, [8 * (K + 8)]);
    int lane = threadIdx.x;
    for (int i = lane; i < 16 * K / 8; i += 32)
        ptx::cp_async16(&left[i / (K / 8) * pitch + i % (K / 8) * 8], &a[i * 8]);
    for (int i = lane; i < 8 * K / 8; i += 32)
        ptx::cp_async16(&right[i / (K / 8) * pitch + i % (K / 8) * 8], &b[i * 8]);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    __syncwarp();
    float sum[4] = {};
    for (int k = 0; k < K; k += 16) {
        unsigned fragment[4], pair[2];
        ptx::ldmatrix_x4(fragment, &left[lane % 16 * pitch + k + lane / 16 * 8]);
        const __nv_bfloat16* column = &right[lane / 4 * pitch + k + lane % 4 * 2];
        pair[0] = *reinterpret_cast<const unsigned*>(column);
        pair[1] = *reinterpret_cast<const unsigned*>(column + 8);
        ptx::mma_m16n8k16_bf16(sum, fragment, pair);
    }
    for (int i = 0; i < 4; ++i) d[(lane / 4 + i / 2 * 8) * 8 + lane % 4 * 2 + i % 2] = sum[i];
}

// @kernel transpose_tiles
// @param moved  write uint32 [32]
// @param loaded write uint32 [4, 32]
// @param x      read  uint16 [32, 8] align=16
extern "C" __global__ void transpose_tiles(unsigned* moved, unsigned* loaded,
                                           const unsigned short* x) {
    SHARED_ARRAY(unsigned short, tile, [32 * 8]);
    int lane = threadIdx.x;
    store128(&tile[lane * 8], load128_nc(&x[lane * 8]));
    __syncwarp();
    unsigned plain[4], transposed[4];
    ptx::ldmatrix_x4(plain, &tile[lane * 8]);
    ptx::ldmatrix_x4_trans(transposed, &tile[lane * 8]);
    moved[lane] = ptx::movmatrix_trans(plain[0]);
    for (int i = 0; i < 4; ++i) loaded[i * 32 + lane] = transposed[i];
}

// @kernel copy_with_fill
// @param out write uint32 [17, 4] align=16
// @param x   read  uint32 [17, 4] align=16
// Lane l copies l bytes and fills the rest of 16 with zeros.
extern "C" __global__ void copy_with_fill(unsigned* out, const unsigned* x) {
    SHARED_ARRAY(uint4, tile, [17]);
    int lane = threadIdx.x;
    if (lane < 17) ptx::cp_async16(&tile[lane], &x[lane * 4], lane);
    ptx::cp_async_commit();
    ptx::cp_async_wait<0>();
    if (lane < 17) store128(&out[lane * 4], load128(&tile[lane]));
}

// @kernel where_am_i
// @param out write int32 [*]
extern "C" __global__ void where_am_i(int* out) {
    unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
    unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    out[block * blockDim.x * blockDim.y * blockDim.z + thread] =
        static_cast<int>(threadIdx.z * 100 + threadIdx.y * 10 + threadIdx.x + 1000 * block);
}

// @kernel all_scalars
// @param out write fp64 [9]
// @param b value bool
// @param i8 value int8
// @param u16 value uint16
// @param i32 value int32
// @param u32 value uint32
// @param i64 value int64
// @param u64 value uint64
// @param f value fp32
// @param d value fp64
extern "C" __global__ void all_scalars(double* out, bool b, signed char i8, unsigned short u16,
                                       int i32, unsigned u32, long long i64, unsigned long long u64,
                                       float f, double d) {
    out[0] = b;
    out[1] = i8;
    out[2] = u16;
    out[3] = i32;
    out[4] = u32;
    out[5] = static_cast<double>(i64);
    out[6] = static_cast<double>(u64);
    out[7] = f;
    out[8] = d;
}
