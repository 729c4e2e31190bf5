// What a block of a kernel that attends is to do next, as verify_plan.cu has written it.
#pragma once

namespace plan {

// One row tile of one request against one range of KV positions. It lies in shared memory and is read
// where it is needed: registers are for operands.
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

// Reads the block's next item, of `heads` query rows a token; one without query rows when there is
// none. Where two blocks are to divide the columns of V, the first one takes them all.
template <typename QoIndex>
__device__ __forceinline__ void advance(Item& item, const int* work, const int* cta_work,
                                        const int* kv_indptr, const QoIndex* qo_indptr, int heads) {
    const int number = item.next;
    item.next = number + cta_work[2];
    item.rows = -1;
    if (number < cta_work[1] && cta_work[3] != 2) {
        const int* given = work + number * 6ll;
        const int request = given[0];
        const int end = given[3];
        const int first_index = kv_indptr[request];
        const int prefix = kv_indptr[request + 1] - first_index;
        const long long first_token = static_cast<long long>(qo_indptr[request]);
        const int tokens = static_cast<int>(qo_indptr[request + 1] - first_token);
        item.row_tile = given[1];
        item.slot = given[4];
        item.begin = given[2];
        item.prefix = prefix;
        item.end = end == prefix ? prefix + tokens : min(end, prefix);
        item.rows = tokens * heads;
        item.first_token = first_token;
        item.first_index = first_index;
    }
}

}  // namespace plan
