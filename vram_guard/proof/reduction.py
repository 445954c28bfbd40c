"""The weight of micro-batches' losses by symbolic runs of the step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from vram_guard.apply.microbatch import even_sizes, probe_layout
from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
from vram_guard.proof._cut_batches import differ_in_size, of_whole_batch

if TYPE_CHECKING:
    from vram_guard.apply.normalisers import EveryLabel, Normaliser
    from vram_guard.guard.training import CapturedTraining
    from vram_guard.plan import Plan
    from vram_guard.proof.loss_graph import LossGraph


def reduction(
    captured: CapturedTraining, plan: Plan, graph: LossGraph
) -> tuple[Literal["mean", "sum"] | Normaliser | EveryLabel | None, str]:
    """The weight of the losses of micro-batches, also of a plan that does not cut its batches yet.

    None, and why, where symbolic runs do not tell, or where something else in the step would be other.

    Args:
        captured: the training, in a copy of its process.
        plan: says how large batches and micro-batches are.
        graph: of its loss, which alone decides.
    """
    size = plan.batch_size
    try:
        layout = probe_layout(captured.sample.make)
    except UnsupportedStepError:
        return None, _("its batches cannot be cut")
    micro = plan.micro_batch_size if plan.splits > 1 else -(-size // 2)
    try:
        with captured.symbolic_run():
            kind, why = graph.reduction(size, layout, even_sizes(size, micro))
            if kind is None:
                return None, not_known(why)
            why = graph.advanced(size)
        part = "" if why else of_whole_batch(captured.sample.make, size, micro, layout)
        if part:
            why = _("{part} is of the whole batch, and every micro-batch is given it", part=part)
        elif not why and differ_in_size(captured.sample.distinct, size, layout):
            why = _(
                "samples of different sizes come to the step unpadded: whether it pads each micro-batch by itself, "
                "its graph does not show"
            )
    except Exception as error:  # noqa: BLE001 - the user's own code runs in it
        why = f"{type(error).__name__}: {error}"
    return (None, why) if why else (kind, "")


def not_known(why: str) -> str:
    """The words for it."""
    return _("the loss is not known to be a mean or a sum over the samples ({why})", why=why)
