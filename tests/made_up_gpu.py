"""A made-up GPU for tests of the capture protocol: `torch.cuda` as far as the protocol asks it."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from cuverify.validators import protocol, trials


class Stream:
    def __init__(self, gpu: Gpu, handle: int, blocking: bool = False) -> None:
        self.gpu = gpu
        self.cuda_stream = handle
        self.blocking = blocking

    def wait_stream(self, other: Stream) -> None:
        """Fork into the capture of the other stream, as an event between the two would."""
        if other.cuda_stream in self.gpu.capturing:
            self.gpu.capturing.add(self.cuda_stream)


class Graph:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.work: list[tuple[str, Callable[[], None]]] = []

    def instantiate(self) -> None:
        pass

    def capture_begin(self, pool: tuple[int, int], capture_error_mode: str) -> None:
        gpu = self.gpu
        gpu.recording, gpu.capturing = self, {gpu.current.cuda_stream}
        gpu.invalid, gpu.blocking = False, gpu.current.blocking

    def capture_end(self) -> None:
        gpu = self.gpu
        gpu.recording, gpu.capturing, gpu.blocking = None, set(), False
        if gpu.invalid:
            raise RuntimeError("operation failed due to a previous error during capture")
        if not self.work:
            warnings.warn("The CUDA Graph is empty.", stacklevel=2)

    def raw_cuda_graph(self) -> Graph:
        return self

    def replay(self) -> None:
        for _, run in self.work:
            run()

    def reset(self) -> None:
        self.work = []


class Gpu:
    """Stands in for `torch.cuda`: work on a capturing stream is recorded, all other runs at once.

    That is what was measured on a GPU: a launch on the null stream inside a capture of a
    non-blocking stream runs, and raises nothing.
    """

    def __init__(self) -> None:
        self.handles = iter(range(0x10, 0x1000, 0x10))
        self.null = Stream(self, 0)
        self.current = self.null
        self.capturing: set[int] = set()
        self.recording: Graph | None = None
        self.invalid = False
        self.blocking = False
        self.lost = False
        self.records: list[SimpleNamespace] = []

    def launch(self, kernel: str, run: Callable[[], None]) -> None:
        stream = self.current.cuda_stream
        self.records.append(
            SimpleNamespace(
                kernel=kernel,
                stream=stream,
                grid=(1, 1, 1),
                block=(64, 1, 1),
                shared=0,
                lane="device",
                arguments={},
                numbers=(),
            )
        )
        if not stream and self.blocking:
            self.invalid = True
            raise RuntimeError("would make the legacy stream depend on a capturing blocking stream")
        if stream in self.capturing and self.recording is not None:
            self.recording.work.append((kernel, run))
        else:
            run()

    # what the protocol asks of torch.cuda

    def is_available(self) -> bool:
        return True

    def current_stream(self) -> Stream:
        return self.current

    def set_stream(self, stream: Stream) -> None:
        self.current = stream

    def Stream(self) -> Stream:  # noqa: N802
        return Stream(self, next(self.handles))

    def ExternalStream(self, handle: int) -> Stream:  # noqa: N802
        return Stream(self, handle)

    def Blocking(self) -> Stream:  # noqa: N802
        return Stream(self, next(self.handles), blocking=True)

    def current_device(self) -> int:
        return 0

    def graph_pool_handle(self) -> tuple[int, int]:
        return (0, 7)

    def CUDAGraph(self, keep_graph: bool) -> Graph:  # noqa: N802
        assert keep_graph
        return Graph(self)

    @contextlib.contextmanager
    def stream(self, stream: Stream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def is_current_stream_capturing(self) -> bool:
        assert self.current.cuda_stream, "asking the legacy stream can invalidate a capture"
        return self.current.cuda_stream in self.capturing

    def synchronize(self) -> None:
        if self.lost:
            raise RuntimeError("CUDA error: an illegal memory access was encountered\nAdvice.")
        if self.capturing:
            self.invalid = True
            raise RuntimeError("operation not permitted when stream is capturing")


class MadeUpTorch:
    """torch itself, with a made-up `cuda`."""

    def __init__(self, gpu: Gpu) -> None:
        self.cuda = gpu

    def __getattr__(self, name: str) -> Any:
        import torch

        return getattr(torch, name)


def plug_in(gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the protocol find the made-up GPU, and its launches."""

    @contextlib.contextmanager
    def record_launches() -> Iterator[list[Any]]:
        gpu.records = []
        yield gpu.records

    monkeypatch.setattr(protocol, "_torch", lambda: MadeUpTorch(gpu))
    monkeypatch.setattr(trials, "_torch", lambda: MadeUpTorch(gpu))
    monkeypatch.setattr(protocol, "blocking_stream", gpu.Blocking)
    monkeypatch.setattr("cuverify.launches.record_launches", record_launches)
