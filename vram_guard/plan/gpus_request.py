"""The GPUs that a plan may use: the request, checked before any work."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from vram_guard.budget import GPU
from vram_guard.checks import checked_count
from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.limits import MOST_GPUS
from vram_guard.parallel.links import Topology, topology
from vram_guard.parallel.spec import GPUS_OF_A_NODE, Parallel
from vram_guard.plan.layouts import checked_layouts
from vram_guard.plan.source import Source
from vram_guard.step import TrainingStep


@dataclass(frozen=True)
class GpusRequest:
    """The GPUs that a plan may use.

    Attributes:
        gpus: how many; "auto": as few as suffice.
        node: GPUs of a node.
        link: as in :func:`vram_guard.parallel.links.topology`.
        layouts: names of :data:`vram_guard.plan.layouts.LAYOUTS`.
    """

    gpus: int | Literal["auto"]
    node: int
    link: str | Topology | None
    layouts: tuple[str, ...]

    @classmethod
    def of(
        cls,
        gpus: object,
        node: int | None,
        link: str | Topology | None,
        layouts: Iterable[str] | None,
    ) -> GpusRequest:
        """The request, checked.

        Raises:
            InvalidInputError: a number makes no sense or does not divide, or a link or layout is not known.
        """
        number = gpus if gpus == "auto" else _checked_gpus("gpus", gpus)
        per_node = GPUS_OF_A_NODE if node is None else checked_count("node", node)
        if not isinstance(number, str):
            Parallel(gpus=number, node=per_node)  # says so where nodes are not full
        topology(link, gpus=per_node, node=per_node)
        return cls(number, per_node, link, checked_layouts(layouts))  # type: ignore[arg-type]

    def check_card(self, gpu: GPU | None) -> None:
        """Check that a card has the links that are asked for.

        Raises:
            InvalidInputError: it has not.
        """
        topology(self.link, gpus=self.node, node=self.node, gpu=gpu)


def requested_gpus(
    step: TrainingStep | Source,
    gpus: object,
    node: int | None,
    link: str | Topology | None,
    layouts: Iterable[str] | None,
) -> GpusRequest | None:
    """The GPUs that a step is to be spread over; None: those that it has.

    Raises:
        InvalidInputError: as :meth:`GpusRequest.of`; or something is said of several GPUs and their number is not.
    """
    if gpus is not None:
        return GpusRequest.of(gpus, node, link, layouts)
    if layouts is not None or node is not None:
        raise InvalidInputError(_("GPUs of a node and layouts are for plans over several: give gpus as well"))
    if link is not None and not (isinstance(step, TrainingStep) and step.parallel is not None):
        raise InvalidInputError(_("link is for plans over several GPUs: give gpus as well"))
    return None


def _checked_gpus(name: str, value: object) -> int:
    count = checked_count(name, value)
    if count > MOST_GPUS:
        raise InvalidInputError(_("{name} must be at most {most}, not {value}", name=name, most=MOST_GPUS, value=count))
    return count


def check_step(step: TrainingStep | Source, request: GpusRequest, *, grow: bool) -> TrainingStep:
    """Check that a step can be spread.

    Raises:
        InvalidInputError: it is spread already, or does not train.
    """
    if not isinstance(step, TrainingStep):
        raise InvalidInputError(_("gpus is for a TrainingStep: a loop that is followed has its own processes"))
    if step.parallel is not None:
        raise InvalidInputError(
            _("the step is spread over GPUs already (step.parallel): leave that out, or leave gpus out")
        )
    if step.optimizer is None:
        raise InvalidInputError(_("gpus is for trainings: this step has no optimizer"))
    if step.data_parallel_ranks not in (1, request.gpus):
        raise InvalidInputError(
            _(
                "the step says data_parallel_ranks={ranks} and gpus is {gpus}: leave one of them out",
                ranks=step.data_parallel_ranks,
                gpus=request.gpus,
            )
        )
    if grow:
        raise InvalidInputError(_("grow and gpus do not go together: the batch of all GPUs stays as it is"))
    return step.with_(data_parallel_ranks=1)
