"""Capture a step in a CUDA graph, replay it on changed inputs, and say what is wrong.

The observing part touches the device, writes a `CaptureSeen` and decides nothing; `rules.judge`
turns the record into findings. A step that may hang or access what it should not belongs in a
child process: `cuverify.validators.child`.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from cuverify.validators import protocol
from cuverify.validators.coverage import coverage
from cuverify.validators.instruments import Instruments, NoInstruments
from cuverify.validators.observations import CaptureSeen
from cuverify.validators.protocol import CaptureProtocol, ReplayableStep
from cuverify.validators.rules import RULES, judge
from cuverify.validators.runs import Tolerances

from cuverify.errors import ArgumentError, DeviceError
from cuverify.report import Coverage, Finding

if TYPE_CHECKING:
    from cuverify.validators.rule import Rule

Progress = Callable[[str, CaptureSeen], None]


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
    strict: bool = True,
    thorough: bool = True,
    progress: Progress | None = None,
    instruments: NoInstruments | None = None,
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
        How many of the other inputs to replay on, of those that fit; all of them by default. More
        of them while the right answer is the same for all.
    warmups : int
        Runs on the captured stream before the capture, at least 1: compilation and module loading
        are no part of a graph.
    rules : sequence of Rule
    strict : bool
        Also capture on a blocking stream, on a cold one, and a fresh step.
    thorough : bool
        False leaves out the second captures and all replays under changed circumstances: for the
        many batches of a step that was judged thoroughly on one of them.
    progress : callable, optional
        Told each part that begins, and what was seen until then.
    instruments : NoInstruments, optional
        What to look with; all that are installed by default.

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
    The device is synchronised many times. torch's current stream, the garbage collector, warning
    filters and every hook are afterwards as they were. A failing step may leave the process's CUDA
    context unusable; see `cuverify.validators.child`.
    """
    seen = observe(
        step,
        inputs,
        tolerances=tolerances,
        only_recorded=only_recorded,
        changes=changes,
        warmups=warmups,
        strict=strict,
        thorough=thorough,
        progress=progress,
        instruments=instruments,
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
    strict: bool = True,
    thorough: bool = True,
    progress: Progress | None = None,
    instruments: NoInstruments | None = None,
) -> CaptureSeen:
    """Run the protocol of `capture_and_replay` and return its record, unjudged."""
    if not inputs:
        raise ArgumentError("inputs", inputs, "needs at least the inputs of the capture")
    if warmups < 1:
        raise ArgumentError("warmups", warmups, "needs at least 1: a cold kernel compiles")
    torch = protocol._torch()
    if not torch.cuda.is_available():
        raise DeviceError("a capture needs a CUDA device, and torch finds none")
    seen = CaptureSeen(only_recorded=only_recorded)
    tools = Instruments(torch) if instruments is None else instruments
    stream_before = torch.cuda.current_stream()
    debugging = _sync_debugging(torch)
    try:
        seen.observer = tools.observer_name
        seen.gaps.extend(tools.gaps)

        def begins(part: str) -> None:
            seen.calls = tuple(tools.calls)
            if progress is not None:
                progress(part, seen)

        run = CaptureProtocol(step, tolerances, seen, tools, begins)
        run.run(inputs, changes=changes, warmups=warmups, strict=strict, thorough=thorough)
    finally:
        seen.calls = tuple(tools.calls)
        seen.wide_arguments = tools.wide_arguments
        trouble = tools.trouble
        if trouble:
            seen.gaps.append(("CUDA calls", f"the observer failed in part: {trouble}"))
        tools.close()
        with contextlib.suppress(RuntimeError):  # of a lost context
            torch.cuda.set_stream(stream_before)
            if debugging is not None and debugging != _sync_debugging(torch):
                torch.cuda.set_sync_debug_mode(debugging)
    return seen


def _sync_debugging(torch: Any) -> int | None:
    ask = getattr(torch.cuda, "get_sync_debug_mode", None)
    return None if ask is None else int(ask())
