"""How long grouped-query verify attention takes: ours, its peers, and two floors.

One layer of a rank, bf16, heads of 128, slots scattered over pools of 2 GB; shapes are those of
`cuverify.gqa_shapes`, a DFlash drafter's block among them. `us` is what one layer costs among
others: up to 16 copies over slots of their own in one replayed graph, with a cold L2 cache, divided
by their number. `alone_us` is one layer in a graph of its own. Plans are excluded for everybody.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

from cuverify.benches.verify_attention import (
    absent,
    ceiling_records,
    judge_reading,
    peer_finder,
    theirs,
    timer,
    within,
)
from cuverify.comparison import READING
from cuverify.errors import ArgumentError, CaseError
from cuverify.gqa_shapes import GqaShape, select_gqa

if TYPE_CHECKING:
    from cuverify.ceilings import Ceilings
    from cuverify.gqa_problem import GqaProblem
    from cuverify.peers import Peer, Prepared

OP = "verify_gqa"

DEFAULT = (
    "1x4k:8@8x1", "1x64k:8@8x1", "1x64k:64@8x1", "16x4k:16@8x1", "1x64k:8@4x2", "16x4k:8@4x8",
    "1x4k:block16@4x2", "1x64k:block16@4x2",
)  # fmt: skip
"""What is measured when no shapes are named."""


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
        As for `cuverify.gqa_shapes.select_gqa`; `DEFAULT` when empty.
    peers : sequence of str
        Names or patterns of peers; all that are here when empty, ``"none"`` for none.
    peers_dir : str, optional
        Folder with peers that are not installed.
    seconds : float, optional
        No shape is begun later than this.

    Returns
    -------
    list of dict

    Raises
    ------
    CaseError
        There are no such shapes, peers or folder.
    """
    from cuverify.peers import GQA_MODULES

    try:
        chosen = select_gqa(shapes or DEFAULT)
        find_peers = peer_finder(peers, peers_dir, GQA_MODULES)
    except ArgumentError as error:
        raise CaseError(str(error)) from error
    if device != "cuda":
        return []
    from cuverify.ceilings import measure_ceilings

    started = time.monotonic()
    found, missing = find_peers()
    records = [absent(peer.name, peer.reason, OP) for peer in missing]
    ceilings = measure_ceilings()
    records.extend(ceiling_records(ceilings))

    def measure(shape: GqaShape) -> Iterator[dict[str, Any]]:
        return attention(shape, ceilings, found)

    records.extend(within(chosen, measure, seconds, lambda: time.monotonic() - started, OP))
    return records


def attention(
    shape: GqaShape, ceilings: Ceilings, peers: Sequence[Peer]
) -> Iterator[dict[str, Any]]:
    """Yield the records of one shape: reading alone, ours, and the peers'."""
    from cuverify.gqa_problem import GqaProblem, OwnGqa
    from cuverify.peers import Prepared

    problem = GqaProblem(shape)
    timed = timer(OP, shape, ceilings, lambda: problem.bounds.out)
    record = timed(READING, *_reading(problem))
    yield record
    timed = functools.partial(timed, read_us=record["us"])
    own = OwnGqa.of(problem)
    chosen = {"splits": own.splits, "rows": own.layers[0].rows}
    yield timed(None, Prepared(own.layers, own.out, chosen), own.judge)
    for peer in peers:
        if peer.takes(shape):
            yield theirs(peer, problem, problem.bounds.out, timed, OP)


def _reading(problem: GqaProblem) -> tuple[Prepared, Callable[[], str | None]]:
    """Return what reads the keys and values of each copy's prefix alone, and its check."""
    import torch

    from cuverify.ceilings import read_step
    from cuverify.peers import Prepared

    pool = problem.pools.flatten(2).flatten(0, 1)
    slots = problem.pools.shape[1]
    rows = [torch.cat([prefix, prefix + slots]) for prefix in problem.prefix_slots]
    made = [read_step(pool, each) for each in rows]

    def check() -> str | None:
        read, words = made[-1]
        read()
        return judge_reading(words, pool[rows[-1].long()])

    return Prepared([read for read, _ in made], None), check
