"""The dry run: the script's own process, symbolic from ``Accelerator.prepare`` on, until its second optimizer step.

Until ``prepare`` the script runs for real (:mod:`before_prepare`). From then on its models are symbolic, and where its
loop asks for the first training batch, the process stops to plan: copies of it (:mod:`.forks`) run
the loop on, each with another batch size, precision or technique, and say what the loop would have allocated.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, NoReturn

from vram_guard.errors import UnsupportedStepError
from vram_guard_accelerate import run_script
from vram_guard_accelerate.apply.checkpoints import Resumed
from vram_guard_accelerate.dry_run import forks
from vram_guard_accelerate.dry_run.forked_traces import Traces
from vram_guard_accelerate.dry_run.forks import BecomeCopy, Home
from vram_guard_accelerate.dry_run.loaders import Made
from vram_guard_accelerate.dry_run.loop_profile import Returned, Watcher
from vram_guard_accelerate.dry_run.results import Answer, Facts, Failure, stopped
from vram_guard_accelerate.dry_run.smaller_batches import gather
from vram_guard_accelerate.dry_run.training_probe import Probe

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vram_guard.capture.loader import Sample
    from vram_guard.plan.source import TraceRequest
    from vram_guard.simulate.tracing.external_loop import ExternalLoopTracer
    from vram_guard_accelerate.dry_run.fork_server import Standby
    from vram_guard_accelerate.dry_run.loaders import Which
    from vram_guard_accelerate.dry_run.loop_profile import Conduct
    from vram_guard_accelerate.dry_run.sharded_copy import Sharded

#: Real batches that a loop over other data than the training's gets to see: an evaluation before training.
OTHER_BATCHES = 2

#: The same where no model was called since the last one: a loop loads the batches of a step ahead.
BATCHES_AHEAD = 64

#: Seconds that planning may take, in a copy of a process that cannot tell whether it trains yet.
PATIENCE = 1800.0

#: Slices of a batch that are followed: the first makes gradients, every other one adds to them.
SLICES = 2

#: Mixed precisions, as Lightning and as Accelerate call them.
ACCELERATES = {"32-true": "no", "16-mixed": "fp16", "bf16-mixed": "bf16"}
LIGHTNINGS = {value: key for key, value in ACCELERATES.items()}


class DryRun:
    """One script, followed.

    Args:
        capability: compute capability of the GPU that is pretended.
        ranks: processes that the real launch will have.
        decide: given this object, at the first training batch: plans, and does not return.
        patience: seconds that one copy may take.
        may_shard: whether the plan may keep parameters on the host (FSDP2).
    """

    def __init__(
        self,
        capability: tuple[int, int],
        ranks: int,
        decide: Callable[[DryRun], NoReturn],
        patience: float = 300.0,
        *,
        may_shard: bool = False,
    ) -> None:
        self.capability = capability
        self.ranks = ranks
        self.local_ranks = ranks
        """Of them, those that share a machine, and its memory."""
        self.decide = decide
        self.patience = patience
        self.accelerator: Any = None
        self.models: list[nn.Module] = []
        self.following: ExternalLoopTracer | None = None
        self.sample: Sample | None = None
        self.notes: list[str] = []
        self.precision_given = ""
        """The precision that the script itself passes to the Accelerator; "" where it passes none."""
        self.precision_read = False
        """Whether the script asked the Accelerator for its precision, and may have acted on the answer."""
        self.by_trainer = False
        """Whether the Accelerator is that of Transformers' ``Trainer``, which takes the environment's precision."""
        self.accumulates = False
        """Whether the script uses ``accelerator.accumulate()``."""
        self.options: dict[str, Any] = {}
        """What the script's own command line said, by name."""
        self.loaders = Made()
        """Loaders that the script made itself."""
        self.forwards = 0
        """How often prepared models were called."""
        self.probe = Probe()
        self.resumed = Resumed()
        """What the checkpoint says that the script loads."""
        self.home: Home | None = None
        """In a copy: the way back to the original."""
        self.task: TraceRequest | None = None
        """In a copy: what it is to do."""
        self.may_shard = may_shard
        self.standby: Standby | None = None
        """Makes copies in which the model is sharded."""
        self.sharded: Sharded | None = None
        """In such a copy: what is different there."""
        self._steps: dict[int, int] = {}
        self.batches = 0
        """Of the training, so far."""
        self._batches_at: list[int] = []
        self._clips = False
        self._inside = True
        self.compares = False
        """Whether the model's outputs were as wide as its batch."""
        self.returned = Returned()
        self.watcher = Watcher(self.returned)
        self._began = time.monotonic()
        self.traces = Traces(self)
        """What copies of this process came to."""

    # --- the script's own process -----------------------------------------------------------------------------

    def run(self, command: list[str], *, module: bool) -> NoReturn:
        """Run the script until it is planned for; never returns.

        Raises:
            StoppedError, Exception: in the original process, what ended the script before.
        """
        from vram_guard_accelerate.dry_run import patches

        forks.check_forks()
        patches.open_for(self)
        try:
            run_script.run(command, module=module)
        except BaseException as error:
            if self.home is not None:
                self.home.send(Failure.of(error, command[0]))
            raise
        if self.home is not None:
            self.home.send(self.ended_early())
        stopped("the script ended without asking for a training batch of a model prepared by Accelerator.prepare")

    def begin(self) -> ExternalLoopTracer:
        """From the first ``prepare`` on, the process pretends."""
        if self.following is None:
            from vram_guard.simulate.tracing.external_loop import ExternalLoopTracer
            from vram_guard_accelerate.dry_run import patches, side_effects, subprocess_policy

            moved = patches.before.end()
            self.following = ExternalLoopTracer(self.capability, self._stepped)
            self.following.begin()
            side_effects.silence_files()
            subprocess_policy.refuse_processes(stopped)
            self._adopt_moved(moved)
        return self.following

    def _adopt_moved(self, moved: list[torch.Tensor]) -> None:
        """What the script had moved to the GPU by itself: frozen models, encodings."""
        from torch import nn

        assert self.following is not None
        parameters = [tensor for tensor in moved if isinstance(tensor, nn.Parameter)]
        self.following.adopt(moved)
        self.following.recorder.classify(parameters, "parameters")

    def prepared(self, model: nn.Module) -> None:
        """A model was handed to ``prepare``."""
        following = self.begin()
        if not any(known is model for known in self.models):
            self.models.append(model)
            following.adopt_model(model)
            self.watch(model)

    def watch(self, model: nn.Module) -> None:
        """Look at what a prepared model returns."""
        model.register_forward_hook(self._returned, with_kwargs=True)

    @property
    def root(self) -> nn.Module:
        """The model that the plan speaks of: the only one, or all of them by number."""
        from torch import nn

        return self.models[0] if len(self.models) == 1 else nn.ModuleList(self.models)

    @property
    def training_loader(self) -> Which | None:
        """Which of the loaders that the script made is the training's; None where it made none of its batch size."""
        assert self.sample is not None
        return self.loaders.which(self.sample)

    @property
    def trains(self) -> bool:
        """Whether whoever asks for a batch now is about to train on it."""
        import torch

        if not torch.is_grad_enabled() or not self.models:
            return False
        return any(model.training for model in self.models) or self.probe.trains_from_here(PATIENCE)

    def differentiates(self) -> None:
        """A backward pass of the script."""
        if self.sample is None:
            self.probe.differentiated()

    # --- batches ----------------------------------------------------------------------------------------------

    def batch_for(self, loader: Any, real: Callable[[], Any]) -> Any:
        """The next batch of a loader: made to order in a copy; real ones for evaluations.

        Args:
            loader: a ``DataLoader``.
            real: the loader's own next batch.
        """
        if self.sample is None and self.trains:
            self._first_batch(loader)
        if self.task is None or self.sample is None:
            return real()
        if loader is not self.sample.loader and _batch_size(loader) != self.sample.batch_size:
            return real()
        self.batches += 1
        return self.sample.make(self.task.batch_size * self.task.slices_of_model)

    def _first_batch(self, loader: Any) -> None:
        """Plan in the original; come back in every copy, with a task."""
        from vram_guard.capture.loader import read_loader
        from vram_guard.state.random_generators import random_state_kept

        assert self.following is not None
        try:
            with random_state_kept():
                self.sample = read_loader(loader)
            # DistributedDataParallel has buckets for gradients, FSDP2 has none.
            self.following.train(self.root, 1 if self.sharded is not None else self.ranks)
            if self.task is None:
                with self.following.paused():
                    self.decide(self)
        except BecomeCopy as copy:
            self.home, self.task = copy.home, copy.task
        assert self.task is not None
        self._began = time.monotonic()
        self._change(self.task)
        self.following.recorder.phase("forward", 1)

    def _change(self, task: TraceRequest) -> None:
        """In a copy: the precision and the techniques that are asked for."""
        from vram_guard.techniques import install
        from vram_guard_accelerate.apply import techniques

        assert self.following is not None
        if task.precision != self.precision:
            techniques.set_precision(self.accelerator, ACCELERATES[task.precision])
        self.watcher.reads_losses = task.slices_of_model == 1 and not task.recipe
        if task.slices > 1 and task.sliced_by == "loader":
            gather(self)
        install(self.root, task.recipe)
        techniques.set_optimizers(self.accelerator, task.recipe)
        if task.slices_of_model > 1:
            techniques.set_slices(
                self.accelerator,
                self.models,
                task.slices * task.batch_size,
                task.batch_size,
                returns_loss=not task.forward_again,
                at_most=SLICES,
                on_slice=self.following.forward_begins,
            )

    # --- steps ------------------------------------------------------------------------------------------------

    def _stepped(self, optimizer: torch.optim.Optimizer) -> None:
        """After every step of every optimizer."""
        assert self.following is not None
        number = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        if number > self.following.steps:
            self.following.steps = number
            self._batches_at.append(self.batches)
            self.watcher.stepped()
        known = [getattr(prepared, "optimizer", prepared) for prepared in self.accelerator._optimizers]  # noqa: SLF001
        waiting = [one for one in known if self._steps.get(id(one), 0) < 2]
        if self.home is not None and (number > 2 or (number == 2 and not waiting)):
            self.home.send(self._answer())

    def _returned(self, model: nn.Module, _args: Any, called: dict[str, Any], out: Any) -> None:
        """After a model's forward: does it return one scalar to differentiate, its loss?"""
        from vram_guard.apply.outputs import tensors_of

        self.forwards += 1
        scalars = [tensor for tensor in tensors_of(out) if tensor.dim() == 0 and tensor.requires_grad]
        made = [tensor for tensor in tensors_of(out) if tensor.requires_grad]
        if self.home is not None and made:
            self._inside = self._inside and len(scalars) == 1
            if self.watcher.reads_losses:
                self.returned.look(model, called, made)
            self._look_for_comparisons(made)

    def _look_for_comparisons(self, made: list[torch.Tensor]) -> None:
        """A model whose outputs are as wide as its batch, or its slice, compares samples (CLIP): no slices for it."""
        assert self.task is not None
        assert self.sample is not None
        size = self.task.batch_size
        wide = any(tensor.dim() > 1 and tensor.shape[1] == size for tensor in made)
        if self.task.slices_of_model == 1:
            self.compares = self.compares or wide
        elif wide and self.compares and size != self.sample.batch_size:
            stopped("the model compares the samples of a batch with each other, which slices would keep apart")

    def clipped(self, parameters: Iterable[Any]) -> Any:
        """The script clips its gradients, of these parameters; the same ones, to be clipped."""
        self._clips = True
        self.watcher.clipped()
        if self.sharded is None or hasattr(parameters, "__tensor_flatten__"):
            return parameters
        listed = list(parameters)
        self.sharded.check_clipped(listed, self.models)
        return listed

    def _answer(self) -> Answer:
        assert self.following is not None
        assert self.task is not None
        assert self.sample is not None
        timeline = self.following.timeline(self.task.batch_size, self.task.precision)
        between = self._batches_at[1] - self._batches_at[0] if len(self._batches_at) > 1 else self.batches
        own = {id(parameter) for model in self.models for parameter in model.parameters()}
        foreign = any(
            id(parameter) not in own
            for optimizer in self.accelerator._optimizers  # noqa: SLF001
            for group in optimizer.param_groups
            for parameter in group["params"]
        )
        seconds = time.monotonic() - self._began
        own_look = self.task.slices_of_model == 1 and self.task.batch_size == self.sample.batch_size
        facts = Facts(
            self.following.steps,
            max(1, between),
            self._clips,
            foreign,
            self._inside and not self.returned.beside,
            self.compares,
            seconds,
            self.returned.terms,
            self.returned.items,
            self._conduct(max(1, between)) if own_look else None,
        )
        return Answer(timeline, facts)

    def _conduct(self, batches_per_step: int) -> Conduct:
        assert self.sample is not None
        return self.watcher.conduct(
            self.sample.loader, self.sample.batch_size, batches_per_step, counts_items=self.returned.items
        )

    def ended_early(self) -> Answer | Failure:
        """In a copy: the script came to its end before its second step."""
        assert self.following is not None
        if self.following.steps:
            return self._answer()
        return Failure(
            "UnsupportedStepError", f"the script ended after {self.batches} batches without an optimizer step"
        )

    @property
    def precision(self) -> str:
        """The script's own, in Lightning's words."""
        name = str(self.accelerator.state._mixed_precision)  # noqa: SLF001 - asking the Accelerator is what scripts do
        if name not in LIGHTNINGS:
            raise UnsupportedStepError(f"mixed precision {name!r} cannot be predicted")
        return LIGHTNINGS[name]


def _batch_size(loader: Any) -> int | None:
    size = getattr(getattr(loader, "batch_sampler", None), "batch_size", None)
    return size if isinstance(size, int) else None
