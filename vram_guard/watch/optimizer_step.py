"""An optimizer's step that runs out of memory: done again where nothing was changed yet, else a clear error.

torch's optimizers make room for their state, and for temporaries, while they step. Which tensors a broken step
had already changed can be read from autograd's version counters, so nothing is copied beforehand:

- Nothing changed (the state was being made, the first temporaries were asked for): state that this step made is
  thrown away, memory freed, and the step done again parameter by parameter (``foreach=False``), which needs the
  temporaries of one parameter instead of all, and gives the same result.
- Something changed (the weights of a first group, a running average): doing it again would apply the same gradients
  twice. The error says what was changed and names the last checkpoint.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import torch

from vram_guard.errors import RecoveryFailedError
from vram_guard.language import _
from vram_guard.patching import replace_attributes
from vram_guard.tensors import version_of
from vram_guard.watch.memory import drop_traceback, free
from vram_guard.watch.oom import is_out_of_memory
from vram_guard.watch.rank_coordinator import Verdict
from vram_guard.watch.recovery import Recovery


def guard_step(
    optimizer: torch.optim.Optimizer, recovery: Recovery, checkpoint: Callable[[], str] = str
) -> Callable[[], None]:
    """Recover ``optimizer.step`` from out-of-memory errors.

    Args:
        optimizer: its ``step`` is replaced on the instance.
        recovery: counts, tells, and agrees with the other ranks after every step.
        checkpoint: where the last checkpoint is, for the error; "" where there is none.

    Returns:
        The function that undoes it.
    """
    own_step = optimizer.step

    @functools.wraps(own_step)  # schedulers and GradScaler look at attributes and signature of ``step``
    def step(self: torch.optim.Optimizer, closure: Callable[[], Any] | None = None, *args: Any, **kwargs: Any) -> Any:
        return _Step(self, recovery, checkpoint, own_step).run(closure, *args, **kwargs)

    # A method, for schedulers that are made later bind its function anew.
    return replace_attributes(optimizer, {"step": types.MethodType(step, optimizer)})


class _Step:
    """One call of ``optimizer.step``."""

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        recovery: Recovery,
        checkpoint: Callable[[], str],
        own_step: Callable[..., Any],
    ) -> None:
        self._optimizer = optimizer
        self._recovery = recovery
        self._checkpoint = checkpoint
        self._own_step = own_step
        self._closure: Callable[[], Any] | None = None
        self._calls = 0
        """Of the user's closure; LBFGS makes several."""
        self._redoing = False
        self._loss: Any = None
        self._state = _OptimizerState(optimizer)

    def run(self, closure: Callable[[], Any] | None, *args: Any, **kwargs: Any) -> Any:
        """The result of the step, once it is through on all ranks."""
        self._closure = closure
        handed_on = closure if closure is None else functools.partial(self._once, closure)
        if closure is None:
            self._state.remember()
        result: Any = None
        done = False
        while True:
            own = Verdict.FINE
            if not done:
                try:
                    result, done = self._own_step(*(() if handed_on is None else (handed_on,)), *args, **kwargs), True
                except Exception as error:
                    own = self._verdict(error)
                    if own is Verdict.STOPPED:
                        self._recovery.leave(error)
                        if is_out_of_memory(error):
                            raise self._broken() from error
                        raise
                    failure = drop_traceback(error)
                    self._recovery.on_failure(failure)
            verdict = self._recovery.ranks.agree(own).verdict
            if verdict is Verdict.STOPPED:
                raise self._recovery.stopped_elsewhere()
            if verdict is Verdict.FINE:
                return result
            self._again(done=done)

    def _once(self, closure: Callable[[], Any]) -> Any:
        """The user's closure; not run a second time when the step is done again."""
        if self._redoing:
            self._redoing = False
            return self._loss
        self._loss = closure()
        self._calls += 1
        self._state.remember()
        return self._loss

    def _verdict(self, error: Exception) -> Verdict:
        """Judge whether a step that raised can be done again."""
        through = self._closure is None or self._calls == 1
        safe = through and not self._state.changed()
        return Verdict.OUT_OF_MEMORY if safe and is_out_of_memory(error) else Verdict.STOPPED

    def _again(self, *, done: bool) -> None:
        """Make ready to do the step again; all ranks do, so that none computes differently from the others."""
        recovery = self._recovery
        count, too_many = recovery.counted()
        lean = _step_by_parameter(self._optimizer)
        if not done:
            self._state.restore()
            self._redoing = self._closure is not None
        free(recovery.memory)
        if not recovery.ranks.least(int(lean and not too_many)):
            why = _("it already goes parameter by parameter")
            if lean:
                why = _("max_recoveries is {most}", most=recovery.most)
            raise recovery.final(
                _(
                    "out of memory in {where}, and {why}. The weights are those of the last optimizer step.",
                    where=_("the optimizer step of another rank") if done else _("the optimizer step"),
                    why=why,
                )
            )
        recovery.log(
            _(
                "out of memory in the optimizer step before it had changed anything: the step is done again, parameter "
                "by parameter (foreach=False), as are the next ones. Recovery {count} of {most}.",
                count=count,
                most=recovery.most,
            )
        )

    def _broken(self) -> RecoveryFailedError:
        changed = self._state.changed()
        if not changed:
            return self._recovery.final(
                _(
                    "out of memory between backward and the optimizer step (gradient clipping, or a hook). The weights "
                    "are those of the last optimizer step, the gradients may be changed: the step cannot be repeated."
                )
            )
        path = self._checkpoint()
        advice = _("There is no checkpoint to go on from.")
        if path:
            advice = _("Go on from the last checkpoint: {path}", path=path)
        return self._recovery.final(
            _(
                "out of memory inside the optimizer step, which had already changed {changed}. It can neither be "
                "finished nor repeated: the weights may be half-updated. Do not save or use them. {advice}",
                changed=changed,
                advice=advice,
            )
        )


def _step_by_parameter(optimizer: torch.optim.Optimizer) -> bool:
    """Turn ``foreach`` off where it may be on; whether there was anything to turn off."""
    turned = False
    for group in optimizer.param_groups:
        if group.get("foreach", False) is not False and not group.get("fused"):
            group["foreach"] = False
            turned = True
    return turned


class _OptimizerState:
    """Weights, gradients and states of an optimizer, which a step changes in place, by version counters."""

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._before: dict[_Entry, tuple[Any, int]] = {}

    def remember(self) -> None:
        """Now: gradients are complete, nothing of the step is done."""
        tensor = torch.Tensor
        self._before = {
            place: (value, version_of(value) if isinstance(value, tensor) else 0) for place, value in self._entries()
        }

    def changed(self) -> str:
        """Changes since then, in words; "" for none."""
        now = dict(self._entries())
        moved = [place.kind for place, before in self._before.items() if _moved(*before, now.get(place))]
        of = [place.kind for place in self._before]
        names = {"weight": _("weights"), "state": _("optimizer state entries"), "gradient": _("gradients")}
        return ", ".join(
            _("{count} of {of} {name}", count=moved.count(kind), of=of.count(kind), name=name)
            for kind, name in names.items()
            if kind in moved
        )

    def restore(self) -> None:
        """Throw away the state that the failed step made."""
        for place, _value in list(self._entries()):
            if place not in self._before and place.kind == "state":
                del self._optimizer.state[place.owner][place.key]
        for owner in [owner for owner, own in self._optimizer.state.items() if own == {}]:
            del self._optimizer.state[owner]

    def _entries(self) -> Iterator[tuple[_Entry, Any]]:
        for weight in (weight for group in self._optimizer.param_groups for weight in group["params"]):
            yield _Entry("weight", weight), weight
            if weight.grad is not None:
                yield _Entry("gradient", weight), weight.grad
        for owner, own in self._optimizer.state.items():
            if isinstance(own, dict):
                yield from ((_Entry("state", owner, key), value) for key, value in own.items())


class _Entry(NamedTuple):
    """Where an optimizer holds something, or a weight does."""

    kind: str
    owner: Any
    key: Any = None


def _moved(value: Any, version: int, now: Any) -> bool:
    if isinstance(value, torch.Tensor):
        return now is not value or version_of(value) != version
    return bool(now is not value and now != value)
