"""argparse in the reader's language: its own words, and help that is broken where a terminal's lines end."""

from __future__ import annotations

import argparse
import gettext
import os
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from typing import Any, NoReturn

from vram_guard.cli.exits import EXIT_USAGE
from vram_guard.language import ENGLISH, LOCALE, _, language
from vram_guard.printable import printable
from vram_guard.terminal import fitting, wrapped

#: The catalogue of argparse's own messages.
DOMAIN = "argparse"


class _Given(argparse.Action):
    """An option that notes in ``namespace.given`` that it was given: destination -> as it is written."""

    def __call__(self, parser: Any, namespace: argparse.Namespace, values: Any, option: str | None = None) -> None:
        if values is not self.default:  # argparse calls positional arguments with their defaults too
            namespace.__dict__.setdefault("given", {}).setdefault(self.dest, option or str(self.metavar or self.dest))
        super().__call__(parser, namespace, values, option)


class _Once(argparse.Action):
    """Keep an option's value; of two, the second would silently replace the first."""

    def __call__(self, _parser: Any, namespace: argparse.Namespace, values: Any, _option: str | None = None) -> None:
        once = namespace.__dict__.setdefault("given_once", set())
        if self.dest in once:
            raise argparse.ArgumentError(self, _("given twice"))
        once.add(self.dest)
        setattr(namespace, self.dest, values)


class _Several(argparse.Action):
    """An option of several values: with commas, or given again; with ``nargs="+"`` with spaces too. A list of words."""

    def __call__(self, _parser: Any, namespace: argparse.Namespace, values: Any, _option: str | None = None) -> None:
        words = values if isinstance(values, list) else [values]
        setattr(namespace, self.dest, [*(getattr(namespace, self.dest, None) or []), *words])


class Parser(argparse.ArgumentParser):
    """A parser whose help reckons with wide characters, and whose errors are one line.

    An option that takes one value may be given once, and for one that is unknown the nearest is named.
    """

    def __init__(self, *, passes_on: bool = False, **settings: Any) -> None:
        settings.setdefault("formatter_class", Formatter)
        super().__init__(**settings)
        self._passes_on = passes_on  # what it does not know is for another parser
        own = {None: _Once, "store": _Once, "list": _Several}
        for name in (*own, "store_true", "append", "extend"):
            kind = own.get(name) or self._registry_get("action", name)
            self.register("action", name, type(kind.__name__, (_Given, kind), {}))

    def error(self, message: str) -> NoReturn:
        """One line, without the usage before it."""
        fail(self, message)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> Any:
        """As argparse's; a command's own parser ends with what it does not know, its nearest options at hand."""
        found, unknown = super().parse_known_args(args, namespace)
        found.__dict__.setdefault("given", {})
        if not self._passes_on:
            refuse_unknown(self, unknown)
        return found, unknown

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        try:
            super()._check_value(action, value)
        except argparse.ArgumentError as error:
            error.message += _nearest(value, action.choices or ())
            raise


def fail(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """End with one line; the message may quote what was typed, or read from a script."""
    line = f"{parser.prog}: {printable(message, lines=False)} ({parser.prog} --help)"
    parser.exit(EXIT_USAGE, f"{fitting(line, sys.stderr)}\n")


def refuse_unknown(parser: argparse.ArgumentParser, words: Sequence[str]) -> None:
    """End where a parser knew nothing of some words; the option nearest to the first of them is named."""
    if words:
        if words[0].startswith("-"):
            hint = _nearest(words[0].partition("=")[0], parser._option_string_actions)  # noqa: SLF001 - argparse has no other
        else:  # --gpu RTX 4090
            hint = _("; if they belong to a value: one with spaces needs quotes")
        fail(parser, gettext.gettext("unrecognized arguments: %s") % " ".join(words) + hint)


def _nearest(typed: str, known: Iterable[str]) -> str:
    near = get_close_matches(typed, sorted(known), n=1)
    return _("; did you mean {names}?", names=near[0]) if near else ""


class Formatter(argparse.HelpFormatter):
    """Help whose lines are as wide as they are shown."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return wrapped(text, width)

    def _fill_text(self, text: str, width: int, indent: str) -> str:
        return "\n".join(indent + line for line in wrapped(text, width - len(indent)))


@contextmanager
def argparse_locale() -> Iterator[None]:
    """Translate argparse's own messages ("usage", errors) within a ``with`` block.

    argparse looks its messages up in the process's gettext domain, in the language of the environment.
    """
    if language() == ENGLISH:
        yield
        return
    domain, variable = gettext.textdomain(), os.environ.get("LANGUAGE")
    gettext.bindtextdomain(DOMAIN, str(LOCALE))
    gettext.textdomain(DOMAIN)
    os.environ["LANGUAGE"] = language()
    try:
        yield
    finally:
        gettext.textdomain(domain)
        if variable is None:
            del os.environ["LANGUAGE"]
        else:
            os.environ["LANGUAGE"] = variable
