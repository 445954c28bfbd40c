"""Links: what connects the GPUs of a node, and the nodes; how fast, with sources.

Bandwidths are what a ring of GPUs reaches in one direction for each GPU, as NCCL's own model of machines has them
(``src/graph/topo.h``, read at commit 5067397): 20.0 GB/s for a link of NVLink 2 and 3, 20.6 of NVLink 4, 40.1 of
NVLink 5, 12 GB/s of PCI Express 3.0 x16 (twice as much for each generation after it), 12 GB/s of a network of
100 Gbit/s. Links of a card: V100 6, A100 12, H100 and B200 18 (NVIDIA's data sheets: 300, 600, 900, 1,800 GB/s, both
directions together).
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from vram_guard.budget import GPU
from vram_guard.errors import InvalidInputError
from vram_guard.language import _

LinkKind = Literal["nvlink", "pcie", "network"]

_GB = 1e9

#: Bytes a second of each generation, one direction, all links of a card together.
_NVLINK = {2: 6 * 20.0 * _GB, 3: 12 * 20.0 * _GB, 4: 18 * 20.6 * _GB, 5: 18 * 40.1 * _GB}
_NVLINK_OF = {(7, 0): 2, (8, 0): 3, (9, 0): 4, (10, 0): 5, (10, 3): 5}

#: Cards sold with 400 GB/s of NVLink in both directions (press reports): 8 links.
_FEWER_LINKS = {"A800": 8 / 12, "H800": 8 / 18}

_PCIE = {3: 12.0 * _GB, 4: 24.0 * _GB, 5: 48.0 * _GB}

#: Share of a network port's rate that is reached: 12 of 12.5 GB/s.
_NETWORK_SHARE = 12.0 / 12.5
_NETWORK_SPEEDS = (1, 10, 25, 40, 50, 100, 200, 400, 800)
_NETWORK = re.compile(r"(?:(\d+)x)?(ib|roce|ethernet|eth)(\d+)")

#: Ports of the machines that carry these cards: DGX-1 4 x 100 Gbit/s, DGX A100 8 x 200, DGX H100 and B200 8 x 400
#: (NVIDIA's data sheets of these systems).
_USUAL_NETWORK = {(7, 0): "4xib100", (8, 0): "ib200", (9, 0): "ib400", (10, 0): "ib400", (10, 3): "ib800"}

KNOWN_LINKS = (
    *("nvlink", *(f"nvlink{one}" for one in _NVLINK), "pcie", *(f"pcie{one}" for one in _PCIE)),
    *("ib100", "ib200", "ib400", "ib800", "roce100", "roce200", "roce400", "ethernet10", "ethernet25", "ethernet100"),
)


@dataclass(frozen=True)
class Link:
    """A kind of connection between GPUs.

    Attributes:
        name: as it is asked for.
        kind: what it is, on which the time of a message depends.
        bandwidth: bytes a second in one direction: of one GPU within a node, of one port between nodes.
        ports: of a node, for a network; None: one for each GPU.
    """

    name: str
    kind: LinkKind
    bandwidth: float
    ports: int | None = None


@dataclass(frozen=True)
class Topology:
    """The GPUs of a training and what connects them.

    Attributes:
        node: GPUs of a node.
        inside: between GPUs of a node.
        between: between nodes.
        assumptions: what was assumed because nobody said it, in sentences.

    Example:
        >>> wires = topology("nvlink4,ib400", gpus=64, node=8)
        >>> round(wires.inside.bandwidth / 1e9), round(wires.per_gpu_between / 1e9)
        (371, 48)
    """

    node: int
    inside: Link
    between: Link
    assumptions: tuple[str, ...] = ()

    @property
    def per_gpu_between(self) -> float:
        """Bytes a second between nodes for each GPU, while all of them send."""
        ports = self.node if self.between.ports is None else self.between.ports
        return self.between.bandwidth * ports / self.node


def topology(text: str | Topology | None, *, gpus: int, node: int, gpu: GPU | None = None) -> Topology:
    """The topology that a user's words mean.

    Args:
        text: the link within a node and the one between nodes, such as "nvlink,ib400"; either may be left out, and is
            then assumed from the card. A port for each GPU is meant ("ib400"), with ethernet one for each node; other
            numbers of ports of a node stand in front: "4xib100".
        gpus: of the whole training.
        node: GPUs of a node.
        gpu: the card; None: not known, an A100's links are assumed.

    Raises:
        InvalidInputError: a link that is not known, or two for the same place.
    """
    if isinstance(text, Topology):
        return text
    inside, between = None, None
    for word in _words(text):
        link = _link(word, gpu)
        if link.kind == "network":
            if between is not None:
                raise InvalidInputError(
                    _("link names two networks, {one} and {other}: give one", one=between.name, other=link.name)
                )
            between = link
        elif inside is not None:
            raise InvalidInputError(
                _("link names {one} and {other} within a node: give one", one=inside.name, other=link.name)
            )
        else:
            inside = link
    assumptions = []
    if inside is None:
        inside = _usual_inside(gpu)
        if node > 1:
            assumptions.append(_("the GPUs of a node are assumed to be connected by {link}", link=inside.name))
    if between is None:
        between = _usual_between(gpu, inside)
        if gpus > node:
            assumptions.append(_("nodes are assumed to be connected by {link}", link=between.name))
    return Topology(node, inside, between, tuple(assumptions))


def _words(text: object) -> list[str]:
    if text is None:
        return []
    if not isinstance(text, str):
        raise InvalidInputError(_('link must be text such as "nvlink,ib400", not {value}', value=repr(text)[:60]))
    words = [word.strip().lower() for word in text.split(",") if word.strip()]
    if not words:
        raise InvalidInputError(_('link names nothing; give text such as "nvlink,ib400", or leave it out'))
    return words


def _link(word: str, gpu: GPU | None) -> Link:
    if word in ("nvlink", "pcie"):
        return _of_card(word, gpu)
    for name, table in (("nvlink", _NVLINK), ("pcie", _PCIE)):
        for generation, bandwidth in table.items():
            if word == f"{name}{generation}":
                return Link(word, "nvlink" if name == "nvlink" else "pcie", bandwidth)
    network = _NETWORK.fullmatch(word)
    if network is None or int(network[3]) not in _NETWORK_SPEEDS or network[1] == "0":
        raise InvalidInputError(
            _("unknown link {name}; known are {known}", name=repr(word)[:40], known=", ".join(KNOWN_LINKS))
        )
    ports = int(network[1]) if network[1] else 1 if network[2].startswith("eth") else None
    return Link(word, "network", int(network[3]) / 8 * _GB * _NETWORK_SHARE, ports)


def _of_card(word: str, gpu: GPU | None) -> Link:
    """The NVLink or the PCI Express that this card has."""
    if word == "pcie":
        generation = 4 if gpu is None or gpu.pcie_generation is None else gpu.pcie_generation
        return Link(f"pcie{generation}", "pcie", _PCIE[generation])
    capability = (8, 0) if gpu is None else gpu.compute_capability
    found = _NVLINK_OF.get(capability)
    if found is None:
        name = "" if gpu is None else gpu.name
        raise InvalidInputError(
            _("which NVLink {name} has is not known here: say nvlink2 to nvlink5, or pcie", name=name)
        )
    share = 1.0 if gpu is None else next((part for name, part in _FEWER_LINKS.items() if gpu.name.startswith(name)), 1)
    return Link(f"nvlink{found}", "nvlink", _NVLINK[found] * share)


def _usual_inside(gpu: GPU | None) -> Link:
    """NVLink where boards of this card are built with it; else PCI Express."""
    known = gpu is None or gpu.compute_capability in _NVLINK_OF
    bridged = gpu is not None and ("PCIe" in gpu.name or "NVL" in gpu.name)  # at most two cards, or four
    return _of_card("nvlink" if known and not bridged else "pcie", gpu)


def _usual_between(gpu: GPU | None, inside: Link) -> Link:
    usual = _USUAL_NETWORK.get((8, 0) if gpu is None else gpu.compute_capability)
    return _link(usual if usual is not None and inside.kind == "nvlink" else "ethernet100", gpu)
