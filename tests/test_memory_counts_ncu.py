"""The host lane's counts of memory requests beside those of a GPU's counters, by ncu.

`pytest -m gpu -s tests/test_memory_counts_ncu.py` prints them side by side.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import pytest

import cuverify
from cuverify.host.counts import Memory, MemoryCounts, Operation

sys.path.insert(0, str(Path(__file__).parent))
from memory_launches import FILE, PATTERNS, STEPS, launches, pattern

from cuverify.contract import kernels_in

DRIVER = Path(__file__).with_name("memory_launches.py")
PATTERN_KERNELS = kernels_in(FILE.read_text())
# The kernels of each step that are compared.
STEP_KERNELS = {
    "attention": ("verify_plan", "verify_kv_list", "verify_partials", "verify_combine"),
    "relocation": ("relocate_list", "relocate_check"),
}

_L1 = "l1tex__"
_SASS = "smsp__sass_l1tex_"
_RUN = "smsp__sass_inst_executed_op_"


@dataclass(frozen=True)
class Quantity:
    """One number in both lanes: a field of the host lane's Traffic; metrics, added or taken away."""

    memory: Memory
    operation: Operation
    field: str
    added: tuple[str, ...]
    taken: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return f"{self.memory} {self.operation} {self.field}"

    def on_host(self, counts: MemoryCounts, kernel: str) -> int:
        traffic = counts.total(self.memory, self.operation, kernel=kernel)
        return int(getattr(traffic, self.field))

    def on_gpu(self, row: Mapping[str, float]) -> int:
        return round(sum(row[m] for m in self.added) - sum(row[m] for m in self.taken))


# The `smsp__sass` metrics are ncu's own count of the addresses in the patched program, the `l1tex`
# ones are the hardware's. Those of global loads include the copies.
QUANTITIES = (
    Quantity("global", "load", "requests", (f"{_RUN}global_ld",)),
    Quantity("global", "load", "sectors", (f"{_SASS}t_sectors_pipe_lsu_mem_global_op_ld",)),
    Quantity("global", "store", "requests", (f"{_L1}t_requests_pipe_lsu_mem_global_op_st",)),
    Quantity("global", "store", "sectors", (f"{_L1}t_sectors_pipe_lsu_mem_global_op_st",)),
    Quantity(
        "global",
        "atomic",
        "requests",
        (
            f"{_L1}t_requests_pipe_lsu_mem_global_op_atom",
            f"{_L1}t_requests_pipe_lsu_mem_global_op_red",
        ),
    ),
    Quantity(
        "global",
        "atomic",
        "sectors",
        (
            f"{_L1}t_sectors_pipe_lsu_mem_global_op_atom",
            f"{_L1}t_sectors_pipe_lsu_mem_global_op_red",
        ),
    ),
    Quantity(
        "global",
        "async copy",
        "requests",
        (f"{_SASS}t_requests_pipe_lsu_mem_global_op_ldgsts",),
    ),
    Quantity(
        "global",
        "async copy",
        "sectors",
        (f"{_L1}t_sectors_pipe_lsu_mem_global_op_ld",),
        (f"{_SASS}t_sectors_pipe_lsu_mem_global_op_ld",),
    ),
    Quantity("shared", "async copy", "requests", (f"{_RUN}ldgsts",)),
    Quantity(
        "shared",
        "async copy",
        "conflicts",
        (f"{_L1}data_bank_conflicts_pipe_lsu_mem_shared_op_ldgsts",),
    ),
    Quantity("shared", "matrix load", "requests", (f"{_RUN}ldsm",)),
    Quantity(
        "shared",
        "matrix load",
        "wavefronts",
        (f"{_SASS}data_pipe_lsu_wavefronts_mem_shared_op_ldsm",),
    ),
    Quantity(
        "shared",
        "matrix load",
        "conflicts",
        (f"{_SASS}data_bank_conflicts_pipe_lsu_mem_shared_op_ldsm",),
    ),
    Quantity("shared", "load", "requests", (f"{_RUN}shared_ld",)),
    Quantity(
        "shared", "load", "wavefronts", (f"{_SASS}data_pipe_lsu_wavefronts_mem_shared_op_ld",)
    ),
    Quantity(
        "shared",
        "load",
        "conflicts",
        (f"{_L1}data_bank_conflicts_pipe_lsu_mem_shared_op_ld",),
        (f"{_SASS}data_bank_conflicts_pipe_lsu_mem_shared_op_ldsm",),
    ),
    Quantity("shared", "store", "requests", (f"{_RUN}shared_st",)),
    Quantity(
        "shared", "store", "wavefronts", (f"{_SASS}data_pipe_lsu_wavefronts_mem_shared_op_st",)
    ),
    Quantity(
        "shared", "store", "conflicts", (f"{_L1}data_bank_conflicts_pipe_lsu_mem_shared_op_st",)
    ),
    Quantity("shared", "atomic", "requests", (f"{_RUN}shared_atom",)),
    Quantity(
        "shared",
        "atomic",
        "conflicts",
        (f"{_L1}data_bank_conflicts_pipe_lsu_mem_shared_op_atom",),
    ),
)
METRICS = sorted({m for quantity in QUANTITIES for m in (*quantity.added, *quantity.taken)})


def ncu(name: str, kernels: tuple[str, ...], folder: Path) -> list[tuple[str, dict[str, float]]]:
    """Return kernel and metrics of each launch that a name of the driver stands for."""
    program = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    if not Path(program).exists():
        pytest.skip("ncu is not installed")
    log = folder / "ncu.csv"
    command = [
        *(program, "--clock-control", "none", "--csv", "--page", "raw", "--log-file", str(log)),
        *("--kernel-name", f"regex:^({'|'.join(kernels)})$"),
        *("--metrics", ",".join(f"{metric}.sum" for metric in METRICS)),
        *(sys.executable, str(DRIVER), name),
    ]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
    lines = log.read_text().splitlines() if log.exists() else []
    if any("ERR_NVGPUCTRPERM" in line for line in lines):
        pytest.skip("this machine does not let its counters be read (ERR_NVGPUCTRPERM)")
    assert ended.returncode == 0, "\n".join([*lines, ended.stdout, ended.stderr])
    head = next(number for number, line in enumerate(lines) if line.startswith('"ID"'))
    _, *rows = csv.DictReader(lines[head:])  # the first holds units
    return [
        (row["Kernel Name"], {m: float(row[f"{m}.sum"].replace(",", "")) for m in METRICS})
        for row in rows
    ]


def beside(
    title: str, kernel: str, counts: MemoryCounts, row: Mapping[str, float]
) -> Iterator[tuple[Quantity, int, int]]:
    """Print and yield what either lane says, where one of them says something."""
    print(f"\n{title}\n{'':36}{'host lane':>12}{'GPU':>12}{'ratio':>8}")
    for quantity in QUANTITIES:
        host, gpu = quantity.on_host(counts, kernel), quantity.on_gpu(row)
        if host or gpu:
            ratio = f"{host / gpu:8.3f}" if gpu else f"{'-':>8}"
            print(f"{quantity.name:36}{host:12}{gpu:12}{ratio}")
            yield quantity, host, gpu


@pytest.mark.gpu
def test_a_gpu_counts_each_pattern_alike(tmp_path: Path) -> None:
    measured = ncu("patterns", PATTERN_KERNELS, tmp_path)
    assert [kernel for kernel, _ in measured] == [kernel for kernel, *_ in PATTERNS]
    wrong = []
    for launched, (kernel, row) in zip(PATTERNS, measured, strict=True):
        with cuverify.counted() as counts:
            pattern(*launched, "numpy")()
        for quantity, host, gpu in beside(str(launched), kernel, counts, row):
            if host != gpu:
                wrong.append((launched, quantity.name, host, gpu))
    assert not wrong


# Host lane over GPU, where that may differ from 1: least and most, and why.
LEEWAY = {
    # nvcc keeps fields of the work item in registers and loads neighbours at once
    ("verify_partials", "shared load requests"): (1.0, 1.4),
    ("verify_partials", "shared load wavefronts"): (1.0, 1.2),
    ("verify_partials", "shared store requests"): (1.0, 1.01),
    ("verify_partials", "shared store wavefronts"): (1.0, 1.01),
}
# Of the wavefronts: the hardware's counter of conflicts also counts passes that lost their turn.
LOST_TURNS = 0.1


@pytest.mark.gpu
@pytest.mark.parametrize("name", STEPS)
def test_a_gpu_counts_real_kernels_alike(name: str, tmp_path: Path) -> None:
    sums: dict[str, dict[str, float]] = {}
    for kernel, row in ncu(name, STEP_KERNELS[name], tmp_path):
        total = sums.setdefault(kernel, dict.fromkeys(METRICS, 0.0))
        for metric, value in row.items():
            total[metric] += value
    assert sums.keys() == set(STEP_KERNELS[name])
    with cuverify.counted() as counts:
        for launch in launches(name, "numpy"):
            launch()
    wrong = []
    for kernel, row in sums.items():
        for quantity, host, gpu in beside(kernel, kernel, counts, row):
            if quantity.field == "conflicts":
                passes = counts.total(quantity.memory, quantity.operation, kernel=kernel).wavefronts
                fits = 0 <= gpu - host <= LOST_TURNS * passes
            else:
                least, most = LEEWAY.get((kernel, quantity.name), (1.0, 1.0))
                fits = least * gpu <= host <= most * gpu
            if not fits:
                wrong.append((kernel, quantity.name, host, gpu))
    assert not wrong
