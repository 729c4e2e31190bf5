"""From a kernel text to a library that the host lane can call.

Libraries are kept in the user's cache directory under the digest of everything that made them:
text, values, headers, shim, runtime, compiler and flags. Files appear there whole or not at all.
"""

from __future__ import annotations

import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path

from cuverify.cache import VARIABLE, cache_directory, prune, still_there
from cuverify.contract import kernels_in
from cuverify.diagnostics import parse_gnu, with_excerpts
from cuverify.errors import CompileError
from cuverify.host.toolchain import SANITIZERS, Compiler
from cuverify.sources import KernelSource

_HERE = resources.files("cuverify.host")
# Of about 200 KB and 3 MB each; the least recently used go first.
_KEPT_FILES = {"*.so": 1000, "program-*": 100}

# What this process has found or built, by cache directory as the environment names it and by key.
_known: dict[tuple[str | None, str], Path] = {}


def build_library(source: KernelSource, compiler: Compiler, *, checked: bool) -> Path:
    """Return the shared library of a text's kernels, from the cache or freshly built.

    Parameters
    ----------
    source : KernelSource
        The text; its headers' contents are part of the key.
    compiler : Compiler
    checked : bool
        Whether loads and stores are instrumented.

    Raises
    ------
    CompileError
        With all diagnostics, placed in the kernel's own file.
    CacheError
        If the cache directory cannot be written.
    """
    flags = compiler.kernel_flags(checked)

    def key() -> str:
        return _key(compiler, flags, source.digest())

    chosen = os.environ.get(VARIABLE)
    known = _known.get((chosen, name := key()))
    if known is not None and still_there(known):
        return known
    directory = cache_directory()

    def make(scratch: Path) -> Path:
        runtime = _runtime_object(directory, compiler, compiler.runtime_flags(), ("runtime",))
        obj = _kernel_object(scratch, source, compiler, flags, "")
        return _link(scratch, [obj, runtime], source, compiler, ("-shared",))

    library = _cached(directory, "{}.so", key, make)
    _known[chosen, name] = library
    return library


def build_program(source: KernelSource, compiler: Compiler) -> Path:
    """Return a program that runs one launch of a text's kernels under ASan and UBSan.

    Parameters
    ----------
    source : KernelSource
    compiler : Compiler
        One whose sanitizers work here; see `standalone.why_not`.

    Raises
    ------
    CompileError, CacheError
        As `build_library`.
    """
    flags = compiler.sanitized_flags()
    directory = cache_directory()

    def make(scratch: Path) -> Path:
        runtime = _runtime_object(
            directory, compiler, compiler.sanitized_runtime_flags(), ("runtime", "program")
        )
        table = "".join(f'{{"{k}", cuverify_launch_{k}}}, ' for k in kernels_in(source.text))
        suffix = (
            "extern const ::cuverify_host::KernelEntry cuverify_kernels[] = "
            f"{{{table}{{nullptr, nullptr}}}};\n"
        )
        obj = _kernel_object(scratch, source, compiler, flags, suffix)
        return _link(scratch, [obj, runtime], source, compiler, SANITIZERS)

    return _cached(
        directory, "program-{}", lambda: _key(compiler, flags, source.digest(), "program"), make
    )


def _key(compiler: Compiler, flags: Sequence[str], *parts: str) -> str:
    return _digest(
        _runtime_digest(), " ".join(compiler.command), compiler.version, " ".join(flags), *parts
    )


def _cached(
    directory: Path, name: str, key: Callable[[], str], make: Callable[[Path], Path]
) -> Path:
    """Return the file of a key, made if it is not there.

    What it is made of may be edited at any time: a file is only kept under the key that holds both
    before and after it was made.
    """
    file = directory / name.format(key())
    while not still_there(file):
        _runtime_digest.cache_clear()
        before = key()
        file = directory / name.format(before)
        if still_there(file):
            break
        with tempfile.TemporaryDirectory(prefix="build-", dir=directory) as scratch:
            made = make(Path(scratch))
            _runtime_digest.cache_clear()
            if key() == before:
                made.replace(file)
                prune(directory, _KEPT_FILES)
    return file


def _kernel_object(
    scratch: Path, source: KernelSource, compiler: Compiler, flags: Sequence[str], suffix: str
) -> Path:
    text = scratch / "kernel.cpp"
    exports = "".join(f"CUVERIFY_EXPORT_KERNEL({k})\n" for k in kernels_in(source.text))
    text.write_text(
        source.translation_unit(
            prefix='#include "cuverify_host.h"\n', suffix=f"\n{exports}{suffix}"
        )
    )
    includes = [f"-I{_HERE / 'include'}", *(f"-I{folder}" for folder in source.include_dirs)]
    obj = scratch / "kernel.o"
    _run(
        [*compiler.command, *flags, *includes, "-c", str(text), "-o", str(obj)],
        scratch,
        f"{source.name} does not compile for the host lane with {compiler.name}",
        source,
    )
    return obj


def _link(
    scratch: Path,
    objects: Sequence[Path],
    source: KernelSource,
    compiler: Compiler,
    flags: Sequence[str],
) -> Path:
    built = scratch / "built"
    _run(
        [*compiler.command, *flags, "-g", *map(str, objects), "-o", str(built)],
        scratch,
        f"{source.name} does not link for the host lane with {compiler.name}",
    )
    return built


def _runtime_object(
    directory: Path, compiler: Compiler, flags: Sequence[str], parts: Sequence[str]
) -> Path:
    def make(scratch: Path) -> Path:
        unit = scratch / "runtime.cpp"
        unit.write_text("".join(f'#include "{file}"\n' for file in _texts(parts)))
        obj = scratch / "runtime.o"
        _run(
            [*compiler.command, *flags, "-c", str(unit), "-o", str(obj)],
            scratch,
            f"the host lane's runtime does not compile with {compiler.name}",
        )
        return obj

    return _cached(directory, "runtime-{}.o", lambda: _key(compiler, flags, *parts), make)


def _run(
    command: Sequence[str], folder: Path, what: str, source: KernelSource | None = None
) -> None:
    # In a folder of its own: compilers write paths below the current one without it into the DWARF.
    answer = subprocess.run(
        command, capture_output=True, text=True, errors="replace", check=False, cwd=folder
    )
    if answer.returncode:
        diagnostics = parse_gnu(answer.stderr)
        if source is not None:
            diagnostics = with_excerpts(diagnostics, source.source_line)
        raise CompileError(what, diagnostics, answer.stderr)


def _texts(parts: Sequence[str]) -> list[Path]:
    """Return the C++ files of the runtime's parts, in a fixed order."""
    folders = [Path(str(_HERE / part)) for part in parts]
    return [file for folder in folders for file in sorted(folder.glob("*.cpp"))]


@functools.cache
def _runtime_digest() -> str:
    files = [
        entry
        for part in ("runtime", "program", "include")
        for entry in (_HERE / part).iterdir()
        if entry.is_file()
    ]
    return _digest(
        *(
            text
            for file in sorted(files, key=lambda f: f.name)
            for text in (file.name, file.read_text())
        )
    )


def _digest(*parts: str) -> str:
    state = hashlib.sha256()
    for part in parts:
        state.update(f"{len(part)}:".encode() + part.encode())
    return state.hexdigest()[:32]
