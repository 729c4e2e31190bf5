"""Strategies draw what they promise, refuse senseless bounds, and shrink to the simplest."""

from __future__ import annotations

import random
from typing import Any

import numpy as np
import pytest
from hypothesis import find, given, settings
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from cuverify.reference.relocate import LEGAL, judge
from cuverify.strategies import (
    FAULTS,
    ROW_BYTES,
    drawn,
    examples,
    faulty_relocation_batches,
    relocation_batches,
)
from cuverify.workload import RelocationBatch


def verdict(batch: RelocationBatch) -> int:
    return int(judge(batch.src, batch.dst, batch.count, batch.num_slots)[0])


def moving(batch: RelocationBatch) -> np.ndarray[Any, Any]:
    return batch.src[: batch.count] != batch.dst[: batch.count]


def chains(batch: RelocationBatch) -> int:
    """Return 0 where no row reads what another one writes, 2 where some do in a cycle, else 1."""
    into = {int(d): int(s) for s, d in zip(batch.src[: batch.count], batch.dst, strict=False)}
    into = {d: s for d, s in into.items() if s != d}
    if not any(source in into for source in into.values()):
        return 0
    for start in into:
        slot, steps = into[start], 0
        while slot in into and slot != start and steps <= len(into):
            slot, steps = into[slot], steps + 1
        if slot == start:
            return 2
    return 1


@st.composite
def bounds(draw: st.DrawFn) -> dict[str, Any]:
    slots = draw(st.integers(1, 80))
    stays = draw(st.booleans())
    rows = draw(st.integers(0, slots if stays else slots // 2))
    layers = draw(st.integers(1, 5))
    return {
        "min_slots": draw(st.integers(1, slots)),
        "max_slots": slots,
        "min_rows": rows,
        "max_rows": draw(st.integers(rows, slots)),
        "min_layers": draw(st.integers(1, layers)),
        "max_layers": layers,
        "row_bytes": draw(st.lists(st.sampled_from(ROW_BYTES), min_size=1, max_size=3)),
        "max_row_gap": 16 * draw(st.integers(0, 4)),
        "max_tail": draw(st.integers(0, 5)),
        "allow_stays": stays,
        "allow_shared_sources": draw(st.booleans()),
    }


@examples(150)
@given(data=st.data(), within=bounds())
def test_lists_keep_their_bounds_and_are_legal(data: st.DataObject, within: dict[str, Any]) -> None:
    batch = data.draw(relocation_batches(**within))
    assert verdict(batch) == LEGAL
    assert within["min_slots"] <= batch.num_slots <= within["max_slots"]
    assert within["min_rows"] <= batch.count <= within["max_rows"]
    assert within["min_layers"] <= batch.layers <= within["max_layers"]
    assert batch.row_bytes in within["row_bytes"]
    gap = batch.row_stride - batch.row_bytes
    assert gap % 16 == 0
    assert 0 <= gap <= within["max_row_gap"]
    assert max(1, batch.count) <= batch.capacity <= max(1, batch.count + within["max_tail"])
    assert within["allow_stays"] or moving(batch).all()
    if not within["allow_shared_sources"]:
        sources = batch.src[: batch.count][moving(batch)]
        assert len(np.unique(sources)) == len(sources)


@examples(150)
@given(faulty_relocation_batches(max_faults=5))
def test_faulty_lists_are_illegal(batch: RelocationBatch) -> None:
    assert verdict(batch) != LEGAL


def test_boundaries_are_drawn_often() -> None:
    batches = drawn(relocation_batches(), 400)
    assert len(batches) == 400
    share = {
        "empty": np.mean([b.count == 0 for b in batches]),
        "one row": np.mean([b.count == 1 for b in batches]),
        "no tail": np.mean([b.count == b.capacity for b in batches]),
        "every slot": np.mean([b.count == b.num_slots for b in batches]),
        "slot 0": np.mean([b.count > 0 and 0 in b.src[: b.count] for b in batches]),
        "last slot": np.mean(
            [b.count > 0 and b.num_slots - 1 in b.dst[: b.count] for b in batches]
        ),
        "a row that stays": np.mean([not moving(b).all() for b in batches]),
        "overlaps": np.mean([judge(b.src, b.dst, b.count, b.num_slots)[2] for b in batches]),
        "disjoint": np.mean([b.count > 1 and chains(b) == 0 for b in batches]),
        "a cycle": np.mean([chains(b) == 2 for b in batches]),
    }
    assert all(part > 0.03 for part in share.values()), share
    assert {b.row_bytes for b in batches} == set(ROW_BYTES)
    assert {b.layers for b in batches} == {1, 2, 3}


def test_every_fault_is_drawn() -> None:
    found = [verdict(batch) for batch in drawn(faulty_relocation_batches(), 200)]
    assert set(found) == {1, 2, 3, 4}
    wanted = {"count": {1}, "source": {2}, "destination": {3}, "duplicate": {4}}
    for fault in FAULTS:
        only = drawn(faulty_relocation_batches(faults=[fault], max_faults=1), 40)
        assert {verdict(batch) for batch in only} <= wanted[fault], fault


def test_examples_shrink_to_the_simplest_list() -> None:
    def simplest(condition: Any, strategy: Any = None) -> str:
        strategy = relocation_batches() if strategy is None else strategy
        # each beginning ends in a local minimum, of which the least counts
        steady = settings(database=None, max_examples=1000)
        ends = [
            repr(find(strategy, condition, settings=steady, random=random.Random(seed)))
            for seed in range(3)
        ]
        return min(ends, key=len).partition(", num_slots")[0]

    assert simplest(lambda b: True) == "RelocationBatch(drawn: 0 of 1 rows []"
    assert simplest(lambda b: moving(b).any()) == "RelocationBatch(drawn: 1 of 1 rows [0->1]"
    three = simplest(
        lambda b: moving(b).sum() >= 3, relocation_batches(min_slots=6, shapes=["disjoint"])
    )
    assert three == "RelocationBatch(drawn: 3 of 3 rows [0->1, 2->3, 4->5]"
    chain = simplest(lambda b: chains(b) == 1, relocation_batches(shapes=["shift"]))
    assert chain == "RelocationBatch(drawn: 2 of 2 rows [0->1, 1->2]"
    faulty = faulty_relocation_batches()
    assert simplest(lambda b: verdict(b) == 1, faulty).startswith("RelocationBatch(faulty: -1 of 2")
    outside = simplest(lambda b: verdict(b) == 2, faulty)
    assert outside.startswith("RelocationBatch(faulty: 2 of 2 rows [-1->")


def test_long_lists_are_drawn_quickly_and_are_legal() -> None:
    strategy = relocation_batches(min_slots=50_000, max_slots=50_000, min_rows=20_000)
    for batch in drawn(strategy, 5):
        assert batch.count >= 20_000
        assert verdict(batch) == LEGAL


def test_drawn_examples_follow_the_seed() -> None:
    first, again, other = (drawn(relocation_batches(), 8, seed=seed) for seed in (1, 1, 2))
    assert list(map(repr, first)) == list(map(repr, again))
    assert list(map(repr, first)) != list(map(repr, other))
    assert drawn(relocation_batches(), 0) == []


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"min_slots": 0}, "min_slots=0"),
        ({"min_slots": 9, "max_slots": 8}, "max_slots=8 is below min_slots=9"),
        ({"min_rows": -1}, "min_rows=-1"),
        ({"min_rows": 3, "max_rows": 2}, "max_rows=2"),
        ({"min_rows": 9, "max_rows": 9, "max_slots": 8}, "min_rows=9 does not fit"),
        ({"min_rows": 5, "max_slots": 8, "allow_stays": False}, "min_rows=5 does not fit"),
        ({"min_layers": 0}, "min_layers=0"),
        ({"row_bytes": ()}, "row_bytes"),
        ({"row_bytes": (18,)}, "row_bytes"),
        ({"shapes": ()}, "shapes"),
        ({"shapes": ("circle",)}, "shapes"),
        ({"max_row_gap": 8}, "max_row_gap=8"),
        ({"max_tail": -1}, "max_tail=-1"),
    ],
)
def test_bounds_that_make_no_sense_are_refused_when_drawn(wrong: dict[str, Any], said: str) -> None:
    strategy = relocation_batches(**wrong)
    with pytest.raises(InvalidArgument, match=said):
        find(strategy, lambda batch: True)


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"faults": ["gremlin"]}, "gremlin"),
        ({"faults": []}, "faults"),
        ({"min_faults": 0}, "min_faults=0"),
        ({"min_faults": 3, "max_faults": 2}, "max_faults=2"),
    ],
)
def test_faults_that_make_no_sense_are_refused(wrong: dict[str, Any], said: str) -> None:
    strategy = faulty_relocation_batches(**wrong)
    with pytest.raises(InvalidArgument, match=said):
        find(strategy, lambda batch: True)
