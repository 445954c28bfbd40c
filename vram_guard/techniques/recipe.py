"""Recipe: how a training step is run, beyond what its author wrote."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.techniques.kept import checked_operators

OptimizerForm = Literal["as-written", "fused", "for-loop", "8bit"]
OPTIMIZER_FORMS: tuple[str, ...] = get_args(OptimizerForm)


@dataclass(frozen=True)
class Sharding:
    """Changes of how a training is divided over its processes, by its framework's own means; the rest is as written.

    Attributes:
        fsdp2: True: weights, gradients and optimizer states are divided by FSDP2, in place of DistributedDataParallel.
        reshard: True: gathered weights are freed after the forward; False: they are kept until the backward pass; None:
            as written.
        offload: True: parameters, gradients and optimizer states lie in host memory.
        stage: another stage of DeepSpeed's ZeRO; None: as written.
        states_on_host: True: DeepSpeed keeps its optimizer's states, and weights in float32, in host memory.
    """

    fsdp2: bool = False
    reshard: bool | None = None
    offload: bool = False
    stage: int | None = None
    states_on_host: bool = False

    @property
    def techniques(self) -> frozenset[str]:
        """What has to be allowed for it, of :data:`vram_guard.plan.techniques.TECHNIQUES`."""
        needed = {
            "shard": self.fsdp2 or self.stage is not None,
            "reshard": self.reshard is not None and not self.fsdp2,
            "offload_parameters": self.offload,
            "offload_optimizer": self.states_on_host,
        }
        return frozenset(name for name, is_needed in needed.items() if is_needed)


@dataclass(frozen=True)
class Body:
    """A module that treats each row of its arguments by itself, so that its forward may run over some rows at a time.

    :func:`vram_guard.proof.bodies.find_body` finds one in a step.
    """

    name: str
    """As in ``model.named_modules()``."""
    cut: tuple[str, ...]
    """Arguments whose tensors have a row for each sample: positional ones by their number ("0"), others by name."""
    whole: tuple[str, ...] = ()
    """Arguments with tensors that every row is given whole."""


@dataclass(frozen=True)
class Slices:
    """Slices that a module's batch is cut into, and those whose forward runs again in the backward pass."""

    body: Body
    count: int
    """Slices of equal size, but for a smaller last one."""
    again: int
    """The number of slices, from the first on, that keep only their inputs; the others keep their graph."""


@dataclass(frozen=True)
class Recipe:
    """The techniques that are switched on. Modules are named as in ``model.named_modules()``.

    The same recipe is traced and applied: a trace installs it on the symbolic model with the very functions that
    install it on the real one.

    Attributes:
        checkpoint: modules that keep only their inputs and compute their forward again in the backward pass.
        checkpoint_keeps: operators whose results those modules keep as well, in place of computing them again
            (:data:`vram_guard.techniques.kept.KEEPABLE`); nothing where no module is checkpointed.
        offload_activations: modules whose saved tensors stay in host memory for the backward pass; "" is the whole
            model. Disjoint from ``checkpoint``.
        frozen_on_host: modules without trained parameters whose weights stay in host memory and come to the GPU
            only for their forward.
        optimizer: "fused" (one kernel, no temporaries), "for-loop" (no foreach lists), "8bit" (8-bit AdamW).
        optimizer_on_host: optimizer states, and the step itself, live in host memory.
        parameters_on_host: modules whose parameters, gradients and optimizer states live in host memory and come to
            the GPU one module at a time (FSDP2).
        sharding: how the training is divided over its processes, where that is not as written; None: as written.
        optimizer_in_backward: each parameter steps as soon as its gradient is complete, which is freed then.
        chunked_head: the layer that makes the logits of a cross-entropy: logits and loss are computed in chunks; "":
            as written.
        expandable_segments: the allocator grows segments, in place of reserving ones of a fixed size.
        slices: how the forward of a module runs over slices of its batch; None: over the whole of it. The slices take
            the place of ``checkpoint`` and ``offload_activations``.
    """

    checkpoint: tuple[str, ...] = ()
    offload_activations: tuple[str, ...] = ()
    frozen_on_host: tuple[str, ...] = ()
    optimizer: OptimizerForm = "as-written"
    optimizer_on_host: bool = False
    parameters_on_host: tuple[str, ...] = ()
    sharding: Sharding | None = None
    optimizer_in_backward: bool = False
    chunked_head: str = ""
    expandable_segments: bool = False
    checkpoint_keeps: tuple[str, ...] = ()
    slices: Slices | None = None

    def __post_init__(self) -> None:
        if self.optimizer not in OPTIMIZER_FORMS:
            raise unknown_form(self.optimizer)
        for name in ("checkpoint", "offload_activations", "frozen_on_host", "parameters_on_host"):
            paths = getattr(self, name)
            if isinstance(paths, str):
                raise InvalidInputError(
                    _("{name} must be a tuple of module names, not the text {text}", name=name, text=repr(paths))
                )
            object.__setattr__(self, name, tuple(paths))
        keeps = checked_operators("checkpoint_keeps", self.checkpoint_keeps)
        object.__setattr__(self, "checkpoint_keeps", keeps if self.checkpoint else ())
        both = set(self.checkpoint) & set(self.offload_activations)
        if both:
            names = ", ".join(sorted(both))
            raise InvalidInputError(_("{names}: a module is either checkpointed or offloaded, not both", names=names))
        if self.slices is not None:
            self._check_slices(self.slices)

    def _check_slices(self, slices: Slices) -> None:
        if slices.count < 2 or not 1 <= slices.again <= slices.count:
            raise InvalidInputError(
                _(
                    "slices: of two or more, one or more run again, not {again} of {count}",
                    again=slices.again,
                    count=slices.count,
                )
            )
        if self.checkpoint or self.offload_activations:
            raise InvalidInputError(
                _("slices: they take the place of checkpointed and offloaded blocks, so name only one of these")
            )

    def __bool__(self) -> bool:
        """True if anything is switched on."""
        return self != AS_WRITTEN

    def with_(self, **changes: Any) -> Recipe:
        """The same recipe with some fields changed."""
        return replace(self, **changes)


def unknown_form(form: object) -> InvalidInputError:
    """The error for an optimizer form that is none of :data:`OPTIMIZER_FORMS`."""
    known = ", ".join(OPTIMIZER_FORMS)
    return InvalidInputError(_("optimizer form {form} is not one of {known}", form=repr(form), known=known))


AS_WRITTEN = Recipe()
