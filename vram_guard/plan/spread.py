"""Spread: how a planned training lies on several GPUs, beside the plan of one of them. Values only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from vram_guard.language import Message, _
from vram_guard.plan.layouts import layout_name, layout_words
from vram_guard.plan.roofline import Communication
from vram_guard.units import format_bytes

if TYPE_CHECKING:
    from vram_guard.parallel.links import Topology
    from vram_guard.parallel.outside import OutsideAllocator
    from vram_guard.parallel.spec import Parallel


@dataclass(frozen=True)
class LayoutPlan:
    """One way to spread the training, under the cheapest change that makes it fit there. Bytes are ints."""

    gpus: int
    layout: Parallel | None
    """None: one GPU."""
    fits: bool
    changes: str = ""
    """What else is changed, in words; "": nothing."""
    peak: int | None = None
    """Predicted reserved peak of a rank; None where it was not traced."""
    seconds: float | None = None
    """Of one optimizer step, by the cost model; None: not modelled."""
    why: Message | str = ""
    """The reason why it was not taken; "" where it was."""

    @property
    def words(self) -> str:
        """The layout and what else is changed."""
        return "; ".join(part for part in (layout_name(self.layout), self.changes) if part)


@dataclass(frozen=True)
class Spread:
    """How a planned training lies on its GPUs. Bytes are ints.

    Attributes:
        gpus: of the whole training.
        layout: how they share the work; None: one GPU.
        topology: what connects them.
        batch_size: samples that each GPU's share of a loaded batch was, as written.
        samples: of one optimizer step over all GPUs, which no plan changes.
        seconds: of one optimizer step, by the cost model; None: not modelled.
        communication: the part of it that GPUs exchange data.
        outside: what NCCL takes on each GPU beside PyTorch's allocator; None: one GPU.
        host_per_node: bytes that the plan keeps in the host memory of a node.
        ways: every layout that was considered, the simplest first.
        found: True if the number of GPUs was looked for: the least that suffices.
    """

    gpus: int
    layout: Parallel | None
    topology: Topology
    batch_size: int
    samples: int
    seconds: float | None = None
    communication: Communication = field(default_factory=Communication)
    outside: OutsideAllocator | None = None
    host_per_node: int = 0
    ways: tuple[LayoutPlan, ...] = ()
    found: bool = False

    @property
    def nodes(self) -> int:
        """Nodes of the training."""
        return 1 if self.layout is None else self.layout.nodes

    @property
    def samples_per_second(self) -> float | None:
        """Of all GPUs together, by the cost model."""
        return self.samples / self.seconds if self.seconds else None

    @property
    def words(self) -> str:
        """The layout and what else is changed, in a line."""
        return next((way.words for way in self.ways if way.layout == self.layout), layout_name(self.layout))

    def changes(self) -> tuple[tuple[str, str, str], ...]:
        """How the work is shared, where it is not as DistributedDataParallel does: (name, before, after)."""
        if self.layout is None or self.layout.kind == "ddp":
            return ()
        return ((_("spread"), "DDP", layout_words(self.layout)),)

    def facts(self) -> list[tuple[str, str]]:
        """(Name, value) of what there is to know beside the plan of one GPU."""
        links = self.topology.inside.name
        if self.nodes > 1:
            links = _(
                "{inside} within a node, {between} between nodes", inside=links, between=self.topology.between.name
            )
        gpus = str(self.gpus) if self.nodes == 1 else _("{gpus} on {nodes} nodes", gpus=self.gpus, nodes=self.nodes)
        if self.found:
            gpus = _("{gpus} (the fewest that suffice)", gpus=gpus)
        rows = [(_("GPUs"), gpus), (_("spread"), layout_words(self.layout))]
        if self.gpus > 1:
            rows.append((_("links"), links))
        rows.append((_("samples per optimizer step"), _("{count} over all GPUs, as written", count=self.samples)))
        if self.seconds is not None:
            rows.append((_("time per step, modelled"), self._time(self.seconds)))
        if self.layout is not None and self.layout.param_dtype is not None:
            rows.append((_("precision"), _precision(self.layout.param_dtype)))
        if self.outside is not None and self.outside.communicators:
            rows.append((_("beside PyTorch"), self._outside(self.outside)))
        if self.topology.assumptions and self.gpus > 1:
            rows.append((_("assumed"), "; ".join(self.topology.assumptions)))
        if self.host_per_node:
            rows.append((_("host memory"), _("{amount} on each node", amount=format_bytes(self.host_per_node))))
        return rows

    def _time(self, seconds: float) -> str:
        if not self.communication.calls:
            return format_seconds(seconds)
        return _(
            "{seconds}; of {busy} of data exchange between GPUs, {waiting} are not hidden behind computing",
            seconds=format_seconds(seconds),
            busy=format_seconds(self.communication.seconds),
            waiting=format_seconds(self.communication.exposed),
        )

    def _outside(self, taken: OutsideAllocator) -> str:
        return _(
            "{low} to {high} for NCCL's buffers (communicators: {count}), an estimate; up to {most} has been reported",
            low=format_bytes(taken.low),
            high=format_bytes(taken.high),
            count=taken.communicators,
            most=format_bytes(taken.most),
        )


def format_seconds(seconds: float) -> str:
    """Seconds with three digits: "12.3 s", "840 ms"."""
    return f"{seconds:.3g} s" if seconds >= 1 else f"{1000 * seconds:.3g} ms"


def _precision(dtype: str) -> str:
    """The difference between autocast alone and weights that are gathered in half precision."""
    return _(
        "weights are gathered in {dtype}: embeddings and normalisations, which autocast leaves in float32, compute in "
        "{dtype} too, so results are close to those of the step as written, not equal",
        dtype=dtype,
    )
