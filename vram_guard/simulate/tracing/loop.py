"""The training loop that is traced: two steps, as a plain loop of PyTorch runs them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch import nn

from vram_guard.errors import UnsupportedStepError
from vram_guard.language import Message, _
from vram_guard.simulate.device import constants
from vram_guard.simulate.device.cuda_module import CUDA
from vram_guard.simulate.device.symbolic import is_symbolic
from vram_guard.simulate.parallel.engines import EngineOptimizer
from vram_guard.simulate.tracing.batches import batch_source, map_tensors
from vram_guard.simulate.tracing.observed_phases import ObservedPhases
from vram_guard.simulate.tracing.optimizer_states import ClosureUse, classify_states, closure_use
from vram_guard.state.containers import own_copy
from vram_guard.techniques.optimizers import needs_closure
from vram_guard.tensors import inner_tensors

if TYPE_CHECKING:
    from vram_guard.simulate.memory.recorder import Recorder
    from vram_guard.simulate.tracing._dispatch import SymbolicMode
    from vram_guard.step import TrainingStep

#: Precisions in which operators compute in half precision.
AUTOCAST_DTYPES = {"16-mixed": torch.float16, "bf16-mixed": torch.bfloat16}

#: Precisions in which weights and inputs themselves are of half precision.
TRUE_DTYPES = {"16-true": torch.float16, "bf16-true": torch.bfloat16}


class Run(Protocol):
    """The part of a run that its loop needs."""

    step: TrainingStep
    batch_size: int
    recorder: Recorder
    mode: SymbolicMode
    compiled: bool
    """Whether code under torch.compile is compiled and followed."""
    input_dtype: torch.dtype | None
    """The dtype that numbers of a batch get on the device; None: their own."""


class Loop:
    """The training loop itself. Its attributes are the local names of a loop: they live until assigned again."""

    def __init__(self, run: Run, model: nn.Module, optimizer: torch.optim.Optimizer | None) -> None:
        self.step = run.step
        self.recorder = run.recorder
        self.mode = run.mode
        self.model = model
        self.optimizer = optimizer
        self.source = batch_source(run.step.batch)
        self.batch_size = run.batch_size
        self.compiled = run.compiled
        self.input_dtype = run.input_dtype
        fp16 = run.step.precision == "16-mixed" and optimizer is not None
        self.scaler = torch.amp.GradScaler("cuda") if fp16 else None
        self._again = False
        """Whether the optimizer evaluates the loss once more."""
        self._uses: WeakKeyDictionary[torch.optim.Optimizer, ClosureUse] = WeakKeyDictionary()
        """How optimizers use a closure: asked before their first step."""
        self.batch: Any = None
        self._micro_batches: list[Any] = []
        self.loss: Any = None
        self.returned: Any = None
        """The result of the loss callable, where the step keeps more of it than the loss."""

    def change(self, **changes: Any) -> None:
        """Fields of the step that differ from here on."""
        self.step = self.step.with_(**changes)
        self.source = batch_source(self.step.batch)

    def run(self, numbers: Iterable[int] = (1, 2)) -> None:
        """Optimizer steps; forwards where nothing is trained."""
        if self.step.keeps == "loss":
            return self._run(numbers)
        # ``outputs = model(batch)``: the old ones die where the new ones are there, and not only once the loss is.
        # Where nothing is kept, the steps before may have kept some.
        handle = self.model.register_forward_hook(lambda *_: setattr(self, "returned", None))
        try:
            return self._run(numbers)
        finally:
            handle.remove()

    def look(self, number: int) -> None:
        """An optimizer step up to its loss; all of one that may compute several, or computes it in its optimizer."""
        use = None if self.optimizer is None else self._uses[self.optimizer]
        if use != "none" or traced_micro_batches(self.step) > 1:
            return self.run((number,))
        if self.step.zero_grad == "before_forward":
            self._zero_grad(number)
        self._load(number)
        return self._forward(number)

    def _run(self, numbers: Iterable[int]) -> None:
        if self.optimizer is None:
            return self._infer(numbers)
        use = self._uses.get(self.optimizer)
        if use is None:
            use = "alone" if needs_closure(self.optimizer) else closure_use(self.optimizer, self.recorder)
            self._uses[self.optimizer] = use
        if use == "alone":
            return self._run_with_closure(self.optimizer, numbers)
        self._again = use == "behind backward"
        rounds = traced_micro_batches(self.step)
        for number in numbers:
            if self.step.zero_grad == "before_forward":
                self._zero_grad(number)
            for micro in range(rounds):
                if not self.step.whole_batch or micro == 0:
                    self._load(number)
                self._forward(number)
                self._backward(number, first=micro == 0)
                if micro < rounds - 1:
                    self._ends()
            self._update(number)
            self._ends()
            if self.step.zero_grad == "after_step":
                self.optimizer.zero_grad()
        return None

    def _run_with_closure(self, optimizer: torch.optim.Optimizer, numbers: Iterable[int]) -> None:
        """Optimizers that evaluate the loss themselves (LBFGS): forward and backward happen inside their step."""
        note_closure(optimizer, self.recorder)

        def closure(number: int) -> Any:
            optimizer.zero_grad()
            self._forward(number)
            self._backward(number, first=True)
            return self.loss

        for number in numbers:
            self._load(number)
            self.recorder.phase("optimizer", number)
            optimizer.step(lambda number=number: closure(number))  # type: ignore[misc]
            self._ends()
            classify_states(self.recorder, optimizer)

    def _infer(self, numbers: Iterable[int]) -> None:
        """Steps without an optimizer that is known: a loss that trains by itself shows its phases by what it calls."""
        number = 0
        with ObservedPhases(self.recorder, self.mode.state, lambda: number).observed(), torch.no_grad():
            for number in numbers:
                self._load(number)
                self._forward(number)
                self._ends()

    def _ends(self) -> None:
        """An iteration is over: the names of a function end with it."""
        if self.step.keeps == "nothing":
            self.loss = self.returned = None

    def _zero_grad(self, number: int) -> None:
        assert self.optimizer is not None
        self.recorder.phase("optimizer", number)
        self.optimizer.zero_grad()

    def _load(self, number: int) -> None:
        self.recorder.batch_factor = self.step.accumulate if self.step.whole_batch else 1
        real = self.source(self.batch_size)
        self.recorder.phase("batch", number, "batch")
        # The old batch dies first: ``for batch in loader`` gives its name to a batch on the host, and Lightning's and
        # MMEngine's loops end the function that held it.
        self.batch = None
        self._micro_batches.clear()
        self.batch = map_tensors(self.to_device, real, CUDA)

    def to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        """The tensor of a batch on the device."""
        if tensor.is_nested:
            raise UnsupportedStepError(_("the batch holds a nested tensor: its rows have no common size"))
        dtype = self.input_dtype if tensor.is_floating_point() else None
        if is_symbolic(tensor):
            moved = torch.empty_like(tensor, dtype=dtype, device=CUDA)
        else:
            moved = torch.empty_strided(tensor.size(), tensor.stride(), dtype=dtype or tensor.dtype, device=CUDA)
            constants.known(moved, tensor)
        self.recorder.track(moved, "")
        self.mode.meter.loaded(moved)
        return moved.requires_grad_() if tensor.requires_grad else moved

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The region in which the step's precision runs a forward."""
        dtype = AUTOCAST_DTYPES.get(self.step.precision)
        return torch.autocast("cuda", dtype=dtype) if dtype is not None else contextlib.nullcontext()

    def _forward(self, number: int) -> None:
        self.recorder.phase("forward", number)
        before = self.mode.operations
        batch = self.batch
        if self.step.whole_batch:  # what a step puts into one micro-batch is not in the next one; all live on
            batch = own_copy(batch)
            self._micro_batches.append(batch)
        with self.autocast():
            returned = self.step.loss(self.model, batch)
            self.loss = scalar_loss(returned)
        self.returned = None if self.step.keeps == "loss" else returned
        if self.mode.operations == before:
            raise UnsupportedStepError(
                _("the step ran no operation at all; check that loss(model, batch) calls the model")
            )

    def _backward(self, number: int, first: bool) -> None:
        assert self.optimizer is not None
        if first and self.step.zero_grad == "before_backward":
            self.recorder.phase("optimizer", number)
            self.optimizer.zero_grad()
        self.recorder.phase("backward", number)
        if self.loss is None:
            raise UnsupportedStepError(_("loss(model, batch) returned None, so there is nothing to run backward"))
        if isinstance(self.optimizer, EngineOptimizer):
            self.optimizer.backward(self.loss)
            return
        loss = self.loss if self.step.accumulate == 1 else self.loss / self.step.accumulate
        if self.scaler is not None:
            loss = self.scaler.scale(loss)
        loss.backward()

    def _update(self, number: int) -> None:
        assert self.optimizer is not None
        self.recorder.phase("optimizer", number)
        self.gradients_stored()
        options = self.step.update_compiled if self.compiled else None
        update = self.update if options is None else torch.compile(self.update, **options)
        update()
        classify_states(self.recorder, self.optimizer)

    def gradients_stored(self) -> None:
        """A backward pass is over: FSDP1 has stored gradients itself."""
        if self.step.parallel is not None:
            grads = (parameter.grad for parameter in self.model.parameters())
            self.recorder.classify((one for grad in grads for one in inner_tensors(grad)), "gradients")

    def update(self) -> None:
        """Gradients are clipped, and the optimizer steps."""
        assert self.optimizer is not None
        if self.step.clip_grad_norm is not None or self.step.clip_grad_value is not None:
            self.clip()
        if self._again:
            self.optimizer.step(self._evaluated_again)
        elif self.scaler is None:
            self.optimizer.step()
        else:
            self.scaler.step(self.optimizer)
            self.scaler.update()

    def _evaluated_again(self) -> Any:
        """The closure of an optimizer that evaluates the loss at other weights (SAM): forward and backward."""
        number = self.recorder.phases[-1].step
        self._forward(number)
        self._backward(number, first=False)
        self.recorder.phase("optimizer", number)
        return self.loss

    def clip(self) -> None:
        """Gradients as the step's limits leave them."""
        assert self.optimizer is not None
        if self.scaler is not None:
            self.scaler.unscale_(self.optimizer)
        parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
        if self.step.clip_grad_norm is not None:
            # FullyShardedDataParallel's own adds up the norms of all ranks; torch's would take one rank's for all.
            own = getattr(self.model, "clip_grad_norm_", None)
            if callable(own) and self.step.parallel is not None:
                own(self.step.clip_grad_norm)
            else:
                nn.utils.clip_grad_norm_(parameters, self.step.clip_grad_norm)
        if self.step.clip_grad_value is not None:
            nn.utils.clip_grad_value_(parameters, self.step.clip_grad_value)


def note_closure(optimizer: torch.optim.Optimizer, recorder: Recorder) -> None:
    """What of an optimizer that evaluates the loss itself is not followed."""
    recorder.note(
        Message(
            "{optimizer} evaluates the loss a varying number of times per step: the first evaluations "
            "are followed, what it keeps of later ones is not counted",
            optimizer=type(optimizer).__name__,
        ),
        tier="partly symbolic",
    )


def traced_micro_batches(step: TrainingStep) -> int:
    """Two show all there is to see: the first makes gradients, every other one adds to them."""
    return min(step.accumulate, 2)


def scalar_loss(result: Any) -> Any:
    """The loss among what a loss callable may return.

    A tensor, a mapping or object with ``loss``, several losses, or a pair of a loss and the outputs that it is made of.
    """
    if isinstance(result, torch.Tensor) or result is None:
        return result
    if isinstance(result, dict) and "loss" in result:
        return result["loss"]
    if hasattr(result, "loss") and isinstance(result.loss, torch.Tensor):
        return result.loss
    if isinstance(result, tuple) and len(result) == 2 and _is_scalar(result[0]) and not _is_scalar(result[1]):
        return result[0]
    if isinstance(result, (list, tuple)) and result and all(isinstance(item, torch.Tensor) for item in result):
        return torch.stack(list(result)).sum() if len(result) > 1 else result[0]
    raise UnsupportedStepError(
        _(
            "loss(model, batch) returned {kind}; it must return a scalar tensor, a dict with 'loss', an object with "
            ".loss, a pair (loss, outputs), or several scalar tensors",
            kind=type(result).__name__,
        )
    )


def _is_scalar(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.numel() == 1
