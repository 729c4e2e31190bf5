"""The part `attention`: verify attention at all shapes beside all peers, and its greedy tokens."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cuverify.comparison import comparison_table
from cuverify.evidence.parts import Part
from cuverify.evidence.parts.bench import ELSEWHERE, summary_of_records, validate_records
from cuverify.report import Table


def _table(gpu: str, data: Any) -> Table:
    compared = comparison_table(data)
    return Table(f"attention on {gpu}", compared.columns, compared.rows)


def _record(
    root: Path, *, shapes: Sequence[str] = ("all",), seconds: float | None = None
) -> tuple[str, list[dict[str, Any]]]:
    from cuverify import bench

    attention, tokens = ELSEWHERE
    options: dict[str, Any] = {"shapes": list(shapes)}
    command = f"cuverify bench {attention} --shapes {','.join(shapes)}"
    if seconds is not None:
        options["seconds"] = seconds
        command += f" --seconds {seconds:g}"
    measured = bench.measure([attention], options) + bench.measure([tokens])
    return f"{command}; cuverify bench {tokens}", measured


def _written(root: Path) -> None:
    from cuverify import performance

    performance.write(root)


PART = Part(
    groups=("kernels", "lanes"),
    validate=validate_records,
    summary=summary_of_records,
    table=_table,
    record=_record,
    options=("shapes", "seconds"),
    written=_written,
)
