"""Where two runs of one optimizer step differ by more than rounding.

Two runs of the same arithmetic in another order agree to some digits only, and not in every number. The rules:

- Tensors are compared by norms, ``|a - b|`` against a scale; a single element says nothing.
- The scale of a gradient is its own norm, and that of a floor: ``tolerance`` times the norm of all gradients together.
  Below it a gradient is rounding noise: that of a bias before a normalisation is zero on paper and 1e-9 in the machine.
- The scale of anything that the step changes (weights, buffers, attributes) is how much it changed, where that is
  known, with ``tolerance`` times its own norm as floor: what is written back to a large number is rounded to its
  digits. A single number has ``tolerance`` itself as floor, too.
- Adam's first step moves every weight by the learning rate, whatever the size of its gradient: where a gradient is
  noise, the sign of the move is, too. So weights are compared in those elements only whose gradients agree within
  ``tolerance`` element by element, and not at all where the gradient as a whole is noise. Elements left out this way
  are held by the comparison of the gradients.
- Integers, booleans and text are equal or not. NaN and infinities at the same places are equal.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from enum import Enum
from typing import Any, Final, NamedTuple

import torch

from vram_guard.language import Message, _, marked
from vram_guard.limits import CHARACTERS_SHOWN
from vram_guard.proof._norms import distance, norm_of_finite
from vram_guard.proof.observed import Observed

#: Relative difference that rounding explains, by the type that is computed in. Measured on CPUs, two halves of four
#: samples beside the four, in the worst gradient of ResNet-50, GPT-2 and a vision transformer: 4e-15 in double, 1e-6 in
#: single precision (1.3e-4 in 13 convolutions with statistics of the batch), 3e-3 in bfloat16. Losses that are no means
#: over samples give several per cent. Double leaves room for operators that work in single precision inside; float16
#: has three bits more than bfloat16.
TOLERANCES: Final[Mapping[torch.dtype, float]] = {
    torch.float64: 1e-6,
    torch.float32: 1e-3,
    torch.float16: 1e-2,
    torch.bfloat16: 3e-2,
}


class Kind(Enum):
    """A part of a step's outcome."""

    LOSS = "loss"
    GRADIENT = "gradient"
    WEIGHT = "weight"
    BUFFER = "buffer"
    ATTRIBUTE = "attribute"
    LOGGED = "logged"
    HOOK = "hook"
    WRITES = "writes"
    """How often a tensor was written in place: a mean of equal things moves nothing, and was advanced all the same."""


_BY_AMOUNT: Final = {
    Kind.GRADIENT: marked("the gradient of {name} differs by {amount}"),
    Kind.WEIGHT: marked("the update of {name} differs by {amount}"),
    Kind.BUFFER: marked("the buffer {name} differs by {amount}"),
    Kind.ATTRIBUTE: marked("the attribute {name} differs by {amount}"),
    Kind.LOGGED: marked("the logged value {name} differs by {amount}"),
}
_BY_VALUE: Final = {
    Kind.LOSS: marked("the loss is {other} instead of {one}"),
    Kind.GRADIENT: marked("the gradient of {name} is {other} instead of {one}"),
    Kind.WEIGHT: marked("{name} is {other} instead of {one}"),
    Kind.BUFFER: marked("the buffer {name} is {other} instead of {one}"),
    Kind.ATTRIBUTE: marked("the attribute {name} is {other} instead of {one}"),
    Kind.LOGGED: marked("the logged value {name} is {other} instead of {one}"),
    Kind.HOOK: marked("{name} ran {other} instead of {one}"),
    Kind.WRITES: marked("{name} was written {other} instead of {one}"),
}
_MISSING: Final = Message(marked("missing"))


@dataclass(frozen=True)
class Difference:
    """One thing that differs.

    Example:
        >>> print(Difference(Kind.GRADIENT, "encoder.weight", 0.032).words())
        the gradient of encoder.weight differs by 3.2%
        >>> print(Difference(Kind.ATTRIBUTE, "model.counter", 0.5, one=1, other=2).words())
        the attribute model.counter is 2 instead of 1
        >>> print(Difference(Kind.HOOK, "on_before_backward", 0.5, one=1, other=2).words())
        on_before_backward ran 2 times instead of once
    """

    kind: Kind
    name: str
    amount: float
    """Relative, by the rules of this module; infinite where the two cannot be compared."""
    one: object = None
    """The value in the first run; of a tensor only what prevents its comparison."""
    other: object = None

    def words(self) -> str:
        """The difference in the reader's language."""
        if self.one is None and self.other is None:
            percent = self.amount * 100
            amount = f"{percent:.1f}%" if percent >= 1 else f"{percent:.2g}%"
            return _(_BY_AMOUNT[self.kind], name=self.name, amount=amount)
        shown = _times if self.kind in (Kind.HOOK, Kind.WRITES) else _shown
        return _(_BY_VALUE[self.kind], name=self.name, one=shown(self.one), other=shown(self.other))


def differences(
    one: Observed,
    other: Observed,
    *,
    tolerance: float,
    ignored: Collection[str] = (),
    cut: tuple[int, int] | None = None,
    read: Collection[str] = (),
) -> tuple[Difference, ...]:
    """Compare two runs of one step, by the rules of this module; the worst difference first.

    Args:
        one: the step as written.
        other: the step as it would be run.
        tolerance: one of :data:`TOLERANCES`, of the least precise type that the step computes in.
        ignored: names of parameters, buffers, attributes, logged values or hooks, with everything inside of them.
        cut: samples of the whole batch, and of the last micro-batch of ``other``. An attribute that holds a batch (its
            rows, its size, a list with an item for each sample) then holds a micro-batch, and is no difference.
        read: attributes that hooks have read after the step: of these it is one.

    Example:
        >>> from vram_guard.proof.observed import observe
        >>> model = torch.nn.Linear(2, 1)
        >>> one = observe(model, hooks={"on_before_backward": 1}, logged={"loss": 0.5})
        >>> other = observe(model, hooks={"on_before_backward": 2}, logged={"loss": 0.5000001})
        >>> [difference.words() for difference in differences(one, other, tolerance=1e-3)]
        ['on_before_backward ran 2 times instead of once']
    """
    found = _Comparison(one, other, tolerance, cut, read).found()
    kept = (each for each in found if not any(_is_in(each.name, name) for name in ignored))
    order = list(Kind)
    return tuple(sorted(kept, key=lambda each: (-each.amount, order.index(each.kind), each.name)))


class _Gap(NamedTuple):
    """How far two tensors are apart, and how large they are."""

    distance: float
    size: float

    @classmethod
    def between(cls, one: torch.Tensor, other: torch.Tensor) -> _Gap:
        size = norm_of_finite(one)
        if torch.equal(one, other):
            return cls(0.0, size)
        return cls(distance(one, other), max(size, norm_of_finite(other)))


class _Comparison:
    """Two outcomes beside each other."""

    def __init__(
        self, one: Observed, other: Observed, tolerance: float, cut: tuple[int, int] | None, read: Collection[str]
    ) -> None:
        self._one, self._other = one, other
        self._read = read
        self._tolerance = tolerance
        self._cut = cut if cut is not None and cut[0] != cut[1] else None
        self._gradients = dict(_pairs_of_gradients(one.gradients, other.gradients))
        self._gaps = {name: _Gap.between(*pair) for name, pair in self._gradients.items()}

    def found(self) -> Iterator[Difference]:
        one, other = self._one, self._other
        if one.loss is not None and other.loss is not None:
            yield from self._compare(Kind.LOSS, "", one.loss, other.loss)
        floor = self._tolerance * math.hypot(*(gap.size for gap in self._gaps.values()))
        for name, pair in self._gradients.items():
            gap = self._gaps[name]
            yield from self._judge(Kind.GRADIENT, name, *pair, gap, max(gap.size, floor))
        for name, mine, its in _pairs(one.weights, other.weights):
            yield from self._weight(name, mine, its)
        for name, mine, its in _pairs(one.buffers, other.buffers):
            yield from self._compare(Kind.BUFFER, name, mine, its)
        yield from self._attributes()
        for name, mine, its in _pairs(one.logged, other.logged):
            yield from self._compare(Kind.LOGGED, name, mine, its)
        for name in {**one.hooks, **other.hooks}:
            yield from self._compare(Kind.HOOK, name, one.hooks.get(name, 0), other.hooks.get(name, 0))
        for name in one.writes.keys() & other.writes.keys():
            yield from self._compare(Kind.WRITES, name, one.writes[name], other.writes[name])

    def _weight(self, name: str, mine: Any, its: Any) -> Iterator[Difference]:
        gradients, gap = self._gradients.get(name), self._gaps.get(name)
        if gradients is None or gap is None or mine is _MISSING or its is _MISSING or gradients[0].shape != mine.shape:
            yield from self._compare(Kind.WEIGHT, name, mine, its)
        elif gap.distance <= self._tolerance * gap.size:  # else the gradient is named already, or noise
            apart = _Gap(distance(mine, its, alike=(*gradients, self._tolerance)), norm_of_finite(mine))
            yield from self._judge(Kind.WEIGHT, name, mine, its, apart, self._scale(Kind.WEIGHT, name, apart.size, 0.0))

    def _attributes(self) -> Iterator[Difference]:
        pairs = list(_pairs(self._one.attributes, self._other.attributes))
        cut = {name for name, mine, its in pairs if self._is_cut(mine, its) and not self._is_read(name)}
        lists = [name[len("len(") : -1] for name in cut if name.startswith("len(")]
        for name, mine, its in pairs:
            if name not in cut and not any(_is_in(name, each) for each in lists):
                yield from self._compare(Kind.ATTRIBUTE, name, mine, its)

    def _is_read(self, name: str) -> bool:
        return any(_is_in(name, each) for each in self._read)

    def _is_cut(self, mine: Any, its: Any) -> bool:
        """Whether the second value is that of the last micro-batch where the first is that of the batch."""
        if self._cut is None or type(mine) is not type(its):
            return False
        samples, last = self._cut
        if isinstance(mine, int):
            return mine != its and mine % samples == 0 and mine * last == its * samples
        if not isinstance(mine, torch.Tensor) or mine.dim() != its.dim():
            return False
        longer = [dim for dim, size in enumerate(mine.shape) if size != its.shape[dim]]
        if len(longer) != 1 or mine.shape[longer[0]] * last != its.shape[longer[0]] * samples:
            return False
        rows = its.shape[longer[0]]
        end = mine.narrow(longer[0], mine.shape[longer[0]] - rows, rows)
        gap = _Gap.between(end, its)
        return gap.distance <= self._tolerance * gap.size

    def _compare(self, kind: Kind, name: str, mine: Any, its: Any) -> Iterator[Difference]:
        mine, its = _number(mine), _number(its)
        if isinstance(mine, torch.Tensor) and isinstance(its, torch.Tensor) and mine.shape == its.shape:
            gap = _Gap.between(mine, its)
            yield from self._judge(kind, name, mine, its, gap, self._scale(kind, name, gap.size, 0.0))
        elif isinstance(mine, torch.Tensor) or isinstance(its, torch.Tensor):
            yield Difference(kind, name, math.inf, _told(mine), _told(its))
        elif type(mine) is not type(its) and not (_is_number(mine) and _is_number(its)):
            yield Difference(kind, name, math.inf, mine, its)
        elif mine != its and not (mine != mine and its != its):  # noqa: PLR0124 - NaN
            amount = self._amount(kind, name, mine, its)
            if amount > self._tolerance or not _is_rounded(mine, its):
                yield Difference(kind, name, amount, mine, its)

    def _judge(
        self, kind: Kind, name: str, mine: torch.Tensor, its: torch.Tensor, gap: _Gap, scale: float
    ) -> Iterator[Difference]:
        """A difference between tensors of one shape, if their gap is more than rounding at that scale."""
        if not math.isfinite(gap.distance):
            yield Difference(kind, name, math.inf, _not_finite(mine), _not_finite(its))
        elif gap.distance:
            amount = gap.distance / scale if scale else math.inf
            if amount > self._tolerance or not (mine.is_floating_point() or mine.is_complex()):
                yield Difference(kind, name, amount)

    def _amount(self, kind: Kind, name: str, mine: Any, its: Any) -> float:
        """The relative difference of two values that are not equal."""
        if not _is_number(mine):
            return 1.0
        try:
            gap, size = float(abs(mine - its)), float(max(abs(mine), abs(its)))
        except OverflowError:
            return 1.0
        amount = gap / self._scale(kind, name, size, self._tolerance)
        return amount if math.isfinite(amount) else math.inf

    def _scale(self, kind: Kind, name: str, size: float, floor: float) -> float:
        """The size of a difference of 1: that of the change where it is known, or of the value."""
        changing = kind in (Kind.WEIGHT, Kind.BUFFER, Kind.ATTRIBUTE)
        moved = [each.moved[name] for each in (self._one, self._other) if changing and name in each.moved]
        return max(*moved, self._tolerance * size, floor) if moved else max(size, floor)


def _pairs(one: Mapping[str, Any], other: Mapping[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    for name in {**one, **other}:
        yield name, one.get(name, _MISSING), other.get(name, _MISSING)


def _pairs_of_gradients(
    one: Mapping[str, torch.Tensor], other: Mapping[str, torch.Tensor]
) -> Iterator[tuple[str, tuple[torch.Tensor, torch.Tensor]]]:
    """Of each parameter; where there is no gradient, it is zero. Both have the shape of the parameter."""
    for name, mine, its in _pairs(one, other):
        yield (
            name,
            (
                torch.zeros_like(its) if mine is _MISSING else mine,
                torch.zeros_like(mine) if its is _MISSING else its,
            ),
        )


def _not_finite(tensor: torch.Tensor) -> Message:
    return Message(marked("not finite in {count} elements"), count=int((~tensor.isfinite()).sum()))


def _number(value: Any) -> Any:
    """A tensor without dimensions as the number that it holds."""
    return value.item() if isinstance(value, torch.Tensor) and value.dim() == 0 else value


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float, complex))


def _is_in(name: str, outer: str) -> bool:
    """Whether a name is ``outer`` or of something inside of it."""
    inner = name.removeprefix("len(")
    return inner.startswith(outer) and inner[len(outer) : len(outer) + 1] in ("", ".", "[", ")")


def _is_rounded(*numbers: object) -> bool:
    return any(isinstance(number, (float, complex)) for number in numbers)


def _told(value: object) -> object:
    if not isinstance(value, torch.Tensor):
        return value
    return Message(marked("a tensor of shape {shape}"), shape=tuple(value.shape))


def _shown(value: object) -> str:
    if isinstance(value, Message):
        return str(value)
    if isinstance(value, float):
        return f"{value:.8g}"
    text = repr(value)
    return text if len(text) <= CHARACTERS_SHOWN else text[:CHARACTERS_SHOWN] + "..."


def _times(count: object) -> str:
    if count == 1:
        return _("once")
    return _("{count} times", count=count)
