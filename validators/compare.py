"""Compare what a step wrote with what its reference says, element by element.

Everything here works on host copies and knows numpy only. A tensor becomes a `HostArray` (its bits
and the name of its dtype), because numpy has no bf16 and no fp8 and a bit pattern must survive the
copy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from cuverify.errors import ArgumentError
from cuverify.narrow import fp8_numbers

if TYPE_CHECKING:
    from numpy.typing import NDArray

_UNSIGNED = {1: np.uint8, 2: np.uint16, 4: np.uint32, 8: np.uint64}
# torch dtypes that numpy lacks: the name that a HostArray carries, by the width of their bits
_TORCH_ONLY = {
    "torch.bfloat16": ("bf16", 2),
    "torch.float8_e4m3fn": ("fp8_e4m3", 1),
    "torch.float8_e5m2": ("fp8_e5m2", 1),
}
_SMALL_FLOATS = frozenset(name for name, _ in _TORCH_ONLY.values())


@dataclass(frozen=True)
class Tolerance:
    """How far a value may be from the reference.

    A value is close when ``|actual - expected| <= atol + rtol * |expected|``.

    Parameters
    ----------
    rtol, atol : float
        Relative and absolute part. With both at zero the values must be equal; without any
        tolerance the bits must be.
    """

    rtol: float = 0.0
    atol: float = 0.0


@dataclass(frozen=True)
class HostArray:
    """A host copy of a tensor.

    Parameters
    ----------
    data : numpy.ndarray
        The values, or the bits as unsigned integers where numpy has no such dtype. Owned: it shares
        no memory with the tensor.
    dtype : str
        ``bf16``, ``fp8_e4m3``, ``fp8_e5m2``, or numpy's name of the dtype.
    """

    data: NDArray[Any]
    dtype: str

    def bits(self) -> NDArray[Any]:
        """Return the bits as unsigned integers, in the array's shape."""
        width = self.data.dtype.itemsize
        if width not in _UNSIGNED:
            raise TypeError(f"no unsigned integer has the {width} bytes of {self.dtype}")
        return np.ascontiguousarray(self.data).view(_UNSIGNED[width]).reshape(self.data.shape)

    def values(self) -> NDArray[Any]:
        """Return numbers: float32 for the small float formats, the data itself otherwise."""
        if self.dtype == "bf16":
            wide = self.data.astype(np.uint32) << np.uint32(16)
            return np.asarray(wide.view(np.float32))
        if self.dtype in _SMALL_FLOATS:
            return np.asarray(fp8_numbers(self.dtype)[self.data])
        return self.data


@dataclass(frozen=True)
class Bounded:
    """A reference that says how far each value may be from it.

    For outputs whose error depends on the inputs, such as a sum of a few terms or of many: the
    bound is made together with the reference, from the same inputs.

    Parameters
    ----------
    values : numpy.ndarray
        The reference.
    atol : numpy.ndarray or float
        Largest absolute difference, broadcast over `values`. NaN equals NaN and an infinity equals
        itself, whatever the bound.
    rms : numpy.ndarray, optional
        Largest root mean square of the differences along the last axis, in the shape of `values`
        without that axis: a bound that one unlucky element does not have to be let through for. In
        a row beyond it, the elements whose own difference is beyond it count as different.
    """

    values: NDArray[Any]
    atol: NDArray[Any] | float
    rms: NDArray[Any] | None = None

    def __post_init__(self) -> None:
        shape = self.values.shape
        try:
            fits = np.broadcast_shapes(shape, np.shape(self.atol)) == shape
        except ValueError:
            fits = False
        if not fits:
            raise ArgumentError("atol", np.shape(self.atol), f"does not broadcast to {shape}")
        if self.rms is not None and self.rms.shape != shape[:-1]:
            raise ArgumentError("rms", self.rms.shape, f"values of shape {shape} have other rows")


@dataclass(frozen=True)
class Mismatch:
    """Where an output differs from its reference.

    Parameters
    ----------
    output : str
        Name of the output.
    reason : str
        Why nothing could be compared element by element (another shape or dtype), empty otherwise.
    count, total : int
        Elements that differ, and elements compared.
    index : tuple of int
        The first element that differs, in row-major order.
    actual, expected : float, int or str
        Both values there; bit patterns as ``0x...`` where the value alone would not show the
        difference.
    nans, infs : int
        Elements that are NaN (infinite) where the reference is not.
    largest : float or None
        The largest finite difference, None where there is none.
    allowed : float or None
        The difference that was allowed at `index`, where the reference has bounds of its own.
    """

    output: str
    reason: str = ""
    count: int = 0
    total: int = 0
    index: tuple[int, ...] = ()
    actual: float | int | str = 0
    expected: float | int | str = 0
    nans: int = 0
    infs: int = 0
    largest: float | None = None
    allowed: float | None = None

    def __str__(self) -> str:
        if self.reason:
            return f"{self.output}: {self.reason}"
        where = ", ".join(map(str, self.index))
        text = (
            f"{self.output}[{where}] is {self.actual}, expected {self.expected}; "
            f"{self.count} of {self.total} elements differ"
        )
        if self.nans:
            text += f", {self.nans} of them NaN"
        if self.infs:
            text += f", {self.infs} of them infinite"
        if self.largest is not None:
            text += f", largest difference {self.largest:.6g}"
        if self.allowed is not None:
            text += f", allowed {self.allowed:.6g} there"
        return text

    def evidence(self) -> dict[str, Any]:
        """Return the fields that say something, as JSON values."""
        if self.reason:
            return {"output": self.output, "reason": self.reason}
        fields: dict[str, Any] = {
            "output": self.output,
            "first_index": list(self.index),
            "actual": self.actual,
            "expected": self.expected,
            "differ": self.count,
            "elements": self.total,
            "nan": self.nans,
            "inf": self.infs,
        }
        if self.largest is not None:
            fields["largest_difference"] = self.largest
        if self.allowed is not None:
            fields["allowed"] = self.allowed
        return fields


def host_array(tensor: Any) -> HostArray:
    """Copy a torch tensor, a CuPy array or a numpy array to the host.

    Parameters
    ----------
    tensor : torch.Tensor, cupy.ndarray or numpy.ndarray
        Any strides. Copying from a GPU waits for the work on its current stream.

    Returns
    -------
    HostArray
        A copy that later writes to `tensor` do not change.

    Raises
    ------
    TypeError
        `tensor` is none of the three.
    """
    if isinstance(tensor, HostArray):
        return tensor
    if isinstance(tensor, (np.ndarray, np.generic)):
        data = np.array(tensor)
        return HostArray(data, data.dtype.name)
    if type(tensor).__module__.partition(".")[0] == "cupy":
        data = np.asarray(tensor.get())
        return HostArray(data, data.dtype.name)
    if hasattr(tensor, "detach") and hasattr(tensor, "cpu"):
        return _from_torch(tensor)
    raise TypeError(
        f"cannot copy a {type(tensor).__name__} to the host; "
        "outputs are torch tensors, CuPy arrays or numpy arrays"
    )


def host_reference(expected: NDArray[Any] | HostArray | Bounded) -> HostArray:
    """Return the values of a reference, without its bounds."""
    return host_array(expected.values if isinstance(expected, Bounded) else expected)


def compare(
    name: str,
    actual: HostArray,
    expected: NDArray[Any] | HostArray | Bounded,
    tolerance: Tolerance | None = None,
) -> Mismatch | None:
    """Return how `actual` differs from `expected`, or None when it does not.

    Without a tolerance the bits of one dtype must agree (a NaN equals the same NaN, and 0.0 is not
    -0.0), the values of two dtypes. With a tolerance, NaN equals NaN and an infinity equals itself.
    The bounds of a `Bounded` reference take the place of a tolerance. An unsigned reference of a
    float output's width is its bits, and a float reference of a uint16 output makes that bf16:
    numpy callers hold bf16 that way.

    Parameters
    ----------
    name : str
        Name of the output, for the report.
    actual : HostArray
    expected : numpy.ndarray, HostArray or Bounded
        Same shape.
    tolerance : Tolerance, optional

    Returns
    -------
    Mismatch or None
    """
    reference = host_reference(expected)
    if actual.data.shape != reference.data.shape:
        shapes = list(actual.data.shape), list(reference.data.shape)
        return Mismatch(name, reason=f"has shape {shapes[0]}, the reference {shapes[1]}")
    bounds = expected if isinstance(expected, Bounded) else None
    wrong = differing(actual, reference if bounds is None else bounds, tolerance)
    count = int(np.count_nonzero(wrong))
    if not count:
        return None
    found = _describe(name, *_paired(actual, reference), wrong, count)
    if bounds is None:
        return found
    return replace(found, allowed=_allowed(bounds, found.index))


def differing(
    actual: HostArray, expected: HostArray | Bounded, tolerance: Tolerance | None = None
) -> NDArray[np.bool_]:
    """Return which elements differ, by the rule that `compare` states.

    Parameters
    ----------
    actual : HostArray
    expected : HostArray or Bounded
        Same shape.
    tolerance : Tolerance, optional
    """
    actual, reference = _paired(actual, host_reference(expected))
    if isinstance(expected, Bounded):
        return _out_of_bounds(actual.values(), reference.values(), expected)
    width = actual.data.dtype.itemsize
    one_width = width in _UNSIGNED and width == reference.data.dtype.itemsize
    one_kind = actual.dtype == reference.dtype or not (_is_float(actual) or _is_float(reference))
    if tolerance is None and one_width and one_kind:
        return np.asarray(actual.bits() != reference.bits())
    return _outside(actual.values(), reference.values(), tolerance or Tolerance())


def compare_all(
    actual: Mapping[str, HostArray],
    expected: Mapping[str, NDArray[Any] | Bounded],
    tolerances: Mapping[str, Tolerance] | Tolerance | None = None,
) -> list[Mismatch]:
    """Compare every output; a name that only one side has is a mismatch too.

    Parameters
    ----------
    actual : mapping of str to HostArray
    expected : mapping of str to numpy.ndarray or Bounded
    tolerances : mapping of str to Tolerance, Tolerance, optional
        By output, or one for all. An output without one must be equal.

    Returns
    -------
    list of Mismatch
        In the order of `actual`.
    """
    found = []
    for name, array in actual.items():
        if name not in expected:
            found.append(Mismatch(name, reason="has no reference: expected() does not return it"))
            continue
        mismatch = compare(name, array, expected[name], tolerance_of(tolerances, name))
        if mismatch is not None:
            found.append(mismatch)
    found.extend(
        Mismatch(name, reason="is in expected() but no output of the step")
        for name in expected
        if name not in actual
    )
    return found


def tolerance_of(
    tolerances: Mapping[str, Tolerance] | Tolerance | None, name: str
) -> Tolerance | None:
    """Return the tolerance of one output, None where it must be equal."""
    if tolerances is None or isinstance(tolerances, Tolerance):
        return tolerances
    return tolerances.get(name)


def _from_torch(tensor: Any) -> HostArray:
    import torch

    known = _TORCH_ONLY.get(str(tensor.dtype))
    flat = tensor.detach().contiguous()
    if known is not None:
        name, width = known
        holder = torch.int16 if width == 2 else torch.uint8
        data = flat.view(holder).cpu().numpy().view(_UNSIGNED[width])
        return HostArray(data.copy(), name)
    data = flat.cpu().numpy()
    return HostArray(data.copy(), data.dtype.name)


def _paired(actual: HostArray, reference: HostArray) -> tuple[HostArray, HostArray]:
    """Give both sides one reading where one of them holds the other's bits."""
    if actual.dtype == "uint16" and _is_float(reference):
        return HostArray(actual.data, "bf16"), reference
    raw = reference.data.dtype.kind == "u"
    if raw and _is_float(actual) and reference.data.dtype.itemsize == actual.data.dtype.itemsize:
        return actual, HostArray(reference.data.view(actual.data.dtype), actual.dtype)
    return actual, reference


def _is_float(array: HostArray) -> bool:
    return array.dtype in _SMALL_FLOATS or array.data.dtype.kind in "fc"


def _outside(
    actual: NDArray[Any], expected: NDArray[Any], tolerance: Tolerance
) -> NDArray[np.bool_]:
    if not (tolerance.rtol or tolerance.atol):
        return np.asarray(~((actual == expected) | ((actual != actual) & (expected != expected))))
    left = actual.astype(np.float64)
    right = expected.astype(np.float64)
    with np.errstate(invalid="ignore"):
        close = np.abs(left - right) <= tolerance.atol + tolerance.rtol * np.abs(right)
    # an infinite reference would make the bound infinite, and inf - inf is NaN
    close &= np.isfinite(left) & np.isfinite(right)
    return np.asarray(~(close | _same(left, right)))


def _out_of_bounds(
    actual: NDArray[Any], expected: NDArray[Any], bounds: Bounded
) -> NDArray[np.bool_]:
    with np.errstate(invalid="ignore"):  # a signalling NaN, or inf - inf
        left, right = actual.astype(np.float64), expected.astype(np.float64)
        away = np.abs(left - right)
    # what is not finite on both sides has no distance; it is the same or not
    finite = np.isfinite(away)
    same = _same(left, right)
    away[~finite] = 0.0
    wrong = np.asarray(~(same | (finite & (away <= bounds.atol))))
    if bounds.rms is not None:
        rms = np.sqrt(np.mean(away * away, axis=-1))
        wrong |= ((rms > bounds.rms)[..., None]) & (away > bounds.rms[..., None])
    return wrong


def _allowed(bounds: Bounded, index: tuple[int, ...]) -> float:
    """Return the tighter bound at an element that is out of bounds."""
    allowed = float(np.broadcast_to(bounds.atol, bounds.values.shape)[index])
    return allowed if bounds.rms is None else min(allowed, float(bounds.rms[index[:-1]]))


def _same(left: NDArray[Any], right: NDArray[Any]) -> NDArray[np.bool_]:
    return np.asarray((left == right) | (np.isnan(left) & np.isnan(right)))


def _describe(
    name: str, actual: HostArray, reference: HostArray, wrong: NDArray[np.bool_], count: int
) -> Mismatch:
    first = int(np.argmax(wrong.reshape(-1)))
    index = tuple(int(part) for part in np.unravel_index(first, wrong.shape))
    left, right = actual.values(), reference.values()
    nans = infs = 0
    largest: float | None = None
    if left.dtype.kind in "biuf" and right.dtype.kind in "biuf":
        with np.errstate(invalid="ignore"):  # a signalling NaN
            floats = left[wrong].astype(np.float64), right[wrong].astype(np.float64)
        nans = int(np.count_nonzero(np.isnan(floats[0]) & ~np.isnan(floats[1])))
        infs = int(np.count_nonzero(np.isinf(floats[0]) & ~np.isinf(floats[1])))
        with np.errstate(invalid="ignore"):
            difference = np.abs(floats[0] - floats[1])
        finite = difference[np.isfinite(difference)]
        largest = float(finite.max()) if finite.size else None
    shown = left[index].item(), right[index].item()
    if shown[0] == shown[1] or shown[0] != shown[0]:
        # equal values with other bits (-0.0, a NaN's payload) are told apart by the bits only
        shown = _with_bits(shown[0], actual, index), _with_bits(shown[1], reference, index)
    return Mismatch(
        name,
        count=count,
        total=wrong.size,
        index=index,
        actual=shown[0],
        expected=shown[1],
        nans=nans,
        infs=infs,
        largest=largest,
    )


def _with_bits(value: object, array: HostArray, index: tuple[int, ...]) -> str:
    digits = 2 * array.data.dtype.itemsize
    return f"{value} (0x{int(array.bits()[index]):0{digits}x})"
