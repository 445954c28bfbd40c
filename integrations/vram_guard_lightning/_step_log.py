"""Makes ``self.log`` in ``training_step`` mean the same with micro-batches as without.

``training_step`` runs once per micro-batch, so ``self.log`` does too. Passed on as they come, the value of
a step would be its last micro-batch's, sums would still be sums but means would weigh micro-batches and not
samples, and under DDP a rank with one micro-batch more would wait for the others for ever
(``sync_dist=True``). So the calls are gathered, and each is passed on once, combined. Metric objects, and what they
returned, stand for their value of the whole batch, see :mod:`vram_guard_lightning._step_metrics`.
"""

from __future__ import annotations

import contextlib
import functools
import math
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from vram_guard.patching import replaced
from vram_guard_lightning._step_metrics import Origin, StepMetrics


class _LogCall(NamedTuple):
    value: Any
    samples: int
    arguments: dict[str, Any]
    origin: Origin | None
    """The call of a metric that returned the value."""
    micro_batch: int


class StepLog:
    """Gathers the calls of ``self.log`` during the micro-batches of one batch."""

    def __init__(self, results: Any, module: Any) -> None:
        """``results``: Lightning's result collection of the loop; ``module``: that logs."""
        self._results = results
        self._module = module
        self._metrics = StepMetrics(module)
        self._origin: Origin | None = None
        """Of the value that is being logged."""
        self._calls: dict[tuple[str, str, int], list[_LogCall]] = {}
        self._seen: dict[tuple[str, str], int] = {}
        self._samples = 0
        self._losses: list[tuple[float, Any] | None] = []
        """Of each micro-batch, its loss and the factor of that; None where there is none."""

    @contextlib.contextmanager
    def gathering(self, *, cut: bool) -> Iterator[None]:
        """Inside the block, logged values are kept; when it ends without an error, they are passed on.

        Args:
            cut: whether the batch runs in micro-batches.
        """
        log = functools.partial(self._log, self._module.log)
        with contextlib.ExitStack() as stack:
            if cut:
                stack.enter_context(self._metrics.followed())
                stack.enter_context(replaced(self._module, {"log": log}))
            stack.enter_context(replaced(self._results, {"log": self._keep}))
            yield
        for (fx, name, _), calls in self._calls.items():
            self._results.log(fx, name, self._combined(calls), **_combined_arguments(calls))

    def next_micro_batch(self, samples: int) -> None:
        """Begin a micro-batch of so many samples."""
        self._samples = samples
        self._losses.append(None)
        self._seen.clear()
        self._metrics.next_micro_batch()

    def loss(self, value: torch.Tensor, factor: Any) -> None:
        """The loss that this micro-batch's training_step returned, and what it is multiplied by in the batch's."""
        self._losses[-1] = float(value.detach()), factor

    def _log(self, own: Callable[..., None], name: str, value: Any, *args: Any, **kwargs: Any) -> None:
        """Stands in for the module's ``log``, which hands on copies of tensors."""
        self._origin = self._metrics.origin(value)
        try:
            own(name, value, *args, **kwargs)
        finally:
            self._origin = None

    def _keep(self, fx: str, name: str, value: Any, **arguments: Any) -> None:
        """Stands in for Lightning's ``log``; lets the graph go, which would hold activations."""
        occurrence = self._seen.get((fx, name), 0)
        self._seen[fx, name] = occurrence + 1
        if isinstance(value, torch.Tensor) and not arguments.get("enable_graph"):
            value = value.detach().clone()
        call = _LogCall(value, self._samples, arguments, self._origin, len(self._losses) - 1)
        self._calls.setdefault((fx, name, occurrence), []).append(call)

    def _combined(self, calls: list[_LogCall]) -> Any:
        """The step's value; of the loss itself, the sum that makes it the batch's."""
        losses = [self._losses[call.micro_batch] if call.micro_batch >= 0 else None for call in calls]
        if len(calls) > 1 and all(map(_is_loss, calls, losses)):
            return torch.stack([call.value * pair[1] for call, pair in zip(calls, losses, strict=True) if pair]).sum(0)
        return _combined(calls)


def _combined(calls: list[_LogCall]) -> Any:
    """The step's value: a metric's own, or reduced over its micro-batches as Lightning reduces it over batches."""
    origin = calls[0].origin
    if origin is not None and all(origin.same(call.origin) for call in calls):
        return origin.value()
    if len(calls) == 1 or not all(isinstance(call.value, torch.Tensor) for call in calls):
        return calls[-1].value  # a Metric gathers its own state, and is logged once
    values = torch.stack([call.value for call in calls])
    reduction = calls[-1].arguments.get("reduce_fx", "mean")
    kind = reduction.lower() if isinstance(reduction, str) else getattr(reduction, "__name__", "")
    if kind == "sum":
        return values.sum(0)
    if kind == "max":
        return values.amax(0)
    if kind == "min":
        return values.amin(0)
    if not values.is_floating_point():
        values = values.to(torch.get_default_dtype())
    weights = torch.tensor([_weight(call) for call in calls], dtype=values.dtype, device=values.device)
    return torch.tensordot(weights / weights.sum(), values, dims=1)


def _combined_arguments(calls: list[_LogCall]) -> dict[str, Any]:
    """The arguments of the one call that is passed on: batch sizes that the user counted are summed."""
    arguments = dict(calls[-1].arguments)
    if arguments.get("batch_size") is not None and not _constant(calls):
        arguments["batch_size"] = sum(call.arguments["batch_size"] for call in calls)
    return arguments


def _constant(calls: list[_LogCall]) -> bool:
    """True where the user gave the same batch size for micro-batches of whatever size: that of a whole batch."""
    given = {call.arguments.get("batch_size") for call in calls}
    return len(given) == 1 and any(call.arguments.get("batch_size") != call.samples for call in calls)


def _weight(call: _LogCall) -> float:
    given = call.arguments.get("batch_size")
    return float(call.samples if given is None or given > call.samples else given)


def _is_loss(call: _LogCall, loss: tuple[float, Any] | None) -> bool:
    """True for a logged value that is the loss which training_step returned."""
    value = call.value
    if loss is None or not isinstance(value, torch.Tensor) or value.numel() != 1 or not value.is_floating_point():
        return False
    return math.isclose(float(value), loss[0], rel_tol=1e-6) and _is_mean(call)


def _is_mean(call: _LogCall) -> bool:
    reduction = call.arguments.get("reduce_fx", "mean")
    return (reduction if isinstance(reduction, str) else getattr(reduction, "__name__", "")).lower() == "mean"
