"""How FlexibleRunner's FSDPStrategy divides a model over its processes, in a form that a trace runs on one of them."""

from __future__ import annotations

import copy
import os
from typing import TYPE_CHECKING, Any

from vram_guard import techniques
from vram_guard.capture.simulated_device import move_to_simulated_device
from vram_guard.parallel.resharding import other_strategy
from vram_guard.parallel.spec import Parallel
from vram_guard.patching import replaced
from vram_guard.techniques import Recipe, Sharding
from vram_guard_mmengine._kinds import is_mmengines

if TYPE_CHECKING:
    from torch import nn

    from vram_guard.guard.applied import Applied

# ruff: noqa: SLF001 - what the strategy does to a model is its method `_wrap_model`, which subclasses replace

#: FlexibleRunner's strategies under which each process holds the whole model and nothing is moved behind the scenes.
WHOLE = ("SingleDeviceStrategy", "DDPStrategy")
SHARDED = "FSDPStrategy"


def layout_of(runner: Any) -> Parallel | None:
    """The layout that a runner's strategy puts on its model; None where every process holds the whole of it."""
    strategy = getattr(runner, "strategy", None)
    if not is_mmengines(strategy, SHARDED):
        return None
    ranks = int(runner.world_size)
    of_node = int(os.environ.get("LOCAL_WORLD_SIZE", ranks))  # torchrun says it
    frees = other_strategy(_kept(strategy), reshard=True) is None
    return Parallel(gpus=ranks, node=of_node, apply=RunnerLayout(strategy), reshard=frees, offload=on_host(runner))


def shardings_of(runner: Any, layout: Parallel) -> dict[Sharding, Parallel]:
    """Other ways in which FSDPStrategy can divide the model, by its own options."""
    way = Sharding(reshard=not layout.reshard)
    if other_strategy(_kept(runner.strategy), not layout.reshard) is None:
        return {}
    written: Any = layout.apply
    return {way: layout.with_(apply=written.with_(way), reshard=way.reshard)}


def on_host(runner: Any) -> bool:
    """True if FSDPStrategy keeps parameters, gradients and optimizer states in host memory as it is written."""
    strategy: Any = getattr(runner, "strategy", None)
    if not is_mmengines(strategy, SHARDED):
        return False
    given = (strategy.model_wrapper or {}).get("cpu_offload")
    return bool(getattr(given, "offload_params", given))


def changed_settings(strategy: Any, sharding: Sharding | None) -> dict[str, Any]:
    """Attributes of FSDPStrategy under a change of how it divides the model."""
    if sharding is None or sharding.reshard is None:
        return {}
    name = other_strategy(_kept(strategy), sharding.reshard)
    wrapper = {"type": "MMFullyShardedDataParallel", **(strategy.model_wrapper or {})}
    return {"model_wrapper": {**wrapper, "sharding_strategy": name}}


def apply(strategy: Any, recipe: Recipe, applied: Applied) -> None:
    """Let FSDPStrategy divide the model under a plan; its modules go around blocks that are checkpointed."""
    for name, value in changed_settings(strategy, recipe.sharding).items():
        applied.replace(strategy, name, value)
    own = strategy._wrap_model

    def wrap_model(model: nn.Module) -> nn.Module:
        applied.callback(techniques.install(model, recipe))
        made: nn.Module = own(model)
        return made

    applied.replace(strategy, "_wrap_model", wrap_model)


def _kept(strategy: Any) -> str:
    """The name of FullyShardedDataParallel's strategy."""
    given = (strategy.model_wrapper or {}).get("sharding_strategy") or "FULL_SHARD"
    return str(getattr(given, "name", given))


class RunnerLayout:
    """``Parallel.apply``: what MMEngine does to a model before it builds the optimizer.

    It travels between processes without its strategy: what has been traced is not traced there again.
    """

    def __init__(self, strategy: Any, sharding: Sharding | None = None) -> None:
        self._strategy = strategy
        self._sharding = sharding
        self.made: list[nn.Module] = []
        """The wrapper of the latest trace, over whose parameters the optimizer is built."""

    def with_(self, sharding: Sharding) -> RunnerLayout:
        """The same under a change of it."""
        other = RunnerLayout(self._strategy, sharding)
        other.made = self.made
        return other

    def __getstate__(self) -> dict[str, Any]:
        return {}

    def __call__(self, model: nn.Module, _mesh: Any) -> nn.Module:
        """The wrapper that ``train_step`` is called on."""
        from mmengine._strategy import fsdp

        # The wrapper's policy is taken apart where it is built.
        settings = {name: getattr(self._strategy, name) for name in ("model_wrapper", "activation_checkpointing")}
        settings = copy.deepcopy({**settings, **changed_settings(self._strategy, self._sharding)})
        with (
            replaced(self._strategy, settings),
            replaced(fsdp, {"get_device": lambda: "cuda"}),
        ):
            made: nn.Module = self._strategy._wrap_model(model)
        self.made[:] = [made]
        move_to_simulated_device(made)
        return made
