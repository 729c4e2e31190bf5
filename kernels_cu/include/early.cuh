// Kernels that follow one another on a stream. Where a GPU can do it (sm_90 and later), a kernel that
// its contract calls `@early` starts when the one in front lets it; elsewhere, and on the host lane,
// it starts when that one has ended, and nothing here does anything.
#pragma once

namespace early {

#if defined(CUVERIFY_HOST)

inline void launch_dependents() {}
inline void wait_for_dependency() {}

#elif !defined(__CUDA_ARCH__) || __CUDA_ARCH__ < 900

__device__ __forceinline__ void launch_dependents() {}
__device__ __forceinline__ void wait_for_dependency() {}

#else

// Lets the next kernel of the stream start, if it was launched to start early, when all blocks have
// come here or ended.
__device__ __forceinline__ void launch_dependents() {
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
}

// Until the kernel in front has ended and all that it wrote can be read. For kernels that were
// launched to start early; in others it does nothing. A load that the compiler takes for one of
// constant memory (`const` and `__restrict__`) may be moved in front of it.
__device__ __forceinline__ void wait_for_dependency() {
    asm volatile("griddepcontrol.wait;" ::: "memory");
}

#endif

}  // namespace early
