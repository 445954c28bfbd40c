"""Every private or undocumented name of Lightning that this package leans on, in one table.

Nothing else in the package touches a private name of Lightning. Where a release lacks one, the guard says
which and leaves that part of the training as it is; the tests fail and name it.
"""

from __future__ import annotations

import inspect
from types import ModuleType
from typing import Any, NamedTuple

from vram_guard_lightning import namespaces


class PrivateName(NamedTuple):
    """One name that Lightning does not promise to keep."""

    where: str
    """Path of the class or function below the namespace."""
    attribute: str
    """Attribute of the class (set on it, or in its ``__init__``); "" for the class or function itself."""
    parameters: tuple[str, ...]
    """Parameters that a method must take, in this order; () where it is no method or takes any."""
    used_for: str


_OPTIMIZATION = "loops.optimization.automatic._AutomaticOptimization"

MICRO_BATCHES: tuple[PrivateName, ...] = (
    PrivateName("loops.fit_loop._FitLoop", "epoch_loop", (), "the way to the optimization loop"),
    PrivateName("loops.training_epoch_loop._TrainingEpochLoop", "automatic_optimization", (), "the optimization loop"),
    PrivateName("loops.training_epoch_loop._TrainingEpochLoop", "_results", (), "what self.log has received"),
    PrivateName(_OPTIMIZATION, "_make_closure", ("kwargs", "optimizer", "batch_idx"), "where a batch is trained on"),
    PrivateName(_OPTIMIZATION, "_make_step_fn", ("kwargs",), "training_step of one micro-batch"),
    PrivateName(_OPTIMIZATION, "_make_backward_fn", ("optimizer",), "backward of one micro-batch"),
    PrivateName(_OPTIMIZATION, "_make_zero_grad_fn", ("batch_idx", "optimizer"), "freeing the gradients, once"),
    PrivateName(_OPTIMIZATION, "output_result_cls", (), "the result that hooks and progress bars see"),
    PrivateName("loops.optimization.automatic.ClosureResult", "closure_loss", (), "the loss with its graph"),
    PrivateName("loops.optimization.automatic.ClosureResult", "loss", (), "the loss that hooks see"),
    PrivateName("loops.optimization.automatic.ClosureResult", "extra", (), "further outputs of training_step"),
    PrivateName(
        "trainer.connectors.logger_connector.result._ResultCollection",
        "log",
        ("fx", "name", "value"),
        "logging a step's micro-batches as one value",
    ),
)

CAPTURE: tuple[PrivateName, ...] = (
    PrivateName("loops.fit_loop._FitLoop", "_data_source", (), "the user's train dataloader, asked for once more"),
    PrivateName("trainer.connectors.data_connector._DataLoaderSource", "dataloader", (), "the same"),
    PrivateName(
        "core.module.LightningModule",
        "_trainer",
        (),
        "a Trainer whose step estimate loads nothing, during the trace",
    ),
    PrivateName("core.module.LightningModule", "_current_fx_name", (), "user code that asks which hook is running"),
    PrivateName("core.module.LightningModule", "_compiler_ctx", (), "whether the module was compiled as a whole"),
    PrivateName("core.optimizer.LightningOptimizer", "optimizer", (), "the optimizer inside the wrapper"),
)

GROWTH: tuple[PrivateName, ...] = (
    PrivateName("loops.fit_loop._FitLoop", "_data_source", (), "changing the batch size of the loader it hands out"),
    PrivateName("trainer.connectors.data_connector._DataLoaderSource", "dataloader", (), "the same"),
)

RECOVERY: tuple[PrivateName, ...] = (
    PrivateName("loops.fit_loop._FitLoop", "_should_accumulate", (), "whether a batch ends an optimizer step"),
    PrivateName("loops.optimization.automatic.Closure", "_zero_grad_fn", (), "freeing the gradients once a batch"),
    PrivateName("loops.training_epoch_loop._TrainingEpochLoop", "val_loop", (), "the validation loop"),
    PrivateName("loops.evaluation_loop._EvaluationLoop", "_results", (), "what self.log has received"),
    PrivateName("strategies.parallel.ParallelStrategy", "_layer_sync", (), "synchronised batch normalisation"),
    PrivateName("strategies.DDPStrategy", "_ddp_comm_hook", (), "gradients averaged in the user's own way"),
    PrivateName("strategies.DDPStrategy", "_ddp_comm_state", (), "the same"),
)

TABLE: tuple[PrivateName, ...] = tuple(dict.fromkeys((*MICRO_BATCHES, *CAPTURE, *GROWTH, *RECOVERY)))


def missing(namespace: ModuleType, names: tuple[PrivateName, ...] = TABLE) -> list[str]:
    """What this release of Lightning does not have, in words; empty when everything is there."""
    broken = [(name, _what_is_wrong(namespace, name)) for name in names]
    return [f"{namespace.__name__}.{name.where}.{name.attribute}: {fault}" for name, fault in broken if fault]


def _what_is_wrong(namespace: ModuleType, name: PrivateName) -> str:
    try:
        owner = namespaces.part(namespace, name.where)
    except (ImportError, AttributeError):
        return f"there is no such class (used for: {name.used_for})"
    if not _has(owner, name.attribute):
        return f"there is no such attribute (used for: {name.used_for})"
    if name.parameters:
        given = tuple(inspect.signature(getattr(owner, name.attribute)).parameters)[1:]
        if given[: len(name.parameters)] != name.parameters:
            return f"takes {given}, not {name.parameters} (used for: {name.used_for})"
    return ""


def _has(owner: Any, attribute: str) -> bool:
    """Whether instances have it: on the class, annotated (a data class), or assigned in ``__init__``."""
    annotated = any(attribute in vars(base).get("__annotations__", {}) for base in owner.__mro__)
    source = inspect.getsource(owner)
    return hasattr(owner, attribute) or annotated or f"self.{attribute} =" in source or f"self.{attribute}:" in source
