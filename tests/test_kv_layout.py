"""KV layouts: placed and churned ones, what does not fit together refused by name, measures."""

from __future__ import annotations

import dataclasses
import doctest
import functools
import itertools
import xml.etree.ElementTree as ElementTree
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cuverify import kv_layout as kv_module
from cuverify.errors import ArgumentError
from cuverify.kv_layout import (
    DUMMY,
    FREE,
    PAGE_SIZES,
    SHARED,
    KvLayout,
    Placement,
    before_and_after_svg,
)
from cuverify.strategies import kv_layouts
from cuverify.workload import ChurnedPool, FreeList, FreeOrder, RequestLengths

SVG = "{http://www.w3.org/2000/svg}"
PLACEMENTS: tuple[Placement, ...] = ("contiguous", "scattered", "sorted", "holes")
ORDERS: tuple[FreeOrder, ...] = ("fifo", "lifo", "sorted")


@st.composite
def builds(draw: st.DrawFn) -> dict[str, Any]:
    """Draw arguments of `KvLayout.build` that are legal."""
    page_size = draw(st.sampled_from(PAGE_SIZES))
    shared = page_size * draw(st.integers(0, 3 if page_size == 1 else 1))
    lens = draw(st.lists(st.integers(0, 130), max_size=5))
    lens = [shared + length for length in lens]
    trees = [draw(st.integers(1, 70)) for _ in lens]
    return {
        "seq_lens": lens,
        "tree_tokens": trees,
        "page_size": page_size,
        "placement": draw(st.sampled_from(PLACEMENTS)),
        "shared_prefix": shared if lens else 0,
        "padded": draw(st.integers(0, 2)),
        "stale_tail": draw(st.booleans()),
        "rng": draw(st.integers(0, 99)),
    }


def requests_of(layout: KvLayout) -> list[list[int]]:
    """Return the slots of each request, prefix and drafts, read from the table by hand."""
    return [
        layout.req_to_token[row, : length + tree].tolist()
        for row, length, tree in zip(
            layout.req_pool_indices.tolist(),
            layout.seq_lens.tolist(),
            layout.tree_tokens.tolist(),
            strict=True,
        )
    ]


@given(builds())
@example({"seq_lens": [], "tree_tokens": []})
@example({"seq_lens": [], "tree_tokens": 1, "padded": 3, "placement": "holes"})
@example({"seq_lens": [0], "tree_tokens": [1], "placement": "scattered"})
@example({"seq_lens": [16, 32], "tree_tokens": [16, 1], "page_size": 16, "shared_prefix": 16})
def test_a_layout_is_what_a_server_would_hand_over(build: dict[str, Any]) -> None:
    layout = KvLayout.build(**build)
    size, padded = build.get("page_size", 1), build.get("padded", 0)
    real = len(build["seq_lens"])
    shared = build.get("shared_prefix", 0)
    assert (layout.num_requests, layout.num_real, layout.padded) == (real + padded, real, padded)
    assert layout.seq_lens.tolist() == [*build["seq_lens"], *[1] * padded]
    assert layout.num_tokens == layout.tree_tokens.sum() == len(layout.out_cache_loc)
    assert layout.req_to_token.dtype == np.int32
    slots = requests_of(layout)

    # slots of real requests: in range, on their pages, and nobody else's but for what is shared
    drafts: list[int] = []
    for b in range(real):
        assert all(size <= slot < layout.num_slots for slot in slots[b])
        assert all(slot % size == token % size for token, slot in enumerate(slots[b]))
        assert all(
            slot // size == slots[b][token - token % size] // size
            for token, slot in enumerate(slots[b])
        )
        assert slots[b][:shared] == slots[0][:shared]
        drafts += slots[b][layout.seq_lens[b] :]
    own = [slot for request in slots[:real] for slot in request[shared:]]
    if real:
        own += slots[0][:shared]
    assert len(set(own)) == len(own)
    pages = {slot // size for slot in own}
    assert sum(-(-(len(s) - shared) // size) for s in slots[:real]) == len(pages) - (
        shared // size if real else 0
    ), "no page belongs to two requests"

    # padding: one token in slot 0 of row 0, all drafts in slot 0
    assert layout.req_pool_indices[real:].tolist() == [0] * padded
    rows = layout.req_pool_indices[:real].tolist()
    assert len(set(rows)) == real and 0 not in rows
    assert not layout.req_to_token[0, : 1 + max(layout.tree_tokens[real:], default=0)].any()
    assert layout.out_cache_loc.tolist() == drafts + [0] * int(layout.tree_tokens[real:].sum())

    # lists
    indptr = [0]
    indices: list[int] = []
    queries = [0]
    for b in range(real + padded):
        prefix = slots[b][: layout.seq_lens[b]] if b < real else [0]
        indices += prefix
        indptr.append(len(indices))
        queries.append(queries[-1] + int(layout.tree_tokens[b]))
        assert layout.prefix_slots(b).tolist() == prefix
        assert (
            layout.draft_slots(b).tolist()
            == layout.out_cache_loc[queries[-2] : queries[-1]].tolist()
        )
    assert layout.kv_indptr().tolist() == indptr and layout.kv_indptr().dtype == np.int32
    for dtype in (np.int32, np.int64):
        assert layout.kv_indices(dtype).tolist() == indices
        assert layout.qo_indptr(dtype).tolist() == queries
        assert layout.kv_indices(dtype).dtype == layout.qo_indptr(dtype).dtype == dtype


@given(builds())
def test_the_same_seed_gives_the_same_layout(build: dict[str, Any]) -> None:
    first, again = KvLayout.build(**build), KvLayout.build(**build)
    for field in dataclasses.fields(KvLayout):
        np.testing.assert_array_equal(getattr(first, field.name), getattr(again, field.name))


@given(builds(), st.booleans())
def test_measures_count_what_they_say(build: dict[str, Any], with_drafts: bool) -> None:
    layout = KvLayout.build(**build)
    found = layout.fragmentation(drafts=with_drafts)
    runs, forward, backward = [], [], []
    for b, slots in enumerate(requests_of(layout)):
        both = with_drafts and b < layout.num_real
        held = slots if both else slots[: layout.seq_lens[b]]
        steps = [after - before for before, after in itertools.pairwise(held)]
        runs.append(sum(step != 1 for step in steps) + bool(held))
        forward += [step - 1 for step in steps if step > 1]
        backward += [max(-step - 1, 1) for step in steps if step < 0]
        assert found.tokens[b] == len(held)
    assert found.runs.tolist() == runs
    edges = found.gap_edges.tolist()
    assert edges == [2**k for k in range(len(edges))]
    for gaps, counts in ((forward, found.gaps_forward), (backward, found.gaps_backward)):
        assert counts.tolist() == [
            sum(low <= gap < high for gap in gaps) for low, high in itertools.pairwise(edges)
        ]
    assert found.gaps_forward.sum() + found.gaps_backward.sum() == len(forward) + len(backward)
    np.testing.assert_allclose(
        found.bytes_per_run(1152) * np.maximum(found.runs, 1), found.tokens * 1152.0
    )


@given(builds())
def test_every_slot_has_one_owner(build: dict[str, Any]) -> None:
    layout = KvLayout.build(**build)
    owner, draft = layout.owners()
    shared = build["shared_prefix"]
    slots = requests_of(layout)
    for b in range(layout.num_real):
        length = layout.seq_lens[b]
        assert set(owner[slots[b][shared:]]) == {b}
        assert not draft[slots[b][:length]].any() and draft[slots[b][length:]].all()
    if layout.num_real > 1 and shared:
        assert set(owner[slots[0][:shared]]) == {SHARED}
    held = {slot for request in slots[: layout.num_real] for slot in request}
    assert set(np.flatnonzero(owner == FREE).tolist()) == set(range(1, layout.num_slots)) - held
    assert owner[0] == DUMMY and np.count_nonzero(owner == DUMMY) == 1


def test_one_contiguous_request_is_the_identity() -> None:
    layout = KvLayout.build(seq_lens=[5], tree_tokens=[3], stale_tail=False)
    assert layout.req_to_token.tolist() == [[0] * 8, list(range(1, 9))]
    assert (layout.num_slots, layout.fragmentation(drafts=True).runs.tolist()) == (9, [1])


def test_placements_differ_as_they_say() -> None:
    def runs(placement: Placement, page_size: int = 1) -> tuple[int, KvLayout]:
        layout = KvLayout.build(
            seq_lens=[2000, 3000], tree_tokens=64, placement=placement, page_size=page_size, rng=4
        )
        return int(layout.fragmentation().runs.sum()), layout

    found, layout = runs("contiguous")
    assert found == 2 and layout.num_slots == 5000 + 128 + 1
    found, layout = runs("scattered")
    assert found > 4900 and layout.num_slots == 2 * 5128 + 1
    assert layout.fragmentation().gaps_backward.sum() > 2000
    found, layout = runs("sorted")
    assert 2000 < found < 4000
    assert all((np.diff(slots) > 0).all() for slots in requests_of(layout)[:2])
    found, layout = runs("holes")
    assert 300 < found < 1000
    free = np.flatnonzero(layout.owners()[0] == FREE)
    assert (np.diff(free) > 1).sum() > 300, "free slots lie between the runs"
    assert 5000 / 64 / 2 < runs("scattered", page_size=64)[0] <= 5000 / 64 + 2


def test_holes_vanish_where_there_is_no_room_for_them() -> None:
    layout = KvLayout.build(seq_lens=[100], tree_tokens=20, num_slots=121, placement="holes", rng=2)
    assert sorted(requests_of(layout)[0]) == list(range(1, 121))
    assert layout.fragmentation().runs[0] > 1


def test_stale_numbers_stand_behind_every_request() -> None:
    build: dict[str, Any] = {"seq_lens": [40, 3, 0], "tree_tokens": [5, 2, 1], "padded": 1}
    layout = KvLayout.build(**build, rng=1)
    used = np.zeros(layout.req_to_token.shape, bool)
    used[0, : 1 + layout.tree_tokens[-1]] = True
    for b in range(3):
        used[layout.req_pool_indices[b], : layout.seq_lens[b] + layout.tree_tokens[b]] = True
    stale = layout.req_to_token[~used]
    legal = (stale >= 0) & (stale < layout.num_slots)
    assert 0.5 < legal.mean() < 0.9
    edges = {-1, layout.num_slots, 2**31 - 1, -(2**31)}
    assert set(stale[~legal].tolist()) == edges
    clean = KvLayout.build(**build, stale_tail=False).req_to_token
    assert clean.shape == (4, 45) and np.count_nonzero(clean) == 45 + 5 + 1


def test_layouts_are_values() -> None:
    layout = KvLayout.build(seq_lens=[4], tree_tokens=2)
    for name in ("req_to_token", "seq_lens", "tree_tokens", "req_pool_indices", "out_cache_loc"):
        with pytest.raises(ValueError, match="read-only"):
            getattr(layout, name)[...] = 0
    table = layout.req_to_token.copy()
    other = dataclasses.replace(layout, req_to_token=table)
    table[:] = 0
    assert other.prefix_slots(0).tolist() == [1, 2, 3, 4]
    assert repr(layout) == (
        "KvLayout(1 requests, 0 of them padded, seq_lens=[4], tree_tokens=[2], "
        "num_slots=7, page_size=1)"
    )


# Churned pools


@functools.cache
def lengths() -> RequestLengths:
    rng = np.random.default_rng(3)
    return RequestLengths(rng.integers(1, 300, 400), rng.integers(5, 60, 400), "drawn")


@pytest.mark.parametrize("order", ORDERS)
def test_a_churned_pool_is_taken_as_it_lies(order: FreeOrder) -> None:
    pool = ChurnedPool(4000, lengths=lengths(), tree_tokens=8, free_list=order, seed=2)
    pool.churn()
    free, live = len(pool.free), pool.live_slots()
    layout = KvLayout.from_pool(pool, padded=2)
    assert layout.num_real == pool.running > 5 and layout.padded == 2
    assert (layout.num_slots, layout.page_size) == (4000, 1)
    np.testing.assert_array_equal(layout.kv_indices(np.int64), [*live, 0, 0])
    assert layout.tree_tokens.tolist() == [8] * (pool.running + 2)
    # the pool is as it was, and its next windows are the drafts
    assert len(pool.free) == free
    np.testing.assert_array_equal(pool.live_slots(), live)
    drafts = layout.out_cache_loc[: 8 * pool.running]
    np.testing.assert_array_equal(drafts, pool.free.allocate(8 * pool.running))
    # what earlier requests left behind is still there
    rows, widths = pool.requests()
    old, table = pool.table(), layout.req_to_token
    left = sum(
        int((table[1 + row, width + 8 :] == old[row, width + 8 : table.shape[1]]).sum())
        for row, width in zip(rows, widths, strict=True)
    )
    assert left > 100
    runs = layout.fragmentation().runs[: pool.running]
    assert runs.sum() > 2 * pool.running, "a pool that aged is broken up"


def test_compaction_mends_a_pool() -> None:
    pool = ChurnedPool(4000, lengths=lengths(), tree_tokens=8, free_list="fifo", seed=2)
    pool.churn()
    highest = int(KvLayout.from_pool(pool).kv_indices().max())
    pool.compact()
    layout = KvLayout.from_pool(pool)
    assert layout.kv_indices().max() == pool.live < highest
    assert layout.out_cache_loc.tolist() == list(
        range(pool.live + 1, pool.live + 1 + layout.num_tokens)
    )


def test_part_of_a_pool() -> None:
    pool = ChurnedPool(4000, lengths=lengths(), tree_tokens=8, seed=1)
    pool.churn(1.0)
    layout = KvLayout.from_pool(
        pool, tree_tokens=[1, 30, 2, 5], max_requests=3, padded=1, stale_tail=False
    )
    assert layout.tree_tokens.tolist() == [1, 30, 2, 5] and layout.num_real == 3
    _, widths = pool.requests()
    assert layout.seq_lens.tolist() == [*widths[:3], 1]
    assert layout.req_to_token.shape[1] == max(widths[:3] + np.array([1, 30, 2]))
    used = np.count_nonzero(layout.req_to_token)
    assert used == widths[:3].sum() + 33, "without stale numbers the rest is zeros"
    assert KvLayout.from_pool(pool, max_requests=0).num_requests == 0
    with pytest.raises(ArgumentError, match=r"tree_tokens=\d+: the pool has \d+ free slots"):
        KvLayout.from_pool(pool, tree_tokens=1000)
    with pytest.raises(ArgumentError, match="max_requests=-1: must be at least 0"):
        KvLayout.from_pool(pool, max_requests=-1)


@given(st.sampled_from(ORDERS), st.lists(st.integers(0, 12), max_size=8))
def test_peek_shows_what_allocate_gives(order: FreeOrder, sizes: list[int]) -> None:
    free = FreeList(40, order)
    out: list[np.ndarray[Any, Any]] = []
    for size in sizes:
        if size > len(free):
            free.release(out.pop(0))
            continue
        shown = free.peek(size)
        out.append(free.allocate(size))
        np.testing.assert_array_equal(shown, out[-1])
        shown[:] = 0  # a copy
        if size % 3 == 0:
            free.release(out.pop())
    with pytest.raises(ArgumentError, match="number=41"):
        free.peek(41)


# What does not fit together


@pytest.mark.parametrize(
    ("build", "said"),
    [
        ({"seq_lens": [3, -1]}, "seq_lens=-1: request 1: a prefix cannot have a negative length"),
        ({"seq_lens": [[3]]}, r"seq_lens=\[1, 1\]: must be a flat list"),
        ({"seq_lens": [3.5]}, "seq_lens='float64': must hold integers"),
        ({"tree_tokens": [1, 0]}, "tree_tokens=0: request 1: a tree has at least its root"),
        ({"tree_tokens": -4}, "tree_tokens=-4: request 0"),
        ({"tree_tokens": [1, 2, 3]}, r"tree_tokens=\[1, 2, 3\]: need one number for each of 2"),
        ({"tree_tokens": 1.5}, "tree_tokens='float64'"),
        ({"page_size": 8}, "page_size=8: must be one of"),
        ({"page_size": 16, "num_slots": 100}, "num_slots=100: must be whole pages of 16"),
        ({"num_slots": 11}, "num_slots=11: 11 pages of 1 and the dummy page take 12 slots"),
        ({"page_size": 16, "num_slots": 32}, "2 pages of 16 and the dummy page take 48 slots"),
        ({"num_slots": 0}, "num_slots=0"),
        ({"placement": "tidy"}, "placement='tidy': unknown"),
        ({"shared_prefix": 4}, "shared_prefix=4: the shortest prefix has 3 tokens"),
        ({"shared_prefix": -1}, "shared_prefix=-1: must be at least 0"),
        ({"seq_lens": [20, 20], "page_size": 16, "shared_prefix": 8}, "pages of 16 are shared as a whole"),
        ({"seq_lens": [], "tree_tokens": [], "shared_prefix": 1}, "the shortest prefix has 0 tokens"),
        ({"padded": -1}, "padded=-1: must be at least 0"),
    ],
)  # fmt: skip
def test_what_cannot_be_placed(build: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        KvLayout.build(**{"seq_lens": [3, 4], "tree_tokens": 2, **build})


def changed(**parts: Any) -> KvLayout:
    """Return a layout of two real requests and a padded one, with some parts replaced.

    The rows are 0 | 1 2 3 | 4 5 and 0 | 6 7 | 8: prefix and drafts of the requests.
    """
    layout = KvLayout.build(seq_lens=[3, 2], tree_tokens=[2, 1], padded=1, stale_tail=False)
    for name, value in parts.items():
        if isinstance(value, dict):
            array = np.array(getattr(layout, name))
            for at, item in value.items():
                array[at] = item
            parts[name] = array
    return dataclasses.replace(layout, **parts)


@pytest.mark.parametrize(
    ("parts", "said"),
    [
        ({"req_to_token": {(1, 1): 9}}, "req_to_token=9: request 0, token 1: slots out of range"),
        ({"req_to_token": {(1, 1): -1}}, "req_to_token=-1: request 0, token 1: slots out of range"),
        ({"req_to_token": {(2, 0): 0}}, "req_to_token=0: request 1, token 0: slots out of range; the pool has 9, of which the first 1 are padding's"),
        ({"req_to_token": {(1, 2): 1}}, "req_to_token=1: request 0: tokens 0 and 2 have the same slot"),
        ({"req_to_token": {(2, 1): 5}}, "out_cache_loc=5: a draft of request 0 has the slot of token 1 of request 1"),
        ({"req_to_token": {(2, 2): 5}, "out_cache_loc": {2: 5}}, "out_cache_loc=5: request 1, draft 0: a draft of request 0 has the same slot"),
        ({"req_to_token": {(0, 0): 4}}, "req_to_token=4: row 0 is for padding"),
        ({"out_cache_loc": {1: 7}}, "out_cache_loc=7: request 0, draft 1: the table has slot 5"),
        ({"out_cache_loc": {3: 7}}, "out_cache_loc=7: draft 3 is padded: slot 0"),
        ({"out_cache_loc": [4, 5, 8]}, "out_cache_loc=3: need 5 slots, one a draft"),
        ({"seq_lens": {0: -1}}, "seq_lens=-1: request 0: a prefix cannot have a negative length"),
        ({"seq_lens": {0: 4}}, "req_to_token=.*request 0 has 6 tokens, a row has room for 5"),
        ({"seq_lens": {2: 2}}, "seq_lens=2: request 2 is padded: it must be 1"),
        ({"seq_lens": [3.0, 2.0, 1.0]}, "seq_lens='float64': must hold integers"),
        ({"tree_tokens": {1: 0}}, "tree_tokens=0: request 1: a tree has at least its root"),
        ({"tree_tokens": [2, 1]}, r"tree_tokens=\[2, 1\]: need one for each of 3 requests"),
        ({"req_pool_indices": {1: 3}}, "req_pool_indices=3: request 1: real requests have rows 1 to 2"),
        ({"req_pool_indices": {1: 0}}, "req_pool_indices=0: request 1: real requests have rows"),
        ({"req_pool_indices": {1: 1}}, "req_pool_indices=1: requests 0 and 1 have the same row"),
        ({"req_pool_indices": {2: 1}}, "req_pool_indices=1: request 2 is padded: it has row 0"),
        ({"req_pool_indices": [1]}, r"req_pool_indices=\[1\]: need one for each of 3"),
        ({"padded": 4}, "padded=4: must lie in 0 to 3"),
        ({"padded": -1}, "padded=-1"),
        ({"page_size": 3}, "page_size=3: must be one of"),
        ({"page_size": 16}, "num_slots=9: must be whole pages of 16"),
        ({"page_size": 16, "num_slots": 16}, "request 0, token 0: slots out of range; the pool has 16, of which the first 16"),
        ({"num_slots": 0}, "num_slots=0: must be whole pages"),
        ({"num_slots": 2**31}, "num_slots=2147483648"),
        ({"req_to_token": np.zeros(5, np.int32)}, r"req_to_token=\[5\]: must be a table"),
        ({"req_to_token": np.zeros((3, 5), np.float32)}, "req_to_token='float32': must hold integers"),
    ],
)  # fmt: skip
def test_what_does_not_fit_together(parts: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        changed(**parts)


@pytest.mark.parametrize(
    ("slots", "said"),
    [
        ([*range(17, 33), 48], "req_to_token=17: request 0, token 0: off its page of 16 slots"),
        ([*range(16, 32), 33], "req_to_token=33: request 0, token 16: off its page"),
        ([*range(16, 24), *range(40, 48), 32], "req_to_token=40: request 0, token 8: off its page"),
    ],
)
def test_slots_off_their_page(slots: list[int], said: str) -> None:
    layout = KvLayout.build(
        seq_lens=[16], tree_tokens=1, page_size=16, num_slots=64, stale_tail=False
    )
    table = layout.req_to_token.copy()
    table[1] = slots
    with pytest.raises(ArgumentError, match=said):
        dataclasses.replace(layout, req_to_token=table, out_cache_loc=table[1, 16:])


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda k: k.prefix_slots(3), "request=3: the batch has requests 0 to 2"),
        (lambda k: k.draft_slots(-1), "request=-1"),
        (lambda k: k.kv_indices(np.int16), "dtype='int16': indices are int32 or int64"),
        (lambda k: k.qo_indptr(np.float32), "dtype='float32'"),
        (lambda k: k.fragmentation().bytes_per_run(0), "row_bytes=0"),
        (lambda k: k.to_text(columns=0), "columns, max_rows=0"),
        (lambda k: k._indptr(np.array([2**31]), np.int32, "seq_lens"), "seq_lens=2147483648: the sum does not fit into int32"),
    ],
)  # fmt: skip
def test_questions_that_make_no_sense(call: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        call(changed())


# Pictures


def test_text_maps_the_pool() -> None:
    layout = KvLayout.build(
        seq_lens=[4, 3], tree_tokens=[2, 1], num_slots=16, shared_prefix=2, padded=1
    )
    lines = layout.to_text(columns=8).splitlines()
    assert lines[0] == repr(layout)
    assert lines[1:3] == ["        0  0##aaAAb", "        8  B......."]
    assert lines[3:] == [
        "        a  prefix 4, runs 1, drafts 2",
        "        b  prefix 3, runs 2, drafts 1",
    ]
    small = layout.to_text(columns=4, max_rows=1).splitlines()
    assert small[1:3] == ["4 slots a character", "        0  ***."]
    many = KvLayout.build(seq_lens=[1] * 30, tree_tokens=1).to_text()
    assert many.endswith("and 4 more requests")


@pytest.mark.parametrize("requests", [0, 1, 2, 30])
@pytest.mark.parametrize("num_slots", [200, 5000])
def test_svg_is_well_formed(requests: int, num_slots: int) -> None:
    layout = KvLayout.build(
        seq_lens=[3] * requests, tree_tokens=2, num_slots=num_slots, placement="holes",
        shared_prefix=2 if requests else 0, padded=1,
    )  # fmt: skip
    root = ElementTree.fromstring(layout.to_svg())
    assert root.tag == f"{SVG}svg" and layout._repr_svg_() == layout.to_svg()
    cells = [rect for rect in root.findall(f"{SVG}rect") if rect.find(f"{SVG}title") is not None]
    each = 1 if num_slots == 200 else 3
    assert len(cells) == -(-num_slots // each)
    titles = [cell.findtext(f"{SVG}title") for cell in cells]
    assert titles[0] == ("slot 0: dummy" if each == 1 else titles[0])
    if each == 1:
        drafts = [cell.get("stroke") != "none" for cell in cells]
        assert sum(drafts) == sum("drafts" in str(title) for title in titles) == 2 * requests
        assert sum("shared" in str(title) for title in titles) == (2 if requests > 1 else 0)
    width = float(root.get("width", ""))
    assert all(
        float(rect.get("x", "0")) + float(rect.get("width", "0")) <= width
        for rect in root.findall(f"{SVG}rect")
    )


def test_examples_in_docstrings() -> None:
    found = doctest.testmod(kv_module)
    assert found.attempted > 0 and found.failed == 0


def test_run_lengths_and_units_written_out() -> None:
    table = np.array([[0] * 8, [4, 5, 6, 9, 11, 10, 3, 0]], np.int32)
    layout = KvLayout(
        num_slots=12, page_size=1, req_to_token=table, req_pool_indices=np.array([1]),
        seq_lens=np.array([6]), tree_tokens=np.array([1]), out_cache_loc=np.array([3]),
    )  # fmt: skip
    found = layout.fragmentation()
    # runs 4 5 6, 9, 11, 10
    assert (found.run_edges.tolist(), found.run_lengths.tolist()) == ([1, 2, 4], [3, 1])
    # rows of 48 bytes: slots 4 5 6 are bytes 192 to 336, slots 9 to 11 bytes 432 to 576
    assert layout.units_per_tile(48, 32, tile=3) == ((336 - 192 + 31) // 32 + (576 - 416) // 32) / 2
    assert layout.units_per_tile(48, 2048, tile=3) == 1.0
    assert layout.units_per_tile(48, 32, tile=7) == 0.0


@given(layout=kv_layouts(), tile=st.sampled_from([1, 4, 16]), unit=st.sampled_from([32, 100, 2048]))
def test_runs_and_units_counted_by_hand(layout: KvLayout, tile: int, unit: int) -> None:
    found = layout.fragmentation()
    runs: list[int] = []
    tiles: list[int] = []
    for b in range(layout.num_requests):
        slots = layout.prefix_slots(b).tolist()
        for at, slot in enumerate(slots):
            if at and slot == slots[at - 1] + 1:
                runs[-1] += 1
            else:
                runs.append(1)
        for at in range(0, len(slots) - tile + 1, tile) if b < layout.num_real else ():
            rows = slots[at : at + tile]
            tiles.append(
                len({byte // unit for s in rows for byte in range(144 * s, 144 * s + 144)})
            )
    in_bins = np.histogram(runs, found.run_edges)[0] if runs else np.zeros(0)
    assert (int(found.runs.sum()), found.run_lengths.tolist()) == (len(runs), in_bins.tolist())
    mean = float(np.mean(tiles)) if tiles else 0.0
    assert layout.units_per_tile(144, unit, tile=tile) == pytest.approx(mean)


def test_a_pool_is_drawn_before_and_after() -> None:
    before = KvLayout.build(seq_lens=[9, 7], tree_tokens=2, placement="scattered", num_slots=32)
    after = KvLayout.build(seq_lens=[9, 7], tree_tokens=2, num_slots=32)
    whole = before_and_after_svg(before, after, columns=16)
    root = ElementTree.fromstring(whole)
    inner = root.findall(f"{SVG}svg")
    assert [float(picture.attrib["y"]) > 0 for picture in inner] == [True, True]
    assert float(inner[1].attrib["y"]) > float(inner[0].attrib["height"])
    assert [text.text for text in root.findall(f"{SVG}text")] == ["before", "after"]
    cells = [[r.attrib["fill"] for r in p.iter(f"{SVG}rect")] for p in inner]
    assert cells[0] != cells[1]
