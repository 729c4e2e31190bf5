"""The host twins against what GPUs did: recordings replayed, and the machinery around them."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cuverify import conformance, evidence
from cuverify.cli import main
from cuverify.conformance import NOT_RECORDED
from cuverify.conformance_inputs import PROBES, draw, fragments, to_bf16
from cuverify.contract import kernels_in
from cuverify.errors import DeviceError, EvidenceError
from cuverify.evidence import gpu
from cuverify.host.options import host_options
from cuverify.host.toolchain import find_compilers

ROOT = Path(__file__).resolve().parent.parent
COMPILERS = [compiler.name for compiler in find_compilers()]
RECORDINGS = conformance.recordings(ROOT)
COVERED = {name for probe in PROBES for name in probe.covers}

# Names of the shim and wrappers that no probe needs to run.
WAIVED = {
    **dict.fromkeys(
        ("__expf", "__exp2f", "__logf", "__log2f", "__sinf", "__cosf", "__powf", "__fdividef"),
        "approximate on the device: the host lane says nothing about its last bits",
    ),
    **dict.fromkeys(
        ("__syncthreads", "__syncwarp", "__threadfence", "__threadfence_block",
         "__threadfence_system", "__nanosleep", "__trap", "prefetch_l2",
         "early::launch_dependents", "early::wait_for_dependency", "roles::meet"),
        "gives no value",
    ),
    **dict.fromkeys(
        ("__ldca", "__ldcg", "__ldcs", "__ldcv", "__ldlu", "__stcg", "__stcs", "__stwb", "__stwt"),
        "a plain access with a hint",
    ),
    **dict.fromkeys(
        ("__global__", "__device__", "__host__", "__constant__", "__forceinline__",
         "__launch_bounds__", "__restrict__", "__align__", "__grid_constant__", "__shared__"),
        "a word of the language",
    ),
}  # fmt: skip


def recordings(*names: str) -> list[Any]:
    """Return the parameters of a test over all recordings, or one that says there are none."""
    if not RECORDINGS:
        return [pytest.param(None, marks=pytest.mark.skip(reason=NOT_RECORDED))]
    return [pytest.param(entry, id=entry.path.stem) for entry in RECORDINGS]


# --- what is recorded ----------------------------------------------------------------------------


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("recording", recordings())
def test_the_host_lane_does_what_the_gpu_did(
    recording: conformance.Recording, compiler: str, record_property: Any
) -> None:
    with host_options(compiler=compiler):
        agreements = conformance.replay(recording, ROOT)
    for entry in agreements:
        text = f"{entry.probe} {entry.output} {entry.model or ''}".strip()
        record_property(text, f"{entry.equal} of {entry.values}")
        print(f"{text}: {entry.equal} of {entry.values} equal; {entry.first or 'no difference'}")
    wrong = [entry for entry in agreements if not entry.ok]
    assert wrong == []


@pytest.mark.parametrize("recording", recordings())
def test_the_recording_is_small_and_of_the_present_wrappers(
    recording: conformance.Recording,
) -> None:
    size = sum(path.stat().st_size for path in (ROOT / conformance.FOLDER).glob("*.npz"))
    assert size < 2_000_000
    assert recording.gpu in recording.about["versions"]["GPU"]
    stale = list(conformance._staleness(recording, ROOT))
    if stale:
        pytest.skip("; ".join(f"{finding.message}: {finding.fix}" for finding in stale))


@pytest.mark.gpu
def test_this_gpu_does_what_was_recorded() -> None:
    same = [entry for entry in RECORDINGS if entry.gpu == gpu.gpu_name()]
    if not same:
        pytest.skip(NOT_RECORDED)
    if list(conformance._staleness(same[0], ROOT)):
        pytest.skip("the recording is of other wrappers")
    for probe, inputs in same[0].inputs.items():
        outputs = conformance.run_on_device(ROOT, probe, inputs)
        for name, array in same[0].outputs[probe].items():
            assert outputs[name].tobytes() == array.tobytes(), f"{probe}: {name}"


# --- what there is to record ---------------------------------------------------------------------


def test_every_probe_has_its_kernel() -> None:
    text = (ROOT / conformance.FOLDER / conformance.TEXT).read_text()
    assert list(kernels_in(text)) == [probe.kernel for probe in PROBES]


def test_every_instruction_wrapper_has_a_probe() -> None:
    found = set()
    for header in (ROOT / "kernels_cu" / "include").glob("*.cuh"):
        text = header.read_text()
        if re.search(r"^#ifdef CUVERIFY_HOST\n#error ", text, re.MULTILINE):
            continue  # it has no host lane that could differ from the GPU
        space = re.search(r"^namespace (\w+) \{", text, re.MULTILINE)
        for function in re.finditer(
            r"^(?:template <[^\n]*\n)?__device__ [^\n;]*?\b(\w+)\([^;{]*\) \{\n(.*?)^\}",
            text,
            re.MULTILINE | re.DOTALL,
        ):
            if re.search(r"\basm\b", function[2]):
                found.add(f"{space[1]}::{function[1]}" if space else function[1])
    assert {"ptx::ldmatrix_x4", "ptx::cp_async_wait", "load128_nc"} <= found
    assert found - COVERED - WAIVED.keys() == set()


def test_every_intrinsic_of_the_shim_has_a_probe_or_a_reason() -> None:
    found = set()
    for header in (ROOT / "cuverify" / "host" / "include").glob("*.h"):
        text = header.read_text().replace("\\\n", "\n")
        found |= set(
            re.findall(r"^\s*(?:static )?inline [^\n;=]*?\b((?:__|atomic)\w+)\(", text, re.M)
        )
        found |= set(re.findall(r"^#define ((?:__|atomic)\w+)\b", text, re.M))
        found |= set(re.findall(r"^CUVERIFY_(?:REDUCE|ATOMIC)\((\w+),", text, re.M))
        for used in re.finditer(r"^CUVERIFY_HALF_FUNCTIONS\((.*)\)$", text, re.M):
            _, _, name, name2, suffix = (word.strip() for word in used[1].split(","))
            body = (header.parent / "cuverify_host_half.h").read_text()
            means = {"name": name, "name2": name2, "suffix": suffix}
            for pasted in re.findall(r"\b((?:__|make_)[\w#]*##[\w#]*)\(", body):
                found.add("".join(means.get(word, word) for word in pasted.split("##")))
    assert {"__popc", "atomicCAS", "__reduce_xor_sync", "__half2float", "make_half2"} <= found
    assert found - COVERED - WAIVED.keys() == set()


def test_inputs_are_the_same_at_every_call_and_fit() -> None:
    first, second = draw(), draw()
    assert list(first) == [probe.kernel for probe in PROBES]
    for probe, inputs in first.items():
        assert len({len(array) for array in inputs.values()}) == 1, probe
        for name, array in inputs.items():
            assert array.tobytes() == second[probe][name].tobytes()
    mma = first["mma"]
    assert np.isfinite(mma["c"]).mean() > 0.9
    assert (mma["c"] == 0).any() and np.isnan(mma["c"]).any() and np.isinf(mma["c"]).any()


def test_fragments_multiply_as_matrices_do() -> None:
    rng = np.random.default_rng(5)
    a, b = rng.standard_normal((3, 16, 16)), rng.standard_normal((3, 16, 8))
    c = rng.standard_normal((3, 16, 8)).astype(np.float32)
    bits = to_bf16(a), to_bf16(b)
    a, b = ((x.astype(np.uint32) << 16).view(np.float32).astype(np.float64) for x in bits)
    left, right, sums = fragments(*bits, c)
    d = conformance.run_on_host(ROOT, "mma", {"a": left, "b": right, "c": sums})["d"]
    expected = (a @ b + c).astype(np.float32)
    _, _, laid_out = fragments(*bits, expected)
    assert np.abs(d - laid_out).max() <= 2e-6


@pytest.mark.parametrize("compiler", COMPILERS[1:])
def test_compilers_agree_to_the_bit(compiler: str) -> None:
    for probe, inputs in draw().items():
        results = []
        for name in (COMPILERS[0], compiler):
            with host_options(compiler=name, mma="sm_90"):
                results.append(conformance.run_on_host(ROOT, probe, inputs))
        for output, array in results[0].items():
            assert array.tobytes() == results[1][output].tobytes(), f"{probe}: {output}"


def test_rounding_models_differ_where_they_should() -> None:
    inputs = draw()["mma"]
    results = {}
    for model in conformance.MMA_MODELS:
        with host_options(mma=model):
            d = conformance.run_on_host(ROOT, "mma", inputs)["d"]
        results[model] = d[np.isfinite(d)][:3000]  # plain ones come first
    for one, other in (("exact", "sm_90"), ("exact", "sm_80"), ("sm_80", "sm_90")):
        share = (results[one] != results[other]).mean()
        assert 0.05 < share < 0.9, f"{one} and {other}: {share:.0%}"


def test_powers_are_held_to_two_ulp() -> None:
    x = np.array([0, 1, -126, -126.5, -200, 127, 128, np.nan, -0.5], np.float32)
    y = np.array([1, 2, 2.0**-126, 0, 0, 2.0**127, np.inf, np.nan, 0.70710677], np.float32)
    assert (conformance.power_errors(x, y) <= 1).all()
    for value in (1 + 3 * 2.0**-23, np.inf, np.nan, 0):
        assert conformance.power_errors(np.zeros(1, np.float32), np.array([value], np.float32)) > 2


# --- recording and replaying, with a made-up GPU -------------------------------------------------


@pytest.fixture
def tree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Make a source tree in which the host lane plays the GPU."""
    root = tmp_path / "tree"
    (root / conformance.FOLDER).mkdir(parents=True)
    (root / "pyproject.toml").write_text('name = "cuverify"\n')
    shutil.copy(ROOT / conformance.FOLDER / conformance.TEXT, root / conformance.FOLDER)

    def run(root: Path, probe: str, inputs: Any, poison: int = 0) -> Any:
        with host_options(mma="sm_90"):
            return conformance.run_on_host(root, probe, inputs, poison)

    monkeypatch.setattr(conformance, "run_on_device", run)
    monkeypatch.setattr(conformance, "_capability", lambda: "9.0")
    monkeypatch.setattr(gpu, "gpu_name", lambda: "NVIDIA Model T")
    small = {probe: draw()[probe] for probe in ("mma", "exponentials", "half_arithmetic", "votes")}
    small["mma"] = {name: array[:24] for name, array in small["mma"].items()}
    monkeypatch.setattr(conformance, "draw", lambda: small)
    return root


def test_a_recording_says_where_it_comes_from_and_replays(tree: Path) -> None:
    path = conformance.record(tree)
    assert path == tree / conformance.FOLDER / "model-t.json"
    (recording,) = conformance.recordings(tree)
    assert (recording.gpu, recording.mma_model) == ("NVIDIA Model T", "sm_90")
    assert recording.about["wrappers"] == conformance.wrapper_digest(tree)
    assert recording.about["versions"]["numpy"] == np.__version__
    assert recording.about["values"]["mma"] == 24 * 128
    report = conformance.report(tree, COMPILERS[:1])
    assert report.ok
    assert [finding.rule for finding in report.findings] == ["conformance-stale"]  # a few probes
    rows = {(row[2], row[3], row[4]): row for row in report.tables[0].rows}
    hardware, exact = rows["mma", "finite dots", "sm_90"], rows["mma", "finite dots", "exact"]
    assert hardware[5] == hardware[6] == 24 * 128
    assert 0 < exact[6] < exact[5]
    assert rows["exponentials", "y (2 ulp)", None][7] is None
    assert report.coverage[0].status == "inspected"
    json.dumps(report.to_json())


def test_a_difference_is_an_error_with_the_first_value(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    conformance.record(tree)
    real = conformance.run_on_host

    def wrong(root: Path, probe: str, inputs: Any) -> Any:
        outputs = real(root, probe, inputs)
        for output in outputs.values():
            output.view(np.uint32).reshape(-1)[4] ^= 0x400
        return outputs

    monkeypatch.setattr(conformance, "run_on_host", wrong)
    report = conformance.report(tree, COMPILERS[:1])
    errors = [finding for finding in report.findings if finding.severity == "error"]
    assert {finding.message.split(":")[0] for finding in errors} == {"mma", "exponentials", "votes"}
    assert "1 of 24576 out are not what NVIDIA Model T gave; first [0, 0, 4]: 0x" in str(errors)


def test_a_change_of_the_wrappers_is_reported(tree: Path) -> None:
    conformance.record(tree)
    text = tree / conformance.FOLDER / conformance.TEXT
    text.write_text(text.read_text() + "// changed\n")
    stale = [f.message for f in conformance.report(tree, COMPILERS[:1]).findings]
    assert stale[0] == "model-t.json was recorded before a change of the wrappers or the probes"
    assert "has no matrices, shuffles" in stale[1]


def test_arrays_and_their_description_belong_together(tree: Path) -> None:
    path = conformance.record(tree)
    about, arrays = path.read_text(), path.with_suffix(".npz").read_bytes()
    path.with_suffix(".npz").write_bytes(arrays[:-1] + b"x")
    with pytest.raises(EvidenceError, match="is not the file that was recorded"):
        conformance.recordings(tree)
    path.with_suffix(".npz").unlink()
    with pytest.raises(EvidenceError, match=r"model-t\.npz cannot be read"):
        conformance.recordings(tree)
    path.with_suffix(".npz").write_bytes(arrays)
    for broken in ("{", "[]", json.dumps({**json.loads(about), "schema": 7})):
        path.write_text(broken)
        with pytest.raises(EvidenceError):
            conformance.recordings(tree)
    path.write_text(about)
    assert len(conformance.recordings(tree)) == 1


def test_two_runs_that_differ_are_not_recorded(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(1)
    monkeypatch.setattr(
        conformance, "run_on_device", lambda root, probe, inputs, poison=0: {"d": rng.random(5)}
    )
    with pytest.raises(EvidenceError, match="two runs on NVIDIA Model T differ in d"):
        conformance.record(tree)
    assert not list((tree / conformance.FOLDER).glob("*.json"))


def test_nothing_is_recorded_without_a_gpu(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    before = sorted((ROOT / conformance.FOLDER).iterdir())
    with pytest.raises(DeviceError, match="no CUDA device"):
        conformance.record(ROOT)
    assert main(["conformance", "record"]) == 2
    assert "no CUDA device" in capsys.readouterr().err
    assert sorted((ROOT / conformance.FOLDER).iterdir()) == before


def test_no_recording_is_no_pass(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(evidence, "source_root", lambda: tree)
    assert main(["conformance"]) == 0
    assert "conformance: not inspected, not recorded yet" in capsys.readouterr().out
