"""What several rule families ask of a record. Nothing here touches a device."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from cuverify.validators.observations import (
    CallSeen,
    CaptureSeen,
    DriftSeen,
    Fault,
    LaunchSeen,
    NodeSeen,
    PointerSeen,
    PoolHitSeen,
    TrialSeen,
    is_main,
)

LIBRARIES = re.compile(r"cublas|cudnn|cusolver|cusparse|cufft|curand|nccl|cutensor", re.IGNORECASE)
"""Libraries that make handles and workspaces of their own."""

SMALL = 1e-3
"""Relative distance of two runs that rounding in another order can explain."""


def captured(seen: CaptureSeen) -> bool:
    """Tell whether there is a graph that was replayed."""
    return "capture" in seen.stages


def capture_failed(seen: CaptureSeen) -> bool:
    """Tell whether the capture in the usual mode failed."""
    return any(fault.stage == "capture" for fault in seen.faults)


def calls_of(
    seen: CaptureSeen, *kinds: str, threads: Iterable[str] = ("main", "autograd")
) -> list[CallSeen]:
    """Return the calls of the step in the capture, each place and call once.

    Where the capture broke off, what came after is taken from the eager run before it.

    Parameters
    ----------
    seen : CaptureSeen
    *kinds : str
    threads : iterable of str
    """
    wanted = set(threads)
    inside = [
        call
        for call in seen.calls
        if call.kind in kinds and call.thread in wanted and is_main(call.phase)
    ]
    if capture_failed(seen):
        inside += [
            call
            for call in seen.calls
            if call.kind in kinds and call.thread in wanted and call.phase == "eager"
        ]
    once: dict[tuple[Any, ...], CallSeen] = {}
    for call in inside:
        once.setdefault((call.where, call.kind, call.api if call.where is None else ""), call)
    return list(once.values())


def pool_hits_of(seen: CaptureSeen) -> list[PoolHitSeen]:
    """Return what CuPy's pool gave to the captured step, each place once; see `calls_of`."""
    once: dict[tuple[str | None, int], PoolHitSeen] = {}
    for hit in sorted(seen.pool_hits, key=lambda hit: hit.phase):
        if hit.phase != "eager" or capture_failed(seen):
            once.setdefault((hit.where, hit.size), hit)
            if hit.freed:
                once[hit.where, hit.size] = hit
    return list(once.values())


def call_evidence(call: CallSeen, **more: Any) -> dict[str, Any]:
    """Return the fields of a call that say something."""
    found: dict[str, Any] = {"call": call.api, "during": call.phase}
    if call.origin:
        found["made_by"] = call.origin
    if call.error:
        found["result"] = call.error
    if call.size:
        found["bytes"] = call.size
    if call.thread != "main":
        found["thread"] = call.thread
    return {**found, **more}


def at(call: CallSeen) -> str:
    """Name a call for a sentence."""
    origin = f" (called by {call.origin})" if call.origin else ""
    return f"`{call.api}`{origin}"


def during(call: CallSeen) -> str:
    """Say when a call was made, for a sentence."""
    if call.phase == "eager":
        return "in the eager run (the capture broke off before it)"
    if call.phase.startswith("fresh"):
        return "in a capture without a warm-up"
    return "inside the capture"


def launches_of(seen: CaptureSeen) -> tuple[LaunchSeen, ...]:
    """Return the launches of the capture: of every library where CUPTI saw them."""
    found = tuple(
        LaunchSeen(call.kernel or "?", call.stream or 0, where=call.where)
        for call in seen.calls
        if call.kind == "launch" and call.phase == seen.replayed
    )
    # a launcher of our own knows more, and sees as much where nothing else launches
    return found if len(found) > len(seen.launches) else seen.launches


def where_launched(seen: CaptureSeen, kernel: str | None, occurrence: int = 0) -> str | None:
    """Return the place of the n-th launch of a kernel in the capture."""
    places = [
        call.where
        for call in seen.calls
        if call.kind == "launch" and call.phase == seen.replayed and call.kernel == kernel
    ]
    if occurrence < len(places):
        return places[occurrence]
    return places[0] if places else None


def nodes_of(seen: CaptureSeen, *kinds: str) -> list[NodeSeen]:
    """Return the nodes of some kinds of the replayed graph."""
    return [node for node in seen.graph.nodes if node.kind in kinds]


def pointers_of(seen: CaptureSeen) -> Iterator[tuple[NodeSeen, str, PointerSeen]]:
    """Yield each address that the graph holds, with its node and what holds it."""
    numbers = {
        (launch.kernel, index)
        for launch in seen.launches
        for index, name in enumerate(launch.parameters)
        if name in launch.numbers
    }
    for node in seen.graph.nodes:
        for param in node.params:
            if (node.kernel, param.index) in numbers:
                continue
            for pointer in param.pointers:
                name = f" `{param.name}`" if param.name else ""
                yield node, f"argument {param.index}{name}", pointer
        if node.source is not None:
            yield node, "source", node.source
        if node.target is not None:
            yield node, "target", node.target


def node_place(seen: CaptureSeen, node: NodeSeen) -> str | None:
    """Return where a node was launched, or copied."""
    if node.kind == "kernel":
        same = [each for each in seen.graph.nodes if each.kernel == node.kernel]
        return where_launched(seen, node.kernel, _index(same, node))
    kinds = {"memcpy": "copy", "memset": "memset", "host": "host_func"}
    calls = [
        call
        for call in seen.calls
        if call.phase == seen.replayed and call.kind == kinds.get(node.kind)
    ]
    same = [each for each in seen.graph.nodes if each.kind == node.kind]
    number = _index(same, node)
    return calls[number].where if number < len(calls) else None


def _index(nodes: list[NodeSeen], node: NodeSeen) -> int:
    return next((number for number, each in enumerate(nodes) if each is node), 0)


def in_graph(seen: CaptureSeen, address: int) -> bool:
    """Tell whether the graph holds an address, or one in the block that begins there."""
    for _, _, pointer in pointers_of(seen):
        if pointer.address == address:
            return True
        if pointer.block is not None and pointer.block[0] <= address <= pointer.address:
            return True
    return False


def noisy(seen: CaptureSeen) -> bool:
    """Tell whether equal runs differ anyway, so that bits say nothing."""
    return not seen.deterministic or any(
        trial.drifts for trial in seen.trials if trial.name in ("again", "eager again")
    )


def disturbed(seen: CaptureSeen, *names: str) -> Iterator[tuple[TrialSeen, DriftSeen]]:
    """Yield what differs in trials of these names because of what was disturbed."""
    for trial in seen.trials:
        if trial.name not in names:
            continue
        for drift in trial.drifts:
            wrong = drift.right is False and not _wrong_anyway(seen, drift)
            if wrong or trial.steady or not noisy(seen):
                yield trial, drift


def _wrong_anyway(seen: CaptureSeen, drift: DriftSeen) -> bool:
    """Tell whether an undisturbed run is as wrong and unsteady; a NaN comes from poison alone."""
    undisturbed = [
        each
        for trial in seen.trials
        if trial.name in ("again", "eager again")
        for each in trial.drifts
        if each.right is False and each.mismatch.output == drift.mismatch.output
    ]
    if drift.mismatch.nans and not any(each.mismatch.nans for each in undisturbed):
        return False
    return bool(undisturbed)


def drift_evidence(drift: DriftSeen, **more: Any) -> dict[str, Any]:
    """Return how two runs differ, as JSON values."""
    found = {**drift.mismatch.evidence(), **more}
    if drift.relative is not None:
        found["relative_l2"] = drift.relative
    if drift.ulps:
        found["ulps"] = dict(drift.ulps)
    if drift.right is not None:
        found["within_tolerance_of_reference"] = drift.right
    return found


def fault_of(seen: CaptureSeen, attempt: str) -> Fault | None:
    """Return why a capture failed."""
    found = seen.attempt(attempt)
    return found.fault if found is not None else None
