"""Runner -> TrainingStep: what one optimizer step of this training is. Changes nothing but what stays built."""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, cast

from mmengine.device import get_device
from mmengine.hooks import EarlyStoppingHook
from mmengine.model import is_model_wrapper, revert_sync_batchnorm
from mmengine.registry import LOOPS
from mmengine.runner import EpochBasedTrainLoop, IterBasedTrainLoop, Runner
from mmengine.runner.activation_checkpointing import turn_on_activation_checkpointing
from torch.utils.data import DataLoader

from vram_guard.apply.backward_hooks import of_package
from vram_guard.capture.later_calls import later_calls
from vram_guard.capture.loader import Sample, number_of_batches, read_loader
from vram_guard.capture.simulated_device import move_to_simulated_device
from vram_guard.errors import InvalidInputError, UnsupportedStepError
from vram_guard.guard.training import CapturedTraining
from vram_guard.job import Job
from vram_guard.language import _
from vram_guard.longest.planned_batch import LARGEST, PlannedBatch
from vram_guard.parallel.data_parallel import options_of
from vram_guard.proof.effects import StepEffects
from vram_guard.state.random_generators import random_state_kept
from vram_guard.step import TrainingStep
from vram_guard_mmengine import _dividing, _layouts, _optim, _refusals, _symbolic_run
from vram_guard_mmengine._evaluation import built, capture_evaluation, is_endless, rounds_of_training
from vram_guard_mmengine._job import RunnerJob, checkpoint_of
from vram_guard_mmengine._kinds import is_mmengines, synchronises
from vram_guard_mmengine._loss import AccumulatedLoss, CompiledMethod, HostBatch, Loss, RecordingOptimWrapper

if TYPE_CHECKING:
    from torch import nn

    from vram_guard.guard.evaluation import CapturedEvaluation
    from vram_guard.guard.refusals import Refusal
    from vram_guard.guard.settings import GuardSettings
    from vram_guard.parallel.spec import Parallel
    from vram_guard.techniques import Sharding


#: Wrappers under which each process holds the whole model, and one optimizer updates it.
WRAPPERS = ("MMDistributedDataParallel",)


@dataclass(frozen=True)
class CapturedRun(CapturedTraining):
    """A training of a runner, see :class:`vram_guard.guard.training.CapturedTraining`."""

    runner: Any
    optim: _optim.OptimFacts
    recorder: RecordingOptimWrapper

    @contextmanager
    def symbolic_run(self) -> Iterator[None]:
        """In MMEngine's own log nothing is seen of it."""
        self.effects.companions = tuple(self.runner.hooks)
        length = _length(self.runner, self.sample.loader)
        with random_state_kept(), _symbolic_run.symbolic_run(*length, self.effects):
            try:
                yield
            finally:
                self.recorder.begin()

    @property
    def read_afterwards(self) -> bool:
        """True if hooks that are not MMEngine's run after ``train_step``, and may read what it has left."""
        own = ("mmengine", "vram_guard_mmengine")
        return any(not of_package(type(hook), "after_train_iter", *own) for hook in self.runner.hooks)

    @property
    def effects(self) -> StepEffects:
        """What train_step returns: ``log_vars``."""
        return self.recorder.effects

    def loaded(self, batch: Any) -> Any:
        """Out of its wrapper."""
        return batch.data

    def refusals(self, settings: GuardSettings) -> Iterator[Refusal]:
        """See :mod:`vram_guard_mmengine._refusals`."""
        return _refusals.refusals(self.runner, self.optim, settings, growable=self.sample.growable)


def capture(runner: Any, *, whole_job: bool = True, planned_batch: PlannedBatch = LARGEST) -> CapturedRun:
    """Read one training from a runner whose loops and optimizer are not built yet.

    The train dataloader is built, as the loop would do it; where the loop is one of MMEngine's own, it is handed over.

    Args:
        runner: to read.
        whole_job: also what the training does besides its steps.
        planned_batch: the longest batch of its evaluations.

    Raises:
        InvalidInputError: an epoch of this training has no iterations.
        UnsupportedStepError: this training cannot be predicted; the message says what stands in the way.
    """
    _check_strategy(runner)
    model = _plain_model(runner)
    facts = _optim.read(runner.optim_wrapper)
    layout = _layouts.layout_of(runner)
    wrapper: Any = None if layout is None else layout.apply
    recorder, compiled = RecordingOptimWrapper(facts.accumulate), _compiled(runner)
    if compiled is not None:
        importlib.import_module("torch._dynamo")  # which says that compiled code may be met
    loader = _loader(runner)
    sample = _sample(loader)
    shardings: Callable[[], Mapping[Sharding, Parallel]] | None = None
    if layout is not None:
        shardings = functools.partial(_layouts.shardings_of, runner, layout)
    elif not _dividing.why_not(runner, facts):
        shardings = _dividing.shardings_of(runner)
    step = TrainingStep(
        model=model,
        batch=lambda size: HostBatch(sample.make(size)),
        loss=(Loss if layout is None or facts.accumulate == 1 else AccumulatedLoss)(recorder, compiled),
        optimizer=lambda _parameters: facts.make(model if layout is None else wrapper.made[-1]),
        precision=facts.precision,
        accumulate=facts.accumulate,
        zero_grad="after_step",
        keeps="nothing",  # run_iter is over before the next batch is loaded
        clip_grad_norm=facts.clip_grad_norm,
        clip_grad_value=facts.clip_grad_value,
        data_parallel_ranks=runner.world_size if layout is None else 1,
        parallel=layout,
        shardings=shardings,
        ddp_options=options_of(runner.model) if is_model_wrapper(runner.model) else {},
        prepare=lambda model: _prepare(model, checkpointed_by_config(runner)),
        device="cpu" if get_device() == "cpu" else "cuda",
        update_compiled=compiled.options if compiled is not None and compiled.name == "train_step" else None,
    )
    notes = [*sample.notes, *_notes(model)]
    if whole_job:
        step = step.with_(job=_job(runner, sample, loader, facts, notes, planned_batch))
    epoch_samples = sample.dataset_size if by_epoch(runner) else None
    return CapturedRun(step, model, sample, epoch_samples, tuple(notes), runner, facts, recorder)


def evaluation(runner: Any, kind: Literal["val", "test"], planned_batch: PlannedBatch) -> CapturedEvaluation:
    """Read an evaluation that is about to begin, see :func:`vram_guard_mmengine._evaluation.capture_evaluation`."""
    _check_strategy(runner)
    return capture_evaluation(runner, kind, _plain_model(runner), planned_batch)


def _job(
    runner: Any, sample: Sample, loader: Any, facts: _optim.OptimFacts, notes: list[str], planned_batch: PlannedBatch
) -> Job | None:
    """What the training does besides its steps; None where its loop is not followed, which the notes say."""
    if not issubclass(_loop_class(runner), (EpochBasedTrainLoop, IterBasedTrainLoop)):
        notes.append(
            _(
                "only training steps are predicted: {kind} derives from none of the training loops of MMEngine",
                kind=_loop_class(runner).__name__,
            )
        )
        return None
    length = _length(runner, loader)
    loop = runner._train_loop  # noqa: SLF001 - the runner has no public name for a loop that is not built
    begins = loop.get("val_begin", 1) if isinstance(loop, dict) else loop.val_begin
    most = length[0 if by_epoch(runner) else 1]
    sharded = _layouts.layout_of(runner) is not None
    if sharded:
        notes.append(
            _(
                "saving and resuming under {kind} are not included in the prediction",
                kind=type(runner.strategy).__name__,
            )
        )
    play = RunnerJob(
        runner,
        sample,
        loader,
        facts,
        number_of_batches(loader) if by_epoch(runner) else None,
        validation=None if begins > most else rounds_of_training(runner, "val", notes, planned_batch),
        test=rounds_of_training(runner, "test", notes, planned_batch) if later_calls("test") else None,
        checkpoint=None if sharded else checkpoint_of(runner, notes),
        saves=not sharded,
    )
    return Job(play, steps=None if _stops_early(runner) else length[1] // facts.accumulate or None, ends_process=True)


def _stops_early(runner: Any) -> bool:
    """True if a hook may end the training before its last iteration."""
    return any(isinstance(hook, EarlyStoppingHook) for hook in runner.hooks)


def by_epoch(runner: Any) -> bool:
    """True if the training is counted in epochs, not in iterations."""
    return not issubclass(_loop_class(runner), IterBasedTrainLoop)


def _check_strategy(runner: Any) -> None:
    """Refuse strategies that shard or move the model.

    Raises:
        UnsupportedStepError: with the strategy's name.
    """
    strategy = getattr(runner, "strategy", None)
    known = (*_layouts.WHOLE, _layouts.SHARDED)
    if strategy is not None and not is_mmengines(strategy, *known):
        raise UnsupportedStepError(
            _(
                "the strategy {kind} shards or moves the model; supported are {known}",
                kind=type(strategy).__name__,
                known=", ".join(known),
            )
        )


def checkpointed_by_config(runner: Any) -> list[str]:
    """Modules that the config's own ``activation_checkpointing`` names."""
    named = runner.cfg.get("activation_checkpointing") or []
    return [named] if isinstance(named, str) else list(named)


def _prepare(model: nn.Module, checkpointed: list[str]) -> None:
    """The work that is done on the simulated device before the first step."""
    move_to_simulated_device(model)
    turn_on_activation_checkpointing(model, checkpointed)
    model.train()  # as the loops do; backbones freeze stages in it


def _plain_model(runner: Any) -> nn.Module:
    """The model without its wrapper.

    Raises:
        UnsupportedStepError: the wrapper shards or moves the model, or updates its parts one by one.
    """
    if isinstance(runner.model, dict):  # FlexibleRunner's, which takes a built one as well
        runner.model = runner.strategy.build_model(runner.model)
    model: Any = runner.model
    if is_model_wrapper(model):
        if not is_mmengines(model, *WRAPPERS):
            kind, known = type(model).__name__, ", ".join(WRAPPERS)
            raise UnsupportedStepError(
                _("the model wrapper {kind} is not supported, only {known}", kind=kind, known=known)
            )
        model = model.module
    elif runner.world_size == 1:
        model = revert_sync_batchnorm(model)  # as the runner does when it places the model
        runner.model = model
    return cast("nn.Module", model)


# --- the loader -------------------------------------------------------------------------------------------------


def _loop_class(runner: Any) -> Any:
    loop = runner._train_loop  # noqa: SLF001 - the runner has no public name for a loop that is not built
    if not isinstance(loop, dict):
        return type(loop)
    if "type" in loop:
        return LOOPS.get(loop["type"]) if isinstance(loop["type"], str) else loop["type"]
    return EpochBasedTrainLoop if loop.get("by_epoch") else IterBasedTrainLoop


def _loader(runner: Any) -> DataLoader[Any]:
    """The train dataloader, built as the loop builds it; once, where the loop is known to take a built one."""
    given = runner._train_dataloader  # noqa: SLF001 - as above
    if not isinstance(given, dict):
        return given  # type: ignore[no-any-return]
    if _loop_class(runner) in (EpochBasedTrainLoop, IterBasedTrainLoop):
        runner._train_dataloader = built(runner, given)  # noqa: SLF001 - the loop takes it from there
        return runner._train_dataloader  # type: ignore[no-any-return]  # noqa: SLF001 - the same
    with random_state_kept():
        return built(runner, given)


def _sample(loader: Any) -> Sample:
    endless = is_endless(loader)
    empty = isinstance(loader, DataLoader) and not endless and number_of_batches(loader) == 0
    if empty:
        raise InvalidInputError(
            _(
                "the train dataset has {length} samples, no whole batch of {size}: there is nothing to train on; "
                "lower train_dataloader.batch_size, or leave drop_last out",
                length=len(loader.dataset),
                size=loader.batch_size,
            )
        )
    with random_state_kept():
        found = read_loader(loader, endless=endless)
    if getattr(getattr(loader, "dataset", None), "num_samples", None) is not None:  # MMEngine's _SlicedDataset
        found = replace(found, growable=_("num_batch_per_epoch counts batches of the configured size"))
    return found


def _length(runner: Any, loader: Any) -> tuple[int, int]:
    """(max_epochs, max_iters), for models that ask."""
    loop = runner._train_loop  # noqa: SLF001 - as above
    get: Callable[[str, int], Any] = loop.get if isinstance(loop, dict) else lambda name, to: getattr(loop, name, to)
    epochs = int(get("max_epochs", 1) or 1)
    batches = number_of_batches(loader)
    return epochs, int(get("max_iters", 0) or epochs * (1 if batches is None else batches))


def _compiled(runner: Any) -> CompiledMethod | None:
    """What the runner will compile of the model; None: nothing."""
    flexible = not isinstance(runner, Runner)  # whose ``from_cfg`` leaves a config's ``compile`` out
    given = runner._compile if flexible else runner.cfg.get("compile")  # noqa: SLF001 - it has no public name
    if not given:
        return None
    options = {} if given is True else dict(given)
    target = options.pop("target", None) if flexible else None  # as its strategies take it
    return CompiledMethod(target or "train_step", options)


def _notes(model: nn.Module) -> list[str]:
    notes = []
    if synchronises(model):
        notes.append(_("SyncBatchNorm's exchange of statistics is not counted"))
    return notes
