"""Drawn decode steps with buffers of their own, and what the oracles make of them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cuverify.draft_batch import DraftBatch, DraftKind
from cuverify.errors import CaseError
from cuverify.kv_layout import KvLayout
from cuverify.reference import accept as accept_oracle
from cuverify.reference import tree_build as tree_oracle
from cuverify.reference import verify_attention as attention_oracle
from cuverify.static_buffers import fill, static_buffer, write
from cuverify.step import StepSizes, StepTensors, VerifyStep
from cuverify.tolerances import attention_bounds
from cuverify.tree import DraftTree
from cuverify.verify_batch import SM_SCALE, VerifyBatch

if TYPE_CHECKING:
    from cuverify.cases import Target
    from cuverify.validators.compare import Bounded

_POISON = 0x5A
_NO_SLOT = -1
_TREE_OUTPUTS = (
    "tokens", "parents", "positions", "next_token", "next_sibling", "visible", "sizes", "status",
)  # fmt: skip


@dataclass(frozen=True, eq=False)
class StepBatch:
    """The inputs of one step: drafts, layout, one `VerifyBatch` a layer, the target's logits."""

    drafts: DraftBatch
    layers: tuple[VerifyBatch, ...]
    logits: NDArray[np.uint16]

    @classmethod
    def draw(
        cls,
        rng: np.random.Generator,
        sizes: StepSizes,
        *,
        longest: int,
        padded: int = 0,
        kind: DraftKind = "free",
    ) -> StepBatch:
        """Draw a step whose last `padded` requests are padding.

        Parameters
        ----------
        rng : numpy.random.Generator
        sizes : StepSizes
            With room for prefixes of `longest` tokens.
        longest : int
            Of each prefix.
        padded : int
            Less than all requests. Their drafts are of kind ``spoiled``.
        kind : str
            Of the real requests' drafts; see `DraftBatch.draw`.
        """
        n, real = sizes.nodes, sizes.requests - padded
        drawn: dict[str, Any] = {
            "depth": sizes.depth, "k": sizes.ranks, "num_tokens": n, "longest": longest
        }  # fmt: skip
        drafts = DraftBatch.draw(rng, batch=sizes.requests, kind=kind, **drawn)
        garbage = DraftBatch.draw(rng, batch=sizes.requests, kind="spoiled", **drawn)
        drafts.logprobs[real:] = garbage.logprobs[real:]
        lens = rng.integers(0, longest + 1, real)
        layout = KvLayout.build(
            seq_lens=lens, tree_tokens=np.full(sizes.requests, n), num_slots=sizes.slots,
            placement="scattered", padded=padded, rng=rng,
        )  # fmt: skip
        drafts = DraftBatch(
            drafts.logprobs, drafts.token_ids % sizes.vocabulary,
            drafts.root_tokens % sizes.vocabulary, layout.seq_lens, n, kind=kind,
        )  # fmt: skip
        grown = tree_oracle.tree_build(
            drafts.logprobs, drafts.token_ids, drafts.root_tokens, drafts.seq_lens,
            num_tokens=n, words=-(-n // 64),
        )  # fmt: skip
        # nodes of no path see what children of the root see
        used = np.arange(n) < grown["sizes"][:, None]
        parents = np.where(used, grown["parents"], 0)
        trees = tuple(DraftTree.from_parents(row) for row in parents)
        layers = tuple(
            VerifyBatch(
                layout, trees, heads=sizes.heads, latent=sizes.latent, rope=sizes.rope,
                seed=int(rng.integers(2**31)),
            )
            for _ in range(sizes.layers)
        )  # fmt: skip
        logits = rng.normal(0, 1, (sizes.tokens, sizes.vocabulary)).astype(np.float32)
        for request in range(sizes.requests):
            for node in range(1, int(grown["sizes"][request])):
                row = request * n + parents[request, node]
                if rng.random() < 0.6:  # the target likes many of the drafts
                    logits[row, grown["tokens"][request, node]] += rng.choice([4.0, 8.0])
        bits = (logits.view(np.uint32) >> np.uint32(16)).astype(np.uint16)
        return cls(drafts, layers, bits)

    @cached_property
    def expected(self) -> dict[str, Any]:
        """What the oracles say: views of the trees, attention in float64, and its arguments."""
        drafts = self.drafts
        trees = tree_oracle.tree_build(
            drafts.logprobs, drafts.token_ids, drafts.root_tokens, drafts.seq_lens,
            num_tokens=drafts.num_tokens, words=-(-drafts.num_tokens // 64),
        )  # fmt: skip
        arguments = [
            {**layer.oracle_arguments(), "visible": trees["visible"]} for layer in self.layers
        ]
        attention = [attention_oracle.verify_attention(**layer) for layer in arguments]
        return {"trees": trees, "attention": attention, "arguments": arguments}

    def __repr__(self) -> str:
        return f"StepBatch({self.drafts!r}, {self.layers[0]!r})"


class DrawnVerifyStep:
    """A `VerifyStep` on drawn inputs, on the host lane or on the current CUDA device.

    Parameters
    ----------
    batch : StepBatch or None
        None leaves the buffers zeroed, for the caller to fill.
    sizes : StepSizes
    xp : {"numpy", "torch-cuda"}
        Where the buffers are.
    num_ctas : int, optional
        Blocks that attend.
    """

    def __init__(
        self,
        batch: StepBatch | None,
        sizes: StepSizes,
        xp: Target,
        *,
        num_ctas: int | None = None,
    ) -> None:
        self.sizes, self.xp = sizes, xp
        self.tensors = StepTensors.allocate(static_buffer(xp, (1,), "int64"), sizes)
        self.step = VerifyStep(self.tensors, sizes, sm_scale=SM_SCALE, num_ctas=num_ctas)
        if batch is not None:
            self.refill(batch)

    @property
    def outputs(self) -> Mapping[str, Any]:
        """Views of the trees, attention of all layers, the target's choices, what is accepted."""
        trees, tensors = self.step.trees, self.tensors
        return {
            **{name: getattr(trees, name) for name in _TREE_OUTPUTS},
            **{f"out of layer {i}": tensors.out[i] for i in range(self.sizes.layers)},
            **{f"lse of layer {i}": tensors.lse[i] for i in range(self.sizes.layers)},
            "target": tensors.target,
            **{
                f"accepted {name}": getattr(self.step.accepted, name)
                for name in ("predicts", "accept_index", "accept_token_num", "status")
            },
        }

    def refill(self, batch: StepBatch) -> None:
        """Write another step of the same sizes."""
        drafts, layout, tensors = batch.drafts, batch.layers[0].layout, self.tensors
        rows, width = layout.req_to_token.shape
        fits = (
            drafts.logprobs.shape == tuple(tensors.logprobs.shape)
            and len(batch.layers) == self.sizes.layers
            and rows <= self.sizes.table[0]
            and width <= self.sizes.table[1]
            and int(layout.seq_lens.sum()) <= self.sizes.listed
        )
        if not fits:
            raise CaseError(f"{batch} does not fit a step of {self.sizes}")
        self._batch = batch
        for name in ("logprobs", "token_ids", "root_tokens", "seq_lens"):
            write(getattr(tensors, name), getattr(drafts, name))
        write(tensors.req_pool_indices, layout.req_pool_indices)
        fill(tensors.req_to_token, _NO_SLOT)
        write(tensors.req_to_token, layout.req_to_token)
        write(tensors.out_cache_loc, layout.out_cache_loc)
        fill(tensors.kv_indices, _NO_SLOT)
        for number, layer in enumerate(batch.layers):
            write(tensors.q[number], layer.q())
            write(tensors.kv[number], layer.pool())
        write(tensors.logits, batch.logits)

    def __call__(self) -> None:
        """Run the step."""
        self.step()

    def poison(self) -> None:
        """Fill all outputs and the attention's scratch."""
        scratch = self.step.workspace
        for name, buffer in self.outputs.items():
            is_float = name.startswith(("out of", "lse of"))
            fill(buffer, float("nan") if is_float else _POISON)
        for buffer in (scratch.partial_out, scratch.partial_lse):
            fill(buffer, float("nan"))

    def expected(self) -> dict[str, NDArray[Any] | Bounded]:
        """Return the oracles' outputs for the present step."""
        from cuverify import torch_oracle

        batch, right = self._batch, self._batch.expected
        trees = right["trees"]
        found: dict[str, Any] = {name: trees[name] for name in _TREE_OUTPUTS}
        for number, exact in enumerate(right["attention"]):
            # without a baseline the bounds are tighter than the published ones
            baseline = None
            if self.xp != "numpy":
                baseline = torch_oracle.baseline_attention(
                    **right["arguments"][number], device="cuda"
                )
            bounds = attention_bounds(exact, baseline)
            found[f"out of layer {number}"] = bounds["out"]
            found[f"lse of layer {number}"] = bounds["lse"]
        target = accept_oracle.argmax(batch.logits)
        accepted = accept_oracle.accept_greedy(
            trees["tokens"], trees["next_token"], trees["next_sibling"], target,
            max_path=self.sizes.max_path,
        )  # fmt: skip
        return {
            **found,
            "target": target,
            **{f"accepted {name}": values for name, values in accepted.items()},
        }


def small_sizes(*, requests: int = 3, nodes: int = 9, layers: int = 2) -> StepSizes:
    """Return sizes that the host lane runs in a moment."""
    return StepSizes(
        requests=requests, nodes=nodes, depth=4, ranks=5, layers=layers, heads=8, latent=64,
        rope=16, slots=512, table=(requests + 4, 140), listed=requests * 100, vocabulary=200,
        max_path=5,
    )  # fmt: skip
