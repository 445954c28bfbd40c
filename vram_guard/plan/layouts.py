"""Layouts: the ways to spread a training over several GPUs that a plan tries, and the least memory of each."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING

from vram_guard.checks import known_names
from vram_guard.errors import InvalidInputError
from vram_guard.language import _, marked
from vram_guard.parallel.spec import Parallel

if TYPE_CHECKING:
    from torch import nn

#: What ``layouts`` may name, in the order in which a plan prefers them at equal cost, and what it means.
LAYOUTS: dict[str, str] = {
    "ddp": marked("every GPU holds the whole model (DDP)"),
    "zero1": marked("optimizer states divided over the GPUs (ZeRO-1)"),
    "fsdp2": marked("weights, gradients and optimizer states divided over the GPUs (FSDP2)"),
    "hsdp": marked("divided over the GPUs of a node, repeated on every node (HSDP)"),
    "tensor": marked("every layer divided over GPUs of a node as well (tensor parallel)"),
    "offload": marked("weights and optimizer in host memory, divided over the GPUs (FSDP2 with offload)"),
}

#: GPUs of a node over which layers are divided: powers of two up to the usual node.
_TENSOR_SIZES = (2, 4, 8)

_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}


@dataclass(frozen=True)
class LayoutText:
    """A layout that is put into words where it is shown."""

    layout: Parallel | None

    def __str__(self) -> str:
        return layout_words(self.layout)


_NAMES = {"ddp": "DDP", "zero1": "ZeRO-1", "fsdp2": "FSDP2", "hsdp": "HSDP", "fsdp1": "FSDP"}


def layout_name(layout: Parallel | None) -> str:
    """A layout as a row of a table: "HSDP 8 x 8", "FSDP2, weights kept gathered"."""
    if layout is None:
        return _("one GPU")
    name = _NAMES.get(str(layout.kind), str(layout.kind))
    if layout.data_ranks == 1:
        return f"TP {layout.tensor}"
    if layout.kind == "hsdp" or layout.tensor > 1:
        name += " " + " x ".join(map(str, (size for key, size in layout.dimensions.items() if key != "tensor")))
    if layout.tensor > 1:
        name += f" x TP {layout.tensor}"
    if layout.reshard is False:
        return _("{name}, weights kept gathered", name=name)
    if layout.reshard is not True:
        return _("{name}, kept over {count} GPUs", name=name, count=layout.reshard)
    return _("{name}, in host memory", name=name) if layout.offload else name


def layout_words(layout: Parallel | None) -> str:
    """A layout in a few words: "FSDP2 over 64 GPUs, weights kept until the backward pass"."""
    if layout is None:
        return _("one GPU")
    kind = str(layout.kind)
    if layout.data_ranks == 1:
        return _("each layer over {count} GPUs of a node (tensor parallel)", count=layout.tensor)
    words = [_("{name} over {count} GPUs", name=_NAMES.get(kind, kind), count=layout.data_ranks)]
    if layout.kind == "hsdp":
        copies = layout.dimensions["replicate"]
        words = [_("HSDP: {copies} copies, each over {count} GPUs", copies=copies, count=layout.dimensions["shard"])]
    if layout.tensor > 1:
        words.append(_("each layer over {count} GPUs of a node (tensor parallel)", count=layout.tensor))
    if layout.reshard is False:
        words.append(_("gathered weights kept for the backward pass"))
    elif layout.reshard is not True:
        words.append(_("weights kept divided over {count} GPUs for the backward pass", count=layout.reshard))
    if layout.offload:
        words.append(_("weights and optimizer in host memory"))
    return _(", ").join(words)


def checked_layouts(names: Iterable[str] | None) -> tuple[str, ...]:
    """The layouts that may be tried, in the order of :data:`LAYOUTS`; a string is a comma-separated list.

    Raises:
        InvalidInputError: an unknown one; or none.
    """
    if names is None:
        return tuple(LAYOUTS)
    if not isinstance(names, Iterable):
        raise InvalidInputError(
            _("layouts must be names such as {known}, not {value}", known=", ".join(LAYOUTS), value=repr(names)[:60])
        )
    given = [name.strip() for name in names.split(",")] if isinstance(names, str) else list(names)
    given = [name for name in given if name]
    known_names("layouts", given, LAYOUTS)
    if not given:
        raise InvalidInputError(_("layouts is empty: name at least one of {known}", known=", ".join(LAYOUTS)))
    return tuple(name for name in LAYOUTS if name in given)


def layouts_of(gpus: int, node: int, names: Iterable[str], precision: str) -> Iterator[Parallel | None]:
    """The layouts to try, the simplest first; None where there is one GPU.

    Under mixed precision, weights that are divided travel in half precision and gradients are added up in float32.

    Args:
        gpus: of the training.
        node: GPUs of a node.
        names: of :data:`LAYOUTS`.
        precision: the step's.
    """
    names = tuple(names)
    if gpus == 1:
        yield None
        return
    node = min(node, gpus)
    halved = half_of(precision)
    divided = {} if halved is None else {"param_dtype": halved, "reduce_dtype": "float32"}

    def made(**fields: object) -> Parallel:
        return Parallel(gpus=gpus, node=node, **fields)  # type: ignore[arg-type]

    for kind in ("ddp", "zero1"):
        if kind in names:
            yield made(kind=kind)
    if "fsdp2" in names:
        yield made(kind="fsdp2", reshard=False, **divided)
        yield made(kind="fsdp2", **divided)
    if "hsdp" in names and gpus > node > 1:
        yield made(kind="hsdp", **divided)
    if "tensor" in names:
        for size in _TENSOR_SIZES:
            if node % size == 0:
                yield made(kind="fsdp2", tensor=size, **divided)
    if "offload" in names:
        yield made(kind="fsdp2", offload=True, **divided)


def half_of(precision: str) -> str | None:
    """The dtype in which divided weights travel under mixed precision; None where there is none."""
    return {"bf16-mixed": "bfloat16", "16-mixed": "float16"}.get(precision)


@dataclass(frozen=True)
class ModelSize:
    """Bytes of a whole model, as its author wrote it.

    Attributes:
        parameters: all of them.
        trained: those with gradients.
        numbers: how many numbers they are.
        states: optimizer states over the bytes of what is trained; 0 where that is not known.
    """

    parameters: int
    trained: int
    numbers: int
    states: float = 0.0

    @classmethod
    def of(cls, model: nn.Module) -> ModelSize:
        """The sizes of a model, shared parameters once."""
        parameters = list(model.parameters())

        def size(which: list[nn.Parameter]) -> int:
            return sum(one.numel() * one.element_size() for one in which)

        trained = [one for one in parameters if one.requires_grad]
        return cls(size(parameters), size(trained), sum(one.numel() for one in parameters))

    def least(self, layout: Parallel | None) -> int:
        """Bytes that a rank holds at the very least: weights, gradients and states when the optimizer steps.

        Or the gathered weights with their shards and states, where they are kept for the backward pass.
        """
        states = int(self.trained * self.states)
        if layout is None:
            return self.parameters + self.trained + states
        tensor = layout.tensor
        if layout.offload:
            return 0
        if layout.kind == "ddp":
            return (self.parameters + self.trained + states) // tensor
        if layout.kind == "zero1":
            return self.parameters + self.trained + states // layout.data_ranks
        ranks = layout.shards * tensor
        held = (self.parameters + self.trained + states) // ranks
        if layout.reshard is False:
            each = 0 if layout.param_dtype is None else _BYTES[layout.param_dtype]
            gathered = (self.numbers * each if each else self.parameters) // tensor
            held = max(held, (self.parameters + states) // ranks + gathered)
        return held
