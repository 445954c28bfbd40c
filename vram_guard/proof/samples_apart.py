"""Whether the samples of a batch stay apart in a step, operator by operator, and how its loss adds them up.

What is seen is every operator of torch, with or without a graph. It is followed what each tensor was computed of
(:mod:`vram_guard.proof._labels`): nothing of the batch, one sample for each element, or a mean or sum over samples. An
operator of which that is not known joins samples. Nothing depends on values, so that what is found holds for every
batch; it does not hold where the step reads values, which is written down.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager
from pathlib import Path
from types import FrameType
from typing import Any, Literal, NamedTuple

import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from vram_guard.apply.microbatch import MicroBatch
from vram_guard.apply.normalisers import EveryLabel, Normaliser
from vram_guard.language import _
from vram_guard.limits import LARGEST_APART, VALUES_COMPARED
from vram_guard.patching import replaced
from vram_guard.proof._labels import NONE, Label, Part, Term, constant, joined, key_of, nothing, reshaped
from vram_guard.proof._rules import FACTS, SIZES, Call, label_of
from vram_guard.proof.watched import ReadValue
from vram_guard.state.containers import attributes
from vram_guard.tensors import inner_tensors, without_modes

#: Operators that hand a value to Python.
_READS = frozenset(("_local_scalar_dense", "is_nonzero", "equal", "item", "allclose"))
#: Methods that hand all values to Python or to other libraries, past every operator.
_ARRAYS = ("numpy", "tolist", "__array__", "__dlpack__")
#: Packages that read values to check or to count them, and never change what is trained by them.
_READ_BY = frozenset(("torchmetrics",))
#: Namespaces of operators that hand over what other ranks hold, and draw no numbers. A rank that gives what depends on
#: no sample takes such from the others, but where not all ranks do the same.
COLLECTIVE = frozenset(("c10d", "_c10d_functional", "_c10d_functional_autograd", "_dtensor", "fsdp"))
_ONE_SIDED = ("batch_p2p", "broadcast", "gather", "irecv", "recv", "scatter")
#: Those that meet the same element of every rank, whose batches are all cut alike.
_ELEMENTWISE = frozenset(("all_reduce", "all_reduce_", "wait_tensor", "_wrap_tensor_autograd"))
#: Arguments that say again how many samples there are.
_COUNTS = frozenset((("native_group_norm", "N"),))
#: Operators that hand over a tensor that was made of numbers of Python.
_NEW = frozenset(("lift", "lift_fresh", "lift_fresh_copy"))
#: Modules and functions of libraries that read values of a batch, and compute the same whatever they find, or fail.
_READ_IN = frozenset(
    (
        ("torch.nn.functional", "gaussian_nll_loss"),
        ("transformers.masking_utils", "_ignore_causal_mask_sdpa"),
        ("transformers.masking_utils", "_ignore_bidirectional_mask_sdpa"),
        ("transformers.modeling_attn_mask_utils", "_ignore_causal_mask_sdpa"),
    )
)


def sizes_of_looks(batch_size: int) -> tuple[int, int]:
    """The two sizes of its batch that a step is looked at: what they have in common holds for every size."""
    large = min(batch_size, LARGEST_APART)
    return max(4, large), max(2, large // 2)


class LossForm(NamedTuple):
    """How a loss adds up the samples of one batch."""

    samples: int
    terms: tuple[Term, ...]
    beside: int
    """The key of terms that were added and depend on no sample; 0 where there are none."""
    why: str
    """The reason why samples are joined in it; "" where they are apart."""


class SamplesApart(TorchDispatchMode):
    """Follows what tensors are computed of inside the block.

    Args:
        batch: that the step is given.
        samples: of it.
        parts: the same batch as single samples; None: its tensors hold samples where they are as long as these.
        model: whose buffers and parameters are known by their names; None: there is none.
    """

    def __init__(
        self, batch: Any, samples: int, parts: list[MicroBatch] | None, model: nn.Module | None = None
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._samples = samples
        self._labels: dict[tuple[Any, ...], Label] = {}
        self._held: list[torch.Tensor] = []
        self._places: dict[int, StorageWeakRef] = {}
        self._seen = 0
        self._within = False
        """An operator runs, which may read tensors by itself."""
        self.read = ""
        """Where a value of the batch was read; "" where none was."""
        self.written: set[int] = set()
        """Storages that were written in place."""
        self.before: set[int] = set()
        """Storages that were there before the block, as far as they were used."""
        self._names: dict[tuple[Any, ...], list[str]] = {}
        """Places of the model's buffers and parameters -> their names: several may be one tensor for a while."""
        self._names_of: dict[int, list[str]] = {}
        """The same by the key of their label, which stays where a tensor is handed on as it is."""
        with without_modes():
            for path, module in () if model is None else model.named_modules():
                every = {"recurse": False, "remove_duplicate": False}
                own = (*module.named_buffers(path, **every), *module.named_parameters(path, **every))
                for name, tensor in own:
                    self._names.setdefault(_place(tensor), []).append(name)
            for tensor, label in _of_batch(batch, samples, parts):
                self._put(tensor, label)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The operator itself, followed; of tensors that wrap others in a way of their own, what they make of it."""
        if not all(one.__module__.partition(".")[0] == "torch" for one in types):
            return NotImplemented
        viewed = torch.Tag.inplace_view in func.tags
        if viewed:
            with without_modes():
                before, label = _elements(args[0]), self.label(args[0])
        within, self._within = self._within, True
        try:
            out = func(*args, **(kwargs or {}))
        finally:
            self._within = within
        with without_modes():
            if viewed and _elements(args[0]) == before:  # only strides that nothing is found by are others
                self._put(args[0], label)
                return out
            try:
                self._follow(func, args, kwargs or {}, out)
            except Exception:  # noqa: BLE001 - what an operator is given that no rule expected must not end the step
                why = _("nothing is known of {operator}, whether it leaves samples apart", operator=str(func))
                self.read = self.read or why
                for made in (one for one in tree_leaves(out) if isinstance(one, torch.Tensor)):
                    self._put(made, joined(why, made.dim()))
        return out

    def form(self, loss: torch.Tensor) -> LossForm:
        """How a loss adds up its samples; call it once the block has ended."""
        with without_modes():
            label = self.label(loss)
            if label.why or self.read:
                return LossForm(self._samples, (), 0, self.read or label.why)
            if label.terms is not None:
                return LossForm(self._samples, label.terms, label.beside, "")
            if label.const:
                drawn = _("all samples of the batch get the same random number") if label.drawn else ""
                return LossForm(self._samples, (), label.key, drawn)
            return LossForm(self._samples, (), 0, _("it depends on single samples of the batch"))

    def reading(self) -> AbstractContextManager[None]:
        """Inside the block, what ``Tensor.item`` gives of a batch may be printed and logged; other uses are noted."""
        original = torch.Tensor.item

        def item(tensor: torch.Tensor) -> Any:
            if self._within:  # torch takes no other number from an operator
                return original(tensor)
            label = self.label(tensor)
            if label.const and not label.drawn:
                return original(tensor)
            read, self.read = self.read, self.read or "-"  # the operator beneath tells nothing here
            try:
                value = original(tensor)
            finally:
                self.read = read
            return ReadValue(value, lambda: self._reads((label,)))

        def whole(name: str) -> Any:
            as_array = getattr(torch.Tensor, name)

            def read(tensor: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
                caller = str(sys._getframe(1).f_globals.get("__name__", ""))  # noqa: SLF001 - the stack is what is asked
                if not (self._within or caller.startswith("vram_guard.")):
                    self._reads((self.label(tensor),))
                return as_array(tensor, *args, **kwargs)

            return read

        return replaced(torch.Tensor, {"item": item, **{name: whole(name) for name in _ARRAYS}})

    def joined(self, output: torch.Tensor) -> str:
        """Why samples are joined in an output for each of them; "" where they are apart."""
        with without_modes():
            label = self.label(output)
        if self.read or label.why:
            return self.read or label.why
        return "" if label.terms is None else _("it holds a mean or a sum over the batch")

    def label(self, tensor: torch.Tensor) -> Label:
        """What a tensor was computed of; what was there before the block depends on no sample."""
        if hasattr(tensor, "__tensor_flatten__"):
            return _of_inner(tensor, [(one, self.label(one)) for one in inner_tensors(tensor)])
        at = _place(tensor)
        found = self._labels.get(at)
        if found is None:
            self._seen += 1
            found = constant(key_of("before", self._seen, _values(tensor)), tensor.shape, uniform=False,
                             natural=tensor.dtype == torch.bool, held=True)  # fmt: skip
            self._put(tensor, found)
            self._names_of[found.key] = self._names.get(at, [])
            self.before.add(at[0])
        if tuple(found.ids.shape) != () and found.ids.dim() != tensor.dim():
            return joined(_("a tensor is used in another shape than it was made in"), tensor.dim())
        return found

    def _follow(self, func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        name = func.overloadpacket.__name__
        if name in FACTS:
            return
        schema = func._schema.arguments  # noqa: SLF001 - an operator's own
        given = {one.name: one.default_value for one in schema if one.has_default_value()}
        given.update(zip((one.name for one in schema), args, strict=False))
        given.update(kwargs)
        written = [given[one.name] for one in schema if one.alias_info is not None and one.alias_info.is_write]
        made = tuple(one for one in tree_leaves(out) if isinstance(one, torch.Tensor))
        operands = [one for one in tree_leaves(list(given.values())) if isinstance(one, torch.Tensor)]
        labels = tuple(self.label(one) for one in operands)
        if name in _READS:
            self._reads(labels)
            return
        if name in _NEW:
            self.before -= {_place(one)[0] for one in operands}
        library = func.namespace
        shown = name if library in ("aten", "prims") else f"{library}.{name}"
        # Of rows also how long they are: what is as long as the batch besides makes another number of it.
        lengths = [
            [size for size, own in zip(one.shape, label.ids.shape, strict=True) if own == 1]
            for one, label in zip(operands, labels, strict=True)
            if label.apart and not label.const
        ]
        key = key_of(name, [_plain(one, name, self) for at, one in given.items() if (name, at) not in _COUNTS], lengths)
        # A list that is written in place is handed back by no operator.
        into = tuple(one for one in tree_leaves(written) if isinstance(one, torch.Tensor))
        call = Call(shown, given, labels, key, made or into, self._samples, self.label, _known, self._names_of.get)
        found: Any
        if not made and not written:
            return
        if name == "set_":  # a storage, of which nothing is known
            found = call.unknown()
        elif library not in ("aten", "prims"):
            found = call.unknown() if not all(label.const for label in labels) else None
            if library in COLLECTIVE and name in _ELEMENTWISE and labels[0].apart and not labels[0].const:
                found = Label(labels[0].ids, key)
            drawn = library not in COLLECTIVE or name.startswith(_ONE_SIDED)  # as far as is known
            found = found or constant(key, made[0].shape if made else (), uniform=False, drawn=drawn)
        else:
            tags = func.tags
            found = label_of(
                call,
                pointwise=torch.Tag.pointwise in tags,
                reduces=torch.Tag.reduction in tags,
                draws=torch.Tag.nondeterministic_seeded in tags,
            )
        results = found if isinstance(found, list) else [found] * max(1, len(made))
        held = name not in _NEW and any(label.held for label in labels)
        results = [label if label.held == held else label.with_(held=held) for label in results]
        for tensor, label in zip(made, results, strict=False):
            if not any(tensor is one for one in written):
                self._keep(tensor, label)
        for tensor in into:
            self._write(tensor, results[0])
            if library == "fsdp":  # weights that were gathered, where they lay before
                self.written.discard(_place(tensor)[0])

    def _keep(self, tensor: torch.Tensor, label: Label) -> None:
        self._put(tensor, label if label.ids.dim() == tensor.dim() else _fitted(label, tensor))

    def _put(self, tensor: torch.Tensor, label: Label) -> None:
        if hasattr(tensor, "__tensor_flatten__"):  # its parts are known, whoever wraps them in another
            for one in inner_tensors(tensor):
                self._put(one, _seen_from(tensor, label, one))
            return
        at = _place(tensor)
        self._labels[at] = label
        if len(at) == 1:
            self._held.append(tensor)  # nothing else is taken for it
        elif at[0] not in self._places:  # no other storage comes to lie there, though this one is freed
            self._places[at[0]] = StorageWeakRef(tensor.untyped_storage())

    def _write(self, tensor: torch.Tensor, label: Label) -> None:
        """A tensor was written in place: whatever else lies in its memory is then of the same samples."""
        if hasattr(tensor, "__tensor_flatten__"):  # as DTensors are, whose own place holds nothing
            for one in inner_tensors(tensor):
                self._write(one, _seen_from(tensor, label, one))
            return
        own = _place(tensor)
        self.written.add(own[0])
        before = self._labels.get(own)
        self._keep(tensor, label)
        label = self._labels[own]
        if before is not None and before.key == label.key:
            return
        for at, other in list(self._labels.items()):
            if at[0] != own[0] or at == own:
                continue
            if at[1:2] == own[1:2] and math.prod(at[2]) == math.prod(own[2]) and label.terms is None and not label.why:
                self._labels[at] = self._seen_as(at, label, own)
            elif label.const and other.const:
                key = key_of("written", other.key, label.key, own[1] - at[1], own[3])
                drawn, held = label.drawn or other.drawn, label.held or other.held
                self._labels[at] = constant(key, at[2], uniform=False, drawn=drawn, held=held)
            elif label.why:
                self._labels[at] = joined(label.why, len(at[2]))
            elif before is not None and _leaves_rows(other, label, before):
                key = key_of("written", other.key, before.key, label.key)
                self._labels[at] = other.with_(key=key, part=None, natural=other.natural and label.natural)
            else:
                why = _("a part of a tensor is written, and another view of it is used")
                self._labels[at] = joined(why, len(at[2]))

    def _seen_as(self, at: tuple[Any, ...], label: Label, own: tuple[Any, ...]) -> Label:
        if at[3] == own[3]:
            return label
        try:
            return label.with_(ids=reshaped(label, own[2], at[2]))
        except RuntimeError:
            return joined(_("a part of a tensor is written, and another view of it is used"), len(at[2]))

    def _reads(self, labels: tuple[Label, ...]) -> None:
        unread = (label.const and not label.drawn and not label.held for label in labels)
        if all(unread) or self.read:
            return
        frame: FrameType | None = sys._getframe(1)  # noqa: SLF001 - the stack is what is asked for
        while frame is not None:
            home = str(frame.f_globals.get("__name__", ""))
            if (home, frame.f_code.co_name) in _READ_IN or home.partition(".")[0] in _READ_BY:
                return
            if home.partition(".")[0] not in ("torch", "vram_guard", "contextlib"):
                break
            frame = frame.f_back
        where = "" if frame is None else f" ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"
        if all(label.const and not label.drawn for label in labels):
            self.read = _(
                "the step reads a value that the model keeps{where}, and may go another way once it changes",
                where=where,
            )
        else:
            self.read = _(
                "the step reads a value of the batch{where}, and may go another way for another value", where=where
            )


def _leaves_rows(other: Label, label: Label, before: Label) -> bool:
    """True where each sample of a tensor was written to alike: with what is of that sample, or of none."""
    in_place = before.ids.shape == label.ids.shape and bool((before.ids == label.ids).all())
    return (
        other.apart
        and not other.const
        and before.samples >= other.samples
        and (in_place or (label.const and not label.drawn))
    )


def _elements(tensor: torch.Tensor) -> tuple[Any, ...]:
    """Where in its memory each element of a tensor lies."""
    strides = tuple(stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if size > 1)
    return tensor.storage_offset(), tuple(tensor.shape), strides


def _place(tensor: torch.Tensor) -> tuple[Any, ...]:
    if tensor.layout != torch.strided:
        return (id(tensor),)
    storage = int(tensor.untyped_storage()._cdata)  # noqa: SLF001 - see simulate/private_api.py
    return storage, tensor.storage_offset(), tuple(tensor.shape), tensor.stride()


def _of_inner(tensor: torch.Tensor, parts: list[tuple[torch.Tensor, Label]]) -> Label:
    """The label of a tensor that wraps others, as DTensor does, from those of its parts."""
    labels = [label for _part, label in parts]
    if all(label.const for label in labels):
        drawn, held = any(label.drawn for label in labels), any(label.held for label in labels)
        key = key_of("wrapped", type(tensor).__name__, [label.key for label in labels])
        return constant(key, tensor.shape, uniform=False, drawn=drawn, held=held)
    if len(parts) == 1:
        return _seen_from(parts[0][0], labels[0], tensor)
    return joined(_("it passes through a {kind}", kind=type(tensor).__name__), tensor.dim())


def _seen_from(tensor: torch.Tensor, label: Label, other: torch.Tensor) -> Label:
    """The label of a tensor for one that wraps it or is wrapped in it, of other sizes maybe, but of as many samples."""
    if label.const:
        return constant(label.key, other.shape, uniform=False, drawn=label.drawn, held=label.held)
    sizes = zip(tensor.shape, other.shape, label.ids.shape, strict=False)
    if label.apart and tensor.dim() == other.dim() and all(one == of or ids == 1 for one, of, ids in sizes):
        return label
    return joined(label.why or _("it passes through a {kind}", kind=type(tensor).__name__), other.dim())


def _fitted(label: Label, tensor: torch.Tensor) -> Label:
    if label.why:
        return joined(label.why, tensor.dim())
    if label.terms is not None:
        return label.with_(ids=nothing((1,) * tensor.dim()))
    if label.const:
        return label.with_(ids=nothing(tensor.shape))
    return joined(_("a result of an operator has another shape than was expected"), tensor.dim())


def _known(tensor: torch.Tensor) -> torch.Tensor | None:
    from vram_guard.simulate.device.constants import compute

    return compute(tensor)


def _values(tensor: torch.Tensor) -> Any:
    """What tells two tensors apart that are made anew in every step: the values of small ones, where they are known."""
    if tensor.numel() > VALUES_COMPARED or (tensor.is_floating_point() and tensor.requires_grad):
        return tuple(tensor.shape)
    known = _known(tensor)
    if known is None or known.layout != torch.strided or known.is_meta:
        return tuple(tensor.shape)
    return known.flatten().tolist()


def _plain(value: Any, name: str, apart: SamplesApart) -> Any:
    """An argument of an operator as far as it tells two runs apart."""
    if isinstance(value, torch.Tensor):
        return apart.label(value).key
    if isinstance(value, (list, tuple)):
        if any(isinstance(one, torch.Tensor) for one in value):
            return [_plain(one, name, apart) for one in value]
        return None if name in SIZES else list(value)
    of_this_process = (torch.Generator, torch.ScriptObject, torch.UntypedStorage)
    return None if isinstance(value, of_this_process) else value


def _of_batch(batch: Any, samples: int, parts: list[MicroBatch] | None) -> Iterator[tuple[torch.Tensor, Label]]:
    """The tensors of a batch, each with what its elements are of."""
    whole = list(_tensors_of(batch))
    cut: dict[int, list[tuple[int, torch.Tensor]]] = {}
    paths: dict[int, tuple[Any, ...]] = {}
    for number, part in enumerate(parts or ()):
        for path, one in _tensors_of(part.data):
            cut.setdefault(_place(one)[0], []).append((number, one))
            paths[id(one)] = path
    # One tensor for each sample: the key of a path that is another in a batch than in a sample alone is of the samples.
    lists = {
        tuple(None if key != own else key for key, own in zip(path, paths[id(one)], strict=True))
        for path, one in whole
        if id(one) in paths and len(paths[id(one)]) == len(path)
    }
    for path, tensor in whole:
        key = key_of("batch", [key for key in path if not isinstance(key, int)], len(path))
        pieces = cut.get(_place(tensor)[0], [])
        of_list = [number for number, one in pieces if _place(one) == _place(tensor)]
        alone = len(of_list) == 1
        pieces = [piece for piece in pieces if paths[id(piece[1])] == path] or pieces  # others may lie beside it
        ids = torch.full((1,) * tensor.dim(), of_list[0]) if alone else _samples_of(tensor, pieces)
        if parts is None:  # by its leading size alone
            rows = tensor.dim() > 0 and tensor.shape[0] == samples
            ids = torch.arange(samples).view([-1] + [1] * (tensor.dim() - 1)) if rows else None
        if ids is None:
            yield tensor, constant(key_of("batch", path), tensor.shape, uniform=False)
        else:
            each = next((one for one in lists if _is_one_of(path, one)), None) if alone else path
            values = None if each is None else Part(each, whole=not tensor.is_floating_point())
            named = key if alone else key_of("batch", path)
            yield tensor, Label(ids, named, part=values, natural=tensor.dtype == torch.bool)


def _tensors_of(
    part: Any, path: tuple[Any, ...] = (), within: tuple[int, ...] = ()
) -> Iterator[tuple[tuple[Any, ...], torch.Tensor]]:
    """Tensors in nested containers and in the attributes of objects in them."""
    if isinstance(part, torch.Tensor):
        yield path, part
    elif id(part) not in within:  # an object may hold what holds it
        for key, one in (attributes(part) or {}).items():
            yield from _tensors_of(one, (*path, key), (*within, id(part)))


def _is_one_of(path: tuple[Any, ...], each: tuple[Any, ...]) -> bool:
    """True for a path to one of the tensors that another path, with None for the sample, leads to."""
    return (
        each.count(None) == 1
        and len(path) == len(each)
        and all(wanted in (None, key) for key, wanted in zip(path, each, strict=True))
    )


def _samples_of(tensor: torch.Tensor, pieces: list[tuple[int, torch.Tensor]]) -> torch.Tensor | None:
    """The sample of each element; None where every sample is given all of it."""
    if not pieces or all(one.shape == tensor.shape for _number, one in pieces):
        return None
    dim = next((at for at, size in enumerate(tensor.shape) if pieces[0][1].shape[at] != size), 0)
    line = torch.full((tensor.shape[dim],), NONE)
    for number, one in pieces:
        first = (one.storage_offset() - tensor.storage_offset()) // max(1, tensor.stride(dim))
        line[first : first + one.shape[dim]] = number
    return line.view([-1 if at == dim else 1 for at in range(tensor.dim())])


def form_over_samples(
    one: LossForm, other: LossForm
) -> tuple[Literal["mean", "sum"] | Normaliser | EveryLabel | None, str]:
    """What a loss is over the samples of its batch, from its form at two sizes of batches.

    Returns:
        "mean", "sum", what to count (of means over several counts, an :class:`EveryLabel`), or None where it is none
        of these; and why it is none.
    """
    for form in (one, other):
        if form.why:
            return None, form.why
    terms, twins = ({(term.key, term.counted): term for term in form.terms} for form in (one, other))
    if terms.keys() != twins.keys() or one.beside != other.beside:
        return None, _("it has different parts at different batch sizes")
    found: set[Literal["mean", "sum"] | Normaliser | EveryLabel] = set()
    for at, term in terms.items():
        kind, why = _of_term(term, twins[at], one.samples, other.samples)
        if kind is None:
            return None, why
        found.add(kind)
    whole = [one for one in found if isinstance(one, EveryLabel)]
    # Smoothing divides by the same labels, of which its own sum does not show that each sample has one.
    found = {next((every for every in whole if every.labels == (one,)), one) for one in found}
    if len(found) > 1 and len(whole) >= len(found - {"mean"}):
        return EveryLabel(tuple(label for one in whole for label in one.labels)), ""
    if len(found) > 1:
        if found == {"mean", "sum"}:
            return None, _("it adds a mean over the batch to a sum over the batch")
        return None, _("it adds means over different counts of the batch")
    if not found:
        return None, _("nothing in it is seen to depend on a sample of the batch")
    kind = found.pop()
    kind = kind.labels[0] if isinstance(kind, EveryLabel) else kind
    if kind == "sum" and one.beside:
        return None, _("it is a sum over the batch plus a term that does not depend on the batch")
    return kind, ""


def _of_term(
    term: Term, twin: Term, samples: int, other_samples: int
) -> tuple[Literal["mean", "sum"] | Normaliser | EveryLabel | None, str]:
    if not any(term.weights):
        return None, _("a sample counts in it neither as in a mean nor as in a sum")
    for one in (term, twin):
        if any(not math.isclose(weight, one.weights[0], rel_tol=1e-9) for weight in one.weights):
            return None, _("it does not take all samples of the batch alike")
    if math.isclose(term.weights[0], twin.weights[0], rel_tol=1e-9):
        return ("sum" if term.counted is None else term.counted), ""
    if term.counted is None and math.isclose(term.weights[0] * samples, twin.weights[0] * other_samples, rel_tol=1e-9):
        return "mean", ""
    return None, _("a sample counts in it neither as in a mean nor as in a sum")
