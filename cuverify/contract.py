"""The contract that stands beside a kernel, in its own text.

A comment above the kernel lists its parameters in the order of the signature::

    // @kernel scale_rows
    // @param out    write   fp32 [rows, WIDTH] align=16     scaled rows
    // @param x      read    fp32 [rows, WIDTH] stride=(x_stride, 1)
    // @param bias?  read    fp32 [WIDTH]                    may be None
    // @param x_stride value int64                           elements between rows of x
    // @param factor value   fp32
    // @reach table  update                                  memory that a pointer table leads to
    // @block 256
    // @shared 4 * WIDTH
    // @arch sm_90a                                         only those; no host lane
    // @early                                               starts before the kernel in front ends

The access is one of `read`, `write` (complete, uninitialised before), `update` (read and written),
`scratch` (contents mean nothing before or after) and `value` (a scalar by value). Extents are
expressions over value parameters and `-D` values; a bare name that is neither is bound by the first
tensor that has it; `*` is any extent and `[...]` any shape. Without `stride=` a tensor must be
contiguous. A text with an `@arch` line is compiled for the architectures named in it alone. A
kernel with `@early` may be launched while the kernel in front of it on the stream still runs; it
waits by itself (griddepcontrol.wait) before it reads what that one writes.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from cuverify import dtypes
from cuverify.errors import ContractError
from cuverify.expressions import Expression

_TAGS = ("param", "reach", "block", "shared", "arch", "early")
_ARCH = re.compile(r"sm_\d+[a-z]?")

ACCESSES = ("read", "write", "update", "scratch", "value")

_COMMENT_OR_STRING = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'", re.DOTALL
)
_KERNEL = re.compile(
    r"(?P<c>extern\s*\"\"\s*)?(?:\b(?:static|inline)\s+)*\b__global__\b"
    r"(?:\s+__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\))?\s+void"
    r"(?:\s+__launch_bounds__\s*\((?:[^()]|\([^()]*\))*\))?\s+(?P<name>[A-Za-z_]\w*)\s*\("
)
_EXTERN_BLOCK = re.compile(r"extern\s*\"\"\s*\{")
_TAG = re.compile(r"^\s*//\s*@(?P<tag>\w+)\s*(?P<rest>.*?)\s*$")
_PARAM = re.compile(
    r"^(?P<name>[A-Za-z_]\w*)(?P<optional>\?)?\s+(?P<access>\w+)\s+(?P<dtype>\w+)"
    r"(?:\s*\[(?P<shape>[^\]]*)\])?"
    r"(?:\s+stride=\((?P<stride>(?:[^()]|\([^()]*\))*)\))?"
    r"(?:\s+align=(?P<align>\d+))?"
    r"(?:\s+(?P<text>.*))?$"
)


@dataclass(frozen=True)
class Parameter:
    """One parameter of a kernel.

    Attributes
    ----------
    name : str
        As in the signature.
    access : str
        One of `ACCESSES`.
    dtype : DType
        Of the scalar or of the tensor's elements.
    shape : tuple of Expression or None, or None
        None for a scalar and for any shape; an entry None is any extent.
    stride : tuple of Expression, or None
        In elements; None where the tensor must be contiguous.
    align : int
        Bytes that the tensor's base address must be a multiple of.
    optional : bool
        Whether None (a null pointer) may be passed.
    text : str
        What the contract says about it.
    """

    name: str
    access: str
    dtype: dtypes.DType
    shape: tuple[Expression | None, ...] | None = None
    stride: tuple[Expression, ...] | None = None
    align: int = 1
    optional: bool = False
    text: str = ""

    @property
    def is_value(self) -> bool:
        """Whether it is a scalar passed by value."""
        return self.access == "value"

    @property
    def bytes(self) -> int:
        """Width of the parameter itself: a scalar's own, 8 for a pointer."""
        return self.dtype.bytes if self.is_value else 8


@dataclass(frozen=True)
class Contract:
    """All that a kernel's text promises: see the module's text for the form.

    Attributes
    ----------
    kernel : str
        Name of the kernel.
    parameters : tuple of Parameter
        In the signature's order.
    reach : mapping of str to str
        Access to memory that is reached through a pointer table, by the table's name.
    block : Expression or None
        Threads of a block.
    shared : Expression or None
        Dynamic shared memory in bytes; the default of a launch.
    architectures : tuple of str
        The only ones that the kernel can run on; empty where there is no such limit.
    early : bool
        Whether the kernel may start before the kernel in front of it on the stream has ended.
    """

    kernel: str
    parameters: tuple[Parameter, ...]
    reach: Mapping[str, str] = field(default_factory=dict)
    block: Expression | None = None
    shared: Expression | None = None
    architectures: tuple[str, ...] = ()
    early: bool = False

    @functools.cached_property
    def wording(self) -> str:
        """All of it as text: equal for contracts that say the same."""
        return repr(self)

    def signature(self) -> str:
        """Return the parameters as a call would name them."""
        return f"{self.kernel}({', '.join(p.name for p in self.parameters)})"


@functools.lru_cache(maxsize=256)
def kernels_in(text: str) -> tuple[str, ...]:
    """Return the names of the `extern "C" __global__` kernels in a text, in order.

    Raises
    ------
    ContractError
        If a `__global__` function is not `extern "C"`: its mangled name could not be found.
    """
    plain = _COMMENT_OR_STRING.sub(lambda m: '""' if m[0][0] == '"' else " ", text)
    blocks = [(m.end(), _closing(plain, m.end())) for m in _EXTERN_BLOCK.finditer(plain)]
    names = []
    for found in _KERNEL.finditer(plain):
        inside = any(begin <= found.start() < end for begin, end in blocks)
        if not found["c"] and not inside:
            raise ContractError(
                f'kernel `{found["name"]}` is not `extern "C"`: write `extern "C" __global__ void '
                f"{found['name']}(...)`; use -D values where a template parameter would stand"
            )
        names.append(found["name"])
    return tuple(names)


def limited_to(text: str) -> tuple[str, ...]:
    """Return the only architectures that a text can be compiled for; empty where it is not limited.

    Of several kernels with `@arch` lines all have to agree: they are one text.
    """
    lines = [
        tag["rest"]
        for line in text.splitlines()
        if (tag := _TAG.match(line))
        if tag["tag"] == "arch"
    ]
    named = [set(line.split()) for line in lines]
    return tuple(sorted(set.intersection(*named))) if named else ()


def _closing(text: str, begin: int) -> int:
    depth = 1
    for at in range(begin, len(text)):
        depth += {"{": 1, "}": -1}.get(text[at], 0)
        if depth == 0:
            return at
    return len(text)


def parse_contracts(
    text: str,
    *,
    name: str = "<string>",
    first_line: int = 1,
    values: Mapping[str, object] | None = None,
) -> dict[str, Contract]:
    """Return the contracts in a kernel text, by kernel.

    Parameters
    ----------
    text : str
        CUDA C++ with `// @kernel` comments.
    name, first_line : str, int
        Where the text comes from, for errors.
    values : mapping, optional
        `-D` values and the text's own defaults; a dtype may name one whose value is a dtype
        or a C++ type.

    Raises
    ------
    ContractError
        With file and line, where a line does not have the form above.
    """
    contracts: dict[str, Contract] = {}
    open_kernel: str | None = None
    parameters: list[Parameter] = []
    reach: dict[str, str] = {}
    sizes: dict[str, Expression] = {}
    architectures: tuple[str, ...] = ()
    early = False

    def close() -> None:
        if open_kernel is not None:
            contracts[open_kernel] = Contract(
                open_kernel,
                tuple(parameters),
                dict(reach),
                sizes.get("block"),
                sizes.get("shared"),
                architectures,
                early,
            )

    for number, line in enumerate(text.splitlines(), first_line):
        tag = _TAG.match(line)
        if not tag:
            continue
        try:
            kind, rest = tag["tag"], tag["rest"]
            if kind == "kernel":
                close()
                open_kernel, parameters, reach, sizes = _word(rest), [], {}, {}
                architectures, early = (), False
                if open_kernel in contracts:
                    raise ContractError(f"kernel `{open_kernel}` has two contracts")
            elif kind not in _TAGS:
                raise ContractError(
                    f"unknown tag @{kind}; known: {' '.join(map('@{}'.format, ('kernel', *_TAGS)))}"
                )
            elif open_kernel is None:
                raise ContractError(f"@{kind} before any @kernel")
            elif kind == "param":
                parameters.append(_parameter(rest, values or {}))
                if [p.name for p in parameters].count(parameters[-1].name) > 1:
                    raise ContractError(f"parameter `{parameters[-1].name}` is declared twice")
            elif kind == "reach":
                table, access = [*rest.split(), "", ""][:2]
                if table not in [p.name for p in parameters] or access not in ACCESSES[:4]:
                    raise ContractError(
                        f"@reach {rest}: wants a parameter declared above and one of {ACCESSES[:4]}"
                    )
                reach[table] = access
            elif kind == "arch":
                architectures = tuple(rest.split())
                if not architectures or not all(map(_ARCH.fullmatch, architectures)):
                    raise ContractError(f"@arch {rest}: wants names such as sm_90a")
            elif kind == "early":
                if rest:
                    raise ContractError(f"@early {rest}: takes nothing behind it")
                early = True
            else:
                sizes[kind] = Expression(rest.split("  ")[0])
        except ContractError as error:
            raise ContractError(f"{name}:{number}: {error}") from None
    close()
    return contracts


def _word(text: str) -> str:
    word = text.split()[0] if text.split() else ""
    if not word.isidentifier():
        raise ContractError("@kernel wants the kernel's name")
    return word


def _parameter(text: str, values: Mapping[str, object]) -> Parameter:
    found = _PARAM.match(text)
    if not found:
        raise ContractError(
            f"@param {text}: wants `name access dtype [shape] stride=(...) align=N description`"
        )
    name, access = found["name"], found["access"]
    if access not in ACCESSES:
        raise ContractError(f"@param {name}: access `{access}` is none of {', '.join(ACCESSES)}")
    chosen = str(values.get(found["dtype"], ""))
    dtype = (
        dtypes.BY_NAME.get(found["dtype"])
        or dtypes.BY_NAME.get(chosen)
        or dtypes.from_ctype(chosen)
    )
    if dtype is None:
        raise ContractError(
            f"@param {name}: dtype `{found['dtype']}` is neither one of "
            f"{', '.join(dtypes.BY_NAME)} "
            "nor a -D value that names one of them or a C++ type"
        )
    if (access == "value") != (found["shape"] is None):
        raise ContractError(f"@param {name}: a tensor has a [shape], a value has none")
    shape = None
    if found["shape"] is not None and found["shape"].strip() != "...":
        shape = tuple(None if t.strip() == "*" else Expression(t) for t in _split(found["shape"]))
    stride = None
    if found["stride"] is not None:
        stride = tuple(Expression(t) for t in _split(found["stride"]))
        if shape is None or len(stride) != len(shape):
            raise ContractError(f"@param {name}: wants one stride for each extent")
    align = int(found["align"] or (1 if access == "value" else dtype.bytes))
    return Parameter(
        name,
        access,
        dtype,
        shape,
        stride,
        align,
        found["optional"] is not None,
        found["text"] or "",
    )


def _split(text: str) -> list[str]:
    """Split at commas outside parentheses."""
    parts, depth, begin = [], 0, 0
    for at, letter in enumerate(text):
        depth += {"(": 1, ")": -1}.get(letter, 0)
        if letter == "," and depth == 0:
            parts.append(text[begin:at])
            begin = at + 1
    tail = text[begin:]
    return [*parts, tail] if tail.strip() else parts
