"""The element types that kernels and tensors share, under one set of names."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Any

from cuverify.errors import ArgumentError


@dataclass(frozen=True)
class DType:
    """One element type.

    Attributes
    ----------
    name : str
        The name used in contracts: ``int32``, ``bf16``, ...
    bytes : int
        Width of one element.
    kinds : str
        What a C++ compiler may call it: ``i`` ``u`` signed and unsigned integers, ``b`` bool,
        ``f`` float, ``h`` half, ``B`` bfloat16, ``s`` a struct, ``p`` a pointer.
    stored : tuple of str
        Names of the tensor types that may hold it. Integers of one width may stand for each other:
        torch has hardly any unsigned ones.
    ctype : str
        The C++ type, as a `-D` value may name it.
    """

    name: str
    bytes: int
    kinds: str
    stored: tuple[str, ...]
    ctype: str


def _integers(bits: int, signed_c: str) -> tuple[DType, DType]:
    stored = (f"int{bits}", f"uint{bits}")
    width = bits // 8
    unsigned_c = "unsigned char" if bits == 8 else f"unsigned {signed_c}"
    return (
        DType(f"int{bits}", width, "i", stored, signed_c),
        DType(f"uint{bits}", width, "u" + ("p" if bits == 64 else ""), stored, unsigned_c),
    )


_ALL = (
    DType("bool", 1, "bui", ("bool", "uint8"), "bool"),
    *_integers(8, "signed char"),
    *_integers(16, "short"),
    *_integers(32, "int"),
    *_integers(64, "long long"),
    DType("fp16", 2, "hu", ("float16",), "__half"),
    DType("bf16", 2, "Bu", ("bfloat16", "uint16"), "__nv_bfloat16"),
    DType("fp32", 4, "f", ("float32",), "float"),
    DType("fp64", 8, "f", ("float64",), "double"),
    DType("fp8_e4m3", 1, "su", ("float8_e4m3fn", "uint8"), "__nv_fp8_e4m3"),
)
BY_NAME = {dtype.name: dtype for dtype in _ALL}
BY_NAME["uint8"] = DType("uint8", 1, "ub", ("uint8", "int8", "bool"), "unsigned char")
_STORED = {stored for dtype in BY_NAME.values() for stored in dtype.stored}
_BY_CTYPE = {dtype.ctype: dtype for dtype in BY_NAME.values()} | {
    "unsigned": BY_NAME["uint32"],
    "int64_t": BY_NAME["int64"],
    "int32_t": BY_NAME["int32"],
    "uint64_t": BY_NAME["uint64"],
    "uint32_t": BY_NAME["uint32"],
    "long": BY_NAME["int64"],
    "half": BY_NAME["fp16"],
    "nv_bfloat16": BY_NAME["bf16"],
}


def from_ctype(text: str) -> DType | None:
    """Return the type that a C++ type name means, or None."""
    return _BY_CTYPE.get(" ".join(text.split()))


def tensor_dtype(argument: str, dtype: Any) -> str:
    """Return the plain name of a numpy, CuPy or torch dtype, such as ``bfloat16``.

    Raises
    ------
    ArgumentError
        If the type has no plain name (structured, object, complex ...), naming `argument`.
    """
    name = _plain_name(dtype)
    if name not in _STORED:
        raise ArgumentError(
            argument, dtype, f"no kernel argument has this dtype; known: {sorted(_STORED)}"
        )
    return name


@functools.lru_cache(maxsize=256)  # numpy makes the name of a dtype anew each time
def _plain_name(dtype: Any) -> str:
    return str(getattr(dtype, "name", None) or str(dtype).removeprefix("torch."))
