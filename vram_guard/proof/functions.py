"""What operators tell nothing of: backward passes of functions' own, what packs saved tensors, modes around them."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.autograd.graph import saved_tensors_hooks

from vram_guard.language import _
from vram_guard.modes import dispatch_modes, name_of_packing, packing_hook
from vram_guard.patching import replace_attributes

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


class OwnBackward:
    """Notes what the user's code puts between operators and their backward pass.

    Example:
        >>> from torch.utils.checkpoint import CheckpointFunction
        >>> noted = OwnBackward()
        >>> with noted.heard():
        ...     _result = CheckpointFunction.apply(torch.exp, False, torch.ones(1, requires_grad=True))
        >>> list(noted.reasons())
        []
    """

    def __init__(self) -> None:
        self._functions: dict[type, None] = {}
        self._packing: dict[str, None] = {}
        self._modes: list[str] = []

    def install(self) -> Callable[[], None]:
        """Note it from now on, until the result is called; what is on already is noted now."""
        apply = torch.autograd.Function.apply.__func__  # type: ignore[attr-defined]
        enter = saved_tensors_hooks.__enter__

        def noted_apply(cls: type, *args: Any, **kwargs: Any) -> Any:
            self._functions[cls] = None
            return apply(cls, *args, **kwargs)

        def noted_enter(hooks: saved_tensors_hooks) -> None:
            self._packing[name_of_packing(hooks.pack_hook)] = None
            enter(hooks)

        self._packing[packing_hook()] = None
        self._modes = dispatch_modes()
        undo_apply = replace_attributes(torch.autograd.Function, {"apply": classmethod(noted_apply)})
        undo_enter = replace_attributes(saved_tensors_hooks, {"__enter__": noted_enter})

        def undo() -> None:
            undo_enter()
            undo_apply()

        return undo

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Inside the block, it is noted."""
        undo = self.install()
        try:
            yield
        finally:
            undo()

    def reasons(self) -> Iterator[str]:
        """Sentences about what may join samples in a backward pass, or change there what others have saved."""
        for one in self._functions:
            if (one.__module__, one.__qualname__) not in _APART:
                yield _(
                    "nothing is known of the backward pass of {function}: whether it leaves samples apart, and what it "
                    "has saved as it was",
                    function=f"{one.__module__}.{one.__qualname__}",
                )
        for name in self._modes:
            yield _("{mode} is given every operator, and may do otherwise with a part of a batch", mode=name)
        for name in filter(None, self._packing):
            yield _(
                "{function} packs what is saved for the backward pass, and may do otherwise with a part of it",
                function=name,
            )
