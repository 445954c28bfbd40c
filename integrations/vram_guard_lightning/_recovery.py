"""Recovery from real out-of-memory errors inside Lightning's loops.

What is replaced, each on the instance and given back at the end: the closure of automatic optimization (forward and
backward of a loaded batch), the precision plugin's ``backward`` (before it earlier gradients are set aside, after the
last one the batch is committed, before Lightning's ``on_after_backward`` hooks see the gradients), ``step`` of the
optimizer, the strategy's ``optimizer_step`` and ``validation_step``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import torch

from vram_guard.apply.loss_graphs import LossGraphs
from vram_guard.apply.loss_weight import LossWeight
from vram_guard.apply.microbatch import CannotSplitError, Splitter
from vram_guard.language import _
from vram_guard.patching import replace_attributes
from vram_guard.watch.batches import BatchPass, MicroBatches, Share
from vram_guard.watch.memory import reader_for
from vram_guard.watch.oom import is_out_of_memory
from vram_guard.watch.optimizer_step import guard_step
from vram_guard.watch.rank_coordinator import coordinator_of
from vram_guard.watch.recovery import Attempt, MicroBatchSchedule, Recovery
from vram_guard_lightning import _hooks, _layouts, _namespaces, private_api
from vram_guard_lightning._closure import MicroBatchClosure
from vram_guard_lightning._step_log import StepLog

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

# ruff: noqa: SLF001 - every private name of Lightning used here is listed in private_api.py


#: Packages whose objects a module holds without their being its state: its Trainer, loggers, hyperparameters.
FRAMEWORKS = ("lightning", "pytorch_lightning", "lightning_fabric", "lightning_utilities")

#: Hooks that Lightning calls where it frees the gradients.
FREEING = ("on_before_zero_grad", "optimizer_zero_grad")


def why_not(trainer: Trainer, module: LightningModule) -> str:
    """The reason why this training cannot recover from an out-of-memory error; "" where it can."""
    strategy: Any = trainer.strategy
    if not module.automatic_optimization:
        return _("manual optimization does its own backward and steps")
    if missing := private_api.missing(_namespaces.of(trainer), (*private_api.MICRO_BATCHES, *private_api.RECOVERY)):
        return _("this release of Lightning is not supported: {missing}", missing=missing[0])
    if why := _hooks.why_whole(trainer, module):
        return why
    if _namespaces.is_a(strategy, "strategies.SingleDeviceStrategy"):
        return ""
    if not _layouts.whole(trainer):
        return _("repeating a step under {strategy} is not known to be safe", strategy=type(strategy).__name__)
    return _why_not_ddp(strategy, module)


def _why_not_ddp(strategy: Any, module: LightningModule) -> str:
    """The first thing that would leave ranks waiting, or average gradients otherwise than the user asked for."""
    if strategy._layer_sync is not None or any(isinstance(p, torch.nn.SyncBatchNorm) for p in module.modules()):
        return _("synchronised batch normalisation makes the ranks wait for each other inside forward and backward")
    if strategy._ddp_comm_hook is not None or strategy._ddp_comm_state is not None:
        return _("a DDP communication hook averages the gradients in its own way")
    if hasattr(module, "_ddp_params_and_buffers_to_ignore"):
        return _("DDP is set to ignore some parameters")
    if any(getattr(part, "sparse", False) and hasattr(part, "embedding_dim") for part in module.modules()):
        return _("sparse gradients of an embedding are averaged by DDP alone")
    if not torch.distributed.is_gloo_available():
        return _("this build of torch has no gloo, over which the ranks would agree on what to do")
    return ""


def arm(
    trainer: Trainer,
    module: LightningModule,
    *,
    splitter: Splitter | None,
    schedule: MicroBatchSchedule,
    loss_weight: LossWeight,
    graphs: LossGraphs | None,
    most: int,
    log: Callable[[str], None],
    prediction_text: Callable[[], str],
    on_failure: Callable[[Any], None],
) -> Session:
    """Arm a Trainer whose strategy is set up; on every rank at the same point."""
    recovery = Recovery(
        module,
        ranks=coordinator_of(module, module if trainer.world_size == 1 else trainer.strategy.model),
        memory=reader_for(trainer.strategy.root_device),
        most=most,
        log=log,
        prediction_text=prediction_text,
        on_failure=on_failure,
        frameworks=FRAMEWORKS,
    )
    batches = MicroBatches(
        splitter,
        loss_weight,
        graphs=graphs,
        recovery=recovery,
        schedule=schedule,
        why_whole=functools.partial(_hooks.why_whole, trainer, module),
    )
    return Session(trainer, recovery, batches)


class Session:
    """One armed training: what the module's docstring names is replaced."""

    def __init__(self, trainer: Trainer, recovery: Recovery, batches: MicroBatches) -> None:
        self.trainer = trainer
        self.recovery = recovery
        self.batches = batches
        self.attempt: Attempt | None = None
        """The one that is running."""
        self.hooked = _hooks.overridden(trainer, trainer.lightning_module, FREEING)
        """User code runs where gradients are freed, once for a batch."""
        self.validation = Validation(trainer, batches.for_validation())
        strategy: Any = trainer.strategy
        self._undo: list[Callable[[], None]] = [recovery.ranks.close]
        self._replace(trainer.fit_loop.epoch_loop.automatic_optimization, "_make_closure", self._closures)
        self._replace(strategy.precision_plugin, "backward", self._backward)
        self._replace(strategy, "optimizer_step", self._optimizer_step)
        self._replace(strategy, "validation_step", self.validation.step)
        if trainer.world_size > 1:
            self._replace(strategy, "all_gather", self._all_gather)
        for optimizer in strategy.optimizers:
            inner = getattr(optimizer, "optimizer", optimizer)
            if isinstance(inner, torch.optim.Optimizer):
                self._undo.append(guard_step(inner, recovery, self._last_checkpoint))

    def undo(self) -> None:
        """As it was; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    def _replace(self, owner: Any, name: str, with_: Callable[..., Any]) -> None:
        """``with_`` is called in place of the method ``name``, with the method first."""
        self._undo.append(replace_attributes(owner, {name: functools.partial(with_, getattr(owner, name))}))

    # --- a loaded batch -------------------------------------------------------------------------------------

    def _closures(self, own: Any, kwargs: Mapping[str, Any], optimizer: Any, batch_idx: int) -> Any:
        if "batch" not in kwargs:  # training_step takes the loader's iterator, which cannot be wound back
            return own(kwargs, optimizer, batch_idx)
        return RecoveringClosure(self, kwargs, optimizer, batch_idx)

    @contextlib.contextmanager
    def attempting(self, attempt: Attempt | None) -> Iterator[None]:
        """Inside the block the attempt runs, without DDP's wrapper."""
        self.attempt = attempt
        try:
            with _unwrapped(self.trainer.strategy):
                yield
        finally:
            self.attempt = None

    def _backward(self, own: Any, *args: Any, **kwargs: Any) -> None:
        if self.attempt is None:
            own(*args, **kwargs)
        else:
            self.attempt.backward(functools.partial(own, *args, **kwargs))

    def _all_gather(self, own: Any, *args: Any, **kwargs: Any) -> Any:
        """``self.all_gather`` in validation_step waits for all ranks."""
        self.validation.gathered()
        return own(*args, **kwargs)

    # --- the optimizer step ---------------------------------------------------------------------------------

    def _optimizer_step(self, own: Any, *args: Any, **kwargs: Any) -> Any:
        """Errors between backward and the optimizer's own step reach the other ranks too."""
        try:
            return own(*args, **kwargs)
        except Exception as error:
            self.recovery.leave(error)
            if is_out_of_memory(error):
                raise self.recovery.final(
                    _(
                        "out of memory around the optimizer step (gradient clipping, or a hook): the step cannot be "
                        "repeated. The weights are those of the last optimizer step, or, if the error came from a hook "
                        "after the step, those of this one."
                    )
                ) from error
            raise

    def _last_checkpoint(self) -> str:
        callback: Any = self.trainer.checkpoint_callback
        paths = [getattr(callback, name, "") for name in ("last_model_path", "best_model_path")]
        return next((path for path in paths if path), "")


class RecoveringClosure(MicroBatchClosure):
    """Closure that the optimizer calls for one loaded batch; a failed attempt is rolled back and repeated."""

    def __init__(self, session: Session, kwargs: Mapping[str, Any], optimizer: Any, batch_idx: int) -> None:
        super().__init__(session.trainer, session.batches, kwargs, optimizer, batch_idx)
        self._session = session
        self._freeing: _FreedOnce | None = None
        if self._zero_grad is not None:
            self._zero_grad = self._freeing = _FreedOnce(self._zero_grad, session)

    def _run(self) -> Any:
        if self._freeing is not None:
            self._freeing.done = False
        return self._batches.run(
            self._kwargs["batch"],
            self._pass,
            synchronise=not self._trainer.fit_loop._should_accumulate(),
            what=_("the batch after {steps} optimizer steps", steps=self._trainer.global_step),
        )

    def _forward_and_backward(self, batch: BatchPass, log: StepLog) -> Any:
        with self._session.attempting(batch.attempt):
            result = super()._forward_and_backward(batch, log)
        if batch.attempt is not None:
            batch.attempt.commit()  # before what was logged is passed on
        return result

    def _own_closure(self) -> Any:
        closure = super()._own_closure()
        closure._zero_grad_fn = self._zero_grad
        if closure._backward_fn is not None:
            closure._backward_fn = functools.partial(_seen, self._batches, closure._backward_fn)
        return closure


def _seen(batches: MicroBatches, backward: Callable[[torch.Tensor], None], loss: torch.Tensor) -> None:
    """Backward of a batch as written, whose loss is what those of micro-batches are compared with."""
    batches.see(loss)
    backward(loss)


class _FreedOnce:
    """Frees the gradients of the last optimizer step once for a batch: that is counted, and seen by hooks.

    It knows nothing of the closure that calls it: with a reference back, the closure's batch would stay on the GPU
    until Python's garbage collector runs.
    """

    def __init__(self, zero_grad: Callable[[], None], session: Session) -> None:
        self._zero_grad = zero_grad
        self._session = session
        self.done = False

    def __call__(self) -> None:
        if not self.done:
            with self._session.recovery.snapshot.once() if self._session.hooked else contextlib.nullcontext():
                self._zero_grad()
            self.done = True


class Validation:
    """``validation_step``: whole until memory runs out, then in slices of the batch, their outputs put together.

    A rank does this for itself: what is logged is passed on once it is through, and DDP's wrapper, which sends
    buffers around, is left out. A validation_step that gathers from other ranks itself is not repeated.
    """

    def __init__(self, trainer: Trainer, batches: MicroBatches) -> None:
        self._trainer = trainer
        self._batches = batches
        self._running = False

    def step(self, own: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of the strategy's ``validation_step``."""
        if not args or kwargs or isinstance(args[0], Iterator):
            return own(*args, **kwargs)
        self._running = True
        try:
            return self._batches.run(
                args[0], functools.partial(self._pass, own, args[1:]), what=_("a validation batch")
            )
        finally:
            self._running = False

    def gathered(self) -> None:
        """The user's code waits for the other ranks: where that is validation_step, it runs once for a batch."""
        if self._running:
            self._batches.never_cut = _("validation_step gathers from the other ranks, once for a whole batch")

    def _pass(self, own: Any, rest: tuple[Any, ...], batch: BatchPass) -> Any:
        log = StepLog(self._trainer.fit_loop.epoch_loop.val_loop._results, self._trainer.lightning_module)

        def one(share: Share) -> Any:
            log.next_micro_batch(share.samples)
            return own(share.data, *rest)

        with log.gathering(cut=not batch.whole), _unwrapped(self._trainer.strategy):
            return batch.run(one, otherwise=_not_merged)


def _not_merged(outputs: Sequence[Any]) -> Any:
    raise CannotSplitError(
        _("what validation_step returns"),
        _(
            "the {kind}s of several slices cannot be put together; return a tensor with a row per sample, a mean, or "
            "nothing",
            kind=type(outputs[-1]).__name__,
        ),
    )


@contextlib.contextmanager
def _unwrapped(strategy: Any) -> Iterator[None]:
    """Without DDP's wrapper, whose collectives could hang."""
    wrapped = strategy.model
    strategy.model = strategy.lightning_module
    try:
        yield
    finally:
        strategy.model = wrapped
