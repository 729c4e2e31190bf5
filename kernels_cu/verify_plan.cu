// The plan of a verify step, made on the device from lengths that live there: once a step, not once
// a layer. Its outputs are static buffers, so that a replayed graph follows other lengths.
//
// One block cuts the attention of all requests into pieces of equal cost, one list of them for each
// block that will run verify_partials, and says which partials belong together. The others gather the
// slots of all prefixes from `req_to_token`, where nobody else has: they wait for nothing, since every
// block reads and judges all requests by itself.
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
// teams. The blocks that are left over are one more for long shares, the last: each takes up to
// ceil(width / their number) row tiles of each of its ranges, one after the other.
//
// Cuts. The bundles stand one behind the other, in the order of requests and row tiles, on an axis
// of cost: START_ROWS for starting, and one for each KV row. It begins at the first bundle's first row,
// since every team starts once, and a lone request's pieces go to the first teams. The axis is cut
// every Q, and team k takes what lies in [k Q, (k+1) Q):
//   Q = max(ceil(whole axis / M), ceil(ROOT_HALVES x isqrt(longest) / 2), LEAST_ROWS), rounded up
//       to a multiple of 16, or of GRAIN where it is at most 8 GRAIN, with `longest` the largest prefix and tree together
// Where blocks are left over, of which each takes `each` row tiles of a range, the last team takes
// Q / each - START_ROWS, so that Q = ceil((whole axis + START_ROWS) x each / (M x each + 1)) suffices,
// if that is less than before, more than 8 GRAIN, no less than the other two bounds and 2 x each x
// START_ROWS, and if bundles are cut without them, too: where none is, a merge costs more than they give.
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
//                   row tile j of each of its team's bundles; the fourth word is 0. The step of blocks
//                   that were left over is their number. With halves, the blocks 2 c and 2 c + 1 take
//                   them, and the fourth word is 1 for the first half of the columns, 2 for the second
//   combine_tiles   the row tiles of more than one piece, in order, and what a merge needs to know of
//                   their requests: the first token and the number of tokens; combine_indptr bounds
//                   their partial slots, which are numbered from 0 without gaps, row tile by row tile
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
// Text is short here on purpose: the kernel runs once a step, and most of what it takes is reading
// itself from memory. So quotients come by way of float64, loops are not unrolled where they are not
// long, and what two passes have in common stands once.
//
// No host reads, no allocation; every buffer is the caller's.

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

namespace {

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int LANES = 32;
constexpr int WARPS = PLAN_THREADS / LANES;
constexpr unsigned NO_FAULT = 0xffffffffu;

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

// One request as it is planned: 16 bytes in shared memory.
struct Request {
    int tokens, prefix;
    long long start;  // of its first bundle on the axis

    __device__ int row_tiles() const { return (tokens * HEADS + ROW_TILE - 1) / ROW_TILE; }
    __device__ long long rows() const { return static_cast<long long>(prefix) + tokens; }
    __device__ long long cost() const { return START_ROWS + rows(); }  // of a bundle
};

// Of any two bounds, modulo 2^64: they may be garbage.
__device__ unsigned long long difference(long long a, long long b) {
    return static_cast<unsigned long long>(a) - static_cast<unsigned long long>(b);
}

// The floor of a quotient that is below 2^16, by way of float32, where it is off by one at most.
__device__ int quotient(long long value, long long divisor) {
    const int near =
        static_cast<int>(__fdividef(static_cast<float>(value), static_cast<float>(divisor)));
    const long long rest = value - near * divisor;
    return near + (rest >= divisor ? 1 : 0) - (rest < 0 ? 1 : 0);
}

// The same of any quotient of numbers up to 2^52, by way of float64.
__device__ long long long_quotient(long long value, int divisor) {
    const long long near =
        static_cast<long long>(static_cast<double>(value) * (1.0 / static_cast<double>(divisor)));
    const long long rest = value - near * divisor;
    return near + (rest >= divisor ? 1 : 0) - (rest < 0 ? 1 : 0);
}

__device__ unsigned integer_root(unsigned value) {                            // below 2^31
    unsigned root = static_cast<unsigned>(sqrtf(static_cast<float>(value)));  // off by one at most
    root -= root * root > value ? 1 : 0;
    root += (root + 1) * (root + 1) <= value ? 1 : 0;
    return root;
}

// A bundle on the axis and the cuts that it keeps.
struct Bundle {
    long long first_row;  // where its first KV row lies
    int first_cut;        // kept cuts are first_cut, ..., last_cut; none where last_cut < first_cut
    int last_cut;
    int team;  // of the first piece
    int prefix;

    __device__ Bundle(const Request& request, int number, long long quota)
        : first_row(request.start + number * request.cost() + START_ROWS), prefix(request.prefix) {
        // LEAST_ROWS rows in front; behind the cut LEAST_ROWS rows, of which one is the prefix's
        const long long highest = min(request.prefix - 1ll, request.rows() - LEAST_ROWS);
        first_cut = quotient(first_row + LEAST_ROWS + quota - 1, quota);
        last_cut = first_cut - 1;
        if (highest >= 0) {
            const long long last = highest / TILE * TILE + TILE - 1;  // rounds down to `highest`
            last_cut = max(last_cut, quotient(first_row + last, quota));
        }
        team = min(first_cut - 1, quotient(first_row + request.rows() - 1, quota));
    }

    __device__ int cuts() const { return last_cut - first_cut + 1; }
    __device__ bool is_cut_at(int cut) const { return first_cut <= cut && cut <= last_cut; }
    // The KV row of a cut that is kept; the end of the prefix behind the last one.
    __device__ int row(int cut, long long quota) const {
        return cut > last_cut ? prefix : static_cast<int>((cut * quota - first_row) / TILE * TILE);
    }
};

// The index of the last of `count` + 1 ascending starts that is not above `at`, below `count`.
template <class At>
__device__ int find(int count, long long at, const At& start) {
    int low = 0;
    int high = count;
#pragma unroll 1
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        (start(middle) <= at ? low : high) = middle;
    }
    return low;
}

// Of all requests.
struct Totals {
    unsigned fault;  // request x CODES + code of the first one; all ones where there is none
    int fewest;      // row tiles of a request that has some
    int most;
    int longest;  // rows of a prefix and its tree
};

// What requests add up to.
struct Sums {
    long long cost;  // of all row tiles
    int row_tiles;
    unsigned listed;  // rows of the prefixes; all ones where they are more than that

    __device__ static Sums of(const Request& request) {
        return {request.row_tiles() * request.cost(), request.row_tiles(),
                static_cast<unsigned>(request.prefix)};
    }
    __device__ void add(const Sums& other) {
        cost += other.cost;
        row_tiles += other.row_tiles;
        listed = min(listed, ~other.listed) + other.listed;
    }
    __device__ Sums shuffled(int lane) const {
        return {__shfl_sync(ALL_LANES, cost, lane), __shfl_sync(ALL_LANES, row_tiles, lane),
                __shfl_sync(ALL_LANES, listed, lane)};
    }
    // Over this lane and all before it in its warp, of which the first `count` have something.
    __device__ void accumulate(int count) {
        const int lane = static_cast<int>(threadIdx.x) % LANES;
#pragma unroll 1
        for (int distance = 1; distance < count; distance *= 2) {
            const Sums before = shuffled(max(lane - distance, 0));
            if (lane >= distance) {
                add(before);
            }
        }
    }
};

// Row tiles that divide those of all requests, in one warp.
__device__ int common_divisor(const Request* requests, int batch) {
    const auto greatest = [](int a, int b) {
#pragma unroll 1
        while (b != 0) {
            const int rest = a % b;
            a = b;
            b = rest;
        }
        return a;
    };
    int divisor = 0;
#pragma unroll 1
    for (int b = static_cast<int>(threadIdx.x) % LANES; b < batch; b += LANES) {
        divisor = greatest(divisor, requests[b].row_tiles());
    }
#pragma unroll 1
    for (int distance = LANES / 2; distance > 0; distance /= 2) {
        divisor = greatest(divisor, __shfl_xor_sync(ALL_LANES, divisor, distance));
    }
    return divisor;
}

// The width of a team where all row tiles are multiples of `divisor`, in one warp.
__device__ int width_of(int divisor, int num_ctas) {
#pragma unroll 1
    for (int top = min(divisor, num_ctas); top > 0; top -= LANES) {
        const int width = top - static_cast<int>(threadIdx.x) % LANES;
        const bool fits =
            width > 0 && divisor % max(width, 1) == 0 && num_ctas % max(width, 1) * 8 <= num_ctas;
        const unsigned fitting = __ballot_sync(ALL_LANES, fits);
        if (fitting != 0) {
            return top + 1 - __ffs(static_cast<int>(fitting));
        }
    }
    return 1;
}

}  // namespace

// Plans a step.
//
// Launch: one block that plans, and with `req_to_token` any number of further ones that gather: the
// grid need not know the lengths. kv_indices[kv_indptr[b] + p] is token p of row req_pool_indices[b].
// What stands there behind kv_indptr[batch] is left alone, and so is what a row holds behind its
// prefix.
//
// @kernel verify_plan
// @param seq_lens          read  SEQ_INDEX [batch]     rows of each prefix, without the tree
// @param qo_indptr         read  QO_INDEX [batch + 1]  bounds of each request's tree tokens
// @param req_pool_indices? read  POOL_INDEX [batch]    rows of req_to_token; None: no list is made
// @param req_to_token?     read  int32 [*, *] stride=(row_stride, 1)  slots by request and position
// @param row_stride        value int64                 elements from row to row
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
// @param combine_tiles write int32 [num_ctas, 4]  request, row tile, first token, tokens; then -1
// @param kv_indptr?        write int32 [batch + 1]     bounds of each prefix in kv_indices
// @param kv_indices?       update KV_INDEX [*]         slots of all prefixes
// @param status            write int32 [4]             code, request, value's low and high word
// @block PLAN_THREADS
// @shared 32 * batch + 12 * (num_ctas + 1) + 128
extern "C" __global__ void __launch_bounds__(PLAN_THREADS, 1)
    verify_plan(const SEQ_INDEX* __restrict__ seq_lens, const QO_INDEX* __restrict__ qo_indptr,
                const POOL_INDEX* __restrict__ req_pool_indices,
                const int* __restrict__ req_to_token, long long row_stride, int batch,
                int max_tokens, int max_tree, int num_ctas, int max_work, long long pool_rows,
                long long pool_width, long long kv_capacity, int* work, int* cta_work,
                int* combine_indptr, int* combine_tiles, int* kv_indptr,
                KV_INDEX* __restrict__ kv_indices, int* status) {
    DYNAMIC_SHARED(cursor);
    CARVE(cursor, Request, requests, batch + 1);
    CARVE(cursor, long long, places, batch);      // of each prefix in req_to_token, less its bound
    CARVE(cursor, int, ordinals, batch);          // bundles before each request
    CARVE(cursor, int, bounds, batch + 1);        // of the prefixes
    CARVE(cursor, unsigned, kept, num_ctas + 1);  // before each cut: kept ones, their bundles << 16
    CARVE(cursor, int, cut_bundles, num_ctas);    // the bundle of a cut that is kept, else -1
    CARVE(cursor, int, firsts, num_ctas + 1);     // bundles that begin before each team's pieces
    SHARED_ARRAY(Sums, sums, [WARPS]);
    SHARED_ARRAY(unsigned, scratch, [block::MAX_WARPS]);
    SHARED_ARRAY(Totals, all_totals, [1]);
    Totals& totals = all_totals[0];
    const int thread = static_cast<int>(threadIdx.x);
    const int lane = thread % LANES;
    const int warp = thread / LANES;

    if (thread == 0) {
        totals = {NO_FAULT, MAX_ROW_TILES + 1, 0, 0};
        bounds[0] = 0;
    }

    // Read and judge.
    Sums all = {0, 0, 0};
    unsigned fault = NO_FAULT;
    int fewest = MAX_ROW_TILES + 1;
    int most = 0;
    int longest = 0;
#pragma unroll 1
    for (int first = 0; first < batch; first += PLAN_THREADS) {
        const int b = first + thread;
        Request request = {0, 0, 0};
        long long row = 0;
        if (b < batch) {
            const long long length = static_cast<long long>(seq_lens[b]);
            const long long begin = static_cast<long long>(qo_indptr[b]);
            const long long end = static_cast<long long>(qo_indptr[b + 1]);
            const bool listed = req_pool_indices != nullptr;
            row = listed ? static_cast<long long>(req_pool_indices[b]) : 0;
            const unsigned long long tree = difference(end, begin);
            const unsigned long long most_of_tree = static_cast<unsigned>(max_tree);
            const bool bad_tokens = (b == 0 && begin != 0) || end > max_tokens;
            const int code = length < 0 || length > MAX_ROWS           ? BAD_LENGTH
                             : end < begin || tree > most_of_tree      ? BAD_TREE
                             : bad_tokens                              ? BAD_TOKENS
                             : listed && (row < 0 || row >= pool_rows) ? BAD_POOL_ROW
                             : listed && length > pool_width           ? BAD_POOL_WIDTH
                                                                       : PLANNED;
            if (code == PLANNED) {
                request = {static_cast<int>(end - begin), static_cast<int>(length), 0};
            } else {
                fault = min(fault, static_cast<unsigned>(b * CODES + code));
                row = 0;
            }
        }
        Sums own = Sums::of(request);
        const int count = min(batch - first, PLAN_THREADS);
        const int last = min(count, LANES) - 1;  // lane, of a warp that has requests
        own.accumulate(last + 1);
        if (lane == last) {
            sums[warp] = own;
        }
        __syncthreads();
        const int warps = (count + LANES - 1) / LANES;
        Sums of_warps = sums[min(lane, warps - 1)];
        of_warps.accumulate(warps);
        Sums before = of_warps.shuffled(max(warp - 1, 0));
        if (warp == 0) {
            before = {0, 0, 0};
        }
        before.add(all);
        own.add(before);
        all.add(of_warps.shuffled(warps - 1));
        if (b < batch) {
            if (request.prefix > 0 && own.listed > kv_capacity) {
                fault = min(fault, static_cast<unsigned>(b * CODES + BAD_CAPACITY));
            }
            const int row_tiles = request.row_tiles();
            fewest = row_tiles > 0 ? min(fewest, row_tiles) : fewest;
            most = max(most, row_tiles);
            longest = max(longest, static_cast<int>(request.rows()));
            request.start = own.cost - row_tiles * request.cost();
            requests[b] = request;
            ordinals[b] = own.row_tiles - row_tiles;  // of row tiles, not yet of bundles
            bounds[b + 1] = static_cast<int>(min(static_cast<long long>(own.listed), kv_capacity));
            places[b] = row * row_stride - (own.listed - request.prefix);
        }
        __syncthreads();
    }
    fault = __reduce_min_sync(ALL_LANES, fault);
    fewest = __reduce_min_sync(ALL_LANES, fewest);
    most = __reduce_max_sync(ALL_LANES, most);
    longest = __reduce_max_sync(ALL_LANES, longest);
    if (lane == 0) {
        atomicMin(&totals.fault, fault);
        atomicMin(&totals.fewest, fewest);
        atomicMax(&totals.most, most);
        atomicMax(&totals.longest, longest);
    }
    __syncthreads();
    const bool planned = totals.fault == NO_FAULT;

    if (blockIdx.x > 0) {  // Gather.
        constexpr int EACH = 8;
        constexpr unsigned CHUNK = EACH * PLAN_THREADS;  // consecutive positions of a block
        const unsigned total = planned ? static_cast<unsigned>(bounds[batch]) : 0;
#pragma unroll 1
        for (unsigned chunk = (blockIdx.x - 1) * CHUNK; chunk < total;
             chunk += (gridDim.x - 1) * CHUNK) {
            int b = find(batch, chunk + threadIdx.x, [&](int i) { return bounds[i]; });
            // all loads of a thread are under way before the first is waited for
            int slots[EACH];
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const unsigned at = chunk + i * PLAN_THREADS + threadIdx.x;
                if (at < total) {
#pragma unroll 1
                    while (at >= static_cast<unsigned>(bounds[b + 1])) {
                        ++b;
                    }
                    slots[i] = req_to_token[places[b] + at];
                }
            }
#pragma unroll
            for (int i = 0; i < EACH; ++i) {
                const unsigned at = chunk + i * PLAN_THREADS + threadIdx.x;
                if (at < total) {
                    kv_indices[at] = static_cast<KV_INDEX>(slots[i]);
                }
            }
        }
        return;
    }

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
                value = static_cast<long long>(difference(qo_indptr[b + 1], qo_indptr[b]));
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
    }
    if (kv_indptr != nullptr) {
#pragma unroll 1
        for (int b = thread; b <= batch; b += PLAN_THREADS) {
            kv_indptr[b] = planned ? bounds[b] : 0;
        }
    }

    // Teams: how wide, how many, and how much is for each.
    const int divisor = !planned                       ? 0
                        : totals.fewest == totals.most ? totals.most
                                                       : common_divisor(requests, batch);
    const int width = width_of(divisor, num_ctas);
    const int bundles = planned ? all.row_tiles / width : 0;
    const double of_width = 1.0 / width;  // of numbers that are multiples of it
    const auto narrowed = [&](long long cost) {
        return static_cast<long long>(rint(static_cast<double>(cost) * of_width));
    };
    const long long axis = max(planned ? narrowed(all.cost) - START_ROWS : 0, 0ll);
#pragma unroll 1
    for (int b = thread; b < batch; b += PLAN_THREADS) {
        requests[b].start = narrowed(requests[b].start) - START_ROWS;
        ordinals[b] /= width;
    }
    const int all_teams = num_ctas / width;
    const long long root =
        (ROOT_HALVES * integer_root(static_cast<unsigned>(planned ? totals.longest : 0)) + 1) / 2;
    int blocks = HALVES_ROWS > 0 && all_teams >= 2 ? 2 : 1;  // that take the same entries
    int teams;
    long long share;
#pragma unroll 1
    for (;; --blocks) {
        teams = all_teams / blocks;
        share = long_quotient(axis + teams - 1, teams);
        share = max(max(share, root), static_cast<long long>(LEAST_ROWS));
        share = share > 8 * GRAIN ? (share + TILE - 1) / TILE * TILE
                                  : (static_cast<int>(share) + GRAIN - 1) / GRAIN * GRAIN;
        if (blocks == 1 || share <= HALVES_ROWS) {
            break;
        }
    }
    const int spare = blocks == 1 ? num_ctas - all_teams * width : 0;
    __syncthreads();
    const auto bundle_at = [&](long long at) {  // in front of the axis's end
        const int b = find(batch, at, [&](int i) { return requests[i].start; });
        return make_int2(b, quotient(at - requests[b].start, requests[b].cost()));
    };
    if (spare > 0) {
        bool any = false;
#pragma unroll 1
        for (int cut = thread; cut < teams && cut * share < axis; cut += PLAN_THREADS) {
            const int2 found = bundle_at(cut * share);
            any |= Bundle(requests[found.x], found.y, share).is_cut_at(cut);
        }
        const int each = (width + spare - 1) / spare;
        const int parts = all_teams * each + 1;
        long long less = long_quotient((axis + START_ROWS) * each + parts - 1, parts);
        less = (less + TILE - 1) / TILE * TILE;
        const bool fits =
            less < share && less > 8 * GRAIN &&
            less >= max(max(root, static_cast<long long>(LEAST_ROWS)), 2ll * each * START_ROWS);
        if (__syncthreads_or(any) && fits) {
            share = less;
            teams = all_teams + 1;
        }
    }

    // The cuts that are kept.
    unsigned counted = 0;
#pragma unroll 1
    for (int first = 0; first < teams; first += PLAN_THREADS) {
        const int cut = first + thread;
        const long long at = cut * share;
        unsigned here = 0;
        if (cut < teams) {
            int bundle = -1;
            int beginning = bundles;
            if (at < axis) {
                const int2 found = bundle_at(at);
                const Bundle own(requests[found.x], found.y, share);
                // earlier bundles end in front of this team's share, later ones begin in it
                beginning = ordinals[found.x] + found.y + (own.team < cut ? 1 : 0);
                if (own.is_cut_at(cut)) {
                    bundle = ordinals[found.x] + found.y;
                    here = cut == own.first_cut ? 1u << 16 | 1u : 1u;
                }
            }
            cut_bundles[cut] = bundle;
            firsts[cut] = beginning;
        }
        unsigned sum;
        const unsigned end = counted + block::inclusive_sum(here, scratch, sum);
        counted += sum;
        if (cut < teams) {
            kept[cut] = end - here;
        }
    }
    if (thread == 0) {
        kept[teams] = counted;
        firsts[teams] = bundles;
    }
    __syncthreads();

    // Write the pieces, one row tile a thread: those that begin their bundles, and those of the cuts.
#pragma unroll 1
    for (int i = thread; i < (bundles + teams) * width; i += PLAN_THREADS) {
        const int item = i / width;
        const int side = i - item * width;
        const bool is_first = item < bundles;
        const int ordinal = is_first ? item : cut_bundles[item - bundles];
        if (ordinal < 0) {
            continue;
        }
        const int b = find(batch, ordinal, [&](int at) { return ordinals[at]; });
        const int number = ordinal - ordinals[b];
        const Bundle bundle(requests[b], number, share);
        const int cut = is_first ? bundle.first_cut - 1 : item - bundles;
        const int cuts = bundle.cuts();
        const unsigned earlier = kept[min(bundle.first_cut, teams)];
        const int ahead = static_cast<int>(earlier & 0xffffu);  // kept cuts of earlier bundles
        const int cut_ahead = static_cast<int>(earlier >> 16);  // those of them that are cut
        const int within = cut - bundle.first_cut + 1;
        const int slots = width * (ahead + cut_ahead) + side * (cuts + 1);
        const int row_tile = number * width + side;
        int* to = work + (static_cast<long long>(ordinal + ahead + within) * width + side) * 6;
        to[0] = b;
        to[1] = row_tile;
        to[2] = is_first ? 0 : bundle.row(cut, share);
        to[3] = bundle.row(cut + 1, share);
        to[4] = cuts == 0 ? -1 : slots + within;
        to[5] = cuts + 1;
        if (is_first && cuts > 0) {
            const int tile = width * cut_ahead + side;
            int* cut_tile = combine_tiles + 4 * tile;
            cut_tile[0] = b;
            cut_tile[1] = row_tile;
            cut_tile[2] = static_cast<int>(qo_indptr[b]);
            cut_tile[3] = requests[b].tokens;
            combine_indptr[tile] = slots;
        }
    }

    // Each team's entries: pieces of the cuts before it, and those that begin bundles.
    const auto pieces_before = [&](int team) {
        return static_cast<int>(kept[team] & 0xffffu) + firsts[team];
    };
#pragma unroll 1
    for (int cta = thread; cta < num_ctas; cta += PLAN_THREADS) {
        const int place = cta / blocks;  // among the teams' row tiles
        const int team = place / width;
        const int side = place - team * width;
        int* to = cta_work + cta * 4;
        to[0] = team < teams ? pieces_before(team) * width + side : 0;
        to[1] = team < teams ? pieces_before(team + 1) * width : 0;
        to[2] = width;
        if (team < teams && team == all_teams) {
            to[0] = min(to[0], to[1]);
            to[2] = spare;
        }
        to[3] = team < teams && blocks == 2 ? cta % 2 + 1 : 0;
    }
    const int kept_cuts = static_cast<int>(counted & 0xffffu);
    const int cut_tiles = width * static_cast<int>(counted >> 16);
#pragma unroll 1
    for (int i = (bundles + kept_cuts) * width * 6 + thread; i < max_work * 6; i += PLAN_THREADS) {
        work[i] = -1;
    }
#pragma unroll 1
    for (int tile = cut_tiles + thread; tile <= num_ctas; tile += PLAN_THREADS) {
        combine_indptr[tile] = width * kept_cuts + cut_tiles;
        if (tile < num_ctas) {
#pragma unroll
            for (int word = 0; word < 4; ++word) {
                combine_tiles[4 * tile + word] = -1;
            }
        }
    }
}
