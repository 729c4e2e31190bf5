"""CUDA in a notebook: the cell magic `%%cuda`.

::

    %load_ext cuverify.notebook

    %%cuda THREADS=128
    // @kernel row_sums
    // @param out write fp32 [rows]
    ...

The cell's text is built for the host lane at once, and each kernel in it becomes a variable of its
own name. Diagnostics and the checkers' reports name the cell as the notebook numbers it, and its
lines as they stand in it.
"""

from __future__ import annotations

import ast
import shlex
from typing import Any

from cuverify.errors import CuverifyError, SourceError
from cuverify.kernel import Kernel
from cuverify.sources import KernelSource


def load_ipython_extension(shell: Any) -> None:
    """Register `%%cuda` with IPython's shell; `%load_ext cuverify.notebook` calls this."""

    def cuda(line: str, cell: str) -> None:
        """Build CUDA C++ for the host lane; `%%cuda NAME=VALUE ...` sets -D values."""
        try:
            # the cell that runs is the last input; IPython's own count may be ahead of it
            number = len(shell.user_ns["In"]) - 1
            shell.push(kernels_of_cell(line, cell, number))
        except CuverifyError as error:
            # IPython shows this instead of a stack of frames that say nothing about the cell
            shown = [f"{type(error).__name__}: {error}"]
            error.__dict__["_render_traceback_"] = lambda: shown
            raise

    shell.register_magic_function(cuda, "cell", "cuda")


def kernels_of_cell(line: str, cell: str, number: int) -> dict[str, Kernel]:
    """Return the kernels of a cell by name, built for the host lane.

    Parameters
    ----------
    line : str
        What stands behind ``%%cuda``: ``NAME=VALUE`` pairs. A value is a Python literal, or text.
    cell : str
        The rest of the cell.
    number : int
        The cell's number.

    Raises
    ------
    SourceError, ContractError
        As `load_kernel`.
    CompileError
        With the cell's number and line.
    ToolchainError
        There is no C++ compiler.
    """
    from cuverify.contract import kernels_in
    from cuverify.host.build import build_library
    from cuverify.host.options import current_options
    from cuverify.host.toolchain import find_compiler

    # the magic itself is the cell's first line
    source = KernelSource.from_text(
        cell, name=f"cell [{number}]", values=_values(line), first_line=2
    )
    build_library(source, find_compiler(current_options().compiler), checked=False)
    kernels = {name: Kernel(source, name) for name in kernels_in(cell)}
    if not kernels:
        Kernel(source)  # says that there is none
    return kernels


def _values(line: str) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for word in shlex.split(line):
        name, equals, text = word.partition("=")
        if not equals:
            raise SourceError(f"%%cuda {line}: {word!r} is no NAME=VALUE")
        try:
            values[name] = ast.literal_eval(text)
        except (ValueError, SyntaxError):
            values[name] = text
    return values
