"""Count what the zoo's runs showed: detection and false alarms, by rule."""

from __future__ import annotations

import ast
import functools
import importlib.util
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuverify.validators.zoo.classes import CLASSES
from cuverify.validators.zoo.mutant import Mutant
from cuverify.validators.zoo.registry import (
    CLASSES_NOT_SHOWN,
    RULES_NOT_SHOWN,
)

from cuverify.report import Coverage, Finding, Report, Table

_MARK = "# fault"


@dataclass(frozen=True)
class Run:
    """What the validator said of one mutant or twin.

    Parameters
    ----------
    mutant : Mutant
    faulty : bool
        False for its twin.
    report : Report
    seconds : float
        Of its process.
    """

    mutant: Mutant
    faulty: bool
    report: Report
    seconds: float = 0.0

    @property
    def rules(self) -> frozenset[str]:
        """Rules that found something."""
        return frozenset(finding.rule for finding in self.report.findings)

    @property
    def named(self) -> bool:
        """Whether the rule of the mutant found something."""
        return self.mutant.rule in self.rules

    @property
    def placed(self) -> bool:
        """Whether a finding of that rule stands on the line of the fault.

        True where the fault has no line that a call could be seen on.
        """
        if not self.mutant.line:
            return True
        place = fault_line(self.mutant)
        return any(
            finding.rule == self.mutant.rule and _same_place(finding.where, place)
            for finding in self.report.findings
        )

    @property
    def caught(self) -> bool:
        """Whether the right rule found it, at the right line."""
        return self.named and self.placed

    @property
    def unforeseen(self) -> frozenset[str]:
        """Rules that found something and are neither named nor tolerated for it."""
        if not self.faulty:
            return self.rules
        return self.rules - {self.mutant.rule} - frozenset(self.mutant.also)


@dataclass(frozen=True)
class Rate:
    """How one rule did.

    Parameters
    ----------
    rule : str
    mutants, caught : int
        Mutants that it must name, and those that it named, at the right line where there is one.
    twins, accused : int
        Twins that were run, all of them judged by every rule, and those that it accused.
    """

    rule: str
    mutants: int
    caught: int
    twins: int
    accused: int


def fault_line(mutant: Mutant) -> str | None:
    """Return ``file:line`` of the factory's line that is marked as the fault, if one is."""
    return _marked_lines(mutant.factory.partition(":")[0]).get(mutant.name)


@functools.cache
def _marked_lines(module: str) -> Mapping[str, str]:
    """Return the marked line of each factory, read from the text: nothing is imported."""
    spec = importlib.util.find_spec(module)
    if spec is None or spec.origin is None:
        return {}
    path = Path(spec.origin)
    text = path.read_text(encoding="utf-8")
    lines = text.splitlines()
    found = {}
    for node in ast.parse(text).body:
        if isinstance(node, ast.FunctionDef) and node.end_lineno is not None:
            marked = [
                number
                for number in range(node.lineno, node.end_lineno + 1)
                if lines[number - 1].rstrip().endswith(_MARK)
            ]
            if marked:
                found[node.name] = f"{path}:{marked[0]}"
    return found


def _same_place(where: str | None, place: str | None) -> bool:
    """Tell whether two places are one: either may be given below some folder."""
    if where is None or place is None:
        return False
    a, b = Path(where).parts, Path(place).parts
    shorter = min(len(a), len(b))
    return a[-shorter:] == b[-shorter:]


def rates(runs: Iterable[Run]) -> list[Rate]:
    """Return the rates of every rule that has a mutant or that accused a twin.

    Parameters
    ----------
    runs : iterable of Run

    Returns
    -------
    list of Rate
        Sorted by rule.
    """
    runs = list(runs)
    faulty = [run for run in runs if run.faulty]
    twins = [run for run in runs if not run.faulty]
    rules = {run.mutant.rule for run in faulty}.union(*(run.rules for run in twins))
    return [
        Rate(
            rule,
            sum(run.mutant.rule == rule for run in faulty),
            sum(run.mutant.rule == rule and run.caught for run in faulty),
            len(twins),
            sum(rule in run.rules for run in twins),
        )
        for rule in sorted(rules)
    ]


def overview(mutants: Sequence[Mutant]) -> Report:
    """Return what there is to run, as a report."""
    result = Report("zoo: mutants")
    result.tables.append(
        Table(
            "mutants, each with a clean twin",
            ("mutant", "rule", "shows", "classes", "needs"),
            [
                (
                    mutant.name,
                    mutant.rule,
                    mutant.shows,
                    [f"{number}: {CLASSES[number]}" for number in mutant.classes] or None,
                    list(mutant.needs) or None,
                )
                for mutant in mutants
            ],
        )
    )
    return result


def report(
    runs: Sequence[Run],
    *,
    not_run: Mapping[str, str] | None = None,
    environment: Mapping[str, Any] | None = None,
) -> Report:
    """Return the rates, and what is behind them, as a report.

    Parameters
    ----------
    runs : sequence of Run
    not_run : mapping of str to str, optional
        Mutants that were asked for and not run, and why.
    environment : mapping, optional
        Versions.

    Returns
    -------
    Report
        A miss, a wrong line and a false alarm are errors; a rule that speaks up unforeseen beside
        the right one is a warning.
    """
    result = Report("zoo", environment=environment or {})
    result.tables.append(_totals(runs))
    result.tables.append(
        Table(
            "rates by rule",
            ("rule", "mutants", "caught", "detection %", "twins", "accused", "false alarm %"),
            [
                (
                    rate.rule,
                    rate.mutants,
                    rate.caught,
                    _percent(rate.caught, rate.mutants),
                    rate.twins,
                    rate.accused,
                    _percent(rate.accused, rate.twins),
                )
                for rate in rates(runs)
            ],
        )
    )
    if environment:
        result.tables.append(Table("versions", ("part", "version"), list(environment.items())))
    shown = {number for run in runs if run.faulty and run.caught for number in run.mutant.classes}
    result.coverage.append(
        Coverage("failure classes", "inspected", f"{len(shown)} of {len(CLASSES)} shown and caught")
    )
    for number in sorted(CLASSES_NOT_SHOWN):
        subject = f"failure class {number}, {CLASSES[number]}"
        result.coverage.append(Coverage(subject, "not inspected", CLASSES_NOT_SHOWN[number]))
    for rule in sorted(RULES_NOT_SHOWN):
        result.coverage.append(Coverage(f"rule {rule}", "not inspected", RULES_NOT_SHOWN[rule]))
    for name, reason in sorted((not_run or {}).items()):
        result.coverage.append(Coverage(f"mutant {name}", "not inspected", reason))
    for run in runs:
        result.findings.extend(_findings(run))
    return result


def _totals(runs: Sequence[Run]) -> Table:
    faulty = [run for run in runs if run.faulty]
    twins = [run for run in runs if not run.faulty]
    caught = sum(run.caught for run in faulty)
    accused = sum(bool(run.rules) for run in twins)
    return Table(
        "all rules together",
        ("what", "run", "found", "%"),
        [
            (
                "mutants, caught by their rule",
                len(faulty),
                caught,
                _percent(caught, len(faulty)),
            ),
            ("twins, accused by any rule", len(twins), accused, _percent(accused, len(twins))),
        ],
    )


def _percent(part: int, whole: int) -> float | None:
    return round(100 * part / whole, 1) if whole else None


def _findings(run: Run) -> list[Finding]:
    name = run.mutant.name
    evidence = {
        "factory": run.mutant.factory,
        "found": [f"{finding.rule}: {finding.message}"[:200] for finding in run.report.findings],
    }
    if not run.faulty:
        return [
            Finding(
                "zoo-false-alarm",
                "error",
                f"{finding.rule} accuses the clean twin of {name}: {finding.message}",
                finding.where,
                {"factory": run.mutant.factory, **finding.evidence},
            )
            for finding in run.report.findings
        ]
    found = []
    if not run.named:
        said = ", ".join(sorted(run.rules)) or "nothing"
        found.append(
            Finding(
                "zoo-missed",
                "error",
                f"{name} ({run.mutant.shows}) must be named by {run.mutant.rule}; found: {said}",
                evidence=evidence,
            )
        )
    elif not run.placed:
        places = sorted(
            {
                finding.where or "nowhere"
                for finding in run.report.findings
                if finding.rule == run.mutant.rule
            }
        )
        found.append(
            Finding(
                "zoo-wrong-line",
                "error",
                f"{run.mutant.rule} finds {name} at {', '.join(places)}",
                fault_line(run.mutant),
                evidence,
            )
        )
    if run.unforeseen:
        found.append(
            Finding(
                "zoo-unforeseen",
                "warning",
                f"{name} is also found by {', '.join(sorted(run.unforeseen))}",
                evidence=evidence,
                fix="name the rule as a consequence in the registry, with the reason, or mend it",
            )
        )
    return found


def facts(runs: Sequence[Run]) -> dict[str, Any]:
    """Return the counts that are kept as evidence, as JSON values.

    Returns
    -------
    dict
        ``mutants``, ``caught``, ``twins``, ``accused``, ``classes``, lists of names ``missed``,
        ``misplaced``, ``false_alarms``, ``unforeseen``, and ``rules``, the rates by rule.
    """
    faulty = [run for run in runs if run.faulty]
    twins = [run for run in runs if not run.faulty]
    return {
        "mutants": len(faulty),
        "caught": sum(run.caught for run in faulty),
        "twins": len(twins),
        "accused": sum(bool(run.rules) for run in twins),
        "classes": len({n for run in faulty if run.caught for n in run.mutant.classes}),
        "missed": sorted(run.mutant.name for run in faulty if not run.named),
        "misplaced": sorted(run.mutant.name for run in faulty if run.named and not run.placed),
        "false_alarms": sorted(run.mutant.name for run in twins if run.rules),
        "unforeseen": sorted(run.mutant.name for run in faulty if run.unforeseen),
        "rules": [
            {
                "rule": rate.rule,
                "mutants": rate.mutants,
                "caught": rate.caught,
                "twins": rate.twins,
                "accused": rate.accused,
            }
            for rate in rates(runs)
        ],
    }
