"""Launches whose memory requests the host lane counts and ncu measures: the same in both lanes.

`python tests/memory_launches.py NAME...` makes them on a GPU, for ncu to look at.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

import cuverify
from cuverify import cases
from cuverify.static_buffers import static_buffer

if TYPE_CHECKING:
    from cuverify.cases import Target

FILE = Path(__file__).parent / "kernels" / "memory.cu"
_CTAS = 4
# Of the portable text: those of the host lane, whatever the GPU has room for.
_TILES = {"TILE": 16, "STAGES": 4, "QUERIES_SHARED": 4}

# kernel of memory.cu, threads, n, PITCH. The n of pairs and quads is two numbers, see `paired` there.
PATTERNS = (
    ("coalesced", 32, 32, 32),
    ("coalesced", 40, 40, 32),
    ("coalesced", 64, 37, 32),
    ("strided", 32, 2, 32),
    ("strided", 32, 0, 32),
    ("strided", 32, 8, 32),
    ("shifted", 32, 1, 32),
    ("predicated", 32, 3, 32),
    ("alternating", 32, 4, 32),
    ("column", 32, 5, 32),
    ("column", 32, 5, 33),
    ("column", 32, 5, 34),
    ("broadcast", 32, 3, 32),
    ("pairs", 32, 5 + 8 * 5, 32),
    ("pairs", 32, 0, 32),
    ("pairs", 32, 1 + 8 * 1, 32),
    ("pairs", 32, 2 + 8 * 2, 32),
    ("pairs", 32, 4 + 8 * 4, 32),
    ("pairs", 32, 6 + 8 * 6, 32),
    ("pairs", 32, 0 + 8 * 5, 32),
    ("pairs", 32, 5 + 8 * 0, 32),
    ("pairs", 32, 0 + 8 * 1, 32),
    ("pairs", 32, 5 + 8 * 6, 32),
    ("quads", 32, 5 + 8 * 5, 32),
    ("quads", 32, 0, 32),
    ("quads", 32, 1 + 8 * 1, 32),
    ("quads", 32, 2 + 8 * 2, 32),
    ("quads", 32, 4 + 8 * 4, 32),
    ("quads", 32, 6 + 8 * 6, 32),
    ("quads", 32, 0 + 8 * 5, 32),
    ("quads", 32, 5 + 8 * 0, 32),
    ("quads", 32, 0 + 8 * 1, 32),
    ("quads", 32, 5 + 8 * 6, 32),
    ("quad_rows", 32, 0, 32),
    ("quad_rows", 32, 0, 36),
    ("quad_rows", 32, 0, 40),
    ("matrices", 32, 0, 32),
    ("matrices", 32, 7, 32),
    ("matrices", 32, 0, 36),
    ("async_rows", 32, 32, 32),
    ("async_rows", 32, 32, 36),
    ("async_rows", 32, 13, 36),
    ("async_rows", 32, 0, 36),
    ("async_rows", 32, 32, 4),
    ("shared_atomics", 32, 0, 32),
    ("shared_atomics", 32, 1, 32),
    ("global_atomics", 32, 0, 32),
    ("global_atomics", 32, 1, 32),
)


def pattern(kernel: str, threads: int, n: int, pitch: int, xp: Target) -> Callable[[], None]:
    """Return the launch of a kernel of memory.cu."""
    loaded = cuverify.load_kernel(FILE, kernel=kernel, PITCH=pitch)
    out = static_buffer(xp, (128,), "int32" if kernel == "global_atomics" else "float32")
    x = static_buffer(xp, (32 * 48,), "float32")
    return lambda: loaded(1, threads, out, x, n)


def attention(xp: Target) -> Callable[[], None]:
    """Return a whole verify step of 512 + 64 columns by the portable text: plan, partials, combine."""
    from cuverify.cases.verify_attention import VerifyAttentionStep
    from cuverify.ops.verify_attention import VerifyAttention

    batches = dict(cases.load("verify_attention").batches(seed=0, examples=2))  # type: ignore[call-arg]
    sized = batches["real, T 8, H 8, 0"]
    step = VerifyAttentionStep(sized, xp, num_ctas=_CTAS, plan_values={}, values={})
    drafts: dict[str, Any] = (
        {"out_cache_loc": step.out_cache_loc}
        if sized.batch.draft_source == "slots"
        else {"draft_kv": step.draft_kv}
    )
    attend = VerifyAttention(
        step.q,
        step.pool,
        step.out,
        step.lse,
        plan=step.plan,
        visible=step.visible,
        sm_scale=sized.batch.sm_scale,
        combine_ctas=2,
        variant="portable",
        values=_TILES,
        **drafts,
    )

    def launch() -> None:
        step.plan()
        attend()

    return launch


def relocation(xp: Target) -> Callable[[], None]:
    """Return `relocate` on a real list, two layers of rows of 576 columns."""
    from cuverify.cases.relocate import RelocateStep

    for label, batch in cases.load("relocate").batches(seed=0, examples=2):  # type: ignore[call-arg]
        if label == "real: compaction, fifo":
            return RelocateStep(batch, xp, num_ctas=_CTAS, values={})
    raise AssertionError("the case has no such batch")


STEPS = {"attention": attention, "relocation": relocation}


def launches(name: str, xp: Target) -> list[Callable[[], None]]:
    """Return what a name stands for: one of STEPS, or ``patterns``."""
    if name == "patterns":
        return [pattern(*row, xp) for row in PATTERNS]
    return [STEPS[name](xp)]


if __name__ == "__main__":
    import torch

    for given in sys.argv[1:]:
        for launch in launches(given, "torch-cuda"):
            launch()
    torch.cuda.synchronize()
