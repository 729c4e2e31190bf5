// The k likeliest tokens of each row of logits, and their log-probabilities.
//
//   draft_topk_partials  the k best logits of each piece of a row, its largest and its sum of
//                        exponentials
//   draft_topk_merge     the k best of a row, less the logarithm of the row's sum
//
// Of equal logits the lower token comes first; +0 and -0 are equal. A NaN is none of the best. A row
// that has a NaN or +inf, or -inf only, has NaN for all its log-probabilities; where fewer than k of
// its logits are numbers, what is behind them is token 0.
//
// How. A block has a tile of logits in registers, as keys that order value and place at once, and
// takes the largest key k times: a warp's by two reductions, the block's from those of its warps.
// What it has taken from one tile takes part in the next. Pieces are many and k is small, so that
// this takes less time than reading and writing candidates would.
//
// No host reads, no allocation; every buffer is the caller's.

#include "early.cuh"
#include "ptx.cuh"
#include "ranked.cuh"
#include "shared.cuh"

// bits of a logit: 16 (bfloat16) or 32 (float)
#ifndef LOGIT_BITS
#define LOGIT_BITS 16
#endif
// its type in the contract
#ifndef LOGIT
#define LOGIT __nv_bfloat16
#endif
#ifndef TOPK_THREADS
#define TOPK_THREADS 256
#endif
// logits that a thread has at a time
#ifndef TOPK_EACH
#define TOPK_EACH 16
#endif

namespace {

constexpr int WARPS = TOPK_THREADS / LANES;
constexpr int MAX_RANKS = 64;
constexpr int TILE = TOPK_EACH * TOPK_THREADS;
constexpr float LOG2_E = 1.4426950408889634f;

static_assert(LOGIT_BITS == 16 || LOGIT_BITS == 32, "bfloat16 or float");
static_assert(TOPK_THREADS % LANES == 0 && TOPK_THREADS <= 1024, "whole warps, one block");
static_assert(TOPK_THREADS >= MAX_RANKS, "a thread carries one of the best at most");

#if LOGIT_BITS == 16
using Bits = unsigned short;
__device__ float logit(Bits bits) { return __uint_as_float(static_cast<unsigned>(bits) << 16); }
#else
using Bits = float;
__device__ float logit(Bits value) { return value; }
#endif

// exp(value - largest), where `largest` is the largest of some values: 0 where they are all -inf.
__device__ float weight(float value, float largest) {
    const float offset = largest > minus_infinity() ? largest : 0.0f;
    return ptx::exp2_approx((value - offset) * LOG2_E);
}

// The best keys so far, and what the warps of a block tell each other. Shared by a block.
struct Board {
    unsigned long long best[MAX_RANKS];
    unsigned long long of_warp[2][WARPS];  // by turns, so that one barrier a round is enough
    float sums[WARPS];
};

// Puts the k largest of the keys of a block into `board.best`, in descending order; a key of 0 is
// none. All threads call it. What the board held may be read until then, and a barrier is owed before
// it is read again.
__device__ void take_best(unsigned long long (&keys)[TOPK_EACH + 1], int k, Board& board) {
    const int lane = static_cast<int>(threadIdx.x) % LANES;
    const int warp = static_cast<int>(threadIdx.x) / LANES;
    const auto largest = [&] {
        unsigned long long all = 0;
#pragma unroll
        for (int i = 0; i <= TOPK_EACH; ++i) {
            all = keys[i] > all ? keys[i] : all;
        }
        return all;
    };
    unsigned long long own = largest();
    unsigned long long of_warp = warp_max(own);
#pragma unroll 1
    for (int rank = 0; rank < k; ++rank) {
        if (lane == 0) {
            board.of_warp[rank % 2][warp] = of_warp;
        }
        __syncthreads();
        const unsigned long long winner =
            warp_max(lane < WARPS ? board.of_warp[rank % 2][lane] : 0);
        if (threadIdx.x == 0) {
            board.best[rank] = winner;
        }
        if (of_warp == winner && winner != 0) {  // a whole warp: keys are of one thread each
            if (own == winner) {
#pragma unroll
                for (int i = 0; i <= TOPK_EACH; ++i) {
                    keys[i] = keys[i] == winner ? 0 : keys[i];
                }
                own = largest();
            }
            of_warp = warp_max(own);
        }
    }
}

// The sum over a block, in all threads.
__device__ float block_sum(float value, Board& board) {
    const int lane = static_cast<int>(threadIdx.x) % LANES;
#pragma unroll
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        value += __shfl_xor_sync(ALL_LANES, value, distance);
    }
    if (lane == 0) {
        board.sums[threadIdx.x / LANES] = value;
    }
    __syncthreads();
    value = 0.0f;
#pragma unroll
    for (int warp = 0; warp < WARPS; ++warp) {
        value += board.sums[warp];
    }
    return value;
}

}  // namespace

// The best of each piece.
//
// Launch: pieces in the grid's x, rows in y.
//
// @kernel draft_topk_partials
// @param logits     read  LOGIT [rows, vocab] stride=(row_stride, 1)
// @param row_stride value int64                      elements from row to row
// @param rows       value int32
// @param vocab      value int32                      logits of a row
// @param pieces     value int32                      of a row: the grid's x
// @param k          value int32                      up to 64
// @param best       write uint64 [rows, pieces, k]   value and place as one number; 0: none
// @param sums       write fp32 [rows, pieces, 2]     largest logit, sum of exponentials less it
// @block TOPK_THREADS
extern "C" __global__ void __launch_bounds__(TOPK_THREADS)
    draft_topk_partials(const Bits* __restrict__ logits, long long row_stride, int rows, int vocab,
                        int pieces, int k, unsigned long long* best, float* sums) {
    SHARED_ARRAY(Board, boards, [1]);
    Board& board = boards[0];
    early::launch_dependents();
    const int thread = static_cast<int>(threadIdx.x);
    const Bits* row = logits + blockIdx.y * row_stride;
    const int each = (vocab + pieces - 1) / pieces;
    const int begin = min(static_cast<int>(blockIdx.x) * each, vocab);
    const int end = min(begin + each, vocab);
    const long long piece = static_cast<long long>(blockIdx.y) * pieces + blockIdx.x;

    float largest = minus_infinity();
    float sum = 0.0f;
#pragma unroll 1
    for (int first = begin; first < end; first += TILE) {
        float values[TOPK_EACH];
#pragma unroll
        for (int i = 0; i < TOPK_EACH; ++i) {
            const int place = first + i * TOPK_THREADS + thread;
            values[i] = place < end ? logit(row[place]) : minus_infinity();
        }
        unsigned long long keys[TOPK_EACH + 1];
#pragma unroll
        for (int i = 0; i < TOPK_EACH; ++i) {
            const int place = first + i * TOPK_THREADS + thread;
            const bool counts = place < end && values[i] == values[i];
            keys[i] = counts ? ranked(values[i], static_cast<unsigned>(place)) : 0;
        }
        keys[TOPK_EACH] = first > begin && thread < k ? board.best[thread] : 0;
        take_best(keys, k, board);
        __syncthreads();
        const float now = board.best[0] == 0 ? minus_infinity() : value_of(board.best[0]);
        sum *= weight(largest, now);
        largest = now;
#pragma unroll
        for (int i = 0; i < TOPK_EACH; ++i) {  // -inf behind the end
            sum += weight(values[i], largest);
        }
    }
    sum = block_sum(sum, board);
#pragma unroll 1
    for (int rank = thread; rank < k; rank += TOPK_THREADS) {
        best[piece * k + rank] = begin < end ? board.best[rank] : 0;
    }
    if (thread == 0) {
        sums[2 * piece] = largest;
        sums[2 * piece + 1] = sum;
    }
}

// The best of each row.
//
// Launch: one block a row.
//
// @kernel draft_topk_merge
// @early
// @param best      read  uint64 [rows, pieces, k]  of draft_topk_partials
// @param sums      read  fp32 [rows, pieces, 2]    likewise
// @param rows      value int32
// @param pieces    value int32
// @param k         value int32                     up to 64
// @param logprobs  write fp32 [rows, k]            descending
// @param token_ids write int64 [rows, k]
// @block TOPK_THREADS
extern "C" __global__ void __launch_bounds__(TOPK_THREADS)
    draft_topk_merge(const unsigned long long* best, const float* sums, int rows, int pieces, int k,
                     float* logprobs, long long* token_ids) {
    SHARED_ARRAY(Board, boards, [1]);
    Board& board = boards[0];
    early::wait_for_dependency();
    const int thread = static_cast<int>(threadIdx.x);
    const long long row = blockIdx.x;
    const int candidates = pieces * k;
    best += row * candidates;
    sums += 2 * row * pieces;
#pragma unroll 1
    for (int first = 0; first < candidates; first += TILE) {
        unsigned long long keys[TOPK_EACH + 1];
#pragma unroll
        for (int i = 0; i < TOPK_EACH; ++i) {
            const int at = first + i * TOPK_THREADS + thread;
            keys[i] = at < candidates ? best[at] : 0;
        }
        keys[TOPK_EACH] = first > 0 && thread < k ? board.best[thread] : 0;
        take_best(keys, k, board);
        __syncthreads();
    }
    // where all are -inf, or the largest is +inf, this becomes NaN
    const unsigned long long top = board.best[0];
    const float largest = top == 0 ? minus_infinity() : value_of(top);
    float sum = 0.0f;
#pragma unroll 1
    for (int piece = thread; piece < pieces; piece += TOPK_THREADS) {
        sum += sums[2 * piece + 1] * weight(sums[2 * piece], largest);
    }
    const float norm = logf(block_sum(sum, board));
#pragma unroll 1
    for (int rank = thread; rank < k; rank += TOPK_THREADS) {
        const unsigned long long key = board.best[rank];
        const float value = key == 0 ? minus_infinity() : value_of(key);
        logprobs[row * k + rank] = value - largest - norm;
        token_ids[row * k + rank] = key == 0 ? 0 : place_of(key);
    }
}
