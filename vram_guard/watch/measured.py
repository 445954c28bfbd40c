"""Predicted and measured peaks, after the first steps of a training."""

from __future__ import annotations

import contextlib
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vram_guard.language import _
from vram_guard.units import format_bytes

if TYPE_CHECKING:
    from vram_guard.timeline import Estimate
    from vram_guard.watch.memory import MemoryReader

#: Optimizer steps after which a training is in its stride: the first one makes the optimizer's state, and in
#: frameworks that free gradients late the second is the first in which state and old gradients meet.
STEPS = 3


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
            steps=STEPS,
            allocated=_words(_("allocated"), self.allocated, self.predicted_allocated),
            reserved=_words(_("reserved"), self.reserved, self.predicted_reserved),
        )

    def metrics(self) -> dict[str, float]:
        """Measured peaks by name."""
        found = {"allocated": self.allocated, "reserved": self.reserved}
        return {f"measured_peak_{name}_bytes": float(value) for name, value in found.items() if value is not None}


class Watcher:
    """Measures one training's first steps.

    It is made before the model is on the device: what is there by then is not its own. Memory that earlier work of
    this process left in the allocator's cache would serve this training, and be missing from what it reserves: it is
    given back first. Peaks are never reset, because the user's code may read them; so a peak counts only once it
    rises above that of everything before the training.

    Args:
        reader: the device's memory.
        estimate: the prediction of the plan that is trained under.
    """

    def __init__(self, reader: MemoryReader, estimate: Estimate) -> None:
        self._reader = reader
        self._estimate = estimate
        with contextlib.suppress(RuntimeError):  # an error of the driver belongs to the training, not here
            reader.release()
        self._before = (reader.allocated(), reader.reserved())
        self._earlier: tuple[int, int] | None = None

    def start(self) -> None:
        """Training begins: model and optimizer are made, validation's sanity check is over."""
        self._earlier = (self._reader.peak_allocated(), self._reader.peak_reserved())

    def allocated(self) -> int:
        """Bytes in live tensors now."""
        return self._reader.allocated()

    def missing(self) -> int:
        """Bytes by which the device has less left than the prediction asks for; 0 where it has enough.

        Other processes may have started since the plan was made.
        """
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
