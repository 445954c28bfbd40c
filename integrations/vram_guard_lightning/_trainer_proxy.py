"""While a trace runs the user's LightningModule, its Trainer must notice nothing.

``training_step`` logs, asks the Trainer for the number of steps, writes pictures to the logger, reads its
optimizer. During a trace all that is answered here, and nothing of it reaches the real Trainer.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import torch
from torch.utils import _pytree as pytree

from vram_guard.proof.effects import StepEffects
from vram_guard.state.objects import objects_kept
from vram_guard_lightning import _namespaces

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from vram_guard.guard.places import StepDecisions


#: What a Trainer answers alike in every step, or what steps use to log: anything else moves on with the training.
_STANDS = frozenset(
    (
        *("world_size", "num_devices", "num_nodes", "global_rank", "local_rank", "node_rank", "is_global_zero"),
        *("device_ids", "max_epochs", "max_steps", "min_epochs", "min_steps", "max_time", "precision"),
        *("accelerator", "optimizers", "loggers", "logger"),
        *("log_dir", "default_root_dir", "accumulate_grad_batches", "gradient_clip_val", "gradient_clip_algorithm"),
        *("datamodule", "lightning_module", "model", "training", "validating", "testing", "predicting", "evaluating"),
        *("sanity_checking", "log_every_n_steps", "num_training_batches", "estimated_stepping_batches", "barebones"),
        *("limit_train_batches", "limit_val_batches", "check_val_every_n_epoch", "val_check_interval", "state"),
        *("distributed_sampler_kwargs", "checkpoint_callback", "checkpoint_callbacks", "ckpt_path", "fast_dev_run"),
        *("train_dataloader", "val_dataloaders", "profiler", "enable_validation", "print", "receiver", "_results"),
    )
)


class TrainerView:
    """A Trainer, or a callback, as user code sees it during a trace: some answers replaced, it stays as it is."""

    _asked: StepDecisions | None = None
    """Told of what steps do with the place in the training; None: nobody wants to know."""
    _effects: StepEffects | None = None
    """Told of what steps read; None: nobody wants to know."""

    def __init__(self, original: Any, **answers: Any) -> None:
        vars(self).update(_original=original, _answers=answers)

    def __getattr__(self, name: str) -> Any:
        answers = vars(self)["_answers"]
        value = answers[name] if name in answers else getattr(vars(self)["_original"], name)
        if self._effects is not None and name not in _STANDS and not name.startswith("__"):
            self._effects.read(f"trainer.{name}")
        if self._asked is not None and name in ("current_epoch", "global_step"):
            return self._asked.answer(name, value)
        return value

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the original, so that ``isinstance`` holds."""
        kind: type = vars(self)["_original"].__class__  # it may be a view too
        return kind

    def replace_loggers(self, log: _Log) -> None:
        """Methods of loggers that write are heard by ``log`` from now on."""
        loggers = [_Logger(one, log, "logger") for one in vars(self)["_original"].loggers]
        vars(self)["_answers"].update(loggers=loggers, logger=loggers[0] if loggers else None)


def silent_callback(trainer: Any, callback: Any) -> Any:
    """A callback as others find it: of its class, with its attributes; Lightning's calls of it do nothing."""
    base = _namespaces.of(trainer).Callback
    hooks = [name for name in dir(base) if name.startswith("on_") or name in ("setup", "teardown", "load_state_dict")]
    return TrainerView(callback, **dict.fromkeys(hooks, _silent))


@contextlib.contextmanager
def symbolic_run(
    trainer: Trainer, module: LightningModule, view: TrainerView, effects: StepEffects | None = None
) -> Iterator[None]:
    """Inside the block, ``module.trainer`` is ``view`` and logging goes to ``effects``; then everything is as before.

    The trace itself gives back the module's own attributes; here it is what the Trainer holds.
    """
    strategy: Any = trainer.strategy
    optimizers, schedulers, wrapped = strategy.optimizers, strategy.lr_scheduler_configs, vars(strategy).get("_model")
    kept = [(part, dict(vars(part))) for part in module.modules()]
    effects = StepEffects() if effects is None else effects
    effects.companions = (*trainer.callbacks, trainer.datamodule)  # type: ignore[attr-defined]
    log = _Log(effects)
    vars(view)["_effects"] = effects
    view.replace_loggers(log)
    try:
        for part in module.modules():
            if "_trainer" in vars(part):
                vars(part).update(_trainer=view, log=log.value, log_dict=log.values, print=_silent)
        vars(module).update(all_gather=_gathered(trainer.world_size), _current_fx_name="training_step")
        vars(module).update(optimizers=_unheard(effects, module.optimizers))
        with contextlib.ExitStack() as stack:
            stack.enter_context(objects_kept(effects.companions, besides=module))  # steps may call their methods
            if getattr(module, "_compiler_ctx", None) is not None and hasattr(torch.compiler, "set_stance"):
                stack.enter_context(torch.compiler.set_stance("force_eager"))
            yield
    finally:
        for part, attributes in kept:
            vars(part).clear()
            vars(part).update(attributes)
        strategy.optimizers = optimizers
        strategy.lr_scheduler_configs = schedulers
        strategy.model = wrapped


def _unheard(effects: StepEffects, method: Callable[..., Any]) -> Callable[..., Any]:
    """A method that reads much of a Trainer to answer what always is the same."""

    @functools.wraps(method)
    def call(*args: Any, **kwargs: Any) -> Any:
        with effects.unheard():
            return method(*args, **kwargs)

    return call


def _silent(*_args: Any, **_kwargs: Any) -> None:
    """Stands in for ``self.print``."""


class _Log:
    """Stands in for ``self.log``, ``self.log_dict`` and the loggers' own methods."""

    def __init__(self, effects: StepEffects) -> None:
        self._effects = effects

    def value(self, name: str, value: Any, *_args: Any, reduce_fx: Any = "mean", **_kwargs: Any) -> None:
        """One value; of those that are reduced in a way of the user's own, it is not told what they are."""
        named = reduce_fx if isinstance(reduce_fx, str) else getattr(reduce_fx, "__name__", "")
        known = named.lower() in ("mean", "sum", "min", "max", "amin", "amax")
        self._effects.log(name, value if known else None)

    def values(self, values: Any, *args: Any, **kwargs: Any) -> None:
        """Several."""
        for name, value in values.items():
            self.value(name, value, *args, **kwargs)

    def call(self, name: str, *_args: Any, **_kwargs: Any) -> None:
        """A logger's method."""
        self._effects.call(name)


class _Logger:
    """A logger, or its ``experiment``, of which methods that write are heard and do nothing."""

    def __init__(self, original: Any, log: _Log, name: str) -> None:
        vars(self).update(_original=original, _log=log, _name=name)

    def __getattr__(self, name: str) -> Any:
        of, log = vars(self)["_name"], vars(self)["_log"]
        if name == "experiment":
            return _Logger(None, log, f"{of}.experiment")
        if vars(self)["_original"] is None or name.startswith("log_"):
            return functools.partial(log.call, f"{of}.{name}")
        return getattr(vars(self)["_original"], name)

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the original, so that ``isinstance`` holds."""
        original = vars(self)["_original"]
        return _Logger if original is None else type(original)


def _gathered(ranks: int) -> Any:
    """Stands in for ``self.all_gather``: every rank's tensor, as large as this one's."""

    def gathered(leaf: torch.Tensor) -> torch.Tensor:
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            torch.distributed.barrier()  # the trace writes down that the ranks wait for each other here
        return torch.stack([leaf] * ranks)

    def all_gather(data: Any, *_args: Any, **_kwargs: Any) -> Any:
        return data if ranks == 1 else pytree.tree_map_only(torch.Tensor, gathered, data)

    return all_gather
