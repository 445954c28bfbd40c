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
from collections.abc import Callable, Sequence
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from vram_guard.apply.loss_weight import mean_shares, split_or_warn
from vram_guard.apply.microbatch import MicroBatch, Splitter
from vram_guard.apply.outputs import Merging, check_rows, detached, tensors_of
from vram_guard.apply.rerun import RandomState, autocast_now, no_autocast, statistics_kept
from vram_guard.errors import UnsupportedTechniqueError

#: A keyword of Transformers' models: their loss is then a sum over tokens, divided by this number.
ITEMS_IN_BATCH = "num_items_in_batch"


def slice_forward(
    model: nn.Module,
    batch_size: int,
    micro_batch_size: int,
    *,
    scale: Callable[[], float] = lambda: 1.0,
    at_most: int | None = None,
    on_slice: Callable[[], None] = lambda: None,
) -> Callable[[], None]:
    """From now on, ``model`` trains on slices of ``micro_batch_size`` samples; evaluation is as before.

    Args:
        model: the module that is called with the batch. Its trained parameters must be its own.
        batch_size: samples of a full batch.
        micro_batch_size: samples of a slice, at most.
        scale: the factor by which losses are scaled in float16 (``GradScaler.get_scale``).
        at_most: run so many slices and take the others for done: for traces, where one is like another.
        on_slice: called before the forward of each slice.

    Returns:
        A function that takes it off again.
    """
    before = vars(model).get("forward")
    splitter = Splitter(batch_size, micro_batch_size)
    vars(model)["forward"] = SlicedForward(model, model.forward, splitter, scale, at_most, on_slice)

    def undo() -> None:
        vars(model).pop("forward", None)
        if before is not None:
            vars(model)["forward"] = before

    return undo


class SlicedForward:
    """Stands on a model in place of its ``forward``."""

    def __init__(
        self,
        model: nn.Module,
        as_written: Callable[..., Any],
        splitter: Splitter,
        scale: Callable[[], float],
        at_most: int | None,
        on_slice: Callable[[], None],
    ) -> None:
        self.model = model
        self.as_written = as_written
        self.__wrapped__ = as_written  # for who unwraps forwards layer by layer (Accelerate)
        self.splitter = splitter
        self.scale = scale
        self.at_most = at_most
        self.on_slice = on_slice
        self.divides: bool | None = None
        """Whether the model divides its loss by the number that it is given for that; None: not seen yet."""

    def __reduce__(self) -> Any:
        """A model is saved without the guard: ``torch.save(model)`` works as it did."""
        if isinstance(self.as_written, MethodType):
            return self.as_written.__reduce__()
        return _itself, (self.as_written,)

    def __deepcopy__(self, memo: dict[int, Any]) -> SlicedForward:
        """A copied model (an average of weights) goes on in slices of its own."""
        twin = object.__new__(SlicedForward)
        memo[id(self)] = twin
        vars(twin).update(copy.deepcopy(vars(self), memo))
        return twin

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """What the model returns for the whole batch."""
        if not self.model.training or not torch.is_grad_enabled():
            return self.as_written(*args, **kwargs)
        parameters = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        # By name: a tuple of arguments must not be taken for a tuple of samples.
        called = {**{str(at): value for at, value in enumerate(args)}, **kwargs}
        given = _tensors_with_gradient(called)
        if not parameters and not given:
            return self.as_written(*args, **kwargs)
        # A trace must not take a batch that stays whole for one in slices.
        slices = split_or_warn(self.splitter, called) if self.at_most is None else self.splitter.split(called)
        if len(slices) == 1:
            return self.as_written(*args, **kwargs)
        run = _Run(self, slices, parameters, called, len(args))
        outputs = _Slices.apply(run, *given, *parameters)  # type: ignore[no-untyped-call]
        return run.rebuilt(outputs)


def _itself(forward: Callable[..., Any]) -> Callable[..., Any]:
    return forward


class _Slices(torch.autograd.Function):
    """One autograd node for all slices: parameters and inputs go in, whole outputs come out."""

    @staticmethod
    def forward(ctx: Any, run: _Run, *_tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        ctx.run = run
        ctx.set_materialize_grads(False)
        outputs = run.forward()
        ctx.mark_non_differentiable(*(out for out in outputs if not out.is_floating_point()))
        return outputs

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        if torch.is_grad_enabled():  # create_graph=True: the result would silently be taken for a constant
            raise UnsupportedTechniqueError(
                "gradients of gradients (create_graph=True, a gradient penalty) cannot be had of a model that works "
                "in slices of its batch: leave 'accumulate' out of what is allowed"
            )
        return (None, *ctx.run.backward(gradients))


class _Run:
    """One call of the model, from its forward to its backward."""

    def __init__(
        self,
        owner: SlicedForward,
        slices: list[MicroBatch],
        parameters: list[nn.Parameter],
        called: dict[str, Any],
        positional: int,
    ) -> None:
        self._owner = owner
        self._slices = slices[: owner.at_most]
        self._items = called.get(ITEMS_IN_BATCH)
        self._shares = mean_shares(owner.model, slices, called)
        self._weights = self._shares if self._items is None or owner.divides is False else [1.0] * len(slices)
        self._positional = [str(at) for at in range(positional)]
        self._parameters = parameters
        leaves, self._structure = pytree.tree_flatten(called)
        self._traced = [at for at, leaf in enumerate(leaves) if _needs_gradient(leaf)]
        self._given = [leaves[at] for at in self._traced]
        self._random: list[RandomState] = []
        self._autocast = autocast_now()
        self._merging = Merging(sum(part.samples for part in slices))
        self._ready: list[torch.Tensor | None] | None = None
        """Gradients of the scalar output, where each slice's backward ran at once."""
        self._scalar: int | None = None
        self._scale: float = 1.0
        self._differentiated = False

    # --- forward ----------------------------------------------------------------------------------------------

    def forward(self) -> tuple[torch.Tensor, ...]:
        """The outputs of the whole batch, flat."""
        first = 0
        for number, part in enumerate(self._slices):
            self._random.append(RandomState())
            if number == 0 or self._scalar is not None:
                self._forward_and_backward(part, first)
            else:
                with torch.no_grad():
                    self._merging.add(self._call(self._leaves_of(part)), first, part.samples, self._weights[number])
            first += part.samples
        return self._merging.outputs()

    def _forward_and_backward(self, part: MicroBatch, first: int) -> None:
        """A slice with its graph: if there is one scalar to differentiate, that is done at once."""
        leaves = self._leaves_of(part)
        items = self._watched_items()
        with torch.enable_grad():
            out = self._call(leaves, items)
        check_rows(out, part.samples)
        scalars = [
            (at, leaf)
            for at, leaf in enumerate(tensors_of(out))
            if leaf.dim() == 0 and leaf.requires_grad and leaf.is_floating_point()
        ]
        if items is not None and len(scalars) == 1:
            self._look_whether_divided(scalars[0][1], items)
        weight = self._weights[len(self._random) - 1]
        self._merging.add(detached(out), first, part.samples, weight)
        if len(scalars) != 1:
            return  # the graph dies with this frame: the backward pass makes it again
        self._scalar, loss = scalars[0]
        del out, scalars
        # In float16, gradients of a loss that is not scaled would vanish.
        self._scale = self._owner.scale()
        with torch.enable_grad():
            loss = loss * (weight * self._scale)
        self._add(self._gradients([loss], [None], leaves), first, part.samples)

    def _watched_items(self) -> torch.Tensor | None:
        """The number that losses are divided by, in a form that tells whether it was used; None where that is known."""
        if self._items is None or self._owner.divides is not None:
            return None
        return torch.as_tensor(self._items, dtype=torch.float32).detach().clone().requires_grad_()

    def _look_whether_divided(self, loss: torch.Tensor, items: torch.Tensor) -> None:
        """Many of Transformers' models take ``num_items_in_batch`` and return a mean all the same."""
        found: Sequence[Any] = torch.autograd.grad(loss, [items], retain_graph=True, allow_unused=True)
        self._owner.divides = found[0] is not None
        if found[0] is None:
            self._weights = self._shares

    def _call(self, leaves: list[Any], items: torch.Tensor | None = None) -> Any:
        kwargs = pytree.tree_unflatten(leaves, self._structure)
        if items is not None:
            kwargs[ITEMS_IN_BATCH] = items
        args = [kwargs.pop(name) for name in self._positional]
        self._owner.on_slice()
        return self._owner.as_written(*args, **kwargs)

    def _leaves_of(self, part: MicroBatch) -> list[Any]:
        """What the slice is called with; tensors whose gradient is asked for are leaves of its own graph."""
        leaves = pytree.tree_leaves(part.data)
        for at in self._traced:
            leaves[at] = leaves[at].detach().requires_grad_()
        return leaves

    def rebuilt(self, outputs: tuple[torch.Tensor, ...]) -> Any:
        """The model's own kind of output, over the tensors that carry the gradient."""
        return self._merging.rebuilt(outputs)

    # --- backward ---------------------------------------------------------------------------------------------

    def backward(self, gradients: Sequence[torch.Tensor | None]) -> list[torch.Tensor | None]:
        """Gradients of the inputs and parameters, from those of the outputs."""
        total: list[torch.Tensor | None] = [None] * (len(self._given) + len(self._parameters))
        rest = list(gradients)
        if self._scalar is not None:
            factor, rest[self._scalar] = rest[self._scalar], None
            ready, self._ready = self._ready, None
            if factor is not None and self._differentiated:
                raise UnsupportedTechniqueError(
                    "a second backward pass through the same loss (retain_graph=True) cannot be had of a model that "
                    "works in slices of its batch: leave 'accumulate' out of what is allowed"
                )
            self._differentiated = self._differentiated or factor is not None
            if factor is not None and ready is not None:
                factor = factor / self._scale
                total = [gradient if gradient is None else gradient.mul_(factor) for gradient in ready]
            del ready
        self._ready = total
        if any(gradient is not None for gradient in rest):
            self._again(rest)
        total, self._ready = self._ready, None
        return total

    def _again(self, gradients: list[torch.Tensor | None]) -> None:
        """Each slice's forward once more, with its random numbers, and its backward."""
        first = 0
        for number, part in enumerate(self._slices):
            leaves = self._leaves_of(part)
            with (
                torch.enable_grad(),
                self._random[number].again(),
                self._autocast(),
                statistics_kept(self._owner.model),
            ):
                made = tensors_of(self._call(leaves))
            wanted = [
                (out, self._merging.share(at, gradient, first, part.samples, self._weights[number]))
                for at, (out, gradient) in enumerate(zip(made, gradients, strict=True))
                if gradient is not None and out.requires_grad
            ]
            del made
            if wanted:
                outputs, shares = zip(*wanted, strict=True)
                own = {_memory(share) for share in shares}
                self._add(self._gradients(list(outputs), list(shares), leaves), first, part.samples, own)
                del outputs, shares
            del wanted
            first += part.samples

    def _gradients(self, outputs: list[Any], shares: list[Any], leaves: list[Any]) -> list[torch.Tensor | None]:
        sources = [*(leaves[at] for at in self._traced), *self._parameters]
        with no_autocast():
            return list(torch.autograd.grad(outputs, sources, shares, allow_unused=True))

    def _add(
        self, gradients: list[torch.Tensor | None], first: int, samples: int, others: set[int] | None = None
    ) -> None:
        """Add a slice's gradients: those of inputs to their rows, those of parameters to their sum.

        Args:
            gradients: of inputs and parameters; emptied.
            first: the slice's first sample.
            samples: of the slice.
            others: memory that is somebody else's, see :func:`_memory`.
        """
        others = set() if others is None else others
        if self._ready is None:
            self._ready = [None] * len(gradients)
        for at in range(len(gradients)):
            gradient, gradients[at] = gradients[at], None  # each dies as soon as it is added
            if gradient is None:
                continue
            if at < len(self._given) and gradient.dim() and len(gradient) == samples != len(self._given[at]):
                whole = self._ready[at]
                if whole is None:
                    whole = self._ready[at] = torch.zeros_like(self._given[at])
                whole[first : first + samples] += gradient
            elif self._ready[at] is None:
                # Where two parameters are added, autograd hands out one tensor as the gradient of both.
                shared = _memory(gradient) in others or 0 in gradient.stride()
                others.add(_memory(gradient))
                self._ready[at] = gradient.clone(memory_format=torch.contiguous_format) if shared else gradient
            else:
                self._ready[at].add_(gradient)  # type: ignore[union-attr]


def _memory(tensor: torch.Tensor) -> int:
    """Equal for tensors that lie in the same memory, as long as they live."""
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - a storage has one key, and it is private


def _needs_gradient(leaf: Any) -> bool:
    return isinstance(leaf, torch.Tensor) and leaf.requires_grad


def _tensors_with_gradient(given: Any) -> list[torch.Tensor]:
    return [leaf for leaf in pytree.tree_leaves(given) if _needs_gradient(leaf)]
