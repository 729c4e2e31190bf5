"""What a rule of the capture validator is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cuverify.validators.observations import CaptureSeen

from cuverify.report import Finding, Severity


@dataclass(frozen=True)
class Verdict:
    """One violation that a rule sees in a record.

    Parameters
    ----------
    message : str
        One sentence that names the thing and its values.
    where : str, optional
        ``file:line``.
    evidence : mapping
        The observed values, as JSON.
    fix : str, optional
        Replaces the rule's own, where the record tells more.
    severity : {"error", "warning"}, optional
        Replaces the rule's own.
    """

    message: str
    where: str | None = None
    evidence: Mapping[str, Any] = field(default_factory=dict)
    fix: str | None = None
    severity: Severity | None = None


@dataclass(frozen=True)
class Rule:
    """A named way in which a capture can be wrong.

    Parameters
    ----------
    name : str
        ``CV`` and three digits, the first of which is the family.
    title : str
        The violation in a few words.
    why : str
        What goes wrong, and how it shows in the field.
    fix : str
        What to do about it.
    judge : callable
        Takes the record of a run and yields its violations. It must not raise on any record, must
        not touch a device, and yields nothing where the record lacks what it needs.
    severity : {"error", "warning"}
    """

    name: str
    title: str
    why: str
    fix: str
    judge: Callable[[CaptureSeen], Iterable[Verdict]]
    severity: Severity = "error"

    def findings(self, seen: CaptureSeen) -> list[Finding]:
        """Return the violations in `seen` as findings of a report."""
        return [
            Finding(
                rule=self.name,
                severity=verdict.severity or self.severity,
                message=verdict.message,
                where=verdict.where,
                evidence=verdict.evidence,
                fix=verdict.fix or self.fix,
            )
            for verdict in self.judge(seen)
        ]
