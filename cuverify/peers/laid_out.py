"""Modules and libraries of a folder that `cuverify.peers.fetch` has laid out."""

from __future__ import annotations

import importlib
import lzma
import sys
import tempfile
from pathlib import Path
from types import ModuleType

from cuverify.errors import PeerError

SGLANG_FOLDER = "min"
"""Subfolder with the few modules of SGLang that hold Triton kernels."""

HOW = "lay it out with `python -m cuverify.peers.fetch DIR` and name DIR by CUVERIFY_PEERS"


def require_hopper() -> None:
    """Refuse any other GPU.

    Raises
    ------
    PeerError
        The current device is no sm_90, or there is none.
    """
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        raise PeerError("it runs on sm_90 only")


def sglang_module(name: str, folder: Path | None) -> ModuleType:
    """Import a module of SGLang: the installed one, else that of the folder.

    Parameters
    ----------
    name : str
        Full name.
    folder : Path or None

    Raises
    ------
    PeerError
        It is in neither place, or does not load.
    """
    try:
        return importlib.import_module(name)
    except ImportError as error:
        first = error
    root = None if folder is None else folder / SGLANG_FOLDER
    if root is None or not root.joinpath(*name.split(".")).with_suffix(".py").is_file():
        raise PeerError(f"{first}; {HOW}")
    # a part of SGLang may be here from elsewhere; a package is looked for in one place only
    for loaded in [module for module in sys.modules if module.partition(".")[0] == "sglang"]:
        del sys.modules[loaded]
    if str(root) not in sys.path:
        sys.path.insert(0, str(root))
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise PeerError(f"{root} does not load: {error}") from error


def unpacked(folder: Path | None, name: str) -> Path:
    """Return a library of the folder, unpacked from ``name.xz`` into a temporary folder.

    Raises
    ------
    PeerError
        There is no such file.
    """
    if folder is None:
        raise PeerError(f"no folder of peers is named; {HOW}")
    packed = folder / f"{name}.xz"
    if not packed.is_file():
        raise PeerError(f"{packed.name} is not in the folder of peers; {HOW}")
    # stays until the process ends: the library is mapped from it
    place = Path(tempfile.mkdtemp(prefix="cuverify-peer-")) / name
    place.write_bytes(lzma.decompress(packed.read_bytes()))
    return place
