// Compacts a pool between two decode steps, planned on the device: live rows move from the highest
// slots into the lowest holes, and the tables that hold them follow.
//
// A step launches `defrag_mark`, `defrag_compact`, the kernels of `relocate` with the list that
// `defrag_compact` made, `defrag_index` and `defrag_rewrite`, on one stream.
//
// Live are the first held_lens[b] slots of row req_pool_indices[b] of the table, for every request b
// whose row is not 0, and the first held_count[0] entries of `held`, which holds what no request's
// row does: the values of tree nodes without a request. A slot may stand in several places; slot 0
// is never live. With L live slots, exactly the live slots above L move, the highest into the lowest
// hole and so on, `budget` of them at most: sources and destinations are disjoint, and calls with a
// budget reach the same end as one without.
//
// status int32 [4], written completely by every launch of `defrag_compact`:
//   [0] 0 planned; 1 a slot out of [0, num_slots), or a length that does not fit: nothing is listed
//   [1] the first request at fault, `batch` for `held`; -1 where there is none
//   [2] rows listed
//   [3] live slots
//
// All kernels: no host reads, no allocation; every buffer is the caller's.

#include "early.cuh"
#include "scan.cuh"
#include "shared.cuh"

// the types of held_lens and req_pool_indices: int or long long
#ifndef SEQ_INDEX
#define SEQ_INDEX int
#endif
#ifndef POOL_INDEX
#define POOL_INDEX int
#endif
// threads of the one block that plans
#ifndef COMPACT_THREADS
#define COMPACT_THREADS 1024
#endif
// threads of the other blocks
#ifndef HOLD_THREADS
#define HOLD_THREADS 256
#endif

namespace {

static_assert(COMPACT_THREADS % 32 == 0 && COMPACT_THREADS <= 1024, "whole warps, one block");

// Everybody who holds slots. Entry `batch` is the list, the others are rows of the table.
struct Held {
    int* table;
    long long row_stride;
    long long rows;
    long long width;
    const POOL_INDEX* pool_rows;
    const SEQ_INDEX* lens;
    int batch;
    long long* list;
    const int* list_count;
    int list_capacity;

    __device__ long long length(int entry) const {
        if (entry == batch) {
            return list == nullptr ? 0 : list_count[0];
        }
        return pool_rows[entry] == 0 ? 0 : static_cast<long long>(lens[entry]);
    }
    __device__ bool fits(int entry) const {
        const long long most = entry == batch ? list_capacity : width;
        const bool in_table = entry == batch || (pool_rows[entry] >= 0 && pool_rows[entry] < rows);
        return in_table && length(entry) >= 0 && length(entry) <= most;
    }
    __device__ int* row(int entry) const { return table + pool_rows[entry] * row_stride; }
    __device__ long long slot(int entry, long long token) const {
        return entry == batch ? list[token] : row(entry)[token];
    }
};

}  // namespace

// Marks all live slots, one bit each.
//
// Launch: any number of blocks of HOLD_THREADS threads. `live` and `fault` are zero before;
// `defrag_compact` leaves them zero again.
//
// @kernel defrag_mark
// @param req_to_token     read   int32      [*, *] stride=(row_stride, 1)
// @param row_stride       value  int64
// @param pool_rows        value  int64                   rows of the table
// @param pool_width       value  int64                   and slots of one
// @param req_pool_indices read   POOL_INDEX [batch]      row of each request; 0: none
// @param held_lens        read   SEQ_INDEX  [batch]      slots that it holds, windows included
// @param batch            value  int32
// @param held?            read   int64      [held_capacity]   further live slots
// @param held_count?      read   int32      [1]
// @param held_capacity    value  int32
// @param num_slots        value  int64
// @param live             update uint32     [ceil_div(num_slots, 32)]
// @param fault            update int32      [1]          batch + 1 - the first entry at fault
// @block HOLD_THREADS
extern "C" __global__ void __launch_bounds__(HOLD_THREADS)
    defrag_mark(const int* req_to_token, long long row_stride, long long pool_rows,
                long long pool_width, const POOL_INDEX* __restrict__ req_pool_indices,
                const SEQ_INDEX* __restrict__ held_lens, int batch, const long long* held,
                const int* __restrict__ held_count, int held_capacity, long long num_slots,
                unsigned* live, int* fault) {
    const Held all = {const_cast<int*>(req_to_token),
                      row_stride,
                      pool_rows,
                      pool_width,
                      req_pool_indices,
                      held_lens,
                      batch,
                      const_cast<long long*>(held),
                      held_count,
                      held_capacity};
    for (int entry = blockIdx.x; entry <= batch; entry += gridDim.x) {
        bool wrong = !all.fits(entry);
        const long long length = wrong ? 0 : all.length(entry);
        for (long long token = threadIdx.x; token < length; token += HOLD_THREADS) {
            const long long slot = all.slot(entry, token);
            if (slot < 0 || slot >= num_slots) {
                wrong = true;
            } else if (slot > 0) {
                atomicOr(&live[slot >> 5], 1u << (slot & 31));
            }
        }
        if (wrong) {
            atomicMax(&fault[0], batch + 1 - entry);
        }
    }
}

// Lists the moves of a compaction.
//
// Launch: one block of COMPACT_THREADS threads. Each thread takes a stretch of words.
//
// @kernel defrag_compact
// @param num_slots  value  int64
// @param batch      value  int32
// @param budget     value  int32                           most rows to list
// @param live       update uint32 [ceil_div(num_slots, 32)]   zero again after
// @param fault      update int32  [1]                      zero again after
// @param src        update int64  [budget]                 the highest live slot first
// @param dst        update int64  [budget]                 the lowest hole first
// @param count      write  int32  [1]
// @param status     write  int32  [4]
// @block COMPACT_THREADS
extern "C" __global__ void __launch_bounds__(COMPACT_THREADS)
    defrag_compact(long long num_slots, int batch, int budget, unsigned* live, int* fault,
                   long long* src, long long* dst, int* count, int* status) {
    SHARED_ARRAY(int, sums, [block::MAX_WARPS]);
    early::launch_dependents();  // a move waits before it reads the list
    const int thread = static_cast<int>(threadIdx.x);
    const int words = static_cast<int>((num_slots + 31) / 32);
    const int each = (words + COMPACT_THREADS - 1) / COMPACT_THREADS;
    const int begin = thread * each < words ? thread * each : words;
    const int end = begin + each < words ? begin + each : words;
    int alive = 0;
    for (int word = begin; word < end; ++word) {
        alive += __popc(live[word]);
    }
    int all;
    block::inclusive_sum(alive, sums, all);
    const int wrong = fault[0];

    // Slots 1 to `all` are those that live rows will have. Of a word: who is at or below that.
    int holes = 0;
    int above = 0;
    for (int word = begin; word < end; ++word) {
        const int first = word * 32;
        const int below = all + 1 - first;  // bits of this word that are at most slot `all`
        const unsigned low = below >= 32 ? 0xffffffffu : below <= 0 ? 0u : (1u << below) - 1;
        const unsigned usable = word == 0 ? low & ~1u : low;
        holes += __popc(usable & ~live[word]);
        above += __popc(live[word] & ~low);
    }
    int all_holes;
    int all_above;
    int hole = block::inclusive_sum(holes, sums, all_holes) - holes;
    const int until = block::inclusive_sum(above, sums, all_above);
    int row = all_above - until + above - 1;  // of the thread's lowest row; the highest has rank 0
    const int listed = wrong != 0 ? 0 : all_above < budget ? all_above : budget;
    for (int word = begin; word < end; ++word) {
        const int first = word * 32;
        const unsigned marks = live[word];
        live[word] = 0;
        for (int bit = 0; bit < 32; ++bit) {
            const int slot = first + bit;
            const bool is_live = (marks >> bit & 1) != 0;
            if (slot > all && is_live) {
                if (row < listed) {
                    src[row] = slot;
                }
                --row;
            } else if (slot > 0 && slot <= all && !is_live) {
                if (hole < listed) {
                    dst[hole] = slot;
                }
                ++hole;
            }
        }
    }
    if (thread == 0) {
        count[0] = listed;
        status[0] = wrong != 0;
        status[1] = wrong != 0 ? batch + 1 - wrong : -1;
        status[2] = listed;
        status[3] = all;
        fault[0] = 0;
    }
}

// Enters each source of the list in a table by slot: which row of the list moves it.
//
// Launch: any number of blocks of HOLD_THREADS threads, after the rows have moved.
//
// @kernel defrag_index
// @param src         read   int64  [budget]
// @param count       read   int32  [1]
// @param budget      value  int32
// @param num_slots   value  int64
// @param moved_by    update int32  [num_slots]   any content before; valid where the list agrees
// @block HOLD_THREADS
extern "C" __global__ void __launch_bounds__(HOLD_THREADS)
    defrag_index(const long long* __restrict__ src, const int* __restrict__ count, int budget,
                 long long num_slots, int* moved_by) {
    for (int row = blockIdx.x * HOLD_THREADS + threadIdx.x; row < count[0];
         row += gridDim.x * HOLD_THREADS) {
        moved_by[src[row]] = row;
    }
}

// Rewrites the table and the list: every slot that has moved gets its new number.
//
// Launch: any number of blocks of HOLD_THREADS threads. The requests' rows of the table differ.
//
// @kernel defrag_rewrite
// @param req_to_token     update int32      [*, *] stride=(row_stride, 1)
// @param row_stride       value  int64
// @param pool_rows        value  int64
// @param pool_width       value  int64
// @param req_pool_indices read   POOL_INDEX [batch]
// @param held_lens        read   SEQ_INDEX  [batch]
// @param batch            value  int32
// @param held?            update int64      [held_capacity]
// @param held_count?      read   int32      [1]
// @param held_capacity    value  int32
// @param src              read   int64      [budget]
// @param dst              read   int64      [budget]
// @param count            read   int32      [1]
// @param budget           value  int32
// @param num_slots        value  int64
// @param moved_by         read   int32      [num_slots]
// @block HOLD_THREADS
extern "C" __global__ void __launch_bounds__(HOLD_THREADS)
    defrag_rewrite(int* req_to_token, long long row_stride, long long pool_rows,
                   long long pool_width, const POOL_INDEX* __restrict__ req_pool_indices,
                   const SEQ_INDEX* __restrict__ held_lens, int batch, long long* held,
                   const int* __restrict__ held_count, int held_capacity,
                   const long long* __restrict__ src, const long long* __restrict__ dst,
                   const int* __restrict__ count, int budget, long long num_slots,
                   const int* __restrict__ moved_by) {
    const Held all = {req_to_token, row_stride, pool_rows, pool_width, req_pool_indices,
                      held_lens,    batch,      held,      held_count, held_capacity};
    const int rows = count[0];
    if (rows == 0) {
        return;
    }
    for (int entry = blockIdx.x; entry <= batch; entry += gridDim.x) {
        const long long length = all.length(entry);
        for (long long token = threadIdx.x; token < length; token += HOLD_THREADS) {
            const long long slot = all.slot(entry, token);
            const int row = moved_by[slot];
            if (row < 0 || row >= rows || src[row] != slot) {
                continue;
            }
            if (entry == batch) {
                held[token] = dst[row];
            } else {
                all.row(entry)[token] = static_cast<int>(dst[row]);
            }
        }
    }
}
