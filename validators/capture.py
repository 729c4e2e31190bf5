"""Capture a step in a CUDA graph, replay it on changed inputs, and say what is wrong.

The observing part touches the device, writes a `CaptureSeen` and decides nothing; `rules.judge`
turns the record into findings. A step that may hang or access what it should not belongs in a
child process: `cuverify.validators.child`.
"""

from __future__ import annotations

import contextlib
import gc
import traceback
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from cuverify.validators.compare import (
    Bounded,
    HostArray,
    Mismatch,
    Tolerance,
    compare,
    differing,
    host_array,
    host_reference,
    tolerance_of,
)
from cuverify.validators.graph_walk import walk
from cuverify.validators.observations import (
    LEGACY_STREAMS,
    CaptureSeen,
    Fault,
    LaunchSeen,
    OutputSeen,
    RunSeen,
)
from cuverify.validators.rules import RULES, judge

from cuverify.errors import ArgumentError, CaseError, DeviceError
from cuverify.report import Coverage, Finding

if TYPE_CHECKING:
    from cuverify.validators.rule import Rule
    from numpy.typing import NDArray

    from cuverify.launches import LaunchRecord

Tolerances = Mapping[str, Tolerance] | Tolerance | None

# frames of these packages are not where a mistake stands, but where it was noticed
_LIBRARIES = frozenset({"torch", "cupy", "numpy", "cuda", "contextlib", "cuverify"})
_OUR_STEPS = ("cuverify.cases.", "cuverify.ops.", "cuverify.benches.", "cuverify.reference.")


class ReplayableStep(Protocol):
    """What can be captured and judged: static buffers, and work on them."""

    @property
    def outputs(self) -> Mapping[str, Any]:
        """The judged tensors, by name. The same storage at every call."""

    def refill(self, batch: Any) -> None:
        """Write new inputs in place, by host work or by launches.

        A step that updates its outputs in place restores them here. Inputs that do not fit the
        buffers are refused with `CaseError` or `ArgumentError`, before anything is written.
        """

    def __call__(self) -> None:
        """Launch the work on torch's current stream; nothing else."""

    def poison(self) -> None:
        """Fill the outputs that the step writes completely with a pattern that no answer holds."""

    def expected(self) -> Mapping[str, NDArray[Any] | Bounded]:
        """Return the right outputs for the inputs that are in the buffers now."""


@dataclass(frozen=True)
class CaptureResult:
    """What `capture_and_replay` found.

    Parameters
    ----------
    findings : list of Finding
        Empty when nothing is wrong in what was inspected.
    coverage : list of Coverage
        What was and what was not inspected.
    seen : CaptureSeen
        The record that was judged.
    """

    findings: list[Finding]
    coverage: list[Coverage]
    seen: CaptureSeen

    @property
    def ok(self) -> bool:
        """True when no finding is an error."""
        return not any(finding.severity == "error" for finding in self.findings)


def capture_and_replay(
    step: ReplayableStep,
    inputs: Sequence[tuple[str, Any]],
    *,
    tolerances: Tolerances = None,
    only_recorded: bool = True,
    changes: int | None = None,
    warmups: int = 2,
    rules: Sequence[Rule] = RULES,
) -> CaptureResult:
    """Run a step eagerly, capture it, replay it on each of `inputs`, and judge.

    The outputs are poisoned before each judged run. The first inputs are those of the capture; they
    come again at the end, so that a state left behind by the others shows.

    Parameters
    ----------
    step : ReplayableStep
        On the current CUDA device.
    inputs : sequence of (label, batch)
        At least one. Batches that the step's `refill` refuses are skipped, and the coverage says
        so.
    tolerances : mapping of str to Tolerance, Tolerance, optional
        By output. Without one the bits must agree with the reference.
    only_recorded : bool
        The step launches through cuverify's `Kernel` only, so a kernel node without a recorded
        launch is an error. Otherwise it is a warning.
    changes : int, optional
        How many of the other inputs to replay on, of those that fit; all of them by default.
    warmups : int
        Runs on the captured stream before the capture, at least 1: compilation and module loading
        are no part of a graph.
    rules : sequence of Rule

    Returns
    -------
    CaptureResult

    Raises
    ------
    ArgumentError
        No inputs, or no warm-up.
    DeviceError
        There is no CUDA device.

    Notes
    -----
    The device is synchronised several times. torch's current stream is the same afterwards. A
    failing step may leave the process's CUDA context unusable; see `cuverify.validators.child`.
    """
    seen = observe(
        step,
        inputs,
        tolerances=tolerances,
        only_recorded=only_recorded,
        changes=changes,
        warmups=warmups,
    )
    return CaptureResult(judge(seen, rules), coverage(seen), seen)


def observe(
    step: ReplayableStep,
    inputs: Sequence[tuple[str, Any]],
    *,
    tolerances: Tolerances = None,
    only_recorded: bool = True,
    changes: int | None = None,
    warmups: int = 2,
) -> CaptureSeen:
    """Run the protocol of `capture_and_replay` and return its record, unjudged."""
    if not inputs:
        raise ArgumentError("inputs", inputs, "needs at least the inputs of the capture")
    if warmups < 1:
        raise ArgumentError("warmups", warmups, "needs at least 1: a cold kernel compiles")
    torch = _torch()
    if not torch.cuda.is_available():
        raise DeviceError("a capture needs a CUDA device, and torch finds none")
    seen = CaptureSeen(only_recorded=only_recorded)
    run = _Protocol(step, tolerances, seen)
    stream_before = torch.cuda.current_stream()
    try:
        run.eager(*inputs[0])
        graph = run.capture(*inputs[0], warmups)
        try:
            run.replays(graph, inputs, changes)
        finally:
            with contextlib.suppress(RuntimeError):  # of a lost context
                graph.reset()
    except _StopError:
        pass
    finally:
        # a capture that fails at its end leaves its stream current
        with contextlib.suppress(RuntimeError):  # of a lost context
            torch.cuda.set_stream(stream_before)
    return seen


def coverage(seen: CaptureSeen) -> list[Coverage]:
    """Say what a record lets one judge, and what not.

    Parameters
    ----------
    seen : CaptureSeen

    Returns
    -------
    list of Coverage
        Subjects ``eager run``, ``capture``, ``graph nodes``, ``replay``, and more where something
        was left out.
    """
    lines = [_stage_coverage(seen, "eager", "eager run", "compared with the reference")]
    recorded = f"{len(seen.launches)} launches recorded"
    lines.append(_stage_coverage(seen, "capture", "capture", recorded))
    if "capture" in seen.stages:
        if seen.graph.not_inspected is None:
            kernels = sum(node.kind == "kernel" for node in seen.graph.nodes)
            detail = f"{len(seen.graph.nodes)} nodes, {kernels} of them kernels"
            lines.append(Coverage("graph nodes", "inspected", detail))
        else:
            detail = f"{seen.graph.not_inspected}; launches were compared by stream"
            lines.append(Coverage("graph nodes", "not inspected", detail))
        lines.extend(
            Coverage("graph bodies", "not inspected", f"conditional node {body}")
            for body in seen.graph.unseen_bodies
        )
    labels = {run.label for run in seen.replays}
    detail = f"{len(seen.replays)} replays on {len(labels)} inputs, outputs poisoned before each"
    lines.append(_stage_coverage(seen, "replay", "replay", detail))
    if "replay" in seen.stages and len(labels) < 2:
        reason = (
            f"none of {len(seen.skipped)} other inputs fits the step's buffers"
            if seen.skipped
            else "no other inputs were given"
        )
        lines.append(Coverage("replay on changed inputs", "not inspected", reason))
    return lines


def run_record(
    label: str,
    before: Mapping[str, HostArray],
    after: Mapping[str, HostArray],
    expected: Mapping[str, NDArray[Any] | Bounded],
    tolerances: Tolerances,
) -> RunSeen:
    """Compare the outputs of one run with its reference and with what they held before.

    Parameters
    ----------
    label : str
        The inputs it ran on.
    before, after : mapping of str to HostArray
        The outputs around the run.
    expected : mapping of str to numpy.ndarray or Bounded
    tolerances : mapping of str to Tolerance, Tolerance, optional

    Returns
    -------
    RunSeen
    """
    outputs = []
    for name, array in after.items():
        if name not in expected:
            missing = Mismatch(name, reason="has no reference: expected() does not return it")
            outputs.append(OutputSeen(name, missing))
            continue
        tolerance = tolerance_of(tolerances, name)
        given = expected[name]
        reference = given if isinstance(given, Bounded) else host_array(given)
        mismatch = compare(name, array, reference, tolerance)
        must_change = unchanged = 0
        if array.data.shape == host_reference(reference).data.shape:
            had_to = differing(before[name], reference, tolerance)
            must_change = int(np.count_nonzero(had_to))
            if mismatch is not None:
                kept = differing(before[name], array)
                unchanged = int(np.count_nonzero(had_to & ~kept))
        outputs.append(OutputSeen(name, mismatch, must_change, unchanged))
    outputs.extend(
        OutputSeen(name, Mismatch(name, reason="is in expected() but no output of the step"))
        for name in expected
        if name not in after
    )
    return RunSeen(label, tuple(outputs))


def _stage_coverage(seen: CaptureSeen, stage: str, subject: str, detail: str) -> Coverage:
    if stage in seen.stages:
        return Coverage(subject, "inspected", detail)
    reason = f"{seen.faults[0].stage} failed before" if seen.faults else "did not come to its end"
    return Coverage(subject, "not inspected", reason)


class _StopError(Exception):
    """A fault was recorded, and nothing after it can be judged."""


class _Protocol:
    """The calls of one run, in parts. Each records what it saw in `seen`."""

    def __init__(self, step: ReplayableStep, tolerances: Tolerances, seen: CaptureSeen) -> None:
        self.step = step
        self.tolerances = tolerances
        self.seen = seen
        self.step_error: Exception | None = None  # what the step raised inside the capture

    def eager(self, label: str, batch: Any) -> None:
        with self._stage("refill", label):
            self.step.refill(batch)
        expected, before = self._prepared(label)
        with self._stage("step", label):
            self.step()
            _synchronize()
        self.seen.eager = self._judged(label, before, expected)
        self.seen.stages.append("eager")

    def capture(self, label: str, batch: Any, warmups: int) -> Any:
        """Return the captured graph, instantiated."""
        from cuverify.launches import record_launches

        torch = _torch()
        stream = torch.cuda.Stream()
        self.seen.capture_stream = int(stream.cuda_stream)
        self.seen.capturing_streams = frozenset({self.seen.capture_stream})
        with self._stage("step", label):
            stream.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(stream):
                for _ in range(warmups):
                    self.step()
            _synchronize()
        with self._stage("refill", label):
            # a launch that leaks out of the capture runs now: give it sane inputs
            self.step.refill(batch)
            _synchronize()
        graph = torch.cuda.CUDAGraph(keep_graph=True)
        with (
            self._stage("capture", label),
            _no_garbage_collection(),
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            with record_launches() as records, torch.cuda.graph(graph, stream=stream):
                self._captured_step()
                self.seen.capturing_streams |= _capturing(records)
            self.seen.warnings = tuple(str(warning.message) for warning in caught)
            graph.instantiate()
            _synchronize()
        self.seen.launches = tuple(
            _launch_seen(record) for record in records if record.lane == "device"
        )
        self.seen.graph = walk(graph.raw_cuda_graph())
        self.seen.stages.append("capture")
        return graph

    def _captured_step(self) -> None:
        try:
            self.step()
        except Exception as error:
            # the end of an invalidated capture raises, too, and says less
            self.step_error = error
            raise

    def replays(self, graph: Any, inputs: Sequence[tuple[str, Any]], changes: int | None) -> None:
        first, *others = inputs
        self._replay(graph, *first, may_refuse=False)
        accepted = 0
        for label, batch in others:
            if accepted == changes:
                break
            try:
                self._replay(graph, label, batch, may_refuse=True)
            except _RefusedError:
                self.seen.skipped += (label,)
            else:
                accepted += 1
        if accepted:
            self._replay(graph, *first, may_refuse=False)
        self.seen.stages.append("replay")

    def _replay(self, graph: Any, label: str, batch: Any, *, may_refuse: bool) -> None:
        with self._stage("refill", label):
            self._refill(batch, may_refuse=may_refuse)
        expected, before = self._prepared(label)
        with self._stage("replay", label):
            graph.replay()
            _synchronize()
        self.seen.replays.append(self._judged(label, before, expected))

    def _refill(self, batch: Any, *, may_refuse: bool) -> None:
        try:
            self.step.refill(batch)
        except (CaseError, ArgumentError) as error:
            if may_refuse:
                raise _RefusedError from error
            raise

    def _prepared(
        self, label: str
    ) -> tuple[Mapping[str, NDArray[Any] | Bounded], dict[str, HostArray]]:
        """Take the reference from the present inputs, then poison and copy the outputs."""
        with self._stage("expected", label):
            expected = self.step.expected()
        with self._stage("poison", label):
            self.step.poison()
            _synchronize()
        return expected, self._read(label)

    def _read(self, label: str) -> dict[str, HostArray]:
        with self._stage("read", label):
            return {name: host_array(tensor) for name, tensor in self.step.outputs.items()}

    def _judged(
        self,
        label: str,
        before: Mapping[str, HostArray],
        expected: Mapping[str, NDArray[Any] | Bounded],
    ) -> RunSeen:
        after = self._read(label)
        with self._stage("read", label):
            return run_record(label, before, after, expected, self.tolerances)

    @contextlib.contextmanager
    def _stage(self, stage: str, label: str) -> Iterator[None]:
        """Record an exception as a fault of this stage, and stop the run."""
        try:
            yield
        except (_StopError, _RefusedError):
            raise
        except Exception as error:
            first = self.step_error or error
            self.seen.faults.append(
                Fault(
                    stage,
                    f"{type(first).__name__}: {_first_lines(str(first))}",
                    where=place_of(first),
                    context_lost=_context_lost(),
                    label=label,
                )
            )
            raise _StopError from error


class _RefusedError(Exception):
    """The step does not take these inputs."""


def place_of(error: BaseException) -> str | None:
    """Return ``file:line`` of the innermost frame that belongs to no library, if there is one.

    Parameters
    ----------
    error : BaseException
        One that was raised.
    """
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        module = str(frame.f_globals.get("__name__", ""))
        if module.partition(".")[0] in _LIBRARIES and not module.startswith(_OUR_STEPS):
            continue
        place = f"{_short_path(frame.f_code.co_filename)}:{line}"
    return place


def _short_path(file: str) -> str:
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (OSError, ValueError):
        return file


def _first_lines(text: str, count: int = 3) -> str:
    """Shorten an error's text: torch appends a page of advice to a CUDA error."""
    return " ".join(line.strip() for line in text.strip().splitlines()[:count])


def _torch() -> Any:
    """Import torch on first use; half of what is used of it has no types."""
    import torch

    return torch


def _synchronize() -> None:
    _torch().cuda.synchronize()


def _context_lost() -> bool:
    """Tell whether the device refuses everything by now. Only asked after an error."""
    try:
        _synchronize()
    except Exception:
        return True
    return False


def _capturing(records: Iterable[LaunchRecord]) -> frozenset[int]:
    """Return which of the launches' streams take part in the capture that runs now."""
    torch = _torch()
    found = set()
    streams = {record.stream for record in records if record.lane == "device"}
    for handle in streams - LEGACY_STREAMS:
        # asking the legacy stream could itself invalidate the capture; it never takes part
        with torch.cuda.stream(torch.cuda.ExternalStream(handle)):
            if torch.cuda.is_current_stream_capturing():
                found.add(handle)
    return frozenset(found)


def _launch_seen(record: LaunchRecord) -> LaunchSeen:
    return LaunchSeen(
        kernel=record.kernel,
        stream=record.stream,
        grid=tuple(record.grid),
        block=tuple(record.block),
        shared=record.shared,
    )


@contextlib.contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Collect now and not inside: freeing device memory would invalidate the capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()
