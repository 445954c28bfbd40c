"""A copy that follows the whole job: the first epoch ends after a few steps, and what comes then is followed too."""

from __future__ import annotations

import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import replace
from functools import partial
from typing import Any, NoReturn

import torch
from torch.utils.data import BatchSampler

from vram_guard.capture.loader import Sample
from vram_guard.language import _
from vram_guard.simulate.memory.recorder import Recorder
from vram_guard.timeline import FOLLOWED_STEPS, STEP_PHASES, Note, Timeline
from vram_guard_accelerate._patching import wrap
from vram_guard_accelerate.dry_run._followed_loop import FollowedLoop
from vram_guard_accelerate.dry_run._fork_task import ForkTask
from vram_guard_accelerate.dry_run._forked import ForkedPhase
from vram_guard_accelerate.dry_run._periodic_branches import Branch
from vram_guard_accelerate.dry_run._script_lines import Asker, ScriptLines, asker, forget_locals
from vram_guard_accelerate.dry_run._sharded_copy import ShardedProcess
from vram_guard_accelerate.dry_run.forks import ParentPipe
from vram_guard_accelerate.dry_run.phases import BatchIterator, DryRun
from vram_guard_accelerate.dry_run.results import DryRunFailure, TraceResult
from vram_guard_accelerate.dry_run.time_limit import limit, processor_limit

#: Seconds of processor time that what follows the first steps may take; what was seen until then is the answer.
SECONDS = 60
#: Seconds that it may take on a machine that others use too, or if it waits. A copy is given up after 310.
MOST_SECONDS = 100

#: Methods of Accelerate and Transformers that save; all of them write nothing here.
_SAVING = {
    "accelerate": ("Accelerator", ("save_state", "save_model")),
    "transformers.trainer": ("Trainer", ("_save_checkpoint", "save_model")),
}


class WholeJobPhase(ForkedPhase):
    """The training in a copy, beyond its first steps: evaluation, saving, the next epoch.

    The training's loader ends early. Evaluations get two batches, of which the second stands for all others.
    """

    def __init__(self, run: DryRun, loop: FollowedLoop, sample: Sample, task: ForkTask, parent: ParentPipe) -> None:
        super().__init__(run, loop, sample, task, parent)
        self._recorder: Recorder = loop.tracer.recorder
        self._place = run.script.loaders.place_of_training(sample)
        """Where its loader was made; None where the script did not make it."""
        self._evaluates = self._saves = False
        self._over: BatchIterator | None = None
        """Over the training's batches, once it has come to its end."""
        self._largest: int | None = None
        """Samples of the largest batch of an evaluation whose loader can make smaller ones."""
        self._next_epoch_at: int | None = None
        """Steps before the second epoch; None: it has not begun."""
        self._most_steps: int | None = None
        """Of a Trainer's whole run."""
        self._notes: list[Note] = []
        self._lines = ScriptLines(self._branch_entered)
        self._asked = False
        self._asking: Asker | None = None
        """Who called ``next`` for the latest training batch; None: a ``for`` loop asked for it."""
        self._last = False
        """No more training batches come: what the script does after its epochs follows."""
        self._entered: list[str] = []
        """Branches that were."""
        for model in loop.models:
            model.register_forward_pre_hook(self._forward_begins)
        self._watch_saves()
        _let_trainer_evaluate(self._trainer_stepped)

    def _trainer_stepped(self, most: int) -> bool:
        self._most_steps = most
        return self._next_epoch_at is not None

    def trains_on(self, loader: Any) -> bool:
        """True for the training's loader, and while the model trains for those made at its place or over its data."""
        if loader is self._sample.loader:
            return True
        of_training = getattr(loader, "dataset", None) is getattr(self._sample.loader, "dataset", loader)
        again = self._place is not None and self.run.script.loaders.made_again(loader, self._place)
        return self.loop.trains and (of_training or again)

    def stands_for_others(self, loader: Any, asking: Asker | None) -> bool:  # noqa: ARG002 - its loop is ended early
        """Every loader but the training's: it is ended after two rounds, however it is asked."""
        return not self.trains_on(loader)

    def next_batch(self, batches: BatchIterator) -> Any:
        """The training's until its epoch is over; two of any other loader."""
        forget_locals()
        asking = asker()
        if not self.trains_on(batches.loader):
            self._enter_evaluation()
            self._cut(batches.loader)
            with self.loop.rounds.asked(batches, asking):
                if asking is not None and asking.loops and self.loop.rounds.enough(batches):
                    self._lines.leave(asking, lambda _ended: self.loop.rounds.close_all())
                return batches.next_beside_training()
        self._evaluates, self._asking = False, asking
        if self._last:
            raise StopIteration
        steps = self.loop.tracer.steps
        if not self._asked:
            self._asked = True
            self._lines.find_branches(self._sample.loader)
        if batches is self._over and asking is None:
            raise StopIteration
        if self._over is None:
            enough = FOLLOWED_STEPS + bool(self._lines.pending)
            if asking is not None and asking.loops:
                if steps >= enough - 1:
                    self._lines.leave(asking, partial(self._loop_left, batches))
            # Accelerate's loaders ask for a batch ahead: a step more will be taken.
            elif steps >= enough - self.loop.rounds.asks_ahead(batches.loader):
                self._over = batches
                raise StopIteration
        elif self._next_epoch_at is None:
            self._next_epoch_at = steps
            self.left.differs()
            self._lines.rest()
        return self.made_batch()

    def _cut(self, loader: Any) -> None:
        """A loader of an evaluation makes batches of no more than what is asked for, and so more of them."""
        sampler = getattr(loader, "batch_sampler", None)
        if type(sampler) is not BatchSampler:
            return
        self._largest = max(self._largest or 0, sampler.batch_size)
        if self._task.most is not None:
            sampler.batch_size = min(sampler.batch_size, self._task.most)

    def _loop_left(self, batches: BatchIterator, ended: bool) -> None:
        self._over = batches
        if not ended:
            self._missing(_("its loop cannot be ended early"))
            self.answer()

    def _branch_entered(self, branch: Branch, period: int) -> None:
        self._entered.append(branch.where)
        self._notes.append(
            Note(
                _(
                    "what the script does every {count} rounds ({where}) is followed once, after step {step}",
                    count=period,
                    where=branch.where,
                    step=self.loop.tracer.steps,
                )
            )
        )

    def moving_batch(self) -> AbstractContextManager[object]:
        """Batches of evaluations are no steps."""
        return self._recorder.loading() if self._evaluates else super().moving_batch()

    def prepare(self, original: Any, accelerator: Any, args: Any, kwargs: Any) -> Any:
        """After the last epoch, another optimizer is another training: what was followed ends before it."""
        if self._last and any(isinstance(thing, torch.optim.Optimizer) for thing in args):
            self.answer()
        return super().prepare(original, accelerator, args, kwargs)

    def _forward_begins(self, *_call: object) -> None:
        """Without gradients, once the epoch is over, it belongs to an evaluation, whether that loads data or not."""
        forget_locals()
        over = self._last or (self._next_epoch_at is None and (self._over is not None or self._entered))
        name = self._recorder.phases[-1].name
        elsewhere = name in STEP_PHASES or (name == "saving" and not self._saves)
        if over and elsewhere and not torch.is_grad_enabled():
            self._enter_evaluation()

    def _enter_evaluation(self) -> None:
        if not self._evaluates:
            self._evaluates = True
            self.left.differs()
            self._recorder.phase("validation", self.loop.tracer.steps)

    def followed(self) -> None:
        """Both first steps were taken: from here on time is short, and the second epoch is the last."""
        forget_locals()
        steps = self.loop.tracer.steps
        self._lines.enters = steps >= FOLLOWED_STEPS and self._next_epoch_at is None
        if steps == 2:
            processor_limit(SECONDS, self._late(_("not within {seconds} s of processor time", seconds=SECONDS)))
            limit(MOST_SECONDS, self._late(_("not within {seconds} s", seconds=MOST_SECONDS)))
        by_trainer = self.run.script.by_trainer  # which comes to an end by itself then
        if self._last or self._next_epoch_at is None or steps <= self._next_epoch_at or by_trainer:
            return
        self._last = self._lines.leave_epochs(self._asking, lambda ended: None if ended else self.answer())
        if not self._last:
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
        process = self.run.sharding.process
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
            if before.name in STEP_PHASES and not self._last:
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
        return replace(
            super()._result(), evaluation_batch_size=self._largest, kept_outputs=self.loop.rounds.kept_outputs
        )

    def timeline(self) -> Timeline:
        """With what a step leaves behind, and what was not followed."""
        made = super().timeline()
        self._notes += [
            Note(_("what the script does now and then ({where}) was not reached; it is not included", where=one.where))
            for one in self._lines.pending
        ]
        return replace(made, notes=(*made.notes, *self.loop.rounds.notes, *self._notes))

    @property
    def steps(self) -> int | None:
        """Those of two epochs where there is another one; what a Trainer says."""
        known = super().steps
        if self._most_steps or known is None:
            return self._most_steps
        return known if self._next_epoch_at is None else 2 * known


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
