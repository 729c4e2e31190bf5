"""The tensors that a step's own code holds: closures, attributes, globals that it names."""

from __future__ import annotations

import dataclasses
import functools
import types
from collections.abc import Iterator, Mapping
from typing import Any

_DEPTH = 4
_MOST = 2000  # objects that are looked at
_SKIPPED = ("torch", "numpy", "cupy", "triton", "cuda", "builtins", "threading", "logging")


def tensors_reached(root: Any) -> dict[str, Any]:
    """Return the CUDA and pinned torch tensors that `root` holds, by the way to them."""
    return {path: value for path, value in memory_reached(root).items() if _is_tensor(value)}


def address_of(value: Any) -> tuple[int, int]:
    """Return address and bytes of what `memory_reached` found."""
    if _is_tensor(value):
        storage = value.untyped_storage()
        address = int(value.data_ptr())
        return address, int(storage.data_ptr()) + int(storage.nbytes()) - address
    if hasattr(value, "ctypes"):
        return int(value.ctypes.data), int(value.nbytes)
    if hasattr(value, "data") and hasattr(value.data, "ptr"):
        return int(value.data.ptr), int(value.nbytes)
    # CuPy's pointers into a piece of memory
    return int(value.ptr), int(value.mem.size) - (int(value.ptr) - int(value.mem.ptr))


def memory_reached(root: Any) -> dict[str, Any]:
    """Return the memory that a device may touch and that `root` holds, by the way to it.

    torch tensors on a device or pinned, numpy arrays (which may lie on pinned memory), CuPy arrays
    and pinned memory of CuPy's.

    Parameters
    ----------
    root : object
        A function (its closure, defaults and the globals that its code names), a bound method, or
        an object with attributes.

    Returns
    -------
    dict of str to object
        ``step.plan`` for a closure's ``plan``. Nothing is called but `vars`.
    """
    found: dict[str, Any] = {}
    seen: set[int] = set()
    left = [("step", root, 0)]
    while left and len(seen) < _MOST:
        path, value, depth = left.pop(0)
        if id(value) in seen:
            continue
        seen.add(id(value))
        if _is_tensor(value):
            if _is_shared(value):
                found[path] = value
            continue
        if _is_memory(value):
            found[path] = value
            continue
        if depth < _DEPTH:
            left.extend((f"{path}{way}", each, depth + 1) for way, each in _parts(value))
    return found


def _parts(value: Any) -> Iterator[tuple[str, Any]]:
    if isinstance(value, types.FunctionType):
        yield from _of_function(value)
    elif isinstance(value, types.MethodType):
        yield "", value.__self__
        yield "", value.__func__
    elif isinstance(value, functools.partial):
        yield "", value.func
        yield from ((f"[{number}]", each) for number, each in enumerate(value.args))
        yield from ((f".{name}", each) for name, each in value.keywords.items())
    elif isinstance(value, Mapping):
        yield from ((f"[{key!r}]", each) for key, each in list(value.items()))
    elif isinstance(value, (list, tuple, set, frozenset)):
        yield from ((f"[{number}]", each) for number, each in enumerate(list(value)))
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        yield from ((f".{each.name}", getattr(value, each.name, None)) for each in _fields(value))
    elif not isinstance(value, (type, types.ModuleType)) and _is_plain(value):
        yield from ((f".{name}", each) for name, each in list(vars(value).items()))
        call = vars(type(value)).get("__call__")
        if isinstance(call, types.FunctionType):
            yield "", call


def _fields(value: Any) -> tuple[Any, ...]:
    return dataclasses.fields(value)


def _of_function(function: types.FunctionType) -> Iterator[tuple[str, Any]]:
    cells = function.__closure__ or ()
    for name, cell in zip(function.__code__.co_freevars, cells, strict=False):
        try:
            yield f".{name}", cell.cell_contents
        except ValueError:  # not bound yet
            continue
    for number, default in enumerate(function.__defaults__ or ()):
        yield f".default{number}", default
    for name in function.__code__.co_names:
        value = function.__globals__.get(name)
        if _is_tensor(value) or isinstance(value, (dict, list)) or _is_plain(value):
            yield f".{name}", value


def _is_tensor(value: Any) -> bool:
    return type(value).__module__.partition(".")[0] == "torch" and hasattr(value, "data_ptr")


def _is_memory(value: Any) -> bool:
    kind = type(value)
    if kind.__module__ == "numpy" and kind.__name__ == "ndarray":
        return True
    cupy = kind.__module__.partition(".")[0] == "cupy"
    return cupy and kind.__name__ in ("ndarray", "PinnedMemoryPointer", "MemoryPointer")


def _is_shared(tensor: Any) -> bool:
    """Tell whether a device can touch the tensor."""
    return bool(tensor.is_cuda or tensor.is_pinned())


def _is_plain(value: Any) -> bool:
    module = type(value).__module__.partition(".")[0]
    known = module not in _SKIPPED or hasattr(value, "named_parameters")
    return known and hasattr(value, "__dict__")
