"""Types of numbers, as people and files call them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.step import Precision

#: Lightning's words for weights of these types.
PRECISION_OF: Final = {"float32": "32-true", "float16": "16-true", "bfloat16": "bf16-true"}
#: Those under autocast in such a type, where a config says it of precision; weights then stay in float32.
MIXED_OF: Final[Mapping[str, Precision]] = {"float32": "32-true", "float16": "16-mixed", "bfloat16": "bf16-mixed"}
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
