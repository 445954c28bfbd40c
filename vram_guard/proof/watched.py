"""Numbers that tell when they are looked at."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._pytree import tree_map


class WatchedNumber(int):
    """Numbers that tell when they are looked at."""

    used: Callable[[], object]

    @classmethod
    def made(cls, value: int, used: Callable[[], object]) -> WatchedNumber:
        """One that calls ``used``."""
        number = cls(value)
        number.used = used
        return number


def _telling(name: str) -> Any:
    own = getattr(int, name)

    def told(self: WatchedNumber, *args: Any) -> Any:
        self.used()
        return own(self, *args)

    return told


_READ = (
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__bool__", "__hash__", "__index__", "__int__"),
    *("__float__", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__mod__", "__rmod__"),
    *("__floordiv__", "__rfloordiv__", "__truediv__", "__divmod__", "__and__", "__repr__", "__str__", "__format__"),
)
for _name in _READ:
    setattr(WatchedNumber, _name, _telling(_name))


class ReadValue:
    """A number that was read from a tensor: it can be shown, and tells of every other use.

    Args:
        value: the number.
        used: called when it is used.

    Example:
        >>> value = ReadValue(0.5, lambda: print("used"))
        >>> f"{value:.2f}"
        '0.50'
        >>> value > 1
        used
        False
    """

    def __init__(self, value: Any, used: Callable[[], object]) -> None:
        self.value, self.used = value, used

    def __format__(self, spec: str) -> str:
        return format(self.value, spec)

    def __str__(self) -> str:
        return str(self.value)

    def __repr__(self) -> str:
        return repr(self.value)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """A function of torch is given it: that is a use."""

        def plain(one: Any) -> Any:
            if isinstance(one, cls):
                one.used()
                return one.value
            return one

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))

    def __round__(self, digits: int | None = None) -> ReadValue:
        return ReadValue(round(self.value, digits), self.used)


def _using(name: str) -> Any:
    def use(self: ReadValue, *others: Any) -> Any:
        self.used()
        plain = [other.value if isinstance(other, ReadValue) else other for other in others]
        return getattr(self.value, name)(*plain)

    return use


for _name in (*_READ, "__neg__", "__abs__", "__pow__", "__rpow__", "__rtruediv__"):
    if _name not in ("__repr__", "__str__", "__format__", "__index__", "__and__"):
        setattr(ReadValue, _name, _using(_name))
