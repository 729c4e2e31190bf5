"""How long the lists of a step take in SGLang's forms: bounds, slots with drafts, words of a mask.

`us` is one of them among others: copies over buffers of their own in one replayed graph, with a
cold L2 cache; beside them the loop in Python, with ``.item()`` for each request. The floor is
reading and writing at copy speed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from cuverify.bench import copy_floor_us, first_wrong, gated, gated_copies, time_calls

SHAPES = ((1, 4096, 65), (1, 184_320, 65), (16, 16_384, 33), (64, 16_384, 17))
"""Requests, longest prefix, drafts of each."""

COPIES = 16
REPEATS = 20
_HOST_REPEATS = 3


def run(device: str) -> list[dict[str, Any]]:
    """Time lists on a GPU; nothing on a CPU, where the host lane says nothing about speed."""
    if device != "cuda":
        return []
    records: list[dict[str, Any]] = []
    for shape in SHAPES:
        records.extend(_lists(*shape))
    return records


def _lists(requests: int, longest: int, drafts: int) -> Iterator[dict[str, Any]]:
    import torch

    from cuverify.baseline import host_kv_list
    from cuverify.cases.verify_lists import ListsBatch, VerifyListsStep

    rng = np.random.default_rng([requests, longest])
    batch = ListsBatch.draw(
        rng, batch=requests, num_tokens=drafts, longest=longest, mode="query_only", drafts="given",
        graph=True,
    )  # fmt: skip
    steps = [VerifyListsStep(batch, "torch-cuda") for _ in range(COPIES)]
    step = steps[0]
    shape = {"batch": requests, "longest": longest, "drafts": drafts}
    slots = int(batch.seq_lens.sum()) + requests * drafts

    def check() -> str | None:
        return first_wrong((step, steps[-1]))

    lists = [own.lists for own in steps]
    words = [own.words for own in steps]
    for op, calls, moved in (
        ("verify_lists, bounds and slots", lists, 12 * slots + 40 * requests),
        ("verify_lists, words of a query-only mask", words, 2 * requests * drafts * drafts),
    ):
        yield gated_copies(
            op, shape, check=check, floor_us=copy_floor_us(moved), bytes=moved,
            steps=calls, repeats=REPEATS,
        )  # fmt: skip

    table = (step.inputs[name] for name in ("req_to_token", "req_pool_indices", "seq_lens"))
    tensors = tuple(table)

    def host_check() -> str | None:
        _, listed = host_kv_list(*tensors)
        first = int(batch.seq_lens[0])
        same = torch.equal(listed[:first], step.kv_indices[:first].to(listed.dtype))
        return None if same else "the first prefix differs"

    def on_host() -> None:
        host_kv_list(*tensors)
        torch.cuda.synchronize()

    yield gated(
        "verify_lists, bounds and slots", shape, check=host_check,
        timing=lambda: time_calls(on_host, repeats=_HOST_REPEATS),
        peer="Python: a loop over requests, without drafts",
    )  # fmt: skip
