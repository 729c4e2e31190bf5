"""From a kernel text to a library that the host lane can call.

Libraries are kept in the user's cache directory under the digest of everything that made them:
text, values, headers, shim, runtime, compiler and flags. Files appear there whole or not at all.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import os
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from importlib import resources
from pathlib import Path

from cuverify.contract import kernels_in
from cuverify.diagnostics import parse_gnu
from cuverify.errors import CacheError, CompileError
from cuverify.host.toolchain import Compiler
from cuverify.sources import KernelSource

_HERE = resources.files("cuverify.host")
_KEPT_FILES = 1000  # about 200 KB each; the least recently used go first


def cache_directory() -> Path:
    """Return the directory for built libraries, made if need be.

    `CUVERIFY_CACHE_DIR` overrides the user's cache directory.

    Raises
    ------
    CacheError
        If it cannot be made or written.
    """
    import platformdirs

    chosen = os.environ.get("CUVERIFY_CACHE_DIR")
    directory = Path(chosen) if chosen else platformdirs.user_cache_path("cuverify")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        with tempfile.NamedTemporaryFile(dir=directory):
            pass
    except OSError as error:
        raise CacheError(
            f"cache directory {directory} cannot be written ({error.strerror}); "
            "set CUVERIFY_CACHE_DIR to one that can"
        ) from None
    return directory


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
    key = _digest(
        source.digest(), _runtime_digest(), " ".join(compiler.command), compiler.version, *flags
    )
    directory = cache_directory()
    library = directory / f"{key}.so"
    if library.exists():
        with contextlib.suppress(OSError):
            library.touch()
        return library
    runtime = _runtime_object(directory, compiler)
    with _scratch(directory) as scratch:
        text = scratch / "kernel.cpp"
        text.write_text(
            source.translation_unit(
                prefix='#include "cuverify_host.h"\n',
                suffix="\n"
                + "".join(f"CUVERIFY_EXPORT_KERNEL({k})\n" for k in kernels_in(source.text)),
            )
        )
        includes = [f"-I{_HERE / 'include'}", *(f"-I{folder}" for folder in source.include_dirs)]
        built = scratch / "kernel.so"
        what = f"{source.name} does not compile for the host lane with {compiler.name}"
        obj = scratch / "kernel.o"
        _run([*compiler.command, *flags, *includes, "-c", str(text), "-o", str(obj)], scratch, what)
        _run(
            [*compiler.command, "-shared", "-g", str(obj), str(runtime), "-o", str(built)],
            scratch,
            f"{source.name} does not link for the host lane with {compiler.name}",
        )
        built.replace(library)
    _prune(directory)
    return library


def _runtime_object(directory: Path, compiler: Compiler) -> Path:
    flags = compiler.runtime_flags()
    key = _digest(_runtime_digest(), " ".join(compiler.command), compiler.version, *flags)
    built = directory / f"runtime-{key}.o"
    if not built.exists():
        with _scratch(directory) as scratch:
            folder = _HERE / "runtime"
            unit = scratch / "runtime.cpp"
            unit.write_text("".join(f'#include "{folder / name}"\n' for name in _runtime_sources()))
            obj = scratch / "runtime.o"
            _run(
                [*compiler.command, *flags, "-c", str(unit), "-o", str(obj)],
                scratch,
                f"the host lane's runtime does not compile with {compiler.name}",
            )
            obj.replace(built)
    return built


def _run(command: Sequence[str], folder: Path, what: str) -> None:
    # In a folder of its own: compilers write paths below the current one without it into the DWARF.
    answer = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    if answer.returncode:
        diagnostics = parse_gnu(answer.stderr)
        errors = [found for found in diagnostics if found.severity == "error"]
        raise CompileError(what, errors or diagnostics, answer.stderr)


def _runtime_sources() -> list[str]:
    return sorted(
        entry.name for entry in (_HERE / "runtime").iterdir() if entry.name.endswith(".cpp")
    )


@functools.cache
def _runtime_digest() -> str:
    files = [
        entry
        for part in ("runtime", "include")
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


@contextlib.contextmanager
def _scratch(directory: Path) -> Iterator[Path]:
    with tempfile.TemporaryDirectory(prefix="build-", dir=directory) as name:
        yield Path(name)


def _prune(directory: Path) -> None:
    def age(file: Path) -> float:
        try:
            return file.stat().st_mtime
        except OSError:  # another process was faster
            return 0.0

    files = sorted(directory.glob("*.so"), key=age)
    for file in files[: max(0, len(files) - _KEPT_FILES)]:
        with contextlib.suppress(OSError):
            file.unlink()
