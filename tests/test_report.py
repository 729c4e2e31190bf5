from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cuverify.errors import ArgumentError
from cuverify.files import write_atomically
from cuverify.report import Coverage, Finding, Report, Table, plain


def example() -> Report:
    report = Report("relocate", environment={"python": "3.11"})
    report.findings.append(
        Finding(
            "race", "error", "two threads write byte [8]", "x.cu:12", {"block": (0, 0, 0)}, "sync"
        )
    )
    report.findings.append(Finding("slow", "warning", "half of the floor"))
    report.coverage.append(Coverage("capture", "not inspected", "no CUDA device"))
    report.coverage.append(Coverage("host lane", "inspected", "20 batches"))
    report.tables.append(Table("resources", ("kernel", "registers"), [("k", 40), ("l", None)]))
    return report


def test_ok_is_about_errors_only() -> None:
    report = example()
    assert not report.ok
    assert [finding.rule for finding in report.errors] == ["race"]
    report.findings.pop(0)
    assert report.ok


def test_json_is_versioned_and_comes_back() -> None:
    document = json.loads(json.dumps(example().to_json(), allow_nan=False))
    assert document["schema"] == 1
    assert document["ok"] is False
    assert document["findings"][0] == {
        "rule": "race",
        "severity": "error",
        "message": "two threads write byte [8]",
        "where": "x.cu:12",
        "evidence": {"block": [0, 0, 0]},
        "fix": "sync",
    }
    assert document["coverage"][0] == {
        "subject": "capture",
        "status": "not inspected",
        "detail": "no CUDA device",
    }
    again = Report.from_json(document)
    assert again.to_json() == document


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"findings": [{"rule": "x"}]},
        {"findings": [{"rule": "x", "severity": "fatal", "message": ""}]},
        {"tables": [{"title": "", "columns": ["a"], "rows": [[1, 2]]}]},
        {"coverage": [{"subject": "x", "status": "skipped", "detail": ""}]},
        {"tables": 3},
    ],
)
def test_a_document_that_is_no_report_is_refused(change: dict[str, object]) -> None:
    with pytest.raises(ArgumentError):
        Report.from_json({**example().to_json(), **change})


def test_values_become_json() -> None:
    given_values = {
        "f": np.float32(1.5),
        "i": np.int64(3),
        "b": np.bool_(True),
        "a": np.arange(3),
        "nan": float("nan"),
        "inf": -np.inf,
        "set": {2, 1},
        "path": Path("a/b"),
    }
    assert plain(given_values) == {
        "f": 1.5,
        "i": 3,
        "b": True,
        "a": [0, 1, 2],
        "nan": "nan",
        "inf": "-inf",
        "set": [1, 2],
        "path": "a/b",
    }


@pytest.mark.parametrize("value", [object(), {1: 2}, [b"x"], {"deep": [{"er": object()}]}])
def test_a_value_without_json_form_is_refused(value: object) -> None:
    with pytest.raises(ArgumentError, match="JSON"):
        plain(value, "evidence")


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(json_values)
def test_plain_always_gives_strict_json_and_is_idempotent(value: object) -> None:
    once = plain(value)
    assert json.loads(json.dumps(once, allow_nan=False)) == once
    assert plain(once) == once


def test_text_says_everything_and_closes_with_the_verdict() -> None:
    text = example().to_text()
    assert "x.cu:12: error [race]: two threads write byte [8]" in text
    assert "fix: sync" in text
    assert "block: 0, 0, 0" in text
    assert "capture: not inspected, no CUDA device" in text
    assert "registers" in text
    assert text.splitlines()[-1] == "not ok: 1 error, 1 warning, 1 not inspected"
    assert "\x1b" not in text


def test_tables_fit_the_console_and_sentences_are_not_broken() -> None:
    where = "folder/" * 30 + "x.cu:3"
    message = "long " * 50 + "end"
    report = Report("check")
    report.tables.append(Table("wide", ("a", "b"), [("word " * 20, "word " * 20)]))
    report.findings.append(Finding("long", "error", message, where))
    file = io.StringIO()
    text = report.to_text(Console(file=file, width=40, color_system=None))
    sentence = f"{where}: error [long]: {message}"
    assert [line for line in file.getvalue().splitlines() if len(line) > 40] == [sentence]
    assert sentence in text.splitlines()


def test_markup_in_messages_is_shown_as_it_is() -> None:
    report = Report("[bold]t[/bold]")
    report.tables.append(Table("[i]", ("[red]c",), [("[/]",)]))
    text = report.to_text()
    assert "[bold]t[/bold]" in text
    assert "[red]c" in text
    assert "[/]" in text


@pytest.mark.parametrize(
    "make",
    [
        lambda: Finding("r", "fatal", "m"),  # type: ignore[arg-type]
        lambda: Coverage("s", "maybe"),  # type: ignore[arg-type]
        lambda: Table("t", ("a", "b"), [(1, 2), (1,)]),
    ],
)
def test_malformed_parts_are_refused_where_they_are_made(make: object) -> None:
    with pytest.raises(ArgumentError):
        make()  # type: ignore[operator]


def test_write_json(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    example().write_json(path)
    assert json.loads(path.read_text())["title"] == "relocate"
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]


def test_a_failed_write_keeps_the_old_file_and_leaves_nothing(tmp_path: Path) -> None:
    path = tmp_path / "report.json"
    path.write_text("old")
    with pytest.raises(UnicodeEncodeError):
        write_atomically(path, "half \ud800")
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["report.json"]
    with pytest.raises(OSError, match="No such file"):
        write_atomically(tmp_path / "absent" / "x", "text")


def test_a_report_needs_rich_only_for_its_text() -> None:
    code = (
        "import sys; from cuverify.report import Report; Report('t').to_json(); "
        "print([m for m in ('rich', 'numpy', 'torch', 'click') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
