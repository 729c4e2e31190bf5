"""What the strategies for holders of slots draw."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import find, given
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

from cuverify.reference.commit import commit
from cuverify.reference.defrag import compact
from cuverify.strategies import (
    commit_batches,
    defrag_batches,
    drawn,
    examples,
    slot_chains,
)


def commit_code(batch: Any) -> int:
    done = commit(
        batch.accept_index, batch.accept_token_num, batch.qo_indptr, batch.out_cache_loc,
        batch.seq_lens, batch.req_pool_indices, batch.req_to_token,
    )  # fmt: skip
    return int(done.status[0])


def defrag_code(batch: Any) -> int:
    done = compact(
        batch.req_to_token, batch.req_pool_indices, batch.held_lens, batch.held, batch.held_count,
        batch.num_slots, batch.budget,
    )  # fmt: skip
    return int(done.status[0])


@examples(60)
@given(
    right=commit_batches(min_depth=2, max_depth=5, ways=["rows"]),
    wrong=commit_batches(faulty=True),
)
def test_paths_keep_their_bounds(right: Any, wrong: Any) -> None:
    assert right.way == "rows" and 2 <= right.accept_index.shape[1] <= 5
    assert commit_code(right) == 0
    assert commit_code(wrong) != 0


@examples(60)
@given(
    right=defrag_batches(min_budget=3, max_budget=8, max_seq_len=40),
    wrong=defrag_batches(faulty=True, max_seq_len=40),
)
def test_holders_keep_their_bounds(right: Any, wrong: Any) -> None:
    assert 3 <= right.budget <= 8
    assert (defrag_code(right), defrag_code(wrong)) == (0, 1)


@examples(60)
@given(pool=slot_chains(min_slots=4, max_slots=12, max_chains=3))
def test_chains_hold_each_slot_once(pool: Any) -> None:
    slots, chains, pinned = pool
    assert 4 <= slots <= 12 and 1 <= len(chains) <= 3
    live = np.concatenate(chains)
    assert len(np.unique(live)) == len(live)
    assert not np.isin(0, np.concatenate([live, pinned]))
    assert max([*live, *pinned, 0]) < slots


def test_what_is_drawn_often() -> None:
    paths = drawn(commit_batches(), 150)
    taken = [int(n) for b in paths for n in b.accept_token_num[b.req_pool_indices > 0]]
    assert min(np.mean(np.array(taken) == 0), np.mean(np.array(taken) > 1)) > 0.1
    assert {commit_code(batch) for batch in drawn(commit_batches(faulty=True), 150)} == {
        1,
        2,
        3,
        4,
        5,
    }
    pools = drawn(slot_chains(), 150)
    full = [sum(map(len, chains)) == slots - 1 for slots, chains, _ in pools]
    ordered = [(np.diff(np.concatenate(chains)) == 1).all() for _, chains, _ in pools]
    pinned = [len(pins) > 0 for _, _, pins in pools]
    assert all(0.1 < np.mean(part) < 0.9 for part in (full, ordered, pinned))


def test_chains_shrink_to_slots_in_order() -> None:
    slots, chains, pinned = find(slot_chains(), lambda pool: sum(map(len, pool[1])) > 2)
    assert (slots, np.concatenate(chains).tolist(), len(pinned)) == (4, [1, 2, 3], 0)


@pytest.mark.parametrize(
    ("strategy", "said"),
    [
        (commit_batches(min_depth=0), "min_depth=0"),
        (commit_batches(min_depth=3, max_depth=2), "max_depth=2"),
        (commit_batches(ways=["pages"]), "ways"),
        (defrag_batches(min_budget=0), "min_budget=0"),
        (slot_chains(min_slots=1), "min_slots=1"),
        (slot_chains(max_chains=0), "max_chains=0"),
    ],
)
def test_bounds_that_make_no_sense_are_refused(strategy: st.SearchStrategy[Any], said: str) -> None:
    with pytest.raises(InvalidArgument, match=said):
        find(strategy, lambda _: True)
