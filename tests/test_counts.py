"""The count of examples, by a run of pytest in a process of its own."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

CONFTEST = Path(__file__).parent / "conftest.py"
TESTS = """
from hypothesis import given, strategies as st

@given(st.integers())
def test_right(n):
    pass

@given(st.integers(0, 3))
def test_wrong(n):
    assert n < 2

def test_draws_nothing():
    pass
"""


def test_counts_are_those_of_each_property_test(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_it.py").write_text(TESTS)
    counts = tmp_path / "counts.json"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--counts={counts}"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, timeout=120)
    record = json.loads(counts.read_text())
    assert ended.returncode == 1, ended.stdout
    assert record["profile"] == "ci"
    assert record["tests"].keys() == {"test_it.py::test_right", "test_it.py::test_wrong"}
    assert record["tests"]["test_it.py::test_right"] == 100
    assert record["failed"] == ["test_it.py::test_wrong"]
    assert record["examples"] == sum(record["tests"].values())


def test_workers_are_refused(tmp_path: Path) -> None:
    (tmp_path / "conftest.py").write_text(CONFTEST.read_text())
    (tmp_path / "test_it.py").write_text(TESTS)
    command = [sys.executable, "-m", "pytest", "-q", "-n", "2", f"--counts={tmp_path / 'counts'}"]
    ended = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert ended.returncode == 4, ended.stdout
    assert "leave -n out" in ended.stderr
    assert not (tmp_path / "counts").exists()
