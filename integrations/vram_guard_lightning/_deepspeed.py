"""Lightning's DeepSpeedStrategy: its config as DeepSpeed gets it, and micro-batches in DeepSpeed's engine."""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from vram_guard.errors import UnsupportedStepError
from vram_guard.guard.refusals import Refusal
from vram_guard.language import _
from vram_guard.parallel import deepspeed
from vram_guard.patching import replaced
from vram_guard.techniques import Sharding
from vram_guard_lightning import _namespaces

if TYPE_CHECKING:
    from lightning.pytorch import Trainer

    from vram_guard.parallel.spec import Parallel
    from vram_guard.plan import Plan

# ruff: noqa: SLF001 - every private name of Lightning used here is listed in private_api.py

#: It inherits DDPStrategy, and has little of it.
STRATEGY = "strategies.DeepSpeedStrategy"


def used(trainer: Trainer) -> bool:
    """True if DeepSpeed's engine trains the model."""
    return _namespaces.is_a(trainer.strategy, STRATEGY)


def config_of(trainer: Trainer) -> dict[str, Any]:
    """DeepSpeed's config as the strategy will hand it over, with accumulation, clipping and precision filled in.

    Empty where another strategy trains the model.

    Raises:
        MissingLibraryError: DeepSpeed is not installed.
        UnsupportedTechniqueError: the installed release was not tested.
        MisconfigurationException: Lightning's own, for a config that it refuses.
    """
    if not used(trainer):
        return {}
    deepspeed.deepspeed_library()
    strategy: Any = trainer.strategy
    config: dict[str, Any] = copy.deepcopy(strategy.config)
    if not strategy._config_initialized:
        config.setdefault("train_micro_batch_size_per_gpu", 1)  # for logs; Lightning would make a loader to know it
        with replaced(strategy, {"config": config}):
            strategy._format_config()
    return config


def layout_of(trainer: Trainer, config: Mapping[str, Any]) -> Parallel:
    """The strategy's layout.

    Args:
        trainer: the Trainer.
        config: of :func:`config_of`.

    Raises:
        InvalidInputError: DeepSpeed cannot use the config.
        UnsupportedStepError: the training under this strategy cannot be followed.
        UnsupportedTechniqueError: the config asks for something that is not followed.
    """
    strategy: Any = trainer.strategy
    layout = deepspeed.layout_of(config, gpus=trainer.world_size, node=strategy.num_processes)
    if trainer.gradient_clip_val and str(getattr(trainer.gradient_clip_algorithm, "value", "norm")) == "value":
        raise UnsupportedStepError(
            _("DeepSpeed clips gradients by their norm alone: gradient_clip_algorithm='value' is refused by Lightning")
        )
    if not trainer.lightning_module.automatic_optimization:
        raise UnsupportedStepError(_("manual optimization under DeepSpeedStrategy cannot be predicted"))
    if strategy.zero_stage_3 and not _namespaces.is_lightnings(trainer.lightning_module, "configure_model"):
        raise UnsupportedStepError(
            _(
                "configure_model makes parameters that DeepSpeed's stage 3 divides at once (deepspeed.zero.Init), "
                "which cannot be predicted: make the model in __init__"
            )
        )
    return layout


def shardings_of(
    trainer: Trainer, layout: Parallel, config: Mapping[str, Any]
) -> Callable[[], Mapping[Sharding, Parallel]] | None:
    """Other stages, and optimizer states on the host; None where the training goes on from a checkpoint of its own.

    Stage 3 is none of them: it divides weights, which a training_step that reads them outside their modules would find
    empty.
    """
    if trainer.ckpt_path is not None:
        return None
    stages = (None, 2) if layout.kind == "deepspeed1" else (None,)
    on_host = (False,) if deepspeed.offloaded(config) or "optimizer" in config else (False, True)
    found = [Sharding(stage=stage, states_on_host=states) for stage in stages for states in on_host]
    return lambda: {
        one: layout.with_(
            kind=layout.kind if one.stage is None else f"deepspeed{one.stage}", offload=one.states_on_host
        )
        for one in found
        if one != Sharding()
    }


def of_any_stage(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """A config without the stage, which the step's layout says."""
    section = {name: value for name, value in config.get("zero_optimization", {}).items() if name != "stage"}
    return {**config, "zero_optimization": section} if config else {}


def refusals(trainer: Trainer) -> Iterator[Refusal]:
    """Techniques that DeepSpeed's engine leaves no room for."""
    name = type(trainer.strategy).__name__
    for technique in ("foreach", "fused"):
        yield Refusal(technique, _("{strategy} updates flat parts of its own", strategy=name))
    yield Refusal("grow", _("checkpoints of {strategy} keep learning rates as they were multiplied", strategy=name))


def notes(plan: Plan) -> Iterator[str]:
    """What a plan changes in a training under DeepSpeed beside memory."""
    if plan.splits > 1 and plan.precision != "32-true":
        yield _("DeepSpeed adds up the gradients of micro-batches in half precision, as those of accumulated batches")
    if plan.recipe.sharding is not None:
        yield deepspeed.how_to_resume(plan.recipe.sharding)


@contextlib.contextmanager
def micro_batch(trainer: Trainer, *, last: bool) -> Iterator[None]:
    """One of several micro-batches of a loaded batch, in DeepSpeed's engine.

    The engine counts calls of ``step``, of which Lightning makes one for a loaded batch. For the micro-batches before
    the last it is told that no update follows, as its documentation has it (``set_gradient_accumulation_boundary``).
    """
    engine: Any = trainer.strategy.model
    if not last:
        engine.set_gradient_accumulation_boundary(False)
    try:
        yield
    finally:
        if not last:
            engine.set_gradient_accumulation_boundary(None)  # it counts by itself again
