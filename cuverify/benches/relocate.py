"""How long it takes to move KV rows: our kernels, torch layer by layer, SGLang's tiled copy.

Pools as Kimi K2 has them: 61 layers of bf16 rows of 1,152 bytes. Lists are random over the pool.
`disjoint`: nobody reads what another row writes. `accepted`: the moves of accepted paths, windows
of 16 slots, most of them chained. `cycle`: all rows are one cycle, in any order. A list with room
for more than 1,024 rows takes several launches, all of them timed.

A time is that of one of several moves in a replayed graph, each with lists, tables and slots of
its own, so that none finds its rows in a cache; the L2 cache is swept before each replay. `alone`
is one move in a graph of its own, in which the graph's start counts. Lists that move more than the
L2 cache holds many times over are timed alone only.

SGLang's kernel is timed where ``sglang.kernels.ops.kvcache.cache_move`` can be imported; it is
Triton and moves a list in chunks, one launch each: of 256 rows, as SGLang's own pool calls it, and
of 64 rows, which suits short lists better. A chunk reads before it writes, a list of several does
not: the gate finds out.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuverify.bench import Timing, copy_floor_us, gated, time_copies, time_graph

LAYERS = 61
WIDTH = 576  # bf16 elements: 512 latent, 64 rope
ROW_BYTES = 2 * WIDTH
ROWS = (8, 64, 1024, 16_384, 65_536)
SLOTS = 300_000  # 21 GB; the gate needs a copy of it, and some more
LISTS = (
    *(("disjoint", rows) for rows in ROWS),
    *(("accepted", rows) for rows in ROWS[:3]),
    *(("cycle", rows) for rows in ROWS[2:]),
)
REPEATS = 50
LONG_REPEATS = 15
"""Of a list of more than `COPIED_ROWS` rows, which takes milliseconds."""
COPIES = 16
"""Moves of a short list in one graph."""
COPIED_ROWS = 1024
"""Longest list that is timed so."""

_SGLANG = "sglang.kernels.ops.kvcache.cache_move"
# How SGLang's pool calls it for rows below 4,096 bytes, and a smaller chunk besides.
_SGLANG_CHUNKS = {
    "SGLang, tiled Triton copy, chunks of 256 rows as its pool calls it": 256,
    "SGLang, tiled Triton copy, chunks of 64 rows": 64,
}
_SGLANG_TILE = 128
_SGLANG_WARPS = 4
_WINDOW = 16

Step = Callable[[], None]
Lists = Sequence[tuple[Any, Any]]  # sources and destinations of each


def run(device: str) -> list[dict[str, Any]]:
    """Time moves on a GPU; nothing on a CPU, where the host lane says nothing about speed."""
    if device != "cuda":
        return []
    import torch

    free, _ = torch.cuda.mem_get_info()
    slots = min(SLOTS, free // 4 // (LAYERS * ROW_BYTES))
    storage = torch.empty((LAYERS, slots, WIDTH), dtype=torch.bfloat16, device="cuda")
    storage.view(torch.int64).random_()
    records: list[dict[str, Any]] = []
    for kind, rows in LISTS:
        if 2 * rows < slots:
            records.extend(_moves(storage, kind, rows))
    return records


def move_list(
    kind: str, rows: int, slots: int, *, copy: int = 0
) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return sources and destinations of a list of one of the kinds in `LISTS`.

    Lists of different `copy` have no slot in common.
    """
    rng = np.random.default_rng(rows)
    drawn = rng.permutation(slots - 1) + 1
    requests = -(-rows // 4)
    taken = {"disjoint": 2 * rows, "cycle": rows, "accepted": requests * _WINDOW}[kind]
    drawn = drawn[copy * taken :][:taken]
    if kind == "disjoint":
        return drawn[:rows], drawn[rows:]
    if kind == "cycle":
        order = rng.permutation(rows)  # where a row stands in the list says nothing of its chain
        return drawn[order], np.roll(drawn, 1)[order]
    nodes = np.cumsum(rng.geometric(0.6, (requests, 4)), axis=1).clip(
        max=_WINDOW - 4 + np.arange(4)
    )
    windows = drawn.reshape(requests, _WINDOW)
    src = np.take_along_axis(windows, nodes, axis=1).reshape(-1)[:rows]
    return src, windows[:, 1:5].reshape(-1)[:rows]


def _moves(storage: Any, kind: str, rows: int) -> Iterator[dict[str, Any]]:
    """Yield the records of one list."""
    import torch

    from cuverify.ops.relocate import RelocatePlan

    slots = storage.shape[1]
    copies = COPIES if rows <= COPIED_ROWS and COPIES * _WINDOW // 4 * rows < slots else 1
    lists: list[tuple[Any, Any]] = []
    for at in range(copies):
        src, dst = move_list(kind, rows, slots, copy=at)
        lists.append((torch.from_numpy(src.copy()).cuda(), torch.from_numpy(dst.copy()).cuda()))
    count = torch.tensor([rows], dtype=torch.int32, device="cuda")
    pools = list(storage)
    plans = [RelocatePlan(pools, src, dst, count.clone()) for src, dst in lists]
    moved = 2 * rows * LAYERS * ROW_BYTES
    shape = {
        "list": kind, "rows": rows, "layers": LAYERS, "row_bytes": ROW_BYTES, "slots": slots,
        "copies": copies,
    }  # fmt: skip

    repeats = REPEATS if rows <= COPIED_ROWS else LONG_REPEATS

    def ours() -> str | None:
        wrong = _what_is_wrong(storage, lists, plans)
        faults = [str(plan.peek_status()) for plan in plans if plan.peek_status().code != 0]
        return wrong or next(iter(faults), None)

    def record(
        steps: Sequence[Step], check: Callable[[], str | None], peer: str | None
    ) -> dict[str, Any]:
        def alone() -> Timing:
            return time_graph(steps[0], repeats)

        return gated(
            "relocate",
            shape,
            check=check,
            timing=lambda: time_copies(steps, repeats),
            alone=alone if copies > 1 else None,
            floor_us=copy_floor_us(moved),
            bytes=moved,
            peer=peer,
        )

    yield record(plans, ours, None)
    if len(plans[0].launches) > 1 and kind == "disjoint":
        yield gated(
            "relocate_check", {"rows": rows, "slots": slots}, check=ours,
            timing=lambda: time_graph(plans[0].launches[0], repeats),
        )  # fmt: skip
    for peer, steps in _peers(storage, lists):
        yield record(
            steps,
            lambda steps=steps: _what_is_wrong(storage, lists, steps),  # type: ignore[misc]
            peer,
        )


def _peers(storage: Any, lists: Lists) -> Iterator[tuple[str, list[Step]]]:
    def gather_scatter(src: Any, dst: Any) -> None:
        for pool in storage:
            pool[dst] = pool[src]

    yield "torch, layer by layer", [functools.partial(gather_scatter, *ends) for ends in lists]
    try:
        cache_move = importlib.import_module(_SGLANG)
    except ImportError:
        return
    rows = len(lists[0][0])
    for name, chunk in _SGLANG_CHUNKS.items():
        # a list that is one chunk of either size is the same launch twice
        if chunk == min(_SGLANG_CHUNKS.values()) or rows > min(_SGLANG_CHUNKS.values()):
            yield name, [_sglang(cache_move, storage, *ends, chunk) for ends in lists]


def _sglang(cache_move: Any, storage: Any, src: Any, dst: Any, chunk: int) -> Step:
    import torch

    addresses = [pool.data_ptr() for pool in storage]
    table = torch.tensor(addresses, dtype=torch.uint64, device="cuda")
    strides = torch.full((len(addresses),), ROW_BYTES, dtype=torch.int64, device="cuda")
    config = {
        "bytes_per_tile": _SGLANG_TILE,
        "byte_tiles": -(-ROW_BYTES // _SGLANG_TILE),
        "num_warps": _SGLANG_WARPS,
    }

    def step() -> None:
        for to, source in zip(dst.split(chunk), src.split(chunk), strict=True):
            upper = 1 << (len(to) - 1).bit_length()
            cache_move.copy_all_layer_kv_cache_func(
                table, strides, to, source, len(to), upper, config
            )

    return step


def _what_is_wrong(storage: Any, lists: Lists, steps: Sequence[Step]) -> str | None:
    """Run steps, one a list, on new content; return what differs in any bit from right moves."""
    import torch

    bits = storage.view(torch.int64)
    for _, dst in lists:
        bits[:, dst] = bits[:, dst].bitwise_not_()
    expected = bits.clone()
    for pool in expected:
        for src, dst in lists:
            pool[dst] = pool[src]
    for step in steps:
        step()
    for layer, (pool, right) in enumerate(zip(bits, expected, strict=True)):
        if not torch.equal(pool, right):
            slot = int((pool != right).any(dim=1).nonzero()[0])
            return f"layer {layer}, slot {slot} is wrong after the move"
    return None
