"""Grids, blocks and shared memory: what any CUDA device accepts."""

from __future__ import annotations

from cuverify.errors import LaunchError

Dim = int | tuple[int, ...]
Dim3 = tuple[int, int, int]

_MAX_GRID = (2**31 - 1, 65535, 65535)
_MAX_BLOCK = (1024, 1024, 64)
MAX_THREADS = 1024
STATIC_SHARED_BYTES = 48 * 1024
"""What a launch gets without asking; more is allowed only after the attribute is set."""


def dim3(what: str, value: Dim) -> Dim3:
    """Return `value` as three extents.

    Parameters
    ----------
    what : {"grid", "block"}
        Named in errors.
    value : int or tuple of up to three ints

    Raises
    ------
    LaunchError
        If an extent is not a whole number, is below 1 or above what CUDA allows. CUDA would refuse
        the launch or, through CuPy, run one block for an empty grid.
    """
    given = value if isinstance(value, tuple | list) else (value,)
    if not 1 <= len(given) <= 3:
        raise LaunchError(f"{what}={value!r}: wants one to three extents")
    extents = [_whole(what, value, extent) for extent in given]
    extents += [1] * (3 - len(extents))
    limits = _MAX_GRID if what == "grid" else _MAX_BLOCK
    for axis, extent, limit in zip("xyz", extents, limits, strict=True):
        if extent < 1:
            raise LaunchError(
                f"{what}={value!r}: extent {axis} is {extent}; an empty launch is refused"
            )
        if extent > limit:
            raise LaunchError(
                f"{what}={value!r}: extent {axis} is {extent}, at most {limit} is allowed"
            )
    x, y, z = extents
    if what == "block" and x * y * z > MAX_THREADS:
        raise LaunchError(
            f"block={value!r}: {x * y * z} threads, at most {MAX_THREADS} are allowed in a block"
        )
    return x, y, z


def _whole(what: str, value: object, extent: object) -> int:
    if isinstance(extent, bool) or not hasattr(extent, "__index__"):
        raise LaunchError(f"{what}={value!r}: {extent!r} is not a whole number")
    return int(extent.__index__())


def check_shared(kernel: str, where: str, static: int, dynamic: int, limit: int) -> None:
    """Raise LaunchError if a block wants more shared memory (bytes) than the device has."""
    if static + dynamic > limit:
        raise LaunchError(
            f"{kernel}: shared={dynamic} dynamic + {static} static bytes, but {where} has {limit} "
            "for a block"
        )
