"""Which steps verify attention is measured on, and what the hardware must at least do for each.

A shape has a short name: ``16x1k:8`` is sixteen requests of 1,024 prefix rows with trees of 8
tokens, ``1x180k+15x1k:8`` a batch of very different lengths, ``1x64k:block16`` a drafter's block of
16 tokens that see each other fully. ``k`` is 1,024. ``1x4k:8/h128`` has 128 query heads and not 8,
``1x4k:8/fp16`` half precision for bf16, ``1x4k:8/h64/fp8`` codes of e4m3 in the pool.
"""

from __future__ import annotations

import fnmatch
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from cuverify.errors import ArgumentError

Drafts = Literal["tree", "block"]
Stored = Literal["bf16", "fp16", "fp8"]

LATENT, ROPE = 512, 64
WIDTH = LATENT + ROPE
HEADS = 8

MOST_ROWS = 300_000
"""Prefix rows of all requests together, at most, in the grid."""

_KILO = 1024
_GROUP = re.compile(r"([1-9]\d*)x([1-9]\d*)(k?)", re.ASCII)
_TREE = re.compile(r"(block)?([1-9]\d*)(?:/h([1-9]\d*))?(?:/(fp16|fp8))?", re.ASCII)


@dataclass(frozen=True)
class Shape:
    """A step of verify attention: one layer of absorbed MLA on one rank, page size 1.

    Parameters
    ----------
    prefixes : tuple of int
        KV rows of each request's prefix, B of them.
    tree : int
        Tokens of each request's tree, T.
    drafts : {"tree", "block"}
        Whether draft tokens see their ancestors, or all of them each other.
    heads : int
        Query heads of the rank, H.
    stored : {"bf16", "fp16", "fp8"}
        The type of all tensors; fp8: the pool holds codes of e4m3, all others are bf16.
    """

    prefixes: tuple[int, ...]
    tree: int
    drafts: Drafts = "tree"
    heads: int = HEADS
    stored: Stored = "bf16"

    def __post_init__(self) -> None:
        if not self.prefixes or min(self.prefixes) < 1:
            raise ArgumentError("prefixes", self.prefixes, "each request has a prefix")
        if self.tree < 1:
            raise ArgumentError("tree", self.tree, "a tree has at least its root")
        if self.drafts not in get_args(Drafts):
            raise ArgumentError("drafts", self.drafts, f"must be one of {get_args(Drafts)}")
        if self.stored not in get_args(Stored):
            raise ArgumentError("stored", self.stored, f"must be one of {get_args(Stored)}")
        self.check_heads()

    def check_heads(self) -> None:
        """Raise if a rank cannot have so many query heads."""
        if self.heads < 8 or self.heads % 8:
            raise ArgumentError("heads", self.heads, "must be a multiple of 8")

    @classmethod
    def parse(cls, name: str) -> Shape:
        """Read a name such as ``16x1k:8``.

        Raises
        ------
        ArgumentError
            It is no such name.
        """
        lengths, colon, tree = name.partition(":")
        groups = [_GROUP.fullmatch(part) for part in lengths.split("+")]
        drafts = _TREE.fullmatch(tree)
        if not colon or drafts is None or not all(groups):
            raise ArgumentError("shapes", name, "a shape reads like 16x1k:8, 1x180k+15x1k:33")
        prefixes: list[int] = []
        for group in groups:
            assert group is not None
            rows = int(group[2]) * (_KILO if group[3] else 1)
            prefixes.extend([rows] * int(group[1]))
        stored = next(kind for kind in get_args(Stored) if kind == (drafts[4] or "bf16"))
        kind: Drafts = "block" if drafts[1] else "tree"
        return cls(tuple(prefixes), int(drafts[2]), kind, int(drafts[3] or HEADS), stored)

    @property
    def name(self) -> str:
        """The short name that `parse` reads."""
        heads = "" if self.heads == HEADS else f"/h{self.heads}"
        stored = "" if self.stored == "bf16" else f"/{self.stored}"
        return f"{self.step_name}{heads}{stored}"

    @property
    def step_name(self) -> str:
        """The name without heads and types: prefixes and drafts."""
        groups: list[list[int]] = []
        for rows in self.prefixes:
            if groups and groups[-1][1] == rows:
                groups[-1][0] += 1
            else:
                groups.append([1, rows])
        lengths = "+".join(f"{count}x{short(rows)}" for count, rows in groups)
        return f"{lengths}:{'block' if self.drafts == 'block' else ''}{self.tree}"

    @property
    def batch(self) -> int:
        """Requests, B."""
        return len(self.prefixes)

    @property
    def equal(self) -> bool:
        """Whether all prefixes are equally long."""
        return len(set(self.prefixes)) == 1

    @property
    def prefix_rows(self) -> int:
        """KV rows of all prefixes together."""
        return sum(self.prefixes)

    @property
    def tokens(self) -> int:
        """Draft tokens of all requests together, N."""
        return self.batch * self.tree

    @property
    def rows(self) -> int:
        """KV rows that the step reads, drafts included."""
        return self.prefix_rows + self.tokens

    @property
    def bytes(self) -> int:
        """What must move: each KV row and each query once in, each output once out."""
        row = WIDTH if self.stored == "fp8" else 2 * WIDTH
        return self.rows * row + self.tokens * self.heads * 2 * (WIDTH + LATENT)

    @property
    def flops(self) -> int:
        """Operations of both products, hidden pairs of drafts included."""
        return 2 * self.tree * self.heads * self.rows * (WIDTH + LATENT)

    def roofline_us(self, bytes_a_second: float, flops_a_second: float) -> float:
        """Return the microseconds below which nobody can be."""
        return 1e6 * max(self.bytes / bytes_a_second, self.flops / flops_a_second)

    def memory_bound(self, bytes_a_second: float, flops_a_second: float) -> bool:
        """Whether moving the bytes takes longer than the products."""
        return self.bytes / bytes_a_second >= self.flops / flops_a_second

    def copies(self, slots: int, most: int = 16) -> int:
        """Return how many copies of the step find slots of their own in a pool."""
        return max(1, min(most, slots // self.rows))

    def __str__(self) -> str:
        return self.name


def short(rows: int) -> str:
    """Return a number of rows as names hold it: ``64k`` for 65,536."""
    return f"{rows // _KILO}k" if rows % _KILO == 0 else str(rows)


def _grid(trees: Sequence[int]) -> tuple[Shape, ...]:
    return tuple(
        Shape((prefix * _KILO,) * batch, tree)
        for batch in (1, 4, 16)
        for prefix in (1, 4, 16, 64, 180)
        for tree in trees
        if batch * prefix * _KILO <= MOST_ROWS
    )


GRID = _grid((1, 8, 16, 32, 64))
"""60 shapes, the ones that attention kernels are compared on."""

WIDE = tuple(shape for tree in (33, 17, 65, 129) for shape in _grid((tree,)))
"""The same prefixes with trees as drafters make them: a budget and a root."""

# the same number of prefix rows in all
RAGGED = Shape((180 * _KILO, *[_KILO] * 15), 8)
LEVEL = Shape((sum(RAGGED.prefixes) // 16,) * 16, 8)

BLOCK = tuple(Shape((prefix * _KILO,), 16, "block") for prefix in (4, 64))
"""A block-diffusion drafter's own attention: 16 tokens that see each other and the context."""

HEADED = tuple(
    Shape((prefix * _KILO,), tree, heads=heads)
    for heads in (64, 128)
    for prefix in (4, 64)
    for tree in (1, 8)
)
"""All heads of a model on one rank, as with data-parallel attention."""

STORED = tuple(
    Shape((prefix * _KILO,), 8, heads=heads, stored=stored)
    for stored in ("fp16", "fp8")
    for heads in (8, 128)
    for prefix in (4, 64)
)
"""Pools of other element types."""

ALL = (RAGGED, LEVEL, *BLOCK, *GRID, *WIDE)
"""In this order: where the time does not suffice, the last ones are left out."""

SETS = {
    "all": ALL,
    "grid": GRID,
    "wide": WIDE,
    "ragged": (RAGGED, LEVEL),
    "block": BLOCK,
    "heads": HEADED,
    "stored": STORED,
}

TARGETS_US = {
    "1x1k:8": 8.0, "1x4k:8": 10.5, "1x16k:8": 16.0, "1x64k:8": 33.0, "1x180k:8": 66.0,
    "1x64k:16": 41.0, "1x64k:33": 75.0, "1x64k:64": 120.0, "1x180k:64": 318.0,
    "16x16k:8": 88.0, "16x16k:33": 275.0, "16x16k:64": 455.0,
}  # fmt: skip
"""Microseconds that are aimed at on an H200, by a shape's name."""


def select(wanted: Sequence[str]) -> tuple[Shape, ...]:
    """Return the shapes that some names, patterns and sets mean, each once, in their order.

    Parameters
    ----------
    wanted : sequence of str
        A set of `SETS`, a pattern of names in `ALL` such as ``1x*:8``, or the name of any shape.

    Raises
    ------
    ArgumentError
        A pattern matches nothing, or a name is none.
    """
    chosen: dict[Shape, None] = {}
    for word in wanted:
        if word in SETS:
            found: tuple[Shape, ...] = SETS[word]
        elif any(sign in word for sign in "*?["):
            found = tuple(shape for shape in ALL if fnmatch.fnmatchcase(shape.name, word))
            if not found:
                raise ArgumentError("shapes", word, f"no shape's name is like it; {_known()}")
        else:
            found = (Shape.parse(word),)
        chosen.update(dict.fromkeys(found))
    return tuple(chosen)


def _known() -> str:
    return f"sets are {', '.join(SETS)}, and names read like {', '.join(map(str, ALL[5:8]))}"
