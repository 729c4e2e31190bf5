"""Bad input, one row each: what is done wrong and the error that it must meet.

Every error names the argument or the thing and its value, before anything runs.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cuverify
from cuverify.compile import compile_cubin
from cuverify.errors import (
    ArgumentError,
    CacheError,
    CheckerError,
    CompileError,
    ContractError,
    CuverifyError,
    LaunchError,
    SourceError,
    ToolchainError,
)
from cuverify.launching import check_int, grid
from cuverify.ops.accept import AcceptBuffers, AcceptSampled, accept_buffers
from cuverify.ops.commit import commit_workspace
from cuverify.ops.defrag import DefragPlan, defrag_workspace
from cuverify.ops.draft_topk import DraftTopk
from cuverify.ops.relocate import RelocatePlan, relocate_workspace
from cuverify.ops.tree_build import tree_buffers
from cuverify.ops.verify_attention import verify_workspace
from cuverify.ops.verify_plan import VerifyPlan, plan_workspace
from cuverify.sources import KernelSource

TEXT = """
#ifndef HEADS
#define HEADS 8
#endif
#include "vector.cuh"
// @kernel scale
// @param out     write  fp32  [rows, 4] align=16
// @param x       read   fp32  [rows, 4] stride=(pitch, 1)
// @param slots   read   int64 [rows]
// @param flag    update int32 [1]
// @param factor  value  fp32
// @param pitch   value  int32
// @param small   value  uint8
extern "C" __global__ void __launch_bounds__(256)
scale(float* out, const float* x, const long long* slots, int* flag, float factor, int pitch, unsigned char small) {
    if (threadIdx.x == 0) out[slots[0] * 4] = factor * x[0] + HEADS + flag[0] + small;
}
"""
ROWS = 4


def good() -> dict[str, Any]:
    """Return arguments that are right; each case spoils one."""
    return {
        "out": torch.zeros(ROWS, 4),
        "x": torch.zeros(ROWS, 4),
        "slots": torch.zeros(ROWS, dtype=torch.int64),
        "flag": torch.zeros(1, dtype=torch.int32),
        "factor": 1.0,
        "pitch": 4,
        "small": 3,
    }


def launch(
    grid: Any = 1, block: Any = 32, shared: int | None = None, text: str = TEXT, **spoiled: Any
) -> None:
    arguments = good() | spoiled
    cuverify.load_kernel(text)(grid, block, *arguments.values(), shared=shared)


def misaligned(rows: int = ROWS) -> torch.Tensor:
    room = torch.zeros(rows * 4 + 8)
    start = -(room.data_ptr() // 4) % 4 + 1
    return room[start : start + rows * 4].view(rows, 4)


def read_only() -> np.ndarray:
    array = np.zeros((ROWS, 4), np.float32)
    array.setflags(write=False)
    return array


def syntax_error_in_string() -> None:
    compile_cubin(
        KernelSource.from_text(
            '\nextern "C" __global__ void k() {\n  int x = ;\n}\n', name="cell 3"
        ),
        "sm_90",
    )


def undeclared_value() -> None:
    cuverify.load_kernel(TEXT, HEAD=8)


def missing_header(tmp: Path) -> None:
    file = tmp / "k.cu"
    file.write_text('\n#include "nowhere.cuh"\n// @kernel k\nextern "C" __global__ void k() {}\n')
    cuverify.load_kernel(file)


def without_compilers(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuverify.host import toolchain

    monkeypatch.setattr(toolchain, "_probe", lambda name: None)
    launch()


def without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    monkeypatch.setitem(sys.modules, "cupy.cuda", None)
    compile_cubin(KernelSource.from_text('extern "C" __global__ void without_cupy() {}\n'), "sm_90")


def unwritable_cache(monkeypatch: pytest.MonkeyPatch, tmp: Path) -> None:
    file = tmp / "file"
    file.write_text("")
    monkeypatch.setenv("CUVERIFY_CACHE_DIR", str(file / "below"))
    launch()


def out_of_range_slot() -> None:
    with cuverify.checked():
        launch(slots=torch.full((ROWS,), ROWS, dtype=torch.int64))


# name: (what is done, error, what its message says)
CASES: dict[str, tuple[Callable[..., None], type[CuverifyError], str]] = {
    "too few arguments": (
        lambda: cuverify.load_kernel(TEXT)(1, 32, torch.zeros(4, 4)), ArgumentError, r"arguments=1: scale\(out, x"),
    "wrong dtype": (lambda: launch(out=torch.zeros(ROWS, 4, dtype=torch.float64)), ArgumentError, "out=.*float64.*fp32"),
    "wrong index width": (
        lambda: launch(slots=torch.zeros(ROWS, dtype=torch.int32)), ArgumentError, "slots=.*int32, but .*int64"),
    "dtype no kernel knows": (
        lambda: launch(x=np.zeros((ROWS, 4), np.complex64)), ArgumentError, "x=.*no kernel argument has this dtype"),
    "wrong rank": (lambda: launch(out=torch.zeros(ROWS * 4)), ArgumentError, "out=.*has 1 dimensions, not the 2"),
    "wrong extent": (lambda: launch(out=torch.zeros(ROWS, 5)), ArgumentError, "out=.*dimension 1 has 5 elements"),
    "extents that disagree": (
        lambda: launch(slots=torch.zeros(3, dtype=torch.int64)), ArgumentError, "slots=.*rows is 3 here, but 4 in out"),
    "not contiguous": (
        lambda: launch(out=torch.zeros(4, ROWS).t()), ArgumentError, r"out=.*not contiguous \(strides \[1, 4\]\)"),
    "stride that the kernel was not told": (
        lambda: launch(x=torch.zeros(ROWS, 8)[:, :4]), ArgumentError, "x=.*stride 0 is 8 elements, wants pitch = 4"),
    "negative stride": (
        lambda: launch(x=np.zeros((ROWS, 4), np.float32)[::-1], pitch=-4), ArgumentError, "x=.*negative strides"),
    "expanded tensor that is written": (
        lambda: launch(flag=torch.zeros(1, dtype=torch.int32), out=torch.zeros(1, 4).expand(ROWS, 4)),
        ArgumentError, "out=.*not contiguous"),
    "misaligned base": (lambda: launch(out=misaligned()), ArgumentError, "out=.*4 bytes off a multiple of 16"),
    "read-only array that is written": (lambda: launch(out=read_only()), ArgumentError, "out=.*read-only.*`write`"),
    "byte-swapped array": (
        lambda: launch(x=np.zeros((ROWS, 4), ">f4")), ArgumentError, "x=.*byte order"),
    "list for a tensor": (lambda: launch(x=[1.0, 2.0]), ArgumentError, "x=.*not list"),
    "None for a tensor that is needed": (lambda: launch(x=None), ArgumentError, "x=None: is not optional"),
    "sparse tensor": (lambda: launch(x=torch.zeros(ROWS, 4).to_sparse()), ArgumentError, "x=.*strided tensor"),
    "tensor on another kind of device": (
        lambda: launch(x=torch.zeros(ROWS, 4, device="meta")), ArgumentError, "x=.*on cpu or cuda, not .* on meta"),
    "tensor for a scalar": (lambda: launch(factor=torch.tensor(1.0)), ArgumentError, "factor=.*read back"),
    "float for an integer": (lambda: launch(pitch=4.0), ArgumentError, "pitch=4.0: .*lose its fraction"),
    "integer too wide": (lambda: launch(pitch=2**31), ArgumentError, "pitch=2147483648: does not fit int32"),
    "negative for unsigned": (lambda: launch(small=-1), ArgumentError, "small=-1: does not fit uint8"),
    "float too large": (lambda: launch(factor=1e39), ArgumentError, r"factor=1e\+39: is too large for fp32"),
    "string for a scalar": (lambda: launch(factor="1.0"), ArgumentError, "factor='1.0': wants a number"),
    "empty grid": (lambda: launch(grid=0), LaunchError, "grid=0: extent x is 0"),
    "grid too large": (lambda: launch(grid=(1, 65536)), LaunchError, "extent y is 65536, at most 65535"),
    "grid that is no number": (lambda: launch(grid=1.5), LaunchError, "grid=1.5: 1.5 is not a whole number"),
    "four extents": (lambda: launch(grid=(1, 1, 1, 1)), LaunchError, "one to three extents"),
    "too many threads": (lambda: launch(block=(32, 33)), LaunchError, r"block=\(32, 33\): 1056 threads"),
    "too much shared memory": (lambda: launch(shared=300_000), LaunchError, "shared=300000 dynamic"),
    "negative shared memory": (lambda: launch(shared=-1), LaunchError, "shared=-1"),
    "reach without a declaration": (
        lambda: cuverify.load_kernel(TEXT)(1, 32, *good().values(), reach={"out": torch.zeros(1)}),
        ArgumentError, "reach='out': scale declares no"),
    "lane that is none": (
        lambda: cuverify.load_kernel(TEXT).bind(1, 32, *good().values(), lane="gpu"), ArgumentError, "lane='gpu'"),
    "lane against its tensors": (
        lambda: cuverify.load_kernel(TEXT).bind(1, 32, *good().values(), lane="device"),
        ArgumentError, "lane='device': the tensors are on cpu"),
    "slot out of range, under the checkers": (out_of_range_slot, CheckerError, r"<string>:\d+: out-of-bounds.*`out`"),
    "kernel that is not in the text": (
        lambda: cuverify.load_kernel(TEXT, kernel="skale"), ContractError, "kernel='skale' is not in <string>"),
    "text without a kernel": (
        lambda: cuverify.load_kernel("int x;\n"), ContractError, "no `extern \"C\" __global__"),
    "kernel without a contract": (
        lambda: cuverify.load_kernel('extern "C" __global__ void k(int n) {}\n'), ContractError, "`k` has no contract"),
    "contract with fewer parameters than C++": (
        lambda: cuverify.load_kernel('// @kernel k\nextern "C" __global__ void k(int n) {}\n')(1, 1, lane="host"),
        ContractError, "declares 0 parameters .* has 1"),
    "unknown package kernel": (lambda: cuverify.load_kernel("relocat"), SourceError, "no kernel 'relocat'"),
    "missing file": (lambda: cuverify.load_kernel(Path("no/such.cu")), SourceError, "no/such.cu"),
    "unknown -D": (undeclared_value, SourceError, "HEAD.*HEADS"),
    "-D that is no identifier": (lambda: cuverify.load_kernel(TEXT, **{"HE ADS": 1}), SourceError, "HE ADS"),
    "-D of a strange type": (lambda: cuverify.load_kernel(TEXT, HEADS=[8]), SourceError, "HEADS"),
    "missing header": (missing_header, SourceError, r"k\.cu:2: .*nowhere\.cuh"),
    "syntax error in a string kernel": (syntax_error_in_string, CompileError, r"cell 3:3(:\d+)?: error"),
    "unknown architecture": (
        lambda: compile_cubin(KernelSource.from_text(TEXT), "sm_70"), ArgumentError, "arch='sm_70'"),
    "missing C++ compiler": (without_compilers, ToolchainError, r"no C\+\+ compiler.*cuverify\[zig\]"),
    "unknown C++ compiler": (
        lambda: launch_with("c+++"),
        ToolchainError, r"compiler='c\+\+\+' cannot be run"),
    "missing CuPy": (without_cupy, ToolchainError, r"cuverify\[cuda1"),
    "unwritable cache": (unwritable_cache, CacheError, "below cannot be written"),
}  # fmt: skip


def launch_with(compiler: str) -> None:
    with cuverify.host_options(compiler=compiler):
        launch()


def test_the_right_arguments_are_right() -> None:
    arguments = good()
    with cuverify.checked():
        cuverify.load_kernel(TEXT)(1, 32, *arguments.values())
    assert arguments["out"][0, 0] == 11


@pytest.mark.parametrize("name", CASES)
def test_misuse(name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    act, error, message = CASES[name]
    given = {"monkeypatch": monkeypatch, "tmp": tmp_path}
    wanted = act.__code__.co_varnames[: act.__code__.co_argcount]
    with pytest.raises(error, match=message) as caught:
        act(**{key: given[key] for key in wanted if key in given})
    assert type(caught.value) is error
    if isinstance(caught.value, ArgumentError):
        assert caught.value.argument in message or caught.value.argument in str(caught.value)


# --- numpy's numbers are no misuse -----------------------------------------------------------------

POOLS = [np.zeros((40, 16), np.uint8)]

SIZES: dict[str, tuple[Callable[..., Any], tuple[int, ...]]] = {
    "accept": (accept_buffers, (2, 5, 3)),
    "commit": (commit_workspace, (300, 200)),
    "defrag": (defrag_workspace, (40, 3)),
    "plan": (plan_workspace, (2, 18, 8, 4)),
    "relocate": (lambda rows: relocate_workspace(POOLS, rows), (2000,)),
    "tree": (tree_buffers, (2, 5)),
    "verify": (verify_workspace, (2, 18, 8, 4)),
}


@pytest.mark.parametrize("kind", [np.int64, np.int16])
@pytest.mark.parametrize("name", SIZES)
def test_sizes_may_be_numpys(name: str, kind: Any) -> None:
    sizes_of, numbers = SIZES[name]
    found = sizes_of(*map(kind, numbers))
    assert found == sizes_of(*numbers)
    assert {type(extent) for buffer in found.values() for extent in buffer.shape} == {int}


@pytest.mark.parametrize("number", [True, np.True_, 2.0, np.float64(2), "2", None, np.array([2])])
def test_what_is_no_whole_number_is_no_size(number: Any) -> None:
    with pytest.raises(ArgumentError, match=r"rows=.*: wants 1 to 4 rows"):
        check_int("rows", number, 1, 4, "rows")


def test_blocks_may_be_numpys() -> None:
    assert type(grid(np.int64(4), None, 1, 1)) is int
    with pytest.raises(ArgumentError, match="num_ctas=.*0.*: wants at least one block"):
        grid(np.int64(0), None, 1, 1)
    slots, count = np.arange(3), np.array([3], np.int32)
    RelocatePlan(POOLS, slots, slots, count, num_ctas=np.int64(4), list_rows=np.int64(2))
    rows = np.zeros(3, np.int32)
    DefragPlan(POOLS, np.zeros((3, 8), np.int32), rows, rows, budget=np.int64(3))
    probs, ids = np.zeros((1, 2, 3), np.float32), np.zeros((1, 2, 3), np.int64)
    DraftTopk(np.zeros((1, 2, 9), np.float32), probs, ids, pieces=np.int64(2))


def test_plans_count_in_pythons_numbers() -> None:
    lens, bounds = np.array([20, 30], np.int32), np.array([0, 9, 18], np.int32)
    plan = VerifyPlan(
        lens, bounds, heads=np.int64(8), max_tokens=np.int16(18), max_tree_tokens=np.int8(9)
    )
    counted = (plan.heads, plan.max_tokens, plan.max_tree_tokens)
    assert counted == (8, 18, 9)
    assert {*map(type, counted)} == {int}


def test_thresholds_may_be_numpys() -> None:
    tree = np.zeros((2, 3), np.int64)
    into = AcceptBuffers.allocate(tree, batch=2, num_tokens=3, max_path=2)
    coins, probs = np.zeros((2, 3), np.float32), np.zeros((2, 2, 3, 8), np.float32)
    AcceptSampled(
        tree, tree, tree, coins, coins[:, 0].copy(), probs[0], into,
        draft_probs=probs[1], threshold_acc=np.float32(0.5),
    )  # fmt: skip
