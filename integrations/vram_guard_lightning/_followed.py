"""A Trainer in a copy of the process: its own loops train, validate, test and save there, on the simulated GPU.

The copy ends with them, so nothing is put back. Loaders are asked for and never iterated: batches are made of samples
that were read before, as many as are followed.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator
from importlib import import_module
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from vram_guard.guard.step_switches import overriding
from vram_guard.guard.unfollowed import left_out_if_it_fails
from vram_guard.language import Message
from vram_guard.patching import replace_attributes
from vram_guard.state.modules import within
from vram_guard_lightning import _namespaces
from vram_guard_lightning._precision import plugin_of_trace
from vram_guard_lightning._trainer_proxy import silent_callback

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from vram_guard.job import LoopRun

# ruff: noqa: SLF001 - every private name of Lightning used here is listed in private_api.py

_GPU = torch.device("cuda", 0)

#: Callbacks of Lightning's own that watch, report or save: what they do is no part of a step.
WATCHING = (
    "callbacks.Checkpoint",
    "callbacks.EarlyStopping",
    "callbacks.GradientAccumulationScheduler",
    "callbacks.ProgressBar",
    "callbacks.Timer",
    "callbacks.LearningRateMonitor",
    "callbacks.LearningRateFinder",
    "callbacks.BatchSizeFinder",
    "callbacks.DeviceStatsMonitor",
    "callbacks.ModelSummary",
    "callbacks.throughput_monitor.ThroughputMonitor",
)

#: What a strategy does with other processes and with files; here there is this process alone, and nothing is written.
_ALONE: dict[str, Any] = {
    "root_device": property(lambda _self: _GPU),
    "barrier": lambda _self, *_args, **_kwargs: None,
    "reduce": lambda _self, tensor, *_args, **_kwargs: tensor,
    "broadcast": lambda _self, value, *_args, **_kwargs: value,
    "reduce_boolean_decision": lambda _self, decision, *_args, **_kwargs: decision,
    "save_checkpoint": lambda _self, *_args, **_kwargs: None,
}

#: How the names begin of hooks around steps, in which nothing of a step itself is computed.
_AROUND_STEPS = ("on_fit_", "on_train_", "on_before_zero_grad", "on_before_optimizer", "on_after_backward")

_BEFORE_STEP = "on_train_batch_start"

#: Batches of a loader in the order of Lightning's loops: the batch, its number, and that of its loader.
Batches = Callable[[], Iterable[tuple[Any, int, int]]]


class FollowedTrainer:
    """A Trainer whose loops run in a trace.

    Args:
        run: of the trace.
        trainer: whose strategy is not set up yet. It stays changed: the process ends.
        module: that it trains or evaluates, on the simulated GPU.
        data_ranks: processes that see different data.

    Attributes:
        failed: hooks that have raised, and are called no more.
        batches: loop -> the batches of one pass over its loaders, where they are not the loaders' own.
    """

    def __init__(self, run: LoopRun, trainer: Trainer, module: LightningModule, data_ranks: int) -> None:
        self.run = run
        self.trainer: Any = trainer
        self.module = module
        self.failed: set[str] = set()
        self.batches: dict[Any, Batches] = {}
        self._begun = False
        """The hooks before the step that comes next have run, to decide whether it is followed."""
        self._outputs: list[str] = []
        """Names of what a training step returns."""
        self._calls: Any = import_module(f"{_namespaces.of(trainer).__name__}.trainer.call")
        device = trainer.strategy.root_device
        self._place_strategy(data_ranks)
        self._silence()
        self._forget_earlier_runs()
        self._deliver()
        _take_copies(trainer, module, device)
        for name in ("_call_callback_hooks", "_call_lightning_module_hook"):
            replace_attributes(self._calls, {name: self._guarded(getattr(self._calls, name))})

    def _place_strategy(self, data_ranks: int) -> None:
        """The strategy is on the simulated GPU, with the model and the optimizer of the trace."""
        strategy, run = self.trainer.strategy, self.run
        answers = dict(_ALONE)
        if hasattr(type(strategy), "distributed_sampler_kwargs"):  # which asks the groups of the real processes
            shares = {"num_replicas": data_ranks, "rank": 0}
            answers["distributed_sampler_kwargs"] = property(lambda _self: shares)
        strategy.__class__ = type(type(strategy).__name__, (type(strategy),), answers)
        strategy.precision_plugin = plugin_of_trace(self.trainer, run.autocast())
        strategy.model = run.model
        strategy.lr_scheduler_configs = []
        if run.optimizer is not None:
            strategy.optimizers = [run.optimizer]

    def _silence(self) -> None:
        """Nothing is logged, shown or profiled; what is logged with ``self.log`` is kept as it is in a training."""
        trainer, namespace = self.trainer, _namespaces.of(self.trainer)
        trainer.profiler = _namespaces.part(namespace, "profilers.PassThroughProfiler")()
        trainer.loggers = [_namespaces.part(namespace, "loggers.logger.DummyLogger")()]
        trainer._logger_connector.log_metrics = lambda *_args, **_kwargs: None
        followed = set(map(id, followed_callbacks(trainer)))
        trainer.callbacks = [one if id(one) in followed else silent_callback(trainer, one) for one in trainer.callbacks]
        for part in self.module.modules():
            for name in ("log", "log_dict"):
                vars(part).pop(name, None)

    def _forget_earlier_runs(self) -> None:
        """Loops begin without the loaders of the Trainer's last run, and without what was logged in it."""
        trainer = self.trainer
        training = trainer.fit_loop.epoch_loop
        evaluations = [training.val_loop, trainer.validate_loop, trainer.test_loop]
        for loop in (trainer.fit_loop, *evaluations, trainer.predict_loop):
            loop._combined_loader = None
        for loop in (training, *evaluations):
            loop._results = type(loop._results)(training=loop is training)

    def show_as(self, seen: Any) -> None:
        """What user code finds as its Trainer."""
        for part in self.module.modules():
            if "_trainer" in vars(part):
                vars(part)["_trainer"] = seen
        if self.trainer.datamodule is not None:
            self.trainer.datamodule.trainer = seen

    # --- hooks ------------------------------------------------------------------------------------------------

    def call(self, hook: str, *args: Any) -> Any:
        """A hook of the callbacks and of the module, as Lightning calls it; what the module's returns."""
        self._calls._call_callback_hooks(self.trainer, hook, *args)
        return self._calls._call_lightning_module_hook(self.trainer, hook, *args)

    def begins_step(self, batch: Any) -> bool:
        """The hooks before a step of which they decide whether it is followed; False where they pass over it."""
        if _BEFORE_STEP in self.failed:
            return True
        self._begun, trains = False, None
        with self.followed(Message("the hook {hook}", hook=_BEFORE_STEP)):
            trains = self.call(_BEFORE_STEP, batch, 0) != -1
        self._begun = True
        if trains is None:
            self.failed.add(_BEFORE_STEP)
        return trains is not False

    def ends_step(self, batch: Any) -> None:
        """The hooks after a step that is not followed."""
        self.call("on_train_batch_end", {name: torch.zeros(()) for name in self._outputs}, batch, 0)

    def has(self, hook: str) -> bool:
        """True if a callback that is followed, or the module, does something there."""
        return any(self.overrides(one, (hook,)) for one in (*self.trainer.callbacks, self.module))

    def overrides(self, owner: Any, hooks: tuple[str, ...]) -> bool:
        """True if a callback or the module does something in one of these hooks, and has not failed in it."""
        named = [hook for hook in hooks if hook not in self.failed]
        if owner is self.module:
            return not all(_namespaces.is_lightnings(owner, hook) for hook in named)
        return bool(overriding([owner], tuple(named), _namespaces.of(self.trainer).Callback))

    def _guarded(self, call: Callable[..., Any]) -> Callable[..., Any]:
        """Hooks around steps may fail where nothing is computed: the steps are predicted all the same."""

        def guarded(trainer: Any, hook: str, *args: Any, **kwargs: Any) -> Any:
            if hook == _BEFORE_STEP:  # which may skip the batch
                return None if self._begun else call(trainer, hook, *args, **kwargs)
            if not hook.startswith(_AROUND_STEPS):
                return call(trainer, hook, *args, **kwargs)
            if hook == "on_train_batch_end" and isinstance(args[0], dict):
                self._outputs = list(args[0])
            if hook not in self.failed:
                with self.followed(Message("the hook {hook}", hook=hook)):
                    self.failed.add(hook)
                    result = call(trainer, hook, *args, **kwargs)
                    self.failed.discard(hook)
                    return result
            return None

        return guarded

    @contextlib.contextmanager
    def followed(self, what: Message) -> Iterator[None]:
        """Code that may fail: the step is predicted all the same, and a note says why."""
        modes = [(part, part.training) for part in self.module.modules()]
        stage = self.trainer.state.stage
        with left_out_if_it_fails(self.run, what):
            try:
                yield
            except Exception:
                for part, training in modes:
                    part.training = training
                self.trainer.state.stage = stage
                raise

    # --- batches ----------------------------------------------------------------------------------------------

    def _deliver(self) -> None:
        """Loops get :attr:`batches` in place of those of their loaders."""
        namespace = _namespaces.of(self.trainer).__name__
        combined: Any = import_module(f"{namespace}.utilities.combined_loader")
        fetchers: Any = import_module(f"{namespace}.loops.fetchers")
        kind, plain = combined.CombinedLoader, fetchers._DataFetcher
        own_iter, own_next = kind.__iter__, kind.__next__

        def iterated(loader: Any) -> Any:
            made = next((one for loop, one in self.batches.items() if loop._combined_loader is loader), None)
            if made is None:
                return own_iter(loader)
            counts = combined._SUPPORTED_MODES[loader._mode]["iterator"](loader.flattened, loader.limits)
            loader._iterator = _Delivered(counts, iter(made()))
            return loader

        def following(loader: Any) -> Any:
            return next(loader._iterator) if isinstance(loader._iterator, _Delivered) else own_next(loader)

        replace_attributes(kind, {"__iter__": iterated, "__next__": following})
        # Nothing is fetched ahead: which batch comes next is known when the one before it has been followed.
        replace_attributes(
            fetchers._PrefetchDataFetcher, {name: vars(plain)[name] for name in ("__iter__", "__next__")}
        )


class _Delivered:
    """Batches, and how many there would be of the loaders."""

    def __init__(self, counts: Any, batches: Iterator[tuple[Any, int, int]]) -> None:
        self._counts = counts
        self._batches = batches

    def __next__(self) -> tuple[Any, int, int]:
        return next(self._batches)

    def __len__(self) -> int:
        return len(self._counts)

    def reset(self) -> None:
        """Nothing has been started that would have to end."""


def followed_callbacks(trainer: Trainer) -> list[Any]:
    """Those that may change what is trained: neither the guard itself nor those that watch, report or save."""
    return [
        callback
        for callback in trainer.callbacks  # type: ignore[attr-defined]
        if not any(_namespaces.is_a(callback, path) for path in WATCHING)
        and type(callback).__module__.partition(".")[0] != "vram_guard_lightning"
    ]


# --- weights that callbacks keep ----------------------------------------------------------------------------------


def _take_copies(trainer: Any, module: nn.Module, device: torch.device) -> None:
    """The weights that callbacks keep (averages, made in ``setup``) become symbolic, on the GPU or on the host.

    StochasticWeightAveraging's copy waits on the host, until the callback moves it itself; others are where they are.

    Args:
        trainer: with the callbacks that are followed.
        module: that it trains.
        device: on which it will really train.
    """
    waiting = [one for one in trainer.callbacks if _namespaces.is_a(one, "callbacks.StochasticWeightAveraging")]
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

    for part in modules_in(trainer.callbacks, besides=module):
        for kind in ("_parameters", "_buffers"):
            vars(part)[kind] = {name: taken(tensor, part) for name, tensor in vars(part)[kind].items()}


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
