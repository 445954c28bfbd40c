"""Recovery from real out-of-memory errors inside Lightning's loops.

What is replaced, each on the instance and given back at the end: the closure of automatic optimization (forward and
backward of a loaded batch), the precision plugin's ``backward`` (before it earlier gradients are set aside, after the
last one the batch is committed, before Lightning's ``on_after_backward`` hooks see the gradients), ``step`` of the
optimizer, the strategy's ``optimizer_step`` and ``validation_step``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from vram_guard.apply.loss_weight import LossWeight, split_or_warn
from vram_guard.apply.microbatch import CannotSplitError, MicroBatch, Splitter, batch_size
from vram_guard.watch.memory import reader_for
from vram_guard.watch.oom import is_out_of_memory
from vram_guard.watch.optimizer_step import guard_step
from vram_guard.watch.rank_coordinator import DataParallel, RankCoordinator, SingleProcess
from vram_guard.watch.recovery import Attempt, MicroBatchSchedule, Recovery
from vram_guard_lightning import namespaces, private_api
from vram_guard_lightning.closure import MicroBatchClosure, merged
from vram_guard_lightning.step_log import StepLog

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

# ruff: noqa: SLF001 - every private name of Lightning used here stands in private_api.py


def why_not(trainer: Trainer, module: LightningModule) -> str:
    """Why this training cannot be taken through an out-of-memory error; "" where it can."""
    strategy: Any = trainer.strategy
    if not module.automatic_optimization:
        return "manual optimization does its own backward and steps"
    if missing := private_api.missing(namespaces.of(trainer), (*private_api.MICRO_BATCHES, *private_api.RECOVERY)):
        return f"this release of Lightning is not known: {missing[0]}"
    if namespaces.is_a(strategy, "strategies.SingleDeviceStrategy"):
        return ""
    if not namespaces.is_a(strategy, "strategies.DDPStrategy"):
        return f"{type(strategy).__name__} is not known to be safe to repeat a step under"
    return _why_not_ddp(strategy, module)


def _why_not_ddp(strategy: Any, module: LightningModule) -> str:
    """What would leave ranks waiting for each other, or average gradients otherwise than the user asked for."""
    if strategy._layer_sync is not None or any(isinstance(p, torch.nn.SyncBatchNorm) for p in module.modules()):
        return "synchronised batch normalisation makes the ranks wait for each other inside forward and backward"
    if strategy._ddp_comm_hook is not None or strategy._ddp_comm_state is not None:
        return "a DDP communication hook averages the gradients in its own way"
    if hasattr(module, "_ddp_params_and_buffers_to_ignore"):
        return "DDP was told to leave out some parameters"
    if any(getattr(part, "sparse", False) and hasattr(part, "embedding_dim") for part in module.modules()):
        return "sparse gradients of an embedding are averaged by DDP alone"
    if not torch.distributed.is_gloo_available():
        return "this build of torch has no gloo, over which the ranks would settle what to do"
    return ""


def arm(
    trainer: Trainer,
    module: LightningModule,
    *,
    splitter: Splitter | None,
    full_batch: int | None,
    loss_weight: LossWeight,
    most: int,
    tell: Callable[[str], None],
    outlook: Callable[[], str],
    on_failure: Callable[[Any], None],
) -> Session:
    """Arm a Trainer whose strategy is set up; on every rank at the same point."""
    recovery = Recovery(
        module,
        agreement=_agreement(trainer, module),
        memory=reader_for(trainer.strategy.root_device),
        most=most,
        tell=tell,
        outlook=outlook,
        on_failure=on_failure,
    )
    ladder = MicroBatchSchedule(None if splitter is None else splitter.micro_batch_size, full_batch)
    session = Session(trainer, recovery, splitter, ladder, loss_weight)
    session.install()
    return session


def _agreement(trainer: Trainer, module: LightningModule) -> RankCoordinator:
    model: Any = trainer.strategy.model
    if trainer.world_size == 1 or model is module:
        return SingleProcess()
    return DataParallel(module, broadcast_buffers=bool(model.broadcast_buffers))


class Session:
    """One armed training."""

    def __init__(
        self,
        trainer: Trainer,
        recovery: Recovery,
        splitter: Splitter | None,
        ladder: MicroBatchSchedule,
        loss_weight: LossWeight,
    ) -> None:
        self.trainer = trainer
        self.recovery = recovery
        self.ladder = ladder
        self.loss_weight = loss_weight
        self.attempt: Attempt | None = None
        """The one that is running."""
        self.last_backward = True
        """Whether the next backward completes the gradients of the loaded batch."""
        self.validation = Validation(self)
        self._splitter = splitter
        self._undo: list[Callable[[], None]] = []

    def install(self) -> None:
        """Replace what the module's docstring names."""
        trainer = self.trainer
        strategy: Any = trainer.strategy
        self._replace(trainer.fit_loop.epoch_loop.automatic_optimization, "_make_closure", self._closures)
        self._replace(strategy.precision_plugin, "backward", self._backward)
        self._replace(strategy, "optimizer_step", self._optimizer_step)
        self._replace(strategy, "validation_step", self.validation.step)
        if trainer.world_size > 1:
            self._replace(strategy, "all_gather", self._all_gather)
        for optimizer in strategy.optimizers:
            inner = getattr(optimizer, "optimizer", optimizer)
            if isinstance(inner, torch.optim.Optimizer):
                self._undo.append(guard_step(inner, self.recovery, self._last_checkpoint))

    def undo(self) -> None:
        """As it was; a second call does nothing."""
        while self._undo:
            self._undo.pop()()

    # --- a loaded batch -------------------------------------------------------------------------------------

    def _closures(self, own: Any, kwargs: Mapping[str, Any], optimizer: Any, batch_idx: int) -> Any:
        if "batch" not in kwargs:  # training_step takes the loader's iterator, which cannot be wound back
            return own(kwargs, optimizer, batch_idx)
        whole = functools.partial(self._whole, kwargs, optimizer, batch_idx)
        return RecoveringClosure(self, kwargs, optimizer, batch_idx, whole)

    def _whole(self, kwargs: Mapping[str, Any], optimizer: Any, batch_idx: int) -> Any:
        """Lightning's own closure."""
        loop: Any = self.trainer.fit_loop.epoch_loop.automatic_optimization
        return type(loop)._make_closure(loop, kwargs, optimizer, batch_idx)

    def split(self, batch: Any, size: int | None) -> list[MicroBatch]:
        """The micro-batches of a loaded batch; a single one where it stays whole."""
        if size is None or self._splitter is None:
            return [MicroBatch(batch, 1, 1)]
        self._splitter.micro_batch_size = size
        return split_or_warn(self._splitter, batch)

    def samples_of(self, batch: Any) -> int:
        """The samples of a batch that is about to be split, perhaps for the first time.

        Raises:
            CannotSplitError: it cannot be.
        """
        if self._splitter is None:
            size = batch_size(batch)
            self._splitter = Splitter(self.ladder.full or size, size, batch if not self.ladder.full else None)
        return sum(part.samples for part in self._splitter.split(batch))

    @contextlib.contextmanager
    def attempting(self, attempt: Attempt) -> Iterator[None]:
        """Inside the block the module runs without DDP's wrapper, whose collectives could wait for ever."""
        strategy: Any = self.trainer.strategy
        wrapped, module = strategy.model, strategy.lightning_module
        self.attempt, self.last_backward = attempt, True
        if wrapped is not module:
            strategy.model = module
        try:
            yield
        finally:
            self.attempt = None
            if wrapped is not module:
                strategy.model = wrapped

    def _backward(self, own: Any, *args: Any, **kwargs: Any) -> None:
        attempt = self.attempt
        if attempt is None:
            own(*args, **kwargs)
            return
        attempt.before_backward()
        own(*args, **kwargs)
        if self.last_backward:
            attempt.commit()
        else:
            attempt.stage = "forward"

    def _all_gather(self, own: Any, *args: Any, **kwargs: Any) -> Any:
        """``self.all_gather`` in training_step waits for all ranks: first make sure that they will come."""
        if self.attempt is not None and not self.attempt.committed:
            self.attempt.meet()
        self.validation.gathers |= self.validation.running
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
                    "out of memory around the optimizer step (gradient clipping, or a hook): the step cannot be "
                    "repeated. The weights are those of the last optimizer step, or, if the error came from a hook "
                    "after the step, those of this one."
                ) from error
            raise

    def _last_checkpoint(self) -> str:
        callback: Any = self.trainer.checkpoint_callback
        paths = [getattr(callback, name, "") for name in ("last_model_path", "best_model_path")]
        return next((path for path in paths if path), "")

    def _replace(self, owner: Any, name: str, with_: Callable[..., Any]) -> None:
        """``with_`` is called in place of the method ``name``, with the method first."""
        missing = object()
        before = vars(owner).get(name, missing)
        setattr(owner, name, functools.partial(with_, getattr(owner, name)))

        def undo() -> None:
            if before is missing:
                vars(owner).pop(name, None)
            else:
                setattr(owner, name, before)

        self._undo.append(undo)


class RecoveringClosure(MicroBatchClosure):
    """What the optimizer calls for one loaded batch; an attempt that breaks is taken back and made again."""

    def __init__(
        self,
        session: Session,
        kwargs: Mapping[str, Any],
        optimizer: Any,
        batch_idx: int,
        whole: Callable[[], Any],
    ) -> None:
        super().__init__(session.trainer, kwargs, optimizer, batch_idx, [], session.loss_weight)
        self._session = session
        self._whole = whole
        self._freed = False
        """Whether the gradients of the last optimizer step are freed already: that is counted, and seen by hooks."""
        if self._zero_grad is not None:
            self._zero_grad = self._once(self._zero_grad)

    def __call__(self, *_args: Any, **_kwargs: Any) -> torch.Tensor | None:
        """Gradients of the whole batch; returns the batch's loss, None if there is none."""
        session, trainer = self._session, self._trainer
        self._freed = False
        self._result = session.recovery.run(
            self._attempt,
            session.ladder,
            lambda: session.samples_of(self._kwargs["batch"]),
            synchronise=not trainer.fit_loop._should_accumulate(),
            what=f"the batch after {trainer.global_step} optimizer steps",
        )
        loss: torch.Tensor | None = self._result.loss
        return loss

    def _attempt(self, attempt: Attempt) -> Any:
        self._micro_batches = self._session.split(self._kwargs["batch"], attempt.micro_batch_size)
        log = StepLog(self._trainer.fit_loop.epoch_loop._results)
        with torch.enable_grad(), log.gathering():
            with self._session.attempting(attempt):
                result = self._one_pass() if len(self._micro_batches) == 1 else self._run(log)
            attempt.commit()  # before what was logged is passed on
        return result

    def _one_pass(self) -> Any:
        """A batch that stays whole is trained on by Lightning's own closure."""
        closure = self._whole()
        closure._zero_grad_fn = self._zero_grad
        closure()
        return closure.consume_result()

    def _once(self, zero_grad: Callable[[], None]) -> Callable[[], None]:
        def once() -> None:
            if not self._freed:
                with self._session.recovery.keeper.keeping():
                    zero_grad()
                self._freed = True

        return once

    def _gradients_stay_here(self, *, stay: bool) -> contextlib.AbstractContextManager[Any]:
        self._session.last_backward = not stay
        return contextlib.nullcontext()


class Validation:
    """``validation_step``: whole until memory runs out, then in slices of the batch, their outputs put together.

    A rank does this for itself: what is logged is passed on once it is through, and DDP's wrapper, which sends
    buffers around, is left out. A validation_step that gathers from other ranks itself is not repeated.
    """

    def __init__(self, session: Session) -> None:
        self._session = session
        self._ladder = MicroBatchSchedule()
        self._splitter: Splitter | None = None
        self.running = False
        self.gathers = False
        """Whether the user's validation_step waits for the other ranks."""
        own = session.recovery
        self._recovery = Recovery(
            own.model, SingleProcess(), own.memory, own.most, own.tell, own.outlook, own.on_failure
        )

    def step(self, own: Any, *args: Any, **kwargs: Any) -> Any:
        """In place of the strategy's ``validation_step``."""
        if not args or kwargs or isinstance(args[0], Iterator):
            return own(*args, **kwargs)
        self._recovery.count = self._session.recovery.count
        self.running = True
        try:
            return self._recovery.run(
                functools.partial(self._attempt, own, args),
                self._ladder,
                functools.partial(self._samples_of, args[0]),
                what="a validation batch",
            )
        finally:
            self.running = False
            self._session.recovery.count = self._recovery.count

    def _attempt(self, own: Any, args: tuple[Any, ...], attempt: Attempt) -> Any:
        log = StepLog(self._session.trainer.fit_loop.epoch_loop.val_loop._results)
        with log.gathering(), _unwrapped(self._session.trainer.strategy):
            if attempt.micro_batch_size is None or self._splitter is None:
                return own(*args)
            self._splitter.micro_batch_size = attempt.micro_batch_size
            outputs, slices = [], self._splitter.split(args[0])
            for part in slices:
                log.next_micro_batch(part.samples)
                outputs.append(own(part.data, *args[1:]))
            return joined(outputs, slices)

    def _samples_of(self, batch: Any) -> int:
        if self.gathers:
            raise CannotSplitError("validation_step", "it gathers from the other ranks, once for a whole batch")
        if self._splitter is None:
            size = batch_size(batch)
            self._splitter = Splitter(size, size, batch)
        return sum(part.samples for part in self._splitter.split(batch))


@contextlib.contextmanager
def _unwrapped(strategy: Any) -> Iterator[None]:
    wrapped = strategy.model
    strategy.model = strategy.lightning_module
    try:
        yield
    finally:
        strategy.model = wrapped


def joined(outputs: list[Any], slices: list[MicroBatch]) -> Any:
    """What validation_step would have returned for the whole batch.

    None stays None; a tensor with a row per sample is joined, a floating-point scalar becomes the mean over
    samples; the same for each value of a dict.

    Raises:
        CannotSplitError: something else, of which nobody can know what the whole batch's would be.
    """
    if len(outputs) == 1:
        return outputs[0]
    if all(output is None for output in outputs):
        return None
    if all(isinstance(output, Mapping) for output in outputs):
        return {name: joined([output.get(name) for output in outputs], slices) for name in outputs[0]}
    value = merged([{"": output} for output in outputs], slices)[""]
    if value is outputs[-1]:
        kind = type(value).__name__
        raise CannotSplitError(
            "what validation_step returns",
            f"the {kind}s of several slices cannot be put together; return a tensor with a row per sample, a mean, "
            "or nothing",
        )
    return value
