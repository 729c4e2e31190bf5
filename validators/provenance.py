"""What lies at an address: whose memory, in which state, or none.

A `Landscape` is made of plain data (segments of torch's allocator, declared tensors, chunks of
CuPy's pool, mapped host ranges) and one question to the driver, so it is tested without a GPU.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cuverify.validators.observations import PointerSeen, TensorSeen

# below and above these no address of a 64-bit process lies
_LOWEST = 1 << 16
_HIGHEST = 1 << 47
_MAPPINGS = 0x7E00_0000_0000  # where Linux maps; two small integers side by side are below
_ALIGNED = 256  # what device allocations start at

_MEMORY_TYPES = {1: "pinned", 2: "device"}


@dataclass(frozen=True)
class Range:
    """Some memory and what it is.

    Parameters
    ----------
    address, size : int
    what : PointerSeen
        Of its first byte.
    """

    address: int
    size: int
    what: PointerSeen


class Landscape:
    """Knows what lies where, at one moment.

    Parameters
    ----------
    segments : sequence of mappings
        As `torch.cuda.memory_snapshot` gives them.
    tensors : sequence of TensorSeen
        Declared ones first: the first that holds an address names it.
    chunks : sequence of (address, bytes)
        Memory that CuPy's pool gave out.
    ask : callable, optional
        Takes an address, returns ``{"space", "start", "size"}`` of mapped memory, or None.
    host : sequence of (first, end)
        Mapped ranges of this process.
    """

    def __init__(
        self,
        segments: Sequence[Mapping[str, Any]] = (),
        tensors: Sequence[TensorSeen] = (),
        chunks: Sequence[tuple[int, int]] = (),
        ask: Callable[[int], Mapping[str, Any] | None] | None = None,
        host: Sequence[tuple[int, int]] = (),
    ) -> None:
        self.tensors = tuple(tensors)
        self._ask = ask
        self._host = sorted(host)
        self._ranges = sorted(
            (
                Range(
                    block["address"],
                    block["size"],
                    PointerSeen(
                        block["address"],
                        "torch",
                        tuple(segment.get("segment_pool_id", (0, 0))),
                        block["state"],
                        (block["address"], block["size"]),
                    ),
                )
                for segment in segments
                for block in segment["blocks"]
            ),
            key=lambda each: each.address,
        )
        self._starts = [each.address for each in self._ranges]
        self._chunks = sorted(chunks)

    def locate(self, address: int, *, sure: bool = True) -> PointerSeen:
        """Return what lies at an address.

        Parameters
        ----------
        address : int
        sure : bool
            False for a word inside a struct.
        """
        if address == 0:
            return PointerSeen(0, "null", sure=sure)
        if not _LOWEST <= address < _HIGHEST:
            return PointerSeen(address, "number", sure=sure)
        owner, role = self._owner(address)
        found = self._block(address)
        if found is not None:
            seen = found.what
            return PointerSeen(
                address, "torch", seen.pool, seen.state, seen.block, owner, role, sure
            )
        for start, size in self._chunks:
            if start <= address < start + size:
                return PointerSeen(
                    address, "cupy", block=(start, size), owner=owner, role=role, sure=sure
                )
        told = self._ask(address) if self._ask is not None else None
        if told is not None:
            block = (int(told["start"]), int(told["size"]))
            return PointerSeen(
                address, str(told["space"]), block=block, owner=owner, role=role, sure=sure
            )
        if self._is_host(address):
            return PointerSeen(address, "pageable", owner=owner, role=role, sure=sure)
        likely = address >= _MAPPINGS and address % _ALIGNED == 0
        return PointerSeen(address, "unmapped" if likely else "number", sure=sure)

    def is_torch(self, address: int) -> bool:
        """Tell whether an address lies in a segment of torch's allocator."""
        return self._block(address) is not None

    def words(self, data: bytes) -> tuple[PointerSeen, ...]:
        """Return what the words of an argument point to; numbers and nulls are left out.

        Parameters
        ----------
        data : bytes
            One of 8 bytes is the pointer itself, or a number. In a longer one every aligned word is
            a candidate.
        """
        sure = len(data) == 8
        found = []
        for at in range(0, len(data) - 7, 8):
            seen = self.locate(int.from_bytes(data[at : at + 8], "little"), sure=sure)
            if seen.space in ("number", "null"):
                continue
            if not sure and seen.space in ("unmapped", "pageable"):
                continue  # two small integers beside each other look like that, too
            found.append(seen)
        return tuple(found)

    def blocks(self, pool: tuple[int, int], state: str) -> list[tuple[int, int]]:
        """Return (address, bytes) of the blocks of a pool that are in a state."""
        return [
            (each.address, each.size)
            for each in self._ranges
            if each.what.pool == pool and each.what.state == state
        ]

    def _block(self, address: int) -> Range | None:
        at = bisect.bisect_right(self._starts, address) - 1
        if at < 0:
            return None
        found = self._ranges[at]
        return found if address < found.address + found.size else None

    def _owner(self, address: int) -> tuple[str, str]:
        for tensor in self.tensors:
            if tensor.address <= address < tensor.address + max(1, tensor.size):
                return tensor.path, tensor.role
        return "", ""

    def _is_host(self, address: int) -> bool:
        at = bisect.bisect_right(self._host, (address, _HIGHEST)) - 1
        return at >= 0 and address < self._host[at][1]


def asks_driver(driver: Any) -> Callable[[int], Mapping[str, Any] | None]:
    """Return a question to the driver: which mapped memory an address lies in.

    Parameters
    ----------
    driver : module
        `cuda.bindings.driver`.
    """
    attribute = driver.CUpointer_attribute

    def value(name: str, address: int) -> Any:
        code, *rest = driver.cuPointerGetAttribute(
            getattr(attribute, f"CU_POINTER_ATTRIBUTE_{name}"), address
        )
        return rest[0] if int(code) == 0 and rest else None

    def ask(address: int) -> Mapping[str, Any] | None:
        kind = value("MEMORY_TYPE", address)
        if kind is None:
            return None
        space = (
            "managed" if value("IS_MANAGED", address) else _MEMORY_TYPES.get(int(kind), "device")
        )
        start, size = value("RANGE_START_ADDR", address), value("RANGE_SIZE", address)
        return {"space": space, "start": int(start or address), "size": int(size or 0)}

    return ask


def host_ranges() -> list[tuple[int, int]]:
    """Return (first, end) of this process's mapped memory that can be read."""
    ranges = []
    try:
        with open("/proc/self/maps", encoding="utf-8", errors="replace") as maps:
            for line in maps:
                place, rights = line.split(maxsplit=2)[:2]
                if rights.startswith("r"):
                    low, _, high = place.partition("-")
                    ranges.append((int(low, 16), int(high, 16)))
    except (OSError, ValueError):
        return []
    return ranges
