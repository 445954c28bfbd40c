"""Trace a training loop that other code runs (a script's own) and record what it would allocate.

:func:`vram_guard.trace` calls the step itself. A script's loop cannot be called: it is there once, in the script's own
process. So here the simulated CUDA device stays on for the rest of that process, the script's own tensors become
symbolic where they are, and torch's entry points (``backward``, the optimizers' hooks, ``Module.__call__``) say in
which phase the loop is. Nothing is ever put back: the process exists for the prediction only.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import itertools
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from vram_guard.parallel.data_parallel import chosen_options
from vram_guard.parallel.spec import Parallel, data_parallel
from vram_guard.patching import replaced
from vram_guard.simulate.compiled import check_compiler, refuse_engine
from vram_guard.simulate.device.capability import Capability
from vram_guard.simulate.device.cuda_module import ASSUMED_MEMORY, accelerator_answers
from vram_guard.simulate.device.fake_cuda import FakeCudaState
from vram_guard.simulate.device.symbolic import address_of, is_symbolic, symbolic_like
from vram_guard.simulate.memory.recorder import Recorder
from vram_guard.simulate.operators.cudnn_choice import asked_as_chosen
from vram_guard.simulate.parallel.engines import EngineOptimizer, classify_engine
from vram_guard.simulate.parallel.flat_parameters import flat_parameters_followed
from vram_guard.simulate.parallel.ranks import one_rank
from vram_guard.simulate.parallel.replicas import calls_reduced, reduction_of
from vram_guard.simulate.private_api import check_torch
from vram_guard.simulate.tracing._dispatch import SymbolicMode
from vram_guard.simulate.tracing._in_backward import before_others
from vram_guard.simulate.tracing._in_place import become, moved_in_place
from vram_guard.simulate.tracing._interrupts import Interrupts
from vram_guard.simulate.tracing._quantised import kept, packs
from vram_guard.simulate.tracing._said import note_absent_kernels
from vram_guard.simulate.tracing._substitution import modules_as_moved
from vram_guard.simulate.tracing.observed_phases import ObservedPhases
from vram_guard.simulate.tracing.optimizer_states import classify_states
from vram_guard.simulate.tracing.run import module_paths, on_simulated_cuda
from vram_guard.simulate.tracing.uncompiled import compiler_not_imported, uncompiled
from vram_guard.state.containers import mapped
from vram_guard.tensors import inner_tensors
from vram_guard.timeline import Timeline

if TYPE_CHECKING:
    from typing_extensions import Self

    from vram_guard.simulate.compiler.following import Followed


def _onto_one_gpu(_model: nn.Module, inputs: Any, kwargs: Any, _gpus: Any) -> tuple[Any, Any]:
    """``DataParallel.scatter`` where there is one GPU: what lies there already is not copied."""

    def moved(leaf: Any) -> Any:
        return leaf.to("cuda") if isinstance(leaf, torch.Tensor) else leaf

    return (mapped(inputs, moved),), (mapped(kwargs, moved),)


def _twin(tensor: torch.Tensor, shared: Container[int], memory: dict[int, torch.UntypedStorage]) -> torch.Tensor:
    """The symbolic twin of a tensor, a part of the memory that its storage has become if others share it."""
    if tensor.layout != torch.strided or hasattr(tensor, "__tensor_flatten__"):
        return symbolic_like(tensor)
    storage = tensor.untyped_storage()
    if storage._cdata not in shared:
        return symbolic_like(tensor)
    if storage._cdata not in memory:
        whole = torch.empty(storage.nbytes(), dtype=torch.uint8, device="meta")
        memory[storage._cdata] = whole.untyped_storage()
    twin = torch.empty(0, dtype=tensor.dtype, device="meta")
    return twin.set_(memory[storage._cdata], tensor.storage_offset(), tensor.size(), tensor.stride())


class ExternalLoopTracer:
    """The allocations of a loop, from :meth:`begin` on; for one process, which ends with it.

    Args:
        capability: compute capability of the GPU that is simulated.
        on_step: called after every step of every optimizer, with that optimizer.
        on_cpu: the loop will really run on the CPU: its own CPU tensors lie with everything else.
        memory: bytes of the GPU that is simulated, for a loop that asks for them.
    """

    def __init__(
        self,
        capability: tuple[int, int],
        on_step: Callable[[torch.optim.Optimizer], None],
        *,
        on_cpu: bool = False,
        memory: int = ASSUMED_MEMORY,
    ) -> None:
        self.capability = Capability(capability)
        self.recorder = Recorder()
        self.recorder.measures_first = True
        self.steps = 0
        """Optimizer steps of the loop so far; steps of several optimizers in a row are one."""
        self._device = FakeCudaState(self.recorder, memory)
        self._mode = SymbolicMode(self.recorder, self._device, self.capability, Interrupts(), on_cpu=on_cpu)
        self._on_step = on_step
        self._stack = contextlib.ExitStack()
        self._phases = ObservedPhases(self.recorder, self._device, lambda: self.steps + 1, self._backward_ended)
        self._stepped: list[torch.optim.Optimizer] = []
        """Optimizers that hooks on gradients have stepped in the backward pass that is under way."""
        self._by_engine = False
        self._followed: Followed | None = None
        self._flat: nn.Module | None = None
        """The model that FullyShardedDataParallel divides, if any: it stores gradients itself."""

    def __deepcopy__(self, _memo: object) -> Self:
        """A copy of a model, whose hooks lead here, is traced with the model."""
        return self

    # --- setting up -------------------------------------------------------------------------------------------

    def begin(self) -> None:
        """From here on the process has a simulated CUDA device: for good.

        Raises:
            UnsupportedStepError: this torch lacks what a trace needs.
        """
        check_torch()
        # Shapes of symbolic tensors need it, and it takes long: every copy of this process would import it by itself.
        importlib.import_module("torch.fx.experimental.symbolic_shapes")
        enter = self._stack.enter_context
        enter(compiler_not_imported())
        self._module_call = nn.Module.__call__
        enter(asked_as_chosen(self.capability))
        enter(on_simulated_cuda(self._device, self.capability))
        enter(moved_in_place(self.recorder))
        if hasattr(torch, "accelerator"):
            enter(replaced(torch.accelerator, accelerator_answers()))
        enter(replaced(nn.DataParallel, {"scatter": _onto_one_gpu}))
        enter(uncompiled(self._device))
        enter(replaced(torch.autograd, self._phases.backward_entries()))
        register_optimizer_step_pre_hook(self._before_step)
        register_optimizer_step_post_hook(self._after_step)
        gc.collect()
        gc.disable()  # when a cycle dies must not depend on the collector's counters
        self.recorder.phase("setup", 0)
        enter(self._mode)

    def adopt(self, tensors: Iterable[torch.Tensor], shared: Container[int] = ()) -> None:
        """These real tensors become symbolic, and stay the objects that they are: whoever holds them sees it.

        Args:
            tensors: that lie on the GPU.
            shared: storages (``_cdata``) of which several of them may be parts; of others, each has its own memory.
        """
        memory: dict[int, torch.UntypedStorage] = {}
        for tensor in tensors:
            if not is_symbolic(tensor):
                self.adopt(kept(tensor))
                become(tensor, _twin(tensor, shared, memory))
                if packs(tensor):
                    tensor.__class__ = nn.Parameter  # its own class would be asked whether it is symbolic
                    if getattr(tensor, "CB", None) is not None:
                        tensor.__dict__["CB"] = tensor.detach()
                self.recorder.put(tensor, "cuda")

    def adopt_model(self, model: nn.Module) -> None:
        """The parameters and buffers of a model arrive on the GPU, as ``model.to("cuda")`` would move them."""
        parameters, buffers = list(model.parameters()), list(model.buffers())
        for module in modules_as_moved(model):
            self.adopt([tensor for tensor in module._parameters.values() if tensor is not None])
            self.adopt([tensor for tensor in module._buffers.values() if tensor is not None])
        self.recorder.classify(buffers, "buffers")
        scales = itertools.chain(*map(kept, parameters))
        self.recorder.classify(itertools.chain(parameters, scales), "parameters")
        model.register_forward_pre_hook(self._before_forward)
        for parameter in parameters:
            if parameter.requires_grad:
                before_others(parameter, self._new_gradient)

    def shard(self, model: nn.Module, ranks: int, *, flat: bool = False) -> None:
        """From here on FSDP on this model, which lies in host memory, is traced; call it in place of adopting it.

        Args:
            model: real; what of it the loop had moved to the GPU before is symbolic already, and stays there.
            ranks: processes over which it will be sharded.
            flat: by FullyShardedDataParallel, not by ``fully_shard``.

        Raises:
            UnsupportedTechniqueError: this torch lacks a private name that the trace of FSDP leans on.
        """
        from vram_guard.simulate.parallel.sharding import fsdp_traced

        self._adopt_on_host(model)
        self._stack.enter_context(replaced(torch.Tensor, {"data_ptr": address_of}))
        self._stack.enter_context(fsdp_traced(model, self.recorder, self._device, ranks))
        if flat:
            self._flat = model
            self._stack.enter_context(flat_parameters_followed(self.recorder))
        model.register_forward_pre_hook(self._before_forward)

    def _adopt_on_host(self, model: nn.Module) -> None:
        """A model becomes symbolic where it is."""
        self._device.shapes_only += 1  # the stand-ins take no memory of the GPU
        for tensor in (*model.parameters(), *model.buffers()):
            if not is_symbolic(tensor):
                become(tensor, symbolic_like(tensor))
                self.recorder.put(tensor, "cpu")
        self._device.shapes_only -= 1
        self.recorder.users_own_meta = False

    def under_engine(self, model: nn.Module, layout: Parallel) -> None:
        """From here on DeepSpeed's engine around this model is traced; call it in place of adopting it.

        Args:
            model: real; what of it the loop had moved to the GPU before is symbolic already, and stays there.
            layout: of one of DeepSpeed's kinds.

        Raises:
            UnsupportedTechniqueError: this torch lacks a private name that the trace leans on.
        """
        self._adopt_on_host(model)
        self._stack.enter_context(replaced(torch.Tensor, {"data_ptr": address_of}))
        self._stack.enter_context(one_rank(model, self.recorder, self._device, layout, 0))
        model.register_forward_pre_hook(self._before_forward)

    def engine_made(self, engine: Any) -> None:
        """The engine is there: its steps are the loop's, and the optimizer's inside are parts of them."""
        self._by_engine = True
        classify_engine(engine, self.recorder)
        own = engine._take_model_step

        def step(*args: Any, **kwargs: Any) -> None:
            self.recorder.phase("optimizer", self.steps + 1)
            own(*args, **kwargs)
            classify_states(self.recorder, EngineOptimizer(engine))
            self._on_step(engine.optimizer)

        engine._take_model_step = step

    def sharded(self, model: nn.Module) -> None:
        """The model has been sharded: this rank's parts are its parameters, buffers and gradients."""
        self.recorder.classify(itertools.chain(*map(inner_tensors, model.buffers())), "buffers")
        self.recorder.classify(itertools.chain(*map(inner_tensors, model.parameters())), "parameters")
        for parameter in model.parameters():
            if parameter.requires_grad:
                before_others(parameter, self._new_gradient)

    def reduce(self, models: Iterable[nn.Module], ranks: int, given: Mapping[str, Any]) -> None:
        """DistributedDataParallel will wrap each of these models that is trained.

        Args:
            models: that the loop calls.
            ranks: processes that share the work.
            given: its arguments.
        """
        options = chosen_options(given)
        made = ((model, reduction_of(model, data_parallel(ranks), options, self.recorder)) for model in models)
        found = [(model, reduction) for model, reduction in made if reduction is not None]
        self._stack.enter_context(calls_reduced(found))

    def compile(self, adapter: str) -> None:
        """From here on what ``torch.compile`` compiles is followed as compiled, and no longer runs uncompiled.

        Args:
            adapter: the folder of the code that observes the loop from within it, with a separator at its end.

        Raises:
            NotCompiledError: this torch lacks what that rests on, or DeepSpeed's engine trains the model.
        """
        if self._by_engine:
            refuse_engine()
        check_compiler()
        from vram_guard.simulate.compiler.following import compiler_followed

        follow = compiler_followed(self._device, self._mode, self.capability.version, self._module_call, adapter)
        self._followed = self._stack.enter_context(follow)

    def train(self, model: nn.Module) -> None:
        """The loop is about to train this model (its names are those of the answer)."""
        self._stack.enter_context(module_paths(model, self.recorder))
        note_absent_kernels(model, self.recorder)

    def watch(self, model: nn.Module, names: Iterable[str]) -> None:
        """The forwards of these modules are watched: what they change is in the timeline."""
        self._mode.purity.install(model, names)

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """The simulated CUDA device is off inside the block: for code that is not the loop's."""
        self._device.active = False
        try:
            yield
        finally:
            self._device.active = True

    # --- phases -----------------------------------------------------------------------------------------------

    @contextlib.contextmanager
    def loading(self) -> Iterator[None]:
        """A batch moves to the GPU inside the block."""
        self.recorder.phase("batch", self.steps + 1, "batch")
        try:
            yield
        finally:
            self.recorder.phase("forward", self.steps + 1)

    def batch_begins(self) -> None:
        """What moves to the GPU until a model is called belongs to a batch."""
        self.recorder.phase("batch", self.steps + 1, "batch")

    def _backward_ended(self) -> None:
        """FullyShardedDataParallel has stored gradients itself, and what hooks have stepped has stepped."""
        for parameter in () if self._flat is None else self._flat.parameters():
            self.recorder.classify(inner_tensors(parameter.grad), "gradients")
        stepped, self._stepped = self._stepped, []
        for optimizer in stepped:
            self._on_step(optimizer)

    def _before_forward(self, *_args: Any) -> None:
        self.forward_begins()

    def forward_begins(self) -> None:
        """A forward of a model, or of a slice of its batch, begins."""
        self._phases.forward_begins()

    def _before_step(self, *_args: Any) -> None:
        if not (self._by_engine or self._phases.in_backward):
            self._phases.step_begins()

    def _after_step(self, optimizer: torch.optim.Optimizer, *_args: Any) -> None:
        if self._by_engine:
            return
        self._phases.step_ended(optimizer)
        if self._phases.in_backward:
            self._stepped.append(optimizer)
        else:
            self._on_step(optimizer)

    def _new_gradient(self, parameter: torch.Tensor) -> None:
        self.recorder.classify(inner_tensors(parameter.grad), "gradients")

    # --- the answer -------------------------------------------------------------------------------------------

    def timeline(self, batch_size: int, precision: str) -> Timeline:
        """Everything that happened so far; nothing after this is recorded. Sizes are those of this batch size."""
        self.recorder.close()
        if self.steps < self.recorder.measured_step:
            self.recorder.measured_step = 1  # the script has no second one
        timeline = self._mode.timeline(batch_size, precision)
        return timeline if self._followed is None else self._followed.on(timeline)
