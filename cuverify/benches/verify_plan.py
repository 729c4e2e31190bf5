"""How long a verify step's plan takes: cutting the work, and gathering the index list beside it.

Once a step, not once a layer. Batches as a server has them, with lengths between an eighth of the
longest and all of it. `us` is one plan among others: copies over buffers of their own in one
replayed graph, with a cold L2 cache. The floor is reading lengths and tables and writing plan and
list at copy speed; for so little work it is the launch that counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from cuverify.bench import copy_floor_us, first_wrong, gated_copies

SHAPES = (
    (1, 1024, 8),
    (1, 4096, 65),
    (1, 184_320, 64),
    (16, 16_384, 33),
    (64, 16_384, 17),
    (256, 4096, 17),
)
"""Requests, rows of the longest prefix, nodes of each tree."""

TARGET_US = {(1, 4096, 65): 6.0}
COPIES = 16
REPEATS = 20


def run(device: str) -> list[dict[str, Any]]:
    """Time plans on a GPU; nothing on a CPU, where the host lane says nothing about speed."""
    if device != "cuda":
        return []
    records: list[dict[str, Any]] = []
    for shape in SHAPES:
        records.extend(_plan(*shape))
    return records


def _plan(requests: int, longest: int, tree_tokens: int) -> Iterator[dict[str, Any]]:
    """Yield the records of one shape."""
    from cuverify.cases.verify_plan import PlanBatch, VerifyPlanStep
    from cuverify.kv_layout import KvLayout

    rng = np.random.default_rng([requests, longest])
    lens = rng.integers(longest // 8, longest + 1, requests)
    lens[0] = longest
    layout = KvLayout.build(
        seq_lens=lens, tree_tokens=tree_tokens, placement="scattered", stale_tail=False, rng=rng
    )
    batch = PlanBatch.of_layout(layout, 8, "int32")
    steps = [VerifyPlanStep(batch, "torch-cuda") for _ in range(COPIES)]
    cutting = [
        VerifyPlanStep(replace(batch, req_pool_indices=None, req_to_token=None), "torch-cuda")
        for _ in range(COPIES)
    ]
    expected = steps[0].expected()
    shape = {
        "batch": requests,
        "longest": longest,
        "tree": tree_tokens,
        "ctas": len(steps[0].workspace.cta_work),
        "entries": int(np.count_nonzero(expected["work"][:, 0] >= 0)),
    }
    plan_bytes = (
        sum(array.nbytes for name, array in expected.items() if name != "kv_indices")
        + 12 * requests
    )
    list_bytes = 2 * expected["kv_indices"].nbytes

    goal = TARGET_US.get((requests, longest, tree_tokens))
    for op, copies, moved, target in (
        ("verify_plan", steps, plan_bytes + list_bytes, goal),
        ("verify_plan, cutting only", cutting, plan_bytes, None),
    ):
        yield gated_copies(
            op,
            shape | ({"target_us": target} if target else {}),
            check=lambda copies=copies: first_wrong((copies[0], copies[-1])),
            steps=[own.plan for own in copies],
            repeats=REPEATS,
            floor_us=copy_floor_us(moved),
            bytes=moved,
        )
