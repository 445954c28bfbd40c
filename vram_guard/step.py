"""TrainingStep: what the user trains, as values and callables."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

from vram_guard.checks import checked_count, one_of, takes
from vram_guard.errors import InvalidInputError
from vram_guard.job import Job
from vram_guard.language import _
from vram_guard.limits import LARGEST_BATCH
from vram_guard.parallel.spec import Parallel, data_parallel
from vram_guard.techniques.recipe import AS_WRITTEN, Body, Recipe, Sharding

if TYPE_CHECKING:
    import torch

__all__ = [
    "KEEPS",
    "LARGEST_BATCH",
    "PRECISIONS",
    "ZERO_GRADS",
    "Keeps",
    "Precision",
    "TrainingStep",
    "ZeroGrad",
    "checked_count",
]

Precision = Literal["32-true", "16-mixed", "bf16-mixed", "16-true", "bf16-true"]
ZeroGrad = Literal["after_step", "before_forward", "before_backward"]
Keeps = Literal["nothing", "loss", "outputs"]

PRECISIONS: tuple[str, ...] = get_args(Precision)
ZERO_GRADS: tuple[str, ...] = get_args(ZeroGrad)
KEEPS: tuple[str, ...] = get_args(Keeps)


@dataclass(frozen=True)
class TrainingStep:
    """One optimizer step as the user wrote it, in a form that can be run symbolically.

    Attributes:
        model: an ``nn.Module`` (left exactly as it is), or a zero-argument callable that builds one
            (built symbolically: no memory is taken for its weights).
        batch: a callable ``batch_size -> batch`` (any pytree of tensors), or one example batch whose
            tensors share the leading batch dimension.
        loss: ``(model, batch) -> scalar loss``, or a pair (loss, outputs), a dict with "loss", an object with
            ``.loss``; for inference its result is ignored.
        optimizer: ``parameters -> torch.optim.Optimizer``; None for inference (forward only, no grad).
        precision: Lightning's words, see :data:`PRECISIONS`.
        accumulate: micro-batches per optimizer step.
        zero_grad: when gradients are freed: "after_step" (plain loops, MMEngine), "before_forward",
            or "before_backward" (Lightning: gradients live through the next forward).
        clip_grad_norm: the maximum norm handed to ``clip_grad_norm_`` before the step, or None.
        clip_grad_value: the bound handed to ``clip_grad_value_`` before the step, or None.
        data_parallel_ranks: processes that share the work under DistributedDataParallel: the layout is
            ``Parallel(gpus=data_parallel_ranks, kind="ddp")``, but ``loss`` is called with the model itself and is
            wrapped as a whole, as frameworks do.
        whole_batch: the micro-batches are slices of one loaded batch, which stays on the device while they
            run (the guard splits batches so); False: each micro-batch is loaded by itself.
        prepare: called once with the model, on the simulated device, before the optimizer is made
            (what a framework does there: ``configure_model``, wrapping blocks, ...).
        recipe: techniques that are switched on for the step, see :class:`Recipe`.
        keeps: what the loop's names hold from one iteration into the next. "loss": a plain loop's ``loss``, until it is
            assigned again; what else ``loss`` makes dies when it returns. "outputs": also the rest of what it returns
            (``logits``, ``outputs``), until the next forward of the model has ended: let it return them beside the
            loss. "nothing": the loop's body is a function (Lightning, MMEngine), and its names end with the step.
        device: the device on which the step really runs. "cuda": the model and the batch lie on it, every other
            tensor where the code puts it, and a tensor of the host beside one of the GPU is an error as in CUDA. "cpu"
            (a Trainer without a GPU, of which a GPU's memory is asked): the code's own tensors lie with the rest.
        parallel: how the step is spread over several GPUs, see :class:`Parallel`: one rank is predicted, and ``batch``
            is what that rank loads. None: one GPU (or DistributedDataParallel, with ``data_parallel_ranks``).
        ddp_options: arguments of DistributedDataParallel besides the model (``gradient_as_bucket_view``,
            ``static_graph``, ``find_unused_parameters``, ``bucket_cap_mb``), where that is used.
        deepspeed_config: DeepSpeed's config, where its engine is used: the section "zero_optimization" counts;
            precision, batch sizes, accumulation and clipping are those of the step.
        shardings: other ways to divide the step over its processes that a plan may choose, each with its layout; asked
            once the step as written has been traced. None: there are none.
        job: what the run does besides its steps (evaluation, saving, resuming, schedules), see
            :class:`~vram_guard.job.Job`; None: nothing, and two optimizer steps are followed.
        body: the module that may run over slices of its batch, see :class:`~vram_guard.techniques.Body`; None: none is
            known.
        update_compiled: options of ``torch.compile`` under which a framework clips gradients and steps the optimizer
            (MMEngine, whose ``train_step`` does both); None: these are not compiled.

    Example:
        >>> step = TrainingStep(
        ...     model=lambda: torch.nn.Linear(256, 256),
        ...     batch=lambda size: torch.ones(size, 256),
        ...     loss=lambda model, batch: model(batch).sum(),
        ...     optimizer=torch.optim.Adam,
        ... )
        >>> step.with_(precision="bf16-mixed").precision
        'bf16-mixed'
    """

    model: torch.nn.Module | Callable[[], torch.nn.Module]
    batch: Any
    loss: Callable[[Any, Any], Any]
    optimizer: Callable[[Any], torch.optim.Optimizer] | None = None
    precision: Precision = "32-true"
    accumulate: int = 1
    zero_grad: ZeroGrad = "after_step"
    clip_grad_norm: float | None = None
    clip_grad_value: float | None = None
    data_parallel_ranks: int = 1
    whole_batch: bool = False
    prepare: Callable[[Any], None] | None = None
    recipe: Recipe = AS_WRITTEN
    keeps: Keeps = "loss"
    device: Literal["cuda", "cpu"] = "cuda"
    parallel: Parallel | None = None
    ddp_options: Mapping[str, Any] = field(default_factory=dict)
    deepspeed_config: Mapping[str, Any] = field(default_factory=dict)
    shardings: Callable[[], Mapping[Sharding, Parallel]] | None = None
    job: Job | None = None
    body: Body | None = None
    update_compiled: Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        one_of("precision", self.precision, PRECISIONS)
        one_of("device", self.device, ("cuda", "cpu"))
        one_of("zero_grad", self.zero_grad, ZERO_GRADS)
        one_of("keeps", self.keeps, KEEPS)
        if self.job is not None and not isinstance(self.job, Job):
            raise InvalidInputError(_("job must be a Job, or None"))
        if self.parallel is not None and not isinstance(self.parallel, Parallel):
            raise InvalidInputError(_("parallel must be a Parallel, or None"))
        if self.parallel is not None and self.data_parallel_ranks != 1:
            raise InvalidInputError(_("give parallel or data_parallel_ranks, not both"))
        if not callable(self.model):
            raise InvalidInputError(_("model must be an nn.Module or a callable that builds one"))
        if not callable(self.loss):
            raise InvalidInputError(_("loss must be a callable (model, batch) -> scalar loss"))
        if self.optimizer is not None and not callable(self.optimizer):
            raise InvalidInputError(_("optimizer must be a callable parameters -> torch.optim.Optimizer, or None"))
        object.__setattr__(self, "accumulate", checked_count("accumulate", self.accumulate))
        object.__setattr__(self, "data_parallel_ranks", checked_count("data_parallel_ranks", self.data_parallel_ranks))

    def check_calls(self) -> None:
        """Check that what is callable takes what it is called with.

        Raises:
            InvalidInputError: it takes other arguments.
        """
        from torch import nn

        takes("loss", self.loss, "model", "batch")
        if self.optimizer is not None:
            takes("optimizer", self.optimizer, "parameters")
        if callable(self.batch):
            takes("batch", self.batch, "batch_size")
        if not isinstance(self.model, nn.Module):
            takes("model", self.model)

    @property
    def layout(self) -> Parallel | None:
        """How the step is spread over several GPUs; None: it is not."""
        if self.parallel is not None or self.data_parallel_ranks == 1:
            return self.parallel
        return data_parallel(self.data_parallel_ranks)

    def with_(self, **changes: Any) -> TrainingStep:
        """The same step with some fields changed (precision, accumulate, ...)."""
        return replace(self, **changes)
