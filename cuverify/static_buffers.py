"""Buffers of a captured step: made once, refilled in place, on the host or on a GPU.

numpy arrays on the host lane (bf16 as uint16 bits), torch tensors on a GPU; what is written into
them always comes as numpy arrays. Codes of e4m3 are uint8 in both.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cuverify.errors import CaseError
from cuverify.narrow import NAN

if TYPE_CHECKING:
    from cuverify.cases import Target

NAN_BITS = int(NAN["bf16"])
"""A NaN of bf16 that no arithmetic gives."""

# torch lacks most unsigned types; kernels read a signed one of the same width as well
_IN_TORCH = {"bf16": "bfloat16", "uint32": "int32", "uint64": "int64"}
_VIEWS = {"uint16": np.int16, "uint32": np.int32, "uint64": np.int64}


def static_buffer(xp: Target, shape: tuple[int, ...], dtype: str) -> Any:
    """Return a new buffer, zeroed.

    Parameters
    ----------
    xp : {"numpy", "torch-cuda"}
        Where: on the host, or on torch's current CUDA device.
    shape : tuple of int
    dtype : str
        As numpy spells it, or ``bf16``.
    """
    if xp == "numpy":
        return np.zeros(shape, "uint16" if dtype == "bf16" else dtype)
    import torch

    return torch.zeros(shape, dtype=getattr(torch, _IN_TORCH.get(dtype, dtype)), device="cuda")


def write(buffer: Any, values: NDArray[Any]) -> None:
    """Write an array into the leading corner of a buffer; what is behind it stays.

    Parameters
    ----------
    buffer : ndarray or torch.Tensor
        At least as large as `values` in every dimension.
    values : ndarray
        bf16 as uint16 bits.

    Raises
    ------
    CaseError
        The values do not fit; nothing is written.
    """
    shape = tuple(buffer.shape)
    if len(shape) != values.ndim or any(
        n > room for n, room in zip(values.shape, shape, strict=True)
    ):
        raise CaseError(f"values of shape {values.shape} do not fit a buffer of shape {shape}")
    corner = tuple(slice(n) for n in values.shape)
    if isinstance(buffer, np.ndarray):
        buffer[corner] = values
        return
    import torch

    raw = np.ascontiguousarray(values).view(_VIEWS.get(values.dtype.name, values.dtype))
    # torch warns about read-only arrays, though it only reads here
    given = torch.from_numpy(raw if raw.flags.writeable else raw.copy())
    if buffer.dtype == torch.bfloat16:
        given = given.view(torch.bfloat16)
    buffer[corner].copy_(given)


def fill(buffer: Any, value: float | int) -> None:
    """Fill a buffer with one number; NaN is a bit pattern where the buffer holds integers for it.

    That is `NAN_BITS` in a numpy buffer of bf16, the NaN of e4m3 in any buffer of uint8, and -1,
    which is NaN in half precision and in bf16, in any of int16.
    """
    if value != value and str(buffer.dtype).removeprefix("torch.") == "int16":
        value = -1
    if value != value and str(buffer.dtype).endswith("uint8"):
        value = int(NAN["fp8_e4m3"])
    if isinstance(buffer, np.ndarray) and buffer.dtype == np.uint16 and value != value:
        value = NAN_BITS
    buffer[...] = value
