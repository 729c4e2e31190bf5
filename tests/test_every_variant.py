"""Every text that attends, through the capture validator and through SGLang's runner.

Parametrised by what the rules choose from, so that a variant which is added there is tested here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from cuverify.validators import validate
from cuverify.validators.compare import compare, host_array
from cuverify.validators.host_graph import HostGraph

from cuverify.cases import Target
from cuverify.cases.verify_attention import SizedBatch, VerifyAttentionStep
from cuverify.cases.verify_gqa import SizedGqaBatch, VerifyGqaStep
from cuverify.compile import max_shared_bytes
from cuverify.contract import limited_to
from cuverify.gqa_batch import KEY_WIDTH, SM_SCALE, GqaBatch
from cuverify.kernel import Kernel
from cuverify.listed_step import Capacity
from cuverify.narrow import Narrow
from cuverify.ops.verify_attention import verify_attention_kernels
from cuverify.ops.verify_gqa import (
    ALL_VALUES,
    ROW_TILES,
    fitting_values,
    row_tile,
    verify_gqa_kernels,
)
from cuverify.sglang.backend import VerifyBackend
from cuverify.sglang.contract import FAMILIES, Family
from cuverify.sglang.graphs import CudaGraphs, HostGraphs
from cuverify.sglang.judge import judge
from cuverify.sglang.play import play_contract
from cuverify.sglang.schedule import Shape, schedule
from cuverify.strategies import ELEMENTS
from cuverify.verify_batch import ElementType, VerifyBatch
from cuverify.verify_variants import RANK_HEADS, VARIANTS, VariantName, variant_of

sys.path.insert(0, str(Path(__file__).parent))
from attention_steps import batch_of

gpu = pytest.mark.gpu

_LENGTHS = ([300, 37, 130], [5, 250, 48], [64, 0, 301])
_TREES = [9, 3, 17]


# --- latent rows ---------------------------------------------------------------------------------


@dataclass(frozen=True)
class Kind:
    """A text, and what it attends to."""

    variant: VariantName
    heads: int
    dtype: ElementType
    kv_scale: float | None

    @property
    def pool(self) -> Narrow:
        return self.dtype if self.kv_scale is None else "fp8_e4m3"

    def __str__(self) -> str:
        return f"{self.variant}, H {self.heads}, {self.pool}"


KINDS = [
    kind
    for name, variant in VARIANTS.items()
    for heads in RANK_HEADS
    for kind in (Kind(name, heads, *element) for element in ELEMENTS[:3])
    if variant.fits(512, 64, 0.07, kind.pool) and (kind.pool == "bf16" or heads == RANK_HEADS[0])
]
"""All numbers of heads with bf16, all types with the fewest heads."""

each_kind = pytest.mark.parametrize("kind", KINDS, ids=str)
each_kind_on_the_host = pytest.mark.parametrize(
    "kind",
    [
        kind
        for kind in KINDS
        if not limited_to(verify_attention_kernels(kind.variant)[0].source.text)
    ],
    ids=str,
)


def skip_where_it_cannot_run(variant: VariantName) -> None:
    import torch

    limits = limited_to(verify_attention_kernels(variant)[0].source.text)
    major, minor = torch.cuda.get_device_capability()
    if limits and not {f"sm_{major}{minor}", f"sm_{major}{minor}a"} & {*limits}:
        pytest.skip(f"{variant} is for {', '.join(limits)}")


class OneKind:
    """A check case of three batches that share buffers."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.name = kind, f"verify_attention, {kind}"

    def kernels(self) -> Sequence[Kernel]:
        return verify_attention_kernels(self.kind.variant, HEADS=self.kind.heads)

    def _batches(self, **width: int) -> Iterator[tuple[str, SizedBatch]]:
        kind = self.kind
        made = [
            batch_of(
                lengths, _TREES, seed=seed, num_slots=700, heads=kind.heads, dtype=kind.dtype,
                kv_scale=kind.kv_scale, **width,
                draft_source=("slots", "separate")[kind.heads // 8 % 2],
            )
            for seed, lengths in enumerate(_LENGTHS)
        ]  # fmt: skip
        size = Capacity.of(made)
        for batch in made:
            yield str(batch.layout.seq_lens), SizedBatch(batch, size)

    def batches(self) -> Iterator[tuple[str, SizedBatch]]:
        return self._batches(latent=64, rope=16)

    def device_batches(self, **draw: int) -> Iterator[tuple[str, SizedBatch]]:
        return self._batches(latent=512, rope=64)

    def step(self, batch: SizedBatch, xp: Target) -> VerifyAttentionStep:
        variant, blocks = self.kind.variant, 3 if xp == "numpy" else None
        return VerifyAttentionStep(batch, xp, variant=variant, num_ctas=blocks)


def test_the_list_has_every_text_and_type() -> None:
    pools = {name: {kind.pool for kind in KINDS if kind.variant == name} for name in VARIANTS}
    assert pools["portable"] == {"bf16", "fp16", "fp8_e4m3"}
    assert pools["sm90"] == {"bf16", "fp16"}
    for name in VARIANTS:
        assert {kind.heads for kind in KINDS if kind.variant == name} == {8, 16, 64, 128}


@pytest.mark.parametrize("kind", [k for k in KINDS if k.variant == variant_of((12, 0))], ids=str)
def test_what_sm_120_gets_runs_on_other_gpus_too(kind: Kind) -> None:
    types = {"HEADS": kind.heads, "ELEMENT": kind.dtype, "KV_ELEMENT": kind.pool}
    for kernel in verify_attention_kernels(kind.variant, **types):
        assert not limited_to(kernel.source.text)
        assert (kernel.declared_shared() or 0) <= max_shared_bytes("sm_120")


def judged_on_the_host(case: Any) -> None:
    """Capture a case's first batch in the likeness of a graph, and replay it on all of them."""
    pairs = [batch for _, batch in case.batches()]
    step = case.step(pairs[0], "numpy")
    graph = HostGraph()
    with graph.capture():
        step()
    for batch in (*pairs, pairs[0]):
        step.refill(batch)
        step.poison()
        graph.replay()
        for name, right in step.expected().items():
            assert compare(name, host_array(step.outputs[name]), right) is None, batch


def validated(case: Any) -> None:
    report = validate(case, examples=len(_LENGTHS))
    assert report.ok, report.to_text()
    assert {line.status for line in report.coverage if line.subject == "capture"} == {"inspected"}


@each_kind_on_the_host
def test_its_likeness_of_a_graph_replays_on_other_batches(kind: Kind) -> None:
    judged_on_the_host(OneKind(kind))


@gpu
@each_kind
def test_the_validator_passes_it(kind: Kind) -> None:
    skip_where_it_cannot_run(kind.variant)
    validated(OneKind(kind))


def played(kind: Kind, family: Family, graphs: Any, shape: Shape) -> None:
    """Play SGLang's runner with a backend that takes this text."""
    taken: list[VariantName] = []

    class Taking(VerifyBackend):
        variant = kind.variant

        def __init__(self, model_runner: Any) -> None:
            super().__init__(model_runner)
            taken.append(self.text)

    seen = play_contract(Taking, family, graphs, shape)
    assert judge(seen) == []
    assert {*taken} == {kind.variant}
    assert len(seen.plays) == len(schedule(shape.captured))
    assert all(play.must_change > 0 for play in seen.plays)


@each_kind_on_the_host
def test_it_keeps_sglangs_contract_on_the_host_lane(kind: Kind) -> None:
    family = FAMILIES[kind.heads // 8 % 2]
    shape = Shape((1, 2), 5, 24, heads=kind.heads, latent=64, rope=16, pool=kind.pool)
    played(kind, family, HostGraphs(), shape)


@gpu
@pytest.mark.parametrize("family", FAMILIES)
@each_kind
def test_it_keeps_sglangs_contract_in_cuda_graphs(kind: Kind, family: Family) -> None:
    skip_where_it_cannot_run(kind.variant)
    played(kind, family, CudaGraphs(), Shape((1, 3), heads=kind.heads, pool=kind.pool))


# --- separate keys and values --------------------------------------------------------------------


@dataclass(frozen=True)
class GqaKind:
    """A row tile, and the `-D` values of the text for it."""

    rows: int
    group: int
    trees: tuple[int, ...]
    values: Mapping[str, int]

    def __str__(self) -> str:
        return f"{self.rows} rows, " + ", ".join(f"{n}={v}" for n, v in self.values.items())


_OF_ROWS = {16: (4, (4, 1, 3)), 32: (8, (4, 1, 3)), 64: (5, (9, 3, 17))}

GQA_KINDS = [
    GqaKind(rows, *_OF_ROWS[rows], values[rows]) for rows in ROW_TILES for values in ALL_VALUES
]

each_gqa_kind = pytest.mark.parametrize("kind", GQA_KINDS, ids=str)


class OneGqaKind:
    """A check case of three batches that share buffers, the last one a drafter's block."""

    def __init__(self, kind: GqaKind) -> None:
        self.kind, self.name = kind, f"verify_gqa, {kind}"

    def kernels(self) -> Sequence[Kernel]:
        return verify_gqa_kernels(GROUP=self.kind.group, ROWS=self.kind.rows, **self.kind.values)

    def batches(self) -> Iterator[tuple[str, SizedGqaBatch]]:
        latent, rope = KEY_WIDTH
        made = []
        for seed, lengths in enumerate(_LENGTHS):
            base: VerifyBatch = batch_of(
                lengths, self.kind.trees, seed=seed, num_slots=700, heads=8, latent=latent,
                rope=rope, sm_scale=SM_SCALE,
            )  # fmt: skip
            made.append(GqaBatch(base, self.kind.group, 2, "block" if seed == 2 else "tree"))
        size = Capacity.of([batch.base for batch in made])
        for batch in made:
            yield f"{batch.base.layout.seq_lens}, {batch.drafts}", SizedGqaBatch(batch, size)

    def device_batches(self, **draw: int) -> Iterator[tuple[str, SizedGqaBatch]]:
        return self.batches()

    def step(self, batch: SizedGqaBatch, xp: Target) -> VerifyGqaStep:
        step = VerifyGqaStep(
            batch, xp, num_ctas=3 if xp == "numpy" else None, values=self.kind.values
        )
        assert step.attend.rows == self.kind.rows
        return step


def test_each_row_tile_has_its_trees() -> None:
    for kind in GQA_KINDS:
        assert row_tile(kind.group, max(kind.trees)) == kind.rows


@pytest.mark.parametrize("rows", ROW_TILES)
def test_sm_120_gets_values_that_leave_room_for_two_blocks(rows: int) -> None:
    hopper, sm_120 = (228 << 10, 100 << 10)
    assert fitting_values(rows, hopper) == ALL_VALUES[0][rows]
    small = fitting_values(rows, sm_120)
    assert small in [values[rows] for values in ALL_VALUES[1:]]
    partials, _ = verify_gqa_kernels(ROWS=rows, **small)
    assert (partials.declared_shared() or 0) <= max_shared_bytes("sm_120")


@each_gqa_kind
def test_gqas_likeness_of_a_graph_replays_on_other_batches(kind: GqaKind) -> None:
    judged_on_the_host(OneGqaKind(kind))


@gpu
@each_gqa_kind
def test_the_validator_passes_gqa(kind: GqaKind) -> None:
    validated(OneGqaKind(kind))
