"""Checks of what a user gives that many rooms need; they do no work, and say what is known."""

from __future__ import annotations

import inspect
import operator
from collections.abc import Callable, Iterable
from difflib import get_close_matches

from vram_guard.errors import InvalidInputError
from vram_guard.language import _
from vram_guard.limits import LARGEST_BATCH


def checked_count(name: str, value: object) -> int:
    """``value`` as a positive int that a tensor dimension can hold.

    Raises:
        InvalidInputError: for bool, float, NaN, zero, negative or absurdly large values.
    """
    if isinstance(value, bool):
        raise InvalidInputError(
            _("{name} must be a whole number of at least 1, not {value}", name=name, value=repr(value))
        )
    try:
        count = operator.index(value)  # type: ignore[arg-type]
    except TypeError:
        raise InvalidInputError(
            _("{name} must be a whole number of at least 1, not {value}", name=name, value=repr(value))
        ) from None
    if not 1 <= count <= LARGEST_BATCH:
        raise InvalidInputError(
            _("{name} must be between 1 and {most}, not {value}", name=name, most=LARGEST_BATCH, value=count)
        )
    return count


def takes(name: str, function: Callable[..., object], *arguments: str) -> None:
    """Check that a function can be called with these arguments by position.

    Nothing is known of functions without a signature (some built into Python): they pass.

    Args:
        name: of the function, as the user gave it.
        function: any callable.
        arguments: their names, for the message.

    Raises:
        InvalidInputError: it takes others.

    Example:
        >>> takes("loss", lambda model: model, "model", "batch")
        Traceback (most recent call last):
        vram_guard.errors.InvalidInputError: loss is called with (model, batch), but takes (model)
    """
    try:
        signature = inspect.signature(function, follow_wrapped=False)  # a decorator may hand on other arguments
    except (TypeError, ValueError):
        return
    try:
        signature.bind(*arguments)
    except TypeError:
        wanted = ", ".join(arguments)
        said = _(
            "{name} is called with ({arguments}), but takes ({taken})",
            name=name,
            arguments=wanted,
            taken=", ".join(signature.parameters),
        )
        raise InvalidInputError(said) from None


def one_of(name: str, value: object, known: Iterable[str]) -> None:
    """Check that ``value`` is one of the known words.

    Raises:
        InvalidInputError: it is none of them.
    """
    words = tuple(known)
    if value not in words:
        said = _("{name} must be one of {known}, not {value}", name=name, known=", ".join(words), value=repr(value))
        raise InvalidInputError(said)


def known_names(where: str, names: Iterable[object], known: Iterable[str]) -> None:
    """Check that all of these names are known.

    Raises:
        InvalidInputError: one is not; the message suggests the nearest known one.
    """
    words = tuple(known)
    for name in names:
        if name not in words:
            near = get_close_matches(str(name), words, n=1)
            hint = _("; did you mean {near}?", near=repr(near[0])) if near else ""
            listed = ", ".join(words)
            said = _(
                "{where}: unknown {name}, known are {known}{hint}",
                where=where,
                name=repr(name),
                known=listed,
                hint=hint,
            )
            raise InvalidInputError(said)
