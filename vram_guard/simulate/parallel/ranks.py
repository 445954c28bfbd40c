"""One rank of a layout in a trace: where its weights lie before they are divided, and after."""

from __future__ import annotations

import contextlib
import logging
import warnings
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

import torch

from vram_guard.parallel.deepspeed import STAGES
from vram_guard.parallel.install import install
from vram_guard.patching import replaced
from vram_guard.simulate.device.constants import known
from vram_guard.simulate.device.fake_cuda import FakeCudaState
from vram_guard.simulate.device.symbolic import is_symbolic, symbolic_like
from vram_guard.simulate.parallel.engines import engines_followed
from vram_guard.simulate.parallel.flat_parameters import flat_parameters_followed
from vram_guard.simulate.parallel.groups import pretended_ranks
from vram_guard.simulate.parallel.replicas import replicas_followed
from vram_guard.simulate.parallel.sharding import check_names, fsdp_followed
from vram_guard.simulate.private_api import COLLECTIVE_NAMES, PARALLEL_NAMES, REDUCER_NAMES

if TYPE_CHECKING:
    from torch import nn

    from vram_guard.parallel.spec import Parallel
    from vram_guard.simulate.memory.recorder import Place, Recorder

#: Kinds that divide what lies on the GPU already.
_FROM_GPU = ("ddp", "zero1")


@contextlib.contextmanager
def one_rank(
    model: nn.Module, recorder: Recorder, state: FakeCudaState, parallel: Parallel, rank: int
) -> Iterator[Any]:
    """Inside the block this process is one rank of the layout, whose training is traced.

    Yields:
        The mesh of the layout.

    Raises:
        UnsupportedTechniqueError: this torch lacks a private name that the trace of FSDP leans on.
    """
    check_names((*PARALLEL_NAMES, *COLLECTIVE_NAMES, *REDUCER_NAMES))
    with (
        fsdp_followed(model, recorder, state),
        replicas_followed(),
        flat_parameters_followed(recorder),
        _losses_stay_parallel(),
        pretended_ranks(parallel, rank) as mesh,
        engines_followed(state, parallel.gpus, rank) if parallel.kind in STAGES else contextlib.nullcontext(),
        _no_advice(),
    ):
        yield mesh


@contextlib.contextmanager
def _no_advice() -> Iterator[None]:
    """FSDP and DTensor give advice on the training, once: it is for the real one, and would come with every trace."""
    logger = logging.getLogger("torch.distributed.tensor._redistribute")

    def quiet(_record: logging.LogRecord) -> bool:
        return False

    logger.addFilter(quiet)
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings("ignore", "FSDP2-wrapped module")
            yield
    finally:
        logger.removeFilter(quiet)


def first_place(model: nn.Module | Any, parallel: Parallel) -> Place:
    """The place of the weights before they are divided, see :attr:`Parallel.init`.

    Args:
        model: the step's, as it was given.
        parallel: the layout.
    """
    if parallel.init is not None:
        return parallel.init
    if parallel.kind in _FROM_GPU:
        return "cuda"
    if parallel.kind in STAGES:
        return "cpu"
    real = isinstance(model, torch.nn.Module) and not any(is_symbolic(p) for p in model.parameters())
    return "cpu" if real else "meta"


def put(tensors: Iterable[torch.Tensor], place: Place, recorder: Recorder) -> None:
    """Symbolic weights lie there, before they are divided."""
    recorder.users_own_meta = False  # FSDP makes tensors that no operator has made
    for tensor in tensors:
        recorder.put(tensor, place)


@contextlib.contextmanager
def made_on_host(recorder: Recorder, state: FakeCudaState) -> Iterator[None]:
    """Weights that ``apply`` itself makes, where it names no device, lie in host memory."""

    def stand_in(_module: nn.Module, _name: str, tensor: torch.Tensor | None) -> torch.Tensor | None:
        if tensor is None or is_symbolic(tensor) or hasattr(tensor, "__tensor_flatten__"):
            return None
        state.shapes_only += 1
        made: torch.Tensor = symbolic_like(tensor)
        if isinstance(tensor, torch.nn.Parameter):
            made = torch.nn.Parameter(made, requires_grad=tensor.requires_grad)
        state.shapes_only -= 1
        recorder.put(made, "cpu")
        known(made, tensor.detach())
        return made

    modules: Any = torch.nn.modules.module
    registered = (
        modules.register_module_parameter_registration_hook(stand_in),
        modules.register_module_buffer_registration_hook(stand_in),
    )
    try:
        yield
    finally:
        for handle in registered:
            handle.remove()


def divided(
    model: nn.Module, parallel: Parallel, mesh: Any, recorder: Recorder, ddp_options: Mapping[str, Any]
) -> nn.Module:
    """The layout put on a model, and what is not on the GPU yet moved there.

    Returns:
        The module that the loss is called with.
    """
    made = install(model, parallel, mesh, **ddp_options)
    if parallel.kind in STAGES:
        return made  # the engine moves it
    home = "cpu" if parallel.offload else "cuda"
    places = {recorder.place_of(tensor) for tensor in (*made.parameters(), *made.buffers())}
    if "meta" in places:
        made.to_empty(device=home)
    elif "cpu" in places and not parallel.offload:
        made.to("cuda")
    for module in made.modules() if parallel.offload else ():
        for name, tensor in module._buffers.items():
            if tensor is not None and recorder.place_of(tensor) == "cpu":
                module._buffers[name] = tensor.to("cuda")
    return made


@contextlib.contextmanager
def _losses_stay_parallel() -> Iterator[None]:
    """A step's loss is computed in ``with loss_parallel()``, and its backward has to run there as well."""
    from torch.distributed.tensor import DTensor
    from torch.distributed.tensor.parallel import loss

    with replaced(loss, {"_disable_custom_loss_ops": lambda: None}):
        try:
            yield
        finally:
            for operator in loss.customized_loss_ops:
                DTensor._op_dispatcher._custom_op_handlers.pop(operator, None)
