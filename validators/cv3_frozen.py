"""CV3xx: state of the host that the capture froze."""

from __future__ import annotations

import re
import struct
from collections import Counter
from collections.abc import Iterator

from cuverify.validators.judging import (
    SMALL,
    captured,
    in_graph,
    pointers_of,
    where_launched,
)
from cuverify.validators.observations import (
    AttemptSeen,
    CaptureSeen,
    NodeSeen,
    ParamSeen,
    PointerSeen,
)
from cuverify.validators.rule import Rule, Verdict

_GENERATOR = re.compile(r"generator|philox", re.IGNORECASE)
_WORD = 16  # hexadecimal digits of 8 bytes
_SIGNS = ("00000000", "ffffffff")  # the upper half of a small integer of 8 bytes
_SMALL = 16  # bytes: in a larger struct most words are nobody's


def _pairs(seen: CaptureSeen) -> Iterator[tuple[AttemptSeen, AttemptSeen, NodeSeen, NodeSeen, int]]:
    """Yield kernel nodes of the two captures that are the same launch, and which launch it is."""
    first, second = seen.attempt(seen.replayed), seen.attempt("double")
    if first is None or second is None or second.fault is not None:
        return
    if first.graph.kernels != second.graph.kernels:
        return
    count: Counter[str | None] = Counter()
    nodes = zip(_kernels(first), _kernels(second), strict=True)
    for one, other in nodes:
        yield first, second, one, other, count[one.kernel]
        count[one.kernel] += 1


def _unsteady(seen: CaptureSeen, one: str, other: str) -> set[tuple[int, int, int]]:
    """Return the words that differ between captures of the same values: padding of structs.

    Each as the number of the kernel node, of its argument, and of the word in it.
    """
    first, second = seen.attempt(one), seen.attempt(other)
    if first is None or second is None or first.graph.kernels != second.graph.kernels:
        return set()
    return {
        (number, left.index, at)
        for number, nodes in enumerate(zip(_kernels(first), _kernels(second), strict=True))
        for left, right in zip(nodes[0].params, nodes[1].params, strict=False)
        for at, words in enumerate(zip(_words(left), _words(right), strict=False))
        if words[0] != words[1]
    }


def _words(param: ParamSeen) -> list[str]:
    """Return an argument in pieces of 4 bytes, in hexadecimal."""
    return [param.data[at : at + _WORD // 2] for at in range(0, len(param.data), _WORD // 2)]


def _kernels(attempt: AttemptSeen) -> list[NodeSeen]:
    return [node for node in attempt.graph.nodes if node.kind == "kernel"]


def _scalar(seen: CaptureSeen) -> Iterator[Verdict]:
    # in a larger struct a word that differs may be nobody's; it counts where results are wrong
    wrong = any(output.mismatch is not None for run in seen.replays for output in run.outputs)
    unsteady = _unsteady(seen, seen.replayed, "same") | _unsteady(seen, "double", "double again")
    for position, (_, _, one, other, number) in enumerate(_pairs(seen)):
        for left, right in zip(one.params, other.params, strict=False):
            noise = {at for node, index, at in unsteady if (node, index) == (position, left.index)}
            found = _scalar_change(left, right, noise)
            if found is None or (left.size > _SMALL and not wrong):
                continue
            before, after = found
            name = f" `{left.name}`" if left.name else ""
            whole = left.size <= 8
            yield Verdict(
                f"argument {left.index}{name} of `{one.title}` is {before} at the capture and "
                f"{after} with other values: a replay goes on with {before}",
                where=where_launched(seen, one.kernel, number),
                evidence={
                    "kernel": one.title,
                    "argument": left.index,
                    "bytes": left.size,
                    "captured": before,
                    "other_values": after,
                    "certain": whole,
                },
                severity=None if left.size <= _SMALL else "warning",
            )


def _scalar_change(left: ParamSeen, right: ParamSeen, noise: set[int]) -> tuple[str, str] | None:
    """Return the first word that differs in both captures, is no pointer and no noise."""
    if left.data == right.data or left.size != right.size:
        return None
    mine = {pointer.address for pointer in left.pointers}
    theirs = {pointer.address for pointer in right.pointers}
    one, other = _words(left), _words(right)
    for at in range(min(len(one), len(other))):
        if one[at] == other[at] or at in noise:
            continue
        pair = at - at % 2  # pointers are aligned
        if _address("".join(one[pair : pair + 2])) in mine:
            continue
        if _address("".join(other[pair : pair + 2])) in theirs:
            continue
        if len(one) == 2 and (one[1 - at] != other[1 - at] or one[1] not in _SIGNS):
            return _number(left.data), _number(right.data)
        return _number(one[at]), _number(other[at])
    return None


def _grid(seen: CaptureSeen) -> Iterator[Verdict]:
    for _, _, one, other, number in _pairs(seen):
        for what in ("grid", "block", "shared"):
            before, after = getattr(one, what), getattr(other, what)
            if before != after:
                yield Verdict(
                    f"the {what} of `{one.title}` is {before} at the capture and {after} with "
                    f"other values: a replay goes on with {before}",
                    where=where_launched(seen, one.kernel, number),
                    evidence={
                        "kernel": one.title,
                        "what": what,
                        "captured": before,
                        "other_values": after,
                    },
                )
    first, second = seen.attempt(seen.replayed), seen.attempt("double")
    if first is None or second is None or second.fault or first.graph.not_inspected:
        return
    before, after = Counter(first.graph.kernels), Counter(second.graph.kernels)
    if before != after:
        yield Verdict(
            "with other values the step launches other kernels: "
            f"{_difference(after, before)} more, {_difference(before, after)} less",
            evidence={"captured": dict(before), "other_values": dict(after)},
        )


def _difference(one: Counter[str], other: Counter[str]) -> str:
    return ", ".join(f"{count} x `{name}`" for name, count in (one - other).items()) or "none"


def _pointer(seen: CaptureSeen) -> Iterator[Verdict]:
    for first, second, one, other, number in _pairs(seen):
        for left, right in zip(one.params, other.params, strict=False):
            for mine, theirs in zip(left.pointers, right.pointers, strict=False):
                if mine.address == theirs.address:
                    continue
                if _private(mine, first) and _private(theirs, second):
                    continue  # torch's temporaries inside a capture are legal
                yield Verdict(
                    f"argument {left.index} of `{one.title}` points to {mine} at the capture and "
                    f"to {theirs} with other values",
                    where=where_launched(seen, one.kernel, number),
                    evidence={
                        "kernel": one.title,
                        "argument": left.index,
                        "captured": str(mine),
                        "other_values": str(theirs),
                        "certain": mine.sure,
                    },
                )
    for each in seen.rebound:
        if each.during == "refill" and in_graph(seen, each.before):
            yield Verdict(
                f"a refill binds `{each.path}` to other memory ({each.after:#x}); the graph reads "
                f"{each.before:#x}",
                evidence={"name": each.path, "captured": hex(each.before), "now": hex(each.after)},
            )


def _private(pointer: PointerSeen, attempt: AttemptSeen) -> bool:
    return pointer.space == "torch" and pointer.pool == attempt.pool


def _memoised(seen: CaptureSeen) -> Iterator[Verdict]:
    cold, warm = seen.attempt("fresh 0"), seen.attempt("fresh 2")
    if cold is None or warm is None or cold.fault or warm.fault:
        return
    if cold.graph.not_inspected or warm.graph.not_inspected:
        return
    before, after = Counter(cold.graph.kernels), Counter(warm.graph.kernels)
    if before != after:
        missing = _difference(before, after)
        yield Verdict(
            f"a fresh step records other kernels after two warm-ups than after none: {missing} "
            f"less, {_difference(after, before)} more. What the warm-up computed is not in the "
            "graph",
            evidence={"after_no_warm_up": dict(before), "after_two": dict(after)},
        )


def _random(seen: CaptureSeen) -> Iterator[Verdict]:
    for fault in seen.faults:
        if fault.stage == "capture" and _GENERATOR.search(fault.error):
            yield Verdict(
                f"the capture does not know the random generator: {fault.error}",
                where=fault.where,
                evidence={"error": fault.error},
            )
    eager, again = seen.trial("eager again"), seen.trial("again")
    if not captured(seen) or eager is None or again is None or again.drifts:
        return
    for drift in eager.drifts:
        if drift.right is None and (drift.relative is None or drift.relative > SMALL):
            yield Verdict(
                f"two eager runs give other numbers in `{drift.mismatch.output}`, two replays the "
                "same: the random state of the capture is replayed",
                evidence=drift.mismatch.evidence(),
            )


def _stale_plan(seen: CaptureSeen) -> Iterator[Verdict]:
    for each in seen.stale:
        name = f"`{each.path}`" if each.path else f"memory at {each.pointer.address:#x}"
        yield Verdict(
            f"`{each.kernel}` reads {name}, which no refill writes and which the step's own host "
            "code writes in an eager run: the replay uses the plan of an earlier step",
            where=where_launched(seen, each.kernel),
            evidence={"kernel": each.kernel, "memory": str(each.pointer)},
        )
    wrong = any(output.mismatch is not None for run in seen.replays for output in run.outputs)
    if captured(seen) and wrong:
        yield from _other_memory(seen)


def _other_memory(seen: CaptureSeen) -> Iterator[Verdict]:
    """Yield launches that got another pointer in the capture than in the warm-up."""
    warm, inside = (
        [call for call in seen.calls if call.phase == phase and call.pointers]
        for phase in ("warm-up", seen.replayed)
    )
    if [call.kernel for call in warm] != [call.kernel for call in inside]:
        return
    told = {each.pointer.address for each in seen.stale}
    located = {pointer.address: pointer for _, _, pointer in pointers_of(seen)}
    for before, now in zip(warm, inside, strict=True):
        for index, (old, new) in enumerate(zip(before.pointers, now.pointers, strict=False)):
            pointer = located.get(new)
            if old == new or pointer is None or new in told or not old:
                continue
            if pointer.pool == seen.pool or pointer.space not in ("torch", "cupy", "device"):
                continue
            told.add(new)
            yield Verdict(
                f"argument {index} of `{now.kernel}` is {pointer} in the capture and {old:#x} in "
                "the warm-up, and replays on other inputs are wrong: what prepares a step writes "
                "the one, the graph reads the other",
                where=now.where,
                evidence={
                    "kernel": now.kernel,
                    "argument": index,
                    "in_the_capture": str(pointer),
                    "in_the_warm_up": hex(old),
                },
            )


def _address(word: str) -> int:
    return int.from_bytes(_raw(word), "little")


def _raw(data: str) -> bytes:
    try:
        return bytes.fromhex(data)
    except ValueError:  # a record that was not made by a walk
        return b""


def _number(data: str) -> str:
    """Return the readings of some bytes that a person would take for a number."""
    raw = _raw(data)
    if len(raw) not in (1, 2, 4, 8):
        return f"0x{data}"
    whole = int.from_bytes(raw, "little", signed=True)
    if len(raw) < 4:
        return str(whole)
    real = struct.unpack("<f" if len(raw) == 4 else "<d", raw)[0]
    if abs(whole) > 1 << (16 if len(raw) == 4 else 40) and real == real and 1e-6 < abs(real) < 1e9:
        return f"{real:g}"
    return str(whole)


RULES = (
    Rule(
        "CV301",
        "a scalar of the host is frozen in the graph",
        "A kernel's argument by value is copied into the node at the capture. A length, a position "
        "or a scale that is a Python number stays what it was then: right at the first replay, "
        "wrong later, often only for longer sequences.",
        "Pass a pointer: keep the number in a device buffer that is written before each replay, "
        "and read it in the kernel.",
        _scalar,
    ),
    Rule(
        "CV302",
        "a grid or the choice of kernels is frozen in the graph",
        "A grid that is computed from a length on the host, a number of splits, a branch: the "
        "replay covers what was there at the capture and silently drops the rest.",
        "Launch a fixed grid that is large enough for the maximum, and let each block ask the "
        "device's lengths whether it has work.",
        _grid,
    ),
    Rule(
        "CV303",
        "the graph points to memory that moves",
        "The step, or what prepares it, allocates its metadata anew each time. The graph goes on "
        "reading the buffer of the capture, which is stale, or freed and somebody else's.",
        "Allocate once and write in place: `buffer[:n].copy_(new)`.",
        _pointer,
    ),
    Rule(
        "CV304",
        "a warm-up memoised work that the graph should hold",
        "What the step computes once and keeps (a mask, an index list, a plan) was computed in the "
        "warm-up. The capture finds it ready, so no replay ever computes it again.",
        "Compute it in every call, or before each replay into the same buffer; reset caches "
        "between warm-up and capture.",
        _memoised,
    ),
    Rule(
        "CV305",
        "the random numbers are those of the capture",
        "A seed and an offset that are passed by value are frozen: every replay draws the same "
        "numbers.",
        "Use torch's default generator, or register yours with graph.register_generator_state(); "
        "a kernel of your own reads seed and offset from a buffer.",
        _random,
    ),
    Rule(
        "CV306",
        "the graph reads a plan that only the step's host code writes",
        "plan() runs in Python at every eager call and at no replay. What it wrote at the capture "
        "is what all replays use.",
        "Make the plan on the device inside the graph, or call plan() before each replay and let "
        "it write the buffers of the capture.",
        _stale_plan,
    ),
)
