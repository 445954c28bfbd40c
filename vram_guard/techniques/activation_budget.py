"""Compiled code that saves less for its backward pass, and computes the rest again: a setting of torch's partitioner.

AOTAutograd divides the graph of forward and backward pass; how much it may save for the backward pass is
``torch._functorch.config.activation_memory_budget``, a share of what it would save by itself (a 0-1 knapsack over the
operators that it would compute again, ``torch/_functorch/partitioners.py``, ``choose_saved_values_set``).
"""

from __future__ import annotations

import sys
from collections.abc import Callable

import torch

from vram_guard.errors import UnsupportedTechniqueError
from vram_guard.language import _

_NAME = "activation_memory_budget"


def why_not_budgeted() -> str:
    """The reason why this torch does not know the setting; "" where it does."""
    import torch._functorch.config as settings

    if hasattr(settings, _NAME):
        return ""
    return _("torch {version} has no {names}", version=torch.__version__, names=f"torch._functorch.config.{_NAME}")


def present_budget() -> float:
    """The share that the process saves as it is, 1.0 unless somebody has set it."""
    import torch._functorch.config as settings

    return float(getattr(settings, _NAME))


def limit_saved(share: float) -> Callable[[], None]:
    """Let what is compiled from here on save no more than this share.

    What was compiled before is compiled anew when it is called, here and once more after it is taken back.

    Args:
        share: of the activations that compiled code saves by itself, between 0 and 1.

    Returns:
        A function that puts the setting back.

    Raises:
        UnsupportedTechniqueError: this torch does not know the setting.
    """
    import torch._functorch.config as settings

    if why := why_not_budgeted():
        raise UnsupportedTechniqueError(why)
    before = getattr(settings, _NAME)
    _set(share)

    return lambda: _set(before)


def _set(share: float) -> None:
    import torch._functorch.config as settings

    setattr(settings, _NAME, share)
    if "torch._dynamo.eval_frame" in sys.modules:  # else nothing has been compiled, and the compiler is slow to import
        torch.compiler.reset()
