"""Build draft trees on the device, or link given ones, in the forms of the verifier and of SGLang.

`TreeBuild` grows best-first trees from a drafter's log-probabilities; `TreeLinks` takes parents,
which `EagleParents` and `VisibleParents` make of other forms; `TreeMask` writes SGLang's mask. What
is wrong with a request is said in its status, on the device: its tree is then the root alone.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from cuverify.arguments import Tensor, device_of
from cuverify.buffers import Buffer, read, refuse_overlap, tensor_of, wrong
from cuverify.errors import ArgumentError
from cuverify.kernel import Kernel
from cuverify.launching import Launched, check_int, index_ctype, number_of
from cuverify.sources import KernelSource, Value
from cuverify.tree import MAX_TOKENS, MaskMode, sglang_mask_size

MAX_DEPTH = 32
"""Most depths of a drafter's log-probabilities."""

MAX_RANKS = 64
"""Most tokens of a depth."""

MAX_BATCH = 65_535
"""Most requests of a launch."""

_SLOTS = (1, 2, 4, 8)  # candidates of a lane in registers; more of them stand in shared memory
_MODES: dict[MaskMode, int] = {"full": 0, "query_only": 1, "bit_packed": 2}
_MASK_CTAS = 64  # of a request


class TreeCode(enum.IntEnum):
    """What the tree kernels say of a request."""

    BUILT = 0
    NOT_FINITE = 1
    """A log-probability is NaN or +inf; the tree stands without it and what comes behind it."""
    NO_ROOT = 2
    """Node 0 has a parent."""
    SECOND_ROOT = 3
    """Another node has parent -1."""
    BAD_PARENT = 4
    """A parent is no node of the tree."""
    PARENT_BEHIND = 5
    """A parent does not stand in front of its child, as in every cycle."""
    BAD_SIZE = 6
    """The number of nodes is below 1 or above n."""


_REASONS = {
    TreeCode.NOT_FINITE: "log-probability {value} (depth x k + rank) is NaN or +inf",
    TreeCode.NO_ROOT: "node 0 is the root and has parent -1",
    TreeCode.SECOND_ROOT: "node {value} has parent -1, as only node 0 has",
    TreeCode.BAD_PARENT: "the parent of node {value} is no node of the tree",
    TreeCode.PARENT_BEHIND: "the parent of node {value} does not stand in front of it",
    TreeCode.BAD_SIZE: "the number of nodes is out of range",
}


def tree_buffers(batch: int, num_tokens: int, words: int | None = None) -> dict[str, Buffer]:
    """Return the buffers that trees are written into: the fields of `TreeBuffers`.

    Parameters
    ----------
    batch : int
        Requests.
    num_tokens : int
        Nodes of a request, the root included, up to 1024.
    words : int, optional
        Visibility words of a node; what `num_tokens` need if absent.

    Raises
    ------
    ArgumentError
        Naming the argument.
    """
    batch = check_int("batch", batch, 1, MAX_BATCH, "requests")
    num_tokens = check_int("num_tokens", num_tokens, 1, MAX_TOKENS, "nodes")
    least = -(-num_tokens // 64)
    words = least if words is None else words
    words = check_int("words", words, least, MAX_TOKENS // 64, f"words for {num_tokens} nodes")
    nodes = (batch, num_tokens)
    return {
        "tokens": Buffer(nodes, "int64"),
        "parents": Buffer(nodes, "int32"),
        "ranks": Buffer(nodes, "int32"),
        "depths": Buffer(nodes, "int32"),
        "positions": Buffer(nodes, "int64"),
        "retrieve_index": Buffer(nodes, "int64"),
        "next_token": Buffer(nodes, "int64"),
        "next_sibling": Buffer(nodes, "int64"),
        "visible": Buffer((batch * num_tokens, words), "uint64"),
        "sizes": Buffer((batch,), "int32"),
        "status": Buffer((batch, 2), "int32"),
    }


@dataclass(frozen=True, eq=False)
class TreeBuffers:
    """Trees of a batch, sized by `tree_buffers`, on one device; contiguous.

    Nodes behind a request's `sizes` belong to no path: they have the root's token and position,
    parent and rank -1, depth 0, no links, and see the root and themselves.

    Attributes
    ----------
    tokens : tensor of int64, shape (B, n)
        Token of each node, the root's first.
    parents, ranks, depths : tensor of int32, shape (B, n)
        -1, -1 and 0 for the root.
    positions : tensor of int64, shape (B, n)
        Length of the prefix plus depth.
    retrieve_index, next_token, next_sibling : tensor of int64, shape (B, n)
        SGLang's links: ``b * n + node``, first child, next child of the same parent; -1 where there
        is none. Siblings ascend.
    visible : tensor of uint64, shape (B * n, words)
        Bit k of word w of a row: the node sees node 64 w + k of its request.
    sizes : tensor of int32, shape (B,)
        Nodes of each tree.
    status : tensor of int32, shape (B, 2)
        `TreeCode` and what it is about, or -1.
    """

    tokens: Any
    parents: Any
    ranks: Any
    depths: Any
    positions: Any
    retrieve_index: Any
    next_token: Any
    next_sibling: Any
    visible: Any
    sizes: Any
    status: Any

    @classmethod
    def allocate(
        cls, like: Any, *, batch: int, num_tokens: int, words: int | None = None
    ) -> TreeBuffers:
        """Return new buffers of the library and on the device of the tensor `like`."""
        sizes = tree_buffers(batch, num_tokens, words)
        return cls(**{name: buffer.zeros(like) for name, buffer in sizes.items()})

    def read_status(self, *, padded: Collection[int] = ()) -> None:
        """Raise if a request was malformed. Waits for the device: not for use inside a capture.

        Parameters
        ----------
        padded : collection of int
            Requests that are padding: their drafts may be anything.

        Raises
        ------
        ArgumentError
            Naming the first request and what is wrong with it.
        """
        for request, (code, value) in enumerate(read(self.status).tolist()):
            if code and request not in padded:
                reason = _REASONS[TreeCode(code)].format(value=value)
                raise ArgumentError("tree", request, f"request {request}: {reason}")


class TreeBuild:
    """Grows one best-first tree a request; all checks are done when it is made.

    Parameters
    ----------
    logprobs : tensor of float32, shape (B, depth, k)
        Log-probabilities of the k best tokens of each depth, descending; depth up to 32, k up to
        64. A row ends in front of its first NaN or infinity. Read only.
    token_ids : tensor of int32 or int64, shape (B, depth, k)
        Their tokens. Read only.
    root_tokens : tensor of int64, shape (B,)
        Token of each root. Read only.
    seq_lens : tensor of int32 or int64, shape (B,)
        Tokens in front of each root. Read only.
    into : TreeBuffers
        Written completely. Its shapes say how many nodes and words there are.
    values : mapping of str to int, optional
        `-D` values of kernels_cu/tree_build.cu.

    Attributes
    ----------
    into : TreeBuffers
    launch : BoundLaunch

    Raises
    ------
    ArgumentError
        Naming the argument and its value.

    Examples
    --------
    >>> trees = TreeBuffers.allocate(logprobs, batch=1, num_tokens=65)         # doctest: +SKIP
    >>> build = TreeBuild(logprobs, token_ids, root_tokens, seq_lens, trees)   # doctest: +SKIP
    >>> build(); trees.next_token                                              # doctest: +SKIP
    """

    def __init__(
        self,
        logprobs: Any,
        token_ids: Any,
        root_tokens: Any,
        seq_lens: Any,
        into: TreeBuffers,
        *,
        values: Mapping[str, int] | None = None,
    ) -> None:
        given = {
            "logprobs": tensor_of("logprobs", logprobs),
            "token_ids": tensor_of("token_ids", token_ids),
            "root_tokens": tensor_of("root_tokens", root_tokens),
            "seq_lens": tensor_of("seq_lens", seq_lens),
        }
        if len(given["logprobs"].shape) != 3:
            raise wrong(given["logprobs"], "wants [batch, depth, k]")
        batch, depth, k = given["logprobs"].shape
        if not 1 <= depth <= MAX_DEPTH or not 1 <= k <= MAX_RANKS:
            raise wrong(
                given["logprobs"], f"wants 1 to {MAX_DEPTH} depths of 1 to {MAX_RANKS} tokens"
            )
        held, n, words = _held(into, batch)
        refuse_overlap(list(held.values()), list(given.values()))
        device_of([*given.values(), *held.values()])
        kernel = tree_kernels(
            TREE_THREADS=_threads(n),
            **_candidates(n),
            TOKEN_INDEX=index_ctype(given["token_ids"]),
            SEQ_INDEX=index_ctype(given["seq_lens"]),
            **(values or {}),
        )["tree_build"]
        self.into = into
        self.launch = kernel.bind(
            batch, number_of(kernel, "TREE_THREADS"),
            logprobs, token_ids, root_tokens, seq_lens, batch, depth, k, n, words,
            into.tokens, into.parents, into.ranks, into.depths, into.positions,
            into.retrieve_index, into.next_token, into.next_sibling,
            into.visible.reshape(batch, n, words), into.sizes, into.status,
        )  # fmt: skip

    def __call__(self) -> None:
        """Grow the trees: one launch on torch's current stream."""
        self.launch()


class TreeLinks:
    """Writes the views of trees that are given by their parents: of any drafter.

    Parameters
    ----------
    seq_lens : tensor of int32 or int64, shape (B,)
        Tokens in front of each root. Read only.
    trees : TreeBuffers
        `parents` are read, and `sizes` where asked for; `depths`, `positions`, links, `visible` and
        `status` are written completely; `tokens` and `ranks` are left alone.
    sized : bool
        Whether `sizes` say how many nodes each tree has; otherwise all n.
    values : mapping of str to int, optional
        `-D` values of kernels_cu/tree_build.cu.
    """

    def __init__(
        self,
        seq_lens: Any,
        trees: TreeBuffers,
        *,
        sized: bool = False,
        values: Mapping[str, int] | None = None,
    ) -> None:
        lengths = tensor_of("seq_lens", seq_lens)
        batch = _batch(lengths)
        held, n, words = _held(trees, batch)
        refuse_overlap(list(held.values()), [lengths])
        device_of([lengths, *held.values()])
        kernel = tree_kernels(
            TREE_THREADS=_threads(n), SEQ_INDEX=index_ctype(lengths), **(values or {})
        )["tree_links"]
        self.trees = trees
        self.launch = kernel.bind(
            batch, number_of(kernel, "TREE_THREADS"),
            trees.parents, trees.sizes if sized else None, seq_lens, batch, n, words,
            trees.depths, trees.positions, trees.retrieve_index, trees.next_token,
            trees.next_sibling, trees.visible.reshape(batch, n, words), trees.status,
        )  # fmt: skip

    def __call__(self) -> None:
        """Write the views: one launch on torch's current stream."""
        self.launch()


class TreeMask:
    """Writes SGLang's tree mask from visibility words, without any fill in front.

    Parameters
    ----------
    seq_lens : tensor of int32 or int64, shape (B,)
        Tokens in front of each root. Read only.
    trees : TreeBuffers
        Its `visible` is read.
    mask : tensor of uint8 or bool, one dimension
        The parts of all requests one behind the other; what is behind them is left alone.
    status : tensor of int32, shape (B,)
        Written: 0; 1 where a length is negative or no int32; 2 where a part does not fit the mask;
        such parts are left out.
    mode : {"full", "query_only", "bit_packed"}
        See `cuverify.tree.DraftTree.from_sglang_mask`.
    fill_prefix : bool
        Whether a full mask's columns of the prefix are written, too; otherwise they are left alone.
    values : mapping of str to int, optional
        `-D` values of kernels_cu/tree_build.cu.
    """

    def __init__(
        self,
        seq_lens: Any,
        trees: TreeBuffers,
        mask: Any,
        status: Any,
        *,
        mode: MaskMode,
        fill_prefix: bool = False,
        values: Mapping[str, int] | None = None,
    ) -> None:
        lengths, room = tensor_of("seq_lens", seq_lens), tensor_of("mask", mask)
        batch = _batch(lengths)
        held, n, words = _held(trees, batch)
        least = batch * sglang_mask_size(mode, n, 0)
        if len(room.shape) != 1 or room.shape[0] < least:
            raise wrong(room, f"is too short: {batch} trees of {n} nodes need {least} bytes")
        said = tensor_of("status", status)
        refuse_overlap([room, said], [lengths, *held.values()])
        kernel = tree_kernels(SEQ_INDEX=index_ctype(lengths), **(values or {}))["tree_mask"]
        rows = min(n, 4 if lengths.device == "cpu" else _MASK_CTAS)
        self.launch = kernel.bind(
            (rows, batch), number_of(kernel, "TREE_THREADS"),
            trees.visible.reshape(batch, n, words), seq_lens, batch, n, words, _MODES[mode],
            int(fill_prefix), room.shape[0], mask, status,
        )  # fmt: skip

    def __call__(self) -> None:
        """Write the mask: one launch on torch's current stream."""
        self.launch()


class EagleParents:
    """Writes `trees.parents` from EAGLE's lists; what is not found is left for `TreeLinks` to flag.

    Parameters
    ----------
    selected_index : tensor of int64, shape (B, n - 1)
        Which draft each node is. Read only.
    parent_list : tensor of int64, shape (B, width)
        Read only.
    topk : int
        Drafts below one node.
    trees : TreeBuffers
        Its `parents` are written completely.
    """

    def __init__(
        self, selected_index: Any, parent_list: Any, topk: int, trees: TreeBuffers
    ) -> None:
        selected = tensor_of("selected_index", selected_index)
        listed = tensor_of("parent_list", parent_list)
        for tensor in (selected, listed):
            if len(tensor.shape) != 2:
                raise wrong(tensor, f"has {len(tensor.shape)} dimensions, wants two")
        topk = check_int("topk", topk, 1, 2**31 - 1, "drafts below a node")
        batch = selected.shape[0]
        held, n, _ = _held(trees, batch)
        refuse_overlap([held["parents"]], [selected, listed])
        kernel = tree_kernels()["eagle_parents"]
        self.launch = kernel.bind(
            batch, number_of(kernel, "TREE_THREADS"),
            selected_index, parent_list, batch, n, listed.shape[1], topk, trees.parents,
        )  # fmt: skip

    def __call__(self) -> None:
        """Write the parents: one launch on torch's current stream."""
        self.launch()


class VisibleParents:
    """Writes `trees.parents` from `trees.visible`; what is no tree is left for `TreeLinks` to flag.

    Parameters
    ----------
    trees : TreeBuffers
    """

    def __init__(self, trees: TreeBuffers) -> None:
        batch = _batch(tensor_of("trees.sizes", trees.sizes))
        held, n, words = _held(trees, batch)
        refuse_overlap([held["parents"]], [held["visible"]])
        kernel = tree_kernels()["visible_parents"]
        self.launch = kernel.bind(
            batch, number_of(kernel, "TREE_THREADS"),
            trees.visible.reshape(batch, n, words), batch, n, words, trees.parents,
        )  # fmt: skip

    def __call__(self) -> None:
        """Write the parents: one launch on torch's current stream."""
        self.launch()


def launched(arch: str) -> Iterator[Launched]:
    """Yield the `-D` values that these ops launch with; see `cuverify.launched`."""
    sizes = range(1, MAX_TOKENS + 1)
    sets: list[dict[str, Value]] = [
        dict(grown)
        for grown in sorted(
            {(("TREE_THREADS", _threads(n)), *_candidates(n).items()) for n in sizes}
        )
    ]
    yield Launched("tree_build", ("TOKEN_INDEX", "SEQ_INDEX"), sets=sets)
    threads = sorted({_threads(n) for n in sizes})
    yield Launched("tree_build", ("SEQ_INDEX",), {"TREE_THREADS": threads})  # links
    yield Launched("tree_build", ("SEQ_INDEX",))  # masks
    yield Launched("tree_build")  # parents


def tree_kernels(**values: int | str) -> Mapping[str, Kernel]:
    """Return the kernels of kernels_cu/tree_build.cu with these `-D` values, by name."""
    return _kernels(tuple(sorted(values.items())))


@functools.cache
def _kernels(values: tuple[tuple[str, int | str], ...]) -> dict[str, Kernel]:
    source = KernelSource.from_package("tree_build", values=dict(values))
    names = ("tree_build", "tree_links", "tree_mask", "eagle_parents", "visible_parents")
    return {name: Kernel(source, name) for name in names}


def _held(trees: TreeBuffers, batch: int) -> tuple[dict[str, Tensor], int, int]:
    """Return the views of all buffers, n and the words of a node; refuse what does not fit."""
    held = {
        field.name: tensor_of(f"trees.{field.name}", getattr(trees, field.name))
        for field in fields(trees)
    }
    parents, visible = held["parents"], held["visible"]
    for tensor in (parents, visible):
        if len(tensor.shape) != 2:
            raise wrong(tensor, f"has {len(tensor.shape)} dimensions, wants two")
    n, words = parents.shape[1], visible.shape[1]
    for name, buffer in tree_buffers(batch, n, words).items():
        if held[name].shape != buffer.shape or not held[name].is_contiguous:
            raise wrong(
                held[name],
                f"wants shape {list(buffer.shape)}, contiguous, for {batch} trees of {n} nodes",
            )
    return held, n, words


def _candidates(n: int) -> dict[str, int]:
    """Return the `-D` values that say where the candidates of a tree are kept."""
    for slots in _SLOTS:
        if 32 * slots >= n - 1:
            return {"SLOTS": slots}
    return {"IN_SHARED": 1}


def _threads(n: int) -> int:
    """Return the threads of a block: a node each of most trees, more only where it takes many."""
    return 128 if n <= 256 else 512


def _batch(tensor: Tensor) -> int:
    if len(tensor.shape) != 1 or not tensor.shape[0]:
        raise wrong(tensor, f"has shape {list(tensor.shape)}; wants one entry a request")
    return tensor.shape[0]
