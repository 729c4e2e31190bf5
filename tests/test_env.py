from __future__ import annotations

import importlib
import importlib.util
import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cuverify import env


@pytest.fixture
def tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str, str], None]:
    """Make PATH empty and return a way to put scripts on it."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.delenv("CXX", raising=False)

    def put(name: str, script: str) -> None:
        path = folder / name
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)

    return put


def without(monkeypatch: pytest.MonkeyPatch, *names: str) -> None:
    """Let packages look as if they were not installed."""
    real = importlib.util.find_spec

    def find_spec(name: str, package: str | None = None) -> Any:
        return None if name in names else real(name, package)

    monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def test_the_present_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(env.CACHE_VARIABLE, str(tmp_path / "cache"))
    found = env.inspect()
    assert found["python"].value == ".".join(map(str, sys.version_info[:3]))
    assert found["torch"].state == "found"
    assert found["cache directory"].value == str(tmp_path / "cache")
    assert list((tmp_path / "cache").iterdir()) == []
    for part in found.parts:
        assert part.state == "found" or part.value, "what is not found says what was seen"
    assert json.loads(json.dumps(found.to_json()))["python"]["state"] == "found"
    assert {"python", "torch"} <= set(found.versions) <= set(env.VERSIONED)
    assert not any("/" in value for value in found.versions.values()), "no paths"
    text = found.report().to_text()
    for part in found.parts:
        assert part.name in text


def test_a_machine_without_anything(
    tools: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    without(monkeypatch, "torch", "cupy", "numpy", "ziglang")
    monkeypatch.setattr(env, "_driver_version", lambda: None)
    found = env.inspect()
    missing = {part.name for part in found.parts if part.state == "missing"}
    assert {"torch", "CuPy", "NVRTC", "numpy", "g++", "clang++", "zig c++", "GPU"} <= missing
    for name in ("torch", "CuPy", "NVRTC", "numpy", "g++", "clang++", "zig c++"):
        assert found[name].fix, f"{name} says how to get it"
    assert [use.possible for use in found.uses()] == [False, False, False]
    report = found.report()
    assert [finding.rule for finding in report.errors] == ["env-no-lane"]
    assert "env-no-compile" in {finding.rule for finding in report.findings}


def test_a_compiler_counts_only_when_it_runs(tools: Callable[[str, str], None]) -> None:
    tools("g++", "echo 'g++ 99.1'")
    tools("clang++", "echo 'no such library' >&2; exit 127")
    found = env.inspect()
    assert found["g++"].state == "found"
    assert found["g++"].value.startswith("g++ 99.1 (")
    assert found["clang++"].state == "broken"
    assert "no such library" in found["clang++"].value


def test_a_compiler_that_hangs_is_broken(
    tools: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "_TIMEOUT", 0.2)
    tools("g++", "while :; do :; done")
    part = env._compiler("g++", env._which("g++"), "fix")
    assert part.state == "broken"
    assert "no answer" in part.value


def test_a_cache_that_cannot_be_written_is_broken(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    blocked = tmp_path / "file"
    blocked.write_text("")
    monkeypatch.setenv(env.CACHE_VARIABLE, str(blocked / "cache"))
    found = env.inspect()
    part = found["cache directory"]
    assert part.state == "broken"
    assert str(blocked) in part.value
    assert part.fix is not None
    assert env.CACHE_VARIABLE in part.fix
    host = next(use for use in found.uses() if use.name == env.HOST_LANE)
    assert not host.possible


def nvrtc(monkeypatch: pytest.MonkeyPatch, get_version: Callable[[], tuple[int, int]]) -> env.Part:
    pytest.importorskip("cupy")
    real = importlib.import_module
    fake = SimpleNamespace(nvrtc=SimpleNamespace(getVersion=get_version))
    monkeypatch.setattr(
        importlib,
        "import_module",
        lambda name, package=None: fake if name == "cupy.cuda" else real(name, package),
    )
    return env._nvrtc()


def test_an_nvrtc_that_lacks_architectures_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    part = nvrtc(monkeypatch, lambda: (12, 4))
    assert part.state == "broken"
    assert "12.4" in part.value
    assert "sm_120" in part.value


def test_an_nvrtc_that_cannot_be_loaded_is_broken(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail() -> tuple[int, int]:
        raise RuntimeError("libnvrtc.so.12 was not found\nand more")

    part = nvrtc(monkeypatch, fail)
    assert part.state == "broken"
    assert part.value == "RuntimeError: libnvrtc.so.12 was not found"


def gpu(monkeypatch: pytest.MonkeyPatch, driver: str | None, cuda: str | None) -> env.Part:
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(env, "_driver_version", lambda: driver)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    return env._gpu()


def test_no_gpu_a_cpu_torch_and_a_hidden_gpu_are_told_apart(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert gpu(monkeypatch, None, None).value == "no CUDA device"
    cpu_build = gpu(monkeypatch, "580.65", None)
    assert cpu_build.state == "broken"
    assert "CPU build" in cpu_build.value
    hidden = gpu(monkeypatch, "580.65", "13.0")
    assert hidden.state == "broken"
    assert hidden.fix is not None
    assert "CUDA_VISIBLE_DEVICES" in hidden.fix


def test_the_driver_is_read_where_only_the_tool_tells(
    tools: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(env, "DRIVER_FILE", Path("/nowhere"))
    assert env._driver_version() is None
    tools("nvidia-smi", "exit 9")
    assert env._driver_version() is None
    tools("nvidia-smi", "echo 580.65.06; echo 580.65.06")
    assert env._driver_version() == "580.65.06"


def test_the_driver_is_read_from_the_kernel(
    tmp_path: Path, tools: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "version"
    monkeypatch.setattr(env, "DRIVER_FILE", file)
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\n")
    assert env._driver_version() == "550.54.15"
    file.write_text("NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.10  Release\n")
    assert env._driver_version() == "570.86.10"


def test_whatever_a_probe_raises_is_an_entry(monkeypatch: pytest.MonkeyPatch) -> None:
    def explode() -> env.Part:
        raise OSError("disk on fire")

    for name in ("_torch", "_headers", "_gpu", "_cache"):
        monkeypatch.setattr(env, name, explode)
    found = env.inspect()
    assert found["torch"].state == "broken"
    assert "disk on fire" in found["torch"].value
    assert len(found.parts) == len({part.name for part in found.parts})
    found.report().to_text()
    with pytest.raises(KeyError):
        found["abacus"]


def test_a_chosen_compiler_is_looked_at_too(
    tools: Callable[[str, str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(KeyError):
        env.inspect()["CXX"]
    monkeypatch.setenv("CXX", "my-compiler --with options")
    assert env.inspect()["CXX"].state == "missing"
    tools("my-compiler", "echo mine $*")
    assert env.inspect()["CXX"].value.startswith("mine --with options --version (")
