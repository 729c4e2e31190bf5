// Attention of draft trees over a KV cache with separate keys and values: GROUP query heads share a
// KV head (grouped-query attention, head dimension 128), split over the GPU.
//
// Every request b has a prefix of kv_indptr[b+1] - kv_indptr[b] tokens, whose slots stand in
// `kv_indices`, and a tree of T = qo_indptr[b+1] - qo_indptr[b] draft tokens, whose rows stand in the
// pools too (at `out_cache_loc`) or in tensors of their own. A slot has a row of keys and one of values
// for each KV head; slots are those of tokens, whatever the page size is. A tree token sees the whole
// prefix and those tokens of its own tree whose bits are set in its `visible` words; a drafter's block,
// whose tokens all see each other, is a tree with all bits set.
//
// A step launches two kernels on one stream, after verify_plan.cu has made the lists:
//   verify_gqa_partials  block (c, h) does the work of block c of the plan for KV head h. An item is
//                        one row tile (ROWS query rows of the head: tokens times GROUP) against one
//                        range of the prefix; the range that ends with the prefix is followed by the
//                        tree. A row tile in one piece goes to `out` and `lse`, any other one to its
//                        piece's partial slot.
//   verify_gqa_combine   merges the pieces of each row tile that was cut.
//
// A block has four warps, ROWS / 16 of them side by side on the query rows; those that are left
// divide each tile of KV rows among themselves and meet when the item is done. S = Q K^T and O = P V by
// mma.m16n8k16: the scores that a warp has are its probabilities' operand as they lie, so that P never
// leaves the registers. Keys and values of a tile lie in shared memory once, in a ring that cp.async
// fills, with the pieces of a row exchanged by the row's number, so that ldmatrix meets no bank twice.
//
// Partials are PARTIAL, normalised, with one base-2 log-sum-exp a row. Outputs of row tiles in one
// piece are PARTIAL for a moment, too.
//
// A slot outside the pool is never read: a query row that sees it becomes NaN.
//
// Both kernels: no host reads, no allocation, addresses 64 bits wide, the same bits at every run.

#include "bf16.cuh"
#include "combine.cuh"
#include "item.cuh"
#include "merge.cuh"
#include "partial.cuh"
#include "ptx.cuh"
#include "shared.cuh"
#include "thread.cuh"
#include "vector.cuh"

// query heads that share a KV head
#ifndef GROUP
#define GROUP 8
#endif
// query rows of a row tile: 16, 32 or 64; the plan is for as many
#ifndef ROWS
#define ROWS 64
#endif
// KV rows of a tile
#ifndef TILE
#define TILE 64
#endif
// tiles in shared memory: one is used, STAGES - 1 are on their way
#ifndef STAGES
#define STAGES 3
#endif
// the types of kv_indices and qo_indptr: int or long long
#ifndef KV_INDEX
#define KV_INDEX int
#endif
#ifndef QO_INDEX
#define QO_INDEX int
#endif
// blocks that a multiprocessor is to hold at once: bounds the registers
#ifndef RESIDENT
#define RESIDENT 2
#endif
// powers of 2 by which a query row's maximum must grow before its accumulators are rescaled
#ifndef RESCALE_ABOVE
#define RESCALE_ABOVE 8
#endif
#ifndef COMBINE_THREADS
#define COMBINE_THREADS 512
#endif
// splits that a warp of verify_gqa_combine has in flight
#ifndef COMBINE_UNROLL
#define COMBINE_UNROLL 5
#endif

// splits that are worth a further warp
#ifndef COMBINE_LEAST
#define COMBINE_LEAST 4
#endif

namespace {

constexpr int DIM = 128;
constexpr int WARPS = 4;
constexpr int THREADS = WARPS * 32;
constexpr int WARP_ROWS = 16;  // query rows of one mma
constexpr int ROW_WARPS = ROWS / WARP_ROWS;
constexpr int KV_WARPS = WARPS / ROW_WARPS;
constexpr int WARP_KV = TILE / KV_WARPS;  // KV rows of a tile that a warp does
constexpr int PAIRS = WARP_KV / 16;       // of two blocks of 8 KV rows
constexpr int STEPS = DIM / 16;
constexpr int PIECE = 8;  // elements of a 16-byte access
constexpr int ROW_PIECES = DIM / PIECE;
constexpr int COPY_LANES = 8;  // that fetch one row
constexpr int COPY_STEP = THREADS / COPY_LANES;
constexpr int COPY_ROWS = TILE / COPY_STEP;  // of each thread
constexpr int STAGE = 2 * TILE * DIM;        // elements: keys, then values
constexpr int OUT_PITCH = DIM + PIECE;       // elements from row to row of staged outputs
constexpr int MASK_WORDS = 8;                // of 32 bits: 256 tree tokens

// floats of a lane that two warps merge
constexpr int MERGED = STEPS * 8 + 3 * 2;

static_assert(ROWS == 16 || ROWS == 32 || ROWS == 64, "the plan counts row tiles of such sizes");
static_assert(WARP_KV % 16 == 0 && WARP_KV >= 16, "whole operands of probabilities");
static_assert(COPY_ROWS >= 1 && TILE % COPY_STEP == 0, "all threads fetch");
static_assert(STAGES >= 2, "a tile is fetched while another one is used");
static_assert(STAGES * STAGE * 2 >= WARPS / 2 * MERGED * 32 * 4, "the ring holds what warps merge");
static_assert(STAGES * STAGE >= ROWS * OUT_PITCH, "the ring holds a row tile of outputs");
static_assert(GROUP >= 1 && GROUP <= 128, "a token's heads");
static_assert((COMBINE_THREADS & (COMBINE_THREADS - 1)) == 0 && COMBINE_THREADS >= 32 &&
                  COMBINE_THREADS <= 1024,
              "warps can share units evenly");

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
constexpr unsigned ALL = 0xffffffffu;

using bits16 = unsigned short;
using word64 = unsigned long long;
using combine::minus_infinity;

// What a thread of verify_gqa_partials is in charge of.
struct Place {
    int lane;
    int row_warp;   // its WARP_ROWS query rows of the row tile,
    int kv_warp;    // and its WARP_KV KV rows of each tile
    int copy_row;   // the first row of a tile that the thread helps to fetch,
    int copy_lane;  // as one of 8

    __device__ __forceinline__ explicit Place(int thread)
        : lane(thread % 32),
          row_warp(thread / 32 / KV_WARPS),
          kv_warp(thread / 32 % KV_WARPS),
          copy_row(thread / COPY_LANES),
          copy_lane(thread % COPY_LANES) {}
};

using plan::Item;

// Elements from the start of a tile to a piece of one of its rows.
__device__ __forceinline__ int place_of(int row, int piece) {
    return row * DIM + (piece ^ row % 8) * PIECE;
}

using Listed = KV_INDEX[COPY_ROWS];

// Rows of a tensor [rows, heads, 128], strides in elements.
struct Rows {
    const bits16* first;
    long long stride, head_stride;

    __device__ __forceinline__ const bits16* at(long long row, int head) const {
        return first + (row * stride + head * head_stride);
    }
};

// Where the KV rows are.
struct KvRows {
    Rows k, v;
    long long num_slots;
    const KV_INDEX* kv_indices;
    Rows k_extend, v_extend;
    const long long* out_cache_loc;  // null: the trees' rows are in `k_extend` and `v_extend`

    // The list's entries for this thread's rows of the tile at position `start`. Looked up a tile ahead
    // of the rows themselves and not touched before, not even to be widened: a warp would wait for
    // it.
    __device__ __forceinline__ void look_up(Listed& listed, const Item& item, int start,
                                            Place place) const {
#pragma unroll
        for (int i = 0; i < COPY_ROWS; ++i) {
            const int position = start + place.copy_row + i * COPY_STEP;
            listed[i] =
                position < min(item.prefix, item.end) ? kv_indices[item.first_index + position] : 0;
        }
    }

    // Starts the copies of this thread's pieces of the tile at position `start` into `tile`. Rows past
    // the end become zeros; a tile past the end is left alone.
    __device__ __forceinline__ void fetch(const Item& item, int start, const Listed& listed,
                                          bits16* tile, Place place) const {
        bool plain = start + TILE <= min(item.prefix, item.end);
#pragma unroll
        for (int i = 0; i < COPY_ROWS; ++i) {
            plain = plain && listed[i] >= 0 && listed[i] < num_slots;
        }
        if (plain) {
            // Nearly all tiles: no row asks a question, so that their copies go out together.
            const int head = static_cast<int>(blockIdx.y);
            bits16* to = tile + place_of(place.copy_row, place.copy_lane);
#pragma unroll
            for (int i = 0; i < COPY_ROWS; ++i) {
                copy(to + i * COPY_STEP * DIM, k.at(listed[i], head), v.at(listed[i], head), 16,
                     place);
            }
        } else if (start < item.end) {
            fetch_any(item, start, tile, place);
        }
    }

    // As `fetch`, for a tile that reaches past the prefix or the item, or that lists a slot outside the
    // pool. Seldom, and short for that: it looks the slots up itself.
    __device__ __forceinline__ void fetch_any(const Item& item, int start, bits16* tile,
                                              Place place) const {
#pragma unroll 1
        for (int row = place.copy_row; row < TILE; row += COPY_STEP) {
            const int position = start + row;
            const bool present = position < item.end;
            const bool in_tree = present && position >= item.prefix;
            const bool separate = in_tree && out_cache_loc == nullptr;
            const long long token = item.first_token + (position - item.prefix);
            long long slot = token;
            if (!in_tree) {
                slot = present ? kv_indices[item.first_index + position] : 0;
            } else if (!separate) {
                slot = out_cache_loc[token];
            }
            const int head = static_cast<int>(blockIdx.y);
            bits16* to = tile + place_of(row, place.copy_lane);
            if (separate) {
                copy(to, k_extend.at(slot, head), v_extend.at(slot, head), 16, place);
            } else if (!present) {
                copy(to, k.first, v.first, 0, place);
            } else if (slot >= 0 && slot < num_slots) {
                copy(to, k.at(slot, head), v.at(slot, head), 16, place);
            } else {
                // Scores become NaN. Values are 0: a query row that does not see this one adds 0
                // times it.
                for (int piece = 0; piece < ROW_PIECES; piece += COPY_LANES) {
                    store128(to + piece * PIECE, make_uint4(ALL, ALL, ALL, ALL));
                    store128(to + TILE * DIM + piece * PIECE, make_uint4(0, 0, 0, 0));
                }
            }
        }
    }

    // Starts the copies of this thread's pieces of a row of keys and one of values.
    __device__ __forceinline__ void copy(bits16* to, const bits16* keys, const bits16* values,
                                         int bytes, Place place) const {
        keys += place.copy_lane * PIECE;
        values += place.copy_lane * PIECE;
#pragma unroll
        for (int piece = 0; piece < ROW_PIECES; piece += COPY_LANES) {
            ptx::cp_async16(to + piece * PIECE, keys + piece * PIECE, bytes);
            ptx::cp_async16(to + TILE * DIM + piece * PIECE, values + piece * PIECE, bytes);
        }
    }

    // Starts the copies of the item's first tiles, one commit group each; looks up the slots of the
    // next.
    __device__ __forceinline__ void fetch_first(Listed& next, const Item& item, bits16* ring,
                                                Place place) const {
        Listed listed[STAGES - 1];
#pragma unroll
        for (int stage = 0; stage < STAGES - 1; ++stage) {
            look_up(listed[stage], item, item.begin + stage * TILE, place);
        }
        look_up(next, item, item.begin + (STAGES - 1) * TILE, place);
#pragma unroll
        for (int stage = 0; stage < STAGES - 1; ++stage) {
            fetch(item, item.begin + stage * TILE, listed[stage], ring + stage * STAGE, place);
            ptx::cp_async_commit();
        }
    }
};

using Queries = unsigned[STEPS][4];
using Scores = float[2 * PAIRS][4];
using Weights = unsigned[PAIRS][4];

// Loads a warp's queries as operands: lane l has rows l / 4 + {0, 8}, and of each step the columns
// 2 (l % 4) + {0, 1, 8, 9}. Rows of no token are 0.
__device__ __forceinline__ void load_queries(Queries& q, Rows from, const Item& item, Place place) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int row =
            item.row_tile * ROWS + place.row_warp * WARP_ROWS + half * 8 + place.lane / 4;
        const int head = static_cast<int>(blockIdx.y) * GROUP + row % GROUP;
        const bits16* query = from.at(item.first_token + row / GROUP, head) + place.lane % 4 * 2;
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

// S = Q K^T for this warp's query rows and its KV rows of a tile.
__device__ __forceinline__ void multiply_keys(Scores& s, const Queries& q, const bits16* keys,
                                              Place place) {
    const int row = place.kv_warp * WARP_KV + place.lane % 8 + place.lane / 16 * 8;
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
            unsigned both[4];
            ptx::ldmatrix_x4(both, keys + place_of(row + pair * 16, step * 2 + place.lane / 8 % 2));
            const unsigned first[2] = {both[0], both[1]};
            const unsigned second[2] = {both[2], both[3]};
            ptx::mma_m16n8k16_bf16(s[2 * pair], q[step], first);
            ptx::mma_m16n8k16_bf16(s[2 * pair + 1], q[step], second);
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
// `position` is that of the lane's first score.
__device__ __forceinline__ void hide(Scores& s, const Item& item, int position,
                                     const unsigned* masks) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const unsigned* mask = masks + half * 8 * MASK_WORDS;
#pragma unroll
        for (int first = 0; first < WARP_KV; first += 32) {
            const int left = item.end - position - first;
            unsigned seen = window(mask, position + first - item.prefix);
            seen = left >= 32 ? seen : left <= 0 ? 0 : seen & ((1u << left) - 1);
#pragma unroll
            for (int i = 0; i < 8 && first + i / 2 * 8 < WARP_KV; ++i) {
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
    __device__ __forceinline__ void soften(const Scores& s, Weights& p) {
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

    // O += P V over this warp's KV rows of a tile.
    __device__ __forceinline__ void multiply_values(const Weights& p, const bits16* values,
                                                    Place place) {
        const int row = place.kv_warp * WARP_KV + place.lane % 16;
#pragma unroll
        for (int pair = 0; pair < PAIRS; ++pair) {
#pragma unroll
            for (int step = 0; step < STEPS; ++step) {
                unsigned both[4];
                ptx::ldmatrix_x4_trans(
                    both, values + place_of(row + pair * 16, step * 2 + place.lane / 16));
                const unsigned first[2] = {both[0], both[1]};
                const unsigned second[2] = {both[2], both[3]};
                ptx::mma_m16n8k16_bf16(o[2 * step], p[pair], first);
                ptx::mma_m16n8k16_bf16(o[2 * step + 1], p[pair], second);
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
};

// The visibility of each query row's token, in words of 32 bits; clear where there is none.
__device__ __forceinline__ void load_masks(const Item& item, const word64* visible, int words,
                                           unsigned* masks, int thread) {
#pragma unroll 1
    for (int i = thread; i < ROWS * MASK_WORDS; i += THREADS) {
        const int row = item.row_tile * ROWS + i / MASK_WORDS;
        const int word = i % MASK_WORDS;
        word64 seen = 0;
        if (row < item.rows && word / 2 < words) {
            seen = visible[(item.first_token + row / GROUP) * words + word / 2];
        }
        masks[i] = static_cast<unsigned>(seen >> word % 2 * 32);
    }
}

}  // namespace

// Computes every item of the plan, for every KV head.
//
// Launch: num_ctas x kv_heads blocks, as many as the plan was made for by the KV heads; block (c, h)
// takes the items cta_work[c] names. Request, row tile, range, slot and count of an item are the
// plan's word and not judged again. Rows of `out` and `lse` that belong to row tiles in one piece are
// written, and all rows of the partial slots that belong to a query; `lse` is -inf and `out` 0 where
// nothing is seen. Strides count elements, from token to token, head to head, slot to slot. Query head
// i has KV head i / GROUP. The trees' rows are in `k_extend` and `v_extend`, or where those are None,
// in the slots `out_cache_loc`. Words of `visible` that are not there count as clear.
//
// @kernel verify_gqa_partials
// @param q read bf16 [tokens, kv_heads * GROUP, 128] stride=(q_stride, q_head_stride, 1) align=16
// @param q_stride           value   int64                   multiple of 8
// @param q_head_stride      value   int64                   multiple of 8
// @param sm_scale           value   fp32                    factor on the scores
// @param k_buffer read bf16 [num_slots, kv_heads, 128] stride=(k_stride, k_head_stride, 1) align=16
// @param k_stride           value   int64                   multiple of 8
// @param k_head_stride      value   int64                   multiple of 8
// @param v_buffer read bf16 [num_slots, kv_heads, 128] stride=(v_stride, v_head_stride, 1) align=16
// @param v_stride           value   int64                   multiple of 8
// @param v_head_stride      value   int64                   multiple of 8
// @param num_slots          value   int64                   slots of the pools
// @param kv_heads           value   int32
// @param kv_indptr          read    int32 [bounds]          bounds of each prefix in kv_indices
// @param kv_indices         read    KV_INDEX [*]            slots of the prefixes
// @param k_extend? read bf16 [tokens, kv_heads, 128] stride=(k_extend_stride, k_extend_head_stride, 1) align=16
// @param k_extend_stride      value int64                   multiple of 8
// @param k_extend_head_stride value int64                   multiple of 8
// @param v_extend? read bf16 [tokens, kv_heads, 128] stride=(v_extend_stride, v_extend_head_stride, 1) align=16
// @param v_extend_stride      value int64                   multiple of 8
// @param v_extend_head_stride value int64                   multiple of 8
// @param out_cache_loc?     read    int64 [tokens]          slots of the trees
// @param qo_indptr          read    QO_INDEX [bounds]       bounds of each tree in q
// @param visible            read    uint64 [tokens, words]  bit k of word w: sees token 64 w + k
// @param words              value   int32                   1 to 4
// @param work read int32 [max_work, 6] align=8  request, row tile, begin, end, slot, splits
// @param cta_work           read    int32 [num_ctas, 4] align=16  first item, end, step, half
// @param partial_out scratch int16 [slots, kv_heads, ROWS, 128] align=16  PARTIAL, normalised
// @param partial_lse        scratch fp32 [slots, kv_heads, ROWS]  base 2
// @param out write bf16 [tokens, kv_heads * GROUP, 128] stride=(out_stride, 128, 1) align=16
// @param out_stride         value   int64                   multiple of 8
// @param lse                write   fp32 [tokens, kv_heads * GROUP]  natural logarithm
// @block 128
// @shared STAGES * 2 * TILE * 128 * 2 + ROWS * 32 + 48
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    verify_gqa_partials(const bits16* __restrict__ q, long long q_stride, long long q_head_stride,
                        float sm_scale, const bits16* __restrict__ k_buffer, long long k_stride,
                        long long k_head_stride, const bits16* __restrict__ v_buffer,
                        long long v_stride, long long v_head_stride, long long num_slots,
                        int kv_heads, const int* __restrict__ kv_indptr,
                        const KV_INDEX* __restrict__ kv_indices,
                        const bits16* __restrict__ k_extend, long long k_extend_stride,
                        long long k_extend_head_stride, const bits16* __restrict__ v_extend,
                        long long v_extend_stride, long long v_extend_head_stride,
                        const long long* __restrict__ out_cache_loc,
                        const QO_INDEX* __restrict__ qo_indptr, const word64* __restrict__ visible,
                        int words, const int* __restrict__ work, const int* __restrict__ cta_work,
                        short* __restrict__ partial_out, float* __restrict__ partial_lse,
                        bits16* __restrict__ out, long long out_stride, float* __restrict__ lse) {
    DYNAMIC_SHARED(cursor);
    CARVE(cursor, bits16, ring, STAGES * STAGE);
    CARVE(cursor, unsigned, masks, ROWS* MASK_WORDS);
    CARVE(cursor, Item, items, 1);
    Item& item = items[0];

    const int kv_head = static_cast<int>(blockIdx.y);
    const KvRows source = {{k_buffer, k_stride, k_head_stride},
                           {v_buffer, v_stride, v_head_stride},
                           num_slots,
                           kv_indices,
                           {k_extend, k_extend_stride, k_extend_head_stride},
                           {v_extend, v_extend_stride, v_extend_head_stride},
                           out_cache_loc};

    for (bool first = true;; first = false) {
        if (thread_anew() == 0) {
            plan::next(item, first, work, cta_work + blockIdx.x * 4, kv_indptr, qo_indptr, GROUP);
        }
        __syncthreads();
        if (item.rows < 0) {
            break;
        }
        int start = item.begin;  // of the present tile
        Listed next;
        source.fetch_first(next, item, ring, Place(thread_anew()));
        load_masks(item, visible, words, masks, thread_anew());
        Queries operands;
        load_queries(operands, {q, q_stride, q_head_stride}, item, Place(thread_anew()));
        State state;
        state.clear();

        int stage = 0;
        for (;;) {
            ptx::cp_async_wait<STAGES - 2>();
            __syncthreads();
            if (start >= item.end) {
                break;
            }
            {
                // The tile before has been used up by all: its place in the ring is free.
                const Place own(thread_anew());
                const int before = stage == 0 ? STAGES - 1 : stage - 1;
                const int coming = start + (STAGES - 1) * TILE;
                source.fetch(item, coming, next, ring + before * STAGE, own);
                ptx::cp_async_commit();
                source.look_up(next, item, coming + TILE, own);
            }
            const Place place(thread_anew());
            if (item.row_tile * ROWS + place.row_warp * WARP_ROWS < item.rows) {
                const bits16* tile = ring + stage * STAGE;
                Scores s = {};
                multiply_keys(s, operands, tile, place);
#pragma unroll
                for (int i = 0; i < 2 * PAIRS * 4; ++i) {
                    s[i / 4][i % 4] *= sm_scale * LOG2_E;
                }
                if (start + TILE > min(item.prefix, item.end)) {
                    hide(s, item, start + place.kv_warp * WARP_KV + place.lane % 4 * 2,
                         masks + (place.row_warp * WARP_ROWS + place.lane / 4) * MASK_WORDS);
                }
                Weights p;
                state.soften(s, p);
                state.multiply_values(p, tile + TILE * DIM, place);
            }
            start += TILE;
            stage = stage == STAGES - 1 ? 0 : stage + 1;
        }

        // The ring has been read by all. Warps that have the same query rows meet in it.
        const Place own(thread_anew());
        state.gather_sums();
#pragma unroll 1
        for (int width = KV_WARPS / 2; width > 0; width /= 2) {
            const int room = own.row_warp * (KV_WARPS / 2) + own.kv_warp % width;
            float* lane_room = reinterpret_cast<float*>(ring) + room * MERGED * 32 + own.lane;
            if (own.kv_warp >= width && own.kv_warp < 2 * width) {
                state.leave(lane_room);
            }
            __syncthreads();
            if (own.kv_warp < width) {
                state.take(lane_room);
            }
            __syncthreads();
        }
        if (own.kv_warp == 0) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int row = own.row_warp * WARP_ROWS + half * 8 + own.lane / 4;
                const int flat = item.row_tile * ROWS + row;
                const bool sees = state.sum[half] != 0.0f;
                const float inverse = sees ? 1.0f / state.rounded_sum[half] : 0.0f;
                const float log_sum =
                    sees ? state.max[half] + log2f(state.sum[half]) : minus_infinity();
                if (own.lane % 4 == 0 && flat < item.rows) {
                    if (item.slot < 0) {
                        const long long token = item.first_token + flat / GROUP;
                        lse[(token * kv_heads + kv_head) * GROUP + flat % GROUP] = log_sum * LN_2;
                    } else {
                        const long long at = item.slot * static_cast<long long>(kv_heads) + kv_head;
                        partial_lse[at * ROWS + row] = log_sum;
                    }
                }
                bits16* to = ring + row * OUT_PITCH + own.lane % 4 * 2;
#pragma unroll
                for (int block = 0; block < 2 * STEPS; ++block) {
                    const float (&o)[4] = state.o[block];
                    *reinterpret_cast<unsigned*>(to + block * 8) =
                        partials::pack(o[half * 2] * inverse, o[half * 2 + 1] * inverse);
                }
            }
        }
        __syncthreads();
#pragma unroll 1
        for (int piece = thread_anew(); piece < ROWS * ROW_PIECES; piece += THREADS) {
            const int row = piece / ROW_PIECES;
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
                const uint4 columns = load128(ring + row * OUT_PITCH + column);
                store128(to + column, item.slot < 0 ? combine::rounded(columns) : columns);
            }
        }
        __syncthreads();  // the ring is filled anew
    }
}

// Merges the pieces of the row tiles that were cut and writes their rows of `out` and `lse`.
//
// Launch: any number of blocks of COMBINE_THREADS threads by the KV heads; the grid need not know the
// plan.
//
// @kernel verify_gqa_combine
// @param partial_out    read   int16 [slots, kv_heads, ROWS, 128] align=16  PARTIAL, normalised
// @param partial_lse    read   fp32 [slots, kv_heads, ROWS]  base 2
// @param kv_heads       value  int32
// @param combine_indptr read   int32 [tiles + 1]     bounds of each cut row tile's slots
// @param combine_tiles  read   int32 [tiles, 4] align=16  as verify_plan writes them
// @param tiles          value  int32                 most row tiles that can be cut
// @param out update bf16 [tokens, kv_heads * GROUP, 128] stride=(out_stride, 128, 1) align=16
// @param out_stride     value  int64                 multiple of 8
// @param lse            update fp32 [tokens, kv_heads * GROUP]  natural logarithm
// @block COMBINE_THREADS
extern "C" __global__ void __launch_bounds__(COMBINE_THREADS)
    verify_gqa_combine(const short* __restrict__ partial_out, const float* __restrict__ partial_lse,
                       int kv_heads, const int* __restrict__ combine_indptr,
                       const int* __restrict__ combine_tiles, int tiles, bits16* __restrict__ out,
                       long long out_stride, float* __restrict__ lse) {
    constexpr int COMBINE_WARPS = COMBINE_THREADS / 32;
    constexpr int UNITS = ROWS * ROW_PIECES / 32;
    SHARED_ARRAY(float, means, [COMBINE_WARPS][combine::PIECE + 2][32]);
    const int kv_head = static_cast<int>(blockIdx.y);
    merge::Turns<UNITS, ROWS, 8, GROUP, COMBINE_THREADS, COMBINE_LEAST> turns(combine_indptr,
                                                                              combine_tiles, tiles);
    merge::Turn turn;
    while (turns.next(turn)) {
        combine::units<COMBINE_WARPS, COMBINE_UNROLL, UNITS, ROWS>(
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
