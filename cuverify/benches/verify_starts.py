"""How long it takes to lay out what blocks of attention read first: once a step, for all layers.

`us` is one of them among others: copies over buffers of their own in one replayed graph, with a
cold L2 cache. The floor is reading the first entries and their slots, and writing them, at copy
speed; for so little work it is the launch that counts.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cuverify.bench import copy_floor_us, first_wrong, gated_copies

SHAPES = ((1, 1024, 8), (1, 65_536, 33), (16, 16_384, 8))
"""Requests, rows of each prefix, nodes of each tree."""

COPIES = 16
REPEATS = 20


def run(device: str) -> list[dict[str, Any]]:
    """Time starts on a GPU; nothing on a CPU, where the host lane says nothing about speed."""
    if device != "cuda":
        return []
    return [_starts(*shape) for shape in SHAPES]


def _starts(requests: int, length: int, tree_tokens: int) -> dict[str, Any]:
    from cuverify.cases.verify_plan import PlanBatch
    from cuverify.cases.verify_starts import StartsBatch, VerifyStartsStep
    from cuverify.kv_layout import KvLayout

    layout = KvLayout.build(
        seq_lens=np.full(requests, length), tree_tokens=tree_tokens, placement="scattered",
        stale_tail=False, rng=np.random.default_rng([requests, length]),
    )  # fmt: skip
    batch = StartsBatch(PlanBatch.of_layout(layout, 8, "int32"), 0, True)
    steps = [VerifyStartsStep(batch, "torch-cuda") for _ in range(COPIES)]
    for step in steps:
        step.planned()  # what is timed begins behind it
    expected = steps[0].expected()
    written = sum(expected[name].nbytes for name in ("cta_starts", "cta_slots"))
    ctas = len(steps[0].planned.workspace.cta_work)
    return gated_copies(
        "verify_starts",
        {"batch": requests, "longest": length, "tree": tree_tokens, "ctas": ctas},
        check=lambda: first_wrong((steps[0], steps[-1])),
        steps=[step.starts for step in steps],
        repeats=REPEATS,
        floor_us=copy_floor_us(2 * written),
        bytes=2 * written,
    )
