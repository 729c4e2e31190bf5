"""What the README shows is run."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
TEXT = (ROOT / "README.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("code", re.findall(r"^```python\n(.*?)^```$", TEXT, re.M | re.S))
def test_the_examples_run(
    code: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("cupy")
    monkeypatch.chdir(tmp_path)
    exec(compile(code, "README.md", "exec"), {"__name__": "readme"})
    printed = capsys.readouterr().out
    assert ("registers" if ".resources" in code else "CV202") in printed


def test_the_claims_of_the_example_are_true() -> None:
    """The README says what happens to a short `b`, a float stride and a wrong dtype."""
    import cuverify
    from cuverify.errors import ArgumentError, CheckerError

    torch = pytest.importorskip("torch")
    (code,) = re.findall(r"load_kernel\(\s*\"\"\"\n(.*?)\"\"\"", TEXT, re.S)
    kernel = cuverify.load_kernel(code, BLOCK=64)
    a, b, out = torch.randn(3, 200)[:, :100], torch.randn(100), torch.empty(3, 100)
    good = (out, a, b, 3, 100, 200)
    for position, value, name in ((2, b[:99], "b"), (5, 200.5, "a_stride"), (0, out.half(), "out")):
        bad = [*good[:position], value, *good[position + 1 :]]
        with pytest.raises(ArgumentError) as caught:
            kernel(3, 64, *bad)
        assert caught.value.argument == name

    wrong = cuverify.load_kernel(code.replace("a_stride + col]", "a_stride + col + 1]"), BLOCK=64)
    with cuverify.checked(), pytest.raises(CheckerError) as reports:
        wrong(3, 64, out, a.contiguous(), b, 3, 100, 100)
    line = 1 + next(n for n, text in enumerate(code.splitlines()) if "a_stride + col]" in text)
    assert f":{line}" in str(reports.value)
    assert "thread" in str(reports.value)


def test_links_lead_somewhere() -> None:
    for page in (ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "tests" / "README.md"):
        for target in re.findall(r"\]\((?!https?:)([^)#]+)", page.read_text(encoding="utf-8")):
            assert (page.parent / target).exists(), f"{page.name}: {target}"


def test_the_guide_names_every_test_module() -> None:
    text = (ROOT / "tests" / "README.md").read_text(encoding="utf-8")
    named = set(re.findall(r"`(test_\w+\.py)`", text))
    assert named == {path.name for path in (ROOT / "tests").glob("test_*.py")}
