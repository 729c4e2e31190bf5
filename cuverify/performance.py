"""The performance page: what the evidence says of attention, and what follows for other GPUs.

``docs/performance.md`` is written by `cuverify evidence record --part attention` and by ``python -m
cuverify.performance``; every figure in it comes from an evidence file. A test compares the page
with the evidence beside it.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cuverify.benches.verify_attention import IN_ORDER, LEAST, OP, PLAN, PORTABLE
from cuverify.comparison import Line, geometric_mean, lines
from cuverify.errors import EvidenceError
from cuverify.verify_shapes import ALL, BLOCK, GRID, LEVEL, RAGGED, TARGETS_US, WIDE, Shape

PAGE = Path("docs") / "performance.md"

TOKENS = "token_exactness"
SGLANG = "SGLang, Triton"

# times faster than SGLang's Triton kernel that are aimed at: prefixes, one request, up to 16 tokens
_SGLANG_GOALS = ((("1k",), 14), (("4k",), 50), (("16k", "64k", "180k"), 150))
_SGLANG_TREES = (1, 8, 16)
_REAL_WIDTHS = (17, 33, 65)
_RAGGED_LIMIT = 1.25
# what the portable text is to reach on an H200
_PORTABLE_ROWS, _PORTABLE_TREE, _PORTABLE_WIDER = 65_536, 8, 16
_PORTABLE_FACTOR = 1.5
_PORTABLE_RATE, _PORTABLE_SHAPE = 200, "1x64k:8"
_GRID_GOAL = 1.7

MMA_SYNC_FLOPS = 600e12
"""What `mma.sync` was seen to give on an H200, from registers: 586 to 618 TFLOP/s."""


@dataclass(frozen=True)
class Target:
    """A GPU that was not measured, and what it is expected to give.

    Attributes
    ----------
    name, part : str
        What it is called, and what its name contains.
    bytes : float
        A second, sustained.
    flops : float
        bf16 `mma.sync` operations a second, dense.
    """

    name: str
    part: str
    bytes: float
    flops: float


RTX_PRO_6000 = Target("RTX PRO 6000 (sm_120)", "RTX PRO 6000", 1.5e12, 380e12)
_PREDICTED = ("1x1k:8", "1x4k:8", "1x16k:8", "1x64k:8", "1x180k:8", "1x64k:33", "16x16k:8")


def page(root: Path) -> str:
    """Return the page for the evidence of a source tree.

    Raises
    ------
    EvidenceError
        Evidence is missing or malformed.
    """
    from cuverify import evidence

    parts = [_HEAD]
    documents = [evidence.load(path) for path in evidence.evidence_files(root)]
    sections = {each["gpu"]: each["sections"].get("attention") for each in documents}
    met = [section for gpu, section in sections.items() if section and RTX_PRO_6000.part in gpu]
    for gpu, section in sections.items():
        parts.extend(["", f"## {gpu}", ""])
        if section is None:
            parts.append("Not recorded yet.")
        else:
            parts.extend(_gpu(section, met[0] if met else None))
    return "\n".join(parts) + "\n"


def write(root: Path) -> Path:
    """Write the page of a source tree and return where it is."""
    from cuverify.files import write_atomically

    path = root / PAGE
    path.parent.mkdir(exist_ok=True)
    write_atomically(path, page(root))
    return path


def picture(root: Path, path: Path, gpu: str | None = None) -> None:
    """Draw the recorded times of one GPU, as `cuverify.figures.draw` does.

    Parameters
    ----------
    root : Path
        Of a source tree.
    path : Path
        ``.svg`` or ``.png``.
    gpu : str, optional
        Part of its name; the first GPU whose attention was recorded if absent.

    Raises
    ------
    EvidenceError
        There is no such record.
    ToolchainError
        matplotlib is not installed.
    """
    from cuverify import evidence, figures

    for file in evidence.evidence_files(root):
        document = evidence.load(file)
        section = document["sections"].get("attention")
        if section is not None and (gpu is None or gpu in document["gpu"]):
            figures.draw(section["data"], path)
            return
    wanted = "" if gpu is None else f" of a GPU like {gpu!r}"
    raise EvidenceError(f"no attention{wanted} is recorded in {root / evidence.FOLDER}")


# --- one GPU -------------------------------------------------------------------------------------


def _gpu(section: Mapping[str, Any], predicted: Mapping[str, Any] | None = None) -> Iterator[str]:
    records = section["data"]
    found = {(line.op, line.name): line for line in lines(records)}
    versions = ", ".join(
        f"{name} {section['versions'][name]}"
        for name in ("torch", "CuPy", "NVRTC", "driver")
        if name in section["versions"]
    )
    yield f"Recorded {section['run']['date']} in {section['run']['seconds']:.0f} s; {versions}."
    yield ""
    yield from _ceilings(records)
    yield from _summary(found)
    yield from _targets(found)
    for title, shapes in (
        ("Powers of two", GRID),
        ("Widths that drafters have", WIDE),
        ("Other shapes", _others(found)),
    ):
        yield from _times(title, [found.get((OP, shape.name)) for shape in shapes])
    yield from _portable(found)
    yield from _plans(found)
    yield from _ragged(found)
    yield from _tokens(records)
    yield from _refused(found, records)
    measured = (
        {}
        if predicted is None
        else {line.name: line.ours_us for line in lines(predicted["data"]) if line.op == OP}
    )
    if predicted is not section:
        yield from _predictions(found, measured)


def _others(found: Mapping[tuple[str, str], Line]) -> list[Shape]:
    known = {shape.name for shape in (*GRID, *WIDE)}
    return [Shape.parse(name) for op, name in found if op == OP and name not in known]


def _ceilings(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rates = []
    for record in records:
        if record["op"] == "ceilings" and record["us"]:
            amount, unit = (
                (record["bytes"], "TB/s") if record["bytes"] else (record["flops"], "TFLOP/s")
            )
            rate = amount / record["us"] * 1e6 / 1e12
            digits = 2 if unit == "TB/s" else 0
            rates.append(f"{record['shape']['what']} {rate:.{digits}f} {unit}")
    if rates:
        yield f"Ceilings of the same run: {'; '.join(rates)}."
        yield ""


def _summary(found: Mapping[tuple[str, str], Line]) -> Iterator[str]:
    attention = [line for (op, _), line in found.items() if op == OP]
    compared = [line for line in attention if line.speedup is not None]
    if not compared:
        yield "No peer was measured beside ours."
        yield ""
        return
    slower = [line.name for line in compared if (line.speedup or 0) <= 1]
    yield (
        f"- Faster than the best exact-tree peer at {len(compared) - len(slower)} of "
        f"{len(compared)} shapes{f'; not at {_list(slower)}' if slower else ''}."
    )
    grid = {shape.name for shape in GRID}
    gains = [line.speedup for line in compared if line.name in grid and line.speedup]
    mean = geometric_mean(gains)
    if mean is not None:
        yield (
            f"- Geometric mean over {len(gains)} of the {len(GRID)} shapes of the grid: "
            f"{mean:.2f}x (goal: {_GRID_GOAL}x)."
        )
    widths = [line for line in compared if Shape.parse(line.name).tree in _REAL_WIDTHS]
    if widths:
        behind = [line.name for line in widths if (line.speedup or 0) <= 1]
        yield (
            f"- With trees of {', '.join(map(str, _REAL_WIDTHS))} tokens: faster at "
            f"{len(widths) - len(behind)} of {len(widths)} shapes."
        )
    against = [
        line.peers[SGLANG] / line.ours_us
        for line in attention
        if SGLANG in line.peers and line.ours_us
    ]
    if against:
        yield (
            f"- Against SGLang's Triton kernel: {min(against):.1f}x to {max(against):.0f}x, median "
            f"{statistics.median(against):.0f}x, over {len(against)} shapes."
        )
    wrong = [line.name for line in attention if line.wrong]
    yield f"- Ours was wrong, and so not timed, at: {_list(wrong) if wrong else 'no shape'}."
    missing = [shape.name for shape in ALL if (OP, shape.name) not in found]
    if missing:
        yield f"- Not measured: {_list(missing)}."
    yield ""


def _targets(found: Mapping[tuple[str, str], Line]) -> Iterator[str]:
    rows = []
    for name, target in TARGETS_US.items():
        line = found.get((OP, name))
        us = None if line is None else line.ours_us
        verdict = "not measured" if us is None else "met" if us <= target else "missed"
        behind = found.get((IN_ORDER, name))
        in_order = None if behind is None else behind.ours_us
        rows.append((name, f"{target:g}", _us(us), verdict, _us(in_order)))
    yield "### Goals"
    yield ""
    yield from _table(("shape", "goal us", "us", "", "in order us"), rows)
    yield "One request, trees of up to 16 tokens, times faster than SGLang's Triton kernel:"
    yield ""
    yield from _table(("prefix", "goal", "least", ""), _sglang_goals(found))


def _sglang_goals(found: Mapping[tuple[str, str], Line]) -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = []
    for prefixes, goal in _SGLANG_GOALS:
        chosen = [
            found.get((OP, f"1x{prefix}:{tree}")) for prefix in prefixes for tree in _SGLANG_TREES
        ]
        gains = [
            line.peers[SGLANG] / line.ours_us
            for line in chosen
            if line is not None and line.ours_us and SGLANG in line.peers
        ]
        least = min(gains) if len(gains) == len(chosen) else None
        verdict = "not measured" if least is None else "met" if least >= goal else "missed"
        rows.append(
            (", ".join(prefixes), f"{goal}x", "" if least is None else f"{least:.1f}x", verdict)
        )
    return rows


def _times(title: str, chosen: Sequence[Line | None]) -> Iterator[str]:
    rows = []
    for line in chosen:
        if line is None:
            continue
        name, us = line.best or ("", None)
        sglang = line.peers.get(SGLANG)
        rows.append(
            (
                line.name,
                _us(line.floor_us),
                _us(line.read_us),
                line.wrong or f"**{_us(line.ours_us)}** ± {_us(line.ours_spread)}",
                _times_of(line.ours_us, line.floor_us),
                _times_of(line.ours_us, line.read_us),
                _us(line.ours_alone_us),
                _us(us),
                name,
                _times_of(us, line.ours_us, 2),
                _times_of(sglang, line.ours_us, 0),
            )
        )
    if not rows:
        return
    yield f"### {title}"
    yield ""
    heads = (
        "shape", "roofline", "read", "ours", "x roofline", "x read", "alone", "best peer", "",
        "times faster", "than SGLang's Triton",
    )  # fmt: skip
    yield from _table(heads, rows)


def _portable(found: Mapping[tuple[str, str], Line]) -> Iterator[str]:
    rows = []
    ahead: list[bool] = []
    near: list[bool] = []
    reached: float | None = None
    for (op, name), line in found.items():
        chosen = found.get((OP, name))
        if op != PORTABLE or chosen is None or chosen.best is None:
            continue
        shape = Shape.parse(name)
        share = None if not line.ours_us else line.ours_us / chosen.best[1]
        if shape.tree <= _PORTABLE_TREE and shape.prefix_rows <= _PORTABLE_ROWS:
            ahead.append(share is not None and share < 1)
        elif shape.tree <= _PORTABLE_WIDER:
            near.append(share is not None and share <= _PORTABLE_FACTOR)
        rate = None if not line.ours_us else shape.flops / line.ours_us / 1e6
        if name == _PORTABLE_SHAPE:
            reached = rate
        rows.append(
            (
                name,
                line.wrong or _us(line.ours_us),
                "" if rate is None else f"{rate:.0f}",
                _us(chosen.best[1]),
                _times_of(line.ours_us, chosen.best[1], 2),
                _us(least.ours_us) if (least := found.get((LEAST, name))) else "",
            )
        )
    if not rows:
        return
    yield "### The portable variant on this GPU"
    yield ""
    yield "What GPUs without the Hopper variant get; here a stand-in for them. Goals:"
    yield ""
    yield (
        f"- faster than the best peer with up to {_PORTABLE_TREE} tokens and 64k rows: at "
        f"{sum(ahead)} of {len(ahead)} shapes;"
    )
    yield (
        f"- within {_PORTABLE_FACTOR}x of it elsewhere with up to {_PORTABLE_WIDER} tokens: at "
        f"{sum(near)} of {len(near)};"
    )
    rate_told = "not measured" if reached is None else f"{reached:.0f}"
    yield f"- {_PORTABLE_RATE} TFLOP/s at `{_PORTABLE_SHAPE}`: {rate_told}."
    yield ""
    heads = ("shape", "us", "TFLOP/s", "best peer", "x best peer", "in 99 KB us")
    yield from _table(heads, rows)


def _plans(found: Mapping[tuple[str, str], Line]) -> Iterator[str]:
    plans = [line for (op, _), line in found.items() if op == PLAN and line.ours_us]
    if not plans:
        return
    times = [line.ours_us or 0.0 for line in plans]
    layers = plans[0].shape["layers"]
    a_layer = [float(line.shape["us_a_layer"]) for line in plans]
    yield "### The plan"
    yield ""
    yield (
        f"Once a step, on the device, what each block reads first laid out, too: "
        f"{min(times):.1f} to {max(times):.1f} us over {len(plans)} shapes, which is "
        f"{min(a_layer):.2f} to {max(a_layer):.2f} us for each of {layers} layers."
    )
    yield ""


def _ragged(found: Mapping[tuple[str, str], Line]) -> Iterator[str]:
    ragged, level = (found.get((OP, shape.name)) for shape in (RAGGED, LEVEL))
    if ragged is None or level is None or not ragged.ours_us or not level.ours_us:
        return
    ratio = ragged.ours_us / level.ours_us
    yield "### Unequal lengths"
    yield ""
    yield (
        f"`{RAGGED}` takes {_us(ragged.ours_us)} us, the same rows in equal lengths (`{LEVEL}`) "
        f"{_us(level.ours_us)} us: {ratio:.2f}x (goal: at most {_RAGGED_LIMIT}x)."
    )
    blocks = [found.get((OP, shape.name)) for shape in BLOCK]
    shown = [f"`{line.name}` {_us(line.ours_us)} us" for line in blocks if line and line.ours_us]
    if shown:
        yield ""
        yield f"A drafter's own attention, 16 tokens that all see each other: {', '.join(shown)}."
    yield ""


def _tokens(records: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    rows = []
    for record in records:
        shape = record["shape"]
        if record["op"] == TOKENS and "tokens rows" in shape:
            keys = ("rows", "equal", "close", "excused", "wrong", "as ours")
            counts = [str(shape.get(f"tokens {key}", "")) for key in keys]
            rows.append((record["peer"] or "ours", *counts))
    if not rows:
        return
    yield "### Greedy tokens"
    yield ""
    yield (
        "Through a fixed random output head of 32,768 tokens, against float64. A row is close "
        "where its two best logits are nearer than an allowed error can move them "
        "([tolerances](tolerances.md)); only there may a token differ."
    )
    yield ""
    heads = ("", "tokens", "equal", "close rows", "differ there", "differ elsewhere", "as ours")
    yield from _table(heads, rows)


def _refused(
    found: Mapping[tuple[str, str], Line], records: Sequence[Mapping[str, Any]]
) -> Iterator[str]:
    rows = [
        (line.name, peer, reason)
        for (op, _), line in found.items()
        if op == OP
        for peer, reason in line.refused.items()
    ]
    rows += [
        ("all", record["peer"], record["error"])
        for record in records
        if record["op"] == OP and record["peer"] and not record["shape"]
    ]
    if rows:
        yield "### Peers that were wrong or not there"
        yield ""
        yield from _table(("shape", "peer", "what was found"), rows)


def _predictions(
    found: Mapping[tuple[str, str], Line], measured: Mapping[str, float | None]
) -> Iterator[str]:
    """Yield what the portable variant should take on a GPU that is not here, beside what it did."""
    least = {name: line for (op, name), line in found.items() if op == LEAST and line.ours_us}
    if not any(name in least for name in _PREDICTED):
        return
    target = RTX_PRO_6000
    rows = []
    for name in _PREDICTED:
        line = least.get(name)
        if line is None or not line.ours_us:
            continue
        shape = Shape.parse(name)
        memory, tensor = predicted_us(shape, line.ours_us, target)
        bound = "memory" if memory >= tensor else "tensor cores"
        met = _us(measured.get(name)) or "nobody has measured it"
        rows.append((name, _us(memory), _us(tensor), bound, met))
    yield f"### Predictions for {target.name}"
    yield ""
    yield (
        f"From {target.bytes / 1e12:g} TB/s and {target.flops / 1e12:g} TFLOP/s of mma.sync, of "
        "which the portable variant in 99 KB is given the share that it reached here of "
        f"{MMA_SYNC_FLOPS / 1e12:g}. The larger of both times is the prediction; launches come on "
        "top."
    )
    yield ""
    yield from _table(("shape", "bytes us", "products us", "bound by", "measured us"), rows)


def predicted_us(shape: Shape, measured_us: float, target: Target) -> tuple[float, float]:
    """Return what moving the bytes and doing the products should take on another GPU.

    Parameters
    ----------
    shape : Shape
    measured_us : float
        What the portable variant in 99 KB took on an H200.
    target : Target
    """
    share = min(1.0, shape.flops / (measured_us * 1e-6) / MMA_SYNC_FLOPS)
    return 1e6 * shape.bytes / target.bytes, 1e6 * shape.flops / (share * target.flops)


# --- text ----------------------------------------------------------------------------------------


def _table(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> Iterator[str]:
    yield f"| {' | '.join(heads)} |"
    yield f"|{'---|' * len(heads)}"
    for row in rows:
        yield f"| {' | '.join(cell.replace('|', '/') for cell in row)} |"
    yield ""


def _us(value: float | None) -> str:
    if value is None:
        return ""
    return f"{value:.2f}" if value < 10 else f"{value:.1f}" if value < 1000 else f"{value:.0f}"


def _times_of(value: float | None, of: float | None, digits: int = 1) -> str:
    return "" if value is None or not of else f"{value / of:.{digits}f}"


def _list(names: Sequence[str]) -> str:
    return ", ".join(f"`{name}`" for name in names)


_HEAD = """\
# Performance of verify attention

Written by `cuverify evidence record --part attention` from the files in `evidence/`; no figure
here was typed. `python -m cuverify.performance` writes it anew from the same files.

**What is measured.** One layer of Kimi K2 on one of eight GPUs: 8 heads, bf16 rows of 512 + 64
elements, page size 1, slots scattered over a pool of a million rows. `16x4k:8` are sixteen requests
of 4,096 prefix rows, each with a tree of 8 tokens; `block16` is a drafter's block.

**How.** *ours*, and each peer: up to 16 copies of the step over slots of their own in one CUDA
graph, after a read of 256 MiB that leaves nothing in the L2 cache, divided by their number; median
of 7 with the interquartile range. *alone*: one step in a graph, the graph's start included, median
of 15. *in order*: as *ours*, but each copy starts when the one in front has ended. Ours let the
kernel behind them start early, as a kernel may that is launched so; in a server few are. Plans are
excluded for everybody, and ours is shown apart. Nothing is timed before its result was held against
float64 ([tolerances](tolerances.md)). All times are in microseconds.

**Floors.** *roofline*: bytes at the speed of a linear read or operations at the speed of the tensor
cores, whichever takes longer, with the ceilings of the same run. *read*: reading the same scattered
rows, and nothing else, in the same way of measuring.

**Peers.** Plain torch; FlashAttention 3 as SGLang composes it, and its strongest composition
(splits tuned for each shape, plan made before, drafts on a forked branch, one merge kernel);
FlashInfer's kernel for Hopper in the same composition; SGLang's Triton kernel. `python -m
cuverify.peers.fetch DIR` lays out those that are not installed; `CUVERIFY_PEERS=DIR` names them.

**On another GPU** one line repeats it all, and writes this page:
`cuverify tune && cuverify evidence record --part attention`."""


if __name__ == "__main__":
    from cuverify.evidence import source_root

    sys.stdout.write(f"{write(source_root())}\n")
