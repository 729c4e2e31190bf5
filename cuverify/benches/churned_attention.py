"""How long verify attention takes on churned pools: free-list orders, and relocated ones.

One layer of Kimi K2 on one of eight GPUs over all requests that run in a pool of 100,000 slots,
churned by the requests of a production trace (or of its quantiles, where the trace is not at hand).
A time is that of one of two layers in a replayed graph, each with a pool of its own that is larger
than the L2 cache, which is swept before each replay; `alone` is one layer in a graph of its own.
Only where the rows lie differs between the pools of one service; `cuverify.relocation_study` says
how. Beside it stands, timed the same way, what it takes to read the rows of the prefixes in token
order and to do nothing else.
"""

from __future__ import annotations

from typing import Any

from cuverify.bench import gated, time_copies, time_graph

POOLS = ("fifo", "sorted", "compacted", "contiguous")
REPEATS = 50
LAYERS = 2


def run(device: str) -> list[dict[str, Any]]:
    """Time attention on a GPU; nothing on a CPU, where the host lane says nothing about speed."""
    if device != "cuda":
        return []
    import torch

    from cuverify.cases.verify_attention import SizedBatch, VerifyAttentionStep
    from cuverify.ceilings import read_step
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
            sized = SizedBatch(batch, Capacity.of([batch]))
            steps = [VerifyAttentionStep(sized, "torch-cuda") for _ in range(LAYERS)]
            for step in steps:
                step.plan()
                step.plan.read_status()
                step.starts()
            expected = steps[0].expected()

            def check(steps: Any = steps, expected: Any = expected) -> str | None:
                for step in steps:
                    step.poison()
                    step.attend()
                    for name in ("out", "lse"):
                        found = compare(name, host_array(getattr(step, name)), expected[name])
                        if found is not None:
                            return str(found)
                return None

            attends = [step.attend for step in steps]
            slots = torch.from_numpy(layout.kv_indices().copy()).cuda()
            reads = [read_step(step.pool, slots)[0] for step in steps]
            read_us = time_copies(reads, REPEATS).us
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
                        "copies": LAYERS,
                    },
                    check=check,
                    timing=lambda attends=attends: time_copies(attends, REPEATS),  # type: ignore[misc]
                    alone=lambda attends=attends: time_graph(attends[0], REPEATS),  # type: ignore[misc]
                    bytes=rows * 2 * batch.width,
                    read_us=read_us,
                )
            )
            del step, steps, attends, reads, expected
            torch.cuda.empty_cache()
    return records
