"""Which steps grouped-query verify attention is measured on, and what each must at least take.

A shape's name is that of `cuverify.verify_shapes` with the heads of a rank behind it:
``1x64k:8@4x2`` is one request of 65,536 prefix tokens with a tree of 8, four query heads on each
of two KV heads. ``1x64k:block16@4x2`` is a DFlash drafter's own attention: a block of 16 tokens
that see each other and the whole context.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from cuverify.errors import ArgumentError
from cuverify.verify_shapes import Shape

HEAD_DIM = 128

_HEADS = re.compile(r"([1-9]\d*)x([1-9]\d*)", re.ASCII)


@dataclass(frozen=True)
class GqaShape(Shape):
    """A step of grouped-query verify attention: one layer on one rank, bf16, heads of 128.

    Parameters
    ----------
    prefixes, tree, drafts
        As for `Shape`.
    heads : int
        Query heads of the rank, H: a multiple of `kv_heads`.
    kv_heads : int
        KV heads of the rank.
    """

    kv_heads: int = 1

    def check_heads(self) -> None:
        """Raise if the query heads cannot be shared out."""
        if self.kv_heads < 1:
            raise ArgumentError("kv_heads", self.kv_heads, "wants at least one")
        if self.heads < 1 or self.heads % self.kv_heads:
            raise ArgumentError("heads", self.heads, f"no multiple of {self.kv_heads} KV heads")

    @classmethod
    def parse(cls, name: str) -> GqaShape:
        """Read a name such as ``1x64k:8@4x2``.

        Raises
        ------
        ArgumentError
            It is no such name.
        """
        step, _, heads = name.partition("@")
        found = _HEADS.fullmatch(heads)
        if found is None:
            raise ArgumentError("shapes", name, "a shape reads like 1x64k:8@4x2, heads last")
        base = Shape.parse(step)
        group, kv_heads = int(found[1]), int(found[2])
        if base.name != base.step_name:
            raise ArgumentError("shapes", name, "heads stand behind the @, and pools are bf16")
        return cls(base.prefixes, base.tree, base.drafts, heads=group * kv_heads, kv_heads=kv_heads)

    @property
    def name(self) -> str:
        """The name that `parse` reads."""
        return f"{self.step_name}@{self.group}x{self.kv_heads}"

    @property
    def group(self) -> int:
        """Query heads of a KV head."""
        return self.heads // self.kv_heads

    @property
    def row_bytes(self) -> int:
        """Bytes of a token's keys and values, all KV heads."""
        return 2 * 2 * HEAD_DIM * self.kv_heads

    @property
    def bytes(self) -> int:
        """What must move: each key, value and query once in, each output once out."""
        return self.rows * self.row_bytes + self.tokens * self.heads * 2 * 2 * HEAD_DIM

    @property
    def flops(self) -> int:
        """Operations of both products, hidden pairs of drafts included."""
        return 2 * self.tree * self.heads * self.rows * 2 * HEAD_DIM

    def __str__(self) -> str:
        return self.name


DFLASH_BLOCK = tuple(
    GqaShape.parse(f"1x{prefix}:block16@{heads}")
    for heads in ("8x1", "4x2", "4x8")
    for prefix in ("4k", "64k")
)
"""A DFlash drafter's own attention, for the heads of several ranks."""

GRID = tuple(
    GqaShape.parse(f"{batch}x{prefix}:{tree}@{heads}")
    for heads in ("8x1", "4x2", "4x8")
    for batch in (1, 16)
    for prefix in ("4k", "64k")
    for tree in (8, 16, 64)
)
"""Heads as ranks of Llama and Qwen models have them, by batch, prefix and tree."""

SETS = {"all": (*DFLASH_BLOCK, *GRID), "grid": GRID, "dflash_block": DFLASH_BLOCK}


def select_gqa(wanted: Sequence[str]) -> tuple[GqaShape, ...]:
    """Return the shapes that some sets and names mean, each once, in their order.

    Raises
    ------
    ArgumentError
        A word is neither a set of `SETS` nor a name.
    """
    chosen: dict[GqaShape, None] = {}
    for word in wanted:
        chosen.update(dict.fromkeys(SETS[word] if word in SETS else (GqaShape.parse(word),)))
    return tuple(chosen)
