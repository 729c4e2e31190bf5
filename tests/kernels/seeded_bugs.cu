// One kernel for each kind of fault that the host lane's checkers must catch, each with a clean twin:
// BUG=1 is the fault, BUG=0 the same kernel done right. "[kind]" marks the line to be reported.
// One block of 64 threads each, except where the kernel says otherwise.
#include "ptx.cuh"
#include "shared.cuh"
#include "vector.cuh"

#ifndef BUG
#define BUG 0
#endif

// @kernel out_of_bounds_global
// @param out write fp32 [64]
extern "C" __global__ void out_of_bounds_global(float* out) {
    out[threadIdx.x + BUG] = 1.0f;  // [out-of-bounds]
}

// @kernel out_of_bounds_shared
// @param out write fp32 [64]
extern "C" __global__ void out_of_bounds_shared(float* out) {
    SHARED_ARRAY(float, first, [64]);
    SHARED_ARRAY(float, second, [64]);
    second[threadIdx.x] = 2.0f;
    first[threadIdx.x + BUG] = 1.0f;  // [out-of-bounds]
    __syncthreads();
    out[threadIdx.x] = first[threadIdx.x] + second[threadIdx.x];
}

// @kernel out_of_bounds_dynamic
// @param out write fp32 [64]
// @shared 64 * 4 + 64 * 4
extern "C" __global__ void out_of_bounds_dynamic(float* out) {
    DYNAMIC_SHARED(cursor);
    CARVE(cursor, float, first, 64);
    CARVE(cursor, float, second, 64);
    second[threadIdx.x] = 2.0f;
    first[threadIdx.x + BUG] = 1.0f;  // [out-of-bounds]
    __syncthreads();
    out[threadIdx.x] = first[threadIdx.x] + second[threadIdx.x];
}

// @kernel misaligned_vector
// @param out write fp32 [260] align=16
extern "C" __global__ void misaligned_vector(float* out) {
    float4 value = make_float4(1.0f, 2.0f, 3.0f, 4.0f);
    *reinterpret_cast<float4*>(out + 4 * threadIdx.x + BUG) = value;  // [misaligned]
}

// @kernel misaligned_wrapper
// @param out write fp32 [260] align=16
extern "C" __global__ void misaligned_wrapper(float* out) {
    store128(out + 4 * threadIdx.x + 2 * BUG, make_uint4(1, 2, 3, 4));  // [misaligned]
}

// @kernel uninitialised_global
// @param out write fp32 [64]
extern "C" __global__ void uninitialised_global(float* out) {
#if !BUG
    out[threadIdx.x] = 0.0f;
#endif
    out[threadIdx.x] += 1.0f;  // [uninitialised-read]
}

// @kernel uninitialised_shared
// @param out write fp32 [64]
extern "C" __global__ void uninitialised_shared(float* out) {
    SHARED_ARRAY(float, tile, [64]);
    if (threadIdx.x < 64 - 4 * BUG) tile[threadIdx.x] = 1.0f;
    __syncthreads();
    out[threadIdx.x] = tile[threadIdx.x];  // [uninitialised-read]
}

// @kernel unwaited_copy
// @param out write fp32 [256] align=16
// @param x   read  fp32 [256] align=16
extern "C" __global__ void unwaited_copy(float* out, const float* x) {
    SHARED_ARRAY(float, tile, [256]);
    ptx::cp_async16(&tile[4 * threadIdx.x], &x[4 * threadIdx.x]);
    ptx::cp_async_commit();
    ptx::cp_async_wait<BUG>();
    for (int i = 0; i < 4; ++i) {
        out[4 * threadIdx.x + i] = tile[4 * threadIdx.x + i];  // [pending-cp-async]
    }
}

// @kernel race_in_warp
// @param out write fp32 [32]
// 32 threads
extern "C" __global__ void race_in_warp(float* out) {
    SHARED_ARRAY(float, tile, [32]);
    tile[threadIdx.x] = 1.0f;
#if !BUG
    __syncwarp();
#endif
    out[threadIdx.x] = tile[threadIdx.x ^ 1];  // [race]
}

// @kernel race_across_warps
// @param out write fp32 [64]
extern "C" __global__ void race_across_warps(float* out) {
    SHARED_ARRAY(float, tile, [64]);
    tile[threadIdx.x] = 1.0f;
#if BUG
    __syncwarp();
#else
    __syncthreads();
#endif
    out[threadIdx.x] = tile[63 - threadIdx.x];  // [race]
}

// @kernel race_across_blocks
// @param out   write  fp32   [1]
// @param parts update fp32   [4]
// @param done  update uint32 [1]
// 4 blocks; the last to finish adds up what the others left
extern "C" __global__ void race_across_blocks(float* out, float* parts, unsigned* done) {
    SHARED_ARRAY(unsigned, ticket, [1]);
    if (threadIdx.x == 0) {
        parts[blockIdx.x] = 1.0f;
#if !BUG
        __threadfence();
#endif
        ticket[0] = atomicAdd(done, 1u);
    }
    __syncthreads();
    if (ticket[0] != gridDim.x - 1) return;
    __threadfence();
    float sum = 0.0f;
    if (threadIdx.x == 0) {
        for (unsigned i = 0; i < gridDim.x; ++i) sum += parts[i];  // [race]
        out[0] = sum;
    }
}

// @kernel race_behind_a_vote
// @param marks update uint32 [64]
// @param votes update uint32 [1]
// 4 blocks of 64 threads, each of which leaves marks by atomics; the last to vote takes all back
extern "C" __global__ void race_behind_a_vote(unsigned* marks, unsigned* votes) {
    SHARED_ARRAY(unsigned, ticket, [1]);
    for (unsigned turn = 0; turn < 3; ++turn) {
        atomicOr(&marks[(16 * blockIdx.x + (threadIdx.x + turn) % 32) % 64], 1u << blockIdx.x);
    }
    __syncthreads();
    if (threadIdx.x == 0) {
#if !BUG
        __threadfence();
#endif
        ticket[0] = atomicAdd(votes, 1u);
        __threadfence();
    }
    __syncthreads();
    if (ticket[0] == gridDim.x - 1) {
        marks[threadIdx.x] = 0;  // [race]
    }
}

// @kernel race_by_an_older_release
// @param x update uint32 [1]
// @param w update uint32 [1]
// @param out update uint32 [1]
// 2 blocks: two lanes of one release by the same word, the one with more fences first
extern "C" __global__ void race_by_an_older_release(unsigned* x, unsigned* w, unsigned* out) {
    if (blockIdx.x == 0) {
        if (threadIdx.x == 1) {
            __threadfence();
            __threadfence();
            atomicAdd(w, 1u);
        }
        __syncwarp();
        if (threadIdx.x == 0) {
            x[0] = 7;
#if !BUG
            __threadfence();
#endif
            atomicAdd(w, 2u);
        }
    } else if (threadIdx.x == 0) {
        const unsigned seen = atomicAdd(w, 0u);
        __threadfence();
        if (BUG || seen & 2) out[0] = x[0];  // [race]
    }
}

// @kernel race_behind_a_messenger
// @param x update uint32 [1]
// @param first update uint32 [1]
// @param second update uint32 [1]
// @param out update uint32 [1]
// 3 blocks: what the first one says by `first`, the next passes on by `second`, where the first one
// has been before
extern "C" __global__ void race_behind_a_messenger(unsigned* x, unsigned* first, unsigned* second,
                                                   unsigned* out) {
    if (threadIdx.x != 0) return;
    if (blockIdx.x == 0) {
        __threadfence();
        atomicAdd(second, 1u);
        x[0] = 7;
#if !BUG
        __threadfence();
#endif
        atomicAdd(first, 1u);
    } else if (blockIdx.x == 1) {
        const unsigned seen = atomicAdd(first, 0u);
        __threadfence();
        if (seen == 1) atomicAdd(second, 2u);
    } else {
        const unsigned seen = atomicAdd(second, 0u);
        __threadfence();
        if (BUG || seen & 2) out[0] = x[0];  // [race]
    }
}

// @kernel race_behind_a_careless_messenger
// @param x update uint32 [1]
// @param first update uint32 [1]
// @param second update uint32 [1]
// @param out update uint32 [1]
// 3 blocks: what one thread of the second block has learned, another one passes on
extern "C" __global__ void race_behind_a_careless_messenger(unsigned* x, unsigned* first,
                                                            unsigned* second, unsigned* out) {
    SHARED_ARRAY(unsigned, seen, [1]);
    if (blockIdx.x == 0) {
        if (threadIdx.x == 0) {
            x[0] = 7;
            __threadfence();
            atomicAdd(first, 1u);
        }
    } else if (blockIdx.x == 1) {
        if (threadIdx.x == 0) {
            seen[0] = atomicAdd(first, 0u);
            __threadfence();
        }
        __syncthreads();
        if (threadIdx.x == 1 && (BUG || seen[0] == 1)) {
#if !BUG
            __threadfence();
#endif
            atomicAdd(second, 2u);
        }
    } else if (threadIdx.x == 0) {
        const unsigned told = atomicAdd(second, 0u);
        __threadfence();
        if (BUG || told & 2) out[0] = x[0];  // [race]
    }
}

// @kernel same_word_from_all_blocks
// @param out update uint32 [1]
// 4 blocks
extern "C" __global__ void same_word_from_all_blocks(unsigned* out) {
    if (threadIdx.x) return;
#if BUG
    out[0] += 1;  // [race]
#else
    atomicAdd(out, 1u);
#endif
}

// @kernel atomic_after_read
// @param out write uint32 [1]
extern "C" __global__ void atomic_after_read(unsigned* out) {
    SHARED_ARRAY(unsigned, count, [1]);
    if (threadIdx.x == 0) count[0] = 0;
    __syncthreads();
    if (threadIdx.x == 0) out[0] = count[0];  // [race]
#if !BUG
    __syncthreads();
#endif
    if (threadIdx.x == 32) atomicAdd(&count[0], 1u);
}

// @kernel shuffle_as_fence
// @param out write fp32 [32]
// 32 threads
extern "C" __global__ void shuffle_as_fence(float* out) {
    SHARED_ARRAY(float, tile, [32]);
    tile[threadIdx.x] = 1.0f;
    float factor = __shfl_xor_sync(0xffffffffu, 2.0f, 1);
#if !BUG
    __syncwarp();
#endif
    out[threadIdx.x] = factor * tile[threadIdx.x ^ 1];  // [race]
}

// @kernel divergent_barrier
// @param out write fp32 [64]
extern "C" __global__ void divergent_barrier(float* out) {
    SHARED_ARRAY(float, tile, [64]);
    tile[threadIdx.x] = 1.0f;
#if BUG
    if (threadIdx.x < 40) {
        __syncthreads();  // [divergent-barrier]
    } else {
        __syncthreads();
    }
#else
    __syncthreads();
#endif
    out[threadIdx.x] = tile[63 - threadIdx.x];
}

// @kernel barrier_against_syncwarp
// @param out write fp32 [64]
extern "C" __global__ void barrier_against_syncwarp(float* out) {
    out[threadIdx.x] = 1.0f;
    if (threadIdx.x % 32 < 16 || !BUG) {
        __syncthreads();  // [deadlock]
    } else {
        __syncwarp();
    }
}

// @kernel lane_skips_collective
// @param out write fp32 [64]
extern "C" __global__ void lane_skips_collective(float* out) {
    out[threadIdx.x] = 0.0f;
    if (threadIdx.x % 32 != 5 || !BUG) {
        out[threadIdx.x] = __shfl_xor_sync(0xffffffffu, 1.0f, 1);  // [lane-skips-collective]
    }
}

// @kernel shuffle_from_outside_mask
// @param out write fp32 [64]
extern "C" __global__ void shuffle_from_outside_mask(float* out) {
    out[threadIdx.x] = 0.0f;
    if (threadIdx.x % 32 < 16) {
        int source = BUG ? 20 : 12;
        out[threadIdx.x] = __shfl_sync(0x0000ffffu, 1.0f, source);  // [shuffle-from-outside-mask]
    }
}
