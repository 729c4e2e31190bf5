"""A bare function with its tensors, as the validator takes it."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cuverify.errors import ArgumentError

if TYPE_CHECKING:
    from cuverify.validators.compare import Tolerance


@dataclass
class CallableCase:
    """A step that somebody has, and what the validator needs to know of it.

    Parameters
    ----------
    step : callable
        ``() -> None``: launches work on torch's current stream, on the tensors below.
    inputs : mapping of str to torch.Tensor
        Static CUDA or pinned tensors that the step reads. The validator writes into them.
    outputs : mapping of str to torch.Tensor
        Static CUDA tensors that the step writes completely, unless they are in `state`, too. They
        are poisoned before each judged run.
    refill : callable, optional
        ``(seed) -> None`` writes other inputs in place and brings `state` to its beginning; the
        same seed gives the same content. Without it floating-point inputs are filled with normal
        numbers and the others keep what they hold.
    reference : callable, optional
        ``() -> mapping of str to array``: the right outputs for the inputs that are in the tensors
        now; float64 and `cuverify.validators.Bounded` are welcome. Without it a replay is compared
        with an eager run.
    scratch : mapping of str to torch.Tensor, optional
        Memory that the step writes before it reads it. It is poisoned.
    state : mapping of str to torch.Tensor, optional
        Memory that the step reads and writes. What it holds at the start is put back before each
        run, after `refill`.
    padding : mapping of str to index, optional
        By the name of an input or an output: a slice, or a tuple of slices, whose content is legal
        garbage that no other element may depend on.
    make_step : callable, optional
        ``() -> step`` gives a fresh step on the same tensors: for what a warm-up memoises.
    vary : callable, optional
        ``(n) -> None`` changes host values that may differ from step to step, and no storage. By
        default the second capture comes after `refill` of another seed.
    tolerance : Tolerance, mapping of str to Tolerance, optional
        For the comparison with the reference. Without one the values must be equal.
    deterministic : bool
        The same inputs give the same bits at every run.
    only_recorded : bool
        The step launches through cuverify's `Kernel` alone.
    alone : collection of str, optional
        Inputs that may hold another seed's content while the others keep theirs. By default those
        of a floating-point type: an index or a length may be out of bounds beside others.
    seeds : tuple of int
        For `refill`: the first is captured, the others are replayed.
    name : str

    Raises
    ------
    ArgumentError
        No outputs, or a name in `padding` or `alone` that no tensor has.
    """

    step: Callable[[], Any]
    inputs: Mapping[str, Any]
    outputs: Mapping[str, Any]
    refill: Callable[[int], None] | None = None
    reference: Callable[[], Mapping[str, Any]] | None = None
    scratch: Mapping[str, Any] = field(default_factory=dict)
    state: Mapping[str, Any] = field(default_factory=dict)
    padding: Mapping[str, Any] = field(default_factory=dict)
    make_step: Callable[[], Callable[[], Any]] | None = None
    vary: Callable[[int], None] | None = None
    tolerance: Mapping[str, Tolerance] | Tolerance | None = None
    deterministic: bool = True
    only_recorded: bool = False
    alone: Collection[str] | None = None
    seeds: tuple[int, ...] = (0, 1, 2)
    name: str = "step"

    def __post_init__(self) -> None:
        self.scratch = self.scratch or {}
        self.state = self.state or {}
        self.padding = self.padding or {}
        if not self.outputs:
            raise ArgumentError("outputs", self.outputs, "needs at least one tensor to judge")
        if not self.seeds:
            raise ArgumentError("seeds", self.seeds, "needs at least the one that is captured")
        for name in self.padding:
            if name not in self.inputs and name not in self.outputs:
                raise ArgumentError("padding", name, "is neither an input nor an output")
        for name in self.alone or ():
            if name not in self.inputs:
                raise ArgumentError("alone", name, "is no input")
