"""Trainer and LightningModule -> TrainingStep: what one optimizer step of this training is."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, cast

import torch

from vram_guard.capture.loader import Sample
from vram_guard.capture.simulated_device import move_to_simulated_device
from vram_guard.errors import UnsupportedStepError
from vram_guard.guard.training import CapturedTraining
from vram_guard.language import _
from vram_guard.longest.planned_batch import LARGEST, PlannedBatch
from vram_guard.parallel import deepspeed, in_place_of_ddp
from vram_guard.parallel.data_parallel import chosen_options
from vram_guard.parallel.resharding import divided_by_fsdp2
from vram_guard.state.random_generators import random_state_kept
from vram_guard.step import PRECISIONS, Precision, TrainingStep
from vram_guard_lightning import (
    _deepspeed,
    _dividing,
    _hooks,
    _layouts,
    _namespaces,
    _refusals,
    _trainer_proxy,
    private_api,
)
from vram_guard_lightning._job import Heard, job_of
from vram_guard_lightning._precision import plugin_of_trace
from vram_guard_lightning._sample import read

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from vram_guard.guard.refusals import Refusal
    from vram_guard.guard.settings import GuardSettings
    from vram_guard.parallel.spec import Parallel
    from vram_guard.plan import Plan
    from vram_guard.proof.effects import StepEffects
    from vram_guard.techniques import Sharding

# ruff: noqa: SLF001 - every private name of Lightning used here is listed in private_api.py


@dataclass(frozen=True)
class CapturedFit(CapturedTraining):
    """A training of a Trainer, see :class:`vram_guard.guard.training.CapturedTraining`."""

    trainer: Trainer
    model: LightningModule
    optimizer_traits: set[str]
    """Class of the optimizer that the trace made, and "fused" where it is; empty before the trace."""
    heard: Heard

    @contextmanager
    def symbolic_run(self) -> Iterator[None]:
        """The Trainer's loggers and loops notice nothing of it."""
        view = _view(self.trainer, self.sample, _batches_per_epoch(self.trainer, self.sample))
        with random_state_kept(), _trainer_proxy.symbolic_run(self.trainer, self.model, view, self.effects):
            yield

    @property
    def read_afterwards(self) -> bool:
        """See :func:`vram_guard_lightning._hooks.read_afterwards`."""
        return _hooks.read_afterwards(self.trainer, self.model)

    @property
    def effects(self) -> StepEffects:
        """What ``self.log`` is given, and calls of loggers."""
        return self.heard.effects

    def refusals(self, settings: GuardSettings) -> Iterator[Refusal]:
        """See :mod:`vram_guard_lightning._refusals`."""
        return _refusals.refusals(self.trainer, self.model, settings, growable=self.sample.growable)

    def objection(self, plan: Plan) -> Refusal | None:
        """See :func:`vram_guard_lightning._refusals.by_optimizer`."""
        return _refusals.by_optimizer(self.trainer, self.optimizer_traits, plan)


def capture(
    trainer: Trainer, module: LightningModule, *, whole_job: bool = True, planned_batch: PlannedBatch = LARGEST
) -> CapturedFit:
    """Read one training from a Trainer whose strategy is not set up yet. Changes nothing.

    Args:
        trainer: whose ``fit`` is running.
        module: that it trains.
        whole_job: True: also what it does besides its steps, see :mod:`._job`.
        planned_batch: the longest batch of its validation.

    Raises:
        UnsupportedStepError: this training cannot be predicted; the message says what stands in the way.
    """
    check_precision(trainer)
    config = _deepspeed.config_of(trainer)
    layout = _deepspeed.layout_of(trainer, config) if config else _layouts.layout_of(trainer)
    with random_state_kept():
        source: Any = trainer.fit_loop._data_source
        found = read(source.dataloader())
    traits: set[str] = set()
    heard = Heard()
    job, job_notes = None, []
    missing = private_api.missing(_namespaces.of(trainer), private_api.JOB)
    if whole_job and missing:
        names = "; ".join(missing)
        job_notes = [_("only training steps are predicted: this release of Lightning lacks {names}", names=names)]
    elif whole_job and config:
        job_notes = [_("only training steps are predicted under DeepSpeed, whose engine takes them itself")]
    elif whole_job:
        batches = _batches_per_epoch(trainer, found)
        job, job_notes = job_of(trainer, module, found, batches, heard=heard, planned_batch=planned_batch)
    step = TrainingStep(
        model=module,
        batch=_batch_of(trainer, module, found),
        loss=_loss_of(trainer, module, heard),
        optimizer=_optimizer_of(trainer, module, traits, config) if module.automatic_optimization else None,
        precision=cast("Precision", trainer.precision),
        accumulate=accumulation(trainer),
        zero_grad="before_backward",
        keeps="nothing",  # TrainingEpochLoop.advance is over before the next batch is loaded
        clip_grad_norm=config["gradient_clipping"] or None if config else _clipping(trainer, "norm"),
        clip_grad_value=None if config else _clipping(trainer, "value"),
        data_parallel_ranks=trainer.world_size if layout is None else 1,
        ddp_options=chosen_options(getattr(trainer.strategy, "_ddp_kwargs", {})),
        prepare=_preparation_of(trainer, module),
        parallel=layout,
        deepspeed_config=_deepspeed.of_any_stage(config),
        shardings=_deepspeed.shardings_of(trainer, layout, config)
        if config and layout is not None
        else _shardings(trainer, module, layout),
        device="cpu" if trainer.strategy.root_device.type == "cpu" else "cuda",
        job=job,
    )
    notes = (*found.notes, *_notes(module, whole_job=job is not None), *job_notes)
    return CapturedFit(step, module, found, _epoch_samples(trainer, found), notes, trainer, traits, heard)


def _shardings(
    trainer: Trainer, module: LightningModule, layout: Parallel | None
) -> Callable[[], Mapping[Sharding, Parallel]] | None:
    if layout is not None:
        return _layouts.shardings_of(trainer, layout)
    if _dividing.why_not(trainer, module):
        return None
    return lambda: in_place_of_ddp.layouts(trainer.world_size, offload=_dividing.offloads(trainer))


def check_precision(trainer: Trainer) -> None:
    """Refuse precisions that are not followed.

    Raises:
        UnsupportedStepError: with the reason and the way out.
    """
    if trainer.precision not in PRECISIONS:
        raise UnsupportedStepError(
            _(
                "precision {precision} cannot be predicted; supported are {known}",
                precision=repr(trainer.precision),
                known=", ".join(PRECISIONS),
            )
        )


def accumulation(trainer: Trainer) -> int:
    """Batches per optimizer step; under a schedule, the most: from two on, memory is the same."""
    scheduled = [
        max(callback.scheduling.values()) for callback in _callbacks(trainer, "callbacks.GradientAccumulationScheduler")
    ]
    most: int = max([trainer.accumulate_grad_batches, *scheduled])
    return most


def _callbacks(trainer: Trainer, path: str) -> list[Any]:
    return [callback for callback in trainer.callbacks if _namespaces.is_a(callback, path)]  # type: ignore[attr-defined]


def _clipping(trainer: Trainer, kind: str) -> float | None:
    if not trainer.gradient_clip_val:
        return None
    algorithm = trainer.gradient_clip_algorithm or "norm"  # Lightning's default
    return float(trainer.gradient_clip_val) if str(getattr(algorithm, "value", algorithm)) == kind else None


def _epoch_samples(trainer: Trainer, found: Sample) -> int | None:
    if found.dataset_size is None:
        return None
    limit = trainer.limit_train_batches
    if isinstance(limit, int):
        return min(found.dataset_size, max(1, limit) * found.batch_size * _layouts.data_ranks(trainer))
    return max(1, int(found.dataset_size * limit))


# --- the batch --------------------------------------------------------------------------------------------


def _hook_owner(trainer: Trainer, module: LightningModule, hook: str) -> Any:
    """The owner of the hook that moves batches, as in Lightning: the datamodule if it overrides it, else the module."""
    datamodule = trainer.datamodule  # type: ignore[attr-defined]
    return datamodule if datamodule is not None and not _namespaces.is_lightnings(datamodule, hook) else module


def _batch_of(trainer: Trainer, module: LightningModule, found: Sample) -> Callable[[int], Any]:
    before = _hook_owner(trainer, module, "on_before_batch_transfer")
    return lambda size: before.on_before_batch_transfer(found.make(size), 0)


# --- the loss ---------------------------------------------------------------------------------------------


def _loss_of(trainer: Trainer, module: LightningModule, heard: Heard) -> Callable[[Any, Any], Any]:
    """training_step as Lightning calls it: after the transfer hook, under its precision plugin's context."""
    after = _hook_owner(trainer, module, "on_after_batch_transfer")
    numbered = _takes_batch_index(module)
    contexts = _PrecisionContexts(trainer)
    redirected: Any = trainer.strategy._forward_redirection
    whole = _layouts.whole(trainer)

    def step(model: Any, batch: Any) -> Any:
        arguments = heard.arguments
        if arguments is None:
            batch = after.on_after_batch_transfer(batch, 0)
            arguments = (heard.effects.number("batch_idx", 0),) if numbered else ()
        with contexts():
            if model is module and not (whole and divided_by_fsdp2(model)):
                output = model.training_step(batch, *arguments)
            else:
                output = redirected(model, module, "training_step", batch, *arguments)
        return output

    def loss(model: Any, batch: Any) -> Any:
        output = step(model, batch)
        if output is None and heard.arguments is None:  # Lightning's own loop passes over such a batch
            raise UnsupportedStepError(_("training_step returned None, so there is no loss to follow"))
        return output

    def manual(model: Any, batch: Any) -> None:
        with torch.enable_grad():
            step(model, batch)  # whatever it returns: Lightning looks for no loss in it

    return loss if module.automatic_optimization else manual


def _takes_batch_index(module: LightningModule) -> bool:
    """Lightning passes the batch's index to a training_step with two arguments.

    Raises:
        UnsupportedStepError: training_step takes the iterator itself (``dataloader_iter``).
    """
    parameters = inspect.signature(module.training_step).parameters
    if "dataloader_iter" in parameters:
        raise UnsupportedStepError(
            _(
                "training_step(dataloader_iter) fetches its batches itself, so there is no batch to predict for; "
                "take batch instead"
            )
        )
    return len(parameters) >= 2


class _PrecisionContexts:
    """The context in which Lightning runs training_step, for whatever precision is being traced.

    Lightning's own autocast may differ from torch's default (recent releases switch its weight cache off,
    which changes what is held for the backward pass), so it is asked and not imitated.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer

    def __call__(self) -> Any:
        if not torch.is_autocast_enabled("cuda"):
            return nullcontext()
        return plugin_of_trace(self._trainer, nullcontext()).train_step_context()


# --- the optimizer ----------------------------------------------------------------------------------------


def _optimizer_of(
    trainer: Trainer, module: LightningModule, traits: set[str], deepspeed_config: Mapping[str, Any]
) -> Callable[[Any], torch.optim.Optimizer]:
    if "optimizer" in deepspeed_config:  # of DeepSpeed's making; Lightning does not ask configure_optimizers
        return deepspeed.placeholder

    def make(_parameters: Any) -> torch.optim.Optimizer:
        optimizers = optimizers_in(module.configure_optimizers())
        if len(optimizers) != 1:
            raise UnsupportedStepError(
                _(
                    "configure_optimizers returned {count} optimizers; automatic optimization needs exactly one",
                    count=len(optimizers),
                )
            )
        traits.update(base.__name__ for base in type(optimizers[0]).__mro__)
        traits.update(["fused"] if optimizers[0].defaults.get("fused") else [])
        trainer.strategy.optimizers = optimizers  # for self.optimizers() in training_step
        return optimizers[0]

    return make


def optimizers_in(returned: Any) -> list[torch.optim.Optimizer]:
    """The optimizers in whatever form ``configure_optimizers`` may return them (its documentation)."""
    if returned is None:
        return []
    if isinstance(returned, dict):
        return [_unwrapped(returned["optimizer"])]
    if isinstance(returned, (list, tuple)):
        if len(returned) == 2 and isinstance(returned[0], (list, tuple)):
            returned = returned[0]  # two lists: optimizers, schedulers
        return [optimizer for item in returned for optimizer in optimizers_in(item)]
    return [_unwrapped(returned)]


def _preparation_of(trainer: Trainer, module: LightningModule) -> Callable[[Any], None]:
    """The work that is done on the simulated device before the first step."""

    def prepare(model: Any) -> None:
        if not _deepspeed.used(trainer):  # whose engine moves it
            move_to_simulated_device(model)
        if not module.automatic_optimization:  # training_step will ask for them itself
            trainer.strategy.optimizers = optimizers_in(module.configure_optimizers())

    return prepare


def _unwrapped(optimizer: Any) -> torch.optim.Optimizer:
    wrapped = _namespaces.is_a(optimizer, "core.optimizer.LightningOptimizer")
    return cast("torch.optim.Optimizer", optimizer.optimizer if wrapped else optimizer)


# --- what the user's code sees ----------------------------------------------------------------------------


def silent_view(trainer: Any, **answers: Any) -> _trainer_proxy.TrainerView:
    """The Trainer, or its copy, during a trace: its callbacks are there and do nothing."""
    callbacks = [_trainer_proxy.silent_callback(trainer, one) for one in trainer.callbacks]
    return _trainer_proxy.TrainerView(trainer, callbacks=callbacks, **answers)


def _view(trainer: Trainer, found: Sample, batches: float) -> _trainer_proxy.TrainerView:
    """The Trainer during a trace of its training: its step estimate loads nothing."""
    return silent_view(
        trainer,
        train_dataloader=found.loader,
        num_training_batches=batches,
        estimated_stepping_batches=_stepping_batches(trainer, batches),
        fit_loop=_trainer_proxy.TrainerView(trainer.fit_loop, setup_data=lambda: None, max_batches=batches),
    )


def _batches_per_epoch(trainer: Trainer, found: Sample) -> float:
    if found.dataset_size is None:
        return math.inf
    batches = math.ceil(found.dataset_size / (found.batch_size * _layouts.data_ranks(trainer)))
    limit = trainer.limit_train_batches
    return min(batches, limit) if isinstance(limit, int) else max(1, int(batches * limit))


def _stepping_batches(trainer: Trainer, batches: float) -> float:
    """Optimizer steps of the whole training, as ``Trainer.estimated_stepping_batches`` counts them."""
    most, epochs = trainer.max_steps, trainer.max_epochs
    if epochs in (-1, None):
        return math.inf if most == -1 else most
    if batches == math.inf:
        return most  # -1 where nothing says how many
    steps = math.ceil(batches / trainer.accumulate_grad_batches) * max(epochs or 0, 1)
    return steps if most == -1 else min(steps, most)


def _notes(module: LightningModule, *, whole_job: bool) -> list[str]:
    """Notes on the parts of the user's module that a trace of its steps alone does not follow."""
    hooks = () if whole_job else ("backward", "configure_gradient_clipping", "optimizer_step")
    overridden = [name for name in hooks if not _namespaces.is_lightnings(module, name)]
    notes = [_("{name} is overridden; its own memory is not counted", name=name) for name in overridden]
    if not module.automatic_optimization:
        notes.append(
            _("manual optimization: training_step is followed as a whole, with its backward and optimizer steps")
        )
    return notes
