"""The capture validator, imported as `cuverify.validators`.

The folder's own name belongs to another distribution on PyPI: an import under the bare name would
hide that package from its users, so it is refused.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if __name__ != "cuverify.validators":
    raise ImportError(
        f"this folder holds cuverify.validators and was imported as {__name__!r}; "
        "use `import cuverify.validators`. If you meant the PyPI package `validators`, "
        "take cuverify's repository root off sys.path (run `pytest`, not `python -m pytest`)."
    )

if TYPE_CHECKING:
    from cuverify.validators.api import validate as validate
    from cuverify.validators.api import validate_callable as validate_callable
    from cuverify.validators.api import validate_factory as validate_factory
    from cuverify.validators.callable_case import CallableCase as CallableCase
    from cuverify.validators.capture import CaptureResult as CaptureResult
    from cuverify.validators.capture import capture_and_replay as capture_and_replay
    from cuverify.validators.compare import Bounded as Bounded
    from cuverify.validators.compare import Tolerance as Tolerance

# name -> module that defines it; loaded on first use
_EXPORTS = {
    "CallableCase": "cuverify.validators.callable_case",
    "CaptureResult": "cuverify.validators.capture",
    "Bounded": "cuverify.validators.compare",
    "Tolerance": "cuverify.validators.compare",
    "capture_and_replay": "cuverify.validators.capture",
    "validate": "cuverify.validators.api",
    "validate_callable": "cuverify.validators.api",
    "validate_factory": "cuverify.validators.api",
}

__all__ = [
    "Bounded",
    "CallableCase",
    "CaptureResult",
    "Tolerance",
    "capture_and_replay",
    "validate",
    "validate_callable",
    "validate_factory",
]


def __getattr__(name: str) -> Any:
    if name not in _EXPORTS:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_EXPORTS[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS})
