"""Where a step's time goes on the device: its kernels one behind the other, and the gaps between.

`record_timeline` runs any callable, a step of one's own or a graph's replay, under torch's
profiler. A `Timeline` tells busy from idle, adds up groups of kernels, says which group bounds
next, and draws itself.
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuverify import drawing
from cuverify.errors import ArgumentError, DeviceError

_DEVICE_KINDS = ("kernel", "gpu_memcpy", "gpu_memset")

GAPS = "gaps"
"""What an account calls the time in which nothing runs."""

OTHERS = "everything else"
"""What an account calls kernels of no group."""


@dataclass(frozen=True)
class Span:
    """One kernel, copy or fill on the device; microseconds."""

    name: str
    begin: float
    end: float


@dataclass(frozen=True)
class Timeline:
    """What ran on a device, in order of its begin.

    Parameters
    ----------
    spans : tuple of Span
    """

    spans: tuple[Span, ...]

    @classmethod
    def of(cls, spans: Iterable[Span]) -> Timeline:
        """Sort spans; time begins with the first."""
        ordered = sorted(spans, key=lambda span: (span.begin, span.end))
        start = ordered[0].begin if ordered else 0.0
        return cls(tuple(Span(span.name, span.begin - start, span.end - start) for span in ordered))

    @classmethod
    def from_chrome(cls, trace: Mapping[str, Any]) -> Timeline:
        """Read the device's part of a Chrome trace as torch's profiler writes it."""
        return cls.of(
            Span(str(event["name"]), float(event["ts"]), float(event["ts"]) + float(event["dur"]))
            for event in trace["traceEvents"]
            if event.get("ph") == "X" and event.get("cat") in _DEVICE_KINDS
        )

    @property
    def us(self) -> float:
        """From the begin of the first to the end of the last."""
        return max((span.end for span in self.spans), default=0.0)

    def gaps(self) -> list[tuple[float, float]]:
        """Return the stretches in which nothing runs, as begin and end."""
        found, reached = [], 0.0
        for span in self.spans:
            if span.begin > reached:
                found.append((reached, span.begin))
            reached = max(reached, span.end)
        return found

    @property
    def idle_us(self) -> float:
        """Time in which nothing runs."""
        return sum(end - begin for begin, end in self.gaps())

    def kernels(self) -> dict[str, tuple[int, float]]:
        """Return runs and time of each name, longest first.

        Time that spans share is that of the first to begin: a kernel that starts early waits for
        the one in front. So all times and gaps together are `us`.
        """
        found: dict[str, tuple[int, float]] = {}
        reached = 0.0
        for span in self.spans:
            runs, us = found.get(span.name, (0, 0.0))
            found[span.name] = runs + 1, us + max(span.end - max(span.begin, reached), 0.0)
            reached = max(reached, span.end)
        return dict(sorted(found.items(), key=lambda item: -item[1][1]))

    def account(self, groups: Mapping[str, Sequence[str]]) -> dict[str, float]:
        """Return the time of each group of kernels, of all others, and of the gaps.

        Parameters
        ----------
        groups : mapping of str to sequence of str
            Parts of kernel names that belong to a group; the first that fits counts.

        Returns
        -------
        dict of str to float
            Microseconds; `OTHERS` and `GAPS` among them.
        """
        found = {**dict.fromkeys(groups, 0.0), OTHERS: 0.0}
        for name, (_, us) in self.kernels().items():
            fits = (group for group, parts in groups.items() if any(part in name for part in parts))
            found[next(fits, OTHERS)] += us
        return {**found, GAPS: self.idle_us}

    def to_text(self, groups: Mapping[str, Sequence[str]]) -> str:
        """Return the account as a table, and what bounds next."""
        account = self.account(groups)
        total = max(self.us, 1e-9)
        rows = [
            f"{name:24} {us:10.1f} us {100 * us / total:5.1f} %" for name, us in account.items()
        ]
        largest = max(account, key=lambda name: account[name])
        return "\n".join([*rows, f"{'all':24} {self.us:10.1f} us", f"bounds next: {largest}"])

    def to_svg(self, *, title: str = "timeline", width: int = 1100) -> str:
        """Draw a bar a kernel; gaps are hatched red below, so that idle time is seen.

        Parameters
        ----------
        title : str
        width : int
            Pixels.

        Returns
        -------
        str
            A complete `svg` element.
        """
        if not self.spans:
            raise ArgumentError("spans", self.spans, "nothing ran on the device")
        names = list(self.kernels())
        left, top, row = 10.0, 40.0, 26.0
        picture = drawing.Svg(width, top + 3 * row + 18 * len(names) + 20, title=title)
        scale = (width - 2 * left) / max(self.us, 1e-9)
        heading = f"{title}: {self.us:.1f} us, {self.idle_us:.1f} us of them idle"
        picture.text((left, 20), heading, size=13, anchor="start")
        for span in self.spans:
            colour = drawing.SERIES[names.index(span.name) % len(drawing.SERIES)]
            note = f"{span.name}: {span.end - span.begin:.2f} us at {span.begin:.2f}"
            size = max((span.end - span.begin) * scale, 0.5)
            picture.rect((left + span.begin * scale, top), size, row, fill=colour, title=note)
        for begin, end in self.gaps():
            note = f"idle: {end - begin:.2f} us at {begin:.2f}"
            size = max((end - begin) * scale, 0.5)
            at = (left + begin * scale, top + row + 4)
            picture.rect(at, size, row / 2, fill=drawing.ACCENT, title=note)
        picture.text((left, top + 2.4 * row), "below the bars: idle", size=10, anchor="start")
        for number, (name, (runs, us)) in enumerate(self.kernels().items()):
            y = top + 3 * row + 18 * number
            colour = drawing.SERIES[number % len(drawing.SERIES)]
            picture.rect((left, y - 9), 10, 10, fill=colour)
            line = f"{drawing.clip(name, 90)}  {runs} x, {us:.1f} us"
            picture.text((left + 16, y), line, size=11, anchor="start")
        return picture.to_string()

    def _repr_svg_(self) -> str:
        return self.to_svg()


def record_timeline(
    step: Callable[[], object], *, warmups: int = 2, trace: Path | None = None
) -> Timeline:
    """Run a step once under torch's profiler.

    Parameters
    ----------
    step : callable
        Anything that works on a CUDA device: a step, or a graph's replay.
    warmups : int
        Runs before.
    trace : pathlib.Path, optional
        Where the Chrome trace is kept.

    Returns
    -------
    Timeline

    Raises
    ------
    DeviceError
        There is no CUDA device, or the profiler saw nothing on it.
    """
    import torch

    if not torch.cuda.is_available():
        raise DeviceError("a timeline needs a CUDA device, and torch finds none")
    for _ in range(warmups):
        step()
    torch.cuda.synchronize()
    activities = [torch.profiler.ProfilerActivity.CPU, torch.profiler.ProfilerActivity.CUDA]
    with torch.profiler.profile(activities=activities) as profiler:
        step()
        torch.cuda.synchronize()
    with tempfile.TemporaryDirectory() as folder:
        file = trace or Path(folder) / "trace.json"
        profiler.export_chrome_trace(str(file))
        found = Timeline.from_chrome(json.loads(file.read_text(encoding="utf-8")))
    if not found.spans:
        raise DeviceError("torch's profiler saw no kernel: is CUPTI of the right version there?")
    return found
