"""CV2xx: operations that a capture forbids or does not survive."""

from __future__ import annotations

from collections.abc import Iterator

from cuverify.validators.api_calls import WAITING_COPIES
from cuverify.validators.judging import (
    LIBRARIES,
    at,
    call_evidence,
    calls_of,
    captured,
    during,
    fault_of,
    node_place,
    nodes_of,
    pool_hits_of,
)
from cuverify.validators.observations import (
    LEGACY_STREAMS,
    CallSeen,
    CaptureSeen,
    is_main,
    stream_name,
)
from cuverify.validators.rule import Rule, Verdict

_LEGACY_WORDS = ("legacy stream", "StreamCaptureImplicit", "error 906")
_UNJOINED_WORDS = ("unjoined", "StreamCaptureUnjoined", "error 904")
_UNSAFE = ("sync", "query", "alloc", "free", "host_alloc", "host_free", "load", "destroy")


def _capture_failed(seen: CaptureSeen) -> Iterator[Verdict]:
    for fault in seen.faults:
        if fault.stage == "capture" and not fault.context_lost:
            yield Verdict(
                f"the capture failed: {fault.error}",
                where=fault.where,
                evidence={"error": fault.error, "inputs": fault.label},
            )


def _host_sync(seen: CaptureSeen) -> Iterator[Verdict]:
    told = set()
    calls = calls_of(seen, "sync")
    calls += [call for call in calls_of(seen, "copy") if call.api in WAITING_COPIES]
    for call in calls:
        if call.where in told and call.where is not None:
            continue
        told.add(call.where)
        yield Verdict(
            f"the step waits for the device: {at(call)}",
            where=call.where,
            evidence=call_evidence(call),
        )


def _foreign_allocation(seen: CaptureSeen) -> Iterator[Verdict]:
    told = set()
    for call in calls_of(seen, "alloc"):
        if call.torch_owned or LIBRARIES.search(call.origin):
            continue
        told.add(call.where)
        size = f" of {call.size} bytes" if call.size else ""
        yield Verdict(
            f"device memory{size} is allocated {during(call)}, and not by torch's allocator: "
            f"{at(call)}",
            where=call.where,
            evidence=call_evidence(call),
        )
    for hit in pool_hits_of(seen):
        if hit.fresh and hit.where not in told:
            told.add(hit.where)
            yield Verdict(
                f"CuPy's pool allocates {hit.size} bytes from the driver inside the capture",
                where=hit.where,
                evidence={"bytes": hit.size, "address": hex(hit.address)},
            )


def _legacy_stream(seen: CaptureSeen) -> Iterator[Verdict]:
    calls = [
        call
        for call in calls_of(seen, "record", "wait", "copy", "memset", "host_func")
        if call.stream is not None and call.stream in LEGACY_STREAMS
    ]
    for call in calls:
        yield Verdict(
            f"{at(call)} goes to {stream_name(call.stream or 0)} {during(call)}",
            where=call.where,
            evidence=call_evidence(call, stream=stream_name(call.stream or 0)),
        )
    if calls:
        return
    for name in ("strict", seen.replayed, "capture"):
        fault = fault_of(seen, name)
        if fault is not None and any(word in fault.error for word in _LEGACY_WORDS):
            yield Verdict(
                f"the {name} capture fails because something goes to the legacy stream: "
                f"{fault.error}",
                where=fault.where,
                evidence={"capture": name, "error": fault.error},
            )
            return


def _freed(seen: CaptureSeen) -> Iterator[Verdict]:
    for place in dict.fromkeys(seen.collections):
        yield Verdict(
            "garbage is collected inside the capture",
            where=place or None,
            evidence={"collections": len(seen.collections)},
        )
    for call in calls_of(seen, "free", "host_free", "destroy"):
        if call.torch_owned:
            continue
        what = "a graph is destroyed" if call.kind == "destroy" else "memory is freed"
        yield Verdict(
            f"{what} {during(call)}: {at(call)}", where=call.where, evidence=call_evidence(call)
        )


def _query(seen: CaptureSeen) -> Iterator[Verdict]:
    for call in calls_of(seen, "query"):
        yield Verdict(
            f"an event or a stream is asked whether it is done: {at(call)}",
            where=call.where,
            evidence=call_evidence(call),
        )


def _other_thread(seen: CaptureSeen) -> Iterator[Verdict]:
    told = set()
    for call in seen.calls:
        inside = call.thread == "other" and is_main(call.phase)
        if not inside or call.kind not in _UNSAFE or (call.where, call.kind) in told:
            continue
        told.add((call.where, call.kind))
        local = seen.attempt("retry thread_local")
        yield Verdict(
            f"another thread calls {at(call)} while the capture runs",
            where=call.where,
            evidence=call_evidence(
                call,
                thread_local_capture="not tried"
                if local is None
                else "failed"
                if local.fault
                else "succeeds",
            ),
        )


def _pinned(seen: CaptureSeen) -> Iterator[Verdict]:
    for call in calls_of(seen, "host_alloc"):
        cached = call.where is None and call.detail
        if LIBRARIES.search(call.origin) or (cached and not captured(seen)):
            continue  # a failed read of a value asks for a staging block, too
        yield Verdict(
            f"pinned host memory is allocated {during(call)}: {at(call)}",
            where=call.where,
            evidence=call_evidence(call, detail=call.detail) if cached else call_evidence(call),
        )


def _load(seen: CaptureSeen) -> Iterator[Verdict]:
    # an eager run before has loaded everything: what is loaded again is loaded at every call
    for call in _inside(seen, "load"):
        if not LIBRARIES.search(call.origin):
            yield Verdict(
                f"code is compiled or loaded {during(call)}: {at(call)}",
                where=call.where,
                evidence=call_evidence(call),
            )


def _workspace(seen: CaptureSeen) -> Iterator[Verdict]:
    told = set()
    for call in _inside(seen, "alloc", "host_alloc", "load"):
        found = LIBRARIES.search(call.origin)
        if not found or call.torch_owned or (call.where, call.origin) in told:
            continue
        told.add((call.where, call.origin))
        yield Verdict(
            f"{call.origin} makes a handle or a workspace {during(call)}: {at(call)}",
            where=call.where,
            evidence=call_evidence(call),
        )


def _inside(seen: CaptureSeen, *kinds: str) -> list[CallSeen]:
    """Return calls of the captures alone, the one of a fresh step without warm-up included."""
    found = calls_of(seen, *kinds)
    places = {(call.where, call.api) for call in found}
    for call in seen.calls:
        inside = call.phase == "fresh 0" and call.kind in kinds and call.thread != "other"
        if inside and (call.where, call.api) not in places:
            places.add((call.where, call.api))
            found.append(call)
    return found


def _unjoined(seen: CaptureSeen) -> Iterator[Verdict]:
    for fault in seen.faults:
        text = fault.error.lower()
        if fault.stage == "capture" and any(word.lower() in text for word in _UNJOINED_WORDS):
            waits = [call for call in calls_of(seen, "wait") if call.stream != seen.capture_stream]
            yield Verdict(
                "a stream that was forked from the captured one is not joined again",
                where=waits[-1].where if waits else fault.where,
                evidence={
                    "error": fault.error,
                    "forked": [stream_name(call.stream or 0) for call in waits],
                },
            )


def _host_nodes(seen: CaptureSeen) -> Iterator[Verdict]:
    for node in nodes_of(seen, "host"):
        yield Verdict(
            "the graph calls a host function at each replay",
            where=node_place(seen, node),
            evidence={"node": node.kind, "body": node.body},
        )


def _memory_nodes(seen: CaptureSeen) -> Iterator[Verdict]:
    for node in nodes_of(seen, "mem_alloc", "mem_free"):
        what = "allocates" if node.kind == "mem_alloc" else "frees"
        size = f" {node.size} bytes" if node.size else ""
        yield Verdict(
            f"the graph {what}{size} of device memory at each replay",
            evidence={
                "node": node.kind,
                "bytes": node.size,
                "address": hex(node.target.address) if node.target else "",
            },
        )


def _pageable(seen: CaptureSeen) -> Iterator[Verdict]:
    found = False
    for node in nodes_of(seen, "memcpy"):
        for side, end in (("source", node.source), ("target", node.target)):
            if end is not None and end.space == "pageable":
                found = True
                yield Verdict(
                    f"a copy of {node.size} bytes has pageable host memory as its {side}: {end}",
                    where=node_place(seen, node),
                    evidence={"side": side, "address": hex(end.address), "bytes": node.size},
                )
    if found:
        return
    for fault in seen.faults:
        text = fault.error.lower()
        if fault.stage == "capture" and ("pinned" in text or "pageable" in text):
            yield Verdict(
                f"torch refuses a copy from pageable memory: {fault.error}",
                where=fault.where,
                evidence={"error": fault.error},
            )


def _leaked_pool(seen: CaptureSeen) -> Iterator[Verdict]:
    for memory in seen.memory:
        if memory.what == "failed capture" and memory.private > 0:
            yield Verdict(
                f"the failed capture left {memory.private} bytes reserved in its private pool",
                evidence={
                    "bytes": memory.private,
                    "reserved_before": memory.reserved[0],
                    "reserved_after_clean_up": memory.reserved[-1],
                },
            )
            return


def _armed(seen: CaptureSeen) -> Iterator[Verdict]:
    for name in seen.armed:
        yield Verdict(f"{name} is on while the step is captured", evidence={"mode": name})


def _autograd(seen: CaptureSeen) -> Iterator[Verdict]:
    told = set()
    for call in seen.calls:
        if call.thread == "autograd" and is_main(call.phase) and call.where not in told:
            told.add(call.where)
            yield Verdict(
                f"autograd's own thread works inside the capture: {at(call)}",
                where=call.where,
                evidence=call_evidence(call, kernel=call.kernel or ""),
            )


RULES = (
    Rule(
        "CV201",
        "the capture failed",
        "A capture refuses whatever needs an answer now: reading a value back, waiting for the "
        "device, allocating outside torch's allocator, copying from pageable memory. CUDA names "
        "neither the call nor the line; the error shows at the end of the capture.",
        "The other findings say which call it was. Without one, look for .item(), bool() or .cpu() "
        "of a CUDA tensor, torch.cuda.synchronize(), first-time compilation and allocations inside "
        "the step; move them before the capture.",
        _capture_failed,
    ),
    Rule(
        "CV202",
        "the step waits for the device",
        "A capture has no result to wait for. The call fails, and the error that reaches Python "
        "comes from a later call and names neither.",
        "Keep the value on the device: let the kernel read it from a buffer. What the host must "
        "know is read before the capture, or after the replay.",
        _host_sync,
    ),
    Rule(
        "CV203",
        "device memory is allocated outside torch's allocator",
        "cudaMalloc is refused in a capture, or, in relaxed mode, leaves memory that the graph "
        "writes and that belongs to somebody else later. Memory of torch.empty() inside a capture "
        "comes from the graph's own pool and is legal.",
        "Allocate the buffer once, before the capture, and pass it in (out=), or let CuPy take "
        "memory from torch: cupy.cuda.set_allocator over torch's allocator.",
        _foreign_allocation,
    ),
    Rule(
        "CV204",
        "the step depends on the legacy stream",
        "Work on the null stream would wait for every blocking stream, the captured one included. "
        "A capture on a non-blocking stream lets it through without an error, and it runs once; on "
        "a blocking stream, and for event records and waits, the capture is invalidated.",
        "Make the captured stream current for the library that is called: `with "
        "cupy.cuda.Stream.from_external(torch.cuda.current_stream())` around CuPy and around "
        "from_dlpack, or do the exchange before the capture.",
        _legacy_stream,
    ),
    Rule(
        "CV205",
        "memory is freed or a graph destroyed inside the capture",
        "Freeing device memory and destroying a graph synchronise: they invalidate a capture. "
        "Python's garbage collector does both at any moment, for objects of somebody else.",
        "gc.collect() before the capture and gc.disable() during it; keep buffers and graphs alive "
        "until it has ended.",
        _freed,
    ),
    Rule(
        "CV206",
        "an event or a stream is queried inside the capture",
        "cudaEventQuery of an event that was recorded in the capture invalidates it in every mode. "
        "Watchdog threads and host allocators query in the background.",
        "Query before or after the capture. An order between streams needs wait_event, which is "
        "recorded.",
        _query,
    ),
    Rule(
        "CV207",
        "another thread makes an unsafe call while the capture runs",
        "In the mode `global`, torch's default, any thread's allocation, free or synchronisation "
        "ends the capture: a data loader that pins memory is enough, now and then.",
        "Stop such threads while graphs are captured, or capture with "
        'capture_error_mode="thread_local".',
        _other_thread,
    ),
    Rule(
        "CV208",
        "pinned host memory is allocated inside the capture",
        "Pinning is an unsafe call, and the allocator that recycles pinned blocks queries events "
        "to know which are free.",
        "Allocate the staging buffer once, before the capture, and keep it.",
        _pinned,
    ),
    Rule(
        "CV209",
        "code is compiled or loaded inside the capture",
        "A kernel that meets its first launch in a capture is compiled and loaded there. Drivers "
        "before 580 refuse it, newer ones let it pass; autotuners measure nothing there.",
        "Run the step once, with the same shapes and types, on the same stream before the capture.",
        _load,
    ),
    Rule(
        "CV210",
        "a library makes its handle or workspace inside the capture",
        "cuBLAS, cuDNN and cuSOLVER allocate at the first call of a handle on a stream.",
        "Call the operation once before the capture, on the captured stream, with the same shapes.",
        _workspace,
    ),
    Rule(
        "CV211",
        "a side stream is not joined",
        "A stream that waited for an event of the captured one takes part in the capture. Unless "
        "the captured stream waits for it in turn, the end of the capture fails.",
        "End the side work with captured_stream.wait_stream(side_stream).",
        _unjoined,
    ),
    Rule(
        "CV212",
        "the graph holds a host function",
        "A host callback needs the GIL, or a thread that may be waiting for the very replay; CuPy "
        "drops a callback's closure once the capture is over.",
        "Do the host's work between two replays.",
        _host_nodes,
    ),
    Rule(
        "CV213",
        "the graph allocates or frees memory",
        "Allocation nodes hold memory between replays and forbid a second launch before the memory "
        "is freed; a free in another order fails.",
        "Allocate before the capture, or with torch inside it: its private pool needs no nodes.",
        _memory_nodes,
    ),
    Rule(
        "CV214",
        "a copy has pageable host memory at one end",
        "The node keeps the address. Whatever lies there at a replay is copied, after the array "
        "was freed, too; and the copy is staged through memory of the driver's.",
        "Use pinned memory that lives as long as the graph, or copy before the replay.",
        _pageable,
    ),
    Rule(
        "CV215",
        "a failed capture keeps its private pool",
        "torch's allocator goes on serving from the pool of the capture that failed, and never "
        "gives it back: after a few attempts the device is full.",
        "Let nothing raise inside torch.cuda.graph(); capture anew in a fresh process after a "
        "failure.",
        _leaked_pool,
        severity="warning",
    ),
    Rule(
        "CV216",
        "a debugging mode or hook is on around the capture",
        "What reports synchronisations synchronises, or raises in the middle of a capture; a "
        "profiler makes calls of its own.",
        "Turn it off before the capture, or arm it inside only.",
        _armed,
    ),
    Rule(
        "CV217",
        "autograd works inside the capture",
        "The backward pass runs on a thread of its own, whose calls race with the end of the "
        "capture and fail in the mode `thread_local`.",
        "Capture under torch.no_grad(), or use torch.cuda.make_graphed_callables for a training "
        "step.",
        _autograd,
    ),
)
