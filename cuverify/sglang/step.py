"""A backend as a step of the capture validator: the recorded part of one batch size."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

from cuverify.errors import CaseError
from cuverify.sglang.contract import Family, MakeRunner
from cuverify.sglang.rig import Rig
from cuverify.sglang.schedule import Play, Shape
from cuverify.validators.compare import Bounded


class RunnerStep:
    """What a graph of one batch size records, with inputs that the hooks prepare.

    See `cuverify.validators.protocol.ReplayableStep`. Its batches are full ones: padding is
    `play`'s matter.

    Parameters
    ----------
    make, family, shape
        See `Rig`.
    play : Play
        A full batch of the size.
    device : {"cuda", "cpu"}
    """

    def __init__(
        self, make: MakeRunner, family: Family, shape: Shape, play: Play, device: str = "cuda"
    ) -> None:
        self.alone = ("q", *shape.fresh)
        self._bs = play.captured
        self._make_rig = functools.partial(Rig, make, family, device, shape)
        self._rig = self._make_rig()
        self._rig.prepare_capture(self._bs)
        self.refill(play)

    @property
    def inputs(self) -> Mapping[str, Any]:
        """The queries and the drafts' rows of all requests."""
        tokens = len(self._rig.real_rows(self._play))
        fresh = {name: rows[:tokens] for name, rows in self._rig.fresh.items()}
        return {"q": self._rig.q[:tokens], **fresh}

    @property
    def outputs(self) -> Mapping[str, Any]:
        """The output of all requests."""
        return {"out": self._rig.real_rows(self._play)}

    def refill(self, play: Play) -> None:
        """Write a full batch of the step's size and call the hook in front of a replay."""
        if play.padded or play.captured != self._bs:
            raise CaseError(f"{play.label} is no full batch of {self._bs}")
        self._play = play
        self._rig.prepare_replay(play)

    def __call__(self) -> None:
        """Attend, with the hook that belongs into the graph."""
        self._rig.step()

    def make_step(self) -> Callable[[], None]:
        """Return what a new backend would record on padding, which is what SGLang captures on."""
        rig = self._make_rig()
        rig.prepare_capture(self._bs)
        return rig.step

    def poison(self) -> None:
        """Fill the output with NaN."""
        self._rig.poison()

    def expected(self) -> dict[str, Bounded]:
        """Return what the float64 oracle makes of what is in the buffers now."""
        return {"out": self._rig.expected(self._play)}
