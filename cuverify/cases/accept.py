"""The check case of `accept`: greedy and sampled walks over drawn trees, malformed ones too."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cuverify.accept_batch import ACCEPT_RULES, AcceptBatch
from cuverify.errors import CaseError
from cuverify.reference import accept as oracle
from cuverify.static_buffers import fill, static_buffer, write

if TYPE_CHECKING:
    from cuverify.cases import Target
    from cuverify.kernel import Kernel

_POISON = 0x5A
_TREES = ("candidates", "next_token", "next_sibling", "retrieve_index")


class AcceptStep:
    """Acceptance with buffers of its own, on the host lane or on the current CUDA device.

    Parameters
    ----------
    batch : AcceptBatch
        Its rule, shapes, types and thresholds are the step's for good.
    xp : {"numpy", "torch-cuda"}
        Where the buffers are.
    """

    def __init__(self, batch: AcceptBatch, xp: Target) -> None:
        from cuverify.ops.accept import AcceptBuffers, AcceptGreedy, AcceptSampled, Argmax

        requests, n = batch.candidates.shape
        vocab = batch.scores.shape[1]
        kind = "bf16" if batch.scores.dtype == np.uint16 else "float32"
        self.inputs = {name: static_buffer(xp, (requests, n), "int64") for name in _TREES}
        self.inputs["scores"] = static_buffer(xp, (requests * n, vocab), kind)
        self.into = AcceptBuffers.allocate(
            self.inputs["candidates"], batch=requests, num_tokens=n, max_path=batch.max_path
        )
        self.written = dict(vars(self.into))
        self.draft: Any = None
        self.launches: list[Any] = []
        tree = {name: self.inputs[name] for name in _TREES}
        if batch.rule == "greedy":
            self.written["target"] = static_buffer(xp, (requests * n,), "int64")
            self.launches = [
                Argmax(self.inputs["scores"], self.written["target"]),
                AcceptGreedy(**tree, target=self.written["target"], into=self.into),
            ]
        else:
            self.inputs["uniform"] = static_buffer(xp, (requests, n), "float32")
            self.inputs["uniform_final"] = static_buffer(xp, (requests,), "float32")
            if batch.rule == "published":
                self.draft = static_buffer(xp, (requests, n, vocab), "float32")
            self.launches = [
                AcceptSampled(
                    **tree,
                    uniform=self.inputs["uniform"],
                    uniform_final=self.inputs["uniform_final"],
                    target_probs=self.inputs["scores"].reshape(requests, n, vocab),
                    into=self.into,
                    draft_probs=self.draft,
                    threshold_single=batch.threshold_single,
                    threshold_acc=batch.threshold_acc,
                )
            ]
        self._own = (batch.rule, batch.max_path, batch.threshold_single, batch.threshold_acc)
        self.refill(batch)

    @property
    def outputs(self) -> Mapping[str, Any]:
        """What is written, and the draft's probabilities where the published rule changes them."""
        drafted = {} if self.draft is None else {"draft_probs": self.draft}
        return {**self.written, **drafted}

    def refill(self, batch: AcceptBatch) -> None:
        """Write another batch of the same shapes."""
        theirs = (batch.rule, batch.max_path, batch.threshold_single, batch.threshold_acc)
        shapes = all(
            tuple(buffer.shape) == getattr(batch, name).shape
            for name, buffer in self.inputs.items()
        )
        if theirs != self._own or not shapes:
            raise CaseError(f"{batch} does not fit a step for {self._own}")
        self._batch = batch
        for name, buffer in self.inputs.items():
            write(buffer, getattr(batch, name))
        if self.draft is not None:
            fill(self.draft, 0)

    def __call__(self) -> None:
        """Accept."""
        for launch in self.launches:
            launch()

    def poison(self) -> None:
        """Fill everything that is written completely."""
        for buffer in self.written.values():
            fill(buffer, _POISON)

    def expected(self) -> dict[str, NDArray[Any]]:
        """Return the oracle's path."""
        batch = self._batch
        tree: dict[str, Any] = {name: getattr(batch, name) for name in _TREES}
        tree["max_path"] = batch.max_path
        if batch.rule == "greedy":
            target = oracle.argmax(batch.scores)
            return {**oracle.accept_greedy(**tree, target=target), "target": target}
        requests, n = batch.candidates.shape
        probs = batch.scores.reshape(requests, n, -1)
        return oracle.accept_sampled(
            **tree,
            uniform=batch.uniform,
            uniform_final=batch.uniform_final,
            target_probs=probs,
            draft_probs=np.zeros_like(probs) if self.draft is not None else None,
            threshold_single=batch.threshold_single,
            threshold_acc=batch.threshold_acc,
        )


class AcceptCase:
    """See `cuverify.cases.CheckCase`."""

    name = "accept"

    def kernels(self) -> Sequence[Kernel]:
        """Return all kernels for logits in bf16, and the argmax for float32."""
        from cuverify.ops.accept import accept_kernels

        wide = accept_kernels(LOGIT_BITS=32, LOGIT="float")["argmax_partials"]
        return [*accept_kernels().values(), wide]

    def batches(self, *, seed: int = 0, examples: int = 12) -> Iterator[tuple[str, AcceptBatch]]:
        """Yield walks by all rules, over good trees and malformed ones."""
        yield from _batches(seed, examples, requests=3, vocabulary=200)

    def device_batches(
        self, *, seed: int = 0, examples: int = 36
    ) -> Iterator[tuple[str, AcceptBatch]]:
        """Yield the same with more requests and a larger vocabulary."""
        yield from _batches(seed, examples, requests=16, vocabulary=5003)

    def step(self, batch: AcceptBatch, xp: Target) -> AcceptStep:
        """Return a step whose buffers fit the batch."""
        return AcceptStep(batch, xp)


CASE = AcceptCase()


def _batches(
    seed: int, examples: int, *, requests: int, vocabulary: int
) -> Iterator[tuple[str, AcceptBatch]]:
    rng = np.random.default_rng([seed, 0xACC])
    for number in range(examples):
        rule = ACCEPT_RULES[number % 3]
        batch = AcceptBatch.draw(
            rng, rule=rule, batch=requests, num_tokens=(1, 17, 33, 65)[number // 3 % 4],
            vocabulary=vocabulary, faulty=(0.0, 0.5)[number // 12 % 2],
            spoiled=(0.0, 0.1)[number // 6 % 2],
            bf16=rule == "greedy" and number // 3 % 2 == 0,
        )  # fmt: skip
        yield f"{rule} {number}: {batch.candidates.shape[1]} nodes", batch
