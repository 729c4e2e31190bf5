"""CV1xx: work that is not in the graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from cuverify.validators.observations import (
    LEGACY_STREAMS,
    CaptureSeen,
    LaunchSeen,
    NodeSeen,
    stream_name,
)
from cuverify.validators.rule import Rule, Verdict

# node types that do work at a replay; the rest only order it
_WORK = frozenset({"kernel", "memcpy", "memset", "graph", "conditional", "host", "batch_mem_op"})
_LISTED = 12  # nodes named in a finding; the summary has the count


def _captured(seen: CaptureSeen) -> bool:
    return "capture" in seen.stages


def _foreign_launches(seen: CaptureSeen) -> Iterator[Verdict]:
    """Yield launches that the graph lacks: by its nodes where they are known, else by streams."""
    if not _captured(seen):
        return
    for (kernel, stream, where), count in _lost(seen).items():
        foreign = stream not in seen.capturing_streams
        times = "once" if count == 1 else f"{count} times"
        if foreign:
            cause = (
                f"it was launched on stream {stream_name(stream)} "
                f"while stream {stream_name(seen.capture_stream)} is captured"
            )
        else:
            cause = (
                f"it was launched on stream {stream_name(stream)}, which takes part in the capture"
            )
        evidence: dict[str, object] = {
            "kernel": kernel,
            "launches_lost": count,
            "recorded_stream": stream_name(stream),
            "capture_stream": stream_name(seen.capture_stream),
            "launches_recorded": len(seen.launches),
        }
        if seen.graph.not_inspected is None:
            evidence["graph_nodes"] = _node_list(seen.graph.nodes)
        yield Verdict(
            f"`{kernel}` ran {times} during the capture and is not in the graph: {cause}. "
            "A replay does not run it.",
            where=where,
            evidence=evidence,
            fix=None if foreign else _FIX_UNKNOWN,
        )


def _lost(seen: CaptureSeen) -> Counter[tuple[str, int, str | None]]:
    """Count the launches that the graph lacks by kernel, stream and place."""
    lost: Counter[tuple[str, int, str | None]] = Counter()
    if seen.graph.not_inspected is not None or seen.graph.unseen_bodies:
        for launch in seen.launches:
            if launch.stream not in seen.capturing_streams:
                lost[launch.kernel, launch.stream, launch.where] += 1
        return lost
    missing = Counter(launch.kernel for launch in seen.launches)
    missing.subtract(_kernels(seen.graph.nodes))
    # a launch on a stream outside the capture is the likelier culprit of two of one kernel
    for launch in sorted(seen.launches, key=lambda launch: _is_captured_stream(seen, launch)):
        if missing[launch.kernel] > 0:
            missing[launch.kernel] -= 1
            lost[launch.kernel, launch.stream, launch.where] += 1
    return lost


def _is_captured_stream(seen: CaptureSeen, launch: LaunchSeen) -> bool:
    return launch.stream in seen.capturing_streams and launch.stream not in LEGACY_STREAMS


def _kernels(nodes: Iterable[NodeSeen]) -> Counter[str]:
    return Counter(node.kernel or "?" for node in nodes if node.kind == "kernel")


def _node_list(nodes: tuple[NodeSeen, ...]) -> list[str]:
    listed = [node.kernel or node.kind for node in nodes[:_LISTED]]
    if len(nodes) > _LISTED:
        listed.append(f"... and {len(nodes) - _LISTED} more")
    return listed


def _graph_against_launches(seen: CaptureSeen) -> Iterator[Verdict]:
    """Yield an empty graph, and kernel nodes that no recorded launch accounts for."""
    if not _captured(seen):
        return
    if not seen.launches and _is_empty(seen):
        yield Verdict(
            "the graph is empty: the step launched nothing on the captured stream, "
            "so a replay does nothing",
            evidence={
                "capture_stream": stream_name(seen.capture_stream),
                "torch_warnings": list(seen.warnings),
            },
        )
        return
    if seen.graph.not_inspected is not None:
        return
    extra = _kernels(seen.graph.nodes)
    extra.subtract(launch.kernel for launch in seen.launches)
    for kernel, count in extra.items():
        if count <= 0:
            continue
        yield Verdict(
            f"the graph runs `{kernel}` {count} time(s) more than the launcher recorded",
            evidence={
                "kernel": kernel,
                "nodes_unaccounted": count,
                "launches_recorded": len(seen.launches),
                "graph_nodes": _node_list(seen.graph.nodes),
            },
            fix=_FIX_EXTRA,
            severity="error" if seen.only_recorded else "warning",
        )


def _is_empty(seen: CaptureSeen) -> bool:
    if seen.graph.not_inspected is None:
        return not any(node.kind in _WORK for node in seen.graph.nodes)
    return any("graph is empty" in warning.lower() for warning in seen.warnings)


_FIX_UNKNOWN = (
    "Print the graph's nodes and compare the names: the graph holds other kernels than the "
    "launcher recorded."
)
_FIX_EXTRA = (
    "Launch through cuverify's Kernel, or, where the step uses torch operations on purpose, say "
    "so: only_recorded=False."
)

RULES = (
    Rule(
        "CV101",
        "a launch is not in the graph",
        "Only the captured stream, and streams forked from it by events, are recorded. A kernel "
        "on the null stream or on a stream that somebody cached runs once, at capture time, "
        "without any error. Replays then skip it: outputs keep the values of the capture.",
        "Launch on the stream that is current at the call: read torch.cuda.current_stream() for "
        "each launch, open no other stream inside the step, and run CuPy under `with "
        "cupy.cuda.Stream.from_external(torch.cuda.current_stream())`.",
        _foreign_launches,
    ),
    Rule(
        "CV102",
        "the graph does not hold what the step launched",
        "An empty graph replays in no time and changes nothing; a node that no launch accounts "
        "for is work that nobody declared, such as a copy kernel of a dtype conversion.",
        "Check that the step launches on the captured stream's device and is not skipped while a "
        "capture runs (a branch on torch.cuda.is_current_stream_capturing(), a cached result).",
        _graph_against_launches,
    ),
)
