"""By which rule a backend broke SGLang's contract: findings from the record of a run.

Each rule looks at the whole record. Those that know a cause come first; what they do not explain is
CV601, a replay that differs and no more. The names are the capture validator's.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

from cuverify.report import Coverage, Finding
from cuverify.sglang.seen import ContractSeen, PlaySeen

# causes that account for replays that raise, too
_EXPLAIN_RAISING = frozenset({"CV303", "CV503", "CV505", "CV903"})


def judge(seen: ContractSeen) -> list[Finding]:
    """Return every violation in a record.

    Parameters
    ----------
    seen : ContractSeen

    Returns
    -------
    list of Finding
        Empty when nothing is wrong in what was played; what was not is coverage.
    """
    causes = [
        *_faults(seen),
        *_eager(seen),
        *_frozen(seen),
        *_moved(seen),
        *_dtypes(seen),
        *_maximum(seen),
        *_paddings(seen),
        *_shrunk(seen),
    ]
    return [*causes, *_unexplained(seen, causes), *_repeats(seen), *_changed(seen), *_vacuous(seen)]


def coverage(seen: ContractSeen) -> list[Coverage]:
    """Say what a record lets one judge, and what not."""
    who = f"{seen.backend}, {seen.family} hooks"
    lines = []
    if seen.plays:
        graphs = len(seen.captured)
        padded = sum(play.play.padded for play in seen.plays)
        lines.append(
            Coverage(
                who,
                "inspected",
                f"{len(seen.plays)} replays of {graphs} graphs ({seen.graphs} on {seen.device}), "
                f"{padded} of them padded, and {len(seen.eager)} eager runs",
            )
        )
    else:
        stage = seen.faults[0].stage if seen.faults else "the run"
        lines.append(Coverage(who, "not inspected", f"{stage} failed before any replay"))
    if seen.compared_captures is not None:
        lines.append(Coverage(f"{who}: frozen numbers", "not inspected", seen.compared_captures))
    elif seen.device != "cpu":
        lines.append(
            Coverage(
                f"{who}: frozen numbers",
                "not inspected",
                "of two captures only kernels and grids were compared here; the validator compares "
                "numbers",
            )
        )
    return lines


def _finding(
    seen: ContractSeen, rule: str, message: str, fix: str, *, where: str | None = None, **more: Any
) -> Finding:
    evidence = {"backend": seen.backend, "hooks": seen.family, "device": seen.device, **more}
    return Finding(rule, "error", f"{seen.backend}: {message}", where or seen.where, evidence, fix)


def _of_play(play: PlaySeen) -> dict[str, Any]:
    """Return a wrong play as evidence."""
    shown: dict[str, Any] = {"replay": play.number, "batch": play.play.label}
    if play.fault is not None:
        shown["error"] = play.fault.error
    if play.mismatch is not None:
        shown |= play.mismatch.evidence()
        shown["unwritten"] = play.unchanged
    return shown


def _where(play: PlaySeen) -> str | None:
    return None if play.fault is None else play.fault.where


def _said(play: PlaySeen) -> str:
    what = play.fault.error if play.fault is not None else str(play.mismatch)
    return f"{play.play.label}: {what}"


def _wrong(seen: ContractSeen) -> list[PlaySeen]:
    return [play for play in seen.plays if play.wrong]


def _faults(seen: ContractSeen) -> Iterator[Finding]:
    for fault in seen.faults:
        rule = "CV902"
        fix = "Call the hook by itself with such a batch and read the error."
        if fault.context_lost:
            rule = "CV903"
            fix = "Play the backend on the host lane under cuverify.checked()."
        elif fault.stage == "capture":
            rule = "CV201"
            fix = (
                "Move host reads, allocations outside torch's pool and first-time work into "
                "init_forward_metadata_out_graph or the capture hook."
            )
        elif fault.stage == "make":
            fix = "See cuverify.sglang.contract.VerifyRunner for what the class is given."
        message = f"{fault.stage} failed on {fault.label or 'no batch yet'}: {fault.error}"
        yield _finding(seen, rule, message, fix, where=fault.where, stage=fault.stage)
    for play in seen.plays:
        if play.fault is not None and play.fault.context_lost:
            yield _finding(
                seen,
                "CV903",
                f"the device context was lost: {_said(play)}",
                "Play the backend on the host lane under cuverify.checked(): it names the access.",
                where=_where(play),
                **_of_play(play),
            )


def _eager(seen: ContractSeen) -> Iterator[Finding]:
    wrong = [play for play in seen.eager if play.wrong]
    for play in wrong[:1]:
        yield _finding(
            seen,
            "CV603",
            f"wrong without any graph: {_said(play)}",
            "Mend the eager pass first; graphs come second.",
            where=_where(play),
            eager_runs_wrong=len(wrong),
            **_of_play(play),
        )


def _frozen(seen: ContractSeen) -> Iterator[Finding]:
    by_kind = defaultdict(list)
    for frozen in seen.frozen:
        by_kind[frozen.kernel, frozen.what].append(frozen)
    for (kernel, what), all_of_kind in by_kind.items():
        first = all_of_kind[0]
        one, other = first.values
        said = {
            "grid": f"`{kernel}` is launched with grid {one} or {other}",
            "number": f"`{kernel}` is given {one} or {other} by the host",
            "calls": f"`{kernel}` is called {one} or {other} times",
        }[what]
        yield _finding(
            seen,
            "CV301" if what == "number" else "CV302",
            f"{said}, depending on the batch that the graph of {first.captured} is captured on; "
            "every replay repeats the capture's",
            "Launch for the largest batch that the graph may see, and let the kernel read lengths "
            "from the device.",
            kernel=kernel,
            on_padding=one,
            on_a_batch=other,
            graphs=[frozen.captured for frozen in all_of_kind],
            replays_wrong=len(_wrong(seen)),
        )


def _moved(seen: ContractSeen) -> Iterator[Finding]:
    wrong = [play for play in _wrong(seen) if play.moved]
    for play in wrong[:1]:
        yield _finding(
            seen,
            "CV303",
            f"{', '.join(f'`{path}`' for path in play.moved[:4])} lay elsewhere when the graph was "
            f"captured, and the replay is wrong: {_said(play)}",
            "Make the buffer once in init_cuda_graph_state and write into it in place "
            "(buffer[:n].copy_(new)); a name bound to a new tensor changes nothing in the graph.",
            where=_where(play),
            moved=list(play.moved),
            replays_wrong=len(wrong),
            **_of_play(play),
        )


def _dtypes(seen: ContractSeen) -> Iterator[Finding]:
    full = [play for play in seen.plays if not play.play.padded]
    wrong = [play for play in full if play.wrong]
    eager_right = bool(seen.eager) and not any(play.wrong for play in seen.eager)
    if not (seen.dtypes and eager_right and wrong and len(wrong) == len(full)):
        return
    path, (eager, graph) = next(iter(seen.dtypes.items()))
    yield _finding(
        seen,
        "CV607",
        f"right in eager runs, wrong in every graph, and `{path}` is {eager} there and {graph} "
        f"here: {_said(wrong[0])}",
        "Read each buffer in the dtype that it has: SGLang's graph buffers are wider than its "
        "eager tensors (int64 bounds, uint8 masks). Choose the kernel by dtype, or convert.",
        where=_where(wrong[0]),
        dtypes={path: f"{a} -> {b}" for path, (a, b) in seen.dtypes.items()},
        replays_wrong=len(_wrong(seen)),
        **_of_play(wrong[0]),
    )


def _only_at_maximum(seen: ContractSeen) -> list[PlaySeen]:
    wrong = _wrong(seen)
    longest = [play for play in wrong if play.play.lengths == "maximum"]
    return longest if len(longest) == len(wrong) < len(seen.plays) else []


def _maximum(seen: ContractSeen) -> Iterator[Finding]:
    wrong = _only_at_maximum(seen)
    for play in wrong[:1]:
        yield _finding(
            seen,
            "CV503",
            f"fails where every prefix is as long as the context allows, and nowhere else: "
            f"{_said(play)}",
            "Size buffers for B requests at the maximal length with the drafts behind: a full "
            "mask has B * n * (max_context_len + n) elements.",
            where=_where(play),
            replays_wrong=len(wrong),
            **_of_play(play),
        )


def _paddings(seen: ContractSeen) -> Iterator[Finding]:
    """Yield batches whose real rows change with what padding holds."""
    if any(play.wrong for play in seen.plays if not play.play.padded):
        return  # wrong rows may differ for any reason
    groups = defaultdict(list)
    for play in seen.plays:
        asked = play.play
        if asked.padded and play.fault is None:
            groups[asked.captured, asked.requests, asked.seed].append(play)
    reported = set()
    for group in groups.values():
        numbers = [play for play in group if play.play.padding == "numbers"]
        nans = [play for play in group if play.play.padding == "nan"]
        if len({play.digest for play in numbers}) > 1:
            rule, one, other = "CV501", *_apart(numbers)
        elif numbers and nans and nans[0].digest != numbers[0].digest:
            rule, one, other = "CV502", numbers[0], nans[0]
        else:
            continue
        if rule in reported:
            continue
        reported.add(rule)
        yield _finding(
            seen,
            rule,
            f"what real requests get depends on what padding holds: {one.play.label} and "
            f"{other.play.label} differ",
            "Keep every request to its own rows; select instead of multiplying by a mask, because "
            "0 times NaN is NaN.",
            replays=[one.number, other.number],
            mismatch=str(other.mismatch or one.mismatch),
        )


def _apart(plays: list[PlaySeen]) -> tuple[PlaySeen, PlaySeen]:
    return plays[0], next(play for play in plays if play.digest != plays[0].digest)


def _shrunk(seen: ContractSeen) -> Iterator[Finding]:
    """Yield replays that are wrong because the batch is smaller than the graph."""
    wrong = _wrong(seen)
    padded = [play for play in wrong if play.play.padded]
    # not what padding holds, but that it is there
    if not padded or len(padded) != len(wrong) or _only_at_maximum(seen):
        return
    if any(True for _ in _paddings(seen)):
        return
    yield _finding(
        seen,
        "CV505",
        f"right for full batches, wrong once a batch is smaller than its graph: {_said(padded[0])}",
        "Refresh every buffer of the graph at every replay, the real part from the batch and the "
        "rest with the fill value; what an earlier batch left there is read otherwise.",
        where=_where(padded[0]),
        replays_wrong=len(padded),
        **_of_play(padded[0]),
    )


def _unexplained(seen: ContractSeen, causes: list[Finding]) -> Iterator[Finding]:
    wrong = _wrong(seen)
    if causes:
        if _EXPLAIN_RAISING & {cause.rule for cause in causes}:
            return
        # a cause of wrong numbers is none of an exception
        wrong = [play for play in wrong if play.fault is not None]
    for play in wrong[:1]:
        unwritten = play.mismatch is not None and 0 < play.unchanged == play.mismatch.count
        raised = play.fault is not None
        yield _finding(
            seen,
            "CV902" if raised else "CV602" if unwritten else "CV601",
            f"{'the replay failed' if raised else 'the replay is wrong'}: {_said(play)}",
            "Compare the metadata of this replay with that of the capture.",
            where=_where(play),
            replays_wrong=len(wrong),
            replays=len(seen.plays),
            **_of_play(play),
        )


def _repeats(seen: ContractSeen) -> Iterator[Finding]:
    for play in [play for play in seen.plays if play.repeat is not None and not play.wrong][:1]:
        assert play.repeat is not None
        yield _finding(
            seen,
            "CV604",
            f"a second replay of {play.play.label} gives something else: {play.repeat}",
            "Leave counters and accumulators as the next replay wants to find them.",
            **play.repeat.evidence(),
        )


def _changed(seen: ContractSeen) -> Iterator[Finding]:
    for play in [play for play in seen.plays if play.changed][:1]:
        yield _finding(
            seen,
            "CV506",
            f"{', '.join(play.changed)} changed in {play.play.label}",
            "Write the drafts' slots and the output, nothing else.",
            changed=list(play.changed),
        )


def _vacuous(seen: ContractSeen) -> Iterator[Finding]:
    judged = [play for play in seen.plays if play.fault is None]
    if judged and not any(play.must_change for play in judged):
        yield _finding(
            seen,
            "CV906",
            f"nothing had to change in {len(judged)} replays: nothing was judged",
            "Play batches with at least one request.",
        )
