"""Tuned values: the table, the lookup, the search."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cuverify import tuner, tuning
from cuverify.compile import max_shared_bytes
from cuverify.errors import ArgumentError, DeviceError, TuningError
from cuverify.launching import RESERVED_SHARED
from cuverify.ops.verify_attention import fitting_values, verify_attention_kernels
from cuverify.sources import KernelSource
from cuverify.tuner import KNOBS, Knob, Trial, merged, search, trial_table
from cuverify.tuning import Choice, Entry, TunedTable, find_choice, tables, tuned
from cuverify.verify_shapes import Shape
from cuverify.verify_variants import VARIANTS

NARROW = Entry("portable", 64, Choice({"START_ROWS": 16}, {"STAGES": 5}))
WIDE = Entry("portable", None, Choice({}, {"STAGES": 3}))
TABLE = TunedTable("NVIDIA H200", "sm_90", (NARROW, WIDE))


# --- the table -----------------------------------------------------------------------------------


def test_a_table_is_read_back() -> None:
    assert TunedTable.from_json(json.loads(json.dumps(TABLE.to_json()))) == TABLE


def test_the_first_entry_that_is_wide_enough_holds() -> None:
    assert TABLE.lookup("portable", 64) == NARROW.choice
    assert TABLE.lookup("portable", 65) == WIDE.choice
    assert TABLE.lookup("sm90", 8) is None
    kin = TunedTable("NVIDIA H100", "sm_90", (Entry("sm90", None, Choice(values={"TILE": 32})),))
    assert find_choice([TABLE, kin], "sm90", 8) == Choice(values={"TILE": 32})
    assert find_choice([TABLE, kin], "sm120", 8) == Choice()


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"schema": 2}, "schema 2"),
        ({"gpu": KeyError}, "lacks something: KeyError"),
        ({"entries": [{"variant": "portable"}]}, "has keys"),
        ({"entries": [{**TABLE.to_json()["entries"][0], "rows": 0}]}, "rows are 0"),
        ({"entries": [{**TABLE.to_json()["entries"][0], "values": {"STAGES": 4.5}}]}, "STAGES=4.5"),
        ({"entries": [{**TABLE.to_json()["entries"][0], "plan": {"x; y": 4}}]}, "x; y=4"),
        ({"entries": TABLE.to_json()["entries"][::-1]}, "do not ascend at 64"),
        ({"entries": 5}, "lacks something"),
    ],
)
def test_a_malformed_table_is_refused(change: Mapping[str, Any], message: str) -> None:
    document = {**TABLE.to_json(), **change}
    document = {name: value for name, value in document.items() if value is not KeyError}
    with pytest.raises(TuningError, match=message):
        TunedTable.from_json(document)


def test_every_tuned_value_is_one_of_its_text() -> None:
    plan = KernelSource.from_package("verify_plan").known_values()
    for table in tables():
        for entry in table.entries:
            text = KernelSource.from_package(VARIANTS[entry.variant].stem).known_values()
            assert set(entry.choice.plan) <= set(plan), table.gpu
            assert set(entry.choice.values) <= set(text), table.gpu


def test_the_lookup_takes_the_gpu_before_its_kin(monkeypatch: pytest.MonkeyPatch) -> None:
    kin = TunedTable("NVIDIA H100", "sm_90", (Entry("portable", None, Choice({"X": 1})),))
    monkeypatch.setattr(tuning, "tables", lambda: (kin, TABLE))
    known = {"architecture": "sm_90", "variant": "portable", "rows": 64}
    assert tuned("NVIDIA H200", **known) == NARROW.choice
    assert tuned("NVIDIA H100", **known) == Choice({"X": 1})
    assert tuned("NVIDIA GH200", **known) == Choice({"X": 1})
    assert tuned("NVIDIA H200", "sm_120", variant="sm90", rows=8) == Choice()


def test_the_host_lane_has_no_tuned_values() -> None:
    for device in (None, "cpu"):
        assert tuning.choice_for(device, variant="portable", rows=64) == Choice()


def test_steps_take_tuned_values_unless_they_are_given_some(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from cuverify.ops import verify_attention, verify_plan
    from cuverify.own_attention import OwnAttention
    from cuverify.verify_problem import Problem, new_pool

    asked: list[tuple[str, int]] = []

    def choice_for(device: str | None, *, variant: str, rows: int) -> Choice:
        asked.append((variant, rows))
        return Choice({"START_ROWS": 16}, {"STAGES": 5})

    monkeypatch.setattr(verify_plan, "choice_for", choice_for)
    monkeypatch.setattr(verify_attention, "choice_for", choice_for)
    problem = Problem(Shape((40, 9), 3), new_pool(60, "cpu"), copies=1)
    own = OwnAttention.of(problem)
    assert own.judge() is None
    assert set(asked) == {("portable", 3 * 8)}
    assert own.plan.values == {**VARIANTS["portable"].plan, "START_ROWS": 16}
    assert own.layers[0].partials.launch.source.values["STAGES"] == 5
    given = OwnAttention.of(problem, values={}, plan_values={"LEAST_ROWS": 16})
    assert given.plan.values == {"LEAST_ROWS": 16}
    assert "STAGES" not in given.layers[0].partials.launch.source.values


@pytest.mark.parametrize("stages", [4, 5, 6])
def test_given_values_leave_those_that_still_fit(stages: int) -> None:
    # else a candidate of the tuner would be refused where it fits with fewer rows a tile
    columns, room = {"LATENT": 512, "ROPE": 64}, max_shared_bytes("sm_90") + RESERVED_SHARED
    fitting = fitting_values("portable", room, **columns, STAGES=stages)
    assert fitting == (VARIANTS["portable"].roomy if stages == 4 else {})
    values = {**columns, **fitting, "STAGES": stages}
    shared = verify_attention_kernels("portable", **values)[0].declared_shared()
    assert shared is not None and shared <= max_shared_bytes("sm_90")


# --- the search ----------------------------------------------------------------------------------


def test_every_knob_is_a_value_of_its_text() -> None:
    plan = KernelSource.from_package("verify_plan").known_values()
    for variant, knobs in KNOBS.items():
        text = KernelSource.from_package(VARIANTS[variant].stem).known_values()
        for knob in knobs:
            known = plan if knob.part == "plan" else text
            assert knob.name in known, f"{variant}: {knob.name}"
            start = tuner.default_values(variant)[knob.name]
            assert set(knob.candidates) - {start}, f"{variant}: {knob.name} has no choice"


def test_defaults_are_not_measured_twice() -> None:
    assert tuner.default_values("portable")["STAGES"] == 4
    _, trials = search(
        "portable", [ROOTS], lambda *given: 5.0, classes=((64, 8),), defaults={"ROOT_HALVES": 3}
    )
    assert [trial.value for trial in trials] == [None, 1, 2, 4]


def best_at(**best: int) -> tuner.Measure:
    """Return a GPU on which each value costs ten percent for each step away from the best one."""

    def measure(shape: Shape, variant: str, choice: Choice) -> float | None:
        given = {**choice.plan, **choice.values}
        if given.get("STAGES") == 6:
            return None  # wrong, or does not compile
        away = sum(abs(given.get(name, 4) - value) for name, value in best.items())
        return shape.rows * 1.1**away

    return measure


ROOTS, STAGES = Knob("plan", "ROOT_HALVES", (1, 2, 3, 4)), Knob("values", "STAGES", (3, 4, 5, 6))


def test_the_search_finds_what_is_best_for_each_width() -> None:
    entries, trials = search(
        "portable",
        [ROOTS, STAGES],
        best_at(ROOT_HALVES=2, STAGES=5),
        classes=((64, 8), (None, 64)),
        steps=("1x1k", "16x4k"),
    )
    found = Choice({"ROOT_HALVES": 2}, {"STAGES": 5})
    assert entries == [Entry("portable", 64, found), Entry("portable", None, found)]
    assert len(trials) == 2 * (1 + 4 + 4)
    assert trials[0] == Trial(64, "defaults", None, 1.0, True)
    assert trials[-1] == Trial(None, "STAGES", 6, None, False)
    table = trial_table("portable", trials)
    assert table.rows[-1] == ("more", "STAGES=6", "wrong", "no")


def test_noise_moves_nothing() -> None:
    def measure(shape: Shape, variant: str, choice: Choice) -> float:
        return 10.0 - 0.05 * bool(choice.plan or choice.values)  # half a percent

    entries, trials = search("portable", [ROOTS, STAGES], measure, classes=((64, 8),))
    assert entries == [Entry("portable", 64, Choice())]
    assert not any(trial.kept for trial in trials[1:])


def test_a_search_that_is_stopped_keeps_what_is_finished() -> None:
    asked = iter([True] * 5 + [False])
    entries, trials = search(
        "portable",
        [ROOTS],
        best_at(ROOT_HALVES=3),
        classes=((64, 8), (128, 16)),
        keep_going=lambda: next(asked),
    )
    assert [entry.rows for entry in entries] == [64]
    assert len(trials) == 1 + 4 + 1 + 1


def test_defaults_must_be_right() -> None:
    with pytest.raises(DeviceError, match="'portable' is wrong with its defaults, tree 8"):
        search("portable", [], lambda *given: None)


def test_classes_are_those_that_hold_the_rows() -> None:
    assert tuner.classes_of(()) == tuner.CLASSES
    assert tuner.classes_of((9, 64, 65)) == ((64, 8), (128, 16))
    assert tuner.classes_of((10_000,)) == ((None, 129),)
    with pytest.raises(ArgumentError, match="rows=0"):
        tuner.classes_of((0,))


def test_old_entries_stay_beside_new_ones() -> None:
    new = Entry("portable", 64, Choice({"START_ROWS": 96}))
    other = Entry("sm90", 64, Choice())
    assert merged([NARROW, WIDE], [other, new]) == (new, WIDE, other)
    TunedTable("g", "sm_90", merged([WIDE], [other, new]))._check_order()


def test_tuning_needs_a_gpu_and_a_known_variant(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="no CUDA device"):
        tuner.tune(folder=tmp_path)
    with pytest.raises(ArgumentError, match="variants='sm77'"):
        tuner.tune(["sm77"], folder=tmp_path)


def test_a_table_is_written_and_keeps_what_is_not_searched(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    import torch

    from cuverify.evidence import gpu

    monkeypatch.setattr(gpu, "gpu_name", lambda: "NVIDIA RTX PRO 6000")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: (12, 0))
    monkeypatch.setattr(tuner, "Measuring", lambda: best_at(STAGES=5, ROOT_HALVES=3))
    kept = Entry("sm90", None, Choice(values={"COMBINE_UNROLL": 8}))
    path = tmp_path / "rtx-pro-6000.json"
    old = TunedTable("NVIDIA RTX PRO 6000", "sm_120", (kept,))
    path.write_text(json.dumps(old.to_json()))
    report, written = tuner.tune(folder=tmp_path)
    assert written == path
    table = TunedTable.from_json(json.loads(path.read_text()))
    assert table.architecture == "sm_120"
    assert [entry.rows for entry in table.entries[:-1]] == [64, 128, 256, 512, None]
    choice = table.lookup("portable", 64)
    assert choice is not None
    assert (choice.plan["ROOT_HALVES"], choice.values["STAGES"]) == (3, 5)
    assert table.entries[-1] == kept
    assert report.tables[0].title == "values of portable"
    searched, _ = tuner.tune(["portable"], rows=(100,), folder=tmp_path)
    assert {row[0] for row in searched.tables[0].rows} == {"to 128"}
    tuner.tune(["portable"], folder=tmp_path, seconds=1e-9)
    assert TunedTable.from_json(json.loads(path.read_text())) == table, "nothing was finished"


@pytest.mark.gpu
def test_a_candidate_is_judged_before_it_is_timed() -> None:
    measure = tuner.Measuring(repeats=2)
    shape = Shape.parse("1x1k:8")
    assert (measure(shape, "portable", Choice()) or 0) > 0
    assert measure(shape, "portable", Choice(values={"STAGES": 1})) is None
