"""Read the nodes of a captured graph through cuda-bindings.

cuda-bindings is an optional extra. Without it, or with one that the driver does not suit, a
`GraphSeen` says why nothing was read, and rules fall back to comparing streams.
"""

from __future__ import annotations

from typing import Any

from cuverify.validators.observations import GraphSeen, NodeSeen

_PREFIX = "CU_GRAPH_NODE_TYPE_"


class _DriverError(Exception):
    """A driver call returned an error code."""


def walk(raw_graph: int, driver: Any = None) -> GraphSeen:
    """Return the nodes of a graph and of the bodies in it.

    Parameters
    ----------
    raw_graph : int
        A ``cudaGraph_t``, as `torch.cuda.CUDAGraph.raw_cuda_graph` returns it. It is only read.
    driver : module, optional
        What to call instead of `cuda.bindings.driver`.

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
    nodes: list[NodeSeen] = []
    unseen: list[str] = []
    try:
        _walk(driver, driver.CUgraph(init_value=raw_graph), "", nodes, unseen)
    except _DriverError as error:
        return GraphSeen(not_inspected=f"the driver refused to list the nodes: {error}")
    except (AttributeError, RuntimeError, TypeError) as error:
        # another major version of the bindings than the driver, or a library that cannot be loaded
        return GraphSeen(not_inspected=f"cuda-bindings failed: {type(error).__name__}: {error}")
    return GraphSeen(tuple(nodes), unseen_bodies=tuple(unseen))


def _walk(driver: Any, graph: Any, body: str, nodes: list[NodeSeen], unseen: list[str]) -> None:
    # the first call, without room for nodes, only counts them
    _, count = _call(driver.cuGraphGetNodes(graph, 0))
    handles = _call(driver.cuGraphGetNodes(graph, count))[0] if count else []
    for index, handle in enumerate(handles):
        kind = _call(driver.cuGraphNodeGetType(handle))[0].name
        kind = kind.removeprefix(_PREFIX).lower()
        place = f"{body}.{index}" if body else str(index)
        if kind == "kernel":
            nodes.append(_kernel_node(driver, handle, body))
            continue
        nodes.append(NodeSeen(kind, body=body))
        if kind == "graph":
            child = _call(driver.cuGraphChildGraphNodeGetGraph(handle))[0]
            _walk(driver, child, place, nodes, unseen)
        elif kind == "conditional":
            unseen.append(place)


def _kernel_node(driver: Any, handle: Any, body: str) -> NodeSeen:
    params = _call(driver.cuGraphKernelNodeGetParams(handle))[0]
    return NodeSeen(
        "kernel",
        kernel=_kernel_name(driver, params),
        grid=(int(params.gridDimX), int(params.gridDimY), int(params.gridDimZ)),
        block=(int(params.blockDimX), int(params.blockDimY), int(params.blockDimZ)),
        shared=int(params.sharedMemBytes),
        body=body,
    )


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
