"""The contexts of selective checkpointing, and what of it the installed torch can do."""

from __future__ import annotations

from collections.abc import Collection, Mapping
from functools import cache
from typing import Any

import torch
from torch._ops import OpOverload

from vram_guard.language import _
from vram_guard.techniques.kept import kept_as
from vram_guard.tensors import tensors_in

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

    Raises:
        RuntimeError: in the forward, where a result that is kept is changed in place. Torch says so by itself where the
            change counts for the result's version; from 2.15 on it does not behind ``F.linear`` (``_unsafe_view``),
            and gradients are wrong. It shows results to the policy from then on.
    """
    chosen, kept_storages = frozenset(keeps), set[int]()

    def policy(context: Any, operator: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        written = _written(operator, args, kwargs) if kept_storages else ()
        if any(each.untyped_storage()._cdata in kept_storages for each in written):  # noqa: SLF001
            raise RuntimeError(
                _(
                    "what is cached during selective activation checkpoint has been mutated: {operator} changes it",
                    operator=str(operator),
                )
            )
        if _kept_as(operator) not in chosen or draws(operator, args, kwargs):
            return CheckpointPolicy.PREFER_RECOMPUTE
        results = tensors_in([getattr(context, "op_output", None)])
        kept_storages.update(result.untyped_storage()._cdata for result in results)  # noqa: SLF001
        return CheckpointPolicy.MUST_SAVE

    first, second = create_selective_checkpoint_contexts(policy)
    return first, second


def _written(operator: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> list[torch.Tensor]:
    """Tensors that a call writes into."""
    places = _written_places(operator)
    return list(tensors_in([args[at] if at < len(args) else kwargs.get(name) for at, name in places]))


@cache
def _written_places(operator: Any) -> tuple[tuple[int, str], ...]:
    """Numbers and names of the arguments that an operator writes into: asked for every call of a training."""
    arguments = operator._schema.arguments if isinstance(operator, OpOverload) else ()  # noqa: SLF001
    return tuple(
        (at, one.name) for at, one in enumerate(arguments) if one.alias_info is not None and one.alias_info.is_write
    )


@cache
def _kept_as(operator: Any) -> str:
    return kept_as(str(operator)) if isinstance(operator, OpOverload) else ""
