"""Forwards that are replaced on single modules, and removed again."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Mapping
from difflib import get_close_matches
from types import MethodType
from typing import TYPE_CHECKING, Any

from vram_guard.errors import InvalidInputError
from vram_guard.language import _

if TYPE_CHECKING:
    from torch import nn
    from typing_extensions import Self


def arguments_by_name(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, positional ones by their number: a tuple of them is no tuple of samples.

    >>> arguments_by_name((1, 2), {"mask": 3})
    {'0': 1, '1': 2, 'mask': 3}
    """
    return {**{str(at): value for at, value in enumerate(args)}, **kwargs}


class PatchedForward:
    """Stands on a module in place of its ``forward`` method, and runs that in a way of its own.

    On the instance, so that the module keeps its class, its parameters' names and its hooks, and whoever wraps the
    model later (DistributedDataParallel, a framework's plugin) runs it as well. A deep copy of the module has a
    replaced forward of its own. A pickle has the forward that the author wrote: a saved model opens without vram_guard.
    """

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.before: Callable[..., Any] | None = module.__dict__.get("forward")
        self.active = True

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The module's results."""
        return self.run(*args, **kwargs) if self.active else self.as_written(*args, **kwargs)

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The forward in its other way."""
        raise NotImplementedError

    @property
    def as_written(self) -> Callable[..., Any]:
        """The forward that was there before."""
        if self.before is not None:
            return self.before
        return MethodType(type(self.module).forward, self.module)

    #: What ``inspect.signature`` and frameworks that look for an overridden method follow.
    __wrapped__ = as_written

    def install(self) -> None:
        """Put this in place of the module's forward."""
        self.module.__dict__["forward"] = self

    def remove(self) -> None:
        """The module's forward is as before, even where other code has wrapped this one since."""
        self.active = False
        if self.module.__dict__.get("forward") is not self:
            return
        if self.before is None:
            del self.module.__dict__["forward"]
        else:
            self.module.__dict__["forward"] = self.before

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        from copy import deepcopy

        copied = type(self).__new__(type(self))
        memo[id(self)] = copied
        copied.__dict__.update({name: deepcopy(value, memo) for name, value in self.__dict__.items()})
        return copied

    def __reduce__(self) -> tuple[Any, ...]:
        if self.before is not None:
            return operator.itemgetter(0), ((self.before,),)
        return getattr, (self.module, "forward")  # asked before the module has its attributes: the class's own


def patch_forwards(
    model: nn.Module, names: Iterable[str], make: Callable[[nn.Module], PatchedForward]
) -> Callable[[], None]:
    """Replace the forwards of named modules; the result puts them back.

    Raises:
        InvalidInputError: no module of the model has such a name, or it is a mere container.
    """
    known = dict(model.named_modules(remove_duplicate=False))
    modules = {id(module): module for module in (inside(callable_module(known, name)) for name in names)}
    patched = [make(module) for module in modules.values()]
    for one in patched:
        one.install()

    def undo() -> None:
        for one in reversed(patched):
            one.remove()

    return undo


def callable_module(known: Mapping[str, nn.Module], name: str) -> nn.Module:
    """The module of this name, of all that a model has (duplicates too), whose forward can be called.

    Raises:
        InvalidInputError: no module of the model has such a name, or it is a mere container.
    """
    if name not in known:
        near = get_close_matches(str(name), known, n=3)
        if near:
            message = _(
                "the model has no module named {name}; did you mean {near}?", name=repr(name), near=_either(near)
            )
        else:
            message = _("the model has no module named {name}; model.named_modules() lists them", name=repr(name))
        raise InvalidInputError(message)
    if not has_forward(known[name]):
        inside = ", ".join(repr(f"{name}.{child}") for child, _ in list(known[name].named_children())[:3])
        what = _("{name} is a {kind} without a forward of its own", name=repr(name), kind=type(known[name]).__name__)
        hint = _(": name its modules ({modules}, ...)", modules=inside) if inside else ""
        raise InvalidInputError(what + hint)
    return known[name]


def inside(module: nn.Module) -> nn.Module:
    """The module itself, or the one that FullyShardedDataParallel has wrapped there: that one may run twice."""
    wrapped: nn.Module = getattr(module, "_fsdp_wrapped_module", module)
    return wrapped


def has_forward(module: nn.Module) -> bool:
    """True if this is no mere container."""
    from torch import nn

    return type(module).forward not in (nn.Module.forward, nn.ModuleList.forward, nn.ModuleDict.forward)


def _either(names: Iterable[str]) -> str:
    return _(" or ").join(map(repr, names))
