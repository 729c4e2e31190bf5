"""Watch one run of a step: its operations, its launches, and what a capture would refuse.

Two modes of torch and a few functions in their place show every call; the line of the step comes
from the stack. What is seen goes into a `LintSeen`; `lint` compares and reports.
"""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from cuverify.validators.callable_case import CallableCase
from cuverify.validators.host_graph import is_mask, numbers_and_pointers, refused_in_capture
from cuverify.validators.intercept import calls, operations
from cuverify.validators.places import place_in

from cuverify.launches import LaunchRecord, record_launches
from cuverify.report import Finding, Severity

_READS = {
    "item": ".item()",
    "__bool__": "bool() of a tensor, as in `if tensor:`",
    "is_nonzero": "is_nonzero()",
    "__int__": "int() of a tensor",
    "__float__": "float() of a tensor",
    "__complex__": "complex() of a tensor",
    "__index__": "a tensor used as a Python index, as in range(tensor)",
    "__contains__": "`in` a tensor",
    "tolist": ".tolist()",
    "cpu": ".cpu()",
    "numpy": ".numpy()",
    "__array__": "numpy.asarray() of a tensor",
    "__repr__": "printing a tensor",
    "__str__": "printing a tensor",
    "__format__": "printing a tensor",
    "equal": "torch.equal()",
    "allclose": "torch.allclose()",
}
_SHAPES = {
    "nonzero": "nonzero()",
    "argwhere": "argwhere()",
    "where": "torch.where() of a condition alone",
    "unique": "unique()",
    "unique_consecutive": "unique_consecutive()",
    "masked_select": "masked_select()",
    "repeat_interleave": "repeat_interleave() by a tensor of repeats",
    "bincount": "bincount()",
    "__getitem__": "a boolean index",
    "__setitem__": "writing through a boolean index",
}
_FROM_HOST = {
    "tensor": "torch.tensor() of Python numbers",
    "as_tensor": "torch.as_tensor() of host data",
    "asarray": "torch.asarray() of host data",
    "from_numpy": "torch.from_numpy()",
}
_FIX_READ = (
    "Keep the value on the device: compare with torch.where, index with a tensor, or do it before "
    "the capture. A capture cannot wait for a value."
)
_FIX_SHAPE = (
    "Work on the full shape and mask: torch.where with three arguments, masked_fill, a cumulative "
    "sum for positions; or give the size (nonzero_static, repeat_interleave(output_size=))."
)
_FIX_COPY = (
    "Make the tensor once before the capture and write into it by copy_ from pinned memory outside "
    "of the step."
)

Kind = Literal["read", "shape", "copy", "pinned", "random", "free", "branch", "autograd", "kept"]
_RULES: dict[Kind, tuple[str, Severity]] = {
    "read": ("CV202", "error"),
    "shape": ("CV202", "error"),
    "copy": ("CV214", "error"),
    "pinned": ("CV208", "error"),
    "random": ("CV305", "error"),
    "free": ("CV205", "error"),
    "branch": ("CV107", "warning"),
    "autograd": ("CV217", "warning"),
    "kept": ("CV404", "warning"),
}


@dataclass(frozen=True)
class Operation:
    """One operation of torch or launch of cuverify, as a run made it.

    Attributes
    ----------
    name : str
    shapes : tuple
        Of its tensors; of a launch its grid.
    numbers : tuple
        What it was given besides tensors.
    where : str or None
        ``file:line`` of the step.
    """

    name: str
    shapes: tuple[Any, ...]
    numbers: tuple[Any, ...]
    where: str | None = field(compare=False)


@dataclass
class LintSeen:
    """What one run of a step showed.

    Attributes
    ----------
    operations : list of Operation
    findings : dict of (rule, place, what) to Finding
        The first of each.
    allocations : dict of (place, operation, shape) to [times, bytes]
    error : Exception, optional
        What the step raised.
    on_device : bool
        Tensors of the step are on a GPU, real or fake; its CPU tensors are then the host's own.
        Otherwise a CPU tensor stands for one on the device.
    """

    operations: list[Operation] = field(default_factory=list)
    findings: dict[tuple[Any, ...], Finding] = field(default_factory=dict)
    allocations: dict[tuple[Any, ...], list[int]] = field(default_factory=dict)
    error: Exception | None = None
    on_device: bool = False

    def add(
        self, kind: Kind, what: str, where: str | None, message: str, fix: str, **evidence: Any
    ) -> None:
        """Add a finding unless this line has it."""
        rule, severity = _RULES[kind]
        self.findings.setdefault(
            (rule, where, what),
            Finding(rule, severity, message, where, {"call": what, **evidence}, fix),
        )


def observe(case: CallableCase) -> LintSeen:
    """Run a step once, and return what it did.

    What it allocated and still holds afterwards is a finding. Nothing global stays changed.
    """
    tensors = [
        t for t in (*case.inputs.values(), *case.outputs.values(), *case.state.values())
        if _is_tensor(t)
    ]  # fmt: skip
    seen = LintSeen(on_device=any(t.device.type == "cuda" for t in tensors))
    watcher = _Watcher(seen)
    with _watch(watcher):
        try:
            case.step()
        except Exception as error:
            seen.error = error
            return seen  # its traceback holds what the step had
    if not all(storage.expired() for storage, _, _ in watcher.fresh):
        gc.collect()
    for storage, where, name in watcher.fresh:
        if not storage.expired():
            seen.add(
                "kept",
                name,
                where,
                f"what {name} allocated is still held after the step: in a graph it lies in the "
                "graph's pool, where a later replay writes over it",
                "Allocate before the capture and write in place, or let go of it in the step.",
            )
    return seen


@contextlib.contextmanager
def _watch(watcher: _Watcher) -> Iterator[None]:
    with (
        _patched(watcher),
        record_launches(watcher.launches),
        operations(watcher.operation),
        calls(watcher.call),
    ):
        yield
        watcher.take_launches()


@dataclass(frozen=True)
class _Outside:
    """A function that no mode intercepts, and what to say of its call."""

    owner: Any
    name: str
    kind: Kind
    message: str
    fix: str
    answer: Callable[..., Any] | None = None  # in its place; itself if absent


def _outsiders() -> tuple[_Outside, ...]:
    import torch

    return (
        _Outside(
            torch.cuda, "synchronize", "read", "torch.cuda.synchronize() waits for the device",
            _FIX_READ, lambda *device: None,
        ),
        _Outside(
            torch.cuda, "empty_cache", "free",
            "torch.cuda.empty_cache() gives memory back in the middle of a step",
            "Call it outside of the step.", lambda: None,
        ),
        _Outside(
            torch.cuda, "is_current_stream_capturing", "branch",
            "the step asks whether it is captured: its captured form is never warmed",
            "Do the same with and without a capture.", lambda: False,
        ),
        _Outside(
            torch, "from_numpy", "copy",
            f"{_FROM_HOST['from_numpy']} is a copy from pageable memory on a GPU", _FIX_COPY,
        ),
    )  # fmt: skip


@contextlib.contextmanager
def _patched(watcher: _Watcher) -> Iterator[None]:
    """Hear of the calls that no mode intercepts, and put everything back."""
    outsiders = _outsiders()
    before = [getattr(outside.owner, outside.name) for outside in outsiders]
    try:
        for outside, real in zip(outsiders, before, strict=True):
            setattr(outside.owner, outside.name, watcher.outside(outside, real))
        yield
    finally:
        for outside, real in zip(outsiders, before, strict=True):
            setattr(outside.owner, outside.name, real)


class _Launches(list[LaunchRecord]):
    """Launches, each with the line of the step that made it."""

    def __init__(self) -> None:
        super().__init__()
        self.places: list[str | None] = []

    def append(self, record: LaunchRecord) -> None:
        super().append(record)
        self.places.append(place_in(sys._getframe(1)))

    def clear(self) -> None:
        super().clear()
        self.places.clear()


class _Watcher:
    """Takes every call and operation of a run, and lets it happen."""

    def __init__(self, seen: LintSeen) -> None:
        self.seen = seen
        self.launches = _Launches()
        # what the run allocated: a weak reference, the line, the operation
        self.fresh: list[tuple[Any, str | None, str]] = []
        self.reported = False  # the present call has its finding
        self.api: str | None = None  # the outermost call

    def outside(self, outside: _Outside, real: Callable[..., Any]) -> Callable[..., Any]:
        """Return what stands in for a function that no mode intercepts."""
        answer = real if outside.answer is None else outside.answer

        def called(*args: Any, **kwargs: Any) -> Any:
            where = place_in(sys._getframe(1))
            self.seen.add(outside.kind, outside.name, where, outside.message, outside.fix)
            return answer(*args, **kwargs)

        return called

    def call(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        name = getattr(func, "__name__", str(func))
        outer, self.api = self.api, self.api or name
        was, self.reported = self.reported, False
        try:
            return self._called(func, name, args, kwargs)
        finally:
            self.api, self.reported = outer, was

    def _called(self, func: Any, name: str, args: Any, kwargs: Mapping[str, Any]) -> Any:
        where = place_in(sys._getframe(2))
        target = _target(name, args, kwargs)
        if name in _READS or target == "cpu":
            if self._of_device(_first_tensor(args)):
                self._read(_READS.get(name, ".to('cpu')"), where)
        elif target == "cuda" and args[0].device.type != "cuda":
            self._uploaded(args[0], "to(device)", where)
            if not has_gpu():
                return args[0]
        elif name == "pin_memory" or kwargs.get("pin_memory"):
            message = "pinned memory is allocated inside of a step"
            fix = "Allocate staging buffers before the capture."
            self.seen.add("pinned", "pin_memory", where, message, fix)
            if name == "pin_memory" and not has_gpu():
                return args[0]
            kwargs = {key: value for key, value in kwargs.items() if key != "pin_memory"}
        elif name in _FROM_HOST and not _is_tensor(args[0] if args else kwargs.get("data")):
            message = f"{_FROM_HOST[name]} is a copy from pageable memory on a GPU"
            self.seen.add("copy", name, where, message, _FIX_COPY)
        elif name == "__setitem__" and self._writes_places(args):
            what = _SHAPES[name]
            message = (
                f"{what} a value that is on the device: the index is turned into positions, whose "
                "number the host must know"
            )
            self.reported = True
            self.seen.add("shape", what, where, message, _FIX_SHAPE)
        elif name == "backward":
            message = "the step runs autograd's backward pass, on threads of its own"
            fix = "Capture a whole training step by torch's recipe, or run under torch.no_grad()."
            self.seen.add("autograd", name, where, message, fix)
        generator = kwargs.get("generator")
        if generator is not None:
            message = f"{name}() draws from a generator of its own, which no graph knows"
            fix = "Call graph.register_generator_state(generator) before the capture, or use the "
            self.seen.add("random", name, where, message, fix + "default generator.")
        return func(*args, **kwargs)

    def _uploaded(self, source: Any, what: str, where: str | None) -> None:
        if not _is_pinned(source):
            message = "a copy to the GPU inside of a step, from pageable memory"
            self.reported = True
            self.seen.add("copy", what, where, message, _FIX_COPY)

    def _of_device(self, tensor: Any) -> bool:
        """Tell whether a tensor is on the device, or stands for one that is."""
        return not self.seen.on_device or not _is_tensor(tensor) or tensor.device.type == "cuda"

    def _writes_places(self, args: Any) -> bool:
        """Tell whether `tensor[mask] = value` needs the mask's positions: no number of the host."""
        if len(args) < 3 or not all(
            _is_tensor(t) and self._of_device(t) for t in (args[0], args[2])
        ):
            return False
        indices = args[1] if isinstance(args[1], tuple) else (args[1],)
        return any(_is_tensor(at) and is_mask(at) for at in indices)

    def _read(self, what: str, where: str | None) -> None:
        self.reported = True
        self.seen.add("read", what, where, f"{what} reads a value on the host", _FIX_READ)

    def operation(self, func: Any, args: Any, kwargs: Mapping[str, Any]) -> Any:
        self.take_launches()
        where = place_in(sys._getframe(1))
        reason = refused_in_capture(func, args, kwargs)
        if reason is not None and self._of_device(_first_tensor(args)):
            self._refused(func, reason, where)
        if _has_grad(args):
            message = "the step records autograd's graph"
            fix = "Run it under torch.no_grad() or torch.inference_mode()."
            self.seen.add("autograd", "requires_grad", where, message, fix)
        result = _run(func, args, kwargs, refused=reason is not None)
        self._across(func, args, result, where)
        self._note(func, args, kwargs, result, where)
        return result

    def _across(self, func: Any, args: Any, result: Any, where: str | None) -> None:
        """Note a copy from one side to the other, which only tensors on a device show."""
        if not str(func).startswith(("aten.copy_", "aten._to_copy")) or self.reported:
            return
        source, target = (args[1], args[0]) if str(func).startswith("aten.copy_") else (
            args[0], result,
        )  # fmt: skip
        kinds = source.device.type, target.device.type
        if kinds == ("cuda", "cpu"):
            self._read("a copy to the host", where)
        elif kinds == ("cpu", "cuda"):
            self._uploaded(source, "copy", where)

    def _refused(self, func: Any, reason: str, where: str | None) -> None:
        if self.reported:  # by the call that this is a part of
            return
        import torch

        name = self.api or str(func)
        if torch.Tag.data_dependent_output in func.tags:
            what = _READS.get(name, f"a tensor's value as a number, in {name}()")
            self._read(what, where)
            return
        what = _SHAPES.get(name, f"{func}")
        self.reported = True
        self.seen.add("shape", what, where, f"{what}: {reason}", _FIX_SHAPE)

    def _note(
        self, func: Any, args: Any, kwargs: Mapping[str, Any], result: Any, where: str | None
    ) -> None:
        from torch.multiprocessing.reductions import StorageWeakRef
        from torch.utils._pytree import tree_flatten

        weak: Any = StorageWeakRef  # has no types
        given = tree_flatten((args, dict(kwargs)))[0]
        tensors = [leaf for leaf in given if _is_tensor(leaf)]
        outputs = [leaf for leaf in tree_flatten(result)[0] if _is_tensor(leaf)]
        name = str(func)
        self.seen.operations.append(
            Operation(
                name,
                tuple(tuple(tensor.shape) for tensor in (*tensors, *outputs)),
                tuple(_plain(leaf) for leaf in given if not _is_tensor(leaf)),
                where,
            )
        )
        storages = {tensor.untyped_storage()._cdata for tensor in tensors}
        for tensor in outputs:
            storage = tensor.untyped_storage()
            if storage._cdata in storages or func._schema.is_mutable:
                continue
            size = tensor.numel() * tensor.element_size()
            key = (where, name, tuple(tensor.shape))
            self.seen.allocations.setdefault(key, [0, size])[0] += 1
            self.fresh.append((weak(storage), where, name))

    def take_launches(self) -> None:
        """Note the launches since the last operation."""
        for record, where in zip(self.launches, self.launches.places, strict=True):
            numbers, _ = numbers_and_pointers(record)
            operation = Operation(record.kernel, tuple(record.grid), numbers, where)
            self.seen.operations.append(operation)
        self.launches.clear()


def _run(func: Any, args: Any, kwargs: Mapping[str, Any], *, refused: bool) -> Any:
    """Run an operation; one that has no answer on fake tensors gets a plausible one."""
    import torch
    from torch._subclasses.fake_tensor import (
        DataDependentOutputException,
        DynamicOutputShapeException,
    )

    try:
        return func(*args, **kwargs)
    except DataDependentOutputException:
        kind = args[0].dtype
        return True if kind == torch.bool else 1.0 if kind.is_floating_point else 1
    except DynamicOutputShapeException:
        if not refused or "nonzero" not in str(func):
            raise
        source = args[0]
        return torch.empty((source.numel(), source.dim()), dtype=torch.int64, device=source.device)


def _target(name: str, args: Any, kwargs: Mapping[str, Any]) -> str | None:
    """Return the kind of device that a conversion names, None where it names none."""
    import torch

    if name == "cuda":
        return "cuda"
    if name != "to":
        return None
    for value in (*args[1:], kwargs.get("device")):
        if isinstance(value, torch.device):
            return str(value.type)
        if isinstance(value, str):
            return value.partition(":")[0]
    return None


def _is_tensor(value: Any) -> bool:
    import torch

    return isinstance(value, torch.Tensor)


def _is_pinned(tensor: Any) -> bool:
    from torch._subclasses.fake_tensor import FakeTensor

    return not isinstance(tensor, FakeTensor) and bool(tensor.is_pinned())


def has_gpu() -> bool:
    """Tell whether torch finds a CUDA device."""
    import torch

    return bool(torch.cuda.is_available())


def _first_tensor(args: Any) -> Any:
    return next((value for value in args if _is_tensor(value)), None)


def _has_grad(args: Any) -> bool:
    import torch

    return torch.is_grad_enabled() and any(_is_tensor(a) and a.requires_grad for a in args)


def _plain(value: Any) -> Any:
    """Return an argument as something that is equal in two runs that do the same."""
    import torch

    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    known = isinstance(value, (torch.dtype, torch.device, torch.layout, torch.memory_format))
    return str(value) if known else type(value).__name__
