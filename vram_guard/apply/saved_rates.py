"""Learning rates in a checkpoint: as they were written, whatever a run with a larger batch trains with.

A run whose batch the guard has grown trains with rates that were multiplied. Its checkpoints hold them divided again,
in the states of the optimizers and of the schedulers: resumed without the guard, rates and batch are both as written.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from vram_guard.apply.learning_rate import GROUP_KEYS, SCHEDULER_ATTRIBUTES
from vram_guard.language import _

State = dict[str, Any]


def divided_optimizer(state: Mapping[str, Any], factor: float) -> State:
    """A copy of an optimizer's ``state_dict()`` with its learning rates divided; the optimizer's own stay."""
    changed = {**state, "param_groups": [_divided(group, GROUP_KEYS, factor) for group in state["param_groups"]]}
    base = state.get("base_param_settings")  # MMEngine's, for parameters that no group has
    return changed if base is None else {**changed, "base_param_settings": _divided(base, GROUP_KEYS, factor)}


def divided_schedulers(schedulers: Iterable[Any], states: Sequence[State], factor: float) -> list[State] | None:
    """Copies of schedulers' ``state_dict()`` with their learning rates divided.

    Args:
        schedulers: whose rates were multiplied by :func:`vram_guard.apply.learning_rate.scale_learning_rates`.
        states: their states, in the same order.
        factor: the factor.

    Returns:
        None where a scheduler keeps its rates under other names in its state: those cannot be divided.
    """
    made = [_scheduler(one, state, factor) for one, state in zip(schedulers, states, strict=True)]
    found = [state for state in made if state is not None]
    return found if len(found) == len(made) else None


def _scheduler(scheduler: Any, state: Any, factor: float) -> State | None:
    if not isinstance(state, dict):
        return None
    wrapped = vars(scheduler).get("scheduler")
    if wrapped is not None and hasattr(wrapped, "step"):
        inner = state.get("scheduler", state)
        made = _scheduler(wrapped, inner, factor)
        return made if made is None or inner is state else {**state, "scheduler": made}
    held = [name for name in SCHEDULER_ATTRIBUTES if name in vars(scheduler)]
    if any(name not in state for name in held):
        return None
    changed = _divided(state, held, factor)
    if own := vars(scheduler).get("_schedulers"):
        inner = state.get("_schedulers")
        if not isinstance(inner, list) or len(inner) != len(own):
            return None
        parts = divided_schedulers(own, inner, factor)
        if parts is None:
            return None
        changed["_schedulers"] = parts
    return changed


def _divided(values: Mapping[str, Any], names: Iterable[str], factor: float) -> State:
    return {**values, **{name: _quotient(values[name], factor) for name in names if name in values}}


def _quotient(value: Any, factor: float) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_quotient(item, factor) for item in value)
    if hasattr(value, "detach"):
        return value.detach() / factor
    return value / factor if isinstance(value, int | float) and not isinstance(value, bool) else value


def still_multiplied(factor: float) -> str:
    """The warning where rates of a grown run are restored and nothing divides them."""
    return _(
        "the learning rates in this checkpoint are {factor} times those that were written: it was saved by a run whose "
        "batch the guard had grown. They are divided again in mode 'fit' only; train with that batch size, or divide "
        "them yourself",
        factor=f"{factor:g}",
    )
