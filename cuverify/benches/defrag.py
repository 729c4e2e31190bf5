"""How long a compaction takes that is planned on the device: all of it, and without the move.

Pools as Kimi K2 has them: 61 layers of bf16 rows of 1,152 bytes, 64 requests scattered over them.
In one replayed graph, with a cold L2 cache. A compaction happens once: replays find the pool
compact. So the tables are written anew in front of each replay, which is timed by itself and taken
off.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cuverify.bench import Timing, copy_floor_us, gated, time_graph

LAYERS = 61
WIDTH = 576
SLOTS = 200_000
REQUESTS = 64
PREFIX = 1500
BUDGETS = (256, 4096, 65_536)
REPEATS = 30


def run(device: str) -> list[dict[str, Any]]:
    """Time compactions on a GPU; nothing on a CPU."""
    if device != "cuda":
        return []
    import torch

    from cuverify.cases.defrag import DefragBatch
    from cuverify.kv_layout import KvLayout
    from cuverify.ops.defrag import DefragPlan
    from cuverify.planner import plan_compact

    storage = torch.zeros((LAYERS, SLOTS, WIDTH), dtype=torch.bfloat16, device="cuda")
    storage.view(torch.int64).random_()
    layout = KvLayout.build(
        seq_lens=[PREFIX] * REQUESTS, tree_tokens=16, num_slots=SLOTS, placement="holes",
        stale_tail=False, rng=1,
    )  # fmt: skip
    batch = DefragBatch.of_layout(layout, np.random.default_rng(0), budget=1)
    live = np.zeros(SLOTS, bool)
    live[
        np.concatenate(
            [
                batch.req_to_token[r, :n]
                for r, n in zip(batch.req_pool_indices, batch.held_lens, strict=True)
            ]
        )
    ] = True
    records: list[dict[str, Any]] = []
    for budget in BUDGETS:
        right = plan_compact(live, budget=budget)
        first = torch.from_numpy(batch.req_to_token.copy()).cuda()
        table = first.clone()
        rows, lens = (
            torch.from_numpy(x.astype(np.int64)).cuda()
            for x in (batch.req_pool_indices, batch.held_lens)
        )
        plan = DefragPlan(list(storage), table, rows, lens, budget=budget)

        def again(plan: Any = plan, table: Any = table, first: Any = first) -> None:
            table.copy_(first)
            plan()

        def check(again: Any = again, plan: Any = plan, right: Any = right) -> str | None:
            src, dst = (torch.from_numpy(end).cuda() for end in (right.src, right.dst))
            expected = [pool[src].clone() for pool in storage]
            again()
            found = plan.read()
            if found.src.tolist() != right.src.tolist() or found.dst.tolist() != right.dst.tolist():
                return "the plan is another one"
            for pool, rows in zip(storage, expected, strict=True):
                if not torch.equal(pool[dst].view(torch.int16), rows.view(torch.int16)):
                    return "the rows differ"
            return None

        def timing(again: Any = again, table: Any = table, first: Any = first) -> Timing:
            both = time_graph(again, REPEATS)
            alone = time_graph(lambda: table.copy_(first), REPEATS)
            return Timing(both.us - alone.us, both.spread_us, both.repeats)

        moved = 2 * len(right) * LAYERS * 2 * WIDTH
        shape = {"rows": len(right), "requests": REQUESTS, "slots": SLOTS}
        records.append(
            gated(
                "defrag",
                shape,
                check=check,
                timing=timing,
                floor_us=copy_floor_us(moved),
                bytes=moved,
            )
        )
    return records
