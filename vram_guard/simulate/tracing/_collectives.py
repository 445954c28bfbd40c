"""Collectives of a traced step: no peer is talked to; every rank is taken to hold what this one holds.

A trace runs on each rank by itself, perhaps in a copy of the process whose connections are dead. So what reaches
``torch.distributed`` is answered here, and written down: who runs the step in parts, or again, has to know of it.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
from vram_guard.patching import replaced
from vram_guard.private_names import missing_names
from vram_guard.simulate.device import constants
from vram_guard.simulate.device.symbolic import is_symbolic
from vram_guard.simulate.memory.recorder import Recorder
from vram_guard.simulate.parallel.groups import dimension_of, is_pretended
from vram_guard.simulate.private_api import COLLECTIVE_NAMES
from vram_guard.tensors import tensors_in
from vram_guard.timeline import SYNCHRONISED_NORM

#: c10d's operators by the names that ``torch.distributed`` gives them; others are known by their own.
_NAMES = {
    "allreduce_": "all_reduce",
    "allreduce_coalesced_": "all_reduce_coalesced",
    "allgather_": "all_gather",
    "allgather_coalesced_": "all_gather_coalesced",
    "allgather_into_tensor_coalesced_": "all_gather_into_tensor",
    "_allgather_base_": "all_gather_into_tensor",
    "_reduce_scatter_base_": "reduce_scatter_tensor",
    "reduce_scatter_tensor_coalesced_": "reduce_scatter_tensor",
    "alltoall_": "all_to_all",
    "alltoall_base_": "all_to_all_single",
    "recv_any_source_": "recv",
}
_TORCH_ROOT = str(Path(torch.__file__).parent) + os.sep
_OWN_ROOT = str(Path(__file__).parents[2]) + os.sep
_FUNCTIONAL = ("_c10d_functional", "_c10d_functional_autograd")
#: Of these, the waiting for a result that an earlier one will bring.
_WAITING = ("wait_tensor", "_wrap_tensor_autograd")


def is_collective(func: Any) -> bool:
    """True for operators that other processes take part in."""
    return func.namespace == "c10d" or func.namespace in _FUNCTIONAL


def answer(
    recorder: Recorder, func: Any, args: tuple[Any, ...], otherwise: Callable[[], Any], position: int = 0
) -> Any:
    """The result of a collective, as if every rank held what this one holds.

    Args:
        recorder: it is written down here, if there is another process in its group.
        func: the operator, see :func:`is_collective`.
        args: its arguments. Tensors with values (host memory) are gathered; a sum of them is left as one rank's.
        otherwise: runs it; for those that talk to nobody.
        position: entries of the step's work so far.

    Raises:
        UnsupportedStepError: this torch does not let its process groups be stood in for.
    """
    import torch.distributed as dist

    operator = func._schema.name.split("::")[1]
    if func.namespace in _FUNCTIONAL:
        if operator == "_wrap_tensor_autograd" and is_symbolic(args[0]):
            return torch.ops.aten.alias.default(args[0])  # wraps the same memory; torch's code for shapes makes a copy
        if operator in _WAITING:
            return otherwise()
        if all(is_symbolic(tensor) for tensor in tensors_in(args)):
            out = otherwise()  # torch's own code for shapes alone
            group = _resolved(args)
            recorder.collective(
                operator.rstrip("_"),
                size=max(_bytes(args), _bytes((out,))),
                ranks=1 if group is None else group.size(),
                dimension="" if group is None else dimension_of(group),
                position=position,
                by_layout=_called_by_layout(),
            )
            if group is not None:
                _used_by_nccl(recorder, group, (args, out))
            return out
        raise UnsupportedStepError(
            _("{operator} is called with a tensor in host memory: it cannot be run symbolically", operator=func)
        )
    if not func._schema.returns:  # monitored_barrier, check_for_nan
        return None
    missing = missing_names(COLLECTIVE_NAMES)
    if missing:
        raise UnsupportedStepError(
            _(
                "the step calls {operator}, which cannot be run symbolically: torch {version} has no {names}",
                operator=_NAMES.get(operator, operator.rstrip("_")),
                version=torch.__version__,
                names=", ".join(name.dotted for name in missing),
            )
        )
    from torch._C._distributed_c10d import FakeWork, ProcessGroup

    group = next(ProcessGroup.unbox(one) for one in args if isinstance(one, torch.ScriptObject))
    if group.size() > 1:
        recorder.collective(
            _NAMES.get(operator, operator.rstrip("_")),
            size=max(_bytes((value,)) for value in args),
            ranks=group.size(),
            dimension=dimension_of(group),
            position=position,
            by_layout=_called_by_layout(),
        )
    _used_by_nccl(recorder, group, args)
    _forget_values(operator, args)
    if is_pretended(group) or dist.get_backend(group) == "fake":
        if operator == "allreduce_" and recorder.in_backward:  # buckets of DistributedDataParallel
            recorder.classify((one for one in tensors_in(args) if one.is_floating_point()), "gradients")
        return _finished(otherwise())
    if operator in _GATHERS:
        _gather(*args[:2])
    work = FakeWork().boxed()
    return (args[0], work) if len(func._schema.returns) == 2 else work


#: Where torch spreads a step over ranks: what is called from there is none of the step's own calls.
_LAYOUTS = tuple(
    str(Path(_TORCH_ROOT, *parts)) + os.sep
    for parts in (("nn", "parallel"), ("distributed", "fsdp"), ("distributed", "tensor"), ("distributed", "optim"))
)


#: DeepSpeed's functions around those of ``torch.distributed``, which users may call as well.
_DEEPSPEEDS_C10D = "deepspeed.comm"


def _called_by_layout() -> bool:
    """True if the innermost frame that is not the trace's own, or c10d's, is of such code, or is autograd itself.

    DistributedDataParallel's C++ reduces gradients from within autograd.
    """
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        code = frame.f_code
        if code.co_filename.startswith(_LAYOUTS) or code.co_name == "_engine_run_backward":
            return True
        module = str(frame.f_globals.get("__name__"))
        if module.startswith("deepspeed.") and not module.startswith(_DEEPSPEEDS_C10D):
            return True
        if not code.co_filename.startswith((_TORCH_ROOT, _OWN_ROOT)) and not module.startswith(_DEEPSPEEDS_C10D):
            return False
        frame = frame.f_back
    return False


def nccl_records_streams(version: str, environment: Mapping[str, str]) -> bool:
    """True where ProcessGroupNCCL calls ``recordStream`` for what it sends: before torch 2.8, unless it is told not to.

    pytorch pull request 148590; TORCH_NCCL_AVOID_RECORD_STREAMS is torch's own variable for it (torchtitan, issue 735).
    """
    release = tuple(int(part) for part in version.split(".")[:2])
    return release < (2, 8) and environment.get("TORCH_NCCL_AVOID_RECORD_STREAMS", "0").lower() not in _YES


def _used_by_nccl(recorder: Recorder, group: Any, values: tuple[Any, ...]) -> None:
    """Where NCCL notes its own stream in what it sends and receives, that is free again when that stream gets there."""
    if nccl_records_streams(torch.__version__, os.environ):
        stream = recorder.streams.number(("NCCL", group.group_name))
        for tensor in tensors_in(values):
            recorder.record_stream(tensor, stream)


#: What torch takes for "yes" (``getCvarBool``).
_YES = ("y", "yes", "1", "t", "true")


def _finished(out: Any) -> Any:
    """What a collective returns, its work with a future that has the results: the fake one's is empty.

    DistributedDataParallel's C++ takes the reduced bucket from there, and communication hooks do.
    """
    from torch._C import _distributed_c10d

    if not isinstance(out, tuple):
        return out
    future: torch.futures.Future[Any] = torch.futures.Future()
    future.set_result(list(tensors_in(out[:1])))
    return out[0], _distributed_c10d._create_work_from_future(future).boxed()  # type: ignore[attr-defined]


def _resolved(args: tuple[Any, ...]) -> Any:
    """The group that a functional collective names; None where it names none."""
    from torch._C._distributed_c10d import _resolve_process_group

    names = [value for value in args if isinstance(value, str)]
    return _resolve_process_group(names[-1]) if names else None  # type: ignore[arg-type]


def _bytes(values: tuple[Any, ...]) -> int:
    return sum(tensor.numel() * tensor.element_size() for tensor in tensors_in(values))


_GATHERS = ("allgather_", "_allgather_base_", "gather_", "allgather_coalesced_", "allgather_into_tensor_coalesced_")


#: Operators that write into none of their tensors what this rank's would not hold already.
_LEAVING_VALUES = ("broadcast_", "barrier", "send", "recv_", "recv_any_source_")


def _forget_values(operator: str, args: tuple[Any, ...]) -> None:
    """Forget the values of symbolic tensors that a collective writes; gathered ones hold what this rank sends."""
    if operator in _LEAVING_VALUES:
        return
    sent = list(tensors_in(args[1:2])) if operator in _GATHERS else []
    for target in tensors_in(args[:1]):
        if not is_symbolic(target):
            continue
        constants.forget(target)
        value = constants.compute(sent[0]) if len(sent) == 1 and sent[0].shape == target.shape else None
        if value is not None:
            constants.known(target, value)


def _gather(outputs: Any, inputs: Any) -> None:
    """Every place of the outputs gets the input; symbolic tensors have nothing to copy."""
    source = list(tensors_in((inputs,)))
    for target in tensors_in((outputs,)):
        if not is_symbolic(target) and not any(is_symbolic(tensor) for tensor in source) and source[0].numel():
            target.view(-1, source[0].numel()).copy_(source[0].reshape(1, -1))


@contextlib.contextmanager
def synchronised_norms(recorder: Recorder) -> Iterator[None]:
    """Inside the block synchronised batch normalisation is that of one process: its own kernels have no shapes."""

    def forward(self: nn.SyncBatchNorm, inputs: torch.Tensor) -> torch.Tensor:
        import torch.distributed as dist

        self._check_input_dim(inputs)
        if self.training and dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1:
            recorder.collective(SYNCHRONISED_NORM)
        return nn.modules.batchnorm._BatchNorm.forward(self, inputs)

    with replaced(nn.SyncBatchNorm, {"forward": forward}):
        yield
