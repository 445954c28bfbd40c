"""One optimizer step of a training, run for real on the CPU in a copy of its process: the core's part of it.

An adapter runs the step through its framework's own loop; :class:`RehearsedStep` makes the random draws and the
normalisation statistics the same however the batch is cut, and takes down what the step did.
"""

from __future__ import annotations

import functools
import os
import re
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from vram_guard.apply.loss_weight import LossWeight, bound_to
from vram_guard.apply.microbatch import CannotSplitError, Splitter
from vram_guard.apply.microbatch import Layout as BatchLayout
from vram_guard.forks.side_effects import opened_for_writing, refuse_connections
from vram_guard.guard.applied import Applied
from vram_guard.language import _
from vram_guard.proof._attributes_read import AttributesRead
from vram_guard.proof._batch_state import BatchState
from vram_guard.proof.draws import RowDraws
from vram_guard.proof.fixed_statistics import FixedStatistics
from vram_guard.proof.observed import Observed, Value, gradients_of, observe
from vram_guard.state.random_generators import RandomState
from vram_guard.techniques.cpu_as_gpu import cpu_as_gpu, without_gpu
from vram_guard.techniques.recipe import AS_WRITTEN, Recipe

_POSITION = re.compile(r"\[\d+\]")


class SteppedSignal(BaseException):
    """Ends a framework's loop after its first optimizer step."""


@dataclass(frozen=True)
class Rehearsal:
    """One way to run the step."""

    samples: int
    """Of the batch, all different where the data set has so many."""
    micro_batch_size: int
    """Of equal size, as many as ``samples``: the batch stays whole."""
    layout: BatchLayout | None
    """How a batch is cut; None where it cannot be."""
    recipe: Recipe = AS_WRITTEN
    loss_weight: LossWeight = "mean"
    double: bool = True
    """In double precision, where differences of rounding are far below all others."""
    draws: Mapping[int, list[Any]] = field(default_factory=dict)
    """Sizes of the random draws of the whole batch, from its own rehearsal."""

    @property
    def splitter(self) -> Splitter | None:
        """Cuts the batch; None where it stays whole."""
        if self.micro_batch_size >= self.samples:
            return None
        return Splitter(self.samples, self.micro_batch_size, layout=self.layout)

    def with_(self, **changes: Any) -> Rehearsal:
        """The same with other values."""
        return replace(self, **changes)


@dataclass(frozen=True)
class Rehearsed:
    """What came of it."""

    observed: Observed
    draws: Mapping[int, list[Any]]
    random: bool
    """True where the step draws random numbers."""
    read: frozenset[str] = frozenset()
    """Attributes that were read after the step's forward pass."""
    made: tuple[str, ...] = ()
    """Attributes that were not there before the step, but for what it has appended to lists."""


class RehearsedStep(ExitStack):
    """A rehearsal while it runs; nothing of it is undone for the model, which is a copy's.

    Args:
        model: that is trained, on the CPU.
        rehearsal: how; as an attribute, its weighting reads from this model.
        closed: types of attributes that are not compared: a framework's own objects.
        read: whether the user's hooks run after the step, which may read what it has written to its batch.

    Attributes:
        applied: for what the adapter changes.
        stepped: True once every optimizer has stepped.
    """

    def __init__(
        self, model: nn.Module, rehearsal: Rehearsal, closed: tuple[type, ...] = (), *, read: bool = False
    ) -> None:
        super().__init__()
        self._read = read
        self.rehearsal = rehearsal.with_(loss_weight=bound_to(model, rehearsal.loss_weight))
        self.applied = Applied()
        self.stepped = False
        self._model = model
        self._closed = closed
        self._hooks: Counter[str] = Counter()
        self._gradients: dict[str, torch.Tensor] = {}
        self._waiting: set[int] = set()
        self._reader = Splitter(rehearsal.samples, rehearsal.samples, layout=rehearsal.layout)
        self._row = self._forwards = 0
        self._draws = RowDraws(rehearsal.samples, layout=rehearsal.draws)
        self._before: Observed | None = None
        self._generators = RandomState(of_torch=False)
        self._opened: Counter[str] = Counter()
        self._environment: dict[str, str] = {}
        self._attributes = AttributesRead(model, self.applied)
        self.enter_context(cpu_as_gpu(rehearsal.recipe))
        self.enter_context(without_gpu())
        if rehearsal.recipe.optimizer_in_backward:
            self._keep_gradients()
        # No other process takes part, whatever this one's copy was connected to.
        self.applied.replace(torch.distributed, "is_initialized", lambda: False)
        refuse_connections()

    def begin(self) -> None:
        """Everything is set up and the first batch is about to be loaded."""
        self._opened = opened_for_writing()
        self._before = observe(self._model, closed=self._closed)
        self._environment = dict(os.environ)
        self.enter_context(FixedStatistics(self._model))
        self.enter_context(self._draws)

    def mark_forwards(self, owner: Any, name: str) -> None:
        """Each call of this method, whose first argument is a batch, is one pass over a batch or a micro-batch."""
        method = getattr(owner, name)

        @functools.wraps(method)
        def marked(batch: Any, *args: Any, **kwargs: Any) -> Any:
            self._forward_begins(batch)
            given = BatchState(batch)
            self._attributes.listening = False
            returned = method(batch, *args, **kwargs)
            self._attributes.listening = True
            if self._read:
                self._hooks.update(_("writing to {path}", path=path) for path in given.changed(batch))
            return returned

        self.applied.replace(owner, name, marked)

    def end_if_stepped(self) -> None:
        """Called after each loaded batch.

        Raises:
            SteppedSignal: every optimizer has stepped.
        """
        if self.stepped:
            raise SteppedSignal

    def _forward_begins(self, batch: Any) -> None:
        try:
            samples = self._reader.count(batch)
        except CannotSplitError:
            samples = self.rehearsal.samples
        if not self._forwards and not self.rehearsal.draws:
            self._draws.layout.clear()  # a loader draws its workers' seed: that is no draw of the step
        self._forwards += 1
        if self._row >= self.rehearsal.samples:
            self._row = 0
        self._draws.begin(self._row, samples)
        self._generators = RandomState(of_torch=False)
        self._row += samples

    def follow(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        """Take down the gradients with which these have stepped."""
        for optimizer in optimizers:
            self._waiting.add(id(optimizer))
            optimizer.register_step_post_hook(self._after_step)  # forward and backward may run inside of the step

    def _keep_gradients(self) -> None:
        """Take down gradients when they are complete: hooks that step and drop them come after these."""
        for name, weight in self._model.named_parameters():
            if weight.requires_grad:

                def keep(weight: torch.Tensor, name: str = name) -> None:
                    if weight.grad is not None:
                        self._gradients[name] = weight.grad.detach().clone()

                weight.register_post_accumulate_grad_hook(keep)

    def _after_step(self, optimizer: torch.optim.Optimizer, *_arguments: Any) -> None:
        own = {id(weight) for group in optimizer.param_groups for weight in group["params"]}
        names = {name for name, weight in self._model.named_parameters() if id(weight) in own}
        self._gradients.update((name, one) for name, one in gradients_of(self._model).items() if name in names)
        self._waiting.discard(id(optimizer))
        self.stepped = not self._waiting

    def count_calls(self, owner: Any, names: Iterable[str], label: str = "") -> None:
        """Count how often these methods of an object are called."""
        for name in names:
            method = getattr(owner, name, None)
            if callable(method):
                self.applied.replace(owner, name, self._counted(label + name, method))

    def _counted(self, name: str, method: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(method)
        def counted(*args: Any, **kwargs: Any) -> Any:
            self._hooks[name] += 1
            return method(*args, **kwargs)

        return counted

    def result(self, logged: Mapping[str, Any]) -> Rehearsed:
        """What the step did."""
        self._attributes.listening = False
        for path, times in (opened_for_writing() - self._opened).items():
            self._hooks[_("writing to {path}", path=path)] = times
        random = bool(self._draws.layout) or not self._generators.is_current()
        self.close()
        self.applied.close()  # what stands on the model for the plan is no difference of what the step did
        observed = observe(
            self._model,
            before=self._before,
            gradients={},
            logged=logged,
            hooks=self._hooks,
            closed=self._closed,
        )
        before = {} if self._before is None else self._before.attributes
        made = tuple(
            name
            for name, value in observed.attributes.items()
            if name not in before and not _is_appended(name, value, before)
        )
        environment = {f"os.environ[{name!r}]": os.environ.get(name) for name in {**self._environment, **os.environ}}
        # These are copies already, and as large as the model.
        observed = replace(observed, gradients=self._gradients, attributes={**observed.attributes, **environment})
        return Rehearsed(observed, dict(self._draws.layout), random, self._attributes.names(), made)


def _is_appended(name: str, value: Value, before: Mapping[str, Value]) -> bool:
    """True for a value in a list that was there before: what the next steps append to it is what this one has."""
    named = name.removeprefix("len(")
    return not isinstance(value, torch.Tensor) and any(
        f"len({named[: found.start()]})" in before for found in _POSITION.finditer(named)
    )
