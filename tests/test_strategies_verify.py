"""Trees, layouts and batches: what is drawn, how often boundaries come, what examples shrink to."""

from __future__ import annotations

import contextlib
import random
import re
from typing import Any

import hypothesis
import numpy as np
import pytest
from hypothesis import find, given
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument, NoSuchExample

from cuverify.kv_layout import KvLayout
from cuverify.strategies import (
    TREE_SHAPES,
    draft_trees,
    drawn,
    examples,
    kv_layouts,
    verify_batches,
)
from cuverify.tree import DraftTree
from cuverify.verify_batch import VerifyBatch
from cuverify.verify_workload import drafted_tree, long_requests, real_verify_batches


def simplest(strategy: st.SearchStrategy[Any], condition: Any) -> Any:
    """Shrink from several beginnings: each ends in a local minimum, of which the least counts."""
    settings = hypothesis.settings(database=None, max_examples=1000)
    ends = []
    for seed in range(6):
        # what is rare is not found from every beginning
        with contextlib.suppress(NoSuchExample):
            ends.append(find(strategy, condition, settings=settings, random=random.Random(seed)))
    return min(ends, key=lambda end: len(repr(getattr(end, "parents", end))))


@st.composite
def bounds(draw: st.DrawFn) -> dict[str, Any]:
    def pair(name: str, least: int, most: int) -> dict[str, int]:
        low = draw(st.integers(least, most))
        return {f"min_{name}": low, f"max_{name}": draw(st.integers(low, most))}

    return {
        **pair("requests", 1, 3),
        **pair("seq_len", 0, 70),
        **pair("tree_tokens", 1, 20),
        "max_padded": draw(st.integers(0, 2)),
        "page_sizes": draw(st.lists(st.sampled_from([1, 16, 64]), min_size=1, max_size=2)),
        "num_slots": draw(st.sampled_from([None, 1024])),
    }


def assert_within(layout: KvLayout, within: dict[str, Any]) -> None:
    real = layout.num_real
    assert within["min_requests"] <= real <= within["max_requests"]
    assert layout.padded <= within["max_padded"]
    lens = layout.seq_lens[:real]
    assert within["min_seq_len"] <= lens.min() <= lens.max() <= within["max_seq_len"]
    trees = layout.tree_tokens
    assert within["min_tree_tokens"] <= trees.min() <= trees.max() <= within["max_tree_tokens"]
    assert layout.page_size in within["page_sizes"]
    assert within["num_slots"] in (None, layout.num_slots)


@examples(100)
@given(data=st.data(), within=bounds())
def test_layouts_keep_their_bounds(data: st.DataObject, within: dict[str, Any]) -> None:
    shared = data.draw(st.booleans())
    layout = data.draw(
        kv_layouts(allow_shared_prefix=shared, allow_stale_tail=False, **within), label="layout"
    )
    assert_within(layout, within)
    if not shared:
        slots = layout.kv_indices()[: int(layout.seq_lens[: layout.num_real].sum())]
        assert len(np.unique(slots)) == len(slots)
    assert layout.req_to_token.shape[0] == 1 + layout.num_real  # no row of nobody


@examples(100)
@given(data=st.data(), within=bounds())
def test_batches_keep_their_bounds(data: st.DataObject, within: dict[str, Any]) -> None:
    batch = data.draw(verify_batches(heads=(16,), widths=((32, 16),), **within), label="batch")
    assert_within(batch.layout, within)
    assert (batch.heads, batch.latent, batch.rope) == (16, 32, 16)
    assert [tree.num_tokens for tree in batch.trees] == batch.layout.tree_tokens.tolist()


@examples(100)
@given(st.data())
def test_trees_keep_their_bounds(data: st.DataObject) -> None:
    low = data.draw(st.integers(1, 200))
    high = data.draw(st.integers(low, 260))
    shape = data.draw(st.sampled_from(TREE_SHAPES))
    tree = data.draw(draft_trees(min_tokens=low, max_tokens=high, shapes=[shape]))
    assert low <= tree.num_tokens <= high
    if shape in ("chain", "star", "comb"):
        assert tree == getattr(DraftTree, shape)(tree.num_tokens)
    if shape == "best-first" and tree.num_tokens > 2:
        assert tree.tokens is not None


def test_boundaries_are_drawn_often() -> None:
    trees = drawn(draft_trees(max_tokens=129), 400)
    sizes = [tree.num_tokens for tree in trees]
    edges = (1, 2, 8, 9, 16, 17, 32, 33, 63, 64, 65, 128, 129)
    assert {size for size in sizes if size in edges} == set(edges)
    assert np.mean([size in edges for size in sizes]) > 0.4
    for shape in ("chain", "star", "comb"):
        same = [tree == getattr(DraftTree, shape)(len(tree)) for tree in trees if len(tree) > 3]
        assert np.mean(same) > 0.05, shape
    assert np.mean([tree.tokens is not None for tree in trees]) > 0.05

    batches = drawn(verify_batches(max_tree_tokens=64), 400)
    lens = [length for b in batches for length in b.layout.seq_lens[: b.layout.num_real].tolist()]
    for edge in (0, 1, 15, 16, 17, 63, 64, 65, 160):
        assert np.mean([length == edge for length in lens]) > 0.004, edge
    share = {
        "one request": np.mean([b.layout.num_real == 1 for b in batches]),
        "several": np.mean([b.layout.num_real > 1 for b in batches]),
        "padded": np.mean([b.layout.padded > 0 for b in batches]),
        "one size of tree": np.mean([len(set(map(len, b.trees))) == 1 for b in batches]),
        "sizes of trees": np.mean([len(set(map(len, b.trees))) > 1 for b in batches]),
        "full pool": np.mean([full(b.layout) for b in batches]),
        "shared prefix": np.mean([shared(b.layout) for b in batches]),
        "stale tail": np.mean([stale(b.layout) for b in batches]),
    }
    assert all(part > 0.1 for part in share.values()), share
    for field in ("heads", "latent", "spread", "draft_source", "index_dtype", "masks", "row_gap"):
        assert len({getattr(b, field) for b in batches}) > 1, field


def full(layout: KvLayout) -> bool:
    held = {*layout.kv_indices().tolist(), *layout.out_cache_loc.tolist(), 0}
    return len(held) == layout.num_slots


def shared(layout: KvLayout) -> bool:
    slots = layout.kv_indices()
    return len(np.unique(slots)) + max(0, layout.padded - 1) < len(slots)


def stale(layout: KvLayout) -> bool:
    return bool((layout.req_to_token < 0).any())


def test_examples_shrink_to_a_one_node_tree_and_an_identity_layout() -> None:
    batch = simplest(verify_batches(), lambda batch: True)
    assert batch.trees == (DraftTree.chain(1),)
    assert_identity(batch.layout, seq_len=0)
    assert batch.spread == 1.0
    assert (batch.draft_source, batch.index_dtype, batch.masks) == ("slots", "int32", "trees")
    assert (batch.row_gap, batch.seed, batch.heads, batch.latent, batch.rope) == (0, 0, 8, 64, 16)

    batch = simplest(verify_batches(), lambda batch: batch.layout.seq_lens.max() >= 18)
    assert batch.trees == (DraftTree.chain(1),)
    assert_identity(batch.layout, seq_len=18)

    layout = simplest(kv_layouts(), lambda layout: layout.tree_tokens.max() >= 3)
    assert_identity(layout, seq_len=0, tree_tokens=3)
    layout = simplest(kv_layouts(), lambda layout: layout.num_real == 2)
    assert layout.seq_lens.tolist() == [0, 0]
    assert layout.out_cache_loc.tolist() == [1, 2]
    layout = simplest(kv_layouts(), lambda layout: layout.page_size == 16)
    assert_identity(layout, seq_len=0, page_size=16)


def assert_identity(
    layout: KvLayout, *, seq_len: int, tree_tokens: int = 1, page_size: int = 1
) -> None:
    """Check that one request lies in order behind the dummy page, in a pool that just holds it."""
    total = seq_len + tree_tokens
    assert layout.num_requests == 1
    assert layout.seq_lens.tolist() == [seq_len]
    assert layout.req_to_token.tolist() == [[0] * total, list(range(page_size, page_size + total))]
    assert layout.num_slots == page_size * (1 + -(-total // page_size))


def test_trees_shrink_to_few_nodes_and_the_simplest_shape() -> None:
    def parents(condition: Any) -> list[int]:
        tree: DraftTree = simplest(draft_trees(max_tokens=129), condition)
        return tree.parents.tolist()  # type: ignore[no-any-return]

    assert parents(lambda tree: True) == [-1]
    assert parents(lambda tree: tree.max_depth >= 2) == [-1, 0, 1]
    assert parents(lambda tree: tree.num_tokens >= 11) == list(range(-1, 10))
    assert parents(lambda tree: len(tree.children(0)) >= 3) == [-1, 0, 0, 0]
    # neither chain, star nor comb: two children, each with a child
    twigs = parents(lambda tree: sum(map(bool, map(tree.children, range(len(tree))))) >= 3 and
                     len(tree.children(0)) == 2 and tree.max_depth == 2)  # fmt: skip
    assert len(twigs) == 5


def test_values_follow_the_seed() -> None:
    first, again, other = (drawn(verify_batches(), 8, seed=seed) for seed in (1, 1, 2))
    assert list(map(repr, first)) == list(map(repr, again))
    assert list(map(repr, first)) != list(map(repr, other))
    for batch, same in zip(first, again, strict=True):
        for array in ("q", "pool", "draft_kv", "visible"):
            np.testing.assert_array_equal(getattr(batch, array)(), getattr(same, array)())


@pytest.mark.parametrize(
    ("strategy", "wrong", "said"),
    [
        (draft_trees, {"min_tokens": 0}, "min_tokens=0"),
        (draft_trees, {"min_tokens": 9, "max_tokens": 8}, "max_tokens=8 is below min_tokens=9"),
        (draft_trees, {"max_tokens": 1025}, "max_tokens=1024 is below min_tokens=1025"),
        (draft_trees, {"shapes": ["bush"]}, "bush"),
        (draft_trees, {"shapes": []}, "shapes"),
        (kv_layouts, {"min_requests": 0}, "min_requests=0"),
        (kv_layouts, {"min_seq_len": -1}, "min_seq_len=-1"),
        (kv_layouts, {"min_seq_len": 5, "max_seq_len": 4}, "max_seq_len=4"),
        (kv_layouts, {"max_padded": -1}, "max_padded=-1"),
        (kv_layouts, {"page_sizes": [8]}, "page_sizes"),
        (kv_layouts, {"placements": ["anywhere"]}, "anywhere"),
        (kv_layouts, {"num_slots": 704}, "num_slots=704 must be a multiple of 1, at least 705"),
        (verify_batches, {"min_tree_tokens": 0}, "min_tree_tokens=0"),
        (verify_batches, {"max_tree_tokens": 257}, "max_tree_tokens=256"),
        (verify_batches, {"widths": [(64, 8)]}, "widths"),
        (verify_batches, {"heads": []}, "heads"),
        (verify_batches, {"masks": ["none"]}, "none"),
        (verify_batches, {"draft_sources": ["air"]}, "air"),
    ],
)
def test_bounds_that_make_no_sense_are_refused_when_drawn(
    strategy: Any, wrong: dict[str, Any], said: str
) -> None:
    made = strategy(**wrong)
    with pytest.raises(InvalidArgument, match=re.escape(said)):
        find(made, lambda example: True)


def test_a_larger_profile_scales_every_test() -> None:
    profile = hypothesis.settings.get_current_profile_name()
    usual = examples(30).max_examples
    hypothesis.settings.load_profile("nightly")
    try:
        assert examples(30).max_examples == 600
        assert examples(30).deadline is None
    finally:
        hypothesis.settings.load_profile(profile)
    assert examples(30).max_examples == usual


def test_drafted_trees_are_best_first_and_neither_chains_nor_stars() -> None:
    trees = [drafted_tree(33, seed) for seed in range(20)]
    depths = [tree.max_depth for tree in trees]
    assert min(depths) >= 4
    assert max(depths) <= 15
    assert np.mean([len(tree.children(0)) > 1 for tree in trees]) > 0.5
    assert len({tuple(tree.parents.tolist()) for tree in trees}) == 20
    assert [len(drafted_tree(n, 1)) for n in (1, 2, 3, 256)] == [1, 2, 3, 256]


def test_real_batches_come_from_a_churned_pool() -> None:
    batches: list[VerifyBatch] = list(
        real_verify_batches(16_384, requests=5, tree_tokens=17, padded=2, seed=3, steps=3)
    )
    assert len(batches) == 3
    first = batches[0].layout
    assert (first.num_real, first.padded) == (5, 2)
    # churn has broken the slots up, and steps change lengths, slots and trees
    assert first.fragmentation().runs[:5].min() > 3
    lens = {tuple(batch.layout.seq_lens.tolist()) for batch in batches}
    assert len(lens) == 3
    assert len({batch.trees for batch in batches}) == 3


def test_long_requests_keep_the_shape_of_the_trace() -> None:
    lengths = long_requests(180_000, shortest=20_000)
    assert lengths.prompt.max() == 180_000
    assert lengths.prompt.min() >= 20_000
    assert len(lengths.prompt) == len(lengths.generated) > 100
