"""An optimizer like a given one, over other weights."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from vram_guard.errors import InvalidInputError
from vram_guard.language import _

if TYPE_CHECKING:
    import torch

#: What torch keeps of hooks on an optimizer.
_HOOKS = frozenset(
    f"_optimizer_{of}_{when}_hooks" for of in ("step", "state_dict", "load_state_dict") for when in ("pre", "post")
)


def optimizer_over(optimizer: torch.optim.Optimizer, weights: Sequence[list[Any]]) -> torch.optim.Optimizer:
    """The same optimizer over other weights, before its first step and without what is hooked to it.

    Args:
        optimizer: stays as it is.
        weights: by group.
    """
    own = {name: value for name, value in vars(optimizer).items() if name != "step" and name not in _HOOKS}
    groups = [
        {**{name: copy.deepcopy(value) for name, value in group.items() if name != "params"}, "params": held}
        for group, held in zip(optimizer.param_groups, weights, strict=True)
    ]
    twin: torch.optim.Optimizer = object.__new__(type(optimizer))
    twin.__setstate__({**own, "state": defaultdict(dict), "param_groups": groups})
    twin.defaults = dict(optimizer.defaults)
    return twin


def maker_of(optimizer: torch.optim.Optimizer, model: torch.nn.Module) -> Callable[[Any], torch.optim.Optimizer]:
    """What makes an optimizer like this one, as a TrainingStep has it: over what its model's weights are by then.

    Args:
        optimizer: over weights of the model; stays as it is.
        model: whose weights are others while it is traced.

    Raises:
        InvalidInputError: the optimizer has weights that are not the model's, or keeps weights or another optimizer
            besides its groups (LBFGS, SAM).

    Example:
        >>> net = torch.nn.Linear(4, 4)
        >>> make = maker_of(torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9), net)
        >>> make(net.parameters()).defaults["momentum"]
        0.9
    """
    import torch
    from torch.utils import _pytree as pytree

    wrapped: Any = getattr(optimizer, "optimizer", None)
    if "param_groups" not in vars(optimizer) and isinstance(wrapped, torch.optim.Optimizer):  # as Accelerate wraps it
        optimizer = wrapped
    names = {id(weight): name for name, weight in model.named_parameters()}
    if any(id(weight) not in names for group in optimizer.param_groups for weight in group["params"]):
        raise InvalidInputError(
            _("the optimizer has parameters that are not the model's: make it of model.parameters()")
        )
    beside = [value for name, value in vars(optimizer).items() if name not in ("param_groups", "state", "defaults")]
    if any(isinstance(leaf, torch.optim.Optimizer) or id(leaf) in names for leaf in pytree.tree_leaves(beside)):
        raise InvalidInputError(
            _(
                "{optimizer} keeps weights or another optimizer besides its groups: give a function parameters -> "
                "optimizer",
                optimizer=type(optimizer).__name__,
            )
        )
    groups = [[names[id(weight)] for weight in group["params"]] for group in optimizer.param_groups]

    def make(_parameters: Any) -> torch.optim.Optimizer:
        weights = dict(model.named_parameters())
        return optimizer_over(optimizer, [[weights[name] for name in group] for group in groups])

    return make
