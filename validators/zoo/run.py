"""Run the zoo: every mutant and every twin under the validator, each in a process of its own."""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from cuverify.validators.child import ChildOutcome, Emit
from cuverify.validators.zoo.forks import Job, run_jobs
from cuverify.validators.zoo.mutant import Mutant
from cuverify.validators.zoo.rates import Run
from cuverify.validators.zoo.registry import BY_NAME, MUTANTS

from cuverify.errors import ArgumentError, DeviceError
from cuverify.report import Report

# imported before the processes are forked; importing them does not start CUDA
_IMPORTS = (
    "torch",
    "cupy",
    "cuda.bindings.driver",
    "cupti.cupti",
    "cuverify.validators.api",
    "cuverify.validators.zoo.parts",
)
_BINDINGS = ("cuda-bindings", "cupti-python")
_MOST_JOBS = 16
_NEEDS = {"cuda-bindings": "cuda.bindings", "cupti": "cupti"}

Progress = Callable[[str, int, int], None]


def chosen(names: Sequence[str]) -> list[Mutant]:
    """Return mutants by name, by rule, or all of them when nothing is named.

    Raises
    ------
    ArgumentError
        A name that is neither.
    """
    if not names:
        return list(MUTANTS)
    found: list[Mutant] = []
    for name in names:
        of_name = [BY_NAME[name]] if name in BY_NAME else []
        of_rule = [mutant for mutant in MUTANTS if mutant.rule == name.upper()]
        if not of_name and not of_rule:
            raise ArgumentError("names", name, "is no mutant and no rule; `cuverify zoo --list`")
        found += [mutant for mutant in of_name + of_rule if mutant not in found]
    return found


def judgeable(mutants: Sequence[Mutant]) -> tuple[list[Mutant], dict[str, str]]:
    """Part mutants into those that can be judged here, and the others with the reason."""
    reasons = {mutant.name: missing(mutant) for mutant in mutants}
    not_run = {name: reason for name, reason in reasons.items() if reason is not None}
    return [mutant for mutant in mutants if mutant.name not in not_run], not_run


def missing(mutant: Mutant) -> str | None:
    """Return why a mutant cannot be judged here, or None when it can."""
    for need in mutant.needs:
        try:
            there = importlib.util.find_spec(_NEEDS[need]) is not None
        except ImportError:
            there = False
        if not there:
            return f"{need} is not installed"
    return None


def run_zoo(
    mutants: Sequence[Mutant],
    *,
    jobs: int | None = None,
    progress: Progress | None = None,
) -> list[Run]:
    """Validate each mutant and its twin and return what was found.

    Parameters
    ----------
    mutants : sequence of Mutant
    jobs : int, optional
        Processes at once; by default one a core, at most 16.
    progress : callable, optional
        Told a name, how many are done, and how many there are.

    Returns
    -------
    list of Run
        The mutant and then the twin of each.

    Raises
    ------
    DeviceError
        There is no CUDA device, or the process that starts the others ended.
    """
    if not _has_device():
        raise DeviceError("the zoo needs a CUDA device, and torch finds none")
    todo = [(mutant, faulty) for mutant in mutants for faulty in (True, False)]
    finished = 0

    def done(index: int, outcome: ChildOutcome) -> None:
        nonlocal finished
        finished += 1
        if progress is not None:
            progress(todo[index][0].name, finished, len(todo))

    # a run that hangs until its limit starts first, so that nothing waits for it at the end
    order = sorted(range(len(todo)), key=lambda index: not _hangs(*todo[index]))
    todo = [todo[index] for index in order]
    outcomes = run_jobs(
        [
            Job(f"{__name__}:validate_one", {"name": mutant.name, "faulty": faulty}, mutant.limit_s)
            for mutant, faulty in todo
        ],
        parallel=jobs or min(os.cpu_count() or 1, _MOST_JOBS),
        imports=_IMPORTS,
        done=done,
    )
    runs = [
        Run(mutant, faulty, _report(mutant, outcome), outcome.seconds)
        for (mutant, faulty), outcome in zip(todo, outcomes, strict=True)
    ]
    place = {mutant.name: index for index, mutant in enumerate(mutants)}
    return sorted(runs, key=lambda run: (place[run.mutant.name], not run.faulty))


def versions() -> dict[str, str]:
    """Return the versions that the rates depend on: they are no property of the rules alone."""
    from cuverify.validators import summary

    from cuverify import env

    bindings = {name: value for name, value in summary.versions().items() if name in _BINDINGS}
    return {**env.inspect().versions, **bindings}


def _hangs(mutant: Mutant, faulty: bool) -> bool:
    return faulty and mutant.rule == "CV904"


def _has_device() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())


def _report(mutant: Mutant, outcome: ChildOutcome) -> Report:
    from cuverify.validators.api import Listener

    listener = Listener(mutant.factory)
    for event in outcome.events:
        listener.take(event)
    return listener.report(outcome, mutant.limit_s)


def validate_one(work: Mapping[str, Any], emit: Emit) -> None:
    """Be the process: make the case, validate it, and send its report.

    Parameters
    ----------
    work : mapping
        ``name`` of the mutant, and whether it is ``faulty``.
    emit : callable
    """
    from cuverify.validators.api import load_factory, report_to

    case = load_factory(BY_NAME[work["name"]].factory)(faulty=work["faulty"])
    case.name = work["name"] if work["faulty"] else f"{work['name']}, the clean twin"
    report_to(emit, case)
