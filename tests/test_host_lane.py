"""The host lane itself: schedules, checkers' edges, limits, interrupts, builds."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import numpy as np
import pytest

import cuverify
from cuverify.cache import cache_directory
from cuverify.errors import ArgumentError, CheckerError, CompileError, ContractError, LaunchError
from cuverify.host import build
from cuverify.host.options import SCHEDULES, current_options
from cuverify.host.toolchain import find_compiler, find_compilers


def kernel(body: str, params: str, signature: str, *, extra: str = "") -> cuverify.Kernel:
    """Return a kernel `k` from a body and its declared parameters."""
    contract = "\n".join(f"// @param {line}" for line in params.split("; ") if line)
    text = f'#include "shared.cuh"\n#include "vector.cuh"\n#include "ptx.cuh"\n// @kernel k\n{contract}\n{extra}\n'
    return cuverify.load_kernel(
        text + f'extern "C" __global__ void k({signature}) {{\n{body}\n}}\n'
    )


def faults(launch: object, **options: object) -> list[str]:
    try:
        with cuverify.checked(**options):  # type: ignore[arg-type]
            launch()  # type: ignore[operator]
    except CheckerError as error:
        return [report.kind for report in error.reports]
    return []


OUT = "out write int32 [n]; n value int32"


def test_schedules_order_threads_and_blocks() -> None:
    k = kernel("order[atomicAdd(next, 1)] = blockIdx.x * 100 + threadIdx.x;",
               "order write int32 [*]; next update int32 [1]", "int* order, int* next")  # fmt: skip
    seen = {}
    for schedule in SCHEDULES:
        order = np.zeros(20, np.int32)
        with cuverify.host_options(schedule=schedule, seed=5):
            k(2, 10, order, np.zeros(1, np.int32))
        seen[schedule] = order.tolist()
    ascending = [block * 100 + thread for block in range(2) for thread in range(10)]
    assert seen["ascending"] == ascending
    assert seen["descending"] == ascending[::-1]
    assert sorted(seen["random"]) == ascending and seen["random"] != ascending


@pytest.mark.parametrize("compiler", [compiler.name for compiler in find_compilers()])
def test_a_fault_inside_the_shim_is_the_kernels_line(compiler: str) -> None:
    k = kernel("int t = threadIdx.x;\nif (t == 0)\nout[0] = __ldg(x + n);\nelse if (t == 1)\n"
               "__stcg(out + n, 1);\nelse\natomicAdd(out + n, 1);",
               "out update int32 [n]; x read int32 [n]; n value int32",
               "int* out, const int* x, int n")  # fmt: skip
    begin = k.source.text.split("\n").index("int t = threadIdx.x;") + 1
    out, x = np.zeros(8, np.int32), np.zeros(8, np.int32)
    for threads, schedule, line in (
        (1, "ascending", 2),
        (2, "descending", 4),
        (3, "descending", 6),
    ):
        with (
            cuverify.checked(schedule=schedule, compiler=compiler),
            pytest.raises(CheckerError) as caught,
        ):
            k(1, threads, out, x, 8)
        report = caught.value.reports[0]
        assert (report.file, report.line) == ("<string>", begin + line)


@pytest.mark.parametrize("compiler", [compiler.name for compiler in find_compilers()])
def test_functions_take_floats_as_cuda_does(compiler: str) -> None:
    k = kernel("out[0] = abs(x[0]); out[1] = sizeof(sqrt(x[1])) + sizeof(exp(1.0)); "
               "out[2] = isnan(x[2]) + 2 * isinf(x[3]) + 4 * isfinite(x[0]); "
               "out[3] = pow(x[1], 2.0f) + fmax(x[0], x[1]) + abs(-7ll);",
               "out write fp32 [4]; x read fp32 [4]", "float* out, const float* x")  # fmt: skip
    out = np.zeros(4, np.float32)
    with cuverify.host_options(compiler=compiler):
        k(1, 1, out, np.array([-1.5, 3, np.nan, -np.inf], np.float32))
    assert out.tolist() == [1.5, 12, 7, 19]


def test_conversions_saturate_and_round_once() -> None:
    k = kernel("for (int i = 0; i < n; ++i) { out[i] = __float2int_rn(x[i]); "
               "out[n + i] = __float2int_rz(x[i]); }",
               "out write int32 [2, n]; x read fp32 [n]; n value int32",
               "int* out, const float* x, int n")  # fmt: skip
    x = np.array([2.5, 3.5, -2.5, 2.0**31, -(2.0**31), -1e30, np.inf, np.nan], np.float32)
    out = np.zeros((2, len(x)), np.int32)
    k(1, 1, out, x, len(x))
    low, high = -(2**31), 2**31 - 1
    assert out[0].tolist() == [2, 4, -2, high, low, low, high, 0]
    assert out[1].tolist() == [2, 3, -2, high, low, low, high, 0]
    k = kernel("out[0] = __bfloat16_as_ushort(__nv_bfloat16(x[0])); "
               "out[1] = __half_as_ushort(__half(x[1])); "
               "out[2] = __bfloat16_as_ushort(__nv_bfloat16(16842753));",
               "out write uint16 [3]; x read fp64 [2]", "unsigned short* out, const double* x",
               extra="#include <cuda_bf16.h>\n#include <cuda_fp16.h>")  # fmt: skip
    halves = np.zeros(3, np.uint16)
    # a little above the middle of two neighbours, by less than a float32 can say
    k(1, 1, halves, np.array([1 + 2.0**-8 + 2.0**-40, 1 + 2.0**-11 + 2.0**-40]))
    assert halves.tolist() == [0x3F81, 0x3C01, 0x4B81]


def test_shuffles_take_five_bits_of_a_distance() -> None:
    k = kernel("int v = threadIdx.x; out[v] = __shfl_down_sync(~0u, v, 33); "
               "out[32 + v] = __shfl_up_sync(~0u, v, 65); out[64 + v] = __shfl_xor_sync(~0u, v, 35);",
               "out write int32 [3, 32]", "int* out")  # fmt: skip
    out = np.zeros((3, 32), np.int32)
    k(1, 32, out)
    lane = np.arange(32)
    assert (out[0] == np.minimum(lane + 1, 31)).all()
    assert (out[1] == np.maximum(lane - 1, 0)).all()
    assert (out[2] == lane ^ 3).all()


def test_random_schedule_repeats_by_seed() -> None:
    k = kernel("for (int i = 0; i < 4; ++i) { order[atomicAdd(next, 1)] = threadIdx.x; __syncthreads(); }",
               "order write int32 [*]; next update int32 [1]", "int* order, int* next")  # fmt: skip

    def run(seed: int) -> list[int]:
        order = np.zeros(64, np.int32)
        with cuverify.checked("random", seed):
            k(1, 16, order, np.zeros(1, np.int32))
        return order.tolist()

    assert run(1) == run(1)
    assert len({tuple(run(seed)) for seed in range(5)}) > 1


def test_random_schedule_can_preempt_between_accesses() -> None:
    # a lost update needs a switch between the read and the write; the checkers' report is set aside
    k = kernel("int v = out[0]; out[0] = v + 1;", "out update int32 [1]", "int* out")
    totals = set()
    for seed in range(20):
        out = np.zeros(1, np.int32)
        assert "race" in faults(lambda out=out: k(1, 32, out), schedule="random", seed=seed)
        totals.add(int(out[0]))
    assert min(totals) < 32


def test_shared_memory_starts_poisoned_in_every_block() -> None:
    k = kernel("SHARED_ARRAY(float, s, [4]); out[blockIdx.x] = s[0] != s[0]; s[0] = 1.0f;",
               "out write int32 [*]", "int* out")  # fmt: skip
    out = np.zeros(3, np.int32)
    k(3, 1, out)
    assert out.tolist() == [1, 1, 1]


def test_two_dimensional_shared_array_and_arrays_of_one_name_in_two_functions() -> None:
    text = """
    #include "shared.cuh"
    __device__ int* first() { SHARED_ARRAY(int, s, [2][3]); return &s[1][2]; }
    __device__ int* second() { SHARED_ARRAY(int, s, [2][3]); return &s[1][2]; }
    // @kernel k
    // @param out write int32 [2]
    extern "C" __global__ void k(int* out) {
        *first() = 1; *second() = 2; __syncthreads();
        out[0] = *first(); out[1] = *second();
    }
    """
    out = np.zeros(2, np.int32)
    with cuverify.checked():
        cuverify.load_kernel(text)(1, 1, out)
    assert out.tolist() == [1, 2]


class TestAccessChecker:
    def test_write_over_the_end_and_before_the_start(self) -> None:
        k = kernel("out[i] = 1;", "out write int32 [4]; i value int32", "int* out, int i")
        for index in (4, -1, 1000, -1000):
            room = np.zeros(4096, np.int32)
            out = room[2048:2052]
            assert faults(lambda out=out, index=index: k(1, 1, out, index)) == ["out-of-bounds"]
            assert (room == 0).all(), "the stray write must not happen"

    def test_a_wide_access_may_not_straddle_the_end(self) -> None:
        k = kernel(
            "store128(out, make_uint4(0, 0, 0, 0));",
            "out write uint32 [3] align=16",
            "unsigned* out",
        )
        room = np.ones(8, np.uint32)
        start = -(room.ctypes.data // 4) % 4
        assert faults(lambda: k(1, 1, room[start : start + 3])) == ["out-of-bounds"]
        assert (room == 1).all()

    def test_gaps_between_rows_belong_to_nobody(self) -> None:
        k = kernel("out[i] = 1;", "out write int32 [rows, 4] stride=(pitch, 1); i value int32; pitch value int32",
                   "int* out, int i, int pitch")  # fmt: skip
        room = np.zeros((3, 6), np.int32)
        for index, kinds in (
            (3, []),
            (4, ["out-of-bounds"]),
            (5, ["out-of-bounds"]),
            (6, []),
            (15, []),
        ):
            assert faults(lambda index=index: k(1, 1, room[:, :4], index, 6)) == kinds

    def test_write_through_a_cast_to_a_read_argument(self) -> None:
        k = kernel("const_cast<int*>(x)[0] = 1;", "x read int32 [1]", "const int* x")
        assert faults(lambda: k(1, 1, np.zeros(1, np.int32))) == ["write-to-read-only"]

    def test_memcpy_and_struct_copies_are_seen(self) -> None:
        body = "memcpy(out, x, 16 * n);"
        k = kernel(
            body,
            "out write int32 [4]; x read int32 [4]; n value int32",
            "int* out, const int* x, int n",
        )
        good, x = np.zeros(4, np.int32), np.arange(4, dtype=np.int32)
        assert faults(lambda: k(1, 1, good, x, 1)) == [] and (good == x).all()
        assert faults(lambda: k(1, 1, good, x, 2)) == ["out-of-bounds"]
        k = kernel("*reinterpret_cast<int4*>(out) = *reinterpret_cast<const int4*>(x + 1);",
                   "out write int32 [8] align=16; x read int32 [8] align=16", "int* out, const int* x")  # fmt: skip
        room = np.zeros(24, np.int32)
        start = -(room.ctypes.data // 4) % 4
        assert faults(lambda: k(1, 1, room[start : start + 8], room[start + 8 : start + 16])) == [
            "misaligned"
        ]

    def test_compound_assignment_reads(self) -> None:
        for compiler in find_compilers():
            k = kernel("out[0] += 1;", "out write int32 [1]", "int* out")
            kinds = faults(lambda k=k: k(1, 1, np.zeros(1, np.int32)), compiler=compiler.name)
            assert kinds == ["uninitialised-read"], compiler.name

    def test_scratch_is_uninitialised_and_update_is_not(self) -> None:
        for access, kinds in (
            ("scratch", ["uninitialised-read"]),
            ("write", ["uninitialised-read"]),
            ("update", []),
        ):
            k = kernel("out[1] = out[0];", f"out {access} int32 [2]", "int* out")
            assert faults(lambda k=k: k(1, 1, np.zeros(2, np.int32))) == kinds

    def test_neighbouring_bytes_do_not_race(self) -> None:
        k = kernel("out[threadIdx.x] = threadIdx.x; __syncthreads();"
                   "if (threadIdx.x % 16 == 0) load128(out + threadIdx.x);",
                   "out write uint8 [64] align=16", "unsigned char* out")  # fmt: skip
        room = np.zeros(96, np.uint8)
        start = -room.ctypes.data % 16
        assert faults(lambda: k(1, 64, room[start : start + 64])) == []

    def test_narrow_write_races_with_a_wide_read(self) -> None:
        k = kernel("if (threadIdx.x == 0) load128(out); else if (threadIdx.x == 33) out[7] = 1;",
                   "out update uint8 [16] align=16", "unsigned char* out")  # fmt: skip
        room = np.zeros(32, np.uint8)
        start = -room.ctypes.data % 16
        with pytest.raises(CheckerError) as caught, cuverify.checked():
            k(1, 64, room[start : start + 16])
        assert [(r.kind, r.byte) for r in caught.value.reports] == [("race", 7)]

    def test_partial_syncwarp_orders_only_its_lanes(self) -> None:
        body = """SHARED_ARRAY(int, s, [32]); int lane = threadIdx.x; s[lane] = lane;
        if (lane < 16) __syncwarp(0xffffu); else __syncwarp(0xffff0000u);
        out[lane] = s[lane ^ %d];"""
        for distance, kinds in ((1, set()), (16, {"race"})):
            k = kernel(body % distance, "out write int32 [32]", "int* out")
            found = faults(lambda k=k: k(1, 32, np.zeros(32, np.int32)), schedule="random")
            assert set(found) - {"uninitialised-read"} == kinds

    def test_write_after_read_by_several_warps(self) -> None:
        k = kernel("int v = x[0]; out[threadIdx.x] = v; if (threadIdx.x == 0) x[0] = 1;",
                   "out write int32 [64]; x update int32 [1]", "int* out, int* x")  # fmt: skip
        for schedule in SCHEDULES:
            x, out = np.zeros(1, np.int32), np.zeros(64, np.int32)
            found = faults(lambda x=x, out=out: k(1, 64, out, x), schedule=schedule)
            assert set(found) == {"race"}

    def test_stencil_in_place_races_across_blocks(self) -> None:
        # block 0 reads what block 1 owns; block 1 reads it too before it writes
        k = kernel("int i = blockIdx.x; out[i] = x[1]; if (i == 1) x[1] = out[i] + 1;",
                   "out write int32 [2]; x update int32 [2]", "int* out, int* x")  # fmt: skip
        for schedule in ("ascending", "descending"):
            out, x = np.zeros(2, np.int32), np.zeros(2, np.int32)
            assert faults(lambda out=out, x=x: k(2, 1, out, x), schedule=schedule) == ["race"]

    def test_fence_by_each_writer_before_the_barrier_releases_too(self) -> None:
        body = """SHARED_ARRAY(int, last, [1]); parts[blockIdx.x * 64 + threadIdx.x] = 1;
        %s
        __syncthreads();
        if (threadIdx.x == 0) last[0] = atomicAdd(done, 1u) == gridDim.x - 1;
        __syncthreads();
        if (!last[0]) return;
        %s
        int sum = 0;
        for (int i = threadIdx.x; i < 64 * gridDim.x; i += 64) sum += parts[i];
        out[threadIdx.x] = sum;"""
        params = "out write int32 [64]; parts write int32 [256]; done update uint32 [1]"
        for release, acquire, clean in (("__threadfence();", "__threadfence();", True),
                                        ("", "__threadfence();", False), ("__threadfence();", "", False)):  # fmt: skip
            k = kernel(body % (release, acquire), params, "int* out, int* parts, unsigned* done")
            for schedule in SCHEDULES:
                out, parts, done = (
                    np.zeros(64, np.int32),
                    np.zeros(256, np.int32),
                    np.zeros(1, np.uint32),
                )
                found = faults(lambda k=k, a=(out, parts, done): k(4, 64, *a), schedule=schedule)
                assert (found == []) == clean, (release, acquire, schedule, found)

    def test_atomic_against_plain_access_is_a_race(self) -> None:
        k = kernel(
            "if (threadIdx.x == 0) out[0] = 1; else atomicAdd(out, 1);",
            "out update int32 [1]",
            "int* out",
        )
        assert "race" in faults(lambda: k(1, 2, np.zeros(1, np.int32)))
        k = kernel("atomicAdd(out, 1); atomicMax(out, 7);", "out update int32 [1]", "int* out")
        assert faults(lambda: k(3, 64, np.zeros(1, np.int32))) == []

    def test_source_of_a_copy_in_flight_may_not_change(self) -> None:
        k = kernel(
            """SHARED_ARRAY(uint4, s, [1]);
        if (threadIdx.x == 0) { ptx::cp_async16(&s[0], x); ptx::cp_async_commit(); }
        __syncthreads();
        if (threadIdx.x == 1) x[0] = 5;
        if (threadIdx.x == 0) ptx::cp_async_wait<0>();""",
            "x update int32 [4] align=16",
            "int* x",
        )
        room = np.zeros(8, np.int32)
        start = -(room.ctypes.data // 4) % 4
        assert faults(lambda: k(1, 2, room[start : start + 4]), schedule="descending") == ["race"]

    def test_memory_behind_a_pointer_table_is_known_by_reach(self) -> None:
        text = """
        // @kernel k
        // @param table read uint64 [2]
        // @reach table update
        // @param i value int32
        extern "C" __global__ void k(const unsigned long long* table, int i) {
            reinterpret_cast<int*>(table[1])[i] = 7;
        }
        """
        k = cuverify.load_kernel(text)
        pools = [np.zeros(4, np.int32), np.zeros(4, np.int32)]
        table = np.array([pool.ctypes.data for pool in pools], np.uint64)
        with cuverify.checked():
            k(1, 1, table, 3, reach={"table": pools})
        assert pools[1][3] == 7
        with pytest.raises(CheckerError) as caught, cuverify.checked():
            k(1, 1, table, 4, reach={"table": pools})
        assert caught.value.reports[0].argument in ("table[0]", "table[1]")
        with pytest.raises(CheckerError, match="out-of-bounds"), cuverify.checked():
            k(1, 1, table, 3)

    def test_arguments_that_share_memory_are_one_region(self) -> None:
        k = kernel("out[threadIdx.x] = x[threadIdx.x] + 1;", "out write int32 [4]; x read int32 [4]",
                   "int* out, const int* x")  # fmt: skip
        x = np.arange(4, dtype=np.int32)
        assert faults(lambda: k(1, 4, x, x)) == []
        assert x.tolist() == [1, 2, 3, 4]
        both = np.zeros(5, np.int32)
        assert "race" in faults(lambda: k(1, 4, both[1:], both[:4]))


class TestBarriersAndLimits:
    def test_deadlock_says_who_waits_where(self) -> None:
        k = kernel(
            "if (threadIdx.x < 16) {\n__syncwarp();\n} else {\n__syncthreads();\n}",
            "n value int32",
            "int n",
        )
        with pytest.raises(CheckerError, match=r"16 wait at __syncthreads .*16 wait at __syncwarp"):
            k(1, 32, 0, lane="host")

    def test_threads_that_returned_do_not_hold_a_barrier_back(self) -> None:
        k = kernel(
            "if (threadIdx.x >= n) return; __syncthreads(); out[threadIdx.x] = 1;",
            OUT,
            "int* out, int n",
        )
        out = np.zeros(40, np.int32)
        with cuverify.checked():
            k(1, 64, out, 40)
        assert (out == 1).all()

    def test_a_lane_calling_with_a_mask_that_omits_it(self) -> None:
        k = kernel("__syncwarp(0xfffffffeu);", "n value int32", "int n")
        with pytest.raises(CheckerError, match="lane-outside-mask"):
            k(1, 32, 0, lane="host")

    def test_lanes_at_different_collectives(self) -> None:
        k = kernel("if (threadIdx.x & 1) __ballot_sync(0xffffffffu, 1); else __shfl_sync(0xffffffffu, 1, 0);",
                   "n value int32", "int n")  # fmt: skip
        with pytest.raises(CheckerError, match="divergent-collective"):
            k(1, 32, 0, lane="host")

    def test_endless_waiting_ends(self) -> None:
        k = kernel("while (atomicAdd(flag, 0) == 0) {}", "flag update int32 [1]", "int* flag")
        assert faults(lambda: k(1, 1, np.zeros(1, np.int32)), max_accesses=10_000) == [
            "endless-loop"
        ]

    def test_trap_and_assert(self) -> None:
        k = kernel("if (n) __trap();", "n value int32", "int n")
        k(1, 1, 0, lane="host")
        with pytest.raises(CheckerError, match="trap"):
            k(1, 1, 1, lane="host")
        k = kernel("assert(n == 0);", "n value int32", "int n")
        with pytest.raises(CheckerError, match="n == 0"):
            k(1, 1, 1, lane="host")

    def test_dynamic_shared_memory_beyond_the_launch(self) -> None:
        k = kernel("DYNAMIC_SHARED(c); CARVE(c, float, a, 8); CARVE(c, int, b, 8); b[7] = 1; a[7] = 1;",
                   "n value int32", "int n", extra="// @shared 64")  # fmt: skip
        k(1, 1, 0, lane="host")
        with pytest.raises(CheckerError, match=r"shared-memory-overflow.*`?b`? ends at byte 64"):
            k(1, 1, 0, lane="host", shared=60)

    def test_more_shared_memory_than_any_device(self) -> None:
        k = kernel("", "n value int32", "int n")
        with pytest.raises(LaunchError, match="232448"):
            k(1, 1, 0, lane="host", shared=232449)

    def test_many_barriers_and_the_largest_block(self) -> None:
        k = kernel("for (int i = 0; i < n; ++i) __syncthreads(); out[threadIdx.x] = 1;",
                   "out write int32 [1024]; n value int32", "int* out, int n")  # fmt: skip
        out = np.zeros(1024, np.int32)
        with cuverify.checked():
            k(1, 1024, out, 50)
        assert (out == 1).all()

    def test_a_launch_after_a_fault_is_fresh(self) -> None:
        k = kernel("out[n] = 1;", OUT.replace("[n]", "[2]"), "int* out, int n")
        out = np.zeros(2, np.int32)
        assert faults(lambda: k(1, 1, out, 5)) == ["out-of-bounds"]
        assert faults(lambda: k(1, 1, out, 1)) == []
        assert out.tolist() == [0, 1]


class TestOptions:
    def test_contexts_nest_and_end(self) -> None:
        with cuverify.checked("descending"):
            with cuverify.host_options(mma="sm_80"):
                assert (current_options().checked, current_options().mma) == (True, "sm_80")
            assert current_options().mma == "exact"
        assert not current_options().checked

    @pytest.mark.parametrize(
        ("name", "value"),
        [("schedule", "sideways"), ("mma", "sm_70"), ("seed", -1), ("max_accesses", 0)],
    )
    def test_bad_settings(self, name: str, value: object) -> None:
        with pytest.raises(ArgumentError, match=name), cuverify.host_options(**{name: value}):
            pass
        with pytest.raises(ArgumentError, match="speed"), cuverify.host_options(speed=3):
            pass

    def test_mma_models_differ_in_the_last_bits_only(self) -> None:
        text = (Path(__file__).parent / "kernels" / "warp.cu").read_text()
        k = cuverify.load_kernel(text, kernel="multiply_tiles")
        rng = np.random.default_rng(0)
        room = np.empty(16 * 16 + 8 * 16 + 16, np.uint16)
        start = -(room.ctypes.data // 2) % 8
        a = room[start : start + 256].reshape(16, 16)
        b = room[start + 256 : start + 384].reshape(8, 16)
        a[:] = rng.standard_normal((16, 16)).astype(np.float32).view(np.uint32) >> 16
        b[:] = rng.standard_normal((8, 16)).astype(np.float32).view(np.uint32) >> 16
        results = {}
        for model in ("exact", "sm_80", "sm_90"):
            d = np.zeros((16, 8), np.float32)
            with cuverify.host_options(mma=model):
                k(1, 32, d, a, b)
            results[model] = d
        for model in ("sm_80", "sm_90"):
            assert (results[model] != results["exact"]).any()
            np.testing.assert_allclose(results[model], results["exact"], rtol=0, atol=1e-5)


@pytest.fixture
def fresh_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Return an own cache directory that holds the built runtimes, which take seconds, and no more."""
    for built in cache_directory().glob("runtime-*.o"):
        shutil.copy(built, tmp_path)
    monkeypatch.setenv("CUVERIFY_CACHE_DIR", str(tmp_path))
    return tmp_path


class TestBuild:
    def test_contract_against_the_signature(self) -> None:
        cases = {
            "declares 1 parameters": ("x read fp32 [4]", "const float* x, int n"),
            "4-byte float": ("x read int32 [4]", "const float* x"),
            "8-byte": ("x read fp32 [4]; n value int32", "const float* x, long long n"),
            "C\\+\\+ takes a value": ("x read fp32 [4]", "float x"),
            "pointer is not const": ("x read fp32 [4]", "float* x"),
            "pointer is const": ("x write fp32 [4]", "const float* x"),
            "unsigned integer": ("n value int32; x read fp32 [4]", "unsigned n, const float* x"),
        }
        for message, (params, signature) in cases.items():
            arguments = [np.zeros(4, np.int32 if "int32 [4]" in params else np.float32)]
            if "n value" in params:
                arguments.insert(0 if params.startswith("n") else 1, 1)  # type: ignore[arg-type]
            with pytest.raises(ContractError, match=message):
                kernel("", params, signature)(1, 1, *arguments)

    def test_compile_error_has_the_kernels_line(self) -> None:
        text = '// @kernel k\n// @param n value int32\nextern "C" __global__ void k(int n) {\n  int x = missing;\n}\n'
        for compiler in find_compilers():
            with (
                pytest.raises(CompileError) as caught,
                cuverify.host_options(compiler=compiler.name),
            ):
                cuverify.load_kernel(text, name="mine.cu")(1, 1, 0, lane="host")
            first = caught.value.diagnostics[0]
            assert (first.file, first.line) == ("mine.cu", 4), compiler.name
            assert "missing" in first.message

    def test_plain_shared_is_refused_with_advice(self) -> None:
        k = kernel("__shared__ float s[4]; s[0] = 1.0f;", "n value int32", "int n")
        with pytest.raises(CompileError, match="SHARED_ARRAY"):
            k(1, 1, 0, lane="host")

    def test_an_edited_header_is_a_new_library(self, tmp_path: Path) -> None:
        header, file = tmp_path / "answer.cuh", tmp_path / "k.cu"
        header.write_text("#define ANSWER 1\n")
        file.write_text('#include "answer.cuh"\n// @kernel k\n// @param out write int32 [1]\n'
                        'extern "C" __global__ void k(int* out) { out[0] = ANSWER; }\n')  # fmt: skip
        k, out = cuverify.load_kernel(file), np.zeros(1, np.int32)
        k(1, 1, out)
        assert out[0] == 1
        header.write_text("#define ANSWER 2\n")
        k(1, 1, out)
        assert out[0] == 2

    def test_nothing_is_left_behind_when_a_build_fails(self, fresh_cache: Path) -> None:
        with pytest.raises(CompileError):
            kernel("nonsense;", "n value int32", "int n")(1, 1, 0, lane="host")
        assert [f.name for f in fresh_cache.iterdir() if not f.name.startswith("runtime-")] == []

    def test_old_libraries_make_room(
        self, fresh_cache: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(build, "_KEPT_FILES", {"*.so": 2})
        for n in range(4):
            k = kernel(f"out[0] = {n};", "out write int32 [1]", "int* out")
            k(1, 1, np.zeros(1, np.int32))
        assert len(list(fresh_cache.glob("*.so"))) == 2

    def test_ucontext_fallback_switches_too(self, tmp_path: Path) -> None:
        folder = Path(build.__file__).parent
        program = tmp_path / "main.cpp"
        program.write_text(
            textwrap.dedent("""
            #include "cuverify_host.h"
            #include "shared.cuh"
            static int out[64];
            void k(int n) {
                SHARED_ARRAY(int, s, [64]);
                for (int i = 0; i < n; ++i) { s[threadIdx.x] = threadIdx.x + i; __syncthreads();
                    out[threadIdx.x] = s[63 - threadIdx.x] + __shfl_xor_sync(0xffffffffu, i, 1); __syncthreads(); }
            }
            namespace cuverify_host { void* use_stacks(void*); }
            int main() {
                cuverify_host::use_stacks(nullptr);
                int n = 100; void* args[] = {&n};
                cuverify_host::LaunchConfig c{{1, 1, 1}, {64, 1, 1}, 0};
                if (cuverify_host::launch(k, c, args)) return 1;
                for (int i = 0; i < 64; ++i) if (out[i] != 63 - i + 99 + 99) return 2;
            }
        """)
        )
        units = "".join(f'#include "{file}"\n' for file in build._texts(["runtime"]))
        (tmp_path / "runtime.cpp").write_text(units)
        headers = Path(str(cuverify.kernels_cu.__file__)).parent / "include"
        subprocess.run(
            [*find_compiler().command, "-std=c++17", "-O1", "-w", "-DCUVERIFY_UCONTEXT", f"-I{folder / 'include'}",
             f"-I{headers}", "-fPIC", str(program), str(tmp_path / "runtime.cpp"), "-o", str(tmp_path / "main")],
            check=True, timeout=120,
        )  # fmt: skip
        assert subprocess.run([tmp_path / "main"], timeout=60, check=False).returncode == 0

    def test_other_processors_context_switch_compiles(self, tmp_path: Path) -> None:
        if "zig" not in [c.name for c in find_compilers()]:
            pytest.skip("only the ziglang package brings a cross compiler")
        source = Path(build.__file__).parent / "runtime" / "fiber.cpp"
        command = [
            *find_compiler("zig").command,
            "-target",
            "aarch64-linux-gnu",
            "-std=c++17",
            "-c",
        ]
        subprocess.run(
            [*command, str(source), "-o", str(tmp_path / "fiber.o")], check=True, timeout=120
        )


def test_interrupt_ends_a_long_launch() -> None:
    program = textwrap.dedent("""
        import cuverify, signal, sys
        signal.signal(signal.SIGINT, signal.default_int_handler)
        text = '''
        // @kernel k
        // @param n value int32
        extern "C" __global__ void k(int n) { for (int i = 0; i < n; ++i) __syncthreads(); }
        '''
        launch = cuverify.load_kernel(text).bind(1, 32, 2**31 - 1, lane="host")
        try:
            print("go", flush=True)
            launch()
        except KeyboardInterrupt:
            sys.exit(7)
    """)
    child = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    try:
        assert child.stdout is not None and child.stdout.readline() == "go\n"
        time.sleep(0.5)  # well inside the launch, which would take minutes
        os.kill(child.pid, signal.SIGINT)
        assert child.wait(timeout=60) == 7
    finally:
        child.kill()


def test_launches_are_recorded() -> None:
    k = kernel("out[threadIdx.x] = n;", OUT, "int* out, int n")
    out = np.zeros(4, np.int32)
    k(1, 4, out, 4)
    with cuverify.record_launches() as records:
        k((1,), (4, 1), out, 4)
    k(1, 4, out, 4)
    (record,) = records
    assert (record.kernel, record.lane, record.device, record.stream) == ("k", "host", "cpu", 0)
    assert (record.grid, record.block, record.shared) == ((1, 1, 1), (4, 1, 1), 0)
    assert record.arguments == {"out": out.ctypes.data, "n": 4}
    assert record.owners[0] is out
