"""The engine of `cuverify check`: every kind of fault becomes a finding, every gap a line."""

from __future__ import annotations

import contextlib
import importlib
import json
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from cuverify.validators.child import ChildOutcome
from cuverify.validators.compare import compare_all, host_array

from cuverify import cases, check, check_device, check_shares, resources
from cuverify.check import run_checks
from cuverify.check_device import DeviceResult, check_on_device
from cuverify.check_findings import MergedFindings
from cuverify.errors import ArgumentError, CaseError, DeviceError, ToolchainError
from cuverify.host.options import host_options
from cuverify.report import Coverage, Finding, Report

CASES = Path(__file__).with_name("check_cases.py")
ARCHS = ["sm_80", "sm_90"]


def reference(name: str) -> str:
    return f"{CASES}:{name}"


def checked(*names: str, **options: Any) -> Report:
    options = {"architectures": ARCHS, "device": "cpu", "second_opinions": 0, **options}
    return run_checks([reference(name) for name in names], **options)


def rules(report: Report) -> list[str]:
    return [finding.rule for finding in report.findings]


def line(report: Report, subject: str) -> str:
    (found,) = [entry for entry in report.coverage if entry.subject == subject]
    return f"{found.status}, {found.detail}"


# --- on any machine ------------------------------------------------------------------------------


def test_a_clean_case_is_compiled_run_and_compared() -> None:
    told: list[tuple[str, int, int]] = []
    report = checked("CLEAN", progress=lambda *step: told.append(step))
    assert report.ok
    assert report.findings == []
    taken, ran = report.tables
    columns = list(taken.columns)
    assert [row[columns.index("arch")] for row in taken.rows] == ARCHS
    assert {row[columns.index("kernel")] for row in taken.rows} == {"saxpy"}
    assert all(row[columns.index("registers")] > 0 for row in taken.rows)
    assert all(row[columns.index("dynamic shared B")] == 0 for row in taken.rows)
    assert ran.rows == [["clean", 1, 2, 8, 0, 0]]
    assert line(report, "sm_90") == "inspected, 1 kernel compiled and resource-checked, not run"
    assert line(report, "host lane").startswith("inspected, 2 batches, 3 schedules, compiler ")
    assert line(report, "capture") == "not inspected, not asked for (device='cpu')"
    assert told[0][0].startswith("clean: compile ")
    assert told[-1] == ("clean: host lane drawn 1", 1, 2)
    assert all(0 <= done < total for _, done, total in told)
    json.dumps(report.to_json())
    assert "torch" in report.environment


def test_a_wrong_result_is_a_finding_with_the_first_element() -> None:
    report = checked("WRONG")
    assert rules(report) == ["host-mismatch"]
    (finding,) = report.findings
    assert finding.message.startswith("wrong on drawn 0, ascending: out[0] is ")
    assert finding.evidence["differ"] == 100
    assert finding.evidence["seen_times"] == 6  # 2 batches with 3 schedules
    assert not report.ok


def test_a_race_is_a_finding_at_the_kernels_line() -> None:
    report = checked("RACES")
    assert set(rules(report)) == {"host-race"}
    places = {finding.where for finding in report.findings}
    assert places <= {"races.cu:10", "races.cu:11"}
    assert all("__syncthreads" in str(finding.fix) for finding in report.findings)
    assert line(report, "host lane").startswith("inspected, 2 batches")


def test_an_overrun_is_a_finding_and_is_not_run_without_checkers() -> None:
    report = checked("OVERRUNS")
    assert set(rules(report)) == {"host-out-of-bounds"}
    assert report.findings[0].where == "overruns.cu:10"
    assert "byte 400 of 400" in str(report.findings[0].evidence["argument"])
    assert report.tables[1].rows[0][3] == 6  # three schedules a batch, no plain run


def test_a_compile_error_is_a_finding_once_for_all_architectures() -> None:
    report = checked("DOES_NOT_COMPILE")
    assert rules(report) == ["compile", "host-compile"]
    device, host = report.findings
    assert (device.where, host.where) == ("does_not_compile.cu:10", "does_not_compile.cu:10")
    assert '"z" is undefined' in device.message
    assert line(report, "sm_80") == "not inspected, nothing compiled"
    assert line(report, "host lane") == "not inspected, no run came to its end"


def test_a_spill_is_a_warning() -> None:
    report = checked("SPILLING")
    assert rules(report) == ["compile-spill"]
    (finding,) = report.findings
    assert finding.severity == "warning"
    assert set(finding.evidence["spill_bytes"]) == set(ARCHS)
    assert report.ok


def test_shared_memory_beyond_a_gpus_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuverify import compile

    importlib.import_module("cuverify.host.lane")  # or it would take what is put here for good
    monkeypatch.setattr(compile, "max_shared_bytes", lambda arch: -1 if arch == "sm_80" else 0)
    report = checked("CLEAN")
    assert rules(report) == ["compile-shared"]
    assert "on sm_80" in report.findings[0].message
    assert report.ok


@pytest.mark.parametrize("name", ["NO_BATCHES", "NO_REFILL"])
def test_a_broken_case_is_a_finding_and_no_crash(name: str) -> None:
    report = checked(name)
    assert rules(report) == ["case"]
    assert "ZeroDivisionError" in report.findings[0].message
    assert str(report.findings[0].where).startswith("tests/check_cases.py:")


def test_a_case_that_judges_nothing_is_no_pass() -> None:
    case = cases.load(reference("CLEAN"))

    class Vacuous(type(case)):  # type: ignore[misc]
        def step(self, batch: Any, xp: Any) -> Any:
            step = super().step(batch, xp)
            # an output that nobody resets is right from the second run on, and so is the first
            # run's where the case prepares it by the step itself
            step.poison = step.__call__
            return step

    report = run_checks([Vacuous("vacuous")], architectures=[], device="cpu", second_opinions=0)
    assert rules(report) == ["case"]
    assert "nothing was judged" in report.findings[0].message


def test_cases_are_independent_of_each_other() -> None:
    report = checked("NO_BATCHES", "WRONG", "CLEAN", architectures=[])
    assert rules(report) == ["case", "host-mismatch"]
    assert [row[0] for row in report.tables[1].rows] == ["no_batches", "wrong", "clean"]
    assert line(report, "compile") == "not inspected, no architecture was asked for"


def test_a_case_beside_others_is_judged_as_alone() -> None:
    names = ["RACES", "NO_REFILL", "WRONG", "OVERRUNS"]
    together = checked(*names, architectures=[], seed=4, examples=3)
    alone = [checked(name, architectures=[], seed=4, examples=3) for name in names]
    assert together.findings == [found for report in alone for found in report.findings]
    assert together.tables[1].rows == [row for report in alone for row in report.tables[1].rows]


def test_a_case_that_ends_its_process_leaves_the_others_alone() -> None:
    report = checked("DIES", "CLEAN", architectures=[])
    (finding,) = report.findings
    assert finding.rule == "host-process"
    assert finding.message.startswith("dies: the process")
    assert "SIGABRT" in finding.message
    assert finding.evidence["inputs"] == "drawn 0"
    assert [row[:4] for row in report.tables[1].rows] == [["dies", 1, 1, 0], ["clean", 1, 2, 8]]
    assert not report.ok


def fitting(step: Any, others: list[tuple[str, Any]], most: int = 3) -> Iterator[str]:
    """Write batches that a step takes into it, one after another, and yield their labels."""
    for label, batch in others:
        with contextlib.suppress(CaseError):
            step.refill(batch)
            yield label
            most -= 1
        if not most:
            return


@pytest.mark.parametrize("name", cases.names())
def test_a_step_follows_the_other_batches_that_it_takes(name: str) -> None:
    case = cases.load(name)
    taken = 0
    # batches of the host lane need not come in groups; those of a GPU do
    for method in (case.batches, case.device_batches):
        batches = cases.draw(method, seed=1, examples=None)
        for number in range(0, len(batches), max(1, len(batches) // 12)):
            label, batch = batches[number]
            step = case.step(batch, "numpy")
            for other_label in fitting(step, batches[number + 1 :] + batches[:number]):
                step.poison()
                expected = step.expected()
                step()
                outputs = {key: host_array(output) for key, output in step.outputs.items()}
                wrong = compare_all(outputs, expected, getattr(case, "tolerances", None))
                assert wrong == [], f"{other_label} after {label}"
                taken += 1
        if taken:
            break
    assert taken > 0


@pytest.mark.parametrize("name", ["verify_attention", "verify_gqa"])
def test_large_batches_are_large(name: str) -> None:
    batches = cases.draw(cases.load(name).device_batches, seed=0, examples=None)
    large = [batch for label, batch in batches if ", large, " in label]
    assert len(large) >= 5
    assert all(batch.capacity.tree > 1 or batch.capacity.listed > 0 for batch in large)


def test_settings_of_the_host_lane_hold_for_cases_beside_others() -> None:
    with host_options(compiler="no-such-compiler"), pytest.raises(ToolchainError):
        checked("CLEAN", "WRONG", architectures=[])


def test_an_interrupt_ends_cases_that_say_nothing() -> None:
    def interrupted() -> None:
        with check_shares.HostShares(seed=0, examples=None, second_opinions=0) as shares:
            shares.begin(reference("SLEEPS"))
            time.sleep(1.0)
            raise KeyboardInterrupt

    started = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        interrupted()
    assert time.monotonic() - started < 30  # it sleeps for a minute


def test_how_a_child_of_a_check_ends() -> None:
    silent = check_shares.result_of("made up", ChildOutcome("timeout"))
    assert ["said nothing for 900 s" in found.message for found in silent.findings] == [True]
    raised = ChildOutcome("raised", error="ValueError: no", kind="ValueError", trace="a trace")
    (found,) = check_shares.result_of("made up", raised).findings
    assert found.message.endswith("ValueError: no")
    assert found.evidence == {"log": "a trace"}
    missing = ChildOutcome("raised", error="ToolchainError: no compiler", kind="ToolchainError")
    with pytest.raises(ToolchainError, match=r"^no compiler$"):
        check_shares.result_of("made up", missing)


def test_the_seed_and_the_number_of_examples_reach_the_case() -> None:
    seen = []
    for seed in (0, 0, 1):
        report = checked("WRONG", architectures=[], seed=seed, examples=1)
        assert report.tables[1].rows[0][2] == 1
        seen.append(report.findings[0].evidence["actual"])
    assert seen[0] == seen[1] != seen[2]


def test_the_relocate_case_passes() -> None:
    report = run_checks(
        ["relocate"], architectures=["sm_90"], examples=2, device="cpu", second_opinions=0
    )
    assert report.findings == []
    kernels = cases.load("relocate").kernels()
    assert report.tables[1].rows[0][:2] == ["relocate", len(kernels)]


def test_an_interrupt_passes_through() -> None:
    def interrupt(what: str, done: int, total: int) -> None:
        if "host lane" in what:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        checked("CLEAN", architectures=[], progress=interrupt)


def test_a_missing_compiler_is_no_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuverify.host import lane

    def none(name: str | None = None) -> Any:
        raise ToolchainError("no C++ compiler was found")

    monkeypatch.setattr(lane, "find_compiler", none)
    with pytest.raises(ToolchainError, match="no C\\+\\+ compiler"):
        checked("CLEAN", architectures=[])


def test_bad_arguments_are_named() -> None:
    with pytest.raises(ArgumentError, match="architectures='sm_42'"):
        checked("CLEAN", architectures=["sm_42"])
    with pytest.raises(ArgumentError, match="device='tpu'"):
        checked("CLEAN", device="tpu")


# --- finding cases -------------------------------------------------------------------------------


def test_the_packages_cases_are_found_by_name() -> None:
    assert "relocate" in cases.names()
    assert cases.load("relocate") is cases.load("relocate")
    assert isinstance(cases.load("relocate"), cases.CheckCase)


@pytest.mark.parametrize(
    ("wanted", "message"),
    [
        ("relocat", "there is no case 'relocat'; known are .*relocate"),
        ("no/such.py:CASE", "no/such.py does not import: FileNotFoundError"),
        ("no_such_module:CASE", "does not import: ModuleNotFoundError"),
        (f"{CASES}:NO_SUCH", "has no attribute 'NO_SUCH'"),
        (f"{CASES}:NOT_A_CASE", "lacks name, kernels, batches, device_batches, step"),
        (f"{CASES}", "has no attribute 'CASE'"),
    ],
)
def test_what_is_no_case_is_named(wanted: str, message: str) -> None:
    with pytest.raises(CaseError, match=message):
        cases.load(wanted)


def test_batches_must_be_labelled_and_some() -> None:
    def none() -> list[Any]:
        return []

    def bare() -> Iterator[Any]:
        yield 7

    with pytest.raises(CaseError, match="gave no batch"):
        cases.draw(none, seed=0, examples=None)
    with pytest.raises(CaseError, match="gave int as batch 0"):
        cases.draw(bare, seed=0, examples=None)


def test_findings_of_one_kind_are_one_line() -> None:
    merged = MergedFindings()
    for number in range(3):
        merged.add(Finding("r", "error", f"message {number}", evidence={"n": number}), "a")
    merged.add(Finding("r", "error", "another"), "b")
    first, second = merged
    assert (first.message, first.evidence) == ("message 0", {"n": 0, "seen_times": 3})
    assert second.evidence == {}


# --- the GPU stage, with made-up children --------------------------------------------------------

TASKS = """
import os, time

def begin(work, emit, number):
    emit({"kind": "begin", "batch": number, "label": f"batch {number}"})

def end(emit, **findings):
    emit({"kind": "end", "findings": [dict(rule=rule, severity="error", message=text, where=None,
                                           evidence={"output": "y"}, fix=None)
                                      for rule, text in findings.items()],
          "coverage": [dict(subject="graph nodes", status="not inspected", detail="no bindings"),
                       dict(subject="capture", status="inspected", detail="")],
          "summary": {"captures": 1, "launches": 2, "kernel_nodes": None, "replays": 4}})

def start(work, emit, total=3):
    emit({"kind": "device", "device": {"GPU": "Model T", "arch": "sm_90"}})
    emit({"kind": "batches", "batches": total})
    return range(work["first"], total, work["stride"])

def clean(work, emit):
    for number in start(work, emit):
        begin(work, emit, number)
        end(emit)

def wrong(work, emit):
    for number in start(work, emit):
        begin(work, emit, number)
        end(emit, CV601="differs")

def hangs_on_1(work, emit):
    for number in start(work, emit):
        begin(work, emit, number)
        if number == 1:
            time.sleep(600)
        end(emit)

def dies_always(work, emit):
    for number in start(work, emit, total=9):
        begin(work, emit, number)
        os._exit(9)

def loses_the_context_on_the_last(work, emit):
    for number in start(work, emit):
        begin(work, emit, number)
        end(emit, **({"CV903": "lost"} if number == 2 else {}))
        if number == 2:
            emit({"kind": "restart"})
            return

def loses_the_context_on_0(work, emit):
    for number in start(work, emit):
        begin(work, emit, number)
        end(emit, **({"CV903": "lost"} if number == 0 else {}))
        if number == 0:
            emit({"kind": "restart"})
            return

def cannot_start(work, emit):
    raise ImportError("no such library")

def lacks_a_tool(work, emit):
    from cuverify.errors import ToolchainError
    raise ToolchainError("CuPy is missing; pip install it")

def tells_its_threads(work, emit):
    for number in start(work, emit):
        begin(work, emit, number)
        end(emit, threads=os.environ["OMP_NUM_THREADS"])
"""


@pytest.fixture
def children(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    (tmp_path / "made_up_children.py").write_text(TASKS)
    monkeypatch.syspath_prepend(tmp_path)

    def run(name: str, silence_s: float = 30.0, jobs: int = 1) -> DeviceResult:
        return check_on_device(
            "case",
            seed=0,
            examples=None,
            silence_s=silence_s,
            progress=lambda label, done, total: None,
            jobs=jobs,
            task=f"made_up_children:{name}",
        )

    return run


def found(result: DeviceResult) -> list[str]:
    return [finding.rule for finding in result.findings]


def test_clean_children_are_counted(children: Any) -> None:
    result = children("clean")
    assert result.findings == []
    assert result.device == {"GPU": "Model T", "arch": "sm_90"}
    assert result.batches == 3
    assert result.totals == {"captures": 3, "launches": 6, "kernel_nodes": 0, "replays": 12}
    assert {gap.subject for gap in result.gaps} == {"graph nodes"}


@pytest.mark.parametrize("jobs", [2, 3, 5])
def test_shares_of_several_children_are_added_up(children: Any, jobs: int) -> None:
    """Also where a child has no batch to do."""
    result = children("wrong", jobs=jobs)
    assert found(result) == ["CV601"] * 3
    assert result.batches == 3
    assert result.totals["replays"] == 12
    assert result.device == {"GPU": "Model T", "arch": "sm_90"}


def test_a_share_that_dies_leaves_the_others_alone(children: Any) -> None:
    result = children("hangs_on_1", silence_s=2.0, jobs=2)
    assert found(result) == ["CV904"]
    assert result.batches == 2


def test_what_dying_shares_leave_is_counted(children: Any) -> None:
    result = children("dies_always", jobs=2)  # 9 batches: 5 and 4
    assert found(result) == ["CV905"] * 8
    assert [gap.detail for gap in result.gaps] == ["1 of 9 were left after runs that broke off"]


def test_a_hang_costs_one_batch(children: Any) -> None:
    result = children("hangs_on_1", silence_s=2.0)
    assert found(result) == ["CV904"]
    assert "no answer for 2 s on batch 1" in result.findings[0].message
    assert result.batches == 2


def test_children_that_always_die_are_given_up(children: Any) -> None:
    result = children("dies_always")
    assert found(result) == ["CV905"] * (1 + check_device.RESTARTS)
    assert "ended with status 9" in result.findings[0].message
    assert result.gaps[-1].detail == "5 of 9 were left after runs that broke off"


@pytest.mark.parametrize("name", ["loses_the_context_on_0", "loses_the_context_on_the_last"])
def test_a_lost_context_costs_one_child(children: Any, name: str) -> None:
    result = children(name)
    assert found(result) == ["CV903"]
    assert result.batches == 3
    assert not any("broke off" in gap.detail for gap in result.gaps)


def test_a_child_that_cannot_start_is_not_tried_again(children: Any) -> None:
    result = children("cannot_start")
    assert found(result) == ["CV905"]
    assert "ImportError: no such library" in result.findings[0].message
    assert "Traceback" in result.findings[0].evidence["output"]
    result = children("lacks_a_tool")
    assert result.findings == []
    assert result.gaps[0].detail == "CuPy is missing; pip install it"


@pytest.mark.parametrize(("set_before", "share"), [(None, "2"), ("3", "3")])
def test_children_share_the_processors(
    set_before: str | None, share: str, children: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resources, "processors", lambda: 8)
    monkeypatch.setattr(check_device, "processors", lambda: 8)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if set_before is not None:
        monkeypatch.setenv("OMP_NUM_THREADS", set_before)
    assert {finding.message for finding in children("tells_its_threads").findings} == {share}


@pytest.fixture
def with_gpu(monkeypatch: pytest.MonkeyPatch) -> DeviceResult:
    """Make the engine believe in a GPU whose children say what the result holds."""
    result = DeviceResult(
        findings=[
            Finding("CV601", "error", "replay 1: y[0] is 1", evidence={"output": "y"}),
            Finding("CV601", "error", "replay 2: y[3] is 1", evidence={"output": "y"}),
        ],
        gaps=[Coverage("graph nodes", "not inspected", "no bindings")] * 3,
        batches=3,
        totals={"captures": 3, "launches": 6, "kernel_nodes": 6, "replays": 12},
        device={"GPU": "Model T", "arch": "sm_90"},
    )
    monkeypatch.setattr(check, "_why_no_gpu", lambda device: None)
    monkeypatch.setattr(check_device, "check_on_device", lambda case, **options: result)
    monkeypatch.setattr(check_device, "jobs_of_this_machine", lambda: 1)
    return result


def test_the_gpu_stage_is_part_of_the_report(with_gpu: DeviceResult) -> None:
    report = checked("CLEAN", device="auto")
    (finding,) = report.findings
    assert finding.message == "clean: replay 1: y[0] is 1"
    assert finding.evidence == {"case": "clean", "output": "y", "seen_times": 2}
    assert report.tables[1].rows == [["clean", 1, 2, 8, 3, 12]]
    assert line(report, "sm_90").endswith(", run")
    assert line(report, "sm_80").endswith(", not run")
    assert line(report, "capture") == (
        "inspected, 3 captures, 6 launches recorded, 6 kernel nodes, 12 judged replays on Model T"
    )
    assert line(report, "clean: graph nodes") == "not inspected, no bindings (3 times)"
    assert report.environment["GPU"] == "Model T"


def test_a_case_object_that_a_child_cannot_find_is_a_gap(with_gpu: DeviceResult) -> None:
    report = run_checks([cases.load(reference("CLEAN"))], architectures=[], second_opinions=0)
    assert line(report, "clean: GPU batches").startswith("not inspected, the case is an object")
    assert line(report, "capture") == "not inspected, no capture came to its end"


def test_a_gpu_that_is_insisted_on_must_be_there(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_why_no_gpu", lambda device: "no CUDA device")
    with pytest.raises(DeviceError, match="no CUDA device"):
        checked("CLEAN", device="cuda")
    assert line(checked("CLEAN", device="auto"), "capture") == "not inspected, no CUDA device"


# --- on a GPU ------------------------------------------------------------------------------------


def on_gpu(name: str, *, examples: int = 1, silence_s: float = 90.0) -> DeviceResult:
    return check_on_device(
        reference(name),
        seed=0,
        examples=examples,
        silence_s=silence_s,
        progress=lambda label, done, total: None,
    )


def assert_the_gpu_answers() -> None:
    import torch

    assert int(torch.arange(5, device="cuda").sum()) == 10


@pytest.mark.gpu
def test_on_a_gpu_a_clean_case_is_captured_and_replayed() -> None:
    report = run_checks([reference("CLEAN")], architectures=ARCHS, device="cuda", second_opinions=0)
    assert report.findings == []
    assert report.tables[1].rows == [["clean", 1, 2, 8, 3, 15]]
    assert "3 captures, 3 launches recorded" in line(report, "capture")


@pytest.mark.gpu
def test_on_a_gpu_a_null_stream_launch_is_a_finding() -> None:
    result = on_gpu("NULL_STREAM", examples=2)
    assert {"CV101", "CV204", "CV602"} == set(found(result))
    assert result.batches == 2


@pytest.mark.gpu
def test_on_a_gpu_a_hang_is_ended_and_the_parent_lives() -> None:
    assert_the_gpu_answers()
    result = on_gpu("HANGS", silence_s=25.0)
    assert found(result) == ["CV904"]
    assert "no answer for 25 s on drawn 0" in result.findings[0].message
    assert_the_gpu_answers()


@pytest.mark.gpu
def test_on_a_gpu_an_illegal_access_is_a_finding_and_the_parent_lives() -> None:
    assert_the_gpu_answers()
    result = on_gpu("ILLEGAL", examples=2)
    assert found(result) == ["CV903", "CV903"]
    assert "illegal memory access" in result.findings[0].message
    assert_the_gpu_answers()


@pytest.mark.gpu
def test_on_a_gpu_a_failed_capture_is_a_finding_and_the_rest_goes_on() -> None:
    result = on_gpu("READS_BACK", examples=2)
    assert found(result).count("CV201") == 2
    assert "CV202" in found(result)
    assert result.batches == 2
