"""The reduction of a training's loss over its samples, read from the graphs of its symbolic runs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Literal, NamedTuple

import torch

from vram_guard.apply.loss_terms import Term, joined_in, loss_terms, reduction_of
from vram_guard.apply.microbatch import MicroBatch
from vram_guard.apply.normalisers import Normaliser, explained, look_at, placeholders_of
from vram_guard.language import _
from vram_guard.proof._batch_state import BatchState
from vram_guard.proof.effects import Listening, StepEffects
from vram_guard.proof.joined_samples import OTHER_PLACEHOLDERS, Calls, joined_by
from vram_guard.proof.step_state import StepState, storage_of
from vram_guard.simulate.tracing.batches import batch_source
from vram_guard.step import TrainingStep
from vram_guard.tensors import without_modes


class LossGraph:
    """The terms of a step's loss by batch size, as the traces of a plan come by.

    Attributes:
        step: the one to trace in place of the original, whose losses are looked at on their way.
    """

    def __init__(
        self,
        step: TrainingStep,
        loaded: Callable[[Any], Any] = lambda batch: batch,
        effects: StepEffects | None = None,
        *,
        read: bool = False,
    ) -> None:
        """The step's losses are looked at from now on.

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
        self._terms: dict[int, tuple[Term, ...]] = {}
        self._size = 0
        self._looks: dict[int, _Look] = {}
        self._looking = False
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
        from vram_guard.simulate.tracing.loop import scalar_loss

        if self._looking:
            return self._looked_at(model, batch)
        returned = self._as_written.loss(model, batch)
        if self._size and self._size not in self._terms and returned is not None:
            self._terms[self._size] = loss_terms(scalar_loss(returned), behind=True, batch=self._loaded(batch))
        return returned

    def reduction(self, batch_size: int) -> tuple[Literal["mean", "sum"] | Normaliser | None, str]:
        """The reduction, or what to count; None, and why, where it is none of these. Call it inside ``symbolic_run``.

        Args:
            batch_size: as written; at it and at half of it the step is traced where no plan has done so.
        """
        from vram_guard.simulate.tracing.run import run_step

        try:
            for size in _sizes(batch_size):
                if len(self._terms) < 2:
                    run_step(self.step.with_(job=None), size, (8, 0))
        except Exception as error:  # noqa: BLE001 - the user's own code runs in it
            return None, f"{type(error).__name__}: {error}"
        if len(self._terms) < 2:
            return None, _("the step makes no loss of its own")
        small, large = min(self._terms), max(self._terms)
        return reduction_of(self._terms[large], large, self._terms[small], small)

    def counted(self, parts: Sequence[MicroBatch], given: Callable[[Any], Any]) -> Normaliser | None:
        """What to count in micro-batches so that their losses add up; None where nothing in the batch explains it.

        Call it inside ``symbolic_run``. Nothing but what comes from the batch is computed.

        Args:
            parts: a loaded batch and its micro-batches, of different samples.
            given: a loaded batch -> as the step gets it.
        """
        from vram_guard.simulate.device.constants import known
        from vram_guard.simulate.tracing.loop import scalar_loss
        from vram_guard.simulate.tracing.run import run_step

        found: list[Normaliser | None] = []
        model = self._as_written.model
        buffers = dict(model.named_buffers()) if isinstance(model, torch.nn.Module) else {}

        def loss(traced: Any, batches: Sequence[Any]) -> Any:
            for name, buffer in traced.named_buffers():  # weights of classes, say
                if name in buffers and buffers[name].device.type == "cpu":
                    known(buffer, buffers[name])
            losses = []
            for part, batch in zip(parts, batches[: 1 if found else None], strict=False):
                with placeholders_of(part):
                    losses.append(self._as_written.loss(traced, batch))
            if not found:
                looks = [
                    look_at(scalar_loss(one), part, self._loaded(batch))
                    for one, part, batch in zip(losses, parts, batches, strict=True)
                ]
                with without_modes():
                    kind, _why = explained([look for look in looks if look is not None]) if all(looks) else (None, "")
                found.append(kind if isinstance(kind, Normaliser) else None)
            return losses[0]

        step = self.step.with_(job=None, loss=loss, batch=lambda _size: [given(part.data) for part in parts])
        run_step(step, parts[0].samples, (8, 0), steps=1)
        return found[0]

    def advanced(self, batch_size: int, *, among: Collection[str] | None = None) -> str:
        """Why state that the step advances itself makes micro-batches another training; "" where none is seen.

        The step is traced at two sizes for this and for :meth:`joined`. Call them inside ``symbolic_run``.

        Args:
            batch_size: as written.
            among: names of attributes to which this is confined; None: all, and what is done besides.
        """
        one, other = self._looked(batch_size)
        for name, shape in {**one.changed, **one.written}.items():
            if among is not None and not any(name.startswith(each) or each.startswith(name) for each in among):
                continue
            # What is as long as the batch is the batch's own; whether hooks read it, a run shows.
            if (self._read and among is None) or shape is None or shape == other.changed.get(name):
                return _("the step itself changes {name}, which would be once per micro-batch", name=name)
        for name in one.called if among is None else ():
            return _("{name} would happen once per micro-batch", name=name)
        return ""

    def compares_calls(self, batch_size: int) -> bool:
        """False where the step calls other functions for a smaller batch, as a loop over samples does."""
        one, other = self._looked(batch_size)
        return joined_by(one.calls.reaching(), other.calls.reaching()) is not None

    def draws(self, batch_size: int) -> bool:
        """True if the step draws random numbers; see :meth:`advanced`."""
        return any(look.random for look in self._looked(batch_size))

    def unknown_logs(self, batch_size: int) -> tuple[str, ...]:
        """Values that the step logs and that are not known to be means over the samples; see :meth:`advanced`."""
        one, other = self._looked(batch_size)
        large, small = one.calls.samples, other.calls.samples
        return tuple(
            name
            for name, terms in one.logged.items()
            if terms != () and not _is_mean(terms, large, other.logged.get(name), small)
        )

    def joined(self, batch_size: int, *, run: bool = False, counted: bool = False) -> str:
        """Why samples are joined by what has no graph; "" where this is not seen.

        Args:
            batch_size: as written.
            run: whether the step is also run, and this looks for what its samples may not show.
            counted: whether it is known what the loss is divided by.
        """
        one, other = self._looked(batch_size)
        function = joined_by(one.calls.reaching(), other.calls.reaching(), run=run, counted=counted)
        if function:
            return _("the result of {function}, which joins samples, reaches it without a graph", function=function)
        if not run and one.of_batch.terms and one.of_batch.tensors == other.of_batch.tensors:
            sizes = one.calls.samples, other.calls.samples
            why = joined_in(one.of_batch.terms, sizes[0], other.of_batch.terms, sizes[1])
            if why:
                return why
        # A count of repeated samples grows as the batch does.
        if (
            not counted
            and one.calls.counted
            and any(term.reduction == "sum" for terms in self._terms.values() for term in terms)
        ):
            return _("it is a sum that may be divided by a number that was computed")
        return ""

    def _looked(self, batch_size: int) -> tuple[_Look, _Look]:
        """The step at two sizes of the batch; kept, for the step stays the same."""
        if not self._looks:
            try:
                self._look(*_sizes(min(batch_size, _LARGEST_LOOKED_AT)))
            except Exception:
                if len(self._terms) < 2:
                    raise
                self._look(max(self._terms), min(self._terms))
        return self._looks[max(self._looks)], self._looks[min(self._looks)]

    def _look(self, large: int, small: int) -> None:
        from vram_guard.simulate.device.constants import other_placeholders
        from vram_guard.simulate.tracing.run import run_step

        self._looks, self._looking = {}, True
        try:
            run_step(self.step.with_(job=None), large, (8, 0))
            with other_placeholders(*OTHER_PLACEHOLDERS):
                run_step(self.step.with_(job=None), small, (8, 0))
        except BaseException:
            self._looks = {}
            raise
        finally:
            self._looking = False

    def _looked_at(self, model: Any, batch: Any) -> Any:
        """The loss, and a look at what else the step does.

        What is made on first use is made in the first step of a trace; only what it writes to weights counts there.
        """
        from vram_guard.simulate.tracing.loop import scalar_loss

        state, calls = StepState(model, self._as_written.loss, self._optimizer), Calls(batch, self._size)
        given = BatchState(batch)
        with self._effects.heard(), Listening() as heard, calls:
            returned = self._as_written.loss(model, batch)
        if returned is not None:
            loss = scalar_loss(returned)
            calls.returned(loss)
            before = self._looks.get(self._size)
            changed = {} if before is None else dict(state.changed())
            written = {**(before.written if before else {}), **dict.fromkeys(state.written(calls.written))}
            kept = (_("writing to {path}", path=path) for path in given.changed(batch)) if self._read else ()
            called = dict.fromkeys((*self._effects.calls, *heard.written, *kept))
            if calls.hooked:
                called[_("a hook of a tensor")] = None
            logged = {name: _logged(value, loss) for name, value in self._effects.logged.items()}
            self._effects.logged.clear()
            first = calls if before is None else before.calls  # it also makes what is made once
            of_batch = self._of_batch(model, batch) if before is None else before.of_batch
            self._looks[self._size] = _Look(changed, written, called, first, logged, heard.random, of_batch)
        return returned

    def _of_batch(self, model: Any, batch: Any) -> _OfBatch:
        from vram_guard.simulate.tracing.batches import map_tensors
        from vram_guard.simulate.tracing.loop import scalar_loss

        tensors = 0

        def with_graph(tensor: torch.Tensor) -> torch.Tensor:
            nonlocal tensors
            if not tensor.is_floating_point() or tensor.requires_grad:
                return tensor
            tensors += 1
            return tensor.detach().requires_grad_().clone()  # a leaf cannot be written in place

        try:
            loss = scalar_loss(self._as_written.loss(model, map_tensors(with_graph, batch)))
            return _OfBatch(tensors, () if not tensors or loss is None else loss_terms(loss, behind=True))
        except Exception:  # noqa: BLE001 - the user's own code may want a batch without one
            return _OfBatch(tensors, ())


#: Samples of the larger of the two batches, where as many are in one: more would show no more.
_LARGEST_LOOKED_AT = 16


class _Look(NamedTuple):
    """One loss of a trace."""

    changed: dict[str, tuple[int, ...] | None]
    """Names that held something else afterwards, with the shape of what is a tensor."""
    written: dict[str, None]
    """Tensors that it wrote to, in any step of the trace."""
    called: dict[str, None]
    """What it did outside of the model that is seen, in words."""
    calls: Calls
    logged: dict[str, tuple[Term, ...] | None]
    """Values that it logged, but the loss itself, with their terms; None where they have no graph."""
    random: bool
    """True where it draws random numbers."""
    of_batch: _OfBatch


class _OfBatch(NamedTuple):
    """The loss of a batch that has a graph itself, which so begins before the first weight."""

    tensors: int
    """Of the batch that have one."""
    terms: tuple[Term, ...]
    """() where the step does not run on such a batch."""


def _logged(value: Any, loss: torch.Tensor) -> tuple[Term, ...] | None:
    """The terms of a logged value; () for the loss itself."""
    if not isinstance(value, torch.Tensor):
        return None
    if storage_of(value) == storage_of(loss):
        return ()
    return loss_terms(value, behind=True) if value.requires_grad and value.numel() == 1 else None


def _is_mean(one: tuple[Term, ...] | None, samples: int, other: tuple[Term, ...] | None, other_samples: int) -> bool:
    return bool(one and other) and reduction_of(one or (), samples, other or (), other_samples)[0] == "mean"


def _sizes(batch_size: int) -> tuple[int, int]:
    return max(2, batch_size), max(1, batch_size // 2)
