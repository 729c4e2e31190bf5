// The plan of a verify step, made on the device from lengths that live there: once a step, not once
// a layer. Its outputs are static buffers, so that a replayed graph follows other lengths.
//
//   verify_plan     cuts the attention of all requests into pieces of equal cost, one list of them
//                   for each block that will run verify_partials, and says which partials belong
//                   together.
//   verify_kv_list  gathers the slots of all prefixes from `req_to_token` (where nobody else has).
//
// The work. Request b has T = qo_indptr[b+1] - qo_indptr[b] tree tokens (0 to max_tree) and a
// prefix of seq_lens[b] KV rows. Its T x HEADS query rows are R_b = ceil(T x HEADS / 64) row tiles,
// each of which meets all prefix rows and then the T rows of the tree, which stay with the prefix's
// end.
//
// Teams. The blocks that run side by side on the row tiles of one request read the same KV rows at
// the same time, so that DRAM gives each row once: `width` blocks make a team, and a team takes
// `width` row tiles of a request (a bundle) over the same range. `width` is the largest number that
// divides all R_b and leaves at most one block in 8 without a team; there are M = num_ctas / width
// teams.
//
// Cuts. The bundles stand one behind the other, in the order of requests and row tiles, on an axis
// of cost: START_ROWS for starting, and one for each KV row. The axis is cut every Q, and team k
// takes what lies in [k Q, (k+1) Q):
//   Q = max(ceil(whole axis / M), ceil(ROOT_HALVES x isqrt(longest) / 2), LEAST_ROWS), rounded up
//       to a multiple of 16, or of GRAIN where it is at most 8 GRAIN, with `longest` the largest prefix and tree together
// The second bound keeps one short request from being cut into crumbs: merging them would cost
// more. A cut at c inside a bundle falls on KV row floor((c - START_ROWS) / 16) x 16. It is dropped
// unless it leaves LEAST_ROWS rows on both sides, and a part of the prefix behind it. A piece
// belongs to the team of its own cut; the first piece of a bundle to the last team before the first
// cut that has LEAST_ROWS rows in front, kept or not, and no later than that of the bundle's end.
//
// Halves. Where half of the teams suffice for Q to be at most HALVES_ROWS, there are only so many
// teams, of twice the blocks: two blocks take the same entries, one for each half of V's columns. It
// shortens steps that are too short to be cut for all blocks.
//
// Outputs
//   work            entries of one piece side by side, one for each row tile of its bundle; pieces
//                   in the order of the axis; what is not used is -1
//   cta_work        block c = k x width + j takes the entries first, first + step, ... below end:
//                   row tile j of each of its team's bundles; the fourth word is 0. With halves, the
//                   blocks 2 c and 2 c + 1 take them, and the fourth word is 1 for the first half of
//                   the columns, 2 for the second
//   combine_tiles   the row tiles of more than one piece, in order; combine_indptr bounds their
//                   partial slots, which are numbered from 0 without gaps, row tile by row tile
//   status          [0] PLANNED or what is wrong, [1] the request, [2] low and [3] high word of the
//                   value at fault
// Every output is written completely by every launch, by whole numbers only: the same inputs always
// give the same bytes. Where something is wrong with a request the whole plan is empty (no work, no
// cut row tiles, empty prefixes), so that what follows writes nothing; reported is the first such
// request with its lowest code.
//
// Bounds: at most max_row_tiles + num_ctas - 1 entries of work, with max_row_tiles the sum of all
// R_b, fewer than num_ctas row tiles that are cut, and fewer than 2 num_ctas partial slots.
//
// Both kernels: no host reads, no allocation; every buffer is the caller's.

#include "scan.cuh"
#include "shared.cuh"

// query heads of this rank
#ifndef HEADS
#define HEADS 8
#endif
// the types of seq_lens, qo_indptr, req_pool_indices and kv_indices: int or long long
#ifndef SEQ_INDEX
#define SEQ_INDEX int
#endif
#ifndef QO_INDEX
#define QO_INDEX int
#endif
#ifndef POOL_INDEX
#define POOL_INDEX int
#endif
#ifndef KV_INDEX
#define KV_INDEX int
#endif
// what starting a row tile costs, in KV rows
#ifndef START_ROWS
#define START_ROWS 48
#endif
// the shortest piece that is worth a cut, a multiple of 16
#ifndef LEAST_ROWS
#define LEAST_ROWS 32
#endif
// KV rows that attention multiplies at once, a multiple of 16: short shares are multiples of it
#ifndef GRAIN
#define GRAIN 16
#endif
// halves in the factor of the square root; 0: no such bound
#ifndef ROOT_HALVES
#define ROOT_HALVES 3
#endif
// the longest range for which two blocks divide the columns of V; 0: they never do
#ifndef HALVES_ROWS
#define HALVES_ROWS 0
#endif
#ifndef PLAN_THREADS
#define PLAN_THREADS 256
#endif
#ifndef LIST_THREADS
#define LIST_THREADS 256
#endif

namespace {

constexpr int ROW_TILE = 64;
constexpr int TILE = 16;
constexpr int MAX_TREE = 256;
constexpr long long MAX_ROWS = 0x7fffffff - MAX_TREE;                        // of one prefix
constexpr int MAX_ROW_TILES = (MAX_TREE * HEADS + ROW_TILE - 1) / ROW_TILE;  // of one request

static_assert(PLAN_THREADS % 32 == 0 && PLAN_THREADS <= 1024, "whole warps, one block");
static_assert(LEAST_ROWS % TILE == 0 && LEAST_ROWS >= TILE, "cuts are multiples of a tile");
static_assert(GRAIN % TILE == 0 && GRAIN >= TILE, "a team's share is whole tiles");
static_assert(START_ROWS >= 0 && ROOT_HALVES >= 0 && HALVES_ROWS >= 0, "costs are not negative");

constexpr int PLANNED = 0;
constexpr int BAD_LENGTH = 1;      // seq_lens[b] is negative or too large
constexpr int BAD_TREE = 2;        // the request's tree tokens are negative or more than max_tree
constexpr int BAD_TOKENS = 3;      // qo_indptr begins elsewhere than at 0, or ends past max_tokens
constexpr int BAD_POOL_ROW = 4;    // req_pool_indices[b] is no row of req_to_token
constexpr int BAD_POOL_WIDTH = 5;  // seq_lens[b] is longer than a row of req_to_token
constexpr int BAD_CAPACITY = 6;    // the prefixes do not fit kv_indices
constexpr int CODES = 8;

struct Entry {
    int request, row_tile, begin, end, slot, splits;
};

// One request as it is planned: 16 bytes in shared memory.
struct Request {
    int tokens, prefix;
    long long start;  // of its first bundle on the axis

    __device__ int row_tiles() const { return (tokens * HEADS + ROW_TILE - 1) / ROW_TILE; }
    __device__ long long rows() const { return static_cast<long long>(prefix) + tokens; }
    __device__ long long cost() const { return START_ROWS + rows(); }  // of a bundle
};

__device__ long long round_up(long long value, long long unit) {
    return (value + unit - 1) / unit * unit;
}

__device__ int greatest_common_divisor(int a, int b) {
    while (b != 0) {
        const int rest = a % b;
        a = b;
        b = rest;
    }
    return a;
}

__device__ long long integer_root(long long value) {
    long long root = static_cast<long long>(sqrtf(static_cast<float>(value)));
    while (root * root > value) {
        --root;
    }
    while ((root + 1) * (root + 1) <= value) {
        ++root;
    }
    return root;
}

// A bundle on the axis and the cuts that it keeps.
struct Bundle {
    long long start;
    long long quota;
    int first_cut;  // kept cuts are first_cut, ..., last_cut; none where last_cut < first_cut
    int last_cut;
    int team;  // of the first piece
    int prefix;

    __device__ Bundle(const Request& request, long long at, long long between)
        : start(at), quota(between), prefix(request.prefix) {
        // LEAST_ROWS rows in front; behind the cut LEAST_ROWS rows, of which one is the prefix's
        const long long highest = min(request.prefix - 1ll, request.rows() - LEAST_ROWS);
        first_cut = static_cast<int>(round_up(start + START_ROWS + LEAST_ROWS, quota) / quota);
        last_cut = first_cut - 1;
        if (highest >= 0) {
            const long long last = highest / TILE * TILE + TILE - 1;  // rounds down to `highest`
            last_cut = max(last_cut, static_cast<int>((start + START_ROWS + last) / quota));
        }
        const int last_team = static_cast<int>((start + request.cost() - 1) / quota);
        team = min(first_cut - 1, last_team);
    }

    __device__ int cuts() const { return last_cut - first_cut + 1; }
    // The KV row of a cut that is kept; the end of the prefix behind the last one.
    __device__ int row(int cut) const {
        return cut > last_cut ? prefix
                              : static_cast<int>((cut * quota - start - START_ROWS) / TILE * TILE);
    }
};

// The index of the last of `count` + 1 ascending starts that is not above `at`, below `count`.
template <class At>
__device__ int find(int count, long long at, const At& start) {
    int low = 0;
    int high = count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (start(middle) <= at ? low : high) = middle;
    }
    return low;
}

// What the threads share while they plan.
struct Totals {
    unsigned fault;  // request x CODES + code of the first one; all ones where there is none
    int divisor;     // of all R_b
    int longest;     // prefix + tree
    int width;
};

}  // namespace

// Plans a step.
//
// Launch: one block of PLAN_THREADS threads, whatever the batch.
//
// @kernel verify_plan
// @param seq_lens          read  SEQ_INDEX [batch]     rows of each prefix, without the tree
// @param qo_indptr         read  QO_INDEX [batch + 1]  bounds of each request's tree tokens
// @param req_pool_indices? read  POOL_INDEX [batch]    rows of req_to_token; None: no list is made
// @param batch             value int32                 requests, padded ones included
// @param max_tokens        value int32                 most tree tokens of all requests
// @param max_tree          value int32                 most tree tokens of one request, up to 256
// @param num_ctas          value int32                 blocks that will run verify_partials
// @param max_work          value int32                 entries of `work`
// @param pool_rows         value int64                 rows of req_to_token
// @param pool_width        value int64                 tokens of such a row
// @param kv_capacity       value int64                 length of kv_indices
// @param work              write int32 [max_work, 6]   request, row tile, begin, end, slot, splits
// @param cta_work          write int32 [num_ctas, 4]   first entry, end, step, half
// @param combine_indptr    write int32 [num_ctas + 1]  bounds of each cut row tile's slots
// @param combine_tiles     write int32 [num_ctas, 2]   request, row tile; -1 behind the last
// @param kv_indptr?        write int32 [batch + 1]     bounds of each prefix in kv_indices
// @param status            write int32 [4]             code, request, value's low and high word
// @block PLAN_THREADS
// @shared 16 * (batch + 1) + 4 * (batch + 1) + 12 * (num_ctas + 1) + 64
extern "C" __global__ void __launch_bounds__(PLAN_THREADS)
    verify_plan(const SEQ_INDEX* __restrict__ seq_lens, const QO_INDEX* __restrict__ qo_indptr,
                const POOL_INDEX* __restrict__ req_pool_indices, int batch, int max_tokens,
                int max_tree, int num_ctas, int max_work, long long pool_rows, long long pool_width,
                long long kv_capacity, int* work, int* cta_work, int* combine_indptr,
                int* combine_tiles, int* kv_indptr, int* status) {
    DYNAMIC_SHARED(cursor);
    CARVE(cursor, Request, requests, batch + 1);
    CARVE(cursor, int, ordinals, batch + 1);      // bundles before each request
    CARVE(cursor, int, kept_cuts, num_ctas + 1);  // before each cut
    CARVE(cursor, int, cut_bundles,
          num_ctas + 1);                       // bundles whose first kept cut is before each cut
    CARVE(cursor, int, pieces, num_ctas + 1);  // of each team, then before each team
    SHARED_ARRAY(long long, scratch, [block::MAX_WARPS]);
    SHARED_ARRAY(Totals, all_totals, [1]);
    Totals& totals = all_totals[0];
    const int thread = static_cast<int>(threadIdx.x);

    if (thread == 0) {
        totals = {0xffffffffu, 0, 0, 1};
    }
    for (int team = thread; team <= num_ctas; team += PLAN_THREADS) {
        pieces[team] = 0;
    }
    __syncthreads();

    // Read and judge.
    long long kv_total = 0;
    for (int first = 0; first < batch; first += PLAN_THREADS) {
        const int b = first + thread;
        long long length = 0;
        if (b < batch) {
            length = static_cast<long long>(seq_lens[b]);
            const long long begin = static_cast<long long>(qo_indptr[b]);
            const long long end = static_cast<long long>(qo_indptr[b + 1]);
            int code = PLANNED;
            if (length < 0 || length > MAX_ROWS) {
                code = BAD_LENGTH;
            } else if (end < begin || end - begin > max_tree) {
                code = BAD_TREE;
            } else if ((b == 0 && begin != 0) || end > max_tokens) {
                code = BAD_TOKENS;
            } else if (req_pool_indices != nullptr) {
                const long long row = static_cast<long long>(req_pool_indices[b]);
                code = row < 0 || row >= pool_rows ? BAD_POOL_ROW
                       : length > pool_width       ? BAD_POOL_WIDTH
                                                   : PLANNED;
            }
            if (code != PLANNED) {
                length = 0;
                atomicMin(&totals.fault, static_cast<unsigned>(b * CODES + code));
            }
            const int tokens = code == PLANNED ? static_cast<int>(end - begin) : 0;
            requests[b] = {tokens, static_cast<int>(length), 0};
        }
        long long sum;
        const long long kv_end = kv_total + block::inclusive_sum(length, scratch, sum);
        if (b < batch && length > 0 && kv_end > kv_capacity) {
            atomicMin(&totals.fault, static_cast<unsigned>(b * CODES + BAD_CAPACITY));
        }
        if (b < batch && kv_indptr != nullptr) {
            kv_indptr[b + 1] = static_cast<int>(min(kv_end, kv_capacity));
        }
        kv_total += sum;
    }
    __syncthreads();
    const bool planned = totals.fault == 0xffffffffu;
    if (thread == 0) {
        long long value = 0;
        const int code = planned ? PLANNED : static_cast<int>(totals.fault % CODES);
        const int b = planned ? -1 : static_cast<int>(totals.fault / CODES);
        switch (code) {
            case BAD_LENGTH:
            case BAD_POOL_WIDTH:
            case BAD_CAPACITY:
                value = static_cast<long long>(seq_lens[b]);
                break;
            case BAD_TREE:
                value =
                    static_cast<long long>(qo_indptr[b + 1]) - static_cast<long long>(qo_indptr[b]);
                break;
            case BAD_TOKENS:
                value = static_cast<long long>(qo_indptr[b == 0 && qo_indptr[0] != 0 ? 0 : b + 1]);
                break;
            case BAD_POOL_ROW:
                value = static_cast<long long>(req_pool_indices[b]);
                break;
            default:
                break;
        }
        status[0] = code;
        status[1] = b;
        status[2] = static_cast<int>(value & 0xffffffffll);
        status[3] = static_cast<int>(value >> 32);
        if (kv_indptr != nullptr) {
            kv_indptr[0] = 0;
        }
    }
    if (!planned) {
        for (int b = thread; b < batch; b += PLAN_THREADS) {
            requests[b] = {0, 0, 0};
            if (kv_indptr != nullptr) {
                kv_indptr[b + 1] = 0;
            }
        }
    }

    // The width of a team.
    int divisor = 0;
    int longest = 0;
    for (int b = thread; b < batch; b += PLAN_THREADS) {
        divisor = greatest_common_divisor(divisor, requests[b].row_tiles());
        longest = max(longest, static_cast<int>(requests[b].rows()));
    }
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) {
        divisor = greatest_common_divisor(divisor, __shfl_xor_sync(0xffffffffu, divisor, distance));
        longest = max(longest, __shfl_xor_sync(0xffffffffu, longest, distance));
    }
    if (thread % 32 == 0) {
        scratch[thread / 32] = static_cast<long long>(divisor) << 32 | longest;
    }
    __syncthreads();
    if (thread == 0) {
        for (int warp = 0; warp < PLAN_THREADS / 32; ++warp) {
            totals.divisor =
                greatest_common_divisor(totals.divisor, static_cast<int>(scratch[warp] >> 32));
            totals.longest = max(totals.longest, static_cast<int>(scratch[warp] & 0x7fffffff));
        }
    }
    __syncthreads();
    for (int candidate = thread + 1; candidate <= min(num_ctas, MAX_ROW_TILES);
         candidate += PLAN_THREADS) {
        if (totals.divisor % candidate == 0 && num_ctas % candidate * 8 <= num_ctas) {
            atomicMax(&totals.width, candidate);
        }
    }
    __syncthreads();
    const int width = totals.divisor == 0 ? 1 : totals.width;
    // Where the bundles of each request start, on the axis and in number.
    long long axis = 0;
    long long bundles = 0;
    for (int first = 0; first < batch; first += PLAN_THREADS) {
        const int b = first + thread;
        const int own = b < batch ? requests[b].row_tiles() / width : 0;
        const long long cost = b < batch ? own * requests[b].cost() : 0;
        long long sum;
        const long long cost_end = axis + block::inclusive_sum(cost, scratch, sum);
        axis += sum;
        const long long bundle_end =
            bundles + block::inclusive_sum(static_cast<long long>(own), scratch, sum);
        bundles += sum;
        if (b < batch) {
            requests[b].start = cost_end - cost;
            ordinals[b] = static_cast<int>(bundle_end) - own;
        }
    }
    if (thread == 0) {
        requests[batch] = {0, 0, axis};
        ordinals[batch] = static_cast<int>(bundles);
    }
    const long long root = (ROOT_HALVES * integer_root(totals.longest) + 1) / 2;
    const auto quota_of = [&](int count) {
        const long long share = (axis + count - 1) / count;
        const long long least = max(max(share, root), static_cast<long long>(LEAST_ROWS));
        return round_up(least, least <= 8 * GRAIN ? GRAIN : TILE);
    };
    const int all_teams = num_ctas / width;
    const bool halves = all_teams >= 2 && quota_of(all_teams / 2) <= HALVES_ROWS;
    const int blocks = halves ? 2 : 1;  // that take the same entries
    const int teams = all_teams / blocks;
    const long long quota = quota_of(teams);
    __syncthreads();

    // The bundle in which a point of the axis lies.
    const auto bundle_at = [&](long long at, int& b, int& number) {
        b = find(batch, at, [&](int i) { return requests[i].start; });
        number = static_cast<int>((at - requests[b].start) / requests[b].cost());
        return Bundle(requests[b], requests[b].start + number * requests[b].cost(), quota);
    };

    // Count the cuts that are kept: kept_cuts[k] and cut_bundles[k] are those before cut k.
    long long counted = 0;  // both in one word: kept cuts below, bundles above
    for (int first = 0; first < teams; first += PLAN_THREADS) {
        const int cut = first + thread;
        long long here = 0;
        if (cut < teams && cut * quota < axis) {
            int b, number;
            const Bundle bundle = bundle_at(cut * quota, b, number);
            const bool kept = bundle.first_cut <= cut && cut <= bundle.last_cut;
            here = kept ? 1 + (static_cast<long long>(cut == bundle.first_cut) << 32) : 0;
        }
        long long sum;
        const long long before = counted + block::inclusive_sum(here, scratch, sum) - here;
        counted += sum;
        if (cut < teams) {
            kept_cuts[cut] = static_cast<int>(before & 0xffffffffll);
            cut_bundles[cut] = static_cast<int>(before >> 32);
        }
    }
    if (thread == 0) {
        kept_cuts[teams] = static_cast<int>(counted & 0xffffffffll);
        cut_bundles[teams] = static_cast<int>(counted >> 32);
    }
    __syncthreads();

    // Write the piece that starts at a cut, or where `cut` is below the bundle's first one, the
    // bundle's first piece.
    const auto write_piece = [&](int b, int number, int cut, const Bundle& bundle) {
        const bool is_first = cut < bundle.first_cut;
        const int cuts = bundle.cuts();
        const int ahead = kept_cuts[min(bundle.first_cut, teams)];  // kept cuts of earlier bundles
        const int cut_ahead = cut_bundles[min(bundle.first_cut, teams)];
        const int within = is_first ? 0 : cut - bundle.first_cut + 1;
        const int piece = ordinals[b] + number + ahead + within;
        const int begin = is_first ? 0 : bundle.row(cut);
        const int end = bundle.row(is_first ? bundle.first_cut : cut + 1);
        atomicAdd(&pieces[is_first ? bundle.team : cut], 1);
        for (int lane = 0; lane < width; ++lane) {
            const int slots = width * (ahead + cut_ahead) + lane * (cuts + 1);
            const int row_tile = number * width + lane;
            int* to = work + (static_cast<long long>(piece) * width + lane) * 6;
            to[0] = b;
            to[1] = row_tile;
            to[2] = begin;
            to[3] = end;
            to[4] = cuts == 0 ? -1 : slots + within;
            to[5] = cuts + 1;
            if (is_first && cuts > 0) {
                const int tile = width * cut_ahead + lane;
                combine_tiles[2 * tile] = b;
                combine_tiles[2 * tile + 1] = row_tile;
                combine_indptr[tile] = slots;
            }
        }
    };
    for (int i = thread; i < static_cast<int>(bundles); i += PLAN_THREADS) {
        const int b = find(batch, i, [&](int at) { return ordinals[at]; });
        const int number = i - ordinals[b];
        const Bundle bundle(requests[b], requests[b].start + number * requests[b].cost(), quota);
        write_piece(b, number, bundle.first_cut - 1, bundle);
    }
    for (int cut = thread; cut < teams && cut * quota < axis; cut += PLAN_THREADS) {
        int b, number;
        const Bundle bundle = bundle_at(cut * quota, b, number);
        if (bundle.first_cut <= cut && cut <= bundle.last_cut) {
            write_piece(b, number, cut, bundle);
        }
    }
    __syncthreads();

    // Each team's entries.
    const int total_pieces = static_cast<int>(bundles) + kept_cuts[teams];
    long long before = 0;
    for (int first = 0; first < teams; first += PLAN_THREADS) {
        const int team = first + thread;
        const long long own = team < teams ? pieces[team] : 0;
        long long sum;
        const long long end = before + block::inclusive_sum(own, scratch, sum);
        before += sum;
        if (team < teams) {
            for (int lane = 0; lane < width; ++lane) {
                for (int half = 0; half < blocks; ++half) {
                    int* to = cta_work + ((team * width + lane) * blocks + half) * 4;
                    to[0] = static_cast<int>(end - own) * width + lane;
                    to[1] = static_cast<int>(end) * width;
                    to[2] = width;
                    to[3] = halves ? half + 1 : 0;
                }
            }
        }
    }
    for (int cta = teams * width * blocks + thread; cta < num_ctas; cta += PLAN_THREADS) {
        int* to = cta_work + cta * 4;
        to[0] = to[1] = to[3] = 0;
        to[2] = width;
    }
    for (int i = total_pieces * width * 6 + thread; i < max_work * 6; i += PLAN_THREADS) {
        work[i] = -1;
    }
    const int cut_tiles = width * cut_bundles[teams];
    for (int tile = cut_tiles + thread; tile <= num_ctas; tile += PLAN_THREADS) {
        combine_indptr[tile] = width * (kept_cuts[teams] + cut_bundles[teams]);
        if (tile < num_ctas) {
            combine_tiles[2 * tile] = combine_tiles[2 * tile + 1] = -1;
        }
    }
}

// Gathers the slots of all prefixes, one behind the other: kv_indices[kv_indptr[b] + p] is token p
// of row req_pool_indices[b] of req_to_token. What stands there behind kv_indptr[batch] is left
// alone, and so is what a row holds behind its prefix.
//
// Launch: any number of blocks of LIST_THREADS threads, after verify_plan on the same stream; the
// grid need not know the lengths.
//
// @kernel verify_kv_list
// @param kv_indptr        read   int32 [batch + 1]   of verify_plan
// @param req_pool_indices read   POOL_INDEX [batch]  rows of req_to_token
// @param req_to_token     read   int32 [*, *] stride=(row_stride, 1)  slots by request and position
// @param row_stride       value  int64               elements from row to row
// @param batch            value  int32               requests
// @param kv_indices       update KV_INDEX [*]        slots of all prefixes
// @block LIST_THREADS
extern "C" __global__ void __launch_bounds__(LIST_THREADS)
    verify_kv_list(const int* __restrict__ kv_indptr,
                   const POOL_INDEX* __restrict__ req_pool_indices,
                   const int* __restrict__ req_to_token, long long row_stride, int batch,
                   KV_INDEX* __restrict__ kv_indices) {
    constexpr int CHUNK = 8 * LIST_THREADS;  // consecutive positions of a block
    const int total = kv_indptr[batch];
    for (long long chunk = blockIdx.x; chunk * CHUNK < total; chunk += gridDim.x) {
        long long at = chunk * CHUNK + threadIdx.x;
        const long long end = min((chunk + 1) * CHUNK, static_cast<long long>(total));
        int b = find(batch, at, [&](int i) { return kv_indptr[i]; });
        for (; at < end; at += LIST_THREADS) {
            while (at >= kv_indptr[b + 1]) {
                ++b;
            }
            const int* row =
                req_to_token + static_cast<long long>(req_pool_indices[b]) * row_stride;
            kv_indices[at] = row[at - kv_indptr[b]];
        }
    }
}
