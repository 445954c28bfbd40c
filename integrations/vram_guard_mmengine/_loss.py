"""``train_step`` as the loss of a traced step: up to the loss, or all of it where MMEngine's own loop runs."""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack, nullcontext
from types import FrameType
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from mmengine.model import MMDistributedDataParallel
from mmengine.optim import OptimWrapper
from torch._compile import _disable_dynamo

from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
from vram_guard.patching import replaced
from vram_guard.proof.effects import StepEffects
from vram_guard.simulate.device.symbolic import is_symbolic

if TYPE_CHECKING:
    from torch import nn

# ruff: noqa: ARG002 - OptimWrapper decides what its methods are given


class CompiledMethod(NamedTuple):
    """A method of the model that a runner puts under torch.compile."""

    name: str
    options: Mapping[str, Any]
    """Of torch.compile."""


class HostBatch:
    """A batch in host memory: the model's own data preprocessor takes it to the GPU, in its own time.

    Args:
        data: as the loader delivers it.
        optim_wrapper: that updates the weights inside ``train_step``; None: nothing is updated there.
    """

    def __init__(self, data: Any, optim_wrapper: OptimWrapper | None = None) -> None:
        self.data = data
        self.optim_wrapper = optim_wrapper


class RecordingOptimWrapper(OptimWrapper):  # type: ignore[misc]
    """Stands in for the optimizer wrapper in a traced ``train_step``: it only takes the loss.

    MMEngine runs the backward pass inside ``train_step``, where the preprocessed batch and the losses are still local
    names. So what the callers hold when the loss arrives is held until the next step begins.
    """

    def __init__(self, accumulate: int = 1) -> None:  # there is no optimizer to wrap
        self._divides = accumulate == 1  # over several micro-batches, a trace does
        self._loss: torch.Tensor | None = None
        self.outputs: Any = None
        """Of the last ``train_step``."""
        self.effects = StepEffects()
        self._held: list[dict[str, Any]] = []
        self._accumulative_counts = 1
        self._inner_count = 0
        self._max_counts = -1

    def begin(self) -> None:
        """A new step: what the last one held is let go."""
        self._loss = self.outputs = None
        self._held.clear()

    @property
    def loss(self) -> torch.Tensor:
        """The loss of this step."""
        if self._loss is None:
            raise UnsupportedStepError(
                _("train_step did not call optim_wrapper.update_params: there is no loss to follow")
            )
        return self._loss

    def optim_context(self, model: nn.Module) -> Any:
        """The trace's own autocast is on already."""
        return nullcontext()

    def update_params(self, loss: torch.Tensor, step_kwargs: Any = None, zero_kwargs: Any = None) -> None:
        """Take the loss, once a step; as ``scale_loss`` hands it on, which Dynamo compiles."""
        self._take(loss / 1 if self._divides else loss)

    @_disable_dynamo  # Dynamo ends a graph here, as it does at the backward pass of MMEngine's own
    def _take(self, loss: torch.Tensor) -> None:
        if self._loss is not None:
            raise UnsupportedStepError(
                _("train_step calls update_params more than once; only one update per step is supported")
            )
        self._loss = loss
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - there is no public way to what callers hold
        while frame is not None and frame.f_code is not _LOSS_CODE:
            self._held.append(dict(frame.f_locals))
            frame = frame.f_back

    def _refused(self, *_args: Any, **_kwargs: Any) -> Any:
        raise UnsupportedStepError(
            _("train_step drives the optimizer itself, instead of calling optim_wrapper.update_params(loss)")
        )

    backward = step = zero_grad = scale_loss = _refused


class Wrapper:
    """Stands in for MMDistributedDataParallel: its ``train_step``, where the replica itself is the trace's."""

    detect_anomalous_params = False
    train_step = MMDistributedDataParallel.train_step
    _run_forward = MMDistributedDataParallel._run_forward  # noqa: SLF001 - which ``train_step`` calls

    def __init__(self, module: Any, call: Callable[..., Any]) -> None:
        self.module = module
        self._call = call

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._call(self.module, *args, **kwargs)


class Loss:
    """``train_step`` up to the loss; all of it, and what it returns, for a batch that has an optimizer wrapper.

    Args:
        recorder: takes the loss.
        compiled: what the runner will compile of the model; None: nothing.
    """

    def __init__(self, recorder: RecordingOptimWrapper, compiled: CompiledMethod | None = None) -> None:
        self.recorder = recorder
        self._compiled = compiled

    def through(self, wrapped: Callable[..., Any]) -> Callable[[Any, HostBatch], Any]:
        """The same where the model lies in a MMDistributedDataParallel, whose ``train_step`` is run.

        Args:
            wrapped: a module and what it is called with -> what it returns, as the wrapper's forward calls it.
        """
        made: dict[int, Wrapper] = {}

        def loss(model: Any, batch: HostBatch) -> Any:
            return self(made.setdefault(id(model), Wrapper(model, wrapped)), batch)

        return loss

    def __call__(self, model: Any, batch: HostBatch) -> Any:
        if batch.optim_wrapper is not None:
            with self._as_compiled(model):
                return model.train_step(batch.data, optim_wrapper=batch.optim_wrapper)
        self.recorder.begin()
        with self._as_compiled(model):
            outputs = self.recorder.outputs = model.train_step(batch.data, optim_wrapper=self.recorder)
        logged = outputs if isinstance(outputs, Mapping) else {}
        # Those with "loss" in their names are the parts of the loss, and are put together as it is.
        for name, value in logged.items():
            if "loss" not in name:
                self.recorder.effects.log(name, value)
        return self.recorder.loss

    def _as_compiled(self, model: Any) -> AbstractContextManager[None]:
        """Inside the block the model has what the runner puts on it; on the host, for proofs, it runs uncompiled."""
        parts = model.module if isinstance(model, Wrapper) else model
        if self._compiled is None or not is_symbolic(next(parts.parameters())):
            return nullcontext()
        name, options = self._compiled
        if not hasattr(model, name):  # the stand-in has no forward of its own; only the part is compiled
            model = parts
        return replaced(model, {name: torch.compile(getattr(model, name), **options)})


_LOSS_CODE = Loss.__call__.__code__


class AccumulatedLoss(Loss):
    """The same where batches are accumulated: of a wrapper that shards, all but the last run under ``no_sync``.

    A trace runs two of them. ``OptimWrapper.optim_context`` has the backward pass inside, which here comes after.
    """

    def __init__(self, recorder: RecordingOptimWrapper, compiled: CompiledMethod | None = None) -> None:
        super().__init__(recorder, compiled)
        self._calls = 0
        self._unsynchronised = ExitStack()

    def __call__(self, model: Any, batch: HostBatch) -> Any:
        if batch.optim_wrapper is not None:
            return super().__call__(model, batch)
        self._calls += 1
        self._unsynchronised.close()
        if self._calls % 2 and hasattr(model, "no_sync"):
            self._unsynchronised.enter_context(model.no_sync())
        return super().__call__(model, batch)
