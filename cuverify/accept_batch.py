"""Inputs of acceptance: trees with tokens, what the target thinks of them, coins; good and bad."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from cuverify.errors import ArgumentError
from cuverify.tree import DraftTree

AcceptRule = Literal["greedy", "plain", "published"]
ACCEPT_RULES: tuple[AcceptRule, ...] = get_args(AcceptRule)


@dataclass(frozen=True, eq=False)
class AcceptBatch:
    """What acceptance reads.

    Attributes
    ----------
    rule : {"greedy", "plain", "published"}
        Greedy, or sampling by the plain or the published rule.
    candidates, next_token, next_sibling, retrieve_index : ndarray of int64, shape (B, n)
    max_path : int
        Most nodes of a path.
    scores : ndarray, shape (B * n, vocabulary)
        Logits (float32, or uint16 as bits of bf16) where greedy, else probabilities in float32; by
        `retrieve_index`.
    uniform : ndarray of float32, shape (B, n)
    uniform_final : ndarray of float32, shape (B,)
    threshold_single, threshold_acc : float
        Of the published rule.
    """

    rule: AcceptRule
    candidates: NDArray[np.int64]
    next_token: NDArray[np.int64]
    next_sibling: NDArray[np.int64]
    retrieve_index: NDArray[np.int64]
    max_path: int
    scores: NDArray[Any]
    uniform: NDArray[np.float32]
    uniform_final: NDArray[np.float32]
    threshold_single: float = 1.0
    threshold_acc: float = 1.0

    @classmethod
    def draw(
        cls,
        rng: np.random.Generator,
        *,
        rule: AcceptRule,
        batch: int,
        num_tokens: int,
        vocabulary: int,
        faulty: float = 0.0,
        spoiled: float = 0.0,
        bf16: bool = False,
    ) -> AcceptBatch:
        """Draw a batch.

        Parameters
        ----------
        rng : numpy.random.Generator
        rule : {"greedy", "plain", "published"}
        batch, num_tokens, vocabulary : int
            Sizes.
        faulty : float
            Share of requests whose links or indices have something wrong with them.
        spoiled : float
            Share of scores that are NaN, infinite or 0.
        bf16 : bool
            Whether logits are bits of bf16.
        """
        if rule not in ACCEPT_RULES:
            raise ArgumentError("rule", rule, f"must be one of {ACCEPT_RULES}")
        nodes = (batch, num_tokens)
        reaches = (None, 1, 2, 4)
        trees = [
            DraftTree.random(num_tokens, rng, reach=reaches[rng.integers(len(reaches))])
            for _ in range(batch)
        ]
        links = [tree.links() for tree in trees]
        next_token, next_sibling = (np.stack(part) for part in zip(*links, strict=True))
        candidates = rng.integers(0, vocabulary, nodes)
        # within each request in any order
        places = (
            np.argsort(rng.random(nodes), axis=1) if rng.random() < 0.5 else np.arange(nodes[1])
        )
        places = np.broadcast_to(places, nodes) + np.arange(batch)[:, None] * num_tokens
        logits = rng.normal(0, 2, (batch * num_tokens, vocabulary)).astype(np.float32)
        # what the target likes best is often a child
        for request, tree in enumerate(trees):
            for node in range(1, num_tokens):
                if rng.random() < 0.7:
                    row = places[request, tree.parents[node]]
                    logits[row, candidates[request, node]] = rng.choice([3.0, 8.0, 12.0])
        scores: NDArray[Any] = logits
        if rule != "greedy":
            powers = np.exp(logits - logits.max(axis=1, keepdims=True))
            scores = (powers / powers.sum(axis=1, keepdims=True)).astype(np.float32)
        odd = rng.random(scores.shape) < spoiled
        scores[odd] = rng.choice([np.nan, np.inf, -np.inf, 0.0, -0.0], int(odd.sum()))
        if bf16:
            scores = (scores.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        links_of = [next_token.copy(), next_sibling.copy(), np.ascontiguousarray(places)]
        for spoilt in np.flatnonzero(rng.random(batch) < faulty):
            broken = links_of[int(rng.integers(3))][spoilt]
            some = rng.integers(0, num_tokens, max(1, num_tokens // 3))
            broken[some] = rng.choice([-2, -1, 0, num_tokens - 1, num_tokens, 2**40], len(some))
            if rng.random() < 0.3:  # a circle of brothers
                links_of[1][spoilt, some] = some
            candidates[spoilt, some] = rng.choice([-1, vocabulary, 2**40, 0], len(some))
        thresholds = ((1.0, 1.0), (0.0, 0.0), (0.3, 0.8), (1.0, 0.5))[int(rng.integers(4))]
        return cls(
            rule, candidates, links_of[0], links_of[1], links_of[2],
            int(rng.integers(1, min(num_tokens, 9) + 1)), scores,
            rng.random(nodes, np.float32), rng.random(batch, np.float32),
            *(thresholds if rule == "published" else (1.0, 1.0)),
        )  # fmt: skip

    def __repr__(self) -> str:
        batch, n = self.candidates.shape
        return (
            f"AcceptBatch({self.rule}: {batch} requests, {n} nodes, path of {self.max_path}, "
            f"{self.scores.shape[1]} tokens, {self.scores.dtype})"
        )
