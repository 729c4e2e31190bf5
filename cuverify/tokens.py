"""Greedy tokens through an output head: where two attentions may choose differently, and where not.

A token differs from the right one for a good reason only where the two best logits are so close
that an allowed error of the attention can swap them. The head is random and knows nothing of the
error, so a difference of two logits moves by a normal number whose deviation is the error's length
times that of the difference of two of the head's rows.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from cuverify.errors import ArgumentError
from cuverify.tolerances import TOKEN_SIGMAS


@dataclass(frozen=True)
class Agreement:
    """How the tokens of one attention agree with the right ones.

    Attributes
    ----------
    rows : int
        Tokens that were chosen.
    equal : int
        Those that are the right ones.
    close : int
        Rows whose two best logits are too close to tell, equal or not.
    excused, wrong : int
        Tokens that differ, in rows that are too close to tell and in others.
    """

    rows: int
    equal: int
    close: int
    excused: int
    wrong: int

    def __str__(self) -> str:
        return (
            f"{self.equal} of {self.rows} tokens are equal; {self.excused} differ where the gap is "
            f"below the bound, as in {self.close} rows, and {self.wrong} where it is not"
        )


def gap_bounds(errors: NDArray[np.float64], head_deviation: float) -> NDArray[np.float64]:
    """Return the gap of two logits up to which an allowed error may swap them.

    Parameters
    ----------
    errors : ndarray of float64, shape (N,)
        Length that the error of a row may have, all heads together.
    head_deviation : float
        Standard deviation of the output head's elements.

    Returns
    -------
    ndarray of float64, shape (N,)
    """
    return np.asarray(TOKEN_SIGMAS * np.sqrt(2.0) * head_deviation * errors)


def agreement(
    tokens: NDArray[np.int64],
    right: NDArray[np.int64],
    gaps: NDArray[np.float64],
    bounds: NDArray[np.float64],
) -> Agreement:
    """Count where tokens are the right ones, and whether the others may differ.

    Parameters
    ----------
    tokens, right : ndarrays of int64, shape (N,)
    gaps : ndarray of float64, shape (N,)
        Between the two best of the right logits.
    bounds : ndarray of float64, shape (N,)
        As `gap_bounds` gives them.

    Raises
    ------
    ArgumentError
        The lengths differ.
    """
    lengths = {len(tokens), len(right), len(gaps), len(bounds)}
    if len(lengths) != 1:
        raise ArgumentError("tokens", sorted(lengths), "all must have one length")
    differ = tokens != right
    close = gaps < bounds
    return Agreement(
        rows=len(tokens),
        equal=int((~differ).sum()),
        close=int(close.sum()),
        excused=int((differ & close).sum()),
        wrong=int((differ & ~close).sum()),
    )
