"""Writing a file: a reader never meets half of it, writers lose nothing of each other's."""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_umask = threading.Lock()  # there is no asking for it without changing it, for the whole process


def write_atomically(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Write `content` to `path`, text in UTF-8: the old stays until the new one is complete.

    An interrupt or a full disk leaves the old file, or none, and no temporary file behind.

    Parameters
    ----------
    path : str or path-like
        The file. Its folder must exist.
    content : str or bytes
        The whole new content.

    Raises
    ------
    OSError
        The folder does not exist or cannot be written.
    """
    path = Path(path)
    handle, name = tempfile.mkstemp(prefix=f".{path.name}.", suffix=".tmp", dir=path.parent)
    temporary = Path(name)
    try:
        with os.fdopen(handle, "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        # mkstemp makes files private; a report is as readable as any other file of the user
        with _umask:
            umask = os.umask(0)
            os.umask(umask)
        temporary.chmod(0o666 & ~umask)
        temporary.replace(path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Keep others who ask for it out of a file's folder: between reading a file and replacing it.

    Parameters
    ----------
    path : Path
        The file, which need not exist. Its folder must.

    Raises
    ------
    OSError
        The folder does not exist.
    """
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        fcntl.flock(folder, fcntl.LOCK_EX)
        yield
    finally:
        os.close(folder)  # and gives the lock back
