"""What a sorted free list (Tier 0) and moved rows (Tier 1) buy on pools that traffic has churned.

``python -m cuverify.relocation_study`` prints the tables of docs/relocation-study.md. It reads the
Azure traces where they are at hand, as `cuverify.workload.request_lengths` does. Attention times on
the same pools are a benchmark: ``cuverify bench churned_attention``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import get_args

import numpy as np

from cuverify.errors import ArgumentError
from cuverify.kv_layout import KvLayout
from cuverify.workload import ChurnedPool, CommitWay, FreeOrder, Trace, request_lengths

SLOTS = 100_000
TREE = 16
ROW_BYTES = 1152
DRAM_PAGE = 2048
TILE = 64
TURNOVER = 40.0
ORDERS: tuple[FreeOrder, ...] = ("fifo", "sorted", "kept")
STEPS = (0, 10, 100, 300, 1000)
TRACES: tuple[Trace, ...] = get_args(Trace)

KINDS = (*ORDERS, "compacted", "contiguous")
"""The free-list orders, and a FIFO pool after each relocation."""


@dataclass(frozen=True)
class Contiguity:
    """How a pool lies.

    Attributes
    ----------
    requests : int
        Requests that run.
    tokens : float
        Mean tokens of one.
    runs : float
        Mean runs of one.
    run_tokens : float
        Tokens of a run, all tokens over all runs.
    pages_per_tile : float
        DRAM pages of 2 KiB that 64 rows touch.
    span : float
        Where the highest live slot is, as a share of the pool.
    moved : int
        Rows that the relocation moved.
    """

    requests: int
    tokens: float
    runs: float
    run_tokens: float
    pages_per_tile: float
    span: float
    moved: int = 0

    @classmethod
    def of(cls, pool: ChurnedPool, moved: int = 0) -> Contiguity:
        """Measure a pool."""
        layout = KvLayout.from_pool(pool, tree_tokens=1, stale_tail=False)
        found = layout.fragmentation()
        live = pool.live_slots()
        return cls(
            requests=layout.num_real,
            tokens=float(found.tokens.mean()),
            runs=float(found.runs.mean()),
            run_tokens=float(found.tokens.sum() / max(1, int(found.runs.sum()))),
            pages_per_tile=layout.units_per_tile(ROW_BYTES, DRAM_PAGE, tile=TILE),
            span=float(live.max() / pool.num_slots) if len(live) else 0.0,
            moved=moved,
        )


def churned(
    trace: Trace,
    kind: str,
    *,
    num_slots: int = SLOTS,
    turnover: float = TURNOVER,
    commit: CommitWay = "rows",
    occupancy: float = 0.9,
    seed: int = 0,
) -> tuple[ChurnedPool, int]:
    """Return a pool that one service's requests have churned, and how many rows were moved then.

    Parameters
    ----------
    trace : {"conv", "code"}
    kind : str
        One of `KINDS`.
    num_slots, turnover, commit, occupancy, seed
        See `cuverify.workload.ChurnedPool`.

    Returns
    -------
    pool : ChurnedPool
    moved : int
    """
    if kind not in KINDS:
        raise ArgumentError("kind", kind, f"must be one of {KINDS}")
    order: FreeOrder = "fifo"
    for known in ORDERS:
        order = known if kind == known else order
    pool = ChurnedPool(
        num_slots,
        lengths=request_lengths(trace, seed=seed),
        tree_tokens=TREE,
        free_list=order,
        commit=commit,
        occupancy=occupancy,
        seed=seed,
    )
    pool.churn(turnover)
    if kind == "compacted":
        return pool, pool.compact().count
    if kind == "contiguous":
        return pool, pool.make_contiguous().count
    return pool, 0


def contiguity(*, num_slots: int = SLOTS, turnover: float = TURNOVER) -> Iterator[str]:
    """Yield the lines of the table of pools, both services, all kinds."""
    columns = (
        "service", "pool", "requests", "tokens each", "runs each", "tokens a run", "KiB a run",
        "DRAM pages a tile", "highest slot", "rows moved",
    )  # fmt: skip
    yield f"| {' | '.join(columns)} |"
    yield "|---" * len(columns) + "|"
    for trace in TRACES:
        for kind in KINDS:
            pool, moved = churned(trace, kind, num_slots=num_slots, turnover=turnover)
            found = Contiguity.of(pool, moved)
            yield (
                f"| {trace} | {kind} | {found.requests} | {found.tokens:.0f} | {found.runs:.1f} | "
                f"{found.run_tokens:.1f} | {found.run_tokens * ROW_BYTES / 1024:.1f} | "
                f"{found.pages_per_tile:.1f} | {100 * found.span:.0f} % | {found.moved} |"
            )


def decay(*, num_slots: int = SLOTS, steps: tuple[int, ...] = STEPS) -> Iterator[str]:
    """Yield the lines of the table of both commits over many steps, from a contiguous pool on."""
    head = " | ".join(f"after {step}" for step in steps)
    yield f"| service | free list | commit | {head} |"
    yield "|---|---|---|" + "---|" * len(steps)
    ways: tuple[CommitWay, ...] = get_args(CommitWay)
    for trace in TRACES:
        for order in ORDERS:
            for way in ways:
                pool, _ = churned(trace, order, num_slots=num_slots, turnover=1.0, commit=way)
                pool.make_contiguous()
                found = []
                for step in range(max(steps) + 1):
                    if step in steps:
                        found.append(f"{Contiguity.of(pool).run_tokens:.1f}")
                    pool.step()
                yield f"| {trace} | {order} | by {way} | {' | '.join(found)} |"


def main() -> None:
    """Print all tables."""
    for trace in TRACES:
        lengths = request_lengths(trace)
        prompt, generated = (np.median(x) for x in (lengths.prompt, lengths.generated))
        known = "drawn" if lengths.source.startswith("drawn") else "the trace"
        print(f"{trace}: {known}, {len(lengths.prompt)} requests, ", end="")
        print(f"medians {prompt:.0f} + {generated:.0f}")
    for table in (contiguity(), decay()):
        print()
        for line in table:
            print(line, flush=True)


if __name__ == "__main__":
    main()
