"""How long verify attention takes: our kernels, torch's gather and bmm, SGLang's Triton kernel.

One layer of Kimi K2 on one of eight GPUs: 8 heads, bf16 rows of 576 elements, page size 1, slots
scattered over a pool twice as large as needed. In one replayed graph, with a cold L2 cache. Two
floors stand beside each time: the roofline of the same run (rows read once at the speed of a linear
read, products at the speed of the tensor cores), and reading the same scattered rows alone, as a
peer of that name. The plan is made once a step and not timed here; see the benchmark of
`verify_plan`. SGLang's kernel is timed where ``sglang.kernels.ops.attention.extend_attention`` can
be imported.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

from cuverify.bench import gated, time_graph

SHAPES = (
    (1, 1024, 8),
    (1, 4096, 8),
    (1, 16_384, 8),
    (1, 16_384, 33),
    (1, 65_536, 8),
    (1, 65_536, 17),
    (1, 65_536, 33),
    (1, 65_536, 64),
    (1, 184_320, 8),
    (1, 184_320, 64),
    (4, 16_384, 8),
    (16, 1024, 8),
    (16, 4096, 8),
    (16, 16_384, 8),
    (16, 16_384, 64),
)
"""Requests, rows of each prefix, nodes of each tree."""

REPEATS = 50
# SGLang's kernel goes through a prefix with one block a head: milliseconds, whatever the batch
_SGLANG_REPEATS = 10

_SGLANG = "sglang.kernels.ops.attention.extend_attention"

Step = Callable[[], None]


def run(device: str) -> list[dict[str, Any]]:
    """Time attention on a GPU; nothing on a CPU, where the host lane says nothing about speed."""
    if device != "cuda":
        return []
    import torch

    from cuverify.ceilings import read_bandwidth, tensor_rate

    rates = read_bandwidth(), tensor_rate()
    records: list[dict[str, Any]] = []
    for requests, prefix, tree_tokens in SHAPES:
        records.extend(_attention(requests, prefix, tree_tokens, rates))
        torch.cuda.empty_cache()
    return records


def _attention(
    requests: int, prefix: int, tree_tokens: int, rates: tuple[float, float]
) -> Iterator[dict[str, Any]]:
    """Yield the records of one shape."""
    import torch

    from cuverify.cases.verify_attention import Capacity, SizedBatch, VerifyAttentionStep
    from cuverify.ceilings import read_step
    from cuverify.kv_layout import KvLayout
    from cuverify.validators.compare import compare, host_array
    from cuverify.verify_batch import VerifyBatch
    from cuverify.verify_workload import drafted_tree

    layout = KvLayout.build(
        seq_lens=[prefix] * requests,
        tree_tokens=tree_tokens,
        placement="scattered",
        stale_tail=False,
        rng=prefix,
    )
    trees = tuple(drafted_tree(tree_tokens, seed) for seed in range(requests))
    batch = VerifyBatch(layout, trees, kind="benchmark")
    step = VerifyAttentionStep(SizedBatch(batch, Capacity.of([batch])), "torch-cuda")
    step.plan()
    step.plan.read_status()
    expected = step.expected()
    shape = {
        "batch": requests,
        "prefix": prefix,
        "tree": tree_tokens,
        "heads": batch.heads,
        "splits": int(step.plan.workspace.work[:, 5].max()),
    }
    rows = requests * (prefix + tree_tokens)
    moved = rows * 2 * batch.width + 2 * batch.num_tokens * batch.heads * (
        batch.width + batch.latent
    )
    floor_us = 1e6 * max(moved / rates[0], batch.flops / rates[1])

    def wrong(out: Any) -> str | None:
        found = compare("out", host_array(out), expected["out"])
        return None if found is None else str(found)

    def ours() -> str | None:
        step.poison()
        step.attend()
        found = compare("lse", host_array(step.lse), expected["lse"])
        return wrong(step.out) or (None if found is None else str(found))

    def record(
        call: Step, check: Callable[[], str | None], peer: str | None, repeats: int = REPEATS
    ) -> dict[str, Any]:
        return gated(
            "verify_attention",
            shape,
            check=check,
            timing=lambda: time_graph(call, repeats),
            floor_us=floor_us,
            bytes=moved,
            flops=batch.flops,
            peer=peer,
        )

    yield record(step.attend, ours, None)
    slots = torch.from_numpy(layout.kv_indices()).cuda()
    read, found = read_step(step.pool, slots)

    def reads() -> str | None:
        read()
        mixed = step.pool[slots.long()].view(torch.int32)
        return None if _xor(found) == _xor(mixed) else "the rows were not read"

    yield record(read, reads, "reading the same rows alone")
    for name, call, out, repeats in _peers(batch, step):

        def check(call: Step = call, out: Any = out) -> str | None:
            out.fill_(float("nan"))
            call()
            return wrong(out)

        yield record(call, check, name, repeats)


def _xor(words: Any) -> int:
    """Return the exclusive or of all 32-bit words of a tensor."""
    import numpy as np

    return int(np.bitwise_xor.reduce(words.cpu().numpy().reshape(-1)))


def _peers(batch: Any, step: Any) -> Iterator[tuple[str, Step, Any, int]]:
    """Yield (name, step, its output [N, H, latent], repeats)."""
    import torch

    layout = batch.layout
    requests, heads, latent, width = layout.num_requests, batch.heads, batch.latent, batch.width
    tree_tokens = int(layout.tree_tokens[0])
    prefix = int(layout.seq_lens[0])
    prefix_slots = torch.from_numpy(layout.kv_indices("int64")).cuda().view(requests, prefix)
    drafts = torch.from_numpy(layout.out_cache_loc.copy()).cuda().view(requests, tree_tokens)
    slots = torch.cat([prefix_slots, drafts], dim=1).reshape(-1)
    sees = torch.stack([torch.from_numpy(tree.mask().copy()) for tree in batch.trees]).cuda()
    out = torch.empty_like(step.out)

    hidden = torch.zeros((requests, tree_tokens, 1, tree_tokens), device="cuda")
    hidden.masked_fill_(~sees[:, :, None], -torch.inf)
    queries = step.q.view(requests, tree_tokens * heads, width)
    result = out.view(requests, tree_tokens * heads, latent)

    def gather_bmm() -> None:
        rows = step.pool.index_select(0, slots).view(requests, prefix + tree_tokens, width)
        scores = torch.bmm(queries, rows.mT, out_dtype=torch.float32) * batch.sm_scale
        tail = scores.view(requests, tree_tokens, heads, -1)[..., prefix:]
        tail += hidden
        weights = torch.softmax(scores, dim=2).bfloat16()
        torch.bmm(weights, rows[:, :, :latent], out=result)

    yield "torch, gather and bmm", gather_bmm, out, REPEATS
    try:
        extend = importlib.import_module(_SGLANG)
    except ImportError:
        return

    fresh = step.pool[drafts.reshape(-1)].view(-1, 1, width)
    pool = step.pool.view(-1, 1, width)
    full = torch.ones(
        (requests, tree_tokens, prefix + tree_tokens), dtype=torch.uint8, device="cuda"
    )
    full[:, :, prefix:] = sees
    bounds = torch.arange(requests + 1, device="cuda")
    arguments = (
        step.q, fresh, fresh[..., :latent].contiguous(), out, pool, pool[..., :latent],
        bounds * tree_tokens, (bounds * prefix).int(), prefix_slots.reshape(-1),
        full.reshape(-1), True, bounds * tree_tokens * (prefix + tree_tokens), tree_tokens,
        1.0, 1.0,
    )  # fmt: skip

    def sglang() -> None:
        extend.extend_attention_fwd(*arguments, sm_scale=batch.sm_scale)

    yield "SGLang, Triton extend_attention", sglang, out, _SGLANG_REPEATS
