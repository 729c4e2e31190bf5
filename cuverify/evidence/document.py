"""The evidence file: its schema, reading it, and holding it against the present files."""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuverify.errors import EvidenceError
from cuverify.evidence.fields import is_date, is_number, is_text, unknown
from cuverify.evidence.parts import find_part, part_names
from cuverify.evidence.source_tree import GROUPS, digest

SCHEMA = 1
FOLDER = "evidence"


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


def digests(root: Path, part: str) -> dict[str, str]:
    """Return the digests of all groups that a part depends on."""
    return {group: digest(root, group) for group in find_part(part).groups}


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
    if not is_text(document.get("gpu")):
        problems.append(f"gpu is {document.get('gpu')!r}, not a name")
    unknown(problems, "document", document, ("schema", "gpu", "sections"))
    sections = document.get("sections")
    if not isinstance(sections, dict) or not sections:
        return [*problems, "sections is missing, empty or no object"]
    for part, section in sections.items():
        where = f"sections.{part}"
        if part not in part_names():
            known = ", ".join(part_names())
            problems.append(f"{where} is unknown; there are {known}")
        elif not isinstance(section, dict):
            problems.append(f"{where} is no object")
        else:
            _validate_section(problems, where, part, section)
    return problems


def _validate_section(problems: list[str], where: str, part: str, section: dict[str, Any]) -> None:
    unknown(problems, where, section, ("digests", "run", "versions", "data"))
    rules = find_part(part)
    recorded = section.get("digests")
    if not isinstance(recorded, dict) or set(recorded) != set(rules.groups):
        problems.append(f"{where}.digests must hold exactly {', '.join(rules.groups)}")
    else:
        for group, value in recorded.items():
            if not isinstance(value, str) or not re.fullmatch(r"[0-9a-f]{64}", value):
                problems.append(f"{where}.digests.{group} is {value!r}, not a SHA-256")
    run = section.get("run")
    if not isinstance(run, dict):
        problems.append(f"{where}.run is missing")
    else:
        if not is_date(run.get("date")):
            problems.append(f"{where}.run.date is {run.get('date')!r}, not an ISO date with a zone")
        if not is_text(run.get("command")):
            problems.append(f"{where}.run.command is {run.get('command')!r}, not a command line")
        if not is_number(run.get("seconds")):
            problems.append(f"{where}.run.seconds is {run.get('seconds')!r}, not a duration")
    versions = section.get("versions")
    if not isinstance(versions, dict) or not versions:
        problems.append(f"{where}.versions is missing or empty")
    elif not all(isinstance(value, str) for value in versions.values()):
        problems.append(f"{where}.versions holds something that is no text")
    rules.validate(problems, f"{where}.data", section.get("data"))


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
            rules = find_part(part)
            stale = tuple(
                group for group in rules.groups if section["digests"][group] != current[group]
            )
            found.append(
                Status(
                    path.relative_to(root),
                    document["gpu"],
                    part,
                    section["run"]["date"],
                    stale,
                    rules.summary(section["data"]),
                )
            )
    return found
