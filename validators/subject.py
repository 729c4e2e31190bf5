"""A bare function as a step that the protocol can refill, poison and judge."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cuverify.validators.callable_case import CallableCase

_POISON_INT = 0x5A5A5A5A5A5A5A5A


class CallableStep:
    """`CallableCase` with the methods of a `ReplayableStep`; a batch is a seed."""

    def __init__(self, case: CallableCase) -> None:
        self.case = case
        self._state = {name: tensor.clone() for name, tensor in case.state.items()}

    @property
    def outputs(self) -> Mapping[str, Any]:
        """The judged tensors."""
        return self.case.outputs

    def refill(self, seed: int) -> None:
        """Write the inputs of a seed, and the state of the beginning."""
        if self.case.refill is not None:
            self.case.refill(seed)
        else:
            self._noise(seed)
        for name, tensor in self.case.state.items():
            tensor.copy_(self._state[name])

    def __call__(self) -> None:
        """Run the step."""
        self.case.step()

    def poison(self) -> None:
        """Fill all outputs that are no state, and the scratch."""
        kept = {tensor.data_ptr() for tensor in self.case.state.values()}
        for tensor in (*self.case.outputs.values(), *self.case.scratch.values()):
            if tensor.data_ptr() not in kept:
                fill_poison(tensor)

    def expected(self) -> Mapping[str, Any]:
        """Return the reference's outputs, none without a reference."""
        return {} if self.case.reference is None else self.case.reference()

    def _noise(self, seed: int) -> None:
        import torch

        for number, tensor in enumerate(self.case.inputs.values()):
            if tensor.is_floating_point():
                source = torch.Generator().manual_seed(1000 * seed + number)
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
