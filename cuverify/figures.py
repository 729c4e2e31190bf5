"""Pictures of a benchmark's records, where matplotlib is installed."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from cuverify.comparison import Line, lines
from cuverify.errors import ArgumentError, ToolchainError

_OURS, _BEST, _READ, _ROOF = "ours", "best peer", "reading alone", "roofline"
_STYLES: Mapping[str, dict[str, Any]] = {
    _OURS: {"color": "#1b6ca8", "marker": "o", "linewidth": 2},
    _BEST: {"color": "#c8553d", "marker": "s"},
    _READ: {"color": "#7a7a7a", "linestyle": "--"},
    _ROOF: {"color": "#222222", "linestyle": ":"},
}
_PER_ROW = 4


def require() -> Any:
    """Return matplotlib's figure module.

    Raises
    ------
    ToolchainError
        It is not installed.
    """
    try:
        import matplotlib.figure
    except ImportError as error:
        raise ToolchainError(
            f"pictures need matplotlib: {error}; `pip install matplotlib`, or leave --picture out"
        ) from error
    return matplotlib.figure


def curves(found: Iterable[Line]) -> dict[tuple[int, int], dict[str, list[tuple[int, float]]]]:
    """Return times over prefix lengths.

    Parameters
    ----------
    found : iterable of Line
        Lines without a batch, rows or a tree are left out, and so are prefixes of unequal lengths.

    Returns
    -------
    dict
        ``(batch, tree)`` to curve to points ``(rows of each prefix, microseconds)``, ascending.
    """
    panels: dict[tuple[int, int], dict[str, list[tuple[int, float]]]] = {}
    for line in found:
        shape = line.shape
        if "+" in line.name or "block" in line.name or "prefix rows" not in shape:
            continue
        rows = int(shape["prefix rows"]) // int(shape["batch"])
        panel = panels.setdefault((int(shape["batch"]), int(shape["tree"])), {})
        values = {
            _OURS: line.ours_us,
            _BEST: line.best[1] if line.best else None,
            _READ: line.read_us,
            _ROOF: line.floor_us,
        }
        for name, us in values.items():
            if us is not None:
                panel.setdefault(name, []).append((rows, us))
    for panel in panels.values():
        for points in panel.values():
            points.sort()
    return dict(sorted(panels.items()))


def roofline(
    records: Sequence[Mapping[str, Any]],
) -> tuple[tuple[float, float] | None, dict[str, list[tuple[float, float]]]]:
    """Return the ceilings and where each op stands below them.

    Returns
    -------
    ceilings : tuple of float or None
        Bytes and operations a second, where the records hold them.
    points : dict of str to list
        ``"ours"`` and each peer to pairs (operations a byte, operations a second).
    """
    rates: dict[str, float] = {}
    points: dict[str, list[tuple[float, float]]] = {}
    for record in records:
        moved, flops, us = record["bytes"], record["flops"], record["us"]
        if record["op"] == "ceilings":
            if us and (moved or flops):
                rates[record["shape"]["what"]] = (moved or flops) / us * 1e6
        elif moved and flops and us and record["shape"].get("name"):
            name = record["peer"] or _OURS
            points.setdefault(name, []).append((flops / moved, flops / us * 1e6))
    points.pop("reading the same rows alone", None)
    read = rates.get("reading rows in their order")
    tensor = rates.get("bf16 matrix product")
    return (None if read is None or tensor is None else (read, tensor)), points


def draw(records: Sequence[Mapping[str, Any]], path: Path) -> None:
    """Draw time against prefix length, one panel a batch and tree, and a roofline.

    Parameters
    ----------
    records : sequence of mapping
        As `cuverify.bench.Record.to_json` gives them.
    path : Path
        ``.svg`` or ``.png``.

    Raises
    ------
    ToolchainError
        matplotlib is not installed.
    ArgumentError
        There is nothing to draw.
    """
    figure_module = require()
    panels = curves(lines(records))
    if not panels:
        raise ArgumentError("records", len(records), "none has a time over a prefix to be drawn")
    rows = -(-(len(panels) + 1) // _PER_ROW)
    figure = figure_module.Figure(figsize=(4 * _PER_ROW, 3 * rows), layout="constrained")
    axes = figure.subplots(rows, _PER_ROW, squeeze=False).reshape(-1)
    for place, ((batch, tree), panel) in zip(axes[1:], panels.items(), strict=False):
        for name, points in panel.items():
            place.plot(*zip(*points, strict=True), label=name, **_STYLES[name])
        place.set(
            title=f"batch {batch}, tree {tree}", xscale="log", yscale="log", xlabel="prefix rows",
            ylabel="us",
        )  # fmt: skip
        place.legend(fontsize="x-small")
    _draw_roofline(axes[0], *roofline(records))
    for unused in axes[len(panels) + 1 :]:
        unused.set_axis_off()
    figure.savefig(path)


def _draw_roofline(
    place: Any,
    ceilings: tuple[float, float] | None,
    points: Mapping[str, Sequence[tuple[float, float]]],
) -> None:
    for name, found in points.items():
        intensity, rate = zip(*found, strict=True)
        tera = [value / 1e12 for value in rate]
        own = (
            {"color": _STYLES[_OURS]["color"], "s": 24, "zorder": 3} if name == _OURS else {"s": 9}
        )
        place.scatter(intensity, tera, label=name, **own)
    if ceilings is not None:
        read, tensor = ceilings
        ends = sorted({1.0, tensor / read, 4 * tensor / read})
        place.plot(ends, [min(tensor, end * read) / 1e12 for end in ends], **_STYLES[_ROOF])
    place.set(title="roofline", xscale="log", yscale="log", xlabel="FLOP a byte", ylabel="TFLOP/s")
    place.legend(fontsize="xx-small", loc="lower right")
