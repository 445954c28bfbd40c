"""DeepSpeed's own engine in a trace: what it asks of processes, drivers and values is answered here."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping
from types import ModuleType, SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from vram_guard.errors import UnsupportedTechniqueError
from vram_guard.language import _
from vram_guard.parallel.deepspeed import STAGES, config_of, deepspeed_library, make_engine
from vram_guard.patching import replaced
from vram_guard.simulate.device.symbolic import is_symbolic

if TYPE_CHECKING:
    from torch import nn

    from vram_guard.simulate.device.fake_cuda import FakeCudaState
    from vram_guard.simulate.memory.recorder import Recorder
    from vram_guard.step import TrainingStep


@contextlib.contextmanager
def engines_followed(state: FakeCudaState, ranks: int, rank: int) -> Iterator[None]:
    """Inside the block DeepSpeed makes engines of symbolic models, on the simulated GPU, among pretended ranks."""
    library = deepspeed_library()
    from deepspeed.accelerator import real_accelerator
    from deepspeed.accelerator.cuda_accelerator import CUDA_Accelerator
    from deepspeed.ops.op_builder.builder import OpBuilder
    from deepspeed.runtime import utils as runtime_utils
    from deepspeed.runtime.zero import (
        parameter_offload,
        partition_parameters,
        partitioned_param_coordinator,
        stage3,
        stage_1_and_2,
        utils,
    )
    from deepspeed.runtime.zero.stage3 import DeepSpeedZeroOptimizer_Stage3
    from deepspeed.runtime.zero.stage_1_and_2 import DeepSpeedZeroOptimizer
    from deepspeed.utils import groups

    accelerator = CUDA_Accelerator()
    # Ranges for a profiler.
    accelerator.range_push = accelerator.range_pop = lambda *_args, **_kwargs: None
    environment = {"RANK": str(rank), "LOCAL_RANK": "0", "WORLD_SIZE": str(ranks), "DS_SKIP_CUDA_CHECK": "1"}
    before = dict(os.environ)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        for kind in (DeprecationWarning, FutureWarning):  # of torch, on what DeepSpeed uses of it
            warnings.simplefilter("ignore", kind)
        stack.callback(_restore_environment, before)
        os.environ.update(environment)
        stack.enter_context(replaced(real_accelerator, {"ds_accelerator": accelerator}))
        stack.enter_context(replaced(library.comm.comm, {"cdb": None}))
        stack.enter_context(replaced(groups, _forgotten(vars(groups))))
        # Stage 3 puts a function of its own there, and leaves it.
        stack.enter_context(replaced(torch.nn.functional, {"linear": torch.nn.functional.linear}))
        # A symbolic flag would say that gradients overflow, and the step be skipped.
        stack.enter_context(
            replaced(
                DeepSpeedZeroOptimizer,
                {"has_overflow": _no_overflow, "check_overflow": _none_overflows},
            )
        )
        stack.enter_context(replaced(DeepSpeedZeroOptimizer_Stage3, {"has_overflow": _no_overflow}))
        for module in (runtime_utils, stage_1_and_2, stage3):
            if hasattr(module, "is_invalid_grad_norm"):
                stack.enter_context(replaced(module, {"is_invalid_grad_norm": _no_overflow}))
        for module in (parameter_offload, partition_parameters, partitioned_param_coordinator, stage3, utils):
            if hasattr(module, "assert_ints_same_as_other_ranks"):
                stack.enter_context(replaced(module, {"assert_ints_same_as_other_ranks": lambda *_args: None}))
        stack.enter_context(replaced(torch, {"zeros_like": _own_meta(torch.zeros_like, state)}))
        stack.enter_context(replaced(torch, {name: _for_host(getattr(torch, name), state) for name in _FACTORIES}))
        stack.enter_context(replaced(OpBuilder, {"load": lambda builder, *_args, **_kwargs: _stand_in(builder)}))
        stack.callback(_restore_module, "cpuinfo", sys.modules.get("cpuinfo"))
        sys.modules["cpuinfo"] = _CPUINFO
        yield


#: In place of a library that starts processes when it is imported, and when it is asked.
_CPUINFO = ModuleType("cpuinfo")
_CPUINFO.get_cpu_info = dict  # type: ignore[attr-defined]


def _restore_module(name: str, before: ModuleType | None) -> None:
    if before is None:
        sys.modules.pop(name, None)
    else:
        sys.modules[name] = before


#: Of tensors that DeepSpeed makes to hold what comes from the GPU.
_FACTORIES = ("empty", "zeros", "full")


def _for_host(original: Callable[..., Any], state: FakeCudaState) -> Callable[..., Any]:
    """DeepSpeed's own tensors of host memory are symbolic: they hold states and gradients, as large as the model."""

    @functools.wraps(original)
    def made(*args: Any, **kwargs: Any) -> torch.Tensor:
        own = sys._getframe(1).f_globals.get("__name__", "").startswith("deepspeed.")
        if not own or torch.device(kwargs.get("device") or "cpu").type != "cpu":
            result: torch.Tensor = original(*args, **kwargs)
            return result
        pinned = bool(kwargs.pop("pin_memory", False))
        state.shapes_only += 1
        try:
            result = original(*args, **{**kwargs, "device": "meta"})
        finally:
            state.shapes_only -= 1
        state.recorder.put(result, "cpu", pinned=pinned)
        return result

    return made


def _stand_in(builder: Any) -> Any:
    """Functions of a C++ extension of DeepSpeed, which are compiled when they are first used, and are not here.

    Its optimizers for the host and for the GPU update their states in place and allocate nothing:
    csrc/adam/cpu_adam.cpp (``ds_adam_step``) and csrc/adam/multi_tensor_adam.cu (``multi_tensor_adam_cuda``) of release
    0.19.8. What they keep of each parameter is made in Python (deepspeed/ops/adam/cpu_adam.py and fused_adam.py),
    and is traced.

    Raises:
        UnsupportedTechniqueError: other extensions.
    """
    if builder.name not in _EXTENSIONS:
        raise UnsupportedTechniqueError(
            _("DeepSpeed's C++ extension {name} cannot be predicted: use Adam or AdamW", name=builder.name)
        )
    return SimpleNamespace(**dict.fromkeys(_EXTENSIONS[builder.name], lambda *_args: None))


#: Functions of the extensions whose memory is known, by the names of their builders.
_EXTENSIONS = {
    "cpu_adam": ("create_adam", "destroy_adam", "adam_update"),
    "fused_adam": ("multi_tensor_adam",),
}


def _forgotten(names: Mapping[str, Any]) -> dict[str, Any]:
    """The groups that DeepSpeed keeps for the process, as at its import: there are none."""
    kept = {name: value for name, value in names.items() if name.startswith("_") and name.endswith(_GROUPS)}
    return {"mesh_device": None, **{name: {} if isinstance(value, dict) else None for name, value in kept.items()}}


#: How the names of what ``deepspeed.utils.groups`` keeps end.
_GROUPS = ("_GROUP", "_GROUP_RANKS", "_WORLD_SIZE", "_RANK")


def _no_overflow(*_args: Any, **_kwargs: Any) -> bool:
    return False


def _none_overflows(optimizer: Any, *_args: Any, **_kwargs: Any) -> None:
    optimizer.overflow = False


def _restore_environment(before: dict[str, str]) -> None:
    os.environ.clear()
    os.environ.update(before)


def _own_meta(original: Callable[..., Any], state: FakeCudaState) -> Callable[..., Any]:
    """DeepSpeed keeps the shapes of parameters as tensors on the meta device, which take no memory."""

    def zeros_like(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        if kwargs.get("device") != "meta" or not is_symbolic(tensor):
            made: torch.Tensor = original(tensor, *args, **kwargs)
            return made
        state.shapes_only += 1
        try:
            made = original(tensor, *args, **kwargs)
        finally:
            state.shapes_only -= 1
        state.recorder.put(made, "meta")
        return made

    return zeros_like


def half_precision(precision: str) -> torch.dtype | None:
    """The dtype of the weights under an engine, by the step's precision in Lightning's words; None: float32."""
    if precision.startswith("bf16"):
        return torch.bfloat16
    return torch.float16 if precision.startswith("16") else None


def as_an_engine_takes_it(step: TrainingStep) -> TrainingStep:
    """The step without what DeepSpeed's engine does: half precision and clipping."""
    if step.parallel is None or step.parallel.kind not in STAGES:
        return step
    return step.with_(precision="32-true", clip_grad_norm=None)


def engine_optimizer(
    model: nn.Module, optimizer: torch.optim.Optimizer, step: TrainingStep, batch_size: int, recorder: Recorder
) -> EngineOptimizer:
    """DeepSpeed's engine around a model and its optimizer, on the simulated GPU.

    Args:
        model: symbolic, in host memory.
        optimizer: over its parameters.
        step: as written, with a layout of one of DeepSpeed's kinds.
        batch_size: samples of a micro-batch.
        recorder: of the trace.
    """
    assert step.parallel is not None
    config = config_of(
        step.parallel,
        micro_batch=batch_size,
        accumulate=min(step.accumulate, 2),  # as many as are traced
        precision=step.precision,
        clip_grad_norm=step.clip_grad_norm,
        own=step.deepspeed_config,
    )
    made = EngineOptimizer(make_engine(model, optimizer, config))
    classify_engine(made.engine, recorder)
    return made


def classify_engine(engine: Any, recorder: Recorder) -> None:
    """What a new engine holds: this rank's part of the weights, and of their masters in float32."""
    recorder.classify([getattr(p, "ds_tensor", p) for p in engine.module.parameters()], "parameters")
    for masters in ("single_partition_of_fp32_groups", "fp32_partitioned_groups_flat"):  # of stages 1 and 2, and of 3
        recorder.classify(getattr(engine.optimizer, masters, ()), "optimizer_states")


class EngineOptimizer(torch.optim.Optimizer):
    """The engine as the optimizer of a training loop: its groups and states are those of the rank's part."""

    def __init__(self, engine: Any) -> None:
        # Not the base's: there are no parameters to add.
        self.engine = engine
        self.param_groups = engine.optimizer.param_groups
        self.state = getattr(engine.optimizer, "optimizer", engine.optimizer).state

    def backward(self, loss: torch.Tensor) -> None:
        """The backward pass, and between micro-batches the step, which then only counts."""
        self.engine.backward(loss)
        if not self.engine.is_gradient_accumulation_boundary():
            self.engine.step()

    def step(self, closure: None = None) -> None:  # type: ignore[override] # noqa: ARG002 - an optimizer's
        """The optimizer step, with clipping."""
        self.engine.step()

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Nothing: the engine's step frees the gradients."""
