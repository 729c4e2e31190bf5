"""How long a drafter's top-k takes: 15 depths over the vocabulary of Kimi K2, and torch beside it.

`us` is one of them among others: copies over logits of their own in one replayed graph, with a cold
L2 cache. The floor is reading the logits at copy speed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from typing import Any

from cuverify.bench import copy_floor_us, gated_copies

VOCABULARY = 163_840
SHAPES = ((1, 16), (1, 64), (16, 16))
"""Requests, and tokens of each of 15 depths."""

COPIES = 16
REPEATS = 20
_DEPTH = 15


def run(device: str) -> list[dict[str, Any]]:
    """Time it on a GPU; nothing on a CPU, where the host lane says nothing about speed."""
    if device != "cuda":
        return []
    records: list[dict[str, Any]] = []
    for requests, ranks in SHAPES:
        records.extend(_topk(requests, ranks))
    return records


def _topk(requests: int, ranks: int) -> Iterator[dict[str, Any]]:
    copies = [_Drafts(requests, ranks) for _ in range(COPIES)]
    moved = 2 * requests * _DEPTH * VOCABULARY
    for peer, way in ((None, "topk"), ("torch: topk and logsumexp", "by_torch")):
        yield gated_copies(
            "draft_topk",
            {"batch": requests, "depth": _DEPTH, "k": ranks, "vocabulary": VOCABULARY},
            check=functools.partial(_judge, (copies[0], copies[-1]), way),
            steps=[getattr(own, way) for own in copies],
            repeats=REPEATS,
            floor_us=copy_floor_us(moved),
            bytes=moved,
            peer=peer,
        )


class _Drafts:
    """Logits of one step, and what is made of them."""

    def __init__(self, requests: int, ranks: int) -> None:
        import torch

        from cuverify.ops.draft_topk import DraftTopk

        shape = (requests, _DEPTH)
        self.ranks = ranks
        self.logits = torch.randn((*shape, VOCABULARY), device="cuda").to(torch.bfloat16)
        self.logprobs = torch.empty((*shape, ranks), device="cuda")
        self.token_ids = torch.empty((*shape, ranks), dtype=torch.int64, device="cuda")
        self.topk = DraftTopk(self.logits, self.logprobs, self.token_ids)

    def by_torch(self) -> None:
        import torch

        best, ids = torch.topk(self.logits, self.ranks, dim=2, sorted=True)
        norm = torch.logsumexp(self.logits.float(), dim=2, keepdim=True)
        torch.sub(best.float(), norm, out=self.logprobs)
        self.token_ids.copy_(ids)


def _judge(copies: Sequence[_Drafts], way: str) -> str | None:
    """Compare with a stable sort and sums in float64, all on the GPU."""
    import torch

    from cuverify.tolerances import DRAFT_LOGPROBS
    from cuverify.validators.compare import compare, host_array

    for own in copies:
        own.token_ids.fill_(-1)
        getattr(own, way)()
        best, order = torch.sort(own.logits.float(), dim=2, descending=True, stable=True)
        norm = torch.logsumexp(own.logits.double(), dim=2, keepdim=True)
        logprobs = (best[..., : own.ranks].double() - norm).float().cpu().numpy()
        tokens = order[..., : own.ranks].cpu().numpy()
        wrong = compare("logprobs", host_array(own.logprobs), logprobs, DRAFT_LOGPROBS)
        if wrong is None and way == "topk":  # torch may take any of equal logits
            wrong = compare("token_ids", host_array(own.token_ids), tokens)
        if wrong is not None:
            return str(wrong)
    return None
