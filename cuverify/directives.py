"""What a CUDA text tells the preprocessor, read without running one.

Nothing is evaluated: the includes of every branch are seen, so that a digest over them does not
depend on which branch a compiler takes.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache

# Stands where a line break was removed (a spliced line, a comment or a raw string over several
# lines), so that line numbers stay true.
_BREAK = "\x01"

_COMMENTS_AND_LITERALS = re.compile(
    r"""
      (?P<include> ^[ \t]* (?:\#|%:) [ \t]* include [ \t]* <[^>\n]*> )  # <a//b.h> holds no comment
    | (?P<comment> //[^\n]* | /\*.*?(?:\*/|\Z) )
    | (?P<raw>     \b(?:u8|u|U|L)?R"(?P<delimiter>[^()\\\s]{0,16})\(.*?\)(?P=delimiter)" )
    | (?P<literal> "(?:[^"\\\n]|\\.)*" | '(?:[^'\\\n]|\\.)*' )
    | (?P<number>  (?<![\w.])\.?\d(?:[eEpP][+-]|'\w|[\w.])* )           # 1'000 opens no literal
    """,
    re.DOTALL | re.MULTILINE | re.VERBOSE,
)
_DIRECTIVE = re.compile(r"\s*(?:#|%:)\s*([A-Za-z_]\w*)\s*(.*?)\s*", re.DOTALL)
_SPELLED = re.compile(r'"([^"]*)"|<([^>]*)>')
_PROBE = re.compile(r'__has_include\s*\(\s*(?:"([^"]+)"|<([^>]+)>)')
_DEFINE = re.compile(r"([A-Za-z_]\w*)(\(?)\s*(.*)", re.DOTALL)
_IDENTIFIER = re.compile(r"[A-Za-z_]\w*")
_CONTRACT_LINE = re.compile(r"^\s*//\s*@.*$", re.MULTILINE)


@dataclass(frozen=True)
class Include:
    """One `#include`, or one header that `__has_include` asks for.

    Parameters
    ----------
    name : str
        As spelled, without its quotes; the spelling itself where a macro stands for it.
    form : {"quoted", "angle", "unreadable"}
        `unreadable`: a macro stands for the name, or the directive is `#include_next`.
    line : int
        Counted from 1.
    conditional : bool
        Whether a compiler may never look for it: it stands inside an `#if` that is no include
        guard, or it is only asked for.
    """

    name: str
    form: str
    line: int
    conditional: bool


@dataclass(frozen=True)
class Define:
    """One `#define`.

    Parameters
    ----------
    name : str
        The macro.
    text : str or None
        What it stands for; None for a macro with parameters.
    line : int
        Counted from 1.
    tested : frozenset of str
        The identifiers in the conditions of all `#if`s around it.
    """

    name: str
    text: str | None
    line: int
    tested: frozenset[str]


@dataclass(frozen=True)
class Directives:
    """The includes, defines and identifiers of one text.

    Parameters
    ----------
    includes : tuple of Include
        In the text's order.
    defines : tuple of Define
        In the text's order.
    identifiers : frozenset of str
        Every identifier in code, in directives and in contract lines (`// @...`).
    renumbers : bool
        Whether the text holds `#line` of its own, so that a compiler's line numbers are not those
        of the text.
    """

    includes: tuple[Include, ...]
    defines: tuple[Define, ...]
    identifiers: frozenset[str]
    renumbers: bool


@lru_cache(maxsize=256)
def read_directives(text: str) -> Directives:
    r"""Return what `text` tells the preprocessor.

    Parameters
    ----------
    text : str
        C++ text with ``\n`` as its line ends. Need not compile.
    """
    cleaned, code = _clean(text)
    found = [
        (line, match[1], match[2])
        for line, content in _numbered(cleaned)
        if (match := _DIRECTIVE.fullmatch(content))
    ]
    includes: list[Include] = []
    defines: list[Define] = []
    renumbers = False
    outermost = 1 if _is_guarded(found) else 0
    conditions: list[frozenset[str]] = []
    for line, word, rest in found:
        inside = len(conditions) > outermost
        if word in ("if", "ifdef", "ifndef"):
            conditions.append(_identifiers(rest))
        elif word in ("elif", "elifdef", "elifndef") and conditions:
            conditions[-1] |= _identifiers(rest)
        elif word == "endif" and conditions:
            conditions.pop()
        elif word in ("include", "import", "include_next"):
            includes.append(_include(word, rest, line, inside))
        elif word == "line":
            renumbers = True
        elif word == "define" and (match := _DEFINE.fullmatch(rest)):
            name, parameters, replacement = match.groups()
            tested = frozenset[str]().union(*conditions)
            defines.append(Define(name, None if parameters else replacement, line, tested))
        if word in ("if", "elif"):
            includes.extend(
                Include(quoted or angled, "quoted" if quoted else "angle", line, True)
                for quoted, angled in _PROBE.findall(rest)
            )
    names = _identifiers(code).union(*(_identifiers(line) for line in _CONTRACT_LINE.findall(text)))
    return Directives(tuple(includes), tuple(defines), names, renumbers)


def _include(word: str, rest: str, line: int, conditional: bool) -> Include:
    match = _SPELLED.match(rest)
    if match is None or word == "include_next":
        return Include(rest, "unreadable", line, conditional)
    quoted, angled = match.groups()
    if quoted is not None:
        return Include(quoted, "quoted", line, conditional)
    return Include(angled.strip(), "angle", line, conditional)


def _is_guarded(found: list[tuple[int, str, str]]) -> bool:
    """Tell whether an include guard is around the whole text: such an `#if` is no condition."""
    if len(found) < 3 or found[1][1] != "define":
        return False
    guard = found[1][2]
    if found[0][1:] != ("ifndef", guard) and not (
        found[0][1] == "if" and re.fullmatch(rf"!\s*defined\s*\(?\s*{guard}\s*\)?", found[0][2])
    ):
        return False
    depth = 0
    for index, (_, word, _) in enumerate(found):
        depth += word in ("if", "ifdef", "ifndef")
        depth -= word == "endif"
        if depth == 0:
            return index == len(found) - 1
    return False


def _identifiers(text: str) -> frozenset[str]:
    return frozenset(_IDENTIFIER.findall(text))


def _clean(text: str) -> tuple[str, str]:
    """Return the text without comments and splices, and the same without literals as well."""
    spliced = text.replace(_BREAK, " ").replace("\\\n", _BREAK)

    def without_comments(match: re.Match[str]) -> str:
        piece = match.group()
        if match["comment"] is not None:
            return " " + _BREAK * (piece.count("\n") + piece.count(_BREAK))
        return piece.replace("\n", _BREAK)

    def without_literals(match: re.Match[str]) -> str:
        return match.group() if match["include"] is not None else " "

    cleaned = _COMMENTS_AND_LITERALS.sub(without_comments, spliced)
    code = _COMMENTS_AND_LITERALS.sub(without_literals, cleaned)
    return cleaned, code.replace(_BREAK, "")


def _numbered(cleaned: str) -> list[tuple[int, str]]:
    """Return each logical line with the number of the line on which it begins."""
    lines = []
    number = 1
    for line in cleaned.split("\n"):
        lines.append((number, line.replace(_BREAK, "")))
        number += 1 + line.count(_BREAK)
    return lines
