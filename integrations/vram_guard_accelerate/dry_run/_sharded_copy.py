"""The dry run under FSDP2: copies of the script that go on from where its model is prepared, sharded by Accelerate.

Other techniques are put on what ``prepare`` returned, at the first training batch. FSDP2 cannot be: it replaces the
parameters, and what a script makes of them afterwards (a list for clipping, an average of weights) is made of the new
ones. So a copy of the process waits at ``prepare`` (:mod:`.fork_server`), or where Transformers' ``Trainer`` makes its
Accelerator, which it asks about FSDP early. Its copies run Accelerate's own functions on the symbolic model, among as
many pretended processes as the launch will have.
"""

from __future__ import annotations

import os
from typing import TYPE_CHECKING, Any

from vram_guard_accelerate._precision import ACCELERATES
from vram_guard_accelerate.apply import fsdp
from vram_guard_accelerate.dry_run._fork_server import ForkServer
from vram_guard_accelerate.dry_run._fork_task import ForkTask
from vram_guard_accelerate.dry_run.forks import ForkEntered, ParentPipe

if TYPE_CHECKING:
    from torch import nn


class Sharding:
    """The server from which sharded copies begin; in such a copy, what is different there."""

    def __init__(self, *, may_shard: bool) -> None:
        self.may_shard = may_shard
        self.server: ForkServer | None = None
        self.copy: ShardedCopy | None = None

    def start_server(self, accelerator: Any) -> None:
        """Leave a copy of the process here, for steps whose parameters are kept on the host; at the first place only.

        Returns in the original, and once more in every copy that was asked for, where ``copy`` is set then.
        """
        if not self.may_shard or self.server is not None or self.copy is not None:
            return
        try:
            self.server = ForkServer()
        except ForkEntered as entered:
            self.copy = ShardedCopy(entered.task, entered.parent, accelerator)


class ShardedCopy:
    """A copy whose Accelerator takes itself for one that was launched with FSDP2.

    Args:
        task: what the copy is to do.
        parent: the way back to the original.
        accelerator: the script's.
    """

    def __init__(self, task: ForkTask, parent: ParentPipe, accelerator: Any) -> None:
        from accelerate import DistributedType, FullyShardedDataParallelPlugin

        self.task = task
        self.parent = parent
        os.environ.update(fsdp.VARIABLES)
        state = accelerator.state
        precision = ACCELERATES[task.request.precision]
        self._plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="TRANSFORMER_BASED_WRAP")
        if precision != "no":
            self._plugin.set_mixed_precision(precision)
            state._mixed_precision = precision  # noqa: SLF001 - see private_api.py
            accelerator.native_amp = True
        state.fsdp_plugin = self._plugin
        # Of the state only: what Accelerate sends between processes stays as in every dry run, where there is one.
        kind = property(lambda _state: DistributedType.FSDP, lambda _state, _other: None)
        type(state).distributed_type = kind

    def wrap_blocks(self, model: nn.Module) -> None:
        """The blocks of this model that the task names are groups of their own."""
        blocks = self.task.request.recipe.parameters_on_host
        self._plugin.transformer_cls_names_to_wrap = list(fsdp.wrapped_classes(model, blocks))
