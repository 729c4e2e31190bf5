"""The planning kernels against the rule walked step by step, in both lanes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any, Literal

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

import cuverify
from cuverify.buffers import read
from cuverify.cases import Target
from cuverify.compile import ARCHITECTURES
from cuverify.errors import ArgumentError
from cuverify.ops.verify_plan import (
    PlanCode,
    PlanStatus,
    PlanWorkspace,
    VerifyPlan,
    max_row_tiles,
    plan_workspace,
    verify_plan_kernel,
)
from cuverify.reference import verify_plan as oracle
from cuverify.verify_variants import VARIANTS, VariantName

Schedule = Literal["ascending", "descending", "random"]
SCHEDULES: tuple[Schedule, ...] = ("ascending", "descending", "random")

gpu = pytest.mark.gpu
both_lanes = pytest.mark.parametrize("xp", ["numpy", pytest.param("torch-cuda", marks=gpu)])

POISON = -0x5A5A5A5B
OUTPUTS = ("work", "cta_work", "combine_indptr", "combine_tiles", "kv_indptr", "status")


def to(xp: Target, array: NDArray[Any]) -> Any:
    if xp == "numpy":
        return array
    import torch

    return torch.from_numpy(array.copy()).cuda()


def bounds(trees: Sequence[int], dtype: Any = np.int32) -> NDArray[Any]:
    return np.concatenate([[0], np.cumsum(trees)]).astype(dtype)


class Planned:
    """A plan of steps with so many requests, its outputs poisoned; and what the oracle says."""

    def __init__(
        self,
        lens: Sequence[int],
        trees: Sequence[int],
        xp: Target = "numpy",
        *,
        heads: int = 8,
        num_ctas: int = 4,
        index: Any = np.int32,
        max_tokens: int | None = None,
        max_tree_tokens: int = 256,
        values: dict[str, int] | None = None,
        spare: int = 0,
    ) -> None:
        self.xp, self.heads, self.num_ctas, self.values = xp, heads, num_ctas, values or {}
        self.max_tokens = max(1, sum(trees)) if max_tokens is None else max_tokens
        self.max_tree_tokens = max_tree_tokens
        self.lens = to(xp, np.array(lens, index))
        self.bounds = to(xp, bounds(trees, index))
        self.workspace = PlanWorkspace.allocate(
            self.lens,
            max_batch=len(lens) + spare,
            max_tokens=self.max_tokens + 8 * spare,
            heads=heads,
            num_ctas=num_ctas,
        )
        self.poison()
        self.plan = VerifyPlan(
            self.lens,
            self.bounds,
            heads=heads,
            max_tokens=self.max_tokens,
            max_tree_tokens=max_tree_tokens,
            workspace=self.workspace,
            values=values,
        )

    def poison(self) -> None:
        for name in OUTPUTS:
            getattr(self.workspace, name)[:] = POISON

    def found(self) -> oracle.Plan:
        self.plan()
        found = {name: read(getattr(self.workspace, name)) for name in OUTPUTS}
        rows = len(self.lens) + 1
        assert (found["kv_indptr"][rows:] == POISON).all(), "bounds of no request are written"
        return oracle.Plan(**{**found, "kv_indptr": found["kv_indptr"][:rows]})

    def expected(self) -> oracle.Plan:
        names = {
            "START_ROWS": "start_rows",
            "LEAST_ROWS": "least_rows",
            "ROOT_HALVES": "root_halves",
            "HALVES_ROWS": "halves_rows",
            "GRAIN": "grain",
        }
        return oracle.verify_plan(
            read(self.lens),
            read(self.bounds),
            heads=self.heads,
            num_ctas=self.num_ctas,
            max_work=len(self.workspace.work),
            max_tokens=self.max_tokens,
            **{names[name]: value for name, value in self.plan.values.items()},
        )


def assert_same(found: oracle.Plan, expected: oracle.Plan) -> None:
    for field in fields(oracle.Plan):
        one, other = getattr(found, field.name), getattr(expected, field.name)
        np.testing.assert_array_equal(one, other, err_msg=field.name)


def assert_planned(
    lens: Sequence[int], trees: Sequence[int], xp: Target = "numpy", **how: Any
) -> oracle.Plan:
    planned = Planned(lens, trees, xp, **how)
    found = planned.found()
    assert_same(found, planned.expected())
    faults = oracle.faults(found, np.array(lens), bounds(trees), heads=planned.heads)
    assert faults == []
    return found


@st.composite
def steps(draw: st.DrawFn, max_requests: int = 6) -> tuple[list[int], list[int]]:
    length = st.one_of(
        st.integers(0, 100), st.sampled_from([15, 16, 17, 31, 32, 33, 500, 4000, 70_000, 200_000])
    )
    tree = st.one_of(st.integers(0, 20), st.sampled_from([8, 16, 17, 33, 64, 65, 129, 256]))
    lens = draw(st.lists(length, min_size=1, max_size=max_requests))
    same = draw(st.booleans())
    return lens, [draw(tree)] * len(lens) if same else [draw(tree) for _ in lens]


knobs = st.sampled_from(
    [
        {},
        {"START_ROWS": 0, "LEAST_ROWS": 16, "ROOT_HALVES": 0},
        {"START_ROWS": 100, "LEAST_ROWS": 64, "ROOT_HALVES": 3},
        {"HALVES_ROWS": 400},
        dict(VARIANTS["sm90"].plan),
        dict(VARIANTS["portable"].plan),
        {"START_ROWS": 144, "LEAST_ROWS": 16, "GRAIN": 48},
        {"START_ROWS": 0, "LEAST_ROWS": 16, "ROOT_HALVES": 0, "HALVES_ROWS": 64},
    ]
)


# --- plans ---------------------------------------------------------------------------------------

WRITTEN = [
    ("one short request", [70], [8], {}),
    ("one long request", [70_000], [8], {"num_ctas": 132}),
    ("no prefix", [0], [1], {}),
    ("no prefixes", [0, 0, 0], [9, 9, 9], {"num_ctas": 7}),
    ("only the tree is long", [40], [256], {"num_ctas": 16}),
    ("teams of five", [60_000, 3000], [33, 33], {"num_ctas": 132}),
    ("teams of nine", [60_000], [65], {"num_ctas": 132}),
    ("teams that would waste too much", [60_000], [129], {"num_ctas": 132}),
    ("more row tiles than blocks", [5000] * 8, [64] * 8, {"num_ctas": 6}),
    ("one block", [500, 3, 0], [9, 2, 17], {"num_ctas": 1}),
    ("trees of all sizes", [3000, 1, 17, 900], [1, 256, 9, 64], {"num_ctas": 40}),
    ("requests without a tree", [500, 300, 7, 0], [0, 9, 0, 0], {}),
    ("nobody has a tree", [500, 300], [0, 0], {}),
    ("crumbs", [16] * 200, [8] * 200, {"num_ctas": 132}),
    ("long and short", [150_000, *[40] * 60], [8] * 61, {"num_ctas": 132}),
    ("more requests than threads", [100, 7, 3000] * 150, [8, 8, 8] * 150, {"num_ctas": 20}),
    ("more blocks than threads", [200_000, 100_000], [8, 16], {"num_ctas": 600}),
    ("a prefix as long as they get", [2**31 - 257], [8], {"num_ctas": 132}),
    ("halves", [16_000], [8], {"num_ctas": 132, "values": {"HALVES_ROWS": 320}}),
    ("halves of teams of two", [1000, 70], [9, 16], {"num_ctas": 45, "values": {"HALVES_ROWS": 900}}),
    ("too long for halves", [50_000], [8], {"num_ctas": 132, "values": {"HALVES_ROWS": 320}}),
    ("nothing to halve", [0, 0], [0, 0], {"num_ctas": 5, "values": {"HALVES_ROWS": 320}}),
    ("four blocks are left over for eight", [30_000, 5000], [64, 192], {"num_ctas": 132}),
    ("six blocks are left over for nine", [30_000], [65], {"num_ctas": 132}),
    ("two blocks are left over for five", [65_536], [33], {"num_ctas": 132}),
    ("thirteen for seventeen", [65_536, 20_000], [129, 136], {"num_ctas": 132}),
    ("left over, and nobody is cut without them", [1024] * 16, [64] * 16, {"num_ctas": 132}),
    ("left over, and many requests", [9000, 30_000, 12_345, 800] * 4, [33] * 16, {"num_ctas": 132}),
    ("all of them long", [200_000] * 64, [64] * 64, {"num_ctas": 132, "heads": 16}),
]  # fmt: skip


@both_lanes
@pytest.mark.parametrize(
    ("lens", "trees", "how"), [w[1:] for w in WRITTEN], ids=[w[0] for w in WRITTEN]
)
def test_written_steps(lens: list[int], trees: list[int], how: dict[str, Any], xp: Target) -> None:
    for index in (np.int32, np.int64):
        assert_planned(lens, trees, xp, index=index, **how)


@settings(max_examples=150, deadline=None)
@given(
    step=steps(),
    heads=st.sampled_from([8, 16, 5]),
    num_ctas=st.sampled_from([1, 2, 3, 4, 7, 16, 132]),
    values=knobs,
    spare=st.sampled_from([0, 5]),
)
def test_drawn_steps(
    step: tuple[list[int], list[int]], heads: int, num_ctas: int, values: dict[str, int], spare: int
) -> None:
    assert_planned(*step, heads=heads, num_ctas=num_ctas, values=values, spare=spare)


@settings(max_examples=60, deadline=None)
@given(
    step=steps(max_requests=4),
    num_ctas=st.sampled_from([1, 3, 8, 40]),
    schedule=st.sampled_from(SCHEDULES),
    seed=st.integers(0, 99),
)
@example(step=([70_000, 3, 70], [33, 33, 33]), num_ctas=40, schedule="random", seed=0)
def test_drawn_steps_under_the_checkers(
    step: tuple[list[int], list[int]], num_ctas: int, schedule: Schedule, seed: int
) -> None:
    with cuverify.checked(schedule=schedule, seed=seed):
        assert_planned(*step, num_ctas=num_ctas)


@pytest.mark.parametrize("compiler", ["g++", "zig"])
@pytest.mark.parametrize("schedule", SCHEDULES)
def test_many_requests_under_the_checkers(schedule: Schedule, compiler: str) -> None:
    with cuverify.checked(schedule=schedule, compiler=compiler):
        assert_planned([100, 7, 3000] * 100, [8, 9, 1] * 100, num_ctas=300, index=np.int64)


@gpu
@settings(max_examples=300, deadline=None)
@given(
    step=steps(max_requests=40),
    heads=st.sampled_from([8, 16]),
    num_ctas=st.sampled_from([1, 7, 132]),
    values=knobs,
)
def test_drawn_steps_on_a_gpu(
    step: tuple[list[int], list[int]], heads: int, num_ctas: int, values: dict[str, int]
) -> None:
    assert_planned(*step, "torch-cuda", heads=heads, num_ctas=num_ctas, values=values)


@pytest.mark.parametrize("variant", [*VARIANTS])
def test_a_plan_is_cut_for_the_text_that_attends(variant: VariantName) -> None:
    for own, expected in (
        (None, VARIANTS[variant].plan),
        ({}, {}),
        ({"GRAIN": 32}, {"GRAIN": 32}),
    ):
        plan = VerifyPlan(
            np.array([9000], np.int32), bounds([8]), heads=8, max_tokens=8, variant=variant,
            values=own,
        )  # fmt: skip
        assert plan.values == expected
        plan()
        assert plan.read_status().code == PlanCode.PLANNED
    with pytest.raises(ArgumentError, match="variant='fast'.*portable, sm90"):
        VerifyPlan(
            np.array([9], np.int32), bounds([8]), heads=8, max_tokens=8, variant="fast"  # type: ignore[arg-type]
        )  # fmt: skip


@both_lanes
def test_the_same_launch_follows_other_lengths(xp: Target) -> None:
    planned = Planned([500, 300, 7], [9, 9, 9], xp, num_ctas=16, max_tokens=300)
    for lens, trees in (
        ([500, 300, 7], [9, 9, 9]),
        ([0, 90_000, 1], [1, 256, 40]),
        ([1, 1, 1], [8] * 3),
    ):
        planned.lens[:] = to(xp, np.array(lens, np.int32))
        planned.bounds[:] = to(xp, bounds(trees))
        planned.poison()
        assert_same(planned.found(), planned.expected())


def test_long_requests_share_blocks_evenly() -> None:
    plan = assert_planned([180_000, 60_000, 20_000, 5000], [8] * 4, num_ctas=132)
    rows = plan.work[:, 3] - plan.work[:, 2]
    load = [rows[first:end:step].sum() for first, end, step, _ in plan.cta_work]
    assert max(load) < 1.05 * np.mean(load)


def test_row_tiles_of_one_range_are_neighbours() -> None:
    plan = assert_planned([180_000], [64], num_ctas=132)
    used = plan.work[plan.work[:, 0] >= 0].reshape(-1, 8, 6)
    assert (used[:, :, 1] == np.arange(8)).all()
    assert (used[:, :, 2:4] == used[:, :1, 2:4]).all()
    assert len(used) == 17  # of 16 teams of eight blocks, and of four blocks that are left over


# --- what is wrong with a step -------------------------------------------------------------------

FAULTS: list[tuple[str, Callable[[Planned], None], tuple[int, int, int]]] = [
    ("negative length", lambda p: put(p.lens, 1, -1), (PlanCode.BAD_LENGTH, 1, -1)),
    ("length past int32", lambda p: put(p.lens, 0, 2**31 - 256), (PlanCode.BAD_LENGTH, 0, 2**31 - 256)),
    ("length past 40 bits", lambda p: put(p.lens, 2, 2**40), (PlanCode.BAD_LENGTH, 2, 2**40)),
    ("falling bounds", lambda p: put(p.bounds, 2, 3), (PlanCode.BAD_TREE, 1, -6)),
    ("a tree too wide", lambda p: put(p.bounds, 3, 18 + 34), (PlanCode.BAD_TREE, 2, 34)),
    ("bounds that do not begin at 0", lambda p: put(p.bounds, 0, 2), (PlanCode.BAD_TOKENS, 0, 2)),
    ("too many tokens", lambda p: put(p.bounds, 3, 18 + 33), (PlanCode.BAD_TOKENS, 2, 51)),
    ("the first of two", lambda p: (put(p.lens, 2, -1), put(p.lens, 1, -7))[0], (PlanCode.BAD_LENGTH, 1, -7)),
    ("the lower code of one", lambda p: (put(p.lens, 1, -1), put(p.bounds, 2, 3))[0], (PlanCode.BAD_LENGTH, 1, -1)),
]  # fmt: skip


def put(tensor: Any, at: int, value: int) -> None:
    tensor[at] = value


@both_lanes
@pytest.mark.parametrize(("spoil", "status"), [f[1:] for f in FAULTS], ids=[f[0] for f in FAULTS])
def test_a_fault_empties_the_plan(
    spoil: Callable[[Planned], None], status: tuple[int, int, int], xp: Target
) -> None:
    planned = Planned(
        [50, 60, 70], [9, 9, 9], xp, index=np.int64, max_tokens=50, max_tree_tokens=33
    )
    spoil(planned)
    found = planned.found()
    assert planned.plan.peek_status() == PlanStatus(PlanCode(status[0]), *status[1:])
    assert (found.work == -1).all() and (found.combine_tiles == -1).all()
    assert (found.cta_work[:, 0] == found.cta_work[:, 1]).all()
    assert not found.kv_indptr.any() and not found.combine_indptr.any()
    if status[0] != PlanCode.BAD_TREE:  # the oracle knows no limit below 256
        assert_same(found, planned.expected())
    with pytest.raises(ArgumentError, match=f"={status[2]}: .*nothing was planned"):
        planned.plan.read_status()


def test_the_plan_recovers_from_a_fault() -> None:
    planned = Planned([50, 60, 70], [9, 9, 9])
    planned.lens[1] = -1
    planned.plan()
    planned.lens[1] = 60
    assert_same(planned.found(), planned.expected())
    assert planned.plan.read_status().code == PlanCode.PLANNED


def test_kernel_op_and_oracle_number_the_faults_alike() -> None:
    import re

    text = verify_plan_kernel().source.text
    in_kernel = dict(re.findall(r"constexpr int ([A-Z_]+) = (\d+);", text))
    for code in PlanCode:
        assert in_kernel[code.name] == str(int(code))
        assert getattr(oracle, code.name) == code
    for name in ("ROW_TILE", "TILE", "MAX_TREE"):
        assert in_kernel[name] == str(getattr(oracle, name))


# --- the index list ------------------------------------------------------------------------------


class Gathered:
    def __init__(
        self, lens: Sequence[int], xp: Target = "numpy", index: Any = np.int32, capacity: int = 5
    ) -> None:
        rng = np.random.default_rng(sum(lens))
        table = rng.integers(0, 2**31 - 1, (len(lens) + 3, max(lens) + 9), np.int32)
        self.table = to(xp, table)[:, :-2]  # with a gap behind each row
        rows = rng.permutation(len(table))[: len(lens)]
        self.rows = to(xp, rows.astype(index))
        self.indices = to(xp, np.full(sum(lens) + capacity, POISON, index))
        self.lens = to(xp, np.array(lens, index))
        self.plan = VerifyPlan(
            self.lens,
            to(xp, bounds([8] * len(lens))),
            heads=8,
            max_tokens=8 * len(lens),
            kv_indices=self.indices,
            req_to_token=self.table,
            req_pool_indices=self.rows,
        )

    def assert_right(self) -> None:
        self.plan()
        found, kv_indptr = read(self.indices), read(self.plan.kv_indptr)
        right = oracle.kv_list(kv_indptr, read(self.rows), read(self.table))
        np.testing.assert_array_equal(kv_indptr, np.concatenate([[0], np.cumsum(read(self.lens))]))
        np.testing.assert_array_equal(found[: len(right)], right)
        assert (found[len(right) :] == POISON).all()


@both_lanes
@pytest.mark.parametrize("index", [np.int32, np.int64])
@pytest.mark.parametrize("lens", [[1], [0], [5, 0, 0, 7], [3000, 1, 900], [17] * 40, [0, 5000]])
def test_slots_are_gathered(lens: list[int], index: Any, xp: Target) -> None:
    Gathered(lens, xp, index).assert_right()


@gpu
@pytest.mark.parametrize("lens", [[1_000_000], [400_000, 1, *[7000] * 85, 4999]])
def test_a_million_slots_are_gathered(lens: list[int]) -> None:
    assert sum(lens) == 1_000_000
    Gathered(lens, "torch-cuda", capacity=0).assert_right()


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_slots_are_gathered_under_the_checkers(schedule: Schedule) -> None:
    for lens in ([5, 0, 0, 7], [2500, 1, 900, 0]):
        with cuverify.checked(schedule=schedule):
            Gathered(lens, capacity=0).assert_right()


@both_lanes
@pytest.mark.parametrize(
    ("spoil", "code", "request_", "value"),
    [
        (lambda g: put(g.rows, 1, -1), PlanCode.BAD_POOL_ROW, 1, -1),
        (lambda g: put(g.rows, 0, 6), PlanCode.BAD_POOL_ROW, 0, 6),
        (lambda g: put(g.lens, 0, 68), PlanCode.BAD_POOL_WIDTH, 0, 68),
        (lambda g: put(g.lens, 2, 16), PlanCode.BAD_CAPACITY, 2, 16),
    ],
)
def test_a_table_that_does_not_fit(
    spoil: Callable[[Gathered], None], code: PlanCode, request_: int, value: int, xp: Target
) -> None:
    gathered = Gathered([60, 30, 10], xp)
    spoil(gathered)
    gathered.plan()
    assert gathered.plan.peek_status() == PlanStatus(code, request_, value)
    assert (read(gathered.indices) == POISON).all()
    with pytest.raises(ArgumentError, match="nothing was planned"):
        gathered.plan.read_status()


@both_lanes
def test_prefixes_of_more_rows_than_bounds_count_are_flagged(xp: Target) -> None:
    lens, qo = to(xp, np.array([2**30, 2**30 - 1, 1])), to(xp, bounds([1, 1, 1]))
    own = to(xp, np.zeros(4, np.int32))
    plan = VerifyPlan(lens, qo, heads=8, max_tokens=3, kv_indptr=own)
    plan()
    with pytest.raises(ArgumentError, match=r"seq_lens\[2\]=1: .*or have 2\*\*31 rows or more"):
        plan.read_status()
    lens[2] = 0
    plan()
    plan.read_status()


# --- sizes, resources, misuse --------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(
    trees=st.lists(st.integers(1, 256), min_size=1, max_size=30),
    heads=st.sampled_from([8, 16, 24, 64, 128]),
)
def test_room_for_every_row_tile(trees: list[int], heads: int) -> None:
    tiles = sum(-(-tree * heads // 64) for tree in trees)
    assert tiles <= max_row_tiles(len(trees), sum(trees), heads)
    if heads == 8:
        worst = [1] * (len(trees) - 1) + [max(1, sum(trees) - len(trees) + 1)]
        assert max_row_tiles(len(trees), sum(trees), heads) <= sum(-(-t // 8) for t in worst) + len(
            trees
        )


@pytest.mark.parametrize("arch", ARCHITECTURES)
def test_registers_do_not_spill(arch: str) -> None:
    resources = verify_plan_kernel().compile(arch).resources["verify_plan"]
    assert (resources.spill_store_bytes, resources.stack_bytes) == (0, 0), resources


def arguments(**other: Any) -> dict[str, Any]:
    return {
        "seq_lens": np.array([5, 6], np.int32),
        "qo_indptr": bounds([9, 9]),
        "heads": 8,
        "max_tokens": 18,
    } | other


def workspace(**other: Any) -> PlanWorkspace:
    own = PlanWorkspace.allocate(np.zeros(1), max_batch=2, max_tokens=18, heads=8, num_ctas=4)
    return replace(own, **other)


TABLE = {
    "req_to_token": np.zeros((3, 9), np.int32),
    "req_pool_indices": np.zeros(2, np.int32),
    "kv_indices": np.zeros(20, np.int32),
}

MISUSE: list[tuple[str, dict[str, Any], str]] = [
    ("no requests", {"seq_lens": np.zeros(0, np.int32), "qo_indptr": np.zeros(1, np.int32)}, "seq_lens=.*1 to 1024"),
    ("too many requests", {"seq_lens": np.zeros(1025, np.int32), "qo_indptr": np.zeros(1026, np.int32)}, "seq_lens=.*1 to 1024"),
    ("lengths in two dimensions", {"seq_lens": np.zeros((2, 1), np.int32)}, "seq_lens=.*2 dimensions"),
    ("lengths as a list", {"seq_lens": [5, 6]}, "seq_lens=.*tensor"),
    ("lengths in fp32", {"seq_lens": np.zeros(2, np.float32)}, "seq_lens=.*float32.*int32 or int64"),
    ("lengths in int16", {"seq_lens": np.zeros(2, np.int16)}, "seq_lens=.*int16.*int32 or int64"),
    ("a bound is missing", {"qo_indptr": np.zeros(2, np.int32)}, "qo_indptr=.*3 bounds for 2 requests"),
    ("bounds with gaps", {"qo_indptr": np.zeros(6, np.int32)[::2]}, "qo_indptr=.*contiguous"),
    ("T = 0", {"max_tree_tokens": 0}, "max_tree_tokens=0.*1 to 256"),
    ("T > 256", {"max_tree_tokens": 257}, "max_tree_tokens=257.*1 to 256"),
    ("no tokens", {"max_tokens": 0}, "max_tokens=0"),
    ("tokens as a float", {"max_tokens": 18.0}, "max_tokens=18.0"),
    ("no heads", {"heads": 0}, "heads=0"),
    ("a workspace for fewer requests", {"workspace": workspace(kv_indptr=np.zeros(2, np.int32))}, "workspace.kv_indptr=.*too small: 2 requests"),
    ("a workspace for fewer tokens", {"workspace": workspace(work=np.zeros((7, 6), np.int32))}, "workspace.work=.*too small"),
    ("work of five columns", {"workspace": workspace(work=np.zeros((70, 5), np.int32))}, "workspace.work=.*, 6"),
    ("work in int64", {"workspace": workspace(work=np.zeros((70, 6), np.int64))}, "work=.*int64"),
    ("no blocks", {"workspace": workspace(cta_work=np.zeros((0, 4), np.int32))}, "num_ctas=0"),
    ("a read-only status", {"workspace": workspace(status=np.broadcast_to(np.int32(0), 4))}, "status=.*read-only"),
    ("work is status", {"workspace": (lambda w: replace(w, status=w.work.reshape(-1)[:4]))(workspace())}, "workspace.status=.*shares memory with workspace.work"),
    ("half a table", {k: TABLE[k] for k in ("req_to_token", "kv_indices")}, "req_pool_indices=None.*req_to_token is given"),
    ("a table and nowhere to gather", {k: TABLE[k] for k in ("req_to_token", "req_pool_indices")}, "kv_indices=None"),
    ("a table and bounds", TABLE | {"kv_indptr": np.zeros(3, np.int32)}, "kv_indptr=.*the plan makes"),
    ("a table in int64", TABLE | {"req_to_token": np.zeros((3, 9), np.int64)}, "req_to_token=.*int64"),
    ("a flat table", TABLE | {"req_to_token": np.zeros(27, np.int32)}, "req_to_token=.*rows, width"),
    ("rows of three requests", TABLE | {"req_pool_indices": np.zeros(3, np.int32)}, "req_pool_indices=.*2 requests"),
    ("a list in int8", TABLE | {"kv_indices": np.zeros(20, np.int8)}, "kv_indices=.*int8"),
    ("gathering into the lengths", (lambda room: TABLE | {"seq_lens": room[:2], "kv_indices": room})(np.zeros(20, np.int32)), "kv_indices=.*shares memory with seq_lens"),
    ("bounds in int64", {"kv_indptr": np.zeros(3, np.int64)}, "kv_indptr=.*int64.*int32"),
    ("bounds in fp32", {"kv_indptr": np.zeros(3, np.float32)}, "kv_indptr=.*float32.*indices"),
    ("every other bound", {"kv_indptr": np.zeros(6, np.int32)[::2]}, "kv_indptr=.*not contiguous"),
    ("a list of its own in fp32", {"kv_indices": np.zeros(9, np.float32)}, "kv_indices=.*float32"),
    ("every other slot", {"kv_indices": np.zeros(18, np.int32)[::2]}, "kv_indices=.*not contiguous"),
    ("bounds of three requests", {"kv_indptr": np.zeros(4, np.int32)}, "kv_indptr=.*3 bounds"),
    ("an unknown value", {"values": {"START": 3}}, "START"),
]  # fmt: skip


@pytest.mark.parametrize(("spoiled", "says"), [m[1:] for m in MISUSE], ids=[m[0] for m in MISUSE])
def test_misuse_names_the_argument(spoiled: dict[str, Any], says: str) -> None:
    VerifyPlan(**arguments())
    with pytest.raises(cuverify.errors.CuverifyError, match=f"(?s){says}"):
        VerifyPlan(**arguments(**spoiled))


def test_sizes_are_checked() -> None:
    for sizes, says in (
        ((0, 8, 8, 4), "max_batch=0"),
        ((1, 8, 8, 4096), "num_ctas=4096"),
        ((1, 8, 136, 4), "heads=136"),
    ):
        with pytest.raises(ArgumentError, match=says):
            plan_workspace(*sizes)
