"""The doors of the capture validator: a case, a bare function, or a factory in a child process."""

from __future__ import annotations

import importlib
import importlib.util
import itertools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuverify.validators.callable_case import CallableCase
from cuverify.validators.capture import CaptureResult, Progress, capture_and_replay
from cuverify.validators.child import ChildOutcome, Emit, run_child
from cuverify.validators.coverage import coverage
from cuverify.validators.lint import lint
from cuverify.validators.lint_watch import has_gpu
from cuverify.validators.observations import CaptureSeen, EndSeen
from cuverify.validators.rules import judge
from cuverify.validators.subject import CallableStep
from cuverify.validators.summary import report_of

from cuverify.errors import ArgumentError, CaseError, DeviceError
from cuverify.report import Coverage, Report

if TYPE_CHECKING:
    from cuverify.validators.compare import Tolerance

BATCHES = 6  # of a check case, when the caller does not say how many
SILENCE_S = 60.0

# what a child says before it has looked at anything
_COULD_NOT_RUN = {"CaseError": CaseError, "DeviceError": DeviceError}

# what `validate` would have to hand to a child, as it is when nobody gives it
_OF_A_REFERENCE = {"seed": 0, "examples": None, "strict": True, "progress": None}

_TASK = f"{__name__}:run_in_child"


def validate_callable(
    step: Callable[[], Any],
    *,
    inputs: Mapping[str, Any],
    outputs: Mapping[str, Any],
    refill: Callable[[int], None] | None = None,
    reference: Callable[[], Mapping[str, Any]] | None = None,
    scratch: Mapping[str, Any] | None = None,
    state: Mapping[str, Any] | None = None,
    padding: Mapping[str, Any] | None = None,
    make_step: Callable[[], Callable[[], Any]] | None = None,
    vary: Callable[[int], None] | None = None,
    tolerance: Mapping[str, Tolerance] | Tolerance | None = None,
    deterministic: bool = True,
    only_recorded: bool = False,
    child: bool = False,
    silence_s: float = SILENCE_S,
    name: str = "step",
    **more: Any,
) -> Report:
    """Capture a bare function on its tensors, replay it, and say what is wrong.

    Parameters
    ----------
    step, inputs, outputs, refill, reference, scratch, state, padding, make_step, vary, tolerance,
    deterministic, only_recorded, name, **more
        As `CallableCase` has them.
    child : bool
        Not here: a function of this process cannot be run in another one. See `validate_factory`.
    silence_s : float
        Likewise.

    Returns
    -------
    Report

    Raises
    ------
    ArgumentError
        An argument that `CallableCase` refuses, or ``child=True``.
    DeviceError
        As `validate`: never where the lint can look in place of the capture.

    Notes
    -----
    A step that accesses what it must not ends this process's CUDA context: one that is not trusted
    comes as a factory, to `validate_factory`.
    """
    if child:
        raise ArgumentError(
            "child",
            child,
            f"a function cannot be found again by another process (with silence_s={silence_s:g}); "
            "write a factory that returns a CallableCase, and use validate_factory",
        )
    return validate(
        CallableCase(
            step,
            inputs,
            outputs,
            refill=refill,
            reference=reference,
            scratch=scratch or {},
            state=state or {},
            padding=padding or {},
            make_step=make_step,
            vary=vary,
            tolerance=tolerance,
            deterministic=deterministic,
            only_recorded=only_recorded,
            name=name,
            **more,
        )
    )


def validate_factory(
    reference: str,
    *,
    silence_s: float = SILENCE_S,
    environment: Mapping[str, str] | None = None,
) -> Report:
    """Validate what a factory makes, in a child process with a time limit.

    Parameters
    ----------
    reference : str
        ``module:function`` or ``file.py:function``, importable in a fresh process: the function
        takes nothing and returns a `CallableCase`. A case of `cuverify.cases.CheckCase` does, too.
    silence_s : float
        Seconds after which a stage that says nothing counts as hanging.
    environment : mapping, optional
        Variables to set in the child.

    Returns
    -------
    Report
        With what was seen until then, when the child hangs (CV904), dies (CV905) or loses its
        device (CV903).

    Raises
    ------
    ArgumentError
        `silence_s` is not positive.
    CaseError
        The factory cannot be found, or gives no case.
    DeviceError
        There is no CUDA device, and the case is a check case. A `CallableCase` is linted then, as
        `validate` says.
    """
    listener = Listener(reference)
    outcome = run_child(
        _TASK,
        {"reference": reference},
        silence_s=silence_s,
        on_event=listener.take,
        environment=environment,
    )
    if outcome.kind in _COULD_NOT_RUN:
        raise _COULD_NOT_RUN[outcome.kind](outcome.error.partition(": ")[2])
    return listener.report(outcome, silence_s)


def validate(
    case: Any,
    *,
    seed: int = 0,
    examples: int | None = None,
    child: bool = False,
    strict: bool = True,
    progress: Progress | None = None,
) -> Report:
    """Capture a case's step, replay it, and say what is wrong.

    Parameters
    ----------
    case : CallableCase, CheckCase or str
        A string is a reference as `validate_factory` takes it, and always goes into a child: it
        takes none of `seed`, `examples`, `strict` and `progress`.
    seed : int
        Draws the batches of a check case.
    examples : int, optional
        Batches of a check case.
    child : bool
        Needs a reference: an object cannot be found again by another process.
    strict : bool
        Also capture on a blocking stream and on a cold one.
    progress : callable, optional
        Told each part that begins, and what was seen until then.

    Returns
    -------
    Report

    Raises
    ------
    ArgumentError
        ``child=True`` with an object, or an argument that a reference does not take.
    DeviceError
        There is no CUDA device, and the case is a check case. A `CallableCase` goes to the lint
        then (`cuverify.validators.lint`), and the coverage says that nothing was captured.
    """
    if isinstance(case, str):
        given = {"seed": seed, "examples": examples, "strict": strict, "progress": progress}
        for name, value in given.items():
            if value != _OF_A_REFERENCE[name]:
                raise ArgumentError(name, value, "is not for a reference: give the case itself")
        return validate_factory(case)
    if child:
        raise ArgumentError("child", child, "needs a reference, module:function, and no object")
    if isinstance(case, CallableCase):
        if not has_gpu():
            return lint(case)
        result = capture_and_replay(
            CallableStep(case),
            [(f"seed {each}", each) for each in case.seeds],
            tolerances=case.tolerance,
            only_recorded=case.only_recorded,
            strict=strict,
            progress=progress,
        )
        return report_of(case.name, [result])
    left = _batches(case, seed, examples)
    results = []
    while left:
        result = capture_and_replay(
            case.step(left[0][1], "torch-cuda"),
            left,
            tolerances=getattr(case, "tolerances", None),
            only_recorded=getattr(case, "only_recorded", True),
            strict=strict,
            progress=progress,
        )
        results.append(result)
        # batches that did not fit the buffers of this one get a graph of their own
        left = [each for each in left[1:] if each[0] in result.seen.skipped]
    return report_of(case.name, results)


def _batches(case: Any, seed: int, examples: int | None) -> list[tuple[str, Any]]:
    """Return the first batches that the case draws for a GPU."""
    number = examples or BATCHES
    drawn = case.device_batches(seed=seed, examples=2 * number)
    found = list(itertools.islice(drawn, number))
    if not found:
        raise CaseError(f"{case.name}: device_batches() gave no batch: nothing would be checked")
    return found


class Listener:
    """Keeps what a child said last."""

    def __init__(self, reference: str) -> None:
        self.reference = reference
        self.stage = ""
        self.last: Report | None = None

    def take(self, event: Mapping[str, Any]) -> None:
        """Hear an event."""
        if event["kind"] == "stage":
            self.stage = event["stage"]
        else:
            self.last = Report.from_json(event["report"])

    def report(self, outcome: ChildOutcome, silence_s: float) -> Report:
        """Return the last report, with how the process ended where it did not come to its end."""
        report = self.last or Report(f"capture of {self.reference}")
        if outcome.status != "done":
            end = EndSeen(
                status=outcome.status,
                ending=outcome.ending,
                label=self.stage,
                silence_s=silence_s,
                error=outcome.error,
                log=outcome.trace or outcome.log,
            )
            report.findings.extend(judge(CaptureSeen(end=end)))
            report.coverage.append(
                Coverage("what follows", "not inspected", f"the process ended in {self.stage}")
            )
        return report


def run_in_child(work: Mapping[str, Any], emit: Emit) -> None:
    """Be the child: make the case, validate it, and send its report."""
    report_to(emit, made_case(work["reference"]))


def report_to(emit: Emit, case: Any) -> None:
    """Validate a case and send each part that begins, with what was found until then, and the end.

    Parameters
    ----------
    emit : callable
        Takes the events that `Listener` hears.
    case : CallableCase or CheckCase
    """

    def begins(part: str, seen: CaptureSeen) -> None:
        emit({"kind": "stage", "stage": part})
        # a hang or a crash in this part must not take with it what was seen before
        partial = CaptureResult(judge(seen), coverage(seen), seen)
        emit({"kind": "report", "report": report_of(case.name, [partial]).to_json()})

    report = validate(case, progress=begins)
    emit({"kind": "report", "report": report.to_json()})


def made_case(reference: str, *, bare: bool = False) -> Any:
    """Return the case that a factory makes.

    Parameters
    ----------
    reference : str
        As `validate_factory` takes it.
    bare : bool
        Take a `CallableCase` only, and no check case.

    Raises
    ------
    CaseError
        There is no such factory, or it gives something else.
    """
    made = load_factory(reference)
    case = made() if callable(made) and not hasattr(made, "device_batches") else made
    if not isinstance(case, CallableCase):
        if bare or not hasattr(case, "device_batches"):
            raise CaseError(f"{reference} gave {type(case).__name__}, and no CallableCase")
    elif case.name == CallableCase.name:
        case.name = reference.rpartition(":")[2]
    return case


def load_factory(reference: str) -> Any:
    """Return what ``module:name`` or ``file.py:name`` names.

    Raises
    ------
    CaseError
        The module does not import, or has no such name.
    """
    place, separator, name = reference.rpartition(":")
    if not separator:
        raise CaseError(f"factory {reference!r}: write module:function or file.py:function")
    try:
        module = (
            _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        )
    except Exception as error:
        raise CaseError(
            f"factory {reference!r}: {place} does not import: {type(error).__name__}: {error}"
        ) from error
    if not hasattr(module, name):
        raise CaseError(f"factory {reference!r}: {place} has no attribute {name!r}")
    return getattr(module, name)


def _from_file(path: Path) -> Any:
    name = f"cuverify_factory_{path.stem}"
    spec = importlib.util.spec_from_file_location(name, path.resolve(strict=True))
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    spec.loader.exec_module(module)
    return module
