"""The check case of `draft_topk`: logits of all kinds, rows that make no sense among them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, get_args

import numpy as np
from numpy.typing import NDArray

from cuverify.errors import CaseError
from cuverify.reference import draft_topk as oracle
from cuverify.static_buffers import fill, static_buffer, write
from cuverify.tolerances import DRAFT_LOGPROBS

if TYPE_CHECKING:
    from cuverify.cases import Target
    from cuverify.kernel import Kernel
    from cuverify.validators.compare import Tolerance

LogitsKind = Literal["free", "ties", "flat", "masked", "spoiled"]
LOGITS_KINDS: tuple[LogitsKind, ...] = get_args(LogitsKind)

_POISON = 0x5A


@dataclass(frozen=True, eq=False)
class LogitsBatch:
    """What the top-k reads.

    Attributes
    ----------
    logits : ndarray of float32 or uint16 (bits of bf16), shape (B, depth, vocabulary)
    k : int
        Tokens of each depth.
    """

    logits: NDArray[Any]
    k: int

    @classmethod
    def draw(
        cls,
        rng: np.random.Generator,
        shape: tuple[int, int, int],
        k: int,
        *,
        kind: LogitsKind = "free",
        bf16: bool = False,
    ) -> LogitsBatch:
        """Draw logits.

        Parameters
        ----------
        rng : numpy.random.Generator
        shape : tuple of int
            B, depth and vocabulary.
        k : int
        kind : str
            ``free``: normal. ``ties``: few values, zeros of both signs among them. ``flat``: all
            equal. ``masked``: most are -inf. ``spoiled``: rows with NaN, +inf, or -inf only.
        bf16 : bool
            Round towards zero to bf16.
        """
        logits = rng.normal(0, 4, shape)
        if kind == "ties":
            logits = rng.choice([-1.5, -0.0, 0.0, 2.0, 2.5], shape)
        elif kind == "flat":
            logits = np.full(shape, 1.25)
        elif kind == "masked":
            logits[rng.random(shape) < 0.9] = -np.inf
            logits[..., int(rng.integers(shape[2]))] = 3.0
        elif kind == "spoiled":
            fault = rng.integers(0, 5, shape[:2])
            logits[(fault[..., None] == 1) & (rng.random(shape) < 0.3)] = np.nan
            logits[(fault[..., None] == 2) & (rng.random(shape) < 0.1)] = np.inf
            logits[fault == 3] = -np.inf
            logits[fault == 4] = np.nan
        values = logits.astype(np.float32)
        if bf16:
            values = (values.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        return cls(values, k)

    @property
    def values(self) -> NDArray[np.float32]:
        """The logits as float32."""
        if self.logits.dtype == np.uint16:
            bits = self.logits.astype(np.uint32) << np.uint32(16)
            return np.asarray(bits.view(np.float32), np.float32)
        return np.asarray(self.logits, np.float32)

    @cached_property
    def expected(self) -> dict[str, NDArray[Any]]:
        """What the oracle says."""
        logprobs, tokens = oracle.draft_topk(self.values, self.k)
        return {"logprobs": logprobs, "token_ids": tokens}

    def __repr__(self) -> str:
        return f"LogitsBatch({list(self.logits.shape)} {self.logits.dtype}, k={self.k})"


class DraftTopkStep:
    """The top-k with buffers of its own, on the host lane or on the current CUDA device.

    Parameters
    ----------
    batch : LogitsBatch
        Its shape, type and k are the step's for good.
    xp : {"numpy", "torch-cuda"}
        Where the buffers are.
    pieces : int, optional
        Blocks that share a row.
    values : mapping of str to int, optional
        `-D` values of kernels_cu/draft_topk.cu.
    """

    def __init__(
        self,
        batch: LogitsBatch,
        xp: Target,
        *,
        pieces: int | None = None,
        values: Mapping[str, int] | None = None,
    ) -> None:
        from cuverify.ops.draft_topk import DraftTopk

        kind = "bf16" if batch.logits.dtype == np.uint16 else "float32"
        self.logits = static_buffer(xp, batch.logits.shape, kind)
        ranks = (*batch.logits.shape[:2], batch.k)
        self.logprobs = static_buffer(xp, ranks, "float32")
        self.token_ids = static_buffer(xp, ranks, "int64")
        self.topk = DraftTopk(
            self.logits, self.logprobs, self.token_ids, pieces=pieces, values=values
        )
        self.refill(batch)

    @property
    def outputs(self) -> Mapping[str, Any]:
        """Log-probabilities and tokens."""
        return {"logprobs": self.logprobs, "token_ids": self.token_ids}

    def refill(self, batch: LogitsBatch) -> None:
        """Write another batch of the same shape."""
        if batch.logits.shape != tuple(self.logits.shape) or batch.k != self.token_ids.shape[2]:
            raise CaseError(f"{batch} does not fit a step for {list(self.logits.shape)}")
        self._batch = batch
        write(self.logits, batch.logits)

    def __call__(self) -> None:
        """Find the likeliest tokens."""
        self.topk()

    def poison(self) -> None:
        """Fill what is written."""
        for buffer in self.outputs.values():
            fill(buffer, _POISON)

    def expected(self) -> dict[str, NDArray[Any]]:
        """Return the oracle's."""
        return self._batch.expected


class DraftTopkCase:
    """See `cuverify.cases.CheckCase`."""

    name = "draft_topk"

    @property
    def tolerances(self) -> Mapping[str, Tolerance]:
        """Of the log-probabilities; tokens must be equal."""
        return {"logprobs": DRAFT_LOGPROBS}

    def kernels(self) -> Sequence[Kernel]:
        """Return both kernels for logits in bf16, and the first for float32."""
        from cuverify.ops.draft_topk import draft_topk_kernels

        wide = draft_topk_kernels(LOGIT_BITS=32, LOGIT="float")["draft_topk_partials"]
        return [*draft_topk_kernels().values(), wide]

    def batches(self, *, seed: int = 0, examples: int = 10) -> Iterator[tuple[str, LogitsBatch]]:
        """Yield logits of all kinds, of one piece and of several."""
        yield from _batches(seed, examples, requests=1, vocabularies=(130, 4500))

    def device_batches(
        self, *, seed: int = 0, examples: int = 20
    ) -> Iterator[tuple[str, LogitsBatch]]:
        """Yield the same with more rows and a larger vocabulary."""
        yield from _batches(seed, examples, requests=2, vocabularies=(5003, 20_011))

    def step(self, batch: LogitsBatch, xp: Target) -> DraftTopkStep:
        """Return a step whose buffers fit the batch."""
        return DraftTopkStep(batch, xp)


CASE = DraftTopkCase()


def _batches(
    seed: int, examples: int, *, requests: int, vocabularies: tuple[int, int]
) -> Iterator[tuple[str, LogitsBatch]]:
    rng = np.random.default_rng([seed, 0x70B])
    for number in range(examples):
        group = number // len(LOGITS_KINDS)
        kind = LOGITS_KINDS[number % len(LOGITS_KINDS)]
        shape = (requests, (3, 7)[group % 2], vocabularies[group % 2])
        batch = LogitsBatch.draw(rng, shape, (16, 64)[group % 2], kind=kind, bf16=group % 2 == 0)
        yield f"{kind} {number}: {batch.logits.dtype}, {shape[2]} logits", batch
