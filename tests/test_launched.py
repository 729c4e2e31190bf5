"""What is compiled ahead is what ops launch: the same texts with the same `-D` values."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import cuverify.kernel
from cuverify import cases, tuning
from cuverify.cases import Target
from cuverify.cli import main
from cuverify.compile import ARCHITECTURES
from cuverify.errors import SourceError
from cuverify.launched import launched_sources, survey_launched
from cuverify.launches import Launch
from cuverify.ops import relocate
from cuverify.ops.verify_gqa import COMPACT_VALUES, ROW_TILES, VALUES
from cuverify.resources import package_stems, survey_of
from cuverify.sources import KernelSource
from cuverify.tuning import Choice, Entry, TunedTable
from cuverify.verify_variants import choose_variant

sys.path.insert(0, str(Path(__file__).parent))
from variant_cases import KINDS, OneKind

gpu = pytest.mark.gpu

FREE = ("HEADS", "LATENT", "ROPE", "GROUP", "PARTIAL")
"""Values that callers are free to choose, and that the list has for some models only."""

# these ops take fewer threads on the host lane than any GPU gets
ALIKE = sorted({*cases.names()} - {"accept", "draft_topk", "relocate"})


class Collecting:
    """A lane that compiles and launches nothing."""

    def __init__(self) -> None:
        self.sources: dict[KernelSource, None] = {}

    def prepare(self, launch: Launch) -> Callable[[], None]:
        self.sources[launch.source] = None
        return lambda: None


@pytest.fixture
def lane(monkeypatch: pytest.MonkeyPatch) -> Collecting:
    collecting = Collecting()
    monkeypatch.setattr(cuverify.kernel, "_lane", lambda device: collecting)
    return collecting


def assert_listed(source: KernelSource, arch: str) -> None:
    stem = Path(source.name).stem
    fixed = {name: source.values[name] for name in FREE if name in source.values}
    assert source.digest() in {each.digest() for each in launched_sources(stem, arch, fixed)}, (
        f"{stem}: {dict(source.values)}"
    )


def bound(case: Any, xp: Target) -> None:
    for number, (_, batch) in enumerate(case.batches(examples=12)):
        if number % 2 == 0 or number > 12:
            case.step(batch, xp)


@pytest.mark.parametrize("stem", ALIKE)
def test_what_steps_launch_on_the_host_is_listed(stem: str, lane: Collecting) -> None:
    bound(cases.load(stem), "numpy")
    assert lane.sources
    # the host lane runs latent attention as GPUs with the least shared memory do
    arch = "sm_120" if stem == "verify_attention" else "sm_100"
    for source in lane.sources:
        if "relocate" not in source.name:  # a part of commit and defrag
            assert_listed(source, arch)


@gpu
@pytest.mark.parametrize("stem", cases.names())
def test_what_steps_launch_on_this_gpu_is_listed(stem: str, lane: Collecting) -> None:
    import torch

    major, minor = torch.cuda.get_device_capability()
    arch = f"sm_{major}{minor}"
    bound(cases.load(stem), "torch-cuda")
    if stem == "verify_attention":
        for kind in KINDS:
            if (
                choose_variant((major, minor), latent=512, rope=64, sm_scale=1.0, pool=kind.pool)
                == kind.variant
            ):
                case = OneKind(replace(kind, values=None))
                case.step(next(case.device_batches())[1], "torch-cuda")
    assert lane.sources
    for source in lane.sources:
        assert_listed(source, arch)


@pytest.mark.parametrize("width", [16, 24, 1152])
def test_values_for_moves_on_a_gpu_are_listed(width: int, monkeypatch: pytest.MonkeyPatch) -> None:
    listed = [dict(source.values) for source in launched_sources("relocate", "sm_80")]
    pool = np.zeros((2000, width), np.uint8)
    layout = relocate._PoolLayout.of([pool], 1)
    on_a_gpu = replace(layout, tensors=tuple(replace(t, device="cuda:0") for t in layout.tensors))
    monkeypatch.setattr(relocate, "grid", lambda *given: 7)
    monkeypatch.setattr(relocate, "capability", lambda device: (8, 0))
    for capacity in (1, 4, 5, 32, 33, 64, 65, 128, 129, 1024, 1025, 1900):
        shape = relocate._Shape.of(on_a_gpu, capacity, relocate.LIST_ROWS, {})
        assert shape.values in listed, capacity


def test_tuned_values_are_listed(monkeypatch: pytest.MonkeyPatch) -> None:
    before = launched_sources("verify_plan", "sm_90a", {"HEADS": 8})
    entry = Entry("sm90", 64, Choice({"START_ROWS": 96}, {"COMBINE_UNROLL": 6}))
    table = TunedTable("NVIDIA H200", "sm_90", (entry,))
    monkeypatch.setattr(tuning, "tables", lambda: (table,))
    after = launched_sources("verify_plan", "sm_90a", {"HEADS": 8})
    new = [source.values for source in after if source not in before]
    assert new
    assert {values["START_ROWS"] for values in new} == {96}
    found = launched_sources("verify_attention_sm90", "sm_90a", {"HEADS": 8})
    assert {source.values.get("COMBINE_UNROLL") for source in found} == {None, 6}
    elsewhere = launched_sources("verify_plan", "sm_120", {"HEADS": 8})
    assert all(source.values.get("START_ROWS") != 96 for source in elsewhere)


def test_what_lacks_a_value_is_not_narrowed_by_it() -> None:
    # plans that list no slots have no type of slots
    plans = launched_sources("verify_plan", "sm_90a", {"HEADS": 8})
    without = [source for source in plans if "KV_INDEX" not in source.values]
    assert without
    narrow = launched_sources("verify_plan", "sm_90a", {"HEADS": 8, "KV_INDEX": "int"})
    assert len(narrow) < len(plans)
    assert {source.digest() for source in without} <= {source.digest() for source in narrow}


def test_a_value_narrows_the_texts_that_have_it(tmp_path: Path) -> None:
    stems, few = ["accept", "verify_attention_sm90"], {"HEADS": 8, "KV_INDEX": "int"}
    more = {"QO_INDEX": "int", "ELEMENT": "bf16", "LOGIT": "float"}
    survey = survey_launched(stems, ["sm_90a"], {**few, **more}, save=tmp_path)
    assert survey.ok
    for stem in stems:
        known = KernelSource.from_package(stem).known_values()
        own = {name: value for name, value in {**few, **more}.items() if name in known}
        for source in launched_sources(stem, "sm_90a", own):
            assert (tmp_path / f"{source.digest()}.sm_90a.cubin").exists()
    with pytest.raises(SourceError, match="NOBODYS"):
        survey_launched(stems, ["sm_90a"], {"NOBODYS": 1})


def test_values_narrow_or_replace() -> None:
    narrow = launched_sources("verify_gqa", "sm_120", {"GROUP": 8, "ROWS": 16})
    assert {(s.values["GROUP"], s.values["ROWS"]) for s in narrow} == {(8, 16)}
    replaced = launched_sources("verify_gqa", "sm_120", {"GROUP": 3, "ROWS": 16})
    assert len(replaced) == len(narrow)
    assert {source.values["GROUP"] for source in replaced} == {3}
    put_in = launched_sources("commit", "sm_120", {"PLAN_THREADS": 128})
    assert {source.values["PLAN_THREADS"] for source in put_in} == {128}


@pytest.mark.parametrize(("arch", "chosen"), [("sm_90a", VALUES), ("sm_120", COMPACT_VALUES)])
def test_row_tiles_get_what_fits_the_architecture(arch: str, chosen: Any) -> None:
    for rows in ROW_TILES["portable"]:
        for source in launched_sources("verify_gqa", arch, {"ROWS": rows}):
            assert {**source.values, **chosen[rows]} == source.values


def test_every_text_has_values_on_some_architecture() -> None:
    for stem in package_stems():
        assert any(launched_sources(stem, arch) for arch in ARCHITECTURES), stem


def test_the_command_saves_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["compile", "defrag", "--variants", "--arch", "sm_80", "-D", "POOL_INDEX=int"]
    assert main([*asked, "--save", str(tmp_path), "--json", "-"]) == 0
    wanted = launched_sources("defrag", "sm_80", {"POOL_INDEX": "int"})
    assert len(wanted) == 2
    names = {f"{source.digest()}.sm_80.cubin" for source in wanted}
    assert {path.name for path in tmp_path.iterdir()} == names
    table = json.loads(capsys.readouterr().out)["tables"][0]
    at = table["columns"].index("values")
    assert {row[at] for row in table["rows"]} == {
        f"SEQ_INDEX={index}" for index in ("int", "long long")
    }


def test_nothing_spills_on_hopper() -> None:
    fixed = {"HEADS": 8, "KV_INDEX": "int", "QO_INDEX": "int", "ELEMENT": "bf16"}
    pairs = [
        (source, "sm_90a") for source in launched_sources("verify_attention_sm90", "sm_90a", fixed)
    ]
    table = survey_of(pairs, ["sm_90a"], with_values=True).tables[0]
    spill, values = table.columns.index("spill B"), table.columns.index("values")
    assert {row[values] for row in table.rows} == {""}
    assert {row[spill] for row in table.rows} == {0}


def test_the_command_refuses_other_texts(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["compile", "my.cu", "--variants"]) == 2
    assert "ops launch the package's own" in capsys.readouterr().err
