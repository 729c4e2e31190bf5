"""How many examples a second hypothesis gets through on the host lane: a verify step, judged.

An example is drawn, written into the step's buffers, planned and attended to, and compared with the
oracle: one request, 8 heads, trees of up to 8 nodes, prefixes of up to 70 rows. In one process, in
the plain build and under the checkers.
"""

from __future__ import annotations

import time
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import cuverify
from cuverify.bench import Timing, gated

EXAMPLES = 200
# blocks as small as the batches: a fuzzing run waits for threads that have nothing to do
SMALL_PLAN = {"PLAN_THREADS": 32}
SMALL_COMBINE = {"COMBINE_THREADS": 64}
TREE_TOKENS = 8
PREFIX = 70
# examples a second that are aimed at, by the columns of a row
TARGETS = {(64, 16): {"plain": 200, "checked": 50}, (512, 64): {"plain": 25, "checked": 5}}


def run(device: str) -> list[dict[str, Any]]:
    """Time examples on the host lane, whatever `device` is."""
    return [
        _record(width, build, target)
        for width, targets in TARGETS.items()
        for build, target in targets.items()
    ]


def _record(width: tuple[int, int], build: str, target: int) -> dict[str, Any]:
    judged = _Judge(width, build)

    def check() -> str | None:
        return judged.run(EXAMPLES // 10)

    def timing() -> Timing:
        started = time.perf_counter()
        wrong = judged.run(EXAMPLES)
        if wrong is not None:
            raise AssertionError(wrong)
        return Timing.of([1e6 * (time.perf_counter() - started) / EXAMPLES])

    shape: dict[str, int | float | str] = {
        "latent": width[0],
        "rope": width[1],
        "build": build,
        "examples": EXAMPLES,
        "target_us": round(1e6 / target),
    }
    return gated("host_examples", shape, check=check, timing=timing)


class _Judge:
    """A step that is kept, and what it got wrong first."""

    def __init__(self, width: tuple[int, int], build: str) -> None:
        from cuverify.strategies import verify_batches

        self.build = build
        self.wrong: str | None = None
        self.step: Any = None
        self.strategy = verify_batches(
            max_requests=1,
            max_seq_len=PREFIX,
            max_tree_tokens=TREE_TOKENS,
            max_padded=0,
            heads=(8,),
            widths=(width,),
            draft_sources=("slots",),
            index_dtypes=("int32",),
            row_gaps=(0,),
        )

    def run(self, number: int) -> str | None:
        """Judge so many examples; return the first mismatch."""
        from cuverify.strategies import drawn

        drawn(self.strategy.map(self._judge), number)
        return self.wrong

    def _judge(self, batch: Any) -> None:
        from cuverify.cases.verify_attention import SizedBatch, VerifyAttentionStep, kernel_inputs
        from cuverify.listed_step import Capacity
        from cuverify.reference.verify_attention import verify_attention
        from cuverify.tolerances import attention_bounds
        from cuverify.validators.compare import compare_all, host_array

        rows = PREFIX + TREE_TOKENS
        # a pool is drawn up to twice as large as it must be, a table up to two rows and 16 wider
        size = Capacity(1, TREE_TOKENS, 2 * (rows + 1), PREFIX, 1, TREE_TOKENS, (4, rows + 16))
        sized = SizedBatch(batch, size)
        if self.step is None:
            self.step = VerifyAttentionStep(
                sized, "numpy", num_ctas=2, plan_values=SMALL_PLAN, values=SMALL_COMBINE
            )
        self.step.refill(sized)
        self.step.poison()
        with self._lane():
            self.step()
        tokens = batch.num_tokens
        found = {
            "out": host_array(self.step.out[:tokens]),
            "lse": host_array(self.step.lse[:tokens]),
        }
        # without the baseline's error the bounds are tighter: who keeps them is right
        arguments = kernel_inputs(batch, 1)
        exact = verify_attention(**arguments)
        wrong = compare_all(found, attention_bounds(exact))
        if wrong:
            from cuverify.torch_oracle import baseline_attention

            bounds = attention_bounds(exact, baseline_attention(**arguments, device="cpu"))
            wrong = compare_all(found, bounds)
        if wrong and self.wrong is None:
            self.wrong = f"{batch}: {wrong[0]}"

    def _lane(self) -> AbstractContextManager[Any]:
        return nullcontext() if self.build == "plain" else cuverify.checked()
