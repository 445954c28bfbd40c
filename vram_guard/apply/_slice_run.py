"""One call of a model that works in slices: its forward, and the backward that follows."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn

from vram_guard.apply._autocast import autocast_now, no_autocast
from vram_guard.apply._slice_gradients import SummedGradients, memory_of
from vram_guard.apply.loss_graphs import LossGraphs
from vram_guard.apply.loss_weight import loss_weights, mean_shares
from vram_guard.apply.microbatch import MicroBatch
from vram_guard.apply.normalisers import Normaliser
from vram_guard.apply.outputs import Merging, check_rows, detached
from vram_guard.errors import UnsupportedTechniqueError
from vram_guard.language import _
from vram_guard.state.containers import leaves, mapped
from vram_guard.state.forwards import FirstForward, SecondForward
from vram_guard.state.modules import normalisation_buffers, statistics_kept
from vram_guard.state.random_generators import RandomState
from vram_guard.tensors import tensors_of

#: A keyword of Transformers' models: their loss is then a sum over tokens, divided by this number.
ITEMS_IN_BATCH = "num_items_in_batch"


@dataclass
class SlicedModel:
    """A model whose calls are made in slices, and what its first calls have shown.

    Attributes:
        model: whose parameters and statistics are used.
        as_written: its own forward.
        loss_weight: what a loss that it returns is over the samples of its batch.
        returns_loss: whether the one number that it returns, if it does, is what is differentiated.
        scale: the factor by which losses are scaled in float16.
        at_most: run so many slices and take the others for done.
        on_slice: called before the forward of each slice, with its first sample, its samples, and those of the batch.
        graphs: with which losses that it returns are compared; None: with none.
        as_written_from_here: whether a loss was made in another way than those before: it is no longer cut.
        differentiated: whether there was a backward pass: the calls before the first one are all that a step makes.
        divides: whether the model divides its loss by the number that it is given for that; None: not seen yet.
        rows_of_two: how many rows its outputs for two samples have; None: not looked at.
    """

    model: nn.Module
    as_written: Callable[..., Any]
    loss_weight: Literal["mean", "sum"] | Normaliser
    returns_loss: bool
    scale: Callable[[], float]
    at_most: int | None
    on_slice: Callable[[int, int, int], None]
    graphs: LossGraphs | None = None
    as_written_from_here: bool = False
    differentiated: bool = False
    divides: bool | None = None
    rows_of_two: tuple[int, ...] | None = None

    @property
    def has_statistics(self) -> bool:
        """True if a forward moves running statistics of normalisation."""
        return bool(normalisation_buffers(self.model))


class SlicedRun:
    """One call of the model, from its forward to its backward.

    Args:
        sliced: the model.
        slices: of the batch.
        parameters: those that are trained.
        called: what the model was called with, by name; positional arguments by their number.
        positional: how many of those there are.
    """

    def __init__(
        self,
        sliced: SlicedModel,
        slices: list[MicroBatch],
        parameters: list[nn.Parameter],
        called: dict[str, Any],
        positional: int,
    ) -> None:
        self._sliced = sliced
        self._slices = slices[: sliced.at_most]
        self._items = called.get(ITEMS_IN_BATCH)
        weight = sliced.loss_weight
        self._uncounted = isinstance(weight, Normaliser) and not weight.is_in(called)
        """True if the losses of this call cannot be weighed as the others."""
        if weight == "mean" or self._uncounted:
            self._shares = mean_shares(sliced.model, slices, called)
        else:
            self._shares = loss_weights(slices, weight)
        # A trace knows no values.
        self._empty = _without_weight(self._shares) if sliced.at_most is None else frozenset[int]()
        self._weights = self._shares if self._items is None or sliced.divides is False else [1.0] * len(slices)
        self._positional = [str(at) for at in range(positional)]
        self._parameters = parameters
        self.given = [leaf for leaf in leaves(called) if needs_gradient(leaf)]
        """The tensors among the arguments whose gradient will be asked for."""
        whole = {id(leaf) for part in slices for leaf in leaves(part.data)} if self.given else set()
        self._cut = [at for at, tensor in enumerate(self.given) if id(tensor) not in whole]
        """Those of which slices get some rows; the others are samples of a list, or shared by all slices."""
        self._random: list[RandomState] = []
        self._first: list[FirstForward] = []
        """Of each slice, where its forward will run again."""
        self._autocast = autocast_now()
        self._merging = Merging(sum(part.samples for part in slices), sliced.rows_of_two)
        self._gathered = SummedGradients(self.given)
        """Gradients of the scalar output at first, where each slice's backward runs at once."""
        self._scalar: int | None = None
        self._scale: float = 1.0
        self._differentiated = False

    # --- forward ----------------------------------------------------------------------------------------------

    def forward(self) -> tuple[torch.Tensor, ...]:
        """The outputs of the whole batch, flat."""
        first = 0
        if self._sliced.graphs is not None and self._sliced.differentiated:
            self._sliced.graphs.next_batch()
        for number, part in enumerate(self._slices):
            self._random.append(RandomState.with_current_device())
            with self._first_forward():
                if number == 0 or self._scalar is not None:
                    self._forward_and_backward(part, first)
                else:
                    with torch.no_grad():
                        out = self._call(part, first, self._inputs_of(part)[0])
                        self._merging.add(out, first, part.samples, self._weights[number])
            first += part.samples
        return self._merging.outputs()

    def _first_forward(self) -> contextlib.AbstractContextManager[None]:
        if self._sliced.returns_loss:
            return contextlib.nullcontext()
        self._first.append(FirstForward(self._sliced.model))
        return self._first[-1]

    def _forward_and_backward(self, part: MicroBatch, first: int) -> None:
        """A slice with its graph: if there is one scalar to differentiate, that is done at once."""
        called, own = self._inputs_of(part)
        items = self._watched_items()
        with torch.enable_grad():
            out = self._call(part, first, called, items)
        check_rows(out, part.samples, self._sliced.rows_of_two)
        scalars = [
            (at, leaf)
            for at, leaf in enumerate(tensors_of(out))
            if leaf.dim() == 0 and leaf.requires_grad and leaf.is_floating_point()
        ]
        if items is not None and len(scalars) == 1:
            self._look_whether_divided(scalars[0][1], items)
        number = len(self._random) - 1
        weight = self._weights[number]
        self._merging.add(detached(out), first, part.samples, weight)
        if len(scalars) != 1 or not self._sliced.returns_loss:
            return  # the graph dies with this frame: the backward pass makes it again
        if self._uncounted:
            raise UnsupportedTechniqueError(
                _(
                    "the model returns a loss that is divided by {count}, and this call has no such part: it cannot "
                    "run in slices of its batch",
                    count=self._sliced.loss_weight.words() if isinstance(self._sliced.loss_weight, Normaliser) else "",
                )
            )
        self._scalar, loss = scalars[0]
        if self._sliced.graphs is not None:
            self._sliced.graphs.check(loss)
        del out, scalars
        if self._is_empty(number):
            return
        # In float16, gradients of a loss that is not scaled would vanish.
        self._scale = self._sliced.scale()
        with torch.enable_grad():
            loss = loss * (weight * self._scale)
        self._gathered.add(self._gradients([loss], [None], own), first, part.samples)

    def _is_empty(self, number: int) -> bool:
        """Nothing counts in a slice: its loss is 0 / 0, and so are the loss's gradients."""
        return self._weights is self._shares and number in self._empty

    def _watched_items(self) -> torch.Tensor | None:
        """The number that losses are divided by, which records whether it is used; None where that is known."""
        if self._items is None or self._sliced.divides is not None:
            return None
        return torch.as_tensor(self._items, dtype=torch.float32).detach().clone().requires_grad_()

    def _look_whether_divided(self, loss: torch.Tensor, items: torch.Tensor) -> None:
        """Many of Transformers' models take ``num_items_in_batch`` and return a mean all the same."""
        found: Sequence[Any] = torch.autograd.grad(loss, [items], retain_graph=True, allow_unused=True)
        self._sliced.divides = found[0] is not None
        if found[0] is None:
            self._weights = self._shares

    def _call(self, part: MicroBatch, first: int, called: dict[str, Any], items: torch.Tensor | None = None) -> Any:
        kwargs = dict(called) if items is None else {**called, ITEMS_IN_BATCH: items}
        args = [kwargs.pop(name) for name in self._positional]
        self._sliced.on_slice(first, part.samples, part.batch_samples)
        return self._sliced.as_written(*args, **kwargs)

    def _inputs_of(self, part: MicroBatch) -> tuple[dict[str, Any], list[torch.Tensor | None]]:
        """Arguments of the slice, and the leaves of its own graph, in the order of ``given``."""
        own: list[torch.Tensor | None] = [None] * len(self.given)
        if not own:
            return part.data, own
        known = {id(tensor): at for at, tensor in enumerate(self.given)}
        cut = iter(self._cut)

        def fresh(leaf: Any) -> Any:
            if not needs_gradient(leaf):
                return leaf
            at = known[id(leaf)] if id(leaf) in known else next(cut)
            own[at] = tensor = leaf.detach().requires_grad_()
            return tensor

        return mapped(part.data, fresh), own

    def draw_again(self) -> None:
        """Random numbers go on from where they were before the first slice."""
        self._random[0].restore()

    def rebuilt(self, outputs: tuple[torch.Tensor, ...]) -> Any:
        """The model's own kind of output, over the tensors that carry the gradient."""
        return self._merging.rebuilt(outputs)

    # --- backward ---------------------------------------------------------------------------------------------

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients of the inputs and parameters, from those of the outputs."""
        self._sliced.differentiated = True
        total: list[torch.Tensor | None] = [None] * (len(self.given) + len(self._parameters))
        rest = list(gradients)
        if self._scalar is not None:
            factor, rest[self._scalar] = rest[self._scalar], None
            ready = self._gathered.take()
            if factor is not None and self._differentiated:
                raise UnsupportedTechniqueError(
                    _(
                        "a second backward pass through the same loss (retain_graph=True) is not possible with a model "
                        "that works in slices of its batch: leave 'accumulate' out of what is allowed"
                    )
                )
            self._differentiated = self._differentiated or factor is not None
            if factor is not None and ready is not None:
                factor = factor / self._scale
                total = [gradient if gradient is None else gradient.mul_(factor) for gradient in ready]
            del ready
        self._gathered.go_on_from(total)
        if any(gradient is not None for gradient in rest):
            self._again(rest)
        return self._gathered.take() or []

    def _again(self, gradients: list[torch.Tensor | None]) -> None:
        """Each slice's forward once more, with its random numbers, and its backward."""
        first = 0
        for number, part in enumerate(self._slices):
            called, own = self._inputs_of(part)
            kept = SecondForward(self._first[number]) if self._first else statistics_kept(self._sliced.model)
            with torch.enable_grad(), self._random[number].again(), self._autocast(), kept:
                made = tensors_of(self._call(part, first, called))
            wanted = [
                (out, self._merging.share(at, gradient, first, part.samples, self._weights[number]))
                for at, (out, gradient) in enumerate(zip(made, gradients, strict=True))
                if gradient is not None and out.requires_grad and (out.dim() or not self._is_empty(number))
            ]
            del made
            if wanted:
                outputs, shares = zip(*wanted, strict=True)
                theirs = {memory_of(share) for share in shares}
                self._gathered.add(self._gradients(list(outputs), list(shares), own), first, part.samples, theirs)
                del outputs, shares
            del wanted
            first += part.samples

    def _gradients(
        self, outputs: list[Any], shares: list[Any], own: list[torch.Tensor | None]
    ) -> list[torch.Tensor | None]:
        sources = [*(tensor for tensor in own if tensor is not None), *self._parameters]
        with no_autocast():
            found = iter(torch.autograd.grad(outputs, sources, shares, allow_unused=True))
        return [*(None if tensor is None else next(found) for tensor in own), *found]


def _without_weight(weights: list[Any]) -> frozenset[int]:
    """The slices in which nothing counts; one look at a GPU for all of them."""
    if not all(isinstance(weight, torch.Tensor) for weight in weights):
        return frozenset()
    return frozenset(at for at, weight in enumerate(torch.stack(weights).tolist()) if weight == 0)


def needs_gradient(leaf: Any) -> bool:
    """Check whether the gradient of this part of a batch will be used."""
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad
