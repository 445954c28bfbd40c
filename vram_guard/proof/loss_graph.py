"""The reduction of a training's loss over its samples, read from the graphs of its symbolic runs."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal

from vram_guard.apply.loss_terms import Term, loss_terms, reduction_of
from vram_guard.language import _
from vram_guard.simulate.tracing.batches import batch_source

if TYPE_CHECKING:
    from collections.abc import Callable

    from vram_guard.apply.normalisers import Normaliser
    from vram_guard.step import TrainingStep


class LossGraph:
    """The terms of a step's loss by batch size, as the traces of a plan come by.

    Attributes:
        step: the one to trace in place of the original, whose losses are looked at on their way.
    """

    def __init__(self, step: TrainingStep, loaded: Callable[[Any], Any] = lambda batch: batch) -> None:
        """``loaded``: a batch as the step gets it -> as the loader delivered it."""
        self._as_written = step
        self._loaded = loaded
        self._terms: dict[int, tuple[Term, ...]] = {}
        self._size = 0
        self._source = batch_source(step.batch)
        self.step = step.with_(loss=self._loss, batch=self._batch)

    def _batch(self, size: int) -> Any:
        self._size = size
        return self._source(size)

    def _loss(self, model: Any, batch: Any) -> Any:
        from vram_guard.simulate.tracing.loop import scalar_loss

        returned = self._as_written.loss(model, batch)
        if self._size and self._size not in self._terms and returned is not None:
            self._terms[self._size] = loss_terms(scalar_loss(returned), behind=True, batch=self._loaded(batch))
        return returned

    def reduction(self, batch_size: int) -> tuple[Literal["mean", "sum"] | Normaliser | None, str]:
        """The reduction, or what to count; None, and why, where it is none of these. Call it inside ``symbolic_run``.

        Args:
            batch_size: as written; at it and at half of it the step is traced where no plan has done so.
        """
        from vram_guard.simulate.tracing.run import run_step

        try:
            for size in (max(2, batch_size), max(1, batch_size // 2)):
                if len(self._terms) < 2:
                    run_step(self.step.with_(job=None), size, (8, 0))
        except Exception as error:  # noqa: BLE001 - the user's own code runs in it
            return None, f"{type(error).__name__}: {error}"
        if len(self._terms) < 2:
            return None, _("the step makes no loss of its own")
        small, large = min(self._terms), max(self._terms)
        return reduction_of(self._terms[large], large, self._terms[small], small)
