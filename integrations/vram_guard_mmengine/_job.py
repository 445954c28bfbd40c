"""A runner's whole training in a trace, through MMEngine's own code: resuming, steps, saving, validating, schedules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from mmengine.hooks import CheckpointHook
from mmengine.runner.checkpoint import find_latest_checkpoint
from torch.utils.data import DataLoader

from vram_guard.apply.microbatch import splitter_of
from vram_guard.capture.loader import Sample
from vram_guard.errors import UnsupportedStepError
from vram_guard.guard.unfollowed import in_a_line
from vram_guard.job import LoopRun
from vram_guard.language import Message, _
from vram_guard.patching import replace_attributes
from vram_guard.state.containers import mapped
from vram_guard.watch.batches import MicroBatches
from vram_guard_mmengine._checkpoints import resumable
from vram_guard_mmengine._evaluation import EvaluationLoop
from vram_guard_mmengine._followed import FollowedRunner
from vram_guard_mmengine._later import OverError, RunnerSteps
from vram_guard_mmengine._loss import HostBatch
from vram_guard_mmengine._optim import OptimFacts, wrapper_of_trace
from vram_guard_mmengine._split_step import SplitTrainStep

# ruff: noqa: SLF001 - the runner has no public names for what is not built yet


@dataclass(frozen=True)
class Checkpoint:
    """The checkpoint that a training begins with."""

    path: str
    content: Any
    """Its tensors have sizes, and no data."""


@dataclass(frozen=True)
class RunnerJob:
    """The phases of ``Runner.train`` in order, see :class:`vram_guard.job.Job`.

    Attributes:
        runner: whose loops and optimizer are not built yet.
        sample: of its training loader.
        loader: of the training, built.
        facts: about the optimizer.
        batches: of an epoch; None where the training is not counted in epochs.
        validation: None where nothing is validated, or it cannot be followed.
        test: of ``Runner.test``, which the script calls after the training; None where it does not.
        checkpoint: None where the training begins anew, or it cannot be followed.
        saves: False where the strategy gathers and writes checkpoints itself.
        most: samples of a batch of validation; None: as many as its loader delivers.
    """

    runner: Any
    sample: Sample
    loader: Any
    facts: OptimFacts
    batches: int | None
    validation: EvaluationLoop | None
    test: EvaluationLoop | None
    checkpoint: Checkpoint | None
    saves: bool
    most: int | None = None

    def evaluation_batch_size(self, name: str) -> int | None:
        """See :class:`~vram_guard.job.Resizable`."""
        return None if self.validation is None or name != "validation" else self.validation.rounds.size()

    def with_evaluation_batch_size(self, _name: str, size: int) -> RunnerJob:
        """See :class:`~vram_guard.job.Resizable`."""
        return replace(self, most=size)

    def __call__(self, run: LoopRun) -> None:
        """The rest of ``Runner.train``, and ``Runner.test`` where it follows."""
        if run.optimizer is None:
            raise UnsupportedStepError(_("no weight is trained when the training begins"))
        followed = FollowedRunner(run, self.runner, self._read(run))
        runner = followed.runner
        runner.optim_wrapper = wrapper_of_trace(runner.optim_wrapper, self.facts, run.optimizer, run.autocast())
        if hasattr(runner, "strategy"):
            runner.strategy.optim_wrapper = runner.optim_wrapper
        _Training(followed, self).run()
        if self.test is not None:  # optimizer states are still there
            with followed.phase("test"):
                self.test.in_loop(followed).run()

    def _read(self, run: LoopRun) -> Callable[[str, Any], Any]:
        """In place of reading a checkpoint: tensors of the same sizes, on the device that MMEngine asks for."""

        def read(_name: str, map_location: Any) -> Any:
            place = "cpu" if map_location is None or str(map_location) == "cpu" else "cuda"
            return run.loaded(self.checkpoint.content if self.checkpoint is not None else {}, place)  # type: ignore[arg-type]

        return read


class _Training:
    """``Runner.train``, once its parts are built."""

    def __init__(self, followed: FollowedRunner, job: RunnerJob) -> None:
        self._followed, self._job = followed, job
        self._run, self._runner = followed.run, followed.runner
        self._saved = self._validated = False
        step = self._step()  # before the loop is built, which may keep the model's
        self._loop = self._built_loop()
        self._steps = RunnerSteps(followed, job.sample, job.batches, step, self._first_ends)
        self._follow_loops()

    def run(self) -> None:
        """All of it."""
        followed, run, runner = self._followed, self._run, self._runner
        flexible = hasattr(runner, "strategy")
        with run.phase("setup"):
            if not flexible:
                followed.call("before_run")
        if self._job.checkpoint is not None:
            with followed.phase("resuming"):
                runner.load_or_resume()
        with run.phase("setup"):
            if flexible:
                followed.call("before_run")
        loop = self._loop
        if loop._iter >= loop._max_iters if self._job.batches is None else loop._epoch >= loop._max_epochs:
            raise UnsupportedStepError(_("the training that is resumed is over: none of its steps is left"))
        # A loop that asks for batches by ``next`` has no other word for their end.
        with run.loop(micro_batches=True), contextlib.suppress(OverError, StopIteration):
            loop.run()
        if not self._steps.first_over:
            raise UnsupportedStepError(_("the training ends before its first steps do"))
        self._first_ends()
        if runner._val_loop is not None and not self._validated:  # a loop of the user's, after its last epoch
            runner._val_loop.run()

    def _built_loop(self) -> Any:
        runner = self._runner
        runner._train_dataloader = self._job.loader
        kinds: set[Any] = {type(self._job.loader), DataLoader}
        for kind in kinds:
            replace_attributes(kind, {"__iter__": self._iterated(kind.__iter__)})
        loop = runner._train_loop = runner.build_train_loop(runner._train_loop)
        vars(loop).update(_runner=runner, dataloader=self._job.loader)
        return loop

    def _iterated(self, own: Callable[[Any], Any]) -> Callable[[Any], Any]:
        """In place of a loader's ``__iter__``: the training's, by whatever loader, is led from place to place."""

        def iterated(loader: Any) -> Any:
            loop = vars(self).get("_loop")
            trains = loader is self._job.loader if loop is None else loader is loop.dataloader
            if not trains or self._followed.in_hook:
                return own(loader)
            return iter(()) if loop is None else self._steps.deliver()

        return iterated

    def _follow_loops(self) -> None:
        loop = self._loop
        if self._job.batches is None:
            loop.dataloader_iterator = self._steps.deliver()
        kind = type(loop)
        # Hooks may stop the training by what is not known before it: it is followed to its end.
        stops = property(lambda _loop: self._steps.over, lambda _loop, _value: None)
        loop.__class__ = type(kind.__name__, (kind,), {"stop_training": stops})
        if self._job.validation is None:
            self._runner._val_loop = None
            return
        try:
            validation = self._job.validation.in_loop(self._followed, self._job.most)
        except Exception as error:  # noqa: BLE001 - the user's own loop
            self._runner._val_loop = None
            why = in_a_line(error)
            self._run.note(Message("validation is not included in the prediction ({why})", why=why))
            return
        validates = validation.run

        def validate() -> None:
            if self._validated or not self._steps.first_over:
                return
            self._validated = True
            with self._followed.phase("validation"):
                try:
                    validates()
                except Exception:
                    self._followed.call("after_val_epoch", metrics=None)  # averages have been exchanged before it
                    raise
            self._steps.elsewhere()

        validation.run = validate
        vars(loop).update(val_begin=0, val_interval=1, _decide_current_val_interval=lambda: None)

    def _step(self) -> Callable[..., Any]:
        """``train_step`` itself; of a batch that a plan cuts, of its micro-batches."""
        run, runner, model = self._run, self._runner, self._runner.model
        kind = type(model)
        # In a class of its own, so that hooks which copy the model (averages) copy no more than that.
        steps = {"train_step": lambda _model, data, optim_wrapper: self._steps.train_step(data, optim_wrapper)}
        led = model.__class__ = type(kind.__name__, (kind,), steps)

        def step(data: Any, optim_wrapper: Any) -> Any:
            model.__class__ = kind
            try:
                return run.loss(HostBatch(data, optim_wrapper), autocast=False)  # its wrapper enters the region
            finally:
                model.__class__ = led

        if run.loaded_samples == run.batch_size:
            return step
        runner.optim_wrapper._accumulative_counts = 1  # two micro-batches of one batch show what there is to see
        splitter = splitter_of(self._job.sample.make, run.loaded_samples, run.batch_size)
        return SplitTrainStep(step, MicroBatches(splitter))

    def _first_ends(self) -> None:
        """The first epoch is over, or the first steps where epochs do not count: a checkpoint is saved."""
        if self._saved or not self._steps.first_over:
            return
        self._saved = True
        if self._job.saves:
            self._save()
        self._steps.elsewhere()

    def _save(self) -> None:
        with self._followed.phase("saving"):
            for hook in self._runner.hooks:
                if isinstance(hook, CheckpointHook) and (hook.interval > 0 or hook.save_last or hook.save_best):
                    regular = hook.interval > 0 or hook.save_last
                    self._runner.save_checkpoint(
                        "checkpoints",
                        "traced.pth",
                        save_optimizer=regular and hook.save_optimizer,
                        save_param_scheduler=False,
                        by_epoch=hook.by_epoch,
                    )


def checkpoint_of(runner: Any, notes: list[str]) -> Checkpoint | None:
    """The checkpoint that a training begins with, of which only the names and sizes are read."""
    resumes, path = getattr(runner, "_resume", False), getattr(runner, "_load_from", None)
    if isinstance(resumes, str):
        path = resumes
    elif resumes and path is None:
        path = find_latest_checkpoint(runner.work_dir)
    if path is None:
        return None
    if not Path(path).expanduser().is_file():
        if resumes:
            notes.append(
                _("resuming is not included in the prediction: {path} is no file of this machine", path=str(path))
            )
        return None
    try:
        with resumable():
            content = _opened(str(Path(path).expanduser()))
    except Exception as error:  # noqa: BLE001 - whatever is in the file
        notes.append(_("resuming is not included in the prediction ({why})", why=in_a_line(error)))
        return None
    return Checkpoint(str(path), mapped(content, _without_data))


def _without_data(leaf: Any) -> Any:
    """A tensor's sizes; counters keep their values."""
    return leaf.to("meta") if isinstance(leaf, torch.Tensor) and leaf.numel() > 1 else leaf


def _opened(path: str) -> Any:
    try:
        return torch.load(path, map_location="cpu", mmap=True)
    except (RuntimeError, ValueError):  # a file of torch before 1.6
        return torch.load(path, map_location="cpu")
