"""Backends that break SGLang's contract, each by one mistake that was met in the field.

Their clean twin is `cuverify.sglang.backend.VerifyBackend`, from which each differs by its mistake.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from cuverify.kernel import Kernel
from cuverify.ops.verify_plan import VerifyPlan
from cuverify.sglang.backend import Metadata, VerifyBackend
from cuverify.sources import KernelSource

_LIST_BY_HOST = Path(__file__).parent / "kernels" / "list_by_host.cu"
_CHUNK = 16


class StalePositions(VerifyBackend):
    """Takes lengths from the roots' positions, and copies those of full batches only."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.positions = torch.ones(max_num_tokens, dtype=torch.int64, device=self.device)

    def _load_static(self, bs: int, req_pool_indices: Any, seq_lens: Any, spec_info: Any) -> None:
        tokens = bs * self.draft_tokens
        if spec_info.positions.numel() == tokens:
            self.positions[:tokens].copy_(spec_info.positions)
        lengths = self.positions[: tokens : self.draft_tokens].clamp(min=1)
        super()._load_static(bs, req_pool_indices, lengths, spec_info)


class UndersizedMask(VerifyBackend):
    """Has no room for the drafts' own columns in the mask of a request of maximal length."""

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        super().init_cuda_graph_state(max_bs, max_num_tokens)
        self.verify_mask = None  # both families get full masks
        short = max_num_tokens * self.max_context_len
        self._graph_tables.mask = self._graph_tables.mask[:short]


class ReallocatedMetadata(VerifyBackend):
    """Makes a new tensor of lengths in every hook; the graph reads that of its capture."""

    def _load(self, tables: Any, *step: Any) -> Metadata:
        if tables is self._graph_tables:
            tables.seq_lens = torch.zeros_like(tables.seq_lens)
        return super()._load(tables, *step)


class EagerDtypes(VerifyBackend):
    """Reads the bounds of the trees as int32, which they are in eager runs and not in graphs."""

    def _load(self, tables: Any, bs: int, *step: Any) -> Metadata:
        if tables is not self._graph_tables:
            tables.qo_indptr = tables.qo_indptr.to(torch.int32)
        metadata = super()._load(tables, bs, *step)
        plan = VerifyPlan(
            metadata.seq_lens,
            tables.qo_indptr.view(torch.int32)[: bs + 1],
            heads=self.heads,
            max_tokens=bs * self.draft_tokens,
            max_tree_tokens=self.draft_tokens,
            workspace=tables.plan_workspace,
            kv_indices=tables.kv_indices,
            req_to_token=self.req_to_token,
            req_pool_indices=metadata.req_pool_indices,
        )
        return replace(metadata, plan=plan, starts=self.make_starts(plan, tables.starts_workspace))


class HostSplitCount(VerifyBackend):
    """Gathers the slots with as many blocks as the batch at hand needs, which the host counts."""

    def _load(self, tables: Any, bs: int, rows: Any, seq_lens: Any, mask: Any) -> Metadata:
        self.blocks = -(-int(seq_lens.sum()) // _CHUNK)
        return super()._load(tables, bs, rows, seq_lens, mask)

    def forward_extend(self, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any) -> Any:
        metadata = self._metadata
        metadata.kv_indices.fill_(0)
        _list_kernel()(
            self.blocks,
            _CHUNK,
            metadata.plan.kv_indptr,
            metadata.req_pool_indices,
            self.req_to_token,
            self.req_to_token.stride(0),
            metadata.bs,
            metadata.kv_indices,
        )
        if metadata.starts is not None:
            metadata.starts()  # of the list as it is now
        return super().forward_extend(q, k, v, layer, forward_batch)


@functools.cache
def _list_kernel() -> Kernel:
    return Kernel(KernelSource.from_file(_LIST_BY_HOST), "list_by_host")
