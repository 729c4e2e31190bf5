"""The GPU part of a check case: the child process that runs it, and the parent that listens.

A batch that hangs or loses the CUDA context costs its own child process; the batches after it get
a fresh one. The work goes out as a reference to the case and a batch number, what was found comes
back as events.
"""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from cuverify import cases as registry
from cuverify.report import Coverage, Finding
from cuverify.resources import processors, threads_of_children
from cuverify.validators.capture import CaptureResult, capture_and_replay
from cuverify.validators.child import ChildOutcome, Emit, run_child
from cuverify.validators.coverage import coverage
from cuverify.validators.observations import CaptureSeen, EndSeen, Fault
from cuverify.validators.places import place_of
from cuverify.validators.rules import judge

THOROUGH = 2  # batches of a case that go through the whole protocol
CHANGES = 2  # other batches that each captured graph is replayed on; more while all answer alike
RESTARTS = 3  # children that may fail before the rest of a share of the batches is given up

_MOST_JOBS = 8
_PROCESSORS_A_JOB = 2
_BYTES_A_JOB = 16 << 30  # of GPU memory: a pool, and its scores in float64

_TASK = f"{__name__}:run_case"


@dataclass
class DeviceResult:
    """What the children of one case said.

    Parameters
    ----------
    findings : list of Finding
        Of all batches.
    gaps : list of Coverage
        What was not inspected.
    batches : int
        Batches that came to an end, right or wrong.
    totals : mapping of str to int
        Sums over the batches: ``captures``, ``launches``, ``kernel_nodes``, ``replays``, ...
    device : mapping of str to str
        ``GPU`` and ``arch``. Empty when no child got that far.
    """

    findings: list[Finding] = field(default_factory=list)
    gaps: list[Coverage] = field(default_factory=list)
    batches: int = 0
    totals: dict[str, int] = field(default_factory=dict)
    device: Mapping[str, str] = field(default_factory=dict)


def check_on_device(
    reference: str,
    *,
    seed: int,
    examples: int | None,
    silence_s: float,
    progress: Callable[[str, int, int], None],
    jobs: int = 1,
    task: str = _TASK,
) -> DeviceResult:
    """Run a case's GPU batches in child processes and collect what they say.

    The oracles keep a processor busy while the GPU waits, so several children share one GPU.

    Parameters
    ----------
    reference : str
        As `cuverify.cases.load` takes it.
    seed : int
    examples : int or None
    silence_s : float
        Seconds without a word after which a child counts as hanging.
    progress : callable
        Told the batch, how many have begun before it, and of how many.
    jobs : int
        Children at a time. Each takes every `jobs`-th batch.
    task : str
        What the child runs, ``module:function`` with the events of `run_case`.

    Returns
    -------
    DeviceResult

    Raises
    ------
    DeviceError
        This platform has no child processes of this kind.
    """
    shared = _Progress(progress)
    listeners = [_Listener(shared, share, jobs) for share in range(jobs)]

    def run(listener: _Listener) -> None:
        _run_share(listener, reference, seed, examples, silence_s, task)

    with ThreadPoolExecutor(max_workers=jobs) as pool:
        list(pool.map(run, listeners))
    return _merged([listener.result for listener in listeners])


def jobs_of_this_machine() -> int:
    """Return how many children a check runs at a time on the current CUDA device.

    Returns
    -------
    int
        Two processors and 16 GiB of GPU memory for each, 8 at most and 1 at least.
    """
    import torch

    memory = torch.cuda.get_device_properties(torch.cuda.current_device()).total_memory
    return max(1, min(_MOST_JOBS, _most_children(), memory // _BYTES_A_JOB))


def _most_children() -> int:
    """Return for how many children there are processors, whatever cases they belong to."""
    return max(1, processors() // _PROCESSORS_A_JOB)


def _run_share(
    listener: _Listener,
    reference: str,
    seed: int,
    examples: int | None,
    silence_s: float,
    task: str,
) -> None:
    """Run one share of the batches, in one child after another while they break off."""
    result = listener.result
    for _ in range(1 + RESTARTS):
        listener.begin()
        outcome = run_child(
            task,
            {
                "case": reference,
                "seed": seed,
                "examples": examples,
                "first": listener.next,
                "stride": listener.stride,
            },
            silence_s=silence_s,
            on_event=listener.take,
            environment=threads_of_children(_most_children()),
        )
        if outcome.status == "done" and not listener.wants_restart:
            return
        if outcome.status != "done":
            _add_ending(result, outcome, listener, silence_s)
            if listener.label is None:
                break  # it never came to a batch, and another child would not either
        if listener.total and listener.next >= listener.total:
            return
    left = f"{listener.left} of {listener.total}" if listener.total else "all"
    result.gaps.append(
        Coverage("GPU batches", "not inspected", f"{left} were left after runs that broke off")
    )


def _merged(results: Sequence[DeviceResult]) -> DeviceResult:
    total = DeviceResult()
    for result in results:
        total.findings.extend(result.findings)
        total.gaps.extend(result.gaps)
        total.batches += result.batches
        total.device = total.device or result.device
        for name, value in result.totals.items():
            total.totals[name] = total.totals.get(name, 0) + value
    return total


class _Progress:
    """Tells one progress callback of several shares; called from their threads."""

    def __init__(self, told: Callable[[str, int, int], None]) -> None:
        self.told = told
        self.lock = threading.Lock()
        self.begun = 0

    def __call__(self, label: str, total: int) -> None:
        with self.lock:
            self.told(label, self.begun, total)
            self.begun += 1


class _Listener:
    """Takes the events of the children of one share of the batches, one after another."""

    def __init__(self, progress: _Progress, share: int, stride: int) -> None:
        self.result = DeviceResult()
        self.progress = progress
        self.next = share  # the first batch of the share that no child has begun
        self.stride = stride
        self.total = 0
        self.label: str | None = None  # of the batch that the present child is at
        self.wants_restart = False

    @property
    def left(self) -> int:
        """Batches of the share that no child has begun."""
        return len(range(self.next, self.total, self.stride))

    def begin(self) -> None:
        self.label = None
        self.wants_restart = False

    def take(self, event: Mapping[str, Any]) -> None:
        kind = event["kind"]
        if kind == "device":
            self.result.device = event["device"]
        elif kind == "batches":
            self.total = event["batches"]
        elif kind == "begin":
            self.label = event["label"]
            self.progress(event["label"], self.total)
            self.next = event["batch"] + self.stride
        elif kind == "end":
            self._add(event)
        elif kind == "restart":
            self.wants_restart = True

    def _add(self, event: Mapping[str, Any]) -> None:
        result = self.result
        result.batches += 1
        result.findings.extend(Finding(**entry) for entry in event["findings"])
        lines = [Coverage(**entry) for entry in event["coverage"]]
        result.gaps.extend(line for line in lines if line.status == "not inspected")
        for name, value in event["summary"].items():
            result.totals[name] = result.totals.get(name, 0) + (value or 0)


def _add_ending(
    result: DeviceResult, outcome: ChildOutcome, listener: _Listener, silence_s: float
) -> None:
    """Add how a child broke off: a missing tool is a gap, everything else a finding."""
    if outcome.kind == "ToolchainError":
        reason = outcome.error.partition(": ")[2]
        result.gaps.append(Coverage("GPU batches", "not inspected", reason))
        return
    end = EndSeen(
        status=outcome.status,
        ending=outcome.ending,
        label=listener.label or "",
        silence_s=silence_s,
        error=outcome.error,
        log=outcome.trace or outcome.log,
    )
    result.findings.extend(judge(CaptureSeen(end=end)))


def run_case(work: Mapping[str, Any], emit: Emit) -> None:
    """Be the child: run a case's GPU batches and send what was found, batch by batch.

    Parameters
    ----------
    work : mapping
        ``case`` (a reference), ``seed``, ``examples`` (or None), ``first`` (the number of the batch
        to begin with), ``stride`` (from one batch to the next).
    emit : callable
        Takes events, each with a ``kind``: ``device``, ``batches``, ``begin``, ``end``, and
        ``restart`` when the process is of no use for the batches that are left.

    Raises
    ------
    CaseError
        The case cannot be found again.
    """
    import torch

    emit({"kind": "device", "device": _device()})
    case = registry.load(work["case"])
    batches = registry.draw(case.device_batches, seed=work["seed"], examples=work["examples"])
    emit({"kind": "batches", "batches": len(batches)})
    for number in range(work["first"], len(batches), work["stride"]):
        label, batch = batches[number]
        emit({"kind": "begin", "batch": number, "label": label})
        # the next ones in a circle: inputs that the graph of this one can be replayed on
        others = batches[number + 1 :] + batches[:number]
        result = _run_batch(case, label, batch, others, thorough=number < THOROUGH)
        emit({"kind": "end", **_plain(result)})
        if any(fault.context_lost or fault.stage == "capture" for fault in result.seen.faults):
            # nothing works after a lost context, and a failed capture can leave torch's allocator
            # inside the graph's private pool
            emit({"kind": "restart"})
            return
        del result
        gc.collect()
        torch.cuda.empty_cache()


def _run_batch(
    case: registry.CheckCase,
    label: str,
    batch: Any,
    others: list[tuple[str, Any]],
    *,
    thorough: bool,
) -> CaptureResult:
    try:
        step = case.step(batch, "torch-cuda")
    except Exception as error:
        fault = Fault("make", f"{type(error).__name__}: {error}", place_of(error), label=label)
        seen = CaptureSeen(faults=[fault])
        return CaptureResult(judge(seen), coverage(seen), seen)
    return capture_and_replay(
        step,
        [(label, batch), *others],
        tolerances=getattr(case, "tolerances", None),
        only_recorded=getattr(case, "only_recorded", True),
        changes=CHANGES,
        thorough=thorough,
    )


def _plain(result: CaptureResult) -> dict[str, Any]:
    """Return a result as the JSON values of an ``end`` event."""
    return {
        "findings": [finding.to_json() for finding in result.findings],
        "coverage": [vars(line) for line in result.coverage],
        "summary": {
            "captures": int("capture" in result.seen.stages),
            **result.seen.summary(),
        },
    }


def _device() -> dict[str, str]:
    import torch

    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    return {"GPU": str(properties.name), "arch": f"sm_{properties.major}{properties.minor}"}
