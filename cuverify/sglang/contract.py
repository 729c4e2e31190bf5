"""What SGLang hands to an attention backend that verifies draft trees, under its own names.

Only what the verify path reads is here. Shapes and dtypes are those of SGLang 0.5.12 to 0.5.23;
where eager runs and graphs differ, `inputs` and `play` give each what it gets there.

Names: B requests, n draft tokens of each, T = B n, H heads, D = latent + rope columns of a KV row.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

if TYPE_CHECKING:
    import torch

Family = Literal["paired", "split"]
"""Hooks of a graph runner: one to capture and one to replay (up to 0.5.13), or one outside of the
graph and one inside (from 0.5.13)."""

FAMILIES: tuple[Family, ...] = ("paired", "split")

_HOOKS: dict[Family, tuple[str, ...]] = {
    "paired": (
        "init_forward_metadata_capture_cuda_graph",
        "init_forward_metadata_replay_cuda_graph",
    ),
    "split": ("init_forward_metadata_out_graph", "init_forward_metadata_in_graph"),
}
_COMMON = (
    "init_forward_metadata",
    "init_cuda_graph_state",
    "get_cuda_graph_seq_len_fill_value",
    "forward_extend",
)


class ForwardMode:
    """The mode of a forward pass: always the target's verification of draft trees."""

    def is_target_verify(self) -> bool:
        """Return True."""
        return True

    def is_decode_or_idle(self) -> bool:
        """Return False."""
        return False

    def is_draft_extend(self) -> bool:
        """Return False."""
        return False


@dataclass(eq=False)
class Layer:
    """The attention layer.

    Attributes
    ----------
    layer_id, tp_q_head_num, tp_k_head_num, head_dim, v_head_dim : int
        Absorbed MLA: one KV head, ``head_dim`` = D, ``v_head_dim`` = latent. Grouped queries: as
        many KV heads as there are, 128 columns each.
    scaling : float
        Factor of the scores.
    """

    layer_id: int
    tp_q_head_num: int
    tp_k_head_num: int
    head_dim: int
    v_head_dim: int
    scaling: float


@dataclass(eq=False)
class ReqToTokenPool:
    """Slots of every request's tokens.

    Attributes
    ----------
    req_to_token : tensor of int32, shape (rows, width)
        Row 0 is for padding, and starts with slot 0. Behind a request's tokens a row is stale.
    """

    req_to_token: torch.Tensor


@dataclass(eq=False)
class TokenToKvPool:
    """The KV cache of one layer, in absorbed form.

    Attributes
    ----------
    kv_buffer : tensor of bfloat16, float16 or uint8, shape (slots, 1, D)
        Slot 0 takes what padding writes. Codes of fp8 are kept as uint8, which can be indexed.
    latent : int
        The first columns, which are also the value.
    dtype : torch.dtype
        What the buffer holds.
    """

    kv_buffer: torch.Tensor
    latent: int
    dtype: torch.dtype

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the rows: shape (slots, 1, D)."""
        return self.kv_buffer.view(self.dtype)

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the values: a view of shape (slots, 1, latent), row stride D."""
        return self.get_key_buffer(layer_id)[..., : self.latent]

    def set_kv_buffer(
        self, layer: Layer, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor
    ) -> None:
        """Write rows to slots, as what the pool holds.

        Padding writes slot 0 several times; which row stays is open.
        """
        self.kv_buffer[loc] = cache_k.to(self.dtype).view(self.kv_buffer.dtype)


@dataclass(eq=False)
class MhaTokenToKvPool:
    """The KV cache of one layer whose keys and values are apart.

    Attributes
    ----------
    k_buffer, v_buffer : tensor of bfloat16, shape (slots, KV heads, 128)
        Slot 0 takes what padding writes.
    """

    k_buffer: torch.Tensor
    v_buffer: torch.Tensor

    def get_key_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the keys."""
        return self.k_buffer

    def get_value_buffer(self, layer_id: int) -> torch.Tensor:
        """Return the values."""
        return self.v_buffer

    def set_kv_buffer(
        self, layer: Layer, loc: torch.Tensor, cache_k: torch.Tensor, cache_v: torch.Tensor
    ) -> None:
        """Write rows to slots; as for `TokenToKvPool`."""
        self.k_buffer[loc] = cache_k
        self.v_buffer[loc] = cache_v


KvPool = TokenToKvPool | MhaTokenToKvPool


@dataclass(eq=False)
class VerifyMask:
    """A static mask buffer that the tree builder writes into; a backend may own one.

    Attributes
    ----------
    buffer : tensor of uint8
        Query-only: B n n elements, a request's n x n behind the other's. What is behind the real
        requests is stale.
    mode : {"query_only"}
    max_bs : int
    """

    buffer: torch.Tensor
    mode: Literal["query_only"]
    max_bs: int


@dataclass(eq=False)
class VerifyInput:
    """The draft trees of a batch (``EagleVerifyInput``).

    Attributes
    ----------
    draft_token : tensor of int64, shape (T,)
        Root first.
    custom_mask : tensor
        A full mask, flat bool: for request b n rows of ``seq_lens[b] + n``, real requests only. Or
        the whole buffer of the backend's `VerifyMask`, uint8.
    positions : tensor of int64, shape (T,)
    retrieve_index, retrieve_next_token, retrieve_next_sibling : tensor of int64, shape (B, n)
    draft_token_num, spec_steps, topk, seq_lens_sum : int
    seq_lens_cpu : tensor of int64, shape (B,), on the host
    """

    draft_token: torch.Tensor
    custom_mask: torch.Tensor
    positions: torch.Tensor
    retrieve_index: torch.Tensor
    retrieve_next_token: torch.Tensor
    retrieve_next_sibling: torch.Tensor
    draft_token_num: int
    spec_steps: int
    topk: int
    seq_lens_sum: int
    seq_lens_cpu: torch.Tensor

    def generate_attn_arg_prefill(
        self,
        req_pool_indices: torch.Tensor,
        paged_kernel_lens: torch.Tensor,
        paged_kernel_lens_sum: int,
        req_to_token: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return index lists with the drafts appended, as 0.5.12 makes them: new at every call.

        Parameters
        ----------
        req_pool_indices, paged_kernel_lens : tensor of int64, shape (B,)
            Rows, and lengths without the drafts.
        paged_kernel_lens_sum : int
            Of the lengths.
        req_to_token : tensor of int32, shape (rows, width)

        Returns
        -------
        kv_indices : tensor of int32, shape (paged_kernel_lens_sum + B n,)
            Slots of each prefix and its drafts.
        cum_kv_seq_len : tensor of int32, shape (B + 1,)
            Their bounds.
        qo_indptr : tensor of int32, shape (B + 1,)
        custom_mask : tensor
            `custom_mask`; where it is too short for all requests, a longer one with True behind.
        """
        import torch

        n, bs, device = self.draft_token_num, len(paged_kernel_lens), paged_kernel_lens.device
        lengths = paged_kernel_lens + n
        total = paged_kernel_lens_sum + n * bs
        bounds = torch.zeros(bs + 1, dtype=torch.int64, device=device)
        bounds[1:] = lengths.cumsum(0)
        owner = torch.repeat_interleave(torch.arange(bs, device=device), lengths, output_size=total)
        position = torch.arange(total, device=device) - bounds[owner]
        slots = req_to_token[req_pool_indices[owner], position].to(torch.int32)
        qo_indptr = torch.arange(0, (bs + 1) * n, n, dtype=torch.int32, device=device)
        mask, wanted = self.custom_mask, n * paged_kernel_lens_sum + n * n * bs
        if mask.numel() < wanted:
            more = torch.ones(wanted - mask.numel(), dtype=mask.dtype, device=device)
            mask = torch.cat([mask, more])
        return slots, bounds.to(torch.int32), qo_indptr, mask


@dataclass(eq=False)
class ForwardBatch:
    """One forward pass.

    Attributes
    ----------
    batch_size : int
        B, in a graph the captured one.
    input_ids, positions, out_cache_loc : tensor of int64, shape (T,)
        In a graph views of static buffers.
    req_pool_indices, seq_lens : tensor of int64, shape (B,)
        Likewise. `seq_lens` exclude the drafts.
    seq_lens_cpu : tensor of int64, shape (B,), on the host
    seq_lens_sum : int
    spec_info : VerifyInput
    req_to_token_pool, token_to_kv_pool
        The pools; the same tensors at every call.
    forward_mode : ForwardMode
    """

    batch_size: int
    input_ids: torch.Tensor
    positions: torch.Tensor
    out_cache_loc: torch.Tensor
    req_pool_indices: torch.Tensor
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    seq_lens_sum: int
    spec_info: VerifyInput
    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool: KvPool
    forward_mode: ForwardMode


@dataclass(eq=False)
class ModelRunner:
    """What a backend is made from.

    Attributes
    ----------
    device : {"cpu", "cuda"}
        ``cpu`` is the host lane: torch tensors in host memory, cuverify's kernels under its
        checkers, and graphs that are likenesses of CUDA's.
    num_attention_heads, latent, rope : int
        H of this rank, and the columns of a KV row. Where keys and values are apart, `latent` are
        those of each, and `rope` is 0.
    num_key_value_heads : int
        KV heads of this rank; 1 for latent rows.
    scaling : float
        Factor of the scores.
    max_context_len : int
        Most tokens of a prefix.
    speculative_num_draft_tokens : int
        n.
    dtype : torch.dtype
        Of queries, drafts' rows and outputs.
    kv_cache_dtype : torch.dtype
        What the pool holds: the same, or float8_e4m3fn beside bfloat16, a code's number being what
        it stands for.
    req_to_token_pool : ReqToTokenPool
    token_to_kv_pool : TokenToKvPool or MhaTokenToKvPool
    """

    device: str
    num_attention_heads: int
    latent: int
    rope: int
    num_key_value_heads: int
    scaling: float
    max_context_len: int
    speculative_num_draft_tokens: int
    dtype: torch.dtype
    kv_cache_dtype: torch.dtype
    req_to_token_pool: ReqToTokenPool
    token_to_kv_pool: KvPool


class VerifyRunner(Protocol):
    """An attention backend, as `cuverify check --runner module:Class` takes it.

    The class is called with a `ModelRunner`. It has the methods below, which are SGLang's, and
    those of one family of hooks or of both:

    ``init_forward_metadata_capture_cuda_graph(bs, num_tokens, req_pool_indices, seq_lens,
    encoder_lens, forward_mode, spec_info)`` and ``init_forward_metadata_replay_cuda_graph(bs,
    req_pool_indices, seq_lens, seq_lens_sum, encoder_lens, forward_mode, spec_info,
    seq_lens_cpu)``: before the capture, and before each replay.

    ``init_forward_metadata_out_graph(forward_batch, in_capture=False)``: before the capture and
    before each replay; host work is allowed. ``init_forward_metadata_in_graph(forward_batch)``:
    recorded, in front of the forward pass. ``on_after_cuda_graph_warmup()``, where there is one,
    is called behind each warm-up run.

    The attribute ``verify_mask``, where it is there and not None, is a `VerifyMask`: then the
    second family's `VerifyInput.custom_mask` is its buffer.

    A class whose attribute ``kv_heads`` is a number is played with so many KV heads, four query
    heads each, and keys and values apart: `MhaTokenToKvPool`, and a `v` that is no view of `k`.

    Notes
    -----
    Padded requests have one token of prefix and n drafts in slot 0, a mask of anything and inputs
    of anything, NaN among them. What comes out for them is not looked at; it must not fault, hang
    or change another request's rows.
    """

    def init_cuda_graph_state(self, max_bs: int, max_num_tokens: int) -> None:
        """Make the static buffers, once."""

    def init_forward_metadata(self, forward_batch: ForwardBatch) -> None:
        """Prepare an eager pass. Tensors are as long as the batch, and new at every call."""

    def get_cuda_graph_seq_len_fill_value(self) -> int:
        """Return the prefix length of padded requests."""

    def forward_extend(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Layer,
        forward_batch: ForwardBatch,
        save_kv_cache: bool = True,
    ) -> torch.Tensor:
        """Attend.

        Parameters
        ----------
        q : tensor of `ModelRunner.dtype`, shape (T, H, `Layer.head_dim`)
        k : tensor of the same, shape (T, `Layer.tp_k_head_num`, `Layer.head_dim`)
            Rows of the drafts, not yet in the pool.
        v : tensor of the same, shape (T, `Layer.tp_k_head_num`, `Layer.v_head_dim`)
            A view of `k`, or rows of their own where keys and values are apart.
        layer : Layer
        forward_batch : ForwardBatch
        save_kv_cache : bool
            Write the rows to their slots.

        Returns
        -------
        tensor of the same, shape (T, H, `Layer.v_head_dim`) or (T, H * `Layer.v_head_dim`)
        """


def families_of(backend: Any) -> list[Family]:
    """Return the families whose hooks a backend (or its class) has."""
    return [family for family in FAMILIES if all(hasattr(backend, name) for name in _HOOKS[family])]


def missing_hooks(backend: Any) -> list[str]:
    """Return what a backend (or its class) lacks to be played at all; empty when nothing."""
    missing = [name for name in _COMMON if not hasattr(backend, name)]
    if not families_of(backend):
        missing.append(" or ".join("+".join(hooks) for hooks in _HOOKS.values()))
    return missing


MakeRunner = Callable[[ModelRunner], Any]
