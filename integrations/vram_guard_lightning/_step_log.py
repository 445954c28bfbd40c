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
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from vram_guard.patching import replaced
from vram_guard_lightning._step_metrics import Origin, StepMetrics


class _Call(NamedTuple):
    value: Any
    weight: float
    arguments: dict[str, Any]
    origin: Origin | None
    """The call of a metric that returned the value."""


class StepLog:
    """Gathers the calls of ``self.log`` during the micro-batches of one batch."""

    def __init__(self, results: Any, module: Any) -> None:
        """``results``: Lightning's result collection of the loop; ``module``: that logs."""
        self._results = results
        self._module = module
        self._metrics = StepMetrics(module)
        self._origin: Origin | None = None
        """Of the value that is being logged."""
        self._calls: dict[tuple[str, str, int], list[_Call]] = {}
        self._seen: dict[tuple[str, str], int] = {}
        self._samples = 0

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
            self._results.log(fx, name, _combined(calls), **_combined_arguments(calls))

    def next_micro_batch(self, samples: int) -> None:
        """Begin a micro-batch of so many samples."""
        self._samples = samples
        self._seen.clear()
        self._metrics.next_micro_batch()

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
        weight = arguments.get("batch_size") or self._samples
        self._calls.setdefault((fx, name, occurrence), []).append(_Call(value, float(weight), arguments, self._origin))


def _combined(calls: list[_Call]) -> Any:
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
    weights = torch.tensor([call.weight for call in calls], dtype=values.dtype, device=values.device)
    return torch.tensordot(weights / weights.sum(), values, dims=1)


def _combined_arguments(calls: list[_Call]) -> dict[str, Any]:
    """The arguments of the one call that is passed on: batch sizes that the user gave are summed."""
    arguments = dict(calls[-1].arguments)
    if arguments.get("batch_size") is not None:
        arguments["batch_size"] = sum(call.arguments["batch_size"] for call in calls)
    return arguments
