"""Skips the tests marked `gpu` on a machine without a CUDA device. Nothing else belongs here."""

from __future__ import annotations

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    marked = [item for item in items if item.get_closest_marker("gpu")]
    if marked and not _cuda_device():
        for item in marked:
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))


def _cuda_device() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())
