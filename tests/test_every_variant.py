"""Every text that attends, through the capture validator and through SGLang's runner.

Parametrised by what the rules choose from: a variant that is added there is tested here.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from cuverify.validators import validate
from cuverify.validators.compare import compare, host_array
from cuverify.validators.host_graph import HostGraph

from cuverify.compile import max_shared_bytes
from cuverify.contract import limited_to
from cuverify.ops.verify_attention import least_values, verify_attention_kernels
from cuverify.ops.verify_gqa import ROW_TILES, row_tile, verify_gqa_kernels
from cuverify.ops.verify_plan import ROW_TILE
from cuverify.sglang.backend import VerifyBackend
from cuverify.sglang.contract import FAMILIES, Family
from cuverify.sglang.gqa_backend import GqaVerifyBackend
from cuverify.sglang.graphs import CudaGraphs, HostGraphs
from cuverify.sglang.judge import judge
from cuverify.sglang.play import play_contract
from cuverify.sglang.schedule import Shape, schedule
from cuverify.sources import KernelSource
from cuverify.verify_variants import GQA_VARIANTS, VARIANTS, Variant, VariantName, variant_of

sys.path.insert(0, str(Path(__file__).parent))
from variant_cases import GQA_KINDS, KINDS, LENGTHS, GqaKind, Kind, OneGqaKind, OneKind

gpu = pytest.mark.gpu


# --- latent rows ---------------------------------------------------------------------------------


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


def skip_where_it_cannot_run(variant: VariantName, texts: Mapping[VariantName, Variant]) -> None:
    import torch

    limits = limited_to(KernelSource.from_package(texts[variant].stem).text)
    major, minor = torch.cuda.get_device_capability()
    if limits and not {f"sm_{major}{minor}", f"sm_{major}{minor}a"} & {*limits}:
        pytest.skip(f"{variant} is for {', '.join(limits)}")


def test_the_list_has_every_text_and_type() -> None:
    pools = {name: {kind.pool for kind in KINDS if kind.variant == name} for name in VARIANTS}
    assert pools["portable"] == {"bf16", "fp16", "fp8_e4m3"}
    assert pools["sm90"] == {"bf16", "fp16"}
    for name in VARIANTS:
        assert {kind.heads for kind in KINDS if kind.variant == name} == {8, 16, 64, 128}


def test_what_sm_120_gets_runs_on_other_gpus_too() -> None:
    name, least = variant_of((12, 0)), least_values(variant_of((12, 0)))
    kinds = [kind for kind in KINDS if kind.variant == name and kind.values == least]
    assert {kind.pool for kind in kinds} == {"bf16", "fp16", "fp8_e4m3"}
    for kind in kinds:
        types = {"HEADS": kind.heads, "ELEMENT": kind.dtype, "KV_ELEMENT": kind.pool}
        for kernel in verify_attention_kernels(name, LATENT=512, ROPE=64, **types, **least):
            shared = kernel.declared_shared()
            assert not limited_to(kernel.source.text)
            assert shared is not None and shared <= max_shared_bytes("sm_120")


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
    report = validate(case, examples=len(LENGTHS))
    assert report.ok, report.to_text()
    assert {line.status for line in report.coverage if line.subject == "capture"} == {"inspected"}


@each_kind_on_the_host
def test_its_likeness_of_a_graph_replays_on_other_batches(kind: Kind) -> None:
    judged_on_the_host(OneKind(kind))


@gpu
@each_kind
def test_the_validator_passes_it(kind: Kind) -> None:
    skip_where_it_cannot_run(kind.variant, VARIANTS)
    validated(OneKind(kind))


def played(kind: Kind, family: Family, graphs: Any, shape: Shape) -> None:
    """Play SGLang's runner with a backend that takes this text."""
    taken: list[VariantName] = []

    class Taking(VerifyBackend):
        variant = kind.variant
        text_values = kind.values

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
    family = FAMILIES[KINDS.index(kind) % 2]
    shape = Shape((1, 2), 5, 24, heads=kind.heads, latent=64, rope=16, pool=kind.pool)
    played(kind, family, HostGraphs(), shape)


@gpu
@each_kind
def test_it_keeps_sglangs_contract_in_cuda_graphs(kind: Kind) -> None:
    skip_where_it_cannot_run(kind.variant, VARIANTS)
    family = FAMILIES[KINDS.index(kind) % 2]
    played(kind, family, CudaGraphs(), Shape((1, 3), heads=kind.heads, pool=kind.pool))


# --- separate keys and values --------------------------------------------------------------------


each_gqa_kind = pytest.mark.parametrize("kind", GQA_KINDS, ids=str)
each_gqa_kind_on_the_host = pytest.mark.parametrize(
    "kind",
    [kind for kind in GQA_KINDS if not limited_to(verify_gqa_kernels(kind.variant)[0].source.text)],
    ids=str,
)


def test_each_row_tile_has_its_trees() -> None:
    for name, sizes in ROW_TILES.items():
        assert {kind.rows for kind in GQA_KINDS if kind.variant == name} == {*sizes}
    for kind in GQA_KINDS:
        assert row_tile(kind.group, max(kind.trees), kind.variant) == kind.rows


@each_gqa_kind_on_the_host
def test_gqas_likeness_of_a_graph_replays_on_other_batches(kind: GqaKind) -> None:
    judged_on_the_host(OneGqaKind(kind))


def played_gqa(kind: GqaKind, family: Family, graphs: Any, shape: Shape) -> None:
    """Play SGLang's runner with a backend that takes these values."""

    class Taking(GqaVerifyBackend):
        variant = kind.variant
        values = dict.fromkeys([kind.rows], kind.values)

        def attend(self, *given: Any, plan: Any, **more: Any) -> None:
            rows.add(ROW_TILE * kind.group // plan.heads)
            super().attend(*given, plan=plan, **more)

    rows: set[int] = set()
    seen = play_contract(Taking, family, graphs, shape)
    assert judge(seen) == []
    assert rows == {kind.rows}
    assert len(seen.plays) == len(schedule(shape.captured))


@each_gqa_kind_on_the_host
def test_gqa_keeps_sglangs_contract_on_the_host_lane(kind: GqaKind) -> None:
    family = FAMILIES[GQA_KINDS.index(kind) % 2]
    shape = Shape((1, 2), max(kind.trees), 24, heads=2 * kind.group, kv_heads=2)
    played_gqa(kind, family, HostGraphs(), shape)


@gpu
@each_gqa_kind
def test_gqa_keeps_sglangs_contract_in_cuda_graphs(kind: GqaKind) -> None:
    skip_where_it_cannot_run(kind.variant, GQA_VARIANTS)
    family = FAMILIES[GQA_KINDS.index(kind) % 2]
    shape = Shape((1, 3), max(kind.trees), heads=2 * kind.group, kv_heads=2)
    played_gqa(kind, family, CudaGraphs(), shape)


@gpu
@each_gqa_kind
def test_the_validator_passes_gqa(kind: GqaKind) -> None:
    skip_where_it_cannot_run(kind.variant, GQA_VARIANTS)
    validated(OneGqaKind(kind))
