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
// Products are transposed: S^T = K Q^T and O^T = V^T P^T by mma.m16n8k16. Eight heads of one token
// are the eight columns of an operand, so no row is padded at any T. A block has two bands of four
// warps; a band holds 32 query rows. Within it each warp multiplies a quarter of K's columns with
// all of the band's queries (the four partial scores meet in shared memory), then does the softmax
// of 8 query rows, then multiplies a quarter of V's columns with all of the band's probabilities.
// So one fragment of K or V that a warp loads serves 32 columns, queries and accumulators stay in
// registers, and a tile of KV lies in shared memory once, in a ring that cp.async fills. The second
// band is half a tile behind the first: of the two warps of a scheduler, one multiplies while the
// other one does its softmax. (Of a pool of codes, both do the same at once.)
//
// Partials are of the type of `out`, normalised, with one base-2 log-sum-exp a row: half the traffic
// of float32, and the rounding is that of `out` itself, averaged over the pieces.
//
// A pool of fp8 codes is widened in shared memory, which is exact: cp.async fills a ring of codes,
// and the thread that fetched a piece writes it as bfloat16 into one of two tiles while the softmax
// of the tile before goes on. Scores and outputs are in units of the codes until they are scaled.
// The rows of `draft_kv` stay what they are: their scores and weights are brought to those units.
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
#include "prefetch.cuh"
#include "ptx.cuh"
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
// KV tiles of 16 rows in shared memory: one is used, STAGES - 2 are on their way (of fp8 codes
// STAGES - 1, besides two tiles that are used)
#ifndef STAGES
#define STAGES 4
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
#define COMBINE_UNROLL 5
#endif
// splits that are worth a further warp
#ifndef COMBINE_LEAST
#define COMBINE_LEAST 4
#endif

namespace {

constexpr int DIM = LATENT + ROPE;
constexpr int ROW_TILE = 64;
constexpr int GROUP = 8;  // query rows of one mma
constexpr int BANDS = 2;
constexpr int BAND_WARPS = 4;
constexpr int GROUPS = 4;  // of a band: one for the softmax of each of its warps
constexpr int THREADS = BANDS * BAND_WARPS * 32;
constexpr int BAND_ROWS = GROUPS * GROUP;
constexpr int TILE = 16;        // KV rows
constexpr int PITCH = DIM + 8;  // elements from row to row in shared memory: no bank conflicts
constexpr int PIECE = 8;        // elements of a 16-byte access
constexpr int ROW_PIECES = DIM / PIECE;  // of a row in shared memory
constexpr int OUT_PIECES = LATENT / PIECE;
constexpr int OUT_PITCH = LATENT + PIECE;   // as PITCH, for rows that are written out
constexpr int COPY_LANES = THREADS / TILE;  // that fetch one row
constexpr int MAX_WORDS = 4;                // of visibility: 256 tree tokens

constexpr int K_STEPS = DIM / 16;
constexpr int K_OWN = (K_STEPS + BAND_WARPS - 1) / BAND_WARPS;
constexpr int V_BLOCKS = LATENT / 16;
constexpr int V_OWN = (V_BLOCKS + BAND_WARPS - 1) / BAND_WARPS;

namespace element = ELEMENT;
constexpr bool CODES = BYTES_OF(KV_ELEMENT) == 1;
constexpr int TILES = CODES ? 2 : STAGES;            // that products are made of
constexpr int AHEAD = CODES ? STAGES : STAGES - 1;   // tiles that are fetched before the first
constexpr int KV_PIECE = 16 / BYTES_OF(KV_ELEMENT);  // elements of a 16-byte access to the pool
constexpr int KV_ROW_PIECES = DIM / KV_PIECE;
constexpr int KV_PITCH = CODES ? DIM : PITCH;   // from row to row where the copies go
constexpr int CODES_AT = TILES * TILE * PITCH;  // in the ring: behind the tiles
constexpr int LAG = CODES ? 0 : 1;              // halves of a tile that the second band is behind
constexpr int FRAGMENTS = 3;                    // of K or V that a warp holds
constexpr int ROWS_A_WARP = TILE / (THREADS / 32);  // that it fetches of a tile
constexpr int LIST_TILES = 32 / ROWS_A_WARP;        // whose slots a warp's lanes hold

static_assert(LATENT % 16 == 0 && ROPE % 16 == 0 && LATENT >= 16 && ROPE >= 16, "whole fragments");
static_assert(HEADS % GROUP == 0 && HEADS >= GROUP, "a group of columns is of one token");
static_assert(GROUPS == BAND_WARPS, "each warp does the softmax of one group");
static_assert(BANDS * GROUPS * GROUP == ROW_TILE, "a block holds one row tile");
static_assert(STAGES >= 4 && AHEAD <= LIST_TILES, "the ring also holds a row tile of outputs");
static_assert(CODES_AT * 2 + (CODES ? STAGES * TILE * DIM : 0) <= STAGES * TILE * PITCH * 2,
              "codes and the two tiles made of them find room in the ring");
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

// What a thread of verify_partials is in charge of.
struct Place {
    int lane;
    int warp;  // of the band: it has a quarter of the columns of K and V
    int band;
    int group;      // the column group, of all, whose softmax the warp does
    int copy_row;   // the row of a tile that the thread helps to fetch,
    int copy_lane;  // as one of 16

    __device__ __forceinline__ explicit Place(int thread_number)
        : Place(static_cast<unsigned>(thread_number)) {}

    __device__ __forceinline__ explicit Place(unsigned thread)
        : lane(thread % 32),
          warp(thread / 32 % BAND_WARPS),
          band(thread / (32 * BAND_WARPS)),
          group(thread / 32),
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
    // fetches. Lane l holds that of row l % 2 of the warp's in tile l / 2: looked up once in a while,
    // because a warp waits for what it looks up no later than at the next barrier.
    __device__ __forceinline__ KV_INDEX look_up(const Item& item, int start, Place place) const {
        const int position = start + place.lane / ROWS_A_WARP * TILE +
                             place.copy_row / ROWS_A_WARP * ROWS_A_WARP + place.lane % ROWS_A_WARP;
        return position < min(item.prefix, item.end) ? kv_indices[item.first_index + position] : 0;
    }

    // Asks for all entries of the item.
    __device__ __forceinline__ void prefetch(const Item& item, int thread) const {
        const int end = min(item.prefix, item.end);
        constexpr int LINE = 128 / static_cast<int>(sizeof(KV_INDEX));
#pragma unroll 1
        for (int position = item.begin + thread * LINE; position < end;
             position += THREADS * LINE) {
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
        if (start >= item.end) {
            return;
        }
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

// What a warp keeps over all KV tiles of an item.
struct Accumulators {
    float o[V_OWN][GROUPS][4];  // O^T: its V columns, the band's query rows
};

using Queries = unsigned[K_OWN][GROUPS][2];  // Q^T: its K columns, the band's query rows

// Loads a band's queries as operands: lane l holds columns 2 (l % 4) + {0, 1, 8, 9} of each step.
struct QuerySource {
    const bits16* latent;
    const bits16* rope;
    long long stride, head_stride, rope_stride, rope_head_stride;

    __device__ __forceinline__ void load(Queries& q, const Item& item, Place place) const {
        const int first_row = (item.row_tile * BANDS + place.band) * BAND_ROWS;
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            const int row = first_row + group * GROUP + place.lane / 4;
            const long long token = item.first_token + row / HEADS;
            const int head = row % HEADS;
            const int column = place.warp * K_OWN * 16 + place.lane % 4 * 2;
            const bits16* from_latent = latent + token * stride + head * head_stride + column;
            const bits16* from_rope =
                rope + token * rope_stride + head * rope_head_stride + (column - LATENT);
#pragma unroll
            for (int k = 0; k < K_OWN; ++k) {
                const int step = place.warp * K_OWN + k;
                q[k][group][0] = q[k][group][1] = 0;
                if (row < item.rows && (K_STEPS % BAND_WARPS == 0 || step < K_STEPS)) {
                    const bits16* from = (step < LATENT / 16 ? from_latent : from_rope) + k * 16;
                    q[k][group][0] = *reinterpret_cast<const unsigned*>(from);
                    q[k][group][1] = *reinterpret_cast<const unsigned*>(from + 8);
                }
            }
        }
    }
};

// What a warp does with two tiles: its share of S^T = K Q^T over the tile `keys`, summed over its
// columns of K, for all groups of the band, and O^T = O^T * rescale + V^T P^T over the tile `values`
// before it, for its columns of V. Fragments are asked for FRAGMENTS - 1 products ahead.
template <bool KEYS, bool VALUES>
__device__ __forceinline__ void multiply(const Queries& q, Accumulators& acc, const bits16* keys,
                                         const bits16* values, Place place, float* scores,
                                         const uint2* probabilities, const float2* rescale) {
    constexpr int BEGIN = KEYS ? 0 : K_OWN;
    constexpr int END = VALUES ? K_OWN + V_OWN : K_OWN;
    keys += place.lane % 16 * PITCH + place.lane / 16 * 8 + place.warp * K_OWN * 16;
    values += (place.lane % 8 + place.lane / 16 * 8) * PITCH + place.lane / 8 % 2 * 8 +
              place.warp * V_OWN * 16;
    const auto given = [&](int step) {  // whether the warp has that many columns
        return step < K_OWN
                   ? K_STEPS % BAND_WARPS == 0 || place.warp * K_OWN + step < K_STEPS
                   : V_BLOCKS % BAND_WARPS == 0 || place.warp * V_OWN + step - K_OWN < V_BLOCKS;
    };
    unsigned a[FRAGMENTS][4];
    const auto load = [&](int step) {
        if (step >= END || !given(step)) {
        } else if (step < K_OWN) {
            ptx::ldmatrix_x4(a[step % FRAGMENTS], keys + step * 16);
        } else {
            ptx::ldmatrix_x4_trans(a[step % FRAGMENTS], values + (step - K_OWN) * 16);
        }
    };
#pragma unroll
    for (int step = BEGIN; step < BEGIN + FRAGMENTS - 1; ++step) {
        load(step);
    }
    if (VALUES) {
        bool larger = false;
        float2 scale[GROUPS];
#pragma unroll
        for (int group = 0; group < GROUPS; ++group) {
            scale[group] = rescale[group * 4 + place.lane % 4];
            larger = larger || scale[group].x != 1.0f || scale[group].y != 1.0f;
        }
        if (__builtin_expect(larger, 0)) {
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
#pragma unroll
                for (int block = 0; block < V_OWN; ++block) {
                    acc.o[block][group][0] *= scale[group].x;
                    acc.o[block][group][1] *= scale[group].y;
                    acc.o[block][group][2] *= scale[group].x;
                    acc.o[block][group][3] *= scale[group].y;
                }
            }
        }
    }
    float s[GROUPS][4] = {};
    unsigned p[GROUPS][2];
#pragma unroll
    for (int step = BEGIN; step < END; ++step) {
        load(step + FRAGMENTS - 1);
        if (VALUES && step == K_OWN) {
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                const uint2 both = probabilities[group * 32 + place.lane];
                p[group][0] = both.x;
                p[group][1] = both.y;
            }
        }
        if (given(step)) {
            const unsigned (&fragment)[4] = a[step % FRAGMENTS];
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                if (step < K_OWN) {
                    WITH_ELEMENT(ptx::mma_m16n8k16_, ELEMENT)(s[group], fragment, q[step][group]);
                } else {
                    WITH_ELEMENT(ptx::mma_m16n8k16_, ELEMENT)
                    (acc.o[step - K_OWN][group], fragment, p[group]);
                }
            }
        }
        if (KEYS && step == K_OWN - 1) {
#pragma unroll
            for (int group = 0; group < GROUPS; ++group) {
                store128(scores + ((place.warp * GROUPS + group) * 32 + place.lane) * 4,
                         make_uint4(__float_as_uint(s[group][0]), __float_as_uint(s[group][1]),
                                    __float_as_uint(s[group][2]), __float_as_uint(s[group][3])));
            }
        }
    }
}

// The softmax of one group. A lane has two query rows, 2 (l % 4) + {0, 1}, and of each tile the KV
// rows l / 4 and l / 4 + 8: both sums are over those only. What is multiplied with V is rounded to
// 16 bits, so that is what the outputs are divided by: a key that has nearly all of the weight then
// gives its own values, whatever its probability was rounded to.
//
// Probabilities come out in units of the accumulators, which are codes where the pool has codes: `unit`
// says for the lane's two KV rows how many of them 1 is, `value` what one of them is.
struct Softmax {
    float max[2];  // log2 domain, the same in all lanes of a query row; -inf before the first score
    float sum[2];
    float rounded_sum[2];

    // Takes the largest scores of each lane. Where that of a query row has grown by enough, also from
    // -inf, it is the new maximum, and `factor` what has been accumulated is worth of what it was.
    __device__ __forceinline__ void raise(const float (&largest)[2], float (&factor)[2]) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float of_row = fmaxf(largest[i], __shfl_xor_sync(ALL, largest[i], 4));
            of_row = fmaxf(of_row, __shfl_xor_sync(ALL, of_row, 8));
            of_row = fmaxf(of_row, __shfl_xor_sync(ALL, of_row, 16));
            if (of_row > max[i] + RESCALE_ABOVE) {
                factor[i] = ptx::exp2_approx(max[i] - of_row);
                max[i] = of_row;
            }
        }
    }

    // Takes the scores of one tile, masked to -inf where unseen; gives the probabilities as an
    // operand and the factor for what has been accumulated before.
    __device__ __forceinline__ void step(float (&x)[4], float2 unit, float2 value,
                                         uint2& probabilities, float2& rescale) {
        float factor[2] = {1.0f, 1.0f};
        const float largest[2] = {fmaxf(x[0], x[2]), fmaxf(x[1], x[3])};  // of this lane
        const bool larger =
            largest[0] > max[0] + RESCALE_ABOVE || largest[1] > max[1] + RESCALE_ABOVE;
        if (__builtin_expect(__any_sync(ALL, larger), 0)) {
            raise(largest, factor);
        }
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            const float base = max[i] == minus_infinity() ? 0.0f : max[i];
            x[i] = ptx::exp2_approx(x[i] - base);
            x[i + 2] = ptx::exp2_approx(x[i + 2] - base);
            sum[i] = sum[i] * factor[i] + x[i] + x[i + 2];
        }
        const unsigned upper = element::pack(x[0] * unit.x, x[1] * unit.x);
        const unsigned lower = element::pack(x[2] * unit.y, x[3] * unit.y);
        rounded_sum[0] = rounded_sum[0] * factor[0] + element::first(upper) * value.x +
                         element::first(lower) * value.y;
        rounded_sum[1] = rounded_sum[1] * factor[1] + element::second(upper) * value.x +
                         element::second(lower) * value.y;
        rescale = make_float2(factor[0], factor[1]);
        probabilities.x = ptx::movmatrix_trans(upper);
        probabilities.y = ptx::movmatrix_trans(lower);
    }

    // Sums up over the lanes; gives the factors that normalise accumulators in units of `scale`, and
    // the base-2 log-sum-exps.
    __device__ __forceinline__ void finish(float scale, float2& inverse, float (&lse)[2]) {
        float factor[2];
#pragma unroll
        for (int i = 0; i < 2; ++i) {
#pragma unroll
            for (int distance = 4; distance < 32; distance *= 2) {
                sum[i] += __shfl_xor_sync(ALL, sum[i], distance);
                rounded_sum[i] += __shfl_xor_sync(ALL, rounded_sum[i], distance);
            }
            const bool sees = sum[i] != 0.0f;
            factor[i] = sees ? scale / rounded_sum[i] : 0.0f;
            lse[i] = sees ? max[i] + log2f(sum[i]) : minus_infinity();
        }
        inverse = make_float2(factor[0], factor[1]);
    }
};

// The scores of this lane, scaled: the sum over the warps that had a share of K's columns.
__device__ __forceinline__ void gather_scores(float (&x)[4], const float* all_scores, Place place,
                                              float scale) {
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[i] = 0.0f;
    }
#pragma unroll
    for (int warp = 0; warp < BAND_WARPS; ++warp) {
        const int from = (place.band * BAND_WARPS + warp) * GROUPS + place.warp;
        const uint4 part = load128(all_scores + (from * 32 + place.lane) * 4);
        x[0] += __uint_as_float(part.x);
        x[1] += __uint_as_float(part.y);
        x[2] += __uint_as_float(part.z);
        x[3] += __uint_as_float(part.w);
    }
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        x[i] *= scale;
    }
}

// Takes away the scores of this lane's KV positions, `position` and 8 behind it, that are past the
// item's end or not in the mask of the group's token.
__device__ __forceinline__ void hide(float (&x)[4], const Item& item, int position,
                                     const word64* mask) {
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        const int at = position + half * 8;
        const int node = at - item.prefix;
        bool seen = at < item.end;
        if (seen && node >= 0) {
            seen = mask[node / 64] >> (node % 64) & 1;
        }
        x[half * 2] = seen ? x[half * 2] : minus_infinity();
        x[half * 2 + 1] = seen ? x[half * 2 + 1] : minus_infinity();
    }
}

// Beside codes, the trees' own rows are not in units of the pool. Brings the scores of those among
// this lane's KV positions to it, and says what their probabilities have to be multiplied with.
__device__ __forceinline__ void to_units(float (&x)[4], const Item& item, int position, float scale,
                                         float2& unit, float2& value) {
    const float inverse = 1.0f / scale;
    if (position >= item.prefix) {
        x[0] *= inverse;
        x[1] *= inverse;
        unit.x = inverse;
        value.x = scale;
    }
    if (position + 8 >= item.prefix) {
        x[2] *= inverse;
        x[3] *= inverse;
        unit.y = inverse;
        value.y = scale;
    }
}

// The visibility words of each column group's token; clear where there is none.
__device__ __forceinline__ void load_masks(const Item& item, const word64* visible, int words,
                                           word64* masks, int thread) {
    if (thread < BANDS * GROUPS * MAX_WORDS) {
        const int row = item.row_tile * ROW_TILE + thread / MAX_WORDS * GROUP;
        const int word = thread % MAX_WORDS;
        const bool given = row < item.rows && word < words;
        masks[thread] = given ? visible[(item.first_token + row / HEADS) * words + word] : 0;
    }
}

// How an item is divided into tiles.
struct Tiles {
    int count;
    int whole;  // the first ones, of which all rows are there and of the prefix

    __device__ __forceinline__ explicit Tiles(const Item& item)
        : count((item.end - item.begin + TILE - 1) / TILE),
          whole((min(item.prefix, item.end) - item.begin) / TILE) {}
};

// Puts a warp's normalised outputs into shared memory as rows of the row tile.
__device__ __forceinline__ void stage_outputs(const Accumulators& acc, const float2* all_factors,
                                              Place place, bits16* rows) {
#pragma unroll
    for (int own = 0; own < GROUPS; ++own) {
        const int group = place.band * GROUPS + own;
        const float2 factor = all_factors[group * 4 + place.lane % 4];
        bits16* row = rows + (group * GROUP + place.lane / 4) * OUT_PITCH + place.lane % 4 * 2;
#pragma unroll
        for (int block = 0; block < V_OWN; ++block) {
            if (V_BLOCKS % BAND_WARPS == 0 || place.warp * V_OWN + block < V_BLOCKS) {
                const float (&o)[4] = acc.o[block][own];
                bits16* to = row + (place.warp * V_OWN + block) * 16;
                *reinterpret_cast<unsigned*>(to) =
                    ptx::movmatrix_trans(element::pack(o[0] * factor.x, o[1] * factor.y));
                *reinterpret_cast<unsigned*>(to + 8) =
                    ptx::movmatrix_trans(element::pack(o[2] * factor.x, o[3] * factor.y));
            }
        }
    }
}

}  // namespace

// Computes every item of the plan.
//
// Launch: num_ctas blocks, as many as the plan was made for; block c takes the items cta_work[c]
// names. Request, row tile, range, slot and count of an item are the plan's word and not judged
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
// @param work read int32 [max_work, 6]  request, row tile, begin, end, slot, splits
// @param cta_work           read    int32 [num_ctas, 4] align=16  first item, end, step, half
// @param partial_out        scratch ELEMENT [slots, 64, LATENT] align=16  normalised
// @param partial_lse        scratch fp32 [slots, 64]        base 2
// @param out write ELEMENT [tokens, HEADS, LATENT] stride=(out_stride, LATENT, 1) align=16
// @param out_stride         value   int64                   multiple of 8
// @param lse                write   fp32 [tokens, HEADS]    natural logarithm
// @block 256
// @early
// @shared STAGES * 16 * (LATENT + ROPE + 8) * 2 + 16384 + 2048 + 256 + 256 + 48
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
                    bits16* __restrict__ partial_out, float* __restrict__ partial_lse,
                    bits16* __restrict__ out, long long out_stride, float* __restrict__ lse) {
    DYNAMIC_SHARED(cursor);
    CARVE(cursor, bits16, ring, STAGES * TILE * PITCH);
    CARVE(cursor, float, all_scores, BANDS * BAND_WARPS * GROUPS * 32 * 4);
    CARVE(cursor, uint2, all_probabilities, BANDS * GROUPS * 32);
    CARVE(cursor, float2, all_factors, BANDS * GROUPS * 4);  // two query rows each
    CARVE(cursor, word64, masks, BANDS * GROUPS * MAX_WORDS);
    CARVE(cursor, Item, items, 1);
    Item& item = items[0];

    const Place place(static_cast<int>(threadIdx.x));
    float* scores = all_scores + place.band * BAND_WARPS * GROUPS * 32 * 4;
    const uint2* probabilities = all_probabilities + place.band * GROUPS * 32;
    const float2* factors = all_factors + place.band * GROUPS * 4;

    const KvRows source = {kv,       kv_stride,    num_slots,    kv_indices,
                           draft_kv, draft_stride, out_cache_loc};
    const QuerySource queries = {q_latent,      q_rope,      q_stride,
                                 q_head_stride, rope_stride, rope_head_stride};

    early::wait_for_dependency();
    early::launch_dependents();  // not before: they read the plan, too, which may just be made
    if (thread_anew() == 0) {
        item.next = cta_work[blockIdx.x * 4];
    }
    for (;;) {
        if (thread_anew() == 0) {
            plan::advance(item, work, cta_work + blockIdx.x * 4, kv_indptr, qo_indptr, HEADS);
        }
        __syncthreads();
        if (item.rows < 0) {
            break;
        }
        const bool active = (item.row_tile * BANDS + place.band) * BAND_ROWS < item.rows;

        kv_bits* const room = reinterpret_cast<kv_bits*>(ring + (CODES ? CODES_AT : 0));
        const auto arriving = [&](int tile) {  // where a tile comes
            return room + static_cast<unsigned>(tile) % STAGES * (TILE * KV_PITCH);
        };
        const Tiles tiles(item);
        KV_INDEX list;
        {
            const Place own(thread_anew());
            list = source.look_up(item, item.begin, own);
#pragma unroll 1
            for (int ahead = 0; ahead < AHEAD; ++ahead) {
                const KV_INDEX listed =
                    __shfl_sync(ALL, list, ahead * ROWS_A_WARP + own.lane / COPY_LANES);
                if (ahead < tiles.count) {
                    source.fetch(item, item.begin + ahead * TILE, ahead < tiles.whole, listed,
                                 arriving(ahead), own);
                }
                ptx::cp_async_commit();
            }
        }
        source.prefetch(item, thread_anew());
        load_masks(item, visible, words, masks, thread_anew());
        Queries q;
        if (active) {
            queries.load(q, item, Place(thread_anew()));
        }
        Accumulators acc = {};
        Softmax softmax = {{minus_infinity(), minus_infinity()}, {0.0f, 0.0f}, {0.0f, 0.0f}};

        ptx::cp_async_wait<AHEAD - 1>();
        if (CODES && tiles.count > 0) {
            source.widen(item, item.begin, room, ring, Place(thread_anew()));
        }
        __syncthreads();
        // In even steps a band multiplies with the next tile's K and the last one's V, in odd ones it
        // does the softmax in between. The second band is LAG steps behind.
        const auto in_ring = [&](int tile) {
            return ring + static_cast<unsigned>(tile) % TILES * (TILE * PITCH);
        };
        const int last = 2 * tiles.count + LAG;
        int step = -LAG * place.band;  // of this band
        for (int turn = 0;; ++turn, ++step) {
            const int tile = step >> 1;
            if ((step & 1) == 0) {
                const bits16* keys = in_ring(tile);
                const bits16* values = in_ring(tile - 1 + TILES);
                if (!active) {
                } else if (__builtin_expect(tile > 0 && tile < tiles.count, 1)) {
                    multiply<true, true>(q, acc, keys, values, place, scores, probabilities,
                                         factors);
                } else if (tile == 0 && tiles.count > 0) {
                    multiply<true, false>(q, acc, keys, values, place, scores, probabilities,
                                          factors);
                } else if (tile > 0 && tile == tiles.count) {
                    multiply<false, true>(q, acc, keys, values, place, scores, probabilities,
                                          factors);
                }
            } else if (step >= 0 && tile < tiles.count) {
                const Place own(thread_anew());
                // The tile before has been used up by all, but where the other band is behind, the
                // one before that: its place in the ring is free.
                const int coming = tile + AHEAD - (LAG - (turn - step));
                if (coming >= AHEAD) {
                    if (coming % LIST_TILES == 0) {
                        list = source.look_up(item, item.begin + coming * TILE, own);
                    }
                    const KV_INDEX listed = __shfl_sync(
                        ALL, list, coming % LIST_TILES * ROWS_A_WARP + own.lane / COPY_LANES);
                    if (coming < tiles.count) {
                        source.fetch(item, item.begin + coming * TILE, coming < tiles.whole, listed,
                                     arriving(coming), own);
                    }
                    ptx::cp_async_commit();
                }
                if (CODES) {
                    // Its own pieces only, which nobody else has to wait for.
                    ptx::cp_async_wait<AHEAD - 1>();
                    if (tile + 1 < tiles.count) {
                        source.widen(item, item.begin + (tile + 1) * TILE, arriving(tile + 1),
                                     in_ring(tile + 1), own);
                    }
                }
                if (active) {
                    float x[4];
                    float2 unit = make_float2(1.0f, 1.0f);
                    float2 value = make_float2(1.0f, 1.0f);
                    gather_scores(x, all_scores, own,
                                  (CODES ? sm_scale * kv_scale : sm_scale) * LOG2_E);
                    if (tile >= tiles.whole) {
                        const int position = item.begin + tile * TILE + own.lane / 4;
                        if (CODES && out_cache_loc == nullptr) {
                            to_units(x, item, position, kv_scale, unit, value);
                        }
                        hide(x, item, position, masks + own.group * MAX_WORDS);
                    }
                    uint2 p;
                    float2 rescale;
                    softmax.step(x, unit, value, p, rescale);
                    all_probabilities[own.group * 32 + own.lane] = p;
                    if (own.lane < 4) {
                        all_factors[own.group * 4 + own.lane] = rescale;
                    }
                }
            }
            if (turn == last) {
                break;
            }
            if (!CODES && turn % 2 != 0) {  // the first band goes on to another tile
                ptx::cp_async_wait<AHEAD - 1 - LAG>();
            }
            __syncthreads();
        }
        __syncthreads();  // the factors and the ring have been read

        if (active) {
            const Place own(thread_anew());
            float2 inverse;
            float log_sums[2];
            softmax.finish(CODES ? kv_scale : 1.0f, inverse, log_sums);
            if (own.lane < 4) {
                all_factors[own.group * 4 + own.lane] = inverse;
#pragma unroll
                for (int i = 0; i < 2; ++i) {
                    const int row = own.group * GROUP + own.lane * 2 + i;
                    const int flat = item.row_tile * ROW_TILE + row;
                    if (flat < item.rows && item.slot < 0) {
                        lse[item.first_token * HEADS + flat] = log_sums[i] * LN_2;
                    } else if (flat < item.rows) {
                        partial_lse[item.slot * static_cast<long long>(ROW_TILE) + row] =
                            log_sums[i];
                    }
                }
            }
        }
        __syncthreads();
        if (active) {
            stage_outputs(acc, all_factors, Place(thread_anew()), ring);
        }
        __syncthreads();
        const int first = item.row_tile * ROW_TILE;
        const int pieces = min(ROW_TILE, item.rows - first) * OUT_PIECES;
        const long long first_token = item.first_token;
        bits16* const partial =
            item.slot < 0 ? nullptr : partial_out + item.slot * (ROW_TILE * LATENT * 1ll);
#pragma unroll 4
        for (int piece = thread_anew(); piece < pieces; piece += THREADS) {
            const int row = piece / OUT_PIECES;
            const int column = piece % OUT_PIECES * PIECE;
            const int flat = first + row;
            bits16* to = partial != nullptr ? partial + row * LATENT + column
                                            : out + (first_token + flat / HEADS) * out_stride +
                                                  flat % HEADS * LATENT + column;
            store128(to, load128(ring + row * OUT_PITCH + column));
        }
        __syncthreads();  // the ring is filled anew
    }
}

namespace {}  // namespace

// Merges the pieces of the row tiles that were cut and writes their rows of `out` and `lse`.
//
// Launch: any number of blocks of COMBINE_THREADS threads; the grid need not know the plan. 32 pieces
// of 8 columns are a unit; see merge.cuh.
//
// @kernel verify_combine
// @param partial_out    read   ELEMENT [slots, 64, LATENT] align=16  normalised
// @param partial_lse    read   fp32 [slots, 64]      base 2
// @param combine_indptr read   int32 [tiles + 1]     bounds of each cut row tile's slots
// @param combine_tiles  read   int32 [tiles, 2]      request, row tile; -1 behind the last
// @param tiles          value  int32                 most row tiles that can be cut
// @param qo_indptr      read   QO_INDEX [*]          bounds of each request's tree
// @param out            update ELEMENT [tokens, HEADS, LATENT] stride=(out_stride, LATENT, 1) align=16
// @param out_stride     value  int64                 multiple of 8
// @param lse            update fp32 [tokens, HEADS]  natural logarithm
// @block COMBINE_THREADS
// @early
extern "C" __global__ void __launch_bounds__(COMBINE_THREADS)
    verify_combine(const bits16* __restrict__ partial_out, const float* __restrict__ partial_lse,
                   const int* __restrict__ combine_indptr, const int* __restrict__ combine_tiles,
                   int tiles, const QO_INDEX* __restrict__ qo_indptr, bits16* __restrict__ out,
                   long long out_stride, float* __restrict__ lse) {
    constexpr int WARPS = COMBINE_THREADS / 32;
    constexpr int UNITS = ROW_TILE * OUT_PIECES / 32;
    SHARED_ARRAY(float, means, [WARPS][combine::PIECE + 2][32]);
    merge::Turns<UNITS, COMBINE_THREADS, COMBINE_LEAST, QO_INDEX> turns(
        combine_indptr, combine_tiles, tiles, qo_indptr);
    merge::Turn turn;
    early::wait_for_dependency();
    while (turns.next(turn)) {
        combine::units<WARPS, COMBINE_UNROLL, UNITS, ROW_TILE>(
            turns, turn, HEADS, partial_out, partial_lse, ROW_TILE, means,
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
