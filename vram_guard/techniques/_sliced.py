"""Slices: a module's forward runs over some rows of its batch at a time, and the loss sees the whole of it.

The user's code is called as often as it was written to be, with whole batches; what works in slices is one module that
treats each row of its arguments by itself. The first slices keep nothing for the backward pass but their inputs, and
compute their forward again there (:mod:`vram_guard.techniques._checkpointing`, each compared with its first forward);
the last ones, whose backward pass comes first, keep their graph. Whatever the loss is, the gradients are those of the
whole batch, added up in another order.

That the module treats rows by themselves is known of the forward that it has when the training begins. So the graph of
each call's first slice is compared with those before it (:mod:`vram_guard.techniques.loss_graphs`).
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from vram_guard.errors import LossChangedError, UnsupportedTechniqueError
from vram_guard.language import _
from vram_guard.state.containers import children, is_cache, mapped, rebuilt
from vram_guard.techniques._checkpointing import Checkpointed
from vram_guard.techniques._recomputed import Recomputations
from vram_guard.techniques.loss_graphs import LossGraphs
from vram_guard.techniques.patched_forward import arguments_by_name, patch_forwards
from vram_guard.tensors import tensors_of

if TYPE_CHECKING:
    from torch import nn

    from vram_guard.techniques.recipe import Slices


def slice_module(model: nn.Module, slices: Slices) -> Callable[[], None]:
    """Run the forward of a module over slices of its batch from now on, while it trains with gradients on.

    A call with other arguments than those that the body is known for runs as written.

    Args:
        model: that the module belongs to; it is changed in place.
        slices: of which module, how many, and how many of them run again.

    Returns:
        A function that puts the module's own forward back.

    Raises:
        InvalidInputError: no module has such a name; nothing was changed.
        RecomputationError: later, by the optimizer's step: a slice has not computed the same again.
        UnsupportedTechniqueError: later, by the forward: its results cannot be put together.
    """
    found, graphs = Recomputations(), LossGraphs(model)
    put_back = patch_forwards(model, [slices.body.name], lambda module: _Sliced(module, slices, found, graphs))
    stop_watching = found.watch()
    handle = register_optimizer_step_pre_hook(lambda *_step: graphs.next_batch())

    def undo() -> None:
        put_back()
        stop_watching()
        handle.remove()

    return undo


class _Sliced(Checkpointed):
    """A module's forward over slices of its batch."""

    def __init__(self, module: nn.Module, slices: Slices, found: Recomputations, graphs: LossGraphs) -> None:
        super().__init__(module, slices.body.name, found)
        self._slices = slices
        self._graphs = graphs
        self._stays_whole = False

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The module's results for the whole batch."""
        forward = self._forward()
        # In code that is compiled with its caller nothing tells whether it is still what slices are proven for.
        as_written = self._stays_whole or torch.compiler.is_compiling()
        if as_written or not (self.module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        calls = self._calls(arguments_by_name(args, kwargs))
        if len(calls) < 2:
            return forward(*args, **kwargs)
        again = len(calls) - (self._slices.count - self._slices.again)
        results: list[Any] = []
        for number, called in enumerate(calls):
            own = [called.pop(str(at)) for at in range(len(args))]
            results.append(self.recomputed(*own, **called) if number < again else forward(*own, **called))
            if number == 0 and not self._is_as_before(results[0]):
                self._stays_whole = True
                return forward(*args, **kwargs)
        return _joined(results)

    def _is_as_before(self, result: Any) -> bool:
        """False, with a warning, where a slice's results are made in another way than in the batches before."""
        try:
            self._graphs.check(*tensors_of(result))
        except LossChangedError:
            warnings.warn(
                "vram_guard: "
                + _(
                    "'{body}' computes its results in another way than in the batches before, and slices are proven "
                    "for those alone: this batch and the next ones run whole",
                    body=self.name,
                ),
                stacklevel=2,
            )
            return False
        return True

    def _calls(self, called: dict[str, Any]) -> list[dict[str, Any]]:
        """The arguments of each slice's call; none where these are other arguments than those that are known."""
        body = self._slices.body
        tensors = {name: tensors_of(value) for name, value in called.items()}
        rows = {len(one) if one.dim() else 0 for name in body.cut for one in tensors.get(name, ())}
        if (
            len(rows) != 1
            or 0 in rows
            or any(tensors[name] and name not in (*body.cut, *body.whole) for name in tensors)
        ):
            return []
        most = rows.pop()
        size = -(-most // self._slices.count)

        def narrowed(first: int, value: Any) -> Any:
            is_tensor = isinstance(value, torch.Tensor)
            return value.narrow(0, first, min(size, most - first)) if is_tensor else value

        return [
            {
                name: mapped(value, partial(narrowed, first)) if name in body.cut else value
                for name, value in called.items()
            }
            for first in range(0, most, size)
        ]


def _joined(results: list[Any]) -> Any:
    """One result in place of those of the slices: rows one below the other, in the same containers.

    A cache of keys and values is left out, as transformers' own checkpointing does.
    """
    first = results[0]
    if isinstance(first, torch.Tensor):
        return torch.cat(results)
    if is_cache(first):
        return None
    parts = [children(one) for one in results]
    if parts[0] is not None:
        return rebuilt(first, {key: _joined([(one or {}).get(key) for one in parts]) for key in parts[0]})
    if any(one is not first and one != first for one in results):
        raise UnsupportedTechniqueError(
            _("slices return different values of type {kind}, which cannot be put together", kind=type(first).__name__)
        )
    return first
