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
    parameters : tuple of str
        Names of its parameters.
    numbers : tuple of str
        Names of those that are numbers by its contract, whatever they look like.
    """

    kernel: str
    stream: int
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    shared: int = 0
    where: str | None = None
    parameters: tuple[str, ...] = ()
    numbers: tuple[str, ...] = ()


@dataclass(frozen=True)
class PointerSeen:
    """An address that something in the graph holds, and what lies there.

    Parameters
    ----------
    address : int
    space : str
        ``torch`` (a segment of torch's allocator), ``cupy`` (a chunk of CuPy's pool), ``device``
        (other mapped device memory), ``managed``, ``pinned``, ``pageable``, ``unmapped``, ``null``,
        or ``number`` where it is no address.
    pool : tuple of int, optional
        For ``torch``: the pool of the segment; (0, 0) is the default one.
    state : str
        For ``torch``: state of the block, such as ``active_allocated`` or ``inactive``.
    block : tuple of int, optional
        Address and bytes of the block or range that it lies in.
    owner : str
        Name of the declared tensor, or the way to an undeclared one, that it lies in.
    role : str
        ``input``, ``output``, ``scratch``, ``state``, ``held`` (reached from the step, not
        declared), empty when unknown.
    sure : bool
        It is a whole argument of 8 bytes. A word inside a struct is a candidate only.
    """

    address: int
    space: str
    pool: tuple[int, int] | None = None
    state: str = ""
    block: tuple[int, int] | None = None
    owner: str = ""
    role: str = ""
    sure: bool = True

    def __str__(self) -> str:
        text = f"{self.address:#x} ({self.space}"
        if self.state:
            text += f", {self.state}"
        if self.pool not in (None, (0, 0)):
            text += f", pool {self.pool}"
        if self.owner:
            text += f", {self.owner}"
        if not self.sure:
            text += ", a word inside a struct"
        return text + ")"


@dataclass(frozen=True)
class ParamSeen:
    """An argument of a kernel node.

    Parameters
    ----------
    index, offset, size : int
        Position, and bytes in the parameter buffer.
    data : str
        The bytes, in hexadecimal.
    pointers : tuple of PointerSeen
        What its words point to, by word; those that are numbers are left out.
    name : str
        From the kernel's contract, where the package's launcher made the launch.
    """

    index: int
    offset: int
    size: int
    data: str
    pointers: tuple[PointerSeen, ...] = ()
    name: str = ""


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
    params : tuple of ParamSeen
        Arguments of a kernel.
    params_unknown : str
        Why the arguments could not be read. Empty when they were.
    source, target : PointerSeen, optional
        Ends of a copy; what a memset or a memory node touches is its target.
    size : int
        Bytes that are copied, set or allocated.
    attributes : mapping of str to str
        Launch attributes that are set.
    """

    kind: str
    kernel: str | None = None
    grid: tuple[int, ...] = ()
    block: tuple[int, ...] = ()
    shared: int = 0
    body: str = ""
    params: tuple[ParamSeen, ...] = ()
    params_unknown: str = ""
    source: PointerSeen | None = None
    target: PointerSeen | None = None
    size: int = 0
    attributes: Mapping[str, str] = field(default_factory=dict)

    @property
    def pointers(self) -> tuple[PointerSeen, ...]:
        """Every address that the node holds."""
        ends = tuple(end for end in (self.source, self.target) if end is not None)
        return tuple(pointer for param in self.params for pointer in param.pointers) + ends

    @property
    def title(self) -> str:
        """Kernel name, or kind."""
        return self.kernel or self.kind


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
    edges : tuple of (int, int, str)
        From node, to node (numbers in the captured graph), and the kind: ``full`` or
        ``programmatic``.
    """

    nodes: tuple[NodeSeen, ...] = ()
    not_inspected: str | None = None
    unseen_bodies: tuple[str, ...] = ()
    edges: tuple[tuple[int, int, str], ...] = ()

    @property
    def kernels(self) -> tuple[str, ...]:
        """Names of the kernel nodes, in the driver's order."""
        return tuple(node.kernel or "?" for node in self.nodes if node.kind == "kernel")


@dataclass(frozen=True)
class CallSeen:
    """A call of the CUDA runtime or driver, or what stands for one without CUPTI.

    Parameters
    ----------
    api : str
        Its name, without a version: ``cudaMalloc``.
    kind : str
        ``launch``, ``sync``, ``query``, ``alloc``, ``free``, ``host_alloc``, ``host_free``,
        ``copy``, ``memset``, ``load``, ``unload``, ``record``, ``wait``, ``host_func``, ``destroy``
        (of a graph), ``device`` (another device made current).
    phase : str
        What the protocol was doing: ``eager``, ``warm-up``, ``capture``, ``strict``, ``cold``, ...
    thread : str
        ``main`` for the one that runs the step, else ``other``, or ``autograd``.
    stream : int, optional
        Handle, where the call takes one.
    where : str, optional
        ``file:line`` of the innermost frame that belongs to no library.
    origin : str
        The library that made the call, where it is known: ``libtorch_cuda.so``.
    kernel : str, optional
        For a launch.
    address, size : int
        What is allocated, freed or written; 0 where unknown.
    source : int
        The other end of a copy.
    error : str
        Why it failed. Empty when it did not.
    torch_owned : bool
        The memory lies in a segment of torch's allocator.
    detail : str
        More, for a person.
    pointers : tuple of int
        For a launch through the driver: the arguments of 8 bytes, 0 in the place of others.
    """

    api: str
    kind: str
    phase: str
    thread: str = "main"
    stream: int | None = None
    where: str | None = None
    origin: str = ""
    kernel: str | None = None
    address: int = 0
    size: int = 0
    source: int = 0
    error: str = ""
    torch_owned: bool = False
    detail: str = ""
    pointers: tuple[int, ...] = ()


@dataclass(frozen=True)
class PoolHitSeen:
    """Memory that CuPy's pool gave to the step inside the capture.

    Parameters
    ----------
    address, size : int
    fresh : bool
        It came from the driver and not out of the pool.
    freed : bool
        It was given back before the capture ended, so others get the same memory.
    where : str, optional
    phase : str
        ``capture``, or ``eager`` for the run before it.
    """

    address: int
    size: int
    fresh: bool = False
    freed: bool = False
    where: str | None = None
    phase: str = "capture"


@dataclass(frozen=True)
class AttemptSeen:
    """One of several captures of the step.

    Parameters
    ----------
    name : str
        ``capture`` (the one that is replayed), ``strict`` (on a blocking stream), ``cold`` (on a
        stream without warm-up), ``same`` (the same inputs once more), ``double`` and ``double
        again`` (other host values), ``fresh 0`` and ``fresh 2`` (a
        fresh step after that many warm-ups), ``retry thread_local`` and ``retry relaxed`` (in that
        mode, after a failure).
    mode : str
        ``global``, ``thread_local`` or ``relaxed``.
    stream : int
    graph : GraphSeen
    fault : Fault, optional
        Why it failed.
    pool : tuple of int, optional
        The graph's private pool.
    launches : tuple of LaunchSeen
    """

    name: str
    mode: str = "global"
    stream: int = 0
    graph: GraphSeen = field(default_factory=GraphSeen)
    fault: Fault | None = None
    pool: tuple[int, int] | None = None
    launches: tuple[LaunchSeen, ...] = ()


@dataclass(frozen=True)
class DriftSeen:
    """How one output of one run differs from that of another that should be the same.

    Parameters
    ----------
    mismatch : Mismatch
        Bit by bit; its expectation is the other run.
    relative : float or None
        L2 norm of the difference over that of the expectation.
    ulps : mapping of str to int
        Histogram of the distances in units in the last place: ``1``, ``2-3``, ``4-15``, ...
    right : bool or None
        The output agrees with the reference all the same; None without one.
    """

    mismatch: Mismatch
    relative: float | None = None
    ulps: Mapping[str, int] = field(default_factory=dict)
    right: bool | None = None


@dataclass(frozen=True)
class TrialSeen:
    """A run on the captured inputs under changed circumstances, against the first replay.

    Parameters
    ----------
    name : str
        ``eager again``, ``against eager``, ``again``, ``idempotent``, ``stale``, ``padding``,
        ``padding nan``, ``scratch``, ``behind``, ``pool``, ``free memory``, ``interference``,
        ``pinned``, ``stream``, ``overlap``, ``restore``.
    subject : str
        The tensor that was disturbed, where it was one.
    drifts : tuple of DriftSeen
        Outputs that differ.
    fault : Fault, optional
        Why there is no result.
    detail : str
        What was done.
    steady : bool
        Compared with a run right before, of which two were equal: a difference is not noise.
    """

    name: str
    subject: str = ""
    drifts: tuple[DriftSeen, ...] = ()
    fault: Fault | None = None
    detail: str = ""
    steady: bool = False


@dataclass(frozen=True)
class ResponseSeen:
    """What an input moves, in the replay and in the reference.

    Parameters
    ----------
    input : str
    how : str
        ``alone`` (it alone was changed), or ``stale`` (the replay on other inputs agrees with the
        reference for this one as it was captured).
    reference_moves : int
        Elements of the outputs that the reference changes.
    replay_moves : int
        Those of them that the replay changes.
    ignored : bool
        The replay is what the reference gives without the change.
    """

    input: str
    how: str = "alone"
    reference_moves: int = 0
    replay_moves: int = 0
    ignored: bool = False


@dataclass(frozen=True)
class TensorSeen:
    """A tensor that is declared, or that can be reached from the step.

    Parameters
    ----------
    path : str
        Its name, or the way to it: ``step.plan``.
    role : str
        ``input``, ``output``, ``scratch``, ``state``, or ``held``.
    address, size : int
    device : str
    """

    path: str
    role: str
    address: int
    size: int
    device: str = "cuda:0"


@dataclass(frozen=True)
class ReboundSeen:
    """A name that holds another tensor than before.

    Parameters
    ----------
    path : str
    before, after : int
        Addresses; 0 where it holds no tensor.
    during : str
        ``capture`` (the step did it) or ``refill``.
    """

    path: str
    before: int
    after: int
    during: str


@dataclass(frozen=True)
class StaleMemorySeen:
    """Memory that the graph reads, that no refill writes, and that the step's host code does.

    Parameters
    ----------
    pointer : PointerSeen
    kernel : str
        A node that reads it.
    path : str
        The way to the tensor there, when one is known.
    """

    pointer: PointerSeen
    kernel: str
    path: str = ""


@dataclass(frozen=True)
class WriteSeen:
    """Memory that a run wrote and that is none of its outputs.

    Parameters
    ----------
    name : str
        Whose memory: an input, or the rest of an output's storage.
    part : str
        ``input``, ``storage``, or ``behind`` (the allocator's slack behind the tensor).
    count : int
        Bytes that changed.
    first : int
        Offset of the first.
    run : str
    """

    name: str
    part: str
    count: int
    first: int
    run: str = "replay"


@dataclass(frozen=True)
class KeptSeen:
    """A tensor of a graph's private pool that the step's own code still holds after the capture.

    Parameters
    ----------
    path : str
    address, size : int
    attempt : str
        Which capture.
    """

    path: str
    address: int
    size: int
    attempt: str = "capture"


@dataclass(frozen=True)
class WideArgumentSeen:
    """A Python float that was passed for a parameter of 4 bytes.

    Parameters
    ----------
    kernel : str
    index, size : int
        Of the parameter, and its bytes.
    given, reads : float
        What was passed, and what the kernel sees.
    where : str, optional
    """

    kernel: str
    index: int
    size: int
    given: float
    reads: float
    where: str | None = None


@dataclass(frozen=True)
class MemorySeen:
    """Bytes in use around a number of equal actions.

    Parameters
    ----------
    what : str
        ``replays``, ``failed capture``, or ``whole run``.
    allocated, reserved, device : tuple of int
        Torch's allocated and reserved bytes, and the device's used bytes: before, and after each
        round.
    times : int
        Actions a round.
    private : int
        Bytes that a failed capture left reserved in a private pool.
    """

    what: str
    allocated: tuple[int, ...] = (0, 0)
    reserved: tuple[int, ...] = (0, 0)
    device: tuple[int, ...] = (0, 0)
    times: int = 1
    private: int = 0


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
    largest, relative : float, optional
        The largest error, and the L2 norm of the error over that of the reference, of
        floating-point outputs.
    ulps : mapping of str to int
        Histogram of the errors in units in the last place, where the reference has the output's
        dtype.
    """

    name: str
    mismatch: Mismatch | None = None
    must_change: int = 0
    unchanged: int = 0
    largest: float | None = None
    relative: float | None = None
    ulps: Mapping[str, int] = field(default_factory=dict)


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
    observer : str
        ``CUPTI``, or what took its place and why.
    calls : tuple of CallSeen
        CUDA calls of the step, of all phases.
    attempts : list of AttemptSeen
        All captures, the one that is replayed among them.
    pool_hits : tuple of PoolHitSeen
    trials : list of TrialSeen
    responses : list of ResponseSeen
    tensors : tuple of TensorSeen
        Declared and reached ones, right after the capture.
    rebound : tuple of ReboundSeen
    stale : tuple of StaleMemorySeen
    kept : list of KeptSeen
    writes : list of WriteSeen
    memory : list of MemorySeen
    wide_arguments : tuple of WideArgumentSeen
    armed : tuple of str
        Debugging modes and hooks that were on around the capture.
    collections : tuple of str
        Where garbage was collected inside the captured step.
    pool : tuple of int, optional
        Private pool of the replayed graph.
    deterministic, has_reference : bool
    other_answers : int, optional
        Replays on other inputs whose right answer is not that of the first. None without any.
    gaps : list of (str, str)
        What was not inspected, and why.
    streams : mapping of str to int
        Handles of the streams that were current: ``eager``, ``capture``, ...
    replayed : str
        Name of the attempt whose graph was replayed.
    device : int
        Index of the CUDA device.
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
    observer: str = ""
    calls: tuple[CallSeen, ...] = ()
    attempts: list[AttemptSeen] = field(default_factory=list)
    pool_hits: tuple[PoolHitSeen, ...] = ()
    trials: list[TrialSeen] = field(default_factory=list)
    responses: list[ResponseSeen] = field(default_factory=list)
    tensors: tuple[TensorSeen, ...] = ()
    rebound: tuple[ReboundSeen, ...] = ()
    stale: tuple[StaleMemorySeen, ...] = ()
    kept: list[KeptSeen] = field(default_factory=list)
    writes: list[WriteSeen] = field(default_factory=list)
    memory: list[MemorySeen] = field(default_factory=list)
    wide_arguments: tuple[WideArgumentSeen, ...] = ()
    armed: tuple[str, ...] = ()
    collections: tuple[str, ...] = ()
    pool: tuple[int, int] | None = None
    deterministic: bool = True
    has_reference: bool = True
    other_answers: int | None = None
    gaps: list[tuple[str, str]] = field(default_factory=list)
    streams: Mapping[str, int] = field(default_factory=dict)
    replayed: str = "capture"
    device: int = 0

    def attempt(self, name: str) -> AttemptSeen | None:
        """Return the capture of that name, if there was one."""
        return next((each for each in self.attempts if each.name == name), None)

    def trial(self, name: str) -> TrialSeen | None:
        """Return the first trial of that name, if there was one."""
        return next((each for each in self.trials if each.name == name), None)

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


def is_main(name: str) -> bool:
    """Tell whether an attempt or a phase is one whose graph may be replayed."""
    return name == "capture" or name.startswith("retry")


def stream_name(handle: int) -> str:
    """Return a stream's handle in hexadecimal, with its meaning where it has one."""
    name = _STREAM_NAMES.get(handle)
    return f"{handle:#x} ({name})" if name else f"{handle:#x}"
