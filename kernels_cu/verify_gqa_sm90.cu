// Attention of draft trees over separate keys and values on sm_90a: the job, the parameters and the
// results of verify_gqa.cu for row tiles of 64 or 128 query rows, with the matrix units of Hopper GPUs.
// It cannot run anywhere else.
//
// A block goes through its items of the plan with three warpgroups:
//   copy     gathers KV rows into a ring of tiles in shared memory (cp.async, 16 bytes a thread,
//            straight into the swizzle that wgmma reads)
//   attend   two of them: S = Q K^T, the mask, the softmax, O += P V. While one computes exponentials,
//            the other one multiplies.
// Of 128 query rows each attending group has half, so that a tile is read once for both. 64 query rows
// are those of both groups: they take the tiles by turns, each with a softmax and outputs of its own,
// and meet once, when the item is done. Q and P are operands in registers: a warp's scores are its
// probabilities' operand as they lie.
//
// A slot outside the pool is never read: a query row that sees it becomes NaN.
//
// Both kernels: no host reads, no allocation, addresses 64 bits wide, the same bits at every run.

// query heads that share a KV head
#ifndef GROUP
#define GROUP 8
#endif
// query rows of a row tile: 64 or 128; the plan is for as many
#ifndef ROWS
#define ROWS 64
#endif

#define WGMMA_TYPES "bf16.bf16"
#include "gqa.cuh"
#include "hopper.cuh"
#include "shared.cuh"

// tiles in shared memory
#ifndef SLOTS
#define SLOTS 5
#endif
// the types of kv_indices and qo_indptr: int or long long
#ifndef KV_INDEX
#define KV_INDEX int
#endif
#ifndef QO_INDEX
#define QO_INDEX int
#endif
// blocks that a multiprocessor is to hold at once
#ifndef RESIDENT
#define RESIDENT 1
#endif
#ifndef COMBINE_THREADS
#define COMBINE_THREADS 512
#endif
// splits that a warp of verify_gqa_combine_sm90 has in flight
#ifndef COMBINE_UNROLL
#define COMBINE_UNROLL 5
#endif
// splits that are worth a further warp
#ifndef COMBINE_LEAST
#define COMBINE_LEAST 4
#endif
// registers of a thread in each role
#ifndef COPY_REGISTERS
#define COPY_REGISTERS 56
#endif
#ifndef ATTEND_REGISTERS
#define ATTEND_REGISTERS 224
#endif

namespace {

using namespace gqa;

constexpr int WARPGROUP = 128;
constexpr int THREADS = 3 * WARPGROUP;
constexpr int WARPGROUP_ROWS = 64;                 // query rows of an attending group
constexpr bool BY_TURNS = ROWS == WARPGROUP_ROWS;  // both have the same rows, and every other tile
constexpr int TILE = 64;                           // KV rows of a tile
constexpr int CHUNK = 64;                          // columns of a swizzled block
constexpr int ROW_BYTES = 128;                     // of a row in it
constexpr int BLOCK_BYTES = TILE * ROW_BYTES;
constexpr int VALUES_AT = 2 * BLOCK_BYTES;  // in a tile, behind its keys
constexpr int TILE_BYTES = 4 * BLOCK_BYTES;
constexpr int COPY_ROWS = WARPGROUP / 8;  // that the copy group fetches at once
constexpr int COPY_STEPS = TILE / COPY_ROWS;
constexpr int PAIRS = TILE / 16;  // of two blocks of 8 KV rows

// In shared memory, from a multiple of 1,024 bytes on.
constexpr int SHARES_AT = SLOTS * TILE_BYTES;  // what one group leaves for the other; then outputs
constexpr int SHARE_BYTES = WARPGROUP * MERGED * 4;
constexpr int MASKS_AT = SHARES_AT + SHARE_BYTES;
constexpr int BARRIERS_AT = MASKS_AT + 2 * WARPGROUP_ROWS * MASK_WORDS * 4;
constexpr int FULL = 0;             // a ring slot holds a tile: copy threads
constexpr int FREE = FULL + SLOTS;  // and has been used up: the warps that need it
constexpr int LEFT = FREE + SLOTS;  // the second group's share is there: 4 warps
constexpr int TAKEN = LEFT + 1;     // and its room is free: 4 warps
constexpr int BARRIERS = TAKEN + 1;
constexpr int SHARED_BYTES = 1024 + BARRIERS_AT + BARRIERS * 8;

static_assert(ROWS == WARPGROUP_ROWS || ROWS == 2 * WARPGROUP_ROWS,
              "a warpgroup multiplies 64 rows");
// A group that takes every other tile does not see each phase of a slot. It knows that the tile before
// its own has come, or of the next item the one before that, so that the last one in its slot has, too:
// copies complete in the order of their arrivals.
static_assert(SLOTS >= 3, "what a parity means is certain");
static_assert(SHARE_BYTES >= ROWS * OUT_PITCH * 2, "outputs are staged there");
static_assert(COPY_REGISTERS + 2 * ATTEND_REGISTERS <= 512, "65,536 registers");
static_assert(SHARED_BYTES <= 232448, "what a block of sm_90 can have");

// A place in the ring and the parity of its present phase.
struct Turn {
    int slot = 0;
    int parity = 0;

    __device__ __forceinline__ void advance(int tiles) {
        slot += tiles;
        parity ^= slot / SLOTS & 1;
        slot %= SLOTS;
    }
};

// Shared memory by address.
struct Room {
    unsigned base;

    __device__ __forceinline__ unsigned barrier(int number) const {
        return base + BARRIERS_AT + number * 8;
    }
    __device__ __forceinline__ unsigned tile(int slot) const { return base + slot * TILE_BYTES; }
};

__device__ __forceinline__ int tiles_of(const Item& item) {
    return (max(item.end - item.begin, 0) + TILE - 1) / TILE;
}

// ---- copy -----------------------------------------------------------------------------------

// What is no slot of the pool.
constexpr long long OUTSIDE = -1;  // a slot that the pool does not have
constexpr long long PAST = -2;     // behind the end of the item
constexpr long long FIRST_TREE =
    -3;  // and below: a row of the trees' own tensors, counted downwards

// Where the KV rows of this block's head are.
struct KvRows {
    Rows k, v;
    long long num_slots;
    const KV_INDEX* kv_indices;
    Rows k_extend, v_extend;
    const long long* out_cache_loc;  // null: the trees' rows are in `k_extend` and `v_extend`
};

// The row at one KV position: looked up first, found later, so that nobody waits for the index.
struct Listed {
    KV_INDEX prefix_slot;
    long long tree_slot;

    __device__ __forceinline__ void look_up(const KvRows& source, const Item& item, int position) {
        const int node = position - item.prefix;
        if (position < item.end && node < 0) {
            prefix_slot = source.kv_indices[item.first_index + position];
        } else if (position < item.end && source.out_cache_loc != nullptr) {
            tree_slot = source.out_cache_loc[item.first_token + node];
        }
    }

    __device__ __forceinline__ long long find(const KvRows& source, const Item& item,
                                              int position) const {
        const int node = position - item.prefix;
        if (position >= item.end) {
            return PAST;
        }
        if (node >= 0 && source.out_cache_loc == nullptr) {
            return FIRST_TREE - (item.first_token + node);
        }
        const long long slot = node < 0 ? static_cast<long long>(prefix_slot) : tree_slot;
        return slot >= 0 && slot < source.num_slots ? slot : OUTSIDE;
    }
};

// Starts the copies of this thread's pieces of a row of keys and one of values, two of each.
__device__ __forceinline__ void copy_row(const KvRows& source, long long found, unsigned to,
                                         int sub) {
    if (found == OUTSIDE) {
        // Scores become NaN. Values are 0: a query row that does not see this one adds 0 times it.
#pragma unroll
        for (int chunk = 0; chunk < 4; ++chunk) {
            const unsigned bits = chunk < 2 ? ALL : 0;
            hopper::store16(to + chunk * BLOCK_BYTES, make_uint4(bits, bits, bits, bits));
        }
        __threadfence_block();  // before this thread's arrival
        return;
    }
    const bool in_tree = found <= FIRST_TREE;
    const long long row = in_tree ? FIRST_TREE - found : max(found, 0ll);
    const bits16* keys = (in_tree ? source.k_extend : source.k).at(row, 0) + sub * PIECE;
    const bits16* values = (in_tree ? source.v_extend : source.v).at(row, 0) + sub * PIECE;
    const int bytes = found == PAST ? 0 : 16;
#pragma unroll
    for (int chunk = 0; chunk < 2; ++chunk) {
        hopper::copy16(to + chunk * BLOCK_BYTES, keys + chunk * CHUNK, bytes);
        hopper::copy16(to + VALUES_AT + chunk * BLOCK_BYTES, values + chunk * CHUNK, bytes);
    }
}

// A warp copies 16 rows of each tile, eight lanes a row; as many lanes look up one row each.
template <class Items>
__device__ __forceinline__ void copy_items(Items& items, const KvRows& source, Room room,
                                           int thread) {
    const int lane = thread % 32;
    const int sub = thread % 8;
    const unsigned place = thread / 8 * ROW_BYTES + ((sub ^ (thread / 8 % 8)) << 4);
    const int own_row = thread / 32 * 4 + lane % 4 + lane / 4 * COPY_ROWS;
    Turn turn;
    Item item;
#pragma unroll 1
    while (items.next(item)) {
        int position = lane < TILE / 4 ? item.begin + own_row : item.end;
        Listed listed;
        listed.look_up(source, item, position);
#pragma unroll 1
        for (int left = tiles_of(item); left > 0; --left) {
            const long long own = listed.find(source, item, position);
            position = min(position, item.end) + TILE;
            listed.look_up(source, item, position);
            hopper::wait(room.barrier(FREE + turn.slot), turn.parity ^ 1);
            const unsigned to = room.tile(turn.slot) + place;
#pragma unroll
            for (int i = 0; i < COPY_STEPS; ++i) {
                copy_row(source, __shfl_sync(ALL, own, i * 4 + lane / 8),
                         to + i * COPY_ROWS * ROW_BYTES, sub);
            }
            hopper::arrive_after_copies(room.barrier(FULL + turn.slot));
            turn.advance(1);
        }
    }
    hopper::wait_for_copies();
}

// ---- attend ---------------------------------------------------------------------------------

using Scores = float[2 * PAIRS][4];
using Weights = unsigned[PAIRS][4];

// S = Q K^T of a tile.
__device__ __forceinline__ void multiply_keys(Scores& s, const Queries& q, unsigned tile) {
    const word64 keys = hopper::matrix(tile, 16);
    hopper::wgmma_fence();
#pragma unroll
    for (int step = 0; step < STEPS; ++step) {
        hopper::wgmma(reinterpret_cast<float (&)[8 * PAIRS]>(s), q[step],
                      keys + ((step / 4 * BLOCK_BYTES + step % 4 * 32) >> 4), step > 0);
    }
    hopper::wgmma_commit();
    hopper::wgmma_wait<0>();
}

// O += P V of a tile.
__device__ __forceinline__ void multiply_values(float (&o)[2 * STEPS][4], const Weights& p,
                                                unsigned tile) {
    const word64 values = hopper::matrix(tile + VALUES_AT, BLOCK_BYTES);
    hopper::wgmma_fence();
#pragma unroll
    for (int step = 0; step < PAIRS; ++step) {
        hopper::wgmma_transposed(reinterpret_cast<float (&)[8 * STEPS]>(o), p[step],
                                 values + ((step * 16 * ROW_BYTES) >> 4), true);
    }
    hopper::wgmma_commit();
    hopper::wgmma_wait<0>();
}

}  // namespace

// Computes every item of the plan, for every KV head.
//
// Launch: as for verify_gqa_partials. It may be launched before the kernel in front of it has ended,
// and waits before it reads anything.
//
// @kernel verify_gqa_partials_sm90
// @arch sm_90a
// @early
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
// @block 384
// @shared SLOTS * 32768 + 35840 + 4096 + 16 * SLOTS + 16 + 1024
extern "C" __global__ void __launch_bounds__(THREADS, RESIDENT) verify_gqa_partials_sm90(
    const bits16* __restrict__ q, long long q_stride, long long q_head_stride, float sm_scale,
    const bits16* __restrict__ k_buffer, long long k_stride, long long k_head_stride,
    const bits16* __restrict__ v_buffer, long long v_stride, long long v_head_stride,
    long long num_slots, int kv_heads, const int* kv_indptr,
    const KV_INDEX* __restrict__ kv_indices, const bits16* __restrict__ k_extend,
    long long k_extend_stride, long long k_extend_head_stride, const bits16* __restrict__ v_extend,
    long long v_extend_stride, long long v_extend_head_stride,
    const long long* __restrict__ out_cache_loc, const QO_INDEX* qo_indptr,
    const word64* __restrict__ visible, int words, const int* work, const int* cta_work,
    short* __restrict__ partial_out, float* __restrict__ partial_lse, bits16* __restrict__ out,
    long long out_stride, float* __restrict__ lse) {
    DYNAMIC_SHARED(cursor);
    const unsigned start = hopper::shared_address(cursor);
    const Room room = {(start + 1023) & ~1023u};
    unsigned char* const shared = cursor + (room.base - start);
    const int thread = static_cast<int>(threadIdx.x) % WARPGROUP;
    const int group = __shfl_sync(ALL, static_cast<int>(threadIdx.x) / WARPGROUP, 0);
    const int kv_head = static_cast<int>(blockIdx.y);

    if (threadIdx.x == 0) {
        for (int slot = 0; slot < SLOTS; ++slot) {
            hopper::barrier_init(room.barrier(FULL + slot), WARPGROUP);
            hopper::barrier_init(room.barrier(FREE + slot), BY_TURNS ? 4 : 8);
        }
        hopper::barrier_init(room.barrier(LEFT), 4);
        hopper::barrier_init(room.barrier(TAKEN), 4);
        hopper::barrier_init_done();
    }
    __syncthreads();
    hopper::wait_for_dependency();
    hopper::launch_dependents();  // not before: they read the plan, too, which may just be made

    // Every warpgroup goes through the block's items by itself.
    struct Items {
        const int* work;
        const int* cta_work;
        const int* kv_indptr;
        const QO_INDEX* qo_indptr;
        bool first = true;

        __device__ __forceinline__ bool next(Item& item) {
            plan::next(item, first, work, cta_work, kv_indptr, qo_indptr, GROUP);
            first = false;
            return item.rows >= 0;
        }
    };
    Items items = {work, cta_work + blockIdx.x * 4, kv_indptr, qo_indptr};

    if (group == 0) {
        hopper::give_registers<COPY_REGISTERS>();
        const KvRows source = {
            {k_buffer + kv_head * k_head_stride, k_stride, 0},
            {v_buffer + kv_head * v_head_stride, v_stride, 0},
            num_slots,
            kv_indices,
            {k_extend + kv_head * k_extend_head_stride, k_extend_stride, 0},
            {v_extend + kv_head * v_extend_head_stride, v_extend_stride, 0},
            out_cache_loc,
        };
        copy_items(items, source, room, thread);
        return;
    }
    hopper::take_registers<ATTEND_REGISTERS>();
    const int side = group - 1;
    const int lane = thread % 32;
    const int warp = thread / 32;
    const int first_row = BY_TURNS ? 0 : side * WARPGROUP_ROWS;  // of the row tile
    const int row_warp = first_row / WARP_ROWS + warp;
    unsigned* const masks =
        reinterpret_cast<unsigned*>(shared + MASKS_AT) + side * WARPGROUP_ROWS * MASK_WORDS;
    float* const lane_room =
        reinterpret_cast<float*>(shared + SHARES_AT) + warp * MERGED * 32 + lane;
    bits16* const staged = reinterpret_cast<bits16*>(shared + SHARES_AT);
    const float scale = sm_scale * LOG2_E;
    Turn turn;       // of the item's first tile
    int shares = 0;  // the parity of what the second group has left
    Item item;
#pragma unroll 1
    while (items.next(item)) {
        const int tiles = tiles_of(item);
        hopper::sync_warpgroup(1 + side);  // the masks and outputs before have been read
        load_masks<WARPGROUP, WARPGROUP_ROWS>(item, first_row, visible, words, masks, thread);
        Queries operands;
        load_queries(operands, {q, q_stride, q_head_stride}, item, row_warp, lane);
        State state;
        state.clear();
        hopper::sync_warpgroup(1 + side);  // the masks are there
        const int masked_from = min(item.prefix, item.end);
        const bool present = item.row_tile * ROWS + first_row < item.rows;
        Turn own = turn;
        own.advance(BY_TURNS ? side : 0);
#pragma unroll 1
        for (int number = BY_TURNS ? side : 0; number < tiles; number += BY_TURNS ? 2 : 1) {
            const int begin = item.begin + number * TILE;
            const unsigned tile = room.tile(own.slot);
            hopper::wait(room.barrier(FULL + own.slot), own.parity);
            hopper::proxy_fence();
            if (present) {
                Scores s;
                multiply_keys(s, operands, tile);
#pragma unroll
                for (int i = 0; i < 8 * PAIRS; ++i) {
                    s[i / 4][i % 4] *= scale;
                }
                if (begin + TILE > masked_from) {
                    hide(s, item, begin + lane % 4 * 2,
                         masks + (warp * WARP_ROWS + lane / 4) * MASK_WORDS);
                }
                Weights p;
                state.soften<PAIRS>(s, p);
                multiply_values(state.o, p, tile);
            }
            __syncwarp();
            if (lane == 0) {
                hopper::arrive(room.barrier(FREE + own.slot));
            }
            own.advance(BY_TURNS ? 2 : 1);
        }
        turn.advance(tiles);

        state.gather_sums();
        if (BY_TURNS && side == 1) {
            hopper::wait(room.barrier(TAKEN), shares ^ 1);
            state.leave(lane_room);
            __syncwarp();
            if (lane == 0) {
                hopper::arrive(room.barrier(LEFT));
            }
        } else {
            if (BY_TURNS) {
                hopper::wait(room.barrier(LEFT), shares);
                state.take(lane_room);
                hopper::sync_warpgroup(1);  // outputs take the place of what has been taken
            }
            state.finish(item, row_warp, lane, kv_head, kv_heads, staged, partial_lse, lse);
            hopper::sync_warpgroup(1 + side);
            write_staged<WARPGROUP, WARPGROUP_ROWS>(item, first_row, staged, kv_head, kv_heads,
                                                    partial_out, out, out_stride, thread);
            __syncwarp();
            if (BY_TURNS && lane == 0) {
                hopper::arrive(room.barrier(TAKEN));
            }
        }
        shares ^= 1;
    }
}

// Merges the pieces of the row tiles that were cut and writes their rows of `out` and `lse`.
//
// Launch: any number of blocks of COMBINE_THREADS threads by the KV heads; the grid need not know the
// plan. It may be launched before the kernel that makes the pieces has ended, and waits before it
// reads what that one writes.
//
// @kernel verify_gqa_combine_sm90
// @arch sm_90a
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
    verify_gqa_combine_sm90(const short* partial_out, const float* partial_lse, int kv_heads,
                            const int* __restrict__ combine_indptr,
                            const int* __restrict__ combine_tiles, int tiles,
                            bits16* __restrict__ out, long long out_stride,
                            float* __restrict__ lse) {
    SHARED_ARRAY(float, means, [COMBINE_THREADS / 32][combine::PIECE + 2][32]);
    merge_pieces<COMBINE_THREADS, COMBINE_UNROLL, COMBINE_LEAST>(
        partial_out, partial_lse, kv_heads, combine_indptr, combine_tiles, tiles, out, out_stride,
        lse, means);
}
