"""The benchmark engine: no time without a passed gate, medians, floors, the host benchmarks."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from cuverify import bench, benches
from cuverify.bench import (
    Record,
    Timing,
    first_wrong,
    gated,
    run_benches,
    run_benchmarks,
    time_calls,
)
from cuverify.errors import ArgumentError, CaseError, DeviceError, ToolchainError
from cuverify.evidence.parts import find_part
from cuverify.report import Report


def right() -> str | None:
    return None


def twelve_us() -> Timing:
    return Timing(12.0, 0.5, 10)


def never() -> Timing:
    raise AssertionError("timed in spite of the gate")


@pytest.fixture
def one_bench(monkeypatch: pytest.MonkeyPatch) -> Callable[[Callable[[str], Any]], None]:
    """Return a function that makes its argument the only benchmark."""

    def install(run: Callable[[str], Any]) -> None:
        module = types.ModuleType("cuverify.benches.made_up")
        module.run = run  # type: ignore[attr-defined]
        monkeypatch.setitem(sys.modules, module.__name__, module)
        monkeypatch.setattr(benches, "made_up", module, raising=False)
        monkeypatch.setattr(bench, "names", lambda: ["made_up"])

    return install


def column(report: Report, name: str) -> list[Any]:
    table = report.tables[0]
    return [row[list(table.columns).index(name)] for row in table.rows]


# --- numbers -------------------------------------------------------------------------------------


def test_a_timing_is_a_median_with_the_interquartile_range() -> None:
    assert Timing.of([1.0, 9.0, 2.0, 3.0, 4.0]) == Timing(3.0, 2.0, 5)
    assert Timing.of([7.0]) == Timing(7.0, 0.0, 1)
    with pytest.raises(ArgumentError, match="nothing was measured"):
        Timing.of([])


def test_calls_are_timed_by_the_host_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [0]

    def call() -> None:
        now[0] += 3_000

    def settle() -> None:
        now[0] += 1_000_000  # outside of every measurement

    monkeypatch.setattr(bench.time, "perf_counter_ns", lambda: now[0])
    assert time_calls(call, calls=4, repeats=5, settle=settle) == Timing(3.0, 0.0, 5)
    with pytest.raises(ArgumentError, match="need at least 1 each"):
        time_calls(call, calls=0)


def test_a_share_needs_a_time_and_a_floor() -> None:
    assert Record("op", {}, us=8.0, floor_us=2.0).share == 0.25
    assert Record("op", {}, us=8.0).share is None
    assert Record("op", {}, error="wrong", floor_us=2.0).share is None


# --- the gate ------------------------------------------------------------------------------------


def test_a_right_result_is_timed() -> None:
    row = gated(
        "op", {"rows": 8}, check=right, timing=twelve_us, floor_us=3.0, bytes=24, peer="other"
    )
    assert Record.from_mapping("op", row) == Record(
        "op", {"rows": 8}, us=12.0, us_spread=0.5, floor_us=3.0, bytes=24, peer="other"
    )


def test_a_wrong_result_is_never_timed() -> None:
    row = gated("op", {}, check=lambda: "y[0] is 1, expected 2", timing=never)
    assert (row["us"], row["us_spread"]) == (None, None)
    assert row["error"] == "y[0] is 1, expected 2"


def test_a_gate_or_a_timing_that_raises_is_an_error() -> None:
    def raises() -> Any:
        raise RuntimeError("launch failed\nand more")

    for row in (
        gated("op", {}, check=raises, timing=never),
        gated("op", {}, check=right, timing=raises),
    ):
        assert (row["us"], row["error"]) == (None, "RuntimeError: launch failed")


def test_a_step_alone_is_timed_after_the_gate_only() -> None:
    row = gated("op", {}, check=right, timing=twelve_us, alone=lambda: Timing(15.0, 1.0, 9))
    assert (row["us"], row["alone_us"], row["alone_spread"]) == (12.0, 15.0, 1.0)
    row = gated("op", {}, check=lambda: "wrong", timing=never, alone=never)
    assert (row["us"], row["alone_us"], row["error"]) == (None, None, "wrong")
    row = gated("op", {}, check=right, timing=twelve_us, error=lambda: 0.25, read_us=2.0)
    assert (row["error"], row["read_us"]) == (0.25, 2.0)


def test_options_reach_those_benchmarks_that_take_them(one_bench: Any) -> None:
    def run(device: str, *, shapes: Any = ()) -> Any:
        return [gated("made_up", {"n": len(shapes)}, check=right, timing=twelve_us)]

    one_bench(run)
    (record,) = run_benches((), "cpu", options={"shapes": ["a", "b"]})
    assert record.shape == {"n": 2}
    with pytest.raises(CaseError, match="benchmark 'made_up' takes no seconds"):
        run_benches((), "cpu", options={"seconds": 5})


def test_a_picture_is_refused_before_anything_runs(
    one_bench: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Any
) -> None:
    one_bench(lambda device: pytest.fail("ran"))
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ToolchainError, match="matplotlib"):
        run_benchmarks((), "cpu", picture=tmp_path / "x.svg")


def test_a_measured_error_goes_with_the_time() -> None:
    row = gated("op", {}, check=right, timing=twelve_us, error=1e-3)
    assert (row["us"], row["error"]) == (12.0, 1e-3)


def test_a_record_has_a_time_or_a_failure_and_not_both() -> None:
    with pytest.raises(CaseError, match="a time beside a failed gate"):
        Record("op", {}, us=1.0, error="wrong")
    with pytest.raises(CaseError, match="neither a time nor"):
        Record("op", {})
    row = gated("op", {}, check=right, timing=twelve_us)
    row["flop"] = row.pop("flops")
    with pytest.raises(CaseError, match="other keys than a Record has: flop, flops"):
        Record.from_mapping("op", row)


# --- the engine ----------------------------------------------------------------------------------


def test_a_report_shows_times_floors_and_rates(one_bench: Any) -> None:
    rows = [
        gated(
            "made_up",
            {"rows": 8},
            check=right,
            timing=twelve_us,
            floor_us=3.0,
            bytes=24_000_000,
            flops=12_000_000_000,
        ),
        gated("made_up", {"rows": 9}, check=lambda: "y[0] is 1", timing=never),
    ]
    one_bench(lambda device: rows)
    told: list[Any] = []
    report = run_benchmarks((), "cpu", progress=lambda *step: told.append(step))
    assert told == [("made_up on cpu", 0, 1)]
    assert column(report, "us") == [12.0, None]
    assert column(report, "floor %") == [25.0, None]
    assert column(report, "GB/s") == [2000.0, None]
    assert column(report, "TFLOP/s") == [1000.0, None]
    # of no peer, no reading and no graph of its own
    assert not {"peer", "read us", "alone us"} & set(report.tables[0].columns)
    (finding,) = report.findings
    assert (finding.rule, finding.message) == ("bench-gate", "made_up: y[0] is 1")
    assert not report.ok
    assert (report.coverage[0].subject, report.coverage[0].status) == ("GPU", "not inspected")
    assert "made_up" in report.to_text()
    json.dumps(report.to_json())


class DoublesInto:
    """A step that doubles x, by `factor`."""

    def __init__(self, factor: float = 2.0) -> None:
        self.x, self.y, self.factor = np.arange(3.0), np.zeros(3), factor
        self.outputs = {"y": self.y}

    def refill(self, batch: Any) -> None:
        raise NotImplementedError

    def poison(self) -> None:
        self.y[:] = np.nan

    def __call__(self) -> None:
        self.y[:] = self.factor * self.x

    def expected(self) -> dict[str, Any]:
        return {"y": 2.0 * self.x}


def test_copies_are_held_against_what_the_first_expects() -> None:
    assert first_wrong([DoublesInto(), DoublesInto()]) is None
    assert str(first_wrong([DoublesInto(), DoublesInto(3.0)])).startswith("y[1] is 3")
    assert str(first_wrong([DoublesInto(3.0), DoublesInto()])).startswith("y[1] is 3")


def test_a_benchmark_that_raises_does_not_stop_the_others(one_bench: Any) -> None:
    def run(device: str) -> Any:
        raise ValueError("no such buffer")

    one_bench(run)
    (record,) = run_benches((), "cpu")
    assert (record.op, record.error) == ("made_up", "ValueError: no such buffer")


def test_records_are_what_evidence_takes(one_bench: Any) -> None:
    one_bench(lambda device: [gated("made_up", {"rows": 8}, check=right, timing=twelve_us)])
    problems: list[str] = []
    find_part("bench").validate(problems, "bench", bench.measure())
    assert problems == []


def test_what_is_no_benchmark_and_no_device_is_named() -> None:
    with pytest.raises(CaseError, match=r"no benchmark 'made_up'; known are .*host_barriers"):
        run_benches(["made_up"], "cpu")
    with pytest.raises(ArgumentError, match="device='tpu'"):
        run_benches([], "tpu")  # type: ignore[arg-type]


def test_gpu_timings_need_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="torch finds none"):
        run_benches([], "cuda")
    with pytest.raises(DeviceError, match="torch finds none"):
        bench.time_graph(lambda: None)
    with pytest.raises(ArgumentError, match="repeats=0"):
        bench.time_graph(lambda: None, 0)
    with pytest.raises(ArgumentError, match="warmups=0"):
        bench.time_graph(lambda: None, warmups=0)
    with pytest.raises(ArgumentError, match="steps="):
        bench.time_copies([])


# --- the host benchmarks -------------------------------------------------------------------------


def test_the_barrier_benchmark_is_gated_and_prints_its_target() -> None:
    (record,) = run_benches(["host_barriers"], "cpu")
    assert record.error is None
    assert record.us is not None
    assert record.us > 0
    assert dict(record.shape) == {"threads": 256, "barriers": 1000, "target_us": 8000}


def test_the_launch_benchmark_has_nothing_to_say_without_a_gpu() -> None:
    assert run_benches(["launch_overhead"], "cpu") == []


# --- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_a_graph_is_timed_cold_and_warm() -> None:
    import torch

    x = torch.ones(1 << 22, device="cuda")
    cold = bench.time_graph(lambda: x.add_(1.0), 20)
    warm = bench.time_graph(lambda: x.add_(1.0), 20, cold=False)
    for timing in (cold, warm):
        assert timing.us > 0
        assert timing.spread_us >= 0
        assert timing.repeats == 20


@pytest.mark.gpu
def test_copies_are_timed_as_one_of_them() -> None:
    import torch

    x = torch.ones((8, 1 << 22), device="cuda")
    steps = [lambda row=row: row.add_(1.0) for row in x]
    several = bench.time_copies(steps, 20)
    alone = bench.time_copies(steps[:1], 20)
    # 32 MB at the speed of memory, and a graph's start that the copies share
    assert 0.3 * alone.us < several.us < alone.us
    assert bool((x[1:] == x[1]).all())  # the graph ran all of them, equally often
    assert several.repeats == 20


@pytest.mark.gpu
def test_memory_that_a_capture_gives_back_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    waited: list[float] = []
    monkeypatch.setattr(bench.time, "sleep", waited.append)
    x = torch.ones(1 << 20, device="cuda")
    bench.time_graph(lambda: x.add_(1.0), 3)
    del waited[:]
    large = torch.empty(1 << 30, dtype=torch.uint8, device="cuda")
    del large
    bench.time_graph(lambda: x.add_(1.0), 3)
    bench.time_graph(lambda: x.add_(1.0), 3)
    assert len(waited) == 2
    assert waited[0] > 0.004 and waited[1] < 0.001


@pytest.mark.gpu
def test_a_floor_is_bytes_over_the_copy_bandwidth() -> None:
    assert bench.copy_bandwidth() > 0
    assert bench.copy_floor_us(10**9) == pytest.approx(1e15 / bench.copy_bandwidth())


@pytest.mark.gpu
def test_the_launch_benchmark_compares_three_ways_of_one_launch() -> None:
    records = run_benches(["launch_overhead"], "cuda")
    assert [record.error for record in records] == [None] * 3
    by_call = {str(record.shape["call"]): record for record in records}
    assert set(by_call) == {"raw", "bound", "checked"}
    assert [call for call, record in by_call.items() if record.peer is not None] == ["raw"]
    assert all((record.us or 0) > 0 for record in records)
    assert by_call["bound"].shape["target_over_raw_us"] == 5
