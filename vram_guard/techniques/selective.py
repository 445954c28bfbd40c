"""The contexts of selective checkpointing, and what of it the installed torch can do."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from vram_guard.techniques.kept import kept_as

try:
    from torch.utils.checkpoint import CheckpointPolicy, create_selective_checkpoint_contexts
except ImportError:  # pragma: no cover - a torch without it
    AVAILABLE = False
else:
    AVAILABLE = True


def draws(operator: OpOverload, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """True if this call takes random numbers; kernels of attention do so only where they drop something out.

    Args:
        operator: that is called.
        args: its positional arguments.
        kwargs: its named ones.
    """
    if torch.Tag.nondeterministic_seeded not in operator.tags:
        return False
    arguments = operator._schema.arguments  # noqa: SLF001
    for at, argument in enumerate(arguments):
        if argument.name == "dropout_p":
            given = args[at] if at < len(args) else kwargs.get(argument.name, argument.default_value)
            return bool(given)
    return True


def keeping_contexts(keeps: Collection[str]) -> tuple[Any, Any]:
    """The contexts of a first and a second forward, between which the results of these operators are handed over.

    Where an operator draws random numbers it is computed again: left out, it would leave the generator elsewhere for
    what draws after it.

    Args:
        keeps: of :data:`KEEPABLE`.
    """
    chosen = frozenset(keeps)

    def policy(_context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        kept = _kept_as(operator) in chosen and not draws(operator, args, kwargs)
        return CheckpointPolicy.MUST_SAVE if kept else CheckpointPolicy.PREFER_RECOMPUTE

    first, second = create_selective_checkpoint_contexts(policy)
    return first, second


@cache
def _kept_as(operator: Any) -> str:
    return kept_as(str(operator)) if isinstance(operator, OpOverload) else ""
