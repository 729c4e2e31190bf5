"""A timeline tells busy from idle, and adds up."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from cuverify import cli
from cuverify.errors import ArgumentError, DeviceError
from cuverify.timeline import GAPS, OTHERS, Span, Timeline, record_timeline

gpu = pytest.mark.gpu

LINE = Timeline.of(
    [
        Span("attend", 110.0, 140.0),
        Span("plan", 100.0, 104.0),
        Span("attend", 145.0, 155.0),
        Span("copy", 150.0, 152.0),
        Span("walk", 160.0, 161.0),
    ]
)
GROUPS = {"attention": ["attend"], "glue": ["plan", "walk"]}


def test_busy_and_idle() -> None:
    assert LINE.us == 61.0
    assert LINE.gaps() == [(4.0, 10.0), (40.0, 45.0), (55.0, 60.0)]
    assert LINE.idle_us == 16.0
    assert next(iter(LINE.kernels().items())) == ("attend", (2, 40.0))
    assert Timeline.of([]).us == 0.0


def test_an_account_has_groups_others_and_gaps() -> None:
    assert LINE.account(GROUPS) == {"attention": 40.0, "glue": 5.0, OTHERS: 0.0, GAPS: 16.0}
    assert LINE.to_text(GROUPS).endswith("bounds next: attention")
    late = Timeline.of([Span("plan", 0.0, 1.0), Span("plan", 50.0, 51.0)])
    assert late.to_text(GROUPS).endswith("bounds next: gaps")


def test_what_starts_early_and_waits_takes_no_time() -> None:
    line = Timeline.of([Span("plan", 0, 5), Span("attend", 1, 25), Span("merge", 6, 31)])
    account = line.account({"plan": ["plan"], "partials": ["attend"], "merge": ["merge"]})
    assert account == {"plan": 5, "partials": 20, "merge": 6, OTHERS: 0, GAPS: 0}
    assert sum(account.values()) == line.us


def test_a_chrome_trace_is_read() -> None:
    events = [
        {"ph": "X", "cat": "kernel", "name": "a", "ts": 5, "dur": 2},
        {"ph": "X", "cat": "gpu_memcpy", "name": "b", "ts": 8.5, "dur": 1},
        {"ph": "X", "cat": "cpu_op", "name": "host", "ts": 0, "dur": 100},
        {"ph": "M", "name": "process_name"},
    ]
    found = Timeline.from_chrome({"traceEvents": events})
    assert found.spans == (Span("a", 0.0, 2.0), Span("b", 3.5, 4.5))


def test_the_picture_is_a_picture() -> None:
    tree = ElementTree.fromstring(LINE.to_svg(title="a < b"))
    drawn = [element for element in tree.iter() if element.tag.endswith("rect")]
    # the ground, five spans, three gaps, four names
    assert len(drawn) == 1 + 5 + 3 + 4
    with pytest.raises(ArgumentError, match="nothing ran"):
        Timeline.of([]).to_svg()


def test_what_took_no_time_has_a_picture() -> None:
    line = Timeline.of([Span("fill", 3.0, 3.0)])
    assert "fill" in line.to_svg()
    assert "bounds next" in line.to_text({})


def test_without_a_device_there_is_an_error() -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a device")
    with pytest.raises(DeviceError, match="needs a CUDA device"):
        record_timeline(lambda: None)


def test_the_command_says_what_it_needs(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a device")
    assert cli.main(["timeline", str(tmp_path)]) == cli.COULD_NOT_RUN
    assert "needs a CUDA device" in capsys.readouterr().err
    assert cli.main(["timeline", str(tmp_path / "nowhere")]) == cli.COULD_NOT_RUN


@gpu
def test_a_replay_is_recorded(tmp_path: Path) -> None:
    import torch

    x = torch.zeros(1 << 20, device="cuda")
    x.add_(1)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        for _ in range(5):
            x.add_(1)
    line = record_timeline(graph.replay, trace=tmp_path / "trace.json")
    assert len(line.spans) == 5 and line.us > line.idle_us
    assert json.loads((tmp_path / "trace.json").read_text(encoding="utf-8"))["traceEvents"]
