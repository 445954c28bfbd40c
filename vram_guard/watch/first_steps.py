"""The first steps of one training, measured: compared with the prediction, and remembered for the next run."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from vram_guard.watch.corrections import Corrections, Subject
from vram_guard.watch.measured import Measured, Watcher

if TYPE_CHECKING:
    from vram_guard.timeline import Estimate
    from vram_guard.watch.memory import MemoryReader


@dataclass
class FirstSteps:
    """One training's measurement.

    Attributes:
        about: what the measurement is remembered under.
        watcher: made before the model is moved.
        remember: whether to keep it for the next run.
    """

    about: Subject
    watcher: Watcher
    remember: bool
    done: bool = False
    ran_out: bool = False
    """Memory ran out: what is measured from now on is another plan's."""

    @classmethod
    def begin(
        cls, reader: MemoryReader | None, about: Subject | None, estimate: Estimate, *, remember: bool
    ) -> FirstSteps | None:
        """Before the model is moved; None where nothing can be measured."""
        if reader is None or about is None:
            return None
        return cls(about, Watcher(reader, estimate), remember)

    def start(self) -> int:
        """Training begins; the bytes that it will find missing, because others have taken them since the plan."""
        self.watcher.start()
        return self.watcher.missing()

    def out_of_memory(self) -> None:
        """Memory ran out on this rank. A peak of live tensors above the prediction is worth remembering."""
        found = self.watcher.measure()
        self.ran_out = True
        if self.remember and found is not None and found.allocated is not None:
            ratio = found.allocated / max(1, found.predicted_allocated)
            if ratio > 1:
                Corrections().remember(self.about, ratio)

    def finish(self, gather: Callable[[Any], list[Any]], *, first_rank: bool) -> Measured | None:
        """After the first optimizer steps, on all ranks alike: the worst rank's measurement; None where there is none.

        Args:
            gather: a rank's value -> every rank's.
            first_rank: whether this rank is the one that remembers.
        """
        self.done = True
        own = None if self.ran_out else self.watcher.measure()
        found = [one for one in gather(own) if one is not None and one.ratio is not None]
        if not found or self.ran_out:
            return None
        worst: Measured = max(found, key=lambda one: one.ratio)
        if self.remember and first_rank and worst.ratio is not None:
            Corrections().remember(self.about, worst.ratio)
        return worst
