"""Answers of the commands: JSON for programs, lines and columns for people, messages apart from the answer."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, TextIO

from vram_guard.language import _
from vram_guard.printable import printable
from vram_guard.report.columns import columns
from vram_guard.terminal import fitting, terminal_width

if TYPE_CHECKING:
    from vram_guard.plan.comparison import Comparison

#: The format of every ``--json`` answer; raised when a key changes its meaning or goes away.
JSON_SCHEMA = 1


def say(text: str = "", file: TextIO | None = None) -> None:
    """Text on standard output, where no other stream is given; nothing is in it that a terminal would obey.

    Args:
        text: one line or several.
        file: another stream.
    """
    print(fitting(printable(text), file or sys.stdout), file=file)


def tell(text: str) -> None:
    """A message apart from the answer."""
    say(f"vram-guard: {text}", sys.stderr)


@contextmanager
def progress_shown() -> Iterator[Callable[[str], None]]:
    """A callback for ``progress=``: on a terminal, one line that each message replaces; elsewhere nothing is written.

    What the user's code prints to the terminal meanwhile stands above it; where standard output is a file, it goes
    there. No thread draws the line: processes are copied meanwhile.
    """
    if not sys.stderr.isatty():
        yield lambda _line: None
        return
    from rich.console import Console
    from rich.live import Live
    from rich.text import Text

    above = sys.stdout.isatty()
    with Live(Text(), console=Console(stderr=True), auto_refresh=False, transient=True, redirect_stdout=above) as live:
        yield lambda line: live.update(
            Text(printable(f"vram-guard: {line}", lines=False), no_wrap=True, overflow="ellipsis"), refresh=True
        )


def print_now(lines: Iterable[str]) -> None:
    """Print lines for a reader while the rest of the answer is being computed."""
    for line in lines:
        say(line)
    sys.stdout.flush()


def in_words(value: object) -> str:
    """A value for people."""
    return (_("yes") if value else _("no")) if isinstance(value, bool) else str(value)


def print_json(answer: dict[str, Any]) -> None:
    """The answer for programs, with the version of its format."""
    print(json.dumps({"schema": JSON_SCHEMA, **answer}, indent=2))


def print_columns(rows: Sequence[Sequence[str]], *, left: int) -> None:
    """Rows as aligned columns: the first ``left`` flush left, the others flush right."""
    print_now(columns(rows, to_the_right=lambda index, _cell: index >= left, width=terminal_width(sys.stdout)))


def print_comparison(answer: Comparison, *, as_json: bool) -> None:
    """A table of configurations or variants."""
    from vram_guard.report.comparison import comparison_dict, show

    if as_json:
        print_json(comparison_dict(answer))
    else:
        show(answer)
