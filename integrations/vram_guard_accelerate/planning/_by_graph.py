"""What the graphs of two symbolic runs tell of slices, where no samples are run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

from vram_guard.apply.loss_terms import joined_behind, reduction_of
from vram_guard.apply.loss_weight import IGNORED
from vram_guard.apply.normalisers import Normaliser
from vram_guard.language import _
from vram_guard.proof.effects import other_calls, other_draws
from vram_guard.proof.joined_samples import Reaching, joined_by
from vram_guard_accelerate.dry_run.forked_traces import ForkedTraces
from vram_guard_accelerate.dry_run.results import LoopFacts

#: Names that are told of what changes.
NAMED = 3


class GraphProof:
    """Two runs of the loop as written, with its batch and with half of it, compared once.

    Args:
        traces: which made the first run, and make the second one where it is asked for.
        samples: of the batch.
    """

    def __init__(self, traces: ForkedTraces, samples: int) -> None:
        self._traces = traces
        self._samples = samples

    def loss_weight(self) -> tuple[Literal["mean", "sum"] | Normaliser, str]:
        """The reduction of the losses that models return over the samples of a batch, or what they are divided by.

        And the reason why that is unknown ("" where it is known).

        Raises:
            VramGuardError: the second run came to no answer.
        """
        one, samples = self._traces.first_look().facts, self._samples
        other_samples, again = self._traces.looked_again()
        other = again.facts
        if len(one.losses) != len(other.losses):
            return "mean", _("it returns different numbers at different batch sizes")
        in_parts = again.weight.weight if again.weight else None
        weight, why = _reduction(one, samples, other, other_samples)
        known = bool(why) and isinstance(in_parts, Normaliser)
        if known and in_parts is not None:
            weight, why = in_parts, ""
        elif not why and in_parts is not None and (in_parts == "sum") != (weight == "sum"):
            why = _("it is divided by a number of the whole batch, which is the same in every slice")
        joining = self._joining(one.reaching, other.reaching, counted=known)
        sums = any(term.reduction == "sum" for terms in one.losses for term in terms)
        if sums and not known and any(reaching.counted for reaching in one.reaching):
            joining = joining or _("it is a sum that may be divided by a number that was computed")
        return weight, why or joining

    def why_not(self) -> str:
        """Why slices are not proven; "" where they are, if the weight of returned losses is known.

        Raises:
            VramGuardError: the second run came to no answer.
        """
        one = self._traces.first_look().facts
        other_samples, again = self._traces.looked_again()
        names = tuple(dict.fromkeys((*one.advances, *one.changed_in_calls, *again.facts.changed_in_calls)))
        if names:
            return _("every step changes state that the model keeps: {names}", names=", ".join(names[:NAMED]))
        if one.returns_loss:
            return ""  # read before
        if len(one.outputs) != len(again.facts.outputs):
            return _("it returns different numbers at different batch sizes")
        for steps, twins in zip(one.outputs, again.facts.outputs, strict=True):
            why = joined_behind(steps, self._samples, twins, other_samples)
            if why:
                return why
        return self._joining(one.reaching_outputs, again.facts.reaching_outputs)

    def remarks(self) -> tuple[str, ...]:
        """What two runs hear of and cannot compare, where :meth:`why_not` is ""."""
        one, (_samples, again) = self._traces.first_look().facts, self._traces.looked_again()
        pairs = [
            *zip(one.reaching, again.facts.reaching, strict=False),
            *zip(one.reaching_outputs, again.facts.reaching_outputs, strict=False),
        ]
        drawn = (other_draws(),) if again.random else ()
        loops = any(_joined(*pair) is None for pair in pairs)
        return (*drawn, other_calls()) if loops else drawn

    def _joining(self, ones: Sequence[Reaching], others: Sequence[Reaching], *, counted: bool = False) -> str:
        """Why samples are joined without a graph on the way to what models return; "" where that is not seen.

        Args:
            ones: of the first run, one for each value.
            others: of the second run.
            counted: whether it is known what the losses are divided by.
        """
        if len(ones) != len(others):
            return _("it returns different numbers at different batch sizes")
        for one, other in zip(ones, others, strict=True):
            function = _joined(one, other, counted=counted)  # None where it goes through samples one by one
            if function:
                return _("the result of {function}, which joins samples, reaches it without a graph", function=function)
        return ""


def _joined(one: Reaching, other: Reaching, *, counted: bool = False) -> str | None:
    large, small = (one, other) if one.samples > other.samples else (other, one)
    return joined_by(large, small, counted=counted)


def _reduction(
    one: LoopFacts, samples: int, other: LoopFacts, other_samples: int
) -> tuple[Literal["mean", "sum"] | Normaliser, str]:
    # Of means over labels that are no arguments as they are, slices are weighed by their labels where they have some.
    for labels_counted in ((), (IGNORED,)):
        found = [
            reduction_of(terms, samples, twins, other_samples, labels_counted=labels_counted)
            for terms, twins in zip(one.losses, other.losses, strict=True)
        ]
        why = next((why for kind, why in found if kind is None), "")
        kinds = {kind for kind, _why in found if kind is not None}
        if not why and len(kinds) < 2:
            return (kinds.pop() if kinds else "mean"), ""
    return "mean", why or _("some of the numbers that it returns are means over the batch, others sums")
