"""Run a model's forward, and the backward that follows it, over slices of its batch; its callers notice nothing.

Where a framework owns the loop, a loaded batch can be handed to it in micro-batches. A script owns its loop: it counts
its own batches, divides losses by its own number, steps when it likes. So here the model itself is what works in
slices. Called with a whole batch, it returns the whole batch's outputs, and gradients are those of the whole batch;
only activations are those of one slice. In which of two ways:

- The model returns one scalar (its loss, as the models of Transformers do): each slice runs forward and at once
  backward. A loss ``f(loss)`` has the gradient ``f'(loss) * d loss / d parameters``, and the second factor is known
  then; the script's own ``backward()`` brings the first one. Nothing is computed twice.
- The script computes its loss from the model's outputs: forward runs without a graph, and the backward pass runs each
  slice's forward again, as activation checkpointing does, with the same random numbers.

Both are exact, where the model treats samples independently. Batch normalisation takes its statistics over a slice.
"""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any, Literal

import torch
from torch import nn

from vram_guard.apply._slice_run import ITEMS_IN_BATCH, SlicedModel, SlicedRun, needs_gradient
from vram_guard.apply.loss_graphs import LossGraphs
from vram_guard.apply.loss_weight import split_or_warn
from vram_guard.apply.microbatch import Layout, Splitter
from vram_guard.apply.normalisers import Normaliser
from vram_guard.apply.outputs import rows_of
from vram_guard.errors import LossChangedError, UnsupportedTechniqueError
from vram_guard.language import _
from vram_guard.state.containers import leaves
from vram_guard.state.modules import statistics_kept
from vram_guard.state.random_generators import RandomState
from vram_guard.tensors import tensors_of

__all__ = ["ITEMS_IN_BATCH", "SlicedForward", "slice_forward"]


def slice_forward(
    model: nn.Module,
    batch_size: int,
    micro_batch_size: int,
    *,
    layout: Layout | None = None,
    loss_weight: Literal["mean", "sum"] | Normaliser = "mean",
    returns_loss: bool = True,
    scale: Callable[[], float] = lambda: 1.0,
    at_most: int | None = None,
    graphs: LossGraphs | None = None,
    on_slice: Callable[[int, int, int], None] = lambda _first, _samples, _of: None,
) -> Callable[[], None]:
    """From now on, ``model`` trains on slices of ``micro_batch_size`` samples; evaluation is as before.

    Args:
        model: the module that is called with the batch. Its trained parameters must be its own.
        batch_size: samples of a full batch.
        micro_batch_size: samples of a slice, at most.
        layout: how the arguments are cut, of :func:`by_name`; None: as a full batch shows, and where that reads in two
            ways the batch stays whole.
        loss_weight: what a loss that the model returns is over the samples of its batch; a mean leaves out labels that
            are ignored, and what the model divides by ``num_items_in_batch`` is neither, and seen. A count is one in
            the arguments, of :func:`by_name`.
        returns_loss: whether the one number that the model returns, if it does, is what is differentiated. Where it is
            computed beside the outputs that are, nothing is done for it beforehand.
        scale: the factor by which losses are scaled in float16 (``GradScaler.get_scale``).
        graphs: with which each loss that the model returns is compared; None: with none. A call whose loss is made in
            another way runs as written, and so do the next ones.
        at_most: run so many slices and take the others for done: for traces, where one is like another.
        on_slice: called before the forward of each slice, with its first sample, its samples, and those of the batch.

    Returns:
        A function that takes it off again.
    """
    before = vars(model).get("forward")
    if isinstance(loss_weight, Normaliser):
        loss_weight = loss_weight.bound(model)
    sliced = SlicedModel(model, model.forward, loss_weight, returns_loss, scale, at_most, on_slice, graphs)
    vars(model)["forward"] = SlicedForward(sliced, Splitter(batch_size, micro_batch_size, layout=layout))

    def undo() -> None:
        vars(model).pop("forward", None)
        if before is not None:
            vars(model)["forward"] = before

    return undo


class SlicedForward:
    """Stands on a model in place of its ``forward``."""

    def __init__(self, sliced: SlicedModel, splitter: Splitter) -> None:
        self._sliced = sliced
        self._splitter = splitter
        self.__wrapped__ = sliced.as_written  # for who unwraps forwards layer by layer (Accelerate)

    def __reduce__(self) -> Any:
        """A model is saved without the guard: ``torch.save(model)`` works as it did."""
        as_written = self._sliced.as_written
        return as_written.__reduce__() if isinstance(as_written, MethodType) else (_itself, (as_written,))

    def __deepcopy__(self, memo: dict[int, Any]) -> SlicedForward:
        """A copied model (an average of weights) goes on in slices of its own."""
        twin = object.__new__(SlicedForward)
        memo[id(self)] = twin
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """The model's output for the whole batch."""
        sliced = self._sliced
        if sliced.as_written_from_here or not sliced.model.training or not torch.is_grad_enabled():
            return sliced.as_written(*args, **kwargs)
        parameters = [parameter for parameter in sliced.model.parameters() if parameter.requires_grad]
        called = by_name(args, kwargs)
        if not parameters and not any(needs_gradient(leaf) for leaf in leaves(called)):
            return sliced.as_written(*args, **kwargs)
        # A trace must not take a batch that stays whole for one in slices.
        slices = split_or_warn(self._splitter, called) if sliced.at_most is None else self._splitter.split(called)
        if len(slices) == 1:
            return sliced.as_written(*args, **kwargs)
        if slices[0].samples == 1 and sliced.rows_of_two is None:
            sliced.rows_of_two = self._rows_of_two(called, len(args))
        run = SlicedRun(sliced, slices, parameters, called, len(args))
        try:
            outputs = _Slices.apply(run, *run.given, *parameters)  # type: ignore[no-untyped-call]
        except LossChangedError as changed:
            if sliced.has_statistics:  # which the slices before have moved
                raise
            warnings.warn(
                "vram_guard: " + _("{why}: this batch and the next ones run as written", why=changed.reason),
                stacklevel=2,
            )
            run.draw_again()
            sliced.as_written_from_here = True
            return sliced.as_written(*args, **kwargs)
        return run.rebuilt(outputs)

    def _rows_of_two(self, called: dict[str, Any], positional: int) -> tuple[int, ...]:
        """Of one sample, a row and what there is once for a batch look alike; of two samples they do not."""
        pairs = copy.copy(self._splitter)
        pairs.micro_batch_size = 2
        pair = pairs.split(called)[0]
        kwargs = dict(pair.data)
        args = [kwargs.pop(str(at)) for at in range(positional)]
        self._sliced.on_slice(0, pair.samples, pair.batch_samples)
        with torch.no_grad(), RandomState.with_current_device().again(), statistics_kept(self._sliced.model):
            return rows_of(tensors_of(self._sliced.as_written(*args, **kwargs)))


def by_name(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """The arguments of a call by name, positional ones by their number: a tuple of them is no tuple of samples."""
    return {**{str(at): value for at, value in enumerate(args)}, **kwargs}


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


class _Slices(torch.autograd.Function):
    """One autograd node for all slices: parameters and inputs go in, whole outputs come out."""

    @staticmethod
    def forward(ctx: Any, run: SlicedRun, *_tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        outputs = run.forward()
        ctx.mark_non_differentiable(*(out for out in outputs if not out.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True: the result would silently be taken for a constant
            raise UnsupportedTechniqueError(
                _(
                    "gradients of gradients (create_graph=True, a gradient penalty) are not possible with a model that "
                    "works in slices of its batch: leave 'accumulate' out of what is allowed"
                )
            )
        return (None, *ctx.run.backward(gradients))
