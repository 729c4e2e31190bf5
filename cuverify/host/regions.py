"""The pieces of memory that a launch may touch, as the checkers see them."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from cuverify.arguments import Tensor
from cuverify.launches import Launch


@dataclass(frozen=True)
class Region:
    """One piece of memory.

    Attributes
    ----------
    base, bytes : int
        Address and size.
    allocation : int
        Address of the memory that it is a view of; a device aligns that to 256 bytes at least.
    period, used : int
        Rows of `used` bytes every `period`, with gaps that belong to nobody; 0 where it is dense.
    initialised : bool
        Whether its contents mean something before the launch.
    writable : bool
        Whether the kernel may write.
    name : str
        Of the argument; of all arguments where several share memory.
    """

    base: int
    allocation: int
    bytes: int
    period: int
    used: int
    initialised: bool
    writable: bool
    name: str

    @property
    def end(self) -> int:
        """The address behind the last byte."""
        return self.base + self.bytes


def regions_of(launch: Launch) -> list[Region]:
    """Return a launch's memory by address; arguments that share memory are one region."""
    access = {p.name: p.access for p in launch.contract.parameters}
    access |= {t.name: launch.contract.reach[t.name.split("[")[0]] for t in launch.reach.values()}
    pieces = sorted((t for t in launch.tensors if t.span_bytes), key=lambda t: t.address)
    regions: list[Region] = []
    for tensor in pieces:
        kind = access[tensor.name]
        region = Region(
            tensor.address,
            _allocation(tensor.owner),
            tensor.span_bytes,
            *_rows(tensor),
            kind in ("read", "update"),
            kind != "read",
            tensor.name,
        )
        if regions and tensor.address < regions[-1].end:
            before = regions.pop()
            region = replace(
                before,
                bytes=max(before.end, region.end) - before.base,
                period=0,
                used=0,
                initialised=before.initialised or region.initialised,
                writable=before.writable or region.writable,
                name=f"{before.name}+{region.name}",
            )
        regions.append(region)
    return regions


def _allocation(owner: Any) -> int:
    """Return the address of the memory that a tensor on the CPU is a view of."""
    if isinstance(owner, np.ndarray):
        while isinstance(owner.base, np.ndarray):
            owner = owner.base
        return int(owner.__array_interface__["data"][0])
    return int(owner.untyped_storage().data_ptr())


def _rows(tensor: Tensor) -> tuple[int, int]:
    """Return (period, used) in bytes where a tensor is rows with gaps between, else (0, 0)."""
    if tensor.is_contiguous or not tensor.shape:
        return 0, 0
    used = 1
    outer = len(tensor.shape)
    while outer and (tensor.shape[outer - 1] == 1 or tensor.strides[outer - 1] == used):
        used *= tensor.shape[outer - 1]
        outer -= 1
    period = min(
        (s for s, n in zip(tensor.strides[:outer], tensor.shape, strict=False) if n > 1), default=0
    )
    if period <= used or any(s % period for s in tensor.strides[:outer]):
        return 0, 0  # no simple rows: the whole span counts as the tensor's
    return period * tensor.itemsize, used * tensor.itemsize
