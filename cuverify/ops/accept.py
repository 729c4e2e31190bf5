"""Accept what the target agrees with: argmax over the vocabulary, greedy and sampled walks.

All of it stays on the device, so that it can stand in a captured step. Malformed trees end a walk
early and are flagged per request; see kernels_cu/accept.cu.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, fields
from typing import Any

from cuverify.arguments import Tensor, device_of
from cuverify.buffers import Buffer, read, refuse_overlap, tensor_of, wrong
from cuverify.errors import ArgumentError
from cuverify.kernel import Kernel
from cuverify.launching import Launched, check_int, is_real, multiprocessors, number_of
from cuverify.sources import KernelSource
from cuverify.tree import MAX_TOKENS

_PIECE_LOGITS = 2048  # fewer in a piece of a row are not worth a block
_CTAS_PER_MULTIPROCESSOR = 4
_HOST_SAMPLE_THREADS = 64
_LEAST_THRESHOLD = 1e-9
_LOGITS = {
    "bfloat16": (16, "__nv_bfloat16"),
    "uint16": (16, "__nv_bfloat16"),
    "float32": (32, "float"),
}


class AcceptCode(enum.IntEnum):
    """What the walks say of a request."""

    WALKED = 0
    BAD_LINK = 1
    """A link leads out of the tree or round in a circle; the walk ended at that node."""
    BAD_INDEX = 2
    """`retrieve_index` of a node is none of its request; the walk ended in front of it."""
    NO_MASS = 3
    """No token behind the last node has a probability; it is 0."""


_REASONS = {
    AcceptCode.BAD_LINK: "the links of node {node} lead out of the tree or round in a circle",
    AcceptCode.BAD_INDEX: "retrieve_index of node {node} is none of the request's own",
    AcceptCode.NO_MASS: "no token behind node {node} has a probability",
}


def accept_buffers(batch: int, num_tokens: int, max_path: int) -> dict[str, Buffer]:
    """Return the buffers that acceptance is written into: the fields of `AcceptBuffers`.

    Parameters
    ----------
    batch : int
        Requests.
    num_tokens : int
        Nodes of a request, the root included.
    max_path : int
        Most nodes of a path, the root included: the tree's depth and one.

    Raises
    ------
    ArgumentError
        Naming the argument.
    """
    batch = check_int("batch", batch, 1, 65_535, "requests")
    num_tokens = check_int("num_tokens", num_tokens, 1, MAX_TOKENS, "nodes")
    max_path = check_int("max_path", max_path, 1, MAX_TOKENS, "nodes of a path")
    return {
        "predicts": Buffer((batch * num_tokens,), "int32"),
        "accept_index": Buffer((batch, max_path), "int32"),
        "accept_token_num": Buffer((batch,), "int32"),
        "status": Buffer((batch, 2), "int32"),
    }


@dataclass(frozen=True, eq=False)
class AcceptBuffers:
    """What was accepted, sized by `accept_buffers`; written completely by every call.

    Attributes
    ----------
    predicts : tensor of int32, shape (B * n,)
        Token behind each node of the path, the last of them added by the target; -1 elsewhere.
    accept_index : tensor of int32, shape (B, max_path)
        The path by `retrieve_index`, the root first; -1 behind it.
    accept_token_num : tensor of int32, shape (B,)
        Nodes of the path, the root not counted.
    status : tensor of int32, shape (B, 2)
        `AcceptCode` and the node, or -1.
    """

    predicts: Any
    accept_index: Any
    accept_token_num: Any
    status: Any

    @classmethod
    def allocate(cls, like: Any, *, batch: int, num_tokens: int, max_path: int) -> AcceptBuffers:
        """Return new buffers of the library and on the device of the tensor `like`."""
        sizes = accept_buffers(batch, num_tokens, max_path)
        return cls(**{name: buffer.zeros(like) for name, buffer in sizes.items()})

    def read_status(self, *, padded: Collection[int] = ()) -> None:
        """Raise if a walk met something wrong. Waits for the device: not for use inside a capture.

        Parameters
        ----------
        padded : collection of int
            Requests that are padding: their trees may be anything.

        Raises
        ------
        ArgumentError
            Naming the first request and what is wrong with it.
        """
        for request, (code, node) in enumerate(read(self.status).tolist()):
            if code and request not in padded:
                reason = _REASONS[AcceptCode(code)].format(node=node)
                raise ArgumentError("tree", request, f"request {request}: {reason}")


class Argmax:
    """The place of each row's largest logit; all checks are done when it is made.

    Parameters
    ----------
    logits : tensor of float32 or bfloat16, shape (rows, vocabulary)
        Any row stride. NaN are passed over; of equal logits the lowest place is taken. Read only.
    target : tensor of int64, with as many elements
        Written.
    best : tensor of uint64, shape (rows, pieces), optional
        Scratch, of any number of pieces; of the op's own if absent.
    values : mapping of str to int, optional
        `-D` values of kernels_cu/accept.cu.
    """

    def __init__(
        self,
        logits: Any,
        target: Any,
        *,
        best: Any = None,
        values: Mapping[str, int] | None = None,
    ) -> None:
        given, made = tensor_of("logits", logits), tensor_of("target", target)
        if len(given.shape) != 2 or 0 in given.shape:
            raise wrong(given, f"has shape {list(given.shape)}; wants [rows, vocabulary]")
        if given.dtype not in _LOGITS:
            raise wrong(given, f"dtype {given.dtype}: logits are float32 or bfloat16")
        rows, vocab = given.shape
        if rows > 65_535:
            raise wrong(given, "has more than 65,535 rows")
        if math.prod(made.shape) != rows or not made.is_contiguous:
            raise wrong(made, f"wants {rows} elements, contiguous")
        if best is None:
            best = Buffer((rows, _pieces(given.device, rows, vocab)), "uint64").zeros(target)
        scratch = tensor_of("best", best)
        if len(scratch.shape) != 2 or scratch.shape[0] != rows or not scratch.shape[1]:
            raise wrong(scratch, f"wants [{rows}, pieces]")
        refuse_overlap([made, scratch], [given])
        bits, ctype = _LOGITS[given.dtype]
        kernels = accept_kernels(LOGIT_BITS=bits, LOGIT=ctype, **(values or {}))
        threads = number_of(kernels["argmax_partials"], "ARGMAX_THREADS")
        pieces = scratch.shape[1]
        self.partials = kernels["argmax_partials"].bind(
            (pieces, rows), threads, logits, given.strides[0], rows, vocab, pieces, best
        )
        self.merge = kernels["argmax_merge"].bind(
            -(-rows * 32 // threads), threads, best, rows, pieces, target.reshape(rows)
        )

    def __call__(self) -> None:
        """Find the places: two launches on torch's current stream."""
        self.partials()
        self.merge()


class AcceptGreedy:
    """Walks each tree as far as the target agrees; all checks are done when it is made.

    Parameters
    ----------
    candidates : tensor of int64, shape (B, n)
        Token of each node. Read only, as are all others but `into`.
    next_token, next_sibling : tensor of int64, shape (B, n)
        SGLang's links, siblings in any order.
    target : tensor of int64, B * n elements
        The target's choice behind each node, by `retrieve_index`.
    into : AcceptBuffers
        Written completely.
    retrieve_index : tensor of int64, shape (B, n), optional
        ``b * n + node`` if absent.
    values : mapping of str to int, optional
        `-D` values of kernels_cu/accept.cu.
    """

    def __init__(
        self,
        candidates: Any,
        next_token: Any,
        next_sibling: Any,
        target: Any,
        into: AcceptBuffers,
        *,
        retrieve_index: Any = None,
        values: Mapping[str, int] | None = None,
    ) -> None:
        given = {"candidates": candidates, "next_token": next_token, "next_sibling": next_sibling}
        batch, n, path = _checked(given, retrieve_index, into, {"target": target})
        kernel = accept_kernels(**(values or {}))["accept_greedy"]
        chosen = tensor_of("target", target)
        if math.prod(chosen.shape) != batch * n or not chosen.is_contiguous:
            raise wrong(chosen, f"wants {batch * n} elements, contiguous")
        self.into = into
        self.launch = kernel.bind(
            batch, number_of(kernel, "ACCEPT_THREADS"),
            candidates, retrieve_index, next_token, next_sibling, target.reshape(batch, n),
            batch, n, path, into.predicts.reshape(batch, n), into.accept_index,
            into.accept_token_num, into.status,
        )  # fmt: skip

    def __call__(self) -> None:
        """Walk: one launch on torch's current stream."""
        self.launch()


class AcceptSampled:
    """Samples along each tree; all checks are done when it is made.

    Parameters
    ----------
    candidates, next_token, next_sibling, into, retrieve_index, values
        As for `AcceptGreedy`.
    uniform : tensor of float32, shape (B, n)
        A coin in [0, 1) for each node, which serves its children. Read only.
    uniform_final : tensor of float32, shape (B,)
        One for each last token. Read only.
    target_probs : tensor of float32, shape (B, n, vocabulary)
        Probabilities of the token behind each node, by `retrieve_index`. Read only.
    draft_probs : tensor of float32, shape (B, n, vocabulary), optional
        Zeros on entry, and written: the published rule with its thresholds. Where it is absent, the
        plain rule, whose tokens are distributed as the target's own.
    threshold_single, threshold_acc : float
        Of the published rule; from 0 to 1. `threshold_acc` is raised to 1e-9.

    Raises
    ------
    ArgumentError
        Naming the argument and its value.
    """

    def __init__(
        self,
        candidates: Any,
        next_token: Any,
        next_sibling: Any,
        uniform: Any,
        uniform_final: Any,
        target_probs: Any,
        into: AcceptBuffers,
        *,
        draft_probs: Any = None,
        threshold_single: float = 1.0,
        threshold_acc: float = 1.0,
        retrieve_index: Any = None,
        values: Mapping[str, int] | None = None,
    ) -> None:
        given = {"candidates": candidates, "next_token": next_token, "next_sibling": next_sibling}
        others = {
            "uniform": uniform,
            "uniform_final": uniform_final,
            "target_probs": target_probs,
        }
        written = {} if draft_probs is None else {"draft_probs": draft_probs}
        batch, n, path = _checked(given, retrieve_index, into, others, written)
        probs = tensor_of("target_probs", target_probs)
        if len(probs.shape) != 3 or not probs.shape[2]:
            raise wrong(probs, f"wants [{batch}, {n}, vocabulary]")
        thresholds = {"threshold_single": threshold_single, "threshold_acc": threshold_acc}
        for name, value in thresholds.items():
            if not is_real(value) or not 0 <= value <= 1:
                raise ArgumentError(name, value, "wants 0 to 1")
            if draft_probs is None and value != 1:
                raise ArgumentError(name, value, "belongs to the published rule: give draft_probs")
        chosen: dict[str, int] = dict(values or {})
        if probs.device == "cpu":
            chosen = {"SAMPLE_THREADS": _HOST_SAMPLE_THREADS} | chosen
        kernel = accept_kernels(**chosen)["accept_sampled"]
        self.into = into
        self.launch = kernel.bind(
            batch, number_of(kernel, "SAMPLE_THREADS"),
            candidates, retrieve_index, next_token, next_sibling, uniform, uniform_final,
            target_probs, draft_probs, float(threshold_single),
            max(float(threshold_acc), _LEAST_THRESHOLD), batch, n, probs.shape[2], path,
            into.predicts.reshape(batch, n), into.accept_index, into.accept_token_num, into.status,
        )  # fmt: skip

    def __call__(self) -> None:
        """Sample: one launch on torch's current stream."""
        self.launch()


def launched(arch: str) -> Iterator[Launched]:
    """Yield the `-D` values that these ops launch with; see `cuverify.launched`."""
    kinds = dict.fromkeys(_LOGITS.values())
    yield Launched("accept", sets=[{"LOGIT_BITS": bits, "LOGIT": ctype} for bits, ctype in kinds])
    yield Launched("accept")  # greedy and sampled acceptance


def accept_kernels(**values: int | str) -> Mapping[str, Kernel]:
    """Return the kernels of kernels_cu/accept.cu with these `-D` values, by name."""
    return _kernels(tuple(sorted(values.items())))


@functools.cache
def _kernels(values: tuple[tuple[str, int | str], ...]) -> dict[str, Kernel]:
    source = KernelSource.from_package("accept", values=dict(values))
    names = ("argmax_partials", "argmax_merge", "accept_greedy", "accept_sampled")
    return {name: Kernel(source, name) for name in names}


def _checked(
    given: Mapping[str, Any],
    retrieve_index: Any,
    into: AcceptBuffers,
    others: Mapping[str, Any],
    written: Mapping[str, Any] | None = None,
) -> tuple[int, int, int]:
    """Return batch, nodes and the longest path; refuse buffers that do not fit.

    `others` are read; `written` is, like `into`, and shares memory with nothing.
    """
    tree = {name: tensor_of(name, value) for name, value in given.items()}
    if retrieve_index is not None:
        tree["retrieve_index"] = tensor_of("retrieve_index", retrieve_index)
    candidates = tree["candidates"]
    if len(candidates.shape) != 2 or 0 in candidates.shape:
        raise wrong(candidates, f"has shape {list(candidates.shape)}; wants [batch, nodes]")
    batch, n = candidates.shape
    held = {
        field.name: tensor_of(f"into.{field.name}", getattr(into, field.name))
        for field in fields(into)
    }
    index = held["accept_index"]
    if len(index.shape) != 2 or not index.shape[1]:
        raise wrong(index, "wants [batch, nodes of a path]")
    for name, buffer in accept_buffers(batch, n, index.shape[1]).items():
        if held[name].shape != buffer.shape:
            raise wrong(held[name], f"wants shape {list(buffer.shape)}: {batch} trees of {n} nodes")
    inputs: list[Tensor] = [*tree.values(), *(tensor_of(k, v) for k, v in others.items())]
    outputs = [*held.values(), *(tensor_of(k, v) for k, v in (written or {}).items())]
    refuse_overlap(outputs, inputs)
    device_of([*outputs, *inputs])
    return batch, n, index.shape[1]


def _pieces(device: str, rows: int, vocab: int) -> int:
    """Return how many blocks share a row: they fill the GPU once, none with too little to do."""
    count = multiprocessors(device)
    wanted = 3 if count is None else _CTAS_PER_MULTIPROCESSOR * count // rows
    return max(1, min(wanted, -(-vocab // _PIECE_LOGITS)))
