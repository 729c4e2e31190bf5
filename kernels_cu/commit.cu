// Commits what a verify step accepted: by rows or by table, on the device, from accept's outputs.
//
// Request b drafted T = qo_indptr[b+1] - qo_indptr[b] nodes into a window of T slots behind its
// prefix of seq_lens[b] tokens. Accepted are accept_token_num[b] + 1 of them: the global node indices
// accept_index[b, 0 .. accept_token_num[b]], ascending, the root first. What stands behind them is
// not looked at.
//
//   by rows   `commit_plan` lists the moves that bring the accepted rows to the front of each
//             window, packed over the batch; `relocate` carries them out. Windows overlap with
//             themselves, so that the moves chain.
//   by table  `commit_table` permutes the slot ids of the window instead: the accepted ones first, in
//             path order, the others behind them, ascending. No row moves. Page size 1 only.
//
// Either way the first seq_lens[b] + accept_token_num[b] + 1 tokens of the request are then those
// that it has decoded. A request whose pool row is 0 is padding: nothing of it is committed.
//
// status int32 [4], written completely by every launch of `commit_plan`:
//   [0] 0 committed; 1 qo_indptr: bounds that do not ascend, or a tree of no or of more than MAX_TREE
//       nodes; 2 accept_token_num out of [0, depth); 3 accept_index: not the root first, not
//       ascending, or out of the window; 4 req_pool_indices: no row of the table; 5 seq_lens: the
//       window does not fit the row
//   [1] the first request with a fault, -1 where there is none
//   [2] low and [3] high word of the value at fault
// Where one request has a fault nothing is committed: count[0] is 0, the lengths and the table stay.
//
// Both kernels: no host reads, no allocation; every buffer is the caller's.

#include "early.cuh"
#include "scan.cuh"
#include "shared.cuh"

// the types of seq_lens, qo_indptr and req_pool_indices: int or long long
#ifndef SEQ_INDEX
#define SEQ_INDEX int
#endif
#ifndef QO_INDEX
#define QO_INDEX int
#endif
#ifndef POOL_INDEX
#define POOL_INDEX int
#endif
// threads of the one block that plans
#ifndef PLAN_THREADS
#define PLAN_THREADS 256
#endif
// threads of a block that permutes a window
#ifndef TABLE_THREADS
#define TABLE_THREADS 128
#endif
// most nodes of a tree
#ifndef MAX_TREE
#define MAX_TREE 1024
#endif

namespace {

static_assert(PLAN_THREADS % 32 == 0 && PLAN_THREADS <= 1024, "whole warps, one block");
static_assert(TABLE_THREADS % 32 == 0 && TABLE_THREADS <= 1024, "whole warps");

constexpr int COMMITTED = 0;
constexpr int BAD_WINDOW = 1;
constexpr int BAD_ACCEPTED = 2;
constexpr int BAD_NODE = 3;
constexpr int BAD_POOL_ROW = 4;
constexpr int BAD_POOL_WIDTH = 5;

struct Fault {
    int code;
    long long value;
};

// What was accepted, and where: all of it belongs to the caller.
struct Accepted {
    const int* index;
    const int* number;
    const QO_INDEX* bounds;
    const SEQ_INDEX* lens;   // or nullptr
    const POOL_INDEX* rows;  // or nullptr
    int depth;
    long long tokens;
    long long pool_rows;
    long long pool_width;

    __device__ const int* path(int request) const {
        return index + static_cast<long long>(request) * depth;
    }
    __device__ bool is_padding(int request) const { return rows != nullptr && rows[request] == 0; }

    __device__ Fault fault(int request) const {
        const long long begin = bounds[request];
        const long long end = bounds[request + 1];
        if (begin < 0 || end > tokens || end <= begin || end - begin > MAX_TREE) {
            return {BAD_WINDOW, end};
        }
        const long long tree = end - begin;
        if (is_padding(request)) {
            return {COMMITTED, 0};
        }
        const int accepted = number[request];
        if (accepted < 0 || accepted >= depth) {
            return {BAD_ACCEPTED, accepted};
        }
        long long before = begin - 1;
        for (int at = 0; at <= accepted; ++at) {
            const long long node = path(request)[at];
            if (node <= before || node >= end || (at == 0 && node != begin)) {
                return {BAD_NODE, node};
            }
            before = node;
        }
        if (rows != nullptr && (rows[request] < 0 || rows[request] >= pool_rows)) {
            return {BAD_POOL_ROW, rows[request]};
        }
        if (rows != nullptr && (lens[request] < 0 || lens[request] > pool_width - tree)) {
            return {BAD_POOL_WIDTH, lens[request]};
        }
        return {COMMITTED, 0};
    }
};

}  // namespace

// Judges what was accepted, lists the moves of a commit by rows, and counts the new lengths.
//
// Launch: one block of PLAN_THREADS threads, once a step. Rows that already stand where they belong,
// and padding, are not listed; the list is packed in the order of requests and path, and what stands
// behind it is left as it is. The lengths may be written over the old ones.
//
// @kernel commit_plan
// @param accept_index      read   int32     [batch, depth]   nodes of each accepted path
// @param accept_token_num  read   int32     [batch]          accepted nodes, the root not counted
// @param qo_indptr         read   QO_INDEX  [batch + 1]      bounds of each request's window
// @param out_cache_loc     read   int64     [tokens]         slots of the windows
// @param seq_lens?         read   SEQ_INDEX [batch]          tokens of each prefix
// @param req_pool_indices? read   POOL_INDEX [batch]         rows of the table; seq_lens come with them
// @param batch             value  int32                      requests, padding included
// @param depth             value  int32                      most accepted nodes, the root counted
// @param tokens            value  int64
// @param pool_rows         value  int64                      rows of the table
// @param pool_width        value  int64                      and tokens of one
// @param src?              update int64     [batch * depth]  the moves: sources
// @param dst?              update int64     [batch * depth]  and destinations
// @param count?            write  int32     [1]              moves in the list
// @param new_lens?         update SEQ_INDEX [batch]          lengths after the commit
// @param status            write  int32     [4]
// @block PLAN_THREADS
extern "C" __global__ void __launch_bounds__(PLAN_THREADS)
    commit_plan(const int* __restrict__ accept_index, const int* __restrict__ accept_token_num,
                const QO_INDEX* __restrict__ qo_indptr, const long long* __restrict__ out_cache_loc,
                const SEQ_INDEX* seq_lens, const POOL_INDEX* __restrict__ req_pool_indices,
                int batch, int depth, long long tokens, long long pool_rows, long long pool_width,
                long long* src, long long* dst, int* count, SEQ_INDEX* new_lens, int* status) {
    SHARED_ARRAY(int, sums, [block::MAX_WARPS]);
    SHARED_ARRAY(int, first, [1]);
    early::launch_dependents();  // a move waits before it reads the list
    const Accepted accepted = {accept_index, accept_token_num, qo_indptr,
                               seq_lens,     req_pool_indices, depth,
                               tokens,       pool_rows,        pool_width};
    const int thread = static_cast<int>(threadIdx.x);
    if (thread == 0) {
        first[0] = batch;
    }
    __syncthreads();
    for (int request = thread; request < batch; request += PLAN_THREADS) {
        if (accepted.fault(request).code != COMMITTED) {
            atomicMin(&first[0], request);
            break;
        }
    }
    __syncthreads();
    const int wrong = first[0];
    if (thread == 0) {
        const Fault fault = wrong < batch ? accepted.fault(wrong) : Fault{COMMITTED, 0};
        status[0] = fault.code;
        status[1] = wrong < batch ? wrong : -1;
        status[2] = static_cast<int>(fault.value & 0xffffffffll);
        status[3] = static_cast<int>(fault.value >> 32);
    }
    int listed = 0;
    if (wrong == batch) {
        for (int start = 0; start < batch; start += PLAN_THREADS) {
            const int request = start + thread;
            const bool real = request < batch && !accepted.is_padding(request);
            const int* path = accepted.path(real ? request : 0);
            const int last = real ? accept_token_num[request] : -1;
            const long long begin = real ? static_cast<long long>(qo_indptr[request]) : 0;
            int moves = 0;
            for (int at = 1; at <= last; ++at) {
                moves += out_cache_loc[path[at]] != out_cache_loc[begin + at];
            }
            int all;
            int place = listed + block::inclusive_sum(moves, sums, all) - moves;
            for (int at = 1; at <= last && src != nullptr; ++at) {
                const long long from = out_cache_loc[path[at]];
                const long long to = out_cache_loc[begin + at];
                if (from != to) {
                    src[place] = from;
                    dst[place] = to;
                    ++place;
                }
            }
            if (request < batch && new_lens != nullptr) {
                new_lens[request] = seq_lens[request] + (last + 1);
            }
            listed += all;
        }
    }
    if (thread == 0 && count != nullptr) {
        count[0] = listed;
    }
}

// Permutes the slot ids of each window: accepted first, in path order, then the others, ascending.
//
// Launch: any number of blocks of TABLE_THREADS threads, after `commit_plan` and with the lengths of
// before the commit. A block takes a request at a time, and reads a window before it writes any of it.
//
// @kernel commit_table
// @param accept_index      read   int32      [batch, depth]
// @param accept_token_num  read   int32      [batch]
// @param qo_indptr         read   QO_INDEX   [batch + 1]
// @param seq_lens          read   SEQ_INDEX  [batch]          before the commit
// @param req_pool_indices  read   POOL_INDEX [batch]
// @param batch             value  int32
// @param depth             value  int32
// @param status            read   int32      [4]              the verdict of commit_plan
// @param req_to_token      update int32      [*, *] stride=(row_stride, 1)   the windows' slots
// @param row_stride        value  int64                       elements from row to row
// @param out_cache_loc     update int64      [*]              likewise, in the order of the nodes
// @block TABLE_THREADS
extern "C" __global__ void __launch_bounds__(TABLE_THREADS)
    commit_table(const int* __restrict__ accept_index, const int* __restrict__ accept_token_num,
                 const QO_INDEX* __restrict__ qo_indptr, const SEQ_INDEX* __restrict__ seq_lens,
                 const POOL_INDEX* __restrict__ req_pool_indices, int batch, int depth,
                 const int* __restrict__ status, int* req_to_token, long long row_stride,
                 long long* out_cache_loc) {
    SHARED_ARRAY(int, sums, [block::MAX_WARPS]);
    SHARED_ARRAY(int, place, [MAX_TREE]);  // of a node on the path, -1 beside it
    SHARED_ARRAY(int, slots, [MAX_TREE]);
    SHARED_ARRAY(long long, drafts, [MAX_TREE]);
    if (status[0] != COMMITTED) {
        return;
    }
    const int thread = static_cast<int>(threadIdx.x);
    for (int request = blockIdx.x; request < batch; request += gridDim.x) {
        if (req_pool_indices[request] == 0) {
            continue;
        }
        const long long begin = qo_indptr[request];
        const int tree = static_cast<int>(qo_indptr[request + 1] - begin);
        const int accepted = accept_token_num[request];
        const int* path = accept_index + static_cast<long long>(request) * depth;
        int* window = req_to_token + req_pool_indices[request] * row_stride + seq_lens[request];
        for (int node = thread; node < tree; node += TABLE_THREADS) {
            place[node] = -1;
            slots[node] = window[node];
            drafts[node] = out_cache_loc[begin + node];
        }
        __syncthreads();
        for (int at = thread; at <= accepted; at += TABLE_THREADS) {
            place[path[at] - begin] = at;
        }
        __syncthreads();
        int behind = accepted + 1;
        for (int start = 0; start < tree; start += TABLE_THREADS) {
            const int node = start + thread;
            const bool rejected = node < tree && place[node] < 0;
            int all;
            const int before = block::inclusive_sum<int>(rejected, sums, all) - rejected;
            if (node < tree) {
                const int to = rejected ? behind + before : place[node];
                window[to] = slots[node];
                out_cache_loc[begin + to] = drafts[node];
            }
            behind += all;
        }
        // the sum's last barrier is behind the last read of another thread's place
    }
}
