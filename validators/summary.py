"""The report of a validation: findings, coverage, the graph, how far outputs are off, versions."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import replace
from importlib import metadata
from typing import TYPE_CHECKING, Any

from cuverify.validators.places import line_at

from cuverify.report import Coverage, Finding, Report, Table

if TYPE_CHECKING:
    from cuverify.validators.capture import CaptureResult
    from cuverify.validators.observations import CaptureSeen

_PACKAGES = ("cuda-bindings", "cupti-python", "triton")
_EFFECTS = frozenset({"CV201", "CV601", "CV602", "CV603", "CV609"})
_MOST_NODES = 40
_GRAPH_COLUMNS = ("node", "kind", "kernel", "grid", "block", "shared B", "arguments", "pointers")
_OUTPUT_COLUMNS = (
    "inputs",
    "output",
    "elements that had to change",
    "differ",
    "largest error",
    "relative L2",
    "ulps",
    "first",
)


def report_of(name: str, results: Sequence[CaptureResult]) -> Report:
    """Return one report of several captures of a case.

    Parameters
    ----------
    name : str
    results : sequence of CaptureResult
        The same finding of several of them comes once.
    """
    report = Report(f"capture of {name}", environment=versions())
    told: set[tuple[Any, ...]] = set()
    for result in results:
        for finding in result.findings:
            key = _key(finding)
            if key not in told:
                told.add(key)
                report.findings.append(_with_line(finding))
        for line in result.coverage:
            _add(report.coverage, line)
    # what names a cause comes before what only shows its effect
    report.findings.sort(key=lambda finding: finding.rule in _EFFECTS)
    for result in results:
        report.tables.extend(tables(result.seen))
    return report


def _with_line(finding: Finding) -> Finding:
    """Show the line of code that a finding points to."""
    line = line_at(finding.where)
    return replace(finding, evidence={"code": line, **finding.evidence}) if line else finding


def tables(seen: CaptureSeen) -> list[Table]:
    """Return the graph, and what the runs left in the outputs, as tables."""
    found = []
    if seen.graph.nodes:
        rows = [
            (
                number,
                node.kind,
                node.kernel,
                list(node.grid) or None,
                list(node.block) or None,
                node.shared if node.kind == "kernel" else None,
                len(node.params) if node.kind == "kernel" else None,
                len(node.pointers) or None,
            )
            for number, node in enumerate(seen.graph.nodes[:_MOST_NODES])
        ]
        more = len(seen.graph.nodes) - len(rows)
        title = "graph" + (f", {more} more nodes" if more else "")
        found.append(Table(title, _GRAPH_COLUMNS, rows))
    runs = [run for run in (seen.eager, *seen.replays) if run is not None]
    outputs = [
        (
            f"{'eager: ' if run is seen.eager else ''}{run.label}",
            output.name,
            output.must_change,
            output.mismatch.count if output.mismatch is not None else 0,
            output.largest,
            output.relative,
            dict(output.ulps) or None,
            str(list(output.mismatch.index)) if output.mismatch is not None else None,
        )
        for run in runs
        for output in run.outputs
    ]
    if outputs:
        found.append(Table("outputs against the reference", _OUTPUT_COLUMNS, outputs))
    return found


def versions() -> dict[str, Any]:
    """Return what the result depends on: packages, driver and device."""
    found: dict[str, Any] = {"python": sys.version.split()[0]}
    torch = sys.modules.get("torch")
    if torch is not None:
        found["torch"] = str(torch.__version__)
        if torch.cuda.is_available():
            properties = torch.cuda.get_device_properties(torch.cuda.current_device())
            found["GPU"] = str(properties.name)
            found["arch"] = f"sm_{properties.major}{properties.minor}"
            found["cuda"] = str(torch.version.cuda)
    cupy = sys.modules.get("cupy")
    if cupy is not None:
        found["cupy"] = str(cupy.__version__)
    for package in _PACKAGES:
        try:
            found[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            continue
    return found


def _key(finding: Finding) -> tuple[Any, ...]:
    """Tell a finding from others: one fault at one place is one, whatever the batch."""
    if finding.where is not None:
        return finding.rule, finding.where
    return finding.rule, finding.message


def _add(lines: list[Coverage], line: Coverage) -> None:
    """Add a line of coverage; of one subject that was inspected the first is kept."""
    if line.status == "inspected" and any(
        each.subject == line.subject and each.status == line.status for each in lines
    ):
        return
    if line not in lines:
        lines.append(line)
