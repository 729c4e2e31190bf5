"""Other people's kernels that do the same job, timed beside ours and judged like ours.

None of them is part of the package. They are imported where they are installed, or loaded from a
folder that `cuverify.peers.fetch` lays out; the environment variable ``CUVERIFY_PEERS`` names it.
A peer that is not there is a `Missing` with the reason, never silence.
"""

from __future__ import annotations

import fnmatch
import importlib
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cuverify.errors import ArgumentError, PeerError

if TYPE_CHECKING:
    from cuverify.verify_shapes import Drafts, Shape

VARIABLE = "CUVERIFY_PEERS"
"""Environment variable that names the folder with peers that are not installed."""

MODULES = ("torch_bmm", "flash_attention_3", "flashinfer_mla", "sglang_triton")
"""Modules of this package with ``NAMES`` and ``load(folder) -> list[Peer]``."""

GQA_MODULES = ("torch_gqa", "flash_attention_3_gqa", "sglang_triton_gqa")
"""The same for separate keys and values."""


@dataclass(frozen=True)
class Prepared:
    """A peer made ready for one problem; nothing of this is timed.

    Attributes
    ----------
    steps : sequence of callable
        One for each copy of the rows, or one alone. Each launches on torch's current stream, is
        capturable, and writes all of `out`.
    out : tensor of bfloat16, shape (N, H, columns)
    chosen : mapping
        What was tuned for this shape, such as the number of splits.
    """

    steps: Sequence[Callable[[], None]]
    out: Any
    chosen: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class Peer:
    """Somebody else's verify attention.

    Attributes
    ----------
    name : str
    prepare : callable
        Makes it ready for a problem: a `Problem`, or a `GqaProblem` for separate keys and values.
    ragged : bool
        Whether prefixes may be of different lengths.
    slow : bool
        Whether it takes so long that few repeats must do.
    drafts : tuple of {"tree", "block"}
        Which drafts it can attend to.
    """

    name: str
    prepare: Callable[[Any], Prepared]
    ragged: bool = False
    slow: bool = False
    drafts: tuple[Drafts, ...] = ("tree", "block")

    def takes(self, shape: Shape) -> bool:
        """Whether it can do this shape at all."""
        return (self.ragged or shape.equal) and shape.drafts in self.drafts


@dataclass(frozen=True)
class Missing:
    """A peer that is not here.

    Attributes
    ----------
    name, reason : str
    """

    name: str
    reason: str


def names(modules: Sequence[str] = MODULES) -> list[str]:
    """Return the names of all peers, here or not."""
    return [name for module in _imported(modules) for name in module.NAMES]


def folder_of(given: str | os.PathLike[str] | None = None) -> Path | None:
    """Return the folder that holds peers: what is given, else what ``CUVERIFY_PEERS`` names.

    Raises
    ------
    ArgumentError
        There is no such folder.
    """
    named = given if given is not None else os.environ.get(VARIABLE) or None
    if named is None:
        return None
    folder = Path(named)
    if not folder.is_dir():
        raise ArgumentError("peers_dir", str(folder), "there is no such folder")
    return folder.resolve()


def find(
    wanted: Sequence[str] = (),
    folder: Path | None = None,
    modules: Sequence[str] = MODULES,
) -> tuple[list[Peer], list[Missing]]:
    """Load peers.

    Parameters
    ----------
    wanted : sequence of str
        Names, or patterns of them such as ``torch*``; all when empty.
    folder : Path, optional
        Where those lie that are not installed.
    modules : sequence of str
        `MODULES` or `GQA_MODULES`.

    Returns
    -------
    found : list of Peer
    missing : list of Missing

    Raises
    ------
    ArgumentError
        A pattern matches no name.
    """
    check_names(wanted, modules)
    patterns = list(wanted) or ["*"]
    found: list[Peer] = []
    missing: list[Missing] = []
    for module in _imported(modules):
        asked = [
            name
            for name in module.NAMES
            if any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)
        ]
        if not asked:
            continue
        try:
            loaded = module.load(folder)
        except PeerError as error:
            missing.extend(Missing(name, str(error)) for name in asked)
            continue
        found.extend(peer for peer in loaded if peer.name in asked)
    return found, missing


def check_names(wanted: Sequence[str], modules: Sequence[str] = MODULES) -> None:
    """Refuse patterns that match no peer's name.

    Raises
    ------
    ArgumentError
        Naming the first.
    """
    known = names(modules)
    for pattern in wanted:
        if not fnmatch.filter(known, pattern):
            raise ArgumentError("peers", pattern, f"known are {', '.join(map(repr, known))}")


def _imported(modules: Sequence[str]) -> list[Any]:
    return [importlib.import_module(f"cuverify.peers.{name}") for name in modules]
