"""A table of cases as one test, which lists all that fail."""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable, Iterable
from typing import Any


def each(names: str | tuple[str, ...], cases: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """As ``pytest.mark.parametrize``, but one test; what it is given besides is the same for all cases.

    Args:
        names: of the argument, or of several.
        cases: a value for each test, or a tuple with one for each name.
    """

    given = (names,) if isinstance(names, str) else names

    def decorated(test: Callable[..., None]) -> Callable[..., None]:
        @functools.wraps(test)
        def over_all(**fixtures: Any) -> None:
            failed = []
            for case in cases:
                values = (case,) if isinstance(names, str) else case
                try:
                    test(**fixtures, **dict(zip(given, values, strict=True)))
                except Exception as error:  # noqa: BLE001 - whatever it is, it is told, and the others are tried
                    failed.append(f"{case!r:.300}: {type(error).__name__}: {error}")
            if failed:
                raise AssertionError("\n".join([f"{len(failed)} cases fail", *failed]))

        own = inspect.signature(test)
        others = [
            one for name, one in own.parameters.items() if name not in ((names,) if isinstance(names, str) else names)
        ]
        over_all.__signature__ = own.replace(parameters=others)  # type: ignore[attr-defined]
        del over_all.__wrapped__  # else the arguments above are taken for fixtures
        return over_all

    return decorated
