"""Functions with a backward pass of their own, of which the operators of a forward pass tell nothing."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Any

import torch

from vram_guard.language import _

#: Module and name of those that leave samples apart, and what they saved as it was: each gives back the gradients that
#: it is given, those that autograd computes of what it called, or a function of each element or row.
_APART = frozenset(
    (
        ("torch.utils.checkpoint", "CheckpointFunction"),
        ("torch.utils.checkpoint", "_NoopSaveInputs"),
        ("torch.nn.modules._functions", "CrossMapLRN2d"),
        ("torch.nn.parallel.distributed", "_DDPSink"),
        ("torch.distributed.fsdp._fully_shard._fsdp_param_group", "RegisterPostBackwardFunction"),
        ("torch.distributed.fsdp._fully_shard._fsdp_state", "RegisterPreBackwardFunction"),
        ("torch.distributed.tensor._redistribute", "Redistribute"),
        ("torch.distributed.tensor._redistribute", "NestedRedistribute"),
        ("torch.distributed.tensor._api", "_ToTorchTensor"),
        ("torch.distributed.tensor._api", "_FromTorchTensor"),
        ("deepspeed.runtime.zero.parameter_offload", "PreBackwardFunctionForModule"),
        ("deepspeed.runtime.zero.parameter_offload", "PostBackwardFunctionModule"),
        ("bitsandbytes.autograd._functions", "MatMul4Bit"),
        ("transformers.models.bloom.modeling_bloom", "GeLUFunction"),
        ("transformers.models.recurrent_gemma.modeling_recurrent_gemma", "SqrtBoundDerivative"),
        ("transformers.models.sew_d.modeling_sew_d", "XSoftmax"),
        ("transformers.models.sew_d.modeling_sew_d", "XDropout"),
    )
)


def unknown_functions(functions: Iterable[type]) -> Iterator[str]:
    """Sentences about functions that may join samples in a backward pass, or change there what others have saved.

    Args:
        functions: subclasses of ``torch.autograd.Function`` that were applied.

    Example:
        >>> from torch.utils.checkpoint import CheckpointFunction
        >>> list(unknown_functions([CheckpointFunction]))
        []
    """
    for one in dict.fromkeys(functions):
        if (one.__module__, one.__qualname__) not in _APART:
            yield _(
                "nothing is known of the backward pass of {function}: whether it leaves samples apart, and what it has "
                "saved as it was",
                function=f"{one.__module__}.{one.__qualname__}",
            )


def told(functions: list[type]) -> Any:
    """In place of ``torch.autograd.Function.apply``: the same, and the list is told of each function."""
    original = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]

    def apply(cls: type, *args: Any, **kwargs: Any) -> Any:
        functions.append(cls)
        return original(cls, *args, **kwargs)

    return classmethod(apply)
