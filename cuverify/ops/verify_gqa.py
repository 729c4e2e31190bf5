"""Attention of draft trees over separate keys and values, where query heads share a KV head.

`plan_verify_gqa` makes the `VerifyPlan` that serves all layers of a step; each layer has a
`VerifyGqa` of its own, and all of them may share one `GqaWorkspace`.

A row tile of the plan is 16, 32, 64 or 128 query rows of one KV head: tree tokens times the query
heads that share it. `row_tile` chooses by the text and what one request can have. Slots are those
of tokens, as in SGLang's ``req_to_token`` and ``kv_indices``, whatever the page size of the pool
is: a pool of pages is handed over as the view [slots, kv_heads, 128] of the same memory.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from cuverify.arguments import Tensor, device_of
from cuverify.buffers import Buffer, check_workspace, refuse_overlap, tensor_of, tensors_of, wrong
from cuverify.compile import max_shared_bytes
from cuverify.errors import ArgumentError
from cuverify.kernel import Kernel
from cuverify.launching import (
    HOST_CTAS,
    RESERVED_SHARED,
    Launched,
    PartialType,
    capability,
    check_int,
    check_row_stride,
    check_words,
    index_ctype,
    is_real,
    multiprocessors,
    number_of,
    partial_type,
    resident_blocks,
    shared_room,
)
from cuverify.ops.verify_plan import (
    MAX_TREE_TOKENS,
    ROW_TILE,
    PlanWorkspace,
    VerifyPlan,
    launched_plans,
    max_row_tiles,
    plan_workspace,
)
from cuverify.sources import KernelSource, Value
from cuverify.verify_variants import GQA_VARIANTS, VariantName, choose_gqa_variant, variants_for

HEAD_DIM = 128
"""Columns of a query, a key and a value."""

ROW_TILES: Mapping[VariantName, tuple[int, ...]] = {"portable": (16, 32, 64), "sm90": (64, 128)}
"""Query rows of a KV head that a block can have at once, by the text."""

MAX_GROUP = 32
"""Most query heads of a KV head."""

MODEL_GROUPS = (4, 5, 7, 8)
"""Query heads of a KV head, as Llama and Qwen models have them; others work as well."""

VALUES: Mapping[int, Mapping[str, int]] = {
    16: {"TILE": 64},
    32: {"TILE": 64},
    64: {"TILE": 64},
}
"""`-D` values of the portable text, by the query rows of a row tile."""

COMPACT_VALUES: Mapping[int, Mapping[str, int]] = {
    16: {"TILE": 64, "STAGES": 2},
    32: {"TILE": 32, "STAGES": 2},
    64: {"TILE": 32, "STAGES": 2},
}
"""The same where a multiprocessor does not have room for two blocks of those, as on sm_120."""

ALL_VALUES = (VALUES, COMPACT_VALUES)
"""What `text_values` chooses from: the first that leave room for two blocks, else the last."""

_COMBINE_CTAS_PER_MULTIPROCESSOR = 4


def text_values(
    rows: int, device: str | None, variant: VariantName = "portable"
) -> Mapping[str, int]:
    """Return the `-D` values of the text for a row tile.

    Parameters
    ----------
    rows : int
        Of a row tile.
    device : str or None
        As torch names it; ``cpu`` or None for the host lane.
    variant : {"portable", "sm90"}
        The text; that for Hopper GPUs has one set of values.
    """
    if variant != "portable":
        return {}
    if device is None or device == "cpu":
        return ALL_VALUES[0][rows]
    return fitting_values(rows, shared_room(device))


def fitting_values(rows: int, room: int) -> Mapping[str, int]:
    """Return the `-D` values of the text for a row tile.

    Parameters
    ----------
    rows : int
        Of a row tile.
    room : int
        Bytes of shared memory that a multiprocessor has for all of its blocks.
    """
    for values in ALL_VALUES[:-1]:
        partials, _ = verify_gqa_kernels(ROWS=rows, **values[rows])
        if 2 * ((partials.declared_shared() or 0) + RESERVED_SHARED) <= room:
            return values[rows]
    return ALL_VALUES[-1][rows]


def row_tile(group: int, max_tree_tokens: int, variant: VariantName = "portable") -> int:
    """Return the query rows of a row tile: the fewest that hold a request's, up to 64 or 128.

    Parameters
    ----------
    group : int
        Query heads of a KV head.
    max_tree_tokens : int
        Most tree tokens of one request.
    variant : {"portable", "sm90"}
        The text. 128 rows read each KV row half as often as 64. A plan cannot count an odd group's
        tokens in such tiles.
    """
    rows = group * max_tree_tokens
    sizes = [size for size in ROW_TILES[variant] if group * ROW_TILE % size == 0]
    return next((size for size in sizes if rows <= size), sizes[-1])


def plan_verify_gqa(
    seq_lens: Any,
    qo_indptr: Any,
    *,
    group: int,
    kv_heads: int,
    max_tokens: int,
    max_tree_tokens: int = MAX_TREE_TOKENS,
    rows: int | None = None,
    num_ctas: int | None = None,
    workspace: PlanWorkspace | None = None,
    variant: VariantName | None = None,
    values: Mapping[str, int] | None = None,
    **lists: Any,
) -> VerifyPlan:
    """Return a plan for `VerifyGqa`: one KV head's work, which all KV heads do alike.

    Parameters
    ----------
    seq_lens, qo_indptr, max_tokens, max_tree_tokens
        As for `VerifyPlan`.
    group : int
        Query heads of a KV head, up to 32.
    kv_heads : int
        KV heads of this rank.
    rows : {16, 32, 64, 128}, optional
        Query rows of a row tile; that of `row_tile` if absent.
    num_ctas : int, optional
        Blocks of each KV head. As many as fill the GPU with all heads if absent, and 2 on the host
        lane. Of `workspace` where that is given.
    workspace : PlanWorkspace, optional
        The caller's buffers; of the plan's own if absent.
    variant : {"portable", "sm90"}, optional
        The text that is to attend; that of `cuverify.verify_variants.choose_gqa_variant` if absent.
    values : mapping of str to int, optional
        `-D` values of kernels_cu/verify_plan.cu, in place of those of the text.
    **lists
        `kv_indices`, `kv_indptr`, `req_to_token`, `req_pool_indices`, as for `VerifyPlan`.

    Returns
    -------
    VerifyPlan

    Raises
    ------
    ArgumentError
        Naming the argument and its value.
    """
    group = check_int("group", group, 1, MAX_GROUP, "query heads of a KV head")
    kv_heads = check_int("kv_heads", kv_heads, 1, 1024, "KV heads")
    max_tree_tokens = check_int(
        "max_tree_tokens", max_tree_tokens, 1, MAX_TREE_TOKENS, "tokens of a tree"
    )
    if rows is not None:
        rows = check_int("rows", rows, 1, 2 * ROW_TILE, "query rows of a row tile")
    device = tensor_of("seq_lens", seq_lens).device
    variant = _variant(variant, device, rows)
    if rows is None:
        rows = row_tile(group, max_tree_tokens, variant)
    if rows not in ROW_TILES[variant] or group * ROW_TILE % rows:
        known = " or ".join(str(size) for size in ROW_TILES[variant])
        wanted = f"wants {known} for {variant}, and a divisor of {group * ROW_TILE}"
        raise ArgumentError("rows", rows, wanted)
    heads = group * ROW_TILE // rows  # the plan counts in tiles of 64 rows
    if workspace is None:
        if num_ctas is None:
            chosen = text_values(rows, device, variant)
            partials, _ = verify_gqa_kernels(variant, GROUP=group, ROWS=rows, **chosen)
            blocks = resident_blocks(partials, device)
            num_ctas = HOST_CTAS if blocks is None else max(1, blocks // kv_heads)
        workspace = PlanWorkspace.allocate(
            seq_lens,
            max_batch=tensor_of("seq_lens", seq_lens).shape[0],
            max_tokens=max_tokens,
            heads=heads,
            num_ctas=num_ctas,
        )
    return VerifyPlan(
        seq_lens,
        qo_indptr,
        heads=heads,
        max_tokens=max_tokens,
        max_tree_tokens=max_tree_tokens,
        workspace=workspace,
        values=GQA_VARIANTS[variant].plan if values is None else values,
        **lists,
    )


def _partials(plan: VerifyPlan, rows: int, kv_heads: int) -> dict[str, Buffer]:
    work = plan_workspace(plan.batch, plan.max_tokens, plan.heads, plan.num_ctas)["work"]
    # A cut gives at most two slots for each block beside it, and no entry has more than one.
    slots = min(2 * plan.num_ctas, work.shape[0])
    return {
        "partial_out": Buffer((slots, kv_heads, rows, HEAD_DIM), "int16"),
        "partial_lse": Buffer((slots, kv_heads, rows), "float32"),
    }


@dataclass(frozen=True, eq=False)
class GqaWorkspace:
    """Room for the partials of row tiles that are cut.

    Its contents mean nothing before and after a call.

    Attributes
    ----------
    partial_out : tensor of int16, shape (slots, kv_heads, rows, 128)
        Normalised outputs of one piece: the bits of the attention's `partial`.
    partial_lse : tensor of float32, shape (slots, kv_heads, rows)
        Their log-sum-exps, to base 2.
    """

    partial_out: Any
    partial_lse: Any

    @classmethod
    def allocate(cls, like: Any, *, plan: VerifyPlan, group: int, kv_heads: int) -> GqaWorkspace:
        """Return new buffers for a plan, of the library and on the device of the tensor `like`."""
        sizes = _partials(plan, _rows_of(plan, group), kv_heads)
        return cls(**{name: buffer.zeros(like) for name, buffer in sizes.items()})


class VerifyGqa:
    """One layer's verify attention over separate keys and values; calling it launches.

    Make it before a capture. All tensors may change in place between calls.

    Parameters
    ----------
    q : tensor of bfloat16, shape (N, H, 128)
        Queries of the tree tokens; H is a multiple of the KV heads, and query head i has KV head
        ``i // (H / kv_heads)``. Any strides that are multiples of 8 elements between tokens and
        heads. Read only.
    k_buffer, v_buffer : tensor of bfloat16, shape (slots, kv_heads, 128)
        The pools; any strides of multiples of 8 elements between slots and heads. Read only.
    out : tensor of bfloat16, shape (N, H, 128)
        Written; any stride between tokens that is a multiple of 8 elements.
    lse : tensor of float32, shape (N, H)
        Natural logarithm of the sum of exponentials of each row's scores. Written; -inf where a row
        sees nothing, whose output is 0.
    plan : VerifyPlan
        Of `plan_verify_gqa`, whose last call describes the step. It must have `kv_indices`, and up
        to N tokens.
    visible : tensor of uint64, shape (N, W)
        Bit k of word w of row i: token i sees token 64 w + k of its own tree. 64 W bits hold the
        plan's largest tree. All bits set: a block that sees itself fully. Read only.
    sm_scale : float
        Factor of the scores.
    out_cache_loc : tensor of int64, shape (N,), optional
        Slots of the tree tokens. Read only.
    k_extend, v_extend : tensor of bfloat16, shape (N, kv_heads, 128), optional
        Rows of the tree tokens, instead of `out_cache_loc`; strides as for the pools. Read only.
    workspace : GqaWorkspace, optional
        The caller's buffers; of the layer's own if absent.
    combine_ctas : int, optional
        Blocks that merge partials of each KV head. Enough to fill the GPU with all heads if absent,
        and 2 on the host lane.
    partial : {"fp16", "bf16"}, optional
        The type of partials, which all results have for a moment; that of
        `cuverify.launching.partial_type` if absent. bf16 is for results above 65,504 or mostly
        below 2**-14.
    variant : {"portable", "sm90"}, optional
        The text; that of `cuverify.verify_variants.choose_gqa_variant` if absent. Any can follow
        any plan with row tiles that it has, and is fastest by a plan that was made for it.
    values : mapping of str to int, optional
        `-D` values of that text, such as ``{"RESCALE_ABOVE": 4}``, beside or in place of
        `text_values`.

    Attributes
    ----------
    variant : {"portable", "sm90"}
    partials, combine : BoundLaunch
        The two launches of a call.
    tokens, heads, kv_heads, group, rows : int
        N, H, KV heads, query heads of each, and query rows of a row tile.
    partial : {"fp16", "bf16"}
        The type of partials.

    Raises
    ------
    ArgumentError
        Naming the argument and its value.

    Notes
    -----
    A slot outside the pool is never read: query rows that see it become NaN. Rows of `out` and
    `lse` that belong to no request of the plan are left alone, all rows where the plan is empty.

    Examples
    --------
    >>> plan = plan_verify_gqa(seq_lens, qo_indptr, group=8, kv_heads=1,
    ...                        max_tokens=64, kv_indices=slots)              # doctest: +SKIP
    >>> attend = VerifyGqa(q, k, v, out, lse, plan=plan, visible=visible,
    ...                    sm_scale=128**-0.5, out_cache_loc=drafts)         # doctest: +SKIP
    >>> plan(); attend()                                                     # doctest: +SKIP
    """

    def __init__(
        self,
        q: Any,
        k_buffer: Any,
        v_buffer: Any,
        out: Any,
        lse: Any,
        *,
        plan: VerifyPlan,
        visible: Any,
        sm_scale: float,
        out_cache_loc: Any = None,
        k_extend: Any = None,
        v_extend: Any = None,
        workspace: GqaWorkspace | None = None,
        combine_ctas: int | None = None,
        partial: PartialType | None = None,
        variant: VariantName | None = None,
        values: Mapping[str, int] | None = None,
    ) -> None:
        if plan.kv_indices is None:
            raise ArgumentError("plan", plan, "has no kv_indices: give them to plan_verify_gqa")
        if (k_extend is None) != (v_extend is None):
            missing = "k_extend" if k_extend is None else "v_extend"
            raise ArgumentError(missing, None, "goes with the other one: give both or none")
        if (out_cache_loc is None) == (k_extend is None):
            raise ArgumentError(
                "k_extend",
                k_extend,
                "wants either this and v_extend, or out_cache_loc, where the trees' rows are",
            )
        if not is_real(sm_scale) or not math.isfinite(sm_scale):
            raise ArgumentError("sm_scale", sm_scale, "wants a finite number")
        keys = _rows("k_buffer", k_buffer, "slots")
        pool_values = _rows("v_buffer", v_buffer, "slots")
        if keys.shape != pool_values.shape:
            raise wrong(pool_values, f"has another shape than k_buffer, {list(keys.shape)}")
        slots, kv_heads, _ = keys.shape
        outputs = {"out": _rows("out", out, "tokens"), "lse": tensor_of("lse", lse)}
        tokens, heads, _ = outputs["out"].shape
        if heads % kv_heads:
            raise wrong(outputs["out"], f"has {heads} heads, no multiple of {kv_heads} KV heads")
        group = heads // kv_heads
        rows = _rows_of(plan, group)
        if tokens < plan.max_tokens:
            reason = f"has {tokens} tokens, the plan is for up to {plan.max_tokens}"
            raise wrong(outputs["out"], reason)
        queries = _rows("q", q, "tokens")
        if queries.shape[1] != heads:
            raise wrong(queries, f"has {queries.shape[1]} heads, out has {heads}")
        words = tensor_of("visible", visible)
        check_words(words, plan.max_tree_tokens)
        drafts: list[Tensor] = []
        if k_extend is not None:
            drafts = [
                _rows("k_extend", k_extend, "tokens"),
                _rows("v_extend", v_extend, "tokens"),
            ]
            for tensor in drafts:
                if tensor.shape[1] != kv_heads:
                    raise wrong(tensor, f"has {tensor.shape[1]} KV heads, k_buffer has {kv_heads}")
        else:
            drafts = [tensor_of("out_cache_loc", out_cache_loc)]
        if workspace is None:
            workspace = GqaWorkspace.allocate(out, plan=plan, group=group, kv_heads=kv_heads)
        held = tensors_of("workspace", workspace)
        need = f"{kv_heads} KV heads on {plan.num_ctas} blocks each"
        check_workspace(held, _partials(plan, rows, kv_heads), need)
        planned = [
            *tensors_of("plan", plan.workspace).values(),
            tensor_of("plan.kv_indptr", plan.kv_indptr),
            tensor_of("plan.kv_indices", plan.kv_indices),
            tensor_of("plan.qo_indptr", plan.qo_indptr),
        ]  # fmt: skip
        written = [*outputs.values(), *held.values()]
        inputs = [queries, words, *drafts, keys, pool_values]
        device = device_of([*written, *inputs, *planned])
        for tensor in (queries, words, *drafts, outputs["lse"]):
            if tensor.shape[0] != tokens:
                raise wrong(tensor, f"has {tensor.shape[0]} rows, out has {tokens} tokens")
        refuse_overlap(written, [*inputs, *planned])

        self.plan = plan
        self.workspace = workspace
        self.tokens, self.heads, self.kv_heads = tokens, heads, kv_heads
        self.group, self.rows = group, rows
        self.partial = partial_type(partial)
        self.variant = _variant(variant, device, rows)
        if rows not in ROW_TILES[self.variant]:
            known = " or ".join(str(size) for size in ROW_TILES[self.variant])
            raise ArgumentError("variant", self.variant, f"attends to {known} rows, not to {rows}")
        chosen: dict[str, int | str] = {
            "GROUP": group,
            "ROWS": rows,
            "PARTIAL": self.partial,
            "KV_INDEX": index_ctype(planned[-2]),
            "QO_INDEX": index_ctype(planned[-1]),
        }
        chosen = {**text_values(rows, device, self.variant), **(values or {}), **chosen}
        partials, combine = verify_gqa_kernels(self.variant, **chosen)
        extends: list[Any] = []
        for owner, tensor in zip((k_extend, v_extend), drafts * 2, strict=False):
            extends += [owner, *(tensor.strides[:2] if owner is not None else (0, 0))]
        buffers = plan.workspace
        self.partials = partials.bind(
            (plan.num_ctas, kv_heads), GQA_VARIANTS[self.variant].threads,
            q, *queries.strides[:2], float(sm_scale),
            k_buffer, *keys.strides[:2], v_buffer, *pool_values.strides[:2], slots, kv_heads,
            plan.kv_indptr, plan.kv_indices, *extends, out_cache_loc,
            plan.qo_indptr, visible, words.shape[1], buffers.work, buffers.cta_work,
            workspace.partial_out, workspace.partial_lse, out, outputs["out"].strides[0], lse,
        )  # fmt: skip
        self.combine = combine.bind(
            self._combine_grid(combine_ctas, device), number_of(combine, "COMBINE_THREADS"),
            workspace.partial_out, workspace.partial_lse, kv_heads,
            buffers.combine_indptr[: plan.num_ctas + 1], buffers.combine_tiles[: plan.num_ctas],
            plan.num_ctas, out, outputs["out"].strides[0], lse,
        )  # fmt: skip

    def __call__(self) -> None:
        """Attend: two launches on torch's current stream, after the plan's."""
        self.partials()
        self.combine()

    def _combine_grid(self, combine_ctas: int | None, device: str | None) -> tuple[int, int]:
        if combine_ctas is not None:
            combine_ctas = check_int("combine_ctas", combine_ctas, 1, 2**31 - 1, "blocks")
            return combine_ctas, self.kv_heads
        count = multiprocessors(device)
        if count is None:
            return HOST_CTAS, self.kv_heads
        plan = self.plan
        tiles = min(plan.num_ctas, max_row_tiles(plan.batch, self.tokens, plan.heads))
        units = tiles * self.rows * HEAD_DIM // 256
        most = _COMBINE_CTAS_PER_MULTIPROCESSOR * count // self.kv_heads
        return max(1, min(most, units)), self.kv_heads


def launched(arch: str) -> Iterator[Launched]:
    """Yield the `-D` values that layers and their plans launch with; see `cuverify.launched`."""
    room = max_shared_bytes(arch) + RESERVED_SHARED  # all of a multiprocessor's
    sets: list[dict[str, Value]] = [
        {"ROWS": rows, "PARTIAL": "fp16", **fitting_values(rows, room)}
        for rows in ROW_TILES["portable"]
    ]
    yield Launched("verify_gqa", ("KV_INDEX", "QO_INDEX"), {"GROUP": MODEL_GROUPS}, sets)
    known = variants_for(arch)
    if "sm90" in known:
        text = GQA_VARIANTS["sm90"]
        types = {"GROUP": MODEL_GROUPS}
        sets = [{"ROWS": rows, "PARTIAL": "fp16"} for rows in ROW_TILES["sm90"]]
        yield Launched(text.stem, ("KV_INDEX", "QO_INDEX"), types, sets)
    tiles = {rows for name in known for rows in ROW_TILES[name]}
    heads = sorted(
        {
            group * ROW_TILE // rows
            for group in MODEL_GROUPS
            for rows in tiles
            if group * ROW_TILE % rows == 0
        }
    )
    yield from launched_plans(heads, [GQA_VARIANTS[name].plan for name in known])


def verify_gqa_kernels(
    variant: VariantName = "portable", /, **values: int | str
) -> tuple[Kernel, Kernel]:
    """Return the two kernels of a text with these `-D` values."""
    return _kernels(variant, tuple(sorted(values.items())))


@functools.cache
def _kernels(
    variant: VariantName, values: tuple[tuple[str, int | str], ...]
) -> tuple[Kernel, Kernel]:
    text = GQA_VARIANTS[variant]
    source = KernelSource.from_package(text.stem, values=dict(values))
    partials, combine = text.kernels
    return Kernel(source, partials), Kernel(source, combine)


def _variant(variant: VariantName | None, device: str | None, rows: int | None) -> VariantName:
    if variant is None:
        return choose_gqa_variant(capability(device), rows=rows)
    if variant not in tuple(GQA_VARIANTS):
        raise ArgumentError("variant", variant, f"wants one of {', '.join(GQA_VARIANTS)}")
    return variant


def _rows_of(plan: VerifyPlan, group: int) -> int:
    """Return the query rows of a plan's row tiles for so many query heads of a KV head."""
    every = {size for sizes in ROW_TILES.values() for size in sizes}
    sizes = sorted(size for size in every if group * ROW_TILE % size == 0)
    for rows in sizes:
        if plan.heads * rows == group * ROW_TILE:
            return rows
    wanted = ", ".join(str(group * ROW_TILE // rows) for rows in sizes)
    reason = f"is for {plan.heads} query rows a token; groups of {group} heads want {wanted}"
    raise ArgumentError("plan", plan, f"{reason}: see plan_verify_gqa")


def _rows(name: str, value: Any, what: str) -> Tensor:
    """Return a tensor [rows, heads, 128], its strides whole pieces."""
    tensor = tensor_of(name, value)
    if len(tensor.shape) != 3 or 0 in tensor.shape or tensor.shape[2] != HEAD_DIM:
        reason = (
            f"has shape {list(tensor.shape)}; wants [{what}, heads, {HEAD_DIM}], none of them 0"
        )
        raise wrong(tensor, reason)
    check_row_stride(tensor, 0, what)
    check_row_stride(tensor, 1, "heads")
    return tensor
