"""A stack of equal blocks, and the model with fewer of them."""

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple

from vram_guard.techniques.blocks import find_blocks

if TYPE_CHECKING:
    from torch import nn

#: Attributes of every module that hold its tensors, its parts and its hooks, which are compared by themselves.
_OWN = frozenset({"_parameters", "_buffers", "_modules"})


class EqualBlocks(NamedTuple):
    """Blocks of one list, or of several lists of the same length.

    Those of a list differ in their numbers alone, as far as can be seen without running them.
    """

    stacks: tuple[str, ...]
    """Names of the modules that hold them, each as 0, 1, 2, ..."""
    depth: int
    """Blocks of each stack."""


def equal_blocks(model: nn.Module, least: int = 1) -> EqualBlocks | None:
    """The lists of equal blocks of a model that hold nothing else; None where there is none.

    Of lists of different lengths, those of the one length that have most blocks together; of several such the longest.

    Args:
        model: the whole model.
        least: blocks of the shortest list that counts.
    """
    lengths: dict[int, list[str]] = {}
    for stack in sorted({block.stack for block in find_blocks(model, checkpointed=True)}):
        depth = len(dict(model.get_submodule(stack).named_children()))
        if depth >= least and _holds_equal(model, stack):
            lengths.setdefault(depth, []).append(stack)
    if not lengths:
        return None
    depth = max(lengths, key=lambda depth: (depth * len(lengths[depth]), depth))
    return EqualBlocks(tuple(lengths[depth]), depth)


def _holds_equal(model: nn.Module, stack: str) -> bool:
    """True if a list holds equal blocks and nothing else."""
    children = dict(model.get_submodule(stack).named_children())
    if not stack or list(children) != [str(number) for number in range(len(children))]:
        return False
    parts = [id(tensor) for block in children.values() for tensor in (*block.parameters(), *block.buffers())]
    everywhere = (*model.named_modules(remove_duplicate=False), *model.named_parameters(remove_duplicate=False))
    elsewhere = {id(one) for path, one in everywhere if not f"{path}.".startswith(f"{stack}.")}
    parts += (id(module) for block in children.values() for module in block.modules())
    return (
        len(parts) == len(set(parts))
        and elsewhere.isdisjoint(parts)
        and _equal([_seen(block) for block in children.values()])
    )


def _equal(blocks: Sequence[tuple[Hashable, list[int]]]) -> bool:
    """True if the blocks have the same properties, and whole numbers are the same, or each block's own number."""
    if len({properties for properties, _numbers in blocks}) != 1:
        return False
    return all(
        len(set(values)) == 1 or len({value - at for at, value in enumerate(values)}) == 1
        for values in zip(*(numbers for _properties, numbers in blocks), strict=True)
    )


def _seen(block: nn.Module) -> tuple[Hashable, list[int]]:
    """The properties of a block that decide over its memory, and the whole numbers among them."""
    tensors = [
        (name, tensor.shape, tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad)
        for name, tensor in (*block.named_parameters(), *block.named_buffers())
    ]
    modules = []
    numbers = []
    for path, module in block.named_modules():
        own = {name: value for name, value in vars(module).items() if name not in _OWN}
        numbers += [value for value in own.values() if _is_number(value)]
        modules.append((path, type(module), tuple((name, _plain(value)) for name, value in own.items())))
    return (tuple(tensors), tuple(modules)), numbers


def _is_number(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _plain(value: object) -> Hashable:
    """An attribute as it is compared: of amounts, which may grow from block to block, whether there is any."""
    if isinstance(value, float):
        return bool(value)
    if value is None or isinstance(value, (bool, str)):
        return value
    return type(value), len(value) if isinstance(value, (dict, list, tuple, set)) else None


@contextlib.contextmanager
def with_depth(model: nn.Module, blocks: EqualBlocks, depth: int) -> Iterator[None]:
    """While the block runs, the model has the first ``depth`` blocks of each stack alone."""
    whole = {}
    for stack in blocks.stacks:
        held = vars(model.get_submodule(stack))["_modules"]
        whole[stack] = held, dict(held)
    try:
        for held, _all in whole.values():
            for number in range(depth, blocks.depth):
                del held[str(number)]
        yield
    finally:
        for held, all_blocks in whole.values():
            held.clear()
            held.update(all_blocks)
