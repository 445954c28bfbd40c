"""Later epochs of a training: hooks run one by one in a trace, and each step that they change is followed anew."""

from __future__ import annotations

import contextlib
import itertools
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch

from vram_guard.guard.places import train_differently
from vram_guard.guard.refusals import Refusal
from vram_guard.language import Message, _
from vram_guard.limits import LATER_SECONDS, LATER_STEPS, PLACES_LOOKED_AT
from vram_guard.patching import replaced
from vram_guard.simulate.tracing.batches import tensors_of
from vram_guard.state.objects import attributes_kept
from vram_guard.state.random_generators import random_state_kept
from vram_guard_lightning._sample import loaders_in, read
from vram_guard_lightning._shadow import modules_in, within

if TYPE_CHECKING:
    from vram_guard.capture.loader import Sample
    from vram_guard.techniques import Recipe
    from vram_guard_lightning._play import Playing

_HOOKS = ("on_train_epoch_end", "on_train_epoch_start")


@dataclass(slots=True)  # a trace puts back what a job's attributes hold, and this is to stay
class LaterEpochs:
    """The epochs after the first one, of all traces of a training.

    Attributes:
        total: epochs of the training; infinite where nothing says how many.
        steps: optimizer steps of an epoch, as ``trainer.global_step`` counts them.
        sample: of the first epoch.
        reload: epochs after which loaders are made anew (``reload_dataloaders_every_n_epochs``); 0: never.
        read: asks for the train loader of the epoch that the Trainer's copy is in.
        batch_of: loader -> the batches of a step.
        reached: the last epoch that the first trace had time for; the others stop there too.
        unfreezes: True if a trace has seen weights that are trained in some epochs only.
        regroups: True if a trace has seen an optimizer that gets other weights later.
    """

    total: float
    steps: int
    sample: Sample
    reload: int
    read: Callable[[], Sample]
    batch_of: Callable[[Sample], Callable[[int], Any]]
    reached: int | None = None
    unfreezes: bool = False
    regroups: bool = False
    _samples: dict[Any, Sample] = field(default_factory=dict)
    _as_written: tuple[Any, ...] = ()

    def play(self, playing: Playing, first: int, seconds: float, *, between: bool) -> None:
        """Run the hooks of the epochs after ``first``, and every step that differs from the one before.

        Args:
            playing: after the first epoch's last step.
            first: number of that epoch.
            seconds: that its steps took to follow.
            between: True if something else has run since that step: another one, as it was, meets what that left.
        """
        run, asked = playing.run, playing.asked
        start = playing.shadow.global_step
        asked.followed({"current_epoch": first, "global_step": start})
        state = _State(first, self._signature(playing, first, first), run.accumulate)
        state.seen.add((state.known, _states(playing)))
        for step in self._differing(playing, first, start):
            self._follow(playing, state, first, step, _("global_step {step}", step=step))
        if first + 1 >= self.total:
            return
        hooks = self.reload or any(map(playing.has, _HOOKS))
        if not (hooks or asked):
            if between:
                playing.train(1)
            return
        deadline = time.process_time() + max(seconds, LATER_SECONDS)
        epoch, more, left_over = first, True, ""
        while more:
            with run.phase("hooks"), replaced(torch, {"equal": _same}):
                while True:
                    self._next(playing, epoch)
                    epoch += 1
                    start = epoch * self.steps
                    more = epoch + 1 < self.total and not self._stops(epoch, first, deadline)
                    now = self._signature(playing, first, epoch) if hooks else state.known
                    differs = self._takes_over(state, now, _states(playing))
                    differs |= asked.undecided and epoch + 1 >= self.total
                    decides = next(self._differing(playing, epoch, start), None) is not None
                    if differs or decides or not more or epoch == first + 1:
                        break
            label, began = _("epoch {epoch}", epoch=epoch), time.process_time()
            before = state.followed
            for step in itertools.chain([start] * differs, self._differing(playing, epoch, start)):
                if state.followed >= LATER_STEPS:
                    left_over = label
                    break
                self._follow(playing, state, epoch, step, label)
            if between and epoch == first + 1 and state.followed == before:
                self._train(playing, "", {})
            deadline += time.process_time() - began
        if left_over:
            self._follow(playing, state, epoch, epoch * self.steps, left_over)
        self.reached = epoch
        if epoch + 1 < self.total:
            self._say_reached(playing, epoch)

    @contextlib.contextmanager
    def loaders_kept(self) -> Iterator[None]:
        """Afterwards the loaders, and what makes their samples, have the attributes that they had."""
        with attributes_kept(self._switched()):
            yield

    def objection(self, recipe: Recipe) -> Refusal | None:
        """A technique of the recipe that would not survive what later epochs change."""
        if self.unfreezes and recipe.frozen_on_host:
            return Refusal("offload_frozen", _("weights that are frozen now are trained in a later epoch"))
        if self.regroups and recipe.optimizer_on_host:
            return Refusal("offload_optimizer", _("the optimizer gets other weights in a later epoch"))
        return None

    def _takes_over(self, state: _State, now: tuple[Any, ...], states: int) -> bool:
        """Note what hooks have left; True if no step that was followed was like that."""
        before, state.known = state.known, now
        self.unfreezes |= [one[2] for one in now[0]] != [one[2] for one in before[0]]
        self.regroups |= now[2] != before[2]
        # The same step may meet more than it did: the states of what others have trained since.
        return now != before and (now, states) not in state.seen

    def _differing(self, playing: Playing, epoch: int, start: int) -> Iterator[int]:
        """Steps of an epoch that decide otherwise than all that have been followed when they are asked for."""
        asked = playing.asked
        for step in asked.steps("global_step", start, start + self.steps) if asked else ():
            if asked.differs({"current_epoch": epoch, "global_step": step}):
                yield step

    def _follow(self, playing: Playing, state: _State, epoch: int, step: int, label: str) -> None:
        """A step that differs."""
        changes: dict[str, Any] = {}
        if state.known[-1] != state.shapes:
            changes = self._batches(playing, self._sample(state.first, epoch), state.accumulate)
        state.followed += 1
        state.shapes = state.known[-1]
        playing.asked.followed({"current_epoch": epoch, "global_step": step})
        stepped = playing.shadow.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
        stepped.total.completed = step
        state.seen.add((state.known, _states(playing)))
        self._train(playing, label, changes)
        state.seen.add((state.known, _states(playing)))

    def _train(self, playing: Playing, label: str, changes: dict[str, Any]) -> None:
        optimizers = playing.shadow.optimizers
        if playing.run.optimizer is not None and optimizers and optimizers[0] is not playing.run.optimizer:
            playing.run.optimize_with(optimizers[0])

        def step() -> None:
            playing.train(1, label, **changes)
            changes.clear()

        with playing.followed(Message("the step of {epoch}", epoch=label or _("the second epoch"))):
            train_differently(playing.run, step) if label else step()

    def _next(self, playing: Playing, epoch: int) -> None:
        """Hooks at the end of this epoch and at the start of the next one, as FitLoop calls them."""
        progress = playing.shadow.fit_loop.epoch_progress.current
        progress.processed = epoch + 1
        if playing.has("on_train_epoch_end"):
            playing.hook("on_train_epoch_end")
        progress.completed, progress.ready = epoch + 1, epoch + 2
        stepped = playing.shadow.fit_loop.epoch_loop.automatic_optimization.optim_progress.optimizer.step
        stepped.total.completed = (epoch + 1) * self.steps
        if playing.has("on_train_epoch_start"):
            playing.hook("on_train_epoch_start")
        progress.started = epoch + 2

    def _stops(self, epoch: int, first: int, deadline: float) -> bool:
        """True if no later epoch is followed."""
        if self.reached is not None:  # every trace has to follow the same
            return epoch >= self.reached
        return epoch - first >= PLACES_LOOKED_AT or time.process_time() > deadline

    def _say_reached(self, playing: Playing, epoch: int) -> None:
        total = _("an unlimited number of") if math.isinf(self.total) else str(int(self.total))
        said = Message(
            "hooks were followed up to epoch {epoch} ({total} epochs): what later ones change is not included",
            epoch=epoch,
            total=total,
        )
        playing.run.note(said)

    def _signature(self, playing: Playing, first: int, epoch: int) -> tuple[Any, ...]:
        """What the memory of a step depends on, as far as hooks change it; the shapes of its batches come last."""
        module = playing.module
        sample = self._sample(first, epoch)
        parts = list(within(module))
        return (
            tuple(
                (id(part), name, one.requires_grad, one.shape)
                for part in parts
                for name, one in vars(part)["_parameters"].items()
                if one is not None
            ),
            tuple((id(part), part.training) for part in parts),
            tuple(_groups(optimizer) for optimizer in playing.shadow.optimizers),
            sum(one.nbytes for part in modules_in(playing.shadow.callbacks, besides=module) for one in _on_gpu(part)),
            self._shapes(sample),
        )

    def _shapes(self, sample: Sample) -> tuple[Any, ...]:
        if sample is self.sample and not self.reload and not self._samples:
            return ()  # nothing has been read anew
        return tuple(tuple(one.shape) for one in tensors_of(sample.make(sample.batch_size)))

    def _batches(self, playing: Playing, sample: Sample, accumulate: int) -> dict[str, Any]:
        """A step's batches of a later epoch's loader; where a plan cuts batches, micro-batches keep their size."""
        make, run = self.batch_of(sample), playing.run
        now, first = sample.batch_size, self.sample.batch_size
        if run.loaded_samples > run.batch_size:
            return {"batch": make, "accumulate": math.ceil(accumulate * now / first)}
        return {"batch": make if now == first else lambda size: make(math.ceil(size * now / first))}

    def _sample(self, first: int, epoch: int) -> Sample:
        """Batches of this epoch's train loader, which is asked for once; of the first one as hooks have switched it."""
        if epoch == first:
            self._as_written = _switches(self._switched())
        if not self.reload:
            switched = _switches(self._switched())
            if switched == self._as_written:
                return self.sample
            if switched not in self._samples:
                with random_state_kept():
                    self._samples[switched] = read(self.sample.loader)
            return self._samples[switched]
        if epoch == first:
            return self.sample
        made = epoch - (epoch - first) % self.reload
        if made == first:
            return self.sample
        if made not in self._samples:
            self._samples[made] = self.read()
        return self._samples[made]

    def _switched(self) -> list[Any]:
        """What hooks may switch a loader by: its data sets, their transforms and pipelines, and its batch samplers."""
        found: list[Any] = []
        for loader in loaders_in(self.sample.loader):
            pending = [getattr(loader, "dataset", None), getattr(loader, "batch_sampler", None)]
            while pending:
                one = pending.pop()
                if hasattr(one, "__dict__") and all(one is not other for other in found):
                    found.append(one)
                    pending += [vars(one).get(name) for name in _PARTS]
        return found


@dataclass
class _State:
    """What one trace has followed.

    Attributes:
        first: epoch.
        known: the signature of the latest epoch.
        accumulate: of the first epoch's steps.
        shapes: of the batches of the latest step.
        seen: signatures of the epochs whose steps were followed, and how many weights had states of an optimizer then.
        followed: steps that differ.
    """

    first: int
    known: tuple[Any, ...]
    accumulate: int
    shapes: tuple[Any, ...] = ()
    seen: set[tuple[Any, int]] = field(default_factory=set)
    followed: int = 0

    def __post_init__(self) -> None:
        self.shapes = self.known[-1]


#: Attributes by which data sets hold what makes their samples.
_PARTS = ("dataset", "transform", "transforms", "pipeline")


def _switches(parts: list[Any]) -> tuple[Any, ...]:
    """The attributes of these objects: numbers, names and sizes by value, others by identity."""
    return tuple(
        (name, value if isinstance(value, (int, float, str, tuple)) and _hashes(value) else id(value))
        for part in parts
        for name, value in vars(part).items()
    )


def _hashes(value: object) -> bool:
    try:
        hash(value)
    except TypeError:
        return False
    return True


def _groups(optimizer: torch.optim.Optimizer) -> tuple[Any, ...]:
    """The weights that an optimizer changes, and its switches."""
    return tuple(
        (tuple(map(id, group["params"])), tuple(value for value in group.values() if isinstance(value, bool)))
        for group in optimizer.param_groups
    )


def _states(playing: Playing) -> int:
    """Weights that have been trained."""
    return sum(len(getattr(one, "state", ())) for one in playing.shadow.optimizers)


def _on_gpu(module: torch.nn.Module) -> list[torch.Tensor]:
    """A callback's own weights that have been moved to the simulated GPU."""
    own = (one for kind in ("_parameters", "_buffers") for one in vars(module)[kind].values())
    return [one for one in own if one is not None and one.is_cuda]


def _same(one: torch.Tensor, other: torch.Tensor) -> bool:
    """``torch.equal`` for weights that training has told apart: equal is what is the same."""
    return one is other
