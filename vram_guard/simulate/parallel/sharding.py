"""Sharding in a trace: torch's own code runs on symbolic tensors; what it does besides operators is recorded."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, Any

import torch

from vram_guard.errors import UnsupportedTechniqueError
from vram_guard.language import _
from vram_guard.patching import replaced
from vram_guard.private_names import PrivateName, missing_names
from vram_guard.simulate.device.cuda_module import accelerator_answers
from vram_guard.simulate.device.fake_cuda import FakeCudaState
from vram_guard.simulate.parallel.groups import default_group_kept
from vram_guard.simulate.private_api import FSDP_NAMES

if TYPE_CHECKING:
    from torch import nn

    from vram_guard.simulate.memory.recorder import Recorder


@contextlib.contextmanager
def fsdp_traced(model: nn.Module, recorder: Recorder, state: FakeCudaState, ranks: int = 1) -> Iterator[Any]:
    """While the block runs, ``fully_shard`` on the model is traced; afterwards torch has forgotten the model.

    Args:
        model: what is sharded.
        recorder: of the trace.
        state: of the trace.
        ranks: processes over which the model is sharded; this one is the first of them.

    Yields:
        A device mesh of so many processes, whose collectives do nothing.

    Raises:
        UnsupportedTechniqueError: this torch lacks a private name that the trace of FSDP leans on.
    """
    with fsdp_followed(model, recorder, state), _mesh_of(ranks) as mesh:
        yield mesh


@contextlib.contextmanager
def fsdp_followed(model: nn.Module, recorder: Recorder, state: FakeCudaState) -> Iterator[None]:
    """While the block runs, what ``fully_shard`` does besides operators is recorded.

    Raises:
        UnsupportedTechniqueError: this torch lacks a private name that the trace of FSDP leans on.
    """
    check_names(FSDP_NAMES)
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.distributed import _composable_state
    from torch.distributed.fsdp._fully_shard import _fsdp_param

    with contextlib.ExitStack() as stack:
        # Said of a module that returns a view, for each call of each option that is tried: a training that is really
        # sharded says it itself.
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", "FSDP2-wrapped module")
        stack.enter_context(replaced(torch.UntypedStorage, {"resize_": _resize(recorder)}))
        stack.enter_context(replaced(FakeTensorMode, _shapes_only(state)))
        # The mesh that `fully_shard` makes where it is given none.
        stack.enter_context(replaced(torch._C, {"_get_accelerator": lambda *_args: torch.device("cuda")}))
        if hasattr(torch, "accelerator"):  # FSDP asks it for a stream where gradients are carried to the host last
            stack.enter_context(replaced(torch.accelerator, accelerator_answers()))
        stack.enter_context(
            replaced(_fsdp_param.FSDPParam, {"init_unsharded_param": _named(recorder, _fsdp_param.FSDPParam)})
        )
        stack.enter_context(replaced(_fsdp_param, {"_chunk_with_empty": _Parts}))
        for module in model.modules():
            stack.callback(_composable_state._module_state_mapping.pop, module, None)
        yield


def check_names(names: Iterable[PrivateName]) -> None:
    """Refuse a torch that lacks one of these names.

    Raises:
        UnsupportedTechniqueError: names what is missing.
    """
    missing = missing_names(names)
    if missing:
        raise UnsupportedTechniqueError(
            _(
                "sharded training and parameters_on_host cannot be traced: torch {version} has no {names}",
                version=torch.__version__,
                names=", ".join(name.dotted for name in missing),
            )
        )


class _Parts(Sequence[torch.Tensor]):
    """The parts of a parameter, each cut when it is asked for: torch's own list has one for every rank.

    As ``_chunk_with_empty`` in torch/distributed/fsdp/_fully_shard/_fsdp_common.py cuts them.
    """

    def __init__(self, tensor: torch.Tensor, num_chunks: int, dim: int) -> None:
        self.tensor, self.ranks, self.dim = tensor, num_chunks, dim
        self.rows = tensor.shape[dim]
        self.each = -(-self.rows // num_chunks)

    def __len__(self) -> int:
        return self.ranks

    def __getitem__(self, index: Any) -> Any:
        start = index * self.each
        if index and start >= self.rows:
            return self.tensor.new_empty(0)
        return self.tensor.narrow(self.dim, start, min(self.each, self.rows - start))


def _resize(recorder: Recorder) -> Callable[[torch.UntypedStorage, int], torch.UntypedStorage]:
    """FSDP frees and takes unsharded parameters' memory by resizing storages (``free_storage``, ``alloc_storage``)."""
    original = torch._C.StorageBase.resize_  # type: ignore[attr-defined]

    def resize_(self: torch.UntypedStorage, size: int) -> torch.UntypedStorage:
        original(self, size)
        recorder.storage_resized(self)
        return self

    return resize_


def _shapes_only(state: FakeCudaState) -> dict[str, Any]:
    """DTensor derives the shapes of its results within a ``FakeTensorMode``: no memory of the step's.

    The trace's own mode is asked before that one, whichever was entered last.
    """
    from torch._subclasses.fake_tensor import FakeTensorMode

    enter, leave = FakeTensorMode.__enter__, FakeTensorMode.__exit__

    def entered(self: Any) -> Any:
        state.shapes_only += 1
        return enter(self)

    def left(self: Any, *error: Any) -> Any:
        state.shapes_only -= 1
        return leave(self, *error)

    return {"__enter__": entered, "__exit__": left}


def _named(recorder: Recorder, kind: Any) -> Callable[[Any], None]:
    """The unsharded parameter is a parameter, and what autograd stores there a gradient."""
    original = kind.init_unsharded_param

    def init_unsharded_param(self: Any) -> None:
        first = not hasattr(self, "_unsharded_param")
        original(self)
        recorder.classify(self.all_gather_outputs, "parameters")
        if first and self._unsharded_param.requires_grad:
            self._unsharded_param.register_post_accumulate_grad_hook(
                lambda parameter: recorder.classify([parameter.grad], "gradients")
            )

    return init_unsharded_param


@contextlib.contextmanager
def _mesh_of(ranks: int) -> Iterator[Any]:
    """A process group whose collectives do nothing: what other processes would send has no values either."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
    from torch.testing._internal.distributed.fake_pg import FakeStore

    if dist.is_initialized():
        group = dist.new_group([dist.get_rank()], backend="fake", use_local_synchronization=True)
        try:
            yield DeviceMesh.from_group(group, "cuda")
        finally:
            dist.destroy_process_group(group)
        return
    with default_group_kept():
        dist.init_process_group("fake", store=FakeStore(), rank=0, world_size=ranks)
        try:
            yield init_device_mesh("cuda", (ranks,))
        finally:
            dist.destroy_process_group()
