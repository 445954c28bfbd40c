"""The CPU in place of a GPU, in a copy of the process that tries a recipe: what would move is copied all the same."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Iterator
from typing import Any

from vram_guard.patching import replaced
from vram_guard.techniques.recipe import Recipe


@contextlib.contextmanager
def cpu_as_gpu(recipe: Recipe) -> Iterator[None]:
    """Inside the block the recipe's techniques treat tensors of the CPU as they treat those of a GPU.

    Saved activations are copied and come back as other copies, and torchao's optimizer, which asks for streams and
    pinned memory, keeps copies of weights and gradients and steps on them.
    """
    with contextlib.ExitStack() as stack:
        if recipe.offload_activations:
            from vram_guard.techniques import _activation_offload

            stack.enter_context(replaced(_activation_offload, {"_HOST": "no device's"}))
        if recipe.optimizer_on_host:
            _let_torchao_run(stack)
        yield


@contextlib.contextmanager
def without_gpu() -> Iterator[None]:
    """Inside the block torch finds no GPU, nor a pretended one, whatever the machine has.

    CUDA does not work in a copy of a process that has used it, and steps of optimizers ask it whether a graph is
    captured.

    Example:
        >>> with without_gpu():
        ...     __import__("torch").cuda.is_available()
        False
    """
    import torch

    with contextlib.ExitStack() as stack:
        stack.enter_context(replaced(torch.cuda, {"is_available": lambda: False}))
        if hasattr(torch, "accelerator"):  # since torch 2.6
            stack.enter_context(replaced(torch.accelerator, {"current_accelerator": lambda *_args, **_kwargs: None}))
        yield


def _let_torchao_run(stack: contextlib.ExitStack) -> None:
    import torch

    from vram_guard.techniques._optimizer_offload import host_optimizer

    torchaos: Any = sys.modules[host_optimizer().__base__.__module__]
    stack.enter_context(replaced(torchaos, {"get_available_devices": lambda: ["cpu", "cuda"]}))
    streams = {"Stream": _Stream, "current_stream": _Stream, "stream": lambda _stream: contextlib.nullcontext()}
    stack.enter_context(replaced(torch.cuda, streams))
    empty_like = torch.empty_like

    def pageable(*args: Any, pin_memory: bool = False, **kwargs: Any) -> torch.Tensor:  # noqa: ARG001 - there is none
        return empty_like(*args, **kwargs)

    stack.enter_context(replaced(torch, {"empty_like": pageable}))


class _Stream:
    """A stream whose work is done as soon as it is asked for."""

    def wait_stream(self, _other: _Stream) -> None:
        """Everything is done."""

    def synchronize(self) -> None:
        """Everything is done."""

    def record_event(self) -> _Stream:
        """One that has happened."""
        return self
