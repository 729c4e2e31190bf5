"""Trees against hand-made cases, an exhaustive search and recorded ones; the kernels, in both lanes."""

from __future__ import annotations

import doctest
import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

import cuverify
from cuverify.buffers import read
from cuverify.cases import Target
from cuverify.cases.tree_build import TreeBuildStep
from cuverify.datasets import find_data
from cuverify.draft_batch import DRAFT_KINDS, DraftBatch, ParentsBatch
from cuverify.errors import ArgumentError
from cuverify.ops.tree_build import (
    EagleParents,
    TreeBuffers,
    TreeBuild,
    TreeCode,
    TreeLinks,
    TreeMask,
    VisibleParents,
    tree_buffers,
    tree_kernels,
)
from cuverify.reference import tree_build
from cuverify.reference.draft_topk import draft_topk
from cuverify.reference.tree_build import BestFirstTree, best_first_tree
from cuverify.strategies import draft_batches, examples
from cuverify.tree import DraftTree, MaskMode

Path = tuple[int, ...]
INF = math.inf

Schedule = Literal["ascending", "descending", "random"]
gpu = pytest.mark.gpu
both_lanes = pytest.mark.parametrize("xp", ["numpy", pytest.param("torch-cuda", marks=gpu)])
MODES: tuple[MaskMode, ...] = ("full", "query_only", "bit_packed")


def paths_of(tree: BestFirstTree) -> list[Path]:
    """Return the ranks from the root down to each node but the root, in the tree's order."""
    paths: list[Path] = [()]
    for parent, rank in zip(tree.parents[1:].tolist(), tree.ranks[1:].tolist(), strict=True):
        paths.append((*paths[parent], rank))
    return paths[1:]


def likeliest(logprobs: Any, budget: int) -> list[Path]:
    """Return the likeliest prefixes out of all there are, by mass and then by ranks."""
    table = np.asarray(logprobs, np.float64)
    depth, k = table.shape
    masses = {
        path: sum(table[at, rank] for at, rank in enumerate(path))
        for length in range(1, depth + 1)
        for path in itertools.product(range(k), repeat=length)
    }
    possible = [path for path in masses if masses[path] > -INF]
    return sorted(possible, key=lambda path: (-masses[path], path))[:budget]


def numbered(depth: int, k: int) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Return tokens that tell depth and rank: 10 * depth + rank."""
    return np.arange(depth)[:, None] * 10 + np.arange(k)


def build(logprobs: Any, budget: int) -> BestFirstTree:
    table = np.asarray(logprobs, np.float32)
    return best_first_tree(table, numbered(*table.shape), budget)


def check_views(tree: BestFirstTree, table: Any) -> None:
    """Check that all parts of a tree tell the same story."""
    paths = paths_of(tree)
    assert tree.parents[0] == -1 and tree.ranks[0] == -1 and tree.mass[0] == tree.depths[0] == 0
    assert len(set(paths)) == len(paths)
    assert tree.depths[1:].tolist() == [len(path) for path in paths]
    assert tree.tokens[1:].tolist() == [10 * (len(path) - 1) + path[-1] for path in paths]
    summed = [math.fsum(float(table[at][r]) for at, r in enumerate(path)) for path in paths]
    np.testing.assert_allclose(tree.mass[1:], summed, rtol=1e-12, atol=1e-9)
    assert (np.diff(tree.mass) <= 0).all()
    assert DraftTree.from_parents(tree.parents).depths.tolist() == tree.depths.tolist()


# By hand


def test_ties_go_by_the_ranks_of_the_path() -> None:
    # Everything is as likely as everything else. Other programs take (1, 0) before (0, 1).
    tree = build(np.zeros((2, 2)), 5)
    assert paths_of(tree) == [(0,), (0, 0), (0, 1), (1,), (1, 0)]
    assert tree.parents.tolist() == [-1, 0, 1, 1, 0, 4]
    assert tree.tokens.tolist() == [0, 0, 10, 11, 1, 10]


def test_ties_within_a_depth_go_by_rank_alone() -> None:
    # Two equal halves a depth: mass tells depths apart, ranks the nodes of one.
    half = np.full((2, 2), math.log(0.5))
    assert paths_of(build(half, 5)) == [(0,), (1,), (0, 0), (0, 1), (1, 0)]


@pytest.mark.parametrize(
    ("logprobs", "budget", "paths"),
    [
        # a sure drafter: a chain
        ([[0.0, -9.0], [0.0, -9.0], [0.0, -9.0]], 3, [(0,), (0, 0), (0, 0, 0)]),
        # a drafter that knows nothing: a star
        ([[-1.0, -1.25, -1.5], [-5.0, -5.0, -5.0]], 3, [(0,), (1,), (2,)]),
        # 0.7 0.2 | 0.6 0.3: 0.7, 0.42, 0.21, 0.2, 0.12
        (np.log([[0.7, 0.2], [0.6, 0.3]]), 5, [(0,), (0, 0), (0, 1), (1,), (1, 0)]),
        # 0.6 0.4 | 0.5 0.5: 0.6, 0.4, 0.3, 0.3, 0.2
        (np.log([[0.6, 0.4], [0.5, 0.5]]), 5, [(0,), (1,), (0, 0), (0, 1), (1, 0)]),
        # fewer prefixes than the budget
        ([[-1.0], [-2.0]], 100, [(0,), (0, 0)]),
        ([[-0.5, -1.0]], 2, [(0,), (1,)]),
        # no budget, no depth, no tokens
        ([[-1.0]], 0, []),
        (np.zeros((0, 4)), 7, []),
        (np.zeros((4, 0)), 7, []),
        # tokens that cannot come
        ([[-1.0, -INF, -INF], [-1.0, -2.0, -INF]], 9, [(0,), (0, 0), (0, 1)]),
        ([[-1.0], [-INF], [-1.0]], 9, [(0,)]),
        ([[-INF, -INF]], 9, []),
    ],
)
def test_small_trees(logprobs: Any, budget: int, paths: list[Path]) -> None:
    tree = build(logprobs, budget)
    assert paths_of(tree) == paths
    check_views(tree, np.asarray(logprobs, np.float32))


def test_the_root_has_its_token() -> None:
    tree = best_first_tree([[-1.0]], [[4]], 1, root_token=9)
    assert tree.tokens.tolist() == [9, 4]
    kinds = (tree.parents, tree.tokens, tree.ranks, tree.depths, tree.mass)
    assert [part.dtype for part in kinds] == [np.int32, np.int64, np.int32, np.int32, np.float64]


# Against an exhaustive search


@st.composite
def eighths(draw: st.DrawFn) -> list[list[float]]:
    """Draw log-probabilities whose sums are exact, so that ties are ties."""
    k = draw(st.integers(1, 4))
    steps = st.lists(st.integers(0, 12), min_size=k, max_size=k)
    rows = draw(st.lists(steps, min_size=1, max_size=4))
    return [sorted((-step / 8 for step in row), reverse=True) for row in rows]


@given(eighths(), st.integers(0, 400))
@example([[0.0, 0.0], [0.0, 0.0]], 5)
@example([[0.0] * 4] * 4, 100)
def test_exact_sums_give_the_order_of_an_exhaustive_search(
    logprobs: list[list[float]], budget: int
) -> None:
    tree = build(logprobs, budget)
    assert paths_of(tree) == likeliest(logprobs, budget)
    check_views(tree, logprobs)


@given(st.integers(1, 4), st.integers(1, 5), st.integers(0, 800), st.integers(0, 2**32 - 1))
def test_rounded_sums_give_the_masses_of_an_exhaustive_search(
    depth: int, k: int, budget: int, seed: int
) -> None:
    rng = np.random.default_rng(seed)
    logits = rng.normal(0, rng.choice([0.5, 2.0, 8.0]), (depth, 16))
    logprobs, tokens = draft_topk(logits, k)
    tree = best_first_tree(logprobs, tokens, budget)
    best = likeliest(logprobs, budget)
    masses = [sum(float(logprobs[at, r]) for at, r in enumerate(path)) for path in best]
    np.testing.assert_allclose(tree.mass[1:], masses, rtol=1e-12, atol=1e-12)
    # Masses that differ by more than rounding are in the same order.
    if not masses or (np.diff(masses) < -1e-9).all():
        assert paths_of(tree) == best
    for node, path in enumerate(paths_of(tree), 1):
        assert tree.tokens[node] == tokens[len(path) - 1, path[-1]]


@given(eighths(), st.integers(0, 60))
def test_a_larger_budget_only_adds(logprobs: list[list[float]], budget: int) -> None:
    smaller, larger = build(logprobs, budget), build(logprobs, budget + 3)
    count = len(smaller.parents)
    np.testing.assert_array_equal(smaller.parents, larger.parents[:count])
    np.testing.assert_array_equal(smaller.mass, larger.mass[:count])


# Against recorded trees of the published program


def test_recorded_trees() -> None:
    listing, arrays = (find_data("golden", f"ddtree_trees.{kind}") for kind in ("json", "npz"))
    if listing is None or arrays is None:
        pytest.skip("the recorded trees are not at hand")
    cases = json.loads(listing.read_text(encoding="utf-8"))["cases"]
    assert len(cases) > 50
    with np.load(arrays) as held:
        for case in cases:

            def part(name: str, number: int = case["case"]) -> Any:
                return held[f"c{number}_{name}"]

            tree = best_first_tree(part("logprob"), part("token"), case["budget"])
            assert len(tree.parents) == case["nodes"], case
            np.testing.assert_array_equal(tree.parents, part("out_parent"), str(case))
            np.testing.assert_array_equal(tree.tokens[1:], part("out_token"), str(case))
            np.testing.assert_array_equal(tree.depths[1:], part("out_depth"), str(case))
            seen = np.unpackbits(part("out_visibility"), axis=1)[:, : case["nodes"]]
            draft = DraftTree.from_parents(tree.parents, tree.tokens)
            np.testing.assert_array_equal(draft.mask(), seen != 0, str(case))


# What makes no sense


@pytest.mark.parametrize(
    ("logprobs", "tokens", "budget", "said"),
    [
        ([-1.0], [1], 1, "logprobs=.*must be a table"),
        ([[-1.0, -2.0]], [[1]], 1, r"tokens=.*must have the shape of logprobs, \[1, 2\]"),
        ([[-1.0]], [[1.0]], 1, "tokens='float64': must hold integers"),
        ([[-1.0, math.nan]], [[1, 2]], 1, "row 0 holds a NaN or .inf"),
        ([[-1.0, -2.0], [-2.0, -1.0]], [[1, 2], [1, 2]], 1, "row 1 is not descending"),
        ([[-1.0, -2.0]], [[3, 3]], 1, "tokens=.*row 0 holds a token twice"),
        ([[-1.0]], [[1]], -1, "budget=-1: the number of nodes cannot be negative"),
    ],
)
def test_trees_that_cannot_be_built(logprobs: Any, tokens: Any, budget: int, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        best_first_tree(logprobs, tokens, budget)


def test_examples_in_docstrings() -> None:
    found = doctest.testmod(tree_build)
    assert found.attempted > 0 and found.failed == 0


# The kernels against the reference


def to(xp: Target, array: Any) -> Any:
    if xp == "numpy":
        return np.ascontiguousarray(array)
    import torch

    return torch.from_numpy(np.ascontiguousarray(array)).cuda()


def assert_right(step: TreeBuildStep, note: str = "") -> None:
    step.poison()
    step()
    for name, wanted in step.expected().items():
        found = read(step.outputs[name])
        if wanted.dtype == np.uint64:
            found = found.view(np.uint64)
        np.testing.assert_array_equal(found, wanted, err_msg=f"{name} {note}")


def check_drafts(
    seed: int, shape: tuple[int, int, int], xp: Target, *, batch: int, mode: MaskMode
) -> None:
    """Build trees of every kind of drafts."""
    depth, k, n = shape
    rng = np.random.default_rng(seed)
    for number, kind in enumerate(DRAFT_KINDS):
        index = ("int64", "int32")[number % 2]
        drafts = DraftBatch.draw(
            rng, batch=batch, depth=depth, k=k, num_tokens=n, kind=kind, index=index, longest=50
        )
        step = TreeBuildStep(drafts, xp, mode=mode, fill_prefix=number % 3 == 0, longest=40)
        assert_right(step, f"{kind} {shape}, seed {seed}")


shapes = st.tuples(
    st.sampled_from([1, 2, 3, 7, 15, 32]),
    st.sampled_from([1, 2, 3, 5, 16, 64]),
    st.sampled_from([1, 2, 3, 8, 9, 16, 17, 31, 32, 33, 63, 64, 65, 96, 97]),
)


# 35 x 6 kinds x 5 requests: more than 1,000 trees
@examples(35)
@given(seed=st.integers(0, 2**32 - 1), shape=shapes, mode=st.sampled_from(MODES))
@example(seed=0, shape=(15, 4, 288), mode="full")
@example(seed=0, shape=(32, 64, 289), mode="query_only")
@example(seed=0, shape=(3, 64, 1024), mode="query_only")
def test_drawn_trees(seed: int, shape: tuple[int, int, int], mode: MaskMode) -> None:
    if mode == "bit_packed" and shape[2] > 32:
        mode = "query_only"
    check_drafts(seed, shape, "numpy", batch=5, mode=mode)


@examples(6)
@given(
    seed=st.integers(0, 2**32 - 1),
    shape=shapes,
    schedule=st.sampled_from(["ascending", "descending", "random"]),
)
@example(seed=1, shape=(2, 2, 8), schedule="random")
@example(seed=1, shape=(15, 4, 130), schedule="descending")
def test_drawn_trees_under_the_checkers(
    seed: int, shape: tuple[int, int, int], schedule: Schedule
) -> None:
    with cuverify.checked(schedule=schedule, seed=seed):
        check_drafts(seed, shape, "numpy", batch=2, mode=MODES[seed % 2])


@examples(30)
@given(draft_batches(max_tokens=130))
def test_the_strategy_of_drafts(drafts: DraftBatch) -> None:
    assert_right(TreeBuildStep(drafts, "numpy"), repr(drafts))


@gpu
@pytest.mark.parametrize(
    "shape", [(1, 1, 2), (7, 8, 33), (15, 16, 65), (3, 64, 129), (32, 64, 1024)]
)
def test_trees_on_a_gpu(shape: tuple[int, int, int]) -> None:
    check_drafts(7, shape, "torch-cuda", batch=40, mode="full")


@gpu
@pytest.mark.parametrize("number", range(20))
def test_a_hundred_thousand_trees_on_a_gpu(number: int) -> None:
    # in twenty parts: the reference takes a processor minutes, and parts share several
    kind = ("free", "ties", "holes", "peaked")[number % 4]
    depth, k, n = ((4, 4, 17), (7, 8, 24), (3, 2, 12), (15, 3, 17))[number // 4 % 4]
    drafts = DraftBatch.draw(
        np.random.default_rng([11, number]),
        batch=5000,
        depth=depth,
        k=k,
        num_tokens=n,
        kind=kind,
        longest=50,
    )
    assert_right(TreeBuildStep(drafts, "torch-cuda"), f"{kind}, {number}")


@examples(30)
@given(
    seed=st.integers(0, 2**32 - 1),
    n=st.sampled_from([1, 2, 3, 8, 17, 32, 33, 64, 65, 130]),
    sized=st.booleans(),
    checked=st.sampled_from([False, False, True]),
)
@example(seed=0, n=1024, sized=False, checked=False)
def test_drawn_parents(seed: int, n: int, sized: bool, checked: bool) -> None:
    rng = np.random.default_rng(seed)
    batch = 2 if checked else 8
    for faulty in (0.0, 0.7):
        trees = ParentsBatch.draw(
            rng, batch=batch, num_tokens=n, faulty=faulty, sized=sized, longest=50
        )
        if checked:
            with cuverify.checked(schedule="random", seed=seed):
                assert_right(TreeBuildStep(trees, "numpy"), f"seed {seed}")
        else:
            assert_right(TreeBuildStep(trees, "numpy"), f"seed {seed}")


@gpu
@pytest.mark.parametrize("n", [1, 65, 256, 1024])
def test_parents_on_a_gpu(n: int) -> None:
    rng = np.random.default_rng(n)
    for faulty in (0.0, 0.7):
        trees = ParentsBatch.draw(
            rng, batch=60, num_tokens=n, faulty=faulty, sized=n == 65, longest=50
        )
        assert_right(TreeBuildStep(trees, "torch-cuda"))


def test_the_views_are_those_of_a_draft_tree() -> None:
    rng = np.random.default_rng(3)
    trees = [DraftTree.random(70, rng, reach=reach) for reach in (None, 1, 3)]
    parents = np.stack([tree.parents for tree in trees])
    found = tree_build.tree_links(parents, [5, 0, 9], words=3)
    for at, (tree, length) in enumerate(zip(trees, (5, 0, 9), strict=True)):
        np.testing.assert_array_equal(found["visible"][70 * at : 70 * at + 70], tree.visibility(3))
        np.testing.assert_array_equal(found["positions"][at], tree.positions(length))
        np.testing.assert_array_equal(found["depths"][at], tree.depths)
        links = found["next_token"][at], found["next_sibling"][at]
        np.testing.assert_array_equal(links, tree.links())


# What is defined where a drafter or its caller is wrong


def grown(
    logprobs: Any, n: int, xp: Target = "numpy", tokens: Any = None
) -> Mapping[str, np.ndarray[Any, Any]]:
    """Grow the tree of one request on the device; its views without the batch's axis."""
    table = np.asarray(logprobs, np.float32)[None]
    ids = numbered(*table.shape[1:])[None] if tokens is None else np.asarray(tokens)[None]
    into = TreeBuffers.allocate(to(xp, table), batch=1, num_tokens=n)
    op = TreeBuild(to(xp, table), to(xp, ids), to(xp, np.array([4])), to(xp, np.array([7])), into)
    op()
    return {
        name: read(value) if name == "visible" else read(value)[0]
        for name, value in vars(into).items()
    }


@both_lanes
def test_fewer_prefixes_than_the_budget_leave_nodes_of_no_path(xp: Target) -> None:
    tree = grown([[-1.0], [-2.0]], 5, xp)
    assert tree["sizes"] == 3
    assert tree["parents"].tolist() == [-1, 0, 1, -1, -1]
    assert tree["tokens"].tolist() == [4, 0, 10, 4, 4]
    assert tree["ranks"].tolist() == [-1, 0, 0, -1, -1]
    assert tree["positions"].tolist() == [7, 8, 9, 7, 7]
    assert tree["next_token"].tolist() == [1, 2, -1, -1, -1]
    assert tree["next_sibling"].tolist() == [-1] * 5
    assert tree["visible"][:, 0].tolist() == [0b1, 0b11, 0b111, 0b1001, 0b10001]


@both_lanes
def test_a_row_ends_in_front_of_what_is_not_finite(xp: Target) -> None:
    tree = grown([[-1.0, math.nan, -1.5], [INF, -1.0, -2.0]], 4, xp)
    assert (tree["sizes"], tree["status"].tolist()) == (2, [TreeCode.NOT_FINITE, 1])
    tree = grown([[-1.0, -2.0], [-1.0, -INF]], 9, xp)
    assert (tree["sizes"], tree["status"].tolist()) == (5, [TreeCode.BUILT, -1])
    tree = grown([[math.nan, -2.0]], 3, xp)
    assert (tree["sizes"], tree["parents"].tolist()) == (1, [-1, -1, -1])


@both_lanes
def test_zeros_of_both_signs_are_equal(xp: Target) -> None:
    tree = grown([[0.0, -0.0], [-0.0, 0.0]], 6, xp)
    assert tree["parents"].tolist() == [-1, 0, 1, 1, 0, 4]


@both_lanes
def test_a_log_probability_above_0_counts_as_0(xp: Target) -> None:
    tree = grown([[1e-7, -1.0], [3.0, -2.0]], 4, xp)
    assert tree["parents"].tolist() == [-1, 0, 1, 0]
    assert tree["status"].tolist() == [TreeCode.BUILT, -1]


@both_lanes
def test_tokens_may_repeat(xp: Target) -> None:
    tree = grown([[-1.0, -1.0]], 3, xp, tokens=[[9, 9]])
    assert tree["tokens"].tolist() == [4, 9, 9]


MALFORMED = [
    ("no root", [0, 0], TreeCode.NO_ROOT, 0),
    ("two roots", [-1, 0, -1], TreeCode.SECOND_ROOT, 2),
    ("out of range", [-1, 0, 3], TreeCode.BAD_PARENT, 2),
    ("far out of range", [-1, 2**31 - 1, 0], TreeCode.BAD_PARENT, 1),
    ("not found", [-1, -2, 0], TreeCode.BAD_PARENT, 1),
    ("its own parent", [-1, 0, 2], TreeCode.PARENT_BEHIND, 2),
    ("a cycle", [-1, 0, 3, 2], TreeCode.PARENT_BEHIND, 2),
    ("a parent behind", [-1, 2, 0], TreeCode.PARENT_BEHIND, 1),
]


@both_lanes
@pytest.mark.parametrize(
    ("parents", "code", "node"), [m[1:] for m in MALFORMED], ids=[m[0] for m in MALFORMED]
)
def test_a_malformed_tree_is_its_root_alone(
    parents: list[int], code: TreeCode, node: int, xp: Target
) -> None:
    # the request beside it keeps its tree
    n = len(parents)
    both = np.array([parents, [-1, *range(n - 1)]], np.int32)
    into = TreeBuffers.allocate(to(xp, both), batch=2, num_tokens=n)
    into.parents[:] = to(xp, both)
    with cuverify.checked():
        TreeLinks(to(xp, np.array([7, 7])), into)()
    assert read(into.status).tolist() == [[code, node], [TreeCode.BUILT, -1]]
    assert read(into.next_token)[0].tolist() == [-1] * n
    assert read(into.depths).tolist() == [[0] * n, list(range(n))]
    with pytest.raises(ArgumentError, match="tree=0: request 0"):
        into.read_status()


def test_a_mask_that_does_not_fit_is_left_out() -> None:
    trees = TreeBuffers.allocate(np.zeros(1), batch=3, num_tokens=2)
    trees.visible[:] = 3
    mask, status = np.full(22, 9, np.uint8), np.full(3, 9, np.int32)
    TreeMask(np.array([3, -1, 5]), trees, mask, status, mode="full", fill_prefix=True)()
    assert status.tolist() == [0, 1, 2]
    assert mask.tolist() == [1] * 10 + [9] * 12


@pytest.mark.parametrize("length", [2**60, 2**63 - 1, 2**31, -(2**63)])
def test_lengths_that_wrap_around_have_no_part_of_a_mask(length: int) -> None:
    trees = TreeBuffers.allocate(np.zeros(1), batch=3, num_tokens=16)
    trees.visible[:] = 1
    lens = np.array([length, 2, length])
    mask, status = np.full(16 * (16 * 3 + 2), 9, np.uint8), np.full(3, 9, np.int32)
    wanted = tree_build.tree_mask(trees.visible, lens, mask, mode="full", fill_prefix=True)
    with cuverify.checked():
        TreeMask(lens, trees, mask, status, mode="full", fill_prefix=True)()
    assert status.tolist() == wanted["status"].tolist() == [1, 0, 1]
    np.testing.assert_array_equal(mask, wanted["mask"])


# Golden vectors


def golden() -> dict[str, Any]:
    found = find_data("golden", "sglang_vectors.json")
    if found is None:
        pytest.skip("the golden vectors are not at hand")
    vectors: dict[str, Any] = json.loads(found.read_text(encoding="utf-8"))
    return vectors


def linked(parents: Any, seq_lens: Any, xp: Target) -> TreeBuffers:
    given = np.asarray(parents, np.int32)
    into = TreeBuffers.allocate(to(xp, given), batch=len(given), num_tokens=given.shape[1])
    into.parents[:] = to(xp, given)
    TreeLinks(to(xp, np.asarray(seq_lens)), into)()
    into.read_status()
    return into


@both_lanes
def test_golden_eagle_trees(xp: Target) -> None:
    g3 = golden()["G3_build_tree"]
    n, lens = g3["draft_token_num"], to(xp, np.array(g3["seq_lens"]))
    selected, listed = (np.array(g3[name]) for name in ("selected_index", "parent_list"))
    into = TreeBuffers.allocate(lens, batch=2, num_tokens=n)
    EagleParents(to(xp, selected), to(xp, listed), g3["topk"], into)()
    assert read(into.parents).tolist() == g3["parents"]
    TreeLinks(lens, into)()
    into.read_status()
    assert read(into.positions).reshape(-1).tolist() == g3["positions"]
    assert read(into.next_token).tolist() == g3["next_token"]
    assert read(into.next_sibling).tolist() == g3["next_sibling"]
    wanted = np.array([[list(map(int, row)) for row in rows] for rows in g3["mask_rows"]], np.uint8)
    mask, status = to(xp, np.full(2 * n * n, 9, np.uint8)), to(xp, np.zeros(2, np.int32))
    TreeMask(lens, into, mask, status, mode="query_only")()
    np.testing.assert_array_equal(read(mask).reshape(wanted.shape), wanted)


@both_lanes
def test_golden_mask_and_parents(xp: Target) -> None:
    g4, g5 = golden()["G4_reconstruct_from_mask"], golden()["G5_links_from_parents"]
    seen = np.packbits(np.array(g4["mask"], np.uint8), axis=1, bitorder="little")
    into = TreeBuffers.allocate(to(xp, np.zeros(1)), batch=1, num_tokens=4)
    into.visible[:] = to(xp, seen.astype(np.int64))
    VisibleParents(into)()
    for vectors, parents, length in (
        (g4, read(into.parents), g4["seq_len"]),
        (g5, [g5["parents"]], g5["position_base"]),
    ):
        trees = linked(parents, [length], xp)
        for name in ("next_token", "next_sibling", "positions"):
            assert read(getattr(trees, name))[0].tolist() == vectors[name], name


@both_lanes
def test_recorded_trees_on_the_device(xp: Target) -> None:
    listing, arrays = (find_data("golden", f"ddtree_trees.{kind}") for kind in ("json", "npz"))
    if listing is None or arrays is None:
        pytest.skip("the recorded trees are not at hand")
    cases = json.loads(listing.read_text(encoding="utf-8"))["cases"]
    with np.load(arrays) as held:
        for case in cases:
            name = f"c{case['case']}_"
            tree = grown(
                held[name + "logprob"], case["budget"] + 1, xp, held[name + "token"].astype(int)
            )
            size = case["nodes"]
            assert tree["sizes"] == size, case
            np.testing.assert_array_equal(tree["parents"][:size], held[name + "out_parent"])
            np.testing.assert_array_equal(tree["tokens"][1:size], held[name + "out_token"])
            np.testing.assert_array_equal(tree["depths"][1:size], held[name + "out_depth"])
            seen = np.unpackbits(tree["visible"].view(np.uint8), axis=1, bitorder="little")[
                :size, :size
            ]
            wanted = np.unpackbits(held[name + "out_visibility"], axis=1)[:, :size]
            np.testing.assert_array_equal(seen, wanted, str(case))


@examples(20)
@given(seed=st.integers(0, 2**32 - 1), n=st.sampled_from([1, 2, 9, 64, 65, 100]))
def test_parents_are_read_back(seed: int, n: int) -> None:
    rng = np.random.default_rng(seed)
    trees = TreeBuffers.allocate(np.zeros(1), batch=6, num_tokens=n, words=2)
    parents = ParentsBatch.draw(rng, batch=6, num_tokens=n, index="int32").parents
    trees.parents[:] = parents
    TreeLinks(np.zeros(6, np.int64), trees)()
    odd = rng.random(len(trees.visible)) < 0.1 * (seed % 2)
    trees.visible[odd, 0] ^= np.uint64(1 << int(rng.integers(min(n, 63))))
    wanted = tree_build.visible_parents(trees.visible, 6)
    with cuverify.checked():
        VisibleParents(trees)()
    np.testing.assert_array_equal(trees.parents, wanted)
    if not odd.any():
        np.testing.assert_array_equal(trees.parents, parents)
    # and through EAGLE's lists, as any tree can be written
    if n > 1:
        rank = np.zeros_like(parents)
        for node in range(1, n):
            rank[:, node] = (parents[:, :node] == parents[:, node, None]).sum(axis=1)
        selected = (parents * n + rank)[:, 1:]
        listed = np.concatenate([np.full((6, 1), -1), selected], axis=1)
        if seed % 3 == 0:
            selected[:, rng.integers(n - 1)] = rng.choice([-5, 3 * n * n, 2**40])
        EagleParents(np.ascontiguousarray(selected), listed, n, trees)()
        np.testing.assert_array_equal(trees.parents, tree_build.eagle_parents(selected, listed, n))
        if seed % 3:
            np.testing.assert_array_equal(trees.parents, parents)


@pytest.mark.parametrize("arch", ["sm_90", "sm_120"])
def test_the_kernels_need_no_local_memory(arch: str) -> None:
    for values in ({"SLOTS": 2}, {"IN_SHARED": 1}):
        resources = tree_kernels(**values)["tree_build"].compile(arch).resources["tree_build"]
        assert (resources.spill_store_bytes, resources.stack_bytes) == (0, 0), resources


TABLE = np.zeros((2, 3, 4), np.float32)
BAD = [
    ("logprobs of one request", {"logprobs": TABLE[0]}, "logprobs=.*batch, depth, k"),
    ("too deep", {"logprobs": np.zeros((2, 33, 4), np.float32)}, "logprobs=.*1 to 32 depths"),
    ("too many ranks", {"logprobs": np.zeros((2, 3, 65), np.float32)}, "1 to 64 tokens"),
    ("logprobs in float64", {"logprobs": TABLE.astype(np.float64)}, "logprobs=.*float64"),
    ("tokens of another shape", {"token_ids": np.zeros((2, 3, 5), np.int64)}, "token_ids=.*"),
    ("tokens in int16", {"token_ids": np.zeros((2, 3, 4), np.int16)}, "token_ids=.*int16"),
    ("a root is missing", {"root_tokens": np.zeros(1, np.int64)}, "root_tokens=.*"),
    ("lengths of three requests", {"seq_lens": np.zeros(3, np.int64)}, "seq_lens=.*"),
    ("room for another batch", {"into": TreeBuffers.allocate(TABLE, batch=3, num_tokens=9)}, "wants shape .2, 9"),
]  # fmt: skip


@pytest.mark.parametrize(("spoiled", "says"), [b[1:] for b in BAD], ids=[b[0] for b in BAD])
def test_misuse_names_the_argument(spoiled: dict[str, Any], says: str) -> None:
    right: dict[str, Any] = {
        "logprobs": TABLE,
        "token_ids": np.zeros((2, 3, 4), np.int64),
        "root_tokens": np.zeros(2, np.int64),
        "seq_lens": np.zeros(2, np.int64),
        "into": TreeBuffers.allocate(TABLE, batch=2, num_tokens=9),
    }
    TreeBuild(**right)
    with pytest.raises(cuverify.errors.CuverifyError, match=f"(?s){says}"):
        TreeBuild(**right | spoiled)


def test_parents_share_no_memory_with_what_they_are_made_of() -> None:
    trees = TreeBuffers.allocate(TABLE, batch=2, num_tokens=9)
    over = trees.visible.view(np.int32)[:9].reshape(2, 9)
    with pytest.raises(ArgumentError, match=r"trees\.parents.*shares memory with trees\.visible"):
        VisibleParents(replace(trees, parents=over))
    given = trees.parents.reshape(-1)[:16].view(np.int64).reshape(2, 4)
    selected = np.zeros((2, 8), np.int64)
    with pytest.raises(ArgumentError, match=r"trees\.parents.*shares memory with parent_list"):
        EagleParents(selected, given, 2, trees)


def test_sizes_are_checked() -> None:
    for sizes, says in (
        ((0, 9), "batch=0"),
        ((1, 1025), "num_tokens=1025"),
        ((1, 65, 1), "words=1"),
    ):
        with pytest.raises(ArgumentError, match=says):
            tree_buffers(*sizes)
    trees = TreeBuffers.allocate(np.zeros(1), batch=2, num_tokens=33)
    with pytest.raises(ArgumentError, match="at most 32 nodes"):
        TreeMask(np.zeros(2, int), trees, np.zeros(9, np.uint8), np.zeros(2, np.int32), mode="bit_packed")  # fmt: skip
    with pytest.raises(ArgumentError, match="mask=.*too short"):
        TreeMask(np.zeros(2, int), trees, np.zeros(9, np.uint8), np.zeros(2, np.int32), mode="full")
