"""The benchmark of attention: all of it but the clock, on the host lane."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch

from cuverify import peers
from cuverify.bench import Record, Timing, run_benches
from cuverify.benches import verify_attention as bench
from cuverify.ceilings import Ceilings, read_step
from cuverify.comparison import READING, lines
from cuverify.errors import CaseError
from cuverify.own_attention import OwnAttention
from cuverify.peers import Peer, Prepared, find
from cuverify.verify_problem import Problem, new_pool
from cuverify.verify_shapes import ALL, Shape, select

CEILINGS = Ceilings(4e12, 4e12, 8e14)
SMALL = Shape((40, 40), 4)


def by_the_host(steps: Sequence[Callable[[], None]], repeats: int = 1, **_: Any) -> Timing:
    started = time.perf_counter()
    for step in steps:
        step()
    return Timing.of([1e6 * (time.perf_counter() - started) / len(steps)])


@pytest.fixture(autouse=True)
def host_clock(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bench, "time_copies", by_the_host)


# --- one shape -----------------------------------------------------------------------------------


def test_a_shape_gives_floor_ours_plan_and_peers() -> None:
    (peer,) = find(["torch, bf16*"])[0]
    rows = list(bench._attention(SMALL, new_pool(200, "cpu"), CEILINGS, [peer]))
    for row in rows:
        Record.from_mapping(row["op"], row)
    told = [(row["op"], row["peer"], isinstance(row["error"], str)) for row in rows]
    assert told == [
        (bench.OP, READING, False),
        (bench.OP, None, False),
        (bench.IN_ORDER, None, False),
        (bench.PLAN, None, False),
        (bench.OP, "torch, bf16 scores", False),
    ]
    reading, ours, in_order, plan, theirs = rows
    for row in (ours, in_order, theirs):
        assert row["shape"]["copies"] == 2
        assert row["read_us"] == reading["us"]
        assert row["floor_us"] == pytest.approx(1e6 * SMALL.bytes / 4e12)
        assert 0 < row["error"] < 0.01
        assert row["alone_us"] > 0
    assert plan["shape"]["us_a_layer"] == plan["us"] / 61
    line = next(line for line in lines(rows) if line.op == bench.OP)
    assert (line.name, line.ours_us, line.read_us) == ("2x40:4", ours["us"], reading["us"])


def test_the_portable_text_is_timed_where_the_rule_takes_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Any] = []
    of = OwnAttention.of

    def watch(problem: Problem, *, variant: Any = None, **named: Any) -> OwnAttention:
        asked.append(variant)
        return of(problem, **named)

    monkeypatch.setattr(OwnAttention, "of", watch)
    monkeypatch.setattr(OwnAttention, "variant", "other")
    rows = list(bench._attention(SMALL, new_pool(100, "cpu"), CEILINGS, []))
    assert asked == [None, "portable"]
    assert [row["op"] for row in rows] == [
        bench.OP, bench.OP, bench.IN_ORDER, bench.PORTABLE, bench.PLAN
    ]  # fmt: skip
    monkeypatch.setattr(OwnAttention, "variant", "portable")
    rows = list(bench._attention(SMALL, new_pool(100, "cpu"), CEILINGS, []))
    assert [row["op"] for row in rows] == [bench.OP, bench.OP, bench.IN_ORDER, bench.PLAN]


def test_a_ragged_shape_leaves_out_who_cannot_do_it() -> None:
    peers = find(["torch, bf16*"])[0]
    rows = list(bench._attention(Shape((40, 9), 3), new_pool(60, "cpu"), CEILINGS, peers))
    assert [row["peer"] for row in rows] == [READING, None, None, None]
    assert rows[1]["alone_us"] is None, "one copy is alone already"


def test_a_peer_that_raises_is_a_record() -> None:
    def fails(problem: Problem) -> Prepared:
        raise RuntimeError("no kernel image\nand more")

    problem = Problem(SMALL, new_pool(100, "cpu"), copies=1)
    row = bench.theirs(Peer("broken", fails), problem, None, lambda *given, **named: {})
    assert (row["peer"], row["us"], row["error"]) == (
        "broken", None, "RuntimeError: no kernel image",
    )  # fmt: skip


# --- ours ----------------------------------------------------------------------------------------


@pytest.fixture
def own() -> OwnAttention:
    return OwnAttention.of(Problem(Shape((40, 9), 3), new_pool(200, "cpu"), copies=3))


def test_layers_in_order_are_the_same_layers(own: OwnAttention) -> None:
    own.layers[0]()
    bits = own.out.view(torch.int16).clone()
    own.out.fill_(float("nan"))
    steps = own.in_order()
    assert len(steps) == len(own.layers)
    steps[0]()
    assert torch.equal(own.out.view(torch.int16), bits)


def test_ours_is_right_in_every_copy_and_in_its_plan(own: OwnAttention) -> None:
    assert own.judge() is None
    assert own.judge_plan() is None


def test_ours_is_right_over_codes() -> None:
    shape = Shape.parse("1x40+1x9:3/fp8")
    other = OwnAttention.of(Problem(shape, new_pool(200, "cpu"), copies=2))
    assert other.judge() is None
    assert (other.layers[0].pool, other.problem.pool.shape) == ("fp8_e4m3", (200, 576))


def test_a_wrong_result_is_seen(own: OwnAttention) -> None:
    first = own.layers[0]

    def wrong() -> None:
        first()
        own.out[4, 2] = own.out[4, 2] * 1.02

    object.__setattr__(own, "layers", [wrong, *own.layers[1:]])
    assert str(own.judge()).startswith("out[4, 2, ")

    def off_by_a_bit() -> None:
        first()
        own.lse[5, 7] += 1e-3

    object.__setattr__(own, "layers", [off_by_a_bit])
    assert str(own.judge()).startswith("lse[5, 7] is")


def test_nothing_written_is_seen(own: OwnAttention) -> None:
    object.__setattr__(own, "layers", [lambda: None])
    assert "nan" in str(own.judge())


def test_another_result_at_other_slots_is_seen(own: OwnAttention) -> None:
    last = own.layers[2]

    def drifts() -> None:
        last()
        bits = own.out.view(torch.int16)
        bits[0, 0, 0] ^= 1

    object.__setattr__(own, "layers", [*own.layers[:2], drifts])
    assert own.judge() == "the same rows at other slots (copy 2) give other bits"


def test_a_plan_that_changes_is_seen(own: OwnAttention) -> None:
    own.problem.seq_lens[1] = 8
    assert str(own.judge_plan()).startswith("a second plan of the same lengths has another ")


# --- the floor -----------------------------------------------------------------------------------


def test_rows_that_were_not_read_are_noticed() -> None:
    pool = torch.randn((20, 576)).bfloat16()
    slots = torch.arange(3, 11, dtype=torch.int32)
    read, words = read_step(pool, slots)
    read()
    assert bench.judge_reading(words, pool[slots.long()]) is None
    assert bench.judge_reading(words, pool[slots.long() + 1]) == "the rows were not read"


def test_errors_are_relative_to_a_row() -> None:
    expected = torch.ones((2, 1, 4), dtype=torch.float64)
    out = expected.clone()
    out[1] *= 1.25
    assert bench.row_errors(out, expected).tolist() == [[0.0], [0.25]]
    assert bench.relative_error(out, expected) == pytest.approx(0.25 / 2**0.5)


def test_ceilings_are_rates() -> None:
    rates = [
        (row["bytes"] or row["flops"]) / row["us"] * 1e6
        for row in bench.ceiling_records(Ceilings(4.5e12, 4e12, 8e14))
    ]
    assert rates == pytest.approx([4.5e12, 4e12, 8e14])


# --- what is measured ----------------------------------------------------------------------------


def test_the_default_shapes_are_known() -> None:
    assert {shape.name for shape in select(bench.DEFAULT)} <= {shape.name for shape in ALL}


def test_shapes_are_refused_before_anything_runs() -> None:
    for options, message in (
        ({"shapes": ["1x1k"]}, "a shape reads like 16x1k:8"),
        ({"peers": ["nobody"]}, "peers='nobody': known are"),
        ({"peers_dir": "nowhere/at/all"}, "there is no such folder"),
    ):
        with pytest.raises(CaseError, match=message):
            run_benches(["verify_attention"], "cpu", options=options)
    assert run_benches(["verify_attention"], "cpu", options={"shapes": ["grid"]}) == []


def test_what_the_time_does_not_suffice_for_is_named() -> None:
    now = iter([0.0, 50.0, 100.0])
    measured: list[str] = []

    def measure(shape: Shape) -> Iterator[dict[str, Any]]:
        measured.append(shape.name)
        yield {"shape": shape.name}

    rows = list(bench.within(select(["block", "ragged"]), measure, 80, lambda: next(now)))
    assert measured == ["1x4k:block16", "1x64k:block16"]
    assert rows[-1]["shape"] == {"left out": 2}
    assert rows[-1]["error"] == (
        "the 80 seconds were spent; not measured: 1x180k+15x1k:8 16x12480:8"
    )
    Record.from_mapping("verify_attention", rows[-1])


def test_a_lost_device_ends_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    def measure(shape: Shape) -> Iterator[dict[str, Any]]:
        raise RuntimeError("an illegal memory access was encountered")
        yield {}

    monkeypatch.setattr(bench, "_device_is_lost", lambda: True)
    first, last = bench.within(select(["block"]), measure, None, lambda: 0.0)
    assert first["error"].startswith("RuntimeError: an illegal memory access")
    assert last["error"] == "the device was lost; not measured: 1x64k:block16"

    monkeypatch.setattr(bench, "_device_is_lost", lambda: False)
    rows = list(bench.within(select(["block"]), measure, None, lambda: 0.0))
    assert [row["shape"]["name"] for row in rows] == ["1x4k:block16", "1x64k:block16"]


def test_a_peer_that_is_not_here_is_a_record() -> None:
    row = bench.absent("FA3", "it runs on sm_90 only")
    assert Record.from_mapping("op", row).error == "not here: it runs on sm_90 only"


@pytest.mark.gpu
def test_one_small_shape_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.undo()
    monkeypatch.delenv(peers.VARIABLE, raising=False)
    records = run_benches(
        ["verify_attention"], "cuda", options={"shapes": ["2x1k:17"], "peers": ["torch*"]}
    )
    wrong = [record for record in records if isinstance(record.error, str)]
    assert wrong == []
    ours = next(record for record in records if record.op == bench.OP and record.peer is None)
    reading = next(record for record in records if record.peer == READING)
    assert ours.us is not None
    assert reading.us is not None
    assert ours.us > reading.us > 0
    assert ours.shape["copies"] == 16
    assert np.isfinite(ours.error or np.nan)
