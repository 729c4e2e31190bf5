"""Mutants of CV5xx: padding, shapes and bounds.

Each factory makes the mutant, and with ``faulty=False`` its clean twin.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from cuverify.validators.callable_case import CallableCase
from cuverify.validators.zoo.parts import N, Vectors, blocks, drawn, host, launch, zeros

ROWS, REAL = 64, 40  # of a captured batch, and of the batch that is in it


def padding_read(*, faulty: bool = True) -> CallableCase:
    """Scale every row by the largest value of the batch, padded rows included."""
    x, y = zeros(ROWS), zeros(ROWS)
    rows = torch.full((1,), ROWS if faulty else REAL, dtype=torch.int32, device="cuda")

    def refill(seed: int) -> None:
        x.zero_()
        x[:REAL].copy_(drawn(REAL, seed))

    def reference() -> dict[str, Any]:
        values = host(x)
        return {"y": values * max(1.0, float(np.abs(values[:REAL]).max()))}

    refill(0)
    return CallableCase(
        step=lambda: launch("times_max", x, rows, y, ROWS, grid=1),
        inputs={"x": x},
        outputs={"y": y},
        refill=refill,
        reference=reference,
        padding={"x": slice(REAL, None), "y": slice(REAL, None)},
    )


def padding_nan(*, faulty: bool = True) -> CallableCase:
    """Let a zero weight hide a padded value: 0 times NaN is NaN."""
    w, v, y = zeros(ROWS, ROWS), zeros(ROWS), zeros(ROWS)

    def refill(seed: int) -> None:
        w.zero_()
        w[:, :REAL].copy_(drawn(ROWS * REAL, 2 * seed).view(ROWS, REAL))
        v.copy_(drawn(ROWS, 2 * seed + 1))

    refill(0)
    return CallableCase(
        step=lambda: launch("weigh", w, v, y, ROWS, 0 if faulty else 1, grid=1),
        inputs={"w": w, "v": v},
        outputs={"y": y},
        refill=refill,
        reference=lambda: {"y": host(w)[:, :REAL] @ host(v)[:REAL]},
        padding={"v": slice(REAL, None)},
        alone=("v",),
    )


def mask_short_at_maximum(*, faulty: bool = True) -> CallableCase:
    """Size a tree mask for rows x context and forget the rows' own columns."""
    rows, longest = 4, 197
    x, y = zeros(longest + rows), zeros(rows)
    length = zeros(1, dtype=torch.int32)
    mask = zeros(rows * (longest if faulty else longest + rows))

    def refill(seed: int) -> None:
        x.copy_(drawn(longest + rows, seed, low=1))
        long = longest if seed == 0 else 20 + seed
        length.fill_(long)
        sees = torch.ones(rows, long + rows).tril(long).reshape(-1)[: mask.numel()]
        mask[: sees.numel()].copy_(sees)

    def reference() -> dict[str, Any]:
        values, long = host(x), int(length.item())
        return {"y": np.array([values[: long + r + 1].sum() for r in range(rows)])}

    refill(0)
    return CallableCase(
        step=lambda: launch("read_mask", x, mask, length, y, rows, grid=1),
        inputs={"x": x, "length": length, "mask": mask},
        outputs={"y": y},
        refill=refill,
        reference=reference,
        alone=("x",),
    )


def mask_short_for_padded(*, faulty: bool = True) -> CallableCase:
    """Make the mask for the real rows only, while the kernel reads it for the padded ones too."""
    x, y = zeros(ROWS), zeros(ROWS)
    mask = zeros(REAL if faulty else ROWS)

    def refill(seed: int) -> None:
        x.copy_(drawn(ROWS, seed))
        mask.fill_(float(1 + seed % 3))

    refill(0)
    return CallableCase(
        step=lambda: launch("mask_rows", x, mask, y, ROWS, grid=1),
        inputs={"x": x, "mask": mask},
        outputs={"y": y},
        refill=refill,
        reference=lambda: {"y": host(x) * host(mask)[0]},
    )


def stale_tail(*, faulty: bool = True) -> CallableCase:
    """Write the lengths of a smaller batch and leave those of the larger one behind them."""
    x, y = zeros(ROWS), zeros(ROWS)
    lengths = zeros(ROWS, dtype=torch.int32)

    def refill(seed: int) -> None:
        batch = (REAL, ROWS, 10)[seed % 3]
        values = torch.from_numpy(np.random.default_rng(seed).integers(1, 9, batch))
        x.copy_(drawn(ROWS, seed))
        lengths[:batch].copy_(values)
        if not faulty:
            lengths[batch:].fill_(0)
        expected["total"] = int(values.sum())

    expected = {"total": 0}
    refill(0)
    return CallableCase(
        step=lambda: launch("times_total", x, lengths, y, ROWS, grid=1),
        inputs={"x": x, "lengths": lengths},
        outputs={"y": y},
        refill=refill,
        reference=lambda: {"y": host(x) * expected["total"]},
    )


def writes_past_end(*, faulty: bool = True) -> CallableCase:
    """Write one element behind the output."""
    v = Vectors.make()
    store = zeros(N + 64)
    v.y = store[:N]

    def step() -> None:
        launch("affine_to", v.x, v.b, v.y, N, 1 if faulty else 0, grid=blocks(N + 1))

    return v.case(step)


def input_changed(*, faulty: bool = True) -> CallableCase:
    """Clear an input after it was used."""
    v = Vectors.make()

    def step() -> None:
        launch("affine_mark", v.x, v.b, v.y, N, 1 if faulty else 0)

    return v.case(step)
