"""Debugging modes and hooks that are on, whoever turned them on."""

from __future__ import annotations

import contextlib
import sys


def armed_modes() -> tuple[str, ...]:
    """Return what is armed around the next capture, by name; empty when nothing is."""
    import torch

    found = []
    with contextlib.suppress(Exception):
        if int(torch.cuda.get_sync_debug_mode()):
            found.append("torch.cuda.set_sync_debug_mode")
    with contextlib.suppress(Exception):
        if torch.is_anomaly_enabled():
            found.append("torch.autograd.set_detect_anomaly")
    with contextlib.suppress(Exception):
        from torch.utils._python_dispatch import _get_current_dispatch_mode

        mode = _get_current_dispatch_mode()
        if mode is not None:
            found.append(f"dispatch mode {type(mode).__name__}")
    with contextlib.suppress(Exception):
        from torch.overrides import _get_current_function_mode

        function_mode = _get_current_function_mode()  # type: ignore[no-untyped-call]
        if function_mode is not None:
            found.append(f"function mode {type(function_mode).__name__}")
    with contextlib.suppress(Exception):
        if torch.autograd._profiler_enabled():  # type: ignore[attr-defined]
            found.append("torch.profiler")
    trace = sys.modules.get("torch.cuda._gpu_trace")
    if trace is not None:
        for name in dir(trace):
            if getattr(getattr(trace, name), "callback_list", None):
                found.append(f"torch.cuda._gpu_trace.{name}")
    return tuple(found)
