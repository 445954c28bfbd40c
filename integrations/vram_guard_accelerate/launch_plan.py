"""Orders: what the processes of a launch are to do. Plain values, so that they travel in an environment variable."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from vram_guard.techniques.recipe import AS_WRITTEN, Recipe
from vram_guard_accelerate.dry_run.loaders import Which

if TYPE_CHECKING:
    from vram_guard.plan import Plan
    from vram_guard_accelerate.dry_run.run import DryRun

#: Where the processes of a launch find their orders.
VARIABLE = "VRAM_GUARD_ORDERS"


@dataclass(frozen=True)
class Orders:
    """What is changed in a script's processes, every rank the same.

    Attributes:
        precision: "fp16" or "bf16" in place of none; "" leaves the script's own.
        precision_option: the script's own option that is set for it; "": Accelerate's environment variable.
        batch_size: samples that the training loader delivers, as the script makes it.
        grown_batch_size: the same under a larger batch; equal to ``batch_size`` where it stays.
        micro_batch_size: samples of the slices in which a batch passes through the models.
        batch_option: the script's own option that is set to ``grown_batch_size``; "": the loader is made larger.
        accumulation_option: the script's own option that is set to ``accumulation``, where its batches become smaller.
        accumulation: batches of an optimizer step, under that.
        loss_weight: what a loss that the models return is over the samples of a batch: "mean" or "sum".
        returns_loss: whether the number that a model returns is what is differentiated.
        loader: which of the loaders that the script makes is the training's, as
            :class:`vram_guard_accelerate.dry_run.loaders.Which` has it.
        learning_rate_factor: what every learning rate is multiplied by.
        resumes_grown: whether the script loads a checkpoint whose learning rates contain another factor.
        models: how many models the names in ``recipe`` speak of: of several, names begin with their number.
        recipe: the techniques, as :class:`vram_guard.techniques.Recipe` has them.
        wrapped: for parameters on the host: the classes of the modules that FSDP2 carries one at a time.
    """

    precision: str = ""
    precision_option: str = ""
    batch_size: int = 1
    grown_batch_size: int = 1
    micro_batch_size: int = 1
    batch_option: str = ""
    accumulation_option: str = ""
    accumulation: int = 1
    loss_weight: Literal["mean", "sum"] = "mean"
    returns_loss: bool = True
    loader: Mapping[str, Any] = field(default_factory=dict)
    learning_rate_factor: float = 1.0
    resumes_grown: bool = False
    models: int = 1
    recipe: Mapping[str, Any] = field(default_factory=dict)
    wrapped: list[str] = field(default_factory=list)

    @classmethod
    def of(cls, plan: Plan, run: DryRun) -> Orders:
        """What a plan means for the script that it was made for."""
        from vram_guard_accelerate.apply.fsdp import wrapped_classes
        from vram_guard_accelerate.dry_run.run import ACCELERATES
        from vram_guard_accelerate.dry_run.script_options import batch_size_option, precision_option, scales_rates

        mixed = plan.precision != plan.precision_before
        grown = plan.batch_size != plan.batch_size_before
        return cls(
            precision=ACCELERATES[plan.precision] if mixed else "",
            precision_option=(precision_option(run) or "") if mixed else "",
            batch_size=plan.batch_size_before,
            grown_batch_size=plan.batch_size,
            micro_batch_size=plan.micro_batch_size,
            # Where the script scales by that option too, rates would be scaled twice: the loader is made larger.
            batch_option=batch_size_option(run) if grown and not scales_rates(run) else "",
            loader=asdict(run.training_loader or Which()),
            learning_rate_factor=plan.learning_rate_factor,
            resumes_grown=run.resumed.factor not in (1.0, plan.learning_rate_factor),
            models=len(run.models),
            recipe=asdict(plan.recipe),
            wrapped=list(wrapped_classes(run.root, plan.recipe.parameters_on_host)),
        )

    @property
    def slices(self) -> bool:
        """Whether batches pass through the models in slices."""
        return self.micro_batch_size < self.grown_batch_size

    @property
    def sharded(self) -> bool:
        """Whether parameters wait on the host, by FSDP2."""
        return bool(self.recipe.get("parameters_on_host"))

    def script_arguments(self) -> list[str]:
        """What is added to the script's own command line; the last of two equal options counts."""
        given = (
            (self.precision_option, self.precision),
            (self.batch_option, str(self.grown_batch_size)),
            (self.accumulation_option, str(self.accumulation)),
        )
        return [word for option, value in given if option for word in (option, value)]

    def technique(self) -> Recipe:
        """The techniques beyond precision and micro-batches."""
        return Recipe(**self.recipe) if self.recipe else AS_WRITTEN

    def text(self) -> str:
        """For the environment; :meth:`read` reads it back."""
        return json.dumps(asdict(self))

    @classmethod
    def read(cls, text: str) -> Orders:
        """From :meth:`text`."""
        return cls(**json.loads(text))
