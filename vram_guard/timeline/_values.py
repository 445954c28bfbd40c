"""The values that a timeline is made of: blocks, phases, collectives, work, changes, notes."""

from __future__ import annotations

from typing import Literal, NamedTuple, get_args

from vram_guard.language import Message
from vram_guard.scratch import Card, Rule

Category = Literal[
    "parameters",
    "buffers",
    "gradients",
    "optimizer_states",
    "activations",
    "batch",
    "temporaries",
    "workspace",
]
CATEGORIES: tuple[Category, ...] = get_args(Category)

#: Which workspaces of convolutions count: those of known size; also those of unknown size, each with the most that it
#: may take; or none.
Workspaces = Literal["known", "most", "none"]

#: When memory that another stream uses is free again: where the program frees it, or as late as it may be.
Frees = Literal["at once", "late"]

PhaseName = Literal[
    "setup",
    "hooks",
    "batch",
    "forward",
    "backward",
    "optimizer",
    "resuming",
    "validation",
    "saving",
    "test",
    "prediction",
    "generation",
]
PHASE_NAMES: tuple[PhaseName, ...] = get_args(PhaseName)
#: Of a training step.
STEP_PHASES = frozenset({"batch", "forward", "backward", "optimizer"})

#: How an answer came about. "symbolic": every operator's memory is known exactly. "partly symbolic": some
#: sizes are bounds (they depend on data) or some operators ran on stand-in data. "formula": the step could
#: not be followed to its end; the number is a lower bound and never a promise that the step fits.
Tier = Literal["symbolic", "partly symbolic", "formula"]


class Affine(NamedTuple):
    """``base + per_sample * batch_size``."""

    base: int
    per_sample: int

    def at(self, batch_size: int) -> int:
        """The value at this batch size."""
        return self.base + self.per_sample * batch_size


class Scratch(NamedTuple):
    """A temporary whose size is a step in the batch size and depends on the card; bytes are what its rule says."""

    rule: Rule
    quantities: tuple[Affine, ...]
    """What the rule is asked with: sizes and strides of the operands."""

    def bytes_at(self, batch_size: int, card: Card) -> int:
        """Requested bytes at this batch size on this card."""
        return self.rule.bytes(tuple(quantity.at(batch_size) for quantity in self.quantities), card)


#: What a block is taken for where no card is named: NVIDIA A100, as a trace.
ASSUMED_CARD = Card((8, 0), 108)


#: The operator of what the comparison of recomputations allocates: values at so many places, whatever the batch size.
COMPARED = "vram_guard.compared"


class Block(NamedTuple):
    """One allocation of the caching allocator, from alloc to free."""

    size: Affine
    """Requested bytes, before the allocator's rounding."""
    category: Category
    module: str
    """Dotted path of the module whose forward (or whose backward) asked for it; "" outside any module."""
    source: str
    """"file.py:123", the innermost line outside torch; "" where there is none."""
    operator: str
    """"aten.addmm.default"; "" for what stands before the first operator."""
    optional: bool = False
    """A library's workspace: where it does not fit, the library takes a way that needs none."""
    scratch: Scratch | None = None
    """What decides over the size instead of ``size``."""
    unknown: bool = False
    """A workspace of unknown size; ``size``, the most of usual kernels, counts in a peak's upper end alone."""
    stream: int = 0
    """The CUDA stream whose pool it is taken from, numbered as the step meets them; 0: the default stream."""

    def bytes_at(self, batch_size: int, card: Card = ASSUMED_CARD) -> int:
        """Requested bytes at this batch size on this card; 0 where the size is unknown."""
        if self.unknown:
            return 0
        if self.scratch is not None:
            return self.scratch.bytes_at(batch_size, card)
        return self.size.base + self.size.per_sample * batch_size


class HostBlock(NamedTuple):
    """One tensor in host memory."""

    size: Affine
    """Requested bytes."""
    pinned: bool = False
    """In page-locked memory, whose allocator rounds up."""


class Phase(NamedTuple):
    """A stretch of the timeline: it begins at ``events[start]`` and ends where the next one begins."""

    name: PhaseName
    step: int
    """Optimizer step, from 1; of phases between steps (validation, saving), those before it; 0 for set-up."""
    start: int
    label: str = ""
    """What tells it from others of its name: "sanity check", "epoch 5"."""
    tier: Tier = "symbolic"
    """How far the sizes of what runs in it are known."""


#: A phase, or "training": the training steps between two others.
StretchName = Literal[PhaseName, "training"]


class Stretch(NamedTuple):
    """Phases in a row that a report shows as one: training steps, or one phase between them."""

    name: StretchName
    label: str
    start: int
    """Index of its first event."""
    step: int
    """Of its first phase."""
    tier: Tier = "symbolic"
    """The lowest of its phases."""


class PhasePeak(NamedTuple):
    """The peak within one stretch of a run; bytes, what was there at its beginning included."""

    name: StretchName
    label: str
    """What tells it from others of its name; "" where nothing does."""
    step: int
    """Optimizer step in which its peak is, from 1; of phases between steps, those before it; 0 for set-up."""
    peak_allocated: int
    peak_reserved: int
    module: str
    """Of the block that reached the allocated peak; "" where the phase began with it."""
    source: str
    operator: str
    tier: Tier = "symbolic"
    """How far the sizes of what runs in this phase are known."""


def lower(one: Tier, other: Tier) -> Tier:
    """The tier that promises less."""
    return max(one, other, key=get_args(Tier).index)


class Growth(NamedTuple):
    """A block that a training step leaves behind, and the next one will leave behind again."""

    block: int
    instead_of: int | None
    """The smaller block of the step before that it stands in place of; None: there was none."""
    kept_in: str = ""
    """The name of what keeps it: "losses", "metric.outputs"; "" where that is not known."""


class Leak(NamedTuple):
    """Memory that grows from step to step."""

    bytes_per_step: int
    module: str
    source: str
    """The line that makes what is kept."""
    operator: str
    kept_in: str = ""
    """The name of the list, attribute or variable that keeps it, or whose graph does; "" where that is not known."""


class Border(NamedTuple):
    """A place in the timeline where the forward of a module begins or ends; those of a recomputation as well."""

    at: int
    """So many events precede it."""
    module: str
    entered: bool
    on_host: int = 0
    """So many events of the host precede it."""


class Marks(NamedTuple):
    """Places of a timeline that parts of it can be cut at."""

    borders: tuple[Border, ...]
    accumulated: tuple[tuple[int, int], ...]
    """Where a gradient is stored or added up: events that precede it, and its block."""
    used: tuple[tuple[int, int], ...] = ()
    """Where the backward pass of a module last reads what a forward made: events that precede it, and the block."""


class Deferred(NamedTuple):
    """A free of memory that another stream uses (``Tensor.record_stream``): the GPU decides when it happens."""

    free: int
    """Index of the event; at the earliest it happens there."""
    until: int
    """Index of the event before which it has surely happened."""


#: Why a reserved peak has a range. "workspaces": cuDNN's are of unknown size; "transforms": cuFFT's are; "streams":
#: frees wait for other streams.
UpperReason = Literal["workspaces", "transforms", "streams"]


class CompiledCode(NamedTuple):
    """What ``torch.compile`` made of the step."""

    graphs: int
    """Graphs that Inductor compiled, forward and backward; equal blocks share theirs."""
    breaks: tuple[str, ...] = ()
    """Why Dynamo ended a graph and went on in another, in the order of the step."""


#: The name of what synchronised batch normalisation does with the other processes.
SYNCHRONISED_NORM = "SyncBatchNorm"


class Collective(NamedTuple):
    """A call for which this process waits for others."""

    name: str
    """As ``torch.distributed`` names it, or :data:`SYNCHRONISED_NORM`."""
    source: str
    """The line of the user's code, as "folder/file.py:123"; "" where there is none."""
    phase: PhaseName
    step: int
    """Optimizer step, from 1; 0 for set-up."""
    bytes: Affine = Affine(0, 0)
    """The larger side on this rank: what is gathered, or what is reduced."""
    ranks: int = 1
    """Ranks that take part; 1 where that is not known."""
    dimension: str = ""
    """The dimension of the device mesh along which they lie ("shard", "tensor", ...); "" where it has no name."""
    stream: int = 0
    """The stream on which it was started."""
    micro_batch: int = 0
    """The micro-batch of the optimizer step, from 0."""
    position: int = 0
    """So many entries of :attr:`Timeline.work` precede it."""
    by_layout: bool = False
    """Called by what spreads the step over ranks (DistributedDataParallel, FSDP), not by the step's own code."""
    after: int = -1
    """Entries of the work that have to be done before it can begin; -1: not known."""
    needed: int = -1
    """Entries of the work that precede the first one that waits for it; -1: not known."""


#: What an operator computes with. "vector": ordinary cores, a few operations an element, so that memory decides;
#: "fp32", "fp64": matrix products on ordinary cores; "3xtf32": float32 in three passes of TF32; "host": the CPU.
Unit = Literal["vector", "fp32", "tf32", "3xtf32", "fp16", "bf16", "fp64", "host"]


class Work(NamedTuple):
    """The computation and the memory traffic of one operator of the second training step, or of the only one."""

    operator: str
    """"aten.addmm.default"."""
    module: str
    """Dotted path of the module whose forward (or whose backward) ran it; "" outside any module."""
    phase: PhaseName
    recomputed: bool
    """Part of a forward that runs again inside the backward pass (activation checkpointing)."""
    flops: Affine
    moved: Affine
    """Bytes read and written, each tensor once."""
    unit: Unit
    launches: int = 1
    """Kernels it starts."""
    transfer: Affine = Affine(0, 0)
    """Bytes between host and device."""
    micro_batch: int = 0
    """The micro-batch of the optimizer step, from 0; the optimizer's own work belongs to the last one."""
    random: bool = False
    """It takes random numbers."""
    stream: int = 0
    """The CUDA stream on which it was started, numbered as :attr:`Block.stream` is."""


#: How later steps differ from the first: other weights are trained, or handed to the optimizer; the loss may be
#: another.
LaterChange = Literal["trained", "optimized", "loss"]

#: What a forward changes: "tensor": an attribute that is neither parameter nor buffer; "object": a container, a helper
#: object or a class; "elsewhere": a tensor that was made before and is nothing of the module's; "around": nothing, but
#: a mode or hooks of the user's see what it computes.
ChangeKind = Literal["parameter", "buffer", "tensor", "object", "generator", "input", "elsewhere", "beyond", "around"]


class StateChange(NamedTuple):
    """Something that each forward of a watched module changes, and a second forward would change again."""

    module: str
    """As in ``model.named_modules()``."""
    kind: ChangeKind
    name: str
    """As seen from the module ("codebook.embedding"); "" where it has none."""


class Note(NamedTuple):
    """Something the reader of an answer has to know: what was bounded, assumed or left out, and where."""

    said: Message | str
    source: str = ""
    operator: str = ""
    from_values: bool = False
    """Sizes were read from the values in the batch that was given, so that they hold for that batch alone."""

    @property
    def message(self) -> str:
        """The message in the reader's language."""
        return str(self.said)

    def __str__(self) -> str:
        return f"{self.message} ({self.source})" if self.source else self.message


class CudnnAnswers(NamedTuple):
    """The cuDNN that was asked for the workspaces of a step's convolutions."""

    release: str
    """"9.26.0"; "" where it could not be loaded."""
    refused: str = ""
    """Why it gave no answers, with its status where it has one; "" where it answered."""
