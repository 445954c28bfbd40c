"""Pins: the parts of a plan that the user has fixed."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, fields
from typing import Any

from vram_guard.checks import known_names, one_of
from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.plan.checks import check_switches
from vram_guard.plan.techniques import BFLOAT16_SINCE
from vram_guard.step import PRECISIONS, checked_count
from vram_guard.techniques.kept import checked_operators
from vram_guard.techniques.recipe import OPTIMIZER_FORMS

_SWITCHES = ("optimizer_on_host", "parameters_on_host", "optimizer_in_backward", "chunked_loss", "expandable_segments")


@dataclass(frozen=True)
class Pins:
    """Parts of the plan that the search may not choose; None: free. A pin holds even if its technique is not allowed.

    Attributes:
        precision: one of :data:`vram_guard.step.PRECISIONS`.
        micro_batch_size: samples of a micro-batch; divides the batch.
        checkpoint: module names, how many blocks, "all" (whose forward may run twice) or "none".
        checkpoint_keeps: operators whose results checkpointed blocks keep, of
            :data:`vram_guard.techniques.kept.KEEPABLE`; () or "none": nothing.
        offload_activations: the same as for ``checkpoint``, but "all" is every block.
        frozen_on_host: names of frozen modules, "all" or "none".
        optimizer: one of :data:`vram_guard.techniques.OPTIMIZER_FORMS`.
        optimizer_on_host: whether the optimizer lives in host memory.
        parameters_on_host: whether the parameters do.
        optimizer_in_backward: whether each parameter steps in the backward pass.
        chunked_loss: whether logits and their loss are computed in chunks.
        expandable_segments: whether the allocator's segments grow.
    """

    precision: str | None = None
    micro_batch_size: int | None = None
    checkpoint: tuple[str, ...] | int | str | None = None
    offload_activations: tuple[str, ...] | int | str | None = None
    frozen_on_host: tuple[str, ...] | str | None = None
    optimizer: str | None = None
    optimizer_on_host: bool | None = None
    parameters_on_host: bool | None = None
    optimizer_in_backward: bool | None = None
    chunked_loss: bool | None = None
    expandable_segments: bool | None = None
    checkpoint_keeps: tuple[str, ...] | str | None = None

    @classmethod
    def of(cls, given: Mapping[str, Any] | Pins | None) -> Pins:
        """Pins from a mapping of names to values.

        Raises:
            InvalidInputError: an unknown name, a value that makes no sense, or two pins that contradict each other.
        """
        if given is None:
            return cls()
        if isinstance(given, Pins):
            return given
        if not isinstance(given, Mapping):
            raise InvalidInputError(
                _("pin must be a mapping such as {example}, not {value}", example={"micro_batch_size": 4}, value=given)
            )
        known_names("pin", given, [field.name for field in fields(cls)])
        return cls(**given)

    def __post_init__(self) -> None:
        if self.precision is not None:
            one_of("pin: precision", self.precision, PRECISIONS)
        if self.optimizer is not None:
            one_of("pin: optimizer", self.optimizer, OPTIMIZER_FORMS)
        if self.micro_batch_size is not None:
            checked_count("pin: micro_batch_size", self.micro_batch_size)
        for name in ("checkpoint", "offload_activations", "frozen_on_host"):
            object.__setattr__(self, name, _modules(name, getattr(self, name), counts=name != "frozen_on_host"))
        if self.checkpoint_keeps is not None:
            keeps = () if self.checkpoint_keeps == "none" else self.checkpoint_keeps
            object.__setattr__(self, "checkpoint_keeps", checked_operators("pin: checkpoint_keeps", keeps))
        for name in _SWITCHES:
            if not isinstance(getattr(self, name), bool | None):
                check_switches(**{f"pin: {name}": getattr(self, name)})
        if self.optimizer_on_host and self.parameters_on_host:
            raise InvalidInputError(
                _("pin: parameters_on_host takes the optimizer to the host too; leave optimizer_on_host out")
            )
        if "all" in (self.checkpoint, self.offload_activations) and self.checkpoint == self.offload_activations:
            raise InvalidInputError(_("pin: a block is either checkpointed or offloaded, so not all of them both ways"))

    def check_growth(self) -> None:
        """Check that nothing is fixed that a growing batch would change.

        Raises:
            InvalidInputError: the size of the micro-batches is.
        """
        if self.micro_batch_size is not None:
            raise InvalidInputError(_("pin: micro_batch_size and grow contradict each other: give one of them"))

    def check(self, batch_size: int, capability: tuple[int, int] | None, *, grow: bool, trains: bool) -> None:
        """Check that the pins are consistent with the rest of the request.

        Args:
            batch_size: samples that the loader delivers at once.
            capability: of the GPU; None: unknown.
            grow: whether the batch is to grow.
            trains: whether there is an optimizer.

        Raises:
            InvalidInputError: they contradict it.
        """
        size = self.micro_batch_size
        if size is not None and batch_size % size:
            raise InvalidInputError(
                _(
                    "pin: micro_batch_size {size} does not divide the batch of {batch}, and micro-batches are equal: "
                    "pin {nearest}, or leave the pin out where one guard trains with different batches",
                    size=size,
                    batch=batch_size,
                    nearest=next(n for n in range(min(size, batch_size), 0, -1) if batch_size % n == 0),
                )
            )
        if grow:
            self.check_growth()
        if size is not None and size != batch_size and not trains:
            raise InvalidInputError(_("pin: micro_batch_size needs an optimizer: there are no gradients to accumulate"))
        if self.precision and self.precision.startswith("bf16") and capability and capability < BFLOAT16_SINCE:
            raise InvalidInputError(
                _(
                    "pin: {precision} needs compute capability 8.0 or later, this GPU has {version}; use 16-mixed",
                    precision=self.precision,
                    version=".".join(map(str, capability)),
                )
            )


def _modules(name: str, value: Any, *, counts: bool) -> tuple[str, ...] | int | str | None:
    if value is None or (isinstance(value, str) and value in ("all", "none")):
        return value
    if counts and isinstance(value, int) and not isinstance(value, bool) and value >= 0:
        return value
    if isinstance(value, (list, tuple, set, frozenset)) and all(isinstance(item, str) for item in value):
        return tuple(value)
    said = _("pin: {name} must be module names, 'all' or 'none', not {value}", name=name, value=repr(value))
    if counts:
        said = _(
            "pin: {name} must be module names, how many blocks, 'all' or 'none', not {value}",
            name=name,
            value=repr(value),
        )
    raise InvalidInputError(said)
