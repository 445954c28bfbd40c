"""In a copy that began at ``prepare``: the script trains for real on a few samples, on the CPU, and is observed.

One copy runs as the script is written, another one under the plan, through the installer of the real launch. Both begin
from the same weights and random numbers, and get the same samples. Two known differences are taken out of both: random
numbers are drawn sample by sample, and batch normalisation uses its running statistics.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from vram_guard.apply.microbatch import CannotSplitError, batch_size
from vram_guard.apply.sliced_forward import by_name
from vram_guard.language import _
from vram_guard.limits import LARGEST_IN_DOUBLE
from vram_guard.patching import replace_attributes
from vram_guard.proof.draws import RowDraws
from vram_guard.proof.effects import Listening
from vram_guard.proof.fixed_statistics import FixedStatistics
from vram_guard.proof.observed import Observed, observe
from vram_guard.state.containers import mapped
from vram_guard.techniques.cpu_as_gpu import cpu_as_gpu
from vram_guard.techniques.recipe import AS_WRITTEN
from vram_guard_accelerate._alive import alive, unfreeze_what_the_script_froze
from vram_guard_accelerate._launch_plan import LaunchPlan
from vram_guard_accelerate._patching import wrap
from vram_guard_accelerate.apply.applying import PlanInstaller
from vram_guard_accelerate.dry_run import _subprocess_policy, side_effects
from vram_guard_accelerate.dry_run._real_samples import few_samples
from vram_guard_accelerate.dry_run._rows_of_calls import evaluate_once, first_rows, trains
from vram_guard_accelerate.dry_run.first_batch import root_of
from vram_guard_accelerate.dry_run.forks import ParentPipe
from vram_guard_accelerate.dry_run.loop_profile import LoopObserver
from vram_guard_accelerate.dry_run.phases import BatchIterator, DryRun, DryRunPhase
from vram_guard_accelerate.dry_run.results import DryRunFailure, stopped

_LESS_PRECISE = (torch.float32, torch.float16, torch.bfloat16)


@dataclass(frozen=True)
class ProofTask:
    """Train on a few samples, up to a backward pass."""

    samples: int
    request: int
    """The number, among all batches that are asked for from ``prepare`` on, of the training's first."""
    backwards: int
    """Backward passes for one batch."""
    precise: bool
    """In double precision, in which sums in another order do not differ visibly."""
    plan: LaunchPlan | None = None
    """What is installed; None: nothing, as the script is written."""
    draws: Mapping[int, Any] = field(default_factory=dict)
    """The random draws of the step as written, see :attr:`RowDraws.layout`."""
    called_with: int = 0
    """Samples that the model of a loop without a loader is called with; 0: a loader makes its batches."""


@dataclass(frozen=True)
class ProofStep:
    """A step that was run."""

    observed: Observed
    draws: Mapping[int, Any]
    random: bool
    """True if the models have drawn random numbers."""


class ProvingPhase(DryRunPhase):
    """The script from ``prepare`` on, for real.

    Args:
        run: the copy's.
        task: what it is to do.
        parent: the way back to who asked.
        tensors: those that were alive where the copy was made.
    """

    def __init__(
        self, run: DryRun, task: ProofTask, parent: ParentPipe, tensors: Sequence[weakref.ref[torch.Tensor]]
    ) -> None:
        super().__init__(run)
        self._tensors = tensors
        self._task = task
        self._parent = parent
        self._installer = PlanInstaller(task.plan, self._slice_begins) if task.plan else None
        self._cpu = cpu_as_gpu(task.plan.recipe if task.plan else AS_WRITTEN)
        self._cpu.__enter__()  # for good: the process ends with the step
        self._models: list[nn.Module] = []
        self._calls = 0
        self._asked = 0
        self._training: Any = None
        """The loader whose batches are trained on."""
        self._batch: Any = None
        self._draws = RowDraws(task.samples, layout=task.draws)
        self._before: Observed | None = None
        self._losses: list[torch.Tensor] = []
        self._depth = 0
        self._heard: Listening | None = None
        self._random = False
        side_effects.discard_saving()
        _subprocess_policy.refuse_processes(stopped)
        wrap(torch.autograd, "backward", self._backward)

    @property
    def forwards(self) -> int:
        """Number of calls of prepared models."""
        return self._calls

    def prepare(self, original: Any, accelerator: Any, args: Any, kwargs: Any) -> Any:
        """The real one, and what the plan puts on top."""
        new = [thing for thing in args if isinstance(thing, nn.Module) and not any(thing is m for m in self._models)]
        self._models += new
        if self._task.precise:
            self._in_double_precision()
        if self._task.called_with:
            for model in new:
                evaluate_once(model)
        if self._installer is None:
            prepared = original(accelerator, *args, **kwargs)
        else:
            prepared = self._installer.prepare(original, accelerator, *args, **kwargs)
        for model in new:
            model.register_forward_pre_hook(self._calling, with_kwargs=True)
            model.register_forward_hook(self._called, with_kwargs=True)
        return prepared

    def next_batch(self, batches: BatchIterator) -> Any:
        """The few samples for the training, again and again; what comes before it is as in the dry run."""
        self._asked += 1
        if self._asked == self._task.request and not self._task.called_with:
            self._training = batches.loader
            self._batch = few_samples(batches.loader, self._task.samples)
            if self._task.precise:
                self._in_double_precision()  # again: the script may have put frozen models back into single precision
                self._batch = mapped(self._batch, _doubled)
            self._training_begins()
        return batches.next_beside_training() if batches.loader is not self._training else self._batch

    def _training_begins(self) -> None:
        self._statistics = FixedStatistics(*self._models).__enter__()  # for good: the process ends with the step
        self._draws.__enter__()
        self._draw_from_the_start()
        self._before = self._observe()

    def _in_double_precision(self) -> None:
        """Every floating-point tensor that is alive is made one of double precision, and those to come."""
        torch.set_default_dtype(torch.float64)
        unfreeze_what_the_script_froze()
        for tensor in [*(known() for known in self._tensors), *alive(torch.Tensor)]:
            if tensor is not None:
                with contextlib.suppress(RuntimeError):
                    tensor.data = _doubled(tensor.data)

    # --- random numbers --------------------------------------------------------------------------------------------

    def _draw_from_the_start(self, rows: int = 0) -> None:
        """Slices draw more often than whole batches do: before and after a call, both go on from one place.

        Args:
            rows: of the call's arguments, where they are more than the samples (real and made ones, judged together).
        """
        if self._training is not None:
            self._draws.samples = rows or self._task.samples
            self._draws.begin(0, self._draws.samples)

    def _calling(self, model: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        given = (args, kwargs)
        if self._task.called_with:
            given = first_rows(*given, self._task.called_with, self._task.samples)
            if self._training is None and trains(model):
                self._training = model
                self._training_begins()
        try:
            rows = batch_size(by_name(*given))
        except CannotSplitError:
            rows = 0
        self._draw_from_the_start(rows if rows > self._task.samples else 0)
        if self._training is not None and self._heard is None:
            self._heard = Listening().__enter__()
        return given

    def _called(self, *_call: Any) -> None:
        self._calls += 1
        if self._heard is not None:
            heard, self._heard = self._heard, None
            heard.__exit__(None, None, None)
            self._random = self._random or heard.random
        self._draw_from_the_start()

    def _slice_begins(self, first: int, samples: int, of: int) -> None:
        if of == self._draws.samples:
            self._draws.begin(first, samples)

    # --- the end ---------------------------------------------------------------------------------------------------

    def _backward(self, original: Any, *args: Any, **kwargs: Any) -> Any:
        """The script's own, not those inside it (checkpointed blocks); the last one is the end."""
        self._depth += 1
        try:
            original(*args, **kwargs)
        finally:
            self._depth -= 1
        if self._depth or self._training is None:
            return
        given = args[0] if args else kwargs["tensors"]
        self._losses += [given] if isinstance(given, torch.Tensor) else list(given)
        if len(self._losses) >= self._task.backwards:
            self._draws.__exit__(None, None, None)
            # Observations travel by torch's own function: a dry run has put one in its place that saves nothing.
            replace_attributes(torch, {"save": getattr(torch.save, "__wrapped__", torch.save)})
            self._parent.send(ProofStep(self._observe(), self._draws.layout, self._random))

    def _observe(self) -> Observed:
        root = root_of(tuple(self._models))
        losses = [loss.detach() for loss in self._losses]
        return observe(
            root,
            before=self._before,
            loss=losses[0] if losses else None,
            logged={str(at): loss for at, loss in enumerate(losses[1:], 1)},
            # The observer is ours, and what stands in place of forwards is the plan's own.
            closed=(
                LoopObserver,
                *{type(vars(module)["forward"]) for module in root.modules() if "forward" in vars(module)},
            ),
        )

    def failed(self, error: BaseException, script: str) -> None:
        """Send the reason."""
        self._parent.send(DryRunFailure.of(error, script))

    def ended(self) -> None:
        """The same: there was no backward pass."""
        self._parent.send(DryRunFailure.unsupported(_("the script ended before a backward pass")))


def _doubled(leaf: Any) -> Any:
    if not isinstance(leaf, torch.Tensor) or leaf.dtype not in _LESS_PRECISE or leaf.numel() > LARGEST_IN_DOUBLE:
        return leaf
    return leaf.double() if leaf.device.type == "cpu" and leaf.layout == torch.strided else leaf
