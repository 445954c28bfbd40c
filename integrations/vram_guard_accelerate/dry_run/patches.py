"""Where a dry run looks through: the few places of Accelerate and torch that every script passes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader

from vram_guard_accelerate.apply.applying import made_by_script, wrap
from vram_guard_accelerate.dry_run import script_options, side_effects
from vram_guard_accelerate.dry_run.cuda_shim import BeforePrepare
from vram_guard_accelerate.dry_run.results import stopped
from vram_guard_accelerate.dry_run.run import BATCHES_AHEAD, OTHER_BATCHES
from vram_guard_accelerate.dry_run.sharded_copy import made_by_trainer, stand_by

if TYPE_CHECKING:
    from vram_guard_accelerate.dry_run.run import DryRun

before: BeforePrepare
"""The pretence until ``prepare``."""


def open_for(run: DryRun) -> None:
    """Put the dry run's eyes into Accelerate and torch, for good: this process is for nothing else."""
    global before  # noqa: PLW0603 - one process, one dry run
    import accelerate.data_loader
    import accelerate.state
    from accelerate import Accelerator

    side_effects.silence_accelerate()
    side_effects.close_stdin(stopped)
    _no_processes()
    torch.set_num_threads(1)  # copies of a process cannot use its pool of threads
    script_options.watch(run.options)
    run.watcher.install()
    wrap(Accelerator, "__init__", lambda original: _made(run, original))
    wrap(Accelerator, "prepare", lambda original: _prepare(run, original))
    wrap(Accelerator, "prepare_model", lambda original: _prepare(run, original))
    wrap(Accelerator, "accumulate", lambda original: _accumulate(run, original))
    wrap(Accelerator, "load_state", lambda _: _loads(run))
    wrap(Accelerator, "backward", lambda original: _backward(run, original))
    for owner, name in ((Accelerator, "clip_grad_norm_"), (Accelerator, "clip_grad_value_")):
        wrap(owner, name, lambda original: _clips(run, original))
    for name in ("clip_grad_norm_", "clip_grad_value_"):
        wrap(torch.nn.utils, name, lambda original: _clips(run, original))
    _watch_precision(run, Accelerator)
    _refuse_local_sgd()
    wrap(accelerate.data_loader, "send_to_device", lambda original: _loading(run, original))
    wrap(DataLoader, "__init__", lambda original: _without_workers(run, original))
    wrap(DataLoader, "__iter__", lambda original: lambda loader: Batches(run, loader, original))
    before = BeforePrepare(run.capability)
    # Not earlier: libraries that are imported would believe in the GPU too, and look for its driver.
    wrap(accelerate.state.PartialState, "__init__", _after_imports)


class Batches:
    """Iterates over a loader: real batches before the training and beside it, batches made to order in it."""

    def __init__(self, run: DryRun, loader: Any, original: Callable[[Any], Iterator[Any]]) -> None:
        self._run = run
        self._loader = loader
        self._original = original
        self._real: Iterator[Any] | None = None
        self._given = 0
        self._forwards = run.forwards
        self._began: int | None = None

    def __iter__(self) -> Batches:
        return self

    def __next__(self) -> Any:
        if self._run.following is None:  # nothing is prepared yet: the script looks at its data
            return self._next_real()
        self._began = self._run.probe.asked(self._began)
        return self._run.batch_for(self._loader, self._next_of_others)

    def _next_of_others(self) -> Any:
        used, self._forwards = self._run.forwards > self._forwards, self._run.forwards
        if self._given >= (OTHER_BATCHES if used else BATCHES_AHEAD):
            raise StopIteration
        self._given += 1
        return self._next_real()

    def _next_real(self) -> Any:
        if self._real is None:
            self._real = self._original(self._loader)
        return next(self._real)


def _made(run: DryRun, original: Any) -> Any:
    signature = inspect.signature(original)

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        if given.get("mixed_precision") is not None:
            run.precision_given = str(given["mixed_precision"])
        for plugin in ("deepspeed_plugin", "fsdp_plugin", "megatron_lm_plugin"):
            if given.get(plugin) is not None:
                stopped(f"the script shards its model ({plugin}), which cannot be predicted")
        given = {name: value for name, value in given.items() if name not in ("self", "cpu")}
        original(self, **given)
        run.accelerator = self
        if made_by_trainer():
            run.by_trainer = True
            stand_by(run, self)

    return made


def _after_imports(original: Any) -> Any:
    def made(self: Any, _cpu: bool = False, **kwargs: Any) -> None:  # accelerate's own signature
        before.begin()
        kwargs.pop("cpu", None)
        asker = sys._getframe(1).f_locals.get("self")  # noqa: SLF001 - TrainingArguments asks, and looks again after
        if asker is not None and hasattr(asker, "use_cpu"):
            asker.use_cpu = False
        original(self, False, **kwargs)  # planned for the GPU, wherever it will run

    return made


def _prepare(run: DryRun, original: Any) -> Any:
    def prepare(self: Any, *args: Any, **kwargs: Any) -> Any:
        run.accelerator = self
        run.begin()
        models = [thing for thing in args if isinstance(thing, torch.nn.Module)]
        if models:
            stand_by(run, self)
        if run.sharded is not None:
            return run.sharded.prepare(original, self, args, kwargs)
        for model in models:
            run.prepared(model)
        return original(self, *args, **kwargs)

    return prepare


def _accumulate(run: DryRun, original: Any) -> Any:
    def accumulate(self: Any, *models: Any) -> Any:
        run.accumulates = True
        return original(self, *models)

    return accumulate


def _loads(run: DryRun) -> Any:
    def load_state(self: Any, input_dir: Any = None, *_args: Any, **_kwargs: Any) -> None:
        run.accelerator = self
        run.resumed.look(self, input_dir)

    return load_state


def _backward(run: DryRun, original: Any) -> Any:
    def backward(*args: Any, **kwargs: Any) -> Any:
        run.differentiates()
        return original(*args, **kwargs)

    return backward


def _clips(run: DryRun, original: Any) -> Any:
    signature = inspect.signature(original)

    def clip(*args: Any, **kwargs: Any) -> Any:
        given = signature.bind(*args, **kwargs).arguments
        given["parameters"] = run.clipped(given["parameters"])
        return original(**given)

    return clip


def _watch_precision(run: DryRun, accelerator: Any) -> None:
    original = accelerator.mixed_precision.fget

    def mixed_precision(self: Any) -> Any:
        asker = sys._getframe(1).f_globals.get("__name__", "")  # noqa: SLF001 - who asks is the question
        if run.sample is None and not asker.startswith("accelerate"):
            run.precision_read = True
        return original(self)

    accelerator.mixed_precision = property(mixed_precision)


def _loading(run: DryRun, original: Any) -> Any:
    def send_to_device(*args: Any, **kwargs: Any) -> Any:
        if run.following is None or run.sample is None:
            return original(*args, **kwargs)
        with run.following.loading():
            return original(*args, **kwargs)

    return send_to_device


def _without_workers(run: DryRun, original: Any) -> Any:
    signature = inspect.signature(original)
    here = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "pin_memory": False}

    def made(self: Any, *args: Any, **kwargs: Any) -> None:
        given = signature.bind(self, *args, **kwargs).arguments
        extra = given.pop("kwargs", {})
        given = {name: value for name, value in given.items() if name not in ("self", "multiprocessing_context")}
        original(self, **{**given, **extra, **{name: here[name] for name in here if name in given}})
        maker = sys._getframe(1)  # noqa: SLF001 - who makes it is the question
        if made_by_script(maker):
            run.loaders.add(self, maker)

    return made


def _no_processes() -> None:
    from torch import multiprocessing

    def refuse(name: str) -> Callable[..., Any]:
        return lambda *_args, **_kwargs: stopped(f"it starts processes of its own ({name}), which are not followed")

    for name in ("spawn", "start_processes"):
        setattr(multiprocessing, name, refuse(f"torch.multiprocessing.{name}"))
    import accelerate

    for name in ("notebook_launcher", "debug_launcher"):
        setattr(accelerate, name, refuse(name))
    import os

    for name in ("execv", "execve", "execvp", "execvpe"):
        setattr(os, name, refuse(f"os.{name}"))


def _refuse_local_sgd() -> None:
    import accelerate.local_sgd

    def refused(_self: Any, *_args: Any, **_kwargs: Any) -> None:
        stopped(
            "LocalSGD lets processes drift apart and averages their weights now and then; the guard knows steps "
            "that all processes take together. Launch it with accelerate launch"
        )

    accelerate.local_sgd.LocalSGD.__init__ = refused
