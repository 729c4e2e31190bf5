"""The command `cuverify`: options in, a report out, and an exit status.

Exit status of every command: 0 for nothing found, 1 for findings, 2 when it could not run, 130 when
interrupted. Only parsing and printing live here.
"""

from __future__ import annotations

import json
import os
import re
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import click

import cuverify
from cuverify.errors import CuverifyError

if TYPE_CHECKING:
    from cuverify.report import Report

OK, FINDINGS, COULD_NOT_RUN, INTERRUPTED = 0, 1, 2, 130

Value = bool | int | float | str
Progress = Callable[[str, int, int], None]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line and return its exit status.

    Parameters
    ----------
    arguments : sequence of str, optional
        Without the program's name; those of the process when absent.

    Returns
    -------
    int
        0, 1, 2 or 130, as the module says. An error that nobody foresaw is 2 with its traceback, so
        that it is not taken for findings.
    """
    try:
        outcome = cli.main(
            None if arguments is None else list(arguments), "cuverify", standalone_mode=False
        )
        sys.stdout.flush()
        return outcome if isinstance(outcome, int) else OK
    except (click.Abort, KeyboardInterrupt):
        click.echo("interrupted", err=True)
        return INTERRUPTED
    except click.ClickException as error:
        error.show()
        return COULD_NOT_RUN
    except CuverifyError as error:
        click.echo(f"error: {error}", err=True)
        return COULD_NOT_RUN
    except BrokenPipeError:
        # the reader has left, which is not for us to complain about; the interpreter's own flush
        # at exit would complain
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return COULD_NOT_RUN
    except Exception:
        traceback.print_exc()
        return COULD_NOT_RUN


# --- options -------------------------------------------------------------------------------------


def _json_target(
    context: click.Context, parameter: click.Parameter, path: Path | None
) -> Path | None:
    """Refuse a file that cannot be written now, not after minutes of work."""
    if path is not None and str(path) != "-":
        folder = path.absolute().parent
        if not folder.is_dir():
            raise click.BadParameter(f"there is no folder {str(folder)!r}", context, parameter)
        if not os.access(folder, os.W_OK):
            raise click.BadParameter(f"{str(folder)!r} cannot be written", context, parameter)
    return path


_json_option = click.option(
    "--json",
    "json_file",
    metavar="FILE",
    type=click.Path(dir_okay=False, writable=True, allow_dash=True, path_type=Path),
    callback=_json_target,
    help="Also write the report as JSON; '-' prints it instead of the text.",
)


_arch_option = click.option(
    "--arch",
    "archs",
    metavar="SM",
    multiple=True,
    help="Compile for this architecture, such as sm_90a; repeatable, all when absent.",
)


_device_option = click.option(
    "--device",
    type=click.Choice(["auto", "cpu", "cuda"]),
    default="auto",
    show_default=True,
    help="'cuda' insists on a GPU, 'cpu' leaves it alone.",
)


def _defines(
    context: click.Context, parameter: click.Parameter, given: tuple[str, ...]
) -> dict[str, Value]:
    """Return NAME=VALUE as Python would read the value; NAME alone is 1, as in C."""
    values: dict[str, Value] = {}
    for entry in given:
        name, equals, text = entry.partition("=")
        if not re.fullmatch(r"[A-Za-z_]\w*", name, re.ASCII):
            message = f"{entry!r} is no NAME=VALUE: {name!r} is no C name"
            raise click.BadParameter(message, context, parameter)
        values[name] = _value(text) if equals else 1
    return values


def _value(text: str) -> Value:
    if text in ("true", "false"):
        return text == "true"
    for kind in (lambda digits: int(digits, 0), float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text


# --- output --------------------------------------------------------------------------------------


def _finish(report: Report, json_file: Path | None = None) -> int:
    """Print and write a report, and return the exit status that it means."""
    from rich.console import Console

    if json_file is not None and str(json_file) == "-":
        click.echo(json.dumps(report.to_json(), indent=2, ensure_ascii=False, allow_nan=False))
    else:
        if sys.stdout.isatty():
            report.to_text(Console())
        else:
            click.echo(report.to_text(), nl=False)
        if json_file is not None:
            try:
                report.write_json(json_file)
            except OSError as error:
                raise click.FileError(str(json_file), error.strerror) from error
    return OK if report.ok else FINDINGS


@contextmanager
def _progress() -> Iterator[Progress | None]:
    """Show progress on stderr while a command works, when a person is there to see it."""
    if not sys.stderr.isatty():
        yield None
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("starting", total=None)

        def show(what: str, done: int, total: int) -> None:
            bar.update(task, description=what, completed=done, total=total or None)

        yield show


# --- commands ------------------------------------------------------------------------------------


@click.group(context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100})
@click.version_option(cuverify.__version__, prog_name="cuverify")
def cli() -> None:
    """Check CUDA kernels for speculative decoding and KV moves, with or without a GPU."""


@cli.command()
@click.argument("cases", nargs=-1, metavar="[CASE]...")
@_json_option
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--examples",
    type=click.IntRange(min=1),
    help="Drawn batches for each case; each case knows a good number.",
)
@_device_option
@_arch_option
def check(
    cases: tuple[str, ...],
    json_file: Path | None,
    seed: int,
    examples: int | None,
    device: Literal["auto", "cpu", "cuda"],
    archs: tuple[str, ...],
) -> int:
    """Compile, run, compare and capture: the main job.

    Every kernel of each CASE (all of the package's when none is named) is compiled for every
    architecture, run on the host lane under the checkers and compared with its oracle. With a GPU
    it also runs there, is captured in a CUDA graph and replayed with changed inputs; without one
    the report says so. CASE is a name, module:CASE or file.py:CASE.
    """
    from cuverify.check import run_checks

    with _progress() as progress:
        report = run_checks(
            cases,
            architectures=archs or None,
            seed=seed,
            examples=examples,
            device=device,
            progress=progress,
        )
    return _finish(report, json_file)


@cli.command("compile")
@click.argument("targets", nargs=-1, metavar="[FILE|STEM]...")
@click.option(
    "-D",
    "defines",
    metavar="NAME=VALUE",
    multiple=True,
    callback=_defines,
    help="A value of the text; repeatable.",
)
@_arch_option
@click.option(
    "--save",
    type=click.Path(file_okay=False, path_type=Path),
    metavar="DIR",
    help="Write the cubins there, for CUVERIFY_CUBINS on a GPU machine.",
)
@_json_option
def compile_command(
    targets: tuple[str, ...],
    defines: dict[str, Value],
    archs: tuple[str, ...],
    save: Path | None,
    json_file: Path | None,
) -> int:
    """Compile texts, show registers and spills; no GPU needed.

    Each target is a .cu file or the stem of one of the package's kernels; all of those when none is
    named.
    """
    from cuverify.resources import find_source, package_stems, survey

    sources = [find_source(target, values=defines) for target in targets or package_stems()]
    with _progress() as progress:
        report = survey(sources, archs, save=save, progress=progress)
    return _finish(report, json_file)


@cli.command()
@click.argument("ops", nargs=-1, metavar="[OP]...")
@_device_option
@_json_option
def bench(
    ops: tuple[str, ...], device: Literal["auto", "cpu", "cuda"], json_file: Path | None
) -> int:
    """Time kernels whose result was checked first."""
    from cuverify.bench import run_benchmarks

    with _progress() as progress:
        report = run_benchmarks(ops, device, progress=progress)
    return _finish(report, json_file)


@cli.command()
@_json_option
def env(json_file: Path | None) -> int:
    """Say what is installed here, and how to get the rest."""
    from cuverify import env

    return _finish(env.inspect().report(), json_file)


@cli.command()
@click.argument("folder", type=click.Path(file_okay=False, exists=True, path_type=Path))
def timeline(folder: Path) -> int:
    """Draw a decode step's kernels and idle gaps into a folder, eager and captured; needs a GPU."""
    from cuverify.benches.step import timelines

    for file in timelines(folder):
        click.echo(f"written: {file}", err=True)
        if file.suffix == ".txt":
            click.echo(f"{file.stem}\n{file.read_text(encoding='utf-8')}")
    return OK


@cli.group(invoke_without_command=True)
@click.pass_context
def evidence(context: click.Context) -> int | None:
    """Show what was measured on a GPU, and what is stale."""
    if context.invoked_subcommand is not None:
        return None
    return _show(None)


@evidence.command()
@_json_option
def show(json_file: Path | None) -> int:
    """Show what was measured on a GPU and which of it is stale."""
    return _show(json_file)


@evidence.command()
@_json_option
def verify(json_file: Path | None) -> int:
    """Fail when evidence is missing, malformed or records failures; say what is stale."""
    return _show(json_file, measurements=False)


@evidence.command()
@click.option("--part", required=True, type=click.Choice(["tests", "bench"]))
def record(part: str) -> int:
    """Measure one part on this machine's GPU and merge it into evidence/<gpu>.json."""
    from cuverify import evidence

    path = evidence.record(part)
    click.echo(f"recorded {part} in {path}")
    return _finish(evidence.report(evidence.source_root()))


@cli.group(invoke_without_command=True)
@click.pass_context
def conformance(context: click.Context) -> int | None:
    """Replay on the host lane what GPUs did with each instruction wrapper."""
    if context.invoked_subcommand is not None:
        return None
    return _replay(None)


@conformance.command()
@_json_option
def replay(json_file: Path | None) -> int:
    """Replay the recordings with every compiler and count what is equal, without a GPU."""
    return _replay(json_file)


@conformance.command("record")
def record_conformance() -> int:
    """Run the wrappers on this machine's GPU and keep every bit in tests/conformance/<gpu>.npz."""
    from cuverify import conformance

    path = conformance.record()
    click.echo(f"recorded conformance in {path}; `cuverify conformance` replays it")
    return OK


def _replay(json_file: Path | None) -> int:
    from cuverify import conformance

    return _finish(conformance.report(), json_file)


def _show(json_file: Path | None, *, measurements: bool = True) -> int:
    from cuverify import evidence

    return _finish(evidence.report(measurements=measurements), json_file)


if __name__ == "__main__":
    sys.exit(main())
