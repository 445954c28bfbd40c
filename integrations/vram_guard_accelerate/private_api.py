"""Every private or undocumented name of Accelerate that this package leans on, in one table."""

from __future__ import annotations

from vram_guard.private_names import PrivateName

TABLE: tuple[PrivateName, ...] = (
    PrivateName("accelerate.state:AcceleratorState.fsdp_plugin", "FSDP in the dry run"),
    PrivateName("accelerate.commands.launch:launch_command_parser", "where a script begins among the arguments"),
    PrivateName("accelerate.commands.launch:launch_command", "the launchers for several processes"),
    PrivateName("accelerate.commands.launch:_validate_launch_command", "config file, defaults and contradictions"),
    PrivateName("accelerate.utils.launch:prepare_simple_launcher_cmd_env", "the environment of a script"),
    PrivateName("accelerate.accelerator:convert_outputs_to_fp32", "mixed precision for prepared models"),
    PrivateName("accelerate.accelerator:get_mixed_precision_context_manager", "mixed precision as Accelerate has it"),
    PrivateName("accelerate.accelerator:Accelerator._models", "the prepared models"),
    PrivateName("accelerate.accelerator:Accelerator._optimizers", "the prepared optimizers"),
    PrivateName("accelerate.accelerator:load_accelerator_state", "resuming"),
    PrivateName("accelerate.checkpointing:load_model", "resuming from safetensors"),
    PrivateName("accelerate.accelerator:Accelerator._schedulers", "the prepared schedulers"),
    PrivateName("accelerate.accelerator:Accelerator._custom_objects", "schedulers that are registered for checkpoints"),
    PrivateName("accelerate.scheduler:AcceleratedScheduler.scheduler", "the script's own scheduler"),
    PrivateName("accelerate.accelerator:Accelerator.native_amp", "mixed precision for prepared models"),
    PrivateName("accelerate.accelerator:Accelerator.autocast_handler", "mixed precision for prepared models"),
    PrivateName("accelerate.optimizer:patch_optimizer_step", "steps that a GradScaler skips"),
    PrivateName("accelerate.optimizer:AcceleratedOptimizer.optimizer", "the script's own optimizer"),
    PrivateName("accelerate.data_loader:send_to_device", "when a batch arrives on the GPU"),
    PrivateName("accelerate.state:AcceleratorState._mixed_precision", "the precision, and another one"),
    PrivateName("accelerate.state:AcceleratorState._shared_state", "one process with a GPU, in a copy"),
    PrivateName("accelerate.state:PartialState._shared_state", "one process with a GPU, in a copy"),
    PrivateName("accelerate.local_sgd:LocalSGD", "what is refused by name"),
)
