"""What the mutants are made of: vectors, refills, and right ways to launch.

Values are small integers, exact in float32, so that every comparison can be by bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import cupy
import numpy as np
import torch
from cuverify.validators.callable_case import CallableCase
from cuverify.validators.zoo.kernels import kernel

N = 4000  # no multiple of a block, so that a tail exists
THREADS = 256


def blocks(n: int = N, each: int = THREADS) -> int:
    """Return how many blocks cover `n` elements."""
    return -(-n // each)


def zeros(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Return a CUDA tensor of zeros."""
    return torch.zeros(shape, dtype=dtype, device="cuda")


def drawn(n: int, seed: int, low: int = -8, high: int = 9) -> torch.Tensor:
    """Return `n` small integers as float32 on the host; another seed, other numbers."""
    values = np.random.default_rng(seed).integers(low, high, n)
    return torch.from_numpy(values.astype(np.float32))


def host(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return a copy of a tensor on the host."""
    return np.asarray(tensor.detach().cpu().numpy())


def arguments(*values: Any) -> tuple[Any, ...]:
    """Return kernel arguments of the right width: pointers, int32 and float32."""
    return tuple(_argument(value) for value in values)


def _argument(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return np.uint64(value.data_ptr())
    if isinstance(value, int):
        return np.int32(value)
    if isinstance(value, float):
        return np.float32(value)
    return value


@contextmanager
def current_stream() -> Iterator[Any]:
    """Make torch's current stream CuPy's, as every CuPy call inside a capture needs it."""
    stream = cupy.cuda.Stream.from_external(torch.cuda.current_stream())
    with stream:
        yield stream


def launch(name: str, *values: Any, grid: int = blocks(), block: int = THREADS) -> None:
    """Launch a kernel of the zoo on torch's current stream: the right way."""
    with current_stream():
        kernel(name)((grid,), (block,), arguments(*values))


@dataclass
class Vectors:
    """The step that most mutants are a fault in: ``y = 2 x + b`` on `N` elements."""

    x: torch.Tensor
    b: torch.Tensor
    y: torch.Tensor

    @classmethod
    def make(cls, n: int = N) -> Vectors:
        """Return filled inputs and an empty output on the GPU."""
        vectors = cls(zeros(n), zeros(n), zeros(n))
        vectors.refill(0)
        return vectors

    def refill(self, seed: int) -> None:
        """Write new inputs in place."""
        self.x.copy_(drawn(len(self.x), 2 * seed))
        self.b.copy_(drawn(len(self.b), 2 * seed + 1))

    def reference(self) -> dict[str, Any]:
        """Return the answer for the present inputs."""
        return {"y": 2 * host(self.x) + host(self.b)}

    def launch(self) -> None:
        """Compute the answer the right way."""
        launch("affine", self.x, self.b, self.y, len(self.y))

    def case(self, step: Callable[[], None], **changes: Any) -> CallableCase:
        """Return a case of these vectors, with other fields where `changes` names them."""
        fields = {
            "inputs": {"x": self.x, "b": self.b},
            "outputs": {"y": self.y},
            "refill": self.refill,
            "reference": self.reference,
        }
        return CallableCase(step=step, **{**fields, **changes})
