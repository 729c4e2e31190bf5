"""Every rule of the capture validator on made-up records: what it says, and when it is silent."""

from __future__ import annotations

import dataclasses
import json
import re
import types
import typing
from collections.abc import Callable
from typing import Any

import pytest
from cuverify.validators import rules
from cuverify.validators.compare import Mismatch
from cuverify.validators.observations import (
    AttemptSeen,
    CallSeen,
    CaptureSeen,
    DriftSeen,
    EndSeen,
    Fault,
    GraphSeen,
    KeptSeen,
    LaunchSeen,
    MemorySeen,
    NodeSeen,
    OutputSeen,
    ParamSeen,
    PointerSeen,
    PoolHitSeen,
    ReboundSeen,
    ResponseSeen,
    RunSeen,
    StaleMemorySeen,
    TensorSeen,
    TrialSeen,
    WideArgumentSeen,
    WriteSeen,
)
from cuverify.validators.records import from_plain, to_plain
from hypothesis import given
from hypothesis import strategies as st

CAPTURED, EAGER, OTHER = 0x7F10, 0x7F20, 0x7F30
X, Y, POOL = 0x7F0000001000, 0x7F0000002000, (3, 0)
HERE = "step.py:12"

WRONG = Mismatch("y", count=8, total=8, actual=1.0, expected=2.0)
OFF = DriftSeen(WRONG, 0.5, {}, False)
POISONED = DriftSeen(dataclasses.replace(WRONG, nans=8), None, {}, False)
BITS = DriftSeen(dataclasses.replace(WRONG, actual=1.9999999), 1e-7, {"1": 8}, True)


def pointer(address: int, **more: Any) -> PointerSeen:
    fields = {"space": "torch", "pool": (0, 0), "state": "active_allocated", **more}
    return PointerSeen(address, **fields)


def param(index: int, data: bytes, *pointers: PointerSeen) -> ParamSeen:
    return ParamSeen(index, 8 * index, len(data), data.hex(), pointers)


def at(index: int, where: PointerSeen) -> ParamSeen:
    return param(index, where.address.to_bytes(8, "little"), where)


def node(kernel: str = "axpy", *params: ParamSeen, **more: Any) -> NodeSeen:
    given = params or (at(0, pointer(Y, owner="y", role="output")), at(1, pointer(X)))
    return NodeSeen("kernel", kernel, (4, 1, 1), (256, 1, 1), params=given, **more)


def launch(stream: int = CAPTURED, kernel: str = "axpy", phase: str = "capture") -> CallSeen:
    return CallSeen("cuLaunchKernel", "launch", phase, stream=stream, where=HERE, kernel=kernel)


def call(api: str, kind: str, phase: str = "capture", **more: Any) -> CallSeen:
    return CallSeen(api, kind, phase, where=HERE, **more)


def ran(label: str = "seed 0", **more: Any) -> RunSeen:
    return RunSeen(label, (OutputSeen("y", **{"must_change": 8, **more}),))


def graph(*nodes: NodeSeen, **more: Any) -> GraphSeen:
    return GraphSeen(nodes or (node(),), **more)


def attempt(name: str, *nodes: NodeSeen, **more: Any) -> AttemptSeen:
    return AttemptSeen(name, graph=graph(*nodes), **{"pool": POOL, **more})


def failed(name: str, error: str) -> AttemptSeen:
    fault = Fault("capture", error, HERE)
    return AttemptSeen(name, graph=GraphSeen(not_inspected="no graph"), fault=fault)


def clean() -> CaptureSeen:
    """Return the record of a clean step, seen by everything."""
    return CaptureSeen(
        capture_stream=CAPTURED,
        capturing_streams=frozenset({CAPTURED}),
        graph=graph(),
        eager=ran(),
        replays=[ran(), ran("seed 1"), ran()],
        stages=["eager", "capture", "replay"],
        observer="CUPTI",
        only_recorded=False,
        calls=(launch(phase="warm-up"), launch()),
        attempts=[attempt(name) for name in ("capture", "double", "strict", "cold", "fresh 0")]
        + [attempt("fresh 2")],
        trials=[TrialSeen(name) for name in ("eager again", "against eager", "again", "stream")],
        responses=[ResponseSeen("x", "alone", 8, 8)],
        tensors=(TensorSeen("y", "output", Y, 32), TensorSeen("step.w", "held", X, 32)),
        memory=[MemorySeen("replays", (4, 4, 4), (8, 8, 8), (9, 9, 9))],
        pool=POOL,
        streams={"eager": EAGER, "capture": CAPTURED},
    )


Change = Callable[[CaptureSeen], Any]


def add(**fields: Any) -> Change:
    """Return what adds to fields of a record: tuples and lists grow, everything else is set."""

    def change(seen: CaptureSeen) -> None:
        for name, value in fields.items():
            present = getattr(seen, name)
            if isinstance(present, (list, tuple)):
                value = type(present)([*present, *value])
            setattr(seen, name, value)

    return change


def replace_attempt(new: AttemptSeen) -> Change:
    def change(seen: CaptureSeen) -> None:
        seen.attempts = [new if each.name == new.name else each for each in seen.attempts]

    return change


def calls(*given: CallSeen) -> Change:
    return add(calls=given)


def trial(name: str, drift: DriftSeen = OFF, subject: str = "") -> Change:
    def change(seen: CaptureSeen) -> None:
        seen.trials = [each for each in seen.trials if each.name != name]
        seen.trials.append(TrialSeen(name, subject, (drift,)))

    return change


def with_node(*nodes: NodeSeen) -> Change:
    return lambda seen: vars(seen).update(graph=graph(*nodes))


def both(*changes: Change) -> Change:
    def change(seen: CaptureSeen) -> None:
        for each in changes:
            each(seen)

    return change


def breaks(error: str) -> Change:
    """Return what makes the capture of a record fail."""

    def change(seen: CaptureSeen) -> None:
        seen.faults.append(Fault("capture", error, HERE))
        seen.attempts = [failed("capture", error)]
        seen.stages = ["eager"]
        seen.replays, seen.trials = [], []

    return change


SCALAR = node("axpy", at(0, pointer(Y)), param(1, (5).to_bytes(4, "little")))
OTHER_SCALAR = node("axpy", at(0, pointer(Y)), param(1, (7).to_bytes(4, "little")))
TEMPORARY = node("axpy", at(0, pointer(0x7F0000100000, pool=POOL)))
SECOND = (4, 0)
OTHER_TEMPORARY = node("axpy", at(0, pointer(0x7F0000200000, pool=SECOND)))


def early(seen: CaptureSeen) -> None:
    seen.graph = graph(node(), edges=((0, 0, "programmatic"),))


def got(phase: str, *pointers: int) -> CallSeen:
    return dataclasses.replace(launch(phase=phase), pointers=pointers)


# what makes the clean record faulty, and the rules that must say so
FAULTS: list[tuple[str, Change, set[str]]] = [
    ("nothing", add(), set()),
    (
        "a null-stream launch",
        both(with_node(NodeSeen("empty")), lambda seen: setattr(seen, "calls", (launch(0),))),
        {"CV101"},
    ),
    (
        "a launch on the stream of the eager run",
        both(
            with_node(NodeSeen("empty")),
            lambda seen: setattr(seen, "calls", (launch(EAGER, phase="warm-up"), launch(EAGER))),
        ),
        {"CV101", "CV103"},
    ),
    (
        "nothing launched",
        both(with_node(NodeSeen("empty")), lambda seen: setattr(seen, "calls", ())),
        {"CV102"},
    ),
    (
        "an allocation on a cold stream alone",
        calls(call("cudaMalloc", "alloc", "cold")),
        {"CV104"},
    ),
    ("a cold stream that fails", replace_attempt(failed("cold", "RuntimeError: no")), {"CV104"}),
    ("an input that moves nothing", add(responses=[ResponseSeen("b", "alone", 5, 0)]), {"CV105"}),
    (
        "an input whose old content explains the replay",
        add(responses=[ResponseSeen("b", "stale", ignored=True)]),
        {"CV105"},
    ),
    ("a rebound tensor", add(rebound=[ReboundSeen("step.w", X, 0x7F5, "capture")]), {"CV106"}),
    (
        "a tensor that is bound to private memory",
        add(rebound=[ReboundSeen("step.y", 7, 9, "capture")], kept=[KeptSeen("step.y", 9, 4)]),
        {"CV106", "CV404"},
    ),
    ("a rebound tensor of no interest", add(rebound=[ReboundSeen("z", 7, 8, "capture")]), set()),
    (
        "a kernel of the capture alone",
        both(calls(launch(kernel="init")), with_node(node(), node("init"))),
        {"CV107"},
    ),
    ("another device", calls(call("cudaSetDevice", "device", address=1)), {"CV108"}),
    ("the same device", calls(call("cudaSetDevice", "device", address=0)), set()),
    ("a failed capture", breaks("RuntimeError: not permitted"), {"CV201"}),
    ("a sync", calls(call("cudaStreamSynchronize", "sync")), {"CV202"}),
    ("a sync of an eager run alone", calls(call("cudaStreamSynchronize", "sync", "eager")), set()),
    (
        "a sync behind the place where the capture broke off",
        both(breaks("no"), calls(call("cudaStreamSynchronize", "sync", "eager"))),
        {"CV201", "CV202"},
    ),
    ("a waiting copy", calls(call("cudaMemcpy", "copy")), {"CV202"}),
    ("an allocation", calls(call("cudaMalloc", "alloc", size=64)), {"CV203"}),
    ("torch's allocation", calls(call("cudaMalloc", "alloc", torch_owned=True)), set()),
    ("a pool miss", add(pool_hits=[PoolHitSeen(0x70, 64, True, False, HERE)]), {"CV203"}),
    (
        "an event on the legacy stream",
        calls(call("cudaEventRecord", "record", stream=0)),
        {"CV204"},
    ),
    (
        "a strict capture that fails",
        replace_attempt(failed("strict", "would make the legacy stream depend on a capture")),
        {"CV204"},
    ),
    ("a collection", add(collections=[HERE]), {"CV205"}),
    ("a free", calls(call("cudaFree", "free", address=X)), {"CV205"}),
    ("a destroyed graph", calls(call("cudaGraphExecDestroy", "destroy")), {"CV205"}),
    ("a query", calls(call("cudaEventQuery", "query")), {"CV206"}),
    ("another thread", calls(call("cudaMalloc", "alloc", thread="other")), {"CV207"}),
    (
        "another thread's launch",
        calls(dataclasses.replace(launch(), thread="other")),
        {"CV101", "CV107"},
    ),
    ("pinned memory", calls(call("cudaHostAlloc", "host_alloc")), {"CV208"}),
    ("a module load", calls(call("cuModuleLoadData", "load")), {"CV209"}),
    (
        "a module load of a fresh step without warm-up",
        calls(call("cuModuleLoadData", "load", "fresh 0")),
        {"CV209"},
    ),
    (
        "a library's workspace",
        calls(call("cudaMalloc", "alloc", origin="libcublas.so.13")),
        {"CV210"},
    ),
    ("an unjoined stream", breaks("cudaErrorStreamCaptureUnjoined"), {"CV201", "CV211"}),
    ("a host function", with_node(node(), NodeSeen("host")), {"CV212"}),
    ("an allocation node", with_node(node(), NodeSeen("mem_alloc", size=64)), {"CV213"}),
    (
        "a pageable copy",
        with_node(node(), NodeSeen("memcpy", source=pointer(0x55, space="pageable"), size=4)),
        {"CV214"},
    ),
    (
        "a pinned copy",
        with_node(node(), NodeSeen("memcpy", source=pointer(X, space="pinned", owner="x"), size=4)),
        set(),
    ),
    ("a leaked pool", add(memory=[MemorySeen("failed capture", private=64)]), {"CV215"}),
    ("an armed mode", add(armed=["torch.cuda.set_sync_debug_mode"]), {"CV216"}),
    (
        "autograd",
        calls(dataclasses.replace(call("cudaMemsetAsync", "memset"), thread="autograd")),
        {"CV217"},
    ),
    (
        "a frozen scalar",
        both(
            replace_attempt(attempt("capture", SCALAR)),
            replace_attempt(attempt("double", OTHER_SCALAR)),
        ),
        {"CV301"},
    ),
    (
        "a frozen scalar in a struct beside a pointer",
        both(
            replace_attempt(attempt("capture", node("k", param(0, b"\1" * 8 + b"\2" * 8)))),
            replace_attempt(attempt("double", node("k", param(0, b"\1" * 8 + b"\3" * 8)))),
        ),
        {"CV301"},
    ),
    (
        "a word that differs between equal captures, too",
        both(
            replace_attempt(attempt("capture", SCALAR)),
            replace_attempt(attempt("double", OTHER_SCALAR)),
            add(attempts=[attempt("same", OTHER_SCALAR)]),
        ),
        set(),
    ),
    (
        "a word that differs between equal captures of other values",
        both(
            replace_attempt(attempt("capture", SCALAR)),
            replace_attempt(attempt("double", OTHER_SCALAR)),
            add(attempts=[attempt("same", SCALAR), attempt("double again", SCALAR)]),
        ),
        set(),
    ),
    (
        "a frozen scalar, seen twice",
        both(
            replace_attempt(attempt("capture", SCALAR)),
            replace_attempt(attempt("double", OTHER_SCALAR)),
            add(attempts=[attempt("same", SCALAR), attempt("double again", OTHER_SCALAR)]),
        ),
        {"CV301"},
    ),
    (
        "a frozen grid",
        replace_attempt(
            attempt("double", dataclasses.replace(node(), grid=(9, 1, 1))),
        ),
        {"CV302"},
    ),
    ("other kernels", replace_attempt(attempt("double", node(), node("more"))), {"CV302"}),
    (
        "a pointer that moves",
        replace_attempt(
            attempt("double", node("axpy", at(0, pointer(Y)), at(1, pointer(0x7F0000009000))))
        ),
        {"CV303"},
    ),
    (
        "temporaries of two private pools",
        both(
            replace_attempt(attempt("capture", TEMPORARY)),
            replace_attempt(attempt("double", OTHER_TEMPORARY, pool=SECOND)),
        ),
        set(),
    ),
    (
        "metadata that a refill allocates",
        add(rebound=[ReboundSeen("refill.plan", X, 0x7F5, "refill")]),
        {"CV303"},
    ),
    ("memoised work", replace_attempt(attempt("fresh 0", node("build"), node())), {"CV304"}),
    (
        "frozen random numbers",
        trial("eager again", dataclasses.replace(OFF, right=None)),
        {"CV305", "CV604"},
    ),
    (
        "random numbers that move",
        both(
            add(deterministic=False),
            trial("eager again", dataclasses.replace(OFF, right=None)),
            trial("again", dataclasses.replace(OFF, right=None)),
        ),
        set(),
    ),
    ("a stale plan", add(stale=[StaleMemorySeen(pointer(X), "axpy", "step.plan")]), {"CV306"}),
    (
        "another buffer in the capture than in the warm-up",
        both(
            lambda seen: setattr(seen, "calls", (got("warm-up", Y, 0x7F5), got("capture", Y, X))),
            lambda seen: setattr(seen, "replays", [ran(), ran("seed 1", mismatch=WRONG)]),
        ),
        {"CV306", "CV601"},
    ),
    (
        "another buffer, and right all the same",
        lambda seen: setattr(seen, "calls", (got("warm-up", Y, 0x7F5), got("capture", Y, X))),
        set(),
    ),
    (
        "a generator that the graph does not know",
        breaks("RuntimeError: Attempt to increase offset for a CUDA generator"),
        {"CV201", "CV305"},
    ),
    (
        "freed memory",
        with_node(node("axpy", at(0, pointer(X, state="inactive")))),
        {"CV401"},
    ),
    ("memory that others write", trial("interference"), {"CV401"}),
    (
        "the graph's own free memory",
        with_node(node("axpy", at(0, pointer(X, state="inactive", pool=POOL)))),
        set(),
    ),
    (
        "a workspace that grew",
        add(rebound=[ReboundSeen("step.w", X, 0x7F5, "an eager run on other inputs")]),
        {"CV402"},
    ),
    (
        "a library's workspace in another pool",
        both(
            with_node(node("sm90_gemm", at(0, pointer(X, pool=(9, 0))))),
            lambda seen: setattr(seen, "calls", (launch(kernel="sm90_gemm"),)),
        ),
        {"CV403"},
    ),
    ("scratch of the capture", add(kept=[KeptSeen("step.tmp", X, 64)]), {"CV404"}),
    (
        "scratch of a capture without warm-up",
        add(kept=[KeptSeen("step.tmp", X, 64, "fresh 0")]),
        {"CV404"},
    ),
    ("an output of the pool", add(kept=[KeptSeen("output y", Y, 64)]), {"CV405"}),
    (
        "memory of another pool",
        with_node(node("axpy", at(0, pointer(X, pool=(9, 0))))),
        {"CV406"},
    ),
    ("borrowed memory", trial("pool"), {"CV407"}),
    (
        "unwritten memory",
        both(trial("pool"), trial("free memory")),
        {"CV605"},
    ),
    ("an unload", calls(call("cuModuleUnload", "unload", "between replays")), {"CV408"}),
    ("an unload in a refill", calls(call("cuModuleUnload", "unload", "refill")), {"CV408"}),
    (
        "pinned memory that nobody holds",
        with_node(node(), NodeSeen("memcpy", source=pointer(0x55, space="pinned"), size=4)),
        {"CV409"},
    ),
    ("recycled pinned memory", trial("pinned"), {"CV409"}),
    ("a pool hit", add(pool_hits=[PoolHitSeen(0x70, 64, False, True, HERE)]), {"CV410"}),
    ("a pool hit that is kept", add(pool_hits=[PoolHitSeen(0x70, 64)]), set()),
    (
        "a pageable pointer",
        with_node(node("axpy", at(0, PointerSeen(X, "pageable")))),
        {"CV411"},
    ),
    (
        "a number of ours that looks like an address",
        both(
            with_node(node("axpy", at(0, PointerSeen(X, "pageable")))),
            add(launches=(LaunchSeen("axpy", CAPTURED, parameters=("n",), numbers=("n",)),)),
        ),
        set(),
    ),
    ("a race with the refill", trial("overlap"), {"CV412"}),
    ("padding", trial("padding", subject="x"), {"CV501"}),
    ("NaN in padding", trial("padding nan", subject="x"), {"CV502"}),
    ("a read behind the end", trial("behind", subject="mask"), {"CV503"}),
    ("a stale tail", trial("stale", subject="seed 1"), {"CV505"}),
    (
        "inputs that were right once",
        add(replays=[ran(mismatch=WRONG)]),
        {"CV505", "CV601"},
    ),
    ("a write beside", add(writes=[WriteSeen("x", "input", 4, 0)]), {"CV506"}),
    (
        "a wrong replay",
        lambda seen: setattr(seen, "replays", [ran(), ran("seed 1", mismatch=WRONG)]),
        {"CV601"},
    ),
    (
        "an unwritten output",
        lambda seen: setattr(seen, "replays", [ran(mismatch=WRONG, unchanged=8)]),
        {"CV602"},
    ),
    ("a wrong eager run", add(eager=ran(mismatch=WRONG)), {"CV603"}),
    ("a counter", trial("again"), {"CV604"}),
    ("a counter, without a reference", trial("idempotent", DriftSeen(WRONG, 0.5)), {"CV604"}),
    (
        "poison that shows in a step that is wrong and unsteady anyway",
        both(
            trial("again"),
            trial("pool", POISONED),
            trial("free memory", POISONED),
            trial("stream"),
        ),
        {"CV604", "CV605"},
    ),
    ("poisoned scratch", trial("scratch", subject="tmp"), {"CV605"}),
    ("atomics", trial("again", BITS), {"CV606"}),
    (
        "declared atomics",
        both(add(deterministic=False), trial("again", BITS), trial("stream", BITS)),
        set(),
    ),
    (
        "atomics do not count as a dependence",
        both(trial("again", BITS), trial("pool", BITS), trial("stream", BITS)),
        {"CV606"},
    ),
    (
        "a lost attribute",
        add(launches=(LaunchSeen("axpy", CAPTURED, (4, 1, 1), (256, 1, 1), 4096),)),
        {"CV607"},
    ),
    (
        "a double for a float",
        add(wide_arguments=[WideArgumentSeen("axpy", 2, 4, 1.0, 0.0, HERE)]),
        {"CV607"},
    ),
    ("a programmatic edge", early, set()),
    ("a programmatic edge and a wrong replay", both(early, trial("stream")), {"CV608", "CV611"}),
    ("other bits than the eager run", trial("against eager", BITS), {"CV609"}),
    (
        "memory that grows",
        add(memory=[MemorySeen("replays", (1, 2, 3), (8, 8, 8), (9, 9, 9))]),
        {"CV610"},
    ),
    ("another stream", trial("stream"), {"CV611"}),
    ("a refill that raises", add(faults=[Fault("refill", "KeyError: 'x'", HERE)]), {"CV901"}),
    ("a step that raises", add(faults=[Fault("step", "LaunchError", HERE)]), {"CV902"}),
    ("a lost context", add(faults=[Fault("replay", "no", context_lost=True)]), {"CV903"}),
    ("a hang", add(end=EndSeen("timeout", "ended by SIGKILL")), {"CV904"}),
    ("a crash", add(end=EndSeen("died", "ended by SIGSEGV")), {"CV905"}),
    ("inputs that change nothing", add(other_answers=0), {"CV906"}),
    (
        "a vacuous pass",
        lambda seen: setattr(seen, "replays", [ran(must_change=0)]),
        {"CV906"},
    ),
]


@pytest.mark.parametrize(
    ("change", "expected"), [entry[1:] for entry in FAULTS], ids=[entry[0] for entry in FAULTS]
)
def test_a_fault_is_named_by_its_rules_and_no_others(change: Change, expected: set[str]) -> None:
    seen = clean()
    change(seen)
    found = rules.judge(seen)
    assert {finding.rule for finding in found} == expected
    for finding in found:
        json.dumps(finding.evidence)
        assert finding.message
        assert finding.fix


def test_every_rule_has_a_fault_here_and_a_text() -> None:
    shown = {rule for _, _, names in FAULTS for rule in names}
    assert {rule.name for rule in rules.RULES} == shown
    for rule in rules.RULES:
        assert re.fullmatch(r"CV[1-6 9]\d\d", rule.name)
        assert rule.title
        assert rule.why.endswith(".")
        assert rule.fix.endswith(".")
    assert len({rule.name for rule in rules.RULES}) == len(rules.RULES)


def test_several_faults_are_all_in_one_judgement() -> None:
    seen = clean()
    both(
        breaks("RuntimeError: not permitted"),
        calls(
            call("cudaMalloc", "alloc", size=64),
            call("cudaEventQuery", "query"),
            call("cudaStreamSynchronize", "sync", "eager"),
            call("cudaHostAlloc", "host_alloc", "eager"),
        ),
        add(pool_hits=[PoolHitSeen(0x70, 64, False, True, HERE)], collections=[HERE]),
        replace_attempt(failed("cold", "no")),
    )(seen)
    found = {finding.rule for finding in rules.judge(seen)}
    assert found == {"CV201", "CV202", "CV203", "CV205", "CV206", "CV208", "CV410"}


def test_places_reach_the_findings() -> None:
    seen = clean()
    calls(call("cudaStreamSynchronize", "sync"), call("cudaMalloc", "alloc", size=64))(seen)
    assert {finding.where for finding in rules.judge(seen)} == {HERE}


@pytest.mark.parametrize("change", [entry[1] for entry in FAULTS], ids=[e[0] for e in FAULTS])
def test_a_record_survives_json(change: Change) -> None:
    seen = clean()
    change(seen)
    assert from_plain(json.loads(json.dumps(to_plain(seen)))) == seen


TEXTS = st.sampled_from(
    (
        *("", "capture", "retry relaxed", "eager", "warm-up", "cold", "double", "fresh 0"),
        *("again", "pool", "kernel", "memcpy", "torch", "pageable", "inactive", "replay"),
        *("sync", "alloc", "launch", "load", "other", "axpy", "00000000ffffffff", "zz"),
    )
)
NUMBERS = st.sampled_from((0, 1, 2, CAPTURED, X, Y, -1, 1 << 63))
PLAIN: dict[Any, st.SearchStrategy[Any]] = {
    str: TEXTS,
    int: NUMBERS,
    float: st.floats(),
    bool: st.booleans(),
    type(None): st.none(),
}


def anything(kind: Any) -> st.SearchStrategy[Any]:
    """Return a strategy for any value of a record's field type, however senseless."""
    if dataclasses.is_dataclass(kind):
        hints = typing.get_type_hints(kind)
        return st.builds(kind, **{name: anything(hint) for name, hint in hints.items()})
    origin, inner = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return st.one_of(*(anything(each) for each in inner))
    if origin is tuple and inner[-1] is not Ellipsis:
        return st.tuples(*(anything(each) for each in inner))
    if origin in (list, tuple, frozenset):
        few = st.lists(anything(inner[0]), max_size=2)
        return few if origin is list else few.map(origin)
    if origin is not None:
        return st.dictionaries(TEXTS, anything(inner[1]), max_size=2)
    return PLAIN[kind]


@given(anything(CaptureSeen))
def test_no_rule_raises_on_any_record(seen: CaptureSeen) -> None:
    for finding in rules.judge(seen):
        assert finding.rule.startswith("CV")
