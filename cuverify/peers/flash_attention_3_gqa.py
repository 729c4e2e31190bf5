"""FlashAttention 3 over separate keys and values: the composition for trees, one call for a block.

The library and the composition are those of `cuverify.peers.flash_attention_3`. A drafter's block
needs no mask: its tokens see each other and the whole context, so one call attends to both.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuverify.peers import Peer, Prepared
from cuverify.peers.cascade import whole_tables
from cuverify.peers.flash_attention_3 import Calls, Tensors, fastest, library, strongest

if TYPE_CHECKING:
    from cuverify.gqa_problem import GqaProblem

NAMES = ("FA3, strongest composition", "FA3, one call")


def load(folder: Path | None) -> list[Peer]:
    """Return both."""
    calls = library(folder)

    def composed(problem: GqaProblem) -> Prepared:
        return strongest(problem, separate(problem), calls)

    return [
        Peer(NAMES[0], composed, ragged=True),
        Peer(NAMES[1], lambda problem: whole(problem, calls), ragged=True, drafts=("block",)),
    ]


def separate(problem: GqaProblem) -> Tensors:
    """Return what the library is given: pages of one token."""
    keys, values = problem.pools[:, :, None]
    return Tensors(problem.q, None, keys, values)


def whole(problem: GqaProblem, calls: Any) -> Prepared:
    """Return one call over prefix and drafts, with the best number of splits."""
    attention, out = Calls(problem, separate(problem), calls), problem.new_output()
    shape = problem.shape
    tables, used = whole_tables(problem)

    def composition(splits: int) -> Sequence[Callable[[], None]]:
        plan = attention.plan(
            shape.batch, shape.tree, tables[0].shape[1], used, problem.qo_indptr, splits
        )

        def step(table: Any) -> None:
            attention.call(out, problem.qo_indptr, used, shape.tree, table, plan, splits)

        return [functools.partial(step, table) for table in tables]

    return fastest(composition, shape, out)
