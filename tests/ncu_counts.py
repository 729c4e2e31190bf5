"""The host lane's counts of memory requests beside those of a GPU's counters, by ncu.

`python tests/ncu_counts.py [attention] [relocation] [patterns]` prints them side by side; without
names, all three. It wants a GPU whose counters may be read. Exit status: 0 for agreement, 1 for
none, 2 where nothing could be measured.
"""

from __future__ import annotations

import csv
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from memory_launches import FILE, PATTERNS, STEPS, launches, pattern

import cuverify
from cuverify.contract import kernels_in
from cuverify.host.counts import Memory, MemoryCounts, Operation

DRIVER = Path(__file__).with_name("memory_launches.py")
PATTERN_KERNELS = kernels_in(FILE.read_text())
# The kernels of each step that are compared.
STEP_KERNELS = {
    "attention": ("verify_partials", "verify_combine"),
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


Row = Mapping[str, float]  # of a launch, by metric


class NotMeasuredError(Exception):
    """There is no ncu here, or it may not read the counters."""


def measure(name: str) -> list[tuple[str, Row]]:
    """Return kernel and metrics of each launch that a name of memory_launches.py stands for."""
    program = shutil.which("ncu") or "/usr/local/cuda/bin/ncu"
    if not Path(program).exists():
        raise NotMeasuredError("ncu is not installed")
    kernels = STEP_KERNELS.get(name, PATTERN_KERNELS)
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "ncu.csv"
        command = [
            *(program, "--clock-control", "none", "--csv", "--page", "raw", "--log-file", str(log)),
            *("--kernel-name", f"regex:^({'|'.join(kernels)})$"),
            *("--metrics", ",".join(f"{metric}.sum" for metric in METRICS)),
            *(sys.executable, str(DRIVER), name),
        ]
        ended = subprocess.run(command, capture_output=True, text=True, timeout=120)
        text = log.read_text() if log.exists() else ""
    if "ERR_NVGPUCTRPERM" in text:
        raise NotMeasuredError("the counters may not be read here (ERR_NVGPUCTRPERM)")
    if ended.returncode:
        raise RuntimeError(f"ncu: {text}{ended.stdout}{ended.stderr}")
    return parse(text)


def parse(text: str) -> list[tuple[str, Row]]:
    """Return kernel and metrics of each launch in ncu's raw page as CSV."""
    lines = text.splitlines()
    head = next(number for number, line in enumerate(lines) if line.startswith('"ID"'))
    _, *rows = csv.DictReader(lines[head:])  # the first holds units
    return [
        (row["Kernel Name"], {m: float(row[f"{m}.sum"].replace(",", "")) for m in METRICS})
        for row in rows
    ]


def beside(
    title: str, kernel: str, counts: MemoryCounts, row: Row
) -> Iterator[tuple[Quantity, int, int]]:
    """Print and yield what either lane says, where one of them says something."""
    print(f"\n{title}\n{'':32}{'host lane':>12}{'GPU':>12}{'ratio':>8}")
    for quantity in QUANTITIES:
        host, gpu = quantity.on_host(counts, kernel), quantity.on_gpu(row)
        if host or gpu:
            ratio = f"{host / gpu:8.3f}" if gpu else f"{'-':>8}"
            print(f"{quantity.name:32}{host:12}{gpu:12}{ratio}")
            yield quantity, host, gpu


def compare_patterns(measured: Sequence[tuple[str, Row]]) -> list[str]:
    """Print both lanes' numbers of the patterns, which are equal; return where they are not."""
    wrong = []
    for launched, (kernel, row) in zip(PATTERNS, measured, strict=True):
        with cuverify.counted() as counts:
            pattern(*launched, "numpy")()
        for quantity, host, gpu in beside(str(launched), kernel, counts, row):
            if host != gpu:
                wrong.append(f"{launched}: {quantity.name}: {host} and {gpu}")
    return wrong


# Host lane over GPU, where that may differ from 1: least and most, and why.
LEEWAY = {
    # nvcc keeps fields of the work item in registers and loads neighbours at once
    ("verify_partials", "shared load requests"): (1.0, 1.4),
    ("verify_partials", "shared load wavefronts"): (1.0, 1.2),
    ("verify_partials", "shared store requests"): (1.0, 1.01),
    ("verify_partials", "shared store wavefronts"): (1.0, 1.01),
}


def compare_step(name: str, measured: Sequence[tuple[str, Row]]) -> list[str]:
    """Print both lanes' numbers of a step's kernels; return where they differ more than they may.

    Conflicts are only printed: the hardware's counter of them also counts passes that lost their
    turn to other traffic. Wavefronts, which hold them, are compared.
    """
    with cuverify.counted() as counts:
        for launch in launches(name, "numpy"):
            launch()
    wrong = []
    for kernel in STEP_KERNELS[name]:
        rows = [row for of, row in measured if of == kernel]
        total = {metric: sum(row[metric] for row in rows) for metric in METRICS}
        for quantity, host, gpu in beside(kernel, kernel, counts, total):
            least, most = LEEWAY.get((kernel, quantity.name), (1.0, 1.0))
            if quantity.field != "conflicts" and not least * gpu <= host <= most * gpu:
                wrong.append(f"{kernel}: {quantity.name}: {host} and {gpu}")
    return wrong


def compare(name: str, measured: Sequence[tuple[str, Row]]) -> list[str]:
    """Print both lanes' numbers; return where they differ more than they may."""
    return compare_step(name, measured) if name in STEPS else compare_patterns(measured)


def main(names: Sequence[str]) -> int:
    """Measure and compare; return the exit status."""
    try:
        wrong = [line for name in names for line in compare(name, measure(name))]
    except NotMeasuredError as error:
        print(f"nothing was measured: {error}", file=sys.stderr)
        return 2
    print("", *wrong, f"{len(wrong)} disagreements", sep="\n")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:] or [*STEPS, "patterns"]))
