"""SGLang's Triton kernel over separate keys and values, as it verifies trees of Llama and Qwen."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from cuverify.peers import Peer
from cuverify.peers.sglang_triton import NAMES as NAMES
from cuverify.peers.sglang_triton import Rows, peer_of

if TYPE_CHECKING:
    from cuverify.gqa_problem import GqaProblem


def load(folder: Path | None) -> list[Peer]:
    """Return the kernel of an installed SGLang, or of the folder."""
    return [peer_of(folder, separate_rows)]


def separate_rows(problem: GqaProblem) -> Rows:
    """Return keys and values of drafts and of the pools."""
    keys, values = problem.pools
    drafts = problem.draft_slots[0]
    return Rows(keys[drafts], values[drafts], keys, values)
