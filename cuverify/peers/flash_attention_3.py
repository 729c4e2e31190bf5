"""FlashAttention 3 as SGLang composes it for a tree, and the strongest composition of it.

The library is the one inside vLLM's wheel: two calls over the same paged pool (page size 1), one
for the prefix with all tokens of a request, one for the drafts with each token as a request, and a
merge. SGLang's sequence makes the plan inside both calls, transposes both log-sum-exps and merges
by its own Triton kernel. The strongest composition has the best number of splits for the shape, a
plan made before, the drafts on a forked branch beside the prefix, and one merge kernel.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from cuverify.errors import PeerError
from cuverify.peers import Peer, Prepared
from cuverify.peers.cascade import forked, prefix_tables, tail_tables
from cuverify.peers.laid_out import require_hopper, sglang_module, unpacked
from cuverify.verify_shapes import LATENT, Shape

if TYPE_CHECKING:
    from cuverify.gqa_problem import GqaProblem
    from cuverify.verify_problem import Problem

NAMES = ("FA3, SGLang's sequence", "FA3, strongest composition")
LIBRARY = "_vllm_fa3_C.abi3.so"

_MERGE = "sglang.kernels.ops.attention.merge_state"
_SPLITS = (0, 2, 4, 8, 16, 32, 64, 128)  # 0: its own choice
_ROWS_A_SPLIT = 64  # at least
_PARTIALS = 1 << 30  # bytes of float32 partials, at most
_QUICK = 5  # repeats while numbers of splits are tried


def load(folder: Path | None) -> list[Peer]:
    """Return both compositions, or the one that can be made here."""
    calls = library(folder)

    def composed(problem: Problem) -> Prepared:
        return strongest(problem, Tensors.latent(problem), calls)

    peers = [Peer(NAMES[1], composed, ragged=True)]
    try:
        merge = sglang_module(_MERGE, folder).merge_state_triton
    except PeerError:
        return peers
    return [Peer(NAMES[0], lambda problem: _sequence(problem, calls, merge), ragged=True), *peers]


@functools.cache
def library(folder: Path | None) -> Any:
    """Return the library's calls.

    Raises
    ------
    PeerError
        It is not there, does not load, or the GPU is none of Hopper's.
    """
    import torch

    require_hopper()
    place = unpacked(folder, LIBRARY)
    try:
        torch.ops.load_library(str(place))  # type: ignore[no-untyped-call]
        calls = torch.ops._vllm_fa3_C
        _ = calls.fwd, calls.get_scheduler_metadata
    except (OSError, AttributeError, RuntimeError) as error:
        raise PeerError(f"{LIBRARY} does not load: {error}") from error
    return calls


@dataclass(frozen=True, eq=False)
class Tensors:
    """What the library is given of a problem.

    Attributes
    ----------
    q : tensor, shape (N, H, columns of a key)
    q_values : tensor, shape (N, H, columns of a value), or None
        What meets the values, where they are columns of the keys.
    keys, values : tensor, shape (slots, 1, KV heads, columns)
        Pages of one token.
    """

    q: Any
    q_values: Any
    keys: Any
    values: Any

    @classmethod
    def latent(cls, problem: Problem) -> Tensors:
        """Return those of latent rows."""
        paged, q = problem.pool[:, None, None, :], problem.q
        return cls(q[..., LATENT:], q[..., :LATENT], paged[..., LATENT:], paged[..., :LATENT])


class Calls:
    """Both calls for one problem."""

    def __init__(self, problem: Problem | GqaProblem, tensors: Tensors, calls: Any) -> None:
        import torch

        shape, device = problem.shape, problem.q.device
        self.problem, self.shape, self.calls = problem, shape, calls
        self.tensors = tensors
        self.tables = prefix_tables(problem)
        self.tails, self.seen = tail_tables(problem)
        bounds = np.arange(shape.tokens + 1, dtype=np.int32)
        self.single = torch.from_numpy(bounds).to(device)
        self.prefix_out, self.tail_out = problem.new_output(), problem.new_output()

    def prefix(self, copy: int, plan: Any = None, splits: int = 0) -> tuple[Any, Any]:
        """Attend to a prefix: output [N, H, 512] and log-sum-exp [H, N]."""
        problem = self.problem
        return self.call(
            self.prefix_out, problem.qo_indptr, problem.seq_lens, self.shape.tree,
            self.tables[copy], plan, splits,
        )  # fmt: skip

    def tail(self, copy: int, plan: Any = None) -> tuple[Any, Any]:
        """Attend to the drafts that each token sees."""
        return self.call(self.tail_out, self.single, self.seen, 1, self.tails[copy], plan, 0)

    def prefix_plan(self, splits: int) -> Any:
        """Return the scheduler's metadata for `prefix`."""
        shape, problem = self.shape, self.problem
        return self.plan(
            shape.batch, shape.tree, max(shape.prefixes), problem.seq_lens, problem.qo_indptr,
            splits,
        )  # fmt: skip

    def tail_plan(self) -> Any:
        """Return the scheduler's metadata for `tail`."""
        return self.plan(self.shape.tokens, 1, self.shape.tree, self.seen, self.single, 0)

    def call(
        self,
        out: Any,
        query_bounds: Any,
        used: Any,
        most_queries: int,
        table: Any,
        plan: Any,
        splits: int,
    ) -> tuple[Any, Any]:
        """Attend to what a table of slots holds: output [N, H, columns], log-sum-exp [H, N]."""
        nothing, given = None, self.tensors
        result = self.calls.fwd(
            given.q, given.keys, given.values,
            nothing, nothing,  # new keys and values
            given.q_values, out, query_bounds,
            nothing, nothing, nothing,  # bounds of keys, bounds of new keys, used queries
            used, most_queries, table.shape[1], table,
            nothing, nothing,  # batch index, left padding
            nothing, nothing, nothing,  # rotary tables
            nothing, nothing, nothing,  # scales
            self.problem.sm_scale,
            False, -1, -1, 0.0,  # causal, window, soft cap
            True,  # interleaved rotary
            plan, splits,
            nothing, 0,  # packed groups by its own choice, no multiprocessor left out
            nothing, 1, 0, nothing,  # sinks, context parallelism
        )  # fmt: skip
        return result[0], result[1]

    def plan(
        self,
        batch: int,
        most_queries: int,
        most_keys: int,
        used: Any,
        query_bounds: Any,
        splits: int,
    ) -> Any:
        """Return the scheduler's metadata for a call."""
        import torch

        given = self.tensors
        return self.calls.get_scheduler_metadata(
            batch, most_queries, most_keys, self.shape.heads, given.keys.shape[2],
            given.keys.shape[3], given.values.shape[3], torch.bfloat16,
            used, query_bounds, None, None, None, None, 1, 0, False, -1, -1, False, splits, None, 0,
        )  # fmt: skip


def _sequence(problem: Problem, calls: Any, merge: Any) -> Prepared:
    both, out = Calls(problem, Tensors.latent(problem), calls), problem.new_output()

    def step(copy: int) -> None:
        first, second = both.prefix(copy), both.tail(copy)
        merge(first[0], first[1].T.contiguous(), second[0], second[1].T.contiguous(), out)

    return Prepared([functools.partial(step, copy) for copy in range(problem.copies)], out)


def strongest(problem: Problem | GqaProblem, tensors: Tensors, calls: Any) -> Prepared:
    """Return the composition with the best number of splits."""
    import torch

    from cuverify.peers.merging import merge

    both, out = Calls(problem, tensors, calls), problem.new_output()
    tail_plan = both.tail_plan()
    branch = torch.cuda.Stream()  # type: ignore[no-untyped-call]

    def composition(splits: int) -> Sequence[Callable[[], None]]:
        plan = both.prefix_plan(splits)

        def step(copy: int) -> None:
            first, second = forked(
                lambda: both.prefix(copy, plan, splits), lambda: both.tail(copy, tail_plan), branch
            )
            merge(out, first, second, heads_first=True, base_2=False)

        return [functools.partial(step, copy) for copy in range(problem.copies)]

    return fastest(composition, problem.shape, out)


def fastest(
    composition: Callable[[int], Sequence[Callable[[], None]]], shape: Shape, out: Any
) -> Prepared:
    """Return the steps of the number of splits that takes the least time."""
    from cuverify.bench import time_copies

    tried = [splits for splits in _SPLITS if splits_fit(shape, splits, out.shape[-1])]
    times = {splits: time_copies(composition(splits), _QUICK, warmups=1).us for splits in tried}
    best = min(times, key=lambda splits: times[splits])
    return Prepared(composition(best), out, {"splits": best})


def splits_fit(shape: Shape, splits: int, columns: int = LATENT) -> bool:
    """Whether a number of splits is worth trying: no tiny split, no mountain of partials."""
    if splits <= 1:
        return True
    partials = 4 * splits * shape.tokens * shape.heads * columns
    return splits * _ROWS_A_SPLIT <= max(shape.prefixes) and partials <= _PARTIALS
