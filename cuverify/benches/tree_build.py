"""How long draft trees take: grown from log-probabilities, linked from parents, and as a mask.

`us` is one of them among others: copies over buffers of their own in one replayed graph, with a
cold L2 cache. Beside them the Python version, a heap and a mask on the host with both copies, as
decode loops have it. The floor is reading and writing at copy speed; for so little work it is the
launch, and the tree's own sequence of steps, that count.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from cuverify.bench import Timing, copy_floor_us, first_wrong, gated, gated_copies, time_calls

SHAPES = ((1, 17), (1, 33), (1, 65), (1, 257), (1, 1024), (64, 65), (64, 257))
"""Requests and nodes; log-probabilities are of 15 depths of 16 tokens."""

TARGET_US = {(1, 65): 12.0}
COPIES = 16
REPEATS = 20
_DEPTH, _RANKS = 15, 16
_HOST_REPEATS = 3


def run(device: str) -> list[dict[str, Any]]:
    """Time trees on a GPU; nothing on a CPU, where the host lane says nothing about speed."""
    if device != "cuda":
        return []
    records: list[dict[str, Any]] = []
    for requests, nodes in SHAPES:
        records.extend(_trees(requests, nodes))
    return records


def _trees(requests: int, nodes: int) -> Iterator[dict[str, Any]]:
    """Yield the records of one shape."""
    import torch

    from cuverify.baseline import host_trees
    from cuverify.cases.tree_build import TreeBuildStep
    from cuverify.draft_batch import DraftBatch, ParentsBatch

    rng = np.random.default_rng([requests, nodes])
    batch = DraftBatch.draw(
        rng, batch=requests, depth=_DEPTH, k=_RANKS, num_tokens=nodes, longest=300
    )
    steps = [TreeBuildStep(batch, "torch-cuda") for _ in range(COPIES)]
    step = steps[0]
    given = ParentsBatch.draw(rng, batch=requests, num_tokens=nodes, longest=300)
    linked = [TreeBuildStep(given, "torch-cuda") for _ in range(COPIES)]
    shape: dict[str, int | float | str] = {"batch": requests, "nodes": nodes}

    def check(copies: list[TreeBuildStep]) -> str | None:
        return first_wrong((copies[0], copies[-1]))

    moved = sum(buffer.nbytes for buffer in step.expected().values())
    target = TARGET_US.get((requests, nodes))
    for op, copies, calls, goal in (
        ("tree_build", steps, [own.build for own in steps], target),
        ("tree_links", linked, [own.build for own in linked], None),
        ("tree_mask, query only", steps, [own.write_mask for own in steps], None),
    ):
        yield gated_copies(
            op,
            shape | ({"target_us": goal} if goal else {}),
            check=lambda copies=copies: check(copies),
            steps=calls,
            repeats=REPEATS,
            floor_us=copy_floor_us(moved),
            bytes=moved,
        )

    def on_host() -> None:
        host_trees(
            step.inputs["logprobs"], step.inputs["token_ids"], step.inputs["root_tokens"],
            step.seq_lens, num_tokens=nodes,
        )  # fmt: skip
        torch.cuda.synchronize()

    def timing() -> Timing:
        return time_calls(on_host, repeats=_HOST_REPEATS)

    def host_check() -> str | None:
        found = host_trees(
            step.inputs["logprobs"], step.inputs["token_ids"], step.inputs["root_tokens"],
            step.seq_lens, num_tokens=nodes,
        )  # fmt: skip
        same = torch.equal(found["next_sibling"], step.trees.next_sibling)
        return None if same else "next_sibling differs"

    yield gated(
        "tree_build", shape, check=host_check, timing=timing, peer="Python: heapq and numpy"
    )
