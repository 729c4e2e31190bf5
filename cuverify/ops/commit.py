"""Commit accepted paths, by rows or by table, on the device and without a read-back.

By rows: the accepted rows move to the front of each request's window, in all pools that share the
slots. By table: the slot ids of the window change their order, and no row moves. Either way the
first ``seq_lens + accept_token_num + 1`` tokens of a request's table row are then its own.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from cuverify.arguments import Tensor, device_of
from cuverify.buffers import Buffer, read, refuse_overlap, tensor_of, wrong
from cuverify.errors import ArgumentError
from cuverify.kernel import Kernel
from cuverify.launching import Launched, check_int, grid, index_ctype, number_of
from cuverify.ops.relocate import SCRATCH_BYTES, RelocatePlan, RelocateWorkspace
from cuverify.sources import KernelSource

Way = Literal["rows", "table"]

_CTAS_PER_MULTIPROCESSOR = 4


class CommitCode(enum.IntEnum):
    """Verdict of `commit_plan`. Where a request is at fault nothing is committed."""

    COMMITTED = 0
    BAD_WINDOW = 1
    """Bounds do not ascend, or a tree has no node or more than 1,024."""
    BAD_ACCEPTED = 2
    """The number of accepted nodes is negative, or not below the depth."""
    BAD_NODE = 3
    """A path does not start with the root, does not ascend, or leaves its window."""
    BAD_POOL_ROW = 4
    """A request has no row in the table."""
    BAD_POOL_WIDTH = 5
    """A window does not fit its row of the table."""


_FAULTS = {
    CommitCode.BAD_WINDOW: (
        "qo_indptr[{request} + 1]",
        "wants ascending bounds up to {tokens}, and 1 to 1024 nodes a tree",
    ),
    CommitCode.BAD_ACCEPTED: ("accept_token_num[{request}]", "must lie in [0, {depth})"),
    CommitCode.BAD_NODE: (
        "accept_index[{request}]",
        "a path starts with the root, ascends and stays in its window",
    ),
    CommitCode.BAD_POOL_ROW: ("req_pool_indices[{request}]", "is no row of req_to_token"),
    CommitCode.BAD_POOL_WIDTH: (
        "seq_lens[{request}]",
        "the window does not fit req_to_token",
    ),
}


@dataclass(frozen=True)
class CommitStatus:
    """What `commit_plan` found.

    Attributes
    ----------
    code : CommitCode
    request : int
        The first request at fault; -1 where there is none.
    value : int
        The value at fault, else 0.
    """

    code: CommitCode
    request: int
    value: int

    @classmethod
    def from_words(cls, words: Sequence[int]) -> CommitStatus:
        """Return the meaning of the four int32 that the kernel writes."""
        code, request, low, high = (int(word) for word in words)
        return cls(CommitCode(code), request, (low & 0xFFFFFFFF) | high << 32)


def commit_workspace(batch: int, depth: int) -> dict[str, Buffer]:
    """Return the buffers that a `CommitPlan` needs besides its inputs.

    Parameters
    ----------
    batch : int
        Requests, padded ones included.
    depth : int
        Most accepted nodes of a request, the root counted.

    Returns
    -------
    dict of str to Buffer
        The fields of `CommitWorkspace`.

    Raises
    ------
    ArgumentError
        Naming the argument.
    """
    batch = check_int("batch", batch, 1, 2**31 - 1, "requests")
    depth = check_int("depth", depth, 1, 2**31 - 1, "nodes of a path")
    return {
        "src": Buffer((batch * depth,), "int64"),
        "dst": Buffer((batch * depth,), "int64"),
        "count": Buffer((1,), "int32"),
        "status": Buffer((4,), "int32"),
    }


@dataclass(frozen=True, eq=False)
class CommitWorkspace:
    """The caller's buffers, sized by `commit_workspace`.

    Attributes
    ----------
    src, dst : tensor of int64, shape (B * S,)
        The moves of a commit by rows; for other pools with the same slots, too.
    count : tensor of int32, shape (1,)
        Moves in the list; 0 where something is wrong.
    status : tensor of int32, shape (4,)
    """

    src: Any
    dst: Any
    count: Any
    status: Any

    @classmethod
    def allocate(cls, like: Any, batch: int, depth: int) -> CommitWorkspace:
        """Return new buffers of the library and on the device of `like`."""
        sizes = commit_workspace(batch, depth)
        return cls(**{name: buffer.zeros(like) for name, buffer in sizes.items()})


class CommitPlan:
    """A commit whose checks are done; calling it launches.

    Make it before a capture. All inputs may change in place between calls.

    Parameters
    ----------
    accept_index : tensor of int32, shape (B, S)
        Global node indices of each accepted path, the root first; what is behind it is ignored.
    accept_token_num : tensor of int32, shape (B,)
        Accepted nodes without the root.
    qo_indptr : tensor of int32 or int64, shape (B + 1,)
        Bounds of each request's window in `out_cache_loc`.
    out_cache_loc : tensor of int64, shape (N,)
        Slots of the windows. Permuted like the table in a commit by table, else read only.
    seq_lens : tensor of int32 or int64, shape (B,)
        Tokens in front of each window.
    req_pool_indices : tensor of int32 or int64, shape (B,)
        Rows of the table; 0 where a request is padding.
    req_to_token : tensor of int32, shape (rows, width)
        Any row stride. Its windows are permuted in a commit by table, else only its shape counts.
    pools : sequence of tensor, optional
        The pools whose rows move: given for a commit by rows, absent for one by table.
    page_size : int
        Slots of a page of the pools.
    new_lens : tensor like seq_lens, optional
        Where the lengths after the commit go, which may be `seq_lens` itself in a commit by rows;
        one by table still needs the old lengths. They are counted before rows move: also where the
        move then finds slots that are none, or not apart, and moves nothing.
    workspace : CommitWorkspace, optional
        The caller's buffers; of the plan's own if absent.
    relocate_workspace : RelocateWorkspace, optional
        Those of the move, for lists of B * S rows; of the plan's own if absent.
    scratch_bytes : int
        Most scratch of a move that the plan allocates itself.
    num_ctas : int, optional
        Blocks that move rows or permute windows.

    Attributes
    ----------
    way : {"rows", "table"}
    move : RelocatePlan or None
        The move of a commit by rows.

    Raises
    ------
    ArgumentError
        Naming the argument and its value.
    LaunchError
        Inside a capture, in a commit by rows.
    """

    def __init__(
        self,
        accept_index: Any,
        accept_token_num: Any,
        qo_indptr: Any,
        out_cache_loc: Any,
        seq_lens: Any,
        req_pool_indices: Any,
        req_to_token: Any,
        *,
        pools: Sequence[Any] | None = None,
        page_size: int = 1,
        new_lens: Any = None,
        workspace: CommitWorkspace | None = None,
        relocate_workspace: RelocateWorkspace | None = None,
        scratch_bytes: int = SCRATCH_BYTES,
        num_ctas: int | None = None,
    ) -> None:
        given = {
            "accept_index": accept_index,
            "accept_token_num": accept_token_num,
            "qo_indptr": qo_indptr,
            "out_cache_loc": out_cache_loc,
            "seq_lens": seq_lens,
            "req_pool_indices": req_pool_indices,
            "req_to_token": req_to_token,
        }
        if new_lens is not None:
            given["new_lens"] = new_lens
        inputs = {name: tensor_of(name, value) for name, value in given.items()}
        device = device_of(list(inputs.values()))
        for name in ("accept_index", "req_to_token"):
            if len(inputs[name].shape) != 2 or 0 in inputs[name].shape:
                raise wrong(
                    inputs[name], f"has shape {list(inputs[name].shape)}; wants two extents"
                )
        if len(inputs["out_cache_loc"].shape) != 1:
            raise wrong(inputs["out_cache_loc"], "wants one dimension")
        batch, depth = inputs["accept_index"].shape
        for name, length in (
            ("accept_token_num", batch), ("qo_indptr", batch + 1), ("seq_lens", batch),
            ("req_pool_indices", batch), ("new_lens", batch),
        ):  # fmt: skip
            if name in inputs and inputs[name].shape != (length,):
                raise wrong(inputs[name], f"wants shape [{length}] for {batch} requests")
        if new_lens is not None and inputs["new_lens"].dtype != inputs["seq_lens"].dtype:
            raise wrong(inputs["new_lens"], f"seq_lens are {inputs['seq_lens'].dtype}")
        self.way: Way = "table" if pools is None else "rows"
        if self.way == "table" and page_size != 1:
            raise ArgumentError("page_size", page_size, "a commit by table needs pages of one slot")
        if workspace is None:
            workspace = CommitWorkspace.allocate(accept_index, batch, depth)
        _refuse_shared(self.way, inputs, workspace)
        tokens = inputs["out_cache_loc"].shape[0]
        rows, width = inputs["req_to_token"].shape

        self.workspace = workspace
        self._numbers = {"tokens": tokens, "depth": depth}
        kernels = commit_kernels(
            SEQ_INDEX=index_ctype(inputs["seq_lens"]),
            QO_INDEX=index_ctype(inputs["qo_indptr"]),
            POOL_INDEX=index_ctype(inputs["req_pool_indices"]),
        )
        by_rows = self.way == "rows"
        self.plan = kernels["commit_plan"].bind(
            1, number_of(kernels["commit_plan"], "PLAN_THREADS"),
            accept_index, accept_token_num, qo_indptr, out_cache_loc, seq_lens, req_pool_indices,
            batch, depth, tokens, rows, width,
            workspace.src if by_rows else None, workspace.dst if by_rows else None,
            workspace.count if by_rows else None, new_lens, workspace.status,
        )  # fmt: skip
        self.move: RelocatePlan | None = None
        self.permute = None
        if pools is not None:
            if relocate_workspace is None:
                relocate_workspace = RelocateWorkspace.allocate(
                    pools, batch * depth, page_size=page_size, scratch_bytes=scratch_bytes
                )
            self.move = RelocatePlan(
                pools, workspace.src, workspace.dst, workspace.count, page_size=page_size,
                workspace=relocate_workspace, num_ctas=num_ctas, list_prefix="workspace.",
                workspace_prefix="relocate_workspace.",
            )  # fmt: skip
            status = tensor_of("workspace.status", workspace.status)
            self.move.refuse_overlap([status, *inputs.values()])
        else:
            table = kernels["commit_table"]
            self.permute = table.bind(
                grid(num_ctas, device, batch, _CTAS_PER_MULTIPROCESSOR),
                number_of(table, "TABLE_THREADS"),
                accept_index, accept_token_num, qo_indptr, seq_lens, req_pool_indices, batch, depth,
                workspace.status, req_to_token, inputs["req_to_token"].strides[0], out_cache_loc,
            )  # fmt: skip

    def __call__(self) -> None:
        """Commit, on torch's current stream."""
        self.plan()
        if self.move is not None:
            self.move()
        if self.permute is not None:
            self.permute()

    def peek_status(self) -> CommitStatus:
        """Return what the last call found, whatever it is. Waits for the device."""
        return CommitStatus.from_words(read(self.workspace.status).tolist())

    def read_status(self) -> CommitStatus:
        """Return what the last call found. Waits for the device: not for use inside a capture.

        Raises
        ------
        ArgumentError
            If nothing was committed, naming the tensor, the request and the value; or if the move
            of a commit by rows found a window whose slots are not apart.
        """
        status = self.peek_status()
        if status.code != CommitCode.COMMITTED:
            where, reason = _FAULTS[status.code]
            numbers = {"request": status.request, **self._numbers}
            raise ArgumentError(
                where.format(**numbers),
                status.value,
                reason.format(**numbers) + "; nothing was committed",
            )
        if self.move is not None:
            self.move.read_status()
        return status


def launched(arch: str) -> Iterator[Launched]:
    """Yield the `-D` values that this op launches with; see `cuverify.launched`."""
    yield Launched("commit", ("SEQ_INDEX", "QO_INDEX", "POOL_INDEX"))


def commit_kernels(**values: str) -> dict[str, Kernel]:
    """Return the kernels of kernels_cu/commit.cu with these `-D` values, by name."""
    return _kernels(tuple(sorted(values.items())))


@functools.cache
def _kernels(values: tuple[tuple[str, str], ...]) -> dict[str, Kernel]:
    source = KernelSource.from_package("commit", values=dict(values))
    return {name: Kernel(source, name) for name in ("commit_plan", "commit_table")}


def _refuse_shared(way: Way, inputs: Mapping[str, Tensor], workspace: CommitWorkspace) -> None:
    """Raise if what a commit writes shares memory with anything else that it is given."""
    buffers, outputs = ["status"], ["new_lens"]
    if way == "rows":
        buffers += ["src", "dst", "count"]
    else:
        outputs += ["req_to_token", "out_cache_loc"]
    held = [tensor_of(f"workspace.{name}", getattr(workspace, name)) for name in buffers]
    others = dict(inputs)
    written = [others.pop(name) for name in outputs if name in others]
    in_place = "new_lens" in inputs and inputs["new_lens"].address == inputs["seq_lens"].address
    if way == "rows" and in_place:
        del others["seq_lens"]  # one thread reads and replaces a request's length
    refuse_overlap([*held, *written], list(others.values()))
