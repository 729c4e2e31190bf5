"""Draft trees: every form read and written, what is no tree refused by name, pictures."""

from __future__ import annotations

import doctest
import xml.etree.ElementTree as ElementTree
from typing import Any

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from cuverify import tree as tree_module
from cuverify.errors import ArgumentError
from cuverify.tree import DraftTree, MaskMode, sglang_mask_row_bytes, sglang_mask_size

SVG = "{http://www.w3.org/2000/svg}"
MODES: tuple[MaskMode, ...] = ("full", "query_only", "bit_packed")
SHAPES = {"chain": DraftTree.chain, "star": DraftTree.star, "comb": DraftTree.comb}

# What SGLang's own tests expect of its tree kernels; the mask rows of G3 are derived by its rule.
G1 = [
    # next_token, next_sibling, parents
    ([1, 2, -1, 4, 5, -1], [-1, 3, -1, -1, -1, -1], [-1, 0, 1, 0, 3, 4]),
    ([4, 2, 3, -1, 5, -1], [-1, -1, -1, -1, 1, -1], [-1, 0, 1, 2, 0, 4]),
]
# What G1 and, with thresholds of 0, G2 accept: a path of each tree, as nodes of the batch.
G1_ACCEPTED = [[0, 3, 4, 5], [6, 10, 11]]
G2_ACCEPTED = [[0, 1, 2], [6, 10, 11]]
G3_TOPK = 4
G3_PARENT_LIST = [
    [-1, 0, 1, 2, 3, 4, 8, 9, 10, 20, 24, 21, 28],
    [-1, 0, 1, 2, 3, 4, 5, 6, 7, 24, 28, 20, 21],
]
G3_SELECTED = [[0, 1, 4, 8, 20, 24, 36], [0, 4, 5, 6, 7, 24, 36]]
G3_PARENTS = [[-1, 0, 0, 1, 2, 3, 4, 5], [-1, 0, 1, 1, 1, 1, 3, 6]]
G3_SEQ_LENS = [5, 10]
G3_POSITIONS = [[5, 6, 6, 7, 7, 8, 8, 9], [10, 11, 12, 12, 12, 12, 13, 14]]
G3_NEXT_TOKEN = [[1, 3, 4, 5, 6, 7, -1, -1], [1, 2, -1, 6, -1, -1, 7, -1]]
G3_NEXT_SIBLING = [[-1, 2, -1, -1, -1, -1, -1, -1], [-1, -1, 3, 4, 5, -1, -1, -1]]
G3_TOKENS = [
    [29974, 29896, 29906, 29889, 29974, 29946, 29896, 29946],
    [13, 13, 22550, 4136, 16492, 8439, 29871, 29941],
]
G3_ROWS = [
    "10000000 11000000 10100000 11010000 10101000 11010100 10101010 11010101",
    "10000000 11000000 11100000 11010000 11001000 11000100 11010010 11010011",
]
G4_MASK = [[1, 0, 0, 0], [1, 1, 0, 0], [1, 0, 1, 0], [1, 0, 1, 1]]


def table(rows: str) -> np.ndarray[Any, np.dtype[np.bool_]]:
    return np.array([[bit == "1" for bit in row] for row in rows.split()])


def naive_ancestors(parents: list[int], node: int) -> set[int]:
    """Return a node and everything above it, by the definition."""
    seen = {node}
    while parents[node] >= 0:
        node = parents[node]
        seen.add(node)
    return seen


@st.composite
def parent_lists(draw: st.DrawFn, max_tokens: int = 40) -> list[int]:
    number = draw(st.integers(1, max_tokens))
    return [-1, *(draw(st.integers(0, node - 1)) for node in range(1, number))]


# Golden vectors


@pytest.mark.parametrize(("next_token", "next_sibling", "parents"), G1)
def test_g1_links(next_token: list[int], next_sibling: list[int], parents: list[int]) -> None:
    tree = DraftTree.from_links(next_token, next_sibling)
    assert tree.parents.tolist() == parents
    # The second tree links the children of the root as 4, 1: they come back as 1, 4.
    assert DraftTree.from_links(*tree.links()) == tree


@pytest.mark.parametrize("accepted", [G1_ACCEPTED, G2_ACCEPTED])
def test_g1_and_g2_accept_paths_of_these_trees(accepted: list[list[int]]) -> None:
    for request, path in enumerate(accepted):
        nodes = tuple(node - 6 * request for node in path)
        tree = DraftTree.from_links(*G1[request][:2])
        assert tree.ancestors(nodes[-1]) == nodes


@pytest.mark.parametrize("request_", [0, 1])
def test_g3_builds(request_: int) -> None:
    tree = DraftTree.from_parents(G3_PARENTS[request_], G3_TOKENS[request_])
    next_token, next_sibling = tree.links()
    assert next_token.tolist() == G3_NEXT_TOKEN[request_]
    assert next_sibling.tolist() == G3_NEXT_SIBLING[request_]
    seq_len = G3_SEQ_LENS[request_]
    assert tree.positions(seq_len).tolist() == G3_POSITIONS[request_]
    rows = table(G3_ROWS[request_])
    np.testing.assert_array_equal(tree.sglang_mask("query_only"), rows)
    np.testing.assert_array_equal(
        tree.sglang_mask("full", seq_len), np.hstack([np.ones((8, seq_len), bool), rows])
    )
    packed = [sum(1 << k for k, bit in enumerate(row) if bit) for row in rows.tolist()]
    assert tree.sglang_mask("bit_packed").tolist() == [[byte] for byte in packed]
    assert tree.visibility().tolist() == [[word] for word in packed]
    assert tree.tokens is not None and tree.tokens.tolist() == G3_TOKENS[request_]


@pytest.mark.parametrize("request_", [0, 1])
def test_g3_selection_decodes_to_its_parents(request_: int) -> None:
    # A selected id names the edge it came from: its quotient by topk is an entry of parent_list,
    # which holds the id of the parent; the entry in front is the root.
    selected = G3_SELECTED[request_]
    above = [G3_PARENT_LIST[request_][edge // G3_TOPK] for edge in selected]
    root = [edge // G3_TOPK == 0 for edge in selected]
    parents = [
        0 if at_root else 1 + selected.index(parent)
        for at_root, parent in zip(root, above, strict=True)
    ]
    assert [-1, *parents] == G3_PARENTS[request_]


def test_g4_mask_becomes_links() -> None:
    for tree in (
        DraftTree.from_mask(G4_MASK),
        DraftTree.from_sglang_mask(np.array(G4_MASK, bool), mode="query_only", num_tokens=4),
    ):
        assert [link.tolist() for link in tree.links()] == [[1, -1, 3, -1], [-1, 2, -1, -1]]
        assert tree.positions(12).tolist() == [12, 13, 13, 14]


def test_g5_parents_become_links() -> None:
    tree = DraftTree.from_parents([-1, 0, 0, 1])
    assert [link.tolist() for link in tree.links()] == [[1, 3, -1, -1], [-1, 2, -1, -1]]
    assert tree.positions(7).tolist() == [7, 8, 8, 9]


# Every form


@given(parent_lists())
@example([-1])
@example([-1, *range(7)])
@example([-1] + [0] * 63)
@example([-1] + [0] * 64)
def test_a_tree_is_what_its_parents_say(parents: list[int]) -> None:
    tree = DraftTree.from_parents(parents)
    number = len(parents)
    above = [naive_ancestors(parents, node) for node in range(number)]
    below = [[node for node in range(number) if parents[node] == at] for at in range(number)]
    assert tree.num_tokens == len(tree) == number
    assert tree.depths.tolist() == [len(seen) - 1 for seen in above]
    assert tree.max_depth == max(len(seen) for seen in above) - 1
    assert [tree.children(node) for node in range(number)] == [tuple(b) for b in below]
    assert [tree.ancestors(node) for node in range(number)] == [tuple(sorted(a)) for a in above]
    assert tree.is_leaf.tolist() == [not nodes for nodes in below]
    assert tree.positions(1000).tolist() == [1000 + d for d in tree.depths.tolist()]
    next_token, next_sibling = tree.links()
    assert next_token.dtype == next_sibling.dtype == np.int64
    assert next_token.tolist() == [min(nodes, default=-1) for nodes in below]
    assert next_sibling.tolist() == [-1] + [
        min((s for s in below[parents[node]] if s > node), default=-1) for node in range(1, number)
    ]
    assert tree.mask().tolist() == [[j in above[i] for j in range(number)] for i in range(number)]


@given(parent_lists(max_tokens=70), st.integers(0, 3))
def test_words_hold_the_mask(parents: list[int], more: int) -> None:
    tree = DraftTree.from_parents(parents)
    words = tree.visibility(tree.num_words + more)
    assert words.shape == (len(parents), -(-len(parents) // 64) + more)
    assert words.dtype == np.uint64
    for i, row in enumerate(words.tolist()):
        seen = {64 * w + k for w, word in enumerate(row) for k in range(64) if word >> k & 1}
        assert seen == naive_ancestors(parents, i)


@given(parent_lists(max_tokens=34), st.integers(0, 5), st.data())
def test_every_form_can_be_read_back(parents: list[int], seq_len: int, data: st.DataObject) -> None:
    tokens = data.draw(st.one_of(st.none(), st.just([3 * n % 7 for n in range(len(parents))])))
    tree = DraftTree.from_parents(parents, tokens)
    assert DraftTree.from_links(*tree.links(), tokens) == tree
    assert DraftTree.from_mask(tree.mask(), tokens) == tree
    assert DraftTree.from_mask(tree.mask().astype(np.uint8) * 255, tokens) == tree
    for mode in MODES:
        if mode == "bit_packed" and len(parents) > 32:
            continue
        mask = tree.sglang_mask(mode, seq_len)
        assert mask.size == sglang_mask_size(mode, len(parents), seq_len)
        # as a static buffer holds it: flat, as bytes, the last call's content behind
        held = np.concatenate([mask.reshape(-1).view(np.uint8), np.full(5, 1, np.uint8)])
        for given_mask in (mask, held):
            read = DraftTree.from_sglang_mask(
                given_mask, mode=mode, num_tokens=len(parents), seq_len=seq_len, tokens=tokens
            )
            assert read == tree


@given(parent_lists(), st.randoms(use_true_random=False))
def test_any_order_becomes_topological(parents: list[int], random: Any) -> None:
    number = len(parents)
    new = list(range(number))
    random.shuffle(new)
    moved, tokens = [0] * number, [0] * number
    for node, parent in enumerate(parents):
        moved[new[node]] = new[parent] if parent >= 0 else -1
        tokens[new[node]] = 100 + node
    tree, order = DraftTree.reordered(moved, tokens)
    assert sorted(order.tolist()) == list(range(number))
    for node, old in enumerate(order.tolist()):
        parent = int(tree.parents[node])
        assert (int(order[parent]) if parent >= 0 else -1) == moved[old]
    assert tree.tokens is not None and tree.tokens.tolist() == [tokens[old] for old in order]
    same, order = DraftTree.reordered(parents)
    assert same == DraftTree.from_parents(parents) and order.tolist() == list(range(number))


@given(parent_lists(), st.randoms(use_true_random=False))
def test_siblings_may_be_linked_in_any_order(parents: list[int], random: Any) -> None:
    next_token, next_sibling = [-1] * len(parents), [-1] * len(parents)
    order = list(range(1, len(parents)))
    random.shuffle(order)
    for node in order:
        next_sibling[node] = next_token[parents[node]]
        next_token[parents[node]] = node
    assert DraftTree.from_links(next_token, next_sibling).parents.tolist() == parents


@pytest.mark.parametrize(
    ("number", "row_bytes"), [(1, 1), (8, 1), (9, 2), (16, 2), (17, 4), (32, 4)]
)
def test_bit_packed_rows(number: int, row_bytes: int) -> None:
    tree = DraftTree.random(number, 5, reach=3)
    mask = tree.sglang_mask("bit_packed")
    assert sglang_mask_row_bytes(number) == row_bytes
    assert mask.shape == (number, row_bytes) and mask.dtype == np.uint8
    words = mask.view(f"<u{row_bytes}").reshape(-1)
    assert words.tolist() == tree.visibility()[:, 0].tolist()
    for given_mask in (mask, mask.reshape(-1), words, words.astype(f">u{row_bytes}")):
        read = DraftTree.from_sglang_mask(given_mask, mode="bit_packed", num_tokens=number)
        assert read == tree


def test_columns_of_the_prefix_are_not_read() -> None:
    tree = DraftTree.comb(5)
    mask = tree.sglang_mask("full", 3)
    mask[:, :3] = False
    assert DraftTree.from_sglang_mask(mask, mode="full", num_tokens=5, seq_len=3) == tree


@pytest.mark.parametrize("number", [1, 2, 3, 8, 64, 65, 1024])
@pytest.mark.parametrize("shape", [*SHAPES, "random", "deep"])
def test_shapes(shape: str, number: int) -> None:
    if shape in SHAPES:
        tree = SHAPES[shape](number)
    else:
        tree = DraftTree.random(
            number, np.random.default_rng(1), reach=2 if shape == "deep" else None
        )
        assert tree == DraftTree.random(number, 1, reach=2 if shape == "deep" else None)
    assert tree.num_tokens == number
    assert tree.visibility().shape == (number, -(-number // 64))
    assert tree.mask().sum(axis=1).tolist() == (tree.depths + 1).tolist()
    assert DraftTree.from_mask(tree.mask()) == tree
    assert DraftTree.from_links(*tree.links()) == tree
    depth, leaves = tree.max_depth, int(tree.is_leaf.sum())
    if shape == "chain":
        assert (depth, leaves) == (number - 1, 1)
    elif shape == "star":
        assert (depth, leaves) == (min(number - 1, 1), max(number - 1, 1))
    elif shape == "comb":
        assert (depth, leaves) == (number // 2, (number + 1) // 2)
    elif shape == "deep":
        assert 2 * depth >= number - 1


def test_a_chain_sees_all_in_front() -> None:
    words = DraftTree.chain(130).visibility()
    assert words[63].tolist() == [2**64 - 1, 0, 0]
    assert words[64].tolist() == [2**64 - 1, 1, 0]
    assert words[129].tolist() == [2**64 - 1, 2**64 - 1, 3]


def test_trees_are_values() -> None:
    parents = np.array([-1, 0, 0])
    tree = DraftTree.from_parents(parents, [5, 6, 6])
    parents[2] = 1
    assert tree == DraftTree([-1, 0, 0], [5, 6, 6])  # type: ignore[arg-type]
    assert tree != DraftTree.from_parents([-1, 0, 0]) and tree != DraftTree.from_parents(
        [-1, 0, 1], [5, 6, 6]
    )
    assert len({tree, DraftTree.from_parents([-1, 0, 0], [5, 6, 6])}) == 1
    assert tree.parents.dtype == np.int32
    assert tree.tokens is not None and tree.tokens.dtype == np.int64
    assert tree != "tree"
    for held in (tree.parents, tree.tokens, tree.depths, tree.is_leaf):
        with pytest.raises(ValueError, match="read-only"):
            held[0] = 1
    for fresh in (tree.visibility(), tree.mask(), *tree.links(), tree.positions(0)):
        fresh[0] = 0  # theirs to write
    assert tree.visibility().tolist() == [[1], [3], [5]]
    assert repr(tree) == "DraftTree(3 nodes, depth 1, parents=[-1, 0, 0], with tokens)"
    assert repr(DraftTree.chain(100)).endswith("13, 14, ...])")


# What is no tree


@pytest.mark.parametrize(
    ("parents", "said"),
    [
        ([], r"parents=\[\]: 0 nodes: a tree has 1 to 1024"),
        ([-1] + [0] * 1024, "1025 nodes: a tree has 1 to 1024"),
        ([0, 0], "no root: no node has parent -1"),
        ([1, 2, 0], "no root"),
        ([-1, 0, -1], r"parents=\[-1, 0, -1\]: two roots: nodes 0 and 2"),
        ([-1, 2, 1], r"cycle: node 1 is its own ancestor \(1 -> 2 -> 1\)"),
        ([-1, 0, 2], r"cycle: node 2 is its own ancestor \(2 -> 2\)"),
        ([-1, 0, 1, 5, 3, 4], r"cycle: node 3 is its own ancestor \(3 -> 5 -> 4 -> 3\)"),
        ([-1, *range(2, 20), 1], r"cycle: node 1 is its own ancestor \(1 -> .* -> 8 -> \.\.\.\)"),
        ([-1, 2, 0], "parent after child: node 1 has parent 2; DraftTree.reordered"),
        ([1, -1], "the root is node 1 and must be node 0"),
        ([-1, 0, 3], "node 2 has parent 3, which is no node"),
        ([-1, -2], "node 1 has parent -2, which is no node"),
        ([-1, 2**40], "node 1 has parent 1099511627776"),
        ([-1.0, 0.0], "parents='float64': must hold integers"),
        ([True, False], "parents='bool': must hold integers"),
        ([[-1, 0]], r"parents=\[1, 2\]: must be a flat list, not 2-dimensional"),
        (np.array([2**64 - 1], np.uint64), "does not fit into 64 bits"),
    ],
)
def test_parents_that_are_no_tree(parents: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said) as caught:
        DraftTree.from_parents(parents)
    assert caught.value.argument == "parents"
    if "reordered" not in said and "must be node 0" not in said:
        with pytest.raises(ArgumentError, match=said):
            DraftTree.reordered(parents)


@given(st.lists(st.integers(-1, 6), min_size=1, max_size=6))
def test_a_list_is_refused_or_a_tree(parents: list[int]) -> None:
    # An independent judge: each node is looked at once.
    legal = parents[0] == -1 and all(0 <= p < node for node, p in enumerate(parents) if node)
    if legal:
        assert DraftTree.from_parents(parents).parents.tolist() == parents
    else:
        with pytest.raises(ArgumentError, match="^parents="):
            DraftTree.from_parents(parents)


@pytest.mark.parametrize(
    ("next_token", "next_sibling", "said"),
    [
        ([], [], "next_token=.*0 nodes"),
        ([1, -1], [-1], "next_sibling=.*one entry for each of 2 nodes"),
        ([2, -1], [-1, -1], "next_token=2: node 0 is linked to no node"),
        ([1, -1], [-1, 7], "next_sibling=7: node 1 is linked to no node"),
        ([1, -1], [-1, -2], "next_sibling=-2: node 1 is linked"),
        ([-1, -1], [1, -1], "next_sibling=1: node 0, the root, has no sibling"),
        ([-1, -1], [-1, -1], "node 1 is not reached from the root"),
        ([0, -1], [-1, -1], "next_token=0: node 0 is reached again from node 0"),
        ([1, 0], [-1, -1], "next_token=0: node 0 is reached again from node 1"),
        ([1, -1, -1], [-1, 2, 1], "next_sibling=1: node 1 is reached again from node 2"),
        ([1, 2, -1], [-1, 2, -1], "node 2 is reached again"),
        ([2, -1, 1], [-1, -1, -1], "parent after child: node 1 has parent 2"),
        ([1.0, -1.0], [-1, -1], "next_token='float64': must hold integers"),
    ],
)
def test_links_that_are_no_tree(next_token: Any, next_sibling: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        DraftTree.from_links(next_token, next_sibling)


@pytest.mark.parametrize(
    ("mask", "said"),
    [
        (np.zeros((0, 0), bool), "0 nodes"),
        (np.ones((2, 3), bool), r"mask=\[2, 3\]: must be square"),
        (np.ones(4, bool), r"mask=\[4\]: must be square"),
        (np.eye(2), "mask='float64': must be bool or integers"),
        (table("10 10"), "node 1 does not see itself"),
        (table("11 11"), "node 0 sees node 1, which stands behind it"),
        (table("10 01"), "node 1 does not see the root"),
        (table("100 110 011"), "node 2 does not see the root"),
        (table("1000 1100 1010 1111"), "node 3 sees node 1, unlike its parent 2"),
        (table("1000 1100 1110 1011"), "node 3 does not see node 1, unlike its parent 2"),
        (np.tri(1025, dtype=bool), "1025 nodes"),
    ],
)
def test_masks_that_are_no_tree(mask: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        DraftTree.from_mask(mask)


@given(parent_lists(max_tokens=8), st.data())
def test_no_flipped_bit_goes_unseen(parents: list[int], data: st.DataObject) -> None:
    # Another mask is another tree, or none.
    tree = DraftTree.from_parents(parents)
    mask = tree.mask()
    node = st.integers(0, len(parents) - 1)
    at = data.draw(st.tuples(node, node))
    mask[at] ^= True
    try:
        other = DraftTree.from_mask(mask)
    except ArgumentError:
        return
    assert other != tree
    np.testing.assert_array_equal(other.mask(), mask)


@pytest.mark.parametrize(
    ("mask", "how", "said"),
    [
        (np.ones(15, bool), {"mode": "query_only", "num_tokens": 4}, "mask=15: too short: mode 'query_only' needs 16"),
        (np.ones(27, bool), {"mode": "full", "num_tokens": 4, "seq_len": 3}, "needs 28 elements for 4 nodes behind a prefix of 3"),
        (np.ones(17, np.uint8), {"mode": "bit_packed", "num_tokens": 9}, "needs 18 elements for 9 nodes"),
        (np.ones(8, np.uint16), {"mode": "bit_packed", "num_tokens": 9}, "needs 18 elements"),
        (np.ones(18, np.uint32), {"mode": "bit_packed", "num_tokens": 9}, "mask='uint32': a bit-packed mask of 9 nodes is uint8, or uint16"),
        (np.ones(999, np.uint8), {"mode": "bit_packed", "num_tokens": 33}, "num_tokens=33: a bit-packed mask takes at most 32 nodes"),
        (np.ones(9, np.float32), {"mode": "query_only", "num_tokens": 3}, "mask='float32': must be bool"),
        (np.ones(9, bool), {"mode": "packed", "num_tokens": 3}, "mode='packed': unknown; there are"),
        (np.ones(9, bool), {"mode": "full", "num_tokens": 3, "seq_len": -1}, "seq_len=-1: a prefix cannot have a negative length"),
        (np.ones(9, bool), {"mode": "query_only", "num_tokens": 0}, "num_tokens=0: a tree has 1 to 1024"),
        (np.ones(9, bool), {"mode": "query_only", "num_tokens": 1025}, "num_tokens=1025: a tree has 1 to 1024"),
        (np.array([1, 3, 13], np.uint8), {"mode": "bit_packed", "num_tokens": 3}, "row 2 has bit 3 set, but there are 3 nodes: clear"),
        (np.array([1, 3, 3], np.uint8), {"mode": "bit_packed", "num_tokens": 3}, "node 2 does not see itself"),
        (np.array([1, 7, 5], np.uint8), {"mode": "bit_packed", "num_tokens": 3}, "node 1 sees node 2, which stands behind"),
    ],
)  # fmt: skip
def test_sglang_masks_that_are_no_tree(mask: Any, how: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        DraftTree.from_sglang_mask(mask, **how)


@pytest.mark.parametrize(
    ("call", "said"),
    [
        (lambda t: t.positions(-1), "seq_len=-1: a prefix cannot"),
        (lambda t: t.sglang_mask("full", -3), "seq_len=-3"),
        (lambda t: t.sglang_mask("bit_packed"), "num_tokens=65"),
        (lambda t: t.sglang_mask("none"), "mode='none'"),
        (lambda t: t.visibility(1), "words=1: 65 nodes need 2 words"),
        (lambda t: t.children(65), "node=65: the tree has nodes 0 to 64"),
        (lambda t: t.ancestors(-1), "node=-1: the tree has nodes"),
        (lambda t: t.to_text(marked=[65]), "marked=65"),
        (lambda t: t.to_svg(labels=["a"]), "labels=1: need one label for each of 65 nodes"),
        (lambda t: t.to_text(max_nodes=0), "max_nodes=0: must be at least 1"),
        (lambda t: DraftTree.chain(0), "num_tokens=0: a tree has 1 to 1024"),
        (lambda t: DraftTree.star(1025), "num_tokens=1025"),
        (lambda t: DraftTree.comb(-1), "num_tokens=-1"),
        (lambda t: DraftTree.chain(2.5), "num_tokens=2.5: must be an integer"),  # type: ignore[arg-type]
        (lambda t: DraftTree.random(4, 0, reach=0), "reach=0"),
        (
            lambda t: DraftTree.from_parents([-1, 0], [1]),
            r"tokens=\[1\]: need one token for each of 2",
        ),
        (lambda t: DraftTree.from_parents([-1], ["a"]), "tokens=.*must hold integers"),
        (
            lambda t: DraftTree.reordered([1, -1], [1]),
            r"tokens=\[1\]: need one token for each of 2",
        ),
    ],
)
def test_questions_that_make_no_sense(call: Any, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        call(DraftTree.chain(65))


# Pictures


def test_text_draws_branches() -> None:
    tree = DraftTree.from_parents(G3_PARENTS[1], G3_TOKENS[1])
    assert tree.to_text(marked=[0, 1, 3]).splitlines() == [
        "0*:13 ─ 1*:13",
        "├── 2:22550",
        "├── 3*:4136 ─ 6:29871 ─ 7:29941",
        "├── 4:16492",
        "└── 5:8439",
    ]
    assert DraftTree.from_parents([-1, 0, 0, 1, 1, 2, 2]).to_text(labels="abcdefg").splitlines() == [
        "0 'a'",
        "├── 1 'b'",
        "│   ├── 3 'd'",
        "│   └── 4 'e'",
        "└── 2 'c'",
        "    ├── 5 'f'",
        "    └── 6 'g'",
    ]  # fmt: skip
    assert DraftTree.chain(1).to_text() == "0"


@pytest.mark.parametrize("shape", SHAPES)
def test_text_has_an_end(shape: str) -> None:
    text = SHAPES[shape](1024).to_text(max_nodes=20)
    assert text.endswith("\n... and 1004 more nodes")
    assert "more" not in SHAPES[shape](1024).to_text(max_nodes=1024)


@pytest.mark.parametrize("shape", [*SHAPES, "random"])
@pytest.mark.parametrize("number", [1, 2, 17, 1024])
def test_svg_is_well_formed(shape: str, number: int) -> None:
    tree = DraftTree.random(number, 3) if shape == "random" else SHAPES[shape](number)
    root = ElementTree.fromstring(tree.to_svg())
    assert root.tag == f"{SVG}svg" and tree._repr_svg_() == tree.to_svg()
    circles = root.findall(f"{SVG}circle")
    assert len(circles) == number and len(root.findall(f"{SVG}line")) == number - 1
    assert [text.text for text in root.findall(f"{SVG}text")] == [str(n) for n in range(number)]
    centres = {(c.get("cx"), c.get("cy")) for c in circles}
    assert len(centres) == number, "no node hides another"
    width, height = float(root.get("width", "")), float(root.get("height", ""))
    assert all(0 < float(x or -1) < width and 0 < float(y or -1) < height for x, y in centres)


def test_svg_marks_a_path_and_escapes_labels() -> None:
    tree = DraftTree.from_parents([-1, 0, 0, 1])
    labels = ["<s>", "a & b", '"\x00\x1b', "longer than it should be"]
    root = ElementTree.fromstring(tree.to_svg(labels=labels, marked=tree.ancestors(3)))
    texts = [text.text for text in root.findall(f"{SVG}text")]
    assert texts[1::2] == ["<s>", "a & b", '"\ufffd\ufffd', "longer …"]
    fills = [circle.get("fill") for circle in root.findall(f"{SVG}circle")]
    assert fills[0] == fills[1] == fills[3] != fills[2]
    strokes = [line.get("stroke") for line in root.findall(f"{SVG}line")]
    assert strokes[0] == strokes[2] != strokes[1]


def test_examples_in_docstrings() -> None:
    found = doctest.testmod(tree_module)
    assert found.attempted > 0 and found.failed == 0
