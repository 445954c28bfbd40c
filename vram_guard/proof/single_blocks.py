"""Blocks of a model run by themselves, where a whole step is too heavy: as written and as a plan treats them.

What a technique does to a block (compute it twice, keep what it saves or its weights on the host) it does between the
block's call and its backward pass, so one block of a kind stands for all that are equal to it. Its inputs are random
numbers in the shapes that one sample has there.
"""

from __future__ import annotations

import contextlib
import copy
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.utils import _pytree as pytree

from vram_guard.errors import UnsupportedStepError
from vram_guard.language import _
from vram_guard.proof._norms import distance, norm
from vram_guard.proof.differences import TOLERANCES, Difference, Kind
from vram_guard.techniques import install, place
from vram_guard.techniques.cpu_as_gpu import cpu_as_gpu, without_gpu
from vram_guard.techniques.recipe import AS_WRITTEN, Recipe

if TYPE_CHECKING:
    from vram_guard.guard.training import CapturedTraining


@dataclass(frozen=True)
class SingleBlocks:
    """What came of it."""

    kinds: int
    """Kinds of blocks that were run, one of each."""
    techniques: tuple[str, ...] = ()
    """Those that make a difference."""
    difference: Difference | None = None


@dataclass(frozen=True)
class _Call:
    """The first call of a block."""

    inputs: Any
    """Positional and named arguments, with a :class:`_Shape` in place of each tensor."""
    training: bool


@dataclass(frozen=True)
class _Shape:
    shape: tuple[int, ...]
    dtype: torch.dtype
    differentiable: bool

    def made(self) -> torch.Tensor:
        """Random numbers; whole numbers are 0 and masks are True, which every table and every mask admits."""
        if not self.dtype.is_floating_point:
            return torch.full(self.shape, self.dtype == torch.bool, dtype=self.dtype)
        return torch.randn(self.shape, dtype=torch.float64, requires_grad=self.differentiable)


def run_single_blocks(captured: CapturedTraining, recipe: Recipe) -> SingleBlocks:
    """Run one block of each kind both ways; called in a copy of the process, of which nothing is kept.

    Raises:
        UnsupportedStepError: the recipe treats the model as a whole, or a block is not called.
        Exception: whatever the user's code raises.
    """
    checkpoint = "selective_checkpoint" if recipe.checkpoint_keeps else "checkpoint"
    of = {checkpoint: recipe.checkpoint, "offload_activations": recipe.offload_activations}
    of["offload_frozen"] = recipe.frozen_on_host
    names = tuple(dict.fromkeys(name for treated in of.values() for name in treated))
    if "" in names:
        raise UnsupportedStepError(_("the plan treats the model as a whole"))
    calls = _first_calls(captured, names)
    kinds: dict[Any, str] = {}
    for name in names:
        if name not in calls:
            raise UnsupportedStepError(_("{block} is not called", block=name))
        treated = tuple(technique for technique, treats in of.items() if name in treats)
        kinds.setdefault((treated, _kind(captured.model.get_submodule(name)), str(calls[name])), name)
    for (treated, *_rest), name in kinds.items():
        found = _difference(captured.model, name, calls[name], _alone(recipe, name))
        if found is not None:
            return SingleBlocks(len(kinds), treated, found)
    return SingleBlocks(len(kinds))


def _first_calls(captured: CapturedTraining, names: tuple[str, ...]) -> dict[str, _Call]:
    from vram_guard.simulate.tracing.run import run_step

    calls: dict[str, _Call] = {}

    def look(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def called(module: nn.Module, args: Any, kwargs: Any) -> None:
            calls.setdefault(name, _Call(pytree.tree_map_only(torch.Tensor, _shape, (args, kwargs)), module.training))

        return called

    with contextlib.ExitStack() as stack:
        for name in names:
            handle = captured.model.get_submodule(name).register_forward_pre_hook(look(name), with_kwargs=True)
            stack.callback(handle.remove)
        with captured.symbolic_run():
            run_step(captured.step.with_(job=None, recipe=AS_WRITTEN), 1, (8, 0), steps=1)
    return calls


def _shape(tensor: torch.Tensor) -> _Shape:
    return _Shape(tuple(tensor.shape), tensor.dtype, tensor.requires_grad)


def _kind(block: nn.Module) -> tuple[object, ...]:
    """What equal blocks have in common: their modules, and the shapes of their tensors."""
    tensors = (*block.named_parameters(), *block.named_buffers())
    shapes = ((name, tuple(tensor.shape), tensor.requires_grad) for name, tensor in tensors)
    return (*((name, type(part), part.extra_repr()) for name, part in block.named_modules()), *shapes)


def _alone(recipe: Recipe, name: str) -> Recipe:
    def within(names: tuple[str, ...]) -> tuple[str, ...]:
        return tuple(one for one in names if f"{one}.".startswith(f"{name}."))

    return AS_WRITTEN.with_(
        checkpoint=within(recipe.checkpoint),
        checkpoint_keeps=recipe.checkpoint_keeps,
        offload_activations=within(recipe.offload_activations),
        frozen_on_host=within(recipe.frozen_on_host),
    )


def _difference(model: nn.Module, name: str, call: _Call, recipe: Recipe) -> Difference | None:
    block = model.get_submodule(name).double().train(call.training)
    before = copy.deepcopy(block.state_dict())
    written = _run(block, call)
    block.load_state_dict(before)
    with cpu_as_gpu(recipe), without_gpu():
        _keep.extend((place(model, recipe, "cpu"), install(model, recipe)))
        changed = _run(block, call)
    for (part, one), (other_part, other) in zip(written, changed, strict=True):
        apart = distance(one, other) / (norm(one) or 1.0)
        if part != other_part or apart > TOLERANCES[torch.float64]:
            return Difference(Kind.GRADIENT, f"{name}.{part}", apart)
    return None


#: What takes a technique off is kept to the end of the process, which is a copy's.
_keep: list[Callable[[], None]] = []


def _run(block: nn.Module, call: _Call) -> list[tuple[str, torch.Tensor]]:
    """Results, gradients of inputs and weights, and buffers."""
    _seed()
    block.zero_grad()
    args, kwargs = pytree.tree_map_only(_Shape, _Shape.made, call.inputs)
    found = [one for one in pytree.tree_leaves(block(*args, **kwargs)) if isinstance(one, torch.Tensor)]
    differentiable = [one for one in found if one.requires_grad]
    if differentiable:
        torch.autograd.backward(differentiable, [torch.randn_like(one) for one in differentiable])
    inputs = [one for one in pytree.tree_leaves((args, kwargs)) if isinstance(one, torch.Tensor)]
    return [
        *((_("result"), one.detach()) for one in found),
        *((_("input"), one.grad) for one in inputs if one.grad is not None),
        *((part, one.grad.clone()) for part, one in block.named_parameters() if one.grad is not None),
        *((part, one.detach().clone()) for part, one in (*block.named_parameters(), *block.named_buffers())),
    ]


def _seed() -> None:
    torch.manual_seed(0)
    random.seed(0)
    if "numpy" in sys.modules:
        sys.modules["numpy"].random.seed(0)
