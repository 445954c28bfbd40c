"""A copy that follows the whole job: the first epoch ends after a few steps, and what comes then is followed too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch

from vram_guard.capture.loader import Sample, number_of_batches
from vram_guard.language import _
from vram_guard.limits import EPOCHS_FOLLOWED, FIRST_STEPS, JOB_SECONDS, JOB_WALL_SECONDS
from vram_guard.simulate.memory.recorder import Recorder
from vram_guard.timeline import STEP_PHASES, Note, Timeline
from vram_guard_accelerate._patching import wrap
from vram_guard_accelerate.dry_run._followed_loop import FollowedLoop
from vram_guard_accelerate.dry_run._forked import ForkedPhase
from vram_guard_accelerate.dry_run._sharded_process import ShardedProcess
from vram_guard_accelerate.dry_run.forks import ForkTask, ParentPipe
from vram_guard_accelerate.dry_run.phases import BatchIterator, DryRun, calls_next
from vram_guard_accelerate.dry_run.results import DryRunFailure, TraceResult
from vram_guard_accelerate.dry_run.time_limit import limit, processor_limit

#: Methods of Accelerate and Transformers that save; all of them write nothing here.
_SAVING = {
    "accelerate": ("Accelerator", ("save_state", "save_model")),
    "transformers.trainer": ("Trainer", ("_save_checkpoint", "save_model")),
}


class WholeJobPhase(ForkedPhase):
    """The training in a copy, beyond its first steps: evaluation, saving, the next epoch.

    The training's loader ends early, in every epoch. Evaluations get two batches, of which the second stands for all
    others. What comes later inside a loop (``if step % 500 == 0``) is not reached.
    """

    def __init__(self, run: DryRun, loop: FollowedLoop, sample: Sample, task: ForkTask, parent: ParentPipe) -> None:
        super().__init__(run, loop, sample, task, parent)
        self._recorder: Recorder = loop.tracer.recorder
        self._place = run.script.loaders.place_of_training(sample)
        """Where its loader was made; None where the script did not make it."""
        self._evaluates = self._saves = False
        self._over: BatchIterator | None = None
        """Over the training's batches of the latest epoch that has come to its end."""
        self._later: BatchIterator | None = None
        """Over those of the latest epoch that has begun, after the first one."""
        self._began = 0
        """Steps before it."""
        self._batches_until = 0
        """Batches of the training after which it ends without a step."""
        self._epochs = 1
        self._most_steps: int | None = None
        """Of a Trainer's whole run."""
        self._notes: list[Note] = []
        self._by_next = False
        """The script called ``next`` for the latest training batch."""
        for model in loop.models:
            model.register_forward_pre_hook(self._forward_begins)
        self._watch_saves()
        _let_trainer_evaluate(self._trainer_stepped)

    def _trainer_stepped(self, most: int) -> bool:
        self._most_steps = most
        return self._epochs > 1

    def trains_on(self, loader: Any) -> bool:
        """True for the training's loader, and while the model trains for those made at its place or over its data.

        An evaluation may run over the training's loader too: nothing is differentiated then.
        """
        if loader is self._sample.loader:
            return torch.is_grad_enabled()
        of_training = getattr(loader, "dataset", None) is getattr(self._sample.loader, "dataset", loader)
        again = self._place is not None and self.run.script.loaders.made_again(loader, self._place)
        return self.loop.trains and (of_training or again)

    def stands_for_others(self, loader: Any) -> bool:
        """True for every loader but the training's."""
        return not self.trains_on(loader)

    def next_batch(self, batches: BatchIterator) -> Any:
        """The training's until its epoch is over; two of any other loader."""
        if not self.trains_on(batches.loader):
            self._enter_evaluation()
            with self.loop.rounds.next_batch(batches):
                return batches.next_beside_training()
        self._evaluates, self._by_next = False, calls_next()
        if not self._by_next and self._ends(batches):
            if self._over is None and not self.run.script.by_trainer:
                self._say_what_is_left_out()
            self._over = batches
            raise StopIteration
        return self.made_batch()

    def _ends(self, batches: BatchIterator) -> bool:
        """True if the epoch ends before the batch that is asked for; another one begins with another iterator."""
        steps = self.loop.tracer.steps
        if batches is self._over:
            return True
        if self._over is None:
            # Accelerate's loaders ask for a batch ahead: a step more will be taken.
            return steps >= FIRST_STEPS - self.loop.rounds.asks_ahead(batches.loader)
        if batches is self._later:
            # Where no step follows, it is an evaluation that switches gradients off for each batch.
            return steps > self._began or self.loop.batches >= self._batches_until
        if self._epochs == EPOCHS_FOLLOWED:
            self._missing(_("its loop goes on after {count} epochs", count=EPOCHS_FOLLOWED))
            self.answer()
        if self._epochs == 1:
            self.left.differs()
        self._later, self._began, self._epochs = batches, steps, self._epochs + 1
        self._batches_until = 2 * self.loop.batches
        return False

    def _say_what_is_left_out(self) -> None:
        """Where the first epoch is longer than what is followed of it."""
        length = number_of_batches(self._sample.loader)
        if length is None or length > self.loop.batches * self.run.shape.ranks:
            self._notes.append(
                Note(
                    _(
                        "an epoch ends after {count} steps here: an evaluation or a checkpoint that comes later inside "
                        "it was not followed",
                        count=FIRST_STEPS,
                    )
                )
            )

    @property
    def _epoch_over(self) -> bool:
        """True from the end of an epoch to the beginning of the next."""
        return self._over is not None and self._later in (None, self._over)

    def moving_batch(self) -> AbstractContextManager[object]:
        """Batches of evaluations are no steps."""
        return self._recorder.loading() if self._evaluates else super().moving_batch()

    def prepare(self, original: Any, accelerator: Any, args: Any, kwargs: Any) -> Any:
        """After an epoch, another optimizer is another training: what was followed ends before it."""
        if self._epoch_over and any(isinstance(thing, torch.optim.Optimizer) for thing in args):
            self.answer()
        return super().prepare(original, accelerator, args, kwargs)

    def _forward_begins(self, *_call: object) -> None:
        """Without gradients, once the epoch is over, it belongs to an evaluation, whether that loads data or not."""
        name = self._recorder.phases[-1].name
        elsewhere = name in STEP_PHASES or (name == "saving" and not self._saves)
        if self._epoch_over and elsewhere and not torch.is_grad_enabled():
            self._enter_evaluation()

    def _enter_evaluation(self) -> None:
        if not self._evaluates:
            self._evaluates = True
            self.left.differs()
            self._recorder.phase("validation", self.loop.tracer.steps)

    def followed(self) -> None:
        """Both first steps were taken: from here on time is short."""
        steps = self.loop.tracer.steps
        if steps == 2:
            processor_limit(JOB_SECONDS, self._late(_("not within {seconds} s of processor time", seconds=JOB_SECONDS)))
            limit(JOB_WALL_SECONDS, self._late(_("not within {seconds} s", seconds=JOB_WALL_SECONDS)))
        if self._by_next and steps >= FIRST_STEPS:
            self._missing(_("its loop calls next for its batches, and the end of a loader does not end it"))
            self.answer()

    # --- saving -----------------------------------------------------------------------------------------------

    def _watch_saves(self) -> None:
        for module, (owner, names) in _SAVING.items():
            kind = getattr(sys.modules.get(module), owner, None)
            for name in names:
                if kind is not None and hasattr(kind, name):
                    wrap(kind, name, partial(self._saved, gathers=module == "accelerate" and self._gathers(name)))

    def _gathers(self, method: str) -> bool:
        """True if a method of Accelerate's, which does nothing here, gathers the weights of a divided model."""
        process = self.run.process
        if not isinstance(process, ShardedProcess):
            return False
        return method == "save_model" or "FULL" in str(process.plugin.state_dict_type)

    def _saved(self, original: Callable[..., Any], *args: Any, gathers: bool, **kwargs: Any) -> Any:
        before = self._recorder.phases[-1]
        if before.name == "saving":
            return original(*args, **kwargs)
        self._recorder.phase("saving", self.loop.tracer.steps)
        self._saves = True
        try:
            for model in self.loop.models if gathers else ():
                self.loop.accelerator.get_state_dict(model)
            return original(*args, **kwargs)
        finally:
            self._evaluates = self._saves = False  # another evaluation is a phase of its own
            if before.name in STEP_PHASES and not self._epoch_over:
                self._recorder.phase(before.name, self.loop.tracer.steps + 1)

    # --- the end ----------------------------------------------------------------------------------------------

    def _late(self, why: str) -> Callable[[object], NoReturn]:
        def answer(_frame: object) -> NoReturn:
            self._missing(why)
            self.answer()

        return answer

    def failed(self, error: BaseException, script: str) -> None:
        """What was followed until then is the answer, if it trained."""
        if self.loop.tracer.steps < 2:
            super().failed(error, script)
        if not isinstance(error, (SystemExit, KeyboardInterrupt)):
            self._missing(DryRunFailure.of(error, script).message)
        self.answer()

    def _missing(self, why: str) -> None:
        self._notes.append(
            Note(
                _(
                    "the whole job was followed to the {phase} after step {step} ({why}); what comes later is not "
                    "included",
                    phase=str(self._recorder.phases[-1].name),
                    step=self.loop.tracer.steps,
                    why=why,
                )
            )
        )

    def _result(self) -> TraceResult:
        return replace(super()._result(), kept_outputs=self.loop.rounds.kept_outputs)

    def timeline(self) -> Timeline:
        """With what a step leaves behind, and what was not followed."""
        made = super().timeline()
        return replace(made, notes=(*made.notes, *self.loop.rounds.notes, *self._notes))

    @property
    def steps(self) -> int | None:
        """Those of the epochs that have begun; what a Trainer says."""
        known = super().steps
        if self._most_steps or known is None:
            return self._most_steps
        return self._epochs * known


def _let_trainer_evaluate(ends: Callable[[int], bool]) -> None:
    """Transformers' Trainer evaluates and saves when the epoch is over, whatever its intervals are; then it ends.

    Args:
        ends: given the steps of the whole run, true once the second epoch has begun.
    """
    callbacks = sys.modules.get("transformers.trainer_callback")
    if callbacks is None:
        return

    def epoch_over(original: Callable[..., Any], self: Any, args: Any, state: Any, control: Any, **more: Any) -> Any:
        original(self, args, state, control, **more)
        args.load_best_model_at_end = False  # nothing was written that could be loaded
        control.should_evaluate = control.should_evaluate or _named(args.eval_strategy) != "no"
        control.should_save = control.should_save or _named(args.save_strategy) != "no"
        return control

    def step_over(original: Callable[..., Any], self: Any, args: Any, state: Any, control: Any, **more: Any) -> Any:
        original(self, args, state, control, **more)
        control.should_training_stop = ends(state.max_steps) or control.should_training_stop
        return control

    wrap(callbacks.DefaultFlowCallback, "on_epoch_end", epoch_over)
    wrap(callbacks.DefaultFlowCallback, "on_step_end", step_over)


def _named(strategy: Any) -> str:
    return str(getattr(strategy, "value", strategy)).lower()
