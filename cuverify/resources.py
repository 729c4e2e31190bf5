"""Compile kernel texts for several architectures and report what each kernel takes.

Needs NVRTC and no GPU.
"""

from __future__ import annotations

import contextlib
import importlib.resources
import itertools
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING

from cuverify.errors import CompileError
from cuverify.report import Coverage, Finding, Report, Table

if TYPE_CHECKING:
    from cuverify.compile import Cubin
    from cuverify.diagnostics import Diagnostic
    from cuverify.sources import KernelSource

COLUMNS = (
    "kernel",
    "arch",
    "registers",
    "spill B",
    "stack B",
    "static shared B",
    "constant B",
    "threads",
)

Progress = Callable[[str, int, int], None]  # what is being done, how many are done, of how many


def package_stems() -> tuple[str, ...]:
    """Return the stems of the kernels in the package, sorted."""
    folder = importlib.resources.files("cuverify.kernels_cu")
    return tuple(
        sorted(Path(entry.name).stem for entry in folder.iterdir() if entry.name.endswith(".cu"))
    )


def find_source(
    target: str, *, values: dict[str, bool | int | float | str] | None = None
) -> KernelSource:
    """Return the text that a person names: a stem of the package, else a file.

    Parameters
    ----------
    target : str
        ``"relocate"`` or ``"path/to/x.cu"``.
    values : dict, optional
        The `-D` values.

    Raises
    ------
    SourceError
        There is no such file or stem, or the text tests no such value.
    """
    from cuverify.sources import KernelSource

    if target in package_stems():
        return KernelSource.from_package(target, values=values or {})
    if not target.endswith(".cu") and "/" not in target and not Path(target).exists():
        from cuverify.errors import SourceError

        raise SourceError(
            f"{target!r} is no kernel of the package and no file; "
            f"the package has {', '.join(package_stems())}"
        )
    return KernelSource.from_file(Path(target), values=values or {})


def processors() -> int:
    """Return how many processors this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def threads_of_children(children: int) -> dict[str, str]:
    """Return what a child process of several needs in its environment to take its share only.

    numpy and torch each start a thread a processor, whatever runs beside them.

    Parameters
    ----------
    children : int
        How many run at a time.

    Returns
    -------
    dict
        Variables to set; what this process's environment says already stands.
    """
    share = max(1, processors() // children)
    return {"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(share))}


class Compilations:
    """Compilations in the background, a thread a processor: NVRTC lets go of Python's lock.

    A context manager; at its end, what has not begun is given up.
    """

    def __init__(self) -> None:
        self._pool = ThreadPoolExecutor(max_workers=processors())
        self._jobs: dict[tuple[KernelSource, str], Future[Cubin]] = {}

    def begin(self, source: KernelSource, arch: str) -> Future[Cubin]:
        """Compile a text for an architecture, once, and return the future of `compile_cubin`."""
        from cuverify.compile import compile_cubin

        if (source, arch) not in self._jobs:
            self._jobs[source, arch] = self._pool.submit(compile_cubin, source, arch)
        return self._jobs[source, arch]

    def __enter__(self) -> Compilations:
        return self

    def __exit__(self, *error: object) -> None:
        self._pool.shutdown(cancel_futures=True)


def wanted(
    sources: Iterable[KernelSource], architectures: Sequence[str]
) -> list[tuple[KernelSource, str]]:
    """Return what is to be compiled: a text that is limited to some architectures only for those.

    Parameters
    ----------
    sources : iterable of KernelSource
    architectures : sequence of str
    """
    from cuverify.contract import limited_to

    return [
        (source, arch)
        for source in sources
        for arch in architectures
        if arch in (limited_to(source.text) or [arch])
    ]


def survey(
    sources: Iterable[KernelSource],
    architectures: Sequence[str] = (),
    *,
    save: Path | None = None,
    progress: Progress | None = None,
    compilations: Compilations | None = None,
) -> Report:
    """Compile every text for every architecture.

    Parameters
    ----------
    sources : iterable of KernelSource
    architectures : sequence of str
        Names such as ``"sm_90a"``; all supported ones when empty. A text that is limited to some
        is compiled for those among them.
    save : Path, optional
        Folder for the cubins, under the names by which `cuverify.prebuilt` finds them.
    progress : callable, optional
        Told before each compilation is waited for.
    compilations : Compilations, optional
        Where some of them may have begun. It stays open.

    Returns
    -------
    Report
        One row a kernel and architecture. What a compiler says is a finding, once for all the
        architectures that say it.

    Raises
    ------
    ArgumentError
        An unknown architecture.
    ToolchainError
        NVRTC or CUDA headers are missing.
    SourceError
        A header is missing.
    """
    from cuverify.compile import ARCHITECTURES
    from cuverify.device import write_cubin

    architectures = tuple(architectures) or ARCHITECTURES
    rows: dict[KernelSource, list[tuple[object, ...]]] = {}
    said: dict[Diagnostic, list[str]] = {}
    logs: list[Finding] = []
    compiled = 0
    todo = wanted(sources, architectures)
    total = len(todo)
    with contextlib.ExitStack() as stack:
        running = compilations or stack.enter_context(Compilations())
        jobs = {(source, arch): running.begin(source, arch) for source, arch in todo}
        for number, ((source, arch), job) in enumerate(jobs.items()):
            if progress is not None:
                progress(f"{source.name} for {arch}", number, total)
            try:
                cubin = job.result()
            except CompileError as error:
                for diagnostic in error.diagnostics:
                    if diagnostic.severity != "note":  # it explains the error in front of it
                        said.setdefault(diagnostic, []).append(arch)
                if not any(entry.severity == "error" for entry in error.diagnostics):
                    logs.append(Finding("compile", "error", str(error), source.name))
                continue
            if save is not None:
                write_cubin(source, arch, save)
            compiled += 1
            for diagnostic in cubin.warnings:
                said.setdefault(diagnostic, []).append(arch)
            rows.setdefault(source, []).extend(_rows(arch, cubin))
    report = Report("compile")
    # by kernel; the sort is stable, so architectures stay in order
    by_kernel = [sorted(own, key=lambda row: str(row[0])) for own in rows.values()]
    report.tables.append(Table("resources", COLUMNS, list(itertools.chain(*by_kernel))))
    report.coverage.append(
        Coverage("compile", "inspected", f"{compiled} of {total} compilations succeeded")
    )
    report.findings += [
        _finding(diagnostic, archs, architectures) for diagnostic, archs in said.items()
    ]
    report.findings += logs
    return report


def _rows(arch: str, cubin: Cubin) -> Iterator[tuple[object, ...]]:
    for name, taken in sorted(cubin.resources.items()):
        yield (
            name,
            arch,
            taken.registers,
            taken.spill_store_bytes + taken.spill_load_bytes,
            taken.stack_bytes,
            taken.static_shared_bytes,
            taken.constant_bytes,
            taken.max_threads,
        )


def _finding(diagnostic: Diagnostic, archs: Sequence[str], asked: Sequence[str]) -> Finding:
    message = diagnostic.message
    if set(archs) != set(asked):
        message += f" ({', '.join(archs)})"
    evidence: dict[str, object] = {}
    if diagnostic.column is not None:
        evidence["column"] = diagnostic.column
    if diagnostic.excerpt:
        evidence["excerpt"] = diagnostic.excerpt
    return Finding(
        "compile",
        "error" if diagnostic.severity == "error" else "warning",
        message,
        f"{diagnostic.file}:{diagnostic.line}",
        evidence,
    )
