"""A verify step with buffers of its own, and the plainest reference that there is, for several tests."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cuverify.validators.compare import host_array
from numpy.typing import NDArray

from cuverify.cases import Target
from cuverify.kv_layout import KvLayout
from cuverify.narrow import NAN, widen
from cuverify.ops.verify_attention import AttentionWorkspace, Element, VerifyAttention
from cuverify.ops.verify_plan import PlanWorkspace, VerifyPlan
from cuverify.tree import DraftTree
from cuverify.verify_batch import VerifyBatch
from cuverify.verify_variants import VariantName

FINE = {"START_ROWS": 0, "LEAST_ROWS": 16, "ROOT_HALVES": 0}
"""`-D` values of the plan that cut wherever they may."""

UNITS = {"bf16": 2.0**-8, "fp16": 2.0**-11}
"""Largest relative error of one rounding."""

POISON = 0x7FFF


def batch_of(seq_lens: Sequence[int], trees: Sequence[DraftTree | int], **more: Any) -> VerifyBatch:
    """Return a batch of requests scattered over the pool; a number stands for a random tree."""
    layout_names = {"num_slots", "page_size", "placement", "shared_prefix", "padded"}
    layout_values = {name: more.pop(name) for name in layout_names & more.keys()}
    rng = np.random.default_rng(len(seq_lens) + 7 * sum(seq_lens))
    grown = [t if isinstance(t, DraftTree) else DraftTree.random(t, rng) for t in trees]
    padded = int(layout_values.get("padded", 0))
    layout = KvLayout.build(
        seq_lens=seq_lens,
        tree_tokens=[tree.num_tokens for tree in grown],
        rng=rng,
        **{"placement": "scattered", **layout_values},
    )
    assert len(grown) == len(seq_lens) + padded
    return VerifyBatch(layout, grown, **{"latent": 64, "rope": 16, **more})


def bf16(bits: NDArray[np.uint16]) -> NDArray[np.float64]:
    return (bits.astype(np.uint32) << np.uint32(16)).view(np.float32).astype(np.float64)


def assert_rounded_once(
    out: NDArray[np.float64], right: NDArray[np.float64], partial: Element | None
) -> None:
    """Check results of bf16 that were cut, and rounded by nothing else: `partial` is their type."""
    half_a_step = np.exp2(np.frexp(right)[1] - 9)
    assert (np.abs(out - right) <= half_a_step + UNITS[partial or "fp16"] * right).all()


@dataclass(frozen=True)
class Dense:
    """What attention should give, and per element the weighted mean of the values' magnitudes."""

    out: NDArray[np.float64]
    lse: NDArray[np.float64]
    magnitude: NDArray[np.float64]


def dense(batch: VerifyBatch) -> Dense:
    """Attend in float64, one token at a time, with all of its rows side by side."""
    layout, words, unit = batch.layout, batch.visible(), batch.kv_scale or 1.0
    pool, bounds = unit * widen(batch.pool()), layout.qo_indptr()
    q, drafts = widen(batch.q()), widen(batch.draft_kv())
    if batch.draft_source == "slots":
        drafts *= unit
    out = np.zeros((batch.num_tokens, batch.heads, batch.latent))
    magnitude = np.zeros_like(out)
    lse = np.full(out.shape[:2], -np.inf)
    for request in range(batch.num_requests):
        prefix = pool[layout.prefix_slots(request)]
        tree = drafts[bounds[request] : bounds[request + 1]]
        for token in range(bounds[request], bounds[request + 1]):
            seen = [
                node for node in range(len(tree)) if int(words[token, node // 64]) >> node % 64 & 1
            ]
            rows = np.concatenate([prefix, tree[seen]])
            if not len(rows):
                continue
            scores = batch.sm_scale * q[token] @ rows.T
            largest = scores.max(axis=1, keepdims=True)
            weights = np.exp(scores - largest)
            total = weights.sum(axis=1, keepdims=True)
            out[token] = weights / total @ rows[:, : batch.latent]
            magnitude[token] = weights / total @ np.abs(rows[:, : batch.latent])
            lse[token] = (largest + np.log(total))[:, 0]
    return Dense(out, lse, magnitude)


class VerifyStep:
    """Plan and attention of a batch, in either lane; outputs and scratch are poisoned.

    Parameters
    ----------
    batch : VerifyBatch
    xp : {"numpy", "torch-cuda"}
    num_ctas : int
        Blocks that attend.
    plan_values, values : mapping
        `-D` values.
    gather : bool
        Whether the plan gathers the slots from the request table.
    index : numpy dtype
        Of lengths and bounds.
    variant : {"portable", "sm90"}, optional
        The text that attends.
    partial : {"fp16", "bf16"}, optional
        The type of partials.
    """

    def __init__(
        self,
        batch: VerifyBatch,
        xp: Target = "numpy",
        *,
        num_ctas: int = 3,
        combine_ctas: int | None = None,
        plan_values: Mapping[str, int] | None = FINE,
        values: Mapping[str, int] | None = None,
        gather: bool = False,
        index: Any = np.int32,
        max_tokens: int | None = None,
        variant: VariantName | None = None,
        partial: Element | None = None,
    ) -> None:
        self.batch, self.xp, self.index, self.gather = batch, xp, index, gather
        tokens = self.tokens = batch.num_tokens if max_tokens is None else max_tokens
        self.tensors = {name: self.tensor(value) for name, value in self.inputs(batch).items()}
        given = self.tensors
        # a gap behind each token's outputs, which nobody may write
        gapped = np.full((tokens, batch.heads * batch.latent + 8), NAN[batch.dtype])
        self.storage = self.tensor(gapped)
        self.out = self.storage[:, :-8].reshape(tokens, batch.heads, batch.latent)
        self.lse = self.tensor(np.full((tokens, batch.heads), np.nan, np.float32))
        sizes = {"max_batch": batch.num_requests, "max_tokens": tokens, "heads": batch.heads}
        workspace = PlanWorkspace.allocate(given["seq_lens"], **sizes, num_ctas=num_ctas)
        table = (
            {
                "req_to_token": given["req_to_token"],
                "req_pool_indices": given["req_pool_indices"],
            }
            if gather
            else {"kv_indptr": given["kv_indptr"]}
        )
        self.plan = VerifyPlan(
            given["seq_lens"],
            given["qo_indptr"],
            heads=batch.heads,
            max_tokens=tokens,
            max_tree_tokens=64 * batch.num_words,
            workspace=workspace,
            kv_indices=given["kv_indices"],
            values=plan_values,
            **table,
        )
        self.workspace = AttentionWorkspace.allocate(self.out, plan=self.plan, latent=batch.latent)
        separate = batch.draft_source == "separate"
        self.attention = VerifyAttention(
            given["q"],
            given["kv"],
            self.out,
            self.lse,
            plan=self.plan,
            visible=given["visible"],
            sm_scale=batch.sm_scale,
            workspace=self.workspace,
            kv_scale=1.0 if batch.kv_scale is None else batch.kv_scale,
            combine_ctas=combine_ctas,
            variant=variant,
            partial=partial,
            values=values,
            **({"draft_kv": given["draft_kv"]} if separate else {}),
            **({} if separate else {"out_cache_loc": given["out_cache_loc"]}),
        )
        self.poison()

    def inputs(self, batch: VerifyBatch) -> dict[str, NDArray[Any]]:
        """Return the arrays of a batch; rows of the pool and of drafts have gaps of NaN."""
        layout = batch.layout

        def padded(array: NDArray[Any]) -> NDArray[Any]:
            # what no request owns is noise, as in the buffers of a captured step
            more = self.tokens - len(array)
            noise = np.full((more, *array.shape[1:]), POISON).astype(array.dtype)
            return np.concatenate([array, noise])

        def gapped(rows: NDArray[Any]) -> NDArray[Any]:
            kind = NAN[batch.dtype] if rows.itemsize == 2 else NAN["fp8_e4m3"]
            wide = np.full((len(rows), rows.shape[1] + batch.row_gap), kind)
            wide[:, : rows.shape[1]] = rows
            return wide[:, : rows.shape[1]]

        indices = layout.kv_indices(batch.index_dtype)
        rows, width = layout.req_to_token.shape
        table = np.full((max(rows, 8), max(width, 520)), -1, np.int32)
        table[:rows, :width] = layout.req_to_token
        return {
            "seq_lens": layout.seq_lens.astype(self.index),
            "qo_indptr": layout.qo_indptr(self.index),
            "kv_indptr": layout.kv_indptr(),
            "kv_indices": np.full(len(indices) + 1, -1, indices.dtype) if self.gather else indices,
            "req_to_token": table,
            "req_pool_indices": layout.req_pool_indices.astype(self.index),
            "out_cache_loc": padded(layout.out_cache_loc),
            "q": padded(batch.q()),
            "kv": gapped(batch.pool()),
            "draft_kv": gapped(padded(batch.draft_kv())),
            "visible": padded(batch.visible()),
        }

    def tensor(self, array: NDArray[Any]) -> Any:
        if self.xp == "numpy":
            return array
        import torch

        whole = array if array.base is None or array.flags.c_contiguous else array.base
        signed = {np.dtype(np.uint16): np.int16, np.dtype(np.uint64): np.int64}
        plain = whole.view(signed.get(whole.dtype, whole.dtype))
        there = torch.from_numpy(plain.copy()).cuda()
        if whole.dtype == np.uint16:
            there = there.view(torch.bfloat16)
        return there if whole is array else there[:, : array.shape[1]]

    def refill(self, batch: VerifyBatch) -> None:
        """Write another batch of the same sizes into the buffers; prefixes may be shorter."""
        self.batch = batch
        for name, array in self.inputs(batch).items():
            fresh = self.tensor(array)
            self.tensors[name][tuple(slice(n) for n in fresh.shape)] = fresh

    def poison(self) -> None:
        for tensor in (self.storage, self.lse):
            tensor[:] = float("nan") if self.xp != "numpy" or tensor.dtype.kind == "f" else POISON
        self.workspace.partial_out[:] = -1
        self.workspace.partial_lse[:] = float("nan")

    def __call__(self) -> None:
        self.plan()
        self.attention()

    def outputs(self) -> tuple[NDArray[Any], NDArray[Any]]:
        """Return the bits of `out` and the values of `lse`, on the host."""
        return host_array(self.out).bits(), host_array(self.lse).data

    def gaps(self) -> NDArray[Any]:
        """Return what is behind each token's outputs, on the host."""
        return host_array(self.storage).data[:, -8:]

    def wrong(self) -> list[str]:
        """Say what the last run got wrong."""
        bits, lse = self.outputs()
        unit = UNITS[self.batch.dtype]
        written = bits if self.batch.dtype == "bf16" else bits.view(np.float16)
        tokens, right = self.batch.num_tokens, dense(self.batch)
        out, found = widen(written[:tokens]), []
        # weights, partials and the result are rounded once each; fp16 has a smallest step
        finer = self.batch.dtype == "bf16" and self.attention.partial == "fp16"
        roundings = 2.2 if finer else 3.1
        least = {"bf16": 2.0**-24 if finer else 1e-30, "fp16": 1e-6}[self.batch.dtype]
        allowed = roundings * unit * right.magnitude + least
        off = ~(np.abs(out - right.out) <= allowed)
        if off.any():
            at = tuple(np.argwhere(off)[0].tolist())
            found.append(
                f"out{list(at)} is {out[at]}, not {right.out[at]} (+- {allowed[at]}); "
                f"{int(off.sum())} of {off.size} are wrong, {int(np.isnan(out).sum())} are NaN"
            )
        blind = np.isneginf(right.lse)
        near = np.abs(lse[:tokens] - np.where(blind, 0, right.lse)) <= 2e-5 * np.maximum(
            1, np.abs(np.where(blind, 0, right.lse))
        )
        off = np.where(blind, ~np.isneginf(lse[:tokens]), ~near)
        if off.any():
            at = tuple(np.argwhere(off)[0].tolist())
            found.append(f"lse{list(at)} is {lse[at]}, not {right.lse[at]}; {int(off.sum())} wrong")
        if not np.isnan(widen(self.gaps())).all():
            found.append("the gaps between the rows of out are written")
        if not np.isnan(lse[tokens:]).all() or not np.isnan(widen(written[tokens:])).all():
            found.append("rows of no request are written")
        return found
