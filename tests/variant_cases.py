"""Check cases for each text that the rules of verify attention choose from.

A variant that is added to the rules is in the lists here.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cuverify.cases import Target
from cuverify.cases.verify_attention import SizedBatch, VerifyAttentionStep
from cuverify.cases.verify_gqa import SizedGqaBatch, VerifyGqaStep
from cuverify.gqa_batch import KEY_WIDTH, SM_SCALE, GqaBatch
from cuverify.kernel import Kernel
from cuverify.listed_step import Capacity
from cuverify.narrow import Narrow
from cuverify.ops.verify_attention import least_values, verify_attention_kernels
from cuverify.ops.verify_gqa import ALL_VALUES, ROW_TILES, verify_gqa_kernels
from cuverify.strategies import ELEMENTS
from cuverify.verify_batch import ElementType, VerifyBatch
from cuverify.verify_variants import RANK_HEADS, VARIANTS, VariantName

sys.path.insert(0, str(Path(__file__).parent))
from attention_steps import batch_of

LENGTHS = ([300, 37, 130], [5, 250, 48], [64, 0, 301])
_TREES = [9, 3, 17]


@dataclass(frozen=True)
class Kind:
    """A text, and what it attends to."""

    variant: VariantName
    heads: int
    dtype: ElementType
    kv_scale: float | None
    values: Mapping[str, int] | None = None

    @property
    def pool(self) -> Narrow:
        return self.dtype if self.kv_scale is None else "fp8_e4m3"

    def __str__(self) -> str:
        values = "" if self.values is None else f", {self.values['TILE']} rows a tile"
        return f"{self.variant}, H {self.heads}, {self.pool}{values}"


def _forms(name: VariantName, heads: int) -> list[Mapping[str, int] | None]:
    """Return values for more and for less shared memory, with the fewest heads."""
    if heads > RANK_HEADS[0] or not VARIANTS[name].roomy:
        return [None]
    return [VARIANTS[name].roomy, least_values(name)]


KINDS = [
    Kind(name, heads, *element, values)
    for name, variant in VARIANTS.items()
    for heads in RANK_HEADS
    for element in ELEMENTS[:3]
    for values in _forms(name, heads)
    for pool in (Kind(name, heads, *element).pool,)
    if variant.fits(512, 64, 0.07, pool) and (pool == "bf16" or heads == RANK_HEADS[0])
]
"""All numbers of heads with bf16; all types and all tiles with the fewest heads."""


class OneKind:
    """A check case of three batches that share buffers."""

    def __init__(self, kind: Kind) -> None:
        self.kind, self.name = kind, f"verify_attention, {kind}"

    def kernels(self) -> Sequence[Kernel]:
        return verify_attention_kernels(self.kind.variant, HEADS=self.kind.heads)

    def _batches(self, **width: int) -> Iterator[tuple[str, SizedBatch]]:
        kind = self.kind
        made = [
            batch_of(
                lengths, _TREES, seed=seed, num_slots=700, heads=kind.heads, dtype=kind.dtype,
                kv_scale=kind.kv_scale, **width,
                draft_source=("slots", "separate")[kind.heads // 8 % 2],
            )
            for seed, lengths in enumerate(LENGTHS)
        ]  # fmt: skip
        size = Capacity.of(made)
        for batch in made:
            yield str(batch.layout.seq_lens), SizedBatch(batch, size)

    def batches(self) -> Iterator[tuple[str, SizedBatch]]:
        return self._batches(latent=64, rope=16)

    def device_batches(self, **draw: int) -> Iterator[tuple[str, SizedBatch]]:
        return self._batches(latent=512, rope=64)

    def step(self, batch: SizedBatch, xp: Target) -> VerifyAttentionStep:
        variant, blocks = self.kind.variant, 3 if xp == "numpy" else None
        values = self.kind.values
        return VerifyAttentionStep(batch, xp, variant=variant, num_ctas=blocks, values=values)


@dataclass(frozen=True)
class GqaKind:
    """A text, a row tile, and the `-D` values of the text for it."""

    variant: VariantName
    rows: int
    group: int
    trees: tuple[int, ...]
    values: Mapping[str, int]

    def __str__(self) -> str:
        return ", ".join(
            [self.variant, f"{self.rows} rows", *(f"{n}={v}" for n, v in self.values.items())]
        )


_OF_ROWS = {
    16: (4, (4, 1, 3)), 32: (8, (4, 1, 3)), 64: (5, (9, 3, 17)), 128: (8, (9, 3, 17)),
}  # fmt: skip

GQA_KINDS = [
    *(
        GqaKind("portable", rows, *_OF_ROWS[rows], values[rows])
        for rows in ROW_TILES["portable"]
        for values in ALL_VALUES
    ),
    *(GqaKind("sm90", rows, *_OF_ROWS[rows], {}) for rows in ROW_TILES["sm90"]),
]


class OneGqaKind:
    """A check case of three batches that share buffers, the last one a drafter's block."""

    def __init__(self, kind: GqaKind) -> None:
        self.kind, self.name = kind, f"verify_gqa, {kind}"

    def kernels(self) -> Sequence[Kernel]:
        kind = self.kind
        return verify_gqa_kernels(kind.variant, GROUP=kind.group, ROWS=kind.rows, **kind.values)

    def batches(self) -> Iterator[tuple[str, SizedGqaBatch]]:
        latent, rope = KEY_WIDTH
        made = []
        for seed, lengths in enumerate(LENGTHS):
            base: VerifyBatch = batch_of(
                lengths, self.kind.trees, seed=seed, num_slots=700, heads=8, latent=latent,
                rope=rope, sm_scale=SM_SCALE,
            )  # fmt: skip
            made.append(GqaBatch(base, self.kind.group, 2, "block" if seed == 2 else "tree"))
        size = Capacity.of([batch.base for batch in made])
        for batch in made:
            yield f"{batch.base.layout.seq_lens}, {batch.drafts}", SizedGqaBatch(batch, size)

    def device_batches(self, **draw: int) -> Iterator[tuple[str, SizedGqaBatch]]:
        return self.batches()

    def step(self, batch: SizedGqaBatch, xp: Target) -> VerifyGqaStep:
        blocks = 3 if xp == "numpy" else None
        variant, values = self.kind.variant, self.kind.values
        step = VerifyGqaStep(batch, xp, num_ctas=blocks, variant=variant, values=values)
        assert step.attend.rows == self.kind.rows
        return step
