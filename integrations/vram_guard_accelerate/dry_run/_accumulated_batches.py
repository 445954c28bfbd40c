"""In a copy: optimizer steps that are two batches long, as the script's own options would make them.

An estimate of a relaunch's memory, by which it is chosen: what counts is the dry run of the relaunch itself. Gradients
wait for a second batch; nothing else of the loop is touched.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any


class AccumulatedBatches:
    """Calls that belong to an optimizer step, left out after every other batch.

    Args:
        batches: counts the training batches so far.
    """

    def __init__(self, batches: Callable[[], int]) -> None:
        self._batches = batches
        self._stepped = True

    def install(self, accelerator: Any, models: Sequence[Any]) -> None:
        """Prepared optimizers step after every second batch only, and gradients live until they have stepped."""
        # Clipping unscales gradients (float16), and that may be done once before a step.
        accelerator.unscale_gradients = self._only_if(accelerator.unscale_gradients, self._is_last)
        for optimizer in accelerator._optimizers:  # noqa: SLF001 - see private_api.py
            optimizer.step = self._only_if(optimizer.step, self._steps)
            optimizer.zero_grad = self._only_if(optimizer.zero_grad, lambda: self._stepped)
        for model in models:
            vars(model)["zero_grad"] = self._only_if(model.zero_grad, lambda: self._stepped)

    def _is_last(self) -> bool:
        return self._batches() % 2 == 0

    def _steps(self) -> bool:
        self._stepped = self._is_last()
        return self._stepped

    def _only_if(self, original: Callable[..., Any], condition: Callable[[], bool]) -> Callable[..., Any]:
        return lambda *args, **kwargs: original(*args, **kwargs) if condition() else None
