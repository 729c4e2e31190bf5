"""Run a mutant or its twin without the validator, to see that it is what the registry says.

A mutant is worth nothing when its step is wrong in another way than it claims, and a twin when it
does not survive a capture. This asks both of torch alone.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator, Mapping
from typing import Any

from cuverify.validators.child import Emit
from cuverify.validators.zoo.registry import BY_NAME


def run(work: Mapping[str, Any], emit: Emit) -> None:
    """Make cases one after the other, run each eagerly, capture and replay it; emit what held.

    Emits ``{"name": ..., "stage": "eager" | "capture" | "replay", "wrong": [...]}``, where
    ``wrong`` lists the outputs that differ from the reference, by seed for the replays.

    Parameters
    ----------
    work : mapping
        ``names`` of mutants, and whether they are to be ``faulty``. A faulty one may take the
        process with it, so it comes alone.
    emit : callable
    """
    from cuverify.validators.api import load_factory

    gc.disable()  # what an earlier case left must not be freed inside the capture of another
    for name in work["names"]:
        case = load_factory(BY_NAME[name].factory)(faulty=work["faulty"])
        for stage, wrong in _stages(case):
            emit({"name": name, "stage": stage, "wrong": wrong})
        del case
        gc.collect()


def _stages(case: Any) -> Iterator[tuple[str, list[str]]]:
    import torch

    first, *others = case.seeds
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        case.refill(first)
        case.step()
        torch.cuda.synchronize()
        yield "eager", _wrong(case)
        case.refill(first)
        case.step()
        case.refill(first)
        torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        case.step()
    yield "capture", []
    wrong = []
    for seed in (first, *others, first):
        case.refill(seed)
        for tensor in case.outputs.values():
            tensor.fill_(float("nan") if tensor.is_floating_point() else 255)
        graph.replay()
        torch.cuda.synchronize()
        wrong += [f"{name} of seed {seed}" for name in _wrong(case)]
    yield "replay", wrong


def _wrong(case: Any) -> list[str]:
    """Return the outputs that differ from the reference outside of padding."""
    import numpy as np
    from cuverify.validators.compare import Tolerance

    tolerance = case.tolerance or Tolerance()
    wrong = []
    expectations = case.reference() if case.reference is not None else {}
    for name, expected in expectations.items():
        actual = np.array(case.outputs[name].cpu().numpy(), dtype=np.float64)
        expected = np.array(expected, dtype=np.float64)
        if name in case.padding:
            actual[case.padding[name]] = expected[case.padding[name]] = 0
        if not np.allclose(actual, expected, tolerance.rtol, tolerance.atol, equal_nan=False):
            wrong.append(name)
    return wrong
