"""The part `check`: every case's GPU batches, many of them, captured and replayed."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cuverify.errors import EvidenceError
from cuverify.evidence.fields import is_count, is_text
from cuverify.evidence.parts import Part
from cuverify.report import Table

EXAMPLES = {"verify_attention": 300}
"""Batches that a case draws beside its realistic ones, where its own number is too small."""

_SILENCE_S = 120.0
_COUNTS = ("batches", "captures", "launches", "kernel_nodes", "replays")
_NAMES = ("case", *_COUNTS, "findings", "not_inspected")


def _validate(problems: list[str], where: str, data: Any) -> None:
    if not isinstance(data, list) or not data:
        problems.append(f"{where} is no list of cases, or empty")
        return
    for index, entry in enumerate(data):
        here = f"{where}[{index}]"
        if not isinstance(entry, dict) or set(entry) != set(_NAMES):
            problems.append(f"{here} must hold exactly {', '.join(_NAMES)}")
            continue
        if not is_text(entry["case"]):
            problems.append(f"{here}.case is {entry['case']!r}, not a name")
        problems.extend(
            f"{here}.{name} is {entry[name]!r}, not a count"
            for name in _COUNTS
            if not is_count(entry[name])
        )
        problems.extend(
            f"{here}.{name} is {entry[name]!r}, not a list of texts"
            for name in ("findings", "not_inspected")
            if not (isinstance(entry[name], list) and all(map(is_text, entry[name])))
        )
        if entry["batches"] == 0:
            problems.append(f"{here} says that no batch ran")


def _summary(data: Sequence[Mapping[str, Any]]) -> str:
    findings = sum(len(entry["findings"]) for entry in data)
    batches = sum(entry["batches"] for entry in data)
    replays = sum(entry["replays"] for entry in data)
    return f"{len(data)} cases, {batches} batches, {replays} replays, {findings} findings"


def _failures(data: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    for entry in data:
        for finding in entry["findings"]:
            yield f"a finding in {entry['case']}: {finding}"


def _table(gpu: str, data: Sequence[Mapping[str, Any]]) -> Table:
    rows = [
        [entry["case"], *(entry[name] for name in _COUNTS), len(entry["findings"])]
        for entry in data
    ]
    return Table(f"check on {gpu}", ("case", *_COUNTS, "findings"), rows)


def _record(root: Path) -> tuple[str, list[dict[str, Any]]]:
    from cuverify import cases
    from cuverify.check_device import check_on_device, jobs_of_this_machine

    most = jobs_of_this_machine()

    def run(name: str) -> dict[str, Any]:
        result = check_on_device(
            name,
            seed=0,
            examples=EXAMPLES.get(name),
            silence_s=_SILENCE_S,
            progress=lambda label, done, total: None,
            jobs=most if most < 4 else most - most // 4 if name in EXAMPLES else most // 4,
        )
        if not result.batches:
            raise EvidenceError(f"no batch of {name} came to its end: nothing was recorded")
        return {
            "case": name,
            "batches": result.batches,
            **{count: result.totals.get(count, 0) for count in _COUNTS[1:]},
            "findings": [f"{f.rule} {f.message}" for f in result.findings],
            "not_inspected": sorted({f"{g.subject}: {g.detail}" for g in result.gaps}),
        }

    names = sorted(cases.names(), key=lambda name: name not in EXAMPLES)  # the longest begin first
    # two cases at a time, where that leaves the second one a child of its own
    with ThreadPoolExecutor(2 if most >= 4 else 1) as pool:
        data = sorted(pool.map(run, names), key=lambda entry: str(entry["case"]))
    more = " ".join(f"{name}: {number}" for name, number in EXAMPLES.items())
    return f"the batches for a GPU of all cases, captured and replayed; drawn for {more}", data


PART = Part(
    groups=("kernels", "lanes", "validators"),
    validate=_validate,
    summary=_summary,
    failures=_failures,
    table=_table,
    record=_record,
)
