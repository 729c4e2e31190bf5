"""CV1xx: work that is not in the graph."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator

from cuverify.validators.judging import (
    call_evidence,
    capture_failed,
    captured,
    in_graph,
    launches_of,
)
from cuverify.validators.observations import (
    LEGACY_STREAMS,
    CallSeen,
    CaptureSeen,
    LaunchSeen,
    NodeSeen,
    stream_name,
)
from cuverify.validators.rule import Rule, Verdict

# node types that do work at a replay; the rest only order it
_WORK = frozenset({"kernel", "memcpy", "memset", "graph", "conditional", "host", "batch_mem_op"})
_LISTED = 12  # nodes named in a finding; the summary has the count


def _foreign_launches(seen: CaptureSeen) -> Iterator[Verdict]:
    """Yield launches that the graph lacks: by its nodes where they are known, else by streams."""
    if not captured(seen):
        yield from _legacy_launches(seen)
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
            "launches_recorded": len(launches_of(seen)),
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


def _legacy_launches(seen: CaptureSeen) -> Iterator[Verdict]:
    """Yield launches of the eager run on the legacy stream, where there was no graph to compare."""
    if not capture_failed(seen):
        return
    told = set()
    for call in seen.calls:
        outside = call.kind == "launch" and call.phase == "eager" and call.stream in LEGACY_STREAMS
        if outside and (call.kernel, call.where) not in told:
            told.add((call.kernel, call.where))
            yield Verdict(
                f"`{call.kernel}` is launched on stream {stream_name(call.stream or 0)}, whatever "
                "stream is current: a capture would not hold it",
                where=call.where,
                evidence={"kernel": call.kernel, "seen_in": "the eager run before the capture"},
            )


def _lost(seen: CaptureSeen) -> Counter[tuple[str, int, str | None]]:
    """Count the launches that the graph lacks by kernel, stream and place."""
    lost: Counter[tuple[str, int, str | None]] = Counter()
    if seen.graph.not_inspected is not None or seen.graph.unseen_bodies:
        for launch in launches_of(seen):
            if launch.stream not in seen.capturing_streams:
                lost[launch.kernel, launch.stream, launch.where] += 1
        return lost
    missing = Counter(launch.kernel for launch in launches_of(seen))
    missing.subtract(_kernels(seen.graph.nodes))
    # a launch on a stream outside the capture is the likelier culprit of two of one kernel
    for launch in sorted(launches_of(seen), key=lambda launch: _is_captured_stream(seen, launch)):
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
    if not captured(seen):
        return
    if not launches_of(seen) and _is_empty(seen):
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
    known = seen.launches if seen.only_recorded else launches_of(seen)
    extra.subtract(launch.kernel for launch in known)
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


def _cached_stream(seen: CaptureSeen) -> Iterator[Verdict]:
    """Yield lost launches on a stream that was current in an earlier run, and is not now."""
    if not captured(seen):
        return
    earlier = {handle: name for name, handle in seen.streams.items() if name != "capture"}
    for (kernel, stream, where), count in _lost(seen).items():
        if stream in earlier and stream not in seen.capturing_streams | LEGACY_STREAMS:
            yield Verdict(
                f"`{kernel}` was launched on stream {stream_name(stream)}, which was current in "
                f"the {earlier[stream]} run before; stream {stream_name(seen.capture_stream)} is "
                "current and captured now",
                where=where,
                evidence={
                    "kernel": kernel,
                    "launches": count,
                    "cached_stream": stream_name(stream),
                    "capture_stream": stream_name(seen.capture_stream),
                },
            )


# what a cold stream must not bring about: state that a library or a step keeps by stream
_STATE = frozenset({"alloc", "host_alloc", "load"})


def _cold_stream(seen: CaptureSeen) -> Iterator[Verdict]:
    """Yield what a capture on a stream without warm-up does, and one with it does not."""
    warm, cold = seen.attempt(seen.replayed), seen.attempt("cold")
    if warm is None or cold is None or warm.fault is not None or capture_failed(seen):
        return
    if cold.fault is not None and not cold.fault.context_lost:
        yield Verdict(
            "the capture succeeds on the stream of the warm-up and fails on one without: "
            f"{cold.fault.error}",
            where=cold.fault.where,
            evidence={"error": cold.fault.error},
        )
    known = {(call.where, call.kind) for call in seen.calls if call.phase == seen.replayed}
    told: set[tuple[str | None, str]] = set()
    for call in seen.calls:
        fresh = call.kind in _STATE and not call.torch_owned and call.phase == "cold"
        if fresh and (call.where, call.kind) not in known | told:
            told.add((call.where, call.kind))
            yield Verdict(
                f"on a stream without warm-up the step calls `{call.api}`, "
                "which it does not on the stream of the warm-up",
                where=call.where,
                evidence=call_evidence(call),
            )


def _ignored_input(seen: CaptureSeen) -> Iterator[Verdict]:
    done = set()
    for response in seen.responses:
        stale = response.how == "stale" and response.ignored
        deaf = response.how == "alone" and response.reference_moves and not response.replay_moves
        if not (stale or deaf) or response.input in done:
            continue
        done.add(response.input)
        if stale:
            message = (
                f"the replay ignores what is in `{response.input}` now: its result is that of "
                "the content at the capture"
            )
        else:
            message = (
                f"the replay ignores `{response.input}`: changed alone, it moves "
                f"{response.reference_moves} elements of the reference and none of the replay"
            )
        yield Verdict(
            message,
            evidence={
                "input": response.input,
                "elements_that_must_move": response.reference_moves,
                "elements_moved": response.replay_moves,
                "found_by": "one input at a time" if deaf else "the input's old content",
            },
        )


def _rebound(seen: CaptureSeen) -> Iterator[Verdict]:
    declared = {tensor.address for tensor in seen.tensors if tensor.role != "held"}
    for each in seen.rebound:
        if each.during != "capture":
            continue
        private = any(kept.address == each.after for kept in seen.kept)
        known = each.before in declared or each.after in declared
        if private or known or in_graph(seen, each.before):
            yield Verdict(
                f"the captured step binds `{each.path}` to another tensor: "
                f"{each.before:#x} before, {each.after:#x} after. A replay binds nothing",
                evidence={"name": each.path, "before": hex(each.before), "after": hex(each.after)},
            )


def _capture_only(seen: CaptureSeen) -> Iterator[Verdict]:
    """Yield kernels that the capture launches and the warm-up did not, or the other way."""
    if not captured(seen) or seen.attempt(seen.replayed) is None:
        return
    warm, inside = (
        Counter(call.kernel for call in seen.calls if call.kind == "launch" and call.phase == phase)
        for phase in ("warm-up", seen.replayed)
    )
    if not warm or not inside:
        return
    for kernel in dict.fromkeys([*inside, *warm]):
        if inside[kernel] == warm[kernel]:
            continue
        place = next(
            (
                call.where
                for call in seen.calls
                if call.kernel == kernel and call.phase in ("warm-up", seen.replayed)
            ),
            None,
        )
        yield Verdict(
            f"`{kernel}` is launched {inside[kernel]} time(s) in the capture and {warm[kernel]} in "
            "the last warm-up: the step takes another way while it is captured",
            where=place,
            evidence={
                "kernel": kernel,
                "in_capture": inside[kernel],
                "in_warm_up": warm[kernel],
            },
        )


def _other_device(seen: CaptureSeen) -> Iterator[Verdict]:
    for call in _device_changes(seen):
        yield Verdict(
            f"device {call.address} is made current inside the capture on device {seen.device}",
            where=call.where,
            evidence=call_evidence(call, device=call.address, captured_device=seen.device),
        )


def _device_changes(seen: CaptureSeen) -> Iterator[CallSeen]:
    for call in seen.calls:
        if call.kind == "device" and call.phase == seen.replayed and call.address != seen.device:
            yield call


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
    Rule(
        "CV103",
        "a launch went to a stream that was cached",
        "A stream that was read once and kept is not the one that is captured later. The kernel "
        "runs on the old one, at capture time only; timings of such a graph are too good.",
        "Read torch.cuda.current_stream() at each launch. A cache of prepared launches needs the "
        "stream in its key, or must not hold it.",
        _cached_stream,
    ),
    Rule(
        "CV104",
        "the step needs a warm-up on the very stream that is captured",
        "State that is made at the first use of a stream (an allocator's arena, a workspace, a "
        "communicator) is missing when the capture runs on another stream than the warm-up, as "
        "torch.cuda.graph does without stream=.",
        "Warm up on the stream that is captured: `with torch.cuda.stream(s)` for the warm-up and "
        "torch.cuda.graph(g, stream=s), or make the state before any capture.",
        _cold_stream,
        severity="warning",
    ),
    Rule(
        "CV105",
        "an input is left outside of the graph",
        "The replay reads a copy that was made at the capture, or nothing of the input at all. "
        "The result is right for the captured input and wrong for all others.",
        "Copy the input into the static buffer that the kernels read, outside of the graph and "
        "before each replay, or do the copy on the captured stream inside of it.",
        _ignored_input,
    ),
    Rule(
        "CV106",
        "the captured step rebinds a tensor",
        "`self.buffer = new` is work of Python: it happens once, at the capture. A replay goes on "
        "with the tensors that were bound then, while the rest of the program sees the new ones.",
        "Write in place: `self.buffer.copy_(new)`; capture one graph for each of two buffers that "
        "are swapped.",
        _rebound,
    ),
    Rule(
        "CV107",
        "the capture takes another way than the warm-up",
        "A branch on torch.cuda.is_current_stream_capturing(), or on a counter of calls, was never "
        "warmed up: it compiles, allocates or initialises inside the capture, and what was tested "
        "eagerly is not what is replayed.",
        "Take the same branch in both, or warm up the one that is captured.",
        _capture_only,
    ),
    Rule(
        "CV108",
        "another device is made current inside the capture",
        "A capture belongs to a stream of one device. Launches on another device are not in it, or "
        "invalidate it.",
        "Make the device current before the capture, and capture one graph a device.",
        _other_device,
    ),
)
