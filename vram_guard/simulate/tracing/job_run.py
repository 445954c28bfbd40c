"""A job played inside a trace: phases, training steps and rounds, all in one recorder."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils import _pytree as pytree

from vram_guard.checks import checked_count, known_names, one_of
from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.simulate.device.symbolic import is_symbolic
from vram_guard.simulate.tracing.batches import batch_source, map_tensors
from vram_guard.timeline import FOLLOWED_STEPS, PHASE_NAMES, Growth, PhaseName

if TYPE_CHECKING:
    from torch import nn

    from vram_guard.job import Job
    from vram_guard.simulate.tracing.loop import Loop

#: Fields of a step that may differ from one stretch of steps to the next.
CHANGEABLE = ("accumulate", "batch", "clip_grad_norm", "clip_grad_value", "loss", "whole_batch", "zero_grad")


class PlayedRun:
    """A :class:`vram_guard.job.JobRun`: the loop of one trace, as its job sees it.

    Args:
        loop: that trains.
        prepare: called before each stretch of training steps.
    """

    def __init__(self, loop: Loop, prepare: Callable[[], None]) -> None:
        self._loop = loop
        self._recorder = loop.recorder
        self._prepare = prepare
        self._open: list[tuple[PhaseName, str]] = []
        self._steps = 0
        self._label = ""
        self._before: set[int] | None = None
        """Blocks that were there at the end of the last step; None: the next one differs from it."""
        self._repeats = False
        self.growth: tuple[Growth, ...] = ()
        """The blocks that each further step would leave behind."""
        self._held: list[Any] = []

    @property
    def model(self) -> nn.Module:
        """The model that the loop calls."""
        return self._loop.model

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """Its optimizer."""
        return self._loop.optimizer

    @property
    def batch_size(self) -> int:
        """Samples of a micro-batch."""
        return self._loop.batch_size

    def play(self, job: Job) -> None:
        """The whole job.

        Raises:
            InvalidInputError: it does not train.
        """
        job.play(self)
        if not self._steps:
            raise InvalidInputError(_("the job never trains: its play has to call run.train()"))

    def train(self, steps: int = 2, label: str = "", **changes: Any) -> None:
        """So many optimizer steps."""
        checked_count("steps", steps)
        known_names("run.train", changes, CHANGEABLE)
        if self._open:
            raise InvalidInputError(_("run.train() inside of run.phase(): training steps are phases of their own"))
        if changes:
            self._loop.change(**changes)
        self._prepare()
        self._recorder.label = label
        if changes or label != self._label:
            self._before, self._label = None, label
        for _step in range(steps):
            self._step()
        if self._loop.step.keeps == "nothing":
            self._loop.batch = None
        self._recorder.label = ""

    def _step(self) -> None:
        """One optimizer step; what it leaves behind, where the step before was one like it."""
        self._steps += 1
        first = self._recorder.blocks_so_far
        self._loop.run((self._steps,))
        if self._before is not None and self._steps >= FOLLOWED_STEPS:
            self.growth = self._recorder.grown(first, self._before)
        self._before = self._recorder.alive()

    def load(self, batch: Any) -> Any:
        """The batch on the simulated GPU."""
        with self._recorder.loading():
            return map_tensors(self._loop.to_device, batch)

    @contextlib.contextmanager
    def phase(self, name: PhaseName, label: str = "") -> Iterator[None]:
        """A phase of the run."""
        one_of("phase", name, PHASE_NAMES)
        self._open.append((name, label))
        self._enter(name, label)
        try:
            yield
        finally:
            self._open.pop()
            if self._open:
                self._enter(*self._open[-1])

    def _enter(self, name: PhaseName, label: str) -> None:
        self._recorder.label = label
        self._recorder.phase(name, self._steps)

    @contextlib.contextmanager
    def repeat(self, count: int) -> Iterator[None]:
        """A round that stands for ``count``."""
        checked_count("count", count)
        if self._repeats:
            raise InvalidInputError(_("run.repeat() inside of run.repeat(): give the inner one the product"))
        self._repeats = True
        try:
            with self._recorder.repeat(count):
                yield
        finally:
            self._repeats = False

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """The region of the step's forward."""
        return self._loop.autocast()

    @contextlib.contextmanager
    def evaluating(self, *, inference_mode: bool = False) -> Iterator[None]:
        """``eval()`` without gradients."""
        modes = [(module, module.training) for module in self.model.modules()]
        self.model.eval()
        try:
            with torch.inference_mode() if inference_mode else torch.no_grad():
                yield
        finally:
            for module, training in modes:
                module.training = training

    def batch(self, batch: Any, batch_size: int) -> Any:
        """A batch on the host."""
        return batch_source(batch)(batch_size)

    def trained_state(self, optimizer: torch.optim.Optimizer | None) -> Any:
        """The state dict of a copy of the optimizer after a step, over parameters that take no memory."""
        if optimizer is None:
            return None
        with self._recorder.aside():
            own = [p for group in optimizer.param_groups for p in group["params"]]
            twins = [torch.empty_like(p).requires_grad_(p.requires_grad) for p in own]
            copied = copy.deepcopy(optimizer, {id(p): twin for p, twin in zip(own, twins, strict=True)})
            for twin in twins:
                if twin.requires_grad:
                    twin.grad = torch.empty_like(twin)
            copied.step()
            return copied.state_dict()

    def loaded(self, state: Any, map_location: Literal["cpu", "cuda"] = "cpu") -> Any:
        """The state with tensors of its own."""
        made: dict[int, torch.Tensor] = {}

        def load(tensor: torch.Tensor) -> torch.Tensor:
            if not is_symbolic(tensor):
                return tensor.clone()
            key = tensor.untyped_storage()._cdata
            if key not in made:
                with self._recorder.aside():
                    made[key] = torch.empty(tensor.untyped_storage().nbytes(), dtype=torch.uint8, device="meta")
                self._recorder.put(made[key], map_location, operator="torch.load")
            memory = made[key].view(tensor.dtype)
            return memory.as_strided(tensor.size(), tensor.stride(), tensor.storage_offset())

        return pytree.tree_map(lambda leaf: load(leaf) if isinstance(leaf, torch.Tensor) else leaf, state)

    def hold(self, value: Any) -> None:
        """Keep a value."""
        self._held.append(value)
