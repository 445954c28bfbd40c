"""What comes home from a dry run: what was seen, or why nothing could be."""

from __future__ import annotations

import os
import sys
import traceback
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from vram_guard import errors
from vram_guard.errors import UnsupportedStepError, VramGuardError

if TYPE_CHECKING:
    from vram_guard.apply.loss_terms import Term
    from vram_guard.timeline import Timeline
    from vram_guard_accelerate.dry_run.loop_profile import Conduct


class StoppedError(BaseException):
    """The script did something that ends the dry run; not an Exception, so that no ``except`` of its own stops it."""


def stopped(reason: str) -> NoReturn:
    """End the dry run with this reason, and the line of the script that gave it."""
    where = place_in_script(sys._getframe(1))  # noqa: SLF001 - the script's own line is what the reader needs
    raise StoppedError(f"{reason}{f' ({where})' if where else ''}")


@dataclass(frozen=True)
class Facts:
    """What the loop was seen to do in its first two optimizer steps."""

    steps: int
    batches_per_step: int
    """Training batches from the first optimizer step to the second."""
    clips: bool
    foreign: bool
    """Whether an optimizer updates parameters of none of the prepared models."""
    inside: bool
    """Whether the models return their loss, so that slices need not run forward twice."""
    compares: bool
    """Whether an output is as wide as the batch: samples may be compared with each other."""
    seconds: float
    losses: tuple[tuple[Term, ...], ...]
    """The terms of the losses that models return; none where the script computes them."""
    counts_items: bool
    """Whether models are given the number of items that their loss is divided by."""
    conduct: Conduct | None = None
    """Of the loop as written, at its own batch size."""


@dataclass(frozen=True)
class Answer:
    """What a copy sends home."""

    timeline: Timeline
    facts: Facts


@dataclass(frozen=True)
class Failure:
    """Why a copy, or the original, came to no answer."""

    kind: str
    message: str
    traceback: str = ""

    @classmethod
    def of(cls, error: BaseException, script_name: str) -> Failure:
        """From what ended the script."""
        if isinstance(error, StoppedError):
            return cls("UnsupportedStepError", str(error))
        if isinstance(error, SystemExit):
            return cls("UnsupportedStepError", f"the script ended itself with exit code {error.code}")
        text = "".join(traceback.format_exception(error))
        if isinstance(error, VramGuardError):
            return cls(type(error).__name__, str(error), text)
        where = _place_of(error, script_name)
        return cls("UnsupportedStepError", f"the script fails: {type(error).__name__}: {error}{where}", text)

    def as_error(self) -> VramGuardError:
        """The error, for whoever asked."""
        kind = getattr(errors, self.kind, UnsupportedStepError)
        return kind(self.message)


def place_in_script(frame: Any) -> str:
    """The innermost line outside libraries, as "train.py, line 12"; "" if there is none."""
    while frame is not None:
        if _is_users(frame.f_code.co_filename):
            return f"{Path(frame.f_code.co_filename).name}, line {frame.f_lineno}"
        frame = frame.f_back
    return ""


def imported_files() -> dict[str, list[int]]:
    """The files outside libraries that this process has imported -> their size and time of change (ns)."""
    names = {getattr(module, "__file__", None) for module in list(sys.modules.values())}
    found = {}
    for name in names:
        if isinstance(name, str) and _is_users(name):
            state = state_of(name)
            if state is not None:
                found[name] = state
    return found


def state_of(name: str) -> list[int] | None:
    """A file's size and time of change (ns); None where there is none."""
    try:
        state = os.stat(name)  # noqa: PTH116 - asked for while a script's paths are silenced
    except (OSError, ValueError):
        return None
    return [state.st_size, state.st_mtime_ns]


def _place_of(error: BaseException, script_name: str) -> str:
    own = Path(script_name).resolve()
    lines = [
        f"{Path(entry.filename).name}, line {entry.lineno}"
        for entry in traceback.extract_tb(error.__traceback__)
        if _is_users(entry.filename) or Path(entry.filename).resolve() == own
    ]
    return f" ({lines[-1]})" if lines else ""


_OWN = (str(Path(errors.__file__).parent) + os.sep, str(Path(__file__).parent) + os.sep)


def _is_users(name: str) -> bool:
    libraries = ("<", sys.base_prefix + os.sep, *_OWN)
    return f"{os.sep}site-packages{os.sep}" not in name and not name.startswith(libraries)
