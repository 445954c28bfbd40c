"""The weight of micro-batches' losses by symbolic runs of the step."""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from vram_guard.apply.microbatch import Layout, MicroBatch, Splitter
from vram_guard.language import _
from vram_guard.proof._cut_batches import differ_in_size, of_whole_batch

if TYPE_CHECKING:
    from vram_guard.apply.normalisers import Normaliser
    from vram_guard.guard.training import CapturedTraining
    from vram_guard.plan import Plan
    from vram_guard.proof.loss_graph import LossGraph

#: Samples of which the values are looked at, for what a loss is divided by.
_SAMPLES = 8


def reduction(
    captured: CapturedTraining, graph: LossGraph, plan: Plan, layout: Layout | None
) -> tuple[Literal["mean", "sum"] | Normaliser | None, str]:
    """The weight of micro-batches' losses by symbolic runs.

    None, and why, where they do not tell, or where something else in the step would be other.
    """
    size = plan.batch_size
    try:
        with captured.symbolic_run():
            kind, why = graph.reduction(size)
            counted = None if kind is not None or layout is None else _counted(captured, graph, size, layout)
            if counted is not None or kind is not None:
                why = graph.joined(size, counted=counted is not None)
            if why:
                return None, not_known(why)
            kind = kind or counted
            why = graph.advanced(size)
        if not why and layout is not None:
            micro = plan.micro_batch_size if plan.splits > 1 else -(-size // 2)
            part = of_whole_batch(captured.sample.make, size, micro, layout)
            why = part and _("{part} is of the whole batch, and every micro-batch is given it", part=part)
            if not why and differ_in_size(captured.sample.distinct, size, layout):
                why = _(
                    "samples of different sizes come to the step unpadded: whether it pads each micro-batch by itself, "
                    "its graph does not show"
                )
    except Exception as error:  # noqa: BLE001 - the user's own code runs in it
        why = f"{type(error).__name__}: {error}"
    return (None, why) if why else (kind, "")


def _counted(captured: CapturedTraining, graph: LossGraph, batch_size: int, layout: Layout) -> Normaliser | None:
    """What a loss is divided by, where the graph and the values of the batch tell."""
    samples = min(batch_size, _SAMPLES)
    batch = captured.sample.distinct(samples)
    parts = Splitter(samples, -(-samples // 2), layout=layout).split(batch)
    return graph.counted([MicroBatch(batch, samples, samples), *parts], captured.given)


def not_known(why: str) -> str:
    """The words for it."""
    return _("the loss is not known to be a mean or a sum over the samples ({why})", why=why)
