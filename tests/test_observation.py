"""What the instruments of the capture validator make of what they are told, without a GPU."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import gc
import json
import struct
import sys
import threading
from enum import IntEnum
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from cuverify.validators import api, cupti, graph_walk, reach
from cuverify.validators.api_calls import CALLS, base_name
from cuverify.validators.callable_case import CallableCase
from cuverify.validators.compare import host_array
from cuverify.validators.cupti import CuptiObserver, double_for_float
from cuverify.validators.fallback import FallbackObserver
from cuverify.validators.instruments import no_garbage_collection
from cuverify.validators.modes import armed_modes
from cuverify.validators.observations import TensorSeen
from cuverify.validators.provenance import Landscape, host_ranges
from cuverify.validators.reach import tensors_reached
from cuverify.validators.runs import drifts, statistics
from cuverify.validators.subject import CallableStep, fill_garbage

from cuverify.cases.relocate import CASE
from cuverify.errors import ArgumentError, CaseError

# --- CUPTI ---------------------------------------------------------------------------------------


class Domain(IntEnum):
    DRIVER_API = 1
    RUNTIME_API = 2


RUNTIME = {
    "INVALID": 0,
    "cudaMalloc_v3020": 20,
    "cudaFree_v3020": 22,
    "cudaStreamSynchronize_ptsz_v7000": 239,
    "cudaLaunchKernelExC_v11060": 430,
    "cudaGetDevice_v3020": 17,
}
DRIVER = {"cuMemAlloc_v2": 243, "cuLaunchKernel": 307, "cuCtxGetDevice_v2": 795}
Runtime: Any = IntEnum("Runtime", RUNTIME)
Driver: Any = IntEnum("Driver", DRIVER)


class Cupti:
    """Stands in for `cupti.cupti`: one subscriber, and calls that a test makes."""

    CallbackDomain = Domain
    runtime_api_trace_cbid = Runtime
    driver_api_trace_cbid = Driver

    def __init__(self) -> None:
        self.callback: Any = None
        self.on: set[tuple[int, int]] = set()

    def subscribe(self, callback: Any, data: Any) -> int:
        if self.callback is not None:
            raise RuntimeError("ERROR_MULTIPLE_SUBSCRIBERS_NOT_SUPPORTED (39)")
        self.callback = callback
        return 1

    def unsubscribe(self, subscriber: int) -> None:
        self.callback = None

    def enable_callback(self, on: int, subscriber: int, domain: int, identity: int) -> None:
        (self.on.add if on else self.on.discard)((domain, identity))

    def call(
        self, identity: IntEnum, *words: int, result: int = 0, symbol: str = "", inner: Any = None
    ) -> None:
        """Report a call as the library does: at its start and at its end."""
        domain = Domain.RUNTIME_API if isinstance(identity, Runtime) else Domain.DRIVER_API
        arguments = (ctypes.c_uint64 * 8)(*words)
        code = ctypes.c_int(result)
        data = (ctypes.c_uint64 * 9)()
        data[2], data[3] = ctypes.addressof(arguments), ctypes.addressof(code)
        told = SimpleNamespace(ptr=ctypes.addressof(data), symbol_name=symbol, callback_site=0)
        if (int(domain), int(identity)) in self.on:
            self.callback(None, int(domain), int(identity), told)
        if inner is not None:
            inner()
        told.callback_site = 1
        if (int(domain), int(identity)) in self.on:
            self.callback(None, int(domain), int(identity), told)


def test_only_calls_of_interest_are_subscribed_to_and_only_in_a_phase() -> None:
    library = Cupti()
    observer = CuptiObserver(library)
    library.call(Runtime.cudaMalloc_v3020)
    assert library.on == set()
    with observer.phase("capture"):
        assert (2, 20) in library.on
        assert not {(2, 17), (1, 795)} & library.on
    assert library.on == set()
    assert observer.calls == []


def test_an_allocation_is_one_event_with_its_address_and_place() -> None:
    library, place = Cupti(), ctypes.c_uint64(0)
    observer = CuptiObserver(library)

    def inner() -> None:
        library.call(Driver.cuMemAlloc_v2, ctypes.addressof(place), 4096)
        place.value = 0x7F0000

    with observer.phase("capture"):
        library.call(Runtime.cudaMalloc_v3020, ctypes.addressof(place), 4096, inner=inner)
        library.call(Runtime.cudaMalloc_v3020, ctypes.addressof(place), 64, result=900)
    taken, refused = observer.calls
    assert (taken.api, taken.kind, taken.size, taken.address) == (
        "cudaMalloc",
        "alloc",
        4096,
        0x7F0000,
    )
    assert str(taken.where).startswith(
        "tests/test_observation.py:"
    ) or "test_observation.py:" in str(taken.where)
    assert (refused.error, refused.address) == ("error 900", 0)
    assert observer.trouble is None


def test_two_threads_in_one_call_keep_their_own_results() -> None:
    library, mine, theirs = Cupti(), ctypes.c_uint64(0x7F10), ctypes.c_uint64(0x7F20)
    observer = CuptiObserver(library)

    def malloc(place: ctypes.c_uint64, size: int, **more: Any) -> None:
        library.call(Runtime.cudaMalloc_v3020, ctypes.addressof(place), size, **more)

    def meanwhile() -> None:
        thread = threading.Thread(target=malloc, args=(theirs, 64), kwargs={"result": 900})
        thread.start()
        thread.join()

    with observer.phase("capture"):
        malloc(mine, 4096, inner=meanwhile)
    assert [(each.size, each.address, each.error) for each in observer.calls] == [
        (4096, 0x7F10, ""),
        (64, 0, "error 900"),
    ]
    assert observer.trouble is None


def test_streams_are_read_from_arguments_and_launch_configurations() -> None:
    library = Cupti()
    observer = CuptiObserver(library)
    configuration = (ctypes.c_uint64 * 8)(0, 0, 0, 0, 0x7F10)
    with observer.phase("capture"):
        library.call(Driver.cuLaunchKernel, 0xF, 1, 1, 1, 0, 0x7F20, 0, symbol="axpy")
        library.call(
            Runtime.cudaLaunchKernelExC_v11060, ctypes.addressof(configuration), symbol="k"
        )
        library.call(Runtime.cudaStreamSynchronize_ptsz_v7000, 0x7F30)
    assert [(each.kernel, each.stream) for each in observer.calls] == [
        ("axpy", 0x7F20),
        ("k", 0x7F10),
        (None, 0x7F30),
    ]


def test_calls_of_another_thread_are_told_apart() -> None:
    library = Cupti()
    observer = CuptiObserver(library)
    with observer.phase("capture"):
        thread = threading.Thread(target=library.call, args=(Runtime.cudaFree_v3020, 0x70))
        thread.start()
        thread.join()
    assert [each.thread for each in observer.calls] == ["other"]


def test_a_second_subscriber_is_refused_and_the_first_gives_back() -> None:
    library = Cupti()
    first = CuptiObserver(library)
    with pytest.raises(RuntimeError, match="MULTIPLE_SUBSCRIBERS"):
        CuptiObserver(library)
    first.close()
    first.close()
    CuptiObserver(library)


def test_without_cupti_the_reason_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(__import__("sys").modules, "cupti", None)
    observer, reason = cupti.open_observer()
    assert observer is None
    assert "cupti-python is not installed" in reason


@pytest.mark.parametrize(
    ("given", "found"), [(1.0, True), (0.125, True), (0.1, True), (1 / 3, False)]
)
def test_a_python_float_for_a_float_is_found(given: float, found: bool) -> None:
    told = double_for_float(struct.pack("<d", given))
    assert (told is not None) is found
    if told is not None:
        assert told[0] == given
        assert told[1] != given


@pytest.mark.parametrize("behind", [0, 1, 0xFFFFFFFF])
def test_a_float_of_four_bytes_is_none(behind: int) -> None:
    for value in (0.0, 1.0, 2.5, -7.0):
        assert double_for_float(struct.pack("<fI", value, behind)) is None


def test_versions_fall_off_names() -> None:
    assert base_name("cuMemAlloc_v2") == "cuMemAlloc"
    assert base_name("cudaStreamSynchronize_ptsz_v7000") == "cudaStreamSynchronize"
    assert base_name("cuMemcpyHtoDAsync_v2_ptsz") == "cuMemcpyHtoDAsync"
    assert all(base_name(name) == name for name in CALLS)


# --- the fallback --------------------------------------------------------------------------------


def test_the_fallback_leaves_no_hook_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    modes: list[Any] = ["default"]
    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: modes[-1])
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    before = armed_modes()
    observer = FallbackObserver("none here", torch)
    with observer.phase("capture"):
        assert modes[-1] == "warn"
        torch.ones(3).sum().item()  # on the CPU nothing waits
    assert modes[-1] == "default"
    assert armed_modes() == before
    assert observer.calls == []
    assert "none here" in observer.name


def test_a_warning_of_torch_is_placed_where_the_step_caused_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    import warnings

    monkeypatch.setattr(torch.cuda, "get_sync_debug_mode", lambda: 0)
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda mode: None)
    show, filters = warnings.showwarning, list(warnings.filters)
    observer = FallbackObserver("none here", torch)
    with observer.phase("capture"):
        line = sys._getframe().f_lineno + 1
        warnings.warn("called a synchronizing CUDA operation", stacklevel=1)
    (seen,) = observer.calls
    assert (seen.kind, seen.phase) == ("sync", "capture")
    assert str(seen.where).endswith(f"test_observation.py:{line}")
    assert warnings.showwarning is show
    assert warnings.filters == filters


def test_the_fallback_notes_a_place_once() -> None:
    observer = FallbackObserver("none here", torch)
    for api_name in ("one hook", "another"):
        observer.note("sync", api_name, "capture", "step.py:3")
    observer.note("sync", "one hook", "capture", "step.py:4")
    assert [each.where for each in observer.calls] == ["step.py:3", "step.py:4"]


def test_armed_modes_are_named() -> None:
    assert armed_modes() == ()
    with torch.autograd.set_detect_anomaly(True, check_nan=False):
        assert armed_modes() == ("torch.autograd.set_detect_anomaly",)
    from torch.utils._python_dispatch import TorchDispatchMode

    class Counting(TorchDispatchMode):
        pass

    with Counting():
        assert armed_modes() == ("dispatch mode Counting",)
    assert armed_modes() == ()


def test_a_collection_inside_is_seen_and_the_collector_is_as_before() -> None:
    callbacks = list(gc.callbacks)
    with no_garbage_collection() as collections:
        assert not gc.isenabled()
        gc.collect()
    assert len(collections) == 1
    assert "test_observation.py:" in collections[0]
    assert gc.isenabled()
    assert gc.callbacks == callbacks


# --- provenance ----------------------------------------------------------------------------------

BASE = 0x7F0000000000
SEGMENTS = [
    {
        "address": BASE,
        "segment_pool_id": (0, 0),
        "blocks": [
            {"address": BASE, "size": 512, "state": "active_allocated"},
            {"address": BASE + 512, "size": 1024, "state": "inactive"},
        ],
    },
    {
        "address": BASE + (1 << 21),
        "segment_pool_id": (2, 0),
        "blocks": [{"address": BASE + (1 << 21), "size": 4096, "state": "inactive"}],
    },
]


def landscape(**more: Any) -> Landscape:
    return Landscape(SEGMENTS, (TensorSeen("x", "input", BASE, 400),), **more)


def test_addresses_are_named_by_what_lies_there() -> None:
    mapped = {0x7E0000000100: {"space": "pinned", "start": 0x7E0000000000, "size": 4096}}
    land = landscape(
        chunks=[(0x7D0000000000, 256)], ask=mapped.get, host=[(0x550000000000, 0x550000001000)]
    )
    found = {address: land.locate(address) for address in (BASE + 8, BASE + 600, BASE + (1 << 21))}
    x, freed, private = found.values()
    assert (x.space, x.owner, x.role, x.state) == ("torch", "x", "input", "active_allocated")
    assert (freed.state, freed.owner, freed.block) == ("inactive", "", (BASE + 512, 1024))
    assert private.pool == (2, 0)
    assert land.locate(BASE + 1536).space == "unmapped"
    assert land.locate(0x7D0000000010).space == "cupy"
    assert land.locate(0x7E0000000100).space == "pinned"
    assert land.locate(0x550000000010).space == "pageable"
    assert land.locate(0).space == "null"
    assert land.locate(1000).space == "number"
    assert land.locate(0x3FF0000000000000).space == "number"
    assert "x" in str(x)


def test_words_of_a_struct_are_candidates_and_numbers_are_left_out() -> None:
    land = landscape()
    (whole,) = land.words((BASE + 8).to_bytes(8, "little"))
    assert whole.sure
    packed = struct.pack("<QiiQ", BASE + 8, 1024, 1, BASE + 600)
    inside = land.words(packed)
    assert [(each.address, each.sure) for each in inside] == [
        (BASE + 8, False),
        (BASE + 600, False),
    ]
    assert [str(each).endswith(", a word inside a struct)") for each in (whole, *inside)] == [
        False,
        True,
        True,
    ]
    assert land.words(struct.pack("<q", 4096)) == ()
    assert land.words(struct.pack("<ii", 1024, 256)) == ()
    assert land.words(struct.pack("<i", 7)) == ()


def test_this_process_knows_its_own_memory() -> None:
    array = np.ones(100)
    assert Landscape(host=host_ranges()).locate(array.ctypes.data).space == "pageable"


# --- graph walk ----------------------------------------------------------------------------------


class Handle(int):
    def __new__(cls, init_value: int = 0) -> Handle:
        return super().__new__(cls, init_value)


class ParamDriver:
    """Answers like `cuda.bindings.driver` for one kernel node and one copy node."""

    CUgraph = Handle

    def __init__(self) -> None:
        self.values = [ctypes.c_uint64(BASE + 8), ctypes.c_int(5)]
        self.cells = (ctypes.c_uint64 * 2)(*(ctypes.addressof(value) for value in self.values))

    def cuGraphGetNodes(self, graph: int, count: int = 0) -> tuple[Any, ...]:  # noqa: N802
        return 0, [Handle(1), Handle(2)][:count], 2

    def cuGraphGetEdges(self, graph: int, count: int = 0) -> tuple[Any, ...]:  # noqa: N802
        return 0, [Handle(1)][:count], [Handle(2)][:count], [SimpleNamespace(type=1)][:count], 1

    def cuGraphNodeGetType(self, node: int) -> tuple[Any, ...]:  # noqa: N802
        return 0, SimpleNamespace(name=f"CU_GRAPH_NODE_TYPE_{'KERNEL' if node == 1 else 'MEMCPY'}")

    def cuGraphKernelNodeGetParams(self, node: int) -> tuple[Any, ...]:  # noqa: N802
        sizes = {f"{what}Dim{axis}": 1 for what in ("grid", "block") for axis in "XYZ"}
        cells = ctypes.addressof(self.cells)
        return 0, SimpleNamespace(
            **sizes, sharedMemBytes=0, func=Handle(9), kern=Handle(0), kernelParams=cells
        )

    def cuFuncGetName(self, function: int) -> tuple[Any, ...]:  # noqa: N802
        return 0, b"axpy"

    def cuFuncGetParamInfo(self, function: int, index: int) -> tuple[Any, ...]:  # noqa: N802
        return ((0, 0, 8), (0, 8, 4), (1, 0, 0))[index]

    def cuGraphMemcpyNodeGetParams(self, node: int) -> tuple[Any, ...]:  # noqa: N802
        host, device = (
            SimpleNamespace(name="CU_MEMORYTYPE_HOST"),
            SimpleNamespace(name="CU_MEMORYTYPE_DEVICE"),
        )
        return 0, SimpleNamespace(
            srcMemoryType=host, srcHost=0x550000000010, dstMemoryType=device,
            dstDevice=Handle(BASE + 8), WidthInBytes=64, Height=1, Depth=1,
        )  # fmt: skip


def test_a_walk_reads_every_argument_and_the_ends_of_copies() -> None:
    land = landscape(host=[(0x550000000000, 0x550000001000)])
    seen = graph_walk.walk(1, ParamDriver(), land)
    kernel, copy = seen.nodes
    assert [(each.size, each.data) for each in kernel.params] == [
        (8, (BASE + 8).to_bytes(8, "little").hex()),
        (4, "05000000"),
    ]
    assert kernel.params[0].pointers[0].owner == "x"
    assert copy.source is not None and copy.source.space == "pageable"
    assert copy.target is not None and copy.target.owner == "x"
    assert copy.size == 64
    assert seen.edges == ((0, 1, "programmatic"),)


# --- tensors of the step's code -------------------------------------------------------------------


@dataclasses.dataclass
class Holder:
    plan: Any
    parts: list[Any]

    def __call__(self) -> None:
        self.plan.add_(GLOBAL["tensor"])


GLOBAL = {"tensor": torch.zeros(2)}


def test_tensors_are_found_wherever_a_step_keeps_them(monkeypatch: pytest.MonkeyPatch) -> None:
    inner, default, layer = torch.zeros(2), torch.zeros(2), torch.nn.Linear(2, 2)
    holder = Holder(torch.zeros(2), [torch.zeros(2)])
    holder.parts.append(holder)  # a circle

    def step(scale: Any = default) -> None:
        holder()
        layer(inner + scale + GLOBAL["tensor"])

    assert tensors_reached(step) == {}  # none of them on a device
    monkeypatch.setattr(reach, "_is_shared", lambda tensor: True)
    for root in (step, functools.partial(step)):
        found = tensors_reached(root)
        assert {path: int(tensor.data_ptr()) for path, tensor in found.items()} == {
            "step.holder.plan": holder.plan.data_ptr(),
            "step.holder.parts[0]": holder.parts[0].data_ptr(),
            "step.inner": inner.data_ptr(),
            "step.layer._parameters['weight']": layer.weight.data_ptr(),
            "step.layer._parameters['bias']": layer.bias.data_ptr(),
            "step.default0": default.data_ptr(),
            "step.GLOBAL['tensor']": GLOBAL["tensor"].data_ptr(),
        }
    assert set(tensors_reached(holder)) >= {"step.plan", "step.parts[0]"}
    array = np.zeros(3, np.float32)
    (found_array,) = reach.memory_reached(lambda: array).items()
    assert found_array[0] == "step.array"
    assert reach.address_of(array) == (array.ctypes.data, 12)
    assert reach.address_of(inner) == (inner.data_ptr(), 8)
    pointer = SimpleNamespace(ptr=108, mem=SimpleNamespace(ptr=100, size=64))
    assert reach.address_of(pointer) == (108, 56)
    assert tensors_reached(lambda: array) == {}
    assert set(tensors_reached(holder.__call__)) >= {"step.plan", "step.parts[0]"}


# --- outputs --------------------------------------------------------------------------------------


def test_drifts_leave_spare_elements_out_and_count_ulps() -> None:
    first = {"y": np.float32([1, 2, 3, 4])}
    second = {"y": np.nextafter(first["y"], np.float32(9))}
    second["y"][3] = 100
    (drift,) = drifts(second, first, spare={"y": slice(3, None)})
    assert drift.mismatch.count == 3
    assert drift.ulps == {"1": 3}
    assert drift.relative is not None and drift.relative < 1e-6
    assert drift.right is None
    assert drifts(first, first) == ()


def test_a_drift_knows_whether_it_is_right_all_the_same() -> None:
    from cuverify.validators.compare import Tolerance

    one, two = {"y": np.float32([1.0])}, {"y": np.float32([1.0000001])}
    near = drifts(two, one, expected=one, tolerances=Tolerance(rtol=1e-3))
    exact = drifts(two, one, expected=one)
    assert [each.right for each in (*near, *exact)] == [True, False]


def test_ulps_cross_zero_and_have_a_last_class() -> None:
    low, high = np.float32([-1e-45, 1.0]), np.float32([1e-45, 3.0])
    relative, ulps = statistics(host_array(high), host_array(low))
    assert relative is not None
    assert ulps == {"2-7": 1, ">=2097152": 1}
    assert statistics(host_array(np.int32([1])), host_array(np.int32([2])))[1] == {}


# --- bare functions -------------------------------------------------------------------------------


def test_a_callable_case_refuses_what_cannot_be_judged() -> None:
    x = torch.zeros(3)
    with pytest.raises(ArgumentError, match="outputs="):
        CallableCase(lambda: None, {"x": x}, {})
    with pytest.raises(ArgumentError, match="padding='z'"):
        CallableCase(lambda: None, {"x": x}, {"y": x}, padding={"z": slice(1)})
    with pytest.raises(ArgumentError, match="alone='y'"):
        CallableCase(lambda: None, {"x": x}, {"y": x}, alone=["y"])


def test_a_bare_step_is_refilled_restored_and_poisoned() -> None:
    x, y, acc = torch.zeros(4), torch.zeros(4), torch.full((2,), 3.0)
    case = CallableCase(lambda: None, {"x": x}, {"y": y, "acc": acc}, state={"acc": acc})
    step = CallableStep(case)
    step.refill(1)
    first = x.clone()
    acc.zero_()
    step.refill(2)
    assert not torch.equal(x, first)
    step.refill(1)
    assert torch.equal(x, first)
    assert acc.tolist() == [3.0, 3.0]
    step.poison()
    assert y.isnan().all()
    assert acc.tolist() == [3.0, 3.0]  # a state is read: it holds its beginning
    assert not step.has_reference
    assert step.alone == ("x",)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bool, torch.uint8, torch.int32])
def test_garbage_is_legal_and_other_than_before(dtype: torch.dtype) -> None:
    tensor = torch.tensor([0, 1, 1, 0]).to(dtype)
    before = tensor.clone()
    assert fill_garbage(tensor, slice(0, 1), nan=False)
    assert tensor[0] != before[0]
    assert torch.equal(tensor[1:], before[1:])
    assert fill_garbage(tensor, slice(0, 1), nan=True) is dtype.is_floating_point
    assert not fill_garbage(tensor, slice(0, 0), nan=False)


# --- a factory in a child process -----------------------------------------------------------------


def test_a_bare_function_does_not_go_into_a_child() -> None:
    x = torch.zeros(3)
    with pytest.raises(ArgumentError, match="child=True"):
        api.validate_callable(lambda: None, inputs={"x": x}, outputs={"y": x}, child=True)


FACTORIES = """
import os, torch
from cuverify.validators.callable_case import CallableCase

def raises():
    raise LookupError("nothing here")

def dies():
    os._exit(3)

def clean():
    x, y = torch.zeros(3), torch.zeros(3)
    return CallableCase(lambda: torch.add(x, 1, out=y), {"x": x}, {"y": y}, name="plus one")

def unnamed():
    case = clean()
    return CallableCase(case.step, case.inputs, case.outputs)

NUMBER = 7

def makes_a_number():
    return NUMBER
"""


@pytest.fixture
def factories(tmp_path: Path) -> str:
    path = tmp_path / "factories.py"
    path.write_text(FACTORIES)
    return str(path)


@pytest.mark.parametrize("name", ["makes_a_number", "NUMBER"])
def test_a_factory_that_makes_no_case_is_refused(factories: str, name: str) -> None:
    with pytest.raises(CaseError, match=f"{name} gave int, and no CallableCase"):
        api.validate_factory(f"{factories}:{name}")


def test_what_a_factory_makes_is_named_by_it(factories: str) -> None:
    assert api.made_case(f"{factories}:clean").name == "plus one"
    assert api.made_case(f"{factories}:unnamed").name == "unnamed"


def test_a_check_case_is_no_bare_one() -> None:
    reference = "cuverify.cases.relocate:CASE"
    assert api.made_case(reference) is CASE
    with pytest.raises(CaseError, match="gave RelocateCase, and no CallableCase"):
        api.made_case(reference, bare=True)


@pytest.mark.parametrize(
    "given", [{"seed": 3}, {"examples": 2}, {"strict": False}, {"progress": print}]
)
def test_a_reference_takes_no_arguments_of_a_case(given: dict[str, Any]) -> None:
    (name,) = given
    with pytest.raises(ArgumentError, match=f"{name}=.* is not for a reference"):
        api.validate("no_such_module:case", **given)


def test_a_factory_that_fails_or_dies_is_a_finding(factories: str) -> None:
    report = api.validate_factory(f"{factories}:raises", silence_s=60)
    assert [finding.rule for finding in report.findings] == ["CV905"]
    assert "LookupError: nothing here" in report.findings[0].message
    report = api.validate_factory(f"{factories}:dies", silence_s=60)
    assert "ended with status 3" in report.findings[0].message
    assert not report.ok
    json.dumps(report.to_json())


def test_what_was_seen_before_a_hang_is_kept() -> None:
    from cuverify.validators.child import ChildOutcome

    from cuverify.report import Finding, Report

    listener = api.Listener("m:f")
    before = Report("capture of f", [Finding("CV202", "error", "waits")])
    listener.take({"kind": "stage", "stage": "replays"})
    listener.take({"kind": "report", "report": before.to_json()})
    listener.take({"kind": "stage", "stage": "strict capture"})
    report = listener.report(ChildOutcome("timeout", exit_status=-9), 20)
    assert [finding.rule for finding in report.findings] == ["CV202", "CV904"]
    assert "strict capture" in report.findings[1].message
    assert [line.status for line in report.coverage] == ["not inspected"]
