"""From an address in a built library or program to a kernel's file and line, by its DWARF."""

from __future__ import annotations

import bisect
import functools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

_SHIM = "cuverify_host"  # how the names of the host lane's own headers begin


class LineTable:
    """The line table of one library or program.

    Parameters
    ----------
    library : Path
        Built with ``-g1`` or more.
    """

    def __init__(self, library: Path) -> None:
        from elftools.elf.elffile import ELFFile

        self._library = library
        rows: list[tuple[int, str, int, int]] = []
        with library.open("rb") as stream:
            dwarf = ELFFile(stream).get_dwarf_info()
            for unit in dwarf.iter_CUs():
                program = dwarf.line_program_for_CU(unit)
                if program is None:
                    continue
                names = _file_names(program)
                for entry in program.get_entries():
                    state = entry.state
                    if state is None:
                        continue
                    name = names.get(state.file, "?")
                    name = "" if state.end_sequence else name
                    rows.append((state.address, name, state.line, state.column))
        rows.sort(key=lambda row: row[0])
        self._addresses = [row[0] for row in rows]
        self._rows = rows

    def find(self, address: int) -> tuple[str, int]:
        """Return file and line of an address, ``("?", 0)`` where the table has none.

        For code of the host lane's own headers that was inlined into a kernel (``__ldg``), that is
        the kernel's line.
        """
        at = bisect.bisect_right(self._addresses, address) - 1
        if at < 0 or not self._rows[at][1]:
            return "?", 0
        _, file, line, _ = self._rows[at]
        if not is_shim(file):
            return file, line
        callers = (place for place in self._callers(address) if not is_shim(place[0]))
        return next(callers, (Path(file).name, line))

    @functools.cached_property
    def statements(self) -> tuple[list[int], list[int]]:
        """Starts of pieces of code, and for each the number of its statement and column.

        0 stands for code of which that is not known: that of the host lane's own headers stands in
        for many places of a kernel.
        """
        numbers: dict[tuple[str, int, int], int] = {}
        found = []
        for _, file, line, column in self._rows:
            known = file and column and not is_shim(file)
            found.append(numbers.setdefault((file, line, column), len(numbers) + 1) if known else 0)
        return self._addresses, found

    def _callers(self, address: int) -> Iterator[tuple[str, int]]:
        """Yield the places at which the functions around an address were inlined, innermost first.

        Read anew each time: only a fault asks.
        """
        from elftools.elf.elffile import ELFFile

        with self._library.open("rb") as stream:
            dwarf = ELFFile(stream).get_dwarf_info()
            for unit in dwarf.iter_CUs():
                around = [
                    entry
                    for entry in unit.iter_DIEs()
                    if entry.tag == "DW_TAG_inlined_subroutine"
                    and any(low <= address < high for low, high in _extents(dwarf, unit, entry))
                ]
                if around:
                    names = _file_names(dwarf.line_program_for_CU(unit))
                    for entry in reversed(around):  # an outer one stands before what is in it
                        file = entry.attributes["DW_AT_call_file"].value
                        yield names.get(file, "?"), entry.attributes["DW_AT_call_line"].value
                    return


def is_shim(file: str) -> bool:
    """Return whether a file is one of the host lane's own headers."""
    return Path(file).name.startswith(_SHIM)


def _file_names(program: Any) -> dict[int, str]:
    """Return the files of a unit by their number, as `#line` named them."""
    # DWARF 5 counts files from 0, its predecessors from 1.
    first = 0 if program.header["version"] >= 5 else 1
    names = {}
    for number, entry in enumerate(program["file_entry"], first):
        name = entry.name.decode(errors="replace")
        if entry.dir_index:  # not the folder in which the compiler ran
            folder = program["include_directory"][entry.dir_index - first]
            name = f"{folder.decode(errors='replace')}/{name}"
        names[number] = name
    return names


def _extents(dwarf: Any, unit: Any, entry: Any) -> list[tuple[int, int]]:
    """Return the [low, high) pieces of code of an entry."""
    attributes = entry.attributes
    if "DW_AT_low_pc" in attributes and "DW_AT_high_pc" in attributes:
        low, high = attributes["DW_AT_low_pc"].value, attributes["DW_AT_high_pc"]
        is_length = not high.form.startswith("DW_FORM_addr")
        return [(low, low + high.value if is_length else high.value)]
    if "DW_AT_ranges" not in attributes:
        return []
    base = unit.get_top_DIE().attributes.get("DW_AT_low_pc")
    base = base.value if base is not None else 0
    found = []
    for piece in dwarf.range_lists().get_range_list_at_offset(
        attributes["DW_AT_ranges"].value, unit
    ):
        if hasattr(piece, "base_address"):
            base = piece.base_address
        else:
            start = 0 if getattr(piece, "is_absolute", False) else base
            found.append((start + piece.begin_offset, start + piece.end_offset))
    return found


@functools.lru_cache(maxsize=64)
def line_table(library: Path) -> LineTable:
    """Return the line table of a library; libraries never change once they are built."""
    return LineTable(library)
