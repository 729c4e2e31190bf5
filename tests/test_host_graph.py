"""The likeness of a CUDA graph keeps what a graph keeps, and refuses what a capture refuses."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from cuverify.validators.host_graph import Call, HostGraph

import cuverify
from cuverify.errors import DeviceError

SCALE = """
// @kernel scale
// @param x      update fp32 [n]
// @param factor value  fp32
// @param n      value  int32
extern "C" __global__ void scale(float* x, float factor, int n) {
    const int i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) {
        x[i] = factor * x[i];
    }
}
"""


def captured(step) -> HostGraph:
    graph = HostGraph()
    with graph.capture():
        step()
    return graph


def test_a_replay_reads_what_the_buffers_hold_now() -> None:
    x, y = torch.arange(4.0), torch.zeros(4)
    graph = captured(lambda: y.copy_(x * 2 + 1))
    x.copy_(torch.tensor([5.0, 6.0, 7.0, 8.0]))
    y.zero_()
    graph.replay()
    assert y.tolist() == [11.0, 13.0, 15.0, 17.0]


def test_a_number_of_the_host_is_frozen_and_shows_in_the_calls() -> None:
    x, y, state = torch.ones(4), torch.zeros(4), {"factor": 2.0}
    step = lambda: y.copy_(x * state["factor"])  # noqa: E731
    graph = captured(step)
    state["factor"] = 3.0
    graph.replay()
    assert y.tolist() == [2.0] * 4
    other = captured(step)
    assert [call.name for call in graph.calls] == [call.name for call in other.calls]
    assert graph.calls != other.calls
    assert captured(step).calls == other.calls


def test_a_name_bound_anew_changes_nothing() -> None:
    state, y = {"x": torch.ones(4)}, torch.zeros(4)
    graph = captured(lambda: y.copy_(state["x"]))
    state["x"] = torch.full((4,), 9.0)
    graph.replay()
    assert y.tolist() == [1.0] * 4


def test_updates_in_place_views_and_two_results_are_repeated() -> None:
    x, best, at = torch.tensor([3.0, 9.0, 4.0]), torch.zeros(1), torch.zeros(1, dtype=torch.int64)

    def step() -> None:
        x[1:].add_(1)
        values, indices = x.max(0, keepdim=True)
        best.copy_(values)
        at.copy_(indices)

    graph = captured(step)
    x.copy_(torch.tensor([1.0, 2.0, 8.0]))
    graph.replay()
    assert (x.tolist(), best.tolist(), at.tolist()) == ([1.0, 3.0, 9.0], [9.0], [2])


def test_launches_and_operations_keep_their_order() -> None:
    kernel = cuverify.load_kernel(SCALE)
    x = torch.ones(4)

    def step() -> None:
        x.add_(1)
        kernel(1, 32, x, 10.0, 4)
        x.add_(1)

    graph = captured(step)
    assert x.tolist() == [21.0] * 4
    assert [call.name for call in graph.calls] == ["aten.add_.Tensor", "scale", "aten.add_.Tensor"]
    assert graph.calls[1] == Call("scale", (1, 1, 1), (("factor", 10.0), ("n", 4)))
    x.fill_(0)
    graph.replay()
    assert x.tolist() == [11.0] * 4


def test_temporaries_hold_nothing_between_replays() -> None:
    kept: list[torch.Tensor] = []
    y = torch.zeros(2)

    def step() -> None:
        scratch = torch.zeros(2)
        kept.append(scratch)
        y.copy_(scratch + 1)

    graph = captured(step)
    kept[0].fill_(5)
    graph.replay()
    assert y.tolist() == [1.0, 1.0]


@pytest.mark.parametrize(
    "step",
    [
        lambda x, y: x.sum().item(),
        lambda x, y: bool(x[0] > 0),
        lambda x, y: x.nonzero(),
        lambda x, y: x[x > 0],
        lambda x, y: y.__setitem__(x > 0, y[:1].expand(4)[x > 0]),
        lambda x, y: torch.repeat_interleave(x, torch.tensor([1, 2, 1, 1])),
        lambda x, y: torch.unique(x),
        lambda x, y: torch.equal(x, y),
    ],
)
def test_what_a_capture_refuses_is_refused(step) -> None:
    x, y = torch.arange(4.0), torch.zeros(4)
    with pytest.raises(DeviceError, match="not permitted when stream is capturing"):
        captured(lambda: step(x, y))


def test_what_a_capture_takes_is_taken() -> None:
    x, y = torch.arange(4.0), torch.zeros(4)

    def step() -> None:
        y[x > 1] = 7.0  # a fill, no list of positions
        y.add_(x[torch.tensor([3, 2, 1, 0])])
        repeats = torch.tensor([1, 2])
        y[:3].add_(torch.repeat_interleave(x[:2], repeats, output_size=3))

    graph = captured(step)
    y.zero_()
    graph.replay()
    assert y.tolist() == [3.0, 3.0, 9.0, 7.0]


def test_a_capture_that_fails_leaves_no_mode_behind() -> None:
    x = torch.ones(1)
    with pytest.raises(DeviceError):
        captured(x.item)
    assert x.item() == 1.0
    with cuverify.record_launches() as records:
        pass
    assert records == []


def test_numpy_arrays_of_a_launch_are_pointers_not_numbers() -> None:
    kernel = cuverify.load_kernel(SCALE)
    x = np.ones(4, np.float32)
    graph = captured(lambda: kernel(1, 32, x, 2.0, 4))
    assert graph.calls[0].numbers == (("factor", 2.0), ("n", 4))
    graph.replay()
    assert x.tolist() == [4.0] * 4
