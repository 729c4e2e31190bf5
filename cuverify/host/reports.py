"""What the host lane's checkers found, in the kernel's own terms."""

from __future__ import annotations

from dataclasses import dataclass

from cuverify.geometry import Dim3


@dataclass(frozen=True)
class Actor:
    """A thread at a place in the kernel's text.

    Attributes
    ----------
    file, line : str, int
        As in the kernel's own file.
    block, thread : tuple of three int
        ``blockIdx`` and ``threadIdx``.
    """

    file: str
    line: int
    block: Dim3
    thread: Dim3

    def __str__(self) -> str:
        return f"{self.file}:{self.line} block {self.block} thread {self.thread}"


@dataclass(frozen=True)
class HostReport:
    """One fault.

    Attributes
    ----------
    kind : str
        Such as ``race``, ``out-of-bounds``, ``deadlock``; all of them are in `KINDS`.
    message : str
        What happened.
    actor : Actor
        Who did it, where.
    argument : str, optional
        The kernel's argument or shared array that is concerned.
    is_shared : bool
        Whether that is a shared array.
    byte, bytes : int
        First byte concerned, counted from the argument's start, and the argument's size.
    width : int
        Bytes of the access.
    other : Actor, optional
        The other side of a race or of a divergence.
    """

    kind: str
    message: str
    actor: Actor
    argument: str | None = None
    is_shared: bool = False
    byte: int = 0
    bytes: int = 0
    width: int = 0
    other: Actor | None = None

    @property
    def file(self) -> str:
        """The kernel's file."""
        return self.actor.file

    @property
    def line(self) -> int:
        """The line in it."""
        return self.actor.line

    def __str__(self) -> str:
        text = f"{self.actor.file}:{self.actor.line}: {self.kind}: {self.message}"
        text += f"; block {self.actor.block} thread {self.actor.thread}"
        if self.argument is not None:
            what = "shared array" if self.is_shared else "argument"
            text += f"; {what} `{self.argument}`, byte {self.byte} of {self.bytes}"
        if self.other is not None:
            text += f"; the other: {self.other}"
        return text


KINDS = {
    "out-of-bounds": "an access outside every buffer, or over the end of one",
    "misaligned": "an access whose address is no multiple of its width",
    "uninitialised-read": "a read of bytes that nothing has written",
    "pending-cp-async": "an access to bytes that a cp.async still owns",
    "race": "two accesses to a byte, one a write, with nothing that orders them",
    "write-to-read-only": "a write to an argument that the contract declares `read`",
    "divergent-barrier": "threads of one block at different __syncthreads calls",
    "deadlock": "threads that wait for each other",
    "divergent-collective": "lanes of one warp at different collectives that name each other",
    "lane-skips-collective": "a collective names a lane that returned without calling it",
    "lane-outside-mask": "a lane calls a collective whose mask leaves it out",
    "shuffle-from-outside-mask": "a shuffle reads a lane that its mask leaves out",
    "shared-memory-overflow": "shared memory beyond what the launch or any device gives",
    "shared-memory-overlap": "two pieces of dynamic shared memory that overlap",
    "bad-cp-async": "a cp.async with impossible sizes",
    "endless-loop": "more memory accesses than a launch may make",
    "trap": "the kernel called __trap()",
    "assertion": "an assert in the kernel failed",
    "address-sanitizer": "an access that ASan finds outside every object (stand-alone run)",
    "undefined-behaviour": "arithmetic or an access that C++ does not define (stand-alone run)",
    "time-limit": "a stand-alone run that did not end in its time",
    "crash": "a stand-alone run that ended without a word",
}
