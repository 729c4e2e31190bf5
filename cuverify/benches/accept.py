"""How long acceptance takes: argmax over the vocabulary, the greedy walk, the sampled one.

A vocabulary of 163,840 tokens, as Kimi K2 has it. `us` is one of them among others: copies over
buffers of their own in one replayed graph, with a cold L2 cache. Beside argmax and the walk stands
what torch and a Python loop take for the same. The floors of argmax are reading the logits at copy
speed, and what it took in the same run to read them and do nothing else; a walk reads so little
that the launch is what counts.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from cuverify.bench import copy_floor_us, first_wrong, gated, gated_copies, time_calls
from cuverify.benches.verify_attention import judge_reading
from cuverify.comparison import READING

VOCABULARY = 163_840
SHAPES = ((1, 17), (1, 65), (1, 257), (16, 65), (64, 65))
"""Requests and nodes."""

MOST_ROWS = 2000  # of argmax; more of them are only more of the same
TARGET_US = {(1, 65): 6.0}
COPIES = 16
MOST_BYTES = 2 << 30  # of all copies of the logits
REPEATS = 20
_HOST_REPEATS = 3
_MAX_PATH = 16


def run(device: str) -> list[dict[str, Any]]:
    """Time acceptance on a GPU; nothing on a CPU, where the host lane says nothing about speed."""
    if device != "cuda":
        return []
    records: list[dict[str, Any]] = []
    for requests, nodes in SHAPES:
        if requests * nodes <= MOST_ROWS:
            records.extend(_argmax(requests * nodes))
        records.extend(_walks(requests, nodes))
    return records


def _argmax(rows: int) -> Iterator[dict[str, Any]]:
    import torch

    for dtype in (torch.bfloat16, torch.float32):
        moved = rows * VOCABULARY * dtype.itemsize
        copies = [_Rows(rows, dtype) for _ in range(max(1, min(COPIES, MOST_BYTES // moved)))]
        shape: dict[str, int | float | str] = {
            "rows": rows,
            "vocabulary": VOCABULARY,
            "dtype": str(dtype).removeprefix("torch."),
            "copies": len(copies),
        }
        read_us = None
        for peer, way in ((READING, "read"), (None, "argmax"), ("torch.argmax", "by_torch")):
            row = gated_copies(
                "argmax",
                shape,
                check=functools.partial(_judge, (copies[0], copies[-1]), way),
                steps=[getattr(own, way) for own in copies],
                repeats=REPEATS,
                floor_us=copy_floor_us(moved),
                bytes=moved,
                peer=peer,
                read_us=read_us,
            )
            if peer == READING:
                read_us = row["us"]
            yield row


class _Rows:
    """Logits of some rows, and what is done with them."""

    def __init__(self, rows: int, dtype: Any) -> None:
        import torch

        from cuverify.ceilings import read_step
        from cuverify.ops.accept import Argmax

        logits = torch.randn((rows, VOCABULARY), device="cuda", dtype=torch.float32).to(dtype)
        # one largest logit a row, so that torch, which may take any of equal ones, takes the same
        self.best = torch.randint(VOCABULARY, (rows,), device="cuda")
        logits[torch.arange(rows, device="cuda"), self.best] = 40.0
        self.logits = logits
        self.target = torch.zeros(rows, dtype=torch.int64, device="cuda")
        self.argmax = Argmax(logits, self.target)
        self.words = logits.view(torch.bfloat16)
        numbers = torch.arange(rows, dtype=torch.int32, device="cuda")
        self.read, self.found = read_step(self.words, numbers)

    def by_torch(self) -> None:
        import torch

        torch.argmax(self.logits, dim=1, out=self.target)


def _judge(copies: Sequence[_Rows], way: str) -> str | None:
    import torch

    for own in copies:
        own.target.fill_(-1)
        getattr(own, way)()
        wrong: str | None = None
        if way == "read":
            wrong = judge_reading(own.found, own.words)
        elif not torch.equal(own.target, own.best):
            wrong = "another place is taken"
        if wrong is not None:
            return wrong
    return None


def _walks(requests: int, nodes: int) -> Iterator[dict[str, Any]]:
    import torch

    from cuverify.accept_batch import AcceptBatch
    from cuverify.baseline import host_accept
    from cuverify.cases.accept import AcceptStep

    rng = np.random.default_rng([requests, nodes])
    small = 1000  # tokens; walks do not depend on it, and sampling is timed on the whole vocabulary
    batch = AcceptBatch.draw(rng, rule="greedy", batch=requests, num_tokens=nodes, vocabulary=small)
    # the loop in Python knows no other order of nodes
    ordered = np.arange(requests * nodes, dtype=np.int64).reshape(requests, nodes)
    batch = replace(batch, retrieve_index=ordered, max_path=min(nodes, _MAX_PATH))
    steps = [AcceptStep(batch, "torch-cuda") for _ in range(COPIES)]
    step = steps[0]
    shape: dict[str, int | float | str] = {"batch": requests, "nodes": nodes}
    goal = TARGET_US.get((requests, nodes))

    def check() -> str | None:
        return first_wrong(steps)  # all of them: walks need what their argmax has chosen

    walks = [own.launches[1] for own in steps]
    moved = requests * nodes * 5 * 8 + sum(
        tensor.numel() * tensor.element_size() for tensor in vars(step.into).values()
    )
    yield gated_copies(
        "accept_greedy", shape | ({"target_us": goal} if goal else {}), check=check,
        floor_us=copy_floor_us(moved), bytes=moved, steps=walks, repeats=REPEATS,
    )  # fmt: skip

    def on_host() -> tuple[Any, Any, Any]:
        return host_accept(
            step.inputs["candidates"], step.inputs["next_token"], step.inputs["next_sibling"],
            step.written["target"], max_path=batch.max_path,
        )  # fmt: skip

    def host_check() -> str | None:
        step()
        names = ("predicts", "accept_index", "accept_token_num")
        for name, found in zip(names, on_host(), strict=True):
            if not torch.equal(found, getattr(step.into, name)):
                return f"{name} differs"
        return None

    if requests == 1:
        yield gated(
            "accept_greedy", shape, check=host_check,
            timing=lambda: time_calls(on_host, repeats=_HOST_REPEATS),
            peer="Python: .item() at every node",
        )  # fmt: skip
        yield _sampled(requests, nodes)


def _sampled(requests: int, nodes: int) -> dict[str, Any]:
    import torch

    from cuverify.ops.accept import AcceptBuffers, AcceptSampled
    from cuverify.tree import DraftTree

    tree = DraftTree.random(nodes, nodes)
    child, sibling = (torch.from_numpy(part).cuda().repeat(requests, 1) for part in tree.links())
    tokens = torch.randint(VOCABULARY, (requests, nodes), device="cuda")
    logits = torch.randn((requests, nodes, VOCABULARY), device="cuda")
    probs = torch.softmax(logits, dim=2)
    coins = torch.rand((requests, nodes), device="cuda")
    final = torch.rand(requests, device="cuda")
    moved = 4 * VOCABULARY * requests
    rows = [probs] + [probs.clone() for _ in range(min(COPIES, MOST_BYTES // (moved * nodes)) - 1)]
    into = [
        AcceptBuffers.allocate(tokens, batch=requests, num_tokens=nodes, max_path=_MAX_PATH)
        for _ in rows
    ]
    steps = [
        AcceptSampled(tokens, child, sibling, coins, final, own, to)
        for own, to in zip(rows, into, strict=True)
    ]

    def check() -> str | None:
        from cuverify.reference import accept as oracle

        wanted = oracle.accept_sampled(
            *(part.cpu().numpy() for part in (tokens, child, sibling, coins, final, probs)),
            max_path=_MAX_PATH,
        )
        for step, to in ((steps[0], into[0]), (steps[-1], into[-1])):
            step()
            if (to.predicts.cpu().numpy() != wanted["predicts"]).any():
                return "predicts differ"
        return None

    return gated_copies(
        "accept_sampled", {"batch": requests, "nodes": nodes, "vocabulary": VOCABULARY},
        check=check, floor_us=copy_floor_us(moved), bytes=moved, steps=steps, repeats=REPEATS,
    )  # fmt: skip
