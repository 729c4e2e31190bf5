"""What a launch is, and the records of launches for whoever asks."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from cuverify.arguments import Argument, Tensor
from cuverify.contract import Contract
from cuverify.geometry import Dim3

if TYPE_CHECKING:
    from cuverify.sources import KernelSource


@dataclass(frozen=True)
class Launch:
    """A checked launch that a lane can carry out.

    Attributes
    ----------
    source : KernelSource
        The kernel's text with its values.
    contract : Contract
        The kernel's contract.
    grid, block : tuple of three int
    shared : int
        Dynamic shared memory in bytes.
    arguments : mapping
        Checked arguments by name, in the signature's order.
    reach : mapping of str to Tensor
        Tensors that the kernel reaches through pointer tables.
    device : str
        ``cpu`` or ``cuda:N``.
    """

    source: KernelSource
    contract: Contract
    grid: Dim3
    block: Dim3
    shared: int
    arguments: Mapping[str, Argument]
    reach: Mapping[str, Tensor]
    device: str

    @property
    def tensors(self) -> list[Tensor]:
        """All tensors that the launch touches."""
        return [a for a in self.arguments.values() if isinstance(a, Tensor)] + list(
            self.reach.values()
        )


class Prepared(Protocol):
    """A launch with all checks behind it."""

    def __call__(self) -> None:
        """Launch."""


class Lane(Protocol):
    """Where kernels run: the GPU, or the CPU under the checkers."""

    def prepare(self, launch: Launch) -> Prepared:
        """Compile, check what only this lane can know, and return the launch."""


@dataclass(frozen=True)
class LaunchRecord:
    """One launch that happened.

    Attributes
    ----------
    kernel : str
    lane : {"host", "device"}
    device : str
        ``cpu`` or ``cuda:N``.
    stream : int
        Address of the CUDA stream; 0 is the legacy default stream, and the host lane's.
    grid, block : tuple of three int
    shared : int
        Dynamic shared memory in bytes.
    arguments : dict
        By name: a scalar, a tensor's address, or None.
    owners : tuple
        The tensors themselves: a record keeps them alive.
    numbers : tuple of str
        Names of the scalars.
    again : callable, optional
        Launches once more with the same addresses and numbers; of the host lane only.
    """

    kernel: str
    lane: str
    device: str
    stream: int
    grid: Dim3
    block: Dim3
    shared: int
    arguments: Mapping[str, int | float | None]
    owners: tuple[Any, ...]
    numbers: tuple[str, ...] = ()
    again: Callable[[], None] | None = None


_recorders: list[list[LaunchRecord]] = []
_lock = threading.Lock()


def recording() -> bool:
    """Return whether anybody records launches."""
    return bool(_recorders)


def note(launch: Launch, lane: str, stream: int, again: Callable[[], None] | None = None) -> None:
    """Give a launch to every recorder that is open."""
    arguments = {
        name: argument.address
        if isinstance(argument, Tensor)
        else None
        if argument is None
        else argument.item()
        for name, argument in launch.arguments.items()
    }
    record = LaunchRecord(
        launch.contract.kernel,
        lane,
        launch.device,
        stream,
        launch.grid,
        launch.block,
        launch.shared,
        arguments,
        tuple(tensor.owner for tensor in launch.tensors),
        tuple(
            name
            for name, argument in launch.arguments.items()
            if argument is not None and not isinstance(argument, Tensor)
        ),
        again,
    )
    with _lock:
        for recorder in _recorders:
            recorder.append(record)


@contextlib.contextmanager
def record_launches(into: list[LaunchRecord] | None = None) -> Iterator[list[LaunchRecord]]:
    """Record every launch of every thread while the context is open.

    Parameters
    ----------
    into : list, optional
        What to append to, by its own `append`, in the thread that launches; a new list if absent.

    Yields
    ------
    list of LaunchRecord
        Grows as launches happen, in both lanes.

    Examples
    --------
    >>> with cuverify.record_launches() as records:   # doctest: +SKIP
    ...     step()
    >>> [record.kernel for record in records]         # doctest: +SKIP
    ['relocate_check', 'relocate_rows']
    """
    records: list[LaunchRecord] = [] if into is None else into
    with _lock:
        _recorders.append(records)
    try:
        yield records
    finally:
        with _lock:
            _recorders[:] = [other for other in _recorders if other is not records]
