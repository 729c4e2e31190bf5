"""A kernel: one name, one parameter list, two lanes."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from cuverify import arguments as args_
from cuverify.contract import Contract, kernels_in, parse_contracts
from cuverify.errors import ArgumentError, ContractError, LaunchError
from cuverify.geometry import Dim, dim3
from cuverify.launches import Lane, Launch, Prepared
from cuverify.sources import KernelSource

if TYPE_CHECKING:
    from cuverify.compile import Cubin

_NUMBER = re.compile(r"[+-]?(0[xX][0-9a-fA-F]+|\d+)[uUlL]*")


def load_kernel(
    text: str | Path | KernelSource,
    *,
    kernel: str | None = None,
    name: str | None = None,
    **values: bool | int | float | str,
) -> Kernel:
    """Return a kernel; nothing is compiled yet.

    Parameters
    ----------
    text : str, Path or KernelSource
        The stem of one of the package's kernels (``"relocate"``), a path, or CUDA C++ itself
        (anything with a line break in it).
    kernel : str, optional
        Which kernel of the text; needed where it holds several.
    name : str, optional
        What diagnostics call a text that is given as a string.
    **values
        `-D` values, such as ``HEADS=8``.

    Raises
    ------
    SourceError
        If the text or a header is not found, or the text knows no such value.
    ContractError
        If the kernel is not in the text or has no contract beside it.

    Examples
    --------
    >>> kernel = cuverify.load_kernel("relocate", kernel="relocate_rows")     # doctest: +SKIP
    >>> kernel.compile("sm_120").resources["relocate_rows"].registers         # doctest: +SKIP
    """
    if isinstance(text, KernelSource):
        source = text.with_values(**values) if values else text
    elif isinstance(text, Path):
        source = KernelSource.from_file(text, values=values)
    elif "\n" in text:
        source = KernelSource.from_text(text, name=name or "<string>", values=values)
    elif "/" in text or text.endswith((".cu", ".cuh")):
        source = KernelSource.from_file(Path(text), values=values)
    else:
        source = KernelSource.from_package(text, values=values)
    return Kernel(source, kernel)


class Kernel:
    """A kernel that launches where its tensors are.

    CUDA torch tensors or CuPy arrays run on the GPU, on torch's current stream as it is at each
    launch. CPU torch tensors or numpy arrays (bf16 as uint16) run on the host lane. A mix is an
    error.

    Parameters
    ----------
    source : KernelSource
        The text.
    name : str, optional
        Which kernel of the text; needed where it holds several.

    Attributes
    ----------
    source : KernelSource
    name : str
    contract : Contract
        The parameters as declared beside the kernel.
    """

    def __init__(self, source: KernelSource, name: str | None = None) -> None:
        self.source = source
        found = kernels_in(source.text)
        if not found:
            raise ContractError(
                f'{source.name}: no `extern "C" __global__ void` kernel in the text'
            )
        if name is None:
            if len(found) > 1:
                raise ContractError(f"{source.name} holds {', '.join(found)}: say which by kernel=")
            name = found[0]
        if name not in found:
            raise ContractError(
                f"kernel={name!r} is not in {source.name}, which holds {', '.join(found)}"
            )
        self.name = name
        known = {**source.known_values(), **source.values}
        contracts = parse_contracts(
            source.text, name=source.name, first_line=source.first_line, values=known
        )
        if name not in contracts:
            raise ContractError(
                f"{source.name}: kernel `{name}` has no contract; write `// @kernel {name}` and "
                "one `// @param name access dtype [shape]` line for each parameter above it"
            )
        self.contract: Contract = contracts[name]
        self._numbers = {
            key: n for key, text in known.items() if (n := _whole_number(text)) is not None
        }

    def __repr__(self) -> str:
        return f"<Kernel {self.contract.signature()} of {self.source.name}>"

    def compile(self, arch: str) -> Cubin:
        """Compile for one architecture, such as ``sm_120``; no GPU is needed.

        Raises
        ------
        CompileError
            With all diagnostics.
        ArgumentError
            If the kernel is for other architectures.
        ToolchainError
            If NVRTC or the CUDA headers are missing.
        """
        from cuverify.compile import compile_cubin

        if self.contract.architectures and arch not in self.contract.architectures:
            only = ", ".join(self.contract.architectures)
            raise ArgumentError("arch", arch, f"{self.name} of {self.source.name} is for {only}")
        return compile_cubin(self.source, arch)

    def declared_shared(self) -> int | None:
        """Return the dynamic shared memory of a launch, in bytes; None if its values decide it."""
        expression = self.contract.shared
        if expression is None:
            return 0
        return expression(self._numbers) if expression.names <= self._numbers.keys() else None

    def __call__(
        self,
        grid: Dim,
        block: Dim,
        *arguments: object,
        shared: int | None = None,
        reach: Mapping[str, object] | None = None,
        lane: str | None = None,
    ) -> None:
        """Check and launch once. Parameters and errors as for `bind`."""
        self.bind(grid, block, *arguments, shared=shared, reach=reach, lane=lane)()

    def bind(
        self,
        grid: Dim,
        block: Dim,
        *arguments: object,
        shared: int | None = None,
        reach: Mapping[str, object] | None = None,
        lane: str | None = None,
    ) -> BoundLaunch:
        """Check a launch once and return it, to be launched many times.

        Parameters
        ----------
        grid, block : int or tuple of up to three int
        *arguments
            In the signature's order: tensors, numbers, None for an optional pointer. Addresses and
            numbers are those of now; the tensors are kept alive.
        shared : int, optional
            Dynamic shared memory in bytes; the contract's `@shared` where it is not given.
        reach : mapping of str to tensor or sequence of tensors, optional
            Memory that the kernel reaches through pointer tables, by the table's name: known to the
            checkers, kept alive, listed in launch records.
        lane : {"host", "device"}, optional
            Only needed for a kernel without tensor arguments.

        Raises
        ------
        ArgumentError, LaunchError
            Naming the argument or extent and its value, before anything runs.
        CompileError, ContractError, ToolchainError
            When the lane compiles the kernel.
        """
        checked, names = args_.check_arguments(self.contract, self._numbers, arguments)
        reached = self._reached(reach or {})
        tensors = [a for a in checked.values() if isinstance(a, args_.Tensor)]
        device = args_.device_of([*tensors, *reached.values()])
        device = self._device(device, lane)
        if device == "cpu" and self.contract.architectures:
            only = ", ".join(self.contract.architectures)
            raise LaunchError(
                f"{self.name} of {self.source.name} is for {only} only: its instructions have no "
                "twins on the host lane"
            )
        grid3, block3 = dim3("grid", grid), dim3("block", block)
        self._check_block(block3, names)
        launch = Launch(
            self.source,
            self.contract,
            grid3,
            block3,
            self._shared_bytes(shared, names),
            checked,
            reached,
            device,
        )
        return BoundLaunch(launch, _lane(device).prepare(launch))

    def _reached(self, reach: Mapping[str, object]) -> dict[str, args_.Tensor]:
        reached = {}
        for table, given in reach.items():
            if table not in self.contract.reach:
                raise ArgumentError(
                    "reach",
                    table,
                    f"{self.name} declares no `// @reach {table}`; it has "
                    f"{', '.join(self.contract.reach) or 'none'}",
                )
            many = given if isinstance(given, list | tuple) else [given]
            for at, value in enumerate(many):
                name = f"{table}[{at}]"
                tensor = args_.as_tensor(name, value)
                if tensor is None:
                    raise ArgumentError(name, value, "wants a tensor")
                if not tensor.writable and self.contract.reach[table] != "read":
                    raise ArgumentError(
                        name, value, "is read-only, but the kernel writes through the table"
                    )
                reached[name] = tensor
        return reached

    def _device(self, device: str | None, lane: str | None) -> str:
        if lane not in (None, "host", "device"):
            raise ArgumentError("lane", lane, "wants 'host' or 'device'")
        if device is None:
            if lane is None:
                raise ArgumentError(
                    "lane", lane, f"{self.name} was given no tensor: say 'host' or 'device'"
                )
            if lane == "host":
                return "cpu"
            import torch

            if not torch.cuda.is_available():
                raise LaunchError("lane='device': there is no CUDA device")
            return f"cuda:{torch.cuda.current_device()}"
        if lane is not None and (lane == "host") != (device == "cpu"):
            raise ArgumentError("lane", lane, f"the tensors are on {device}")
        return device

    def _check_block(self, block: tuple[int, int, int], names: Mapping[str, int]) -> None:
        expression = self.contract.block
        if expression is None:
            return
        self._need(expression.names, names, "@block")
        wanted, given = expression(names), block[0] * block[1] * block[2]
        if given != wanted:
            raise LaunchError(
                f"block={block}: {given} threads, but {self.name} is written for "
                f"{expression.text}{'' if expression.text == str(wanted) else f' = {wanted}'}"
            )

    def _shared_bytes(self, shared: int | None, names: Mapping[str, int]) -> int:
        if shared is None:
            expression = self.contract.shared
            if expression is None:
                return 0
            self._need(expression.names, names, "@shared")
            shared = expression(names)
        if isinstance(shared, bool) or not hasattr(shared, "__index__") or int(shared) < 0:
            raise LaunchError(f"shared={shared!r}: wants a number of bytes")
        return int(shared)

    def _need(self, wanted: frozenset[str], names: Mapping[str, int], tag: str) -> None:
        if missing := sorted(wanted - names.keys()):
            raise ContractError(
                f"{self.source.name}: {tag} of {self.name} names {missing[0]}, which nothing sets"
            )


class BoundLaunch:
    """A launch whose checks are done; calling it launches.

    Attributes
    ----------
    launch : Launch
        What will be launched, with all tensors that must stay alive.
    """

    __slots__ = ("_go", "launch")

    def __init__(self, launch: Launch, go: Prepared) -> None:
        self.launch = launch
        self._go = go

    def __call__(self) -> None:
        """Launch; on a GPU on torch's current stream, without host sync or allocation."""
        self._go()

    def in_order(self) -> BoundLaunch:
        """Return the same launch behind the end of what is in front of it, ``@early`` or not.

        What a kernel costs that lets others start early must not be measured by them.
        """
        contract = replace(self.launch.contract, early=False)
        launch = replace(self.launch, contract=contract)
        return BoundLaunch(launch, _lane(launch.device).prepare(launch))

    def __repr__(self) -> str:
        launch = self.launch
        return (
            f"<BoundLaunch {launch.contract.kernel} grid={launch.grid} block={launch.block} "
            f"on {launch.device}>"
        )


@functools.cache
def _lane(device: str) -> Lane:
    """Return the lane of a device; lanes are imported when they are first needed."""
    if device == "cpu":
        from cuverify.host.lane import HostLane

        return HostLane()
    from cuverify.device import DeviceLane

    return DeviceLane(int(device.removeprefix("cuda:")))


def _whole_number(value: object) -> int | None:
    if isinstance(value, int):
        return int(value)
    text = str(value).strip()
    return int(text.rstrip("uUlL"), 0) if _NUMBER.fullmatch(text) else None
