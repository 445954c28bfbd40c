"""Two consecutive training steps on symbolic tensors, in the order in which a training loop does things."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from types import FunctionType
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vram_guard.call_room import with_room
from vram_guard.errors import UnsupportedOperatorError, UnsupportedStepError, UnsupportedTechniqueError
from vram_guard.forks.exclusive import alone_in_process
from vram_guard.forks.fork import run_in_fork
from vram_guard.language import Message, _
from vram_guard.module_names import ModuleName
from vram_guard.parallel.deepspeed import STAGES, check_config
from vram_guard.parallel.install import check as check_layout
from vram_guard.parallel.spec import Parallel
from vram_guard.patching import replaced
from vram_guard.simulate.compiled import EAGER, compiles, refuse_engine
from vram_guard.simulate.device.capability import Capability, Version
from vram_guard.simulate.device.data_dependent import ScalarQueries
from vram_guard.simulate.device.fake_cuda import FakeCudaState, simulated_cuda
from vram_guard.simulate.device.symbolic import is_symbolic
from vram_guard.simulate.memory.leftovers import Leftovers
from vram_guard.simulate.memory.recorder import PLACE, Recorder
from vram_guard.simulate.operators.autocast import cuda_autocast
from vram_guard.simulate.operators.composite_ops import cuda_composites
from vram_guard.simulate.operators.cudnn_choice import asked_as_chosen
from vram_guard.simulate.parallel import replicas
from vram_guard.simulate.parallel.engines import (
    as_an_engine_takes_it,
    engine_optimizer,
    half_precision,
)
from vram_guard.simulate.parallel.ranks import divided, first_place, made_on_host, one_rank, put
from vram_guard.simulate.parallel.sharding import fsdp_traced
from vram_guard.simulate.private_api import check_torch
from vram_guard.simulate.tracing._collectives import synchronised_norms
from vram_guard.simulate.tracing._dispatch import SymbolicMode, device_of_factories
from vram_guard.simulate.tracing._in_backward import before_others
from vram_guard.simulate.tracing._interrupts import Interrupts, interrupts_held_back
from vram_guard.simulate.tracing._quantised import packs
from vram_guard.simulate.tracing._said import note_absent_kernels, note_work_between
from vram_guard.simulate.tracing._substitution import (
    arrive,
    build_symbolically,
    check_module,
    process_state_restored,
    symbolic_model,
)
from vram_guard.simulate.tracing.job_run import PlayedRun
from vram_guard.simulate.tracing.loop import TRUE_DTYPES, Loop, traced_micro_batches
from vram_guard.simulate.tracing.optimizer_states import classify_states, over_twins
from vram_guard.simulate.tracing.uncompiled import compiler_not_imported, uncompiled
from vram_guard.state.collector import collector_paused
from vram_guard.state.containers import leaves
from vram_guard.state.reached import ReachedState, reached_kept
from vram_guard.step import TrainingStep
from vram_guard.techniques import install
from vram_guard.techniques.placement import import_libraries, optimizer_for, place, step_where
from vram_guard.tensors import inner_tensors
from vram_guard.timeline import Border, Growth, LaterChange, Note, Timeline

if TYPE_CHECKING:
    from vram_guard.simulate.compiler.following import Followed

_MODULE_DICTS = ("_parameters", "_buffers", "_modules")

_NUMBERS_AND_NAMES = (bool, int, float, str, type(None), FunctionType, torch.dtype)


def run_step(
    step: TrainingStep,
    batch_size: int,
    capability: Capability | Version,
    watched: Iterable[str] = (),
    rank: int | None = None,
    *,
    marked: bool = False,
    steps: int = 2,
    compiled: bool = False,
    looks: bool = False,
) -> Timeline:
    """Trace the step at one batch size; the blocks of the result have exact sizes (``per_sample`` 0).

    Args:
        step: to trace.
        batch_size: samples of a micro-batch.
        capability: of the GPU that is meant; it keeps what the trace asks of it.
        watched: modules whose forwards are watched: what they change is in the result.
        rank: of the ranks that the step's layout has, the one that is traced; None: one that holds most.
        marked: whether the result has marks.
        steps: optimizer steps; one is a part of a timeline alone.
        compiled: whether code under ``torch.compile`` is compiled and followed, or runs uncompiled. What this process
            has compiled before is forgotten then.
        looks: whether nothing but losses is looked at: the second step ends with its own.

    Raises:
        InvalidInputError: the setting ``cudnn`` makes no sense.
        UnsupportedStepError: the step cannot be run symbolically, or it ran no operator at all.
        Exception: whatever the user's own code raises, unchanged.
    """
    capability = Capability.of(capability)

    def traced(step: TrainingStep) -> Timeline:
        with asked_as_chosen(capability), _alone() as interrupts:
            run = _Run(step, batch_size, capability, interrupts, watched, rank, marked, steps, compiled, looks)
            return with_room(run.timeline)

    def followed(step: TrainingStep) -> Timeline:
        if step.job is None or not step.job.ends_process:
            return traced(step)
        return run_in_fork(lambda _progress: traced(step))

    try:
        return followed(step)
    except replicas.UnusedParametersError:
        if step.parallel is not None:
            raise
    timeline = followed(step.with_(ddp_options={**step.ddp_options, "find_unused_parameters": True}))
    return replace(timeline, notes=(*timeline.notes, Note(replicas.COUNTED_AS_FOUND)))


def with_built_model(step: TrainingStep, capability: Capability | Version) -> TrainingStep:
    """The step with its model built, symbolically, so that several traces share it."""
    if isinstance(step.model, nn.Module):
        return step
    with _alone() as interrupts:
        return step.with_(model=_Run(step, 1, Capability.of(capability), interrupts).build())


@contextlib.contextmanager
def on_simulated_cuda(device: FakeCudaState, capability: Capability) -> Iterator[None]:
    """Symbolic tensors behave as CUDA tensors inside the block, down to autocast and composite operators."""
    with device_of_factories(), simulated_cuda(device, capability), cuda_composites(capability), cuda_autocast():
        yield


@contextlib.contextmanager
def _alone() -> Iterator[Interrupts]:
    """One trace at a time, in a process that afterwards is as before."""
    check_torch()
    with (
        alone_in_process(),
        compiler_not_imported(),
        interrupts_held_back() as interrupts,
        process_state_restored(),
        torch.inference_mode(False),
        torch.enable_grad(),
        collector_paused(),
    ):
        yield interrupts


@contextlib.contextmanager
def _fake_tensors_refused() -> Iterator[None]:
    """Higher-order operators (flex_attention) make fake tensors of their operands, which symbolic ones cannot be."""
    try:
        yield
    except AssertionError as error:
        if "must be 'meta'" not in str(error):
            raise
        raise UnsupportedStepError(
            _(
                "the step uses an operator that runs torch's own FakeTensorMode (flex_attention and other higher-order "
                "operators): it cannot be run symbolically"
            )
        ) from error


def _holds_nothing(value: Any) -> bool:
    """True for what most attributes of a module are: numbers, names, empty containers."""
    return isinstance(value, _NUMBERS_AND_NAMES) or (isinstance(value, (dict, list, tuple)) and not value)


class _Run:
    """One trace: its recorder, its simulated device, and the loop."""

    def __init__(
        self,
        step: TrainingStep,
        batch_size: int,
        capability: Capability,
        interrupts: Interrupts,
        watched: Iterable[str] = (),
        rank: int | None = None,
        marked: bool = False,
        steps: int = 2,
        compiled: bool = False,
        looks: bool = False,
    ) -> None:
        self.written = step
        self.step = as_an_engine_takes_it(step)
        self.input_dtype = TRUE_DTYPES.get(step.precision)
        if self._by_engine:
            self.input_dtype = half_precision(step.precision)
        self.rank = rank
        self.first_place = "cuda" if step.parallel is None else first_place(step.model, step.parallel)
        self.watched = watched
        self.batch_size = batch_size
        self.capability = capability
        self.interrupts = interrupts
        self.steps = steps
        self.compiled = compiled
        self.looks = looks
        self.recorder = Recorder()
        self.recorder.borders = [] if marked else None
        self.recorder.measured_step = min(steps, self.recorder.measured_step)
        self.device = FakeCudaState(self.recorder)
        self.mode = SymbolicMode(self.recorder, self.device, capability, interrupts, on_cpu=step.device == "cpu")
        self.growth: tuple[Growth, ...] = ()
        self.later_changes: frozenset[LaterChange] = frozenset()
        self.take_off: Callable[[], None] = lambda: None
        self.real: dict[str, torch.Tensor] = {}
        """The model's parameters by name, without their twins."""

    @property
    def _by_engine(self) -> bool:
        return self.step.parallel is not None and self.step.parallel.kind in STAGES

    def timeline(self) -> Timeline:
        step = self.step
        import_libraries(step.recipe)
        replicas.import_libraries(step.parallel)
        with contextlib.ExitStack() as stack, on_simulated_cuda(self.device, self.capability):
            if step.job is None:
                stack.enter_context(reached_kept(_own_callables(step), _holds_symbolic))
            elif not step.job.ends_process:
                stack.enter_context(reached_kept(_callables(step)))
            stack.callback(self.mode.undo_log.restore)
            model = step.model if isinstance(step.model, nn.Module) else self._build(step.model)
            check_module(model)
            if step.parallel is not None:
                _check_layout(model, step, step.parallel)
            self._note_hooks(model)
            note_absent_kernels(model, self.recorder)
            module_call = nn.Module.__call__
            self.real = {name.removeprefix("module."): one for name, one in model.named_parameters()}
            self._take_plain_attributes(model)
            # Nothing of the trace may outlive the substitution: the frames below hold symbolic tensors.
            with (
                symbolic_model(
                    model, TRUE_DTYPES.get(step.precision), self.recorder if step.parallel is None else None
                ) as moved,
                module_paths(model, self.recorder),
                self._compiler(model, module_call) as followed,
                synchronised_norms(self.recorder),
                self.mode,
                _fake_tensors_refused(),
            ):
                self._train(model, moved)
        timeline = self.mode.timeline(self.batch_size, self.written.precision)
        timeline = timeline if followed is None else followed.on(timeline)
        self.recorder.forget()
        self.mode.meter.forget()
        steps = None if step.job is None else step.job.steps
        return replace(
            timeline, parallel=step.layout, growth=self.growth, steps=steps, later_changes=self.later_changes
        )

    def _compiler(
        self, model: nn.Module, module_call: Callable[..., Any]
    ) -> contextlib.AbstractContextManager[Followed | None]:
        if not self.compiled:
            return self._eager(model)
        if self._by_engine:
            refuse_engine()
        # Imported here: torch's compiler takes as long as torch itself.
        from vram_guard.simulate.compiler.following import compiler_followed

        return compiler_followed(self.device, self.mode, self.capability.version, module_call)

    def _eager(self, model: nn.Module) -> contextlib.AbstractContextManager[None]:
        """Compiled models run uncompiled here; what the compiler changes is another trace's (``compiled``)."""
        if compiles(model):
            self.recorder.note(EAGER, tier="partly symbolic")
        return uncompiled(self.device)

    def build(self) -> nn.Module:
        """The model of the step's constructor, on symbolic parameters."""
        with on_simulated_cuda(self.device, self.capability):
            return self._build(self.step.model)

    def _build(self, constructor: Callable[[], nn.Module]) -> nn.Module:
        """The model of a constructor; a recorder of its own, thrown away, answers ``.item()`` while it is built."""
        thrown_away = Recorder()
        before = self.device.recorder, self.device.queries
        # Initialisers look at what they have drawn, and at where it lies.
        self.device.recorder, self.device.queries = thrown_away, ScalarQueries(thrown_away)
        self.device.building = True
        try:
            with SymbolicMode(thrown_away, self.device, self.capability, self.interrupts, building=True):
                return build_symbolically(constructor)
        finally:
            self.device.recorder, self.device.queries = before
            self.device.building = False

    def _take_plain_attributes(self, model: nn.Module) -> None:
        """Plain attributes of a model that was made on the meta device lie on the host, as its constructor's do."""
        own = [*model.parameters(), *model.buffers()]
        if not own or not all(is_symbolic(tensor) for tensor in own):
            return
        known = {id(tensor) for tensor in own}
        walked: dict[int, Any] = {}  # by id, and kept: a configuration that every layer holds is walked once
        for module in model.modules():
            for name, value in vars(module).items():
                if name in _MODULE_DICTS or _holds_nothing(value) or id(value) in walked:
                    continue
                walked[id(value)] = value
                for leaf in leaves(value):
                    if isinstance(leaf, torch.Tensor) and is_symbolic(leaf) and id(leaf) not in known:
                        self.recorder.put(leaf, leaf.__dict__.get(PLACE, "cpu"))

    def _note_hooks(self, model: nn.Module) -> None:
        spread = self.step.parallel is not None
        if spread and any(getattr(p, "_post_accumulate_grad_hooks", None) for p in model.parameters()):
            said = Message(
                "hooks on parameters (an optimizer that steps in the backward pass) are not included in the prediction"
            )
            self.recorder.note(said, tier="partly symbolic")

    # --- the loop ---------------------------------------------------------------------------------------------

    def _train(self, model: nn.Module, moved: list[torch.Tensor]) -> None:
        recorder = self.recorder
        try:
            with self._default_dtype(), self._sharding(model) as mesh:
                model = self._set_up(model, moved, mesh)
                optimizer = self._optimizer(model, mesh)
                if optimizer is not None and self._by_engine:
                    optimizer = made = engine_optimizer(model, optimizer, self.written, self.batch_size, recorder)
                    model = made.engine
                if optimizer is not None:
                    note_work_between(optimizer, recorder, self.steps)
                loop = Loop(self, model, optimizer)  # by name: what it holds lives until recording ends
                del optimizer  # a job may have the loop go on with another one
                try:
                    with replicas.unused_parameters_said():
                        self._play(loop, model)
                except UnsupportedOperatorError as error:
                    self._lower_bound(model, loop.optimizer, str(error))
                recorder.close()
        finally:
            recorder.close()
            self.take_off()

    def _play(self, loop: Loop, model: nn.Module) -> None:
        """The steps, or the whole job."""
        if self.looks:
            loop.run((1,))
            loop.look(2)
            return
        if self.step.job is None:
            left = Leftovers(self.recorder)
            for number in range(1, self.steps + 1):
                left.begins()
                loop.run((number,))
                left.ended(number)
            if left.unsettled:
                left.begins()
                loop.run((self.steps + 1,))
                left.ended(self.steps + 1)
        else:
            played = PlayedRun(loop, lambda: self._watch_gradients(model))
            played.play(self.step.job)
            left = played.left
            self.later_changes = frozenset(played.later_changes)
        if left.growth:
            self.growth = self.recorder.named(left.growth, ReachedState(_callables(self.written)).content())

    @contextlib.contextmanager
    def _default_dtype(self) -> Iterator[None]:
        dtype = TRUE_DTYPES.get(self.step.precision)
        before = torch.get_default_dtype()
        if dtype is not None:
            torch.set_default_dtype(dtype)
        try:
            yield
        finally:
            torch.set_default_dtype(before)

    def _sharding(self, model: nn.Module) -> contextlib.AbstractContextManager[Any]:
        if self.step.parallel is not None:
            return one_rank(model, self.recorder, self.device, self.step.parallel, self.rank or 0)
        if not self.step.recipe.parameters_on_host:
            return contextlib.nullcontext()
        return fsdp_traced(model, self.recorder, self.device)

    def _set_up(self, model: nn.Module, moved: list[torch.Tensor], mesh: Any) -> nn.Module:
        """Weights arrive on the GPU, divided where the step has a layout.

        Returns:
            The module that the loss is called with.
        """
        recorder = self.recorder
        parallel = self.step.parallel
        recorder.phase("setup", 0)
        if parallel is None:
            self._place(model, moved, mesh)
        else:
            put(moved, self.first_place, recorder)
            moved.clear()  # what is divided dies, as for real
        arrive(moved, recorder)
        recorder.classify(moved, "parameters")  # scales of quantised weights among them
        recorder.classify(model.buffers(), "buffers")
        recorder.classify(itertools.chain(*map(inner_tensors, model.parameters())), "parameters")
        if self.step.prepare is not None:
            self.step.prepare(model)
        self.take_off = install(model, self.step.recipe)
        self.mode.purity.install(model, self.watched)
        if parallel is not None:
            with made_on_host(recorder, self.device):
                model = divided(model, parallel, mesh, recorder, self.step.ddp_options)
            recorder.classify(itertools.chain(*map(inner_tensors, model.buffers())), "buffers")
            recorder.classify(itertools.chain(*map(inner_tensors, model.parameters())), "parameters")
        self._watch_gradients(model)
        if parallel is None and self.step.layout is not None:
            reduction = replicas.reduction_of(model, self.step.layout, self.step.ddp_options, recorder)
            if reduction is not None:
                self.step = self.step.with_(loss=reduction.around(self.step.loss, traced_micro_batches(self.step)))
        return model

    def _watch_gradients(self, model: nn.Module) -> None:
        """Gradients are told from other tensors as they arrive; a schedule may have parameters trained later."""
        spread = self.step.parallel is not None
        for parameter in model.parameters():
            if parameter.requires_grad and (spread or not hasattr(parameter, "__tensor_flatten__")):
                hooks: Any = parameter._post_accumulate_grad_hooks
                if not any(hook == self._new_gradient for hook in (hooks or {}).values()):
                    before_others(parameter, self._new_gradient)

    def _place(self, model: nn.Module, moved: list[torch.Tensor], mesh: Any) -> None:
        """Place the weights: those that are kept on the host never take GPU memory for longer than they are used."""
        recipe = self.step.recipe
        waiting = [model.get_submodule(name).parameters() for name in recipe.frozen_on_host]
        for tensor in moved if recipe.parameters_on_host else itertools.chain(*waiting):
            self.recorder.mark_host(tensor)
        if recipe.parameters_on_host:
            self.recorder.users_own_meta = False
            moved.clear()  # what FSDP replaces dies, as for real
        place(model, recipe, "cuda", self.step.precision, mesh)
        for name in recipe.frozen_on_host:
            for parameter in model.get_submodule(name).parameters():
                self.mode.waiting[parameter.untyped_storage()._cdata] = name

    def _new_gradient(self, parameter: torch.Tensor) -> None:
        self.recorder.classify(inner_tensors(parameter.grad), "gradients")
        self.recorder.accumulated(inner_tensors(parameter.grad))

    def _optimizer(self, model: nn.Module, mesh: Any) -> torch.optim.Optimizer | None:
        """The user's optimizer over the symbolic parameters; None for inference, or where nothing is trained."""
        if self.step.optimizer is None or not any(p.requires_grad for p in model.parameters()):
            return None
        optimizer = optimizer_for(self._over_twins(self.step.optimizer(model.parameters()), model), self.step.recipe)
        own = [p for group in optimizer.param_groups for p in group["params"]]
        if not all(is_symbolic(p) for p in own):
            raise UnsupportedStepError(
                _(
                    "optimizer(parameters) returned an optimizer over other parameters than those it was given; a "
                    "trace must not train them. Build it inside the callable: lambda parameters: "
                    "torch.optim.AdamW(parameters)"
                )
            )
        if self.step.parallel is not None and self.step.parallel.kind == "zero1":
            return replicas.states_of_the_fullest(optimizer, mesh, self.rank)
        step_where((optimizer,), self.step.recipe)
        return optimizer

    def _over_twins(self, optimizer: torch.optim.Optimizer, model: nn.Module) -> torch.optim.Optimizer:
        """One that was made over the model's real parameters (LightningCLI's) goes over the symbolic ones."""
        # DDP puts a name before those of its module.
        symbolic = {name.removeprefix("module."): one for name, one in model.named_parameters()}
        twins = {id(one): symbolic[name] for name, one in self.real.items() if name in symbolic}
        own = [p for group in optimizer.param_groups for p in group["params"]]
        real = bool(own) and not any(is_symbolic(p) for p in own) and all(id(p) in twins for p in own)
        return over_twins(optimizer, twins) if real else optimizer

    def _lower_bound(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, why: str) -> None:
        """The step could not be followed: weights, gradients and optimizer state are known all the same."""
        said = Message("{why}. What follows from there on is not counted", why=why)
        self.recorder.note(said, tier="formula")
        if optimizer is None:
            return
        self.recorder.phase("backward", 1, "gradients")
        for parameter in model.parameters():
            if parameter.requires_grad and parameter.grad is None:
                parameter.grad = torch.empty_like(parameter)
                self.recorder.track(parameter.grad, "")
        self.recorder.classify([p.grad for p in model.parameters()], "gradients")
        self.recorder.phase("optimizer", 1)
        with contextlib.suppress(UnsupportedOperatorError):  # it may be the one that has been named
            optimizer.step()
        classify_states(self.recorder, optimizer)


def _own_callables(step: TrainingStep) -> Iterator[tuple[str, Any]]:
    yield from (("", one) for one in (step.batch, step.loss, step.optimizer, step.prepare))


def _holds_symbolic(value: Any) -> bool:
    return any(isinstance(one, torch.Tensor) and is_symbolic(one) for one in leaves(value))


def _callables(step: TrainingStep) -> Iterator[tuple[str, Any]]:
    """Everything that a job runs, and that may keep something: the step's callables, hooks and helpers of its model."""
    yield from _own_callables(step)
    yield from (("", one) for one in (() if step.job is None else step.job.callables()))
    if isinstance(step.model, nn.Module):
        for path, module in step.model.named_modules():
            prefix = f"{path}." if path else ""
            yield from ((prefix + name, value) for name, value in vars(module).items() if name not in _MODULE_DICTS)
            yield path, type(module).forward


def _check_layout(model: nn.Module, step: TrainingStep, parallel: Parallel) -> None:
    """Refuse a layout that cannot be put on this step, before any work.

    Raises:
        InvalidInputError: the layout names modules that the model does not have.
        UnsupportedTechniqueError: the layout, or a technique beside it, cannot be used so.
    """
    check_layout(model, parallel)
    quantised = next((name for name, weight in model.named_parameters() if packs(weight)), None)
    if quantised is not None and parallel.kind not in ("ddp", "zero1"):
        raise UnsupportedTechniqueError(
            _(
                "{name} is quantised by bitsandbytes: such weights are predicted on one GPU, under DDP and under "
                "ZeRO-1; how sharding divides their scales is not modelled",
                name=quantised,
            )
        )
    if parallel.kind in STAGES:
        check_config(step.deepspeed_config, STAGES[str(parallel.kind)])
        if step.optimizer is None:
            raise UnsupportedTechniqueError(_("DeepSpeed's engine is traced where it trains: give an optimizer"))
        if step.clip_grad_value is not None:
            raise UnsupportedTechniqueError(
                _("DeepSpeed clips gradients by their norm alone: use clip_grad_norm in place of clip_grad_value")
            )
    for name in ("frozen_on_host", "parameters_on_host"):
        if getattr(step.recipe, name):
            raise UnsupportedTechniqueError(
                _("{technique} is for one GPU: with a layout over several, use Parallel(offload=True)", technique=name)
            )


@contextlib.contextmanager
def module_paths(model: nn.Module, recorder: Recorder) -> Iterator[None]:
    """While the block runs, the recorder knows which module's forward is running."""
    paths: dict[int, str] = {
        id(module): ModuleName(path, type(module).__name__) for path, module in model.named_modules()
    }
    stack, borders, events, on_host = recorder.modules, recorder.borders, recorder.events, recorder.host.events
    original = nn.Module.__call__

    def called(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path = paths.get(id(self))
        if path is None:
            path = type(self).__name__
        recorder.module_changes()
        if recorder.module_called is not None:
            recorder.module_called()
        stack.append(path)
        try:
            return original(self, *args, **kwargs)
        finally:
            recorder.module_changes()
            stack.pop()

    def marked(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        path = paths.get(id(self), "")
        borders.append(Border(len(events), path, True, len(on_host)))  # type: ignore[union-attr]
        try:
            return called(self, *args, **kwargs)
        finally:
            borders.append(Border(len(events), path, False, len(on_host)))  # type: ignore[union-attr]

    with replaced(nn.Module, {"__call__": called if borders is None else marked}):
        yield
