"""Oracle of the plan of a verify step: the rule walked along step by step, and what any plan owes.

`verify_plan` follows the rule that the kernel's text states, in Python's whole numbers and in the
order of the axis, where the kernel bisects in parallel. `faults` knows no rule: it says of any plan
whether attention that runs by it reads every KV row exactly once for every row tile.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cuverify.errors import ArgumentError

ROW_TILE = 64
"""Query rows, tokens times heads, that one entry of a plan is for."""

TILE = 16
MAX_TREE = 256

PLANNED = 0
BAD_LENGTH = 1
BAD_TREE = 2
BAD_TOKENS = 3
BAD_POOL_ROW = 4
BAD_POOL_WIDTH = 5
BAD_CAPACITY = 6

_MAX_ROWS = 2**31 - 1 - MAX_TREE

Ints = NDArray[np.int32]


@dataclass(frozen=True, eq=False)
class Plan:
    """The outputs of the planning kernel.

    Attributes
    ----------
    work : ndarray of int32, shape (max_work, 6)
        Request, row tile, begin and end of the range of the prefix, partial slot (-1 where the row
        tile is in one piece), pieces of this row tile. -1 behind the last entry.
    cta_work : ndarray of int32, shape (num_ctas, 4)
        The entries that each block takes: first, end, step, and 0, or 1 or 2 for the half of V's
        columns.
    combine_indptr : ndarray of int32, shape (num_ctas + 1,)
        Bounds of the partial slots of each row tile that is cut.
    combine_tiles : ndarray of int32, shape (num_ctas, 4)
        Request and row tile of those, the request's first token and its number of tokens; -1 behind
        the last.
    kv_indptr : ndarray of int32, shape (B + 1,)
        Bounds of each prefix in the index list.
    status : ndarray of int32, shape (4,)
        What is wrong (`PLANNED`, nothing), the request, low and high word of the value at fault.
    """

    work: Ints
    cta_work: Ints
    combine_indptr: Ints
    combine_tiles: Ints
    kv_indptr: Ints
    status: Ints


class _Piece(NamedTuple):
    request: int
    first_tile: int  # row tiles `first_tile` to `first_tile + width`
    begin: int
    end: int
    number: int  # among the pieces of these row tiles
    pieces: int
    team: int


def verify_plan(
    seq_lens: NDArray[Any],
    qo_indptr: NDArray[Any],
    *,
    heads: int,
    num_ctas: int,
    max_work: int,
    max_tokens: int | None = None,
    max_tree_tokens: int = MAX_TREE,
    req_pool_indices: NDArray[Any] | None = None,
    pool_rows: int = 0,
    pool_width: int = 0,
    kv_capacity: int = 2**31 - 1,
    start_rows: int = 48,
    least_rows: int = 32,
    root_halves: int = 3,
    halves_rows: int = 0,
    grain: int = TILE,
) -> Plan:
    """Plan a step.

    Parameters
    ----------
    seq_lens : ndarray of int, shape (B,)
        Rows of each prefix, the tree not among them.
    qo_indptr : ndarray of int, shape (B + 1,)
        Bounds of each request's tree tokens.
    heads : int
        Query heads.
    num_ctas : int
        Blocks that will run the plan.
    max_work : int
        Entries of `work`.
    max_tokens : int, optional
        Most tree tokens of all requests; no limit if absent.
    max_tree_tokens : int
        Most tree tokens of one request, up to 256.
    req_pool_indices : ndarray of int, shape (B,), optional
        Rows of the request-to-token table, which has `pool_rows` rows of `pool_width` tokens. Not
        judged if absent.
    kv_capacity : int
        Length of the index list.
    start_rows, least_rows, root_halves : int
        What starting a row tile costs in KV rows; the shortest piece; halves in the factor of the
        square root in the bound on how finely the longest request is cut.
    halves_rows : int
        The longest range for which two blocks divide the columns of V.
    grain : int
        KV rows that attention multiplies at once.

    Returns
    -------
    Plan
        Empty, with a status, where something is wrong with a request.

    Raises
    ------
    ArgumentError
        The plan does not fit `max_work`.
    """
    lens = [int(length) for length in seq_lens]
    bounds = [int(bound) for bound in qo_indptr]
    rows = None if req_pool_indices is None else [int(row) for row in req_pool_indices]
    limit = 2**31 - 1 if max_tokens is None else max_tokens
    status = _judge(lens, bounds, limit, max_tree_tokens, rows, pool_rows, pool_width, kv_capacity)
    planned = int(status[0]) == PLANNED
    trees = [end - begin for begin, end in itertools.pairwise(bounds)]
    if not planned:
        lens, trees = [0] * len(lens), [0] * len(trees)
    width = _team_width([_row_tiles(tree, heads) for tree in trees], num_ctas)
    teams, quota, halves = _quota(
        lens, trees, heads, width, num_ctas // width, start_rows, least_rows, root_halves,
        halves_rows, grain,
    )  # fmt: skip
    pieces = list(_pieces(lens, trees, heads, width, quota, start_rows, least_rows))
    cut = any(piece.pieces > 1 for piece in pieces)
    spare = num_ctas % width if cut and not halves else 0
    if spare:
        each = -(-width // spare)
        bundles = _bundles(trees, heads, width)
        cost = sum(start_rows + lens[request] + trees[request] for request, _ in bundles)
        less = -(-max(cost, start_rows) * each // (teams * each + 1))
        less += -less % TILE
        longest = max(length + tree for length, tree in zip(lens, trees, strict=True))
        root = -(-root_halves * math.isqrt(longest) // 2)
        if 8 * grain < less < quota and less >= max(root, least_rows, 2 * each * start_rows):
            teams, quota = teams + 1, less
            pieces = list(_pieces(lens, trees, heads, width, quota, start_rows, least_rows))
        else:
            spare = 0
    return _written(
        pieces, lens, qo_indptr, width, teams, spare, halves, num_ctas, max_work, status
    )


def kv_list(
    kv_indptr: NDArray[Any], req_pool_indices: NDArray[Any], req_to_token: NDArray[Any]
) -> NDArray[np.int64]:
    """Gather the slots of all prefixes, request by request.

    Parameters
    ----------
    kv_indptr : ndarray of int, shape (B + 1,)
        Bounds of each prefix in the list.
    req_pool_indices : ndarray of int, shape (B,)
        Rows of `req_to_token`.
    req_to_token : ndarray of int, shape (rows, width)
        Slots by request and position.

    Returns
    -------
    ndarray of int64, shape (kv_indptr[B],)
    """
    listed: list[int] = []
    for request, row in enumerate(req_pool_indices):
        length = int(kv_indptr[request + 1]) - int(kv_indptr[request])
        if length:  # the row of a request without a prefix is not read, and may be anything
            listed.extend(req_to_token[int(row), :length].tolist())
    return np.array(listed, np.int64)


def faults(
    plan: Plan,
    seq_lens: NDArray[Any],
    qo_indptr: NDArray[Any],
    *,
    heads: int,
    max_slots: int | None = None,
) -> list[str]:
    """Say what a plan that is not empty owes to attention; nothing where it is right.

    It owes: every row tile of every request meets its prefix exactly once, in pieces that are
    multiples of 16 rows long but for the last; exactly one block runs each piece; partial slots
    are distinct, those of a row tile side by side and in the order of its pieces; all row tiles
    that are cut are combined, and no others; blocks that run side by side have the same rows.

    Parameters
    ----------
    plan : Plan
        Of whatever planner.
    seq_lens, qo_indptr, heads
        As in `verify_plan`.
    max_slots : int, optional
        Partial slots that there are; fewer than twice the blocks if absent.

    Returns
    -------
    list of str
    """
    num_ctas = len(plan.cta_work)
    max_slots = 2 * num_ctas - 1 if max_slots is None else max_slots
    found: list[str] = []
    used = int(np.count_nonzero(plan.work[:, 0] >= 0))
    work = [tuple(map(int, entry)) for entry in plan.work[:used]]
    if (plan.work[used:] != -1).any() or (plan.work[:used, 0] < 0).any():
        found.append("entries that are not used are not all -1, or stand before used ones")
        return found

    ranges: dict[tuple[int, int], list[tuple[int, int, int, int]]] = {}
    for request, row_tile, begin, end, slot, splits in work:
        ranges.setdefault((request, row_tile), []).append((begin, end, slot, splits))
    wanted = {
        (request, row_tile)
        for request in range(len(seq_lens))
        for row_tile in range(
            _row_tiles(int(qo_indptr[request + 1]) - int(qo_indptr[request]), heads)
        )
    }
    for tile in sorted(wanted - ranges.keys()):
        found.append(f"row tile {tile[1]} of request {tile[0]} is not planned")
    for tile in sorted(ranges.keys() - wanted):
        found.append(f"there is no row tile {tile[1]} of request {tile[0]}")
    for (request, row_tile), pieces in ranges.items():
        name = f"row tile {row_tile} of request {request}"
        pieces.sort()
        if request >= len(seq_lens):
            continue
        ends = [0, *(end for _, end, _, _ in pieces)]
        if ends[:-1] != [begin for begin, _, _, _ in pieces] or ends[-1] != int(seq_lens[request]):
            shown = [(begin, end) for begin, end, _, _ in pieces]
            found.append(f"{name} is cut into {shown}, the prefix has {int(seq_lens[request])}")
        if any(begin % TILE for begin, _, _, _ in pieces):
            found.append(f"{name} is cut elsewhere than at multiples of {TILE}")
        if len(pieces) > 1 and any(end <= begin for begin, end, _, _ in pieces):
            found.append(f"{name} has an empty piece")
        if any(splits != len(pieces) for _, _, _, splits in pieces):
            found.append(f"{name} has {len(pieces)} pieces and says something else")
        if len(pieces) == 1 and pieces[0][2] != -1:
            found.append(f"{name} is in one piece and has slot {pieces[0][2]}")

    found.extend(_combine_faults(plan, qo_indptr, ranges, max_slots))
    found.extend(_order_faults(plan, work))
    return found


def _combine_faults(
    plan: Plan,
    qo_indptr: NDArray[Any],
    ranges: dict[tuple[int, int], list[tuple[int, int, int, int]]],
    max_slots: int,
) -> Iterator[str]:
    cut = {tile: pieces for tile, pieces in ranges.items() if len(pieces) > 1}
    slots = Counter(slot for pieces in cut.values() for _, _, slot, _ in pieces)
    if slots and (min(slots) < 0 or max(slots) >= max_slots):
        yield f"partial slots go from {min(slots)} to {max(slots)}; there are {max_slots}"
    for slot in sorted(slot for slot, times in slots.items() if times > 1):
        yield f"partial slot {slot} is given twice"
    combined = [tuple(map(int, entry)) for entry in plan.combine_tiles if entry[0] >= 0]
    tiles = [(request, row_tile) for request, row_tile, _, _ in combined]
    if sorted(tiles) != sorted(cut):
        yield f"row tiles {tiles} are combined, those that are cut are {sorted(cut)}"
        return
    if (plan.combine_tiles[len(tiles) :] != -1).any():
        yield "row tiles behind the last that is combined are not all -1"
    for request, row_tile, first_token, tokens in combined:
        begin, end = int(qo_indptr[request]), int(qo_indptr[request + 1])
        if (first_token, tokens) != (begin, end - begin):
            yield (
                f"row tile {row_tile} of request {request} combines {tokens} tokens from "
                f"{first_token} on, the request has {end - begin} from {begin} on"
            )
    bounds = plan.combine_indptr.tolist()
    for number, tile in enumerate(tiles):
        own = [slot for _, _, slot, _ in cut[tile]]
        if own != list(range(bounds[number], bounds[number + 1])):
            yield (
                f"row tile {tile[1]} of request {tile[0]} has slots {own} and combines "
                f"{bounds[number]} to {bounds[number + 1]}"
            )


def _order_faults(plan: Plan, work: Sequence[tuple[int, ...]]) -> Iterator[str]:
    runs: Counter[int] = Counter()  # two for an entry: one a half of V's columns
    halves: Counter[tuple[int, int]] = Counter()
    for block, (first, end, step, half) in enumerate(plan.cta_work.tolist()):
        if step < 1 or half not in (0, 1, 2):
            yield f"the step of block {block} is {step}, its half {half}"
            return
        for entry in range(first, end, step):
            runs[entry] += 2 if half == 0 else 1
            halves[entry, half] += 1
    for entry in range(len(work)):
        if runs[entry] != 2 or max(halves[entry, half] for half in range(3)) > 1:
            yield f"entry {entry} is run {runs[entry] / 2:g} times"
    if runs and max(runs) >= len(work):
        yield f"entry {max(runs)} is run, there are {len(work)}"
    # blocks that run side by side read the same rows, so that DRAM gives them once; those that are
    # left over take them by turns
    num_ctas, width = len(plan.cta_work), int(plan.cta_work[0, 2])
    left_over = num_ctas % width
    for block, (first, end, step, _) in enumerate(plan.cta_work.tolist()):
        if block >= num_ctas - left_over and step == left_over:
            continue
        if step != width:
            yield f"the step of block {block} is {step}, of its team's {width}"
            return
        for entry in range(first, min(end, len(work)), step):
            beside = work[entry - entry % step : entry - entry % step + step]
            if len({(request, begin, last) for request, _, begin, last, _, _ in beside}) > 1:
                yield f"entries {entry - entry % step} to {entry} run side by side on other rows"
            tiles = [row_tile for _, row_tile, *_ in beside]
            if tiles != list(range(tiles[0], tiles[0] + step)):
                yield f"entries beside {entry} are row tiles {tiles}"


def _judge(
    lens: Sequence[int],
    bounds: Sequence[int],
    max_tokens: int,
    max_tree_tokens: int,
    rows: Sequence[int] | None,
    pool_rows: int,
    pool_width: int,
    kv_capacity: int,
) -> Ints:
    """Return the status: the first request with a fault, and its lowest code."""
    listed = 0
    for b, length in enumerate(lens):
        tree = bounds[b + 1] - bounds[b]
        if not 0 <= length <= _MAX_ROWS:
            return _status(BAD_LENGTH, b, length)
        if not 0 <= tree <= max_tree_tokens:
            return _status(BAD_TREE, b, tree)
        if b == 0 and bounds[0] != 0:
            return _status(BAD_TOKENS, b, bounds[0])
        if bounds[b + 1] > max_tokens:
            return _status(BAD_TOKENS, b, bounds[b + 1])
        if rows is not None and not 0 <= rows[b] < pool_rows:
            return _status(BAD_POOL_ROW, b, rows[b])
        if rows is not None and length > pool_width:
            return _status(BAD_POOL_WIDTH, b, length)
        listed += length
        if length and listed > kv_capacity:
            return _status(BAD_CAPACITY, b, length)
    return _status(PLANNED, -1, 0)


def _status(code: int, request: int, value: int) -> Ints:
    low, high = np.array([value], np.int64).astype("<i8").view("<i4")
    return np.array([code, request, low, high], np.int32)


def _row_tiles(tree: int, heads: int) -> int:
    return -(-tree * heads // ROW_TILE)


def _team_width(row_tiles: Sequence[int], num_ctas: int) -> int:
    """Return the most blocks side by side that divide all requests' row tiles and waste few."""
    present = [tiles for tiles in row_tiles if tiles]
    fitting = [
        width
        for width in range(1, min([num_ctas, *present]) + 1)
        if all(tiles % width == 0 for tiles in present) and num_ctas % width * 8 <= num_ctas
    ]
    return max(fitting) if present else 1


def _bundles(trees: Sequence[int], heads: int, width: int) -> list[tuple[int, int]]:
    return [
        (request, number * width)
        for request, tree in enumerate(trees)
        for number in range(_row_tiles(tree, heads) // width)
    ]


def _quota(
    lens: Sequence[int],
    trees: Sequence[int],
    heads: int,
    width: int,
    teams: int,
    start_rows: int,
    least_rows: int,
    root_halves: int,
    halves_rows: int,
    grain: int,
) -> tuple[int, int, bool]:
    """Return the teams, the cost that each takes, and whether two blocks share it."""
    bundles = _bundles(trees, heads, width)
    cost = sum(start_rows + lens[request] + trees[request] for request, _ in bundles)
    axis = max(cost - start_rows, 0)
    longest = max((length + tree for length, tree in zip(lens, trees, strict=True)), default=0)
    root = -(-root_halves * math.isqrt(longest) // 2)

    def quota(count: int) -> int:
        least = max(-(-axis // count), root, least_rows)
        return least + -least % (grain if least <= 8 * grain else TILE)

    halves = teams >= 2 and quota(teams // 2) <= halves_rows
    teams = teams // 2 if halves else teams
    return teams, quota(teams), halves


def _pieces(
    lens: Sequence[int],
    trees: Sequence[int],
    heads: int,
    width: int,
    quota: int,
    start_rows: int,
    least_rows: int,
) -> Iterator[_Piece]:
    """Walk along the axis of cost, bundle by bundle, and cut."""
    start = -start_rows  # the axis begins at the first bundle's first row
    for request, first_tile in _bundles(trees, heads, width):
        prefix, total = lens[request], lens[request] + trees[request]
        rows_at = start + start_rows  # where the bundle's first KV row lies on the axis
        cuts: list[tuple[int, int]] = []  # team behind the cut, KV row
        first_team = (rows_at + total - 1) // quota
        first = True
        for team in range(start // quota + 1, first_team + 1):
            row = (team * quota - rows_at) // TILE * TILE
            if row < least_rows:
                continue  # too near the bundle's start, or before it
            if first:
                # the first piece is for the team in front of this cut, whether it is kept or not
                first_team, first = team - 1, False
            if row < prefix and total - row >= least_rows:
                cuts.append((team, row))
        begins = [0, *(row for _, row in cuts)]
        ends = [*begins[1:], prefix]
        owners = [first_team, *(team for team, _ in cuts)]
        for number, (begin, end, team) in enumerate(zip(begins, ends, owners, strict=True)):
            yield _Piece(request, first_tile, begin, end, number, len(begins), team)
        start = rows_at + total


def _written(
    pieces: Sequence[_Piece],
    lens: Sequence[int],
    qo_indptr: NDArray[Any],
    width: int,
    teams: int,
    spare: int,
    halves: bool,
    num_ctas: int,
    max_work: int,
    status: Ints,
) -> Plan:
    """Write pieces down in the form that the kernels read."""
    if len(pieces) * width > max_work:
        raise ArgumentError("max_work", max_work, f"the plan has {len(pieces) * width} entries")
    work = np.full((max_work, 6), -1, np.int32)
    combine_indptr = np.zeros(num_ctas + 1, np.int32)
    combine_tiles = np.full((num_ctas, 4), -1, np.int32)
    entry = slots = tiles = 0
    for piece in pieces:
        cut = piece.pieces > 1
        if cut and piece.number == 0:
            for lane in range(width):
                begin, end = map(int, qo_indptr[piece.request : piece.request + 2])
                row_tile = piece.first_tile + lane
                combine_tiles[tiles] = piece.request, row_tile, begin, end - begin
                combine_indptr[tiles] = slots + lane * piece.pieces
                tiles += 1
            slots += width * piece.pieces
        for lane in range(width):
            slot = slots - (width - lane) * piece.pieces + piece.number if cut else -1
            work[entry] = (
                piece.request,
                piece.first_tile + lane,
                piece.begin,
                piece.end,
                slot,
                piece.pieces,
            )
            entry += 1
    combine_indptr[tiles:] = slots

    own = Counter(piece.team for piece in pieces)
    cta_work = np.zeros((num_ctas, 4), np.int32)
    cta_work[:, 2] = width
    before = 0
    if spare:  # the last team: its blocks take entries by turns
        end = len(pieces) * width
        first = end - own[teams - 1] * width
        for block in range(spare):
            cta_work[num_ctas - spare + block, :3] = min(first + block, end), end, spare
    for team in range(teams - (spare > 0)):
        end = before + own[team]
        for lane in range(width):
            block, range_ = team * width + lane, (before * width + lane, end * width)
            if halves:
                cta_work[2 * block : 2 * block + 2, :2] = range_
                cta_work[2 * block : 2 * block + 2, 3] = 1, 2
            else:
                cta_work[block, :2] = range_
        before = end
    return Plan(
        work=work,
        cta_work=cta_work,
        combine_indptr=combine_indptr,
        combine_tiles=combine_tiles,
        kv_indptr=np.concatenate([[0], np.cumsum(lens)]).astype(np.int32),
        status=status,
    )
