"""Mutants of CV3xx: host state that the capture froze.

Each factory makes the mutant, and with ``faulty=False`` its clean twin.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
from cuverify.validators.callable_case import CallableCase
from cuverify.validators.compare import Tolerance
from cuverify.validators.zoo.parts import (
    N,
    Vectors,
    blocks,
    drawn,
    host,
    launch,
    zeros,
)


def _scaled(step: Callable[[SimpleNamespace], None], **changes: Any) -> CallableCase:
    """Return a case of ``y = factor x`` whose factor is another at each refill."""
    t = SimpleNamespace(x=zeros(N), y=zeros(N), factor=1.0, on_device=zeros(1))

    def refill(seed: int) -> None:
        t.x.copy_(drawn(N, seed))
        t.factor = float(2 + seed % 7)
        t.on_device.fill_(t.factor)

    refill(0)
    return CallableCase(
        step=lambda: step(t),
        inputs={"x": t.x},
        outputs={"y": t.y},
        refill=refill,
        reference=lambda: {"y": t.factor * host(t.x)},
        **changes,
    )


def frozen_scalar(*, faulty: bool = True) -> CallableCase:
    """Pass a factor that varies from step to step as a Python number."""

    def step(t: SimpleNamespace) -> None:
        if faulty:
            launch("scale", t.x, t.y, t.factor, N)
        else:
            launch("scale_by", t.x, t.on_device, t.y, N)

    return _scaled(step)


def frozen_torch_scalar(*, faulty: bool = True) -> CallableCase:
    """Pass such a factor to a torch operation: it ends inside the kernel's parameter struct."""

    def step(t: SimpleNamespace) -> None:
        torch.mul(t.x, t.factor if faulty else t.on_device, out=t.y)

    return _scaled(step)


def _first_kept(
    step: Callable[[SimpleNamespace], None], refill: Callable[[SimpleNamespace, int], None]
) -> CallableCase:
    """Return a case of ``y = x`` for the first `length` elements, and 0 after them."""
    t = SimpleNamespace(x=zeros(N), y=zeros(N), length=zeros(1, dtype=torch.int32), live=0)

    def fill(seed: int) -> None:
        t.x.copy_(drawn(N, seed, low=1))
        t.live = 1000 + 700 * (seed % 5)
        refill(t, seed)

    def reference() -> dict[str, Any]:
        answer = host(t.x).copy()
        answer[t.live :] = 0
        return {"y": answer}

    fill(0)
    return CallableCase(
        step=lambda: step(t),
        inputs={"x": t.x},
        outputs={"y": t.y},
        refill=fill,
        reference=reference,
    )


def frozen_grid(*, faulty: bool = True) -> CallableCase:
    """Derive the grid from a host length: a longer batch is cut off at replay."""

    def step(t: SimpleNamespace) -> None:
        t.y.zero_()
        launch("keep_live", t.x, t.length, t.y, grid=blocks(t.live if faulty else N))

    return _first_kept(step, lambda t, seed: t.length.fill_(t.live))


def frozen_branch(*, faulty: bool = True) -> CallableCase:
    """Choose between two kernels by a host value that varies from step to step."""
    v = Vectors.make()
    t = SimpleNamespace(factor=2)

    def refill(seed: int) -> None:
        v.refill(seed)
        t.factor = 2 + seed % 2 if faulty else 2

    def step() -> None:
        launch("affine" if t.factor == 2 else "affine_three", v.x, v.b, v.y, N)

    return v.case(step, refill=refill, reference=lambda: {"y": t.factor * host(v.x) + host(v.b)})


def metadata_reallocated(*, faulty: bool = True) -> CallableCase:
    """Put the length of the next batch into a new tensor instead of the captured one."""

    def refill(t: SimpleNamespace, seed: int) -> None:
        if faulty:
            t.length = torch.tensor([t.live], dtype=torch.int32, device="cuda")
        else:
            t.length.fill_(t.live)

    return _first_kept(lambda t: launch("keep_first", t.x, t.length, t.y, N), refill)


def input_rebound(*, faulty: bool = True) -> CallableCase:
    """Replace the static input by the next batch's tensor instead of copying into it."""
    v = Vectors.make()

    def refill(seed: int) -> None:
        v.b.copy_(drawn(N, 2 * seed + 1))
        if faulty:
            v.x = drawn(N, 2 * seed).cuda()
        else:
            v.x.copy_(drawn(N, 2 * seed))

    return v.case(v.launch, refill=refill)


def memoised_metadata(*, faulty: bool = True) -> CallableCase:
    """Build an index list when it is not there yet: the warm-up has built it, the graph has not."""
    t = SimpleNamespace(x=zeros(N), y=zeros(N), shift=zeros(1, dtype=torch.int32))

    def refill(seed: int) -> None:
        t.x.copy_(drawn(N, seed))
        t.shift.fill_(1 + seed % 50)

    def make_step() -> Callable[[], None]:
        index = zeros(N, dtype=torch.int32)
        built = SimpleNamespace(yet=False)

        def step() -> None:
            if not faulty or not built.yet:
                launch("rotate_plan", t.shift, index, N)
                built.yet = True
            launch("gather", t.x, index, t.y, N)

        return step

    refill(0)
    return CallableCase(
        step=make_step(),
        inputs={"x": t.x, "shift": t.shift},
        outputs={"y": t.y},
        refill=refill,
        reference=lambda: {"y": np.roll(host(t.x), -int(t.shift.item()))},
        make_step=make_step,
    )


def frozen_seed(*, faulty: bool = True) -> CallableCase:
    """Draw a seed on the host at each call: every replay has the numbers of the capture."""
    v = Vectors.make()

    def step() -> None:
        if faulty:
            launch("add_noise", v.x, v.y, np.uint32(random.getrandbits(32)), N)
        else:
            torch.add(v.x, torch.rand(N, device="cuda"), out=v.y)

    return v.case(step, inputs={"x": v.x}, reference=None, deterministic=False)


def own_generator(*, faulty: bool = True) -> CallableCase:
    """Draw from a torch generator that the graph does not know."""
    v = Vectors.make()
    generator = torch.Generator("cuda") if faulty else None

    def step() -> None:
        noise = torch.rand(N, device="cuda", generator=generator)  # fault
        torch.add(v.x, noise, out=v.y)

    return v.case(
        step,
        inputs={"x": v.x},
        reference=lambda: {"y": host(v.x) + 0.5},
        tolerance=Tolerance(atol=0.5 + 1e-5),
        deterministic=False,
    )


def stale_plan(*, faulty: bool = True) -> CallableCase:
    """Plan on the host in every eager call, which a replay never makes."""
    t = SimpleNamespace(x=zeros(N), y=zeros(N), shift=0)
    index = zeros(N, dtype=torch.int32)

    def plan() -> None:
        index.copy_(torch.from_numpy((np.arange(N, dtype=np.int32) + t.shift) % N))

    def refill(seed: int) -> None:
        t.x.copy_(drawn(N, seed))
        t.shift = 1 + seed % 50
        if not faulty:
            plan()

    def step() -> None:
        if not torch.cuda.is_current_stream_capturing():
            plan()
        launch("gather", t.x, index, t.y, N)

    refill(0)
    return CallableCase(
        step=step,
        inputs={"x": t.x},
        outputs={"y": t.y},
        refill=refill,
        reference=lambda: {"y": np.roll(host(t.x), -t.shift)},
    )
