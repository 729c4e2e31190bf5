"""The part `tests`: the tests marked `gpu`, run in a child process, and counted."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cuverify.errors import EvidenceError
from cuverify.evidence.fields import is_count
from cuverify.evidence.parts import Part
from cuverify.resources import processors, threads_of_children

_MOST_PROCESSES = 12  # oracles keep a processor busy while the GPU waits


def _validate(problems: list[str], where: str, data: Any) -> None:
    names = ("passed", "failed", "skipped")
    if not isinstance(data, dict) or set(data) != set(names):
        problems.append(f"{where} must hold exactly {', '.join(names)}")
        return
    problems.extend(
        f"{where}.{name} is {data[name]!r}, not a count"
        for name in names
        if not is_count(data[name])
    )
    if all(is_count(data[name]) for name in names) and data["passed"] + data["failed"] == 0:
        problems.append(f"{where} says that no test ran")


def _summary(data: Any) -> str:
    return f"{data['passed']} passed, {data['failed']} failed, {data['skipped']} skipped"


def _failures(data: Any) -> Iterator[str]:
    if data["failed"]:
        yield f"{data['failed']} failed tests"


def _record(root: Path) -> tuple[str, dict[str, int]]:
    """Run the GPU tests and count them from pytest's own XML report."""
    with tempfile.TemporaryDirectory(prefix="cuverify-evidence-") as folder:
        xml = Path(folder) / "junit.xml"
        # `python -m pytest` would put the root on sys.path, where the folder `validators` hides the
        # PyPI package of that name; the console script's own way of starting does not
        start = (
            "import sys; sys.path[:] = [place for place in sys.path if place]; "
            "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
        )
        processes = _processes()
        arguments = ["-m", "gpu", "-q", "-n", str(processes), "--dist", "worksteal"]
        done = subprocess.run(
            [sys.executable, "-c", start, *arguments, f"--junitxml={xml}"],
            cwd=root,
            stdin=subprocess.DEVNULL,
            env={**os.environ, **threads_of_children(processes)},
            check=False,
        )
        if done.returncode not in (0, 1):  # 0: all passed, 1: some failed; the rest did not run
            raise EvidenceError(
                f"`pytest {' '.join(arguments)}` ended with status {done.returncode} "
                "before it had run the tests: nothing was recorded"
            )
        return f"pytest {' '.join(arguments)}", count_junit(xml)


def _processes() -> int:
    return max(1, min(_MOST_PROCESSES, 3 * processors() // 4))


def count_junit(path: Path) -> dict[str, int]:
    """Return {"passed", "failed", "skipped"} of a JUnit XML file; errors count as failed.

    Raises
    ------
    EvidenceError
        The file is missing or no JUnit XML.
    """
    try:
        top = ElementTree.parse(path).getroot()
    except (OSError, ElementTree.ParseError) as error:
        raise EvidenceError(f"{path} is no JUnit XML: {error}") from error
    suites = [top] if top.tag == "testsuite" else top.findall("testsuite")
    if not suites:
        raise EvidenceError(f"{path} is no JUnit XML: it holds no testsuite")
    total = {
        name: sum(int(suite.get(name, "0")) for suite in suites)
        for name in ("tests", "failures", "errors", "skipped")
    }
    failed = total["failures"] + total["errors"]
    return {
        "passed": total["tests"] - failed - total["skipped"],
        "failed": failed,
        "skipped": total["skipped"],
    }


PART = Part(
    groups=("kernels", "lanes", "validators", "tests"),
    validate=_validate,
    summary=_summary,
    failures=_failures,
    record=_record,
)
