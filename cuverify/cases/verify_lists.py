"""The check case of `verify_lists`: drawn lengths, tables and masks of all modes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from numpy.typing import NDArray

from cuverify.errors import CaseError
from cuverify.reference import verify_lists as oracle
from cuverify.static_buffers import fill, static_buffer, write
from cuverify.tree import DraftTree, MaskMode

if TYPE_CHECKING:
    from cuverify.cases import Target
    from cuverify.kernel import Kernel

_POISON = 0x5A
_UNLISTED = -77  # what the index list holds behind the last slot: left as it is

Drafts = Literal["none", "given", "table"]
_DRAFTS: tuple[Drafts, ...] = ("none", "given", "table")
_MODES: tuple[MaskMode, ...] = ("full", "query_only", "bit_packed")


@dataclass(frozen=True, eq=False)
class ListsBatch:
    """What the lists are made of.

    Attributes
    ----------
    seq_lens, req_pool_indices : ndarray of int64, shape (B,)
    req_to_token : ndarray of int32, shape (rows, width)
    out_cache_loc : ndarray of int64, shape (B * num_tokens,)
    mask : ndarray of uint8
        A tree mask of the mode, with anything behind it.
    num_tokens : int
    mode : {"full", "query_only", "bit_packed"}
    drafts : {"none", "given", "table"}
    graph : bool
        Dtypes as in SGLang's graph buffers: int64 but for `kv_indptr`. Otherwise int32.
    capacity : int
        Length of the index list.
    """

    seq_lens: NDArray[np.int64]
    req_pool_indices: NDArray[np.int64]
    req_to_token: NDArray[np.int32]
    out_cache_loc: NDArray[np.int64]
    mask: NDArray[np.uint8]
    num_tokens: int
    mode: MaskMode
    drafts: Drafts
    graph: bool
    capacity: int

    @classmethod
    def draw(
        cls,
        rng: np.random.Generator,
        *,
        batch: int,
        num_tokens: int,
        longest: int,
        mode: MaskMode,
        drafts: Drafts,
        graph: bool,
    ) -> ListsBatch:
        """Draw a batch whose last requests are padding: a token, row 0, slot 0, a mask of noise."""
        n = num_tokens
        lens = rng.integers(0, longest + 1, batch)
        table = rng.integers(1, 2**31 - 1, (batch + 2, longest + n + int(rng.integers(3))))
        rows = rng.permutation(batch + 1)[:batch] + 1
        slots = rng.integers(1, 2**31 - 1, batch * n)
        padded = int(rng.integers(batch))
        trees = [DraftTree.random(n, rng, reach=(None, 2, 4)[rng.integers(3)]) for _ in lens]
        if padded:
            lens[-padded:], rows[-padded:], slots[-padded * n :] = 1, 0, 0
            table[0] = 0
        parts = []
        for at, (tree, length) in enumerate(zip(trees, lens.tolist(), strict=True)):
            part = tree.sglang_mask(mode, length).view(np.uint8).copy()
            if at >= batch - padded:
                part = rng.integers(0, 256, part.shape).astype(np.uint8)
            elif mode == "full":
                part[:, :length] = rng.integers(0, 2, (n, length))  # nobody reads it
            parts.append(part.reshape(-1))
        noise = rng.integers(0, 256, 9 + (batch * n * longest if mode == "full" else 0))
        size = sum(map(len, parts))
        mask = np.concatenate([*parts, noise.astype(np.uint8)])
        mask = mask[: batch * n * (longest + n) + 9] if mode == "full" else mask[: size + 9]
        capacity = batch * (longest + (0 if drafts == "none" else n)) + 3
        return cls(
            lens, rows, table.astype(np.int32), slots, mask, n, mode, drafts, graph, capacity
        )

    def spoiled(self, rng: np.random.Generator) -> ListsBatch:
        """Return the batch with something wrong with one of its requests."""
        lens, rows = self.seq_lens.copy(), self.req_pool_indices.copy()
        at = int(rng.integers(len(lens)))
        fault = int(rng.integers(4))
        if fault == 0:
            beyond = (2**31, 2**60, 2**63 - 1) if self.graph else ()  # n of them wrap around
            lens[at] = rng.choice([-1, -2, -3, *beyond])
        elif fault == 1:
            rows[at] = rng.choice([-1, len(self.req_to_token), 2**31 - 1])
        elif fault == 2:
            lens[at] = rng.choice([self.req_to_token.shape[1] + 1, 2**31 - 1])
        else:
            return replace(self, capacity=max(0, int(lens.sum()) - 1))
        return replace(self, seq_lens=lens, req_pool_indices=rows)

    def __repr__(self) -> str:
        return (
            f"ListsBatch({len(self.seq_lens)} requests, {self.num_tokens} drafts, {self.mode}, "
            f"drafts {self.drafts}, {'graph' if self.graph else 'eager'} buffers)"
        )


class VerifyListsStep:
    """The lists with buffers of its own, on the host lane or on the current CUDA device.

    Parameters
    ----------
    batch : ListsBatch
        Its sizes, mode, drafts and dtypes are the step's for good.
    xp : {"numpy", "torch-cuda"}
        Where the buffers are.
    """

    def __init__(self, batch: ListsBatch, xp: Target) -> None:
        from cuverify.ops.verify_lists import VerifyLists, VerifyWords

        requests, n = len(batch.seq_lens), batch.num_tokens
        index = "int64" if batch.graph else "int32"
        self.inputs = {
            "seq_lens": static_buffer(xp, (requests,), index),
            "req_pool_indices": static_buffer(xp, (requests,), index),
            "req_to_token": static_buffer(xp, batch.req_to_token.shape, "int32"),
            "out_cache_loc": static_buffer(xp, (requests * n,), "int64"),
            "mask": static_buffer(xp, batch.mask.shape, "uint8"),
        }
        self.written = {
            "kv_indptr": static_buffer(xp, (requests + 1,), "int32"),
            "qo_indptr": static_buffer(xp, (requests + 1,), index),
            "mask_indptr": static_buffer(xp, (requests + 1,), "int64"),
            "status": static_buffer(xp, (4,), "int32"),
            "visible": static_buffer(xp, (requests * n, -(-n // 64)), "uint64"),
        }
        self.kv_indices = static_buffer(xp, (batch.capacity,), index)
        given = {"out_cache_loc": self.inputs["out_cache_loc"]} if batch.drafts == "given" else {}
        self.lists = VerifyLists(
            self.inputs["seq_lens"],
            num_tokens=n,
            kv_indptr=self.written["kv_indptr"],
            qo_indptr=self.written["qo_indptr"],
            mask_indptr=self.written["mask_indptr"],
            status=self.written["status"],
            kv_indices=self.kv_indices,
            req_to_token=self.inputs["req_to_token"],
            req_pool_indices=self.inputs["req_pool_indices"],
            drafts=batch.drafts,
            **given,
        )
        self.words = VerifyWords(
            self.inputs["mask"],
            self.inputs["seq_lens"],
            self.written["visible"],
            mode=batch.mode,
            mask_indptr=self.written["mask_indptr"] if batch.mode == "full" else None,
        )
        self._kind = (batch.mode, batch.drafts, batch.num_tokens, batch.capacity)
        self.refill(batch)

    @property
    def outputs(self) -> Mapping[str, Any]:
        """All that is written."""
        return {**self.written, "kv_indices": self.kv_indices}

    def refill(self, batch: ListsBatch) -> None:
        """Write another batch of the same sizes."""
        same = (batch.mode, batch.drafts, batch.num_tokens, batch.capacity) == self._kind
        shapes = all(
            tuple(buffer.shape) == getattr(batch, name).shape
            for name, buffer in self.inputs.items()
        )
        if not same or not shapes:
            raise CaseError(f"{batch} does not fit a step for {self._kind}")
        self._batch = batch
        for name, buffer in self.inputs.items():
            write(buffer, getattr(batch, name))
        fill(self.kv_indices, _UNLISTED)

    def __call__(self) -> None:
        """Write lists and words."""
        self.lists()
        self.words()

    def poison(self) -> None:
        """Fill everything that is written completely; the index list is refilled."""
        for buffer in self.written.values():
            fill(buffer, _POISON)

    def expected(self) -> dict[str, NDArray[Any]]:
        """Return the oracle's lists and words, in the buffers' dtypes."""
        batch = self._batch
        index = np.dtype(np.int64 if batch.graph else np.int32)
        found = oracle.verify_lists(
            batch.seq_lens,
            num_tokens=batch.num_tokens,
            kv_capacity=min(batch.capacity, 2**31 - 1),
            req_to_token=batch.req_to_token,
            req_pool_indices=batch.req_pool_indices,
            drafts=batch.drafts,
            out_cache_loc=batch.out_cache_loc,
        )
        listed = np.full(batch.capacity, _UNLISTED, index)
        listed[: len(found["kv_indices"])] = found["kv_indices"]
        return {
            "kv_indptr": found["kv_indptr"].astype(np.int32),
            "qo_indptr": found["qo_indptr"].astype(index),
            "mask_indptr": found["mask_indptr"],
            "status": found["status"],
            "kv_indices": listed,
            "visible": oracle.verify_words(
                batch.mask,
                batch.seq_lens,
                num_tokens=batch.num_tokens,
                words=-(-batch.num_tokens // 64),
                mode=batch.mode,
                mask_indptr=found["mask_indptr"] if batch.mode == "full" else None,
            ),
        }


class VerifyListsCase:
    """See `cuverify.cases.CheckCase`."""

    name = "verify_lists"

    def kernels(self) -> Sequence[Kernel]:
        """Return all kernels with indices of 32 bits, and with indices of 64."""
        from cuverify.ops.verify_lists import list_kernels

        names = ("SEQ_INDEX", "POOL_INDEX", "KV_BOUND", "QO_INDEX", "KV_INDEX")
        wide = list_kernels(**dict.fromkeys(names, "long long"))
        return [*list_kernels().values(), *wide.values()]

    def batches(self, *, seed: int = 0, examples: int = 12) -> Iterator[tuple[str, ListsBatch]]:
        """Yield drawn steps of all modes, and faulty ones."""
        yield from _batches(seed, examples, requests=5, longest=70)

    def device_batches(
        self, *, seed: int = 0, examples: int = 36
    ) -> Iterator[tuple[str, ListsBatch]]:
        """Yield the same with more requests and longer prefixes."""
        yield from _batches(seed, examples, requests=48, longest=3000)

    def step(self, batch: ListsBatch, xp: Target) -> VerifyListsStep:
        """Return a step whose buffers fit the batch."""
        return VerifyListsStep(batch, xp)


CASE = VerifyListsCase()


def _batches(
    seed: int, examples: int, *, requests: int, longest: int
) -> Iterator[tuple[str, ListsBatch]]:
    rng = np.random.default_rng([seed, 0x1157])
    for number in range(examples):
        mode = _MODES[number % 3]
        nodes = 17 if mode == "bit_packed" else (1, 33, 65)[number % 7 % 3]
        batch = ListsBatch.draw(
            rng, batch=requests, num_tokens=nodes,
            longest=longest, mode=mode, drafts=_DRAFTS[number // 3 % 3], graph=number // 9 % 2 == 1,
        )  # fmt: skip
        yield f"drawn {number}: {mode}, drafts {batch.drafts}", batch
        if number % 3 == 0:
            yield f"faulty {number}", batch.spoiled(rng)
