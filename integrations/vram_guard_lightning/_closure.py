"""Trains on a loaded batch in micro-batches, inside Lightning's automatic optimization.

Lightning makes one closure per loaded batch: training_step, freeing the gradients, backward. Only that closure is
replaced, so everything that counts batches or steps (samplers, schedulers, global_step, val_check_interval, max_steps,
logging intervals, accumulate_grad_batches, resuming within an epoch) stays exactly as the user set it. While it runs,
what training_step logs and the ``on_after_backward`` hooks are held back: they are for the whole batch.
"""

from __future__ import annotations

import contextlib
import functools
import warnings
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from vram_guard.apply.loss_weight import LossWeight
from vram_guard.apply.microbatch import Splitter
from vram_guard.apply.outputs import detached
from vram_guard.language import _
from vram_guard.patching import replace_attributes
from vram_guard.techniques.loss_graphs import LossGraphs
from vram_guard.watch.batches import BatchPass, MicroBatches, Share, cut_batches
from vram_guard_lightning import _deepspeed
from vram_guard_lightning._hooks import AfterBackward, why_whole
from vram_guard_lightning._layouts import whole
from vram_guard_lightning._step_log import StepLog

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

# ruff: noqa: SLF001 - every private name of Lightning used here is listed in private_api.py


def install(
    trainer: Trainer,
    splitter: Splitter,
    loss_weight: LossWeight = "mean",
    graphs: LossGraphs | None = None,
    *,
    divided: bool = False,
) -> Callable[[], None]:
    """Split the batches of this Trainer; returns the function that undoes it.

    Args:
        trainer: the Trainer.
        splitter: of its batches.
        loss_weight: of micro-batches.
        graphs: see :class:`MicroBatches`.
        divided: whether the plan divides the model over the processes: each forward then waits for all of them.
    """
    return cut_batches(
        functools.partial(replace_closures, trainer),
        splitter,
        loss_weight,
        graphs,
        in_step=divided or _synchronised(trainer),
        why_whole=lambda: why_whole(trainer, trainer.lightning_module),
    )


def replace_closures(trainer: Trainer, batches: MicroBatches) -> Callable[[], None]:
    """Train on each loaded batch through ``batches``; returns the function that undoes it."""
    loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
    lightnings_own = loop._make_closure

    def make_closure(kwargs: Mapping[str, Any], optimizer: Any, batch_idx: int) -> Any:
        if "batch" not in kwargs:  # training_step takes the loader's iterator
            return lightnings_own(kwargs, optimizer, batch_idx)
        return MicroBatchClosure(trainer, batches, kwargs, optimizer, batch_idx)

    return replace_attributes(loop, {"_make_closure": make_closure})


def _synchronised(trainer: Trainer) -> bool:
    """True where every forward waits for the other ranks: synchronised batch normalisation, weights in shards."""
    module: torch.nn.Module | None = getattr(trainer, "lightning_module", None)  # None before fit
    parts = [] if module is None else module.modules()
    wanted = getattr(trainer.strategy, "_layer_sync", None) is not None
    return wanted or not whole(trainer) or any(isinstance(part, torch.nn.SyncBatchNorm) for part in parts)


class MicroBatchClosure:
    """Closure that the optimizer calls for one loaded batch; may be called several times (LBFGS)."""

    def __init__(
        self, trainer: Trainer, batches: MicroBatches, kwargs: Mapping[str, Any], optimizer: Any, batch_idx: int
    ) -> None:
        self._trainer = trainer
        self._batches = batches
        self._loop: Any = trainer.fit_loop.epoch_loop.automatic_optimization
        self._kwargs = kwargs
        self._made_of = (kwargs, optimizer, batch_idx)
        self._backward = self._loop._make_backward_fn(optimizer)
        self._zero_grad = _FreedOnce(self._loop._make_zero_grad_fn(batch_idx, optimizer))
        self._result: Any = None

    def __call__(self, *_args: Any, **_kwargs: Any) -> torch.Tensor | None:
        """Gradients of the whole batch, in micro-batches; returns the batch's loss, None if there is none."""
        self._result = self._run()
        loss: torch.Tensor | None = self._result.loss
        return loss

    def consume_result(self) -> Any:
        """The result, once: Lightning asks for it after the optimizer step."""
        result, self._result = self._result, None
        if result is None:
            raise RuntimeError(_("the optimizer step did not call its closure; call it in optimizer_step"))
        return result

    def _run(self) -> Any:
        self._zero_grad.done = False
        what = _("the batch after {steps} optimizer steps", steps=self._trainer.global_step)
        return self._batches.run(self._kwargs["batch"], self._pass, what)

    def _pass(self, batch: BatchPass) -> Any:
        """The result of the whole batch, in Lightning's form."""
        log = StepLog(self._trainer.fit_loop.epoch_loop._results, self._trainer.lightning_module)
        after = AfterBackward(self._trainer)
        with torch.enable_grad():
            with after.held_back(), log.gathering(cut=not batch.whole):
                result = self._forward_and_backward(batch, log)
                if batch.attempt is not None:
                    batch.attempt.commit()  # before what was logged is passed on
            after.call()  # which may read what was logged
        return result

    def _forward_and_backward(self, batch: BatchPass, log: StepLog) -> Any:
        if batch.as_written:
            return self._whole(batch)
        losses: list[torch.Tensor] = []
        extra = batch.run(functools.partial(self._one, log, losses, batch))
        result = self._loop.output_result_cls(None, extra=extra)
        result.loss = torch.stack(losses).sum(0) if losses else None
        return result

    def _whole(self, batch: BatchPass) -> Any:
        """The result of Lightning's own closure, for a batch that stays whole on every rank."""
        closure = type(self._loop)._make_closure(self._loop, *self._made_of)
        backward = closure._backward_fn
        if closure._zero_grad_fn is not None:
            closure._zero_grad_fn = self._zero_grad
        if backward is not None:

            def seen(loss: torch.Tensor) -> None:
                self._batches.see(loss)
                batch.backward(functools.partial(backward, loss))

            closure._backward_fn = seen
        closure()
        return closure.consume_result()

    def _one(self, log: StepLog, losses: list[torch.Tensor], batch: BatchPass, share: Share) -> dict[str, Any]:
        """training_step and backward of one micro-batch, in Lightning's order; what it returns besides the loss.

        Losses that are not weighed by samples are made known to the log, which waits for the GPU then.
        """
        log.next_micro_batch(share.samples)
        with self._gradients_stay_here(stay=not share.last):
            output = self._loop._make_step_fn({**self._kwargs, "batch": share.data})()
            if share.first:
                self._zero_grad()
            extra: dict[str, Any] = detached(output.extra)
            if output.closure_loss is None:
                warnings.warn(_("training_step returned None for a micro-batch, which is left out"), stacklevel=2)
                return extra
            if batch.loss_weight != "mean":
                log.loss(output.closure_loss * self._trainer.accumulate_grad_batches, share.weight)
            loss = share.weighted(output.closure_loss)
            losses.append(loss.detach().clone())  # gradient scaling may change the other one in place
            if self._backward is not None:
                batch.backward(functools.partial(self._backward, loss))
        return extra

    def _gradients_stay_here(self, *, stay: bool) -> contextlib.AbstractContextManager[Any]:
        """Under DDP, gradients are averaged over the ranks once, in the last micro-batch's backward."""
        if _deepspeed.used(self._trainer):
            return _deepspeed.micro_batch(self._trainer, last=not stay)
        block = getattr(self._trainer.strategy, "block_backward_sync", None)
        return block() if stay and block is not None else contextlib.nullcontext()


class _FreedOnce:
    """Frees the gradients of the last optimizer step once for a batch, however often it is tried: that is counted.

    It knows nothing of the closure that calls it: with a reference back, the closure's batch would stay on the GPU
    until Python's garbage collector runs.
    """

    def __init__(self, zero_grad: Callable[[], None] | None) -> None:
        self._zero_grad = zero_grad
        self.done = False

    def __call__(self) -> None:
        if not self.done and self._zero_grad is not None:
            self._zero_grad()
        self.done = True
