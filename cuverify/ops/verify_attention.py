"""Attention of draft trees over a latent KV cache, by a plan that was made on the device.

One `VerifyPlan` serves all layers of a step; each layer has a `VerifyAttention` of its own, and all
of them may share one `AttentionWorkspace`, since they run one after another.

Two texts do the same job: verify_attention.cu on every GPU and on the host lane,
verify_attention_sm90.cu on Hopper GPUs, whose blocks begin by what a `VerifyStarts` laid out for
all layers. `cuverify.verify_variants` has the rule. Pools of fp8 codes are attended to by the first
one on Hopper GPUs, too.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cuverify.arguments import Tensor, device_of
from cuverify.buffers import Buffer, check_workspace, refuse_overlap, tensor_of, tensors_of, wrong
from cuverify.compile import max_shared_bytes
from cuverify.errors import ArgumentError
from cuverify.kernel import Kernel
from cuverify.launching import (
    RESERVED_SHARED,
    Launched,
    PartialType,
    capability,
    check_blocks,
    check_row_stride,
    check_words,
    index_ctype,
    is_real,
    multiprocessors,
    number_of,
    partial_type,
    shared_room,
    whole,
)
from cuverify.narrow import Narrow
from cuverify.ops.verify_plan import ROW_TILE, VerifyPlan, max_row_tiles, plan_workspace
from cuverify.ops.verify_starts import VerifyStarts
from cuverify.sources import KernelSource, Value
from cuverify.tuning import choice_for, choices_of
from cuverify.verify_variants import RANK_HEADS, VARIANTS, VariantName, choose_variant, variants_for

Element = Literal["bf16", "fp16"]

_ELEMENTS: dict[str, Element] = {"bfloat16": "bf16", "uint16": "bf16", "float16": "fp16"}
_CODES = ("uint8", "float8_e4m3fn")
_OF_POOL: dict[Narrow, Element] = {"bf16": "bf16", "fp16": "fp16", "fp8_e4m3": "bf16"}
_SCALE_BITS = 100
_HOST_COMBINE_CTAS = 2
_COMBINE_UNITS = 128  # of a row tile of 512 columns, each a block's at most


def verify_workspace(
    max_batch: int,
    max_tokens: int,
    heads: int,
    num_ctas: int,
    *,
    latent: int = 512,
) -> dict[str, Buffer]:
    """Return all buffers that a verify step needs besides its inputs and outputs.

    Parameters
    ----------
    max_batch : int
        Most requests of a step, padded ones included.
    max_tokens : int
        Most tree tokens of all requests together.
    heads : int
        Query heads of this rank, a multiple of 8.
    num_ctas : int
        Blocks that run `verify_partials`.
    latent : int
        Columns of an output row.

    Returns
    -------
    dict of str to Buffer
        The fields of `PlanWorkspace` and of `AttentionWorkspace`.
    """
    number = whole(heads)
    if number is None or number < 8 or number % 8:
        raise ArgumentError("heads", heads, "wants a multiple of 8")
    plan = plan_workspace(max_batch, max_tokens, number, num_ctas)
    return plan | _partials(plan["work"].shape[0], plan["cta_work"].shape[0], latent)


def _partials(max_work: int, num_ctas: int, latent: int) -> dict[str, Buffer]:
    # A cut gives at most two slots for each block beside it, and no entry has more than one.
    slots = min(2 * num_ctas, max_work)
    return {
        "partial_out": Buffer((slots, ROW_TILE, latent), "int16"),
        "partial_lse": Buffer((slots, ROW_TILE), "float32"),
    }


@dataclass(frozen=True, eq=False)
class AttentionWorkspace:
    """Room for the partials of row tiles that are cut, sized by `verify_workspace`.

    Its contents mean nothing before and after a call.

    Attributes
    ----------
    partial_out : tensor of int16, shape (slots, 64, latent)
        Normalised outputs of one piece, in the order of the text that attends: the bits of the
        attention's `partial`.
    partial_lse : tensor of float32, shape (slots, 64)
        Their log-sum-exps, to base 2.
    """

    partial_out: Any
    partial_lse: Any

    @classmethod
    def allocate(cls, like: Any, *, plan: VerifyPlan, latent: int = 512) -> AttentionWorkspace:
        """Return new buffers for a plan, of the library and on the device of the tensor `like`."""
        work = plan_workspace(plan.batch, plan.max_tokens, plan.heads, plan.num_ctas)["work"]
        sizes = _partials(work.shape[0], plan.num_ctas, latent)
        return cls(**{name: buffer.zeros(like) for name, buffer in sizes.items()})


class VerifyAttention:
    """One layer's verify attention, all checks done; calling it launches.

    Make it before a capture. All tensors may change in place between calls.

    Parameters
    ----------
    q : tensor of bfloat16 or float16, shape (N, H, latent + rope), or a pair
        Queries in absorbed form, latent columns first; or ``(q_latent, q_rope)``. Any strides that
        are multiples of 8 elements between tokens and heads. Read only.
    kv : tensor, shape (slots, latent + rope) or (slots, 1, latent + rope)
        The pool, of the type of the queries; or beside bfloat16 queries, codes of e4m3 as uint8 or
        float8_e4m3fn. Any row stride that is a multiple of 16 bytes. Values are the first `latent`
        columns. Read only.
    out : tensor of the type of the queries, shape (N, H, latent)
        Written; any stride between tokens that is a multiple of 8 elements.
    lse : tensor of float32, shape (N, H)
        Natural logarithm of the sum of exponentials of each row's scores. Written; -inf where a row
        sees nothing, whose output is 0.
    plan : VerifyPlan
        Whose last call describes the step. It must have `kv_indices`, and up to N tokens.
    visible : tensor of uint64, shape (N, W)
        Bit k of word w of row i: token i sees token 64 w + k of its own tree. 64 W bits hold the
        plan's largest tree. Read only.
    sm_scale : float
        Factor of the scores; not derived from the columns.
    out_cache_loc : tensor of int64, shape (N,), optional
        Slots of the tree tokens. Read only.
    draft_kv : tensor of the type of the queries, shape (N, latent + rope), optional
        Rows of the tree tokens, instead of `out_cache_loc`; row stride as for `kv`. Read only.
    kv_scale : float
        What a code of 1 in the pool means; positive. It does not concern `draft_kv`. 1 where the
        pool holds no codes.
    starts : VerifyStarts, optional
        What the plan's blocks read first, laid out once a step for all layers; with this
        `out_cache_loc`, if with any. The text for Hopper GPUs needs it: where it is absent, the
        layer has one of its own and lays it out at every call, which is a launch more. The portable
        text does not read it.
    workspace : AttentionWorkspace, optional
        The caller's buffers; of the layer's own if absent.
    combine_ctas : int, optional
        Blocks that merge partials. At most one for each multiprocessor if absent, and 2 on the host
        lane.
    partial : {"fp16", "bf16"}, optional
        The type of partials, which in the portable text all results have for a moment; that of
        `cuverify.launching.partial_type` if absent. bf16 is for results above 65,504 or mostly
        below 2**-14.
    variant : {"portable", "sm90"}, optional
        The text; that of `cuverify.verify_variants.choose_variant` if absent.
    values : mapping of str to int, optional
        `-D` values of that text, such as ``{"STAGES": 5}``, in place of those that were tuned for
        the GPU, and beside those that its shared memory has room for.

    Attributes
    ----------
    variant : {"portable", "sm90"}
    element : {"bf16", "fp16"}
        Of queries and outputs.
    pool : {"bf16", "fp16", "fp8_e4m3"}
        Of the pool.
    partial : {"fp16", "bf16"}
        Of the partials.
    partials, combine : BoundLaunch
        The two launches of a call, behind that of starts where they are the layer's own.
    heads, latent, rope, tokens : int

    Raises
    ------
    ArgumentError
        Naming the argument and its value.

    Notes
    -----
    A slot outside the pool is never read: query rows that see it become NaN. Rows of `out` and
    `lse` that belong to no request of the plan are left alone, all rows where the plan is empty.

    Codes are widened to bfloat16 in shared memory, which rounds nothing, and scaled in float32. On
    Hopper GPUs the portable text does that, so a plan for such a pool is best made with
    ``VerifyPlan(..., variant="portable")``.

    Examples
    --------
    >>> attend = VerifyAttention(q, kv, out, lse, plan=plan, visible=visible,
    ...                          sm_scale=0.1, out_cache_loc=slots)          # doctest: +SKIP
    >>> plan(); attend()                                                     # doctest: +SKIP
    """

    def __init__(
        self,
        q: Any,
        kv: Any,
        out: Any,
        lse: Any,
        *,
        plan: VerifyPlan,
        visible: Any,
        sm_scale: float,
        out_cache_loc: Any = None,
        draft_kv: Any = None,
        kv_scale: float = 1.0,
        starts: VerifyStarts | None = None,
        workspace: AttentionWorkspace | None = None,
        combine_ctas: int | None = None,
        partial: PartialType | None = None,
        variant: VariantName | None = None,
        values: Mapping[str, int] | None = None,
    ) -> None:
        if plan.kv_indices is None:
            raise ArgumentError("plan", plan, "has no kv_indices: give them to VerifyPlan")
        if (out_cache_loc is None) == (draft_kv is None):
            raise ArgumentError(
                "draft_kv",
                draft_kv,
                "wants either this or out_cache_loc, where the trees' rows are",
            )
        if not is_real(sm_scale) or not math.isfinite(sm_scale):
            raise ArgumentError("sm_scale", sm_scale, "wants a finite number")
        if not is_real(kv_scale) or not 0 < kv_scale < math.inf:
            raise ArgumentError("kv_scale", kv_scale, "wants a finite number above 0")
        if not 2.0**-_SCALE_BITS <= kv_scale <= 2.0**_SCALE_BITS:
            wanted = f"wants 2**-{_SCALE_BITS} to 2**{_SCALE_BITS}: its inverse is a float32, too"
            raise ArgumentError("kv_scale", kv_scale, wanted)
        outputs = {"out": tensor_of("out", out), "lse": tensor_of("lse", lse)}
        element = _element(outputs["out"])
        tokens, heads, latent = _output_shape(outputs["out"])
        if heads != plan.heads:
            raise wrong(outputs["out"], f"has {heads} heads, the plan is for {plan.heads}")
        if tokens < plan.max_tokens:
            reason = f"has {tokens} tokens, the plan is for up to {plan.max_tokens}"
            raise wrong(outputs["out"], reason)
        queries = _queries(q, latent)
        rope = _columns(queries[1])
        pool = _rows_of("kv", kv, latent + rope)
        kind = _pool_kind(pool, element)
        if kind == element and kv_scale != 1:
            raise ArgumentError("kv_scale", kv_scale, f"is for pools of codes; kv is {kind}")
        inputs = [*queries, pool, tensor_of("visible", visible)]
        check_words(inputs[-1], plan.max_tree_tokens)
        draft = None
        if draft_kv is not None:
            draft = _rows_of("draft_kv", draft_kv, latent + rope)
            inputs.append(draft)
        else:
            inputs.append(tensor_of("out_cache_loc", out_cache_loc))
        if workspace is None:
            workspace = AttentionWorkspace.allocate(out, plan=plan, latent=latent)
        held = tensors_of("workspace", workspace)
        work = plan_workspace(plan.batch, plan.max_tokens, heads, plan.num_ctas)["work"]
        sizes = _partials(work.shape[0], plan.num_ctas, latent)
        check_workspace(held, sizes, f"{work.shape[0]} entries of work on {plan.num_ctas} blocks")
        planned = [
            *tensors_of("plan", plan.workspace).values(),
            tensor_of("plan.kv_indptr", plan.kv_indptr),
            tensor_of("plan.kv_indices", plan.kv_indices),
            tensor_of("plan.qo_indptr", plan.qo_indptr),
        ]  # fmt: skip
        if starts is not None:
            _check_starts(starts, plan, None if out_cache_loc is None else inputs[-1])
            planned[:0] = tensors_of("starts.workspace", starts.workspace).values()
        written = [*outputs.values(), *held.values()]
        device = device_of([*written, *inputs, *planned])
        for tensor in (*inputs, *outputs.values()):
            if tensor.shape[0] != tokens and tensor is not pool:
                raise wrong(tensor, f"has {tensor.shape[0]} rows, out has {tokens} tokens")
        refuse_overlap(written, [*inputs, *planned])

        self.plan = plan
        self.workspace = workspace
        self._starts: VerifyStarts | None = None
        self.tokens, self.heads, self.latent, self.rope = tokens, heads, latent, rope
        self.element, self.pool = element, kind
        self.partial = partial_type(partial, kv_scale)
        self.variant = _variant(variant, device, latent, rope, float(sm_scale), kind)
        chosen: dict[str, int | str] = {
            "HEADS": heads,
            "LATENT": latent,
            "ROPE": rope,
            "ELEMENT": element,
            "KV_ELEMENT": kind,
            "PARTIAL": self.partial,
            "KV_INDEX": index_ctype(planned[-2]),
            "QO_INDEX": index_ctype(planned[-1]),
        }
        if values is None:
            rows = plan.max_tree_tokens * heads
            values = choice_for(device, variant=self.variant, rows=rows).values
        if device is not None and multiprocessors(device) is not None:
            room = shared_room(device)
            values = {**fitting_values(self.variant, room, **{**chosen, **values}), **values}
        partials, combine = verify_attention_kernels(self.variant, **{**chosen, **values})
        strides = [stride for tensor in queries for stride in tensor.strides[:2]]
        out_stride = outputs["out"].strides[0]
        buffers = plan.workspace
        first = [buffers.cta_work]
        if VARIANTS[self.variant].starts:
            if starts is None:
                starts = self._starts = VerifyStarts(plan, out_cache_loc=out_cache_loc)
            laid_out = starts.workspace
            first = [laid_out.cta_starts[: plan.num_ctas], laid_out.cta_slots[: plan.num_ctas]]
        self.partials = partials.bind(
            plan.num_ctas, VARIANTS[self.variant].threads,
            queries[0].owner, queries[1].owner, *strides, float(sm_scale),
            float(kv_scale), pool.owner, pool.strides[0], pool.shape[0],
            plan.kv_indptr, plan.kv_indices,
            None if draft is None else draft.owner, 0 if draft is None else draft.strides[0],
            out_cache_loc, plan.qo_indptr, visible, inputs[3].shape[1],
            buffers.work, *first, workspace.partial_out, workspace.partial_lse,
            out, out_stride, lse,
        )  # fmt: skip
        self.combine = combine.bind(
            self._combine_grid(combine_ctas, device), number_of(combine, "COMBINE_THREADS"),
            workspace.partial_out, workspace.partial_lse,
            buffers.combine_indptr[: plan.num_ctas + 1], buffers.combine_tiles[: plan.num_ctas],
            plan.num_ctas, out, out_stride, lse,
        )  # fmt: skip

    def __call__(self) -> None:
        """Attend: two launches on torch's current stream, after the plan's; one more for starts."""
        if self._starts is not None:
            self._starts()
        self.partials()
        self.combine()

    def _combine_grid(self, combine_ctas: int | None, device: str | None) -> int:
        if combine_ctas is not None:
            return check_blocks("combine_ctas", combine_ctas)
        count = multiprocessors(device)
        if count is None:
            return _HOST_COMBINE_CTAS
        return min(count, _COMBINE_UNITS * self._most_row_tiles())

    def _most_row_tiles(self) -> int:
        """Return how many row tiles can be cut at most."""
        return min(self.plan.num_ctas, max_row_tiles(self.plan.batch, self.tokens, self.heads))


def launched(arch: str) -> Iterator[Launched]:
    """Yield the `-D` values of layers with 512 + 64 columns; see `cuverify.launched`."""
    room = max_shared_bytes(arch) + RESERVED_SHARED  # all of a multiprocessor's
    for name in variants_for(arch):
        variant = VARIANTS[name]
        sets: list[Mapping[str, Value]] = []
        for choice in choices_of(arch, name):
            fitting = fitting_values(name, room, **{"LATENT": 512, "ROPE": 64, **choice.values})
            own = {**fitting, **choice.values}
            sets += [
                {"ELEMENT": _OF_POOL[pool], "KV_ELEMENT": pool, "PARTIAL": "fp16", **own}
                for pool in _OF_POOL
                if variant.fits(512, 64, 1.0, pool)
            ]
        types = {"HEADS": RANK_HEADS, "LATENT": (512,), "ROPE": (64,)}
        yield Launched(variant.stem, ("KV_INDEX", "QO_INDEX"), types, sets)


def fitting_values(variant: VariantName, room: int, **values: int | str) -> Mapping[str, int]:
    """Return the `-D` values of a text that its GPU has shared memory for.

    Parameters
    ----------
    variant : {"portable", "sm90"}
    room : int
        Bytes of shared memory that a multiprocessor has for all of its blocks.
    **values : int or str
        Values that are given, and stand in place of those that fit.
    """
    roomy = VARIANTS[variant].roomy
    partials, _ = verify_attention_kernels(variant, **{**roomy, **values})
    return roomy if (partials.declared_shared() or 0) + RESERVED_SHARED <= room else {}


def least_values(variant: VariantName) -> dict[str, int]:
    """Return what a text has for `fitting_values` where there is little shared memory."""
    known = KernelSource.from_package(VARIANTS[variant].stem).known_values()
    return {name: int(known[name]) for name in VARIANTS[variant].roomy}


def verify_attention_kernels(
    variant: VariantName = "portable", **values: int | str
) -> tuple[Kernel, Kernel]:
    """Return the two kernels of a text with these `-D` values."""
    return _kernels(variant, tuple(sorted(values.items())))


@functools.cache
def _kernels(
    variant: VariantName, values: tuple[tuple[str, int | str], ...]
) -> tuple[Kernel, Kernel]:
    text = VARIANTS[variant]
    source = KernelSource.from_package(text.stem, values=dict(values))
    partials, combine = text.kernels
    return Kernel(source, partials), Kernel(source, combine)


def _check_starts(starts: VerifyStarts, plan: VerifyPlan, out_cache_loc: Tensor | None) -> None:
    if starts.plan is not plan:
        raise ArgumentError("starts", starts, "is of another plan; wants VerifyStarts(plan)")
    if starts.out_cache_loc is None:
        return
    known = tensor_of("starts.out_cache_loc", starts.out_cache_loc)
    if out_cache_loc is not None and known.address != out_cache_loc.address:
        raise wrong(out_cache_loc, "is another one than that of starts; wants the same tensor")


def _element(out: Tensor) -> Element:
    if out.dtype not in _ELEMENTS:
        raise wrong(out, f"dtype {out.dtype}; outputs are bfloat16 or float16")
    return _ELEMENTS[out.dtype]


def _pool_kind(pool: Tensor, element: Element) -> Narrow:
    if pool.dtype in _CODES:
        if element != "bf16":
            raise wrong(pool, f"holds codes of e4m3, which go with bfloat16; out is {element}")
        return "fp8_e4m3"
    if _ELEMENTS.get(pool.dtype) != element:
        wanted = f"wants {element}, as out" + (" is, or codes of e4m3" if element == "bf16" else "")
        raise wrong(pool, f"dtype {pool.dtype}; {wanted}")
    return element


def _output_shape(out: Tensor) -> tuple[int, int, int]:
    if len(out.shape) != 3 or 0 in out.shape:
        raise wrong(
            out, f"has shape {list(out.shape)}; wants [tokens, heads, latent], none of them 0"
        )
    tokens, heads, latent = out.shape
    if latent % 16:
        raise wrong(out, f"rows have {latent} columns; latent is a multiple of 16")
    if heads % 8:
        raise wrong(out, f"has {heads} heads; wants a multiple of 8")
    check_row_stride(out, 0, "tokens")
    return tokens, heads, latent


def _queries(q: Any, latent: int) -> tuple[Tensor, Tensor]:
    """Return latent and rope columns of the queries, as views."""
    if isinstance(q, Sequence):
        if len(q) != 2:
            raise ArgumentError("q", q, "wants one tensor, or (q_latent, q_rope)")
        parts = tensor_of("q_latent", q[0]), tensor_of("q_rope", q[1])
    else:
        whole = tensor_of("q", q)
        if len(whole.shape) != 3 or whole.shape[2] <= latent:
            reason = f"has shape {list(whole.shape)}; wants [tokens, heads, {latent} + rope]"
            raise wrong(whole, reason)
        parts = tensor_of("q", q[..., :latent]), tensor_of("q", q[..., latent:])
    for part in parts:
        if len(part.shape) != 3:
            raise wrong(part, f"has shape {list(part.shape)}; wants [tokens, heads, columns]")
        if part.strides[2] != 1:
            raise wrong(part, f"columns are {part.strides[2]} elements apart, not contiguous")
        check_row_stride(part, 0, "tokens")
        check_row_stride(part, 1, "heads")
    if parts[0].shape[2] != latent:
        raise wrong(parts[0], f"has {parts[0].shape[2]} columns, out has {latent}")
    return parts


def _columns(q_rope: Tensor) -> int:
    rope = q_rope.shape[2]
    if rope % 16 or not rope:
        raise wrong(q_rope, f"leaves {rope} columns for rope, which wants a multiple of 16")
    return rope


def _rows_of(name: str, value: Any, columns: int) -> Tensor:
    """Return [rows, columns] of a pool or a draft tensor."""
    tensor = tensor_of(name, value)
    if len(tensor.shape) == 3 and tensor.shape[1] == 1:
        tensor = tensor_of(name, value[:, 0])
    if len(tensor.shape) != 2 or tensor.shape[1] != columns or not tensor.shape[0]:
        wanted = f"wants [rows, {columns}] or [rows, 1, {columns}]: latent + rope columns of q"
        raise wrong(tensor, f"has shape {list(tensor.shape)}; {wanted}")
    check_row_stride(tensor, 0, "rows")
    return tensor


def _variant(
    given: VariantName | None,
    device: str | None,
    latent: int,
    rope: int,
    sm_scale: float,
    pool: Narrow,
) -> VariantName:
    if given is None:
        architecture = capability(device)
        return choose_variant(architecture, latent=latent, rope=rope, sm_scale=sm_scale, pool=pool)
    if given not in VARIANTS:
        raise ArgumentError("variant", given, f"wants one of {', '.join(VARIANTS)}")
    if not VARIANTS[given].fits(latent, rope, sm_scale, pool):
        reason = f"cannot attend to {latent} + {rope} columns of {pool} with a scale of {sm_scale}"
        raise ArgumentError("variant", given, reason)
    return given
