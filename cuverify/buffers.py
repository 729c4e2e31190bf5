"""Buffers that ops ask of their callers: sizes, allocation in any library, refusal of overlaps."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from cuverify.arguments import Tensor, as_tensor
from cuverify.errors import ArgumentError

# torch has few unsigned types; a kernel reads a signed one of the same width as well.
_IN_TORCH = {"uint32": "int32", "uint64": "int64", "bf16": "bfloat16"}
_IN_NUMPY = {"bf16": "uint16"}


@dataclass(frozen=True)
class Buffer:
    """A buffer that the caller provides.

    Attributes
    ----------
    shape : tuple of int
    dtype : str
        As numpy spells it, or ``bf16``, which is bfloat16 in torch and uint16 elsewhere.
    """

    shape: tuple[int, ...]
    dtype: str

    @property
    def bytes(self) -> int:
        """Size of the buffer."""
        name = _IN_NUMPY.get(self.dtype, self.dtype)
        return int(np.prod(self.shape, dtype=np.int64)) * np.dtype(name).itemsize

    def zeros(self, like: Any) -> Any:
        """Return a zeroed buffer of the library and on the device of `like`."""
        torch = sys.modules.get("torch")
        if torch is not None and isinstance(like, torch.Tensor):
            dtype = getattr(torch, _IN_TORCH.get(self.dtype, self.dtype))
            return torch.zeros(self.shape, dtype=dtype, device=like.device)
        name = _IN_NUMPY.get(self.dtype, self.dtype)
        if isinstance(like, np.ndarray):
            return np.zeros(self.shape, name)
        import cupy

        with cupy.cuda.Device(like.device.id):
            return cupy.zeros(self.shape, name)


def tensor_of(name: str, value: object) -> Tensor:
    """Return the view of an argument that must be a tensor.

    Raises
    ------
    ArgumentError
        If it is none.
    """
    tensor = as_tensor(name, value)
    if tensor is None:
        raise ArgumentError(name, value, "wants a tensor of torch, CuPy or numpy")
    return tensor


def tensors_of(prefix: str, workspace: Any) -> dict[str, Tensor]:
    """Return the views of a workspace's buffers, by their names behind ``prefix.``.

    Raises
    ------
    ArgumentError
        If one is no tensor.
    """
    named = {f"{prefix}.{name}": buffer for name, buffer in vars(workspace).items()}
    return {name: tensor_of(name, buffer) for name, buffer in named.items()}


def wrong(tensor: Tensor, reason: str) -> ArgumentError:
    """Return an error about a tensor."""
    return ArgumentError(tensor.name, tensor.owner, reason)


def read(tensor: Any) -> NDArray[Any]:
    """Return a tensor's content on the host; waits for the device."""
    if isinstance(tensor, np.ndarray):
        return tensor
    torch = sys.modules.get("torch")
    if torch is not None and isinstance(tensor, torch.Tensor):
        content: NDArray[Any] = tensor.cpu().numpy()
        return content
    return np.asarray(tensor.get())


def check_workspace(
    tensors: Mapping[str, Tensor],
    sizes: Mapping[str, Buffer],
    need: str,
    prefix: str = "workspace.",
) -> None:
    """Raise if a buffer is smaller than it must be, in any dimension.

    Parameters
    ----------
    tensors : mapping of str to Tensor
        By the names of `sizes` with `prefix` in front.
    sizes : mapping of str to Buffer
        What is needed; the first dimension may be larger.
    need : str
        What needs it, such as ``"4 requests and 32 tokens"``, for the error.
    """
    for name, buffer in sizes.items():
        tensor = tensors[prefix + name]
        fits = len(tensor.shape) == len(buffer.shape) and tensor.shape[1:] == buffer.shape[1:]
        if not fits or tensor.shape[0] < buffer.shape[0]:
            raise wrong(tensor, f"is too small: {need} need shape {list(buffer.shape)} or longer")


def refuse_overlap(
    written: Sequence[Tensor], others: Sequence[Tensor], *, apart: Sequence[Tensor] = ()
) -> None:
    """Raise if a tensor that is written shares a byte with another one.

    Parameters
    ----------
    written : sequence of Tensor
        Also compared with each other.
    others : sequence of Tensor
        May share memory among themselves.
    apart : sequence of Tensor
        Written, too, and known to share nothing among themselves, as pools of many layers.

    Raises
    ------
    ArgumentError
        Naming both.
    """
    spans = [(t.address, t.address + t.span_bytes, t) for t in (*written, *apart, *others)]
    number = len(written) + len(apart)
    for at, (begin, end, tensor) in enumerate(spans[:number]):
        for other_begin, other_end, other in (*spans[: min(at, len(written))], *spans[number:]):
            if begin < other_end and other_begin < end and _share_memory(tensor, other):
                raise wrong(tensor, f"shares memory with {other.name}; the kernel writes it")


def _share_memory(a: Tensor, b: Tensor) -> bool:
    """Tell whether two tensors whose spans overlap share a byte."""
    if a.device != b.device or not a.span_bytes or not b.span_bytes:
        return False
    if a.is_contiguous and b.is_contiguous:
        return True
    # Interleaved views need not share anything. Only addresses are compared, nothing is read.
    return bool(np.shares_memory(_addresses(a), _addresses(b)))


class _Interface:
    def __init__(self, tensor: Tensor) -> None:
        self.__array_interface__ = {
            "version": 3,
            "typestr": "|u1",
            "data": (tensor.address, True),
            "shape": (*tensor.shape, tensor.itemsize),
            "strides": (*(stride * tensor.itemsize for stride in tensor.strides), 1),
        }


def _addresses(tensor: Tensor) -> NDArray[np.uint8]:
    return np.asarray(_Interface(tensor))
