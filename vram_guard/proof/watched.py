"""Numbers that tell when they are used.

They are no numbers themselves: what takes a number of Python's own, as ``range`` or an index, takes its value past
every method of a subclass.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch.utils._pytree import tree_map


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

    @property  # type: ignore[misc]
    def __class__(self) -> type:
        """The class of the number, so that ``isinstance`` holds."""
        return type(self.value)

    def __getattr__(self, name: str) -> Any:
        if not name.startswith("__"):
            self.used()
        return getattr(self.value, name)

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
            if issubclass(type(one), ReadValue):
                one.used()
                return one.value
            return one

        return func(*tree_map(plain, args), **tree_map(plain, kwargs or {}))

    def __round__(self, digits: int | None = None) -> ReadValue:
        return ReadValue(round(self.value, digits), self.used)


class WatchedNumber(ReadValue):
    """A number that tells of every use, also of being shown: a name may be made of it."""

    def __format__(self, spec: str) -> str:
        self.used()
        return super().__format__(spec)

    def __str__(self) -> str:
        self.used()
        return super().__str__()

    def __repr__(self) -> str:
        self.used()
        return super().__repr__()


def _using(name: str) -> Any:
    def use(self: ReadValue, *others: Any) -> Any:
        self.used()
        plain = [other.value if issubclass(type(other), ReadValue) else other for other in others]
        method = getattr(self.value, name, None)  # a float is no index
        return NotImplemented if method is None else method(*plain)

    return use


for _name in (
    *("__eq__", "__ne__", "__lt__", "__le__", "__gt__", "__ge__", "__bool__", "__hash__", "__index__", "__int__"),
    *("__float__", "__complex__", "__add__", "__radd__", "__sub__", "__rsub__", "__mul__", "__rmul__", "__mod__"),
    *("__rmod__", "__floordiv__", "__rfloordiv__", "__truediv__", "__rtruediv__", "__divmod__", "__rdivmod__"),
    *("__pow__", "__rpow__", "__neg__", "__pos__", "__abs__", "__invert__", "__and__", "__rand__", "__or__", "__ror__"),
    *("__xor__", "__rxor__", "__lshift__", "__rlshift__", "__rshift__", "__rrshift__", "__trunc__", "__floor__"),
    "__ceil__",
):
    setattr(ReadValue, _name, _using(_name))
