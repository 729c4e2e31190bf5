"""The check case of `verify_attention`: a whole verify step, planned and attended by one graph.

Pools hold NaN wherever nobody may read, outputs have guard columns between their rows, and the
index list is made by the plan from the request-to-token table.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cuverify.errors import CaseError
from cuverify.listed_step import NAN, NO_SLOT, Capacity, ListedStep
from cuverify.narrow import STORED
from cuverify.reference import verify_attention as oracle
from cuverify.static_buffers import fill, static_buffer, write
from cuverify.tolerances import attention_bounds
from cuverify.validators.compare import Bounded
from cuverify.verify_batch import VerifyBatch

if TYPE_CHECKING:
    from cuverify.cases import Target
    from cuverify.kernel import Kernel
    from cuverify.verify_batch import DraftSource, ElementType, IndexType
    from cuverify.verify_variants import VariantName
    from cuverify.workload import FreeOrder, RequestLengths

NUMPY_FLOPS = 10e9
"""Operations of a batch beyond which the oracle is torch on the GPU, where there is one."""

_HOST_CTAS = 4


@dataclass(frozen=True, eq=False)
class SizedBatch:
    """A batch and the sizes of the buffers that it comes in."""

    batch: VerifyBatch
    capacity: Capacity

    def __repr__(self) -> str:
        return repr(self.batch)


class VerifyAttentionStep(ListedStep):
    """A verify step with buffers of its own, on the host lane or on the current CUDA device.

    Parameters
    ----------
    sized : SizedBatch
        Its capacity and the kind of its batch (heads, columns, types, scale, where drafts come
        from) are the step's for good.
    xp : {"numpy", "torch-cuda"}
        Where the buffers are.
    num_ctas : int, optional
        Blocks that attend.
    variant : {"portable", "sm90"}, optional
        The text that attends, and whose cuts the plan makes; that of the rule if absent.
    plan_values, values : mapping of str to int, optional
        `-D` values of the kernels.
    """

    def __init__(
        self,
        sized: SizedBatch,
        xp: Target,
        *,
        num_ctas: int | None = None,
        variant: VariantName | None = None,
        plan_values: Mapping[str, int] | None = None,
        values: Mapping[str, int] | None = None,
    ) -> None:
        from cuverify.ops.verify_attention import VerifyAttention
        from cuverify.ops.verify_plan import PlanWorkspace, VerifyPlan
        from cuverify.ops.verify_starts import VerifyStarts

        batch, size = sized.batch, sized.capacity
        heads, latent, width = batch.heads, batch.latent, batch.width
        super().__init__(size, xp, batch.index_dtype, heads, latent, STORED[batch.dtype])
        self.kind = _kind(batch)
        self._batch = batch
        # a gap behind each token's queries, too, as in a tensor that holds more than them
        element, columns = STORED[batch.dtype], width + batch.row_gap
        self._queries = static_buffer(xp, (size.tokens, heads * width + batch.row_gap), element)
        self.q = self._queries[:, : heads * width].reshape(size.tokens, heads, width)
        self._pool = static_buffer(xp, (size.slots, columns), STORED[batch.pool_dtype])
        self.pool = self._pool[:, :width]
        drafts: dict[str, Any] = {}
        if batch.draft_source == "slots":
            self.out_cache_loc = static_buffer(xp, (size.tokens,), "int64")
            drafts["out_cache_loc"] = self.out_cache_loc
        else:
            self._draft_kv = static_buffer(xp, (size.tokens, columns), element)
            self.draft_kv = self._draft_kv[:, :width]
            drafts["draft_kv"] = self.draft_kv
        self.plan = VerifyPlan(
            self.seq_lens,
            self.qo_indptr,
            heads=heads,
            max_tokens=size.tokens,
            max_tree_tokens=64 * size.words,
            workspace=PlanWorkspace.allocate(
                self.seq_lens,
                max_batch=size.requests,
                max_tokens=size.tokens,
                heads=heads,
                num_ctas=num_ctas,
            ),
            variant=variant,
            values=plan_values,
            **self.lists,
        )
        self.starts = VerifyStarts(self.plan, out_cache_loc=drafts.get("out_cache_loc"))
        self.attend = VerifyAttention(
            self.q,
            self.pool,
            self.out,
            self.lse,
            plan=self.plan,
            visible=self.visible,
            sm_scale=batch.sm_scale,
            kv_scale=1.0 if batch.kv_scale is None else batch.kv_scale,
            starts=self.starts,
            variant=variant,
            values=values,
            **drafts,
        )
        self.refill(sized)

    def refill(self, sized: SizedBatch) -> None:
        """Write another batch, filled up with padded requests; what is behind it becomes stale."""
        batch = sized.batch
        if _kind(batch) != self.kind:
            raise CaseError(f"{batch} is of kind {_kind(batch)}, not {self.kind}")
        self.size.check(Capacity.of([batch]))
        filled = _filled(batch, self.size.requests)
        self._batch = filled
        layout, arrays = filled.layout, kernel_inputs(filled, self.size.words)
        self.write_lists(layout, arrays["visible"])
        fill(self._queries, NAN)
        write(self.q, arrays["q"])
        fill(self._pool, NAN)
        write(self.pool, arrays["pool"])
        if batch.draft_source == "slots":
            fill(self.out_cache_loc, NO_SLOT)
            write(self.out_cache_loc, layout.out_cache_loc)
        else:
            fill(self._draft_kv, NAN)
            write(self.draft_kv, arrays["draft_kv"])

    def __call__(self) -> None:
        """Plan the step, lay out what blocks read first, and attend."""
        self.plan()
        self.starts()
        self.attend()

    def poison(self) -> None:
        """Fill outputs, guards and scratch with NaN."""
        self.poison_outputs()
        scratch = self.attend.workspace
        for buffer in (scratch.partial_out, scratch.partial_lse):
            fill(buffer, NAN)

    def expected(self) -> dict[str, Bounded]:
        """Return what the oracle makes of the present batch; rows of no request stay poisoned."""
        return self.bounded(_reference(self._batch, self.size.words, self.xp))


class VerifyAttentionCase:
    """See `cuverify.cases.CheckCase`."""

    name = "verify_attention"

    def kernels(self) -> Sequence[Kernel]:
        """Return the kernels of both texts, for some numbers of heads, element and index types."""
        from cuverify.ops.verify_attention import verify_attention_kernels

        return [
            *verify_attention_kernels(),
            *verify_attention_kernels(HEADS=16, KV_INDEX="long long"),
            *verify_attention_kernels(HEADS=64, ELEMENT="fp16", KV_ELEMENT="fp16"),
            *verify_attention_kernels(HEADS=128, KV_INDEX="long long", KV_ELEMENT="fp8_e4m3"),
            *verify_attention_kernels("sm90"),
            *verify_attention_kernels("sm90", HEADS=16, KV_INDEX="long long"),
            *verify_attention_kernels("sm90", HEADS=64, ELEMENT="fp16", KV_ELEMENT="fp16"),
        ]

    def batches(self, *, seed: int = 0, examples: int = 16) -> Iterator[tuple[str, SizedBatch]]:
        """Yield drawn batches with few columns, and real ones with all of them.

        The host lane attends to about a quarter of a million pairs of rows a second under the
        checkers, and each batch is run four times: the real ones have at most 1.6 million pairs.
        """
        from cuverify.strategies import drawn, verify_batches
        from cuverify.verify_workload import real_verify_batches

        kinds: tuple[tuple[int, IndexType, ElementType, float | None], ...] = (
            (8, "int32", "bf16", None),
            (16, "int64", "bf16", None),
            (64, "int32", "fp16", None),
            (128, "int64", "bf16", 0.07),
        )
        for turn, (heads, index, dtype, kv_scale) in enumerate(kinds):
            number = examples * (turn + 1) // len(kinds) - examples * turn // len(kinds)
            strategy = verify_batches(
                max_requests=3,
                max_tree_tokens=20 if heads <= 16 else 5,
                heads=(heads,),
                index_dtypes=(index,),
                widths=((64, 16),),
                elements=((dtype, kv_scale),),
            )
            name = f"drawn, H {heads}, {_types(dtype, kv_scale)}"
            yield from _alone(name, drawn(strategy, number, seed=seed + heads))
        for tree_tokens, heads, requests in ((8, 8, 4), (17, 8, 3), (33, 16, 1), (65, 8, 1)):
            real = real_verify_batches(
                4096,
                requests=requests,
                tree_tokens=tree_tokens,
                steps=1,
                padded=1,
                heads=heads,
                seed=seed,
            )
            apart: DraftSource = "separate" if tree_tokens % 4 == 1 else "slots"
            kind: dict[str, Any] = {"draft_source": apart, "row_gap": 16}
            if tree_tokens == 17:
                kind["kv_scale"] = 0.07
            if tree_tokens == 65:
                kind["dtype"] = "fp16"
            batches = [replace(batch, **kind) for batch in real]
            yield from _alone(f"real, T {tree_tokens}, H {heads}", batches)

    def device_batches(
        self, *, seed: int = 0, examples: int = 60
    ) -> Iterator[tuple[str, SizedBatch]]:
        """Yield `examples` drawn batches and 22 real ones, in groups that share buffers.

        The oracle takes about a second for each of them.
        """
        from cuverify.strategies import drawn, verify_batches

        kinds: tuple[
            tuple[int, IndexType, DraftSource, int, tuple[int, int], ElementType, float | None], ...
        ] = (
            (8, "int32", "slots", 0, (512, 64), "bf16", None),
            (16, "int32", "separate", 8, (512, 64), "bf16", None),
            (8, "int64", "separate", 0, (512, 64), "bf16", 0.07),
            (16, "int64", "slots", 56, (512, 64), "fp16", None),
            (64, "int32", "slots", 0, (512, 64), "bf16", 1.0),
            (128, "int64", "separate", 0, (512, 64), "bf16", None),
            (8, "int32", "slots", 8, (64, 16), "bf16", None),
        )
        for number, (heads, index, source, gap, width, dtype, kv_scale) in enumerate(kinds):
            kind: dict[str, Any] = {
                "heads": (heads,),
                "index_dtypes": (index,),
                "draft_sources": (source,),
                "row_gaps": (gap,),
                "widths": (width,),
                "elements": ((dtype, kv_scale),),
            }
            types = _types(dtype, kv_scale)
            name = f"drawn, H {heads}, {width[0]} columns, {types}, {index}, drafts from {source}"
            # many small batches and a few large ones, each in buffers of their size
            share = examples * (number + 1) // len(kinds) - examples * number // len(kinds)
            large = share // 5
            many = heads <= 16  # else a batch is as large with fewer tokens
            strategy = verify_batches(
                max_requests=5 if many else 3,
                max_seq_len=600,
                max_tree_tokens=65 if many else 17,
                num_slots=4096,
                **kind,
            )
            yield from _grouped(name, drawn(strategy, share - large, seed=seed + number))
            strategy = verify_batches(
                max_requests=8 if many else 4,
                max_seq_len=6000,
                max_tree_tokens=256 if many else 33,
                max_padded=8 if many else 2,
                num_slots=65_536,
                **kind,
            )
            # but for the first: the simplest batch comes first, and it is among the small ones
            batches = drawn(strategy, large + 1, seed=seed + number)[1:]
            yield from _grouped(f"{name}, large", batches)
        for kind_of, batches in _real_groups(seed):
            yield from _grouped(f"real, {kind_of}", batches)

    def step(self, sized: SizedBatch, xp: Target) -> VerifyAttentionStep:
        """Return a step whose buffers have the batch's capacity."""
        return VerifyAttentionStep(sized, xp, num_ctas=_HOST_CTAS if xp == "numpy" else None)


CASE = VerifyAttentionCase()


def _real_groups(seed: int) -> Iterator[tuple[str, list[VerifyBatch]]]:
    """Yield eleven groups of two real batches: from 180,000 rows of prefix to 64 short requests."""
    from cuverify.verify_workload import long_requests, real_verify_batches

    long = long_requests(180_000, shortest=170_000)
    middle = long_requests(60_000, shortest=10_000)
    many = long_requests(20_000, shortest=8_000)
    bf16, codes = _types("bf16", None), _types("bf16", 0.07)
    groups: tuple[tuple[int, int, int, int, int, RequestLengths | None, FreeOrder, str], ...] = (
        (760_000, 1, 0, 8, 8, long, "fifo", bf16),
        (760_000, 1, 0, 64, 16, long, "lifo", bf16),
        (760_000, 2, 1, 17, 8, long, "sorted", codes),
        (400_000, 4, 0, 33, 8, middle, "fifo", bf16),
        (400_000, 8, 2, 16, 16, middle, "lifo", "fp16"),
        (400_000, 2, 0, 256, 8, middle, "fifo", bf16),
        (60_000, 12, 4, 65, 8, None, "fifo", codes),
        (60_000, 8, 0, 129, 16, None, "lifo", bf16),
        (60_000, 6, 0, 17, 128, None, "fifo", bf16),
        (120_000, 48, 16, 17, 8, None, "sorted", bf16),
        (900_000, 64, 0, 8, 16, many, "fifo", bf16),
    )
    for slots, requests, padded, tree_tokens, heads, lengths, free_list, types in groups:
        batches = real_verify_batches(
            slots,
            requests=requests,
            tree_tokens=tree_tokens,
            heads=heads,
            padded=padded,
            lengths=lengths,
            free_list=free_list,
            seed=seed,
        )
        # one kind of drafts a group, so that one graph can be replayed on both
        source: DraftSource = "separate" if padded % 3 == 1 else "slots"
        name = f"B {requests + padded}, T {tree_tokens}, H {heads}, {types}"
        kind: dict[str, Any] = {
            "draft_source": source,
            "dtype": "fp16" if types == "fp16" else "bf16",
            "kv_scale": 0.07 if types == codes else None,
        }
        yield name, [replace(batch, **kind) for batch in batches]


def _kind(batch: VerifyBatch) -> tuple[Any, ...]:
    """Return what a step cannot change after it was made."""
    return (
        batch.heads,
        batch.latent,
        batch.rope,
        batch.sm_scale,
        batch.draft_source,
        batch.index_dtype,
        batch.row_gap,
        batch.dtype,
        batch.kv_scale,
    )


def _types(dtype: ElementType, kv_scale: float | None) -> str:
    """Return in words what queries and pool are made of."""
    return dtype if kv_scale is None else f"{dtype} beside codes of {kv_scale:g}"


def _alone(kind: str, batches: Sequence[VerifyBatch]) -> Iterator[tuple[str, SizedBatch]]:
    for number, batch in enumerate(batches):
        yield f"{kind}, {number}", SizedBatch(batch, Capacity.of([batch]))


def _grouped(kind: str, batches: Sequence[VerifyBatch]) -> Iterator[tuple[str, SizedBatch]]:
    if not batches:
        return
    size = Capacity.of(batches)
    for number, batch in enumerate(batches):
        yield f"{kind}, {number}", SizedBatch(batch, size)


# A batch comes back several times: captured, replayed, replayed again behind others. The caches
# know it by what it is, not by what it holds.
@functools.lru_cache(maxsize=16)
def _filled(batch: VerifyBatch, requests: int) -> VerifyBatch:
    return batch.with_requests(requests)


@functools.lru_cache(maxsize=4)
def kernel_inputs(batch: VerifyBatch, words: int) -> dict[str, Any]:
    """Return what attention reads of a batch, as the oracle takes it; nobody writes into it.

    Parameters
    ----------
    batch : VerifyBatch
    words : int
        Visibility words of a token.
    """
    return {**batch.oracle_arguments(), "visible": batch.visible(words)}


@functools.lru_cache(maxsize=4)
def _reference(batch: VerifyBatch, words: int, xp: Target) -> dict[str, Bounded]:
    from cuverify import torch_oracle

    device = "cpu" if xp == "numpy" else "cuda"
    arguments = kernel_inputs(batch, words)
    if xp == "numpy" or batch.flops <= NUMPY_FLOPS:
        exact = oracle.verify_attention(**arguments)
    else:
        exact = torch_oracle.verify_attention(**arguments, device=device)
    baseline = torch_oracle.baseline_attention(**arguments, device=device)
    return attention_bounds(exact, baseline, dtype=batch.dtype)
