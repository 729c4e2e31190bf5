"""Findings of many batches, brought together: one line a fault, however often it was met."""

from __future__ import annotations

import dataclasses
from collections.abc import Hashable, Iterator

from cuverify.report import Finding


class MergedFindings:
    """Keeps the first finding of each kind, and counts the others.

    Iterating gives the findings in the order of their first arrival, with ``seen_times`` in the
    evidence of those that came more than once.
    """

    def __init__(self) -> None:
        self._first: dict[tuple[Hashable, ...], Finding] = {}
        self._count: dict[tuple[Hashable, ...], int] = {}

    def add(self, finding: Finding, *kind: Hashable) -> None:
        """Add a finding.

        Parameters
        ----------
        finding : Finding
        *kind
            Tells it from others of the same rule.
        """
        key = (finding.rule, *kind)
        self._first.setdefault(key, finding)
        self._count[key] = self._count.get(key, 0) + 1

    def __iter__(self) -> Iterator[Finding]:
        for key, finding in self._first.items():
            count = self._count[key]
            if count == 1:
                yield finding
            else:
                evidence = {**finding.evidence, "seen_times": count}
                yield dataclasses.replace(finding, evidence=evidence)


def of_case(name: str, finding: Finding) -> Finding:
    """Return the finding with the name of the case that it belongs to."""
    return dataclasses.replace(
        finding,
        message=f"{name}: {finding.message}",
        evidence={"case": name, **finding.evidence},
    )


def case_fault(name: str, what: str, error: Exception, label: str | None = None) -> Finding:
    """Return the finding that a case's own code failed, which is no verdict on its kernels.

    Parameters
    ----------
    name : str
        Of the case.
    what : str
        Which part of it.
    error : Exception
    label : str, optional
        The inputs it happened on.
    """
    from cuverify.validators.places import place_of

    on = f" on {label}" if label is not None else ""
    return Finding(
        "case",
        "error",
        f"{name}: {what} failed{on}: {type(error).__name__}: {error}",
        place_of(error),
        fix="Mend the case; nothing was judged with it.",
    )
