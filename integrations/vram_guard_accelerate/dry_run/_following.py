"""The second phase: from ``prepare`` to the first training batch, the loop's models are symbolic."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from vram_guard.capture.loader import Sample, read_loader
from vram_guard.language import _
from vram_guard.simulate.parallel.own_replicas import replicas_in
from vram_guard.state.random_generators import random_state_kept
from vram_guard_accelerate.dry_run import _resuming
from vram_guard_accelerate.dry_run._followed_loop import FollowedLoop, LoopPhase
from vram_guard_accelerate.dry_run._forked import ForkedPhase
from vram_guard_accelerate.dry_run._loads import Loads
from vram_guard_accelerate.dry_run._whole_job import WholeJobPhase
from vram_guard_accelerate.dry_run._without_loader import without_loader
from vram_guard_accelerate.dry_run.first_batch import FirstBatch
from vram_guard_accelerate.dry_run.forked_traces import longest_of
from vram_guard_accelerate.dry_run.forks import ForkEntered, ForkTask, ParentPipe
from vram_guard_accelerate.dry_run.phases import BatchIterator, DryRun, DryRunPhase
from vram_guard_accelerate.dry_run.results import stopped


class FollowingPhase(LoopPhase):
    """The script sets up its loop, evaluates, loads; at its first training batch it is planned for."""

    def __init__(
        self, run: DryRun, accelerator: Any, moved: list[torch.Tensor], shared: frozenset[int], loads: Loads
    ) -> None:
        super().__init__(run, FollowedLoop(run, accelerator, moved, shared, loads))
        self._sample: Sample

    def load_state(self, original: Callable[..., None], *args: Any, **kwargs: Any) -> None:
        """The checkpoint takes memory as Accelerate loads it, but into a model that is divided."""
        if self.run.process is not None:
            why = _("a checkpoint of a model that is divided")
        else:
            why = _resuming.load(self.loop, self.run.shape.ranks, original, *args, **kwargs)
        self.run.script.resuming_not_followed = why

    def stands_for_others(self, loader: Any) -> bool:  # noqa: ARG002 - whichever it is
        """True: what runs over a loader before the training is an evaluation."""
        return True

    def next_batch(self, batches: BatchIterator) -> Any:
        """Real batches until the training begins."""
        if not self._trains():
            with self.loop.rounds.next_batch(batches):
                return self._evaluated(batches)
        self.run.phase = self._forked(batches.loader)
        return self.run.phase.next_batch(batches)

    def _evaluated(self, batches: BatchIterator) -> Any:
        """The next batch of an evaluation, which is over with its loader."""
        try:
            return batches.next_beside_training()
        except StopIteration:
            self.loop.evaluates = False
            raise

    def called(self, model: nn.Module, called: dict[str, Any]) -> None:
        """A script without Accelerate that trains on what no loader has made is planned for here."""
        if torch.is_grad_enabled() and model.training:
            options = self.run.script.options
            self.run.phase = self._planned(without_loader(called, lambda size: bool(options.batch_size(size))))
            self.run.phase.called(model, called)

    def differentiates_for_real(self) -> None:
        """Refuse: where the training begins was not seen."""
        stopped(_("it computes gradients where no training was seen to begin; call model.train() before its loop"))

    def _trains(self) -> bool:
        """True if the caller that asks for a batch now is about to train on it."""
        if not torch.is_grad_enabled() or not self.loop.models:
            return False
        return not self.loop.evaluates or any(model.training for model in self.loop.models)

    def _forked(self, loader: Any) -> ForkedPhase:
        """The same for the training's loader."""
        with random_state_kept():
            return self._planned(read_loader(loader))

    def _planned(self, sample: Sample) -> ForkedPhase:
        """Plan in the original, which does not return; the next phase in every copy."""
        loop, process = self.loop, self.run.process
        self._sample = sample
        loop.tracer.train(loop.root)
        if loop.by_itself:
            for module, options in (found for model in loop.models for found in replicas_in(model)):
                loop.tracer.reduce([module], self.run.shape.ranks, options)
        elif process is None and self.run.shape.ranks > 1:  # otherwise FSDP2 spreads the work
            handler = getattr(loop.accelerator, "ddp_handler", None)
            loop.tracer.reduce(loop.models, self.run.shape.ranks, {} if handler is None else handler.to_kwargs())
        first = FirstBatch(self.run.shape, self.run.script, loop.accelerator, tuple(loop.models), sample, process)
        self.run.phase = DryRunPhase(self.run)  # what the plan computes is none of the script's
        try:
            with loop.tracer.paused():
                if not first.why_one_size:
                    first = replace(first, sample=longest_of(first, self.run.planned_batch))
                self._sample = first.sample
                self.run.decide(first)
        except ForkEntered as entered:
            return self._copy(entered.task, entered.parent)

    def _copy(self, task: ForkTask, parent: ParentPipe) -> ForkedPhase:
        phase = WholeJobPhase if task.whole_job and self._sample.loader is not None else ForkedPhase
        return phase(self.run, self.loop, self._sample, task, parent)
