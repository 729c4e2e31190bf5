// A barrier of a block whose warps have different roles, each with a loop of its own.
#pragma once

namespace roles {

#ifdef CUVERIFY_HOST

// One call for all roles: the barrier checker wants all threads at the same one.
inline void meet(int) { __syncthreads(); }

#else

// As __syncthreads(), which may not stand in code that only some of the threads come to; the
// instruction may. All warps of the block, whole, as often as each other; `threads` of it.
__device__ __forceinline__ void meet(int threads) {
    asm volatile("barrier.sync.aligned 0, %0;" ::"r"(threads) : "memory");
}

#endif

}  // namespace roles
