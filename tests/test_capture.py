"""The capture validator: judging on made-up records everywhere, observing on a GPU."""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from cuverify.validators import capture, compare, graph_walk, instruments, rules
from cuverify.validators.capture import capture_and_replay
from cuverify.validators.child import run_child
from cuverify.validators.compare import HostArray, Mismatch, Tolerance, host_array
from cuverify.validators.coverage import coverage
from cuverify.validators.instruments import NoInstruments
from cuverify.validators.observations import (
    CallSeen,
    CaptureSeen,
    EndSeen,
    Fault,
    GraphSeen,
    LaunchSeen,
    NodeSeen,
    OutputSeen,
    RunSeen,
)
from cuverify.validators.runs import run_record

from cuverify import cases
from cuverify.errors import ArgumentError, CaseError, DeviceError

sys.path.insert(0, str(Path(__file__).parent))
from made_up_gpu import Gpu, plug_in

CASES = Path(__file__).with_name("check_cases.py")
CAPTURED, SIDE, OTHER = 0x7F10, 0x7F20, 0x7F30

# --- compare -------------------------------------------------------------------------------------


def mismatch(actual: Any, expected: Any, tolerance: Tolerance | None = None) -> Mismatch | None:
    return compare.compare("y", host_array(actual), np.asarray(expected), tolerance)


def test_equal_bits_are_no_mismatch() -> None:
    for values in ([1.5, np.nan, -np.inf], [], 2.0):
        assert mismatch(np.array(values), np.array(values)) is None


def test_a_mismatch_names_the_first_element_and_counts_the_rest() -> None:
    actual = np.array([[1, 2, 3], [4, 9, 8]], np.int32)
    found = mismatch(actual, np.array([[1, 2, 3], [4, 5, 6]], np.int32))
    assert found is not None
    assert (found.index, found.actual, found.expected) == ((1, 1), 9, 5)
    assert (found.count, found.total, found.largest) == (2, 6, 4.0)
    assert str(found).startswith("y[1, 1] is 9, expected 5; 2 of 6 elements differ")


def test_nan_and_infinity_are_counted_apart() -> None:
    found = mismatch(np.array([np.nan, np.inf, 3, np.nan]), np.array([1, 2, 4, np.nan]))
    assert found is not None
    assert (found.count, found.nans, found.infs, found.largest) == (3, 1, 1, 1.0)
    assert "1 of them NaN" in str(found)
    assert "1 of them infinite" in str(found)


def test_zeros_of_both_signs_differ_in_bits_only() -> None:
    found = mismatch(np.float32([-0.0]), np.float32([0.0]))
    assert found is not None
    assert (found.actual, found.expected) == ("-0.0 (0x80000000)", "0.0 (0x00000000)")
    assert mismatch(np.float32([-0.0]), np.float32([0.0]), Tolerance()) is None


@pytest.mark.parametrize(
    ("actual", "expected", "close"),
    [
        ([1.0], [1.001], True),
        ([1.0], [1.2], False),
        ([np.nan], [np.nan], True),
        ([np.nan], [1.0], False),
        ([1.0], [np.nan], False),
        ([np.inf], [np.inf], True),
        ([-np.inf], [np.inf], False),
        ([3e38], [np.inf], False),
    ],
)
def test_a_tolerance(actual: list[float], expected: list[float], close: bool) -> None:
    found = mismatch(np.array(actual), np.array(expected), Tolerance(rtol=1e-2, atol=1e-3))
    assert (found is None) is close


def test_a_float64_oracle_is_compared_by_value() -> None:
    assert mismatch(np.float32([0.5, np.nan]), np.float64([0.5, np.nan])) is None
    assert mismatch(np.float32([0.1]), np.float64([0.1])) is not None
    assert mismatch(np.float32([0.1]), np.float64([0.1]), Tolerance(rtol=1e-6)) is None


def test_bf16_is_bits_or_values_as_the_oracle_has_it() -> None:
    import torch

    tensor = torch.tensor([1.0, -2.5, float("nan")], dtype=torch.bfloat16)
    bits = np.array([0x3F80, 0xC020, 0x7FC0], np.uint16)
    assert host_array(tensor).dtype == "bf16"
    assert mismatch(tensor, bits) is None
    assert mismatch(bits, bits) is None
    assert mismatch(tensor, np.float64([1.0, -2.5, np.nan])) is None
    assert mismatch(bits, np.float32([1.0, -2.5, np.nan]), Tolerance(rtol=1e-3)) is None
    found = mismatch(tensor, bits + np.array([1, 0, 0], np.uint16))
    assert found is not None
    assert (found.actual, found.expected) == (1.0, 1.0078125)


def test_fp8_values_agree_with_torch() -> None:
    import torch

    every = torch.arange(256, dtype=torch.int16).to(torch.uint8)
    for dtype in (torch.float8_e4m3fn, torch.float8_e5m2):
        tensor = every.view(dtype)
        np.testing.assert_array_equal(host_array(tensor).values(), tensor.float().numpy())


def test_a_copy_does_not_follow_its_tensor() -> None:
    import torch

    for tensor in (np.zeros(3, np.float32), torch.zeros(3), torch.zeros(3, dtype=torch.bfloat16)):
        copy = host_array(tensor)
        tensor[:] = 1
        assert not copy.data.any()
    strided = torch.arange(12).reshape(3, 4)[:, 1::2]
    np.testing.assert_array_equal(host_array(strided).data, strided.numpy())
    with pytest.raises(TypeError, match="cannot copy a list"):
        host_array([1, 2])


def test_shapes_and_names_must_agree() -> None:
    found = mismatch(np.zeros(3), np.zeros((3, 1)))
    assert found is not None
    assert "shape [3], the reference [3, 1]" in str(found)
    both = compare.compare_all({"a": host_array(np.zeros(1))}, {"b": np.zeros(1)})
    assert [str(entry) for entry in both] == [
        "a: has no reference: expected() does not return it",
        "b: is in expected() but no output of the step",
    ]


# --- rules on made-up records --------------------------------------------------------------------


def launch(kernel: str = "move", stream: int = CAPTURED) -> LaunchSeen:
    return LaunchSeen(kernel, stream, (1, 1, 1), (64, 1, 1))


def node(kernel: str = "move", **changes: Any) -> NodeSeen:
    return NodeSeen("kernel", kernel, (1, 1, 1), (64, 1, 1), **changes)


def wrote(label: str = "first", **changes: Any) -> RunSeen:
    return RunSeen(label, (OutputSeen("y", **{"must_change": 8, **changes}),))


def clean() -> CaptureSeen:
    """Return the record of a step that launches two kernels, one of them on a forked stream."""
    return CaptureSeen(
        capture_stream=CAPTURED,
        capturing_streams=frozenset({CAPTURED, SIDE}),
        launches=(launch("check"), launch("move"), launch("move", SIDE)),
        # the order of the nodes is the driver's own
        graph=GraphSeen((node("move"), node("check"), node("move"), NodeSeen("empty"))),
        eager=wrote(),
        replays=[wrote(), wrote("second"), wrote()],
        stages=["eager", "capture", "replay"],
    )


def found(seen: CaptureSeen) -> list[str]:
    return [finding.rule for finding in rules.judge(seen)]


WRONG = Mismatch("y", count=8, total=8, actual=1.0, expected=2.0)
NOT_WALKED = GraphSeen(not_inspected="cuda-bindings not installed")

# what makes a clean record faulty, and the rules that must say so
FAULTS: list[tuple[str, Callable[[CaptureSeen], Any], list[str]]] = [
    ("nothing", lambda seen: None, []),
    (
        "one of two launches of a kernel on the null stream",
        lambda seen: vars(seen).update(
            launches=(launch("check"), launch("move"), launch("move", 0)),
            graph=GraphSeen((node("check"), node("move"))),
        ),
        ["CV101"],
    ),
    (
        "a launch on a cached stream",
        lambda seen: vars(seen).update(
            launches=(launch("check", OTHER), launch("move"), launch("move")),
            graph=GraphSeen((node("move"), node("move"))),
        ),
        ["CV101"],
    ),
    (
        "the only launch on the null stream",
        lambda seen: vars(seen).update(launches=(launch("move", 0),), graph=GraphSeen()),
        ["CV101"],
    ),
    (
        "a launch that the graph holds under another name",
        lambda seen: vars(seen).update(
            graph=GraphSeen((node("move"), node("other"), node("move")))
        ),
        ["CV101", "CV102"],
    ),
    (
        "a null-stream launch, and no graph walk",
        lambda seen: vars(seen).update(
            launches=(launch("check"), launch("move", 0)), graph=NOT_WALKED
        ),
        ["CV101"],
    ),
    ("no graph walk", lambda seen: vars(seen).update(graph=NOT_WALKED), []),
    (
        "a conditional body that hides a kernel",
        lambda seen: vars(seen).update(
            graph=GraphSeen((node("move"), node("check")), unseen_bodies=("2",))
        ),
        [],
    ),
    (
        "a kernel in a child graph",
        lambda seen: vars(seen).update(
            graph=GraphSeen((node("move"), NodeSeen("graph"), node("check"), node(body="1")))
        ),
        [],
    ),
    (
        "an empty graph",
        lambda seen: vars(seen).update(launches=(), graph=GraphSeen((NodeSeen("empty"),))),
        ["CV102"],
    ),
    (
        "an empty graph that only torch saw",
        lambda seen: vars(seen).update(
            launches=(), graph=NOT_WALKED, warnings=("The CUDA Graph is empty. This usually means",)
        ),
        ["CV102"],
    ),
    (
        "a step of copies alone",
        lambda seen: vars(seen).update(launches=(), graph=GraphSeen((NodeSeen("memcpy"),))),
        [],
    ),
    (
        "a node that nobody recorded",
        lambda seen: vars(seen).update(graph=GraphSeen((*seen.graph.nodes, node("fill")))),
        ["CV102"],
    ),
    (
        "a failed capture",
        lambda seen: vars(seen).update(
            faults=[Fault("capture", "RuntimeError: operation not permitted", "step.py:3")],
            replays=[],
            stages=["eager"],
        ),
        ["CV201"],
    ),
    (
        "a wrong replay",
        lambda seen: seen.replays.append(wrote("third", mismatch=WRONG)),
        ["CV601"],
    ),
    (
        "a half-written wrong replay",
        lambda seen: seen.replays.append(wrote("third", mismatch=WRONG, unchanged=4)),
        ["CV601"],
    ),
    (
        "an output of another shape",
        lambda seen: seen.replays.append(wrote(mismatch=Mismatch("y", reason="has shape"))),
        ["CV601"],
    ),
    (
        "an output that a replay leaves as it was",
        lambda seen: seen.replays.append(wrote("third", mismatch=WRONG, unchanged=8)),
        ["CV602"],
    ),
    (
        "an unwritten output and a wrong one",
        lambda seen: seen.replays.append(
            RunSeen(
                "third",
                (
                    OutputSeen("y", WRONG, must_change=8, unchanged=8),
                    OutputSeen("z", WRONG, must_change=8, unchanged=0),
                ),
            )
        ),
        ["CV601", "CV602"],
    ),
    (
        "a wrong eager run",
        lambda seen: vars(seen).update(eager=wrote(mismatch=WRONG)),
        ["CV603"],
    ),
    (
        "outputs that were right before each replay",
        lambda seen: vars(seen).update(replays=[wrote(must_change=0), wrote(must_change=0)]),
        ["CV906"],
    ),
    (
        "inputs that move nothing, among others",
        lambda seen: seen.replays.append(wrote(must_change=0)),
        [],
    ),
    (
        "a refill that raises",
        lambda seen: seen.faults.append(Fault("refill", "KeyError: 'x'", "case.py:7")),
        ["CV901"],
    ),
    (
        "a step that raises",
        lambda seen: seen.faults.append(Fault("step", "LaunchError: block=0", "case.py:9")),
        ["CV902"],
    ),
    (
        "a lost context, whoever noticed it",
        lambda seen: seen.faults.append(
            Fault("capture", "RuntimeError: an illegal memory access", context_lost=True)
        ),
        ["CV903"],
    ),
    (
        "a child that hangs",
        lambda seen: vars(seen).update(end=EndSeen("timeout", "ended by SIGKILL", "first", 20)),
        ["CV904"],
    ),
    (
        "a child that dies",
        lambda seen: vars(seen).update(end=EndSeen("died", "ended by SIGSEGV", "first")),
        ["CV905"],
    ),
]


@pytest.mark.parametrize(
    ("break_it", "expected"), [entry[1:] for entry in FAULTS], ids=[entry[0] for entry in FAULTS]
)
def test_a_record_is_judged_by_the_named_rules(
    break_it: Callable[[CaptureSeen], Any], expected: list[str]
) -> None:
    seen = clean()
    break_it(seen)
    assert found(seen) == expected


def test_no_rule_raises_on_an_empty_record() -> None:
    assert found(CaptureSeen()) == []


def test_a_null_stream_launch_is_told_so_that_it_can_be_mended() -> None:
    seen = clean()
    seen.launches = (launch("check"), dataclasses.replace(launch("move", 0), where="x.cu:7"))
    seen.graph = GraphSeen((node("check"),))
    (finding,) = rules.judge(seen)
    assert "`move` ran once during the capture and is not in the graph" in finding.message
    assert "stream 0x0 (the legacy default stream) while stream 0x7f10 is captured" in (
        finding.message
    )
    assert finding.where == "x.cu:7"
    assert finding.evidence["graph_nodes"] == ["check"]
    assert finding.fix is not None
    assert "current_stream" in finding.fix
    json.dumps(finding.evidence)


def test_the_launch_outside_the_capture_is_blamed_first() -> None:
    seen = clean()
    seen.launches = (launch("move"), launch("move", OTHER))
    seen.graph = GraphSeen((node("move"),))
    (finding,) = rules.judge(seen)
    assert finding.evidence["recorded_stream"] == "0x7f30"


def test_a_long_graph_is_not_listed_whole() -> None:
    seen = clean()
    seen.graph = GraphSeen((*seen.graph.nodes, *(node("fill") for _ in range(50))))
    (finding,) = rules.judge(seen)
    assert finding.evidence["graph_nodes"][-1] == "... and 42 more"


def test_an_undeclared_node_is_a_warning_where_other_launchers_are_declared() -> None:
    seen = clean()
    seen.graph = GraphSeen((*seen.graph.nodes, node("fill")))
    seen.only_recorded = False
    (finding,) = rules.judge(seen)
    assert (finding.rule, finding.severity) == ("CV102", "warning")


def test_one_output_is_reported_once_and_points_at_the_eager_run() -> None:
    seen = clean()
    seen.eager = wrote(mismatch=WRONG)
    seen.replays = [wrote(mismatch=WRONG), wrote("second", mismatch=WRONG)]
    wrong_replay, wrong_eager = rules.judge(seen)
    assert (wrong_replay.rule, wrong_eager.rule) == ("CV601", "CV603")
    assert wrong_replay.evidence["replays_wrong"] == 2
    assert wrong_replay.fix is not None
    assert "eager run is wrong too" in wrong_replay.fix


# --- records from arrays -------------------------------------------------------------------------


def arrays(**values: Any) -> dict[str, HostArray]:
    return {name: host_array(np.asarray(value, np.float32)) for name, value in values.items()}


def output_of(before: Any, after: Any, expected: Any) -> OutputSeen:
    want = {"y": np.asarray(expected, np.float32)}
    return run_record("first", arrays(y=before), arrays(y=after), want, None).outputs[0]


def test_a_written_output() -> None:
    seen = output_of([np.nan, np.nan], [1, 2], [1, 2])
    assert (seen.mismatch, seen.must_change, seen.unchanged) == (None, 2, 0)


def test_poison_that_is_still_there() -> None:
    seen = output_of([np.nan, np.nan], [1, np.nan], [1, 2])
    assert seen.mismatch is not None
    assert (seen.must_change, seen.unchanged, seen.mismatch.count) == (2, 1, 1)


def test_an_in_place_step_that_did_nothing() -> None:
    seen = output_of([5, 6, 7], [5, 6, 7], [5, 7, 6])
    assert (seen.must_change, seen.unchanged) == (2, 2)


def test_a_wrong_value_is_not_an_unwritten_one() -> None:
    seen = output_of([5, 6], [5, 9], [5, 7])
    assert seen.mismatch is not None
    assert (seen.must_change, seen.unchanged) == (1, 0)


def test_outputs_and_references_must_have_one_set_of_names() -> None:
    run = run_record("first", arrays(y=[0]), arrays(y=[0]), {"z": np.zeros(1)}, None)
    assert [output.name for output in run.outputs] == ["y", "z"]
    assert all(output.mismatch is not None for output in run.outputs)


# --- coverage ------------------------------------------------------------------------------------


def lines(seen: CaptureSeen) -> dict[str, str]:
    return {line.subject: f"{line.status}, {line.detail}" for line in coverage(seen)}


def test_coverage_of_a_whole_run() -> None:
    assert lines(clean()) == {
        "eager run": "inspected, compared with the reference",
        "capture": "inspected, 3 launches recorded",
        "graph nodes": "inspected, 4 nodes, 3 of them kernels",
        "replay": "inspected, 3 replays on 2 inputs, outputs poisoned before each",
    }


def test_launches_of_every_library_are_counted() -> None:
    seen = clean()
    call = CallSeen("cuLaunchKernel", "launch", seen.replayed, kernel="gemm")
    seen.calls = (call,) * 5
    assert lines(seen)["capture"] == "inspected, 5 launches recorded"


def test_coverage_says_what_was_left_out() -> None:
    seen = clean()
    seen.graph = NOT_WALKED
    seen.replays = [wrote()]
    seen.skipped = ("second",)
    told = lines(seen)
    assert told["graph nodes"] == (
        "not inspected, cuda-bindings not installed; launches were compared by stream"
    )
    assert told["replay on changed inputs"] == (
        "not inspected, none of 1 other inputs fits the step's buffers"
    )
    told = lines(CaptureSeen(faults=[Fault("step", "RuntimeError: no")]))
    assert set(told.values()) == {"not inspected, step failed before"}


# --- graph walk on a made-up driver --------------------------------------------------------------


class Handle(int):
    def __new__(cls, init_value: int = 0) -> Handle:
        return super().__new__(cls, init_value)


class Driver:
    """Answers like `cuda.bindings.driver` for graphs given as lists of nodes."""

    CUgraph = Handle

    def __init__(self, graphs: dict[int, list[Any]], code: Any = 0) -> None:
        self.graphs = graphs
        self.code = code

    def cuGraphGetNodes(self, graph: int, count: int = 0) -> tuple[Any, ...]:  # noqa: N802
        nodes = self.graphs[int(graph)]
        return self.code, nodes[:count], len(nodes)

    def cuGraphNodeGetType(self, entry: Any) -> tuple[Any, ...]:  # noqa: N802
        return 0, SimpleNamespace(name=f"CU_GRAPH_NODE_TYPE_{entry.kind}")

    def cuGraphKernelNodeGetParams(self, entry: Any) -> tuple[Any, ...]:  # noqa: N802
        sizes = {f"{what}Dim{axis}": 1 for what in ("grid", "block") for axis in "XYZ"}
        sizes |= {"gridDimX": 4, "blockDimX": 64, "sharedMemBytes": 128}
        handles = {"func": Handle(0), "kern": Handle(0), **entry.handles}
        return 0, SimpleNamespace(**sizes, **handles)

    def cuFuncGetName(self, handle: int) -> tuple[Any, ...]:  # noqa: N802
        return 0, f"function_{int(handle)}".encode()

    def cuKernelGetName(self, handle: int) -> tuple[Any, ...]:  # noqa: N802
        return 0, f"kernel_{int(handle)}".encode()

    def cuGraphChildGraphNodeGetGraph(self, entry: Any) -> tuple[Any, ...]:  # noqa: N802
        return 0, entry.graph


def entry(kind: str, graph: int = 0, **handles: int) -> SimpleNamespace:
    return SimpleNamespace(
        kind=kind, graph=graph, handles={key: Handle(value) for key, value in handles.items()}
    )


def test_a_walk_reads_kernels_and_goes_into_child_graphs() -> None:
    driver = Driver(
        {
            1: [entry("KERNEL", func=7), entry("GRAPH", graph=2), entry("MEMSET")],
            2: [entry("CONDITIONAL"), entry("KERNEL", kern=8)],
        }
    )
    seen = graph_walk.walk(1, driver)
    assert seen.not_inspected is None
    assert [(each.kind, each.kernel, each.body) for each in seen.nodes] == [
        ("kernel", "function_7", ""),
        ("graph", None, ""),
        ("conditional", None, "1"),
        ("kernel", "kernel_8", "1"),
        ("memset", None, ""),
    ]
    assert (seen.nodes[0].grid, seen.nodes[0].block, seen.nodes[0].shared) == (
        (4, 1, 1),
        (64, 1, 1),
        128,
    )
    assert seen.unseen_bodies == ("1.0",)


def test_a_kernel_without_a_name_does_not_spoil_the_walk() -> None:
    driver = Driver({1: [entry("KERNEL"), entry("KERNEL", func=7)]})
    assert [each.kernel for each in graph_walk.walk(1, driver).nodes] == [None, "function_7"]


def test_the_public_names_are_loaded_on_first_use() -> None:
    script = (
        "import sys, cuverify.validators as v; assert not {'numpy', 'torch'} & {*sys.modules};"
        "assert v.capture_and_replay and v.Tolerance; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True)


def test_an_empty_graph_is_walked_too() -> None:
    assert graph_walk.walk(1, Driver({1: []})) == GraphSeen()


def test_a_driver_that_refuses_is_said() -> None:
    class Code(int):
        name = "CUDA_ERROR_INVALID_VALUE"

    seen = graph_walk.walk(1, Driver({1: []}, code=Code(1)))
    assert seen.not_inspected is not None
    assert "CUDA_ERROR_INVALID_VALUE" in seen.not_inspected
    broken = graph_walk.walk(1, SimpleNamespace())
    assert broken.not_inspected is not None
    assert broken.not_inspected.startswith("cuda-bindings failed: AttributeError")


# --- the protocol, on a made-up GPU --------------------------------------------------------------


class PlusOne:
    """`y = x + 1` on the made-up GPU; subclasses are wrong in one way."""

    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.x, self.y = np.zeros(4), np.zeros(4)
        self.outputs = {"y": self.y}

    def refill(self, batch: Any) -> None:
        if np.shape(batch) != self.x.shape:
            raise CaseError(f"{batch!r} does not fit")
        self.x[:] = batch

    def poison(self) -> None:
        self.y[:] = np.nan

    def expected(self) -> dict[str, Any]:
        return {"y": self.x + 1}

    def add(self) -> None:
        np.add(self.x, 1, out=self.y)

    def __call__(self) -> None:
        self.gpu.launch("add", self.add)


class OnNullStream(PlusOne):
    def __call__(self) -> None:
        with self.gpu.stream(self.gpu.null):
            self.gpu.launch("add", self.add)


class OnCachedStream(PlusOne):
    def __init__(self, gpu: Gpu) -> None:
        super().__init__(gpu)
        self.cached = gpu.Stream()

    def __call__(self) -> None:
        with self.gpu.stream(self.cached):
            self.gpu.launch("add", self.add)


class OnForkedStream(PlusOne):
    def __call__(self) -> None:
        side = self.gpu.Stream()
        side.wait_stream(self.gpu.current_stream())
        with self.gpu.stream(side):
            self.gpu.launch("add", self.add)


class OnlyEager(PlusOne):
    def __call__(self) -> None:
        if not self.gpu.capturing:
            self.gpu.launch("add", self.add)


class FrozenScalar(PlusOne):
    def __call__(self) -> None:
        first = self.x[0]
        self.gpu.launch("add", lambda: np.add(self.x, 1 + self.x[0] - first, out=self.y))


class KeepsState(PlusOne):
    calls = 0

    def add(self) -> None:
        self.calls += 1
        np.add(self.x, 1 if self.calls < 7 else 2, out=self.y)


class ReadsBack(PlusOne):
    def __call__(self) -> None:
        super().__call__()
        self.gpu.synchronize()


class LosesContext(PlusOne):
    def __call__(self) -> None:
        super().__call__()
        self.gpu.lost = True


class NoPoison(PlusOne):
    def poison(self) -> None:
        self.add()


class BrokenOracle(PlusOne):
    def expected(self) -> dict[str, Any]:
        return {"y": self.x / self.no_such_thing}  # type: ignore[attr-defined]


INPUTS = [("first", [1.0] * 4), ("second", [2, 3, 4, 5]), ("long", [1] * 9), ("third", [6.0] * 4)]


def on_made_up_gpu(
    kind: type[PlusOne],
    monkeypatch: pytest.MonkeyPatch,
    *,
    walked: bool = True,
    inputs: Sequence[tuple[str, Any]] | None = None,
    **options: Any,
) -> capture.CaptureResult:
    gpu = Gpu()
    plug_in(gpu, monkeypatch)

    class Walks(NoInstruments):
        def walk(self, raw_graph: Any, landscape: Any) -> GraphSeen:
            if not walked:
                return NOT_WALKED
            return GraphSeen(tuple(node(kernel) for kernel, _ in raw_graph.work))

    result = capture_and_replay(kind(gpu), inputs or INPUTS, instruments=Walks(), **options)
    assert gpu.current is gpu.null
    assert gc.isenabled()
    return result


@pytest.mark.parametrize("walked", [True, False])
@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        (PlusOne, set()),
        (OnForkedStream, set()),
        (OnNullStream, {"CV101", "CV204", "CV602"}),
        (OnCachedStream, {"CV101", "CV602"}),
        (OnlyEager, {"CV102", "CV602"}),
        (FrozenScalar, {"CV601"}),
        (KeepsState, {"CV505", "CV601"}),
        (ReadsBack, {"CV201"}),
        (LosesContext, {"CV903"}),
        (NoPoison, {"CV906"}),
        (BrokenOracle, {"CV901"}),
    ],
)
def test_the_protocol_shows_each_fault(
    kind: type[PlusOne], expected: set[str], walked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert rule_names(on_made_up_gpu(kind, monkeypatch, walked=walked)) == expected


def test_the_protocol_replays_on_all_inputs_that_fit_and_on_the_first_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen = on_made_up_gpu(PlusOne, monkeypatch).seen
    behind = ["second", "first"]  # each once more, behind others
    assert [run.label for run in seen.replays] == ["first", "second", "third", *behind]
    assert seen.skipped == ("long",)
    assert len(seen.launches) == 1
    assert seen.stages == ["eager", "capture", "replay"]
    seen = on_made_up_gpu(PlusOne, monkeypatch, changes=1).seen
    assert [run.label for run in seen.replays] == ["first", "second", "first"]


def test_inputs_that_answer_alike_are_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two requests' batches may differ in what no output shows, such as free slots."""
    alike = [(f"alike {number}", np.ones(4)) for number in range(3)]
    others = [("other", np.zeros(4)), ("left out", np.full(4, 2.0))]
    result = on_made_up_gpu(PlusOne, monkeypatch, inputs=[*alike, *others], changes=1)
    assert result.findings == []
    replayed = [run.label for run in result.seen.replays]
    assert replayed == ["alike 0", "alike 1", "alike 2", "other", "alike 1", "alike 0"]
    result = on_made_up_gpu(PlusOne, monkeypatch, inputs=alike, changes=1)
    assert rule_names(result) == {"CV906"}


def test_a_fault_is_shown_where_it_stands(monkeypatch: pytest.MonkeyPatch) -> None:
    (finding,) = on_made_up_gpu(BrokenOracle, monkeypatch).findings
    assert str(finding.where).startswith("tests/test_capture.py:")
    assert "AttributeError" in finding.message
    (finding,) = on_made_up_gpu(ReadsBack, monkeypatch).findings
    assert "operation not permitted when stream is capturing" in finding.message
    assert str(finding.where).startswith("tests/made_up_gpu.py:")
    (finding,) = on_made_up_gpu(LosesContext, monkeypatch).findings
    assert "an illegal memory access was encountered" in finding.message


# --- child processes -----------------------------------------------------------------------------

TASKS = """
import os, signal, subprocess, sys, time

def talks(work, emit):
    print("noise on standard output")
    print("noise on standard error", file=sys.stderr)
    for number in range(work["events"]):
        emit({"number": number})

def raises(work, emit):
    emit({"number": 0})
    raise LookupError("nothing here")

def exits(work, emit):
    print("last words")
    sys.stdout.flush()
    os._exit(3)

def crashes(work, emit):
    os.kill(os.getpid(), signal.SIGSEGV)

def hangs(work, emit):
    child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    emit({"pids": [os.getpid(), child.pid]})
    time.sleep(600)

def works_long(work, emit):
    for number in range(6):
        time.sleep(0.25)
        emit({"number": number})
"""


@pytest.fixture
def tasks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "child_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    return "child_tasks"


def gone(pid: int) -> bool:
    """Tell whether a process has ended; a zombie of another parent counts as ended."""
    deadline = time.monotonic() + 10
    while time.monotonic() < deadline:
        try:
            state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return True
        if state == "Z":
            return True
        time.sleep(0.02)
    return False


def test_a_child_sends_events_and_its_noise_is_kept_apart(tasks: str) -> None:
    heard: list[Any] = []
    outcome = run_child(f"{tasks}:talks", {"events": 3}, silence_s=30, on_event=heard.append)
    assert outcome.status == "done"
    assert [event["number"] for event in outcome.events] == [0, 1, 2]
    assert heard == list(outcome.events)
    assert "noise on standard output" in outcome.log
    assert "noise on standard error" in outcome.log


def test_a_child_that_raises(tasks: str) -> None:
    outcome = run_child(f"{tasks}:raises", {}, silence_s=30)
    assert (outcome.status, outcome.kind) == ("raised", "LookupError")
    assert outcome.error == "LookupError: nothing here"
    assert "in raises" in outcome.trace
    assert len(outcome.events) == 1
    missing = run_child(f"{tasks}:no_such", {}, silence_s=30)
    assert (missing.status, missing.kind) == ("raised", "AttributeError")


def test_a_child_that_dies(tasks: str) -> None:
    outcome = run_child(f"{tasks}:exits", {}, silence_s=30)
    assert (outcome.status, outcome.ending) == ("died", "ended with status 3")
    assert "last words" in outcome.log
    outcome = run_child(f"{tasks}:crashes", {}, silence_s=30)
    assert (outcome.status, outcome.ending) == ("died", "ended by SIGSEGV")


def test_a_silent_child_is_stopped_with_its_own_children(tasks: str) -> None:
    outcome = run_child(f"{tasks}:hangs", {}, silence_s=1.5)
    assert (outcome.status, outcome.ending) == ("timeout", "ended by SIGKILL")
    assert all(gone(pid) for pid in outcome.events[0]["pids"])
    assert "in hangs" in outcome.log  # where it stood


def test_the_limit_is_on_silence_and_not_on_work(tasks: str) -> None:
    outcome = run_child(f"{tasks}:works_long", {}, silence_s=1.2)
    assert outcome.status == "done"
    assert outcome.seconds > 1.2


def test_an_interrupt_in_the_parent_ends_the_child(tasks: str, tmp_path: Path) -> None:
    pids: list[int] = []

    def interrupted(event: Any) -> None:
        pids.extend(event["pids"])
        raise KeyboardInterrupt

    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(KeyboardInterrupt):
        run_child(f"{tasks}:hangs", {}, silence_s=30, on_event=interrupted)
    assert len(pids) == 2
    assert all(gone(pid) for pid in pids)
    assert [path for path in sorted(tmp_path.rglob("*")) if "__pycache__" not in str(path)] == [
        path for path in before if "__pycache__" not in str(path)
    ]


def test_a_child_outlives_no_parent(tasks: str, tmp_path: Path) -> None:
    script = (
        "import sys\n"
        f"sys.path.insert(0, {str(tmp_path)!r})\n"
        "from cuverify.validators.child import run_child\n"
        f"run_child({f'{tasks}:hangs'!r}, {{}}, silence_s=60,"
        " on_event=lambda event: print(*event['pids'], flush=True))\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child, grandchild = map(int, parent.stdout.readline().split())
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    try:
        assert gone(child)
    finally:
        os.kill(grandchild, signal.SIGKILL)


def test_a_limit_of_nothing_is_refused(tasks: str) -> None:
    with pytest.raises(ArgumentError, match="silence_s=0"):
        run_child(f"{tasks}:talks", {}, silence_s=0)


# --- the whole, on a GPU -------------------------------------------------------------------------


def test_without_a_gpu_a_capture_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(DeviceError, match="needs a CUDA device"):
        capture_and_replay(SimpleNamespace(), [("first", None)])  # type: ignore[arg-type]


def test_inputs_and_a_warm_up_are_needed() -> None:
    with pytest.raises(ArgumentError, match="inputs="):
        capture_and_replay(SimpleNamespace(), [])  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match="warmups=0"):
        capture_and_replay(SimpleNamespace(), [("first", None)], warmups=0)  # type: ignore[arg-type]


def validated(name: str, **options: Any) -> capture.CaptureResult:
    case = cases.load(f"{CASES}:{name}")
    batches = cases.draw(case.device_batches, seed=1, examples=3)
    step = case.step(batches[0][1], "torch-cuda")
    return capture_and_replay(step, batches, **options)


def rule_names(result: capture.CaptureResult) -> set[str]:
    return {finding.rule for finding in result.findings}


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["CLEAN", "FORKED"])
def test_a_clean_step_passes_with_launches_equal_to_nodes(name: str) -> None:
    import torch

    stream = torch.cuda.current_stream()
    for _ in range(2):  # the second run meets what the first left behind
        result = validated(name)
        assert result.findings == []
        assert result.seen.stages == ["eager", "capture", "replay"]
        assert len(result.seen.launches) == 1
        assert len(result.seen.replays) == 5  # the second and the first once more, behind others
        if result.seen.graph.not_inspected is None:
            kernels = [node for node in result.seen.graph.nodes if node.kind == "kernel"]
            assert [node.kernel for node in kernels] == ["saxpy"]
            assert (kernels[0].grid, kernels[0].block) == ((16, 1, 1), (64, 1, 1))
    assert torch.cuda.current_stream() == stream


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["CLEAN", "FORKED"])
def test_a_clean_step_passes_where_only_streams_are_compared(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(instruments, "walk", lambda *graph: NOT_WALKED)
    result = validated(name)
    assert result.findings == []
    assert result.seen.launches[0].stream in result.seen.capturing_streams


@pytest.mark.gpu
def test_the_graph_is_walked_where_cuda_bindings_is_installed() -> None:
    pytest.importorskip("cuda.bindings.driver")
    assert validated("CLEAN").seen.graph.not_inspected is None


@pytest.mark.gpu
@pytest.mark.parametrize("walked", [True, False])
def test_a_null_stream_launch_is_missing_from_the_graph(
    walked: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if walked:
        pytest.importorskip("cuda.bindings.driver")
    else:
        monkeypatch.setattr(instruments, "walk", lambda *graph: NOT_WALKED)
    result = validated("NULL_STREAM")
    assert rule_names(result) == {"CV101", "CV204", "CV602"}
    missing = next(finding for finding in result.findings if finding.rule == "CV101")
    assert "legacy default stream" in missing.message
    assert missing.evidence["kernel"] == "saxpy"


@pytest.mark.gpu
def test_a_launch_left_out_of_the_capture() -> None:
    assert rule_names(validated("LEFT_OUT")) == {"CV102", "CV602"}


@pytest.mark.gpu
def test_an_output_of_which_half_is_written() -> None:
    result = validated("HALF")
    assert rule_names(result) == {"CV602"}
    assert result.findings[0].evidence["unchanged"] == 488  # 1000 elements, 8 blocks of 64


@pytest.mark.gpu
def test_a_wrong_step_is_wrong_eagerly_and_replayed() -> None:
    assert rule_names(validated("WRONG")) == {"CV601", "CV603"}


@pytest.mark.gpu
def test_other_launchers_must_be_declared() -> None:
    pytest.importorskip("cuda.bindings.driver")
    assert rule_names(validated("EXTRA")) == {"CV102"}
    result = validated("EXTRA_DECLARED", only_recorded=False)
    assert result.ok
    assert rule_names(result) <= {"CV102"}  # a warning where CUPTI does not see the launch
