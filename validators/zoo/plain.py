"""Run a mutant or its twin without the validator, to see that it is what the registry says.

A mutant is worth nothing when its step is wrong in another way than it claims, and a twin when it
does not survive a capture. This asks both of torch alone.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cuverify.validators.child import Emit
from cuverify.validators.zoo.registry import BY_NAME


def run(work: Mapping[str, Any], emit: Emit) -> None:
    """Make a case, run it eagerly, capture it and replay it; emit what held.

    Emits ``{"stage": "eager" | "capture" | "replay", "wrong": [...]}``, where ``wrong`` lists the
    outputs that differ from the reference, by seed for the replays.

    Parameters
    ----------
    work : mapping
        ``name`` of the mutant, and whether it is ``faulty``.
    emit : callable
    """
    import torch
    from cuverify.validators.api import load_factory

    case = load_factory(BY_NAME[work["name"]].factory)(faulty=work["faulty"])
    first, *others = case.seeds
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        case.refill(first)
        case.step()
        torch.cuda.synchronize()
        emit({"stage": "eager", "wrong": _wrong(case)})
        case.refill(first)
        case.step()
        case.refill(first)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        case.step()
    emit({"stage": "capture", "wrong": []})
    wrong = []
    for seed in (first, *others, first):
        case.refill(seed)
        for tensor in case.outputs.values():
            tensor.fill_(float("nan"))
        graph.replay()
        torch.cuda.synchronize()
        wrong += [f"{name} of seed {seed}" for name in _wrong(case)]
    emit({"stage": "replay", "wrong": wrong})


def _wrong(case: Any) -> list[str]:
    """Return the outputs that differ from the reference outside of padding."""
    import numpy as np
    from cuverify.validators.compare import Tolerance

    tolerance = case.tolerance or Tolerance()
    wrong = []
    for name, expected in case.reference().items():
        actual = np.array(case.outputs[name].cpu().numpy(), dtype=np.float64)
        expected = np.array(expected, dtype=np.float64)
        if name in case.padding:
            actual[case.padding[name]] = expected[case.padding[name]] = 0
        if not np.allclose(actual, expected, tolerance.rtol, tolerance.atol, equal_nan=False):
            wrong.append(name)
    return wrong
