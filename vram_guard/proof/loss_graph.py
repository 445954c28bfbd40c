"""The reduction of a training's loss over its samples, read from symbolic runs of its step."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch

from vram_guard.apply.microbatch import CannotSplitError, Layout, MicroBatch, Splitter
from vram_guard.apply.normalisers import EveryLabel, Normaliser
from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
from vram_guard.limits import LARGEST_APART
from vram_guard.proof._batch_state import BatchState
from vram_guard.proof.effects import Listening, StepEffects
from vram_guard.proof.functions import OwnBackward
from vram_guard.proof.later_changes import CodeRun, functions_of
from vram_guard.proof.samples_apart import LossForm, SamplesApart, form_over_samples, sizes_of_looks
from vram_guard.proof.step_state import StepState
from vram_guard.simulate.tracing.batches import batch_source
from vram_guard.state.collector import ObjectsBefore
from vram_guard.state.containers import parts_of
from vram_guard.state.modules import normalisation_buffers
from vram_guard.step import TrainingStep
from vram_guard.tensors import storage_of


class LossGraph:
    """The form of a step's loss at two sizes of its batch.

    Attributes:
        step: the one to trace in place of the original.
    """

    def __init__(
        self,
        step: TrainingStep,
        loaded: Callable[[Any], Any] = lambda batch: batch,
        effects: StepEffects | None = None,
        *,
        read: bool = False,
    ) -> None:
        """Nothing is looked at before it is asked for.

        Args:
            step: to look at.
            loaded: a batch as the step gets it -> as the loader delivered it.
            effects: of each step.
            read: whether hooks after the step may read what it has kept of its batch, or written to it.
        """
        self._as_written = step
        self._read = read
        self._effects = effects or StepEffects()
        self._loaded = loaded
        self._size = 0
        self._layout: Layout | None = None
        self._looks: dict[int, _TracedLoss] = {}
        self._looking = self._writes = False
        self._source = batch_source(step.batch)
        self._optimizer: torch.optim.Optimizer | None = None
        self.step = step.with_(
            loss=self._loss, batch=self._batch, optimizer=None if step.optimizer is None else self._made
        )

    def _made(self, parameters: Any) -> torch.optim.Optimizer:
        make = self._as_written.optimizer
        assert make is not None
        self._optimizer = make(parameters)
        return self._optimizer

    def _batch(self, size: int) -> Any:
        self._size = size
        return self._source(size)

    def _loss(self, model: Any, batch: Any) -> Any:
        return self._looked_at(model, batch) if self._looking else self._as_written.loss(model, batch)

    def reduction(
        self, batch_size: int, layout: Layout | None = None, parts: Iterable[int] = ()
    ) -> tuple[Literal["mean", "sum"] | Normaliser | EveryLabel | None, str]:
        """The reduction, or what to count; None, and why, where it is none of these. Call it inside ``symbolic_run``.

        Args:
            batch_size: as written.
            layout: how a batch is cut; None: its tensors hold samples where they are as long as it.
            parts: numbers of samples that it may be cut into; of one sample and of many a look does not tell.
        """
        self._layout = layout
        try:
            one, *others = self._looked(batch_size, parts)
        except Exception as error:  # noqa: BLE001 - the user's own code runs in it
            return None, f"{type(error).__name__}: {error}"
        found = [form_over_samples(one.form, other.form) for other in others]
        unlike = next((why for kind, why in found if kind is None), "")
        if unlike or any(kind != found[0][0] for kind, _why in found):
            return None, unlike or _("it has different parts at different batch sizes")
        return found[0]

    def advanced(self, batch_size: int) -> str:
        """Why state that the step advances itself makes micro-batches another training; "" where none is seen.

        Call this and what follows inside ``symbolic_run``.

        Args:
            batch_size: as written.
        """
        one, other, *_others = looks = self._looked(batch_size)
        for name, shape in {**one.changed, **one.written}.items():
            # What is as long as the batch is the batch's own; whether hooks read it, a run shows.
            if self._read or shape is None or shape == other.changed.get(name):
                return _("the step itself changes {name}, which would be once per micro-batch", name=name)
        for name, kind in one.beyond.items():
            return _("the step itself may change {name} ({kind}), which cannot be looked into", name=name, kind=kind)
        for why in (why for look in looks for why in look.later):
            return why
        for name in one.called:
            return _("{name} would happen once per micro-batch", name=name)
        return ""

    def own_backward(self, batch_size: int) -> str:
        """The first thing that the operators tell nothing of in a backward pass, in a sentence; "" for none."""
        return next((why for look in self._looked(batch_size) for why in look.own_backward), "")

    def written(self, batch_size: int) -> tuple[str, ...]:
        """Names of weights, buffers and attributes that the step itself writes to."""
        return tuple(dict.fromkeys(name for look in self._looked(batch_size) for name in look.written))

    def draws(self, batch_size: int) -> bool:
        """True if the step draws random numbers."""
        return any(look.random for look in self._looked(batch_size))

    def unknown_logs(self, batch_size: int) -> tuple[str, ...]:
        """Values that the step logs and that are not known to be means over the samples."""
        one, *others = self._looked(batch_size)
        known = [name for name, form in one.logged.items() if all(_is_mean(form, of.logged.get(name)) for of in others)]
        return tuple(name for name in one.logged if name not in known)

    def _looked(self, batch_size: int, parts: Iterable[int] = ()) -> list[_TracedLoss]:
        """The step at two sizes of the batch or more, the largest first; kept, for the step stays the same."""
        sizes = {*sizes_of_looks(batch_size), *(size for size in parts if 2 <= size <= LARGEST_APART)}
        self._look(sorted(sizes - self._looks.keys(), reverse=True))
        return [self._looks[size] for size in sorted(self._looks, reverse=True)]

    def _look(self, sizes: list[int]) -> None:
        from vram_guard.simulate.tracing.run import run_step

        self._looking = True
        try:
            for size in sizes:
                run_step(self.step.with_(job=None), size, (8, 0), looks=True)
        except BaseException:
            self._looks = {}
            raise
        finally:
            self._looking = False
        if len(self._looks) < 2:
            self._looks = {}
            raise UnsupportedStepError(_("the step makes no loss of its own"))

    def _looked_at(self, model: Any, batch: Any) -> Any:
        """The loss, and a look at what else the step does.

        What is made on first use is made in the first step of a trace; only what it writes to weights counts there.
        """
        from vram_guard.simulate.tracing.loop import scalar_loss

        self._know_buffers(model)
        state = StepState(model, self._as_written.loss, self._optimizer)
        loaded = self._loaded(batch)
        given = BatchState(loaded)
        apart = SamplesApart(loaded, self._size, self._single_samples(batch), model)
        ran, backward = CodeRun(ObjectsBefore() if self._writes else None), OwnBackward()
        with (
            self._effects.heard(),
            Listening() as heard,
            backward.heard(),
            self._numbers_of_optimizer(),
            apart,
            apart.reading(),
            ran,
        ):
            returned = self._as_written.loss(model, batch)
        self._writes = self._writes or ran.is_needed
        if returned is not None:
            loss = scalar_loss(returned)
            before = self._looks.get(self._size)
            changed = {} if before is None else dict(state.changed())
            written = {**(before.written if before else {}), **dict.fromkeys(state.written(apart.written))}
            others = (apart.written & apart.before) - self._known_storages(model, loaded)
            if others and not written:
                written[_("a tensor that it has not made")] = None
            kept = (_("writing to {path}", path=path) for path in given.changed(loaded)) if self._read else ()
            called = dict.fromkeys((*self._effects.calls, *heard.written, *kept))
            logged = {
                name: apart.form(value) if isinstance(value, torch.Tensor) else None
                for name, value in self._effects.logged.items()
                if not isinstance(value, torch.Tensor) or storage_of(value) != storage_of(loss)
            }
            self._effects.logged.clear()
            own = self._as_written.model
            later = [_("the step reads {name}, which moves on with the training", name=n) for n in self._effects.reads]
            if isinstance(own, torch.nn.Module):
                later += ran.changed_later(own, functions_of(self._effects.companions))
            later += ran.writes_elsewhere(state.known() | given.known)
            own_backward = tuple(backward.reasons())
            later += [*ran.takes_gradients(), *own_backward]
            if heard.of_python:
                later.append(_("it draws from a generator of NumPy or Python, maybe one number for the whole batch"))
            form = apart.form(loss) if before is None else before.form  # it also makes what is made once
            self._looks[self._size] = _TracedLoss(
                changed, written, called, form, logged, heard.random, state.beyond, tuple(later), own_backward
            )
        return returned

    @contextlib.contextmanager
    def _numbers_of_optimizer(self) -> Iterator[None]:
        """Inside the block, uses of the learning rate and of other numbers of the optimizer are heard."""
        groups = [] if self._optimizer is None else self._optimizer.param_groups
        given = [
            (group, name, value, self._effects.number(f"param_groups[{at}][{name!r}]", value))
            for at, group in enumerate(groups)
            for name, value in group.items()
            if type(value) in (int, float)
        ]
        for group, name, _value, number in given:
            group[name] = number
        try:
            yield
        finally:
            for group, name, value, number in given:
                if group.get(name) is number:
                    group[name] = value

    @staticmethod
    def _known_storages(model: Any, batch: Any) -> set[int]:
        """Those of the batch, and of what is known to move on with every micro-batch: statistics of normalisation."""
        own = normalisation_buffers(model)
        known = [buffer for name, buffer in model.named_buffers() if name in own]
        known += [part for _path, part in parts_of(batch) if isinstance(part, torch.Tensor)]
        return {storage_of(one) for one in known}

    def _know_buffers(self, model: Any) -> None:
        """Questions that the step asks of buffers are answered by what they hold."""
        from vram_guard.simulate.device.constants import known

        own = self._as_written.model
        real = dict(own.named_buffers()) if isinstance(own, torch.nn.Module) else {}
        for name, buffer in model.named_buffers():
            if name in real and real[name].device.type == "cpu":
                known(buffer, real[name])

    def _single_samples(self, batch: Any) -> list[MicroBatch] | None:
        try:
            return Splitter(self._size, 1, layout=self._layout).split(self._loaded(batch))
        except CannotSplitError:
            return None


class _TracedLoss(NamedTuple):
    """One loss of a trace."""

    changed: dict[str, tuple[int, ...] | None]
    """Names that held something else afterwards, with the shape of what is a tensor."""
    written: dict[str, None]
    """Tensors that it wrote to, in any step of the trace."""
    called: dict[str, None]
    """What it did outside of the model that is seen, in words."""
    form: LossForm
    logged: dict[str, LossForm | None]
    """Values that it logged, but the loss itself; None for what is no tensor."""
    random: bool
    """True where it draws random numbers."""
    beyond: dict[str, str]
    """What it leads to and what is not looked into, with its kind."""
    later: tuple[str, ...]
    """Why it may do something else in later steps."""
    own_backward: tuple[str, ...]
    """Sentences about what the operators tell nothing of in a backward pass."""


def _is_mean(one: LossForm | None, other: LossForm | None) -> bool:
    return one is not None and other is not None and form_over_samples(one, other)[0] == "mean"
