"""Stages cost nothing unrecorded, and add up when they are recorded."""

from __future__ import annotations

import doctest
import json
import os
import subprocess
import sys
import threading
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


def test_a_stage_that_is_not_over_does_not_count() -> None:
    with record_stages() as log, stage("open"):
        with stage("over"):
            pass
        assert [entry.name for entry in log.times()] == ["over"]
        assert [event["name"] for event in log.to_chrome()["traceEvents"]] == ["over"]
    assert [entry.name for entry in log.times()] == ["open", "over"]
    assert all(entry.host_us > 0 for entry in log.times())


def test_threads_are_told_apart() -> None:
    def work() -> None:
        with stage("other"):
            pass

    with record_stages() as log, stage("own"):
        thread = threading.Thread(target=work)
        thread.start()
        thread.join()
    own, other = log.to_chrome()["traceEvents"]
    assert own["tid"] == threading.get_native_id() != other["tid"]


def test_each_process_writes_a_file_of_its_own(tmp_path: Path) -> None:
    program = "from cuverify.stages import stage\nwith stage('all'):\n    pass\n"
    environment = {**os.environ, stages.VARIABLE: str(tmp_path / "trace-{pid}.json")}
    for _ in range(2):
        subprocess.run([sys.executable, "-c", program], env=environment, check=True, timeout=60)
    files = sorted(tmp_path.iterdir())
    pids = {json.loads(file.read_text())["traceEvents"][0]["pid"] for file in files}
    assert {file.name for file in files} == {f"trace-{pid}.json" for pid in pids}
    assert len(files) == 2


def test_a_forked_process_leaves_the_file_to_its_parent(tmp_path: Path) -> None:
    program = (
        "import os\nfrom cuverify.stages import stage\nwith stage('own'):\n    pass\n"
        "if child := os.fork():\n    os.waitpid(child, 0)\n    print(os.path.getsize(FILE))\n"
    )
    file = tmp_path / "trace.json"
    program = f"FILE = {str(file)!r}\n{program}"
    environment = {**os.environ, stages.VARIABLE: str(file)}
    done = subprocess.run(
        [sys.executable, "-c", program], env=environment, check=True, timeout=60,
        capture_output=True, text=True,
    )  # fmt: skip
    assert done.stdout == "0\n"  # while the parent runs, the child is over
    assert [event["name"] for event in json.loads(file.read_text())["traceEvents"]] == ["own"]


@pytest.mark.parametrize(
    ("file", "says"), [("none/trace.json", "No such file"), (".", "Is a directory")]
)
def test_a_trace_that_cannot_be_written_is_said_at_the_start(
    file: str, says: str, tmp_path: Path
) -> None:
    environment = {**os.environ, stages.VARIABLE: str(tmp_path / file)}
    done = subprocess.run(
        [sys.executable, "-c", "import cuverify.stages\nprint('later')"], env=environment,
        capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    assert done.returncode != 0 and "later" not in done.stdout
    assert "CUVERIFY_STAGES=" in done.stderr and f"cannot be written: {says}" in done.stderr


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
