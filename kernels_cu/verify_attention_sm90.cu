// Attention of draft trees over a latent KV cache on sm_90a: the job, the parameters and the results
// of verify_attention.cu for rows of 512 + 64 columns, with the matrix units of Hopper GPUs; but what a
// block does first is told by verify_starts, and not by cta_work. It cannot run anywhere else.
//
// A block holds 64 query rows and goes through its items of the plan with four warpgroups:
//   copy     gathers KV rows into a ring of tiles in shared memory (cp.async, 16 bytes a thread,
//            straight into the swizzle that wgmma reads), and each item's queries before them
//   scores   S = Q K^T, the mask and the softmax; hands the probabilities on as they lie in
//            registers, through a pair of buffers that nobody else has to understand
//   values   two of them: O += P V, each for half of V's columns, read from the same tile of KV
// 16 rows of a tile are free again when both have multiplied them, and copies of other rows take
// their place while the next 16 are multiplied. Held Q chunks are operands in registers; a
// multiprocessor has no room for them beside the ring.
//
// The matrix units would share their time evenly among warpgroups that wait for them, and then
// stand still while the softmax is computed. So the probabilities of a tile are handed on only when
// the scores of the next tile are all but multiplied, if that tile is there already: products with V
// fill the time of the softmax.
//
// Partials lie in the order of the accumulators, in pieces of 16 bytes: piece (j x 2 + h) x 128 + t
// of a slot is of thread t of values warpgroup h, with columns c, c + 1, c + 8, c + 9 for
// c = 256 h + 16 j + 2 (t % 4), of rows 16 (t / 32) + t % 32 / 4 and the 8th row behind it:
// {row, c}, {row + 8, c}, {row, c + 8}, {row + 8, c + 8}.
//
// A slot outside the pool is never read: a query row that sees it becomes NaN.
//
// Both kernels: no host reads, no allocation, addresses 64 bits wide, the same bits at every run.

// the type of queries, outputs and all rows: bf16 or fp16
#ifndef ELEMENT
#define ELEMENT bf16
#endif

#include "element.cuh"
#define WGMMA_TYPES WITH_ELEMENT(PTX_NAME_, ELEMENT) "." WITH_ELEMENT(PTX_NAME_, ELEMENT)
#include "hopper.cuh"
#include "merge.cuh"
#include "partial.cuh"
#include "ptx.cuh"
#include "shared.cuh"
#include "vector.cuh"

// query heads of this rank
#ifndef HEADS
#define HEADS 8
#endif
// columns of V, and further columns that only K has; no others are possible
#ifndef LATENT
#define LATENT 512
#endif
#ifndef ROPE
#define ROPE 64
#endif
// the type of the pool, which is that of the queries
#ifndef KV_ELEMENT
#define KV_ELEMENT bf16
#endif
// the types of kv_indices and qo_indptr: int or long long
#ifndef KV_INDEX
#define KV_INDEX int
#endif
#ifndef QO_INDEX
#define QO_INDEX int
#endif
// KV rows of a tile: 32 or 48
#ifndef TILE
#define TILE 48
#endif
// tiles in shared memory
#ifndef SLOTS
#define SLOTS 3
#endif
// chunks of 64 columns of Q that stay in registers
#ifndef HELD
#define HELD 5
#endif
// powers of 2 by which a query row's maximum must grow before its accumulators are rescaled
#ifndef RESCALE_ABOVE
#define RESCALE_ABOVE 8
#endif
// products with K of a tile, of 36, behind which the probabilities of the tile before are handed on
#ifndef HAND_ON_AFTER
#define HAND_ON_AFTER 32
#endif
// registers of a thread in each role; together with those of the second values group 512
#ifndef COPY_REGISTERS
#define COPY_REGISTERS 32
#endif
#ifndef SCORE_REGISTERS
#define SCORE_REGISTERS 144
#endif
#ifndef VALUE_REGISTERS
#define VALUE_REGISTERS 168
#endif
#ifndef COMBINE_THREADS
#define COMBINE_THREADS 512
#endif
// splits that a warp of verify_combine_sm90 has in flight
#ifndef COMBINE_UNROLL
#define COMBINE_UNROLL 15
#endif
// splits that are worth a further warp
#ifndef COMBINE_LEAST
#define COMBINE_LEAST 4
#endif

namespace {

constexpr int ROW_TILE = 64;
constexpr int GROUP_THREADS = 128;
constexpr int THREADS = 4 * GROUP_THREADS;
constexpr int CHUNK = 64;       // columns of a swizzled block
constexpr int ROW_BYTES = 128;  // of a row in it
constexpr int CHUNKS = (LATENT + ROPE) / CHUNK;
constexpr int VALUE_CHUNKS = LATENT / CHUNK;
constexpr int PIECE = 8;  // elements of a 16-byte access
constexpr int MAX_WORDS = 4;
constexpr int MASK_WORDS = MAX_WORDS + 1;  // and a clear one
constexpr int TOKENS = ROW_TILE / 8;       // most of a row tile
constexpr int START_SLOTS = 64;            // of the first entry, in cta_slots

constexpr int BLOCK_BYTES = TILE * ROW_BYTES;  // a chunk of a KV tile
constexpr int TILE_BYTES = CHUNKS * BLOCK_BYTES;
constexpr int QUERY_BYTES = ROW_TILE * ROW_BYTES;  // a chunk of the queries
constexpr int K_STEPS = TILE / 16;                 // of P V
constexpr int STEP_BYTES = GROUP_THREADS * 16;     // of the probabilities of one such step
constexpr int GIVEN_BYTES = K_STEPS * STEP_BYTES + GROUP_THREADS * 8;
constexpr int COPY_ROWS = GROUP_THREADS / 8;  // that the copy group fetches at once

// In shared memory, from a multiple of 1,024 bytes on.
constexpr int QUERIES_AT = SLOTS * TILE_BYTES;  // the chunks that are not held
constexpr int GIVEN_AT = QUERIES_AT + (CHUNKS - HELD) * QUERY_BYTES;
constexpr int MASKS_AT = GIVEN_AT + 2 * GIVEN_BYTES;
constexpr int NOTES_AT = MASKS_AT + TOKENS * MASK_WORDS * 8;
constexpr int BARRIERS_AT = NOTES_AT + THREADS / 32 * 16;
constexpr int FULL = 0;             // a ring slot holds a tile: COPY threads
constexpr int FREE = FULL + SLOTS;  // 16 rows are used up: 8 warps (queries: 4, twice each)
constexpr int GIVEN = FREE + SLOTS * K_STEPS;  // probabilities are in a buffer: 4 warps
constexpr int TAKEN = GIVEN + 2;               // they have been loaded: 8 warps
constexpr int ASKED = TAKEN + 2;  // the queries in shared memory have been used: 4 warps
constexpr int BARRIERS = ASKED + 1;
constexpr int SHARED_BYTES = 1024 + BARRIERS_AT + BARRIERS * 8;

static_assert(LATENT == 512 && ROPE == 64, "chunks are divided among warpgroups for these columns");
static_assert(BYTES_OF(KV_ELEMENT) == 2, "wgmma takes rows as they are copied");
static_assert(HEADS % 8 == 0 && HEADS >= 8, "a row tile has at most 8 tokens");
static_assert(TILE == 32 || TILE == 48, "products are written for these");
static_assert(COPY_ROWS == 16, "which are freed at once, too");
static_assert(HAND_ON_AFTER >= 1 && HAND_ON_AFTER < CHUNKS * 4, "there are products behind it");
static_assert(HELD >= 1 && HELD < CHUNKS && HELD * QUERY_BYTES <= TILE_BYTES,
              "the held chunks of Q come through a slot of the ring");
static_assert(COPY_REGISTERS + SCORE_REGISTERS + 2 * VALUE_REGISTERS <= 512, "65,536 registers");
static_assert(SHARED_BYTES <= 232448, "what a block of sm_90 can have");
static_assert(COMBINE_THREADS == 256 || COMBINE_THREADS == 512,
              "warps divide the units of a row tile evenly");

constexpr int COMBINE_WARPS = COMBINE_THREADS / 32;

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
constexpr unsigned ALL = 0xffffffffu;

namespace element = ELEMENT;
using bits16 = unsigned short;
using word64 = unsigned long long;

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// A place in the ring and the parity of its present phase.
struct Turn {
    int slot = 0;
    int parity = 0;

    __device__ __forceinline__ void advance() {
        slot += 1;
        if (slot == SLOTS) {
            slot = 0;
            parity ^= 1;
        }
    }
};

// Shared memory by address.
struct Room {
    unsigned base;

    __device__ __forceinline__ unsigned barrier(int number) const {
        return base + BARRIERS_AT + number * 8;
    }
    // Of 16 rows of a ring slot.
    __device__ __forceinline__ unsigned free_rows(int slot, int step) const {
        return barrier(FREE + slot * K_STEPS + step);
    }
    __device__ __forceinline__ unsigned tile(int slot) const { return base + slot * TILE_BYTES; }
    __device__ __forceinline__ unsigned given(int buffer) const {
        return base + GIVEN_AT + buffer * GIVEN_BYTES;
    }
    __device__ __forceinline__ unsigned note() const {
        return base + NOTES_AT + threadIdx.x / 32 * 16;
    }
};

// Where the plan and the bounds are.
struct Plan {
    const int* work;
    const int* kv_indptr;
    const QO_INDEX* qo_indptr;
};

// An entry of the work as the plan wrote it.
struct Entry {
    int2 tile;   // request, row tile
    int2 range;  // of the prefix
    int2 piece;  // slot, splits

    __device__ __forceinline__ Entry(int2 own_tile, int2 own_range, int2 own_piece)
        : tile(own_tile), range(own_range), piece(own_piece) {}

    __device__ __forceinline__ Entry(const Plan& plan, int number) {
        const int2* given = reinterpret_cast<const int2*>(plan.work + number * 6ll);
        tile = hopper::load_here(given);
        range = hopper::load_here(given + 1);
        piece = hopper::load_here(given + 2);
    }
};

// What belongs to one request.
struct Bounds {
    int first_index;
    int end_index;
    int first_token;
    int end_token;

    __device__ __forceinline__ Bounds(int2 indices, int2 tokens)
        : first_index(indices.x),
          end_index(indices.y),
          first_token(tokens.x),
          end_token(tokens.y) {}

    __device__ __forceinline__ Bounds(const Plan& plan, int request)
        : first_index(hopper::load_here(plan.kv_indptr + request)),
          end_index(hopper::load_here(plan.kv_indptr + request + 1)),
          first_token(static_cast<int>(hopper::load_here(plan.qo_indptr + request))),
          end_token(static_cast<int>(hopper::load_here(plan.qo_indptr + request + 1))) {}
};

// One item of the work, and what follows from it.
struct Item {
    int row_tile;
    int slot;    // of the partials; -1: the row tile is in one piece
    int begin;   // KV positions: rows of the prefix, then of the tree
    int prefix;  // rows of the prefix
    int end;
    int rows;         // query rows of the request
    int first_token;  // of the request
    int first_index;  // of its prefix in kv_indices

    __device__ __forceinline__ Item(const Entry& entry, const Bounds& bounds) {
        const int tokens = bounds.end_token - bounds.first_token;
        row_tile = entry.tile.y;
        slot = entry.piece.x;
        begin = entry.range.x;
        prefix = bounds.end_index - bounds.first_index;
        end = entry.range.y == prefix ? prefix + tokens : min(entry.range.y, prefix);
        rows = tokens * HEADS;
        first_token = bounds.first_token;
        first_index = bounds.first_index;
    }

    __device__ __forceinline__ static Item read(const Plan& plan, int number) {
        const Entry entry(plan, number);
        return Item(entry, Bounds(plan, entry.tile.x));
    }

    __device__ __forceinline__ int tiles() const { return (max(end - begin, 0) + TILE - 1) / TILE; }
};

// What a block does first, as verify_starts laid it out. It is read at once: one read after the other
// would cost a short step as much as its rows.
struct Start {
    int4 share;  // first item, end, step, half
    Entry entry;
    Bounds bounds;

    // Behind the kernel in front; then the next one may come. Not before: it reads the plan, too, which
    // may just be made.
    __device__ __forceinline__ static Start read(const int* cta_starts) {
        hopper::wait_for_dependency();
        hopper::launch_dependents();
        const int4* from = reinterpret_cast<const int4*>(cta_starts) + blockIdx.x * 4;
        const int4 share = hopper::load_here(from);
        const int4 place = hopper::load_here(from + 1);
        const int4 piece = hopper::load_here(from + 2);
        const int4 tokens = hopper::load_here(from + 3);
        return {share,
                Entry(make_int2(place.x, place.y), make_int2(place.z, place.w),
                      make_int2(piece.x, piece.y)),
                Bounds(make_int2(piece.z, piece.w), make_int2(tokens.x, tokens.y))};
    }

    __device__ __forceinline__ bool is_idle() const { return share.x >= share.y; }
    __device__ __forceinline__ Item item() const { return Item(entry, bounds); }
};

// What the end of an item needs to know of it. A warp leaves it in shared memory at the beginning:
// registers are for operands, and reading the plan again would cost a short item as much as its products.
struct Note {
    int slot;
    int row_tile;
    int rows;
    int first_token;

    __device__ __forceinline__ static void leave(Room room, const Item& item) {
        __syncwarp();  // the one before has been read
        if (threadIdx.x % 32 == 0) {
            hopper::store16(room.note(), make_uint4(static_cast<unsigned>(item.slot),
                                                    static_cast<unsigned>(item.row_tile),
                                                    static_cast<unsigned>(item.rows),
                                                    static_cast<unsigned>(item.first_token)));
        }
        __syncwarp();
    }

    __device__ __forceinline__ explicit Note(Room room) {
        const uint4 found = hopper::load16(room.note());
        slot = static_cast<int>(found.x);
        row_tile = static_cast<int>(found.y);
        rows = static_cast<int>(found.z);
        first_token = static_cast<int>(found.w);
    }
};

// Where the queries are.
struct QuerySource {
    const bits16* latent;
    const bits16* rope;
    long long stride, head_stride, rope_stride, rope_head_stride;
};

// Where the KV rows are.
struct KvRows {
    const bits16* kv;
    long long kv_stride;
    long long num_slots;
    const KV_INDEX* kv_indices;
    const bits16* draft_kv;
    long long draft_stride;
    const long long* out_cache_loc;  // null: the trees' rows are in `draft_kv`
};

// The row at one KV position: looked up first, found later, so that nobody waits for the index.
struct Row {
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

    // Its address, which is a multiple of 16, 0 for a slot outside the pool. Past the end of the
    // item it is that of any row, and odd.
    __device__ __forceinline__ word64 find(const KvRows& source, const Item& item,
                                           int position) const {
        const int node = position - item.prefix;
        if (position >= item.end) {
            return reinterpret_cast<word64>(source.kv) | 1;
        }
        if (node >= 0 && source.out_cache_loc == nullptr) {
            return reinterpret_cast<word64>(source.draft_kv +
                                            (item.first_token + node) * source.draft_stride);
        }
        const long long slot = node < 0 ? static_cast<long long>(prefix_slot) : tree_slot;
        const bool inside = slot >= 0 && slot < source.num_slots;
        return inside ? reinterpret_cast<word64>(source.kv + slot * source.kv_stride) : 0;
    }
};

// ---- copy -----------------------------------------------------------------------------------

// Starts the copies of an item's queries: chunks 0 to HELD - 1 into `held`, the others behind it.
__device__ __forceinline__ void copy_queries(const QuerySource& source, const Item& item,
                                             unsigned held, unsigned others, int thread) {
    const int sub = thread % 8;
    const unsigned place = thread / 8 * ROW_BYTES + ((sub ^ (thread / 8 % 8)) << 4);
#pragma unroll
    for (int part = 0; part < ROW_TILE / COPY_ROWS; ++part) {
        const int flat = item.row_tile * ROW_TILE + part * COPY_ROWS + thread / 8;
        const bool present = flat < item.rows;
        const long long token = item.first_token + (present ? flat / HEADS : 0);
        const int head = present ? flat % HEADS : 0;
        const bits16* latent =
            source.latent + token * source.stride + head * source.head_stride + sub * PIECE;
        const bits16* rope =
            source.rope + token * source.rope_stride + head * source.rope_head_stride + sub * PIECE;
        const unsigned to = place + part * COPY_ROWS * ROW_BYTES;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            hopper::copy16(chunk < HELD ? held + chunk * QUERY_BYTES + to
                                        : others + (chunk - HELD) * QUERY_BYTES + to,
                           chunk < VALUE_CHUNKS ? latent + chunk * CHUNK : rope, present ? 16 : 0);
        }
    }
}

// Starts the copy of this thread's pieces of the row at an address that `Row::find` gave.
__device__ __forceinline__ void copy_row(word64 address, unsigned to, int sub) {
    if (address != 0) {
        const unsigned char* from =
            reinterpret_cast<const unsigned char*>(address & ~1ull) + sub * 16;
        const int bytes = address & 1 ? 0 : 16;
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            hopper::copy16(to + chunk * BLOCK_BYTES, from + chunk * ROW_BYTES, bytes);
        }
    } else {
        // Scores become NaN by the columns that only K has. Those of V are 0: a query row that
        // does not see this one adds 0 times it.
#pragma unroll
        for (int chunk = 0; chunk < CHUNKS; ++chunk) {
            const unsigned bits = chunk < VALUE_CHUNKS ? 0 : ALL;
            hopper::store16(to + chunk * BLOCK_BYTES, make_uint4(bits, bits, bits, bits));
        }
        __threadfence_block();  // before this thread's arrival
    }
}

// The row of a tile that a thread of the copy group looks up, if it does.
__device__ __forceinline__ int looked_up(int thread) {
    const int lane = thread % 32;
    return thread / 32 * 4 + lane % 4 + lane / 4 * COPY_ROWS;
}

// A warp copies TILE / 4 rows of each tile, eight lanes a row; that many lanes look up one row each. In
// the first tile of the first item they know its slot already, but for -1.
__device__ __forceinline__ void copy_items(const Plan& plan, int4 share, Item item,
                                           const QuerySource& queries, const KvRows& source,
                                           long long first_slot, Room room, int thread) {
    const int lane = thread % 32;
    const int sub = thread % 8;
    const unsigned place = thread / 8 * ROW_BYTES + ((sub ^ (thread / 8 % 8)) << 4);
    const int own_row = looked_up(thread);
    Turn turn;
    int asked = 0;  // the parity to wait for
    int position = lane < TILE / 4 ? item.begin + own_row : item.end;
    Row row = {static_cast<KV_INDEX>(first_slot), first_slot};
    if (first_slot < 0) {
        row.look_up(source, item, position);
    }
#pragma unroll 1
    for (int number = share.x; number < share.y; number += share.z) {
        if (number != share.x) {  // the first queries are copied by others
            item = Item::read(plan, number);
            position = lane < TILE / 4 ? item.begin + own_row : item.end;
            row.look_up(source, item, position);
            hopper::wait(room.barrier(ASKED), asked);
            asked ^= 1;
#pragma unroll
            for (int i = 0; i < K_STEPS; ++i) {
                hopper::wait(room.free_rows(turn.slot, i), turn.parity ^ 1);
            }
            copy_queries(queries, item, room.tile(turn.slot), room.base + QUERIES_AT, thread);
            hopper::arrive_after_copies(room.barrier(FULL + turn.slot));
        }
        turn.advance();
#pragma unroll 1
        for (int left = item.tiles(); left > 0; --left) {
            const word64 own = row.find(source, item, position);
            position = min(position, item.end) + TILE;
            row.look_up(source, item, position);
            const unsigned to = room.tile(turn.slot) + place;
#pragma unroll
            for (int i = 0; i < K_STEPS; ++i) {
                hopper::wait(room.free_rows(turn.slot, i), turn.parity ^ 1);
                copy_row(__shfl_sync(ALL, own, i * 4 + lane / 8), to + i * COPY_ROWS * ROW_BYTES,
                         sub);
            }
            hopper::arrive_after_copies(room.barrier(FULL + turn.slot));
            turn.advance();
        }
    }
    hopper::wait_for_copies();
}

// ---- scores ---------------------------------------------------------------------------------

// Bits `offset` to offset + 63 of a mask of MASK_WORDS words, the last of which is clear. Those
// before its first bit are clear, too.
__device__ __forceinline__ word64 window(const word64* mask, int offset) {
    if (offset < 0) {
        return offset > -64 ? mask[0] << -offset : 0;
    }
    const int word = offset / 64;
    const int shift = offset % 64;
    if (word >= MAX_WORDS) {
        return 0;
    }
    return shift == 0 ? mask[word] : mask[word] >> shift | mask[word + 1] << (64 - shift);
}

__device__ __forceinline__ word64 lowest(int count) {
    return count <= 0 ? 0 : count >= 64 ? ~0ull : (1ull << count) - 1;
}

// The softmax of one query row of a thread, which has a quarter of its columns.
struct Softmax {
    float max = minus_infinity();  // log2 domain, the same in all four threads
    float sum = 0.0f;              // over this thread's columns

    // What to subtract from scores.
    __device__ __forceinline__ float base() const { return max == minus_infinity() ? 0.0f : max; }

    // Whether the maximum is too small for a score, as it is for the first one.
    __device__ __forceinline__ bool is_exceeded(float score) const {
        return score > max + RESCALE_ABOVE;
    }

    // Takes the largest of this thread's scores of a tile, in the log2 domain. Gives the factor for
    // what has been accumulated before.
    __device__ __forceinline__ float raise(float largest) {
        largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, 1));
        largest = fmaxf(largest, __shfl_xor_sync(ALL, largest, 2));
        float factor = 1.0f;
        if (is_exceeded(largest)) {
            factor = ptx::exp2_approx(max - largest);
            max = largest;
            sum *= factor;
        }
        return factor;
    }

    // The base-2 log-sum-exp.
    __device__ __forceinline__ float finish() {
        sum += __shfl_xor_sync(ALL, sum, 1);
        sum += __shfl_xor_sync(ALL, sum, 2);
        return sum != 0.0f ? max + log2f(sum) : minus_infinity();
    }
};

using Scores = float[TILE / 2];

// S = Q K^T, started, as a group of HAND_ON_AFTER products and one of the rest; `held` are the first
// HELD chunks of Q, the others are at `others`.
__device__ __forceinline__ void multiply_keys(Scores& s, const unsigned (&held)[HELD * 4][4],
                                              word64 others, word64 keys) {
    hopper::wgmma_fence();
#pragma unroll
    for (int step = 0; step < CHUNKS * 4; ++step) {
        const int chunk = step / 4;
        const word64 columns = keys + ((chunk * BLOCK_BYTES + step % 4 * 32) >> 4);
        if (chunk < HELD) {
            hopper::wgmma(s, held[step], columns, step > 0);
        } else {
            const word64 rows = others + (((chunk - HELD) * QUERY_BYTES + step % 4 * 32) >> 4);
            hopper::wgmma(s, rows, columns, step > 0);
        }
        if (step == HAND_ON_AFTER - 1) {
            hopper::wgmma_commit();
        }
    }
    hopper::wgmma_commit();
}

__device__ __forceinline__ void score_items(const Plan& plan, int4 share, Item item, float scale,
                                            const word64* visible, int words, Room room,
                                            word64* masks, float* partial_lse, float* lse,
                                            int thread) {
    const int lane = thread % 32;
    const int warp = thread / 32;
    const int row = warp * 16 + lane / 4;  // and row + 8
    const word64 others = hopper::matrix(room.base + QUERIES_AT, 16);
    Turn turn;
    int buffer = 0;
    int taken = 1;  // the parity to wait for
#pragma unroll 1
    for (int number = share.x; number < share.y; number += share.z) {
        if (number != share.x) {
            item = Item::read(plan, number);
        }
        Note::leave(room, item);
        hopper::sync_warpgroup(1);  // the masks before have been read
        if (thread < TOKENS * MASK_WORDS) {
            const int flat = item.row_tile * ROW_TILE + thread / MASK_WORDS * 8;
            const int word = thread % MASK_WORDS;
            const bool given = flat < item.rows && word < words;
            masks[thread] =
                given ? visible[static_cast<long long>(item.first_token + flat / HEADS) * words +
                                word]
                      : 0;
        }
        hopper::wait(room.barrier(FULL + turn.slot), turn.parity);
        hopper::proxy_fence();
        unsigned held[HELD * 4][4];
        {
            const int from = warp * 16 + lane % 16;
#pragma unroll
            for (int step = 0; step < HELD * 4; ++step) {
                hopper::load_matrices(
                    held[step], room.tile(turn.slot) + step / 4 * QUERY_BYTES + from * ROW_BYTES +
                                    (((step % 4 * 2 + lane / 16) ^ (from % 8)) << 4));
            }
            __syncwarp();
            if (lane == 0) {
#pragma unroll
                for (int i = 0; i < K_STEPS; ++i) {
                    hopper::arrive(room.free_rows(turn.slot, i), 2);
                }
            }
            turn.advance();
        }
        hopper::sync_warpgroup(1);  // the masks are there

        Softmax upper, lower;
        // The tile to multiply is there, and so the probabilities of the one before are not handed on
        // yet.
        bool held_back = false;
        const int masked_from = min(item.prefix, item.end);
#pragma unroll 1
        for (int start = item.begin; start < item.end; start += TILE) {
            if (!held_back) {
                hopper::wait(room.barrier(FULL + turn.slot), turn.parity);
                hopper::proxy_fence();
            }
            Scores x;
            multiply_keys(x, held, others, hopper::matrix(room.tile(turn.slot), 16));
            turn.advance();
            hopper::wgmma_wait<1>();
            if (held_back && lane == 0) {
                hopper::arrive(room.barrier(GIVEN + (buffer ^ 1)));
            }
            hopper::wgmma_wait<0>();
            const bool last = start + TILE >= item.end;
            if (last && lane == 0) {
                hopper::arrive(room.barrier(ASKED));
            }
            if (start + TILE > masked_from) {
                const word64 prefix = lowest(item.prefix - start);
                const word64 present = lowest(item.end - start);
                const int shift = lane % 4 * 2;
                word64 seen[2];
#pragma unroll
                for (int half = 0; half < 2; ++half) {
                    const word64* mask = masks + (row / 8 + half) * MASK_WORDS;
                    seen[half] = ((window(mask, start - item.prefix) | prefix) & present) >> shift;
                }
#pragma unroll
                for (int i = 0; i < TILE / 2; ++i) {
                    const int bit = i / 4 * 8 + i % 2;
                    const word64 own = seen[i / 2 % 2];
                    const unsigned word = static_cast<unsigned>(bit < 32 ? own : own >> 32);
                    x[i] = word >> (bit % 32) & 1 ? x[i] : minus_infinity();
                }
            }
            float largest[2] = {minus_infinity(), minus_infinity()};
#pragma unroll
            for (int i = 0; i < TILE / 2; ++i) {
                largest[i / 2 % 2] = fmaxf(largest[i / 2 % 2], x[i]);
            }
            // Maxima seldom grow: then nobody has to ask the other threads for theirs.
            float2 factor = make_float2(1.0f, 1.0f);
            if (__any_sync(ALL, upper.is_exceeded(largest[0] * scale) ||
                                    lower.is_exceeded(largest[1] * scale))) {
                factor.x = upper.raise(largest[0] * scale);
                factor.y = lower.raise(largest[1] * scale);
            }
            const float base[2] = {upper.base(), lower.base()};
            unsigned p[TILE / 4];
#pragma unroll
            for (int i = 0; i < TILE / 2; i += 4) {
#pragma unroll
                for (int k = 0; k < 4; ++k) {
                    x[i + k] = ptx::exp2_approx(fmaf(x[i + k], scale, -base[k / 2]));
                }
                upper.sum += x[i] + x[i + 1];
                lower.sum += x[i + 2] + x[i + 3];
                p[i / 2] = element::pack(x[i], x[i + 1]);
                p[i / 2 + 1] = element::pack(x[i + 2], x[i + 3]);
            }
            hopper::wait(room.barrier(TAKEN + buffer), taken);
            held_back = !last && hopper::has_ended(room.barrier(FULL + turn.slot), turn.parity);
            if (held_back) {
                hopper::proxy_fence();  // before the stores, for which it would wait
            }
            const unsigned to = room.given(buffer);
#pragma unroll
            for (int step = 0; step < K_STEPS; ++step) {
                hopper::store16(
                    to + step * STEP_BYTES + thread * 16,
                    make_uint4(p[4 * step], p[4 * step + 1], p[4 * step + 2], p[4 * step + 3]));
            }
            hopper::store8(to + K_STEPS * STEP_BYTES + thread * 8, factor);
            __syncwarp();
            if (!held_back && lane == 0) {
                hopper::arrive(room.barrier(GIVEN + buffer));
            }
            taken ^= buffer;
            buffer ^= 1;
        }
        if (item.end <= item.begin && lane == 0) {
            hopper::arrive(room.barrier(ASKED));
        }
        const float sums[2] = {upper.finish(), lower.finish()};
        const Note done(room);
        if (lane % 4 == 0 && share.w < 2) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int flat = done.row_tile * ROW_TILE + row + half * 8;
                if (flat < done.rows && done.slot < 0) {
                    lse[static_cast<long long>(done.first_token) * HEADS + flat] =
                        sums[half] * LN_2;
                } else if (flat < done.rows) {
                    partial_lse[done.slot * static_cast<long long>(ROW_TILE) + row + half * 8] =
                        sums[half];
                }
            }
        }
    }
}

// ---- values ---------------------------------------------------------------------------------

// Sums of the probabilities of two query rows as they were rounded for the product.
__device__ __forceinline__ void add_rounded(float2& sum, uint4 p) {
    sum.x +=
        element::first(p.x) + element::second(p.x) + (element::first(p.z) + element::second(p.z));
    sum.y +=
        element::first(p.y) + element::second(p.y) + (element::first(p.w) + element::second(p.w));
}

// While a tile's products with V run, what was rounded is added up, and 16 KV rows after 16 are free as
// soon as theirs are done.
template <int STEP = 0>
__device__ __forceinline__ void finish_products(float2& sum, const unsigned (&p)[K_STEPS][4],
                                                Room room, int slot, int lane) {
    add_rounded(sum, make_uint4(p[STEP][0], p[STEP][1], p[STEP][2], p[STEP][3]));
    hopper::wgmma_wait<K_STEPS - 1 - STEP>();
    if (lane == 0) {
        hopper::arrive(room.free_rows(slot, STEP));
    }
    if constexpr (STEP + 1 < K_STEPS) {
        finish_products<STEP + 1>(sum, p, room, slot, lane);
    }
}

// `PARTS` times 128 columns of V from chunk `first_chunk` on.
template <int PARTS>
__device__ __forceinline__ void value_items(const Plan& plan, int4 share, const Item& first,
                                            int first_chunk, Room room, short* partial_out,
                                            bits16* out, long long out_stride, int thread) {
    const int lane = thread % 32;
    const int warp = thread / 32;
    Turn turn;
    int buffer = 0;
    int given = 0;  // the parity to wait for
#pragma unroll 1
    for (int number = share.x; number < share.y; number += share.z) {
        turn.advance();  // the queries
        int tiles;
        {
            const Item next = number == share.x ? first : Item::read(plan, number);
            tiles = next.tiles();
            Note::leave(room, next);
        }
        float o[PARTS][64];
        float2 sum = make_float2(0.0f, 0.0f);
#pragma unroll 1
        for (int tile = 0; tile < tiles; ++tile) {
            // Probabilities that are given say that the tile is there. It mostly is long before; so the
            // fence is over when they come.
            hopper::wait(room.barrier(FULL + turn.slot), turn.parity);
            hopper::proxy_fence();
            hopper::wait(room.barrier(GIVEN + buffer), given);
            const unsigned from = room.given(buffer);
            unsigned p[K_STEPS][4];
#pragma unroll
            for (int step = 0; step < K_STEPS; ++step) {
                const uint4 four = hopper::load16(from + step * STEP_BYTES + thread * 16);
                p[step][0] = four.x;
                p[step][1] = four.y;
                p[step][2] = four.z;
                p[step][3] = four.w;
            }
            const float2 factor = hopper::load8(from + K_STEPS * STEP_BYTES + thread * 8);
            __syncwarp();
            if (lane == 0) {
                hopper::arrive(room.barrier(TAKEN + buffer));
            }
            given ^= buffer;
            buffer ^= 1;
            if (__any_sync(ALL, factor.x != 1.0f || factor.y != 1.0f)) {
                sum.x *= factor.x;
                sum.y *= factor.y;
                if (tile > 0) {
#pragma unroll
                    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
                        for (int i = 0; i < 64; ++i) {
                            o[part][i] *= i / 2 % 2 == 0 ? factor.x : factor.y;
                        }
                    }
                }
            }
            const word64 values =
                hopper::matrix(room.tile(turn.slot) + first_chunk * BLOCK_BYTES, BLOCK_BYTES);
            hopper::wgmma_fence();
#pragma unroll
            for (int step = 0; step < K_STEPS; ++step) {
#pragma unroll
                for (int part = 0; part < PARTS; ++part) {
                    hopper::wgmma_transposed(
                        o[part], p[step],
                        values + ((step * 16 * ROW_BYTES + part * 2 * BLOCK_BYTES) >> 4),
                        tile > 0 || step > 0);
                }
                hopper::wgmma_commit();
            }
            finish_products(sum, p, room, turn.slot, lane);
            turn.advance();
        }
        sum.x += __shfl_xor_sync(ALL, sum.x, 1);
        sum.y += __shfl_xor_sync(ALL, sum.y, 1);
        sum.x += __shfl_xor_sync(ALL, sum.x, 2);
        sum.y += __shfl_xor_sync(ALL, sum.y, 2);
        const float scale_x = sum.x != 0.0f ? 1.0f / sum.x : 0.0f;
        const float scale_y = sum.y != 0.0f ? 1.0f / sum.y : 0.0f;
        const Note item(room);
        const int row = warp * 16 + lane / 4;
        if (item.slot >= 0 && item.row_tile * ROW_TILE + row >= item.rows) {
            continue;  // this thread's pieces are of no query
        }
        if (item.slot >= 0) {
            uint4* to = reinterpret_cast<uint4*>(partial_out) +
                        item.slot * static_cast<long long>(ROW_TILE * LATENT / PIECE) +
                        first_chunk / 4 * GROUP_THREADS + first_chunk % 4 * 4 * 2 * GROUP_THREADS +
                        thread;
#pragma unroll
            for (int part = 0; part < PARTS; ++part) {
#pragma unroll
                for (int i = 0; i < 64; i += 8) {
                    const float (&v)[64] = o[part];
                    store128(to + (part * 8 + i / 8) * 2 * GROUP_THREADS,
                             make_uint4(partials::pack(v[i] * scale_x, v[i + 1] * scale_x),
                                        partials::pack(v[i + 2] * scale_y, v[i + 3] * scale_y),
                                        partials::pack(v[i + 4] * scale_x, v[i + 5] * scale_x),
                                        partials::pack(v[i + 6] * scale_y, v[i + 7] * scale_y)));
                }
            }
        } else {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int flat = item.row_tile * ROW_TILE + row + half * 8;
                if (flat < item.rows) {
                    const float scale = half == 0 ? scale_x : scale_y;
                    bits16* to =
                        out + static_cast<long long>(item.first_token + flat / HEADS) * out_stride +
                        flat % HEADS * LATENT + first_chunk * CHUNK + lane % 4 * 2;
#pragma unroll
                    for (int part = 0; part < PARTS; ++part) {
#pragma unroll
                        for (int i = 0; i < 64; i += 4) {
                            const float (&v)[64] = o[part];
                            *reinterpret_cast<unsigned*>(to + part * 128 + i * 2) =
                                element::pack(v[i + half * 2] * scale, v[i + half * 2 + 1] * scale);
                        }
                    }
                }
            }
        }
    }
}

}  // namespace

// Computes every item of the plan.
//
// Launch: num_ctas blocks, as many as the plan was made for; block c takes the items its start
// names. Request, row tile, range, slot and count of an item are the plan's word and not judged
// again. Rows of `out` and `lse` that belong to row tiles in one piece are written, and all rows of
// the partial slots that belong to a query; `lse` is -inf and `out` 0 where nothing is seen.
// Strides count elements, from token to token, head to head, slot to slot. The trees' rows are in
// `draft_kv`, or where that is None, in the slots `out_cache_loc`. Words of `visible` that are not
// there count as clear.
//
// It may be launched before the kernel in front of it has ended, and waits before it reads anything.
//
// @kernel verify_partials_sm90
// @arch sm_90a
// @early
// @param q_latent read ELEMENT [tokens, HEADS, LATENT] stride=(q_stride, q_head_stride, 1) align=16
// @param q_rope read ELEMENT [tokens, HEADS, ROPE] stride=(rope_stride, rope_head_stride, 1) align=16
// @param q_stride           value   int64                   multiple of 8
// @param q_head_stride      value   int64                   multiple of 8
// @param rope_stride      value   int64                   multiple of 8
// @param rope_head_stride value   int64                   multiple of 8
// @param sm_scale           value   fp32                    factor on the scores, positive
// @param kv_scale           value   fp32                    not used: rows are no codes
// @param kv read KV_ELEMENT [num_slots, LATENT + ROPE] stride=(kv_stride, 1) align=16  the pool
// @param kv_stride          value   int64                   multiple of 8
// @param num_slots          value   int64                   slots of the pool
// @param kv_indptr          read    int32 [bounds]          bounds of each prefix in kv_indices
// @param kv_indices         read    KV_INDEX [*]            slots of the prefixes
// @param draft_kv?          read    ELEMENT [tokens, LATENT + ROPE] stride=(draft_stride, 1) align=16
// @param draft_stride       value   int64                   multiple of 8
// @param out_cache_loc?     read    int64 [tokens]          slots of the trees
// @param qo_indptr          read    QO_INDEX [bounds]       bounds of each tree in q
// @param visible            read    uint64 [tokens, words]  bit k of word w: sees token 64 w + k
// @param words value int32  1 to 4
// @param work read int32 [max_work, 6] align=8  request, row tile, begin, end, slot, splits
// @param cta_starts read int32 [num_ctas, 16] align=16  of verify_starts: what each block does first
// @param cta_slots  read int64 [num_ctas, 64]           likewise; -1: not known
// @param partial_out scratch int16 [slots, 64, LATENT] align=16  PARTIAL, normalised; order see above
// @param partial_lse        scratch fp32 [slots, 64]        base 2
// @param out write ELEMENT [tokens, HEADS, LATENT] stride=(out_stride, LATENT, 1) align=16
// @param out_stride         value   int64                   multiple of 8
// @param lse                write   fp32 [tokens, HEADS]    natural logarithm
// @block 512
// @shared SLOTS * TILE * 1152 + (9 - HELD) * 8192 + TILE * 256 + 2048 + 320 + 256 + 8 * SLOTS + SLOTS * TILE // 2 + 40 + 1024
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    verify_partials_sm90(const bits16* __restrict__ q_latent, const bits16* __restrict__ q_rope,
                         long long q_stride, long long q_head_stride, long long rope_stride,
                         long long rope_head_stride, float sm_scale, float kv_scale,
                         const bits16* __restrict__ kv, long long kv_stride, long long num_slots,
                         const int* kv_indptr, const KV_INDEX* __restrict__ kv_indices,
                         const bits16* __restrict__ draft_kv, long long draft_stride,
                         const long long* __restrict__ out_cache_loc, const QO_INDEX* qo_indptr,
                         const word64* __restrict__ visible, int words, const int* work,
                         const int* cta_starts, const long long* cta_slots,
                         short* __restrict__ partial_out, float* __restrict__ partial_lse,
                         bits16* __restrict__ out, long long out_stride, float* __restrict__ lse) {
    DYNAMIC_SHARED(cursor);
    const unsigned start = hopper::shared_address(cursor);
    const Room room = {(start + 1023) & ~1023u};
    word64* masks = reinterpret_cast<word64*>(cursor + (room.base - start) + MASKS_AT);
    const int thread = static_cast<int>(threadIdx.x) % GROUP_THREADS;
    const int group = __shfl_sync(ALL, static_cast<int>(threadIdx.x) / GROUP_THREADS, 0);

    if (threadIdx.x == THREADS - 1) {
        for (int slot = 0; slot < SLOTS; ++slot) {
            hopper::barrier_init(room.barrier(FULL + slot), GROUP_THREADS);
            for (int i = 0; i < K_STEPS; ++i) {
                hopper::barrier_init(room.free_rows(slot, i), 8);
            }
        }
        for (int buffer = 0; buffer < 2; ++buffer) {
            hopper::barrier_init(room.barrier(GIVEN + buffer), 4);
            hopper::barrier_init(room.barrier(TAKEN + buffer), 8);
        }
        hopper::barrier_init(room.barrier(ASKED), 4);
        hopper::barrier_init_done();
    }
    __syncthreads();
    const Plan plan = {work, kv_indptr, qo_indptr};
    const QuerySource queries = {q_latent,      q_rope,      q_stride,
                                 q_head_stride, rope_stride, rope_head_stride};
    // Each group waits when it is where its work is: the way there takes time, too.
    if (group == 0) {
        hopper::give_registers<COPY_REGISTERS>();
        const KvRows source = {kv,       kv_stride,    num_slots,    kv_indices,
                               draft_kv, draft_stride, out_cache_loc};
        const Start begun = Start::read(cta_starts);
        const long long slot = hopper::load_here(cta_slots + blockIdx.x * START_SLOTS +
                                                 looked_up(thread) % START_SLOTS);
        if (begun.is_idle()) {
            return;
        }
        copy_items(plan, begun.share, begun.item(), queries, source, slot, room, thread);
    } else if (group == 1) {
        hopper::take_registers<SCORE_REGISTERS>();
        const Start begun = Start::read(cta_starts);
        if (begun.is_idle()) {
            return;
        }
        score_items(plan, begun.share, begun.item(), sm_scale * LOG2_E, visible, words, room, masks,
                    partial_lse, lse, thread);
    } else {
        hopper::take_registers<VALUE_REGISTERS>();
        const int part = group - 2;
        const Start begun = Start::read(cta_starts);
        if (begun.is_idle()) {
            return;
        }
        const int4 share = begun.share;
        const Item first = begun.item();
        if (part == 1) {
            // It has nothing else to do yet, and KV rows need not wait.
            copy_queries(queries, first, room.tile(0), room.base + QUERIES_AT, thread);
            hopper::arrive_after_copies(room.barrier(FULL));
        }
        if (share.w == 0) {
            value_items<2>(plan, share, first, part * 4, room, partial_out, out, out_stride,
                           thread);
        } else {
            value_items<1>(plan, share, first, (share.w - 1) * 4 + part * 2, room, partial_out, out,
                           out_stride, thread);
        }
    }
}

namespace {

// What a lane of verify_combine_sm90 has of two query rows: the weighted mean of 4 columns of each.
struct Mean {
    float max;  // log2 domain; -inf before the first piece that counts
    float weight;
    float value[4];

    __device__ __forceinline__ void clear() {
        max = minus_infinity();
        weight = value[0] = value[1] = value[2] = value[3] = 0.0f;
    }

    // Prepares for pieces of weight up to 2^largest.
    __device__ __forceinline__ void raise(float largest) {
        if (largest > max) {
            const float factor = ptx::exp2_approx(max - largest);
            max = largest;
            weight *= factor;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                value[i] *= factor;
            }
        }
    }

    __device__ __forceinline__ void add(float log_weight, unsigned first, unsigned second) {
        const float factor =
            log_weight == minus_infinity() ? 0.0f : ptx::exp2_approx(log_weight - max);
        weight += factor;
        value[0] = fmaf(factor, partials::first(first), value[0]);
        value[1] = fmaf(factor, partials::second(first), value[1]);
        value[2] = fmaf(factor, partials::first(second), value[2]);
        value[3] = fmaf(factor, partials::second(second), value[3]);
    }
};

constexpr int PIECES = ROW_TILE * LATENT / PIECE;  // of a slot

// What a lane of a unit has of the partials of a row tile. A unit is 16 rows and 16 columns; those of the
// same columns follow each other, and there are 2^log_parts of them: 1, 2 or 4, as many as it takes for
// the rows that are of queries.
struct Place {
    int piece;
    int row;     // and the 8th behind it
    int column;  // and the next, and both of the 8th behind it

    __device__ __forceinline__ Place(int unit, int log_parts, int lane) {
        const int part = unit & ((1 << log_parts) - 1);  // the warp of a values group that had it
        const int columns = unit >> log_parts;
        piece = (columns * 4 + part) * 32 + lane;
        row = part * 16 + lane / 4;
        column = columns % 2 * 256 + columns / 2 * 16 + lane % 4 * 2;
    }

    // From a unit to that COMBINE_WARPS behind it, whose rows are the same.
    __device__ __forceinline__ static int piece_step(int log_parts) {
        return COMBINE_WARPS * 4 * 32 >> log_parts;
    }
    __device__ __forceinline__ static int column_step(int log_parts) {
        return COMBINE_WARPS / 2 * 16 >> log_parts;
    }
};

// What a warp has in shared memory of two rows: four values, the maximum and the weight of each.
using Share = float[2][6][32];

constexpr int WEIGHT_ROWS = 16;  // that a unit has
constexpr int WEIGHTS =
    (COMBINE_UNROLL + 7) / 8 * 8;  // of splits, rounded up to what is read at once

// What a warp has in flight: splits of one unit, or of several. They come through shared memory, where
// they take no registers.
struct Arriving {
    uint4* pieces;   // [COMBINE_UNROLL, 32]
    float* weights;  // [WEIGHTS, WEIGHT_ROWS]

    // Brings `count` splits, the 2^log_step-th ones from `slot` on, of 2^log_units units that are
    // `step` pieces apart. `present` is false in a lane whose rows are of no query.
    __device__ __forceinline__ void fetch(const short* partial_out, const float* partial_lse,
                                          const Place& own, bool present, int slot, int count,
                                          int log_step, int log_units, int step) const {
        const int lane = static_cast<int>(threadIdx.x) % 32;
        const int first_row = own.row - lane / 4;
        __syncwarp();  // the splits before have been added
#pragma unroll 1
        for (int k = lane / 4; k < count; k += 8) {
            const int from = slot + (k << log_step);  // of less than 4,096 slots
            ptx::cp_async16(weights + k * WEIGHT_ROWS + lane % 4 * 4,
                            partial_lse + from * ROW_TILE + first_row + lane % 4 * 4);
        }
        const int own_pieces = present ? count << log_units : 0;
#pragma unroll 1
        for (int k = 0; k < own_pieces; ++k) {
            const long long from = slot + (k >> log_units << log_step);
            const int unit = k & ((1 << log_units) - 1);
            ptx::cp_async16(pieces + k * 32 + lane,
                            partial_out + (from * PIECES + own.piece + unit * step) * PIECE);
        }
        ptx::cp_async_commit();
        ptx::cp_async_wait<0>();
        __syncwarp();
    }
};

// Adds every 2^log_step-th split from `slot` on, COMBINE_UNROLL of them in flight. The loops are
// short: a step is so brief that instructions count that are met once.
__device__ __forceinline__ void gather(Mean (&mean)[2], const Arriving& arriving,
                                       const short* partial_out, const float* partial_lse,
                                       const Place& own, bool present, int slot, int end,
                                       int log_step) {
    const float* weights = arriving.weights;
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int upper = lane / 4;  // of WEIGHT_ROWS; and the 8th behind it
    const int lower = upper + 8;
#pragma unroll 1
    for (; slot < end; slot += COMBINE_UNROLL << log_step) {
        const int count = min((end - slot + (1 << log_step) - 1) >> log_step, COMBINE_UNROLL);
        arriving.fetch(partial_out, partial_lse, own, present, slot, count, log_step, 0, 0);
        const int own_count = present ? count : 0;
        float largest[2] = {minus_infinity(), minus_infinity()};
#pragma unroll 3
        for (int k = 0; k < own_count; ++k) {
            largest[0] = fmaxf(largest[0], weights[k * WEIGHT_ROWS + upper]);
            largest[1] = fmaxf(largest[1], weights[k * WEIGHT_ROWS + lower]);
        }
        mean[0].raise(largest[0]);
        mean[1].raise(largest[1]);
#pragma unroll 1
        for (int first = 0; first < own_count; first += 3) {
            float weight[3][2];
            uint4 value[3];
#pragma unroll
            for (int k = 0; k < 3; ++k) {
                weight[k][0] = weight[k][1] = minus_infinity();
                value[k] = make_uint4(0, 0, 0, 0);
                if (first + k < own_count) {
                    weight[k][0] = weights[(first + k) * WEIGHT_ROWS + upper];
                    weight[k][1] = weights[(first + k) * WEIGHT_ROWS + lower];
                    value[k] = load128(arriving.pieces + (first + k) * 32 + lane);
                }
            }
#pragma unroll
            for (int k = 0; k < 3; ++k) {
                mean[0].add(weight[k][0], value[k].x, value[k].z);
                mean[1].add(weight[k][1], value[k].y, value[k].w);
            }
        }
    }
}

// Where the rows of a row tile are written.
struct Target {
    merge::Rows rows;
    bits16* out;
    long long out_stride;
    float* lse;

    // Where a column of a row is, if the request has the row.
    __device__ __forceinline__ bits16* at(int row_of_tile, int column) const {
        const int row = rows.first + row_of_tile;
        const long long token = rows.first_token + row / HEADS;
        return out + token * out_stride + row % HEADS * LATENT + column;
    }

    __device__ __forceinline__ void write_lse(int row_of_tile, float log_sum) const {
        lse[static_cast<long long>(rows.first_token) * HEADS + rows.first + row_of_tile] =
            log_sum * LN_2;
    }

    __device__ __forceinline__ void write(int row_of_tile, int column, float weight,
                                          float log_weight, float first, float second) const {
        if (rows.has(row_of_tile)) {
            const bool sees = weight != 0.0f;
            const float inverse = sees ? 1.0f / weight : 0.0f;
            *reinterpret_cast<unsigned*>(at(row_of_tile, column)) =
                element::pack(first * inverse, second * inverse);
            if (column == 0) {
                write_lse(row_of_tile, sees ? log_weight + log2f(weight) : minus_infinity());
            }
        }
    }

    // The sum of what some warps have, for one row and one pair of columns of a place.
    __device__ __forceinline__ void write_sum(const Share* shares, int sharing, const Place& place,
                                              int task, int lane) const {
        const int half = task % 2;
        const int pair = task / 2 % 2;
        float largest = minus_infinity();
        float weight = 0.0f;
        float value[2] = {};
#pragma unroll 1
        for (int first = 0; first < sharing; first += 4) {
            float max[4], weights[4], values[4][2];
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                max[k] = minus_infinity();
                weights[k] = values[k][0] = values[k][1] = 0.0f;
                if (first + k < sharing) {
                    const Share& share = shares[first + k];
                    max[k] = share[half][4][lane];
                    weights[k] = share[half][5][lane];
                    values[k][0] = share[half][2 * pair][lane];
                    values[k][1] = share[half][2 * pair + 1][lane];
                }
            }
            const float before = largest;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                largest = fmaxf(largest, max[k]);
            }
            const float factor =
                before == minus_infinity() ? 0.0f : ptx::exp2_approx(before - largest);
            weight *= factor;
            value[0] *= factor;
            value[1] *= factor;
#pragma unroll
            for (int k = 0; k < 4; ++k) {
                const float own =
                    max[k] == minus_infinity() ? 0.0f : ptx::exp2_approx(max[k] - largest);
                weight = fmaf(own, weights[k], weight);
                value[0] = fmaf(own, values[k][0], value[0]);
                value[1] = fmaf(own, values[k][1], value[1]);
            }
        }
        write(place.row + half * 8, place.column + pair * 8, weight, largest, value[0], value[1]);
    }
};

// Merges 2^log_units units of `count` splits, all of which have arrived. Their rows are the same:
// what belongs to a row is found once, by two lanes, and factors take the place of the weights.
__device__ __forceinline__ void merge_units(const Arriving& arriving, const Place& own,
                                            bool present, const Target& to, int count,
                                            int log_units, int column_step) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    float inverse;  // of the sum of this lane's row
    {
        const int row = own.row - lane / 4 + lane % WEIGHT_ROWS;
        const int own_count = to.rows.has(row) ? count : 0;
        float* weights = arriving.weights + lane % WEIGHT_ROWS;
        float largest = minus_infinity();
#pragma unroll 4
        for (int k = 0; k < own_count; ++k) {
            largest = fmaxf(largest, weights[k * WEIGHT_ROWS]);
        }
        __syncwarp();  // both lanes have compared
        float sum = 0.0f;
#pragma unroll 2
        for (int k = lane / WEIGHT_ROWS; k < own_count; k += 2) {
            const float weight = weights[k * WEIGHT_ROWS];
            const float factor =
                weight == minus_infinity() ? 0.0f : ptx::exp2_approx(weight - largest);
            weights[k * WEIGHT_ROWS] = factor;
            sum += factor;
        }
        sum += __shfl_xor_sync(ALL, sum, WEIGHT_ROWS);
        inverse = sum != 0.0f ? 1.0f / sum : 0.0f;
        if (own.column < 8 && lane < WEIGHT_ROWS && own_count > 0) {
            to.write_lse(row, sum != 0.0f ? largest + log2f(sum) : minus_infinity());
        }
    }
    const float of_upper = __shfl_sync(ALL, inverse, lane / 4);
    const float of_lower = __shfl_sync(ALL, inverse, lane / 4 + 8);
    __syncwarp();  // all factors are there
    if (!present) {
        return;
    }
    const float* upper = arriving.weights + lane / 4;
    const bool has_lower = to.rows.has(own.row + 8);
    bits16* const to_upper = to.at(own.row, own.column);
    bits16* const to_lower = to.at(own.row + 8, own.column);
    const uint4* pieces = arriving.pieces + lane;
#pragma unroll 1
    for (int unit = 0; unit < 1 << log_units; ++unit) {
        float value[8] = {};
#pragma unroll 3
        for (int k = 0; k < count; ++k) {
            const float first = upper[k * WEIGHT_ROWS];
            const float second = upper[k * WEIGHT_ROWS + 8];
            const uint4 piece = load128(pieces + ((k << log_units) + unit) * 32);
            value[0] = fmaf(first, partials::first(piece.x), value[0]);
            value[1] = fmaf(first, partials::second(piece.x), value[1]);
            value[2] = fmaf(second, partials::first(piece.y), value[2]);
            value[3] = fmaf(second, partials::second(piece.y), value[3]);
            value[4] = fmaf(first, partials::first(piece.z), value[4]);
            value[5] = fmaf(first, partials::second(piece.z), value[5]);
            value[6] = fmaf(second, partials::first(piece.w), value[6]);
            value[7] = fmaf(second, partials::second(piece.w), value[7]);
        }
        const int column = unit * column_step;
        *reinterpret_cast<unsigned*>(to_upper + column) =
            element::pack(value[0] * of_upper, value[1] * of_upper);
        *reinterpret_cast<unsigned*>(to_upper + column + 8) =
            element::pack(value[4] * of_upper, value[5] * of_upper);
        if (has_lower) {
            *reinterpret_cast<unsigned*>(to_lower + column) =
                element::pack(value[2] * of_lower, value[3] * of_lower);
            *reinterpret_cast<unsigned*>(to_lower + column + 8) =
                element::pack(value[6] * of_lower, value[7] * of_lower);
        }
    }
}

}  // namespace

// Merges the pieces of the row tiles that were cut and writes their rows of `out` and `lse`.
//
// Launch: any number of blocks of COMBINE_THREADS threads; the grid need not know the plan. 32 pieces
// of 16 bytes are a unit, of which a row tile has 32, 64 or 128, by its query rows; see merge.cuh. With
// 15 splits in flight a block takes more than half of a multiprocessor's shared memory, so that no two
// share one while others stand idle. It may be launched before verify_partials_sm90 has ended, and
// waits before it reads what that kernel writes; blocks that have nothing to merge do not wait, but
// for the first one.
//
// @kernel verify_combine_sm90
// @arch sm_90a
// @early
// @param partial_out read int16 [slots, 64, LATENT] align=16  PARTIAL, normalised; order see above
// @param partial_lse    read   fp32 [slots, 64] align=16  base 2
// @param combine_indptr read   int32 [tiles + 1]     bounds of each cut row tile's slots
// @param combine_tiles  read   int32 [tiles, 4] align=16  as verify_plan writes them
// @param tiles          value  int32                 most row tiles that can be cut
// @param out            update ELEMENT [tokens, HEADS, LATENT] stride=(out_stride, LATENT, 1) align=16
// @param out_stride     value  int64                 multiple of 8
// @param lse            update fp32 [tokens, HEADS]  natural logarithm
// @block COMBINE_THREADS
// @shared (COMBINE_THREADS // 32) * (COMBINE_UNROLL * 512 + (COMBINE_UNROLL + 7) // 8 * 512)
extern "C" __global__ void __launch_bounds__(COMBINE_THREADS, 1)
    verify_combine_sm90(const short* __restrict__ partial_out,
                        const float* __restrict__ partial_lse,
                        const int* __restrict__ combine_indptr,
                        const int* __restrict__ combine_tiles, int tiles, bits16* __restrict__ out,
                        long long out_stride, float* __restrict__ lse) {
    DYNAMIC_SHARED(cursor);
    CARVE(cursor, uint4, pieces, COMBINE_WARPS * COMBINE_UNROLL * 32);
    CARVE(cursor, float, weights, COMBINE_WARPS * WEIGHTS * WEIGHT_ROWS);
    SHARED_ARRAY(float, means, [COMBINE_WARPS][2][6][32]);
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;

    merge::Turns<PIECES / 32, ROW_TILE, 16, HEADS, COMBINE_THREADS, COMBINE_LEAST, COMBINE_UNROLL>
        turns(combine_indptr, combine_tiles, tiles);
    merge::Turn turn;
    hopper::launch_dependents();  // they wait until this kernel has ended
    while (turns.next(turn)) {
        const int sharing = turn.sharers();
        const Target to = {turns.rows(turn), out, out_stride, lse};
        const int log_parts = merge::log_parts<2>(to.rows.end - to.rows.first, 16);
        const Place own(turn.first_unit + (warp >> turn.log_sharers), log_parts, lane);
        const Arriving arriving = {pieces + warp * COMBINE_UNROLL * 32,
                                   weights + warp * WEIGHTS * WEIGHT_ROWS};
        const bool present = to.rows.has(own.row);
        hopper::wait_for_dependency();
        if (sharing == 1 && (turn.end - turn.begin) << turn.log_units <= COMBINE_UNROLL) {
            arriving.fetch(partial_out, partial_lse, own, present, turn.begin,
                           turn.end - turn.begin, 0, turn.log_units, Place::piece_step(log_parts));
            merge_units(arriving, own, present, to, turn.end - turn.begin, turn.log_units,
                        Place::column_step(log_parts));
            continue;
        }
        Mean mean[2];
        mean[0].clear();
        mean[1].clear();
        gather(mean, arriving, partial_out, partial_lse, own, present,
               turn.begin + (warp & (sharing - 1)), turn.end, turn.log_sharers);
        if (sharing == 1) {
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const Mean& done = mean[half];
                const int row = own.row + half * 8;
                to.write(row, own.column, done.weight, done.max, done.value[0], done.value[1]);
                to.write(row, own.column + 8, done.weight, done.max, done.value[2], done.value[3]);
            }
            continue;
        }
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            means[warp][half][4][lane] = mean[half].max;
            means[warp][half][5][lane] = mean[half].weight;
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                means[warp][half][i][lane] = mean[half].value[i];
            }
        }
        __syncthreads();
        // A warp for each pair of columns of each of a unit's two rows.
#pragma unroll 1
        for (int task = warp; task < 4 * COMBINE_WARPS >> turn.log_sharers; task += COMBINE_WARPS) {
            const Place place(turn.first_unit + task / 4, log_parts, lane);
            to.write_sum(means + (task / 4 << turn.log_sharers), sharing, place, task, lane);
        }
        __syncthreads();
    }
    if (blockIdx.x == 0) {
        hopper::wait_for_dependency();  // who waits for this kernel waits for the one in front, too
    }
}
