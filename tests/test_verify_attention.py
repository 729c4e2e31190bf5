"""Verify attention against plain dense float64 attention, in both lanes."""

from __future__ import annotations

import mmap
import sys
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import cuverify
from cuverify.cases import Target
from cuverify.compile import ARCHITECTURES, max_shared_bytes
from cuverify.errors import ArgumentError
from cuverify.launching import RESERVED_SHARED
from cuverify.narrow import narrow, widen
from cuverify.ops.verify_attention import (
    AttentionWorkspace,
    VerifyAttention,
    fitting_values,
    verify_attention_kernels,
    verify_workspace,
)
from cuverify.ops.verify_plan import VerifyPlan
from cuverify.strategies import ELEMENTS, examples, verify_batches
from cuverify.tree import DraftTree
from cuverify.verify_batch import VerifyBatch
from cuverify.verify_variants import VARIANTS

sys.path.insert(0, str(Path(__file__).parent))
from attention_steps import FINE, VerifyStep, assert_rounded_once, batch_of, bf16, dense

Schedule = Literal["ascending", "descending", "random"]
SCHEDULES: tuple[Schedule, ...] = ("ascending", "descending", "random")

gpu = pytest.mark.gpu
both_lanes = pytest.mark.parametrize("xp", ["numpy", pytest.param("torch-cuda", marks=gpu)])


def assert_right(batch: VerifyBatch, xp: Target = "numpy", **how: Any) -> VerifyStep:
    step = VerifyStep(batch, xp, **how)
    step()
    assert step.wrong() == [], batch
    return step


def pieces(step: VerifyStep) -> int:
    """Return the most pieces that a row tile was cut into."""
    from cuverify.buffers import read

    return int(read(step.plan.workspace.work)[:, 5].max())


# --- shapes --------------------------------------------------------------------------------------


@both_lanes
@pytest.mark.parametrize("heads", [8, 16])
@pytest.mark.parametrize("tree", [1, 2, 3, 7, 8, 9, 16, 17, 31, 33, 63, 64, 65, 127, 129, 255, 256])
def test_trees_of_every_width(tree: int, heads: int, xp: Target) -> None:
    assert_right(batch_of([37], [tree], heads=heads, latent=16), xp, num_ctas=5)


@both_lanes
@pytest.mark.parametrize("prefix", [0, 1, 2, 15, 16, 17, 31, 32, 33, 47, 48, 49, 63, 64, 65, 160])
def test_prefixes_around_tiles(prefix: int, xp: Target) -> None:
    for tree in (1, 5, 16):
        assert_right(batch_of([prefix], [tree]), xp, num_ctas=4)


@both_lanes
@pytest.mark.parametrize("width", [(16, 16), (32, 48), (64, 16), (80, 16), (112, 64), (512, 64)])
def test_columns(width: tuple[int, int], xp: Target) -> None:
    latent, rope = width
    assert_right(batch_of([50, 3], [9, 2], latent=latent, rope=rope), xp)


@both_lanes
@pytest.mark.parametrize("heads", [24, 32, 64, 128])
def test_more_heads(heads: int, xp: Target) -> None:
    assert_right(batch_of([30, 5], [3, 2], heads=heads, latent=16), xp)


@both_lanes
@pytest.mark.parametrize("num_ctas", [1, 2, 3, 5, 8, 16, 40])
def test_any_number_of_pieces(num_ctas: int, xp: Target) -> None:
    step = assert_right(batch_of([333, 64, 0, 16], [9, 9, 1, 4]), xp, num_ctas=num_ctas)
    assert pieces(step) >= num_ctas / 4


@both_lanes
def test_many_pieces_of_a_long_prefix(xp: Target) -> None:
    for values in ({}, {"COMBINE_UNROLL": 1}, {"COMBINE_THREADS": 32}):
        step = assert_right(
            batch_of([2500], [8], latent=16), xp, num_ctas=80, combine_ctas=3, values=values
        )
        assert pieces(step) > 70


@both_lanes
def test_deeper_rings(xp: Target) -> None:
    for stages in (5, 7):
        assert_right(batch_of([200], [8]), xp, values={"STAGES": stages})


@both_lanes
def test_the_plan_as_it_comes(xp: Target) -> None:
    assert_right(batch_of([700, 9, 300], [33, 33, 33]), xp, num_ctas=16, plan_values={})


@both_lanes
def test_padded_requests(xp: Target) -> None:
    batch = batch_of([40, 3], [9, 9, 9, 9], padded=2, masks="trees")
    step = assert_right(batch, xp)
    assert np.isfinite(bf16(step.outputs()[0])).all()


@both_lanes
@pytest.mark.parametrize("source", ["slots", "separate"])
@pytest.mark.parametrize("index", ["int32", "int64"])
def test_index_types_and_gaps(index: str, source: str, xp: Target) -> None:
    for gap in (0, 8, 56):
        batch = batch_of([70, 20], [9, 4], index_dtype=index, draft_source=source, row_gap=gap)
        for gather in (False, True):
            assert_right(batch, xp, gather=gather, index=np.dtype(index).type)


@both_lanes
def test_drafts_of_both_kinds_give_the_same_bits(xp: Target) -> None:
    batch = batch_of([70, 20], [9, 4], draft_source="slots")
    separate = VerifyStep(batch, xp)
    first = assert_right(batch, xp).outputs()
    given_apart = VerifyAttention(
        separate.tensors["q"], separate.tensors["kv"], separate.out, separate.lse,
        plan=separate.plan, visible=separate.tensors["visible"], sm_scale=batch.sm_scale,
        draft_kv=separate.tensors["draft_kv"],
    )  # fmt: skip
    separate.plan()
    given_apart()
    for one, other in zip(first, separate.outputs(), strict=True):
        np.testing.assert_array_equal(one, other)


@both_lanes
def test_queries_in_two_parts_and_a_pool_with_a_head_axis(xp: Target) -> None:
    batch = batch_of([50], [9], heads=16)
    step = VerifyStep(batch, xp)
    q, kv = batch.q(), batch.pool()
    wide = np.full((9, 2 * 16, 64 + 8), 0x7FFF, np.uint16)
    wide[:, :16, :64] = q[:, :, :64]
    latent = step.tensor(wide)[:, :16, :64]
    rope = step.tensor(np.ascontiguousarray(q[:, :, 64:]))
    parts = VerifyAttention(
        (latent, rope), step.tensor(kv[:, None].copy()), step.out, step.lse,
        plan=step.plan, visible=step.tensors["visible"], sm_scale=batch.sm_scale,
        out_cache_loc=step.tensors["out_cache_loc"],
    )  # fmt: skip
    step.plan()
    parts()
    assert step.wrong() == []


def test_torch_tensors_on_the_host_lane() -> None:
    import torch

    batch = batch_of([50], [9])
    step = VerifyStep(batch)

    def tensor(array: Any) -> Any:
        signed = {np.dtype(np.uint16): np.int16, np.dtype(np.uint64): np.int64}
        there = torch.from_numpy(array.view(signed.get(array.dtype, array.dtype)).copy())
        return there.view(torch.bfloat16) if array.dtype == np.uint16 else there

    given = {name: tensor(value) for name, value in step.inputs(batch).items()}
    out = torch.full((9, 8, 64), float("nan"), dtype=torch.bfloat16)
    lse = torch.full((9, 8), float("nan"))
    plan = VerifyPlan(
        given["seq_lens"], given["qo_indptr"], heads=8, max_tokens=9,
        kv_indices=given["kv_indices"],
    )  # fmt: skip
    plan()
    assert plan.read_status().request == -1
    VerifyAttention(
        given["q"], given["kv"], out, lse, plan=plan, visible=tensor(batch.visible(4)),
        sm_scale=batch.sm_scale, out_cache_loc=given["out_cache_loc"],
    )()  # fmt: skip
    step.out[:], step.lse[:] = out.view(torch.int16).numpy().view(np.uint16), lse.numpy()
    assert step.wrong() == []


# --- what rows see -------------------------------------------------------------------------------


@both_lanes
@pytest.mark.parametrize("grow", [DraftTree.chain, DraftTree.star, DraftTree.comb])
def test_kinds_of_trees(grow: Any, xp: Target) -> None:
    for nodes in (1, 8, 33, 70):
        assert_right(batch_of([20], [grow(nodes)], latent=16), xp)


@both_lanes
def test_any_mask(xp: Target) -> None:
    for tree in (1, 9, 64, 70, 200):
        assert_right(batch_of([20, 0], [tree, 5], masks="any", latent=16), xp, num_ctas=4)


@both_lanes
def test_rows_that_see_nothing(xp: Target) -> None:
    batch = batch_of([0, 33], [9, 9])
    step = VerifyStep(batch, xp, num_ctas=4)
    step.tensors["visible"][:] = 0
    step()
    bits, lse = step.outputs()
    assert (bits[:9] == 0).all() and np.isneginf(lse[:9]).all()
    assert np.isfinite(bf16(bits)).all() and np.isfinite(lse[9:]).all()


@both_lanes
def test_words_that_a_tree_does_not_need(xp: Target) -> None:
    batch = batch_of([20], [9])
    step = VerifyStep(batch, xp)
    step()
    for words in (2, 4):
        again = VerifyStep(batch, xp)
        attend = VerifyAttention(
            again.tensors["q"], again.tensors["kv"], again.out, again.lse,
            plan=again.plan, visible=again.tensor(batch.visible(words)),
            sm_scale=batch.sm_scale, out_cache_loc=again.tensors["out_cache_loc"],
        )  # fmt: skip
        again.plan()
        attend()
        for one, other in zip(step.outputs(), again.outputs(), strict=True):
            np.testing.assert_array_equal(one, other)


@both_lanes
@pytest.mark.parametrize("order", ["rising", "falling", "one peak"])
def test_scores_far_apart(order: str, xp: Target) -> None:
    batch = batch_of([130], [8], spread=0.0, seed=3)
    rise = {
        "rising": np.linspace(-300, 300, 130),
        "falling": np.linspace(300, -300, 130),
        "one peak": np.where(np.arange(130) == 77, 200.0, -100.0),
    }[order]
    pool = batch.pool()
    steered = (rise / batch.sm_scale / 8.0).astype(np.float32).view(np.uint32) >> 16
    pool[batch.layout.prefix_slots(0), -1] = steered.astype(np.uint16)

    class Steered(VerifyBatch):
        def pool(self) -> Any:
            return pool

    steered_batch = Steered(
        batch.layout, batch.trees, latent=64, rope=16, spread=0.0, seed=3, heads=8
    )
    for num_ctas in (1, 5):
        assert_right(steered_batch, xp, num_ctas=num_ctas)


@both_lanes
@pytest.mark.parametrize(
    ("partial", "exponent"), [(None, 0), (None, 5), ("bf16", -80), ("bf16", 110)]
)
@pytest.mark.parametrize("num_ctas", [2, 5, 24])
def test_what_a_cut_costs(
    partial: Literal["bf16"] | None, exponent: int, num_ctas: int, xp: Target
) -> None:
    # with equal weights, which are 1, nothing is rounded but partials and the result
    batch = batch_of([700], [1], latent=512, rope=64, spread=0.0, seed=5)
    step = VerifyStep(batch, xp, num_ctas=num_ctas, partial=partial)
    step.tensors["q"][:] = 0
    slots = [*batch.layout.prefix_slots(0), batch.layout.out_cache_loc[0]]
    pool = np.abs(widen(batch.pool()))
    pool[:, :512] *= np.exp2(np.random.default_rng(6).integers(-9, 9, 512) + exponent)
    step.tensors["kv"][:] = step.tensor(narrow(pool, "bf16"))
    step()
    right = pool[slots, :512].mean(axis=0, dtype=np.float64)
    assert_rounded_once(widen(step.outputs()[0][0]), right, partial)


@both_lanes
@pytest.mark.parametrize("num_ctas", [2, 24])
def test_what_a_cut_cannot_hold_is_seen(num_ctas: int, xp: Target) -> None:
    step = VerifyStep(batch_of([700], [1]), xp, num_ctas=num_ctas)
    step.tensors["q"][:] = 0
    step.tensors["kv"][:, 16:32] = step.tensor(narrow(np.float32(70_000.0), "bf16"))
    step()
    out = widen(step.outputs()[0])
    assert np.isfinite(out[..., :16]).all() and np.isposinf(out[..., 16:32]).all()


@both_lanes
@pytest.mark.parametrize("scale", [8.0, 20.0, 2.0**100])
def test_columns_of_zeros_in_codes_of_any_scale(scale: float, xp: Target) -> None:
    step = VerifyStep(batch_of([700], [1], kv_scale=scale), xp, num_ctas=24)
    step.tensors["kv"][:, :16] = 0
    step.tensors["kv"][:, 16:64] = 0x7E
    step.tensors["q"][:] = 0
    step()
    out = widen(step.outputs()[0])
    assert (out[..., :16] == 0).all()
    assert (out[..., 16:64] == np.float32(scale * 448)).all()


@both_lanes
def test_negative_and_large_scales(xp: Target) -> None:
    for scale in (1e-6, 0.5):
        assert_right(batch_of([50], [9], sm_scale=scale, spread=2.0), xp)


# --- other element types -------------------------------------------------------------------------

TYPES = [("fp16", None), ("bf16", 1.0), ("bf16", 0.07)]


@both_lanes
@pytest.mark.parametrize("source", ["slots", "separate"])
@pytest.mark.parametrize(("dtype", "kv_scale"), TYPES)
def test_other_types(dtype: str, kv_scale: float | None, source: str, xp: Target) -> None:
    batch = batch_of(
        [70, 33, 0, 160], [9, 17, 1, 5],
        dtype=dtype, kv_scale=kv_scale, draft_source=source, row_gap=16, masks="any",
    )  # fmt: skip
    for num_ctas in (1, 6):
        assert_right(batch, xp, num_ctas=num_ctas)


@examples(24)
@given(
    batch=verify_batches(
        max_requests=2,
        max_seq_len=100,
        max_tree_tokens=20,
        heads=(8,),
        widths=((64, 16),),
        index_dtypes=("int32",),
        elements=ELEMENTS[1:],
    ),
    num_ctas=st.integers(1, 5),
    schedule=st.sampled_from(SCHEDULES),
)
def test_other_types_under_the_checkers(
    batch: VerifyBatch, num_ctas: int, schedule: Schedule
) -> None:
    with cuverify.checked(schedule=schedule):
        assert_right(batch, num_ctas=num_ctas)


class Codes(VerifyBatch):
    """Requests of one prefix row each, which together hold every code; drafts are not seen."""

    def pool(self) -> Any:
        pool = np.zeros((self.layout.num_slots, self.width), np.uint8)
        slots = [self.layout.prefix_slots(request)[0] for request in range(self.num_requests)]
        pool[slots, :64] = np.arange(256, dtype=np.uint8).reshape(-1, 64)
        return pool

    def visible(self, words: int | None = None) -> Any:
        return np.zeros((self.num_tokens, words or 1), np.uint64)


@both_lanes
def test_every_code_comes_out_as_the_number_that_it_is(xp: Target) -> None:
    plain = batch_of([1, 1, 1, 1], [1, 1, 1, 1])
    batch = Codes(plain.layout, plain.trees, latent=64, rope=16, kv_scale=1.0)
    step = VerifyStep(batch, xp)
    step()
    found = bf16(step.outputs()[0])
    codes = np.arange(256, dtype=np.uint8).reshape(4, 1, 64)
    right = np.broadcast_to(widen(codes), found.shape).copy()
    right[[1, 3]] = np.nan  # whoever sees a NaN in a key sees nothing else
    np.testing.assert_array_equal(found, right)
    step.tensors["kv"][np.isnan(widen(batch.pool()))] = 0
    step.batch = batch
    step()
    right = widen(np.where(codes % 128 == 127, 0, codes).astype(np.uint8))
    np.testing.assert_array_equal(bf16(step.outputs()[0]), np.broadcast_to(right, found.shape))


@both_lanes
@pytest.mark.parametrize("spread", [2.0, 4.0, 8.0])
@pytest.mark.parametrize("scale", [2.0**-100, 2.0**100])
def test_codes_of_any_scale_beside_numbers(scale: float, spread: float, xp: Target) -> None:
    batch = batch_of([40], [6], latent=16, draft_source="separate", kv_scale=scale, spread=spread)
    assert_right(batch, xp, num_ctas=2)


def test_codes_may_come_as_torch_has_them() -> None:
    import torch

    batch = batch_of([30, 7], [9, 4], kv_scale=0.07)
    step = VerifyStep(batch)
    step()
    given = {name: torch.from_numpy(step.tensors[name]) for name in ("out_cache_loc", "kv")}
    out = torch.zeros((13, 8, 64), dtype=torch.bfloat16)
    lse = torch.zeros((13, 8))
    bounds = {name: torch.from_numpy(step.tensors[name]) for name in ("seq_lens", "qo_indptr")}
    plan = VerifyPlan(
        bounds["seq_lens"], bounds["qo_indptr"], heads=8, max_tokens=13, max_tree_tokens=64,
        kv_indices=torch.from_numpy(step.tensors["kv_indices"]), values=FINE,
    )  # fmt: skip
    attend = VerifyAttention(
        torch.from_numpy(step.tensors["q"].view(np.int16)).view(torch.bfloat16),
        given["kv"].view(torch.float8_e4m3fn), out, lse, plan=plan,
        visible=torch.from_numpy(step.tensors["visible"].view(np.int64)),
        sm_scale=batch.sm_scale, kv_scale=0.07, out_cache_loc=given["out_cache_loc"],
    )  # fmt: skip
    plan()
    attend()
    assert attend.pool == "fp8_e4m3"
    right = bf16(step.outputs()[0])
    np.testing.assert_allclose(out.double().numpy(), right, rtol=2**-6, atol=2**-6)


@both_lanes
@pytest.mark.parametrize("slot", [-1, 2**31 - 1])
def test_slots_outside_a_pool_of_codes_are_never_read(slot: int, xp: Target) -> None:
    batch = batch_of([40, 40], [9, 9], kv_scale=0.07)
    step = VerifyStep(batch, xp, num_ctas=4)
    step.tensors["kv_indices"][45] = slot  # of the second request's prefix
    step()
    bits, lse = step.outputs()
    assert np.isfinite(lse[:9]).all() and np.isnan(lse[9:]).all()
    assert np.isnan(bf16(bits[9:])).any(axis=2).all() and np.isfinite(bf16(bits[:9])).all()


# --- slots outside the pool ----------------------------------------------------------------------


@both_lanes
@pytest.mark.parametrize("slot", [-1, 10**6, 2**31 - 1, -(2**40), 2**62])
def test_slots_outside_the_pool_are_never_read(slot: int, xp: Target) -> None:
    batch = batch_of([40, 40], [9, 9], index_dtype="int64")
    step = VerifyStep(batch, xp, num_ctas=4)
    step.tensors["kv_indices"][45] = slot  # of the second request's prefix
    step.tensors["out_cache_loc"][8] = slot  # the first request's last node
    if xp == "numpy":
        with cuverify.checked():
            step()
    else:
        step()
    bits, lse = step.outputs()
    sees = np.array([int(row[0]) >> 8 & 1 for row in batch.visible()[:9]], bool)
    blind_to_it = np.isfinite(lse).all(axis=1)
    np.testing.assert_array_equal(~blind_to_it[:9], sees)
    assert not blind_to_it[9:].any()
    np.testing.assert_array_equal(np.isnan(bf16(bits)).any(axis=(1, 2)), ~blind_to_it)
    right = dense(batch)
    near = np.abs(bf16(bits)[blind_to_it] - right.out[blind_to_it])
    assert (near <= 0.02 * right.magnitude[blind_to_it]).all()


def test_a_pool_that_32_bits_do_not_address() -> None:
    batch = batch_of([30], [9])
    stride = 2**31 // len(batch.pool()) // 8 * 8 * 2 + 64
    size = stride * 2 * len(batch.pool())
    no_reserve = getattr(mmap, "MAP_NORESERVE", 0x4000)  # Python names it since 3.13
    try:
        room = mmap.mmap(-1, size, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | no_reserve)
    except OSError as error:
        pytest.skip(f"no room for {size} bytes of addresses: {error}")
    wide = np.frombuffer(room, np.uint16).reshape(-1, stride)[:, :80]
    wide[:] = batch.pool()
    step = VerifyStep(batch)
    attend = VerifyAttention(
        step.tensors["q"], wide, step.out, step.lse, plan=step.plan,
        visible=step.tensors["visible"], sm_scale=batch.sm_scale,
        out_cache_loc=step.tensors["out_cache_loc"],
    )  # fmt: skip
    step.plan()
    attend()
    assert step.wrong() == []


# --- the same bits every time --------------------------------------------------------------------


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_order_of_threads_and_blocks_decides_nothing(schedule: Schedule) -> None:
    batch = batch_of([130, 40], [17, 17], heads=16)
    first = assert_right(batch, num_ctas=7)
    again = VerifyStep(batch, num_ctas=7)
    with cuverify.checked(schedule=schedule, seed=5):
        again()
    for one, other in zip(first.outputs(), again.outputs(), strict=True):
        np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("model", ["sm_80", "sm_90"])
def test_with_the_roundings_of_tensor_cores(model: str) -> None:
    from cuverify.host.options import host_options

    with host_options(mma=model):
        assert_right(batch_of([90], [9], spread=3.0))


FOLLOWER = """
#include "early.cuh"
// @kernel copy_early
// @param to write uint16 [n]
// @param from read uint16 [n]
// @param n value int64
// @early
extern "C" __global__ void copy_early(unsigned short* to, const unsigned short* from, long long n) {
    early::wait_for_dependency();
    const long long at = blockIdx.x * (long long)blockDim.x + threadIdx.x;
    if (at < n) to[at] = from[at];
}
"""


@gpu
@pytest.mark.parametrize("columns", [{}, {"latent": 512, "rope": 64}], ids=["portable", "own"])
def test_what_follows_early_reads_whole_outputs(columns: dict[str, int]) -> None:
    # most blocks of the merge have no turn: who waits for them must have waited for attention, too
    import torch

    step = VerifyStep(batch_of([3000], [3], **columns), "torch-cuda", combine_ctas=132)
    copy = torch.zeros_like(step.storage)
    to, outputs = (tensor.view(torch.int16).view(-1) for tensor in (copy, step.storage))
    follower = cuverify.load_kernel(FOLLOWER, kernel="copy_early").bind(
        -(-to.numel() // 128), 128, to, outputs, to.numel()
    )
    step.plan()
    step.attention()
    right = outputs.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(20):
            step.out.fill_(float("nan"))
            copy.zero_()
            step.attention()
            follower()
    for _ in range(10):
        graph.replay()
        assert torch.equal(to, right)


@gpu
def test_a_gpu_repeats_itself_bit_by_bit() -> None:
    batch = batch_of([3000, 500, 0, 70], [17, 17, 17, 17], latent=512, rope=64)
    step = assert_right(batch, "torch-cuda", num_ctas=100)
    first = step.outputs()
    for _ in range(20):
        step.poison()
        step()
        for one, other in zip(first, step.outputs(), strict=True):
            np.testing.assert_array_equal(one, other)


@both_lanes
def test_the_same_launches_follow_other_inputs(xp: Target) -> None:
    batches = [
        batch_of(lens, trees, num_slots=900, seed=seed)
        for seed, (lens, trees) in enumerate(
            [([490, 20, 7], [8, 8, 8]), ([1, 0, 300], [8, 8, 8]), ([16, 16, 16], [9, 1, 14])]
        )
    ]
    step = VerifyStep(batches[0], xp, num_ctas=6, gather=True)
    step.refill(batches[0])
    run: Any = step
    if xp == "torch-cuda":
        import torch

        side = torch.cuda.Stream()
        with torch.cuda.stream(side):
            step()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        run = graph.replay
    for batch in (*batches, *reversed(batches)):
        step.refill(batch)
        step.poison()
        run()
        assert step.wrong() == [], batch


@both_lanes
def test_rows_without_a_request_are_left_alone(xp: Target) -> None:
    assert_right(batch_of([20, 3], [9, 4]), xp, max_tokens=40)


@both_lanes
def test_an_empty_plan_writes_nothing(xp: Target) -> None:
    step = VerifyStep(batch_of([20, 3], [9, 4]), xp)
    step.tensors["seq_lens"][1] = -5
    step()
    bits, lse = step.outputs()
    assert np.isnan(bf16(bits)).all() and np.isnan(lse).all()
    with pytest.raises(ArgumentError, match=r"seq_lens\[1\]=-5"):
        step.plan.read_status()


# --- drawn batches -------------------------------------------------------------------------------


@examples(60)
@given(
    batch=verify_batches(max_requests=3, max_tree_tokens=20),
    num_ctas=st.integers(1, 9),
    plan_values=st.sampled_from([FINE, {}]),
    gather=st.booleans(),
)
def test_drawn_batches(
    batch: VerifyBatch, num_ctas: int, plan_values: dict[str, int], gather: bool
) -> None:
    assert_right(batch, num_ctas=num_ctas, plan_values=plan_values, gather=gather)


@examples(30)
@given(
    batch=verify_batches(max_requests=2, max_seq_len=80, max_tree_tokens=9),
    num_ctas=st.integers(1, 5),
    schedule=st.sampled_from(SCHEDULES),
    seed=st.integers(0, 99),
)
@example(batch=batch_of([0], [1]), num_ctas=1, schedule="ascending", seed=0)
def test_drawn_batches_under_the_checkers(
    batch: VerifyBatch, num_ctas: int, schedule: Schedule, seed: int
) -> None:
    with cuverify.checked(schedule=schedule, seed=seed):
        assert_right(batch, num_ctas=num_ctas)


@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("compiler", ["g++", "zig"])
def test_real_columns_under_the_checkers(compiler: str, schedule: Schedule) -> None:
    batch = batch_of([70, 33, 3], [9, 9, 9, 9], latent=512, rope=64, padded=1)
    with cuverify.checked(schedule=schedule, compiler=compiler):
        assert_right(batch, num_ctas=4)


@gpu
@examples(25)  # of sizes that a float64 oracle on a processor has soon; the check draws others
@given(
    batch=verify_batches(
        max_requests=3,
        max_seq_len=500,
        max_tree_tokens=70,
        widths=((512, 64), (64, 16)),
    ),
    num_ctas=st.sampled_from([1, 7, 132]),
)
def test_drawn_batches_on_a_gpu(batch: VerifyBatch, num_ctas: int) -> None:
    assert_right(batch, "torch-cuda", num_ctas=num_ctas)


# --- resources -----------------------------------------------------------------------------------


@pytest.mark.parametrize("arch", ARCHITECTURES)
@pytest.mark.parametrize(
    "values",
    [
        {},
        {"HEADS": 64, "ELEMENT": "fp16", "KV_ELEMENT": "fp16"},
        {"HEADS": 128, "KV_INDEX": "long long", "KV_ELEMENT": "fp8_e4m3"},
    ],
    ids=["bf16", "fp16", "codes"],
)
def test_registers_and_shared_memory_fit_every_gpu(arch: str, values: dict[str, Any]) -> None:
    columns = {"LATENT": 512, "ROPE": 64}
    room = max_shared_bytes(arch) + RESERVED_SHARED
    fitting = fitting_values("portable", room, **columns)
    for kernel in verify_attention_kernels(**{**columns, **fitting, **values}):
        resources = kernel.compile(arch).resources[kernel.name]
        assert (resources.spill_store_bytes, resources.spill_load_bytes) == (0, 0), resources
        assert resources.stack_bytes == 0, resources
        dynamic = kernel.declared_shared()
        assert dynamic is not None
        assert resources.static_shared_bytes + dynamic <= max_shared_bytes(arch)


def test_values_go_with_the_shared_memory_there_is() -> None:
    columns = {"LATENT": 512, "ROPE": 64}
    roomy = VARIANTS["portable"].roomy
    for arch, wanted in {"sm_80": {}, "sm_120": {}, "sm_90": roomy, "sm_100": roomy}.items():
        room = max_shared_bytes(arch) + RESERVED_SHARED
        assert fitting_values("portable", room, **columns) == wanted
    assert fitting_values("portable", 99 << 10, LATENT=64, ROPE=16) == roomy  # smaller rows
    assert fitting_values("sm90", 1 << 20, **columns) == {}


# What the host lane runs on its own account is the text for the least shared memory.
ROOMY = dict(VARIANTS["portable"].roomy)


@pytest.mark.parametrize(
    "batch",
    [
        batch_of([150, 40], [17, 17], masks="any", spread=4.0),
        batch_of([700], [1]),
        batch_of([90, 1, 64], [3, 9, 70], draft_source="separate"),
        batch_of([110], [17], latent=16, draft_source="separate", kv_scale=0.07, masks="any"),
        batch_of([300, 33], [8, 5], kv_scale=0.5),
        batch_of([100], [9], latent=512, rope=64),
        batch_of([65], [9], latent=512, rope=64, kv_scale=0.07),
    ],
    ids=["pieces", "one node", "separate", "codes and numbers", "codes", "real", "real codes"],
)
def test_tiles_of_32_rows(batch: VerifyBatch) -> None:
    with cuverify.checked(schedule="random", seed=2):
        assert_right(batch, num_ctas=3, values=ROOMY)


def test_scratch_grows_with_blocks_and_not_with_the_batch() -> None:
    small, large = (verify_workspace(batch, 64 * batch, 8, 132) for batch in (1, 64))
    assert small["partial_out"].shape[0] <= large["partial_out"].shape[0] <= 2 * 132
    assert large["work"].shape[0] == 64 * 8 + 132 + 56
    assert large["partial_out"].bytes == 264 * 64 * 512 * 2


# --- misuse --------------------------------------------------------------------------------------


def good() -> dict[str, Any]:
    """Return arguments that are right: two requests, nine tokens each."""
    batch = batch_of([20, 30], [9, 9])
    step = VerifyStep(batch)
    return {
        "q": step.tensors["q"],
        "kv": step.tensors["kv"],
        "out": np.zeros((18, 8, 64), np.uint16),
        "lse": np.zeros((18, 8), np.float32),
        "plan": step.plan,
        "visible": step.tensors["visible"],
        "sm_scale": 0.1,
        "out_cache_loc": step.tensors["out_cache_loc"],
    }


def strided(rows: int, columns: int, stride: int) -> Any:
    return np.zeros((rows, stride), np.uint16)[:, :columns]


def off_by(array: Any, elements: int) -> Any:
    room = np.zeros(array.size + 16, array.dtype)
    start = -(room.ctypes.data // array.itemsize) % (16 // array.itemsize) + elements
    return room[start : start + array.size].reshape(array.shape)


def workspace_with(plan: VerifyPlan, **other: Any) -> AttentionWorkspace:
    own = AttentionWorkspace.allocate(np.zeros(1), plan=plan, latent=64)
    return AttentionWorkspace(
        **{field.name: getattr(own, field.name) for field in fields(own)} | other
    )


MISUSE = [
    ("no tokens", lambda a: {"out": a["out"][:0]}, r"out=.*\[0, 8, 64\]"),
    ("fewer tokens than planned", lambda a: {"out": a["out"][:17]}, "out=.*17 tokens.*up to 18"),
    ("other rows of lse", lambda a: {"lse": a["lse"][:17]}, "lse=.*17 rows.*18 tokens"),
    ("other rows of q", lambda a: {"q": a["q"][:17]}, "q=.*17 rows.*18 tokens"),
    ("heads of another plan", lambda a: {"out": np.zeros((18, 16, 64), np.uint16)}, "out=.*16 heads.*for 8"),
    ("heads of q", lambda a: {"q": np.zeros((18, 16, 80), np.uint16)}, "q_latent=.*16"),
    ("latent is odd", lambda a: {"out": np.zeros((18, 8, 60), np.uint16)}, "out=.*60 columns.*16"),
    ("no rope", lambda a: {"q": np.zeros((18, 8, 64), np.uint16)}, r"q=.*64 \+ rope"),
    ("rope is odd", lambda a: {"q": np.zeros((18, 8, 72), np.uint16)}, "q=.*8 columns for rope"),
    ("q of three parts", lambda a: {"q": (a["q"], a["q"], a["q"])}, r"q=.*\(q_latent, q_rope\)"),
    ("q in fp32", lambda a: {"q": a["q"].astype(np.float32)}, "q_latent=.*float32.*bf16"),
    ("row stride of q", lambda a: {"q": np.zeros((18, 8, 84), np.uint16)[..., :80]}, "q=.*168 bytes apart.*16"),
    ("row stride of the pool", lambda a: {"kv": strided(100, 80, 84)}, "kv=.*168 bytes apart.*16"),
    ("row stride of out", lambda a: {"out": strided(18, 512, 516).reshape(18, 8, 64)}, "out=.*1032 bytes apart.*16"),
    ("columns of the pool", lambda a: {"kv": np.zeros((100, 96), np.uint16)}, r"kv=.*\[rows, 80\]"),
    ("empty pool", lambda a: {"kv": np.zeros((0, 80), np.uint16)}, r"kv=.*\[0, 80\]"),
    ("pool with two heads", lambda a: {"kv": np.zeros((50, 2, 80), np.uint16)}, r"kv=.*\[50, 2, 80\]"),
    ("address of the pool", lambda a: {"kv": off_by(a["kv"], 1)}, "kv=.*2 bytes off a multiple of 16"),
    ("address of out", lambda a: {"out": off_by(a["out"], 4)}, "out=.*8 bytes off a multiple of 16"),
    ("mask too short", lambda a: {"visible": a["visible"][:17]}, "visible=.*17 rows"),
    ("mask too narrow", lambda a: {"plan": replanned(a["plan"], 65)}, "visible=.*1 words hold 64 bits.*65 tokens"),
    ("mask too wide", lambda a: {"visible": np.zeros((18, 5), np.uint64)}, "visible=.*1 to 4 words"),
    ("mask of bytes", lambda a: {"visible": np.zeros((18, 1), np.uint8)}, "visible=.*uint8"),
    ("slots in int32", lambda a: {"out_cache_loc": a["out_cache_loc"].astype(np.int32)}, "out_cache_loc=.*int32.*int64"),
    ("no drafts", lambda a: {"out_cache_loc": None}, "draft_kv=None.*out_cache_loc"),
    ("drafts twice", lambda a: {"draft_kv": np.zeros((18, 80), np.uint16)}, "draft_kv=.*either"),
    ("rows of draft_kv", lambda a: {"draft_kv": np.zeros((17, 80), np.uint16), "out_cache_loc": None}, "draft_kv=.*17 rows"),
    ("scale of infinity", lambda a: {"sm_scale": float("inf")}, "sm_scale=inf.*finite"),
    ("scale as a tensor", lambda a: {"sm_scale": np.ones(1, np.float32)}, "sm_scale=.*finite number"),
    ("workspace too small", lambda a: {"workspace": workspace_with(a["plan"], partial_lse=np.zeros((2, 64), np.float32))}, r"workspace.partial_lse=.*too small.*entries of work"),
    ("workspace of another latent", lambda a: {"workspace": workspace_with(a["plan"], partial_out=np.zeros((9, 64, 80), np.int16))}, "workspace.partial_out=.*64, 64"),
    ("out is q", lambda a: {"out": a["q"].reshape(-1)[: 18 * 512].reshape(18, 8, 64)}, "out=.*shares memory with q"),
    ("scratch is out", lambda a: scratch_in_out(a), "workspace.partial_out=.*shares memory with out"),
    ("lse is scratch", lambda a: lse_in_scratch(a), "partial_lse=.*shares memory with lse"),
    ("a plan without slots", lambda a: {"plan": replanned(a["plan"], 64, kv_indices=None)}, "plan=.*kv_indices"),
    ("no blocks", lambda a: {"combine_ctas": 0}, "combine_ctas=0"),
    ("out in fp32", lambda a: {"out": np.zeros((18, 8, 64), np.float32)}, "out=.*float32.*bfloat16 or float16"),
    ("a pool of another type", lambda a: {"kv": a["kv"].astype(np.float16)}, "kv=.*float16; wants bf16.*or codes"),
    ("a pool in fp32", lambda a: {"kv": a["kv"].astype(np.float32)}, "kv=.*float32; wants bf16"),
    ("q of another type", lambda a: {"q": a["q"].astype(np.float16)}, "q_latent=.*float16.*bf16"),
    ("codes beside fp16", lambda a: {"kv": codes(), "out": np.zeros((18, 8, 64), np.float16)}, "kv=.*codes of e4m3.*out is fp16"),
    ("codes of another width", lambda a: {"kv": codes(160)}, r"kv=.*\[100, 160\].*\[rows, 80\]"),
    ("row stride of codes", lambda a: {"kv": codes(88)[:, :80]}, "kv=.*88 bytes apart.*16"),
    ("drafts as codes", lambda a: {"kv": codes(), "draft_kv": codes()[:18], "out_cache_loc": None}, "draft_kv=.*uint8.*bf16"),
    ("a scale of codes that are none", lambda a: {"kv_scale": 0.5}, "kv_scale=0.5.*kv is bf16"),
    *((f"a scale of {scale}", lambda a, scale=scale: {"kv": codes(), "kv_scale": scale}, f"kv_scale={scale}.*above 0")
      for scale in (0.0, -1.0, float("inf"), float("nan"))),
    *((f"a scale of {scale}", lambda a, scale=scale: {"kv": codes(), "kv_scale": scale}, "kv_scale=.*float32")
      for scale in (1e-46, 1e-38, 1e37)),
    ("a scale as a tensor", lambda a: {"kv": codes(), "kv_scale": np.ones(1, np.float32)}, "kv_scale=.*above 0"),
    ("scratch of another type", lambda a: {"workspace": workspace_with(a["plan"], partial_out=np.zeros((12, 64, 64), np.float16))}, "partial_out=.*float16.*int16"),
]  # fmt: skip


def codes(columns: int = 80) -> Any:
    return np.zeros((100, columns), np.uint8)


def replanned(plan: VerifyPlan, max_tree_tokens: int, **other: Any) -> VerifyPlan:
    given = {"kv_indices": plan.kv_indices, **other}
    return VerifyPlan(
        np.array([20, 30], np.int32), plan.qo_indptr, heads=8, max_tokens=18,
        max_tree_tokens=max_tree_tokens, **given,
    )  # fmt: skip


def scratch_in_out(given: dict[str, Any]) -> dict[str, Any]:
    room = np.zeros(64 * 64 * 40, np.uint16)
    slots = len(workspace_with(given["plan"]).partial_out)
    return {
        "out": room[: 18 * 512].reshape(18, 8, 64),
        "workspace": workspace_with(
            given["plan"], partial_out=room[: slots * 4096].view(np.int16).reshape(slots, 64, 64)
        ),
    }


def lse_in_scratch(given: dict[str, Any]) -> dict[str, Any]:
    partial = workspace_with(given["plan"]).partial_lse
    return {
        "lse": partial.reshape(-1)[: 18 * 8].reshape(18, 8),
        "workspace": workspace_with(given["plan"], partial_lse=partial),
    }


@pytest.mark.parametrize(("spoil", "says"), [m[1:] for m in MISUSE], ids=[m[0] for m in MISUSE])
def test_misuse_names_the_argument(spoil: Any, says: str) -> None:
    arguments = good()
    VerifyAttention(**arguments)
    arguments |= spoil(arguments)
    with pytest.raises(ArgumentError, match=f"(?s){says}"):
        VerifyAttention(**arguments)


def test_scales_and_blocks_may_be_numpys() -> None:
    scales = {"sm_scale": np.float32(0.1), "kv_scale": np.float32(1)}
    VerifyAttention(**(good() | scales), combine_ctas=np.int64(2))


def test_interleaved_tensors_need_not_overlap() -> None:
    arguments = good()
    room = np.zeros((18, 8 * 80 + 8 * 64), np.uint16)
    q, out = room[:, :640].reshape(18, 8, 80), room[:, 640:].reshape(18, 8, 64)
    VerifyAttention(**(arguments | {"q": q, "out": out}))
    later = room[:, 632:1144].reshape(18, 8, 64)
    with pytest.raises(ArgumentError, match="out=.*shares memory with q"):
        VerifyAttention(**(arguments | {"q": q, "out": later}))


def test_sizes_of_the_workspace_are_checked() -> None:
    for sizes, says in (
        ((0, 8, 8, 4), "max_batch=0"),
        ((1, 0, 8, 4), "max_tokens=0"),
        ((1, 8, 12, 4), "heads=12"),
        ((1, 8, 8, 0), "num_ctas=0"),
    ):
        with pytest.raises(ArgumentError, match=says):
            verify_workspace(*sizes)
