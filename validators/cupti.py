"""See the CUDA calls of every library through CUPTI's callbacks.

cupti-python is an optional extra. A process has one subscriber: beside a profiler, and after
torch.profiler, the subscription is refused, and `open_observer` gives the reason.
"""

from __future__ import annotations

import bisect
import ctypes
import struct
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from cuverify.validators.api_calls import CALLS, Call, base_name
from cuverify.validators.observations import CallSeen, WideArgumentSeen, is_main
from cuverify.validators.places import modules_in, place_in

# offsets in the structure that a callback gets
_ARGUMENTS, _RESULT = 16, 24
_RUNTIME_FIRST = ("RUNTIME_API", "DRIVER_API")
# of the function and of the list of its arguments, in a launch's arguments
_CELLS = {"cuLaunchKernel": (0, 48), "cuLaunchKernelEx": (8, 16)}
_WRITTEN = 8  # characters of a number that a person wrote
_MOST = 20_000  # calls that are kept
_FRAMES = 24  # native frames that are looked at for the library that called
_CHEAP = frozenset({"launch", "record", "wait", "memset"})  # many, and of known origin
# between the caller and this module: not who called, by the beginning of the file's name
_BELOW = (
    *("libcupti", "libcuda.so", "libcudart", "cupti.", "cycupti.", "callback_wrappers."),
    *("libpython", "python", "libc.so", "libc-", "_ctypes", "libffi", "ld-linux"),
)


class CuptiObserver:
    """Records the calls of the phases that are opened on it.

    Parameters
    ----------
    cupti : module
        `cupti.cupti`.

    Notes
    -----
    Only the calls of `CALLS` are subscribed to, and only while a phase is open. Each costs some
    tens of microseconds, on the thread that makes it.
    """

    name = "CUPTI"

    def __init__(self, cupti: Any) -> None:
        self._cupti = cupti
        self.calls: list[CallSeen] = []
        self.dropped = 0
        self.trouble: str | None = None
        self.functions: set[int] = set()  # launched through the driver
        self.widths: dict[int, list[int]] = {}  # of their parameters, where somebody found out
        self.wide: list[WideArgumentSeen] = []
        self._phase = ""
        self._main = threading.get_ident()
        # by thread: calls inside others, the outermost as it was recorded
        self._open: dict[int, list[CallSeen | None]] = {}
        self._known: dict[tuple[int, int], tuple[str, Call]] = {}
        self._maps: list[tuple[int, int, str]] = []
        for domain in _RUNTIME_FIRST:
            number = int(getattr(cupti.CallbackDomain, domain))
            ids = getattr(cupti, f"{domain.partition('_')[0].lower()}_api_trace_cbid")
            for member in ids:
                base = base_name(member.name)
                if base in CALLS:
                    self._known[number, int(member)] = (base, CALLS[base])
        self._subscriber = cupti.subscribe(self._called, None)

    @contextmanager
    def phase(self, name: str, kinds: frozenset[str] | None = None) -> Iterator[None]:
        """Record what is called while the context is open, of some kinds or of all."""
        self._main = threading.get_ident()
        self._open.clear()
        self._phase = name
        wanted = [at for at, (_, call) in self._known.items() if not kinds or call.kind in kinds]
        self._enable(1, wanted)
        try:
            yield
        finally:
            self._enable(0, wanted)
            self._phase = ""

    def close(self) -> None:
        """Give the subscription back."""
        if self._subscriber is not None:
            self._cupti.unsubscribe(self._subscriber)
            self._subscriber = None

    def _enable(self, on: int, calls: list[tuple[int, int]]) -> None:
        for domain, identity in calls:
            self._cupti.enable_callback(on, self._subscriber, domain, identity)

    def _called(self, _: Any, domain: int, identity: int, data: Any) -> None:
        """Be CUPTI's callback: it must not raise, and is called by any thread."""
        try:
            known = self._known.get((int(domain), int(identity)))
            if known is None or not self._phase:
                return
            thread = threading.get_ident()
            inside = self._open.setdefault(thread, [])
            if int(data.callback_site) == 0:
                # the driver's call inside the runtime's is the same event
                inside.append(None if inside else self._enter(known, data, thread))
            elif inside:
                entered = inside.pop()
                if entered is not None:
                    self._leave(entered, known[1], data)
        except Exception as error:
            self.trouble = f"{type(error).__name__}: {error}"

    def _enter(self, known: tuple[str, Call], data: Any, thread: int) -> CallSeen | None:
        if len(self.calls) >= _MOST:
            self.dropped += 1
            return None
        api, call = known
        arguments = _word(int(data.ptr) + _ARGUMENTS)
        frame = _caller()
        whose, where = "main", place_in(frame)
        if thread != self._main:
            whose, where = self._other_thread(frame, where)
        values = {
            "stream": _stream(arguments, call),
            "size": _at(arguments, call.size),
            "source": _at(arguments, call.source),
            "address": 0 if call.returned else _at(arguments, call.address),
        }
        if api == "cudaSetDevice" and arguments:
            values["address"] = ctypes.c_int.from_address(arguments).value
        pointers: tuple[int, ...] = ()
        if api in _CELLS:
            pointers = self._arguments(api, arguments, str(data.symbol_name), where)
        entered = CallSeen(
            api,
            call.kind,
            self._phase,
            thread=whose,
            where=where,
            origin="" if call.kind in _CHEAP else self._origin(),
            kernel=str(data.symbol_name) if call.kind == "launch" else None,
            pointers=pointers,
            **values,  # type: ignore[arg-type]
        )
        self.calls.append(entered)
        return entered

    def _arguments(
        self, api: str, arguments: int, kernel: str, where: str | None
    ) -> tuple[int, ...]:
        """Return the arguments of 8 bytes; note those of 8 bytes where the kernel takes 4."""
        at_function, at_cells = _CELLS[api]
        function = _word(arguments + at_function)
        self.functions.add(function)
        cells = _word(arguments + at_cells)
        found = []
        for index, width in enumerate(self.widths.get(function, ()) if cells else ()):
            place = _word(cells + 8 * index)
            found.append(_word(place) if width == 8 and place else 0)
            if width == 4 and is_main(self._phase):
                wide = double_for_float(ctypes.string_at(place, 8))
                if wide is not None:
                    self.wide.append(WideArgumentSeen(kernel, index, width, *wide, where))
        return tuple(found)

    def _leave(self, entered: CallSeen, call: Call, data: Any) -> None:
        place = _word(int(data.ptr) + _RESULT)
        code = ctypes.c_int.from_address(place).value if place else 0
        if not code and not call.returned:
            return
        address = entered.address
        if call.returned and not code:
            arguments = _word(int(data.ptr) + _ARGUMENTS)
            address = _at(_at(arguments, call.address), 0)
        left = replace(entered, address=address, error=f"error {code}" if code else "")
        # others may have been recorded since: by another thread, in the same call
        for index in range(len(self.calls) - 1, -1, -1):
            if self.calls[index] is entered:
                self.calls[index] = left
                return

    def _other_thread(self, frame: Any, where: str | None) -> tuple[str, str | None]:
        """Return whose call another thread's is; the autograd engine has no frame of its own."""
        main = sys._current_frames().get(self._main)
        if "torch.autograd.graph" in modules_in(main) or "torch.autograd" in modules_in(main):
            return "autograd", where or place_in(main)
        return "other", where

    def _origin(self) -> str:
        """Return the library whose code made the call, by the native stack."""
        buffer = (ctypes.c_void_p * _FRAMES)()
        count = _libc().backtrace(buffer, _FRAMES)
        for address in buffer[:count]:
            file = Path(self._library(address or 0))
            if file.name and not file.name.startswith(_BELOW):
                return "cupy" if "cupy" in str(file.parent) else file.name
        return ""

    def _library(self, address: int) -> str:
        for attempt in range(2):
            at = bisect.bisect(self._maps, (address, 1 << 64, "")) - 1
            if at >= 0 and address < self._maps[at][1]:
                return self._maps[at][2]
            if attempt == 0:
                self._maps = sorted(code_ranges())
        return ""


def open_observer() -> tuple[CuptiObserver | None, str]:
    """Return an observer, or None and the reason.

    Returns
    -------
    (CuptiObserver or None, str)
        ``close`` gives the subscription back.
    """
    try:
        from cupti import cupti
    except ImportError as error:
        return None, f"cupti-python is not installed ({error})"
    except Exception as error:  # a library of CUDA that does not fit
        return None, f"cupti-python does not load: {error}"
    try:
        return CuptiObserver(cupti), ""
    except Exception as error:
        return None, f"CUPTI refused the subscription: {error}"


def double_for_float(data: bytes) -> tuple[float, float] | None:
    """Return (given, read) when 8 bytes behind a 4-byte argument are a Python float.

    What follows a float of 4 bytes in memory may be anything: only a number that a person would
    write, and that reads as another one, counts.
    """
    given = struct.unpack("<d", data)[0]
    reads = struct.unpack("<f", data[:4])[0]
    written = given == given and 1e-6 < abs(given) < 1e9 and len(repr(given)) <= _WRITTEN
    return (given, reads) if written and given != reads else None


def code_ranges() -> list[tuple[int, int, str]]:
    """Return (first, end, file) of this process's mapped code."""
    ranges = []
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            for line in maps:
                parts = line.split(maxsplit=5)
                if len(parts) == 6 and "x" in parts[1] and parts[5].startswith("/"):
                    low, _, high = parts[0].partition("-")
                    ranges.append((int(low, 16), int(high, 16), parts[5].strip()))
    except OSError:
        return []
    return ranges


def _caller() -> Any:
    """Return the Python frame that made the call; a thread of a library's own has none."""
    try:
        return sys._getframe(3)
    except ValueError:
        return None


def _libc() -> Any:
    return ctypes.CDLL(None)


def _word(address: int) -> int:
    return ctypes.c_uint64.from_address(address).value


def _at(base: int, offset: int | None) -> int:
    return _word(base + offset) if base and offset is not None else 0


def _stream(arguments: int, call: Call) -> int | None:
    if call.stream is None or not arguments:
        return None
    base = _word(arguments) if call.through else arguments
    return _word(base + call.stream) if base else None
