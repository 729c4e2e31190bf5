"""Look at a step without a GPU: what in its Python would not survive a capture.

The step runs on CPU or fake tensors under torch's two interception modes. What reads a value on the
host, has a shape that depends on one, copies from pageable memory, keeps what it allocated, or
gives numbers that change with the inputs, is a finding with the line of the step. This is a lint:
it sees torch's operations and cuverify's launches, no other library's, and no stream.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from typing import Any

from cuverify.validators.callable_case import CallableCase
from cuverify.validators.lint_watch import LintSeen, Operation, has_gpu, observe
from cuverify.validators.places import place_of
from cuverify.validators.subject import CallableStep

from cuverify.report import Coverage, Finding, Report, Table

_COVERAGE = (
    "a lint: torch operations and cuverify launches of one run on this machine's CPU; "
    "streams, other libraries and the capture itself are not seen"
)


def lint(case: CallableCase) -> Report:
    """Run a step on CPU or fake tensors and say what would not survive a capture.

    Parameters
    ----------
    case : CallableCase
        CPU tensors stand for those on the device. Fake tensors will do, and tensors on a GPU; where
        some are on a GPU, those on the CPU are the host's own. With `refill` or `vary` two runs are
        compared, which shows numbers and shapes that a graph would freeze.

    Returns
    -------
    Report
        Findings under the capture validator's names, a table of what each run allocates, and what
        was not looked at.

    Notes
    -----
    The step runs two to four times and writes its tensors. Nothing global stays changed.
    """
    report = Report(f"lint of {case.name}")
    step = CallableStep(case)  # knows what the state held
    _seeded(step, case.seeds[0])  # what is made once and kept is made now
    first = _seeded(step, case.seeds[0])
    merged = dict(first.findings)
    report.coverage.append(Coverage("step", "inspected", _COVERAGE))
    report.coverage.append(Coverage("capture", "not inspected", _no_capture()))
    if first.error is not None:
        _add_error(report, case.name, first.error)
    else:
        merged.update(_frozen(step, first, report))
        fake = _on_fakes(case, report)
        merged.update({key: found for key, found in fake.items() if key not in merged})
    report.findings.extend(merged.values())
    rows = [
        [where or "?", name, list(shape), size, times]
        for (where, name, shape), (times, size) in first.allocations.items()
    ]
    columns = ("where", "operation", "shape", "bytes", "times a step")
    report.tables.append(Table("memory that each step allocates, legal from torch", columns, rows))
    return report


def _no_capture() -> str:
    return "a lint captures nothing" if has_gpu() else "no CUDA device"


def _seeded(step: CallableStep, seed: int) -> LintSeen:
    """Run the step once on the inputs of a seed."""
    case = step.case
    if case.refill is not None:
        case.refill(seed)
    if case.vary is not None:
        case.vary(0)
    return _observed(step)


def _observed(step: CallableStep) -> LintSeen:
    """Run the step once, from the state of the beginning."""
    step.restore()
    return observe(step.case)


def _add_error(report: Report, name: str, error: Exception) -> None:
    text = f"{type(error).__name__}: {' '.join(str(error).splitlines()[:2])}"
    if "cuda" in text.lower():
        reason = f"the step wants CUDA here: {text}"
        report.coverage.append(Coverage("rest of the step", "not inspected", reason))
        return
    fix = "Run the step once by itself and read the error."
    message = f"{name} raised on the CPU: {text}"
    report.findings.append(Finding("CV902", "error", message, place_of(error), {}, fix))
    report.coverage.append(Coverage("rest of the step", "not inspected", "the step raised"))


# --- numbers and shapes that change ---------------------------------------------------------------


def _frozen(step: CallableStep, first: LintSeen, report: Report) -> dict[tuple[Any, ...], Finding]:
    """Compare two runs on other inputs; whatever differs besides tensors would be frozen."""
    case = step.case
    if case.refill is None and case.vary is None:
        reason = "without refill or vary there is no other run to compare with"
        report.coverage.append(Coverage("frozen numbers", "not inspected", reason))
        return {}
    found = {}
    if case.vary is not None:
        case.vary(1)
        other = _observed(step)
        case.vary(0)
    else:
        other = _seeded(step, next((s for s in case.seeds if s != case.seeds[0]), 1))
    if other.error is not None:
        _add_error(report, case.name, other.error)
        return {}
    for rule, one, another, what in _differences(first.operations, other.operations):
        values = (one.shapes, another.shapes) if what == "shape" else (one.numbers, another.numbers)
        shown = [str(value) for value in _first_difference(*values)]
        message = (
            f"`{one.name}` gets {shown[0]} on one input and {shown[1]} on another: a graph would "
            f"keep {'the shape' if what == 'shape' else 'the number'} of its capture"
        )
        fix = (
            "Work on the largest shape and mask the rest."
            if what == "shape"
            else "Give the value as a tensor on the device, written in place before the replay."
        )
        # what follows from a shape has another one, too: the first says it
        key = (rule, one.where) if what == "shape" else (rule, one.where, one.name)
        if key in found:
            continue
        found[key] = Finding(
            rule, "error", message, one.where, {"call": one.name, "values": shown}, fix
        )
    if [o.name for o in first.operations] != [o.name for o in other.operations]:
        at = _first_apart(first.operations, other.operations)
        where = at.where if at is not None else None
        name = at.name if at is not None else "the step"
        found["CV302", where, name] = Finding(
            "CV302",
            "error",
            f"the step does other operations on other inputs, `{name}` the first of them; a graph "
            "repeats those of its capture",
            where,
            {"operations": [len(first.operations), len(other.operations)]},
            "Do the same operations for every input; let the device decide by masks.",
        )
    report.coverage.append(
        Coverage("frozen numbers", "inspected", "two runs on different inputs were compared")
    )
    return found


def _differences(
    one: Sequence[Operation], other: Sequence[Operation]
) -> Iterator[tuple[str, Operation, Operation, str]]:
    for a, b in zip(one, other, strict=False):
        if a.name != b.name:
            return
        if a.numbers != b.numbers:
            yield "CV301", a, b, "number"
        elif a.shapes != b.shapes:
            yield "CV302", a, b, "shape"


def _first_difference(left: Sequence[Any], right: Sequence[Any]) -> tuple[Any, Any]:
    for a, b in zip(left, right, strict=False):
        if a != b:
            return a, b
    return left, right


def _first_apart(one: Sequence[Operation], other: Sequence[Operation]) -> Operation | None:
    for a, b in zip(one, other, strict=False):
        if a.name != b.name:
            return a
    longer = max(one, other, key=len)
    rest = longer[min(len(one), len(other)) :]
    return rest[0] if rest else None


# --- fake tensors ---------------------------------------------------------------------------------


def _on_fakes(case: CallableCase, report: Report) -> dict[tuple[Any, ...], Finding]:
    """Run once more on tensors without values: nothing may ask for one."""
    from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

    if any(isinstance(t, FakeTensor) for t in (*case.inputs.values(), *case.outputs.values())):
        report.coverage.append(Coverage("fake tensors", "inspected", "the step's own are fake"))
        return {}
    with FakeTensorMode(allow_non_fake_inputs=True), warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns of addresses that a fake has not
        seen = observe(case)
    if seen.error is not None:
        text = " ".join(str(seen.error).splitlines()[:1])[:200]
        reason = f"the step stopped there: {type(seen.error).__name__}: {text}"
        report.coverage.append(Coverage("fake tensors", "not inspected", reason))
        # what it met before is what the run on values met, but for branches
        return {}
    detail = f"{len(seen.operations)} operations without a single value"
    report.coverage.append(Coverage("fake tensors", "inspected", detail))
    return {key: found for key, found in seen.findings.items() if found.rule == "CV202"}
