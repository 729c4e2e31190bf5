from __future__ import annotations

import copy
import dataclasses
import json
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cuverify import cases, check_device, evidence
from cuverify.check_device import DeviceResult
from cuverify.errors import DeviceError, EvidenceError
from cuverify.evidence import document as document_of
from cuverify.evidence import gpu as gpu_of
from cuverify.evidence import source_tree
from cuverify.evidence.parts import find_part
from cuverify.evidence.parts.tests import count_junit
from cuverify.report import Finding
from cuverify.resources import processors, threads_of_children

HASH = "0" * 64
RUN = {"date": "2026-01-02T03:04:05+00:00", "command": "pytest -m gpu -q", "seconds": 12.5}
MEASUREMENT = {
    "op": "relocate",
    "shape": {"rows": 1024, "layers": 61},
    "us": 68.0,
    "us_spread": 1.5,
    "floor_us": 34.0,
    "bytes": 143_917_056,
    "flops": None,
    "peer": None,
    "error": None,
}

CASE = {
    "case": "relocate",
    "batches": 300,
    "captures": 300,
    "launches": 900,
    "kernel_nodes": 900,
    "replays": 1200,
    "findings": [],
    "not_inspected": [],
}

ZOO = {
    "mutants": 2,
    "caught": 2,
    "twins": 2,
    "accused": 0,
    "classes": 2,
    "missed": [],
    "misplaced": [],
    "false_alarms": [],
    "unforeseen": [],
    "not_run": [],
    "rules": [{"rule": "CV101", "mutants": 2, "caught": 2, "twins": 2, "accused": 0}],
}


def document() -> dict[str, Any]:
    return {
        "schema": 1,
        "gpu": "NVIDIA H200",
        "sections": {
            "tests": {
                "digests": dict.fromkeys(("kernels", "lanes", "validators", "tests"), HASH),
                "run": RUN,
                "versions": {"python": "3.12"},
                "data": {"passed": 40, "failed": 0, "skipped": 1},
            },
            "bench": {
                "digests": {"kernels": HASH, "lanes": HASH},
                "run": RUN,
                "versions": {"python": "3.12"},
                "data": [MEASUREMENT, {**MEASUREMENT, "us": None, "error": "does not fit"}],
            },
            "attention": {
                "digests": {"kernels": HASH, "lanes": HASH},
                "run": RUN,
                "versions": {"python": "3.12"},
                "data": [{**MEASUREMENT, "alone_us": 70.0, "alone_spread": 0.5, "read_us": None}],
            },
            "check": {
                "digests": {"kernels": HASH, "lanes": HASH, "validators": HASH},
                "run": RUN,
                "versions": {"python": "3.12"},
                "data": [copy.deepcopy(CASE)],
            },
            "zoo": {
                "digests": {"lanes": HASH, "validators": HASH},
                "run": RUN,
                "versions": {"python": "3.12"},
                "data": copy.deepcopy(ZOO),
            },
        },
    }


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Make a source tree with one file in each group."""
    root = tmp_path / "tree"
    for name, text in {
        "pyproject.toml": '[project]\nname = "cuverify"\n',
        "kernels_cu/a.cu": "kernel",
        "kernels_cu/include/b.cuh": "header",
        "kernels_cu/notes.txt": "not a kernel",
        "cuverify/kernel.py": "lane",
        "cuverify/cli.py": "face",
        "cuverify/host/env.py": "lane, though a face has its name",
        "validators/capture.py": "rule",
        "tests/test_a.py": "test",
    }.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return root


def put(root: Path, content: Any) -> Path:
    path = root / "evidence" / "h200.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(content if isinstance(content, str) else json.dumps(content))
    return path


# --- digests -------------------------------------------------------------------------------------


def test_groups_hold_what_a_result_depends_on(tree: Path) -> None:
    def names(group: str) -> list[str]:
        return [path.relative_to(tree).as_posix() for path in source_tree.group_files(tree, group)]

    assert names("kernels") == ["kernels_cu/a.cu", "kernels_cu/include/b.cuh"]
    assert names("lanes") == ["cuverify/host/env.py", "cuverify/kernel.py"]
    assert names("validators") == ["validators/capture.py"]
    assert names("tests") == ["tests/test_a.py"]


def test_a_digest_sees_content_names_and_new_files_only(tree: Path) -> None:
    before = source_tree.digest(tree, "kernels")
    (tree / "kernels_cu" / "notes.txt").write_text("changed")
    cache = tree / "kernels_cu" / "__pycache__"
    cache.mkdir()
    (cache / "c.h").write_text("x")
    assert source_tree.digest(tree, "kernels") == before

    seen = {before}
    (tree / "kernels_cu" / "a.cu").write_text("kernel ")
    seen.add(source_tree.digest(tree, "kernels"))
    (tree / "kernels_cu" / "a.cu").write_text("kernel")
    assert source_tree.digest(tree, "kernels") == before
    (tree / "kernels_cu" / "a.cu").rename(tree / "kernels_cu" / "c.cu")
    seen.add(source_tree.digest(tree, "kernels"))
    (tree / "kernels_cu" / "d.cu").write_text("")
    seen.add(source_tree.digest(tree, "kernels"))
    assert len(seen) == 4


def test_a_digest_does_not_depend_on_where_the_tree_is(tree: Path) -> None:
    before = {group: source_tree.digest(tree, group) for group in source_tree.GROUPS}
    moved = tree.rename(tree.with_name("elsewhere"))
    assert {group: source_tree.digest(moved, group) for group in source_tree.GROUPS} == before


def test_an_empty_group_is_an_incomplete_tree(tree: Path) -> None:
    (tree / "validators" / "capture.py").unlink()
    with pytest.raises(EvidenceError, match="validators"):
        source_tree.digest(tree, "validators")


def test_the_root_is_found_from_below_and_refused_outside(tree: Path, tmp_path: Path) -> None:
    assert evidence.source_root(tree / "kernels_cu" / "include") == tree.resolve()
    other = tmp_path / "other"
    other.mkdir()
    (other / "pyproject.toml").write_text('name = "something-else"\n')
    with pytest.raises(EvidenceError, match="no source tree"):
        evidence.source_root(other)


# --- schema --------------------------------------------------------------------------------------


def test_a_well_formed_document_has_no_problems() -> None:
    assert evidence.validate(document()) == []


def damaged(path: str, value: Any) -> dict[str, Any]:
    result = copy.deepcopy(document())
    *folders, last = path.split(".")
    target: Any = result
    for name in folders:
        target = target[int(name) if isinstance(target, list) else name]
    if value is KeyError:
        del target[last]
    else:
        target[last] = value
    return result


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("schema", 2),
        ("schema", KeyError),
        ("gpu", ""),
        ("extra", 1),
        ("sections", {}),
        ("sections", []),
        ("sections.profile", {}),
        ("sections.tests", 3),
        ("sections.tests.digests", KeyError),
        ("sections.tests.digests.lanes", KeyError),
        ("sections.tests.digests.lanes", "abc"),
        ("sections.bench.digests.tests", HASH),
        ("sections.tests.run", KeyError),
        ("sections.tests.run.date", "yesterday"),
        ("sections.tests.run.date", "2026-01-02T03:04:05"),
        ("sections.tests.run.seconds", "12"),
        ("sections.tests.run.seconds", float("nan")),
        ("sections.tests.run.command", None),
        ("sections.tests.versions", {}),
        ("sections.tests.versions.python", 3.12),
        ("sections.tests.data", KeyError),
        ("sections.tests.data.passed", -1),
        ("sections.tests.data.passed", 40.0),
        ("sections.tests.data.passed", 0),
        ("sections.tests.data.errors", 0),
        ("sections.bench.data", []),
        ("sections.bench.data", {}),
        ("sections.bench.data.0.us", "fast"),
        ("sections.bench.data.0.us", None),
        ("sections.bench.data.0.shape", [1]),
        ("sections.bench.data.0.peer", KeyError),
        ("sections.bench.data.0.peer", 3),
        ("sections.bench.data.0.error", []),
        ("sections.bench.data.0.op", None),
        ("sections.attention.data.0.alone_us", "fast"),
        ("sections.attention.data.0.read_us", -1.0),
    ],
)
def test_every_kind_of_damage_is_a_problem(path: str, value: Any) -> None:
    assert evidence.validate(damaged(path, value))


def test_all_problems_are_listed_at_once(tree: Path) -> None:
    broken = document()
    broken["gpu"] = None
    broken["sections"]["tests"]["data"]["failed"] = "none"
    put(tree, broken)
    with pytest.raises(EvidenceError) as caught:
        evidence.load(tree / "evidence" / "h200.json")
    assert "gpu is None" in str(caught.value)
    assert "sections.tests.data.failed is 'none'" in str(caught.value)


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"schema": 1}', "\x00"])
def test_text_that_is_no_evidence_is_refused(tree: Path, text: str) -> None:
    put(tree, text)
    with pytest.raises(EvidenceError):
        evidence.report(tree)


def test_missing_evidence_is_refused_with_the_way_to_get_it(tree: Path) -> None:
    with pytest.raises(EvidenceError, match="evidence record"):
        evidence.report(tree)


# --- showing -------------------------------------------------------------------------------------


def fresh(tree: Path) -> dict[str, Any]:
    result = document()
    for part in result["sections"]:
        result["sections"][part]["digests"] = document_of.digests(tree, part)
    return result


def test_fresh_evidence_is_ok_without_findings(tree: Path) -> None:
    put(tree, fresh(tree))
    report = evidence.report(tree)
    assert report.ok
    assert report.findings == []
    text = report.to_text()
    assert "40 passed, 0 failed, 1 skipped" in text
    assert "rows=1024" in text
    assert "50" in text  # the floor's share of the time, in percent


def test_a_change_makes_only_the_dependent_sections_stale(tree: Path) -> None:
    put(tree, fresh(tree))
    (tree / "tests" / "test_a.py").write_text("changed")
    stale = {s.part: s.stale for s in evidence.statuses(tree)}
    assert stale == {"attention": (), "bench": (), "check": (), "tests": ("tests",), "zoo": ()}
    (tree / "kernels_cu" / "a.cu").write_text("changed")
    stale = {s.part: s.stale for s in evidence.statuses(tree)}
    assert stale == {
        "attention": ("kernels",),
        "bench": ("kernels",),
        "check": ("kernels",),
        "tests": ("kernels", "tests"),
        "zoo": (),
    }
    report = evidence.report(tree)
    assert report.ok, "stale evidence is said, not failed"
    assert [finding.rule for finding in report.findings] == ["evidence-stale"] * 4


def test_a_face_may_change_without_making_evidence_stale(tree: Path) -> None:
    put(tree, fresh(tree))
    (tree / "cuverify" / "cli.py").write_text("changed")
    assert evidence.report(tree).findings == []


def test_recorded_failures_are_errors(tree: Path) -> None:
    content = fresh(tree)
    content["sections"]["tests"]["data"]["failed"] = 2
    put(tree, content)
    assert [finding.rule for finding in evidence.report(tree).errors] == ["evidence-failed"]


def test_an_absent_section_is_a_warning(tree: Path) -> None:
    content = fresh(tree)
    del content["sections"]["bench"]
    put(tree, content)
    report = evidence.report(tree)
    assert report.ok
    assert [finding.rule for finding in report.findings] == ["evidence-absent"]


# --- recording -----------------------------------------------------------------------------------


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_of, "gpu_name", lambda: "NVIDIA H200")


def recorder(
    monkeypatch: pytest.MonkeyPatch, part: str, make: Callable[[Path], tuple[str, Any]]
) -> None:
    module = sys.modules[f"cuverify.evidence.parts.{part}"]
    monkeypatch.setattr(module, "PART", dataclasses.replace(find_part(part), record=make))


@pytest.mark.parametrize(
    ("gpu_name", "stem"),
    [
        ("NVIDIA H200", "h200"),
        ("NVIDIA H100 80GB HBM3", "h100-80gb-hbm3"),
        ("NVIDIA GeForce RTX 5090", "rtx-5090"),
        ("Tesla T4", "t4"),
        ("???", "gpu"),
    ],
)
def test_a_file_is_named_after_its_gpu(gpu_name: str, stem: str) -> None:
    assert gpu_of.slug(gpu_name) == stem


def test_recording_needs_a_device(tree: Path) -> None:
    torch = pytest.importorskip("torch")
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    with pytest.raises(DeviceError, match="no CUDA device"):
        evidence.record("tests", root=tree)
    assert not (tree / "evidence").exists()


def test_an_unknown_part_is_refused(tree: Path) -> None:
    with pytest.raises(EvidenceError, match="profile"):
        evidence.record("profile", root=tree)


@pytest.mark.usefixtures("gpu")
def test_parts_are_merged(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = {"passed": 1, "failed": 0, "skipped": 0}
    recorder(monkeypatch, "tests", lambda root: ("pytest -m gpu -q", data))
    recorder(monkeypatch, "bench", lambda root: ("cuverify bench", [MEASUREMENT]))
    path = evidence.record("tests", root=tree)
    assert path == tree / "evidence" / "h200.json"
    tests = evidence.load(path)["sections"]["tests"]
    evidence.record("bench", root=tree)
    sections = evidence.load(path)["sections"]
    assert sections["tests"] == tests
    assert sections["bench"]["data"] == [MEASUREMENT]
    assert "python" in sections["bench"]["versions"]
    assert [entry.name for entry in path.parent.iterdir()] == ["h200.json"]
    absent = [finding.message for finding in evidence.report(tree).findings]
    assert absent == [
        f"h200.json has no section {part!r}" for part in ("attention", "check", "zoo")
    ]


@pytest.mark.usefixtures("gpu")
def test_a_part_that_is_recorded_meanwhile_is_kept(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    recorder(monkeypatch, "bench", lambda root: ("cuverify bench", [MEASUREMENT]))

    def slowly(root: Path) -> tuple[str, dict[str, int]]:
        evidence.record("bench", root=root)
        return "pytest -m gpu -q", {"passed": 1, "failed": 0, "skipped": 0}

    recorder(monkeypatch, "tests", slowly)
    path = evidence.record("tests", root=tree)
    assert [*evidence.load(path)["sections"]] == ["bench", "tests"]


@pytest.mark.usefixtures("gpu")
def test_attention_is_recorded_with_its_page(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []

    def make(root: Path, **options: Any) -> tuple[str, Any]:
        seen.append(options)
        return "cuverify bench verify_attention", [MEASUREMENT]

    recorder(monkeypatch, "attention", make)
    path = evidence.record("attention", root=tree, options={"seconds": 240.0})
    assert seen == [{"seconds": 240.0}]
    page = (tree / "docs" / "performance.md").read_text()
    assert evidence.load(path)["sections"]["attention"]["run"]["date"] in page
    with pytest.raises(EvidenceError, match="'bench' takes no seconds"):
        evidence.record("bench", root=tree, options={"seconds": 5.0})


def test_the_benchmarks_of_attention_are_recorded_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuverify import bench
    from cuverify.evidence.parts.bench import ELSEWHERE

    asked: list[tuple[list[str], Any]] = []

    def measure(wanted: list[str], options: Any = None) -> list[dict[str, Any]]:
        asked.append((wanted, options))
        return []

    monkeypatch.setattr(bench, "measure", measure)
    command, _ = find_part("bench").record(Path())
    ((others, _),) = asked
    assert set(others) == set(bench.names()) - set(ELSEWHERE)
    assert command == f"cuverify bench {' '.join(others)}"
    asked.clear()
    command, _ = find_part("attention").record(Path(), seconds=240.0)
    all_shapes = {"shapes": ["all"], "seconds": 240.0}
    assert asked == [(["verify_attention"], all_shapes), (["token_exactness"], None)]
    assert command.startswith("cuverify bench verify_attention --shapes all --seconds 240; ")
    assert set(ELSEWHERE) < set(bench.names())


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        ({"batches": 0}, "no batch ran"),
        ({"replays": -1}, "replays is -1"),
        ({"findings": [""]}, "findings"),
        ({"case": ""}, "not a name"),
        ({"more": 1}, "must hold exactly"),
    ],
)
def test_a_malformed_check_is_refused(damage: dict[str, Any], said: str) -> None:
    content = document()
    content["sections"]["check"]["data"] = [{**CASE, **damage}]
    (problem,) = evidence.validate(content)
    assert said in problem


def test_a_recorded_finding_is_an_error(tree: Path) -> None:
    content = fresh(tree)
    content["sections"]["check"]["data"][0]["findings"] = ["CV601 replay 2 differs"]
    put(tree, content)
    (error,) = evidence.report(tree).errors
    assert error.message == "h200.json records a finding in relocate: CV601 replay 2 differs"


@pytest.mark.usefixtures("gpu")
def test_a_check_is_recorded_by_case(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def check(name: str, **options: Any) -> DeviceResult:
        asked[name] = options
        found = [Finding("CV601", "error", "differs")] if name == "relocate" else []
        totals = {"captures": 7, "launches": 8, "kernel_nodes": 9, "replays": 10, "more": 1}
        return DeviceResult(findings=found, batches=options["examples"] or 5, totals=totals)

    monkeypatch.setattr(check_device, "check_on_device", check)
    monkeypatch.setattr(check_device, "jobs_of_this_machine", lambda: 8)
    path = evidence.record("check", root=tree)
    entries = {entry["case"]: entry for entry in evidence.load(path)["sections"]["check"]["data"]}
    assert entries.keys() == set(cases.names())
    assert entries["relocate"]["findings"] == ["CV601 differs"]
    assert entries["verify_plan"] == {
        **CASE, "case": "verify_plan", "batches": 5, "captures": 7, "launches": 8,
        "kernel_nodes": 9, "replays": 10,
    }  # fmt: skip
    assert entries["verify_attention"]["batches"] == 300
    assert (asked["verify_attention"]["jobs"], asked["verify_plan"]["jobs"]) == (6, 2)


@pytest.mark.usefixtures("gpu")
def test_files_that_change_during_a_run_void_it(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def change(root: Path) -> tuple[str, Any]:
        (root / "kernels_cu" / "a.cu").write_text("changed")
        return "pytest", {"passed": 1, "failed": 0, "skipped": 0}

    recorder(monkeypatch, "tests", change)
    with pytest.raises(EvidenceError, match="kernels changed"):
        evidence.record("tests", root=tree)
    assert not (tree / "evidence").exists()


@pytest.mark.usefixtures("gpu")
def test_a_run_without_results_is_not_recorded(tree: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    recorder(
        monkeypatch, "tests", lambda root: ("pytest", {"passed": 0, "failed": 0, "skipped": 9})
    )
    with pytest.raises(EvidenceError, match="no test ran"):
        evidence.record("tests", root=tree)
    assert not (tree / "evidence").exists()


@pytest.mark.usefixtures("gpu")
def test_a_malformed_file_is_found_before_the_run(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    put(tree, "{}")
    recorder(monkeypatch, "tests", lambda root: pytest.fail("ran"))
    with pytest.raises(EvidenceError, match="malformed"):
        evidence.record("tests", root=tree)
    assert (tree / "evidence" / "h200.json").read_text() == "{}"


GPU_TESTS = """
import os

import pytest

pytestmark = pytest.mark.gpu

def test_good(): pass
def test_threads_are_shared(): assert os.environ["OMP_NUM_THREADS"] == "SHARE"
def test_bad(): assert False
def test_skipped(): pytest.skip("why")

@pytest.fixture
def broken(): raise RuntimeError
def test_error(broken): pass
"""


@pytest.mark.usefixtures("gpu")
def test_gpu_tests_run_in_a_child_and_are_counted(
    tree: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    share = threads_of_children(max(1, min(12, 3 * processors() // 4)))["OMP_NUM_THREADS"]
    (tree / "pyproject.toml").write_text(
        '[project]\nname = "cuverify"\n[tool.pytest.ini_options]\nmarkers = ["gpu: x"]\n'
        'addopts = ["-p", "no:cacheprovider"]\n'
    )
    (tree / "tests" / "test_gpu.py").write_text(GPU_TESTS.replace("SHARE", share))
    (tree / "tests" / "test_a.py").write_text("def test_host(): pass")
    path = evidence.record("tests", root=tree)
    section = evidence.load(path)["sections"]["tests"]
    assert section["data"] == {"passed": 2, "failed": 2, "skipped": 1}
    assert section["run"]["command"].startswith("pytest -m gpu -q -n ")


@pytest.mark.usefixtures("gpu")
def test_a_test_run_that_could_not_start_is_not_recorded(tree: Path) -> None:
    (tree / "pytest.ini").write_text("[pytest]\naddopts = --no-such-option\n")
    with pytest.raises(EvidenceError, match="status 4"):
        evidence.record("tests", root=tree)
    assert not (tree / "evidence").exists()


@pytest.mark.usefixtures("gpu")
def test_a_file_that_cannot_be_imported_counts_as_failed(tree: Path) -> None:
    (tree / "tests" / "test_a.py").write_text("import nothing_of_that_name")
    path = evidence.record("tests", root=tree)
    assert evidence.load(path)["sections"]["tests"]["data"]["failed"] == 1


def test_what_is_no_junit_xml_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "junit.xml"
    with pytest.raises(EvidenceError, match="no JUnit XML"):
        count_junit(path)
    path.write_text("<html/>")
    with pytest.raises(EvidenceError, match="no testsuite"):
        count_junit(path)


def test_the_file_written_is_as_readable_as_others(tmp_path: Path) -> None:
    if sys.platform == "win32":
        pytest.skip("permission bits are POSIX")
    from cuverify.files import write_atomically

    path = tmp_path / "x"
    before = os.umask(0o022)
    try:
        write_atomically(path, "text")
    finally:
        os.umask(before)
    assert path.stat().st_mode & 0o777 == 0o644


# --- this checkout -------------------------------------------------------------------------------


def test_committed_evidence_is_well_formed() -> None:
    root = evidence.source_root(Path(__file__).parent)
    if not list((root / "evidence").glob("*.json")):
        pytest.skip("no evidence was recorded yet")
    for path in evidence.evidence_files(root):
        assert path.stem == gpu_of.slug(evidence.load(path)["gpu"])
