"""The parts of an evidence file, one module each: what a run brings, and how it is judged."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuverify.report import Table


def _no_failures(data: Any) -> Iterable[str]:
    return ()


@dataclass(frozen=True)
class Part:
    """One kind of result. The module of the same name holds it as ``PART``.

    Parameters
    ----------
    groups : tuple of str
        Keys of `cuverify.evidence.source_tree.GROUPS`: the files that the result depends on.
    validate : callable
        Takes a list of problems to add to, the place of the data in the document, and the data.
    summary : callable
        Takes valid data; returns the result in a few words.
    record : callable
        Takes the source tree's root; measures, and returns the command that stands for the run and
        the data, as JSON values. Raises `EvidenceError` where the run did not come to its end.
    failures : callable
        Takes valid data; returns what is wrong with the product by this result, in words.
    table : callable, optional
        Takes the GPU's name and valid data; returns the data as a table.
    """

    groups: tuple[str, ...]
    validate: Callable[[list[str], str, Any], None]
    summary: Callable[[Any], str]
    record: Callable[[Path], tuple[str, Any]]
    failures: Callable[[Any], Iterable[str]] = _no_failures
    table: Callable[[str, Any], Table] | None = None


def part_names() -> tuple[str, ...]:
    """Return the names of all parts, sorted."""
    return tuple(sorted(module.name for module in pkgutil.iter_modules(__path__)))


def find_part(name: str) -> Part:
    """Return a part by its name, one of `part_names`."""
    return importlib.import_module(f"{__name__}.{name}").PART  # type: ignore[no-any-return]
