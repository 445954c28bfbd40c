"""The optimizer that a training by name is asked to have."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module
from importlib.util import find_spec
from typing import TYPE_CHECKING, Any, Final

from vram_guard.errors import InvalidInputError, MissingLibraryError
from vram_guard.language import _, marked

if TYPE_CHECKING:
    import torch

USUAL: Final = "adamw"

#: Name -> in words, a message of the catalogues.
WORDS: Final[Mapping[str, str]] = {
    USUAL: marked("AdamW"),
    "adamw-8bit": marked("AdamW with states in 8 bits (bitsandbytes)"),
    "sgd": marked("SGD with momentum"),
}


def checked_optimizer(name: str | None) -> str:
    """The name, or the usual one's for None.

    Raises:
        InvalidInputError: it is not known.
    """
    if name is None:
        return USUAL
    if name.lower() not in WORDS:
        raise InvalidInputError(
            _("optimizer {name} is not known: give one of {names}", name=repr(name)[:40], names=", ".join(WORDS))
        )
    return name.lower()


def named_optimizer(name: str | None) -> Callable[[Any], torch.optim.Optimizer]:
    """What makes the optimizer of parameters; None: the usual one. Learning rates take no memory: any will do.

    Raises:
        InvalidInputError: the name is not known.
        MissingLibraryError: bitsandbytes is not installed.
    """
    import torch

    name = checked_optimizer(name)

    if name == "sgd":
        return partial(torch.optim.SGD, lr=0.1, momentum=0.9)
    if name == USUAL:
        return torch.optim.AdamW
    if not find_spec("bitsandbytes"):
        option, library = "--optimizer adamw-8bit", "bitsandbytes"
        raise MissingLibraryError(_("{option} needs {library}: pip install {library}", option=option, library=library))
    made: Any = import_module("bitsandbytes").optim.AdamW8bit
    return lambda parameters: made(one for one in parameters if one.requires_grad)  # it steps none that is frozen
