"""A runner's whole training in a trace, through MMEngine's own code: resuming, steps, saving, validating, schedules."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from mmengine.hooks import CheckpointHook
from mmengine.runner.checkpoint import find_latest_checkpoint

from vram_guard.job import JobRun
from vram_guard.language import Message, _
from vram_guard.patching import replaced
from vram_guard.state.containers import mapped
from vram_guard.state.objects import objects_kept
from vram_guard_mmengine._checkpoints import resumable
from vram_guard_mmengine._evaluation import EvaluationLoop
from vram_guard_mmengine._schedule import Schedule
from vram_guard_mmengine._shadow import Shadow, quiet_mmengine

if TYPE_CHECKING:
    from torch import nn


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
        model: the runner's, without its wrapper.
        shadow: the run of a trace -> the copy of the runner that MMEngine's code gets.
        batch_ends: lets go of what the last training step held.
        outputs: what its ``train_step`` returned.
        validation: None where nothing is validated, or it cannot be followed.
        checkpoint: None where the training begins anew, or it cannot be followed.
        saves: False where the strategy gathers and writes checkpoints itself.
        schedule: of later steps that differ.
        most: samples of a batch of validation; None: as many as its loader delivers.
    """

    runner: Any
    model: nn.Module
    shadow: Callable[[JobRun], Shadow]
    batch_ends: Callable[[], None]
    outputs: Callable[[], Any]
    validation: EvaluationLoop | None
    checkpoint: Checkpoint | None
    saves: bool
    schedule: Schedule
    most: int | None = None
    test: EvaluationLoop | None = None
    """Of ``Runner.test``, which the script calls after the training; None where it does not."""

    def evaluation_batch_size(self, name: str) -> int | None:
        """See :class:`~vram_guard.job.Resizable`."""
        return None if self.validation is None or name != "validation" else self.validation.sample.batch_size

    def with_evaluation_batch_size(self, _name: str, size: int) -> RunnerJob:
        """See :class:`~vram_guard.job.Resizable`."""
        return replace(self, most=size)

    def __call__(self, run: JobRun) -> None:
        """Play the whole training."""
        with quiet_mmengine(self._read(run)), objects_kept(self.runner.hooks, besides=self.model):
            shadow = self.shadow(run)
            self._begin(run, shadow)
            self._train(run, shadow, 2)
            if self.saves:
                with self._followed(run, "saving"):
                    self._save(shadow)
            if self.validation is not None:
                with self._followed(run, "validation"):
                    self.validation.play(run, shadow, self.most)
            run.model.train()
            shadow.call("before_train_iter", batch_idx=0, data_batch=shadow.data_batch)
            try:
                self._train(run, shadow, 1)
            except Exception as error:  # noqa: BLE001 - the user's own code, as validation has left it
                said = f"{type(error).__name__}: {error}".split("\n", 1)[0]
                run.note(Message("the step after validation cannot be followed ({error})", error=said))
            self.schedule.play(run, shadow, lambda **changes: self._train(run, shadow, 1, **changes))
            if self.test is not None:  # optimizer states are still there
                with self._followed(run, "test"):
                    self.test.play(run, shadow)

    def _read(self, run: JobRun) -> Callable[[str, Any], Any]:
        """In place of reading a checkpoint: tensors of the same sizes, on the device that MMEngine asks for."""

        def read(_name: str, map_location: Any) -> Any:
            place = "cpu" if map_location is None or str(map_location) == "cpu" else "cuda"
            return run.loaded(self.checkpoint.content if self.checkpoint is not None else {}, place)  # type: ignore[arg-type]

        return read

    @contextlib.contextmanager
    def _followed(self, run: JobRun, name: Any, label: str = "") -> Iterator[None]:
        """A phase, which the training may do without where it cannot be followed."""
        with run.phase(name, label):
            try:
                yield
            except Exception as error:  # noqa: BLE001 - the user's own code, and MMEngine's on tensors without values
                said = f"{type(error).__name__}: {error}".split("\n", 1)[0][:300]
                run.note(
                    Message(
                        "{phase} cannot be followed to its end ({error}): the rest of it is not included in the "
                        "prediction",
                        phase=name,
                        error=said,
                    )
                )

    def _begin(self, run: JobRun, shadow: Shadow) -> None:
        """As ``Runner.train`` begins, and its strategies' way of it."""
        with run.phase("setup"):
            if not hasattr(shadow.runner, "strategy"):
                shadow.call("before_run")
        if self.checkpoint is not None:
            with self._followed(run, "resuming"):
                shadow.runner.load_or_resume()
        with run.phase("setup"):
            if hasattr(shadow.runner, "strategy"):
                shadow.call("before_run")
            shadow.call("before_train")
            shadow.call("before_train_epoch")
        shadow.at(shadow.loop._epoch, shadow.loop._iter)
        run.model.train()

    def _train(self, run: JobRun, shadow: Shadow, steps: int, label: str = "", **changes: Any) -> None:
        """Steps, each followed by what the hooks do after it."""
        hub = shadow.runner.message_hub

        def after() -> None:
            told = {"batch_idx": shadow.batch_idx, "data_batch": shadow.data_batch, "outputs": self.outputs()}
            shadow.call("after_train_iter", **told)
            self.batch_ends()

        with replaced(hub, {"get_info": self._asked(hub)}):
            run.train(steps, label, after=after, **changes)

    def _asked(self, hub: Any) -> Callable[..., Any]:
        """In place of ``MessageHub.get_info``: a model that asks it may run other steps later."""
        get_info = hub.get_info

        def answered(key: str, *default: Any, **named: Any) -> Any:
            value = get_info(key, *default, **named)
            return self.schedule.asked.answer(key, value) if key in ("epoch", "iter") and type(value) is int else value

        return answered

    def _save(self, shadow: Shadow) -> None:
        for hook in self.runner.hooks:
            if isinstance(hook, CheckpointHook) and (hook.interval > 0 or hook.save_last or hook.save_best):
                regular = hook.interval > 0 or hook.save_last
                shadow.runner.save_checkpoint(
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
        notes.append(_("resuming is not included in the prediction ({why})", why=f"{type(error).__name__}: {error}"))
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
