"""Log-softmax and top-k of a drafter's logits, in the graph: torch's own operators.

Whether a kernel of our own pays is a question for `cuverify bench step`, which times this stage
beside the others.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from cuverify.buffers import tensor_of, wrong
from cuverify.errors import ArgumentError


class DraftTopk:
    """The k likeliest tokens of each depth and their log-probabilities.

    Make it before a capture. What torch allocates inside of one comes from the graph's own pool.

    Parameters
    ----------
    logits : tensor of float32 or bfloat16, shape (B, depth, vocabulary)
        Of the drafter. Read only. A row with a NaN, or of -inf only, has NaN log-probabilities,
        which `TreeBuild` flags.
    logprobs : tensor of float32, shape (B, depth, k)
        Written, descending; sums are taken in float32.
    token_ids : tensor of int64, shape (B, depth, k)
        Written; the order of equal logits is torch's.

    Raises
    ------
    ArgumentError
        Naming the argument.
    """

    def __init__(self, logits: Any, logprobs: Any, token_ids: Any) -> None:
        given = tensor_of("logits", logits)
        if len(given.shape) != 3 or 0 in given.shape:
            raise wrong(given, "wants [batch, depth, vocabulary]")
        if given.dtype not in ("float32", "bfloat16", "uint16"):
            raise wrong(given, f"dtype {given.dtype}: logits are float32 or bfloat16")
        values, ids = tensor_of("logprobs", logprobs), tensor_of("token_ids", token_ids)
        for tensor, dtype in ((values, "float32"), (ids, "int64")):
            if len(tensor.shape) != 3 or tensor.shape[:2] != given.shape[:2]:
                raise wrong(tensor, f"wants [{given.shape[0]}, {given.shape[1]}, k]")
            if tensor.dtype != dtype:
                raise wrong(tensor, f"dtype {tensor.dtype}: wants {dtype}")
        if values.shape != ids.shape or not 1 <= ids.shape[2] <= given.shape[2]:
            raise ArgumentError(
                "token_ids", list(ids.shape), f"k is that of logprobs, 1 to {given.shape[2]}"
            )
        self._k = ids.shape[2]
        self._logits, self._logprobs, self._ids = map(_torch, (logits, logprobs, token_ids))

    def __call__(self) -> None:
        """Work on torch's current stream."""
        import torch

        best, ids = torch.topk(self._logits, self._k, dim=2, sorted=True)
        norm = torch.logsumexp(self._logits.float(), dim=2, keepdim=True)
        torch.sub(best.float(), norm, out=self._logprobs)
        self._ids.copy_(ids)


def _torch(tensor: Any) -> Any:
    """Return a torch view of a tensor; numpy's uint16 are bits of bf16."""
    import torch

    if not isinstance(tensor, np.ndarray):
        return tensor
    if tensor.dtype == np.uint16:
        return torch.from_numpy(tensor.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(tensor)
