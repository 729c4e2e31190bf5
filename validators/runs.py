"""What a run left in the outputs: against the reference, and against another run bit by bit."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import numpy as np
from cuverify.validators.compare import (
    Bounded,
    HostArray,
    Mismatch,
    Tolerance,
    compare,
    differing,
    host_array,
    host_reference,
    tolerance_of,
)
from cuverify.validators.observations import DriftSeen, OutputSeen, RunSeen

if TYPE_CHECKING:
    from numpy.typing import NDArray

Tolerances = Mapping[str, Tolerance] | Tolerance | None
Expected = Mapping[str, "NDArray[Any] | Bounded"]

_MANTISSAS = {"bf16": 7, "float16": 10, "float32": 23, "float64": 52}


def run_record(
    label: str,
    before: Mapping[str, HostArray],
    after: Mapping[str, HostArray],
    expected: Expected,
    tolerances: Tolerances,
) -> RunSeen:
    """Compare the outputs of one run with its reference and with what they held before.

    Parameters
    ----------
    label : str
        The inputs it ran on.
    before, after : mapping of str to HostArray
        The outputs around the run.
    expected : mapping of str to numpy.ndarray or Bounded
    tolerances : mapping of str to Tolerance, Tolerance, optional

    Returns
    -------
    RunSeen
    """
    outputs = []
    for name, array in after.items():
        if name not in expected:
            missing = Mismatch(name, reason="has no reference: expected() does not return it")
            outputs.append(OutputSeen(name, missing))
            continue
        tolerance = tolerance_of(tolerances, name)
        given = expected[name]
        reference = given if isinstance(given, Bounded) else host_array(given)
        mismatch = compare(name, array, reference, tolerance)
        must_change = unchanged = 0
        error = _Error()
        if array.data.shape == host_reference(reference).data.shape:
            had_to = differing(before[name], reference, tolerance)
            must_change = int(np.count_nonzero(had_to))
            if mismatch is not None:
                kept = differing(before[name], array)
                unchanged = int(np.count_nonzero(had_to & ~kept))
            error = _error(array, host_reference(reference))
        outputs.append(
            OutputSeen(
                name, mismatch, must_change, unchanged, error.largest, error.relative, error.ulps
            )
        )
    outputs.extend(
        OutputSeen(name, Mismatch(name, reason="is in expected() but no output of the step"))
        for name in expected
        if name not in after
    )
    return RunSeen(label, tuple(outputs))


@dataclass(frozen=True)
class _Error:
    largest: float | None = None
    relative: float | None = None
    ulps: Mapping[str, int] = field(default_factory=dict)


def _error(array: HostArray, reference: HostArray) -> _Error:
    """Return how far a floating-point output is off, right or wrong."""
    if array.dtype not in _MANTISSAS or reference.data.dtype.kind not in "fu":
        return _Error()
    if reference.data.dtype.kind == "u" and reference.data.dtype != array.data.dtype:
        return _Error()
    if reference.data.dtype.kind == "u":
        reference = HostArray(reference.data, array.dtype)
    with np.errstate(invalid="ignore"):
        away = np.abs(array.values().astype(np.float64) - reference.values())
    finite = away[np.isfinite(away)]
    largest = float(finite.max()) if finite.size else None
    relative, ulps = statistics(array, reference)
    return _Error(largest, relative, ulps)


def kept(outputs: Mapping[str, Any]) -> dict[str, Any]:
    """Return copies of the outputs where they are: on the device, for tensors there."""
    return {name: _copy(value) for name, value in outputs.items()}


def drifts(
    present: Mapping[str, Any],
    other: Mapping[str, Any],
    *,
    spare: Mapping[str, Any] | None = None,
    expected: Expected | None = None,
    tolerances: Tolerances = None,
) -> tuple[DriftSeen, ...]:
    """Return where outputs differ from those of another run, bit by bit.

    Parameters
    ----------
    present, other : mapping of str to array
        As `kept` gives them.
    spare : mapping of str to index, optional
        Elements that may differ.
    expected : mapping, optional
        The reference: says whether an output that differs is right all the same.
    tolerances : mapping of str to Tolerance, Tolerance, optional
    """
    found = []
    for name, value in present.items():
        if name not in other or _same(value, other[name]):
            continue
        left, right = host_array(value), host_array(other[name])
        index = (spare or {}).get(name)
        if index is not None and left.data.shape == right.data.shape:
            left.data[index] = right.data[index]
        mismatch = compare(name, left, right)
        if mismatch is None:
            continue
        correct = None
        if expected and name in expected:
            given = expected[name]
            reference = given if isinstance(given, Bounded) else host_array(given)
            correct = compare(name, left, reference, tolerance_of(tolerances, name)) is None
        relative, ulps = statistics(left, right)
        found.append(DriftSeen(mismatch, relative, ulps, correct))
    return tuple(found)


def statistics(left: HostArray, right: HostArray) -> tuple[float | None, dict[str, int]]:
    """Return the relative L2 distance and a histogram of the distances in ulps.

    Parameters
    ----------
    left, right : HostArray
        Of one shape. Integers have a distance but no ulps.
    """
    if left.data.shape != right.data.shape:
        return None, {}
    one, two = left.values(), right.values()
    if one.dtype.kind not in "biuf" or two.dtype.kind not in "biuf":
        return None, {}
    one, two = one.astype(np.float64), two.astype(np.float64)
    finite = np.isfinite(one) & np.isfinite(two)
    size = float(np.sqrt(np.sum(two[finite] ** 2)))
    away = float(np.sqrt(np.sum((one[finite] - two[finite]) ** 2)))
    relative = away / size if size else (0.0 if not away else None)
    return relative, _ulps(left, right, finite)


def _ulps(left: HostArray, right: HostArray, finite: NDArray[np.bool_]) -> dict[str, int]:
    if left.dtype != right.dtype or left.dtype not in _MANTISSAS:
        return {}
    width = left.data.dtype.itemsize * 8
    away = np.abs(_ordered(left, width) - _ordered(right, width))[finite]
    away = away[away > 0]
    counts: dict[str, int] = {}
    low = 1
    while away.size and low <= 1 << 20:
        high = 2 * low if low == 1 else 4 * low
        number = int(np.count_nonzero((away >= low) & (away < high)))
        if number:
            counts[str(low) if high == low + 1 else f"{low}-{high - 1}"] = number
        low = high
    beyond = int(np.count_nonzero(away >= low))
    if beyond:
        counts[f">={low}"] = beyond
    return counts


def _ordered(array: HostArray, width: int) -> NDArray[np.float64]:
    """Return the bits as numbers in the order of the values; exact up to 53 bits."""
    bits = array.bits().astype(np.uint64)
    sign = np.uint64(1) << np.uint64(width - 1)
    magnitude = (bits & (sign - np.uint64(1))).astype(np.float64)
    return np.asarray(np.where(bits & sign, -magnitude, magnitude))


def _copy(value: Any) -> Any:
    if isinstance(value, np.ndarray):
        return value.copy()
    return value.detach().clone() if hasattr(value, "detach") else value.copy()


def _same(left: Any, right: Any) -> bool:
    """Tell whether two arrays hold the same bits, on the device where they are."""
    if hasattr(left, "detach") and hasattr(right, "detach"):
        import torch

        if left.shape != right.shape or left.dtype != right.dtype:
            return False
        one = left.contiguous().reshape(-1).view(torch.uint8)
        return bool(torch.equal(one, right.contiguous().reshape(-1).view(torch.uint8)))
    one, two = host_array(left), host_array(right)
    return compare("", one, two) is None
