"""Bugs planted in the kernels around attention: each barrier, bounds, ties, orders. All are caught.

A mutant is the kernel's own text with one piece replaced; it is caught when a checker reports it or
the results are wrong, and the untouched text passes the same steps. The usual run plants every
sixth bug, a nightly one all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import hypothesis
import numpy as np
import pytest
from cuverify.validators.compare import compare_all, host_array

import cuverify
from cuverify.accept_batch import AcceptBatch
from cuverify.cases.accept import AcceptStep
from cuverify.cases.draft_topk import CASE as TOPK_CASE
from cuverify.cases.draft_topk import DraftTopkStep, LogitsBatch
from cuverify.cases.tree_build import TreeBuildStep
from cuverify.cases.verify_lists import ListsBatch, VerifyListsStep
from cuverify.draft_batch import DraftBatch, ParentsBatch
from cuverify.errors import CheckerError
from cuverify.kernel import Kernel
from cuverify.ops import accept as accept_op
from cuverify.ops import draft_topk as topk_op
from cuverify.ops import tree_build as tree_op
from cuverify.ops import verify_lists as lists_op
from cuverify.sources import KernelSource

TREE, ACCEPT, LISTS, TOPK = "tree_build", "accept", "verify_lists", "draft_topk"
NAMES = {
    TREE: (tree_op, "tree_kernels", tuple(tree_op.tree_kernels())),
    ACCEPT: (accept_op, "accept_kernels", tuple(accept_op.accept_kernels())),
    LISTS: (lists_op, "list_kernels", tuple(lists_op.list_kernels())),
    TOPK: (topk_op, "draft_topk_kernels", tuple(topk_op.draft_topk_kernels())),
}


@dataclass(frozen=True)
class Mutant:
    """One planted bug: the text `old`, its `nth` occurrence, becomes `new`."""

    name: str
    stem: str
    old: str
    new: str
    nth: int = 0

    def text(self) -> str:
        parts = text_of(self.stem).split(self.old)
        assert len(parts) > self.nth + 1, f"{self.old!r} is not in {self.stem}"
        head = self.old.join(parts[: self.nth + 1])
        return head + self.new + self.old.join(parts[self.nth + 1 :])


def text_of(stem: str) -> str:
    return KernelSource.from_package(stem).text


def each_barrier(stem: str) -> Iterator[Mutant]:
    """Yield mutants without one barrier each."""
    for barrier in ("__syncthreads();", "__syncwarp();"):
        line = 1
        for nth, before in enumerate(text_of(stem).split(barrier)[:-1]):
            line += before.count("\n")
            yield Mutant(f"{stem}: {barrier[:-3]} of line {line}", stem, barrier, "", nth)


PLANTED = [
    Mutant("ties go to the lower lane", TREE, "return a.at() < b.at();", "return false;"),
    Mutant("ties go the other way", TREE, "return a.at() < b.at();", "return a.at() > b.at();"),
    Mutant("ties within a lane are not seen", TREE, "equals > 1", "false"),
    Mutant("low words are not compared", TREE, "if (lost[j] == best &&", "if (static_cast<int>(lost[j] >> 32) == lowest &&"),
    Mutant("a first child waits behind its equals", TREE, "precedes(nodes, under, own)", "false"),
    Mutant("a first child is forgotten", TREE, "const bool is_under = winner == owner &&", "const bool is_under = false &&"),
    Mutant("a sibling adds before it subtracts", TREE, "loss + scores[own.at()] - scores[own.at() + 1]", "loss - scores[own.at() + 1] + scores[own.at()]"),
    Mutant("rows of scores do not end", TREE, "level < depth ? level * stride + k : places + level - depth", "places + min(level, 1)"),
    Mutant("a score above 0 counts", TREE, "min(score[i], 0.0f)", "score[i]"),
    Mutant("unused nodes see only themselves", TREE, "at = used ? parent(at) : 0;", "at = used ? parent(at) : -1;"),
    Mutant("words above the node are left", TREE, "for (int w = words - 1; w > node / 64; --w) {", "for (int w = words - 1; w > words; --w) {"),
    Mutant("a parent may be the node itself", TREE, "parent >= node", "parent > node"),
    Mutant("children behind are forgotten", TREE, "first_child[parent];\n", "-1;\n"),
    Mutant("masks of all requests begin together", TREE, "own += max(static_cast<long long>(seq_lens[other]), 0ll);", ""),
    Mutant("links are not judged", ACCEPT, "link < 0 || link >= n ? FAULTY", "link < 0 ? FAULTY"),
    Mutant("the last brother wins", ACCEPT, "while (found >= 0 && tokens[found] != wanted) {", "while (found >= 0 && (tokens[found] != wanted || sibling[found] >= 0)) {"),
    Mutant("the path is one too long", ACCEPT, "all.length < path ? found : NONE", "all.length <= path ? found : NONE"),
    Mutant("a repeated token counts twice", ACCEPT, "exact += again ? 0.0f : p;", "exact += p;"),
    Mutant("what was rejected may be drawn", ACCEPT, "rejected[r] == first + i * step ? 0.0f : weights[i]", "weights[i]"),
    Mutant("the boundary belongs to the token in front", ACCEPT, "weights[i] > 0 && at > wanted", "weights[i] > 0 && at >= wanted"),
    Mutant("NaN is the largest logit", ACCEPT, "value > minus_infinity() ?", "!(value <= minus_infinity()) ?"),
    Mutant("the last of equal words", ACCEPT, "for (int i = 3; i >= 0; --i) {", "for (int i = 0; i < 4; ++i) {"),
    Mutant("a NaN is among the best", TOPK, "place < end && values[i] == values[i];", "place < end;"),
    Mutant("what is behind a piece counts", TOPK, "values[i] = place < end ? logit(row[place]) : minus_infinity();", "values[i] = place < vocab ? logit(row[place]) : minus_infinity();"),
    Mutant("an earlier tile is forgotten", TOPK, "first > begin && thread < k ? board.best[thread] : 0;", "0;"),
    Mutant("sums keep an earlier largest", TOPK, "sum *= weight(largest, now);", ""),
    Mutant("what is taken is taken again", TOPK, "keys[i] == winner ? 0 : keys[i];", "keys[i];"),
    Mutant("sums of pieces are not scaled", TOPK, " * weight(sums[2 * piece], largest);", ";"),
    Mutant("drafts stand one too early", LISTS, "static_cast<long long>(kv_indptr[b]) - n);", "static_cast<long long>(kv_indptr[b]) - n - 1);"),
    Mutant("a mask's part is not judged", LISTS, "first + size <= mask_bytes &&", "true &&"),
    Mutant("padding bits are seen", LISTS, "if (inside && column < n) {", "if (inside && column < 8 * columns) {"),
    Mutant("32-bit bounds of masks", LISTS, "mask_indptr[b + 1] = n * (end + nodes);", "mask_indptr[b + 1] = static_cast<int>(n * (end + nodes));"),
]  # fmt: skip

MUTANTS = [*PLANTED, *(mutant for stem in NAMES for mutant in each_barrier(stem))]


def tree_steps() -> Iterator[Any]:
    rng = np.random.default_rng(0)
    # all of one variant of the kernel, so that a mutant is compiled once or twice
    for kind, depth, k, n, mode in (
        ("ties", 7, 8, 65, "full"), ("spoiled", 3, 5, 40, "query_only"), ("flat", 4, 3, 50, "full"),
        ("sure", 6, 4, 65, "full"), ("peaked", 2, 2, 34, "query_only"),
        ("sure", 9, 2, 64, "query_only"), ("ties", 15, 2, 65, "query_only"),
    ):  # fmt: skip
        drafts = DraftBatch.draw(
            rng, batch=8, depth=depth, k=k, num_tokens=n, kind=kind, longest=30
        )
        drafts.logprobs[0, 0, 0] = 3.0
        yield TreeBuildStep(drafts, "numpy", mode=mode)
    # candidates in shared memory
    for kind, depth, k, n in (("ties", 5, 9, 290), ("flat", 5, 4, 260), ("sure", 6, 6, 258)):
        drafts = DraftBatch.draw(
            np.random.default_rng(n), batch=2, depth=depth, k=k, num_tokens=n, kind=kind, longest=3
        )
        yield TreeBuildStep(drafts, "numpy")
    # two in one lane are the only ones that are equal: about one tree in 50
    drafts = DraftBatch.draw(
        np.random.default_rng(0), batch=120, depth=15, k=2, num_tokens=65, kind="ties", longest=1
    )
    yield TreeBuildStep(drafts, "numpy")
    for faulty in (0.0, 0.8):
        trees = ParentsBatch.draw(rng, batch=6, num_tokens=130, faulty=faulty, sized=faulty > 0)
        if faulty:
            trees.parents[0, 5] = 5
        yield TreeBuildStep(trees, "numpy")


def accept_steps() -> Iterator[Any]:
    rng = np.random.default_rng(1)
    for rule in ("greedy", "plain", "published"):
        for faulty, spoiled, vocabulary in ((0.0, 0.0, 6), (0.8, 0.1, 300), (0.0, 0.3, 3)):
            batch = AcceptBatch.draw(
                rng, rule=rule, batch=5, num_tokens=33, vocabulary=vocabulary, faulty=faulty,
                spoiled=spoiled,
            )  # fmt: skip
            yield AcceptStep(batch, "numpy")
    # rejected tokens of several segments
    wide = AcceptBatch.draw(rng, rule="plain", batch=5, num_tokens=33, vocabulary=900)
    wide.uniform[:] = 0.999
    yield AcceptStep(wide, "numpy")
    # siblings with one token; rows without mass; a coin on a boundary
    how: dict[str, Any] = {"rule": "plain", "batch": 4}
    twins = AcceptBatch.draw(rng, num_tokens=4, vocabulary=4, **how)
    twins.candidates[:] = [3, 0, 0, 1]
    twins.next_token[:] = [1, -1, -1, -1]
    twins.next_sibling[:] = [-1, 2, 3, -1]
    twins.scores[:] = 0.25
    twins.uniform[:] = 0.6
    yield AcceptStep(replace(twins, max_path=3), "numpy")
    empty = AcceptBatch.draw(rng, num_tokens=3, vocabulary=300, spoiled=1.0, **how)
    yield AcceptStep(empty, "numpy")
    quarters = AcceptBatch.draw(rng, num_tokens=1, vocabulary=4, **how)
    quarters.scores[:] = 0.25
    quarters.uniform_final[:] = 0.5
    yield AcceptStep(quarters, "numpy")


def topk_steps() -> Iterator[Any]:
    rng = np.random.default_rng(3)
    small = {"TOPK_THREADS": 64, "TOPK_EACH": 2}
    for kind, k, pieces in (
        ("free", 16, 2), ("ties", 3, 1), ("spoiled", 64, 3), ("masked", 5, 1), ("flat", 7, 4),
    ):  # fmt: skip
        batch = LogitsBatch.draw(rng, (2, 3, 700), k, kind=kind, bf16=k % 2 == 0)
        yield DraftTopkStep(batch, "numpy", pieces=pieces, values=small)


def lists_steps() -> Iterator[Any]:
    rng = np.random.default_rng(2)
    for mode, n in (("full", 9), ("query_only", 65), ("bit_packed", 3)):
        batch = ListsBatch.draw(
            rng, batch=300, num_tokens=n, longest=9, mode=mode, drafts="given", graph=True
        )
        yield VerifyListsStep(batch, "numpy")
        yield VerifyListsStep(batch.spoiled(rng), "numpy")
        short = replace(batch, mask=batch.mask[: len(batch.mask) // 2].copy())
        yield VerifyListsStep(short, "numpy")


STEPS: dict[str, Callable[[], Iterator[Any]]] = {
    TREE: tree_steps,
    ACCEPT: accept_steps,
    LISTS: lists_steps,
    TOPK: topk_steps,
}


def caught(stem: str, text: str, monkeypatch: pytest.MonkeyPatch) -> str | None:
    """Run a stem's steps with this text; return what is wrong, None where nothing is."""
    module, function, names = NAMES[stem]
    source = KernelSource.from_text(text, name=f"{stem}.cu")

    def kernels(**values: int | str) -> dict[str, Kernel]:
        return {name: Kernel(source.with_values(**values), name) for name in names}

    monkeypatch.setattr(module, function, kernels)
    for step in STEPS[stem]():
        step.poison()
        try:
            with cuverify.checked(schedule="random", seed=1, max_accesses=20_000_000):
                step()
        except CheckerError as error:
            return error.reports[0].kind
        outputs = {name: host_array(tensor) for name, tensor in step.outputs.items()}
        tolerances = TOPK_CASE.tolerances if stem == TOPK else None
        wrong = compare_all(outputs, step.expected(), tolerances)
        if wrong:
            return str(wrong[0])
    if stem == LISTS:
        made = [np.zeros(301, kind) for kind in (np.int32, np.int64, np.int64)]
        status = np.zeros(4, np.int32)
        lists_op.VerifyLists(
            np.full(300, 200_000), num_tokens=64, kv_indptr=made[0], qo_indptr=made[1],
            mask_indptr=made[2], status=status,
        )()  # fmt: skip
        if made[2][-1] != 300 * 64 * 200_064:
            return "bounds of a large mask"
    return None


@pytest.mark.parametrize("stem", STEPS)
def test_the_untouched_text_passes(stem: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert caught(stem, text_of(stem), monkeypatch) is None


def planted() -> list[Mutant]:
    everything = hypothesis.settings.default.max_examples >= 2000  # type: ignore[union-attr]
    return MUTANTS if everything else MUTANTS[::6]


@pytest.mark.parametrize("mutant", planted(), ids=lambda mutant: mutant.name)
def test_mutants_are_caught(mutant: Mutant, monkeypatch: pytest.MonkeyPatch) -> None:
    assert caught(mutant.stem, mutant.text(), monkeypatch) is not None
