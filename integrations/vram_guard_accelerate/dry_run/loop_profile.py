"""The profile of a script's loop: how often it clips in an optimizer step, at which learning rates.

A launch in another way may be another training: two dry runs are compared by this
(:func:`vram_guard_accelerate.planning.relaunch.disagreement`).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from vram_guard.patching import replace_attributes
from vram_guard.proof.functions import told
from vram_guard_accelerate._patching import wrap

if TYPE_CHECKING:
    from vram_guard.capture.loader import Sample


@dataclass(frozen=True)
class LoopProfile:
    """A loop between its first optimizer step and its second, and what follows from it."""

    batch_size: int
    batches_per_step: int
    counts: tuple[tuple[str, int], ...]
    """Numbers of gradient clippings and of calls that set gradients to zero."""
    rates: tuple[tuple[float, ...], ...]
    """The learning rates at these steps, each once."""
    batches: int | None
    """Of an epoch, where one process has all of it; None: it has no known end."""


class _Event(NamedTuple):
    kind: str
    what: Any = None


class LoopObserver:
    """Observes the loop of one process."""

    def __init__(self) -> None:
        self.functions: list[type] = []
        """Functions with a backward pass of their own that were called."""
        self._events: list[_Event] = []
        self._ends: list[int] = []
        """Indices of the events at which optimizer steps end."""
        self._inside = Counter[type]()

    def install(self) -> None:
        """Permanently: the process has no other purpose."""
        for owner in (torch.optim.Optimizer, torch.nn.Module):
            self._watch_zeroing(owner)
        register_optimizer_step_pre_hook(self._before_step)
        replace_attributes(torch.autograd.Function, {"apply": told(self.functions)})

    def _watch_zeroing(self, owner: type) -> None:
        """Of calls inside another call of the same function, the outer one counts."""

        def zeroed(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
            self._inside[owner] += 1
            try:
                return original(*args, **kwargs)
            finally:
                self._inside[owner] -= 1
                if not self._inside[owner]:
                    self._events.append(_Event("zero"))

        wrap(owner, "zero_grad", zeroed)

    # --- events -----------------------------------------------------------------------------------------------

    def stepped(self) -> None:
        """An optimizer step of the loop has ended."""
        self._ends.append(len(self._events))

    def clipped(self) -> None:
        """Gradients are clipped."""
        self._events.append(_Event("clip"))

    def _before_step(self, optimizer: torch.optim.Optimizer, *_args: Any) -> None:
        self._events += [_Event("rate", float(group["lr"])) for group in optimizer.param_groups]

    # --- what follows -----------------------------------------------------------------------------------------

    def profile(self, sample: Sample, batches_per_step: int) -> LoopProfile:
        """The profile so far."""
        complete = len(self._ends) > 1
        window = self._events[self._ends[0] : self._ends[1]] if complete else self._events
        happened = Counter(event.kind for event in window)
        steps = (self._events[: self._ends[0]] if complete else [], window)
        return LoopProfile(
            batch_size=sample.batch_size,
            batches_per_step=batches_per_step,
            counts=tuple((kind, happened[kind]) for kind in ("clip", "zero")),
            rates=tuple(tuple(dict.fromkeys(one.what for one in step if one.kind == "rate")) for step in steps),
            batches=batches_of(sample.loader),
        )


def batches_of(loader: Any) -> int | None:
    """The batches of an epoch of a loader; None where they are not known."""
    try:
        return len(loader)
    except (TypeError, NotImplementedError):
        return None
