"""The part `zoo`: what the validator finds in steps that are known to be faulty, or right."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from cuverify.errors import EvidenceError
from cuverify.evidence.fields import is_count, is_text
from cuverify.evidence.parts import Part
from cuverify.report import Table

_COUNTS = ("mutants", "caught", "twins", "accused", "classes")
_LISTS = ("missed", "misplaced", "false_alarms", "unforeseen", "not_run")
_RATE = ("rule", "mutants", "caught", "twins", "accused")


def _validate(problems: list[str], where: str, data: Any) -> None:
    names = (*_COUNTS, *_LISTS, "rules")
    if not isinstance(data, dict) or set(data) != set(names):
        problems.append(f"{where} must hold exactly {', '.join(names)}")
        return
    problems.extend(
        f"{where}.{name} is {data[name]!r}, not a count"
        for name in _COUNTS
        if not is_count(data[name])
    )
    problems.extend(
        f"{where}.{name} is {data[name]!r}, not a list of texts"
        for name in _LISTS
        if not (isinstance(data[name], list) and all(map(is_text, data[name])))
    )
    rules = data["rules"]
    if not isinstance(rules, list) or not rules:
        problems.append(f"{where}.rules is no list of rates, or empty")
        return
    for index, rate in enumerate(rules):
        here = f"{where}.rules[{index}]"
        if not isinstance(rate, dict) or set(rate) != set(_RATE):
            problems.append(f"{here} must hold exactly {', '.join(_RATE)}")
        elif not is_text(rate["rule"]) or not all(is_count(rate[name]) for name in _RATE[1:]):
            problems.append(f"{here} is {rate!r}, not a rule and four counts")
        elif rate["caught"] > rate["mutants"] or rate["accused"] > rate["twins"]:
            problems.append(f"{here} found more than there was")
    if data["mutants"] == 0:
        problems.append(f"{where} says that no mutant ran")


def _summary(data: Mapping[str, Any]) -> str:
    return (
        f"{data['caught']} of {data['mutants']} mutants caught, "
        f"{data['accused']} of {data['twins']} twins accused, {data['classes']} classes"
    )


def _failures(data: Mapping[str, Any]) -> Iterator[str]:
    for name in data["missed"]:
        yield f"a missed mutant: {name}"
    for name in data["misplaced"]:
        yield f"a mutant found at another line: {name}"
    for name in data["false_alarms"]:
        yield f"a clean twin that is accused: {name}"


def _table(gpu: str, data: Mapping[str, Any]) -> Table:
    rows = [[rate[name] for name in _RATE] for rate in data["rules"]]
    return Table(f"zoo on {gpu}", _RATE, rows)


def _record(root: Path) -> tuple[str, dict[str, Any]]:
    from cuverify.validators.zoo import rates, run

    mutants, not_run = run.judgeable(run.chosen(()))
    runs = run.run_zoo(mutants)
    if not runs:
        raise EvidenceError("no mutant can be judged here: nothing was recorded")
    return "cuverify zoo", {**rates.facts(runs), "not_run": sorted(not_run)}


PART = Part(
    groups=("lanes", "validators"),
    validate=_validate,
    summary=_summary,
    failures=_failures,
    table=_table,
    record=_record,
)
