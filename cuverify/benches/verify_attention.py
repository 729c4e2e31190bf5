"""How long verify attention takes: ours, every peer that is here, and two floors.

One layer of Kimi K2 on one of eight GPUs: 8 heads, bf16 rows of 576 elements, page size 1, slots
scattered over a pool of a million rows; shapes may have other heads and element types, which our
attention alone is measured on. `us` is what one layer costs among others: up to 16 copies
over slots of their own in one replayed graph, with a cold L2 cache, divided by their number.
`alone_us` is one layer in a graph of its own, the graph's start included. Our layers let the kernel
behind them start early, which a copy does and few other kernels do: `in order` is the time of
layers that start when the one in front has ended.

Two floors stand beside each time: the roofline of the same run (rows read once at the speed of a
linear read, products at the speed of the tensor cores), and reading the same scattered rows alone.
Plans are excluded for everybody; ours is timed apart, because it serves all layers of a step.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from cuverify.bench import Record, Timing, gated, one_line, time_copies
from cuverify.comparison import READING
from cuverify.errors import ArgumentError, CaseError, CuverifyError
from cuverify.tolerances import PEER_ROW_ERROR
from cuverify.verify_shapes import HEADS, TARGETS_US, Shape, select

if TYPE_CHECKING:
    from cuverify.ceilings import Ceilings
    from cuverify.gqa_problem import GqaProblem
    from cuverify.peers import Missing, Peer, Prepared
    from cuverify.verify_problem import Problem

AnyShape = TypeVar("AnyShape", bound=Shape)

PORTABLE = "verify_attention, portable"
LEAST = "verify_attention, portable in 99 KB"
IN_ORDER = "verify_attention, in order"
OP, PLAN, CEILINGS = "verify_attention", "verify_attention, plan", "ceilings"


DEFAULT = (
    "1x1k:8", "1x4k:8", "1x16k:8", "1x16k:33", "1x64k:8", "1x64k:17", "1x64k:33", "1x64k:64",
    "1x180k:8", "1x180k:64", "4x16k:8", "16x1k:8", "16x4k:8", "16x16k:8", "16x16k:64", "ragged",
)  # fmt: skip
"""What is measured when no shapes are named."""

LAYERS = 61
"""Layers that one plan serves, in Kimi K2."""

REPEATS, ALONE_REPEATS = 7, 15
_SLOW_REPEATS = 3
_BILLION = 10**9  # bytes or operations that a ceiling's time is for


def run(
    device: str,
    *,
    shapes: Sequence[str] = (),
    peers: Sequence[str] = (),
    peers_dir: str | None = None,
    seconds: float | None = None,
) -> list[dict[str, Any]]:
    """Time attention on a GPU; nothing on a CPU, where the host lane says nothing about speed.

    Parameters
    ----------
    device : str
    shapes : sequence of str
        As for `cuverify.verify_shapes.select`; `DEFAULT` when empty.
    peers : sequence of str
        Names or patterns of peers; all that are here when empty, ``"none"`` for none.
    peers_dir : str, optional
        Folder with peers that are not installed.
    seconds : float, optional
        No shape is begun later than this.

    Returns
    -------
    list of dict
        A record for each peer that is missing, and one that names the shapes that were not begun.

    Raises
    ------
    CaseError
        There are no such shapes, peers or folder.
    """
    from cuverify.peers import MODULES

    try:
        chosen = select(shapes or DEFAULT)
        find_peers = peer_finder(peers, peers_dir, MODULES)
    except ArgumentError as error:
        raise CaseError(str(error)) from error
    if device != "cuda":
        return []
    from cuverify.ceilings import measure_ceilings
    from cuverify.verify_problem import new_pool

    started = time.monotonic()
    found, missing = find_peers()
    records = [absent(peer.name, peer.reason) for peer in missing]
    ceilings = measure_ceilings()
    records.extend(ceiling_records(ceilings))
    pool = new_pool()

    def measure(shape: Shape) -> Iterator[dict[str, Any]]:
        return _attention(shape, pool, ceilings, found)

    records.extend(within(chosen, measure, seconds, lambda: time.monotonic() - started))
    return records


def peer_finder(
    wanted: Sequence[str], folder: str | None, modules: Sequence[str]
) -> Callable[[], tuple[list[Peer], list[Missing]]]:
    """Check what a caller says of peers, and return what loads them.

    Parameters
    ----------
    wanted : sequence of str
        Names or patterns; all when empty, ``"none"`` for none.
    folder : str or None
        With peers that are not installed.
    modules : sequence of str
        As for `cuverify.peers.find`.

    Raises
    ------
    ArgumentError
        There is no such folder, or a pattern matches no name.
    """
    from cuverify import peers as others

    place = others.folder_of(folder)
    if list(wanted) == ["none"]:
        return lambda: ([], [])
    others.check_names(wanted, modules)
    return lambda: others.find(wanted, place, modules)


def ceiling_records(ceilings: Ceilings) -> Iterator[dict[str, Any]]:
    """Yield a record for each ceiling: what a billion bytes or operations take."""
    for what, moved, flops, rate in (
        ("reading rows in their order", _BILLION, None, ceilings.read),
        ("reading rows in random order", _BILLION, None, ceilings.scattered),
        ("bf16 matrix product", None, _BILLION, ceilings.tensor),
    ):
        us = 1e6 * _BILLION / rate
        yield Record(CEILINGS, {"what": what}, us=us, bytes=moved, flops=flops).to_json()


def within(
    shapes: Sequence[AnyShape],
    measure: Callable[[AnyShape], Iterator[dict[str, Any]]],
    seconds: float | None,
    elapsed: Callable[[], float],
    op: str = OP,
) -> Iterator[dict[str, Any]]:
    """Yield the records of shapes until the time is spent or the device is lost.

    Parameters
    ----------
    shapes : sequence of Shape
    measure : callable
        Yields the records of one shape.
    seconds : float or None
        No shape is begun when so many have passed.
    elapsed : callable
        The seconds that have passed.
    op : str
        Of a record that has no time.

    Yields
    ------
    dict
        The last one says which shapes were left out, and why, if any were.
    """
    for number, shape in enumerate(shapes):
        if seconds is not None and elapsed() >= seconds:
            yield _left(op, shapes[number:], f"the {seconds:g} seconds were spent")
            return
        try:
            yield from measure(shape)
        except Exception as error:
            yield Record(op, facts(shape), error=one_line(error)).to_json()
            if _device_is_lost():
                yield _left(op, shapes[number + 1 :], "the device was lost")
                return


def _left(op: str, shapes: Sequence[AnyShape], why: str) -> dict[str, Any]:
    listed = " ".join(shape.name for shape in shapes)
    return Record(op, {"left out": len(shapes)}, error=f"{why}; not measured: {listed}").to_json()


def absent(peer: str, reason: str, op: str = OP) -> dict[str, Any]:
    """Return the record of a peer that is not here."""
    return Record(op, {}, peer=peer, error=f"not here: {reason}").to_json()


def facts(shape: Shape) -> dict[str, int | float | str]:
    """Return what a record says of a shape."""
    target = TARGETS_US.get(shape.name)
    return {
        "name": shape.name,
        "batch": shape.batch,
        "prefix rows": shape.prefix_rows,
        "tree": shape.tree,
        "heads": shape.heads,
        **({} if shape.stored == "bf16" else {"stored": shape.stored}),
        **({} if target is None else {"target_us": target}),
    }


def _device_is_lost() -> bool:
    import torch

    if not torch.cuda.is_available():
        return False
    try:
        torch.cuda.synchronize()
    except RuntimeError:
        return True
    return False


Time = Callable[..., dict[str, Any]]


def _attention(
    shape: Shape, pool: Any, ceilings: Ceilings, peers: Sequence[Peer]
) -> Iterator[dict[str, Any]]:
    """Yield the records of one shape."""
    from cuverify.verify_problem import Problem

    problem = Problem(shape, pool)
    timed = timer(OP, shape, ceilings, lambda: problem.expected)
    reading = _reading(problem, timed)
    yield reading
    timed = functools.partial(timed, read_us=reading["us"])
    yield from _ours(problem, timed)
    for peer in peers:
        if shape.stored == "bf16" and shape.heads == HEADS and peer.takes(shape):
            yield theirs(peer, problem, problem.expected, timed)


def timer(op: str, shape: Shape, ceilings: Ceilings, expected: Callable[[], Any]) -> Time:
    """Return what judges and times somebody's steps, and makes a record of it.

    Parameters
    ----------
    op : str
        Of the records.
    shape : Shape
    ceilings : Ceilings
        What the floors are made from.
    expected : callable
        Returns the right outputs: float64, shape (N, H, columns).

    Returns
    -------
    callable
        Takes a peer's name (None for ours), what was prepared, a check that says what is wrong, and
        by keyword `read_us` (what reading the rows takes) and `slow` (few repeats must do).
    """
    floor_us = shape.roofline_us(ceilings.read, ceilings.tensor)

    def timed(
        name: str | None,
        prepared: Prepared,
        check: Callable[[], str | None],
        *,
        read_us: float | None = None,
        slow: bool = False,
    ) -> dict[str, Any]:
        warmups = 1 if slow else 3
        repeats = _SLOW_REPEATS if slow else REPEATS
        steps, out = prepared.steps, prepared.out

        def alone() -> Timing:
            return time_copies(steps[:1], ALONE_REPEATS, warmups=warmups)

        return gated(
            op,
            {**facts(shape), **prepared.chosen, "copies": len(steps)},
            check=check,
            timing=lambda: time_copies(steps, repeats, warmups=warmups),
            alone=None if len(steps) == 1 else alone,
            error=None if out is None else lambda: relative_error(out, expected()),
            floor_us=floor_us,
            read_us=read_us,
            bytes=shape.bytes,
            flops=shape.flops,
            peer=name,
        )

    return timed


def _reading(problem: Problem, timed: Time) -> dict[str, Any]:
    import torch

    from cuverify.ceilings import read_step
    from cuverify.peers import Prepared

    rows = problem.pool.view(torch.bfloat16)  # reading knows no types
    made = [read_step(rows, slots) for slots in problem.prefix_slots]

    def check() -> str | None:
        read, words = made[-1]
        read()
        return judge_reading(words, problem.pool[problem.prefix_slots[-1].long()])

    return timed(READING, Prepared([read for read, _ in made], None), check)


def _ours(problem: Problem, timed: Time) -> Iterator[dict[str, Any]]:
    """Yield the records of our attention, of its plan, and of the text that every GPU can run."""
    from cuverify.own_attention import OwnAttention, judge_copies
    from cuverify.peers import Prepared

    own = OwnAttention.of(problem)
    prepared = Prepared(own.layers, own.out, {"splits": own.splits})
    yield timed(None, prepared, own.judge)
    steps = own.in_order()
    in_order = Prepared(steps, own.out, {"splits": own.splits})

    def judge_in_order() -> str | None:
        return judge_copies(steps, own.out, own.lse, problem)

    yield {**timed(None, in_order, judge_in_order), "op": IN_ORDER}
    if own.variant != "portable":
        other = OwnAttention.of(problem, variant="portable")
        prepared = Prepared(other.layers, other.out, {"splits": other.splits})
        yield {**timed(None, prepared, other.judge), "op": PORTABLE}
        if problem.shape.name in TARGETS_US:
            yield _least(problem, timed)
    row = gated(
        PLAN,
        {**facts(problem.shape), "layers": LAYERS},
        check=own.judge_plan,
        timing=lambda: time_copies([own.make_plan], ALONE_REPEATS),
    )
    if row["us"] is not None:
        row["shape"]["us_a_layer"] = row["us"] / LAYERS
    yield row


def _least(problem: Problem, timed: Time) -> dict[str, Any]:
    """Return the record of the portable text as GPUs with 99 KB get it."""
    from cuverify.ops.verify_attention import least_values
    from cuverify.own_attention import OwnAttention
    from cuverify.peers import Prepared

    try:
        own = OwnAttention.of(problem, variant="portable", values=least_values("portable"))
    except CuverifyError as error:  # where kernels are only loaded, and this one is not there
        return Record(LEAST, facts(problem.shape), error=one_line(error)).to_json()
    prepared = Prepared(own.layers, own.out, {"splits": own.splits})
    return {**timed(None, prepared, own.judge), "op": LEAST}


def theirs(
    peer: Peer, problem: Problem | GqaProblem, expected: Any, timed: Time, op: str = OP
) -> dict[str, Any]:
    """Return the record of a peer.

    Parameters
    ----------
    peer : Peer
    problem : Problem or GqaProblem
    expected : tensor of float64, shape (N, H, columns)
    timed : callable
        Judges and times what is prepared, and makes the record.
    op : str
        Of a peer that could not be prepared.
    """
    try:
        prepared = peer.prepare(problem)
    except Exception as error:
        if _device_is_lost():
            raise
        facts_of = facts(problem.shape)
        return Record(op, facts_of, peer=peer.name, error=one_line(error)).to_json()
    return timed(peer.name, prepared, lambda: judge_peer(prepared, expected), slow=peer.slow)


# --- the gate ------------------------------------------------------------------------------------


def judge_peer(prepared: Prepared, expected: Any) -> str | None:
    """Run a peer's first and last copy and return what is wrong with a result, None if nothing is.

    Parameters
    ----------
    prepared : Prepared
    expected : tensor of float64, shape (N, H, columns)
    """
    for step in dict.fromkeys((prepared.steps[0], prepared.steps[-1])):
        prepared.out.fill_(float("nan"))
        step()
        errors = row_errors(prepared.out, expected)
        worst = int(errors.argmax())  # NaN counts as the largest
        found = float(errors.reshape(-1)[worst])
        if not found <= PEER_ROW_ERROR:
            token, head = divmod(worst, errors.shape[1])
            wrong = int((~(errors <= PEER_ROW_ERROR)).sum())
            return (
                f"out[{token}, {head}] is off by {found:.3g} of its length, allowed "
                f"{PEER_ROW_ERROR:g}; so are {wrong} of {errors.numel()} rows in all"
            )
    return None


def row_errors(out: Any, expected: Any) -> Any:
    """Return the length of each row's error over the row's own: float64, shape (N, H)."""
    return (out.double() - expected).norm(dim=-1) / expected.norm(dim=-1)


def relative_error(out: Any, expected: Any) -> float:
    """Return the length of all errors over that of all results."""
    return float((out.double() - expected).norm() / expected.norm())


def judge_reading(words: Any, rows: Any) -> str | None:
    """Return what is wrong with the words that were read from some rows, None if nothing is."""
    import torch

    return None if _xor(words) == _xor(rows.view(torch.int32)) else "the rows were not read"


def _xor(words: Any) -> int:
    """Return the exclusive or of all 32-bit words of a tensor."""
    import numpy as np

    return int(np.bitwise_xor.reduce(words.cpu().numpy().reshape(-1)))
