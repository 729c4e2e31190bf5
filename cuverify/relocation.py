"""Move live KV rows of a running server: in epochs that a failure cannot tear apart.

An epoch carries out one plan: rows move in all pools, checksums are compared, every holder is
rewritten. A journal says how far it came. Until an epoch is done nothing that it still needs has
been overwritten, so that after a failure between any two steps it can be finished or rolled back:

- Of a disjoint plan the sources stay as they are until the epoch is over.
- The rows of a plan that overlaps are first copied into reserved slots behind the pool, and moved
  from there.

Nobody may read the pools while rows move; `Readers` holds both sides to it.
"""

from __future__ import annotations

import enum
import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from cuverify.errors import ArgumentError, RelocationRefused
from cuverify.holders import SlotHolders
from cuverify.planner import MovePlan

Slots = NDArray[np.int64]
Checkpoint = Callable[[str], None]


class Step(enum.IntEnum):
    """How far an epoch has come; each is recorded when it is complete."""

    IDLE = 0
    PLANNED = 1
    STAGED = 2
    """The rows of a plan that overlaps are in the reserve."""
    MOVED = 3
    """The rows are where they go, and their checksums have been compared."""
    DONE = 4


@dataclass
class Journal:
    """What a recovery needs to know; written before and after every step of an epoch.

    Attributes
    ----------
    epoch : int
        Number of the epoch, from 1 on.
    step : Step
    src, dst : list of int
        The plan.
    checksums : list of int
        Of each source row over all pools, before it moved.
    rolling_back : bool
        Whether the epoch is being undone.
    """

    epoch: int = 0
    step: Step = Step.IDLE
    src: list[int] = field(default_factory=list)
    dst: list[int] = field(default_factory=list)
    checksums: list[int] = field(default_factory=list)
    rolling_back: bool = False

    @property
    def open(self) -> bool:
        """Whether an epoch has begun and is not over."""
        return self.step not in (Step.IDLE, Step.DONE)

    @property
    def plan(self) -> MovePlan:
        """The plan of the present epoch."""
        return MovePlan(np.array(self.src, np.int64), np.array(self.dst, np.int64), 0, False)

    def to_json(self) -> str:
        """Return everything as one line of JSON."""
        return json.dumps({**vars(self), "step": int(self.step)})

    @classmethod
    def from_json(cls, text: str) -> Journal:
        """Read what `to_json` wrote."""
        values = json.loads(text)
        return cls(**{**values, "step": Step(values["step"])})


class Mover(Protocol):
    """What carries rows of all pools from slot to slot."""

    def move(self, src: Slots, dst: Slots) -> None:
        """Move, all sources read before any destination is written, and wait until it is done."""

    def checksums(self, slots: Slots) -> Slots:
        """Return a checksum of each slot's row over all pools."""


class Readers:
    """Keeps forward passes and moves apart, by events on a GPU.

    A pass reads between `reading` and its end: it starts behind the last move, and leaves an event
    behind its last read. A move waits for all of these events, and leaves one of its own.

    Parameters
    ----------
    device : str
        ``"cpu"`` where there are no streams to order.
    """

    def __init__(self, device: str = "cpu") -> None:
        self._on_gpu = device.startswith("cuda")
        self._open = 0
        self._reads: dict[int, Any] = {}  # the last read of each stream
        self._moved: Any = None

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Enclose the launches of a pass that reads or writes the pools, on its stream."""
        if self._on_gpu and self._moved is not None:
            import torch

            torch.cuda.current_stream().wait_event(self._moved)
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1
            if self._on_gpu:
                import torch

                self._reads[torch.cuda.current_stream().cuda_stream] = _event()

    @contextmanager
    def moving(self) -> Iterator[None]:
        """Enclose a move, on its stream.

        Raises
        ------
        RelocationRefused
            A pass is being launched: its last read has no event yet.
        """
        if self._open:
            raise RelocationRefused(f"{self._open} passes are being launched and read the pools")
        if self._on_gpu:
            import torch

            for event in self._reads.values():
                torch.cuda.current_stream().wait_event(event)
            self._reads.clear()
        try:
            yield
        finally:
            if self._on_gpu:
                self._moved = _event()


class Relocation:
    """Carries out plans, one epoch each.

    Parameters
    ----------
    holders : SlotHolders
        Everybody who holds slots of the pools.
    mover : Mover
        What moves rows; see `PoolMover`.
    journal : Journal, optional
        That of an earlier run, to be recovered from; a new one if absent.
    reserve : int
        Slots behind those of the holders that the pools have room for: most rows of a plan that
        overlaps.
    readers : Readers, optional
        Who else reads the pools.
    record : callable, optional
        Called with the journal whenever it changes, to keep it where a failure does not reach.
    checkpoint : callable, optional
        Called with a name between any two steps. What it raises is a failure in that place.
    """

    def __init__(
        self,
        holders: SlotHolders,
        mover: Mover,
        *,
        journal: Journal | None = None,
        reserve: int = 0,
        readers: Readers | None = None,
        record: Callable[[Journal], None] | None = None,
        checkpoint: Checkpoint | None = None,
    ) -> None:
        if reserve < 0:
            raise ArgumentError("reserve", reserve, "must be at least 0")
        self.holders = holders
        self.journal = Journal() if journal is None else journal
        self.reserve = reserve
        self.readers = Readers() if readers is None else readers
        self._mover = mover
        self._record = record
        self._checkpoint = checkpoint
        if self.journal.open:
            holders.open_epoch = self.journal.epoch

    def apply(self, plan: MovePlan) -> None:
        """Carry out a plan, between two steps of the server.

        Raises
        ------
        RelocationRefused
            An epoch is open, in this journal or in another one of these holders; a holder cannot
            let go of a slot, the reserve is too small, a source or a destination stands twice in
            the plan, or a pass is being launched. Nothing has changed then. Or a row changed while
            it moved, or a holder holds what is no slot; then the epoch stays open, to be recovered.
        """
        if self.journal.open:
            raise RelocationRefused(
                f"epoch {self.journal.epoch} is open at {self.journal.step.name}: recover it first"
            )
        if self.holders.open_epoch:
            raise RelocationRefused(
                f"epoch {self.holders.open_epoch} is open in another journal: recover that first"
            )
        if not len(plan):
            return
        self.holders.refuse(plan)
        for name, slots in (("source", plan.src), ("destination", plan.dst)):
            if len(np.unique(slots)) != len(slots):
                raise RelocationRefused(f"a {name} stands twice in the plan")
        if plan.overlaps and len(plan) > self.reserve:
            raise RelocationRefused(
                f"the plan overlaps and has {len(plan)} rows; the reserve holds {self.reserve}"
            )
        with self.readers.moving():
            self.journal.src, self.journal.dst = plan.src.tolist(), plan.dst.tolist()
            self.journal.checksums = self._mover.checksums(plan.src).tolist()
            self.journal.rolling_back = False
            # beyond what holders have followed by the journal of another relocation, too
            followed = map(abs, self.holders.epoch.values())
            self.journal.epoch = 1 + max([self.journal.epoch, *followed])
            self.holders.open_epoch = self.journal.epoch
            self._reach(Step.PLANNED)
            self._go_on()

    def recover(self, *, roll_back: bool = False) -> Step:
        """Bring an open epoch to an end, after a failure anywhere in it.

        Parameters
        ----------
        roll_back : bool
            Undo it, so that every row and every holder is as before it. An epoch that was being
            undone is undone further, whatever this says.

        Returns
        -------
        Step
            How far the epoch had come; ``IDLE`` or ``DONE`` where there was nothing to do.

        Raises
        ------
        RelocationRefused
            A row's checksum is not what it was: the pools were written to in between.
        """
        found = self.journal.step
        if self.journal.open:
            with self.readers.moving():
                if roll_back or self.journal.rolling_back:
                    self._undo()
                else:
                    self._go_on()
        return found

    def _go_on(self) -> None:
        plan, step = self.journal.plan, self.journal.step
        if step < Step.STAGED and plan.overlaps:
            self._mover.move(plan.src, self._reserved(plan))
            self._at("staged, not recorded")
            self._reach(Step.STAGED)
        if step < Step.MOVED:
            self._mover.move(self._reserved(plan) if plan.overlaps else plan.src, plan.dst)
            self._at("moved, not recorded")
            self._compare(plan.dst)
            self._reach(Step.MOVED)
        where = plan.permutation(self.holders.num_slots)
        for name in self.holders.names:
            self.holders.rewrite(name, where, self.journal.epoch)
            self._at(f"rewrote {name}")
        self._reach(Step.DONE)

    def _undo(self) -> None:
        plan, step = self.journal.plan, self.journal.step
        self.journal.rolling_back = True
        self._write()
        if step >= Step.STAGED and plan.overlaps:
            self._mover.move(self._reserved(plan), plan.src)
        self._compare(plan.src)
        self._at("rows are back")
        back = np.argsort(plan.permutation(self.holders.num_slots))
        for name in self.holders.names:
            if self.holders.epoch[name] == self.journal.epoch:
                # a number of its own, so that a second attempt knows who is back
                self.holders.rewrite(name, back, -self.journal.epoch)
            self._at(f"took back {name}")
        self._reach(Step.DONE)

    def _reserved(self, plan: MovePlan) -> Slots:
        return self.holders.num_slots + np.arange(len(plan))

    def _compare(self, slots: Slots) -> None:
        found = self._mover.checksums(slots)
        wrong = np.flatnonzero(found != np.array(self.journal.checksums, np.int64))
        if len(wrong):
            row = int(wrong[0])
            raise RelocationRefused(
                f"epoch {self.journal.epoch}: the row of slot {self.journal.src[row]} is not the "
                f"same in slot {slots[row]} ({len(wrong)} rows differ)"
            )

    def _reach(self, step: Step) -> None:
        self.journal.step = step
        if not self.journal.open:
            self.holders.open_epoch = 0
        self._write()
        self._at(step.name.lower())

    def _write(self) -> None:
        if self._record is not None:
            self._record(self.journal)

    def _at(self, where: str) -> None:
        if self._checkpoint is not None:
            self._checkpoint(where)


class PoolMover:
    """Moves rows of pools with `relocate`, on the host lane or on a GPU.

    Parameters
    ----------
    pools : sequence of tensor
        As for `RelocatePlan`: every pool that shares the slots, the reserve included.
    capacity : int
        Most rows of a list; longer ones take several calls, which only disjoint lists allow. Those
        of an epoch are all disjoint, so that no scratch is needed.
    page_size : int
    """

    def __init__(self, pools: Sequence[Any], capacity: int, *, page_size: int = 1) -> None:
        from cuverify.buffers import Buffer
        from cuverify.ops.relocate import RelocatePlan, RelocateWorkspace

        if capacity < 1:
            raise ArgumentError("capacity", capacity, "a list has at least one row")
        self.capacity = capacity
        self._pools = list(pools)
        self._page_size = page_size
        self._src = Buffer((capacity,), "int64").zeros(pools[0])
        self._dst = Buffer((capacity,), "int64").zeros(pools[0])
        self._count = Buffer((1,), "int32").zeros(pools[0])
        workspace = RelocateWorkspace.allocate(
            pools, capacity, page_size=page_size, scratch_bytes=None
        )
        self._plan = RelocatePlan(
            pools, self._src, self._dst, self._count, page_size=page_size, workspace=workspace
        )

    def move(self, src: Slots, dst: Slots) -> None:
        """Move rows; see `Mover`."""
        from cuverify.static_buffers import write

        if len(src) > self.capacity and np.isin(src, dst).any():
            raise RelocationRefused(
                f"a list that overlaps has {len(src)} rows, the mover's {self.capacity}"
            )
        for first in range(0, len(src), self.capacity):
            part = slice(first, first + self.capacity)
            write(self._src, src[part])
            write(self._dst, dst[part])
            write(self._count, np.array([len(src[part])], np.int32))
            self._plan()
            self._plan.read_status()

    def checksums(self, slots: Slots) -> Slots:
        """Return a checksum of each row over all pools; see `Mover`."""
        total = np.zeros(len(slots), np.int64)
        for number, pool in enumerate(self._pools):
            with np.errstate(over="ignore"):
                total = total * np.int64(31) + row_checksums(
                    pool, slots, page_size=self._page_size, seed=number
                )
        return total


def row_checksums(pool: Any, slots: Slots, *, page_size: int = 1, seed: int = 0) -> Slots:
    """Return a checksum of each row: its bytes times odd 64-bit weights, summed.

    Parameters
    ----------
    pool : tensor, [slots, ...] or [pages, page_size, ...]
        numpy's or torch's, of any dtype.
    slots : ndarray of int64
    page_size : int
    seed : int
        What the weights are drawn from.

    Returns
    -------
    ndarray of int64
        One byte that changes always changes it.
    """
    place: tuple[Any, ...] = (slots,) if page_size == 1 else divmod(slots, page_size)
    if isinstance(pool, np.ndarray):
        rows = np.ascontiguousarray(pool[place]).reshape(len(slots), -1).view(np.uint8)
        weights = _weights(rows.shape[1], seed)
        with np.errstate(over="ignore"):
            total: Slots = (rows.astype(np.int64) * weights).sum(axis=1)
        return total
    import torch

    at = tuple(torch.from_numpy(np.asarray(index)).to(pool.device) for index in place)
    given = pool[at].contiguous().reshape(len(slots), -1).view(torch.uint8)
    factors = torch.from_numpy(_weights(given.shape[1], seed)).to(pool.device)
    found = torch.empty(len(slots), dtype=torch.int64, device=pool.device)
    for first in range(0, len(slots), 4096):  # eight bytes a byte: not all rows at a time
        part = slice(first, first + 4096)
        found[part] = (given[part].long() * factors).sum(dim=1)
    return np.asarray(found.cpu())


def _weights(number: int, seed: int) -> Slots:
    rng = np.random.default_rng([seed, 0xC5])
    return rng.integers(-(2**62), 2**62, number) * 2 + 1


def _event() -> Any:
    import torch

    event = torch.cuda.Event()  # type: ignore[no-untyped-call]
    event.record()
    return event
