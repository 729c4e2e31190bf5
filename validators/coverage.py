"""What a record lets one judge, and what not."""

from __future__ import annotations

from cuverify.validators.judging import launches_of
from cuverify.validators.observations import CaptureSeen, is_main

from cuverify.report import Coverage


def coverage(seen: CaptureSeen) -> list[Coverage]:
    """Say what a record lets one judge, and what not.

    Parameters
    ----------
    seen : CaptureSeen

    Returns
    -------
    list of Coverage
        Subjects ``eager run``, ``capture``, ``graph nodes``, ``replay``, and more where something
        was looked at or left out.
    """
    reference = "compared with the reference" if seen.has_reference else "taken as the reference"
    lines = [_stage_coverage(seen, "eager", "eager run", reference)]
    recorded = f"{len(launches_of(seen))} launches recorded"
    lines.append(_stage_coverage(seen, "capture", "capture", recorded))
    if "capture" in seen.stages:
        lines.extend(_graph_coverage(seen))
    labels = {run.label for run in seen.replays}
    detail = f"{len(seen.replays)} replays on {len(labels)} inputs, outputs poisoned before each"
    lines.append(_stage_coverage(seen, "replay", "replay", detail))
    if "replay" in seen.stages and len(labels) < 2:
        reason = (
            f"none of {len(seen.skipped)} other inputs fits the step's buffers"
            if seen.skipped
            else "no other inputs were given"
        )
        lines.append(Coverage("replay on changed inputs", "not inspected", reason))
    if seen.calls:
        detail = f"{len(seen.calls)} seen by {seen.observer.partition(':')[0]}"
        lines.append(Coverage("CUDA calls of the step", "inspected", detail))
    others = [each for each in seen.attempts if not is_main(each.name)]
    if others:
        told = ", ".join(f"{each.name} {'failed' if each.fault else 'ok'}" for each in others)
        lines.append(Coverage("other captures", "inspected", told))
    if seen.trials:
        told = ", ".join(dict.fromkeys(trial.name for trial in seen.trials))
        lines.append(Coverage("replays under changed circumstances", "inspected", told))
    if seen.responses:
        told = ", ".join(dict.fromkeys(each.input for each in seen.responses))
        lines.append(Coverage("inputs one at a time", "inspected", told))
    lines.extend(Coverage(subject, "not inspected", reason) for subject, reason in seen.gaps)
    return lines


def _graph_coverage(seen: CaptureSeen) -> list[Coverage]:
    graph = seen.graph
    if graph.not_inspected is not None:
        detail = f"{graph.not_inspected}; launches were compared by stream"
        return [Coverage("graph nodes", "not inspected", detail)]
    kernels = [node for node in graph.nodes if node.kind == "kernel"]
    detail = f"{len(graph.nodes)} nodes, {len(kernels)} of them kernels"
    lines = [Coverage("graph nodes", "inspected", detail)]
    lines.extend(
        Coverage("graph bodies", "not inspected", f"conditional node {body}")
        for body in graph.unseen_bodies
    )
    pointers = [pointer for node in graph.nodes for pointer in node.pointers]
    if pointers:
        sure = sum(pointer.sure for pointer in pointers)
        detail = f"{sure} arguments, {len(pointers) - sure} words inside structs (candidates)"
        lines.append(Coverage("pointers of the graph", "inspected", detail))
    early = sum(kind == "programmatic" for _, _, kind in graph.edges)
    if early:
        reason = f"{early} programmatic edges; only wrong results show a missing wait"
        lines.append(Coverage("waits of dependent launches", "not inspected", reason))
    for node in kernels:
        if node.params_unknown:
            reason = f"arguments of `{node.title}`: {node.params_unknown}"
            lines.append(Coverage("kernel arguments", "not inspected", reason))
    return lines


def _stage_coverage(seen: CaptureSeen, stage: str, subject: str, detail: str) -> Coverage:
    if stage in seen.stages:
        return Coverage(subject, "inspected", detail)
    reason = f"{seen.faults[0].stage} failed before" if seen.faults else "did not come to its end"
    return Coverage(subject, "not inspected", reason)
