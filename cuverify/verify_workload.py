"""Realistic batches for verify attention: pools that production traffic churned, drafted trees."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from numpy.typing import NDArray

from cuverify.errors import ArgumentError
from cuverify.kv_layout import KvLayout
from cuverify.reference.tree_build import best_first_tree
from cuverify.tree import DraftTree
from cuverify.verify_batch import VerifyBatch
from cuverify.workload import ChurnedPool, FreeOrder, RequestLengths, Trace, request_lengths

BLOCK = 16
"""Positions that a block-diffusion drafter fills at a time, the root's among them."""


def peaked_logprobs(
    depth: int, k: int, rng: np.random.Generator
) -> tuple[NDArray[np.float32], NDArray[np.int64]]:
    """Draw what a confident drafter gives: the best token takes most, less so at each depth.

    Parameters
    ----------
    depth, k : int
        Positions, and tokens of each.
    rng : numpy.random.Generator

    Returns
    -------
    logprobs : ndarray of float32, shape (depth, k)
        Descending in each row; the best token of the first position has 0.7 in the mean, and the
        others fall like a power law.
    tokens : ndarray of int64, shape (depth, k)
    """
    best = rng.beta(5.0, 2.0, (depth, 1)) * 0.95 ** np.arange(depth)[:, None]
    others = np.arange(1, k) ** -1.5 * np.exp(0.3 * rng.standard_normal((depth, k - 1)))
    others *= (1.0 - best) / (others.sum(axis=1, keepdims=True) + 0.05)
    both = np.concatenate([best, others], axis=1)
    both.sort(axis=1)
    tokens = np.broadcast_to(np.arange(k), (depth, k)) + k * np.arange(depth)[:, None]
    return np.log(both[:, ::-1]).astype(np.float32), tokens.astype(np.int64)


def drafted_tree(
    num_tokens: int, rng: np.random.Generator | int, *, depth: int = BLOCK - 1
) -> DraftTree:
    """Return the best-first tree of a drafter's log-probabilities, as DDTree makes it.

    Parameters
    ----------
    num_tokens : int
        T, the budget and the root.
    rng : numpy.random.Generator or int
        Where to draw `peaked_logprobs` from, or a seed.
    depth : int
        Most edges below the root.

    Returns
    -------
    DraftTree
        With tokens.

    Raises
    ------
    ArgumentError
        There is no node, or no depth.
    """
    if num_tokens < 1:
        raise ArgumentError("num_tokens", num_tokens, "a tree has at least its root")
    if depth < 1:
        raise ArgumentError("depth", depth, "a tree grows below its root")
    budget = num_tokens - 1
    logprobs, tokens = peaked_logprobs(depth, max(1, budget), np.random.default_rng(rng))
    tree = best_first_tree(logprobs, tokens, budget)
    return DraftTree.from_parents(tree.parents, tree.tokens)


def long_requests(
    longest: int, trace: Trace = "conv", *, shortest: int = 1, count: int = 2000, seed: int = 0
) -> RequestLengths:
    """Return the request lengths of a trace with its prompts drawn out to long contexts.

    Parameters
    ----------
    longest : int
        Tokens of the longest prompt. The others keep their share of it.
    shortest : int
        Requests with shorter prompts are left out.
    trace, count, seed
        As in `cuverify.workload.request_lengths`; `count` before any are left out.

    Returns
    -------
    RequestLengths
    """
    lengths = request_lengths(trace, count=count, seed=seed)
    scale = longest / int(lengths.prompt.max())
    prompt = np.maximum(1, np.rint(lengths.prompt * scale)).astype(np.int64)
    kept = prompt >= min(shortest, longest)
    return RequestLengths(
        prompt[kept], lengths.generated[kept], f"{lengths.source}, prompts times {scale:.1f}"
    )


def real_verify_batches(
    num_slots: int,
    *,
    requests: int,
    tree_tokens: int,
    steps: int = 2,
    padded: int = 0,
    lengths: RequestLengths | None = None,
    free_list: FreeOrder = "fifo",
    turnover: float = 3.0,
    seed: int = 0,
    heads: int = 8,
    latent: int = 512,
    rope: int = 64,
) -> Iterator[VerifyBatch]:
    """Yield decode steps of one churned pool: its slots and lengths, and a drafted tree a request.

    Parameters
    ----------
    num_slots : int
        Slots of the pool.
    requests : int
        Most real requests of a batch: the oldest that run.
    tree_tokens : int
        Nodes of every tree, as a step of a server has them.
    steps : int
        Batches; the pool takes a few steps between two of them.
    padded : int
        Padded requests.
    lengths : RequestLengths, optional
        The requests; as they come in conversations if absent.
    free_list, turnover, seed
        See `cuverify.workload.ChurnedPool`.
    heads, latent, rope : int
        See `cuverify.verify_batch.VerifyBatch`.

    Yields
    ------
    VerifyBatch
    """
    rng = np.random.default_rng([seed, 0x7E41])
    pool = ChurnedPool(
        num_slots,
        lengths=lengths,
        tree_tokens=tree_tokens,
        free_list=free_list,
        # windows of all requests must find room; more requests than are taken would only age it
        max_running=min(4 * requests, num_slots // (2 * tree_tokens)),
        seed=seed,
    )
    pool.churn(turnover)
    for step in range(steps):
        layout = KvLayout.from_pool(pool, max_requests=requests, padded=padded, rng=rng)
        trees = [drafted_tree(tree_tokens, rng) for _ in range(layout.num_requests)]
        yield VerifyBatch(
            layout,
            tuple(trees),
            heads=heads,
            latent=latent,
            rope=rope,
            seed=seed + step,
            spread=2.0,
            draft_source="slots" if step % 2 == 0 else "separate",
            index_dtype="int32",
            kind=f"churned, {free_list}",
        )
        for _ in range(3):
            pool.step()
