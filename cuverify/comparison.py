"""Ours beside the best peer, shape by shape: a view of a benchmark's records."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from cuverify.report import Table

READING = "reading the same rows alone"
"""The peer that only reads: a floor, and nobody's attention."""

COLUMNS = (
    "shape", "roofline us", "read us", "ours us", "x roofline", "x read", "alone us", "best peer",
    "peer us", "times faster", "target us",
)  # fmt: skip


@dataclass
class Line:
    """All times of one op at one shape, in microseconds.

    Attributes
    ----------
    op, name : str
        The benchmark's op and the shape's name.
    shape : mapping
        What the record of ours says of it.
    floor_us, read_us, ours_us, ours_alone_us : float or None
        Roofline, reading alone, ours in a graph of several copies, and in a graph of its own.
    wrong : str or None
        What the gate said of ours; there is no time then.
    peers : dict of str to float
        Times of those that were right.
    refused : dict of str to str
        What was said of those that were not.
    """

    op: str
    name: str
    shape: Mapping[str, Any] = field(default_factory=dict)
    floor_us: float | None = None
    read_us: float | None = None
    ours_us: float | None = None
    ours_alone_us: float | None = None
    ours_spread: float | None = None
    wrong: str | None = None
    peers: dict[str, float] = field(default_factory=dict)
    refused: dict[str, str] = field(default_factory=dict)

    @property
    def best(self) -> tuple[str, float] | None:
        """The fastest peer and its time."""
        if not self.peers:
            return None
        name = min(self.peers, key=lambda peer: self.peers[peer])
        return name, self.peers[name]

    @property
    def speedup(self) -> float | None:
        """How many times faster than the best peer we are."""
        return self.best[1] / self.ours_us if self.best and self.ours_us else None


def lines(records: Iterable[Mapping[str, Any]]) -> list[Line]:
    """Return one line for each op and shape that has a name, in the order of the records.

    Parameters
    ----------
    records : iterable of mapping
        `cuverify.bench.Record` as JSON values.
    """
    found: dict[tuple[str, str], Line] = {}
    for record in records:
        name = record["shape"].get("name")
        if not isinstance(name, str):
            continue
        line = found.setdefault((record["op"], name), Line(record["op"], name))
        wrong = record["error"] if isinstance(record["error"], str) else None
        if record["peer"] == READING:
            line.read_us = record["us"]
            line.floor_us = record["floor_us"]
        elif record["peer"] is not None:
            if wrong is None:
                line.peers[record["peer"]] = record["us"]
            else:
                line.refused[record["peer"]] = wrong
        else:
            line.shape = record["shape"]
            line.ours_us, line.wrong = record["us"], wrong
            line.ours_spread, line.ours_alone_us = record["us_spread"], record.get("alone_us")
            line.floor_us = record["floor_us"]
    return list(found.values())


def geometric_mean(values: Sequence[float]) -> float | None:
    """Return the geometric mean of positive numbers, None of none."""
    return math.exp(math.fsum(map(math.log, values)) / len(values)) if values else None


def comparison_table(records: Iterable[Mapping[str, Any]]) -> Table:
    """Return the lines that have a floor, and a peer or the time of reading, as a table."""
    rows = []
    for line in lines(records):
        if line.floor_us is None or (line.best is None and line.read_us is None):
            continue
        name, us = line.best or (None, None)
        rows.append(
            (
                line.name, _rounded(line.floor_us), _rounded(line.read_us),
                f"wrong: {line.wrong}" if line.wrong else _rounded(line.ours_us),
                _ratio(line.ours_us, line.floor_us), _ratio(line.ours_us, line.read_us),
                _rounded(line.ours_alone_us), name, _rounded(us), _rounded(line.speedup, 2),
                line.shape.get("target_us"),
            )
        )  # fmt: skip
    return Table("ours and the best peer", COLUMNS, rows)


def _rounded(value: float | None, digits: int = 1) -> float | None:
    return None if value is None else round(value, digits)


def _ratio(value: float | None, floor: float | None) -> float | None:
    return None if value is None or not floor else round(value / floor, 1)
