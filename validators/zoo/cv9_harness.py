"""Mutants of CV9xx: cases that cannot be judged, and runs that do not come back.

Each factory makes the mutant, and with ``faulty=False`` its clean twin.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import torch
from cuverify.validators.callable_case import CallableCase
from cuverify.validators.zoo.parts import N, Vectors, launch


def reference_fails(*, faulty: bool = True) -> CallableCase:
    """Come with a reference that raises."""
    v = Vectors.make()

    def reference() -> dict[str, Any]:
        if faulty:
            raise LookupError("no answer is stored for these inputs")  # fault
        return v.reference()

    return v.case(v.launch, reference=reference)


def step_raises(*, faulty: bool = True) -> CallableCase:
    """Call a torch operation on tensors whose shapes do not fit."""
    v = Vectors.make()

    def step() -> None:
        torch.add(v.b, v.x[1:] if faulty else v.x, alpha=2, out=v.y)  # fault

    return v.case(step)


def illegal_access(*, faulty: bool = True) -> CallableCase:
    """Write far outside of every buffer."""
    v = Vectors.make()

    def step() -> None:
        launch("write_far_away", v.x, v.y, N, np.int64(1 << 42 if faulty else 0))

    return v.case(step, inputs={"x": v.x}, reference=lambda: {"y": 2 * v.x.cpu().numpy()})


def hangs(*, faulty: bool = True) -> CallableCase:
    """Spin for a minute."""
    v = Vectors.make()

    def step() -> None:
        cycles = np.int64(100_000_000_000 if faulty else 1)
        launch("affine_late", v.x, v.b, v.y, N, cycles)

    return v.case(step)


def dies(*, faulty: bool = True) -> CallableCase:
    """End the process from inside the step."""
    v = Vectors.make()

    def step() -> None:
        v.launch()
        if faulty and torch.cuda.is_current_stream_capturing():
            os._exit(3)

    return v.case(step)


def nothing_changes(*, faulty: bool = True) -> CallableCase:
    """Refill with the same inputs each time: the first answer is right for every replay."""
    v = Vectors.make()
    return v.case(v.launch, refill=lambda seed: v.refill(0 if faulty else seed))
