// How the blocks of a kernel that merges partials divide their work: row tiles have different numbers
// of splits, which only the device knows, and the grid is fixed.
//
// A row tile is `units` units, a warp's work each if all of its splits can be in flight at once;
// else several warps share a unit. A block does `warps / sharers` units of one row tile in a turn.
#pragma once

#include "scan.cuh"

namespace merge {

// How many warps share a unit: the least power of 2 that has all splits in flight, up to `warps`.
__device__ __forceinline__ int sharers(int splits, int warps, int in_flight) {
    int count = 1;
    while (count < warps && count * in_flight < splits) {
        count *= 2;
    }
    return count;
}

// Writes the turns before each row tile into `starts` (shared memory, `tiles` + 1) and returns how many
// there are. Every thread of the block calls it; a barrier is behind it.
__device__ inline int lay_out(int* starts, const int* indptr, int tiles, int units, int warps,
                              int in_flight, int* scratch) {
    const int thread = static_cast<int>(threadIdx.x);
    int total = 0;
    for (int first = 0; first < tiles; first += static_cast<int>(blockDim.x)) {
        const int tile = first + thread;
        int own = 0;
        if (tile < tiles) {
            const int splits = indptr[tile + 1] - indptr[tile];
            const int at_once = warps / sharers(splits, warps, in_flight);
            own = splits == 0 ? 0 : (units + at_once - 1) / at_once;
        }
        int sum;
        const int end = total + block::inclusive_sum(own, scratch, sum);
        total += sum;
        if (tile < tiles) {
            starts[tile] = end - own;
        }
    }
    if (thread == 0) {
        starts[tiles] = total;
    }
    __syncthreads();
    return total;
}

// The row tile of a turn.
__device__ __forceinline__ int tile_of(const int* starts, int tiles, int turn) {
    int tile = 0;
    for (int above = tiles; above - tile > 1;) {
        const int middle = (tile + above) / 2;
        (starts[middle] <= turn ? tile : above) = middle;
    }
    return tile;
}

}  // namespace merge
