"""The CUDA text of the zoo: one module, small kernels, launched through CuPy as anybody would."""

from __future__ import annotations

import functools
from typing import Any

TEXT = r"""
extern "C" {

// y = 2 x + b
__global__ void affine(const float* x, const float* b, float* y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = 2.0f * x[i] + b[i];
}

// the same in one pass over two elements a thread: another kernel for the same answer
__global__ void affine_wide(const float* x, const float* b, float* y, int n) {
    const int i = 2 * (blockIdx.x * blockDim.x + threadIdx.x);
    if (i < n) y[i] = 2.0f * x[i] + b[i];
    if (i + 1 < n) y[i + 1] = 2.0f * x[i + 1] + b[i + 1];
}

// y = 3 x + b
__global__ void affine_three(const float* x, const float* b, float* y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = 3.0f * x[i] + b[i];
}

__global__ void copy(const float* x, float* y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[i];
}

// y = a x, the factor as an argument
__global__ void scale(const float* x, float* y, float a, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = a * x[i];
}

// y = a x, the factor in memory
__global__ void scale_by(const float* x, const float* a, float* y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = *a * x[i];
}

// y = x for the first *length elements and 0 after them
__global__ void keep_first(const float* x, const int* length, float* y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = i < *length ? x[i] : 0.0f;
}

// the same, for a grid that ends with the live elements: the rest was cleared before
__global__ void keep_live(const float* x, const int* length, float* y) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < *length) y[i] = x[i];
}

// y[i] = x[index[i]]
__global__ void gather(const float* x, const int* index, float* y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = x[index[i]];
}

// index = (i + *shift) mod n: what a plan computes once a step
__global__ void rotate_plan(const int* shift, int* index, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) index[i] = (i + *shift) % n;
}

// y = x + noise in [0, 1), a hash of the index and the seed
__global__ void add_noise(const float* x, float* y, unsigned int seed, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    unsigned int h = (i + 1) * 2654435761u ^ seed;
    h ^= h >> 16; h *= 2246822519u; h ^= h >> 13; h *= 3266489917u; h ^= h >> 16;
    y[i] = x[i] + (h >> 8) * (1.0f / 16777216.0f);
}

// y = 2 x + b, and one element more when `past` is 1
__global__ void affine_to(const float* x, const float* b, float* y, int n, int past) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = 2.0f * x[i] + b[i];
    if (i == n && past) y[i] = -1.0f;
}

// y = 2 x + b; an input that was used is marked when `mark` is 1
__global__ void affine_mark(const float* x, float* b, float* y, int n, int mark) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    y[i] = 2.0f * x[i] + b[i];
    if (mark) b[i] = 0.0f;
}

// y = 2 x + b, plus the optional third vector when `use` is 1
__global__ void affine_optional(const float* x, const float* b, const float* extra, float* y,
                                int n, int use) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = 2.0f * x[i] + b[i] + (use ? extra[i] : 0.0f);
}

// waits some milliseconds, then y = 2 x + b
__global__ void affine_late(const float* x, const float* b, float* y, int n, long long cycles) {
    const long long start = clock64();
    while (clock64() - start < cycles) {}
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = 2.0f * x[i] + b[i];
}

// the head of a table of 2 n; the tail stays as it is unless `clear` is 1
__global__ void fill_table(const float* x, float* table, int n, int clear) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i >= n) return;
    table[i] = 2.0f * x[i];
    if (clear) table[n + i] = 0.0f;
}

// y = head + tail + b of a table of 2 n
__global__ void read_table(const float* table, const float* b, float* y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = table[i] + table[n + i] + b[i];
}

// y[r] = x[r] * max over the rows [0, rows); one block
__global__ void times_max(const float* x, const int* rows, float* y, int n) {
    __shared__ float largest;
    if (threadIdx.x == 0) {
        largest = 1.0f;
        for (int r = 0; r < *rows; ++r) largest = fmaxf(largest, fabsf(x[r]));
    }
    __syncthreads();
    for (int r = threadIdx.x; r < n; r += blockDim.x) y[r] = x[r] * largest;
}

// y[r] = sum over j of w[r, j] v[j]; a zero weight skips its value when `skip` is 1
__global__ void weigh(const float* w, const float* v, float* y, int n, int skip) {
    const int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r >= n) return;
    float sum = 0.0f;
    for (int j = 0; j < n; ++j) {
        if (skip && w[r * n + j] == 0.0f) continue;
        sum += w[r * n + j] * v[j];
    }
    y[r] = sum;
}

// y[r] = how much of x its mask row of (*length + rows) columns lets through
__global__ void read_mask(const float* x, const float* mask, const int* length, float* y,
                          int rows) {
    const int r = threadIdx.x;
    if (r >= rows) return;
    const int width = *length + rows;
    float sum = 0.0f;
    for (int c = 0; c < width; ++c) sum += mask[r * width + c] * x[c];
    y[r] = sum;
}

// y[r] = x[r] * mask[r] for every row of the batch, padded ones too
__global__ void mask_rows(const float* x, const float* mask, float* y, int rows) {
    const int r = blockIdx.x * blockDim.x + threadIdx.x;
    if (r < rows) y[r] = x[r] * mask[r];
}

// y[r] = x[r] * (sum of all lengths): what a split plan does with them
__global__ void times_total(const float* x, const int* lengths, float* y, int rows) {
    int total = 0;
    for (int r = 0; r < rows; ++r) total += lengths[r];
    if (threadIdx.x < rows) y[threadIdx.x] = x[threadIdx.x] * total;
}

// y[0] = sum of x: every block leaves its part, and the last to arrive adds them up. It knows by a
// counter that must be zero on entry, and puts it back to zero when `reset` is 1.
__global__ void sum_by_last(const float* x, float* parts, unsigned int* counter, float* y, int n,
                            int reset) {
    __shared__ bool last;
    float sum = 0.0f;
    if (threadIdx.x == 0) {
        for (int i = blockIdx.x; i < n; i += gridDim.x) sum += x[i];
        parts[blockIdx.x] = sum;
        __threadfence();
        last = atomicAdd(counter, 1u) == gridDim.x - 1;
    }
    __syncthreads();
    if (!last || threadIdx.x != 0) return;
    float total = 0.0f;
    for (unsigned int p = 0; p < gridDim.x; ++p) total += ((volatile float*)parts)[p];
    y[0] = total;
    if (reset) *counter = 0u;
}

__global__ void clear_one(float* y) { y[0] = 0.0f; }

// y[0] += every x, in whatever order the blocks come
__global__ void sum_atomic(const float* x, float* y, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) atomicAdd(y, x[i]);
}

// y[0] = the sum of x, in the order of strides of `gridDim.x` chains; one block does it all
__global__ void sum_chains(const float* x, float* y, int n) {
    if (blockIdx.x != 0 || threadIdx.x != 0) return;
    float total = 0.0f;
    for (unsigned int chain = 0; chain < gridDim.x; ++chain) {
        float sum = 0.0f;
        for (int i = chain; i < n; i += gridDim.x) sum += x[i];
        total += sum;
    }
    y[0] = total;
}

__global__ void write_far_away(const float* x, float* y, int n, long long far) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i + far] = 2.0f * x[i];
}

}
"""

# A programmatic dependent launch: the consumer may start before the producer has written. Needs
# sm_90. NVRTC has no function for the two instructions.
DEPENDENT_TEXT = r"""
extern "C" __global__ void produce(const float* x, float* between, int n, long long cycles) {
    asm volatile("griddepcontrol.launch_dependents;");
    const long long start = clock64();
    while (clock64() - start < cycles) {}
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) between[i] = 2.0f * x[i];
}
extern "C" __global__ void consume(const float* between, const float* b, float* y, int n,
                                   int wait) {
    if (wait) asm volatile("griddepcontrol.wait;" ::: "memory");
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = between[i] + b[i];
}
"""


@functools.cache
def kernel(name: str) -> Any:
    """Return a kernel of `TEXT` as CuPy's own function. Compiled at the first call, once."""
    return _module().get_function(name)


@functools.cache
def _module() -> Any:
    import cupy

    return cupy.RawModule(code=TEXT)
