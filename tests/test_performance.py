"""What is made of attention's records: the comparison, the page, the pictures."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from cuverify import evidence, figures, performance
from cuverify.benches.verify_attention import absent, facts
from cuverify.comparison import READING, comparison_table, geometric_mean, lines
from cuverify.errors import ArgumentError, EvidenceError, ToolchainError
from cuverify.performance import IN_ORDER, LEAST, PLAN, PORTABLE, RTX_PRO_6000, SGLANG, predicted_us
from cuverify.verify_shapes import LEVEL, RAGGED, Shape

ROOT = Path(__file__).resolve().parent.parent
OP = "verify_attention"


def record(name: str, us: float | None, **changes: Any) -> dict[str, Any]:
    shape = Shape.parse(name)
    return {
        "op": OP,
        "shape": facts(shape),
        "us": us,
        "us_spread": None if us is None else us / 100,
        "floor_us": 5.0,
        "bytes": shape.bytes,
        "flops": shape.flops,
        "peer": None,
        "error": None,
        "alone_us": None,
        "alone_spread": None,
        "read_us": None,
        **changes,
    }


def ceiling(what: str, unit: str, us: float) -> dict[str, Any]:
    empty = dict.fromkeys(record("1x1k:8", 1.0))
    return {**empty, "op": "ceilings", "shape": {"what": what}, "us": us, unit: 10**9}


RECORDS = [
    ceiling("reading rows in their order", "bytes", 1e3 / 4.5),
    ceiling("bf16 matrix product", "flops", 1.25),
    absent("FA3, SGLang's sequence", "not laid out"),
    record("1x1k:8", 3.0, peer=READING),
    record("1x1k:8", 7.5, alone_us=10.0),
    record("1x1k:8", 15.0, op=PLAN, shape={**facts(Shape.parse("1x1k:8")), "layers": 61,
                                          "us_a_layer": 15.0 / 61}),
    record("1x1k:8", 19.0, peer="torch, bf16 scores"),
    record("1x1k:8", 30.0, peer="FA3, strongest composition"),
    record("1x1k:8", 210.0, peer=SGLANG),
    record("1x1k:8", 20.0, op=PORTABLE),
    record("1x4k:8", 4.0, peer=READING),
    record("1x4k:8", 30.0),
    record("1x4k:8", None, peer="torch, bf16 scores", error="out[0, 0] is off"),
    record("1x4k:8", 24.0, peer="FA3, strongest composition"),
    record("1x64k:8", None, error="lse[0] is 1, expected 2"),
    record("1x64k:8", 50.0, op=PORTABLE),
    record("1x64k:8", 55.0, op=LEAST),
    record("1x64k:8", 34.5, op=IN_ORDER),
    record(RAGGED.name, 66.0),
    record(LEVEL.name, 60.0),
]  # fmt: skip


# --- the comparison ------------------------------------------------------------------------------


def test_ours_stands_beside_the_best_peer() -> None:
    found = {line.name: line for line in lines(RECORDS) if line.op == OP}
    line = found["1x1k:8"]
    assert (line.ours_us, line.read_us, line.floor_us) == (7.5, 3.0, 5.0)
    assert line.best == ("torch, bf16 scores", 19.0)
    assert line.speedup == pytest.approx(19 / 7.5)
    line = found["1x4k:8"]
    assert line.refused == {"torch, bf16 scores": "out[0, 0] is off"}
    assert line.speedup == 0.8
    line = found["1x64k:8"]
    assert (line.ours_us, line.wrong, line.best) == (None, "lse[0] is 1, expected 2", None)


def test_a_wrong_result_shows_no_time_in_the_table() -> None:
    tokens = [
        record("1x16k:8", 9.0, op="token_exactness", floor_us=None, peer=peer)
        for peer in (None, SGLANG)
    ]
    table = comparison_table([*RECORDS, record("1x64k:8", 60.0, peer=SGLANG), *tokens])
    ours = {row[0]: row[list(table.columns).index("ours us")] for row in table.rows}
    assert ours == {"1x1k:8": 7.5, "1x4k:8": 30.0, "1x64k:8": "wrong: lse[0] is 1, expected 2"}


def test_a_geometric_mean() -> None:
    assert geometric_mean([1.0, 4.0, 2.0]) == pytest.approx(2.0)
    assert geometric_mean([]) is None


# --- the page ------------------------------------------------------------------------------------


def section(records: list[dict[str, Any]]) -> str:
    return "\n".join(
        performance._gpu(
            {
                "data": records,
                "versions": {"torch": "2.11.0"},
                "run": {"date": "2026-11-29T20:00:00+00:00", "seconds": 300.0},
            }
        )
    )


def test_the_page_says_what_was_met_and_what_was_not() -> None:
    text = section(RECORDS)
    assert "Faster than the best exact-tree peer at 1 of 2 shapes; not at `1x4k:8`." in text
    assert "Geometric mean over 2 of the 60 shapes of the grid: 1.42x (goal: 1.7x)." in text
    assert "Against SGLang's Triton kernel: 28.0x to 28x, median 28x, over 1 shapes." in text
    assert "Ours was wrong, and so not timed, at: `1x64k:8`." in text
    assert "| 1x1k:8 | 8 | 7.50 | met |" in text
    assert "| 1x4k:8 | 10.5 | 30.0 | missed |" in text
    assert "| 16x16k:8 | 88 |  | not measured |" in text
    assert "reading rows in their order 4.50 TB/s; bf16 matrix product 800 TFLOP/s" in text
    assert "60.0 us: 1.10x (goal: at most 1.25x)" in text
    assert "15.0 to 15.0 us over 1 shapes, which is 0.25 to 0.25 us for each of 61 layers" in text
    assert "| 1x4k:8 | torch, bf16 scores | out[0, 0] is off |" in text
    assert "| all | FA3, SGLang's sequence | not here: not laid out |" in text
    assert "| 1x1k:8 | 20.0 | 7 | 19.0 | 1.05 |" in text


def test_goals_against_sglang_need_all_their_shapes() -> None:
    records = []
    for tree, ours in ((1, 10.0), (8, 12.0), (16, 20.0)):
        records += [record(f"1x1k:{tree}", ours), record(f"1x1k:{tree}", 210.0, peer=SGLANG)]
        records += [record(f"1x4k:{tree}", ours), record(f"1x4k:{tree}", 1100.0, peer=SGLANG)]
    text = section(records)
    assert "| 1k | 14x | 10.5x | missed |" in text
    assert "| 4k | 50x | 55.0x | met |" in text
    assert "| 16k, 64k, 180k | 150x |  | not measured |" in text
    assert "| 4k | 50x |  | not measured |" in section(records[:-2])


def test_nothing_is_claimed_without_peers() -> None:
    text = section([record("1x1k:8", 7.5)])
    assert "No peer was measured beside ours." in text
    assert "Faster than" not in text
    assert "Predictions" not in text


def test_a_prediction_is_bytes_and_the_share_that_was_reached() -> None:
    shape = Shape.parse("1x64k:8")
    reached = shape.flops / 300e12 * 1e6  # half of what mma.sync gives on the H200
    memory, tensor = predicted_us(shape, reached, RTX_PRO_6000)
    assert memory == pytest.approx(shape.bytes / 1.5e6)
    assert tensor == pytest.approx(shape.flops / 190e6)
    # the other GPU is not given more than its own peak
    assert predicted_us(shape, 1e-3, RTX_PRO_6000)[1] == pytest.approx(shape.flops / 380e6)
    assert "| 1x64k:8 | 50.4 | 86.8 | tensor cores | nobody has measured it |" in section(RECORDS)


def test_a_prediction_stands_beside_what_was_measured(tmp_path: Path) -> None:
    import json

    (tmp_path / evidence.FOLDER).mkdir()
    document = json.loads((ROOT / "evidence" / "h200.json").read_text())
    attention = {**document["sections"]["bench"], "data": RECORDS}
    own = {**attention, "data": [record("1x64k:8", 90.0), record("1x64k:8", 90.0, op=LEAST)]}
    for name, gpu, part in (
        ("h200", "NVIDIA H200", attention),
        ("rtx", "NVIDIA RTX PRO 6000 Blackwell Server Edition", own),
    ):
        text = json.dumps({**document, "gpu": gpu, "sections": {"attention": part}})
        (tmp_path / evidence.FOLDER / f"{name}.json").write_text(text)
    page = performance.page(tmp_path)
    assert "| 1x64k:8 | 50.4 | 86.8 | tensor cores | 90.0 |" in page
    assert page.count("### Predictions") == 1


def test_goals_have_the_time_behind_any_kernel_beside_them() -> None:
    text = section(RECORDS)
    assert "| 1x1k:8 | 8 | 7.50 | met |  |" in text
    assert "| 1x64k:8 | 33 |  | not measured | 34.5 |" in text


def test_the_page_is_that_of_the_evidence() -> None:
    written = (ROOT / performance.PAGE).read_text(encoding="utf-8")
    assert written == performance.page(ROOT), "run `python -m cuverify.performance`"


def test_tokens_are_counted_on_the_page() -> None:
    counts = {"rows": 100, "equal": 97, "close": 9, "excused": 3, "wrong": 0, "as ours": 98}
    shape = {"name": "160x3k:64", **{f"tokens {name}": n for name, n in counts.items()}}
    text = section([record("1x1k:8", 900.0, op=performance.TOKENS, shape=shape, peer=SGLANG)])
    assert f"| {SGLANG} | 100 | 97 | 9 | 3 | 0 | 98 |" in text


def test_a_gpu_without_the_section_says_so(tmp_path: Path) -> None:
    import json

    (tmp_path / evidence.FOLDER).mkdir()
    document = json.loads((ROOT / "evidence" / "h200.json").read_text())
    document["sections"].pop("attention", None)
    (tmp_path / evidence.FOLDER / "h200.json").write_text(json.dumps(document))
    assert "## NVIDIA H200\n\nNot recorded yet.\n" in performance.page(tmp_path)
    assert performance.write(tmp_path).read_text() == performance.page(tmp_path)


# --- pictures ------------------------------------------------------------------------------------


def test_curves_go_over_prefix_lengths() -> None:
    records = [record("1x4k:8", 30.0), record("1x1k:8", 7.5), record(RAGGED.name, 60.0)]
    assert figures.curves(lines(records)) == {
        (1, 8): {
            "ours": [(1024, 7.5), (4096, 30.0)],
            "roofline": [(1024, 5.0), (4096, 5.0)],
        }
    }


def test_a_roofline_holds_ceilings_and_points() -> None:
    ceilings, points = figures.roofline(RECORDS)
    assert ceilings == pytest.approx((4.5e12, 8e14))
    shape = Shape.parse("1x1k:8")
    assert points["ours"][0] == pytest.approx((shape.flops / shape.bytes, shape.flops / 7.5 * 1e6))
    assert READING not in points
    assert len(points["FA3, strongest composition"]) == 2


def test_the_portable_text_is_held_against_its_goals() -> None:
    records = []
    for name, ours, peer in (
        ("1x64k:8", 40.0, 60.0), ("1x16k:8", 30.0, 20.0), ("1x180k:8", 120.0, 90.0),
        ("1x64k:16", 200.0, 70.0), ("1x64k:33", 500.0, 90.0),
    ):  # fmt: skip
        records += [record(name, 10.0), record(name, peer, peer=SGLANG)]
        records.append(record(name, ours, op=PORTABLE))
    text = section(records)
    assert "- faster than the best peer with up to 8 tokens and 64k rows: at 1 of 2 shapes;" in text
    assert "- within 1.5x of it elsewhere with up to 16 tokens: at 1 of 2;" in text
    assert "- 200 TFLOP/s at `1x64k:8`: 228." in text
    assert "With trees of 17, 33, 65 tokens: faster at 1 of 1 shapes." in text


def test_a_picture_of_the_record_names_what_is_missing(tmp_path: Path) -> None:
    import json

    (tmp_path / evidence.FOLDER).mkdir()
    document = json.loads((ROOT / "evidence" / "h200.json").read_text())
    attention = {**document["sections"]["bench"], "data": RECORDS}
    text = json.dumps({**document, "sections": {"attention": attention}})
    (tmp_path / evidence.FOLDER / "h200.json").write_text(text)
    with pytest.raises(EvidenceError, match="no attention of a GPU like 'RTX' is recorded"):
        performance.picture(tmp_path, tmp_path / "x.svg", "RTX")
    pytest.importorskip("matplotlib.figure")
    performance.picture(tmp_path, tmp_path / "x.svg", "H200")
    assert b"<svg" in (tmp_path / "x.svg").read_bytes()


@pytest.mark.parametrize("suffix", [".svg", ".png"])
def test_a_picture_is_drawn(tmp_path: Path, suffix: str) -> None:
    pytest.importorskip("matplotlib.figure")
    path = tmp_path / f"times{suffix}"
    figures.draw(RECORDS, path)
    start = path.read_bytes()[:300]
    assert start.startswith(b"\x89PNG") if suffix == ".png" else b"<svg" in path.read_bytes()
    with pytest.raises(ArgumentError, match="none has a time over a prefix"):
        figures.draw([], path)


def test_a_picture_without_matplotlib_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ToolchainError, match="pictures need matplotlib"):
        figures.require()
