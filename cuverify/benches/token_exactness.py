"""Whether attention leaves greedy tokens alone: ours, SGLang's Triton kernel, and float64.

The attention's outputs of 10,240 tree tokens go through a fixed random output head of 32,768
tokens, in float64, so that nothing but attention differs. A token may differ from the right one
only where the two best logits are closer than an allowed error can move them. The counts stand in
the record; its time is that of the attention over all those tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from cuverify.bench import Record, gated, time_copies
from cuverify.tokens import agreement, gap_bounds
from cuverify.verify_shapes import LATENT, Shape

if TYPE_CHECKING:
    from cuverify.verify_problem import Problem

OP = "token_exactness"
SHAPE = Shape((3072,) * 160, 64)
VOCABULARY = 32_768
_SEED = 20
_REPEATS = 5
_ROWS_AT_ONCE = 2048  # of logits, in float64


def run(
    device: str, *, peers: Sequence[str] = (), peers_dir: str | None = None
) -> list[dict[str, Any]]:
    """Compare tokens on a GPU; nothing on a CPU.

    Parameters
    ----------
    device : str
    peers, peers_dir
        As for `cuverify.benches.verify_attention.run`; SGLang's kernel alone when `peers` is empty.
    """
    if device != "cuda":
        return []
    from cuverify import peers as others
    from cuverify.own_attention import OwnAttention
    from cuverify.peers.sglang_triton import NAMES
    from cuverify.verify_problem import Problem, new_pool

    problem = Problem(SHAPE, new_pool(), copies=1)
    head = Head.random(SHAPE.heads * LATENT, problem.pool.device)
    right = head.best_two(problem.expected)
    bounds = gap_bounds(allowed_errors(problem), head.deviation)
    own = OwnAttention.of(problem)
    judge = _Judge(head, right, bounds)
    records = [judge.record(None, own.layers[0], own.out)]
    wanted = [] if list(peers) == ["none"] else list(peers) or list(NAMES)
    found, missing = others.find(wanted, others.folder_of(peers_dir)) if wanted else ([], [])
    for peer in found:
        prepared = peer.prepare(problem)
        records.append(judge.record(peer.name, prepared.steps[0], prepared.out))
    records += [
        Record(OP, {}, peer=peer.name, error=f"not here: {peer.reason}").to_json()
        for peer in missing
    ]
    return records


class _Judge:
    """Compares tokens with the right ones, and those of peers with ours, which come first."""

    def __init__(self, head: Head, right: tuple[Any, Any], bounds: Any) -> None:
        self.head, self.bounds = head, bounds
        self.right, self.gaps = right
        self.ours: Any = None

    def record(self, peer: str | None, step: Callable[[], None], out: Any) -> dict[str, Any]:
        """Return the record of one attention, whose step writes `out`."""
        found: dict[str, int] = {}

        def check() -> str | None:
            out.fill_(float("nan"))
            step()
            tokens, _ = self.head.best_two(out)
            counts = agreement(tokens, self.right, self.gaps, self.bounds)
            found.update(vars(counts))
            if self.ours is None:
                self.ours = tokens
            else:
                found["as ours"] = int((tokens == self.ours).sum())
            return str(counts) if counts.wrong else None

        record = gated(
            OP,
            {"name": SHAPE.name, "vocabulary": VOCABULARY},
            check=check,
            timing=lambda: time_copies([step], _REPEATS, warmups=1),
            peer=peer,
        )
        record["shape"].update({f"tokens {name}": count for name, count in found.items()})
        return record


def allowed_errors(problem: Problem) -> Any:
    """Return how long the error of each token's outputs may be: float64, shape (N,)."""
    rms = problem.bounds.out_rms
    return (LATENT * rms.square().sum(dim=1)).sqrt().cpu().numpy()


class Head:
    """A fixed output head: normal numbers.

    Parameters
    ----------
    weights : tensor of float64, shape (tokens, columns)

    Attributes
    ----------
    deviation : float
        Standard deviation of the weights.
    """

    def __init__(self, weights: Any) -> None:
        self.weights = weights
        self.deviation = float(weights.std())

    @classmethod
    def random(cls, columns: int, device: Any, tokens: int = VOCABULARY) -> Head:
        """Return the head that every run gets."""
        import torch

        generator = torch.Generator(device=device).manual_seed(_SEED)
        weights = torch.randn(
            (tokens, columns), generator=generator, device=device, dtype=torch.float64
        )
        return cls(weights * columns**-0.5)

    def best_two(self, out: Any) -> tuple[Any, Any]:
        """Return the greedy token of each output row and the gap to the next: numpy, shape (N,).

        Parameters
        ----------
        out : tensor, shape (N, H, latent)
        """
        import numpy as np

        tokens, gaps = [], []
        for rows in out.reshape(len(out), -1).split(_ROWS_AT_ONCE):
            best = (rows.double() @ self.weights.T).topk(2, dim=1)
            tokens.append(best.indices[:, 0].cpu().numpy())
            gaps.append((best.values[:, 0] - best.values[:, 1]).cpu().numpy())
        return np.concatenate(tokens), np.concatenate(gaps)
