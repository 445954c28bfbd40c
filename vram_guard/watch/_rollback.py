"""Roll back the effects of a failed attempt at a batch outside of gradients.

Rolled back are the random number generators of Python, NumPy and torch, and what can be reached from the model: buffers
(BatchNorm's running statistics), metrics' states, attributes, containers and objects, see
:mod:`vram_guard.state.reached`. What is beyond that (an iterator, an open file, an object written in C), and parameters
that an attempt changed, attributes of its modules' classes and globals that their methods assign cannot be rolled back:
where they have changed, the attempt is not repeated, and the error names them.

An attempt's start costs a microsecond or two per module and per container or object that is reached, and a copy of the
buffers: where they are for those up to 1 MiB each, on the host for larger ones, once they have changed.
"""

from __future__ import annotations

import dis
import weakref
from collections.abc import Iterable, Iterator, Mapping
from types import FunctionType
from typing import Any, TypeAlias

import torch
from torch import nn

from vram_guard.language import _
from vram_guard.limits import COPIED_IN_PLACE, NAMED
from vram_guard.state.random_generators import RandomState
from vram_guard.state.reached import LIBRARIES, RECORDERS, ReachedState, home_of
from vram_guard.tensors import version_of


class CannotRollBackError(Exception):
    """The attempt changed something of which there is no copy, or may have; the message says what."""


class StateSnapshot:
    """Remembers the state before each attempt; one per training, for it learns which large tensors never change.

    Args:
        model: everything that a batch changes, and what can be reached from it.
        frameworks: top-level packages whose objects are no part of the training's state.
    """

    def __init__(self, model: nn.Module, frameworks: Iterable[str] = ()) -> None:
        self._model = model
        self._known = {*LIBRARIES, *RECORDERS, "torchvision", "torchaudio", "torchmetrics", *frameworks}
        self._state: ReachedState | None = None
        self._random: RandomState | None = None
        self._names = list(_assigned({type(module) for module in model.modules()}, self._known))
        """Of classes and of globals: namespaces, and names in them."""
        self._shared: dict[str, Any] = {}
        self._parameters: list[tuple[str, nn.Parameter, _Stamp]] = []
        self._tensors: list[torch.Tensor] = []
        self._copies: dict[int, tuple[weakref.ref[torch.Tensor], _Stamp, torch.Tensor]] = {}
        """Tensors by id, their stamps, and their copies; kept from one attempt to the next."""

    def take(self) -> None:
        """Remember the state as it is now."""
        self.forget()
        self._state = self._reached()
        for name, tensor in self._state.tensors.values():
            if isinstance(tensor, nn.Parameter):
                self._parameters.append((name, tensor, _stamp(tensor)))
            elif not (tensor.is_inference() or tensor.layout is not torch.strided or tensor.device.type == "meta"):
                self._tensors.append(tensor)  # the others cannot be changed in place, or hold nothing
        self._copy()
        self._shared = self._values()
        self._random = RandomState({parameter.device for parameter in self.parameters})

    @property
    def parameters(self) -> list[nn.Parameter]:
        """The parameters of the remembered state."""
        return [parameter for _name, parameter, _version in self._parameters]

    def forget(self) -> None:
        """Let go of everything that was remembered but copies of tensors, which the next attempt uses."""
        self._state, self._random = None, None
        self._parameters, self._tensors, self._shared = [], [], {}

    def check(self) -> None:
        """Check that the attempt can be rolled back.

        Raises:
            CannotRollBackError: it changed parameters, or something is reached from the model that may have changed and
                that cannot be put back.
        """
        written = [name for name, parameter, before in self._parameters if _stamp(parameter) != before]
        if written:
            raise CannotRollBackError(
                _("the weights of {names} were already changed during forward or backward", names=_listed(written))
            )
        now = self._values()
        names = [name for name in {**self._shared, **now} if now.get(name, now) is not self._shared.get(name, now)]
        if self._state is not None:
            names += [f"{name} ({kind})" for name, kind in self._state.beyond.items()]
        if names:
            raise CannotRollBackError(
                _("the failed attempt may have changed what cannot be put back: {names}", names=_listed(names))
            )

    @torch.no_grad()
    def restore(self) -> None:
        """The state as it was when :meth:`take` was called; it stays remembered until the next one."""
        if self._state is None or self._random is None:
            return
        self._state.restore()
        for tensor in self._tensors:
            _ref, before, copy = self._copies[id(tensor)]
            # Kernels of batch normalisation write running statistics without raising their version counters.
            if _is_small(tensor) or _stamp(tensor) != before:
                tensor.copy_(copy)
        self._random.restore()

    def _values(self) -> dict[str, Any]:
        """What the model's classes hold, and what the globals hold that their methods assign."""
        return {
            f"{where}.{name}": value
            for where, space, assigned in self._names
            for name, value in (space.items() if assigned is None else ((name, space.get(name)) for name in assigned))
            if not name.startswith(("__", "_abc_"))
        }

    def _reached(self) -> ReachedState:
        return ReachedState([("model", self._model)], self._left_alone, globals_too=False)

    def _left_alone(self, value: Any) -> bool:
        """True for what is no state of a step: what libraries and frameworks keep, optimizers, what is logged."""
        return not isinstance(value, nn.Module) and (
            isinstance(value, torch.optim.Optimizer) or home_of(value) in self._known
        )

    @torch.no_grad()
    def _copy(self) -> None:
        """Copies of the tensors as they are now; room is kept, and small ones of a kind are copied by one kernel."""
        before, self._copies = self._copies, {}
        again: dict[tuple[torch.dtype, torch.device], list[tuple[torch.Tensor, torch.Tensor]]] = {}
        for tensor in self._tensors:
            known, stamp, copy = before.get(id(tensor), (None, (0, 0), tensor))
            if known is None or known() is not tensor or copy.shape != tensor.shape:
                copy = tensor.detach().to(tensor.device if _is_small(tensor) else "cpu", copy=True)
            elif _is_small(tensor):
                again.setdefault((tensor.dtype, tensor.device), []).append((copy, tensor.detach()))
            elif stamp != _stamp(tensor):
                copy.copy_(tensor)
            self._copies[id(tensor)] = weakref.ref(tensor), _stamp(tensor), copy
        for pairs in again.values():
            torch._foreach_copy_([copy for copy, _tensor in pairs], [tensor for _copy, tensor in pairs])


def _assigned(kinds: Iterable[type], known: set[str]) -> Iterator[tuple[str, Mapping[str, Any], frozenset[str] | None]]:
    """Classes that are not known, with all of their attributes, and the globals that their methods assign, by name."""
    bases = {base for kind in kinds for base in kind.__mro__}
    for kind in (base for base in bases if base.__module__.partition(".")[0] not in {*known, "builtins", "abc"}):
        yield kind.__qualname__, vars(kind), None
        for function in vars(kind).values():
            if isinstance(function, FunctionType):
                stored = (one.argval for one in dis.get_instructions(function) if one.opname == "STORE_GLOBAL")
                yield function.__module__, function.__globals__, frozenset(stored)


#: The version of a tensor, and where it lies: ``tensor.data = other`` raises no version.
_Stamp: TypeAlias = "tuple[int, int]"


def _stamp(tensor: torch.Tensor) -> _Stamp:
    return version_of(tensor), tensor.data_ptr()


def _is_small(tensor: torch.Tensor) -> bool:
    return tensor.nbytes <= COPIED_IN_PLACE


def _listed(names: list[str]) -> str:
    return ", ".join(names[:NAMED]) + (", ..." if len(names) > NAMED else "")
