"""The oracles of verify attention agree with each other and with a formulation by hand."""

from __future__ import annotations

import struct
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given

from cuverify.errors import ArgumentError
from cuverify.kv_layout import KvLayout
from cuverify.narrow import widen
from cuverify.reference import verify_attention as numpy_oracle
from cuverify.strategies import ELEMENTS, drawn, examples, verify_batches
from cuverify.torch_oracle import baseline_attention
from cuverify.torch_oracle import verify_attention as torch_oracle
from cuverify.tree import DraftTree
from cuverify.verify_batch import VerifyBatch

oracle = numpy_oracle.verify_attention
Attention = numpy_oracle.Attention

gpu = pytest.mark.gpu

SMALL: dict[str, Any] = {
    "max_requests": 2,
    "max_seq_len": 40,
    "max_tree_tokens": 9,
    "max_padded": 1,
    "heads": (8,),
    "widths": ((32, 16), (16, 32)),
    "page_sizes": (1, 16),
}


def numbers(bits: Any) -> list[float]:
    """Return the numbers whose bf16 bits these are: the upper halves of float32s."""
    halves = [int(half) for half in np.asarray(bits).reshape(-1)]
    raw = b"".join(struct.pack("<HH", 0, half) for half in halves)
    return list(struct.unpack(f"<{len(halves)}f", raw))


def decode(query: list[float], rows: list[list[float]], batch: VerifyBatch) -> tuple[Any, float]:
    """Attend from one query to some rows, as decoding one token does; output and log-sum-exp."""
    if not rows:
        return np.zeros(batch.latent), -np.inf
    scores = [batch.sm_scale * float(np.dot(query, row)) for row in rows]
    total = sum(np.exp(np.longdouble(score)) for score in scores)
    weights = [np.exp(np.longdouble(score)) / total for score in scores]
    out = sum(w * np.array(row[: batch.latent]) for w, row in zip(weights, rows, strict=True))
    return np.asarray(out, np.float64), float(np.log(total))


def dense(batch: VerifyBatch) -> tuple[Any, Any]:
    """Compute output and log-sum-exp token by token, each from a list of the rows that it sees.

    The prefix is read through the request-to-token table, drafts by lists of ancestors. Only masks
    that belong to no tree are read bit by bit.
    """
    layout = batch.layout
    pool, drafts = batch.pool(), batch.draft_kv()
    queries, words = batch.q(), batch.visible()
    out = np.zeros((batch.num_tokens, batch.heads, batch.latent))
    lse = np.zeros((batch.num_tokens, batch.heads))
    token = 0
    for b, tree in enumerate(batch.trees):
        table = layout.req_to_token[layout.req_pool_indices[b]].tolist()
        prefix = [numbers(pool[table[t]]) for t in range(int(layout.seq_lens[b]))]
        tail = [numbers(drafts[token + node]) for node in range(tree.num_tokens)]
        for node in range(tree.num_tokens):
            seen = list(tree.ancestors(node))
            if b >= layout.num_real or batch.masks == "any":
                row = [int(word) for word in words[token + node]]
                seen = [k for k in range(tree.num_tokens) if row[k // 64] >> (k % 64) & 1]
            rows = prefix + [tail[other] for other in seen]
            for head in range(batch.heads):
                found = decode(numbers(queries[token + node, head]), rows, batch)
                out[token + node, head], lse[token + node, head] = found
        token += tree.num_tokens
    return out, lse


def assert_equal(found: Attention, out: Any, lse: Any, tolerance: float = 1e-12) -> None:
    np.testing.assert_allclose(found.out, out, rtol=tolerance, atol=tolerance)
    np.testing.assert_allclose(found.lse, lse, rtol=tolerance, atol=tolerance)


@examples(40)
@given(verify_batches(**SMALL))
def test_oracle_agrees_with_lists_of_ancestors(batch: VerifyBatch) -> None:
    assert_equal(oracle(**batch.oracle_arguments()), *dense(batch))


@examples(60)
@given(verify_batches(max_requests=2, max_tree_tokens=70))
def test_torch_oracle_agrees_with_numpy(batch: VerifyBatch) -> None:
    arguments = batch.oracle_arguments()
    expected = oracle(**arguments)
    found = torch_oracle(**arguments, device="cpu")
    assert_equal(found, expected.out, expected.lse)
    np.testing.assert_allclose(found.spread, expected.spread, rtol=1e-12, atol=1e-300)


@examples(12)
@given(verify_batches(**{**SMALL, "elements": ELEMENTS[1:]}))
def test_oracles_agree_on_other_types(batch: VerifyBatch) -> None:
    arguments = batch.oracle_arguments()
    expected = oracle(**arguments)
    found = torch_oracle(**arguments, device="cpu")
    assert_equal(found, expected.out, expected.lse)
    # what a pool of codes means, written out, is another way to say the same
    pool = widen(batch.pool()) * (batch.kv_scale or 1.0)
    numbers = {**arguments, "q": widen(batch.q()), "pool": pool, "kv_scale": 1.0}
    if batch.draft_source == "separate":
        numbers["draft_kv"] = widen(batch.draft_kv())
    again = oracle(**numbers)
    assert_equal(again, expected.out, expected.lse)
    baseline = baseline_attention(**arguments, device="cpu")
    rounded = baseline.out.astype(np.float16 if batch.dtype == "fp16" else np.float32)
    np.testing.assert_array_equal(rounded.astype(np.float64), baseline.out)


@examples(30)
@given(verify_batches(**{**SMALL, "masks": ("trees",), "max_padded": 0}))
def test_the_root_sees_what_decoding_sees(batch: VerifyBatch) -> None:
    found = oracle(**batch.oracle_arguments())
    pool, drafts, queries = batch.pool(), batch.draft_kv(), batch.q()
    for b, root in enumerate(batch.layout.qo_indptr()[:-1].tolist()):
        rows = [*map(numbers, pool[batch.layout.prefix_slots(b)]), numbers(drafts[root])]
        for head in range(batch.heads):
            out, lse = decode(numbers(queries[root, head]), rows, batch)
            np.testing.assert_allclose(found.out[root, head], out, rtol=1e-12, atol=1e-12)
            np.testing.assert_allclose(found.lse[root, head], lse, rtol=1e-12, atol=1e-12)


def test_a_chain_is_decoding_step_by_step() -> None:
    nodes, prefix = 6, 11
    batch = one_request(prefix, DraftTree.chain(nodes))
    found = oracle(**batch.oracle_arguments())
    pool, slots = batch.pool(), batch.layout.req_to_token[1]
    for step in range(nodes):
        # after `step` more tokens have been decoded, they are a part of the prefix
        rows = [numbers(pool[slot]) for slot in slots[: prefix + step + 1]]
        out, lse = decode(numbers(batch.q()[step, 3]), rows, batch)
        np.testing.assert_allclose(found.out[step, 3], out, rtol=1e-12)
        np.testing.assert_allclose(found.lse[step, 3], lse, rtol=1e-12)


def test_a_star_sees_root_and_self_only() -> None:
    batch = one_request(0, DraftTree.star(5))
    found = oracle(**batch.oracle_arguments())
    drafts = [numbers(row) for row in batch.draft_kv()]
    for node in range(5):
        rows = [drafts[0]] if node == 0 else [drafts[0], drafts[node]]
        out, _ = decode(numbers(batch.q()[node, 0]), rows, batch)
        np.testing.assert_allclose(found.out[node, 0], out, rtol=1e-12)


def test_blocks_make_no_difference(monkeypatch: pytest.MonkeyPatch) -> None:
    batch = one_request(300, DraftTree.comb(12), spread=6.0)
    whole = oracle(**batch.oracle_arguments())
    monkeypatch.setattr(numpy_oracle, "_BLOCK_SCORES", 1)  # blocks of 16 rows
    assert_equal(oracle(**batch.oracle_arguments()), whole.out, whole.lse)


def test_halves_merge_to_the_whole_by_their_log_sum_exps() -> None:
    batch = one_request(90, DraftTree.random(5, 1), spread=4.0)
    arguments = batch.oracle_arguments()
    whole = oracle(**arguments)
    nothing = np.zeros_like(arguments["visible"])
    half = {"kv_indptr": np.array([0, 50]), "kv_indices": arguments["kv_indices"][:50]}
    first = oracle(**{**arguments, **half, "visible": nothing})
    half = {"kv_indptr": np.array([0, 40]), "kv_indices": arguments["kv_indices"][50:]}
    second = oracle(**{**arguments, **half})
    lse = np.logaddexp(first.lse, second.lse)
    weights = np.exp(first.lse - lse)[..., None], np.exp(second.lse - lse)[..., None]
    assert_equal(whole, weights[0] * first.out + weights[1] * second.out, lse)


@pytest.mark.parametrize("attend", [oracle, torch_oracle, baseline_attention])
def test_a_row_that_sees_nothing_is_zero(attend: Any) -> None:
    batch = one_request(0, DraftTree.chain(3))
    arguments = batch.oracle_arguments()
    arguments["visible"] = np.array([[0], [2], [~np.uint64(7)]], np.uint64)  # nobody, itself, none
    if attend is not oracle:
        arguments["device"] = "cpu"
    found = attend(**arguments)
    assert np.isneginf(found.lse).all(axis=1).tolist() == [True, False, True]
    assert not found.out[[0, 2]].any()
    assert not found.spread[[0, 2]].any()
    np.testing.assert_allclose(found.out[1, 5], numbers(batch.draft_kv()[1])[: batch.latent])


def test_large_scores_do_not_overflow() -> None:
    batch = one_request(20, DraftTree.chain(4), spread=3000.0)
    for found in (
        oracle(**batch.oracle_arguments()),
        torch_oracle(**batch.oracle_arguments(), device="cpu"),
    ):
        assert np.isfinite(found.out).all()
        assert np.abs(found.lse).max() > 1000


def test_tokens_behind_the_last_request_see_nothing() -> None:
    batch = one_request(5, DraftTree.chain(4))
    arguments = batch.oracle_arguments()
    arguments["qo_indptr"] = np.array([0, 3])
    found = oracle(**arguments)
    assert not found.out[3].any()
    assert np.isneginf(found.lse[3]).all()


def test_what_cannot_be_read_is_refused() -> None:
    batch = one_request(5, DraftTree.chain(4))
    arguments = batch.oracle_arguments()
    for slot in (-1, batch.layout.num_slots):
        slots = arguments["kv_indices"].copy()
        slots[2] = slot
        with pytest.raises(ArgumentError, match=f"kv_indices.*{slot}"):
            oracle(**{**arguments, "kv_indices": slots})
        drafts = arguments["draft_slots"].copy()
        drafts[1] = slot
        with pytest.raises(ArgumentError, match=f"draft_slots.*{slot}"):
            oracle(**{**arguments, "draft_slots": drafts})
    with pytest.raises(ArgumentError, match="visible"):
        oracle(**{**arguments, "visible": arguments["visible"][:, :0]})
    for attend, more in ((oracle, {}), (torch_oracle, {"device": "cpu"})):
        with pytest.raises(ArgumentError, match="draft_kv"):
            attend(**{**arguments, "draft_slots": None}, **more)  # type: ignore[operator]
        with pytest.raises(ArgumentError, match="draft_kv"):
            attend(**arguments, draft_kv=batch.draft_kv(), **more)  # type: ignore[operator]


def test_the_baseline_is_near_and_rounded() -> None:
    batch = one_request(500, DraftTree.random(20, 2))
    exact = oracle(**batch.oracle_arguments())
    baseline = baseline_attention(**batch.oracle_arguments(), device="cpu")
    assert not (baseline.out.astype(np.float32).view(np.uint32) & 0xFFFF).any()
    error = np.abs(baseline.out - exact.out).max()
    assert 1e-5 < error < 1e-2
    assert np.abs(baseline.lse - exact.lse).max() < 1e-5


@gpu
def test_torch_oracle_on_a_gpu_agrees_with_numpy() -> None:
    for batch in drawn(verify_batches(max_tree_tokens=256, max_seq_len=3000), 40):
        arguments = batch.oracle_arguments()
        expected = oracle(**arguments)
        found = torch_oracle(**arguments)
        assert_equal(found, expected.out, expected.lse)
        np.testing.assert_allclose(found.spread, expected.spread, rtol=1e-12, atol=1e-300)


@gpu
def test_torch_oracle_agrees_with_numpy_at_ten_gigaflop() -> None:
    layout = KvLayout.build(seq_lens=[60_000], tree_tokens=[9], placement="scattered")
    batch = VerifyBatch(layout, [DraftTree.random(9, 0)], spread=4.0)
    assert batch.flops > 9e9
    arguments = batch.oracle_arguments()
    expected = oracle(**arguments)
    assert_equal(torch_oracle(**arguments), expected.out, expected.lse, 1e-11)


def one_request(prefix: int, tree: DraftTree, **more: Any) -> VerifyBatch:
    layout = KvLayout.build(
        seq_lens=[prefix], tree_tokens=[tree.num_tokens], placement="scattered", rng=prefix
    )
    batch = VerifyBatch(layout, [tree], latent=32, rope=16)
    return replace(batch, **more)
