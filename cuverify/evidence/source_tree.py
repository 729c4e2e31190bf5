"""The files that results depend on: the source tree, groups of its files, their digests."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cuverify.errors import EvidenceError

# The faces and the bookkeeping around a result cannot change the result.
_FACES = (
    "__init__.py",
    "cli.py",
    "env.py",
    "evidence",
    "files.py",
    "notebook.py",
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
        Files and folders right below `folder` that do not count.
    """

    folder: str
    suffixes: tuple[str, ...]
    left_out: tuple[str, ...] = ()


GROUPS: Mapping[str, Group] = {
    "kernels": Group("kernels_cu", (".cu", ".cuh", ".h")),
    "lanes": Group("cuverify", (".py", ".cpp", ".h", ".cuh", ".S"), _FACES),
    "validators": Group("validators", (".py", ".cu", ".cuh")),
    "tests": Group("tests", (".py", ".cu", ".cuh", ".json", ".npz")),
}


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
            and path.relative_to(folder).parts[0] not in rule.left_out
        ),
        key=lambda path: path.relative_to(root).as_posix(),
    )
