"""What the launches of ops have in common: sizes of grids, `-D` values, whole numbers in bounds."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, Literal

from cuverify.buffers import wrong
from cuverify.errors import ArgumentError

if TYPE_CHECKING:
    from cuverify.arguments import Tensor
    from cuverify.kernel import Kernel
    from cuverify.sources import Value

PartialType = Literal["fp16", "bf16"]
"""What results of a piece are kept in until they are merged."""

HOST_CTAS = 2
"""Blocks on the host lane, where nothing else is said."""

MAX_WORDS = 4
"""Most visibility words of a tree token: 256 tokens."""

RESERVED_SHARED = 1024
"""Bytes of shared memory that the system takes of each block."""

_PIECE_BYTES = 16  # of one access
_CTYPES = {"int32": "int", "int64": "long long"}


@dataclass(frozen=True)
class Launched:
    """`-D` values that an op launches a text with on a GPU.

    Attributes
    ----------
    stem : str
        Of the text.
    indices : sequence of str
        Values that are the type of an index tensor: each is any of the types there are.
    types : mapping of str to sequence
        Other values that a caller's tensors decide, and what they can be.
    sets : sequence of mappings
        What the op itself chooses, several values at a time. Every set goes with every combination
        of the others.
    """

    stem: str
    indices: Sequence[str] = ()
    types: Mapping[str, Sequence[Value]] = field(default_factory=dict)
    sets: Sequence[Mapping[str, Value]] = ({},)

    def values(self) -> Iterator[dict[str, Value]]:
        """Yield all sets of values."""
        of_tensors = {**dict.fromkeys(self.indices, tuple(_CTYPES.values())), **self.types}
        for combination in itertools.product(*of_tensors.values()):
            for chosen in self.sets:
                yield {**dict(zip(of_tensors, combination, strict=True)), **chosen}


def multiprocessors(device: str | None) -> int | None:
    """Return how many multiprocessors a CUDA device has; None for the CPU."""
    if device is None or device == "cpu":
        return None
    import torch

    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def capability(device: str | None) -> tuple[int, int] | None:
    """Return the compute capability of a CUDA device; None for the CPU."""
    if device is None or device == "cpu":
        return None
    import torch

    major, minor = torch.cuda.get_device_capability(device)
    return int(major), int(minor)


def resident_blocks(kernel: Kernel, device: str | None) -> int | None:
    """Return how many blocks of a kernel a CUDA device is to hold at once; None for the CPU.

    As many a multiprocessor as the text's ``RESIDENT`` says, if its shared memory holds them.
    """
    count = multiprocessors(device)
    if count is None or device is None:
        return None
    room = shared_room(device) // ((kernel.declared_shared() or 0) + RESERVED_SHARED)
    return count * max(1, min(number_of(kernel, "RESIDENT"), room))


def shared_room(device: str) -> int:
    """Return the bytes of shared memory that a multiprocessor has for all of its blocks."""
    import cupy

    attributes = cupy.cuda.Device(int(device.removeprefix("cuda:"))).attributes
    return int(attributes["MaxSharedMemoryPerMultiprocessor"])


def grid(num_ctas: int | None, device: str | None, useful: int, per_multiprocessor: int) -> int:
    """Return the number of blocks: what the caller says, else no more than `useful` ones.

    Parameters
    ----------
    num_ctas : int or None
        What the caller says.
    device : str or None
        Where the launch runs; None for the CPU.
    useful : int
        Blocks that have something to do.
    per_multiprocessor : int
        Most blocks for each multiprocessor of a GPU; on the host lane it is `HOST_CTAS` in all.

    Raises
    ------
    ArgumentError
        The caller says no number, or less than one.
    """
    if num_ctas is not None:
        return check_blocks("num_ctas", num_ctas)
    count = multiprocessors(device)
    return max(1, min(useful, HOST_CTAS if count is None else per_multiprocessor * count))


def partial_type(partial: Any, kv_scale: float = 1.0) -> PartialType:
    """Return the type of partials: what the caller says, else one that fits a scale of codes.

    fp16 ends at 65,504, where results become infinite or NaN, and has steps of 2**-24 below 2**-14;
    with bf16, which has 8 bits, results are rounded twice. fp16 where nobody says otherwise, but
    bf16 where codes have a scale outside of [2**-8, 2**7].

    Raises
    ------
    ArgumentError
        The caller says none of the two.
    """
    if partial is None:
        return "fp16" if 2.0**-8 <= kv_scale <= 2.0**7 else "bf16"
    if partial not in ("fp16", "bf16"):
        raise ArgumentError("partial", partial, "wants 'fp16' or 'bf16'")
    return "fp16" if partial == "fp16" else "bf16"


def index_ctype(tensor: Tensor) -> str:
    """Return the C++ type of an index tensor's elements.

    Raises
    ------
    ArgumentError
        If they are neither int32 nor int64.
    """
    if tensor.dtype not in _CTYPES:
        raise wrong(tensor, f"dtype {tensor.dtype}: indices are int32 or int64")
    return _CTYPES[tensor.dtype]


def number_of(kernel: Kernel, name: str) -> int:
    """Return a `-D` value of a kernel that is a whole number."""
    source = kernel.source
    return int(source.values.get(name, source.known_values()[name]))


def whole(value: object) -> int | None:
    """Return a whole number of Python's or numpy's as an int; None of all else, bools among it."""
    if isinstance(value, bool) or not isinstance(value, Integral):
        return None
    return operator.index(value)


def is_real(value: object) -> bool:
    """Return whether a value is a real number of Python's or numpy's."""
    return isinstance(value, Real)


def check_int(name: str, value: object, low: int, high: int, what: str) -> int:
    """Return a whole number from `low` to `high` as an int.

    Raises
    ------
    ArgumentError
        It is none, naming the argument and the value, and `what` is counted.
    """
    number = whole(value)
    if number is None or not low <= number <= high:
        raise ArgumentError(name, value, f"wants {low} to {high} {what}")
    return number


def check_blocks(name: str, value: object) -> int:
    """Return a caller's number of blocks as an int.

    Raises
    ------
    ArgumentError
        It is none, or less than one.
    """
    blocks = whole(value)
    if blocks is None or blocks < 1:
        raise ArgumentError(name, value, "wants at least one block")
    return blocks


def check_row_stride(tensor: Tensor, axis: int, what: str) -> None:
    """Raise unless the rows along an axis are whole 16-byte pieces apart.

    Raises
    ------
    ArgumentError
        Naming the tensor and the distance; `what` are the rows.
    """
    distance = tensor.strides[axis] * tensor.itemsize
    if distance % _PIECE_BYTES and tensor.shape[axis] > 1:
        raise wrong(tensor, f"{what} are {distance} bytes apart, which is no multiple of 16")


def check_words(visible: Tensor, max_tree_tokens: int) -> None:
    """Raise unless visibility words [tokens, words] hold trees of so many tokens.

    Raises
    ------
    ArgumentError
        Naming the tensor and what it has.
    """
    if len(visible.shape) != 2 or not 1 <= visible.shape[1] <= MAX_WORDS:
        wanted = f"wants [tokens, words] with 1 to {MAX_WORDS} words"
        raise wrong(visible, f"has shape {list(visible.shape)}; {wanted}")
    if visible.shape[1] * 64 < max_tree_tokens:
        has = f"is too short: {visible.shape[1]} words hold {visible.shape[1] * 64} bits"
        raise wrong(visible, f"{has}, the plan's trees have up to {max_tree_tokens} tokens")
