// The lists of a verify step in SGLang's forms, made on the device once a step, not once a layer:
// for attention back ends that want them, and for masks that come from elsewhere.
//
//   verify_bounds  kv_indptr, qo_indptr and mask_indptr from the lengths
//   verify_slots   kv_indices: the slots of each prefix, and of its drafts where asked for
//   verify_words   visibility words from SGLang's tree mask in any of its modes
//
// Every request has n drafts, its root among them, and seq_lens[b] tokens in front of them. Padded
// requests are like others: one token in front, row 0 of the table, slot 0, any mask.
//
// status is [0] LISTED or what is wrong, [1] the request, [2] low and [3] high word of the value at
// fault; reported is the first request with its lowest code. Then all prefixes and drafts are
// empty, bounds of keys and masks are 0, and what follows reads and writes nothing.
//
// No host reads, no allocation; every buffer is the caller's.

#include "early.cuh"
#include "scan.cuh"
#include "shared.cuh"

// the types of seq_lens, req_pool_indices, kv_indptr, qo_indptr and kv_indices: int or long long
#ifndef SEQ_INDEX
#define SEQ_INDEX int
#endif
#ifndef POOL_INDEX
#define POOL_INDEX int
#endif
#ifndef KV_BOUND
#define KV_BOUND int
#endif
#ifndef QO_INDEX
#define QO_INDEX int
#endif
#ifndef KV_INDEX
#define KV_INDEX int
#endif
#ifndef BOUNDS_THREADS
#define BOUNDS_THREADS 256
#endif
#ifndef SLOTS_THREADS
#define SLOTS_THREADS 256
#endif
#ifndef WORDS_THREADS
#define WORDS_THREADS 128
#endif

namespace {

constexpr unsigned ALL_LANES = 0xffffffffu;
constexpr int LANES = 32;

static_assert(BOUNDS_THREADS % 32 == 0 && BOUNDS_THREADS <= 1024, "whole warps, one block");
static_assert(WORDS_THREADS % 32 == 0 && WORDS_THREADS <= 1024, "whole warps, one block");

constexpr int LISTED = 0;
constexpr int BAD_LENGTH = 1;      // seq_lens[b] is negative, or no int32
constexpr int BAD_POOL_ROW = 2;    // req_pool_indices[b] is no row of req_to_token
constexpr int BAD_POOL_WIDTH = 3;  // seq_lens[b], with the drafts that are read, passes its row
constexpr int BAD_CAPACITY = 4;    // the slots up to this request do not fit kv_indices
constexpr int CODES = 8;

// of a request: sums of any number of them, and products with n, fit 64 bits
constexpr long long MAX_LENGTH = 0x7fffffff;

constexpr int NO_DRAFTS = 0;     // in the list of slots
constexpr int GIVEN_DRAFTS = 1;  // out_cache_loc
constexpr int TABLE_DRAFTS = 2;  // behind the prefix in req_to_token

constexpr int FULL = 0;
constexpr int BIT_PACKED = 2;

}  // namespace

// Bounds of everything.
//
// Launch: one block, whatever the batch.
//
// @kernel verify_bounds
// @param seq_lens          read  SEQ_INDEX [batch]     tokens in front of the drafts
// @param req_pool_indices? read  POOL_INDEX [batch]    rows of req_to_token; None: no list of slots
// @param batch             value int32                 requests, padded ones included
// @param n                 value int32                 drafts of a request
// @param drafts            value int32                 in the list: 0 none, 1 given, 2 of the table
// @param pool_rows         value int64                 rows of req_to_token
// @param pool_width        value int64                 tokens of such a row
// @param kv_capacity       value int64                 length of kv_indices
// @param kv_indptr         write KV_BOUND [batch + 1]  bounds of each request's slots
// @param qo_indptr         write QO_INDEX [batch + 1]  b n
// @param mask_indptr       write int64 [batch + 1]     bounds of each part of a full mask
// @param status            write int32 [4]             code, request, value's low and high word
// @block BOUNDS_THREADS
extern "C" __global__ void __launch_bounds__(BOUNDS_THREADS)
    verify_bounds(const SEQ_INDEX* __restrict__ seq_lens,
                  const POOL_INDEX* __restrict__ req_pool_indices, int batch, int n, int drafts,
                  long long pool_rows, long long pool_width, long long kv_capacity,
                  KV_BOUND* kv_indptr, QO_INDEX* qo_indptr, long long* mask_indptr, int* status) {
    SHARED_ARRAY(long long, scratch, [block::MAX_WARPS]);
    SHARED_ARRAY(unsigned, fault, [1]);
    early::launch_dependents();
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) {
        fault[0] = 0xffffffffu;
    }
    __syncthreads();
    long long before = 0;
    for (int first = 0; first < batch; first += BOUNDS_THREADS) {
        const int b = first + thread;
        long long length = 0;
        if (b < batch) {
            length = static_cast<long long>(seq_lens[b]);
            int code = LISTED;
            if (length < 0 || length > MAX_LENGTH) {
                code = BAD_LENGTH;
            } else if (req_pool_indices != nullptr) {
                const long long row = static_cast<long long>(req_pool_indices[b]);
                const long long last = length + (drafts == TABLE_DRAFTS ? n : 0);
                code = row < 0 || row >= pool_rows ? BAD_POOL_ROW
                       : last > pool_width         ? BAD_POOL_WIDTH
                                                   : LISTED;
            }
            if (code != LISTED) {
                length = 0;
                atomicMin(&fault[0], static_cast<unsigned>(b * CODES + code));
            }
        }
        long long sum;
        const long long end = before + block::inclusive_sum(length, scratch, sum);
        before += sum;
        if (b < batch) {
            const long long nodes = static_cast<long long>(b + 1) * n;
            const long long slots = end + (drafts == NO_DRAFTS ? 0 : nodes);
            if (slots > kv_capacity) {
                atomicMin(&fault[0], static_cast<unsigned>(b * CODES + BAD_CAPACITY));
            }
            kv_indptr[b + 1] = static_cast<KV_BOUND>(min(slots, kv_capacity));
            qo_indptr[b + 1] = static_cast<QO_INDEX>(nodes);
            mask_indptr[b + 1] = n * (end + nodes);
        }
    }
    __syncthreads();
    const bool listed = fault[0] == 0xffffffffu;
    if (!listed) {
        for (int b = thread; b < batch; b += BOUNDS_THREADS) {
            kv_indptr[b + 1] = 0;
            mask_indptr[b + 1] = 0;
        }
    }
    if (thread == 0) {
        const int code = listed ? LISTED : static_cast<int>(fault[0] % CODES);
        const int b = listed ? -1 : static_cast<int>(fault[0] / CODES);
        const long long value = listed                 ? 0
                                : code == BAD_POOL_ROW ? static_cast<long long>(req_pool_indices[b])
                                                       : static_cast<long long>(seq_lens[b]);
        kv_indptr[0] = 0;
        qo_indptr[0] = 0;
        mask_indptr[0] = 0;
        status[0] = code;
        status[1] = b;
        status[2] = static_cast<int>(value & 0xffffffffll);
        status[3] = static_cast<int>(value >> 32);
    }
}

// The slots of all requests, one behind the other: of the prefix, and then of the drafts. What
// stands behind kv_indptr[batch] is left alone.
//
// Launch: any number of blocks, after verify_bounds on the same stream; the grid need not know the
// lengths.
//
// @kernel verify_slots
// @early
// @param kv_indptr        read   KV_BOUND [batch + 1]  of verify_bounds
// @param req_pool_indices read   POOL_INDEX [batch]    rows of req_to_token
// @param req_to_token     read   int32 [*, *] stride=(row_stride, 1)  slots by request and position
// @param out_cache_loc?   read   int64 [batch * n]     slots of the drafts; None: not GIVEN_DRAFTS
// @param row_stride       value  int64                 elements from row to row
// @param batch            value  int32                 requests
// @param n                value  int32                 drafts of a request
// @param kv_indices       update KV_INDEX [*]          slots of all requests
// @block SLOTS_THREADS
extern "C" __global__ void __launch_bounds__(SLOTS_THREADS)
    verify_slots(const KV_BOUND* kv_indptr, const POOL_INDEX* __restrict__ req_pool_indices,
                 const int* __restrict__ req_to_token, const long long* __restrict__ out_cache_loc,
                 long long row_stride, int batch, int n, KV_INDEX* __restrict__ kv_indices) {
    constexpr int EACH = 8;
    constexpr int CHUNK = EACH * SLOTS_THREADS;  // consecutive positions of a block
    early::wait_for_dependency();
    const long long total = static_cast<long long>(kv_indptr[batch]);
#pragma unroll 1
    for (long long chunk = blockIdx.x; chunk * CHUNK < total; chunk += gridDim.x) {
        const long long first = chunk * CHUNK + threadIdx.x;
        // the last request that begins at or in front of `first`
        int b = 0;
        int beyond = batch;
        while (beyond - b > 1) {
            const int middle = (b + beyond) / 2;
            (static_cast<long long>(kv_indptr[middle]) <= first ? b : beyond) = middle;
        }
        // all loads of a thread are under way before the first is waited for
        KV_INDEX slots[EACH];
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const long long at = first + i * SLOTS_THREADS;
            if (at >= total) {
                break;
            }
#pragma unroll 1
            while (at >= static_cast<long long>(kv_indptr[b + 1])) {
                ++b;
            }
            const long long position = at - static_cast<long long>(kv_indptr[b]);
            const long long draft = position - (static_cast<long long>(kv_indptr[b + 1]) -
                                                static_cast<long long>(kv_indptr[b]) - n);
            const int* row =
                req_to_token + static_cast<long long>(req_pool_indices[b]) * row_stride;
            slots[i] =
                static_cast<KV_INDEX>(out_cache_loc != nullptr && draft >= 0
                                          ? out_cache_loc[static_cast<long long>(b) * n + draft]
                                          : row[position]);
        }
#pragma unroll
        for (int i = 0; i < EACH; ++i) {
            const long long at = first + i * SLOTS_THREADS;
            if (at < total) {
                kv_indices[at] = slots[i];
            }
        }
    }
}

// Visibility words from SGLang's tree mask. Columns of the prefix are not read. A part that passes
// the end of the mask, or has no place in it because of its length, is not read: its nodes see
// themselves.
//
// Launch: any number of blocks; a warp takes a row at a time.
//
// @kernel verify_words
// @param mask       read  uint8 [mask_bytes]         the parts of all requests, as in mask_indptr
// @param seq_lens   read  SEQ_INDEX [batch]          tokens in front of the drafts
// @param mask_indptr? read int64 [batch + 1]         of verify_bounds; only a full mask needs it
// @param mask_bytes value int64                      length of the mask
// @param mode       value int32                      0 full, 1 query-only, 2 bit-packed
// @param batch      value int32                      requests
// @param n          value int32                      drafts of a request
// @param words      value int32                      visibility words of a row
// @param visible    write uint64 [batch * n, words]  bit k of word w: node 64 w + k is seen
// @block WORDS_THREADS
extern "C" __global__ void __launch_bounds__(WORDS_THREADS, 1)
    verify_words(const unsigned char* __restrict__ mask, const SEQ_INDEX* __restrict__ seq_lens,
                 const long long* __restrict__ mask_indptr, long long mask_bytes, int mode,
                 int batch, int n, int words, unsigned long long* visible) {
    constexpr int WARPS = WORDS_THREADS / LANES;
    const int lane = static_cast<int>(threadIdx.x) % LANES;
    const int warp = static_cast<int>(threadIdx.x) / LANES;
    const long long rows = static_cast<long long>(batch) * n;
    for (long long row = static_cast<long long>(blockIdx.x) * WARPS + warp; row < rows;
         row += static_cast<long long>(gridDim.x) * WARPS) {
        const int b = static_cast<int>(row / n);
        const int node = static_cast<int>(row % n);
        const long long given = mode == FULL ? static_cast<long long>(seq_lens[b]) : 0;
        const bool counts = given >= 0 && given <= MAX_LENGTH;
        const long long length = counts ? given : 0;
        const int columns = mode == BIT_PACKED ? (n > 16 ? 4 : n > 8 ? 2 : 1) : n;
        long long first = mode == FULL ? mask_indptr[b] : static_cast<long long>(b) * n * columns;
        const long long size = n * (length + columns);
        const bool inside = counts && first >= 0 && first <= mask_bytes - size &&
                            (mode != FULL || mask_indptr[b + 1] == first + size);
        first = inside ? first + node * (length + columns) + length : 0;
        for (int w = 0; w < words; ++w) {
            unsigned halves[2];
#pragma unroll
            for (int half = 0; half < 2; ++half) {
                const int column = 64 * w + 32 * half + lane;
                bool seen = column == node;
                if (inside && column < n) {
                    seen = mode == BIT_PACKED ? (mask[first + column / 8] >> column % 8 & 1) != 0
                                              : mask[first + column] != 0;
                }
                halves[half] = __ballot_sync(ALL_LANES, seen);
            }
            if (lane == 0) {
                visible[row * words + w] =
                    static_cast<unsigned long long>(halves[1]) << 32 | halves[0];
            }
        }
    }
}
