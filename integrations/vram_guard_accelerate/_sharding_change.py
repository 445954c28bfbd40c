"""Changes of how a model is divided over the processes, by the options that Accelerate and DeepSpeed read."""

from __future__ import annotations

import os
import socket
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any, Literal

from vram_guard.parallel import deepspeed
from vram_guard.techniques.recipe import Sharding

#: What ``accelerate launch`` passes to a script (``accelerate.utils.launch``) where the guard switches FSDP2 on.
INTRODUCED = {
    "ACCELERATE_USE_FSDP": "true",
    "FSDP_VERSION": "2",
    "FSDP_RESHARD_AFTER_FORWARD": "true",
    # Every process makes or loads its own model, as without FSDP: loading on the first alone unties tied weights of
    # models without `tie_weights`, and fails on buffers (`fsdp2_load_full_state_dict`).
    "FSDP_CPU_RAM_EFFICIENT_LOADING": "false",
    # Checkpoints of `save_state` hold whole tensors, in one file.
    "FSDP_STATE_DICT_TYPE": "FULL_STATE_DICT",
}


@dataclass(frozen=True)
class ShardingChange:
    """A change of how the model is divided.

    Attributes:
        introduced: FSDP2 in place of DistributedDataParallel, or of one process alone.
        wrapped: for that: the classes of the modules that are gathered one at a time; none: the model is one group.
        reshard: gathered weights are freed after the forward, and gathered again for the backward pass.
        strategy: for that, under FSDP1: the name of the strategy that does so; "": under FSDP2.
        offload: parameters, gradients and optimizer states lie in host memory.
        stage: of DeepSpeed's ZeRO; None: as launched.
        states_on_host: DeepSpeed keeps its optimizer's states, and weights in float32, in host memory.
    """

    introduced: bool = False
    wrapped: tuple[str, ...] = ()
    reshard: bool = False
    strategy: str = ""
    offload: bool = False
    stage: int | None = None
    states_on_host: bool = False

    @property
    def by_engine(self) -> bool:
        """True if DeepSpeed is set up otherwise."""
        return self.states_on_host or self.stage is not None

    @property
    def kind(self) -> Literal["", "shard", "offload", "reshard"]:
        """The part of it that changes most."""
        if self.introduced:
            return "shard"
        if self.offload or self.states_on_host:
            return "offload"
        return "reshard" if self.reshard else "shard" if self.stage is not None else ""

    @property
    def planned(self) -> Sharding | None:
        """The same as plans have it; None where nothing is changed."""
        if not self.kind:
            return None
        return Sharding(self.introduced, self.reshard or None, self.offload, self.stage, self.states_on_host)

    @property
    def variables(self) -> dict[str, str]:
        """Variables of a script's environment."""
        found = dict(INTRODUCED) if self.introduced else {}
        if self.introduced:
            found["FSDP_AUTO_WRAP_POLICY"] = "TRANSFORMER_BASED_WRAP" if self.wrapped else "NO_WRAP"
        if self.wrapped:
            found["FSDP_TRANSFORMER_CLS_TO_WRAP"] = ",".join(self.wrapped)
        if self.reshard:
            found["FSDP_SHARDING_STRATEGY" if self.strategy else "FSDP_RESHARD_AFTER_FORWARD"] = self.strategy or "true"
        if self.offload:  # with both, Accelerate makes a process group that reduces tensors on the host too
            found.update(ACCELERATE_USE_FSDP="true", FSDP_OFFLOAD_PARAMS="true")
        return found

    @property
    def options(self) -> list[str]:
        """The same, as options of ``accelerate launch``; of DeepSpeed, as settings of its config."""
        words = ["--use_fsdp", "--fsdp_version", "2"] if self.introduced else []
        words += ["--fsdp_transformer_layer_cls_to_wrap", ",".join(self.wrapped)] if self.wrapped else []
        if self.strategy:
            words += ["--fsdp_sharding_strategy", self.strategy]
        elif self.reshard:
            words += ["--fsdp_reshard_after_forward", "true"]
        words += ["--fsdp_offload_params", "true"] if self.offload else []
        return [*words, *deepspeed.settings_of(self.planned or Sharding())]

    def announce(self, environment: MutableMapping[str, str] | None = None) -> None:
        """Set up Accelerate before the script makes its Accelerator, in every process of the launch.

        Args:
            environment: the process's variables so far; None: ``os.environ``.
        """
        environment = os.environ if environment is None else environment
        environment.update(self.variables)
        if self.introduced and "LOCAL_RANK" not in environment:
            environment.update(RANK="0", LOCAL_RANK="0", WORLD_SIZE="1", LOCAL_WORLD_SIZE="1")
            environment.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(_free_port()))

    def put_on(self, plugin: Any) -> None:
        """Change Accelerate's settings of FSDP, wherever they come from: variables, a config, or the script itself."""
        if self.strategy:
            plugin.sharding_strategy = type(strategy_of(plugin))[self.strategy]
        elif self.reshard:
            plugin.reshard_after_forward = True
        if self.offload:
            plugin.cpu_offload = True
            plugin.set_cpu_offload()

    def put_on_engine(self, plugin: Any) -> None:
        """Change Accelerate's settings of DeepSpeed, wherever they come from."""
        if not self.by_engine:
            return
        plugin.deepspeed_config.update(deepspeed.changed(plugin.deepspeed_config, self.planned or Sharding()))
        plugin.hf_ds_config.set_stage_and_offload()
        plugin.zero_stage = plugin.get_value("zero_optimization.stage")
        if self.states_on_host:
            plugin.offload_optimizer_device = "cpu"


def strategy_of(plugin: Any) -> Any:
    """The ``ShardingStrategy`` of FSDP1, which Accelerate's settings have in one of two places."""
    return plugin.sharding_strategy or plugin.reshard_after_forward


AS_LAUNCHED = ShardingChange()


def _free_port() -> int:
    """For the process group that FSDP2 needs, though it has one process only."""
    with socket.socket() as tried:
        tried.bind(("127.0.0.1", 0))
        port: int = tried.getsockname()[1]
        return port
