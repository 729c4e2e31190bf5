"""From a kernel text to a cubin for any architecture, with no GPU and no driver.

NVRTC is reached through CuPy's binding, which loads without a driver.
"""

from __future__ import annotations

import base64
import contextlib
import functools
import hashlib
import importlib
import json
import os
import re
import sys
import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from cuverify.cache import cache_directory, prune, still_there
from cuverify.cubin import Resources, read_resources, whole_image
from cuverify.diagnostics import (
    ERROR_LIMIT,
    NVRTC,
    PTX,
    PTXAS,
    Diagnostic,
    parse_nvrtc,
    with_excerpts,
)
from cuverify.errors import ArgumentError, CacheError, CompileError, ToolchainError
from cuverify.files import write_atomically
from cuverify.sources import KernelSource, is_cuda_header

ARCHITECTURES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_90a", "sm_100", "sm_120")

_KIB = 1024
# Shared memory that one block may have after opting in: CUDA C++ Programming Guide, "Technical
# Specifications per Compute Capability".
_MAX_SHARED_BYTES = {
    "sm_80": 163 * _KIB,
    "sm_86": 99 * _KIB,
    "sm_89": 99 * _KIB,
    "sm_90": 227 * _KIB,
    "sm_90a": 227 * _KIB,
    "sm_100": 227 * _KIB,
    "sm_120": 99 * _KIB,
}

# The name of the program. Its folder does not exist, so that a quoted include of the text is not
# looked for in the current folder, which is no part of the digest. `#line` names the real file.
_PROGRAM = "<cuverify>/unit.cu"

_INSTALL = "pip install 'cuverify[cuda12]' (or 'cuverify[cuda13]' with CUDA 13)"

# Options that would make a digest, a check of values or the figures untrue.
_REFUSED_OPTIONS = (
    (r"--gpu-architecture\b.*|-arch\b.*", "the architecture is the argument arch"),
    (r"-D.*|--define-macro\b.*", "-D values are the source's `values`, where they are checked"),
    (r"-U.*|--undefine-macro\b.*", "-D values are the source's `values`"),
    (
        r"-I.*|--include-path\b.*|-include\b.*|--pre-include\b.*",
        "folders are the source's `include_dirs`, whose headers are part of the digest",
    ),
    (r"-ftz\b.*|--ftz\b.*", "denormals are flushed in every launch through CuPy"),
    (
        r"-(rdc|-relocatable-device-code|dc|-device-c|dlto|-dlink-time-opt)\b.*",
        "a cubin that is yet to be linked cannot be launched",
    ),
)


@dataclass(frozen=True)
class Cubin:
    """A compiled text.

    Parameters
    ----------
    arch : str
        What it was compiled for.
    image : bytes
        The cubin, an ELF file, with the last byte that CuPy's binding drops.
    resources : mapping of str to Resources
        By kernel, in the order of their names. Kernels that are not ``extern "C"`` have their
        mangled names.
    warnings : tuple of Diagnostic
        What NVRTC and ptxas warned of.
    log : str
        NVRTC's whole log.
    nvrtc_version : tuple of int
        Major and minor.
    digest : str
        SHA-256 of everything that decides the image, apart from names of folders.
    """

    arch: str
    image: bytes
    resources: Mapping[str, Resources]
    warnings: tuple[Diagnostic, ...]
    log: str
    nvrtc_version: tuple[int, int]
    digest: str


# Of each package with CUDA headers a file that a new version of it writes anew.
_HEADER_MARKS = ("cuda_runtime_api.h", "cuda/std/version", "crt/host_defines.h")
_KEPT_FILES = {"cubin-*.json": 1000}  # of 50 to 300 KB each, in the cache directory

_memo: OrderedDict[tuple[str, ...], Cubin] = OrderedDict()
_memo_lock = threading.Lock()
_MEMO_SIZE = 256  # cubins of 20 to 200 KB


def capability_of(arch: str) -> tuple[int, int]:
    """Return the compute capability of an architecture such as ``sm_90a``."""
    number = int(re.sub(r"\D", "", arch))
    return number // 10, number % 10


def max_shared_bytes(arch: str) -> int:
    """Return the most shared memory that a block can have on an architecture, in bytes.

    Static and dynamic together; above 48 KiB a launch has to opt in.

    Raises
    ------
    ArgumentError
        The architecture is none of `ARCHITECTURES`.
    """
    _check_arch(arch)
    return _MAX_SHARED_BYTES[arch]


def nvrtc_options(source: KernelSource) -> tuple[str, ...]:
    """Return NVRTC's options for a source, without the architecture.

    They are the same here and in a launch through CuPy's ``RawModule``, so that the figures are
    those of the code that runs.
    """
    return (
        "-std=c++17",
        "--generate-line-info",  # sanitizers and profilers show the kernel's lines; costs no speed
        # CuPy appends -ftz=true behind a user's options and NVRTC takes the last: code that is
        # launched through CuPy always flushes denormals. Said here too, figures and bits are those.
        "-ftz=true",
        *(f"-I{folder}" for folder in (*source.include_dirs, *cuda_include_dirs())),
    )


def compile_cubin(source: KernelSource, arch: str, *, options: Sequence[str] = ()) -> Cubin:
    """Compile a text for one architecture. No GPU and no driver is needed.

    Parameters
    ----------
    source : KernelSource
        The text. Its headers are read anew; the same text, values, headers and options are
        compiled once, and found in the cache directory by later processes.
    arch : str
        One of `ARCHITECTURES`.
    options : sequence of str
        Further options of NVRTC, such as ``"-maxrregcount=64"``.

    Returns
    -------
    Cubin
        Shared between callers: not to be changed.

    Raises
    ------
    ArgumentError
        An unknown architecture, or an option that NVRTC refuses or that is given otherwise.
    CompileError
        The text does not compile; with all diagnostics.
    SourceError
        A header is missing.
    ToolchainError
        CuPy, NVRTC or CUDA's headers are missing, or NVRTC does not know the architecture.
    """
    _check_arch(arch)
    _check_options(options)
    nvrtc, version = _load_nvrtc()
    _check_supported(nvrtc, version, arch)
    while True:
        digest = source.digest()
        key = (digest, arch, str(version), *nvrtc_options(source), "--", *options)
        with _memo_lock:
            if key in _memo:
                _memo.move_to_end(key)
                return _memo[key]
        # read once: what is kept is kept under the text that was compiled
        text = source.translation_unit()
        file = _cache_file(version, text, arch, (*nvrtc_options(source), *options))
        cubin = _compile(nvrtc, version, source, text, digest, arch, tuple(options), file)
        if source.digest() == digest:
            _keep(file, cubin)
            break
        # A header was saved while NVRTC read it: the image may hold either version, or both.
    with _memo_lock:
        _memo[key] = cubin
        while len(_memo) > _MEMO_SIZE:
            _memo.popitem(last=False)
    return cubin


def _check_arch(arch: str) -> None:
    if arch not in ARCHITECTURES:
        raise ArgumentError("arch", arch, f"unknown; known are {', '.join(ARCHITECTURES)}")


def _check_options(options: Sequence[str]) -> None:
    if isinstance(options, str) or not all(isinstance(each, str) for each in options):
        raise ArgumentError("options", options, "give a sequence of str, one an option")
    for option in options:
        for pattern, reason in _REFUSED_OPTIONS:
            if re.fullmatch(pattern, option, re.DOTALL):
                raise ArgumentError("options", option, reason)


# --- NVRTC and the CUDA headers ------------------------------------------------------------------


def _load_nvrtc() -> tuple[Any, tuple[int, int]]:
    """Return CuPy's binding of NVRTC and NVRTC's version."""
    try:
        # an attribute of cupy.cuda, and no module of that name
        nvrtc = importlib.import_module("cupy.cuda").nvrtc
    except ModuleNotFoundError as error:
        if error.name not in ("cupy", "cupy.cuda"):
            raise ToolchainError(f"CuPy cannot be imported: {error}; reinstall it") from error
        raise ToolchainError(
            f"CuPy is not installed, and NVRTC is reached through it: {_INSTALL}"
        ) from None
    except Exception as error:  # whatever a broken installation raises
        raise ToolchainError(f"CuPy cannot be imported: {error}; reinstall it") from error
    try:
        major, minor = nvrtc.getVersion()
    except (RuntimeError, OSError, AttributeError) as error:  # raised when the library is missing
        raise ToolchainError(
            f"libnvrtc cannot be loaded: {_INSTALL}; CuPy says: {str(error).strip()}"
        ) from error
    return nvrtc, (int(major), int(minor))


def _check_supported(nvrtc: Any, version: tuple[int, int], arch: str) -> None:
    number = int(re.sub(r"\D", "", arch))
    supported = tuple(nvrtc.getSupportedArchs())
    if number in supported:
        return
    shown = ".".join(map(str, version))
    remedy = (
        "install an older one" if supported and number < min(supported) else "12.8 or later does"
    )
    raise ToolchainError(f"NVRTC {shown} cannot compile for {arch}; {remedy}: {_INSTALL}")


def cuda_include_dirs() -> tuple[Path, ...]:
    """Return the folders of the CUDA toolkit's headers (``cuda_bf16.h`` and others).

    The packages that pip installs come first, then ``CUDA_PATH`` and ``CUDA_HOME``, a conda
    environment, and the toolkit that CuPy finds. Headers of another major version than NVRTC's are
    passed over: they do not fit.

    Returns
    -------
    tuple of Path
        More than one where packages with further headers are installed: ``<cuda/std/cstdint>``,
        ``<mma.h>``. None is no error before a text includes such a header.
    """
    try:
        wanted: int | None = _load_nvrtc()[1][0]
    except ToolchainError:
        wanted = None  # nothing can be compiled; what headers there are is still worth telling
    for folder in _header_places():
        major = _header_major(folder)
        if major is not None and wanted in (None, major):
            further = [(folder / "cccl", "cuda/std")]  # CUDA 13
            if major == 12:
                for root in _wheel_roots():
                    further.append((root / "cuda_cccl" / "include", "cuda/std"))
                    further.append((root / "cuda_nvcc" / "include", "crt"))
            return (folder, *(place for place, inside in further if (place / inside).is_dir()))
    return ()


def _wheel_roots() -> list[Path]:
    """Return the folders of the packages that NVIDIA publishes, all under the name `nvidia`.

    Looked for by hand: one package among them with an `__init__.py` hides the others from imports.
    """
    roots = (Path(entry) / "nvidia" for entry in sys.path if entry)
    return [root for root in roots if root.is_dir()]


def _header_places() -> Iterable[Path]:
    for root in _wheel_roots():
        yield root / "cuda_runtime" / "include"  # CUDA 12
        yield from sorted(root.glob("cu[0-9]*/include"), reverse=True)  # CUDA 13 and later
    named = [os.environ.get(name) for name in ("CUDA_PATH", "CUDA_HOME", "CONDA_PREFIX")]
    for toolkit in filter(None, [*named, _cupy_toolkit()]):
        yield Path(toolkit) / "include"
        yield from sorted(Path(toolkit).glob("targets/*/include"))


def _cupy_toolkit() -> str | None:
    try:
        found = importlib.import_module("cupy.cuda").get_cuda_path()
    except Exception:  # a broken CuPy is reported where it is needed
        return None
    return str(found) if found else None


def _header_major(folder: Path) -> int | None:
    """Return the major version of the toolkit whose headers lie in a folder, None without one."""
    if not (folder / "cuda_bf16.h").is_file():
        return None
    try:
        with open(folder / "cuda_runtime_api.h", encoding="utf-8", errors="replace") as header:
            text = header.read(32768)  # of 600 KB; it stands near the top
    except OSError:
        return None
    match = re.search(r"^\s*#\s*define\s+CUDART_VERSION\s+(\d+)", text, re.MULTILINE)
    return int(match[1]) // 1000 if match else None


# --- one compilation -----------------------------------------------------------------------------


@dataclass(frozen=True)
class _Outcome:
    status: str  # "ok", "failed", or "refused" for an option that NVRTC does not take
    log: str
    image: bytes


def _compile(
    nvrtc: Any,
    version: tuple[int, int],
    source: KernelSource,
    text: str,
    digest: str,
    arch: str,
    options: tuple[str, ...],
    file: Path | None,
) -> Cubin:
    common = (*nvrtc_options(source), *options)
    # From 12.9 on NVRTC keeps a cache of its own, and a hit in it comes without ptxas' log.
    fresh = ("--no-cache",) if version >= (12, 9) else ()
    outcome = _kept(file) or _run(
        nvrtc, text, (*common, *fresh, "--ptxas-options=-v", f"--gpu-architecture={arch}")
    )
    shown = ".".join(map(str, version))
    if outcome.status == "refused":
        raise ArgumentError(
            "options", options, f"NVRTC {shown} refuses them: {outcome.log.strip()}"
        )
    if outcome.status == "failed":
        diagnostics = _located(nvrtc, source, text, common, arch, outcome.log)
        _check_cuda_headers(version, diagnostics)
        raise CompileError(
            f"{source.name}: NVRTC {shown} cannot compile it for {arch}", diagnostics, outcome.log
        )
    diagnostics = _placed(source, parse_nvrtc(outcome.log))
    resources = read_resources(arch, outcome.log, outcome.image)
    decisive = [digest, arch, shown, *(each for each in common if not each.startswith("-I"))]
    return Cubin(
        arch=arch,
        image=outcome.image,
        resources=resources,
        warnings=tuple(entry for entry in diagnostics if entry.severity == "warning"),
        log=outcome.log,
        nvrtc_version=version,
        digest=hashlib.sha256("\0".join(decisive).encode()).hexdigest(),
    )


def _kept(file: Path | None) -> _Outcome | None:
    """Return a compilation that succeeded before, None without one."""
    if file is None or not still_there(file):
        return None
    try:
        kept = json.loads(file.read_bytes())
        return _Outcome("ok", kept["log"], base64.b64decode(kept["image"], validate=True))
    except (OSError, ValueError, KeyError, TypeError):  # half of a file helps nobody
        with contextlib.suppress(OSError):
            file.unlink()
        return None


def _keep(file: Path | None, cubin: Cubin) -> None:
    if file is None or file.exists():
        return
    kept = {"log": cubin.log, "image": base64.b64encode(cubin.image).decode()}
    with contextlib.suppress(OSError):  # a full disk is no reason to fail
        write_atomically(file, json.dumps(kept))
        prune(file.parent, _KEPT_FILES)


def _cache_file(
    version: tuple[int, int], text: str, arch: str, options: tuple[str, ...]
) -> Path | None:
    """Return where a compilation is kept, None without a cache directory.

    The text names the digest of the headers that it includes; CUDA's headers and NVRTC itself are
    told apart by the sizes and times of some of their files.
    """
    try:
        directory = cache_directory()
    except CacheError:
        return None
    installed = [folder / mark for folder in cuda_include_dirs() for mark in _HEADER_MARKS]
    marks = [_mark(file) for file in (*installed, *_loaded_nvrtc())]
    state = hashlib.sha256()
    for part in (str(version), arch, *options, "--", *marks, "--", text):
        state.update(f"{len(part)}:".encode() + part.encode())
    return directory / f"cubin-{state.hexdigest()[:32]}.json"


def _mark(file: Path) -> str:
    try:
        found = file.stat()
    except OSError:
        return ""
    return f"{file} {found.st_size} {found.st_mtime_ns}"


@functools.cache
def _loaded_nvrtc() -> tuple[Path, ...]:
    """Return the files of NVRTC that this process has loaded, none where that cannot be told."""
    try:
        maps = Path("/proc/self/maps").read_text()
    except OSError:
        return ()
    lines = (line.split(maxsplit=5) for line in maps.splitlines())
    return tuple(sorted({Path(line[5]) for line in lines if len(line) > 5 and "nvrtc" in line[5]}))


def _run(nvrtc: Any, text: str, options: tuple[str, ...], *, ptx: bool = False) -> _Outcome:
    program = nvrtc.createProgram(text, _PROGRAM, (), ())
    try:
        status = "ok"
        try:
            nvrtc.compileProgram(program, options)
        except nvrtc.NVRTCError as error:
            status = "refused" if "INVALID_OPTION" in str(error) else "failed"
        try:
            log = nvrtc.getProgramLog(program)
        except UnicodeDecodeError as error:  # an excerpt of a header in another encoding
            log = error.object.decode("utf-8", "replace")
        image = b""
        if status == "ok":
            image = nvrtc.getPTX(program) if ptx else whole_image(nvrtc.getCUBIN(program))
        return _Outcome(status, log.replace("\0", "\n"), image)
    finally:
        nvrtc.destroyProgram(program)


# --- where the messages point --------------------------------------------------------------------


def _located(
    nvrtc: Any,
    source: KernelSource,
    text: str,
    options: tuple[str, ...],
    arch: str,
    log: str,
) -> tuple[Diagnostic, ...]:
    """Return the diagnostics of a compilation that failed, all of them, with their places."""
    if ERROR_LIMIT in log.split("\n"):
        # EDG stops at 100 errors. The option that says otherwise is documented by nobody, hence
        # only here, and without it the first hundred stand.
        raised = _run(
            nvrtc,
            text,
            (*options, "-Xcudafe=--error_limit=100000", f"--gpu-architecture={arch}"),
        )
        if raised.status == "failed":
            log = raised.log
    diagnostics = parse_nvrtc(log)
    if any(entry.file == PTX for entry in diagnostics):
        virtual = arch.replace("sm_", "compute_")
        made = _run(nvrtc, text, (*options, f"--gpu-architecture={virtual}"), ptx=True)
        if made.status == "ok":
            diagnostics = _through_ptx(source, diagnostics, made.image.decode("utf-8", "replace"))
    return _placed(source, _with_hints(diagnostics))


_PTX_FILE = re.compile(r'\s*\.file\s+(?P<index>\d+)\s+"(?P<path>[^"]*)"')
_PTX_LOC = re.compile(
    r"\s*\.loc\s+(?P<index>\d+) (?P<line>\d+) (?P<column>\d+)"
    r"(?:.*inlined_at (?P<from_index>\d+) (?P<from_line>\d+))?"
)


def _through_ptx(
    source: KernelSource, diagnostics: Iterable[Diagnostic], ptx: str
) -> tuple[Diagnostic, ...]:
    """Give ptxas' messages, which name lines of the PTX, the lines of the text behind them."""
    lines = ptx.split("\n")
    files = {
        match["index"]: _as_named(source, match["path"])
        for match in map(_PTX_FILE.match, lines)
        if match
    }
    found = []
    for entry in diagnostics:
        found.append(entry)
        if entry.file != PTX:
            continue
        marks = [match for match in map(_PTX_LOC.match, lines[: entry.line]) if match]
        if not marks or marks[-1]["index"] not in files:
            continue
        mark = marks[-1]
        column = int(mark["column"]) or None
        found[-1] = replace(entry, file=files[mark["index"]], line=int(mark["line"]), column=column)
        if mark["from_index"] in files:
            place = (files[mark["from_index"]], int(mark["from_line"]))
            found.append(Diagnostic(*place, None, "note", "inlined from here", ""))
    return tuple(found)


def _as_named(source: KernelSource, path: str) -> str:
    """Undo what line information does to a name from `#line`: it puts the current folder before."""
    return source.name if path == str(Path.cwd() / source.name) else path


_STANDARD_HEADERS = frozenset(
    """
    algorithm array atomic bit cassert cfloat chrono climits cmath complex cstddef cstdint cstdio
    cstdlib cstring functional initializer_list iostream iterator limits memory new numeric optional
    string string_view tuple type_traits utility variant vector assert.h float.h limits.h math.h
    stdbool.h stddef.h stdint.h stdio.h stdlib.h string.h
    """.split()  # noqa: SIM905
)
_CANNOT_OPEN = re.compile(r'cannot open source file "(?P<name>[^"]+)"')


def _with_hints(diagnostics: Iterable[Diagnostic]) -> list[Diagnostic]:
    found: list[Diagnostic] = []
    for entry in diagnostics:
        found.append(entry)
        match = _CANNOT_OPEN.search(entry.message)
        if match is None:
            continue
        name = match["name"]
        if name.startswith(("cuda/", "cub/", "thrust/", "nv/")):
            hint = f"{name} is in the package nvidia-cuda-cccl (CUDA 12: nvidia-cuda-cccl-cu12)"
        elif name.startswith("crt/"):
            hint = f"{name} is in the package nvidia-cuda-crt (CUDA 12: nvidia-cuda-nvcc-cu12)"
        elif name in _STANDARD_HEADERS:
            hint = (
                "NVRTC has no standard library: mathematics, printf and assert are built in; more "
                "is in <cuda/std/...>, package nvidia-cuda-cccl (CUDA 12: nvidia-cuda-cccl-cu12)"
            )
        else:
            continue
        found.append(Diagnostic(entry.file, entry.line, None, "note", hint, ""))
    return found


_ENTRY_FUNCTION = re.compile(r"Entry function '(?P<kernel>\w+)'")


def _placed(source: KernelSource, diagnostics: Iterable[Diagnostic]) -> tuple[Diagnostic, ...]:
    """Give every message a place in the text that it can have, and its source line."""
    last = source.first_line + source.text.rstrip("\n").count("\n")
    found = []
    for entry in diagnostics:
        if entry.file == _PROGRAM and entry.line == 0:  # "At end of source"
            entry = replace(entry, file=source.name, line=last)
        elif entry.file == PTXAS and (match := _ENTRY_FUNCTION.search(entry.message)):
            # a kernel that takes too much
            defined = re.search(
                rf"\b__global__\b[^;{{}}]*?\b({match['kernel']})\s*\(", source.text, re.DOTALL
            )
            if defined:
                line = source.first_line + source.text.count("\n", 0, defined.start(1))
                entry = replace(entry, file=source.name, line=line)
        elif entry.line == 0 and entry.file in (PTXAS, NVRTC):
            entry = replace(entry, file=source.name, message=f"{entry.file[1:-1]}: {entry.message}")
        found.append(entry)
    return with_excerpts(found, source.source_line)


def _check_cuda_headers(version: tuple[int, int], diagnostics: Iterable[Diagnostic]) -> None:
    """Raise when what is missing is the CUDA toolkit's headers and not one of the text's."""
    if cuda_include_dirs():
        return
    for entry in diagnostics:
        match = _CANNOT_OPEN.search(entry.message)
        if match and is_cuda_header(match["name"]):
            others = [
                f"{folder} (CUDA {major})"
                for folder in _header_places()
                if (major := _header_major(folder)) is not None
            ]
            found = (
                f"; headers of another version do not fit: {', '.join(others)}" if others else ""
            )
            raise ToolchainError(
                f"{entry.where}: {match['name']} is one of CUDA's headers, and none for "
                f"NVRTC {version[0]}.{version[1]} were found: {_INSTALL}, or set CUDA_PATH to a "
                f"toolkit{found}"
            )
