"""Records as JSON values and back: a child process sends them, and recordings are kept in tests."""

from __future__ import annotations

import dataclasses
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any

from cuverify.validators.observations import CaptureSeen

from cuverify.errors import ArgumentError

_SPECIAL = {"nan": math.nan, "inf": math.inf, "-inf": -math.inf}


def to_plain(seen: CaptureSeen) -> dict[str, Any]:
    """Return a record as values that `json.dumps` takes; fields at their defaults are left out."""
    return _plain(seen)  # type: ignore[no-any-return]


def from_plain(document: Mapping[str, Any]) -> CaptureSeen:
    """Return the record that `to_plain` wrote.

    Raises
    ------
    ArgumentError
        The document has a field that no record has.
    """
    return _build(CaptureSeen, document)  # type: ignore[no-any-return]


def _plain(value: Any) -> Any:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        found = {}
        for field in dataclasses.fields(value):
            held = getattr(value, field.name)
            if not _is_default(field, held):
                found[field.name] = _plain(held)
        return found
    if isinstance(value, Mapping):
        return {str(key): _plain(each) for key, each in value.items()}
    if isinstance(value, (frozenset, set)):
        return sorted(_plain(each) for each in value)
    if isinstance(value, (list, tuple)):
        return [_plain(each) for each in value]
    if isinstance(value, float) and not math.isfinite(value):
        return {"float": str(value)}
    return value


def _is_default(field: dataclasses.Field[Any], value: Any) -> bool:
    if field.default is not dataclasses.MISSING:
        return type(value) is type(field.default) and bool(value == field.default)
    if field.default_factory is not dataclasses.MISSING:
        return bool(value == field.default_factory())
    return False


@functools.cache
def _hints(kind: type) -> dict[str, Any]:
    return typing.get_type_hints(kind)


def _build(kind: Any, value: Any) -> Any:
    if isinstance(value, Mapping) and set(value) == {"float"}:
        return _SPECIAL[value["float"]]
    if dataclasses.is_dataclass(kind):
        hints = _hints(kind)  # type: ignore[arg-type]
        unknown = set(value) - set(hints)
        if unknown:
            raise ArgumentError("document", sorted(unknown), f"no field of {kind}")
        return kind(**{name: _build(hints[name], each) for name, each in value.items()})  # type: ignore[operator]
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        if value is None:
            return None
        for each in inner:
            if each is not type(None) and _suits(each, value):
                return _build(each, value)
        return value
    if origin is tuple:
        kinds = [inner[0]] * len(value) if inner[-1] is Ellipsis else inner
        return tuple(_build(each, part) for each, part in zip(kinds, value, strict=True))
    if origin is list:
        return [_build(inner[0], part) for part in value]
    if origin is frozenset:
        return frozenset(value)
    if origin is not None and issubclass(origin, Mapping):
        return {key: _build(inner[1], part) for key, part in value.items()}
    return value


def _suits(kind: Any, value: Any) -> bool:
    if dataclasses.is_dataclass(kind):
        return isinstance(value, Mapping)
    if typing.get_origin(kind) is tuple:
        return isinstance(value, list)
    return isinstance(kind, type) and isinstance(value, kind)
