"""A workbench for CUDA kernels that verify speculative-decoding trees and move KV cache.

Importing the package loads no other package: every public name is resolved on first use, so that
a tool that only reads a report or a version pays for neither torch nor CuPy.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from cuverify.device import prebuilt as prebuilt
    from cuverify.host.options import checked as checked
    from cuverify.host.options import counted as counted
    from cuverify.host.options import host_options as host_options
    from cuverify.host.options import sanitized as sanitized
    from cuverify.kernel import Kernel as Kernel
    from cuverify.kernel import load_kernel as load_kernel
    from cuverify.kv_layout import KvLayout as KvLayout
    from cuverify.launches import record_launches as record_launches
    from cuverify.tree import DraftTree as DraftTree

__version__ = "0.1.0.dev0"

# name -> module that defines it
_EXPORTS = {
    "DraftTree": "cuverify.tree",
    "Kernel": "cuverify.kernel",
    "KvLayout": "cuverify.kv_layout",
    "checked": "cuverify.host.options",
    "counted": "cuverify.host.options",
    "host_options": "cuverify.host.options",
    "load_kernel": "cuverify.kernel",
    "prebuilt": "cuverify.device",
    "record_launches": "cuverify.launches",
    "sanitized": "cuverify.host.options",
}
_SUBMODULES = frozenset(
    {
        "accept_batch",
        "baseline",
        "allocator",
        "bench",
        "benches",
        "buffers",
        "cases",
        "ceilings",
        "check",
        "cli",
        "compile",
        "conformance",
        "contract",
        "counting",
        "datasets",
        "device",
        "diagnostics",
        "draft_batch",
        "drawing",
        "env",
        "errors",
        "evidence",
        "holders",
        "host",
        "kernel",
        "kernels_cu",
        "kv_layout",
        "launches",
        "launching",
        "notebook",
        "ops",
        "planner",
        "reference",
        "relocation",
        "relocation_study",
        "report",
        "sglang",
        "sources",
        "stages",
        "static_buffers",
        "step",
        "step_workload",
        "strategies",
        "tolerances",
        "timeline",
        "torch_oracle",
        "tree",
        "validators",
        "verify_batch",
        "verify_variants",
        "verify_workload",
        "workload",
    }
)

__all__ = [
    "DraftTree",
    "Kernel",
    "KvLayout",
    "__version__",
    "checked",
    "counted",
    "errors",
    "host_options",
    "load_kernel",
    "prebuilt",
    "record_launches",
    "sanitized",
]


def __getattr__(name: str) -> Any:
    if name in _EXPORTS:
        value = getattr(importlib.import_module(_EXPORTS[name]), name)
        globals()[name] = value
        return value
    if name in _SUBMODULES:
        return importlib.import_module(f"cuverify.{name}")
    raise AttributeError(f"module 'cuverify' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *_EXPORTS, *_SUBMODULES})
