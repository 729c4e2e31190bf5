"""Request lengths, the churned pool, and the lists that it hands out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cuverify import datasets, workload
from cuverify.errors import ArgumentError, CaseError
from cuverify.reference.relocate import LEGAL, judge
from cuverify.workload import (
    ChurnedPool,
    FreeList,
    RelocationBatch,
    RequestLengths,
    accepted_path_moves,
    real_batches,
    request_lengths,
)

ORDERS = ("fifo", "lifo", "sorted")
HEADER = "TIMESTAMP,ContextTokens,GeneratedTokens\n"

# SGLang's own vectors for its accept kernels: two requests, trees of six nodes, paths of up to 4.
G1_ACCEPT_INDEX = np.array([[0, 3, 4, 5], [6, 10, 11, -1]])
G1_ACCEPT_TOKEN_NUM = np.array([3, 2])
G2_ACCEPT_INDEX = np.array([[0, 1, 2, -1], [6, 10, 11, -1]])
G2_ACCEPT_TOKEN_NUM = np.array([2, 2])
GOLDEN_WINDOWS = np.array([40, 41, 42, 43, 44, 45, 71, 73, 75, 70, 72, 74])


@pytest.fixture
def no_trace(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Let the package think it is installed somewhere without a trace."""
    monkeypatch.delenv("CUVERIFY_DATA", raising=False)
    monkeypatch.setattr(datasets, "__file__", str(tmp_path / "cuverify" / "datasets.py"))


def rows_of(moves: workload.AcceptedMoves) -> list[tuple[int, int, bool]]:
    return list(zip(moves.src.tolist(), moves.dst.tolist(), moves.chained.tolist(), strict=True))


def assert_partition(pool: ChurnedPool) -> None:
    """Every slot but the dummy is live once or free once."""
    every = np.concatenate([pool.live_slots(), pool.free.slots()])
    np.testing.assert_array_equal(np.sort(every), np.arange(1, pool.num_slots))


def assert_disjoint(batch: RelocationBatch) -> None:
    assert judge(batch.src, batch.dst, batch.count, batch.num_slots)[0] == LEGAL
    moved = np.concatenate([batch.src, batch.dst])
    assert batch.count == batch.capacity
    assert len(np.unique(moved)) == 2 * batch.count, "also no source twice, and no row that stays"
    assert batch.count == 0 or moved.min() > 0, "the dummy slot never moves"


@pytest.mark.parametrize("trace", ["code", "conv"])
@pytest.mark.parametrize("part", ["prompt", "generated"])
@pytest.mark.usefixtures("no_trace")
def test_drawn_lengths_have_the_quantiles_of_the_trace(trace: Any, part: str) -> None:
    lengths = request_lengths(trace, count=200_000, seed=3)
    assert lengths.source == f"drawn from the quantiles of {trace}"
    table = workload._QUANTILES[trace][part]
    drawn = getattr(lengths, part)
    for level, wanted in zip(workload._LEVELS[1:-1], table[1:-1], strict=True):
        below, above = (drawn < wanted * 0.95).mean(), (drawn <= wanted * 1.05 + 1).mean()
        assert below - 0.01 <= level <= above + 0.01
    assert table[0] <= drawn.min()
    assert drawn.max() <= table[-1]


@pytest.mark.usefixtures("no_trace")
def test_drawn_lengths_follow_the_seed() -> None:
    first, again, other = (request_lengths(count=50, seed=seed) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.prompt, again.prompt)
    np.testing.assert_array_equal(first.generated, again.generated)
    assert (first.prompt != other.prompt).any()
    assert len(request_lengths().prompt) == 20_000
    assert len(request_lengths(count=0).prompt) == 0


@pytest.mark.parametrize("trace", ["code", "conv"])
def test_the_trace_itself_has_these_quantiles(trace: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUVERIFY_DATA", raising=False)
    lengths = request_lengths(trace)
    if not lengths.source.endswith(".csv"):
        pytest.skip("the Azure trace is not at hand")
    assert len(lengths.prompt) == {"code": 8819, "conv": 19366}[trace]
    for part in ("prompt", "generated"):
        found = np.quantile(getattr(lengths, part), workload._LEVELS, method="lower")
        assert tuple(found.astype(int)) == workload._QUANTILES[trace][part]


@pytest.mark.parametrize("nested", [False, True])
def test_a_trace_is_read_from_the_named_folder(
    nested: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "azure-llm-2023" if nested else tmp_path
    folder.mkdir(exist_ok=True)
    (folder / "code.csv").write_text(HEADER + "a,100,5\nb,200,6\nc,300,7\n")
    monkeypatch.setenv("CUVERIFY_DATA", str(tmp_path))
    lengths = request_lengths("code", count=5)
    assert lengths.prompt.tolist() == [100, 200, 300, 100, 200]
    assert lengths.generated.tolist() == [5, 6, 7, 5, 6]
    assert lengths.source == str(folder / "code.csv")
    assert sorted(request_lengths("code", seed=9).prompt.tolist()) == [100, 200, 300]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (None, "holds neither"),
        ("time,prompt\na,1\n", "the first line is"),
        (HEADER, "no requests"),
        (HEADER + "a,100,x\n", "not a table"),
        (HEADER + "a,100\n", "not a table"),
        (HEADER + "a,0,3\n", "below 1"),
    ],
)
@pytest.mark.filterwarnings("ignore:loadtxt")
def test_a_folder_without_a_trace_is_an_error(
    text: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if text is not None:
        (tmp_path / "conv.csv").write_text(text)
    monkeypatch.setenv("CUVERIFY_DATA", str(tmp_path))
    with pytest.raises(CaseError, match=said):
        request_lengths("conv")


def test_unknown_traces_and_counts_are_refused() -> None:
    with pytest.raises(ArgumentError, match="trace='poems'"):
        request_lengths("poems")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="count=-1"):
        request_lengths(count=-1)


def test_golden_paths_become_these_moves() -> None:
    # Request 0 accepts window nodes 0, 3, 4, 5: nodes 3, 4, 5 go to slots 1, 2, 3 of the window,
    # and slot 3 is read and written. Request 1 accepts 0, 4, 5: nodes 4, 5 go to slots 1, 2.
    moves = accepted_path_moves(GOLDEN_WINDOWS, G1_ACCEPT_INDEX, G1_ACCEPT_TOKEN_NUM, 6)
    assert rows_of(moves) == [
        (43, 41, True),
        (44, 42, True),
        (45, 43, True),
        (72, 73, False),
        (74, 75, False),
    ]
    assert moves.request.tolist() == [0, 0, 0, 1, 1]
    # As one list it is legal, and overlaps.
    assert judge(moves.src, moves.dst, 5, 80).tolist() == [LEGAL, -1, 1, 0]

    # Here request 0 accepts 0, 1, 2, which stand where they belong.
    moves = accepted_path_moves(GOLDEN_WINDOWS, G2_ACCEPT_INDEX, G2_ACCEPT_TOKEN_NUM, 6)
    assert rows_of(moves) == [(72, 73, False), (74, 75, False)]


@settings(max_examples=200, deadline=None)
@given(st.data())
def test_a_request_is_chained_exactly_where_its_moves_overlap(data: st.DataObject) -> None:
    tree = data.draw(st.integers(1, 12))
    paths = data.draw(
        st.lists(st.sets(st.integers(1, tree - 1) if tree > 1 else st.nothing()), max_size=4)
    )
    nodes = [[0, *sorted(path)] for path in paths]
    width = max(map(len, nodes), default=1) + data.draw(st.integers(0, 2))
    index = np.full((len(nodes), width), -1)
    for request, path in enumerate(nodes):
        index[request, : len(path)] = np.array(path) + request * tree
    windows = np.random.default_rng(0).permutation(1000)[: len(nodes) * tree]
    accepted = np.array([len(path) - 1 for path in nodes], int)
    moves = accepted_path_moves(windows, index, accepted, tree)
    at = 0
    for request, path in enumerate(nodes):
        wanted = [
            (int(windows[request * tree + node]), int(windows[request * tree + place]))
            for place, node in enumerate(path)
            if node != place
        ]
        chained = bool({s for s, _ in wanted} & {d for _, d in wanted})
        assert rows_of(moves)[at : at + len(wanted)] == [(s, d, chained) for s, d in wanted]
        at += len(wanted)
    assert at == len(moves.src)


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(ORDERS), st.lists(st.tuples(st.booleans(), st.integers(0, 7)), max_size=40))
def test_free_lists_hand_out_each_slot_once_in_their_order(
    order: Any, calls: list[tuple[bool, int]]
) -> None:
    free = FreeList(20, order)
    model = list(range(1, 20))  # what each order promises, in plain lists
    waiting: list[int] = []
    out: list[int] = []
    for take, number in calls:
        if take:
            number = min(number, len(free))
            if order == "sorted" and number > len(model):
                model, waiting = sorted(model + waiting), []
            elif order == "fifo":
                model, waiting = model + waiting, []
            taken = free.allocate(number).tolist()
            assert taken == model[:number]
            model = model[number:]
            out += taken
        else:
            back, out = out[:number], out[number:]
            free.release(np.array(back, np.int64))
            if order == "lifo":
                model = back + model
            else:
                waiting += back
        assert sorted(free.slots().tolist()) == sorted(model + waiting)
        assert len(free) == len(model) + len(waiting)
    with pytest.raises(ArgumentError, match="slots are free"):
        free.allocate(len(free) + 1)


@pytest.mark.parametrize("order", ORDERS)
def test_a_churned_pool_loses_no_slot_and_its_lists_are_disjoint(order: Any) -> None:
    pool = ChurnedPool(4000, free_list=order, seed=5)
    pool.churn(3.0)
    chained = moved = 0
    for _ in range(30):
        batch = pool.step()
        verdict = judge(batch.src, batch.dst, batch.count, batch.num_slots)
        assert verdict.tolist() == [LEGAL, -1, int(batch.chained_rows > 0), 0]
        assert_partition(pool)
        moved += batch.count
        chained += batch.chained_rows
        assert (batch.chained_rows == 0) == (batch.chained_requests == 0)
    assert moved > 0
    assert chained > 0, "paths that chain are common"
    assert pool.running > 1
    assert pool.live / pool.num_slots > 0.6

    part = pool.compact(max_rows=10)
    assert part.count == 10
    assert_disjoint(part)
    assert_partition(pool)
    while pool.compact(max_rows=64).count:
        assert_partition(pool)
    assert sorted(pool.live_slots().tolist()) == list(range(1, pool.live + 1))
    pool.step()
    assert_partition(pool)


def test_compaction_moves_what_the_tables_then_say() -> None:
    pool = ChurnedPool(2000, seed=1)
    pool.churn(2.0)
    held = np.zeros(2000, np.int64)
    before = pool.live_slots()
    held[before] = np.arange(len(before))  # a row of its own for every token, in token order
    batch = pool.compact()
    held[batch.dst] = held[batch.src]
    np.testing.assert_array_equal(held[pool.live_slots()], np.arange(len(before)))
    assert (batch.src > batch.dst).all()


@pytest.mark.parametrize("budget", [None, 500])
@pytest.mark.parametrize("order", ["fifo", "kept"])
def test_a_churned_pool_is_made_contiguous(order: Any, budget: int | None) -> None:
    pool = ChurnedPool(4000, free_list=order, seed=5)
    pool.churn(3.0)
    while (batch := pool.make_contiguous(budget)).count:
        assert judge(batch.src, batch.dst, batch.count, 4000)[0] == LEGAL
        assert_partition(pool)
        assert budget is None or batch.count <= budget
    assert pool.live_slots().tolist() == list(range(1, pool.live + 1))
    pool.step()
    assert_partition(pool)


def test_a_commit_by_table_keeps_the_slots_of_the_path() -> None:
    by_rows, by_table = (
        ChurnedPool(2000, tree_tokens=8, seed=2, commit=way) for way in ("rows", "table")
    )
    for pool in (by_rows, by_table):
        pool.churn(2.0)
        assert_partition(pool)
    # the same paths, other slots: what stays of a window is its front, or what was accepted
    assert by_rows.running == by_table.running
    assert by_rows.requests()[1].tolist() == by_table.requests()[1].tolist()
    runs = [int((np.diff(pool.live_slots()) != 1).sum()) for pool in (by_rows, by_table)]
    assert runs[0] < runs[1]
    with pytest.raises(ArgumentError, match="commit='page'"):
        ChurnedPool(2000, commit="page")  # type: ignore[arg-type]


def test_a_list_that_is_kept_sorted_gives_the_lowest_slots() -> None:
    free = FreeList(10, "kept")
    free.allocate(6)
    free.release(np.array([4, 2]))
    assert free.peek(3).tolist() == [2, 4, 7]
    assert free.allocate(3).tolist() == [2, 4, 7]


def test_free_list_orders_age_differently() -> None:
    first = {}
    for order in ORDERS:
        pool = ChurnedPool(3000, free_list=order, seed=2)  # type: ignore[arg-type]
        pool.churn(4.0)
        first[order] = pool.live_slots().tolist()
    assert first["fifo"] != first["lifo"] != first["sorted"] != first["fifo"]


def test_a_pool_that_runs_out_retracts_the_youngest() -> None:
    long = RequestLengths(np.array([40]), np.array([10_000]), "made up")
    pool = ChurnedPool(400, lengths=long, tree_tokens=8, occupancy=1.0, max_running=6)
    for _ in range(200):
        pool.step()
        assert_partition(pool)
    assert pool.retracted > 0


def test_a_tree_of_one_node_moves_nothing() -> None:
    pool = ChurnedPool(500, tree_tokens=1)
    for _ in range(20):
        batch = pool.step()
        assert (batch.count, batch.chained_rows) == (0, 0)


def test_the_same_seed_gives_the_same_lists() -> None:
    first, again = (list(real_batches(2048, steps=2, seed=7)) for _ in range(2))
    other = list(real_batches(2048, steps=2, seed=8))
    assert [batch.kind for batch in first] == [
        f"{what}, {order}"
        for order in ORDERS
        for what in ("accepted paths", "accepted paths", "compaction")
    ]
    for one, two in zip(first, again, strict=True):
        np.testing.assert_array_equal(one.src, two.src)
        np.testing.assert_array_equal(one.dst, two.dst)
    assert any(one.src.tolist() != two.src.tolist() for one, two in zip(first, other, strict=True))


def test_a_large_pool_is_churned() -> None:
    pool = ChurnedPool(200_000)
    pool.churn(3.0)
    assert pool.compact().count > 1000


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        ({"tree_tokens": 0}, "tree_tokens=0"),
        ({"num_slots": 100}, "num_slots=100"),
        ({"occupancy": 0.0}, "occupancy=0.0"),
        ({"skip": 1.0}, "acceptance, skip"),
        ({"max_running": 0}, "max_running=0"),
        ({"free_list": "random"}, "free_list='random'"),
        (
            {"lengths": RequestLengths(np.zeros(0, int), np.zeros(0, int), "nothing")},
            "holds no request",
        ),
    ],
)
def test_pools_that_make_no_sense_are_refused(wrong: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        ChurnedPool(**{"num_slots": 1000, **wrong})


def test_padding_adds_only_a_tail() -> None:
    batch = RelocationBatch(10, np.array([1, 2]), np.array([3, 4]), 2)
    padded = batch.padded(100, seed=1)
    assert (padded.capacity, padded.count) == (100, 2)
    assert padded.src[:2].tolist() == [1, 2]
    assert padded.dst[:2].tolist() == [3, 4]
    tail = padded.src[2:]
    assert ((tail < 0) | (tail >= 10)).any()
    assert ((tail >= 0) & (tail < 10)).any()
    assert judge(padded.src, padded.dst, padded.count, 10)[0] == LEGAL
    assert repr(padded).startswith(
        "RelocationBatch(drawn: 2 of 100 rows [1->3, 2->4], num_slots=10"
    )
    with pytest.raises(ArgumentError, match="capacity=1"):
        batch.padded(1)
