"""Blocks whose forward must not run twice: left out of what is checkpointed, named in the plan, refused as pins."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vram_guard.errors import UnsupportedStepError
from vram_guard.language import Message, _, marked
from vram_guard.plan.descriptions import Reason, Why, ranges

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable, Sequence

    from torch import nn

    from vram_guard.plan.pins import Pins
    from vram_guard.timeline import ChangeKind, StateChange

_WHAT: dict[ChangeKind, str] = {
    "parameter": marked("changes the parameter {name}"),
    "buffer": marked("changes the buffer {name}"),
    "tensor": marked("changes the tensor {name}"),
    "object": marked("changes {name}"),
    "generator": marked("draws from the generator {name}"),
    "input": marked("changes its input"),
    "elsewhere": marked("changes a tensor that was made before it"),
    "beyond": marked("may change {name}, which cannot be looked into"),
}
_UNNAMED_GENERATOR = marked("draws from a generator of its own")


def watched_modules(blocks: Iterable[str] | None, pins: Pins) -> Callable[[nn.Module], tuple[str, ...]]:
    """The modules of a model that may be checkpointed, and so are watched while it is traced.

    Args:
        blocks: named by the user; None: the repeated ones.
        pins: parts of the plan that are fixed.
    """

    def of(model: nn.Module) -> tuple[str, ...]:
        from vram_guard.techniques.blocks import find_blocks

        pinned = pins.checkpoint if isinstance(pins.checkpoint, tuple) else ()
        found = (block.name for block in find_blocks(model)) if blocks is None else blocks
        return tuple(dict.fromkeys((*found, *pinned)))

    return of


def why_not_checkpointed(changes: Iterable[StateChange]) -> tuple[Reason, ...]:
    """The reasons, one for each thing that is changed, with every block that changes it."""
    modules: dict[tuple[ChangeKind, str], list[str]] = {}
    for change in changes:
        if change.module:
            modules.setdefault((change.kind, change.name), []).append(change.module)
    return tuple(
        Reason(Why.NOT_CHECKPOINTED_INSIDE, blocks=ranges(tuple(names)), name=name)
        if kind == "around"
        else Reason(Why.NOT_CHECKPOINTED, blocks=ranges(tuple(names)), does=_does(kind, name))
        for (kind, name), names in modules.items()
    )


def check_pinned_blocks(pins: Pins, blocks: Sequence[str], changes: Sequence[StateChange]) -> None:
    """Check that the blocks that are to be checkpointed can be.

    Args:
        pins: parts of the plan that are fixed.
        blocks: of the model, all of them.
        changes: what watched forwards change.

    Raises:
        UnsupportedStepError: a pin asks for a block that cannot, or for more of them than can.
    """
    pin, impure = pins.checkpoint, {change.module for change in changes}
    pure = [block for block in blocks if block not in impure]
    if isinstance(pin, tuple):
        asked = set(pin)
    elif (pin == "all" and not pure) or (isinstance(pin, int) and len(pure) < pin <= len(blocks)):
        asked = set(blocks)
    else:
        return
    reasons = why_not_checkpointed(change for change in changes if change.module in asked)
    if reasons:
        raise UnsupportedStepError(_("{pin} is pinned, but {refusal}", pin="checkpoint", refusal=reasons[0]))


def _does(kind: ChangeKind, name: str) -> Message:
    text = _UNNAMED_GENERATOR if kind == "generator" and not name else _WHAT[kind]
    return Message(text, name=name)
