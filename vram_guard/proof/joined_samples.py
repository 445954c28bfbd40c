"""Numbers without a graph that are computed of several samples and reach the loss.

The graph of a loss shows nothing of them: a mean over the batch that is subtracted, a count of what is positive, a
largest value that scales. In two symbolic runs of batches of two sizes they show in their sizes: they are computed of
something that grows with the batch, and do not grow with it. Samples that change their places (mixed with others by a
drawn order, cut into halves) show in what picks them, and numbers of Python that were computed of a batch in that they
are others in the other run, which goes on with other placeholders for what is not known.
"""

from __future__ import annotations

import math
import weakref
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from typing import Any, NamedTuple

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from vram_guard.proof.step_state import storage_of

#: Placeholders in the smaller batch's run, for whole numbers and others: no ratio of sizes, and the same signs.
OTHER_PLACEHOLDERS = (7, 1.0009765625)

#: Functions whose results say nothing about values.
_FACTS = (
    "size",
    "dim",
    "shape",
    "device",
    "dtype",
    "numel",
    "stride",
    "_like",
    "new_",
    "requires_grad",
    "is_",
    "layout",
)
#: Functions that give a number of Python.
_NUMBERS = ("item", "tolist", "__float__", "__int__", "__index__")
#: Functions that move samples, or add them up, along a dimension that they are given.
_ALONG = (
    *("flip", "roll", "sort", "argsort", "cumsum", "cumprod", "cummax", "cummin", "logcumsumexp", "softmax", "softmin"),
    *("log_softmax", "normalize", "gumbel_softmax", "glu", "renorm", "diff"),
    *(f"fft_{way}{kind}fft" for way in ("", "i") for kind in ("", "r", "h")),
)
#: Functions that give samples other places by an index, the third of what they are given.
_PICKING = ("index_select", "gather", "take_along_dim")
#: Functions that make places of samples: drawn, or counted by the script.
_PLACES = ("randperm", "randint", "multinomial", "tensor", "as_tensor", "from_numpy")
#: Functions that leave an ``arange`` one, whatever its shape is then.
_SAME_PLACES = (
    *("to", "cuda", "long", "int", "view", "reshape", "unsqueeze", "squeeze", "expand", "expand_as"),
    *("contiguous", "clone", "detach", "__getitem__"),
)
#: Functions that make something else for each sample, without looking at it.
_NUMBERED = (
    "arange",
    "linspace",
    "logspace",
    "eye",
    "tril_indices",
    "triu_indices",
    "tensor",
    "as_tensor",
    "from_numpy",
)
#: Functions that only find samples by numbers.
_BY_NUMBER = (
    *("__getitem__", "__setitem__", "index_select", "gather", "take_along_dim", "scatter", "scatter_", "index_add"),
    *("index_add_", "index_copy", "index_copy_", "index_put", "index_put_", "index_fill", "index_fill_", "scatter_add"),
    "scatter_add_",
)
#: Functions in which a number of Python decides about values.
_ARITHMETIC = frozenset(
    f"{before}{name}{after}"
    for name in ("add", "sub", "mul", "div", "pow", "true_divide", "truediv", "floor_divide", "remainder", "fmod")
    for before, after in (("", ""), ("", "_"), ("__", "__"), ("__r", "__"), ("__i", "__"), ("r", ""))
) | frozenset(
    (
        *("clamp", "clamp_min", "clamp_max", "lerp", "addcmul", "addcdiv", "full", "full_like", "fill_", "tensor"),
        *("as_tensor", "masked_fill", "masked_fill_", "where", "__rdiv__", "scalar_tensor", "new_full", "new_tensor"),
    )
)
#: Of these, those that make a tensor of nothing but numbers.
_OF_NUMBERS = ("full", "full_like", "scalar_tensor", "new_full", "new_tensor")
#: Of these, those that may be given a number for each sample.
_OF_SAMPLES = ("tensor", "as_tensor", "new_tensor")
#: Functions whose results are as long as values say.
_BY_VALUES = ("masked_select", "nonzero", "unique", "argwhere")

#: Functions that multiply or divide.
_SCALING = ("mul", "div", "true_divide", "__rmul__", "__truediv__", "__mul__")
_REAL = (int, float)


class Call(NamedTuple):
    """One function that the step called."""

    name: str
    operands: tuple[int, ...]
    """Numbers of the values that went into it."""
    made: tuple[int, ...]
    """Numbers of what came out, or was written."""
    shapes: tuple[tuple[int, ...], ...]
    """Of what came out."""
    has_graph: bool
    along: tuple[int, ...]
    """Dimensions that it works along, where it is one that moves samples."""
    picked: tuple[tuple[int, int], ...] = ()
    """Dimensions of its first operand in which integers pick, and the numbers of those; -1 for a list of Python's."""
    numbers: tuple[float, ...] = ()
    """Numbers of Python that it computes with."""


class Reaching(NamedTuple):
    """Functions whose results reach the loss, with values numbered in the order in which they appear."""

    calls: tuple[Call, ...]
    shapes: tuple[tuple[int, ...], ...]
    given: tuple[int, ...]
    """Of the batch."""
    whole_numbers: tuple[int, ...]
    """Those of the batch that could be places of samples."""
    loss: int
    samples: int
    counted: bool
    """True if a number of Python was made of what has no graph and comes from the batch."""


class Calls(TorchFunctionMode):
    """Writes down what is called inside the block.

    Args:
        batch: whose tensors are the samples'.
        samples: of it.
    """

    def __init__(self, batch: Any, samples: int = 0) -> None:
        super().__init__()
        self.samples = samples
        self._numbers: dict[int, tuple[int, weakref.ref[torch.Tensor]]] = {}
        self._shapes: list[tuple[int, ...]] = []
        tensors = [one for one in tree_leaves(batch) if isinstance(one, torch.Tensor)]
        self.given = tuple(map(self._number, tensors))
        self._whole_numbers = tuple(self._number(one) for one in tensors if _is_whole(one))
        self.calls: list[Call] = []
        self.loss = -1
        self._begun: ExitStack | None = None
        self.written: set[int] = set()
        """Storages that were written in place."""
        self.hooked = False
        """True if a tensor was given a hook."""
        self._from_batch = set(self.given)
        self.counted = False
        """True if a number of Python was made of what has no graph and comes from the batch."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """The function itself, written down."""
        out = func(*args, **(kwargs or {}))
        short = str(getattr(func, "__name__", func))  # a trace may have put another function in its place
        operands = list(self._operands((*args, *(kwargs or {}).values())))
        made = [one for one in tree_leaves(out) if isinstance(one, torch.Tensor)]
        if operands and (short == "__setitem__" or (short.endswith("_") and not short.endswith("__"))):
            made += [operands[0], *([] if operands[0]._base is None else [operands[0]._base])]  # noqa: SLF001 - a view's
            self.written.add(storage_of(operands[0]))
        told = bool(operands) and (bool(made) or short in _NUMBERS) and not any(fact in short for fact in _FACTS)
        if short == "register_hook":
            self.hooked = True
        from_batch = any(self._number(one) in self._from_batch for one in operands)
        if from_batch:
            self._from_batch.update(map(self._number, made))
            self.counted = self.counted or (short in _NUMBERS and not operands[0].requires_grad)
        if told or short in (*_PLACES, *_OF_NUMBERS, *_NUMBERED):
            self.calls.append(
                Call(
                    "masked_select" if short == "__getitem__" and _is_mask(args[1]) else short,
                    tuple(map(self._number, operands)),
                    tuple(map(self._number, made)),
                    tuple(tuple(one.shape) for one in made),
                    any(one.requires_grad for one in made),
                    _dimensions(short, args, kwargs or {}),
                    tuple((dim, self._place(index)) for dim, index in _picks(short, args)),
                    _numbers_in(short, args, kwargs) if short in _ARITHMETIC else (),
                )
            )
        return out

    def begin(self) -> None:
        """Enter it, for those who leave it in another place."""
        self._begun = ExitStack()
        self._begun.enter_context(self)

    def end(self) -> None:
        """Leave it, if it was entered so; may be called again."""
        begun, self._begun = self._begun, None
        if begun is not None:
            begun.close()

    def returned(self, loss: torch.Tensor) -> None:
        """The loss that the step has computed."""
        self.loss = self._number(loss)

    def reaching(self) -> Reaching:
        """What reaches the loss."""
        needed, found = {self.loss}, []
        for call in reversed(self.calls):
            if needed.intersection(call.made):
                needed.update(call.operands, call.made, (index for _dim, index in call.picked if index >= 0))
                found.append(call)
        order: dict[int, int] = {}

        def renumbered(numbers: Iterable[int]) -> tuple[int, ...]:
            return tuple(number if number < 0 else order.setdefault(number, len(order)) for number in numbers)

        calls = tuple(
            call._replace(
                operands=renumbered(call.operands),
                made=renumbered(call.made),
                picked=tuple((dim, renumbered([index])[0]) for dim, index in call.picked),
            )
            for call in reversed(found)
        )
        loss = order.get(self.loss, -1)
        shapes = tuple(self._shapes[at] for at in order)
        given = tuple(order[at] for at in self.given if at in order)
        whole = tuple(order[at] for at in self._whole_numbers if at in order)
        return Reaching(calls, shapes, given, whole, loss, self.samples, self.counted)

    def _operands(self, given: tuple[Any, ...]) -> Iterator[torch.Tensor]:
        """Tensors that a function is given; of a list of samples the first, as longer batches have more."""
        for one in given:
            leaves = [leaf for leaf in tree_leaves(one) if isinstance(leaf, torch.Tensor)]
            listed = isinstance(one, (list, tuple)) and len(one) == len(leaves) == self.samples
            of_samples = listed and {self._number(leaf) for leaf in leaves}.issubset(self.given)
            yield from leaves[:1] if of_samples else leaves

    def _place(self, index: Any) -> int:
        return self._number(index) if isinstance(index, torch.Tensor) else -1

    def _number(self, value: torch.Tensor) -> int:
        number, alive = self._numbers.get(id(value), (0, None))
        if alive is None or alive() is not value:  # an id of one that is gone is given again
            number = len(self._shapes)
            self._numbers[id(value)] = number, weakref.ref(value)
            self._shapes.append(tuple(value.shape))
        return number


def _dimensions(name: str, args: Any, kwargs: Any) -> tuple[int, ...]:
    if name not in _ALONG:
        return ()
    given = [one for one in tree_leaves((args, kwargs)) if type(one) is int]
    return tuple(given) or (-1,)


def _numbers_in(name: str, args: Any, kwargs: Any) -> tuple[float, ...]:
    """Numbers of Python that a function is given, without sizes."""
    sized = {"full": 1, "new_full": 2}.get(name, 0)
    named = {key: value for key, value in (kwargs or {}).items() if key != "size"}
    leaves = tree_leaves((args[sized:], named))
    return tuple(float(one) for one in leaves if type(one) is not bool and isinstance(one, _REAL))


def _picks(name: str, args: Any) -> Iterator[tuple[int, Any]]:
    """Dimensions in which integers pick, with these."""
    if name in _PICKING and len(args) > 2:
        yield (args[1], args[2])
    if name != "__getitem__":
        return
    parts = args[1] if isinstance(args[1], tuple) else (args[1],)
    wide = sum(one is not None and one is not Ellipsis for one in parts)
    dim = 0
    for one in parts:
        if one is Ellipsis:
            dim += args[0].dim() - wide
        elif one is not None:
            mask = _is_mask(one)
            if isinstance(one, list) or (not mask and hasattr(one, "dtype") and one.ndim):
                yield dim, one
            dim += int(one.ndim) if mask else 1


def _is_whole(tensor: torch.Tensor) -> bool:
    return not (tensor.is_floating_point() or tensor.is_complex() or tensor.dtype in (torch.bool, torch.uint8))


def _is_mask(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(str(getattr(one, "dtype", "")).endswith(("bool", "uint8")) for one in parts)


def _same_numbers(call: Call, twin: Call, ratio: float, *, lengths: bool) -> bool:
    """False where numbers of Python are others in the other run.

    One number that a loss is multiplied with or divided by may be the length of the batch: its graph tells which.
    """
    if call.name in _OF_SAMPLES and call.shapes != twin.shapes:
        return True
    if len(call.numbers) != len(twin.numbers):
        return False
    known = (1.0, ratio, 1 / ratio) if lengths or (call.operands and not any(call.shapes)) else (1.0,)
    return all(
        a == b or (b != 0 and any(math.isclose(a / b, one, rel_tol=1e-9) for one in known))
        for a, b in zip(call.numbers, twin.numbers, strict=True)
    )


class _Places:
    """Which tensors hold places of samples other than their own, of those that do not come from the batch."""

    def __init__(self, given: Reaching) -> None:
        self._ranges: set[int] = set()
        self._others = {-1, *given.whole_numbers}

    def follow(self, call: Call, twin: Call) -> None:
        """What the call makes."""
        made = set(call.made)
        if call.name == "arange":
            self._ranges |= made
        elif call.name in _PLACES and not call.operands:
            if call.shapes != twin.shapes:
                self._others |= made
        elif call.name in _SAME_PLACES and self._ranges.issuperset(call.operands):
            self._ranges |= made
        elif self._are_places(call):
            self._others |= made

    def _are_places(self, call: Call) -> bool:
        return bool(call.operands) and (self._ranges | self._others).issuperset(call.operands)

    def moved(self, call: Call, one: Reaching, other: Reaching) -> bool:
        """True if samples are picked by other places than their own."""
        first = (one.shapes[call.operands[0]], other.shapes[call.operands[0]]) if call.operands else ((), ())
        growing = [dim for dim, (a, b) in enumerate(zip(*first, strict=False)) if a != b]
        return any(index in self._others and dim % max(1, len(first[0])) in growing for dim, index in call.picked)


def _is_numbered(call: Call, twin: Call) -> bool:
    """True where a call makes something for each sample, which is not the same for all of them."""
    made = call.name in _NUMBERED and not call.operands and call.shapes != twin.shapes
    return made and (call.name not in _OF_SAMPLES or len(set(call.numbers)) != 1)


def joined_by(one: Reaching, other: Reaching, *, run: bool = False, counted: bool = False) -> str | None:
    """The function whose result joins samples behind the graph's back and reaches the loss.

    Args:
        one: of a batch.
        other: of a smaller one.
        run: whether the step is also run, which shows what the length of the batch does.
        counted: whether it is known by which number the loss is divided.

    Returns:
        Its name; "" for none; None where the two runs call other functions, and cannot be compared.
    """
    if [call[:3] for call in one.calls] != [call[:3] for call in other.calls]:
        return None
    of_batch = dict.fromkeys(one.given, True)
    seen: dict[int, str] = {}
    """What is joined and has a graph, which tells it, until it is detached."""
    joined: dict[int, str] = {}
    numbered: dict[int, str] = {}
    """What has another value for each sample by its number."""
    places = _Places(one)
    for call, twin in zip(one.calls, other.calls, strict=True):
        from_batch = [at for at in call.operands if of_batch.get(at)]
        scaled = counted and call.name in _SCALING and not any(call.shapes) and call.has_graph
        before = next((joined[at] for at in call.operands if at in joined and not scaled), "")
        told = next((seen[at] for at in call.operands if at in seen), "")
        grown = any(one.shapes[at] != other.shapes[at] for at in from_batch)
        places.follow(call, twin)
        if not run and _is_numbered(call, twin):
            numbered.update(dict.fromkeys(call.made, call.name))
        by_number = next((numbered[at] for at in call.operands if at in numbered), "")
        if by_number and not from_batch and not call.has_graph:
            numbered.update(dict.fromkeys(call.made, by_number))
        elif call.name not in _BY_NUMBER:
            before = before or by_number
        picked = bool(from_batch) and places.moved(call, one, other)
        if not scaled and not _same_numbers(call, twin, one.samples / max(1, other.samples), lengths=run):
            before = before or call.name
        for at, shape, another in zip(call.made, call.shapes, twin.shapes, strict=True):
            of_batch[at] = bool(from_batch) or of_batch.get(at, False)
            dims = [dim for dim, (a, b) in enumerate(zip(shape, another, strict=False)) if a != b]
            moved = any(dim % max(1, len(shape)) in dims for dim in call.along)
            # A part of the samples, or more than them: halves, all but the last, one put before them.
            cut = call.name not in _BY_VALUES and any(shape[dim] % one.samples for dim in dims)
            new = (len(dims) != 1 or moved or cut) and at not in call.operands
            by = told or (call.name if (grown and new) or picked else "")
            if before or (by and not call.has_graph):
                joined[at] = before or by
            elif by:
                seen[at] = by
    return joined.get(one.loss, "")
