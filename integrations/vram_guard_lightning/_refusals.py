"""Techniques that a plan may not use in a training with Lightning, with the reasons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from vram_guard.guard.collectives import static_graph
from vram_guard.guard.refusals import Refusal, beside_layout
from vram_guard.language import _
from vram_guard.parallel.in_place_of_ddp import why_not_optimizer
from vram_guard.parallel.resharding import why_not_offloaded, why_not_split_on_host
from vram_guard.plan.techniques import mixed_precision
from vram_guard_lightning import _deepspeed, _dividing, _growth, _hooks, _layouts, _namespaces, private_api
from vram_guard_lightning._namespaces import is_lightnings

if TYPE_CHECKING:
    from lightning.pytorch import LightningModule, Trainer

    from vram_guard.guard.settings import GuardSettings
    from vram_guard.plan import Plan


def refusals(trainer: Trainer, module: LightningModule, settings: GuardSettings, *, growable: str) -> Iterator[Refusal]:
    """Those that are known before the trace; an empty reason refuses nothing.

    Args:
        trainer: the Trainer.
        module: that it trains.
        settings: of the guard.
        growable: why the loader's batch size cannot be changed ("" where it can).
    """
    if not module.automatic_optimization:
        yield Refusal(
            "accumulate",
            _("manual optimization does its own backward and steps; accumulate inside training_step instead"),
        )
    elif missing := private_api.missing(_namespaces.of(trainer), private_api.MICRO_BATCHES):
        yield Refusal("accumulate", _("this release of Lightning is not supported: {what}", what=missing[0]))
    elif _layouts.flat_on_host(trainer):
        yield Refusal("accumulate", why_not_split_on_host())
    elif getattr(trainer.strategy, "_ddp_kwargs", {}).get("static_graph"):
        yield static_graph()
    else:
        yield Refusal("accumulate", _hooks.why_whole(trainer, module))
    plain = _namespaces.part(_namespaces.of(trainer), "plugins.precision.Precision")
    if trainer.precision == "32-true" and type(trainer.precision_plugin) is not plain:
        kind = type(trainer.precision_plugin).__name__
        yield Refusal("precision", _("the precision plugin {kind} was set by the user and stays", kind=kind))
    divides = "shard" in settings.techniques and not _dividing.why_not(trainer, module)
    if _layouts.whole(trainer) and not divides:
        yield Refusal(
            "offload_parameters",
            _(
                "the strategy holds whole parameters; shard them with strategy=ModelParallelStrategy() and fully_shard "
                "in configure_model"
            ),
        )
    if _deepspeed.used(trainer):
        yield from _deepspeed.refusals(trainer)
    elif trainer.gradient_clip_val:
        yield Refusal(
            "offload_optimizer", _("gradients are clipped on the GPU after they have been copied to the host")
        )
    elif trainer.world_size > 1:
        yield Refusal("offload_optimizer", _("every rank would update its own copy of the weights on the host"))
    elif trainer.strategy.root_device.type == "cpu":
        yield Refusal("offload_optimizer", _("this training runs on the CPU: its optimizer is on the host already"))
    yield Refusal("optimizer_in_backward", _why_not_in_backward(trainer, module))
    if not _deepspeed.used(trainer):
        yield Refusal("shard", _dividing.why_not(trainer, module))
    yield Refusal("grow", _growth.why_not(trainer, growable))
    if not _layouts.whole(trainer):
        yield from beside_layout(type(trainer.strategy).__name__, *_layouts.installable(trainer))
    if _namespaces.is_a(trainer.strategy, _layouts.FSDP):
        yield Refusal("offload_parameters", why_not_offloaded())


#: Hooks that run between the backward pass and the optimizer step.
_BETWEEN = (
    *("on_after_backward", "on_before_optimizer_step", "optimizer_step", "configure_gradient_clipping"),
    *("on_before_zero_grad", "optimizer_zero_grad", "backward"),
)


def _why_not_in_backward(trainer: Trainer, module: LightningModule) -> str:
    """The reason why the optimizer may not step in the backward pass; "" for none."""
    if not module.automatic_optimization:
        return _("manual optimization does its own backward and steps")
    if trainer.gradient_clip_val:
        return _("gradients are clipped once all of them are there, and each would have stepped by then")
    if _deepspeed.used(trainer):
        return _("DeepSpeed's engine steps by itself")
    callbacks: list[Any] = trainer.callbacks  # type: ignore[attr-defined]
    for owner in (module, *callbacks):
        if _namespaces.is_a(owner, "callbacks.GradientAccumulationScheduler"):
            return _("batches of an optimizer step change with the epoch")
        for name in _BETWEEN:
            if hasattr(type(owner), name) and not is_lightnings(owner, name):
                kind = type(owner).__name__
                return _("{name} of {kind} would find gradients gone, and weights changed", name=name, kind=kind)
    return ""


def by_optimizer(trainer: Trainer, optimizer_traits: set[str], plan: Plan) -> Refusal | None:
    """Refuse what of a plan does not go with the optimizer.

    Args:
        trainer: the Trainer.
        optimizer_traits: class names of the optimizer, and "fused" where it is.
        plan: to be checked.
    """
    divided = plan.recipe.sharding is not None and plan.recipe.sharding.fsdp2
    if divided and (why := why_not_optimizer(optimizer_traits - {"fused"})):
        return Refusal("shard", why)
    return _without_scaler(trainer, optimizer_traits, plan)


def _without_scaler(trainer: Trainer, optimizer_traits: set[str], plan: Plan) -> Refusal | None:
    """Refuse float16 where its gradient scaler does not work with the optimizer.

    A plan that does not fit is told too, of a GPU on which it would have been tried: Lightning refuses both together.

    Args:
        trainer: the Trainer.
        optimizer_traits: class names of the optimizer, and "fused" where it is.
        plan: to be checked.
    """
    given = plan.precision if plan.fits else mixed_precision(plan.precision_before, plan.budget.compute_capability)[0]
    if given != "16-mixed" or plan.precision_before == "16-mixed":
        return None
    if "LBFGS" in optimizer_traits:
        return Refusal("precision", _("LBFGS does not work with the gradient scaling that 16-mixed needs"))
    if "fused" in optimizer_traits and trainer.gradient_clip_val:
        return Refusal(
            "precision",
            _("a fused optimizer unscales gradients itself, so that they cannot be clipped under 16-mixed"),
        )
    return None
