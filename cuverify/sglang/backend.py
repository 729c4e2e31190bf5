"""Our verify attention as an attention backend of SGLang, through both families of hooks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from cuverify.buffers import tensor_of
from cuverify.errors import ArgumentError
from cuverify.launching import capability
from cuverify.narrow import Narrow
from cuverify.sglang.contract import ForwardBatch, ForwardMode, Layer, ModelRunner, VerifyMask
from cuverify.verify_variants import VARIANTS, VariantName, choose_variant

if TYPE_CHECKING:
    import torch

    from cuverify.launching import PartialType
    from cuverify.ops.verify_attention import Element
    from cuverify.ops.verify_plan import PlanWorkspace, VerifyPlan
    from cuverify.ops.verify_starts import StartsWorkspace, VerifyStarts

_WORD = 64


@dataclass(eq=False)
class Metadata:
    """What one forward pass attends by: views of the tables for its batch size, and the plan.

    Attributes
    ----------
    bs : int
    mask, mask_indptr : tensor
        The trees' mask and where each request's part of it starts.
    mask_is_full : bool
        Its rows have columns for the prefix in front.
    seq_lens, req_pool_indices, qo_indptr, kv_indices, visible : tensor
    plan : VerifyPlan
    starts : VerifyStarts or None
        Where the text reads them.
    workspace : AttentionWorkspace, or GqaWorkspace
    """

    bs: int
    mask: torch.Tensor
    mask_indptr: torch.Tensor
    mask_is_full: bool
    seq_lens: torch.Tensor
    req_pool_indices: torch.Tensor
    qo_indptr: torch.Tensor
    kv_indices: torch.Tensor
    visible: torch.Tensor
    plan: VerifyPlan
    starts: VerifyStarts | None
    workspace: Any


class VerifyBackend:
    """Tree verification by `cuverify.ops`: a plan made on the device once a step, then attention.

    Parameters
    ----------
    model_runner : ModelRunner

    Attributes
    ----------
    forward_metadata : Metadata or None
        Of the pass that was prepared last.
    verify_mask : VerifyMask or None
        The query-only mask that the tree builder fills for graphs; made with the static buffers.
    text : VariantName
        Which text attends: `variant` of the class, or that of the rule.

    Raises
    ------
    ArgumentError
        The pool holds what is none of `kinds`.
    """

    variant: ClassVar[VariantName | None] = None
    text_values: ClassVar[Mapping[str, int] | None] = None
    """`-D` values of that text, in place of those that were tuned for the GPU and fit it."""
    partial: ClassVar[PartialType | None] = None
    """The type of partials, as for the op."""
    kinds: ClassVar[Mapping[str, Narrow]] = {
        "torch.bfloat16": "bf16",
        "torch.float16": "fp16",
        "torch.float8_e4m3fn": "fp8_e4m3",
    }
    """What a pool may hold, by the name of its dtype."""

    def __init__(self, model_runner: ModelRunner) -> None:
        self.device = model_runner.device
        self.heads = model_runner.num_attention_heads
        self.kv_heads = model_runner.num_key_value_heads
        self.latent = model_runner.latent
        self.draft_tokens = model_runner.speculative_num_draft_tokens
        self.max_context_len = model_runner.max_context_len
        self.req_to_token = model_runner.req_to_token_pool.req_to_token
        self.element: Element = "fp16" if str(model_runner.dtype) == "torch.float16" else "bf16"
        held = str(model_runner.kv_cache_dtype)
        if held not in self.kinds:
            raise ArgumentError("kv_cache_dtype", held, f"wants one of {', '.join(self.kinds)}")
        self.choose_text(model_runner, self.kinds[held])
        self.forward_metadata: Metadata | None = None
        self.verify_mask: VerifyMask | None = None
        self._graph_tables: _Tables | None = None

    # Eager

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Plan an eager pass with buffers of its own."""
        tables = _Tables(self, forward_batch.batch_size, forward_batch.seq_lens_sum)
        spec = forward_batch.spec_info
        self.forward_metadata = self._load(
            tables,
            forward_batch.batch_size,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            spec.custom_mask,
        )
        self._plan(self.forward_metadata)

    # Graphs

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make the static buffers, sized for every request at the maximal length."""
        n = self.draft_tokens
        if max_num_tokens != max_bs * n:
            raise ArgumentError(
                "max_num_tokens", max_num_tokens, f"wants {max_bs} requests of {n} draft tokens"
            )
        self._graph_tables = _Tables(self, max_bs, max_bs * self.max_context_len)
        buffer = self._graph_tables.query_mask
        self.verify_mask = VerifyMask(buffer, "query_only", max_bs)

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return 1: a padded request has the dummy slot as its prefix."""
        return 1

    def init_forward_metadata_capture_cuda_graph(
        self,
        bs: int,
        num_tokens: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        encoder_lens: torch.Tensor | None,
        forward_mode: ForwardMode,
        spec_info: Any,
    ) -> None:
        """Load and plan: the plan is no part of the graph, only its buffers are."""
        self._load_static(bs, req_pool_indices, seq_lens, spec_info)
        self._plan(self._metadata)

    def init_forward_metadata_replay_cuda_graph(
        self,
        bs: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        seq_lens_sum: int,
        encoder_lens: torch.Tensor | None,
        forward_mode: ForwardMode,
        spec_info: Any,
        seq_lens_cpu: torch.Tensor | None,
    ) -> None:
        """Load and plan, in front of the replay."""
        self._load_static(bs, req_pool_indices[:bs], seq_lens[:bs], spec_info)
        self._plan(self._metadata)

    def init_forward_metadata_out_graph(
        self, forward_batch: ForwardBatch, in_capture: bool = False
    ) -> None:
        """Load the step's inputs into the static buffers."""
        self._load_static(
            forward_batch.batch_size,
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            forward_batch.spec_info,
        )

    def init_forward_metadata_in_graph(self, forward_batch: ForwardBatch) -> None:
        """Plan, recorded: one launch or two, and a few operations on buffers of the graph's own."""
        self._plan(self._metadata)

    # Attention

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Layer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Write the drafts' rows to their slots and attend. See `contract.VerifyRunner`."""
        import torch

        metadata = self._metadata
        tokens = metadata.bs * self.draft_tokens
        pool = forward_batch.token_to_kv_pool
        if save_kv_cache:
            pool.set_kv_buffer(layer, forward_batch.out_cache_loc, k, v)
        out = torch.empty((tokens, self.heads, self.latent), dtype=q.dtype, device=q.device)
        lse = torch.empty((tokens, self.heads), dtype=torch.float32, device=q.device)
        self.attend(
            q,
            pool,
            layer,
            out,
            lse,
            plan=metadata.plan,
            visible=metadata.visible,
            sm_scale=layer.scaling,
            out_cache_loc=forward_batch.out_cache_loc,
            workspace=metadata.workspace,
            **({} if metadata.starts is None else {"starts": metadata.starts}),
        )
        return out

    # What depends on how rows are kept

    def choose_text(self, model_runner: ModelRunner, pool: Narrow) -> None:
        """Choose the text that attends to what the pool holds."""
        self.text = self.variant or choose_variant(
            capability(tensor_of("req_to_token", self.req_to_token).device),
            latent=model_runner.latent,
            rope=model_runner.rope,
            sm_scale=model_runner.scaling,
            pool=pool,
        )

    def make_plan(self, seq_lens: Any, qo_indptr: Any, **more: Any) -> VerifyPlan:
        """Return a plan for a batch size; parameters as for `VerifyPlan`."""
        from cuverify.ops.verify_plan import VerifyPlan

        return VerifyPlan(seq_lens, qo_indptr, heads=self.heads, variant=self.text, **more)

    def make_starts(
        self, plan: VerifyPlan, workspace: StartsWorkspace | None = None
    ) -> VerifyStarts | None:
        """Return what lays out what blocks read first, if the text reads it.

        Where drafts lie is not known when a step is planned: layers look that up.
        """
        from cuverify.ops.verify_starts import VerifyStarts

        return VerifyStarts(plan, workspace=workspace) if VARIANTS[self.text].starts else None

    def make_workspace(self, like: torch.Tensor, plan: VerifyPlan) -> Any:
        """Return the attention's workspace for a plan."""
        from cuverify.ops.verify_attention import AttentionWorkspace

        return AttentionWorkspace.allocate(like, plan=plan, latent=self.latent)

    def attend(self, q: Any, pool: Any, layer: Layer, out: Any, lse: Any, **more: Any) -> None:
        """Attend to a layer's pool; what is not named here is as for `VerifyAttention`."""
        from cuverify.ops.verify_attention import VerifyAttention

        kv = pool.get_key_buffer(layer.layer_id)
        more |= {"variant": self.text, "partial": self.partial, "values": self.text_values}
        VerifyAttention(q, kv, out, lse, **more)()

    # Parts

    @property
    def _metadata(self) -> Metadata:
        if self.forward_metadata is None:
            raise ArgumentError("forward_metadata", None, "no pass was prepared")
        return self.forward_metadata

    def _load_static(
        self, bs: int, req_pool_indices: torch.Tensor, seq_lens: torch.Tensor, spec_info: Any
    ) -> None:
        if self._graph_tables is None:
            raise ArgumentError("bs", bs, "init_cuda_graph_state was not called")
        self.forward_metadata = self._load(
            self._graph_tables, bs, req_pool_indices, seq_lens, spec_info.custom_mask
        )

    def _load(
        self,
        tables: _Tables,
        bs: int,
        req_pool_indices: torch.Tensor,
        seq_lens: torch.Tensor,
        custom_mask: torch.Tensor,
    ) -> Metadata:
        """Copy a step's inputs into tables; what they had behind it stays."""
        n = self.draft_tokens
        tables.seq_lens[:bs].copy_(seq_lens)
        tables.req_pool_indices[:bs].copy_(req_pool_indices)
        query_only = custom_mask.data_ptr() == tables.query_mask.data_ptr()
        if not query_only:
            tables.mask[: custom_mask.numel()].copy_(custom_mask)
            tables.mask_indptr[1 : bs + 1].copy_((n * (seq_lens + n)).cumsum(0))
        return Metadata(
            bs=bs,
            mask=tables.query_mask if query_only else tables.mask,
            mask_indptr=tables.query_indptr if query_only else tables.mask_indptr,
            mask_is_full=not query_only,
            seq_lens=tables.seq_lens[:bs],
            req_pool_indices=tables.req_pool_indices[:bs],
            qo_indptr=tables.qo_indptr[: bs + 1],
            kv_indices=tables.kv_indices,
            visible=tables.visible[: bs * n],
            plan=tables.plan(bs),
            starts=tables.starts(bs),
            workspace=tables.attention_workspace,
        )

    def _plan(self, metadata: Metadata) -> None:
        metadata.visible.copy_(self._visible(metadata))
        metadata.plan()
        if metadata.starts is not None:
            metadata.starts()

    def _visible(self, metadata: Metadata) -> torch.Tensor:
        """Return who sees whom as words: int64, shape (B n, W), from the trees' mask."""
        import torch

        n, bs = self.draft_tokens, metadata.bs
        node = torch.arange(n, device=metadata.mask.device)
        prefix = metadata.seq_lens if metadata.mask_is_full else torch.zeros_like(metadata.seq_lens)
        row = metadata.mask_indptr[:bs, None] + node * (prefix[:, None] + n) + prefix[:, None]
        # a padded request's part is stale, and may lie behind the end of a short mask
        at = (row[:, :, None] + node).clamp_(max=metadata.mask.numel() - 1)
        seen = metadata.mask[at.reshape(-1)].reshape(bs * n, n) != 0
        words = metadata.visible.shape[1]
        bit = torch.ones_like(node) << (node % _WORD)
        parts = [
            (seen[:, _WORD * word : _WORD * (word + 1)] * bit[_WORD * word : _WORD * (word + 1)])
            .sum(1)
            for word in range(words)
        ]  # fmt: skip
        return torch.stack(parts, 1)


class _Tables:
    """Buffers for up to so many requests, and the plans that write them, one a batch size."""

    def __init__(self, backend: VerifyBackend, max_bs: int, listed: int) -> None:
        import torch

        n, device = backend.draft_tokens, backend.device
        self._backend = backend
        self._plans: dict[int, VerifyPlan] = {}
        self._starts: dict[int, VerifyStarts | None] = {}

        def zeros(length: int, dtype: Any = torch.int64) -> Any:
            return torch.zeros(length, dtype=dtype, device=device)

        self.seq_lens = zeros(max_bs)
        self.req_pool_indices = zeros(max_bs)
        self.qo_indptr = torch.arange(0, (max_bs + 1) * n, n, device=device)
        self.kv_indices = zeros(max(1, listed))
        self.mask = zeros(max_bs * n * (backend.max_context_len + n), torch.uint8)
        self.mask_indptr = zeros(max_bs + 1)
        self.query_mask = zeros(max_bs * n * n, torch.uint8)
        self.query_indptr = torch.arange(0, (max_bs + 1) * n * n, n * n, device=device)
        self.visible = zeros(max_bs * n * -(-n // _WORD)).reshape(max_bs * n, -1)
        self.plan_workspace: PlanWorkspace | None = None
        largest = self.plan(max_bs)
        self.plan_workspace = largest.workspace
        self.starts_workspace: StartsWorkspace | None = None
        first = self.starts(max_bs)
        self.starts_workspace = None if first is None else first.workspace
        self.attention_workspace = backend.make_workspace(self.seq_lens, largest)

    def plan(self, bs: int) -> VerifyPlan:
        """Return the plan of a batch size; all of them write the same buffers."""
        backend = self._backend
        if bs not in self._plans:
            n = backend.draft_tokens
            self._plans[bs] = backend.make_plan(
                self.seq_lens[:bs],
                self.qo_indptr[: bs + 1],
                max_tokens=bs * n,
                max_tree_tokens=n,
                workspace=self.plan_workspace,
                kv_indices=self.kv_indices,
                req_to_token=backend.req_to_token,
                req_pool_indices=self.req_pool_indices[:bs],
            )
        return self._plans[bs]

    def starts(self, bs: int) -> VerifyStarts | None:
        """Return the starts of the plan of a batch size; all write the same buffers, too."""
        if bs not in self._starts:
            plan = self.plan(bs)
            self._starts[bs] = self._backend.make_starts(plan, self.starts_workspace)
        return self._starts[bs]
