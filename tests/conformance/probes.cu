// What a GPU does with each instruction wrapper and each intrinsic whose host twin is our own: inputs
// in, bits out, recorded on hardware and replayed by the host lane. See cuverify/conformance.py.
#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "bf16.cuh"
#include "fp16.cuh"
#include "ptx.cuh"
#include "shared.cuh"
#include "thread.cuh"
#include "vector.cuh"

#define ALL 0xffffffffu

// ---- one warp a block, one block a tile -----------------------------------------------------------

// @kernel mma
// @param d write fp32   [n, 32, 4]
// @param a read  uint32 [n, 32, 4]     fragments: two bf16 a word
// @param b read  uint32 [n, 32, 2]
// @param c read  fp32   [n, 32, 4]
// @param n value int32
// @block 32
extern "C" __global__ void mma(float* d, const unsigned* a, const unsigned* b, const float* c,
                               int n) {
    unsigned at = blockIdx.x * 32 + threadIdx.x, left[4], right[2];
    float sum[4];
    for (int i = 0; i < 4; ++i) left[i] = a[at * 4 + i], sum[i] = c[at * 4 + i];
    for (int i = 0; i < 2; ++i) right[i] = b[at * 2 + i];
    ptx::mma_m16n8k16_bf16(sum, left, right);
    for (int i = 0; i < 4; ++i) d[at * 4 + i] = sum[i];
}

// @kernel matrices
// @param plain      write uint32 [n, 32, 4]
// @param transposed write uint32 [n, 32, 4]
// @param moved      write uint32 [n, 32]
// @param x          read  uint32 [n, 32, 4] align=16
// @param row        read  int32  [n, 32]         which row each lane points at
// @param n value int32
// @block 32
extern "C" __global__ void matrices(unsigned* plain, unsigned* transposed, unsigned* moved,
                                    const unsigned* x, const int* row, int n) {
    SHARED_ARRAY(uint4, tile, [32]);
    unsigned lane = threadIdx.x, at = blockIdx.x * 32 + lane;
    store128(&tile[lane], load128(&x[at * 4]));
    __syncwarp();
    unsigned to[4];
    ptx::ldmatrix_x4(to, &tile[row[at]]);
    for (int i = 0; i < 4; ++i) plain[at * 4 + i] = to[i];
    moved[at] = ptx::movmatrix_trans(to[0]);
    ptx::ldmatrix_x4_trans(to, &tile[row[at]]);
    for (int i = 0; i < 4; ++i) transposed[at * 4 + i] = to[i];
}

// @kernel shuffles
// @param out  write uint32 [n, 8, 32]
// @param wide write uint64 [n, 2, 32]
// @param x    read  uint32 [n, 32]
// @param y    read  uint64 [n, 32]
// @param from read  int32  [n, 32]        any number
// @param by   read  int32  [n]            any number: how far, the same in all lanes
// @param n value int32
// @block 32
extern "C" __global__ void shuffles(unsigned* out, unsigned long long* wide, const unsigned* x,
                                    const unsigned long long* y, const int* from, const int* by,
                                    int n) {
    unsigned tile = blockIdx.x, lane = threadIdx.x;
    unsigned v = x[tile * 32 + lane];
    int source = from[tile * 32 + lane], distance = by[tile];
    int width = 2 << tile % 5;
    unsigned* to = out + tile * 8 * 32 + lane;
    to[0 * 32] = __shfl_sync(ALL, v, source);
    to[1 * 32] = __shfl_sync(ALL, v, source, width);
    to[2 * 32] = __shfl_xor_sync(ALL, v, distance);
    to[3 * 32] = __shfl_xor_sync(ALL, v, distance, width);
    to[4 * 32] = __shfl_up_sync(ALL, v, distance);
    to[5 * 32] = __shfl_up_sync(ALL, v, distance, width);
    to[6 * 32] = __shfl_down_sync(ALL, v, distance);
    to[7 * 32] = __shfl_down_sync(ALL, v, distance, width);
    wide[tile * 64 + lane] = __shfl_sync(ALL, y[tile * 32 + lane], source);
    wide[tile * 64 + 32 + lane] =
        __double_as_longlong(__shfl_xor_sync(ALL, __longlong_as_double(y[tile * 32 + lane]), 5));
}

// @kernel votes
// @param out  write uint32 [n, 12, 32]     0 in lanes that the mask leaves out
// @param x    read  int32  [n, 32]
// @param mask read  uint32 [n]
// @param n value int32
// @block 32
extern "C" __global__ void votes(unsigned* out, const int* x, const unsigned* mask, int n) {
    unsigned tile = blockIdx.x, lane = threadIdx.x, m = mask[tile];
    int v = x[tile * 32 + lane];
    unsigned u = static_cast<unsigned>(v);
    unsigned* to = out + tile * 12 * 32 + lane;
    for (int i = 0; i < 12; ++i) to[i * 32] = 0;
    if (m >> lane & 1) {
        to[0 * 32] = __ballot_sync(m, v & 1);
        to[1 * 32] = __any_sync(m, (v & 7) == 1) != 0;
        to[2 * 32] = __all_sync(m, (v & 7) != 1) != 0;
        to[3 * 32] = __match_any_sync(m, v & 3);
        to[4 * 32] = __reduce_add_sync(m, u);
        to[5 * 32] = static_cast<unsigned>(__reduce_min_sync(m, v));
        to[6 * 32] = static_cast<unsigned>(__reduce_max_sync(m, v));
        to[7 * 32] = __reduce_min_sync(m, u);
        to[8 * 32] = __reduce_max_sync(m, u);
        to[9 * 32] = __reduce_and_sync(m, u);
        to[10 * 32] = __reduce_or_sync(m, u);
        to[11 * 32] = __reduce_xor_sync(m, u);
    }
}

// @kernel block_votes
// @param out write int32 [n, 4, 64]
// @param x   read  int32 [n, 64]
// @param n value int32
// @block 64
extern "C" __global__ void block_votes(int* out, const int* x, int n) {
    unsigned thread = threadIdx.x;
    int v = x[blockIdx.x * 64 + thread];
    int* to = out + blockIdx.x * 256 + thread;
    to[0] = __syncthreads_count(v & 1);
    to[64] = __syncthreads_and(v & 62) != 0;
    to[128] = __syncthreads_or(v == 33) != 0;
    to[192] = thread_anew();
}

// ---- one element a thread -------------------------------------------------------------------------

#define FOR_EACH(i) \
    for (int i = blockIdx.x * blockDim.x + threadIdx.x; i < n; i += gridDim.x * blockDim.x)

// @kernel async_copies
// @param out   write uint32 [n, 4] align=16
// @param x     read  uint32 [n, 4] align=16
// @param bytes read  int32  [n]              0 to 16 of them come from x
// @param n value int32
// @block 32
extern "C" __global__ void async_copies(unsigned* out, const unsigned* x, const int* bytes, int n) {
    SHARED_ARRAY(uint4, tile, [32]);
    int lane = threadIdx.x;
    for (int base = blockIdx.x * 32; base < n; base += gridDim.x * 32) {
        int at = base + lane;
        if (at < n) {
            ptx::cp_async16(&tile[lane], &x[at * 4], bytes[at]);
            ptx::cp_async_commit();
            ptx::cp_async_wait<0>();
            store128(&out[at * 4], load128(&tile[lane]));
        }
    }
}

// @kernel wide_copies
// @param out write uint32 [3, n, 4] align=16
// @param x   read  uint32 [n, 4]    align=16
// @param n value int32
extern "C" __global__ void wide_copies(unsigned* out, const unsigned* x, int n) {
    FOR_EACH(i) {
        store128(&out[(0 * n + i) * 4], load128(&x[i * 4]));
        store128(&out[(1 * n + i) * 4], load128_nc(&x[i * 4]));
        reinterpret_cast<uint4*>(out)[2 * n + i] = __ldg(reinterpret_cast<const uint4*>(x) + i);
    }
}

// @kernel exponentials
// @param y write fp32 [n]
// @param x read  fp32 [n]
// @param n value int32
extern "C" __global__ void exponentials(float* y, const float* x, int n) {
    FOR_EACH(i) { y[i] = ptx::exp2_approx(x[i]); }
}

// @kernel narrow
// @param bits write uint16 [6, n]
// @param pair write uint32 [3, n]
// @param x    read  fp32 [n]
// @param n value int32
extern "C" __global__ void narrow(unsigned short* bits, unsigned* pair, const float* x, int n) {
    FOR_EACH(i) {
        float next = x[i + 1 < n ? i + 1 : 0];
        bits[0 * n + i] = __bfloat16_as_ushort(__float2bfloat16(x[i]));
        bits[1 * n + i] = __bfloat16_as_ushort(__float2bfloat16_rn(x[i]));
        bits[2 * n + i] = __bfloat16_as_ushort(__nv_bfloat16(x[i]));
        bits[3 * n + i] = __half_as_ushort(__float2half(x[i]));
        bits[4 * n + i] = __half_as_ushort(__float2half_rn(x[i]));
        bits[5 * n + i] = __half_as_ushort(__half(x[i]));
        pair[0 * n + i] = bf16::pack(x[i], next);
        __nv_bfloat162 two = __floats2bfloat162_rn(x[i], next);
        pair[1 * n + i] =
            __bfloat16_as_ushort(two.x) | static_cast<unsigned>(__bfloat16_as_ushort(two.y)) << 16;
        __half2 halves = __floats2half2_rn(x[i], next);
        pair[2 * n + i] =
            __half_as_ushort(halves.x) | static_cast<unsigned>(__half_as_ushort(halves.y)) << 16;
    }
}

// @kernel narrow_others
// @param bits write uint16 [4, n]
// @param x    read  fp64  [n]
// @param k    read  int32 [n]
// @param n value int32
extern "C" __global__ void narrow_others(unsigned short* bits, const double* x, const int* k,
                                         int n) {
    FOR_EACH(i) {
        bits[0 * n + i] = __bfloat16_as_ushort(__nv_bfloat16(x[i]));
        bits[1 * n + i] = __half_as_ushort(__half(x[i]));
        bits[2 * n + i] = __bfloat16_as_ushort(__nv_bfloat16(k[i]));
        bits[3 * n + i] = __half_as_ushort(__half(k[i]));
    }
}

// @kernel widen
// @param y write fp32   [2, n]
// @param x read  uint16 [n]
// @param n value int32
extern "C" __global__ void widen(float* y, const unsigned short* x, int n) {
    FOR_EACH(i) {
        y[0 * n + i] = __bfloat162float(__ushort_as_bfloat16(x[i]));
        y[1 * n + i] = __half2float(__ushort_as_half(x[i]));
    }
}

// @kernel widen_pairs
// @param y write fp32   [8, n]
// @param x read  uint32 [n]
// @param n value int32
extern "C" __global__ void widen_pairs(float* y, const unsigned* x, int n) {
    FOR_EACH(i) {
        unsigned short low = static_cast<unsigned short>(x[i]);
        unsigned short high = static_cast<unsigned short>(x[i] >> 16);
        y[0 * n + i] = bf16::first(x[i]);
        y[1 * n + i] = bf16::second(x[i]);
        float2 two = __bfloat1622float2(
            make_bfloat162(__ushort_as_bfloat16(low), __ushort_as_bfloat16(high)));
        y[2 * n + i] = two.x;
        y[3 * n + i] = two.y;
        __half2 halves = make_half2(__ushort_as_half(low), __ushort_as_half(high));
        y[4 * n + i] = __low2float(halves);
        y[5 * n + i] = __high2float(halves);
        float2 both = __half22float2(halves);
        y[6 * n + i] = both.x;
        y[7 * n + i] = both.y;
    }
}

// @kernel half_arithmetic
// @param bf16_bits write uint16 [5, n]
// @param fp16_bits write uint16 [5, n]
// @param a read uint16 [n]
// @param b read uint16 [n]
// @param n value int32
extern "C" __global__ void half_arithmetic(unsigned short* bf16_bits, unsigned short* fp16_bits,
                                           const unsigned short* a, const unsigned short* b,
                                           int n) {
    FOR_EACH(i) {
        __nv_bfloat16 x = __ushort_as_bfloat16(a[i]), y = __ushort_as_bfloat16(b[i]);
        bf16_bits[0 * n + i] = __bfloat16_as_ushort(x + y);
        bf16_bits[1 * n + i] = __bfloat16_as_ushort(x - y);
        bf16_bits[2 * n + i] = __bfloat16_as_ushort(x * y);
        bf16_bits[3 * n + i] = __bfloat16_as_ushort(x / y);
        bf16_bits[4 * n + i] = __bfloat16_as_ushort(-x);
        __half u = __ushort_as_half(a[i]), v = __ushort_as_half(b[i]);
        fp16_bits[0 * n + i] = __half_as_ushort(u + v);
        fp16_bits[1 * n + i] = __half_as_ushort(u - v);
        fp16_bits[2 * n + i] = __half_as_ushort(u * v);
        fp16_bits[3 * n + i] = __half_as_ushort(u / v);
        fp16_bits[4 * n + i] = __half_as_ushort(-u);
    }
}

// @kernel integers
// @param out  write uint32 [13, n]
// @param wide write uint64 [5, n]
// @param a    read uint32 [n]
// @param b    read uint32 [n]
// @param s    read uint32 [n]
// @param n value int32
extern "C" __global__ void integers(unsigned* out, unsigned long long* wide, const unsigned* a,
                                    const unsigned* b, const unsigned* s, int n) {
    FOR_EACH(i) {
        unsigned x = a[i], y = b[i];
        int p = static_cast<int>(x), q = static_cast<int>(y);
        out[0 * n + i] = static_cast<unsigned>(__popc(x));
        out[1 * n + i] = static_cast<unsigned>(__clz(p));
        out[2 * n + i] = static_cast<unsigned>(__ffs(p));
        out[3 * n + i] = __brev(x);
        out[4 * n + i] = __byte_perm(x, y, s[i]);
        out[5 * n + i] = __funnelshift_l(x, y, s[i]);
        out[6 * n + i] = __funnelshift_r(x, y, s[i]);
        out[7 * n + i] = __umulhi(x, y);
        out[8 * n + i] = static_cast<unsigned>(__mulhi(p, q));
        out[9 * n + i] = min(x, y);
        out[10 * n + i] = max(x, y);
        out[11 * n + i] = static_cast<unsigned>(min(p, q));
        out[12 * n + i] = static_cast<unsigned>(max(p, q));
        unsigned long long v = static_cast<unsigned long long>(x) << 32 | y;
        long long w = static_cast<long long>(v);
        wide[0 * n + i] = __umul64hi(v, v ^ s[i]);
        wide[1 * n + i] = __brevll(v);
        wide[2 * n + i] = static_cast<unsigned long long>(__popcll(v));
        wide[3 * n + i] = static_cast<unsigned long long>(__clzll(w));
        wide[4 * n + i] = static_cast<unsigned long long>(__ffsll(w));
    }
}

// @kernel bit_casts
// @param out  write uint32 [2, n]
// @param wide write uint64 [1, n]
// @param x    read  uint32 [n]
// @param y    read  uint64 [n]
// @param n value int32
extern "C" __global__ void bit_casts(unsigned* out, unsigned long long* wide, const unsigned* x,
                                     const unsigned long long* y, int n) {
    FOR_EACH(i) {
        out[0 * n + i] = __float_as_uint(__uint_as_float(x[i]));
        out[1 * n + i] =
            static_cast<unsigned>(__float_as_int(__int_as_float(static_cast<int>(x[i]))));
        wide[i] = static_cast<unsigned long long>(
            __double_as_longlong(__longlong_as_double(static_cast<long long>(y[i]))));
    }
}

// @kernel whole_numbers
// @param out write int32 [2, n]
// @param y   write fp32  [n]
// @param x   read  fp32  [n]
// @param k   read  int32 [n]
// @param n value int32
extern "C" __global__ void whole_numbers(int* out, float* y, const float* x, const int* k, int n) {
    FOR_EACH(i) {
        out[0 * n + i] = __float2int_rn(x[i]);
        out[1 * n + i] = __float2int_rz(x[i]);
        y[i] = __int2float_rn(k[i]);
    }
}

// @kernel rounded_arithmetic
// @param y write fp32 [6, n]
// @param a read  fp32 [n]
// @param b read  fp32 [n]
// @param c read  fp32 [n]
// @param n value int32
extern "C" __global__ void rounded_arithmetic(float* y, const float* a, const float* b,
                                              const float* c, int n) {
    FOR_EACH(i) {
        y[0 * n + i] = __fmaf_rn(a[i], b[i], c[i]);
        y[1 * n + i] = __fadd_rn(a[i], b[i]);
        y[2 * n + i] = __fmul_rn(a[i], b[i]);
        y[3 * n + i] = __fdiv_rn(a[i], b[i]);
        y[4 * n + i] = __fsqrt_rn(a[i]);
        y[5 * n + i] = __frcp_rn(a[i]);
    }
}

// @kernel atomics
// @param words write uint32 [13, n]        what memory holds afterwards
// @param old   write uint32 [13, n]        what the calls returned
// @param a     read  uint32 [n]
// @param b     read  uint32 [n]
// @param n value int32
extern "C" __global__ void atomics(unsigned* words, unsigned* old, const unsigned* a,
                                   const unsigned* b, int n) {
    FOR_EACH(i) {
        for (int k = 0; k < 13; ++k) words[k * n + i] = a[i];
        old[0 * n + i] = atomicAdd(&words[0 * n + i], b[i]);
        old[1 * n + i] = atomicSub(&words[1 * n + i], b[i]);
        old[2 * n + i] = atomicMin(&words[2 * n + i], b[i]);
        old[3 * n + i] = atomicMax(&words[3 * n + i], b[i]);
        int* p = reinterpret_cast<int*>(words);
        int v = static_cast<int>(b[i]);
        old[4 * n + i] = static_cast<unsigned>(atomicMin(&p[4 * n + i], v));
        old[5 * n + i] = static_cast<unsigned>(atomicMax(&p[5 * n + i], v));
        old[6 * n + i] = atomicAnd(&words[6 * n + i], b[i]);
        old[7 * n + i] = atomicOr(&words[7 * n + i], b[i]);
        old[8 * n + i] = atomicXor(&words[8 * n + i], b[i]);
        old[9 * n + i] = atomicExch(&words[9 * n + i], b[i]);
        old[10 * n + i] = atomicInc(&words[10 * n + i], b[i]);
        old[11 * n + i] = atomicDec(&words[11 * n + i], b[i]);
        old[12 * n + i] = atomicCAS(&words[12 * n + i], b[i] & 1 ? a[i] : b[i], b[i]);
    }
}

// ---- other element types ---------------------------------------------------------------------------

// @kernel mma_fp16
// @param d write fp32   [n, 32, 4]
// @param a read  uint32 [n, 32, 4]     fragments: two fp16 a word
// @param b read  uint32 [n, 32, 2]
// @param c read  fp32   [n, 32, 4]
// @param n value int32
// @block 32
extern "C" __global__ void mma_fp16(float* d, const unsigned* a, const unsigned* b, const float* c,
                                    int n) {
    unsigned at = blockIdx.x * 32 + threadIdx.x, left[4], right[2];
    float sum[4];
    for (int i = 0; i < 4; ++i) left[i] = a[at * 4 + i], sum[i] = c[at * 4 + i];
    for (int i = 0; i < 2; ++i) right[i] = b[at * 2 + i];
    ptx::mma_m16n8k16_fp16(sum, left, right);
    for (int i = 0; i < 4; ++i) d[at * 4 + i] = sum[i];
}

// @kernel fp16_pairs
// @param packed write uint32 [n]
// @param low    write fp32   [n]
// @param high   write fp32   [n]
// @param x      read  fp32   [n]
// @param y      read  uint32 [n]       two fp16
// @param n value int32
// @block 128
extern "C" __global__ void fp16_pairs(unsigned* packed, float* low, float* high, const float* x,
                                      const unsigned* y, int n) {
    FOR_EACH(i) {
        packed[i] = fp16::pack(x[i], x[n - 1 - i]);
        low[i] = fp16::first(y[i]);
        high[i] = fp16::second(y[i]);
    }
}

// @kernel bf16_products
// @param out write uint32 [n]
// @param a   read  uint32 [n]          two bf16
// @param b   read  uint32 [n]
// @param n value int32
// @block 128
extern "C" __global__ void bf16_products(unsigned* out, const unsigned* a, const unsigned* b,
                                         int n) {
    FOR_EACH(i) out[i] = ptx::mul_bf16x2(a[i], b[i]);
}
