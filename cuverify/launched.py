"""Which `-D` values the package's ops launch their kernels with, to compile them ahead.

Each op module has a function `launched(arch)` that yields `cuverify.launching.Launched`. What only
a caller can know, such as the number of heads, is there for the models of today; a `-D` value of
the caller's own takes its place.
"""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from cuverify.compile import ARCHITECTURES, max_shared_bytes
from cuverify.errors import ArgumentError
from cuverify.launching import Launched
from cuverify.report import Report
from cuverify.resources import Progress, package_stems, survey_of, wanted
from cuverify.sources import KernelSource, Value


def launched_sources(
    stem: str, arch: str, fixed: Mapping[str, Value] | None = None
) -> tuple[KernelSource, ...]:
    """Return a text of the package with every set of `-D` values that an op can choose.

    Parameters
    ----------
    stem : str
        Of a text in kernels_cu.
    arch : str
        The architecture that chooses, such as ``sm_90a``.
    fixed : mapping, optional
        Values that narrow the choice: sets with another value of that name fall out, those without
        any stay. Where no set has the value, it is put into all of them.

    Raises
    ------
    SourceError
        The text has no such value.
    """
    found = [values for each in _launched(arch) if each.stem == stem for values in each.values()]
    for name, value in (fixed or {}).items():
        if any(values.get(name) == value for values in found):
            found = [values for values in found if values.get(name, value) == value]
        else:
            found = [{**values, name: value} for values in found]
    unlike = {tuple(sorted(values.items())): values for values in found}
    return tuple(KernelSource.from_package(stem, values=values) for values in unlike.values())


def survey_launched(
    stems: Sequence[str],
    architectures: Sequence[str] = (),
    fixed: Mapping[str, Value] | None = None,
    *,
    save: Path | None = None,
    progress: Progress | None = None,
) -> Report:
    """Compile texts with all values that ops choose from on each architecture.

    Parameters
    ----------
    stems : sequence of str
        Of the package's texts; all when empty.
    architectures : sequence of str
        All supported ones when empty.
    fixed : mapping, optional
        As for `launched_sources`; of several texts, for those that have such a value.
    save, progress
        As for `cuverify.resources.survey`.

    Returns
    -------
    Report
        As of `cuverify.resources.survey`, with the values of each row.

    Raises
    ------
    ArgumentError
        An unknown architecture, or a target that is no text of the package.
    SourceError
        No text has a value of that name.
    """
    for stem in stems:
        if stem not in package_stems():
            raise ArgumentError(
                "targets", stem, f"ops launch the package's own: {', '.join(package_stems())}"
            )
    chosen = tuple(architectures) or ARCHITECTURES
    for arch in chosen:
        max_shared_bytes(arch)  # refuses what is unknown
    names = {
        stem: KernelSource.from_package(stem).known_values().keys()
        for stem in stems or package_stems()
    }
    nobodys = (fixed or {}).keys() - set().union(*names.values())
    todo = []
    for stem, known in names.items():
        own = {n: value for n, value in (fixed or {}).items() if n in known or n in nobodys}
        for arch in chosen:
            todo += wanted(launched_sources(stem, arch, own), [arch])
    return survey_of(todo, chosen, with_values=True, save=save, progress=progress)


def _launched(arch: str) -> Iterator[Launched]:
    import cuverify.ops

    for module in pkgutil.iter_modules(cuverify.ops.__path__):
        yield from importlib.import_module(f"cuverify.ops.{module.name}").launched(arch)
