"""Every error a user can meet, under one base class.

An error names the thing that is wrong and its value, and says what would be right. Errors are
raised before a launch where the host can know; what only the device can know is reported by the
kernel's own status or by the host lane's checkers.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cuverify.diagnostics import Diagnostic
    from cuverify.host.reports import HostReport

_SHOWN = 8  # an exception's text names the first few; the object carries all of them


class CuverifyError(Exception):
    """Base class of all errors that cuverify raises on purpose."""


class SourceError(CuverifyError):
    """A kernel text, a `-D` value or a header cannot be used: missing, unknown or malformed."""


class ToolchainError(CuverifyError):
    """Something outside the package is missing: a compiler, NVRTC, CUDA headers, CuPy, torch."""


class CacheError(CuverifyError):
    """The cache directory cannot be written or holds something that is not ours."""


class ContractError(CuverifyError):
    """The contract beside a kernel is malformed or disagrees with the kernel's C++ signature."""


class LaunchError(CuverifyError):
    """A grid, a block or an amount of shared memory that no device could launch."""


class DeviceError(CuverifyError):
    """The GPU or its driver refused something, or there is no GPU where one is needed."""


class EvidenceError(CuverifyError):
    """An evidence file is missing, malformed or does not describe this checkout."""


class CaseError(CuverifyError):
    """A check case or a benchmark is unknown or broken."""


class RelocationRefused(CuverifyError):  # noqa: N818
    """Live KV rows cannot move now: somebody holds on to a slot, reads it, or has changed it."""


class PeerError(CuverifyError):
    """Somebody else's kernel is neither installed nor laid out, or does not load."""


class TuningError(CuverifyError):
    """A table of tuned values is malformed."""


class ArgumentError(CuverifyError):
    """One argument is wrong.

    Parameters
    ----------
    argument : str
        Name of the argument as the caller wrote it.
    value : object
        What was given. Only its short form goes into the message.
    reason : str
        What is wrong with it and what would be right.
    """

    def __init__(self, argument: str, value: object, reason: str) -> None:
        super().__init__(argument, value, reason)
        self.argument = argument
        self.value = value
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.argument}={_short(self.value)}: {self.reason}"


class CompileError(CuverifyError):
    """A kernel text does not compile.

    Parameters
    ----------
    message : str
        What was being compiled, by what and for what.
    diagnostics : sequence of Diagnostic
        All of the compiler's messages, in its order.
    log : str
        The compiler's own text.
    """

    def __init__(self, message: str, diagnostics: Sequence[Diagnostic] = (), log: str = "") -> None:
        super().__init__(message, tuple(diagnostics), log)
        self.message = message
        self.diagnostics = tuple(diagnostics)
        self.log = log

    def __str__(self) -> str:
        if not self.diagnostics:
            return f"{self.message}\n{self.log}".rstrip()
        lines = [self.message]
        for found in self.diagnostics[:_SHOWN]:
            lines.append(f"{found.where}: {found.severity}: {found.message}")
            if found.excerpt:
                lines.extend(f"    {line}" for line in found.excerpt.splitlines())
        if len(self.diagnostics) > _SHOWN:
            lines.append(f"... and {len(self.diagnostics) - _SHOWN} more in .diagnostics")
        return "\n".join(lines)


class CheckerError(CuverifyError):
    """The host lane's checkers found faults in a launch.

    Parameters
    ----------
    kernel : str
        The kernel that was launched.
    reports : sequence of HostReport
        All faults, in the order in which they happened.
    """

    def __init__(self, kernel: str, reports: Sequence[HostReport]) -> None:
        super().__init__(kernel, tuple(reports))
        self.kernel = kernel
        self.reports = tuple(reports)

    def __str__(self) -> str:
        lines = [f"{self.kernel}: {len(self.reports)} fault(s) on the host lane"]
        lines.extend(str(report) for report in self.reports[:_SHOWN])
        if len(self.reports) > _SHOWN:
            lines.append(f"... and {len(self.reports) - _SHOWN} more in .reports")
        return "\n".join(lines)


def _short(value: object) -> str:
    """Return one line for a value: tensors by shape and dtype, everything else by repr."""
    shape = getattr(value, "shape", None)
    dtype = getattr(value, "dtype", None)
    if shape is not None and dtype is not None and tuple(shape):
        return f"<{type(value).__name__} {dtype} {list(shape)}>"
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
