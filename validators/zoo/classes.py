"""The failure classes of captured steps that were seen in the field, by number.

A mutant names those that it stands for; the registry says why a class has none.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

CLASSES: Mapping[int, str] = MappingProxyType(
    {
        # work that is not in the graph
        1: "launch on a stream outside of the capture",
        2: "stream kept from the first launch",
        3: "graph without a node",
        4: "capture on a stream that was never warmed up",
        5: "input that is not copied into the captured buffer",
        6: "tensor bound anew instead of written",
        7: "branch that is taken in captures only",
        8: "graph of another step out of a cache",
        # calls that a capture forbids, or that make it fragile
        9: "host reads a value of the device",
        10: "legacy stream made to wait for the capture",
        11: "garbage collection frees memory in the capture",
        12: "query of an event of the capture",
        13: "forbidden call of another thread",
        14: "pinned allocation or query of a host event",
        15: "compiling, tuning or loading at the first launch",
        16: "library handle or workspace made at the first call",
        17: "allocation by another library",
        18: "side stream that is not joined",
        19: "exchange of tensors between libraries",
        20: "another device is current",
        21: "backward pass on threads of its own",
        22: "debug mode of synchronisation around the capture",
        23: "private pool that a failed capture leaves",
        24: "host callback that is lost or waits for Python",
        25: "allocation inside of the graph",
        # state of the host that the capture froze
        26: "number of the host as an argument",
        27: "grid or split count from a length of the host",
        28: "plan in another buffer than the captured one",
        29: "metadata allocated anew before a replay",
        30: "metadata kept from the warm-up",
        31: "random numbers that repeat or cannot be drawn",
        32: "wrapper whose static inputs have moved",
        # lifetime and aliasing
        33: "input that was freed",
        34: "workspace that grew after the capture",
        35: "workspace of a library that graphs share",
        36: "scratch cached out of the graph's pool",
        37: "output that the next replay overwrites",
        38: "pool that two graphs share",
        39: "pool whose free memory others use between replays",
        40: "module unloaded under the graph",
        41: "pinned staging that is used again",
        42: "refill while the replay still reads",
        43: "copy from pageable memory",
        # buckets, padding and trees
        44: "padding that holds what a larger batch left",
        45: "NaN in padding that reaches real rows",
        46: "tree mask too small for the longest context",
        47: "tree mask counted twice, or too short for padding",
        48: "test that captures on what it replays",
        # state inside of kernels
        49: "accumulator or output that nobody initialises",
        50: "counter that must be zero on entry",
        51: "dependent launch that does not wait",
        52: "launch attribute that is lost or changed",
        53: "results that differ from eager ones by rounding or order",
        # the tests themselves
        54: "check that cannot fail",
    }
)
"""Short names, from 1 on."""
