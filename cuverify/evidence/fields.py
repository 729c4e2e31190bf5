"""What the values of an evidence file may be."""

from __future__ import annotations

import datetime
import math
from collections.abc import Mapping, Sequence
from typing import Any


def unknown(
    problems: list[str], where: str, found: Mapping[str, Any], known: Sequence[str]
) -> None:
    """Add the names that are not known to a list of problems."""
    problems.extend(f"{where}.{name} is unknown" for name in found if name not in known)


def is_text(value: Any) -> bool:
    """Tell whether a value is a text that says something."""
    return isinstance(value, str) and bool(value.strip())


def is_number(value: Any) -> bool:
    """Tell whether a value is a finite number, zero or more."""
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value >= 0
    )


def is_count(value: Any) -> bool:
    """Tell whether a value is a whole number, zero or more."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def is_date(value: Any) -> bool:
    """Tell whether a value is an ISO date with a time zone."""
    try:
        return datetime.datetime.fromisoformat(value).tzinfo is not None
    except (TypeError, ValueError):
        return False
