// What each block of attention reads first, side by side: once a step, behind the plan and the index
// lists, in front of all layers. A block that goes from its share of the work to an entry, from there
// to the request's bounds, then to an index and at last to the KV row waits for memory four times in
// every layer; with this it waits twice.
//
// No host reads, no allocation; every buffer is the caller's.

#include "early.cuh"

// the types of qo_indptr and kv_indices: int or long long
#ifndef QO_INDEX
#define QO_INDEX int
#endif
#ifndef KV_INDEX
#define KV_INDEX int
#endif

namespace {

constexpr int WORDS = 16;  // of a block's start
constexpr int ROWS = 64;   // of its first entry whose slots are looked up

}  // namespace

// The start of each block: its row of cta_work, the first entry that it takes, and the bounds of that
// entry's request in kv_indices and among the tokens; 0 behind that. cta_slots has the slots of the
// entry's first 64 KV rows, of the prefix and then of the tree: -1 behind the last one, and for a
// tree's rows where out_cache_loc is None. A block with nothing to do has its row of cta_work, 0 and -1.
//
// Launch: num_ctas blocks, those of the plan. It may be launched before the kernel in front of it has
// ended, and waits before it reads anything.
//
// @kernel verify_starts
// @early
// @param work           read  int32 [max_work, 6]      of verify_plan
// @param cta_work       read  int32 [num_ctas, 4]      of verify_plan
// @param kv_indptr      read  int32 [bounds]           bounds of each prefix in kv_indices
// @param qo_indptr      read  QO_INDEX [bounds]        bounds of each tree among the tokens
// @param kv_indices     read  KV_INDEX [*]             slots of the prefixes
// @param out_cache_loc? read  int64 [tokens]           slots of the trees
// @param cta_starts     write int32 [num_ctas, 16]
// @param cta_slots      write int64 [num_ctas, 64]
// @block 64
extern "C" __global__ void __launch_bounds__(ROWS)
    verify_starts(const int* work, const int* cta_work, const int* kv_indptr,
                  const QO_INDEX* qo_indptr, const KV_INDEX* kv_indices,
                  const long long* out_cache_loc, int* cta_starts, long long* cta_slots) {
    early::wait_for_dependency();
    early::launch_dependents();  // not before: they read the plan, too, which may just be made
    const int thread = static_cast<int>(threadIdx.x);
    const int* share = cta_work + blockIdx.x * 4;
    const int number = share[0];
    int first_token = 0, end_token = 0, first_index = 0, end_index = 0, begin = 0, end = 0;
    const bool busy = number < share[1];
    const int* entry = work + number * 6ll;
    if (busy) {
        const int request = entry[0];
        begin = entry[2];
        end = entry[3];
        first_index = kv_indptr[request];
        end_index = kv_indptr[request + 1];
        first_token = static_cast<int>(qo_indptr[request]);
        end_token = static_cast<int>(qo_indptr[request + 1]);
    }
    const int prefix = end_index - first_index;
    const int position = begin + thread;
    const int node = position - prefix;
    long long slot = -1;
    if (busy && position < min(end, prefix)) {
        slot = static_cast<long long>(kv_indices[first_index + position]);
    } else if (busy && end == prefix && node < end_token - first_token &&
               out_cache_loc != nullptr) {
        slot = out_cache_loc[first_token + node];
    }
    cta_slots[static_cast<long long>(blockIdx.x) * ROWS + thread] = slot;
    if (thread < WORDS) {
        const int bounds[4] = {first_index, end_index, first_token, end_token};
        int word = 0;
        if (thread < 4) {
            word = share[thread];
        } else if (busy && thread < 10) {
            word = entry[thread - 4];
        } else {
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                word = thread == 10 + i ? bounds[i] : word;
            }
        }
        cta_starts[static_cast<long long>(blockIdx.x) * WORDS + thread] = word;
    }
}
