"""Numbers of 16 and 8 bits as numpy holds them: bf16 as uint16, fp16 as float16, e4m3 as uint8."""

from __future__ import annotations

import functools
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Narrow = Literal["bf16", "fp16", "fp8_e4m3"]

LARGEST_E4M3 = 448.0
"""What larger numbers become as well, of either sign."""

STORED: dict[Narrow, str] = {"bf16": "bf16", "fp16": "float16", "fp8_e4m3": "uint8"}
"""What a buffer of each type is called, see `cuverify.buffers.Buffer`."""

NAN: dict[Narrow, Any] = {
    "bf16": np.uint16(0x7FFF),
    "fp16": np.uint16(0x7FFF).view(np.float16),
    "fp8_e4m3": np.uint8(0x7F),
}
"""A NaN of each type."""


def narrow(values: NDArray[np.float32] | float, kind: Narrow) -> NDArray[Any]:
    """Round finite numbers to the nearest of a type, ties to even.

    Parameters
    ----------
    values : ndarray of float32, or a number
    kind : {"bf16", "fp16", "fp8_e4m3"}

    Returns
    -------
    ndarray of uint16 (bits), float16 or uint8 (codes), in the shape of `values`
    """
    given = np.asarray(values, np.float32)
    if kind == "fp16":
        return given.astype(np.float16)
    if kind == "bf16":
        bits = given.view(np.uint32)
        rounded = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
        return np.asarray(rounded >> np.uint32(16), np.uint16)
    known = fp8_numbers("fp8_e4m3")[:0x7F]
    size = np.minimum(np.abs(given), np.float32(LARGEST_E4M3))
    middles = (known[1:] + known[:-1]) / 2
    code = np.searchsorted(middles, size)
    tie = middles[np.minimum(code, len(middles) - 1)] == size
    code = code + (tie & (code % 2 == 1))
    return np.asarray(code | (np.signbit(given) * 0x80), np.uint8)


def widen(values: NDArray[Any]) -> NDArray[np.float64]:
    """Return the numbers of an array: uint16 are the bits of bf16, uint8 codes of e4m3."""
    if values.dtype == np.uint8:
        return np.asarray(fp8_numbers("fp8_e4m3")[values], np.float64)
    if values.dtype == np.uint16:
        # the upper half of a float32
        wide = (values.astype(np.uint32) << np.uint32(16)).view(np.float32)
        return np.asarray(wide, np.float64)
    return np.asarray(values, np.float64)


@functools.cache
def fp8_numbers(kind: str) -> NDArray[np.float32]:
    """Return the numbers of all 256 codes of ``fp8_e4m3`` or ``fp8_e5m2``, made of their fields."""
    exponent_bits, mantissa_bits, bias = (4, 3, 7) if kind == "fp8_e4m3" else (5, 2, 15)
    codes = np.arange(256)
    sign = np.where(codes & 0x80, -1.0, 1.0)
    exponent = (codes >> mantissa_bits) & ((1 << exponent_bits) - 1)
    mantissa = (codes & ((1 << mantissa_bits) - 1)) / (1 << mantissa_bits)
    normal = np.ldexp(1.0 + mantissa, exponent - bias)
    subnormal = np.ldexp(mantissa, 1 - bias)
    values = sign * np.where(exponent == 0, subnormal, normal)
    if kind == "fp8_e4m3":  # no infinities; only the all-ones pattern is NaN
        values[(codes & 0x7F) == 0x7F] = np.nan
    else:
        top = exponent == (1 << exponent_bits) - 1
        values[top & (mantissa == 0)] = (sign * np.inf)[top & (mantissa == 0)]
        values[top & (mantissa != 0)] = np.nan
    return np.asarray(values, dtype=np.float32)
