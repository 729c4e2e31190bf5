"""What compilers say, as data: file, line, column, severity, message and the source line.

Two families of text are read: NVRTC's (EDG's front end, then ptxas) and that of g++ and clang++.
A message that names no place keeps the tool's name in angle brackets as its file, and line 0.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

PTX = "<ptx>"  # lines are those of the PTX text that NVRTC hands to ptxas
PTXAS = "<ptxas>"
NVRTC = "<nvrtc>"
COMPILER = "<compiler>"
LINKER = "<linker>"

_TAB = 8  # the width to which g++ and clang++ expand tabs in what they show


@dataclass(frozen=True)
class Diagnostic:
    """One message of a compiler.

    Parameters
    ----------
    file : str
        As the compiler names it: what `#line` said, or a header's path.
    line : int
        Counted from 1; 0 for a message about no line.
    column : int or None
        Counted from 1, in characters of the excerpt's first line, a tab being one; None when the
        compiler points at no character.
    severity : {"error", "warning", "note"}
        Notes belong to the error or warning before them.
    message : str
        One line.
    excerpt : str
        The source line and, if there is a column, a second line with a caret under it. Empty when
        it is unknown.
    """

    file: str
    line: int
    column: int | None
    severity: str
    message: str
    excerpt: str

    @property
    def where(self) -> str:
        """The place as editors read it: ``file``, ``file:line`` or ``file:line:column``."""
        if self.line == 0:
            return self.file
        column = "" if self.column is None else f":{self.column}"
        return f"{self.file}:{self.line}{column}"

    def __str__(self) -> str:
        lines = [f"{self.where}: {self.severity}: {self.message}"]
        lines += [f"    {line}" for line in self.excerpt.split("\n") if self.excerpt]
        return "\n".join(lines)


def with_excerpts(
    diagnostics: Iterable[Diagnostic], source_line: Callable[[str, int], str | None]
) -> tuple[Diagnostic, ...]:
    """Return the diagnostics with the true source lines as excerpts.

    g++ shows none for a file that it cannot open under the name that `#line` gave it; g++ and
    clang++ expand tabs, so their columns are not those of the line.

    Parameters
    ----------
    diagnostics : iterable of Diagnostic
        As parsed.
    source_line : callable
        ``source_line(file, line)`` returns the line's text or None.

    Returns
    -------
    tuple of Diagnostic
        Those whose line is unknown, or differs from what the compiler showed, are unchanged.
    """
    return tuple(_with_excerpt(entry, source_line) for entry in diagnostics)


def _with_excerpt(entry: Diagnostic, source_line: Callable[[str, int], str | None]) -> Diagnostic:
    line = source_line(entry.file, entry.line) if entry.line > 0 else None
    if line is None:
        return entry
    line = line.rstrip()
    shown = entry.excerpt.split("\n")[0]
    column = entry.column
    if not shown:  # the column is then the compiler's own, in bytes of the line
        column = None if column is None else _characters(line, column - 1) + 1
    elif shown.rstrip() != line:
        if shown.expandtabs(_TAB).rstrip() != line.expandtabs(_TAB):
            return entry
        if column is not None:
            column = _at_width(line, _width(shown[: column - 1])) + 1
    return replace(entry, column=column, excerpt=_excerpt(line, column))


def _excerpt(line: str, column: int | None) -> str:
    if column is None or not 1 <= column <= len(line) + 1:
        return line
    before = "".join(
        "\t" if character == "\t" else " " * _width(character) for character in line[: column - 1]
    )
    return f"{line}\n{before}^"


def _characters(line: str, offset: int) -> int:
    """Return how many characters the first `offset` bytes of a line are."""
    return len(line.encode("utf-8", "replace")[:offset].decode("utf-8", "ignore"))


def _width(text: str) -> int:
    """Return how many columns of a terminal a text takes, from its start on."""
    width = 0
    for character in text:
        if character == "\t":
            width += _TAB - width % _TAB
        elif not unicodedata.combining(character):
            width += 2 if unicodedata.east_asian_width(character) in "WF" else 1
    return width


def _at_width(line: str, width: int) -> int:
    """Return the index of the character that stands behind `width` columns."""
    for index in range(len(line) + 1):
        if _width(line[:index]) >= width:
            return index
    return len(line)


def _severity(word: str) -> str:
    if word in ("warning", "note"):
        return word
    return "note" if word in ("remark", "info") else "error"


# --- NVRTC ---------------------------------------------------------------------------------------

_EDG = re.compile(
    r"(?P<file>.+?)\((?P<line>\d+)\): "
    r"(?P<severity>catastrophic error|internal error|error|warning|remark|note)"
    r"(?: #(?P<number>[\w-]+))?: (?P<message>.*)"
)
_EDG_END = re.compile(
    r"At end of source: (?P<severity>[a-z ]*error|warning)(?: #(?P<number>[\w-]+))?: "
    r"(?P<message>.*)"
)
_EDG_UNIT = re.compile(r'.* detected in the compilation of "(.*)"\.')
_EDG_CONTEXT = re.compile(
    r"(?:detected during:?\s*)?(?P<message>.+?) at line (?P<line>\d+)(?: of (?P<file>.+))?"
)
_CARET = re.compile(r"\s*\^\s*")
_PTXAS_LINE = re.compile(r"ptxas .*?, line (?P<line>\d+); (?P<severity>\w+)\s*: (?P<message>.*)")
_PTXAS = re.compile(r"ptxas (?P<severity>fatal|error|warning|info)\s*: (?P<message>.*)")
_PTXAS_ADVICE = re.compile(r"\(C\d+\) ")  # an info that is more than a figure
_NVRTC = re.compile(r"nvrtc: (?P<severity>fatal|error|warning)\s*: (?P<message>.*)")

_PTXAS_GAVE_UP = "Ptx assembly aborted due to errors"  # says nothing that the others do not

ERROR_LIMIT = "Error limit reached."


def parse_nvrtc(log: str) -> tuple[Diagnostic, ...]:
    """Return everything that NVRTC's program log complains about, in its order.

    Parameters
    ----------
    log : str
        The whole log. Figures that ``--ptxas-options=-v`` puts there are passed over.

    Returns
    -------
    tuple of Diagnostic
        ptxas names lines of the PTX text: such a message has `PTX` as its file. Instantiations
        that led to an error are notes.
    """
    lines = log.replace("\0", "\n").split("\n")
    found: list[Diagnostic] = []
    units = [match[1] for line in lines if (match := _EDG_UNIT.fullmatch(line))]
    index = 0
    while index < len(lines):
        line = lines[index]
        index += 1
        if match := _EDG.fullmatch(line) or _EDG_END.fullmatch(line):
            body = []
            while index < len(lines) and lines[index].startswith("  "):
                body.append(lines[index])
                index += 1
            found.extend(_edg(match, body, units[0] if units else NVRTC))
        elif match := _PTXAS_LINE.fullmatch(line):
            severity = _severity(match["severity"])
            found.append(
                Diagnostic(PTX, int(match["line"]), None, severity, match["message"].strip(), "")
            )
        elif match := _PTXAS.fullmatch(line):
            severity = _severity(match["severity"])
            if match["severity"] == "info":
                if not _PTXAS_ADVICE.match(match["message"]):
                    continue
                severity = "warning"
            found.append(Diagnostic(PTXAS, 0, None, severity, match["message"].strip(), ""))
        elif match := _NVRTC.fullmatch(line):
            severity = _severity(match["severity"])
            found.append(Diagnostic(NVRTC, 0, None, severity, match["message"].strip(), ""))
        elif line == ERROR_LIMIT:
            found.append(Diagnostic(NVRTC, 0, None, "note", "there are more errors than these", ""))
    said = [entry for entry in found if entry.message != _PTXAS_GAVE_UP]
    return tuple(said if any(entry.severity == "error" for entry in said) else found)


def _edg(match: re.Match[str], body: list[str], unit: str) -> list[Diagnostic]:
    """Return one message of EDG and the notes that are part of it.

    Its body is: further lines of the message, the source line, the caret line, and how templates
    led there. All are indented; the source line by exactly two spaces.
    """
    carets = [k for k in range(1, len(body)) if _CARET.fullmatch(body[k])]
    caret = carets[0] if carets else 0
    message = [match["message"], *(line.strip() for line in body[: max(0, caret - 1)])]
    column, excerpt = None, ""
    if carets:
        line = body[caret - 1][2:].rstrip()
        column = _characters(line, body[caret].index("^") - 2) + 1  # EDG counts bytes
        excerpt = _excerpt(line, column)
    groups = match.groupdict()
    file, number = groups.get("file") or unit, int(groups.get("line") or 0)
    text = "; ".join(part for part in message if part)
    if match["number"]:
        text += f" [#{match['number']}]"
    found = [Diagnostic(file, number, column, _severity(match["severity"]), text, excerpt)]
    for line in body[caret + 1 :] if carets else ():
        context = line.strip()
        if place := _EDG_CONTEXT.fullmatch(context):
            # a context names its file only where that is not the message's own
            found.append(
                Diagnostic(
                    place["file"] or file, int(place["line"]), None, "note", place["message"], ""
                )
            )
        elif context and not context.startswith("detected during"):
            found.append(Diagnostic(file, number, None, "note", context.strip("[] "), ""))
    return found


# --- g++ and clang++ -----------------------------------------------------------------------------

_GNU = re.compile(
    r"(?P<file>.+?):(?P<line>\d+)(?::(?P<column>\d+))?: "
    r"(?P<severity>fatal error|internal compiler error|sorry, unimplemented|error|warning|note"
    r"|remark): (?P<message>.*)"
)
# how a template came to be instantiated; g++ says so before the error, without a severity
_GNU_CONTEXT = re.compile(r"(?P<file>.+?):(?P<line>\d+)(?::(?P<column>\d+))?:   +(?P<message>\S.*)")
_GNU_TOOL = re.compile(
    r"(?:(?P<tool>[^\s:][^:]*?): )?(?P<severity>fatal error|error|warning): (?P<message>.*)"
)
_NUMBERED = re.compile(r" *(?P<line>\d+) \| ?(?P<text>.*)")
_MARKED = re.compile(r" +\| ?(?P<text>.*)")
_BARE_CARET = re.compile(r"[\s~]*\^[\s~]*")
_LD = re.compile(r"(?:\S*[/\\])?(?:\S+-)?(?:ld|ld\.\w+|mold): (?P<message>.*)")
_LD_PLACE = re.compile(r"(?P<file>.+?):(?:(?P<line>\d+)|\([^)]*\)): (?P<message>.*)")
_LLD_REFERENCE = re.compile(r">>> referenced by (?P<file>.+?):(?P<line>\d+)")
_COLOUR = re.compile(r"\x1b\[[0-9;]*[A-Za-z]")


def parse_gnu(log: str) -> tuple[Diagnostic, ...]:
    """Return everything that g++, clang++ or their linker complains about, in its order.

    Parameters
    ----------
    log : str
        What the compiler wrote to its standard error.

    Returns
    -------
    tuple of Diagnostic
        ``In file included from`` and ``In function`` lines are passed over. Instantiations that
        led to an error are notes behind it. Messages of drivers and linkers have their tool as
        the file. Give the result to `with_excerpts`: g++ shows no line of a file that `#line`
        renamed.
    """
    lines = [_COLOUR.sub("", line) for line in log.splitlines()]
    found: list[Diagnostic] = []
    contexts: list[Diagnostic] = []
    for index, line in enumerate(lines):
        if match := _GNU.fullmatch(line):
            found.append(_gnu(match, lines[index + 1 :]))
            if match["severity"] != "note":
                found += contexts
                contexts = []
        elif match := _GNU_CONTEXT.fullmatch(line):
            entry = _gnu(match, lines[index + 1 :])
            contexts.append(replace(entry, severity="note"))
        elif _NUMBERED.fullmatch(line) or _MARKED.fullmatch(line):
            continue  # shown by the message above it
        elif (match := _LD.fullmatch(line)) or "undefined reference to" in line:
            found += _linker(match["message"] if match else line, lines[index + 1 :])
        elif match := _GNU_TOOL.fullmatch(line):
            tool = f"<{match['tool']}>" if match["tool"] else COMPILER
            severity = _severity(match["severity"])
            found.append(Diagnostic(tool, 0, None, severity, match["message"].strip(), ""))
    found += contexts
    said = [entry for entry in found if entry.file != "<collect2>"]  # it repeats that ld failed
    return tuple(said if any(entry.severity == "error" for entry in said) else found)


def _gnu(match: re.Match[str], below: list[str]) -> Diagnostic:
    groups = match.groupdict()
    number = int(match["line"])
    column = int(match["column"]) if match["column"] else None
    shown = _shown(below, number, column)
    excerpt = ""
    if shown is not None:
        line, caret = shown
        if caret is not None:
            column = _at_width(line, caret) + 1
        excerpt = _excerpt(line, column)
    severity = _severity(groups.get("severity") or "note")
    return Diagnostic(match["file"], number, column, severity, match["message"].strip(), excerpt)


def _shown(below: list[str], number: int, column: int | None) -> tuple[str, int | None] | None:
    """Return the source line under a message, and the caret's offset in columns."""
    if not below:
        return None
    if (first := _NUMBERED.fullmatch(below[0])) and int(first["line"]) == number:
        caret = None
        if len(below) > 1 and (marks := _MARKED.fullmatch(below[1])) and "^" in marks["text"]:
            caret = marks["text"].index("^")
        return first["text"].rstrip(), caret
    if len(below) > 1 and _BARE_CARET.fullmatch(below[1]) and not _GNU.fullmatch(below[0]):
        # without line numbers: clang++ before 17; g++ before 9 puts one space in front of both
        caret = below[1].index("^")
        indent = 1 if column == caret and below[0].startswith(" ") else 0
        return below[0][indent:].rstrip(), caret - indent
    return None


def _linker(message: str, below: list[str]) -> list[Diagnostic]:
    if message.rstrip().endswith(":") or "in function `" in message:
        return []  # only says where the next line's fault is
    word = "error"
    if message.startswith(("warning: ", "error: ")):
        word, message = message.split(": ", 1)
    file, line = LINKER, 0
    if place := _LD_PLACE.fullmatch(message):
        message = place["message"]
        if place["line"]:
            file, line = place["file"], int(place["line"])
    elif below and (place := _LLD_REFERENCE.match(below[0])):
        file, line = place["file"], int(place["line"])
    return [Diagnostic(file, line, None, word, message.strip(), "")]
