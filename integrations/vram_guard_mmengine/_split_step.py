"""Trains on a loaded batch in micro-batches, inside the model's own ``train_step``.

The runner still sees one iteration per loaded batch, so everything that counts iterations (schedules, intervals,
max_iters, logs, resume) keeps its meaning, and so does the user's own ``accumulative_counts``.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

from torch.distributed.fsdp import FullyShardedDataParallel

from vram_guard.apply.backward_hooks import why_whole
from vram_guard.apply.microbatch import Splitter
from vram_guard.language import _
from vram_guard.parallel.resharding import divided_by_fsdp2
from vram_guard.patching import replace_attributes
from vram_guard.watch.batches import BatchPass, MicroBatches, Share, cut_batches
from vram_guard_mmengine._kinds import synchronises

if TYPE_CHECKING:
    import torch

    from vram_guard.guard.guard import Guard
    from vram_guard.watch.recovery import Attempt

# ruff: noqa: SLF001 - OptimWrapper documents `_inner_count` for those who write their own backward


def install(model: Any, splitter: Splitter, guard: Guard) -> None:
    """Split the batches that reach ``model.train_step``."""
    sharded = isinstance(model, FullyShardedDataParallel) or divided_by_fsdp2(model)
    undo = cut_batches(
        functools.partial(_put, model),
        splitter,
        guard.loss_weight,
        guard.graphs,
        in_step=sharded or synchronises(model),
        why_whole=functools.partial(why_whole, model),
    )
    guard.applied.callback(undo)


def arm(model: Any, guard: Guard) -> None:
    """Have batches repeated in smaller parts where memory runs out; the optimizer's update comes after them."""
    guard.recover(functools.partial(_put, model), model, functools.partial(why_whole, model), "mmengine")


def _put(model: Any, batches: MicroBatches) -> Callable[[], None]:
    return replace_attributes(model, {"train_step": SplitTrainStep(model.train_step, batches)})


class SplitTrainStep:
    """Stands on a model in place of its ``train_step``."""

    def __init__(self, as_written: Callable[..., Any], batches: MicroBatches) -> None:
        self._as_written = as_written
        self._batches = batches

    def __call__(self, data: Any, optim_wrapper: Any) -> Any:
        """The log variables of the whole batch, as ``train_step`` returns them."""
        counted = optim_wrapper._inner_count

        def work(batch: BatchPass) -> Any:
            optim_wrapper._inner_count = counted  # as before an attempt that is repeated
            if batch.as_written and batch.attempt is None:
                return self._as_written(data, optim_wrapper=optim_wrapper)
            return batch.run(
                lambda share: self._as_written(
                    share.data, optim_wrapper=MicroBatchOptimWrapper(optim_wrapper, share, batch.attempt)
                ),
                rows=False,
            )

        return self._batches.run(data, work, _("iteration {number}", number=counted + 1))


class MicroBatchOptimWrapper:
    """The user's optimizer wrapper for one micro-batch: it updates only with the last one.

    Where recovery is armed, ``attempt`` runs the backward, and agrees before anything is updated.
    """

    def __init__(self, wrapper: Any, share: Share, attempt: Attempt | None) -> None:
        vars(self).update(_wrapper=wrapper, _share=share, _attempt=attempt)

    def __getattr__(self, name: str) -> Any:
        return getattr(vars(self)["_wrapper"], name)

    def __setattr__(self, name: str, value: Any) -> None:
        setattr(vars(self)["_wrapper"], name, value)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the wrapper, so that ``isinstance`` holds."""
        return type(vars(self)["_wrapper"])

    @contextlib.contextmanager
    def optim_context(self, model: Any) -> Iterator[None]:
        """The wrapper's own, and no averaging over processes before the last micro-batch."""
        with contextlib.ExitStack() as stack:
            # FSDP's no_sync would keep whole gradients: it reduces those of every micro-batch into its shards.
            sharded = isinstance(model, FullyShardedDataParallel)
            if not vars(self)["_share"].last and hasattr(model, "no_sync") and not sharded:
                stack.enter_context(model.no_sync())
            stack.enter_context(vars(self)["_wrapper"].optim_context(model))
            yield

    def update_params(self, loss: torch.Tensor, step_kwargs: Any = None, zero_kwargs: Any = None) -> None:
        """Backward; after the last micro-batch, whatever the wrapper does after a batch."""
        wrapper, share, attempt = (vars(self)[name] for name in ("_wrapper", "_share", "_attempt"))
        part = share.weighted(loss)
        if share.last and attempt is None:
            wrapper.update_params(part, step_kwargs=step_kwargs, zero_kwargs=zero_kwargs)
            return

        def backward() -> None:
            wrapper.backward(wrapper.scale_loss(part))

        if attempt is None:
            backward()
        else:
            attempt.backward(backward)
        if not share.last:
            wrapper._inner_count -= 1  # it counts batches, and this is a part of one
        elif wrapper.should_update():  # as OptimWrapper.update_params goes on
            wrapper.step(**(step_kwargs or {}))
            wrapper.zero_grad(**(zero_kwargs or {}))
