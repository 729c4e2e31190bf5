"""What the registry knows about a mutant."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

_PACKAGE = "cuverify.validators.zoo"


@dataclass(frozen=True)
class Mutant:
    """A faulty step and its clean twin, which differ in the fault only.

    Both come from one factory, ``function(faulty=True)`` and ``function(faulty=False)``, so that
    the difference can be read in one place. Without an argument it makes the mutant.

    Parameters
    ----------
    name : str
        Name of the factory.
    family : str
        Module of the factory, below this package.
    rule : str
        The rule that must name the fault.
    shows : str
        The fault in one line.
    classes : tuple of int
        Which of `cuverify.validators.zoo.classes.CLASSES` it stands for. Empty for the rules about
        the check itself.
    also : mapping of str to str
        Rules that may speak too, because what they report follows from the fault, with the reason.
    needs : tuple of str
        What it takes beyond a GPU, torch and CuPy: ``cuda-bindings``, ``cupti``.
    line : bool
        The finding must stand on the line of the factory that ends in ``# fault``.
    limit_s : float
        Seconds after which the process of the mutant counts as hanging.
    """

    name: str
    family: str
    rule: str
    shows: str
    classes: tuple[int, ...] = ()
    also: Mapping[str, str] = field(default_factory=dict)
    needs: tuple[str, ...] = ()
    line: bool = False
    limit_s: float = 60.0

    @property
    def factory(self) -> str:
        """Return ``module:function``, importable."""
        return f"{_PACKAGE}.{self.family}:{self.name}"
