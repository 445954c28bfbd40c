"""A model's parameters among the blocks of its timeline."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

from vram_guard.compose import CannotComposeError, blocks_of_set_up

if TYPE_CHECKING:
    from torch import nn

    from vram_guard.timeline import Timeline


def blocks_of_parameters(model: nn.Module, modules: Iterable[str], timeline: Timeline) -> dict[str, list[int]]:
    """The blocks that are the parameters of some modules, each module's in their order.

    Args:
        model: as built; its parameters arrive on the GPU in their order, in the precision of the timeline.
        modules: names of modules.
        timeline: of the model's step, with all parameters on the GPU.

    Raises:
        CannotComposeError: the timeline's parameters are not those of the model one by one.
    """
    from vram_guard.simulate.tracing.loop import TRUE_DTYPES

    arrived = [block for block in blocks_of_set_up(timeline) if timeline.blocks[block].category == "parameters"]
    parameters = list(model.parameters())
    if len(arrived) != len(parameters):
        raise CannotComposeError("the parameters on the GPU are not those of the model")
    halved = TRUE_DTYPES.get(timeline.precision)
    for parameter, block in zip(parameters, arrived, strict=True):
        each = parameter.dtype if halved is None or not parameter.is_floating_point() else halved
        if timeline.blocks[block].size.base != parameter.numel() * each.itemsize:
            raise CannotComposeError("the parameters on the GPU have other sizes than those of the model")
    own = {id(parameter): block for parameter, block in zip(parameters, arrived, strict=True)}
    return {name: [own[id(each)] for each in model.get_submodule(name).parameters()] for name in modules}
