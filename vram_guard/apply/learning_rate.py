"""Multiply every learning rate of an optimizer and of its schedulers, in place.

The whole schedule is multiplied: every learning rate at every later step is ``factor`` times what it would
have been. So it equals a run built from the start with all its absolute rates (``lr``, ``max_lr``,
``base_lr``, ``eta_min``, ``min_lr``, ``swa_lr``) multiplied. Thresholds that are compared with learning rates
but are none themselves (``eps`` of ReduceLROnPlateau) stay. What is absolute inside a user's ``lr_lambda``
is multiplied along with the rest.
"""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, Any

from vram_guard.errors import InvalidInputError
from vram_guard.language import _

if TYPE_CHECKING:
    from collections.abc import Callable, Iterable

    from torch.optim import Optimizer

#: Learning rates that torch keeps in a parameter group: OneCycleLR adds max_lr and min_lr, SWALR swa_lr.
GROUP_KEYS = ("lr", "initial_lr", "max_lr", "min_lr", "swa_lr")

#: Learning rates that torch's schedulers keep on themselves, alone or as a list by parameter group.
SCHEDULER_ATTRIBUTES = (
    *("base_lrs", "_last_lr", "max_lrs", "min_lrs", "default_min_lr", "eta_min"),
    *("base_values", "_last_value", "eta_max", "min_values"),  # MMEngine's _ParamScheduler
)


def scale_learning_rates(optimizer: Optimizer, schedulers: Iterable[Any], factor: float) -> tuple[str, ...]:
    """Multiply the learning rates of ``optimizer`` and of all its ``schedulers`` by ``factor``.

    Call it after a checkpoint was restored (a restore brings the old rates back), and once: it knows nothing
    of earlier calls. Schedulers inside others (SequentialLR, ChainedScheduler, a wrapper's ``scheduler``) are
    found; what is handed in twice is multiplied once.

    Args:
        optimizer: any optimizer with ``param_groups``; a wrapper with ``.optimizer`` works.
        schedulers: the schedulers that drive it; they may be at any step.
        factor: a positive, finite number.

    Returns:
        What could not be scaled, in words; empty when everything was.

    Raises:
        InvalidInputError: the factor is not a positive finite number. Nothing is changed then.
    """
    if not _is_number(factor) or not math.isfinite(factor) or factor <= 0:
        raise InvalidInputError(
            _("the learning rate factor must be a positive finite number, not {value}", value=repr(factor))
        )
    times = _Multiplier(float(factor))
    left_out = [
        _("parameter group {index} has no learning rate of its own (lr={lr})", index=index, lr=repr(group.get("lr")))
        for index, group in enumerate(optimizer.param_groups)
        if not times.scalable(group.get("lr"))
    ]
    groups = [*optimizer.param_groups]
    defaults = getattr(optimizer, "defaults", None)
    if isinstance(defaults, dict):
        groups.append(defaults)  # groups that are added later take their rate from here
    for group in groups:
        for key in GROUP_KEYS:
            if key in group:
                group[key] = times(group[key])
    left_out += [
        _("no learning rates were recognised in {scheduler}", scheduler=type(scheduler).__name__)
        for scheduler in flattened(schedulers)
        if not _scale_scheduler(scheduler, times)
    ]
    return tuple(left_out)


class _Multiplier:
    """Multiplies numbers by value and tensors in place, each tensor once.

    Optimizers hand one and the same learning-rate tensor to all their groups, and to their defaults.
    """

    def __init__(self, factor: float) -> None:
        self._factor = factor
        # The tensors themselves, not only their ids: an id may be given anew once its tensor is gone.
        self._done: dict[int, Any] = {}

    @staticmethod
    def scalable(value: Any) -> bool:
        return hasattr(value, "mul_") or _is_number(value)

    def __call__(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self(item) for item in value)
        if not self.scalable(value):
            return value
        if not hasattr(value, "mul_"):
            return value * self._factor
        if id(value) not in self._done:
            self._done[id(value)] = value
            value.detach().mul_(self._factor)
        return value


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _scale_scheduler(scheduler: Any, times: Callable[[Any], Any]) -> bool:
    """Multiply what one scheduler keeps itself; whether it kept anything."""
    held = [name for name in SCHEDULER_ATTRIBUTES if name in vars(scheduler)]
    for name in held:
        setattr(scheduler, name, times(getattr(scheduler, name)))
    return bool(held)


def flattened(schedulers: Iterable[Any]) -> list[Any]:
    """Every scheduler once, those inside others too; what is wrapped, in place of its wrapper."""
    found: dict[int, Any] = {}
    waiting = list(schedulers)
    while waiting:
        scheduler = waiting.pop(0)
        if id(scheduler) in found:
            continue
        wrapped = vars(scheduler).get("scheduler")
        if wrapped is not None and hasattr(wrapped, "step"):
            waiting.append(wrapped)
            continue
        found[id(scheduler)] = scheduler
        waiting += vars(scheduler).get("_schedulers", ())
    return list(found.values())
