"""What a user installs: built through the sdist, beside the PyPI package `validators`."""

from __future__ import annotations

import csv
import importlib.util
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import textwrap
import venv
import zipfile
from pathlib import Path
from typing import NamedTuple

import pytest

ROOT = Path(__file__).resolve().parent.parent
# import name of each mapped folder
FOLDERS = {
    "cuverify": "cuverify",
    "kernels_cu": "cuverify/kernels_cu",
    "validators": "cuverify/validators",
}
# what pip says when nobody answers, as opposed to a package that cannot be installed
NO_NETWORK = re.compile(
    r"NewConnectionError|ConnectTimeout|Name or service not known|Temporary failure in name"
    r"|Network is unreachable|ProxyError|Connection refused|Max retries exceeded",
)


def run(*command: str | Path, cwd: Path | None = None, **variables: str) -> str:
    """Run a command and return its output; its whole output is in the failure otherwise."""
    done = subprocess.run(
        [str(word) for word in command],
        cwd=cwd,
        env={**os.environ, **variables},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, f"{' '.join(map(str, command))}\n{done.stdout}"
    return done.stdout


def source_files(root: Path) -> dict[str, Path]:
    """Return every file of the package folders, by its path in a wheel."""
    return {
        f"{name}/{path.relative_to(root / folder).as_posix()}": path
        for folder, name in FOLDERS.items()
        for path in (root / folder).rglob("*")
        if path.is_file() and "__pycache__" not in path.parts
    }


class Built(NamedTuple):
    """The tree that was built from, and what came out of it."""

    source: Path
    sdist: Path
    wheel: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    """Build the sdist, and the wheel from it, out of a copy: an old build/ must not matter."""
    for name in ("build", "setuptools"):
        if importlib.util.find_spec(name) is None:
            pytest.skip(f"{name} is not installed: pip install -e '.[test]'")
    folder = tmp_path_factory.mktemp("packaging")
    copy = folder / "source"
    shutil.copytree(
        ROOT,
        copy,
        ignore=shutil.ignore_patterns(
            ".*", "build", "dist", "data", "out", "*.egg-info", "__pycache__"
        ),
    )
    shutil.copy(ROOT / ".clang-format", copy)
    # away from the tree: the folder `build` or a module of ours must not shadow a package
    arguments = ("--no-isolation", "--outdir", folder / "dist", copy)
    run(sys.executable, "-m", "build", *arguments, cwd=folder)
    (sdist,) = (folder / "dist").glob("*.tar.gz")
    (wheel,) = (folder / "dist").glob("*.whl")
    return Built(copy, sdist, wheel)


@pytest.fixture(scope="module")
def other_wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Fetch the PyPI package `validators`."""
    if importlib.util.find_spec("pip") is None:
        pytest.skip("pip is not installed")
    folder = tmp_path_factory.mktemp("download")
    done = subprocess.run(
        [
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"),
            *("--retries=1", "--timeout=20", f"--dest={folder}", "validators"),
        ],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    if done.returncode != 0 and NO_NETWORK.search(done.stdout):
        pytest.skip("no network: the PyPI package `validators` cannot be fetched")
    assert done.returncode == 0, done.stdout
    (wheel,) = folder.glob("*.whl")
    return wheel


class Installation:
    """A virtual environment that sees the present one's packages behind its own."""

    def __init__(self, folder: Path) -> None:
        self.elsewhere = folder / "elsewhere"
        self.elsewhere.mkdir(parents=True)
        venv.create(folder / "venv", with_pip=False, symlinks=True)
        scripts = "Scripts" if sys.platform == "win32" else "bin"
        self.python = folder / "venv" / scripts / "python"
        self.script = folder / "venv" / scripts / "cuverify"
        self.site = Path(self.run("import sysconfig; print(sysconfig.get_path('purelib'))").strip())
        places = {sysconfig.get_path("purelib"), sysconfig.get_path("platlib")}
        # a line with a path only appends it: the .pth of an editable install there has no effect
        (self.site / "zz-present-environment.pth").write_text("\n".join(sorted(places)) + "\n")
        # CUDA's libraries are looked for in the environment's own folder only
        for place in places:
            if (Path(place) / "nvidia").is_dir() and not (self.site / "nvidia").exists():
                (self.site / "nvidia").symlink_to(Path(place) / "nvidia")

    def pip(self, *arguments: str | Path) -> None:
        run(sys.executable, "-m", "pip", "--python", self.python, *arguments, cwd=self.elsewhere)

    def install(self, *wheels: Path) -> None:
        self.pip("install", "--no-deps", "--no-index", *wheels)

    def run(self, code: str) -> str:
        return run(
            self.python,
            "-c",
            textwrap.dedent(code),
            cwd=self.elsewhere,
            PYTHONPATH="",
            CUVERIFY_CACHE_DIR=str(self.elsewhere / "cache"),
        )

    def record(self, distribution: str) -> set[str]:
        (record,) = self.site.glob(f"{distribution}-*.dist-info/RECORD")
        return {row[0] for row in csv.reader(io.StringIO(record.read_text()))}


@pytest.fixture(scope="module")
def installed(built: Built, tmp_path_factory: pytest.TempPathFactory) -> Installation:
    if importlib.util.find_spec("pip") is None:
        pytest.skip("pip is not installed")
    installation = Installation(tmp_path_factory.mktemp("installed"))
    installation.install(built.wheel)
    return installation


def test_the_wheel_holds_every_file_of_the_package_and_no_other(built: Built) -> None:
    expected = source_files(built.source)
    with zipfile.ZipFile(built.wheel) as archive:
        found = {name for name in archive.namelist() if ".dist-info/" not in name}
        assert found == set(expected)
        for name in found:
            assert archive.read(name) == expected[name].read_bytes(), name


def test_the_wheel_says_who_it_is(built: Built) -> None:
    import cuverify

    with zipfile.ZipFile(built.wheel) as archive:
        (metadata,) = (name for name in archive.namelist() if name.endswith(".dist-info/METADATA"))
        text = archive.read(metadata).decode()
        assert metadata.replace("METADATA", "licenses/LICENSE") in archive.namelist()
        top = archive.read(metadata.replace("METADATA", "top_level.txt")).decode().split()
    assert f"\nVersion: {cuverify.__version__}\n" in text
    assert "\nLicense-Expression: Apache-2.0\n" in text
    assert top == ["cuverify"], "a top-level `validators` would overwrite the PyPI package"
    for extra in ("cuda12", "cuda13", "test", "notebook", "capture12", "capture13", "zig", "lint"):
        assert f"\nProvides-Extra: {extra}\n" in text


def test_the_sdist_can_be_tested(built: Built) -> None:
    with tarfile.open(built.sdist) as archive:
        found = {name.partition("/")[2] for name in archive.getnames()}
    files = [*source_files(built.source).values(), *(built.source / "tests").glob("*.py")]
    needed = {path.relative_to(built.source).as_posix() for path in files}
    needed |= {"pyproject.toml", "README.md", "LICENSE", "CHANGELOG.md", "CONTRIBUTING.md"}
    assert needed <= found


def test_it_lives_beside_the_other_validators(
    built: Built, other_wheel: Path, tmp_path: Path
) -> None:
    both = Installation(tmp_path)
    for wheels in (
        (other_wheel, built.wheel),
        (built.wheel, other_wheel),
    ):  # the order must not matter
        both.install(*wheels)
        assert not both.record("cuverify") & both.record("validators")
        told = both.run(
            """
            import validators, cuverify.validators, cuverify.kernels_cu
            assert validators.email("a@example.org") is True
            assert not validators.email("nobody")
            print(validators.__file__)
            print(cuverify.validators.__file__)
            """
        ).split()
        theirs, ours = (Path(line).relative_to(both.site).as_posix() for line in told)
        assert theirs == "validators/__init__.py"
        assert ours == "cuverify/validators/__init__.py"
        both.pip("uninstall", "--yes", "cuverify")
        both.run("import validators; assert validators.email('a@example.org') is True")
        both.pip("uninstall", "--yes", "validators")


def test_kernels_load_and_compile_from_the_wheel(installed: Installation) -> None:
    pytest.importorskip("cupy")
    told = installed.run(
        """
        import cuverify
        from cuverify.compile import compile_cubin
        from cuverify.contract import limited_to
        from cuverify.resources import package_stems
        from cuverify.sources import KernelSource

        print(cuverify.__file__)
        for stem in package_stems():
            source = KernelSource.from_package(stem)
            for header in source.headers():
                print(header)
            arch = (limited_to(source.text) or ("sm_90",))[0]
            assert compile_cubin(source, arch).resources, stem
        print("stems", *package_stems())
        """
    ).splitlines()
    assert told[-1].split()[1:] == sorted(path.stem for path in (ROOT / "kernels_cu").glob("*.cu"))
    for line in told[:-1]:
        assert str(ROOT) not in line, "the wheel's own files are used"


def test_the_host_lane_builds_from_the_wheel(installed: Installation) -> None:
    pytest.importorskip("torch")
    from cuverify import env

    possible = {use.name: use.possible for use in env.inspect().uses()}
    if not possible[env.HOST_LANE]:
        pytest.skip("the host lane cannot be built here")
    installed.run(
        '''
        import numpy
        import cuverify

        text = """
        // @kernel twice
        // @param x update fp32 [n] the numbers
        // @param n value int32 how many
        extern "C" __global__ void twice(float* x, int n) {
            int i = blockIdx.x * blockDim.x + threadIdx.x;
            if (i < n) x[i] *= 2.0f;
        }
        """
        x = numpy.arange(100, dtype=numpy.float32)
        with cuverify.checked():
            cuverify.load_kernel(text)(4, 32, x, 100)
        assert (x == 2 * numpy.arange(100)).all(), x
        '''
    )


def test_the_command_is_installed(installed: Installation) -> None:
    import cuverify

    told = run(installed.script, "--version", cwd=installed.elsewhere, PYTHONPATH="")
    assert told.strip() == f"cuverify, version {cuverify.__version__}"


def test_importing_the_package_loads_no_other(tmp_path: Path) -> None:
    told = run(
        sys.executable,
        "-c",
        "import sys; before = set(sys.modules); import cuverify; cuverify.errors; dir(cuverify); "
        "print(*sorted({name.partition('.')[0] for name in set(sys.modules) - before}))",
        cwd=tmp_path,
    )
    assert set(told.split()) - set(sys.stdlib_module_names) == {"cuverify"}


def test_the_folder_refuses_the_other_packages_name() -> None:
    done = subprocess.run(
        [sys.executable, "-c", "import validators"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode != 0
    assert "ImportError" in done.stderr
    assert "import cuverify.validators" in done.stderr


def test_every_package_folder_is_listed() -> None:
    text = (ROOT / "pyproject.toml").read_text()
    (listed,) = re.findall(r"^packages = \[(.*?)\]", text, re.MULTILINE | re.DOTALL)
    folders = {
        name.rsplit("/", 1)[0].replace("/", ".")
        for name in source_files(ROOT)
        if name.endswith("/__init__.py")
    }
    assert set(re.findall(r'"([\w.]+)"', listed)) == folders
