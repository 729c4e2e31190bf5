"""Graphs of a contract run: CUDA's, or their likeness for the host lane, behind one interface."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Protocol

from cuverify.sglang.seen import FrozenSeen
from cuverify.validators.host_graph import Call, HostGraph


class Graph(Protocol):
    """A captured step."""

    def replay(self) -> None:
        """Run it, and wait for its end."""

    def trace(self) -> Sequence[Call] | str:
        """Return its calls in order, or why they are not known."""


class Graphs(Protocol):
    """Captures steps of one run."""

    name: str
    device: str

    def capture(
        self,
        step: Callable[[], None],
        *,
        warmups: int,
        warmed: Callable[[], None] | None = None,
        scratch: bool = False,
    ) -> Graph:
        """Warm up, calling `warmed` after each run, and capture. A scratch graph shares nothing."""

    def synchronize(self) -> None:
        """Wait for the device."""


class HostGraphs:
    """Likenesses of CUDA graphs, see `cuverify.validators.host_graph`."""

    name = "likenesses of CUDA graphs"
    device = "cpu"

    def capture(
        self,
        step: Callable[[], None],
        *,
        warmups: int,
        warmed: Callable[[], None] | None = None,
        scratch: bool = False,
    ) -> Graph:
        """Warm up and capture."""
        for _ in range(warmups):
            step()
            if warmed is not None:
                warmed()
        graph = HostGraph()
        with graph.capture():
            step()
        return _Host(graph)

    def synchronize(self) -> None:
        """Do nothing: the host lane has done its work when it returns."""


class _Host:
    def __init__(self, graph: HostGraph) -> None:
        self._graph = graph

    def replay(self) -> None:
        self._graph.replay()

    def trace(self) -> Sequence[Call]:
        return self._graph.calls


class CudaGraphs:
    """CUDA graphs on one stream that share one pool, as SGLang's runner captures them."""

    name = "CUDA graphs"
    device = "cuda"

    def __init__(self) -> None:
        import torch

        self._torch: Any = torch
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = self._torch.cuda.Stream()

    def capture(
        self,
        step: Callable[[], None],
        *,
        warmups: int,
        warmed: Callable[[], None] | None = None,
        scratch: bool = False,
    ) -> Graph:
        """Warm up and capture on the run's stream."""
        torch = self._torch
        before = torch.cuda.current_stream()
        try:
            self._stream.wait_stream(before)
            with torch.cuda.stream(self._stream):
                for _ in range(warmups):
                    step()
                    torch.cuda.synchronize()
                    if warmed is not None:
                        warmed()
            graph = torch.cuda.CUDAGraph(keep_graph=True)
            pool = {} if scratch else {"pool": self._pool}
            gc.collect()
            enabled = gc.isenabled()
            gc.disable()
            try:
                with torch.cuda.graph(graph, stream=self._stream, **pool):
                    step()
            finally:
                if enabled:
                    gc.enable()
            graph.instantiate()
            torch.cuda.synchronize()
        finally:
            # a capture that fails at its end leaves its stream current
            torch.cuda.set_stream(before)
        return _Cuda(graph, torch)

    def synchronize(self) -> None:
        """Wait for the device."""
        self._torch.cuda.synchronize()


class _Cuda:
    def __init__(self, graph: Any, torch: Any) -> None:
        self._graph, self._torch = graph, torch

    def replay(self) -> None:
        self._graph.replay()
        self._torch.cuda.synchronize()

    def trace(self) -> Sequence[Call] | str:
        from cuverify.validators.graph_walk import walk

        seen = walk(self._graph.raw_cuda_graph())
        if seen.not_inspected is not None:
            return seen.not_inspected
        return [Call(node.kernel or node.kind, tuple(node.grid), ()) for node in seen.nodes]


def frozen_between(captured: int, one: Sequence[Call], other: Sequence[Call]) -> list[FrozenSeen]:
    """Return what differs between two captures of one step on different batches.

    Parameters
    ----------
    captured : int
        The batch size, for the records.
    one, other : sequence of Call

    Returns
    -------
    list of FrozenSeen
        One for each kernel and kind of difference.
    """
    if [call.name for call in one] != [call.name for call in other]:
        counts = Counter(call.name for call in one), Counter(call.name for call in other)
        return [
            FrozenSeen(captured, name, "calls", (str(counts[0][name]), str(counts[1][name])))
            for name in sorted({*counts[0], *counts[1]})
            if counts[0][name] != counts[1][name]
        ] or [FrozenSeen(captured, "the step", "calls", ("one order", "another order"))]
    found: dict[tuple[str, str], FrozenSeen] = {}
    for a, b in zip(one, other, strict=True):
        for what, left, right in (("grid", a.grid, b.grid), ("number", a.numbers, b.numbers)):
            if left != right:
                shown = (str(left), str(right)) if what == "grid" else _first(left, right)
                found.setdefault((a.name, what), FrozenSeen(captured, a.name, what, shown))
    return list(found.values())


def _first(left: Sequence[Any], right: Sequence[Any]) -> tuple[str, str]:
    pairs = [(a, b) for a, b in zip(left, right, strict=False) if a != b]
    return (str(pairs[0][0]), str(pairs[0][1])) if pairs else (str(left), str(right))
