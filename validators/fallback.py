"""See what can be seen without CUPTI: torch's own hooks, armed inside a phase and taken off after.

What is lost is in `LOST`: the report says it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any

from cuverify.validators.observations import CallSeen
from cuverify.validators.places import place_in, short_path

LOST = (
    "waits, allocations and copies of CuPy and of other libraries, launches on foreign streams, "
    "module loads and pinned allocations are not seen, and torch's only by its own hooks"
)

# torch's private trace: registry -> kind and the call that it stands for
_TRACED = {
    "DeviceSynchronizationCallbacks": ("sync", "cudaDeviceSynchronize"),
    "StreamSynchronizationCallbacks": ("sync", "cudaStreamSynchronize"),
    "EventSynchronizationCallbacks": ("sync", "cudaEventSynchronize"),
}
# operations of torch that read a value back or make memory whose size is data
_READS = {
    "aten::_local_scalar_dense",
    "aten::nonzero",
    "aten::is_nonzero",
    "aten::equal",
    "aten::masked_select",
}
_SYNC_WARNING = "called a synchronizing"


class FallbackObserver:
    """Records what torch itself tells: a stand-in for `CuptiObserver` with the same methods.

    Parameters
    ----------
    reason : str
        Why CUPTI does not observe.
    torch : module
    """

    def __init__(self, reason: str, torch: Any) -> None:
        self.name = f"torch's own hooks, without CUPTI: {reason}"
        self.calls: list[CallSeen] = []
        self.dropped = 0
        self.trouble: str | None = None
        self._torch = torch
        self._main = threading.get_ident()

    @contextlib.contextmanager
    def phase(self, name: str, kinds: frozenset[str] | None = None) -> Iterator[None]:
        """Record while the context is open; every hook is off again afterwards."""
        if kinds is not None and "sync" not in kinds:
            yield
            return
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._sync_warnings(name))
            stack.enter_context(self._trace(name))
            stack.enter_context(self._operations(name))
            yield

    def close(self) -> None:
        """Nothing is held between phases."""

    def note(self, kind: str, api: str, phase: str, where: str | None) -> None:
        """Keep one call, unless the same one was seen by another hook right before."""
        thread = "main" if threading.get_ident() == self._main else "other"
        seen = CallSeen(api, kind, phase, thread=thread, where=where)
        last = self.calls[-1] if self.calls else None
        if last is None or (last.kind, last.where, last.phase) != (kind, where, phase):
            self.calls.append(seen)

    @contextlib.contextmanager
    def _sync_warnings(self, phase: str) -> Iterator[None]:
        """Arm torch's sync-debug mode as a warning: as an error it would hide what follows."""
        cuda = self._torch.cuda
        before = cuda.get_sync_debug_mode()
        show = warnings.showwarning

        def showed(message: Any, category: Any, file: str, line: int, *more: Any) -> None:
            if _SYNC_WARNING in str(message):
                where = place_in(sys._getframe(1)) or f"{short_path(file)}:{line}"
                self.note("sync", "a synchronising operation of torch", phase, where)
            else:
                show(message, category, file, line, *more)

        with warnings.catch_warnings():
            warnings.filterwarnings("always", message=f".*{_SYNC_WARNING}.*")
            warnings.showwarning = showed  # type: ignore[assignment]  # put back by the context
            cuda.set_sync_debug_mode("warn")
            try:
                yield
            finally:
                cuda.set_sync_debug_mode(before)

    @contextlib.contextmanager
    def _trace(self, phase: str) -> Iterator[None]:
        try:
            import torch.cuda._gpu_trace as trace
        except ImportError:
            yield
            return
        added: list[tuple[Any, Callable[..., None]]] = []
        for registry, (kind, api) in _TRACED.items():
            found = getattr(trace, registry, None)
            if found is None or not hasattr(found, "callback_list"):
                continue

            def fired(*_: Any, kind: str = kind, api: str = api) -> None:
                self.note(kind, api, phase, place_in(sys._getframe(1)))

            found.callback_list.append(fired)
            added.append((found, fired))
        activate = getattr(self._torch._C, "_activate_gpu_trace", None)
        if activate is not None:
            activate()
        try:
            yield
        finally:
            for registry, callback in added:
                with contextlib.suppress(ValueError):
                    registry.callback_list.remove(callback)

    @contextlib.contextmanager
    def _operations(self, phase: str) -> Iterator[None]:
        from torch.utils._python_dispatch import TorchDispatchMode

        note = self.note

        class Mode(TorchDispatchMode):  # type: ignore[no-untyped-call]
            def __torch_dispatch__(
                self, func: Any, types: Any, args: Any = (), kwargs: Any = None
            ) -> Any:
                name = str(getattr(func, "_schema", func)).partition("(")[0].partition(".")[0]
                if name in _READS and any(getattr(each, "is_cuda", False) for each in args):
                    note("sync", name, phase, place_in(sys._getframe(1)))
                return func(*args, **(kwargs or {}))

        with Mode():  # type: ignore[no-untyped-call]
            yield
