"""The engine behind `cuverify bench`: gate first, then time.

A benchmark module (see `cuverify.benches`) builds its records with `gated`, which times nothing
before the result is known to be right. Times are medians with the interquartile range beside them.
On a GPU a step is timed as it will be used: inside a replayed graph, with a cold L2 cache, against
the copy bandwidth of the same run. One step in a graph of its own also pays for the graph's start;
several copies of it over data of their own, in one graph, say what it costs among others.
"""

from __future__ import annotations

import functools
import gc
import importlib
import inspect
import itertools
import shutil
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from cuverify.errors import ArgumentError, CaseError, DeviceError
from cuverify.report import Coverage, Finding, Report, Table

if TYPE_CHECKING:
    from cuverify.cases import BoundStep

Device = Literal["auto", "cpu", "cuda"]
Progress = Callable[[str, int, int], None]  # what is being done, how many are done, of how many

REPEATS = 100
_SWEEP_BYTES = 1 << 28
_COPY_BYTES = 1 << 30
_COPY_REPEATS = 20
_CLEARING_S = 4e-12  # for each byte that torch gives back; 2.2e-12 were measured on an H200
_NAMED = ("batch", "prefix rows", "tree", "heads")  # a shape's name says them
_SHOWN = 300  # letters of an error's first line
_COLUMNS = (
    "op",
    "shape",
    "peer",
    "us",
    "spread us",
    "alone us",
    "floor us",
    "read us",
    "floor %",
    "GB/s",
    "TFLOP/s",
    "error",
)
_ALWAYS = ("op", "shape", "us")


@dataclass(frozen=True)
class Timing:
    """What one thing took.

    Parameters
    ----------
    us : float
        Median, in microseconds.
    spread_us : float
        Interquartile range, in microseconds.
    repeats : int
        Measurements.
    """

    us: float
    spread_us: float
    repeats: int

    @classmethod
    def of(cls, microseconds: Sequence[float]) -> Timing:
        """Summarise at least one measurement."""
        if not microseconds:
            raise ArgumentError("microseconds", microseconds, "nothing was measured")
        ordered = sorted(microseconds)
        if len(ordered) == 1:
            return cls(ordered[0], 0.0, 1)
        low, _, high = statistics.quantiles(ordered, n=4, method="inclusive")
        return cls(statistics.median(ordered), high - low, len(ordered))


@dataclass(frozen=True)
class Record:
    """One line of a benchmark.

    Parameters
    ----------
    op : str
        What was timed.
    shape : mapping
        Numbers and names that say how large it was. A ``target_us`` among them is a goal, not a
        gate.
    us, us_spread : float or None
        Median and interquartile range in microseconds. None when the gate failed.
    floor_us : float or None
        What the hardware needs at least, in microseconds.
    bytes, flops : int or None
        Moved and computed, for one run.
    peer : str or None
        Whose implementation it is; None for our own.
    error : str, float or None
        Text: what the gate found, and then there is no time. A number: how far the right result is
        from the reference.
    alone_us, alone_spread : float or None
        Where `us` is what one of several copies in a graph takes: the same of a graph that holds
        nothing else, in which the graph's start counts.
    read_us : float or None
        Another floor: what it took, in the same run, to read the same data where it lies and do
        nothing else.
    """

    op: str
    shape: Mapping[str, int | float | str]
    us: float | None = None
    us_spread: float | None = None
    floor_us: float | None = None
    bytes: int | None = None
    flops: int | None = None
    peer: str | None = None
    error: str | float | None = None
    alone_us: float | None = None
    alone_spread: float | None = None
    read_us: float | None = None

    def __post_init__(self) -> None:
        failed = isinstance(self.error, str)
        if failed and self.us is not None:
            raise CaseError(f"{self.op}: a time beside a failed gate ({self.error})")
        if not failed and self.us is None:
            raise CaseError(f"{self.op}: neither a time nor what the gate found")

    @classmethod
    def from_mapping(cls, op: str, values: Mapping[str, Any]) -> Record:
        """Read what a benchmark returned.

        Raises
        ------
        CaseError
            It has unknown keys or lacks some, or has a time beside a failed gate.
        """
        known = {field.name for field in fields(cls)}
        if set(values) != known:
            wrong = ", ".join(sorted(set(values) ^ known))
            raise CaseError(
                f"benchmark {op!r} returned a record with other keys than a Record has: {wrong}"
            )
        return cls(**values)

    def to_json(self) -> dict[str, Any]:
        """Return the fields as JSON values, as evidence files hold them."""
        return {**asdict(self), "shape": dict(self.shape)}

    @property
    def share(self) -> float | None:
        """Floor over time, 1.0 at the hardware's limit. None where one of them is unknown."""
        return self.floor_us / self.us if self.us and self.floor_us is not None else None


def gated(
    op: str,
    shape: Mapping[str, int | float | str],
    *,
    check: Callable[[], str | None],
    timing: Callable[[], Timing],
    floor_us: float | None = None,
    bytes: int | None = None,
    flops: int | None = None,
    peer: str | None = None,
    error: float | Callable[[], float] | None = None,
    alone: Callable[[], Timing] | None = None,
    read_us: float | None = None,
) -> dict[str, Any]:
    """Check one result, and time it only when it is right.

    Parameters
    ----------
    op, shape, floor_us, bytes, flops, peer, read_us
        As in `Record`.
    check : callable
        Runs the step and returns what is wrong with its result, None when it is right. What it
        raises is wrong too.
    timing : callable
        Measures the step.
    error : float or callable, optional
        As in `Record`; a callable is asked after the check.
    alone : callable, optional
        Measures the step in a graph of its own.

    Returns
    -------
    dict
        The fields of a `Record`.
    """
    timed: Timing | None = None
    lonely: Timing | None = None
    wrong: str | float | None
    try:
        wrong = check()
        if wrong is None:
            wrong = error() if callable(error) else error
            timed = timing()
            lonely = None if alone is None else alone()
    except Exception as raised:
        timed, lonely, wrong = None, None, one_line(raised)
    return Record(
        op,
        dict(shape),
        us=timed.us if timed else None,
        us_spread=timed.spread_us if timed else None,
        floor_us=floor_us,
        bytes=bytes,
        flops=flops,
        peer=peer,
        error=wrong,
        alone_us=lonely.us if lonely else None,
        alone_spread=lonely.spread_us if lonely else None,
        read_us=read_us,
    ).to_json()


def gated_copies(
    op: str,
    shape: Mapping[str, int | float | str],
    steps: Sequence[Callable[[], None]],
    repeats: int = REPEATS,
    **rest: Any,
) -> dict[str, Any]:
    """Check one result, and time copies of a step only when it is right.

    Parameters
    ----------
    op, shape, rest
        As for `gated`, without `timing` and `alone`.
    steps, repeats
        As for `time_copies`; the first step is also timed in a graph of its own.

    Returns
    -------
    dict
        The fields of a `Record`.
    """
    return gated(
        op,
        shape,
        timing=lambda: time_copies(steps, repeats),
        alone=None if len(steps) == 1 else lambda: time_copies(steps[:1], repeats),
        **rest,
    )


def first_wrong(steps: Sequence[BoundStep]) -> str | None:
    """Run steps on the same inputs, and return what is wrong with an output; None if nothing is.

    Parameters
    ----------
    steps : sequence of BoundStep
        Each is poisoned before it runs, and held against what the first one expects.
    """
    from cuverify.validators.compare import compare_all, host_array

    expected = steps[0].expected()
    for own in steps:
        own.poison()
        own()
        outputs = {name: host_array(tensor) for name, tensor in own.outputs.items()}
        wrong = compare_all(outputs, expected)
        if wrong:
            return str(wrong[0])
    return None


def names() -> list[str]:
    """Return the names of all benchmarks, sorted."""
    from cuverify import benches
    from cuverify.cases import stems

    return stems(benches)


def run_benches(
    wanted: Sequence[str] = (),
    device: Device = "auto",
    *,
    progress: Progress | None = None,
    options: Mapping[str, Any] | None = None,
) -> list[Record]:
    """Run benchmarks.

    Parameters
    ----------
    wanted : sequence of str
        Of `names`; all of them when empty.
    device : {"auto", "cpu", "cuda"}
        ``"auto"`` is the GPU where there is one.
    progress : callable, optional
        Told which one runs, how many are done, and of how many.
    options : mapping, optional
        Keywords for each benchmark's ``run``.

    Returns
    -------
    list of Record
        A benchmark that raises gives one record with the error.

    Raises
    ------
    CaseError
        A name is unknown, a benchmark takes no such option, or returned something else than
        records.
    DeviceError
        ``device="cuda"`` and there is none.
    """
    known = names()
    for name in wanted:
        if name not in known:
            raise CaseError(f"there is no benchmark {name!r}; known are {', '.join(known)}")
    chosen = list(wanted) or known
    target = _target(device)
    copy_bandwidth.cache_clear()  # a rate of an earlier run, at other clocks, is no ceiling
    modules = {name: importlib.import_module(f"cuverify.benches.{name}") for name in chosen}
    options = dict(options or {})
    for name, module in modules.items():
        for option in options.keys() - inspect.signature(module.run).parameters.keys():
            raise CaseError(f"benchmark {name!r} takes no {option}")
    records: list[Record] = []
    for number, (name, module) in enumerate(modules.items()):
        if progress is not None:
            progress(f"{name} on {target}", number, len(chosen))
        try:
            rows = module.run(target, **options)
        except CaseError:
            raise  # what was asked for is not there
        except Exception as error:
            records.append(Record(name, {}, error=one_line(error)))
            continue
        records.extend(Record.from_mapping(name, row) for row in rows)
    return records


def run_benchmarks(
    wanted: Sequence[str] = (),
    device: Device = "auto",
    *,
    progress: Progress | None = None,
    options: Mapping[str, Any] | None = None,
    picture: Path | None = None,
) -> Report:
    """Run benchmarks and report them; other parameters and errors as for `run_benches`.

    Parameters
    ----------
    picture : Path, optional
        Where to draw times and rooflines, as `cuverify.figures.draw` does.

    Returns
    -------
    Report
        A table of the records, one of ours beside the best peer where there are peers, a finding
        for each failed gate, and the machine: versions, clocks right after the run, measured copy
        bandwidth.
    """
    from cuverify import env, figures
    from cuverify.comparison import comparison_table

    target = _target(device)
    if picture is not None:
        figures.require()  # now, not after minutes of work
    records = run_benches(wanted, device, progress=progress, options=options)
    if picture is not None:
        figures.draw([record.to_json() for record in records], picture)
    report = Report("bench")
    report.tables.append(_times(records))
    compared = comparison_table([record.to_json() for record in records])
    if compared.rows:
        report.tables.append(compared)
    report.findings.extend(
        Finding(
            "bench-gate",
            "error" if record.peer is None else "warning",  # a peer's fault is no fault of ours
            f"{record.op}: {record.error}",
            evidence={"shape": dict(record.shape), "peer": record.peer},
            fix="Nothing was timed. `cuverify check` shows where the result is wrong."
            if record.peer is None
            else "It was not timed here.",
        )
        for record in records
        if isinstance(record.error, str)
    )
    environment: dict[str, Any] = dict(env.inspect().versions)
    if target == "cuda":
        report.coverage.append(Coverage("GPU", "inspected", _gpu_line()))
        environment["clocks"] = clocks()
        environment["copy bandwidth GB/s"] = round(copy_bandwidth() / 1e9, 1)
    else:
        reason = "no CUDA device" if device == "auto" else "not asked for (device='cpu')"
        report.coverage.append(Coverage("GPU", "not inspected", reason))
    report.environment = environment
    return report


def measure(
    wanted: Sequence[str] = (), options: Mapping[str, Any] | None = None
) -> list[dict[str, Any]]:
    """Run benchmarks on this machine, all if none is named; return records as JSON values."""
    return [record.to_json() for record in run_benches(wanted, options=options)]


def time_graph(
    step: Callable[[], None], repeats: int = REPEATS, *, cold: bool = True, warmups: int = 3
) -> Timing:
    """Time a step as a replayed CUDA graph; parameters and errors as for `time_copies`."""
    return time_copies([step], repeats, cold=cold, warmups=warmups)


def time_copies(
    steps: Sequence[Callable[[], None]],
    repeats: int = REPEATS,
    *,
    cold: bool = True,
    warmups: int = 3,
) -> Timing:
    """Time some steps that follow each other in one replayed CUDA graph, as the time of one.

    Parameters
    ----------
    steps : sequence of callable
        Each launches on torch's current stream, or on streams that it forks from it and joins, and
        is capturable. Several steps are copies that work on data of their own, so that each finds
        its data in no cache.
    repeats : int
        Replays to measure, each between two events.
    cold : bool
        Sweep the L2 cache before each replay, as the rest of a decode step would.
    warmups : int
        Runs of the first step before the capture, at least 1, and replays before the measurement.

    Returns
    -------
    Timing
        On the device, without the host's part of a launch, divided by the number of steps.

    Notes
    -----
    A capture makes torch give the memory that it keeps for later back to the driver. The driver
    clears it, on the device and beside whatever runs there: for 46 ms after 21 GB on an H200, in
    which a kernel bound by memory takes 8 % longer. The measurement waits until that is over: 4 ms
    for each GB that was given back. It is the same for all steps, and nothing where nothing
    large was freed.

    Raises
    ------
    ArgumentError
        No step, no repeat or no warm-up.
    DeviceError
        There is no CUDA device.
    """
    if not steps:
        raise ArgumentError("steps", list(steps), "needs at least 1")
    if repeats < 1:
        raise ArgumentError("repeats", repeats, "needs at least 1")
    if warmups < 1:
        raise ArgumentError("warmups", warmups, "needs at least 1: a cold kernel compiles")
    torch = _torch_with_cuda()
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(warmups):
            steps[0]()
        for step in steps[1:]:
            step()
        torch.cuda.synchronize()
        kept = torch.cuda.memory_reserved()
        torch.cuda.empty_cache()  # as the capture would, whose own memory would hide how much
        given_back = kept - torch.cuda.memory_reserved()
        graph = torch.cuda.CUDAGraph()
        with _no_garbage_collection(), torch.cuda.graph(graph, stream=stream):
            for step in steps:
                step()
        time.sleep(_CLEARING_S * given_back)
        # Far more than the cache: the sweep leaves nothing of the steps', and keeps the device
        # busy while the host enqueues the replay, so that the events do not time the host. It only
        # reads: lines that it had written would be written back at the steps' expense.
        sweep = _sweep_buffer(torch.cuda.current_device())
        swept = torch.empty((), device="cuda", dtype=sweep.dtype)
        events = [
            (torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True))
            for _ in range(warmups + repeats)
        ]
        for begin, end in events:
            if cold:
                torch.amax(sweep, dim=0, out=swept)
            begin.record()
            graph.replay()
            end.record()
        torch.cuda.synchronize()
    times = [1e3 * begin.elapsed_time(end) / len(steps) for begin, end in events[warmups:]]
    graph.reset()
    return Timing.of(times)


@functools.cache
def _sweep_buffer(device: int) -> Any:
    torch = _torch_with_cuda()
    size = max(2 * torch.cuda.get_device_properties(device).L2_cache_size, _SWEEP_BYTES)
    return torch.zeros(size // 4, dtype=torch.float32, device=f"cuda:{device}")


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keep Python from freeing what was left lying about in the middle of a capture."""
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def time_calls(
    call: Callable[[], object],
    *,
    calls: int = 1,
    repeats: int = REPEATS,
    settle: Callable[[], object] | None = None,
) -> Timing:
    """Time calls on the host's clock.

    Parameters
    ----------
    call : callable
        Called once before the measurement.
    calls : int
        Calls in a row for one measurement, which is their mean.
    repeats : int
        Measurements.
    settle : callable, optional
        Called after each measurement, outside of it, such as a device synchronisation.

    Returns
    -------
    Timing
        Of one call.

    Raises
    ------
    ArgumentError
        `calls` or `repeats` is below 1.
    """
    if calls < 1 or repeats < 1:
        raise ArgumentError("calls, repeats", (calls, repeats), "need at least 1 each")
    call()
    times = []
    for _ in range(repeats):
        if settle is not None:
            settle()
        started = time.perf_counter_ns()
        for _ in range(calls):
            call()
        times.append((time.perf_counter_ns() - started) / calls / 1e3)
    if settle is not None:
        settle()
    return Timing.of(times)


@functools.cache
def copy_bandwidth() -> float:
    """Return what a device-to-device copy moves, in bytes a second, read and written together.

    The best that was seen of ``copy_`` and of a kernel that reads and writes once
    (``bitwise_not``), on random bytes and buffers far larger than the L2 cache: a ceiling, and not
    what is usual. Not in a graph, where a contiguous ``copy_`` becomes a node for the copy engine,
    which is slower. Measured once a run of benchmarks.

    Raises
    ------
    DeviceError
        There is no CUDA device.
    """
    torch = _torch_with_cuda()
    free, _ = torch.cuda.mem_get_info()
    words = min(_COPY_BYTES, free // 4) // 8
    source = torch.empty(words, dtype=torch.int64, device="cuda").random_()
    target = torch.empty_like(source)
    ways: tuple[Callable[[], object], ...] = (
        lambda: target.copy_(source),
        lambda: torch.bitwise_not(source, out=target),
    )
    best = min(us for way in ways for us in _event_times(way, _COPY_REPEATS))
    return float(2 * 8 * words / (best * 1e-6))


def _event_times(step: Callable[[], object], repeats: int) -> list[float]:
    """Return what runs of a step on the current stream took on the device, in microseconds."""
    torch = _torch_with_cuda()
    step()  # warms up
    events = [torch.cuda.Event(enable_timing=True) for _ in range(repeats + 1)]
    for event in events:
        step()
        event.record()  # each run follows its predecessor without a gap
    torch.cuda.synchronize()
    return [1e3 * begin.elapsed_time(end) for begin, end in itertools.pairwise(events)]


def copy_floor_us(moved: int) -> float:
    """Return the microseconds that `moved` bytes, read and written together, take at copy speed."""
    return 1e6 * moved / copy_bandwidth()


def clocks() -> dict[str, str]:
    """Return the GPU's clocks, temperature and power now, as nvidia-smi says them.

    Returns
    -------
    dict of str to str
        Empty where nvidia-smi is missing or does not answer.
    """
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return {}
    asked = ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw")
    try:
        import torch

        properties = torch.cuda.get_device_properties(torch.cuda.current_device())
        # CUDA_VISIBLE_DEVICES renumbers devices, and nvidia-smi does not know that
        which = ["-i", f"GPU-{properties.uuid}"] if hasattr(properties, "uuid") else []
        done = subprocess.run(
            [tool, *which, f"--query-gpu={','.join(asked)}", "--format=csv,noheader"],
            capture_output=True,
            text=True,
            timeout=20,
            check=True,
        )
    except (OSError, RuntimeError, AssertionError, subprocess.SubprocessError):
        return {}
    first = done.stdout.strip().splitlines()[:1]
    values = [value.strip() for value in first[0].split(",")] if first else []
    return dict(zip(asked, values, strict=False))


def _times(records: Sequence[Record]) -> Table:
    """Return the records as a table without the columns that all of them leave empty."""
    rows = [_row(record) for record in records]
    kept = [
        index
        for index, column in enumerate(_COLUMNS)
        if column in _ALWAYS or any(row[index] is not None for row in rows)
    ]
    columns = [_COLUMNS[index] for index in kept]
    return Table("times", columns, [tuple(row[index] for index in kept) for row in rows])


def _row(record: Record) -> tuple[Any, ...]:
    rate = record.bytes / record.us / 1e3 if record.bytes and record.us else None
    flops = record.flops / record.us / 1e6 if record.flops and record.us else None
    share = None if record.share is None else round(100 * record.share, 1)
    told = {name: value for name, value in record.shape.items() if name not in _NAMED}
    return (
        record.op,
        told if "name" in record.shape else dict(record.shape),
        record.peer,
        record.us,
        record.us_spread,
        record.alone_us,
        record.floor_us,
        record.read_us,
        share,
        rate,
        flops,
        record.error,
    )


def _target(device: Device) -> Literal["cpu", "cuda"]:
    if device not in ("auto", "cpu", "cuda"):
        raise ArgumentError("device", device, "use 'auto', 'cpu' or 'cuda'")
    if device == "cpu":
        return "cpu"
    try:
        _torch_with_cuda()
    except DeviceError:
        if device == "cuda":
            raise
        return "cpu"
    return "cuda"


def _torch_with_cuda() -> Any:
    try:
        import torch
    except ImportError as error:
        raise DeviceError("GPU timings need torch, which is not installed") from error
    if not torch.cuda.is_available():
        raise DeviceError("GPU timings need a CUDA device, and torch finds none")
    return torch


def _gpu_line() -> str:
    torch = _torch_with_cuda()
    told = ", ".join(f"{name} {value}" for name, value in clocks().items())
    rate = f"copy {copy_bandwidth() / 1e9:.0f} GB/s"
    return ", ".join(filter(None, (str(torch.cuda.get_device_name()), rate, told)))


def one_line(error: Exception) -> str:
    """Return an exception's type and the beginning of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0][:_SHOWN]}" if lines else type(error).__name__
