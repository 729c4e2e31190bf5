"""What a run found, as plain data, with JSON, text and HTML as views of it.

Whoever inspects something fills a `Report`: findings (what is wrong), coverage (what was and what
was not inspected) and tables (what was measured). A view never adds to it.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Union

from cuverify.errors import ArgumentError

if TYPE_CHECKING:
    from rich.console import Console, RenderableType

SCHEMA = 1

JSON = Union[None, bool, int, float, str, Sequence["JSON"], Mapping[str, "JSON"]]  # noqa: UP007

Severity = Literal["error", "warning"]
Status = Literal["inspected", "not inspected"]

_SEVERITIES = ("error", "warning")
_STATUSES = ("inspected", "not inspected")
_SAID = 4  # letters that do not stand in a sentence by chance
_TEXT_WIDTH = 120  # of a view that no terminal limits


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong.

    Parameters
    ----------
    rule : str
        Stable name of the rule, for machines and for `explain`.
    severity : {"error", "warning"}
        An error makes the report not ok.
    message : str
        One sentence for a person.
    where : str, optional
        ``file:line`` of the cause.
    evidence : mapping, optional
        The observed values, as JSON.
    fix : str, optional
        What to do.

    Raises
    ------
    ArgumentError
        An unknown severity.
    """

    rule: str
    severity: Severity
    message: str
    where: str | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    fix: str | None = None

    def __post_init__(self) -> None:
        if self.severity not in _SEVERITIES:
            raise ArgumentError("severity", self.severity, f"use one of {', '.join(_SEVERITIES)}")

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values; ``Finding(**fields)`` is the finding again.

        Raises
        ------
        ArgumentError
            The evidence has no JSON form.
        """
        return {
            "rule": self.rule,
            "severity": self.severity,
            "message": self.message,
            "where": self.where,
            "evidence": plain(self.evidence, f"evidence of {self.rule}"),
            "fix": self.fix,
        }


@dataclass(frozen=True)
class Coverage:
    """Whether a subject was inspected, and if not, why.

    Parameters
    ----------
    subject : str
        What there was to inspect, for instance ``"capture"``.
    status : {"inspected", "not inspected"}
        Silence about a subject means nothing; this says it.
    detail : str
        How much was inspected, or the reason why not.

    Raises
    ------
    ArgumentError
        An unknown status.
    """

    subject: str
    status: Status
    detail: str = ""

    def __post_init__(self) -> None:
        if self.status not in _STATUSES:
            raise ArgumentError("status", self.status, f"use one of {', '.join(_STATUSES)}")


@dataclass(frozen=True)
class Table:
    """Measured values in rows.

    Parameters
    ----------
    title : str
        What the rows are.
    columns : sequence of str
        Column heads, units included.
    rows : sequence of sequences
        JSON values, one for each column. ``None`` is shown as a dash.

    Raises
    ------
    ArgumentError
        A row whose length is not that of `columns`.
    """

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[Any]]

    def __post_init__(self) -> None:
        for index, row in enumerate(self.rows):
            if len(row) != len(self.columns):
                raise ArgumentError(
                    f"rows[{index}]",
                    list(row),
                    f"has {len(row)} values for {len(self.columns)} columns",
                )


@dataclass
class Report:
    """Findings, coverage and tables of one run.

    Parameters
    ----------
    title : str
        The run in one line.
    findings : list of Finding
    coverage : list of Coverage
    tables : list of Table
    environment : mapping
        Versions and devices that the results depend on, as JSON.

    Examples
    --------
    >>> report = Report("relocate")
    >>> report.findings.append(Finding("race", "error", "two threads write byte 8", "x.cu:12"))
    >>> report.ok
    False
    """

    title: str
    findings: list[Finding] = field(default_factory=list)
    coverage: list[Coverage] = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    environment: Mapping[str, Any] = field(default_factory=dict)

    @property
    def errors(self) -> list[Finding]:
        """Findings that make the report not ok."""
        return [finding for finding in self.findings if finding.severity == "error"]

    @property
    def ok(self) -> bool:
        """True when no finding is an error. Warnings and gaps in coverage do not count."""
        return not self.errors

    def to_json(self) -> dict[str, Any]:
        """Return the report as values that `json.dumps` takes, under ``"schema": 1``.

        NumPy scalars become numbers, tuples become lists, and floats that JSON cannot hold become
        the strings ``"nan"``, ``"inf"`` and ``"-inf"``.

        Raises
        ------
        ArgumentError
            A value has no JSON form.
        """
        return {
            "schema": SCHEMA,
            "title": self.title,
            "ok": self.ok,
            "findings": [finding.to_json() for finding in self.findings],
            "coverage": [
                {"subject": entry.subject, "status": entry.status, "detail": entry.detail}
                for entry in self.coverage
            ],
            "tables": [
                {
                    "title": table.title,
                    "columns": list(table.columns),
                    "rows": plain(table.rows, f"table {table.title!r}"),
                }
                for table in self.tables
            ],
            "environment": plain(self.environment, "environment"),
        }

    @classmethod
    def from_json(cls, document: Mapping[str, Any]) -> Report:
        """Build a report from what `to_json` returned.

        Raises
        ------
        ArgumentError
            The document has another schema or lacks a part.
        """
        if not isinstance(document, Mapping):
            raise ArgumentError("document", document, "is no report: a JSON object is one")
        if document.get("schema") != SCHEMA:
            raise ArgumentError("schema", document.get("schema"), f"only {SCHEMA} can be read")
        try:
            return cls(
                title=document["title"],
                findings=[Finding(**entry) for entry in document["findings"]],
                coverage=[Coverage(**entry) for entry in document["coverage"]],
                tables=[Table(**entry) for entry in document["tables"]],
                environment=document["environment"],
            )
        except (KeyError, TypeError) as error:
            raise ArgumentError("document", document, f"is no report: {error}") from error

    def write_json(self, path: str | os.PathLike[str]) -> None:
        """Write `to_json` to a file, whole or not at all.

        Raises
        ------
        OSError
            The file cannot be written.
        """
        import json

        from cuverify.files import write_atomically

        text = json.dumps(self.to_json(), indent=2, ensure_ascii=False, allow_nan=False)
        write_atomically(path, text + "\n")

    def to_html(self) -> str:
        """Return the report as a page for a browser that needs nothing else.

        Raises
        ------
        ArgumentError
            A value has no JSON form.
        """
        from cuverify.report_html import page

        return page(self, self.verdict())

    def write_html(self, path: str | os.PathLike[str]) -> None:
        """Write `to_html` to a file, whole or not at all.

        Raises
        ------
        OSError
            The file cannot be written.
        """
        from cuverify.files import write_atomically

        write_atomically(path, self.to_html())

    def verdict(self) -> str:
        """Return the outcome and the counts in one line."""
        errors = len(self.errors)
        missing = sum(entry.status == "not inspected" for entry in self.coverage)
        counts = [_count(errors, "error"), _count(len(self.findings) - errors, "warning")]
        if missing:
            counts.append(f"{missing} not inspected")
        return f"{'ok' if self.ok else 'not ok'}: {', '.join(counts)}"

    def to_text(self, console: Console | None = None) -> str:
        """Return the report as plain text, and print it on `console` when there is one.

        Parameters
        ----------
        console : rich.console.Console, optional
            Where to print, with the console's own colours and width of tables.

        Returns
        -------
        str
            The text without colours, with tables of at most 120 columns.
        """
        import io

        from rich.console import Console

        parts = self._parts()
        if console is not None:
            _print(console, parts)
        buffer = io.StringIO()
        own = Console(file=buffer, width=_TEXT_WIDTH, color_system=None, legacy_windows=False)
        _print(own, parts)
        return "\n".join(line.rstrip() for line in buffer.getvalue().splitlines()) + "\n"

    def _parts(self) -> list[RenderableType]:
        """Return what the text view shows, in order: the verdict comes last, next to the prompt."""
        from rich.text import Text

        parts: list[RenderableType] = [Text(self.title, style="bold")]
        parts += [_table(table) for table in self.tables if table.rows]
        for entry in self.coverage:
            style = "green" if entry.status == "inspected" else "yellow"
            detail = f", {entry.detail}" if entry.detail else ""
            parts.append(Text.assemble(f"{entry.subject}: ", (entry.status, style), detail))
        fixes: set[str | None] = set()
        for finding in self.findings:
            parts += [Text(), _finding(finding, fixes)]
        if self.findings:
            parts.append(Text())
        parts += self._advice()
        outcome, colon, counts = self.verdict().partition(":")
        style = "bold green" if self.ok else "bold red"
        parts.append(Text.assemble((outcome, style), f"{colon}{counts}"))
        return parts

    def _advice(self) -> list[RenderableType]:
        """Return where to read more about the rules that found something."""
        from rich.text import Text

        rules = dict.fromkeys(finding.rule for finding in self.findings if has_page(finding.rule))
        return [Text(f"more: cuverify explain {' '.join(rules)}", style="dim")] if rules else []


def _print(console: Console, parts: Sequence[RenderableType]) -> None:
    """Print parts one below the other."""
    from rich.text import Text

    for part in parts:
        # a sentence is not broken: `file:line` stays one word to search for and to click on
        console.print(part, soft_wrap=isinstance(part, Text))


def has_page(rule: str) -> bool:
    """Tell whether `cuverify explain` has a page on a rule, by its name."""
    return re.fullmatch(r"CV\d{3}", rule) is not None


def schema() -> dict[str, Any]:
    """Return the JSON schema of `Report.to_json`, as the package ships it."""
    import json
    from importlib.resources import files

    text = (files("cuverify") / "report.schema.json").read_text(encoding="utf-8")
    document: dict[str, Any] = json.loads(text)
    return document


def plain(value: Any, what: str = "value") -> Any:
    """Return `value` as JSON values only.

    Parameters
    ----------
    value : object
        Numbers, strings, mappings with string keys, sequences, NumPy scalars, paths.
    what : str
        Names the value in an error.

    Raises
    ------
    ArgumentError
        Something in it has no JSON form.
    """
    if value is None or isinstance(value, (bool, int, str)):
        return value
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if isinstance(value, os.PathLike):
        return os.fspath(value)
    if isinstance(value, Mapping):
        for key in value:
            if not isinstance(key, str):
                raise ArgumentError(what, key, "a key in JSON must be a string")
        return {key: plain(entry, f"{what}[{key!r}]") for key, entry in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        entries = sorted(value, key=repr) if isinstance(value, (set, frozenset)) else value
        return [plain(entry, f"{what}[{index}]") for index, entry in enumerate(entries)]
    if hasattr(value, "tolist"):  # NumPy scalars and arrays, torch tensors
        return plain(value.tolist(), what)
    raise ArgumentError(what, value, f"a {type(value).__name__} has no JSON form")


def _count(number: int, noun: str) -> str:
    return f"{number} {noun}" if number == 1 else f"{number} {noun}s"


def shown(value: Any) -> str:
    """Return a value of JSON as a person reads it."""
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, float):
        return f"{value:.4g}" if math.isfinite(value) else str(value)
    if isinstance(value, Mapping):
        return " ".join(f"{key}={shown(entry)}" for key, entry in value.items())
    if isinstance(value, (list, tuple)):
        return ", ".join(shown(entry) for entry in value)
    return str(value)


def _table(table: Table) -> RenderableType:
    from rich import box
    from rich.table import Table as RichTable
    from rich.text import Text

    view = RichTable(
        title=Text(table.title),
        title_justify="left",
        title_style="",
        box=box.SIMPLE_HEAD,
        padding=(0, 1),
    )
    cells = [[plain(value, table.title) for value in row] for row in table.rows]
    for index, column in enumerate(table.columns):
        numeric = all(
            row[index] is None
            or (isinstance(row[index], (int, float)) and not isinstance(row[index], bool))
            for row in cells
        )
        view.add_column(Text(column), justify="right" if numeric else "left", overflow="fold")
    for row in cells:
        view.add_row(*(Text(shown(value)) for value in row))
    return view


def _finding(finding: Finding, told: set[str | None]) -> RenderableType:
    """Return a finding as text. A fix among those that were told is only pointed to."""
    from rich.text import Text

    style = "bold red" if finding.severity == "error" else "bold yellow"
    text = Text()
    if finding.where:
        text.append(f"{finding.where}: ", style="bold")
    text.append(finding.severity, style=style)
    text.append(f" [{finding.rule}]: {finding.message}")
    for key, value in plain(finding.evidence, "evidence").items():
        if isinstance(value, str) and len(value) >= _SAID and value in finding.message:
            continue  # the sentence has said it
        words = f" {shown(value)}"
        if "\n" in words:  # an excerpt and its caret keep their columns
            words = "".join(f"\n        {line}" for line in words[1:].splitlines())
        text.append(f"\n    {key}:{words}", style="dim")
    if finding.fix:
        fix = "as above" if finding.fix in told else finding.fix
        told.add(finding.fix)
        text.append(f"\n    fix: {fix}", style="cyan")
    return text
