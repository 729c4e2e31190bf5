"""The part `bench`: every benchmark without a part of its own, with its peers and floors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cuverify.evidence.fields import is_number, is_text
from cuverify.evidence.parts import Part
from cuverify.report import Table

ELSEWHERE = ("verify_attention", "token_exactness")
"""Benchmarks that take minutes, and are the part `attention`."""


def validate_records(problems: list[str], where: str, data: Any) -> None:
    """Add what is wrong with a list of measurements to a list of problems."""
    since = ("alone_us", "alone_spread", "read_us")  # older evidence lacks them
    names = ("op", "shape", "us", "us_spread", "floor_us", "bytes", "flops", "peer", "error")
    if not isinstance(data, list) or not data:
        problems.append(f"{where} is no list of measurements, or empty")
        return
    for index, entry in enumerate(data):
        here = f"{where}[{index}]"
        if not isinstance(entry, dict) or set(entry) - set(since) != set(names):
            problems.append(f"{here} must hold exactly {', '.join(names)}")
            continue
        if not is_text(entry["op"]):
            problems.append(f"{here}.op is {entry['op']!r}, not a name")
        shape = entry["shape"]
        if not isinstance(shape, dict) or not all(
            is_number(value) or is_text(value) for value in shape.values()
        ):
            problems.append(f"{here}.shape is {shape!r}, not an object of numbers and names")
        for name in ("us", "us_spread", "floor_us", "bytes", "flops", *since):
            value = entry.get(name)
            if value is not None and not is_number(value):
                problems.append(f"{here}.{name} is {value!r}, neither a number nor null")
        if entry["us"] is None and entry["error"] is None:
            problems.append(f"{here} has neither a time nor an error")
        if entry["peer"] is not None and not is_text(entry["peer"]):
            problems.append(f"{here}.peer is {entry['peer']!r}, neither a name nor null")
        error = entry["error"]
        if error is not None and not (is_text(error) or is_number(error)):
            problems.append(f"{here}.error is {error!r}, neither text, a number nor null")


def summary_of_records(data: Any) -> str:
    """Return how many measurements of what there are."""
    ops = sorted({entry["op"] for entry in data})
    return f"{len(data)} measurements of {', '.join(ops)}"


def _table(gpu: str, data: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for entry in data:
        us, floor = entry["us"], entry["floor_us"]
        share = None if not us or floor is None else round(100 * floor / us, 1)
        rows.append(
            (
                entry["op"],
                entry["shape"],
                entry["peer"],
                us,
                entry["us_spread"],
                floor,
                share,
                entry["error"],
            )
        )
    heads = ("op", "shape", "peer", "us", "spread us", "floor us", "floor %", "error")
    return Table(f"bench on {gpu}", heads, rows)


def _record(root: Path) -> tuple[str, list[dict[str, Any]]]:
    from cuverify import bench

    others = [name for name in bench.names() if name not in ELSEWHERE]
    return f"cuverify bench {' '.join(others)}", bench.measure(others)


PART = Part(
    groups=("kernels", "lanes"),
    validate=validate_records,
    summary=summary_of_records,
    table=_table,
    record=_record,
)
