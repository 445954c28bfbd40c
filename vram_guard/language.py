"""Messages in the reader's language: English, or Chinese.

Messages stand in the code in English, as ``_("needs {peak}", peak=...)``, and are translated by gettext catalogues
under ``locale/``. ``make messages`` brings the catalogues up to date with the code and compiles them.

The language is, the first that is given: what :func:`use_language` was told (``--lang``), ``VRAM_GUARD_LANG``, and the
locale of the environment (``LC_ALL``, ``LC_MESSAGES``, ``LANG``; GNU's ``LANGUAGE`` before them, as gettext has it).
"""

from __future__ import annotations

import gettext
import os
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final

from vram_guard.errors import InvalidInputError
from vram_guard.printable import printable

LOCALE: Final = Path(__file__).with_name("locale")
DOMAIN: Final = "vram_guard"
ENGLISH: Final = "en"
CHINESE: Final = "zh_CN"
LANGUAGES: Final = (ENGLISH, CHINESE)

_chosen: str | None = None


def _(message: str, /, **values: object) -> str:
    """The message in the reader's language, with ``{name}`` replaced by ``values``.

    Translate when the words are needed, not at import: the language may be chosen later. A message that is written
    down before that is marked with :func:`marked`.
    """
    translated = _catalogue(language()).gettext(message)
    return translated.format(**{name: _shown(value) for name, value in values.items()}) if values else translated


def _shown(value: object) -> object:
    """A value as it may stand in a message: numbers for their own formats, text without control characters."""
    return value if isinstance(value, int | float) else printable(str(value))


def marked(message: str, /) -> str:
    """The message as it is, known to the catalogues: for constants that are translated where they are shown."""
    return message


@dataclass(frozen=True, init=False)
class Message:
    """A message with its values, for answers that outlive a language: ``str()`` puts it into the reader's.

    Values may be messages themselves. They are part of the message's identity, so they have to be hashable.
    """

    text: str
    """As in the code, in English."""
    values: tuple[tuple[str, object], ...]

    def __init__(self, text: str, /, **values: object) -> None:
        object.__setattr__(self, "text", text)
        object.__setattr__(self, "values", tuple(values.items()))

    @classmethod
    def of(cls, text: str, values: Mapping[str, object]) -> Message:
        """The message of a text in English and its values, for those that were written down."""
        return cls(text, **values)

    def __str__(self) -> str:
        return _(self.text, **dict(self.values))


def language() -> str:
    """The language that is spoken now, one of :data:`LANGUAGES`."""
    return _chosen or _of_environment(os.environ, getattr(sys.stdout, "encoding", None))


def use_language(name: str | None) -> None:
    """Speak this language from now on; None: what the environment says.

    Args:
        name: "en" or "zh", in any spelling of a locale ("zh_CN.UTF-8", "zh-Hans", "en_GB").

    Raises:
        InvalidInputError: a language that there is no catalogue for.
    """
    global _chosen  # noqa: PLW0603 - one process speaks one language
    _chosen = None if name is None else checked_language(name)


def checked_language(name: object) -> str:
    """The language that a name means.

    Raises:
        InvalidInputError: there is no catalogue for it.
    """
    found = _known(name) if isinstance(name, str) else None
    if found is None:
        raise InvalidInputError(_("language {name} is not known: give en or zh", name=repr(str(name)[:40])))
    return found


@contextmanager
def speaking(name: str | None) -> Iterator[None]:
    """The language within a ``with`` block."""
    before = _chosen
    use_language(name)
    try:
        yield
    finally:
        use_language(before)


def _of_environment(environment: Mapping[str, str], encoding: str | None) -> str:
    """The language that the environment asks for; English where standard output cannot show another."""
    own = environment.get("VRAM_GUARD_LANG")
    if own:
        return _known(own) or ENGLISH  # a typo in a variable stops no training
    locale = next((value for name in ("LC_ALL", "LC_MESSAGES", "LANG") if (value := environment.get(name))), "C")
    if locale.partition(".")[0] in ("C", "POSIX"):
        return ENGLISH
    wanted = [name for name in environment.get("LANGUAGE", "").split(":") if name] or [locale]
    found = next((known for name in wanted if (known := _known(name))), ENGLISH)
    return found if _can_show(found, encoding) else ENGLISH


def _known(name: str) -> str | None:
    """The language of a locale's name; None where there is no catalogue for it."""
    code = name.strip().replace("-", "_").partition(".")[0].partition("_")[0].lower()
    return {"en": ENGLISH, "c": ENGLISH, "zh": CHINESE}.get(code)


def _can_show(name: str, encoding: str | None) -> bool:
    if name == ENGLISH or encoding is None:
        return True
    try:
        "显存".encode(encoding)
    except (LookupError, UnicodeEncodeError):
        return False
    return True


@cache
def _catalogue(name: str) -> gettext.NullTranslations:
    if name == ENGLISH:
        return gettext.NullTranslations()
    return gettext.translation(DOMAIN, LOCALE, [name], fallback=True)
