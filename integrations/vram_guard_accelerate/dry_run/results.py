"""Results of a dry run: what a copy of the script saw, or why nothing could be seen."""

from __future__ import annotations

import sys
import traceback as tracebacks
from dataclasses import dataclass
from typing import Any, NoReturn

from vram_guard import errors
from vram_guard.errors import UnsupportedStepError, VramGuardError
from vram_guard.forks.side_effects import why_not_written
from vram_guard.language import _
from vram_guard.timeline import Timeline
from vram_guard.user_code import is_of_stand_ins, line_of_error, line_of_frame, not_followed, with_line


class StoppedError(BaseException):
    """The script did something that ends the dry run; not an Exception, so that no ``except`` of its own stops it."""


def stopped(reason: str) -> NoReturn:
    """End the dry run with this reason, and the line of the script that gave it."""
    raise StoppedError(at_line(reason, sys._getframe(1)))  # noqa: SLF001 - the script's own line


def at_line(reason: str, frame: Any) -> str:
    """A reason, and the line of the script that a frame stands at, or was called from."""
    return with_line(reason, line_of_frame(frame))


@dataclass(frozen=True)
class LoopFacts:
    """Facts observed in the first two optimizer steps of the loop."""

    batches_per_step: int
    """Training batches from the first optimizer step to the second."""
    clips_gradients: bool
    own_backward: tuple[str, ...] = ()
    """Sentences about what the operators tell nothing of in a backward pass."""


@dataclass(frozen=True)
class TraceResult:
    """The answer of a copy of the script."""

    timeline: Timeline
    facts: LoopFacts
    kept_outputs: int = 0
    """Bytes that a Trainer keeps on the GPU of all batches of an evaluation, and would not with another argument."""
    watched: Any = None
    """What the task's watch has found, in every forward alike."""


@dataclass(frozen=True)
class DryRunFailure:
    """The reason why a copy of the script, or the script itself, came to no answer."""

    error: str
    """The name of a class in :mod:`vram_guard.errors`."""
    message: str
    traceback: str = ""
    ended_itself: bool = False
    """The script called ``sys.exit``: the reason is what it printed last."""

    @classmethod
    def unsupported(cls, message: str) -> DryRunFailure:
        """A script that cannot be followed."""
        return cls(UnsupportedStepError.__name__, message)

    @classmethod
    def of(cls, error: BaseException, script: str = "") -> DryRunFailure:
        """A failure from what ended the script."""
        if isinstance(error, StoppedError):
            return cls.unsupported(str(error))
        if isinstance(error, SystemExit):
            if isinstance(error.code, str):
                return cls.unsupported(_("the script ended itself: {reason}", reason=error.code))
            said = _("the script ended itself with exit code {code}", code=error.code or 0)
            return cls(UnsupportedStepError.__name__, said, ended_itself=True)
        text = "".join(tracebacks.format_exception(error))
        if isinstance(error, VramGuardError):
            return cls(type(error).__name__, str(error), text)
        line, problem = line_of_error(error, script), f"{type(error).__name__}: {error}"
        if is_of_stand_ins(error):
            return cls(UnsupportedStepError.__name__, not_followed(line, problem), text)
        parts = (with_line(_("the script fails: {error}", error=problem), line), why_not_written(error))
        return cls(UnsupportedStepError.__name__, "; ".join(filter(None, parts)), text)

    def as_error(self) -> VramGuardError:
        """The error, to be raised in another process."""
        kind: type[VramGuardError] = getattr(errors, self.error, UnsupportedStepError)
        return kind(self.message)
