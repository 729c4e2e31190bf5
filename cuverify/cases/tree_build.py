"""The check case of `tree_build`: drafts of all kinds, and trees by their parents, good and bad."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cuverify.draft_batch import DRAFT_KINDS, DraftBatch, ParentsBatch
from cuverify.errors import CaseError
from cuverify.reference import tree_build as oracle
from cuverify.static_buffers import fill, static_buffer, write
from cuverify.tree import MAX_BIT_PACKED_TOKENS, MaskMode

if TYPE_CHECKING:
    from cuverify.cases import Target
    from cuverify.kernel import Kernel

_POISON = 0x5A
_UNMASKED = 0xA5  # what the mask holds where nobody writes
# (depth, k, nodes): a word, two, many; a warp's lanes once and several times
_SHAPES = ((1, 1, 2), (7, 8, 33), (15, 16, 65), (3, 64, 129), (2, 5, 40), (32, 2, 17), (15, 4, 257))
_LONGEST = 300  # of a prefix, where a full mask is written on the host lane


class TreeBuildStep:
    """Trees with buffers of their own, on the host lane or on the current CUDA device.

    Parameters
    ----------
    batch : DraftBatch or ParentsBatch
        Its shapes and types are the step's for good.
    xp : {"numpy", "torch-cuda"}
        Where the buffers are.
    mode : {"full", "query_only", "bit_packed"}
        Of the mask.
    fill_prefix : bool
        Of a full mask.
    longest : int
        Longest prefix that the full mask of a step has room for.
    """

    def __init__(
        self,
        batch: DraftBatch | ParentsBatch,
        xp: Target,
        *,
        mode: MaskMode = "query_only",
        fill_prefix: bool = False,
        longest: int = _LONGEST,
    ) -> None:
        from cuverify.ops.tree_build import TreeBuffers, TreeBuild, TreeLinks, TreeMask

        requests, n = len(batch.seq_lens), batch.num_tokens
        self.mode, self.fill_prefix, self.longest = mode, fill_prefix, longest
        self.seq_lens = static_buffer(xp, (requests,), batch.index)
        self.trees = TreeBuffers.allocate(self.seq_lens, batch=requests, num_tokens=n)
        self.build: TreeBuild | TreeLinks
        if isinstance(batch, DraftBatch):
            self.inputs = {
                "logprobs": static_buffer(xp, batch.logprobs.shape, "float32"),
                "token_ids": static_buffer(xp, batch.token_ids.shape, batch.index),
                "root_tokens": static_buffer(xp, (requests,), "int64"),
                "seq_lens": self.seq_lens,
            }
            self.build = TreeBuild(**self.inputs, into=self.trees)
            unwritten = set()
        else:
            self.inputs = {"parents": self.trees.parents, "seq_lens": self.seq_lens}
            if batch.sizes is not None:
                self.inputs["sizes"] = self.trees.sizes
            self.build = TreeLinks(self.seq_lens, self.trees, sized=batch.sizes is not None)
            unwritten = {"tokens", "ranks", "parents", "sizes"}
        columns = n + (longest if mode == "full" else 0)
        self.mask = static_buffer(xp, (requests * n * columns + 5,), "uint8")
        self.mask_status = static_buffer(xp, (requests,), "int32")
        self.write_mask = TreeMask(
            self.seq_lens, self.trees, self.mask, self.mask_status,
            mode=mode, fill_prefix=fill_prefix,
        )  # fmt: skip
        self.written = {
            name: tensor for name, tensor in vars(self.trees).items() if name not in unwritten
        } | {"mask_status": self.mask_status}
        self.refill(batch)

    @property
    def outputs(self) -> Mapping[str, Any]:
        """All that is written, and the mask."""
        return {**self.written, "mask": self.mask}

    def refill(self, batch: DraftBatch | ParentsBatch) -> None:
        """Write another batch of the same shapes."""
        for name, buffer in self.inputs.items():
            values = getattr(batch, name, None)
            if values is None or values.shape != tuple(buffer.shape):
                raise CaseError(f"{batch} does not fit a step with {name} of {buffer.shape}")
        if batch.num_tokens != self.trees.parents.shape[1]:
            raise CaseError(f"{batch} has another number of nodes")
        if isinstance(batch, ParentsBatch) and (batch.sizes is None) == ("sizes" in self.inputs):
            raise CaseError(f"{batch} has sizes where the step has none, or the other way round")
        self._batch = batch
        for name, buffer in self.inputs.items():
            write(buffer, getattr(batch, name))
        fill(self.mask, _UNMASKED)

    def __call__(self) -> None:
        """Build or link the trees, and write the mask."""
        self.build()
        self.write_mask()

    def poison(self) -> None:
        """Fill everything that is written completely; the mask is refilled."""
        for buffer in self.written.values():
            fill(buffer, _POISON)

    def expected(self) -> dict[str, NDArray[Any]]:
        """Return the oracle's trees and mask."""
        batch = self._batch
        words = int(self.trees.visible.shape[1])
        if isinstance(batch, DraftBatch):
            found = oracle.tree_build(
                batch.logprobs, batch.token_ids, batch.root_tokens, batch.seq_lens,
                num_tokens=batch.num_tokens, words=words,
            )  # fmt: skip
        else:
            found = oracle.tree_links(batch.parents, batch.seq_lens, words=words, sizes=batch.sizes)
        mask = oracle.tree_mask(
            found["visible"],
            batch.seq_lens,
            np.full(self.mask.shape[0], _UNMASKED, np.uint8),
            mode=self.mode,
            fill_prefix=self.fill_prefix,
        )
        return {**found, "mask": mask["mask"], "mask_status": mask["status"]}


class TreeBuildCase:
    """See `cuverify.cases.CheckCase`."""

    name = "tree_build"

    def kernels(self) -> Sequence[Kernel]:
        """Return all kernels with indices of 64 bits, and `tree_build` for the largest trees."""
        from cuverify.ops.tree_build import tree_kernels

        return [
            *tree_kernels(SEQ_INDEX="long long").values(),
            tree_kernels(IN_SHARED=1, TOKEN_INDEX="int")["tree_build"],
        ]

    def batches(self, *, seed: int = 0, examples: int = 16) -> Iterator[tuple[str, Any]]:
        """Yield drafts of all kinds, trees of any shape, and malformed ones."""
        yield from _batches(seed, examples, requests=4)

    def device_batches(self, *, seed: int = 0, examples: int = 48) -> Iterator[tuple[str, Any]]:
        """Yield the same in larger batches."""
        yield from _batches(seed, examples, requests=64)

    def step(self, batch: DraftBatch | ParentsBatch, xp: Target) -> TreeBuildStep:
        """Return a step whose buffers fit the batch; the mask's mode goes by its size."""
        mode: MaskMode = "full" if batch.index == "int64" else "query_only"
        if batch.num_tokens <= MAX_BIT_PACKED_TOKENS:
            mode = "bit_packed"
        return TreeBuildStep(batch, xp, mode=mode, fill_prefix=batch.num_tokens % 3 == 0)


CASE = TreeBuildCase()


def _batches(seed: int, examples: int, *, requests: int) -> Iterator[tuple[str, Any]]:
    """Yield groups of equal shapes, so that a graph can be replayed on the members of one."""
    rng = np.random.default_rng([seed, 0x7EEE])
    for number in range(examples):
        group = number // len(DRAFT_KINDS)
        depth, k, n = _SHAPES[group % len(_SHAPES)]
        kind = DRAFT_KINDS[number % len(DRAFT_KINDS)]
        batch = DraftBatch.draw(
            rng, batch=requests, depth=depth, k=k, num_tokens=n, kind=kind,
            index=("int64", "int32")[group % 2], longest=_LONGEST,
        )  # fmt: skip
        yield f"drafts {number}: {kind}, {n} nodes", batch
    for number in range(examples // 2):
        n = (17, 65, 130)[number // 4 % 3]
        trees = ParentsBatch.draw(
            rng, batch=requests, num_tokens=n, faulty=(0.0, 0.5)[number % 2],
            sized=number // 2 % 2 == 1, index=("int64", "int32")[number // 4 % 2],
            longest=_LONGEST,
        )  # fmt: skip
        yield f"parents {number}: {n} nodes", trees
