"""A runner in a copy of the process: MMEngine's own loops and the runner's hooks run there, on the simulated GPU.

The copy ends with them, so nothing is put back.
"""

from __future__ import annotations

import contextlib
import io
import sys
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import mmengine.evaluator.metric
import mmengine.runner.amp
import mmengine.runner.checkpoint
import mmengine.runner.runner
from mmengine._strategy import single_device
from mmengine.config import Config
from mmengine.logging import MessageHub

from vram_guard.guard.unfollowed import left_out_if_it_fails
from vram_guard.job import LoopRun
from vram_guard.language import Message
from vram_guard.patching import replace_attributes
from vram_guard.timeline import PhaseName
from vram_guard_mmengine._kinds import is_mmengines

# ruff: noqa: SLF001 - the runner has no public names for what is not built yet

#: Hooks of MMEngine's own that watch, report or save: what they do is no part of a step.
_WATCHING = (
    *("CheckpointHook", "LoggerHook", "IterTimerHook", "EarlyStoppingHook", "ProfilerHook", "NPUProfilerHook"),
    *("SyncBuffersHook", "NaiveVisualizationHook", "PrepareTTAHook"),
)

#: Hooks of MMEngine's own besides those that watch which change nothing of a step: they set learning rates and seeds.
_AROUND_STEPS = ("ParamSchedulerHook", "DistSamplerSeedHook")

#: Hooks between the steps of two epochs.
OF_EPOCHS = ("before_train_epoch", "after_train_epoch")

#: They may tell others that the training is over.
_AT_THE_END = ("after_train", "after_run")


class FollowedRunner:
    """A runner whose loops run in a trace.

    Args:
        run: of the trace.
        runner: whose loops and optimizer may not be built yet. It stays changed: the process ends.
        checkpoint: called in place of reading one, with its name and MMEngine's ``map_location``.

    Attributes:
        hooks: those that are called, of all that the runner has.
        in_hook: one of them is running.
        begun: the first steps are over.
        after_batch: called when the hooks after a training iteration have run.
        epoch_ends: called before the hooks after a training epoch run.
    """

    def __init__(self, run: LoopRun, runner: Any, checkpoint: Callable[[str, Any], Any] = lambda *_: {}) -> None:
        self.run = run
        self.runner = runner
        self.hooks = [hook for hook in runner.hooks if _followed(hook)]
        self.in_hook = self.begun = False
        self.after_batch: Callable[[], None] = _nothing
        self.epoch_ends: Callable[[], None] = _nothing
        self._failed: set[tuple[int, str]] = set()
        _silence_mmengine(checkpoint)
        runner.model = run.model
        runner._waiting = None  # with which GuardRunner would place the model: it has its place
        runner.message_hub = MessageHub.get_current_instance()
        runner.message_hub.update_info_dict({"epoch": 0, "iter": 0})
        runner.visualizer = _Nothing()
        runner.param_schedulers = None
        runner.call_hook = self.call
        runner.set_randomness = _nothing
        if hasattr(runner, "strategy"):
            runner.strategy.model = run.model
            runner.strategy._set_randomness = _nothing
            vars(runner.strategy).pop("param_schedulers", None)

    def call(self, name: str, **arguments: Any) -> None:
        """MMEngine's ``Runner.call_hook``, where a hook that cannot be followed does not stop the others."""
        if name in _AT_THE_END:
            return
        if name == "after_train_epoch":
            self.epoch_ends()
        outer, self.in_hook = self.in_hook, True
        with self.run.phase("hooks") if self.begun and name in OF_EPOCHS else contextlib.nullcontext():
            self._call(name, arguments)
        self.in_hook = outer
        if name == "after_train_iter":
            self.after_batch()

    def _call(self, name: str, arguments: dict[str, Any]) -> None:
        for hook in self.hooks:
            called = id(hook), name
            if not hasattr(hook, name) or called in self._failed:
                continue
            with left_out_if_it_fails(self.run, Message("the hook {hook}", hook=f"{type(hook).__name__}.{name}")):
                self._failed.add(called)  # until it has not: the block takes the error
                getattr(hook, name)(self.runner, **arguments)
                self._failed.discard(called)

    @contextlib.contextmanager
    def phase(self, name: PhaseName) -> Iterator[None]:
        """A phase, which the training may do without where it cannot be followed."""
        with self.run.phase(name), left_out_if_it_fails(self.run, name):
            yield


def _followed(hook: Any) -> bool:
    """True for hooks that may change what is trained: not the guard itself, nor those that watch, report or save."""
    own = any(base.__module__.startswith("vram_guard_mmengine.") for base in type(hook).__mro__)
    return not own and not is_mmengines(hook, *_WATCHING, *_AROUND_STEPS)


def is_users(hook: Any) -> bool:
    """True if the hook is neither the guard nor one of MMEngine's own."""
    return type(hook).__module__.partition(".")[0] not in ("mmengine", "vram_guard_mmengine")


class _Nothing:
    """In place of a visualizer: takes everything, and draws and writes nothing."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        return self


def _silence_mmengine(checkpoint: Callable[[str, Any], Any]) -> None:
    """From now on MMEngine places things on the GPU, writes nothing and waits for no other process."""
    runner, metric, checkpoints = mmengine.runner.runner, mmengine.evaluator.metric, mmengine.runner.checkpoint
    on_gpu = {"get_device": lambda: "cuda"}
    without_ranks = {
        "collect_results": lambda results, size, *_args, **_kwargs: results[:size],
        "broadcast_object_list": _nothing,
    }
    read = staticmethod(lambda filename, map_location=None, *_args, **_kwargs: checkpoint(filename, map_location))
    for module, answers in (
        (mmengine.runner.amp, on_gpu),
        (single_device, {**on_gpu, "get_git_hash": lambda: ""}),
        (runner, {**on_gpu, "get_git_hash": lambda: "", "save_checkpoint": _nothing}),
        (checkpoints, {"save_checkpoint": _nothing}),
        (metric, without_ranks),
        (Config, {"pretty_text": ""}),
        (checkpoints.CheckpointLoader, {"load_checkpoint": read}),
    ):
        replace_attributes(module, answers)
    sys.stdout = io.StringIO()
    warnings.simplefilter("ignore")  # they are shown in the training itself


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """In place of what writes, waits for other processes, or draws numbers."""
