"""Live relocation: holders follow or refuse, and no failure loses a row.

The state machine serves requests from one pool of slots, as a server with speculative decoding, a
prefix tree and a free list does, and relocates in between, with failures at every step. A
dictionary says which token every request and every tree node must find behind each of its slots.
"""

from __future__ import annotations

import functools
from collections import Counter
from types import SimpleNamespace
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from cuverify.allocator import PagedAllocator, TokenAllocator, held_slots
from cuverify.errors import ArgumentError, RelocationRefused
from cuverify.holders import (
    AllocatorHolder,
    BySlotHolder,
    Holder,
    IndexHolder,
    PageIndexHolder,
    PinHolder,
    SlotHolders,
    TableHolder,
    TreeHolder,
)
from cuverify.planner import MovePlan, plan_compact, plan_contiguous
from cuverify.reference import commit as commit_oracle
from cuverify.reference import relocate as move_oracle
from cuverify.relocation import (
    Journal,
    PoolMover,
    Readers,
    Relocation,
    Step,
    row_checksums,
)
from cuverify.strategies import examples

gpu = pytest.mark.gpu

SLOTS, RESERVE, ROWS, WIDTH = 40, 10, 5, 30
HOLDERS = (
    "request table",
    "radix tree",
    "steps in flight",
    "allocator",
    "sliding-window map",
    "row hashes",
    "host transfers",
    "published",
)


class FaultError(Exception):
    """What a failure of the machine raises."""


@functools.cache
def pools_and_mover() -> tuple[list[Any], PoolMover]:
    """Return pools of the target and the draft model, with a reserve, and what moves their rows."""
    pools: list[Any] = [np.zeros((SLOTS + RESERVE, 16 * n), np.uint8) for n in (1, 1, 2)]
    return pools, PoolMover(pools, SLOTS)


def row_of(token: int, pool: Any) -> Any:
    """Return the row of a token in a pool."""
    return np.full(pool.shape[1] // 8, token, np.int64).view(np.uint8)


class Server:
    """Requests, a prefix tree and an allocator over one pool of slots."""

    def __init__(self, need_sort: bool = False) -> None:
        self.pools, self.mover = pools_and_mover()
        for pool in self.pools:
            pool[:] = 0xEE
        self.allocator = TokenAllocator(SLOTS - 1, need_sort=need_sort)
        self.table = np.full((ROWS + 1, WIDTH), -77, np.int32)
        self.lens: dict[int, int] = {}  # committed tokens by table row
        self.windows: dict[int, int] = {}  # tokens allocated behind them
        self.tokens: dict[int, list[int]] = {}  # the model: what each row's tokens are
        self.shared: dict[int, Any] = {}  # the tree node that a row's first tokens are
        self.root = SimpleNamespace(children={}, value=None, lock_ref=1)
        self.node_tokens: dict[int, list[int]] = {}  # the model of the tree, by node
        self.in_flight = np.zeros(0, np.int64)
        self.window_map = np.arange(SLOTS, dtype=np.int64) * 10
        self.hashes = np.zeros(SLOTS, np.int64)
        self.transfers = np.zeros(0, np.int64)
        self.published = np.zeros(0, np.int64)
        self.next_token = 1
        self.log: list[str] = []
        self.journals: list[str] = []
        self.fail_at: int | None = None
        self.holders = SlotHolders(SLOTS, required=HOLDERS)
        for holder in (
            TableHolder(self.table, lambda: [(r, self.allocated(r)) for r in self.lens]),
            TreeHolder(self.root),
            IndexHolder("steps in flight", lambda: [self.in_flight]),
            AllocatorHolder(self.allocator),
            BySlotHolder("sliding-window map", lambda: [self.window_map]),
            BySlotHolder("row hashes", lambda: [self.hashes]),
            PinHolder("host transfers", "a transfer is in flight", lambda: self.transfers),
            PinHolder("published", "another server has the address", lambda: self.published),
        ):
            self.holders.register(holder)
        self.relocation = Relocation(
            self.holders, self.mover, reserve=RESERVE, checkpoint=self._checkpoint,
            record=lambda journal: self.journals.append(journal.to_json()),
        )  # fmt: skip

    def allocated(self, row: int) -> int:
        return self.lens[row] + self.windows[row]

    def _checkpoint(self, where: str) -> None:
        self.log.append(where)
        if self.fail_at is not None and len(self.log) > self.fail_at:
            self.fail_at = None
            raise FaultError(where)

    def write(self, slots: Any, tokens: list[int]) -> None:
        for slot, token in zip(slots, tokens, strict=True):
            for pool in self.pools:
                pool[slot] = row_of(token, pool)
            self.hashes[slot] = token
            self.window_map[slot] = token * 3

    def fresh(self, number: int) -> list[int]:
        self.next_token += number
        return list(range(self.next_token - number, self.next_token))

    def nodes(self) -> list[Any]:
        return list(self.root.children.values())

    def chains(self) -> list[Any]:
        """Return all live slots, each once: nodes, then what requests have of their own."""
        parts = [node.value for node in self.nodes()]
        for row in self.lens:
            start = len(self.shared[row].value) if self.shared[row] is not None else 0
            parts.append(self.table[row, start : self.allocated(row)].astype(np.int64))
        return parts

    def live(self) -> Any:
        flags = np.zeros(SLOTS, bool)
        for part in self.chains():
            flags[part] = True
        return flags

    # what a server does

    def admit(self, row: int, length: int, node: Any) -> bool:
        slots = self.allocator.alloc(length)
        if slots is None:
            return False
        prefix = [] if node is None else node.value.tolist()
        self.tokens[row] = (self.node_tokens[id(node)] if node is not None else []) + (
            mine := self.fresh(length)
        )
        self.write(slots, mine)
        self.table[row, : len(prefix) + length] = [*prefix, *slots]
        self.lens[row], self.windows[row] = len(prefix) + length, 0
        self.shared[row] = node
        if node is not None:
            node.lock_ref += 1
        return True

    def draft(self, row: int, nodes: int) -> bool:
        """Open a window, or use what is left of the last one, and write drafts into it."""
        if self.lens[row] + nodes > WIDTH:
            return False
        more = max(0, nodes - self.windows[row])
        slots = self.allocator.alloc(more)
        if slots is None:
            return False
        end = self.allocated(row)
        self.table[row, end : end + more] = slots
        self.windows[row] += more
        start = self.lens[row]
        drafted = self.fresh(nodes)
        self.tokens[row] = self.tokens[row][:start] + drafted
        self.in_flight = self.table[row, start : start + nodes].astype(np.int64)
        self.write(self.in_flight, drafted)
        return True

    def accept(self, row: int, path: list[int], way: str, keep_window: bool) -> None:
        """Commit a path of the drafts, and free the rest of the window or keep it."""
        start, drafted = self.lens[row], len(self.in_flight)
        done = commit_oracle.commit(
            np.array([path]), np.array([len(path) - 1]), np.array([0, drafted]), self.in_flight,
            np.array([start]), np.array([row]), self.table,
        )  # fmt: skip
        assert done.status[0] == 0
        tokens = self.tokens[row]
        if way == "table":
            self.table[:] = done.req_to_token
        else:
            moved = move_oracle.relocate(self.pools, done.src, done.dst, len(done.src), SLOTS)
            assert moved[0] == 0
            for by_slot in (self.hashes, self.window_map):
                by_slot[done.dst] = by_slot[done.src]
        self.tokens[row] = tokens[:start] + [tokens[start + node] for node in path]
        end = self.allocated(row)
        self.lens[row] += len(path)
        self.windows[row] = end - self.lens[row]
        self.in_flight = np.zeros(0, np.int64)
        if not keep_window:
            self.allocator.free(self.table[row, self.lens[row] : end].astype(np.int64))
            self.windows[row] = 0

    def finish(self, row: int, cache: bool) -> None:
        """Free a request, or leave its own tokens to the tree."""
        node = self.shared.pop(row)
        start = len(node.value) if node is not None else 0
        end, length = self.allocated(row), self.lens[row]
        mine = self.table[row, start:length].astype(np.int64)
        self.allocator.free(self.table[row, length:end].astype(np.int64))
        if cache and node is None and length:
            # a view of a tensor of the tree's own, as SGLang keeps it
            new = SimpleNamespace(children={}, value=mine.copy(), lock_ref=0)
            self.root.children[self.next_token] = new
            self.next_token += 1
            self.node_tokens[id(new)] = self.tokens[row]
        else:
            self.allocator.free(mine)
        if node is not None:
            node.lock_ref -= 1
        del self.lens[row], self.windows[row], self.tokens[row]

    def evict(self, number: int) -> None:
        loose = [key for key, node in self.root.children.items() if not node.lock_ref]
        if loose:
            node = self.root.children.pop(loose[number % len(loose)])
            self.allocator.free(node.value)
            del self.node_tokens[id(node)]

    # what must hold

    def check(self) -> None:
        for row, tokens in self.tokens.items():
            slots = self.table[row, : len(tokens)]
            for pool in self.pools:
                found = pool[slots].view(np.int64)
                assert (found == np.array(tokens)[:, None]).all(), (row, slots, tokens)
            assert self.hashes[slots].tolist() == tokens
            assert (self.window_map[slots] == np.array(tokens) * 3).all()
        for node in self.nodes():
            tokens = self.node_tokens[id(node)]
            assert self.hashes[node.value].tolist() == tokens
            assert (self.pools[0][node.value].view(np.int64)[:, 0] == tokens).all()
        everything = np.concatenate([held_slots(self.allocator), *self.chains()])
        assert sorted(everything.tolist()) == list(range(1, SLOTS))


KINDS = st.sampled_from(["compact", "contiguous"])
BUDGETS = st.integers(1, RESERVE)
FAILURES = st.integers(0, 13)  # checkpoints of an epoch


class ServerMachine(RuleBasedStateMachine):
    """Draws what happens to a server."""

    seen: ClassVar[Counter[str]] = Counter()

    @initialize(need_sort=st.booleans())
    def start(self, need_sort: bool) -> None:
        self.server = Server(need_sort)
        self.drafting: int | None = None

    @rule(length=st.integers(1, 9), node=st.integers(0, 3), shares=st.booleans())
    def admit(self, length: int, node: int, shares: bool) -> None:
        idle = [row for row in range(1, ROWS + 1) if row not in self.server.lens]
        nodes = self.server.nodes()
        if idle:
            prefix = nodes[node % len(nodes)] if shares and nodes else None
            self.server.admit(idle[0], length, prefix)

    @precondition(lambda self: self.drafting is None and self.server.lens)
    @rule(which=st.integers(0, ROWS), nodes=st.integers(1, 6))
    def draft(self, which: int, nodes: int) -> None:
        rows = [*self.server.lens]
        row = rows[which % len(rows)]
        if self.server.draft(row, nodes):
            self.drafting = row

    @precondition(lambda self: self.drafting is not None)
    @rule(
        taken=st.lists(st.integers(1, 5), max_size=4, unique=True),
        way=st.sampled_from(["table", "rows"]), keep=st.booleans(),
    )  # fmt: skip
    def accept(self, taken: list[int], way: str, keep: bool) -> None:
        row, self.drafting = self.drafting, None
        assert row is not None
        path = [0, *sorted(node for node in taken if node < len(self.server.in_flight))]
        self.server.accept(row, path, way, keep)

    @precondition(lambda self: any(row != self.drafting for row in self.server.lens))
    @rule(which=st.integers(0, ROWS), cache=st.booleans())
    def finish(self, which: int, cache: bool) -> None:
        rows = [row for row in self.server.lens if row != self.drafting]
        self.server.finish(rows[which % len(rows)], cache)

    @rule(number=st.integers(0, 3))
    def evict(self, number: int) -> None:
        self.server.evict(number)

    @rule()
    def group(self) -> None:
        if self.server.allocator.free_group is None:
            self.server.allocator.free_group_begin()
        else:
            self.server.allocator.free_group_end()

    @rule(number=st.integers(0, 39), kind=st.sampled_from(["transfers", "published"]))
    def pin(self, number: int, kind: str) -> None:
        live = np.flatnonzero(self.server.live())
        pinned = live[number : number + 3]
        setattr(self.server, kind, pinned)

    @precondition(lambda self: self.server.lens)
    @rule(kind=KINDS, budget=BUDGETS)
    def relocate(self, kind: str, budget: int) -> None:
        self._relocate(kind, budget)

    @precondition(lambda self: self.server.lens)
    @rule(kind=KINDS, budget=BUDGETS, fails=FAILURES, again=FAILURES)
    def fail_and_finish(self, kind: str, budget: int, fails: int, again: int) -> None:
        self._relocate(kind, budget, fails, again, roll_back=False)

    @precondition(lambda self: self.server.lens)
    @rule(kind=KINDS, budget=BUDGETS, fails=FAILURES, again=FAILURES)
    def fail_and_roll_back(self, kind: str, budget: int, fails: int, again: int) -> None:
        self._relocate(kind, budget, fails, again, roll_back=True)

    def _relocate(
        self,
        kind: str,
        budget: int,
        fails: int | None = None,
        again: int | None = None,
        roll_back: bool = False,
    ) -> None:
        server = self.server
        # what is freed in an open group is not live, and not free either
        waiting = np.concatenate([np.zeros(0, np.int64), *(server.allocator.free_group or [])])
        pinned = np.union1d(server.holders.pinned(), waiting)
        if kind == "compact":
            plan = plan_compact(server.live(), budget=budget, pinned=pinned)
        else:
            plan = plan_contiguous(server.chains(), SLOTS, budget=budget, pinned=pinned)
        before = [part.copy() for part in server.chains()]
        server.log.clear()
        server.fail_at = fails
        self.seen["moves" if len(plan) else "nothing to move"] += 1
        self.seen["overlaps"] += plan.overlaps
        try:
            server.relocation.apply(plan)
        except FaultError:
            self.seen[f"failed at {server.log[-1].split()[0]}"] += 1
            # the process starts again with what was recorded last, and may fail a second time
            server.relocation.journal = Journal.from_json(server.journals[-1])
            server.log.clear()
            server.fail_at = again
            try:
                server.relocation.recover(roll_back=roll_back)
            except FaultError:
                self.seen["failed again"] += 1
                server.relocation.journal = Journal.from_json(server.journals[-1])
                server.relocation.recover(roll_back=roll_back)
            rolled = server.relocation.journal.rolling_back
            if rolled:
                self.seen["rolled back"] += 1
                for part, old in zip(server.chains(), before, strict=True):
                    np.testing.assert_array_equal(part, old)
                return
        server.fail_at = None
        where = plan.permutation(SLOTS)
        for part, old in zip(server.chains(), before, strict=True):
            np.testing.assert_array_equal(part, where[old])

    @invariant()
    def every_token_is_where_it_should_be(self) -> None:
        if hasattr(self, "server"):
            assert not self.server.relocation.journal.open
            self.server.check()


def test_no_sequence_of_events_loses_a_token() -> None:
    ServerMachine.seen.clear()
    run_state_machine_as_test(
        ServerMachine, settings=settings(examples(200), stateful_step_count=100)
    )
    seen = ServerMachine.seen
    steps = ("planned", "staged", "staged,", "moved", "moved,", "rewrote")
    assert all(seen[f"failed at {step}"] >= 10 for step in steps), seen
    assert min(seen["moves"], seen["overlaps"], seen["failed again"], seen["rolled back"]) >= 50, (
        seen
    )


# --- failures, one by one ------------------------------------------------------------------------


def busy_server() -> Server:
    """Return a server with two requests that share a node, and a window in flight."""
    server = Server()
    server.admit(1, 4, None)
    server.finish(1, cache=True)
    (node,) = server.nodes()
    server.admit(2, 3, node)
    server.admit(3, 5, node)
    server.admit(4, 4, None)
    server.finish(2, cache=False)
    server.admit(1, 2, None)
    server.draft(3, 5)
    server.check()
    return server


def plans_of(server: Server) -> dict[str, MovePlan]:
    return {
        "compact": plan_compact(server.live()),
        "contiguous": plan_contiguous(server.chains(), SLOTS, budget=RESERVE),
    }


@pytest.mark.parametrize("roll_back", [False, True])
@pytest.mark.parametrize("kind", ["compact", "contiguous"])
def test_a_failure_at_every_step_is_finished_or_rolled_back(kind: str, roll_back: bool) -> None:
    server = busy_server()
    plan = plans_of(server)[kind]
    assert plan.overlaps == (kind == "contiguous")
    server.relocation.apply(plan)
    steps = [*server.log]
    assert [step for step in steps if step.startswith("rewrote")] == [
        f"rewrote {n}" for n in HOLDERS
    ]
    assert ("staged" in steps) == plan.overlaps
    for at in range(len(steps)):
        server = busy_server()
        before = [part.copy() for part in server.chains()]
        server.fail_at = at
        server.log.clear()
        with pytest.raises(FaultError, match=steps[at]):
            server.relocation.apply(plans_of(server)[kind])
        if steps[at] != "done":
            with pytest.raises(RelocationRefused, match="epoch 1 is open at .*: recover it first"):
                server.relocation.apply(plan)
            with pytest.raises(RelocationRefused, match="epoch 1 is open in another journal"):
                Relocation(server.holders, server.mover, reserve=RESERVE).apply(plan)
        server.relocation.journal = Journal.from_json(server.journals[-1])
        server.relocation.recover(roll_back=roll_back)
        server.check()
        back = roll_back and steps[at] != "done"
        where = np.arange(SLOTS) if back else plan.permutation(SLOTS)
        for part, old in zip(server.chains(), before, strict=True):
            np.testing.assert_array_equal(part, where[old])
        assert server.relocation.recover() == Step.DONE
        # and the next epoch is one as any other
        server.relocation.apply(plan_compact(server.live()))
        server.accept(3, [0, 2, 4], "rows", keep_window=False)
        server.check()


@pytest.mark.parametrize("rolled_back", [False, True])
def test_holders_follow_whatever_journal_an_epoch_is_in(rolled_back: bool) -> None:
    server = busy_server()
    if rolled_back:
        server.fail_at = 5
        with pytest.raises(FaultError):
            server.relocation.apply(plans_of(server)["compact"])
        server.relocation.recover(roll_back=True)
    else:
        server.relocation.apply(plans_of(server)["compact"])
    second = Relocation(server.holders, server.mover, reserve=RESERVE)
    plan = plans_of(server)["contiguous"]
    assert plan.overlaps
    second.apply(plan)
    server.check()


@pytest.mark.parametrize("roll_back", [False, True])
def test_a_second_journal_waits_until_the_first_is_recovered(roll_back: bool) -> None:
    mover = PoolMover([np.arange(8, dtype=np.int64).repeat(2).reshape(8, 2)], 4)
    held = {name: np.array([5, 1]) for name in ("a", "b")}
    holders = SlotHolders(8)
    for name, slots in held.items():
        holders.register(IndexHolder(name, lambda slots=slots: [slots]))

    def fail(where: str) -> None:
        if where == "rewrote a":
            raise FaultError(where)

    journal = Journal()
    with pytest.raises(FaultError):
        Relocation(holders, mover, journal=journal, checkpoint=fail).apply(
            MovePlan(np.array([5]), np.array([2]), 0, True)
        )
    further = MovePlan(np.array([1]), np.array([3]), 0, True)
    second = Relocation(holders, mover)
    with pytest.raises(RelocationRefused, match="epoch 1 is open in another journal"):
        second.apply(further)
    Relocation(holders, mover, journal=journal).recover(roll_back=roll_back)
    found = [5, 1] if roll_back else [2, 1]
    assert [slots.tolist() for slots in held.values()] == [found, found]
    # a holder that has followed nothing is no reason to wait
    held["c"] = np.array([1])
    holders.register(IndexHolder("c", lambda: [held["c"]]))
    second.apply(further)
    assert [slots.tolist() for slots in held.values()] == [[found[0], 3], [found[0], 3], [3]]


def test_a_journal_of_an_earlier_run_is_recovered_before_anything_moves() -> None:
    server = busy_server()
    server.fail_at = 0
    with pytest.raises(FaultError):
        server.relocation.apply(plans_of(server)["compact"])
    again = SlotHolders(SLOTS)
    journal = Journal.from_json(server.journals[-1])
    first = Relocation(again, server.mover, journal=journal)
    with pytest.raises(RelocationRefused, match="epoch 1 is open in another journal"):
        Relocation(again, server.mover).apply(plans_of(server)["compact"])
    first.recover()
    Relocation(again, server.mover).apply(plans_of(server)["compact"])


def test_a_row_that_changed_in_between_is_found() -> None:
    server = busy_server()
    plan = plans_of(server)["compact"]
    real = server.mover.move

    def spoiling(src: Any, dst: Any) -> None:
        real(src, dst)
        server.pools[1][dst[-1], 3] ^= 1

    server.relocation._mover = SimpleNamespace(move=spoiling, checksums=server.mover.checksums)
    with pytest.raises(RelocationRefused, match=r"epoch 1: the row of slot .*\(1 rows"):
        server.relocation.apply(plan)
    server.relocation._mover = server.mover
    assert server.relocation.recover() == Step.PLANNED
    server.check()


# --- who cannot follow ---------------------------------------------------------------------------


def test_pinned_slots_are_refused_with_the_reason() -> None:
    server = busy_server()
    plan = plans_of(server)["compact"]
    for kind, reason in (
        ("transfers", "host transfers, a transfer is in flight"),
        ("published", "published, another server has the address"),
    ):
        setattr(server, kind, plan.src[:1])
        with pytest.raises(RelocationRefused, match=f"slot {plan.src[0]} cannot move: {reason}"):
            server.relocation.apply(plan)
        assert server.holders.pinned().tolist() == plan.src[:1].tolist()
        setattr(server, kind, np.zeros(0, np.int64))
    assert not server.relocation.journal.open
    server.relocation.apply(plan)
    server.check()


def test_locked_nodes_stay_where_that_was_asked_for() -> None:
    server = busy_server()
    (node,) = server.nodes()
    assert node.lock_ref == 1
    tree = TreeHolder(server.root, pin_locked=True)
    assert tree.pins()["locked node"].tolist() == node.value.tolist()
    assert TreeHolder(server.root).pins()["locked node"].tolist() == []
    node.write_through_pending = True
    assert TreeHolder(server.root).pins()["node being written to the host"].tolist() == [1, 2, 3, 4]


def test_the_unified_tree_keeps_further_lists() -> None:
    node = SimpleNamespace(
        children={}, value=np.array([1, 2]), path_device_indices=np.array([3, 1, 2]), lock_ref=0
    )
    root = SimpleNamespace(children={0: node}, value=None, lock_ref=1)
    TreeHolder(root).rewrite(np.array([0, 3, 2, 1]))
    assert (node.value.tolist(), node.path_device_indices.tolist()) == ([3, 2], [1, 3, 2])


def test_pages_that_are_indexed_do_not_move_slot_by_slot() -> None:
    holders = SlotHolders(8)
    holders.register(PageIndexHolder("index keys", 4, 8))
    plan = plan_compact(np.arange(8) == 7)
    with pytest.raises(RelocationRefused, match="index keys, in a page of 4 that is indexed"):
        holders.refuse(plan)
    alone = SlotHolders(8)
    alone.register(PageIndexHolder("index keys", 1, 8))
    alone.refuse(plan)
    with pytest.raises(ArgumentError, match="pages of one slot"):
        AllocatorHolder(PagedAllocator(8, 4))


def test_a_missing_holder_is_refused() -> None:
    holders = SlotHolders(8, required=["request table", "allocator"])
    holders.register(AllocatorHolder(TokenAllocator(7)))
    with pytest.raises(RelocationRefused, match="not registered: request table"):
        holders.refuse(plan_compact(np.arange(8) == 7))
    with pytest.raises(ArgumentError, match="registered already"):
        holders.register(AllocatorHolder(TokenAllocator(7)))


def test_plans_that_would_lose_a_row_are_refused() -> None:
    server = busy_server()
    free, live = held_slots(server.allocator), np.flatnonzero(server.live())

    def plan(src: list[int], dst: list[int]) -> MovePlan:
        return MovePlan(np.array(src), np.array(dst), 0, True)

    for wrong, message in (
        (plan([live[0]], [live[1]]), f"allocator: slot {live[1]} is not free, and nobody"),
        (plan([free[0]], [free[1]]), f"allocator: slot {free[0]} is free: there is nothing"),
        (plan([live[0], live[1]], [free[0], free[0]]), "a destination stands twice"),
        (plan([live[0], live[0]], [free[0], free[1]]), "a source stands twice"),
        (plan([live[0]], [SLOTS]), f"outside of {SLOTS}"),
        (plan([live[0]], []), "the plan has 1 sources and 0 destinations"),
        (
            plan([*live[:11]], [*live[1:11], live[0]]),
            "overlaps and has 11 rows; the reserve holds 10",
        ),
    ):
        with pytest.raises(RelocationRefused, match=message):
            server.relocation.apply(wrong)
    server.check()


def test_saved_states_and_groups_follow() -> None:
    allocator = TokenAllocator(7, need_sort=True)
    taken = allocator.alloc(5)
    allocator.free([2])
    state = allocator.backup_state()
    allocator.free_group_begin()
    allocator.free(taken[3:4])
    holder = AllocatorHolder(allocator, states=lambda: [state])
    holder.rewrite(np.array([0, 1, 5, 3, 7, 2, 6, 4]))
    assert allocator.free_pages.tolist() == [4, 6]  # sorted before, and so again
    assert allocator.release_pages.tolist() == [5]
    assert [slots.tolist() for slots in allocator.free_group or []] == [[7]]
    assert [slots.tolist() for slots in state] == [[6, 4], [5]]


@pytest.mark.parametrize("kind", ["copied", "view", "longer view", "same twice"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_saved_states_may_share_memory_with_the_free_list(kind: str, library: str) -> None:
    stored: Any = np.array([2, 3, 4, 5, 6, 7, 8])
    if library == "torch":
        stored = pytest.importorskip("torch").from_numpy(stored)
    allocator = SimpleNamespace(page_size=1, free_pages=stored[1:])
    state = {
        "copied": (allocator.free_pages + 0,),
        "view": (allocator.free_pages,),
        "longer view": (stored,),
        "same twice": (stored[1:], allocator.free_pages),
    }[kind]
    holder = AllocatorHolder(allocator, states=lambda: [state])
    where = np.arange(21)
    where[[20, 5]] = 5, 20
    holder.rewrite(where)
    assert allocator.free_pages.tolist() == [3, 4, 6, 7, 8, 20]
    assert all(slots[-6:].tolist() == [3, 4, 20, 6, 7, 8] for slots in state)
    holder.rewrite(where)  # and back again
    assert allocator.free_pages.tolist() == [3, 4, 5, 6, 7, 8]
    assert all(slots[-6:].tolist() == [3, 4, 5, 6, 7, 8] for slots in state)


def test_a_state_that_is_the_free_list_of_the_moment_follows_once() -> None:
    allocator = TokenAllocator(8)
    allocator.alloc(2)
    holder = AllocatorHolder(allocator, states=lambda: [(allocator.free_pages,)])
    where = np.arange(21)
    where[[20, 5]] = 5, 20
    holder.rewrite(where)
    assert allocator.free_pages.tolist() == [3, 4, 6, 7, 8, 20]


def holders_of(table: Any) -> dict[str, Holder]:
    """Return holders of the two rows of a table, each of which holds both."""
    child = SimpleNamespace(children={}, value=None, path_device_indices=table[1])
    root = SimpleNamespace(children={0: child}, value=table[0])
    allocator = SimpleNamespace(free_pages=table[0], staged_pages=[], free_group=[])
    return {
        "request table": TableHolder(table, lambda: [(0, 3), (1, 3)]),
        "radix tree": TreeHolder(root),
        "steps": IndexHolder("steps", lambda: [table[0], table[1]]),
        "allocator": AllocatorHolder(allocator, states=lambda: [(table[0],), (table[1],)]),
    }


@pytest.mark.parametrize("name", ["request table", "radix tree", "steps", "allocator"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("wrong", [-1, 4, 2**31 - 1])
def test_a_holder_follows_as_a_whole_or_not_at_all(wrong: int, library: str, name: str) -> None:
    table: Any = np.array([[1, 2, 3], [2, 3, wrong]], np.int32)
    if library == "torch":
        table = pytest.importorskip("torch").from_numpy(table)
    before = table.tolist()
    holder = holders_of(table)[name]
    with pytest.raises(RelocationRefused, match=f"{name}: holds slot {wrong}, outside of 4"):
        holder.rewrite(np.array([0, 3, 2, 1]))
    assert table.tolist() == before
    table[1, 2] = 1
    holder.rewrite(np.array([0, 3, 2, 1]))
    assert table.tolist() == [[3, 2, 1], [2, 1, 3]]


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_single_slot_needs_no_list(library: str) -> None:
    slot: Any = np.array(1)
    if library == "torch":
        slot = pytest.importorskip("torch").tensor(1)
    root = SimpleNamespace(children={}, value=slot, lock_ref=1)
    holders = SlotHolders(4)
    holders.register(TreeHolder(root, pin_locked=True))
    holders.register(PinHolder("host", "a transfer is in flight", lambda: slot))
    assert holders.pinned().tolist() == [1]
    where = np.array([0, 3, 2, 1])
    TreeHolder(root).rewrite(where)
    assert slot.tolist() == 3
    IndexHolder("steps", lambda: [slot]).rewrite(where)
    allocator = SimpleNamespace(free_pages=slot)
    AllocatorHolder(allocator).rewrite(where)
    assert (slot.tolist(), allocator.free_pages.tolist()) == (1, 3)
    with pytest.raises(RelocationRefused, match="hashes: a tensor has 0 entries for 4 slots"):
        BySlotHolder("hashes", lambda: [slot]).rewrite(where)


def unwritable(library: str) -> Any:
    if library == "torch":
        return pytest.importorskip("torch").zeros(1, dtype=int).expand(3)
    array = np.arange(1, 4)
    array.flags.writeable = False
    return array


@pytest.mark.parametrize("library", ["numpy", "torch"])
@pytest.mark.parametrize("kind", ["lists", "entries", "saved states"])
def test_what_cannot_be_written_is_refused_before_anything_is(kind: str, library: str) -> None:
    first, last = np.array([1, 2, 3]), unwritable(library)
    if library == "torch":
        first = pytest.importorskip("torch").from_numpy(first)
    allocator = SimpleNamespace(free_pages=first)
    holder = {
        "lists": IndexHolder("held", lambda: [first, last]),
        "entries": BySlotHolder("held", lambda: [first, last]),
        "saved states": AllocatorHolder(allocator, lambda: [(first,), (last,)], "held"),
    }[kind]
    with pytest.raises(RelocationRefused, match=r"held: a tensor of shape \[3\] is read-only or"):
        holder.rewrite(np.array([0, 2, 1]) if kind == "entries" else np.array([0, 2, 1, 3]))
    assert first.tolist() == [1, 2, 3]
    assert allocator.free_pages is first


@pytest.mark.parametrize("dtype", ["int8", "float32", "bool"])
@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_a_list_that_cannot_hold_every_slot_is_refused(library: str, dtype: str) -> None:
    slots: Any = np.array([1, 0], dtype)
    if library == "torch":
        slots = pytest.importorskip("torch").from_numpy(slots)
    where = np.arange(200)
    where[[1, 199]] = 199, 1  # as int8 that is -57
    with pytest.raises(RelocationRefused, match=f"held: a list of .*{dtype} cannot hold 200 slots"):
        IndexHolder("held", lambda: [slots]).rewrite(where)
    assert slots.tolist() == [1, 0]
    IndexHolder("held", lambda: [slots[:0]]).rewrite(where)
    if dtype == "int8":
        IndexHolder("held", lambda: [slots]).rewrite(np.array([1, 0]))
        assert slots.tolist() == [0, 1]


def test_an_epoch_that_a_holder_does_not_follow_can_be_rolled_back() -> None:
    server = busy_server()
    before = [part.copy() for part in server.chains()]
    server.in_flight[1] = SLOTS
    with pytest.raises(RelocationRefused, match=f"steps in flight: holds slot {SLOTS}, outside"):
        server.relocation.apply(plans_of(server)["contiguous"])
    assert server.relocation.recover(roll_back=True) == Step.MOVED
    server.check()
    for part, old in zip(server.chains(), before, strict=True):
        np.testing.assert_array_equal(part, old)


def test_entries_by_slot_move_in_all_tensors_or_in_none() -> None:
    long, short = np.arange(5), np.arange(3)
    with pytest.raises(RelocationRefused, match="hashes: a tensor has 3 entries for 4 slots"):
        BySlotHolder("hashes", lambda: [long, short]).rewrite(np.array([0, 3, 2, 1]))
    assert (long.tolist(), short.tolist()) == ([0, 1, 2, 3, 4], [0, 1, 2])


@pytest.mark.parametrize("library", ["numpy", "torch"])
def test_entries_that_a_holder_has_twice_move_once(library: str) -> None:
    entries: Any = np.arange(5)
    if library == "torch":
        entries = pytest.importorskip("torch").from_numpy(entries)
    BySlotHolder("hashes", lambda: [entries, entries[:4]]).rewrite(np.array([0, 2, 3, 1]))
    assert entries.tolist() == [0, 3, 1, 2, 4]


@pytest.mark.parametrize("request_", [(-1, 2), (2, 2), (0, -1), (0, 4)])
def test_requests_that_no_table_has_are_refused(request_: tuple[int, int]) -> None:
    table = np.array([[1, 2, 3], [2, 3, 1]], np.int32)
    holder = TableHolder(table, lambda: [(1, 3), request_])
    with pytest.raises(RelocationRefused, match=r"table: row .* tokens, of a table \[2, 3\]"):
        holder.rewrite(np.array([0, 3, 2, 1]))
    assert table.tolist() == [[1, 2, 3], [2, 3, 1]]


def test_a_permutation_is_taken_to_a_device_once(monkeypatch: pytest.MonkeyPatch) -> None:
    torch = pytest.importorskip("torch")
    real, taken = torch.from_numpy, []
    monkeypatch.setattr(torch, "from_numpy", lambda array: taken.append(1) or real(array))
    table = real(np.array([[1, 2, 3], [2, 3, 1]]))
    by_slot = BySlotHolder("hashes", lambda: [torch.arange(4), torch.arange(9)])
    for holder in (*holders_of(table).values(), by_slot):
        taken.clear()
        holder.rewrite(np.array([0, 3, 2, 1]))
        assert len(taken) == 1, holder.name


# --- readers -------------------------------------------------------------------------------------


def test_nothing_moves_while_a_pass_is_being_launched() -> None:
    server = busy_server()
    plan = plans_of(server)["compact"]
    with server.relocation.readers.reading(), pytest.raises(RelocationRefused, match="1 passes"):
        server.relocation.apply(plan)
    assert not server.relocation.journal.open
    server.relocation.apply(plan)


@gpu
def test_a_move_waits_for_the_last_read() -> None:
    import torch

    rows = 4096
    pool = torch.zeros((2 * rows, 256), dtype=torch.int64, device="cuda")
    pool[:rows] = torch.arange(rows, device="cuda")[:, None]
    mover = PoolMover([pool], rows)
    holders = SlotHolders(2 * rows)
    readers = Readers("cuda")
    relocation = Relocation(holders, mover, readers=readers)
    plan = MovePlan(np.arange(1, rows), np.arange(1, rows) + rows, 0, True)
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side), readers.reading():
        torch.cuda._sleep(200_000_000)
        early = pool[rows + 1 :].clone()  # reads what the move is about to write
    relocation.apply(plan)
    with torch.cuda.stream(side), readers.reading():
        late = pool[rows + 1 :].clone()
    torch.cuda.synchronize()
    assert (early == 0).all()
    assert (late[:, 0] == torch.arange(1, rows, device="cuda")).all()


# --- parts ---------------------------------------------------------------------------------------


def test_a_checksum_tells_every_byte_and_the_row_apart() -> None:
    pool = np.random.default_rng(0).integers(0, 256, (9, 48), np.uint8)
    slots = np.arange(9)
    first = row_checksums(pool, slots)
    assert len(set(first.tolist())) == 9
    for at in range(48):
        changed = pool.copy()
        changed[4, at] ^= 1 << at % 8
        different = row_checksums(changed, slots) != first
        assert different.tolist() == [slot == 4 for slot in range(9)]
    paged = pool[:8].reshape(2, 4, 48)
    np.testing.assert_array_equal(row_checksums(paged, slots[:8], page_size=4), first[:8])


def test_checksums_of_torch_are_those_of_numpy() -> None:
    torch = pytest.importorskip("torch")
    pool = np.random.default_rng(1).integers(0, 256, (5000, 24), np.uint8)
    slots = np.arange(4999)[::-1].copy()
    found = row_checksums(torch.from_numpy(pool), slots)
    np.testing.assert_array_equal(found, row_checksums(pool, slots))


def test_tensors_of_torch_follow_in_place() -> None:
    torch = pytest.importorskip("torch")
    where = np.array([0, 3, 2, 1])
    table = torch.tensor([[0, 0, 0], [1, 2, 3]], dtype=torch.int32)
    address = table.data_ptr()
    TableHolder(table, lambda: [(1, 2)]).rewrite(where)
    assert (table.tolist(), table.data_ptr()) == ([[0, 0, 0], [3, 2, 3]], address)
    hashes = torch.tensor([10, 11, 12, 13, 99])
    BySlotHolder("hashes", lambda: [hashes]).rewrite(where)
    assert hashes.tolist() == [10, 13, 12, 11, 99]
    real = SimpleNamespace(free_pages=torch.tensor([1, 3]), release_pages=torch.tensor([2]))
    AllocatorHolder(real).rewrite(np.array([0, 2, 3, 1]))
    assert (real.free_pages.tolist(), real.release_pages.tolist()) == ([1, 2], [3])


def test_long_disjoint_lists_move_in_parts() -> None:
    pool = np.arange(64, dtype=np.int64).repeat(2).reshape(64, 2)
    mover = PoolMover([pool], 5)
    mover.move(np.arange(40, 52), np.arange(1, 13))
    assert pool[1:13, 0].tolist() == list(range(40, 52))
    with pytest.raises(RelocationRefused, match="overlaps has 12 rows, the mover's 5"):
        mover.move(np.arange(12), np.arange(1, 13))
    with pytest.raises(ArgumentError, match="capacity=0"):
        PoolMover([pool], 0)
    with pytest.raises(ArgumentError, match="reserve=-1"):
        Relocation(SlotHolders(4), mover, reserve=-1)


JOURNALS = [Journal(), Journal(3, Step.STAGED, [4, 5], [6, 4], [-(2**62), 7], True)]


@pytest.mark.parametrize("journal", JOURNALS, ids=["new", "rolling back"])
def test_journals_survive_as_text(journal: Journal) -> None:
    assert Journal.from_json(journal.to_json()) == journal
