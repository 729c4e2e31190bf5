"""Plan the attention of a verify step on the device: pieces of equal cost for every block.

Lengths, tree sizes and the request-to-token table live on the device and may change between calls:
nothing is read back, and a captured plan follows them. A step that cannot be planned (see
`PlanCode`) gets an empty plan, by which attention writes nothing; `VerifyPlan.read_status` says
later what was wrong.
"""

from __future__ import annotations

import enum
import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cuverify.arguments import Tensor, device_of
from cuverify.buffers import (
    Buffer,
    check_workspace,
    read,
    refuse_overlap,
    tensor_of,
    tensors_of,
    wrong,
)
from cuverify.errors import ArgumentError
from cuverify.kernel import Kernel
from cuverify.launching import (
    HOST_CTAS,
    Launched,
    capability,
    check_int,
    grid,
    index_ctype,
    multiprocessors,
    number_of,
)
from cuverify.sources import KernelSource, Value
from cuverify.tuning import choice_for, choices_of
from cuverify.verify_variants import RANK_HEADS, VARIANTS, VariantName, variant_of, variants_for

ROW_TILE = 64
"""Query rows (tree tokens times heads) that one entry of the plan is for."""

MAX_TREE_TOKENS = 256
"""Most tree tokens of one request."""

_MAX_BATCH = 1024
_MAX_CTAS = 2048
_MAX_HEADS = 128
_MAX_INT = 2**31 - 1
_GATHERING_CTAS_PER_MULTIPROCESSOR = 4
_GATHERED_BY_THREAD = 8


class PlanCode(enum.IntEnum):
    """What `verify_plan` says of its inputs."""

    PLANNED = 0
    BAD_LENGTH = 1
    """A prefix length is negative, or no int32 together with the tree."""
    BAD_TREE = 2
    """A request has a negative number of tree tokens, or more than ``max_tree_tokens``."""
    BAD_TOKENS = 3
    """`qo_indptr` does not begin at 0, or goes past ``max_tokens``."""
    BAD_POOL_ROW = 4
    """A request's row is none of `req_to_token`."""
    BAD_POOL_WIDTH = 5
    """A prefix is longer than a row of `req_to_token`."""
    BAD_CAPACITY = 6
    """All prefixes together are longer than `kv_indices`, or than int32 bounds count."""


_FAULTS = {
    PlanCode.BAD_LENGTH: ("seq_lens[{request}]", "a prefix has 0 to 2**31 - 257 rows"),
    PlanCode.BAD_TREE: (
        "tree tokens of request {request} (qo_indptr)",
        "wants 0 to {max_tree_tokens}, in ascending bounds",
    ),
    PlanCode.BAD_TOKENS: ("qo_indptr", "the bounds go from 0 to at most {max_tokens}"),
    PlanCode.BAD_POOL_ROW: ("req_pool_indices[{request}]", "is no row of req_to_token"),
    PlanCode.BAD_POOL_WIDTH: ("seq_lens[{request}]", "is more than a row of req_to_token holds"),
    PlanCode.BAD_CAPACITY: (
        "seq_lens[{request}]",
        "the prefixes up to this one do not fit kv_indices, or have 2**31 rows or more",
    ),
}


@dataclass(frozen=True)
class PlanStatus:
    """What `verify_plan` found.

    Attributes
    ----------
    code : PlanCode
    request : int
        The first request with a fault; -1 where there is none.
    value : int
        The value at fault, else 0.
    """

    code: PlanCode
    request: int
    value: int

    @classmethod
    def from_words(cls, words: Sequence[int]) -> PlanStatus:
        """Return the meaning of the four int32 that the kernel writes."""
        code, request, low, high = (int(word) for word in words)
        return cls(PlanCode(code), request, (low & 0xFFFFFFFF) | high << 32)

    def raise_for_fault(self, *, max_tokens: int, max_tree_tokens: int) -> None:
        """Raise if the step could not be planned.

        Raises
        ------
        ArgumentError
            Naming the tensor, the request and the value.
        """
        if self.code == PlanCode.PLANNED:
            return
        where, reason = _FAULTS[self.code]
        numbers = {
            "request": self.request,
            "max_tokens": max_tokens,
            "max_tree_tokens": max_tree_tokens,
        }
        raise ArgumentError(
            where.format(**numbers), self.value, reason.format(**numbers) + "; nothing was planned"
        )


def max_row_tiles(max_batch: int, max_tokens: int, heads: int) -> int:
    """Return the most row tiles that requests with so many tree tokens in all can have."""
    # Rows of a request are a multiple of `grain`: that many of its last tile are used at least.
    grain = math.gcd(heads, ROW_TILE)
    filled = (max_tokens * heads + max_batch * (ROW_TILE - grain)) // ROW_TILE
    return min(filled, max_tokens * -(-heads // ROW_TILE))


def plan_workspace(max_batch: int, max_tokens: int, heads: int, num_ctas: int) -> dict[str, Buffer]:
    """Return the buffers that a plan is written into.

    Parameters
    ----------
    max_batch : int
        Most requests of a step, padded ones included; up to 1,024.
    max_tokens : int
        Most tree tokens of all requests together.
    heads : int
        Query rows of a tree token, up to 128: 64 / heads tokens are a row tile.
    num_ctas : int
        Blocks that will run `verify_partials`, up to 2,048.

    Returns
    -------
    dict of str to Buffer
        The fields of `PlanWorkspace`.

    Raises
    ------
    ArgumentError
        Naming the argument.
    """
    max_batch = check_int("max_batch", max_batch, 1, _MAX_BATCH, "requests")
    max_tokens = check_int("max_tokens", max_tokens, 1, _MAX_BATCH * MAX_TREE_TOKENS, "tree tokens")
    num_ctas = check_int("num_ctas", num_ctas, 1, _MAX_CTAS, "blocks")
    heads = check_int("heads", heads, 1, _MAX_HEADS, "query rows of a token")
    return {
        "work": Buffer((max_row_tiles(max_batch, max_tokens, heads) + num_ctas, 6), "int32"),
        "cta_work": Buffer((num_ctas, 4), "int32"),
        "combine_indptr": Buffer((num_ctas + 1,), "int32"),
        "combine_tiles": Buffer((num_ctas, 4), "int32"),
        "kv_indptr": Buffer((max_batch + 1,), "int32"),
        "status": Buffer((4,), "int32"),
    }


@dataclass(frozen=True, eq=False)
class PlanWorkspace:
    """The buffers that a plan is written into, sized by `plan_workspace`, on one device.

    All int32, all written completely by every call of the plan.

    Attributes
    ----------
    work : tensor, shape (max_work, 6)
        Request, row tile, begin and end of the range of the prefix, partial slot (-1 where the row
        tile is in one piece), pieces of this row tile. -1 behind the last entry.
    cta_work : tensor, shape (num_ctas, 4)
        The entries that each block takes: first, end, step, and 0, or 1 or 2 where two blocks
        divide the columns of V.
    combine_indptr : tensor, shape (num_ctas + 1,)
        Bounds of the partial slots of each row tile that is cut.
    combine_tiles : tensor, shape (num_ctas, 4)
        Request and row tile of those, the request's first token and its number of tokens; -1 behind
        the last.
    kv_indptr : tensor, shape (max_batch + 1,)
        Bounds of each prefix in `kv_indices`; not touched where the caller has bounds of its own.
    status : tensor, shape (4,)
        See `PlanStatus.from_words`.
    """

    work: Any
    cta_work: Any
    combine_indptr: Any
    combine_tiles: Any
    kv_indptr: Any
    status: Any

    @classmethod
    def allocate(
        cls, like: Any, *, max_batch: int, max_tokens: int, heads: int, num_ctas: int | None = None
    ) -> PlanWorkspace:
        """Return new buffers of the library and on the device of the tensor `like`.

        `num_ctas` is one block a multiprocessor if absent, and 2 on the host lane.
        """
        if num_ctas is None:
            num_ctas = multiprocessors(tensor_of("like", like).device) or HOST_CTAS
        sizes = plan_workspace(max_batch, max_tokens, heads, num_ctas)
        return cls(**{name: buffer.zeros(like) for name, buffer in sizes.items()})


class VerifyPlan:
    """A plan whose checks are done; calling it plans the step that the tensors now describe.

    Make it before a capture. All tensors may change in place between calls.

    Parameters
    ----------
    seq_lens : tensor of int32 or int64, shape (B,)
        Rows of each request's prefix, drafts excluded. Read only.
    qo_indptr : tensor of int32 or int64, shape (B + 1,)
        Bounds of each request's tree tokens. Read only.
    heads : int
        Query rows of a tree token: the query heads of this rank, for `VerifyAttention`.
    max_tokens : int
        Most tree tokens of all requests: the rows that queries and outputs will have.
    max_tree_tokens : int
        Most tree tokens of one request, up to 256.
    workspace : PlanWorkspace, optional
        The caller's buffers, for at least `B` requests; of the plan's own if absent. Its `cta_work`
        says how many blocks will run.
    kv_indices : tensor of int32 or int64, optional
        Slots of all prefixes: gathered by the plan where `req_to_token` is given, else the
        caller's.
    kv_indptr : tensor of int32, shape (B + 1,), optional
        The caller's bounds of the prefixes in `kv_indices`. Where they are absent, the prefixes lie
        one behind the other, and the plan writes the bounds. Attention reads bounds of int32, so
        that the prefixes of a step have at most 2**31 - 1 rows; `VerifyLists` writes bounds of
        int64, too, for others.
    req_to_token : tensor of int32, shape (rows, width), any row stride, optional
        Slots by request and position; what a row holds behind its prefix is not read.
    req_pool_indices : tensor of int32 or int64, shape (B,), optional
        Row of each request; goes with `req_to_token`.
    variant : {"portable", "sm90"}, optional
        The text that will attend, which decides how finely the step is cut: any text can follow any
        plan. The one that is best for the GPU if absent.
    values : mapping of str to int, optional
        `-D` values of kernels_cu/verify_plan.cu, such as ``{"START_ROWS": 32}``, in place of the
        variant's own and of those that were tuned for the GPU.

    Attributes
    ----------
    batch, heads, num_ctas, max_tokens, max_tree_tokens : int
    values : dict of str to int
        The `-D` values that decide the cuts; those of the text where one is absent.
    kv_indptr, kv_indices : tensor
        What attention reads: the caller's or the plan's; `kv_indices` may be None.
    qo_indptr : tensor
        The caller's.
    launch : BoundLaunch
        One block plans; further ones gather `kv_indices` where `req_to_token` is given.

    Raises
    ------
    ArgumentError
        Naming the argument and its value.

    Examples
    --------
    >>> plan = VerifyPlan(seq_lens, qo_indptr, heads=8, max_tokens=64)      # doctest: +SKIP
    >>> plan(); plan.read_status()                                          # doctest: +SKIP
    """

    def __init__(
        self,
        seq_lens: Any,
        qo_indptr: Any,
        *,
        heads: int,
        max_tokens: int,
        max_tree_tokens: int = MAX_TREE_TOKENS,
        workspace: PlanWorkspace | None = None,
        kv_indices: Any = None,
        kv_indptr: Any = None,
        req_to_token: Any = None,
        req_pool_indices: Any = None,
        variant: VariantName | None = None,
        values: Mapping[str, int] | None = None,
    ) -> None:
        max_tree_tokens = check_int(
            "max_tree_tokens", max_tree_tokens, 1, MAX_TREE_TOKENS, "tokens of a tree"
        )
        given = {"seq_lens": seq_lens, "qo_indptr": qo_indptr}
        optional = {
            "kv_indices": kv_indices,
            "kv_indptr": kv_indptr,
            "req_to_token": req_to_token,
            "req_pool_indices": req_pool_indices,
        }
        given |= {name: value for name, value in optional.items() if value is not None}
        inputs = {name: tensor_of(name, value) for name, value in given.items()}
        batch = _length(inputs["seq_lens"])
        if not 1 <= batch <= _MAX_BATCH:
            raise wrong(inputs["seq_lens"], f"wants 1 to {_MAX_BATCH} requests")
        for name in ("qo_indptr", "kv_indptr"):
            if name in inputs and _length(inputs[name]) != batch + 1:
                raise wrong(inputs[name], f"wants {batch + 1} bounds for {batch} requests")
        gathers = _gathers(inputs)
        _check_own_lists(inputs)
        if workspace is None:
            workspace = PlanWorkspace.allocate(
                seq_lens, max_batch=batch, max_tokens=max_tokens, heads=heads
            )
        held = tensors_of("workspace", workspace)
        device = device_of([*inputs.values(), *held.values()])
        variant = variant or variant_of(capability(device))
        if variant not in VARIANTS:
            raise ArgumentError("variant", variant, f"wants one of {', '.join(VARIANTS)}")
        num_ctas = _rows(held["workspace.cta_work"])
        sizes = plan_workspace(batch, max_tokens, heads, num_ctas)
        need = f"{batch} requests, {max_tokens} tokens, {heads} heads and {num_ctas} blocks"
        check_workspace(held, sizes, need)
        heads, max_tokens = int(heads), int(max_tokens)  # they may be numpy's
        listed = [inputs["kv_indices"]] if gathers else []
        others = [tensor for name, tensor in inputs.items() if name != "kv_indices" or not gathers]
        refuse_overlap([*held.values(), *listed], others)

        self.workspace = workspace
        self.batch = batch
        self.heads = heads
        self.num_ctas = num_ctas
        self.max_tokens = max_tokens
        self.max_tree_tokens = max_tree_tokens
        if values is None:
            choice = choice_for(device, variant=variant, rows=max_tree_tokens * heads)
            values = {**VARIANTS[variant].plan, **choice.plan}
        self.values = dict(values)
        self.qo_indptr = qo_indptr
        self.kv_indices = kv_indices
        self.kv_indptr = workspace.kv_indptr[: batch + 1] if kv_indptr is None else kv_indptr
        types: dict[str, int | str] = {
            "HEADS": heads,
            "SEQ_INDEX": index_ctype(inputs["seq_lens"]),
            "QO_INDEX": index_ctype(inputs["qo_indptr"]),
        }
        if gathers:
            types["POOL_INDEX"] = index_ctype(inputs["req_pool_indices"])
            types["KV_INDEX"] = index_ctype(inputs["kv_indices"])
        kernel = verify_plan_kernel(**{**types, **self.values})
        threads = number_of(kernel, "PLAN_THREADS")
        table = inputs.get("req_to_token")
        rows, width = (0, 0) if table is None else table.shape
        # Bounds of the caller's own need not lie one behind the other.
        packed = kv_indptr is None and kv_indices is not None
        capacity = min(_length(inputs["kv_indices"]) if packed else _MAX_INT, _MAX_INT)
        gathering = 0
        if table is not None:
            useful = -(-capacity // (_GATHERED_BY_THREAD * threads))
            gathering = grid(None, table.device, useful, _GATHERING_CTAS_PER_MULTIPROCESSOR)
        self.launch = kernel.bind(
            1 + gathering, threads,
            seq_lens, qo_indptr, req_pool_indices if gathers else None, req_to_token,
            0 if table is None else table.strides[0],
            batch, max_tokens, max_tree_tokens, num_ctas, _rows(held["workspace.work"]),
            rows, width, capacity,
            workspace.work, workspace.cta_work, workspace.combine_indptr[: num_ctas + 1],
            workspace.combine_tiles[:num_ctas],
            self.kv_indptr if kv_indptr is None else None, kv_indices if gathers else None,
            workspace.status,
        )  # fmt: skip

    def __call__(self) -> None:
        """Plan, and gather the index list: one launch on torch's current stream."""
        self.launch()

    def read_status(self) -> PlanStatus:
        """Return what the last call found. Waits for the device: not for use inside a capture.

        Raises
        ------
        ArgumentError
            If the step could not be planned, naming the tensor, the request and the value.
        """
        status = self.peek_status()
        status.raise_for_fault(max_tokens=self.max_tokens, max_tree_tokens=self.max_tree_tokens)
        return status

    def peek_status(self) -> PlanStatus:
        """Return what the last call found, whatever it is. Waits for the device."""
        return PlanStatus.from_words(read(self.workspace.status).tolist())


def launched(arch: str) -> Iterator[Launched]:
    """Yield the `-D` values of plans for `VerifyAttention`; see `cuverify.launched`."""
    sets = [
        {**VARIANTS[name].plan, **choice.plan}
        for name in variants_for(arch)
        for choice in choices_of(arch, name)
    ]
    yield from launched_plans(RANK_HEADS, sets)


def launched_plans(heads: Sequence[int], sets: Sequence[Mapping[str, Value]]) -> Iterator[Launched]:
    """Yield the `-D` values that plans launch with.

    Parameters
    ----------
    heads : sequence of int
        Query rows of a token.
    sets : sequence of mappings
        Values of the text that decide the cuts.
    """
    indices = ("SEQ_INDEX", "QO_INDEX")
    for gathered in ((), ("POOL_INDEX", "KV_INDEX")):
        yield Launched("verify_plan", (*indices, *gathered), {"HEADS": heads}, sets)


def verify_plan_kernel(**values: int | str) -> Kernel:
    """Return `verify_plan` with these `-D` values."""
    return _kernel(tuple(sorted(values.items())))


@functools.cache
def _kernel(values: tuple[tuple[str, int | str], ...]) -> Kernel:
    return Kernel(KernelSource.from_package("verify_plan", values=dict(values)), "verify_plan")


def _gathers(inputs: Mapping[str, Tensor]) -> bool:
    """Return whether the plan makes the index list; refuse half a table."""
    table = [name for name in ("req_to_token", "req_pool_indices") if name in inputs]
    if not table:
        return False
    for name in ("req_to_token", "req_pool_indices", "kv_indices"):
        if name not in inputs:
            raise ArgumentError(name, None, f"{table[0]} is given; gathering slots needs this, too")
    if "kv_indptr" in inputs:
        raise wrong(inputs["kv_indptr"], "the plan makes the list and its bounds from req_to_token")
    tokens = inputs["req_to_token"]
    if len(tokens.shape) != 2 or 0 in tokens.shape:
        raise wrong(tokens, f"has shape {list(tokens.shape)}; wants [rows, width]")
    if _length(inputs["req_pool_indices"]) != _length(inputs["seq_lens"]):
        requests = _length(inputs["seq_lens"])
        raise wrong(inputs["req_pool_indices"], f"wants one row for each of {requests} requests")
    return True


def _check_own_lists(inputs: Mapping[str, Tensor]) -> None:
    """Refuse what attention could not read: it is not launched with the plan."""
    for name in ("kv_indptr", "kv_indices"):
        if name not in inputs:
            continue
        tensor = inputs[name]
        if index_ctype(tensor) != "int" and name == "kv_indptr":
            raise wrong(tensor, f"dtype {tensor.dtype}: attention reads bounds of int32")
        if not tensor.is_contiguous:
            raise wrong(tensor, "is not contiguous")


def _length(tensor: Tensor) -> int:
    if len(tensor.shape) != 1:
        raise wrong(tensor, f"has {len(tensor.shape)} dimensions, wants one")
    return tensor.shape[0]


def _rows(tensor: Tensor) -> int:
    if len(tensor.shape) != 2:
        raise wrong(tensor, f"has {len(tensor.shape)} dimensions, wants two")
    return tensor.shape[0]
