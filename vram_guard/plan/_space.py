"""The space of options for one training step: what is allowed, what its model offers, what is pinned."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING

from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.limits import MOST_FROZEN, MOST_SLICES
from vram_guard.plan._option import Option
from vram_guard.plan.search_space import BlockPrefix, SlicePrefix, Space
from vram_guard.plan.techniques import FORMS, splits_of
from vram_guard.techniques.recipe import AS_WRITTEN, Body, Recipe, Sharding

if TYPE_CHECKING:
    from torch import nn

    from vram_guard.plan._cost_model import CostModel
    from vram_guard.plan.pins import Pins


@dataclass(frozen=True)
class Parts:
    """The parts of a model that techniques can be applied to."""

    blocks: tuple[str, ...] = ()
    """Modules that can be checkpointed or offloaded, in the order of their forward."""
    saved: Mapping[str, int] = field(default_factory=dict)
    """Bytes that each block keeps for the backward pass, at the batch size that was asked for."""
    recompute: Mapping[str, float] = field(default_factory=dict)
    """Seconds of each block's forward."""
    offload: Mapping[str, float] = field(default_factory=dict)
    """Seconds to bring each block's saved bytes to the host and back."""
    frozen: tuple[str, ...] = ()
    """Frozen modules, the largest first."""
    impure: frozenset[str] = frozenset()
    """Blocks whose forward must not run twice."""
    head: str = ""
    """The layer whose logits, and their loss, may be computed in chunks; "": there is none."""
    body: Body | None = None
    """The module that may run over slices of its batch; None: none is known."""
    keeps: tuple[str, ...] = ()
    """Operators whose results are worth keeping where blocks are checkpointed, most seconds for a byte first."""

    @property
    def saving(self) -> tuple[str, ...]:
        """The blocks that keep something for the backward pass; treating the others (frozen ones) is no use."""
        return tuple(block for block in self.blocks if self.saved.get(block, 1) > 0)

    @property
    def checkpointable(self) -> tuple[str, ...]:
        """The blocks whose forward may run twice."""
        return tuple(block for block in self.blocks if block not in self.impure)


def parts_of(
    model: nn.Module,
    cost_model: CostModel,
    blocks: Iterable[str] | None,
    impure: frozenset[str] = frozenset(),
    body: Body | None = None,
) -> Parts:
    """The parts of the model that techniques can be applied to.

    Args:
        model: of the step.
        cost_model: prices of this step.
        blocks: the modules that may be treated; None: the repeated ones.
        impure: modules whose forward must not run twice.
        body: the module that may run over slices of its batch; None: none is known.

    Raises:
        InvalidInputError: ``blocks`` names modules that the model does not have.
    """
    from vram_guard.techniques.blocks import find_blocks, named_blocks
    from vram_guard.techniques.frozen import frozen_candidates

    def bytes_of(name: str) -> int:
        return sum(p.numel() * p.element_size() for p in model.get_submodule(name).parameters())

    found = find_blocks(model) if blocks is None else named_blocks(model, blocks)
    names = tuple(block.name for block in found)
    frozen = sorted(frozen_candidates(model), key=bytes_of, reverse=True)
    head, keeps = cost_model.logits_layer(), cost_model.worth_keeping(names)
    return Parts(names, *cost_model.of_blocks(names), tuple(frozen), impure, head, body, keeps)


def space_of(
    batch_size: int,
    precisions: tuple[str, ...],
    techniques: frozenset[str],
    parts: Parts,
    pins: Pins,
    *,
    trains: bool,
    backward: bool = True,
    shardings: Iterable[Sharding] = (),
    incompatible: Callable[[Option], str] = lambda _option: "",
) -> Space:
    """Every option that is allowed for this step.

    Args:
        batch_size: samples that the loader delivers at once.
        precisions: the step's own first, then those that may replace it.
        techniques: what is allowed.
        parts: what the model offers.
        pins: what is fixed.
        trains: whether there is an optimizer.
        backward: whether there is a backward pass, for which forwards keep something.
        shardings: other ways to divide the step over its processes that may be chosen.
        incompatible: why an option cannot run in this step ("" where it can).

    Raises:
        InvalidInputError: a pin asks for more than the model has.
    """
    if pins.precision is not None:
        precisions = (pins.precision,)
    return Space(
        precisions=precisions,
        splits=tuple(_splits(batch_size, techniques, pins, trains=trains)),
        recipes=tuple(
            recipe.with_(sharding=sharding)
            for sharding in (None, *shardings)
            for recipe in dict.fromkeys(_recipes(techniques, parts, pins, trains=trains))
        ),
        prefixes=(*_prefixes(techniques, parts, pins), *_slices(batch_size, techniques, parts, pins))
        if backward
        else (),
        incompatible=lambda option: _form_on_host(option.recipe) or incompatible(option),
        blocks=len(parts.saving),
    )


def _splits(batch_size: int, techniques: frozenset[str], pins: Pins, *, trains: bool) -> Iterator[int]:
    if pins.micro_batch_size is not None:
        yield batch_size // pins.micro_batch_size
        return
    yield 1
    if trains and "accumulate" in techniques:
        yield from splits_of(batch_size)


def _recipes(techniques: frozenset[str], parts: Parts, pins: Pins, *, trains: bool) -> Iterator[Recipe]:
    """Every recipe of whole-model techniques, over the pinned blocks."""
    base = AS_WRITTEN.with_(
        checkpoint=_pinned("checkpoint", pins.checkpoint, parts.checkpointable),
        checkpoint_keeps=pins.checkpoint_keeps or (),
        offload_activations=_pinned("offload_activations", pins.offload_activations, parts.blocks),
    )
    forms = [pins.optimizer] if pins.optimizer else _forms(techniques, trains=trains)
    on_host = _switch(pins.optimizer_on_host, allowed=trains and "offload_optimizer" in techniques)
    sharded = _switch(pins.parameters_on_host, allowed=trains and "offload_parameters" in techniques)
    others = (
        _switch(pins.optimizer_in_backward, allowed=trains and "optimizer_in_backward" in techniques),
        _switch(_pinned_head(pins, parts), allowed=bool(parts.head) and "chunked_loss" in techniques),
        _switch(pins.expandable_segments, allowed="expandable_segments" in techniques),
    )
    choices = (_frozen(techniques, parts, pins), forms, on_host, sharded, *others)
    for frozen, form, optimizer, parameters, in_backward, chunked, expandable in product(*choices):
        if parameters and form == "for-loop" and pins.optimizer is None:
            continue  # the optimizer steps on the host: without foreach nothing on the GPU would be less
        yield base.with_(
            frozen_on_host=frozen,
            optimizer=form,
            optimizer_on_host=optimizer,
            parameters_on_host=(parts.blocks or ("",)) if parameters else (),
            optimizer_in_backward=in_backward,
            chunked_head=parts.head if chunked else "",
            expandable_segments=expandable,
        )


def _pinned_head(pins: Pins, parts: Parts) -> bool | None:
    if pins.chunked_loss and not parts.head:
        raise InvalidInputError(
            _(
                "pin: chunked_loss is True, but no layer was found whose logits go into a cross-entropy over as many "
                "classes"
            )
        )
    return pins.chunked_loss


def _forms(techniques: frozenset[str], *, trains: bool) -> list[str]:
    return ["as-written", *(form for form, name in FORMS.items() if trains and name in techniques)]


def _switch(pin: bool | None, *, allowed: bool) -> tuple[bool, ...]:
    if pin is not None:
        return (pin,)
    return (False, True) if allowed else (False,)


def _frozen(techniques: frozenset[str], parts: Parts, pins: Pins) -> list[tuple[str, ...]]:
    if pins.frozen_on_host is not None:
        return [_pinned("frozen_on_host", pins.frozen_on_host, parts.frozen)]
    if "offload_frozen" not in techniques or not parts.frozen:
        return [()]
    if len(parts.frozen) > MOST_FROZEN:
        return [(), parts.frozen]
    return [parts.frozen[:count] for count in range(len(parts.frozen) + 1)]


def _pinned(name: str, pin: tuple[str, ...] | int | str | None, modules: tuple[str, ...]) -> tuple[str, ...]:
    """The modules that a pin names."""
    if pin in (None, "none", 0):
        return ()
    if pin == "all":
        if not modules:
            raise InvalidInputError(
                _("pin: {name} is 'all', but the model has no module that it could apply to; name modules", name=name)
            )
        return modules
    if isinstance(pin, int):
        if pin > len(modules):
            raise InvalidInputError(
                _(
                    "pin: {name} asks for {wanted} blocks, the model has {count}",
                    name=name,
                    wanted=pin,
                    count=len(modules),
                )
            )
        return modules[:pin]
    assert isinstance(pin, tuple)
    return pin


def _prefixes(techniques: frozenset[str], parts: Parts, pins: Pins) -> Iterator[BlockPrefix]:
    pinned = {
        *_pinned("checkpoint", pins.checkpoint, parts.checkpointable),
        *_pinned("offload_activations", pins.offload_activations, parts.blocks),
    }
    blocks = tuple(block for block in parts.saving if block not in pinned)
    checkpoints = "checkpoint" in techniques and pins.checkpoint is None
    offloads = "offload_activations" in techniques and pins.offload_activations is None
    pure = tuple(block for block in blocks if block not in parts.impure)
    if checkpoints and pure:
        orders = tuple(dict.fromkeys(_orders(pure, parts)))
        yield from (BlockPrefix("checkpoint", order, tuple(pins.checkpoint_keeps or ())) for order in orders)
        if "selective_checkpoint" in techniques and parts.keeps and pins.checkpoint_keeps is None:
            # The one that takes longest for its bytes needs the least memory, all of them the least time.
            for keeps in dict.fromkeys((parts.keeps[:1], parts.keeps)):
                yield BlockPrefix("checkpoint", orders[0], keeps)
    if offloads and blocks:
        yield BlockPrefix("offload_activations", blocks)
    mixes = checkpoints and offloads and not pins.checkpoint_keeps
    if mixes and len(pure) > 1 and _recompute_is_cheaper(pure, parts):
        yield BlockPrefix("both", pure)


def _slices(batch_size: int, techniques: frozenset[str], parts: Parts, pins: Pins) -> Iterator[SlicePrefix]:
    """Slices of the body: halves, quarters, ..., where no block is pinned to be treated."""
    if "slices" not in techniques or parts.body is None or any((pins.checkpoint, pins.offload_activations)):
        return
    total = 2
    while total <= min(batch_size, MOST_SLICES):
        yield SlicePrefix(parts.body, total)
        total *= 2


def _orders(blocks: tuple[str, ...], parts: Parts) -> Iterator[tuple[str, ...]]:
    """The order in which blocks are checkpointed: most bytes for a second of recomputing first, or largest first.

    Equal blocks in the order of their forward: the first ones are recomputed last, when all later blocks' activations
    are gone, so that they raise the peak least.
    """

    def per_second(block: str) -> float:
        seconds = parts.recompute.get(block, 0.0)
        # Two digits: what differs by less is the same kind of block.
        return -float(f"{parts.saved.get(block, 0) / seconds:.1e}") if seconds else 0.0

    yield tuple(sorted(blocks, key=per_second))
    yield tuple(sorted(blocks, key=lambda block: -float(f"{parts.saved.get(block, 0):.1e}")))


def _recompute_is_cheaper(blocks: tuple[str, ...], parts: Parts) -> bool:
    # Otherwise offloading a block is better in both ways, and the mixture has no sense.
    return all(parts.recompute.get(block, 0.0) <= parts.offload.get(block, 0.0) for block in blocks)


def _form_on_host(recipe: Recipe) -> str:
    """The reason why another form of the optimizer is useless ("" where it is useful)."""
    on_host = recipe.optimizer_on_host and recipe.optimizer != "as-written"
    if on_host or (recipe.parameters_on_host and recipe.optimizer in ("fused", "8bit")):
        return _("an optimizer on the host has no other form")
    return ""
