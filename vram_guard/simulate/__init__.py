"""simulate: run one training step symbolically and write down what it allocates, as CUDA would."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, fields, replace
from numbers import Integral
from typing import TYPE_CHECKING, Any, ParamSpec, cast

from vram_guard.allocator import Placement
from vram_guard.checks import known_names
from vram_guard.errors import InvalidInputError
from vram_guard.language import Message, _
from vram_guard.limits import TRACES_KEPT
from vram_guard.plain_model import as_step
from vram_guard.step import TrainingStep, checked_count
from vram_guard.timeline import Affine, Collective, Estimate, Note, Timeline, merge_affine

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vram_guard.budget import Budget
    from vram_guard.simulate.device.capability import Capability, Version

P = ParamSpec("P")

__all__ = ["estimate", "holds_at", "law", "trace", "traced_at"]

#: Two sizes that differ by one sample, neither of them 1: torch treats dimensions of one specially.
TRACED_SIZES = (2, 3)

#: NVIDIA A100: what a step is traced for unless the caller names another GPU.
DEFAULT_CAPABILITY = (8, 0)

#: Where the law is checked unless the caller names a size: far from the traced ones, a multiple of nothing. Sizes that
#: grow with the square of the batch, padding to multiples and code for large batches show here.
CHECKED_SIZE = 37

LAW_BROKEN = Note(Message("the sequence of allocations differs between batch sizes: every size asked for is traced"))


def trace(
    step: TrainingStep | nn.Module | Callable[[], nn.Module],
    *,
    input_shape: str | int | Sequence[Any] | None = None,
    compute_capability: tuple[int, int] = DEFAULT_CAPABILITY,
    multiprocessors: int | None = None,
    placement: Placement | None = None,
    budget: Budget | str | None = None,
    check_at: int | None = None,
    checked: bool = True,
    cudnn: str | None = None,
) -> Timeline:
    """Two consecutive training steps as allocations and frees, for every batch size.

    The step runs three times, on symbolic tensors: at two small batch sizes, which give the law, and at a larger one,
    which checks it. No arithmetic is done, no GPU is touched and the user's objects come back bit-identical. Where the
    sequence itself depends on the batch size, or sizes depend on the values in the batch, the timeline says so in its
    notes and traces each size that it is asked for.

    Args:
        step: what is trained.
        input_shape: where ``step`` is a plain model, or a callable that builds one: the shape of one sample, such as
            ``(3, 224, 224)``, "512:int64", or a list of these for several inputs. AdamW and a loss are then assumed,
            see :func:`vram_guard.plain_model.step_of_model`.
        compute_capability: of the GPU that is meant; decides attention backends and library workspaces.
        multiprocessors: of the GPU that is meant, on which the buffers of large reductions depend; None: the most that
            a card of this compute capability has (:func:`vram_guard.budget.catalogue.most_multiprocessors`).
        placement: where CUDA puts new segments on the GPU that is meant: "below" or "above" the earlier ones
            (``Budget.placement``); None: not known, and the larger peak of both counts.
        budget: whose card is meant, or its name, in place of these three; of an amount alone, these three hold.
        check_at: the batch size at which the law is checked; None: :data:`CHECKED_SIZE`.
        checked: False leaves the check to the caller, who compares with :func:`traced_at` where it matters.
        cudnn: the cuDNN that is asked, without a GPU, for the workspaces of convolutions: "off", "ask" (the installed
            one), the path of a libcudnn.so.9 of 9.8 or later, or "auto": the installed one where torch has a GPU here.
            None: what the setting ``cudnn`` says, "auto" without one. The timeline says what came of it.

    Raises:
        InvalidInputError: ``cudnn`` is none of these.
        UnsupportedStepError: the step cannot be run symbolically at all.
        Exception: whatever the user's own code raises, with its own traceback.

    Example:
        >>> net = torch.nn.Linear(256, 256)
        >>> step = TrainingStep(net, torch.ones(4, 256), lambda net, x: net(x).sum(), torch.optim.Adam)
        >>> timeline = trace(step)
        >>> timeline.at(1000).breakdown["batch"], timeline.at(2000).breakdown["batch"]
        (1024000, 2048000)
    """
    from vram_guard.simulate.device.capability import Capability
    from vram_guard.simulate.operators.cudnn_choice import checked_choice
    from vram_guard.simulate.tracing.run import with_built_model

    checked_choice(cudnn)
    if budget is not None:
        from vram_guard.budget import Budget

        card = Budget.resolve(budget)
        compute_capability = card.compute_capability or compute_capability
        multiprocessors, placement = card.multiprocessors or multiprocessors, card.placement or placement
    capability = Capability(compute_capability)
    step = with_built_model(cast("TrainingStep", as_step(step, input_shape)), capability)
    run = _run_on(step, capability, cudnn)
    timeline = law(run, check_at=check_at, checked=checked).on(multiprocessors, placement)
    # A trace that is yet to come may ask more.
    return timeline if timeline.retrace is not None else replace(timeline, asked=capability.answers)


def law(
    run: Callable[[int], Timeline],
    *,
    check_at: int | None = None,
    checked: bool = True,
    first: Callable[[int], Timeline] | None = None,
) -> Timeline:
    """The timeline for every batch size, as :func:`trace` gives it, of whatever ``run`` follows at one size.

    ``first`` follows the first of the two steps alone: then that is what the check looks at, and the size of the check
    does not count as one that was traced.
    """
    run = each_once(run)
    check_at = CHECKED_SIZE if check_at is None else size_of_check(checked_count("check_at", check_at))
    small, large = [run(size) for size in TRACED_SIZES]  # of map, a StopIteration of the user's would be the end
    merged = law_of_two(small, large)
    if merged is not None:
        if not checked:
            return merged
        if first is not None and not merged.deferred and merged.parallel is None:
            if begins_at(first(check_at), merged, check_at):
                return merged
        elif holds_at(run(check_at), merged, check_at):
            return replace(merged, traced=(*TRACED_SIZES, check_at))
    return _AtEachSize(run, (LAW_BROKEN,)).also(small)


def size_of_check(batch_size: int) -> int:
    """Where the law is checked of a step that will run with so many samples: there, unless the law is made of it."""
    return CHECKED_SIZE if batch_size in TRACED_SIZES else batch_size


def law_of_two(small: Timeline, large: Timeline) -> Timeline | None:
    """The law of traces at two batch sizes; None where the sequence differs, or sizes depend on values in the batch."""
    merged = merge_affine(small, large)
    from_values = any(note.from_values for note in small.notes)
    # Operators that differ between sizes have no law, even where they take the same memory.
    same_work = merged is not None and bool(merged.work) == bool(small.work)
    return merged if same_work and not from_values else None


def traced_at(run: Callable[[int], Timeline], batch_size: int) -> Timeline:
    """Trace ``run`` at one batch size; other sizes that the timeline is asked for are traced anew."""
    return _AtEachSize(each_once(run))(batch_size)


class _AtEachSize:
    """Traces at one size each; a timeline leads to this, and this to no timeline that leads here again.

    Args:
        run: traces at a size.
        notes: what is said of each, besides its own.
    """

    def __init__(self, run: Callable[[int], Timeline], notes: tuple[Note, ...] = ()) -> None:
        self._run = run
        self._notes = notes

    def __call__(self, batch_size: int) -> Timeline:
        return self.also(self._run(batch_size))

    def also(self, exact: Timeline) -> Timeline:
        """A trace at one size, which leads to those at others."""
        return replace(exact, notes=(*exact.notes, *self._notes), retrace=self)


def each_once(run: Callable[P, Timeline]) -> Callable[P, Timeline]:
    """``run``, which keeps the last :data:`KEPT_TRACES` timelines that it made."""
    return cast("Callable[P, Timeline]", functools.lru_cache(maxsize=TRACES_KEPT)(run))


def trace_at(
    step: TrainingStep,
    batch_size: int,
    *,
    compute_capability: tuple[int, int] = DEFAULT_CAPABILITY,
    cudnn: str | None = None,
) -> Timeline:
    """The step traced at one batch size alone, see :func:`traced_at`; the arguments are those of :func:`trace`.

    Raises:
        InvalidInputError: ``cudnn`` makes no sense.
        UnsupportedStepError: the step cannot be run symbolically at all.
        Exception: whatever the user's own code raises, with its own traceback.
    """
    return traced_at(_run_on(step, compute_capability, cudnn), checked_count("batch_size", batch_size))


def _run_on(step: TrainingStep, capability: Capability | Version, cudnn: str | None) -> Callable[[int], Timeline]:
    """A batch size -> the step traced at it, on a GPU of this capability."""
    from vram_guard.simulate.operators.cudnn_choice import checked_choice, under
    from vram_guard.simulate.tracing.run import run_step

    return under(checked_choice(cudnn), lambda size: run_step(step, size, capability))


def holds_at(direct: Timeline, merged: Timeline, batch_size: int) -> bool:
    """True if a direct trace at one batch size is what the law says of it."""
    return (
        direct.events == merged.events
        and direct.streams == merged.streams
        and direct.deferred == merged.deferred
        and direct.sizes(batch_size) == merged.sizes(batch_size)
        and direct.host_events == merged.host_events
        and direct.host_sizes(batch_size) == merged.host_sizes(batch_size)
        and (direct.parallel is None or _at(direct, batch_size) == _at(merged, batch_size))
    )


def begins_at(first: Timeline, merged: Timeline, batch_size: int) -> bool:
    """True if a direct trace of the first step alone, at one batch size, is what the law says of its beginning."""
    events, host = len(first.events), len(first.host_events)
    return (
        first.events == merged.events[:events]
        and first.streams == merged.streams
        and first.sizes(batch_size) == merged.sizes(batch_size)[: len(first.blocks)]
        and first.host_events == merged.host_events[:host]
        and first.host_sizes(batch_size) == merged.host_sizes(batch_size)[: len(first.host_blocks)]
    )


def _at(timeline: Timeline, batch_size: int) -> list[Collective]:
    """The collectives at one batch size."""
    return [each._replace(bytes=Affine(each.bytes.at(batch_size), 0)) for each in timeline.collectives]


def estimate(
    step: TrainingStep | nn.Module | Callable[[], nn.Module],
    batch: Any = None,
    optimizer: torch.optim.Optimizer | Callable[[Any], torch.optim.Optimizer] | None = None,
    *,
    batch_size: int | None = None,
    input_shape: str | int | Sequence[Any] | None = None,
    compute_capability: tuple[int, int] = DEFAULT_CAPABILITY,
    cudnn: str | None = None,
    **settings: Any,
) -> Estimate:
    """The memory of the step at one batch size, traced at that very size: ``trace(step).at(batch_size)``, checked.

    The estimate answers for any card, ``estimate(model, batch, optimizer).fits("RTX 4090")``: where that card's kernels
    take other memory, the step is traced again for it. For this the estimate holds the step, and so the model.

    Args:
        step: what is trained: a TrainingStep or a model.
        batch: samples of a batch; of a model also a batch to call it with, see
            :func:`vram_guard.plain_model.step_of_example`.
        optimizer: of a model: the optimizer, which stays as it is, or ``parameters -> optimizer``; None: AdamW.
        batch_size: samples of a batch; None: as ``batch`` says.
        input_shape: as for :func:`trace`.
        compute_capability: as for :func:`trace`.
        cudnn: as for :func:`trace`.
        settings: of a model: ``loss`` and further arguments of :class:`~vram_guard.TrainingStep`.

    Raises:
        InvalidInputError: arguments that mean nothing or contradict each other.
        UnsupportedStepError: the step cannot be run symbolically at all.
        Exception: whatever the user's own code raises, with its own traceback.

    Example:
        >>> net = torch.nn.Linear(256, 256)
        >>> step = TrainingStep(net, torch.ones(4, 256), lambda net, x: net(x).sum(), torch.optim.Adam)
        >>> estimate(step, 1000).breakdown["parameters"]  # (256 x 256 + 256) numbers of 4 bytes, in blocks of 512
        263168
        >>> estimate(net, 1000, input_shape=(256,)).breakdown["optimizer_states"]  # of AdamW, two for each
        526336
        >>> taken = estimate(net, torch.ones(1000, 256), torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9))
        >>> taken.breakdown["optimizer_states"], taken.fits("RTX 4090"), taken.fits("8MiB")
        (263168, True, False)
    """
    from vram_guard.simulate.tracing.batches import leading_size

    if isinstance(batch, Integral):
        if batch_size is not None:
            raise InvalidInputError(_("give the samples of a batch once: as batch or as batch_size"))
        batch, batch_size = None, int(batch)
    known_names("estimate", settings, _OF_A_STEP)
    made = cast("TrainingStep", as_step(step, input_shape, batch, optimizer=optimizer, **settings))
    if batch_size is None:
        if batch is None:
            raise InvalidInputError(_("give the batch: how many samples it has, or an example of it"))
        batch_size = leading_size(batch)
    return _OnCards(made, checked_count("batch_size", batch_size), compute_capability, cudnn).estimate()


#: What may be said of the step that is made of a model.
_OF_A_STEP = tuple(one.name for one in fields(TrainingStep) if one.name not in ("model", "batch", "optimizer"))


@dataclass(frozen=True)
class _OnCards:
    """The estimates of one step at one batch size, for the cards that are asked about."""

    step: TrainingStep
    batch_size: int
    capability: tuple[int, int]
    cudnn: str | None
    timelines: list[Timeline] = field(default_factory=list)

    def estimate(self, budget: Budget | None = None) -> Estimate:
        """On the card of a budget; without one, or of an amount alone, on a card of the capability that was asked."""
        from vram_guard.simulate.device.capability import Capability

        capability = self.capability if budget is None else budget.compute_capability or self.capability
        known = (one.of_capability(capability) for one in self.timelines)
        timeline = next((one for one in known if one is not None), None)
        if timeline is None:
            asked = Capability(capability)
            timeline = _run_on(self.step, asked, self.cudnn)(self.batch_size)
            timeline = replace(timeline, asked=asked.answers)
            self.timelines.append(timeline)
        if budget is not None:
            timeline = timeline.on(budget.multiprocessors, budget.placement)
        return replace(timeline.at(self.batch_size), elsewhere=self.estimate)
