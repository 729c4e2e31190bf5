"""The capture validator on bare steps, on a GPU; its records from one are judged everywhere."""

from __future__ import annotations

import functools
import gc
import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cuverify.validators import CallableCase, rules, validate, validate_factory
from cuverify.validators.capture import capture_and_replay
from cuverify.validators.records import from_plain
from cuverify.validators.subject import CallableStep

from cuverify import cases
from cuverify.report import Report

HERE = Path(__file__).parent
STEPS = HERE / "capture_steps.py"
RECORDED = sorted((HERE / "recorded").glob("*.json"))

CLEAN = ("clean", "matmul", "fork_and_join", "pinned_upload")
# the rules that must be named; others may be
FAULTY = {
    "null_stream": {"CV101", "CV204", "CV602"},
    "cached_stream": {"CV101", "CV103"},
    "waits": {"CV201", "CV202"},
    "allocates": {"CV201", "CV203"},
    "several": {"CV101", "CV201", "CV202", "CV203", "CV205", "CV206", "CV410"},
    "raises": {"CV201"},
    "frozen_length": {"CV301", "CV302", "CV601"},
    "freed_input": {"CV401"},
    "pageable_copy": {"CV214"},
    "accumulates": {"CV604"},
    "unwritten": {"CV605"},
    "stale_plan": {"CV306", "CV601"},
    "side_thread": {"CV207"},
    "python_float": {"CV607"},
}


def line_of(text: str, file: Path = STEPS) -> int:
    """Return the number of the only line that holds a text."""
    (number,) = (
        number for number, line in enumerate(file.read_text().splitlines(), 1) if text in line
    )
    return number


def names(report: Report) -> set[str]:
    return {finding.rule for finding in report.findings}


def places(report: Report, rule: str) -> set[int]:
    """Return the lines of the steps' file that findings of a rule name."""
    found = set()
    for finding in report.findings:
        if finding.rule == rule and finding.where:
            file, _, line = finding.where.rpartition(":")
            assert file.endswith("capture_steps.py"), finding.where
            found.add(int(line))
    return found


# --- recordings ----------------------------------------------------------------------------------


@pytest.mark.parametrize("path", RECORDED, ids=[path.stem for path in RECORDED])
def test_what_an_h200_showed_is_judged_the_same_everywhere(path: Path) -> None:
    seen = from_plain(json.loads(path.read_text()))
    found = {finding.rule for finding in rules.judge(seen)}
    assert found >= FAULTY.get(path.stem, set())
    if path.stem in CLEAN:
        assert found == set()
    assert seen.observer == "CUPTI"
    assert seen.calls


def test_there_are_recordings_of_right_and_of_wrong_steps() -> None:
    stems = {path.stem for path in RECORDED}
    assert stems & set(CLEAN)
    assert len(stems & set(FAULTY)) >= 8


def test_a_word_of_a_struct_is_a_candidate_and_the_replay_proves_it() -> None:
    seen = from_plain(json.loads((HERE / "recorded" / "freed_input.json").read_text()))
    held, wrong = (finding for finding in rules.judge(seen) if finding.rule == "CV401")
    assert (held.severity, held.evidence["certain"]) == ("warning", False)
    assert "a word inside a struct" in held.message
    assert (wrong.severity, wrong.message.partition(":")[0]) == (
        "error",
        "after other code allocated, wrote and freed memory the replay differs",
    )


# --- on a GPU ------------------------------------------------------------------------------------


@functools.lru_cache
def report_of(name: str) -> Report:
    """Return the report of a step from a child process of its own."""
    return validate_factory(f"{STEPS}:{name}")


@pytest.mark.gpu
@pytest.mark.parametrize("name", CLEAN)
def test_a_right_step_passes(name: str) -> None:
    report = report_of(name)
    assert report.findings == [], report.to_text()
    inspected = {line.subject for line in report.coverage if line.status == "inspected"}
    assert {"capture", "graph nodes", "pointers of the graph", "replay"} <= inspected


@pytest.mark.gpu
@pytest.mark.parametrize("name", FAULTY)
def test_a_wrong_step_is_named_by_its_rules(name: str) -> None:
    report = report_of(name)
    assert names(report) >= FAULTY[name], report.to_text()


@pytest.mark.gpu
def test_waits_and_allocations_have_their_line_whoever_makes_them() -> None:
    report = report_of("waits")
    assert places(report, "CV202") == {
        line_of("# torch reads a value"),
        line_of("# CuPy reads a value"),
        line_of("deviceSynchronize()  # the runtime"),
        line_of("# torch waits"),
    }
    report = report_of("allocates")
    assert places(report, "CV203") == {
        line_of("runtime.malloc(1 << 20))  # the runtime"),
        line_of("# CuPy past its pool"),
    }


@pytest.mark.gpu
def test_beside_a_profiler_the_fallback_observes_and_says_what_is_lost() -> None:
    script = (
        "import importlib.util, torch, cuverify.validators as v\n"
        f"spec = importlib.util.spec_from_file_location('steps', {str(STEPS)!r})\n"
        "steps = importlib.util.module_from_spec(spec); spec.loader.exec_module(steps)\n"
        "case = steps.waits()\n"
        "with torch.profiler.profile(): case.step()\n"
        "report = v.validate(case)\n"
        "print(report.to_text())\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=120
    )
    assert "CUDA calls of other libraries: not inspected, CUPTI refused" in done.stdout, done
    assert "CV202" in done.stdout
    assert f"capture_steps.py:{line_of('# torch reads a value')}" in done.stdout


def state_of_the_process() -> dict[str, Any]:
    import warnings

    import torch

    gc.collect()
    torch.cuda.synchronize()
    return {
        "allocated": torch.cuda.memory_allocated(),
        "reserved": torch.cuda.memory_reserved(),
        "stream": torch.cuda.current_stream().cuda_stream,
        "sync debug": torch.cuda.get_sync_debug_mode(),
        "gc": gc.isenabled(),
        "gc callbacks": len(gc.callbacks),
        "filters": list(warnings.filters),
        "capturing": torch.cuda.is_current_stream_capturing(),
        "private pools": sum(
            segment["segment_pool_id"] != (0, 0) for segment in torch.cuda.memory_snapshot()
        ),
    }


def run_here(case: CallableCase) -> Any:
    return capture_and_replay(
        CallableStep(case),
        [(f"seed {seed}", seed) for seed in case.seeds],
        tolerances=case.tolerance,
        only_recorded=False,
    )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["clean", "raises", "several"])
def test_the_process_is_as_it_was(name: str) -> None:
    import importlib.util

    import torch

    spec = importlib.util.spec_from_file_location("capture_steps", STEPS)
    assert spec is not None and spec.loader is not None
    steps = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(steps)
    found = []
    for _ in range(3):
        result = run_here(getattr(steps, name)())
        found.append(sorted({finding.rule for finding in result.findings}))
        del result
        torch.cuda.empty_cache()
        state = state_of_the_process()
        if len(found) == 1:
            before = state  # libraries are loaded, streams and events made
    assert state == before
    assert found[0] == found[1] == found[2]
    # and a right step is still right
    assert run_here(steps.clean()).findings == []


@pytest.mark.gpu
def test_our_verify_attention_passes(record_property: Callable[[str, object], None]) -> None:
    started = time.monotonic()
    report = validate(cases.load("verify_attention"))
    record_property("seconds", round(time.monotonic() - started, 1))
    assert report.findings == [], report.to_text()
