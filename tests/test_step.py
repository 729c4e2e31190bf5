"""The whole step: against its oracles, in one graph, over a thousand replays."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from cuverify.validators import validate
from cuverify.validators.compare import compare_all, host_array
from hypothesis import given
from hypothesis import strategies as st

import cuverify
from cuverify.cases import Target
from cuverify.draft_batch import DraftKind
from cuverify.errors import ArgumentError, CaseError
from cuverify.ops.accept import AcceptCode
from cuverify.reference.verify_starts import verify_starts
from cuverify.stages import record_stages
from cuverify.step import StepSizes, StepTensors, VerifyStep
from cuverify.step_workload import DrawnVerifyStep, StepBatch, small_sizes
from cuverify.strategies import decode_steps, examples
from cuverify.verify_variants import VARIANTS

Schedule = Literal["ascending", "descending", "random"]
gpu = pytest.mark.gpu


def wrong(step: DrawnVerifyStep, batch: StepBatch) -> list[str]:
    step.refill(batch)
    step.poison()
    step()
    outputs = {name: host_array(tensor) for name, tensor in step.outputs.items()}
    return [str(mismatch) for mismatch in compare_all(outputs, step.expected())]


@examples(15)
@given(decode_steps(steps=3))
def test_drawn_steps(drawn_steps: tuple[StepSizes, list[StepBatch]]) -> None:
    sizes, drawn = drawn_steps
    step = DrawnVerifyStep(drawn[0], sizes, "numpy", num_ctas=3)
    for batch in drawn:
        assert wrong(step, batch) == []
    step.step.plan.read_status()


def test_a_step_lays_out_starts_where_the_text_reads_them(monkeypatch: pytest.MonkeyPatch) -> None:
    reads = {"portable": replace(VARIANTS["portable"], starts=True)}
    monkeypatch.setattr("cuverify.step.VARIANTS", reads)  # on the host lane none does
    sizes, rng = small_sizes(requests=2), np.random.default_rng(3)
    drawn = DrawnVerifyStep(StepBatch.draw(rng, sizes, longest=60), sizes, "numpy", num_ctas=3)
    step = drawn.step
    assert step.starts is not None
    names = [name for name, _ in step.stages]
    assert all(names.count(name) == 1 for name in ("tree build", "plan", "accept"))
    for seed in (4, 5):
        batch = StepBatch.draw(np.random.default_rng(seed), sizes, longest=60, padded=1)
        for buffer in vars(step.starts.workspace).values():
            buffer[:] = -7
        assert wrong(drawn, batch) == []
        plan = step.plan.workspace
        expected = verify_starts(
            plan.work, plan.cta_work, plan.kv_indptr, drawn.tensors.qo_indptr,
            drawn.tensors.kv_indices, drawn.tensors.out_cache_loc,
        )  # fmt: skip
        for name, found in vars(step.starts.workspace).items():
            np.testing.assert_array_equal(found, expected[name], err_msg=name)


@examples(3)
@given(
    seed=st.integers(0, 2**32 - 1),
    schedule=st.sampled_from(["ascending", "descending", "random"]),
)
def test_drawn_steps_under_the_checkers(seed: int, schedule: Schedule) -> None:
    sizes, rng = small_sizes(requests=2), np.random.default_rng(seed)
    batch = StepBatch.draw(rng, sizes, longest=60, padded=seed % 2)
    with cuverify.checked(schedule=schedule, seed=seed):
        assert wrong(DrawnVerifyStep(batch, sizes, "numpy", num_ctas=2), batch) == []


def test_a_step_begins_with_the_drafter_s_logits() -> None:
    sizes = small_sizes(requests=1, nodes=5, layers=1)
    tensors = StepTensors.allocate(np.zeros(1), sizes)
    tensors.seq_lens[:] = 3
    tensors.req_to_token[:] = np.arange(sizes.table[1])
    logits = np.random.default_rng(0).normal(size=(1, sizes.depth, 40)).astype(np.float32)
    called: list[Any] = []
    step = VerifyStep(
        tensors, sizes, sm_scale=0.1, num_ctas=2, draft_logits=logits,
        before_layer=called.append, before_argmax=lambda: called.append("logits"),
        after=[("commit", lambda: called.append("commit"))],
    )  # fmt: skip
    with record_stages() as log:
        step()
    step.read_status()
    best = np.argsort(-logits[0], axis=1)[:, : sizes.ranks]
    np.testing.assert_array_equal(tensors.token_ids[0], best)
    assert set(step.trees.tokens[0, 1:].tolist()) <= set(best.reshape(-1).tolist())
    assert called == [0, "logits", "commit"]
    assert [entry.name for entry in log.times()] == [
        "draft top-k", "tree build", "plan", "model", "attention", "argmax", "accept", "commit",
    ]  # fmt: skip


@pytest.mark.parametrize("way", ["rows", "table"])
def test_a_step_ends_with_the_commit(way: Literal["rows", "table"]) -> None:
    sizes, rng = small_sizes(requests=4), np.random.default_rng(7)
    drawn = DrawnVerifyStep(
        StepBatch.draw(rng, sizes, longest=60, padded=1), sizes, "numpy", num_ctas=2
    )
    tensors = drawn.tensors
    step = VerifyStep(tensors, sizes, sm_scale=0.1, num_ctas=2, commit=way)
    kv, slots, table = tensors.kv.copy(), tensors.out_cache_loc.copy(), tensors.req_to_token.copy()
    with cuverify.checked():
        step()
    assert step.commit is not None
    step.commit.read_status()
    moved = 0
    for request in range(3):
        taken = int(step.accepted.accept_token_num[request]) + 1
        path = step.accepted.accept_index[request, :taken]
        window = slice(request * sizes.nodes, request * sizes.nodes + taken)
        row = table[tensors.req_pool_indices[request]]
        begin = int(tensors.seq_lens[request])
        moved += int((path != np.arange(window.start, window.stop)).sum())
        if way == "rows":
            np.testing.assert_array_equal(tensors.kv[:, slots[window]], kv[:, slots[path]])
            np.testing.assert_array_equal(tensors.req_to_token, table)
        else:
            now = tensors.req_to_token[tensors.req_pool_indices[request]]
            np.testing.assert_array_equal(now[begin : begin + taken], slots[path])
            np.testing.assert_array_equal(now[:begin], row[:begin])
            np.testing.assert_array_equal(tensors.out_cache_loc[window], slots[path])
            np.testing.assert_array_equal(tensors.kv, kv)
    assert moved > 0


def test_padding_may_draft_anything() -> None:
    sizes, rng = small_sizes(requests=3), np.random.default_rng(1)
    drawn = DrawnVerifyStep(
        StepBatch.draw(rng, sizes, longest=20, padded=1), sizes, "numpy", num_ctas=2
    )
    drawn.tensors.logprobs[2] = np.nan
    drawn()
    drawn.step.read_status()
    drawn.step.accepted.status[2] = AcceptCode.BAD_LINK, 0
    drawn.step.read_status()
    drawn.tensors.req_pool_indices[2] = 3
    with pytest.raises(ArgumentError, match="request 2: log-probability 0 .* is NaN or"):
        drawn.step.read_status()


def test_what_does_not_fit_is_refused() -> None:
    sizes, rng = small_sizes(), np.random.default_rng(0)
    with pytest.raises(ArgumentError, match="nodes=257"):
        small_sizes(nodes=257)
    step = DrawnVerifyStep(StepBatch.draw(rng, sizes, longest=9), sizes, "numpy", num_ctas=2)
    with pytest.raises(CaseError, match="does not fit"):
        step.refill(StepBatch.draw(rng, small_sizes(requests=2), longest=9))
    tensors = StepTensors.allocate(np.zeros(1), sizes)
    with pytest.raises(ArgumentError, match="commit='pages'.*rows, table"):
        VerifyStep(tensors, sizes, sm_scale=0.1, commit="pages")  # type: ignore[arg-type]
    tensors.seq_lens[:] = -4
    spoiled = VerifyStep(tensors, sizes, sm_scale=0.1, num_ctas=2)
    spoiled()
    with pytest.raises(ArgumentError, match=r"seq_lens\[0\]=-4"):
        spoiled.read_status()


def gpu_sizes() -> StepSizes:
    return StepSizes(
        requests=6, nodes=33, depth=7, ranks=8, layers=3, heads=8, slots=16_384, table=(12, 2100),
        listed=12_000, vocabulary=4000, max_path=8,
    )  # fmt: skip


def validated_sizes() -> StepSizes:
    """Return sizes that the oracles, which take most of the time, get through in a moment."""
    return StepSizes(
        requests=4, nodes=17, depth=7, ranks=8, layers=2, heads=8, slots=2048, table=(8, 360),
        listed=1400, vocabulary=1000, max_path=8,
    )  # fmt: skip


class StepCase:
    """The step as a case of the validator: batches that grow and shrink, and poisoned padding."""

    name = "step"

    def __init__(self, sizes: StepSizes) -> None:
        self.sizes = sizes

    def device_batches(self, *, seed: int, examples: int) -> Iterator[tuple[str, StepBatch]]:
        kinds: tuple[tuple[DraftKind, int], ...] = (
            ("free", 0), ("ties", 2), ("holes", 3), ("free", 1),
        )  # fmt: skip
        rng = np.random.default_rng(seed)
        for number in range(examples):
            kind, padded = kinds[number % len(kinds)]
            batch = StepBatch.draw(rng, self.sizes, longest=300, padded=padded, kind=kind)
            yield f"{number}: {kind}, {padded} padded", batch

    def step(self, batch: StepBatch, xp: Target) -> DrawnVerifyStep:
        return DrawnVerifyStep(batch, self.sizes, xp)


@gpu
def test_the_validator_finds_nothing_in_a_captured_step() -> None:
    report = validate(StepCase(validated_sizes()), seed=1, examples=4)
    assert [str(finding) for finding in report.findings] == []
    inspected = {line.subject for line in report.coverage if line.status == "inspected"}
    assert {"capture", "graph nodes", "pointers of the graph", "replay"} <= inspected


@gpu
def test_a_thousand_replays_equal_eager_runs() -> None:
    import torch

    sizes, rng = gpu_sizes(), np.random.default_rng(2)
    batch = StepBatch.draw(rng, sizes, longest=600)
    step = DrawnVerifyStep(batch, sizes, "torch-cuda")
    tensors = step.tensors
    # any slot may be read
    tensors.kv.normal_()
    tensors.q.normal_()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=stream):
        step()
    names = list(step.outputs)
    # told once, at the end: a wait for each output would take longer than the step
    differs = torch.zeros((1000, len(names)), dtype=torch.bool, device="cuda")
    generator = torch.Generator("cuda").manual_seed(3)
    random = {"generator": generator, "device": "cuda"}
    for turn in range(1000):
        # batches grow and shrink; padding: one token, row 0, slot 0, drafts that are NaN
        real = 1 + turn * 7 % sizes.requests
        scores = torch.randn(tensors.logprobs.shape, **random).abs().cumsum(dim=2).neg()
        if turn % 3 == 0:
            scores = (scores * 2).round() / 2
        scores[real:] = float("nan")
        tensors.logprobs.copy_(scores)
        tensors.token_ids.copy_(torch.randint(sizes.vocabulary, scores.shape, **random))
        tensors.seq_lens.copy_(torch.randint(2000, (sizes.requests,), **random))
        tensors.seq_lens[real:] = 1
        rows = 1 + torch.randperm(sizes.table[0] - 1, **random)[: sizes.requests]
        rows[real:] = 0
        tensors.req_pool_indices.copy_(rows)
        tensors.req_to_token.copy_(torch.randint(sizes.slots, sizes.table, **random))
        tensors.out_cache_loc.copy_(torch.randint(sizes.slots, (sizes.tokens,), **random))
        tensors.out_cache_loc[real * sizes.nodes :] = 0
        tensors.logits.normal_(generator=generator)
        step.poison()
        step()
        eager = {name: tensor.clone() for name, tensor in step.outputs.items()}
        step.poison()
        graph.replay()
        for at, (name, tensor) in enumerate(step.outputs.items()):
            differs[turn, at] = (tensor.view(torch.uint8) != eager[name].view(torch.uint8)).any()
    found = [f"{names[at]} differs in turn {turn}" for turn, at in differs.nonzero().tolist()]
    assert found == []
    step.step.plan.read_status()
    step.step.accepted.read_status()
