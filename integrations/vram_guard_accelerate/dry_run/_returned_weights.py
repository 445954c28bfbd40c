"""What the losses that models return are divided by, found by calling the models with a few samples and with parts.

For real on the CPU, or in a trace, where the graphs tell and the values of the batch that are known.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, Literal

import torch

from vram_guard.apply.microbatch import CannotSplitError, Layout, MicroBatch, Splitter
from vram_guard.apply.normalisers import Normaliser, find_in_trace, find_normaliser
from vram_guard.apply.outputs import tensors_of
from vram_guard.language import _
from vram_guard.state.containers import mapped

if TYPE_CHECKING:
    from torch import nn


@dataclass(frozen=True)
class WeightFound:
    """The weight of slices' losses."""

    weight: Literal["mean", "sum"] | Normaliser | None
    """None where none is right for all losses that models return."""
    why_not: str = ""


class ReturnedWeights:
    """The weights of the losses of each model's first call that returns some.

    Args:
        samples: of the training's batch.
        begins: called before a forward of some samples: the first of them, how many, and of how many.
        symbolic: whether this is a trace.
    """

    def __init__(self, samples: int, begins: Callable[[int, int, int], None], *, symbolic: bool = False) -> None:
        self._samples = samples
        self._begins = begins
        self._symbolic = symbolic
        self._of: dict[int, list[WeightFound]] = {}

    def look(
        self,
        number: int,
        model: nn.Module,
        layout: Layout | None,
        given: dict[str, Any],
        out: Any,
    ) -> None:
        """After a call of a model.

        Args:
            number: of the model.
            model: that was called.
            layout: of its arguments by name.
            given: its arguments by name, positional ones by their number.
            out: what it returned.
        """
        losses = [at for at, one in enumerate(tensors_of(out)) if _is_loss(one)]
        if number in self._of or not losses:
            return
        called = mapped(given, _leaf)
        try:
            parts = Splitter(self._samples, self._samples // 2, layout=layout).split(called)
        except CannotSplitError as error:
            self._of[number] = [WeightFound(None, str(error))]
            return
        samples = parts[0].batch_samples
        if len(parts) == 1:
            self._of[number] = [WeightFound(None, _("its batch has {count} samples", count=samples))]
            return
        firsts = {id(part.data): sum(before.samples for before in parts[:at]) for at, part in enumerate(parts)}
        sizes = {id(part.data): part.samples for part in parts}

        def loss_of(at: int, data: dict[str, Any]) -> torch.Tensor:
            self._begins(firsts.get(id(data), 0), sizes.get(id(data), samples), samples)
            named = dict(data)
            args = [named.pop(str(place)) for place in range(len(named)) if str(place) in named]
            return tensors_of(model.forward(*args, **named))[at]

        whole = MicroBatch(called, samples, samples)
        if self._symbolic:
            found = [find_in_trace(partial(loss_of, at), [whole, *parts], _real) for at in losses]
        else:
            found = [find_normaliser(partial(loss_of, at), called, parts) for at in losses]
        self._of[number] = [_that_travels(weight, why) for weight, why in found]

    def found(self) -> WeightFound:
        """The weight for all losses."""
        found = [one for of in self._of.values() for one in of]
        unknown = next((one for one in found if one.weight is None), None)
        if unknown is not None or not found:
            return unknown or WeightFound(None, _("no model returns a loss"))
        if any(one != found[0] for one in found):
            return WeightFound(None, _("the numbers that models return are divided by different counts of the batch"))
        return found[0]


def _leaf(value: Any) -> Any:
    """A tensor with its own gradient: that of what it was computed from is the script's to ask for."""
    return value.detach().requires_grad_() if isinstance(value, torch.Tensor) and value.requires_grad else value


def _real(called: dict[str, Any]) -> Any:
    """The arguments with the values that are known in a trace."""
    from vram_guard.simulate.device.constants import compute

    return mapped(called, lambda value: compute(value) if isinstance(value, torch.Tensor) else value)


def _is_loss(tensor: torch.Tensor) -> bool:
    return tensor.dim() == 0 and tensor.requires_grad and tensor.is_floating_point()


def _that_travels(weight: Any, why: str) -> WeightFound:
    """A weight as text: keys in it have to stay what they are in JSON."""
    if isinstance(weight, Normaliser) and any(type(key) not in (str, int) for key in weight.path):
        return WeightFound(None, _("it is divided by a number that nothing in the batch explains"))
    return WeightFound(weight, why)
