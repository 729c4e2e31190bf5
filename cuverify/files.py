"""Writing a file so that a reader never meets half of it."""

from __future__ import annotations

import os
import tempfile
import threading
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
