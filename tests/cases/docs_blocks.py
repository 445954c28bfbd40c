"""The commands of documentation pages: found in fenced blocks, run in a folder with the files that the page shows.

A page shows a file as a fenced block with ``title="configs/small.yaml"`` after its language. Its commands stand in
blocks marked ``console``::

    $ vram-guard estimate --config configs/small.yaml
    ...
    the lines that it prints

``...`` stands for what is left out. A command whose exit code is not 0 is followed by ``$ echo $?`` and that
code. What cannot be run everywhere has ``<!-- not run: reason -->`` before its block.
"""

from __future__ import annotations

import re
import shlex
from dataclasses import dataclass, field
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from packaging.requirements import Requirement

FENCE = re.compile(r"^(?P<indent> *)```(?P<info>[^\n`]*)\n(?P<body>.*?)^(?P=indent)```\s*$", re.MULTILINE | re.DOTALL)
NOT_RUN = re.compile(r"<!-- not run: (?P<reason>\S[^>]*) -->\s*$")
TITLE = re.compile(r'title="([^"]+)"')


def pinned(name: str) -> bool:
    """Whether a package is here in the release of ``constraints.txt``, which the pages' figures are of."""
    lines = (Path(__file__).parents[2] / "constraints.txt").read_text().splitlines()
    pin = next(one for one in map(Requirement, (line for line in lines if "==" in line)) if one.name == name)
    try:
        return pin.specifier.contains(version(name).partition("+")[0])
    except PackageNotFoundError:
        return False


@dataclass
class Command:
    """One command of a page."""

    text: str
    line: int
    """Of the page."""
    expected: list[str] = field(default_factory=list)
    code: int = 0

    @property
    def environment(self) -> dict[str, str]:
        """``NAME=value`` before the command."""
        words = shlex.split(self.text)
        found = {}
        for word in words:
            name, equals, value = word.partition("=")
            if not equals or not name.isidentifier():
                break
            found[name] = value
        return found

    @property
    def words(self) -> list[str]:
        """The command without its environment."""
        return shlex.split(self.text)[len(self.environment) :]


def files_of(page: Path) -> dict[str, str]:
    """Name -> content of the files that a page shows."""
    found = {}
    for match in FENCE.finditer(page.read_text(encoding="utf-8")):
        title = TITLE.search(match["info"])
        if title:
            found[title[1]] = _dedented(match)
    return found


def commands_of(page: Path) -> list[Command]:
    """The commands of a page, in order."""
    text = page.read_text(encoding="utf-8")
    found: list[Command] = []
    for match in FENCE.finditer(text):
        if match["info"].split()[:1] != ["console"] or NOT_RUN.search(text, 0, match.start()):
            continue
        first = text.count("\n", 0, match.start("body")) + 1
        block: list[Command] = []
        lines = enumerate(_dedented(match).splitlines(), first)
        for number, line in lines:
            if line == "$ echo $?":
                block[-1].code = int(next(lines)[1])
            elif line.startswith("$ "):
                text_of = line[2:]
                while text_of.endswith("\\"):
                    text_of = text_of[:-1] + next(lines)[1].strip()
                block.append(Command(text_of, number))
            elif block:
                block[-1].expected.append(line)
            else:
                raise ValueError(f"{page}:{number}: output without a command")
        found += block
    return found


def missing(expected: list[str], printed: str) -> str | None:
    """The first expected part that was not printed where it should be; None where all were.

    Parts are what stands between ``...``. Where a line is broken, and how columns are spaced, does not matter.
    """
    text, at = " ".join(printed.split()), 0
    for part in "\n".join(expected).split("..."):
        wanted = " ".join(part.split())
        found = text.find(wanted, at)
        if found < 0:
            return wanted
        at = found + len(wanted)
    return None


def _dedented(match: re.Match[str]) -> str:
    indent = match["indent"]
    return "".join(line.removeprefix(indent) for line in match["body"].splitlines(keepends=True))
