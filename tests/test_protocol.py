"""The replays under changed circumstances, on a made-up GPU with tensors of the CPU."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cuverify.validators import CallableCase, trials
from cuverify.validators.capture import CaptureResult, capture_and_replay
from cuverify.validators.host_graph import HostGraph
from cuverify.validators.instruments import NoInstruments
from cuverify.validators.observations import GraphSeen, NodeSeen
from cuverify.validators.subject import CallableStep

from cuverify.sglang.backend import VerifyBackend
from cuverify.sglang.contract import FAMILIES, Family
from cuverify.sglang.schedule import Play, Shape
from cuverify.sglang.step import RunnerStep

sys.path.insert(0, str(Path(__file__).parent))
from made_up_gpu import Gpu, plug_in

N, REAL = 8, 5
# those that need nothing of a real device
HERE = ("inputs one at a time", "padding", "scratch", "writes beside the outputs")


class Tools(NoInstruments):
    on_device = True
    gaps = ()

    def walk(self, raw_graph: Any, landscape: Any) -> GraphSeen:
        return GraphSeen(
            tuple(NodeSeen("kernel", kernel, (1, 1, 1), (64, 1, 1)) for kernel, _ in raw_graph.work)
        )


class Sum:
    """`y = 2 x + b`, with what a test changes; work is recorded by the made-up GPU."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.x, self.b, self.y = torch.zeros(N), torch.zeros(N), torch.zeros(N)

    def refill(self, seed: int) -> None:
        for number, tensor in enumerate((self.x, self.b)):
            source = torch.Generator().manual_seed(10 * seed + number)
            tensor.copy_(torch.randint(-8, 9, (N,), generator=source).float())

    def reference(self) -> dict[str, Any]:
        return {"y": (2 * self.x + self.b).numpy().copy()}

    def launch(self, work: Callable[[], Any] | None = None) -> None:
        self.gpu.launch("sum", work or (lambda: self.y.copy_(2 * self.x + self.b)))

    def case(self, step: Callable[[], Any] | None = None, **changes: Any) -> CallableCase:
        fields: dict[str, Any] = {
            "inputs": {"x": self.x, "b": self.b},
            "outputs": {"y": self.y},
            "refill": self.refill,
            "reference": self.reference,
            **changes,
        }
        return CallableCase(step or self.launch, **fields)


def clean(s: Sum) -> CallableCase:
    return s.case(make_step=lambda: s.launch)


def without_a_reference(s: Sum) -> CallableCase:
    return s.case(reference=None)


def without_a_refill(s: Sum) -> CallableCase:
    return s.case(refill=None)


def with_state(s: Sum) -> CallableCase:
    """Adds to a state, which is put back before each run."""
    state = torch.ones(N)

    def work() -> None:
        state.add_(s.x)
        s.y.copy_(state)

    return s.case(
        lambda: s.launch(work),
        state={"state": state},
        reference=lambda: {"y": (1 + s.x).numpy().copy()},
    )


def in_a_larger_storage(s: Sum) -> CallableCase:
    s.y = torch.zeros(N + 4)[2 : N + 2]
    return s.case()


def padded(s: Sum) -> CallableCase:
    return s.case(padding={"x": slice(REAL, None), "y": slice(REAL, None)})


def input_left_out(s: Sum) -> CallableCase:
    copied: list[torch.Tensor] = []

    def step() -> None:
        copied or copied.append(s.b.clone())
        s.launch(lambda: s.y.copy_(2 * s.x + copied[0]))

    return s.case(step)


def counter(s: Sum) -> CallableCase:
    """Counts its runs; the refill starts anew, the step does not."""
    runs = torch.zeros(1)

    def refill(seed: int) -> None:
        s.refill(seed)
        runs.zero_()

    def work() -> None:
        s.y.copy_((2 * s.x + s.b) * (runs + 1))
        runs.add_(1)

    return s.case(lambda: s.launch(work), refill=refill)


def padding_read(s: Sum) -> CallableCase:
    def work() -> None:
        s.y.copy_(s.x * 2 + s.b)
        s.y[0] += s.x[REAL:].max() - s.x[REAL:].max().clamp(-100, 100)

    return s.case(lambda: s.launch(work), padding={"x": slice(REAL, None), "y": slice(REAL, None)})


def padding_nan(s: Sum) -> CallableCase:
    weight = torch.ones(N)
    weight[REAL:] = 0

    def work() -> None:
        s.y.copy_(s.x * 2 + s.b)
        s.y[0] += 0 * (s.x * weight).sum()

    return s.case(lambda: s.launch(work), padding={"x": slice(REAL, None), "y": slice(REAL, None)})


def scratch_read(s: Sum) -> CallableCase:
    scratch = torch.zeros(N)
    return s.case(
        lambda: s.launch(lambda: s.y.copy_(2 * s.x + s.b + scratch)), scratch={"held": scratch}
    )


def stale_tail(s: Sum) -> CallableCase:
    """Writes a shorter batch and leaves the tail of the longer one, which the step reads."""

    def refill(seed: int) -> None:
        count = N - 3 * (seed % 2)
        s.x[:count].copy_(torch.arange(count) + float(seed))
        s.b.fill_(seed)

    def reference() -> dict[str, Any]:
        return {"y": (s.x.numpy() * 0 + float(s.b[0]) + right["total"]).copy()}

    right = {"total": 0.0}

    def refill_and_know(seed: int) -> None:
        refill(seed)
        right["total"] = float(s.x[: N - 3 * (seed % 2)].sum())

    return s.case(
        lambda: s.launch(lambda: s.y.copy_(s.x.sum() + s.b)),
        refill=refill_and_know,
        reference=reference,
    )


def writes_behind(s: Sum) -> CallableCase:
    store = torch.zeros(N + 1)
    s.y = store[:N]

    def work() -> None:
        store[:N].copy_(2 * s.x + s.b)
        store[N] = 7

    return s.case(lambda: s.launch(work))


def writes_an_input(s: Sum) -> CallableCase:
    def work() -> None:
        s.y.copy_(2 * s.x + s.b)
        s.b.zero_()

    return s.case(lambda: s.launch(work))


def same_answer(s: Sum) -> CallableCase:
    return s.case(refill=lambda seed: s.refill(0))


def memoised(s: Sum) -> CallableCase:
    def make() -> Callable[[], None]:
        made: list[int] = []

        def step() -> None:
            made or s.gpu.launch("plan", lambda: None)
            made.append(1)
            s.launch()

        return step

    return s.case(make(), make_step=make)


def raises_in_the_capture(s: Sum) -> CallableCase:
    def step() -> None:
        s.launch()
        if s.gpu.capturing:
            raise LookupError("no plan")

    return s.case(step)


CLEAN = (clean, without_a_reference, without_a_refill, with_state, in_a_larger_storage, padded)
FAULTY: list[tuple[Callable[[Sum], CallableCase], set[str]]] = [
    (input_left_out, {"CV105", "CV601"}),
    (counter, {"CV604"}),
    (padding_read, {"CV501", "CV502"}),
    (padding_nan, {"CV502"}),
    (scratch_read, {"CV605"}),
    (stale_tail, {"CV505", "CV601"}),
    (writes_behind, {"CV506"}),
    (writes_an_input, {"CV506", "CV604"}),
    (same_answer, {"CV906"}),
    (memoised, {"CV304"}),
    (raises_in_the_capture, {"CV201"}),
]


def run(
    make: Callable[[Sum], CallableCase],
    monkeypatch: pytest.MonkeyPatch,
    inputs: Sequence[tuple[str, int]] | None = None,
    changes: int | None = None,
) -> CaptureResult:
    gpu = Gpu()
    plug_in(gpu, monkeypatch)
    kept = tuple(each for each in trials.DEVICE_TRIALS if each[0] in HERE)
    monkeypatch.setattr(trials, "DEVICE_TRIALS", kept)
    case = make(Sum(gpu))
    return capture_and_replay(
        CallableStep(case),
        inputs or [(f"seed {seed}", seed) for seed in case.seeds],
        changes=changes,
        tolerances=case.tolerance,
        only_recorded=False,
        instruments=Tools(),
    )


@pytest.mark.parametrize("make", CLEAN, ids=lambda make: make.__name__)
def test_a_right_step_has_no_findings(
    make: Callable[[Sum], CallableCase], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(make, monkeypatch)
    assert result.findings == []
    assert result.seen.faults == []
    assert result.seen.stages == ["eager", "capture", "replay"]
    names = {trial.name for trial in result.seen.trials}
    assert {"eager again", "against eager", "again", "stale", "stream", "restore"} <= names


@pytest.mark.parametrize(("make", "expected"), FAULTY, ids=[each[0].__name__ for each in FAULTY])
def test_a_disturbed_replay_shows_the_fault(
    make: Callable[[Sum], CallableCase], expected: set[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    result = run(make, monkeypatch)
    assert {finding.rule for finding in result.findings} == expected
    assert not [fault for fault in result.seen.faults if fault.stage == "observe"]


def test_an_input_alone_moves_what_the_reference_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    responses = {each.input: each for each in run(clean, monkeypatch).seen.responses}
    assert set(responses) == {"x", "b"}
    for each in responses.values():
        assert each.reference_moves == each.replay_moves > 0
        assert not each.ignored
    stale = [each for each in run(input_left_out, monkeypatch).seen.responses if each.ignored]
    assert {(each.input, each.how) for each in stale} == {("b", "alone"), ("b", "stale")}


@pytest.mark.parametrize("changes", [1, 2, None])
def test_trials_take_inputs_that_answer_otherwise(
    changes: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    inputs = [("first", 0), ("alike", 0), ("other", 2)]
    result = run(input_left_out, monkeypatch, inputs, changes)
    assert {finding.rule for finding in result.findings} == {"CV105", "CV601"}
    assert {each.input for each in result.seen.responses if each.ignored} == {"b"}


def test_without_a_reference_noise_is_not_taken_for_an_answer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = run(lambda s: s.case(reference=None, deterministic=False), monkeypatch).seen
    assert seen.responses == []
    gap = ("inputs one at a time", "declared nondeterministic, without a reference")
    assert gap in seen.gaps


def test_a_failed_capture_is_tried_again_and_leaves_no_graph(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    result = run(raises_in_the_capture, monkeypatch)
    seen = result.seen
    assert [each.name for each in seen.attempts[:3]] == [
        "capture",
        "retry thread_local",
        "retry relaxed",
    ]
    assert all(each.fault is not None for each in seen.attempts)
    assert len(seen.faults) == 1
    assert "LookupError: no plan" in seen.faults[0].error
    assert ("replays", "no capture succeeded, in any mode") in seen.gaps
    told = {line.subject: line.status for line in result.coverage}
    assert told["eager run"] == "inspected"
    assert told["capture"] == told["replay"] == "not inspected"


def test_memory_beside_the_outputs_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    stores = []

    def make(s: Sum) -> CallableCase:
        store = torch.full((N + 4,), 3.0)
        s.y = store[2 : N + 2]
        stores.append(store)
        return s.case()

    assert run(make, monkeypatch).findings == []
    np.testing.assert_array_equal(stores[0][[0, 1, -2, -1]].numpy(), 3.0)


@pytest.mark.parametrize("family", FAMILIES)
def test_a_backend_of_sglang_goes_through_the_whole_protocol(
    family: Family, monkeypatch: pytest.MonkeyPatch
) -> None:
    gpu = Gpu()
    plug_in(gpu, monkeypatch)
    kept = tuple(each for each in trials.DEVICE_TRIALS if each[0] in HERE)
    monkeypatch.setattr(trials, "DEVICE_TRIALS", kept)

    class Recorded(RunnerStep):
        def __call__(self) -> None:
            self.launched(super().__call__)

        def make_step(self) -> Callable[[], None]:
            fresh = super().make_step()
            return lambda: self.launched(fresh)

        def launched(self, step: Callable[[], None]) -> None:
            if gpu.recording is None:
                gpu.launch("attend", step)
                return
            graph = HostGraph()
            with graph.capture():
                step()
            gpu.launch("attend", graph.replay)

    shape = Shape((2,), draft_tokens=3, max_context_len=20, latent=64, rope=16)
    plays = [Play(2, 2, seed) for seed in range(3)]
    result = capture_and_replay(
        Recorded(VerifyBackend, family, shape, plays[0], device="cpu"),
        [(play.label, play) for play in plays],
        only_recorded=False,
        instruments=Tools(),
    )
    assert result.findings == []
    assert result.seen.faults == []
    assert {each.input for each in result.seen.responses} == {"q", "k"}
    assert {"fresh 0", "fresh 2"} <= {each.name for each in result.seen.attempts}
