"""The dry run under FSDP2: copies of the script that go on from where its model is prepared, sharded by Accelerate.

Other techniques are put on what ``prepare`` returned, at the first training batch. FSDP2 cannot be: it replaces the
parameters, and what a script makes of them afterwards (a list for clipping, an average of weights) is made of the new
ones. So a copy of the process waits at ``prepare`` (:mod:`.fork_server`), or where Transformers'
``Trainer`` makes its Accelerator, which it asks about FSDP early. Its copies run Accelerate's own functions on the
symbolic model, among as many pretended processes as the launch will have.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Any

from vram_guard_accelerate.apply import fsdp
from vram_guard_accelerate.dry_run.fork_server import Standby
from vram_guard_accelerate.dry_run.forks import BecomeCopy
from vram_guard_accelerate.dry_run.results import stopped

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch import nn

    from vram_guard.plan.source import TraceRequest
    from vram_guard_accelerate.dry_run.run import DryRun


def stand_by(run: DryRun, accelerator: Any) -> None:
    """Leave a copy of the process here, for steps whose parameters wait on the host; at the first such place only.

    Returns in the original, and once more in every copy that was asked for, where ``run.sharded`` is set then.
    """
    if not run.may_shard or run.standby is not None or run.sharded is not None:
        return
    try:
        run.standby = Standby()
    except BecomeCopy as copy:
        run.home, run.task = copy.home, copy.task
        run.sharded = Sharded(run, copy.task, accelerator)


def made_by_trainer() -> bool:
    """Whether whoever calls our caller's caller is Transformers' ``Trainer``."""
    asker = sys._getframe(2).f_locals.get("self")  # noqa: SLF001 - who asks is the question
    return any(kind.__module__ == "transformers.trainer" for kind in type(asker).__mro__)


class Sharded:
    """In a copy: what is different there until the first training batch.

    Args:
        run: the copy's dry run.
        task: what the copy is to do.
        accelerator: the script's, which from now on takes itself for one that was launched with FSDP2.
    """

    def __init__(self, run: DryRun, task: TraceRequest, accelerator: Any) -> None:
        from accelerate import DistributedType, FullyShardedDataParallelPlugin

        from vram_guard_accelerate.dry_run.run import ACCELERATES

        self._run = run
        self._task = task
        os.environ.update(fsdp.VARIABLES)
        state = accelerator.state
        precision = ACCELERATES[task.precision]
        plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="TRANSFORMER_BASED_WRAP")
        if precision != "no":
            plugin.set_mixed_precision(precision)
            state._mixed_precision = precision  # noqa: SLF001 - see private_api.py
            accelerator.native_amp = True
        state.fsdp_plugin = plugin
        # Of the state only: what Accelerate sends between processes stays as in every dry run, where there is one.
        kind = property(lambda _state: DistributedType.FSDP, lambda _state, _other: None)
        type(state).distributed_type = kind
        self._plugin = plugin

    def prepare(self, original: Callable[..., Any], accelerator: Any, args: Any, kwargs: Any) -> Any:
        """``Accelerator.prepare``, or ``prepare_model``."""
        import torch

        run = self._run
        following = run.begin()
        models = [thing for thing in args if isinstance(thing, torch.nn.Module)]
        for model in models:
            if run.models:
                stopped("Accelerate's FSDP2 takes one model, and the script prepares another one")
            run.models.append(model)
            following.shard(model, run.ranks)
            self._plugin.transformer_cls_names_to_wrap = list(
                fsdp.wrapped_classes(model, self._task.recipe.parameters_on_host)
            )
        with fsdp.sharding(accelerator, models):
            prepared = original(accelerator, *args, **kwargs)
        for model in models:
            following.recorder.classify(model.buffers(), "buffers")
            run.watch(model)
        return prepared

    def check_clipped(self, parameters: Iterable[Any], models: list[nn.Module]) -> None:
        """What is clipped must be what is trained: a list made before ``prepare`` holds what FSDP2 has replaced."""
        own = {id(parameter) for model in models for parameter in model.parameters()}
        if any(id(parameter) not in own for parameter in parameters):
            stopped(
                "the script clips the gradients of parameters that it listed before Accelerator.prepare; FSDP2 puts "
                "others in their place there, and nothing would be clipped"
            )
