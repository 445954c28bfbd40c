"""Patches of the few places of Accelerate and torch that every script passes."""

from __future__ import annotations

import inspect
import sys
from collections.abc import Callable
from functools import partial
from typing import Any, NoReturn

import torch
from torch.utils.data import DataLoader

from vram_guard.language import _
from vram_guard_accelerate._patching import made_by_script, wrap
from vram_guard_accelerate.dry_run import _engine, own_ranks, side_effects, subprocess_policy
from vram_guard_accelerate.dry_run._sharded_process import ShardedProcess, plugin_of
from vram_guard_accelerate.dry_run.phases import BatchIterator, DryRun
from vram_guard_accelerate.dry_run.results import stopped

# ruff: noqa: SLF001 - sys._getframe: who calls is the question


def install(run: DryRun) -> None:
    """Report what the script does to the phase of its dry run, permanently: this process has no other purpose."""
    import accelerate.data_loader
    import accelerate.state
    from accelerate import Accelerator

    side_effects.discard_library_writes()
    side_effects.close_stdin(stopped)
    subprocess_policy.refuse_copies(stopped)
    own_ranks.watch(run.shape.ranks)
    _refuse_local_sgd()
    torch.set_num_threads(1)  # copies of a process cannot use its pool of threads
    run.script.options.watch()
    run.own_backward.install()
    wrap(torch.autograd, "backward", partial(_differentiated, run))
    wrap(Accelerator, "__init__", partial(_accelerator_made, run))
    for name in ("prepare", "prepare_model"):
        wrap(Accelerator, name, lambda original, self, *args, **kwargs: run.phase.prepare(original, self, args, kwargs))
    wrap(Accelerator, "load_state", lambda *args, **kwargs: run.phase.load_state(*args, **kwargs))  # noqa: PLW0108 - of the phase that it is then
    for owner in (Accelerator, torch.nn.utils):
        for name in ("clip_grad_norm_", "clip_grad_value_"):
            wrap(owner, name, partial(_clip, run))
    _watch_precision(run, Accelerator)
    wrap(accelerate.data_loader, "send_to_device", partial(_send_to_device, run))
    wrap(DataLoader, "__init__", partial(_loader_made, run))
    wrap(DataLoader, "__iter__", lambda original, loader: BatchIterator(run, loader, original))
    wrap(accelerate.state.PartialState, "__init__", partial(_state_made, run))
    run.script.optimizers.watch()


def _accelerator_made(run: DryRun, original: Any, *args: Any, **kwargs: Any) -> None:
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    made = given.pop("self")
    run.script.uses_accelerate = True
    if given.get("mixed_precision") is not None:
        run.script.precision_given = str(given["mixed_precision"])
    if given.get("megatron_lm_plugin") is not None:
        stopped(_("the script shards its model ({plugin}), which cannot be predicted", plugin="megatron_lm_plugin"))
    engine = _engine.plugin_of(given.get("deepspeed_plugin") or given.get("deepspeed_plugins"))
    if engine is not None:
        run.process = _engine.EngineProcess(engine, run.shape.ranks, run.shape.local_ranks)
        given.pop("deepspeed_plugins", None)
        given["deepspeed_plugin"] = engine
    sharded = plugin_of(given.get("fsdp_plugin"))
    if sharded is not None:
        given["fsdp_plugin"] = sharded
    original(made, **{name: value for name, value in given.items() if name != "cpu"})
    if sharded is not None:
        run.process = ShardedProcess(made, sharded)
    asker = sys._getframe(2).f_locals.get("self")
    if any(kind.__module__ == "transformers.trainer" for kind in type(asker).__mro__):
        run.script.by_trainer = True


def _state_made(run: DryRun, original: Any, state: Any, _cpu: bool = False, **kwargs: Any) -> None:
    """The parameters after ``state`` are Accelerate's own."""
    kwargs.pop("cpu", None)
    own_ranks.take_back()
    asker = sys._getframe(2).f_locals.get("self")  # TrainingArguments asks, and looks again after
    if asker is not None and hasattr(asker, "use_cpu"):
        asker.use_cpu = False
        _take_for_distributed(type(asker), run.shape.ranks)
    _engine.prepare_transformers(run.shape.ranks, asked=bool(getattr(asker, "deepspeed", None)))
    original(state, False, **kwargs)  # planned for the GPU, wherever it will run


def _take_for_distributed(arguments: Any, ranks: int) -> None:
    """Transformers' ``Trainer`` refuses ``--fsdp`` in a process that is alone, as that of a dry run is."""
    original = getattr(arguments, "parallel_mode", None)
    if ranks == 1 or not isinstance(original, property) or original.fget is None:
        return
    from transformers.training_args import ParallelMode

    as_written: Callable[[Any], Any] = original.fget
    arguments.parallel_mode = property(
        lambda self: ParallelMode.DISTRIBUTED if getattr(self, "fsdp", None) else as_written(self)
    )


def _differentiated(run: DryRun, original: Any, *args: Any, **kwargs: Any) -> Any:
    run.phase.differentiates_for_real()
    return original(*args, **kwargs)


def _clip(run: DryRun, original: Any, *args: Any, **kwargs: Any) -> Any:
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    given["parameters"] = run.phase.clips(given["parameters"])
    return original(**given)


def _watch_precision(run: DryRun, accelerator: Any) -> None:
    original = accelerator.mixed_precision.fget

    def mixed_precision(self: Any) -> Any:
        if not sys._getframe(1).f_globals.get("__name__", "").startswith("accelerate"):
            run.script.reads_precision = True
        return original(self)

    accelerator.mixed_precision = property(mixed_precision)


def _send_to_device(run: DryRun, original: Any, *args: Any, **kwargs: Any) -> Any:
    with run.phase.moving_batch():
        return original(*args, **kwargs)


def _loader_made(run: DryRun, original: Any, *args: Any, **kwargs: Any) -> None:
    """Loaders work in this process: copies of it have no others."""
    here = {"num_workers": 0, "prefetch_factor": None, "persistent_workers": False, "pin_memory": False}
    given = inspect.signature(original).bind(*args, **kwargs).arguments
    loader, extra = given.pop("self"), given.pop("kwargs", {})
    given.pop("multiprocessing_context", None)
    original(loader, **{**given, **extra, **{name: here[name] for name in here if name in given}})
    maker = sys._getframe(2)
    if made_by_script(maker):
        run.script.loaders.add(loader, maker)
    _watch_own_iterations(run, type(loader))


def _watch_own_iterations(run: DryRun, kind: type) -> None:
    """Classes of loaders may give out batches by themselves, of an iterator that they keep (Ultralytics, timm)."""
    for cls in kind.__mro__[: kind.__mro__.index(DataLoader)]:
        own = vars(cls).get("__iter__")
        if own is not None and not cls.__module__.startswith("accelerate") and cls not in run.watched_loaders:
            run.watched_loaders.add(cls)
            wrap(cls, "__iter__", lambda original, loader: BatchIterator(run, loader, original))


def _refuse_local_sgd() -> None:
    import accelerate.local_sgd

    def refused(*_args: Any, **_kwargs: Any) -> NoReturn:
        stopped(
            _(
                "LocalSGD updates the weights of each process separately and averages them now and then; "
                "vram_guard supports only steps that all processes take together. Launch it with accelerate "
                "launch"
            )
        )

    wrap(accelerate.local_sgd.LocalSGD, "__init__", refused)
