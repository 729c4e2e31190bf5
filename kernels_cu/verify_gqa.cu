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

// query heads that share a KV head
#ifndef GROUP
#define GROUP 8
#endif
// query rows of a row tile: 16, 32 or 64; the plan is for as many
#ifndef ROWS
#define ROWS 64
#endif

#include "combine.cuh"
#include "early.cuh"
#include "gqa.cuh"
#include "ptx.cuh"
#include "shared.cuh"
#include "thread.cuh"
#include "vector.cuh"

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

using namespace gqa;

constexpr int WARPS = 4;
constexpr int THREADS = WARPS * 32;
constexpr int ROW_WARPS = ROWS / WARP_ROWS;
constexpr int KV_WARPS = WARPS / ROW_WARPS;
constexpr int WARP_KV = TILE / KV_WARPS;  // KV rows of a tile that a warp does
constexpr int PAIRS = WARP_KV / 16;       // of two blocks of 8 KV rows
constexpr int COPY_LANES = 8;             // that fetch one row
constexpr int COPY_STEP = THREADS / COPY_LANES;
constexpr int COPY_ROWS = TILE / COPY_STEP;  // of each thread
constexpr int STAGE = 2 * TILE * DIM;        // elements: keys, then values

static_assert(ROWS == 16 || ROWS == 32 || ROWS == 64, "the plan counts row tiles of such sizes");
static_assert(WARP_KV % 16 == 0 && WARP_KV >= 16, "whole operands of probabilities");
static_assert(COPY_ROWS >= 1 && TILE % COPY_STEP == 0, "all threads fetch");
static_assert(STAGES >= 2, "a tile is fetched while another one is used");
static_assert(STAGES * STAGE * 2 >= WARPS / 2 * MERGED * 32 * 4, "the ring holds what warps merge");
static_assert(STAGES * STAGE >= ROWS * OUT_PITCH, "the ring holds a row tile of outputs");

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

// Elements from the start of a tile to a piece of one of its rows.
__device__ __forceinline__ int place_of(int row, int piece) {
    return row * DIM + (piece ^ row % 8) * PIECE;
}

using Listed = KV_INDEX[COPY_ROWS];

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

using Scores = float[2 * PAIRS][4];
using Weights = unsigned[PAIRS][4];

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

// O += P V over this warp's KV rows of a tile.
__device__ __forceinline__ void multiply_values(float (&o)[2 * STEPS][4], const Weights& p,
                                                const bits16* values, Place place) {
    const int row = place.kv_warp * WARP_KV + place.lane % 16;
#pragma unroll
    for (int pair = 0; pair < PAIRS; ++pair) {
#pragma unroll
        for (int step = 0; step < STEPS; ++step) {
            unsigned both[4];
            ptx::ldmatrix_x4_trans(both,
                                   values + place_of(row + pair * 16, step * 2 + place.lane / 16));
            const unsigned first[2] = {both[0], both[1]};
            const unsigned second[2] = {both[2], both[3]};
            ptx::mma_m16n8k16_bf16(o[2 * step], p[pair], first);
            ptx::mma_m16n8k16_bf16(o[2 * step + 1], p[pair], second);
        }
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
// @early
// @shared STAGES * 2 * TILE * 128 * 2 + ROWS * 32 + 48
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT)
    verify_gqa_partials(const bits16* __restrict__ q, long long q_stride, long long q_head_stride,
                        float sm_scale, const bits16* __restrict__ k_buffer, long long k_stride,
                        long long k_head_stride, const bits16* __restrict__ v_buffer,
                        long long v_stride, long long v_head_stride, long long num_slots,
                        int kv_heads, const int* kv_indptr, const KV_INDEX* __restrict__ kv_indices,
                        const bits16* __restrict__ k_extend, long long k_extend_stride,
                        long long k_extend_head_stride, const bits16* __restrict__ v_extend,
                        long long v_extend_stride, long long v_extend_head_stride,
                        const long long* __restrict__ out_cache_loc, const QO_INDEX* qo_indptr,
                        const word64* __restrict__ visible, int words, const int* work,
                        const int* cta_work, short* __restrict__ partial_out,
                        float* __restrict__ partial_lse, bits16* __restrict__ out,
                        long long out_stride, float* __restrict__ lse) {
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

    early::wait_for_dependency();
    early::launch_dependents();  // not before: they read the plan, too, which may just be made
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
        load_masks<THREADS, ROWS>(item, 0, visible, words, masks, thread_anew());
        Queries operands;
        {
            const Place own(thread_anew());
            load_queries(operands, {q, q_stride, q_head_stride}, item, own.row_warp, own.lane);
        }
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
                multiply_values(state.o, p, tile + TILE * DIM, place);
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
            state.finish(item, own.row_warp, own.lane, kv_head, kv_heads, ring, partial_lse, lse);
        }
        __syncthreads();
        write_staged<THREADS, ROWS>(item, 0, ring, kv_head, kv_heads, partial_out, out, out_stride,
                                    thread_anew());
        __syncthreads();  // the ring is filled anew
    }
}

// Merges the pieces of the row tiles that were cut and writes their rows of `out` and `lse`.
//
// Launch: any number of blocks of COMBINE_THREADS threads by the KV heads; the grid need not know the
// plan. It may be launched before the kernel that makes the pieces has ended, and waits before it
// reads what that one writes.
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
// @early
extern "C" __global__ void __launch_bounds__(COMBINE_THREADS)
    verify_gqa_combine(const short* partial_out, const float* partial_lse, int kv_heads,
                       const int* __restrict__ combine_indptr,
                       const int* __restrict__ combine_tiles, int tiles, bits16* __restrict__ out,
                       long long out_stride, float* __restrict__ lse) {
    SHARED_ARRAY(float, means, [COMBINE_THREADS / 32][combine::PIECE + 2][32]);
    merge_pieces<COMBINE_THREADS, COMBINE_UNROLL, COMBINE_LEAST>(
        partial_out, partial_lse, kv_heads, combine_indptr, combine_tiles, tiles, out, out_stride,
        lse, means);
}
