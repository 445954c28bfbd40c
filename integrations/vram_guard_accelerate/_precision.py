"""Mixed precisions, as the core (Lightning's words) and as Accelerate call them."""

from __future__ import annotations

from typing import Any

from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _

#: The core's name -> Accelerate's.
ACCELERATES = {"32-true": "no", "16-mixed": "fp16", "bf16-mixed": "bf16"}
_CORES = {name: precision for precision, name in ACCELERATES.items()}


def precision_of(accelerator: Any) -> str:
    """The precision of a script's Accelerator, as the core calls it."""
    name = str(accelerator.state._mixed_precision)  # noqa: SLF001 - see private_api.py; asking is what scripts do
    if name not in _CORES:
        raise UnsupportedStepError(_("mixed precision {name} cannot be predicted", name=repr(name)))
    return _CORES[name]
