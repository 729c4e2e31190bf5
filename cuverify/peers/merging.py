"""One kernel that merges two partial attentions: as cheap as a merge after two kernels can be.

In Triton, because it belongs to the peers' compositions; importing this module needs Triton.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]
def _merge(  # type: ignore[no-untyped-def]
    out, first, first_lse, second, second_lse, token_stride, head_stride,
    HEADS: tl.constexpr, COLUMNS: tl.constexpr, BASE_2: tl.constexpr,
):  # fmt: skip
    token, head = tl.program_id(0), tl.program_id(1)
    columns = tl.arange(0, COLUMNS)
    at = (token * HEADS + head) * COLUMNS + columns
    a = tl.load(first_lse + token * token_stride + head * head_stride)
    b = tl.load(second_lse + token * token_stride + head * head_stride)
    top = tl.maximum(a, b)
    wa = tl.exp2(a - top) if BASE_2 else tl.exp(a - top)
    wb = tl.exp2(b - top) if BASE_2 else tl.exp(b - top)
    share = wa / (wa + wb)
    x = tl.load(first + at).to(tl.float32)
    y = tl.load(second + at).to(tl.float32)
    tl.store(out + at, (y + (x - y) * share).to(tl.bfloat16))


def merge(
    out: Any, first: tuple[Any, Any], second: tuple[Any, Any], *, heads_first: bool, base_2: bool
) -> None:
    """Merge two pairs of outputs [N, H, 512] and log-sum-exps; launches on the current stream.

    Parameters
    ----------
    out : tensor of bfloat16, shape (N, H, columns)
        Written.
    first, second : pairs of tensors
        Normalised outputs, and log-sum-exps of shape (H, N) or (N, H), contiguous.
    heads_first : bool
        Whether the log-sum-exps are (H, N).
    base_2 : bool
        Whether they are logarithms to base 2.
    """
    tokens, heads, columns = out.shape
    strides = (1, tokens) if heads_first else (heads, 1)
    _merge[(tokens, heads)](
        out, first[0], first[1], second[0], second[1], *strides, heads, columns, base_2,
        num_warps=2,
    )  # fmt: skip
