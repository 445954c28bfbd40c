"""Names of modules that know the module's class, and how names are shown."""

from __future__ import annotations

from typing import TYPE_CHECKING

from vram_guard.language import _

if TYPE_CHECKING:
    from typing_extensions import Self


class ModuleName(str):
    """A module's path in its model, equal to the plain text; :func:`with_class` shows its class too.

    Example:
        >>> name = ModuleName("layers.0", "Linear")
        >>> name == "layers.0", with_class(name)
        (True, 'layers.0 (Linear)')
    """

    __slots__ = ("kind",)

    kind: str
    """Name of the module's class."""

    def __new__(cls, path: str, kind: str) -> Self:
        """Keep the class beside the text."""
        made = super().__new__(cls, path)
        made.kind = kind
        return made

    def __reduce__(self) -> tuple[type[ModuleName], tuple[str, str]]:
        return type(self), (str(self), self.kind)


def kind_of(name: str) -> str:
    """The class of a module; "" where the name does not know it."""
    return name.kind if isinstance(name, ModuleName) else ""


def with_class(name: str, shown: str | None = None) -> str:
    """The name with its class, where that is known; the whole model's name, "", stays empty.

    Args:
        name: of a module.
        shown: what stands for it.
    """
    shown, kind = name if shown is None else shown, kind_of(name)
    return _("{name} ({kind})", name=shown, kind=kind) if shown and kind else str(shown)


def in_a_sentence(name: str) -> str:
    """The name so that it reads as one beside other words, also where it is a number: "module '1' (ReLU)"; "" for "".

    Args:
        name: of a module.
    """
    return with_class(name, _("module '{name}'", name=name)) if name else ""


def joined(names: tuple[str, ...]) -> str:
    """The names in their order, runs of numbers joined, with their classes: "h.0-7 (Block), head (Linear)"."""
    runs: list[list[str]] = []
    for name in names:
        stem, _dot, number = name.rpartition(".")
        if runs and number.isdigit():
            last = runs[-1][-1]
            before, _dot, latest = last.rpartition(".")
            follows = latest.isdigit() and int(latest) == int(number) - 1
            if before == stem and follows and kind_of(last) == kind_of(name):
                runs[-1].append(name)
                continue
        runs.append([name])
    return _(", ").join(
        with_class(run[0], run[0] if len(run) == 1 else f"{run[0]}-{run[-1].rpartition('.')[2]}") for run in runs
    )
