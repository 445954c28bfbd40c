"""What a step leaves behind outside of its model's memory, heard in symbolic runs of it."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from vram_guard.forks.side_effects import opened_for_writing
from vram_guard.language import _
from vram_guard.proof.watched import WatchedNumber
from vram_guard.state.random_generators import RandomState, random_state_kept

if TYPE_CHECKING:
    from typing_extensions import Self

#: Arguments of operators that draw nothing where these are zero.
_SHARES = ("p", "dropout", "dropout_p")


@dataclass
class StepEffects:
    """What the adapter hears of a step of a symbolic run, while somebody listens.

    Otherwise nothing is kept: a logged value would keep its memory in the prediction.

    Attributes:
        logged: name -> the value that the step has logged.
        calls: what it has called besides, that micro-batches would call once each: a logger's own methods.
        reads: what it has read that moves on with the training: the number of the epoch.
        companions: objects of the training whose functions run between steps.
    """

    logged: dict[str, Any] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    reads: list[str] = field(default_factory=list)
    companions: tuple[object, ...] = ()
    _listening: bool = False

    @contextlib.contextmanager
    def heard(self) -> Iterator[None]:
        """Inside the block, one step is heard."""
        self.logged.clear()
        self.calls.clear()
        self.reads.clear()
        self._listening = True
        try:
            yield
        finally:
            self._listening = False

    def log(self, name: str, value: Any) -> None:
        """The step has logged a value."""
        if self._listening:
            self.logged[name] = value

    def call(self, name: str) -> None:
        """The step has called something."""
        if self._listening:
            self.calls.append(name)

    def number(self, name: str, value: int) -> Any:
        """A number that the step is given and that moves on with the training: its use is heard."""
        return WatchedNumber(value, lambda: self.reads.append(name)) if self._listening else value

    @contextlib.contextmanager
    def unheard(self) -> Iterator[None]:
        """Inside the block, nothing is heard."""
        listening, self._listening = self._listening, False
        try:
            yield
        finally:
            self._listening = listening

    def read(self, name: str) -> None:
        """The step has read what is another in later steps."""
        if self._listening:
            self.reads.append(name)


class Listening(TorchDispatchMode):
    """Hears inside the block whether random numbers are drawn, and which files are opened for writing.

    Attributes:
        random: True where some are.
        of_python: True where some are drawn from generators of NumPy and Python.
        written: sentences about files.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.random = self.of_python = False
        self.written: tuple[str, ...] = ()

    def __enter__(self) -> Self:
        self._generators, self._opened = RandomState(of_torch=False), opened_for_writing()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: object) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]
        self.of_python = not self._generators.is_current()
        self.random = self.random or self.of_python
        self.written = tuple(_("writing to {path}", path=path) for path in opened_for_writing() - self._opened)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operator itself."""
        kwargs = kwargs or {}
        self.random = self.random or (
            torch.Tag.nondeterministic_seeded in getattr(func, "tags", ()) and _draws(func, args, kwargs)
        )
        # torch's stand-ins for collectives number what they begin by Python's generator.
        with random_state_kept() if func.namespace == "c10d" else contextlib.nullcontext():
            return func(*args, **kwargs)


def _draws(func: Any, args: Any, kwargs: Any) -> bool:
    """False for an operator of this kind whose share of elements that it drops is zero."""
    names = [argument.name for argument in func._schema.arguments]  # noqa: SLF001 - an operator's own
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    defaults = {argument.name: argument.default_value for argument in func._schema.arguments}  # noqa: SLF001
    shares = [given.get(name, defaults[name]) for name in _SHARES if name in defaults]
    return func.overloadpacket.__name__.startswith("bernoulli") or not shares or any(share != 0 for share in shares)


def compared_while_training() -> str:
    """The words for blocks whose forward runs twice."""
    return _("each recomputation is compared with the first forward while training")


def other_draws() -> str:
    """The words for a step that draws random numbers."""
    return _("micro-batches draw other random numbers than a whole batch, from the same distributions")


def other_draws_of_slices() -> str:
    """The words for a forward that runs over slices of its batch."""
    return _("random numbers that the model draws (dropout) are drawn for each slice, from the same distributions")


def unless_said(why: str) -> str:
    """The words for micro-batches that nothing proves, and why: they are left out unless the user asks for them."""
    return _(
        "{why}; they are not applied as they may be another training. If you know that they are not, say how your "
        "loss adds up with {setting}",
        why=why,
        setting=_("loss_weight ('mean', 'sum', or a count of the batch)"),
    )
