"""One optimizer step of a runner, run for real on the CPU in a copy of its process, through the runner's own loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from mmengine.hooks import Hook
from mmengine.model import is_model_wrapper
from mmengine.optim import AmpOptimWrapper, OptimWrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader, Dataset

from vram_guard import techniques
from vram_guard.apply.backward_hooks import of_package
from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
from vram_guard.limits import ROUNDS_FOLLOWED
from vram_guard.proof.rehearsal import Rehearsal, Rehearsed, RehearsedStep, SteppedSignal
from vram_guard.simulate.parallel.groups import alone
from vram_guard_mmengine import _dividing, _optim, _split_step
from vram_guard_mmengine._kinds import is_mmengines

# ruff: noqa: ARG002, SLF001 - MMEngine decides what hooks get; the runner has no public names for what is not built

#: Hooks of MMEngine's own that watch, report or save: what they do is no part of a step.
WATCHING = (
    *("CheckpointHook", "LoggerHook", "IterTimerHook", "EarlyStoppingHook", "ProfilerHook", "NPUProfilerHook"),
    *("SyncBuffersHook", "NaiveVisualizationHook", "PrepareTTAHook"),
)


def watches(hook: Any) -> bool:
    """True for the guard's own hook and for those of MMEngine that watch, report or save."""
    own = any(base.__module__.startswith("vram_guard_mmengine.") for base in type(hook).__mro__)
    return own or is_mmengines(hook, *WATCHING)


def rehearse(runner: Any, loader: Any, make_batch: Callable[[int], Any], rehearsal: Rehearsal) -> Rehearsed:
    """Run the step; what is done to the runner is not undone.

    Args:
        runner: of the copy, whose loops and optimizer are not built yet, inside the guarded ``train``.
        loader: of its training, built.
        make_batch: number of samples -> a batch of the user's loader.
        rehearsal: how it is run.

    Raises:
        Exception: whatever the user's code or MMEngine raises.
    """
    model = on_cpu(runner)
    step = RehearsedStep(model, rehearsal, read=read_afterwards(runner))
    batch = make_batch(rehearsal.samples)
    if rehearsal.double:
        torch.set_default_dtype(torch.float64)
        model.double()
        batch = pytree.tree_map_only(torch.Tensor, doubled, batch)
    quiet(runner)
    runner._train_dataloader = _loader_of(loader, batch)
    runner.optim_wrapper = _plain_wrapper(runner.optim_wrapper)
    runner.register_hook(_StepHook(step), priority="LOWEST")
    try:
        runner.train()  # the guard is active: as written
    except SteppedSignal:
        return step.result(logged=logged(runner))
    raise UnsupportedStepError(_("the loop ended before an optimizer step"))


def on_cpu(runner: Any) -> Any:
    """The runner's model on the CPU, without its wrapper."""
    if is_model_wrapper(runner.model):
        runner.model = runner.model.module
    return runner.model.to("cpu")


#: What MMEngine's timer logs.
_TIMES = ("train/time", "train/data_time")


def logged(runner: Any) -> dict[str, Any]:
    """The values that the run has logged, but times."""
    hub = runner.message_hub.log_scalars
    return {name: buffer.current() for name, buffer in hub.items() if name not in _TIMES}


def read_afterwards(runner: Any) -> bool:
    """True if hooks that are not MMEngine's run after ``train_step``, and may read what it has left."""
    return any(
        not of_package(type(hook), "after_train_iter", "mmengine", "vram_guard_mmengine") for hook in runner.hooks
    )


class _Repeated(Dataset[Any]):
    """The same batch for as long as the loop asks for one; otherwise the training's data set."""

    def __init__(self, loader: Any, batch: Any) -> None:
        self._batch = batch
        self.metainfo = getattr(getattr(loader, "dataset", None), "metainfo", {})
        try:
            self._length = len(loader)
        except TypeError:  # a stream
            self._length = 1000

    def __getitem__(self, _number: int) -> Any:
        return self._batch

    def __len__(self) -> int:
        return max(self._length, ROUNDS_FOLLOWED)


def _loader_of(loader: Any, batch: Any) -> DataLoader[Any]:
    """In place of the training's loader."""
    return DataLoader(_Repeated(loader, batch), batch_size=1, collate_fn=lambda batches: batches[0])


class _StepHook(Hook):  # type: ignore[misc]
    """Sets the step up once everything is built, and ends the run after it."""

    def __init__(self, step: RehearsedStep) -> None:
        self._step = step

    def before_train(self, runner: Any) -> None:
        """The plan's appliers, and what takes the step down."""
        step, model, rehearsal = self._step, runner.model, self._step.rehearsal
        sharding = rehearsal.recipe.sharding
        if sharding is not None:
            step.enter_context(alone())
            mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("shard",))
            _dividing.divided(model, runner.optim_wrapper.optimizer, sharding, torch.device("cpu"), mesh)
        step.mark_forwards(model, "train_step")
        if rehearsal.splitter is not None:
            step.applied.callback(_split_step.install(model, rehearsal.splitter, rehearsal.loss_weight))
        step.applied.callback(techniques.install(model, rehearsal.recipe))
        if rehearsal.recipe.optimizer_in_backward:
            step.applied.callback(techniques.step_where([runner.optim_wrapper.optimizer], rehearsal.recipe))
        step.follow([runner.optim_wrapper.optimizer])
        step.begin()

    def after_train_iter(self, runner: Any, *_args: Any, **_kwargs: Any) -> None:
        """Go on until the optimizer has stepped."""
        self._step.end_if_stepped()


def doubled(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.double() if tensor.is_floating_point() else tensor


def quiet(runner: Any) -> None:
    """Nothing is validated, loaded, saved or written down; the model is where it is."""
    runner._hooks = [hook for hook in runner._hooks if not watches(hook)]
    runner._val_loop = None
    runner._load_from, runner._resume = None, False
    runner._init_model_weights = lambda: None
    if getattr(runner, "_waiting", None) is not None:
        runner._waiting = None
    if getattr(runner, "strategy", None) is not None:
        runner.strategy._wrap_model = lambda model: model  # whole, for one process


def _plain_wrapper(wrapper: Any) -> Any:
    """The same optimizer in the precision of the rehearsal, with at most two accumulated batches."""
    if isinstance(wrapper, OptimWrapper):
        if isinstance(wrapper, AmpOptimWrapper):
            raise UnsupportedStepError(_("optim_wrapper was built before the runner; describe it as a dict instead"))
        wrapper._accumulative_counts = min(wrapper._accumulative_counts, ROUNDS_FOLLOWED)
        return wrapper
    plain = {name: value for name, value in wrapper.items() if name not in _optim.AMP_ONLY}
    if _optim.read(wrapper).kind is AmpOptimWrapper:
        plain["type"] = OptimWrapper
    plain["accumulative_counts"] = min(plain.get("accumulative_counts", 1), ROUNDS_FOLLOWED)
    return plain
