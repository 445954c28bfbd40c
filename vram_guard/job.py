"""Job: what a training does besides its steps, as a little program that a trace plays in order."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, cast

from vram_guard.checks import checked_count, one_of
from vram_guard.errors import InvalidInputError
from vram_guard.language import Message, _
from vram_guard.timeline import PHASE_NAMES, LaterChange, PhaseName

if TYPE_CHECKING:
    import torch

__all__ = ["Change", "Evaluation", "Job", "JobRun", "Resizable", "Resuming", "Saving"]


class JobRun(Protocol):
    """A run in a trace, as its job sees it: everything that it calls takes memory of the simulated GPU."""

    @property
    def model(self) -> Any:
        """The model on the simulated GPU, as the loop calls it (wrapped, where the step is spread over GPUs)."""
        ...

    @property
    def optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer over the model's parameters; None for inference."""
        ...

    @property
    def batch_size(self) -> int:
        """Samples of a training micro-batch in this trace."""
        ...

    @property
    def loaded_samples(self) -> int:
        """Samples of a batch of the training's loader in this trace, of which micro-batches may be slices."""
        ...

    @property
    def accumulate(self) -> int:
        """Micro-batches of an optimizer step in this trace, as the plan that is tried has them."""
        ...

    def train(self, steps: int = 2, label: str = "", **changes: Any) -> None:
        """Optimizer steps by the step's own loop.

        Args:
            steps: how many.
            label: of these steps in reports ("epoch 5: unfrozen").
            changes: fields of the :class:`~vram_guard.step.TrainingStep` that differ from here on (``batch``, ``loss``,
                ``accumulate``, ``keeps``, ``zero_grad``, ``clip_grad_norm``, ``clip_grad_value``, ``whole_batch``).
        """
        ...

    def load(self, batch: Any) -> Any:
        """The batch (any pytree of tensors) on the simulated GPU."""
        ...

    def phase(self, name: PhaseName, label: str = "") -> AbstractContextManager[None]:
        """What is allocated inside the block belongs to this phase of the run.

        Args:
            name: see :data:`vram_guard.timeline.PHASE_NAMES`.
            label: what tells it from others of its name ("sanity check").
        """
        ...

    def repeat(self, count: int) -> AbstractContextManager[None]:
        """The round inside the block, the last of a series of equal ones, stands for ``count`` rounds.

        What it leaves behind is counted so many times; what it frees again is not.
        """
        ...

    def autocast(self) -> AbstractContextManager[Any]:
        """The region in which the step's precision runs its forward; no region for precisions without autocast."""
        ...

    def evaluating(self, *, inference_mode: bool = False) -> AbstractContextManager[None]:
        """``model.eval()`` and no gradients inside the block; every module's mode as before afterwards."""
        ...

    def batch(self, batch: Any, batch_size: int) -> Any:
        """A batch of this size on the host, of a callable or an example, as of ``TrainingStep.batch``."""
        ...

    def trained_state(self, optimizer: torch.optim.Optimizer | None) -> Any:
        """The ``state_dict()`` of the optimizer after a step, taking no memory; None where it cannot be told."""
        ...

    def loaded(self, state: Any, map_location: Literal["cpu", "cuda"] = "cpu") -> Any:
        """What ``torch.load`` would return for this state (any pytree of tensors) once it had been saved."""
        ...

    def hold(self, value: Any) -> None:
        """Keep a value alive until the end of the run."""
        ...

    @property
    def allocated(self) -> int:
        """Bytes of the simulated GPU that are taken now."""
        ...

    def note(self, said: Message) -> None:
        """A remark for a reader of the prediction, such as a phase that could not be followed."""
        ...

    def optimize_with(self, optimizer: torch.optim.Optimizer) -> None:
        """Later steps are those of another optimizer (a schedule has made it anew)."""
        ...


class LoopRun(JobRun, Protocol):
    """The run of a job whose steps are taken by a loop of its own, in the order in which that does everything.

    Backward passes and steps of optimizers are seen where they are called; the loop tells the rest.
    """

    def loop(self, *, micro_batches: bool) -> AbstractContextManager[None]:
        """Inside the block the job's own loop runs.

        Args:
            micro_batches: True where passes before a step are those of its micro-batches; False where nothing tells
                them from passes over other losses.
        """
        ...

    def batch_begins(self, label: str = "") -> None:
        """What comes next belongs to the next batch of a step.

        Args:
            label: of the step in reports.
        """
        ...

    def loss(self, batch: Any, *, autocast: bool = True) -> Any:
        """The step's own loss of a batch that lies on the simulated GPU.

        Args:
            batch: to compute it of.
            autocast: False where the loss enters the region of its forward itself.
        """
        ...

    def step_ends(self) -> bool:
        """A step is over, with all that the loop does in it.

        Returns:
            True where another one is needed, which shows whether every step leaves something behind.
        """
        ...

    def changes_later(self, what: LaterChange) -> None:
        """Later steps differ from the first in this."""
        ...


def evenly(size: int, most: int) -> int:
    """The largest batch of at most so many samples that batches of ``size`` can be cut into.

    >>> evenly(100, 60), evenly(100, 100), evenly(7, 3)
    (50, 100, 1)
    """
    return next(part for part in range(min(size, most), 0, -1) if size % part == 0)


class Resizable(Protocol):
    """A job's ``play`` of a framework, which can be played with smaller batches of its evaluations."""

    def evaluation_batch_size(self, name: str) -> int | None:
        """Samples of the largest batch in phases of this name; None where no loader of its own delivers them."""
        ...

    def with_evaluation_batch_size(self, name: str, size: int) -> Resizable:
        """The same run, in which batches of these phases have at most so many samples, and are more."""
        ...

    def __call__(self, run: JobRun) -> object:
        """Play it, see :class:`Job`."""
        ...


@dataclass(frozen=True)
class Job:
    """The phases of a run besides (and between) its training steps: evaluation, saving, resuming, schedules.

    Attributes:
        play: called once in a trace, with a :class:`JobRun`. It has to train: ``run.train()``.
        steps: optimizer steps of the whole run, or as many as it has at least; None: not known. Memory that grows with
            every step has to fit until the last one.
        ends_process: True where ``play`` leaves the objects that it runs changed (a framework's own loop): it is played
            in a copy of the process, which ends with it, and is given a :class:`LoopRun`.

    Example:
        >>> def play(run):
        ...     run.train()
        ...     with run.phase("saving"):
        ...         copy = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
        ...     run.train(1)
        >>> step = TrainingStep(
        ...     model=torch.nn.Linear(256, 256),
        ...     batch=torch.ones(4, 256),
        ...     loss=lambda model, batch: model(batch).sum(),
        ...     optimizer=torch.optim.Adam,
        ...     job=Job(play),
        ... )
        >>> [phase.name for phase in estimate(step, 1000).phases]
        ['setup', 'training', 'saving', 'training']
    """

    play: Callable[..., object]
    steps: int | None = None
    ends_process: bool = False

    def __post_init__(self) -> None:
        if not callable(self.play):
            raise InvalidInputError(_("a job's play must be a callable: run -> None"))

    @classmethod
    def of(cls, *parts: Callable[[JobRun], object]) -> Job:
        """The job of a plain loop: resuming, two steps, every other part in order, one more step.

        Args:
            parts: :class:`Resuming`, :class:`Evaluation`, :class:`Saving`, :class:`Change`, or callables of one's own,
                which get the :class:`JobRun`.
        """
        if not parts:
            raise InvalidInputError(_("a job has parts: Evaluation(...), Saving(), Resuming(), Change(...)"))
        if not all(map(callable, parts)):
            raise InvalidInputError(_("the parts of a job are callables: run -> None"))
        return cls(_InOrder(parts))

    def evaluation(self, name: str, label: str) -> Evaluation | None:
        """The evaluation with this name and label; None where that is none of :meth:`of`'s parts."""
        parts = self.play.parts if isinstance(self.play, _InOrder) else ()
        found = (part for part in parts if isinstance(part, Evaluation))
        return next((part for part in found if (part.name, part.label) == (name, label)), None)

    def with_evaluation(self, evaluation: Evaluation, batch_size: int, batches: int | None = None) -> Job:
        """The same job with another batch size of one of its evaluations.

        Args:
            evaluation: one of its parts.
            batch_size: samples of a batch.
            batches: so many; None: as many as the same samples make.
        """
        more = evaluation.batches_of(batch_size) if batches is None else batches
        return self._with(lambda part: {"batch_size": batch_size, "batches": more} if part is evaluation else {})

    def evaluation_batch_size(self, name: str) -> int | None:
        """Samples of the largest batch in phases of this name, where a :class:`Resizable` tells."""
        asked = getattr(self.play, "evaluation_batch_size", None)
        return None if asked is None else asked(name)

    def with_evaluation_batch_size(self, name: str, size: int) -> Job:
        """The same job with smaller batches in phases of this name, of a :class:`Resizable`."""
        return replace(self, play=cast("Resizable", self.play).with_evaluation_batch_size(name, size))

    def beside(self, batch_size: int) -> Job:
        """The same job where the training's batches of this size may be cut: those of evaluations are not."""
        return self._with(lambda part: {"batch_size": part.batch_size or batch_size})

    def _with(self, changes: Callable[[Evaluation], dict[str, Any]]) -> Job:
        if not isinstance(self.play, _InOrder):
            return self
        parts = (replace(part, **changes(part)) if isinstance(part, Evaluation) else part for part in self.play.parts)
        return Job(_InOrder(tuple(parts)))

    def callables(self) -> Iterator[object]:
        """Everything of the user's that it calls."""
        pending: list[object] = [self]
        while pending:
            one = pending.pop()
            if isinstance(one, tuple):
                pending += one
            elif isinstance(one, (Job, _InOrder, *_PARTS)):
                pending += vars(one).values()
            else:
                yield one


@dataclass(frozen=True)
class _InOrder:
    parts: tuple[Callable[[JobRun], object], ...]

    def __call__(self, run: JobRun) -> None:
        for part in self.parts:
            if isinstance(part, Resuming):
                part(run)
        run.train(2)
        for part in self.parts:
            if not isinstance(part, Resuming):
                part(run)
        run.train(1)  # it meets what the others have left of the allocator's segments


@dataclass(frozen=True)
class Evaluation:
    """Rounds over a validation (or test) loader, in ``eval()`` mode, without gradients, in the step's precision.

    Attributes:
        batch: as in a :class:`~vram_guard.step.TrainingStep`: a callable ``batch_size -> batch``, or an example.
        run: ``(model, batch) -> outputs``: what is computed of one batch (losses, metrics, generation).
        batch_size: of its own loader; None: that of the training's loader, whose batches a plan may cut.
        batches: rounds of one evaluation; a loader without an end is bounded by it.
        keeps: what the loop holds of the outputs. "nothing": they die with their round; "outputs": until those of
            the next round are there; "all": of all rounds, as a list that ``finish`` gets.
        finish: ``(outputs) -> anything``, called with the list of "all" after the last round (``torch.cat(outputs)``).
        inference_mode: True: ``torch.inference_mode()`` in place of ``torch.no_grad()``.
        name: of the phase: "validation", "test", "prediction", "generation".
        label: what tells it from others of its name.

    Example:
        >>> rows = torch.ones(4, 256)
        >>> step = TrainingStep(
        ...     model=torch.nn.Linear(256, 256),
        ...     batch=rows,
        ...     loss=lambda model, batch: model(batch).sum(),
        ...     optimizer=torch.optim.Adam,
        ...     job=Job.of(Evaluation(rows, lambda model, batch: model(batch), batch_size=50000, batches=10)),
        ... )
        >>> estimate(step, 1000).peak_phase.name
        'validation'
    """

    batch: Any
    run: Callable[[Any, Any], Any]
    batch_size: int | None = None
    batches: int = 2
    keeps: Literal["nothing", "outputs", "all"] = "nothing"
    finish: Callable[[Any], object] | None = None
    inference_mode: bool = False
    name: PhaseName = "validation"
    label: str = ""

    def __post_init__(self) -> None:
        if not callable(self.run):
            raise InvalidInputError(_("an evaluation's run must be a callable (model, batch) -> outputs"))
        if self.batch_size is not None:
            checked_count("batch_size", self.batch_size)
        checked_count("batches", self.batches)
        one_of("keeps", self.keeps, ("nothing", "outputs", "all"))
        one_of("name", self.name, PHASE_NAMES)
        if self.finish is not None and self.keeps != "all":
            raise InvalidInputError(_('finish gets the outputs of all rounds: give keeps="all" as well'))

    def batches_of(self, batch_size: int) -> int:
        """The batches of this size that its samples make, where its own batch size is known."""
        return self.batches if self.batch_size is None else -(-self.batches * self.batch_size // batch_size)

    def __call__(self, run: JobRun) -> None:
        """The first and the last round, which stands for all others."""
        size = run.loaded_samples if self.batch_size is None else self.batch_size
        with run.phase(self.name, self.label), run.evaluating(inference_mode=self.inference_mode):
            outputs: Any = None
            collected = []
            for number in range(min(self.batches, 2)):
                with run.repeat(self.batches - 1) if number else nullcontext():
                    batch = run.load(run.batch(self.batch, size))
                    with run.autocast():
                        made = self.run(run.model, batch)
                    if self.keeps == "all":
                        collected.append(made)
                    elif self.keeps == "outputs":
                        outputs = made
                    del made, batch
            if self.finish is not None:
                self.finish(collected)
            del outputs, collected


@dataclass(frozen=True)
class Saving:
    """A checkpoint is saved. ``torch.save`` itself moves storages to the host, one after the other.

    Attributes:
        state: ``(model, optimizer) -> anything``: what is saved, made as the script makes it; None: the state dicts
            themselves, which copy nothing.
        label: what tells it from others of its name.

    Example:
        >>> def copies(model, optimizer):
        ...     return {name: tensor.clone() for name, tensor in model.state_dict().items()}
        >>> step = TrainingStep(
        ...     torch.nn.Linear(256, 256),
        ...     torch.ones(4, 256),
        ...     lambda net, x: net(x).sum(),
        ...     torch.optim.Adam,
        ...     job=Job.of(Saving(copies)),
        ... )
        >>> [phase.name for phase in estimate(step, 1000).phases]
        ['setup', 'training', 'saving', 'training']
    """

    state: Callable[[Any, Any], object] | None = None
    label: str = ""

    def __call__(self, run: JobRun) -> None:
        """The state is made, held until it is written, and dropped."""
        with run.phase("saving", self.label):
            if self.state is None:
                run.model.state_dict()
                # ZeroRedundancyOptimizer has one only once it has gathered it, on the host.
                if run.optimizer is not None and not hasattr(run.optimizer, "consolidate_state_dict"):
                    run.optimizer.state_dict()
            else:
                self.state(run.model, run.optimizer)


@dataclass(frozen=True)
class Resuming:
    """A checkpoint is loaded before the first step: the weights, and the optimizer's states.

    Attributes:
        map_location: of ``torch.load``: where the checkpoint's tensors arrive.
        keeps: True: the checkpoint is held for the whole run (a name of the script's main part).

    Example:
        >>> job = Job.of(Resuming(map_location="cuda"))
    """

    map_location: Literal["cpu", "cuda"] = "cpu"
    keeps: bool = False

    def __post_init__(self) -> None:
        one_of("map_location", self.map_location, ("cpu", "cuda"))

    def __call__(self, run: JobRun) -> None:
        """Torch's own ``load_state_dict`` of both, with a checkpoint of their shapes."""
        with run.phase("resuming"):
            checkpoint = run.loaded((run.model.state_dict(), run.trained_state(run.optimizer)), self.map_location)
            weights, states = checkpoint
            run.model.load_state_dict(weights)
            if run.optimizer is not None and states is not None:
                run.optimizer.load_state_dict(states)
            if self.keeps:
                run.hold(checkpoint)
            del checkpoint, weights, states


@dataclass(frozen=True)
class Change:
    """A schedule changes the step, which is then followed for two more steps.

    Attributes:
        change: ``(model, optimizer) -> None``, as the schedule's hook does it; None: nothing is called.
        label: of the steps under it: "epoch 5: unfrozen".
        step: fields of the :class:`~vram_guard.step.TrainingStep` that differ from here on: a batch of a higher
            resolution, more micro-batches, ...

    Example:
        >>> job = Job.of(Change(lambda model, optimizer: model.requires_grad_(True), label="epoch 5: unfrozen"))
    """

    change: Callable[[Any, Any], object] | None = None
    label: str = ""
    step: Mapping[str, Any] = field(default_factory=dict)

    def __call__(self, run: JobRun) -> None:
        """The change, and two steps."""
        if self.change is not None:
            self.change(run.model, run.optimizer)
        run.train(2, self.label, **self.step)


_PARTS = (Evaluation, Saving, Resuming, Change)
