"""CV6xx: what the runs computed."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

from cuverify.validators.compare import Mismatch
from cuverify.validators.judging import (
    SMALL,
    disturbed,
    drift_evidence,
    launches_of,
    noisy,
    where_launched,
)
from cuverify.validators.observations import CaptureSeen, DriftSeen, OutputSeen
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


# trials of what other inputs leave behind: CV505
_STALE = ("stale", "restore")


def _not_idempotent(seen: CaptureSeen) -> Iterator[Verdict]:
    told = set()
    for trial in seen.trials:
        if trial.name not in ("again", "idempotent", "eager again", "after eager"):
            continue
        for drift in trial.drifts:
            output = drift.mismatch.output
            if output in told or not _large(seen, drift):
                continue
            if trial.name == "after eager" and (noisy(seen) or any(disturbed(seen, *_STALE))):
                continue
            told.add(output)
            runs = "eager runs" if trial.name == "eager again" else "replays"
            yield Verdict(
                f"two {runs} on the same inputs give two results: {drift.mismatch}",
                evidence=drift_evidence(drift, found_by=trial.name),
            )


def _large(seen: CaptureSeen, drift: DriftSeen) -> bool:
    """Tell whether a difference is more than rounding in another order."""
    if drift.right is not None:
        return not drift.right
    return seen.deterministic and (drift.relative is None or drift.relative > SMALL)


def _uninitialised(seen: CaptureSeen) -> Iterator[Verdict]:
    for trial, drift in disturbed(seen, "scratch"):
        yield Verdict(
            f"the replay depends on what scratch `{trial.subject}` held before: {drift.mismatch}",
            evidence=drift_evidence(drift, poisoned=trial.subject),
        )
    for _, drift in disturbed(seen, "free memory"):
        yield Verdict(
            "the step reads memory that it allocated and never wrote: with poison in free memory "
            f"{drift.mismatch}",
            evidence=drift_evidence(drift, found_by="an eager run in poisoned free memory"),
        )


def _nondeterministic(seen: CaptureSeen) -> Iterator[Verdict]:
    if not seen.deterministic:
        return
    told = set()
    for trial in seen.trials:
        if trial.name not in ("again", "eager again", "idempotent"):
            continue
        for drift in trial.drifts:
            output = drift.mismatch.output
            if output not in told and not _large(seen, drift):
                told.add(output)
                yield Verdict(
                    f"equal runs give other bits: {drift.mismatch}",
                    evidence=drift_evidence(drift, found_by=trial.name),
                )


def _launch_changed(seen: CaptureSeen) -> Iterator[Verdict]:
    """Yield nodes whose launch is not the one that was asked for."""
    if seen.graph.not_inspected is not None or seen.graph.unseen_bodies:
        return
    asked: dict[str, list[Any]] = {}
    for launch in launches_of(seen):
        asked.setdefault(launch.kernel, []).append(launch)
    for kernel, launches in asked.items():
        nodes = [node for node in seen.graph.nodes if node.kernel == kernel]
        if len(nodes) != len(launches):
            continue
        for number, (launch, node) in enumerate(zip(launches, nodes, strict=True)):
            for what in ("grid", "block", "shared"):
                before, after = getattr(launch, what), getattr(node, what)
                if before and _three(before) != _three(after):
                    yield Verdict(
                        f"`{kernel}` was launched with {what} {before} and the graph has {after}",
                        where=launch.where or where_launched(seen, kernel, number),
                        evidence={"kernel": kernel, "asked": before, "graph": after},
                    )
    for wide in seen.wide_arguments:
        yield Verdict(
            f"argument {wide.index} of `{wide.kernel}` has {wide.size} bytes and was given as a "
            f"Python float of 8: the kernel reads {wide.reads:g} instead of {wide.given:g}",
            where=wide.where,
            evidence={
                "kernel": wide.kernel,
                "argument": wide.index,
                "given": wide.given,
                "kernel_reads": wide.reads,
            },
            fix="Pass numpy.float32(x) for a `float` parameter.",
        )


def _three(value: Any) -> tuple[int, ...]:
    """Return a grid as three numbers, and a number as one."""
    if isinstance(value, int):
        return (value,)
    return (*value, *(1 for _ in range(3 - len(value))))


def _programmatic(seen: CaptureSeen) -> Iterator[Verdict]:
    """Yield programmatic edges where results are wrong; that a kernel waits is not to be seen."""
    drifts = [drift for trial in seen.trials for drift in trial.drifts]
    wrong = [output for run in seen.replays for output in run.outputs if output.mismatch]
    if not drifts and not wrong:
        return
    for first, second, kind in seen.graph.edges:
        if kind != "programmatic":
            continue
        one, other = (
            seen.graph.nodes[number].title if 0 <= number < len(seen.graph.nodes) else "?"
            for number in (first, second)
        )
        yield Verdict(
            f"`{other}` may start before `{one}` has ended (a programmatic edge), and replays are "
            "wrong or differ",
            where=where_launched(seen, other),
            evidence={"before": one, "after": other},
        )


def _differs_from_eager(seen: CaptureSeen) -> Iterator[Verdict]:
    if noisy(seen):
        return
    trial = seen.trial("against eager")
    for drift in trial.drifts if trial is not None else ():
        if drift.right is not False:
            yield Verdict(
                f"the replay gives other bits than the eager run: {drift.mismatch}",
                evidence=drift_evidence(drift),
            )


def _memory_grows(seen: CaptureSeen) -> Iterator[Verdict]:
    for memory in seen.memory:
        if memory.what != "replays":
            continue
        for what in ("allocated", "reserved"):  # of the device others take, too
            values = getattr(memory, what)
            steps = [after - before for before, after in pairwise(values)]
            if len(steps) > 1 and all(step > 0 for step in steps):
                yield Verdict(
                    f"{what} memory grows with each round of {memory.times} replays: "
                    f"{', '.join(map(str, values))} bytes",
                    evidence={"bytes": list(values), "replays_a_round": memory.times},
                )
                break


def _other_stream(seen: CaptureSeen) -> Iterator[Verdict]:
    for _, drift in disturbed(seen, "stream"):
        yield Verdict(
            f"replayed on another stream the result differs: {drift.mismatch}",
            evidence=drift_evidence(drift),
        )


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
    Rule(
        "CV604",
        "a run depends on the one before",
        "A counter, a semaphore or an accumulator must be zero on entry, and the step does not "
        "reset it. The first run is right; the second doubles, or hangs.",
        "Reset the state at the start of the step, inside the graph, or at the end of the kernel "
        "that used it.",
        _not_idempotent,
    ),
    Rule(
        "CV605",
        "a result depends on memory that was never written",
        "torch.empty holds zeros while memory is fresh, and old data later. An accumulator that is "
        "added to, or a tile that is not covered, works in tests and fails in service.",
        "Initialise it inside the step (zero_(), or the first block writes instead of adding).",
        _uninitialised,
    ),
    Rule(
        "CV606",
        "equal runs give other bits",
        "Floating-point atomics, or a split whose parts are added in the order of their arrival. "
        "Greedy decoding then depends on timing, and no bitwise test can be written.",
        "Add the parts in a fixed order; or declare it: deterministic=False.",
        _nondeterministic,
    ),
    Rule(
        "CV607",
        "a launch is not the one that was asked for",
        "Launch attributes are set on the function, and another launch may change them; an empty "
        "grid becomes one block; a Python float is 8 bytes where the kernel reads 4.",
        "Compare grid, shared memory and argument widths with the kernel's signature; cuverify's "
        "Kernel does so before each launch.",
        _launch_changed,
    ),
    Rule(
        "CV608",
        "a kernel may overlap the one before it",
        "Programmatic dependent launch lets a kernel begin early. Without griddepcontrol.wait it "
        "reads what its predecessor has not written yet, and only in the graph.",
        "Wait (cudaGridDependencySynchronize) before the first read of the predecessor's results.",
        _programmatic,
    ),
    Rule(
        "CV609",
        "a replay gives other bits than the eager run",
        "Another algorithm was chosen in the capture: a workspace was missing, a heuristic saw "
        "another state, a branch was taken.",
        "Compare the kernel names of the warm-up with those of the graph; or give a tolerance and "
        "declare deterministic=False.",
        _differs_from_eager,
        severity="warning",
    ),
    Rule(
        "CV610",
        "memory grows with the replays",
        "Something allocates at every step and keeps it: a list of outputs, an event, a plan.",
        "Look at what the refill and the code around the replay keep.",
        _memory_grows,
    ),
    Rule(
        "CV611",
        "the result depends on the stream of the replay",
        "A graph may be launched on any stream. One whose result changes takes part in an order "
        "that only the captured stream had.",
        "Make every dependence part of the graph: events inside the capture, no work beside it.",
        _other_stream,
    ),
)
