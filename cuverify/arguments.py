"""Arguments of a launch, checked against the kernel's contract before anything runs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from cuverify.contract import Contract, Parameter
from cuverify.dtypes import DType, tensor_dtype
from cuverify.errors import ArgumentError

_NUMPY: dict[str, Any] = {
    "bool": np.bool_,
    "int8": np.int8,
    "uint8": np.uint8,
    "int16": np.int16,
    "uint16": np.uint16,
    "int32": np.int32,
    "uint32": np.uint32,
    "int64": np.int64,
    "uint64": np.uint64,
    "fp16": np.float16,
    "fp32": np.float32,
    "fp64": np.float64,
}


@dataclass(frozen=True, slots=True)
class Tensor:
    """A tensor of any library, by address.

    Attributes
    ----------
    name : str
        The argument's name.
    address : int
        Of the first element; 0 for an empty tensor.
    dtype : str
        The storing library's name for the element type, such as ``bfloat16``.
    itemsize : int
        Bytes of an element.
    shape, strides : tuple of int
        Strides in elements.
    device : str
        ``cpu`` or ``cuda:0`` ...
    writable : bool
        False for a read-only numpy array.
    owner : object
        The tensor itself, which keeps the memory alive.
    """

    name: str
    address: int
    dtype: str
    itemsize: int
    shape: tuple[int, ...]
    strides: tuple[int, ...]
    device: str
    writable: bool
    owner: Any

    @property
    def span_bytes(self) -> int:
        """Bytes from the first element to the end of the last."""
        if 0 in self.shape:
            return 0
        reach = sum((n - 1) * s for n, s in zip(self.shape, self.strides, strict=True))
        return (reach + 1) * self.itemsize

    @property
    def is_contiguous(self) -> bool:
        """Whether the elements lie in C order without gaps."""
        expected = 1
        for extent, stride in zip(reversed(self.shape), reversed(self.strides), strict=True):
            if extent != 1 and stride != expected:
                return 0 in self.shape
            expected *= extent
        return True


Argument = Tensor | np.generic | None


def as_tensor(name: str, value: object) -> Tensor | None:
    """Return a view of a torch, CuPy or numpy array, or None if `value` is none of them.

    Raises
    ------
    ArgumentError
        If it is one that no kernel can read: sparse, quantised, on another kind of device, with a
        dtype or byte strides that no C++ pointer describes.
    """
    if isinstance(value, np.ndarray):
        return _array(
            name, value, value.__array_interface__["data"][0], "cpu", value.flags.writeable
        )
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(value, torch.Tensor):
        return _torch_tensor(name, value, torch)
    cupy = sys.modules.get("cupy")
    if cupy is not None and isinstance(value, cupy.ndarray):
        return _array(name, value, value.data.ptr, f"cuda:{value.device.id}", True)
    return None


def _torch_tensor(name: str, value: Any, torch: Any) -> Tensor:
    if value.layout != torch.strided or value.device.type not in ("cpu", "cuda"):
        raise ArgumentError(
            name,
            value,
            f"wants a strided tensor on cpu or cuda, not {value.layout} on {value.device}",
        )
    device = "cpu" if value.device.type == "cpu" else f"cuda:{value.device.index}"
    if value.is_conj() or value.is_neg():
        raise ArgumentError(
            name, value, "is a lazy conjugate or negative view; materialise it first"
        )
    return Tensor(
        name,
        value.data_ptr(),
        tensor_dtype(name, value.dtype),
        value.element_size(),
        tuple(value.shape),
        tuple(value.stride()),
        device,
        True,
        value,
    )


def _array(name: str, value: Any, address: int, device: str, writable: bool) -> Tensor:
    dtype, size = tensor_dtype(name, value.dtype), value.dtype.itemsize
    if not value.dtype.isnative:
        raise ArgumentError(
            name, value, f"dtype {value.dtype.str} is not in this machine's byte order"
        )
    if any(stride % size for stride in value.strides):
        raise ArgumentError(name, value, f"byte strides {value.strides} are no multiple of {size}")
    strides = tuple(stride // size for stride in value.strides)
    return Tensor(name, address, dtype, size, tuple(value.shape), strides, device, writable, value)


def as_scalar(name: str, value: object, dtype: DType) -> np.generic:
    """Return a Python or numpy number in exactly the width that the kernel reads.

    Raises
    ------
    ArgumentError
        If the value does not fit, would be truncated, or is a tensor: reading it would be a host
        sync.
    """
    if as_tensor(name, value) is not None:
        raise ArgumentError(
            name,
            value,
            f"the kernel takes {dtype.name} by value; a tensor's value would have to be read back",
        )
    if not isinstance(value, bool | int | float | np.generic):
        raise ArgumentError(name, value, f"wants a number for {dtype.name} by value")
    if dtype.name == "bf16":
        bits: np.generic = np.uint16(_bfloat16_bits(float(value)))
        return bits
    if dtype.name not in _NUMPY:
        raise ArgumentError(name, value, f"{dtype.name} cannot be passed by value")
    kind = _NUMPY[dtype.name]
    if dtype.name.startswith("fp"):
        with np.errstate(over="ignore"):
            number: np.generic = kind(value)
        if np.isinf(number) and not np.isinf(float(value)):
            raise ArgumentError(name, value, f"is too large for {dtype.name}")
        return number
    if isinstance(value, float | np.floating):
        raise ArgumentError(
            name, value, f"the kernel takes {dtype.name}; a float would lose its fraction"
        )
    whole = int(value)
    if dtype.name == "bool":
        low, high = 0, 1
    else:
        low, high = int(np.iinfo(kind).min), int(np.iinfo(kind).max)
    if not low <= whole <= high:
        raise ArgumentError(name, value, f"does not fit {dtype.name}, which holds {low} to {high}")
    scalar: np.generic = kind(whole)
    return scalar


def _bfloat16_bits(value: float) -> int:
    bits = int(np.float32(value).view(np.uint32))
    if (bits & 0x7FFFFFFF) > 0x7F800000:
        return 0x7FFF
    return (bits + 0x7FFF + (bits >> 16 & 1)) >> 16


def check_arguments(
    contract: Contract, values: Mapping[str, int], arguments: Sequence[object]
) -> tuple[dict[str, Argument], dict[str, int]]:
    """Check a call's arguments against the contract.

    Parameters
    ----------
    contract : Contract
        The kernel's.
    values : mapping of str to int
        `-D` values that are whole numbers.
    arguments : sequence
        In the signature's order.

    Returns
    -------
    arguments : dict
        By name: a Tensor, a numpy scalar of the declared width, or None for a null pointer.
    names : dict of str to int
        `-D` values, scalar arguments and the extents that the tensors bound.

    Raises
    ------
    ArgumentError
        Naming the argument and its value.
    """
    wanted = contract.parameters
    if len(arguments) != len(wanted):
        raise ArgumentError(
            "arguments",
            len(arguments),
            f"{contract.signature()} takes {len(wanted)}",
        )
    checked: dict[str, Argument] = {}
    for parameter, value in zip(wanted, arguments, strict=True):
        checked[parameter.name] = _one(parameter, value)
    names = dict(values)
    for parameter in wanted:
        argument = checked[parameter.name]
        if isinstance(argument, np.integer):
            names[parameter.name] = int(argument)
    tensors = [(p, t) for p in wanted if isinstance(t := checked[p.name], Tensor)]
    _bind_extents(tensors, names)
    for parameter, tensor in tensors:
        _check_layout(parameter, tensor, names)
    return checked, names


def _one(parameter: Parameter, value: object) -> Argument:
    name = parameter.name
    if parameter.is_value:
        return as_scalar(name, value, parameter.dtype)
    if value is None:
        if parameter.optional:
            return None
        raise ArgumentError(name, value, "is not optional; wants a tensor")
    tensor = as_tensor(name, value)
    if tensor is None:
        raise ArgumentError(
            name,
            value,
            f"wants a {parameter.dtype.name} tensor of torch, CuPy or numpy, "
            f"not {type(value).__name__}",
        )
    if tensor.dtype not in parameter.dtype.stored:
        raise ArgumentError(
            name,
            value,
            f"dtype {tensor.dtype}, but the kernel reads {parameter.dtype.name} "
            f"({' or '.join(parameter.dtype.stored)})",
        )
    if not tensor.writable and parameter.access != "read":
        raise ArgumentError(
            name, value, f"is read-only, but the kernel declares it `{parameter.access}`"
        )
    return tensor


def _bind_extents(tensors: Sequence[tuple[Parameter, Tensor]], names: dict[str, int]) -> None:
    bound_by: dict[str, str] = {}
    for parameter, tensor in tensors:
        if parameter.shape is None:
            continue
        if len(tensor.shape) != len(parameter.shape):
            raise ArgumentError(
                parameter.name,
                tensor.owner,
                f"has {len(tensor.shape)} dimensions, not the "
                f"{len(parameter.shape)} of {_shape_text(parameter)}",
            )
        for extent, expression in zip(tensor.shape, parameter.shape, strict=True):
            symbol = expression.symbol if expression else None
            if symbol is None or (symbol in names and symbol not in bound_by):
                continue
            if symbol not in names:
                names[symbol] = extent
                bound_by[symbol] = parameter.name
            elif names[symbol] != extent:
                raise ArgumentError(
                    parameter.name,
                    tensor.owner,
                    f"{symbol} is {extent} here, but {names[symbol]} in {bound_by[symbol]}",
                )


def _check_layout(parameter: Parameter, tensor: Tensor, names: Mapping[str, int]) -> None:
    name, value = parameter.name, tensor.owner
    for axis, expression in enumerate(parameter.shape or ()):
        if expression is None:
            continue
        _need_names(parameter, expression.names, names)
        wanted = expression(names)
        if tensor.shape[axis] != wanted:
            raise ArgumentError(
                name,
                value,
                f"dimension {axis} has {tensor.shape[axis]} elements, wants "
                f"{expression.text} = {wanted}",
            )
    if parameter.stride is None:
        if not tensor.is_contiguous:
            raise ArgumentError(
                name,
                value,
                f"is not contiguous (strides {list(tensor.strides)}), which the kernel needs",
            )
    else:
        for axis, expression in enumerate(parameter.stride):
            _need_names(parameter, expression.names, names)
            wanted = expression(names)
            if tensor.strides[axis] != wanted and tensor.shape[axis] > 1:
                raise ArgumentError(
                    name,
                    value,
                    f"stride {axis} is {tensor.strides[axis]} elements, wants "
                    f"{expression.text} = {wanted}",
                )
        overlaps = any(s == 0 and n > 1 for n, s in zip(tensor.shape, tensor.strides, strict=True))
        if overlaps and parameter.access != "read":
            raise ArgumentError(name, value, "is expanded (stride 0): its elements share memory")
    if any(stride < 0 for stride in tensor.strides):
        raise ArgumentError(name, value, f"has negative strides {list(tensor.strides)}")
    if tensor.address % parameter.align:
        raise ArgumentError(
            name,
            value,
            f"its address is {tensor.address % parameter.align} bytes off a multiple of "
            f"{parameter.align}, which the kernel's accesses need",
        )


def _need_names(parameter: Parameter, wanted: frozenset[str], names: Mapping[str, int]) -> None:
    if missing := sorted(wanted - names.keys()):
        raise ArgumentError(
            parameter.name,
            _shape_text(parameter),
            f"{missing[0]} is neither a value argument, a -D value "
            "that is a whole number, nor an extent of a tensor",
        )


def _shape_text(parameter: Parameter) -> str:
    return "[" + ", ".join("*" if e is None else e.text for e in parameter.shape or ()) + "]"


def packed(arguments: Iterable[Argument]) -> tuple[np.ndarray, np.ndarray]:
    """Return the arguments as a launch reads them.

    Returns
    -------
    cells : ndarray of uint64
        One 8-byte cell for each argument: an address, or the low bytes hold the scalar.
    addresses : ndarray of uint64
        Where each cell lies; valid as long as `cells` lives.
    """
    items = list(arguments)
    cells = np.zeros(max(len(items), 1), np.uint64)
    for at, argument in enumerate(items):
        if isinstance(argument, Tensor):
            cells[at] = argument.address
        elif argument is not None:
            raw = np.frombuffer(argument.tobytes(), np.uint8)
            cells[at : at + 1].view(np.uint8)[: raw.size] = raw
    return cells, cells.ctypes.data + 8 * np.arange(len(cells), dtype=np.uint64)


def device_of(tensors: Sequence[Tensor]) -> str | None:
    """Return the one device that all tensors are on, None if there are none.

    Raises
    ------
    ArgumentError
        If they are on several.
    """
    for tensor in tensors:
        if tensor.device != tensors[0].device:
            raise ArgumentError(
                tensor.name,
                tensor.owner,
                f"is on {tensor.device}, but {tensors[0].name} is on "
                f"{tensors[0].device}; a launch runs on one device",
            )
    return tensors[0].device if tensors else None
