"""What a contract run showed, as plain records that `judge` turns into findings."""

from __future__ import annotations

from dataclasses import dataclass, field

from cuverify.sglang.schedule import Play
from cuverify.validators.compare import Mismatch
from cuverify.validators.observations import Fault


@dataclass(frozen=True)
class PlaySeen:
    """One replay.

    Attributes
    ----------
    number : int
        Its place in the run, from 0.
    play : Play
    mismatch : Mismatch, optional
        How the real requests' outputs differ from the oracle.
    must_change, unchanged : int
        Elements that a right replay must change, and those of them that kept the poison.
    digest : str
        Of the real requests' output bits.
    repeat : Mismatch, optional
        How a second replay on the same inputs differs from the first, where it was made.
    moved : tuple of str
        Tensors of the backend that lay elsewhere when this graph was captured.
    changed : tuple of str
        Inputs, or slots of the pool, that nobody may write and that hold something else now.
    fault : Fault, optional
        What was raised; nothing else is known then.
    """

    number: int
    play: Play
    mismatch: Mismatch | None = None
    must_change: int = 0
    unchanged: int = 0
    digest: str = ""
    repeat: Mismatch | None = None
    moved: tuple[str, ...] = ()
    changed: tuple[str, ...] = ()
    fault: Fault | None = None

    @property
    def wrong(self) -> bool:
        """Whether it raised or its outputs are wrong."""
        return self.fault is not None or self.mismatch is not None


@dataclass(frozen=True)
class FrozenSeen:
    """A difference between two captures of one size on different batches.

    Attributes
    ----------
    captured : int
    kernel : str
        Kernel or operation.
    what : {"grid", "number", "calls"}
        The launch's grid, a number that the host gave, or how many calls there are.
    values : tuple of str
        Both values.
    """

    captured: int
    kernel: str
    what: str
    values: tuple[str, str]


@dataclass
class ContractSeen:
    """One backend, played through one family of hooks on one device.

    Attributes
    ----------
    backend : str
    family : str
    device : str
        ``host lane``, or the GPU's name.
    graphs : str
        What captured: ``CUDA graphs``, or their likeness.
    where : str, optional
        ``file:line`` of the backend.
    eager : list of PlaySeen
    plays : list of PlaySeen
    frozen : list of FrozenSeen
    compared_captures : str, optional
        Why no two captures were compared; None where they were.
    dtypes : dict of str to (str, str)
        Tensors of the backend whose dtype in eager runs is not that in graphs.
    faults : list of Fault
        Of making the backend, its state or a capture.
    captured : list of int
        Sizes whose capture came to its end.
    """

    backend: str
    family: str
    device: str
    graphs: str
    where: str | None = None
    eager: list[PlaySeen] = field(default_factory=list)
    plays: list[PlaySeen] = field(default_factory=list)
    frozen: list[FrozenSeen] = field(default_factory=list)
    compared_captures: str | None = "no capture came to its end"
    dtypes: dict[str, tuple[str, str]] = field(default_factory=dict)
    faults: list[Fault] = field(default_factory=list)
    captured: list[int] = field(default_factory=list)
