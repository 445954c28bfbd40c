"""The interface between the guard and an adapter: facts about a training, and actions on it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from vram_guard.guard.refusals import Refusal

if TYPE_CHECKING:
    import torch
    from torch import nn

    from vram_guard.apply.loss_weight import LossWeight
    from vram_guard.capture.loader import Sample
    from vram_guard.forks.fork import Progress
    from vram_guard.guard.applied import Applied
    from vram_guard.guard.decision import Decision
    from vram_guard.guard.ranks import Ranks
    from vram_guard.guard.settings import GuardSettings
    from vram_guard.plan import Plan
    from vram_guard.proof.effects import StepEffects
    from vram_guard.step import TrainingStep
    from vram_guard.techniques.loss_graphs import LossGraphs


@dataclass(frozen=True)
class CapturedTraining(ABC):
    """A training in a form that can be traced; trace it inside :meth:`symbolic_run`."""

    step: TrainingStep
    model: nn.Module
    """As the user made it, without a framework's wrapper."""
    sample: Sample
    epoch_samples: int | None
    """Samples that one epoch reads over all processes; None for streams, and where there are no epochs."""
    notes: tuple[str, ...]
    """Remarks for a reader of the prediction."""

    @abstractmethod
    def symbolic_run(self) -> AbstractContextManager[None]:
        """Inside the block the user's model may be run symbolically, and the framework notices nothing of it."""

    @abstractmethod
    def refusals(self, settings: GuardSettings) -> Iterable[Refusal]:
        """Techniques that this training does not admit; those with an empty reason are possible."""

    def loaded(self, batch: Any) -> Any:
        """A batch as :attr:`step` gets it -> as the loader delivered it."""
        return batch

    @property
    def read_afterwards(self) -> bool:
        """True if the user's hooks run after a step, which may read what it has kept of its batch, or written to it."""
        return False

    @property
    def effects(self) -> StepEffects:
        """What the last step of a symbolic run has logged and called, as far as the adapter hears it."""
        from vram_guard.proof.effects import StepEffects

        return StepEffects()

    def objection(self, plan: Plan) -> Refusal | None:  # noqa: ARG002 - for those who know one
        """A technique of the plan that only the trace has shown to be impossible."""
        return None


class Training(Protocol):
    """A training whose model is complete and not yet placed, through its framework's own objects."""

    @property
    def ranks(self) -> Ranks:
        """Its processes."""

    @property
    def device(self) -> torch.device:
        """The device on which this process trains."""

    @property
    def model(self) -> nn.Module:
        """As the user made it, without a framework's wrapper; it is the one that trains."""

    def progress(self) -> AbstractContextManager[Progress]:
        """While the training is looked at, which takes some seconds for large models: shows lines of text."""

    def capture(self) -> CapturedTraining:
        """Read the training; changes nothing.

        Raises:
            UnsupportedStepError: it cannot be predicted; the message says what stands in the way.
        """

    def why_left_alone(self) -> str:
        """The reason why nothing may be changed in this training ("" where changes are allowed)."""

    def why_not_recovered(self, refused: Mapping[str, str]) -> str:
        """The reason why it cannot recover from an out-of-memory error ("" where it can).

        Args:
            refused: technique -> why it is not possible.
        """

    def apply(self, decision: Decision, loss_weight: LossWeight, graphs: LossGraphs | None, applied: Applied) -> None:
        """Put the decision's plan into the framework's objects, as far as that is possible before they are set up."""

    def learning_rate_factor(self, plan: Plan) -> float:
        """The factor that the learning rates as written are multiplied by under an applied plan."""

    def scale_learning_rates(self, factor: float) -> Iterable[str]:
        """Multiply every learning rate; what could not be scaled, in words."""

    def report(self, plan: Plan, lines: list[str], *, applied: bool, verbose: bool) -> None:
        """Show the prediction, and these lines after it; once, on the first rank. Verbose: all of it."""

    def warn(self, message: str) -> None:
        """Show a warning; once, on the first rank."""
