"""The study of churned pools: its page is what it prints, and its figures mean what they say."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cuverify.errors import ArgumentError
from cuverify.relocation_study import KINDS, TRACES, Contiguity, churned, contiguity, decay
from cuverify.workload import request_lengths

PAGE = (Path(__file__).parent.parent / "docs" / "relocation-study.md").read_text(encoding="utf-8")


def test_what_is_measured_is_what_it_says() -> None:
    pool, _ = churned("conv", "fifo", num_slots=4000, turnover=3.0)
    found = Contiguity.of(pool)
    rows, lens = pool.requests()
    slots = [pool.table()[row, :length] for row, length in zip(rows, lens, strict=True)]
    runs = [1 + int((np.diff(line) != 1).sum()) for line in slots]
    assert (found.requests, found.tokens, found.runs) == (len(rows), lens.mean(), np.mean(runs))
    assert found.run_tokens == lens.sum() / sum(runs)
    assert found.span == max(line.max() for line in slots) / 4000


def test_relocated_pools_differ_as_they_should() -> None:
    pools = {kind: churned("code", kind, num_slots=4000, turnover=3.0) for kind in KINDS}
    found = {kind: Contiguity.of(pool, moved) for kind, (pool, moved) in pools.items()}
    assert found["contiguous"].runs == 1.0
    assert found["contiguous"].span == found["compacted"].span < found["fifo"].span
    assert found["contiguous"].moved > found["compacted"].moved > found["fifo"].moved == 0
    assert found["contiguous"].pages_per_tile < found["fifo"].pages_per_tile
    with pytest.raises(ArgumentError, match="kind='lifo'"):
        churned("code", "lifo")


def test_tables_have_a_line_for_everything() -> None:
    assert len(list(contiguity(num_slots=2000, turnover=1.0))) == 2 + len(TRACES) * len(KINDS)
    lines = list(decay(num_slots=2000, steps=(0, 3)))
    assert len(lines) == 2 + len(TRACES) * 3 * 2
    assert all(line.count("|") == 6 for line in lines)


def test_the_page_holds_the_tables_of_the_traces() -> None:
    if request_lengths("conv").source.startswith("drawn"):
        pytest.skip("the traces are not at hand")
    for line in contiguity():
        assert line in PAGE
