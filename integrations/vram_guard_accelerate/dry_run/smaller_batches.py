"""In a copy: a script whose own options would make its batches smaller and its optimizer steps more batches long.

A guess of the memory of a variant (:mod:`..relaunch.relaunch`), by which it is chosen: what counts is the
dry run of the variant itself. Gradients wait for a second batch; nothing else of the loop is touched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from vram_guard_accelerate.dry_run.run import DryRun


def gather(run: DryRun) -> None:
    """From here on, prepared optimizers step after every second batch, and gradients live until they have stepped."""
    state = _State(run)
    # Clipping asks for it, and it may be done once before a step.
    run.accelerator.unscale_gradients = state.unscales(run.accelerator.unscale_gradients)
    for optimizer in run.accelerator._optimizers:  # noqa: SLF001 - see private_api.py
        optimizer.step = state.steps(optimizer.step)
        optimizer.zero_grad = state.zeroes(optimizer.zero_grad)
    for model in run.models:
        vars(model)["zero_grad"] = state.zeroes(model.zero_grad)


class _State:
    def __init__(self, run: DryRun) -> None:
        self._run = run
        self._stepped = True

    def steps(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """An optimizer's step."""

        def step(*args: Any, **kwargs: Any) -> Any:
            self._stepped = self._run.batches % 2 == 0
            return original(*args, **kwargs) if self._stepped else None

        return step

    def unscales(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Dividing gradients by the scale of float16."""
        return lambda *args, **kwargs: original(*args, **kwargs) if self._run.batches % 2 == 0 else None

    def zeroes(self, original: Callable[..., Any]) -> Callable[..., Any]:
        """Setting gradients to zero."""
        return lambda *args, **kwargs: original(*args, **kwargs) if self._stepped else None
