"""The profile of a script's loop: what it differentiates, clips and schedules in an optimizer step.

A launch with other options is another training, unless it is shown to be the same: two dry runs are compared by this
(:mod:`vram_guard_accelerate.relaunch.equivalence`).
"""

from __future__ import annotations

import contextlib
import sys
from bisect import bisect_right
from collections import Counter
from collections.abc import Callable, Container, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import torch
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from vram_guard.apply.loss_terms import Term, is_made_of, loss_terms, number_of
from vram_guard.language import marked
from vram_guard.proof.samples_apart import LossForm, SamplesApart
from vram_guard.simulate.device.constants import compute
from vram_guard.tensors import without_modes
from vram_guard_accelerate._patching import wrap
from vram_guard_accelerate.apply.techniques import within
from vram_guard_accelerate.dry_run._batch_to_loss import BatchToLoss
from vram_guard_accelerate.dry_run._model_calls import single_samples

if TYPE_CHECKING:
    from torch import nn

    from vram_guard.capture.loader import Sample

#: Optimizer steps for which learning rates are predicted.
FORETOLD = 2000


#: Reasons why the learning rates of later steps are not known.
UnknownRates = Literal["", "measured", "set by the loop"]
UNKNOWN_RATES: dict[UnknownRates, str] = {
    "measured": marked("a schedule that follows a measured value moves at every optimizer step"),
    "set by the loop": marked("the loop sets learning rates by itself"),
}


@dataclass(frozen=True)
class LoopProfile:
    """A loop between its first optimizer step and its second, and what follows from it."""

    complete: bool
    """There was a second step."""
    batch_size: int
    batches_per_step: int
    losses: tuple[tuple[Term, ...], ...]
    """The terms of everything that ``backward`` was called for."""
    counts: tuple[tuple[str, int], ...]
    """Numbers of gradient clippings and of calls that set gradients to zero."""
    rates: tuple[tuple[float, ...], ...]
    """The learning rates at every optimizer step, each once: the first two as seen, the others as schedules go on."""
    rates_unknown: UnknownRates
    """The reason why they could not be predicted; "" where they were."""
    batches: int | None
    """Of an epoch, where one process has all of it; None: it has no known end."""
    samples: int | None
    """That the sampler hands out in an epoch; None: not known."""
    drops_last: bool
    """A short batch at the end is left out."""
    bars: tuple[int, ...]
    """Lengths of the progress bars that were made."""
    counts_items: bool
    """Losses are divided by the number of items of the whole optimizer step (Transformers' Trainer)."""

    @property
    def by_items(self) -> bool:
        """True where the graph of every loss shows that division."""
        return bool(self.losses) and all(term.by_items for terms in self.losses for term in terms)


class _Event(NamedTuple):
    kind: str
    what: Any = None


class LoopObserver:
    """Observes the loop of one process."""

    def __init__(self) -> None:
        self.returned = ReturnedLosses()
        self.from_batch = BatchToLoss()
        self._events: list[_Event] = []
        self._ends: list[int] = []
        """Indices of the events at which optimizer steps end."""
        self._schedulers: list[Any] = []
        self._bars: list[int] = []
        self._scaled: tuple[Any, Any] = (None, None)
        self._inside = Counter[str]()
        self._updates = contextlib.ExitStack()
        self._items: torch.Tensor | int | None = None
        """Of the batches of this optimizer step, where a Trainer counts them."""
        self.reads_losses = False
        """Off where techniques are on: to look at what is saved for the backward pass would bring it back from the
        host."""

    def install(self) -> None:
        """Permanently: the process has no other purpose."""
        self._around(torch.autograd, "backward", self._differentiated)
        self._around(torch.amp.GradScaler, "scale", self._scaled_up)
        for owner in (torch.optim.Optimizer, torch.nn.Module):
            self._around(owner, "zero_grad", self._zeroed)
        for kind in (LRScheduler, ReduceLROnPlateau):  # the second does not call the first's
            self._around(kind, "__init__", self._scheduler_made)
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(lambda *_step: self._updates.close())
        bars = sys.modules.get("tqdm.std")
        if bars is not None:
            self._around(bars.tqdm, "__init__", self._bar_made)

    @property
    def items(self) -> float | None:
        """The number of items of this optimizer step; None where nobody counts them, or a trace does not know it."""
        with without_modes():
            count = compute(self._items) if isinstance(self._items, torch.Tensor) else self._items
            return None if count is None else float(count)

    def watch_items(self, trainer: type) -> None:
        """Know the number by which a Trainer divides its losses, however it does so.

        Args:
            trainer: Transformers' own; a class that counts otherwise is not believed.
        """

        def counted(original: Any, *args: Any, **kwargs: Any) -> Any:
            batches, self._items = original(*args, **kwargs)
            self.from_batch.counted(self._items)
            return batches, self._items

        wrap(trainer, "get_batch_samples", counted, optional=True)

    def _around(self, owner: Any, name: str, told: Callable[[Any, tuple[Any, ...], dict[str, Any]], None]) -> None:
        """Call back after every call that is not inside another call of the same function.

        Args:
            owner: whose function it is.
            name: of the function.
            told: called with the result and the arguments; before, where it is ``backward``.
        """
        key, before = f"{owner.__name__}.{name}", name == "backward"

        def watched(original: Any, *args: Any, **kwargs: Any) -> Any:
            self._inside[key] += 1
            try:
                if before and self._inside[key] == 1:
                    told(None, args, kwargs)
                with self.from_batch.aside() if before else contextlib.nullcontext():
                    result = original(*args, **kwargs)
                if not before and self._inside[key] == 1:
                    told(result, args, kwargs)
                return result
            finally:
                self._inside[key] -= 1

        wrap(owner, name, watched)

    # --- events -----------------------------------------------------------------------------------------------

    def stepped(self) -> None:
        """An optimizer step of the loop has ended."""
        self._ends.append(len(self._events))

    def clipped(self) -> None:
        """Gradients are clipped."""
        self._events.append(_Event("clip"))

    def _zeroed(self, *_call: Any) -> None:
        self._events.append(_Event("zero"))

    def _scaled_up(self, result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = [*args[1:], *kwargs.values()]
        if isinstance(result, torch.Tensor) and given:
            self._scaled = (result, given[0])

    def _differentiated(self, _result: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        given = args[0] if args else kwargs.get("tensors")
        given = given if self.reads_losses else None
        for root in [given] if isinstance(given, torch.Tensor) else list(given or ()):
            loss = self._scaled[1] if root is self._scaled[0] else root
            self._events.append(_Event("loss", loss_terms(loss, items=self.items)))
            self.from_batch.differentiated(loss)
            self.returned.differentiated(loss)
        self._scaled = (None, None)

    def _before_step(self, optimizer: torch.optim.Optimizer, *_args: Any) -> None:
        self._updates.enter_context(self.from_batch.aside())
        self._events.append(_Event("rates", _rates(optimizer)))

    def _scheduler_made(self, _result: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        scheduler = args[0]
        self._schedulers.append(scheduler)
        step = scheduler.step

        def counted(*args: Any, **kwargs: Any) -> Any:
            self._inside["scheduler"] += 1
            try:
                return step(*args, **kwargs)
            finally:
                self._inside["scheduler"] -= 1
                if not self._inside["scheduler"]:
                    self._events.append(_Event("schedule", scheduler))
                    self._events.append(_Event("scheduled", _rates(scheduler.optimizer)))

        scheduler.step = counted

    def _bar_made(self, _result: Any, args: tuple[Any, ...], _kwargs: dict[str, Any]) -> None:
        total = getattr(args[0], "total", None)
        if isinstance(total, int):
            self._bars.append(total)

    # --- what follows -----------------------------------------------------------------------------------------

    def profile(self, sample: Sample, batches_per_step: int) -> LoopProfile:
        """The profile so far. Moves the schedules on: for a copy that is about to end."""
        complete = len(self._ends) > 1
        window = self._events[self._ends[0] : self._ends[1]] if complete else self._events
        happened = Counter(event.kind for event in window)
        rates, unknown = _Schedules(self._schedulers, self._events, self._ends, window).foretold()
        batches, samples = epoch_of(sample.loader)
        return LoopProfile(
            complete=complete,
            batch_size=sample.batch_size,
            batches_per_step=batches_per_step,
            losses=tuple(event.what for event in window if event.kind == "loss"),
            counts=tuple((kind, happened[kind]) for kind in ("clip", "zero")),
            rates=rates,
            rates_unknown=unknown,
            batches=batches,
            samples=samples,
            drops_last=bool(getattr(sample.loader, "drop_last", False)),
            bars=tuple(self._bars),
            counts_items=self.returned.items,
        )


class _Schedules:
    """The learning rates of a loop: as far as it ran, and on from there.

    Each parameter group is known by itself: optimizers are wrapped once or twice (a Trainer makes its schedule over
    what ``prepare`` returned), and DeepSpeed steps the groups of one optimizer one after the other, or one in parts.
    """

    def __init__(self, schedulers: list[Any], events: list[_Event], ends: list[int], window: list[_Event]) -> None:
        inner = {id(one) for scheduler in schedulers for one in getattr(scheduler, "_schedulers", ())}
        self._schedulers = [one for one in schedulers if id(one) not in inner]
        self._events = events
        self._ends = ends
        self._window = window

    def foretold(self) -> tuple[tuple[tuple[float, ...], ...], UnknownRates]:
        """The rates at every optimizer step, and why they are not known ("" where they are)."""
        seen = self._seen()
        steps = [tuple(one[at] for one in seen if len(one) > at) for at in range(2)]
        unknown = self._why_unknown()
        if unknown:
            return tuple(_distinct(rates) for rates in steps), unknown
        return tuple(_distinct(rates) for rates in (*steps, *self._further())), ""

    def _why_unknown(self) -> UnknownRates:
        moved = self._moved()
        if any(isinstance(scheduler, ReduceLROnPlateau) for scheduler in moved):
            return "measured"
        latest: dict[int, float] = {}
        for kind, what in self._events:
            if kind == "rates" and any(latest.get(group, rate) != rate for group, rate in what):
                return "set by the loop"
            if kind in ("rates", "scheduled"):
                latest.update(what)
        return ""

    def _seen(self) -> list[list[float]]:
        """The rates of each parameter group, one for each optimizer step of the loop in which it was updated."""
        found: dict[int, dict[int, float]] = {}
        for at, (kind, what) in enumerate(self._events):
            for group, rate in what if kind == "rates" else ():
                found.setdefault(group, {}).setdefault(bisect_right(self._ends, at), rate)
        return [list(rates.values()) for rates in found.values()]

    def _moved(self) -> Counter[Any]:
        return Counter(event.what for event in self._window if event.kind == "schedule")

    def _further(self) -> Iterator[tuple[float, ...]]:
        """From the third optimizer step on; where schedules move by epochs only, at every such move."""
        moved = self._moved()
        schedulers = [one for one in self._schedulers if not isinstance(one, ReduceLROnPlateau)]
        moves = {one: moved[one] if moved else 1 for one in schedulers}
        groups = {id(group): group for one in schedulers for group in one.optimizer.param_groups}.values()
        for _ in range(FORETOLD):
            # Beyond the last step of the training, schedules may fail: OneCycleLR says so, a power of what is left
            # (nnU-Net) gives complex numbers.
            with contextlib.suppress(Exception):
                for scheduler, times in moves.items():
                    for _ in range(times):
                        scheduler.step()
                yield tuple(float(group["lr"]) for group in groups)
                continue
            return


def _distinct(rates: tuple[float, ...]) -> tuple[float, ...]:
    """Each rate once: a hundred parameter groups often share one."""
    return tuple(dict.fromkeys(rates))


def _rates(optimizer: torch.optim.Optimizer) -> tuple[tuple[int, float], ...]:
    """Each parameter group, and its learning rate."""
    return tuple((id(group), float(group["lr"])) for group in optimizer.param_groups)


def epoch_of(loader: Any) -> tuple[int | None, int | None]:
    """The batches of an epoch of a loader, and the samples; None where they are not known."""
    from torch.utils.data import BatchSampler

    try:
        batches = len(loader)
    except (TypeError, NotImplementedError):
        return None, None
    sampler = getattr(loader, "batch_sampler", None)
    if type(sampler) is not BatchSampler:
        return batches, None
    try:
        return batches, len(sampler.sampler)  # type: ignore[arg-type]
    except TypeError:
        return batches, None


class ReturnedLosses:
    """The terms of the numbers that models return and that carry gradient: their losses."""

    def __init__(self) -> None:
        self._of: dict[int, tuple[tuple[Term, ...], ...]] = {}
        self._forms: dict[int, tuple[LossForm, ...]] = {}
        self._joined: dict[int, tuple[str, ...]] = {}
        self._apart: dict[int, SamplesApart] = {}
        self._entered: set[int] = set()
        self._numbers: set[int] = set()
        self.beside = False
        """True if something else was differentiated than the losses that the models returned."""
        self.items = False
        """True if the models are given a number to divide their loss by."""

    def begin(self, model: nn.Module, called: dict[str, Any], samples: int) -> None:
        """Before a forward: of the first one of each model, what it calls is taken down.

        Args:
            model: that is called.
            called: its arguments by name.
            samples: of the training's batch.
        """
        if id(model) not in self._apart:
            single = single_samples(called, samples)
            self._apart[id(model)] = SamplesApart(called, samples, single, within(model))
            self._apart[id(model)].__enter__()  # type: ignore[no-untyped-call]
            self._entered.add(id(model))

    def end(self, model: nn.Module) -> Container[int]:
        """A forward has ended; storages that the first one has written in place."""
        apart = self._apart.get(id(model))
        if apart is None or id(model) not in self._entered:
            return ()
        self._entered.discard(id(model))
        apart.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        return apart.written

    def look(self, model: nn.Module, called: dict[str, Any], out: list[torch.Tensor]) -> None:
        """After a forward.

        Args:
            model: that was called.
            called: its arguments by name.
            out: the tensors that it returned.
        """
        from vram_guard.apply.sliced_forward import ITEMS_IN_BATCH

        self.items = self.items or called.get(ITEMS_IN_BATCH) is not None
        self._numbers |= {number_of(one) or 0 for one in out if one.dim() == 0}
        if id(model) not in self._of:
            losses = [one for one in out if one.dim() == 0 and one.requires_grad and one.is_floating_point()]
            others = [one for one in out if one.dim() and one.requires_grad and one.is_floating_point()]
            apart = self._apart[id(model)]
            self._of[id(model)] = tuple(map(loss_terms, losses))
            self._forms[id(model)] = tuple(map(apart.form, losses))
            self._joined[id(model)] = tuple(map(apart.joined, others))

    def differentiated(self, loss: torch.Tensor) -> None:
        """A backward pass begins."""
        self.beside = self.beside or not is_made_of(loss, self._numbers)

    @property
    def forms(self) -> tuple[LossForm, ...]:
        """How each of :attr:`terms` adds up its samples."""
        return tuple(form for of in self._forms.values() for form in of)

    @property
    def joined(self) -> tuple[str, ...]:
        """Why samples are joined in each model's outputs for each sample; "" where they are not."""
        return tuple(why for of in self._joined.values() for why in of)

    @property
    def terms(self) -> tuple[tuple[Term, ...], ...]:
        """Of every number, model by model."""
        return tuple(terms for of in self._of.values() for terms in of)
