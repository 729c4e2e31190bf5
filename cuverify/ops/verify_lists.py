"""The lists of a verify step in SGLang's forms: bounds, slots with drafts, words from any mask.

`VerifyLists` makes the bounds and the list of slots once a step, in the dtypes of SGLang's eager
tensors or of its graph buffers; `VerifyWords` turns a tree mask into visibility words. Attention of
this package needs neither where the tree is built on the device: its plan has what it reads.
"""

from __future__ import annotations

import enum
import functools
from collections.abc import Iterator, Mapping
from typing import Any, Literal, get_args

from cuverify.arguments import device_of
from cuverify.buffers import read, refuse_overlap, tensor_of, wrong
from cuverify.errors import ArgumentError
from cuverify.kernel import Kernel
from cuverify.launching import (
    HOST_CTAS,
    Launched,
    check_int,
    index_ctype,
    multiprocessors,
    number_of,
)
from cuverify.sources import KernelSource
from cuverify.tree import MAX_TOKENS, MaskMode, sglang_mask_size

Drafts = Literal["none", "given", "table"]

_DRAFTS: dict[Drafts, int] = {"none": 0, "given": 1, "table": 2}
_MODES: dict[MaskMode, int] = {"full": 0, "query_only": 1, "bit_packed": 2}
_CTAS_PER_MULTIPROCESSOR = 4
_MAX_INT = 2**31 - 1
_MAX_LONG = 2**62


class ListCode(enum.IntEnum):
    """What `verify_bounds` says of its inputs."""

    LISTED = 0
    BAD_LENGTH = 1
    """A length is negative, or no int32."""
    BAD_POOL_ROW = 2
    """A request's row is none of `req_to_token`."""
    BAD_POOL_WIDTH = 3
    """A prefix, with the drafts that are read behind it, is longer than a row of the table."""
    BAD_CAPACITY = 4
    """The slots are more than `kv_indices` holds, or `kv_indptr` counts."""


class VerifyLists:
    """Bounds and slots of a step; all checks are done when it is made.

    Parameters
    ----------
    seq_lens : tensor of int32 or int64, shape (B,)
        Tokens in front of each request's drafts. Read only.
    num_tokens : int
        Drafts of a request, the root among them.
    kv_indptr : tensor of int32 or int64, shape (B + 1,)
        Written: bounds of each request's slots.
    qo_indptr : tensor of int32 or int64, shape (B + 1,)
        Written: ``b * num_tokens``.
    mask_indptr : tensor of int64, shape (B + 1,)
        Written: bounds of each part of a full mask.
    status : tensor of int32, shape (4,)
        Written: `ListCode`, request, low and high word of the value at fault.
    kv_indices : tensor of int32 or int64, optional
        Written up to the last bound: slots of all requests. What is behind is left alone.
    req_to_token : tensor of int32, shape (rows, width), any row stride, optional
        Goes with `kv_indices`. Read only.
    req_pool_indices : tensor of int32 or int64, shape (B,), optional
        Row of each request; goes with `kv_indices`. Read only.
    drafts : {"none", "given", "table"}
        Whether slots of the drafts stand behind each prefix: none, those of `out_cache_loc`, or
        those that the table has there.
    out_cache_loc : tensor of int64, shape (B * num_tokens,), optional
        Goes with ``drafts="given"``. Read only.
    values : mapping of str to int, optional
        `-D` values of kernels_cu/verify_lists.cu.

    Raises
    ------
    ArgumentError
        Naming the argument and its value.
    """

    def __init__(
        self,
        seq_lens: Any,
        *,
        num_tokens: int,
        kv_indptr: Any,
        qo_indptr: Any,
        mask_indptr: Any,
        status: Any,
        kv_indices: Any = None,
        req_to_token: Any = None,
        req_pool_indices: Any = None,
        drafts: Drafts = "none",
        out_cache_loc: Any = None,
        values: Mapping[str, int] | None = None,
    ) -> None:
        num_tokens = check_int("num_tokens", num_tokens, 1, MAX_TOKENS, "drafts")
        if drafts not in get_args(Drafts):
            raise ArgumentError("drafts", drafts, f"use one of {get_args(Drafts)}")
        listed = kv_indices is not None
        for name, value in (("req_to_token", req_to_token), ("req_pool_indices", req_pool_indices)):
            if (value is not None) != listed:
                raise ArgumentError(name, value, "goes with kv_indices, and kv_indices with it")
        if (out_cache_loc is not None) != (drafts == "given") or (drafts != "none" and not listed):
            raise ArgumentError("drafts", drafts, "'given' goes with out_cache_loc and kv_indices")
        optional = {
            "req_to_token": req_to_token,
            "req_pool_indices": req_pool_indices,
            "out_cache_loc": out_cache_loc,
        }
        written = {
            "kv_indptr": kv_indptr,
            "qo_indptr": qo_indptr,
            "mask_indptr": mask_indptr,
            "status": status,
        }
        given = {"seq_lens": seq_lens, **{k: v for k, v in optional.items() if v is not None}}
        inputs = {name: tensor_of(name, value) for name, value in given.items()}
        outputs = {name: tensor_of(name, value) for name, value in written.items()}
        if listed:
            outputs["kv_indices"] = tensor_of("kv_indices", kv_indices)
            if len(outputs["kv_indices"].shape) != 1:
                raise wrong(outputs["kv_indices"], "wants one dimension")
        lengths = inputs["seq_lens"]
        if len(lengths.shape) != 1 or not 1 <= lengths.shape[0] <= 65_535:
            raise wrong(lengths, "wants one length for each of 1 to 65,535 requests")
        batch = lengths.shape[0]
        device_of([*inputs.values(), *outputs.values()])
        refuse_overlap(list(outputs.values()), list(inputs.values()))
        types = {
            "SEQ_INDEX": index_ctype(lengths),
            "KV_BOUND": index_ctype(outputs["kv_indptr"]),
            "QO_INDEX": index_ctype(outputs["qo_indptr"]),
        }
        rows = width = stride = 0
        capacity = _MAX_INT if types["KV_BOUND"] == "int" else _MAX_LONG
        if listed:
            types["POOL_INDEX"] = index_ctype(inputs["req_pool_indices"])
            types["KV_INDEX"] = index_ctype(outputs["kv_indices"])
            table = inputs["req_to_token"]
            if len(table.shape) != 2 or 0 in table.shape:
                raise wrong(table, f"has shape {list(table.shape)}; wants [rows, width]")
            rows, width = table.shape
            stride = table.strides[0]
            capacity = min(capacity, outputs["kv_indices"].shape[0])
        kernels = list_kernels(**types, **(values or {}))
        self.status = status
        self.bounds = kernels["verify_bounds"].bind(
            1, number_of(kernels["verify_bounds"], "BOUNDS_THREADS"),
            seq_lens, req_pool_indices, batch, num_tokens, _DRAFTS[drafts], rows, width, capacity,
            kv_indptr, qo_indptr, mask_indptr, status,
        )  # fmt: skip
        self.slots = None
        if listed:
            gather = kernels["verify_slots"]
            threads = number_of(gather, "SLOTS_THREADS")
            useful = max(1, -(-outputs["kv_indices"].shape[0] // (8 * threads)))
            self.slots = gather.bind(
                min(useful, _ctas(lengths.device)), threads,
                kv_indptr, req_pool_indices, req_to_token, out_cache_loc, stride, batch, num_tokens,
                kv_indices,
            )  # fmt: skip

    def __call__(self) -> None:
        """Write the lists: one or two launches on torch's current stream."""
        self.bounds()
        if self.slots is not None:
            self.slots()

    def read_status(self) -> None:
        """Raise if nothing could be listed. Waits for the device: not for use inside a capture.

        Raises
        ------
        ArgumentError
            Naming what is wrong, the request and the value.
        """
        code, request, low, high = (int(word) for word in read(self.status))
        if code != ListCode.LISTED:
            value = (low & 0xFFFFFFFF) | high << 32
            where = "req_pool_indices" if code == ListCode.BAD_POOL_ROW else "seq_lens"
            raise ArgumentError(
                f"{where}[{request}]", value, f"{ListCode(code).name}; nothing was listed"
            )


class VerifyWords:
    """Visibility words from SGLang's tree mask; all checks are done when it is made.

    Parameters
    ----------
    mask : tensor of uint8 or bool, one dimension
        The parts of all requests one behind the other, and anything behind them. Read only.
    seq_lens : tensor of int32 or int64, shape (B,)
        Tokens in front of each request's drafts. Read only.
    visible : tensor of uint64, shape (B * n, words)
        Written completely; what a mask has no column for is not seen.
    mode : {"full", "query_only", "bit_packed"}
        See `cuverify.tree.DraftTree.from_sglang_mask`.
    mask_indptr : tensor of int64, shape (B + 1,), optional
        Of `VerifyLists`; goes with a full mask. Read only.
    values : mapping of str to int, optional
        `-D` values of kernels_cu/verify_lists.cu.
    """

    def __init__(
        self,
        mask: Any,
        seq_lens: Any,
        visible: Any,
        *,
        mode: MaskMode,
        mask_indptr: Any = None,
        values: Mapping[str, int] | None = None,
    ) -> None:
        given, lengths = tensor_of("mask", mask), tensor_of("seq_lens", seq_lens)
        made = tensor_of("visible", visible)
        if len(lengths.shape) != 1 or not lengths.shape[0]:
            raise wrong(lengths, "wants one length a request")
        batch = lengths.shape[0]
        if len(made.shape) != 2 or not made.shape[0] or made.shape[0] % batch:
            raise wrong(made, f"wants [tokens of {batch} requests, words]")
        n, words = made.shape[0] // batch, made.shape[1]
        check_int("num_tokens", n, 1, MAX_TOKENS, "drafts")
        sglang_mask_size(mode, n, 0)
        if 64 * words < n:
            raise wrong(made, f"is too short: {words} words hold {64 * words} of {n} nodes")
        if len(given.shape) != 1:
            raise wrong(given, "wants one dimension")
        if (mask_indptr is not None) != (mode == "full"):
            raise ArgumentError("mask_indptr", mask_indptr, f"goes with a full mask, not {mode!r}")
        bounds = [] if mask_indptr is None else [tensor_of("mask_indptr", mask_indptr)]
        device_of([given, lengths, made, *bounds])
        refuse_overlap([made], [given, lengths, *bounds])
        kernel = list_kernels(SEQ_INDEX=index_ctype(lengths), **(values or {}))["verify_words"]
        threads = number_of(kernel, "WORDS_THREADS")
        blocks = min(-(-32 * batch * n // threads), 4 * _ctas(given.device))
        self.launch = kernel.bind(
            blocks, threads, mask, seq_lens, mask_indptr, given.shape[0], _MODES[mode], batch, n,
            words, visible,
        )  # fmt: skip

    def __call__(self) -> None:
        """Write the words: one launch on torch's current stream."""
        self.launch()


def launched(arch: str) -> Iterator[Launched]:
    """Yield the `-D` values that these ops launch with; see `cuverify.launched`."""
    bounds = ("SEQ_INDEX", "KV_BOUND", "QO_INDEX")
    yield Launched("verify_lists", bounds)
    yield Launched("verify_lists", (*bounds, "POOL_INDEX", "KV_INDEX"))
    yield Launched("verify_lists", ("SEQ_INDEX",))  # words


def list_kernels(**values: int | str) -> Mapping[str, Kernel]:
    """Return the kernels of kernels_cu/verify_lists.cu with these `-D` values, by name."""
    return _kernels(tuple(sorted(values.items())))


@functools.cache
def _kernels(values: tuple[tuple[str, int | str], ...]) -> dict[str, Kernel]:
    source = KernelSource.from_package("verify_lists", values=dict(values))
    return {
        name: Kernel(source, name) for name in ("verify_bounds", "verify_slots", "verify_words")
    }


def _ctas(device: str) -> int:
    count = multiprocessors(device)
    return HOST_CTAS if count is None else _CTAS_PER_MULTIPROCESSOR * count
