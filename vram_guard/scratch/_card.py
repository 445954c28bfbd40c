"""What kernels ask the device for when they decide how to run."""

from __future__ import annotations

from typing import NamedTuple, Protocol

#: Threads that a multiprocessor holds at a time (``maxThreadsPerMultiProcessor``), where it is not 2,048: CUDA C++
#: Programming Guide, "Technical Specifications per Compute Capability", "Maximum number of resident threads per SM".
_THREADS = {(7, 5): 1024, (8, 6): 1536, (8, 7): 1536, (8, 9): 1536, (11, 0): 1536, (12, 0): 1536, (12, 1): 1536}


def threads_per_multiprocessor(capability: tuple[int, int]) -> int:
    """Resident threads of a multiprocessor of this compute capability."""
    return _THREADS.get(capability, 2048)


class Card(NamedTuple):
    """The properties of a device that decide over the temporaries of kernels."""

    capability: tuple[int, int]
    multiprocessors: int


class Rule(Protocol):
    """How much a temporary of a kernel takes."""

    def bytes(self, numbers: tuple[int, ...], card: Card) -> int:
        """Bytes of the temporary; 0 where there is none."""


class DropoutStates(NamedTuple):
    """The generators of cuDNN's dropout (``cudnnDropoutGetStatesSize``): 24 bytes for each resident thread.

    An H200 (132 multiprocessors) took 6,488,064 bytes with cuDNN 9.19.
    """

    def bytes(self, numbers: tuple[int, ...], card: Card) -> int:  # noqa: ARG002 - as every rule
        return 24 * threads_per_multiprocessor(card.capability) * card.multiprocessors
