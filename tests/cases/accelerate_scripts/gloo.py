"""What no GPU needs: Accelerate takes processes of the CPU, with gloo, for processes of GPUs, which divide models.

Accelerate shards on GPUs only (``accelerate/state.py``). Everything beyond that is real here: its variables, its
``prepare``, torch's ``fully_shard`` or DeepSpeed's engine, the processes and what they send each other.
"""

import importlib
import os

import torch
from accelerate.state import DistributedType, PartialState


def take_for_gpus() -> None:
    """Where Accelerate was told to use FSDP or DeepSpeed; a dry run is no rank, and has its own pretence."""
    by_engine = os.environ.get("ACCELERATE_USE_DEEPSPEED") == "true"
    if not (by_engine or os.environ.get("ACCELERATE_USE_FSDP") == "true") or "LOCAL_RANK" not in os.environ:
        return
    if by_engine:  # it would be compiled; where it is not there, torch's collectives are used
        importlib.import_module("deepspeed.comm.torch").build_shm_op = lambda: None
    PartialState._prepare_backend = lambda *_args, **_kwargs: ("gloo", DistributedType.MULTI_GPU)
    PartialState.set_device = lambda self: setattr(self, "device", torch.device("cpu"))
    from torch.distributed.fsdp import CPUOffloadPolicy  # since torch 2.6; other scripts need none

    unpinned = CPUOffloadPolicy(pin_memory=False)  # nothing can be pinned without a GPU
    CPUOffloadPolicy.__init__ = lambda self, **_: object.__setattr__(self, "pin_memory", unpinned.pin_memory)


def zero_of(accelerator):
    """The stage of DeepSpeed's engine, whether states are on the host, and the optimizer; None without an engine."""
    wrapped = getattr(accelerator, "deepspeed_engine_wrapped", None)
    if wrapped is None:
        return None
    engine = wrapped.engine
    return (
        engine.zero_optimization_stage(),
        bool(engine.zero_offload_optimizer()),
        type(engine.basic_optimizer).__name__,
    )
