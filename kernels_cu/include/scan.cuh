// Sums over a block whose threads are whole warps.
#pragma once

#include "shared.cuh"

namespace block {

constexpr int MAX_WARPS = 32;

// The sum of `value` over this thread and all before it; `total` is that over the whole block.
// Every thread of the block calls it; `scratch` is shared memory for MAX_WARPS values, free again
// on return only after the block's next barrier.
template <class T>
__device__ T inclusive_sum(T value, T* scratch, T& total) {
    const int lane = static_cast<int>(threadIdx.x) % 32;
    const int warp = static_cast<int>(threadIdx.x) / 32;
    const int warps = static_cast<int>(blockDim.x) / 32;
#pragma unroll
    for (int distance = 1; distance < 32; distance *= 2) {
        const T before = __shfl_up_sync(0xffffffffu, value, distance);
        value += lane >= distance ? before : 0;
    }
    if (lane == 31) {
        scratch[warp] = value;
    }
    __syncthreads();
    T before = 0;
    total = 0;
    for (int other = 0; other < warps; ++other) {
        before += other < warp ? scratch[other] : 0;
        total += scratch[other];
    }
    __syncthreads();
    return before + value;
}

}  // namespace block
