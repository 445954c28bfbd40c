"""Every private or undocumented name of Lightning that this package leans on, in one table.

Nothing else in the package touches a private name of Lightning. Where a release lacks one, the guard says
which and leaves that part of the training as it is; the tests fail and name it.
"""

from __future__ import annotations

from types import ModuleType

from vram_guard.private_names import PrivateName, missing_in_words

_OPTIMIZATION = "loops.optimization.automatic:_AutomaticOptimization"

#: Paths begin below the namespace, ``lightning.pytorch`` or ``pytorch_lightning``.
MICRO_BATCHES: tuple[PrivateName, ...] = (
    PrivateName("loops.fit_loop:_FitLoop.epoch_loop", "the way to the optimization loop"),
    PrivateName("loops.training_epoch_loop:_TrainingEpochLoop.automatic_optimization", "the optimization loop"),
    PrivateName("loops.training_epoch_loop:_TrainingEpochLoop._results", "what self.log has received"),
    PrivateName(
        f"{_OPTIMIZATION}._make_closure", "where a batch is trained on", parameters=("kwargs", "optimizer", "batch_idx")
    ),
    PrivateName(f"{_OPTIMIZATION}._make_step_fn", "training_step of one micro-batch", parameters=("kwargs",)),
    PrivateName(f"{_OPTIMIZATION}._make_backward_fn", "backward of one micro-batch", parameters=("optimizer",)),
    PrivateName(
        f"{_OPTIMIZATION}._make_zero_grad_fn", "freeing the gradients, once", parameters=("batch_idx", "optimizer")
    ),
    PrivateName("loops.optimization.automatic:Closure._zero_grad_fn", "freeing the gradients once a batch"),
    PrivateName("loops.optimization.automatic:Closure._backward_fn", "backward of a batch that stays whole"),
    PrivateName(f"{_OPTIMIZATION}.output_result_cls", "the result that hooks and progress bars see"),
    PrivateName("loops.optimization.automatic:ClosureResult.closure_loss", "the loss with its graph"),
    PrivateName("loops.optimization.automatic:ClosureResult.loss", "the loss that hooks see"),
    PrivateName("loops.optimization.automatic:ClosureResult.extra", "further outputs of training_step"),
    PrivateName(
        "trainer.connectors.logger_connector.result:_ResultCollection.log",
        "logging a step's micro-batches as one value",
        parameters=("fx", "name", "value"),
    ),
    PrivateName(
        "trainer.connectors.logger_connector.result:_ResultMetric._forward_cache",
        "a metric's value for a step, which is read from the attribute of the same name of torchmetrics' Metric",
    ),
    PrivateName(
        "plugins.precision:Precision.post_backward", "on_after_backward, once a batch", parameters=("tensor", "module")
    ),
)

CAPTURE: tuple[PrivateName, ...] = (
    PrivateName("loops.fit_loop:_FitLoop._data_source", "the user's train dataloader, asked for once more"),
    PrivateName("trainer.connectors.data_connector:_DataLoaderSource.dataloader", "the same"),
    PrivateName(
        "core.module:LightningModule._trainer", "a Trainer whose step estimate loads nothing, during the trace"
    ),
    PrivateName("core.module:LightningModule._current_fx_name", "user code that asks which hook is running"),
    PrivateName("core.module:LightningModule._compiler_ctx", "whether the module was compiled as a whole"),
    PrivateName("core.optimizer:LightningOptimizer.optimizer", "the optimizer inside the wrapper"),
)

GROWTH: tuple[PrivateName, ...] = (
    PrivateName("loops.fit_loop:_FitLoop._data_source", "changing the batch size of the loader it hands out"),
    PrivateName("trainer.connectors.data_connector:_DataLoaderSource.dataloader", "the same"),
)

LAYOUTS: tuple[PrivateName, ...] = (
    PrivateName("strategies.strategy:Strategy._forward_redirection", "training_step through FSDP's wrapper"),
    PrivateName(
        "strategies:FSDPStrategy._setup_model", "FSDP as the strategy puts it on a model", parameters=("model",)
    ),
    PrivateName("strategies:FSDPStrategy._activation_checkpointing_kwargs", "blocks that are checkpointed already"),
    PrivateName("strategies:ModelParallelStrategy._device_mesh", "pretended ranks for configure_model"),
    PrivateName("trainer.call:_call_configure_model", "configure_model in Lightning's contexts"),
    PrivateName(
        "strategies.model_parallel:_materialize_distributed_module", "weights that were made on the meta device"
    ),
    PrivateName("strategies:DeepSpeedStrategy._format_config", "DeepSpeed's config as the strategy hands it over"),
    PrivateName("strategies:DeepSpeedStrategy._config_initialized", "whether it has done so already"),
)

DIVIDING: tuple[PrivateName, ...] = (
    PrivateName("strategies:DDPStrategy._ddp_comm_hook", "gradients averaged in the user's own way"),
    PrivateName("strategies:DDPStrategy._ddp_comm_state", "the same"),
    PrivateName("strategies:DDPStrategy._ddp_kwargs", "what DDP was asked for"),
    PrivateName("strategies:DDPStrategy.configure_ddp", "no wrapper where FSDP2 divides the model"),
    PrivateName("strategies:DDPStrategy.model_to_device", "the model is divided before it is moved"),
)

_EVALUATION = "loops.evaluation_loop:_EvaluationLoop"
_CHECKPOINTS = "trainer.connectors.checkpoint_connector:_CheckpointConnector"

JOB: tuple[PrivateName, ...] = (
    PrivateName("trainer.trainer:Trainer._run_sanity_check", "the sanity check in a trace"),
    PrivateName("trainer.trainer:Trainer._logger_connector", "nothing is logged in a trace"),
    PrivateName("trainer.trainer:Trainer._checkpoint_connector", "a checkpoint's states in a trace"),
    PrivateName("loops.training_epoch_loop:_TrainingEpochLoop.val_loop", "validation in a trace"),
    PrivateName("loops.training_epoch_loop:_TrainingEpochLoop._should_check_val_fx", "one validation in a trace"),
    PrivateName("loops.training_epoch_loop:_TrainingEpochLoop._should_accumulate", "where a step ends"),
    PrivateName("loops.training_epoch_loop:_TrainingEpochLoop._results", "what self.log has received"),
    PrivateName("loops.loop:_Loop.restarting", "what a checkpoint was saved in the middle of"),
    PrivateName("loops.fit_loop:_FitLoop._combined_loader", "the loaders of an epoch"),
    PrivateName(f"{_EVALUATION}._data_source", "the validation loaders, asked for once more"),
    PrivateName(f"{_EVALUATION}._combined_loader", "two batches in place of the validation loaders"),
    PrivateName(f"{_EVALUATION}._results", "what self.log has received"),
    PrivateName(
        f"{_EVALUATION}._evaluation_step",
        "a round that stands for many",
        parameters=("batch", "batch_idx", "dataloader_idx"),
    ),
    PrivateName("utilities.combined_loader:CombinedLoader._mode", "loaders that are read together"),
    PrivateName("utilities.combined_loader:CombinedLoader._iterator", "the batches that are followed"),
    PrivateName("utilities.combined_loader:_SUPPORTED_MODES", "how many batches loaders have together"),
    PrivateName("loops.fetchers:_DataFetcher.__next__", "no batch is fetched ahead"),
    PrivateName("loops.fetchers:_PrefetchDataFetcher.__next__", "the same"),
    PrivateName(f"{_CHECKPOINTS}._loaded_checkpoint", "the checkpoint that is resumed from"),
    PrivateName(f"{_CHECKPOINTS}.restore_training_state", "its states and counters"),
    PrivateName("trainer.call:_call_callback_hooks", "hooks of later epochs"),
    PrivateName("trainer.call:_call_lightning_module_hook", "the same"),
)

#: Which later releases have; nothing is lost where there is none.
LATER: tuple[PrivateName, ...] = (
    PrivateName(
        "loops.training_epoch_loop:_TrainingEpochLoop._broadcast_sigterm_tensor", "no other rank is there to be told"
    ),
)

TABLE: tuple[PrivateName, ...] = tuple(
    dict.fromkeys((*MICRO_BATCHES, *CAPTURE, *GROWTH, *LAYOUTS, *DIVIDING, *JOB, *LATER))
)


def missing(namespace: ModuleType, names: tuple[PrivateName, ...] = TABLE) -> list[str]:
    """The names that this release of Lightning does not have, in words; empty when everything is there."""
    return missing_in_words(name.within(namespace.__name__) for name in names)
