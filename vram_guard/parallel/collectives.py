"""Seconds that a collective takes, by its bytes and by where its ranks lie: latency and bandwidth.

The formulas and latencies are those with which NCCL itself chooses between its algorithms and protocols
(``src/graph/tuning.cc``, ``ncclTopoTuneModel``, read at commit 5067397): a ring sends ``n - 1`` parts of ``1/n`` of the
data to the next GPU (twice for an all-reduce), a tree goes up and down once; the protocols LL and LL128 take less
latency for a part of the bandwidth. The fastest is taken, as NCCL does. Bus bandwidth is what nccl-tests call so
(doc/PERFORMANCE.md there).

Left out: reductions in the switch (NVLS, SHARP), which make all-reduces faster; two jobs on one network; what copying
costs the GPU that computes meanwhile.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from vram_guard.parallel.links import LinkKind, Topology
    from vram_guard.parallel.spec import Parallel

_MICRO = 1e-6


class _Protocol(NamedTuple):
    """Latencies in microseconds: to begin with, and of a step within a node and between nodes."""

    begin: float
    steps: dict[LinkKind, float]
    share: float
    """Of the bandwidth that it reaches."""
    only_nvlink: bool = False


#: ``baseLatencies`` and ``hwLatencies`` of tuning.cc: LL, LL128, Simple.
_RING = (
    _Protocol(6.6, {"nvlink": 0.6, "pcie": 1.0, "network": 2.7}, 0.5),
    _Protocol(14.0, {"nvlink": 1.9, "pcie": 2.5, "network": 4.0}, 0.92, only_nvlink=True),
    _Protocol(8.4, {"nvlink": 3.4, "pcie": 5.7, "network": 14.0}, 1.0),
)
_TREE = (
    _Protocol(6.8, {"nvlink": 0.6, "pcie": 1.0, "network": 5.0}, 0.92 / 3.8),
    _Protocol(14.0, {"nvlink": 1.25, "pcie": 1.9, "network": 8.5}, 0.92 * 7 / 9, only_nvlink=True),
    _Protocol(8.4, {"nvlink": 4.0, "pcie": 4.0, "network": 14.0}, 0.92),
)


@dataclass(frozen=True)
class Group:
    """The ranks that take part in a collective.

    Attributes:
        ranks: how many.
        nodes: over which they are spread evenly.
    """

    ranks: int
    nodes: int = 1

    @property
    def in_a_node(self) -> int:
        """Ranks of the group in each node."""
        return self.ranks // self.nodes


def group_of(layout: Parallel, dimension: str, ranks: int | None = None) -> Group:
    """The ranks along one dimension of a layout's mesh.

    Args:
        layout: the mesh; ranks are numbered along its last dimension first, and nodes hold consecutive ranks.
        dimension: its name; "" or an unknown one: all ranks.
        ranks: where fewer than all along the dimension take part (neighbours); None: all.
    """
    sizes = layout.dimensions
    stride, found = 1, layout.gpus
    for name in reversed(sizes):
        if name == dimension:
            found = sizes[name]
            break
        stride *= sizes[name]
    else:
        stride = 1
    count = found if ranks is None or not 1 <= ranks <= layout.gpus else ranks
    node = layout.gpus_of_a_node
    together = max(1, min(count, node // stride))
    return Group(count, math.ceil(count / together))


def bus_bandwidth(group: Group, topology: Topology) -> float:
    """Bytes a second that each rank of a ring passes on: the slowest of its links."""
    reached = []
    if group.in_a_node > 1:
        reached.append(topology.inside.bandwidth)
    if group.nodes > 1:
        # As many rings as ranks of a node: together they use the ports of all of them.
        reached.append(group.in_a_node * topology.per_gpu_between)
    return min(reached)


def collective_seconds(name: str, size: int, group: Group, topology: Topology) -> float:
    """Seconds of one collective; 0 for a group of one rank.

    Args:
        name: as ``torch.distributed`` or NCCL call it: "all_gather_into_tensor", "_reduce_scatter_base", "AllReduce".
        size: bytes of the larger side on a rank: the gathered output, or the reduced input.
        group: the ranks.
        topology: what connects them.

    Example:
        >>> from vram_guard.parallel.links import topology
        >>> wires = topology("nvlink4,ib400", gpus=16, node=8)
        >>> within = collective_seconds("all_gather", 2**30, Group(8), wires)
        >>> within < collective_seconds("all_gather", 2**30, Group(8, nodes=8), wires)
        True
    """
    if group.ranks <= 1:
        return 0.0
    kind = name.lower().replace("_", "")
    if "alltoall" in kind:
        return _all_to_all(size, group, topology)
    if "gather" in kind or "scatter" in kind:
        return _ring(size, group, topology, group.ranks - 1, group.nodes - 1)
    if "allreduce" in kind or "syncbatchnorm" in kind:
        ring = _ring(size, group, topology, 2 * (group.ranks - 1), 2 * (group.nodes - 1))
        return min(ring, _tree(size, group, topology))
    if "barrier" in kind:
        return _tree(1, group, topology)
    # Broadcast, reduce, send: the whole of it passes each link once.
    return _ring(size, group, topology, group.ranks, group.nodes - 1)


def _ring(size: int, group: Group, topology: Topology, steps: int, crossing: int) -> float:
    """``steps`` parts of ``1/ranks`` of the data, one after the other; ``crossing`` of the steps leave a node."""
    bandwidth = bus_bandwidth(group, topology)
    volume = size * steps / group.ranks
    return min(
        _MICRO
        * (
            protocol.begin
            + (steps - crossing) * protocol.steps[topology.inside.kind]
            + crossing * protocol.steps["network"]
        )
        + volume / (bandwidth * protocol.share)
        for protocol in _RING
        if _usable(protocol, topology)
    )


def _tree(size: int, group: Group, topology: Topology) -> float:
    """Up a tree over the nodes and down again: all data passes each link twice."""
    bandwidth = bus_bandwidth(group, topology)
    hops = math.log2(group.nodes)
    return min(
        _MICRO
        * (
            protocol.begin
            + 2 * ((group.in_a_node - 1) * protocol.steps[topology.inside.kind] + hops * protocol.steps["network"])
        )
        + 2 * size / (bandwidth * protocol.share)
        for protocol in _TREE
        if _usable(protocol, topology)
    )


def _usable(protocol: _Protocol, topology: Topology) -> bool:
    return topology.inside.kind == "nvlink" or not protocol.only_nvlink


def _all_to_all(size: int, group: Group, topology: Topology) -> float:
    """Each rank sends a part to every other one: those in its node and those elsewhere at the same time."""
    inside = size * (group.in_a_node - 1) / group.ranks / topology.inside.bandwidth
    between = size * (group.ranks - group.in_a_node) / group.ranks / topology.per_gpu_between
    simple = _RING[-1]
    wait = simple.begin + simple.steps["network" if group.nodes > 1 else topology.inside.kind]
    return max(inside, between) + wait * _MICRO
