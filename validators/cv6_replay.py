"""CV6xx: what the runs computed."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from cuverify.validators.compare import Mismatch
from cuverify.validators.observations import CaptureSeen, OutputSeen
from cuverify.validators.rule import Rule, Verdict


def _differs(seen: CaptureSeen) -> Iterator[Verdict]:
    """Yield the first wrong replay of each output that was written."""
    reported: dict[str, int] = {}
    wrong = [
        (number, run.label, output)
        for number, run in enumerate(seen.replays)
        for output in run.outputs
        if output.mismatch is not None and not _unwritten(output)
    ]
    for _, _, output in wrong:
        reported[output.name] = reported.get(output.name, 0) + 1
    for number, label, output in wrong:
        count = reported.pop(output.name, 0)
        if not count or output.mismatch is None:
            continue
        before = _eager_mismatch(seen, output.name)
        evidence = _evidence(output.mismatch, number, label)
        evidence["unwritten"] = output.unchanged
        evidence["replays_wrong"] = count
        evidence["replays"] = len(seen.replays)
        evidence["eager_run"] = "right" if before is None else str(before)
        yield Verdict(
            f"replay {number} on {label}: {output.mismatch}",
            evidence=evidence,
            fix=None if before is None else _FIX_EAGER,
        )


def _not_written(seen: CaptureSeen) -> Iterator[Verdict]:
    """Yield the first replay of each output that left it as it was."""
    done = set()
    for number, run in enumerate(seen.replays):
        for output in run.outputs:
            if output.mismatch is None or not _unwritten(output) or output.name in done:
                continue
            done.add(output.name)
            evidence = _evidence(output.mismatch, number, run.label)
            evidence["must_change"] = output.must_change
            evidence["unchanged"] = output.unchanged
            yield Verdict(
                f"replay {number} on {run.label} left `{output.name}` unwritten: "
                f"{output.unchanged} of the {output.must_change} elements that must change hold "
                "what they held before",
                evidence=evidence,
            )


def _eager_differs(seen: CaptureSeen) -> Iterator[Verdict]:
    if seen.eager is None:
        return
    for output in seen.eager.outputs:
        if output.mismatch is not None:
            yield Verdict(
                f"eager run on {seen.eager.label}: {output.mismatch}",
                evidence={"inputs": seen.eager.label, **output.mismatch.evidence()},
            )


def _unwritten(output: OutputSeen) -> bool:
    """Tell whether every wrong element is one that the run did not touch."""
    return (
        output.mismatch is not None
        and not output.mismatch.reason
        and 0 < output.unchanged == output.mismatch.count
    )


def _eager_mismatch(seen: CaptureSeen, name: str) -> Mismatch | None:
    if seen.eager is None:
        return None
    return next((out.mismatch for out in seen.eager.outputs if out.name == name), None)


def _evidence(mismatch: Mismatch, number: int, label: str) -> dict[str, Any]:
    return {"replay": number, "inputs": label, **mismatch.evidence()}


_FIX_EAGER = "The eager run is wrong too: look at the kernel first, the capture comes second."

RULES = (
    Rule(
        "CV601",
        "a replay differs from the reference",
        "The graph computes something else than the reference on the inputs that were in the "
        "buffers: a scalar or a grid of the capture was baked in, an input was left outside, "
        "memory was reused.",
        "Compare the arguments with those of the capture: whatever varies between steps must be "
        "read from a buffer on the device, and must be written in place before the replay.",
        _differs,
    ),
    Rule(
        "CV602",
        "a replay does not write an output",
        "The output held a pattern that is no right answer before the replay and still holds it "
        "after. Tests that fill the output by an eager run first pass here without the graph "
        "doing anything.",
        "Look for a launch outside the graph (CV101), an output that is rebound instead of "
        "written in place, and a grid that does not cover the output.",
        _not_written,
    ),
    Rule(
        "CV603",
        "the eager run differs from the reference",
        "The step is wrong without any graph.",
        "Run the same inputs on the host lane under cuverify.checked(): it names the line of an "
        "out-of-bounds access, an uninitialised read or a race.",
        _eager_differs,
    ),
)
