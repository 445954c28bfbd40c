"""The third phase, in a copy: the loop under the settings that are asked for, up to its second optimizer step."""

from __future__ import annotations

import os
from collections.abc import Iterable
from contextlib import AbstractContextManager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import torch

from vram_guard.capture.loader import Sample, number_of_batches
from vram_guard.errors import LostCopyError
from vram_guard.language import _
from vram_guard.limits import TRACE_SECONDS
from vram_guard.simulate.compiled import EAGER, allowed_seconds, cause_of, too_late
from vram_guard.simulate.memory.leftovers import Leftovers
from vram_guard.techniques import find_blocks, install
from vram_guard_accelerate._precision import ACCELERATES, precision_of
from vram_guard_accelerate.apply import techniques
from vram_guard_accelerate.dry_run._followed_loop import FollowedLoop, LoopPhase
from vram_guard_accelerate.dry_run._watched_forwards import WatchedForwards
from vram_guard_accelerate.dry_run.first_batch import compiled_in
from vram_guard_accelerate.dry_run.forks import ForkTask, ParentPipe
from vram_guard_accelerate.dry_run.phases import BatchIterator, DryRun
from vram_guard_accelerate.dry_run.results import DryRunFailure, LoopFacts, TraceResult, at_line, stopped
from vram_guard_accelerate.dry_run.time_limit import limit, no_limit, processor_limit

if TYPE_CHECKING:
    from torch import nn

    from vram_guard.timeline import Timeline

#: Hooks and wrappers that lie around what is compiled.
_ADAPTER = str(Path(__file__).parents[1]) + os.sep


class ForkedPhase(LoopPhase):
    """The training in a copy.

    Args:
        run: the copy's.
        loop: as it stood where the copy was made.
        sample: of the training's loader.
        task: what the copy is to do.
        parent: the way back to the original.
    """

    def __init__(self, run: DryRun, loop: FollowedLoop, sample: Sample, task: ForkTask, parent: ParentPipe) -> None:
        super().__init__(run, loop)
        self._sample = sample
        self._request = task.request
        self._parent = parent
        self._clips = False
        """Of the models, after the first optimizer step."""
        self._watching = None if task.watch is None else WatchedForwards(task.watch, loop)
        self.left = Leftovers(loop.tracer.recorder)
        self._compared: object = None
        """The optimizer whose steps are compared, the first that stepped: others step at other places of the loop."""
        if self._request.compiled:
            processor_limit(allowed_seconds(), self._out_of_time)
        else:
            limit(TRACE_SECONDS, self._out_of_time)
        self._change()
        loop.tracer.recorder.phase("forward", 1)

    def _change(self) -> None:
        """Put the precision and the techniques that are asked for on what is prepared."""
        request, accelerator = self._request, self.loop.accelerator
        if request.precision != precision_of(accelerator):
            techniques.set_precision(accelerator, ACCELERATES[request.precision])
        compiled = compiled_in(accelerator, self.loop.root)
        if request.compiled:
            self.loop.tracer.compile(_ADAPTER)
        elif compiled:
            self.loop.tracer.recorder.note(EAGER, tier="partly symbolic")
        if not request.recipe and not request.compiled:
            self.loop.tracer.watch(self.loop.root, [block.name for block in find_blocks(self.loop.root)])
        install(self.loop.root, request.recipe)
        techniques.set_optimizers(accelerator, request.recipe)

    # --- the places of the script ----------------------------------------------------------------------------

    def next_batch(self, batches: BatchIterator) -> Any:
        """Made to order for the training; real ones for evaluations, and for loops that make batches of loaded ones."""
        if self._sample.loader is None:
            return batches.next_real()
        if batches.loader is self._sample.loader:
            return self.made_batch()
        if not self.loop.trains or _batch_size(batches.loader) != self._sample.batch_size:
            return batches.next_beside_training()
        return self.made_batch()

    def made_batch(self) -> Any:
        """The training's next batch; the script moves it to the GPU, where Accelerate does not."""
        self.loop.batches += 1
        if self.loop.by_itself:
            self.loop.tracer.batch_begins()
        return self._sample.make(self._request.batch_size)

    def moving_batch(self) -> AbstractContextManager[object]:
        """Notify the tracer."""
        return self.loop.tracer.loading()

    def clips(self, parameters: Iterable[Any]) -> Any:
        """Remember it; under FSDP2, what is clipped must be what is trained."""
        self._clips = True
        if self.run.process is None or hasattr(parameters, "__tensor_flatten__"):
            return parameters
        listed, own = list(parameters), {id(one) for model in self.loop.models for one in model.parameters()}
        if any(id(parameter) not in own for parameter in listed):
            stopped(
                _(
                    "the script clips the gradients of parameters that it listed before Accelerator.prepare; FSDP2 "
                    "puts others in their place there, and nothing would be clipped"
                )
            )
        return listed

    def called(self, model: nn.Module, called: dict[str, Any]) -> None:  # noqa: ARG002 - any call is one
        """A loop that updates weights without an optimizer has done so when it calls its model again."""
        if not (torch.is_grad_enabled() and model.training):
            return
        if self._watching is not None:
            self._watching.begin()
        if not self.loop.by_itself:
            return
        own = self.loop.accelerator
        if self.loop.differentiated and not own._optimizers:  # noqa: SLF001 - named as Accelerate names it
            self.stepped(own)
        self.loop.differentiated = False
        if self._sample.loader is None:
            self.loop.batches += 1

    def differentiates_for_real(self) -> None:
        """A loss has been computed; the last one of the second step is all that losses are watched for."""
        if self._watching is not None and self._watching.end() and len(list(self.run.script.optimizers)) == 1:
            self.answer()
        super().differentiates_for_real()

    def stepped(self, optimizer: object) -> None:
        """Answer after the second step of every optimizer."""
        number = self.loop.count_step(optimizer)
        if self._compared in (None, optimizer):
            self._compared = optimizer
            self.left.ended(number)
            self.left.begins()
        if number > 2 or (number == 2 and not self.loop.optimizers_behind):
            self.followed()

    def followed(self) -> None:
        """Two steps were taken, or more."""
        if not self.left.unsettled:
            self.answer()

    def failed(self, error: BaseException, script: str) -> None:
        """Send the reason."""
        if self._request.compiled and isinstance(error, Exception):
            self._parent.send(DryRunFailure.unsupported(cause_of(error)))
        self._parent.send(DryRunFailure.of(error, script))

    def _out_of_time(self, frame: Any) -> NoReturn:
        if self._request.compiled:
            self._parent.send(DryRunFailure.of(LostCopyError(too_late(allowed_seconds()))))
        reason = _("the script did not finish two optimizer steps in {seconds} s", seconds=f"{TRACE_SECONDS:.0f}")
        self._parent.send(DryRunFailure.of(LostCopyError(at_line(reason, frame))))

    def ended(self) -> None:
        """Send what was seen of a script that came to its end before its second step."""
        if self.loop.tracer.steps:
            self.answer()
        message = _("the script ended after {count} batches without an optimizer step", count=self.loop.batches)
        self._parent.send(DryRunFailure.unsupported(message))

    # --- the answer -------------------------------------------------------------------------------------------

    def answer(self) -> NoReturn:
        """Send what was seen, and end; a limit that runs out meanwhile would leave nothing that could be sent."""
        no_limit()
        self._parent.send(self._result())

    def timeline(self) -> Timeline:
        """Everything that the loop did."""
        made = self.loop.tracer.timeline(self._request.batch_size, self._request.precision)
        return replace(made, growth=self.left.growth, steps=self.steps)

    @property
    def steps(self) -> int | None:
        """Optimizer steps that the run has at least: those of an epoch; None where its loader has no known end."""
        batches = None if self._sample.loader is None else number_of_batches(self._sample.loader)
        return None if batches is None else batches // (self.run.shape.ranks * self._between)

    @property
    def _between(self) -> int:
        """Batches of an optimizer step."""
        at = self.loop.batches_at_steps
        return max(1, at[1] - at[0] if len(at) > 1 else self.loop.batches)

    def _result(self) -> TraceResult:
        facts = LoopFacts(
            batches_per_step=self._between,
            clips_gradients=self._clips,
            own_backward=tuple(self.run.own_backward.reasons()),
        )
        watched = None if self._watching is None else self._watching.found()
        return TraceResult(self.timeline(), facts, watched=watched)


def _batch_size(loader: Any) -> int | None:
    size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None
