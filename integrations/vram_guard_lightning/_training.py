"""A Trainer whose strategy is not set up yet, as the guard sees it."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from vram_guard.guard.ranks import ProcessRanks
from vram_guard.language import _
from vram_guard.longest.planned_batch import LARGEST, PlannedBatch
from vram_guard.printable import beside_progress_bars, printable
from vram_guard.terminal import shown_on
from vram_guard.user_code import level_of_user
from vram_guard_lightning import _apply, _growth, _namespaces, _recovery
from vram_guard_lightning._capture import CapturedFit, capture

if TYPE_CHECKING:
    import torch
    from lightning.pytorch import LightningModule, Trainer

    from vram_guard.apply.loss_weight import LossWeight
    from vram_guard.forks.fork import Progress
    from vram_guard.guard.applied import Applied
    from vram_guard.guard.decision import Decision
    from vram_guard.plan import Plan
    from vram_guard.techniques.loss_graphs import LossGraphs


class LightningTraining:
    """See :class:`vram_guard.guard.training.Training`."""

    def __init__(
        self,
        trainer: Trainer,
        module: LightningModule,
        *,
        whole_job: bool = True,
        planned_batch: PlannedBatch = LARGEST,
    ) -> None:
        self.trainer = trainer
        self._whole_job = whole_job
        self._planned_batch = planned_batch
        self.module = module
        self.ranks = ProcessRanks()

    @property
    def device(self) -> torch.device:
        """The strategy's."""
        return self.trainer.strategy.root_device

    @property
    def model(self) -> LightningModule:
        """The module that is fitted."""
        return self.module

    @contextmanager
    def progress(self) -> Iterator[Progress]:
        """A spinner on a terminal, nothing elsewhere."""
        from rich.console import Console
        from rich.text import Text

        quiet = not self.trainer.is_global_zero
        with Console(stderr=True, quiet=quiet).status(_("vram_guard: reading the training")) as status:
            yield lambda line: status.update(Text(f"vram_guard: {printable(line)}"))

    def capture(self) -> CapturedFit:
        """See :func:`vram_guard_lightning._capture.capture`."""
        return capture(self.trainer, self.module, whole_job=self._whole_job, planned_batch=self._planned_batch)

    def why_left_alone(self) -> str:
        """Another callback may try out batch sizes itself."""
        if self._has("callbacks.BatchSizeFinder"):
            return _(
                "nothing is changed: BatchSizeFinder tries batch sizes out, and the two would interfere with each other"
            )
        return ""

    def why_not_recovered(self, _refused: Mapping[str, str]) -> str:
        """See :func:`vram_guard_lightning._recovery.why_not`: batches are cut when memory runs out, if they can be."""
        return _recovery.why_not(self.trainer, self.module)

    def apply(self, decision: Decision, loss_weight: LossWeight, graphs: LossGraphs | None, applied: Applied) -> None:
        """See :mod:`vram_guard_lightning._apply`."""
        _apply.before_setup(self.trainer, decision, loss_weight, graphs, applied)
        if decision.plan.learning_rate_factor != self.learning_rate_factor(decision.plan):
            applied.notes.append(_("learning rates are not scaled: LearningRateFinder finds them for the larger batch"))

    def learning_rate_factor(self, plan: Plan) -> float:
        """The plan's, unless a callback of Lightning's finds the learning rates."""
        return 1.0 if self._has("callbacks.LearningRateFinder") else plan.learning_rate_factor

    def scale_learning_rates(self, factor: float) -> tuple[str, ...]:
        """See :func:`vram_guard_lightning._growth.scale_learning_rates`."""
        return _growth.scale_learning_rates(self.trainer, factor)

    def report(self, plan: Plan, lines: list[str], *, applied: bool, verbose: bool) -> None:  # noqa: ARG002 - the lines say it
        """On standard output."""
        from vram_guard.report.text import show

        if self.trainer.is_global_zero and show(plan, verbose=verbose):
            write("".join(f"{line}\n" for line in lines))

    def warn(self, message: str) -> None:
        """As Python does, at the user's own line: ``trainer.fit(...)``."""
        if self.trainer.is_global_zero:
            level = level_of_user()
            with beside_progress_bars():
                warnings.warn(f"vram_guard: {printable(message)}", stacklevel=level)

    def _has(self, callback: str) -> bool:
        """True if a callback of this class (its path below the namespace) is in the Trainer."""
        return any(_namespaces.is_a(found, callback) for found in self.trainer.callbacks)  # type: ignore[attr-defined]


def write(text: str) -> None:
    """Print, whatever standard output is."""
    try:
        with beside_progress_bars():
            sys.stdout.write(shown_on(text, sys.stdout))
            sys.stdout.flush()
    except (BrokenPipeError, ValueError):  # the output is no longer read; the training goes on
        return
