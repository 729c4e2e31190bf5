// What a kernel compiled for the host lane may ask of the runtime. Implemented in ../runtime.
#pragma once

#include <cstddef>
#include <cstdint>

struct uint3 {
    unsigned x, y, z;
};
struct dim3 {
    unsigned x, y, z;
    constexpr dim3(unsigned vx = 1, unsigned vy = 1, unsigned vz = 1) : x(vx), y(vy), z(vz) {}
};

#define CUVERIFY_NO_CHECK __attribute__((no_sanitize("thread"), no_sanitize("undefined")))
// Of a function that tells the checker of its accesses itself: a checked caller must not see them.
#if defined(__has_feature)
#define CUVERIFY_CHECKED_BUILD __has_feature(thread_sanitizer)
#elif defined(__SANITIZE_THREAD__)
#define CUVERIFY_CHECKED_BUILD 1
#else
#define CUVERIFY_CHECKED_BUILD 0
#endif
#if CUVERIFY_CHECKED_BUILD
#define CUVERIFY_APART __attribute__((noinline)) CUVERIFY_NO_CHECK
#else
#define CUVERIFY_APART
#endif

namespace cuverify_host {

// A place in the kernel's text. Functions of the shim end in CUVERIFY_SITE, default arguments that the
// compiler fills in at the call, so that reports name the kernel's line and not the shim's.
struct Site {
    const char* file;
    int line;
};
#define CUVERIFY_SITE const char *site_file = __builtin_FILE(), int site_line = __builtin_LINE()
#define CUVERIFY_GIVEN \
    ::cuverify_host::Site { site_file, site_line }
#define CUVERIFY_HERE \
    ::cuverify_host::Site { __FILE__, __LINE__ }

struct Thread {
    uint3 thread_idx, block_idx;
    dim3 block_dim, grid_dim;
    unsigned lane, warp;
};
extern Thread* current;

enum class Collective : unsigned char {
    sync_warp,
    shuffle,
    ballot,
    any,
    all,
    match,
    reduce,
    mma,
    ldmatrix,
    movmatrix,
};

enum class Reduction : unsigned char { none, count, all, any };

// __syncthreads and its reducing forms: returns the reduction over all threads that arrived.
int block_barrier(Reduction reduction, int predicate, Site site);

// __syncwarp: a rendezvous of the lanes in `mask` that orders their memory accesses.
void sync_warp(unsigned mask, Site site);

// A rendezvous of the lanes in `mask`. Each lane publishes `slot`; the last one to arrive calls
// `combine(slots, mask, site)` for all. Memory accesses are *not* ordered by it.
using Combine = void (*)(void** slots, unsigned mask, Site site);
void collective(unsigned mask, Collective kind, void* slot, Combine combine, Site site);

// Memory accesses made by emulated instructions, judged as one access of the whole width.
void read_access(const void* address, size_t bytes, Site site);
void read_matrix_row(const void* address, size_t bytes, Site site);
void write_access(void* address, size_t bytes, Site site);
void atomic_access(void* address, size_t bytes, Site site);
void thread_fence();

// cp.async: the destination holds garbage until a wait covers the group.
void async_copy(void* destination, const void* source, int bytes, int source_bytes, Site site);
void async_commit();
void async_wait(int groups_left);

// Shared memory: the block's arena. Each piece stands between poisoned zones of its own.
void* shared_static(const void* key, size_t bytes, size_t alignment, const char* name, Site site);
void* shared_dynamic(size_t offset, size_t bytes, size_t alignment, const char* name, Site site);

// End the launch with a fault at `site`.
[[noreturn]] void fault(const char* kind, Site site, const char* format, ...)
    __attribute__((format(printf, 3, 4)));

// d[16][8] = a[16][16] b[16][8] + d, as the tensor core does in the numerics that the launch asked for.
void tile_product(const float (*a)[16], const float (*b)[8], float (*d)[8], int smallest);

// ---- launch -----------------------------------------------------------------------------------
struct LaunchConfig {
    unsigned grid[3], block[3];
    unsigned shared_bytes;
};
int run(const LaunchConfig& config, void (*body)(void*), void* context);

// What the stand-alone program finds a kernel by.
struct KernelEntry {
    const char* name;
    int (*launch)(const LaunchConfig* config, void** arguments);
};

// What the compiler knows of a parameter, for the comparison with the contract beside the kernel.
struct ParameterInfo {
    unsigned size;          // bytes of the parameter itself
    unsigned pointee_size;  // 0 for a scalar, or for void*
    char kind;  // of the scalar or pointee: i u f (signed, unsigned, float) b bool h half
                // B bfloat16 v void p pointer s struct
    bool is_pointer, is_const;
};

}  // namespace cuverify_host
