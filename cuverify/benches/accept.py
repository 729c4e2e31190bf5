"""How long acceptance takes: argmax over the vocabulary, the greedy walk, the sampled one.

A vocabulary of 163,840 tokens, as Kimi K2 has it. In one replayed graph with a cold L2 cache;
beside argmax and the walk what torch and a Python loop take for the same. The floor of argmax is
reading the logits, at copy speed; a walk reads so little that the launch is what counts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from cuverify.bench import copy_floor_us, gated, time_calls, time_graph

VOCABULARY = 163_840
SHAPES = ((1, 17), (1, 65), (1, 257), (16, 65), (64, 65))
"""Requests and nodes."""

MOST_ROWS = 2000  # of argmax; more of them are only more of the same
TARGET_US = {(1, 65): 6.0}
REPEATS = 50
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

    from cuverify.ops.accept import Argmax

    for dtype in (torch.bfloat16, torch.float32):
        logits = torch.randn((rows, VOCABULARY), device="cuda", dtype=torch.float32).to(dtype)
        # one largest logit a row, so that torch, which may take any of equal ones, takes the same
        best = torch.randint(VOCABULARY, (rows,), device="cuda")
        logits[torch.arange(rows, device="cuda"), best] = 40.0
        target = torch.zeros(rows, dtype=torch.int64, device="cuda")
        theirs = torch.zeros_like(target)
        own = Argmax(logits, target)
        moved = logits.numel() * logits.element_size()
        shape: dict[str, int | float | str] = {
            "rows": rows,
            "vocabulary": VOCABULARY,
            "dtype": str(dtype).removeprefix("torch."),
        }

        def torch_argmax(logits: Any = logits, theirs: Any = theirs) -> None:
            torch.argmax(logits, dim=1, out=theirs)

        for peer, call, found in ((None, own, target), ("torch.argmax", torch_argmax, theirs)):

            def check(call: Any = call, found: Any = found, best: Any = best) -> str | None:
                found.fill_(-1)
                call()
                return None if torch.equal(found, best) else "another place is taken"

            yield gated(
                "argmax",
                shape,
                check=check,
                timing=lambda call=call: time_graph(call, REPEATS),  # type: ignore[misc]
                floor_us=copy_floor_us(moved),
                bytes=moved,
                peer=peer,
            )


def _walks(requests: int, nodes: int) -> Iterator[dict[str, Any]]:
    import torch

    from cuverify.accept_batch import AcceptBatch
    from cuverify.baseline import host_accept
    from cuverify.cases.accept import AcceptStep
    from cuverify.validators.compare import compare_all, host_array

    rng = np.random.default_rng([requests, nodes])
    small = 1000  # tokens; walks do not depend on it, and sampling is timed on the whole vocabulary
    batch = AcceptBatch.draw(rng, rule="greedy", batch=requests, num_tokens=nodes, vocabulary=small)
    # the loop in Python knows no other order of nodes
    ordered = np.arange(requests * nodes, dtype=np.int64).reshape(requests, nodes)
    batch = replace(batch, retrieve_index=ordered, max_path=min(nodes, _MAX_PATH))
    step = AcceptStep(batch, "torch-cuda")
    walk = step.launches[1]
    shape: dict[str, int | float | str] = {"batch": requests, "nodes": nodes}
    goal = TARGET_US.get((requests, nodes))

    def check() -> str | None:
        step.poison()
        step()
        outputs = {name: host_array(tensor) for name, tensor in step.outputs.items()}
        wrong = compare_all(outputs, step.expected())
        return str(wrong[0]) if wrong else None

    moved = requests * nodes * 5 * 8 + sum(
        tensor.numel() * tensor.element_size() for tensor in vars(step.into).values()
    )
    yield gated(
        "accept_greedy", shape | ({"target_us": goal} if goal else {}), check=check,
        timing=lambda: time_graph(walk, REPEATS), floor_us=copy_floor_us(moved), bytes=moved,
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
    into = AcceptBuffers.allocate(tokens, batch=requests, num_tokens=nodes, max_path=_MAX_PATH)
    accept = AcceptSampled(tokens, child, sibling, coins, final, probs, into)

    def check() -> str | None:
        from cuverify.reference import accept as oracle

        accept()
        wanted = oracle.accept_sampled(
            *(part.cpu().numpy() for part in (tokens, child, sibling, coins, final, probs)),
            max_path=_MAX_PATH,
        )
        same = (into.predicts.cpu().numpy() == wanted["predicts"]).all()
        return None if same else "predicts differ"

    moved = 4 * VOCABULARY * requests
    return gated(
        "accept_sampled", {"batch": requests, "nodes": nodes, "vocabulary": VOCABULARY},
        check=check, timing=lambda: time_graph(accept, REPEATS),
        floor_us=copy_floor_us(moved), bytes=moved,
    )  # fmt: skip
