"""The lint finds what a capture would not survive, and lets its clean twin pass."""

from __future__ import annotations

import random
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from cuverify.validators import CallableCase, validate_callable
from cuverify.validators.lint import lint
from torch._subclasses.fake_tensor import FakeTensorMode

import cuverify
from cuverify.cli import main
from cuverify.report import Report
from cuverify.sglang.backend import VerifyBackend
from cuverify.sglang.contract import FAMILIES
from cuverify.sglang.rig import Rig
from cuverify.sglang.schedule import Play, Shape


class Tensors(SimpleNamespace):
    """What the steps below work on."""

    def __init__(self) -> None:
        super().__init__(
            x=torch.randn(8), y=torch.zeros(8), n=torch.tensor(3), repeats=torch.tensor([1, 2])
        )
        self.own = torch.Generator()
        self.kept: torch.Tensor | None = None
        self.staging = torch.zeros(8)

    def refill(self, seed: int) -> None:
        self.x.copy_(torch.randn(8, generator=torch.Generator().manual_seed(seed + 1)))
        self.n.fill_(3 + seed % 2)


def lint_of(step: Callable[[Tensors], object], **more) -> Report:
    t = Tensors()
    inputs = {"x": t.x, "n": t.n}
    return lint(CallableCase(lambda: step(t), inputs, {"y": t.y}, refill=t.refill, **more))


def keep(t: Tensors) -> None:
    t.kept = t.x * 2
    t.y.copy_(t.kept)


def keep_a_view(t: Tensors) -> None:
    t.kept = (t.x * 2)[1:]


# name: (faulty step, rule, what its call is named by, clean twin)
KINDS = {
    "item": (lambda t: t.y.copy_(t.x * t.x.max().item()), "CV202", ".item()",
             lambda t: t.y.copy_(t.x * t.x.max())),
    "bool": (lambda t: t.y.fill_(1) if t.x[0] > 0 else t.y.fill_(2), "CV202", "bool()",
             lambda t: t.y.copy_(torch.where(t.x[0] > 0, 1.0, 2.0))),
    "int": (lambda t: t.y.fill_(int(t.n)), "CV202", "int()", lambda t: t.y.copy_(t.n.expand(8))),
    "float": (lambda t: t.y.fill_(float(t.n)), "CV202", "float()",
              lambda t: t.y.copy_(t.n.to(torch.float32).expand(8))),
    "range": (lambda t: [t.y.add_(1) for _ in range(t.n)], "CV202", "range",
              lambda t: t.y.add_(t.n)),
    "tolist": (lambda t: t.y.fill_(sum(t.x.tolist())), "CV202", ".tolist()",
               lambda t: t.y.copy_(t.x.sum().expand(8))),
    "cpu": (lambda t: t.y.copy_(t.x.cpu()), "CV202", ".cpu()", lambda t: t.y.copy_(t.x)),
    "to the host": (lambda t: t.y.copy_(t.x.to("cpu")), "CV202", ".to('cpu')",
                    lambda t: t.y.copy_(t.x.to(torch.float64))),
    "numpy": (lambda t: t.x.numpy().sum(), "CV202", ".numpy()", lambda t: t.x.sum()),
    "asarray": (lambda t: np.asarray(t.x), "CV202", "numpy.asarray()", lambda t: t.x.abs()),
    "print": (lambda t: str(t.x), "CV202", "printing", lambda t: str(t.x.shape)),
    "format": (lambda t: f"{t.x}", "CV202", "printing", lambda t: f"{t.x.dtype}"),
    "equal": (lambda t: torch.equal(t.x, t.y), "CV202", "torch.equal()",
              lambda t: t.y.copy_(torch.eq(t.x, t.y))),
    "allclose": (lambda t: torch.allclose(t.x, t.y), "CV202", "torch.allclose()",
                 lambda t: t.y.copy_(torch.isclose(t.x, t.y))),
    "in": (lambda t: 3.0 in t.x, "CV202", "`in`", lambda t: (t.x == 3.0).any()),
    "slice": (lambda t: t.y.copy_(t.x[: t.n].sum().expand(8)), "CV202", "__getitem__",
              lambda t: t.y.copy_(torch.where(torch.arange(8) < t.n, t.x, 0).sum().expand(8))),
    "nonzero": (lambda t: t.x.nonzero(), "CV202", "nonzero()", lambda t: (t.x != 0).sum()),
    "where": (lambda t: torch.where(t.x > 0), "CV202", "where()",
              lambda t: torch.where(t.x > 0, t.x, t.y)),
    "unique": (lambda t: torch.unique(t.x), "CV202", "unique()", lambda t: t.x.sort()),
    "masked_select": (lambda t: torch.masked_select(t.x, t.x > 0), "CV202", "masked_select()",
                      lambda t: t.x.masked_fill(t.x > 0, 0.0)),
    "boolean index": (lambda t: t.x[t.x > 0], "CV202", "boolean index",
                      lambda t: t.x[torch.arange(8)]),
    "boolean write": (lambda t: t.y.__setitem__(t.x > 0, t.x[t.x > 0]), "CV202",
                      "writing through a boolean index",
                      lambda t: t.y.__setitem__(t.x > 0, 1.0)),
    "boolean write of one": (lambda t: t.y.__setitem__(t.x > 0, t.x.max()), "CV202",
                             "writing through a boolean index",
                             lambda t: t.y.__setitem__(t.x > 0, 1.0)),
    "repeat": (lambda t: torch.repeat_interleave(t.x[:2], t.repeats), "CV202", "repeat_interleave",
               lambda t: torch.repeat_interleave(t.x[:2], t.repeats, output_size=3)),
    "bincount": (lambda t: torch.bincount(t.n.reshape(1)), "CV202", "bincount()",
                 lambda t: torch.zeros(9).index_add_(0, t.n.reshape(1), torch.ones(1))),
    "synchronize": (lambda t: torch.cuda.synchronize(), "CV202", "synchronize",
                    lambda t: torch.cuda.is_available()),
    "tensor of numbers": (lambda t: t.y.copy_(torch.tensor([1.0] * 8)), "CV214", "tensor",
                          lambda t: t.y.copy_(torch.ones(8))),
    "from_numpy": (lambda t: t.y.copy_(torch.from_numpy(np.ones(8, np.float32))), "CV214",
                   "from_numpy", lambda t: t.y.copy_(t.staging)),
    "cuda": (lambda t: t.y.copy_(t.staging.cuda()), "CV214", "to(device)",
             lambda t: t.y.copy_(t.staging)),
    "to a device": (lambda t: t.y.copy_(t.staging.to("cuda:0")), "CV214", "to(device)",
                    lambda t: t.y.copy_(t.staging.to(torch.float32))),
    "pinned": (lambda t: t.staging.pin_memory(), "CV208", "pin_memory", lambda t: t.staging.clone()),
    "generator": (lambda t: t.y.copy_(torch.rand(8, generator=t.own)), "CV305", "rand",
                  lambda t: t.y.copy_(torch.rand(8))),
    "empty_cache": (lambda t: torch.cuda.empty_cache(), "CV205", "empty_cache",
                    lambda t: torch.cuda.current_device),
    "capture branch": (lambda t: torch.cuda.is_current_stream_capturing(), "CV107",
                       "is_current_stream_capturing", lambda t: t.y.zero_()),
    "kept": (keep, "CV404", "aten.mul.Tensor", lambda t: t.y.copy_(t.x * 2)),
    "kept view": (keep_a_view, "CV404", "aten.mul.Tensor",
                  lambda t: t.y.copy_((t.x * 2)[:1].expand(8))),
    "python's random": (lambda t: t.y.fill_(random.random()), "CV301", "aten.fill_.Scalar",
                        lambda t: t.y.uniform_()),
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_each_kind_is_found_with_its_line_and_its_twin_passes(kind: str) -> None:
    faulty, rule, call, clean = KINDS[kind]
    found = [f for f in lint_of(faulty).findings if f.rule == rule]
    assert [f for f in found if call in f.evidence["call"]], found
    place = found[0].where
    assert place is not None
    assert "test_lint.py:" in place
    lines = __import__("inspect").getsourcelines(faulty)
    assert lines[1] <= int(place.rpartition(":")[2]) < lines[1] + len(lines[0])
    assert lint_of(clean).findings == []


def test_several_faults_come_in_one_report_each_once() -> None:
    def step(t: Tensors) -> None:
        for _ in range(3):
            t.y.fill_(t.x.sum().item())
        t.y.copy_(torch.tensor([2.0] * 8))
        t.x.nonzero()

    rules = [f.rule for f in lint_of(step).findings]
    assert sorted(rules) == ["CV202", "CV202", "CV214", "CV301"]


def test_a_host_count_of_operations_is_told() -> None:
    def step(t: Tensors) -> None:
        for _ in range(int(t.n)):
            t.y.add_(1)

    assert {f.rule for f in lint_of(step).findings} == {"CV202", "CV302"}


@pytest.mark.parametrize("more", [{}, {"vary": lambda n: None}])
def test_the_state_is_put_back_before_each_run(more: dict[str, Callable[[int], None]]) -> None:
    x, y, state = torch.randn(4), torch.zeros(4), torch.full((4,), 3.0)
    begun: list[float] = []

    def step() -> None:
        begun.append(float(state[0]))
        state.add_(x)
        y.copy_(state)

    lint(
        CallableCase(
            step, {"x": x}, {"y": y}, state={"state": state}, refill=lambda seed: None, **more
        )
    )
    assert begun[:3] == [3.0] * 3
    assert len(begun) == 4  # the last on fake tensors, which hold nothing


def test_a_frozen_number_of_a_launch_is_told() -> None:
    kernel = cuverify.load_kernel(
        """
        // @kernel set
        // @param y     write fp32 [8]
        // @param value value fp32
        extern "C" __global__ void set(float* y, float value) { y[threadIdx.x] = value; }
        """
    )
    state = {"value": 1.0}
    y = torch.zeros(8)
    case = CallableCase(
        lambda: kernel(1, 8, y, state["value"]), {}, {"y": y},
        vary=lambda n: state.update(value=1.0 + n),
    )  # fmt: skip
    report = lint(case)
    assert [(f.rule, f.evidence["call"]) for f in report.findings] == [("CV301", "set")]
    assert "test_lint.py:" in str(report.findings[0].where)


def test_without_another_run_the_frozen_numbers_are_not_inspected() -> None:
    x, y = torch.randn(4), torch.zeros(4)
    report = lint(CallableCase(lambda: y.copy_(x), {"x": x}, {"y": y}))
    assert report.ok
    status = {line.subject: line.status for line in report.coverage}
    assert status["frozen numbers"] == "not inspected"
    assert status["capture"] == "not inspected"
    assert "a lint" in report.coverage[0].detail


def test_a_scratch_that_is_made_once_is_no_finding() -> None:
    def step(t: Tensors) -> None:
        if t.kept is None:
            t.kept = torch.empty(8)
        torch.mul(t.x, 2, out=t.kept)
        t.y.copy_(t.kept)

    assert lint_of(step).findings == []


def test_allocations_are_told_and_are_no_findings() -> None:
    report = lint_of(lambda t: t.y.copy_(torch.zeros(8, 8) @ t.x))
    assert report.findings == []
    rows = {row[1]: row[2:] for row in report.tables[0].rows}
    assert rows["aten.zeros.default"] == [[8, 8], 256, 1]


def test_gradients_are_told() -> None:
    weight = torch.ones(8, requires_grad=True)
    found = lint_of(lambda t: t.x * weight).findings
    assert [(f.rule, f.severity) for f in found] == [("CV217", "warning")]
    with torch.no_grad():
        assert lint_of(lambda t: t.x * weight).findings == []


def test_a_fake_state_is_kept_as_well() -> None:
    mode = FakeTensorMode()
    with mode:
        y = torch.empty(8)

    def step() -> None:
        with mode:
            y.add_(1)

    assert lint(CallableCase(step, {}, {"y": y}, state={"y": y})).ok


@pytest.mark.parametrize(
    ("step", "rules"),
    [
        (lambda x, y: y.add_(x.sum().item()), {"CV202"}),
        (lambda x, y: y.add_(1) if x[0] > 0 else None, {"CV202"}),
        (lambda x, y: x.nonzero(), {"CV202"}),
        (lambda x, y: y.copy_(x * 2), set()),
    ],
)
def test_fake_tensors_will_do(step, rules) -> None:
    mode = FakeTensorMode()
    with mode:
        x, y = torch.empty(8), torch.empty(8)

    def inside() -> None:
        with mode:
            step(x, y)

    report = lint(CallableCase(inside, {"x": x}, {"y": y}))
    assert {f.rule for f in report.findings} == rules
    assert any(line.detail == "the step's own are fake" for line in report.coverage)


def test_copies_between_fake_devices_are_found() -> None:
    mode = FakeTensorMode()
    with mode:
        x, host = torch.empty(8, device="cuda"), torch.empty(8)

    def run(step: Callable[[], object]) -> set[str]:
        def inside() -> None:
            with mode:
                step()

        return {f.rule for f in lint(CallableCase(inside, {"x": x}, {"y": x})).findings}

    assert run(lambda: host.copy_(x)) == {"CV202"}
    # torch fills with one number of the host only
    assert run(lambda: x.__setitem__(x > 0, x.max())) == {"CV202"}
    assert run(lambda: torch.ops.aten.index_put_(x, [x > 0], x.max())) == {"CV202"}
    assert run(lambda: x.__setitem__(x > 0, 1.0)) == set()
    assert run(lambda: host.__setitem__(host > 0, host.max())) == set()
    assert run(lambda: host.to("cuda")) == {"CV214"}
    # beside tensors on a GPU, one on the host is the host's own
    assert run(lambda: host.sum().item()) == set()


def test_a_step_that_raises_is_a_finding_with_its_line() -> None:
    def step(t: Tensors) -> None:
        t.y.copy_(torch.zeros(5))

    found = lint_of(step).findings
    assert [f.rule for f in found] == ["CV902"]
    assert "test_lint.py:" in str(found[0].where)


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_a_step_that_wants_a_gpu_is_not_inspected_rather_than_wrong() -> None:
    report = lint_of(lambda t: torch.zeros(4, device="cuda"))
    assert report.findings == []
    rest = next(line for line in report.coverage if line.subject == "rest of the step")
    assert (rest.status, "wants CUDA" in rest.detail) == ("not inspected", True)


def test_nothing_global_stays_changed() -> None:
    before = torch.cuda.synchronize, torch.cuda.empty_cache, torch.from_numpy
    lint_of(lambda t: torch.cuda.synchronize())
    assert (torch.cuda.synchronize, torch.cuda.empty_cache, torch.from_numpy) == before
    assert torch.ones(1).item() == 1.0


@pytest.mark.skipif(torch.cuda.is_available(), reason="is about machines without CUDA")
def test_validation_without_a_gpu_is_a_lint_and_says_so() -> None:
    x, y = torch.randn(4), torch.zeros(4)
    report = validate_callable(
        lambda: y.copy_(x * x.max().item()), inputs={"x": x}, outputs={"y": y}
    )
    assert [f.rule for f in report.findings] == ["CV202"]
    line = next(line for line in report.coverage if line.subject == "capture")
    assert (line.status, line.detail) == ("not inspected", "no CUDA device")


def test_our_backend_of_sglang_is_clean() -> None:
    shape = Shape((2,), draft_tokens=3, max_context_len=20, latent=64, rope=16)
    for family in FAMILIES:
        rig = Rig(VerifyBackend, family, "cpu", shape)
        rig.prepare_capture(2)
        case = CallableCase(
            rig.step, {"q": rig.q}, {"out": rig.out},
            refill=lambda seed, rig=rig: rig.prepare_replay(Play(2, 2, seed)),
        )  # fmt: skip
        report = lint(case)
        assert report.findings == [], report.to_text()
        compared = [line for line in report.coverage if line.subject == "frozen numbers"]
        assert compared[0].status == "inspected"


def a_faulty_case() -> CallableCase:
    x, y = torch.randn(4), torch.zeros(4)
    return CallableCase(lambda: y.fill_(float(x[0])), {"x": x}, {"y": y}, name="fill")


def a_clean_case() -> CallableCase:
    x, y = torch.randn(4), torch.zeros(4)
    return CallableCase(lambda: y.copy_(x), {"x": x}, {"y": y}, name="copy")


def no_case() -> dict[str, int]:
    return {}


def test_the_command_lints_a_factory(capsys) -> None:
    assert main(["lint", f"{__file__}:a_clean_case"]) == 0
    assert main(["lint", f"{__file__}:a_faulty_case"]) == 1
    assert "CV202" in capsys.readouterr().out
    assert main(["lint", f"{__file__}:nobody"]) == 2


@pytest.mark.parametrize(
    ("reference", "kind"),
    [(f"{__file__}:no_case", "dict"), ("cuverify.cases.relocate:CASE", "RelocateCase")],
)
def test_the_command_refuses_what_is_no_bare_case(reference: str, kind: str, capsys) -> None:
    assert main(["lint", reference]) == 2
    assert f"{reference} gave {kind}, and no CallableCase" in capsys.readouterr().err
