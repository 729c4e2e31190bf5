"""How the host lane runs a launch: checked or plain, in which order, with which numerics."""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass

from cuverify.errors import ArgumentError
from cuverify.host.counts import MemoryCounts

SCHEDULES = ("ascending", "descending", "random")
MMA_MODELS = {"exact": 0, "sm_80": 80, "sm_90": 90}


@dataclass(frozen=True)
class HostOptions:
    """Settings of the host lane.

    Attributes
    ----------
    checked : bool
        Whether the access, race and barrier checkers watch. Without them only barriers are judged,
        and a stray access can end the process.
    sanitized : bool
        Whether each launch runs in a program of its own under the compiler's sanitizers instead;
        see `cuverify.host.standalone`.
    time_limit_s : float
        Seconds that such a launch may take.
    schedule : {"ascending", "descending", "random"}
        Which ready thread and which block runs first. Under the checkers ``random`` also switches
        threads in front of memory accesses.
    seed : int
        Of the random schedule.
    mma : {"exact", "sm_80", "sm_90"}
        How tensor-core products add up: in double with one rounding, or as the hardware of Ampere
        and Ada (``sm_80``) or Hopper and Blackwell (``sm_90``) does.
    compiler : str, optional
        ``g++``, ``clang++``, ``zig`` or a command; the first that is found where it is not given.
    max_accesses : int
        A checked launch that makes more memory accesses is judged endless.
    counts : MemoryCounts, optional
        What adds up the memory requests of checked launches; see `counted`.
    """

    checked: bool = False
    sanitized: bool = False
    time_limit_s: float = 60.0
    schedule: str = "ascending"
    seed: int = 0
    mma: str = "exact"
    compiler: str | None = None
    max_accesses: int = 2_000_000_000
    counts: MemoryCounts | None = None

    def __post_init__(self) -> None:
        if self.schedule not in SCHEDULES:
            raise ArgumentError("schedule", self.schedule, f"wants one of {', '.join(SCHEDULES)}")
        if self.mma not in MMA_MODELS:
            raise ArgumentError("mma", self.mma, f"wants one of {', '.join(MMA_MODELS)}")
        if not 0 <= self.seed < 2**63:
            raise ArgumentError("seed", self.seed, "wants 0 to 2**63 - 1")
        if self.checked and self.sanitized:
            raise ArgumentError(
                "sanitized", True, "is another build than the checked one: open one"
            )
        if not 0 < self.time_limit_s < 2**31:
            raise ArgumentError("time_limit_s", self.time_limit_s, "wants seconds")
        if self.max_accesses < 1:
            raise ArgumentError("max_accesses", self.max_accesses, "wants at least 1")
        if self.counts is not None and not self.checked:
            raise ArgumentError("checked", False, "inside `counted`: only checked launches count")


_current: contextvars.ContextVar[HostOptions] = contextvars.ContextVar("host_options")


def current_options() -> HostOptions:
    """Return the settings of the innermost open context, or the defaults."""
    return _current.get(HostOptions())


@contextlib.contextmanager
def host_options(**changes: object) -> Iterator[HostOptions]:
    """Change settings of the host lane while the context is open.

    Parameters
    ----------
    **changes
        Attributes of HostOptions.

    Yields
    ------
    HostOptions
        The settings in force.
    """
    unknown = changes.keys() - {field.name for field in dataclasses.fields(HostOptions)}
    if unknown:
        raise ArgumentError("host_options", sorted(unknown), "no such settings")
    options = dataclasses.replace(current_options(), **changes)  # type: ignore[arg-type]
    token = _current.set(options)
    try:
        yield options
    finally:
        _current.reset(token)


def checked(
    schedule: str = "ascending", seed: int = 0, **changes: object
) -> contextlib.AbstractContextManager[HostOptions]:
    """Run host-lane launches under the access, race and barrier checkers.

    A launch with faults raises CheckerError after it has ended; its `.reports` hold all of them.

    Parameters
    ----------
    schedule, seed, **changes
        Attributes of HostOptions.

    Examples
    --------
    >>> with cuverify.checked(schedule="random", seed=7):   # doctest: +SKIP
    ...     kernel(1, 128, out, x)
    """
    return host_options(checked=True, schedule=schedule, seed=seed, **changes)


def sanitized(**changes: object) -> contextlib.AbstractContextManager[HostOptions]:
    """Run host-lane launches as programs of their own under ASan and UBSan, for a second opinion.

    A launch with findings raises CheckerError, as under `checked`. Slow: each launch is a process.

    Parameters
    ----------
    **changes
        Attributes of HostOptions.

    Raises
    ------
    ToolchainError
        At a launch, where the compiler's sanitizers do not work here.

    Examples
    --------
    >>> with cuverify.sanitized():      # doctest: +SKIP
    ...     kernel(1, 128, out, x)
    """
    return host_options(sanitized=True, checked=False, **changes)


@contextlib.contextmanager
def counted(**changes: object) -> Iterator[MemoryCounts]:
    """Count what host-lane launches ask of memory, line by line: performance hints without a GPU.

    Launches run under the checkers, as under `checked`, and are not counted if they have faults.
    Counted are requests (instructions of a warp), 32-byte sectors of global memory, and passes
    through shared memory with their bank conflicts, by the addresses that the lanes use.

    Parameters
    ----------
    **changes
        Attributes of HostOptions.

    Yields
    ------
    MemoryCounts
        Which grows with every launch; ``print`` shows the lines that waste most first.

    Notes
    -----
    The lanes of a warp do not run in lockstep here. One request is the n-th execution of a place
    by each lane since all lanes last met, at a barrier or a collective of the whole warp, and since
    the lane last committed or waited for copies. Where lanes skip a place in some turns of a loop
    and come back in later ones without any of these between, the counts differ from a GPU's. What
    a GPU's compiler does is not seen: loads that it merges, moves out of a loop or keeps in
    registers, and registers that it spills. A copy of a vector or struct of 8 or 16 bytes counts
    as one access where its address allows; with clang and zig, which unroll loops in checked code,
    so may neighbouring scalars that a loop reads in order. Allocations count as if they began at
    multiples of 256 bytes, whatever the host's begin at; views keep their offset.

    Examples
    --------
    >>> with cuverify.counted() as counts:   # doctest: +SKIP
    ...     kernel(1, 128, out, x)
    >>> print(counts)                        # doctest: +SKIP
    """
    counts = MemoryCounts()
    with host_options(checked=True, counts=counts, **changes):
        yield counts
