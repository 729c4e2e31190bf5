"""What one capture run showed, as plain records. Rules judge these and nothing else.

The records hold no tensor and no handle that must stay alive, so a run in a child process can send
them, and a judgement can be tested without a GPU.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from cuverify.validators.compare import Mismatch

LEGACY_STREAMS = frozenset({0, 1})  # the null handle and cudaStreamLegacy
_STREAM_NAMES = {
    0: "the legacy default stream",
    1: "the legacy default stream",
    2: "the per-thread default stream",
}


@dataclass(frozen=True)
class LaunchSeen:
    """A launch that the package's own launcher recorded during the capture.

    Parameters
    ----------
    kernel : str
        The kernel's name, as in the graph's nodes.
    stream : int
        Handle of the stream it was launched on.
    grid, block : tuple of int
    shared : int
        Bytes of dynamic shared memory.
    where : str, optional
        ``file:line`` of the kernel.
    """

    kernel: str
    stream: int
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    shared: int = 0
    where: str | None = None


@dataclass(frozen=True)
class NodeSeen:
    """A node of the captured graph.

    Parameters
    ----------
    kind : str
        ``kernel``, ``memcpy``, ``memset``, ``host``, ``graph``, ``empty``, ...: the driver's name
        of the node type in lower case.
    kernel : str, optional
        Name of the kernel, for kernel nodes.
    grid, block : tuple of int
    shared : int
        Bytes of dynamic shared memory.
    body : str
        Which graph it stands in: empty for the captured one, ``0.3`` for the body of node 3 of
        node 0.
    """

    kind: str
    kernel: str | None = None
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    shared: int = 0
    body: str = ""


@dataclass(frozen=True)
class GraphSeen:
    """The captured graph, or why it was not walked.

    Parameters
    ----------
    nodes : tuple of NodeSeen
    not_inspected : str, optional
        Why the nodes are unknown. None when they are known.
    unseen_bodies : tuple of str
        Bodies that could not be walked (conditional nodes): their kernels are not among `nodes`.
    """

    nodes: tuple[NodeSeen, ...] = ()
    not_inspected: str | None = None
    unseen_bodies: tuple[str, ...] = ()


@dataclass(frozen=True)
class OutputSeen:
    """One output after one run.

    Parameters
    ----------
    name : str
    mismatch : Mismatch, optional
        How it differs from the reference. None when it does not.
    must_change : int
        Elements whose reference differs from what the output held before the run.
    unchanged : int
        Those of `must_change` that still hold the bits of before.
    """

    name: str
    mismatch: Mismatch | None = None
    must_change: int = 0
    unchanged: int = 0


@dataclass(frozen=True)
class RunSeen:
    """One judged run, eager or replayed.

    Parameters
    ----------
    label : str
        The inputs it ran on.
    outputs : tuple of OutputSeen
    """

    label: str
    outputs: tuple[OutputSeen, ...]

    @property
    def must_change(self) -> int:
        """Elements, over all outputs, that a right run has to change."""
        return sum(output.must_change for output in self.outputs)


@dataclass(frozen=True)
class Fault:
    """An exception, and the part of the run that raised it.

    Parameters
    ----------
    stage : str
        ``refill``, ``poison``, ``expected``, ``read`` (the harness's calls), ``step``, ``capture``,
        ``replay``.
    error : str
        Class and message.
    where : str, optional
        ``file:line`` of the innermost frame outside installed packages.
    context_lost : bool
        The device answers nothing any more: an illegal access, a trap, a lost GPU.
    label : str
        The inputs it happened on.
    """

    stage: str
    error: str
    where: str | None = None
    context_lost: bool = False
    label: str = ""


@dataclass(frozen=True)
class EndSeen:
    """How a child process that did not come to its end was ended.

    Parameters
    ----------
    status : {"timeout", "died", "raised"}
        As in `cuverify.validators.child.ChildOutcome`.
    ending : str
        Signal or exit status, in words.
    label : str
        The inputs it was working on.
    silence_s : float
        The time limit in seconds.
    error : str
        What it raised.
    log : str
        The tail of its output.
    """

    status: str
    ending: str
    label: str = ""
    silence_s: float = 0.0
    error: str = ""
    log: str = ""


@dataclass
class CaptureSeen:
    """Everything that one run of the protocol observed.

    Parameters
    ----------
    capture_stream : int
        Handle of the stream that was captured.
    capturing_streams : frozenset of int
        Streams that took part in the capture: the captured one, and side streams forked from it.
    launches : tuple of LaunchSeen
        In the order of the launches.
    graph : GraphSeen
    eager : RunSeen, optional
        The run without a graph. None when it did not happen.
    replays : list of RunSeen
        In the order of the replays.
    faults : list of Fault
    warnings : tuple of str
        What torch warned about during the capture.
    only_recorded : bool
        The step launches through the package's launcher only, so every kernel node must be
        recorded.
    skipped : tuple of str
        Inputs that the step refused as not fitting its buffers.
    stages : list of str
        What was completed: ``eager``, ``capture``, ``replay``.
    end : EndSeen, optional
        Of a run in a child process that did not come back.
    """

    capture_stream: int = 0
    capturing_streams: frozenset[int] = frozenset()
    launches: tuple[LaunchSeen, ...] = ()
    graph: GraphSeen = field(default_factory=GraphSeen)
    eager: RunSeen | None = None
    replays: list[RunSeen] = field(default_factory=list)
    faults: list[Fault] = field(default_factory=list)
    warnings: tuple[str, ...] = ()
    only_recorded: bool = True
    skipped: tuple[str, ...] = ()
    stages: list[str] = field(default_factory=list)
    end: EndSeen | None = None

    def summary(self) -> Mapping[str, Any]:
        """Return counts for a report, as JSON values."""
        return {
            "launches": len(self.launches),
            "nodes": None if self.graph.not_inspected else len(self.graph.nodes),
            "kernel_nodes": None
            if self.graph.not_inspected
            else sum(node.kind == "kernel" for node in self.graph.nodes),
            "replays": len(self.replays),
            "skipped_inputs": len(self.skipped),
        }


def stream_name(handle: int) -> str:
    """Return a stream's handle in hexadecimal, with its meaning where it has one."""
    name = _STREAM_NAMES.get(handle)
    return f"{handle:#x} ({name})" if name else f"{handle:#x}"
