"""Scaling of the learning rate with the effective batch size (pure arithmetic, no torch)."""

from __future__ import annotations

import math
from typing import Literal, get_args

from vram_guard.checks import checked_count, one_of

LearningRateRule = Literal["linear", "sqrt", "none", "auto"]
LEARNING_RATE_RULES: tuple[str, ...] = get_args(LearningRateRule)


#: Parts of the names of optimizers that divide by a running size of the gradient, or take its sign: their step does not
#: grow with the gradient (Li et al. 2024, arXiv:2405.14578, list Adam, Adagrad, RMSprop, Adafactor and Lion).
_LIKE_ADAM = ("adam", "adagrad", "rmsprop", "adafactor", "adadelta", "lion", "lamb")


def like_adam(optimizer: str) -> bool:
    """True for the name of an Adam-like optimizer's class."""
    return any(part in optimizer.lower() for part in _LIKE_ADAM)


def rule_for(rule: str, optimizer: str) -> str:
    """The rule that "auto" stands for: "sqrt" for Adam-like optimizers, "linear" for all others.

    Example:
        >>> rule_for("auto", "AdamW"), rule_for("auto", "SGD"), rule_for("linear", "AdamW")
        ('sqrt', 'linear', 'linear')
    """
    if rule != "auto":
        return rule
    return "sqrt" if like_adam(optimizer) else "linear"


def learning_rate_factor(rule: str, before: int, after: int, optimizer: str = "") -> float:
    """The factor for every learning rate when the effective batch size changes.

    With ``k = after / before``: "linear" gives k (Goyal et al. 2017, "Accurate, Large Minibatch SGD",
    sec. 2.1; derived for SGD), "sqrt" gives the square root of k (Krizhevsky 2014, arXiv:1404.5997, sec. 5;
    Malladi et al. 2022 derive it for Adam and RMSprop), "none" gives 1, "auto" is :func:`rule_for`'s choice.

    Args:
        rule: one of :data:`LEARNING_RATE_RULES`.
        before: samples per optimizer step that the present learning rate was chosen for.
        after: samples per optimizer step from now on.
        optimizer: name of the optimizer's class, for "auto".

    Raises:
        InvalidInputError: an unknown rule, or a batch size that is not a positive whole number.
    """
    one_of("lr_rule", rule, LEARNING_RATE_RULES)
    rule = rule_for(rule, optimizer)
    k = checked_count("effective batch size", after) / checked_count("effective batch size", before)
    if rule == "linear":
        return k
    if rule == "sqrt":
        return math.sqrt(k)
    return 1.0
