"""The checkers against faults planted on purpose: each is caught, each clean twin passes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

import cuverify
from cuverify.contract import kernels_in
from cuverify.errors import CheckerError
from cuverify.host.options import SCHEDULES
from cuverify.host.reports import KINDS, HostReport
from cuverify.host.toolchain import find_compilers

FILE = Path(__file__).parent / "kernels" / "seeded_bugs.cu"
LINES = FILE.read_text().splitlines()
KERNELS = kernels_in(FILE.read_text())
COMPILERS = [compiler.name for compiler in find_compilers()]
GRIDS = {
    "race_across_blocks": 4,
    "race_behind_a_vote": 4,
    "race_by_an_older_release": 2,
    "race_behind_a_messenger": 3,
    "race_behind_a_careless_messenger": 3,
    "same_word_from_all_blocks": 4,
}
BLOCKS = {"race_in_warp": 32, "shuffle_as_fence": 32}


def marked_line(kernel: str) -> tuple[str, int]:
    """Return the kind and the line that the text marks for a kernel."""
    begin = next(i for i, line in enumerate(LINES) if f"void {kernel}(" in line)
    for number, line in enumerate(LINES[begin:], begin + 1):
        for kind in KINDS:
            if f"// [{kind}]" in line:
                return kind, number
    raise AssertionError(f"{kernel} marks no line")


def run(
    kernel: str, bug: int, schedule: str, compiler: str, seed: int = 1
) -> tuple[HostReport, ...]:
    loaded = cuverify.load_kernel(FILE, kernel=kernel, BUG=bug)
    tensors = []
    for parameter in loaded.contract.parameters:
        assert parameter.shape is not None and parameter.shape[0] is not None
        extent = int(parameter.shape[0].text)
        dtype = {"fp32": np.float32, "uint32": np.uint32}[parameter.dtype.name]
        room = np.zeros(extent + 4, dtype)
        start = -(room.ctypes.data // 4) % 4
        tensors.append(room[start : start + extent])
    try:
        with cuverify.checked(schedule=schedule, seed=seed, compiler=compiler):
            loaded(GRIDS.get(kernel, 1), BLOCKS.get(kernel, 64), *tensors)
    except CheckerError as error:
        return error.reports
    return ()


def test_two_compilers_are_here() -> None:
    assert "g++" in COMPILERS
    assert {"clang++", "zig"} & set(COMPILERS), "the host lane is proven with g++ and a clang"


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_caught_with_kind_and_line(kernel: str, compiler: str) -> None:
    kind, line = marked_line(kernel)
    for schedule in SCHEDULES:
        reports = [r for r in run(kernel, 1, schedule, compiler) if r.kind == kind]
        assert reports, f"{kernel} is not caught as {kind} under {schedule}"
        places = {(a.file, a.line) for r in reports for a in (r.actor, r.other) if a is not None}
        assert (FILE.as_posix(), line) in places


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_clean_twin_passes(kernel: str, compiler: str) -> None:
    for schedule in SCHEDULES:
        assert run(kernel, 0, schedule, compiler) == ()


def test_a_report_names_block_thread_argument_and_byte() -> None:
    (report,) = run("out_of_bounds_global", 1, "ascending", COMPILERS[0])
    assert report.actor.block == (0, 0, 0)
    assert report.actor.thread == (63, 0, 0)
    assert (report.argument, report.byte, report.bytes, report.width) == ("out", 256, 256, 4)
    assert "argument `out`, byte 256 of 256" in str(report)


def test_a_race_names_both_sides() -> None:
    report = next(
        r for r in run("shuffle_as_fence", 1, "ascending", COMPILERS[0]) if r.kind == "race"
    )
    assert report.is_shared and report.argument == "tile"
    assert report.other is not None and report.other.thread != report.actor.thread
    assert report.other.line != report.line
