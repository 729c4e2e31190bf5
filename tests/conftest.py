"""Skips the tests marked `gpu` without a CUDA device, names hypothesis's profiles, counts examples.

No more.
"""

from __future__ import annotations

import json
import platform
import re
from pathlib import Path
from typing import Any

import hypothesis
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


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption(
        "--counts",
        type=Path,
        metavar="FILE",
        help="write how many examples each property test drew, as JSON; in one process (no -n)",
    )


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--counts") is not None:
        if getattr(config.option, "numprocesses", None):
            raise pytest.UsageError("--counts: workers draw examples of their own; leave -n out")
        config.pluginmanager.register(_Counts(config), "counts of examples")


class _Counts:
    """Collects the property tests that passed, with the examples that each was called with."""

    def __init__(self, config: pytest.Config) -> None:
        self.config = config
        self.tests: dict[str, int] = {}
        self.failed: list[str] = []

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_makereport(self, item: pytest.Item, call: Any) -> Any:
        report = yield
        if report.when == "call" and hasattr(item, "hypothesis_statistics"):
            self.tests[item.nodeid] = sum(
                int(count) for count in re.findall(r"(\d+) passing", item.hypothesis_statistics)
            )
        if report.failed:
            self.failed.append(item.nodeid)
        return report

    def pytest_sessionfinish(self) -> None:
        record = {
            "profile": settings.get_current_profile_name(),
            "python": platform.python_version(),
            "hypothesis": hypothesis.__version__,
            "examples": sum(self.tests.values()),
            "failed": sorted(self.failed),
            "tests": dict(sorted(self.tests.items())),
        }
        path = self.config.getoption("--counts")
        path.write_text(json.dumps(record, indent=2) + "\n")


def _cuda_device() -> bool:
    try:
        import torch
    except ImportError:
        return False
    return bool(torch.cuda.is_available())
