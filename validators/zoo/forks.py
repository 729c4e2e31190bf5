"""Run many tasks, each in a process of its own, without importing the libraries each time.

A server process imports torch and CuPy once, before anything has started CUDA, and forks a process
for each task: a lost context, a hang or a crash ends that process alone. CUDA cannot be used on
both sides of a fork, so the server itself never touches the device.
"""

from __future__ import annotations

import contextlib
import ctypes
import importlib
import json
import os
import selectors
import signal
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import IO, Any

from cuverify.validators.child import ChildOutcome, Emit, perform, run_child

from cuverify.errors import ArgumentError, DeviceError

_SERVE = f"{__name__}:serve"
_START_S = 120.0  # for the libraries to be imported, and for the last process to be ended
_LOG_TAIL = 4000
_STACK_S = 0.3
_PR_SET_PDEATHSIG = 1


@dataclass(frozen=True)
class Job:
    """A task for a process of its own.

    Parameters
    ----------
    task : str
        ``module:function``, as `cuverify.validators.child.run_child` takes it.
    work : mapping
        JSON values.
    limit_s : float
        Seconds after which the process is ended.
    """

    task: str
    work: Mapping[str, Any]
    limit_s: float


def run_jobs(
    jobs: Sequence[Job],
    *,
    parallel: int,
    imports: Sequence[str] = (),
    done: Callable[[int, ChildOutcome], None] | None = None,
    environment: Mapping[str, str] | None = None,
) -> list[ChildOutcome]:
    """Run jobs in forked processes and return how each ended, in the order of the jobs.

    Parameters
    ----------
    jobs : sequence of Job
    parallel : int
        Processes at once, at least 1.
    imports : sequence of str
        Modules that the server imports before it forks. One that is missing is left to the task.
    done : callable, optional
        Told the index of each job that ended, and its outcome.
    environment : mapping, optional
        Variables to set in the server.

    Raises
    ------
    ArgumentError
        `parallel` is not positive.
    DeviceError
        The server itself ended early; the error has what it said.
    """
    if parallel < 1:
        raise ArgumentError("parallel", parallel, "needs at least one process")
    outcomes: dict[int, ChildOutcome] = {}

    def take(event: Mapping[str, Any]) -> None:
        outcome = ChildOutcome(**{**event["outcome"], "events": tuple(event["outcome"]["events"])})
        outcomes[event["job"]] = outcome
        if done is not None:
            done(event["job"], outcome)

    if not jobs:
        return []
    server = run_child(
        _SERVE,
        {
            "imports": list(imports),
            "parallel": parallel,
            "jobs": [[job.task, job.work, job.limit_s] for job in jobs],
        },
        silence_s=_START_S + max(job.limit_s for job in jobs),
        on_event=take,
        environment=environment,
    )
    if len(outcomes) < len(jobs):
        said = server.error or server.log.strip()[-400:] or server.status
        raise DeviceError(
            f"the server of {len(jobs)} runs {server.ending} after {len(outcomes)}: {said}"
        )
    return [outcomes[index] for index in range(len(jobs))]


@dataclass
class _Running:
    """A forked process."""

    job: int
    pid: int
    pipe: int
    log: IO[bytes]
    started: float
    limit_s: float
    events: list[Any] = field(default_factory=list)
    last: Mapping[str, Any] | None = None
    rest: bytes = b""


def serve(work: Mapping[str, Any], emit: Emit) -> None:
    """Be the server: import, fork, listen, and emit each outcome."""
    for name in work["imports"]:
        with contextlib.suppress(ImportError):
            importlib.import_module(name)
    waiting = list(enumerate(work["jobs"]))[::-1]
    running: dict[int, _Running] = {}
    with selectors.DefaultSelector() as selector:
        while waiting or running:
            while waiting and len(running) < work["parallel"]:
                index, (task, its_work, limit_s) = waiting.pop()
                process = _fork(index, task, its_work, limit_s)
                running[process.pipe] = process
                selector.register(process.pipe, selectors.EVENT_READ)
            now = time.monotonic()
            left = min(each.started + each.limit_s - now for each in running.values())
            for key, _ in selector.select(timeout=max(0.0, left)):
                process = running[key.fd]
                if _hear(process):
                    selector.unregister(key.fd)
                    del running[key.fd]
                    emit({"job": process.job, "outcome": _outcome(process, "")})
            for process in list(running.values()):
                if time.monotonic() > process.started + process.limit_s:
                    selector.unregister(process.pipe)
                    del running[process.pipe]
                    emit({"job": process.job, "outcome": _outcome(process, "timeout")})


def _fork(job: int, task: str, work: Mapping[str, Any], limit_s: float) -> _Running:
    reading, writing = os.pipe()
    log = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the outcome
    parent = os.getpid()
    pid = os.fork()
    if pid == 0:
        # whatever happens here must not return into the server's loop
        try:
            ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
            if os.getppid() != parent:  # it was gone before
                os._exit(1)
            os.close(reading)
            for standard in (1, 2):
                os.dup2(log.fileno(), standard)
            perform(writing, task, work)
        finally:
            os._exit(1)
    os.close(writing)
    return _Running(job, pid, reading, log, time.monotonic(), limit_s)


def _hear(process: _Running) -> bool:
    """Read what there is; return True when the process has closed its pipe."""
    chunk = os.read(process.pipe, 1 << 16)
    if not chunk:
        return True
    *lines, process.rest = (process.rest + chunk).split(b"\n")
    for line in lines:
        message = json.loads(line)
        if "event" in message:
            process.events.append(message["event"])
        else:
            process.last = message
    return False


def _outcome(process: _Running, status: str) -> dict[str, Any]:
    """End what still runs and return a `ChildOutcome` as JSON values."""
    if status == "timeout":
        with contextlib.suppress(ProcessLookupError):
            os.kill(process.pid, signal.SIGUSR1)  # it writes its stack
            time.sleep(_STACK_S)
            os.kill(process.pid, signal.SIGKILL)
    _, wait_status = os.waitpid(process.pid, 0)
    os.close(process.pipe)
    process.log.seek(0)
    text = process.log.read().decode(errors="replace")[-_LOG_TAIL:]
    process.log.close()
    last = process.last or {}
    if not status:
        status = "done" if last.get("done") else "raised" if last else "died"
    return {
        "status": status,
        "events": process.events,
        "error": last.get("error", ""),
        "kind": last.get("kind", ""),
        "trace": last.get("trace", ""),
        "exit_status": os.waitstatus_to_exitcode(wait_status),
        "log": text,
        "seconds": round(time.monotonic() - process.started, 3),
    }
