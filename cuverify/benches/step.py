"""Where the time of a decode step goes: captured beside eager, each stage, each kernel, the gaps.

A step of one request with a tree of 65 nodes, four layers of attention, and the whole vocabulary of
Kimi K2. ``glue`` is what stands around attention and argmax: tree, plan and walk. The baseline is
the same attention with trees, index lists (one a layer) and walk in Python. Lines of kernels and
gaps are from one replay under torch's profiler, whose clock has a microsecond's grain or so; they
are shares, not timings to compare. `cuverify timeline` draws them, and the gaps.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from cuverify.bench import Timing, copy_floor_us, gated, time_calls, time_graph
from cuverify.errors import DeviceError
from cuverify.step import StepSizes
from cuverify.timeline import GAPS, record_timeline

SHAPES = ((1, 4096, 65), (1, 16_384, 17), (16, 4096, 33))
"""Requests, rows of each prefix, nodes of each tree."""

GLUE_TARGET_US = {(1, 65): 36.0}
LAYERS = 4
REPEATS = 30
GROUPS = {
    "attention": ("verify_partials", "verify_combine"),
    "tree build": ("tree_build",),
    "plan": ("verify_plan", "verify_starts"),
    "argmax": ("argmax",),
    "accept": ("accept",),
}
_HOST_REPEATS = 3
_CHECKED_LENGTH = 300  # of prefixes in the gate, which runs on the host's oracles


def run(device: str) -> list[dict[str, Any]]:
    """Time steps on a GPU; nothing on a CPU, where the host lane says nothing about speed."""
    if device != "cuda":
        return []
    records: list[dict[str, Any]] = []
    for shape in SHAPES:
        records.extend(_step(*shape))
    return records


def timelines(folder: Path) -> list[Path]:
    """Draw one step, eager and captured, into a folder; Chrome traces and accounts beside.

    Parameters
    ----------
    folder : pathlib.Path
        That exists.

    Returns
    -------
    list of pathlib.Path

    Raises
    ------
    DeviceError
        There is no CUDA device.
    """
    import torch

    if not torch.cuda.is_available():
        raise DeviceError("a timeline needs a CUDA device, and torch finds none")
    made = []
    step = _Timed(*SHAPES[0])
    for name, call in (("eager", step.eager), ("captured", step.replay)):
        trace = folder / f"step-{name}.json"
        line = record_timeline(call, trace=trace)
        picture = folder / f"step-{name}.svg"
        picture.write_text(line.to_svg(title=f"decode step, {name}"), encoding="utf-8")
        account = folder / f"step-{name}.txt"
        account.write_text(line.to_text(GROUPS) + "\n", encoding="utf-8")
        made += [trace, picture, account]
    return made


class _Timed:
    """A checked step on long prefixes, and its graph."""

    def __init__(self, requests: int, length: int, nodes: int) -> None:
        from cuverify.ops.verify_plan import VerifyPlan
        from cuverify.step_workload import DrawnVerifyStep, StepBatch

        torch: Any = importlib.import_module("torch")

        self.requests, self.length, self.nodes = requests, length, nodes
        slots = requests * (length + nodes) + 1024
        sizes = StepSizes(
            requests=requests, nodes=nodes, depth=15, ranks=16, layers=LAYERS, heads=8,
            slots=slots, table=(requests + 4, length + nodes + 32), listed=requests * length,
            vocabulary=163_840, max_path=16,
        )  # fmt: skip
        # the gate's pools are small; the buffers are those of the timing
        rng = np.random.default_rng([requests, length, nodes])
        small = replace(sizes, vocabulary=1000, slots=requests * (_CHECKED_LENGTH + nodes) + 8)
        self.wrong = self._gate(StepBatch.draw(rng, small, longest=_CHECKED_LENGTH), small)
        batch = StepBatch.draw(rng, replace(small, layers=1), longest=_CHECKED_LENGTH)
        self.sizes = sizes
        self.drawn = DrawnVerifyStep(None, sizes, "torch-cuda")
        tensors = self.tensors = self.drawn.tensors
        for name in ("logprobs", "token_ids", "root_tokens"):
            getattr(tensors, name).copy_(torch.from_numpy(getattr(batch.drafts, name)))
        tensors.kv.normal_()
        tensors.q.normal_(std=0.05)
        tensors.logits.normal_()
        tensors.seq_lens.fill_(length)
        tensors.req_pool_indices.copy_(torch.arange(1, requests + 1))
        slots_of = 1 + torch.randperm(slots - 1, device="cuda")
        each = length + nodes
        taken = slots_of[: requests * each].view(requests, each).to(torch.int32)
        tensors.req_to_token[1 : requests + 1, :each] = taken
        tensors.out_cache_loc.copy_(taken[:, length:].reshape(-1))
        self.eager: Callable[[], None] = self.drawn
        plan = self.drawn.step.plan
        self.cuts = VerifyPlan(  # the peer makes its lists itself
            tensors.seq_lens,
            tensors.qo_indptr,
            heads=sizes.heads,
            max_tokens=sizes.tokens,
            max_tree_tokens=sizes.nodes,
            workspace=plan.workspace,
            kv_indices=tensors.kv_indices,
        )
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            self.drawn()
        torch.cuda.synchronize()
        graph = torch.cuda.CUDAGraph()
        started = time.perf_counter()
        with torch.cuda.graph(graph, stream=stream):
            entered = time.perf_counter()
            self.drawn()
            self.launches_us = 1e6 * (time.perf_counter() - entered)
        torch.cuda.synchronize()
        self.capture_us = 1e6 * (time.perf_counter() - started)
        self.replay: Callable[[], None] = graph.replay

    @staticmethod
    def _gate(batch: Any, sizes: StepSizes) -> str | None:
        from cuverify.step_workload import DrawnVerifyStep
        from cuverify.validators.compare import compare_all, host_array

        step = DrawnVerifyStep(batch, sizes, "torch-cuda")
        step.poison()
        step()
        outputs = {name: host_array(tensor) for name, tensor in step.outputs.items()}
        wrong = compare_all(outputs, step.expected())
        return str(wrong[0]) if wrong else None

    def baseline(self) -> None:
        """Run the step with its glue in Python."""
        import torch

        from cuverify.baseline import host_accept, host_kv_list, host_trees

        tensors, step = self.tensors, self.drawn.step
        trees = host_trees(
            tensors.logprobs, tensors.token_ids, tensors.root_tokens, tensors.seq_lens,
            num_tokens=self.nodes,
        )  # fmt: skip
        self.cuts()  # attention's; its list is made anew for each layer
        for name, call in step.stages:
            if name == "attention":
                _, listed = host_kv_list(
                    tensors.req_to_token, tensors.req_pool_indices, tensors.seq_lens
                )
                tensors.kv_indices[: len(listed)].copy_(listed)
                if step.starts is not None:
                    step.starts()
                call()
            elif name == "argmax":
                call()
        host_accept(
            trees["tokens"], trees["next_token"], trees["next_sibling"], tensors.target,
            max_path=self.sizes.max_path,
        )  # fmt: skip
        torch.cuda.synchronize()


def _step(requests: int, length: int, nodes: int) -> Iterator[dict[str, Any]]:
    import torch

    step = _Timed(requests, length, nodes)
    shape: dict[str, int | float | str] = {
        "batch": requests, "prefix": length, "nodes": nodes, "layers": LAYERS
    }  # fmt: skip
    row = 2 * (step.sizes.latent + step.sizes.rope)
    read = LAYERS * requests * length * row
    logits = step.tensors.logits.numel() * 2
    stages = dict(step.drawn.step.stages)  # of layers and of the model the last one

    def line(
        op: str, timing: Callable[[], Timing], *, moved: int | None = None,
        peer: str | None = None, goal: float | None = None,
        more: dict[str, str] | None = None,
    ) -> dict[str, Any]:  # fmt: skip
        return gated(
            op, shape | ({"target_us": goal} if goal else {}) | (more or {}),
            check=lambda: step.wrong,
            timing=timing, floor_us=None if moved is None else copy_floor_us(moved), bytes=moved,
            peer=peer,
        )  # fmt: skip

    def eager() -> None:
        step.eager()
        torch.cuda.synchronize()

    def glue() -> None:
        for name in ("tree build", "plan", "accept"):
            stages[name]()

    yield line("step, captured", lambda: time_graph(step.drawn, REPEATS), moved=read + logits)
    yield line(
        "step, eager", lambda: time_calls(eager, repeats=REPEATS, settle=torch.cuda.synchronize)
    )
    yield line(
        "step", lambda: time_calls(step.baseline, repeats=_HOST_REPEATS),
        peer="glue in Python: heapq, masks, .item(), an index list a layer",
    )  # fmt: skip
    goal = GLUE_TARGET_US.get((requests, nodes))
    yield line("step, glue captured", lambda: time_graph(glue, REPEATS), goal=goal)
    # torch collects garbage and empties its cache before it captures
    yield line("step, capture", lambda: Timing.of([step.capture_us]))
    yield line("step, capture: the launches", lambda: Timing.of([step.launches_us]))
    moved_by = {"attention": read // LAYERS, "argmax": logits}
    for name, call in stages.items():
        yield line(
            f"stage: {name}, captured alone",
            lambda call=call: time_graph(call, REPEATS),  # type: ignore[misc]
            moved=moved_by.get(name),
        )
    topk, read_by_topk = _topk(requests, step.sizes)
    yield line(
        "stage: draft top-k, captured alone", lambda: time_graph(topk, REPEATS), moved=read_by_topk
    )
    for name, call in (("eager", step.eager), ("captured", step.replay)):
        found = record_timeline(call)
        account = found.account(GROUPS)
        for part, us in account.items():
            what = "idle gaps" if part == GAPS else f"kernels of {part}"
            yield line(f"step, {name}: {what}", lambda us=us: Timing.of([us]))  # type: ignore[misc]
        largest = max(account, key=lambda part: account[part])
        yield line(
            f"step, {name}: all, profiled",
            lambda us=found.us: Timing.of([us]),  # type: ignore[misc]
            more={"bounds_next": largest},
        )


def _topk(requests: int, sizes: StepSizes) -> tuple[Callable[[], None], int]:
    """Return the top-k over a drafter's logits, and the bytes that it reads."""
    import torch

    from cuverify.ops.draft_topk import DraftTopk

    shape = (requests, sizes.depth)
    logits = torch.randn((*shape, sizes.vocabulary), device="cuda").to(torch.bfloat16)
    values = torch.empty((*shape, sizes.ranks), device="cuda")
    ids = torch.empty(values.shape, dtype=torch.int64, device="cuda")
    return DraftTopk(logits, values, ids), 2 * logits.numel()
