"""Techniques that cannot be applied to a training, pins that contradict them, and what else a split changes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from vram_guard.allocator import with_expandable_segments
from vram_guard.apply.loss_weight import IGNORED, LossWeight
from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _, marked
from vram_guard.plan.techniques import FORMS, TECHNIQUES
from vram_guard.proof.effects import other_draws

if TYPE_CHECKING:
    from torch import nn

    from vram_guard.plan import Plan
    from vram_guard.plan.pins import Pins
    from vram_guard.timeline import LaterChange

_WHY: dict[str, str] = {
    "accumulate": marked("smaller micro-batches are not possible here: {why}"),
    "checkpoint": marked("activation checkpointing is not possible here: {why}"),
    "slices": marked("slices of the batch are not possible here: {why}"),
    "selective_checkpoint": marked("selective activation checkpointing is not possible here: {why}"),
    "precision": marked("mixed precision is not possible here: {why}"),
    "grow": marked("a larger batch is not possible here: {why}"),
    "fused": marked("a fused optimizer is not possible here: {why}"),
    "offload_parameters": marked("parameters on the host are not possible here: {why}"),
    "offload_optimizer": marked("an optimizer on the host is not possible here: {why}"),
    "reshard": marked("gathered weights cannot be freed at another time here: {why}"),
    "shard": marked("FSDP2 in place of DDP is not possible here: {why}"),
    "optimizer_in_backward": marked("an optimizer in the backward pass is not possible here: {why}"),
    "chunked_loss": marked("a loss in chunks is not possible here: {why}"),
    "expandable_segments": marked("expandable segments are not possible here: {why}"),
}


class Refusal(NamedTuple):
    """A technique that this training does not admit."""

    technique: str
    """One of :data:`vram_guard.plan.techniques.TECHNIQUES`, or "grow"."""
    reason: str

    def words(self) -> str:
        """One line for people."""
        if self.technique in _WHY:
            return _(_WHY[self.technique], why=self.reason)
        return _("{technique} is not possible here: {why}", technique=self.technique, why=self.reason)


def before_the_process() -> str:
    """The reason why the allocator's settings stay as they are in a process that runs."""
    name, value = with_expandable_segments()
    return _(
        "the allocator's settings are read when a process starts; start it with {name}={value}", name=name, value=value
    )


#: Techniques that leave a model divided over its processes as a framework has divided it.
BESIDE_LAYOUTS = ("accumulate", "evaluation", "expandable_segments", "foreach", "fused", "reshard", "shard")


def beside_layout(strategy: str, *possible: str) -> Iterator[Refusal]:
    """Refuse techniques that would change how a model is divided over its processes.

    Args:
        strategy: what divides it, for people.
        possible: techniques that can be put on the model before it is divided.
    """
    why = _("{strategy} divides the model over the processes, and stays as it is written", strategy=strategy)
    return (Refusal(name, why) for name in TECHNIQUES if name not in (*BESIDE_LAYOUTS, *possible))


def check_pins(pins: Pins, refused: Mapping[str, str], *, precision: str, batch_size: int) -> None:
    """Refuse pins that ask for what cannot be done in this training.

    Args:
        pins: the parts of the plan that are fixed.
        refused: technique -> why it is not possible.
        precision: as written: pinning that asks for nothing.
        batch_size: as written.

    Raises:
        UnsupportedStepError: with the pin and the reason.
    """
    for pin, technique in _pinned(pins, precision, batch_size):
        if technique in refused:
            refusal = Refusal(technique, refused[technique]).words()
            raise UnsupportedStepError(_("{pin} is pinned, but {refusal}", pin=pin, refusal=refusal))


def _pinned(pins: Pins, precision: str, batch_size: int) -> Iterator[tuple[str, str]]:
    """The pins that ask for a technique, with that technique."""
    if pins.micro_batch_size not in (None, batch_size):
        yield "micro_batch_size", "accumulate"
    if pins.precision not in (None, precision):
        yield "precision", "half" if str(pins.precision).endswith("-true") else "precision"
    if pins.optimizer in FORMS:
        yield "optimizer", FORMS[pins.optimizer]
    for name, technique in _PARTS.items():
        if getattr(pins, name) not in (None, False, 0, (), "none"):
            yield name, technique


_PARTS = {
    "checkpoint": "checkpoint",
    "checkpoint_keeps": "selective_checkpoint",
    "offload_activations": "offload_activations",
    "frozen_on_host": "offload_frozen",
    "optimizer_on_host": "offload_optimizer",
    "parameters_on_host": "offload_parameters",
    "optimizer_in_backward": "optimizer_in_backward",
    "chunked_loss": "chunked_loss",
    "expandable_segments": "expandable_segments",
}


def undone_later(plan: Plan) -> Refusal | None:
    """A technique of the plan that would not survive what later steps change, as far as its timelines have them."""
    recipe, later = plan.recipe, later_changes(plan)
    if "trained" in later and recipe.frozen_on_host:
        return Refusal("offload_frozen", _("weights that are frozen now are trained in a later epoch"))
    if "optimized" in later and recipe.optimizer_on_host:
        return Refusal("offload_optimizer", _("the optimizer gets other weights or settings in a later epoch"))
    return None


def unproven_later(plan: Plan) -> Refusal | None:
    """Micro-batches of a loss that is another one in later steps: the proof is of the first ones."""
    if plan.splits == 1 or "loss" not in later_changes(plan):
        return None
    return Refusal(
        "accumulate",
        _(
            "the model is changed during the training, as notes of the prediction say: what its loss is over a "
            "batch is proven for the first steps only; pass loss_weight"
        ),
    )


def later_changes(plan: Plan) -> set[LaterChange]:
    """What later steps change, as far as the plan's timelines have them."""
    seen = (plan.timeline, plan.timeline_before)
    return {change for one in seen if one is not None for change in one.later_changes}


def splitting_notes(model: nn.Module, loss_weight: LossWeight, make: Callable[[int], Any], size: int) -> Iterator[str]:
    """The effects of splitting a batch other than on memory; the plan's own reasons mention batch normalisation.

    Args:
        model: that is trained.
        loss_weight: how the losses of micro-batches are weighted.
        make: batch size -> a batch of the loader.
        size: of a whole batch.
    """
    if loss_weight == "mean":
        yield _(
            "the losses of micro-batches are weighted by sample count, which is exact for a loss that is a mean over "
            "the samples of the batch; losses normalised by counts (positives in detection, pixels that are not "
            "ignored) come out slightly different: pass loss_weight='sum' or a function of the batch for other losses"
        )
        if _has_ignored_labels(make(size)):
            yield _(
                "the batch holds labels of {ignored}: a loss that ignores them is a mean over the others; "
                "for the exact result pass a loss_weight such as lambda batch: (batch['labels'] != "
                "-100).sum()",
                ignored=IGNORED,
            )
    if any("Dropout" in type(part).__name__ and part.training and getattr(part, "p", 0) for part in model.modules()):
        yield other_draws()


def _has_ignored_labels(batch: Any) -> bool:
    from vram_guard.simulate.tracing.batches import tensors_of

    labels = [leaf for leaf in tensors_of(batch) if leaf.dtype == torch.int64]
    return any(bool((leaf == IGNORED).any()) for leaf in labels)
