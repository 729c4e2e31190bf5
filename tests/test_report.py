from __future__ import annotations

import io
import json
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console

from cuverify.errors import ArgumentError
from cuverify.files import write_atomically
from cuverify.report import Coverage, Finding, Report, Table, has_page, plain, schema


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


@pytest.mark.parametrize("document", [[], None, "report", 1])
def test_what_is_no_object_is_no_report(document: Any) -> None:
    with pytest.raises(ArgumentError, match="is no report"):
        Report.from_json(document)


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


# --- the published schema ------------------------------------------------------------------------

_TYPES = {
    "object": dict,
    "array": list,
    "string": str,
    "boolean": bool,
    "null": type(None),
}
_CHECKED = {"type", "required", "additionalProperties", "properties", "items", "const", "enum"}
_CHECKED |= {"minLength", "$ref"}
_SAID = {"$schema", "$id", "$defs", "title", "description"}


def problems(value: Any, rule: dict[str, Any], whole: dict[str, Any], where: str) -> list[str]:
    """Hold a value against the part of JSON Schema that the published one uses."""
    assert set(rule) <= _CHECKED | _SAID, f"{where}: a keyword that nothing here checks"
    if "$ref" in rule:
        return problems(value, whole["$defs"][rule["$ref"].rpartition("/")[2]], whole, where)
    found = []
    if "const" in rule and value != rule["const"]:
        found.append(f"{where} is not {rule['const']!r}")
    if "enum" in rule and value not in rule["enum"]:
        found.append(f"{where} is none of {rule['enum']}")
    if "type" in rule:
        names = rule["type"] if isinstance(rule["type"], list) else [rule["type"]]
        if not isinstance(value, tuple(_TYPES[name] for name in names)):
            return [*found, f"{where} is no {names}"]
    if len(value) < rule.get("minLength", 0) if isinstance(value, str) else False:
        found.append(f"{where} is too short")
    if isinstance(value, dict):
        found += [
            f"{where}.{name} is missing" for name in rule.get("required", ()) if name not in value
        ]
        known = rule.get("properties", {})
        for name, inner in value.items():
            if name in known:
                found += problems(inner, known[name], whole, f"{where}.{name}")
            elif rule.get("additionalProperties") is False:
                found.append(f"{where}.{name} is unknown")
    if isinstance(value, list) and "items" in rule:
        for index, inner in enumerate(value):
            found += problems(inner, rule["items"], whole, f"{where}[{index}]")
    return found


def test_a_report_keeps_the_published_schema() -> None:
    for report in (example(), Report("empty")):
        document = json.loads(json.dumps(report.to_json()))
        assert problems(document, schema(), schema(), "report") == []


@pytest.mark.parametrize(
    "change",
    [
        {"schema": 2},
        {"ok": "yes"},
        {"more": 1},
        {"findings": [{}]},
        {"findings": [{**example().to_json()["findings"][0], "severity": "fatal"}]},
        {"findings": [{**example().to_json()["findings"][0], "rule": ""}]},
        {"findings": [{**example().to_json()["findings"][0], "where": 3}]},
        {"coverage": [{"subject": "x", "status": "skipped", "detail": ""}]},
        {"tables": [{"title": "", "columns": [1], "rows": [[1]]}]},
        {"tables": {}},
        {"environment": []},
    ],
)
def test_the_schema_refuses_what_is_no_report(change: dict[str, Any]) -> None:
    document = {**example().to_json(), **change}
    assert problems(document, schema(), schema(), "report")


def test_the_schema_names_every_field_of_the_json() -> None:
    document = example().to_json()
    assert set(schema()["properties"]) == set(document)
    parts = schema()["$defs"]
    assert set(parts["finding"]["properties"]) == set(document["findings"][0])
    assert set(parts["coverage"]["properties"]) == set(document["coverage"][0])
    assert set(parts["table"]["properties"]) == set(document["tables"][0])


# --- the page for a browser ----------------------------------------------------------------------


class Page(HTMLParser):
    """Reads a page: its text, its tags in balance, and what it would load."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.words: list[str] = []
        self.open: list[str] = []
        self.loads: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        if tag in {"script", "link", "img", "iframe"} or {"src", "href"} & {
            key for key, _ in attrs
        }:
            self.loads.append(tag)
        if tag != "meta":
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.words.append(data)


def test_the_page_says_everything_and_loads_nothing() -> None:
    report = example()
    report.findings.append(Finding("CV101", "error", "<b>lost</b> & gone", "a<b.py:3"))
    page = Page(report.to_html())
    assert page.open == [] and page.loads == []
    text = " ".join(page.words)
    for words in (
        "relocate",
        "not ok: 2 errors, 1 warning, 1 not inspected",
        "x.cu:12",
        "two threads write byte [8]",
        "sync",
        "0, 0, 0",
        "no CUDA device",
        "registers",
        "3.11",
        "<b>lost</b> & gone",
        "a<b.py:3",
        "cuverify explain CV101",
    ):
        assert words in text, words
    assert "<b>lost" not in report.to_html()
    assert Page(Report("empty").to_html()).open == []


def test_write_html(tmp_path: Path) -> None:
    path = tmp_path / "report.html"
    example().write_html(path)
    assert path.read_text(encoding="utf-8") == example().to_html()


def test_a_fix_is_told_once() -> None:
    report = Report("check")
    report.findings += [
        Finding("CV204", "error", "first", "x.py:1", fix="make the stream current"),
        Finding("CV204", "error", "second", "x.py:2", fix="make the stream current"),
        Finding("CV101", "error", "third", fix="launch elsewhere"),
    ]
    lines = [line.strip() for line in report.to_text().splitlines() if "fix:" in line]
    assert lines == ["fix: make the stream current", "fix: as above", "fix: launch elsewhere"]


def test_evidence_that_the_sentence_holds_is_not_said_again() -> None:
    report = Report("check")
    evidence = {"kernel": "affine", "stream": "0x0", "code": "launch(x)", "bytes": 8}
    report.findings.append(Finding("CV101", "error", "`affine` ran on 0x0: 8", None, evidence))
    text = report.to_text()
    assert "kernel:" not in text
    assert "stream: 0x0" in text and "code: launch(x)" in text and "bytes: 8" in text
    assert "affine" in json.dumps(report.to_json()["findings"][0]["evidence"])


def test_text_says_where_to_read_on() -> None:
    report = example()
    assert "cuverify explain" not in report.to_text()
    report.findings += [Finding("CV202", "error", "waits")] * 2
    report.findings.append(Finding("CV101", "warning", "lost"))
    assert "more: cuverify explain CV202 CV101\n" in report.to_text()
    assert has_page("CV101") and not has_page("race") and not has_page("CV1012")


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
