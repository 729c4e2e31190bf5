"""CV4xx: memory that does not live as long as the graph, or that others write."""

from __future__ import annotations

import re
from collections.abc import Iterator

from cuverify.validators.judging import (
    disturbed,
    drift_evidence,
    in_graph,
    node_place,
    nodes_of,
    pointers_of,
    pool_hits_of,
)
from cuverify.validators.observations import CaptureSeen, is_main
from cuverify.validators.rule import Rule, Verdict

_LIBRARY_KERNELS = re.compile(r"cublas|gemm|gemv|splitk|cudnn|xmma|cutlass", re.IGNORECASE)
_HIGH = 1 << 40
_LIVE = "active_allocated"


def _freed(seen: CaptureSeen) -> Iterator[Verdict]:
    told = set()
    certain = False
    for node, what, pointer in pointers_of(seen):
        dead = pointer.space == "torch" and pointer.state != _LIVE and pointer.pool == (0, 0)
        if not dead or (node.title, pointer.address) in told:
            continue
        told.add((node.title, pointer.address))
        certain = certain or pointer.sure
        yield Verdict(
            f"{what} of `{node.title}` points to {pointer}: the tensor was freed, and the block "
            "belongs to whoever allocates next",
            where=node_place(seen, node),
            evidence={
                "node": node.title,
                "holds": what,
                "address": hex(pointer.address),
                "state": pointer.state,
                "certain": pointer.sure,
            },
            severity=None if pointer.sure else "warning",
        )
    if certain:
        return
    for trial, drift in disturbed(seen, "interference"):
        yield Verdict(
            f"after other code allocated, wrote and freed memory the replay differs: "
            f"{drift.mismatch}",
            evidence=drift_evidence(drift, between_the_replays=trial.detail),
        )


def _resized(seen: CaptureSeen) -> Iterator[Verdict]:
    sizes = {tensor.path: tensor.size for tensor in seen.tensors}
    for each in seen.rebound:
        if each.during.startswith("an eager run") and in_graph(seen, each.before):
            yield Verdict(
                f"{each.during} moves `{each.path}` from {each.before:#x} to {each.after:#x}; the "
                "graph goes on with the old memory",
                evidence={
                    "name": each.path,
                    "captured": hex(each.before),
                    "now": hex(each.after),
                    "captured_bytes": sizes.get(each.path, 0),
                },
            )


def _foreign_pools(seen: CaptureSeen, library: bool) -> Iterator[Verdict]:
    told = set()
    for node, what, pointer in pointers_of(seen):
        foreign = pointer.space == "torch" and pointer.pool not in (None, (0, 0), seen.pool)
        if not foreign or bool(_LIBRARY_KERNELS.search(node.title)) != library:
            continue
        if (node.title, pointer.address) in told:
            continue
        told.add((node.title, pointer.address))
        yield Verdict(
            f"{what} of `{node.title}` points into the private pool {pointer.pool} of another "
            f"graph: {pointer}",
            where=node_place(seen, node),
            evidence={
                "node": node.title,
                "address": hex(pointer.address),
                "pool": list(pointer.pool or ()),
                "pool_of_this_graph": list(seen.pool or ()),
            },
        )


def _library_workspace(seen: CaptureSeen) -> Iterator[Verdict]:
    yield from _foreign_pools(seen, library=True)


def _shared_pool(seen: CaptureSeen) -> Iterator[Verdict]:
    yield from _foreign_pools(seen, library=False)


def _kept_scratch(seen: CaptureSeen) -> Iterator[Verdict]:
    told = set()
    for each in seen.kept:
        judged = is_main(each.attempt) or each.attempt == "fresh 0"
        if not judged or each.path.startswith("output ") or each.path in told:
            continue
        told.add(each.path)
        warmed = "" if is_main(each.attempt) else ", when it is captured without a warm-up"
        yield Verdict(
            f"`{each.path}` is kept after the capture and lies in the graph's private pool"
            f"{warmed}: other graphs of that pool, and the graph itself, write over it",
            evidence={
                "name": each.path,
                "address": hex(each.address),
                "bytes": each.size,
                "capture": each.attempt,
            },
        )


def _output_in_pool(seen: CaptureSeen) -> Iterator[Verdict]:
    for each in seen.kept:
        if is_main(each.attempt) and each.path.startswith("output "):
            name = each.path.removeprefix("output ")
            yield Verdict(
                f"output `{name}` lies in the graph's private pool: the next replay, or another "
                "graph of the pool, overwrites what the caller still holds",
                evidence={"output": name, "address": hex(each.address), "bytes": each.size},
            )


def _borrowed(seen: CaptureSeen) -> Iterator[Verdict]:
    if any(disturbed(seen, "free memory")):
        return  # an eager run reads what it never wrote, too: CV605
    for trial, drift in disturbed(seen, "pool"):
        yield Verdict(
            f"the replay depends on what the graph's private pool holds between replays: "
            f"{drift.mismatch}",
            evidence=drift_evidence(drift, changed=trial.detail),
        )


def _unloaded(seen: CaptureSeen) -> Iterator[Verdict]:
    told = set()
    for call in seen.calls:
        after = is_main(call.phase) or call.phase in ("between replays", "refill")
        if call.kind == "unload" and after and call.where not in told:
            told.add(call.where)
            yield Verdict(
                f"`{call.api}` unloads code while a graph may hold it",
                where=call.where,
                evidence={"call": call.api, "during": call.phase},
            )


def _pinned(seen: CaptureSeen) -> Iterator[Verdict]:
    nodes = [
        node
        for node in nodes_of(seen, "memcpy")
        if node.source is not None and node.source.space == "pinned" and not node.source.owner
    ]
    found = False
    for trial, drift in disturbed(seen, "pinned"):
        found = True
        yield Verdict(
            "the graph copies from pinned memory that its owner gave back: after other pinned "
            f"allocations {drift.mismatch}",
            where=node_place(seen, nodes[0]) if nodes else None,
            evidence=drift_evidence(drift, between_the_replays=trial.detail),
        )
    for node in () if found else nodes:
        yield Verdict(
            f"a copy of {node.size} bytes reads pinned memory that no tensor of the step holds: "
            f"{node.source}",
            where=node_place(seen, node),
            evidence={"bytes": node.size, "source": str(node.source)},
            severity="warning",
        )


def _pool_hit(seen: CaptureSeen) -> Iterator[Verdict]:
    told = set()
    for hit in pool_hits_of(seen):
        if not hit.freed or hit.where in told:
            continue
        told.add(hit.where)
        used = any(
            hit.address <= pointer.address < hit.address + max(1, hit.size)
            for _, _, pointer in pointers_of(seen)
        )
        yield Verdict(
            f"CuPy's pool gave {hit.size} bytes at {hit.address:#x} to the captured step and took "
            "them back before it ended: the next cupy.empty gets the same memory, and replays "
            "write into it",
            where=hit.where,
            evidence={
                "address": hex(hit.address),
                "bytes": hit.size,
                "named_by_the_graph": used,
            },
        )


def _bad_pointer(seen: CaptureSeen) -> Iterator[Verdict]:
    told = set()
    for node, what, pointer in pointers_of(seen):
        if node.kind != "kernel" or pointer.space not in ("pageable", "unmapped"):
            continue
        if not pointer.sure or (node.title, pointer.address) in told:
            continue
        if _LIBRARY_KERNELS.search(node.title):
            continue  # cuBLAS leaves the host's address of a scalar that it passes by value
        told.add((node.title, pointer.address))
        meaning = (
            "ordinary host memory, which the device cannot count on"
            if pointer.space == "pageable"
            else "no mapped memory"
        )
        yield Verdict(
            f"{what} of `{node.title}` is {pointer.address:#x}: {meaning}",
            where=node_place(seen, node),
            evidence={"node": node.title, "holds": what, "space": pointer.space},
            # a large number of elements may look like an address of a heap that lies low
            severity=None if pointer.address >= _HIGH else "warning",
        )


def _race(seen: CaptureSeen) -> Iterator[Verdict]:
    for trial, drift in disturbed(seen, "overlap"):
        yield Verdict(
            f"a refill for the next step reaches a replay that has not run yet: {drift.mismatch}",
            evidence=drift_evidence(drift, done=trial.detail),
        )


RULES = (
    Rule(
        "CV401",
        "the graph names memory that was freed",
        "A graph keeps addresses and no tensors alive. A freed block is still mapped, so nothing "
        "fails: the kernel reads what somebody else put there, some allocations later.",
        "Keep every tensor that the captured step touches alive as long as the graph, for instance "
        "as attributes of the object that owns the graph.",
        _freed,
    ),
    Rule(
        "CV402",
        "a workspace moved after the capture",
        "A buffer that grows on demand (resize_, a larger torch.empty) is a new buffer. The graph "
        "has the address of the old one, which is free by now.",
        "Size the workspace for the maximum before the first capture, and never grow it; refuse a "
        "batch that does not fit.",
        _resized,
    ),
    Rule(
        "CV403",
        "a library's workspace belongs to another graph's pool",
        "cuBLAS keeps one workspace a handle and stream. Made inside a capture it lies in that "
        "graph's private pool; later graphs that use it dangle once that graph is gone.",
        "Warm the library up on the stream before the first capture, or set the workspace yourself "
        "(CUBLAS_WORKSPACE_CONFIG, torch._C._cuda_clearCublasWorkspaces() between graphs).",
        _library_workspace,
    ),
    Rule(
        "CV404",
        "Python keeps scratch that was made inside the capture",
        "A tensor cached in an attribute during the capture lies in the graph's private pool. "
        "Eager code and other graphs that use it meet memory that each replay overwrites.",
        "Make scratch before the capture (warm up on the captured stream), or do not keep it.",
        _kept_scratch,
    ),
    Rule(
        "CV405",
        "an output lies in the graph's own pool",
        "The result of one replay is gone at the next one, and another graph of the same pool may "
        "use its memory in between.",
        "Write into a static tensor from outside the capture (out=), or clone the result before "
        "the next replay.",
        _output_in_pool,
    ),
    Rule(
        "CV406",
        "the graph uses memory of another graph's pool",
        "Graphs that share memory without sharing a pool, or that are replayed in another order "
        "than they were captured, overwrite each other's results.",
        "Pass results between graphs in static tensors; share one pool only among graphs that are "
        "replayed one after the other in the order of their capture.",
        _shared_pool,
    ),
    Rule(
        "CV407",
        "the result depends on private memory between replays",
        "The graph reads memory of its pool that it has not written in this replay: it relies on "
        "what the last one left, and on nobody borrowing the pool in between.",
        "Keep state in a static tensor outside of the pool.",
        _borrowed,
    ),
    Rule(
        "CV408",
        "code is unloaded while a graph may hold it",
        "A node holds a kernel's handle, not its module. Whether a replay after the unload still "
        "works is undefined.",
        "Keep the module (RawModule, the compiled function) as long as the graph.",
        _unloaded,
    ),
    Rule(
        "CV409",
        "pinned staging memory is recycled under the graph",
        "The copy node reads the pinned block anew at each replay. Once its tensor is gone the "
        "block goes to the next pinned allocation, and the graph uploads that.",
        "Keep the pinned tensor as long as the graph, and write into it only when no replay is "
        "under way.",
        _pinned,
    ),
    Rule(
        "CV410",
        "another allocator's pool lends captured memory to others",
        "CuPy's pool serves a capture without any error when it has a free block, and takes the "
        "block back when the array goes away. Replays and eager code then share it.",
        "Allocate before the capture and keep the array, or use cupy.cuda.set_allocator with "
        "torch's allocator, whose private pools know about graphs.",
        _pool_hit,
    ),
    Rule(
        "CV411",
        "a kernel gets a pointer to no device memory",
        "A numpy address, a tensor on the CPU or a stale address went in as a pointer: an illegal "
        "access at the replay, or, on systems with unified addressing, silent nonsense.",
        "Pass tensor.data_ptr() of a CUDA tensor that is alive.",
        _bad_pointer,
    ),
    Rule(
        "CV412",
        "the next step's inputs can overtake a replay",
        "A replay is enqueued, not done, when the call returns. Host writes into pinned or managed "
        "memory that the graph reads do not wait for it: rare wrong results under overlap.",
        "Wait for an event that was recorded behind the replay before the buffer is written "
        "again, or use two buffers in turn.",
        _race,
    ),
)
