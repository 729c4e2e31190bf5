"""Values of the attention kernels that were found best on a GPU: small tables, one a GPU.

`cuverify tune` writes them; an op looks up what it does not get from its caller. A table is keyed
by what is known when a step is made: the kernel's variant and the query rows of a request. Lengths
change from step to step, and the plan sees to them on the device.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib import resources
from typing import Any

from cuverify.errors import TuningError

SCHEMA = 1
PACKAGE = "cuverify.tuned"

_KEYS = {"variant", "rows", "plan", "values"}
_NAME = re.compile(r"[A-Z][A-Z0-9_]*", re.ASCII)


@dataclass(frozen=True)
class Choice:
    """Values of one step's kernels, by name; whatever is absent keeps the text's default.

    Attributes
    ----------
    plan : mapping of str to int
        `-D` values of verify_plan.cu.
    values : mapping of str to int
        `-D` values of the attention's text.
    """

    plan: Mapping[str, int] = field(default_factory=dict)
    values: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Entry:
    """What is best for one variant, up to some number of query rows.

    Attributes
    ----------
    variant : str
    rows : int or None
        Most query rows of a request (tree tokens times heads); None for any number.
    choice : Choice
    """

    variant: str
    rows: int | None
    choice: Choice


@dataclass(frozen=True)
class TunedTable:
    """All entries of one GPU.

    Attributes
    ----------
    gpu : str
        Its name, as torch gives it.
    architecture : str
        Such as ``sm_90``.
    entries : tuple of Entry
        Of a variant in ascending order of rows, None last.
    """

    gpu: str
    architecture: str
    entries: tuple[Entry, ...]

    @classmethod
    def from_json(cls, document: Any) -> TunedTable:
        """Read what `to_json` gives.

        Raises
        ------
        TuningError
            It is malformed.
        """
        try:
            if document["schema"] != SCHEMA:
                raise TuningError(f"a table of schema {document['schema']!r}, not {SCHEMA}")
            entries = tuple(_entry(item) for item in document["entries"])
            table = cls(str(document["gpu"]), str(document["architecture"]), entries)
        except (KeyError, TypeError, AttributeError) as error:
            raise TuningError(f"a table of tuned values lacks something: {error!r}") from error
        table._check_order()
        return table

    def to_json(self) -> dict[str, Any]:
        """Return the table as JSON values."""
        return {
            "schema": SCHEMA,
            "gpu": self.gpu,
            "architecture": self.architecture,
            "entries": [
                {
                    "variant": entry.variant,
                    "rows": entry.rows,
                    "plan": dict(entry.choice.plan),
                    "values": dict(entry.choice.values),
                }
                for entry in self.entries
            ],
        }

    def lookup(self, variant: str, rows: int) -> Choice | None:
        """Return the first entry's choice that holds for so many query rows of a request."""
        for entry in self.entries:
            if entry.variant == variant and (entry.rows is None or rows <= entry.rows):
                return entry.choice
        return None

    def _check_order(self) -> None:
        last: dict[str, float] = {}
        for entry in self.entries:
            rows = float("inf") if entry.rows is None else entry.rows
            if rows <= last.get(entry.variant, 0):
                raise TuningError(
                    f"rows of variant {entry.variant!r} do not ascend at {entry.rows}"
                )
            last[entry.variant] = rows


def tuned(gpu: str, architecture: str, *, variant: str, rows: int) -> Choice:
    """Return what is best on a GPU, as far as anybody has measured it.

    Parameters
    ----------
    gpu : str
        Name of the device.
    architecture : str
        Such as ``sm_90``; a table of another GPU of that architecture serves where this one has
        none.
    variant : str
        Which text attends.
    rows : int
        Most query rows of a request.

    Returns
    -------
    Choice
        Empty where nothing is known: every text has good defaults.
    """
    own = [table for table in tables() if table.gpu == gpu]
    kin = [table for table in tables() if table.architecture == architecture]
    return find_choice([*own, *kin], variant, rows)


def choice_for(device: str | None, *, variant: str, rows: int) -> Choice:
    """Return what is best on a device, an empty choice for the host lane.

    Parameters
    ----------
    device : str or None
        As torch names it, such as ``cuda:0``; ``cpu`` or None for the host lane.
    variant, rows
        As for `tuned`.
    """
    if device in (None, "cpu"):
        return Choice()
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    name = torch.cuda.get_device_name(device)
    return tuned(name, f"sm_{major}{minor}", variant=variant, rows=rows)


def choices_of(arch: str, variant: str) -> tuple[Choice, ...]:
    """Return all choices that a step can meet on an architecture, the empty one among them.

    Parameters
    ----------
    arch : str
        Such as ``sm_90``, or ``sm_90a`` for the same GPUs.
    variant : str
        Which text attends.
    """
    found = [Choice()]
    for table in tables():
        if table.architecture == arch.rstrip("a"):
            found += [entry.choice for entry in table.entries if entry.variant == variant]
    return tuple(choice for at, choice in enumerate(found) if choice not in found[:at])


def find_choice(candidates: Iterable[TunedTable], variant: str, rows: int) -> Choice:
    """Return the choice of the first table that has one, an empty one if none has."""
    for table in candidates:
        choice = table.lookup(variant, rows)
        if choice is not None:
            return choice
    return Choice()


@functools.cache
def tables() -> tuple[TunedTable, ...]:
    """Return the package's tables, by file name.

    Raises
    ------
    TuningError
        One of them is malformed.
    """
    files = [file for file in resources.files(PACKAGE).iterdir() if file.name.endswith(".json")]
    return tuple(
        TunedTable.from_json(json.loads(file.read_text(encoding="utf-8")))
        for file in sorted(files, key=lambda file: file.name)
    )


def _entry(item: Mapping[str, Any]) -> Entry:
    if set(item) != _KEYS:
        raise TuningError(f"an entry has keys {sorted(item)}, wants {sorted(_KEYS)}")
    rows = item["rows"]
    if rows is not None and (isinstance(rows, bool) or not isinstance(rows, int) or rows < 1):
        raise TuningError(f"rows are {rows!r}, wants a number from 1 on, or null for all others")
    return Entry(str(item["variant"]), rows, Choice(_values(item["plan"]), _values(item["values"])))


def _values(given: Mapping[str, Any]) -> dict[str, int]:
    for name, value in given.items():
        if not _NAME.fullmatch(name) or isinstance(value, bool) or not isinstance(value, int):
            raise TuningError(f"{name}={value!r} is no whole-number value of a kernel")
    return dict(given)
