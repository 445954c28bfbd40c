"""A job played inside a trace: phases, training steps and rounds, all in one recorder."""

from __future__ import annotations

import contextlib
from collections import OrderedDict, defaultdict
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch.utils import _pytree as pytree

from vram_guard.checks import checked_count, known_names, one_of
from vram_guard.errors import InvalidInputError
from vram_guard.language import Message, _
from vram_guard.simulate.device import constants
from vram_guard.simulate.device.cuda_module import CUDA
from vram_guard.simulate.device.symbolic import is_symbolic
from vram_guard.simulate.memory.leftovers import Leftovers
from vram_guard.simulate.tracing.batches import batch_source, map_tensors
from vram_guard.simulate.tracing.loop import note_closure
from vram_guard.simulate.tracing.observed_phases import ObservedPhases
from vram_guard.techniques.optimizers import needs_closure
from vram_guard.timeline import PHASE_NAMES, LaterChange, Note, PhaseName

if TYPE_CHECKING:
    from torch import nn

    from vram_guard.job import Job
    from vram_guard.simulate.tracing.loop import Loop

#: Fields of a step that may differ from one stretch of steps to the next.
CHANGEABLE = ("accumulate", "batch", "clip_grad_norm", "clip_grad_value", "keeps", "loss", "whole_batch", "zero_grad")


class PlayedRun:
    """A :class:`vram_guard.job.LoopRun`: the loop of one trace, as its job sees it.

    Args:
        loop: that trains.
        prepare: called before each stretch of training steps.
    """

    def __init__(self, loop: Loop, prepare: Callable[[], None]) -> None:
        self._loop = loop
        self._recorder = loop.recorder
        self._prepare = prepare
        self._phases = ObservedPhases(loop.recorder, loop.mode.state, lambda: self._steps + 1, loop.gradients_stored)
        self._in_step = False
        """A step of the job's own loop has begun."""
        self._elsewhere = False
        """Something besides steps has run since the last one."""
        self.later_changes: set[LaterChange] = set()
        self._open: list[tuple[PhaseName, str]] = []
        self._steps = 0
        self._label = ""
        self._repeats = False
        self.left = Leftovers(loop.recorder)
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

    @property
    def loaded_samples(self) -> int:
        """Samples of a batch that is loaded at once."""
        step = self._loop.step
        return self._loop.batch_size * (step.accumulate if step.whole_batch else 1)

    @property
    def accumulate(self) -> int:
        """Micro-batches of a step."""
        return self._loop.step.accumulate

    def play(self, job: Job) -> None:
        """The whole job.

        Raises:
            InvalidInputError: it does not train, though there is an optimizer.
        """
        job.play(self)
        if not self._steps and self._loop.step.optimizer is not None:
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
            self.left.differs()
            self._label = label
        for _step in range(steps):
            self._traced_step()
        if self.left.unsettled:
            self._traced_step()
        if self._loop.step.keeps == "nothing":
            self._loop.batch = None
        self._recorder.label = ""

    def _traced_step(self) -> None:
        """One optimizer step."""
        self._steps += 1
        self.left.begins()
        self._loop.run((self._steps,))
        self.left.ended(self._steps)

    # --- a loop of the job's own ------------------------------------------------------------------------------

    @contextlib.contextmanager
    def loop(self, *, micro_batches: bool) -> Iterator[None]:
        """The job's own loop runs inside the block."""
        if self.optimizer is not None and needs_closure(self.optimizer):
            note_closure(self.optimizer, self._recorder)
        with self._phases.observed(micro_batches=micro_batches):
            yield

    def batch_begins(self, label: str = "") -> None:
        """A batch of a step."""
        if not self._in_step:
            self._in_step = True
            self._prepare()
            if label != self._label or self._elsewhere:
                self.left.differs()
                self._label, self._elsewhere = label, False
            self.left.begins()
        self._recorder.label = label
        self._recorder.phase("batch", self._steps + 1, "batch")

    def loss(self, batch: Any, *, autocast: bool = True) -> Any:
        """The step's own loss."""
        self._phases.forward_begins()
        with self._loop.autocast() if autocast else contextlib.nullcontext():
            return self._loop.step.loss(self._loop.model, batch)

    def step_ends(self) -> bool:
        """A step is over; True where one more is needed."""
        self._in_step = False
        self._steps += 1
        self.left.ended(self._steps)
        self._recorder.label = ""
        return self.left.unsettled

    def changes_later(self, what: LaterChange) -> None:
        """A note of the timeline's for whoever plans."""
        self.later_changes.add(what)

    # --- the batch, and phases --------------------------------------------------------------------------------

    def load(self, batch: Any) -> Any:
        """The batch on the simulated GPU."""
        with self._recorder.loading():
            return map_tensors(self._loop.to_device, batch, CUDA)

    @contextlib.contextmanager
    def phase(self, name: PhaseName, label: str = "") -> Iterator[None]:
        """A phase of the run."""
        one_of("phase", name, PHASE_NAMES)
        self._open.append((name, label))
        self._elsewhere = True
        self._enter(name, label)
        try:
            yield
        finally:
            self._open.pop()
            if name in ("setup", "hooks"):
                self._recorder.leave_out_empty_phase()
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
        """The optimizer's state dict after a step over twins of its parameters, which take no memory."""
        if optimizer is None:
            return None
        before = dict(vars(optimizer))
        try:
            with self._recorder.aside():
                return _state_after_a_step(optimizer)
        except Exception as error:  # noqa: BLE001 - other people's optimizers
            said = Message(
                "the states of {optimizer} in a checkpoint are not counted: {error}",
                optimizer=type(optimizer).__name__,
                error=f"{type(error).__name__}: {error}",
            )
            self._recorder.note(said, tier="partly symbolic")
            return None
        finally:
            vars(optimizer).clear()
            vars(optimizer).update(before)

    def loaded(self, state: Any, map_location: Literal["cpu", "cuda"] = "cpu") -> Any:
        """The state with tensors of its own."""
        made: dict[int, torch.Tensor] = {}
        return pytree.tree_map(lambda leaf: self._loaded(leaf, map_location, made), state)

    def _loaded(self, leaf: Any, place: Literal["cpu", "cuda"], made: dict[int, torch.Tensor]) -> Any:
        """A tensor of a checkpoint, in memory of its own; views of one storage share it, as in the file."""
        if not isinstance(leaf, torch.Tensor):
            return leaf
        if hasattr(leaf, "__tensor_flatten__"):  # a wrapper around others: DTensor, 8-bit states
            names, context = leaf.__tensor_flatten__()
            inner = {name: self._loaded(getattr(leaf, name), place, made) for name in names}
            wrapper: Any = type(leaf)
            return wrapper.__tensor_unflatten__(inner, context, leaf.size(), leaf.stride())
        real = not is_symbolic(leaf)
        if real and place == "cpu":
            return leaf.clone()
        key = leaf.untyped_storage()._cdata
        if key not in made:
            with self._recorder.aside():
                made[key] = torch.empty(leaf.untyped_storage().nbytes(), dtype=torch.uint8, device="meta")
            self._recorder.put(made[key], place, operator="torch.load")
        copied = made[key].view(leaf.dtype).as_strided(leaf.size(), leaf.stride(), leaf.storage_offset())
        if real:
            constants.known(copied, leaf)
        return copied

    def hold(self, value: Any) -> None:
        """Keep a value."""
        self._held.append(value)

    @property
    def allocated(self) -> int:
        """Bytes in live blocks."""
        return self._recorder.allocated

    def note(self, said: Message) -> None:
        """A note of the timeline's, which is about no line of the code."""
        self._recorder.notes[Note(said)] = None

    def optimize_with(self, optimizer: torch.optim.Optimizer) -> None:
        """Another optimizer."""
        self._loop.optimizer = optimizer


def _state_after_a_step(optimizer: torch.optim.Optimizer) -> Any:
    """The state dict of this very optimizer, stepped with other parameters; its attributes are left changed."""
    twins = {
        parameter: torch.empty_like(parameter).requires_grad_(parameter.requires_grad)
        for group in optimizer.param_groups
        for parameter in group["params"]
    }
    for twin in twins.values():
        if twin.requires_grad:
            twin.grad = torch.empty_like(twin)
    state = ((twins.get(key, key), pytree.tree_map(_copied, value)) for key, value in optimizer.state.items())
    optimizer.state = defaultdict(dict, state)
    optimizer.param_groups = [
        {**group, "params": [twins[parameter] for parameter in group["params"]]} for group in optimizer.param_groups
    ]
    # Without hooks, and without what schedulers put around it.
    vars(optimizer).update(_optimizer_step_pre_hooks=OrderedDict(), _optimizer_step_post_hooks=OrderedDict())
    type(optimizer).step(optimizer)
    return optimizer.state_dict()


def _copied(leaf: Any) -> Any:
    return leaf.detach().clone() if isinstance(leaf, torch.Tensor) else leaf
