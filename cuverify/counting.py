"""The engine behind `cuverify count`: what a case's kernels ask of memory, line by line."""

from __future__ import annotations

from cuverify import cases as registry
from cuverify.errors import ArgumentError
from cuverify.host.options import counted
from cuverify.report import Coverage, Report


def count_case(
    reference: str, *, seed: int = 0, examples: int | None = None, most: int | None = None
) -> Report:
    """Run a case's batches once on the host lane, and count their kernels' memory requests.

    Parameters
    ----------
    reference : str
        As `cuverify.cases.load` takes it.
    seed : int
        Draws the batches.
    examples : int, optional
        Batches to draw; the case's own number by default.
    most : int, optional
        Lines of a kernel at most, those that waste most; all by default.

    Returns
    -------
    Report
        A table for each kernel; no findings: what is wasteful is the reader's to judge.

    Raises
    ------
    CaseError
        The reference names no case.
    CheckerError
        A launch had faults: `cuverify check` says more.
    ToolchainError
        There is no C++ compiler.
    """
    if most is not None and most < 1:
        raise ArgumentError("most", most, "wants at least 1 line")
    case = registry.load(reference)
    batches = registry.draw(case.batches, seed=seed, examples=examples)
    with counted() as counts:
        for _, batch in batches:
            step = case.step(batch, "numpy")
            step.refill(batch)
            step()
    done = f"{len(batches)} batches, {counts.launches} launches"
    return Report(
        f"memory requests of {case.name}",
        tables=counts.tables(most),
        coverage=[Coverage("host lane", "inspected", done)],
    )
