"""The commands at a prompt: exit statuses, output, files, interrupts."""

from __future__ import annotations

import json
import os
import pty
import re
import select
import signal
import subprocess
import sys
import textwrap
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import cuverify
from cuverify import cli
from cuverify.errors import CaseError, EvidenceError
from cuverify.report import Coverage, Finding, Report

Engine = Callable[..., Report]


def module(monkeypatch: pytest.MonkeyPatch, name: str, **functions: Any) -> None:
    """Put a stand-in for one of the package's modules in its place."""
    stand_in = ModuleType(name)
    for key, value in functions.items():
        setattr(stand_in, key, value)
    monkeypatch.setitem(sys.modules, name, stand_in)
    monkeypatch.setattr(cuverify, name.rpartition(".")[2], stand_in, raising=False)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine], None]:
    """Put a function in the place of the engine behind `cuverify check`."""
    return lambda run_checks: module(monkeypatch, "cuverify.check", run_checks=run_checks)


def good(*arguments: Any, **options: Any) -> Report:
    report = Report("check")
    report.coverage.append(Coverage("capture", "not inspected", "no CUDA device"))
    return report


def bad(*arguments: Any, **options: Any) -> Report:
    report = good()
    report.findings.append(Finding("race", "error", "two threads write byte 8", "x.cu:3"))
    return report


# --- statuses ------------------------------------------------------------------------------------


def test_nothing_found_is_0_and_gaps_are_said(
    engine: Callable[[Engine], None], capsys: pytest.CaptureFixture[str]
) -> None:
    engine(good)
    assert cli.main(["check"]) == 0
    out, err = capsys.readouterr()
    assert "capture: not inspected, no CUDA device" in out
    assert out.splitlines()[-1].startswith("ok")
    assert err == ""


def test_findings_are_1(
    engine: Callable[[Engine], None], capsys: pytest.CaptureFixture[str]
) -> None:
    engine(bad)
    assert cli.main(["check"]) == 1
    assert "x.cu:3: error [race]" in capsys.readouterr().out


def test_warnings_alone_are_0(
    engine: Callable[[Engine], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def warns(*arguments: Any, **options: Any) -> Report:
        report = good()
        report.findings.append(Finding("CV906", "warning", "all answers are one", "x.py:3"))
        return report

    engine(warns)
    assert cli.main(["check"]) == 0
    assert "x.py:3: warning [CV906]" in capsys.readouterr().out


def test_what_cannot_run_is_2_in_one_line(
    engine: Callable[[Engine], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any, **options: Any) -> Report:
        raise CaseError("case 'abacus' is unknown; there is relocate")

    engine(fail)
    assert cli.main(["check", "abacus"]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == "error: case 'abacus' is unknown; there is relocate\n"


def test_an_unforeseen_error_is_2_with_its_traceback(
    engine: Callable[[Engine], None], capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*arguments: Any, **options: Any) -> Report:
        raise ZeroDivisionError("by zero")

    engine(fail)
    assert cli.main(["check"]) == 2
    assert "ZeroDivisionError: by zero" in capsys.readouterr().err


def test_an_interrupt_is_130_without_a_traceback_or_a_file(
    engine: Callable[[Engine], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    def interrupted(*arguments: Any, **options: Any) -> Report:
        raise KeyboardInterrupt

    engine(interrupted)
    assert cli.main(["check", "--json", str(tmp_path / "r.json")]) == 130
    assert capsys.readouterr().err.strip() == "interrupted"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "arguments",
    [
        ["bogus"],
        ["check", "--examples", "0"],
        ["check", "--seed", "x"],
        ["check", "--device", "tpu"],
        ["check", "--json", "/no/such/folder/r.json"],
        ["check", "--json", "."],
        ["compile", "-D", "1x=2"],
        ["compile", "-D", "=2"],
        ["evidence", "record"],
        ["evidence", "record", "--part", "profile"],
    ],
)
def test_wrong_usage_is_2_before_anything_runs(
    arguments: list[str], engine: Callable[[Engine], None], capsys: pytest.CaptureFixture[str]
) -> None:
    engine(lambda *a, **k: pytest.fail("ran"))
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert "Error: " in err


@pytest.mark.parametrize(
    "command", ["check", "count", "compile", "bench", "tune", "env", "evidence", ""]
)
def test_every_command_explains_itself(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*command.split(), "-h"]) == 0
    assert capsys.readouterr().out.startswith("Usage: cuverify")


# --- options -------------------------------------------------------------------------------------


def test_bench_hands_its_options_on(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    seen: list[Any] = []

    def watch(*arguments: Any, **options: Any) -> Report:
        seen.append((arguments, options))
        return Report("bench")

    module(monkeypatch, "cuverify.bench", run_benchmarks=watch)
    words = "bench verify_attention --shapes grid,1x1k:33 --peers torch*,FA3* --seconds 80"
    options = ["--peers-dir", str(tmp_path), "--picture", str(tmp_path / "x.svg")]
    assert cli.main([*words.split(), *options]) == 0
    ((arguments, named),) = seen
    assert arguments == (("verify_attention",), "auto")
    assert named["picture"] == tmp_path / "x.svg"
    assert named["options"] == {
        "shapes": ["grid", "1x1k:33"],
        "peers": ["torch*", "FA3*"],
        "peers_dir": str(tmp_path),
        "seconds": 80.0,
    }
    seen.clear()
    assert cli.main(["bench"]) == 0
    assert seen[0][1]["options"] == {}
    assert cli.main(["bench", "--picture", str(tmp_path / "none" / "x.svg")]) == 2


def test_count_shows_the_worst_lines(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    case = f"{Path(__file__).with_name('check_cases.py')}:CLEAN"
    file = tmp_path / "counts.json"
    assert cli.main(["count", case, "--examples", "2", "--most", "1", "--json", str(file)]) == 0
    out = capsys.readouterr().out
    assert "memory requests of clean" in out
    assert "2 batches, 2 launches" in out
    (table,) = json.loads(file.read_text())["tables"]
    assert table["title"] == "saxpy"
    assert len(table["rows"]) == 1
    assert cli.main(["count", "abacus"]) == 2
    assert "abacus" in capsys.readouterr().err


def test_tune_says_where_its_table_is(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[Any] = []

    def watch(*arguments: Any, **options: Any) -> tuple[Report, Path]:
        seen.append((arguments, options["seconds"]))
        return Report("tune"), Path("h200.json")

    module(monkeypatch, "cuverify.tuner", tune=watch)
    assert cli.main(["tune", "portable", "--seconds", "9"]) == 0
    assert seen == [((("portable",),), 9.0)]
    assert capsys.readouterr().err == "kept in h200.json\n"


def test_check_hands_its_options_on(engine: Callable[[Engine], None]) -> None:
    seen: list[Any] = []

    def watch(*arguments: Any, **options: Any) -> Report:
        seen.append((arguments, options))
        return Report("check")

    engine(watch)
    words = "check relocate a.py:CASE --seed 7 --examples 3 --device cpu --arch sm_90 --arch sm_80"
    assert cli.main(words.split()) == 0
    ((arguments, options),) = seen
    assert arguments == (("relocate", "a.py:CASE"),)
    assert options.pop("progress") is None, "nobody watches a pipe"
    assert options == {
        "seed": 7,
        "examples": 3,
        "device": "cpu",
        "architectures": ("sm_90", "sm_80"),
    }


def test_the_engine_takes_the_options() -> None:
    """The stand-ins above must not hide a change of the engine's own parameters."""
    import inspect

    from cuverify.check import run_checks

    parameters = inspect.signature(run_checks).parameters
    assert {"cases", "architectures", "seed", "examples", "device", "progress"} <= set(parameters)


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("-1", -1),
        ("0x10", 16),
        ("0.5", 0.5),
        ("1e-3", 1e-3),
        ("true", True),
        ("false", False),
        ("float", "float"),
        ("a=b", "a=b"),
        ("", ""),
    ],
)
def test_a_define_is_read_as_python_would(text: str, value: object) -> None:
    seen = cli._value(text)
    assert (seen, type(seen)) == (value, type(value))


def test_json_goes_to_the_file_too(
    engine: Callable[[Engine], None], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    engine(bad)
    path = tmp_path / "r.json"
    path.write_text("an older report")
    assert cli.main(["check", "--json", str(path)]) == 1
    document = json.loads(path.read_text())
    assert document["schema"] == 1
    assert [finding["rule"] for finding in document["findings"]] == ["race"]
    assert "race" in capsys.readouterr().out


def test_json_can_be_the_output(
    engine: Callable[[Engine], None], capsys: pytest.CaptureFixture[str]
) -> None:
    engine(bad)
    assert cli.main(["check", "--json", "-"]) == 1
    assert json.loads(capsys.readouterr().out)["ok"] is False


# --- commands ------------------------------------------------------------------------------------


def test_env_tells_and_succeeds(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["env"]) == 0
    assert "python" in capsys.readouterr().out


def test_evidence_shows_what_the_library_says(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from cuverify import evidence

    asked: list[bool] = []

    def report(root: Path | None = None, *, measurements: bool = True) -> Report:
        asked.append(measurements)
        return Report("evidence")

    monkeypatch.setattr(evidence, "report", report)
    assert [cli.main(["evidence", *words]) for words in ([], ["show"], ["verify"])] == [0, 0, 0]
    assert asked == [True, True, False]

    def missing(*arguments: Any, **options: Any) -> Report:
        raise EvidenceError("evidence holds no evidence")

    monkeypatch.setattr(evidence, "report", missing)
    assert cli.main(["evidence", "verify"]) == 2
    assert capsys.readouterr().err == "error: evidence holds no evidence\n"


def test_recording_without_a_gpu_is_2(capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    assert cli.main(["evidence", "record", "--part", "tests"]) == 2
    assert "no CUDA device" in capsys.readouterr().err


KERNEL = """
#ifndef WIDTH
#define WIDTH 4
#endif
// @kernel scale
// @param x update fp32 [n] the numbers
// @param n value int32 how many
extern "C" __global__ void __launch_bounds__(128) scale(float* x, int n) {
    int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) x[i] *= WIDTH;
}
"""


def test_compile_shows_resources(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("cupy")
    path = tmp_path / "scale.cu"
    path.write_text(KERNEL)
    words = ["compile", str(path), "-D", "WIDTH=8", "--arch", "sm_80", "--arch", "sm_120"]
    assert cli.main([*words, "--json", "-"]) == 0
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert [row[:2] for row in table["rows"]] == [["scale", "sm_80"], ["scale", "sm_120"]]
    rows = [dict(zip(table["columns"], row, strict=True)) for row in table["rows"]]
    assert all(0 < row["registers"] < 255 and row["threads"] == 128 for row in rows)
    assert all(row["spill B"] == 0 for row in rows)


def test_compile_shows_where_a_text_is_wrong(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cupy")
    path = tmp_path / "scale.cu"
    path.write_text(KERNEL.replace("x[i] *= WIDTH", "y[i] *= WIDTH"))
    assert cli.main(["compile", str(path), "--arch", "sm_80", "--arch", "sm_90"]) == 1
    out = capsys.readouterr().out
    assert re.search(r"scale\.cu:10: error \[compile\]: .*\"y\" is undefined", out)
    assert out.count("is undefined") == 1, "once for all architectures"
    assert "if (i < n) y[i] *= WIDTH;" in out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["compile", "no_such_stem"], "relocate"),
        (["compile", "no/such/file.cu"], "no/such/file.cu"),
        (["compile", "relocate", "-D", "ABACUS=1"], "ABACUS"),
        (["compile", "relocate", "--arch", "sm_10"], "sm_10"),
        (["check", "abacus"], "abacus"),
        (["bench", "abacus"], "abacus"),
        (["bench", "verify_attention", "--shapes", "1x1k"], "16x1k:8"),
        (["bench", "launch_overhead", "--seconds", "5"], "takes no seconds"),
        (["tune", "abacus"], "abacus"),
    ],
)
def test_a_name_that_means_nothing_is_2_and_named(
    words: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cupy")
    assert cli.main(words) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("error: ")
    assert message in err


# --- a real process ------------------------------------------------------------------------------

SLOW = """
    import signal, sys, time, types
    import cuverify

    # a shell starts its background jobs, and what they start, with the signal ignored
    signal.signal(signal.SIGINT, signal.default_int_handler)

    def run_checks(cases, *, progress=None, **options):
        print("started", flush=True)
        for i in range(600):
            if progress is not None:
                progress("relocate: host lane [drawn]", i, 600)
            time.sleep(0.1)

    sys.modules["cuverify.check"] = types.ModuleType("cuverify.check")
    sys.modules["cuverify.check"].run_checks = run_checks
    from cuverify.cli import main

    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.skipif(sys.platform == "win32", reason="signals are POSIX")
def test_ctrl_c_in_a_process(tmp_path: Path) -> None:
    target = tmp_path / "r.json"
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SLOW), "check", "--json", str(target)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout is not None
    assert process.stdout.readline() == "started\n"
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=30)
    assert process.returncode == 130
    assert "Traceback" not in err
    assert list(tmp_path.iterdir()) == []


@pytest.mark.skipif(sys.platform == "win32", reason="terminals are POSIX")
def test_a_terminal_sees_progress() -> None:
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", textwrap.dedent(SLOW), "check"],
        stdout=subprocess.DEVNULL,
        stderr=theirs,
        env={**os.environ, "TERM": "xterm", "COLUMNS": "100"},
    )
    os.close(theirs)
    seen = b""
    deadline = time.monotonic() + 60
    try:
        while b"host lane [drawn]" not in seen and time.monotonic() < deadline:
            if select.select([ours], [], [], 0.2)[0]:
                seen += os.read(ours, 65536)
    finally:
        process.send_signal(signal.SIGINT)
        while select.select([ours], [], [], 5)[0]:
            try:  # a terminal whose last writer has gone ends with an error on Linux
                if not os.read(ours, 65536):
                    break
            except OSError:
                break
        assert process.wait(timeout=30) == 130
        os.close(ours)
    assert b"relocate: host lane [drawn]" in seen


@pytest.mark.skipif(sys.platform == "win32", reason="pipes are POSIX")
def test_a_reader_that_leaves_is_no_traceback() -> None:
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run(
        [
            sys.executable,
            "-c",
            "import sys; from cuverify.cli import main; sys.exit(main(['env']))",
        ],
        stdout=write,
        stderr=subprocess.PIPE,
        text=True,
        check=False,
    )
    os.close(write)
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr
    assert done.returncode != 0


# --- rules, zoo and views ------------------------------------------------------------------------


def test_explain_lists_the_rules_and_shows_their_pages(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["explain"]) == cli.OK
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "CV101  a launch is not in the graph"
    assert len(lines) == len(set(lines)) > 60
    assert cli.main(["explain", "cv202", "CV101"]) == cli.OK
    told = capsys.readouterr().out
    assert told.index("# CV202: ") < told.index("# CV101: ")
    assert cli.main(["explain", "CV000"]) == cli.COULD_NOT_RUN
    assert "has no page" in capsys.readouterr().err


def test_the_zoo_is_listed_without_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["zoo", "--list", "CV202", "--json", "-"]) == cli.OK
    (table,) = json.loads(capsys.readouterr().out)["tables"]
    assert ["item", "CV202"] in [row[:2] for row in table["rows"]]
    assert {row[1] for row in table["rows"]} == {"CV202"}
    assert cli.main(["zoo", "no_such_mutant"]) == cli.COULD_NOT_RUN
    assert "no mutant and no rule" in capsys.readouterr().err


def test_the_zoo_runs_what_was_chosen_and_writes_its_views(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from cuverify.validators.zoo import run
    from cuverify.validators.zoo.rates import Run

    def run_zoo(mutants: Any, *, jobs: int | None, progress: Any) -> list[Run]:
        assert jobs == 3
        return [Run(mutant, True, Report("silent")) for mutant in mutants]

    monkeypatch.setattr(run, "run_zoo", run_zoo)
    monkeypatch.setattr(run, "missing", lambda mutant: None)
    page = tmp_path / "zoo.html"
    assert cli.main(["zoo", "item", "--jobs", "3", "--html", str(page)]) == cli.FINDINGS
    assert "item (`.item()` of a length) must be named by CV202" in capsys.readouterr().out
    assert "must be named by CV202" in page.read_text()


def test_a_report_is_viewed_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file, page = tmp_path / "report.json", tmp_path / "report.html"
    bad().write_json(file)
    assert cli.main(["view", str(file), "--html", str(page)]) == cli.FINDINGS
    assert capsys.readouterr().out == bad().to_text()
    assert page.read_text() == bad().to_html()
    for text in ("{", "[]", '{"schema": 9}'):
        file.write_text(text)
        assert cli.main(["view", str(file)]) == cli.COULD_NOT_RUN
    assert cli.main(["view", str(tmp_path / "absent.json")]) == cli.COULD_NOT_RUN


def test_a_step_is_validated_by_its_factory(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    from cuverify.validators import api

    asked: list[Any] = []

    def validate_factory(reference: str, *, silence_s: float) -> Report:
        asked.append((reference, silence_s))
        return bad()

    monkeypatch.setattr(api, "validate_factory", validate_factory)
    page = tmp_path / "report.html"
    arguments = ["validate", "step.py:make", "--silence", "5", "--html", str(page)]
    assert cli.main(arguments) == cli.FINDINGS
    assert asked == [("step.py:make", 5.0)]
    assert capsys.readouterr().out == bad().to_text()
    assert page.read_text() == bad().to_html()


def test_a_factory_that_is_not_there_could_not_run(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["validate", "no_such_module:make"]) == cli.COULD_NOT_RUN
    assert "no_such_module does not import" in capsys.readouterr().err
