"""How far a result may be from the right one: the published table, and the bounds of attention.

``python -m cuverify.tolerances > docs/tolerances.md`` writes the table.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cuverify.reference.verify_attention import Attention
from cuverify.validators.compare import Bounded, Tolerance

FACTOR = 2.0
"""Errors of the same-dtype baseline that are allowed."""

UNIT = 2.0**-8
"""Largest relative error of rounding to bf16."""

UNITS = {"bf16": UNIT, "fp16": 2.0**-11}
"""Likewise by the type of the outputs."""

MEAN_ROUNDINGS = 0.4
"""What rounding costs on average, in `UNIT`: the baseline's error is taken to be at least this.

Over few columns a mean scatters: times ``1 + latent ** -0.5``.
"""

LARGEST_ROUNDINGS = 3.0
"""Likewise of the largest error in a row: several standard deviations."""

LSE_UNIT = 2.0**-17
"""Likewise of a log-sum-exp, relative to its magnitude and at least 1: 128 roundings to float32."""

DRAFT_LOGPROBS = Tolerance(rtol=2e-6, atol=2e-6)
"""Of a drafter's log-probabilities in float32, against sums in float64."""

PEER_ROW_ERROR = 0.05
"""Length of the error of a row over the row's, up to which another's kernel is timed beside ours.

One wrong bit of a tree's mask moves a row of the measured inputs by more.
"""

TOKEN_SIGMAS = 6.0
"""Standard deviations of a difference of two logits that a right attention may be off by."""


@dataclass(frozen=True)
class Entry:
    """One line of the table.

    Attributes
    ----------
    outputs : str
        What is judged.
    rule : str
        When it is right.
    reason : str
        Why no other rule.
    """

    outputs: str
    rule: str
    reason: str


TABLE = (
    Entry(
        "KV rows that are moved",
        "equal bit by bit, gaps and guard rows included",
        "a move computes nothing",
    ),
    Entry(
        "token ids, slots, lengths, index lists, plans, verdicts: all integers",
        "equal",
        "an index that is off by one is another index",
    ),
    Entry(
        "visibility words",
        "equal bit by bit",
        "one wrong bit is one wrong token",
    ),
    Entry(
        "log-probabilities of drafts (fp32)",
        f"error <= {DRAFT_LOGPROBS.atol:g} + {DRAFT_LOGPROBS.rtol:g} x abs(value); NaN equals NaN "
        "only",
        "roundings of one sum, its logarithm and two differences in float32",
    ),
    Entry(
        "attention `out` (bf16; fp16 with 2^-11 for 2^-8), each row of one token and head",
        f"root mean square of the error <= {FACTOR:g} x max(that of the baseline, "
        f"{MEAN_ROUNDINGS:g} x (1 + latent^-1/2) x 2^-8 x size), and largest error <= "
        f"{FACTOR:g} x max(that of the baseline, {LARGEST_ROUNDINGS:g} x 2^-8 x size)",
        "twice the error of plain torch in the same dtype; row by row, because a short prefix has "
        "larger outputs, and so errors, than a long one beside it",
    ),
    Entry(
        "attention `lse` (fp32, natural logarithm)",
        f"error <= {FACTOR:g} x max(that of the baseline, 2^-17 x max(1, abs(lse))); "
        "-inf equals -inf only",
        "likewise; the approximate exponential of a GPU is allowed for",
    ),
    Entry(
        "attention over a pool of fp8 codes (e4m3, one scale)",
        "as bf16, from the numbers that the codes and the scale mean",
        "codes are widened without rounding, and the scale is applied in fp32; what storing a row "
        "in 8 bits costs is no error of attention",
    ),
    Entry(
        "attention rows that see nothing",
        "`out` is 0 and `lse` is -inf",
        "there is nothing to round",
    ),
    Entry(
        "greedy tokens through a random output head",
        "equal to those of float64 where the two best logits are further apart than "
        f"{TOKEN_SIGMAS:g} standard deviations of what an allowed error of `out` moves them by",
        "below that gap rounding decides; above it nothing but a fault does",
    ),
    Entry(
        "other people's kernels that are timed beside ours",
        f"in each row the length of the error <= {PEER_ROW_ERROR:g} x that of the row",
        "their roundings, bf16 scores among them, are theirs; one wrong bit of a mask is more",
    ),
)


def attention_bounds(
    reference: Attention, baseline: Attention | None = None, *, dtype: str = "bf16"
) -> dict[str, Bounded]:
    """Return the right outputs of verify attention, each with what it may be off by.

    Parameters
    ----------
    reference : Attention
        Of the float64 oracle.
    baseline : Attention, optional
        Of the same inputs in the dtype of the outputs, such as
        `cuverify.torch_oracle.baseline_attention` gives. Without it the bounds are tighter than
        those of `TABLE`: what is within them is right, and what is not may be.
    dtype : {"bf16", "fp16"}
        Of the outputs.

    Returns
    -------
    dict of str to Bounded
        ``out`` of shape (N, H, latent) and ``lse`` of shape (N, H).
    """
    size = row_size(reference)
    scatter = 1.0 + reference.out.shape[2] ** -0.5
    rms = MEAN_ROUNDINGS * scatter * UNITS[dtype] * size
    largest = LARGEST_ROUNDINGS * UNITS[dtype] * size
    blind = np.isneginf(reference.lse)
    right = np.where(blind, 0.0, reference.lse)
    lse = LSE_UNIT * np.maximum(1.0, np.abs(right))
    if baseline is not None:
        error = np.abs(baseline.out - reference.out)
        rms = np.maximum(rms, np.sqrt(np.mean(error * error, axis=2)))
        largest = np.maximum(largest, error.max(axis=2))
        lse = np.maximum(lse, np.abs(np.where(blind, 0.0, baseline.lse) - right))
    return {
        "out": Bounded(reference.out, FACTOR * largest[:, :, None], FACTOR * rms),
        "lse": Bounded(reference.lse, FACTOR * lse),
    }


def row_size(reference: Attention) -> NDArray[np.float64]:
    """Return the size that errors of a row are measured by: float64, shape (N, H).

    ``sqrt(sum_j p_j^2 mean_c v_jc^2 + mean_c out_c^2)``: rounding every weight, and then the
    result, by one part in n moves the row by about an nth of it.
    """
    squares = reference.spread**2 + np.mean(reference.out**2, axis=2)
    return np.asarray(np.sqrt(squares))


def to_markdown() -> str:
    """Return ``docs/tolerances.md``."""
    rows = [f"| {entry.outputs} | {entry.rule} | {entry.reason} |" for entry in TABLE]
    return _PAGE.replace("{rows}", "\n".join(rows))


_PAGE = """\
# Tolerances

What "right" means, for every output that is judged. One table holds for the tests, for `cuverify
check` and for the gate in front of every timing; nothing loosens it. It is written from
`cuverify/tolerances.py`, and a test compares the two.

| output | right when | why |
|---|---|---|
{rows}

**The reference** is numpy in float64 (`cuverify.reference`), from the kernel's own inputs. Beyond
10 GFLOP a batch it is torch in float64 on the GPU (`cuverify.torch_oracle`), which is itself
compared with numpy.

**The baseline** is what one would write in torch for tensors of that dtype: gather the rows, scores
as a matrix product with float32 accumulation, softmax in float32, weights rounded to that dtype, a
second matrix product with float32 accumulation, the result rounded to that dtype. Its error is
measured against the reference in the same run, on the same inputs.

**The size** of a row is `sqrt(sum_j p_j^2 mean_c v_jc^2 + mean_c out_c^2)`, with the weights `p`
and values `v` of the reference: what rounding the weights and then the result can move it by, in
units of one rounding. Over drawn inputs the baseline's error is 0.39 x 2^-8 x size in the median
and seldom off that by more than half. In a row where rounding happens to cost the baseline nothing
(one key has all the weight, or a weight is a power of two) its error says nothing about what is
possible, and the size stands in for it.

**A mismatch** names the first index, both values and what was allowed there, and counts NaN and
infinities apart. Padded requests are judged like all others.
"""


if __name__ == "__main__":
    print(to_markdown(), end="")
