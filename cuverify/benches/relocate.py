"""How long it takes to move KV rows: our kernels, torch layer by layer, SGLang's tiled copy.

Pools as Kimi K2 has them: 61 layers of bf16 rows of 1,152 bytes. Lists are random over the pool, in
one replayed graph with the L2 cache swept before each replay. `disjoint`: nobody reads what another
row writes. `accepted`: the moves of accepted paths, windows of 16 slots, most of them chained.
`cycle`: all rows are one cycle, in any order. A list with room for more than 1,024 rows takes
several launches, all of them timed.

SGLang's kernel is timed where ``sglang.kernels.ops.kvcache.cache_move`` can be imported; it is
Triton and moves a list in chunks, one launch each: of 256 rows, as SGLang's own pool calls it, and
of 64 rows, which suits short lists better. A chunk reads before it writes, a list of several does
not: the gate finds out.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuverify.bench import copy_floor_us, gated, time_graph

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


def move_list(kind: str, rows: int, slots: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Return sources and destinations of a list of one of the kinds in `LISTS`."""
    rng = np.random.default_rng(rows)
    drawn = rng.permutation(slots - 1) + 1
    if kind == "disjoint":
        return drawn[:rows], drawn[rows : 2 * rows]
    if kind == "cycle":
        order = rng.permutation(rows)  # where a row stands in the list says nothing of its chain
        return drawn[:rows][order], np.roll(drawn[:rows], 1)[order]
    requests = -(-rows // 4)
    nodes = np.cumsum(rng.geometric(0.6, (requests, 4)), axis=1).clip(
        max=_WINDOW - 4 + np.arange(4)
    )
    windows = drawn[: requests * _WINDOW].reshape(requests, _WINDOW)
    src = np.take_along_axis(windows, nodes, axis=1).reshape(-1)[:rows]
    return src, windows[:, 1:5].reshape(-1)[:rows]


def _moves(storage: Any, kind: str, rows: int) -> Iterator[dict[str, Any]]:
    """Yield the records of one list."""
    import torch

    from cuverify.ops.relocate import RelocatePlan

    slots = storage.shape[1]
    src, dst = (torch.from_numpy(end.copy()).cuda() for end in move_list(kind, rows, slots))
    count = torch.tensor([rows], dtype=torch.int32, device="cuda")
    pools = list(storage)
    plan = RelocatePlan(pools, src, dst, count)
    moved = 2 * rows * LAYERS * ROW_BYTES
    shape = {
        "list": kind, "rows": rows, "layers": LAYERS, "row_bytes": ROW_BYTES, "slots": slots,
    }  # fmt: skip

    def ours() -> str | None:
        wrong = _what_is_wrong(storage, src, dst, plan)
        return wrong or (None if plan.peek_status().code == 0 else str(plan.peek_status()))

    def record(step: Step, check: Callable[[], str | None], peer: str | None) -> dict[str, Any]:
        return gated(
            "relocate",
            shape,
            check=check,
            timing=lambda: time_graph(step, REPEATS),
            floor_us=copy_floor_us(moved),
            bytes=moved,
            peer=peer,
        )

    yield record(plan, ours, None)
    if len(plan.launches) > 1 and kind == "disjoint":
        yield gated(
            "relocate_check", {"rows": rows, "slots": slots}, check=ours,
            timing=lambda: time_graph(plan.launches[0], REPEATS),
        )  # fmt: skip
    for peer, step in _peers(storage, src, dst):
        yield record(step, lambda step=step: _what_is_wrong(storage, src, dst, step), peer)  # type: ignore[misc]


def _peers(storage: Any, src: Any, dst: Any) -> Iterator[tuple[str, Step]]:
    def gather_scatter() -> None:
        for pool in storage:
            pool[dst] = pool[src]

    yield "torch, layer by layer", gather_scatter
    try:
        cache_move = importlib.import_module(_SGLANG)
    except ImportError:
        return
    for name, chunk in _SGLANG_CHUNKS.items():
        # a list that is one chunk of either size is the same launch twice
        if chunk == min(_SGLANG_CHUNKS.values()) or len(src) > min(_SGLANG_CHUNKS.values()):
            yield name, _sglang(cache_move, storage, src, dst, chunk)


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


def _what_is_wrong(storage: Any, src: Any, dst: Any, step: Step) -> str | None:
    """Run a step on new content; return what differs from the right move in any bit."""
    import torch

    bits = storage.view(torch.int64)
    bits[:, dst] = bits[:, dst].bitwise_not_()
    expected = bits.clone()
    for pool in expected:
        pool[dst] = pool[src]
    step()
    for layer, (pool, right) in enumerate(zip(bits, expected, strict=True)):
        if not torch.equal(pool, right):
            slot = int((pool != right).any(dim=1).nonzero()[0])
            return f"layer {layer}, slot {slot} is wrong after the move"
    return None
