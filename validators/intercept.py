"""torch's two interception modes, each as a context manager around a function of one's own."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

Handler = Callable[[Any, Any, Mapping[str, Any]], Any]
"""Takes what is called, its positional and its keyword arguments, and returns the result."""


def operations(handler: Handler) -> Any:
    """Return a context in which every operation goes through `handler`, below Python's interface.

    Operations of the handler's own do not.
    """
    from torch.utils._python_dispatch import TorchDispatchMode

    def dispatch(_mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return handler(func, args, kwargs or {})

    # made by a call: torch's class has no types to inherit
    made: Any = type("Operations", (TorchDispatchMode,), {"__torch_dispatch__": dispatch})
    return made()


def calls(handler: Handler) -> Any:
    """Return a context in which every call of torch's Python interface goes through `handler`."""
    from torch.overrides import TorchFunctionMode

    def function(_mode: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return handler(func, args, kwargs or {})

    made: Any = type("Calls", (TorchFunctionMode,), {"__torch_function__": function})
    return made()
