"""C++ compilers that can build the host lane."""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass

from cuverify.errors import ToolchainError

_CANDIDATES = ("g++", "clang++", "zig")
_HOW_TO_GET_ONE = (
    "install g++ or clang++ from your distribution, or a compiler from PyPI: "
    "pip install 'cuverify[zig]'"
)

# The kernel text is CUDA's: it aliases memory and wants no thread-safe statics. Contraction is off
# so that both lanes round alike where the text asks for it.
_COMMON = (
    "-std=c++17",
    "-fPIC",
    "-g1",  # line tables and inlining; variables would double the file
    "-w",
    "-fvisibility=hidden",
    "-fno-threadsafe-statics",
    "-fno-strict-aliasing",
    "-ffp-contract=off",
    "-fno-omit-frame-pointer",
    "-fno-sanitize=undefined",
)
_CHECKED = {
    "gnu": ("-fsanitize=thread,alignment", "--param", "tsan-instrument-func-entry-exit=0"),
    "clang": (
        "-fsanitize=thread",
        "-fsanitize=alignment",
        "-fsanitize-recover=alignment",
        "-mllvm",
        "-tsan-instrument-func-entry-exit=0",
        "-mllvm",
        "-tsan-instrument-read-before-write=1",
    ),
}
# Of the stand-alone build. Bounds are the address sanitizer's to judge; `vptr` wants RTTI.
SANITIZERS = ("-fsanitize=address,undefined",)
_SANITIZED = (
    *SANITIZERS,
    "-fsanitize=float-cast-overflow",
    "-fno-sanitize=object-size,vptr",
)


@dataclass(frozen=True)
class Compiler:
    """A C++17 compiler.

    Attributes
    ----------
    name : str
        ``g++``, ``clang++``, ``zig`` or the command as given.
    command : tuple of str
        What runs it.
    family : {"gnu", "clang"}
        Whose flags it understands.
    version : str
        First line of its own description.
    """

    name: str
    command: tuple[str, ...]
    family: str
    version: str

    def kernel_flags(self, checked: bool) -> tuple[str, ...]:
        """Return the flags for a kernel text. Checked code stays close to its source lines."""
        return (*_COMMON, "-O1", *_CHECKED[self.family]) if checked else (*_COMMON, "-O2")

    def runtime_flags(self) -> tuple[str, ...]:
        """Return the flags for the libraries' runtime, which is not instrumented."""
        return (*_COMMON, "-O2")

    def sanitized_flags(self) -> tuple[str, ...]:
        """Return the flags for a kernel text in a stand-alone program under ASan and UBSan."""
        return (*_COMMON, "-O1", *_SANITIZED)

    def sanitized_runtime_flags(self) -> tuple[str, ...]:
        """Return the flags for that program's runtime: UBSan's checks in it cost half a minute."""
        return (*_COMMON, "-O1", "-fsanitize=address")


def find_compiler(name: str | None = None) -> Compiler:
    """Return a compiler by name or command, or the first that works.

    Parameters
    ----------
    name : str, optional
        ``g++``, ``clang++``, ``zig`` (the PyPI package) or a command. Where it is not given, `CXX`
        of the environment comes first.

    Raises
    ------
    ToolchainError
        If it, or any, cannot be run.
    """
    if name is not None:
        compiler = _probe(name)
        if compiler is None:
            raise ToolchainError(f"compiler={name!r} cannot be run; {_HOW_TO_GET_ONE}")
        return compiler
    chosen = os.environ.get("CXX")
    for candidate in (*([chosen] if chosen else []), *_CANDIDATES):
        if compiler := _probe(candidate):
            return compiler
    raise ToolchainError(
        f"no C++ compiler was found (tried {', '.join(_CANDIDATES)}); {_HOW_TO_GET_ONE}"
    )


def find_compilers() -> tuple[Compiler, ...]:
    """Return all of g++, clang++ and zig that work here."""
    return tuple(found for name in _CANDIDATES if (found := _probe(name)))


@functools.cache
def _probe(name: str) -> Compiler | None:
    if name == "zig":
        if importlib.util.find_spec("ziglang") is None:
            return None
        command: tuple[str, ...] = (sys.executable, "-m", "ziglang", "c++")
    else:
        words = shlex.split(name)
        path = shutil.which(words[0]) if words else None
        if path is None:
            return None
        command = (path, *words[1:])
    try:
        answer = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, timeout=60, check=True
        )
    except (OSError, subprocess.SubprocessError):
        return None
    version = answer.stdout.strip().splitlines()[0] if answer.stdout.strip() else name
    family = "clang" if re.search(r"clang|zig", answer.stdout, re.IGNORECASE) else "gnu"
    return Compiler(name, command, family, version)
