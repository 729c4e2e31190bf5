"""CV2xx: operations that a capture forbids or does not survive."""

from __future__ import annotations

from collections.abc import Iterator

from cuverify.validators.observations import CaptureSeen
from cuverify.validators.rule import Rule, Verdict


def _capture_failed(seen: CaptureSeen) -> Iterator[Verdict]:
    for fault in seen.faults:
        if fault.stage == "capture" and not fault.context_lost:
            yield Verdict(
                f"the capture failed: {fault.error}",
                where=fault.where,
                evidence={"error": fault.error, "inputs": fault.label},
            )


RULES = (
    Rule(
        "CV201",
        "the capture failed",
        "A capture refuses whatever needs an answer now: reading a value back, waiting for the "
        "device, allocating outside torch's allocator, copying from pageable memory. CUDA names "
        "neither the call nor the line; the error shows at the end of the capture.",
        "Look for .item(), bool() or .cpu() of a CUDA tensor, torch.cuda.synchronize(), first-time "
        "compilation and allocations inside the step; move them before the capture.",
        _capture_failed,
    ),
)
