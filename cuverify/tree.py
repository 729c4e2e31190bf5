"""Draft trees: what a drafter proposes, in every form in which a verifier is told about it.

A tree is a list of parents in topological order. Links, visibility words, positions and SGLang's
three masks are views of it, and each of them can be read back.
"""

from __future__ import annotations

import heapq
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

from cuverify import drawing
from cuverify.errors import ArgumentError

MaskMode = Literal["full", "query_only", "bit_packed"]

MAX_TOKENS = 1024
"""Most nodes of a tree: SGLang builds trees with one thread a node."""

MAX_BIT_PACKED_TOKENS = 32
"""Most nodes of a tree in SGLang's bit-packed mask: a row is one word of at most 4 bytes."""


@dataclass(frozen=True, eq=False, repr=False)
class DraftTree:
    """A draft tree: node 0 is the root, and every other node stands behind its parent.

    Equal trees compare equal and may be keys of a dict. Tokens may repeat, below one parent too.

    Parameters
    ----------
    parents : array_like of int, shape (T,)
        Parent of each node, -1 for the root. 1 <= T <= 1024. Copied.
    tokens : array_like of int, shape (T,), optional
        Token of each node. Copied.

    Attributes
    ----------
    parents : ndarray of int32, shape (T,), read-only
        Parent of each node; ``parents[0] == -1`` and ``0 <= parents[i] < i`` elsewhere.
    tokens : ndarray of int64, shape (T,), read-only, or None
        Token of each node.

    Raises
    ------
    ArgumentError
        `parents` is no tree in topological order (the message names the node), or `tokens` do not
        fit it.

    Examples
    --------
    >>> tree = DraftTree.from_parents([-1, 0, 0, 1])
    >>> tree.depths.tolist(), tree.positions(7).tolist()
    ([0, 1, 1, 2], [7, 8, 8, 9])
    >>> print(tree.to_text())
    0
    ├── 1 ─ 3
    └── 2
    """

    parents: NDArray[np.int32]
    tokens: NDArray[np.int64] | None = None

    def __post_init__(self) -> None:
        parents = _checked_parents(self.parents)
        object.__setattr__(self, "parents", _frozen(parents, np.int32))
        if self.tokens is not None:
            tokens = _integers("tokens", self.tokens)
            if tokens.shape != parents.shape:
                raise ArgumentError(
                    "tokens", tokens.tolist(), f"need one token for each of {len(parents)} nodes"
                )
            object.__setattr__(self, "tokens", _frozen(tokens, np.int64))

    # Makers

    @classmethod
    def from_parents(cls, parents: ArrayLike, tokens: ArrayLike | None = None) -> DraftTree:
        """Make a tree from the parent of each node.

        Parameters
        ----------
        parents : array_like of int, shape (T,)
            -1 for node 0, the root; elsewhere the index of an earlier node.
        tokens : array_like of int, shape (T,), optional
            Token of each node.

        Returns
        -------
        DraftTree

        Raises
        ------
        ArgumentError
            No root, two roots, a cycle, a parent out of range or behind its child, T out of range,
            or another number of tokens. `reordered` puts any tree into topological order.
        """
        return cls(parents, tokens)  # type: ignore[arg-type]  # both are converted

    @classmethod
    def reordered(
        cls, parents: ArrayLike, tokens: ArrayLike | None = None
    ) -> tuple[DraftTree, NDArray[np.int64]]:
        """Make a tree from parents in any order: nodes are renumbered, parents first.

        Nodes keep their order wherever it is topological already.

        Parameters
        ----------
        parents : array_like of int, shape (T,)
            Parent of each node, -1 for the root, which may stand anywhere.
        tokens : array_like of int, shape (T,), optional
            Token of each node.

        Returns
        -------
        tree : DraftTree
            The tree.
        order : ndarray of int64, shape (T,)
            Node i of the tree is node ``order[i]`` of the input.

        Raises
        ------
        ArgumentError
            No root, two roots, a cycle, or a parent out of range.
        """
        given = _integers("parents", parents)
        _check_tree("parents", given)
        below: list[list[int]] = [[] for _ in given]
        ready: list[int] = []
        for node, parent in enumerate(given.tolist()):
            (ready if parent < 0 else below[parent]).append(node)
        order: list[int] = []
        while ready:
            node = heapq.heappop(ready)
            order.append(node)
            for child in below[node]:
                heapq.heappush(ready, child)
        old = np.array(order, np.int64)
        new = np.empty_like(old)
        new[old] = np.arange(len(old))
        moved = given[old]
        moved[1:] = new[moved[1:]]
        if tokens is None:
            return cls.from_parents(moved), old
        given_tokens = _integers("tokens", tokens)
        if given_tokens.shape != given.shape:
            raise ArgumentError(
                "tokens", given_tokens.tolist(), f"need one token for each of {len(given)} nodes"
            )
        return cls.from_parents(moved, given_tokens[old]), old

    @classmethod
    def from_links(
        cls, next_token: ArrayLike, next_sibling: ArrayLike, tokens: ArrayLike | None = None
    ) -> DraftTree:
        """Make a tree from SGLang's links (``retrieve_next_token``, ``retrieve_next_sibling``).

        Siblings may be linked in any order; `links` gives them in ascending order again.

        Parameters
        ----------
        next_token : array_like of int, shape (T,)
            First child of each node, -1 where it has none.
        next_sibling : array_like of int, shape (T,)
            Next child of the same parent, -1 behind the last.
        tokens : array_like of int, shape (T,), optional
            Token of each node.

        Returns
        -------
        DraftTree

        Raises
        ------
        ArgumentError
            A link out of range, a node that is reached twice (a cycle, or two parents) or never,
            or a child in front of its parent.
        """
        first = _integers("next_token", next_token)
        other = _integers("next_sibling", next_sibling)
        _check_count("next_token", first)
        if other.shape != first.shape:
            raise ArgumentError(
                "next_sibling", other.tolist(), f"need one entry for each of {len(first)} nodes"
            )
        for name, link in (("next_token", first), ("next_sibling", other)):
            wrong = np.flatnonzero((link < -1) | (link >= len(link)))
            if len(wrong):
                raise ArgumentError(
                    name,
                    int(link[wrong[0]]),
                    f"node {wrong[0]} is linked to no node; use -1 or 0 to {len(link) - 1}",
                )
        if other[0] >= 0:
            raise ArgumentError("next_sibling", int(other[0]), "node 0, the root, has no sibling")
        parents = np.full(len(first), -2, np.int64)
        parents[0] = -1
        child, sibling = first.tolist(), other.tolist()
        ready = [0]
        while ready:
            node = ready.pop()
            name, via, at = "next_token", node, child[node]
            while at >= 0:
                if parents[at] != -2:
                    raise ArgumentError(
                        name,
                        at,
                        f"node {at} is reached again from node {via}; "
                        "links must reach each node once, without a cycle",
                    )
                parents[at] = node
                ready.append(at)
                name, via, at = "next_sibling", at, sibling[at]
        lost = np.flatnonzero(parents == -2)
        if len(lost):
            raise ArgumentError(
                "next_token, next_sibling",
                (child, sibling),
                f"node {lost[0]} is not reached from the root; {len(lost)} nodes are not",
            )
        return cls.from_parents(_checked_parents(parents, "next_token"), tokens)

    @classmethod
    def from_mask(cls, mask: ArrayLike, tokens: ArrayLike | None = None) -> DraftTree:
        """Make a tree from who sees whom among the nodes.

        Parameters
        ----------
        mask : array_like of bool or int, shape (T, T)
            Not zero at (i, j) where node i sees node j: where j is i or one of its ancestors.
        tokens : array_like of int, shape (T,), optional
            Token of each node.

        Returns
        -------
        DraftTree

        Raises
        ------
        ArgumentError
            The mask is not square, or not that of a tree in topological order: a node does not see
            itself or the root, sees a later node, or sees another set than its parent and itself.
        """
        return cls.from_parents(_parents_of_mask(_table("mask", mask) != 0, "mask"), tokens)

    @classmethod
    def from_sglang_mask(
        cls,
        mask: ArrayLike,
        *,
        mode: MaskMode,
        num_tokens: int,
        seq_len: int = 0,
        tokens: ArrayLike | None = None,
    ) -> DraftTree:
        """Make a tree from one request's part of SGLang's tree mask.

        Columns of the prefix are not read, as SGLang's Triton path reads none: where nobody does,
        SGLang leaves them as they are. Static buffers are longer than their content, so what stands
        behind the last row is not read either.

        Parameters
        ----------
        mask : array_like of bool or uint8, any shape
            Its elements in C order. A bit-packed mask may also be uint16 or uint32 words, one a
            row.
        mode : {"full", "query_only", "bit_packed"}
            ``full``: rows of ``seq_len + num_tokens`` elements. ``query_only``: rows of
            ``num_tokens`` elements. ``bit_packed``: rows of 1, 2 or 4 bytes for up to 8, 16 or 32
            nodes, bit k of the little-endian word for node k.
        num_tokens : int
            Nodes of the tree, up to 1024, bit-packed up to 32.
        seq_len : int
            Tokens of the prefix; only a full mask depends on it.
        tokens : array_like of int, shape (num_tokens,), optional
            Token of each node.

        Returns
        -------
        DraftTree

        Raises
        ------
        ArgumentError
            The mask is too short, the mode unknown or its limit passed, or the mask is not that of
            a tree; stale bits of a buffer that was not cleared are named.
        """
        size = sglang_mask_size(mode, num_tokens, seq_len)
        flat = np.ascontiguousarray(np.asarray(mask)).reshape(-1)
        if mode == "bit_packed":
            row_bytes = sglang_mask_row_bytes(num_tokens)
            if flat.dtype.kind == "u" and flat.dtype.itemsize == row_bytes:
                flat = flat.astype(flat.dtype.newbyteorder("<"), copy=False).view(np.uint8)
            elif flat.dtype not in (np.dtype(np.uint8), np.dtype(np.bool_)):
                raise ArgumentError(
                    "mask",
                    str(flat.dtype),
                    f"a bit-packed mask of {num_tokens} nodes is uint8, or uint{8 * row_bytes}",
                )
        elif flat.dtype.kind not in "bui":
            raise ArgumentError("mask", str(flat.dtype), "must be bool or uint8")
        if len(flat) < size:
            raise ArgumentError(
                "mask",
                len(flat),
                f"too short: mode {mode!r} needs {size} elements for {num_tokens} nodes"
                + (f" behind a prefix of {seq_len}" if mode == "full" else ""),
            )
        rows = flat[:size].reshape(num_tokens, -1)
        if mode == "bit_packed":
            bits = np.unpackbits(rows.view(np.uint8), axis=1, bitorder="little")
            stale = np.argwhere(bits[:, num_tokens:])
            if len(stale):
                row, bit = stale[0].tolist()
                raise ArgumentError(
                    "mask",
                    rows[row].tolist(),
                    f"row {row} has bit {bit + num_tokens} set, but there are {num_tokens} nodes: "
                    "clear the buffer before each build",
                )
            rows = bits
            seen = rows[:, :num_tokens] != 0
        else:
            seen = rows[:, rows.shape[1] - num_tokens :] != 0
        return cls.from_parents(_parents_of_mask(seen, "mask"), tokens)

    @classmethod
    def chain(cls, num_tokens: int) -> DraftTree:
        """Make a tree in which each node has one child: a linear draft."""
        _check_number(num_tokens)
        return cls.from_parents(np.arange(-1, num_tokens - 1))

    @classmethod
    def star(cls, num_tokens: int) -> DraftTree:
        """Make a tree in which all nodes are children of the root."""
        _check_number(num_tokens)
        return cls.from_parents(np.minimum(np.arange(-1, num_tokens - 1), 0))

    @classmethod
    def comb(cls, num_tokens: int) -> DraftTree:
        """Make a spine whose every node has one more child, a leaf that stands before the next."""
        _check_number(num_tokens)
        node = np.arange(num_tokens)
        parents = np.where(node % 2 == 1, node - 1, node - 2)
        parents[0] = -1
        return cls.from_parents(parents)

    @classmethod
    def random(
        cls, num_tokens: int, rng: np.random.Generator | int, *, reach: int | None = None
    ) -> DraftTree:
        """Draw a tree: each node's parent is drawn evenly from the nodes in front of it.

        Parameters
        ----------
        num_tokens : int
            Nodes of the tree.
        rng : numpy.random.Generator or int
            Where to draw from, or a seed.
        reach : int, optional
            Draw from the last `reach` nodes only: 1 makes a chain, small numbers deep trees.

        Returns
        -------
        DraftTree
        """
        _check_number(num_tokens)
        if reach is not None and reach < 1:
            raise ArgumentError("reach", reach, "a parent is at least one node in front")
        node = np.arange(1, num_tokens)
        lowest = np.zeros_like(node) if reach is None else np.maximum(node - reach, 0)
        parents = np.full(num_tokens, -1)
        parents[1:] = np.random.default_rng(rng).integers(lowest, node)
        return cls.from_parents(parents)

    # Questions

    @property
    def num_tokens(self) -> int:
        """T, the number of nodes."""
        return len(self.parents)

    @property
    def num_words(self) -> int:
        """Visibility words of a row, 64 nodes each."""
        return -(-len(self.parents) // 64)

    @cached_property
    def depths(self) -> NDArray[np.int32]:
        """Edges from the root to each node: int32, shape (T,), read-only."""
        depths = [0]
        for parent in self._parent_list[1:]:
            depths.append(depths[parent] + 1)
        return _frozen(np.array(depths), np.int32)

    @property
    def max_depth(self) -> int:
        """Depth of the deepest node; an accepted path has at most one node more."""
        return int(self.depths.max())

    @cached_property
    def is_leaf(self) -> NDArray[np.bool_]:
        """Whether each node has no child: bool, shape (T,), read-only."""
        leaf = np.ones(len(self.parents), np.bool_)
        leaf[self.parents[1:]] = False
        return _frozen(leaf, np.bool_)

    def children(self, node: int) -> tuple[int, ...]:
        """Return the children of a node, ascending."""
        return self._children[self._node(node)]

    def ancestors(self, node: int) -> tuple[int, ...]:
        """Return the path from the root to a node, both included."""
        at = self._node(node)
        path = [at]
        while at:
            at = self._parent_list[at]
            path.append(at)
        return tuple(reversed(path))

    # Views

    def visibility(self, words: int | None = None) -> NDArray[np.uint64]:
        """Return who sees whom, 64 nodes a word.

        Parameters
        ----------
        words : int, optional
            Words of a row, those of the widest tree of a batch; those that T nodes need if absent.

        Returns
        -------
        ndarray of uint64, shape (T, words)
            Bit k of word w of row i is set where node i sees node ``64 * w + k``: where that is
            node i itself or one of its ancestors.

        Raises
        ------
        ArgumentError
            Too few words.
        """
        if words is None:
            words = self.num_words
        if words < self.num_words:
            raise ArgumentError(
                "words", words, f"{self.num_tokens} nodes need {self.num_words} words a row"
            )
        seen = np.zeros((self.num_tokens, words), np.uint64)
        seen[:, : self.num_words] = self._visibility
        return seen

    def mask(self) -> NDArray[np.bool_]:
        """Return who sees whom: bool, shape (T, T), true at (i, j) where node i sees node j."""
        bits = np.unpackbits(self._visibility.view(np.uint8), axis=1, bitorder="little")
        return np.ascontiguousarray(bits[:, : self.num_tokens]).view(np.bool_)

    def sglang_mask(self, mode: MaskMode, seq_len: int = 0) -> NDArray[Any]:
        """Return one request's part of SGLang's tree mask.

        The parts of a batch stand one behind the other, each flattened.

        Parameters
        ----------
        mode : {"full", "query_only", "bit_packed"}
            See `from_sglang_mask`.
        seq_len : int
            Tokens of the prefix; only a full mask depends on it.

        Returns
        -------
        ndarray
            ``full``: bool, shape (T, seq_len + T), the prefix all true. ``query_only``: bool, shape
            (T, T). ``bit_packed``: uint8, shape (T, B) with B of 1, 2 or 4.

        Raises
        ------
        ArgumentError
            The mode is unknown or its limit passed, or the length negative.
        """
        sglang_mask_size(mode, self.num_tokens, seq_len)
        if mode == "query_only":
            return self.mask()
        if mode == "full":
            full = np.ones((self.num_tokens, seq_len + self.num_tokens), np.bool_)
            full[:, seq_len:] = self.mask()
            return full
        row_bytes = sglang_mask_row_bytes(self.num_tokens)
        return np.ascontiguousarray(self._visibility.view(np.uint8)[:, :row_bytes])

    def positions(self, seq_len: int) -> NDArray[np.int64]:
        """Return the position of each node behind a prefix: int64, shape (T,)."""
        if seq_len < 0:
            raise ArgumentError("seq_len", seq_len, "a prefix cannot have a negative length")
        return self.depths.astype(np.int64) + seq_len

    def links(self) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Return SGLang's links, siblings in ascending order.

        Returns
        -------
        next_token, next_sibling : ndarray of int64, shape (T,)
            First child of each node, and the next child of its parent; -1 where there is none.
        """
        next_token = np.full(self.num_tokens, -1, np.int64)
        next_sibling = np.full(self.num_tokens, -1, np.int64)
        # Sorted by parent, ascending within one: neighbours are siblings.
        order = np.argsort(self.parents[1:], kind="stable") + 1
        above = self.parents[order]
        same = above[1:] == above[:-1]
        next_sibling[order[:-1][same]] = order[1:][same]
        first = order[np.concatenate([[True], ~same])] if len(order) else order
        next_token[self.parents[first]] = first
        return next_token, next_sibling

    # Pictures

    def to_text(
        self,
        *,
        labels: Sequence[str] | None = None,
        marked: Collection[int] = (),
        max_nodes: int = 128,
    ) -> str:
        """Draw the tree as text. An only child stands on its parent's line.

        Parameters
        ----------
        labels : sequence of str, optional
            What to write behind each node; the tokens if absent.
        marked : collection of int
            Nodes to mark by a star, such as an accepted path.
        max_nodes : int
            Draw no more than so many nodes, and say how many are left out.

        Returns
        -------
        str
        """
        if max_nodes < 1:
            raise ArgumentError("max_nodes", max_nodes, "must be at least 1")
        names = self._names(labels, marked)
        lines: list[str] = []
        drawn = 0
        # (node, text in front of its line, text in front of the lines below it)
        ready = [(0, "", "")]
        while ready and drawn < max_nodes:
            node, front, below = ready.pop()
            line = [names[node]]
            drawn += 1
            while len(self._children[node]) == 1 and drawn < max_nodes:
                node = self._children[node][0]
                line.append(names[node])
                drawn += 1
            lines.append(front + " ─ ".join(line))
            children = self._children[node]
            for child in reversed(children):
                last = child == children[-1]
                ready.append(
                    (
                        child,
                        below + ("└── " if last else "├── "),
                        below + ("    " if last else "│   "),
                    )
                )
        if drawn < self.num_tokens:
            lines.append(f"... and {self.num_tokens - drawn} more nodes")
        return "\n".join(lines)

    def to_svg(self, *, labels: Sequence[str] | None = None, marked: Collection[int] = ()) -> str:
        """Draw the tree as SVG: the root on top, one row a depth, leaves side by side.

        Parameters
        ----------
        labels : sequence of str, optional
            What to write below each node; the tokens if absent.
        marked : collection of int
            Nodes to fill, such as an accepted path.

        Returns
        -------
        str
            A complete `svg` element.
        """
        self._names(labels, marked)  # refuses what does not fit
        below = labels
        if below is None and self.tokens is not None:
            below = [str(token) for token in self.tokens.tolist()]
        across = self._columns()
        step_x, step_y, radius = 44, 44 if below is None else 58, 13
        xs = (across * step_x + step_x / 2).tolist()
        ys = (self.depths * step_y + 24).tolist()
        width = (float(across.max()) + 1) * step_x
        height = self.max_depth * step_y + (48 if below is None else 62)
        picture = drawing.Svg(width, height, title=repr(self))
        chosen = {int(node) for node in marked}
        for node in range(1, self.num_tokens):
            parent = self._parent_list[node]
            strong = node in chosen and parent in chosen
            picture.line(
                (xs[parent], ys[parent]),
                (xs[node], ys[node]),
                stroke=drawing.ACCENT if strong else drawing.GREY,
                width=2.5 if strong else 1.2,
            )
        for node in range(self.num_tokens):
            fill = drawing.ACCENT if node in chosen else drawing.PAPER
            ink = drawing.PAPER if node in chosen else drawing.INK
            picture.circle((xs[node], ys[node]), radius, fill=fill, stroke=drawing.INK)
            picture.text((xs[node], ys[node] + 4), str(node), fill=ink, size=11)
            if below is not None:
                label = drawing.clip(below[node], 8)
                x, y = xs[node], ys[node] + radius + 12
                # Paper behind it: the edge to a child right below runs through the label.
                half = 3.2 * len(label)
                picture.rect((x - half, y - 9), 2 * half, 11, fill=drawing.PAPER)
                picture.text((x, y), label, fill=drawing.INK, size=9)
        return picture.to_string()

    def _repr_svg_(self) -> str:
        return self.to_svg()

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, DraftTree):
            return NotImplemented
        return self._key == other._key

    def __hash__(self) -> int:
        return hash(self._key)

    def __len__(self) -> int:
        return len(self.parents)

    def __repr__(self) -> str:
        shown = self._parent_list[:16]
        more = ", ..." if len(self.parents) > len(shown) else ""
        listed = ", ".join(str(parent) for parent in shown)
        with_tokens = "" if self.tokens is None else ", with tokens"
        return (
            f"DraftTree({self.num_tokens} nodes, depth {self.max_depth}, "
            f"parents=[{listed}{more}]{with_tokens})"
        )

    @cached_property
    def _key(self) -> tuple[bytes, bytes | None]:
        tokens = None if self.tokens is None else self.tokens.tobytes()
        return self.parents.tobytes(), tokens

    @cached_property
    def _parent_list(self) -> list[int]:
        parents: list[int] = self.parents.tolist()
        return parents

    @cached_property
    def _children(self) -> list[tuple[int, ...]]:
        below: list[list[int]] = [[] for _ in self._parent_list]
        for node, parent in enumerate(self._parent_list[1:], 1):
            below[parent].append(node)
        return [tuple(nodes) for nodes in below]

    @cached_property
    def _visibility(self) -> NDArray[np.uint64]:
        # Whole rows as Python integers: one `or` a node, whatever the number of words.
        rows = [1]
        for node, parent in enumerate(self._parent_list[1:], 1):
            rows.append(rows[parent] | 1 << node)
        size = 8 * self.num_words
        raw = b"".join(row.to_bytes(size, "little") for row in rows)
        seen = np.frombuffer(raw, "<u8").astype(np.uint64, copy=False)
        words: NDArray[np.uint64] = seen.reshape(self.num_tokens, self.num_words)
        return words

    def _columns(self) -> NDArray[np.float64]:
        """Return where each node stands from left to right, in columns of a leaf."""
        across = np.zeros(self.num_tokens)
        leaves = 0
        ready = [0]
        while ready:
            node = ready.pop()
            ready.extend(reversed(self._children[node]))
            if not self._children[node]:
                across[node] = leaves
                leaves += 1
        for node in range(self.num_tokens - 1, -1, -1):
            children = self._children[node]
            if children:
                across[node] = (across[children[0]] + across[children[-1]]) / 2
        return across

    def _names(self, labels: Sequence[str] | None, marked: Collection[int]) -> list[str]:
        if labels is not None and len(labels) != self.num_tokens:
            raise ArgumentError(
                "labels", len(labels), f"need one label for each of {self.num_tokens} nodes"
            )
        chosen = {self._node(node, "marked") for node in marked}
        names = []
        for node in range(self.num_tokens):
            name = f"{node}*" if node in chosen else str(node)
            if labels is not None:
                name += f" {labels[node]!r}"
            elif self.tokens is not None:
                name += f":{int(self.tokens[node])}"
            names.append(name)
        return names

    def _node(self, node: int, argument: str = "node") -> int:
        if not 0 <= node < self.num_tokens:
            raise ArgumentError(argument, node, f"the tree has nodes 0 to {self.num_tokens - 1}")
        return int(node)


def sglang_mask_row_bytes(num_tokens: int) -> int:
    """Return the bytes of a row of SGLang's bit-packed mask: 1, 2 or 4.

    Parameters
    ----------
    num_tokens : int
        Nodes of the tree, 1 to 32.

    Returns
    -------
    int

    Raises
    ------
    ArgumentError
        The mode does not take so many nodes.
    """
    _check_number(num_tokens)
    if num_tokens > MAX_BIT_PACKED_TOKENS:
        raise ArgumentError(
            "num_tokens",
            num_tokens,
            f"a bit-packed mask takes at most {MAX_BIT_PACKED_TOKENS} nodes; use 'query_only'",
        )
    return 4 if num_tokens > 16 else 2 if num_tokens > 8 else 1


def sglang_mask_size(mode: MaskMode, num_tokens: int, seq_len: int = 0) -> int:
    """Return the elements of one request's part of SGLang's tree mask.

    Parameters
    ----------
    mode : {"full", "query_only", "bit_packed"}
        See `DraftTree.from_sglang_mask`. Elements are bytes in each of them.
    num_tokens : int
        Nodes of the tree.
    seq_len : int
        Tokens of the prefix; only a full mask depends on it.

    Returns
    -------
    int

    Raises
    ------
    ArgumentError
        The mode is unknown or its limit passed, or the length negative.
    """
    if mode not in get_args(MaskMode):
        raise ArgumentError("mode", mode, f"unknown; there are {list(get_args(MaskMode))}")
    _check_number(num_tokens)
    if seq_len < 0:
        raise ArgumentError("seq_len", seq_len, "a prefix cannot have a negative length")
    if mode == "full":
        return num_tokens * (seq_len + num_tokens)
    if mode == "query_only":
        return num_tokens * num_tokens
    return num_tokens * sglang_mask_row_bytes(num_tokens)


def _frozen(values: NDArray[Any], dtype: Any) -> NDArray[Any]:
    """Return a read-only copy."""
    copy = np.array(values, dtype, order="C")
    copy.flags.writeable = False
    return copy


def _integers(argument: str, values: Any) -> NDArray[np.int64]:
    array = np.asarray(values)
    if array.ndim != 1:
        raise ArgumentError(
            argument, list(array.shape), f"must be a flat list, not {array.ndim}-dimensional"
        )
    if not array.size:
        return np.zeros(0, np.int64)
    if array.dtype.kind not in "iu":
        raise ArgumentError(argument, str(array.dtype), "must hold integers")
    if array.dtype.kind == "u" and array.max() > np.iinfo(np.int64).max:
        raise ArgumentError(argument, int(array.max()), "does not fit into 64 bits with a sign")
    return array.astype(np.int64)


def _table(argument: str, values: Any) -> NDArray[Any]:
    array = np.asarray(values)
    if array.dtype.kind not in "bui":
        raise ArgumentError(argument, str(array.dtype), "must be bool or integers")
    if array.ndim != 2 or array.shape[0] != array.shape[1]:
        raise ArgumentError(argument, list(array.shape), "must be square, one row a node")
    return array


def _check_number(num_tokens: int) -> None:
    if not isinstance(num_tokens, (int, np.integer)):
        raise ArgumentError("num_tokens", num_tokens, "must be an integer")
    if not 1 <= num_tokens <= MAX_TOKENS:
        raise ArgumentError(
            "num_tokens", num_tokens, f"a tree has 1 to {MAX_TOKENS} nodes, its root included"
        )


def _check_count(argument: str, values: NDArray[np.int64]) -> None:
    if not 1 <= len(values) <= MAX_TOKENS:
        raise ArgumentError(
            argument,
            values.tolist(),
            f"{len(values)} nodes: a tree has 1 to {MAX_TOKENS}, its root included",
        )


def _checked_parents(values: Any, argument: str = "parents") -> NDArray[np.int64]:
    """Return parents as int64 after refusing what is no tree in topological order."""
    parents = _integers(argument, values)
    _check_count(argument, parents)
    node = np.arange(1, len(parents))
    below = parents[1:]
    if parents[0] == -1 and bool(((below >= 0) & (below < node)).all()):
        return parents
    _check_tree(argument, parents)
    if parents[0] != -1:
        root = int(np.flatnonzero(parents == -1)[0])
        raise ArgumentError(
            argument,
            parents.tolist(),
            f"the root is node {root} and must be node 0; DraftTree.reordered renumbers",
        )
    late = int(np.flatnonzero(below >= node)[0]) + 1
    raise ArgumentError(
        argument,
        parents.tolist(),
        f"parent after child: node {late} has parent {parents[late]}; "
        "DraftTree.reordered puts parents first",
    )


def _check_tree(argument: str, parents: NDArray[np.int64]) -> None:
    """Refuse what is no tree in any order."""
    _check_count(argument, parents)
    listed: list[int] = parents.tolist()
    wrong = np.flatnonzero((parents < -1) | (parents >= len(parents)))
    if len(wrong):
        raise ArgumentError(
            argument,
            listed,
            f"node {wrong[0]} has parent {parents[wrong[0]]}, which is no node; "
            f"use -1 for the root and 0 to {len(parents) - 1} elsewhere",
        )
    roots = np.flatnonzero(parents == -1)
    if len(roots) > 1:
        raise ArgumentError(
            argument, listed, f"two roots: nodes {roots[0]} and {roots[1]} both have parent -1"
        )
    if not len(roots):
        raise ArgumentError(argument, listed, "no root: no node has parent -1")
    # 0: not seen, 1: on the path walked now, 2: known to end at the root
    state = [0] * len(listed)
    state[int(roots[0])] = 2
    for start in range(len(listed)):
        path, at = [], start
        while state[at] == 0:
            state[at] = 1
            path.append(at)
            at = listed[at]
        if state[at] == 1:
            ring = path[path.index(at) :]
            shown = " -> ".join(
                str(node) for node in [*ring[:8], *(ring[:1] if len(ring) <= 8 else ["..."])]
            )
            raise ArgumentError(argument, listed, f"cycle: node {at} is its own ancestor ({shown})")
        for node in path:
            state[node] = 2


def _parents_of_mask(seen: NDArray[np.bool_], argument: str) -> NDArray[np.int64]:
    """Return the parents of a mask, after refusing one that is not a tree's."""
    count = len(seen)
    _check_count(argument, np.zeros(count, np.int64))
    blind = np.flatnonzero(~seen.diagonal())
    if len(blind):
        raise ArgumentError(argument, seen, f"node {blind[0]} does not see itself")
    ahead = np.argwhere(np.triu(seen, 1))
    if len(ahead):
        node, other = ahead[0].tolist()
        raise ArgumentError(
            argument, seen, f"node {node} sees node {other}, which stands behind it"
        )
    # The parent is the last node in front that is seen.
    in_front = np.tril(seen, -1)
    parents: NDArray[np.int64] = count - 1 - np.argmax(in_front[:, ::-1], axis=1)
    lost = np.flatnonzero(~seen[:, 0])
    if len(lost):
        raise ArgumentError(
            argument, seen, f"node {lost[0]} does not see the root, which all nodes see"
        )
    parents[0] = -1
    wrong = np.argwhere(in_front[1:] != seen[parents[1:]])
    if len(wrong):
        node, other = (wrong[0] + (1, 0)).tolist()
        sees = "sees" if in_front[node, other] else "does not see"
        raise ArgumentError(
            argument,
            seen,
            f"not a tree: node {node} {sees} node {other}, unlike its parent {parents[node]}",
        )
    return parents
