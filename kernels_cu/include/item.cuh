// What a block of a kernel that attends is to do next, as verify_plan.cu has written it.
#pragma once

namespace plan {

// One row tile of one request against one range of KV positions. Where registers are for operands, it
// lies in shared memory and is read where it is needed.
struct Item {
    int row_tile;
    int slot;    // of the partials; -1: the row tile is in one piece
    int begin;   // KV positions: rows of the prefix, then of the tree
    int prefix;  // rows of the prefix
    int end;
    int rows;  // query rows of the request; -1: there is no item
    int next;  // number of the item after this one
    long long first_token;
    long long first_index;  // of the prefix in kv_indices
};

// An entry of the work, and the bounds of its request.
template <typename QoIndex>
struct Entry {
    int request, row_tile, begin, end, slot;
    int first_index, end_index;
    QoIndex first_token, end_token;

    __device__ __forceinline__ void read(const int* work, int number) {
        const int2* given = reinterpret_cast<const int2*>(work + number * 6ll);
        const int2 tile = given[0];
        const int2 range = given[1];
        request = tile.x;
        row_tile = tile.y;
        begin = range.x;
        end = range.y;
        slot = given[2].x;
    }

    __device__ __forceinline__ void read_bounds(const int* kv_indptr, const QoIndex* qo_indptr,
                                                int of_request) {
        first_index = kv_indptr[of_request];
        end_index = kv_indptr[of_request + 1];
        first_token = qo_indptr[of_request];
        end_token = qo_indptr[of_request + 1];
    }

    __device__ __forceinline__ void give(Item& item, int heads) const {
        const int prefix = end_index - first_index;
        const int tokens = static_cast<int>(end_token - first_token);
        item.row_tile = row_tile;
        item.slot = slot;
        item.begin = begin;
        item.prefix = prefix;
        item.end = end == prefix ? prefix + tokens : min(end, prefix);
        item.rows = tokens * heads;
        item.first_token = static_cast<long long>(first_token);
        item.first_index = first_index;
    }
};

// Reads the block's next item, of `heads` query rows a token; one without query rows when there is
// none. Where two blocks are to divide the columns of V, the first one takes them all.
template <typename QoIndex>
__device__ __forceinline__ void advance(Item& item, const int* work, const int* cta_work,
                                        const int* kv_indptr, const QoIndex* qo_indptr, int heads) {
    const int number = item.next;
    item.next = number + cta_work[2];
    item.rows = -1;
    if (number < cta_work[1] && cta_work[3] != 2) {
        Entry<QoIndex> entry;
        entry.read(work, number);
        entry.read_bounds(kv_indptr, qo_indptr, entry.request);
        entry.give(item, heads);
    }
}

// As `advance`, for the block's first item. What can be guessed of it is read at once, that its number
// is the block's and its request the first one: one read after the other would cost a short step as
// much as its rows.
template <typename QoIndex>
__device__ __forceinline__ void start(Item& item, const int* work, const int* cta_work,
                                      const int* kv_indptr, const QoIndex* qo_indptr, int heads) {
    const int guess = static_cast<int>(blockIdx.x);
    const int number = cta_work[0];
    const int end = cta_work[1];
    const int step = cta_work[2];
    const int half = cta_work[3];
    Entry<QoIndex> entry;
    entry.read(work, guess);
    entry.read_bounds(kv_indptr, qo_indptr, 0);
    item.next = number + step;
    item.rows = -1;
    if (number < end && half != 2) {
        if (number != guess) {
            entry.read(work, number);
        }
        if (entry.request != 0) {
            entry.read_bounds(kv_indptr, qo_indptr, entry.request);
        }
        entry.give(item, heads);
    }
}

// `start` for the first item, `advance` for others: apart, so that what the one reads ahead takes the
// other no registers.
template <typename QoIndex>
__device__ __forceinline__ void next(Item& item, bool first, const int* work, const int* cta_work,
                                     const int* kv_indptr, const QoIndex* qo_indptr, int heads) {
    if (first) {
        start(item, work, cta_work, kv_indptr, qo_indptr, heads);
    } else {
        advance(item, work, cta_work, kv_indptr, qo_indptr, heads);
    }
}

}  // namespace plan
