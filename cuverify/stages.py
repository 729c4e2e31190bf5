"""Name the stages of a step, one's own or ours, and see where its time goes.

`stage` costs nothing until somebody records: then it is an NVTX range, a stretch of host time, and,
on a GPU and outside a capture, a stretch of device time between two events. `record_stages` records
for a while; with the environment variable ``CUVERIFY_STAGES=FILE`` a whole process is recorded and
a Chrome trace written to FILE at its end. ``{pid}`` in the file's name is the process's number, so
that each of several that are started anew writes a file of its own; a forked one writes none.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cuverify.errors import ArgumentError

VARIABLE = "CUVERIFY_STAGES"
"""Environment variable that names the file of a whole process's Chrome trace."""


@dataclass(frozen=True)
class StageTime:
    """What the runs of one stage took, in microseconds.

    Attributes
    ----------
    name : str
    runs : int
    host_us : float
        Host time of all runs, that of stages within it included.
    device_us : float or None
        Device time of all runs between the events around them, gaps included; None where none was
        measured.
    """

    name: str
    runs: int
    host_us: float
    device_us: float | None


@dataclass
class _Run:
    name: str
    begin_ns: int
    end_ns: int = 0  # 0: not over yet
    events: tuple[Any, Any] | None = None
    thread: int = field(default_factory=threading.get_native_id)


@dataclass
class StageLog:
    """The runs of stages in the order in which they began; those that are not over do not count.

    Attributes
    ----------
    device : bool
        Whether device time is measured, which keeps two events for each run.
    """

    device: bool = True
    _runs: list[_Run] = field(default_factory=list)

    def times(self) -> list[StageTime]:
        """Return the time of each stage, in the order of their first runs. Waits for the device."""
        runs = self._over()
        device = _device_us(runs)
        found: dict[str, list[tuple[float, float | None]]] = {}
        for run, on_device in zip(runs, device, strict=True):
            host = (run.end_ns - run.begin_ns) / 1e3
            found.setdefault(run.name, []).append((host, on_device))
        times = []
        for name, pairs in found.items():
            measured = [on_device for _, on_device in pairs if on_device is not None]
            times.append(
                StageTime(
                    name,
                    len(pairs),
                    sum(host for host, _ in pairs),
                    sum(measured) if measured else None,
                )
            )
        return times

    def to_text(self) -> str:
        """Return a table of `times`."""
        lines = [f"{'stage':32} {'runs':>5} {'host us':>10} {'device us':>10}"]
        for entry in self.times():
            device = "-" if entry.device_us is None else f"{entry.device_us:.1f}"
            lines.append(f"{entry.name:32} {entry.runs:5} {entry.host_us:10.1f} {device:>10}")
        return "\n".join(lines)

    def to_chrome(self) -> dict[str, Any]:
        """Return the host's runs as a Chrome trace, for chrome://tracing or Perfetto."""
        runs = self._over()
        start = min((run.begin_ns for run in runs), default=0)
        events = [
            {
                "name": run.name,
                "cat": "stage",
                "ph": "X",
                "ts": (run.begin_ns - start) / 1e3,
                "dur": (run.end_ns - run.begin_ns) / 1e3,
                "pid": os.getpid(),
                "tid": run.thread,
            }
            for run in runs
        ]
        return {"traceEvents": events, "displayTimeUnit": "ns"}

    def _over(self) -> list[_Run]:
        return [run for run in self._runs if run.end_ns]


def _device_us(runs: list[_Run]) -> list[float | None]:
    if any(run.events is not None for run in runs):
        import torch

        torch.cuda.synchronize()
    return [
        None if run.events is None else 1e3 * run.events[0].elapsed_time(run.events[1])
        for run in runs
    ]


_logs: list[StageLog] = []


@contextlib.contextmanager
def record_stages() -> Iterator[StageLog]:
    """Record all stages while the context is open.

    Yields
    ------
    StageLog

    Examples
    --------
    >>> with record_stages() as log:
    ...     with stage("sleep"):
    ...         pass
    >>> [(entry.name, entry.runs) for entry in log.times()]
    [('sleep', 1)]
    """
    log = StageLog()
    _logs.append(log)
    try:
        yield log
    finally:
        _logs[:] = [other for other in _logs if other is not log]


@contextlib.contextmanager
def stage(name: str) -> Iterator[None]:
    """Mark a stage of a step.

    Parameters
    ----------
    name : str
        What tables and traces call it.
    """
    if not _logs:
        yield
        return
    runs = []
    with _nvtx(name):
        for log in _logs:
            begin = time.perf_counter_ns()
            runs.append(_Run(name, begin, events=_events() if log.device else None))
            log._runs.append(runs[-1])
        try:
            yield
        finally:
            for run in runs:
                if run.events is not None:
                    run.events[1].record()
                run.end_ns = time.perf_counter_ns()


def _cuda() -> Any:
    """Return torch where it has a CUDA device that is in use, else None."""
    torch = sys.modules.get("torch")
    return torch if torch is not None and torch.cuda.is_initialized() else None


@contextlib.contextmanager
def _nvtx(name: str) -> Iterator[None]:
    torch = _cuda()
    if torch is None:
        yield
        return
    torch.cuda.nvtx.range_push(name)
    try:
        yield
    finally:
        torch.cuda.nvtx.range_pop()


def _events() -> tuple[Any, Any] | None:
    """Return a pair of events, the first recorded; None where events could not be read later."""
    torch = _cuda()
    if torch is None or torch.cuda.is_current_stream_capturing():
        return None
    pair = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    pair[0].record()
    return pair


def _record_process(file: Path) -> None:
    process = os.getpid()
    file = file.parent / file.name.replace("{pid}", str(process))
    try:
        file.open("a").close()
    except OSError as error:
        raise ArgumentError(VARIABLE, str(file), f"cannot be written: {error.strerror}") from error
    log = StageLog(device=False)  # its trace has host time alone
    _logs.append(log)

    def write() -> None:
        if os.getpid() == process:  # a forked process has this function, too
            file.write_text(json.dumps(log.to_chrome()), encoding="utf-8")

    atexit.register(write)


if os.environ.get(VARIABLE):
    _record_process(Path(os.environ[VARIABLE]))
