"""A decode step's glue and attention as one chain of launches, with no host in it.

drafts -> tree build -> plan -> attention of each layer -> argmax -> acceptance -> commit, over
static buffers: captured once, replayed with other drafts, lengths and slots. The model's own work
goes in between by callables.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, get_args

import numpy as np

from cuverify.buffers import Buffer, read, tensor_of
from cuverify.errors import ArgumentError
from cuverify.launching import PartialType, capability
from cuverify.ops.accept import AcceptBuffers, AcceptGreedy, Argmax
from cuverify.ops.commit import CommitPlan, Way
from cuverify.ops.draft_topk import DraftTopk
from cuverify.ops.tree_build import TreeBuffers, TreeBuild
from cuverify.ops.verify_attention import AttentionWorkspace, VerifyAttention
from cuverify.ops.verify_plan import MAX_TREE_TOKENS, PlanWorkspace, VerifyPlan
from cuverify.ops.verify_starts import VerifyStarts
from cuverify.stages import stage
from cuverify.static_buffers import write
from cuverify.verify_variants import VARIANTS, choose_variant

Call = Callable[[], None]


@dataclass(frozen=True)
class StepSizes:
    """Sizes of a step, which a captured graph keeps.

    Attributes
    ----------
    requests, nodes : int
        B, and n: nodes of each tree, the root included; up to 256.
    depth, ranks : int
        Of the drafter's log-probabilities.
    layers, heads, latent, rope : int
        Of the target's attention.
    slots : int
        Of each layer's pool.
    table : tuple of int
        Rows and width of the request-to-token table.
    listed : int
        Most tokens of all prefixes.
    vocabulary : int
    max_path : int
        Most nodes of an accepted path, the root included.
    """

    requests: int
    nodes: int
    depth: int
    ranks: int
    layers: int
    heads: int
    slots: int
    table: tuple[int, int]
    listed: int
    vocabulary: int
    max_path: int
    latent: int = 512
    rope: int = 64

    def __post_init__(self) -> None:
        if not 1 <= self.nodes <= MAX_TREE_TOKENS:
            raise ArgumentError("nodes", self.nodes, f"attention takes 1 to {MAX_TREE_TOKENS}")

    @property
    def tokens(self) -> int:
        """N, the nodes of all trees."""
        return self.requests * self.nodes

    def buffers(self) -> dict[str, Buffer]:
        """Return the buffers of a step: the fields of `StepTensors`."""
        drafts = (self.requests, self.depth, self.ranks)
        width = self.latent + self.rope
        return {
            "logprobs": Buffer(drafts, "float32"),
            "token_ids": Buffer(drafts, "int64"),
            "root_tokens": Buffer((self.requests,), "int64"),
            "seq_lens": Buffer((self.requests,), "int64"),
            "req_pool_indices": Buffer((self.requests,), "int64"),
            "req_to_token": Buffer(self.table, "int32"),
            "out_cache_loc": Buffer((self.tokens,), "int64"),
            "qo_indptr": Buffer((self.requests + 1,), "int32"),
            "kv_indices": Buffer((self.listed,), "int32"),
            "q": Buffer((self.layers, self.tokens, self.heads, width), "bf16"),
            "kv": Buffer((self.layers, self.slots, width), "bf16"),
            "out": Buffer((self.layers, self.tokens, self.heads, self.latent), "bf16"),
            "lse": Buffer((self.layers, self.tokens, self.heads), "float32"),
            "logits": Buffer((self.tokens, self.vocabulary), "bf16"),
            "target": Buffer((self.tokens,), "int64"),
        }


@dataclass(frozen=True, eq=False)
class StepTensors:
    """The static buffers of a step, on one device.

    Attributes
    ----------
    logprobs, token_ids : tensor of float32 and int64, shape (B, depth, ranks)
        Of the drafter: inputs, or written by the step where it has `draft_logits`.
    root_tokens, seq_lens, req_pool_indices : tensor of int64, shape (B,)
        Inputs: token of each root, tokens in front of it, row of the table.
    req_to_token : tensor of int32, shape (rows, width)
        Input: slots by request and position. A commit by table permutes each tree's in place.
    out_cache_loc : tensor of int64, shape (N,)
        Input: slots of the tree tokens, of each replay anew: a commit by table permutes them, too.
    qo_indptr : tensor of int32, shape (B + 1,)
        ``b * nodes``, written when the tensors are made.
    kv_indices : tensor of int32, shape (listed,)
        Written by the plan.
    q : tensor of bfloat16, shape (layers, N, H, latent + rope)
        Input of each layer.
    kv : tensor of bfloat16, shape (layers, slots, latent + rope)
        The pools. A commit by rows moves rows of the trees in them.
    out, lse : tensor of bfloat16 and float32, shapes (layers, N, H, latent) and (layers, N, H)
        Written by each layer.
    logits : tensor of bfloat16, shape (N, vocabulary)
        Input of acceptance: the target's.
    target : tensor of int64, shape (N,)
        Written: the target's choice behind each node.
    """

    logprobs: Any
    token_ids: Any
    root_tokens: Any
    seq_lens: Any
    req_pool_indices: Any
    req_to_token: Any
    out_cache_loc: Any
    qo_indptr: Any
    kv_indices: Any
    q: Any
    kv: Any
    out: Any
    lse: Any
    logits: Any
    target: Any

    @classmethod
    def allocate(cls, like: Any, sizes: StepSizes) -> StepTensors:
        """Return new buffers of the library and on the device of the tensor `like`."""
        made = {name: buffer.zeros(like) for name, buffer in sizes.buffers().items()}
        bounds = np.arange(sizes.requests + 1, dtype=np.int32) * np.int32(sizes.nodes)
        write(made["qo_indptr"], bounds)
        return cls(**made)


class VerifyStep:
    """All launches of a decode step, checks done; calling it launches them in order.

    Make it, and run it once, before a capture.

    Parameters
    ----------
    tensors : StepTensors
    sizes : StepSizes
    sm_scale : float
        Factor of the scores.
    draft_logits : tensor of float32 or bfloat16, shape (B, depth, vocabulary), optional
        The step then begins with the top-k over them, and writes `logprobs` and `token_ids`.
    before_layer : callable, optional
        Called with a layer's number in front of its attention: what makes its `q` and writes the
        drafts' rows into its pool.
    before_argmax : callable, optional
        What makes `logits`.
    commit : {"rows", "table"}, optional
        Accepted nodes then come to the front of each request's window: their rows in all pools, or
        their slots in `req_to_token` and `out_cache_loc`. `seq_lens` are left alone.
    after : sequence of (str, callable)
        Further stages behind these.
    num_ctas : int, optional
        Blocks that attend; one a multiprocessor if absent.
    partial : {"fp16", "bf16"}, optional
        The type of the attention's partials.

    Attributes
    ----------
    trees : TreeBuffers
    plan : VerifyPlan
    accepted : AcceptBuffers
    commit : CommitPlan or None
    stages : list of (str, callable)
        What a call runs, by name.

    Raises
    ------
    ArgumentError
        Naming what does not fit.

    Examples
    --------
    >>> step = VerifyStep(tensors, sizes, sm_scale=0.1)                 # doctest: +SKIP
    >>> with torch.cuda.graph(graph): step()                            # doctest: +SKIP
    """

    def __init__(
        self,
        tensors: StepTensors,
        sizes: StepSizes,
        *,
        sm_scale: float,
        draft_logits: Any = None,
        before_layer: Callable[[int], None] | None = None,
        before_argmax: Call | None = None,
        commit: Way | None = None,
        after: Sequence[tuple[str, Call]] = (),
        num_ctas: int | None = None,
        partial: PartialType | None = None,
    ) -> None:
        self.tensors, self.sizes = tensors, sizes
        self.trees = TreeBuffers.allocate(
            tensors.seq_lens, batch=sizes.requests, num_tokens=sizes.nodes
        )
        build = TreeBuild(
            tensors.logprobs, tensors.token_ids, tensors.root_tokens, tensors.seq_lens, self.trees
        )
        self.plan = VerifyPlan(
            tensors.seq_lens,
            tensors.qo_indptr,
            heads=sizes.heads,
            max_tokens=sizes.tokens,
            max_tree_tokens=sizes.nodes,
            workspace=PlanWorkspace.allocate(
                tensors.seq_lens,
                max_batch=sizes.requests,
                max_tokens=sizes.tokens,
                heads=sizes.heads,
                num_ctas=num_ctas,
            ),
            kv_indices=tensors.kv_indices,
            req_to_token=tensors.req_to_token,
            req_pool_indices=tensors.req_pool_indices,
        )
        self.workspace = AttentionWorkspace.allocate(
            tensors.out, plan=self.plan, latent=sizes.latent
        )
        self.accepted = AcceptBuffers.allocate(
            tensors.target,
            batch=sizes.requests,
            num_tokens=sizes.nodes,
            max_path=sizes.max_path,
        )
        self.stages: list[tuple[str, Call]] = []
        if draft_logits is not None:
            topk = DraftTopk(draft_logits, tensors.logprobs, tensors.token_ids)
            self.stages.append(("draft top-k", topk))
        self.starts: VerifyStarts | None = None
        variant = choose_variant(
            capability(tensor_of("kv", tensors.kv).device),
            latent=sizes.latent,
            rope=sizes.rope,
            sm_scale=sm_scale,
        )
        if VARIANTS[variant].starts:
            self.starts = VerifyStarts(self.plan, out_cache_loc=tensors.out_cache_loc)
        self.stages += [("tree build", build), ("plan", self.make_plan)]
        for layer in range(sizes.layers):
            attend = VerifyAttention(
                tensors.q[layer],
                tensors.kv[layer],
                tensors.out[layer],
                tensors.lse[layer],
                plan=self.plan,
                visible=self.trees.visible,
                sm_scale=sm_scale,
                out_cache_loc=tensors.out_cache_loc,
                starts=self.starts,
                workspace=self.workspace,
                partial=partial,
            )
            if before_layer is not None:
                self.stages.append(("model", _called(before_layer, layer)))
            self.stages.append(("attention", attend))
        if before_argmax is not None:
            self.stages.append(("model", before_argmax))
        argmax = Argmax(tensors.logits, tensors.target)
        accept = AcceptGreedy(
            self.trees.tokens,
            self.trees.next_token,
            self.trees.next_sibling,
            tensors.target,
            self.accepted,
        )
        self.stages += [("argmax", argmax), ("accept", accept)]
        self.commit: CommitPlan | None = None
        if commit is not None:
            if commit not in get_args(Way):
                raise ArgumentError("commit", commit, f"wants one of {', '.join(get_args(Way))}")
            self.commit = CommitPlan(
                self.accepted.accept_index,
                self.accepted.accept_token_num,
                tensors.qo_indptr,
                tensors.out_cache_loc,
                tensors.seq_lens,
                tensors.req_pool_indices,
                tensors.req_to_token,
                pools=[tensors.kv[i] for i in range(sizes.layers)] if commit == "rows" else None,
            )
            self.stages.append(("commit", self.commit))
        self.stages += after

    def __call__(self) -> None:
        """Launch the step on torch's current stream."""
        for name, call in self.stages:
            with stage(name):
                call()

    def make_plan(self) -> None:
        """Do what all layers share: plan, gather the index list, lay out what blocks read first."""
        self.plan()
        if self.starts is not None:
            self.starts()

    def read_status(self) -> None:
        """Raise if a stage of the last call met malformed input. Waits for the device.

        Requests of row 0 are padding: whatever they drafted is right.

        Raises
        ------
        ArgumentError
            Naming the stage's tensor, the request and the value.
        """
        padded = set(np.flatnonzero(read(self.tensors.req_pool_indices) == 0).tolist())
        self.trees.read_status(padded=padded)
        self.plan.read_status()
        self.accepted.read_status(padded=padded)
        if self.commit is not None:
            self.commit.read_status()


def _called(call: Callable[[int], None], layer: int) -> Call:
    return lambda: call(layer)
