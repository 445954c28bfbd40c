"""Trains on a loaded batch in micro-batches, inside the model's own ``train_step``.

The runner still sees one iteration per loaded batch, so everything that counts iterations (schedules, intervals,
max_iters, logs, resume) keeps its meaning, and so does the user's own ``accumulative_counts``.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from vram_guard.apply.loss_weight import LossWeight, loss_weights, split_or_warn, weighted_sum
from vram_guard.apply.microbatch import MicroBatch, Splitter

if TYPE_CHECKING:
    from vram_guard.watch.recovery import Attempt

# ruff: noqa: SLF001 - OptimWrapper documents `_inner_count` for those who write their own backward


class SplitTrainStep:
    """Stands on a model in place of its ``train_step``."""

    def __init__(self, as_written: Callable[..., Any], splitter: Splitter, loss_weight: LossWeight) -> None:
        self._as_written = as_written
        self._splitter = splitter
        self._loss_weight = loss_weight

    def __call__(self, data: Any, optim_wrapper: Any) -> Any:
        """The log variables of the whole batch, as ``train_step`` returns them."""
        micro_batches = split_or_warn(self._splitter, data)
        if len(micro_batches) == 1:
            return self._as_written(data, optim_wrapper=optim_wrapper)
        weights = loss_weights(micro_batches, self._loss_weight)
        last = len(micro_batches) - 1
        outputs = []
        for index, (micro_batch, weight) in enumerate(zip(micro_batches, weights, strict=True)):
            part = Part(optim_wrapper, weight, last=index == last)
            outputs.append(detached(self._as_written(micro_batch.data, optim_wrapper=part)))
        return merged(outputs, micro_batches, weights)


class Part:
    """The user's optimizer wrapper for one micro-batch: it updates only with the last one.

    Where recovery is armed, ``attempt`` is told when backward begins, and agrees before anything is updated.
    """

    def __init__(self, wrapper: Any, weight: Any, *, last: bool, attempt: Attempt | None = None) -> None:
        vars(self).update(_wrapper=wrapper, _weight=weight, _last=last, _attempt=attempt)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_wrapper"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_wrapper"], name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the wrapper, so that ``isinstance`` holds."""
        return type(vars(self)["_wrapper"])

    @contextlib.contextmanager
    def optim_context(self, model: Any) -> Iterator[None]:
        """The wrapper's own, and no averaging over processes before the last micro-batch."""
        with contextlib.ExitStack() as stack:
            if not vars(self)["_last"] and hasattr(model, "no_sync"):
                stack.enter_context(model.no_sync())
            stack.enter_context(vars(self)["_wrapper"].optim_context(model))
            yield

    def update_params(self, loss: torch.Tensor, step_kwargs: Any = None, zero_kwargs: Any = None) -> None:
        """Backward; after the last micro-batch, whatever the wrapper does after a batch."""
        wrapper, attempt = vars(self)["_wrapper"], vars(self)["_attempt"]
        share = loss * vars(self)["_weight"]
        if vars(self)["_last"] and attempt is None:
            wrapper.update_params(share, step_kwargs=step_kwargs, zero_kwargs=zero_kwargs)
            return
        if attempt is not None:
            attempt.before_backward()
        wrapper.backward(wrapper.scale_loss(share))
        if not vars(self)["_last"]:
            wrapper._inner_count -= 1  # it counts batches, and this is a part of one
            if attempt is not None:
                attempt.stage = "forward"
            return
        attempt.commit()
        if wrapper.should_update():  # as OptimWrapper.update_params goes on
            wrapper.step(**(step_kwargs or {}))
            wrapper.zero_grad(**(zero_kwargs or {}))


def detached(output: Any) -> Any:
    """Without graphs, which would keep this micro-batch's activations while the next one runs."""
    if isinstance(output, torch.Tensor):
        return output.detach()
    if isinstance(output, Mapping):
        return {key: detached(value) for key, value in output.items()}
    return output


def merged(outputs: list[Any], micro_batches: list[MicroBatch], weights: list[Any]) -> Any:
    """Log variables as ``train_step`` would have returned them for the whole batch.

    Losses are weighed as they were for the backward pass, other numbers by samples; of what is no number, the last
    micro-batch's is kept.
    """
    if not all(isinstance(output, Mapping) for output in outputs):
        return outputs[-1]
    shares = [micro_batch.weight for micro_batch in micro_batches]
    names = dict.fromkeys(name for output in outputs for name in output)
    return {
        name: _merged_value([output.get(name) for output in outputs], weights if "loss" in name else shares)
        for name in names
    }


def _merged_value(values: list[Any], weights: list[Any]) -> Any:
    if all(isinstance(value, torch.Tensor) and value.is_floating_point() for value in values):
        return weighted_sum(values, weights)
    if all(isinstance(value, float) for value in values):
        return sum(value * float(weight) for value, weight in zip(values, weights, strict=True))
    return values[-1]


def install(model: Any, splitter: Splitter, loss_weight: LossWeight = "mean") -> Callable[[], None]:
    """Split the batches that reach ``model.train_step``; returns the function that undoes it."""
    before = vars(model).get("train_step")
    vars(model)["train_step"] = SplitTrainStep(model.train_step, splitter, loss_weight)

    def undo() -> None:
        vars(model).pop("train_step", None)
        if before is not None:
            vars(model)["train_step"] = before

    return undo
