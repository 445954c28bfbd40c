"""DeepSpeed set up otherwise than it was launched: another stage of ZeRO, the optimizer's states on the host.

Its settings change where the script hands its model to ``prepare``, not before: under stage 3 Transformers makes models
in ``deepspeed.zero.Init``, where the numbers that new weights are drawn from are others.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any

from vram_guard.errors import UnsupportedTechniqueError
from vram_guard.language import _
from vram_guard_accelerate._sharding_change import ShardingChange

if TYPE_CHECKING:
    from torch import nn


@contextlib.contextmanager
def changed(accelerator: Any, models: Sequence[nn.Module], change: ShardingChange) -> Iterator[None]:
    """Around ``Accelerator.prepare``.

    Args:
        accelerator: the script's.
        models: that are prepared; without one, no engine is made.
        change: of the launch.

    Raises:
        UnsupportedTechniqueError: DeepSpeed does not train here.
    """
    if not (change.by_engine and models):
        yield
        return
    plugin = accelerator.deepspeed_plugin
    if plugin is None:
        raise UnsupportedTechniqueError(
            _(
                "the plan sets up DeepSpeed otherwise, and Accelerate does not use it here ({kind}): plan again for "
                "this launch (--advanced remember=false)",
                kind=accelerator.distributed_type,
            )
        )
    change.put_on_engine(plugin)
    yield
    if hasattr(plugin, "dschf"):  # what Transformers asks, when it generates text, about weights that are divided
        plugin.set_deepspeed_weakref()
