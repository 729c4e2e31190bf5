// Attention of draft trees over a latent KV cache (MLA, absorbed form), split over the GPU.
//
// Every request b has a prefix of kv_indptr[b+1] - kv_indptr[b] rows in a pool, whose slots stand
// in `kv_indices`, and a tree of T = qo_indptr[b+1] - qo_indptr[b] draft tokens, whose rows stand
// in the pool too (at `out_cache_loc`) or in a tensor of their own. A row has LATENT + ROPE
// elements; the scores use all of them and the values are the first LATENT, for all HEADS heads
// alike. A tree token sees the whole prefix and those tokens of its own tree whose bits are set in
// its `visible` words.
//
// A step launches two kernels on one stream, after verify_plan.cu has made the lists:
//   verify_partials  every item of `work` is one row tile (64 query rows: 64 / HEADS tree tokens)
//                    against one range of the prefix. The range that ends with the prefix is
//                    followed by the tree. A row tile in one piece goes to `out` and `lse`, any
//                    other one to its piece's partial slot.
//   verify_combine   merges the pieces of each row tile that was cut.
//
// A block holds 64 query rows and goes through its items of the plan in two roles, by mma.m16n8k16:
//   scores   four warps in two pairs: S = Q K^T for 32 query rows a pair, each warp over half of K's
//            columns, then the mask and the softmax of 16 rows a warp. Most of the queries stay in
//            registers. Probabilities are handed on as the operands they become.
//   values   eight warps, each for an eighth of V's columns and all 64 rows: O += P V, and the copies
//            of KV rows into a ring of tiles in shared memory, which cp.async fills.
// While the values of a tile are multiplied, the scores of the next one are. A tile costs two
// barriers: behind the first the sums over K's columns are there, behind the second the
// probabilities. Where a token has few query rows, those of several tokens are one operand: no row is
// padded but in a tree's last band of 16.
//
// Partials are PARTIAL, normalised, with one base-2 log-sum-exp a row: half the traffic of float32.
// Outputs of row tiles in one piece are PARTIAL for a moment, too.
//
// A pool of fp8 codes is widened in shared memory, which is exact: cp.async fills a ring of codes,
// and the thread that fetched a piece writes it as bfloat16 into one of three tiles. Scores and outputs
// are in units of the codes until they are scaled. The rows of `draft_kv` stay what they are: their
// scores and weights are brought to those units.
//
// A slot outside the pool is never read: a query row that sees it becomes NaN.
//
// Both kernels: no host reads, no allocation, addresses 64 bits wide, the same bits at every run.

#include "combine.cuh"
#include "early.cuh"
#include "element.cuh"
#include "fp8_e4m3.cuh"
#include "item.cuh"
#include "merge.cuh"
#include "partial.cuh"
#include "prefetch.cuh"
#include "ptx.cuh"
#include "roles.cuh"
#include "shared.cuh"
#include "thread.cuh"
#include "vector.cuh"

// columns of V, and further columns that only K has
#ifndef LATENT
#define LATENT 512
#endif
#ifndef ROPE
#define ROPE 64
#endif
// query heads of this rank
#ifndef HEADS
#define HEADS 8
#endif
// the type of queries, outputs and the trees' own rows: bf16 or fp16
#ifndef ELEMENT
#define ELEMENT bf16
#endif
// the type of the pool: the same, or fp8_e4m3 beside bf16
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
// KV rows of a tile: 16 or 32
#ifndef TILE
#define TILE 16
#endif
// tiles in shared memory: two are used, the others on their way (of fp8 codes twice as many less 6,
// besides three tiles that are made of them)
#ifndef STAGES
#define STAGES 4
#endif
// steps of 16 columns whose queries are kept in shared memory, for want of registers
#ifndef QUERIES_SHARED
#define QUERIES_SHARED 4
#endif
// steps of K that a warp of the scores has asked for
#ifndef FRAGMENTS
#define FRAGMENTS 2
#endif
// powers of 2 by which a query row's maximum must grow before its accumulators are rescaled
#ifndef RESCALE_ABOVE
#define RESCALE_ABOVE 8
#endif
#ifndef COMBINE_THREADS
#define COMBINE_THREADS 512
#endif
// splits that a warp of verify_combine has in flight
#ifndef COMBINE_UNROLL
#define COMBINE_UNROLL 9
#endif
// splits that are worth a further warp
#ifndef COMBINE_LEAST
#define COMBINE_LEAST 4
#endif

namespace {

constexpr int DIM = LATENT + ROPE;
constexpr int ROW_TILE = 64;
constexpr int GROUP = 8;       // query rows of one token at least
constexpr int BAND_ROWS = 16;  // query rows of one mma
constexpr int BANDS = ROW_TILE / BAND_ROWS;
constexpr int SCORE_WARPS = BANDS;
constexpr int VALUE_WARPS = 8;
constexpr int SCORE_THREADS = SCORE_WARPS * 32;
constexpr int VALUE_THREADS = VALUE_WARPS * 32;
constexpr int THREADS = SCORE_THREADS + VALUE_THREADS;
constexpr int PITCH = DIM + 8;  // elements from row to row in shared memory: no bank conflicts
constexpr int PIECE = 8;        // elements of a 16-byte access
constexpr int ROW_PIECES = DIM / PIECE;  // of a row in shared memory
constexpr int OUT_PIECES = LATENT / PIECE;
constexpr int OUT_PITCH = LATENT + PIECE;         // as PITCH, for rows that are written out
constexpr int COPY_LANES = VALUE_THREADS / TILE;  // that fetch one row
constexpr int MAX_WORDS = 4;                      // of visibility: 256 tree tokens

constexpr int K_STEPS = DIM / 16;
constexpr int K_OWN = (K_STEPS + 1) / 2;  // steps of a warp of the scores
constexpr int SHARED_STEPS = K_OWN < QUERIES_SHARED ? K_OWN : QUERIES_SHARED;
constexpr int HELD_STEPS = K_OWN - SHARED_STEPS;
constexpr int KV_STEPS = TILE / 16;
constexpr int V_BLOCKS = LATENT / 16;
constexpr int V_OWN = (V_BLOCKS + VALUE_WARPS - 1) / VALUE_WARPS;

namespace element = ELEMENT;
constexpr bool CODES = BYTES_OF(KV_ELEMENT) == 1;
constexpr int TILES = CODES ? 3 : STAGES;              // that products are made of
constexpr int CODE_TILES = 2 * (STAGES - 3);           // that find room behind three others
constexpr int ARRIVING = CODES ? CODE_TILES : STAGES;  // places where copies go
constexpr int AHEAD =
    CODES ? CODE_TILES + 1 : STAGES - 2;             // tiles that are fetched before the first
constexpr int KV_PIECE = 16 / BYTES_OF(KV_ELEMENT);  // elements of a 16-byte access to the pool
constexpr int KV_ROW_PIECES = DIM / KV_PIECE;
constexpr int KV_PITCH = CODES ? DIM : PITCH;     // from row to row where the copies go
constexpr int CODES_AT = TILES * TILE * PITCH;    // in the ring: behind the tiles
constexpr int ROOM_BANDS = 2 * TILE / BAND_ROWS;  // whose queries find room in two tiles
constexpr int ROWS_A_WARP = TILE / VALUE_WARPS;   // that it fetches of a tile
constexpr int LIST_TILES = 32 / ROWS_A_WARP;      // whose slots a warp's lanes hold

static_assert(LATENT % 16 == 0 && ROPE % 16 == 0 && LATENT >= 16 && ROPE >= 16, "whole fragments");
static_assert(HEADS % GROUP == 0 && HEADS >= GROUP, "half a band is of one token");
static_assert(TILE == 16 || TILE == 32, "a lane of the values fetches pieces of one row");
static_assert(BANDS == ROOM_BANDS || BANDS == 2 * ROOM_BANDS, "bands take one turn or two");
static_assert(QUERIES_SHARED >= 1, "an array has elements");
static_assert(STAGES >= 4 && STAGES * TILE >= ROW_TILE,
              "the ring also holds a row tile of outputs");
static_assert(AHEAD <= LIST_TILES, "whose slots are looked up at the beginning");
static_assert(!CODES || CODES_AT * 2 + CODE_TILES * TILE * DIM <= STAGES * TILE * PITCH * 2,
              "codes and the tiles made of them find room in the ring");
static_assert((COMBINE_THREADS & (COMBINE_THREADS - 1)) == 0 && COMBINE_THREADS >= 32 &&
                  COMBINE_THREADS <= 1024,
              "warps can share units evenly");

constexpr float LOG2_E = 1.4426950408889634f;
constexpr float LN_2 = 0.6931471805599453f;
constexpr unsigned ALL = 0xffffffffu;

using bits16 = unsigned short;
using word64 = unsigned long long;

using kv_bits = stored::Bits<BYTES_OF(KV_ELEMENT)>::type;

__device__ __forceinline__ float minus_infinity() { return __int_as_float(0xff800000); }

// What a thread of the values is in charge of.
struct Place {
    int lane;
    int warp;       // of the role: it has an eighth of V's columns
    int copy_row;   // the row of a tile that the thread helps to fetch,
    int copy_lane;  // as one of COPY_LANES

    __device__ __forceinline__ explicit Place(int thread_of_block)
        : Place(static_cast<unsigned>(thread_of_block - SCORE_THREADS)) {}

    __device__ __forceinline__ explicit Place(unsigned thread)
        : lane(thread % 32),
          warp(thread / 32),
          copy_row(thread / COPY_LANES),
          copy_lane(thread % COPY_LANES) {}
};

using plan::Item;

// Where the KV rows are.
struct KvRows {
    const kv_bits* kv;
    long long kv_stride;
    long long num_slots;
    const KV_INDEX* kv_indices;
    const bits16* draft_kv;
    long long draft_stride;
    const long long* out_cache_loc;  // null: the trees' rows are in `draft_kv`

    // Entries of the list for LIST_TILES tiles from position `start` on, of the rows that this warp
    // fetches. Lane l holds that of its row l % ROWS_A_WARP in tile l / ROWS_A_WARP: looked up once in
    // a while, because a warp waits for what it looks up no later than at the next barrier.
    __device__ __forceinline__ KV_INDEX look_up(const Item& item, unsigned start,
                                                Place place) const {
        // positions behind the last one may pass 2^31
        const unsigned position = start + place.lane / ROWS_A_WARP * TILE +
                                  place.copy_row / ROWS_A_WARP * ROWS_A_WARP +
                                  place.lane % ROWS_A_WARP;
        const unsigned end = min(item.prefix, item.end);
        return position < end ? kv_indices[item.first_index + position] : 0;
    }

    // Asks for all entries of the item; `thread` of the values.
    __device__ __forceinline__ void prefetch(const Item& item, int thread) const {
        const unsigned end = min(item.prefix, item.end);
        constexpr int LINE = 128 / static_cast<int>(sizeof(KV_INDEX));
#pragma unroll 1
        for (unsigned position = item.begin + thread * LINE; position < end;
             position += VALUE_THREADS * LINE) {
            prefetch_l2(kv_indices + item.first_index + position);
        }
    }

    // Starts the copy of row `place.copy_row` of the tile at position `start` into `tile`: this
    // thread's pieces of it. Rows past the end become zeros, and a row beside codes that is none of
    // them is left alone. `whole`: all of the tile's rows are there and of the prefix.
    __device__ __forceinline__ void fetch(const Item& item, int start, bool whole, KV_INDEX listed,
                                          kv_bits* tile, Place place) const {
        kv_bits* to = tile + place.copy_row * KV_PITCH + place.copy_lane * KV_PIECE;
        const kv_bits* from = kv;
        long long slot = static_cast<long long>(listed);
        bool given = true;
        bool pooled = true;
        if (__builtin_expect(!whole, 0)) {
            const int position = start + place.copy_row;
            given = position < item.end;
            if (given && position >= item.prefix) {
                const long long token = item.first_token + (position - item.prefix);
                if (out_cache_loc != nullptr) {
                    slot = out_cache_loc[token];
                } else if (CODES) {
                    return;
                } else {
                    pooled = false;
                    from = reinterpret_cast<const kv_bits*>(draft_kv + token * draft_stride);
                }
            }
        }
        if (__builtin_expect(!given || (pooled && (slot < 0 || slot >= num_slots)), 0)) {
            // Scores of a slot that is none become NaN by the columns that only K has. Those of V are
            // 0: a query row that does not see this one adds 0 times it.
#pragma unroll 1
            for (int piece = place.copy_lane; piece < KV_ROW_PIECES; piece += COPY_LANES) {
                const unsigned bits = !given || piece < LATENT / KV_PIECE ? 0 : ALL;
                store128(to, make_uint4(bits, bits, bits, bits));
                to += COPY_LANES * KV_PIECE;
            }
            return;
        }
        if (pooled) {
            from += slot * kv_stride;
        }
        from += place.copy_lane * KV_PIECE;
#pragma unroll
        for (int piece = 0; piece < KV_ROW_PIECES; piece += COPY_LANES) {
            if (piece + COPY_LANES <= KV_ROW_PIECES || piece + place.copy_lane < KV_ROW_PIECES) {
                ptx::cp_async16(to + piece * KV_PIECE, from + piece * KV_PIECE);
            }
        }
    }

    // Writes this thread's pieces of a tile of codes, which have arrived, as bfloat16.
    __device__ __forceinline__ void widen(const Item& item, int start, const kv_bits* codes,
                                          bits16* tile, Place place) const {
        const int position = start + place.copy_row;
        bits16* to = tile + place.copy_row * PITCH;
        if (position >= item.prefix && position < item.end && out_cache_loc == nullptr) {
            const bits16* from =
                draft_kv + (item.first_token + (position - item.prefix)) * draft_stride;
            for (int piece = place.copy_lane; piece < ROW_PIECES; piece += COPY_LANES) {
                store128(to + piece * PIECE, load128(from + piece * PIECE));
            }
            return;
        }
        const kv_bits* from = codes + place.copy_row * KV_PITCH;
#pragma unroll 1
        for (int piece = place.copy_lane; piece < KV_ROW_PIECES; piece += COPY_LANES) {
            uint4 first, second;
            fp8_e4m3::widen(load128(from + piece * KV_PIECE), first, second);
            store128(to + piece * KV_PIECE, first);
            store128(to + piece * KV_PIECE + PIECE, second);
        }
    }
};

// How an item is divided into tiles.
struct Tiles {
    int count;
    int whole;  // the first ones, of which all rows are there and of the prefix

    __device__ __forceinline__ explicit Tiles(const Item& item)
        : count((item.end - item.begin + TILE - 1) / TILE),
          whole((min(item.prefix, item.end) - item.begin) / TILE) {}
};

// What warps hand to each other in shared memory: written in one half of a tile's time, read in the
// next. Probabilities are there twice, since they are read in two halves.
struct Handed {
    uint4* shares;  // [BANDS][TILE / 8][32]: scores that the other warp of a pair has summed up
    uint4* probabilities;  // [2][KV_STEPS][BANDS][32]: operands
    unsigned* grown;       // [BANDS]: whether factors of the band are other than 1
    float* factors;        // [ROW_TILE]: what has been accumulated is to be multiplied with
    word64* masks;         // [ROW_TILE / GROUP][MAX_WORDS]: visibility of each group's token

    __device__ __forceinline__ uint4* operands(int tile, int step) const {
        return probabilities + (tile % 2 * KV_STEPS + step) * BANDS * 32;
    }
};

// Bands of an item's row tile that have rows.
__device__ __forceinline__ int bands_of(const Item& item) {
    const int rows = min(ROW_TILE, item.rows - item.row_tile * ROW_TILE);
    return (rows + BAND_ROWS - 1) / BAND_ROWS;
}

// ---- scores ---------------------------------------------------------------------------------

// What a warp of the scores is in charge of: two bands, over half of K's columns, and the softmax of
// the first.
struct Duty {
    int lane;
    int bands[2];
    int first_step;  // of K

    __device__ __forceinline__ explicit Duty(int thread)
        : lane(thread % 32),
          bands{thread / 32, thread / 32 ^ 1},
          first_step(thread / 32 % 2 * K_OWN) {}

    __device__ __forceinline__ bool has(int step) const {
        return K_STEPS % 2 == 0 || first_step + step < K_STEPS;
    }
};

// Q of a warp's bands and columns as operands: lane l has columns 2 (l % 4) + {0, 1} and 8 behind them
// of each step, of rows l / 4 and l / 4 + 8.
struct Queries {
    unsigned held[HELD_STEPS == 0 ? 1 : HELD_STEPS][2][4];
    uint4* shared;  // of this lane: [SHARED_STEPS][2][32]
};

// Where the queries are.
struct QuerySource {
    const bits16* latent;
    const bits16* rope;
    long long stride, head_stride, rope_stride, rope_head_stride;

    // Starts the copies of a warp's rows and columns into `room`, four lanes a row. `All` of the rows are
    // there, or those of no token become zeros.
    template <bool All>
    __device__ __forceinline__ void copy(const Item& item, int first_row, bits16* room,
                                         const Duty& duty) const {
        constexpr int PIECES = 2 * K_OWN;  // of a row that a warp loads, from a multiple of it on
        constexpr int LANES = 4;
        const int rows = item.rows;
        const long long first_token = item.first_token;
        const int own = duty.first_step * 2 + duty.lane % LANES;
        int row = first_row + duty.lane / LANES;
        bits16* to = room + duty.lane / LANES * PITCH + own * PIECE;
#pragma unroll(All ? 2 * BAND_ROWS * LANES / 32 : 1)
        for (int part = 0; part < 2 * BAND_ROWS; part += 32 / LANES) {
            const bool given = All || row < rows;
            const long long token = first_token + (given ? row / HEADS : 0);
            const int head = given ? row % HEADS : 0;
            const bits16* from_latent = latent + token * stride + head * head_stride + own * PIECE;
            const bits16* from_rope =
                rope + token * rope_stride + head * rope_head_stride + (own * PIECE - LATENT);
#pragma unroll
            for (int begin = 0; begin < PIECES; begin += LANES) {
                // in either half of the columns
                const bool latent_only = begin + PIECES + LANES <= LATENT / PIECE;
                const bool is_latent = latent_only || own + begin < LATENT / PIECE;
                const bool exists =
                    (begin + LANES <= PIECES || begin + duty.lane % LANES < PIECES) &&
                    (K_STEPS % 2 == 0 || own + begin < ROW_PIECES);
                const bits16* from = (is_latent ? from_latent : from_rope) + begin * PIECE;
                if (exists && All) {
                    ptx::cp_async16(to + begin * PIECE, from);
                } else if (exists) {
                    ptx::cp_async16(to + begin * PIECE, from, given ? 16 : 0);
                }
            }
            row += 32 / LANES;
            to += 32 / LANES * PITCH;
        }
    }

    // Starts the copies of a warp's queries into `room`, which holds the rows of its two bands.
    __device__ __forceinline__ void start(const Item& item, bits16* room, const Duty& duty) const {
        const int first_row = item.row_tile * ROW_TILE + duty.bands[0] / 2 * (2 * BAND_ROWS);
        // apart from the rare case: copies that depend on a condition take four times as long
        if (first_row + 2 * BAND_ROWS <= item.rows) {
            copy<true>(item, first_row, room, duty);
        } else {
            copy<false>(item, first_row, room, duty);
        }
        ptx::cp_async_commit();
    }
};

// Takes a warp's queries from `room`, into which their copies were started.
__device__ __forceinline__ void take_queries(Queries& q, const bits16* room, const Duty& duty) {
    ptx::cp_async_wait<0>();
    __syncwarp();
#pragma unroll
    for (int of = 0; of < 2; ++of) {
        const bits16* row = room + (duty.bands[of] % 2 * BAND_ROWS + duty.lane % 16) * PITCH +
                            duty.lane / 16 * 8 + duty.first_step * 16;
#pragma unroll
        for (int step = 0; step < K_OWN; ++step) {
            if (!duty.has(step)) {
            } else if (step < HELD_STEPS) {
                ptx::ldmatrix_x4(q.held[step][of], row + step * 16);
            } else {
                unsigned a[4];
                ptx::ldmatrix_x4(a, row + step * 16);
                store128(q.shared + ((step - HELD_STEPS) * 2 + of) * 32,
                         make_uint4(a[0], a[1], a[2], a[3]));
            }
        }
    }
}

// A lane's scores of a tile and a band: of each 8 KV rows n, columns 8 n + 2 (l % 4) + {0, 1} of query
// rows l / 4 and, behind them, l / 4 + 8.
using Scores = float[TILE / 8][4];

// A warp's share of S = Q K^T over one tile: for two bands, summed over its columns of K. Fragments are
// asked for FRAGMENTS - 1 steps ahead.
__device__ __forceinline__ void multiply_keys(const Queries& q, const bits16* tile,
                                              const Duty& duty, Scores (&scores)[2]) {
    const bits16* row = tile + (duty.lane / 16 * 8 + duty.lane % 8) * PITCH +
                        duty.lane / 8 % 2 * 8 + duty.first_step * 16;
    unsigned keys[FRAGMENTS][KV_STEPS][4];
    unsigned queries[FRAGMENTS][2][4];
    const auto load = [&](int step) {
        if (step < K_OWN && duty.has(step)) {
#pragma unroll
            for (int part = 0; part < KV_STEPS; ++part) {
                ptx::ldmatrix_x4(keys[step % FRAGMENTS][part], row + part * 16 * PITCH + step * 16);
            }
            if (step >= HELD_STEPS) {
#pragma unroll
                for (int of = 0; of < 2; ++of) {
                    const uint4 a = load128(q.shared + ((step - HELD_STEPS) * 2 + of) * 32);
                    queries[step % FRAGMENTS][of][0] = a.x;
                    queries[step % FRAGMENTS][of][1] = a.y;
                    queries[step % FRAGMENTS][of][2] = a.z;
                    queries[step % FRAGMENTS][of][3] = a.w;
                }
            }
        }
    };
#pragma unroll
    for (int of = 0; of < 2; ++of) {
#pragma unroll
        for (int n = 0; n < TILE / 8; ++n) {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                scores[of][n][i] = 0.0f;
            }
        }
    }
#pragma unroll
    for (int step = 0; step < FRAGMENTS - 1; ++step) {
        load(step);
    }
#pragma unroll
    for (int step = 0; step < K_OWN; ++step) {
        load(step + FRAGMENTS - 1);
        if (duty.has(step)) {
#pragma unroll
            for (int of = 0; of < 2; ++of) {
                unsigned a[4];
#pragma unroll
                for (int i = 0; i < 4; ++i) {
                    a[i] =
                        step < HELD_STEPS ? q.held[step][of][i] : queries[step % FRAGMENTS][of][i];
                }
#pragma unroll
                for (int part = 0; part < KV_STEPS; ++part) {
                    const unsigned (&b)[4] = keys[step % FRAGMENTS][part];
                    const unsigned first[2] = {b[0], b[1]};
                    const unsigned second[2] = {b[2], b[3]};
                    WITH_ELEMENT(ptx::mma_m16n8k16_, ELEMENT)(scores[of][2 * part], a, first);
                    WITH_ELEMENT(ptx::mma_m16n8k16_, ELEMENT)(scores[of][2 * part + 1], a, second);
                }
            }
        }
    }
}

// Takes away the scores of KV positions, `position` being the lane's first, that are past the item's
// end or not in the mask of the row's token.
__device__ __forceinline__ void hide(Scores& x, const Item& item, int position,
                                     const word64* masks) {
#pragma unroll
    for (int n = 0; n < TILE / 8; ++n) {
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            const int at = position + n * 8 + i % 2;
            const int node = at - item.prefix;
            bool seen = at < item.end;
            if (seen && node >= 0) {
                seen = masks[i / 2 * MAX_WORDS + node / 64] >> (node % 64) & 1;
            }
            x[n][i] = seen ? x[n][i] : minus_infinity();
        }
    }
}

// The softmax of a band: of a lane's two query rows, l / 4 and l / 4 + 8, over those KV rows that it
// has. What is multiplied with V is rounded to 16 bits, so that is what the outputs are divided by: a
// key that has nearly all of the weight then gives its own values, whatever its probability was
// rounded to.
struct Softmax {
    float max[2];  // log2 domain, the same in all lanes of a query row; -inf before the first score
    float sum[2];
    float rounded_sum[2];

    // Takes the largest scores of each lane. Where that of a query row has grown by enough, also from
    // -inf, it is the new maximum, and `factor` what has been accumulated is worth of what it was.
    __device__ __forceinline__ void raise(const float (&largest)[2], float (&factor)[2]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float of_row = fmaxf(largest[i], __shfl_xor_sync(ALL, largest[i], 1));
            of_row = fmaxf(of_row, __shfl_xor_sync(ALL, of_row, 2));
            if (of_row > max[i] + RESCALE_ABOVE) {
                factor[i] = ptx::exp2_approx(max[i] - of_row);
                max[i] = of_row;
            }
        }
    }

    // Takes the scores of one tile, masked to -inf where unseen; gives the probabilities as operands,
    // what has been accumulated before is to be multiplied with, and whether that is other than 1 for
    // any row of the band. Accumulators are in units of codes where the pool has codes: from
    // `exact_from` on, counted from the lane's first position, rows are numbers, `unit` of which are
    // one.
    __device__ __forceinline__ bool step(Scores& x, int exact_from, float unit, float value,
                                         uint4 (&probabilities)[KV_STEPS], float (&factor)[2]) {
        float largest[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            largest[i] = fmaxf(x[0][2 * i], x[0][2 * i + 1]);
#pragma unroll
            for (int n = 1; n < TILE / 8; ++n) {
                largest[i] = fmaxf(largest[i], fmaxf(x[n][2 * i], x[n][2 * i + 1]));
            }
            factor[i] = 1.0f;
        }
        const bool larger =
            largest[0] > max[0] + RESCALE_ABOVE || largest[1] > max[1] + RESCALE_ABOVE;
        const bool grown = __any_sync(ALL, larger);
        if (__builtin_expect(grown, 0)) {
            raise(largest, factor);
        }
        float base[2];
        float added[2] = {0.0f, 0.0f};
        float rounded[2] = {0.0f, 0.0f};
        unsigned words[TILE / 8][2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            base[i] = max[i] == minus_infinity() ? 0.0f : max[i];
        }
#pragma unroll
        for (int n = 0; n < TILE / 8; ++n) {
            const float first = CODES && n * 8 >= exact_from ? unit : 1.0f;
            const float second = CODES && n * 8 + 1 >= exact_from ? unit : 1.0f;
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                const float p = ptx::exp2_approx(x[n][2 * i] - base[i]);
                const float q = ptx::exp2_approx(x[n][2 * i + 1] - base[i]);
                added[i] += p + q;
                words[n][i] = CODES ? element::pack(p * first, q * second) : element::pack(p, q);
                if (CODES) {
                    const float of_first = n * 8 >= exact_from ? value : 1.0f;
                    const float of_second = n * 8 + 1 >= exact_from ? value : 1.0f;
                    rounded[i] += element::first(words[n][i]) * of_first +
                                  element::second(words[n][i]) * of_second;
                } else {
                    rounded[i] += element::first(words[n][i]) + element::second(words[n][i]);
                }
            }
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            sum[i] = sum[i] * factor[i] + added[i];
            rounded_sum[i] = rounded_sum[i] * factor[i] + rounded[i];
        }
#pragma unroll
        for (int step = 0; step < KV_STEPS; ++step) {
            probabilities[step] = make_uint4(words[2 * step][0], words[2 * step][1],
                                             words[2 * step + 1][0], words[2 * step + 1][1]);
        }
        return grown;
    }

    // Sums up over the lanes; gives the factors that normalise accumulators in units of `scale`, and
    // the base-2 log-sum-exps.
    __device__ __forceinline__ void finish(float scale, float (&inverse)[2], float (&lse)[2]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int distance = 1; distance < 4; distance *= 2) {
                sum[i] += __shfl_xor_sync(ALL, sum[i], distance);
                rounded_sum[i] += __shfl_xor_sync(ALL, rounded_sum[i], distance);
            }
            const bool sees = sum[i] != 0.0f;
            inverse[i] = sees ? scale / rounded_sum[i] : 0.0f;
            lse[i] = sees ? max[i] + log2f(sum[i]) : minus_infinity();
        }
    }
};

// The visibility words of each group's token; clear where there is none.
__device__ __forceinline__ void load_masks(const Item& item, const word64* visible, int words,
                                           word64* masks, int thread) {
    if (thread < ROW_TILE / GROUP * MAX_WORDS) {
        const int row = item.row_tile * ROW_TILE + thread / MAX_WORDS * GROUP;
        const int word = thread % MAX_WORDS;
        const bool given = row < item.rows && word < words;
        masks[thread] = given ? visible[(item.first_token + row / HEADS) * words + word] : 0;
    }
}

// Factors of the scores, and where log-sum-exps go.
struct ScoreTerms {
    float scale;     // to base 2
    float kv_scale;  // what a code of 1 means
    bool separate;   // the trees' rows are numbers beside codes
    float* lse;
    float* partial_lse;
};

// All of an item that is done by a warp of the scores.
__device__ __forceinline__ void score_item(const Item& item, const Handed& handed, bits16* ring,
                                           uint4* shared_queries, const QuerySource& source,
                                           const ScoreTerms& terms) {
    const Tiles tiles(item);
    if (thread_anew() / 64 * 2 >= bands_of(item)) {  // neither band has rows
#pragma unroll 1
        for (int more = 1 + BANDS / ROOM_BANDS + 2 * (tiles.count + 1); more > 0; --more) {
            roles::meet(THREADS);
        }
        return;
    }
    Queries q;
    {
        const Duty duty(thread_anew());
        q.shared = shared_queries + duty.bands[0] * (QUERIES_SHARED * 64) + duty.lane;
        // The last two tiles are nobody's yet. Where they have no room for all bands, the later ones
        // wait for the first.
        bits16* room = ring + (TILES - 2) * TILE * PITCH +
                       duty.bands[0] % ROOM_BANDS / 2 * (2 * BAND_ROWS * PITCH);
        const bool later = duty.bands[0] >= ROOM_BANDS;
        if (!later) {
            source.start(item, room, duty);
        }
        roles::meet(THREADS);
        if (later) {
            roles::meet(THREADS);
            source.start(item, room, duty);
        }
        take_queries(q, room, duty);
        roles::meet(THREADS);
        if (ROOM_BANDS < BANDS && !later) {
            roles::meet(THREADS);
        }
    }
    Softmax softmax = {{minus_infinity(), minus_infinity()}, {0.0f, 0.0f}, {0.0f, 0.0f}};
#pragma unroll 1
    for (int tile = 0; tile < tiles.count; ++tile) {
        Scores sums[2];  // of the own band, of the other one
        {
            const Duty duty(thread_anew());
            multiply_keys(q, ring + static_cast<unsigned>(tile) % TILES * (TILE * PITCH), duty,
                          sums);
#pragma unroll
            for (int n = 0; n < TILE / 8; ++n) {
                store128(
                    handed.shares + (duty.bands[1] * (TILE / 8) + n) * 32 + duty.lane,
                    make_uint4(__float_as_uint(sums[1][n][0]), __float_as_uint(sums[1][n][1]),
                               __float_as_uint(sums[1][n][2]), __float_as_uint(sums[1][n][3])));
            }
        }
        roles::meet(THREADS);
        const int lane = thread_anew() % 32;
        const int band = thread_anew() / 32;
        Scores& x = sums[0];
#pragma unroll
        for (int n = 0; n < TILE / 8; ++n) {
            const uint4 share = load128(handed.shares + (band * (TILE / 8) + n) * 32 + lane);
            x[n][0] = (x[n][0] + __uint_as_float(share.x)) * terms.scale;
            x[n][1] = (x[n][1] + __uint_as_float(share.y)) * terms.scale;
            x[n][2] = (x[n][2] + __uint_as_float(share.z)) * terms.scale;
            x[n][3] = (x[n][3] + __uint_as_float(share.w)) * terms.scale;
        }
        int exact_from = TILE;
        float unit = 1.0f;
        if (__builtin_expect(tile >= tiles.whole, 0)) {
            const int position = item.begin + tile * TILE + lane % 4 * 2;
            if (CODES && terms.separate) {
                exact_from = item.prefix - position;
                unit = 1.0f / terms.kv_scale;
#pragma unroll
                for (int n = 0; n < TILE / 8; ++n) {
#pragma unroll
                    for (int i = 0; i < 4; ++i) {
                        x[n][i] *= n * 8 + i % 2 >= exact_from ? unit : 1.0f;
                    }
                }
            }
            hide(x, item, position, handed.masks + band * 2 * MAX_WORDS);
        }
        uint4 probabilities[KV_STEPS];
        float factor[2];
        const bool grown = softmax.step(x, exact_from, unit, terms.kv_scale, probabilities, factor);
#pragma unroll
        for (int step = 0; step < KV_STEPS; ++step) {
            store128(handed.operands(tile, step) + band * 32 + lane, probabilities[step]);
        }
        if (lane == 0) {
            handed.grown[band] = grown;
        }
        if (lane % 4 == 0) {
            float* factors = handed.factors + band * BAND_ROWS + lane / 4;
            factors[0] = factor[0];
            factors[8] = factor[1];
        }
        roles::meet(THREADS);
    }
    roles::meet(THREADS);
    float inverse[2];
    float log_sums[2];
    softmax.finish(CODES ? terms.kv_scale : 1.0f, inverse, log_sums);
    const int lane = thread_anew() % 32;
    const int band = thread_anew() / 32;
    if (lane % 4 == 0) {
#pragma unroll
        for (int half = 0; half < 2; ++half) {
            const int row = band * BAND_ROWS + half * 8 + lane / 4;
            const int flat = item.row_tile * ROW_TILE + row;
            handed.factors[row] = inverse[half];
            if (flat < item.rows && item.slot < 0) {
                terms.lse[item.first_token * HEADS + flat] = log_sums[half] * LN_2;
            } else if (flat < item.rows) {
                terms.partial_lse[item.slot * static_cast<long long>(ROW_TILE) + row] =
                    log_sums[half];
            }
        }
    }
    roles::meet(THREADS);
}

// ---- values ---------------------------------------------------------------------------------

// What a warp keeps over all KV tiles of an item: O of its columns of V and all rows. Of each 8
// columns n of a block and each band, a lane has columns 2 (l % 4) + {0, 1} of rows l / 4 and, behind
// them, l / 4 + 8.
template <int Bands>
struct Accumulators {
    float o[V_OWN][2][Bands][4];
};

__device__ __forceinline__ bool has_block(int warp, int block) {
    return V_BLOCKS % VALUE_WARPS == 0 || warp * V_OWN + block < V_BLOCKS;
}

// O = O * factors, where a band's scores have grown by much.
template <int Bands>
__device__ __forceinline__ void rescale(Accumulators<Bands>& acc, const Handed& handed, int lane) {
    unsigned of_band[BANDS] = {};
    if (Bands > 2) {
        const uint4 grown = load128(handed.grown);
        of_band[0] = grown.x;
        of_band[1] = grown.y;
        of_band[2] = grown.z;
        of_band[3] = grown.w;
    } else {
        of_band[0] = handed.grown[0];
        of_band[1] = handed.grown[1];
    }
#pragma unroll
    for (int band = 0; band < Bands; ++band) {
        if (__builtin_expect(of_band[band] != 0, 0)) {
            const float* factors = handed.factors + band * BAND_ROWS + lane / 4;
            const float upper = factors[0];
            const float lower = factors[8];
#pragma unroll
            for (int block = 0; block < V_OWN; ++block) {
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    acc.o[block][n][band][0] *= upper;
                    acc.o[block][n][band][1] *= upper;
                    acc.o[block][n][band][2] *= lower;
                    acc.o[block][n][band][3] *= lower;
                }
            }
        }
    }
}

// O += P V over 16 rows of a tile, for some of the warp's blocks of columns.
template <int FirstBlock, int EndBlock, int Bands>
__device__ __forceinline__ void multiply_values(Accumulators<Bands>& acc, const bits16* rows,
                                                const uint4* operands, int warp, int lane) {
    const bits16* row = rows + lane % 16 * PITCH + warp * V_OWN * 16 + lane / 16 * 8;
    unsigned p[Bands][4];
#pragma unroll
    for (int band = 0; band < Bands; ++band) {
        const uint4 a = load128(operands + band * 32 + lane);
        p[band][0] = a.x;
        p[band][1] = a.y;
        p[band][2] = a.z;
        p[band][3] = a.w;
    }
#pragma unroll
    for (int block = FirstBlock; block < EndBlock; ++block) {
        if (has_block(warp, block)) {
            unsigned v[4];
            ptx::ldmatrix_x4_trans(v, row + block * 16);
            const unsigned first[2] = {v[0], v[1]};
            const unsigned second[2] = {v[2], v[3]};
#pragma unroll
            for (int band = 0; band < Bands; ++band) {
                WITH_ELEMENT(ptx::mma_m16n8k16_, ELEMENT)(acc.o[block][0][band], p[band], first);
                WITH_ELEMENT(ptx::mma_m16n8k16_, ELEMENT)(acc.o[block][1][band], p[band], second);
            }
        }
    }
}

// The first or second half of O += P V over a tile.
template <int Half, int Bands>
__device__ __forceinline__ void multiply_half(Accumulators<Bands>& acc, const bits16* tile_rows,
                                              const Handed& handed, int tile) {
    const Place own(thread_anew());
    if (KV_STEPS > 1) {
        multiply_values<0, V_OWN>(acc, tile_rows + Half * 16 * PITCH, handed.operands(tile, Half),
                                  own.warp, own.lane);
    } else {
        constexpr int MIDDLE = V_OWN / 2;
        multiply_values<Half == 0 ? 0 : MIDDLE, Half == 0 ? MIDDLE : V_OWN>(
            acc, tile_rows, handed.operands(tile, 0), own.warp, own.lane);
    }
}

// Puts a warp's normalised outputs into shared memory as rows of the row tile, in the type of
// partials. Who copies outputs rounds them again: a loop of their own here would be more instructions
// to fetch for every item, and they are fetched for one use.
template <int Bands>
__device__ __forceinline__ void stage_outputs(const Accumulators<Bands>& acc, const float* factors,
                                              int warp, int lane, bits16* rows) {
#pragma unroll
    for (int band = 0; band < Bands; ++band) {
        const int row = band * BAND_ROWS + lane / 4;
        const float upper = factors[row];
        const float lower = factors[row + 8];
        bits16* to = rows + row * OUT_PITCH + warp * V_OWN * 16 + lane % 4 * 2;
#pragma unroll
        for (int block = 0; block < V_OWN; ++block) {
            if (has_block(warp, block)) {
#pragma unroll
                for (int n = 0; n < 2; ++n) {
                    const float (&o)[4] = acc.o[block][n][band];
                    const int column = block * 16 + n * 8;
                    *reinterpret_cast<unsigned*>(to + column) =
                        partials::pack(o[0] * upper, o[1] * upper);
                    *reinterpret_cast<unsigned*>(to + 8 * OUT_PITCH + column) =
                        partials::pack(o[2] * lower, o[3] * lower);
                }
            }
        }
    }
}

// All of an item with up to `Bands` bands of rows that is done by a warp of the values; leaves outputs in
// the ring.
template <int Bands>
__device__ __forceinline__ void value_item(const Item& item, const Handed& handed, bits16* ring,
                                           const KvRows& source) {
    const Tiles tiles(item);
    kv_bits* const room = reinterpret_cast<kv_bits*>(ring + (CODES ? CODES_AT : 0));
    const auto arriving = [&](int tile) {  // where a tile comes
        return room + static_cast<unsigned>(tile) % ARRIVING * (TILE * KV_PITCH);
    };
    const auto in_ring = [&](int tile) {
        return ring + static_cast<unsigned>(tile) % TILES * (TILE * PITCH);
    };
    KV_INDEX list;
    const auto fetch = [&](int tile, const Place& own) {
        const KV_INDEX listed =
            __shfl_sync(ALL, list, tile % LIST_TILES * ROWS_A_WARP + own.lane / COPY_LANES);
        if (tile < tiles.count) {
            source.fetch(item, item.begin + tile * TILE, tile < tiles.whole, listed, arriving(tile),
                         own);
        }
        ptx::cp_async_commit();
        if ((tile + 1) % LIST_TILES == 0) {  // long before it is used
            list = source.look_up(item, item.begin + (tile + 1u) * TILE, own);
        }
    };
    // Of codes, its own pieces only, which nobody else has to wait for.
    const auto widen = [&](int tile, const Place& own) {
        if (tile < tiles.count) {
            source.widen(item, item.begin + tile * TILE, arriving(tile), in_ring(tile), own);
        }
    };
    {
        const Place own(thread_anew());
        list = source.look_up(item, item.begin, own);
        fetch(0, own);
    }
    // The queries come before the other tiles: without them nothing goes on.
    roles::meet(THREADS);
    {
        const Place own(thread_anew());
#pragma unroll 1
        for (int tile = 1; tile < AHEAD; ++tile) {
            if (CODES && tile == AHEAD - 1) {
                ptx::cp_async_wait<CODES ? AHEAD - 2 : 0>();
                widen(0, own);
            }
            fetch(tile, own);
        }
        source.prefetch(item, thread_anew() - SCORE_THREADS);
        if (!CODES) {
            ptx::cp_async_wait<AHEAD - 1>();
        }
    }
    Accumulators<Bands> acc = {};
#pragma unroll
    for (int turn = 0; turn < BANDS / ROOM_BANDS; ++turn) {
        roles::meet(THREADS);
    }
    // The scores are a tile ahead; the one before that has been used up.
#pragma unroll 1
    for (int tile = 0; tile <= tiles.count; ++tile) {
        if (tile > 0) {
            rescale(acc, handed, thread_anew() % 32);
            multiply_half<0>(acc, in_ring(tile - 1), handed, tile - 1);
        }
        {
            // Not in the second half, in which the scores wait for what they store.
            const Place own(thread_anew());
            if (CODES) {
                ptx::cp_async_wait<CODES ? AHEAD - 2 : 0>();
                widen(tile + 1, own);
            }
            fetch(tile + AHEAD, own);
        }
        roles::meet(THREADS);
        if (tile > 0) {
            multiply_half<1>(acc, in_ring(tile - 1), handed, tile - 1);
        }
        if (!CODES) {
            ptx::cp_async_wait<AHEAD - 1>();
        }
        roles::meet(THREADS);
    }
    const Place own(thread_anew());
    stage_outputs(acc, handed.factors, own.warp, own.lane, ring);
}

}  // namespace

// Computes every item of the plan.
//
// Launch: num_ctas blocks, as many as the plan was made for; block c takes the items cta_work[c]
// names. It may be launched before the kernel in front has ended, and reads nothing before that. Request, row tile, range, slot and count of an item are the plan's word and not judged
// again. Rows of `out` and `lse` that belong to row tiles in one piece are written, and all rows of
// the partial slots that belong to a query; `lse` is -inf and `out` 0 where nothing is seen.
// Strides count elements, from token to token, head to head, slot to slot. The trees' rows are in
// `draft_kv`, or where that is None, in the slots `out_cache_loc`. Words of `visible` that are not
// there count as clear.
//
// @kernel verify_partials
// @param q_latent read ELEMENT [tokens, HEADS, LATENT] stride=(q_stride, q_head_stride, 1) align=16
// @param q_rope read ELEMENT [tokens, HEADS, ROPE] stride=(rope_stride, rope_head_stride, 1) align=16
// @param q_stride           value   int64                   multiple of 8
// @param q_head_stride      value   int64                   multiple of 8
// @param rope_stride      value   int64                   multiple of 8
// @param rope_head_stride value   int64                   multiple of 8
// @param sm_scale           value   fp32                    factor on the scores
// @param kv_scale           value   fp32                    what a code of 1 means; else not used
// @param kv read KV_ELEMENT [num_slots, LATENT + ROPE] stride=(kv_stride, 1) align=16  the pool
// @param kv_stride          value   int64                   multiple of 16 bytes
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
// @param cta_work           read    int32 [num_ctas, 4] align=16  first item, end, step, half
// @param partial_out        scratch int16 [slots, 64, LATENT] align=16  PARTIAL, normalised
// @param partial_lse        scratch fp32 [slots, 64]        base 2
// @param out write ELEMENT [tokens, HEADS, LATENT] stride=(out_stride, LATENT, 1) align=16
// @param out_stride         value   int64                   multiple of 8
// @param lse                write   fp32 [tokens, HEADS]    natural logarithm
// @block 384
// @early
// @shared STAGES * TILE * (LATENT + ROPE + 8) * 2 + QUERIES_SHARED * 4096 + TILE * 512 + 16 + 256 + 256 + 48
extern "C" __global__ void __launch_bounds__(THREADS, 1)
    verify_partials(const bits16* __restrict__ q_latent, const bits16* __restrict__ q_rope,
                    long long q_stride, long long q_head_stride, long long rope_stride,
                    long long rope_head_stride, float sm_scale, float kv_scale,
                    const kv_bits* __restrict__ kv, long long kv_stride, long long num_slots,
                    const int* __restrict__ kv_indptr, const KV_INDEX* __restrict__ kv_indices,
                    const bits16* __restrict__ draft_kv, long long draft_stride,
                    const long long* __restrict__ out_cache_loc,
                    const QO_INDEX* __restrict__ qo_indptr, const word64* __restrict__ visible,
                    int words, const int* __restrict__ work, const int* __restrict__ cta_work,
                    short* __restrict__ partial_out, float* __restrict__ partial_lse,
                    bits16* __restrict__ out, long long out_stride, float* __restrict__ lse) {
    DYNAMIC_SHARED(cursor);
    CARVE(cursor, bits16, ring, STAGES * TILE * PITCH);
    CARVE(cursor, uint4, shared_queries, SCORE_WARPS * QUERIES_SHARED * 64);
    CARVE(cursor, uint4, shares, BANDS * (TILE / 8) * 32);
    CARVE(cursor, uint4, probabilities, 2 * KV_STEPS * BANDS * 32);
    CARVE(cursor, unsigned, grown, BANDS);
    CARVE(cursor, float, factors, ROW_TILE);
    CARVE(cursor, word64, masks, ROW_TILE / GROUP * MAX_WORDS);
    CARVE(cursor, Item, items, 1);
    Item& item = items[0];
    const Handed handed = {shares, probabilities, grown, factors, masks};

    early::wait_for_dependency();
    early::launch_dependents();  // not before: they read the plan, too, which may just be made
    for (bool first = true;; first = false) {
        if (thread_anew() == 0) {
            plan::next(item, first, work, cta_work + blockIdx.x * 4, kv_indptr, qo_indptr, HEADS);
        }
        __syncthreads();
        if (item.rows < 0) {
            break;
        }
        load_masks(item, visible, words, masks, thread_anew());
        if (thread_anew() < SCORE_THREADS) {
            const QuerySource queries = {q_latent,      q_rope,      q_stride,
                                         q_head_stride, rope_stride, rope_head_stride};
            const ScoreTerms terms = {(CODES ? sm_scale * kv_scale : sm_scale) * LOG2_E, kv_scale,
                                      out_cache_loc == nullptr, lse, partial_lse};
            score_item(item, handed, ring, shared_queries, queries, terms);
        } else {
            const KvRows source = {kv,       kv_stride,    num_slots,    kv_indices,
                                   draft_kv, draft_stride, out_cache_loc};
            const int bands = bands_of(item);
            if (bands == 1) {
                value_item<1>(item, handed, ring, source);
            } else if (bands == 2) {
                value_item<2>(item, handed, ring, source);
            } else {
                value_item<BANDS>(item, handed, ring, source);
            }
        }
        __syncthreads();
        const int first_row = item.row_tile * ROW_TILE;
        const int pieces = min(ROW_TILE, item.rows - first_row) * OUT_PIECES;
        const long long first_token = item.first_token;
        bits16* const partial = item.slot < 0 ? nullptr
                                              : reinterpret_cast<bits16*>(partial_out) +
                                                    item.slot * (ROW_TILE * LATENT * 1ll);
#pragma unroll 4
        for (int piece = thread_anew(); piece < pieces; piece += THREADS) {
            const int row = piece / OUT_PIECES;
            const int column = piece % OUT_PIECES * PIECE;
            const int flat = first_row + row;
            bits16* to = partial != nullptr ? partial + row * LATENT + column
                                            : out + (first_token + flat / HEADS) * out_stride +
                                                  flat % HEADS * LATENT + column;
            const uint4 columns = load128(ring + row * OUT_PITCH + column);
            store128(to, partial != nullptr ? columns : combine::rounded(columns));
        }
        __syncthreads();  // the ring is filled anew
    }
}

// Merges the pieces of the row tiles that were cut and writes their rows of `out` and `lse`.
//
// Launch: any number of blocks of COMBINE_THREADS threads; the grid need not know the plan. 32 pieces
// of 8 columns are a unit; see merge.cuh. It may be launched before verify_partials has ended, and
// waits before it reads what that kernel writes, which is therefore no `__restrict__` parameter; the
// plan, which was there before, it reads at once. What follows may start as soon.
//
// @kernel verify_combine
// @param partial_out    read   int16 [slots, 64, LATENT] align=16  PARTIAL, normalised
// @param partial_lse    read   fp32 [slots, 64]      base 2
// @param combine_indptr read   int32 [tiles + 1]     bounds of each cut row tile's slots
// @param combine_tiles  read   int32 [tiles, 4] align=16  as verify_plan writes them
// @param tiles          value  int32                 most row tiles that can be cut
// @param out            update ELEMENT [tokens, HEADS, LATENT] stride=(out_stride, LATENT, 1) align=16
// @param out_stride     value  int64                 multiple of 8
// @param lse            update fp32 [tokens, HEADS]  natural logarithm
// @block COMBINE_THREADS
// @early
extern "C" __global__ void __launch_bounds__(COMBINE_THREADS)
    verify_combine(const short* partial_out, const float* partial_lse,
                   const int* __restrict__ combine_indptr, const int* __restrict__ combine_tiles,
                   int tiles, bits16* __restrict__ out, long long out_stride,
                   float* __restrict__ lse) {
    constexpr int WARPS = COMBINE_THREADS / 32;
    constexpr int UNITS = ROW_TILE * OUT_PIECES / 32;
    SHARED_ARRAY(float, means, [WARPS][combine::PIECE + 2][32]);
    merge::Turns<UNITS, ROW_TILE, 8, HEADS, COMBINE_THREADS, COMBINE_LEAST> turns(
        combine_indptr, combine_tiles, tiles);
    merge::Turn turn;
    early::launch_dependents();  // they wait until this kernel has ended
    early::wait_for_dependency();
    while (turns.next(turn)) {
        combine::units<WARPS, COMBINE_UNROLL, UNITS, ROW_TILE>(
            turns, turn, partial_out, partial_lse, ROW_TILE, means,
            [&](const merge::Rows& rows, int row, int piece, uint4 columns, float log_sum) {
                const int flat = rows.first + row;
                const long long token = rows.first_token + flat / HEADS;
                store128(out + token * out_stride + flat % HEADS * LATENT + piece * PIECE, columns);
                if (piece == 0) {
                    lse[token * HEADS + flat % HEADS] = log_sum * LN_2;
                }
            });
    }
}
