"""Memory requests that the host lane counts: patterns whose answers are known, limits, the report."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

import cuverify
from cuverify.errors import ArgumentError, CheckerError
from cuverify.host.counts import MemoryCounts, Traffic
from cuverify.host.options import SCHEDULES
from cuverify.host.toolchain import find_compilers

sys.path.insert(0, str(Path(__file__).parent))
import ncu_counts
from memory_launches import FILE, pattern

LINES = FILE.read_text().splitlines()
SECOND_COMPILER = [compiler.name for compiler in find_compilers()][1:2]


def marked(kernel: str, mark: str = "row") -> int:
    """Return the line of a kernel that the text marks."""
    begin = next(i for i, line in enumerate(LINES) if f"void {kernel}(" in line)
    return next(n for n, line in enumerate(LINES[begin:], begin + 1) if f"// [{mark}]" in line)


def counts_of(
    kernel: str, n: int, *, threads: int = 32, pitch: int = 32, **options: object
) -> MemoryCounts:
    launch = pattern(kernel, threads, n, pitch, "numpy")
    with cuverify.counted(**options) as counts:
        launch()
    assert counts.launches == 1
    return counts


def on_line(
    counts: MemoryCounts, kernel: str, memory: str, operation: str, mark: str = "row"
) -> Traffic:
    return counts.total(memory, operation, kernel=kernel, line=marked(kernel, mark))


GLOBAL = [  # kernel, threads, n, operation: requests, bytes, sectors, ideal
    ("coalesced", 32, 32, "load", (1, 128, 4, 4)),
    ("coalesced", 32, 32, "store", (1, 128, 4, 4)),
    ("coalesced", 40, 40, "load", (2, 160, 5, 5)),  # the second warp has eight lanes
    ("coalesced", 64, 37, "load", (2, 148, 5, 5)),  # and here five, of 32, are not past the end
    ("strided", 32, 2, "load", (1, 128, 8, 4)),
    ("strided", 32, 8, "load", (1, 128, 32, 4)),
    ("strided", 32, 0, "load", (1, 128, 1, 1)),  # all want one word
    ("shifted", 32, 1, "load", (1, 128, 5, 4)),
    ("shifted", 32, 8, "load", (1, 128, 4, 4)),
    ("predicated", 32, 3, "load", (3, 192, 12, 6)),
    ("alternating", 32, 4, "load", (4, 256, 16, 8)),
    ("pairs", 32, 0, "load", (1, 256, 8, 8)),  # 8 bytes, which the compiler loads as two floats
    ("quads", 32, 0, "load", (1, 512, 16, 16)),
    ("quads", 32, 0, "store", (1, 512, 16, 16)),
    ("async_rows", 32, 32, "async copy", (1, 512, 32, 16)),  # a row's halves part
    ("async_rows", 32, 13, "async copy", (1, 208, 13, 7)),  # the rest becomes zeros, unread
    ("async_rows", 32, 0, "async copy", (0, 0, 0, 0)),
    ("global_atomics", 32, 0, "atomic", (1, 128, 32, 1)),  # one after another
    ("global_atomics", 32, 1, "atomic", (1, 128, 4, 4)),
]


@pytest.mark.parametrize(("kernel", "threads", "n", "operation", "expected"), GLOBAL)
def test_sectors_of_global_requests(
    kernel: str, threads: int, n: int, operation: str, expected: tuple[int, ...]
) -> None:
    mark = "fill" if kernel in ("pairs", "quads") and operation == "load" else "row"
    counts = counts_of(kernel, n, threads=threads)
    found = on_line(counts, kernel, "global", operation, mark)
    assert (found.requests, found.bytes, found.sectors, found.ideal_sectors) == expected
    assert (found.wavefronts, found.ideal_wavefronts) == (0, 0)


SHARED = [  # kernel, n, PITCH, operation: requests, wavefronts, conflicts
    ("column", 5, 32, "load", (1, 32, 31)),
    ("column", 5, 33, "load", (1, 1, 0)),
    ("column", 5, 34, "load", (1, 2, 1)),
    ("broadcast", 3, 32, "load", (1, 1, 0)),
    ("pairs", 5 + 8 * 5, 32, "load", (1, 2, 0)),  # a half warp at once
    ("pairs", 4 + 8 * 4, 32, "load", (1, 2, 0)),  # also if the halves want the same
    ("pairs", 0, 32, "load", (1, 1, 0)),  # all at once if neighbours want the same
    ("pairs", 1 + 8 * 1, 32, "load", (1, 1, 0)),
    ("pairs", 2 + 8 * 2, 32, "load", (1, 2, 0)),
    ("pairs", 6 + 8 * 6, 32, "load", (1, 1, 0)),
    ("quads", 5 + 8 * 5, 32, "load", (1, 4, 0)),  # a quarter
    ("quads", 0, 32, "load", (1, 2, 0)),
    ("quads", 6 + 8 * 6, 32, "load", (1, 2, 0)),
    ("pairs", 5 + 8 * 0, 32, "load", (1, 2, 0)),  # of 8 bytes, if it is so in the whole warp;
    ("pairs", 0 + 8 * 1, 32, "load", (1, 2, 0)),
    ("quads", 5 + 8 * 0, 32, "load", (1, 3, 0)),  # of 16, each half warp for itself
    ("quads", 0 + 8 * 1, 32, "load", (1, 2, 0)),
    ("quad_rows", 0, 32, "load", (1, 32, 28)),
    ("quad_rows", 0, 36, "load", (1, 4, 0)),
    ("quad_rows", 0, 40, "load", (1, 8, 4)),
    ("matrices", 0, 32, "matrix load", (1, 32, 28)),
    ("matrices", 7, 32, "matrix load", (1, 4, 0)),  # swizzled
    ("matrices", 0, 36, "matrix load", (1, 4, 0)),  # padded
    ("async_rows", 32, 32, "async copy", (1, 4, 0)),  # which meets no conflicts
    ("async_rows", 32, 36, "async copy", (1, 4, 0)),
    ("async_rows", 0, 36, "async copy", (1, 4, 0)),  # zeros are written, too
    ("shared_atomics", 0, 32, "atomic", (1, 32, 31)),  # one after another
    ("shared_atomics", 1, 32, "atomic", (1, 1, 0)),
]


@pytest.mark.parametrize(("kernel", "n", "pitch", "operation", "expected"), SHARED)
def test_wavefronts_and_conflicts_of_shared_requests(
    kernel: str, n: int, pitch: int, operation: str, expected: tuple[int, ...]
) -> None:
    found = on_line(counts_of(kernel, n, pitch=pitch), kernel, "shared", operation)
    assert (found.requests, found.wavefronts, found.conflicts) == expected
    assert (found.sectors, found.ideal_sectors) == (0, 0)


@pytest.mark.parametrize("compiler", SECOND_COMPILER)
@pytest.mark.parametrize("kernel", ["column", "pairs", "quads", "matrices", "shared_atomics"])
def test_compilers_agree(kernel: str, compiler: str) -> None:
    def found(**options: object) -> list[tuple[object, ...]]:
        counts = counts_of(kernel, 1, **options)
        return sorted((c.line, c.memory, c.operation, c.traffic) for c in counts.lines)

    assert found(compiler=compiler) == found()


def test_the_order_of_lanes_does_not_matter() -> None:
    for kernel in ("predicated", "alternating", "column", "pairs"):
        totals = [
            (counts.total("global"), counts.total("shared"))
            for schedule in SCHEDULES
            for counts in [counts_of(kernel, 3, schedule=schedule, seed=4)]
        ]
        assert totals[0] == totals[1] == totals[2], kernel


def kernel(body: str) -> cuverify.Kernel:
    """Return a kernel `k` of `out`, `x` and `n`; its body is line 9 of the text."""
    return cuverify.load_kernel(
        '#include "shared.cuh"\n#include "vector.cuh"\n#include "ptx.cuh"\n// @kernel k\n'
        "// @param out write fp32 [*]\n// @param x read fp32 [*]\n// @param n value int32\n"
        'extern "C" __global__ void k(float* out, const float* x, int n) {\n'
        f"{body}\n}}\n"
    )


def count(
    body: str, *, n: int = 0, grid: int = 1, threads: int = 32, x: np.ndarray | None = None
) -> MemoryCounts:
    out = np.zeros(4096, np.float32)
    x = np.zeros(4096, np.float32) if x is None else x
    with cuverify.counted() as counts:
        kernel(body)(grid, threads, out, x, n)
    return counts


def test_neighbouring_scalars_are_requests_of_their_own() -> None:
    counts = count("int t = threadIdx.x; out[t] = x[2 * t] + x[2 * t + 1];")
    assert counts.total("global", "load") == Traffic(2, 256, 16, 8)
    counts = count("int t = threadIdx.x; float s = 0; for (int i = 0; i < 4; ++i) s += x[4 * t + i]; "
                   "out[t] = s;")  # fmt: skip
    assert counts.total("global", "load") == Traffic(4, 512, 64, 16)


def test_a_vector_is_one_request_where_its_address_allows() -> None:
    """Three floats at multiples of four bytes are three requests; a row of a struct is whole."""
    three = "int t = threadIdx.x; float3 v = reinterpret_cast<const float3*>(x)[t]; "
    assert count(three + "out[t] = v.x + v.y + v.z;").total("global", "load").requests == 3
    four = "int t = threadIdx.x; float4 v = reinterpret_cast<const float4*>(x)[t]; "
    loaded = count(four + "out[t] = v.x + v.y + v.z + v.w;").total("global", "load")
    assert loaded == Traffic(1, 512, 16, 16)
    # of a struct that may begin anywhere, at an address where a pair of floats may not
    struct = "struct P { float a, b; }; int t = threadIdx.x; "
    loaded = count(struct + "P p = reinterpret_cast<const P*>(x + 1)[t]; out[t] = p.a + p.b;")
    assert loaded.total("global", "load") == Traffic(2, 256, 17, 8)
    stored = count("int t = threadIdx.x; "
                   "reinterpret_cast<float2*>(out)[t] = make_float2(x[t], 1.0f);")  # fmt: skip
    assert stored.total("global", "store") == Traffic(1, 256, 8, 8)


def test_block_copies_are_as_wide_as_their_alignment() -> None:
    copied = count("int t = threadIdx.x; memcpy(out + 8 * t, x + 8 * t, 32);")
    assert copied.total("global", "load") == Traffic(2, 1024, 64, 32)
    off = count("int t = threadIdx.x; memcpy(out + 8 * t + 1, x + 8 * t + 1, 24);")
    assert off.total("global", "load").requests == 6
    narrow = count("int t = threadIdx.x; memcpy(out + 3 * t, x + 3 * t, 12);")
    assert narrow.total("global", "store") == Traffic(3, 384, 36, 12)


def test_sectors_are_those_of_memory_that_begins_aligned() -> None:
    """A view is as far off on a device; where the host's own allocation begins does not matter."""
    body = "int t = threadIdx.x; out[t] = x[t];"
    room = np.zeros(4096, np.float32)
    for skipped, sectors in ((0, 4), (4, 5), (8, 4)):
        counts = count(body, x=room[skipped:])
        assert counts.total("global", "load").sectors == sectors
    torch = pytest.importorskip("torch")
    out, x = torch.zeros(64), torch.zeros(64)
    with cuverify.counted() as counts:
        kernel(body)(1, 32, out, x[4:], 0)
    assert counts.total("global", "load").sectors == 5


def test_pieces_of_dynamic_shared_memory_lie_as_on_a_device() -> None:
    """Two lanes' words 32 banks apart conflict, whatever zones the host lane puts between."""
    body = ("DYNAMIC_SHARED(cursor); CARVE(cursor, float, a, {size}); CARVE(cursor, float, b, 32); "
            "int t = threadIdx.x; a[t] = b[t] = 0; __syncthreads(); "
            "const float* from = t == 0 ? a : b; out[t] = from[0];")  # fmt: skip
    for size, wavefronts in ((32, 2), (36, 1)):
        with cuverify.counted() as counts:
            out = np.zeros(32, np.float32)
            kernel(body.replace("{size}", str(size)))(1, 2, out, out.copy(), 0, shared=512)
        assert counts.total("shared", "load").wavefronts == wavefronts


def test_launches_add_up_and_others_do_not_count() -> None:
    launch = pattern("coalesced", 32, 32, 32, "numpy")
    with cuverify.counted() as counts:
        launch()
        with cuverify.checked(schedule="random"):
            launch()
        with cuverify.counted() as inner:
            launch()
    launch()
    assert (counts.launches, inner.launches) == (2, 1)
    assert counts.total("global", "load").requests == 2
    assert counts.total("global", kernel="strided") == Traffic()


def test_loops_of_different_lengths_are_counted_turn_by_turn() -> None:
    counts = count("int t = threadIdx.x; float s = 0; for (int i = 0; i < t; ++i) s += x[32 * i + t]; "
                   "out[t] = s;")  # fmt: skip
    found = counts.total("global", "load")
    assert (found.requests, found.bytes) == (31, 4 * sum(range(32)))


def test_barriers_keep_the_turns_of_a_loop_apart() -> None:
    counts = count("int t = threadIdx.x; float s = 0; for (int turn = 0; turn < 4; ++turn) { "
                   "if (t % 2 == turn % 2) s += x[turn * 64 + t]; __syncthreads(); } out[t] = s;",
                   threads=64)  # fmt: skip
    assert counts.total("global", "load") == Traffic(8, 512, 32, 16)


def test_copies_in_flight_keep_the_turns_of_a_loop_apart() -> None:
    """Half of the lanes do one copy more in each turn; a commit ends the turn, no lane waits."""
    body = ("SHARED_ARRAY(float, tile, [2048]); int t = threadIdx.x; "
            "for (int turn = 0; turn < 4; ++turn) {"
            "for (int i = t; i < 48; i += 32) "
            "ptx::cp_async16(tile + (turn * 48 + i) * 4 + 4, x + (turn * 48 + i) * 4 + 4); "
            "ptx::cp_async_commit(); } ptx::cp_async_wait<0>(); __syncthreads(); out[t] = tile[t + 4];"
            )  # fmt: skip
    counts = count(body)
    copied = counts.total("global", "async copy")
    assert (copied.requests, copied.sectors) == (8, 4 * (17 + 9))
    assert counts.total("global", "load") == Traffic()  # nor once more when they arrive


def test_a_launch_with_faults_is_not_counted() -> None:
    with cuverify.counted() as counts, pytest.raises(CheckerError, match="out-of-bounds"):
        kernel("out[threadIdx.x] = x[n + threadIdx.x];")(
            1, 32, np.zeros(32, np.float32), np.zeros(32, np.float32), 1
        )
    assert counts.launches == 0
    assert counts.lines == []


def test_only_checked_launches_count() -> None:
    for changed in ({"checked": False}, {"sanitized": True, "checked": False}):
        with (
            cuverify.counted(),
            pytest.raises(ArgumentError, match="checked"),
            cuverify.host_options(**changed),
        ):
            pass


def test_the_worst_line_comes_first_with_its_text() -> None:
    counts = counts_of("column", 5)
    worst = counts.lines[0]
    assert (worst.kernel, worst.line, worst.memory) == ("column", marked("column"), "shared")
    assert worst.text.startswith("out[lane()] = tile[lane()][n];")
    assert worst.file.endswith("memory.cu")
    assert worst.waste == 128 * 31
    text = str(counts)
    assert text.index("shared load") < text.index("global load")
    assert f"memory.cu:{worst.line}" in text
    (table,) = counts.tables(most=1)
    assert (table.title, len(table.rows)) == ("column", 1)


def test_a_function_of_the_shim_counts_on_the_kernels_line() -> None:
    counts = count("int t = threadIdx.x;\nout[t] =\n__ldg(x + t);")
    (load,) = (one for one in counts.lines if one.operation == "load")
    assert (load.file, load.line, load.text) == ("<string>", 11, "__ldg(x + t);")


@pytest.mark.gpu
def test_a_gpu_counts_attention_alike() -> None:
    try:
        measured = ncu_counts.measure("attention")
    except ncu_counts.NotMeasuredError as error:
        pytest.skip(str(error))
    assert {kernel for kernel, _ in measured} == {"verify_partials", "verify_combine"}
    assert ncu_counts.compare("attention", measured) == []
