"""The host-lane stages of several cases at a time, each in a child process.

A processor runs one launch at a time, so cases share the processors; and a plain build that goes
astray ends its child, not the check.
"""

from __future__ import annotations

import contextlib
import dataclasses
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import wait as wait_for
from typing import TYPE_CHECKING, Any

from cuverify.check_host import HostResult, check_on_host
from cuverify.errors import ToolchainError
from cuverify.host.options import current_options, host_options
from cuverify.report import Finding
from cuverify.resources import processors

if TYPE_CHECKING:
    from cuverify.validators.child import ChildOutcome, Emit

SILENCE_S = 900.0  # a batch takes seconds, a first build of a kernel half a minute
_LOOK_S = 0.2  # between two looks at what a child has said

_Told = tuple[str, int, int]  # the batch, how many are done, of how many


class HostShares:
    """Host-lane stages in the background, a child process a processor.

    They run with the settings of the host lane that are in force here, but for counts. A context
    manager; at its end, what has not begun is given up and what runs is ended.

    Parameters
    ----------
    seed, examples, second_opinions
        As for `cuverify.check_host.check_on_host`.
    """

    def __init__(self, *, seed: int, examples: int | None, second_opinions: int) -> None:
        options = dataclasses.replace(current_options(), counts=None)
        self._work = {
            "seed": seed,
            "examples": examples,
            "second_opinions": second_opinions,
            "options": dataclasses.asdict(options),
        }
        self._pool = ThreadPoolExecutor(max_workers=processors())
        self._jobs: dict[str, Future[ChildOutcome]] = {}
        self._told: dict[str, _Told] = {}
        self._ended = threading.Event()

    def begin(self, reference: str) -> None:
        """Begin with a case, by the reference that finds it."""
        self._jobs[reference] = self._pool.submit(self._run, reference)

    def _run(self, reference: str) -> ChildOutcome:
        from cuverify.validators.child import run_child

        def hear(event: Mapping[str, Any]) -> None:
            if "batch" in event:
                self._told[reference] = event["batch"], event["done"], event["total"]

        return run_child(
            f"{__name__}:run_share",
            {"reference": reference, **self._work},
            silence_s=SILENCE_S,
            on_event=hear,
            cancelled=self._ended,
        )

    def result(
        self, reference: str, name: str, progress: Callable[[str, int, int], None]
    ) -> HostResult:
        """Wait for a case that was begun.

        Parameters
        ----------
        reference : str
        name : str
            The case's own name, for findings.
        progress : callable
            As for `cuverify.check_host.check_on_host`.

        Raises
        ------
        ToolchainError
            There is no C++ compiler.
        """
        job = self._jobs[reference]
        while wait_for([job], _LOOK_S).not_done:
            if reference in self._told:
                progress(*self._told[reference])
        return result_of(name, job.result())

    def __enter__(self) -> HostShares:
        return self

    def __exit__(self, *error: object) -> None:
        self._ended.set()
        self._pool.shutdown(cancel_futures=True)


def run_share(work: Mapping[str, Any], emit: Emit) -> None:
    """Run one case in a child process and tell what came of it.

    Parameters
    ----------
    work : mapping
        ``reference``, ``seed``, ``examples``, ``second_opinions``, and the ``options`` of the host
        lane.
    emit : callable
        Told each batch, and at the end the result.
    """
    from cuverify import cases

    def tell(label: str, done: int, total: int) -> None:
        emit({"batch": label, "done": done, "total": total})

    with host_options(**work["options"]):
        result = check_on_host(
            cases.load(work["reference"]),
            seed=work["seed"],
            examples=work["examples"],
            progress=tell,
            second_opinions=work["second_opinions"],
        )
    told = {field.name: getattr(result, field.name) for field in dataclasses.fields(result)}
    emit({"result": {**told, "findings": [finding.to_json() for finding in result.findings]}})


def result_of(name: str, outcome: ChildOutcome) -> HostResult:
    """Return what a child told, or the finding that it could not tell.

    Raises
    ------
    ToolchainError
        The child raised it.
    """
    if outcome.status == "raised" and outcome.kind == ToolchainError.__name__:
        raise ToolchainError(outcome.error.removeprefix(f"{outcome.kind}: "))
    for event in outcome.events:
        if "result" in event:
            told = dict(event["result"])
            findings = [Finding(**entry) for entry in told.pop("findings")]
            result = HostResult(**told)
            for number, finding in enumerate(findings):  # merged already
                result.findings.add(finding, number)
            return result
    batches = [event["batch"] for event in outcome.events if "batch" in event]
    evidence: dict[str, Any] = {"log": outcome.trace or outcome.log}
    with contextlib.suppress(IndexError):
        evidence["inputs"] = batches[-1]
    ending = {
        "raised": outcome.error,
        "timeout": f"it said nothing for {SILENCE_S:g} s and was ended",
    }.get(outcome.status, f"it {outcome.ending}")
    result = HostResult(batches=len(batches))
    result.findings.add(
        Finding(
            "host-process",
            "error",
            f"{name}: the process that ran it on the host lane did not come to its end: {ending}",
            evidence=evidence,
            fix="Run the case alone: `cuverify check` with this one name runs it in its own "
            "process, where a debugger can be attached.",
        )
    )
    return result
