"""What `cuverify check` runs: one case an op, found by name.

A module ``cuverify/cases/<stem>.py`` exposes ``CASE``, an object with the methods of `CheckCase`. A
case of somebody else is named by its module or its file: ``package.module:CASE``,
``path/to/file.py:CASE``.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import pkgutil
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

from cuverify.errors import CaseError

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from cuverify.kernel import Kernel
    from cuverify.validators.compare import Bounded

Target = Literal["numpy", "torch-cuda"]


class BoundStep(Protocol):
    """A step with buffers of its own, the same storage at every call."""

    @property
    def outputs(self) -> Mapping[str, Any]:
        """The tensors that are judged, by name: numpy arrays or CUDA torch tensors."""

    def refill(self, batch: Any) -> None:
        """Write new inputs in place; host work is allowed.

        A step that updates an output in place writes what it held at the start. Inputs that do not
        fit the buffers are refused with `CaseError`, before anything is written.
        """

    def __call__(self) -> None:
        """Launch the kernels on torch's current stream, and nothing else: it will be captured."""

    def poison(self) -> None:
        """Fill the outputs that the step writes completely with a pattern that no answer holds."""

    def expected(self) -> Mapping[str, NDArray[Any] | Bounded]:
        """Return the oracle's outputs for the inputs that are in the buffers now.

        An output whose tolerance depends on the inputs comes as a `Bounded`.
        """


@runtime_checkable
class CheckCase(Protocol):
    """One op with its kernels, inputs and oracle.

    `batches` and `device_batches` may take the keywords ``seed`` and ``examples`` (how many to
    draw); they get them when they do. They must give the same batches in the same order for the
    same values: a batch is known to a child process by its number.

    Two attributes are optional: ``tolerances``, a mapping of output names to
    `cuverify.validators.compare.Tolerance` (an output without one must be equal bit by bit), and
    ``only_recorded``, False where the step uses other launchers than cuverify's `Kernel` on
    purpose.
    """

    @property
    def name(self) -> str:
        """The op's name."""

    def kernels(self) -> Sequence[Kernel]:
        """Return all variants that must compile for every architecture."""

    def batches(self) -> Iterable[tuple[str, Any]]:
        """Return (label, batch) pairs for the host lane, small, drawn and real ones."""

    def device_batches(self) -> Iterable[tuple[str, Any]]:
        """Return (label, batch) pairs for a GPU."""

    def step(self, batch: Any, xp: Target) -> BoundStep:
        """Return a step whose buffers fit `batch`, on the host or on the current CUDA device."""


def names() -> list[str]:
    """Return the names of the package's own cases, sorted."""
    return stems(sys.modules[__name__])


def stems(package: ModuleType) -> list[str]:
    """Return the names of the modules in a package, sorted, without private ones."""
    return sorted(
        module.name
        for module in pkgutil.iter_modules(package.__path__)
        if not module.name.startswith("_")
    )


def load(reference: str) -> CheckCase:
    """Return a case by its reference.

    Parameters
    ----------
    reference : str
        A name of `names`, ``module:ATTRIBUTE`` or ``file.py:ATTRIBUTE``. ``CASE`` is the attribute
        that is meant without one.

    Returns
    -------
    CheckCase
        The object itself, which is the same at every call in one process.

    Raises
    ------
    CaseError
        There is no such case, its module does not import, or it lacks a method.
    """
    module, attribute = _module(reference)
    case = getattr(module, attribute, None)
    if case is None:
        raise CaseError(f"case {reference!r}: {module.__name__} has no attribute {attribute!r}")
    missing = [
        name
        for name in ("name", "kernels", "batches", "device_batches", "step")
        if not hasattr(case, name)
    ]
    if missing:
        raise CaseError(
            f"case {reference!r}: {attribute} lacks {', '.join(missing)}; "
            "see cuverify.cases.CheckCase for what a case has"
        )
    return case  # type: ignore[no-any-return]


def draw(method: Any, *, seed: int, examples: int | None) -> list[tuple[str, Any]]:
    """Call a case's `batches` or `device_batches` with the keywords that it takes.

    Parameters
    ----------
    method : callable
        The bound method.
    seed : int
    examples : int or None
        How many batches to draw; None leaves it to the case.

    Returns
    -------
    list of (str, object)

    Raises
    ------
    CaseError
        It gave something else than (label, batch) pairs, or nothing.
    """
    offered: dict[str, Any] = {"seed": seed}
    if examples is not None:
        offered["examples"] = examples
    taken = inspect.signature(method).parameters
    pairs = list(method(**{name: value for name, value in offered.items() if name in taken}))
    for number, pair in enumerate(pairs):
        if not (isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)):
            raise CaseError(
                f"{method.__qualname__}() gave {type(pair).__name__} as batch {number}; "
                "it must give (label, batch) pairs"
            )
    if not pairs:
        raise CaseError(f"{method.__qualname__}() gave no batch: nothing would be checked")
    return pairs


def _module(reference: str) -> tuple[ModuleType, str]:
    known = names()
    if reference in known:
        place, attribute = f"{__name__}.{reference}", "CASE"
    else:
        place, separator, attribute = reference.rpartition(":")
        if not separator:
            place, attribute = reference, "CASE"
        if not place.endswith(".py") and (not separator or "/" in place):
            raise CaseError(
                f"there is no case {reference!r}; known are {', '.join(known) or 'none'}, "
                "and one of your own is named module:CASE or file.py:CASE"
            )
    try:
        module = (
            _from_file(Path(place)) if place.endswith(".py") else importlib.import_module(place)
        )
    except Exception as error:
        raise CaseError(
            f"case {reference!r}: {place} does not import: {type(error).__name__}: {error}"
        ) from error
    return module, attribute


def _from_file(path: Path) -> ModuleType:
    """Import a file once, under a name that no other file of the same stem shares."""
    path = path.resolve(strict=True)
    digest = hashlib.sha256(str(path).encode()).hexdigest()[:12]
    name = f"cuverify_case_{path.stem}_{digest}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # dataclasses in it look their module up while it runs
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module
