"""What the evidence says, and what of it is stale, as a report."""

from __future__ import annotations

from pathlib import Path

from cuverify.evidence.document import FOLDER, evidence_files, load, statuses
from cuverify.evidence.parts import find_part, part_names
from cuverify.evidence.source_tree import source_root
from cuverify.report import Finding, Report, Table


def report(root: Path | None = None, *, measurements: bool = True) -> Report:
    """Return what the evidence says and what of it is stale.

    A stale section is a warning: it stays true for the files it was measured on. Recorded test
    failures are errors.

    Parameters
    ----------
    root : Path, optional
        The source tree; found by `source_root` when absent.
    measurements : bool
        Whether to list what the parts measured, too.

    Raises
    ------
    EvidenceError
        Evidence is missing or malformed.
    """
    root = source_root() if root is None else root
    result = Report(f"evidence in {root / FOLDER}")
    found = statuses(root)
    result.tables.append(
        Table(
            "sections",
            ("GPU", "part", "recorded", "result", "stale since"),
            [
                (entry.gpu, entry.part, entry.date, entry.summary, ", ".join(entry.stale) or None)
                for entry in found
            ],
        )
    )
    for path in evidence_files(root):
        document = load(path)
        sections = document["sections"]
        for part in part_names():
            if part not in sections:
                result.findings.append(
                    Finding(
                        "evidence-absent",
                        "warning",
                        f"{path.name} has no section {part!r}",
                        fix=_advice(part),
                    )
                )
        for part, section in sections.items():
            rules = find_part(part)
            result.findings += [
                Finding(
                    "evidence-failed", "error", f"{path.name} records {what}", fix=_advice(part)
                )
                for what in rules.failures(section["data"])
            ]
            if measurements and rules.table is not None:
                result.tables.append(rules.table(document["gpu"], section["data"]))
    result.findings += [
        Finding(
            "evidence-stale",
            "warning",
            f"{entry.path.name}: section {entry.part!r} was recorded before a change of "
            f"{', '.join(entry.stale)}",
            fix=_advice(entry.part),
        )
        for entry in found
        if entry.stale
    ]
    return result


def _advice(part: str) -> str:
    return f"on a machine with that GPU run `cuverify evidence record --part {part}`"
