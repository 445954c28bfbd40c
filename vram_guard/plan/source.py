"""Source: a training step as a plan sees it, and how it is followed; TraceRequest: what is to be traced."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import TYPE_CHECKING, Any, Literal, Protocol

from vram_guard.plan.layouts import half_of
from vram_guard.techniques.recipe import AS_WRITTEN, Body, Recipe, Sharding

if TYPE_CHECKING:
    import torch

    from vram_guard.job import Job
    from vram_guard.parallel.links import Topology
    from vram_guard.parallel.spec import Parallel
    from vram_guard.step import TrainingStep
    from vram_guard.timeline import Timeline

#: What is followed. "whole": two optimizer steps; "first": the first of them; "weights": two, with a loss that uses
#: each weight once instead of the step's own, where only the optimizer is asked about.
Part = Literal["whole", "first", "weights"]


@dataclass(frozen=True)
class TraceRequest:
    """One way to run a training step, to be followed at one size."""

    batch_size: int
    """Samples of a micro-batch; 0 where no size has been chosen yet."""
    precision: str
    recipe: Recipe = AS_WRITTEN
    slices: int = 1
    """Micro-batches of a loaded batch."""
    part: Part = "whole"
    """Others than the whole are asked of a source with marks alone."""
    watched: bool = True
    """False: what forwards change is not looked at."""
    compiled: bool = False
    """True: code under ``torch.compile`` is compiled and followed, of a source that ``compiles``."""


class Explored(Protocol):
    """What a plan has found out of a source."""

    def forget(self) -> None:
        """Let go of its timelines."""


@dataclass(frozen=True)
class Source:
    """A training step that can be followed under the options of a plan.

    An adapter that follows an external loop hands one to :func:`vram_guard.plan.plan`; for a TrainingStep
    :func:`source_of` makes it.
    """

    model: torch.nn.Module
    trace: Callable[[TraceRequest], Timeline]
    """Follows two optimizer steps; the blocks have exact sizes (``per_sample`` 0). It may raise what the user's code
    raises. Timelines of the step as written say what forwards change that may run twice (``Timeline.changes``)."""
    shallow: Callable[[TraceRequest], Timeline] | None = None
    """Follows the model with few of its equal blocks, which takes no more than all of them; None: it has none."""
    stacks: tuple[str, ...] = ()
    """Names of the modules that hold those blocks."""
    precision: str = "32-true"
    accumulate: int = 1
    """Loaded batches (or micro-batches of a TrainingStep) per optimizer step."""
    ranks: int = 1
    """Processes that share the work."""
    one_size: bool = False
    """True if only the step's own batch size can be followed."""
    trains: bool = True
    """True if there is an optimizer."""
    clips: bool = False
    """True if gradients are clipped."""
    layout: Parallel | None = None
    """How several processes share the work; None: there is one."""
    topology: Topology | None = None
    """What connects the GPUs of a step that is spread over several; None: their collectives take no time."""
    most_seconds: float | None = None
    """Options under which a step takes longer are not tried: there is a better way to spread it; None: all are."""
    thorough: bool = True
    """False: a plan that rests on composed timelines is not traced, nor is its nearest miss: its caller will ask again
    for the one that is taken."""
    marks: bool = False
    """True if its timelines have marks, so that others can be composed of them."""
    job: Job | None = None
    """What the run does besides its steps; None: nothing."""
    whole: Callable[[Job], Callable[[TraceRequest], Timeline]] | None = None
    """As ``trace``, with the steps' job, or another like it; None where there is none."""
    batch_slices: int = 1
    """Slices that the step as written makes of a loaded batch; each of them is cut again."""
    compiles: bool = False
    """True if ``torch.compile`` compiles the model or parts of it, and its timelines can show that."""
    copies: bool = False
    """True if ``trace`` runs in copies of a process, of which one whose code is compiled gives up in time by itself."""
    forks: bool = False
    """True if ``trace`` may run in a copy of this process, beside another trace here."""
    shardings: Callable[[], Mapping[Sharding, Parallel]] | None = None
    """Other ways to divide the step over its processes, asked once it has been traced as written; None: none."""
    body: Body | None = None
    """The module that may run over slices of its batch; None: none is known."""
    explored: dict[Hashable, Explored] | None = None
    """What plans of it have found out, for those that follow; None: each begins anew."""

    def forget(self) -> None:
        """Let go of all timelines that plans of this source have shared."""
        for known in (self.explored or {}).values():
            known.forget()
        (self.explored or {}).clear()

    def request(self, precision: str, splits: int, recipe: Recipe, size: int) -> TraceRequest:
        """The request that is traced for an option: two micro-batches stand for any number."""
        return TraceRequest(size, precision, recipe, min(splits, 2))


def source_of(
    step: TrainingStep,
    capability: tuple[int, int],
    watched: Callable[[Any], Iterable[str]] = lambda _model: (),
    topology: Topology | None = None,
) -> Source:
    """A TrainingStep, followed on symbolic tensors; its model is built once for all traces.

    Args:
        step: as written.
        capability: of the GPU that is meant.
        watched: model -> modules that are watched in the first trace of the step as written.
        topology: what connects the GPUs of a step that is spread over several.
    """
    from vram_guard.simulate import TRACED_SIZES
    from vram_guard.simulate.compiled import compiles
    from vram_guard.simulate.tracing.run import run_step, with_built_model

    built = with_built_model(step, capability)
    first = TraceRequest(TRACED_SIZES[0], step.precision)

    def run(request: TraceRequest, job: Job | None = None) -> Timeline:
        changes: dict[str, Any] = {"accumulate": request.slices, "whole_batch": True} if request.slices > 1 else {}
        layout = built.parallel
        if request.recipe.sharding is not None and built.shardings is not None:
            changes["parallel"] = built.shardings()[request.recipe.sharding]
            changes["data_parallel_ranks"] = 1
        elif layout is not None:
            changes["parallel"] = _in_precision(layout, request.precision, step.precision)
        if request.part == "weights":
            changes["loss"] = _sum_of_weights
        changed = built.with_(precision=request.precision, recipe=request.recipe, job=job, **changes)
        as_written = replace(request, batch_size=first.batch_size) == first
        return run_step(
            changed,
            request.batch_size,
            capability,
            watched(built.model) if as_written else (),
            marked=job is None,
            steps=1 if request.part == "first" else 2,
            compiled=request.compiled,
        )

    return Source(
        model=built.model,  # type: ignore[arg-type]
        trace=run,
        precision=step.precision,
        accumulate=step.accumulate,
        ranks=step.data_parallel_ranks if step.parallel is None else step.parallel.data_ranks,
        trains=step.optimizer is not None,
        clips=step.clip_grad_norm is not None or step.clip_grad_value is not None,
        layout=step.layout,
        topology=topology,
        marks=True,
        job=step.job,
        whole=None if step.job is None else lambda job: partial(run, job=job),
        batch_slices=step.accumulate if step.whole_batch else 1,
        compiles=compiles(built.model),  # type: ignore[arg-type]
        forks=topology is None,
        shardings=step.shardings,
        body=step.body,
    )


def _sum_of_weights(model: torch.nn.Module, _batch: Any) -> torch.Tensor:
    """A loss that gives every weight a gradient."""
    total: Any = 0
    for parameter in model.parameters():
        if parameter.requires_grad:
            total = total + parameter.sum()
    loss: torch.Tensor = total
    return loss


def _in_precision(layout: Parallel, precision: str, written: str) -> Parallel:
    """The layout under another precision than the step's own: divided weights travel in that precision."""
    halved = half_of(precision)
    if precision == written or halved is None or layout.kind not in ("fsdp2", "hsdp", "fsdp1"):
        return layout
    return layout.with_(param_dtype=halved, reduce_dtype="float32")
