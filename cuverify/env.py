"""What this machine has of what cuverify can use, as plain data.

Nothing here raises: a part that is missing or broken is an entry that says so and how to get it.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import platform
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

import cuverify
from cuverify.cache import VARIABLE as CACHE_VARIABLE
from cuverify.cache import cache_directory
from cuverify.report import Finding, Report, Table

State = Literal["found", "missing", "broken"]

NVRTC_AT_LEAST = (12, 8)  # the first that compiles for sm_100 and sm_120
# what a result depends on
VERSIONED = ("cuverify", "python", "numpy", "torch", "CuPy", "NVRTC", "GPU", "driver")
COMPILE, HOST_LANE, GPU_LANE = "compile for GPUs", "host lane", "GPU lane and capture"
COMPILERS = ("CXX", "g++", "clang++", "zig c++")
DRIVER_FILE = Path("/proc/driver/nvidia/version")
_TIMEOUT = 20.0  # seconds for a tool to say its version; a network file system can be slow


@dataclass(frozen=True)
class Part:
    """One part of the environment.

    Parameters
    ----------
    name : str
        What it is.
    state : {"found", "missing", "broken"}
        ``"broken"``: it is there and does not work, `value` says how.
    value : str
        Version or path when found, what was seen otherwise.
    use : str
        What cuverify needs it for.
    fix : str or None
        How to get it, when it is not found.
    """

    name: str
    state: State
    value: str
    use: str
    fix: str | None = None


class Use(NamedTuple):
    """One thing that cuverify can do, or cannot do here."""

    name: str
    possible: bool
    reason: str


@dataclass(frozen=True)
class Environment:
    """All parts, in the order of `cuverify env`.

    Parameters
    ----------
    parts : tuple of Part
    """

    parts: tuple[Part, ...]

    def __getitem__(self, name: str) -> Part:
        for part in self.parts:
            if part.name == name:
                return part
        raise KeyError(name)

    @property
    def versions(self) -> dict[str, str]:
        """What was found of `VERSIONED`, by name: the environment of a result.

        It holds no paths, so that it can be published.
        """
        return {name: self[name].value for name in VERSIONED if self[name].state == "found"}

    def to_json(self) -> dict[str, Any]:
        """Return the parts by name, as JSON values."""
        return {
            part.name: {"state": part.state, "value": part.value, "use": part.use, "fix": part.fix}
            for part in self.parts
        }

    def report(self) -> Report:
        """Return the parts as a report: what is there, what it can be used for, what is in the way.

        A part that is only missing and not needed, such as a second compiler, is in the table with
        the way to get it. A broken part, or a use that lacks its parts, is a finding: an error when
        neither lane can run.
        """
        report = Report("environment", environment=self.to_json())
        report.tables.append(
            Table(
                "parts",
                ("part", "state", "version, place, or how to get it", "used for"),
                [(part.name, part.state, _shown(part), part.use) for part in self.parts],
            )
        )
        uses = self.uses()
        report.tables.append(
            Table("uses", ("use", "possible", "with, or why not"), [tuple(use) for use in uses])
        )
        report.findings += [
            Finding("env-broken", "warning", f"{part.name}: {part.value}", fix=part.fix)
            for part in self.parts
            if part.state == "broken"
        ]
        possible = {use.name: use.possible for use in uses}
        if not possible[COMPILE]:
            report.findings.append(
                Finding(
                    "env-no-compile",
                    "warning",
                    "no kernel can be compiled for a GPU here",
                    fix="pip install 'cuverify[cuda12]' (or cuda13)",
                )
            )
        if not (possible[HOST_LANE] or possible[GPU_LANE]):
            report.findings.append(
                Finding(
                    "env-no-lane",
                    "error",
                    "no kernel can run here: neither the host lane nor the GPU lane has its parts",
                    fix="install g++ or clang++, or `pip install 'cuverify[zig]'`",
                )
            )
        return report

    def uses(self) -> tuple[Use, ...]:
        """Return what cuverify can do here, and with what or why not."""
        compilers = [
            part for part in self.parts if part.name in COMPILERS and part.state == "found"
        ]
        host = Use(HOST_LANE, True, ", ".join(part.name for part in compilers))
        if not compilers:
            host = Use(HOST_LANE, False, "no C++ compiler was found")
        elif self["cache directory"].state != "found":
            host = Use(HOST_LANE, False, self["cache directory"].value)
        return (
            self._use(COMPILE, ("CuPy", "NVRTC", "CUDA headers")),
            host,
            self._use(GPU_LANE, ("GPU", "CuPy", "torch", "NVRTC")),
        )

    def _use(self, name: str, needed: tuple[str, ...]) -> Use:
        for part in needed:
            if self[part].state != "found":
                return Use(name, False, f"{part}: {self[part].value}")
        return Use(name, True, ", ".join(f"{part} {self[part].value}" for part in needed[:2]))


def inspect() -> Environment:
    """Look at the present process and machine.

    Loads torch and CuPy if they are there, runs each compiler once for its version, and writes and
    removes one file in the cache directory.

    Returns
    -------
    Environment
        Never raises: what fails is an entry in it.
    """
    probes: tuple[tuple[str, str, Callable[[], Part]], ...] = (
        ("cuverify", "", _cuverify),
        ("python", "", _python),
        ("numpy", "oracles", lambda: _package("numpy", "oracles", "pip install numpy")),
        ("torch", "tensors, streams, graphs", _torch),
        ("CuPy", "NVRTC and the GPU lane", _cupy),
        ("NVRTC", "compiling for GPUs", _nvrtc),
        ("CUDA headers", "bf16 and fp16 in kernels", _headers),
        ("g++", "host lane", lambda: _compiler("g++", _which("g++"), "apt-get install g++")),
        (
            "clang++",
            "host lane",
            lambda: _compiler("clang++", _which("clang++"), "apt-get install clang"),
        ),
        ("zig c++", "host lane", _zig),
        *([("CXX", "host lane", _chosen)] if os.environ.get("CXX") else []),
        ("cache directory", "built host-lane kernels", _cache),
        ("GPU", "GPU lane, capture", _gpu),
        ("driver", "GPU lane, capture", _driver),
    )
    return Environment(tuple(_guarded(name, use, probe) for name, use, probe in probes))


def _guarded(name: str, use: str, probe: Callable[[], Part]) -> Part:
    try:
        return probe()
    except Exception as error:  # a probe of a broken installation can raise anything
        return Part(name, "broken", _first_line(error), use, f"reinstall {name}")


def _cuverify() -> Part:
    return Part("cuverify", "found", cuverify.__version__, str(Path(cuverify.__file__).parent))


def _python() -> Part:
    return Part(
        "python", "found", platform.python_version(), f"{platform.system()} {platform.machine()}"
    )


def _package(name: str, use: str, fix: str) -> Part:
    """Return a package's part: imported, because an installed one can still be broken."""
    if importlib.util.find_spec(name) is None:
        return Part(name, "missing", "not installed", use, fix)
    module = importlib.import_module(name)
    return Part(name, "found", str(getattr(module, "__version__", "unknown version")), use)


def _torch() -> Part:
    use = "tensors, streams, graphs"
    part = _package("torch", use, "pip install torch")
    if part.state != "found":
        return part
    import torch

    build = f"CUDA {torch.version.cuda}" if torch.version.cuda else "CPU build"
    return Part("torch", "found", f"{part.value} ({build})", use)


def _cupy() -> Part:
    use = "NVRTC and the GPU lane"
    fix = "pip install 'cuverify[cuda12]' (or cuda13)"
    if importlib.util.find_spec("cupy") is None:
        return Part("CuPy", "missing", "not installed", use, fix)
    try:
        cupy = importlib.import_module("cupy")
    except Exception as error:
        return Part("CuPy", "broken", _first_line(error), use, fix)
    return Part("CuPy", "found", str(cupy.__version__), use)


def _nvrtc() -> Part:
    use = "compiling for GPUs"
    fix = "pip install 'cuverify[cuda12]' (or cuda13)"
    if importlib.util.find_spec("cupy") is None:
        return Part("NVRTC", "missing", "reached through CuPy, which is not installed", use, fix)
    try:
        # an attribute of cupy.cuda, not a module of its own
        nvrtc = importlib.import_module("cupy.cuda").nvrtc
        version = tuple(int(number) for number in nvrtc.getVersion())
    except Exception as error:
        return Part("NVRTC", "broken", _first_line(error), use, fix)
    text = ".".join(map(str, version))
    if version < NVRTC_AT_LEAST:
        least = ".".join(map(str, NVRTC_AT_LEAST))
        return Part(
            "NVRTC",
            "broken",
            f"{text} does not know sm_100 and sm_120",
            use,
            f"pip install 'nvidia-cuda-nvrtc-cu12>={least}'",
        )
    return Part("NVRTC", "found", text, use)


def _headers() -> Part:
    from cuverify.errors import ToolchainError

    use = "bf16 and fp16 in kernels"
    fix = "pip install 'cuverify[cuda12]' (or cuda13), or set CUDA_PATH to a toolkit"
    from cuverify.compile import cuda_include_dirs

    try:
        folders = cuda_include_dirs()
    except ToolchainError as error:
        return Part("CUDA headers", "missing", _first_line(error), use, fix)
    for folder in folders:
        if (folder / "cuda_bf16.h").is_file():
            return Part("CUDA headers", "found", _header_version(folder), use)
    return Part("CUDA headers", "missing", "no folder holds cuda_bf16.h", use, fix)


def _header_version(folder: Path) -> str:
    """Return the toolkit version that the headers themselves carry, and their place."""
    for name, macro in (("cuda.h", "CUDA_VERSION"), ("cuda_runtime_api.h", "CUDART_VERSION")):
        header = folder / name
        if header.is_file():
            text = header.read_text(encoding="utf-8", errors="replace")
            found = re.search(rf"#define\s+{macro}\s+(\d+)", text)
            if found:
                number = int(found[1])
                return f"{number // 1000}.{number % 1000 // 10} in {folder}"
    return str(folder)


def _which(name: str) -> list[str] | None:
    path = shutil.which(name)
    return None if path is None else [path]


def _chosen() -> Part:
    """Return the compiler that the user chose: the host lane takes it before any other."""
    words = shlex.split(os.environ["CXX"])
    path = shutil.which(words[0]) if words else None
    command = None if path is None else [path, *words[1:]]
    return _compiler("CXX", command, "unset CXX or set it to a C++ compiler")


def _zig() -> Part:
    fix = "pip install 'cuverify[zig]'"
    if importlib.util.find_spec("ziglang") is None:
        return Part("zig c++", "missing", "not installed", "host lane", fix)
    return _compiler("zig c++", [sys.executable, "-m", "ziglang"], fix, flag="version")


def _compiler(name: str, command: list[str] | None, fix: str, flag: str = "--version") -> Part:
    """Return a compiler's part. Found means that it ran: a dangling link is broken, not found."""
    use = "host lane"
    if command is None:
        return Part(name, "missing", "not on PATH", use, fix)
    done = _run([*command, flag])
    if isinstance(done, str):
        return Part(name, "broken", done, use, fix)
    first = done.stdout.strip().splitlines()[:1]
    if done.returncode != 0 or not first:
        said = (done.stderr.strip() or f"exit status {done.returncode}").splitlines()[0]
        return Part(name, "broken", f"{command[0]}: {said}", use, fix)
    place = "from the ziglang package" if "ziglang" in command else command[0]
    return Part(name, "found", f"{first[0]} ({place})", use)


def _run(command: list[str]) -> subprocess.CompletedProcess[str] | str:
    """Run a tool and return what it did, or one line about why it did not run."""
    try:
        return subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_TIMEOUT,
            check=False,
        )
    except OSError as error:
        return f"{command[0]}: {error.strerror or error}"
    except subprocess.TimeoutExpired:
        return f"{command[0]}: no answer in {_TIMEOUT} s"


def _cache() -> Part:
    from cuverify.errors import CacheError

    use = "what was compiled"
    fix = f"set {CACHE_VARIABLE} to a folder that you may write"
    try:
        return Part("cache directory", "found", str(cache_directory()), use)
    except CacheError as error:
        return Part("cache directory", "broken", str(error).partition(";")[0], use, fix)


def _gpu() -> Part:
    use = "GPU lane, capture"
    device = _driver_version()
    if importlib.util.find_spec("torch") is None:
        return Part("GPU", "missing", "reached through torch, which is not installed", use)
    import torch

    if torch.cuda.is_available():
        names = []
        for index in range(torch.cuda.device_count()):
            properties = torch.cuda.get_device_properties(index)
            memory = properties.total_memory / 2**30
            capability = f"sm_{properties.major}{properties.minor}"
            names.append(f"{properties.name} ({capability}, {memory:.0f} GiB)")
        return Part("GPU", "found", "; ".join(names), use)
    if device is None:
        return Part("GPU", "missing", "no CUDA device", use)
    if torch.version.cuda is None:
        return Part(
            "GPU",
            "broken",
            f"driver {device} is loaded, but this torch is a CPU build",
            use,
            "install a CUDA build of torch",
        )
    return Part(
        "GPU",
        "broken",
        f"driver {device} is loaded, but torch for CUDA {torch.version.cuda} sees no device",
        use,
        "check CUDA_VISIBLE_DEVICES, and that the driver is new enough for this torch",
    )


def _driver() -> Part:
    use = "GPU lane, capture"
    version = _driver_version()
    if version is None:
        return Part("driver", "missing", "no NVIDIA driver is loaded", use)
    return Part("driver", "found", version, use)


def _driver_version() -> str | None:
    """Return the loaded NVIDIA driver's version; a container may hide one of the two sources."""
    try:
        found = re.search(
            r"Kernel Module.*?\s(\d+\.[\d.]+)", DRIVER_FILE.read_text(errors="replace")
        )
        if found:
            return found[1]
    except OSError:
        pass
    tool = shutil.which("nvidia-smi")
    if tool is None:
        return None
    done = _run([tool, "--query-gpu=driver_version", "--format=csv,noheader"])
    if isinstance(done, str) or done.returncode != 0 or not done.stdout.strip():
        return None
    return done.stdout.split()[0]


def _shown(part: Part) -> str:
    if part.state == "missing" and part.fix:
        return f"{part.value}; {part.fix}"
    return part.value


def _first_line(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__
