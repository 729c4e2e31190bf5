"""A step of verify attention on a GPU, as every kernel that is compared gets it.

One pool, far larger than the L2 cache, holds several copies of the step's KV rows at random slots
that no two copies share; all other slots hold NaN. The copies have the same contents, so one
reference serves all of them. Drafts together weigh about as much as their prefix, and a few rows of
the prefix as much as a draft each: without that, a wrong mask bit or a lost row would drown in a
long prefix.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cuverify.narrow import NAN
from cuverify.verify_batch import SM_SCALE
from cuverify.verify_shapes import LATENT, WIDTH, Shape

if TYPE_CHECKING:
    from cuverify.reference.verify_attention import Attention

SLOTS = 1_000_000
"""Slots of the pool that is common to all shapes: 1.15 GB."""

_LANDMARKS = 16  # rows of a prefix that weigh as much as a draft each
HANDLE = 8.0  # the last column of every query; a key's last column then moves its scores
_MASK_WORD = 64
_KV_SCALE = 0.07  # of pools of codes: what is drawn lies within what they can say
_NAN_CODE = int(NAN["fp8_e4m3"])


@dataclass(frozen=True, eq=False)
class DeviceBounds:
    """What `cuverify.tolerances.attention_bounds` gives, as float64 tensors on the device.

    Attributes
    ----------
    out, out_atol, out_rms : tensors of shape (N, H, 512), (N, H, 1) and (N, H)
    lse, lse_atol : tensors of shape (N, H)
    """

    out: Any
    out_atol: Any
    out_rms: Any
    lse: Any
    lse_atol: Any

    @classmethod
    def of(
        cls, exact: Attention, baseline: Attention, device: Any, *, dtype: str = "bf16"
    ) -> DeviceBounds:
        """Return the right outputs and log-sum-exps, and what each may be off by."""
        import torch

        from cuverify.tolerances import attention_bounds

        found = attention_bounds(exact, baseline, dtype=dtype)
        out, lse = found["out"], found["lse"]
        arrays = (out.values, out.atol, out.rms, lse.values, lse.atol)
        return cls(*(torch.as_tensor(part).to(device) for part in arrays))

    def hold(self, out: Any, lse: Any) -> bool:
        """Whether results are right, found on the device: the host takes seconds for large ones."""
        error = (out.double() - self.out).abs()
        lse_error = (lse.double() - self.lse).abs()
        return bool(
            (error <= self.out_atol).all()
            & (error.square().mean(dim=-1).sqrt() <= self.out_rms).all()
            & (lse_error <= self.lse_atol).all()
        )


class Problem:
    """One shape's tensors, all on the current CUDA device.

    Parameters
    ----------
    shape : Shape
    pool : tensor of bfloat16, shape (slots, 576), contiguous
        Rewritten: rows of this shape, NaN elsewhere. Its memory serves other types as well.
    seed : int
        Of values, slots and trees.
    copies : int, optional
        As many as find slots of their own, up to 16, if absent.

    Attributes
    ----------
    pool : tensor of bfloat16, float16 or uint8 (codes of e4m3), shape (slots, 576)
    kv_scale : float
        What a code of 1 means; 1 where there are none.
    q : tensor of bfloat16 or float16, shape (N, H, 576)
    prefix_slots : list of int32 tensors, shape (prefix rows,)
        Slots of all prefixes, one request behind the other, for each copy.
    draft_slots : list of int64 tensors, shape (N,)
    sees : list of ndarrays of bool, shape (T, T)
        Which draft token sees which, for each request.
    visible : tensor of int64, shape (N, W)
        The same as words of 64 bits.
    seq_lens, qo_indptr, kv_indptr : tensors of int32
    sm_scale : float
    """

    def __init__(
        self, shape: Shape, pool: Any, *, seed: int = 0, copies: int | None = None
    ) -> None:
        import torch

        self.shape, self.sm_scale = shape, float(SM_SCALE)
        self.kv_scale = _KV_SCALE if shape.stored == "fp8" else 1.0
        self.dtype = torch.float16 if shape.stored == "fp16" else torch.bfloat16
        if shape.stored == "fp8":
            slots, width = pool.shape
            self.pool = pool.view(-1).view(torch.uint8)[: slots * width].view(slots, width)
        else:
            self.pool = pool.view(self.dtype)
        generator = torch.Generator(device=pool.device).manual_seed(seed + shape.rows)

        def noise(*size: int) -> Any:
            return torch.randn(size, generator=generator, device=pool.device)

        queries = noise(shape.tokens, shape.heads, WIDTH) / (self.sm_scale * math.sqrt(WIDTH - 1))
        queries[..., -1] = HANDLE
        self.q = queries.to(self.dtype)
        numbers = noise(shape.rows, WIDTH)
        lift = torch.from_numpy(score_lift(shape, seed)).to(pool.device)
        numbers[:, -1] = lift / (HANDLE * self.sm_scale)
        if shape.stored == "fp8":
            rows = (numbers / self.kv_scale).to(torch.float8_e4m3fn).view(torch.uint8)
        else:
            rows = numbers.to(self.dtype)

        self.copies = shape.copies(len(pool)) if copies is None else copies
        slots = torch.randperm(len(pool), generator=generator, device=pool.device)
        taken = slots[: self.copies * shape.rows].view(self.copies, shape.rows)
        self.pool.fill_(float("nan") if self.pool.is_floating_point() else _NAN_CODE)
        for copy in taken:
            self.pool[copy] = rows
        self.prefix_slots = [copy[: shape.prefix_rows].int() for copy in taken]
        self.draft_slots = [copy[shape.prefix_rows :].contiguous() for copy in taken]

        self.sees = draft_masks(shape, seed)
        self.visible = torch.from_numpy(mask_words(self.sees).view(np.int64)).to(pool.device)
        self.seq_lens = _int32(shape.prefixes, pool.device)
        self.qo_indptr = _int32(np.arange(shape.batch + 1) * shape.tree, pool.device)
        self.kv_indptr = _int32(np.cumsum((0, *shape.prefixes)), pool.device)

    @functools.cached_property
    def exact(self) -> Attention:
        """Right outputs and log-sum-exps, in float64 on the host."""
        from cuverify.torch_oracle import verify_attention

        return verify_attention(**self._oracle_arguments())

    @functools.cached_property
    def baseline(self) -> Attention:
        """What plain torch makes of it in the outputs' own dtype, whose error is the measure."""
        from cuverify.torch_oracle import baseline_attention

        return baseline_attention(**self._oracle_arguments())

    @functools.cached_property
    def bounds(self) -> DeviceBounds:
        """The right outputs and log-sum-exps, and what each may be off by."""
        dtype: str = "fp16" if self.shape.stored == "fp16" else "bf16"
        return DeviceBounds.of(self.exact, self.baseline, self.pool.device, dtype=dtype)

    @property
    def expected(self) -> Any:
        """The right outputs as a float64 tensor of shape (N, H, 512) on the device."""
        return self.bounds.out

    def new_output(self) -> Any:
        """Return an output [N, H, 512] of the type of the queries that holds NaN."""
        import torch

        shape = (self.shape.tokens, self.shape.heads, LATENT)
        return torch.full(shape, float("nan"), dtype=self.dtype, device=self.pool.device)

    def slot_table(self, copy: int = 0) -> Any:
        """Return slots of one copy by request and position: int32 of shape (B, longest prefix)."""
        return slot_table(self.prefix_slots[copy], self.shape.prefixes)

    def _oracle_arguments(self) -> dict[str, Any]:
        return {
            "q": self.q,
            "pool": self.pool,
            "latent": LATENT,
            "sm_scale": self.sm_scale,
            "qo_indptr": np.arange(self.shape.batch + 1) * self.shape.tree,
            "kv_indptr": np.cumsum((0, *self.shape.prefixes)),
            "kv_indices": self.prefix_slots[0],
            "visible": self.visible,
            "draft_slots": self.draft_slots[0],
            "kv_scale": self.kv_scale,
            "device": "cuda" if self.pool.is_cuda else "cpu",
        }


def new_pool(slots: int = SLOTS, device: str = "cuda") -> Any:
    """Return a pool for problems: bfloat16, shape (slots, 576), not written yet."""
    import torch

    return torch.empty((slots, WIDTH), dtype=torch.bfloat16, device=device)


def slot_table(slots: Any, lengths: Sequence[int]) -> Any:
    """Return slots that lie one behind the other by request and position: (B, longest)."""
    table = slots.new_zeros((len(lengths), max(lengths)))
    for row, some in zip(table, slots.split(list(lengths)), strict=True):
        row[: len(some)] = some
    return table


def score_lift(shape: Shape, seed: int) -> NDArray[np.float32]:
    """Return what is added to every score of a row: float32, prefixes first, then all drafts.

    All drafts of a request together weigh about as much as its prefix. 16 rows of each prefix, its
    ends among them, weigh as much as a draft each.
    """
    rng = np.random.default_rng([seed, shape.rows])
    lift = np.zeros(shape.rows, np.float32)
    first = 0
    for request, rows in enumerate(shape.prefixes):
        ends = [0, 1, rows - 2, rows - 1]
        marks = np.unique(np.clip([*ends, *rng.integers(0, rows, _LANDMARKS - 4)], 0, rows - 1))
        drafts = shape.prefix_rows + request * shape.tree
        weight = math.log(max(1.0, rows / shape.tree))
        lift[first + marks] = weight
        lift[drafts : drafts + shape.tree] = weight
        first += rows
    return lift


def draft_masks(shape: Shape, seed: int) -> list[NDArray[np.bool_]]:
    """Return which draft token sees which, [T, T] for each request; trees differ."""
    if shape.drafts == "block":
        return [np.ones((shape.tree, shape.tree), np.bool_)] * shape.batch
    return [_tree_mask(shape.tree, seed + request) for request in range(shape.batch)]


def mask_words(sees: list[NDArray[np.bool_]]) -> NDArray[np.uint64]:
    """Return masks [T, T] as words of 64 bits, uint64 of shape (N, W): bit k of word w, 64 w + k.

    All masks have the same T.
    """
    rows = np.concatenate(sees)
    words = -(-rows.shape[1] // _MASK_WORD)
    padded = np.zeros((len(rows), words * _MASK_WORD), np.bool_)
    padded[:, : rows.shape[1]] = rows
    packed = np.packbits(padded, axis=1, bitorder="little")
    return np.ascontiguousarray(packed).view("<u8").astype(np.uint64)


@functools.lru_cache(maxsize=512)
def _tree_mask(tokens: int, seed: int) -> NDArray[np.bool_]:
    from cuverify.verify_workload import drafted_tree

    return drafted_tree(tokens, seed).mask()


def _int32(values: Any, device: Any) -> Any:
    import torch

    return torch.from_numpy(np.asarray(values, np.int32)).to(device)
