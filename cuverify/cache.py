"""The user's cache directory: what took time to build, under the digest of all that made it.

Files appear there whole or not at all, and the least recently used go first.
"""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Mapping
from pathlib import Path

from cuverify.errors import CacheError

VARIABLE = "CUVERIFY_CACHE_DIR"


def cache_directory() -> Path:
    """Return the directory for what was built, made if need be.

    `CUVERIFY_CACHE_DIR` overrides the user's cache directory.

    Raises
    ------
    CacheError
        If it cannot be made or written.
    """
    import platformdirs

    chosen = os.environ.get(VARIABLE)
    directory = Path(chosen) if chosen else platformdirs.user_cache_path("cuverify")
    try:
        directory.mkdir(parents=True, exist_ok=True)
        if not os.access(directory, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    except OSError as error:
        raise CacheError(
            f"cache directory {directory} cannot be written ({error.strerror}); "
            f"set {VARIABLE} to one that can"
        ) from None
    return directory


def still_there(file: Path) -> bool:
    """Return whether a file exists, and mark it as used."""
    try:
        os.utime(file)
    except FileNotFoundError:
        return False
    except OSError:  # somebody else's cache, which can be read only
        return file.exists()
    return True


def prune(directory: Path, kept: Mapping[str, int]) -> None:
    """Delete the files that were not used for longest.

    Parameters
    ----------
    directory : Path
    kept : mapping of str to int
        How many files of each pattern stay.
    """

    def age(file: Path) -> float:
        try:
            return file.stat().st_mtime
        except OSError:  # another process was faster
            return 0.0

    for pattern, count in kept.items():
        files = sorted(directory.glob(pattern), key=age)
        for file in files[: max(0, len(files) - count)]:
            with contextlib.suppress(OSError):
                file.unlink()
