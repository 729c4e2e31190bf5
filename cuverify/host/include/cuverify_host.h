// CUDA C++ for a plain C++17 compiler. Included in front of every kernel text on the host lane.
#pragma once

// libstdc++'s own <cmath> is most of a small kernel's compile time; C's header holds what is needed.
// libc++ takes no notice, and its header brings the overloads that cuverify_host_math.h adds here.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#include <stdlib.h>
#undef _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#include "cuverify_host_runtime.h"

#define CUVERIFY_HOST 1

// ---- the language -----------------------------------------------------------------------------
#define __global__
#define __device__
#define __host__
#define __constant__ static
#define __forceinline__ inline __attribute__((always_inline))
#define __launch_bounds__(...)
#define __restrict__ __restrict
#define __align__(n) __attribute__((aligned(n)))
#define __grid_constant__
// clang-format off
#define __shared__ _Pragma("GCC error \"plain __shared__ cannot be checked on the host lane: use SHARED_ARRAY(type, name, [extent]), or DYNAMIC_SHARED and CARVE, of shared.cuh\"")
// clang-format on

#define threadIdx (::cuverify_host::current->thread_idx)
#define blockIdx (::cuverify_host::current->block_idx)
#define blockDim (::cuverify_host::current->block_dim)
#define gridDim (::cuverify_host::current->grid_dim)
#define warpSize 32

// ---- vector types -----------------------------------------------------------------------------
#define CUVERIFY_VECTOR(type, name)                                                          \
    struct name##1 { type x; };                                                              \
    struct __align__(2 * sizeof(type)) name##2 { type x, y; };                               \
    struct name##3 { type x, y, z; };                                                        \
    struct __align__(sizeof(type) > 4 ? 16 : 4 * sizeof(type)) name##4 { type x, y, z, w; }; \
    static inline name##1 make_##name##1(type x) { return {x}; }                             \
    static inline name##2 make_##name##2(type x, type y) { return {x, y}; }                  \
    static inline name##3 make_##name##3(type x, type y, type z) { return {x, y, z}; }       \
    static inline name##4 make_##name##4(type x, type y, type z, type w) { return {x, y, z, w}; }

CUVERIFY_VECTOR(signed char, char)
CUVERIFY_VECTOR(unsigned char, uchar)
CUVERIFY_VECTOR(short, short)
CUVERIFY_VECTOR(unsigned short, ushort)
CUVERIFY_VECTOR(int, int)
CUVERIFY_VECTOR(long long, longlong)
CUVERIFY_VECTOR(unsigned long long, ulonglong)
CUVERIFY_VECTOR(float, float)
CUVERIFY_VECTOR(double, double)
struct uint1 {
    unsigned x;
};
struct __align__(8) uint2 {
    unsigned x, y;
};
struct __align__(16) uint4 {
    unsigned x, y, z, w;
};
static inline uint1 make_uint1(unsigned x) { return {x}; }
static inline uint2 make_uint2(unsigned x, unsigned y) { return {x, y}; }
static inline uint3 make_uint3(unsigned x, unsigned y, unsigned z) { return {x, y, z}; }
static inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
    return {x, y, z, w};
}

// Not every compiler lets the checker see these: route them through it.
namespace cuverify_host {
CUVERIFY_APART inline void* checked_copy(void* to, const void* from, size_t bytes, CUVERIFY_SITE) {
    read_access(from, bytes, CUVERIFY_GIVEN);
    if (bytes) write_access(to, bytes, CUVERIFY_GIVEN);
    return __builtin_memmove(to, from, bytes);
}
CUVERIFY_APART inline void* checked_fill(void* to, int value, size_t bytes, CUVERIFY_SITE) {
    if (bytes) write_access(to, bytes, CUVERIFY_GIVEN);
    return __builtin_memset(to, value, bytes);
}
}  // namespace cuverify_host
#define memcpy(...) ::cuverify_host::checked_copy(__VA_ARGS__)
#define memmove(...) ::cuverify_host::checked_copy(__VA_ARGS__)
#define memset(...) ::cuverify_host::checked_fill(__VA_ARGS__)

// The wrappers of vector.cuh, which tell the checker themselves, too. Their text is a part of what was
// recorded on GPUs, so what only the host lane wants to say of them stands here.
CUVERIFY_APART inline uint4 load128(const void* address, const char* site_file, int site_line);
CUVERIFY_APART inline void store128(void* address, uint4 value, const char* site_file,
                                    int site_line);

#include "cuverify_host_math.h"
#include "cuverify_host_sync.h"
#include "cuverify_host_atomics.h"
#include "cuverify_host_launch.h"
