"""What strategies share: boundaries that come often, checks of bounds, lists of examples."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any, TypeVar

import hypothesis
from hypothesis import strategies as st
from hypothesis.errors import InvalidArgument

T = TypeVar("T")

# Examples that hypothesis draws for a test that says nothing; a profile with more scales all tests.
_USUAL = 100


def drawn(strategy: st.SearchStrategy[T], number: int, *, seed: int = 0) -> list[T]:
    """Return examples of a strategy, the same ones for the same seed: for checks and benchmarks.

    Parameters
    ----------
    strategy : SearchStrategy
        What to draw from.
    number : int
        How many examples; fewer come where the strategy has no more.
    seed : int
        Which ones.

    Returns
    -------
    list
    """
    if number < 1:
        return []
    examples: list[T] = []

    @hypothesis.seed(seed)
    @hypothesis.settings(
        max_examples=number,
        database=None,
        deadline=None,
        phases=[hypothesis.Phase.generate],
        suppress_health_check=list(hypothesis.HealthCheck),
    )
    @hypothesis.given(strategy)
    def collect(example: T) -> None:
        examples.append(example)

    collect()
    return examples


def examples(number: int, **more: Any) -> hypothesis.settings:
    """Return the settings of a test with so many examples, and as many times more in a large run.

    The number counts for hypothesis's usual 100 examples; under a profile with 2,000 of them a test
    gets 20 times as many. There is no deadline: kernels compile in the middle of a test.

    Parameters
    ----------
    number : int
        Examples under a profile of 100.
    **more
        Further settings of `hypothesis.settings`.

    Returns
    -------
    hypothesis.settings
        A decorator, as hypothesis's own.

    Examples
    --------
    >>> import hypothesis
    >>> with_profile = hypothesis.settings.default.max_examples // 100
    >>> examples(30).max_examples == 30 * with_profile
    True
    """
    present = hypothesis.settings.default
    scaled = max(1, number * (present.max_examples if present else _USUAL) // _USUAL)
    return hypothesis.settings(max_examples=scaled, deadline=None, **more)


@functools.lru_cache(maxsize=1024)
def whole(high: int) -> st.SearchStrategy[int]:
    """Return 0 to `high`, evenly."""
    return st.integers(0, high)


@functools.lru_cache(maxsize=1024)
def often(low: int, high: int) -> st.SearchStrategy[int]:
    """Return the bounds about as often as all the rest, and shrink towards the lower one."""
    return st.one_of(st.sampled_from([low, high]), st.integers(low, high))


def draw_edged(draw: st.DrawFn, low: int, high: int, edges: tuple[int, ...] = ()) -> int:
    """Draw the bounds and some edges about as often as all the rest, and shrink to the lower one.

    One choice makes one number: an edge shrinks to the least number that fails too, whether that is
    an edge or not.
    """
    number = high - low + 1
    # as many codes for the edges as for all numbers
    code: int = draw(whole(2 * number - 1))
    if code < number:
        return low + code
    special = _edges(low, high, edges)
    return special[(code - number) * len(special) // number]


@functools.lru_cache(maxsize=1024)
def _edges(low: int, high: int, edges: tuple[int, ...]) -> list[int]:
    return sorted({low, high, *(edge for edge in edges if low <= edge <= high)})


def pick(draw: st.DrawFn, values: Sequence[T]) -> T:
    """Draw one of some values, and shrink towards the first; a single one takes no choice."""
    return values[draw(whole(len(values) - 1))] if len(values) > 1 else values[0]


def pair(what: str, low: int, high: int, least: int) -> None:
    """Refuse bounds that make no sense."""
    if low < least:
        raise InvalidArgument(f"min_{what}={low!r} must be at least {least}")
    if high < low:
        raise InvalidArgument(f"max_{what}={high!r} is below min_{what}={low!r}")


def chosen(name: str, values: Iterable[object], known: Iterable[object]) -> None:
    """Refuse an empty list of values to choose from, and values that are not known."""
    values, known = tuple(values), tuple(known)
    if not values or any(value not in known for value in values):
        raise InvalidArgument(f"{name}={values!r} must be chosen from {known!r}")
