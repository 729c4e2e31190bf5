"""Play SGLang's graph runner with a backend, and record what it did.

Per captured size, largest first: the backend's hooks, two warm-ups, a capture; one scratch capture
on another batch before, to see what differs. Then the replays of `schedule`: the runner's buffers
are written and padded by the family's rules, the hooks are called, outputs are poisoned, the graph
runs, and the real requests' rows are compared with the float64 oracle.
"""

from __future__ import annotations

import contextlib
import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np

from cuverify.sglang.contract import Family, MakeRunner
from cuverify.sglang.graphs import Graph, Graphs, frozen_between
from cuverify.sglang.rig import Rig, place_of_class
from cuverify.sglang.schedule import Play, Shape, schedule
from cuverify.sglang.seen import ContractSeen, PlaySeen
from cuverify.validators.compare import compare, host_array
from cuverify.validators.observations import Fault
from cuverify.validators.places import place_of

WARMUPS = 2

_OTHER_BATCH = 10_000  # its seed: the batch of a scratch capture
# a padded replay in so many is made twice, and everything that nobody may write is compared
_THOROUGH_EVERY = 8

Told = Callable[[str, int, int], None]


class _StopError(Exception):
    """A fault was recorded, and nothing after it can be played."""


def play_contract(
    make: MakeRunner,
    family: Family,
    graphs: Graphs,
    shape: Shape,
    *,
    plays: Sequence[Play] | None = None,
    seed: int = 0,
    told: Told | None = None,
) -> ContractSeen:
    """Capture and replay a backend as SGLang's graph runner does.

    Parameters
    ----------
    make : callable
        Takes a `ModelRunner` and returns the backend, new.
    family : Family
        Which of its hooks to use.
    graphs : Graphs
        Where, and what captures.
    shape : Shape
    plays : sequence of Play, optional
        The replays; those of `schedule` if absent.
    seed : int
        Of the schedule.
    told : callable, optional
        Told what is played, how many are done, and of how many.

    Returns
    -------
    ContractSeen
        Unjudged. The first fault of a capture ends the run; one of a replay ends that replay.
    """
    chosen = schedule(shape.captured, seed=seed) if plays is None else list(plays)
    name = getattr(make, "__name__", type(make).__name__)
    seen = ContractSeen(name, family, graphs.device, graphs.name, place_of_class(make))
    with contextlib.suppress(_StopError):
        run = _Run(make, family, graphs, shape, seen)
        run.eager(chosen)
        run.capture_all()
        for number, play in enumerate(chosen):
            if told is not None:
                told(play.label, number, len(chosen))
            thorough = not play.padded or number % _THOROUGH_EVERY == 0
            seen.plays.append(run.replay(number, play, thorough=thorough))
            fault = seen.plays[-1].fault
            if fault is not None and fault.context_lost:
                break
    return seen


class _Run:
    """The calls of one run, in parts. Each records what it saw in `seen`."""

    def __init__(
        self, make: MakeRunner, family: Family, graphs: Graphs, shape: Shape, seen: ContractSeen
    ) -> None:
        self.graphs, self.shape, self.seen = graphs, shape, seen
        with self._stage("make", ""):
            self.rig = Rig(make, family, graphs.device, shape)
        # by size: the graph, and where the backend's tensors lay
        self.captured: dict[int, tuple[Graph, dict[str, int]]] = {}

    def eager(self, plays: Sequence[Play]) -> None:
        """Run a few batches without graphs: the most requests, the fewest, and the longest."""
        full = [play for play in plays if not play.padded]
        longest = [play for play in full if play.lengths == "maximum"]
        fewest = min(full, key=lambda play: play.requests, default=None)
        for play in (*full[:1], *([fewest] if fewest else []), *longest[:1]):
            self.seen.eager.append(self._eager(len(self.seen.eager), play))
        self._eager_dtypes = {path: str(t.dtype) for path, t in self.rig.tensors().items()}

    def _eager(self, number: int, play: Play) -> PlaySeen:
        try:
            self.rig.poison()
            self.rig.eager(play)
            self.graphs.synchronize()
        except Exception as error:
            return PlaySeen(number, play, fault=self._fault("eager", play.label, error))
        return self._judged(number, play)

    def capture_all(self) -> None:
        """Capture every size, the largest first."""
        for bs in sorted(set(self.shape.captured), reverse=True):
            with self._stage("capture", f"the graph of {bs}"):
                self._capture(bs)
            self.seen.captured.append(bs)

    def _capture(self, bs: int) -> None:
        rig, seen = self.rig, self.seen
        rig.prepare_capture(bs, Play(bs, bs, _OTHER_BATCH + bs))
        other = self.graphs.capture(rig.step, warmups=1, scratch=True).trace()
        rig.prepare_capture(bs)
        warmed = getattr(rig.backend, "on_after_cuda_graph_warmup", None)
        graph = self.graphs.capture(rig.step, warmups=WARMUPS, warmed=warmed)
        trace = graph.trace()
        if isinstance(trace, str) or isinstance(other, str):
            seen.compared_captures = trace if isinstance(trace, str) else str(other)
        else:
            seen.compared_captures = None
            seen.frozen.extend(frozen_between(bs, trace, other))
        tensors = rig.tensors()
        self.captured[bs] = graph, {path: t.data_ptr() for path, t in tensors.items()}
        for path, tensor in tensors.items():
            eager, present = self._eager_dtypes.get(path), str(tensor.dtype)
            if eager is not None and eager != present:
                seen.dtypes[path] = (eager, present)

    def replay(self, number: int, play: Play, *, thorough: bool) -> PlaySeen:
        """Make one replay; a thorough one twice, with a look at what nobody may write."""
        rig = self.rig
        graph, pointers = self.captured[play.captured]
        try:
            rig.prepare_replay(play)
            rig.poison()
            untouched = rig.untouchable() if thorough else {}
            self.graphs.synchronize()
            graph.replay()
            seen = self._judged(number, play, self._moved(pointers))
            if not thorough:
                return seen
            changed = rig.changed(untouched, play)
            first = host_array(rig.real_rows(play))
            rig.poison()
            self.graphs.synchronize()
            graph.replay()
            repeat = compare("out", host_array(rig.real_rows(play)), first)
        except Exception as error:
            moved = self._moved(pointers)
            fault = self._fault("replay", play.label, error)
            return PlaySeen(number, play, fault=fault, moved=moved)
        return PlaySeen(**{**vars(seen), "repeat": repeat, "changed": changed})

    def _judged(self, number: int, play: Play, moved: tuple[str, ...] = ()) -> PlaySeen:
        actual = host_array(self.rig.real_rows(play))
        right = self.rig.expected(play)
        must = np.isfinite(right.values)  # the output was poisoned with NaN
        kept = np.isnan(actual.values())
        return PlaySeen(
            number,
            play,
            mismatch=compare("out", actual, right),
            must_change=int(np.count_nonzero(must)),
            unchanged=int(np.count_nonzero(must & kept)),
            digest=hashlib.sha256(actual.bits().tobytes()).hexdigest()[:16],
            moved=moved,
        )

    def _moved(self, pointers: Mapping[str, int]) -> tuple[str, ...]:
        now = self.rig.tensors()
        return tuple(
            path
            for path, pointer in pointers.items()
            if path in now and now[path].data_ptr() != pointer
        )

    def _fault(self, stage: str, label: str, error: Exception) -> Fault:
        lost = False
        try:
            self.graphs.synchronize()
        except Exception:
            lost = True
        text = " ".join(str(error).strip().splitlines()[:3])
        return Fault(stage, f"{type(error).__name__}: {text}", place_of(error), lost, label)

    @contextlib.contextmanager
    def _stage(self, stage: str, label: str) -> Iterator[None]:
        try:
            yield
        except Exception as error:
            self.seen.faults.append(self._fault(stage, label, error))
            raise _StopError from error
