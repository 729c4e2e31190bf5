"""The likeness of a CUDA graph for a step on CPU tensors and cuverify's host lane.

A capture runs the step once and keeps what a CUDA graph keeps: each operation and launch, the
memory it works on, and every number that the host gave it. A replay does them again on that
memory, without the step's Python: what Python computes anew or binds elsewhere does not take part.
So frozen numbers, moved buffers and stale plans show here as they do on a GPU. What a capture
refuses, reading a value or a shape that depends on one, is refused here too.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from cuverify.validators.intercept import operations

from cuverify.errors import DeviceError
from cuverify.launches import LaunchRecord, record_launches

if TYPE_CHECKING:
    import torch


_POISON_INT = 0x5A


@dataclass(frozen=True)
class Call:
    """One operation or launch that a graph keeps.

    Attributes
    ----------
    name : str
        ``aten.add.Tensor``, or the kernel's name.
    grid : tuple of int
        Of a launch; empty for an operation.
    numbers : tuple
        Everything that is no tensor: scalars of a launch by position, the other arguments of an
        operation. What differs from one capture to the next is frozen.
    pointers : tuple of int
        Addresses that it was given.
    """

    name: str
    grid: tuple[int, ...]
    numbers: tuple[Any, ...]
    pointers: tuple[int, ...] = field(compare=False, default=())


class HostGraph:
    """A captured step.

    Attributes
    ----------
    calls : list of Call
        In the order of the capture.
    """

    def __init__(self) -> None:
        self.calls: list[Call] = []
        self._again: list[Any] = []
        self._temporaries: list[Any] = []

    @contextlib.contextmanager
    def capture(self) -> Iterator[None]:
        """Record what runs inside, and run it once.

        Raises
        ------
        DeviceError
            An operation that a CUDA capture refuses: it reads a value on the host, or the shape of
            its result depends on one.
        """
        with record_launches() as launches:

            def take(operation: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
                reason = refused_in_capture(operation, args, kwargs)
                if reason is not None:
                    raise DeviceError(
                        f"operation not permitted when stream is capturing: {operation}: {reason}"
                    )
                self._take(launches)
                result = operation(*args, **kwargs)
                self._add(operation, args, kwargs, result)
                return result

            with operations(take):
                yield
            self._take(launches)

    def replay(self) -> None:
        """Do everything again, on the memory of the capture. Temporaries are poisoned first."""
        import torch

        with torch.no_grad():
            for tensor in self._temporaries:
                _poison(tensor)
            for again in self._again:
                again()

    def _take(self, launches: list[LaunchRecord]) -> None:
        """Move the launches since the last operation into the graph."""
        for record in launches:
            if record.again is None:
                raise DeviceError(f"{record.kernel} ran on {record.device}, not on the host lane")
            numbers, pointers = numbers_and_pointers(record)
            self.calls.append(Call(record.kernel, tuple(record.grid), numbers, pointers))
            # the record keeps the tensors alive
            self._again.append(record.again)
        launches.clear()

    def _add(self, operation: Any, args: Any, kwargs: Any, result: Any) -> None:
        import torch
        from torch.utils._pytree import tree_flatten

        given = tree_flatten((args, kwargs))[0]
        tensors = [leaf for leaf in given if isinstance(leaf, torch.Tensor)]
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        outputs = [leaf for leaf in tree_flatten(result)[0] if isinstance(leaf, torch.Tensor)]
        fresh = [
            (at, tensor)
            for at, tensor in enumerate(outputs)
            if tensor.untyped_storage()._cdata not in storages
        ]
        self.calls.append(
            Call(
                str(operation),
                (),
                tuple(
                    leaf if isinstance(leaf, (bool, int, float, str)) else str(leaf)
                    for leaf in given
                    if not isinstance(leaf, torch.Tensor)
                ),
                tuple(tensor.data_ptr() for tensor in (*tensors, *outputs)),
            )
        )
        self._temporaries.extend(tensor for _, tensor in fresh)

        def again() -> None:
            now = [
                leaf
                for leaf in tree_flatten(operation(*args, **kwargs))[0]
                if isinstance(leaf, torch.Tensor)
            ]
            for at, tensor in fresh:
                tensor.copy_(now[at])

        if fresh or _writes(operation):
            self._again.append(again)


def numbers_and_pointers(
    record: LaunchRecord,
) -> tuple[tuple[tuple[str, Any], ...], tuple[int, ...]]:
    """Return the arguments of a launch: (name, value) of its numbers, and its addresses."""
    addresses = {_address(owner) for owner in record.owners}
    numbers = tuple(
        (name, value) for name, value in record.arguments.items() if value not in addresses
    )
    pointers = tuple(int(v) for v in record.arguments.values() if v is not None and v in addresses)
    return numbers, pointers


def _address(owner: Any) -> int:
    if hasattr(owner, "data_ptr"):
        return int(owner.data_ptr())
    return int(owner.__array_interface__["data"][0])


def refused_in_capture(
    operation: Any, args: Sequence[Any], kwargs: Mapping[str, Any]
) -> str | None:
    """Say why a CUDA capture refuses an operation of torch; None when it takes it.

    Parameters
    ----------
    operation : torch._ops.OpOverload
    args, kwargs
        Its arguments.

    Notes
    -----
    One element written through a boolean index is a fill where it is the host's, and makes a list
    of positions where it is the device's. Among CPU tensors that stand for those on a device the
    two look alike here, and both are taken.
    """
    import torch

    name = operation.overloadpacket.__name__ if hasattr(operation, "overloadpacket") else ""
    if name in {"index", "index_put_", "index_put", "_index_put_impl_"}:
        indices = [at for at in args[1] if at is not None]
        if not any(is_mask(at) for at in indices):
            return None
        # one number of the host into masked places is a fill, which needs no count
        if name != "index" and args[2].numel() == 1 and not _on_gpu(args[0], args[2]):
            return None
        return "a boolean index is turned into positions, whose number the host must know"
    if name == "repeat_interleave" and kwargs.get("output_size") is not None:
        return None
    if torch.Tag.data_dependent_output in operation.tags:
        return "its result is a value on the host"
    if torch.Tag.dynamic_output_shape in operation.tags:
        return "the shape of its result depends on values on the device"
    return None


def is_mask(index: torch.Tensor) -> bool:
    """Tell whether an index is turned into positions."""
    import torch

    return index.dtype in (torch.bool, torch.uint8)


def _on_gpu(*tensors: torch.Tensor) -> bool:
    return all(tensor.device.type == "cuda" for tensor in tensors)


def _writes(operation: Any) -> bool:
    return bool(operation._schema.is_mutable)


def _poison(tensor: torch.Tensor) -> None:
    if tensor.dtype.is_floating_point:
        tensor.fill_(float("nan"))
    elif tensor.dtype is not _bool():
        tensor.fill_(_POISON_INT)


def _bool() -> Any:
    import torch

    return torch.bool
