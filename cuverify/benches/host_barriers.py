"""How fast the host lane switches threads: a block that meets at one barrier after another."""

from __future__ import annotations

from typing import Any

import numpy as np

import cuverify
from cuverify.bench import Timing, gated, time_calls

THREADS = 256
BARRIERS = 1000
TARGET_US = 8000

# Each round another thread counts on, which is right only if every barrier holds.
TEXT = """\
// @kernel barriers
// @param counted write int32 [1]
// @param rounds  value int32
// @block 256
#include "shared.cuh"
extern "C" __global__ void barriers(int* counted, int rounds) {
    SHARED_ARRAY(int, turn, [1]);
    const int thread = threadIdx.x;
    if (thread == 0) turn[0] = 0;
    __syncthreads();
    for (int round = 1; round < rounds; ++round) {
        if (thread == (round & 255)) turn[0] = turn[0] + 1;
        __syncthreads();
    }
    if (thread == 0) counted[0] = turn[0];
}
"""


def run(device: str) -> list[dict[str, Any]]:
    """Time the plain build of one block on the host lane, whatever `device` is."""
    kernel = cuverify.load_kernel(TEXT, name="host_barriers.cu")
    counted = np.zeros(1, np.int32)
    launch = kernel.bind(1, THREADS, counted, BARRIERS)

    def check() -> str | None:
        for schedule in ("ascending", "random"):
            counted[:] = -1
            with cuverify.checked(schedule=schedule):
                launch()
            if counted[0] != BARRIERS - 1:
                return f"{counted[0]} of {BARRIERS - 1} rounds were counted ({schedule})"
        return None

    def timing() -> Timing:
        return time_calls(launch, repeats=30)

    shape = {"threads": THREADS, "barriers": BARRIERS, "target_us": TARGET_US}
    return [gated("host_barriers", shape, check=check, timing=timing)]
