"""The zoo and the rules' pages: complete, in step with the rules, and counted right."""

from __future__ import annotations

import ast
import contextlib
import importlib
import inspect
import re
import subprocess
import sys
import textwrap
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from cuverify.validators import explain, rules
from cuverify.validators.child import ChildOutcome
from cuverify.validators.zoo import forks, rates, registry, run
from cuverify.validators.zoo.classes import CLASSES
from cuverify.validators.zoo.forks import Job, run_jobs
from cuverify.validators.zoo.mutant import Mutant
from cuverify.validators.zoo.rates import Run, fault_line
from cuverify.validators.zoo.registry import BY_NAME, MUTANTS

from cuverify.errors import ArgumentError, DeviceError
from cuverify.report import Finding, Report

ZOO = Path(__file__).resolve().parent.parent / "validators" / "zoo"
FAMILIES = sorted(path.stem for path in ZOO.glob("cv*.py"))
TITLES = {rule.name: rule.title for rule in rules.RULES}
RULES = set(TITLES)
SECTIONS = ("What goes wrong", "How it shows", "Minimal example", "Fix", "In the zoo")

# --- registry ------------------------------------------------------------------------------------


def factories(family: str) -> dict[str, ast.FunctionDef]:
    """Return the functions of a family that take `faulty`, from the text."""
    tree = ast.parse((ZOO / f"{family}.py").read_text(encoding="utf-8"))
    return {
        node.name: node
        for node in tree.body
        if isinstance(node, ast.FunctionDef)
        and [argument.arg for argument in node.args.kwonlyargs] == ["faulty"]
    }


@pytest.mark.parametrize("family", FAMILIES)
def test_every_factory_is_registered_and_every_entry_has_a_factory(family: str) -> None:
    listed = [mutant.name for mutant in MUTANTS if mutant.family == family]
    assert sorted(factories(family)) == sorted(listed)
    assert listed == list(factories(family)), "the table has the order of the module"


def test_entries_are_complete_and_unique() -> None:
    assert len(BY_NAME) == len(MUTANTS)
    assert {mutant.family for mutant in MUTANTS} == set(FAMILIES)
    for mutant in MUTANTS:
        assert re.fullmatch(r"[a-z_]+", mutant.name)
        assert mutant.family[:3].upper() == mutant.rule[:3] or mutant.name == "cupy_recipe"
        assert mutant.shows and not mutant.shows.endswith(".")
        assert mutant.rule not in mutant.also
        assert all(reason for reason in mutant.also.values())
        assert set(mutant.needs) <= set(run._NEEDS)


def test_every_failure_class_is_shown_or_excused() -> None:
    shown = registry.classes_shown()
    assert shown | set(registry.CLASSES_NOT_SHOWN) == set(CLASSES)
    assert not shown & set(registry.CLASSES_NOT_SHOWN)
    assert len(shown) >= 45


def test_failure_classes_are_numbered_from_1_and_have_names_of_their_own() -> None:
    assert list(CLASSES) == list(range(1, len(CLASSES) + 1))
    assert len(set(CLASSES.values())) == len(CLASSES)
    (row,) = rates.overview([BY_NAME["null_stream"]]).tables[0].rows
    assert row[3] == [f"1: {CLASSES[1]}"]


def test_every_rule_is_shown_or_excused() -> None:
    shown = {mutant.rule for mutant in MUTANTS}
    assert shown | set(registry.RULES_NOT_SHOWN) == RULES
    assert not shown & set(registry.RULES_NOT_SHOWN)
    assert {rule for mutant in MUTANTS for rule in mutant.also} <= RULES


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_line_is_marked_where_one_is_promised(mutant: Mutant) -> None:
    node = factories(mutant.family)[mutant.name]
    text = (ZOO / f"{mutant.family}.py").read_text(encoding="utf-8").splitlines()
    marked = [
        number
        for number in range(node.lineno, (node.end_lineno or 0) + 1)
        if "# fault" in text[number - 1]
    ]
    assert len(marked) == (1 if mutant.line else 0)
    place = fault_line(mutant)
    assert (place is not None) == mutant.line
    if place is not None:
        assert place.endswith(f"{mutant.family}.py:{marked[0]}")


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_factory_asks_once_whether_it_is_faulty_and_says_what_goes_wrong(mutant: Mutant) -> None:
    node = factories(mutant.family)[mutant.name]
    (default,) = node.args.kw_defaults
    assert isinstance(default, ast.Constant) and default.value is True
    assert ast.get_docstring(node)
    asked = [
        inner for inner in ast.walk(node) if isinstance(inner, ast.Name) and inner.id == "faulty"
    ]
    assert 1 <= len(asked) <= 2, "a twin differs in one place, and in what cleans up after it"


def test_the_registry_loads_no_library() -> None:
    code = (
        "import sys; from cuverify.validators.zoo import registry, rates, run; registry.MUTANTS; "
        "print(sorted({'torch', 'cupy', 'numpy'} & {*sys.modules}))"
    )
    told = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "[]"


def test_families_import_without_a_device() -> None:
    pytest.importorskip("cupy")
    pytest.importorskip("torch")
    for mutant in MUTANTS:
        module, _, name = mutant.factory.partition(":")
        factory = getattr(importlib.import_module(module), name)
        assert inspect.signature(factory).parameters["faulty"].default is True


def test_the_zoos_kernels_compile() -> None:
    cupy = pytest.importorskip("cupy")
    from cuverify.validators.zoo import kernels

    text = "\n".join((ZOO / f"{family}.py").read_text() for family in FAMILIES)
    for source in (kernels.TEXT, kernels.DEPENDENT_TEXT):
        program = cupy.cuda.nvrtc.createProgram(source, "zoo.cu", [], [])
        cupy.cuda.nvrtc.compileProgram(program, ["-arch=sm_90"])
        assert cupy.cuda.nvrtc.getCUBIN(program)
        for name in re.findall(r"__global__ void (\w+)\(", source):
            assert f'"{name}"' in text, f"{name} is used by no mutant"


# --- pages ---------------------------------------------------------------------------------------


def test_rules_and_pages_are_in_step() -> None:
    assert set(explain.names()) == RULES


@pytest.mark.parametrize("rule", explain.names())
def test_a_page_is_whole(rule: str) -> None:
    text = explain.page(rule)
    assert text.startswith(f"# {rule}: {TITLES[rule]}\n")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == list(SECTIONS)
    for name in SECTIONS:
        assert explain.section(rule, name), name
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    assert blocks, "an example"
    for language, block in blocks:
        assert language in {"python", "cuda"}
        if language == "python":
            compile(textwrap.dedent(block), rule, "exec")
    named = set(re.findall(r"`cuverify zoo (\w+)`", explain.section(rule, "In the zoo")))
    assert named == {mutant.name for mutant in registry.of_rule(rule)}
    if not named:
        assert registry.RULES_NOT_SHOWN[rule] in explain.section(rule, "In the zoo")


def test_a_page_names_no_rule_that_does_not_exist() -> None:
    for rule in explain.names():
        assert set(re.findall(r"CV\d{3}", explain.page(rule))) <= RULES, rule


def test_an_unknown_rule_is_refused_with_those_of_its_family() -> None:
    assert explain.page(" cv101 ") == explain.page("CV101")
    assert explain.title("cv101") == TITLES["CV101"]
    with pytest.raises(ArgumentError, match="CV101, CV102"):
        explain.page("CV199")
    assert explain.section("CV101", "No such heading") == ""


# --- counting ------------------------------------------------------------------------------------

PLAIN = Mutant("one", "cv1_work", "CV101", "shows", classes=(1,), also={"CV602": "follows"})
PLACED = BY_NAME["item"]


def a_run(mutant: Mutant, faulty: bool, *found: tuple[str, str | None]) -> Run:
    report = Report("made up")
    for rule, where in found:
        report.findings.append(Finding(rule, "error", f"{rule} speaks", where))
    return Run(mutant, faulty, report)


def test_a_mutant_is_caught_by_its_own_rule_only() -> None:
    assert a_run(PLAIN, True, ("CV101", None)).caught
    assert not a_run(PLAIN, True, ("CV602", None)).caught
    assert not a_run(PLAIN, True).caught
    seen = a_run(PLAIN, True, ("CV101", None), ("CV602", None), ("CV301", None))
    assert seen.unforeseen == {"CV301"}


def test_a_promised_line_must_be_right() -> None:
    place = fault_line(PLACED)
    assert place is not None
    short = "/".join(Path(place).parts[-3:])
    assert a_run(PLACED, True, ("CV202", place)).caught
    assert a_run(PLACED, True, ("CV202", short)).caught
    wrong = a_run(PLACED, True, ("CV202", f"{place}0"), ("CV201", place))
    assert wrong.named and not wrong.caught
    assert not a_run(PLACED, True, ("CV202", None)).caught


def test_whatever_accuses_a_twin_is_a_false_alarm() -> None:
    assert a_run(PLAIN, False, ("CV602", None)).unforeseen == {"CV602"}
    assert a_run(PLAIN, False).unforeseen == frozenset()


def test_rates_by_rule() -> None:
    other = Mutant("two", "cv1_work", "CV101", "shows")
    third = Mutant("three", "cv3_frozen", "CV301", "shows")
    found = rates.rates(
        [
            a_run(PLAIN, True, ("CV101", None)),
            a_run(other, True, ("CV301", None)),
            a_run(third, True, ("CV301", None)),
            a_run(PLAIN, False),
            a_run(other, False, ("CV606", None), ("CV606", None)),
            a_run(third, False),
        ]
    )
    assert [(rate.rule, rate.mutants, rate.caught, rate.twins, rate.accused) for rate in found] == [
        ("CV101", 2, 1, 3, 0),
        ("CV301", 1, 1, 3, 0),
        ("CV606", 0, 0, 3, 1),
    ]


def test_the_report_names_what_went_wrong() -> None:
    runs = [
        a_run(PLAIN, True, ("CV301", None)),
        a_run(PLACED, True, ("CV202", "elsewhere.py:3"), ("CV999", None)),
        a_run(PLAIN, False, ("CV606", "x.py:1")),
        a_run(PLACED, False),
    ]
    report = rates.report(
        runs, not_run={"gone": "cupti is not installed"}, environment={"torch": "2.11"}
    )
    assert not report.ok
    assert sorted(finding.rule for finding in report.findings) == [
        "zoo-false-alarm",
        "zoo-missed",
        "zoo-unforeseen",
        "zoo-unforeseen",
        "zoo-wrong-line",
    ]
    totals, by_rule, versions = report.tables
    assert list(versions.rows) == [("torch", "2.11")]
    assert totals.rows == [
        ("mutants, caught by their rule", 2, 0, 0.0),
        ("twins, accused by any rule", 2, 1, 50.0),
    ]
    assert ("CV606", 0, 0, None, 2, 1, 50.0) in by_rule.rows
    subjects = {line.subject: line for line in report.coverage}
    assert subjects["mutant gone"].detail == "cupti is not installed"
    assert "failure class 8, graph of another step out of a cache" in subjects
    missed = next(finding for finding in report.findings if finding.rule == "zoo-missed")
    assert "one" in missed.message and "CV101" in missed.message and "CV301" in missed.message
    report.to_text(), report.to_html()


def test_facts_count_what_the_report_says() -> None:
    runs = [
        a_run(PLAIN, True, ("CV101", None)),
        a_run(PLACED, True),
        a_run(PLAIN, False),
        a_run(PLACED, False, ("CV101", None)),
    ]
    facts = rates.facts(runs)
    assert {name: facts[name] for name in ("mutants", "caught", "twins", "accused", "classes")} == {
        "mutants": 2,
        "caught": 1,
        "twins": 2,
        "accused": 1,
        "classes": 1,
    }
    assert (facts["missed"], facts["false_alarms"]) == (["item"], ["item"])
    from cuverify.evidence.parts.zoo import PART

    problems: list[str] = []
    PART.validate(problems, "data", {**facts, "not_run": []})
    assert problems == []
    assert PART.summary(facts) == "1 of 2 mutants caught, 1 of 2 twins accused, 1 classes"
    assert list(PART.failures(facts)) == [
        "a missed mutant: item",
        "a clean twin that is accused: item",
    ]


@pytest.mark.parametrize(
    "change",
    [
        {"mutants": 0},
        {"caught": -1},
        {"missed": "item"},
        {"rules": []},
        {"rules": [{"rule": "CV101", "mutants": 1, "caught": 2, "twins": 1, "accused": 0}]},
        {"rules": [{"rule": "CV101"}]},
        {"more": 1},
    ],
)
def test_damaged_evidence_is_seen(change: dict[str, Any]) -> None:
    from cuverify.evidence.parts.zoo import PART

    runs = [a_run(PLAIN, True, ("CV101", None)), a_run(PLAIN, False)]
    problems: list[str] = []
    PART.validate(problems, "data", {**rates.facts(runs), "not_run": [], **change})
    assert problems


# --- choosing and running ------------------------------------------------------------------------


def test_mutants_are_chosen_by_name_or_rule() -> None:
    assert run.chosen(()) == list(MUTANTS)
    assert run.chosen(("item",)) == [BY_NAME["item"]]
    by_rule = run.chosen(("cv202", "item"))
    assert {mutant.rule for mutant in by_rule} == {"CV202"}
    assert sorted(each.name for each in by_rule) == sorted(
        each.name for each in registry.of_rule("CV202")
    )
    with pytest.raises(ArgumentError, match="no mutant and no rule"):
        run.chosen(("itme",))


def test_what_needs_a_missing_library_is_not_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_NEEDS", {"cupti": "no_such_library", "cuda-bindings": "json"})
    judgeable, not_run = run.judgeable(MUTANTS)
    assert "raw_malloc" in not_run and "frozen_grid" not in not_run
    assert set(not_run.values()) == {"cupti is not installed"}
    assert {mutant.name for mutant in judgeable} | set(not_run) == set(BY_NAME)


def test_runs_come_in_order_and_hear_what_children_said(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Job] = []
    report = Report("of a child")
    report.findings.append(Finding("CV202", "error", "waits"))

    def made_up(jobs: list[Job], *, parallel: int, imports: Any, done: Any) -> list[ChildOutcome]:
        asked.extend(jobs)
        outcomes = []
        for index, job in enumerate(jobs):
            events: tuple[Any, ...] = ({"kind": "stage", "stage": "capture"},)
            status: Any = "died"
            if job.work["faulty"] and job.work["name"] == "item":
                events += ({"kind": "report", "report": report.to_json()},)
                status = "done"
            outcomes.append(ChildOutcome(status, events, exit_status=-11))
            done(index, outcomes[-1])
        return outcomes

    monkeypatch.setattr(run, "_has_device", lambda: True)
    monkeypatch.setattr(run, "run_jobs", made_up)
    told: list[Any] = []
    mutants = [BY_NAME["item"], BY_NAME["hangs"]]
    runs = run.run_zoo(mutants, progress=lambda *arguments: told.append(arguments))
    assert asked[0].work == {"name": "hangs", "faulty": True}, "the longest starts first"
    assert [(each.mutant.name, each.faulty) for each in runs] == [
        ("item", True),
        ("item", False),
        ("hangs", True),
        ("hangs", False),
    ]
    assert [sorted(each.rules) for each in runs] == [["CV202"], ["CV905"], ["CV905"], ["CV905"]]
    assert told[-1][1:] == (4, 4)


def test_a_report_shows_the_line_and_names_causes_first() -> None:
    from cuverify.validators.capture import CaptureResult
    from cuverify.validators.observations import CallSeen, CaptureSeen, Fault
    from cuverify.validators.places import line_at
    from cuverify.validators.rules import judge
    from cuverify.validators.summary import report_of

    place = fault_line(PLACED)
    seen = CaptureSeen(stages=["eager"])
    seen.faults.append(Fault("capture", "RuntimeError: invalidated", "elsewhere.py:1"))
    seen.calls = (CallSeen("cudaStreamSynchronize", "sync", "capture", where=place),)
    report = report_of("item", [CaptureResult(judge(seen), [], seen)])
    cause, effect = report.findings
    assert (cause.rule, effect.rule) == ("CV202", "CV201")
    assert str(cause.evidence["code"]).startswith("n = int(length.item())")
    assert "code" not in effect.evidence
    assert [line_at(place) for place in (None, "", "x", "x.py:", "no_such.py:3")] == [""] * 5


def test_the_childs_own_file_is_no_place() -> None:
    from cuverify.validators import child, places

    # python -m names the module __main__
    code = compile("import sys\nframe = sys._getframe()", str(child.__file__), "exec")
    names: dict[str, Any] = {"__name__": "__main__"}
    exec(code, names)
    assert places.is_library(names["frame"])
    code = compile("import sys\nframe = sys._getframe()", "step.py", "exec")
    names = {"__name__": "__main__"}
    exec(code, names)
    assert not places.is_library(names["frame"])


def test_a_run_sends_what_it_has_found_before_each_part(monkeypatch: pytest.MonkeyPatch) -> None:
    from cuverify.validators import api
    from cuverify.validators.observations import CaptureSeen, Fault

    made: list[bool] = []

    def factory(*, faulty: bool) -> SimpleNamespace:
        made.append(faulty)
        return SimpleNamespace(name="item")

    def validate(case: Any, *, progress: Any) -> Report:
        seen = CaptureSeen()
        progress("eager run", seen)
        seen.faults.append(Fault("capture", "RuntimeError: no", "step.py:3"))
        progress("replays", seen)
        return Report(f"capture of {case.name}")

    monkeypatch.setattr(api, "load_factory", lambda reference: factory)
    monkeypatch.setattr(api, "validate", validate)
    events: list[Any] = []
    run.validate_one({"name": "item", "faulty": False}, events.append)
    assert made == [False]
    stages = [event["stage"] for event in events if event["kind"] == "stage"]
    assert stages == ["eager run", "replays"]
    listener = api.Listener("item")
    for event in events[:-1]:  # the process dies before the last one
        listener.take(event)
    died = listener.report(ChildOutcome("died", exit_status=-11), 60.0)
    assert sorted({finding.rule for finding in died.findings}) == ["CV201", "CV905"]


def test_without_a_device_the_zoo_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_has_device", lambda: False)
    with pytest.raises(DeviceError, match="needs a CUDA device"):
        run.run_zoo(MUTANTS)


TASKS = """
import os, subprocess, sys, time

def ok(work, emit):
    print("noise")
    emit({"number": work["number"], "torch": "json" in sys.modules, "parent": os.getppid()})

def dies(work, emit):
    emit({"number": 1})
    os._exit(3)

def hangs(work, emit):
    emit({"pid": os.getpid()})
    time.sleep(600)

def raises(work, emit):
    raise LookupError("nothing here")

def large(work, emit):
    emit({"text": "x" * 300_000})
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "zoo_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(tmp_path)
    return "zoo_tasks"


def test_jobs_run_apart_and_come_back_in_order(tasks: str) -> None:
    jobs = [Job(f"{tasks}:ok", {"number": number}, 30.0) for number in range(5)]
    jobs[1:1] = [Job(f"{tasks}:{name}", {}, 30.0) for name in ("dies", "raises", "large")]
    ended: list[int] = []
    outcomes = run_jobs(
        jobs,
        parallel=3,
        imports=("json", "no_such_module"),
        done=lambda index, outcome: ended.append(index),
    )
    assert [outcome.status for outcome in outcomes[:4]] == ["done", "died", "raised", "done"]
    assert outcomes[1].ending == "ended with status 3"
    assert [event["number"] for event in outcomes[1].events] == [1]
    assert outcomes[2].error == "LookupError: nothing here"
    assert len(outcomes[3].events[0]["text"]) == 300_000
    good = [outcomes[0], *outcomes[4:]]
    assert [outcome.events[0]["number"] for outcome in good] == [0, 1, 2, 3, 4]
    assert len({outcome.events[0]["parent"] for outcome in good}) == 1
    assert all("noise" in outcome.log for outcome in good)
    assert sorted(ended) == list(range(len(jobs)))


def test_a_job_past_its_limit_is_ended_and_says_where_it_stood(tasks: str) -> None:
    outcomes = run_jobs(
        [Job(f"{tasks}:hangs", {}, 1.0), Job(f"{tasks}:ok", {"number": 7}, 30.0)], parallel=2
    )
    assert (outcomes[0].status, outcomes[0].ending) == ("timeout", "ended by SIGKILL")
    assert "in hangs" in outcomes[0].log
    assert not Path(f"/proc/{outcomes[0].events[0]['pid']}").exists()
    assert outcomes[1].status == "done"


def test_a_server_that_ends_early_is_an_error(tasks: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forks, "_SERVE", f"{tasks}:dies")
    monkeypatch.setattr(
        forks, "run_child", lambda *arguments, **options: ChildOutcome("died", exit_status=3)
    )
    with pytest.raises(DeviceError, match="ended with status 3 after 0"):
        run_jobs([Job(f"{tasks}:ok", {}, 1.0)], parallel=1)


def test_nothing_to_do_starts_nothing_and_no_process_is_no_way_to_do_it() -> None:
    assert run_jobs([], parallel=1) == []
    with pytest.raises(ArgumentError, match="parallel=0"):
        run_jobs([], parallel=0)


class OnTheHost:
    """Stands in for a graph of `torch.cuda`: a replay calls the step again, or does nothing."""

    def __init__(self, step: Any, replays: bool) -> None:
        self.replay = step if replays else lambda: None


@pytest.mark.parametrize("replays", [True, False])
def test_a_plain_run_says_which_outputs_are_wrong(
    replays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    torch = pytest.importorskip("torch")
    from cuverify.validators import api
    from cuverify.validators.callable_case import CallableCase
    from cuverify.validators.zoo import plain

    x, y, z = torch.zeros(4), torch.zeros(4), torch.zeros(4, dtype=torch.uint8)

    def step() -> None:
        y[:3] = 2 * x[:3]  # the last element is padding
        z.fill_(int(x[0]))

    case = CallableCase(
        step,
        {"x": x},
        {"y": y, "z": z},
        refill=lambda seed: x.fill_(seed + 1),
        reference=lambda: {"y": 2 * x.numpy(), "z": x.numpy()},
        padding={"y": slice(3, None)},
    )
    silent = SimpleNamespace(wait_stream=lambda other: None)
    for name, value in {
        "Stream": lambda: silent,
        "current_stream": lambda: silent,
        "stream": lambda stream: contextlib.nullcontext(),
        "synchronize": lambda: None,
        "CUDAGraph": lambda: OnTheHost(step, replays),
        "graph": lambda graph, stream: contextlib.nullcontext(),
    }.items():
        monkeypatch.setattr(torch.cuda, name, value)
    monkeypatch.setattr(plain.gc, "disable", lambda: None)
    monkeypatch.setattr(api, "load_factory", lambda reference: lambda faulty: case)
    events: list[Any] = []
    plain.run({"names": ["item", "hangs"], "faulty": False}, events.append)
    assert [(event["name"], event["stage"]) for event in events] == [
        (name, stage) for name in ("item", "hangs") for stage in ("eager", "capture", "replay")
    ]
    assert events[0]["wrong"] == events[1]["wrong"] == []
    wrong = [f"{name} of seed {seed}" for seed in (0, 1, 2, 0) for name in "yz"]
    assert events[2]["wrong"] == ([] if replays else wrong)


# --- on a GPU ------------------------------------------------------------------------------------


@pytest.mark.gpu
def test_every_twin_is_right_in_a_bare_graph() -> None:
    pytest.importorskip("cupy")
    names = [[mutant.name for mutant in MUTANTS if mutant.family == each] for each in FAMILIES]
    jobs = [
        Job("cuverify.validators.zoo.plain:run", {"names": each, "faulty": False}, 120.0)
        for each in names
    ]
    outcomes = run_jobs(jobs, parallel=len(jobs), imports=("torch", "cupy"))
    told = [event for outcome in outcomes for event in outcome.events]
    assert [outcome.error for outcome in outcomes if outcome.status != "done"] == []
    assert [event for event in told if event["wrong"]] == []
    assert {event["name"] for event in told if event["stage"] == "replay"} == set(BY_NAME)


@pytest.mark.gpu
def test_some_mutants_are_caught_and_their_twins_are_not() -> None:
    pytest.importorskip("cupy")
    pytest.importorskip("cupti")
    mutants = run.chosen(("null_stream", "item", "frozen_scalar", "padding_nan", "dies"))
    runs = run.run_zoo(mutants)
    assert [each.mutant.name for each in runs if each.faulty and not each.caught] == []
    assert [each.mutant.name for each in runs if not each.faulty and each.rules] == []
