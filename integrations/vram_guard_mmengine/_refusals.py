"""Techniques that a plan may not use in a training with MMEngine, with the reasons."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from mmengine.optim import AmpOptimWrapper, OptimWrapper

from vram_guard.apply.backward_hooks import of_package, why_whole
from vram_guard.guard.collectives import static_graph
from vram_guard.guard.refusals import Refusal, beside_layout
from vram_guard.language import _
from vram_guard.parallel.resharding import why_not_offloaded, why_not_split_on_host
from vram_guard_mmengine import _dividing, _layouts

if TYPE_CHECKING:
    from vram_guard.guard.settings import GuardSettings
    from vram_guard_mmengine._optim import OptimFacts


def refusals(runner: Any, facts: OptimFacts, settings: GuardSettings, *, growable: str) -> Iterator[Refusal]:
    """Those that are known before the trace; an empty reason refuses nothing.

    MMEngine builds the optimizer first, and initialises or loads weights after it.

    Args:
        runner: whose loops and optimizer are not built yet.
        facts: about the optimizer.
        settings: of the guard.
        growable: why the loader's batch size cannot be changed ("" where it can).
    """
    yield Refusal("accumulate", why_not_split_on_host() if _layouts.on_host(runner) else _why_whole(runner, facts))
    if _static_graph(runner):
        yield static_graph()
    yield Refusal("precision", _why_not_mixed(facts, pinned=settings.pins.precision is not None))
    yield Refusal("half", _("MMEngine has no optimizer wrapper for true half precision"))
    if runner.cfg.get("activation_checkpointing"):
        yield Refusal("checkpoint", _("activation_checkpointing is set in the config"))
    if getattr(runner, "_resume", False):
        yield Refusal("8bit", _("states of a checkpoint cannot become 8-bit ones"))
    yield Refusal("offload_frozen", _("MMEngine loads weights after the model is placed"))
    yield Refusal(
        "offload_optimizer",
        _("MMEngine loads weights after the optimizer is built, which would step from older ones"),
    )
    yield Refusal("optimizer_in_backward", _why_not_in_backward(facts))
    yield Refusal("offload_parameters", _("MMEngine loads weights after the optimizer is built"))
    yield Refusal("shard", _dividing.why_not(runner, facts))
    yield Refusal("grow", growable)
    if _layouts.layout_of(runner) is not None:
        own = runner.strategy.activation_checkpointing is not None
        yield from beside_layout(_layouts.SHARDED, *(() if own else ("checkpoint",)))
        yield Refusal("offload_parameters", why_not_offloaded())


def _why_not_in_backward(facts: OptimFacts) -> str:
    """The reason why the optimizer may not step in the backward pass; "" for none."""
    if facts.kind is not OptimWrapper:
        return _("the optimizer wrapper {kind} looks at all gradients before it steps", kind=facts.kind.__name__)
    return ""


def _why_whole(runner: Any, facts: OptimFacts) -> str:
    """The reason why batches may not be cut: code of the user's that runs with every backward."""
    wrapper = runner.optim_wrapper if facts.built else facts.kind
    for name in ("backward", "scale_loss"):
        if not of_package(wrapper, name, "mmengine", "vram_guard_mmengine"):
            return _(
                "{name} of {kind} is overridden, and would get the loss of each micro-batch instead of the batch's",
                name=name,
                kind=facts.kind.__name__,
            )
    return why_whole(runner.model)


def _static_graph(runner: Any) -> bool:
    """DDP's argument: of a model that is wrapped already, or in the config."""
    wrapper = runner.cfg.get("model_wrapper_cfg") or (runner.cfg.get("strategy") or {}).get("model_wrapper") or {}
    return bool(getattr(runner.model, "static_graph", False) or wrapper.get("static_graph"))


def _why_not_mixed(facts: OptimFacts, *, pinned: bool) -> str:
    if facts.built:
        return _("optim_wrapper was built before the runner; describe it as a dict instead")
    if facts.kind not in (OptimWrapper, AmpOptimWrapper):
        return _("the optimizer wrapper {kind} was chosen by the user and stays", kind=facts.kind.__name__)
    if facts.precision != "32-true" and not pinned:
        return _("the training is in {precision} already, and stays so", precision=facts.precision)
    return ""
