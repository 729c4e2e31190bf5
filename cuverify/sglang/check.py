"""The engine behind `cuverify check --runner`: somebody's attention backend against the contract.

On the host lane first, under the checkers and then without, on graphs that are likenesses of
CUDA's; then on a GPU, in a child process, with CUDA graphs, and with the capture validator's look
at what one batch size records.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, Literal

from cuverify.check_findings import MergedFindings
from cuverify.errors import CaseError, DeviceError
from cuverify.report import Coverage, Finding, Report
from cuverify.sglang.contract import Family, families_of, missing_hooks
from cuverify.sglang.graphs import CudaGraphs, HostGraphs
from cuverify.sglang.judge import coverage, judge
from cuverify.sglang.play import play_contract
from cuverify.sglang.schedule import CAPTURED, Play, Shape
from cuverify.sglang.seen import ContractSeen
from cuverify.sglang.step import RunnerStep
from cuverify.validators.api import load_factory
from cuverify.validators.capture import capture_and_replay
from cuverify.validators.child import Emit, run_child
from cuverify.validators.observations import CaptureSeen, EndSeen
from cuverify.validators.rules import judge as judge_ending

Progress = Callable[[str, int, int], None]
Device = Literal["auto", "cpu", "cuda"]

SILENCE_S = 120.0  # a first run compiles
VALIDATED = 3  # batches that the capture validator sees

HOST_SHAPE = Shape(CAPTURED, draft_tokens=5, max_context_len=40, latent=64, rope=16)
CHECKED_SHAPE = Shape((1, 2), draft_tokens=5, max_context_len=24, latent=64, rope=16)
"""What the host lane attends to in seconds, without and with the checkers."""

_GROUP = 4  # query heads of a KV head

_TASK = f"{__name__}:run_in_child"


def check_runner(
    reference: str,
    *,
    device: Device = "auto",
    seed: int = 0,
    captured: Sequence[int] = CAPTURED,
    silence_s: float = SILENCE_S,
    progress: Progress | None = None,
) -> Report:
    """Judge an attention backend by SGLang's contract, as far as this machine can.

    Parameters
    ----------
    reference : str
        ``module:Class`` or ``file.py:Class``: a `cuverify.sglang.contract.VerifyRunner`. A class
        whose attribute ``devices`` lacks ``"cpu"`` is not played on the host lane.
    device : {"auto", "cpu", "cuda"}
        ``"auto"`` uses a GPU where there is one, ``"cuda"`` insists on one.
    seed : int
        Of the batches.
    captured : sequence of int
        Batch sizes that get a graph on the GPU.
    silence_s : float
        Seconds after which a GPU run that says nothing counts as hanging.
    progress : callable, optional
        Told what is played, how many are done, and of how many.

    Returns
    -------
    Report

    Raises
    ------
    CaseError
        There is no such class, or it lacks hooks.
    DeviceError
        ``device="cuda"`` and there is none.
    """
    import torch

    from cuverify import env

    make = load_runner(reference)
    has_gpu = device != "cpu" and torch.cuda.is_available()
    if device == "cuda" and not has_gpu:
        raise DeviceError("device='cuda': no CUDA device; device='auto' checks without one")
    report = Report(f"SGLang's contract, {reference}")
    report.environment = env.inspect().versions
    _on_host(report, make, seed, progress)
    if not has_gpu:
        report.findings = _merged(report.findings)
        reason = "not asked for (device='cpu')" if device == "cpu" else "no CUDA device"
        report.coverage.append(Coverage("capture", "not inspected", reason))
        return report
    work = {"runner": reference, "seed": seed, "captured": list(captured)}
    _on_device(report, work, silence_s, progress)
    report.findings = _merged(report.findings)
    return report


def load_runner(reference: str) -> Any:
    """Return a backend's class.

    Raises
    ------
    CaseError
        There is none by that name, or it lacks hooks.
    """
    make = load_factory(reference)
    missing = missing_hooks(make)
    if missing:
        raise CaseError(
            f"runner {reference!r} lacks {', '.join(missing)}; "
            "see cuverify.sglang.contract.VerifyRunner for what a backend has"
        )
    return make


def shape_for(make: Any, shape: Shape) -> Shape:
    """Return a shape for a backend's class: with keys and values apart if it has ``kv_heads``."""
    kv_heads = getattr(make, "kv_heads", None)
    if kv_heads is None:
        return shape
    return replace(shape, heads=_GROUP * kv_heads, kv_heads=kv_heads)


def _on_host(report: Report, make: Any, seed: int, progress: Progress | None) -> None:
    from cuverify.host.options import checked

    if "cpu" not in getattr(make, "devices", ("cpu", "cuda")):
        reason = f"{make.__name__}.devices says that it does not run there"
        report.coverage.append(Coverage("host lane", "not inspected", reason))
        return
    for family in families_of(make):
        with checked():
            seen = play_contract(
                make, family, HostGraphs(), shape_for(make, CHECKED_SHAPE), seed=seed,
                told=progress,
            )  # fmt: skip
        found = _add(report, seen, "under the checkers")
        # without the checkers a fault of memory would be this process's
        if found:
            subject = f"host lane, {family} hooks, all sizes"
            reason = "findings under the checkers come first"
            report.coverage.append(Coverage(subject, "not inspected", reason))
            continue
        shape = shape_for(make, HOST_SHAPE)
        seen = play_contract(make, family, HostGraphs(), shape, seed=seed, told=progress)
        _add(report, seen)


def _add(report: Report, seen: ContractSeen, how: str = "") -> list[Finding]:
    """Add what a run showed, and return its findings."""
    findings = judge(seen)
    report.findings.extend(findings)
    for line in coverage(seen):
        subject = f"{line.subject}, {how}" if how else line.subject
        report.coverage.append(Coverage(subject, line.status, line.detail))
    return findings


def _merged(findings: Iterable[Finding]) -> list[Finding]:
    """Return one finding for each rule and family of hooks, with how often it was met."""
    merged = MergedFindings()
    for found in findings:
        by_what = found.evidence.get("kernel") or found.evidence.get("stage")
        merged.add(found, found.evidence.get("hooks"), by_what)
    return list(merged)


def _on_device(
    report: Report, work: Mapping[str, Any], silence_s: float, progress: Progress | None
) -> None:
    at = ""

    def take(event: Mapping[str, Any]) -> None:
        nonlocal at
        if event["kind"] == "at":
            at = event["label"]
            if progress is not None:
                progress(f"GPU, {at}", event["done"], event["total"])
            return
        part = Report.from_json(event["report"])
        report.findings.extend(part.findings)
        report.coverage.extend(line for line in part.coverage if line not in report.coverage)

    outcome = run_child(_TASK, work, silence_s=silence_s, on_event=take)
    if outcome.status == "done":
        return
    end = EndSeen(
        status=outcome.status,
        ending=outcome.ending,
        label=at,
        silence_s=silence_s,
        error=outcome.error,
        log=outcome.trace or outcome.log,
    )
    report.findings.extend(judge_ending(CaptureSeen(end=end)))
    reason = f"the process ended in {at or 'its start'}"
    report.coverage.append(Coverage("what follows on the GPU", "not inspected", reason))


def run_in_child(work: Mapping[str, Any], emit: Emit) -> None:
    """Be the child: play a backend on the GPU, have one size validated, and send the reports.

    Parameters
    ----------
    work : mapping
        ``runner`` (a reference), ``seed``, ``captured`` (batch sizes).
    emit : callable
        Takes events, each with a ``kind``: ``at`` (what is being done) and ``report``.
    """
    make = load_runner(work["runner"])
    shape = shape_for(make, Shape(tuple(work["captured"])))
    families = families_of(make)
    for family in families:

        def told(label: str, done: int, total: int, family: Family = family) -> None:
            emit({"kind": "at", "label": f"{family} hooks: {label}", "done": done, "total": total})

        seen = play_contract(make, family, CudaGraphs(), shape, seed=work["seed"], told=told)
        played = Report("contract", judge(seen), coverage(seen))
        emit({"kind": "report", "report": played.to_json()})
        if seen.faults or any(p.fault is not None and p.fault.context_lost for p in seen.plays):
            # a failed capture or a lost context leaves nothing to look at
            reason = f"the contract run of the {family} hooks broke off"
            gap = Coverage("what follows on the GPU", "not inspected", reason)
            emit({"kind": "report", "report": Report("", coverage=[gap]).to_json()})
            return
        told("capture validator", 0, 1)
        emit({"kind": "report", "report": _validated(make, family, shape, work["seed"]).to_json()})


def _validated(make: Any, family: Family, shape: Shape, seed: int) -> Report:
    """Return what the capture validator says of the batch size next to 4."""
    bs = min(shape.captured, key=lambda size: abs(size - 4))
    shape = replace(shape, captured=(bs,))
    plays = [Play(bs, bs, seed + number) for number in range(VALIDATED)]
    name = f"{make.__name__}, {family} hooks, {bs} requests"
    report = Report(name)
    try:
        step = RunnerStep(make, family, shape, plays[0])
        result = capture_and_replay(
            step, [(play.label, play) for play in plays], only_recorded=False
        )
    except Exception as error:
        reason = f"{type(error).__name__}: {error}"
        report.coverage.append(Coverage(f"{name}: capture", "not inspected", reason))
        return report
    for found in result.findings:
        evidence = {"backend": make.__name__, "hooks": family, **found.evidence}
        message = f"{name}: {found.message}"
        report.findings.append(replace(found, message=message, evidence=evidence))
    report.coverage = [
        Coverage(f"{name}: {line.subject}", line.status, line.detail) for line in result.coverage
    ]
    return report
