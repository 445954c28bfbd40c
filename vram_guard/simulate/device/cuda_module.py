"""The answers of ``torch.cuda`` while a trace runs: one device with streams, and no call that reaches a driver."""

from __future__ import annotations

import functools
from collections.abc import Callable
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import torch

from vram_guard.simulate.device.capability import HAS_BFLOAT16, Capability
from vram_guard.simulate.device.cuda_streams import stream_answers
from vram_guard.simulate.device.import_guard import Activity

if TYPE_CHECKING:
    from typing_extensions import Self

CUDA = torch.device("cuda", 0)


class _CurrentDevice:
    """Stands for ``torch.cuda.device``: there is one device."""

    def __init__(self, *args: Any) -> None:
        pass

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *args: object) -> None:
        return None


class _Tools:
    """Stands for NVTX and the CUDA runtime's own module, which builds without CUDA lack: nobody profiles a trace."""

    cudaError = SimpleNamespace(success=0)  # noqa: N815 - the runtime's name

    def __getattr__(self, name: str) -> Callable[..., int]:
        if name.startswith("__"):
            raise AttributeError(name)
        return lambda *args, **kwargs: 0


#: Stands for ``torch.cuda.nvtx._nvtx`` and ``torch.cuda._cudart``.
TOOLS = _Tools()

#: What ``torch.cuda.get_device_name`` answers.
_NAME = "vram_guard simulated GPU"

#: Bytes of the simulated GPU where it is not known which one is meant.
ASSUMED_MEMORY = 80 * 2**30

#: Answers about the device's generator, of ``torch.cuda`` and of ``torch.cuda.random``, where they come from.
GENERATOR_ANSWERS: dict[str, Callable[..., Any]] = {
    "get_rng_state": lambda *args, **kwargs: torch.zeros(16, dtype=torch.uint8),
    "get_rng_state_all": lambda *args, **kwargs: [torch.zeros(16, dtype=torch.uint8)],
    "set_rng_state": lambda *args, **kwargs: None,
    "set_rng_state_all": lambda *args, **kwargs: None,
}


def cuda_answers(capability: Capability, total_memory: int = ASSUMED_MEMORY) -> dict[str, Any]:
    """The replaced functions and classes of ``torch.cuda`` by name.

    Args:
        capability: of the GPU that is simulated.
        total_memory: its bytes. All of them are free: what a trace holds is known when it is over.
    """

    def properties(*_args: Any, **_kwargs: Any) -> SimpleNamespace:
        major, minor = capability.version
        return SimpleNamespace(
            name=_NAME,
            major=major,
            minor=minor,
            total_memory=total_memory,
            multi_processor_count=108,
            is_integrated=False,
            is_multi_gpu_board=False,
            warp_size=32,
            L2_cache_size=40 * 2**20,
        )

    def bfloat16(including_emulation: bool = True) -> bool:
        return including_emulation or capability.says(HAS_BFLOAT16)  # every card can, if slowly

    constant = {
        **dict.fromkeys(("is_available", "is_initialized"), True),
        "device_count": 1,
        **dict.fromkeys(("current_device", "memory_allocated", "memory_reserved"), 0),
        **dict.fromkeys(("max_memory_allocated", "max_memory_reserved"), 0),
        "get_device_name": _NAME,
        "is_current_stream_capturing": False,
        "mem_get_info": (total_memory, total_memory),
        **dict.fromkeys(("_lazy_init", "_lazy_call", "init", "set_device", "empty_cache")),
        **dict.fromkeys(("reset_peak_memory_stats", "manual_seed", "manual_seed_all")),
    }
    return {
        **{name: _answering(value) for name, value in constant.items()},
        "get_device_capability": lambda *args, **kwargs: capability.version,
        "get_device_properties": properties,
        "is_bf16_supported": bfloat16,
        "memory_stats": lambda *args, **kwargs: {},
        **GENERATOR_ANSWERS,
        "device": _CurrentDevice,
        **stream_answers(),
    }


#: Names of ``torch.accelerator`` -> what answers them in ``torch.cuda``.
_OF_ACCELERATOR: dict[str, str] = {
    **{name: name for name in ("is_available", "device_count", "current_stream", "set_stream", "synchronize")},
    **{name: name for name in ("empty_cache", "memory_stats", "memory_allocated", "memory_reserved")},
    **{name: name for name in ("max_memory_allocated", "max_memory_reserved", "reset_peak_memory_stats")},
    "current_device_index": "current_device",
    "set_device_index": "set_device",
    "get_memory_info": "mem_get_info",
}


def accelerator_answers() -> dict[str, Any]:
    """The functions of ``torch.accelerator`` that this torch has, answered by what ``torch.cuda`` says then."""
    module = getattr(torch, "accelerator", None)

    def of_cuda(name: str) -> Callable[..., Any]:
        def answer(*args: Any, **kwargs: Any) -> Any:
            return getattr(torch.cuda, name)(*args, **kwargs)

        return answer

    answers = {name: of_cuda(source) for name, source in _OF_ACCELERATOR.items()}
    answers["current_accelerator"] = lambda *_args, **_kwargs: torch.device("cuda")
    return {name: answer for name, answer in answers.items() if hasattr(module, name)}


def _answering(value: Any) -> Callable[..., Any]:
    return lambda *args, **kwargs: value


def while_active(state: Activity, simulated: Any, original: Any) -> Any:
    """``simulated`` while the trace runs and ``original`` ever after, for code that kept a reference to it."""
    if isinstance(original, type):

        def new(cls: type, *args: Any, **kwargs: Any) -> Any:
            if state.active:
                return simulated(*args, **kwargs)
            # A module that was imported meanwhile may have derived a class of its own.
            return original(*args, **kwargs) if cls is either else original.__new__(cls, *args, **kwargs)

        class Either(type(original)):  # type: ignore[misc]
            def __instancecheck__(cls, value: object) -> bool:
                return isinstance(value, (simulated, original))

        either = Either(original.__name__, (original,), {"__new__": new})
        return either

    @functools.wraps(original)
    def answer(*args: Any, **kwargs: Any) -> Any:
        return simulated(*args, **kwargs) if state.active else original(*args, **kwargs)

    return answer
