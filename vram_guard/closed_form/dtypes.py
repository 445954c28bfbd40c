"""Types of numbers, as people and files call them."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

from vram_guard.errors import InvalidInputError
from vram_guard.language import _

if TYPE_CHECKING:
    from vram_guard.closed_form.folder import Component

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
STORED: Final = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}


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


def stored_dtype(components: tuple[Component, ...]) -> str:
    """The type that the largest component is stored in; float32 where that is not a type to train in."""
    largest = max(components, key=lambda one: one.weights.parameters, default=None)
    return STORED.get((largest.weights.dtype if largest else None) or "", "float32")
