"""Activation checkpointing: blocks keep their inputs only and run their forward again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from vram_guard.techniques._patched_forward import PatchedForward, patch_forwards
from vram_guard.tensors import version_of


def checkpoint_modules(model: nn.Module, names: Iterable[str]) -> Callable[[], None]:
    """Checkpoint the named modules from now on: ``torch.utils.checkpoint`` around their forwards.

    Only while they train with gradients on. Results and gradients are those of the model as written: the random state
    and autocast are the forward's own when it runs again, and buffers that it writes (running statistics, the vectors
    of spectral normalisation) are written once. An empty cache of keys and values is kept from the blocks, as
    transformers' own checkpointing does, or a second forward would append to it twice; a block whose cache is filled
    already runs as written. What else a forward leaves behind in Python (a list it appends to) it leaves twice, as with
    torch's own.

    Args:
        model: any module; it is changed in place.
        names: modules as in ``model.named_modules()``.

    Returns:
        A function that puts the model's own forwards back.

    Raises:
        InvalidInputError: no module has such a name; nothing was changed.
    """
    return patch_forwards(model, names, Checkpointed)


class Checkpointed(PatchedForward):
    """A module's forward under ``torch.utils.checkpoint``."""

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The module's results; its intermediate tensors are computed again when gradients are asked for."""
        module, forward = self.module, self.as_written
        if not (module.training and torch.is_grad_enabled()):
            return forward(*args, **kwargs)
        caches = [value for value in (*args, *kwargs.values()) if _is_cache(value)]
        if caches and not getattr(module, "_can_checkpoint_with_cache", False):
            if _filled(caches, module):
                return forward(*args, **kwargs)
            args = tuple(None if _is_cache(value) else value for value in args)
            kwargs = {name: None if _is_cache(value) else value for name, value in kwargs.items()}
        settings: dict[str, Any] = {"use_reentrant": False}
        if any(True for _ in module.buffers()):
            settings["context_fn"] = partial(_contexts, module)
        # Keyword arguments go as positional ones: only those are saved as autograd saves tensors, which notices when
        # one is changed in place before the forward runs again.
        run = partial(_with_names, forward, len(args), tuple(kwargs))
        return checkpoint(run, *args, *kwargs.values(), **settings)


def _with_names(forward: Callable[..., Any], positional: int, names: tuple[str, ...], *values: Any) -> Any:
    return forward(*values[:positional], **dict(zip(names, values[positional:], strict=True)))


# --- caches of keys and values ---------------------------------------------------------------------------------------


def _is_cache(value: Any) -> bool:
    """True if this is a cache that attention appends to (transformers' ``Cache`` and its kin)."""
    return callable(getattr(value, "get_seq_length", None)) and callable(getattr(value, "update", None))


def _filled(caches: list[Any], module: nn.Module) -> bool:
    """True if a cache may hold something for these layers that their results depend on."""
    layers = {m.layer_idx for m in module.modules() if isinstance(getattr(m, "layer_idx", None), int)}
    return not layers or any(cache.get_seq_length(layer) for cache in caches for layer in layers)


# --- buffers that a forward writes -----------------------------------------------------------------------------------


_NORMALISATION = (
    *(nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm),
    *(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d),
)


def _contexts(module: nn.Module) -> tuple[Any, Any]:
    kept = _Kept(module)
    return kept, _SecondRun(kept)


class _Kept:
    """Around a forward: what the buffers held that it wrote to."""

    def __init__(self, module: nn.Module) -> None:
        self._buffers = [
            (owner, name, buffer)
            for owner in module.modules()
            for name, buffer in owner.named_buffers(recurse=False)
            if not buffer.is_inference()
        ]
        self._copies: list[torch.Tensor | None] = []
        self._versions: list[int] = []
        self.written: list[tuple[nn.Module, str, torch.Tensor | None]] = []
        """Module, name and value before the forward; None where the value makes no difference."""

    def __enter__(self) -> None:
        self._versions = [version_of(buffer) for _, _, buffer in self._buffers]
        # Normalisation in training works from the batch's own statistics, whatever the running ones are.
        with torch.no_grad():
            self._copies = [
                None if isinstance(owner, _NORMALISATION) else buffer.detach().clone()
                for owner, _, buffer in self._buffers
            ]

    def __exit__(self, *error: object) -> None:
        found = zip(self._buffers, self._versions, self._copies, strict=True)
        self.written = [
            (owner, name, copy)
            for (owner, name, buffer), version, copy in found
            if getattr(owner, name) is not buffer or version_of(buffer) != version or _keeps_statistics(owner)
        ]
        self._buffers, self._copies = [], []


def _keeps_statistics(owner: nn.Module) -> bool:
    """Kernels of batch normalisation write running statistics without raising their version counters."""
    return owner.training and getattr(owner, "running_mean", None) is not None


class _SecondRun:
    """Around the forward in the backward pass: it starts from the same buffers and writes to copies of them.

    Entered as often as the backward pass is run (``retain_graph``).
    """

    def __init__(self, kept: _Kept) -> None:
        self._kept = kept
        self._own: list[torch.Tensor | None] = []

    def __enter__(self) -> None:
        written = self._kept.written
        self._own = [getattr(owner, name) for owner, name, _ in written]
        with torch.no_grad():
            for (owner, name, before), own in zip(written, self._own, strict=True):
                start = own if before is None else before
                setattr(owner, name, None if start is None else start.detach().clone())

    def __exit__(self, *error: object) -> None:
        for (owner, name, _), own in zip(self._kept.written, self._own, strict=True):
            setattr(owner, name, own)
        self._own = []
