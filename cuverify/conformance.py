"""Conformance: what a GPU does with each instruction wrapper, replayed by the host lane's twins.

The host twins of the PTX wrappers and intrinsics are a second implementation of what the hardware
does. `record` runs ``tests/conformance/probes.cu`` on a GPU and keeps every input and output bit,
in ``tests/conformance/<gpu>.npz``, with a JSON file beside it that says which GPU, which driver,
which versions and which wrapper text they come from. Nothing else writes these files. `replay`
gives the same inputs to the host lane and counts what is equal, without a GPU.

What is exact by definition is judged: moves, bits, integers, conversions, correctly rounded
arithmetic. ``ex2`` is held to the 2 ulp that the PTX ISA promises. The dots of ``mma`` are counted
under each rounding model, and judged under the model of the recorded GPU. Where the device's own
headers take approximate ways (16-bit arithmetic), the equal results are counted and not judged.
"""

from __future__ import annotations

import datetime
import functools
import hashlib
import io
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cuverify.conformance_inputs import BY_NAME, PROBES, Arrays, Probe, draw
from cuverify.errors import EvidenceError
from cuverify.report import Coverage, Finding, Report, Table

if TYPE_CHECKING:
    from cuverify.kernel import Kernel
    from cuverify.sources import KernelSource

SCHEMA = 1
FOLDER = "tests/conformance"
TEXT = "probes.cu"
MMA_MODELS = ("exact", "sm_80", "sm_90")
NOT_RECORDED = (
    "not recorded yet: on a machine with a GPU run `cuverify conformance record` in a checkout"
)

_CHUNK_BLOCKS = 4  # of the probes with one element a thread


@dataclass(frozen=True)
class Recording:
    """What one GPU did.

    Parameters
    ----------
    path : Path
        The JSON file.
    about : mapping
        Its content: GPU, driver, versions, digest, date.
    inputs, outputs : mapping of str to mapping of str to ndarray
        By probe and parameter.
    """

    path: Path
    about: Mapping[str, Any]
    inputs: Mapping[str, Arrays]
    outputs: Mapping[str, Arrays]

    @property
    def gpu(self) -> str:
        """The GPU's name."""
        return str(self.about["gpu"])

    @property
    def mma_model(self) -> str:
        """The rounding model of the GPU's tensor cores, of `MMA_MODELS`."""
        return "sm_80" if str(self.about["capability"]).startswith("8.") else "sm_90"


@dataclass(frozen=True)
class Agreement:
    """How one output of the host lane compares with the recording.

    Parameters
    ----------
    probe, output : str
    model : str or None
        The rounding model of an mma.
    values, equal : int
        How many were compared and how many of them agree under the probe's rule.
    judged : bool
        Whether a difference is wrong, or only counted.
    first : str or None
        The first difference: index, recorded and replayed value.
    """

    probe: str
    output: str
    model: str | None
    values: int
    equal: int
    judged: bool
    first: str | None

    @property
    def ok(self) -> bool:
        """Whether nothing that is judged differs."""
        return not self.judged or self.equal == self.values


# --- running -------------------------------------------------------------------------------------


def _source(root: Path) -> KernelSource:
    """Return the probes' text under a fixed name: the checkout's place is no part of a digest."""
    from cuverify.sources import KernelSource

    path = root / FOLDER / TEXT
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise EvidenceError(f"{path} cannot be read: {error.strerror or error}") from None
    return KernelSource.from_text(text, name=f"{FOLDER}/{TEXT}")


def wrapper_digest(root: Path) -> str:
    """Return the digest of the probes' text and of the wrapper headers that it includes."""
    return _source(root).digest()


def _kernel(root: Path, probe: str) -> Kernel:
    from cuverify.kernel import Kernel

    return Kernel(_source(root), probe)


def _outputs(kernel: Kernel, inputs: Arrays, poison: int) -> Arrays:
    """Return poisoned arrays for what a probe writes."""
    n = len(next(iter(inputs.values())))
    outputs: Arrays = {}
    for parameter in kernel.contract.parameters:
        if parameter.access == "write":
            assert parameter.shape is not None
            shape = [extent({"n": n}) for extent in parameter.shape if extent is not None]
            array = _aligned(shape, parameter.dtype.stored[-1])
            array.view(np.uint8)[...] = poison
            outputs[parameter.name] = array
    return outputs


def _aligned(shape: Sequence[int], dtype: str) -> NDArray[Any]:
    size = int(np.prod(shape)) * np.dtype(dtype).itemsize
    room = np.empty(size + 16, np.uint8)
    start = -room.ctypes.data % 16
    return room[start : start + size].view(dtype).reshape(shape)


def _geometry(probe: Probe, n: int) -> tuple[int, int]:
    return (n if probe.tiles else _CHUNK_BLOCKS), probe.threads


def _arguments(kernel: Kernel, values: Mapping[str, Any]) -> list[Any]:
    return [values[parameter.name] for parameter in kernel.contract.parameters]


def run_on_host(root: Path, probe: str, inputs: Arrays, poison: int = 0xA5) -> Arrays:
    """Run one probe on the host lane, with the options in force; returns its outputs.

    They hold bytes of `poison` before.
    """
    kernel = _kernel(root, probe)
    outputs = _outputs(kernel, inputs, poison)
    n = len(next(iter(inputs.values())))
    given: Arrays = {}
    for name, array in inputs.items():
        given[name] = _aligned(array.shape, array.dtype.name)
        given[name][...] = array
    kernel(*_geometry(BY_NAME[probe], n), *_arguments(kernel, {**outputs, **given, "n": n}))
    return outputs


def run_on_device(root: Path, probe: str, inputs: Arrays, poison: int = 0xA5) -> Arrays:
    """Run one probe on the current CUDA device; returns its outputs.

    They hold bytes of `poison` before.

    Raises
    ------
    DeviceError, ToolchainError
        There is no device, or no CuPy.
    """
    import torch

    def there(array: NDArray[Any]) -> Any:
        kind = np.dtype(f"i{array.itemsize}") if array.dtype.kind == "u" else array.dtype
        return torch.from_numpy(array.view(kind).copy()).cuda()

    kernel = _kernel(root, probe)
    outputs = _outputs(kernel, inputs, poison)
    n = len(next(iter(inputs.values())))
    tensors = {name: there(array) for name, array in outputs.items()}
    given = {name: there(array) for name, array in inputs.items()}
    kernel(*_geometry(BY_NAME[probe], n), *_arguments(kernel, {**tensors, **given, "n": n}))
    return {
        name: tensor.cpu().numpy().view(outputs[name].dtype) for name, tensor in tensors.items()
    }


# --- recording -----------------------------------------------------------------------------------


def record(root: Path | None = None) -> Path:
    """Run every probe on this machine's GPU and write the recording into the source tree.

    Parameters
    ----------
    root : Path, optional
        The source tree; found by `evidence.source_root` when absent.

    Returns
    -------
    Path
        The JSON file; the arrays are beside it.

    Raises
    ------
    DeviceError
        There is no CUDA device: a recording cannot be made any other way.
    EvidenceError
        Two runs differ, or the wrappers changed meanwhile. Nothing is written.
    """
    from cuverify import env
    from cuverify.evidence import gpu as device
    from cuverify.evidence import source_root
    from cuverify.files import write_atomically

    root = source_root() if root is None else root
    gpu = device.gpu_name()
    before = wrapper_digest(root)
    inputs = draw()
    outputs: dict[str, Arrays] = {}
    for name, given in inputs.items():
        outputs[name] = run_on_device(root, name, given)
        # what a probe leaves unwritten differs, too
        again = run_on_device(root, name, given, poison=0x5A)
        for output, array in outputs[name].items():
            if array.tobytes() != again[output].tobytes():
                raise EvidenceError(
                    f"{name}: two runs on {gpu} differ in {output}: nothing was recorded"
                )
    if wrapper_digest(root) != before:
        raise EvidenceError("the wrappers changed during the run: nothing was recorded")
    arrays = {
        f"{probe}/{name}": array
        for probe in inputs
        for name, array in {**inputs[probe], **outputs[probe]}.items()
    }
    buffer = io.BytesIO()
    np.savez_compressed(buffer, **arrays)  # type: ignore[arg-type]
    content = buffer.getvalue()
    now = datetime.datetime.now(datetime.timezone.utc).replace(microsecond=0)
    versions = env.inspect().versions
    about = {
        "schema": SCHEMA,
        "gpu": gpu,
        "capability": _capability(),
        "driver": versions.get("driver", "unknown"),
        "date": now.isoformat(),
        "command": "cuverify conformance record",
        "versions": versions,
        "wrappers": before,
        "arrays_sha256": hashlib.sha256(content).hexdigest(),
        "values": {name: sum(a.size for a in given.values()) for name, given in outputs.items()},
    }
    stem = root / FOLDER / device.slug(gpu)
    write_atomically(stem.with_suffix(".npz"), content)
    path = stem.with_suffix(".json")
    write_atomically(path, json.dumps(about, indent=1, ensure_ascii=False) + "\n")
    return path


def _capability() -> str:
    import torch

    return "{}.{}".format(*torch.cuda.get_device_capability())


# --- reading -------------------------------------------------------------------------------------


def recordings(root: Path) -> list[Recording]:
    """Return all recordings of a source tree, an empty list where there are none.

    Raises
    ------
    EvidenceError
        One of them is malformed or incomplete.
    """
    return [load(path) for path in sorted((root / FOLDER).glob("*.json"))]


def load(path: Path) -> Recording:
    """Read one recording.

    Raises
    ------
    EvidenceError
        The JSON or its arrays are missing, malformed, or do not belong together.
    """
    try:
        about = json.loads(path.read_text(encoding="utf-8"))
        content = path.with_suffix(".npz").read_bytes()
    except OSError as error:
        raise EvidenceError(f"{error.filename} cannot be read: {error.strerror or error}") from None
    except ValueError as error:
        raise EvidenceError(f"{path} is no JSON: {error}") from None
    wanted = {"schema", "gpu", "capability", "driver", "date", "command", "versions", "wrappers",
              "arrays_sha256", "values"}  # fmt: skip
    if not isinstance(about, dict) or set(about) != wanted or about["schema"] != SCHEMA:
        raise EvidenceError(
            f"{path} must hold exactly {', '.join(sorted(wanted))}, schema {SCHEMA}"
        )
    if hashlib.sha256(content).hexdigest() != about["arrays_sha256"]:
        raise EvidenceError(
            f"{path.with_suffix('.npz')} is not the file that was recorded with {path.name}"
        )
    inputs: dict[str, Arrays] = {}
    outputs: dict[str, Arrays] = {}
    with np.load(io.BytesIO(content), allow_pickle=False) as arrays:
        for key in arrays.files:
            probe, _, name = key.partition("/")
            known = probe in BY_NAME and name in _input_names(probe)
            (inputs if known else outputs).setdefault(probe, {})[name] = arrays[key]
    return Recording(path, about, inputs, outputs)


@functools.cache
def _input_names(probe: str) -> frozenset[str]:
    return frozenset(draw()[probe])


# --- replaying -----------------------------------------------------------------------------------


def replay(recording: Recording, root: Path) -> list[Agreement]:
    """Give a recording's inputs to the host lane and compare, with the options in force.

    Parameters
    ----------
    recording : Recording
    root : Path
        The source tree.

    Returns
    -------
    list of Agreement
        One an output, and for mma one a rounding model. A probe that the recording lacks is left
        out: see `missing`.
    """
    from cuverify.host.options import host_options

    found = []
    for name, inputs in recording.inputs.items():
        if name not in BY_NAME:
            continue
        rule = BY_NAME[name].rule
        for model in MMA_MODELS if rule == "mma" else (None,):
            with host_options(**({} if model is None else {"mma": model})):
                ours = run_on_host(root, name, inputs)
            for output, theirs in recording.outputs[name].items():
                judged = rule != "counted" and model in (None, recording.mma_model)
                mine = ours[output]
                if rule == "mma":
                    dots = np.isfinite(theirs)
                    found.append(_agreement(name, "finite dots", model, theirs, mine, dots, judged))
                    found.append(_agreement(name, "others", model, theirs, mine, ~dots, False))
                elif rule == "exp2":
                    found.append(_powers(name, output, inputs["x"], theirs, mine))
                else:
                    both = np.ones(theirs.shape, bool)
                    found.append(
                        _agreement(name, output, model, theirs, mine, both, judged, rule == "float")
                    )
    return found


def missing(recording: Recording) -> list[str]:
    """Return the probes that came after the recording."""
    return [probe.kernel for probe in PROBES if probe.kernel not in recording.outputs]


def _agreement(
    probe: str,
    output: str,
    model: str | None,
    theirs: NDArray[Any],
    mine: NDArray[Any],
    which: NDArray[np.bool_],
    judged: bool,
    any_nan: bool = False,
) -> Agreement:
    unsigned = np.dtype(f"u{theirs.itemsize}")
    same = theirs.view(unsigned) == mine.view(unsigned)
    if any_nan or model is not None:
        same |= np.isnan(theirs) & np.isnan(mine)
    return Agreement(
        probe,
        output,
        model,
        int(which.sum()),
        int((same & which).sum()),
        judged,
        _first(theirs, mine, which & ~same),
    )


def _first(theirs: NDArray[Any], mine: NDArray[Any], wrong: NDArray[np.bool_]) -> str | None:
    at = np.argwhere(wrong)
    if not len(at):
        return None
    index = tuple(int(i) for i in at[0])
    shown = ", ".join(map(str, index))
    if theirs.dtype.kind == "f":
        return f"[{shown}]: {float(theirs[index])!r} recorded, {float(mine[index])!r} here"
    return f"[{shown}]: {int(theirs[index]):#x} recorded, {int(mine[index]):#x} here"


def power_errors(x: NDArray[np.float32], y: NDArray[np.float32]) -> NDArray[np.float64]:
    """Return how many ulp y is away from 2**x, with subnormal results flushed to 0."""
    smallest, largest = 2.0**-126, float(np.finfo(np.float32).max)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        true = np.exp2(x.astype(np.float64))
        ulp = np.exp2(np.floor(np.log2(np.clip(true, smallest, largest))) - 23)
        error = np.abs(y.astype(np.float64) - true) / ulp
    slack = 2.0**-22
    error[(y == 0) & (true < smallest * (1 + slack))] = 0
    error[np.isposinf(y) & (true > largest * (1 - slack))] = 0
    error[np.isnan(x) & np.isnan(y)] = 0
    return np.where(np.isnan(error), np.inf, error)


def _powers(
    probe: str, output: str, x: NDArray[Any], theirs: NDArray[Any], mine: NDArray[Any]
) -> Agreement:
    wrong = (power_errors(x, theirs) > 2) | (power_errors(x, mine) > 2)
    text = f"{output} (2 ulp)"
    return Agreement(
        probe, text, None, len(x), int((~wrong).sum()), True, _first(theirs, mine, wrong)
    )


def report(root: Path | None = None, compilers: Sequence[str] | None = None) -> Report:
    """Replay every recording on the host lane, with every compiler, and say what agrees.

    Parameters
    ----------
    root : Path, optional
        The source tree; found by `evidence.source_root` when absent.
    compilers : sequence of str, optional
        Those to use; all that are found by default.

    Returns
    -------
    Report
        A table of counts; an error for each judged difference; a warning for a recording that was
        made before a change of the wrappers.

    Raises
    ------
    EvidenceError
        There is no source tree, or a recording is malformed.
    ToolchainError
        There is no C++ compiler.
    """
    from cuverify.evidence import source_root
    from cuverify.host.options import host_options
    from cuverify.host.toolchain import find_compiler, find_compilers

    root = source_root() if root is None else root
    result = Report("conformance of the host lane with GPUs")
    names = [c.name for c in find_compilers()] if compilers is None else list(compilers)
    if not names:
        find_compiler()  # says how to get one
    rows: list[list[Any]] = []
    found = recordings(root)
    if not found:
        result.coverage.append(Coverage("conformance", "not inspected", NOT_RECORDED))
    for recording in found:
        result.findings += _staleness(recording, root)
        for compiler in names:
            with host_options(compiler=compiler):
                agreements = replay(recording, root)
            for entry in agreements:
                rows.append(
                    [recording.gpu, compiler, entry.probe, entry.output, entry.model, entry.values,
                     entry.equal, entry.first]
                )  # fmt: skip
                if not entry.ok:
                    result.findings.append(_difference(recording, compiler, entry))
        result.coverage.append(
            Coverage(
                f"conformance with {recording.gpu}",
                "inspected",
                f"{len(recording.outputs)} probes, compilers {', '.join(names)}, recorded "
                f"{recording.about['date']} with driver {recording.about['driver']}",
            )
        )
    heads = ("GPU", "compiler", "probe", "output", "model", "values", "equal", "first difference")
    result.tables.append(Table("replays", heads, rows))
    return result


def _staleness(recording: Recording, root: Path) -> Iterator[Finding]:
    fix = "on a machine with that GPU run `cuverify conformance record`"
    if recording.about["wrappers"] != wrapper_digest(root):
        yield Finding(
            "conformance-stale",
            "warning",
            f"{recording.path.name} was recorded before a change of the wrappers or the probes",
            fix=fix,
        )
    if lacking := missing(recording):
        yield Finding(
            "conformance-stale",
            "warning",
            f"{recording.path.name} has no {', '.join(lacking)}",
            fix=fix,
        )


def _difference(recording: Recording, compiler: str, entry: Agreement) -> Finding:
    model = "" if entry.model is None else f" under the {entry.model} model"
    return Finding(
        "conformance-differs",
        "error",
        f"{entry.probe}: {entry.values - entry.equal} of {entry.values} {entry.output}{model} are "
        f"not what {recording.gpu} gave; first {entry.first}",
        evidence={"compiler": compiler, "covers": list(BY_NAME[entry.probe].covers)},
        fix="Mend the host twin; the recording is the hardware's word.",
    )
