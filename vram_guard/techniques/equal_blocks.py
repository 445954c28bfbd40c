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
    """Blocks of one list that differ in their numbers alone, as far as can be seen without running them."""

    stack: str
    """Name of the module that holds them, as 0, 1, 2, ..."""
    names: tuple[str, ...]

    def within(self, depth: int) -> frozenset[str]:
        """The names of the first so many blocks."""
        return frozenset(self.names[:depth])


def equal_blocks(model: nn.Module) -> EqualBlocks | None:
    """The longest list of equal blocks of a model that holds nothing else; None where there is none."""
    stacks = {block.stack for block in find_blocks(model, checkpointed=True)}
    found = [blocks for stack in sorted(stacks) if (blocks := _of_stack(model, stack)) is not None]
    return max(found, key=lambda blocks: len(blocks.names), default=None)


def _of_stack(model: nn.Module, stack: str) -> EqualBlocks | None:
    children = dict(model.get_submodule(stack).named_children())
    if not stack or list(children) != [str(number) for number in range(len(children))]:
        return None
    parts = [id(tensor) for block in children.values() for tensor in (*block.parameters(), *block.buffers())]
    everywhere = (*model.named_modules(remove_duplicate=False), *model.named_parameters(remove_duplicate=False))
    elsewhere = {id(one) for path, one in everywhere if not f"{path}.".startswith(f"{stack}.")}
    parts += (id(module) for block in children.values() for module in block.modules())
    if (
        len(parts) != len(set(parts))
        or not elsewhere.isdisjoint(parts)
        or not _equal([_seen(block) for block in children.values()])
    ):
        return None
    return EqualBlocks(stack, tuple(f"{stack}.{name}" for name in children))


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
    """While the block runs, the model has the first ``depth`` of its equal blocks alone."""
    held = vars(model.get_submodule(blocks.stack))["_modules"]
    whole = dict(held)
    for name in blocks.names[depth:]:
        del held[name.rpartition(".")[2]]
    try:
        yield
    finally:
        held.clear()
        held.update(whole)
