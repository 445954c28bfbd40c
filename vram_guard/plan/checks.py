"""Checks of what a user asks for that plans and every framework's settings have in common; they do no work."""

from __future__ import annotations

from typing import Literal, get_args

from vram_guard.budget import Budget
from vram_guard.checks import one_of
from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.limits import LEAST_BUDGET
from vram_guard.plan.learning_rate import LEARNING_RATE_RULES
from vram_guard.units import without_unit, written_bytes

Mode = Literal["fit", "report", "strict"]
MODES: tuple[str, ...] = get_args(Mode)
LONGEST: tuple[str, ...] = ("largest", "first")


def check_amounts(
    budget: Budget | str | int | None,
    gpu: str | None,
    margin: float | None,
    host_budget: str | int | None,
    gpu_memory: str | float | None = None,
) -> None:
    """Check that these amounts of memory can be read; the device is not queried.

    Raises:
        InvalidInputError: one of them makes no sense, or the GPU is not known.
    """
    from vram_guard.budget import Budget
    from vram_guard.budget.budget import checked_margin

    check_unit(budget)
    if margin is not None:
        checked_margin(margin)
    if budget is not None or gpu is not None or gpu_memory is not None:
        Budget.resolve(budget, gpu, margin, gpu_memory=gpu_memory)
    check_unit(host_budget, "host_budget")
    if host_budget is not None:
        written_bytes(host_budget, "host_budget")


def check_unit(amount: object, name: str = "budget") -> None:
    """Check that a number is one of bytes.

    Raises:
        InvalidInputError: it is so small that a unit is meant: 24, for GiB.
    """
    if isinstance(amount, int) and 0 < amount < LEAST_BUDGET:
        raise without_unit(amount, name)


def check_growth(target_utilization: object, lr_rule: object) -> None:
    """Check the settings with which a batch may grow.

    Raises:
        InvalidInputError: a share outside (0, 1], or an unknown rule.
    """
    # Annotations are not enforced; a comparison with NaN is false.
    share = target_utilization
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 < share <= 1:
        raise InvalidInputError(
            _("target_utilization must be above 0 and at most 1 (0.8 for 80%), not {value}", value=repr(share))
        )
    one_of("lr_rule", lr_rule, LEARNING_RATE_RULES)


def check_longest(longest: object) -> None:
    """Check which batch is to be planned for.

    Raises:
        InvalidInputError: the word is not known.
    """
    one_of("longest", longest, LONGEST)


def check_seconds(name: str, seconds: object) -> None:
    """Check a time limit.

    Raises:
        InvalidInputError: no number of seconds above 0.
    """
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < float("inf"):
        raise InvalidInputError(
            _("{name} must be a number of seconds above 0, not {value}", name=name, value=repr(seconds))
        )


def check_cudnn(cudnn: object) -> None:
    """Check the cuDNN that is to be asked for workspaces.

    Raises:
        InvalidInputError: it is neither a word that is known nor a file, or none is installed that could be asked.
    """
    if cudnn is not None:
        from vram_guard.simulate.operators.cudnn_choice import checked_choice

        checked_choice(cudnn)


def check_mode(mode: object) -> None:
    """Check a guard's mode.

    Raises:
        InvalidInputError: it is none of :data:`MODES`.
    """
    one_of("mode", mode, MODES)


def check_loss_weight(loss_weight: object) -> None:
    """Check the weighting of micro-batch losses, see :data:`vram_guard.apply.loss_weight.LossWeight`.

    Raises:
        InvalidInputError: it is neither a known word nor a function.
    """
    if not callable(loss_weight) and loss_weight not in ("auto", "mean", "sum"):
        value = repr(loss_weight)
        raise InvalidInputError(
            _("loss_weight must be 'auto', 'mean', 'sum' or a function of the batch, not {value}", value=value)
        )


def check_switches(**switches: object) -> None:
    """Check that each is on or off.

    Raises:
        InvalidInputError: one is something else; names it.
    """
    for name, value in switches.items():
        if not isinstance(value, bool):
            raise InvalidInputError(_("{name} must be True or False, not {value}", name=name, value=repr(value)))
