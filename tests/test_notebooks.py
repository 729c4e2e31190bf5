"""The notebooks run, say what they promise, and their two forms are one."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from cuverify.errors import CompileError, ContractError, SourceError
from cuverify.notebook import kernels_of_cell

FOLDER = Path(__file__).resolve().parent.parent / "notebooks"
NOTEBOOKS = sorted(FOLDER.glob("*.ipynb"))
CELL = """\
// @kernel fill
// @param out write int32 [n]
// @param n   value int32
#ifndef BY
#define BY 1
#endif
extern "C" __global__ void fill(int* out, int n) {
    if (threadIdx.x < n) out[threadIdx.x] = BY;
}
"""


def cells(path: Path) -> list[tuple[str, str, tuple[str, ...]]]:
    """Return kind, text and tags of each cell of either form."""
    jupytext = pytest.importorskip("jupytext", reason="jupytext is not installed")
    return [
        (cell.cell_type, cell.source, tuple(cell.metadata.get("tags", ())))
        for cell in jupytext.read(path).cells
    ]


def test_there_are_notebooks() -> None:
    assert [path.stem for path in NOTEBOOKS][:1] == ["01_first_kernel"]


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_both_forms_are_one(path: Path) -> None:
    assert cells(path) == cells(path.with_suffix(".py"))


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_no_output_and_no_machine_is_kept(path: Path) -> None:
    nbformat = pytest.importorskip("nbformat", reason="nbformat is not installed")
    notebook = nbformat.read(path, as_version=4)
    nbformat.validate(notebook)
    for cell in notebook.cells:
        if cell.cell_type == "code":
            assert cell.outputs == [] and cell.execution_count is None
    for form in (path, path.with_suffix(".py")):
        assert not re.search(r"(?<![\w.])/(?:home|root|Users|work|mnt|tmp)/\w", form.read_text())


def run(path: Path, folder: Path) -> Any:
    """Return a notebook as it is after it ran in a folder of its own."""
    for needed in ("nbformat", "nbclient", "ipykernel"):
        pytest.importorskip(needed, reason=f"{needed} is not installed")
    import nbclient
    import nbformat

    notebook = nbformat.read(path, as_version=4)
    client = nbclient.NotebookClient(
        notebook, timeout=120, kernel_name="python3", resources={"metadata": {"path": str(folder)}}
    )
    client.execute()
    return notebook


def outputs(notebook: Any) -> list[str]:
    """Return what each code cell says: its prints, its value, its error."""
    said = []
    for cell in notebook.cells:
        if cell.cell_type != "code":
            continue
        texts = []
        for output in cell.outputs:
            if output.output_type == "error":
                texts.append("\n".join([output.ename, output.evalue, *output.traceback]))
            else:
                texts.append(output.get("text") or output["data"]["text/plain"])
        said.append(re.sub(r"\x1b\[[\d;]*m", "", "\n".join(texts)))
    return said


@pytest.mark.timeout(240)
def test_the_first_kernel(tmp_path: Path) -> None:
    pytest.importorskip("cupy", reason="the notebook compiles for a GPU, which takes CuPy")
    notebook = run(FOLDER / "01_first_kernel.ipynb", tmp_path)
    said = outputs(notebook)
    code = [cell.source.splitlines() for cell in notebook.cells if cell.cell_type == "code"]
    misspelled = 1 + next(i for i, line in enumerate(code[1]) if "partail" in line)
    assert re.search(rf"cell \[2\]:{misspelled}:(\d+:)? error: ", said[1])
    assert "partail[t] = sum;" in said[1]
    assert "site-packages" not in said[1] and "kernels_of_cell" not in said[1]
    assert said[2] == ""
    assert said[3].startswith("array([")
    assert "ArgumentError" in said[4] and "wants cols = 999" in said[4]
    assert "CheckerError" in said[5]
    adds = 1 + next(i for i, line in enumerate(code[2]) if "partial[t + half]" in line)
    writes = 1 + next(i for i, line in enumerate(code[2]) if "partial[t] = sum" in line)
    assert (
        f"cell [3]:{adds}: race: read after write" in said[5]
        or f"cell [3]:{writes}: race" in said[5]
    )
    assert "shared array `partial`" in said[5]
    assert said[6] == ""
    assert re.findall(r"(\w+): largest error", said[7]) == ["ascending", "descending", "random"]
    assert said[8] == "256 bytes of shared memory, 0 spilled\n"
    assert list(tmp_path.iterdir()) == []


def test_a_cell_gives_its_kernels_by_name() -> None:
    import numpy as np

    kernels = kernels_of_cell("BY=7", CELL, 4)
    assert list(kernels) == ["fill"]
    assert kernels["fill"].source.name == "cell [4]"
    out = np.zeros(3, np.int32)
    kernels["fill"](1, 32, out, 3)
    assert out.tolist() == [7, 7, 7]


def test_errors_name_the_cell_and_its_line() -> None:
    with pytest.raises(CompileError) as caught:
        kernels_of_cell("", CELL.replace("= BY;", "= BYE;"), 12)
    assert caught.value.diagnostics[0].where.startswith("cell [12]:9")
    with pytest.raises(ContractError, match=r"cell \[1\]:3: @param out"):
        kernels_of_cell("", CELL.replace("int32 [n]", "int32"), 1)
    with pytest.raises(ContractError, match=r"cell \[1\]: no `extern"):
        kernels_of_cell("", "int x;\n", 1)
    with pytest.raises(SourceError, match="'8' is no NAME=VALUE"):
        kernels_of_cell("BY=3 8", CELL, 1)


def test_the_magic_shows_no_stack() -> None:
    shells = pytest.importorskip("IPython.core.interactiveshell", reason="IPython is not installed")
    from cuverify.notebook import load_ipython_extension

    shell = shells.InteractiveShell()
    load_ipython_extension(shell)
    shell.run_cell_magic("cuda", "BY=2", CELL)
    assert shell.user_ns["fill"].source.values == {"BY": 2}
    with pytest.raises(SourceError) as caught:
        shell.run_cell_magic("cuda", "", CELL + '#include "absent.cuh"\n')
    (shown,) = caught.value._render_traceback_()  # type: ignore[attr-defined]
    assert shown.startswith("SourceError: cell [") and "absent.cuh" in shown
