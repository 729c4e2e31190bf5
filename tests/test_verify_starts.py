"""What blocks read first, against its oracle; and layers that are handed it, in both lanes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

import cuverify
from cuverify.buffers import read
from cuverify.cases import Target
from cuverify.cases.verify_plan import PlanBatch
from cuverify.cases.verify_starts import CASE, StartsBatch, VerifyStartsStep
from cuverify.compile import ARCHITECTURES
from cuverify.errors import ArgumentError, CaseError, CheckerError
from cuverify.kernel import Kernel
from cuverify.kv_layout import KvLayout
from cuverify.ops import verify_starts as verify_starts_op
from cuverify.ops.verify_attention import VerifyAttention
from cuverify.ops.verify_plan import VerifyPlan
from cuverify.ops.verify_starts import StartsWorkspace, VerifyStarts, verify_starts_kernel
from cuverify.reference import verify_starts as oracle

Schedule = Literal["ascending", "descending", "random"]
gpu = pytest.mark.gpu
both_lanes = pytest.mark.parametrize("xp", ["numpy", pytest.param("torch-cuda", marks=gpu)])


def batch_of(
    lens: list[int], tree: int, *, located: bool, index: str = "int32", seed: int = 0
) -> StartsBatch:
    layout = KvLayout.build(
        seq_lens=np.array(lens), tree_tokens=tree, placement="scattered", stale_tail=False,
        rng=np.random.default_rng(seed),
    )  # fmt: skip
    return StartsBatch(PlanBatch.of_layout(layout, 8, index), seed, located)


def check(batch: StartsBatch, xp: Target = "numpy", num_ctas: int = 6) -> VerifyStartsStep:
    step = VerifyStartsStep(batch, xp, num_ctas=num_ctas)
    step.poison()
    step()
    for name, wanted in step.expected().items():
        np.testing.assert_array_equal(read(step.outputs[name]), wanted, err_msg=name)
    return step


steps: dict[str, st.SearchStrategy[Any]] = {
    "lens": st.lists(st.sampled_from([0, 1, 15, 16, 40, 63, 64, 65, 700]), min_size=1, max_size=5),
    "tree": st.sampled_from([1, 7, 8, 17, 33, 65]),
    "located": st.booleans(),
    "num_ctas": st.sampled_from([1, 2, 6, 40]),
    "seed": st.integers(0, 99),
}


@settings(max_examples=80, deadline=None)
@given(**steps, wide=st.booleans())
@example(lens=[0], tree=65, located=True, num_ctas=1, seed=0, wide=False)  # only a tree
@example(lens=[40], tree=33, located=True, num_ctas=1, seed=0, wide=True)  # ends inside the tree
@example(lens=[64], tree=1, located=True, num_ctas=1, seed=0, wide=False)
@example(lens=[700], tree=8, located=False, num_ctas=40, seed=0, wide=False)
def test_drawn_starts(
    lens: list[int], tree: int, located: bool, num_ctas: int, seed: int, wide: bool
) -> None:
    index = "int64" if wide else "int32"
    check(batch_of(lens, tree, located=located, index=index, seed=seed), num_ctas=num_ctas)


@settings(max_examples=30, deadline=None)
@given(**steps, schedule=st.sampled_from(["ascending", "descending", "random"]))
def test_drawn_starts_under_the_checkers(
    lens: list[int], tree: int, located: bool, num_ctas: int, seed: int, schedule: Schedule
) -> None:
    with cuverify.checked(schedule=schedule, seed=seed):
        check(batch_of(lens, tree, located=located, seed=seed), num_ctas=num_ctas)


@gpu
@pytest.mark.parametrize("located", [True, False])
def test_starts_on_a_gpu(located: bool) -> None:
    for lens, tree in (([1000], 8), ([70, 0, 5000, 64], 33), ([16] * 300, 17)):
        check(batch_of(lens, tree, located=located), "torch-cuda", num_ctas=132)


@both_lanes
def test_the_same_launch_follows_other_steps(xp: Target) -> None:
    large = batch_of([700, 300], 17, located=True)
    step = check(large, xp, num_ctas=20)
    for number, batch in enumerate((batch_of([64, 0], 17, located=True), large)):
        step.refill(StartsBatch(batch.planned, number, True))
        step.poison()
        step()
        for name, wanted in step.expected().items():
            np.testing.assert_array_equal(read(step.outputs[name]), wanted, err_msg=name)
    with pytest.raises(CaseError, match="does not fit"):
        step.refill(StartsBatch(large.planned, 0, False))


def test_the_oracle_says_what_is_read_first() -> None:
    work = np.array([[1, 0, 0, 16, 0, 2], [1, 0, 16, 20, 1, 2], [-1] * 6], np.int32)
    found = oracle.verify_starts(
        work,
        np.array([[1, 2, 1, 0], [0, 1, 1, 2], [2, 2, 1, 0]], np.int32),
        np.array([0, 3, 23]),
        np.array([0, 2, 4]),
        np.arange(100, 123),
        np.array([900, 901, 902, 903]),
    )
    assert found["cta_starts"].tolist() == [
        [1, 2, 1, 0, 1, 0, 16, 20, 1, 2, 3, 23, 2, 4, 0, 0],
        [0, 1, 1, 2, 1, 0, 0, 16, 0, 2, 3, 23, 2, 4, 0, 0],
        [2, 2, 1, 0, *[0] * 12],
    ]
    assert found["cta_slots"][0].tolist() == [119, 120, 121, 122, 902, 903, *[-1] * 58]
    assert found["cta_slots"][1].tolist() == [*range(103, 119), *[-1] * 48]
    assert found["cta_slots"][2].tolist() == [-1] * 64


def test_cases_have_steps_of_both_kinds() -> None:
    kinds = {batch.located for _, batch in CASE.batches(seed=0)}
    assert kinds == {True, False}
    groups: dict[tuple[Any, ...], set[bool]] = {}
    for _, batch in CASE.device_batches(seed=0, examples=12):
        size = batch.planned.capacity
        groups.setdefault((size, batch.planned.heads), set()).add(batch.located)
    assert all(len(located) == 1 for located in groups.values())
    assert {located for group in groups.values() for located in group} == {True, False}


# --- planted bugs --------------------------------------------------------------------------------

PLANTED = [
    ("busy && position < min(end, prefix)", "busy && position < prefix"),
    ("const bool busy = number < share[1];", "const bool busy = true;"),
    ("busy && end == prefix && node", "busy && node"),
    ("node < end_token - first_token", "node < end_token"),
    (" &&\n               out_cache_loc != nullptr", ""),
    ("out_cache_loc[first_token + node]", "out_cache_loc[node]"),
    ("kv_indices[first_index + position]", "kv_indices[position]"),
    ("const int position = begin + thread;", "const int position = thread;"),
    ("word = entry[thread - 4];", "word = entry[thread - 5];"),
    ("thread == 10 + i ? bounds[i] : word", "thread == 9 + i ? bounds[i] : word"),
    ("busy && thread < 10", "thread < 10"),
    ("thread < WORDS", "thread < WORDS - 2"),
]


def check_some() -> None:
    for lens, tree, located, num_ctas in (
        ([70, 0, 40], 17, True, 6),
        ([700], 33, False, 40),
        ([300, 64, 500, 90], 33, True, 20),
        ([200], 8, True, 40),  # short pieces, and blocks without one
    ):
        with cuverify.checked():
            check(batch_of(lens, tree, located=located), num_ctas=num_ctas)


def test_steps_that_catch_bugs_are_right_without_one() -> None:
    check_some()


@pytest.mark.parametrize(("old", "new"), PLANTED)
def test_planted_bugs_are_caught(old: str, new: str, monkeypatch: pytest.MonkeyPatch) -> None:
    text = verify_starts_kernel().source.text
    assert text.count(old) == 1

    def broken(**values: int | str) -> Kernel:
        return cuverify.load_kernel(text.replace(old, new), kernel="verify_starts", **values)

    monkeypatch.setattr(verify_starts_op, "verify_starts_kernel", broken)
    with pytest.raises((AssertionError, CheckerError)):
        check_some()


# --- what does not fit ---------------------------------------------------------------------------


def plan_of(**more: Any) -> VerifyPlan:
    lists: dict[str, Any] = {"kv_indices": np.arange(40, dtype=np.int32)} | more
    return VerifyPlan(
        np.array([40], np.int32),
        np.array([0, 8], np.int32),
        heads=8,
        max_tokens=8,
        max_tree_tokens=8,
        **lists,
    )


def test_what_starts_refuse() -> None:
    with pytest.raises(ArgumentError, match="has no kv_indices"):
        VerifyStarts(plan_of(kv_indices=None))
    with pytest.raises(ArgumentError, match=r"out_cache_loc=.*the plan is for 8 tokens"):
        VerifyStarts(plan_of(), out_cache_loc=np.zeros(7, np.int64))
    with pytest.raises(ArgumentError, match="out_cache_loc=.*int64"):
        VerifyStarts(plan_of(), out_cache_loc=np.zeros(8, np.int32))
    plan = plan_of()
    short = StartsWorkspace.allocate(plan.workspace.work, num_ctas=plan.num_ctas - 1)
    with pytest.raises(ArgumentError, match="cta_starts=.*is too small: 2 blocks"):
        VerifyStarts(plan, workspace=short)
    shared = np.zeros((plan.num_ctas, 64), np.int64)
    within = StartsWorkspace(shared.view(np.int32)[:, :16].copy(), shared)
    VerifyStarts(plan, workspace=within)
    slots = np.zeros(plan.num_ctas * 64, np.int64)
    owned = plan.workspace
    flat = np.zeros(owned.cta_work.size + plan.num_ctas * 16, np.int32)
    merged = replace(owned, combine_tiles=flat[: owned.combine_tiles.size].reshape(-1, 4))
    with pytest.raises(ArgumentError, match="cta_starts=.*shares memory with plan.combine_tiles"):
        VerifyStarts(
            plan_of(workspace=merged),
            workspace=StartsWorkspace(flat[: plan.num_ctas * 16].reshape(-1, 16), within.cta_slots),
        )
    with pytest.raises(ArgumentError, match="cta_slots=.*shares memory with out_cache_loc"):
        VerifyStarts(
            plan, out_cache_loc=slots[:8],
            workspace=StartsWorkspace(within.cta_starts, slots.reshape(-1, 64)),
        )  # fmt: skip


def layer_of(plan: VerifyPlan, lse: Any = None, **more: Any) -> VerifyAttention:
    return VerifyAttention(
        np.zeros((8, 8, 576), np.uint16), np.zeros((50, 576), np.uint16),
        np.zeros((8, 8, 512), np.uint16), np.zeros((8, 8), np.float32) if lse is None else lse,
        plan=plan, visible=np.ones((8, 1), np.uint64), sm_scale=0.1, **more,
    )  # fmt: skip


def test_what_layers_refuse_of_starts() -> None:
    plan, loc = plan_of(), np.arange(40, 48)
    starts = VerifyStarts(plan, out_cache_loc=loc)
    layer_of(plan, starts=starts, out_cache_loc=loc)()
    layer_of(plan, starts=starts, draft_kv=np.zeros((8, 576), np.uint16))()
    layer_of(plan, starts=VerifyStarts(plan), out_cache_loc=loc)()
    with pytest.raises(ArgumentError, match="starts=.*is of another plan"):
        layer_of(plan_of(), starts=starts, out_cache_loc=loc)
    with pytest.raises(ArgumentError, match="out_cache_loc=.*another one than that of starts"):
        layer_of(plan, starts=starts, out_cache_loc=loc.copy())
    lse = starts.workspace.cta_slots.view(np.float32).reshape(-1)[:64].reshape(8, 8)
    with pytest.raises(ArgumentError, match="lse=.*shares memory with starts.workspace"):
        layer_of(plan, lse, starts=starts, out_cache_loc=loc)


@gpu
@pytest.mark.parametrize("located", [True, False])
@pytest.mark.parametrize("drafts", ["pool", "apart"])
def test_layers_attend_the_same_by_starts_of_their_own(located: bool, drafts: str) -> None:
    torch = pytest.importorskip("torch")
    generator = torch.Generator("cuda").manual_seed(0)

    def noise(*shape: int) -> Any:
        return torch.randn(shape, device="cuda", generator=generator).to(torch.bfloat16)

    lens, tree = [700, 0, 40, 3000], 17
    tokens, slots = tree * len(lens), sum(lens) + tree * len(lens)
    order = torch.randperm(slots, device="cuda", generator=generator)
    plan = VerifyPlan(
        torch.tensor(lens, dtype=torch.int32, device="cuda"),
        torch.arange(0, tokens + 1, tree, dtype=torch.int32, device="cuda"),
        heads=8, max_tokens=tokens, max_tree_tokens=tree, kv_indices=order[: sum(lens)].int(),
    )  # fmt: skip
    loc = order[sum(lens) :].contiguous()
    starts = VerifyStarts(plan, out_cache_loc=loc if located else None)
    rows = {"out_cache_loc": loc} if drafts == "pool" else {"draft_kv": noise(tokens, 576)}
    q, kv = noise(tokens, 8, 576), noise(slots, 576)
    outs = [torch.zeros((tokens, 8, 512), dtype=torch.bfloat16, device="cuda") for _ in range(2)]
    lses = [torch.zeros((tokens, 8), device="cuda") for _ in range(2)]
    layers = [
        VerifyAttention(
            q, kv, out, lse, plan=plan, sm_scale=0.05, starts=given,
            visible=torch.full((tokens, 1), 2**tree - 1, dtype=torch.uint64, device="cuda"),
            **rows,
        )
        for out, lse, given in zip(outs, lses, (None, starts), strict=True)
    ]  # fmt: skip
    plan()
    starts()
    for layer in layers:
        layer()
    assert torch.equal(outs[0], outs[1])
    assert torch.equal(lses[0], lses[1])
    assert outs[0].any(dim=2).all()


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_resources(arch: str) -> None:
    resources = verify_starts_kernel().compile(arch).resources["verify_starts"]
    assert (resources.spill_store_bytes, resources.stack_bytes) == (0, 0), resources
    assert resources.registers <= 32
