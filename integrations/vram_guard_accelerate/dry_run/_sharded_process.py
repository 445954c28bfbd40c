"""The dry run under FSDP, which Accelerate puts on the symbolic model where the script prepares it.

The launch, or the script, is configured so: then all of the dry run is sharded as its plugin says, by Accelerate's own
functions, among as many pretended processes as the launch will have.
"""

from __future__ import annotations

import os
from typing import Any


def plugin_of(given: Any) -> Any:
    """The settings of FSDP that an Accelerator will have: the script's, or those of ``accelerate launch``; or None.

    Args:
        given: that the script passes to the Accelerator, if it does.
    """
    if given is None and os.environ.get("ACCELERATE_USE_FSDP", "false").lower() != "true":
        return None
    from accelerate import FullyShardedDataParallelPlugin

    return FullyShardedDataParallelPlugin() if given is None else given


class ShardedProcess:
    """A process whose Accelerator takes itself for one of several that were launched with FSDP.

    Args:
        accelerator: the script's.
        plugin: Accelerate's settings of FSDP.
    """

    def __init__(self, accelerator: Any, plugin: Any) -> None:
        from accelerate import DistributedType

        self.plugin = plugin
        self.fsdp_version = int(plugin.fsdp_version)
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
        return self.fsdp_version == 1
