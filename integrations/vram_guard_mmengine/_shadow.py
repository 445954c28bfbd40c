"""A copy of a runner on which MMEngine's own loops and hooks run in a trace: the user's runner notices nothing.

The copy has a loop, a message hub, a data set and a strategy of its own. The hooks are the user's: what they change is
put back (:func:`vram_guard.state.objects.objects_kept`).
"""

from __future__ import annotations

import contextlib
import copy
import io
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
from mmengine.optim import OptimWrapper
from torch import nn

from vram_guard.forks.exclusive import in_copy
from vram_guard.job import JobRun
from vram_guard.language import Message
from vram_guard.patching import replaced
from vram_guard_mmengine._kinds import is_mmengines

# ruff: noqa: SLF001 - the runner has no public names for what is not built yet

#: Hooks of MMEngine's own that watch, report or save: what they do is no part of a step.
_WATCHING = (
    *("CheckpointHook", "LoggerHook", "IterTimerHook", "EarlyStoppingHook", "ProfilerHook", "NPUProfilerHook"),
    *("SyncBuffersHook", "NaiveVisualizationHook", "PrepareTTAHook"),
)

#: Hooks of MMEngine's own besides those that watch which change nothing of a step: they set learning rates and seeds.
_AROUND_STEPS = ("ParamSchedulerHook", "DistSamplerSeedHook")

#: Attributes by which data sets and loaders of OpenMMLab hold what a hook may exchange.
PARTS = ("_dataset", "dataset", "datasets", "pipeline", "transforms", "sampler", "batch_sampler")


def _watches(hook: Any) -> bool:
    """True for the guard's own hook and for those of MMEngine that watch, report or save."""
    own = any(base.__module__.startswith("vram_guard_mmengine.") for base in type(hook).__mro__)
    return own or is_mmengines(hook, *_WATCHING)


class Shadow:
    """The copy of a runner, and what its hooks are told.

    Args:
        runner: the user's, whose loops and optimizer are not built yet.
        run: the trace.
        loader: of the training, built.
        loop_class: of the training's loop.
        length: epochs, and iterations of all.
        accumulate: batches per optimizer step.
        data_batch: that hooks are given.
    """

    def __init__(
        self,
        runner: Any,
        run: JobRun,
        *,
        loader: Any,
        loop_class: type[Any],
        length: tuple[int, int],
        accumulate: int,
        data_batch: Any,
    ) -> None:
        self._run = run
        self.accumulate = accumulate
        self.data_batch = data_batch
        self.batch_idx = 0
        """Position of the batch, as hooks are told it."""
        self.sets_modes = any(type(part).train is not nn.Module.train for part in run.model.modules())
        """True if ``train()`` of some module does more than it does everywhere: backbones freeze stages in it."""
        self._failed: set[tuple[int, str]] = set()
        self.hooks = followed_hooks(runner)
        self.runner = shadow = _twin(runner)
        self.loader = _apart(loader)
        self.loop = shadow._train_loop = _loop(runner, shadow, self.loader, loop_class, length)
        shadow._hooks = list(runner.hooks)  # which hooks and models look up; those of `hooks` alone are called
        shadow.model = run.model
        shadow.message_hub = MessageHub.get_current_instance()
        shadow.message_hub.update_info_dict({"epoch": 0, "iter": 0})
        shadow.visualizer = _Nothing()
        shadow.param_schedulers = None
        shadow.call_hook = self.call
        shadow.set_randomness = lambda **_settings: None
        shadow._randomness_cfg = dict(runner._randomness_cfg)
        shadow.optim_wrapper = None
        if run.optimizer is not None:
            shadow.optim_wrapper = OptimWrapper(run.optimizer, accumulative_counts=accumulate)
        if hasattr(runner, "strategy"):
            shadow.strategy = strategy = _twin(runner.strategy)
            strategy.model, strategy.optim_wrapper = shadow.model, shadow.optim_wrapper
            strategy.dispatch_kwargs = {"max_iters": length[1]}
            strategy._set_randomness = shadow.set_randomness
            strategy._randomness = dict(strategy._randomness)
            vars(strategy).pop("param_schedulers", None)

    def call(self, name: str, **arguments: Any) -> None:
        """MMEngine's ``Runner.call_hook``, where a hook that cannot be followed does not stop the others."""
        for hook in self.hooks:
            if not hasattr(hook, name) or (id(hook), name) in self._failed:
                continue
            try:
                getattr(hook, name)(self.runner, **arguments)
            except Exception as error:  # noqa: BLE001 - the user's own code
                self._failed.add((id(hook), name))
                self._run.note(
                    Message(
                        "{hook}.{name} cannot be followed ({error}): what it does is not included in the prediction",
                        hook=type(hook).__name__,
                        name=name,
                        error=_short(error),
                    )
                )

    def at(self, epoch: int, iteration: int) -> None:
        """The place in the training that the loop and the message hub tell."""
        self.loop._epoch, self.loop._iter = epoch, iteration
        self.runner.message_hub.update_info_dict({"epoch": epoch, "iter": iteration})


def followed_hooks(runner: Any) -> list[Any]:
    """Hooks that may change what is trained: neither the guard itself nor those that watch, report or save.

    The user's own run in copies of the process only: they may write files and draw numbers.
    """
    return [
        hook
        for hook in runner.hooks
        if not _watches(hook) and not is_mmengines(hook, *_AROUND_STEPS) and (in_copy() or not is_users(hook))
    ]


def is_users(hook: Any) -> bool:
    """True if the hook is neither the guard nor one of MMEngine's own."""
    return type(hook).__module__.partition(".")[0] not in ("mmengine", "vram_guard_mmengine")


def _short(error: Exception) -> str:
    return f"{type(error).__name__}: {error}".split("\n", 1)[0][:200]


class _Nothing:
    """In place of a visualizer: takes everything, and draws and writes nothing."""

    def __getattr__(self, name: str) -> Any:
        return self

    def __call__(self, *_args: Any, **_kwargs: Any) -> Any:
        return self


def _twin(part: Any) -> Any:
    """A shallow copy that runs no code of the user's: a class may answer ``__getattr__`` for another object."""
    clone = object.__new__(type(part))
    vars(clone).update(vars(part))
    return clone


def _apart(part: Any) -> Any:
    """A loader or data set whose pipeline can be exchanged without the user's; what it holds of data is shared."""
    if isinstance(part, list):
        return [_apart(one) for one in part]
    if not hasattr(part, "__dict__") or isinstance(part, type):
        return part
    try:
        clone = _twin(part)
    except TypeError:  # a tensor, a dict of a class of its own, ...: made elsewhere than in Python, and data itself
        return part
    for name in PARTS:
        if name in vars(part):
            vars(clone)[name] = _apart(vars(part)[name])
    return clone


def _loop(runner: Any, shadow: Any, loader: Any, loop_class: type[Any], length: tuple[int, int]) -> Any:
    """In place of the training's loop, for hooks that ask it how far the training is."""
    given = runner._train_loop or {}  # there is none where nothing is trained
    loop = object.__new__(loop_class)
    vars(loop).update({**given} if isinstance(given, dict) else vars(given))
    places = {"_max_epochs": length[0], "_max_iters": length[1], "_epoch": 0, "_iter": 0, "stop_training": False}
    vars(loop).update(places, _runner=shadow, dataloader=loader)
    return loop


@contextlib.contextmanager
def quiet_mmengine(checkpoint: Callable[..., Any]) -> Iterator[None]:
    """Inside the block MMEngine places things on the GPU, writes nothing and waits for no other process.

    Args:
        checkpoint: called in place of reading a checkpoint, with its name and MMEngine's ``map_location``.
    """
    runner, metric, checkpoints = mmengine.runner.runner, mmengine.evaluator.metric, mmengine.runner.checkpoint
    on_gpu = {"get_device": lambda: "cuda"}
    without_ranks = {
        "collect_results": lambda results, size, *_args, **_kwargs: results[:size],
        "broadcast_object_list": _nothing,
    }
    with contextlib.ExitStack() as stack:
        for module, answers in (
            (mmengine.runner.amp, on_gpu),
            (single_device, {**on_gpu, "get_git_hash": lambda: ""}),
            (runner, {**on_gpu, "get_git_hash": lambda: "", "save_checkpoint": _nothing}),
            (checkpoints, {"save_checkpoint": _nothing}),
            (metric, without_ranks),
            (Config, {"pretty_text": ""}),
        ):
            stack.enter_context(replaced(module, answers))
        read = staticmethod(lambda filename, map_location=None, *_args, **_kwargs: checkpoint(filename, map_location))
        stack.enter_context(replaced(checkpoints.CheckpointLoader, {"load_checkpoint": read}))
        stack.enter_context(contextlib.redirect_stdout(io.StringIO()))
        stack.enter_context(warnings.catch_warnings())
        warnings.simplefilter("ignore")  # they are shown in the training itself
        yield


def _nothing(*_args: Any, **_kwargs: Any) -> None:
    """In place of what writes, or waits for other processes."""


def copied_evaluator(evaluator: Any) -> Any:
    """The evaluator with metrics that have collected nothing, and compute nothing of what they collect."""
    clone = copy.copy(evaluator)
    clone.metrics = [_twin(metric) for metric in evaluator.metrics]
    for metric in clone.metrics:
        own = vars(metric)
        own.update({name: value.copy() for name, value in own.items() if isinstance(value, (list, dict, set))})
        metric.results = []
        # MMEngine hands it copies in host memory.
        metric.compute_metrics = lambda _results: {}
    return clone
