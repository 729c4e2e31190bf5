"""Bugs planted in the verify kernels: each barrier, each wait, bounds, masks, cuts. All are caught.

A mutant is the kernel's own text with one piece replaced. It is caught when a checker reports it or
when the results are wrong; the untouched text passes the same steps.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import cuverify
from cuverify import kernels_cu
from cuverify.errors import CheckerError
from cuverify.kernel import Kernel
from cuverify.ops import verify_attention as attention_op
from cuverify.ops import verify_plan as plan_op
from cuverify.sources import KernelSource

sys.path.insert(0, str(Path(__file__).parent))
from attention_steps import FINE, VerifyStep, batch_of

BARRIER = "__syncthreads();"
MEETING = "roles::meet(THREADS);"
RACES = ("race", "uninitialised-read")  # of what another thread has not written yet
# Without one meeting of its own, a role is out of step with the other.
OUT_OF_STEP = (*RACES, "pending-cp-async", "divergent-barrier", "deadlock", "numbers")
STEMS = {"verify_attention": attention_op, "verify_plan": plan_op}


@dataclass(frozen=True)
class Mutant:
    """One planted bug: the text `old`, its `nth` occurrence, becomes `new`.

    `kinds` are the reports that may catch it; "numbers" is a wrong result. `step` names the only
    steps that can.
    """

    name: str
    stem: str
    old: str
    new: str
    kinds: tuple[str, ...]
    nth: int = 0
    step: str | None = None

    def text(self) -> str:
        text = text_of(self.stem)
        parts = text.split(self.old)
        assert len(parts) > self.nth + 1, f"{self.old!r} is not in {self.stem}"
        if self.nth == 0 and self.old not in (BARRIER, MEETING):
            assert len(parts) == 2, f"{self.old!r} is in {self.stem} {len(parts) - 1} times"
        head = self.old.join(parts[: self.nth + 1])
        return head + self.new + self.old.join(parts[self.nth + 1 :])


def text_of(stem: str) -> str:
    if stem in STEMS:
        return KernelSource.from_package(stem).text
    return (Path(kernels_cu.__file__).parent / "include" / stem).read_text()


def each_barrier(
    stem: str, barrier: str = BARRIER, kinds: tuple[str, ...] = RACES
) -> Iterator[Mutant]:
    """Yield mutants without one barrier each."""
    line = 1
    for nth, before in enumerate(text_of(stem).split(barrier)[:-1]):
        line += before.count("\n")
        yield Mutant(f"{stem}: barrier of line {line}", stem, barrier, "", kinds, nth)


CODES = "codes"
ATTENTION = "verify_attention"
PLAN = "verify_plan"
HEADERS = ("combine.cuh", "item.cuh", "scan.cuh")

LOOP_WAIT = (
    "if (!CODES) {\n            ptx::cp_async_wait<AHEAD - 1>();\n        }\n        roles::meet"
)
FIRST_WAIT = "        if (!CODES) {\n            ptx::cp_async_wait<AHEAD - 1>();\n        }\n    }\n    Accumulators"
CODES_WAIT = "ptx::cp_async_wait<CODES ? AHEAD - 2 : 0>();\n                "

PLANTED = [
    Mutant("no wait for a tile", ATTENTION, LOOP_WAIT, "roles::meet", ("pending-cp-async",)),
    Mutant("a wait that leaves one tile too many", ATTENTION, LOOP_WAIT, LOOP_WAIT.replace("AHEAD - 1", "AHEAD"), ("pending-cp-async",)),
    Mutant("a tile is not committed", ATTENTION, "ptx::cp_async_commit();\n        if ((tile", "if ((tile", ("pending-cp-async", "uninitialised-read")),
    Mutant("queries are not waited for", ATTENTION, "ptx::cp_async_wait<0>();", "", ("pending-cp-async",)),
    Mutant("queries of other lanes are not waited for", ATTENTION, "ptx::cp_async_wait<0>();\n    __syncwarp();", "ptx::cp_async_wait<0>();", ("race", "uninitialised-read", "pending-cp-async")),
    Mutant("rows past the end are copied", ATTENTION, "given = position < item.end;", "given = true;", ("numbers", "out-of-bounds")),
    Mutant("rows past the end count", ATTENTION, "bool seen = at < item.end;", "bool seen = true;", ("numbers", "out-of-bounds")),
    Mutant("slots are not judged", ATTENTION, "(slot < 0 || slot >= num_slots)", "false", ("out-of-bounds",)),
    Mutant("the last slot but one", ATTENTION, "slot >= num_slots)", "slot >= num_slots - 1)", ("numbers",)),
    Mutant("the root is always seen", ATTENTION, "seen && node >= 0", "seen && node > 0", ("numbers",)),
    Mutant("the next token's bit", ATTENTION, ">> (node % 64) & 1", ">> ((node + 1) % 64) & 1", ("numbers",)),
    Mutant("only the first word", ATTENTION, "MAX_WORDS + node / 64]", "MAX_WORDS]", ("numbers",)),
    Mutant("the mask of another token", ATTENTION, "handed.masks + band * 2 * MAX_WORDS", "handed.masks + band * MAX_WORDS", ("numbers",)),
    Mutant("a mask from the first tile that is whole", ATTENTION, "if (__builtin_expect(tile >= tiles.whole, 0)) {", "if (tile > tiles.whole) {", ("numbers",)),
    Mutant("the tree is forgotten", "item.cuh", "end == prefix ? prefix + tokens : min(end, prefix)", "end", ("numbers",)),
    Mutant("every piece has the tree", "item.cuh", "end == prefix ? prefix + tokens : min(end, prefix)", "prefix + tokens", ("numbers",)),
    Mutant("drafts from the next slot", ATTENTION, "item.first_token + (position - item.prefix);", "item.first_token + (position - item.prefix) + 1;", ("numbers", "out-of-bounds")),
    Mutant("a prefix of the request before", "item.cuh", "item.first_index = first_index;", "item.first_index = 0;", ("numbers",)),
    Mutant("queries of no token", ATTENTION, "All || row < rows", "true", ("out-of-bounds",)),
    Mutant("queries of a band that has few", ATTENTION, "first_row + 2 * BAND_ROWS <= item.rows", "first_row < item.rows", ("out-of-bounds",)),
    Mutant("outputs of no token", ATTENTION, "min(ROW_TILE, item.rows - first_row)", "ROW_TILE", ("out-of-bounds", "race", "numbers", "uninitialised-read")),
    Mutant("two blocks take all columns", "item.cuh", "number < end && half != 2", "number < end", ("race",)),
    Mutant("no rescaling", ATTENTION, "if (__builtin_expect(of_band[band] != 0, 0)) {", "if (false) {", ("numbers",)),
    Mutant("nothing has grown", ATTENTION, "handed.grown[band] = grown;", "handed.grown[band] = false;", ("numbers",)),
    Mutant("factors of the rows before", ATTENTION, "factors[8] = factor[1];", "factors[8] = factor[0];", ("numbers",)),
    Mutant("a maximum that grows in other lanes", ATTENTION, "__any_sync(ALL, larger)", "larger", ("divergent-collective", "deadlock")),
    Mutant("sums are not rescaled", ATTENTION, "= sum[i] * factor[i]", "= sum[i]", ("numbers",)),
    Mutant("a maximum of half the lanes", ATTENTION, "of_row = fmaxf(of_row, __shfl_xor_sync(ALL, of_row, 2));", "", ("numbers", "race", "lane-skips-collective", "deadlock")),
    Mutant("a sum of its own lane", ATTENTION, " sum[i] += __shfl_xor_sync(ALL, sum[i], distance);", "", ("numbers",)),
    Mutant("a divisor of its own lane", ATTENTION, "rounded_sum[i] += __shfl_xor_sync(ALL, rounded_sum[i], distance);", "", ("numbers",)),
    Mutant("a divisor that is not rescaled", ATTENTION, "rounded_sum[i] * factor[i]", "rounded_sum[i]", ("numbers",)),
    Mutant("probabilities of other rows", ATTENTION, "words[2 * step + 1][0], words[2 * step + 1][1]", "words[2 * step + 1][1], words[2 * step + 1][0]", ("numbers",)),
    Mutant("scores over half of the columns", ATTENTION, "(x[n][0] + __uint_as_float(share.x))", "x[n][0]", ("numbers",)),
    Mutant("scores for the wrong warp", ATTENTION, "handed.shares + (duty.bands[1]", "handed.shares + (duty.bands[0]", ("numbers", "race", "uninitialised-read")),
    Mutant("base 2 is taken for e", ATTENTION, ": sm_scale) * LOG2_E", ": sm_scale)", ("numbers",)),
    Mutant("a sum of exponentials to base 2", ATTENTION, "log_sums[half] * LN_2", "log_sums[half]", ("numbers",)),
    Mutant("the ring turns backwards", ATTENTION, "multiply_half<1>(acc, in_ring(tile - 1)", "multiply_half<1>(acc, in_ring(tile)", ("numbers", "race", "pending-cp-async", "uninitialised-read")),
    Mutant("a tile that is still needed is overwritten", ATTENTION, "fetch(tile + AHEAD, own);", "fetch(tile + AHEAD + 1, own);", ("race", "numbers", "pending-cp-async", "uninitialised-read")),
    Mutant("probabilities of the tile before", ATTENTION, "probabilities + (tile % 2 * KV_STEPS + step)", "probabilities + (step)", ("race",)),
    Mutant("slots of other rows", ATTENTION, "tile % LIST_TILES * ROWS_A_WARP", "0", ("numbers", "pending-cp-async")),
    Mutant("slots are looked up once", ATTENTION, "if ((tile + 1) % LIST_TILES == 0) {", "if (false) {", ("numbers",)),
    Mutant("the ring is too short by a tile", ATTENTION, "fetch(tile + AHEAD, own);", "fetch(tile + AHEAD - 1, own);", ("numbers", "race", "pending-cp-async", "uninitialised-read")),
    Mutant("the first split is not combined", "combine.cuh", "int slot = turn.begin + (warp & (sharing - 1));", "int slot = turn.begin + 1 + (warp & (sharing - 1));", ("numbers",)),
    Mutant("a split too many is combined", "combine.cuh", "slot + k * sharing < turn.end", "slot + k * sharing <= turn.end", ("numbers", "out-of-bounds", "uninitialised-read")),
    Mutant("partials of another row", ATTENTION, "partial_lse[item.slot * static_cast<long long>(ROW_TILE) + row]", "partial_lse[item.slot * static_cast<long long>(ROW_TILE) + (row ^ 1)]", ("numbers",)),
    Mutant("partials are rounded as outputs", ATTENTION, "? columns : combine::rounded(columns)", "? combine::rounded(columns) : combine::rounded(columns)", ("numbers",)),
    Mutant("outputs stay as partials are", ATTENTION, "? columns : combine::rounded(columns)", "? columns : columns", ("numbers",)),
    Mutant("weights of the partials are equal", "combine.cuh", "ptx::exp2_approx(log_weight - max)", "1.0f", ("numbers",)),
    Mutant("codes are not waited for", ATTENTION, CODES_WAIT + "widen(tile + 1, own);", "widen(tile + 1, own);", ("pending-cp-async",), step=CODES),
    Mutant("the first codes are not waited for", ATTENTION, CODES_WAIT + "widen(0, own);", "widen(0, own);", ("pending-cp-async",), step=CODES),
    Mutant("the first tile is not waited for", ATTENTION, FIRST_WAIT, "    }\n    Accumulators", ("pending-cp-async",), step=""),
    Mutant("codes of the tile before", ATTENTION, "widen(tile + 1, own);", "widen(tile, own);", ("numbers", "race", "pending-cp-async", "uninitialised-read"), step=CODES),
    Mutant("codes are not scaled in scores", ATTENTION, "CODES ? sm_scale * kv_scale : sm_scale", "sm_scale", ("numbers",), step=CODES),
    Mutant("codes are not scaled in outputs", ATTENTION, "CODES ? terms.kv_scale : 1.0f", "1.0f", ("numbers",), step=CODES),
    Mutant("a tree's own rows are taken for codes", ATTENTION, "position >= item.prefix && position < item.end && out_cache_loc", "false && out_cache_loc", ("numbers", "uninitialised-read"), step=CODES),
    Mutant("scores of a tree's own rows are taken for codes'", ATTENTION, "x[n][i] *= n * 8 + i % 2 >= exact_from ? unit : 1.0f;", "", ("numbers",), step=CODES),
    Mutant("weights of a tree's own rows are taken for codes'", ATTENTION, "CODES && n * 8 >= exact_from ? unit : 1.0f", "1.0f", ("numbers",), step=CODES),
    Mutant("sums of a tree's own rows are taken for codes'", ATTENTION, "n * 8 >= exact_from ? value : 1.0f", "1.0f", ("numbers",), step=CODES),
    Mutant("a cut that is not at a tile's start", PLAN, "return cut > last_cut", "return cut >= last_cut", ("numbers",)),
    Mutant("slots of two row tiles meet", PLAN, "side * (cuts + 1)", "side * cuts", ("numbers", "race")),
    Mutant("an entry is done by nobody", PLAN, "pieces_before(team) * width + side : 0;", "pieces_before(team) * width + side + width : 0;", ("numbers",)),
    Mutant("an entry is done twice", PLAN, "pieces_before(team + 1) * width : 0;", "pieces_before(team + 1) * width + width : 0;", ("race", "out-of-bounds", "numbers")),
    Mutant("halves are not told apart", PLAN, "blocks == 2 ? cta % 2 + 1 : 0", "false ? 1 : 0", ("race",)),
    Mutant("halves of several teams meet", PLAN, "const int place = cta / blocks;", "const int place = cta - cta % 2;", ("numbers", "race")),
    Mutant("bounds of the prefixes are not sums", PLAN, "all.add(of_warps.shuffled(warps - 1));", "", ("numbers", "status", "out-of-bounds")),
]  # fmt: skip

MUTANTS = [
    *PLANTED,
    *each_barrier(ATTENTION),
    *each_barrier(ATTENTION, MEETING, OUT_OF_STEP),
    *each_barrier(PLAN),
    *(mutant for header in HEADERS for mutant in each_barrier(header)),
]

# By what is special: a step that cannot be planned, codes in the pool, slots outside it.
STEPS: list[tuple[str, Any, dict[str, Any]]] = [
    # several tiles, row tiles, pieces, words; several items and several units a block
    ("", batch_of([150, 40], [17, 17], masks="any", spread=4.0), {"num_ctas": 6, "combine_ctas": 1}),
    ("no plan", batch_of([20, 40], [2, 3], latent=16), {"num_ctas": 2}),
    ("", batch_of([3] * 2 + [33], [70, 1, 9], latent=16, masks="any"), {"num_ctas": 2}),
    # more pieces than verify_combine has warps, and several turns a block
    ("", batch_of([300], [16], latent=16, draft_source="separate", spread=4.0), {"num_ctas": 24, "combine_ctas": 1, "values": {"COMBINE_THREADS": 64, "COMBINE_UNROLL": 2}}),
    # several warps share a unit, and a block has another turn behind that
    ("", batch_of([300], [24], latent=16, spread=4.0), {"num_ctas": 24, "combine_ctas": 2}),
    # more tiles than a warp's lanes hold slots of
    ("", batch_of([300], [2], latent=16), {"num_ctas": 1}),
    # two blocks an entry
    ("", batch_of([60, 20], [9, 9], latent=16), {"num_ctas": 7, "plan_values": {**FINE, "HALVES_ROWS": 4096}}),
    # codes beside rows of the tree's own
    (CODES, batch_of([110], [17], latent=16, draft_source="separate", kv_scale=0.07, masks="any"), {"num_ctas": 2}),
    # more requests than verify_plan has threads
    ("", batch_of([17] * 70, [1] * 70, latent=16), {"num_ctas": 70, "plan_values": {**FINE, "PLAN_THREADS": 64}}),
    ("bad slots", batch_of([40], [9], latent=16), {"num_ctas": 2}),
]  # fmt: skip


def caught_by(
    kernels: dict[str, KernelSource], monkeypatch: pytest.MonkeyPatch, only: str | None = None
) -> set[str]:
    """Run the steps with these texts; return kinds of reports, and "numbers" if one is wrong."""

    def made(stem: str, names: Sequence[str]) -> Any:
        def kernels_of(*_variant: str, **values: int | str) -> tuple[Kernel, ...]:
            source = kernels[stem].with_values(**values)
            return tuple(Kernel(source, name) for name in names)

        return kernels_of

    def planner(**values: int | str) -> Kernel:
        return Kernel(kernels[PLAN].with_values(**values), "verify_plan")

    monkeypatch.setattr(
        attention_op,
        "verify_attention_kernels",
        made(ATTENTION, ("verify_partials", "verify_combine")),
    )
    monkeypatch.setattr(plan_op, "verify_plan_kernel", planner)
    kinds: set[str] = set()
    for spoil, batch, how in STEPS:
        if only is not None and spoil != only:
            continue
        step = VerifyStep(batch, gather=True, **how)
        if spoil == "bad slots":
            step.tensors["req_to_token"][:, 5] = batch.layout.num_slots
        if spoil == "no plan":
            step.tensors["seq_lens"][:] = 400, -1  # too many for kv_indices, and a bad length
        try:
            with cuverify.checked(schedule="random", seed=1, max_accesses=20_000_000):
                step()
        except CheckerError as error:
            kinds |= {report.kind for report in error.reports}
        else:
            if (spoil == "no plan") != bool(step.plan.peek_status().code):
                kinds.add("status")
            if spoil in ("", CODES) and step.wrong():
                kinds.add("numbers")
        if kinds:
            break
    return kinds


def sources(mutant: Mutant | None, folder: Path) -> dict[str, KernelSource]:
    """Return the texts of both kernels, one of them or a header of theirs mutated."""
    if mutant is not None and mutant.stem in HEADERS:
        (folder / mutant.stem).write_text(mutant.text())
    texts = {}
    for stem in STEMS:
        text = mutant.text() if mutant is not None and mutant.stem == stem else text_of(stem)
        texts[stem] = KernelSource.from_text(text, name=f"{stem}.cu", include_dirs=(folder,))
    return texts


def test_the_untouched_text_passes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert caught_by(sources(None, tmp_path), monkeypatch) == set()


@pytest.mark.parametrize("mutant", MUTANTS, ids=[mutant.name for mutant in MUTANTS])
def test_mutants_are_caught(
    mutant: Mutant, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kinds = caught_by(sources(mutant, tmp_path), monkeypatch, mutant.step)
    assert kinds & set(mutant.kinds), f"caught by {kinds or 'nothing'}"
