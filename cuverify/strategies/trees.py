"""Draft trees, from one node to as many as a step verifies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Literal, get_args

from hypothesis import strategies as st

from cuverify.strategies.draws import chosen, draw_edged, pair, pick, whole
from cuverify.tree import DraftTree
from cuverify.verify_workload import drafted_tree

TreeShape = Literal["chain", "star", "comb", "free", "random", "best-first"]

TREE_SHAPES: tuple[TreeShape, ...] = get_args(TreeShape)

TREE_EDGES = (1, 2, 8, 9, 16, 17, 32, 33, 63, 64, 65, 128, 129)
"""Sizes at which something begins: a row tile, a visibility word, a tree of budget 2^n."""

# Nodes whose parents are drawn one by one and shrink one by one; those of a larger tree behind them
# come from a seed.
_FINE_NODES = 16

_SEEDS = st.integers(0, 2**32 - 1)


@st.composite
def draft_trees(
    draw: st.DrawFn,
    /,
    *,
    min_tokens: int = 1,
    max_tokens: int = 64,
    shapes: Sequence[TreeShape] = TREE_SHAPES,
) -> DraftTree:
    """Return a strategy for draft trees.

    Drawn often: the fewest and the most nodes, and 1, 2, 8, 9, 16, 17, 32, 33, 63, 64, 65, 128 and
    129 where they lie between. Shrinks to fewer nodes, then to the shape that is named first, and a
    free tree to low parents.

    Parameters
    ----------
    min_tokens, max_tokens : int
        Nodes, the root included; up to 1024.
    shapes : sequence of str
        Kinds to choose from: ``chain``, ``star``, ``comb`` (a spine with a leaf at every node),
        ``free`` (parents drawn one by one), ``random`` (of some depth, from a seed), ``best-first``
        (by the algorithm of DDTree over peaked log-probabilities; its nodes have tokens).

    Returns
    -------
    SearchStrategy of DraftTree

    Examples
    --------
    >>> from hypothesis import find
    >>> find(draft_trees(), lambda tree: tree.max_depth > 1).parents.tolist()
    [-1, 0, 1]
    """
    pair("tokens", min_tokens, max_tokens, 1)
    pair("tokens", max_tokens, 1024, 1)
    chosen("shapes", shapes, TREE_SHAPES)
    return draw_tree(draw, draw_edged(draw, min_tokens, max_tokens, TREE_EDGES), shapes)


def draw_tree(draw: st.DrawFn, nodes: int, shapes: Sequence[TreeShape] = TREE_SHAPES) -> DraftTree:
    """Draw a tree of so many nodes."""
    if nodes < 3 and not {"chain", "star", "comb", "free", "random"}.isdisjoint(shapes):
        return DraftTree.chain(nodes)  # there is no other
    return _MAKERS[pick(draw, shapes)](draw, nodes)


def _free(draw: st.DrawFn, nodes: int) -> DraftTree:
    fine = min(nodes, _FINE_NODES)
    parents = [-1, *[draw(whole(node - 1)) for node in range(1, fine)]]
    if nodes > fine:
        rest = DraftTree.random(nodes, draw(_SEEDS))
        parents.extend(rest.parents[fine:].tolist())
    return DraftTree.from_parents(parents)


def _random(draw: st.DrawFn, nodes: int) -> DraftTree:
    reach = pick(draw, (None, 2, 3, 4, 8))
    return DraftTree.random(nodes, draw(_SEEDS), reach=reach)


def _best_first(draw: st.DrawFn, nodes: int) -> DraftTree:
    # one or two depths make wide trees, more of them deep ones
    depth = pick(draw, (15, 7, 3, 2, 1))
    return drafted_tree(nodes, draw(_SEEDS), depth=depth)


_MAKERS: dict[TreeShape, Callable[[st.DrawFn, int], DraftTree]] = {
    "chain": lambda draw, nodes: DraftTree.chain(nodes),
    "star": lambda draw, nodes: DraftTree.star(nodes),
    "comb": lambda draw, nodes: DraftTree.comb(nodes),
    "free": _free,
    "random": _random,
    "best-first": _best_first,
}
