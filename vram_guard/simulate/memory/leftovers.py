"""What each training step leaves behind: growth, where a step leaves more than the one before it."""

from __future__ import annotations

from vram_guard.limits import FIRST_STEPS
from vram_guard.simulate.memory.recorder import Recorder
from vram_guard.timeline import Growth


class Leftovers:
    """The blocks that training steps leave behind, from the third step on.

    Args:
        recorder: of the trace.
    """

    def __init__(self, recorder: Recorder) -> None:
        self.growth: tuple[Growth, ...] = ()
        """The blocks that each further step would leave behind."""
        self.unsettled = False
        """The second step left something behind: a third one shows whether every step does."""
        self._recorder = recorder
        self._before: set[int] | None = None
        """Blocks that were there at the end of the last step; None: the next one differs from it."""
        self._first = 0

    def begins(self) -> None:
        """A step begins."""
        self._first = self._recorder.blocks_so_far

    def differs(self) -> None:
        """The next step is not compared with the one before."""
        self._before = None

    def ended(self, number: int) -> None:
        """A step has ended, the so many-th."""
        grown = () if self._before is None else self._recorder.grown(self._first, self._before)
        if self._before is not None and number >= FIRST_STEPS:
            self.growth = grown
        self.unsettled = bool(grown) and number < FIRST_STEPS
        self._before = self._recorder.alive()
