"""Batches to verify: their arrays are what they say, and made so that mistakes show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from cuverify.errors import ArgumentError
from cuverify.kv_layout import DUMMY, FREE, KvLayout
from cuverify.narrow import widen
from cuverify.reference.verify_attention import verify_attention as oracle
from cuverify.strategies import examples, verify_batches
from cuverify.tree import DraftTree
from cuverify.verify_batch import VerifyBatch


def is_nan(bits: np.ndarray[Any, Any]) -> Any:
    return (bits & 0x7FFF) > 0x7F80


def layout_of(lens: Any = (7, 3), trees: Any = (5, 2), **more: Any) -> KvLayout:
    return KvLayout.build(seq_lens=lens, tree_tokens=trees, placement="scattered", **more)


def batch_of(layout: KvLayout, **more: Any) -> VerifyBatch:
    trees = tuple(DraftTree.random(int(nodes), 1) for nodes in layout.tree_tokens)
    return VerifyBatch(layout, trees, latent=32, rope=16, **more)


@examples(60)
@given(verify_batches())
def test_slots_that_nobody_may_read_are_nan_and_all_others_are_not(batch: VerifyBatch) -> None:
    pool, layout = is_nan(batch.pool()), batch.layout
    owner, draft = layout.owners()
    held = owner != FREE
    held[owner == DUMMY] = layout.padded > 0
    if batch.draft_source == "separate":
        held &= ~draft
    assert (pool == ~held[:, None]).all()
    assert not is_nan(batch.draft_kv()).any()
    assert not is_nan(batch.q()).any()


@examples(60)
@given(verify_batches())
def test_sizes_are_those_of_the_arrays(batch: VerifyBatch) -> None:
    tokens, width = batch.num_tokens, batch.width
    assert batch.q().shape == (tokens, batch.heads, width)
    assert batch.pool().shape == (batch.layout.num_slots, width)
    assert batch.draft_kv().shape == (tokens, width)
    assert batch.visible().shape == (tokens, batch.num_words)
    assert batch.visible(4).shape == (tokens, 4)
    pairs = 0
    for tree, length in zip(batch.trees, batch.layout.seq_lens.tolist(), strict=True):
        pairs += len(tree) * batch.heads * (length + len(tree))
    assert batch.pairs == pairs
    assert batch.flops == 2 * pairs * (batch.width + batch.latent)


def test_real_requests_see_their_ancestors_and_noise_is_behind_their_nodes() -> None:
    batch = batch_of(layout_of((7, 3), (5, 70, 5), padded=1, rng=0))
    words = batch.visible(3)
    for request, first in ((0, 0), (1, 5)):
        tree = batch.trees[request]
        for node in range(len(tree)):
            row = [int(word) for word in words[first + node]]
            seen = [bit for bit in range(192) if row[bit // 64] >> (bit % 64) & 1]
            assert [bit for bit in seen if bit < len(tree)] == list(tree.ancestors(node))
            assert any(bit >= len(tree) for bit in seen)
    padded = np.unpackbits(words[75:].view(np.uint8))
    assert 0.4 < padded.mean() < 0.6
    any_mask = np.unpackbits(replace(batch, masks="any").visible().view(np.uint8))
    assert 0.45 < any_mask.mean() < 0.55


def test_drafts_lie_in_their_slots_or_apart() -> None:
    batch = batch_of(layout_of(padded=1))
    real = batch.layout.out_cache_loc[:7]
    np.testing.assert_array_equal(batch.draft_kv(), batch.pool()[batch.layout.out_cache_loc])
    apart = replace(batch, draft_source="separate")
    assert is_nan(apart.pool()[real]).all()
    # what the prefix holds does not depend on where the drafts are, nor do queries
    np.testing.assert_array_equal(apart.q(), batch.q())
    assert "draft_kv" in apart.oracle_arguments()
    assert "draft_slots" in batch.oracle_arguments()


@pytest.mark.parametrize(
    ("dtype", "kv_scale", "step"), [("fp16", None, 2.0**-8), ("bf16", 0.07, 2.0**-3)]
)
def test_other_types_hold_the_same_numbers_as_near_as_they_can(
    dtype: str, kv_scale: float | None, step: float
) -> None:
    plain = batch_of(layout_of(padded=1))
    other = replace(plain, dtype=dtype, kv_scale=kv_scale)  # type: ignore[arg-type]
    for right, found in (
        (widen(plain.pool()), widen(other.pool()) * (kv_scale or 1.0)),
        (widen(plain.q()), widen(other.q())),
    ):
        np.testing.assert_array_equal(np.isnan(found), np.isnan(right))
        near = np.abs(found - right) <= step * np.abs(right) + 2.0**-9 * (kv_scale or 2.0**-15)
        assert (near | np.isnan(right)).all()
    assert (other.pool_dtype, "kv_scale" in other.oracle_arguments()) == (
        ("fp8_e4m3", True) if kv_scale else ("fp16", False)
    )


@pytest.mark.parametrize("spread", [0.0, 0.5, 4.0])
def test_scores_spread_as_asked(spread: float) -> None:
    batch = batch_of(layout_of([400], [8]), spread=spread)

    def wide(bits: Any) -> Any:
        return (bits.astype(np.uint32) << 16).view(np.float32).astype(float)

    keys = wide(batch.pool()[batch.layout.prefix_slots(0)])
    scores = batch.sm_scale * wide(batch.q())[..., :-1] @ keys[:, :-1].T
    assert scores.std() == pytest.approx(spread, rel=0.1)


@pytest.mark.parametrize("length", [100, 5000, 60_000])
def test_drafts_and_landmarks_weigh_like_a_prefix_of_any_length(length: int) -> None:
    batch = batch_of(layout_of([length], [16]), spread=0.5, masks="any")
    arguments = batch.oracle_arguments()
    arguments["visible"] = np.full((16, 1), 2**64 - 1, np.uint64)
    whole = oracle(**arguments).lse
    nothing = {"visible": np.zeros((16, 1), np.uint64)}
    prefix = oracle(**{**arguments, **nothing}).lse
    share = 1 - np.exp(prefix - whole)
    assert 0.2 < share.min() <= share.max() < 0.5
    slots = arguments["kv_indices"]
    for end in (slots[:1], slots[1:2], slots[-1:]):
        alone = oracle(**{**arguments, **nothing, "kv_indices": end, "kv_indptr": [0, 1]}).lse
        assert np.exp(alone - whole).mean() > 0.01


def test_more_requests_are_padding_and_change_nothing_else() -> None:
    batch = batch_of(layout_of(padded=1))
    more = batch.with_requests(5, tree_tokens=3)
    assert (more.num_requests, more.layout.padded) == (5, 3)
    assert more.layout.tree_tokens.tolist() == [5, 2, 5, 3, 3]
    assert more.layout.seq_lens[2:].tolist() == [1, 1, 1]
    np.testing.assert_array_equal(more.pool(), batch.pool())
    assert batch.with_requests(3) is batch
    with pytest.raises(ArgumentError, match="requests"):
        batch.with_requests(2)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"trees": (DraftTree.chain(5),)}, "trees.*1.*2 requests"),
        ({"trees": (DraftTree.chain(5), DraftTree.chain(3))}, "2 drafts for request 1"),
        ({"heads": 4}, "heads.*4"),
        ({"heads": 12}, "heads.*12"),
        ({"latent": 24}, "latent.*24"),
        ({"rope": 0}, "rope.*0"),
        ({"sm_scale": 0.0}, "sm_scale"),
        ({"sm_scale": float("nan")}, "sm_scale"),
        ({"spread": -1.0}, "spread"),
        ({"row_gap": 4}, "row_gap.*4"),
        ({"draft_source": "nowhere"}, "nowhere"),
        ({"index_dtype": "int16"}, "int16"),
        ({"masks": "none"}, "masks"),
        ({"dtype": "fp32"}, "dtype.*fp32"),
        ({"kv_scale": 0.0}, "kv_scale.*positive"),
        ({"kv_scale": float("inf")}, "kv_scale.*positive"),
        ({"kv_scale": 1.0, "dtype": "fp16"}, "kv_scale.*bf16"),
        ({"kv_scale": 1.0, "row_gap": 8}, "row_gap.*16 bytes"),
    ],
)
def test_what_does_not_fit_is_refused(change: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        replace(batch_of(layout_of()), **change)


def test_too_wide_trees_and_too_few_words_are_refused() -> None:
    with pytest.raises(ArgumentError, match="256"):
        batch_of(layout_of([3], [257]))
    with pytest.raises(ArgumentError, match="words"):
        batch_of(layout_of([3], [70])).visible(1)
