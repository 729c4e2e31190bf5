"""FlashInfer's MLA kernel for Hopper ("fa3"), composed for a tree.

It has no tree mask, so the drafts are attended apart, each token as a request, and merged. The plan
is made before on the host, the drafts run on a forked branch beside the prefix, and one kernel
merges: more than anything that ships. FlashInfer's kernels are headers; the few lines of C++ beside
this module are built against those in the wheel, once a process.
"""

from __future__ import annotations

import ctypes
import functools
import importlib.util
import shutil
import subprocess
import tempfile
import zipfile
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cuverify.errors import PeerError
from cuverify.peers import Peer, Prepared
from cuverify.peers.cascade import forked, seen_counts
from cuverify.peers.laid_out import HOW, require_hopper

if TYPE_CHECKING:
    from cuverify.verify_problem import Problem

NAMES = ("FlashInfer fa3, strongest composition",)
WHEELS = "flashinfer_python-*.whl"

_FLAGS = (
    "-std=c++17", "-O3", "-shared", "-Xcompiler", "-fPIC", "--expt-relaxed-constexpr",
    "-use_fast_math", "-DFLASHINFER_ENABLE_BF16", "-gencode=arch=compute_90a,code=sm_90a",
)  # fmt: skip
_FLOAT_BYTES, _NUMBER_BYTES = 512 << 20, 64 << 20
_PLAN_WORDS = 18
_BUILD_SECONDS = 180


def load(folder: Path | None) -> list[Peer]:
    """Return the composition, built here."""
    library = _library(folder)
    return [Peer(NAMES[0], lambda problem: _strongest(problem, library), ragged=True)]


def headers(folder: Path | None, unpack_into: Path) -> list[Path]:
    """Return the include folders: of the installed package, else of the wheel in the folder.

    Raises
    ------
    PeerError
        There is neither.
    """
    found = importlib.util.find_spec("flashinfer")
    if found is not None and found.submodule_search_locations:
        data = Path(found.submodule_search_locations[0]) / "data"
    else:
        wheels = [] if folder is None else sorted(folder.glob(WHEELS))
        if not wheels:
            raise PeerError(f"neither installed nor a wheel in the folder; {HOW}")
        with zipfile.ZipFile(wheels[-1]) as wheel:
            wanted = [name for name in wheel.namelist() if name.startswith("flashinfer/data/")]
            wheel.extractall(unpack_into, wanted)
        data = unpack_into / "flashinfer" / "data"
    return [data / "include", data / "csrc", data / "cutlass" / "include"]


@functools.cache
def _library(folder: Path | None) -> Any:
    require_hopper()
    compiler = shutil.which("nvcc")
    if compiler is None:
        raise PeerError("nvcc, which builds it, is not here")
    place = Path(tempfile.mkdtemp(prefix="cuverify-peer-"))
    includes = [f"-I{path}" for path in headers(folder, place)]
    source, target = Path(__file__).with_suffix(".cu"), place / "flashinfer_mla.so"
    command = [compiler, *_FLAGS, *includes, str(source), "-o", str(target)]
    try:
        subprocess.run(command, check=True, capture_output=True, text=True, timeout=_BUILD_SECONDS)
        return ctypes.CDLL(str(target))
    except subprocess.CalledProcessError as error:
        last = error.stderr.strip().splitlines()[-1:] or ["no message"]
        raise PeerError(f"it does not build: {last[0]}") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PeerError(f"it does not build or load: {error}") from error


class _Plan:
    """FlashInfer's plan for some requests, and the buffers that it lives in."""

    def __init__(
        self,
        library: Any,
        heads: int,
        query_bounds: NDArray[np.int32],
        lengths: NDArray[np.int32],
        device: Any,
    ) -> None:
        import torch

        self.library, self.heads = library, heads
        self.floats = torch.empty(_FLOAT_BYTES, dtype=torch.uint8, device=device)
        self.numbers = torch.empty(_NUMBER_BYTES, dtype=torch.uint8, device=device)
        staging = torch.empty(_NUMBER_BYTES, dtype=torch.uint8, pin_memory=True)
        self.words = (ctypes.c_int64 * _PLAN_WORDS)()
        key_bounds = np.cumsum([0, *lengths]).astype(np.int32)
        status = library.mla_plan(
            _address(self.floats), ctypes.c_size_t(_FLOAT_BYTES), _address(self.numbers),
            _address(staging), ctypes.c_size_t(_NUMBER_BYTES), _host(query_bounds),
            _host(key_bounds), _host(lengths), len(lengths), heads, _stream(), self.words,
        )  # fmt: skip
        torch.cuda.synchronize()
        if status:
            raise RuntimeError(f"FlashInfer's plan ended with CUDA error {status}")

    def attend(self, problem: Problem, slots: Any, out: Any, lse: Any) -> tuple[Any, Any]:
        """Launch on the current stream; returns `out` and `lse`."""
        status = self.library.mla_run(
            _address(self.floats), _address(self.numbers), self.words, _address(problem.q),
            _address(problem.pool), _address(slots), _address(out), _address(lse), self.heads,
            ctypes.c_float(problem.sm_scale), _stream(),
        )  # fmt: skip
        if status:
            raise RuntimeError(f"FlashInfer's kernel ended with CUDA error {status}")
        return out, lse


def _strongest(problem: Problem, library: Any) -> Prepared:
    import torch

    from cuverify.peers.merging import merge

    shape, device = problem.shape, problem.pool.device
    counts = seen_counts(problem.sees)
    query_bounds = np.arange(shape.batch + 1, dtype=np.int32) * np.int32(shape.tree)
    lengths = np.array(shape.prefixes, np.int32)
    prefix_plan = _Plan(library, shape.heads, query_bounds, lengths, device)
    single = np.arange(shape.tokens + 1, dtype=np.int32)
    tail_plan = _Plan(library, shape.heads, single, counts, device)
    tails = tail_lists(problem)
    out = problem.new_output()
    branch = torch.cuda.Stream()  # type: ignore[no-untyped-call]
    parts = [
        (problem.new_output(), torch.empty((shape.tokens, shape.heads), device=device))
        for _ in range(2)
    ]

    def step(copy: int) -> None:
        first, second = forked(
            lambda: prefix_plan.attend(problem, problem.prefix_slots[copy], *parts[0]),
            lambda: tail_plan.attend(problem, tails[copy], *parts[1]),
            branch,
        )
        merge(out, first, second, heads_first=False, base_2=True)

    return Prepared([functools.partial(step, copy) for copy in range(problem.copies)], out)


def tail_lists(problem: Problem) -> list[Any]:
    """Return for each copy the slots that the tokens see, one token behind the other: int32."""
    import torch

    tree = problem.shape.tree
    places = np.concatenate(
        [
            np.flatnonzero(row) + request * tree
            for request, mask in enumerate(problem.sees)
            for row in mask
        ]
    )
    chosen = torch.from_numpy(places).to(problem.pool.device)
    return [slots[chosen].int().contiguous() for slots in problem.draft_slots]


def _address(tensor: Any) -> ctypes.c_void_p:
    return ctypes.c_void_p(tensor.data_ptr())


def _host(array: NDArray[np.int32]) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


def _stream() -> ctypes.c_void_p:
    import torch

    return ctypes.c_void_p(torch.cuda.current_stream().cuda_stream)
