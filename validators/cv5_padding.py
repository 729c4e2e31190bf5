"""CV5xx: padding, sizes inside a bucket, and memory beside the buffers."""

from __future__ import annotations

from collections.abc import Iterator

from cuverify.validators.judging import disturbed, drift_evidence
from cuverify.validators.observations import CaptureSeen
from cuverify.validators.rule import Rule, Verdict

_PARTS = {
    "input": "which is an input",
    "storage": "in the rest of its storage",
    "behind": "behind its end",
}


def _garbage(seen: CaptureSeen) -> Iterator[Verdict]:
    for trial, drift in disturbed(seen, "padding"):
        yield Verdict(
            f"garbage in the padding of `{trial.subject}` changes real elements: {drift.mismatch}",
            evidence=drift_evidence(drift, padding_of=trial.subject),
        )


def _nan(seen: CaptureSeen) -> Iterator[Verdict]:
    for trial, drift in disturbed(seen, "padding nan"):
        yield Verdict(
            f"NaN in the padding of `{trial.subject}` changes real elements: {drift.mismatch}",
            evidence=drift_evidence(drift, padding_of=trial.subject),
        )


def _reads_behind(seen: CaptureSeen) -> Iterator[Verdict]:
    for trial, drift in disturbed(seen, "behind"):
        yield Verdict(
            f"the step reads behind the end of `{trial.subject}`: {drift.mismatch}",
            evidence=drift_evidence(drift, changed=trial.detail),
        )


def _stale(seen: CaptureSeen) -> Iterator[Verdict]:
    told = set()
    for trial, drift in disturbed(seen, "stale", "restore"):
        told.add(drift.mismatch.output)
        back = (
            "the captured inputs after others"
            if trial.name == "restore"
            else f"{trial.subject} after other inputs than before"
        )
        yield Verdict(
            f"{back} give another result: {drift.mismatch}",
            evidence=drift_evidence(drift),
        )
    good: set[tuple[str, str]] = set()
    for run in seen.replays:
        for output in run.outputs:
            key = run.label, output.name
            if output.mismatch is None or output.mismatch.reason:
                good.add(key)
            elif key in good and output.name not in told and not _unsteady(seen):
                told.add(output.name)
                yield Verdict(
                    f"{run.label} was right and is wrong after other inputs: {output.mismatch}",
                    evidence={"inputs": run.label, **output.mismatch.evidence()},
                )


def _unsteady(seen: CaptureSeen) -> bool:
    return any(trial.drifts for trial in seen.trials if trial.name == "again")


def _writes_beside(seen: CaptureSeen) -> Iterator[Verdict]:
    for write in seen.writes:
        yield Verdict(
            f"the {write.run} writes {write.count} bytes of `{write.name}`, "
            f"{_PARTS.get(write.part, write.part)}; the first at byte {write.first}",
            evidence={
                "tensor": write.name,
                "part": write.part,
                "bytes": write.count,
                "first_byte": write.first,
            },
        )


RULES = (
    Rule(
        "CV501",
        "padding changes real results",
        "A batch is padded to the size that was captured. Rows and positions behind the real ones "
        "hold what the last batch left; whatever reads them computes with garbage.",
        "Bound every loop by the real lengths on the device, and give padded rows a slot and a "
        "position of their own.",
        _garbage,
    ),
    Rule(
        "CV502",
        "NaN in the padding spreads into real results",
        "Masking by multiplication keeps a NaN: 0 x NaN is NaN. It shows when freed memory with a "
        "NaN becomes padding, days later.",
        "Select instead of multiplying (`mask ? x : 0`), and skip padded rows.",
        _nan,
    ),
    Rule(
        "CV503",
        "the step reads behind the end of an input",
        "A buffer that is sized for the average holds until the maximum comes: a mask for the "
        "longest context, an index list for the fullest batch. Reads behind it find the "
        "neighbour's data.",
        "Compute the size from the maximum of every factor, and check it when the buffer is made.",
        _reads_behind,
    ),
    Rule(
        "CV505",
        "what came before in the buffers changes a result",
        "A smaller batch in buffers of a larger one leaves a stale tail: lengths, positions or "
        "index entries of the last step that the kernel still reads.",
        "Write the whole buffer in each refill, or bound the reads by lengths that are written.",
        _stale,
    ),
    Rule(
        "CV506",
        "the step writes outside of its outputs",
        "A write behind the end, between strided rows, or into an input: it hits whoever owns "
        "that memory, and nothing fails.",
        "Run the same inputs on the host lane under cuverify.checked(), or under "
        "`compute-sanitizer --tool memcheck`: they name the line.",
        _writes_beside,
    ),
)
