// Asking for data ahead of its use.
#pragma once

#ifdef CUVERIFY_HOST

inline void prefetch_l2(const void*) {}

#else

// Brings the 128 bytes around an address into L2, without waiting for them. Nothing is read as far as
// the program can tell.
__device__ __forceinline__ void prefetch_l2(const void* address) {
    asm volatile("prefetch.global.L2 [%0];" ::"l"(address));
}

#endif
