"""What a plan looks at in the forwards of a loop, from where it calls its model until its backward pass begins."""

from __future__ import annotations

from contextlib import ExitStack
from typing import Any

from vram_guard.errors import UnsupportedTechniqueError
from vram_guard.proof.bodies import Watch
from vram_guard_accelerate.dry_run._followed_loop import FollowedLoop


class WatchedForwards:
    """The forwards of a loop in a copy.

    Args:
        watch: that looks at them.
        loop: of the script.
    """

    def __init__(self, watch: Watch, loop: FollowedLoop) -> None:
        self._watch = watch
        self._loop = loop
        self._open: ExitStack | None = None
        self._stepped = False
        self._losses = [0, 0]
        """Of the first step, and since."""
        if not loop.by_itself:
            loop.watch_calls()

    def begin(self) -> None:
        """A model is about to be called: what follows until the backward pass computes a loss."""
        if self._open is not None:
            return
        if self._loop.tracer.steps and not self._stepped:  # what is made on first use is there by now
            self._stepped = True
            self._watch.reset()
        self._open = ExitStack()
        self._open.enter_context(self._watch.around())
        self._open.callback(self._watch.installed(self._loop.root))

    def end(self) -> bool:
        """A backward pass begins; True if the second step has computed as many losses as the first."""
        if self._open is not None:
            self._open.close()
            self._open = None
            self._losses[self._stepped] += 1
        return self._losses[1] >= self._losses[0] > 0

    def found(self) -> Any:
        """What was found after the first step, or the error that says what stands in the way."""
        try:
            return self._watch.found()
        except UnsupportedTechniqueError as error:
            return error
