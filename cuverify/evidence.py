"""Evidence: what was measured on a GPU, kept beside the source that it was measured on.

One file a GPU, ``evidence/<gpu>.json``. A section holds one kind of result with the digests of the
file groups that it depends on, so that anybody can tell without a GPU whether the result still
describes the present files. A section is written only by `record`, on a machine with that GPU.
"""

from __future__ import annotations

import datetime
import hashlib
import json
import math
import os
import re
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ElementTree
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuverify.comparison import comparison_table
from cuverify.errors import DeviceError, EvidenceError
from cuverify.files import write_atomically
from cuverify.report import Finding, Report, Table, plain

SCHEMA = 1
FOLDER = "evidence"

# The faces and the bookkeeping around a result cannot change the result.
_FACES = (
    "__init__.py",
    "cli.py",
    "comparison.py",
    "env.py",
    "evidence.py",
    "figures.py",
    "files.py",
    "notebook.py",
    "performance.py",
    "report.py",
)


@dataclass(frozen=True)
class Group:
    """A set of files that results depend on.

    Parameters
    ----------
    folder : str
        Folder below the source tree's root.
    suffixes : tuple of str
        Only files with these suffixes count.
    left_out : tuple of str
        Names right below `folder` that do not count.
    """

    folder: str
    suffixes: tuple[str, ...]
    left_out: tuple[str, ...] = ()


GROUPS: Mapping[str, Group] = {
    "kernels": Group("kernels_cu", (".cu", ".cuh", ".h")),
    "lanes": Group("cuverify", (".py", ".cpp", ".h", ".cu", ".cuh", ".S", ".json"), _FACES),
    "validators": Group("validators", (".py", ".cu", ".cuh")),
    "tests": Group("tests", (".py", ".cu", ".cuh", ".json", ".npz")),
}

# part -> the groups that its results depend on
PARTS: Mapping[str, tuple[str, ...]] = {
    "tests": ("kernels", "lanes", "validators", "tests"),
    "bench": ("kernels", "lanes"),
    "attention": ("kernels", "lanes"),
}

# benchmarks that take minutes and have a part of their own, which `bench` then leaves out
ATTENTION = ("verify_attention", "token_exactness")


@dataclass(frozen=True)
class Status:
    """How one section stands against the present files.

    Parameters
    ----------
    path : Path
        The evidence file.
    gpu : str
        The GPU that the section was measured on.
    part : str
        Name of the section.
    date : str
        When it was recorded, UTC.
    stale : tuple of str
        File groups that have changed since. Empty: the section describes the present files.
    summary : str
        The result in a few words.
    """

    path: Path
    gpu: str
    part: str
    date: str
    stale: tuple[str, ...]
    summary: str


# --- the source tree -----------------------------------------------------------------------------


def source_root(start: str | os.PathLike[str] | None = None) -> Path:
    """Return the root of cuverify's source tree.

    The tree that the running package was imported from comes first, because its files make the
    results; then the working directory and the folders above it.

    Parameters
    ----------
    start : path, optional
        Look only here and above.

    Raises
    ------
    EvidenceError
        There is none: the package comes from a wheel, and the working directory is elsewhere.
    """
    places = [Path(start)] if start is not None else [Path(__file__).parent, Path.cwd()]
    for place in places:
        place = place.resolve()
        for folder in (place, *place.parents):
            if _is_root(folder):
                return folder
    shown = ", ".join(str(place) for place in places)
    raise EvidenceError(
        f"no source tree of cuverify at or above {shown}: "
        "evidence lives in a checkout, change into one"
    )


def _is_root(folder: Path) -> bool:
    try:
        text = (folder / "pyproject.toml").read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError):
        return False
    return re.search(r'^name\s*=\s*"cuverify"\s*$', text, re.MULTILINE) is not None


def digest(root: Path, group: str) -> str:
    """Return the SHA-256 over a group's relative paths and contents.

    Parameters
    ----------
    root : Path
        The source tree's root. No version control is asked.
    group : str
        A key of `GROUPS`.

    Raises
    ------
    EvidenceError
        The group has no files: this is not a complete source tree.
    """
    files = group_files(root, group)
    if not files:
        raise EvidenceError(f"{root / GROUPS[group].folder} holds no files of the group {group!r}")
    total = hashlib.sha256()
    for path in files:
        content = path.read_bytes()
        # lengths keep "a" + "bc" apart from "ab" + "c"
        total.update(f"{path.relative_to(root).as_posix()}\0{len(content)}\0".encode())
        total.update(content)
    return total.hexdigest()


def group_files(root: Path, group: str) -> list[Path]:
    """Return the files of a group, sorted by their path below `root`."""
    rule = GROUPS[group]
    folder = root / rule.folder
    return sorted(
        (
            path
            for path in folder.rglob("*")
            if path.suffix in rule.suffixes
            and path.is_file()
            and not any(
                part.startswith((".", "__pycache__")) for part in path.relative_to(root).parts
            )
            and not (path.parent == folder and path.name in rule.left_out)
        ),
        key=lambda path: path.relative_to(root).as_posix(),
    )


def digests(root: Path, part: str) -> dict[str, str]:
    """Return the digests of all groups that a part depends on."""
    return {group: digest(root, group) for group in PARTS[part]}


# --- reading -------------------------------------------------------------------------------------


def evidence_files(root: Path) -> list[Path]:
    """Return the evidence files of a source tree.

    Raises
    ------
    EvidenceError
        There are none.
    """
    files = sorted((root / FOLDER).glob("*.json"))
    if not files:
        raise EvidenceError(
            f"{root / FOLDER} holds no evidence; "
            "on a machine with a GPU run `cuverify evidence record --part tests`"
        )
    return files


def load(path: Path) -> dict[str, Any]:
    """Read an evidence file and hold it against the schema.

    Raises
    ------
    EvidenceError
        It cannot be read or is malformed; the message lists everything that is wrong.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise EvidenceError(f"{path} cannot be read: {error.strerror or error}") from error
    except (UnicodeDecodeError, json.JSONDecodeError) as error:
        raise EvidenceError(f"{path} is no JSON: {error}") from error
    problems = validate(document)
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise EvidenceError(f"{path} is malformed:\n{listed}")
    result: dict[str, Any] = document
    return result


def validate(document: Any) -> list[str]:
    """Return everything in a document that breaks the schema; empty when it is well formed.

    Parameters
    ----------
    document : object
        What the JSON text holds.
    """
    problems: list[str] = []
    if not isinstance(document, dict):
        return [f"the document is a {type(document).__name__}, not an object"]
    if document.get("schema") != SCHEMA:
        problems.append(f"schema is {document.get('schema')!r}, not {SCHEMA}")
    if not _is_text(document.get("gpu")):
        problems.append(f"gpu is {document.get('gpu')!r}, not a name")
    _unknown(problems, "document", document, ("schema", "gpu", "sections"))
    sections = document.get("sections")
    if not isinstance(sections, dict) or not sections:
        return [*problems, "sections is missing, empty or no object"]
    for part, section in sections.items():
        where = f"sections.{part}"
        if part not in PARTS:
            problems.append(f"{where} is unknown; there are {', '.join(PARTS)}")
        elif not isinstance(section, dict):
            problems.append(f"{where} is no object")
        else:
            _validate_section(problems, where, part, section)
    return problems


def _validate_section(problems: list[str], where: str, part: str, section: dict[str, Any]) -> None:
    _unknown(problems, where, section, ("digests", "run", "versions", "data"))
    recorded = section.get("digests")
    if not isinstance(recorded, dict) or set(recorded) != set(PARTS[part]):
        problems.append(f"{where}.digests must hold exactly {', '.join(PARTS[part])}")
    else:
        for group, value in recorded.items():
            if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{64}", value):
                problems.append(f"{where}.digests.{group} is {value!r}, not a SHA-256")
    run = section.get("run")
    if not isinstance(run, dict):
        problems.append(f"{where}.run is missing")
    else:
        if not _is_date(run.get("date")):
            problems.append(f"{where}.run.date is {run.get('date')!r}, not an ISO date with a zone")
        if not _is_text(run.get("command")):
            problems.append(f"{where}.run.command is {run.get('command')!r}, not a command line")
        if not _is_number(run.get("seconds")):
            problems.append(f"{where}.run.seconds is {run.get('seconds')!r}, not a duration")
    versions = section.get("versions")
    if not isinstance(versions, dict) or not versions:
        problems.append(f"{where}.versions is missing or empty")
    elif not all(isinstance(value, str) for value in versions.values()):
        problems.append(f"{where}.versions holds something that is no text")
    _DATA[part](problems, f"{where}.data", section.get("data"))


def _validate_tests(problems: list[str], where: str, data: Any) -> None:
    names = ("passed", "failed", "skipped")
    if not isinstance(data, dict) or set(data) != set(names):
        problems.append(f"{where} must hold exactly {', '.join(names)}")
        return
    problems.extend(
        f"{where}.{name} is {data[name]!r}, not a count"
        for name in names
        if not _is_count(data[name])
    )
    if all(_is_count(data[name]) for name in names) and data["passed"] + data["failed"] == 0:
        problems.append(f"{where} says that no test ran")


def _validate_bench(problems: list[str], where: str, data: Any) -> None:
    names = ("op", "shape", "us", "us_spread", "floor_us", "bytes", "flops", "peer", "error")
    since = ("alone_us", "alone_spread", "read_us")  # older evidence lacks them
    if not isinstance(data, list) or not data:
        problems.append(f"{where} is no list of measurements, or empty")
        return
    for index, entry in enumerate(data):
        here = f"{where}[{index}]"
        if not isinstance(entry, dict) or set(entry) - set(since) != set(names):
            problems.append(f"{here} must hold exactly {', '.join(names)}")
            continue
        if not _is_text(entry["op"]):
            problems.append(f"{here}.op is {entry['op']!r}, not a name")
        shape = entry["shape"]
        if not isinstance(shape, dict) or not all(
            _is_number(value) or _is_text(value) for value in shape.values()
        ):
            problems.append(f"{here}.shape is {shape!r}, not an object of numbers and names")
        for name in ("us", "us_spread", "floor_us", "bytes", "flops", *since):
            value = entry.get(name)
            if value is not None and not _is_number(value):
                problems.append(f"{here}.{name} is {value!r}, neither a number nor null")
        if entry["us"] is None and entry["error"] is None:
            problems.append(f"{here} has neither a time nor an error")
        if entry["peer"] is not None and not _is_text(entry["peer"]):
            problems.append(f"{here}.peer is {entry['peer']!r}, neither a name nor null")
        error = entry["error"]
        if error is not None and not (_is_text(error) or _is_number(error)):
            problems.append(f"{here}.error is {error!r}, neither text, a number nor null")


_DATA: Mapping[str, Callable[[list[str], str, Any], None]] = {
    "tests": _validate_tests,
    "bench": _validate_bench,
    "attention": _validate_bench,
}


def _unknown(
    problems: list[str], where: str, found: Mapping[str, Any], known: Sequence[str]
) -> None:
    problems.extend(f"{where}.{name} is unknown" for name in found if name not in known)


def _is_text(value: Any) -> bool:
    return isinstance(value, str) and bool(value.strip())


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, (int, float))
        and not isinstance(value, bool)
        and math.isfinite(value)
        and value >= 0
    )


def _is_count(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_date(value: Any) -> bool:
    try:
        return datetime.datetime.fromisoformat(value).tzinfo is not None
    except (TypeError, ValueError):
        return False


# --- showing -------------------------------------------------------------------------------------


def statuses(root: Path) -> list[Status]:
    """Hold every section of every evidence file against the present files.

    Raises
    ------
    EvidenceError
        Evidence is missing or malformed, or the source tree is incomplete.
    """
    current = {group: digest(root, group) for group in GROUPS}
    found = []
    for path in evidence_files(root):
        document = load(path)
        for part, section in document["sections"].items():
            stale = tuple(
                group for group in PARTS[part] if section["digests"][group] != current[group]
            )
            found.append(
                Status(
                    path.relative_to(root),
                    document["gpu"],
                    part,
                    section["run"]["date"],
                    stale,
                    _summary(part, section["data"]),
                )
            )
    return found


def _summary(part: str, data: Any) -> str:
    if part == "tests":
        return f"{data['passed']} passed, {data['failed']} failed, {data['skipped']} skipped"
    ops = sorted({entry["op"] for entry in data})
    return f"{len(data)} measurements of {', '.join(ops)}"


def report(root: Path | None = None, *, measurements: bool = True) -> Report:
    """Return what the evidence says and what of it is stale.

    A stale section is a warning: it stays true for the files it was measured on. Recorded test
    failures are errors.

    Parameters
    ----------
    root : Path, optional
        The source tree; found by `source_root` when absent.
    measurements : bool
        Whether to list each measurement, too.

    Raises
    ------
    EvidenceError
        Evidence is missing or malformed.
    """
    root = source_root() if root is None else root
    result = Report(f"evidence in {root / FOLDER}")
    found = statuses(root)
    result.tables.append(
        Table(
            "sections",
            ("GPU", "part", "recorded", "result", "stale since"),
            [
                (entry.gpu, entry.part, entry.date, entry.summary, ", ".join(entry.stale) or None)
                for entry in found
            ],
        )
    )
    for path in evidence_files(root):
        document = load(path)
        sections = document["sections"]
        for part in PARTS:
            if part not in sections:
                result.findings.append(
                    Finding(
                        "evidence-absent",
                        "warning",
                        f"{path.name} has no section {part!r}",
                        fix=_advice(part),
                    )
                )
        if sections.get("tests", {}).get("data", {}).get("failed"):
            result.findings.append(
                Finding(
                    "evidence-failed",
                    "error",
                    f"{path.name} records {sections['tests']['data']['failed']} failed tests",
                    fix=_advice("tests"),
                )
            )
        if measurements and "bench" in sections:
            result.tables.append(_bench_table(document["gpu"], sections["bench"]["data"]))
        if measurements and "attention" in sections:
            result.tables.append(comparison_table(sections["attention"]["data"]))
    result.findings += [
        Finding(
            "evidence-stale",
            "warning",
            f"{entry.path.name}: section {entry.part!r} was recorded before a change of "
            f"{', '.join(entry.stale)}",
            fix=_advice(entry.part),
        )
        for entry in found
        if entry.stale
    ]
    return result


def _advice(part: str) -> str:
    return f"on a machine with that GPU run `cuverify evidence record --part {part}`"


def _bench_table(gpu: str, data: Sequence[Mapping[str, Any]]) -> Table:
    rows = []
    for entry in data:
        us, floor = entry["us"], entry["floor_us"]
        share = None if not us or floor is None else round(100 * floor / us, 1)
        rows.append(
            (
                entry["op"],
                entry["shape"],
                entry["peer"],
                us,
                entry["us_spread"],
                floor,
                share,
                entry["error"],
            )
        )
    heads = ("op", "shape", "peer", "us", "spread us", "floor us", "floor %", "error")
    return Table(f"bench on {gpu}", heads, rows)


# --- recording -----------------------------------------------------------------------------------


def record(
    part: str, *, root: Path | None = None, options: Mapping[str, Any] | None = None
) -> Path:
    """Measure one part on this machine's GPU and merge it into the GPU's evidence file.

    Other sections of the file stay as they are. Nothing is written unless the whole part ran.

    Parameters
    ----------
    part : {"tests", "bench", "attention"}
        ``"tests"`` runs the tests marked `gpu` in a child process, because a crash of one of them
        ends the process; ``"bench"`` runs the benchmarks in this one, and ``"attention"`` those of
        attention, at all shapes and beside all peers.
    root : Path, optional
        The source tree; found by `source_root` when absent.
    options : mapping, optional
        Of ``"attention"``: keywords of `cuverify.benches.verify_attention.run`, all shapes when
        absent.

    Returns
    -------
    Path
        The evidence file.

    Raises
    ------
    DeviceError
        There is no CUDA device.
    EvidenceError
        The part is unknown, did not run, files changed meanwhile, or the present file is malformed.
    """
    if part not in PARTS:
        raise EvidenceError(f"part {part!r} is unknown; there are {', '.join(PARTS)}")
    if options and part != "attention":
        raise EvidenceError(f"part {part!r} takes no {', '.join(options)}")
    root = source_root() if root is None else root
    gpu = gpu_name()
    path = root / FOLDER / f"{slug(gpu)}.json"
    # read first: a malformed file must not cost a run
    document: dict[str, Any] = {"schema": SCHEMA, "gpu": gpu, "sections": {}}
    if path.exists():
        document = load(path)
    if document["gpu"] != gpu:
        raise EvidenceError(f"{path} describes {document['gpu']!r}, and this machine has {gpu!r}")

    before = digests(root, part)
    started = time.monotonic()
    command, data = _RECORDERS[part](root, dict(options or {}))
    seconds = time.monotonic() - started
    changed = [group for group, value in digests(root, part).items() if value != before[group]]
    if changed:
        raise EvidenceError(f"{', '.join(changed)} changed during the run: nothing was recorded")

    from cuverify import env, performance

    now = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
    document["sections"][part] = {
        "digests": before,
        "run": {"date": now.isoformat(), "command": command, "seconds": round(seconds, 1)},
        "versions": env.inspect().versions,
        "data": plain(data, part),
    }
    document["sections"] = {
        name: document["sections"][name] for name in sorted(document["sections"])
    }
    problems = validate(document)
    if problems:
        listed = "\n".join(f"  {problem}" for problem in problems)
        raise EvidenceError(f"the run of {part!r} gave no valid section:\n{listed}")
    path.parent.mkdir(exist_ok=True)
    write_atomically(
        path, json.dumps(document, indent=1, ensure_ascii=False, allow_nan=False) + "\n"
    )
    if part == "attention":
        performance.write(root)
    return path


def gpu_name() -> str:
    """Return the name of the current CUDA device.

    Raises
    ------
    DeviceError
        There is none, or torch is missing.
    """
    try:
        import torch
    except ImportError as error:
        raise DeviceError(f"evidence is recorded on a GPU through torch: {error}") from error
    if not torch.cuda.is_available():
        raise DeviceError(
            "evidence is recorded on a GPU, and there is no CUDA device here; "
            "`cuverify env` says why"
        )
    return str(torch.cuda.get_device_name())


def slug(gpu: str) -> str:
    """Return the file stem of a GPU's evidence: ``"NVIDIA H200"`` -> ``"h200"``."""
    name = re.sub(r"\b(nvidia|geforce|tesla|quadro)\b", " ", gpu.lower())
    return re.sub(r"[^a-z0-9]+", "-", name).strip("-") or "gpu"


def _record_tests(root: Path, options: Mapping[str, Any]) -> tuple[str, dict[str, int]]:
    """Run the GPU tests and count them from pytest's own XML report."""
    with tempfile.TemporaryDirectory(prefix="cuverify-evidence-") as folder:
        xml = Path(folder) / "junit.xml"
        # `python -m pytest` would put the root on sys.path, where the folder `validators` hides the
        # PyPI package of that name; the console script's own way of starting does not
        start = (
            "import sys; sys.path[:] = [place for place in sys.path if place]; "
            "import pytest; sys.exit(pytest.main(sys.argv[1:]))"
        )
        arguments = ["-m", "gpu", "-q"]
        done = subprocess.run(
            [sys.executable, "-c", start, *arguments, f"--junitxml={xml}"],
            cwd=root,
            stdin=subprocess.DEVNULL,
            check=False,
        )
        if done.returncode not in (0, 1):  # 0: all passed, 1: some failed; the rest did not run
            raise EvidenceError(
                f"`pytest {' '.join(arguments)}` ended with status {done.returncode} "
                "before it had run the tests: nothing was recorded"
            )
        return f"pytest {' '.join(arguments)}", count_junit(xml)


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


def _record_bench(root: Path, options: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    from cuverify import bench

    others = [name for name in bench.names() if name not in ATTENTION]
    return f"cuverify bench {' '.join(others)}", bench.measure(others)


def _record_attention(root: Path, options: Mapping[str, Any]) -> tuple[str, list[dict[str, Any]]]:
    from cuverify import bench

    attention, tokens = ATTENTION
    chosen = {"shapes": ["all"], **options}
    words = [f"--{name} {','.join(map(str, value)) if isinstance(value, list) else value}"
             for name, value in chosen.items()]  # fmt: skip
    measured = bench.measure([attention], chosen) + bench.measure([tokens])
    return f"cuverify bench {attention} {' '.join(words)}; cuverify bench {tokens}", measured


_RECORDERS: Mapping[str, Callable[[Path, Mapping[str, Any]], tuple[str, Any]]] = {
    "tests": _record_tests,
    "bench": _record_bench,
    "attention": _record_attention,
}
