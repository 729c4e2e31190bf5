"""The GPU lane: streams, limits, signatures, prebuilt cubins. Runs on a device only."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import cuverify
from cuverify.device import write_cubin
from cuverify.errors import ArgumentError, CompileError, ContractError, LaunchError, SourceError

pytestmark = pytest.mark.gpu

FILL = """
#include "shared.cuh"
#ifndef THREADS
#define THREADS 1024
#endif
// @kernel fill
// @param out   write fp32 [n]
// @param value value fp32
// @param n     value int64
extern "C" __global__ void __launch_bounds__(THREADS) fill(float* out, float value, long long n) {
    DYNAMIC_SHARED(cursor);
    CARVE(cursor, float, s, 1);
    long long i = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (i < n) out[i] = value;
}
"""


def fill(**values: Any) -> cuverify.Kernel:
    return cuverify.load_kernel(FILL, kernel="fill", **values)


def test_torch_and_cupy_tensors_and_a_python_float() -> None:
    import cupy

    out = torch.zeros(100, device="cuda")
    fill()(1, 128, out, 1.5, 100, shared=16)
    assert (out == 1.5).all()
    array = cupy.zeros(100, cupy.float32)
    fill()(1, 128, array, 2, 100, shared=16)
    torch.cuda.synchronize()
    assert (array == 2).all()
    with pytest.raises(ArgumentError, match="is on cpu, but out is on cuda:0"):
        cuverify.load_kernel(
            "// @kernel k\n// @param out write fp32 [n]\n// @param x read fp32 [n]\n"
            'extern "C" __global__ void k(float* out, const float* x) {}\n'
        )(1, 1, out, torch.zeros(100))


def test_the_stream_is_torchs_current_one_at_each_launch() -> None:
    out = torch.zeros(8, device="cuda")
    bound = fill().bind(1, 8, out, 3.0, 8, shared=16)
    side = torch.cuda.Stream()
    with cuverify.record_launches() as records:
        bound()
        with torch.cuda.stream(side):
            bound()
        bound()
    default = torch.cuda.current_stream().cuda_stream
    assert [r.stream for r in records] == [default, side.cuda_stream, default]
    assert {r.lane for r in records} == {"device"} and records[0].owners[0] is out
    torch.cuda.synchronize()
    assert (out == 3).all()


def test_a_bound_launch_is_captured_and_replayed() -> None:
    out = torch.zeros(8, device="cuda")
    bound = fill().bind(1, 8, out, 3.0, 8, shared=16)
    bound()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph), cuverify.record_launches() as records:
        bound()
    out.zero_()
    graph.replay()
    torch.cuda.synchronize()
    assert (out == 3).all() and len(records) == 1


def test_more_than_48_kib_of_shared_memory() -> None:
    out = torch.zeros(8, device="cuda")
    kernel = fill()
    for shared in (100_000, 200_000, 60_000):
        kernel(1, 8, out, float(shared), 8, shared=shared)
        torch.cuda.synchronize()
        assert (out == shared).all()
    with pytest.raises(LaunchError, match=r"shared=240000 dynamic .* has 232448"):
        kernel(1, 8, out, 0.0, 8, shared=240_000)


def test_launch_bounds_are_respected() -> None:
    with pytest.raises(LaunchError, match=r"256 threads, but fill was compiled for at most 128"):
        fill(THREADS=128)(1, 256, torch.zeros(8, device="cuda"), 0.0, 8, shared=16)


def test_contract_against_the_compiled_signature() -> None:
    out = torch.zeros(8, device="cuda")
    text = FILL.replace("@param n     value int64", "@param n     value int32")
    with pytest.raises(
        ContractError,
        match="parameter 2, `n`: the contract gives it 4 bytes, the compiled kernel 8",
    ):
        cuverify.load_kernel(text)(1, 8, out, 0.0, 8, shared=16)
    text = FILL.replace("// @param value value fp32\n", "")
    with pytest.raises(ContractError, match="declares 2 parameters .* has 3"):
        cuverify.load_kernel(text)(1, 8, out, 8, shared=16)


def test_compile_errors_carry_lines() -> None:
    text = FILL.replace("out[i] = value", "out[i] = missing")
    with pytest.raises(CompileError) as caught:
        cuverify.load_kernel(text, name="mine.cu")(
            1, 8, torch.zeros(8, device="cuda"), 0.0, 8, shared=16
        )
    (found,) = (d for d in caught.value.diagnostics if d.severity == "error")
    line = text.splitlines().index("    if (i < n) out[i] = missing;") + 1
    assert (found.file, found.line) == ("mine.cu", line) and "missing" in found.message


def test_an_edited_header_is_a_new_kernel(tmp_path: Path) -> None:
    header, file = tmp_path / "answer.cuh", tmp_path / "k.cu"
    header.write_text("#define ANSWER 1\n")
    file.write_text('#include "answer.cuh"\n// @kernel k\n// @param out write int32 [1]\n'
                    'extern "C" __global__ void k(int* out) { out[0] = ANSWER; }\n')  # fmt: skip
    kernel, out = cuverify.load_kernel(file), torch.zeros(1, dtype=torch.int32, device="cuda")
    for answer in (1, 2):
        header.write_text(f"#define ANSWER {answer}\n")
        kernel(1, 1, out)
        assert out.item() == answer


def test_prebuilt_cubins(tmp_path: Path) -> None:
    kernel, out = fill(THREADS=512), torch.zeros(8, device="cuda")
    with cuverify.prebuilt(tmp_path), pytest.raises(SourceError, match="holds no cubin"):
        kernel(1, 8, out, 4.0, 8, shared=16)
    major, minor = torch.cuda.get_device_capability()
    write_cubin(kernel.source, f"sm_{major}{minor}", tmp_path)
    with cuverify.prebuilt(tmp_path):
        kernel(1, 8, out, 4.0, 8, shared=16)
    torch.cuda.synchronize()
    assert (out == 4).all()


def test_addresses_beyond_32_bits() -> None:
    out = torch.zeros(2**31 + 64, dtype=torch.int8, device="cuda").view(torch.float32)
    n = out.numel()
    fill()(-(-n // 1024), 1024, out, 1.0, n, shared=16)
    assert out[-1].item() == 1 and (out[-1000:] == 1).all()


def test_a_launch_on_another_device_than_the_current_one() -> None:
    if torch.cuda.device_count() < 2:
        pytest.skip("needs two devices")
    out = torch.zeros(8, device="cuda:1")
    fill()(1, 8, out, 3.0, 8, shared=16)
    torch.cuda.synchronize(1)
    assert (out == 3).all()


def test_misuse_on_the_device_is_refused_before_the_launch() -> None:
    out = torch.zeros(16, device="cuda")
    with pytest.raises(LaunchError, match="grid=0"):
        fill()(0, 8, out, 0.0, 16, shared=16)
    with pytest.raises(ArgumentError, match="not contiguous"):
        fill()(1, 8, out[::2], 0.0, 8, shared=16)
    with pytest.raises(ArgumentError, match="float64"):
        fill()(1, 8, out.double(), 0.0, 16, shared=16)
    with pytest.raises(ArgumentError, match="lane='host'"):
        fill().bind(1, 8, out, 0.0, 16, shared=16, lane="host")
    assert np.isfinite(out.cpu().numpy()).all()


def test_cubins_of_another_compiler_give_the_same_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    how = "`cuverify compile relocate --variants --arch SM --save .cubins` writes them"
    folder = Path(__file__).parent.parent / ".cubins"
    if not folder.is_dir():
        pytest.skip(f"no carried cubins in .cubins: {how}")
    from cuverify.check_device import check_on_device

    monkeypatch.setenv("CUVERIFY_CUBINS", str(folder))
    outcome = check_on_device(
        "relocate", seed=0, examples=5, silence_s=60, progress=lambda what, done, total: None
    )
    assert outcome.totals["replays"] > 0  # of what was carried
    lacking = [f for f in outcome.findings if "holds no cubin of this text" in f.message]
    assert [str(f) for f in outcome.findings if f not in lacking] == []
    if lacking:
        pytest.skip(f".cubins lacks what a plan chooses here: {lacking[0].message}; {how}")
