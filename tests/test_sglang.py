"""SGLang's contract: its buffers and batches, and backends that keep or break it."""

from __future__ import annotations

import json
from collections import Counter, defaultdict
from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuverify.validators.compare import Mismatch, compare, host_array
from cuverify.validators.host_graph import Call
from cuverify.validators.observations import Fault
from hypothesis import given
from hypothesis import strategies as st

from cuverify.cli import main
from cuverify.errors import ArgumentError, CaseError
from cuverify.host.options import checked
from cuverify.report import Report
from cuverify.sglang.backend import VerifyBackend
from cuverify.sglang.check import check_runner, load_runner, run_in_child, shape_for
from cuverify.sglang.contract import FAMILIES, families_of, missing_hooks
from cuverify.sglang.gqa_backend import GqaVerifyBackend
from cuverify.sglang.graphs import CudaGraphs, HostGraphs, frozen_between
from cuverify.sglang.inputs import GraphInputs
from cuverify.sglang.judge import coverage, judge
from cuverify.sglang.play import play_contract
from cuverify.sglang.rig import Rig
from cuverify.sglang.schedule import (
    CAPTURED,
    Play,
    Shape,
    inputs_of,
    padding_rows,
    schedule,
    stale_fields,
)
from cuverify.sglang.seen import ContractSeen, FrozenSeen, PlaySeen
from cuverify.sglang.step import RunnerStep
from cuverify.strategies import examples
from cuverify.tree import DraftTree
from cuverify.verify_variants import VARIANTS

BROKEN = {
    "StalePositions": "CV505",
    "UndersizedMask": "CV503",
    "ReallocatedMetadata": "CV303",
    "EagerDtypes": "CV607",
    "HostSplitCount": "CV302",
}
_BACKENDS = Path(__file__).parent / "broken_backends.py"
_OURS = "cuverify.sglang.backend:VerifyBackend"
_GROUPED = "cuverify.sglang.gqa_backend:GqaVerifyBackend"

SMALL = Shape((1, 2, 4), draft_tokens=5, max_context_len=40, latent=64, rope=16)


# --- the runner's buffers --------------------------------------------------------------------------


def real_part(requests: int, n: int) -> dict[str, np.ndarray]:
    tokens = np.arange(100, 100 + requests * n)
    lens = np.arange(7, 7 + requests)
    return {
        "input_ids": tokens, "positions": tokens + 1, "out_cache_loc": tokens + 2,
        "req_pool_indices": lens + 1, "seq_lens": lens, "seq_lens_cpu": lens,
    }  # fmt: skip


def test_padding_of_0_5_12_leaves_rows_positions_and_tokens_stale() -> None:
    inputs = GraphInputs("paired", 4, 2, "cpu", fill_value=1)
    inputs.write(real_part(4, 2), 4)
    inputs.write(real_part(1, 2), 2)
    assert inputs.view("seq_lens", 2).tolist() == [7, 1]
    assert inputs.view("seq_lens_cpu", 2).tolist() == [7, 1]
    assert inputs.view("out_cache_loc", 2).tolist() == [102, 103, 0, 0]
    # stale: what the batch of four left
    assert inputs.view("req_pool_indices", 2).tolist() == [8, 9]
    assert inputs.view("positions", 2).tolist() == [101, 102, 103, 104]
    assert inputs.view("input_ids", 2).tolist() == [100, 101, 102, 103]
    # whole buffers are filled, also behind the graph
    assert inputs.view("seq_lens", 4).tolist() == [7, 1, 1, 1]


def test_padding_of_0_5_23_leaves_tokens_stale_only() -> None:
    inputs = GraphInputs("split", 4, 2, "cpu", fill_value=3)
    assert inputs.view("seq_lens", 4).tolist() == [3, 3, 3, 3]
    inputs.write(real_part(4, 2), 4)
    inputs.write(real_part(2, 2), 4)
    assert inputs.view("seq_lens", 4).tolist() == [7, 8, 3, 3]
    assert inputs.view("out_cache_loc", 4).tolist() == [102, 103, 104, 105, 0, 0, 0, 0]
    assert inputs.view("req_pool_indices", 4).tolist() == [8, 9, 0, 0]
    assert inputs.view("positions", 4).tolist() == [101, 102, 103, 104, 0, 0, 0, 0]
    assert inputs.view("input_ids", 4).tolist() == list(range(100, 108))
    inputs.write(real_part(4, 2), 4)
    inputs.write(real_part(1, 2), 2)
    # behind the graph nothing is touched
    assert inputs.view("seq_lens", 4).tolist() == [7, 3, 9, 10]


@pytest.mark.parametrize("family", FAMILIES)
def test_every_buffer_has_a_rule_and_is_int64(family) -> None:
    inputs = GraphInputs(family, 2, 3, "cpu", 1)
    assert set(inputs.rules) == set(inputs.buffers) == set(real_part(1, 3))
    assert {t.dtype for t in inputs.buffers.values()} == {torch.int64}
    assert {len(t) for t in inputs.buffers.values()} == {2, 6}


def test_a_full_batch_is_not_padded() -> None:
    inputs = GraphInputs("paired", 2, 2, "cpu", 1)
    inputs.write(real_part(2, 2), 2)
    for name, values in real_part(2, 2).items():
        assert inputs.view(name, 2).tolist() == values.tolist()


def test_stale_parts_can_be_given() -> None:
    inputs = GraphInputs("paired", 4, 2, "cpu", 1)
    stale = stale_fields(SMALL, Play(4, 1, 0), rows=5)
    stale = {
        name: values[: 8 if name != "req_pool_indices" else 4] for name, values in stale.items()
    }
    inputs.write(real_part(1, 2), 4, stale)
    assert inputs.view("positions", 4).tolist() == [101, 102, *stale["positions"][2:]]
    assert inputs.view("req_pool_indices", 4).tolist() == [8, *stale["req_pool_indices"][1:]]
    assert inputs.view("seq_lens", 4).tolist() == [7, 1, 1, 1]


@pytest.mark.parametrize(("requests", "bs"), [(3, 2), (1, 5)])
def test_a_batch_that_does_not_fit_is_refused(requests: int, bs: int) -> None:
    with pytest.raises(CaseError, match="for a graph of"):
        GraphInputs("split", 4, 2, "cpu", 1).write(real_part(requests, 2), bs)


# --- the batches of a run --------------------------------------------------------------------------


def test_the_schedule_covers_every_smaller_batch_of_every_graph() -> None:
    plays = schedule(CAPTURED)
    made = {(play.captured, play.requests) for play in plays}
    assert made == {(size, n) for size in CAPTURED for n in range(1, size + 1)}
    assert [play.captured for play in plays[:6]] == [32, 16, 8, 4, 2, 1]
    assert all(not play.padded for play in plays[:6])
    assert plays[-6:] == plays[:6]  # the first batches once more
    for size in CAPTURED:
        lengths = {p.lengths for p in plays if p.captured == size}
        assert lengths == {"mixed", "maximum"}


def test_graphs_take_turns_and_batches_shrink_and_grow() -> None:
    plays = schedule((4, 8))
    walk = [play.requests for play in plays if play.captured == 8]
    steps = [b - a for a, b in pairwise(walk)]
    assert min(steps) < 0 < max(steps)
    changes = sum(a.captured != b.captured for a, b in pairwise(plays))
    assert changes >= 6


def test_batches_differ_but_for_those_that_are_compared() -> None:
    plays = schedule((1, 2, 4))
    by_seed = defaultdict(set)
    for play in plays:
        by_seed[play.seed].add(play)
    several = [group for group in by_seed.values() if len(group) > 1]
    assert len(several) == 2  # one for each size that can be padded
    for group in several:
        assert len({(p.captured, p.requests, p.lengths) for p in group}) == 1
        assert Counter(p.padding for p in group) == {"numbers": 2, "nan": 1}
    assert len({play.label for play in plays}) == len(plays) - 3


@pytest.mark.parametrize(
    "wrong",
    [
        {"captured": ()},
        {"captured": (0, 2)},
        {"draft_tokens": 0},
        {"kv_heads": 3},
        {"kv_heads": 0},
        {"kv_heads": 2, "pool": "fp16"},
    ],
)
def test_shapes_that_make_no_sense_are_refused(wrong) -> None:
    with pytest.raises(ArgumentError):
        Shape(**wrong)


@pytest.mark.parametrize("play", schedule((1, 4), seed=3)[:12], ids=lambda play: play.label)
def test_what_a_play_writes_is_what_sglang_would(play: Play) -> None:
    shape = replace(SMALL, captured=(1, 4))
    given = inputs_of(shape, play.requests, play.seed, play.lengths, 1)
    n, fields, table = shape.draft_tokens, given.fields, given.req_to_token
    assert table.shape == shape.table
    assert table.dtype == np.int32
    assert table[0, 0] == 0
    # whatever row padding names, its first slot is one
    assert ((table[:, 0] >= 0) & (table[:, 0] < shape.num_slots)).all()
    assert 0 not in fields["req_pool_indices"]
    assert 0 not in fields["out_cache_loc"]
    full, query = given.full_mask(), given.query_mask()
    at = 0
    for b, (length, row) in enumerate(
        zip(fields["seq_lens"], fields["req_pool_indices"], strict=True)
    ):
        drafts = fields["out_cache_loc"][b * n : (b + 1) * n]
        assert table[row, length : length + n].tolist() == drafts.tolist()
        size = n * (length + n)
        tree = DraftTree.from_sglang_mask(
            full[at : at + size], mode="full", num_tokens=n, seq_len=int(length)
        )
        assert tree == given.trees[b]
        own = query[b * n * n : (b + 1) * n * n]
        assert DraftTree.from_sglang_mask(own, mode="query_only", num_tokens=n) == tree
        assert DraftTree.from_links(given.links[1][b], given.links[2][b]) == tree
        positions = fields["positions"][b * n : (b + 1) * n]
        assert positions.tolist() == tree.positions(int(length)).tolist()
        at += size
    assert at == len(full)
    assert given.links[0].reshape(-1).tolist() == list(range(play.requests * n))
    if play.lengths == "maximum":
        assert set(fields["seq_lens"]) == {shape.max_context_len}
    else:
        assert fields["seq_lens"].max() <= shape.max_context_len - n


def test_the_same_numbers_give_the_same_batch() -> None:
    one, other = (inputs_of.__wrapped__(SMALL, 3, 5, "mixed", 1) for _ in range(2))
    assert one.req_to_token.tobytes() == other.req_to_token.tobytes()
    assert one.pools["kv_buffer"].tobytes() == other.pools["kv_buffer"].tobytes()
    assert one.full_mask().tobytes() == other.full_mask().tobytes()
    assert inputs_of(SMALL, 3, 6, "mixed", 1).q.tobytes() != one.q.tobytes()


def test_padding_holds_nan_or_other_numbers() -> None:
    nan = padding_rows(Play(4, 1, 0, padding="nan"), 3, 16)
    one, two = (padding_rows(Play(4, 1, 0, padding_seed=s), 3, 16) for s in (1, 2))
    assert np.isnan(torch.from_numpy(nan.view(np.int16)).view(torch.bfloat16).float().numpy()).all()
    assert (one != two).any()
    values = torch.from_numpy(one.view(np.int16)).view(torch.bfloat16).float()
    assert torch.isfinite(values).all()


# --- backends --------------------------------------------------------------------------------------


@pytest.mark.parametrize("family", FAMILIES)
def test_ours_keeps_the_contract_on_the_host_lane(family) -> None:
    seen = play_contract(VerifyBackend, family, HostGraphs(), SMALL)
    assert judge(seen) == []
    assert seen.captured == [4, 2, 1]
    assert len(seen.plays) == len(schedule(SMALL.captured))
    assert all(play.must_change > 0 for play in seen.plays)
    assert len({play.digest for play in seen.plays}) > len(seen.plays) // 2
    first, last = seen.plays[0], seen.plays[-3]
    assert (first.play, first.digest) == (last.play, last.digest)
    assert [line.status for line in coverage(seen)] == ["inspected"]


@pytest.mark.parametrize("family", FAMILIES)
def test_ours_keeps_the_contract_under_the_checkers(family) -> None:
    shape = replace(SMALL, captured=(1, 2), max_context_len=20)
    with checked():
        assert judge(play_contract(VerifyBackend, family, HostGraphs(), shape)) == []


@pytest.mark.parametrize("family", FAMILIES)
def test_ours_lays_starts_out_with_each_plan(family, monkeypatch: pytest.MonkeyPatch) -> None:
    reads = {"portable": replace(VARIANTS["portable"], starts=True)}
    monkeypatch.setattr("cuverify.sglang.backend.VARIANTS", reads)  # on the host lane none does
    laid_out: list[int] = []

    class Watched(VerifyBackend):
        def _plan(self, metadata: Any) -> None:
            held = metadata.starts.workspace
            held.cta_starts.fill_(-7)
            super()._plan(metadata)
            laid_out.append(metadata.bs)
            if not self._graph_tables or held is not self._graph_tables.starts_workspace:
                assert (held.cta_starts[:, :4] == metadata.plan.workspace.cta_work).all()

        def forward_extend(self, *given: Any, **more: Any) -> Any:
            assert self._metadata.starts.plan is self._metadata.plan
            return super().forward_extend(*given, **more)

    shape = replace(SMALL, captured=(1, 2), max_context_len=20)
    assert judge(play_contract(Watched, family, HostGraphs(), shape)) == []
    assert {1, 2} <= set(laid_out)


@pytest.mark.parametrize("n", [1, 2, 64, 65])
def test_ours_takes_trees_of_one_node_and_of_several_words(n: int) -> None:
    shape = replace(SMALL, captured=(1, 2), draft_tokens=n, max_context_len=max(20, n))
    plays = [Play(2, 2, 0), Play(2, 1, 1, padding="nan"), Play(2, 2, 2, "maximum"), Play(1, 1, 3)]
    seen = play_contract(VerifyBackend, "split", HostGraphs(), shape, plays=plays)
    assert judge(seen) == []
    assert len(seen.plays) == 4


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", BROKEN)
def test_each_broken_backend_fails_by_its_rule_alone(name: str, family) -> None:
    make = load_runner(f"{_BACKENDS}:{name}")
    found = judge(play_contract(make, family, HostGraphs(), SMALL))
    assert [f.rule for f in found] == [BROKEN[name]]
    assert found[0].evidence["hooks"] == family
    assert "broken_backends.py:" in str(found[0].where) or name == "UndersizedMask"
    assert found[0].fix


class WritesTheTable(VerifyBackend):
    """Marks the rows that it has seen, which are not its to mark."""

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        self.req_to_token[-1, -1] += 1
        return super().forward_extend(q, k, v, layer, forward_batch)


class Counts(VerifyBackend):
    """Adds its results up, and wants the sum to be zero before."""

    def init_cuda_graph_state(self, max_bs, max_num_tokens):
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.runs = torch.zeros(1)

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        self.runs.zero_()

    def init_forward_metadata(self, forward_batch):
        super().init_forward_metadata(forward_batch)
        self.runs.zero_()

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        self.runs.add_(1)
        return super().forward_extend(q, k, v, layer, forward_batch) * self.runs.bfloat16()


class ReadsLengths(VerifyBackend):
    """Asks the device for the longest prefix in what is recorded."""

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        assert int(forward_batch.seq_lens.max()) > 0
        return super().forward_extend(q, k, v, layer, forward_batch)


class FrozenScale(VerifyBackend):
    """Scales by a number that the host makes of the lengths."""

    def init_forward_metadata(self, forward_batch):
        super().init_forward_metadata(forward_batch)
        self.factor = 1.0

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        super().init_forward_metadata_out_graph(forward_batch, in_capture)
        self.factor = 1.0 if forward_batch.seq_lens_sum == forward_batch.batch_size else 0.5

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        return super().forward_extend(q, k, v, layer, forward_batch) * self.factor


class MixesRequests(VerifyBackend):
    """Adds nothing times the mean of all rows, padding among them."""

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        out = super().forward_extend(q, k, v, layer, forward_batch)
        return out + 0 * out.float().mean().bfloat16()


class Raises(VerifyBackend):
    """Cannot be replayed."""

    def init_forward_metadata_out_graph(self, forward_batch, in_capture=False):
        if not in_capture:
            raise ValueError("no plan")
        super().init_forward_metadata_out_graph(forward_batch, in_capture)


class Unmade(VerifyBackend):
    """Cannot be made."""

    def __init__(self, model_runner) -> None:
        raise ValueError("no model")


@pytest.mark.parametrize(
    ("make", "rules"),
    [
        (WritesTheTable, {"CV506"}),
        (Counts, {"CV604"}),
        (ReadsLengths, {"CV201"}),
        (FrozenScale, {"CV301"}),
        (MixesRequests, {"CV502"}),
        (Raises, {"CV902"}),
        (Unmade, {"CV902"}),
    ],
)
def test_other_mistakes_have_rules_of_their_own(make, rules) -> None:
    found = judge(play_contract(make, "split", HostGraphs(), SMALL))
    assert {f.rule for f in found} == rules, found


def test_two_mistakes_come_in_one_report() -> None:
    class Both(FrozenScale):
        def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
            self.req_to_token[-1, -1] += 1
            return super().forward_extend(q, k, v, layer, forward_batch)

    found = judge(play_contract(Both, "split", HostGraphs(), SMALL))
    assert {f.rule for f in found} == {"CV301", "CV506"}


def test_the_rig_gives_eager_runs_exact_tensors_and_graphs_static_ones() -> None:
    seen = []

    class Looks(VerifyBackend):
        def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
            seen.append(forward_batch)
            assert v.data_ptr() == k.data_ptr()
            assert v.shape[-1] == SMALL.latent
            return super().forward_extend(q, k, v, layer, forward_batch)

    rig = Rig(Looks, "paired", "cpu", SMALL)
    rig.eager(Play(4, 2, 0))
    rig.prepare_replay(Play(4, 2, 0))
    rig.step()
    eager, graph = seen
    assert (eager.batch_size, graph.batch_size) == (2, 4)
    assert eager.seq_lens.tolist() == graph.seq_lens.tolist()[:2]
    assert graph.seq_lens.tolist()[2:] == [1, 1]
    assert eager.spec_info.custom_mask.dtype == torch.bool
    assert graph.seq_lens.data_ptr() == rig.inputs.buffers["seq_lens"].data_ptr()
    assert graph.spec_info.positions.numel() == 2 * SMALL.draft_tokens
    assert graph.seq_lens_sum == eager.seq_lens_sum + 2


def test_the_lists_of_0_5_12_have_the_drafts_appended() -> None:
    batches = []

    class Lists(VerifyBackend):
        def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
            batches.append(forward_batch)
            return super().forward_extend(q, k, v, layer, forward_batch)

    rig = Rig(Lists, "split", "cpu", SMALL)
    rig.backend.verify_mask = None
    play, n = Play(4, 2, 0), SMALL.draft_tokens
    rig.prepare_replay(play)
    rig.step()
    batch, given = batches[0], rig.given(play)
    slots, bounds, qo_indptr, mask = batch.spec_info.generate_attn_arg_prefill(
        batch.req_pool_indices, batch.seq_lens, batch.seq_lens_sum, rig.req_to_token
    )
    lens = [*given.fields["seq_lens"], 1, 1]
    rows = [*given.fields["req_pool_indices"], 0, 0]
    right = [given.req_to_token[row, : length + n] for row, length in zip(rows, lens, strict=True)]
    assert slots.tolist() == np.concatenate(right).tolist()
    assert bounds.tolist() == [0, *np.cumsum(np.array(lens) + n)]
    assert qo_indptr.tolist() == [0, n, 2 * n, 3 * n, 4 * n]
    assert {t.dtype for t in (slots, bounds, qo_indptr)} == {torch.int32}
    full = given.full_mask()
    assert mask.tolist() == [*full.tolist(), *[True] * (2 * n * (1 + n))]


def test_the_validators_step_answers_to_each_input() -> None:
    first, second = Play(2, 2, 0), Play(2, 2, 1)
    step = RunnerStep(VerifyBackend, "split", SMALL, first, device="cpu")

    def runs_right() -> np.ndarray:
        step.poison()
        step()
        out = host_array(step.outputs["out"])
        assert compare("out", out, step.expected()["out"]) is None
        return out.values()

    before = runs_right()
    step.refill(second)
    other = {name: tensor.clone() for name, tensor in step.inputs.items()}
    step.refill(first)
    assert step.alone == tuple(other)
    for name in step.alone:
        kept = step.inputs[name].clone()
        step.inputs[name].copy_(other[name])
        assert (runs_right() != before).any()
        step.inputs[name].copy_(kept)
    assert (runs_right() == before).all()
    step.make_step()()
    for play in (Play(2, 1, 0), Play(4, 4, 0)):
        with pytest.raises(CaseError, match="is no full batch of 2"):
            step.refill(play)


@examples(3)
@given(seed=st.integers(0, 10_000))
def test_ours_keeps_the_contract_for_drawn_batches(seed: int) -> None:
    shape = replace(SMALL, captured=(1, 3))
    plays = schedule(shape.captured, seed=seed)[:8]
    assert judge(play_contract(VerifyBackend, "split", HostGraphs(), shape, plays=plays)) == []


# --- the judge -------------------------------------------------------------------------------------

_OFF = Mismatch("out", count=3, total=9, actual=1.0, expected=2.0)


def record(*plays: PlaySeen, **more) -> ContractSeen:
    seen = ContractSeen("B", "split", "cpu", "graphs", captured=[4], compared_captures=None, **more)
    seen.plays.extend(plays)
    return seen


def a_play(number=0, requests=4, wrong=False, **more) -> PlaySeen:
    kind = {key: more.pop(key) for key in ("seed", "lengths", "padding") if key in more}
    mismatch = _OFF if wrong else None
    asked = Play(4, requests, **{"seed": number, **kind})
    return PlaySeen(number, asked, mismatch, must_change=9, digest=f"{number}", **more)


def rules(seen: ContractSeen) -> list[str]:
    return [f.rule for f in judge(seen)]


def test_the_judge_tells_causes_apart() -> None:
    right = a_play(0)
    assert rules(record(right)) == []
    assert rules(record(a_play(0, wrong=True), right)) == ["CV601"]
    assert rules(record(right, a_play(1, 2, wrong=True))) == ["CV505"]
    assert rules(record(right, a_play(1, 2, True), a_play(2, 4, True))) == ["CV601"]
    assert rules(record(right, a_play(1, lengths="maximum", wrong=True))) == ["CV503"]
    moved = a_play(1, wrong=True, moved=("plan.indptr",))
    assert rules(record(right, moved)) == ["CV303"]
    assert rules(record(right, a_play(1, moved=("plan.indptr",)))) == []
    raised = a_play(2, fault=Fault("replay", "ValueError: no plan", "b.py:3"))
    assert rules(record(right, moved, raised)) == ["CV303"]
    frozen = FrozenSeen(4, "k", "grid", ("1", "2"))
    assert rules(record(right, a_play(1, wrong=True), raised, frozen=[frozen])) == [
        "CV302",
        "CV902",
    ]
    assert rules(record(right, a_play(1, wrong=True), frozen=[frozen])) == ["CV302"]
    unwritten = replace(a_play(1, wrong=True), unchanged=3)
    assert rules(record(right, unwritten)) == ["CV602"]


def test_paddings_are_compared_among_themselves() -> None:
    full = a_play(9)
    same = [replace(a_play(n, 2, seed=1), digest="a") for n in range(2)]
    nan = replace(a_play(2, 2, seed=1, padding="nan"), digest="a")
    assert rules(record(full, *same, nan)) == []
    assert rules(record(full, *same, replace(nan, digest="b"))) == ["CV502"]
    other = replace(same[1], digest="b")
    assert rules(record(full, same[0], other, nan)) == ["CV501"]
    # where full batches are wrong, what pads them is not the reason
    assert rules(record(a_play(9, wrong=True), same[0], other, nan)) == ["CV601"]


def test_dtypes_count_where_eager_runs_are_right_and_every_graph_is_wrong() -> None:
    drift = {"metadata.qo_indptr": ("torch.int32", "torch.int64")}
    wrong, right = a_play(0, wrong=True), a_play(0)
    assert rules(record(wrong, eager=[right], dtypes=drift)) == ["CV607"]
    assert rules(record(wrong, eager=[wrong], dtypes=drift)) == ["CV603"]
    assert rules(record(wrong, right, eager=[right], dtypes=drift)) == ["CV601"]
    assert rules(record(right, eager=[right], dtypes=drift)) == []


def test_a_lost_context_and_a_vacuous_run_are_told() -> None:
    lost = Fault("replay", "RuntimeError: illegal access", "b.py:3", context_lost=True)
    found = judge(record(a_play(0, fault=lost)))
    assert ("CV903", "b.py:3") in [(f.rule, f.where) for f in found]
    assert rules(record(replace(a_play(0), must_change=0))) == ["CV906"]
    assert rules(record(a_play(0, repeat=_OFF))) == ["CV604"]
    assert rules(record(a_play(0, changed=("req_to_token",)))) == ["CV506"]


def test_a_run_that_did_not_come_to_replays_is_not_inspected() -> None:
    seen = record(faults=[Fault("capture", "RuntimeError: no")])
    assert rules(seen) == ["CV201"]
    assert [line.status for line in coverage(seen)] == ["not inspected"]


def test_captures_are_compared_by_grid_number_and_count() -> None:
    one = [Call("k", (1, 1, 1), (("n", 3),)), Call("aten.add", (), (1.0,))]
    assert frozen_between(4, one, list(one)) == []
    grid = [replace(one[0], grid=(2, 1, 1)), one[1]]
    number = [one[0], replace(one[1], numbers=(2.0,))]
    assert [f.what for f in frozen_between(4, one, grid)] == ["grid"]
    assert [(f.kernel, f.values) for f in frozen_between(4, one, number)] == [
        ("aten.add", ("1.0", "2.0"))
    ]
    assert [f.values for f in frozen_between(4, one, [*one, one[0]])] == [("1", "2")]
    moved = [replace(one[0], pointers=(4096,)), one[1]]
    assert frozen_between(4, one, moved) == []


# --- the command -----------------------------------------------------------------------------------


def test_a_class_without_hooks_is_refused_by_name() -> None:
    assert families_of(VerifyBackend) == ["paired", "split"]
    assert missing_hooks(VerifyBackend) == []
    with pytest.raises(CaseError, match="lacks init_forward_metadata"):
        load_runner("cuverify.tree:DraftTree")
    with pytest.raises(CaseError, match="no attribute"):
        load_runner("cuverify.sglang.backend:Nobody")


def test_a_class_with_kv_heads_gets_keys_and_values_apart() -> None:
    assert shape_for(load_runner(_OURS), SMALL) == SMALL
    shape = shape_for(load_runner(_GROUPED), SMALL)
    assert (shape.heads, shape.kv_heads, shape.row) == (8, 2, (2, 128))
    given = inputs_of(shape, 2, 5, "mixed", 1)
    tokens = 2 * shape.draft_tokens
    assert {name: rows.shape for name, rows in given.fresh.items()} == {
        "k": (tokens, 2, 128), "v": (tokens, 2, 128)
    }  # fmt: skip
    assert (given.fresh["k"] != given.fresh["v"]).any()
    assert given.q.shape == (tokens, 8, 128)


@pytest.mark.parametrize(("backend", "apart"), [(VerifyBackend, False), (GqaVerifyBackend, True)])
def test_rows_have_the_heads_and_columns_of_the_layer(backend, apart) -> None:
    class Looks(backend):
        def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
            heads, tokens = (layer.tp_q_head_num, layer.tp_k_head_num), len(q)
            assert q.shape == (tokens, heads[0], layer.head_dim)
            assert k.shape == (tokens, heads[1], layer.head_dim)
            assert v.shape == (tokens, heads[1], layer.v_head_dim)
            assert (v.data_ptr() != k.data_ptr()) == apart
            out = super().forward_extend(q, k, v, layer, forward_batch)
            assert out.shape == (tokens, heads[0], layer.v_head_dim)
            return out

    rig = Rig(Looks, "split", "cpu", shape_for(backend, SMALL))
    rig.eager(Play(2, 2, 0))
    assert rig.backend.text == "portable"


@pytest.mark.parametrize("backend", [VerifyBackend, GqaVerifyBackend])
def test_a_backend_may_say_the_type_of_partials(backend) -> None:
    shape = replace(shape_for(backend, SMALL), captured=(1,))
    wide = type("Wide", (backend,), {"partial": "bf16"})
    assert judge(play_contract(wide, "split", HostGraphs(), shape)) == []
    wrong = Rig(type("Wrong", (backend,), {"partial": "fp8"}), "split", "cpu", shape)
    with pytest.raises(ArgumentError, match="partial='fp8': wants 'fp16' or 'bf16'"):
        wrong.eager(Play(1, 1, 0))


def test_heads_of_latent_rows_are_not_rounded() -> None:
    with pytest.raises(ArgumentError, match="heads=12: must be a multiple of 8"):
        inputs_of(replace(SMALL, heads=12), 1, 0, "mixed", 1)
    grouped = replace(SMALL, heads=12, kv_heads=2)
    assert inputs_of(grouped, 1, 0, "mixed", 1).q.shape == (SMALL.draft_tokens, 12, 128)


@pytest.mark.parametrize(
    ("backend", "supported"),
    [
        (VerifyBackend, r"torch\.bfloat16, torch\.float16, torch\.float8_e4m3fn"),
        (GqaVerifyBackend, r"torch\.bfloat16"),
    ],
)
def test_a_pool_of_another_type_is_refused_by_name(backend, supported) -> None:
    def make(model_runner):
        return backend(replace(model_runner, kv_cache_dtype=torch.float8_e5m2))

    said = rf"kv_cache_dtype='torch\.float8_e5m2': wants one of {supported}$"
    with pytest.raises(ArgumentError, match=said):
        Rig(make, "split", "cpu", shape_for(backend, SMALL))


class SwapsValues(GqaVerifyBackend):
    """Attends to the values as if they were keys."""

    def forward_extend(self, q, k, v, layer, forward_batch, save_kv_cache=True):
        return super().forward_extend(q, v, k, layer, forward_batch, save_kv_cache)


def test_values_in_the_place_of_keys_are_wrong() -> None:
    shape = shape_for(SwapsValues, replace(SMALL, captured=(1,)))
    found = judge(play_contract(SwapsValues, "split", HostGraphs(), shape, plays=[Play(1, 1, 0)]))
    assert [f.rule for f in found] == ["CV603"]


class GpuOnly(VerifyBackend):
    """A backend whose kernels the host lane cannot run."""

    devices = ("cuda",)


def test_a_backend_for_gpus_only_is_not_played_on_the_host() -> None:
    report = check_runner(f"{__file__}:GpuOnly", device="cpu")
    lines = {line.subject: line for line in report.coverage}
    assert lines["host lane"].status == "not inspected"
    assert lines["capture"].detail == "not asked for (device='cpu')"
    assert report.findings == []


def test_the_command_judges_a_broken_backend(capsys) -> None:
    assert (
        main(["check", "--device", "cpu", "--runner", f"{_BACKENDS}:HostSplitCount", "--json", "-"])
        == 1
    )
    report = json.loads(capsys.readouterr().out)
    assert {f["rule"] for f in report["findings"]} == {"CV302"}
    assert main(["check", "relocate", "--runner", _OURS]) == 2
    gaps = {line["subject"]: line["detail"] for line in report["coverage"]}
    for family in FAMILIES:
        reason = gaps[f"host lane, {family} hooks, all sizes"]
        assert reason == "findings under the checkers come first"
    for option in (["--examples", "3"], ["--arch", "sm_90"]):
        capsys.readouterr()
        assert main(["check", *option, "--runner", _OURS]) == 2
        assert "--runner takes no --arch and no --examples" in capsys.readouterr().err


# --- on a GPU --------------------------------------------------------------------------------------


def on_gpu(reference: str, captured: tuple[int, ...]) -> Report:
    """Play a backend in this process, which saves the start of another one."""
    merged = Report(reference)

    def take(event) -> None:
        if event["kind"] == "report":
            part = Report.from_json(event["report"])
            merged.findings.extend(part.findings)
            merged.coverage.extend(part.coverage)

    run_in_child({"runner": reference, "seed": 0, "captured": captured}, take)
    return merged


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
def test_ours_keeps_the_contract_in_cuda_graphs(family) -> None:
    seen = play_contract(VerifyBackend, family, CudaGraphs(), Shape(CAPTURED))
    assert judge(seen) == []
    assert seen.captured == [32, 16, 8, 4, 2, 1]
    assert len(seen.plays) == len(schedule(CAPTURED))


@pytest.mark.gpu
@pytest.mark.parametrize("reference", [_OURS, _GROUPED], ids=["latent", "grouped"])
def test_the_validator_finds_nothing_in_what_ours_records(reference: str) -> None:
    report = on_gpu(reference, (1, 4))
    assert report.ok, report.to_text()
    name = reference.partition(":")[2]
    lines = {line.subject: line.status for line in report.coverage}
    for family in FAMILIES:
        assert lines[f"{name}, {family} hooks, 4 requests: capture"] == "inspected"


@pytest.mark.gpu
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("name", BROKEN)
def test_each_broken_backend_fails_by_its_rule_alone_in_cuda_graphs(name: str, family) -> None:
    make = load_runner(f"{_BACKENDS}:{name}")
    found = judge(play_contract(make, family, CudaGraphs(), Shape((1, 2))))
    assert [f.rule for f in found] == [BROKEN[name]]
