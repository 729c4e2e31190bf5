"""Everything that holds slot ids or addresses of KV rows, and how it follows when rows move.

Whoever moves live rows must rewrite every holder in one step, or leave it alone. A holder is told
where every slot of the pool goes, as a permutation of all slots (`MovePlan.permutation`), and
either follows or has pinned the slots that it cannot let go of. Tensors may be numpy's or torch's;
they are rewritten in place, so that captured graphs keep their addresses; only an allocator's own
lists are new ones. Lists of one holder may share memory, those of two holders must not: it would be
rewritten twice.
"""

from __future__ import annotations

import abc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuverify.errors import ArgumentError, RelocationRefused
from cuverify.planner import MovePlan

Slots = NDArray[np.int64]
Pins = Mapping[str, Slots]

_NONE: Slots = np.zeros(0, np.int64)


class Holder(abc.ABC):
    """Something that holds slot ids, rows by slot, or addresses.

    Attributes
    ----------
    name : str
        What a refusal calls it.
    """

    name: str

    def pins(self) -> Pins:
        """Return slots that must not move now, by the reason."""
        return {}

    def refusal(self, plan: MovePlan) -> str | None:
        """Return why a plan cannot be followed, if it cannot; pins are looked at already."""
        return None

    @abc.abstractmethod
    def rewrite(self, where: Slots) -> None:
        """Follow: the row of slot s now lies in slot ``where[s]``. All or nothing.

        Raises
        ------
        RelocationRefused
            What is held does not fit a pool of ``len(where)`` slots, or cannot be written.
        """


class TableHolder(Holder):
    """Rows of the request-to-token table, the over-allocated window included.

    Parameters
    ----------
    req_to_token : tensor of int32, shape (rows, width)
        Rewritten in place. What stands behind a request's allocated tokens is stale and stays.
    requests : callable
        Returns (row, allocated tokens) of all requests that hold slots, now.
    name : str
    """

    def __init__(
        self,
        req_to_token: Any,
        requests: Callable[[], Iterable[tuple[int, int]]],
        name: str = "request table",
    ) -> None:
        self.name = name
        self._table = req_to_token
        self._requests = requests

    def rewrite(self, where: Slots) -> None:
        """Follow in all rows in use."""
        shape = list(self._table.shape)
        requests = list(self._requests())
        for row, allocated in requests:
            if not 0 <= row < shape[0] or not 0 <= allocated <= shape[1]:
                raise RelocationRefused(
                    f"{self.name}: row {row} with {allocated} tokens, of a table {shape}"
                )
        rows = [self._table[row, :allocated] for row, allocated in requests]
        _follow(self.name, rows, where)


class IndexHolder(Holder):
    """Lists of slots that a step has built or is about to read.

    In-flight output locations, and the filled part of index lists in graph buffers.

    Parameters
    ----------
    name : str
    lists : callable
        Returns the tensors, cut to what is in use, as views of the buffers.
    """

    def __init__(self, name: str, lists: Callable[[], Iterable[Any]]) -> None:
        self.name = name
        self._lists = lists

    def rewrite(self, where: Slots) -> None:
        """Follow in every list."""
        _follow(self.name, list(self._lists()), where)


class TreeHolder(Holder):
    """Nodes of a radix tree, SGLang's default cache or its unified one.

    Parameters
    ----------
    root : object
        A node with `children` (a mapping) and `value` (a tensor of slots, or None), and, where it
        has them, `lock_ref` and `host_value`.
    pin_locked : bool
        Whether slots of locked nodes stay. A locked node's slots are also in the table of the
        request that locks it; they may move where that table is a holder, too.
    also : sequence of str
        Further attributes of a node that hold slots, such as ``path_device_indices``.
    name : str
    """

    def __init__(
        self,
        root: Any,
        *,
        pin_locked: bool = False,
        also: Sequence[str] = ("path_device_indices",),
        name: str = "radix tree",
    ) -> None:
        self.name = name
        self._root = root
        self._pin_locked = pin_locked
        self._also = tuple(also)

    def pins(self) -> Pins:
        """Pin locked nodes, where that was asked for, and nodes being written back to the host."""
        locked = [
            _host(node.value)
            for node in self._nodes()
            if self._pin_locked and node.value is not None and getattr(node, "lock_ref", 0) > 0
        ]
        leaving = [
            _host(node.value)
            for node in self._nodes()
            if node.value is not None and getattr(node, "write_through_pending", False)
        ]
        return {
            "locked node": np.concatenate([_NONE, *locked]),
            "node being written to the host": np.concatenate([_NONE, *leaving]),
        }

    def rewrite(self, where: Slots) -> None:
        """Follow in every node."""
        held = [
            getattr(node, name, None) for node in self._nodes() for name in ("value", *self._also)
        ]
        _follow(self.name, [slots for slots in held if slots is not None], where)

    def _nodes(self) -> Iterable[Any]:
        waiting = [self._root]
        while waiting:
            node = waiting.pop()
            yield node
            waiting.extend(node.children.values())


class AllocatorHolder(Holder):
    """Free, released and staged lists of an allocator, its open group, and saved states.

    What was free stays free under its new number. The allocator gets new lists, sorted where the
    old ones were; saved states, which may be views of those, are rewritten in place.

    Parameters
    ----------
    allocator : object
        With `free_pages` and, where it has them, `release_pages`, `staged_pages` and `free_group`;
        of pages of one slot.
    states : callable, optional
        Returns saved states, sequences of tensors.
    name : str
    """

    _LISTS = ("free_pages", "release_pages", "staged_pages", "free_group")

    def __init__(
        self,
        allocator: Any,
        states: Callable[[], Iterable[Sequence[Any]]] = tuple,
        name: str = "allocator",
    ) -> None:
        if getattr(allocator, "page_size", 1) != 1:
            raise ArgumentError(
                "allocator", allocator.page_size, "single slots move: wants pages of one slot"
            )
        self.name = name
        self._allocator = allocator
        self._states = states

    def refusal(self, plan: MovePlan) -> str | None:
        """Refuse to fill a slot that is not free, and to move one that is."""
        free = np.concatenate([_NONE, *map(_host, self._lists())])
        filled = np.setdiff1d(plan.dst, plan.src)
        taken = np.setdiff1d(filled, free)
        if len(taken):
            return f"slot {taken[0]} is not free, and nobody moves it away"
        moved = np.intersect1d(plan.src, free)
        return f"slot {moved[0]} is free: there is nothing to move" if len(moved) else None

    def rewrite(self, where: Slots) -> None:
        """Follow in all lists."""
        lists = list(self._lists())
        saved = [slots for state in self._states() for slots in state]
        new = _followed(self.name, [*lists, *saved], where)
        _refuse_unwritable(self.name, saved)
        fresh = iter([_sorted_like(*pair) for pair in zip(lists, new[: len(lists)], strict=True)])
        for name in self._LISTS:
            held = getattr(self._allocator, name, None)
            if isinstance(held, list):
                held[:] = [next(fresh) for _ in held]
            elif held is not None:
                setattr(self._allocator, name, next(fresh))
        _write(saved, new[len(lists) :])

    def _lists(self) -> Iterator[Any]:
        for name in self._LISTS:
            held = getattr(self._allocator, name, None)
            if isinstance(held, list):
                yield from held
            elif held is not None:
                yield held


class BySlotHolder(Holder):
    """Tensors with one entry a slot: a sliding-window map, per-slot hashes.

    Parameters
    ----------
    name : str
    tensors : callable
        Returns the tensors, of shape (num_slots, ...) or longer; what is behind stays.
    """

    def __init__(self, name: str, tensors: Callable[[], Iterable[Any]]) -> None:
        self.name = name
        self._tensors = tensors

    def rewrite(self, where: Slots) -> None:
        """Move each entry to its row's new slot."""
        tensors = list(self._tensors())
        for tensor in tensors:
            entries = len(tensor) if tensor.ndim else 0
            if entries < len(where):
                raise RelocationRefused(
                    f"{self.name}: a tensor has {entries} entries for {len(where)} slots"
                )
        _refuse_unwritable(self.name, tensors)
        back = np.argsort(where)
        fronts = [tensor[: len(where)] for tensor in tensors]
        new: list[Any] = [None] * len(fronts)
        for device, places in _by_device(fronts).items():
            there = _on(device, back)
            for at in places:
                new[at] = fronts[at][there]
        _write(fronts, new)


class PinHolder(Holder):
    """Slots that somebody else reads or writes by address: host transfers, another server.

    Parameters
    ----------
    name : str
    reason : str
        Why they must stay, as the refusal will say.
    slots : callable
        Returns the slots, now.
    """

    def __init__(self, name: str, reason: str, slots: Callable[[], Any]) -> None:
        self.name = name
        self._reason = reason
        self._slots = slots

    def pins(self) -> Pins:
        """Pin all of them."""
        return {self._reason: _host(self._slots()).astype(np.int64)}

    def rewrite(self, where: Slots) -> None:
        """Do nothing: what is held here has not moved."""


class PageIndexHolder(Holder):
    """A cache that is indexed by pages, such as index keys: single slots of a page cannot move.

    Parameters
    ----------
    name : str
    page_size : int
    num_slots : int
    """

    def __init__(self, name: str, page_size: int, num_slots: int) -> None:
        self.name = name
        self._page_size = page_size
        self._num_slots = num_slots

    def pins(self) -> Pins:
        """Pin every slot, unless pages are single slots."""
        if self._page_size == 1:
            return {}
        return {f"in a page of {self._page_size} that is indexed": np.arange(self._num_slots)}

    def rewrite(self, where: Slots) -> None:
        """Do nothing: its rows are a pool, which moves with the others."""


class SlotHolders:
    """All holders of one pool's slots.

    Parameters
    ----------
    num_slots : int
        Slots of the pool.
    required : sequence of str
        Names that must be registered before anything moves; a move without them is refused.

    Attributes
    ----------
    epoch : dict of str to int
        Which move each holder has followed last.
    open_epoch : int
        The move that has begun and is not over, in whatever journal; 0 where there is none.
    """

    def __init__(self, num_slots: int, required: Sequence[str] = ()) -> None:
        self.num_slots = num_slots
        self.epoch: dict[str, int] = {}
        self.open_epoch = 0
        self._required = tuple(required)
        self._holders: dict[str, Holder] = {}

    def register(self, holder: Holder) -> None:
        """Add a holder.

        Raises
        ------
        ArgumentError
            There is one of this name.
        """
        if holder.name in self._holders:
            raise ArgumentError("holder", holder.name, "is registered already")
        self._holders[holder.name] = holder
        self.epoch[holder.name] = 0

    @property
    def names(self) -> tuple[str, ...]:
        """Names of all holders, in the order in which they are rewritten."""
        return tuple(self._holders)

    def pinned(self) -> Slots:
        """Return all slots that must stay now, for a planner."""
        pins = [slots for holder in self._holders.values() for slots in holder.pins().values()]
        return np.unique(np.concatenate([_NONE, *pins]))

    def refuse(self, plan: MovePlan) -> None:
        """Raise if a plan cannot be carried out now.

        Raises
        ------
        RelocationRefused
            A required holder is missing, sources and destinations are not as many, a slot is out
            of range, or one that is to move, or to be overwritten, is pinned; the message names the
            holder, the reason and the slot.
        """
        missing = [name for name in self._required if name not in self._holders]
        if missing:
            raise RelocationRefused(f"holders are not registered: {', '.join(missing)}")
        if len(plan.src) != len(plan.dst):
            raise RelocationRefused(
                f"the plan has {len(plan.src)} sources and {len(plan.dst)} destinations"
            )
        both = np.concatenate([plan.src, plan.dst])
        if len(both) and not (both.min() >= 0 and both.max() < self.num_slots):
            raise RelocationRefused(f"the plan names slots outside of {self.num_slots}")
        for holder in self._holders.values():
            for reason, slots in holder.pins().items():
                hit = np.intersect1d(both, slots)
                if len(hit):
                    raise RelocationRefused(
                        f"slot {hit[0]} cannot move: {holder.name}, {reason} ({len(hit)} slots)"
                    )
            refusal = holder.refusal(plan)
            if refusal is not None:
                raise RelocationRefused(f"{holder.name}: {refusal}")

    def rewrite(self, name: str, where: Slots, epoch: int) -> bool:
        """Let one holder follow, unless it has followed this move already.

        Returns
        -------
        bool
            Whether it had to.
        """
        if self.epoch[name] == epoch:
            return False
        self._holders[name].rewrite(where)
        self.epoch[name] = epoch
        return True


def _follow(name: str, lists: Sequence[Any], where: Slots) -> None:
    """Replace slots in place by where they go."""
    new = _followed(name, lists, where)
    _refuse_unwritable(name, lists)
    _write(lists, new)


def _write(lists: Sequence[Any], new: Sequence[Any]) -> None:
    for slots, values in zip(lists, new, strict=True):
        slots[...] = values


def _followed(name: str, lists: Sequence[Any], where: Slots) -> list[Any]:
    """Return where the slots of all lists go, in new tensors; nothing is written.

    Raises
    ------
    RelocationRefused
        A list of this holder holds what is no slot, or cannot hold every slot.
    """
    new: list[Any] = [None] * len(lists)
    for dtype in {slots.dtype for slots in lists if 0 not in slots.shape}:
        if not _names_all(dtype, len(where)):
            raise RelocationRefused(f"{name}: a list of {dtype} cannot hold {len(where)} slots")
    for device, places in _by_device(lists).items():
        # all at once: for each device one copy of the permutation, and one wait for the bounds
        held = [lists[at].reshape(-1) for at in places]
        slots = _joined(device, held)
        for found in (int(slots.min()), int(slots.max())) if len(slots) else ():
            if not 0 <= found < len(where):
                raise RelocationRefused(f"{name}: holds slot {found}, outside of {len(where)}")
        moved = _on(device, where)[slots]
        begin = 0
        for at, part in zip(places, held, strict=True):
            end = begin + len(part)
            new[at] = _as_dtype(moved[begin:end].reshape(lists[at].shape), lists[at].dtype)
            begin = end
    return new


def _names_all(dtype: Any, num_slots: int) -> bool:
    """Return whether every slot is a number of a dtype of numpy or torch."""
    if isinstance(dtype, np.dtype):
        return dtype.kind in "iu" and np.iinfo(dtype).max >= num_slots - 1
    import torch

    whole = not (dtype.is_floating_point or dtype.is_complex or dtype == torch.bool)
    return whole and torch.iinfo(dtype).max >= num_slots - 1


def _refuse_unwritable(name: str, tensors: Sequence[Any]) -> None:
    """Raise if one of these cannot be written in place: then none shall be."""
    for tensor in tensors:
        if isinstance(tensor, np.ndarray):
            writable = tensor.flags.writeable
        else:
            sizes = zip(tensor.shape, tensor.stride(), strict=True)
            writable = all(extent <= 1 or stride != 0 for extent, stride in sizes)
        if not writable:
            raise RelocationRefused(
                f"{name}: a tensor of shape {list(tensor.shape)} is read-only or expanded"
            )


def _by_device(tensors: Sequence[Any]) -> dict[Any, list[int]]:
    """Return the places of tensors by their device, which is None for numpy's."""
    places: dict[Any, list[int]] = {}
    for at, tensor in enumerate(tensors):
        device = None if isinstance(tensor, np.ndarray) else tensor.device
        places.setdefault(device, []).append(at)
    return places


def _on(device: Any, slots: Slots) -> Any:
    """Return slots of the host on a device of `_by_device`."""
    if device is None:
        return slots
    import torch

    return torch.from_numpy(slots).to(device)


def _joined(device: Any, lists: Sequence[Any]) -> Any:
    if device is None:
        return np.concatenate(lists).astype(np.int64)
    import torch

    return torch.cat([slots.long() for slots in lists])


def _as_dtype(slots: Any, dtype: Any) -> Any:
    return slots.astype(dtype) if isinstance(slots, np.ndarray) else slots.to(dtype)


def _host(slots: Any) -> NDArray[Any]:
    """Return slots of any shape as one list of numpy's."""
    held: NDArray[Any] = np.asarray(slots.cpu() if hasattr(slots, "cpu") else slots)
    return held.reshape(-1)


def _sorted_like(was: Any, new: Any) -> Any:
    """Return `new`, sorted if `was` is; of numpy or torch."""
    held = _host(was)
    if len(held) < 2 or not (np.diff(held) > 0).all():
        return new
    return np.sort(new) if isinstance(new, np.ndarray) else new.sort().values
