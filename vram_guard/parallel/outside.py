"""Memory of a GPU that collectives take outside PyTorch's allocator: a range, never exact.

NCCL allocates the buffers of its connections itself. NVIDIA publishes no table; what people measured:

- 544 MB for a group of two A100 of a node with NVLink, 688 MB for three or four (github.com/NVIDIA/nccl/issues/964);
- 1.6 GB for one communicator and 6 GB for three or more, on GPUs that are not named (NVIDIA/nccl/issues/864);
- 1.06 GB before and 4.34 GB after the first all-to-all on 8 H100 (NVIDIA/nccl/issues/1685);
- one buffer of 512 MiB shared by all communicators for the network with NCCL 2.28 on B300 (NVIDIA/nccl/issues/2363).

It is proportional to the channels, so that PCI Express takes less than NVLink, and does not grow beyond two nodes
(NVIDIA/nccl/issues/986).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from vram_guard.parallel.links import Topology
    from vram_guard.parallel.spec import Parallel

#: Bytes of one communicator over NVLink, nccl#964: two ranks, and more.
_TWO_RANKS = 544 * 10**6
_MORE_RANKS = 688 * 10**6

#: The largest that was reported for one communicator, nccl#864.
_MOST = 1600 * 10**6

#: Channels over NVLink on A100 (NVIDIA/nccl/issues/1785), and the fewest over PCI Express (2, ``NCCL_MIN_NCHANNELS``
#: of a ring that is used in both directions).
_CHANNELS_NVLINK = 24
_CHANNELS_PCIE = 2


@dataclass(frozen=True)
class OutsideAllocator:
    """Bytes that collectives take on each GPU beside PyTorch's allocator.

    Attributes:
        communicators: NCCL communicators of each rank.
        low: bytes that are likely at least.
        high: bytes that are planned for.
        most: bytes by the largest report.
    """

    communicators: int
    low: int
    high: int
    most: int


def communicators_of(layout: Parallel) -> tuple[int, ...]:
    """Ranks of each communicator that a rank takes part in: one for each mesh dimension in use.

    With several dimensions one more for all ranks, which losses and barriers use.
    """
    used = [size for size in layout.dimensions.values() if size > 1]
    if layout.reshard not in (True, False) and layout.reshard > 1:
        used.append(int(layout.reshard))
    return tuple(used) if len(used) < 2 else (*used, layout.gpus)


def outside_allocator(layout: Parallel, topology: Topology) -> OutsideAllocator:
    """What NCCL takes on each GPU under a layout.

    Example:
        >>> from vram_guard import Parallel
        >>> from vram_guard.parallel.links import topology
        >>> layout = Parallel(gpus=16, kind="hsdp")
        >>> taken = outside_allocator(layout, topology("nvlink4,ib400", gpus=16, node=8))
        >>> taken.communicators, taken.low <= taken.high <= taken.most
        (3, True)
    """
    sizes = communicators_of(layout)
    high = sum(_TWO_RANKS if size == 2 else _MORE_RANKS for size in sizes)
    fewest = 1.0 if topology.inside.kind == "nvlink" else _CHANNELS_PCIE / _CHANNELS_NVLINK
    low = int(_TWO_RANKS * fewest) * len(sizes)
    return OutsideAllocator(len(sizes), low, high, max(high, _MOST * len(sizes)))
