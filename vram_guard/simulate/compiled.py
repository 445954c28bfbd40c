"""Steps whose model ``torch.compile`` compiles, followed as compiled in a copy of the process, within a time limit."""

from __future__ import annotations

import contextlib
import signal
import warnings
from typing import TYPE_CHECKING, Final, Generic, NoReturn, TypeVar

from vram_guard.errors import EndedCopyError, InvalidInputError, LostCopyError, VramGuardError
from vram_guard.forks.exclusive import in_copy
from vram_guard.forks.fork import ForkRefusedError
from vram_guard.forks.waiting import WaitingCopy
from vram_guard.language import Message, _
from vram_guard.limits import COMPILE_SECONDS
from vram_guard.private_names import missing_names
from vram_guard.settings import settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from torch import nn

    from vram_guard.timeline import Timeline

A = TypeVar("A")


#: What a trace says that lets compiled code run uncompiled.
EAGER: Final = Message("torch.compile is not followed: counted as eager")


class NotCompiledError(VramGuardError):
    """The compiled step could not be followed; the message says why."""


def compiles(model: nn.Module) -> bool:
    """True if ``torch.compile`` compiles the model, or modules of it."""
    parts = model.modules()
    # Lightning keeps what it has compiled beside the module (LightningModule._compiler_ctx).
    return any(
        hasattr(part, "_orig_mod")
        or part._compiled_call_impl is not None
        or getattr(part, "_compiler_ctx", None) is not None
        for part in parts
    )


def allowed_seconds() -> float:
    """Seconds of processor time that the compiler may take, by the setting ``compile_seconds``; 0: it is not asked.

    Raises:
        InvalidInputError: the setting is negative or not finite.
    """
    found = settings().get("compile_seconds")
    seconds = COMPILE_SECONDS if found is None else float(found.value)
    if not 0 <= seconds < float("inf"):
        raise InvalidInputError(
            _("compile_seconds must be 0 or more seconds, not {value}", value=repr(found and found.value))
        )
    return seconds


class Compiler(Generic[A]):
    """Follows compiled steps, in copies of this process as it is now: nothing of it stays here.

    Args:
        trace: what to follow -> its timeline, with compiled code.
        seconds: of processor time, when to give up; 0: at once.
        copies: False where ``trace`` itself makes a copy of a process, and gives up in time.
    """

    def __init__(self, trace: Callable[[A], Timeline], seconds: float, *, copies: bool = True) -> None:
        self._trace = trace
        self.seconds = seconds
        self._copies = copies
        self._copy: WaitingCopy[A, Timeline] | None = None
        if copies and seconds and not in_copy():
            with contextlib.suppress(ForkRefusedError):
                self._copy = WaitingCopy(self._within)

    def __call__(self, asked: A) -> Timeline:
        """The timeline of the compiled step.

        Raises:
            NotCompiledError: it could not be followed.
            EndedCopyError: that is not known.
        """
        if not self.seconds:
            raise NotCompiledError(_("compile_seconds is 0"))
        try:
            if not self._copies:
                return self._followed_elsewhere(asked)
            if self._copy is not None:
                return self._copy(asked)
            if in_copy():  # nothing of this process goes on
                return self._within(asked)
        except (NotCompiledError, EndedCopyError):
            raise
        except (LostCopyError, ForkRefusedError) as error:
            raise NotCompiledError(str(error)) from error
        raise NotCompiledError(_("this system cannot copy a process (fork)"))

    def _within(self, asked: A) -> Timeline:
        """In a copy of the process: the timeline, if it is there in time."""
        try:
            with _limited(self.seconds):
                return _checked(lambda: self._trace(asked))
        except _TimeIsUp as error:
            raise NotCompiledError(too_late(self.seconds)) from error

    def _followed_elsewhere(self, asked: A) -> Timeline:
        try:
            return self._trace(asked)
        except VramGuardError as error:
            raise NotCompiledError(str(error)) from error


class _TimeIsUp(BaseException):
    """The compiler catches every Exception."""


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """In a copy of the process, whose only thread is here: so many seconds of its processor time."""

    def late(_number: int, _frame: object) -> None:
        raise _TimeIsUp

    before = signal.signal(signal.SIGPROF, late)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)


def _checked(run: Callable[[], Timeline]) -> Timeline:
    """Called in a copy, which alone imports the compiler."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # the compiler's own, which the training will show
        check_compiler()
        try:
            return run()
        except Exception as error:
            raise NotCompiledError(cause_of(error)) from error


def check_compiler() -> None:
    """Import the compiler; called in a copy of the process.

    Raises:
        NotCompiledError: this release lacks what following it rests on.
    """
    from vram_guard.simulate.private_api import COMPILER_NAMES

    missing = missing_names(COMPILER_NAMES)
    if missing:
        import torch

        names = ", ".join(name.dotted for name in missing)
        raise NotCompiledError(_("torch {version} has no {names}", version=torch.__version__, names=names))


def refuse_engine() -> NoReturn:
    """Compiled code within DeepSpeed's engine was not tried.

    Raises:
        NotCompiledError: says so.
    """
    raise NotCompiledError(_("under DeepSpeed's engine it is not tried"))


def too_late(seconds: float) -> str:
    """What is said where the compiler did not come to an end in time."""
    return _("the compiler took longer than {seconds} s of processor time (compile_seconds)", seconds=f"{seconds:g}")


def not_followed(why: object) -> Message:
    """What a report says of a compiled step that was counted as eager."""
    return Message("torch.compile is not followed: counted as eager ({why})", why=why)


def cause_of(error: BaseException) -> str:
    """The innermost error in a line: Dynamo and Inductor wrap what went wrong, and add advice."""
    while isinstance(inner := getattr(error, "inner_exception", None), Exception):
        error = inner
    words = next((line.strip() for line in str(error).splitlines() if line.strip()), "")
    return words if isinstance(error, VramGuardError) else f"{type(error).__name__}: {words}"
