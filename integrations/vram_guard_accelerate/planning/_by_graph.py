"""What two symbolic runs tell of slices."""

from __future__ import annotations

from types import NoneType
from typing import Literal

from vram_guard.apply.normalisers import EveryLabel, Normaliser
from vram_guard.language import _
from vram_guard.limits import NAMED
from vram_guard.proof.effects import other_draws
from vram_guard.proof.samples_apart import form_over_samples
from vram_guard_accelerate.dry_run.forked_traces import ForkedTraces
from vram_guard_accelerate.dry_run.results import LoopFacts


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
        one, other = self._compared()
        if len(one.forms) != len(other.forms):
            return "mean", _("it returns different numbers at different batch sizes")
        found = [form_over_samples(*pair) for pair in zip(one.forms, other.forms, strict=True)]
        for name, _number in sorted(one.numbers ^ other.numbers):
            return "mean", _("{part} is of the whole batch, and every micro-batch is given it", part=name)
        why = next((why for kind, why in found if kind is None), "")
        kinds = {kind for kind, _why in found if kind is not None}
        if not why and len(kinds) > 1:
            why = _("the numbers that models return are divided by different counts of the batch")
        kind = kinds.pop() if kinds else "mean"
        if isinstance(kind, EveryLabel):
            kind, why = "mean", why or _("it adds means over different counts of the batch")
        if isinstance(kind, Normaliser) and any(type(key) not in (str, int, NoneType) for key in kind.path):
            why = why or _("it is divided by a number that nothing in the batch explains")
        return ("mean", why) if why else (kind, "")

    def why_not(self) -> str:
        """Why slices are not proven; "" where they are, if the weight of returned losses is known.

        Raises:
            VramGuardError: the second run came to no answer.
        """
        one, other = self._compared()
        written, again = self._traces.first_trace().facts, self._traces.second_trace()[1].facts
        kept = tuple(dict.fromkeys((*written.advances, *written.changed_in_calls, *again.changed_in_calls)))
        if kept:
            return _(
                "every step changes, or may change, state that the model keeps: {names}", names=", ".join(kept[:NAMED])
            )
        if one.returns_loss:
            return ""  # read before
        if len(one.joined) != len(other.joined):
            return _("it returns different numbers at different batch sizes")
        return next((why for why in (*one.joined, *other.joined) if why), "")

    def remarks(self) -> tuple[str, ...]:
        """What two runs hear of and cannot compare, where :meth:`why_not` is ""."""
        return (other_draws(),) if self._traces.second_trace()[1].random else ()

    def _compared(self) -> tuple[LoopFacts, LoopFacts]:
        """Two runs whose calls are read alike: at the script's own size, a list of samples may read as columns."""
        one, (samples, other) = self._traces.first_trace().facts, self._traces.second_trace()
        if one.calls == other.facts.calls:
            return one, other.facts
        return self._traces.second_trace(2 * samples)[1].facts, other.facts
