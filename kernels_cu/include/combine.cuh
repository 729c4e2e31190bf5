// Merges the pieces of a row tile: the mean of its partial slots, weighted by their log-sum-exps.
//
// A row is a number of pieces, a piece is 8 columns of PARTIAL, and 32 pieces are a unit;
// merge.cuh says which warps do which units. What several warps have read meets in shared memory.
#pragma once

#include "element.cuh"
#include "merge.cuh"
#include "partial.cuh"
#include "ptx.cuh"
#include "vector.cuh"

// the type of outputs: bf16 or fp16
#ifndef ELEMENT
#define ELEMENT bf16
#endif

namespace combine {

namespace element = ELEMENT;

constexpr int PIECE = 8;

// A piece of a partial in the type of outputs.
__device__ __forceinline__ uint4 rounded(uint4 piece) {
    const auto word = [](unsigned pair) {
        return element::pack(partials::first(pair), partials::second(pair));
    };
    return make_uint4(word(piece.x), word(piece.y), word(piece.z), word(piece.w));
}

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// What a warp has merged of one unit, lane by lane; weights are in the log2 domain.
struct Mean {
    float max;  // -inf before the first row that counts
    float weight;
    float value[PIECE];

    __device__ __forceinline__ void clear() {
        max = minus_infinity();
        weight = 0.0f;
#pragma unroll
        for (int i = 0; i < PIECE; ++i) {
            value[i] = 0.0f;
        }
    }

    // Prepares for rows of weight up to 2^largest.
    __device__ __forceinline__ void raise(float largest) {
        if (largest > max) {
            const float factor = ptx::exp2_approx(max - largest);
            max = largest;
            weight *= factor;
#pragma unroll
            for (int i = 0; i < PIECE; ++i) {
                value[i] *= factor;
            }
        }
    }

    __device__ __forceinline__ void add(float log_weight, uint4 row) {
        const float factor =
            log_weight == minus_infinity() ? 0.0f : ptx::exp2_approx(log_weight - max);
        const unsigned pairs[4] = {row.x, row.y, row.z, row.w};
        weight += factor;
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            value[2 * i] = fmaf(factor, partials::first(pairs[i]), value[2 * i]);
            value[2 * i + 1] = fmaf(factor, partials::second(pairs[i]), value[2 * i + 1]);
        }
    }
};

// Shared memory of a block: what its warps have merged.
template <int WARPS>
using Means = float[WARPS][PIECE + 2][32];

// Does the units of one turn, of row tiles of SIZE rows. A row tile has UNITS of them, and a slot
// `slot_rows` rows, of which those from `partial_out` and `partial_lse` on are the row
// tile's. `write(rows, row, piece, columns, lse)` takes a piece of a row of the row tile and the
// log-sum-exp to base 2. All threads of the block take part.
template <int WARPS, int UNROLL, int UNITS, int SIZE, class Turns, class Write>
__device__ __forceinline__ void units(const Turns& turns, const merge::Turn& turn,
                                      const short* partial_out, const float* partial_lse,
                                      int slot_rows, Means<WARPS>& means, const Write& write) {
    constexpr int ROW_PIECES = UNITS * 32 / SIZE;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int sharing = turn.sharers();
    Mean mean;
    mean.clear();
    {
        const int unit = turn.first_unit + (warp >> turn.log_sharers);
        const int row = (unit * 32 + lane) / ROW_PIECES;
        const int column = (unit * 32 + lane) % ROW_PIECES * PIECE;
        const bool given = unit < UNITS && turns.rows(turn).has(row);
        for (int slot = turn.begin + (warp & (sharing - 1)); slot < turn.end;
             slot += sharing * UNROLL) {
            float weights[UNROLL];
            uint4 values[UNROLL];
#pragma unroll
            for (int k = 0; k < UNROLL; ++k) {
                weights[k] = minus_infinity();
                values[k] = make_uint4(0, 0, 0, 0);
                if (given && slot + k * sharing < turn.end) {
                    // 4,096 slots of 1,024 heads of 128 rows are counted in 32 bits
                    const int at = (slot + k * sharing) * slot_rows + row;
                    weights[k] = partial_lse[at];
                    values[k] = load128(partial_out +
                                        static_cast<long long>(at) * (ROW_PIECES * PIECE) + column);
                }
            }
            float largest = weights[0];
#pragma unroll
            for (int k = 1; k < UNROLL; ++k) {
                largest = fmaxf(largest, weights[k]);
            }
            mean.raise(largest);
#pragma unroll
            for (int k = 0; k < UNROLL; ++k) {
                mean.add(weights[k], values[k]);
            }
        }
    }
    means[warp][PIECE][lane] = mean.max;
    means[warp][PIECE + 1][lane] = mean.weight;
#pragma unroll
    for (int i = 0; i < PIECE; ++i) {
        means[warp][i][lane] = mean.value[i];
    }
    __syncthreads();
    // asked for again: registers are for what is in flight
    const merge::Rows rows = turns.rows(turn);
    const int unit = turn.first_unit + warp;  // a warp a unit
    const int row = (unit * 32 + lane) / ROW_PIECES;
    if (warp < WARPS >> turn.log_sharers && unit < UNITS && rows.has(row)) {
        const float (*shares)[PIECE + 2][32] = means + (warp << turn.log_sharers);
        float largest = minus_infinity();
        for (int other = 0; other < sharing; ++other) {
            largest = fmaxf(largest, shares[other][PIECE][lane]);
        }
        float weight = 0.0f;
        float value[PIECE] = {};
        for (int other = 0; other < sharing; ++other) {
            const float max = shares[other][PIECE][lane];
            const float factor = max == minus_infinity() ? 0.0f : ptx::exp2_approx(max - largest);
            weight = fmaf(factor, shares[other][PIECE + 1][lane], weight);
#pragma unroll
            for (int i = 0; i < PIECE; ++i) {
                value[i] = fmaf(factor, shares[other][i][lane], value[i]);
            }
        }
        const bool sees = weight != 0.0f;
        const float inverse = sees ? 1.0f / weight : 0.0f;
        write(rows, row, (unit * 32 + lane) % ROW_PIECES,
              make_uint4(element::pack(value[0] * inverse, value[1] * inverse),
                         element::pack(value[2] * inverse, value[3] * inverse),
                         element::pack(value[4] * inverse, value[5] * inverse),
                         element::pack(value[6] * inverse, value[7] * inverse)),
              sees ? largest + log2f(weight) : minus_infinity());
    }
    __syncthreads();
}

}  // namespace combine
