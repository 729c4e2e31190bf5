// Sums over a block whose threads are whole warps.
#pragma once

#include "shared.cuh"

namespace block {

constexpr int MAX_WARPS = 32;

// The sum of `value` over this lane and all before it in its warp; all lanes call it.
template <class T>
__device__ T warp_inclusive_sum(T value) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const T before = __shfl_up_sync(0xffffffffu, value, distance);
        value += lane >= distance ? before : 0;
    }
    return value;
}

// The sum of `value` over this thread and all before it; `total` is that over the whole block.
// Every thread of the block calls it; `scratch` is shared memory for MAX_WARPS values, free again on
// return. Each warp adds up the sums of all warps by itself.
template <class T>
__device__ T inclusive_sum(T value, T* scratch, T& total) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int warps = static_cast<int>(blockDim.x) / 32;
    const T own = warp_inclusive_sum(value);
    if (lane == 31) {
        scratch[warp] = own;
    }
    __syncthreads();
    const T ends = warp_inclusive_sum(lane < warps ? scratch[lane] : T(0));
    const T before = __shfl_sync(0xffffffffu, ends, warp > 0 ? warp - 1 : 0);
    total = __shfl_sync(0xffffffffu, ends, 31);
    __syncthreads();
    return (warp > 0 ? before : T(0)) + own;
}

}  // namespace block
