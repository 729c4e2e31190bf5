"""How long verify attention takes on churned pools: free-list orders, and relocated ones.

One layer of Kimi K2 on one of eight GPUs over all requests that run in a pool of 100,000 slots,
churned by the requests of a production trace (or of its quantiles, where the trace is not at hand).
In one replayed graph, with a cold L2 cache. Only where the rows lie differs between the pools of
one service; `cuverify.relocation_study` says how.
"""

from __future__ import annotations

from typing import Any

from cuverify.bench import gated, time_graph

POOLS = ("fifo", "sorted", "compacted", "contiguous")
REPEATS = 50


def run(device: str) -> list[dict[str, Any]]:
    """Time attention on a GPU; nothing on a CPU, where the host lane says nothing about speed."""
    if device != "cuda":
        return []
    import torch

    from cuverify.cases.verify_attention import SizedBatch, VerifyAttentionStep
    from cuverify.kv_layout import KvLayout
    from cuverify.listed_step import Capacity
    from cuverify.relocation_study import TRACES, TREE, churned
    from cuverify.validators.compare import compare, host_array
    from cuverify.verify_batch import VerifyBatch
    from cuverify.verify_workload import drafted_tree

    records: list[dict[str, Any]] = []
    for trace in TRACES:
        for kind in POOLS:
            pool, _ = churned(trace, kind)
            layout = KvLayout.from_pool(pool, tree_tokens=TREE, stale_tail=False)
            trees = tuple(drafted_tree(TREE, seed) for seed in range(layout.num_real))
            batch = VerifyBatch(layout, trees, kind="benchmark")
            step = VerifyAttentionStep(SizedBatch(batch, Capacity.of([batch])), "torch-cuda")
            step.plan()
            step.plan.read_status()
            expected = step.expected()

            def check(step: Any = step, expected: Any = expected) -> str | None:
                step.poison()
                step.attend()
                for name in ("out", "lse"):
                    found = compare(name, host_array(getattr(step, name)), expected[name])
                    if found is not None:
                        return str(found)
                return None

            found = layout.fragmentation()
            rows = int(layout.seq_lens.sum()) + batch.num_tokens
            records.append(
                gated(
                    "verify_attention, churned pool",
                    {
                        "service": trace,
                        "pool": kind,
                        "batch": layout.num_real,
                        "rows": rows,
                        "rows a run": round(rows / max(1, int(found.runs.sum())), 1),
                    },
                    check=check,
                    timing=lambda step=step: time_graph(step.attend, REPEATS),  # type: ignore[misc]
                    bytes=rows * 2 * batch.width,
                )
            )
            del step, expected
            torch.cuda.empty_cache()
    return records
