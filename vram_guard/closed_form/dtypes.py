"""Types of numbers, as people and files call them."""

from __future__ import annotations

from typing import Final

from vram_guard.errors import InvalidInputError
from vram_guard.language import _

#: Lightning's words for weights of these types.
PRECISION_OF: Final = {"float32": "32-true", "float16": "16-true", "bfloat16": "bf16-true"}
#: What people call them.
SPELLINGS: Final = {
    "fp32": "float32",
    "f32": "float32",
    "32": "float32",
    "fp16": "float16",
    "f16": "float16",
    "16": "float16",
    "half": "float16",
    "bf16": "bfloat16",
}


def checked_dtype(name: str) -> str:
    """A key of :data:`PRECISION_OF` for what people call a type.

    Raises:
        InvalidInputError: it is none of them.
    """
    known = SPELLINGS.get(name.lower().removeprefix("torch."), name.lower().removeprefix("torch."))
    if known not in PRECISION_OF:
        raise InvalidInputError(
            _("--dtype must be one of {names}, not {name}", names=", ".join(PRECISION_OF), name=repr(name)[:40])
        )
    return known
