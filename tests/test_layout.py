"""Files stand where they belong and import only what they may."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import cuverify

ROOT = Path(__file__).resolve().parent.parent
TEXTS = sorted(path.stem for path in (ROOT / "kernels_cu").glob("*.cu"))
# x_sm90.cu does the job of x.cu for one architecture, with the same op, oracle, case and test
STEMS = [stem for stem in TEXTS if re.sub(r"_sm\d+$", "", stem) not in {*TEXTS} - {stem}]

UPPER = (
    "ops",
    "reference",
    "workload",
    "strategies",
    "cases",
    "benches",
    "bench",
    "check",
    "conformance",
    "conformance_inputs",
    "sglang",
    "own_attention",
    "launched",
    "peers",
    "tuner",
)
FACES = ("cli", "notebook")
# module or package -> what it must not know; a package means everything in it
FORBIDDEN: dict[str, tuple[str, ...]] = {
    "errors": ("sources", "compile", "contract", "kernel", "device", "host", "report"),
    "report": ("sources", "compile", "contract", "kernel", "device", "host", "validators", *UPPER),
    "sources": ("compile", "contract", "kernel", "device", "host", "validators", *UPPER),
    "diagnostics": ("sources", "compile", "contract", "kernel", "device", "host", *UPPER),
    "compile": ("contract", "kernel", "device", "host", "validators", *UPPER),
    "contract": ("compile", "kernel", "device", "host", "validators", *UPPER),
    "host": ("kernel", "device", "validators", *UPPER),
    "device": ("kernel", "host", "validators", *UPPER),
    "kernel": ("validators", *UPPER),
    "ops": (
        "reference",
        "strategies",
        "cases",
        "benches",
        "bench",
        "check",
        "validators",
        "own_attention",
        "peers",
        "tuner",
    ),
    "tuning": ("sources", "compile", "contract", "kernel", "device", "host", "validators", *UPPER),
    "own_attention": ("benches", "bench", "check", "peers", "tuner"),
    "peers": ("ops", "benches", "check", "own_attention", "tuner"),
    "comparison": ("ops", "kernel", "device", "host", "validators", *UPPER),
    "validators": UPPER,
}


def modules() -> Iterator[tuple[str, Path]]:
    """Yield the import name below `cuverify` of every module, and its file."""
    for folder, prefix in (("cuverify", ""), ("validators", "validators."), ("kernels_cu", "")):
        for path in (ROOT / folder).rglob("*.py"):
            parts = path.relative_to(ROOT / folder).with_suffix("").parts
            name = prefix + ".".join(part for part in parts if part != "__init__")
            yield name.strip("."), path


def imports(path: Path) -> Iterator[str]:
    """Yield what a module imports when it runs, in functions too; types alone do not count."""
    tree = ast.parse(path.read_text(encoding="utf-8"))
    for_types = {
        id(inner)
        for node in ast.walk(tree)
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test)
        for statement in node.body
        for inner in ast.walk(statement)
    }
    for node in ast.walk(tree):
        if id(node) in for_types:
            continue
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}:{node.lineno}: imports are absolute"
            yield str(node.module)
            if node.module == "cuverify":
                yield from (f"cuverify.{alias.name}" for alias in node.names)


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(f"{package}.")


@pytest.mark.parametrize("stem", STEMS)
def test_one_stem_runs_through_everything(stem: str) -> None:
    for place in ("ops", "reference", "cases", "benches"):
        assert (ROOT / "cuverify" / place / f"{stem}.py").is_file(), place
    assert (ROOT / "tests" / f"test_{stem}.py").is_file()


@pytest.mark.parametrize("place", ["ops", "cases"])
def test_no_stem_lacks_its_kernel(place: str) -> None:
    found = {path.stem for path in (ROOT / "cuverify" / place).glob("*.py")} - {"__init__"}
    assert found <= set(STEMS)


def test_no_oracle_lacks_its_test() -> None:
    # An oracle may stand before its kernel does; then it is tested by itself.
    for path in (ROOT / "cuverify" / "reference").glob("*.py"):
        if path.stem not in {"__init__", *STEMS}:
            assert (ROOT / "tests" / f"test_{path.stem}.py").is_file(), path.stem


def test_modules_know_only_what_they_may() -> None:
    wrong = [
        f"{name} imports {imported}"
        for name, path in modules()
        for package, forbidden in FORBIDDEN.items()
        if within(name, package)
        for imported in imports(path)
        if any(within(imported, f"cuverify.{other}") for other in forbidden)
    ]
    assert wrong == []


def test_nothing_imports_a_face() -> None:
    wrong = [
        f"{name} imports {imported}"
        for name, path in modules()
        if name not in FACES
        for imported in imports(path)
        if any(within(imported, f"cuverify.{face}") for face in FACES)
    ]
    assert wrong == []


def test_trees_layouts_and_oracles_know_numpy_only() -> None:
    import sys

    allowed = {*sys.stdlib_module_names, "numpy"}
    plain = ("reference", "tree", "kv_layout", "drawing", "errors", "narrow")
    for name, path in modules():
        if any(within(name, package) for package in plain):
            for imported in imports(path):
                own = any(within(imported, f"cuverify.{package}") for package in plain)
                known = own or imported == "cuverify"
                assert known or imported.partition(".")[0] in allowed, f"{path}: {imported}"


def test_no_private_interface_of_cupy_is_used() -> None:
    for name, path in modules():
        text = path.read_text(encoding="utf-8")
        assert not re.search(r"\bcupy\._(?!_)", text), name


def test_no_machine_stands_in_a_file() -> None:
    pattern = re.compile(r"(?<![\w.])/(?:home|root|Users|work|mnt)/\w")
    for folder in ("cuverify", "validators", "kernels_cu", "docs", "tests"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in {".py", ".cu", ".cuh", ".h", ".cpp", ".md"} and path.is_file():
                found = pattern.search(path.read_text(encoding="utf-8"))
                assert not found, f"{path.relative_to(ROOT)}: {found}"


def test_public_names_resolve() -> None:
    for name in cuverify.__all__:
        assert getattr(cuverify, name) is not None
    assert set(cuverify.__all__) <= set(dir(cuverify))
    with pytest.raises(AttributeError, match="no attribute 'abacus'"):
        cuverify.abacus  # noqa: B018


def test_every_submodule_resolves() -> None:
    missing = {
        name
        for name in cuverify._SUBMODULES
        if not (ROOT / "cuverify" / f"{name}.py").is_file()
        and not (ROOT / "cuverify" / name / "__init__.py").is_file()
        and not (ROOT / name / "__init__.py").is_file()
    }
    assert missing == set()
