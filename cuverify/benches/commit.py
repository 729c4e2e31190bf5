"""How long it takes to commit accepted paths: by table, and by rows through all layers.

Pools as Kimi K2 has them: 61 layers of bf16 rows of 1,152 bytes; trees of 16 nodes, paths of up to
8. In one replayed graph, with a cold L2 cache.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cuverify.bench import copy_floor_us, gated, time_graph
from cuverify.buffers import read

LAYERS = 61
WIDTH = 576
TREE = 16
DEPTH = 8
BATCHES = (1, 16, 64, 128)
SLOTS = 100_000
REPEATS = 50


def run(device: str) -> list[dict[str, Any]]:
    """Time commits on a GPU; nothing on a CPU, where the host lane says nothing about speed."""
    if device != "cuda":
        return []
    import torch

    from cuverify.cases.commit import CommitBatch
    from cuverify.kv_layout import KvLayout
    from cuverify.ops.commit import CommitPlan, Way
    from cuverify.reference.commit import commit

    storage = torch.zeros((LAYERS, SLOTS, WIDTH), dtype=torch.bfloat16, device="cuda")
    storage.view(torch.int64).random_()
    ways: tuple[Way, ...] = ("table", "rows")
    records: list[dict[str, Any]] = []
    for requests in BATCHES:
        layout = KvLayout.build(
            seq_lens=[200] * requests, tree_tokens=TREE, num_slots=SLOTS, placement="scattered",
            stale_tail=False, rng=requests,
        )  # fmt: skip
        rng = np.random.default_rng(requests)
        batch = CommitBatch.of_layout(layout, rng, depth=DEPTH)
        right = commit(
            batch.accept_index, batch.accept_token_num, batch.qo_indptr, batch.out_cache_loc,
            batch.seq_lens, batch.req_pool_indices, batch.req_to_token,
        )  # fmt: skip
        for way in ways:
            given: dict[str, Any] = {
                name: torch.from_numpy(getattr(batch, name).astype(dtype)).cuda()
                for name, dtype in (
                    ("accept_index", "i4"), ("accept_token_num", "i4"), ("qo_indptr", "i4"),
                    ("out_cache_loc", "i8"), ("seq_lens", "i8"), ("req_pool_indices", "i8"),
                    ("req_to_token", "i4"),
                )
            }  # fmt: skip
            plan = CommitPlan(**given, pools=list(storage) if way == "rows" else None)
            src, dst = (torch.from_numpy(end).cuda() for end in (right.src, right.dst))

            def check(plan: Any = plan, given: Any = given, src: Any = src, dst: Any = dst) -> Any:
                expected = storage.clone()
                plan()
                plan.read_status()
                if plan.way == "table":
                    found = read(given["req_to_token"])
                    same = np.array_equal(found, right.req_to_token)  # noqa: B023
                    return None if same else "the table differs"
                for pool in expected:
                    pool[dst] = pool[src]
                same = torch.equal(expected.view(torch.int64), storage.view(torch.int64))
                return None if same else "the pools differ"

            moved = 2 * len(right.src) * LAYERS * 2 * WIDTH if way == "rows" else None
            shape = {"way": way, "batch": requests, "tree": TREE, "rows": len(right.src)}
            record = gated(
                "commit",
                shape,
                check=check,
                timing=lambda plan=plan: time_graph(plan, REPEATS),  # type: ignore[misc]
                floor_us=copy_floor_us(moved) if moved else None,
                bytes=moved,
            )
            records.append(record)
    return records
