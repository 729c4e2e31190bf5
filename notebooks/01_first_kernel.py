# ---
# jupyter:
#   jupytext:
#     cell_metadata_filter: tags,-all
#     formats: ipynb,py:percent
#     notebook_metadata_filter: jupytext,kernelspec
#     text_representation:
#       extension: .py
#       format_name: percent
#       format_version: '1.3'
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A first kernel
#
# One CUDA kernel, from its first compile error to a result that was checked. No GPU is needed: the same text runs on the CPU, on the *host lane*, under checkers that see every memory access and every barrier. On CUDA tensors the same call launches on the GPU.
#
# It takes `pip install -e '.[cuda12,notebook]'` and a C++ compiler; `cuverify env` says what is here.

# %%
# %load_ext cuverify.notebook
import numpy as np

import cuverify

# %% [markdown]
# ## Write it
#
# `%%cuda` builds the cell at once and makes each kernel in it a Python variable. The comment above the kernel is its contract: what each argument is, and whether the kernel reads or writes it. Every launch is checked against it.
#
# A block adds up one row. Each thread adds every 64th number of it; then the threads' sums are added up in halves. There is a slip in the text.

# %% tags=["active-ipynb", "raises-exception"]
# %%cuda THREADS=64
# #include "shared.cuh"
# // @kernel row_sums
# // @param out  write fp32 [rows]        the sums
# // @param x    read  fp32 [rows, cols]
# // @param rows value int32
# // @param cols value int32
# // @block THREADS
# extern "C" __global__ void row_sums(float* out, const float* x, int rows, int cols) {
#     SHARED_ARRAY(float, partial, [THREADS]);
#     const int t = threadIdx.x, row = blockIdx.x;
#     float sum = 0;
#     for (int col = t; col < cols; col += THREADS) sum += x[row * cols + col];
#     partail[t] = sum;
#     for (int half = THREADS / 2; half > 0; half /= 2) {
#         if (t < half) partial[t] += partial[t + half];
#         __syncthreads();
#     }
#     if (t == 0) out[row] = partial[0];
# }

# %% [markdown]
# The message names this cell as the notebook numbers it, and the line as it stands in it. Corrected:

# %% tags=["active-ipynb"]
# %%cuda THREADS=64
# #include "shared.cuh"
# // @kernel row_sums
# // @param out  write fp32 [rows]        the sums
# // @param x    read  fp32 [rows, cols]
# // @param rows value int32
# // @param cols value int32
# // @block THREADS
# extern "C" __global__ void row_sums(float* out, const float* x, int rows, int cols) {
#     SHARED_ARRAY(float, partial, [THREADS]);
#     const int t = threadIdx.x, row = blockIdx.x;
#     float sum = 0;
#     for (int col = t; col < cols; col += THREADS) sum += x[row * cols + col];
#     partial[t] = sum;
#     for (int half = THREADS / 2; half > 0; half /= 2) {
#         if (t < half) partial[t] += partial[t + half];
#         __syncthreads();
#     }
#     if (t == 0) out[row] = partial[0];
# }

# %% [markdown]
# ## Run it
#
# numpy arrays and CPU tensors run on the host lane. The first array is what the kernel writes; NaN in it would show that it did not.

# %%
rng = np.random.default_rng(0)
x = rng.standard_normal((3, 1000), dtype=np.float32)
out = np.full(3, np.nan, np.float32)
row_sums(3, 64, out, x, 3, 1000)
out

# %% [markdown]
# The contract is checked before anything runs: a wrong number of columns never reaches the kernel.

# %% tags=["raises-exception"]
row_sums(3, 64, out, x, 3, 999)

# %% [markdown]
# ## See a race
#
# Whether those sums were right depended on which thread ran first. Under the checkers it does not matter: two accesses that no barrier orders are reported in every schedule, with both lines and both threads.

# %% tags=["raises-exception"]
with cuverify.checked():
    row_sums(3, 64, out, x, 3, 1000)

# %% [markdown]
# A thread adds `partial[t + half]` before the thread that owns it has written it. A barrier was forgotten:

# %% tags=["active-ipynb"]
# %%cuda THREADS=64
# #include "shared.cuh"
# // @kernel row_sums
# // @param out  write fp32 [rows]        the sums
# // @param x    read  fp32 [rows, cols]
# // @param rows value int32
# // @param cols value int32
# // @block THREADS
# extern "C" __global__ void row_sums(float* out, const float* x, int rows, int cols) {
#     SHARED_ARRAY(float, partial, [THREADS]);
#     const int t = threadIdx.x, row = blockIdx.x;
#     float sum = 0;
#     for (int col = t; col < cols; col += THREADS) sum += x[row * cols + col];
#     partial[t] = sum;
#     __syncthreads();
#     for (int half = THREADS / 2; half > 0; half /= 2) {
#         if (t < half) partial[t] += partial[t + half];
#         __syncthreads();
#     }
#     if (t == 0) out[row] = partial[0];
# }

# %% [markdown]
# ## Compare it with an oracle
#
# An oracle says what is right in plain numpy and float64. The output is poisoned before every run, so that nothing passes on what lay there.

# %%
expected = x.sum(axis=1, dtype=np.float64)
for schedule in ("ascending", "descending", "random"):
    out.fill(np.nan)
    with cuverify.checked(schedule=schedule, seed=7):
        row_sums(3, 64, out, x, 3, 1000)
    error = np.abs(out - expected).max()
    print(f"{schedule}: largest error {error:.1e}")
    assert error < 1e-4

# %% [markdown]
# ## What it takes on a GPU
#
# The text that was checked is the text that a GPU gets. NVRTC compiles it without one:

# %%
resources = row_sums.compile("sm_90").resources["row_sums"]
print(
    f"{resources.static_shared_bytes} bytes of shared memory, {resources.spill_store_bytes} spilled"
)

# %% [markdown]
# Where to go from here: put the kernel into a file and load it with `cuverify.load_kernel(Path("row_sums.cu"))`, draw inputs with Hypothesis, and let `cuverify check` run it all.
