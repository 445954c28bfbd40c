"""Scaling of the learning rate with the effective batch size (pure arithmetic, no torch)."""

from __future__ import annotations

import math
from typing import Literal, get_args

from vram_guard.checks import checked_count, one_of

LearningRateRule = Literal["linear", "sqrt", "none"]
LEARNING_RATE_RULES: tuple[str, ...] = get_args(LearningRateRule)


def learning_rate_factor(rule: str, before: int, after: int) -> float:
    """The factor for every learning rate when the effective batch size changes.

    With ``k = after / before``: "linear" gives k (Goyal et al. 2017, "Accurate, Large Minibatch SGD",
    sec. 2.1; derived for SGD), "sqrt" gives the square root of k (Krizhevsky 2014, arXiv:1404.5997, sec. 5;
    Malladi et al. 2022 derive it for Adam and RMSprop), "none" gives 1.

    Args:
        rule: one of :data:`LEARNING_RATE_RULES`.
        before: samples per optimizer step that the present learning rate was chosen for.
        after: samples per optimizer step from now on.

    Raises:
        InvalidInputError: an unknown rule, or a batch size that is not a positive whole number.
    """
    one_of("lr_rule", rule, LEARNING_RATE_RULES)
    k = checked_count("effective batch size", after) / checked_count("effective batch size", before)
    if rule == "linear":
        return k
    if rule == "sqrt":
        return math.sqrt(k)
    return 1.0
