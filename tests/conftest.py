"""Skips the tests marked `gpu` without a CUDA device, and names hypothesis's profiles. No more."""

from __future__ import annotations

import pytest
from hypothesis import settings

# `ci` draws the same examples each time: it is there for regressions. `nightly`, chosen by
# `--hypothesis-profile=nightly`, is there for finds: others at each run, and 20 times as many in
# every test whose number is given by `cuverify.strategies.examples`.
settings.register_profile("ci", max_examples=100, deadline=None, derandomize=True)
settings.register_profile("nightly", max_examples=2000, deadline=None)
settings.load_profile("ci")


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
