"""Where in somebody's code a thing happened: the innermost frame that belongs to no library."""

from __future__ import annotations

import linecache
import sys
import traceback
from pathlib import Path
from types import FrameType

# frames of these packages, and of Python's own, are not where a mistake stands, but where it was
# noticed
_LIBRARIES = frozenset(
    {"torch", "cupy", "cupy_backends", "cupyx", "numpy", "cuda", "cupti", "triton", "cuverify"}
)
_OUR_STEPS = (
    "cuverify.cases.",
    "cuverify.ops.",
    "cuverify.benches.",
    "cuverify.reference.",
    "cuverify.sglang.",
    "cuverify.validators.zoo.cv",
)
_CHILD = str(Path(__file__).with_name("child.py"))
_DEPTH = 60  # frames that are looked at: a call from deeper inside a library has no place


def place_of(error: BaseException) -> str | None:
    """Return ``file:line`` of the innermost frame that belongs to no library, if there is one.

    Parameters
    ----------
    error : BaseException
        One that was raised.
    """
    place = None
    for frame, line in traceback.walk_tb(error.__traceback__):
        if is_library(frame):
            continue
        place = f"{short_path(frame.f_code.co_filename)}:{line}"
    return place


def place_in(frame: FrameType | None) -> str | None:
    """Return ``file:line`` of the first frame outwards of `frame` that belongs to no library."""
    for _ in range(_DEPTH):
        if frame is None:
            return None
        if not is_library(frame):
            return f"{short_path(frame.f_code.co_filename)}:{frame.f_lineno}"
        frame = frame.f_back
    return None


def modules_in(frame: FrameType | None) -> set[str]:
    """Return the modules of a frame and of those around it."""
    found = set()
    for _ in range(_DEPTH):
        if frame is None:
            break
        found.add(str(frame.f_globals.get("__name__", "")))
        frame = frame.f_back
    return found


def is_library(frame: FrameType) -> bool:
    """Tell whether a frame's code is a library's, and not the step's."""
    if frame.f_code.co_filename == _CHILD:  # the module of a child process is called __main__
        return True
    module = str(frame.f_globals.get("__name__", ""))
    top = module.partition(".")[0]
    known = top in _LIBRARIES or top in sys.stdlib_module_names
    return known and not module.startswith(_OUR_STEPS)


def short_path(file: str) -> str:
    """Return a file's path below the current directory, the path itself elsewhere."""
    try:
        return str(Path(file).relative_to(Path.cwd()))
    except (OSError, ValueError):
        return file


def line_at(where: str | None) -> str:
    """Return the line of a file that ``file:line`` names, without its indentation.

    Empty when there is no such line, or no file here: a report may come from elsewhere.
    """
    file, _, number = (where or "").rpartition(":")
    if not file or not number.isdigit():
        return ""
    return linecache.getline(str(Path(file).absolute()), int(number)).strip()
