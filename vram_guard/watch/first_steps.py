"""The first steps of one training, measured: compared with the prediction, and remembered for the next run."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vram_guard.language import _
from vram_guard.limits import FIRST_STEPS
from vram_guard.units import format_bytes
from vram_guard.watch.corrections import Corrections, Subject

if TYPE_CHECKING:
    from vram_guard.timeline import Estimate
    from vram_guard.watch.memory import MemoryReader


@dataclass(frozen=True)
class Measured:
    """Measured and predicted peaks of the first steps; bytes."""

    predicted_allocated: int
    predicted_reserved: int
    allocated: int | None
    """Peak of this training; None where it is unknown, because an earlier peak of the process was higher."""
    reserved: int | None

    @property
    def ratio(self) -> float | None:
        """Measured over predicted, the worse of the two; None where neither was measured."""
        pairs = ((self.allocated, self.predicted_allocated), (self.reserved, self.predicted_reserved))
        ratios = [measured / predicted for measured, predicted in pairs if measured is not None and predicted > 0]
        return max(ratios, default=None)

    def words(self) -> str:
        """One line for people."""
        return _(
            "after {steps} optimizer steps, peak {allocated}; {reserved}",
            steps=FIRST_STEPS,
            allocated=_words(_("allocated"), self.allocated, self.predicted_allocated),
            reserved=_words(_("reserved"), self.reserved, self.predicted_reserved),
        )

    def metrics(self) -> dict[str, float]:
        """Measured peaks by name."""
        found = {"allocated": self.allocated, "reserved": self.reserved}
        return {f"measured_peak_{name}_bytes": float(value) for name, value in found.items() if value is not None}


class FirstSteps:
    """One training's measurement.

    It begins before the model is on the device: what is there by then is not the training's own. Memory that earlier
    work of this process left in the allocator's cache would serve this training, and be missing from what it reserves:
    it is given back first. Peaks are never reset, because the user's code may read them; so a peak counts only once it
    rises above that of everything before the training.

    Args:
        reader: the device's memory.
        about: what the measurement is remembered under.
        estimate: the prediction of the plan that is trained under.
        remember: whether to keep it for the next run.
    """

    def __init__(self, reader: MemoryReader, about: Subject, estimate: Estimate, *, remember: bool) -> None:
        self._reader, self._about, self._estimate, self._remember = reader, about, estimate, remember
        self.done = False
        self._ran_out = False
        """Memory ran out: what is measured from now on is another plan's."""
        with contextlib.suppress(RuntimeError):  # an error of the driver belongs to the training, not here
            reader.release()
        self._before = (reader.allocated(), reader.reserved())
        self._earlier: tuple[int, int] | None = None

    def start(self) -> int:
        """Training begins: model and optimizer are made, validation's sanity check is over.

        Returns:
            The bytes that it will find missing, because other processes have taken them since the plan was made.
        """
        self._earlier = (self._reader.peak_allocated(), self._reader.peak_reserved())
        held = self._reader.reserved() - self._before[1]
        return max(0, self._estimate.peak_reserved - max(0, held) - self._reader.unused())

    def measure(self) -> Measured | None:
        """Peaks since :meth:`start`; None before."""
        if self._earlier is None:
            return None
        peaks = (self._reader.peak_allocated(), self._reader.peak_reserved())
        allocated, reserved = (
            peak - before if peak > earlier else None
            for peak, earlier, before in zip(peaks, self._earlier, self._before, strict=True)
        )
        return Measured(*self._estimate.first_steps, allocated, reserved)

    def out_of_memory(self) -> None:
        """Memory ran out on this rank. A peak of live tensors above the prediction is worth remembering."""
        found = self.measure()
        self._ran_out = True
        if self._remember and found is not None and found.allocated is not None:
            ratio = found.allocated / max(1, found.predicted_allocated)
            if ratio > 1:
                Corrections().remember(self._about, ratio)

    def finish(self, gather: Callable[[Any], list[Any]], *, first_rank: bool) -> Measured | None:
        """After the first optimizer steps, on all ranks alike: the worst rank's measurement; None where there is none.

        Args:
            gather: a rank's value -> every rank's.
            first_rank: whether this rank is the one that remembers.
        """
        self.done = True
        own = None if self._ran_out else self.measure()
        found = [one for one in gather(own) if one is not None and one.ratio is not None]
        if not found or self._ran_out:
            return None
        worst: Measured = max(found, key=lambda one: one.ratio)
        if self._remember and first_rank and worst.ratio is not None:
            Corrections().remember(self._about, worst.ratio)
        return worst


def _words(name: str, measured: int | None, predicted: int) -> str:
    expected = format_bytes(predicted)
    if measured is None:
        return _(
            "{name} not measured (an earlier peak of this process is higher), {predicted} predicted",
            name=name,
            predicted=expected,
        )
    share = f" ({measured / predicted - 1:+.1%})" if predicted else ""
    found = format_bytes(measured)
    return _("{name} {found} measured, {predicted} predicted", name=name, found=found, predicted=expected) + share
