"""Calls inside a step for which the processes wait for each other: they keep their order and their number."""

from __future__ import annotations

from collections.abc import Sequence

from vram_guard.guard.refusals import Refusal
from vram_guard.language import _
from vram_guard.timeline import STEP_PHASES, SYNCHRONISED_NORM, Collective, Timeline


def collectives_of(timeline: Timeline | None) -> tuple[Collective, ...]:
    """Those of the step as written, each line once; what validation calls belongs to no step."""
    found = [] if timeline is None else [one for one in timeline.collectives if one.phase in STEP_PHASES]
    return tuple({(one.name, one.source, one.phase): one for one in found if one.step and not one.by_layout}.values())


#: Calls by which a layout gathers weights and reduces gradients; among all ranks, others are the step's own.
_OF_LAYOUTS = ("all_gather_into_tensor", "reduce_scatter_tensor")


def of_layout(one: Collective) -> bool:
    """True for calls of FSDP and of tensor parallelism themselves, which belong to every forward and backward."""
    return bool(one.dimension) and (one.name in _OF_LAYOUTS or one.dimension not in ("shard", "data"))


def repeated_in_parts(collectives: Sequence[Collective]) -> Refusal | None:
    """Refuse micro-batches where each of them would call what a whole batch calls once.

    Synchronised batch normalisation is not among these, and neither are a layout's own: they take part in every
    forward as written, and the ranks agree on the number of micro-batches.
    """
    own = [
        one for one in collectives if one.phase != "optimizer" and one.name != SYNCHRONISED_NORM and not of_layout(one)
    ]
    if not own:
        return None
    return Refusal(
        "accumulate",
        _(
            "the step itself calls {names}, for which the ranks wait for each other: every micro-batch would call it "
            "again",
            names=_in_words(own),
        ),
    )


def left_out() -> str:
    """The reason why a divided model's losses may not be weighed by what is counted in each micro-batch."""
    return _(
        "a micro-batch in which nothing counts towards the loss is left out, and the other ranks would wait for this "
        "one's part of the weights"
    )


def static_graph() -> Refusal:
    """Refuse micro-batches under DistributedDataParallel with ``static_graph=True``, where they would break it.

    Its reducer counts how often each gradient arrives, also where nothing is to be averaged yet.
    """
    return Refusal(
        "accumulate",
        _(
            "DistributedDataParallel(static_graph=True) counts gradients from the first backward on, and fails in a "
            "backward pass after which it must not average yet (no_sync)"
        ),
    )


def _in_words(collectives: Sequence[Collective]) -> str:
    places = (f"{one.name} ({one.source})" if one.source else one.name for one in collectives)
    return ", ".join(dict.fromkeys(places))
