"""Values that a step reads from its symbolic tensors: ``.item()``, ``.tolist()``, ``if tensor:``.

Where a value is not known (:mod:`.constants`) a placeholder keeps the loop going. A number that is only
printed or logged does no harm; one that decides which way the step goes does, so it remembers where it came from, and
the first comparison with it is written into the notes.
"""

from __future__ import annotations

import dis
import math
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch

from vram_guard.language import Message
from vram_guard.simulate.device import constants
from vram_guard.simulate.device.branches import chosen
from vram_guard.simulate.device.ranges import bounds_of
from vram_guard.simulate.device.symbolic import is_symbolic

if TYPE_CHECKING:
    from vram_guard.simulate.memory.recorder import Recorder

_ARITHMETIC = (
    *("__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__truediv__", "__rtruediv__"),
    *("__floordiv__", "__rfloordiv__", "__mod__", "__rmod__", "__pow__", "__rpow__", "__neg__", "__abs__", "__round__"),
)
_COMPARISONS = ("__lt__", "__le__", "__gt__", "__ge__", "__eq__", "__ne__")

#: ``max(best, loss.item())`` compares too, but decides nothing: a builtin has no comparing instruction.
_COMPARING = dis.opmap["COMPARE_OP"]


class ScalarQueries:
    """Answers for one trace, which tell its recorder what they guessed."""

    def __init__(self, recorder: Recorder) -> None:
        self._recorder = recorder

    def tolist(self, tensor: torch.Tensor) -> Any:
        """The tensor's real values where they are known, else placeholders."""
        value = constants.compute(tensor)
        if value is None:
            value = torch.full((), constants.placeholder(tensor), dtype=tensor.dtype).expand(tensor.shape)
        return torch._C.TensorBase.tolist(value)

    def item(self, tensor: torch.Tensor) -> Any:
        """The one value of the tensor: the real one, or a placeholder that says when the step decides by it.

        Raises:
            RuntimeError: the tensor has more than one element, as torch says it.
        """
        number = torch._C.TensorBase.item(tensor)
        if not is_symbolic(tensor) or constants.compute(tensor) is not None:
            return number
        bounds = bounds_of(tensor)
        if bounds is not None and bounds.at_most:
            self._recorder.note(
                Message(
                    "the largest or smallest of values that are not known before training is read: taken at its bound, "
                    "{answer}",
                    answer=number,
                ),
                tier="partly symbolic",
            )
        kind = _GUESSES.get(type(number))  # no class can be made of bool: the operator beneath has decided it
        return number if kind is None else _guess(kind, number, self._recorder)

    def truth(self, tensor: torch.Tensor) -> bool:
        """``if tensor:``."""
        answer = torch._C.TensorBase.__bool__(tensor)
        decided = tensor.dtype == torch.bool or not is_symbolic(tensor) or constants.compute(tensor) is not None
        return answer if decided else chosen(self._recorder, answer)


def _comparing(name: str, plain: type) -> Callable[[Any, Any], Any]:
    compare = getattr(plain, name)

    def compared(self: Any, other: Any) -> Any:
        answer = compare(self, other)
        frame = sys._getframe(1)
        by_hand = frame.f_code.co_code[frame.f_lasti] == _COMPARING
        # x != x and |x| < inf ask whether the number is healthy: it is.
        healthy = other is self or (isinstance(other, float) and not math.isfinite(other))
        if answer is NotImplemented or not by_hand or healthy:
            return answer
        return chosen(self.recorder, answer, frame, plain(self))

    return compared


def _calculating(name: str, plain: type) -> Callable[..., Any]:
    calculate = getattr(plain, name)

    def calculated(self: Any, *others: Any) -> Any:
        result = calculate(self, *others)
        kind = _GUESSES.get(type(result))
        return result if kind is None else _guess(kind, result, self.recorder)

    return calculated


def _truth(plain: type) -> Callable[[Any], bool]:
    def true(self: Any) -> bool:
        return chosen(self.recorder, bool(plain(self)), sys._getframe(1), plain(self))

    return true


def _guess_of(plain: type) -> type:
    """A number that says when it decides something, and passes that on to what is calculated from it."""
    body: dict[str, Any] = {name: _comparing(name, plain) for name in _COMPARISONS}
    body.update({name: _calculating(name, plain) for name in _ARITHMETIC if hasattr(plain, name)})
    body.update(
        __bool__=_truth(plain),
        __hash__=plain.__hash__,
        __reduce__=lambda self: (plain, (plain(self),)),  # copies and pickles are plain numbers
        __doc__=f"A placeholder for a {plain.__name__} that is not known.",
    )
    return type(f"Guessed{plain.__name__.capitalize()}", (plain,), body)


def _guess(kind: type, number: Any, recorder: Recorder) -> Any:
    made = kind(number)
    made.recorder = recorder
    return made


_GUESSES: dict[type, type] = {plain: _guess_of(plain) for plain in (float, int)}
