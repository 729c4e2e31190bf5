"""The best-first tree against hand-made cases, an exhaustive search and recorded trees."""

from __future__ import annotations

import doctest
import itertools
import json
import math
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cuverify.datasets import find_data
from cuverify.errors import ArgumentError
from cuverify.reference import tree_build
from cuverify.reference.tree_build import BestFirstTree, best_first_tree, draft_topk
from cuverify.tree import DraftTree

Path = tuple[int, ...]
INF = math.inf


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


# Log-probabilities


def test_topk_is_a_log_softmax() -> None:
    logits = np.array([[1.0, 3.0, 2.0, -INF], [700.0, -700.0, 700.0, 0.0]], np.float32)
    logprobs, tokens = draft_topk(logits, 3)
    assert tokens.tolist() == [[1, 2, 0], [0, 2, 3]]
    assert logprobs.dtype == np.float32
    norm = math.log(math.exp(1) + math.exp(2) + math.exp(3))
    np.testing.assert_allclose(logprobs[0], [3 - norm, 2 - norm, 1 - norm], rtol=1e-6)
    np.testing.assert_allclose(logprobs[1], [-math.log(2)] * 2 + [-700 - math.log(2)], rtol=1e-6)
    assert draft_topk(np.zeros((0, 4)), 2)[0].shape == (0, 2)
    everything = draft_topk(np.random.default_rng(0).normal(size=(3, 50)), 50)[0]
    np.testing.assert_allclose(np.exp(everything.astype(np.float64)).sum(axis=1), 1, rtol=1e-6)


@pytest.mark.parametrize(
    ("logits", "k", "said"),
    [
        ([1.0], 1, "logits=.*must be a table"),
        ([["a"]], 1, "logits=.*must be a table of numbers"),
        ([[1.0, math.nan]], 1, "logits=.*row 0 holds a NaN"),
        ([[1.0], [INF]], 1, "row 1 holds a NaN or .inf"),
        ([[-INF, -INF]], 1, "row 0 is -inf everywhere"),
        ([[1.0, 2.0]], 3, "k=3: must lie in 1 to 2"),
        ([[1.0, 2.0]], 0, "k=0"),
        (np.zeros((2, 0)), 1, "the vocabulary is empty"),
    ],
)
def test_logits_that_make_no_sense(logits: Any, k: int, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        draft_topk(logits, k)


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
