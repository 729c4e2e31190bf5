"""The command `cuverify`: options in, a report out, and an exit status.

Exit status of every command: 0 for no error found (warnings do not count), 1 for errors, 2 when it
could not run, 130 when interrupted. Only parsing and printing live here.
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
from cuverify.evidence.parts import part_names

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


def _target(context: click.Context, parameter: click.Parameter, path: Path | None) -> Path | None:
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
    callback=_target,
    help="Also write the report as JSON; '-' prints it instead of the text.",
)


_html_option = click.option(
    "--html",
    "html_file",
    metavar="FILE",
    type=click.Path(dir_okay=False, writable=True, path_type=Path),
    callback=_target,
    help="Also write the report as a page for a browser.",
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


def _finish(report: Report, json_file: Path | None = None, html_file: Path | None = None) -> int:
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
            _write(report.write_json, json_file)
    if html_file is not None:
        _write(report.write_html, html_file)
    return OK if report.ok else FINDINGS


def _write(write: Callable[[Path], None], file: Path) -> None:
    try:
        write(file)
    except OSError as error:
        raise click.FileError(str(file), error.strerror) from error


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
@click.option(
    "--runner",
    metavar="module:Class",
    help="Judge an attention backend by SGLang's contract instead of cases.",
)
def check(
    cases: tuple[str, ...],
    json_file: Path | None,
    seed: int,
    examples: int | None,
    device: Literal["auto", "cpu", "cuda"],
    archs: tuple[str, ...],
    runner: str | None,
) -> int:
    """Compile, run, compare and capture: the main job.

    Every kernel of each CASE (all of the package's when none is named) is compiled for every
    architecture, run on the host lane under the checkers and compared with its oracle. With a GPU
    it also runs there, is captured in a CUDA graph and replayed with changed inputs; without one
    the report says so. CASE is a name, module:CASE or file.py:CASE.

    With --runner a backend is played as SGLang's graph runner would, on the host lane and on a GPU
    where there is one: cuverify.sglang.contract.VerifyRunner says what the class has.
    """
    if runner is not None:
        if cases:
            raise click.UsageError("--runner takes no CASE: call check twice")
        if examples is not None or archs:
            raise click.UsageError("--runner takes no --arch and no --examples")
        from cuverify.sglang.check import check_runner

        with _progress() as progress:
            report = check_runner(runner, device=device, seed=seed, progress=progress)
        return _finish(report, json_file)
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


@cli.command()
@click.argument("case")
@click.option("--seed", type=click.IntRange(min=0), default=0, show_default=True)
@click.option(
    "--examples", type=click.IntRange(min=1), help="Drawn batches; the case knows a good number."
)
@click.option("--most", type=click.IntRange(min=1), help="Lines of a kernel at most.")
@_json_option
def count(
    case: str, seed: int, examples: int | None, most: int | None, json_file: Path | None
) -> int:
    """Count what the kernels of CASE ask of memory, line by line, without a GPU.

    All batches of the case run on the host lane under the checkers. For each line: requests,
    32-byte sectors of global memory and how many would do, passes through shared memory and bank
    conflicts; lines that waste most first. cuverify.counted does it for launches of your own.
    """
    from cuverify.counting import count_case

    return _finish(count_case(case, seed=seed, examples=examples, most=most), json_file)


@cli.command("lint")
@click.argument("factory", metavar="module:function")
@_json_option
def lint_command(factory: str, json_file: Path | None) -> int:
    """Look at a step without a GPU for what a capture would not survive.

    The function is named module:function or file.py:function, takes nothing and returns a
    cuverify.validators.CallableCase, whose tensors may be on the CPU.
    """
    from cuverify.validators.api import made_case
    from cuverify.validators.lint import lint

    return _finish(lint(made_case(factory, bare=True)), json_file)


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
    "--variants",
    is_flag=True,
    help="Compile all sets of values that the package's ops choose from; -D narrows them.",
)
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
    variants: bool,
    save: Path | None,
    json_file: Path | None,
) -> int:
    """Compile texts, show registers and spills; no GPU needed.

    Each target is a .cu file or the stem of one of the package's kernels; all of those when none is
    named.

    A GPU machine that is to load cubins, and never to compile, needs those of all values that a
    rule, a plan or a tensor's type can choose there: --variants. They are many; name what is known
    by -D, such as -D HEADS=8 -D KV_INDEX=int.
    """
    from cuverify.resources import find_source, package_stems, survey

    if variants:
        from cuverify.launched import survey_launched

        with _progress() as progress:
            report = survey_launched(targets, archs, defines, save=save, progress=progress)
        return _finish(report, json_file)
    sources = [find_source(target, values=defines) for target in targets or package_stems()]
    with _progress() as progress:
        report = survey(sources, archs, save=save, progress=progress)
    return _finish(report, json_file)


@cli.command()
@click.argument("ops", nargs=-1, metavar="[OP]...")
@_device_option
@click.option(
    "--shapes",
    metavar="SHAPES",
    help="Of attention: sets, patterns and names by commas, such as grid,16x1k:33; "
    "of verify_gqa with heads, such as 1x64k:8@4x2.",
)
@click.option("--peers", metavar="NAMES", help="Patterns by commas, or 'none'; all when absent.")
@click.option(
    "--peers-dir",
    type=click.Path(exists=True, file_okay=False),
    metavar="DIR",
    help="Folder with peers that are not installed; CUVERIFY_PEERS when absent.",
)
@click.option("--seconds", type=click.FloatRange(min=1), help="Begin no shape later than this.")
@click.option(
    "--picture",
    type=click.Path(dir_okay=False, path_type=Path),
    metavar="FILE",
    callback=_target,
    help="Draw times and the roofline into FILE, .svg or .png; needs matplotlib.",
)
@_json_option
def bench(
    ops: tuple[str, ...],
    device: Literal["auto", "cpu", "cuda"],
    shapes: str | None,
    peers: str | None,
    peers_dir: str | None,
    seconds: float | None,
    picture: Path | None,
    json_file: Path | None,
) -> int:
    """Time kernels whose result was checked first.

    Options beyond the device are for those OPs that take them, verify_attention above all. Sets of
    its shapes are all, grid, wide, ragged, block, heads and stored; of verify_gqa's all, grid and
    dflash_block.
    """
    from cuverify.bench import run_benchmarks

    options = {
        "shapes": _words(shapes),
        "peers": _words(peers),
        "peers_dir": peers_dir,
        "seconds": seconds,
    }
    given = {name: value for name, value in options.items() if value}
    with _progress() as progress:
        report = run_benchmarks(ops, device, progress=progress, options=given, picture=picture)
    return _finish(report, json_file)


def _words(text: str | None) -> list[str]:
    return [word.strip() for word in (text or "").split(",") if word.strip()]


@cli.command()
@click.argument("variants", nargs=-1, metavar="[VARIANT]...")
@click.option(
    "--rows",
    type=click.IntRange(min=1),
    multiple=True,
    help="Only for requests of so many query rows, tree tokens times heads; repeatable.",
)
@click.option("--seconds", type=click.FloatRange(min=1), help="Begin no candidate later than this.")
@_json_option
def tune(
    variants: tuple[str, ...],
    rows: tuple[int, ...],
    seconds: float | None,
    json_file: Path | None,
) -> int:
    """Search the attention kernels' values that are best on this GPU, and keep them.

    The table of this GPU, cuverify/tuned/<gpu>.json, is what later steps look their values up in.
    """
    from cuverify import tuner

    with _progress() as progress:
        report, path = tuner.tune(variants, rows=rows, seconds=seconds, progress=progress)
    click.echo(f"kept in {path}", err=True)
    return _finish(report, json_file)


@cli.command()
@click.argument("factory", metavar="module:function")
@click.option(
    "--silence",
    "silence_s",
    type=click.FloatRange(min=0, min_open=True),
    default=60.0,
    show_default=True,
    help="Seconds without progress after which the step counts as hanging.",
)
@_html_option
@_json_option
def validate(factory: str, silence_s: float, html_file: Path | None, json_file: Path | None) -> int:
    """Capture a step in a CUDA graph, replay it, and say what is wrong.

    The function is named module:function or file.py:function, takes nothing and returns a
    cuverify.validators.CallableCase: a step, its tensors, and how to refill them. It runs in a
    process of its own, so that a step which hangs or crashes is a finding. Without a GPU the step
    is linted, and the report says so.
    """
    from cuverify.validators.api import validate_factory

    return _finish(validate_factory(factory, silence_s=silence_s), json_file, html_file)


@cli.command()
@click.argument("names", nargs=-1, metavar="[NAME|RULE]...")
@click.option(
    "--jobs", type=click.IntRange(min=1), help="Processes at once; one a core, 16 at most."
)
@click.option("--list", "only_list", is_flag=True, help="Show the mutants and run nothing.")
@_html_option
@_json_option
def zoo(
    names: tuple[str, ...],
    jobs: int | None,
    only_list: bool,
    html_file: Path | None,
    json_file: Path | None,
) -> int:
    """Validate steps with a known fault and their clean twins: what is found, what is accused.

    Each mutant must be caught by the rule that is named for it, and its twin, which differs in the
    fault only, must pass. NAME is a mutant or a rule; all run when none is named. Needs a GPU.
    """
    from cuverify.validators.zoo import rates, run

    mutants = run.chosen(names)
    if only_list:
        return _finish(rates.overview(mutants), json_file, html_file)
    mutants, not_run = run.judgeable(mutants)
    with _progress() as progress:
        runs = run.run_zoo(mutants, jobs=jobs, progress=progress)
    report = rates.report(runs, not_run=not_run, environment=run.versions())
    return _finish(report, json_file, html_file)


@cli.command()
@click.argument("rules", nargs=-1, metavar="[RULE]...")
def explain(rules: tuple[str, ...]) -> int:
    """Explain rules of the capture validator, such as CV101, or list them all."""
    from cuverify.validators import explain

    if not rules:
        for name in explain.names():
            click.echo(f"{name}  {explain.title(name)}")
        return OK
    text = "\n".join(explain.page(rule) for rule in rules)
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(text))
    else:
        click.echo(text, nl=False)
    return OK


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


@cli.command()
@click.argument(
    "file", type=click.Path(exists=True, dir_okay=False, allow_dash=True, path_type=Path)
)
@_html_option
def view(file: Path, html_file: Path | None) -> int:
    """Show a report that a command wrote as JSON, as text or as a page for a browser."""
    from cuverify.report import Report

    try:
        text = sys.stdin.read() if str(file) == "-" else file.read_text(encoding="utf-8")
        document = json.loads(text)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
        raise click.ClickException(f"{file} is no report: {error}") from error
    return _finish(Report.from_json(document), html_file=html_file)


@cli.command()
@_json_option
def env(json_file: Path | None) -> int:
    """Say what is installed here, and how to get the rest."""
    from cuverify import env

    return _finish(env.inspect().report(), json_file)


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


@evidence.command("picture")
@click.argument(
    "file", type=click.Path(dir_okay=False, path_type=Path), callback=_target, metavar="FILE"
)
@click.option("--gpu", help="Part of the GPU's name; the first that was recorded when absent.")
def picture_command(file: Path, gpu: str | None) -> int:
    """Draw the recorded times of attention into FILE, .svg or .png; needs matplotlib."""
    from cuverify import evidence, performance

    performance.picture(evidence.source_root(), file, gpu)
    return OK


@evidence.command()
@click.option("--part", required=True, type=click.Choice(part_names()))
@click.option("--shapes", metavar="SHAPES", help="Of attention, as for bench; all when absent.")
@click.option("--seconds", type=click.FloatRange(min=1), help="Begin no shape later than this.")
def record(part: str, shapes: str | None, seconds: float | None) -> int:
    """Measure one part on this machine's GPU and merge it into evidence/<gpu>.json.

    The part 'attention' takes minutes; it also writes docs/performance.md.
    """
    from cuverify import evidence

    options = {"shapes": _words(shapes), "seconds": seconds}
    given = {name: value for name, value in options.items() if value}
    path = evidence.record(part, options=given)
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
