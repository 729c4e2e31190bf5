"""The check cases of verify plan and attention: their steps, batches, references and benchmarks."""

from __future__ import annotations

import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from cuverify.validators.compare import compare_all, host_array

from cuverify.cases import Target, draw
from cuverify.cases import verify_attention as attention
from cuverify.cases import verify_plan as planning
from cuverify.cases.verify_attention import SizedBatch, VerifyAttentionStep
from cuverify.ceilings import read_step
from cuverify.errors import ArgumentError, CaseError
from cuverify.kv_layout import KvLayout
from cuverify.listed_step import Capacity
from cuverify.static_buffers import fill, static_buffer, write
from cuverify.strategies import drawn, verify_batches
from cuverify.tree import DraftTree
from cuverify.verify_batch import VerifyBatch

gpu = pytest.mark.gpu
both_lanes = pytest.mark.parametrize("xp", ["numpy", pytest.param("torch-cuda", marks=gpu)])


def wrong_in(step: Any) -> list[str]:
    step.poison()
    expected = step.expected()
    step()
    outputs = {name: host_array(tensor) for name, tensor in step.outputs.items()}
    return [str(mismatch) for mismatch in compare_all(outputs, expected)]


def chains(lens: list[int], nodes: int, **more: Any) -> VerifyBatch:
    layout = KvLayout.build(seq_lens=lens, tree_tokens=nodes, placement="scattered", num_slots=256)
    trees = tuple(DraftTree.chain(nodes) for _ in lens)
    return replace(VerifyBatch(layout, trees, latent=32, rope=16), **more)


def groups(batches: list[tuple[str, Any]]) -> list[list[tuple[str, Any]]]:
    """Return batches that share buffers, together."""
    found = itertools.groupby(batches, key=lambda pair: pair[1].capacity)
    return [list(group) for _, group in found]


@both_lanes
def test_one_step_serves_all_batches_of_a_group(xp: Target) -> None:
    strategy = verify_batches(
        heads=(8,),
        widths=((64, 16),),
        num_slots=1024,
        index_dtypes=("int64",),
        draft_sources=("separate",),
        row_gaps=(8,),
    )
    batches = drawn(strategy, 12)
    size = Capacity.of(batches)
    step = VerifyAttentionStep(SizedBatch(batches[0], size), xp, num_ctas=5)
    for batch in (*batches, batches[0]):
        step.refill(SizedBatch(batch, size))
        assert wrong_in(step) == [], batch
        assert step.plan.read_status().request == -1


def test_what_a_step_cannot_hold_is_refused_before_anything_is_written() -> None:
    batch = chains([20, 5], 3)
    size = Capacity.of([batch])
    step = VerifyAttentionStep(SizedBatch(batch, size), "numpy")
    before = step.pool.copy()
    for other in (
        replace(batch, heads=16),
        replace(batch, rope=32),
        replace(batch, sm_scale=0.5),
        replace(batch, draft_source="separate"),
        replace(batch, index_dtype="int64"),
        replace(batch, row_gap=8),
        chains([21, 5], 3),
        chains([20, 4], 4),
        chains([20, 5, 1], 2),
    ):
        with pytest.raises(CaseError):
            step.refill(SizedBatch(other, size))
    np.testing.assert_array_equal(step.pool, before)


def test_a_batch_of_fewer_requests_is_filled_up_with_padding() -> None:
    large, small = chains([9, 8, 7], 4), chains([12], 5)
    size = Capacity.of([large, small])
    assert (size.requests, size.tokens) == (3, 12)
    step = VerifyAttentionStep(SizedBatch(large, size), "numpy")
    step.refill(SizedBatch(small, size))
    assert step.seq_lens.tolist() == [12, 1, 1]
    assert step.qo_indptr.tolist() == [0, 5, 6, 7]
    assert wrong_in(step) == []
    assert np.isnan(step.expected()["out"].values[7:]).all()


def test_a_step_sees_a_wrong_result() -> None:
    step = VerifyAttentionStep(attention_case_batch(), "numpy")
    assert wrong_in(step) == []
    step.out[1, 2, 3] ^= 0x0040
    step._storage[0, -1] = 0
    step.lse[2, 1] += 0.01
    outputs = {name: host_array(tensor) for name, tensor in step.outputs.items()}
    found = [str(mismatch) for mismatch in compare_all(outputs, step.expected())]
    assert [line.partition(" is ")[0] for line in found] == [
        "out[1, 2, 3]",
        "lse[2, 1]",
        "guards[0, 7]",
    ]


def attention_case_batch() -> SizedBatch:
    batch = chains([40], 6)
    return SizedBatch(batch, Capacity.of([batch]))


@pytest.mark.parametrize("case", [attention.CASE, planning.CASE], ids=lambda case: case.name)
def test_batches_are_the_same_every_time_and_labelled(case: Any) -> None:
    for method in (case.batches, case.device_batches):
        first, again, other = (draw(method, seed=seed, examples=10) for seed in (0, 0, 1))
        labels = [label for label, _ in first]
        assert len(set(labels)) == len(labels)
        assert labels == [label for label, _ in again]
        assert [repr(vars(a)) for _, a in first] == [repr(vars(a)) for _, a in again]
        assert [repr(vars(a)) for _, a in first] != [repr(vars(a)) for _, a in other]


def test_host_batches_stay_within_what_a_check_has_time_for() -> None:
    pairs = Counter[bool]()
    for label, sized in attention.CASE.batches():
        pairs[label.startswith("real")] += sized.batch.pairs
    assert 0.5e6 < pairs[True] < 4e6
    assert pairs[False] < 1e6


def test_device_batches_are_as_many_and_as_large_as_they_should_be() -> None:
    batches = list(attention.CASE.device_batches(examples=300))
    real = [sized.batch for label, sized in batches if label.startswith("real")]
    others = [sized.batch for label, sized in batches if label.startswith("drawn")]
    assert len(others) == 300
    assert len(real) == 22
    assert max(int(batch.layout.seq_lens.max()) for batch in real) >= 180_000
    assert max(batch.num_requests for batch in real) == 64
    assert max(batch.max_tree_tokens for batch in real) == 256
    assert {batch.heads for batch in real} == {8, 16, 128}
    assert {batch.heads for batch in others} == {8, 16, 64, 128}
    for some in (real, others):
        assert {batch.pool_dtype for batch in some} == {"bf16", "fp16", "fp8_e4m3"}
    assert {batch.draft_source for batch in others} == {"slots", "separate"}
    assert {batch.index_dtype for batch in others} == {"int32", "int64"}
    # neighbours share buffers, so that a captured graph meets other lengths, slots and trees
    for group in groups(batches):
        assert len(group) > 1
        kinds = {attention._kind(sized.batch) for _, sized in group}
        assert len(kinds) == 1, group[0][0]


def test_device_plans_replay_on_the_host_too() -> None:
    for group in groups(list(planning.CASE.device_batches())):
        step = planning.VerifyPlanStep(group[0][1], "numpy", num_ctas=132)
        for label, batch in group:
            step.refill(batch)
            assert wrong_in(step) == [], label


def test_plans_with_faults_are_refused_by_the_kernel_as_by_the_oracle() -> None:
    codes = Counter[int]()
    for label, batch in planning.CASE.batches(examples=48):
        if label.startswith("faulty"):
            step = planning.VerifyPlanStep(batch, "numpy", num_ctas=4)
            assert wrong_in(step) == [], label
            codes[int(step.workspace.status[0])] += 1
    assert set(codes) >= {1, 2, 4, 5}


@gpu
@pytest.mark.parametrize("case", [attention.CASE, planning.CASE], ids=lambda case: case.name)
def test_drawn_batches_on_a_gpu(case: Any) -> None:
    for label, batch in draw(case.device_batches, seed=5, examples=16):
        if not label.startswith("real"):
            assert wrong_in(case.step(batch, "torch-cuda")) == [], label


@both_lanes
@pytest.mark.parametrize("dtype", ["bf16", "uint64", "int32", "float32"])
def test_static_buffers_take_corners_and_refuse_more(dtype: str, xp: Target) -> None:
    buffer = static_buffer(xp, (3, 4), dtype)
    number = float("nan") if dtype in ("bf16", "float32") else 7
    fill(buffer, number)
    before = host_array(buffer).bits().copy()
    values = np.arange(6).reshape(2, 3).astype("uint16" if dtype == "bf16" else dtype)
    values.setflags(write=False)
    write(buffer, values)
    after = host_array(buffer).bits()
    np.testing.assert_array_equal(after[:2, :3].view(values.dtype), values)
    np.testing.assert_array_equal(after[2], before[2])
    np.testing.assert_array_equal(after[:, 3], before[:, 3])
    for shape in ((4, 4), (3, 5), (3,)):
        with pytest.raises(CaseError, match="fit"):
            write(buffer, np.zeros(shape, values.dtype))


def test_the_reading_step_reads_the_rows_and_only_them() -> None:
    rng = np.random.default_rng(0)
    wide = rng.integers(0, 2**16, (50, 88), np.uint16)
    pool, rows = wide[:, :80], np.array([7, 49, 0, 7], np.int32)
    step, found = read_step(pool, rows)
    step()
    words = np.ascontiguousarray(pool[rows]).view(np.uint32)
    assert np.bitwise_xor.reduce(found) == np.bitwise_xor.reduce(words.reshape(-1))
    with pytest.raises(ArgumentError, match="pieces"):
        read_step(wide[:, :84], rows)
