"""The part `bench`: every benchmark, with its peers and floors."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from cuverify.evidence.fields import is_number, is_text
from cuverify.evidence.parts import Part
from cuverify.report import Table


def _validate(problems: list[str], where: str, data: Any) -> None:
    names = ("op", "shape", "us", "us_spread", "floor_us", "bytes", "flops", "peer", "error")
    if not isinstance(data, list) or not data:
        problems.append(f"{where} is no list of measurements, or empty")
        return
    for index, entry in enumerate(data):
        here = f"{where}[{index}]"
        if not isinstance(entry, dict) or set(entry) != set(names):
            problems.append(f"{here} must hold exactly {', '.join(names)}")
            continue
        if not is_text(entry["op"]):
            problems.append(f"{here}.op is {entry['op']!r}, not a name")
        shape = entry["shape"]
        if not isinstance(shape, dict) or not all(
            is_number(value) or is_text(value) for value in shape.values()
        ):
            problems.append(f"{here}.shape is {shape!r}, not an object of numbers and names")
        for name in ("us", "us_spread", "floor_us", "bytes", "flops"):
            if entry[name] is not None and not is_number(entry[name]):
                problems.append(f"{here}.{name} is {entry[name]!r}, neither a number nor null")
        if entry["us"] is None and entry["error"] is None:
            problems.append(f"{here} has neither a time nor an error")
        if entry["peer"] is not None and not is_text(entry["peer"]):
            problems.append(f"{here}.peer is {entry['peer']!r}, neither a name nor null")
        error = entry["error"]
        if error is not None and not (is_text(error) or is_number(error)):
            problems.append(f"{here}.error is {error!r}, neither text, a number nor null")


def _summary(data: Any) -> str:
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

    return "cuverify bench", bench.measure()


PART = Part(
    groups=("kernels", "lanes"),
    validate=_validate,
    summary=_summary,
    table=_table,
    record=_record,
)
