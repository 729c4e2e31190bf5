"""From an address in a built library to a kernel's file and line, by the library's DWARF."""

from __future__ import annotations

import bisect
import functools
from pathlib import Path
from typing import Any


class LineTable:
    """The line table of one library.

    Parameters
    ----------
    library : Path
        A shared library built with ``-g``.
    """

    def __init__(self, library: Path) -> None:
        from elftools.elf.elffile import ELFFile

        rows: list[tuple[int, str, int]] = []
        with library.open("rb") as stream:
            dwarf = ELFFile(stream).get_dwarf_info()
            for unit in dwarf.iter_CUs():
                program = dwarf.line_program_for_CU(unit)
                if program is None:
                    continue
                # DWARF 5 counts files from 0, its predecessors from 1.
                first = 0 if program.header["version"] >= 5 else 1
                names = [self._name(program, entry, first) for entry in program["file_entry"]]
                for entry in program.get_entries():
                    state = entry.state
                    if state is None:
                        continue
                    at = state.file - first
                    name = names[at] if 0 <= at < len(names) else "?"
                    rows.append((state.address, "" if state.end_sequence else name, state.line))
        rows.sort(key=lambda row: row[0])
        self._addresses = [row[0] for row in rows]
        self._rows = rows

    @staticmethod
    def _name(program: Any, entry: Any, first: int) -> str:
        """Return a file as `#line` named it: without the folder in which the compiler ran."""
        name = str(entry.name.decode(errors="replace"))
        if entry.dir_index == 0:
            return name
        folder = program["include_directory"][entry.dir_index - first].decode(errors="replace")
        return f"{folder}/{name}"

    def find(self, address: int) -> tuple[str, int]:
        """Return file and line of an address, ``("?", 0)`` where the table has none."""
        at = bisect.bisect_right(self._addresses, address) - 1
        if at < 0 or not self._rows[at][1]:
            return "?", 0
        return self._rows[at][1], self._rows[at][2]


@functools.lru_cache(maxsize=64)
def line_table(library: Path) -> LineTable:
    """Return the line table of a library; libraries never change once they are built."""
    return LineTable(library)
