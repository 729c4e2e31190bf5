"""What the kernels of a cubin take: read from ptxas' log and from the cubin, which have to agree.

The log alone knows the spills, the cubin alone the launch bounds; both know the rest. A log whose
form has changed is an error and never a zero.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cuverify.errors import ToolchainError

_MAX_THREADS = 1024
_WARP = 32
# A multiprocessor's 65,536 registers lie in four equal parts; a warp takes its own from one of
# them, in units of 256.
_PARTS = 4
_PART_REGISTERS = 16384
_REGISTER_UNIT = 256
_KIB = 1024


@dataclass(frozen=True)
class Resources:
    """What one kernel takes on one architecture.

    Parameters
    ----------
    kernel : str
        Its name in the cubin.
    arch : str
        Such as ``"sm_90a"``.
    registers : int
        Per thread.
    spill_store_bytes, spill_load_bytes : int
        Bytes per thread that all spill instructions of the code store and load, in the kernel and
        in the functions it calls.
    stack_bytes : int
        Local memory per thread, spilled registers and the functions it calls included; without
        recursion and calls through pointers, whose depth the compiler cannot know.
    static_shared_bytes : int
        Shared memory per block that the text declares, without what the system reserves.
    constant_bytes : int
        ``__constant__`` memory that the whole text declares.
    max_threads : int
        Threads that a block may have: those of ``__launch_bounds__``, else those for which the
        registers suffice, at most 1,024.
    """

    kernel: str
    arch: str
    registers: int
    spill_store_bytes: int
    spill_load_bytes: int
    stack_bytes: int
    static_shared_bytes: int
    constant_bytes: int
    max_threads: int


def whole_image(image: bytes) -> bytes:
    """Return a cubin with its last byte.

    CuPy's `getCUBIN` takes the image for a C string and drops what it thinks is the terminator. The
    dropped byte is the highest of a 64-bit alignment, so it is zero. A disassembler that maps the
    tables at the image's end needs it.
    """
    if len(image) < 64 or image[:4] != b"\x7fELF":
        raise ToolchainError(f"NVRTC gave {len(image)} bytes that are no cubin")
    programs, sections = struct.unpack_from("<QQ", image, 32)
    program_size, program_count, section_size, section_count = struct.unpack_from("<4H", image, 54)
    end = max(programs + program_size * program_count, sections + section_size * section_count)
    if len(image) == end - 1:
        return image + b"\0"
    if len(image) < end:
        raise ToolchainError(f"NVRTC gave {len(image)} bytes of a cubin of {end}")
    return image


@dataclass
class _Logged:
    """What ptxas' log says of one kernel."""

    registers: int | None = None
    spill_stores: int | None = None
    spill_loads: int = 0
    shared: int = 0  # only printed when not zero


@dataclass
class _Stored:
    """What the cubin says of one kernel."""

    registers: int | None = None
    frame: int = 0  # bytes of the kernel's own stack frame
    stack: int = 0  # with those of the functions it calls
    shared: int = 0
    max_threads: int | None = None
    constant: int = 0


_LOG_ENTRY = re.compile(r"ptxas info\s*: Compiling entry function '(.+)' for '(\w+)'")
_LOG_SPILLS = re.compile(
    r"ptxas\s+\.\s+\d+ bytes stack frame, (\d+) bytes spill stores, (\d+) bytes spill loads"
)
_LOG_USED = re.compile(r"ptxas info\s*: Used (\d+) registers(.*)")


def _parse_ptxas(log: str, arch: str) -> dict[str, _Logged]:
    """Return what the lines of ``--ptxas-options=-v`` say, by kernel.

    The functions that a kernel calls, where they were not inlined, follow it: their spills count
    as the kernel's.
    """
    found: dict[str, _Logged] = {}
    kernel = ""
    for line in log.split("\n"):
        if match := _LOG_ENTRY.fullmatch(line):
            kernel = match[1]
            if match[2] != arch or kernel in found:
                raise _misread(f"compiles {kernel} for {match[2]}")
            found[kernel] = _Logged()
        elif (match := _LOG_SPILLS.fullmatch(line)) and kernel:
            entry = found[kernel]
            entry.spill_stores = (entry.spill_stores or 0) + int(match[1])
            entry.spill_loads += int(match[2])
        elif (match := _LOG_USED.fullmatch(line)) and kernel:
            entry = found[kernel]
            entry.registers = int(match[1])
            if shared := re.search(r"(\d+) bytes smem", match[2]):
                entry.shared = int(shared[1])
    for name, entry in found.items():
        if entry.registers is None or entry.spill_stores is None:
            raise _misread(f"gives no registers or no spills for {name}")
    return found


def _misread(what: str) -> ToolchainError:
    return ToolchainError(
        f"ptxas' log {what}, which is not expected; this version of NVRTC is not understood: "
        "NVRTC 12.8 to 13.5 are"
    )


# Attributes of the sections .nv.info and .nv.info.<kernel>
_FIELDS = {0x2F: "registers", 0x11: "frame", 0x12: "stack"}
_MAX_THREAD_COUNTS = 0x05  # __launch_bounds__
_REQUIRED_THREADS = 0x10  # __block_size__
_WITH_SIZE = 0x04  # the form of an attribute that is followed by its size and its bytes


def _parse_cubin(image: bytes, reserved: int) -> dict[str, _Stored]:
    """Return what the cubin says, by kernel: an ELF file with one set of sections a kernel.

    `reserved` bytes of every section for shared memory are the system's.
    """
    import io

    from elftools.common.exceptions import ELFError
    from elftools.elf.elffile import ELFFile

    try:
        sections: dict[str, Any] = {
            each.name: each for each in ELFFile(io.BytesIO(image)).iter_sections()
        }
        symbols = [symbol.name for symbol in sections[".symtab"].iter_symbols()]
        constant = sections[".nv.constant3"]["sh_size"] if ".nv.constant3" in sections else 0
        # only a kernel has a bank for its parameters
        prefix = ".nv.constant0."
        found = {name[len(prefix) :]: _Stored() for name in sections if name.startswith(prefix)}
        for name, kernel in found.items():
            kernel.constant = constant
            shared = sections.get(f".nv.shared.{name}")
            kernel.shared = max(0, shared["sh_size"] - reserved) if shared else 0
            info = sections.get(f".nv.info.{name}")
            for attribute, payload in _attributes(info.data() if info else b""):
                if attribute in (_MAX_THREAD_COUNTS, _REQUIRED_THREADS):
                    x, y, z = struct.unpack("<3I", payload)
                    kernel.max_threads = x * y * z
        info = sections.get(".nv.info")
        for attribute, payload in _attributes(info.data() if info else b""):
            if attribute in _FIELDS:
                symbol, value = struct.unpack("<2I", payload)
                owner = found.get(symbols[symbol])
                # the owner may be a function that a kernel calls, the value "unknown" (recursion)
                if owner is not None and value != 0xFFFFFFFF:
                    setattr(owner, _FIELDS[attribute], value)
    except (ELFError, KeyError, IndexError, struct.error) as error:
        raise ToolchainError(
            f"NVRTC gave a cubin that cannot be read ({type(error).__name__}: {error}); "
            "NVRTC 12.8 to 13.5 are understood"
        ) from error
    return found


def _attributes(data: bytes) -> Iterable[tuple[int, bytes]]:
    """Yield the attributes that carry bytes: form, attribute, size, bytes; the others are fixed."""
    offset = 0
    while offset < len(data):
        form, attribute, size = struct.unpack_from("<BBH", data, offset)
        offset += 4
        if form == _WITH_SIZE:
            yield attribute, data[offset : offset + size]
            offset += size


def read_resources(arch: str, log: str, image: bytes) -> dict[str, Resources]:
    """Return what each kernel of a cubin takes, in the order of their names.

    Parameters
    ----------
    arch : str
        What the cubin was compiled for.
    log : str
        NVRTC's log, with what ``--ptxas-options=-v`` adds to it.
    image : bytes
        The whole cubin.

    Raises
    ------
    ToolchainError
        Log and cubin do not agree, or one of them cannot be read.
    """
    # from sm_90 on, the first KiB of a block's shared memory is the system's
    reserved = 0 if int(re.sub(r"\D", "", arch)) < 90 else _KIB
    logged, stored = _parse_ptxas(log, arch), _parse_cubin(image, reserved)
    if logged.keys() != stored.keys():
        raise _misread(f"speaks of {sorted(logged)} and the cubin of {sorted(stored)}")
    found = {}
    for name in sorted(logged):
        said, elf = logged[name], stored[name]
        if said.registers != elf.registers or said.shared != elf.shared:
            raise _misread(
                f"counts {said.registers} registers and {said.shared} bytes of shared memory for "
                f"{name}, the cubin {elf.registers} and {elf.shared}"
            )
        assert said.registers is not None
        assert said.spill_stores is not None
        found[name] = Resources(
            kernel=name,
            arch=arch,
            registers=said.registers,
            spill_store_bytes=said.spill_stores,
            spill_load_bytes=said.spill_loads,
            stack_bytes=max(elf.frame, elf.stack),
            static_shared_bytes=elf.shared,
            constant_bytes=elf.constant,
            max_threads=elf.max_threads or _threads_for(said.registers),
        )
    return found


def _threads_for(registers: int) -> int:
    """Return how many threads of so many registers fit a multiprocessor, at most a block's."""
    unit = _REGISTER_UNIT
    warp = max(unit, -(-registers * _WARP // unit) * unit)
    return min(_MAX_THREADS, _PARTS * (_PART_REGISTERS // warp) * _WARP)
