"""Counts of optimizer steps in schedules and callbacks: a larger batch makes each step one of more samples.

They are named, not changed: a number that its author wrote down looks like one that was computed from the length of the
training, which follows the larger batch by itself.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from typing import Any

from vram_guard.apply.learning_rate import flattened

#: What torch's schedulers, and those of others, count in their own steps.
_OF_SCHEDULERS = (
    *("milestones", "_milestones", "step_size", "step_size_up", "step_size_down", "T_max", "T_0", "total_steps"),
    *("total_iters", "warmup_steps", "num_warmup_steps", "warmup_epochs", "patience", "cooldown", "end"),
)

#: Names of counts of steps or iterations in callbacks and hooks.
_OF_CALLBACKS = re.compile(r"_?(every_n(_train)?_(steps|iters)|\w+_(every_n_steps|at_step|steps|iters))")


def of_schedulers(schedulers: Iterable[Any]) -> list[str]:
    """Schedulers with what they count: "MultiStepLR (milestones 100, 200)"; inside others, each by itself."""
    return list(dict.fromkeys(_scheduler(one) for one in flattened(schedulers)))


def _scheduler(scheduler: Any) -> str:
    held = vars(scheduler)
    counts = [f"{name.lstrip('_')} {_numbers(held[name])}" for name in _OF_SCHEDULERS if _is_count(held.get(name))]
    name = type(scheduler).__name__
    return f"{name} ({', '.join(counts)})" if counts else name


def of_callbacks(callbacks: Iterable[Any]) -> Iterator[str]:
    """Attributes that count steps, as "ModelCheckpoint.every_n_train_steps = 100"."""
    for callback in callbacks:
        for name, value in vars(callback).items():
            if _OF_CALLBACKS.fullmatch(name) and type(value) is int and value > 1:
                yield f"{type(callback).__name__}.{name.lstrip('_')} = {value}"


def _is_count(value: Any) -> bool:
    many = list(value) if isinstance(value, list | tuple | dict) else [value]  # MultiStepLR's milestones are a Counter
    return bool(many) and all(isinstance(one, int | float) and not isinstance(one, bool) and one > 1 for one in many)


def _numbers(value: Any) -> str:
    return ", ".join(f"{one:g}" for one in (sorted(value) if isinstance(value, list | tuple | dict) else [value]))
