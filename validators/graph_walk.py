"""Read the nodes of a captured graph through cuda-bindings: what runs, on what, after what.

cuda-bindings is an optional extra. Without it, or with one that the driver does not suit, a
`GraphSeen` says why nothing was read, and rules fall back to comparing streams.
"""

from __future__ import annotations

import ctypes
from typing import Any

from cuverify.validators.observations import GraphSeen, NodeSeen, ParamSeen, PointerSeen
from cuverify.validators.provenance import Landscape

_PREFIX = "CU_GRAPH_NODE_TYPE_"
_MOST_PARAMS = 512
_ATTRIBUTES = ("COOPERATIVE", "PROGRAMMATIC_STREAM_SERIALIZATION")


class _DriverError(Exception):
    """A driver call returned an error code."""


def walk(raw_graph: int, driver: Any = None, landscape: Landscape | None = None) -> GraphSeen:
    """Return the nodes of a graph and of the bodies in it.

    Parameters
    ----------
    raw_graph : int
        A ``cudaGraph_t``, as `torch.cuda.CUDAGraph.raw_cuda_graph` returns it. It is only read.
    driver : module, optional
        What to call instead of `cuda.bindings.driver`.
    landscape : Landscape, optional
        Names what the addresses in the arguments point to. Without one no pointer is looked at.

    Returns
    -------
    GraphSeen
        ``not_inspected`` says why, when the nodes could not be read.
    """
    if driver is None:
        try:
            from cuda.bindings import driver  # type: ignore[no-redef]
        except ImportError:
            return GraphSeen(not_inspected="cuda-bindings not installed")
    walker = _Walker(driver, landscape)
    try:
        graph = driver.CUgraph(init_value=raw_graph)
        walker.walk(graph, "")
        edges = walker.edges(graph)
    except _DriverError as error:
        return GraphSeen(not_inspected=f"the driver refused to list the nodes: {error}")
    except (AttributeError, RuntimeError, TypeError) as error:
        # another major version of the bindings than the driver, or a library that cannot be loaded
        return GraphSeen(not_inspected=f"cuda-bindings failed: {type(error).__name__}: {error}")
    return GraphSeen(tuple(walker.nodes), unseen_bodies=tuple(walker.unseen), edges=edges)


class _Walker:
    """Collects the nodes of one graph."""

    def __init__(self, driver: Any, landscape: Landscape | None) -> None:
        self.driver = driver
        self.landscape = landscape
        self.nodes: list[NodeSeen] = []
        self.unseen: list[str] = []
        self._numbers: dict[int, int] = {}  # of the captured graph's own nodes

    def walk(self, graph: Any, body: str) -> None:
        driver = self.driver
        # the first call, without room for nodes, only counts them
        _, count = _call(driver.cuGraphGetNodes(graph, 0))
        handles = _call(driver.cuGraphGetNodes(graph, count))[0] if count else []
        for index, handle in enumerate(handles):
            if not body:
                self._numbers[_handle(handle)] = len(self.nodes)
            kind = _call(driver.cuGraphNodeGetType(handle))[0].name
            kind = kind.removeprefix(_PREFIX).lower()
            place = f"{body}.{index}" if body else str(index)
            self.nodes.append(self._node(kind, handle, body))
            if kind == "graph":
                child = _call(driver.cuGraphChildGraphNodeGetGraph(handle))[0]
                self.walk(child, place)
            elif kind == "conditional":
                self._conditional(handle, place)

    def edges(self, graph: Any) -> tuple[tuple[int, int, str], ...]:
        """Return the captured graph's edges; none where the bindings cannot tell."""
        ask = getattr(self.driver, "cuGraphGetEdges", None)
        if ask is None:
            return ()
        try:
            count = int(_call(ask(graph, 0))[-1])
            if not count:
                return ()
            first, second, *data = _call(ask(graph, count))
            kinds = data[0] if data and isinstance(data[0], (list, tuple)) else [None] * count
            return tuple(
                (
                    self._numbers.get(_handle(one), -1),
                    self._numbers.get(_handle(other), -1),
                    "programmatic" if int(getattr(kind, "type", 0) or 0) else "full",
                )
                for one, other, kind in zip(first, second, kinds, strict=False)
            )
        except (_DriverError, TypeError, ValueError):
            return ()

    def _conditional(self, handle: Any, place: str) -> None:
        """Go into the bodies, where the driver lists them."""
        ask = getattr(self.driver, "cuGraphNodeGetParams", None)
        try:
            if ask is None:
                raise _DriverError
            params = _call(ask(handle))[0].conditional
            for number, graph in enumerate(params.phGraph_out[: int(params.size)]):
                self.walk(graph, f"{place}.{number}")
        except (_DriverError, AttributeError, TypeError):
            self.unseen.append(place)

    def _node(self, kind: str, handle: Any, body: str) -> NodeSeen:
        try:
            if kind == "kernel":
                return self._kernel(handle, body)
            if kind == "memcpy":
                return self._copy(handle, body)
            if kind == "memset":
                params = _call(self.driver.cuGraphMemsetNodeGetParams(handle))[0]
                size = int(params.elementSize) * int(params.width) * max(1, int(params.height))
                return NodeSeen(kind, body=body, target=self._at(params.dst), size=size)
            if kind == "mem_alloc":
                params = _call(self.driver.cuGraphMemAllocNodeGetParams(handle))[0]
                size = int(params.bytesize)
                return NodeSeen(kind, body=body, target=self._at(params.dptr), size=size)
            if kind == "mem_free":
                address = _call(self.driver.cuGraphMemFreeNodeGetParams(handle))[0]
                return NodeSeen(kind, body=body, target=self._at(address))
        except (_DriverError, AttributeError, TypeError, ValueError) as error:
            return NodeSeen(kind, body=body, params_unknown=f"{type(error).__name__}: {error}")
        return NodeSeen(kind, body=body)

    def _kernel(self, handle: Any, body: str) -> NodeSeen:
        params = _call(self.driver.cuGraphKernelNodeGetParams(handle))[0]
        arguments, unknown = self._arguments(params)
        return NodeSeen(
            "kernel",
            kernel=_kernel_name(self.driver, params),
            grid=(int(params.gridDimX), int(params.gridDimY), int(params.gridDimZ)),
            block=(int(params.blockDimX), int(params.blockDimY), int(params.blockDimZ)),
            shared=int(params.sharedMemBytes),
            body=body,
            params=arguments,
            params_unknown=unknown,
            attributes=self._attributes(handle),
        )

    def _arguments(self, params: Any) -> tuple[tuple[ParamSeen, ...], str]:
        """Return the arguments by the layout that the driver knows of the kernel."""
        driver = self.driver
        try:
            cells = int(params.kernelParams or 0)
            if not cells:
                return (), "the node holds no list of arguments"
            if int(params.func):
                ask, function = driver.cuFuncGetParamInfo, params.func
            else:
                ask, function = driver.cuKernelGetParamInfo, params.kern
            found = []
            for index in range(_MOST_PARAMS):
                code, *layout = ask(function, index)
                if int(code) != 0:
                    break
                offset, size = int(layout[0]), int(layout[1])
                address = ctypes.c_uint64.from_address(cells + 8 * index).value
                data = ctypes.string_at(address, size)
                pointers = self.landscape.words(data) if self.landscape else ()
                found.append(ParamSeen(index, offset, size, data.hex(), pointers))
            return tuple(found), ""
        except (AttributeError, TypeError, ValueError) as error:
            return (), f"{type(error).__name__}: {error}"

    def _attributes(self, handle: Any) -> dict[str, str]:
        driver = self.driver
        found = {}
        ids = getattr(driver, "CUlaunchAttributeID", None)
        for name in _ATTRIBUTES:
            identity = getattr(ids, f"CU_LAUNCH_ATTRIBUTE_{name}", None)
            if identity is None:
                continue
            try:
                value = _call(driver.cuGraphKernelNodeGetAttribute(handle, identity))[0]
                field = {
                    "COOPERATIVE": "cooperative",
                    "PROGRAMMATIC_STREAM_SERIALIZATION": "programmaticStreamSerializationAllowed",
                }[name]
                if int(getattr(value, field)):
                    found[name.lower()] = "1"
            except (_DriverError, AttributeError, TypeError, ValueError):
                continue
        return found

    def _copy(self, handle: Any, body: str) -> NodeSeen:
        params = _call(self.driver.cuGraphMemcpyNodeGetParams(handle))[0]
        size = int(params.WidthInBytes) * max(1, int(params.Height)) * max(1, int(params.Depth))
        return NodeSeen(
            "memcpy",
            body=body,
            source=self._end(params, "src"),
            target=self._end(params, "dst"),
            size=size,
        )

    def _end(self, params: Any, side: str) -> PointerSeen | None:
        kind = getattr(params, f"{side}MemoryType").name
        if kind.endswith("ARRAY"):
            return None
        field = "Host" if kind.endswith("HOST") else "Device"
        return self._at(getattr(params, f"{side}{field}"))

    def _at(self, address: Any) -> PointerSeen | None:
        if self.landscape is None:
            return None
        return self.landscape.locate(int(address or 0))


def _handle(node: Any) -> int:
    try:
        return int(node)
    except TypeError:
        return id(node)


def _kernel_name(driver: Any, params: Any) -> str | None:
    """Return the name, mangled for C++ kernels; None where the driver gives none."""
    # a node made from a library's kernel holds a CUkernel and no CUfunction
    try:
        if int(params.func):
            name = _call(driver.cuFuncGetName(params.func))[0]
        elif int(params.kern):
            name = _call(driver.cuKernelGetName(params.kern))[0]
        else:
            return None
    except _DriverError:
        return None
    return name.decode() if isinstance(name, bytes) else str(name)


def _call(answer: tuple[Any, ...]) -> tuple[Any, ...]:
    """Return a driver call's values without its error code, which must be success."""
    code, *values = answer
    if int(code) != 0:
        raise _DriverError(getattr(code, "name", str(code)))
    return tuple(values)
