"""The host-lane part of a check case: every batch under the checkers, compared with the oracle."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import cuverify
from cuverify import cases as registry
from cuverify.cases import BoundStep, CheckCase
from cuverify.check_findings import MergedFindings, case_fault
from cuverify.errors import CheckerError, CompileError, CuverifyError, ToolchainError
from cuverify.host.options import SCHEDULES
from cuverify.report import Finding
from cuverify.validators.compare import Bounded, Mismatch, compare_all, host_array
from cuverify.validators.places import place_of

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cuverify.host.reports import HostReport

# What to do about each kind of checker report; a kind without a line speaks for itself.
_CHECKER_FIXES = {
    "out-of-bounds": "Guard the access by the extent that the contract gives the argument.",
    "misaligned": "Round the offset to the access's width, or use narrower loads and stores.",
    "uninitialised-read": "Write those bytes first, or declare the argument `read` or `update`.",
    "pending-cp-async": "Wait with ptx::cp_async_wait and a barrier before the access.",
    "race": "Order the two: __syncthreads() in a block, __syncwarp() in a warp, atomics between "
    "blocks.",
    "write-to-read-only": "Declare the argument `write` or `update`, or do not write it.",
    "divergent-barrier": "Take the barrier out of the branch: all threads of a block must reach "
    "it.",
    "deadlock": "Make every thread that is waited for reach the same barrier.",
    "lane-skips-collective": "Let every lane that the mask names reach the call.",
    "lane-outside-mask": "Give the mask of the lanes that do call.",
    "shuffle-from-outside-mask": "Read from lanes of the mask only.",
    "address-sanitizer": "Guard the access; a thread's own arrays count, too.",
    "undefined-behaviour": "Write it so that C++ defines it: a compiler may assume that it never "
    "happens.",
}
OPINION_BUDGET_S = 20.0  # of second opinions in a case: the last may begin before it is spent
OPINION_LIMIT_S = 30.0  # of one launch in them
_FIX_MISMATCH = (
    "Compare kernel and oracle at the first differing element; the checkers found no bad access "
    "and no race in this run."
)
_FIX_PLAIN_ONLY = (
    "The checked build is right and the plain one is not: look for what the checkers do not cover, "
    "such as undefined arithmetic."
)


@dataclass
class HostResult:
    """What the host lane showed of one case.

    Parameters
    ----------
    findings : MergedFindings
    batches : int
        Batches that were run, right or wrong.
    runs : int
        Launch sequences that were judged, over all batches and schedules.
    dynamic_shared : mapping of str to int
        By kernel, the most dynamic shared memory of a launch, in bytes.
    second_opinions : int
        Batches that also ran to their end as programs under ASan and UBSan.
    no_second_opinion : str or None
        Why there are fewer than asked for.
    """

    findings: MergedFindings = field(default_factory=MergedFindings)
    batches: int = 0
    runs: int = 0
    dynamic_shared: dict[str, int] = field(default_factory=dict)
    second_opinions: int = 0
    no_second_opinion: str | None = None


def check_on_host(
    case: CheckCase,
    *,
    seed: int,
    examples: int | None,
    progress: Callable[[str, int, int], None],
    second_opinions: int = 0,
) -> HostResult:
    """Run a case's batches on the host lane: checked with each schedule, then in the plain build.

    Some of the batches in which nothing was found run once more as programs of their own, under the
    compiler's sanitizers.

    Parameters
    ----------
    case : CheckCase
    seed : int
        Draws batches, and with the batch's number the random schedules.
    examples : int or None
    progress : callable
        Told the batch, how many are done, and of how many.
    second_opinions : int
        How many, from the first batch to the last.

    Returns
    -------
    HostResult

    Raises
    ------
    ToolchainError
        There is no C++ compiler.
    """
    stage = _HostStage(case, seed, second_opinions)
    try:
        batches = registry.draw(case.batches, seed=seed, examples=examples)
    except Exception as error:
        stage.add_case_fault("batches()", error)
        return stage.result
    stage.share_out(len(batches))
    for number, (label, batch) in enumerate(batches):
        progress(label, number, len(batches))
        stage.check_batch(number, label, batch)
        if stage.unbuildable:
            break
    if stage.result.runs and not stage.something_to_do:
        stage.result.findings.add(
            Finding(
                "case",
                "error",
                f"{case.name}: nothing was judged: before every run the outputs held the right "
                "answer, or there are none",
                fix="Poison the outputs in poison(), or restore the inputs in refill() where the "
                "step updates in place.",
            ),
            "vacuous",
        )
    return stage.result


class _HostStage:
    """The runs of one case."""

    def __init__(self, case: CheckCase, seed: int, second_opinions: int) -> None:
        self.case = case
        self.seed = seed
        self.opinions = second_opinions
        self.opinions_due: set[int] = set()  # numbers of batches
        self.opinion_s = 0.0  # what they have cost
        self.result = HostResult()
        self.unbuildable = False  # no batch changes that
        self.something_to_do = False  # in some batch, a step that does nothing would be wrong

    def check_batch(self, number: int, label: str, batch: Any) -> None:
        try:
            step = self.case.step(batch, "numpy")
            step.refill(batch)
            expected = step.expected()
        except ToolchainError:
            raise
        except Exception as error:
            self.add_case_fault("step, refill or expected", error, label)
            return
        run = _Run(self, step, label, batch, expected, self.seed + number)
        verdicts = [not self.unbuildable and run.judge(schedule) for schedule in SCHEDULES]
        if all(verdicts):
            # last, and only after clean runs: the plain build does not stop at an access outside
            # its buffers, which could take this process down
            clean = run.judge("plain")
            if clean and number in self.opinions_due:
                self.second_opinion(run)
        self.result.batches += 1

    def share_out(self, batches: int) -> None:
        """Choose the batches that get a second opinion, evenly."""
        last = max(1, min(self.opinions, batches) - 1)
        self.opinions_due = {
            (batches - 1) * at // last for at in range(min(self.opinions, batches))
        }

    def second_opinion(self, run: _Run) -> None:
        """Run a clean batch under the sanitizers, if they work here and there is time."""
        from cuverify.host.standalone import why_not

        result = self.result
        if self.opinion_s > OPINION_BUDGET_S:
            result.no_second_opinion = f"{OPINION_BUDGET_S:g} s a case were spent"
        elif reason := why_not():
            result.no_second_opinion = reason
        else:
            started = time.monotonic()
            run.judge("sanitized")
            self.opinion_s += time.monotonic() - started

    def compare(
        self, step: BoundStep, expected: Mapping[str, NDArray[Any] | Bounded]
    ) -> list[Mismatch]:
        outputs = {name: host_array(tensor) for name, tensor in step.outputs.items()}
        return compare_all(outputs, expected, getattr(self.case, "tolerances", None))

    def add_case_fault(self, what: str, error: Exception, label: str | None = None) -> None:
        finding = case_fault(self.case.name, what, error, label)
        self.result.findings.add(finding, what, finding.where, type(error).__name__)


@dataclass
class _Run:
    """One batch with its step, to be run several times."""

    stage: _HostStage
    step: BoundStep
    label: str
    batch: Any
    expected: Mapping[str, NDArray[Any] | Bounded]
    seed: int

    @property
    def findings(self) -> MergedFindings:
        return self.stage.result.findings

    def judge(self, schedule: str) -> bool:
        """Run once and return whether nothing was wrong.

        Under the checkers with a schedule, in the ``"plain"`` build, or ``"sanitized"``.
        """
        from cuverify.launches import record_launches

        told = self._told(schedule)
        try:
            self.step.refill(self.batch)
            self.step.poison()
            if not self.stage.something_to_do:
                before = self.stage.compare(self.step, self.expected)
                self.stage.something_to_do = bool(before)
        except Exception as error:
            self.stage.add_case_fault("refill, poison or outputs", error, self.label)
            return False
        try:
            with record_launches() as records, _lane(schedule, self.seed):
                self.step()
        except CheckerError as error:
            self._count(schedule)
            self._add_reports(error, told)
            return False
        except CompileError as error:
            self.stage.unbuildable = True
            self._add_compile_error(error)
            return False
        except ToolchainError:
            raise
        except Exception as error:
            self._add_step_error(error, told)
            return False
        self._count(schedule)
        shared = self.stage.result.dynamic_shared
        for record in records:
            shared[record.kernel] = max(shared.get(record.kernel, 0), record.shared)
        mismatches = self.stage.compare(self.step, self.expected)
        for mismatch in mismatches:
            self._add_mismatch(mismatch, schedule, told)
        return not mismatches

    def _count(self, schedule: str) -> None:
        if schedule == "sanitized":
            self.stage.result.second_opinions += 1
        else:
            self.stage.result.runs += 1

    def _told(self, schedule: str) -> dict[str, Any]:
        told: dict[str, Any] = {"case": self.stage.case.name, "inputs": self.label}
        told["schedule"] = schedule
        if schedule == "random":
            told["seed"] = self.seed
        return told

    def _add_reports(self, error: CheckerError, told: Mapping[str, Any]) -> None:
        for report in error.reports:
            if report.kind in (
                "time-limit",
                "crash",
            ):  # says more of the machine than of the kernel
                self.stage.result.no_second_opinion = f"{self.label}: {report.message}"
                self.stage.result.second_opinions -= 1
                continue
            # which of two racing lines is met first is the schedule's doing
            sides = sorted((side.file, side.line) for side in (report.actor, report.other) if side)
            finding = Finding(
                f"host-{report.kind}",
                "error",
                f"{self.stage.case.name}: `{error.kernel}`: {report.message}",
                f"{report.file}:{report.line}",
                {**told, "kernel": error.kernel, **_report_evidence(report)},
                _CHECKER_FIXES.get(report.kind),
            )
            self.findings.add(finding, *sides)

    def _add_compile_error(self, error: CompileError) -> None:
        name = self.stage.case.name
        errors = [entry for entry in error.diagnostics if entry.severity == "error"]
        for entry in errors:
            finding = Finding(
                "host-compile",
                "error",
                f"{name}: {entry.message} (host lane)",
                f"{entry.file}:{entry.line}",
                {"excerpt": entry.excerpt} if entry.excerpt else {},
            )
            self.findings.add(finding, entry.file, entry.line, entry.message)
        if not errors:
            self.findings.add(Finding("host-compile", "error", f"{name}: {error}"), str(error))

    def _add_step_error(self, error: Exception, told: Mapping[str, Any]) -> None:
        what = "refused the launch" if isinstance(error, CuverifyError) else "raised"
        finding = Finding(
            "host-step",
            "error",
            f"{self.stage.case.name} on {self.label}: the step {what}: "
            f"{type(error).__name__}: {error}",
            place_of(error),
            told,
        )
        self.findings.add(finding, finding.where, type(error).__name__)

    def _add_mismatch(self, mismatch: Mismatch, schedule: str, told: Mapping[str, Any]) -> None:
        plain = schedule == "plain"
        finding = Finding(
            "host-mismatch",
            "error",
            f"{self.stage.case.name} on {self.label}, {schedule}: {mismatch}",
            evidence={**told, **mismatch.evidence()},
            fix=_FIX_PLAIN_ONLY if plain else _FIX_MISMATCH,
        )
        self.findings.add(finding, mismatch.output, plain)


def _lane(schedule: str, seed: int) -> AbstractContextManager[Any]:
    if schedule == "plain":
        return nullcontext()
    if schedule == "sanitized":
        return cuverify.sanitized(time_limit_s=OPINION_LIMIT_S)
    return cuverify.checked(schedule=schedule, seed=seed)


def _report_evidence(report: HostReport) -> dict[str, Any]:
    evidence: dict[str, Any] = {
        "block": list(report.actor.block),
        "thread": list(report.actor.thread),
    }
    if report.argument is not None:
        what = "shared array" if report.is_shared else "argument"
        evidence[what] = f"{report.argument}, byte {report.byte} of {report.bytes}"
    if report.other is not None:
        evidence["other"] = str(report.other)
    return evidence
