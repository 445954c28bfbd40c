"""A script's loop from ``prepare`` on, in the phases in which its models are symbolic."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from accelerate.utils import parse_flag_from_env
from torch import nn

from vram_guard.language import _
from vram_guard.patching import replace_attributes, replaced
from vram_guard.simulate.tracing.external_loop import ExternalLoopTracer
from vram_guard.techniques.patched_forward import arguments_by_name
from vram_guard_accelerate._patching import wrap
from vram_guard_accelerate.apply.own_loop import OwnLoop
from vram_guard_accelerate.dry_run import side_effects, subprocess_policy
from vram_guard_accelerate.dry_run._engine import EngineProcess
from vram_guard_accelerate.dry_run._evaluation_rounds import EvaluationRounds
from vram_guard_accelerate.dry_run._loads import Loads
from vram_guard_accelerate.dry_run._sharded_process import ShardedProcess
from vram_guard_accelerate.dry_run.first_batch import root_of
from vram_guard_accelerate.dry_run.phases import DryRun, DryRunPhase
from vram_guard_accelerate.dry_run.results import stopped
from vram_guard_accelerate.launch_plan import ON_CPU

# ruff: noqa: SLF001 - every private name of Accelerate used here stands in private_api.py


class FollowedLoop:
    """The models that were prepared, and what is counted of their training.

    Args:
        run: the process. Made once: from here on it is symbolic, and leaves nothing behind.
        accelerator: the script's.
        moved: tensors that the script has moved to the GPU by itself: frozen models, encodings.
        shared: storages of theirs of which several tensors may be parts.
        loads: files that it loads onto the GPU.
    """

    def __init__(
        self, run: DryRun, accelerator: Any, moved: list[torch.Tensor], shared: frozenset[int], loads: Loads
    ) -> None:
        self._run = run
        self.accelerator = accelerator
        self.models: list[nn.Module] = []
        self.forwards = 0
        self.batches = 0
        """Of the training, so far."""
        self.batches_at_steps: list[int] = []
        """Batches of the training before the end of each optimizer step."""
        self._steps: dict[int, int] = {}
        self.evaluates = False
        """A model was put into evaluation mode since ``prepare``: one of ``from_pretrained`` is in it, and trains."""
        self.differentiated = False
        """There was a backward pass since the last call of a model."""
        self.tracer = ExternalLoopTracer(
            run.shape.capability,
            lambda optimizer: run.phase.stepped(optimizer),  # noqa: PLW0108 - of the phase that it is then
            on_cpu=parse_flag_from_env(ON_CPU),
            memory=run.shape.memory,
        )
        self.tracer.begin()
        side_effects.discard_saving()
        subprocess_policy.refuse_processes(stopped)
        self.rounds = EvaluationRounds(
            self.tracer.recorder,
            lambda loader: run.phase.stands_for_others(loader),  # noqa: PLW0108 - of the phase that it is then
        )
        self.rounds.install()
        wrap(nn.Module, "train", self._mode_set)
        self.tracer.adopt(moved, shared)
        self.tracer.recorder.classify([one for one in moved if isinstance(one, nn.Parameter)], "parameters")

        loads.arrive = self.tracer.adopt
        self._loading = loads.followed()
        self._loading.__enter__()  # for good

    @property
    def root(self) -> nn.Module:
        """The model that the plan speaks of."""
        return root_of(tuple(self.models))

    def prepare(self, original: Callable[..., Any], models: list[nn.Module], args: Any, kwargs: Any) -> Any:
        """``Accelerator.prepare`` of these models, among other things."""
        for model in models:
            if not any(known is model for known in self.models):
                self.models.append(model)
                self.tracer.adopt_model(model)
                self._watch(model)
        return original(self.accelerator, *args, **kwargs)

    def prepare_sharded(
        self, process: ShardedProcess, original: Callable[..., Any], models: list[nn.Module], args: Any, kwargs: Any
    ) -> Any:
        """The same under FSDP."""
        new = [model for model in models if not any(known is model for known in self.models)]
        for model in new:  # FSDP1 is put on by prepare_model, which prepare itself calls
            if self.models:
                stopped(_("Accelerate's FSDP is followed with one model, and the script prepares another one"))
            self.models.append(model)
            self.tracer.shard(model, self._run.shape.ranks, flat=process.flat)
        shape = self._run.shape
        # FSDP1's hybrid strategies divide a model over the GPUs of a machine; a launch has a process for each of them.
        of_node = {"device_count": lambda: shape.local_ranks}
        with replaced(torch.cuda, of_node if process.flat else {}):
            prepared = original(self.accelerator, *args, **kwargs)
        for model in new:
            self.tracer.sharded(model)
            self._watch(model)
        return prepared

    def prepare_under_engine(
        self, process: EngineProcess, original: Callable[..., Any], models: list[nn.Module], args: Any, kwargs: Any
    ) -> Any:
        """The same under DeepSpeed's engine."""
        if not models:
            return original(self.accelerator, *args, **kwargs)
        if self.models or len(models) > 1:
            stopped(_("DeepSpeed is followed with one model, and the script prepares another one"))
        self.models += models
        self.tracer.under_engine(models[0], process.layout)
        with process.making(self.tracer):
            prepared = original(self.accelerator, *args, **kwargs)
        self._watch(models[0])
        return prepared

    def _watch(self, model: nn.Module) -> None:
        def returned(*_call: Any) -> None:
            self.forwards += 1

        model.register_forward_hook(returned)
        if self.by_itself and model is self.models[0]:
            self.evaluates = not any(one.training for one in self.accelerator._models)  # there is no prepare
            self.watch_calls()

    def _mode_set(self, original: Callable[..., Any], module: nn.Module, mode: bool = True) -> Any:
        if any(module is model for model in self.models):
            self.evaluates = not mode
        return original(module, mode)

    def watch_calls(self) -> None:
        """From now on. Not by hooks: the module has chosen its forward by then, which a plan may replace."""
        original = nn.Module.__call__

        def call(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
            if any(module is model for model in self.models):
                self._run.phase.called(module, arguments_by_name(args, kwargs))
            return original(module, *args, **kwargs)

        replace_attributes(nn.Module, {"__call__": call})

    def count_step(self, optimizer: object) -> int:
        """The number of this optimizer's step, which has just ended; steps of several optimizers in a row are one."""
        number = self._steps[id(optimizer)] = self._steps.get(id(optimizer), 0) + 1
        if number > self.tracer.steps:
            self.tracer.steps = number
            self.batches_at_steps.append(self.batches)
        return number

    @property
    def by_itself(self) -> bool:
        """True if the script trains without Accelerate."""
        return isinstance(self.accelerator, OwnLoop)

    @property
    def trains(self) -> bool:
        """True where what is loaded now would be trained on: gradients are on, and a model is in training mode."""
        return torch.is_grad_enabled() and any(model.training for model in self.models)

    @property
    def optimizers_behind(self) -> bool:
        """True while a prepared optimizer has not taken its second step."""
        prepared = self.accelerator._optimizers
        return any(self._steps.get(id(getattr(one, "optimizer", one)), 0) < 2 for one in prepared)


class LoopPhase(DryRunPhase):
    """A phase with a loop that is followed."""

    def __init__(self, run: DryRun, loop: FollowedLoop) -> None:
        super().__init__(run)
        self.loop = loop

    @property
    def forwards(self) -> int:
        """Number of calls of prepared models."""
        return self.loop.forwards

    def prepare(self, original: Callable[..., Any], accelerator: Any, args: Any, kwargs: Any) -> Any:
        """Models become symbolic, or are sharded."""
        self.loop.accelerator = accelerator
        models = [thing for thing in args if isinstance(thing, nn.Module)]
        process = self.run.process
        if process is None:
            return self.loop.prepare(original, models, args, kwargs)
        if isinstance(process, EngineProcess):
            return self.loop.prepare_under_engine(process, original, models, args, kwargs)
        return self.loop.prepare_sharded(process, original, models, args, kwargs)

    def stepped(self, optimizer: object) -> None:
        """Count the step."""
        self.loop.count_step(optimizer)

    def differentiates_for_real(self) -> None:
        """A loss has been computed."""
        self.loop.differentiated = True
