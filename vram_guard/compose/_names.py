"""Names of modules of which several have equal blocks, each with a number for its name."""

from __future__ import annotations

from collections.abc import Iterable


class NumberedNames:
    """Names of modules: those inside a block have its number in them."""

    def __init__(self, stacks: Iterable[str]) -> None:
        self._prefixes = tuple(f"{stack}." if stack else "" for stack in stacks)
        self._known: dict[str, tuple[str, int, int]] = {}

    @property
    def numbered(self) -> bool:
        """True if there are such modules."""
        return bool(self._prefixes)

    def parted(self, name: str) -> tuple[str, int]:
        """The name without its block's number, and that number; -1 outside of blocks."""
        return self._parted(name)[:2]

    def joined(self, name: str, number: int) -> str:
        """The name of the module that is there in another block."""
        _known, own, at = self._parted(name)
        return name if own in (-1, number) else f"{name[:at]}{number}{name[at + len(str(own)) :]}"

    def _parted(self, name: str) -> tuple[str, int, int]:
        """As :meth:`parted`, with the place of the number in the name."""
        found = self._known.get(name)
        if found is None:
            found = name, -1, 0
            for prefix in self._prefixes:
                number, dot, rest = name.removeprefix(prefix).partition(".")
                if name.startswith(prefix) and number.isdecimal():
                    found = f"{prefix}#{dot}{rest}", int(number), len(prefix)
            self._known[name] = found
        return found
