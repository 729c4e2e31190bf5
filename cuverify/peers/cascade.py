"""Compositions for kernels without a tree mask: prefix and drafts apart, then merged.

The prefix is attended by all tokens of a request at once. For the drafts each tree token is a
request of its own, whose keys are those drafts that it sees.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cuverify.verify_problem import slot_table

if TYPE_CHECKING:
    from cuverify.gqa_problem import GqaProblem
    from cuverify.verify_problem import Problem


def seen_counts(sees: list[NDArray[np.bool_]]) -> NDArray[np.int32]:
    """Return how many drafts each token sees: int32, shape (N,)."""
    return np.concatenate([mask.sum(axis=1) for mask in sees]).astype(np.int32)


def seen_first(sees: list[NDArray[np.bool_]]) -> NDArray[np.int64]:
    """Return each token's drafts, those that it sees first: places in the batch, shape (N, T)."""
    order = [np.argsort(~mask, axis=1, kind="stable") for mask in sees]
    firsts = np.cumsum([0, *(len(mask) for mask in sees)])
    return np.concatenate([places + first for places, first in zip(order, firsts, strict=False)])


def forked(main: Callable[[], Any], side: Callable[[], Any], stream: Any) -> tuple[Any, Any]:
    """Run `side` on a branch beside `main`, and join them; returns what both returned."""
    import torch

    current = torch.cuda.current_stream()
    stream.wait_stream(current)
    with torch.cuda.stream(stream):
        branch = side()
    trunk = main()
    current.wait_stream(stream)
    return trunk, branch


def prefix_tables(problem: Problem | GqaProblem) -> list[Any]:
    """Return for each copy the slots of each request's prefix: int32, (B, longest prefix)."""
    return [slot_table(slots, problem.shape.prefixes) for slots in problem.prefix_slots]


def whole_tables(problem: Problem | GqaProblem) -> tuple[list[Any], Any]:
    """Return for each copy the slots of prefix and drafts of each request, and their counts."""
    import torch

    shape = problem.shape
    lengths = [rows + shape.tree for rows in shape.prefixes]
    tables = []
    for prefix, drafts in zip(problem.prefix_slots, problem.draft_slots, strict=True):
        parts = zip(prefix.split(list(shape.prefixes)), drafts.int().split(shape.tree), strict=True)
        tables.append(slot_table(torch.cat([torch.cat(part) for part in parts]), lengths))
    return tables, torch.tensor(lengths, dtype=torch.int32, device=problem.q.device)


def tail_tables(problem: Problem | GqaProblem) -> tuple[list[Any], Any]:
    """Return for each copy the slots of each token's drafts [N, T] int32, and the counts (N,)."""
    import torch

    places = torch.from_numpy(seen_first(problem.sees)).to(problem.q.device)
    counts = torch.from_numpy(seen_counts(problem.sees)).to(problem.q.device)
    return [slots[places].int().contiguous() for slots in problem.draft_slots], counts
