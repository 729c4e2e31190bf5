// The thread's place in its block.
#pragma once

#ifdef CUVERIFY_HOST
inline int thread_anew() { return static_cast<int>(threadIdx.x); }
#else
// As threadIdx.x, read again at every call: what is computed from it, addresses above all, is not
// kept in registers from one part of a kernel to the next. For kernels that need every register.
__device__ __forceinline__ int thread_anew() {
    int thread;
    asm volatile("mov.u32 %0, %%tid.x;" : "=r"(thread));
    return thread;
}
#endif
