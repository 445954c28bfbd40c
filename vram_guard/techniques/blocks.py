"""The blocks of a model: modules that repeat, each of them worth checkpointing or offloading by itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.module_names import ModuleName
from vram_guard.techniques.patched_forward import callable_module, inside

if TYPE_CHECKING:
    from torch import nn

#: Attributes by which a model says that it checkpoints by itself: transformers and diffusers, timm.
_OWN_CHECKPOINTING = ("gradient_checkpointing", "grad_checkpointing")


class ModelBlock(NamedTuple):
    """One repeated module."""

    name: str
    """As in ``model.named_modules()``."""
    kind: str
    """Name of its class."""
    stack: str
    """Name of the module that holds it and its siblings; "" for the model itself."""
    parameters: int
    """Elements of its parameters, those it shares with others included."""


def find_blocks(model: nn.Module, *, checkpointed: bool = False) -> tuple[ModelBlock, ...]:
    """The repeated modules of a model, in the order of ``named_modules``.

    Siblings of one class, two at least, each with modules of its own inside (so no single layers), outermost first:
    the layers of a transformer, the levels of a U-Net. What repeats something itself is looked into where it is a
    stage, one of several that differ in size and hold lists (of a ResNet the residual blocks are found; the two
    attentions of a U-Net's level are parts of it), or a tower, an attribute of its own and no item of a list.

    Args:
        model: the whole model.
        checkpointed: whether blocks that checkpoint themselves already are wanted too.
    """
    left_out = set() if checkpointed else set(_checkpointed_already(model))
    return tuple(block for block in _described(_repeated(model)) if block.name not in left_out)


def named_blocks(model: nn.Module, names: Iterable[str]) -> tuple[ModelBlock, ...]:
    """The modules that the user names, as blocks, in the order given.

    Raises:
        InvalidInputError: no module has such a name, or it has no forward; or a module is named twice, or is the model.
    """
    known = dict(model.named_modules(remove_duplicate=False))
    modules: dict[str, nn.Module] = {}
    for name in names:
        if name == "":
            raise InvalidInputError(_("the whole model is not a block of itself; name modules inside it"))
        if name in modules:
            raise InvalidInputError(_("the module {name} is named twice", name=repr(name)))
        modules[name] = callable_module(known, name)
    return tuple(_described(modules.items()))


def _described(found_modules: Iterable[tuple[str, nn.Module]]) -> Iterator[ModelBlock]:
    for name, module in found_modules:
        count = sum(parameter.numel() for parameter in module.parameters())
        kind = type(inside(module)).__name__
        yield ModelBlock(ModuleName(name, kind), kind, name.rpartition(".")[0], count)


def _repeated(module: nn.Module, path: str = "") -> list[tuple[str, nn.Module]]:
    """The repeated modules below ``module``, outermost first."""
    children = [(f"{path}.{name}" if path else name, child) for name, child in module.named_children()]
    groups: dict[Any, list[nn.Module]] = {}
    for _name, child in children:
        groups.setdefault(_kind(child), []).append(child)
    made: list[tuple[str, nn.Module]] = []
    for name, child in children:
        siblings = groups[_kind(child)]
        inside = _repeated(child, name)
        is_block = len(siblings) > 1 and _may_be_block(child)
        holds = any(_is_list(child.get_submodule(_within(name, one))) for one, _found in inside)
        if is_block and not (inside and (not _is_list(module) or (holds and _are_stages(siblings)))):
            made.append((name, child))
        else:
            made += inside
    return made


def _within(path: str, name: str) -> str:
    """The module that holds the module ``name``, as seen from the module at ``path``."""
    return name[len(path) + 1 :].rpartition(".")[0]


def _kind(module: nn.Module) -> Any:
    """The property that siblings share which repeat each other; a Sequential is of the kind of what it holds."""
    from torch import nn

    if type(module) is nn.Sequential:
        return (nn.Sequential, tuple(type(child) for child in module))
    return type(module)


def _may_be_block(module: nn.Module) -> bool:
    from torch import nn

    has_forward = type(module).forward is not nn.Module.forward and not isinstance(
        module, (nn.ModuleList, nn.ModuleDict)
    )
    return has_forward and any(True for _ in module.children()) and any(True for _ in module.parameters())


def _is_list(module: nn.Module) -> bool:
    from torch import nn

    return isinstance(module, (nn.ModuleList, nn.ModuleDict, nn.Sequential))


def _are_stages(siblings: list[nn.Module]) -> bool:
    """True if the siblings are stages rather than layers: no size is that of more than half of them."""
    from torch import nn

    if all(type(sibling) is nn.Sequential for sibling in siblings):
        return True
    sizes = Counter(tuple(tuple(parameter.shape) for parameter in sibling.parameters()) for sibling in siblings)
    return 2 * max(sizes.values()) <= len(siblings)


def _checkpointed_already(model: nn.Module) -> Iterator[str]:
    """Modules that the user, or their own code, checkpoints."""

    def walk(module: nn.Module, path: str, inherited: bool) -> Iterator[str]:
        own = [getattr(module, name) for name in _OWN_CHECKPOINTING if isinstance(getattr(module, name, None), bool)]
        on = own[0] if own else inherited
        wrapped = type(module).__name__ == "CheckpointWrapper"  # torch.distributed's and fairscale's
        if on or wrapped:
            yield path
        for name, child in module.named_children():
            yield from walk(child, f"{path}.{name}" if path else name, on or wrapped)

    return walk(model, "", False)
