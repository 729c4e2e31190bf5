"""The static inputs of SGLang's graph runner: what a replay finds in them, padding included.

A graph for B requests is replayed for fewer. The runner writes the real part of each buffer and
treats the rest by a rule of the buffer's own: it is filled, or it stays as earlier batches left it
(stale). Which buffers are stale depends on the release:

| buffer | 0.5.12, only where the batch is smaller | 0.5.23 |
|---|---|---|
| input_ids | stale | stale |
| positions | stale | 0 |
| out_cache_loc | 0: slot 0 | 0 |
| req_pool_indices | stale | 0: row 0 |
| seq_lens, seq_lens_cpu | the backend's fill value | the same |

0.5.12 fills whole buffers, 0.5.23 the part of the graph at hand.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from cuverify.errors import CaseError

if TYPE_CHECKING:
    from cuverify.sglang.contract import Family

STALE = None
"""The rule of a buffer whose rest is left as it is."""

FILL = "fill"
"""The rule of a buffer whose rest takes the backend's fill value."""

PER_TOKEN = ("input_ids", "positions", "out_cache_loc")
PER_REQUEST = ("req_pool_indices", "seq_lens", "seq_lens_cpu")

RULES: dict[Family, dict[str, int | str | None]] = {
    "paired": {
        "input_ids": STALE,
        "positions": STALE,
        "out_cache_loc": 0,
        "req_pool_indices": STALE,
        "seq_lens": FILL,
        "seq_lens_cpu": FILL,
    },
    "split": {
        "input_ids": STALE,
        "positions": 0,
        "out_cache_loc": 0,
        "req_pool_indices": 0,
        "seq_lens": FILL,
        "seq_lens_cpu": FILL,
    },
}
"""What becomes of each buffer behind the real part, by the family of hooks."""


class GraphInputs:
    """The runner's static buffers, one set for all captured sizes.

    Parameters
    ----------
    family : Family
        Whose padding rules hold.
    max_bs : int
        Requests of the largest graph.
    draft_tokens : int
        n.
    device : str
        Of all buffers but `seq_lens_cpu`.
    fill_value : int
        What the backend wants as the length of a padded request.

    Attributes
    ----------
    buffers : mapping of str to tensor of int64
        By SGLang's names; zeros at first, `seq_lens` the fill value.
    """

    def __init__(
        self, family: Family, max_bs: int, draft_tokens: int, device: str, fill_value: int
    ) -> None:
        import torch

        self.family, self.rules = family, RULES[family]
        self.max_bs, self.draft_tokens, self.fill_value = max_bs, draft_tokens, fill_value
        self.buffers: dict[str, Any] = {}
        for name in (*PER_TOKEN, *PER_REQUEST):
            length = max_bs * (draft_tokens if name in PER_TOKEN else 1)
            start = fill_value if self.rules[name] == FILL else 0
            place = "cpu" if name == "seq_lens_cpu" else device
            self.buffers[name] = torch.full((length,), start, dtype=torch.int64, device=place)

    def view(self, name: str, bs: int) -> Any:
        """Return the part of a buffer that a graph for `bs` requests works on."""
        return self.buffers[name][: bs * (self.draft_tokens if name in PER_TOKEN else 1)]

    def write(
        self,
        real: Mapping[str, NDArray[np.int64]],
        bs: int,
        stale: Mapping[str, NDArray[np.int64]] | None = None,
    ) -> None:
        """Write a real batch for a graph of `bs` requests, and pad it.

        Parameters
        ----------
        real : mapping of str to ndarray of int64
            The real part of every buffer.
        bs : int
            Requests of the graph.
        stale : mapping of str to ndarray of int64, optional
            What earlier batches are to have left in the buffers that are not filled: for each of
            them as many numbers as the graph's part of the buffer has. As it is, if absent.

        Raises
        ------
        CaseError
            The batch is larger than the graph, or the graph than the buffers.
        """
        import torch

        raw_bs = len(real["seq_lens"])
        if not raw_bs <= bs <= self.max_bs:
            raise CaseError(
                f"{raw_bs} requests for a graph of {bs} in buffers for {self.max_bs} requests"
            )
        for name, rule in self.rules.items():
            part = self.view(name, bs)
            values = torch.from_numpy(np.array(real[name], np.int64))
            if rule is STALE:
                if stale is not None:
                    part.copy_(torch.from_numpy(np.array(stale[name], np.int64)))
            elif raw_bs != bs:
                filled = self.buffers[name] if self.family == "paired" else part
                filled.fill_(self.fill_value if rule == FILL else int(rule))
            part[: len(values)].copy_(values)
