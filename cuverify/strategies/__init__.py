"""Hypothesis strategies for the inputs of kernels that verify trees and move KV.

They keep Hypothesis's own manners: bounds are keywords in min/max pairs, a bound that makes no
sense is an `InvalidArgument` when an example is drawn, what is drawn prints readably, and examples
shrink towards the simplest: the smallest list of the lowest slots, a tree of one node, a pool in
which a request's tokens lie in order.
"""

from __future__ import annotations

from cuverify.strategies.draws import drawn, examples
from cuverify.strategies.holders import (
    COMMIT_WAYS,
    commit_batches,
    defrag_batches,
    slot_chains,
)
from cuverify.strategies.relocation import (
    FAULTS,
    MOVE_SHAPES,
    ROW_BYTES,
    Fault,
    MoveShape,
    faulty_relocation_batches,
    relocation_batches,
)
from cuverify.strategies.steps import decode_steps, draft_batches
from cuverify.strategies.trees import TREE_SHAPES, TreeShape, draft_trees
from cuverify.strategies.verify import ELEMENTS, kv_layouts, verify_batches

__all__ = [
    "COMMIT_WAYS",
    "ELEMENTS",
    "FAULTS",
    "MOVE_SHAPES",
    "ROW_BYTES",
    "TREE_SHAPES",
    "Fault",
    "MoveShape",
    "TreeShape",
    "commit_batches",
    "decode_steps",
    "defrag_batches",
    "draft_batches",
    "draft_trees",
    "drawn",
    "examples",
    "faulty_relocation_batches",
    "kv_layouts",
    "relocation_batches",
    "slot_chains",
    "verify_batches",
]
