"""Grouped-query verify attention against its oracle and plain dense attention, in both lanes."""

from __future__ import annotations

import functools
import itertools
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from cuverify.validators.compare import compare_all, host_array
from hypothesis import given
from hypothesis import strategies as st

import cuverify
from cuverify import gqa_problem, launching
from cuverify.bench import Timing
from cuverify.benches import verify_attention
from cuverify.benches import verify_gqa as bench
from cuverify.buffers import read
from cuverify.cases import Target
from cuverify.cases.verify_gqa import CASE, SizedGqaBatch, VerifyGqaStep
from cuverify.ceilings import Ceilings
from cuverify.comparison import READING
from cuverify.compile import max_shared_bytes
from cuverify.errors import ArgumentError, CaseError, CheckerError
from cuverify.gqa_batch import KEY_WIDTH, SM_SCALE, GqaBatch
from cuverify.gqa_problem import GqaProblem, OwnGqa
from cuverify.gqa_shapes import DFLASH_BLOCK, GRID, GqaShape, select_gqa
from cuverify.kernel import Kernel
from cuverify.listed_step import Capacity
from cuverify.narrow import narrow, widen
from cuverify.ops import verify_gqa as op
from cuverify.ops.verify_gqa import (
    COMPACT_VALUES,
    ROW_TILES,
    VALUES,
    GqaWorkspace,
    VerifyGqa,
    plan_verify_gqa,
    row_tile,
    verify_gqa_kernels,
)
from cuverify.ops.verify_plan import VerifyPlan
from cuverify.peers import GQA_MODULES, find, torch_gqa
from cuverify.reference.verify_gqa import verify_gqa as oracle
from cuverify.sources import KernelSource
from cuverify.static_buffers import write
from cuverify.strategies import examples, verify_batches
from cuverify.tree import DraftTree
from cuverify.verify_shapes import Drafts
from cuverify.verify_variants import VariantName, choose_gqa_variant

sys.path.insert(0, str(Path(__file__).parent))
from attention_steps import FINE, assert_rounded_once, batch_of, bf16

GROUPS = (4, 8, 5, 7, 1, 2)
"""Of the kinds of batches that the case draws."""

gpu = pytest.mark.gpu
both_lanes = pytest.mark.parametrize("xp", ["numpy", pytest.param("torch-cuda", marks=gpu)])
each_text = pytest.mark.parametrize(
    ("xp", "variant"),
    [
        ("numpy", None),
        pytest.param("torch-cuda", "portable", marks=gpu),
        pytest.param("torch-cuda", None, marks=gpu),
    ],
)
"""On a GPU the portable text and that of the rule."""


def sized(
    lens: Sequence[int],
    trees: Sequence[DraftTree | int],
    group: int = 4,
    kv_heads: int = 1,
    drafts: Drafts = "tree",
    **more: Any,
) -> SizedGqaBatch:
    latent, rope = KEY_WIDTH
    base = batch_of(lens, trees, latent=latent, rope=rope, sm_scale=SM_SCALE, **more)
    return SizedGqaBatch(GqaBatch(base, group, kv_heads, drafts), Capacity.of([base]))


def run(step: VerifyGqaStep, replay: Any = None) -> None:
    """Run a step, on the host lane under the checkers, or replay the graph that holds it."""
    if step.xp == "numpy":
        with cuverify.checked():
            step()
    else:
        (replay or step)()


def wrong_in(step: VerifyGqaStep, replay: Any = None) -> list[str]:
    """Run a step and say what it got wrong."""
    step.poison()
    run(step, replay)
    found = {name: host_array(tensor) for name, tensor in step.outputs.items()}
    return [str(mismatch) for mismatch in compare_all(found, step.expected())]


def assert_right(batch: SizedGqaBatch, xp: Target = "numpy", **how: Any) -> VerifyGqaStep:
    """Run a batch by the text of the rule, and on a GPU by the portable one before."""
    variants = [how.pop("variant", None)]
    if xp == "torch-cuda":
        variants[:0] = ["portable"]
    for variant in variants:
        more = {"num_ctas": 3, "plan_values": FINE, **how, "variant": variant}
        step = VerifyGqaStep(batch, xp, **more)
        assert wrong_in(step) == [], batch
    return step


def outputs(step: VerifyGqaStep) -> list[Any]:
    return [host_array(tensor).bits() for tensor in (step.out, step.lse)]


# --- shapes --------------------------------------------------------------------------------------


@both_lanes
@pytest.mark.parametrize("tree", [1, 4, 5, 8, 9, 17, 64, 65, 129, 256])
def test_trees_of_every_width(tree: int, xp: Target) -> None:
    step = assert_right(sized([21], [tree]), xp)
    assert step.attend.rows == row_tile(4, tree, step.attend.variant)


@both_lanes
@pytest.mark.parametrize("prefix", [0, 1, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 160])
def test_prefixes_around_tiles(prefix: int, xp: Target) -> None:
    for tree in (2, 5, 9):
        assert_right(sized([prefix], [tree]), xp)


@each_text
@pytest.mark.parametrize(
    ("partial", "exponent"), [(None, 0), (None, 10), ("bf16", -80), ("bf16", 116)]
)
@pytest.mark.parametrize("num_ctas", [2, 5, 24])
def test_what_a_cut_costs(
    partial: Literal["bf16"] | None,
    exponent: int,
    num_ctas: int,
    xp: Target,
    variant: VariantName | None,
) -> None:
    # with equal weights, which are 1, nothing is rounded but partials and the result
    batch = sized([700], [1])
    step = VerifyGqaStep(batch, xp, num_ctas=num_ctas, partial=partial, variant=variant)
    layout = batch.batch.base.layout
    pool = np.abs(widen(batch.batch.v_buffer())) * np.float32(2.0**exponent)
    write(step.rows["q"], np.zeros_like(batch.batch.q()))
    write(step.rows["v_buffer"], narrow(pool, "bf16"))
    step()
    slots = [*layout.prefix_slots(0), layout.out_cache_loc[0]]
    right = pool[slots].mean(axis=0, dtype=np.float64)
    assert_rounded_once(widen(host_array(step.out).bits()[0]), right, partial)


@both_lanes
def test_a_group_that_divides_no_row_tile(xp: Target) -> None:
    batch = sized([150, 3], [9, 12], group=5, kv_heads=3)
    assert_right(batch, xp)
    # and with the text for GPUs of little shared memory
    assert_right(batch, xp, variant="portable", values=COMPACT_VALUES[64])


@gpu
@pytest.mark.parametrize("group", [1, 2, 3, 6, 7, 8, 16, 32])
def test_other_groups_on_a_gpu(group: int) -> None:
    for tree in (1, 33):
        batch = sized([300, 65], [tree, tree], group=group, kv_heads=2, heads=32)
        assert_right(batch, "torch-cuda", num_ctas=16)


@both_lanes
@pytest.mark.parametrize("num_ctas", [1, 2, 5, 16])
def test_any_number_of_pieces(num_ctas: int, xp: Target) -> None:
    step = assert_right(sized([333, 64, 0], [9, 9, 1], kv_heads=2), xp, num_ctas=num_ctas)
    assert read(step.plan.workspace.work)[:, 5].max() >= num_ctas / 4


@both_lanes
def test_pieces_that_warps_merge_together(xp: Target) -> None:
    step = assert_right(sized([700], [3]), xp, num_ctas=20, combine_ctas=2)
    assert read(step.plan.workspace.work)[:, 5].max() > 12


@both_lanes
@pytest.mark.parametrize("page_size", [16, 64])
def test_pools_of_pages(page_size: int, xp: Target) -> None:
    assert_right(sized([100, 30], [9, 5], kv_heads=2, page_size=page_size), xp)


@both_lanes
def test_padded_requests_and_gaps(xp: Target) -> None:
    for source in ("slots", "separate"):
        batch = sized([40, 3], [9, 9, 9, 9], padded=2, row_gap=8, draft_source=source)
        step = assert_right(batch, xp)
        assert np.isfinite(host_array(step.lse).data).all()


# --- what rows see -------------------------------------------------------------------------------


@both_lanes
def test_any_mask(xp: Target) -> None:
    for tree in (9, 70):
        assert_right(sized([20, 0], [tree, 5], masks="any"), xp)


@both_lanes
def test_a_block_sees_itself_and_the_context(xp: Target) -> None:
    for source in ("slots", "separate"):
        chains = [DraftTree.chain(16)] * 2
        batch = sized([90, 7], chains, drafts="block", draft_source=source)
        step = assert_right(batch, xp)
        # every token of a block sees as much as the last one of a chain, whose mask is full
        chain = sized([90, 7], chains, draft_source=source)
        last = [15, 31]
        of_chain = assert_right(chain, xp)
        for mine, other in zip(outputs(step), outputs(of_chain), strict=True):
            np.testing.assert_array_equal(mine[last], other[last])


@each_text
def test_rows_that_see_nothing(xp: Target, variant: VariantName | None) -> None:
    how = {"num_ctas": 3, "plan_values": FINE, "variant": variant}
    step = VerifyGqaStep(sized([0, 33], [9, 9]), xp, **how)
    step.visible[:] = 0
    run(step)
    bits, lse = host_array(step.out).bits(), host_array(step.lse).data
    assert (bits[:9] == 0).all()
    assert np.isneginf(lse[:9]).all()
    assert np.isfinite(lse[9:]).all()


@each_text
@pytest.mark.parametrize("slot", [-1, 10**6, 2**62])
def test_slots_outside_the_pool_are_never_read(
    slot: int, xp: Target, variant: VariantName | None
) -> None:
    batch = sized([40], [9], kv_heads=2)
    step = VerifyGqaStep(batch, xp, num_ctas=2, plan_values=FINE, variant=variant)
    run(step)
    before = outputs(step)
    step.out_cache_loc[8] = slot
    run(step)
    sees = np.array([int(row[0]) >> 8 & 1 for row in batch.batch.visible()], bool)
    np.testing.assert_array_equal(
        np.isnan(host_array(step.lse).data).all(axis=1), sees, err_msg="rows that see the slot"
    )
    for bits, right in zip(outputs(step), before, strict=True):
        np.testing.assert_array_equal(bits[~sees], right[~sees])


def test_the_oracle_is_plain_attention() -> None:
    batch = sized([12, 5], [4, 3], group=2, kv_heads=2, masks="any").batch
    arguments = batch.oracle_arguments()
    q, keys, values = (bf16(arguments[name]) for name in ("q", "k_buffer", "v_buffer"))
    found, layout, words = oracle(**arguments), batch.base.layout, batch.visible()
    bounds = layout.qo_indptr()
    for request in range(2):
        drafts = layout.draft_slots(request)
        for token in range(bounds[request], bounds[request + 1]):
            seen = [n for n in range(len(drafts)) if int(words[token, 0]) >> n & 1]
            slots = np.concatenate([layout.prefix_slots(request), drafts[seen]])
            for head in range(4):
                scores = SM_SCALE * keys[slots, head // 2] @ q[token, head]
                weights = np.exp(scores - scores.max())
                out = weights @ values[slots, head // 2] / weights.sum()
                np.testing.assert_allclose(found.out[token, head], out, rtol=1e-12, atol=1e-12)
                lse = scores.max() + np.log(weights.sum())
                assert found.lse[token, head] == pytest.approx(lse, rel=1e-12)


# --- the same bits every time, and other inputs ----------------------------------------------------


@pytest.mark.parametrize("schedule", ["ascending", "descending", "random"])
def test_the_order_of_threads_and_blocks_decides_nothing(
    schedule: Literal["ascending", "descending", "random"],
) -> None:
    batch = sized([130, 40], [17, 5], kv_heads=2)
    first = assert_right(batch, num_ctas=5)
    again = VerifyGqaStep(batch, "numpy", num_ctas=5, plan_values=FINE)
    with cuverify.checked(schedule=schedule, seed=5):
        again()
    for one, other in zip(outputs(first), outputs(again), strict=True):
        np.testing.assert_array_equal(one, other)


@each_text
def test_the_same_launches_follow_other_inputs(xp: Target, variant: VariantName | None) -> None:
    latent, rope = KEY_WIDTH
    wide = {"latent": latent, "rope": rope, "sm_scale": SM_SCALE, "num_slots": 900}
    bases = [
        batch_of(lens, trees, seed=seed, **wide)
        for seed, (lens, trees) in enumerate(
            [([490, 20, 7], [8, 8, 8]), ([1, 0, 300], [8, 8, 8]), ([16, 16], [9, 14])]
        )
    ]
    size = Capacity.of(bases)
    batches = [SizedGqaBatch(GqaBatch(base, 4, 2), size) for base in bases]
    step = VerifyGqaStep(batches[0], xp, num_ctas=6, variant=variant)
    replay = captured(step) if xp == "torch-cuda" else None
    seen: list[list[Any]] = []
    for batch in (*batches, batches[0]):
        step.refill(batch)
        assert wrong_in(step, replay) == [], batch
        seen.append(outputs(step))
    for one, other in zip(seen[0], seen[-1], strict=True):
        np.testing.assert_array_equal(one, other)


def captured(step: VerifyGqaStep) -> Any:
    """Return the replay of a graph that holds a step."""
    import torch

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step()
    return graph.replay


@gpu
@pytest.mark.parametrize("variant", ["portable", None])
@pytest.mark.parametrize(("group", "kv_heads", "tree"), [(8, 1, 1), (4, 2, 8), (8, 2, 64)])
def test_a_gpu_repeats_itself_bit_by_bit(
    group: int, kv_heads: int, tree: int, variant: VariantName | None
) -> None:
    batch = sized([3000, 500, 0, 70], [tree] * 4, group=group, kv_heads=kv_heads)
    step = VerifyGqaStep(batch, "torch-cuda", variant=variant)
    assert wrong_in(step) == []
    first, replay = outputs(step), captured(step)
    for again in [step] * 5 + [replay] * 10:
        step.poison()
        again()
        for one, other in zip(first, outputs(step), strict=True):
            np.testing.assert_array_equal(one, other)


def test_an_empty_plan_writes_nothing() -> None:
    step = VerifyGqaStep(sized([20, 3], [9, 4]), "numpy", num_ctas=2)
    step.seq_lens[1] = -5
    step.poison()
    run(step)
    assert np.isnan(bf16(step.out)).all()
    assert np.isnan(step.lse).all()
    with pytest.raises(ArgumentError, match=r"seq_lens\[1\]=-5"):
        step.plan.read_status()


def test_what_a_step_cannot_hold_is_refused() -> None:
    first = sized([20, 5], [3, 3])
    step = VerifyGqaStep(first, "numpy")
    for batch in (replace(first.batch, group=3), sized([21, 5], [3, 3]).batch):
        with pytest.raises(CaseError):
            step.refill(SizedGqaBatch(batch, first.capacity))


# --- drawn batches -------------------------------------------------------------------------------


@examples(12)
@given(
    base=verify_batches(
        heads=(8,),
        widths=(KEY_WIDTH,),
        index_dtypes=("int32",),
        page_sizes=(1, 16, 64),
        max_requests=3,
        max_tree_tokens=20,
    ),
    num_ctas=st.integers(1, 7),
    kv_heads=st.sampled_from([1, 2]),
)
def test_drawn_batches(base: Any, num_ctas: int, kv_heads: int) -> None:
    batch = GqaBatch(replace(base, sm_scale=SM_SCALE), 4, kv_heads)
    assert_right(SizedGqaBatch(batch, Capacity.of([base])), num_ctas=num_ctas)


@gpu
@pytest.mark.parametrize("kind", range(6))
def test_drawn_batches_of_the_case_on_a_gpu(kind: int) -> None:
    pairs = CASE.device_batches(seed=3, examples=24)
    drawn = [pair for pair in itertools.islice(pairs, 24) if pair[1].batch.group == GROUPS[kind]]
    assert len(drawn) == 4
    for label, batch in drawn[:3]:
        assert wrong_in(CASE.step(batch, "torch-cuda")) == [], label


# --- what is timed -------------------------------------------------------------------------------


def test_shapes_read_as_they_are_called() -> None:
    for shape in (*GRID, *DFLASH_BLOCK, GqaShape.parse("1x180k+15x1k:33@5x1")):
        assert GqaShape.parse(shape.name) == shape
    shape = GqaShape.parse("16x4k:block16@4x2")
    assert (shape.batch, shape.drafts, shape.heads, shape.kv_heads) == (16, "block", 8, 2)
    rows = 16 * (4096 + 16)
    assert shape.bytes == rows * 2 * 2 * 256 + 16 * 16 * 8 * 2 * 256
    assert shape.flops == 4 * 16 * 8 * rows * 128
    assert select_gqa(["dflash_block", "1x4k:8@4x2"])[-1].group == 4
    for name in ("1x4k:8", "1x4k:8@4", "1x4k:8@0x1", "1x4k:8/fp8@4x1", "grids"):
        with pytest.raises(ArgumentError, match="shapes="):
            select_gqa([name])


def test_nothing_is_timed_without_a_gpu() -> None:
    assert bench.run("cpu") == []
    with pytest.raises(CaseError, match="shapes"):
        bench.run("cpu", shapes=["1x4k"])
    with pytest.raises(CaseError, match="known are 'torch, gather \\+ bmm'"):
        bench.run("cpu", peers=["FlashInfer*"])


@pytest.mark.parametrize("name", ["2x40:5@4x3", "1x33:block16@4x1"])
def test_what_is_timed_passes_the_gate(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    on_cpu = functools.partial(GqaProblem, slots=300, device="cpu")
    monkeypatch.setattr(gqa_problem, "GqaProblem", on_cpu)
    monkeypatch.setattr(
        verify_attention, "time_copies", lambda steps, repeats, warmups: Timing(1.0, 0.0, repeats)
    )
    with cuverify.checked():
        peers = find(["torch*"], None, GQA_MODULES)[0]
        records = list(bench.attention(GqaShape.parse(name), Ceilings(4e12, 4e12, 8e14), peers))
    assert [record["error"] for record in records if isinstance(record["error"], str)] == []
    assert [record["peer"] for record in records] == [READING, None, *torch_gqa.NAMES]
    assert {record["shape"]["name"] for record in records} == {name}


def test_a_wrong_bit_is_not_timed() -> None:
    problem = GqaProblem(GqaShape.parse("1x33:8@4x1"), slots=300, device="cpu")
    with cuverify.checked():
        own = OwnGqa.of(problem)
        assert own.judge() is None
        problem.visible[0, 0] ^= 2  # the root sees its first child
        assert "out[0, " in str(own.judge())


@gpu
def test_ours_and_torch_are_timed_behind_the_gate() -> None:
    shapes = ["2x1k:5@3x2", "1x1k:block16@4x1"]
    records = bench.run("cuda", shapes=shapes, peers=["torch*"])
    wrong = [record["error"] for record in records if isinstance(record["error"], str)]
    assert wrong == []
    assert len([record for record in records if record["op"] == "verify_gqa"]) == 2 * 4


# --- planted bugs --------------------------------------------------------------------------------

MUTANTS = [
    ("no barrier behind the wait", "ptx::cp_async_wait<STAGES - 2>();\n            __syncthreads();", "ptx::cp_async_wait<STAGES - 2>();"),
    ("warps do not meet", "if (own.kv_warp < width) {\n                state.take(lane_room);\n            }", ""),
    ("another KV head's rows", "first + (row * stride + head * head_stride)", "first + row * stride"),
]  # fmt: skip


def caught(text: str, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a step with this text is refused by a checker or gives wrong numbers."""
    source = KernelSource.from_text(text, name="verify_gqa.cu")

    def kernels(variant: str = "portable", **values: int | str) -> tuple[Kernel, ...]:
        made = source.with_values(**values)
        return Kernel(made, "verify_gqa_partials"), Kernel(made, "verify_gqa_combine")

    monkeypatch.setattr(op, "verify_gqa_kernels", kernels)
    step = VerifyGqaStep(
        sized([150, 40], [7, 7], kv_heads=2, masks="any"), "numpy", num_ctas=3, plan_values=FINE
    )
    try:
        if wrong_in(step):
            return True
        step.out_cache_loc[2] = 10**9
        with cuverify.checked():
            step()
    except CheckerError:
        return True
    return False


@pytest.mark.parametrize(("old", "new"), [m[1:] for m in MUTANTS], ids=[m[0] for m in MUTANTS])
def test_mutants_are_caught(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = KernelSource.from_package("verify_gqa").text
    headers = {file.name: file for file in KernelSource.from_package("verify_gqa").headers()}
    common = headers["gqa.cuh"].read_text().replace("#pragma once", "")
    text = text.replace('#include "gqa.cuh"', common)
    assert text.count(old) == 1
    assert caught(text.replace(old, new), monkeypatch)


SM90_MUTANTS = [
    ("the mask is not asked", "if (begin + TILE > masked_from) {", "if (false) {"),
    ("shares are not taken", "state.take(lane_room);", ""),
    ("both halves have the first rows", "BY_TURNS ? 0 : side * WARPGROUP_ROWS;", "0;"),
    ("values of the tile's keys", "hopper::matrix(tile + VALUES_AT,", "hopper::matrix(tile,"),
    ("a slot outside is a row of zeros", "slot < source.num_slots ? slot : OUTSIDE", "slot < source.num_slots ? slot : PAST"),
]  # fmt: skip


@gpu
@pytest.mark.parametrize(
    ("old", "new"), [m[1:] for m in SM90_MUTANTS], ids=[m[0] for m in SM90_MUTANTS]
)
def test_mutants_of_the_text_for_hopper_gpus_are_caught(
    old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if choose_gqa_variant(launching.capability("cuda:0")) != "sm90":
        pytest.skip("the text is for Hopper GPUs")
    text = KernelSource.from_package("verify_gqa_sm90").text
    assert text.count(old) == 1
    source = KernelSource.from_text(text.replace(old, new), name="verify_gqa_sm90.cu")

    def kernels(variant: str = "sm90", **values: int | str) -> tuple[Kernel, ...]:
        made = source.with_values(**values)
        return Kernel(made, "verify_gqa_partials_sm90"), Kernel(made, "verify_gqa_combine_sm90")

    monkeypatch.setattr(op, "verify_gqa_kernels", kernels)
    found: list[str] = []
    for group in (8, 5):  # row tiles of 128 and of 64 rows
        batch = sized([150, 40], [13, 7], group=group, kv_heads=2, masks="any")
        step = VerifyGqaStep(batch, "torch-cuda", num_ctas=3, plan_values=FINE)
        found += wrong_in(step)
        step.out_cache_loc[2] = -1
        step()
        sees = np.array([int(row[0]) >> 2 & 1 for row in batch.batch.visible()[:13]], bool)
        assert sees.any()
        if not np.isnan(host_array(step.lse).data[:13][sees]).all():
            found.append("a slot outside the pool is no NaN")
    assert found


# --- texts ---------------------------------------------------------------------------------------


def test_the_rule() -> None:
    assert choose_gqa_variant(None) == choose_gqa_variant((12, 0)) == "portable"
    assert choose_gqa_variant((9, 0)) == choose_gqa_variant((9, 0), rows=128) == "sm90"
    assert choose_gqa_variant((9, 0), rows=32) == "portable"


@pytest.mark.parametrize(
    ("group", "tree", "portable", "sm90"),
    [(8, 1, 16, 64), (4, 8, 32, 64), (8, 8, 64, 64), (8, 9, 64, 128), (4, 64, 64, 128), (5, 17, 64, 64), (5, 64, 64, 64)],
)  # fmt: skip
def test_row_tiles(group: int, tree: int, portable: int, sm90: int) -> None:
    assert row_tile(group, tree) == portable
    assert row_tile(group, tree, "sm90") == sm90


@pytest.mark.parametrize("rows", ROW_TILES["sm90"])
@pytest.mark.parametrize("index", ["int", "long long"])
def test_the_text_for_hopper_gpus_spills_nothing(rows: int, index: str) -> None:
    kernels = verify_gqa_kernels("sm90", ROWS=rows, GROUP=4, KV_INDEX=index, QO_INDEX=index)
    for kernel in kernels:
        cubin = kernel.compile("sm_90a")
        resources = cubin.resources[kernel.name]
        assert (resources.spill_store_bytes, resources.spill_load_bytes) == (0, 0), resources
        assert cubin.warnings == ()
        assert "Potential Performance Loss" not in cubin.log
        shared = resources.static_shared_bytes + (kernel.declared_shared() or 0)
        assert shared <= max_shared_bytes("sm_90")


# --- resources -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("arch", "chosen", "tiles"),
    [
        ("sm_80", COMPACT_VALUES, (64,)),
        ("sm_86", COMPACT_VALUES, (32, 64)),
        ("sm_89", COMPACT_VALUES, (32, 64)),
        ("sm_90", VALUES, (16, 32, 64)),
        ("sm_120", COMPACT_VALUES, (32, 64)),
    ],
)
def test_nothing_is_spilled_and_shared_memory_fits(
    arch: str, chosen: Any, tiles: tuple[int, ...]
) -> None:
    for rows in tiles:
        for kernel in verify_gqa_kernels(ROWS=rows, **chosen[rows]):
            resources = kernel.compile(arch).resources[kernel.name]
            spilled = resources.spill_store_bytes, resources.spill_load_bytes
            assert (spilled, resources.stack_bytes) == ((0, 0), 0), resources
            shared = resources.static_shared_bytes + (kernel.declared_shared() or 0)
            assert shared <= min(max_shared_bytes(arch), max_shared_bytes("sm_120"))


@pytest.mark.parametrize(
    ("kib", "chosen"), [(228, VALUES), (164, COMPACT_VALUES), (100, COMPACT_VALUES)]
)
def test_tiles_are_as_large_as_two_blocks_allow(
    kib: int, chosen: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(op, "shared_room", lambda device: kib << 10)
    monkeypatch.setattr(launching, "shared_room", lambda device: kib << 10)
    monkeypatch.setattr(launching, "multiprocessors", lambda device: 10)
    for rows in VALUES:
        values = op.text_values(rows, "cuda:0")
        assert values == chosen[rows]
        kernel, _ = verify_gqa_kernels(ROWS=rows, **values)
        wanted = 10 if (rows, kib) == (16, 100) else 20
        assert launching.resident_blocks(kernel, "cuda:0") == wanted
    assert op.text_values(64, None) == VALUES[64]


# --- misuse --------------------------------------------------------------------------------------


def good() -> dict[str, Any]:
    """Return arguments that are right: two requests, nine tokens each, 4 x 2 heads."""
    rng = np.random.default_rng(1)
    pool = rng.integers(0, 100, (64, 2, 128)).astype(np.uint16)
    return {
        "q": np.zeros((18, 8, 128), np.uint16),
        "k_buffer": pool,
        "v_buffer": pool.copy(),
        "out": np.zeros((18, 8, 128), np.uint16),
        "lse": np.zeros((18, 8), np.float32),
        "plan": planned(),
        "visible": np.zeros((18, 1), np.uint64),
        "sm_scale": 0.1,
        "out_cache_loc": np.zeros(18, np.int64),
    }


def planned(**other: Any) -> VerifyPlan:
    given: dict[str, Any] = {
        "group": 4,
        "kv_heads": 2,
        "max_tokens": 18,
        "max_tree_tokens": 9,
        "kv_indices": np.zeros(50, np.int32),
        **other,
    }
    return plan_verify_gqa(np.array([20, 30], np.int32), np.array([0, 9, 18], np.int32), **given)


def gapped(rows: int, heads: int, gap: int) -> Any:
    return np.zeros((rows, heads * 128 + gap), np.uint16)[:, : heads * 128].reshape(
        rows, heads, 128
    )


def small_scratch(plan: VerifyPlan) -> GqaWorkspace:
    own = GqaWorkspace.allocate(np.zeros(1), plan=plan, group=4, kv_heads=2)
    return GqaWorkspace(own.partial_out[:1], own.partial_lse)


U16 = np.uint16
MISUSE = [
    ("columns of q", lambda a: {"q": np.zeros((18, 8, 64), U16)}, r"q=.*\[18, 8, 64\].*128"),
    ("heads of q", lambda a: {"q": np.zeros((18, 4, 128), U16)}, "q=.*4 heads, out has 8"),
    ("other rows of q", lambda a: {"q": a["q"][:17]}, "q=.*17 rows.*18 tokens"),
    ("q in fp32", lambda a: {"q": a["q"].astype(np.float32)}, "q=.*float32.*bf16"),
    ("row stride of q", lambda a: {"q": gapped(18, 8, 4)}, "q=.*2056 bytes apart.*16"),
    ("no KV head divides them", lambda a: {name: np.zeros((64, 3, 128), U16) for name in ("k_buffer", "v_buffer")}, "out=.*8 heads.*3 KV heads"),
    ("pools of two shapes", lambda a: {"v_buffer": a["v_buffer"][:60]}, r"v_buffer=.*k_buffer, \[64, 2, 128\]"),
    ("a latent pool", lambda a: {"k_buffer": np.zeros((64, 576), U16)}, r"k_buffer=.*\[64, 576\]"),
    ("row stride of a pool", lambda a: {"k_buffer": gapped(64, 2, 4)}, "k_buffer=.*520 bytes apart"),
    ("empty pool", lambda a: {"k_buffer": a["k_buffer"][:0]}, r"k_buffer=.*\[0, 2, 128\]"),
    ("fewer tokens than planned", lambda a: {"plan": planned(max_tokens=19)}, "out=.*18 tokens.*19"),
    ("a plan for another group", lambda a: {"plan": planned(group=5)}, "plan=.*5 query rows.*groups of 4"),
    ("a plan without slots", lambda a: {"plan": planned(kv_indices=None)}, "plan=.*kv_indices"),
    ("mask too short", lambda a: {"visible": a["visible"][:17]}, "visible=.*17 rows"),
    ("mask too narrow", lambda a: {"plan": planned(max_tree_tokens=65)}, "visible=.*64 bits.*65 tokens"),
    ("slots in int32", lambda a: {"out_cache_loc": np.zeros(18, np.int32)}, "out_cache_loc=.*int32.*int64"),
    ("no drafts", lambda a: {"out_cache_loc": None}, "k_extend=None.*out_cache_loc"),
    ("drafts twice", lambda a: {"k_extend": a["q"][:, :2], "v_extend": a["q"][:, :2]}, "k_extend=.*either"),
    ("half of the drafts", lambda a: {"k_extend": a["q"][:, :2], "out_cache_loc": None}, "v_extend=None.*both"),
    ("KV heads of the drafts", lambda a: {"k_extend": a["q"], "v_extend": a["q"], "out_cache_loc": None}, "k_extend=.*8 KV heads.*2"),
    ("scale of infinity", lambda a: {"sm_scale": float("inf")}, "sm_scale=inf.*finite"),
    ("workspace too small", lambda a: {"workspace": small_scratch(a["plan"])}, "workspace.partial_out=.*too small.*2 KV heads"),
    ("out is q", lambda a: {"out": a["q"]}, "out=.*shares memory with q"),
    ("no blocks", lambda a: {"combine_ctas": 0}, "combine_ctas=0"),
    ("a text without such row tiles", lambda a: {"plan": planned(rows=16), "variant": "sm90"}, "variant='sm90'.*64 or 128 rows, not to 16"),
    ("no text", lambda a: {"variant": ""}, "variant=''.*portable, sm90"),
]  # fmt: skip


@pytest.mark.parametrize(("spoil", "says"), [m[1:] for m in MISUSE], ids=[m[0] for m in MISUSE])
def test_misuse_names_the_argument(spoil: Any, says: str) -> None:
    arguments = good()
    VerifyGqa(**arguments)
    arguments |= spoil(arguments)
    with pytest.raises(ArgumentError, match=f"(?s){says}"):
        VerifyGqa(**arguments)


def test_sizes_of_a_plan_are_checked() -> None:
    for other, says in (
        ({"group": 0}, "group=0"),
        ({"group": 33}, "group=33"),
        ({"kv_heads": 0}, "kv_heads=0"),
        ({"rows": 48}, "rows=48"),
        ({"rows": "64"}, "rows='64'"),
        ({"rows": 128}, "rows=128: wants 16 or 32 or 64 for portable"),
        ({"rows": 32, "variant": "sm90"}, "rows=32: wants 64 or 128 for sm90"),
        ({"group": 5, "rows": 128, "variant": "sm90"}, "rows=128.*a divisor of 320"),
        ({"variant": "fast"}, "variant='fast'.*portable, sm90"),
        ({"max_tree_tokens": 257}, "max_tree_tokens=257"),
    ):
        with pytest.raises(ArgumentError, match=says):
            planned(**other)


def test_scales_and_sizes_may_be_numpys() -> None:
    plan = planned(group=np.int64(4), kv_heads=np.int64(2), max_tree_tokens=np.int64(9))
    more = {"plan": plan, "sm_scale": np.float32(0.1), "combine_ctas": np.int64(2)}
    VerifyGqa(**(good() | more))
