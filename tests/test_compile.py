"""Cubins for every architecture without a GPU, what their kernels take, and every way to fail."""

from __future__ import annotations

import copy
import io
import pickle
import sys
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

import cuverify.compile
import cuverify.cubin
from cuverify.compile import (
    ARCHITECTURES,
    compile_cubin,
    cuda_include_dirs,
    max_shared_bytes,
    nvrtc_options,
)
from cuverify.cubin import read_resources, whole_image
from cuverify.errors import ArgumentError, CompileError, SourceError, ToolchainError
from cuverify.sources import KernelSource

pytest.importorskip("cupy", reason="NVRTC is reached through CuPy")


def text(body: str, **more: Any) -> KernelSource:
    return KernelSource.from_text(body, **{"name": "k.cu", **more})


def fails(source: KernelSource, arch: str = "sm_90") -> CompileError:
    with pytest.raises(CompileError) as caught:
        compile_cubin(source, arch)
    return caught.value


def errors(found: CompileError) -> list[str]:
    return [entry.where for entry in found.diagnostics if entry.severity == "error"]


# --- what comes out ------------------------------------------------------------------------------

FULL = """\
#include <cuda_bf16.h>
#ifndef ROWS
#define ROWS 32
#endif
__constant__ float table[100];
__device__ __noinline__ float far(const float* p, int i) {
    float kept[64];
    for (int k = 0; k < 64; k++) kept[k] = p[k * i];
    return kept[i & 63] + table[i];
}
extern "C" __global__ void __launch_bounds__(256) stacked(float* p, int n) {
    __shared__ float s[ROWS];
    s[threadIdx.x % ROWS] = p[0];
    __syncthreads();
    p[threadIdx.x] = s[n] + far(p, n);
}
extern "C" __global__ void __launch_bounds__(1024) spilling(float* p) {
    float v[100];
#pragma unroll
    for (int i = 0; i < 100; i++) v[i] = p[i * threadIdx.x];
#pragma unroll
    for (int i = 0; i < 100; i++) p[i + threadIdx.x] = v[i * 37 % 100] * v[i * 11 % 100];
}
extern "C" __global__ void wide(float* p) {
    float v[90];
#pragma unroll
    for (int i = 0; i < 90; i++) v[i] = p[i * threadIdx.x];
#pragma unroll
    for (int i = 0; i < 90; i++) p[i + threadIdx.x] = v[i * 37 % 90] * v[i * 11 % 90];
}
extern "C" __global__ void dynamic(float* p, __nv_bfloat16* q) {
    extern __shared__ char bytes[];
    bytes[threadIdx.x] = 1;
    __syncthreads();
    p[0] = float(q[0]) + bytes[7];
}
"""


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_every_architecture(arch: str) -> None:
    from elftools.elf.elffile import ELFFile

    cubin = compile_cubin(text(FULL), arch)
    assert list(cubin.resources) == ["dynamic", "spilling", "stacked", "wide"]
    for name, taken in cubin.resources.items():
        assert (taken.kernel, taken.arch) == (name, arch)
        assert taken.constant_bytes == 400
        assert 4 <= taken.registers <= 255
    stacked, spilling = cubin.resources["stacked"], cubin.resources["spilling"]
    dynamic, wide = cubin.resources["dynamic"], cubin.resources["wide"]
    assert stacked.static_shared_bytes == 32 * 4
    assert stacked.stack_bytes == 256
    assert stacked.max_threads == 256
    assert spilling.registers == 64
    assert spilling.spill_store_bytes > 0
    assert spilling.spill_load_bytes > 0
    assert spilling.stack_bytes >= spilling.spill_store_bytes // 2
    assert spilling.max_threads == 1024
    assert dynamic.static_shared_bytes == 0  # what a launch adds is the launch's to say
    assert (dynamic.spill_store_bytes, dynamic.stack_bytes) == (0, 0)
    assert dynamic.max_threads == 1024
    assert wide.registers > 64
    assert wide.max_threads < 1024  # the register file does not hold more
    # the image is whole: its last table ends where it ends
    header = ELFFile(io.BytesIO(cubin.image)).header
    ends = (
        header.e_phoff + header.e_phnum * header.e_phentsize,
        header.e_shoff + header.e_shnum * header.e_shentsize,
    )
    assert len(cubin.image) == max(ends)


def test_the_package_s_kernel_and_values() -> None:
    source = KernelSource.from_package("relocate")
    names = {f"relocate_{name}" for name in ("few", "list", "check", "rows", "index")}
    names |= {f"relocate_{name}" for name in ("order", "phases", "stage", "phase")}
    assert compile_cubin(source, "sm_90").resources.keys() == names
    shared = [
        compile_cubin(text(FULL, values={"ROWS": rows}), "sm_80")
        .resources["stacked"]
        .static_shared_bytes
        for rows in (8, 64)
    ]
    assert shared == [32, 256]


def test_values_mean_in_cuda_what_they_mean_in_python() -> None:
    body = """
    template <class A, class B> struct same { static constexpr bool value = false; };
    template <class A> struct same<A, A> { static constexpr bool value = true; };
    #if !FLAG || OFF
    #error "bool values work in #if"
    #endif
    static_assert(same<decltype(FLAG), bool>::value && FLAG && !OFF, "");
    static_assert(same<decltype(TINY), float>::value && TINY == 1e-5f, "");
    static_assert(same<decltype(HALF), float>::value && 2 * HALF == -1, "");
    static_assert(same<decltype(LOW), int>::value && LOW < 0, "");
    static_assert(2 - BELOW == 5 && HIGH == 0xffffffffffffffff, "");
    static_assert(sizeof(LOWEST) == 8 && LOWEST < 0, "");
    static_assert(same<TYPE, unsigned short>::value && same<decltype(DOUBLE), double>::value, "");
    """
    source = text(
        body,
        values={
            "FLAG": True,
            "OFF": False,
            "TINY": 1e-5,
            "HALF": -0.5,
            "LOW": -(2**31),
            "LOWEST": -(2**63),
            "BELOW": -3,
            "HIGH": 2**64 - 1,
            "TYPE": "unsigned short",
            "DOUBLE": "1e-300",
        },
    )
    compile_cubin(source, "sm_80")


def test_kernels_that_are_not_extern_c_have_mangled_names() -> None:
    body = "template <int N> __global__ void t(int* p) { *p = N; }\ntemplate __global__ void t<3>(int*);"
    assert list(compile_cubin(text(body), "sm_80").resources) == ["_Z1tILi3EEvPi"]
    assert compile_cubin(text("__device__ int f() { return 1; }"), "sm_80").resources == {}


def test_functions_that_are_called_count_and_recursion_is_no_error() -> None:
    body = """
    __device__ __noinline__ int f(int n) { return n < 2 ? n : f(n - 1) + f(n - 2); }
    extern "C" __global__ void r(int* p) { p[0] = f(p[1]); }
    struct B { __device__ virtual int f(int) = 0; };
    struct C : B { int z; __device__ int f(int a) override { return a + z; } };
    extern "C" __global__ void v(int* p) {
        C c;
        c.z = p[1];
        B* b = &c;
        if (p[5]) b = (B*)p[7] == nullptr ? b : nullptr;
        p[0] = b->f(3);
    }
    """
    for arch in ("sm_80", "sm_120"):
        found = compile_cubin(text(body), arch).resources
        assert found["r"].spill_store_bytes > 0  # f's
        assert found["v"].stack_bytes >= 16


def test_a_required_block_is_the_largest() -> None:
    if compile_cubin(text("__device__ int x;"), "sm_90").nvrtc_version < (12, 9):
        pytest.skip("NVRTC 12.8 does not know __block_size__")
    body = 'extern "C" __global__ void __block_size__((64, 2, 1)) k(int* p) { *p = 2; }'
    assert compile_cubin(text(body), "sm_90").resources["k"].max_threads == 128


def test_warnings_are_kept_on_success() -> None:
    cubin = compile_cubin(
        text('extern "C" __global__ void k(int* p) {\n\tint unused;\n}\n'), "sm_80"
    )
    assert [entry.where for entry in cubin.warnings] == ["k.cu:2:6"]
    assert cubin.warnings[0].severity == "warning"
    assert cubin.warnings[0].excerpt == "\tint unused;\n\t    ^"
    assert "177-D" in cubin.log


def test_shared_memory_of_a_block() -> None:
    assert max_shared_bytes("sm_80") == 166912
    assert max_shared_bytes("sm_90a") == 232448
    assert [max_shared_bytes(arch) // 1024 for arch in ARCHITECTURES] == [
        163, 99, 99, 227, 227, 227, 99,
    ]  # fmt: skip
    with pytest.raises(ArgumentError, match="arch='sm_70'"):
        max_shared_bytes("sm_70")


# --- compiled once, never stale ------------------------------------------------------------------


def test_the_same_is_compiled_once_and_an_edited_header_again(tmp_path: Path) -> None:
    (tmp_path / "outer.cuh").write_text('#pragma once\n#include "inner.cuh"\n')
    inner = tmp_path / "inner.cuh"
    inner.write_text("#define N 16\n")
    (tmp_path / "k.cu").write_text(
        '#include "outer.cuh"\nextern "C" __global__ void k(int* p) {\n'
        "__shared__ int s[N]; s[threadIdx.x] = 1; __syncthreads(); p[0] = s[p[1]]; }\n"
    )
    source = KernelSource.from_file(tmp_path / "k.cu")
    first = compile_cubin(source, "sm_80")
    assert compile_cubin(KernelSource.from_file(tmp_path / "k.cu"), "sm_80") is first
    inner.write_text("#define N 32\n")
    second = compile_cubin(source, "sm_80")
    assert [each.resources["k"].static_shared_bytes for each in (first, second)] == [64, 128]
    assert first.digest != second.digest
    inner.write_text("#define N 16\n")
    assert compile_cubin(source, "sm_80") is first
    inner.write_text("#define N sixteen\n")
    assert errors(fails(source, "sm_80"))[0].startswith(f"{tmp_path / 'k.cu'}:3:")


def test_a_header_that_is_saved_during_a_compilation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = tmp_path / "a.cuh"
    header.write_text("#define N 1\n")
    source = text(
        '#include "a.cuh"\nextern "C" __global__ void during(int* p) { __shared__ int s[N];'
        " s[threadIdx.x] = 1; __syncthreads(); p[0] = s[p[1]]; }",
        include_dirs=[tmp_path],
    )
    compile_once = cuverify.compile._compile
    saved: list[int] = []

    def compile_and_save(*arguments: Any) -> Any:
        cubin = compile_once(*arguments)
        if not saved:
            saved.append(header.write_text("#define N 2\n"))
        return cubin

    monkeypatch.setattr(cuverify.compile, "_compile", compile_and_save)
    assert compile_cubin(source, "sm_80").resources["during"].static_shared_bytes == 8


def test_digests_tell_apart_what_differs(tmp_path: Path) -> None:
    source = text(FULL)
    digests = {compile_cubin(source, arch).digest for arch in ARCHITECTURES}
    digests.add(compile_cubin(source, "sm_80", options=["-maxrregcount=32"]).digest)
    assert len(digests) == len(ARCHITECTURES) + 1
    moved = text(FULL, include_dirs=[tmp_path])
    assert compile_cubin(moved, "sm_80").digest == compile_cubin(source, "sm_80").digest


def test_threads_and_copies() -> None:
    source = text('extern "C" __global__ void threads(int* p) { *p = 3; }')
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: compile_cubin(source, "sm_80"), range(8)))
    assert len({cubin.digest for cubin in found}) == 1
    assert pickle.loads(pickle.dumps(found[0])) == copy.deepcopy(found[0]) == found[0]


@pytest.fixture
def empty_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A cache directory of the test's own, and a process that has compiled nothing yet."""
    monkeypatch.setenv("CUVERIFY_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.setattr(cuverify.compile, "_memo", OrderedDict())
    return tmp_path / "cache"


def test_another_process_finds_what_was_compiled(
    empty_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = text('extern "C" __global__ void kept(int* p) { *p = 3; }')
    first = compile_cubin(source, "sm_80")
    (file,) = empty_cache.glob("cubin-*.json")
    run = cuverify.compile._run
    monkeypatch.setattr(cuverify.compile, "_run", None)
    cuverify.compile._memo.clear()
    assert compile_cubin(source, "sm_80") == first
    monkeypatch.setattr(cuverify.compile, "_run", run)
    for damaged in (b"", b"{}", b'{"log": "", "image": "?"}', b"[]"):
        file.write_bytes(damaged)
        cuverify.compile._memo.clear()
        assert compile_cubin(source, "sm_80").image == first.image
        assert file.read_bytes() != damaged
    # another architecture, option or text is another file
    compile_cubin(source, "sm_90")
    compile_cubin(source, "sm_80", options=["-maxrregcount=32"])
    compile_cubin(text('extern "C" __global__ void kept(int* p) { *p = 4; }'), "sm_80")
    assert len(list(empty_cache.glob("cubin-*.json"))) == 4


def test_what_does_not_compile_or_changed_meanwhile_is_not_kept(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fails(text("int broken = ;"), "sm_80")
    assert list(empty_cache.glob("cubin-*")) == []
    header = tmp_path / "a.cuh"
    header.write_text("#define N 1\n")
    source = text('#include "a.cuh"\n__device__ int n = N;', include_dirs=[tmp_path])
    old = source.translation_unit()
    run = cuverify.compile._run

    def run_and_save(*arguments: Any) -> Any:
        header.write_text("#define N 2\n")
        return run(*arguments)

    monkeypatch.setattr(cuverify.compile, "_run", run_and_save)
    compile_cubin(source, "sm_80")
    assert len(list(empty_cache.glob("cubin-*"))) == 1
    options = nvrtc_options(source)
    version = compile_cubin(source, "sm_80").nvrtc_version
    file = cuverify.compile._cache_file(version, old, "sm_80", options)
    assert file is not None
    assert not file.exists()


def test_other_headers_or_another_nvrtc_of_a_version_are_other_keys(
    empty_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    header = tmp_path / "cuda" / "std" / "version"
    header.parent.mkdir(parents=True)
    monkeypatch.setattr(cuverify.compile, "cuda_include_dirs", lambda: (tmp_path,))

    def key() -> Path | None:
        return cuverify.compile._cache_file((12, 9), "int a;", "sm_80", ("-std=c++17",))

    keys = [key()]
    for content in ("1", "22"):
        header.write_text(content)
        keys.append(key())
    for files in ((), (header,)):
        monkeypatch.setattr(cuverify.compile, "_loaded_nvrtc", lambda files=files: files)
        keys.append(key())
    assert len(set(keys)) == len(keys)
    assert key() == key()


def test_the_nvrtc_that_is_loaded_is_known() -> None:
    compile_cubin(text("__device__ int loads;"), "sm_80")
    cuverify.compile._loaded_nvrtc.cache_clear()
    assert any("libnvrtc" in file.name for file in cuverify.compile._loaded_nvrtc())


def test_without_a_cache_directory_everything_is_compiled(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("CUVERIFY_CACHE_DIR", str(tmp_path / "file" / "below"))
    assert compile_cubin(text("__device__ int uncached;"), "sm_80").image


def test_the_memory_of_compiled_texts_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuverify.compile, "_MEMO_SIZE", 2)
    first = compile_cubin(text("__device__ int bounded0;"), "sm_80")
    for number in (1, 2):
        compile_cubin(text(f"__device__ int bounded{number};"), "sm_80")
    assert len(cuverify.compile._memo) == 2
    assert compile_cubin(text("__device__ int bounded0;"), "sm_80") is not first


# --- options -------------------------------------------------------------------------------------


def test_options_are_those_of_a_launch(tmp_path: Path) -> None:
    source = text("int a;", include_dirs=[tmp_path])
    options = nvrtc_options(source)
    assert options[:3] == ("-std=c++17", "--generate-line-info", "-ftz=true")
    folders = [option for option in options if option.startswith("-I")]
    assert folders == [f"-I{path}" for path in (*source.include_dirs, *cuda_include_dirs())]
    assert folders[0] == f"-I{tmp_path}"
    assert not any("arch" in option or "default-exec" in option for option in options)


def test_denormals_are_flushed_as_in_a_launch() -> None:
    cubin = compile_cubin(
        text('extern "C" __global__ void k(float* p) { p[0] = p[1] * p[2] + p[3]; }'), "sm_80"
    )
    assert b"fma.rn.ftz.f32" in cubin.image  # line information carries the PTX


def test_an_option_reaches_nvrtc() -> None:
    source = text(FULL)
    free = compile_cubin(source, "sm_90").resources["wide"]
    bound = compile_cubin(source, "sm_90", options=["-maxrregcount=40"]).resources["wide"]
    assert bound.registers <= 40 < free.registers
    assert bound.max_threads == 1024


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ("--nope", "refuses them.*unrecognized option --nope"),
        ("-arch=sm_80", "argument arch"),
        ("--gpu-architecture=sm_80", "argument arch"),
        ("-DX=1", "`values`"),
        ("-I/tmp", "include_dirs"),
        ("--include-path=/tmp", "include_dirs"),
        ("-include=x.h", "include_dirs"),
        ("-ftz=false", "flushed in every launch"),
        ("-rdc=true", "cannot be launched"),
        ("-dlto", "cannot be launched"),
    ],
)
def test_options_that_are_refused(option: str, reason: str) -> None:
    with pytest.raises(ArgumentError, match=f"options=.*{reason}"):
        compile_cubin(text("int a;"), "sm_80", options=[option])


@pytest.mark.parametrize("options", ["-G", [1]])
def test_options_are_a_sequence_of_str(options: Any) -> None:
    with pytest.raises(ArgumentError, match="options=.*sequence of str"):
        compile_cubin(text("int a;"), "sm_80", options=options)


@pytest.mark.parametrize("arch", ["sm_70", "sm_91", "90", "compute_90", "", None, 90])
def test_unknown_architectures(arch: Any) -> None:
    with pytest.raises(ArgumentError, match="arch=.*known are sm_80, sm_86"):
        compile_cubin(text("int a;"), arch)


# --- texts that do not compile -------------------------------------------------------------------


def test_two_errors_in_a_notebook_cell() -> None:
    body = 'extern "C" __global__ void k(float* p) {\n\tp[0] = one;\n  p[1] = "漢字"[0] + two;\n}\n'
    found = fails(text(body, name="cell [3]", first_line=7))
    assert errors(found) == ["cell [3]:8:9", "cell [3]:9:20"]
    for entry, word in zip(found.diagnostics, ("one", "two"), strict=True):
        line = body.split("\n")[entry.line - 7]
        assert entry.excerpt.split("\n")[0] == line
        assert entry.column == line.index(word) + 1
        assert word in entry.message
    shown = str(found)
    assert shown.startswith("cell [3]: NVRTC ")
    assert 'cell [3]:8:9: error: identifier "one" is undefined\n' in shown
    assert "\tp[0] = one;" in shown
    assert found.log.count("error: identifier") == 2


def test_more_errors_than_nvrtc_shows_by_itself() -> None:
    lines = [f"__device__ int a{i} = u{i};" for i in range(130)]
    found = fails(text("\n".join(lines)))
    assert errors(found) == [f"k.cu:{i + 1}:{line.index('u') + 1}" for i, line in enumerate(lines)]


def test_errors_in_nested_headers_with_line_directives_of_their_own(tmp_path: Path) -> None:
    (tmp_path / "outer.cuh").write_text(
        '#line 50 "generated.cuh"\ntemplate <class T> __device__ auto f(T v) { return v.nope(); }\n'
        '#include "inner.cuh"\n__device__ int g() { return missing; }\n'
    )
    (tmp_path / "inner.cuh").write_text("\n__device__ int h() { return lost; }\n")
    body = '#include "outer.cuh"\nextern "C" __global__ void k() { f(1); }\nint wrong = nothing;\n'
    found = fails(text(body, include_dirs=[tmp_path]))
    inner = f"{tmp_path}/inner.cuh:2:29"
    assert set(errors(found)) == {
        inner,
        "generated.cuh:52:29",
        "generated.cuh:50:52",
        "k.cu:3:5",  # a variable of the host
        "k.cu:3:13",
    }
    notes = [entry for entry in found.diagnostics if entry.severity == "note"]
    assert [(entry.where, entry.excerpt) for entry in notes] == [
        ("k.cu:2", 'extern "C" __global__ void k() { f(1); }')
    ]


def test_an_injected_value_is_blamed_where_it_is_used() -> None:
    found = fails(text("\n__device__ int a = N;\n", values={"N": "eight"}))
    assert errors(found) == ["k.cu:2:20"]
    assert '"eight"' in found.diagnostics[0].message


def test_inline_assembly_is_blamed_where_it_stands(tmp_path: Path) -> None:
    (tmp_path / "p.cuh").write_text(
        "#pragma once\n__device__ __forceinline__ void bad(float x) {\n"
        '  asm volatile("bogus.op %0;" ::"f"(x));\n}\n'
    )
    body = '#include "p.cuh"\nextern "C" __global__ void k(float* p) {\n  bad(p[0]);\n'
    body += '\tasm volatile("mma.nothing;");\n}\n'
    for arch in ("sm_80", "sm_90a"):
        found = fails(text(body, include_dirs=[tmp_path]), arch)
        assert set(errors(found)) == {f"{tmp_path}/p.cuh:3:3", "k.cu:4:2"}
        assert any(entry.where == "k.cu:3" for entry in found.diagnostics), "inlined from here"
        assert "asm volatile" in found.diagnostics[0].excerpt
    where = [Path(entry.file).name for entry in found.diagnostics]
    assert "<ptx>" not in where


def test_too_much_shared_memory_is_blamed_on_the_kernel() -> None:
    body = '// k() is big\nextern "C" __global__ void\nk(char* p) {\n__shared__ char s[50000];'
    body += "s[threadIdx.x] = 1; __syncthreads(); p[0] = s[p[1]]; }"
    found = fails(text(body))
    assert errors(found) == ["k.cu:3"]
    assert "too much shared data" in found.diagnostics[0].message


def test_a_function_without_a_body_and_a_text_without_an_end() -> None:
    found = fails(
        text('__device__ int lost(int);\nextern "C" __global__ void k(int* p) { *p = lost(1); }')
    )
    assert errors(found) == ["k.cu"]
    assert "Unresolved extern function" in found.diagnostics[0].message
    found = fails(text('\nextern "C" __global__ void k() {\n  {\n\n'))
    assert set(errors(found)) == {"k.cu:3"}  # each brace that is open


def test_the_current_folder_is_not_searched(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stray.cuh").write_text("")
    monkeypatch.chdir(tmp_path)
    found = fails(text('#if 1\n#include "stray.cuh"\n#endif\n'))  # else `sources` refuses it
    assert errors(found) == ["k.cu:2:21"]


def test_headers_that_nvrtc_has_not() -> None:
    found = fails(text("#include <cstdint>\nint8_t a;\n"))
    assert errors(found) == ["k.cu:1:19"]
    assert "no standard library" in found.diagnostics[1].message
    if len(cuda_include_dirs()) == 1:
        found = fails(text("#include <cuda/std/cstdint>\n"))
        assert "nvidia-cuda-cccl" in found.diagnostics[1].message
    with pytest.raises(SourceError, match=r"k\.cu:2: #include \"nowhere.cuh\""):
        compile_cubin(text('\n#include "nowhere.cuh"\n'), "sm_80")


def test_a_header_in_another_encoding(tmp_path: Path) -> None:
    (tmp_path / "latin.cuh").write_bytes(b"__device__ int a = nope; // caf\xe9\n")
    found = fails(text('#include "latin.cuh"\n', include_dirs=[tmp_path]))
    assert errors(found) == [f"{tmp_path}/latin.cuh:1:20"]


# --- what is missing outside ---------------------------------------------------------------------


def test_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    with pytest.raises(ToolchainError, match=r"CuPy is not installed.*pip install 'cuverify\[cuda"):
        compile_cubin(text("int without_cupy;"), "sm_80")
    assert isinstance(cuda_include_dirs(), tuple)  # headers can still be told of


def without_library(*_: object) -> Any:
    raise RuntimeError('Failure finding "libnvrtc.so.13 or libnvrtc.so.12"')


def test_without_libnvrtc(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    monkeypatch.setattr(cupy.cuda.nvrtc, "getVersion", without_library)
    with pytest.raises(ToolchainError, match=r"libnvrtc cannot be loaded: pip install .*so\.13"):
        compile_cubin(text("int a;"), "sm_80")


def test_an_nvrtc_that_is_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    import cupy

    monkeypatch.setattr(cupy.cuda.nvrtc, "getSupportedArchs", lambda: (70, 80, 86, 89, 90))
    compile_cubin(text("__device__ int old;"), "sm_90a")
    with pytest.raises(ToolchainError, match=r"cannot compile for sm_120; 12\.8 or later does"):
        compile_cubin(text("__device__ int old;"), "sm_120")


def header_folder(root: Path, version: int) -> Path:
    folder = root / "include"
    folder.mkdir(parents=True)
    (folder / "cuda_bf16.h").write_text("#define FOUND 1\n")
    (folder / "cuda_runtime_api.h").write_text(f"#define CUDART_VERSION  {version}\n")
    return folder


def test_without_cuda_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    major = compile_cubin(text("__device__ int x;"), "sm_80").nvrtc_version[0]
    needs = text("#include <cuda_bf16.h>\n__device__ int found = FOUND;\n")
    monkeypatch.setattr(cuverify.compile, "_wheel_roots", list)
    monkeypatch.setattr(cuverify.compile, "_cupy_toolkit", lambda: None)
    for name in ("CUDA_PATH", "CUDA_HOME", "CONDA_PREFIX"):
        monkeypatch.delenv(name, raising=False)
    assert cuda_include_dirs() == ()
    compile_cubin(text("__device__ int needs_none;"), "sm_80")
    with pytest.raises(
        ToolchainError, match=r"k\.cu:1:.* cuda_bf16\.h is one of CUDA's.*CUDA_PATH"
    ):
        compile_cubin(needs, "sm_80")
    other = header_folder(tmp_path / "other", (major + 1) * 1000)
    monkeypatch.setenv("CUDA_HOME", str(other.parent))
    with pytest.raises(ToolchainError, match=rf"do not fit: .*other.include \(CUDA {major + 1}\)"):
        compile_cubin(needs, "sm_80")
    right = header_folder(tmp_path / "right", major * 1000 + 50)
    monkeypatch.setenv("CUDA_PATH", str(right.parent))
    assert cuda_include_dirs() == (right,)
    compile_cubin(needs, "sm_80")


def test_packages_with_further_headers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    major = compile_cubin(text("__device__ int x;"), "sm_80").nvrtc_version[0]
    wheels = {12: "cuda_runtime", 13: "cu13"}
    further = {12: "cuda_cccl/include", 13: "cu13/include/cccl"}
    if major not in wheels:
        pytest.skip(f"the layout of CUDA {major}'s packages")
    root = tmp_path / "nvidia"
    first = header_folder(root / wheels[major], major * 1000)
    (root / further[major] / "cuda" / "std").mkdir(parents=True)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    assert cuda_include_dirs()[:2] == (first, root / further[major])


# --- a log or a cubin that is not as expected ----------------------------------------------------


@pytest.fixture(scope="module")
def compiled() -> cuverify.compile.Cubin:
    return compile_cubin(text(FULL), "sm_90")


@pytest.mark.parametrize(
    "change",
    [
        lambda log: "",
        lambda log: log.replace("Used", "Uses"),
        lambda log: log.replace("registers", "regs"),
        lambda log: log.replace("bytes smem", "bytes shared"),
        lambda log: log.replace("128 bytes smem", "132 bytes smem"),
        lambda log: log.replace("bytes spill stores", "spilled bytes"),
        lambda log: log.replace("Compiling entry function 'wide'", "Compiling wide"),
        lambda log: log.replace("for 'sm_90'", "for 'sm_80'"),
        lambda log: log.replace("Used 64 registers", "Used 63 registers"),
    ],
)
def test_a_log_of_another_form_is_an_error_and_no_zero(
    compiled: cuverify.compile.Cubin, change: Callable[[str], str]
) -> None:
    assert read_resources("sm_90", compiled.log, compiled.image) == compiled.resources
    assert change(compiled.log) != compiled.log
    with pytest.raises(ToolchainError, match="ptxas' log"):
        read_resources("sm_90", change(compiled.log), compiled.image)


def test_a_broken_cubin_is_an_error(compiled: cuverify.compile.Cubin) -> None:
    image = compiled.image
    assert whole_image(image) == whole_image(image[:-1]) == image
    with pytest.raises(ToolchainError, match="of a cubin of"):
        whole_image(image[:-2])
    for broken in (b"", b"text", b"\x7fELF", bytes(len(image))):
        with pytest.raises(ToolchainError, match="no cubin"):
            whole_image(broken)
    for broken in (image[:4000], image[:64] + bytes(len(image) - 64)):
        with pytest.raises(ToolchainError):
            read_resources("sm_90", compiled.log, broken)


@pytest.mark.parametrize(
    ("registers", "threads"), [(4, 1024), (64, 1024), (80, 768), (128, 512), (168, 384), (255, 256)]
)
def test_threads_for_which_the_registers_suffice(registers: int, threads: int) -> None:
    assert cuverify.cubin._threads_for(registers) == threads
