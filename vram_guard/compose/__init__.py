"""Timelines of options, composed from those of a few others instead of being traced (pure over timelines).

What is composed is what a trace would show as long as the parts do not depend on each other: a block runs the same
operators whether its neighbours are checkpointed or not, every micro-batch runs the same ones, and so on. That is not
proven here: a composed timeline decides what is worth a trace, and the trace decides.
"""

from __future__ import annotations

from vram_guard.compose._blocks import BlockMixture
from vram_guard.compose._errors import CannotComposeError
from vram_guard.compose._events import blocks_of_set_up
from vram_guard.compose._frozen import with_frozen_on_host
from vram_guard.compose._micro_batches import in_micro_batches
from vram_guard.compose._names import NumberedNames
from vram_guard.compose._optimizer import with_optimizer_of
from vram_guard.compose._sizes import first_steps, of_every_size
from vram_guard.compose._steps import repeated

__all__ = [
    "BlockMixture",
    "CannotComposeError",
    "NumberedNames",
    "blocks_of_set_up",
    "first_steps",
    "in_micro_batches",
    "of_every_size",
    "repeated",
    "with_frozen_on_host",
    "with_optimizer_of",
]
