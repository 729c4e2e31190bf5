// What both texts of grouped-query attention have in common: query rows and KV rows of one KV head,
// what a row sees, the softmax and the outputs of 16 query rows of a warp, and how results are written.
//
// A text says before how many query heads share a KV head (GROUP), and how many query rows a row tile
// has (ROWS).
#pragma once

#include "bf16.cuh"
#include "combine.cuh"
#include "early.cuh"
#include "item.cuh"
#include "merge.cuh"
#include "partial.cuh"
#include "ptx.cuh"
#include "vector.cuh"

// powers of 2 by which a query row's maximum must grow before its accumulators are rescaled
#ifndef RESCALE_ABOVE
#define RESCALE_ABOVE 8
#endif

namespace gqa {

constexpr int DIM = 128;
constexpr int STEPS = DIM / 16;  // of a product over the columns
constexpr int WARP_ROWS = 16;    // query rows of a warp
constexpr int PIECE = 8;         // elements of a 16-byte access
constexpr int ROW_PIECES = DIM / PIECE;
constexpr int OUT_PITCH = DIM + PIECE;     // elements from row to row of staged outputs
constexpr int MASK_WORDS = 8;              // of 32 bits: 256 tree tokens
constexpr int MERGED = STEPS * 8 + 3 * 2;  // floats of a lane that two warps merge

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
constexpr unsigned ALL = 0xffffffffu;

using bits16 = unsigned short;
using word64 = unsigned long long;
using combine::minus_infinity;
using plan::Item;

static_assert(GROUP >= 1 && GROUP <= 128, "a token's heads");

// Rows of a tensor [rows, heads, 128], strides in elements.
struct Rows {
    const bits16* first;
    long long stride, head_stride;

    __device__ __forceinline__ const bits16* at(long long row, int head) const {
        return first + (row * stride + head * head_stride);
    }
};

using Queries = unsigned[STEPS][4];

// Loads a warp's queries as operands: lane l has rows l / 4 + {0, 8}, and of each step the columns
// 2 (l % 4) + {0, 1, 8, 9}. Rows of no token are 0.
__device__ __forceinline__ void load_queries(Queries& q, Rows from, const Item& item, int row_warp,
                                             int lane) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row = item.row_tile * ROWS + row_warp * WARP_ROWS + half * 8 + lane / 4;
        const int head = static_cast<int>(blockIdx.y) * GROUP + row % GROUP;
        const bits16* query = from.at(item.first_token + row / GROUP, head) + lane % 4 * 2;
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            q[step][half] = q[step][half + 2] = 0;
            if (row < item.rows) {
                q[step][half] = *reinterpret_cast<const unsigned*>(query + step * 16);
                q[step][half + 2] = *reinterpret_cast<const unsigned*>(query + step * 16 + 8);
            }
        }
    }
}

// Visibility of the 32 nodes from `node` on, which may lie in the prefix or past the tree's words.
__device__ __forceinline__ unsigned window(const unsigned* mask, int node) {
    const int word = node >> 5;
    const unsigned low = word < 0 ? ALL : word < MASK_WORDS ? mask[word] : 0;
    const unsigned high = word + 1 < 0 ? ALL : word + 1 < MASK_WORDS ? mask[word + 1] : 0;
    return low >> (node & 31) | high << 1 << (31 - (node & 31));
}

// Takes away the scores of KV positions that are past the item's end or not in the row's mask;
// `position` is that of the lane's first score, and a block has 8 KV rows.
template <int BLOCKS>
__device__ __forceinline__ void hide(float (&s)[BLOCKS][4], const Item& item, int position,
                                     const unsigned* masks) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const unsigned* mask = masks + half * 8 * MASK_WORDS;
#pragma unroll
        for (int first = 0; first < BLOCKS * 8; first += 32) {
            const int left = item.end - position - first;
            unsigned seen = window(mask, position + first - item.prefix);
            seen = left >= 32 ? seen : left <= 0 ? 0 : seen & ((1u << left) - 1);
#pragma unroll
            for (int i = 0; i < 8 && first + i / 2 * 8 < BLOCKS * 8; ++i) {
                float& score = s[first / 8 + i / 2][half * 2 + i % 2];
                score = seen >> (i / 2 * 8 + i % 2) & 1 ? score : minus_infinity();
            }
        }
    }
}

// What a warp keeps over all tiles of an item: for each of a lane's query rows, l / 4 + {0, 8}, the
// softmax so far, and the outputs of columns 8 n + 2 (l % 4) + {0, 1}. Sums are over the lane's own
// KV rows. What is multiplied with V is rounded to bfloat16, so that is what the outputs are divided
// by: a key that has nearly all of the weight then gives its own values, whatever its probability was
// rounded to.
struct State {
    float o[2 * STEPS][4];
    float max[2];  // log2 domain, the same in all lanes of a row; -inf before the first score
    float sum[2];
    float rounded_sum[2];

    __device__ __forceinline__ void clear() {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            max[half] = minus_infinity();
            sum[half] = rounded_sum[half] = 0.0f;
        }
#pragma unroll
        for (int i = 0; i < 2 * STEPS * 4; ++i) {
            o[i / 4][i % 4] = 0.0f;
        }
    }

    __device__ __forceinline__ void scale_row(int half, float factor) {
        sum[half] *= factor;
        rounded_sum[half] *= factor;
#pragma unroll
        for (int block = 0; block < 2 * STEPS; ++block) {
            o[block][half * 2] *= factor;
            o[block][half * 2 + 1] *= factor;
        }
    }

    // Takes the scores of one tile in the log2 domain, masked to -inf where unseen; gives the
    // probabilities as an operand.
    template <int PAIRS>
    __device__ __forceinline__ void soften(const float (&s)[2 * PAIRS][4],
                                           unsigned (&p)[PAIRS][4]) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            float largest = minus_infinity();
#pragma unroll
            for (int block = 0; block < 2 * PAIRS; ++block) {
                largest = fmaxf(largest, fmaxf(s[block][half * 2], s[block][half * 2 + 1]));
            }
            largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, 1));
            largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, 2));
            if (largest > max[half] + RESCALE_ABOVE) {  // also the first time, from -inf
                scale_row(half, ptx::exp2_approx(max[half] - largest));
                max[half] = largest;
            }
            const float base = max[half] == minus_infinity() ? 0.0f : max[half];
#pragma unroll
            for (int block = 0; block < 2 * PAIRS; ++block) {
                const float first = ptx::exp2_approx(s[block][half * 2] - base);
                const float second = ptx::exp2_approx(s[block][half * 2 + 1] - base);
                const unsigned rounded = bf16::pack(first, second);
                sum[half] += first + second;
                rounded_sum[half] += bf16::first(rounded) + bf16::second(rounded);
                p[block / 2][block % 2 * 2 + half] = rounded;
            }
        }
    }

    // Sums up over the lanes of each row.
    __device__ __forceinline__ void gather_sums() {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
#pragma unroll
            for (int distance = 1; distance < 4; distance *= 2) {
                sum[half] += __shfl_xor_sync(ALL, sum[half], distance);
                rounded_sum[half] += __shfl_xor_sync(ALL, rounded_sum[half], distance);
            }
        }
    }

    // Leaves everything for the same lane of another warp, 32 floats apart.
    __device__ __forceinline__ void leave(float* lane_room) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            lane_room[(3 * half) * 32] = max[half];
            lane_room[(3 * half + 1) * 32] = sum[half];
            lane_room[(3 * half + 2) * 32] = rounded_sum[half];
        }
#pragma unroll
        for (int i = 0; i < 2 * STEPS * 4; ++i) {
            lane_room[(6 + i) * 32] = o[i / 4][i % 4];
        }
    }

    // Adds what another warp has left: the same query rows over other KV rows.
    __device__ __forceinline__ void take(const float* lane_room) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const float other = lane_room[(3 * half) * 32];
            const float largest = fmaxf(max[half], other);
            // a side that has seen nothing adds nothing, and both may have
            const float base = largest == minus_infinity() ? 0.0f : largest;
            scale_row(half, ptx::exp2_approx(max[half] - base));
            const float factor = ptx::exp2_approx(other - base);
            max[half] = largest;
            sum[half] = fmaf(factor, lane_room[(3 * half + 1) * 32], sum[half]);
            rounded_sum[half] = fmaf(factor, lane_room[(3 * half + 2) * 32], rounded_sum[half]);
#pragma unroll
            for (int i = 0; i < 2 * STEPS * 2; ++i) {
                const int at = half * 2 + i % 2;
                o[i / 2][at] = fmaf(factor, lane_room[(6 + i / 2 * 4 + at) * 32], o[i / 2][at]);
            }
        }
    }

    // Leaves the warp's outputs in `staged`, rows of OUT_PITCH elements, and writes its log-sum-exps. All
    // sums have been gathered.
    __device__ __forceinline__ void finish(const Item& item, int row_warp, int lane, int kv_head,
                                           int kv_heads, bits16* staged, float* partial_lse,
                                           float* lse) const {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = row_warp * WARP_ROWS + half * 8 + lane / 4;
            const int flat = item.row_tile * ROWS + row;
            const bool sees = sum[half] != 0.0f;
            const float inverse = sees ? 1.0f / rounded_sum[half] : 0.0f;
            const float log_sum = sees ? max[half] + log2f(sum[half]) : minus_infinity();
            if (lane % 4 == 0 && flat < item.rows) {
                if (item.slot < 0) {
                    const long long token = item.first_token + flat / GROUP;
                    lse[(token * kv_heads + kv_head) * GROUP + flat % GROUP] = log_sum * LN_2;
                } else {
                    const long long at = item.slot * static_cast<long long>(kv_heads) + kv_head;
                    partial_lse[at * ROWS + row] = log_sum;
                }
            }
            bits16* to = staged + row * OUT_PITCH + lane % 4 * 2;
#pragma unroll
            for (int block = 0; block < 2 * STEPS; ++block) {
                *reinterpret_cast<unsigned*>(to + block * 8) =
                    partials::pack(o[block][half * 2] * inverse, o[block][half * 2 + 1] * inverse);
            }
        }
    }
};

// The visibility of the token of each of COUNT query rows from `first` on, in words of 32 bits; clear
// where there is none.
template <int THREADS, int COUNT>
__device__ __forceinline__ void load_masks(const Item& item, int first, const word64* visible,
                                           int words, unsigned* masks, int thread) {
#pragma unroll 1
    for (int i = thread; i < COUNT * MASK_WORDS; i += THREADS) {
        const int row = item.row_tile * ROWS + first + i / MASK_WORDS;
        const int word = i % MASK_WORDS;
        word64 seen = 0;
        if (row < item.rows && word / 2 < words) {
            seen = visible[(item.first_token + row / GROUP) * words + word / 2];
        }
        masks[i] = static_cast<unsigned>(seen >> word % 2 * 32);
    }
}

// Writes COUNT staged rows from `first` on to where they belong.
template <int THREADS, int COUNT>
__device__ __forceinline__ void write_staged(const Item& item, int first, const bits16* staged,
                                             int kv_head, int kv_heads, short* partial_out,
                                             bits16* out, long long out_stride, int thread) {
#pragma unroll 1
    for (int piece = thread; piece < COUNT * ROW_PIECES; piece += THREADS) {
        const int row = first + piece / ROW_PIECES;
        const int column = piece % ROW_PIECES * PIECE;
        const int flat = item.row_tile * ROWS + row;
        if (flat < item.rows) {
            bits16* to;
            if (item.slot < 0) {
                const long long token = item.first_token + flat / GROUP;
                to = out + token * out_stride + (kv_head * GROUP + flat % GROUP) * DIM;
            } else {
                const long long at = item.slot * static_cast<long long>(kv_heads) + kv_head;
                to = reinterpret_cast<bits16*>(partial_out) + (at * ROWS + row) * DIM;
            }
            const uint4 columns = load128(staged + row * OUT_PITCH + column);
            store128(to + column, item.slot < 0 ? combine::rounded(columns) : columns);
        }
    }
}

// Merges the pieces of the row tiles that were cut, of this block's KV head.
template <int THREADS, int UNROLL, int LEAST>
__device__ __forceinline__ void merge_pieces(const short* partial_out, const float* partial_lse,
                                             int kv_heads, const int* combine_indptr,
                                             const int* combine_tiles, int tiles, bits16* out,
                                             long long out_stride, float* lse,
                                             combine::Means<THREADS / 32>& means) {
    static_assert((THREADS & (THREADS - 1)) == 0 && THREADS >= 32 && THREADS <= 1024,
                  "warps can share units evenly");
    constexpr int UNITS = ROWS * ROW_PIECES / 32;
    const int kv_head = static_cast<int>(blockIdx.y);
    merge::Turns<UNITS, ROWS, 8, GROUP, THREADS, LEAST> turns(combine_indptr, combine_tiles, tiles);
    merge::Turn turn;
    early::launch_dependents();  // they wait until this kernel has ended
    early::wait_for_dependency();
    while (turns.next(turn)) {
        combine::units<THREADS / 32, UNROLL, UNITS, ROWS>(
            turns, turn, partial_out + static_cast<long long>(kv_head) * ROWS * DIM,
            partial_lse + static_cast<long long>(kv_head) * ROWS, kv_heads * ROWS, means,
            [&](const merge::Rows& rows, int row, int piece, uint4 columns, float log_sum) {
                const int flat = rows.first + row;
                const long long token = rows.first_token + flat / GROUP;
                const int head = kv_head * GROUP + flat % GROUP;
                store128(out + token * out_stride + head * DIM + piece * PIECE, columns);
                if (piece == 0) {
                    lse[token * kv_heads * GROUP + head] = log_sum * LN_2;
                }
            });
    }
}

}  // namespace gqa
