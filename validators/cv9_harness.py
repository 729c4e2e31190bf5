"""CV9xx: the check itself, and runs that did not come back."""

from __future__ import annotations

from collections.abc import Iterator

from cuverify.validators.observations import CaptureSeen
from cuverify.validators.rule import Rule, Verdict

# calls of the harness into the case; the step's own are judged elsewhere
_HARNESS_STAGES = frozenset({"make", "refill", "poison", "expected", "read", "observe"})


def _harness_faults(seen: CaptureSeen) -> Iterator[Verdict]:
    for fault in seen.faults:
        if fault.stage in _HARNESS_STAGES and not fault.context_lost:
            yield Verdict(
                f"{fault.stage} failed on {fault.label or 'the first inputs'}: {fault.error}",
                where=fault.where,
                evidence={"stage": fault.stage, "error": fault.error, "inputs": fault.label},
            )


def _vacuous(seen: CaptureSeen) -> Iterator[Verdict]:
    runs = seen.replays
    if runs and not any(run.must_change for run in runs):
        yield Verdict(
            f"nothing was judged: in all {len(runs)} replays the outputs held the right answer "
            "before the replay",
            evidence={"replays": len(runs), "inputs": [run.label for run in runs]},
        )
    # a warning: some right batches answer alike, such as moves of no rows
    if seen.other_answers == 0 and len({run.label for run in runs}) > 1:
        yield Verdict(
            "the right answer is the same for all inputs: a graph that ignores its inputs passes",
            evidence={"inputs": list(dict.fromkeys(run.label for run in runs))},
            fix="Let refill() write other inputs for another seed.",
            severity="warning",
        )


def _step_failed(seen: CaptureSeen) -> Iterator[Verdict]:
    for fault in seen.faults:
        if fault.stage in {"step", "replay"} and not fault.context_lost:
            what = "the step" if fault.stage == "step" else "the replay"
            yield Verdict(
                f"{what} raised on {fault.label or 'the first inputs'}: {fault.error}",
                where=fault.where,
                evidence={"stage": fault.stage, "error": fault.error, "inputs": fault.label},
            )


def _context_lost(seen: CaptureSeen) -> Iterator[Verdict]:
    for fault in seen.faults:
        if fault.context_lost:
            yield Verdict(
                f"the device context was lost in {fault.stage} on "
                f"{fault.label or 'the first inputs'}: {fault.error}",
                where=fault.where,
                evidence={"stage": fault.stage, "error": fault.error, "inputs": fault.label},
            )


def _hangs(seen: CaptureSeen) -> Iterator[Verdict]:
    if seen.end is not None and seen.end.status == "timeout":
        yield Verdict(
            f"no answer for {seen.end.silence_s:g} s on {seen.end.label or 'its start'}; "
            f"the process was stopped ({seen.end.ending})",
            evidence={
                "inputs": seen.end.label,
                "limit_s": seen.end.silence_s,
                "ending": seen.end.ending,
                "output": seen.end.log,
            },
        )


def _died(seen: CaptureSeen) -> Iterator[Verdict]:
    if seen.end is not None and seen.end.status in {"died", "raised"}:
        how = seen.end.error or seen.end.ending
        yield Verdict(
            f"the process broke off on {seen.end.label or 'its start'}: {how}",
            evidence={
                "inputs": seen.end.label,
                "ending": seen.end.ending,
                "error": seen.end.error,
                "output": seen.end.log,
            },
        )


RULES = (
    Rule(
        "CV901",
        "the harness could not judge",
        "A pass means nothing when the reference was not compared because the case's own code "
        "failed.",
        "Mend the case: refill(), poison(), expected() and outputs are its part.",
        _harness_faults,
    ),
    Rule(
        "CV902",
        "the step raised",
        "The step failed before anything could be captured, or the replay was refused.",
        "Run the step once by itself and read the error.",
        _step_failed,
    ),
    Rule(
        "CV903",
        "the device context was lost",
        "An illegal access, a trap or a launch failure ends the context of the whole process: "
        "every later call fails with the same error, whoever makes it.",
        "Run the same inputs on the host lane under cuverify.checked(), or the step under "
        "`compute-sanitizer --tool memcheck`: both name the access.",
        _context_lost,
    ),
    Rule(
        "CV904",
        "the run hangs",
        "A kernel that waits for what never comes (a barrier that not all threads reach, a counter "
        "that must be zero on entry, a spin on memory that nobody writes) never lets the device "
        "synchronise.",
        "Run the same inputs on the host lane: its barrier checker says who waits where. Look for "
        "state that one launch leaves behind for the next.",
        _hangs,
    ),
    Rule(
        "CV905",
        "the process of the run broke off",
        "The process ended, or its work raised, outside of everything that is judged: a crash in a "
        "library, the system's memory killer, a broken installation.",
        "Read the output of the process in the evidence, and run the case alone.",
        _died,
    ),
    Rule(
        "CV906",
        "the check could not have failed",
        "An eager run fills the output, the replay writes nothing, and the comparison passes: a "
        "test that proves nothing.",
        "Poison the outputs before the replay that is judged, or restore the inputs in refill() "
        "where the step updates in place.",
        _vacuous,
    ),
)
