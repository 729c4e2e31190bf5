"""Stages cost nothing unrecorded, and add up when they are recorded."""

from __future__ import annotations

import doctest
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cuverify import stages
from cuverify.stages import record_stages, stage

gpu = pytest.mark.gpu


def test_stages_nest_and_add_up() -> None:
    with record_stages() as log:
        for _ in range(3):
            with stage("outer"), stage("inner"):
                time.sleep(0.002)
    outer, inner = log.times()
    assert (outer.name, outer.runs, inner.name, inner.runs) == ("outer", 3, "inner", 3)
    assert outer.host_us >= inner.host_us >= 6000
    assert outer.device_us is None
    assert "outer" in log.to_text()
    events = log.to_chrome()["traceEvents"]
    assert [event["name"] for event in events] == ["outer", "inner"] * 3
    assert all(event["ts"] >= 0 and event["dur"] > 0 for event in events)


def test_nothing_is_recorded_outside() -> None:
    with record_stages() as log:
        pass
    with stage("late"):
        pass
    assert log.times() == []
    assert log.to_chrome()["traceEvents"] == []


def test_an_error_in_a_stage_goes_through() -> None:
    with record_stages() as log, pytest.raises(ZeroDivisionError), stage("fails"):
        raise ZeroDivisionError
    assert [entry.runs for entry in log.times()] == [1]


def test_a_variable_records_a_process(tmp_path: Path) -> None:
    file = tmp_path / "trace.json"
    program = "from cuverify.stages import stage\nwith stage('all'):\n    pass\n"
    subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, stages.VARIABLE: str(file)},
        check=True,
        timeout=60,
    )
    events = json.loads(file.read_text(encoding="utf-8"))["traceEvents"]
    assert [event["name"] for event in events] == ["all"]


def test_a_process_keeps_no_events_and_a_log_of_a_while_does(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = []

    class Event:
        def record(self) -> None:
            made.append(self)

    monkeypatch.setattr(stages, "_events", lambda: (Event(), Event()))
    monkeypatch.setattr(stages, "_logs", [])
    monkeypatch.setattr("atexit.register", lambda call: None)
    stages._record_process(tmp_path / "trace.json")
    with stage("of the process"):
        pass
    assert made == []
    with record_stages(), stage("of a while"):
        pass
    assert len(made) == 1


@gpu
def test_stages_time_the_device() -> None:
    import torch

    x = torch.zeros(1 << 24, device="cuda")
    with record_stages() as log:
        with stage("work"):
            for _ in range(20):
                x.add_(1)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph), stage("captured"):
            x.add_(1)
    work, captured = log.times()
    assert work.device_us is not None and work.device_us > 100
    assert captured.device_us is None


def test_examples_in_docstrings() -> None:
    found = doctest.testmod(stages)
    assert found.attempted > 0 and found.failed == 0
