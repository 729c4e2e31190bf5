"""The calls of one validation, in parts. Each part records what it saw and decides nothing.

Order: two eager runs on a stream that is not captured; warm-ups and the capture; a second capture
with other values; replays on all inputs; replays of the first inputs under changed circumstances;
more captures on a blocking and on a cold stream, and of a fresh step. What a part needs and does
not have, it names in `gaps`.
"""

from __future__ import annotations

import contextlib
import gc
import re
import traceback
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
from cuverify.validators import trials
from cuverify.validators.compare import Bounded, HostArray, host_array
from cuverify.validators.instruments import NoInstruments, no_garbage_collection
from cuverify.validators.modes import armed_modes
from cuverify.validators.observations import (
    LEGACY_STREAMS,
    AttemptSeen,
    CaptureSeen,
    Fault,
    GraphSeen,
    KeptSeen,
    LaunchSeen,
    MemorySeen,
    PoolHitSeen,
    ReboundSeen,
    RunSeen,
    TensorSeen,
    TrialSeen,
    is_main,
)
from cuverify.validators.places import place_of
from cuverify.validators.reach import address_of, memory_reached, tensors_reached
from cuverify.validators.runs import Tolerances, drifts, kept, run_record

from cuverify.errors import ArgumentError, CaseError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cuverify.launches import LaunchRecord

# of torch's advice behind a CUDA error, the code's name is worth keeping
_CODE = re.compile(r"`(cudaError\w+)'")
_ADVICE = ("Search for", "CUDA kernel errors might", "For debugging consider", "Compile with")
_ENDINGS = frozenset({"unload", "free", "host_free", "destroy"})
_RETRIES = ("thread_local", "relaxed")


class ReplayableStep(Protocol):
    """What can be captured and judged: static buffers, and work on them.

    More is used where the step has it: `inputs`, `scratch`, `state` and `padding` (mappings as in
    `CallableCase`), `alone`, `vary`, `make_step`, `deterministic`, `has_reference`, and `code`
    (functions that hold tensors of their own).
    """

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


class StopError(Exception):
    """A fault was recorded, and nothing of this part can be judged."""


class RefusedError(Exception):
    """The step does not take these inputs."""


class CaptureProtocol:
    """One validation of one step.

    Parameters
    ----------
    step : ReplayableStep
    tolerances : mapping of str to Tolerance, Tolerance, optional
    seen : CaptureSeen
        Filled.
    tools : NoInstruments
        What is looked with.
    progress : callable
        Told each part that begins.
    """

    def __init__(
        self,
        step: ReplayableStep,
        tolerances: Tolerances,
        seen: CaptureSeen,
        tools: NoInstruments,
        progress: Callable[[str], None],
    ) -> None:
        self.step = step
        self.tolerances = tolerances
        self.seen = seen
        self.tools = tools
        self.progress = progress
        self.lost = False  # the device context is gone
        self.spare: Mapping[str, Any] = {
            name: index for name, index in self.asked("padding", {}).items() if name in step.outputs
        }
        self.eager_outputs: dict[str, Any] = {}
        self.base: dict[str, Any] = {}  # outputs of the first replay
        self.base_expected: Mapping[str, Any] = {}
        self.accepted: list[tuple[str, Any]] = []  # other inputs that fit
        self.other: tuple[str, Any] | None = None  # the first of them with another right answer
        self.thorough = True
        self.graph: Any = None
        self._first_answer: Mapping[str, Any] = {}
        self._ended = False  # the present capture came to its end
        self._step_error: Exception | None = None  # what the step raised inside the capture
        cuda = _torch().cuda
        self._eager_stream = cuda.Stream()
        seen.deterministic = bool(self.asked("deterministic", True))
        seen.device = int(cuda.current_device())
        seen.has_reference = bool(self.asked("has_reference", True))

    def asked(self, name: str, default: Any) -> Any:
        """Return something that a step need not have."""
        value = getattr(self.step, name, None)
        return default if value is None else value

    def gap(self, subject: str, reason: str) -> None:
        """Note what is not inspected."""
        if (subject, reason) not in self.seen.gaps:
            self.seen.gaps.append((subject, reason))

    # --- the whole -------------------------------------------------------------------------------

    def run(
        self,
        inputs: Sequence[tuple[str, Any]],
        *,
        changes: int | None,
        warmups: int,
        strict: bool,
        thorough: bool,
    ) -> None:
        """Run all parts; each one that fails leaves the others."""
        first, *others = inputs
        self.thorough = thorough
        try:
            self.progress(f"eager run on {first[0]}")
            self._eager(*first)
        except StopError:
            return
        try:
            if thorough:
                self._part("eager run again", self._eager_again, *first)
            self._part("capture", self._capture_to_replay, first, warmups)
            if self.graph is not None:
                self._part("replays", self._replays, first, others, changes)
            if self.graph is not None and thorough:
                self._part("double capture", self._double, first)
                disturbing = trials.DEVICE_TRIALS if self.tools.on_device else ()
                for name, trial in (*trials.TRIALS, *disturbing):
                    if self.base:
                        self._part(name, self._trial, trial, first)
                self._part("eager runs on other inputs", self._last, first)
            if strict and thorough:
                self._part("strict capture", self._strict, first)
                self._part("cold capture", self._cold, first)
                self._part("warm-up comparison", self._fresh, first)
        finally:
            if self.graph is not None:
                with contextlib.suppress(RuntimeError):  # of a lost context
                    self.graph.reset()

    def _trial(self, trial: trials.Trial, first: tuple[str, Any]) -> None:
        """Replay the captured inputs undisturbed, and then disturbed."""
        # what an earlier trial left behind must not be blamed on this one
        self.refill(*first)
        self.prepared(first[0])
        self.replay(first[0])
        self.base = kept(self.step.outputs)
        trial(self, first)

    def _part(self, name: str, call: Callable[..., None], *arguments: Any) -> None:
        """Run a part; one that fails leaves its fault, and the others run."""
        if self.lost:
            self.gap(name, "the device context was lost before")
            return
        self.progress(name)
        try:
            call(*arguments)
        except (StopError, RefusedError):
            pass
        except Exception as error:
            self.seen.faults.append(self.fault("observe", name, error))

    # --- runs ------------------------------------------------------------------------------------

    def _eager(self, label: str, batch: Any) -> None:
        self.refill(label, batch)
        reference = self.reference(label)
        before = self.prepared(label)
        self.eager_step(label, "first")
        self.eager_outputs = kept(self.step.outputs)
        if reference is not None:
            self.seen.eager = self.judged(label, before, reference)
        self.seen.stages.append("eager")

    def _eager_again(self, label: str, batch: Any) -> None:
        self.refill(label, batch)
        self.prepared(label)
        with self.tools.pool_hits() as hits:
            self.eager_step(label, "eager")
        self.seen.pool_hits += tuple(replace(hit, phase="eager") for hit in hits)
        self.compare("eager again", self.eager_outputs)

    def refill(self, label: str, batch: Any, *, may_refuse: bool = False) -> None:
        """Write inputs; `RefusedError` when they do not fit and need not."""
        # what a refill unloads or frees may be what the graph holds
        observed = self.tools.phase("refill", _ENDINGS) if self.graph else contextlib.nullcontext()
        with self.stage("refill", label), observed:
            try:
                self.step.refill(batch)
            except (CaseError, ArgumentError) as error:
                if may_refuse:
                    raise RefusedError from error
                raise
            _synchronize()

    def reference(self, label: str) -> Mapping[str, Any] | None:
        """Return the reference for the present inputs, None where there is none."""
        if not self.seen.has_reference:
            return None
        with self.stage("expected", label):
            return self.step.expected()

    def eager_reference(self, label: str, batch: Any) -> dict[str, Any]:
        """Run the step without a graph and return what it leaves; the inputs are put back."""
        self.prepared(label)
        self.eager_step(label)
        outputs = {name: host_array(value) for name, value in self.step.outputs.items()}
        self.refill(label, batch)
        return outputs

    def expected(self, label: str, batch: Any) -> Mapping[str, Any] | None:
        """Return what a replay must give: the reference, or what an eager run gives."""
        reference = self.reference(label)
        if reference is not None:
            return reference
        if not self.seen.deterministic and self.tolerances is None:
            self.gap("replay against eager", "declared nondeterministic, without a tolerance")
            return None
        return self.eager_reference(label, batch)

    def eager_step(self, label: str, phase: str = "") -> None:
        """Run the step on the stream that is never captured, observed in a phase."""
        cuda = _torch().cuda
        with self.stage("step", label):
            self._eager_stream.wait_stream(cuda.current_stream())
            with (
                cuda.stream(self._eager_stream),
                self.tools.phase(phase) if phase else contextlib.nullcontext(),
            ):
                self.step()
            _synchronize()

    def prepared(self, label: str) -> dict[str, HostArray]:
        """Poison the outputs and return what they hold then."""
        with self.stage("poison", label):
            self.step.poison()
            _synchronize()
        return self.read(label)

    def read(self, label: str) -> dict[str, HostArray]:
        """Copy the outputs to the host."""
        with self.stage("read", label):
            return {name: host_array(tensor) for name, tensor in self.step.outputs.items()}

    def judged(
        self, label: str, before: Mapping[str, HostArray], expected: Mapping[str, Any]
    ) -> RunSeen:
        """Return what the present outputs are worth."""
        after = self.read(label)
        with self.stage("read", label):
            if self.spare:
                before, after, expected = (
                    without(each, self.spare) for each in (before, after, expected)
                )
            return run_record(label, before, after, expected, self.tolerances)

    def compare(
        self,
        name: str,
        other: Mapping[str, Any],
        *,
        subject: str = "",
        detail: str = "",
        steady: bool = False,
    ) -> None:
        """Record a trial: the present outputs against those of another run, bit by bit."""
        with self.stage("read", name):
            found = drifts(
                dict(self.step.outputs),
                other,
                spare=self.spare,
                expected=self.base_expected or None,
                tolerances=self.tolerances,
            )
        self.seen.trials.append(TrialSeen(name, subject, found, detail=detail, steady=steady))

    def replay(self, label: str, stream: Any = None) -> None:
        """Replay the graph, on the current stream or on another one, and wait."""
        with self.stage("replay", label):
            if stream is None:
                self.graph.replay()
            else:
                with _torch().cuda.stream(stream):
                    self.graph.replay()
            _synchronize()

    # --- the captures ----------------------------------------------------------------------------

    def _capture_to_replay(self, first: tuple[str, Any], warmups: int) -> None:
        label = first[0]
        cuda = _torch().cuda
        stream = cuda.Stream()
        self._main_stream = stream
        self.seen.capture_stream = int(stream.cuda_stream)
        self.seen.capturing_streams = frozenset({self.seen.capture_stream})
        self.seen.streams = {
            "eager": int(self._eager_stream.cuda_stream),
            "capture": self.seen.capture_stream,
        }
        with self.stage("step", label):
            stream.wait_stream(cuda.current_stream())
            with cuda.stream(stream):
                for number in range(warmups):
                    last = number == warmups - 1
                    with self.tools.phase("warm-up") if last else contextlib.nullcontext():
                        self.step()
            _synchronize()
        self.seen.armed = armed_modes()
        held = self.held_addresses()
        graph, attempt = self._attempt("capture", stream, "global", first)
        if graph is None:
            assert attempt.fault is not None
            self.seen.faults.append(attempt.fault)
            if attempt.fault.context_lost:
                raise StopError
            for mode in _RETRIES:
                graph, attempt = self._attempt(f"retry {mode}", stream, mode, first)
                if graph is not None or self.lost:
                    break
        if graph is None:
            self.gap("replays", "no capture succeeded, in any mode")
            return
        self.seen.replayed = attempt.name
        if attempt.name != "capture":
            self.gap("capture in global mode", f"it failed; what follows is of {attempt.mode} mode")
        self.graph = graph
        self.seen.graph, self.seen.launches = attempt.graph, attempt.launches
        self.seen.pool = attempt.pool
        self.seen.stages.append("capture")
        self.rebinding(held, "capture")

    def _double(self, first: tuple[str, Any]) -> None:
        self._extra("same", self._main_stream, first)
        vary = self.asked("vary", None)
        other = first
        if vary is not None:
            with self.stage("refill", "vary(1)"):
                vary(1)
        elif self.other:
            other = self.other
        else:
            self.gap("double capture", "no other inputs fit, and the step has no vary()")
            return
        try:
            # twice: a word that differs between equal captures is nobody's value
            for name in ("double", "double again"):
                self._extra(name, self._main_stream, other)
        finally:
            if vary is not None:
                with self.stage("refill", "vary(0)"):
                    vary(0)

    def _strict(self, first: tuple[str, Any]) -> None:
        """Capture on a blocking stream: what goes to the legacy stream invalidates it."""
        stream = blocking_stream()
        if stream is None:
            self.gap("strict capture", "a blocking stream needs CuPy")
            return
        self._extra("strict", stream, first)

    def _cold(self, first: tuple[str, Any]) -> None:
        self._extra("cold", _torch().cuda.Stream(), first)

    def _extra(self, name: str, stream: Any, first: tuple[str, Any]) -> None:
        graph, _ = self._attempt(name, stream, "global", first)
        if graph is not None:
            graph.reset()

    def _fresh(self, first: tuple[str, Any]) -> None:
        make = self.asked("make_step", None)
        if make is None:
            self.gap("warm-up comparison", "the step has no make_step()")
            return
        cuda = _torch().cuda
        for number in (0, 2):
            with self.stage("make", first[0]):
                step = make()
            stream = cuda.Stream()
            with self.stage("step", first[0]):
                stream.wait_stream(cuda.current_stream())
                with cuda.stream(stream):
                    for _ in range(number):
                        step()
                _synchronize()
            graph, _ = self._attempt(f"fresh {number}", stream, "global", first, step=step)
            if graph is not None:
                graph.reset()
            del step

    def _attempt(
        self,
        name: str,
        stream: Any,
        mode: str,
        inputs: tuple[str, Any],
        *,
        step: Callable[[], Any] | None = None,
    ) -> tuple[Any, AttemptSeen]:
        """Capture once. Returns the instantiated graph, None when the capture failed."""
        from cuverify.launches import record_launches

        cuda = _torch().cuda
        run = self.step if step is None else step
        # a launch that leaks out of the capture runs now: give it sane inputs
        self.refill(*inputs)
        graph = cuda.CUDAGraph(keep_graph=True)
        pool = cuda.graph_pool_handle()
        before = self.tools.memory()
        private = sum(self.tools.private_bytes().values())
        current = cuda.current_stream()
        fault = None
        records: list[LaunchRecord] = []
        hits: list[PoolHitSeen] = []
        self._step_error = None
        main = is_main(name)
        with (
            no_garbage_collection(collect=main) as collections,
            warnings.catch_warnings(record=True) as caught,
        ):
            warnings.simplefilter("always")
            try:
                with record_launches() as records, self.tools.pool_hits() as hits:
                    self._captured(name, run, graph, pool, stream, mode, records)
                graph.instantiate()
                _synchronize()
            except Exception as error:
                fault = self._capture_fault(inputs[0], error)
            if main:
                self.seen.collections += tuple(collections)
                self.seen.warnings = tuple(str(warning.message) for warning in caught)
                self.seen.pool_hits += tuple(hits)
        launches = tuple(_launch_seen(record) for record in records if record.lane == "device")
        if fault is not None:
            self._after_failure(graph, pool, current, before, private)
            seen = AttemptSeen(
                name, mode, int(stream.cuda_stream), GraphSeen(not_inspected="no graph"), fault,
                launches=launches,
            )  # fmt: skip
            self.seen.attempts.append(seen)
            return None, seen
        tensors = self.tensors(step)
        if main:
            self.seen.tensors = tensors
        landscape = self.tools.landscape(tensors, [(hit.address, hit.size) for hit in hits])
        walked = self.tools.walk(graph.raw_cuda_graph(), landscape)
        self._kept(name, tensors, landscape, tuple(pool))
        seen = AttemptSeen(name, mode, int(stream.cuda_stream), walked, None, tuple(pool), launches)
        self.seen.attempts.append(seen)
        return graph, seen

    def _captured(
        self,
        name: str,
        run: Callable[[], Any],
        graph: Any,
        pool: Any,
        stream: Any,
        mode: str,
        records: list[LaunchRecord],
    ) -> None:
        """Run the step inside a capture.

        torch.cuda.graph would also empty the allocator's cache, and unmap what a faulty graph of
        before still reads.
        """
        cuda = _torch().cuda
        _synchronize()
        self._ended = False
        with cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode=mode)
            try:
                try:
                    with self.tools.phase(name):
                        run()
                except Exception as error:
                    # the end of an invalidated capture raises, too, and says less
                    self._step_error = error
                    raise
                if is_main(name):
                    self.seen.capturing_streams |= self._capturing(records)
            finally:
                graph.capture_end()
                self._ended = True

    def _capture_fault(self, label: str, error: Exception) -> Fault:
        first, self._step_error = self._step_error or error, None
        fault = self.fault("capture", label, first)
        if first is not error:
            # the end says what the driver thinks, the step's own error where
            fault = _with_second(fault, error)
        for each in (first, error):
            # the frames of a failed step hold its tensors
            traceback.clear_frames(each.__traceback__)
        return fault

    def _after_failure(
        self, graph: Any, pool: Any, current: Any, before: Any, private: int
    ) -> None:
        """Put torch back where it was: its stream, and the allocator's way into the pool."""
        torch = _torch()
        # a capture that fails at its end leaves its stream current
        with contextlib.suppress(RuntimeError):
            torch.cuda.set_stream(current)
        left = sum(self.tools.private_bytes().values()) - private
        # a capture that came to its end has given the way back, and its graph releases the pool
        for name in () if self._ended else ("_cuda_endAllocateToPool", "_cuda_releasePool"):
            call = getattr(getattr(torch, "_C", None), name, None)
            if call is not None:
                with contextlib.suppress(RuntimeError):
                    call(torch.cuda.current_device(), pool)
        with contextlib.suppress(RuntimeError):
            graph.reset()
        if before is None or self.lost:
            return
        gc.collect()
        torch.cuda.empty_cache()
        after = self.tools.memory()
        if after is not None:
            allocated, reserved, used = zip(before, after, strict=True)
            self.seen.memory.append(
                MemorySeen("failed capture", allocated, reserved, used, private=left)
            )

    def _capturing(self, records: Iterable[LaunchRecord]) -> frozenset[int]:
        """Return which of the launches' streams take part in the capture that runs now."""
        torch = _torch()
        streams = {record.stream for record in records if record.lane == "device"}
        streams |= {
            call.stream
            for call in self.tools.calls
            if is_main(call.phase) and call.kind == "launch" and call.stream
        }
        found = set()
        for handle in streams - LEGACY_STREAMS:
            # asking the legacy stream could itself invalidate the capture; it never takes part
            with (
                contextlib.suppress(RuntimeError),
                torch.cuda.stream(torch.cuda.ExternalStream(handle)),
            ):
                if torch.cuda.is_current_stream_capturing():
                    found.add(handle)
        return frozenset(found)

    # --- tensors ---------------------------------------------------------------------------------

    def tensors(self, step: Any = None) -> tuple[TensorSeen, ...]:
        """Return the declared tensors, and those that the step's code holds."""
        found = []
        for role in ("output", "input", "state", "scratch"):
            name = "state" if role == "state" else "scratch" if role == "scratch" else f"{role}s"
            for path, tensor in self.asked(name, {}).items():
                if hasattr(tensor, "data_ptr"):
                    found.append(_tensor_seen(path, role, tensor))
        for path, value in self._held(memory_reached, step).items():
            with contextlib.suppress(Exception):  # an array of an unusual kind has no address
                address, size = address_of(value)
                device = str(getattr(value, "device", "cpu"))
                found.append(TensorSeen(path, "held", address, size, device))
        return tuple(found)

    def held(self) -> dict[str, Any]:
        """Return the tensors that the step's code holds. Let go of them soon."""
        return self._held(tensors_reached)

    def _held(self, look: Callable[[Any], dict[str, Any]], step: Any = None) -> dict[str, Any]:
        roots = (("step", step),) if step is not None else self.asked("code", None)
        if roots is None:
            roots = (("step", self.step),)
        try:
            return {
                path.replace("step", name, 1): value
                for name, root in roots
                for path, value in look(root).items()
            }
        except Exception as error:  # somebody's attribute that does not like to be looked at
            self.gap("tensors of the step's code", f"{type(error).__name__}: {error}")
            return {}

    def held_addresses(self) -> dict[str, int]:
        """Return the addresses of the tensors that the step's code holds."""
        return {path: int(tensor.data_ptr()) for path, tensor in self.held().items()}

    def rebinding(self, before: Mapping[str, int], during: str) -> None:
        """Record the names that hold another tensor than before."""
        after = self.held_addresses()
        for path, address in before.items():
            if address and after.get(path, 0) != address:
                self.seen.rebound += (ReboundSeen(path, address, after.get(path, 0), during),)

    def _kept(
        self, name: str, tensors: Sequence[TensorSeen], landscape: Any, pool: tuple[int, ...]
    ) -> None:
        if landscape is None:
            return
        for tensor in tensors:
            if landscape.locate(tensor.address).pool == pool:
                where = tensor.path if tensor.role == "held" else f"{tensor.role} {tensor.path}"
                self.seen.kept.append(KeptSeen(where, tensor.address, tensor.size, name))

    # --- replays ---------------------------------------------------------------------------------

    def _replays(
        self, first: tuple[str, Any], others: Sequence[tuple[str, Any]], changes: int | None
    ) -> None:
        self._replay(first)
        self.base = kept(self.step.outputs)
        if self.eager_outputs:
            self.compare("against eager", self.eager_outputs)
        if self.thorough:
            trials.again(self, first)
        second: dict[str, Any] = {}
        most = len(others) if changes is None else changes
        for label, batch in others:
            # inputs that the right answer is the same for prove nothing: more of them are tried
            differed = self.seen.other_answers
            if len(self.accepted) >= most and differed != 0:
                break
            try:
                self._replay((label, batch), may_refuse=True)
            except RefusedError:
                self.seen.skipped += (label,)
                continue
            self.accepted.append((label, batch))
            if len(self.accepted) == 1:
                second = kept(self.step.outputs)
            if self.other is None or (differed == 0 and self.seen.other_answers):
                self.other = (label, batch)
        if self.accepted:
            # the same inputs behind others: what a refill leaves of those must not matter
            self._stale(second)
        if self.accepted:
            self._replay(first)
            self.compare("restore", self.base)
        self.seen.stages.append("replay")

    def _replay(self, inputs: tuple[str, Any], *, may_refuse: bool = False) -> None:
        label, batch = inputs
        held = self.held_addresses()
        self.refill(label, batch, may_refuse=may_refuse)
        self.rebinding(held, "refill")
        expected = self.expected(label, batch)
        before = self.prepared(label)
        # a replay may end the process: say now what was seen
        self.progress(f"replay on {label}")
        self.replay(label)
        if expected is None:
            return
        self.seen.replays.append(self.judged(label, before, expected))
        if not self._first_answer:
            self._first_answer = expected
            if self.seen.has_reference:
                self.base_expected = expected
        elif may_refuse:
            differs = _answers_differ(expected, self._first_answer)
            self.seen.other_answers = (self.seen.other_answers or 0) + int(differs)

    def _stale(self, before: Mapping[str, Any]) -> None:
        """Replay other inputs once more, behind inputs of zeros where those are known."""
        label = self.accepted[0][0]
        inputs = self.asked("inputs", {})
        if not inputs and len(self.accepted) < 2:
            return
        with self.stage("refill", label):
            for tensor in inputs.values():
                tensor.zero_()
        self._replay(self.accepted[0])
        if self.seen.deterministic:
            expected = self.reference(label)
            with self.stage("read", label):
                found = drifts(
                    dict(self.step.outputs),
                    before,
                    spare=self.spare,
                    expected=expected,
                    tolerances=self.tolerances,
                )
            self.seen.trials.append(TrialSeen("stale", label, found))

    def _last(self, first: tuple[str, Any]) -> None:
        """Run the others without a graph, and then the first inputs in the graph once more."""
        self._trial(_nothing, first)
        held = self.held_addresses()
        for label, batch in self.accepted:
            self.refill(label, batch)
            self.prepared(label)
            self.eager_step(label)
        self.rebinding(held, "an eager run on other inputs")
        self.refill(*first)
        self.prepared(first[0])
        self.replay(first[0])
        self.compare("after eager", self.base)

    # --- faults ----------------------------------------------------------------------------------

    @contextlib.contextmanager
    def stage(self, stage: str, label: str) -> Iterator[None]:
        """Record an exception as a fault of this stage, and stop the part."""
        try:
            yield
        except (StopError, RefusedError):
            raise
        except Exception as error:
            self.seen.faults.append(self.fault(stage, label, error))
            raise StopError from error

    def fault(self, stage: str, label: str, error: BaseException) -> Fault:
        """Return the record of an exception."""
        self.lost = self.lost or context_lost()
        return Fault(
            stage,
            f"{type(error).__name__}: {first_lines(str(error))}",
            where=place_of(error),
            context_lost=self.lost,
            label=label,
        )


def _nothing(run: CaptureProtocol, first: Any) -> None:
    """Be a trial that disturbs nothing."""


def without(arrays: Mapping[str, Any], spare: Mapping[str, Any]) -> dict[str, Any]:
    """Return arrays whose spare elements are zero: equal on all sides of a comparison."""
    found = dict(arrays)
    for name, index in spare.items():
        value = found.get(name)
        if isinstance(value, Bounded):
            values = np.array(value.values)
            values[index] = 0
            found[name] = Bounded(values, value.atol, value.rms)
        elif value is not None:
            array = host_array(value)
            data = array.data.copy()
            data[index] = 0
            found[name] = HostArray(data, array.dtype)
    return found


def _answers_differ(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Tell whether two references differ."""
    for name, value in one.items():
        if name not in other:
            return True
        left, right = (
            host_array(each.values if isinstance(each, Bounded) else each)
            for each in (value, other[name])
        )
        if left.data.shape != right.data.shape or not np.array_equal(
            left.data, right.data, equal_nan=left.data.dtype.kind == "f"
        ):
            return True
    return False


def blocking_stream() -> Any:
    """Return a torch stream that waits for the legacy one, None without CuPy."""
    try:
        import cupy
    except ImportError:
        return None
    torch = _torch()
    if not _blocking:
        _blocking.append(cupy.cuda.Stream(non_blocking=False))
    return torch.cuda.ExternalStream(_blocking[0].ptr)


_blocking: list[Any] = []  # one for the process: torch keeps state by stream


def first_lines(text: str, count: int = 2) -> str:
    """Shorten an error's text: torch appends a page of advice to a CUDA error."""
    lines = [line.strip() for line in text.strip().splitlines()]
    code = _CODE.search(text)
    kept = [line for line in lines if not line.startswith(_ADVICE)][:count]
    short = " ".join(line for line in kept if line)
    return f"{short} ({code[1]})" if code is not None and code[1] not in short else short


def context_lost() -> bool:
    """Tell whether the device refuses everything by now. Only asked after an error."""
    try:
        _synchronize()
    except Exception:
        return True
    return False


def _with_second(fault: Fault, error: Exception) -> Fault:
    text = first_lines(str(error), 1)
    if text and text not in fault.error:
        return Fault(
            fault.stage,
            f"{fault.error}; at the end of the capture: {text}",
            fault.where,
            fault.context_lost,
            fault.label,
        )
    return fault


def _tensor_seen(path: str, role: str, tensor: Any) -> TensorSeen:
    size = int(tensor.element_size() * (_span(tensor) or 1))
    return TensorSeen(path, role, int(tensor.data_ptr()), size, str(tensor.device))


def _span(tensor: Any) -> int:
    """Return the elements from the first to the last one of a strided tensor."""
    if not tensor.numel():
        return 0
    pairs = zip(tensor.shape, tensor.stride(), strict=True)
    return 1 + sum((int(n) - 1) * abs(int(step)) for n, step in pairs)


def _launch_seen(record: LaunchRecord) -> LaunchSeen:
    return LaunchSeen(
        kernel=record.kernel,
        stream=record.stream,
        grid=tuple(record.grid),
        block=tuple(record.block),
        shared=record.shared,
        parameters=tuple(record.arguments),
        numbers=record.numbers,
    )


def _torch() -> Any:
    """Import torch on first use; half of what is used of it has no types."""
    import torch

    return torch


def _synchronize() -> None:
    _torch().cuda.synchronize()
