"""Paged optimizer states of bitsandbytes: managed memory, which the caching allocator does not know.

``functional.get_paged`` asks the driver for it (``cudaMallocManaged``). Its pages come to the GPU when a kernel reads
them, and leave it where PyTorch needs the room: so they are counted as memory of the host.
"""

from __future__ import annotations

import contextlib
import sys
from typing import Any

import torch

from vram_guard.language import Message
from vram_guard.patching import replaced


class ManagedMemory:
    """Takes over what needs a driver; a bitsandbytes that is imported during the trace is treated so from then on.

    Args:
        state: of the trace.
        stack: gives bitsandbytes back.
    """

    def __init__(self, state: Any, stack: contextlib.ExitStack) -> None:
        self._state = state
        self._stack = stack
        self._done = False

    def look(self) -> None:
        """Take over, if bitsandbytes is there."""
        functional = sys.modules.get("bitsandbytes.functional")
        if self._done or functional is None or not hasattr(functional, "get_paged"):
            return
        self._done = True
        answers = {"get_paged": self._get_paged, "prefetch_tensor": _nothing, "elementwise_func": _nothing}
        self._stack.enter_context(
            replaced(functional, {name: self._while_active(name, functional, answers[name]) for name in answers})
        )

    def _while_active(self, name: str, functional: Any, simulated: Any) -> Any:
        original = getattr(functional, name)

        def answer(*args: Any, **kwargs: Any) -> Any:
            return simulated(*args, **kwargs) if self._state.active else original(*args, **kwargs)

        return answer

    def _get_paged(self, *shape: int, dtype: torch.dtype = torch.float32, **_device: object) -> torch.Tensor:
        self._state.shapes_only += 1
        try:
            made: Any = torch.empty(shape, dtype=dtype, device="meta")
        finally:
            self._state.shapes_only -= 1
        self._state.recorder.put(made, "cpu")
        self._state.recorder.note(
            Message(
                "paged optimizer states lie in managed memory, which PyTorch's allocator does not know: counted as "
                "host memory; they also take what is free on the GPU, and leave it where PyTorch needs the room"
            )
        )
        made.is_paged = True
        made.page_deviceid = 0
        return made  # type: ignore[no-any-return]


def _nothing(*_args: object, **_kwargs: object) -> None:
    return None
