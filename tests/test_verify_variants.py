"""The texts that attend: which one is chosen, what each takes, and that all of them are right."""

from __future__ import annotations

import itertools
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

import cuverify
from cuverify.cases import Target
from cuverify.check import run_checks
from cuverify.compile import ARCHITECTURES, max_shared_bytes
from cuverify.contract import limited_to
from cuverify.errors import ArgumentError, CheckerError, CompileError, LaunchError
from cuverify.kernel import Kernel
from cuverify.narrow import narrow, widen
from cuverify.ops.verify_attention import verify_attention_kernels
from cuverify.resources import survey
from cuverify.strategies import ELEMENTS, examples, verify_batches
from cuverify.verify_batch import ElementType, VerifyBatch
from cuverify.verify_variants import VARIANTS, VariantName, choose_variant, variant_of

sys.path.insert(0, str(Path(__file__).parent))
from attention_steps import FINE, VerifyStep, batch_of, bf16, dense

gpu = pytest.mark.gpu
HALVES = {**FINE, "HALVES_ROWS": 1 << 20}
REAL = {"latent": 512, "rope": 64}


# --- the rule ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("architecture", "columns", "scale", "variant"),
    [
        ((9, 0), (512, 64), 0.07, "sm90"),
        ((9, 0), (512, 64), -0.07, "portable"),
        ((9, 0), (512, 64), 0.0, "portable"),
        ((9, 0), (512, 128), 0.07, "portable"),
        ((9, 0), (64, 16), 0.07, "portable"),
        ((8, 0), (512, 64), 0.07, "portable"),
        ((10, 0), (512, 64), 0.07, "portable"),
        ((12, 0), (512, 64), 0.07, "portable"),
        (None, (512, 64), 0.07, "portable"),
    ],
)
def test_the_rule(
    architecture: tuple[int, int] | None,
    columns: tuple[int, int],
    scale: float,
    variant: VariantName,
) -> None:
    latent, rope = columns
    assert choose_variant(architecture, latent=latent, rope=rope, sm_scale=scale) == variant
    assert VARIANTS[variant].fits(latent, rope, scale)


def test_every_gpu_has_a_variant_that_compiles_for_it() -> None:
    for arch in ARCHITECTURES:
        number = int(arch.removeprefix("sm_").rstrip("a"))
        variant = variant_of((number // 10, number % 10))
        limits = limited_to(verify_attention_kernels(variant)[0].source.text)
        assert not limits or {arch, f"{arch}a"} & {*limits}


def test_pools_of_codes_take_the_portable_text() -> None:
    how: dict[str, Any] = {"latent": 512, "rope": 64, "sm_scale": 0.07}
    for architecture in ((9, 0), (8, 0), (12, 0), None):
        assert choose_variant(architecture, pool="fp8_e4m3", **how) == "portable"
    assert choose_variant((9, 0), pool="fp16", **how) == "sm90"
    batch = batch_of([20], [9], kv_scale=1.0, **REAL)
    with pytest.raises(ArgumentError, match=r"variant='sm90'.*columns of fp8_e4m3"):
        VerifyStep(batch, variant="sm90")


def test_a_variant_that_does_not_fit_is_refused() -> None:
    for batch, says in (
        (batch_of([20], [9]), r"variant='sm90'.*64 \+ 16 columns"),
        (batch_of([20], [9]), "variant='fast'.*portable, sm90"),
    ):
        with pytest.raises(ArgumentError, match=says):
            VerifyStep(batch, variant=says.split("'")[1])  # type: ignore[arg-type]


# --- a text for one architecture -----------------------------------------------------------------


def test_the_host_lane_refuses_it() -> None:
    with pytest.raises(LaunchError, match="for sm_90a only.*no twins on the host lane"):
        VerifyStep(batch_of([20], [9], **REAL), variant="sm90")


class OnlyKernels:
    """A case that runs nothing."""

    name = "only kernels"

    def kernels(self) -> Sequence[Kernel]:
        return verify_attention_kernels("sm90")

    def batches(self) -> Iterator[tuple[str, Any]]:
        return iter(())

    def device_batches(self) -> Iterator[tuple[str, Any]]:
        return iter(())

    def step(self, batch: Any, xp: Target) -> Any:
        raise AssertionError


def test_a_check_says_what_shared_memory_it_takes() -> None:
    report = run_checks([OnlyKernels()], architectures=["sm_90", "sm_90a"], device="cpu")
    columns = report.tables[0].columns
    taken = {
        (row[columns.index("kernel")], row[columns.index("arch")]): row[
            columns.index("dynamic shared B")
        ]
        for row in report.tables[0].rows
    }
    partials, combine = verify_attention_kernels("sm90")
    assert taken == {(partials.name, "sm_90a"): 214728, (combine.name, "sm_90a"): 139264}
    assert partials.declared_shared() == 214728


def test_other_architectures_are_refused() -> None:
    kernel, _ = verify_attention_kernels("sm90")
    with pytest.raises(ArgumentError, match=r"arch='sm_120'.*for sm_90a"):
        kernel.compile("sm_120")


def test_a_survey_leaves_them_out() -> None:
    report = survey([verify_attention_kernels("sm90")[0].source], ["sm_80", "sm_90a"])
    assert {row[1] for row in report.tables[0].rows} == {"sm_90a"}
    assert report.findings == []


def test_its_header_has_no_host_twin() -> None:
    text = '#define WGMMA_TYPES "bf16.bf16"\n#include "hopper.cuh"\n// @kernel k\n// @param x write int32 [1]\n'
    kernel = cuverify.load_kernel(text + 'extern "C" __global__ void k(int* x) { *x = 1; }\n')
    with pytest.raises(CompileError, match="no twin on the host lane"):
        kernel(1, 1, np.zeros(1, np.int32))


# --- resources -----------------------------------------------------------------------------------


@pytest.mark.parametrize("element", ["bf16", "fp16"])
@pytest.mark.parametrize(("heads", "index"), [(8, "int"), (64, "int"), (128, "long long")])
def test_nothing_spills_and_products_stay_asynchronous(
    heads: int, index: str, element: str
) -> None:
    types = {"ELEMENT": element, "KV_ELEMENT": element}
    kernels = verify_attention_kernels("sm90", HEADS=heads, KV_INDEX=index, **types)
    for kernel in kernels:
        cubin = kernel.compile("sm_90a")
        resources = cubin.resources[kernel.name]
        assert (resources.spill_store_bytes, resources.spill_load_bytes) == (0, 0), resources
        assert resources.stack_bytes == 0, resources
        assert cubin.warnings == ()
        assert "Potential Performance Loss" not in cubin.log
        dynamic = kernel.declared_shared()
        assert dynamic is not None
        assert resources.static_shared_bytes + dynamic <= max_shared_bytes("sm_90a")


# --- the merge of the text for Hopper GPUs, which has nothing of theirs but a wait ----------------


def merge_on_the_host_lane(old: str = "", new: str = "", **values: Any) -> Kernel:
    """Return the merge of the text for sm_90a, without all that the host lane cannot run.

    A text `old`, which stands there once, may become `new`.
    """
    text = verify_attention_kernels("sm90")[1].source.text
    if old:
        assert text.count(old) == 1
        text = text.replace(old, new)
    first = text.index("// A place in the ring")
    second = text.index("namespace {\n\n// What a lane of verify_combine_sm90 has")
    text = f"{text[:first]}}}  // namespace\n\n{text[second:]}"
    wait = "namespace hopper { inline void wait_for_dependency() {} inline void launch_dependents() {} }"
    text = text.replace('#include "hopper.cuh"', wait).replace("// @arch sm_90a\n", "")
    return cuverify.load_kernel(text, kernel="verify_combine_sm90", name="merge.cu", **values)


def in_order_of_accumulators(rows: NDArray[np.int16]) -> NDArray[np.int16]:
    """Put [64, 512] into the order in which the values groups write it, by the text's own words."""
    pieces = np.empty((4096, 8), np.int16)
    for j, half, thread in itertools.product(range(16), range(2), range(128)):
        row = 16 * (thread // 32) + thread % 32 // 4
        column = 256 * half + 16 * j + 2 * (thread % 4)
        pairs = [(row, column), (row + 8, column), (row, column + 8), (row + 8, column + 8)]
        pieces[(2 * j + half) * 128 + thread] = np.concatenate(
            [rows[r, c : c + 2] for r, c in pairs]
        )
    return pieces.reshape(64, 512)


@pytest.mark.parametrize(
    ("splits", "tokens", "blocks"),
    [
        ([2], [8], 1),
        ([5, 6, 11, 21, 41, 2], [8, 3, 8, 1, 7, 8], 7),
        ([90, 3], [8, 5], 3),
        ([2] * 33 + [7], [8] * 34, 50),
        ([4], [8], 16),
        ([13, 2], [3, 8], 64),
        ([19], [8], 64),
        ([49], [1], 128),
        ([3, 20, 2, 6, 16, 4, 15, 8] * 5, [8, 3, 5, 1, 8, 7, 2, 8] * 5, 9),
        ([2, 3, 7, 4, 5], [8, 5, 8, 3, 1], 17),
        ([14, 15, 16], [17], 10),
        ([2, 3, 3, 2, 3] * 7, [33] * 7, 11),
    ],
    ids=[
        "two",
        "several turns a block",
        "more than are in flight",
        "more row tiles than lanes",
        "two share",
        "four share and one alone",
        "eight share",
        "sixteen share",
        "several units a warp or none, by splits",
        "as many units a warp as it takes",
        "a last row tile of few rows",
        "more row tiles than lanes, some of few rows",
    ],
)
def test_merging_partials(splits: list[int], tokens: list[int], blocks: int) -> None:
    assert_merged(merge_on_the_host_lane(), splits, tokens, blocks)


@pytest.mark.parametrize(
    "values",
    [
        {"COMBINE_THREADS": 256, "COMBINE_UNROLL": 12},
        {"COMBINE_THREADS": 256, "COMBINE_UNROLL": 18},
        {"COMBINE_UNROLL": 9},
        {"PARTIAL": "bf16"},
    ],
)
def test_merging_in_other_forms(values: dict[str, Any]) -> None:
    assert_all_merged(merge_on_the_host_lane(**values), **values)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("unit * step", "unit * 32"),
        ("const float second = upper[k * WEIGHT_ROWS + 8];", "const float second = first;"),
        ("has_lower = to.rows.has(own.row + 8)", "has_lower = true"),
        ("__syncwarp();  // both lanes have compared", ""),
        ("__syncwarp();  // all factors are there", ""),
        ("__syncwarp();  // the splits before have been added", ""),
        ("own.column < 8 && lane", "own.column < 0 && lane"),
        ("unit * column_step", "unit * 8"),
        ("const int part = unit & ((1 << log_parts) - 1);", "const int part = unit % 4;"),
        ("COMBINE_WARPS * 4 * 32 >> log_parts", "COMBINE_WARPS * 32"),
        ("COMBINE_WARPS / 2 * 16 >> log_parts", "COMBINE_WARPS / 8 * 16"),
        ("sum += __shfl_xor_sync(ALL, sum, WEIGHT_ROWS);", ""),
        ("__shfl_sync(ALL, inverse, lane / 4 + 8)", "of_upper"),
        ("k = lane / WEIGHT_ROWS; k < own_count; k += 2", "k = 0; k < own_count; ++k"),
        ("weight *= factor;\n#pragma unroll", "\n#pragma unroll"),
        ("weight = fmaf(own, weights[k], weight);", "weight += weights[k];"),
        ("pieces, task / 4 << turn.log_sharers", "pieces, task / 4"),
        ("__syncwarp();  // all of the warp's pieces have been added", ""),
    ],
)
def test_faults_of_the_merge_are_seen(old: str, new: str) -> None:
    kernel = merge_on_the_host_lane(old, new)
    with pytest.raises((AssertionError, CheckerError)):
        assert_all_merged(kernel)


def assert_all_merged(kernel: Kernel, **values: Any) -> None:
    """Merge by several units a warp, by more splits than are in flight, and by warps that share."""
    assert_merged(kernel, [2, 3, 7, 4, 5, 2], [8, 5, 8, 3, 9], 3, **values)
    assert_merged(kernel, [40, 18, 20], [8, 5, 8], 13, **values)
    assert_merged(kernel, [13, 30], [3, 8], 64, **values)
    assert_merged(kernel, [49], [2], 128, **values)


def assert_merged(
    kernel: Kernel, splits: list[int], tokens: list[int], blocks: int, **values: Any
) -> None:
    rng = np.random.default_rng(sum(splits))
    tiles = [(request, tile) for request, own in enumerate(tokens) for tile in range(-(-own // 8))]
    assert len(tiles) == len(splits)
    slots, room = sum(splits), len(splits) + 3
    # of different sizes in a row and from piece to piece
    numbers = rng.standard_normal((slots, 64, 512)) * np.exp2(rng.integers(-4, 9, 512))
    numbers *= np.exp2(rng.integers(-4, 3, (slots, 1, 1)))
    kept = narrow(numbers, values.get("PARTIAL", "fp16"))
    weights = (3 * rng.standard_normal((slots, 64))).astype(np.float32)
    weights[rng.random((slots, 64)) < 0.2] = -np.inf
    weights[: splits[0], 9] = -np.inf  # a row that sees nothing
    weights[slots - 1, 2] = np.nan
    bounds = np.concatenate([[0], np.cumsum(splits)])
    indptr = np.full(room + 1, slots, np.int32)
    indptr[: len(bounds)] = bounds
    qo_indptr = np.concatenate([[0], np.cumsum(tokens)]).astype(np.int32)
    cut = np.full((room, 4), -1, np.int32)
    cut[: len(tiles)] = [(*tile, qo_indptr[tile[0]], tokens[tile[0]]) for tile in tiles]
    out = np.full((sum(tokens), 8, 512), 0x7FFF, np.uint16)
    lse = np.full((sum(tokens), 8), 7.0, np.float32)
    partials = np.stack([in_order_of_accumulators(slot) for slot in kept.view(np.int16)])
    with cuverify.checked(schedule="random", seed=3, max_accesses=100_000_000):
        threads = values.get("COMBINE_THREADS", 512)
        kernel(blocks, threads, partials, weights, indptr, cut, room, out, 8 * 512, lse)
    exact = widen(kept).astype(np.float64)
    for number, (request, row_tile) in enumerate(tiles):
        own = slice(bounds[number], bounds[number + 1])
        with np.errstate(invalid="ignore", divide="ignore"):
            share = np.exp2(weights[own].astype(np.float64))
            total = share.sum(axis=0)
            mean = (share[:, :, None] * exact[own]).sum(axis=0) / total[:, None]
            size = (share[:, :, None] * np.abs(exact[own])).sum(axis=0) / total[:, None]
        mean[total == 0] = 0
        first = qo_indptr[request] * 8 + row_tile * 64
        used = min(qo_indptr[request + 1] * 8 - first, 64)
        rows = slice(first, first + used)
        found = bf16(out.reshape(-1, 512)[rows])
        wrong = np.isnan(mean[:used])
        np.testing.assert_array_equal(np.isnan(found), wrong)
        # half a step of the result, and what float32 and exp2 lose
        allowed = np.exp2(np.frexp(np.nan_to_num(mean))[1] - 9) + 2.0**-16 * np.nan_to_num(size)
        assert (np.abs(found - mean[:used]) <= allowed[:used])[~wrong].all()
        with np.errstate(divide="ignore"):
            right = np.log(total[:used])
        np.testing.assert_allclose(lse.reshape(-1)[rows], right, rtol=1e-5, atol=1e-5)


# --- results -------------------------------------------------------------------------------------


@pytest.fixture(params=["portable", "sm90"])
def variant(request: pytest.FixtureRequest) -> VariantName:
    """Every variant that this GPU can run."""
    import torch

    name: VariantName = request.param
    limits = limited_to(verify_attention_kernels(name)[0].source.text)
    major, minor = torch.cuda.get_device_capability()
    if limits and f"sm_{major}{minor}a" not in limits:
        pytest.skip(f"{name} is for {', '.join(limits)}")
    return name


def assert_right(batch: VerifyBatch, variant: VariantName, **how: Any) -> VerifyStep:
    step = VerifyStep(batch, "torch-cuda", variant=variant, **how)
    step()
    assert step.attention.variant == variant
    assert step.wrong() == [], batch
    return step


@gpu
@pytest.mark.parametrize("plan_values", [FINE, HALVES, None], ids=["fine", "halves", "own"])
def test_real_columns(variant: VariantName, plan_values: dict[str, int] | None) -> None:
    how = {"plan_values": plan_values}
    for tree in (1, 8, 9, 33, 64, 65, 256):
        assert_right(batch_of([300, 37], [tree, 3], **REAL), variant, num_ctas=9, **how)
    for prefix in (0, 1, 47, 48, 49, 63, 95, 96, 97, 144, 145):
        assert_right(batch_of([prefix], [5], **REAL), variant, num_ctas=1, **how)
        assert_right(batch_of([prefix], [70], **REAL), variant, num_ctas=3, **how)
    for heads in (16, 24, 64, 128):
        assert_right(batch_of([130, 5], [3, 9], heads=heads, **REAL), variant, **how)
    for source in ("slots", "separate"):
        batch = batch_of(
            [170, 20], [9, 4], draft_source=source, row_gap=8, index_dtype="int64", **REAL
        )
        assert_right(batch, variant, gather=True, index=np.int64, num_ctas=132, **how)
    padded = batch_of([40, 3], [9, 9, 9, 9], padded=2, masks="trees", **REAL)
    assert_right(padded, variant, num_ctas=2, **how)


@gpu
def test_sharp_rows(variant: VariantName) -> None:
    for scale, spread in ((1e-6, 1.0), (0.5, 2.0), (0.07, 8.0)):
        batch = batch_of([900, 50], [9, 17], sm_scale=scale, spread=spread, **REAL)
        assert_right(batch, variant, num_ctas=5)


OTHER_TYPES: list[tuple[VariantName, int, ElementType, float | None]] = [
    *(("portable", heads, *types) for heads in (8, 64, 128) for types in ELEMENTS[1:]),
    ("sm90", 8, "fp16", None),
]


@gpu
@pytest.mark.parametrize(
    ("variant", "heads", "dtype", "kv_scale"), OTHER_TYPES, indirect=["variant"]
)
def test_other_types_eager_and_captured(
    variant: VariantName, heads: int, dtype: str, kv_scale: float | None
) -> None:
    import torch

    kind: dict[str, Any] = {"heads": heads, "dtype": dtype, "kv_scale": kv_scale, **REAL}
    lens = [[700, 20, 130], [3, 400, 48]] if heads == 8 else [[170, 20, 60], [3, 130, 48]]
    for source in ("slots", "separate"):
        batches = [
            batch_of(some, [9, 4, 17], seed=seed, num_slots=1000, draft_source=source, **kind)
            for seed, some in enumerate(lens)
        ]
        step = VerifyStep(batches[0], "torch-cuda", variant=variant, num_ctas=40, gather=True)
        step()
        assert step.wrong() == []
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step()
        for batch in (*batches, batches[0]):
            step.refill(batch)
            step.poison()
            graph.replay()
            assert step.wrong() == [], batch


@gpu
@pytest.mark.parametrize("slot", [-1, 10**6, -(2**40), 2**62])
def test_slots_outside_the_pool_are_never_read(variant: VariantName, slot: int) -> None:
    batch = batch_of([140, 140], [9, 9], index_dtype="int64", **REAL)
    step = VerifyStep(batch, "torch-cuda", num_ctas=4, variant=variant)
    step.tensors["kv_indices"][145] = slot  # of the second request's prefix
    step.tensors["out_cache_loc"][8] = slot  # the first request's last node
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


@gpu
@pytest.mark.parametrize("plan_values", [FINE, HALVES], ids=["fine", "halves"])
def test_it_repeats_itself_bit_by_bit(variant: VariantName, plan_values: dict[str, int]) -> None:
    batch = batch_of([3000, 500, 0, 70], [17, 17, 17, 17], **REAL)
    step = assert_right(batch, variant, num_ctas=100, plan_values=plan_values)
    first = step.outputs()
    for _ in range(20):
        step.poison()
        step()
        for one, other in zip(first, step.outputs(), strict=True):
            np.testing.assert_array_equal(one, other)


@gpu
@examples(25)  # as for the portable text
@given(
    batch=verify_batches(max_requests=3, max_seq_len=500, max_tree_tokens=70, widths=((512, 64),)),
    num_ctas=st.sampled_from([1, 7, 132]),
    plan_values=st.sampled_from([FINE, HALVES, None]),
)
def test_drawn_batches_on_hopper(
    batch: VerifyBatch, num_ctas: int, plan_values: dict[str, int] | None
) -> None:
    import torch

    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    assert_right(batch, "sm90", num_ctas=num_ctas, plan_values=plan_values)
