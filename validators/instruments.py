"""What the protocol looks with: CUPTI, the graph walk, torch's allocator, CuPy's hook.

Each instrument may be missing: then `gaps` says what is not inspected, and why.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from cuverify.validators.fallback import LOST, FallbackObserver
from cuverify.validators.graph_walk import walk
from cuverify.validators.observations import (
    CallSeen,
    GraphSeen,
    PoolHitSeen,
    TensorSeen,
    WideArgumentSeen,
)
from cuverify.validators.places import place_in
from cuverify.validators.provenance import Landscape, asks_driver, host_ranges

_PIN = "torch.empty(pin_memory=True)"


class NoInstruments:
    """None of them: only what runs and replays show. Also the form of the others."""

    observer_name = "nothing: no instruments"
    on_device = False  # device memory can be allocated, filled and read
    gaps: Sequence[tuple[str, str]] = (
        ("CUDA calls", "no instruments"),
        ("memory", "no instruments"),
    )

    @property
    def calls(self) -> list[CallSeen]:
        """The calls seen so far."""
        return []

    @property
    def trouble(self) -> str | None:
        """What went wrong in an observer."""
        return None

    @property
    def wide_arguments(self) -> tuple[WideArgumentSeen, ...]:
        """Python floats that were passed for parameters of 4 bytes."""
        return ()

    @contextlib.contextmanager
    def phase(self, name: str, kinds: frozenset[str] | None = None) -> Iterator[None]:
        """Observe while the context is open: calls of some kinds, or all of interest."""
        yield

    @contextlib.contextmanager
    def pool_hits(self) -> Iterator[list[PoolHitSeen]]:
        """Collect what CuPy's pool gives out while the context is open."""
        yield []

    def landscape(self, tensors: Sequence[TensorSeen], chunks: Any = ()) -> Landscape | None:
        """Return what lies where now."""
        return None

    def walk(self, raw_graph: Any, landscape: Landscape | None) -> GraphSeen:
        """Return the nodes of a graph."""
        return walk(raw_graph)

    def memory(self) -> tuple[int, int, int] | None:
        """Return torch's allocated and reserved bytes and the device's used ones."""
        return None

    def fill(self, address: int, size: int, byte: int) -> bool:
        """Set device memory; False where that is not possible."""
        return False

    def read(self, address: int, size: int) -> bytes | None:
        """Return device memory."""
        return None

    def private_bytes(self) -> dict[tuple[int, int], int]:
        """Return reserved bytes by private pool."""
        return {}

    def close(self) -> None:
        """Give everything back."""


class Instruments(NoInstruments):
    """All that are there.

    Parameters
    ----------
    torch : module
    """

    on_device = True

    def __init__(self, torch: Any) -> None:
        from cuverify.validators.cupti import open_observer

        self._torch = torch
        self._observer: Any
        gaps: list[tuple[str, str]] = []
        self._observer, reason = open_observer()
        if self._observer is None:
            self._observer = FallbackObserver(reason, torch)
            gaps.append(("CUDA calls of other libraries", f"{reason}; {LOST}"))
        self.observer_name = self._observer.name
        try:
            from cuda.bindings import driver
        except Exception as error:
            self._driver = None
            gaps.append(("pointers and memory", f"cuda-bindings does not load: {error}"))
        else:
            self._driver = driver
        self.gaps = gaps

    @property
    def calls(self) -> list[CallSeen]:
        """The calls seen so far."""
        return list(self._observer.calls)

    @property
    def trouble(self) -> str | None:
        """What went wrong in an observer."""
        if self._observer.dropped:
            return f"{self._observer.dropped} calls were too many to keep"
        return self._observer.trouble  # type: ignore[no-any-return]

    @contextlib.contextmanager
    def phase(self, name: str, kinds: frozenset[str] | None = None) -> Iterator[None]:
        """Observe while the context is open: calls of some kinds, or all of interest."""
        calls = self._observer.calls
        first = len(calls)
        before = Landscape(self._torch.cuda.memory_snapshot())
        pinned = self._pinned_requests()
        try:
            with self._observer.phase(name, kinds):
                yield
        finally:
            self._learn_widths()
            served = self._pinned_requests() - pinned
            if (
                served > 0
                and not kinds
                and not any(call.kind == "host_alloc" for call in calls[first:])
            ):
                # out of torch's cache of pinned blocks, so without a call
                detail = f"{served} block(s) out of torch's cache"
                calls.append(CallSeen(_PIN, "host_alloc", name, detail=detail))
            # torch's own allocations are legal inside a capture: tell them by their segments
            if any(call.kind in ("alloc", "free") for call in calls[first:]):
                after = Landscape(self._torch.cuda.memory_snapshot())
                for at in range(first, len(calls)):
                    address = calls[at].address
                    if calls[at].kind in ("alloc", "free") and address:
                        owned = before.is_torch(address) or after.is_torch(address)
                        calls[at] = replace(calls[at], torch_owned=owned)

    @property
    def wide_arguments(self) -> tuple[WideArgumentSeen, ...]:
        """Python floats that were passed for parameters of 4 bytes, each once."""
        return tuple(dict.fromkeys(getattr(self._observer, "wide", ())))

    def _pinned_requests(self) -> int:
        """Return how many pinned blocks torch has given out since the process began."""
        try:
            stats = self._torch.cuda.memory.host_memory_stats()
        except Exception:  # older than 2.7
            return 0
        return int(stats.get("active_requests.allocated", 0))

    def _learn_widths(self) -> None:
        """Ask the driver for the parameters of the functions that were launched."""
        widths = getattr(self._observer, "widths", None)
        if widths is None or self._driver is None:
            return
        for function in self._observer.functions - set(widths):
            found: list[int] = []
            with contextlib.suppress(Exception):  # a handle of another kind
                while True:
                    code, *layout = self._driver.cuFuncGetParamInfo(
                        self._driver.CUfunction(init_value=function), len(found)
                    )
                    if int(code) != 0:
                        break
                    found.append(int(layout[1]))
            widths[function] = found

    @contextlib.contextmanager
    def pool_hits(self) -> Iterator[list[PoolHitSeen]]:
        """Collect what CuPy's pool gives out while the context is open."""
        cupy = sys.modules.get("cupy")
        found: list[PoolHitSeen] = []
        if cupy is None:
            yield found
            return
        fresh: set[int] = set()
        live: dict[int, int] = {}  # address -> place in `found`

        class Hook(cupy.cuda.MemoryHook):  # type: ignore[misc, name-defined]
            name = "cuverify"

            def alloc_postprocess(self, **told: Any) -> None:
                fresh.add(int(told["mem_ptr"]))

            def malloc_postprocess(self, **told: Any) -> None:
                address = int(told["mem_ptr"])
                live[address] = len(found)
                where = place_in(sys._getframe(1))
                found.append(
                    PoolHitSeen(address, int(told["mem_size"]), address in fresh, False, where)
                )

            def free_preprocess(self, **told: Any) -> None:
                at = live.pop(int(told["mem_ptr"]), None)
                if at is not None:
                    seen = found[at]
                    found[at] = PoolHitSeen(seen.address, seen.size, seen.fresh, True, seen.where)

        with Hook():
            yield found

    def landscape(self, tensors: Sequence[TensorSeen], chunks: Any = ()) -> Landscape | None:
        """Return what lies where now."""
        if self._driver is None:
            return None
        return Landscape(
            self._torch.cuda.memory_snapshot(),
            tensors,
            tuple(chunks),
            asks_driver(self._driver),
            host_ranges(),
        )

    def walk(self, raw_graph: Any, landscape: Landscape | None) -> GraphSeen:
        """Return the nodes of a graph."""
        return walk(raw_graph, self._driver, landscape)

    def memory(self) -> tuple[int, int, int] | None:
        """Return torch's allocated and reserved bytes and the device's used ones."""
        cuda = self._torch.cuda
        free, total = cuda.mem_get_info()
        return cuda.memory_allocated(), cuda.memory_reserved(), total - free

    def fill(self, address: int, size: int, byte: int) -> bool:
        """Set device memory and wait for it; False where that is not possible."""
        if self._driver is None or not size:
            return False
        code = self._driver.cuMemsetD8(address, byte, size)[0]
        self._torch.cuda.synchronize()
        return int(code) == 0

    def read(self, address: int, size: int) -> bytes | None:
        """Return device memory."""
        if self._driver is None:
            return None
        data = bytearray(size)
        code = self._driver.cuMemcpyDtoH(data, address, size)[0]
        return bytes(data) if int(code) == 0 else None

    def private_bytes(self) -> dict[tuple[int, int], int]:
        """Return reserved bytes by private pool."""
        found: dict[tuple[int, int], int] = {}
        for segment in self._torch.cuda.memory_snapshot():
            pool = tuple(segment.get("segment_pool_id", (0, 0)))
            if pool != (0, 0):
                found[pool] = found.get(pool, 0) + int(segment["total_size"])
        return found

    def close(self) -> None:
        """Give everything back."""
        self._observer.close()


@contextlib.contextmanager
def no_garbage_collection(*, collect: bool = True) -> Iterator[list[str]]:
    """Collect now and not inside: freeing device memory would invalidate a capture.

    Parameters
    ----------
    collect : bool
        False where there was a collection shortly before.

    Yields
    ------
    list of str
        Where garbage is collected inside all the same.
    """
    if collect:
        gc.collect()
    was_enabled = gc.isenabled()
    seen: list[str] = []

    def collected(moment: str, info: Any) -> None:
        if moment == "start":
            seen.append(place_in(sys._getframe(1)) or "")

    gc.callbacks.append(collected)
    gc.disable()
    try:
        yield seen
    finally:
        gc.callbacks.remove(collected)
        if was_enabled:
            gc.enable()
