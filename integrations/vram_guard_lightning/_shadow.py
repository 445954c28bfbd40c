"""A copy of a Trainer on which Lightning's own loops, hooks and connectors run in a trace: the Trainer notices nothing.

The copy has loops, connectors, a state and a strategy of its own. The module, the datamodule and the callbacks are the
user's: what their hooks change is put back by :func:`kept`.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vram_guard.state.objects import objects_kept
from vram_guard_lightning import _namespaces
from vram_guard_lightning._trainer_proxy import silent_callback

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningModule, Trainer

# ruff: noqa: SLF001 - every private name of Lightning used here is listed in private_api.py

_CONNECTORS = ("_logger_connector", "_callback_connector", "_checkpoint_connector", "_data_connector")
_LOOPS = ("fit_loop", "validate_loop", "test_loop", "predict_loop")
_GPU = torch.device("cuda", 0)

#: Callbacks of Lightning's own that watch, report or save: what they do is no part of a step.
WATCHING = (
    "callbacks.Checkpoint",
    "callbacks.EarlyStopping",
    "callbacks.ProgressBar",
    "callbacks.Timer",
    "callbacks.LearningRateMonitor",
    "callbacks.LearningRateFinder",
    "callbacks.BatchSizeFinder",
    "callbacks.DeviceStatsMonitor",
    "callbacks.ModelSummary",
    "callbacks.throughput_monitor.ThroughputMonitor",
)


def shadow_of(trainer: Trainer, precision_plugin: Any) -> Any:
    """The copy; it validates, saves and loads, but writes nothing, and nobody waits for it.

    Args:
        trainer: whose strategy has the symbolic optimizers.
        precision_plugin: of the precision that is traced.
    """
    shadow: Any = copy.copy(trainer)
    shadow.state = copy.copy(trainer.state)
    memo: dict[int, Any] = {id(trainer): shadow}
    for loop in _within([getattr(trainer, name) for name in _LOOPS]):
        # Loaders and what was logged with batches are the user's own; everything else a loop counts is copied.
        memo |= {id(part): part for part in (loop._data_source, loop._combined_loader)}
        memo[id(loop._data_fetcher)] = None
        if vars(loop).get("_results") is not None:  # of an earlier run: nothing has been logged in this one
            memo[id(loop._results)] = type(loop._results)(training=False)
    for name in _LOOPS:
        setattr(shadow, name, copy.deepcopy(getattr(trainer, name), memo))
    for name in _CONNECTORS:
        connector = copy.copy(getattr(trainer, name))
        connector.trainer = shadow
        setattr(shadow, name, connector)
    shadow._logger_connector.reset_metrics()
    shadow._checkpoint_connector._loaded_checkpoint = dict(trainer._checkpoint_connector._loaded_checkpoint)
    shadow._accelerator_connector = copy.copy(trainer._accelerator_connector)
    shadow._accelerator_connector.strategy = _strategy_of(trainer, precision_plugin)
    namespace = _namespaces.of(trainer)
    shadow.profiler = _namespaces.part(namespace, "profilers.PassThroughProfiler")()
    shadow.loggers = [_namespaces.part(namespace, "loggers.logger.DummyLogger")()]
    followed = set(map(id, followed_callbacks(trainer)))
    shadow.callbacks = [
        one if id(one) in followed else silent_callback(trainer, one)
        for one in trainer.callbacks  # type: ignore[attr-defined]
    ]
    return shadow


def followed_callbacks(trainer: Trainer) -> list[Callback]:
    """Those that may change what is trained: neither the guard itself nor those that watch, report or save."""
    return [
        callback
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if not any(_namespaces.is_a(callback, path) for path in WATCHING)
        and type(callback).__module__.partition(".")[0] != "vram_guard_lightning"
    ]


def _within(loops: Iterable[Any]) -> Iterator[Any]:
    """Loops that have a data source, nested ones too."""
    for loop in loops:
        if hasattr(loop, "_data_source"):
            yield loop
        yield from _within(part for part in vars(loop).values() if hasattr(part, "restarting"))


def _strategy_of(trainer: Trainer, precision_plugin: Any) -> Any:
    """The strategy on the simulated GPU, which writes no checkpoint and waits for no other process."""
    own: Any = trainer.strategy
    answers = {
        "root_device": property(lambda _self: _GPU),
        "barrier": lambda _self, *_args, **_kwargs: None,
        "reduce": lambda _self, tensor, *_args, **_kwargs: tensor,
        "broadcast": lambda _self, value, *_args, **_kwargs: value,
        "save_checkpoint": lambda _self, *_args, **_kwargs: None,
    }
    strategy = copy.copy(own)
    strategy.__class__ = type(type(own).__name__, (type(own),), answers)
    strategy.precision_plugin = precision_plugin
    strategy.lr_scheduler_configs = []
    return strategy


def take_copies(trainer: Trainer, shadow: Any) -> None:
    """The weights that callbacks keep (averages, made in ``setup``) become symbolic, on the GPU or on the host.

    StochasticWeightAveraging's copy waits on the host, until the callback moves it itself; others are where they are.
    """
    module, device = trainer.lightning_module, trainer.strategy.root_device
    waiting = [one for one in shadow.callbacks if _namespaces.is_a(one, "callbacks.StochasticWeightAveraging")]
    on_host = {id(part) for part in modules_in(waiting, besides=module)}
    symbolic = next(module.parameters())
    made: dict[int, torch.Tensor] = {}

    def taken(tensor: torch.Tensor | None, part: nn.Module) -> torch.Tensor | None:
        # Numbers stay as they are: averages count their updates, and ask whether there has been one.
        if tensor is None or tensor.dim() == 0:
            return tensor
        if id(tensor) not in made:
            place = "cuda" if tensor.device == device and id(part) not in on_host else "cpu"
            twin = symbolic.new_empty(tensor.shape, dtype=tensor.dtype, device=place)
            made[id(tensor)] = nn.Parameter(twin, tensor.requires_grad) if isinstance(tensor, nn.Parameter) else twin
        return made[id(tensor)]

    for part in modules_in(shadow.callbacks, besides=module):
        for kind in ("_parameters", "_buffers"):
            vars(part)[kind] = {name: taken(tensor, part) for name, tensor in vars(part)[kind].items()}


def kept(trainer: Trainer, module: LightningModule) -> contextlib.AbstractContextManager[None]:
    """Callbacks and the datamodule are afterwards as they were; the trace puts the module back."""
    helpers: list[Any] = [*trainer.callbacks, trainer.datamodule]  # type: ignore[attr-defined]
    return objects_kept(helpers, besides=module)


def modules_in(holders: Iterable[Any], *, besides: nn.Module) -> list[nn.Module]:
    """The modules that these objects keep among their attributes, with all that is in them; not ``besides`` itself."""
    known = set(map(id, within(besides)))
    found: dict[int, nn.Module] = {}
    pending = [value for holder in holders for value in vars(holder).values()]
    seen: set[int] = set()
    while pending:
        value = pending.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        if isinstance(value, nn.Module):
            found |= {id(part): part for part in within(value) if id(part) not in known}
        elif isinstance(value, (list, tuple, set, dict)):
            pending += value.values() if isinstance(value, dict) else value
    return list(found.values())


def within(module: nn.Module) -> Iterator[nn.Module]:
    """A module and all that is in it, some several times: ``modules()`` takes ten times as long."""
    pending = [module]
    while pending:
        part = pending.pop()
        yield part
        pending += [one for one in vars(part)["_modules"].values() if one is not None]
