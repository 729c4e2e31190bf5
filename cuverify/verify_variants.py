"""The texts that attend, and the rule that chooses one.

All of them do the same job, by the same plan and with the same results within the published
tolerances. `choose_variant` looks at what is known when a layer is made: the
GPU, the columns, the type of the pool and the scale. Lengths and the number of tree tokens change
from step to step; the plan follows them on the device.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

from cuverify.compile import capability_of
from cuverify.narrow import Narrow

VariantName = Literal["portable", "sm90"]

RANK_HEADS = (8, 16, 64, 128)
"""Query heads of a rank, as models and their parallel forms have them; others work as well."""


@dataclass(frozen=True)
class Variant:
    """One text.

    Attributes
    ----------
    stem : str
        Of the file in kernels_cu.
    kernels : tuple of str
        The two kernels in it, in the order of their launches.
    threads : int
        Of a block of the first.
    columns : tuple of int, or None
        The only latent and rope columns; None where all are possible.
    codes : bool
        Whether the pool may hold codes of e4m3.
    starts : bool
        Whether its blocks read what `VerifyStarts` lays out.
    plan : mapping of str to int
        `-D` values of kernels_cu/verify_plan.cu that were found to be best for it.
    roomy : mapping of str to int
        `-D` values of the text where a multiprocessor has room for a block with them.
    """

    stem: str
    kernels: tuple[str, str]
    threads: int
    columns: tuple[int, int] | None = None
    codes: bool = True
    starts: bool = False
    plan: Mapping[str, int] = field(default_factory=dict)
    roomy: Mapping[str, int] = field(default_factory=dict)

    def fits(self, latent: int, rope: int, sm_scale: float, pool: Narrow = "bf16") -> bool:
        """Tell whether the text can attend; one with fixed columns wants a positive scale, too."""
        if pool == "fp8_e4m3" and not self.codes:
            return False
        return self.columns is None or (self.columns == (latent, rope) and sm_scale > 0)


VARIANTS: Mapping[VariantName, Variant] = {
    "portable": Variant(
        "verify_attention",
        ("verify_partials", "verify_combine"),
        384,
        plan={"START_ROWS": 112, "LEAST_ROWS": 16, "GRAIN": 32, "ROOT_HALVES": 2},
        roomy={"TILE": 32, "STAGES": 4, "QUERIES_SHARED": 8},
    ),
    "sm90": Variant(
        "verify_attention_sm90",
        ("verify_partials_sm90", "verify_combine_sm90"),
        512,
        columns=(512, 64),
        codes=False,
        starts=True,
        plan={
            "START_ROWS": 144,
            "LEAST_ROWS": 16,
            "GRAIN": 48,
            "HALVES_ROWS": 240,
            "ROOT_HALVES": 2,
        },
    ),
}


GQA_VARIANTS: Mapping[VariantName, Variant] = {
    "portable": Variant(
        "verify_gqa",
        ("verify_gqa_partials", "verify_gqa_combine"),
        128,
        plan={"GRAIN": 32, "ROOT_HALVES": 2},
    ),
    "sm90": Variant(
        "verify_gqa_sm90",
        ("verify_gqa_partials_sm90", "verify_gqa_combine_sm90"),
        384,
        plan={"START_ROWS": 384, "GRAIN": 64, "ROOT_HALVES": 3},
    ),
}
"""The texts for keys and values that are apart."""


def variant_of(architecture: tuple[int, int] | None) -> VariantName:
    """Return the text that is fastest on a GPU where the columns allow it.

    Parameters
    ----------
    architecture : tuple of two int, or None
        Compute capability; None for the host lane.
    """
    return "sm90" if architecture == (9, 0) else "portable"


def variants_for(arch: str) -> tuple[VariantName, ...]:
    """Return the texts that the rule can take on an architecture such as ``sm_90a``."""
    best = variant_of(capability_of(arch))
    return (best,) if best == "portable" else (best, "portable")


def choose_variant(
    architecture: tuple[int, int] | None,
    *,
    latent: int,
    rope: int,
    sm_scale: float,
    pool: Narrow = "bf16",
) -> VariantName:
    """Return the text that attends.

    Parameters
    ----------
    architecture : tuple of two int, or None
        Compute capability of the GPU; None for the host lane.
    latent, rope : int
        Columns of V, and further ones of K.
    sm_scale : float
        Factor of the scores.
    pool : {"bf16", "fp16", "fp8_e4m3"}
        What its rows are made of.
    """
    best = variant_of(architecture)
    return best if VARIANTS[best].fits(latent, rope, sm_scale, pool) else "portable"


def choose_gqa_variant(
    architecture: tuple[int, int] | None, *, rows: int | None = None
) -> VariantName:
    """Return the text that attends to keys and values that are apart.

    Parameters
    ----------
    architecture : tuple of two int, or None
        Compute capability of the GPU; None for the host lane.
    rows : int, optional
        Query rows of a row tile, where they are given. A warpgroup of Hopper GPUs multiplies 64,
        and is faster than the portable text with fewer of them, too.
    """
    return variant_of(architecture) if rows is None or rows >= 64 else "portable"
