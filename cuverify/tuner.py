"""Search the values of the attention kernels that are best on the GPU at hand.

One knob after the other, for each number of query rows apart: a value is kept where it makes the
geometric mean over a few lengths and batch sizes faster by more than times scatter. A value whose
result is wrong, or that does not compile, is not a candidate.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Literal

from cuverify.comparison import geometric_mean
from cuverify.errors import ArgumentError, CuverifyError, DeviceError
from cuverify.files import write_atomically
from cuverify.report import Report, Table
from cuverify.tuning import Choice, Entry, TunedTable
from cuverify.verify_shapes import Shape
from cuverify.verify_variants import VARIANTS, VariantName, variant_of

if TYPE_CHECKING:
    from cuverify.verify_problem import Problem

Measure = Callable[[Shape, VariantName, Choice], float | None]
Part = Literal["plan", "values"]

MARGIN = 1.01
"""How many times faster a value must be to be kept: times of two runs differ by a percent."""

CLASSES: tuple[tuple[int | None, int], ...] = (
    (64, 8), (128, 16), (256, 32), (512, 64), (None, 129),
)  # fmt: skip
"""Query rows of a request up to which an entry holds, and the tree that stands for them."""

STEPS = ("1x1k", "1x16k", "1x64k", "4x16k", "16x4k")
"""Requests and prefixes that stand for all others."""

_COPIES = 4  # of each shape's rows, so that those of five shapes fit beside each other
_SPARE = 4096  # slots that hold NaN


@dataclass(frozen=True)
class Knob:
    """One value that is searched.

    Attributes
    ----------
    part : {"plan", "values"}
        Whose `-D` value it is: the plan's or the attention's.
    name : str
    candidates : tuple of int
    """

    part: Part
    name: str
    candidates: tuple[int, ...]


KNOBS: Mapping[VariantName, tuple[Knob, ...]] = {
    "portable": (
        Knob("plan", "ROOT_HALVES", (1, 2, 3, 4)),
        Knob("plan", "START_ROWS", (48, 80, 112, 144)),
        Knob("plan", "LEAST_ROWS", (16, 32, 64)),
        Knob("values", "STAGES", (4, 5)),
        Knob("values", "QUERIES_SHARED", (4, 6, 8)),
        Knob("values", "COMBINE_UNROLL", (6, 9, 12)),
    ),
    "sm90": (
        Knob("plan", "ROOT_HALVES", (0, 2, 3, 4)),
        Knob("plan", "START_ROWS", (48, 96, 144, 192)),
        Knob("plan", "HALVES_ROWS", (0, 160, 320, 640)),
        Knob("values", "COMBINE_UNROLL", (12, 15)),
    ),
}
"""What is searched for each variant, in this order."""


@dataclass(frozen=True)
class Trial:
    """One candidate that was measured.

    Attributes
    ----------
    rows : int or None
        As in `cuverify.tuning.Entry`.
    knob : str
    value : int or None
        None for the defaults that everything starts from.
    gain : float or None
        How many times faster than the best before, geometric mean; None where a result was wrong.
    kept : bool
    """

    rows: int | None
    knob: str
    value: int | None
    gain: float | None
    kept: bool


def search(
    variant: VariantName,
    knobs: Sequence[Knob],
    measure: Measure,
    *,
    classes: Sequence[tuple[int | None, int]] = CLASSES,
    steps: Sequence[str] = STEPS,
    defaults: Mapping[str, int] | None = None,
    keep_going: Callable[[], bool] = lambda: True,
) -> tuple[list[Entry], list[Trial]]:
    """Search the best values of one variant.

    Parameters
    ----------
    variant : str
    knobs : sequence of Knob
    measure : callable
        Returns the microseconds of a shape with some values, None where they are no good.
    classes, steps
        See `CLASSES` and `STEPS`.
    defaults : mapping of str to int, optional
        What the texts have where nothing is chosen; not measured twice.
    keep_going : callable
        Asked before each candidate; the search ends with what it has.

    Returns
    -------
    entries : list of Entry
        For those classes whose search was finished.
    trials : list of Trial
        Everything that was measured.

    Raises
    ------
    DeviceError
        The defaults themselves are no good at some shape.
    """
    entries: list[Entry] = []
    trials: list[Trial] = []
    for rows, tree in classes:
        shapes = [Shape.parse(f"{step}:{tree}") for step in steps]
        choice = Choice()
        best = _times(shapes, variant, choice, measure)
        if best is None:
            raise DeviceError(f"variant {variant!r} is wrong with its defaults, tree {tree}")
        trials.append(Trial(rows, "defaults", None, 1.0, True))
        for knob in knobs:
            start = (defaults or {}).get(knob.name)
            for value in knob.candidates:
                if value == start:
                    continue
                if not keep_going():
                    return entries, trials
                candidate = _with(choice, knob, value)
                times = _times(shapes, variant, candidate, measure)
                gain = None if times is None else _gain(best, times)
                kept = gain is not None and gain > MARGIN
                trials.append(Trial(rows, knob.name, value, gain, kept))
                if kept and times is not None:
                    choice, best = candidate, times
        entries.append(Entry(variant, rows, choice))
    return entries, trials


def tune(
    variants: Sequence[str] = (),
    *,
    rows: Sequence[int] = (),
    seconds: float | None = None,
    folder: Path | None = None,
    progress: Callable[[str, int, int], None] | None = None,
) -> tuple[Report, Path]:
    """Search on this machine's GPU and write its table.

    Parameters
    ----------
    variants : sequence of str
        Of `KNOBS`; those that this GPU can run when empty. Entries of others stay as they are.
    rows : sequence of int
        Query rows of a request: only the classes of those are searched; all when empty.
    seconds : float, optional
        No candidate is begun later than this; classes that are not finished get no entry.
    folder : Path, optional
        Where tables lie; the package's own folder if absent.
    progress : callable, optional
        Told what is being measured.

    Returns
    -------
    report : Report
        Every candidate with its gain, and what was kept.
    path : Path
        The table's file.

    Raises
    ------
    ArgumentError
        A variant is unknown.
    DeviceError
        There is no CUDA device, or a variant is wrong with its defaults.
    """
    for variant in variants:
        if variant not in KNOBS:
            raise ArgumentError("variants", variant, f"known are {', '.join(KNOBS)}")
    from cuverify.evidence.gpu import gpu_name, slug

    gpu = gpu_name()
    import torch

    import cuverify.tuned

    started = time.monotonic()
    measure = Measuring()
    report = Report(f"tune on {gpu}")
    found: list[Entry] = []
    capability = torch.cuda.get_device_capability()
    chosen = [name for name in KNOBS if name in variants] or sorted(
        {variant_of(capability), "portable"}
    )
    for number, variant in enumerate(chosen):
        if progress is not None:
            progress(variant, number, len(chosen))
        entries, trials = search(
            variant,
            KNOBS[variant],
            measure,
            classes=classes_of(rows),
            defaults=default_values(variant),
            keep_going=lambda: seconds is None or time.monotonic() - started < seconds,
        )
        found.extend(entries)
        report.tables.append(trial_table(variant, trials))
    major, minor = capability
    folder = Path(cuverify.tuned.__path__[0]) if folder is None else folder
    path = folder / f"{slug(gpu)}.json"
    old = TunedTable.from_json(json.loads(path.read_text())).entries if path.is_file() else ()
    table = TunedTable(gpu, f"sm_{major}{minor}", merged(old, found))
    document = json.dumps(table.to_json(), indent=1)
    write_atomically(path, document + "\n")
    return report, path


def classes_of(rows: Sequence[int]) -> tuple[tuple[int | None, int], ...]:
    """Return those of `CLASSES` that hold requests of so many query rows; all for none.

    Raises
    ------
    ArgumentError
        A number is below 1.
    """
    for count in rows:
        if count < 1:
            raise ArgumentError("rows", count, "a request has at least one query row")
    first = {
        next(pair for pair in CLASSES if pair[0] is None or count <= pair[0]) for count in rows
    }
    return tuple(pair for pair in CLASSES if pair in first) if rows else CLASSES


def default_values(variant: VariantName) -> dict[str, int]:
    """Return what a variant's knobs are where nothing is chosen."""
    from cuverify.sources import KernelSource

    texts = {"plan": "verify_plan", "values": VARIANTS[variant].stem}
    known = {part: KernelSource.from_package(stem).known_values() for part, stem in texts.items()}
    defaults = {knob.name: int(known[knob.part][knob.name]) for knob in KNOBS[variant]}
    return {**defaults, **VARIANTS[variant].plan}


def merged(old: Sequence[Entry], new: Sequence[Entry]) -> tuple[Entry, ...]:
    """Return entries of both, the new ones where both have one, in a table's order."""
    both = {(entry.variant, entry.rows): entry for entry in (*old, *new)}
    order = sorted(both, key=lambda key: (key[0], math.inf if key[1] is None else key[1]))
    return tuple(both[key] for key in order)


def trial_table(variant: str, trials: Sequence[Trial]) -> Table:
    """Return what was tried as a table."""
    return Table(
        f"values of {variant}",
        ("query rows", "value", "times faster", "kept"),
        [
            (
                "more" if trial.rows is None else f"to {trial.rows}",
                trial.knob if trial.value is None else f"{trial.knob}={trial.value}",
                "wrong" if trial.gain is None else round(trial.gain, 3),
                "yes" if trial.kept else "no",
            )
            for trial in trials
        ],
    )


class Measuring:
    """Judges and times candidates on the current GPU; the tensors of one tree's shapes are kept."""

    def __init__(self, repeats: int = 7) -> None:
        self.repeats = repeats
        self.problems: dict[Shape, Problem] = {}

    def __call__(self, shape: Shape, variant: VariantName, choice: Choice) -> float | None:
        """Return the microseconds of a candidate, None where it is wrong or does not compile."""
        from cuverify.bench import time_copies
        from cuverify.own_attention import OwnAttention

        problem = self._problem(shape)
        try:
            own = OwnAttention.of(
                problem,
                variant=variant,
                values=choice.values,
                plan_values={**VARIANTS[variant].plan, **choice.plan},
            )
        except CuverifyError:
            return None
        return None if own.judge() is not None else time_copies(own.layers, self.repeats).us

    def _problem(self, shape: Shape) -> Problem:
        from cuverify.verify_problem import Problem, new_pool

        if any(known.tree != shape.tree for known in self.problems):
            self.problems.clear()
        if shape not in self.problems:
            pool = new_pool(_COPIES * shape.rows + _SPARE)
            self.problems[shape] = Problem(shape, pool, copies=_COPIES)
        return self.problems[shape]


def _times(
    shapes: Sequence[Shape], variant: VariantName, choice: Choice, measure: Measure
) -> list[float] | None:
    times = []
    for shape in shapes:
        us = measure(shape, variant, choice)
        if us is None:
            return None
        times.append(us)
    return times


def _gain(before: Sequence[float], after: Sequence[float]) -> float | None:
    return geometric_mean([old / new for old, new in zip(before, after, strict=True)])


def _with(choice: Choice, knob: Knob, value: int) -> Choice:
    parts = {"plan": dict(choice.plan), "values": dict(choice.values)}
    parts[knob.part][knob.name] = value
    return Choice(parts["plan"], parts["values"])
