"""Log-softmax and top-k of a drafter's logits: the likeliest tokens of each depth, in the graph."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from typing import Any

from cuverify.arguments import device_of
from cuverify.buffers import Buffer, refuse_overlap, tensor_of, wrong
from cuverify.errors import ArgumentError
from cuverify.kernel import Kernel
from cuverify.launching import Launched, check_blocks, number_of
from cuverify.sources import KernelSource, Value

MAX_RANKS = 64
"""Most tokens of a depth."""

_LOGITS = {
    "bfloat16": (16, "__nv_bfloat16"),
    "uint16": (16, "__nv_bfloat16"),
    "float32": (32, "float"),
}
_PIECE_LOGITS = 4096
_HOST_THREADS = 64


class DraftTopk:
    """The k likeliest tokens of each depth and their log-probabilities; checked when it is made.

    Parameters
    ----------
    logits : tensor of float32 or bfloat16, shape (B, depth, vocabulary)
        Of the drafter. Read only. A row with a NaN or +inf, or of -inf only, has NaN
        log-probabilities, which `TreeBuild` flags.
    logprobs : tensor of float32, shape (B, depth, k)
        Written, descending; k up to 64; sums are taken in float32.
    token_ids : tensor of int64, shape (B, depth, k)
        Written; of equal logits the lower token comes first.
    pieces : int, optional
        Blocks that share a row; one for each 4,096 logits if absent.
    values : mapping of str to int, optional
        `-D` values of kernels_cu/draft_topk.cu.

    Raises
    ------
    ArgumentError
        Naming the argument.
    """

    def __init__(
        self,
        logits: Any,
        logprobs: Any,
        token_ids: Any,
        *,
        pieces: int | None = None,
        values: Mapping[str, int] | None = None,
    ) -> None:
        given = tensor_of("logits", logits)
        if len(given.shape) != 3 or 0 in given.shape:
            raise wrong(given, "wants [batch, depth, vocabulary]")
        if given.dtype not in _LOGITS:
            raise wrong(given, f"dtype {given.dtype}: logits are float32 or bfloat16")
        probs, ids = tensor_of("logprobs", logprobs), tensor_of("token_ids", token_ids)
        for tensor, dtype in ((probs, "float32"), (ids, "int64")):
            if len(tensor.shape) != 3 or tensor.shape[:2] != given.shape[:2]:
                raise wrong(tensor, f"wants [{given.shape[0]}, {given.shape[1]}, k]")
            if tensor.dtype != dtype:
                raise wrong(tensor, f"dtype {tensor.dtype}: wants {dtype}")
        vocab, k = given.shape[2], ids.shape[2]
        if probs.shape != ids.shape or not 1 <= k <= min(vocab, MAX_RANKS):
            raise ArgumentError(
                "token_ids",
                list(ids.shape),
                f"k is that of logprobs, 1 to {min(vocab, MAX_RANKS)}",
            )
        for tensor in (given, probs, ids):
            if not tensor.is_contiguous:
                raise wrong(tensor, "wants contiguous rows")
        rows = given.shape[0] * given.shape[1]
        if rows > 65_535:
            raise wrong(given, "has more than 65,535 rows")
        if pieces is None:
            pieces = -(-vocab // _PIECE_LOGITS)
        pieces = check_blocks("pieces", pieces)
        refuse_overlap([probs, ids], [given])
        device_of([given, probs, ids])
        best = Buffer((rows, pieces, k), "uint64").zeros(token_ids)
        sums = Buffer((rows, pieces, 2), "float32").zeros(logprobs)
        bits, ctype = _LOGITS[given.dtype]
        chosen: dict[str, int] = dict(values or {})
        if given.device == "cpu":
            chosen = {"TOPK_THREADS": _HOST_THREADS} | chosen
        kernels = draft_topk_kernels(LOGIT_BITS=bits, LOGIT=ctype, **chosen)
        threads = number_of(kernels["draft_topk_partials"], "TOPK_THREADS")
        self.partials = kernels["draft_topk_partials"].bind(
            (pieces, rows), threads, logits.reshape(rows, vocab), vocab, rows, vocab, pieces, k,
            best, sums,
        )  # fmt: skip
        self.merge = kernels["draft_topk_merge"].bind(
            rows, threads, best, sums, rows, pieces, k, logprobs.reshape(rows, k),
            token_ids.reshape(rows, k),
        )  # fmt: skip

    def __call__(self) -> None:
        """Find them: two launches on torch's current stream."""
        self.partials()
        self.merge()


def launched(arch: str) -> Iterator[Launched]:
    """Yield the `-D` values that this op launches with; see `cuverify.launched`."""
    kinds = dict.fromkeys(_LOGITS.values())
    sets: list[dict[str, Value]] = [{"LOGIT_BITS": bits, "LOGIT": ctype} for bits, ctype in kinds]
    yield Launched("draft_topk", sets=sets)


def draft_topk_kernels(**values: int | str) -> Mapping[str, Kernel]:
    """Return the kernels of kernels_cu/draft_topk.cu with these `-D` values, by name."""
    return _kernels(tuple(sorted(values.items())))


@functools.cache
def _kernels(values: tuple[tuple[str, int | str], ...]) -> dict[str, Kernel]:
    source = KernelSource.from_package("draft_topk", values=dict(values))
    names = ("draft_topk_partials", "draft_topk_merge")
    return {name: Kernel(source, name) for name in names}
