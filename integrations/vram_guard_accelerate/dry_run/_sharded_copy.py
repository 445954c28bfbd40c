"""The dry run under FSDP, which Accelerate puts on the symbolic model where the script prepares it.

Either the launch is configured so: then all of the dry run is sharded as its plugin says. Or the plan asks for
parameters on the host: other techniques are put on what ``prepare`` returned, at the first training batch. FSDP2 cannot
be: it replaces the parameters, and what a script makes of them afterwards (a list for clipping, an average of weights)
is made of the new ones. So a copy of the process waits at ``prepare`` (:mod:`.fork_server`), or where Transformers'
``Trainer`` makes its Accelerator, which it asks about FSDP early. Its copies run Accelerate's own functions on the
symbolic model, among as many pretended processes as the launch will have.
"""

from __future__ import annotations

import os
from contextlib import AbstractContextManager
from typing import TYPE_CHECKING, Any

from vram_guard_accelerate._precision import ACCELERATES
from vram_guard_accelerate._sharding_change import AS_LAUNCHED, ShardingChange
from vram_guard_accelerate.apply import fsdp
from vram_guard_accelerate.dry_run._engine import EngineProcess
from vram_guard_accelerate.dry_run._fork_server import ForkServer
from vram_guard_accelerate.dry_run._fork_task import ForkTask
from vram_guard_accelerate.dry_run.forks import ForkEntered, ParentPipe

if TYPE_CHECKING:
    from torch import nn

    from vram_guard_accelerate.dry_run.first_batch import LaunchShape


class RunSharding:
    """The server from which sharded copies begin; in a process that is sharded, what is different there.

    Args:
        may_shard: whether the plan may keep parameters on the host, in copies.
        change: of how the launch, or the script, shards the model.
    """

    def __init__(self, *, may_shard: bool, change: ShardingChange = AS_LAUNCHED) -> None:
        self.may_shard = may_shard
        self.change = change
        self.server: ForkServer | None = None
        self.copy: ShardedCopy | None = None
        self.configured: ShardedProcess | EngineProcess | None = None

    @property
    def process(self) -> ShardedProcess | EngineProcess | None:
        """What is different in this process; None where its models stay whole."""
        return self.copy or self.configured

    def configure(self, accelerator: Any, plugin: Any) -> None:
        """The launch, or the script, has chosen FSDP itself."""
        self.may_shard = False
        self.configured = ShardedProcess(accelerator, plugin, self.change)

    def configure_engine(self, plugin: Any, shape: LaunchShape) -> None:
        """The launch, or the script, has chosen DeepSpeed itself."""
        self.may_shard = False
        self.configured = EngineProcess(plugin, shape, self.change)

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


class ShardedProcess:
    """A process whose Accelerator takes itself for one of several that were launched with FSDP.

    Args:
        accelerator: the script's.
        plugin: Accelerate's settings of FSDP.
        change: what is in them that the launch, or the script, has not chosen.
    """

    def __init__(self, accelerator: Any, plugin: Any, change: ShardingChange) -> None:
        from accelerate import DistributedType

        self.plugin = plugin
        self.change = change
        self.state = state = accelerator.state
        if accelerator.mixed_precision != "no":
            plugin.set_mixed_precision(accelerator.mixed_precision)
        state.fsdp_plugin = plugin
        # Of the state only: what Accelerate sends between processes stays as in every dry run, where there is one.
        kind = property(lambda _state: DistributedType.FSDP, lambda _state, _other: None)
        type(state).distributed_type = kind

    @property
    def flat(self) -> bool:
        """True for FSDP's first version, which makes flat parameters of the model's own."""
        return bool(self.plugin.fsdp_version == 1)

    def wrap_blocks(self, model: nn.Module) -> None:
        """Say which blocks of this model are groups of their own, where the plugin does not."""

    def around(self, accelerator: Any, models: list[nn.Module]) -> AbstractContextManager[None]:
        """What is done around ``Accelerator.prepare``, in a real launch too: see :func:`.fsdp.sharding`."""
        return fsdp.sharding(accelerator, models, self.change)


class ShardedCopy(ShardedProcess):
    """A copy that is sharded because its task says so.

    Args:
        task: what the copy is to do.
        parent: the way back to the original.
        accelerator: the script's.
    """

    def __init__(self, task: ForkTask, parent: ParentPipe, accelerator: Any) -> None:
        from accelerate import FullyShardedDataParallelPlugin

        self.task = task
        self.parent = parent
        os.environ.update(fsdp.ON_HOST.variables)
        precision = ACCELERATES[task.request.precision]
        if precision != "no":
            accelerator.state._mixed_precision = precision  # noqa: SLF001 - see private_api.py
            accelerator.native_amp = True
        plugin = FullyShardedDataParallelPlugin(auto_wrap_policy="TRANSFORMER_BASED_WRAP")
        super().__init__(accelerator, plugin, fsdp.ON_HOST)

    def wrap_blocks(self, model: nn.Module) -> None:
        """The blocks of this model that the task names are groups of their own."""
        blocks = self.task.request.recipe.parameters_on_host
        self.plugin.transformer_cls_names_to_wrap = list(fsdp.wrapped_classes(model, blocks))
