"""DistributedDataParallel as a loop's own code makes it, before its model is symbolic: it passes calls on.

What torch's own would do with the model is followed once that is symbolic, see :mod:`.replicas`.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from vram_guard.language import _
from vram_guard.parallel.data_parallel import chosen_options
from vram_guard.state.containers import mapped

#: Arguments that change how gradients are reduced, in ways that are not followed.
_NOT_FOLLOWED = ("mixed_precision", "delay_all_reduce_named_params", "bucket_cap_mb_list")

_original = DistributedDataParallel.__init__


def replacements(refuse: Callable[[str], NoReturn]) -> dict[str, Callable[..., Any]]:
    """Attributes of DistributedDataParallel for a process that stands for one of several ranks.

    Args:
        refuse: ends the process with a reason.

    Example:
        >>> sorted(replacements(print))
        ['__init__', 'forward', 'register_comm_hook']
    """

    def made(wrapper: Any, *args: Any, **kwargs: Any) -> None:
        if hasattr(type(wrapper), "of_a_layout"):  # a trace's own, over pretended ranks
            _original(wrapper, *args, **kwargs)
            return
        given = inspect.signature(_original).bind(wrapper, *args, **kwargs).arguments
        for name in _NOT_FOLLOWED:
            if given.get(name) is not None:
                refuse(_("DistributedDataParallel with {name} is not followed", name=name))
        nn.Module.__init__(wrapper)
        wrapper.module = given["module"]
        wrapper.device_ids = given.get("device_ids")
        wrapper.process_group = given.get("process_group")
        wrapper.require_backward_grad_sync = True
        wrapper.static_graph = bool(given.get("static_graph"))
        wrapper.made_with = chosen_options(given)

    def forward(wrapper: Any, *inputs: Any, **kwargs: Any) -> Any:
        if wrapper.device_ids:
            inputs, kwargs = mapped(inputs, _moved), mapped(kwargs, _moved)
        return wrapper.module(*inputs, **kwargs)

    def hooked(*_args: Any, **_kwargs: Any) -> NoReturn:
        refuse(_("the script chose how DistributedDataParallel sends gradients (comm_hook), which is not followed"))

    return {"__init__": made, "forward": forward, "register_comm_hook": hooked}


def _moved(leaf: Any) -> Any:
    return leaf.to("cuda") if isinstance(leaf, torch.Tensor) else leaf


def replicas_in(model: nn.Module) -> list[tuple[nn.Module, Mapping[str, Any]]]:
    """The modules that such wrappers hold, each with the wrapper's arguments.

    Example:
        >>> replicas_in(nn.Linear(2, 2))
        []
    """
    found = [part for part in model.modules() if isinstance(part, DistributedDataParallel)]
    return [(part.module, vars(part)["made_with"]) for part in found if "made_with" in vars(part)]
