"""Run a function in a child process that may hang or die, and hear from it while it runs.

One illegal access poisons the CUDA context of the whole process, and a kernel that spins never
lets a synchronisation return. Both happen in the child; the parent gets the events until then, and
how it ended.

Protocol: the child is ``python -m cuverify.validators.child FD``. Its standard input brings one
line of JSON, the work, and then stays open: when it closes, the parent is gone and the child ends
itself. The file descriptor FD takes one line of JSON an event. Standard output and error belong to
the libraries; their tail comes with the outcome.
"""

from __future__ import annotations

import contextlib
import faulthandler
import importlib
import json
import os
import selectors
import signal
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import CancelledError
from dataclasses import dataclass, field
from typing import IO, Any, Literal, NoReturn

from cuverify.errors import ArgumentError, DeviceError

Emit = Callable[[Mapping[str, Any]], None]

_MODULE = "cuverify.validators.child"
_LOG_TAIL = 4000  # characters of the child's own output that an outcome carries
_END_S = 10.0  # for a child that has said everything to end by itself
_KILL_S = 30.0  # for the driver to take a killed process's context apart
_LOOK_S = 0.2  # between two looks at whether the caller still wants it
_STACK_S = 0.3  # for a hanging process to write its stack
_WHERE = signal.SIGUSR1 if os.name == "posix" else signal.SIGTERM  # asks for that stack
_ORPHANED = 70  # exit status of a child whose parent is gone


@dataclass(frozen=True)
class ChildOutcome:
    """How a child process ended, and what it said.

    Parameters
    ----------
    status : {"done", "raised", "timeout", "died"}
        It returned, it raised, it was silent for too long and was killed, or it ended by itself
        without a word.
    events : tuple of mapping
        In the order of their arrival. Those of the caller's task only.
    error : str
        For ``raised``: class and message.
    kind : str
        For ``raised``: the exception's class.
    trace : str
        For ``raised``: the traceback.
    exit_status : int or None
        As `subprocess` gives it: negative for a signal. None when the process could not be ended.
    log : str
        The tail of its standard output and error.
    seconds : float
        From start to end.
    """

    status: Literal["done", "raised", "timeout", "died"]
    events: tuple[Mapping[str, Any], ...] = ()
    error: str = ""
    kind: str = ""
    trace: str = ""
    exit_status: int | None = 0
    log: str = ""
    seconds: float = 0.0

    @property
    def ending(self) -> str:
        """How the process ended, in words."""
        if self.exit_status is None:
            return "could not be ended"
        if self.exit_status < 0:
            try:
                return f"ended by {signal.Signals(-self.exit_status).name}"
            except ValueError:
                return f"ended by signal {-self.exit_status}"
        return f"ended with status {self.exit_status}"


@dataclass
class _Heard:
    """What the pipe has brought so far."""

    events: list[Mapping[str, Any]] = field(default_factory=list)
    last: Mapping[str, Any] | None = None  # the child's closing message
    rest: bytes = b""


def run_child(
    task: str,
    work: Mapping[str, Any],
    *,
    silence_s: float,
    on_event: Callable[[Mapping[str, Any]], None] | None = None,
    environment: Mapping[str, str] | None = None,
    cancelled: threading.Event | None = None,
) -> ChildOutcome:
    """Run ``task(work, emit)`` in a child process.

    Parameters
    ----------
    task : str
        ``module:function``, importable in the child. It takes the work and a function that sends an
        event, a mapping of JSON values.
    work : mapping
        JSON values.
    silence_s : float
        Seconds without an event after which the child counts as hanging and is killed.
    on_event : callable, optional
        Called here with each event as it arrives.
    environment : mapping, optional
        Variables to set in the child, on top of this process's.
    cancelled : threading.Event, optional
        Ends the child soon after it is set, and this call with a `CancelledError`.

    Returns
    -------
    ChildOutcome

    Raises
    ------
    ArgumentError
        `silence_s` is not positive.
    DeviceError
        This platform cannot hand a pipe to a child.

    Notes
    -----
    Any exception here, KeyboardInterrupt included, kills the child and its own children first. The
    child runs in its own session, so Ctrl-C reaches this process alone.
    """
    if silence_s <= 0:
        raise ArgumentError("silence_s", silence_s, "must be a positive number of seconds")
    if os.name != "posix":
        raise DeviceError(
            "child processes for GPU runs need Linux: this platform cannot pass pipes"
        )
    started = time.monotonic()
    heard = _Heard()
    with tempfile.TemporaryFile() as log:
        with _child_process(log, environment) as (process, pipe):
            _send_work(process, task, work)
            silent = _listen(process, pipe, heard, silence_s, on_event, cancelled)
            # a forked process of the child's can hold the pipe open after the child is gone
            silent = silent and process.poll() is None
            if silent and heard.events:
                _ask_where_it_hangs(process)
            if not silent:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(timeout=_END_S)
        log.seek(0)
        text = log.read().decode(errors="replace")[-_LOG_TAIL:]
    last = heard.last or {}
    status: Literal["done", "raised", "timeout", "died"]
    if not last:
        status = "timeout" if silent else "died"
    elif last.get("done"):
        status = "done"
    else:
        status = "raised"
    return ChildOutcome(
        status=status,
        events=tuple(heard.events),
        error=last.get("error", ""),
        kind=last.get("kind", ""),
        trace=last.get("trace", ""),
        exit_status=process.returncode,
        log=text,
        seconds=time.monotonic() - started,
    )


@contextlib.contextmanager
def _child_process(
    log: IO[bytes], environment: Mapping[str, str] | None
) -> Iterator[tuple[subprocess.Popen[bytes], int]]:
    """Start the child; on every way out it is gone and the pipes are closed."""
    reading, writing = os.pipe()
    process: subprocess.Popen[bytes] | None = None
    try:
        try:
            process = subprocess.Popen(
                [sys.executable, "-m", _MODULE, str(writing)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                pass_fds=(writing,),
                start_new_session=True,
                env={**os.environ, "PYTHONUNBUFFERED": "1", **(environment or {})},
            )
        finally:
            os.close(writing)
        yield process, reading
    finally:
        os.close(reading)
        if process is not None:
            _end(process)


def _ask_where_it_hangs(process: subprocess.Popen[bytes]) -> None:
    """Let the child write its Python stack to its log. It must be past its first lines."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(process.pid, _WHERE)
    time.sleep(_STACK_S)


def _end(process: subprocess.Popen[bytes]) -> None:
    if process.poll() is None:
        with contextlib.suppress(ProcessLookupError):
            # the process leads its own session: this reaches the compilers it may have started
            os.killpg(process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(timeout=_KILL_S)
    if process.stdin is not None:
        with contextlib.suppress(BrokenPipeError):
            process.stdin.close()


def _send_work(process: subprocess.Popen[bytes], task: str, work: Mapping[str, Any]) -> None:
    line = json.dumps({"task": task, "work": work, "path": sys.path}) + "\n"
    assert process.stdin is not None
    with contextlib.suppress(BrokenPipeError):  # it died at once; listening will show that
        process.stdin.write(line.encode())
        process.stdin.flush()


def _listen(
    process: subprocess.Popen[bytes],
    pipe: int,
    heard: _Heard,
    silence_s: float,
    on_event: Callable[[Mapping[str, Any]], None] | None,
    cancelled: threading.Event | None,
) -> bool:
    """Read events until the child closes the pipe; return True when it fell silent instead."""
    deadline = time.monotonic() + silence_s
    with selectors.DefaultSelector() as selector:
        selector.register(pipe, selectors.EVENT_READ)
        while heard.last is None:
            left = max(0.0, deadline - time.monotonic())
            patience = left if cancelled is None else min(left, _LOOK_S)
            if not selector.select(timeout=patience):
                if cancelled is not None and cancelled.is_set():
                    raise CancelledError
                if left > patience:
                    continue
                return True
            chunk = os.read(pipe, 1 << 16)
            if not chunk:
                return False
            *lines, heard.rest = (heard.rest + chunk).split(b"\n")
            for line in lines:
                message = json.loads(line)
                if "event" not in message:
                    heard.last = message
                    break
                heard.events.append(message["event"])
                if on_event is not None:
                    on_event(message["event"])
            if lines:
                deadline = time.monotonic() + silence_s
    return False


def _main(channel: int) -> None:
    """Be the child: read the work, run it, send its events and its end."""
    line = b""
    while not line.endswith(b"\n"):
        byte = os.read(0, 1)
        if not byte:
            os._exit(_ORPHANED)
        line += byte
    message = json.loads(line)
    faulthandler.enable()
    faulthandler.register(_WHERE)
    threading.Thread(target=_watch_parent, daemon=True).start()
    sys.path.extend(entry for entry in message["path"] if entry not in sys.path)
    os.set_inheritable(channel, False)
    perform(channel, message["task"], message["work"])


def perform(channel: int, task: str, work: Mapping[str, Any]) -> NoReturn:
    """Run a task, send its events and its end as lines of JSON, and end this process.

    Parameters
    ----------
    channel : int
        File descriptor to write to.
    task : str
        ``module:function``, which takes the work and a function that sends an event.
    work : mapping
        JSON values.
    """
    module, _, function = task.partition(":")

    def send(value: Mapping[str, Any]) -> None:
        data = (json.dumps(value) + "\n").encode()
        while data:
            data = data[os.write(channel, data) :]

    try:
        run = getattr(importlib.import_module(module), function)
        run(work, lambda event: send({"event": event}))
        end: dict[str, Any] = {"done": True}
    except BaseException as error:
        end = {
            "error": f"{type(error).__name__}: {error}",
            "kind": type(error).__name__,
            "trace": traceback.format_exc(),
        }
    send(end)
    sys.stdout.flush()
    sys.stderr.flush()
    # a lost context makes the libraries' own clean-up at exit abort or hang; nothing is left to
    # clean
    os._exit(0)


def _watch_parent() -> None:
    """End this process when the parent's end of standard input closes."""
    # read on the descriptor: a lock of sys.stdin held at exit would be fatal
    while os.read(0, 4096):
        pass
    os._exit(_ORPHANED)


if __name__ == "__main__":
    _main(int(sys.argv[1]))
