"""A bare function as a step that the protocol can refill, poison and judge."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cuverify.validators.callable_case import CallableCase

_POISON_INT = 0x5A5A5A5A5A5A5A5A


class CallableStep:
    """`CallableCase` with the methods of a `ReplayableStep`; a batch is a seed.

    What it has beyond them (`inputs`, `scratch`, `padding`, ...) the protocol uses where a step has
    it.
    """

    def __init__(self, case: CallableCase) -> None:
        self.case = case
        self.inputs = case.inputs
        self.scratch = case.scratch
        self.padding = case.padding
        self.state = case.state
        self.make_step = case.make_step
        self.vary = case.vary
        self.deterministic = case.deterministic
        self.has_reference = case.reference is not None
        self._state = {name: tensor.clone() for name, tensor in case.state.items()}

    @property
    def outputs(self) -> Mapping[str, Any]:
        """The judged tensors."""
        return self.case.outputs

    @property
    def alone(self) -> tuple[str, ...]:
        """Inputs that may hold other content than the rest."""
        if self.case.alone is not None:
            return tuple(self.case.alone)
        return tuple(name for name, each in self.inputs.items() if each.is_floating_point())

    @property
    def code(self) -> tuple[tuple[str, Callable[..., Any]], ...]:
        """The functions that hold tensors of their own, by name."""
        parts: tuple[tuple[str, Callable[..., Any] | None], ...] = (
            ("step", self.case.step),
            ("refill", self.case.refill),
        )
        return tuple((name, part) for name, part in parts if part is not None)

    def refill(self, seed: int) -> None:
        """Write the inputs of a seed, and the state of the beginning."""
        if self.case.refill is not None:
            self.case.refill(seed)
        else:
            self._noise(seed)
        self.restore()

    def restore(self) -> None:
        """Put the state of the beginning back."""
        for name, tensor in self.case.state.items():
            tensor.copy_(self._state[name])

    def __call__(self) -> None:
        """Run the step."""
        self.case.step()

    def poison(self) -> None:
        """Fill all outputs that are no state."""
        kept = {tensor.data_ptr() for tensor in self.case.state.values()}
        for tensor in self.case.outputs.values():
            if tensor.data_ptr() not in kept:
                fill_poison(tensor)

    def expected(self) -> Mapping[str, Any]:
        """Return the reference's outputs, none without a reference."""
        return {} if self.case.reference is None else self.case.reference()

    def _noise(self, seed: int) -> None:
        import torch

        for name, tensor in self.case.inputs.items():
            if tensor.is_floating_point():
                source = torch.Generator().manual_seed(seed + zlib.crc32(name.encode()))
                tensor.copy_(torch.randn(tensor.shape, generator=source).to(tensor.dtype))


def fill_poison(tensor: Any) -> None:
    """Fill a tensor with NaN, or with a pattern that is no likely answer."""
    import torch

    if tensor.is_floating_point() or tensor.is_complex():
        tensor.fill_(float("nan"))
    elif tensor.dtype == torch.bool:
        tensor.logical_not_()
    else:
        bits = torch.iinfo(tensor.dtype).bits
        tensor.fill_(_POISON_INT & ((1 << (bits - 1)) - 1))


def fill_garbage(tensor: Any, index: Any, *, nan: bool) -> bool:
    """Write legal garbage into a part of a tensor; False where there is none of that kind.

    Parameters
    ----------
    tensor : torch.Tensor
    index : slice or tuple
    nan : bool
        NaN instead of large numbers. Integers have no NaN.
    """
    import torch

    part = tensor[index]
    if not part.numel():
        return False
    if tensor.is_floating_point():
        if nan:
            tensor[index] = float("nan")
        else:  # of both signs: a maximum sees one, a minimum the other
            signs = torch.arange(part.numel(), device=tensor.device) % 2
            tensor[index] = (3.0e4 - 6.0e4 * signs).to(tensor.dtype).reshape(part.shape)
        return True
    if nan:
        return False
    if tensor.dtype == torch.bool:
        tensor[index] = ~part
    elif tensor.dtype == torch.uint8:
        tensor[index] = part ^ 0xA5
    else:
        # any number may be an index: another one that the tensor holds is in bounds
        values = tensor.reshape(-1)
        tensor[index] = values[values.numel() // 2]
    return True
