"""Greedy tokens: which may differ, and that a wrong attention is noticed."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from cuverify.bench import Timing
from cuverify.benches import token_exactness
from cuverify.benches.token_exactness import Head, allowed_errors, run
from cuverify.errors import ArgumentError
from cuverify.tokens import Agreement, agreement, gap_bounds
from cuverify.verify_problem import Problem, new_pool
from cuverify.verify_shapes import Shape


def test_tokens_are_counted_by_their_gap() -> None:
    found = agreement(
        np.array([5, 6, 7, 8]), np.array([5, 6, 1, 1]), np.array([9.0, 0.1, 0.1, 9.0]), np.ones(4)
    )
    assert found == Agreement(rows=4, equal=2, close=2, excused=1, wrong=1)
    assert str(found) == (
        "2 of 4 tokens are equal; 1 differ where the gap is below the bound, as in 2 rows, and 1 "
        "where it is not"
    )
    with pytest.raises(ArgumentError, match="one length"):
        agreement(np.array([5]), np.array([5, 6]), np.ones(1), np.ones(1))


def test_a_bound_grows_with_the_error_and_the_head() -> None:
    bounds = gap_bounds(np.array([1.0, 2.0]), 0.5)
    assert bounds == pytest.approx([6 * 2**0.5 / 2, 6 * 2**0.5])


@pytest.fixture(scope="module")
def problem() -> Problem:
    return Problem(Shape((300,) * 4, 33), new_pool(1400, "cpu"), copies=1)


@pytest.fixture(scope="module")
def head(problem: Problem) -> Head:
    return Head.random(8 * 512, problem.pool.device, 512)


def compared(problem: Problem, head: Head, out: torch.Tensor) -> Agreement:
    right, gaps = head.best_two(problem.expected)
    tokens, _ = head.best_two(out)
    return agreement(tokens, right, gaps, gap_bounds(allowed_errors(problem), head.deviation))


def test_rounding_is_excused_and_leaves_most_rows_to_be_judged(
    problem: Problem, head: Head
) -> None:
    rounded = torch.from_numpy(problem.baseline.out)
    found = compared(problem, head, rounded)
    assert found.wrong == 0
    assert found.rows == 132
    assert found.close < 66


def test_a_wrong_attention_is_not_excused(problem: Problem, head: Head) -> None:
    assert compared(problem, head, problem.expected.roll(1, dims=0)).wrong > 60
    scrambled = problem.expected.clone()
    scrambled[:, 3] = scrambled[:, 4]  # one head of eight
    assert compared(problem, head, scrambled).wrong > 0
    assert compared(problem, head, torch.full_like(scrambled, torch.nan)).wrong > 0


def test_a_record_counts_and_refuses(
    problem: Problem, head: Head, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(token_exactness, "time_copies", lambda *given, **named: Timing(9.0, 0.0, 1))
    bounds = gap_bounds(allowed_errors(problem), head.deviation)
    judge = token_exactness._Judge(head, head.best_two(problem.expected), bounds)
    out = problem.new_output()
    ours = judge.record(None, lambda: out.copy_(torch.from_numpy(problem.baseline.out)), out)
    assert (ours["us"], ours["error"]) == (9.0, None)
    assert ours["shape"]["tokens rows"] == 132
    assert ours["shape"]["tokens wrong"] == 0
    assert "tokens as ours" not in ours["shape"]
    wrong = judge.record("other", lambda: out.copy_(problem.expected.roll(1, dims=0)), out)
    assert wrong["us"] is None
    assert wrong["shape"]["tokens as ours"] < 66
    assert "where it is not" in wrong["error"]


def test_the_head_is_the_same_in_every_run() -> None:
    one, other = (Head.random(64, torch.device("cpu"), 16) for _ in range(2))
    assert torch.equal(one.weights, other.weights)
    assert one.deviation == pytest.approx(1 / 8, rel=0.1)


def test_the_benchmark_has_nothing_to_say_without_a_gpu() -> None:
    assert run("cpu") == []


@pytest.mark.gpu
def test_ours_leaves_the_tokens_alone() -> None:
    (record,) = run("cuda", peers=["none"])
    assert record["error"] is None
    assert record["shape"]["tokens rows"] == 10_240
    assert record["shape"]["tokens wrong"] == 0
