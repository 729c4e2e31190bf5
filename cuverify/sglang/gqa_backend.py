"""Our grouped-query verify attention as an attention backend of SGLang."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from cuverify.buffers import tensor_of
from cuverify.launching import capability
from cuverify.narrow import Narrow
from cuverify.sglang.backend import VerifyBackend
from cuverify.sglang.contract import Layer, ModelRunner
from cuverify.verify_variants import choose_gqa_variant

if TYPE_CHECKING:
    from cuverify.ops.verify_plan import VerifyPlan


class GqaVerifyBackend(VerifyBackend):
    """Tree verification over keys and values that are apart, as Llama and Qwen models keep them.

    Parameters
    ----------
    model_runner : ModelRunner
        Its pool is a `MhaTokenToKvPool`.
    """

    kv_heads = 2
    kinds: ClassVar[Mapping[str, Narrow]] = {"torch.bfloat16": "bf16"}
    values: ClassVar[Mapping[int, Mapping[str, int]] | None] = None
    """`-D` values by the query rows of a row tile, in place of those that fit the GPU."""

    def choose_text(self, model_runner: ModelRunner, pool: Narrow) -> None:
        """Take the text of the class, or that of the rule."""
        device = tensor_of("req_to_token", self.req_to_token).device
        self.text = self.variant or choose_gqa_variant(capability(device))

    def make_plan(self, seq_lens: Any, qo_indptr: Any, **more: Any) -> VerifyPlan:
        """Return a plan for a batch size; parameters as for `plan_verify_gqa`."""
        from cuverify.ops.verify_gqa import plan_verify_gqa

        return plan_verify_gqa(
            seq_lens,
            qo_indptr,
            group=self.heads // self.kv_heads,
            kv_heads=self.kv_heads,
            variant=self.text,
            **more,
        )

    def make_starts(self, plan: VerifyPlan, workspace: Any = None) -> None:
        """Return nothing: the text does not read starts."""

    def make_workspace(self, like: Any, plan: VerifyPlan) -> Any:
        """Return the attention's workspace for a plan."""
        from cuverify.ops.verify_gqa import GqaWorkspace

        group = self.heads // self.kv_heads
        return GqaWorkspace.allocate(like, plan=plan, group=group, kv_heads=self.kv_heads)

    def attend(self, q: Any, pool: Any, layer: Layer, out: Any, lse: Any, **more: Any) -> None:
        """Attend to a layer's pool; what is not named here is as for `VerifyGqa`."""
        from cuverify.ops.verify_gqa import VerifyGqa, row_tile

        rows = row_tile(self.heads // self.kv_heads, self.draft_tokens, self.text)
        values = None if self.values is None else self.values[rows]
        pools = pool.get_key_buffer(layer.layer_id), pool.get_value_buffer(layer.layer_id)
        more |= {"variant": self.text, "partial": self.partial, "values": values}
        VerifyGqa(q, *pools, out, lse, **more)()
