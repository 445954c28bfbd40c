"""Activation checkpointing: blocks keep their inputs only and run their forward again in the backward pass."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from contextlib import AbstractContextManager, ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from vram_guard.state.containers import is_cache
from vram_guard.state.forwards import FirstForward, SecondForward
from vram_guard.techniques._recomputed import BlockCall, Recomputations
from vram_guard.techniques.patched_forward import PatchedForward, patch_forwards
from vram_guard.techniques.selective import AVAILABLE, keeping_contexts

if TYPE_CHECKING:
    from types import TracebackType


def checkpoint_modules(model: nn.Module, names: Iterable[str], keeps: Collection[str] = ()) -> Callable[[], None]:
    """Checkpoint the named modules from now on: ``torch.utils.checkpoint`` around their forwards.

    Only while they train with gradients on. Results and gradients are those of the model as written: the random state
    (torch's, Python's and NumPy's) and autocast are the forward's own when it runs again, buffers that it writes
    (running statistics, the vectors of spectral normalisation) are written once, and so are attributes of modules that
    it sets (a counter of calls). An empty cache of keys and values is kept from the blocks, as transformers' own
    checkpointing does, or a second forward would append to it twice; a block whose cache is filled already runs as
    written. Each recomputation is compared with the first forward, see :mod:`vram_guard.techniques._recomputed`.
    What else a forward leaves behind (a list it appends to; buffers, where it is compiled) it leaves twice, as with
    torch's own: plans leave such blocks out, see :mod:`vram_guard.techniques.purity`.

    Args:
        model: any module; it is changed in place.
        names: modules as in ``model.named_modules()``.
        keeps: operators, of :data:`vram_guard.techniques.kept.KEEPABLE`, whose results are kept in place of being
            computed again, by torch's own ``create_selective_checkpoint_contexts``; compiled blocks, and those of a
            torch without it, compute everything again.

    Returns:
        A function that puts the model's own forwards back.

    Raises:
        InvalidInputError: no module has such a name; nothing was changed.
        RecomputationError: later, by the optimizer's step: a block has not computed the same again.
    """
    kept, found = frozenset(keeps), Recomputations()
    named = {id(module): name for name, module in model.named_modules()}
    put_back = patch_forwards(model, names, lambda module: Checkpointed(module, named.get(id(module), ""), found, kept))
    stop_watching = found.watch()

    def undo() -> None:
        put_back()
        stop_watching()

    return undo


class Checkpointed(PatchedForward):
    """A module's forward under ``torch.utils.checkpoint``."""

    def __init__(
        self, module: nn.Module, name: str, found: Recomputations, keeps: frozenset[str] = frozenset()
    ) -> None:
        super().__init__(module)
        self.name = name
        self.found = found
        self.keeps = keeps

    def run(self, *args: Any, **kwargs: Any) -> Any:
        """The module's results; its intermediate tensors are computed again when gradients are asked for."""
        if not (self.module.training and torch.is_grad_enabled()):
            return self._forward()(*args, **kwargs)
        return self.recomputed(*args, **kwargs)

    def recomputed(self, *args: Any, **kwargs: Any) -> Any:
        """The module's results, of a forward that runs again in the backward pass."""
        module, forward = self.module, self._forward()
        caches = [value for value in (*args, *kwargs.values()) if is_cache(value)]
        if caches and not getattr(module, "_can_checkpoint_with_cache", False):
            if _filled(caches, module):
                return forward(*args, **kwargs)
            args = tuple(None if is_cache(value) else value for value in args)
            kwargs = {name: None if is_cache(value) else value for name, value in kwargs.items()}
        # Keyword arguments go as positional ones: only those are saved as autograd saves tensors, which notices when
        # one is changed in place before the forward runs again.
        run = partial(_with_names, forward, len(args), tuple(kwargs))
        if torch.compiler.is_compiling():  # both forwards come from one graph, which takes no contexts
            return checkpoint(run, *args, *kwargs.values(), use_reentrant=False)
        self.found.check(wait=False)
        call = BlockCall(self.name, module, self.found)
        run = partial(_to_its_end, call, run)
        with call.first() as determinism_check:
            contexts = partial(_contexts, module, self.keeps)
            check: Any = {"use_reentrant": False, "determinism_check": determinism_check, "context_fn": contexts}
            return checkpoint(run, *args, *kwargs.values(), **check)

    def _forward(self) -> Callable[..., Any]:
        """The forward that was there before, as Dynamo can follow it: it knows no construction of a bound method."""
        if self.before is None and torch.compiler.is_compiling():
            return partial(type(self.module).forward, self.module)
        return self.as_written


def _with_names(forward: Callable[..., Any], positional: int, names: tuple[str, ...], *values: Any) -> Any:
    return forward(*values[:positional], **dict(zip(names, values[positional:], strict=True)))


def _to_its_end(call: BlockCall, run: Callable[..., Any], *values: Any) -> Any:
    result = run(*values)
    call.ended()
    return result


# --- caches of keys and values ---------------------------------------------------------------------------------------


def _filled(caches: list[Any], module: nn.Module) -> bool:
    """True if a cache may hold something for these layers that their results depend on."""
    layers = {m.layer_idx for m in module.modules() if isinstance(getattr(m, "layer_idx", None), int)}
    return not layers or any(cache.get_seq_length(layer) for cache in caches for layer in layers)


# --- what a forward leaves -------------------------------------------------------------------------------------------


def _contexts(
    module: nn.Module, keeps: frozenset[str]
) -> tuple[AbstractContextManager[Any], AbstractContextManager[Any]]:
    first = FirstForward(module)
    second = SecondForward(first)
    if not keeps or not AVAILABLE:
        return first, second
    keeping, kept = keeping_contexts(keeps)
    return _Around(first, keeping), _Around(second, kept)


class _Around:
    """Two contexts, the second within the first; entered as often as they can be."""

    def __init__(self, outer: AbstractContextManager[Any], inner: AbstractContextManager[Any]) -> None:
        self._contexts = outer, inner
        self._entered = ExitStack()

    def __enter__(self) -> None:
        with ExitStack() as entered:
            for context in self._contexts:
                entered.enter_context(context)
            self._entered = entered.pop_all()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None
    ) -> None:
        self._entered.__exit__(kind, error, where)
