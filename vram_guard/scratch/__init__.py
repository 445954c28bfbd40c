"""Temporaries of CUDA kernels whose sizes no tensor shows: steps in the batch size, and different from card to card.

A rule is a value that is asked for bytes: ``rule.bytes(numbers, card)``. The numbers are sizes and strides of the
operands at one batch size; the card is what the kernel asks the device for before it decides.
"""

from vram_guard.scratch._card import Card, DropoutStates, Rule, threads_per_multiprocessor
from vram_guard.scratch._iterator import reduced_iterator
from vram_guard.scratch._norms import PartialGradient
from vram_guard.scratch._recurrent import RecurrentLayer, RecurrentWorkspace
from vram_guard.scratch._reduction import Part, Reduction
from vram_guard.scratch._sorting import EMBEDDING_SORT_ABOVE, EmbeddingGradient, RadixSort

__all__ = [
    "EMBEDDING_SORT_ABOVE",
    "Card",
    "DropoutStates",
    "EmbeddingGradient",
    "Part",
    "PartialGradient",
    "RadixSort",
    "RecurrentLayer",
    "RecurrentWorkspace",
    "Reduction",
    "Rule",
    "reduced_iterator",
    "threads_per_multiprocessor",
]
