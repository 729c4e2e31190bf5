"""The second opinion: planted faults found by ASan and UBSan, clean twins and real kernels passed."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cuverify.validators.compare import compare_all, host_array

import cuverify
from cuverify import cases
from cuverify.check import run_checks
from cuverify.contract import kernels_in
from cuverify.errors import ArgumentError, CheckerError, ToolchainError
from cuverify.host import standalone
from cuverify.host.reports import KINDS, HostReport
from cuverify.host.toolchain import find_compilers

FILE = Path(__file__).parent / "kernels" / "second_opinion.cu"
LINES = FILE.read_text().splitlines()
NO_TWINS = ("busy", "endless", "through_a_table")
PLANTED = [name for name in kernels_in(FILE.read_text()) if name not in NO_TWINS]
COMPILERS = [
    pytest.param(
        compiler.name,
        marks=[] if (reason := standalone.why_not(compiler.name)) is None
        else pytest.mark.skip(reason=reason),
    )
    for compiler in find_compilers()
]  # fmt: skip
WORKS = [str(entry.values[0]) for entry in COMPILERS if not entry.marks]


def marked_line(kernel: str) -> tuple[str, int]:
    """Return the kind and the line that the text marks for a kernel."""
    begin = next(i for i, line in enumerate(LINES) if f"void {kernel}(" in line)
    for number, line in enumerate(LINES[begin:], begin + 1):
        for kind in KINDS:
            if f"// [{kind}]" in line:
                return kind, number
    raise AssertionError(f"{kernel} marks no line")


def bound(kernel: str, bug: int) -> cuverify.kernel.BoundLaunch:
    loaded = cuverify.load_kernel(FILE, kernel=kernel, BUG=bug)
    tensors: list[Any] = []
    for parameter in loaded.contract.parameters:
        if parameter.optional:
            tensors.append(None)
            continue
        dtype = {"fp32": np.float32, "int32": np.int32}[parameter.dtype.name]
        room = np.zeros(100, dtype)
        start = -(room.ctypes.data // 4) % 4
        if parameter.stride:
            tensors.append(np.zeros((8, 8), dtype)[:, :6])
        else:
            tensors.append(room[start : start + 64])
    return loaded.bind(1, 64, *tensors)


def run(launch: cuverify.kernel.BoundLaunch, compiler: str) -> tuple[HostReport, ...]:
    with cuverify.host_options(compiler=compiler):
        return standalone.run(launch)


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("kernel", PLANTED)
def test_caught_with_kind_and_line(kernel: str, compiler: str) -> None:
    kind, line = marked_line(kernel)
    reports = run(bound(kernel, 1), compiler)
    assert (kind, line) in [(report.kind, report.line) for report in reports], reports
    assert {report.file for report in reports} == {FILE.as_posix()}


@pytest.mark.parametrize("compiler", COMPILERS)
@pytest.mark.parametrize("kernel", PLANTED)
def test_clean_twin_passes(kernel: str, compiler: str) -> None:
    assert run(bound(kernel, 0), compiler) == ()


@pytest.mark.parametrize("compiler", COMPILERS)
def test_a_report_names_thread_and_argument(compiler: str) -> None:
    (report,) = run(bound("heap_overflow", 1), compiler)
    assert (report.actor.block, report.actor.thread) == ((0, 0, 0), (63, 0, 0))
    assert (report.argument, report.byte, report.bytes, report.width) == ("out", 256, 256, 4)
    assert "heap-buffer-overflow" in report.message and "write of 4 bytes" in report.message
    (report,) = run(bound("shared_overflow", 1), compiler)
    assert report.is_shared and report.argument == "mine" and report.byte == 256
    (report,) = run(bound("own_array_overflow", 1), compiler)
    assert report.argument is None and "stack-buffer-overflow" in report.message
    (report,) = run(bound("shift_too_far", 1), compiler)
    assert report.actor.thread == (36, 0, 0) and "hift exponent 32" in report.message


@pytest.mark.parametrize("compiler", COMPILERS)
def test_fibers_that_end_in_their_frames_are_no_fault(compiler: str) -> None:
    kernel = cuverify.load_kernel(FILE, kernel="busy")
    here, there = np.zeros((3, 256), np.int32), np.zeros((3, 256), np.int32)
    for schedule in ("ascending", "random"):
        with cuverify.host_options(compiler=compiler, schedule=schedule):
            kernel(3, 256, here, 5, 3)
            assert standalone.run(kernel.bind(3, 256, there, 5, 3)) == ()
        assert (here == there).all() and here.any()


@pytest.mark.parametrize("compiler", COMPILERS)
def test_pointer_tables_lead_to_the_programs_own_memory(compiler: str) -> None:
    rows = [np.arange(64, dtype=np.float32), np.full(64, 0.5, np.float32)]
    table = np.array([row.ctypes.data for row in rows], np.uint64)
    out = np.zeros(64, np.float32)
    for bug, line in ((0, None), (1, marked_line("through_a_table")[1])):
        kernel = cuverify.load_kernel(FILE, kernel="through_a_table", BUG=bug)
        launch = kernel.bind(1, 64, table, out, reach={"tables": rows})
        reports = run(launch, compiler)
        if line is None:
            assert reports == ()
            assert (out == np.arange(64) + 0.5).all()
            assert (rows[0] == 7).all() and (rows[1] == 0.5).all()
            assert table.tolist() == [row.ctypes.data for row in rows]
        else:
            assert [report.line for report in reports] == [line]
            assert reports[0].argument == "tables[1]"


@pytest.mark.skipif(not WORKS, reason="no compiler's sanitizers work here")
class TestOnce:
    """What does not depend on the compiler."""

    def test_a_launch_that_does_not_end_is_ended(self) -> None:
        launch = cuverify.load_kernel(FILE, kernel="endless").bind(1, 1, np.zeros(1, np.int32))
        with cuverify.host_options(compiler=WORKS[0]):
            (report,) = standalone.run(launch, time_limit_s=1)
        assert (report.kind, report.line) == marked_line("endless")

    def test_the_context_raises_what_it_finds(self) -> None:
        with (
            cuverify.sanitized(compiler=WORKS[0]),
            cuverify.record_launches() as records,
            pytest.raises(CheckerError, match="heap-buffer-overflow") as caught,
        ):
            bound("heap_overflow", 1)()
        assert caught.value.kernel == "heap_overflow"
        assert [record.kernel for record in records] == ["heap_overflow"]

    def test_arguments_keep_their_values_after_a_fault(self) -> None:
        launch = bound("heap_overflow", 1)
        before = launch.launch.arguments["out"].owner.copy()  # type: ignore[union-attr]
        assert run(launch, WORKS[0])
        assert (launch.launch.arguments["out"].owner == before).all()  # type: ignore[union-attr]

    def test_arguments_that_share_memory_keep_sharing_it(self) -> None:
        kernel = cuverify.load_kernel(FILE, kernel="misaligned")
        x = np.arange(64, dtype=np.float32)
        assert run(kernel.bind(1, 64, x, x), WORKS[0]) == ()
        assert (x == np.arange(64)).all()

    def test_a_program_that_dies_is_reported(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(
            standalone, "build_program", lambda source, compiler: Path("/bin/false")
        )
        (report,) = run(bound("heap_overflow", 0), WORKS[0])
        assert report.kind == "crash" and "status 1" in report.message

    @pytest.mark.parametrize("name", cases.names())
    def test_the_packages_kernels_pass(self, name: str) -> None:
        case = cases.load(name)
        _, batch = cases.draw(case.batches, seed=0, examples=1)[0]
        step = case.step(batch, "numpy")
        step.refill(batch)
        expected = step.expected()
        step.poison()
        with cuverify.sanitized(compiler=WORKS[0]):
            step()
        outputs = {key: host_array(tensor) for key, tensor in step.outputs.items()}
        assert compare_all(outputs, expected, getattr(case, "tolerances", None)) == []

    def test_a_check_says_what_had_a_second_opinion(self) -> None:
        case = f"{Path(__file__).with_name('check_cases.py')}:CLEAN"
        with cuverify.host_options(compiler=WORKS[0]):
            report = run_checks([case], architectures=[], device="cpu", second_opinions=1)
        assert report.ok
        (said,) = [entry for entry in report.coverage if entry.subject == "second opinion"]
        assert said.status == "inspected"
        assert said.detail.startswith(f"1 batch under ASan and UBSan of {WORKS[0]} ")

    def test_a_check_without_time_is_a_gap_and_no_finding(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        late = standalone._crash("time-limit", "the launch has not ended in its time")
        monkeypatch.setattr(standalone, "run_launch", lambda *given: late)
        case = f"{Path(__file__).with_name('check_cases.py')}:CLEAN"
        with cuverify.host_options(compiler=WORKS[0]):
            report = run_checks([case], architectures=[], device="cpu")
        assert report.findings == []
        (said,) = [entry for entry in report.coverage if entry.subject == "second opinion"]
        assert said.status == "not inspected"
        assert said.detail.endswith("the launch has not ended in its time")


@pytest.mark.skipif("zig" not in [c.name for c in find_compilers()], reason="no ziglang package")
def test_a_compiler_without_sanitizers_is_not_inspected() -> None:
    assert standalone.why_not("zig") == "zig ships no sanitizer runtime"
    with pytest.raises(ToolchainError, match="zig ships no sanitizer runtime"):
        run(bound("heap_overflow", 1), "zig")
    case = f"{Path(__file__).with_name('check_cases.py')}:CLEAN"
    with cuverify.host_options(compiler="zig"):
        report = run_checks([case], architectures=[], device="cpu")
    assert report.ok
    said = {entry.subject: entry for entry in report.coverage}["second opinion"]
    assert (said.status, said.detail) == (
        "not inspected",
        "clean: zig ships no sanitizer runtime",
    )


def test_misuse_is_named() -> None:
    with pytest.raises(ArgumentError, match="bound=7: wants a launch"):
        standalone.run(7)
    with pytest.raises(ArgumentError, match="sanitized=True: is another build"):
        cuverify.host_options(sanitized=True, checked=True).__enter__()
    with pytest.raises(ArgumentError, match="time_limit_s=0"):
        cuverify.sanitized(time_limit_s=0).__enter__()
