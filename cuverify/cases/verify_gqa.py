"""The check case of `verify_gqa`: a whole verify step, planned and attended by one graph.

Groups of 1 to 8 query heads, one to eight KV heads, pages of 1, 16 and 64 tokens, and the block of
a block-diffusion drafter, ``dflash_block``, whose 16 tokens see each other and the whole context.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from cuverify.cases.verify_attention import NUMPY_FLOPS
from cuverify.errors import CaseError
from cuverify.gqa_batch import HEAD_DIM, KEY_WIDTH, SM_SCALE, GqaBatch
from cuverify.kv_layout import KvLayout
from cuverify.listed_step import NAN, NO_SLOT, Capacity, ListedStep
from cuverify.reference.verify_gqa import verify_gqa as oracle
from cuverify.static_buffers import fill, static_buffer, write
from cuverify.tolerances import attention_bounds
from cuverify.tree import DraftTree
from cuverify.validators.compare import Bounded
from cuverify.verify_batch import VerifyBatch

if TYPE_CHECKING:
    from cuverify.cases import Target
    from cuverify.kernel import Kernel
    from cuverify.launching import PartialType
    from cuverify.verify_batch import DraftSource, IndexType
    from cuverify.verify_variants import VariantName

_HOST_CTAS = 3
_BLOCK = 16  # tokens of a drafter's block


@dataclass(frozen=True, eq=False)
class SizedGqaBatch:
    """A batch and the sizes of the buffers that it comes in."""

    batch: GqaBatch
    capacity: Capacity

    def __repr__(self) -> str:
        return repr(self.batch)


class VerifyGqaStep(ListedStep):
    """A verify step with buffers of its own, on the host lane or on the current CUDA device.

    Parameters
    ----------
    sized : SizedGqaBatch
        Its capacity and the kind of its batch (heads, types, scale, where drafts come from) are the
        step's for good.
    xp : {"numpy", "torch-cuda"}
        Where the buffers are.
    num_ctas : int, optional
        Blocks that attend for each KV head.
    combine_ctas, partial, plan_values, variant, values
        As for the ops.
    """

    def __init__(
        self,
        sized: SizedGqaBatch,
        xp: Target,
        *,
        num_ctas: int | None = None,
        combine_ctas: int | None = None,
        partial: PartialType | None = None,
        plan_values: Mapping[str, int] | None = None,
        variant: VariantName | None = None,
        values: Mapping[str, int] | None = None,
    ) -> None:
        from cuverify.ops.verify_gqa import VerifyGqa, plan_verify_gqa

        batch, size = sized.batch, sized.capacity
        base, heads = batch.base, batch.heads
        super().__init__(size, xp, base.index_dtype, heads, HEAD_DIM)
        self.kind = _kind(batch)
        self._batch = batch
        # gaps behind each token's queries and rows, as in tensors that hold more than them
        self.rows: dict[str, Any] = {}
        self._wide: dict[str, Any] = {}
        self._add_rows("q", size.tokens, heads, base.row_gap)
        for name in ("k_buffer", "v_buffer"):
            self._add_rows(name, size.slots, batch.kv_heads, base.row_gap)
        drafts: dict[str, Any] = {}
        if base.draft_source == "slots":
            self.out_cache_loc = static_buffer(xp, (size.tokens,), "int64")
            drafts["out_cache_loc"] = self.out_cache_loc
        else:
            for name in ("k_extend", "v_extend"):
                drafts[name] = self._add_rows(name, size.tokens, batch.kv_heads, base.row_gap)
        self.plan = plan_verify_gqa(
            self.seq_lens,
            self.qo_indptr,
            group=batch.group,
            kv_heads=batch.kv_heads,
            max_tokens=size.tokens,
            max_tree_tokens=size.tree,
            num_ctas=num_ctas,
            variant=variant,
            values=plan_values,
            **self.lists,
        )
        self.attend = VerifyGqa(
            self.rows["q"],
            self.rows["k_buffer"],
            self.rows["v_buffer"],
            self.out,
            self.lse,
            plan=self.plan,
            visible=self.visible,
            sm_scale=base.sm_scale,
            combine_ctas=combine_ctas,
            partial=partial,
            variant=variant,
            values=values,
            **drafts,
        )
        self.refill(sized)

    def refill(self, sized: SizedGqaBatch) -> None:
        """Write another batch, filled up with padded requests; what is behind it becomes stale."""
        batch = sized.batch
        if _kind(batch) != self.kind:
            raise CaseError(f"{batch} is of kind {_kind(batch)}, not {self.kind}")
        self.size.check(Capacity.of([batch.base]))
        filled = _filled(batch, self.size.requests)
        self._batch = filled
        layout, arrays = filled.base.layout, _inputs(filled, self.size.words)
        self.write_lists(layout, arrays["visible"])
        for name, rows in self.rows.items():
            fill(self._wide[name], NAN)
            write(rows, arrays[name])
        if filled.base.draft_source == "slots":
            fill(self.out_cache_loc, NO_SLOT)
            write(self.out_cache_loc, layout.out_cache_loc)

    def __call__(self) -> None:
        """Plan the step and attend."""
        self.plan()
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

    def _add_rows(self, name: str, count: int, heads: int, gap: int) -> Any:
        wide = static_buffer(self.xp, (count, heads * HEAD_DIM + gap), "bf16")
        self._wide[name] = wide
        self.rows[name] = wide[:, : heads * HEAD_DIM].reshape(count, heads, HEAD_DIM)
        return self.rows[name]


class VerifyGqaCase:
    """See `cuverify.cases.CheckCase`."""

    name = "verify_gqa"

    def kernels(self) -> Sequence[Kernel]:
        """Return the kernels of each text and row tile, for groups of 8, 4 and 5."""
        from cuverify.ops.verify_gqa import COMPACT_VALUES, VALUES, verify_gqa_kernels

        return [
            *verify_gqa_kernels(GROUP=8, ROWS=16, **VALUES[16]),
            *verify_gqa_kernels(GROUP=4, ROWS=32, **VALUES[32]),
            *verify_gqa_kernels(GROUP=8, ROWS=64, **VALUES[64]),
            *verify_gqa_kernels(GROUP=5, ROWS=64, KV_INDEX="long long", **VALUES[64]),
            *verify_gqa_kernels(GROUP=8, ROWS=64, **COMPACT_VALUES[64]),
            *verify_gqa_kernels("sm90", GROUP=5, ROWS=64, KV_INDEX="long long"),
            *verify_gqa_kernels("sm90", GROUP=8, ROWS=128),
        ]

    def batches(self, *, seed: int = 0, examples: int = 12) -> Iterator[tuple[str, SizedGqaBatch]]:
        """Yield drawn batches of each kind, real ones, and a drafter's block."""
        kinds = _KINDS[:2]  # each text is built for the host lane and its checkers
        for number, kind in enumerate(kinds):
            share = examples * (number + 1) // len(kinds) - examples * number // len(kinds)
            batches = _drawn(kind, share, seed + number, max_requests=3, max_tree_tokens=20)
            yield from _grouped(f"drawn, {_name(kind)}", batches)
        yield from _grouped("real, T 17, 4 x 2", _real(2048, 2, 17, group=4, kv_heads=2, seed=seed))
        yield from _grouped("dflash_block", [_dflash_block([200, 33], group=4, seed=seed)])

    def device_batches(
        self, *, seed: int = 0, examples: int = 40
    ) -> Iterator[tuple[str, SizedGqaBatch]]:
        """Yield `examples` drawn batches and 12 real ones, in groups that share buffers."""
        for number, kind in enumerate(_KINDS):
            share = examples * (number + 1) // len(_KINDS) - examples * number // len(_KINDS)
            large = share // 4
            name = f"drawn, {_name(kind)}"
            batches = _drawn(
                kind, share - large, seed + number,
                max_requests=5, max_seq_len=600, max_tree_tokens=65, num_slots=8192,
            )  # fmt: skip
            yield from _grouped(name, batches)
            # but for the first: the simplest batch comes first, and it is among the small ones
            batches = _drawn(
                kind, large + 1, seed + number,
                max_requests=8, max_seq_len=4000, max_tree_tokens=256, max_padded=8,
                num_slots=65_536,
            )[1:]  # fmt: skip
            yield from _grouped(f"{name}, large", batches)
        for slots, requests, tree, group, kv_heads in (
            (200_000, 1, 8, 8, 1), (200_000, 4, 16, 4, 2), (60_000, 8, 64, 5, 1),
            (30_000, 16, 33, 4, 8),
        ):  # fmt: skip
            name = f"real, B {requests}, T {tree}, {group} x {kv_heads}"
            real = _real(slots, requests, tree, group=group, kv_heads=kv_heads, seed=seed, steps=2)
            yield from _grouped(name, real)
        for lens in ([4096, 4000], [65_536, 64_000]):
            blocks = [
                _dflash_block([length], group=4, kv_heads=2, seed=seed + number, slots=150_000)
                for number, length in enumerate(lens)
            ]
            yield from _grouped(f"dflash_block, {lens[0]}", blocks)

    def step(self, sized: SizedGqaBatch, xp: Target) -> VerifyGqaStep:
        """Return a step whose buffers have the batch's capacity."""
        return VerifyGqaStep(sized, xp, num_ctas=_HOST_CTAS if xp == "numpy" else None)


CASE = VerifyGqaCase()


@dataclass(frozen=True)
class _Kind:
    group: int
    kv_heads: int
    page_size: int
    index: IndexType
    source: DraftSource
    gap: int


_KINDS = (
    _Kind(4, 2, 1, "int32", "slots", 0),
    _Kind(8, 1, 16, "int64", "separate", 8),
    _Kind(5, 2, 64, "int32", "separate", 0),
    _Kind(7, 1, 1, "int64", "slots", 56),
    _Kind(1, 3, 16, "int32", "slots", 8),
    _Kind(2, 8, 1, "int32", "separate", 0),
)


def _name(kind: _Kind) -> str:
    pages = f"pages of {kind.page_size}"
    return f"{kind.group} x {kind.kv_heads}, {pages}, {kind.index}, drafts from {kind.source}"


def _drawn(kind: _Kind, number: int, seed: int, **how: Any) -> list[GqaBatch]:
    from cuverify.strategies import drawn, verify_batches

    strategy = verify_batches(
        heads=(8,),
        widths=(KEY_WIDTH,),
        index_dtypes=(kind.index,),
        draft_sources=(kind.source,),
        row_gaps=(kind.gap,),
        page_sizes=(kind.page_size,),
        **how,
    )
    return [
        GqaBatch(replace(base, sm_scale=SM_SCALE), kind.group, kind.kv_heads)
        for base in drawn(strategy, number, seed=seed)
    ]


def _real(
    slots: int, requests: int, tree: int, *, group: int, kv_heads: int, seed: int, steps: int = 1
) -> list[GqaBatch]:
    from cuverify.verify_workload import real_verify_batches

    latent, rope = KEY_WIDTH
    real = real_verify_batches(
        slots, requests=requests, tree_tokens=tree, steps=steps, padded=1, seed=seed,
        latent=latent, rope=rope,
    )  # fmt: skip
    # one kind of drafts a group, so that one graph can be replayed on all of its batches
    return [
        GqaBatch(replace(base, draft_source="slots", sm_scale=SM_SCALE), group, kv_heads)
        for base in real
    ]


def _dflash_block(
    lens: Sequence[int], *, group: int, kv_heads: int = 1, seed: int = 0, slots: int | None = None
) -> GqaBatch:
    """Return a drafter's step: blocks of 16 tokens whose rows come apart from the context's."""
    latent, rope = KEY_WIDTH
    layout = KvLayout.build(
        seq_lens=lens, tree_tokens=_BLOCK, placement="scattered", num_slots=slots, rng=seed
    )
    base = VerifyBatch(
        layout,
        tuple(DraftTree.chain(_BLOCK) for _ in lens),
        latent=latent,
        rope=rope,
        sm_scale=SM_SCALE,
        seed=seed,
        draft_source="separate",
        kind="dflash_block",
    )
    return GqaBatch(base, group, kv_heads, "block")


def _kind(batch: GqaBatch) -> tuple[Any, ...]:
    """Return what a step cannot change after it was made."""
    base = batch.base
    given = (base.sm_scale, base.draft_source, base.index_dtype, base.row_gap)
    return (batch.group, batch.kv_heads, *given)


def _grouped(kind: str, batches: Sequence[GqaBatch]) -> Iterator[tuple[str, SizedGqaBatch]]:
    if not batches:
        return
    size = Capacity.of([batch.base for batch in batches])
    for number, batch in enumerate(batches):
        yield f"{kind}, {number}", SizedGqaBatch(batch, size)


# A batch comes back several times: captured, replayed, replayed again behind others. The caches
# know it by what it is, not by what it holds.
@functools.lru_cache(maxsize=16)
def _filled(batch: GqaBatch, requests: int) -> GqaBatch:
    return batch.with_requests(requests)


@functools.lru_cache(maxsize=4)
def _inputs(batch: GqaBatch, words: int) -> dict[str, Any]:
    return {**batch.oracle_arguments(), "visible": batch.visible(words)}


@functools.lru_cache(maxsize=4)
def _reference(batch: GqaBatch, words: int, xp: Target) -> dict[str, Bounded]:
    from cuverify import torch_oracle

    device = "cpu" if xp == "numpy" else "cuda"
    arguments = _inputs(batch, words)
    attend = functools.partial(torch_oracle.attend, device=device)
    if xp == "numpy" or batch.flops <= NUMPY_FLOPS:
        exact = oracle(**arguments)
    else:
        exact = oracle(**arguments, attend=attend)
    baseline = oracle(**arguments, attend=functools.partial(attend, exact=False))
    return attention_bounds(exact, baseline)
