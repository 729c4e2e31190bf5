"""A kernel's text with its `-D` values and headers: found, checked, digested, put together.

A `KernelSource` holds the text and never its headers: they are read anew whenever they matter, so
an edited header always gives another digest and never a stale kernel. Nothing here compiles.
"""

from __future__ import annotations

import difflib
import hashlib
import importlib.resources
import math
import numbers
import os
import posixpath
import re
import stat
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple, Union

from cuverify.directives import Directives, Include, read_directives
from cuverify.errors import SourceError

Value = Union[bool, int, float, str]  # noqa: UP007

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")
_CONTROL = re.compile(r"[\x00-\x1f\x7f]")
_FLOAT_MAX = 3.4028234663852886e38
_FLOAT_TINY = 2.0**-150  # at and below half of the smallest float32, a literal becomes 0
_KEYWORDS = frozenset(
    """
    alignas alignof and and_eq asm auto bitand bitor bool break case catch char char16_t char32_t
    class compl const const_cast constexpr continue decltype default defined delete do double
    dynamic_cast else enum explicit export extern false float for friend goto if inline int long
    mutable namespace new noexcept not not_eq nullptr operator or or_eq private protected public
    register reinterpret_cast return short signed sizeof static static_assert static_cast struct
    switch template this thread_local throw true try typedef typeid typename union unsigned using
    virtual void volatile wchar_t while xor xor_eq
    """.split()  # noqa: SIM905
)
# What NVIDIA's packages provide. The compilers know where it lies, this module does not have to.
_CUDA_HEADER = re.compile(
    r"(?:cuda|cooperative_groups|cub|thrust|nv|crt)/.+|nvfunctional"
    r"|(?:cuda(?:_awbarrier\w*|_bf16|_device_runtime_api|_fp\d+|_occupancy|_pipeline\w*|_runtime"
    r"|_runtime_api|_tf32|_tile|Typedefs|_profiler_api)?|cuComplex|cooperative_groups|curand\w*|mma"
    r"|math_(?:constants|functions)|builtin_types|channel_descriptor|common_functions"
    r"|device_(?:atomic_functions|double_functions|functions|launch_parameters|types)"
    r"|driver_(?:functions|types)|host_(?:config|defines)|library_types|sm_\d+_\w+"
    r"|(?:surface|texture)_\w+|vector_(?:functions|types))\.(?:h|hpp)"
)


def is_cuda_header(name: str) -> bool:
    """Tell whether an include's name is one of the CUDA toolkit's."""
    return _CUDA_HEADER.fullmatch(name) is not None


def render_value(name: str, value: Value) -> str:
    """Return the C++ text of one `-D` value.

    Parameters
    ----------
    name : str
        The macro, for the error's text.
    value : bool, int, float or str
        A float becomes a float32 literal (``1e-05f``), so that kernels stay in single precision;
        a double is given as a str. A str is taken as tokens: a type, a name, an expression.

    Raises
    ------
    SourceError
        There is no such literal, or the tokens would reach beyond their own line.
    """
    if isinstance(value, bool):
        return "true" if value else "false"  # `#if true` holds in C++, and `bool` stays a bool
    if isinstance(value, numbers.Integral):
        return _integer(name, int(value))
    if isinstance(value, numbers.Real):
        return _float(name, float(value))
    if isinstance(value, str):
        return _tokens(name, value)
    raise SourceError(
        f"value {name}={value!r} is a {type(value).__name__}; give a bool, an int, a float or a str"
    )


def _integer(name: str, value: int) -> str:
    if not -(2**63) <= value < 2**64:
        raise SourceError(f"value {name}={value} does not fit 64 bits")
    if value >= 2**63:
        return f"{value}ull"
    if value in (-(2**31), -(2**63)):  # the literal 2147483648 has a wider type than the value
        return f"({value + 1} - 1)"
    return f"({value})" if value < 0 else str(value)


def _float(name: str, value: float) -> str:
    if not math.isfinite(value):
        raise SourceError(
            f"value {name}={value} has no literal; give the expression as a str, such as "
            "'__int_as_float(0x7f800000)' for infinity"
        )
    if abs(value) > _FLOAT_MAX or 0 < abs(value) <= _FLOAT_TINY:
        raise SourceError(
            f"value {name}={value!r} is not a float32 (it would become "
            f"{'0' if abs(value) < 1 else 'infinity'}); give a double as a str: {name}='{value!r}'"
        )
    text = f"{value!r}f"
    return f"({text})" if text.startswith("-") else text


def _tokens(name: str, value: str) -> str:
    text = value.strip()
    if _CONTROL.search(text):
        problem = "holds a line break or another control character"
    elif text.endswith("\\"):
        problem = "ends in a backslash, which would join the next line to it"
    elif "/*" in text or "//" in text:
        problem = "holds a comment"
    elif text.count('"') % 2 or text.count("'") % 2:
        problem = "holds a quote that does not end"
    elif not _encodable(text):
        problem = "is not valid Unicode"
    else:
        return text
    raise SourceError(f"value {name}={value!r} {problem}; give tokens of one line")


def _check_name(name: str) -> None:
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise SourceError(f"value name {name!r} is not an identifier")
    if name in _KEYWORDS:
        raise SourceError(f"value name {name!r} is a word of C++; name it otherwise")
    if name.startswith(("__", "CUVERIFY_")):
        raise SourceError(
            f"value name {name!r} is reserved: names with __ belong to the compilers, names with "
            "CUVERIFY_ to the lanes"
        )


def _encodable(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


class _Values(Mapping[str, Value]):
    """The `-D` values: sorted, hashable, and True not the same as 1, since the texts differ."""

    __slots__ = ("_items", "rendered")

    def __init__(self, values: Mapping[str, Value]) -> None:
        for name in values:
            _check_name(name)
        self._items = dict(sorted(values.items()))
        self.rendered = tuple((name, render_value(name, v)) for name, v in self._items.items())

    def __getitem__(self, name: str) -> Value:
        return self._items[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._items)

    def __len__(self) -> int:
        return len(self._items)

    def __eq__(self, other: object) -> bool:
        if isinstance(other, _Values):
            return self.rendered == other.rendered
        return self._items == other

    def __hash__(self) -> int:
        return hash(self.rendered)

    def __repr__(self) -> str:
        return repr(self._items)

    def __reduce__(self) -> tuple[type[_Values], tuple[dict[str, Value]]]:
        return _Values, (self._items,)


@dataclass(frozen=True)
class _Header:
    name: str  # the same on every machine: relative to the folder in which it was found
    path: Path
    content: bytes
    directives: Directives


class _Signs(NamedTuple):
    device: int
    inode: int
    size: int
    modified_ns: int
    changed_ns: int


@dataclass
class _Closure:
    """The headers of a text, and all places that were looked at to find them.

    To read and follow them costs more than a small launch, and launches that are not bound ask. To
    look at the same places again tells whether anything has changed.
    """

    headers: tuple[_Header, ...]
    looked: dict[Path, _Signs | None]  # None: there was no file
    read_ns: int  # when that began
    digest: str | None = None

    def still_holds(self) -> bool:
        for path, signs in self.looked.items():
            if signs is not None and not signs.modified_ns <= self.settled_ns >= signs.changed_ns:
                return False
            if _signs(path) != signs:
                return False
        return True

    @property
    def settled_ns(self) -> int:
        return self.read_ns - _SETTLED_NS


@dataclass(frozen=True)
class KernelSource:
    r"""One CUDA text and everything that decides what it compiles to.

    Use `from_file`, `from_package` or `from_text`.

    Parameters
    ----------
    name : str
        What diagnostics, sanitizers and profilers show: ``"kernels_cu/relocate.cu"``,
        ``"<string>"``, ``"cell [3]"``.
    text : str
        CUDA C++. Line ends are made ``\n``.
    include_dirs : sequence of path-like
        Where `#include` looks, in this order. The package's own headers are added at the end.
    values : mapping
        The `-D` values; see `render_value`.
    first_line : int
        The number of the text's first line, for a text that is a piece of something longer.
    path : path-like, optional
        The file from which the text was read.

    Raises
    ------
    SourceError
        A value that no text or header uses or that a text defines itself, a header that is
        missing, a text that no compiler could read.

    Notes
    -----
    Immutable and hashable. The text is that of the moment of construction; headers are read anew
    by every method.
    """

    name: str
    text: str
    include_dirs: tuple[Path, ...] = ()
    values: Mapping[str, Value] = field(default_factory=dict)
    first_line: int = 1
    path: Path | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not self.name.strip():
            raise SourceError(f"name={self.name!r}: a text needs a name that diagnostics can show")
        if _CONTROL.search(self.name) or not _encodable(self.name):
            raise SourceError(f"name={self.name!r} holds a character that no line can show")
        if isinstance(self.first_line, bool) or not isinstance(self.first_line, int):
            raise SourceError(f"first_line={self.first_line!r} is not an int")
        if not 1 <= self.first_line < 2**31:
            raise SourceError(f"first_line={self.first_line}: lines are counted from 1")
        _set = object.__setattr__  # the way to normalise fields of a frozen dataclass
        _set(self, "text", _checked_text(self.name, self.text))
        _set(self, "include_dirs", _folders(self.include_dirs))
        _set(self, "values", _Values(self.values))
        _set(self, "path", None if self.path is None else Path(self.path).absolute())
        self._headers()

    # --- where a text comes from -----------------------------------------------------------------

    @classmethod
    def from_file(
        cls,
        path: str | os.PathLike[str],
        *,
        values: Mapping[str, Value] | None = None,
        include_dirs: Sequence[str | os.PathLike[str]] = (),
    ) -> KernelSource:
        """Read a text from a file, in UTF-8. Its own folder is searched for headers first.

        Parameters
        ----------
        path : path-like
            The file. Diagnostics show it as it is given here.
        values : mapping, optional
            The `-D` values.
        include_dirs : sequence of path-like
            Further folders to search for headers.

        Raises
        ------
        SourceError
            There is no such file, or see `KernelSource`.
        """
        path = Path(path)
        return cls(
            name=path.as_posix(),
            text=_read_text(path),
            include_dirs=(path.absolute().parent, *map(Path, include_dirs)),
            values=values or {},
            path=path,
        )

    @classmethod
    def from_package(cls, stem: str, *, values: Mapping[str, Value] | None = None) -> KernelSource:
        """Read one of the package's own kernels.

        Parameters
        ----------
        stem : str
            ``"relocate"`` for ``kernels_cu/relocate.cu``.
        values : mapping, optional
            The `-D` values.

        Raises
        ------
        SourceError
            The package has no such kernel, or see `KernelSource`.
        """
        folder = _package_folder()
        stems = sorted(entry.stem for entry in folder.glob("*.cu"))
        if stem not in stems:
            raise SourceError(
                f"the package has no kernel {stem!r}, it has {_listed(stems)}"
                f"{_nearest(stem, stems)}; a file of your own is given as a path"
            )
        path = folder / f"{stem}.cu"
        return cls(
            name=f"kernels_cu/{stem}.cu",
            text=_read_text(path),
            include_dirs=(folder,),
            values=values or {},
            path=path,
        )

    @classmethod
    def from_text(
        cls,
        text: str,
        *,
        name: str = "<string>",
        values: Mapping[str, Value] | None = None,
        include_dirs: Sequence[str | os.PathLike[str]] = (),
        first_line: int = 1,
    ) -> KernelSource:
        """Take a text that stands in no file: a string, a notebook cell.

        Parameters
        ----------
        text : str
            CUDA C++.
        name : str
            What diagnostics show as the file.
        values : mapping, optional
            The `-D` values.
        include_dirs : sequence of path-like
            Folders to search for headers. The current folder is not searched.
        first_line : int
            The number of the text's first line.

        Raises
        ------
        SourceError
            See `KernelSource`.
        """
        return cls(
            name=name,
            text=text,
            include_dirs=tuple(map(Path, include_dirs)),
            values=values or {},
            first_line=first_line,
        )

    def with_values(self, **values: Value) -> KernelSource:
        """Return the same text with these `-D` values added to its own or in their place."""
        return replace(self, values={**self.values, **values})

    # --- what it is made of ----------------------------------------------------------------------

    def known_values(self) -> dict[str, str]:
        """Return the `-D` values that the text or its headers have a default for, with it.

        A default is a ``#define X 8`` inside ``#ifndef X``. Include guards, which stand for
        nothing, are none.
        """
        return _defaults(directives for _, directives in self._parts(self._headers()))

    def headers(self) -> tuple[Path, ...]:
        """Return every header that the text includes, directly or not, in order of discovery.

        Both branches of a conditional count. Headers of the CUDA toolkit, of compilers and those
        that only the other lane can find do not.

        Raises
        ------
        SourceError
            A header is missing, or an include cannot be followed.
        """
        return tuple(header.path for header in self._headers())

    def digest(self) -> str:
        """Return the SHA-256 of text, name, values and headers, as 64 hexadecimal digits.

        The same on every machine: folders are not part of it. Headers are read anew.

        Raises
        ------
        SourceError
            See `headers`.
        """
        closure = self._closure()
        if closure.digest is None:
            closure.digest = self._digest(closure.headers)
        return closure.digest

    def _digest(self, headers: Sequence[_Header]) -> str:
        total = hashlib.sha256()
        fields = [b"cuverify source 1", self.name.encode(), str(self.first_line).encode()]
        fields += [self.text.encode()]
        fields += [f"{name} {text}".encode() for name, text in self._rendered()]
        fields += [b"headers"]
        for header in sorted(headers, key=lambda header: (header.name, header.content)):
            fields += [header.name.encode("utf-8", "surrogateescape"), header.content]
        for each in fields:
            total.update(len(each).to_bytes(8, "little"))
            total.update(each)
        return total.hexdigest()

    def translation_unit(self, *, prefix: str = "", suffix: str = "") -> str:
        """Return the text as a compiler takes it.

        Parameters
        ----------
        prefix, suffix : str
            Text to stand before and behind. `suffix` continues the line numbers of the text, if
            it has no `#line` of its own.

        Returns
        -------
        str
            The digest in a comment, `prefix`, one `#define` a value, `#line`, text, `suffix`. With
            the digest in the text, a cache that hashes text and not headers (CuPy's) is safe too.

        Raises
        ------
        SourceError
            See `headers`.
        """
        shown = self.name.replace("\\", "\\\\").replace('"', '\\"')
        pieces = (
            f"// cuverify source {self.digest()}",
            prefix,
            *(f"#define {name} {text}" for name, text in self._rendered()),
            f'#line {self.first_line} "{shown}"',
            self.text,
            suffix,
        )
        return "".join(piece if piece.endswith("\n") else f"{piece}\n" for piece in pieces if piece)

    def source_line(self, file: str, line: int) -> str | None:
        """Return one line of the text or of a file, for a diagnostic that points at it.

        Parameters
        ----------
        file : str
            As a diagnostic has it: this text's name or a header's path.
        line : int
            Its number.

        Returns
        -------
        str or None
            Without its line end. None when there is no such line, or when a `#line` in the file
            makes its numbers mean something else.
        """
        if file == self.name:
            text, first = self.text, self.first_line
        else:
            try:
                text, first = _decoded(Path(file).read_bytes()), 1
            except (OSError, ValueError):
                return None
        lines = text.split("\n")
        if not first <= line < first + len(lines) or read_directives(text).renumbers:
            return None
        return lines[line - first]

    # --- inside ----------------------------------------------------------------------------------

    def _rendered(self) -> tuple[tuple[str, str], ...]:
        assert isinstance(self.values, _Values)
        return self.values.rendered

    def _parts(self, headers: Sequence[_Header]) -> list[tuple[_Header | None, Directives]]:
        """Return the directives of the text (without a header) and of each header."""
        return [(None, read_directives(self.text)), *((each, each.directives) for each in headers)]

    def _headers(self) -> tuple[_Header, ...]:
        return self._closure().headers

    def _closure(self) -> _Closure:
        """Return the closure of the includes as it is now."""
        known: _Closure | None = self.__dict__.get("_known")
        if known is None or not known.still_holds():
            known = self._follow()
            object.__setattr__(self, "_known", known)
        return known

    def __getstate__(self) -> dict[str, object]:
        return {name: value for name, value in self.__dict__.items() if name != "_known"}

    def _follow(self) -> _Closure:
        """Read the closure of the includes and check the values against it."""
        began = time.time_ns()
        looked: dict[Path, _Signs | None] = {}
        # By real folder and name, so that a cycle or a second way in adds nothing; not by real
        # file, since a link's own includes are looked for beside the link.
        found: dict[tuple[int, int, str], _Header] = {}
        waiting: list[tuple[_Header | None, Include]] = [
            (None, include) for include in read_directives(self.text).includes
        ]
        while waiting:
            includer, include = waiting.pop(0)
            header = self._resolve(includer, include, looked)
            if header is None:
                continue
            folder = header.path.parent.stat()
            key = (folder.st_dev, folder.st_ino, header.path.name)
            if key in found:
                continue
            found[key] = header
            waiting.extend((header, inner) for inner in header.directives.includes)
        headers = tuple(found.values())
        self._check_values(headers)
        return _Closure(headers, looked, began)

    def _where(self, includer: _Header | None, line: int) -> str:
        if includer is None:
            return f"{self.name}:{line + self.first_line - 1}"
        return f"{includer.path}:{line}"

    def _resolve(
        self, includer: _Header | None, include: Include, looked: dict[Path, _Signs | None]
    ) -> _Header | None:
        where = self._where(includer, include.line)
        if include.form == "unreadable":
            raise SourceError(
                f"{where}: #include {include.name} cannot be followed, so an edit of that header "
                'would go unnoticed; spell it as #include "header.cuh"'
            )
        # (path, machine-independent name), in the compilers' order of search
        places = [(folder / include.name, include.name) for folder in self.include_dirs]
        if include.form == "quoted" and includer is not None:
            beside = posixpath.join(posixpath.dirname(includer.name), include.name)
            places.insert(0, (includer.path.parent / include.name, beside))
        for path, name in places:
            looked[path] = _signs(path)
            if looked[path] is not None:
                if Path(include.name).is_absolute():
                    name = path.name
                content = _read_bytes(path, where)
                directives = read_directives(_decoded(content))
                return _Header(posixpath.normpath(name), path, content, directives)
        if include.form == "angle" or include.conditional or is_cuda_header(include.name):
            return None  # a compiler's own, another lane's or the toolkit's
        searched = ", ".join(str(path.parent) for path, _ in places)
        raise SourceError(
            f'{where}: #include "{include.name}" is not in {searched}; '
            "give its folder in include_dirs"
        )

    def _check_values(self, headers: Sequence[_Header]) -> None:
        if not self.values:
            return
        parts = self._parts(headers)
        for name, value in self.values.items():
            if not any(name in directives.identifiers for _, directives in parts):
                known = _defaults(directives for _, directives in parts)
                listed = _listed([f"{each} (default {text})" for each, text in known.items()])
                raise SourceError(
                    f"{self.name}: neither the text nor a header uses the value {name!r}; known "
                    f"are: {listed}{_nearest(name, known)}"
                )
            for header, directives in parts:
                for define in directives.defines:
                    if define.name == name and name not in define.tested:
                        raise SourceError(
                            f"{self._where(header, define.line)}: #define {name} would win over "
                            f"the value {name}={value!r}; put #ifndef {name} and #endif around it"
                        )


def _defaults(parts: Iterable[Directives]) -> dict[str, str]:
    found: dict[str, str] = {}
    for part in parts:
        for define in part.defines:
            if define.text and define.name in define.tested:
                found.setdefault(define.name, " ".join(define.text.split()))
    return dict(sorted(found.items()))


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) if names else "none"


def _nearest(name: str, known: Iterable[str]) -> str:
    near = difflib.get_close_matches(name, list(known), n=1)
    return f" (did you mean {near[0]!r}?)" if near else ""


_SETTLED_NS = 2_000_000_000  # a file that changed later than this ago may change again unnoticed


def _signs(path: Path) -> _Signs | None:
    """Return by what a change of a file shows; None if there is no such file."""
    try:
        status = path.stat()
    except OSError:
        if not path.is_file():  # which knows the errors that mean just that
            return None
        raise
    if not stat.S_ISREG(status.st_mode):
        return None
    return _Signs(
        status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns, status.st_ctime_ns
    )


def _package_folder() -> Path:
    return Path(str(importlib.resources.files("cuverify.kernels_cu")))


def _folders(folders: Iterable[str | os.PathLike[str]]) -> tuple[Path, ...]:
    """Return absolute folders, each once, with the package's headers at the end."""
    own = _package_folder() / "include"
    found: dict[Path, None] = {}
    for folder in folders:
        path = Path(folder).absolute()
        if path != own:
            if not path.is_dir():
                raise SourceError(f"include_dirs: {path} is not a folder")
            found[path] = None
    return (*found, own)


def _read_text(path: Path) -> str:
    if not path.is_file():
        near = _nearest(path.name, [entry.name for entry in path.absolute().parent.glob("*.cu*")])
        what = "is a folder" if path.is_dir() else "does not exist"
        raise SourceError(f"kernel file {path} {what}{near}")
    content = _read_bytes(path, str(path))
    try:
        return content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        line = content.count(b"\n", 0, error.start) + 1
        raise SourceError(
            f"{path}:{line}: byte 0x{content[error.start]:02x} is not UTF-8; save the file as UTF-8"
        ) from None


def _read_bytes(path: Path, where: str) -> bytes:
    try:
        return path.read_bytes()
    except OSError as error:
        raise SourceError(f"{where}: {path} cannot be read: {error.strerror}") from error


def _decoded(content: bytes) -> str:
    """Return a header's text; a comment in another encoding is no reason to fail."""
    return content.decode("utf-8", "replace").replace("\r\n", "\n").replace("\r", "\n")


def _checked_text(name: str, text: str) -> str:
    if not isinstance(text, str):
        raise SourceError(f"{name}: the text is a {type(text).__name__}, not a str")
    text = text.replace("\r\n", "\n").replace("\r", "\n")
    if "\0" in text:  # compilers take a C string: what stands behind would be dropped in silence
        line = text.count("\n", 0, text.index("\0")) + 1
        raise SourceError(f"{name}:{line}: the text holds a NUL character")
    if not _encodable(text):
        raise SourceError(f"{name}: the text holds half of a surrogate pair, which is not Unicode")
    return text
