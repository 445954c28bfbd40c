"""``lightning.pytorch`` and ``pytorch_lightning``: one library under two names, with different classes.

A Trainer of one namespace accepts only callbacks of its own; a class that inherits both works in both. What
the guard puts into a Trainer is always taken from the Trainer's own namespace.
"""

from __future__ import annotations

import contextlib
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import Any

from vram_guard.apply.backward_hooks import of_package
from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _

NAMESPACES = ("lightning.pytorch", "pytorch_lightning")


def installed() -> list[ModuleType]:
    """The namespaces that are here, imported.

    Raises:
        ImportError: when neither is, naming what installs one.
    """
    here = [import_module(name) for name in NAMESPACES if _exists(name)]
    if not here:
        raise ImportError(_("vram_guard_lightning needs Lightning, which is not installed: pip install lightning"))
    return here


def callback_base() -> type:
    """The class to inherit from: every installed namespace's ``Callback``."""
    return type("CallbackBase", tuple(namespace.Callback for namespace in installed()), {})


def of(trainer: object) -> ModuleType:
    """The namespace that a Trainer belongs to.

    Raises:
        UnsupportedStepError: for an object that is not a Lightning Trainer.
    """
    for namespace in installed():
        if isinstance(trainer, namespace.Trainer):
            return namespace
    kind, known = type(trainer).__qualname__, _(" or ").join(NAMESPACES)
    raise UnsupportedStepError(_("{kind} is not a Trainer of {known}", kind=kind, known=known))


def part(namespace: ModuleType, path: str) -> Any:
    """A class of the namespace by its path below it, for instance "plugins.precision.MixedPrecision"."""
    module, _, name = path.rpartition(".")
    return getattr(import_module(f"{namespace.__name__}.{module}"), name)


def is_a(thing: object, path: str) -> bool:
    """True if ``thing`` is an instance of this class in any installed namespace.

    A class that a release does not have has no instances.
    """
    for namespace in installed():
        with contextlib.suppress(ImportError, AttributeError):
            if isinstance(thing, part(namespace, path)):
                return True
    return False


def is_lightnings(owner: Any, method: str) -> bool:
    """True if a method of an object or a class is as Lightning wrote it, and not overridden."""
    return of_package(owner, method, "lightning", "pytorch_lightning", "lightning_fabric")


def loader_tree(loaders: Any) -> Any:
    """The result of ``train_dataloader`` as a plain collection of loaders (Lightning's own one opened)."""
    return loaders.iterables if is_a(loaders, "utilities.combined_loader.CombinedLoader") else loaders


def _exists(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # the parent package itself is missing
        return False
